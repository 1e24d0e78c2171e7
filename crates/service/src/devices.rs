//! The devices a program sees: one for each usable network interface.
//!
//! The order, and so the names, follow from the configuration alone: the default route's interface, then the others by
//! interface index, then bridges and virtual Ethernet pairs of container engines, then loopback where it is listed.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::ServiceError;
use crate::netlink::{self, Address, IFF_LOOPBACK, IFF_LOWER_UP, IFF_RUNNING, IFF_UP, Link};

/// What the caller wants listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListOptions {
    /// List the loopback interface also beside others (`FERROCE_LOOPBACK=1`).
    /// Without it, loopback is listed only when there is nothing else.
    pub loopback: bool,
}

/// One entry of a GID table; its index is its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// The GID as verbs has it: 16 bytes, network order; IPv4 as `::ffff:a.b.c.d`.
    pub gid: [u8; 16],
    /// The address the GID stands for (never an IPv4-mapped IPv6 address).
    pub addr: IpAddr,
}

/// One device: a network interface as verbs sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `ferroce0`, `ferroce1`, ...
    pub name: String,
    /// The network interface's name.
    pub ifname: String,
    /// The network interface's index.
    pub ifindex: u32,
    /// Node and port GUID, host byte order; never zero, the same from start to start.
    pub guid: u64,
    /// The interface's MAC address; zero where it has none.
    pub mac: [u8; 6],
    /// The interface's MTU in bytes.
    pub mtu: u32,
    /// Whether the interface is up and has a carrier. (One that is administratively down is not listed.)
    pub up: bool,
    /// Whether it is the loopback interface.
    pub loopback: bool,
    /// The GID table. It has no holes and at least 4 entries. Indices 0, 1 and 3 are routable IPv4 addresses wherever
    /// the interface has one (recipes hard-code those indices), if need be the same one; index 2 is the best IPv6
    /// address; from 4 on come further global IPv6, further IPv4 and at last link-local IPv6 addresses.
    pub gids: Vec<GidEntry>,
}

/// Lists the devices of this network namespace.
///
/// ENODEV: no interface is up and has an address; the text says what to do.
pub fn list(options: ListOptions) -> Result<Vec<DeviceInfo>, ServiceError> {
    let links = netlink::links()?;
    let addresses = netlink::addresses()?;
    let devices = build(&links, &addresses, netlink::default_route(), options, &host_identity());
    if devices.is_empty() { Err(nothing(&links)) } else { Ok(devices) }
}

fn nothing(links: &[Link]) -> ServiceError {
    let up: Vec<&str> = links.iter().filter(|link| link.flags & IFF_UP != 0).map(|link| link.name.as_str()).collect();
    let state = if up.is_empty() { "none is up".into() } else { format!("up without an address: {}", up.join(", ")) };
    ServiceError::new(
        libc::ENODEV,
        format!(
            "no RDMA device: no network interface of this network namespace is up and has an address ({state}); \
             give it one, for instance with `ip link set lo up`"
        ),
    )
}

/// An interface that becomes a device.
struct Candidate<'a> {
    link: &'a Link,
    gids: Vec<GidEntry>,
}

fn build(
    links: &[Link],
    addresses: &[Address],
    default_route: Option<u32>,
    options: ListOptions,
    host: &[u8],
) -> Vec<DeviceInfo> {
    let mut candidates: Vec<Candidate<'_>> =
        links.iter().filter(|link| link.flags & IFF_UP != 0).filter_map(|link| candidate(link, addresses)).collect();
    candidates.sort_by_key(|c| (rank(c.link, default_route), c.link.index));
    let others = candidates.iter().any(|c| c.link.flags & IFF_LOOPBACK == 0);
    candidates.retain(|c| c.link.flags & IFF_LOOPBACK == 0 || !others || options.loopback);

    let guids = guids(&candidates, host);
    candidates
        .into_iter()
        .zip(guids)
        .enumerate()
        .map(|(position, (Candidate { link, gids }, guid))| DeviceInfo {
            name: format!("ferroce{position}"),
            ifname: link.name.clone(),
            ifindex: link.index,
            guid,
            mac: link.mac.unwrap_or_default(),
            mtu: link.mtu,
            up: link.flags & (IFF_RUNNING | IFF_LOWER_UP) != 0,
            loopback: link.flags & IFF_LOOPBACK != 0,
            gids,
        })
        .collect()
}

fn candidate<'a>(link: &'a Link, addresses: &[Address]) -> Option<Candidate<'a>> {
    let usable: Vec<IpAddr> = addresses_by_rank(link, addresses);
    // A port of a bridge or bond has at most an address that nobody uses: the bridge or bond is the interface.
    if link.master != 0 && !usable.iter().any(|addr| is_routable(*addr)) {
        return None;
    }
    Some(Candidate { link, gids: gid_table(&usable)? })
}

/// Best first; among equals the kernel's order.
fn addresses_by_rank(link: &Link, addresses: &[Address]) -> Vec<IpAddr> {
    const IFA_F_TEMPORARY: u32 = 0x01;
    const IFA_F_OPTIMISTIC: u32 = 0x04;
    const IFA_F_DADFAILED: u32 = 0x08;
    const IFA_F_DEPRECATED: u32 = 0x20;
    const IFA_F_TENTATIVE: u32 = 0x40;
    let usable =
        |flags: u32| flags & IFA_F_DADFAILED == 0 && (flags & IFA_F_TENTATIVE == 0 || flags & IFA_F_OPTIMISTIC != 0);
    let mut found: Vec<(u32, IpAddr)> = addresses
        .iter()
        .filter(|address| address.ifindex == link.index && (address.addr.is_ipv4() || usable(address.flags)))
        .filter(|address| !address.addr.is_unspecified() && !address.addr.is_multicast())
        .map(|address| {
            // IFA_F_TEMPORARY means "secondary" for IPv4.
            let lesser = IFA_F_DEPRECATED | if address.addr.is_ipv6() { IFA_F_TEMPORARY } else { 0 };
            (address.flags & lesser, address.addr)
        })
        .collect();
    found.sort_by_key(|(lesser, addr)| (!is_routable(*addr), *lesser));
    found.into_iter().map(|(_, addr)| addr).collect()
}

/// Not link-local. (Loopback addresses are good between the programs of one host.)
fn is_routable(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(v4) => !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_unicast_link_local(),
    }
}

/// Lays out the table that [`DeviceInfo::gids`] describes; None without any address.
fn gid_table(ranked: &[IpAddr]) -> Option<Vec<GidEntry>> {
    const ENTRIES_MIN: usize = 4;
    let of = |v4: bool, routable: bool| {
        ranked.iter().copied().filter(move |addr| addr.is_ipv4() == v4 && is_routable(*addr) == routable)
    };
    let mut v4 = of(true, true).collect::<Vec<_>>().into_iter();
    let mut v6 = of(false, true).collect::<Vec<_>>().into_iter();
    let link_local_v4 = of(true, false);
    let mut link_local_v6 = of(false, false).collect::<Vec<_>>().into_iter();

    let mut table = Vec::new();
    if let Some(first) = v4.next() {
        table.push(first);
        table.push(v4.next().unwrap_or(first));
        let third = v4.next();
        table.push(v6.next().or_else(|| link_local_v6.next()).unwrap_or(first));
        table.push(third.unwrap_or(first));
    }
    table.extend(v6);
    table.extend(v4);
    table.extend(link_local_v4);
    table.extend(link_local_v6);
    let first = *table.first()?;
    table.resize(table.len().max(ENTRIES_MIN), first);
    Some(table.into_iter().map(gid_entry).collect())
}

fn gid_entry(addr: IpAddr) -> GidEntry {
    let gid = match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    GidEntry { gid, addr }
}

/// 0: default route; 1: ordinary; 2: container engines'; 3: loopback.
fn rank(link: &Link, default_route: Option<u32>) -> u32 {
    const CONTAINER_NAMES: [&str; 6] = ["docker", "br-", "veth", "virbr", "cni", "flannel"];
    const CONTAINER_KINDS: [&str; 2] = ["bridge", "veth"];
    if Some(link.index) == default_route {
        0
    } else if link.flags & IFF_LOOPBACK != 0 {
        3
    } else if CONTAINER_NAMES.iter().any(|name| link.name.starts_with(name))
        || CONTAINER_KINDS.contains(&link.kind.as_str())
    {
        2
    } else {
        1
    }
}

/// EUI-64 from the MAC address. Where there is none, or an interface with a lower index has the same (a VLAN and its
/// parent), from the identity of the host and the interface's name.
fn guids(candidates: &[Candidate<'_>], host: &[u8]) -> Vec<u64> {
    let mut by_index: Vec<usize> = (0..candidates.len()).collect();
    by_index.sort_by_key(|position| candidates[*position].link.index);
    let mut taken = HashSet::new();
    let mut guids = vec![0; candidates.len()];
    for position in by_index {
        let link = candidates[position].link;
        let mut guid = link.mac.map(eui64).unwrap_or_else(|| named_guid(host, &link.name, 0));
        let mut salt = 0;
        while !taken.insert(guid) {
            guid = named_guid(host, &link.name, salt);
            salt += 1;
        }
        guids[position] = guid;
    }
    guids
}

fn eui64([a, b, c, d, e, f]: [u8; 6]) -> u64 {
    u64::from_be_bytes([a ^ 0x02, b, c, 0xff, 0xfe, d, e, f])
}

/// FNV-1a, then a mixing step: stable from version to version, as GUIDs must be. Marked as locally administered.
fn named_guid(host: &[u8], ifname: &str, salt: u8) -> u64 {
    const LOCALLY_ADMINISTERED: u64 = 0x02 << 56;
    let end = [0, salt];
    let bytes = host.iter().chain(&[0]).chain(ifname.as_bytes()).chain(&end);
    let mut hash = bytes
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3));
    hash = (hash ^ (hash >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (hash ^ (hash >> 32)) | LOCALLY_ADMINISTERED
}

/// What tells this host from others: the machine id (images of containers often share or lack it) and the host name.
fn host_identity() -> Vec<u8> {
    let mut identity = std::fs::read("/etc/machine-id").unwrap_or_default();
    identity.extend_from_slice(rustix::system::uname().nodename().to_bytes());
    identity
}

/// Tells when interfaces or addresses change.
#[derive(Debug)]
pub struct DeviceWatch {
    fd: OwnedFd,
}

impl DeviceWatch {
    /// Starts watching this network namespace.
    pub fn new() -> Result<DeviceWatch, ServiceError> {
        let fd = netlink::changes()
            .map_err(|errno| ServiceError::system("cannot watch the network interfaces for changes", errno))?;
        Ok(DeviceWatch { fd })
    }

    /// Readable when something changed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Takes what was reported; never blocks. True if [`list`] may give something else now. Not everything at once if
    /// changes come faster than they are taken: `fd` stays readable then.
    pub fn drain(&self) -> bool {
        const READS_MAX: usize = 256;
        let mut changed = false;
        let mut buffer = [0u8; 64];
        for _ in 0..READS_MAX {
            match rustix::net::recv(&self.fd, &mut buffer[..], RecvFlags::DONTWAIT) {
                // Which change it was does not matter: the rest of a message is cut off.
                Ok(_) | Err(Errno::NOBUFS) => changed = true,
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        changed
    }
}

impl DeviceInfo {
    /// The IPv4 address of GID 0, if the interface has one.
    pub fn primary_ipv4(&self) -> Option<Ipv4Addr> {
        match self.gids.first()?.addr {
            IpAddr::V4(v4) => Some(v4),
            IpAddr::V6(_) => None,
        }
    }
}

#[cfg(test)]
#[path = "devices_tests.rs"]
mod tests;
