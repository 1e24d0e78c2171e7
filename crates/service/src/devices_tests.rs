use super::*;

const HOST: &[u8] = b"0123456789abcdef host";

fn link(index: u32, name: &str) -> Link {
    Link {
        index,
        name: name.into(),
        flags: IFF_UP | IFF_RUNNING,
        mtu: 1500,
        mac: Some([0x02, 0, 0, 0, 0, index as u8]),
        ..Link::default()
    }
}

fn lo() -> Link {
    Link { flags: IFF_UP | IFF_RUNNING | IFF_LOOPBACK, mac: None, mtu: 65_536, ..link(1, "lo") }
}

fn address(ifindex: u32, addr: &str) -> Address {
    Address { ifindex, addr: addr.parse().unwrap(), flags: 0 }
}

fn names(devices: &[DeviceInfo]) -> Vec<(&str, &str)> {
    devices.iter().map(|device| (device.name.as_str(), device.ifname.as_str())).collect()
}

fn table(ranked: &[&str]) -> Vec<String> {
    let ranked: Vec<IpAddr> = ranked.iter().map(|addr| addr.parse().unwrap()).collect();
    gid_table(&ranked).unwrap().iter().map(|entry| entry.addr.to_string()).collect()
}

#[test]
fn default_route_first_containers_last_loopback_on_request() {
    let links = [
        lo(),
        link(2, "eth0"),
        link(3, "docker0"),
        link(4, "wlan0"),
        Link { kind: "veth".into(), ..link(5, "net1") },
        link(6, "down0"),
        link(7, "noaddr0"),
    ];
    let mut links = links;
    links[5].flags = 0;
    let addresses = [
        address(1, "127.0.0.1"),
        address(2, "10.0.0.1"),
        address(3, "172.17.0.1"),
        address(4, "192.168.0.7"),
        address(5, "10.1.0.1"),
        address(6, "10.2.0.1"),
    ];
    let devices = build(&links, &addresses, Some(4), ListOptions::default(), HOST);
    let expected = [("ferroce0", "wlan0"), ("ferroce1", "eth0"), ("ferroce2", "docker0"), ("ferroce3", "net1")];
    assert_eq!(names(&devices), expected);
    assert_eq!(devices[0].primary_ipv4(), Some(Ipv4Addr::new(192, 168, 0, 7)));

    let devices = build(&links, &addresses, Some(4), ListOptions { loopback: true }, HOST);
    assert_eq!(names(&devices).last(), Some(&("ferroce4", "lo")));
    assert!(devices[4].loopback);
}

#[test]
fn loopback_is_listed_when_it_is_all_there_is() {
    let devices = build(&[lo()], &[address(1, "127.0.0.1"), address(1, "::1")], None, ListOptions::default(), HOST);
    assert_eq!(names(&devices), [("ferroce0", "lo")]);
    assert_eq!(devices[0].mac, [0; 6]);
    assert_ne!(devices[0].guid, 0);
}

#[test]
fn a_namespace_without_anything_says_so() {
    let down = Link { flags: IFF_LOOPBACK, ..lo() };
    assert!(build(std::slice::from_ref(&down), &[], None, ListOptions::default(), HOST).is_empty());
    let error = nothing(&[down]);
    assert_eq!(error.errno(), libc::ENODEV);
    assert!(error.to_string().contains("none is up"), "{error}");
    assert!(error.to_string().contains("ip link set lo up"), "{error}");
}

#[test]
fn bridge_ports_with_only_a_link_local_address_are_no_devices() {
    let port = Link { master: 9, ..link(2, "eth0") };
    let bridge = Link { kind: "bridge".into(), ..link(9, "br0") };
    let addresses = [address(2, "fe80::1"), address(9, "10.0.0.1"), address(9, "fe80::2")];
    let devices = build(&[port, bridge], &addresses, Some(9), ListOptions::default(), HOST);
    assert_eq!(names(&devices), [("ferroce0", "br0")]);
}

#[test]
fn the_indices_of_recipes_are_routable_ipv4() {
    assert_eq!(table(&["10.0.0.1"]), ["10.0.0.1"; 4]);
    assert_eq!(table(&["10.0.0.1", "fe80::1"]), ["10.0.0.1", "10.0.0.1", "fe80::1", "10.0.0.1"]);
    assert_eq!(
        table(&["fd00::1", "10.0.0.1", "fd00::2", "10.0.0.2", "10.0.0.3", "10.0.0.4", "fe80::1", "169.254.0.9"]),
        ["10.0.0.1", "10.0.0.2", "fd00::1", "10.0.0.3", "fd00::2", "10.0.0.4", "169.254.0.9", "fe80::1"]
    );
}

#[test]
fn a_table_without_ipv4_is_padded_with_its_best_entry() {
    assert_eq!(table(&["fd00::1", "fe80::1"]), ["fd00::1", "fe80::1", "fd00::1", "fd00::1"]);
    assert_eq!(table(&["fe80::1"]), ["fe80::1"; 4]);
    assert!(gid_table(&[]).is_none());
}

#[test]
fn gids_are_mapped_as_rocev2_has_it() {
    let entry = gid_entry("192.0.2.1".parse().unwrap());
    assert_eq!(entry.gid, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1]);
}

#[test]
fn unusable_ipv6_addresses_are_left_out_and_passing_ones_come_late() {
    let link = link(2, "eth0");
    let flagged = |addr, flags| Address { flags, ..address(2, addr) };
    let addresses = [
        flagged("fd00::a", 0x40),        // tentative
        flagged("fd00::b", 0x08 | 0x80), // duplicate
        flagged("fd00::c", 0x01),        // temporary
        flagged("fd00::d", 0x20),        // deprecated
        flagged("fd00::e", 0x80),
        address(3, "fd00::f"),
    ];
    let ranked: Vec<String> = addresses_by_rank(&link, &addresses).iter().map(IpAddr::to_string).collect();
    assert_eq!(ranked, ["fd00::e", "fd00::c", "fd00::d"]);
}

#[test]
fn guids_are_eui64_unique_and_stable() {
    let vlan = Link { mac: link(2, "eth0").mac, ..link(5, "eth0.7") };
    let links = [link(2, "eth0"), vlan, lo()];
    let addresses = [address(2, "10.0.0.1"), address(5, "10.0.7.1"), address(1, "127.0.0.1")];
    let all = ListOptions { loopback: true };
    let devices = build(&links, &addresses, Some(5), all, HOST);
    assert_eq!(names(&devices)[0].1, "eth0.7");
    assert_eq!(devices[1].guid, 0x0000_00ff_fe00_0002, "the parent keeps the EUI-64 wherever it is listed");
    let guids: HashSet<u64> = devices.iter().map(|device| device.guid).collect();
    assert_eq!(guids.len(), 3);
    assert!(!guids.contains(&0));
    assert_eq!(build(&links, &addresses, Some(5), all, HOST), devices);

    let elsewhere = build(&links, &addresses, Some(5), all, b"another host");
    assert_ne!(elsewhere[2].guid, devices[2].guid, "two hosts' loopback differs");
}

#[test]
fn this_machine_has_devices_and_a_watch_starts_quiet() {
    let devices = list(ListOptions { loopback: true }).unwrap();
    let lo = devices.iter().find(|device| device.loopback).unwrap();
    assert!(lo.gids.iter().any(|entry| entry.addr == IpAddr::V4(Ipv4Addr::LOCALHOST)), "{lo:?}");
    assert!(devices.iter().all(|device| device.gids.len() >= 4 && device.guid != 0));
    DeviceWatch::new().unwrap().drain();
}
