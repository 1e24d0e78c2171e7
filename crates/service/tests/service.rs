//! The service in a thread of the test, with real sockets on loopback.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ferroce_service::client::{Client, LaneLease, Relayed, StartOptions};
use ferroce_service::cm::client::EventChannel;
use ferroce_service::cm::protocol::{CmRequest, Ece, Param};
use ferroce_service::cm::route;
use ferroce_service::config::{Limits, ProcessLimits, UserLimits};
use ferroce_service::protocol::{Counters, RingCall, RingStep, Status};
use ferroce_service::server::{Hosted, LANES_PER_CLIENT_MAX, ServerOptions, Service, raise_descriptor_limit};
use ferroce_testkit::{free_name, free_port};
use ferroce_wire::NetHeader;
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

/// A name and a port for one test.
fn server_options() -> ServerOptions {
    // Some tests have many clients and lanes, and all tests may run at once.
    raise_descriptor_limit();
    ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() }
}

fn client_options(service: &ServerOptions) -> StartOptions {
    StartOptions {
        name: service.name.clone(),
        port: service.port,
        program: "test".into(),
        // A busy machine is not a fault.
        patience: Duration::from_secs(60),
        ..StartOptions::default()
    }
}

fn host() -> (Hosted, StartOptions) {
    let options = server_options();
    let client = client_options(&options);
    (Service::spawn_in_process(options).unwrap(), client)
}

fn connect(options: &StartOptions) -> Client {
    Client::connect(options).unwrap()
}

/// Asks until the status is as wanted.
fn wait_for(client: &Client, wanted: impl Fn(&Status) -> bool) -> Status {
    let give_up = Instant::now() + Duration::from_secs(60);
    loop {
        let status = client.status().unwrap();
        if wanted(&status) {
            return status;
        }
        assert!(Instant::now() < give_up, "{status:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A base transport header for a QP number of the lane, and a tag.
fn packet(lane: u16, tag: u8) -> [u8; 16] {
    let mut bytes = [0xa5; 16];
    let qpn = u32::from(lane) << 14 | 0x11;
    bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
    bytes[15] = tag;
    bytes
}

/// The packet with its ICRC, as a socket that sets Don't Fragment sends it.
fn sealed(packet: &[u8], src: SocketAddr, dst: IpAddr) -> Vec<u8> {
    let udp_len = (packet.len() + 4) as u16;
    let net = NetHeader { src: src.ip(), dst, src_port: src.port(), tclass: 0, hop_limit: 64, udp_len, ifindex: 0 };
    let icrc = ferroce_wire::icrc::icrc_over(&net, 0, packet);
    [packet, &icrc.to_le_bytes()].concat()
}

/// Tags of all packets that came; waits for the first one.
fn received(socket: &OwnedFd) -> Vec<u8> {
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit)), Ok(1), "nothing came");
    let mut buffer = [0; 64];
    std::iter::from_fn(|| {
        let (len, _) = rustix::net::recv(socket, &mut buffer[..], RecvFlags::DONTWAIT).ok()?;
        assert_eq!(len, 16);
        Some(buffer[15])
    })
    .collect()
}

fn relayed(lease: &LaneLease) -> (SocketAddr, IpAddr, Vec<u8>) {
    let give_up = Instant::now() + Duration::from_secs(60);
    let mut buffer = Vec::new();
    while Instant::now() < give_up {
        if let Some(packet) = lease.relay_recv(&mut buffer).unwrap().and_then(Relayed::packet) {
            return (packet.src, packet.dst, packet.bytes.to_vec());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("the relay brought nothing");
}

fn ring_call(lease: &LaneLease) -> (RingCall, Vec<OwnedFd>) {
    let give_up = Instant::now() + Duration::from_secs(60);
    let mut buffer = Vec::new();
    while Instant::now() < give_up {
        match lease.relay_recv(&mut buffer).unwrap() {
            Some(Relayed::Ring(call, descriptors)) => return (call, descriptors),
            Some(Relayed::Packet(packet)) => panic!("a packet came: {packet:?}"),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    panic!("the relay brought nothing");
}

#[test]
fn a_leased_lane_gets_its_packets_and_nobody_elses() {
    let (_service, options) = host();
    let client = connect(&options);
    let mut leases: Vec<LaneLease> = (0..5).map(|_| client.lease_lane().unwrap()).collect();
    let sockets: Vec<OwnedFd> = leases.iter_mut().map(|lease| lease.take_rx().pop().unwrap()).collect();
    assert!(leases[0].take_rx().is_empty());
    let lanes: Vec<u16> = leases.iter().map(LaneLease::lane).collect();
    let seeds: std::collections::HashSet<u64> = leases.iter().map(LaneLease::seed).collect();
    assert_eq!(seeds.len(), 5);

    for (from, to) in [("127.0.0.1", "127.0.0.1"), ("::1", "::1")] {
        let sender = UdpSocket::bind((from, 0)).unwrap();
        for (tag, lane) in (0..).zip(&lanes) {
            sender.send_to(&packet(*lane, tag), (to, options.port)).unwrap();
        }
        for (tag, socket) in (0..).zip(&sockets) {
            assert_eq!(received(socket), [tag]);
        }
    }

    let status = client.status().unwrap();
    assert_eq!((status.port, status.pid), (options.port, std::process::id()));
    assert_eq!(status.clients.len(), 1);
    let mut sorted = lanes.clone();
    sorted.sort_unstable();
    let held = &status.clients[0];
    assert_eq!((held.program.as_str(), held.pid, &held.lanes), ("test", std::process::id(), &sorted));
}

#[test]
fn lanes_come_back_by_release_by_drop_and_with_their_client() {
    let (_service, options) = host();
    let (observer, client) = (connect(&options), connect(&options));
    let mut lanes = Vec::new();
    let mut lease = || {
        let lease = client.lease_lane().unwrap();
        lanes.push(lease.lane());
        lease
    };

    lease().release().unwrap();
    assert!(observer.status().unwrap().clients.iter().all(|client| client.lanes.is_empty()));

    drop(lease());
    wait_for(&observer, |status| status.clients.iter().all(|client| client.lanes.is_empty()));

    let (kept, also_kept) = (lease(), lease());
    drop(client);
    let status = observer.status().unwrap();
    assert_eq!(status.clients.len(), 2, "a lease keeps its connection");
    drop(kept);
    wait_for(&observer, |status| status.clients.iter().any(|client| client.lanes == [also_kept.lane()]));
    drop(also_kept);
    let status = wait_for(&observer, |status| status.clients.len() == 1 && status.lingering == 0);
    assert!(status.sockets <= 3, "{status:?}");

    let different: std::collections::HashSet<u16> = lanes.iter().copied().collect();
    assert_eq!(different.len(), lanes.len(), "numbers are not used again soon");
}

#[test]
fn a_released_lane_whose_socket_is_kept_is_counted_until_it_goes() {
    let (_service, options) = host();
    let client = connect(&options);
    let mut lease = client.lease_lane().unwrap();
    let socket = lease.take_rx();
    lease.release().unwrap();
    wait_for(&client, |status| status.lingering == 1);
    drop(socket);
    wait_for(&client, |status| status.lingering == 0);
}

#[test]
fn one_program_gets_no_more_than_its_share_of_lanes() {
    let (_service, options) = host();
    let client = connect(&options);
    let leases: Vec<LaneLease> = (0..LANES_PER_CLIENT_MAX).map(|_| client.lease_lane().unwrap()).collect();
    let error = client.lease_lane().unwrap_err();
    assert_eq!(error.errno(), libc::ENOSPC);
    assert!(error.to_string().contains("has 64 lanes already, and limits.process.lanes is 64"), "{error}");
    connect(&options).lease_lane().unwrap();
    drop(leases);
    wait_for(&client, |status| status.clients.iter().all(|client| client.lanes.is_empty()));
    client.lease_lane().unwrap();
}

/// A service with limits.
fn limited(limits: Limits) -> (Hosted, StartOptions) {
    let options = ServerOptions { limits, ..server_options() };
    let client = client_options(&options);
    (Service::spawn_in_process(options).unwrap(), client)
}

#[test]
fn one_user_gets_no_more_than_its_share() {
    let user = UserLimits { programs: Some(3), lanes: Some(2), ..UserLimits::default() };
    let (_service, options) = limited(Limits { user, ..Limits::default() });
    let clients = [connect(&options), connect(&options), connect(&options)];
    let refused = Client::connect(&options).unwrap_err();
    assert_eq!(refused.errno(), libc::EUSERS);
    assert!(refused.to_string().contains("limits.user.programs is 3"), "{refused}");

    let lease = clients[0].lease_lane().unwrap();
    let _other = clients[1].lease_lane().unwrap();
    let refused = clients[2].lease_lane().unwrap_err();
    assert_eq!(refused.errno(), libc::ENOSPC);
    assert!(refused.to_string().contains("the user has 2 lanes already, and limits.user.lanes is 2"), "{refused}");
    lease.release().unwrap();
    clients[2].lease_lane().unwrap();
    assert_eq!(clients[0].status().unwrap().limits.user, user);
}

#[test]
fn listeners_and_connections_that_are_being_made_have_limits() {
    let process = ProcessLimits { listeners: 2, pending_connections: 3, ..ProcessLimits::default() };
    let user = UserLimits { listeners: 3, ..UserLimits::default() };
    let (_service, options) = limited(Limits { process, user });
    let clients = [connect(&options), connect(&options)];
    let lanes = clients.each_ref().map(|client| client.lease_lane().unwrap());
    let channels = clients.each_ref().map(|client| EventChannel::open(client).unwrap());
    let listen = |at: usize| {
        let id = clients[at].cm_create_id(&channels[at], 0x0106, false).unwrap();
        let addr = clients[at].cm_bind(id, "127.0.0.1:0".parse().unwrap(), false, false).unwrap();
        clients[at].cm(CmRequest::Listen { id, backlog: 0 }).map(|()| (id, addr))
    };
    let refused = |error: ferroce_service::ServiceError, limit: &str| {
        assert_eq!(error.errno(), libc::ENOMEM);
        assert!(error.to_string().contains(limit), "{error}");
    };
    let (first, addr) = listen(0).unwrap();
    listen(0).unwrap();
    refused(listen(0).unwrap_err(), "the program has 2 listeners already, and limits.process.listeners is 2");
    listen(1).unwrap();
    refused(listen(1).unwrap_err(), "the user has 3 listeners already, and limits.user.listeners is 3");

    // The listener answers none of them.
    let path = route::resolve(addr, None).unwrap().path;
    let ask = |tag: u32| {
        let id = clients[1].cm_create_id(&channels[1], 0x0106, false).unwrap();
        let param = Param { qpn: u32::from(lanes[1].lane()) << 14 | tag, ..Param::default() };
        let (port, private_data, ece) = (addr.port(), Vec::new(), Ece::default());
        clients[1].cm(CmRequest::Connect { id, path, port, param, private_data, ece })
    };
    for tag in 1..=3 {
        ask(tag).unwrap();
    }
    refused(ask(4).unwrap_err(), "limits.process.pending_connections is 3");
    let status = clients[0].status().unwrap();
    let used = |at: usize| (status.clients[at].listeners, status.clients[at].pending);
    assert_eq!(used(1), (1, 3));
    // Others are not held up, and what ends makes room.
    clients[0].cm(CmRequest::Destroy { id: first }).unwrap();
    listen(0).unwrap();
}

#[test]
fn ids_and_event_channels_have_limits() {
    let process = ProcessLimits { ids: 3, event_channels: 2, descriptors: 6, ..ProcessLimits::default() };
    let user = UserLimits { ids: Some(4), event_channels: Some(3), ..UserLimits::default() };
    let (_service, options) = limited(Limits { process, user });
    let clients = [connect(&options), connect(&options)];
    let refused = |error: ferroce_service::ServiceError, errno: i32, limit: &str| {
        assert_eq!(error.errno(), errno);
        assert!(error.to_string().contains(limit), "{error}");
    };
    let mut channels = vec![EventChannel::open(&clients[0]).unwrap(), EventChannel::open(&clients[0]).unwrap()];
    let error = EventChannel::open(&clients[0]).unwrap_err();
    refused(error, libc::EMFILE, "the program has 2 event channels already, and limits.process.event_channels is 2");
    channels.push(EventChannel::open(&clients[1]).unwrap());
    refused(EventChannel::open(&clients[1]).unwrap_err(), libc::EMFILE, "limits.user.event_channels is 3");

    let id = |client: usize, channel: usize| clients[client].cm_create_id(&channels[channel], 0x0106, false);
    let first = id(0, 0).unwrap();
    id(0, 1).unwrap();
    id(0, 1).unwrap();
    refused(id(0, 0).unwrap_err(), libc::ENOMEM, "the program has 3 ids already, and limits.process.ids is 3");
    id(1, 2).unwrap();
    refused(id(1, 2).unwrap_err(), libc::ENOMEM, "the user has 4 ids already, and limits.user.ids is 4");
    clients[0].cm(CmRequest::Destroy { id: first }).unwrap();
    id(1, 2).unwrap();

    // Two for its connection and two for event channels: a lane takes two more, and there is none for another.
    let lane = clients[0].lease_lane().unwrap();
    let error = clients[0].lease_lane().unwrap_err();
    refused(
        error,
        libc::EMFILE,
        "the program has 6 descriptors of the service already, and limits.process.descriptors is 6",
    );
    lane.release().unwrap();
    let status = clients[0].status().unwrap();
    let used = |at: usize| (status.clients[at].channels, status.clients[at].ids);
    assert_eq!([used(0), used(1)], [(2, 2), (1, 2)]);
    drop(channels);
    wait_for(&clients[0], |status| status.clients.iter().all(|client| client.channels == 0 && client.ids == 0));
    EventChannel::open(&clients[1]).unwrap();
}

/// All lanes and listeners that it can have, relays full of nonsense, and nothing is ever given back: others go on.
#[test]
fn a_program_that_takes_all_it_can_costs_nobody_else() {
    let process = ProcessLimits { lanes: 4, listeners: 50, ..ProcessLimits::default() };
    let (_service, options) = limited(Limits { process, ..Limits::default() });
    let (hostile, other) = (connect(&options), connect(&options));
    let channel = EventChannel::open(&hostile).unwrap();
    let leases: Vec<LaneLease> = std::iter::from_fn(|| hostile.lease_lane().ok()).collect();
    let listen = |client: &Client, channel: &EventChannel| {
        let id = client.cm_create_id(channel, 0x0106, false).unwrap();
        client.cm_bind(id, "127.0.0.1:0".parse().unwrap(), false, false).unwrap();
        client.cm(CmRequest::Listen { id, backlog: 0 })
    };
    let listeners = std::iter::from_fn(|| listen(&hostile, &channel).ok()).count();
    assert_eq!((leases.len(), listeners), (4, 50));

    let nonsense = [0x5a; 3000];
    let mut handed_in = 0;
    for round in 0..2000 {
        handed_in += u64::from(leases[round % 4].relay_send_raw(&nonsense[..1 + round]).unwrap());
    }
    let lease = other.lease_lane().unwrap();
    let own = EventChannel::open(&other).unwrap();
    listen(&other, &own).unwrap();
    assert!(
        lease
            .relay_send("10.0.0.1:1".parse().unwrap(), "10.0.0.2".parse().unwrap(), &packet(leases[0].lane(), 1))
            .unwrap()
    );
    let status = wait_for(&other, |status| status.counters.relay_in == handed_in + 1);
    assert_eq!((status.counters.relay_out, status.counters.drop_short), (1, handed_in));

    drop((leases, channel, hostile));
    let status = wait_for(&other, |status| status.clients.len() == 1 && status.lingering == 0);
    assert_eq!((status.clients[0].lanes.len(), status.clients[0].listeners), (1, 1));
}

#[test]
fn a_port_in_use_is_told_with_its_holder_and_can_be_had_later() {
    let (_service, options) = host();
    let holder = UdpSocket::bind(("0.0.0.0", options.port)).unwrap();
    let client = connect(&options);
    let error = client.lease_lane().unwrap_err();
    assert_eq!(error.errno(), libc::EADDRINUSE);
    let text = error.to_string();
    assert!(text.contains(&format!("port {}", options.port)), "{text}");
    assert!(text.contains(&format!("(pid {})", std::process::id())), "{text}");
    drop(holder);
    client.lease_lane().unwrap();
}

#[test]
fn foreign_packets_reach_the_right_lane_by_the_relay() {
    let (_service, options) = host();
    let (client, other) = (connect(&options), connect(&options));
    let (here, there) = (client.lease_lane().unwrap(), other.lease_lane().unwrap());
    let src: SocketAddr = "10.0.0.1:50000".parse().unwrap();
    let dst: IpAddr = "fd00::7".parse().unwrap();

    assert!(here.relay_send(src, dst, &packet(there.lane(), 1)).unwrap());
    assert_eq!(relayed(&there), (src, dst, packet(there.lane(), 1).to_vec()));
    assert!(there.relay_send(src, dst, &packet(here.lane(), 2)).unwrap());
    assert_eq!(relayed(&here), (src, dst, packet(here.lane(), 2).to_vec()));

    let nobody = (1..).find(|lane| *lane != here.lane() && *lane != there.lane()).unwrap();
    assert!(here.relay_send(src, dst, &packet(nobody, 3)).unwrap());
    assert!(here.relay_send(src, dst, &packet(here.lane(), 4)).unwrap());
    assert!(here.relay_send(src, dst, &[1, 2, 3]).unwrap());
    let status = wait_for(&client, |status| status.counters.relay_in == 5);
    let expected = Counters {
        relay_in: 5,
        relay_out: 2,
        astray: 2,
        drop_no_lane: 1,
        drop_loop: 1,
        drop_short: 1,
        // What went astray has the order doubted, and perhaps found out.
        probings: status.counters.probings,
        ..Counters::default()
    };
    assert_eq!(status.counters, expected);
    assert!(here.relay_recv(&mut Vec::new()).unwrap().is_none());
}

#[test]
fn word_about_rings_reaches_the_lease_that_is_meant_and_no_other() {
    let (_service, options) = host();
    let (client, other) = (connect(&options), connect(&options));
    let (here, there) = (client.lease_lane().unwrap(), other.lease_lane().unwrap());
    assert_eq!(client.lease_of(there.lane()).unwrap(), Some(there.id()));
    assert_eq!(other.lease_of(here.lane()).unwrap(), Some(here.id()));
    let free = (1..).find(|lane| *lane != here.lane() && *lane != there.lane()).unwrap();
    assert_eq!(client.lease_of(free).unwrap(), None);

    // The receiver learns who speaks from the service, not from the speaker.
    let memory = ring_memory();
    let call = RingCall { step: RingStep::Offer, lane: there.lane(), lease: there.id(), id: 7, wake: [9; 16] };
    assert!(here.ring_send(&call, Some(memory.as_fd())).unwrap());
    let (heard, mut descriptors) = ring_call(&there);
    assert_eq!(heard, RingCall { lane: here.lane(), lease: here.id(), ..call });
    let received = descriptors.pop().unwrap();
    assert!(descriptors.is_empty());
    let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
    assert_eq!(inode(&received), inode(&memory));
    drop(received);
    // The service has answered after it passed it on, and so has kept nothing of it.
    client.status().unwrap();
    let links =
        std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| std::fs::metadata(entry.ok()?.path()).ok());
    let copies = links.filter(|file| std::os::unix::fs::MetadataExt::ino(file) == inode(&memory)).count();
    assert_eq!(copies, 1);
    let answer = RingCall { step: RingStep::Accept, lane: here.lane(), lease: here.id(), ..call };
    assert!(there.ring_send(&answer, None).unwrap());
    let (heard, descriptors) = ring_call(&here);
    assert_eq!(heard, RingCall { lane: there.lane(), lease: there.id(), ..answer });
    assert!(descriptors.is_empty());

    let wrong = [
        (RingCall { lease: there.id() ^ 1, ..call }, true),
        (RingCall { lease: 0, ..call }, true),
        (RingCall { lane: free, ..call }, true),
        (RingCall { lane: here.lane(), lease: here.id(), ..call }, true),
        (call, false),
    ];
    for (call, with_memory) in wrong {
        assert!(here.ring_send(&call, with_memory.then(|| memory.as_fd())).unwrap());
    }
    let status = wait_for(&client, |status| status.counters.relay_in == 7);
    let expected =
        Counters { relay_in: 7, relay_out: 2, drop_no_lane: 3, drop_loop: 1, drop_short: 1, ..Counters::default() };
    assert_eq!(status.counters, expected);
    assert!(there.relay_recv(&mut Vec::new()).unwrap().is_none());

    // The lane may be another's tomorrow; its old lease is nobody's for good.
    let (lane, lease) = (there.lane(), there.id());
    there.release().unwrap();
    assert_eq!(client.lease_of(lane).unwrap(), None);
    assert!(here.ring_send(&RingCall { lane, lease, ..call }, Some(memory.as_fd())).unwrap());
    wait_for(&client, |status| status.counters.drop_no_lane == 4);
}

/// As `ferroce-link` makes it.
fn ring_memory() -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags};
    let memory = rustix::fs::memfd_create("ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memory, (1 << 20) + 4096).unwrap();
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    memory
}

#[test]
fn a_relay_that_is_not_emptied_drops_and_counts() {
    let (_service, options) = host();
    let client = connect(&options);
    let (here, there) = (client.lease_lane().unwrap(), client.lease_lane().unwrap());
    let (src, dst) = ("10.0.0.1:50000".parse().unwrap(), "10.0.0.2".parse().unwrap());
    let mut large = vec![0; 60_000];
    large[..16].copy_from_slice(&packet(there.lane(), 0));
    let mut handed_in = 0;
    let status = loop {
        handed_in += u64::from(here.relay_send(src, dst, &large).unwrap());
        let status = client.status().unwrap();
        if status.counters.drop_full > 0 {
            break wait_for(&client, |status| status.counters.relay_in == handed_in);
        }
        assert!(handed_in < 10_000, "{status:?}");
    };
    let counters = status.counters;
    assert_eq!(counters.relay_out + counters.drop_full, handed_in);
    let mut buffer = Vec::new();
    for _ in 0..counters.relay_out {
        assert_eq!(there.relay_recv(&mut buffer).unwrap().and_then(Relayed::packet).unwrap().bytes, large);
    }
    assert!(there.relay_recv(&mut buffer).unwrap().is_none());
}

#[test]
fn strays_are_counted_with_a_reason() {
    let (_service, options) = host();
    let client = connect(&options);
    let lease = client.lease_lane().unwrap();
    let unleased = if lease.lane() == 1 { 2 } else { 1 };
    for (from, to) in [("127.0.0.1", "127.0.0.1"), ("::1", "::1")] {
        let sender = UdpSocket::bind((from, 0)).unwrap();
        let (src, dst) = (sender.local_addr().unwrap(), to.parse().unwrap());
        for lane in [unleased, 0] {
            sender.send_to(&sealed(&packet(lane, 0), src, dst), (to, options.port)).unwrap();
        }
        let mut damaged = sealed(&packet(0, 0), src, dst);
        damaged[0] ^= 1;
        sender.send_to(&damaged, (to, options.port)).unwrap();
        sender.send_to(&[1, 2, 3], (to, options.port)).unwrap();
    }
    let status = wait_for(&client, |status| status.counters.strays == 8);
    let expected = Counters { strays: 8, drop_no_lane: 4, drop_short: 2, drop_icrc: 2, ..Counters::default() };
    assert_eq!(status.counters, expected);
}

#[test]
fn an_idle_service_ends_and_a_used_one_does_not() {
    let options = ServerOptions { idle: Some(Duration::from_millis(50)), ..server_options() };
    let client = client_options(&options);
    let service = Service::bind(options).unwrap();
    // There before it runs: it must not end while nobody has had the time to connect.
    let first = Raw::new(&client);
    let thread = std::thread::spawn(move || service.run());
    let lease = connect(&client).lease_lane().unwrap();
    drop(first);
    std::thread::sleep(Duration::from_millis(200));
    assert!(!thread.is_finished());
    lease.release().unwrap();
    thread.join().unwrap().unwrap();
    let error = Client::connect(&client).unwrap_err();
    assert_eq!(error.errno(), libc::ECONNREFUSED);
}

#[test]
fn the_name_is_bound_once() {
    let options = server_options();
    let _first = Service::bind(options.clone()).unwrap();
    let error = Service::bind(options).unwrap_err();
    assert_eq!(error.errno(), libc::EADDRINUSE);
}

#[test]
fn clients_learn_that_the_service_has_ended() {
    let (service, options) = host();
    let client = connect(&options);
    let lease = client.lease_lane().unwrap();
    drop(service);
    assert_eq!(client.lease_lane().unwrap_err().errno(), libc::ECONNRESET);
    let (src, dst) = ("10.0.0.1:50000".parse().unwrap(), "10.0.0.2".parse().unwrap());
    lease.relay_send(src, dst, &packet(1, 0)).unwrap_err();
    lease.relay_recv(&mut Vec::new()).unwrap_err();
}

#[test]
fn many_clients_are_listed_page_by_page() {
    let (_service, options) = host();
    let clients: Vec<Client> = (0..150).map(|_| connect(&options)).collect();
    let status = clients[7].status().unwrap();
    assert_eq!(status.clients.len(), 150);
}

/// A connection that says what it likes.
struct Raw(OwnedFd);

impl Raw {
    fn new(options: &StartOptions) -> Raw {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let address = SocketAddrUnix::new_abstract_name(options.name.as_bytes()).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        Raw(socket)
    }

    fn send(&self, bytes: &[u8]) {
        // The service may have closed the connection already.
        let _ = rustix::net::send(&self.0, bytes, SendFlags::NOSIGNAL);
    }

    fn recv(&self) -> String {
        let mut buffer = vec![0; 65_536];
        match rustix::net::recv(&self.0, &mut buffer[..], RecvFlags::empty()) {
            Ok((len, _)) => String::from_utf8(buffer[..len].to_vec()).unwrap(),
            Err(_) => String::new(),
        }
    }
}

#[test]
fn wrong_requests_are_answered_with_what_is_wrong() {
    let (_service, options) = host();
    let ask = |messages: &[&str]| {
        let raw = Raw::new(&options);
        let answer = |message: &&str| {
            raw.send(message.as_bytes());
            raw.recv()
        };
        messages.iter().map(answer).fold(String::new(), |_, last| last)
    };
    let hello = r#"{"id":1,"body":{"Hello":{"version":5,"pid":1,"program":"\u001b[31mred"}}}"#;
    assert!(ask(&[hello]).contains("Welcome"));
    assert!(ask(&[r#"{"id":9,"body":"LeaseLane"}"#]).contains("not Hello"));
    assert!(ask(&[hello, hello]).contains("a second Hello"));
    assert!(ask(&[&hello.replace(":5,\"pid", ":7,\"pid")]).contains("protocol version 5, this program 7"));
    assert!(ask(&["GET / HTTP/1.1\r\n"]).contains("not a request"));
    assert!(ask(&[&" ".repeat(5000)]).contains("longer than 4096 bytes"));
    assert!(ask(&[hello, r#"{"id":2,"body":{"ReleaseLane":{"lane":5}}}"#]).contains("lane 5 is not leased to this"));
    assert!(ask(&[hello, r#"{"id":2,"body":{"Status":{"from":0}}}"#]).contains("?[31mred"), "no escapes get through");
    assert!(ask(&[hello, r#"{"id":2,"body":{"Status":{"from":18446744073709551615}}}"#]).contains("\"clients\":[]"));
}

#[test]
fn a_client_that_reads_nothing_is_dropped() {
    let (_service, options) = host();
    let client = connect(&options);
    let raw = Raw::new(&options);
    raw.send(br#"{"id":1,"body":{"Hello":{"version":5,"pid":1,"program":"deaf"}}}"#);
    let request = br#"{"id":2,"body":{"Status":{"from":0}}}"#;
    let ended = (0..1_000_000).any(|_| rustix::net::send(&raw.0, request, SendFlags::NOSIGNAL).is_err());
    assert!(ended);
    wait_for(&client, |status| status.clients.len() == 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn nothing_that_is_sent_to_the_service_harms_it(
        connections in proptest::collection::vec(proptest::collection::vec(message(), 0..12), 0..24)
    ) {
        let (_service, options) = host();
        let client = connect(&options);
        let lease = client.lease_lane().unwrap();
        let raws: Vec<Raw> = connections
            .iter()
            .map(|messages| {
                let raw = Raw::new(&options);
                messages.iter().for_each(|bytes| raw.send(bytes));
                raw
            })
            .collect();
        let status = client.status().unwrap();
        prop_assert!(status.clients.iter().any(|client| client.lanes == [lease.lane()]));
        drop(raws);
        wait_for(&client, |status| status.clients.len() == 1 && status.lingering == 0);
        lease.release().unwrap();
    }

    #[test]
    fn nothing_that_is_put_into_a_relay_harms_the_service(
        messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..120), 0..40)
    ) {
        let (_service, options) = host();
        let client = connect(&options);
        let lease = client.lease_lane().unwrap();
        for message in &messages {
            // An empty message looks like the end of the connection, and must not be taken for it.
            let _ = lease.relay_send_raw(message);
        }
        let (src, dst) = ("10.0.0.1:50000".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let before = client.status().unwrap().counters;
        while !lease.relay_send(src, dst, &packet(lease.lane(), 1)).unwrap() {}
        wait_for(&client, |status| status.counters.drop_loop > before.drop_loop);
        lease.release().unwrap();
    }
}

/// Requests as they should be, as they nearly are, and noise.
fn message() -> impl Strategy<Value = Vec<u8>> {
    let hello = Just(br#"{"id":1,"body":{"Hello":{"version":5,"pid":1,"program":"p"}}}"#.to_vec());
    let lease = Just(br#"{"id":2,"body":"LeaseLane"}"#.to_vec());
    let release =
        any::<u16>().prop_map(|lane| format!(r#"{{"id":3,"body":{{"ReleaseLane":{{"lane":{lane}}}}}}}"#).into());
    let status = any::<u64>().prop_map(|from| format!(r#"{{"id":4,"body":{{"Status":{{"from":{from}}}}}}}"#).into());
    let reclaim = any::<(u16, u64)>().prop_map(|(lane, lease)| {
        format!(r#"{{"id":5,"body":{{"Reclaim":{{"lane":{lane},"lease":{lease}}}}}}}"#).into()
    });
    let well_formed = prop_oneof![hello.clone(), hello, lease, release, status, reclaim];
    let damaged = (well_formed.clone(), any::<usize>(), any::<u8>()).prop_map(|(mut bytes, at, value)| {
        let at = at % bytes.len();
        bytes[at] = value;
        bytes
    });
    let noise = proptest::collection::vec(any::<u8>(), 1..6000);
    prop_oneof![4 => well_formed, 1 => damaged, 1 => noise]
}
