//! Connections between programs through the service, over real sockets on loopback.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use ferroce_service::client::{Client, LaneLease, StartOptions};
use ferroce_service::cm::client::EventChannel;
use ferroce_service::cm::protocol::{CmEvent, CmRequest, Detail, Ece, Param, Path};
use ferroce_service::server::{Hosted, ServerOptions, Service};
use ferroce_testkit::{free_name, free_port};
use ferroce_wire::LANE_SHIFT;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

const TCP: u16 = 0x0106;
const UDP: u16 = 0x0111;
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

const CONNECT_REQUEST: u32 = 4;
const CONNECT_RESPONSE: u32 = 5;
const UNREACHABLE: u32 = 7;
const REJECTED: u32 = 8;
const ESTABLISHED: u32 = 9;
const DISCONNECTED: u32 = 10;

/// A service with a name and a port of its own.
fn host() -> (Hosted, StartOptions) {
    let options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
    let client = StartOptions {
        name: options.name.clone(),
        port: options.port,
        program: "test".into(),
        // A busy machine is not a fault.
        patience: Duration::from_secs(60),
        ..StartOptions::default()
    };
    (Service::spawn_in_process(options).unwrap(), client)
}

/// A program with a lane and an event channel.
struct Program {
    client: Client,
    lane: LaneLease,
    channel: EventChannel,
    next_qpn: u32,
}

impl Program {
    fn new(options: &StartOptions) -> Program {
        let client = Client::connect(options).unwrap();
        let lane = client.lease_lane().unwrap();
        let channel = EventChannel::open(&client).unwrap();
        let next_qpn = u32::from(lane.lane()) << LANE_SHIFT | 0x20;
        Program { client, lane, channel, next_qpn }
    }

    fn param(&mut self) -> Param {
        self.next_qpn += 1;
        let (responder_resources, initiator_depth) = (3, 5);
        Param { qpn: self.next_qpn, responder_resources, initiator_depth, retry_count: 7, ..Param::default() }
    }

    fn listen(&mut self, space: u16, at: IpAddr, backlog: u32) -> (u64, SocketAddr) {
        let id = self.client.cm_create_id(&self.channel, space, space == UDP).unwrap();
        let addr = self.client.cm_bind(id, SocketAddr::new(at, 0), false, false).unwrap();
        self.client.cm(CmRequest::Listen { id, backlog }).unwrap();
        (id, addr)
    }

    fn connect(&mut self, to: SocketAddr) -> u64 {
        let id = self.client.cm_create_id(&self.channel, TCP, false).unwrap();
        let param = self.param();
        let (path, port) = (path(to.ip()), to.port());
        let request = CmRequest::Connect { id, path, port, param, private_data: b"hello".to_vec(), ece: ECE };
        self.client.cm(request).unwrap();
        id
    }

    fn accept(&mut self, id: u64) {
        let param = self.param();
        let request = CmRequest::Accept { id, param, private_data: b"welcome".to_vec(), ece: Ece::default() };
        self.client.cm(request).unwrap();
    }

    /// The next event, which must come.
    fn event(&self) -> CmEvent {
        let mut fds = [PollFd::new(self, PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&timeout)), Ok(1), "no event came");
        self.channel.next_event().unwrap()
    }

    /// The next event, which must be that one.
    fn expect(&self, id: u64, code: u32) -> CmEvent {
        let event = self.event();
        assert_eq!((event.id, event.code), (id, code), "{event:?}");
        event
    }
}

const ECE: Ece = Ece { vendor_id: 0xabcdef, attr_mod: 0x1234_5678 };

fn path(to: IpAddr) -> Path {
    Path { local: to, remote: to, ifindex: 0, mtu: 5, ack_timeout: 17, traffic_class: 0, flow_label: 0, hop_limit: 64 }
}

/// Host addresses that a device of this machine has; loopback has at least one of them.
fn addresses() -> Vec<IpAddr> {
    let devices = ferroce_service::devices::list(ferroce_service::devices::ListOptions { loopback: true }).unwrap();
    let has = |ip: &IpAddr| devices.iter().any(|device| device.gids.iter().any(|gid| gid.addr == *ip));
    [LOCALHOST, Ipv6Addr::LOCALHOST.into()].into_iter().filter(has).collect()
}

#[test]
fn two_programs_connect_and_disconnect() {
    let (_service, options) = host();
    let addresses = addresses();
    assert!(addresses.contains(&LOCALHOST));
    for ip in addresses {
        let (mut server, mut client) = (Program::new(&options), Program::new(&options));
        let (listener, addr) = server.listen(TCP, ip, 0);
        let active = client.connect(addr);

        let request = server.event();
        let Detail::Request { listener: at, datagram, local, peer, path, param, ece } = request.detail else {
            panic!("{request:?}")
        };
        assert_eq!((request.code, at, datagram, local, ece), (CONNECT_REQUEST, listener, false, addr, ECE));
        assert_eq!((peer.ip(), path.remote, path.mtu), (ip, ip, 5));
        assert_eq!((param.responder_resources, param.initiator_depth), (5, 3), "seen from the other end");
        assert_eq!(request.private_data.len(), 56);
        assert!(request.private_data.starts_with(b"hello\0"));
        let passive = request.id;

        server.accept(passive);
        let response = client.expect(active, CONNECT_RESPONSE);
        assert!(response.private_data.starts_with(b"welcome\0"));
        let ours = client.client.cm_qp_parameters(active).unwrap();
        let theirs = server.client.cm_qp_parameters(passive).unwrap();
        assert_eq!((ours.dest_qpn, theirs.dest_qpn), (server.next_qpn, client.next_qpn));
        assert_eq!((ours.rq_psn, ours.sq_psn), (theirs.sq_psn, theirs.rq_psn));
        assert_eq!((ours.max_rd_atomic, ours.max_dest_rd_atomic), (theirs.max_dest_rd_atomic, theirs.max_rd_atomic));

        client.client.cm(CmRequest::Establish { id: active }).unwrap();
        server.expect(passive, ESTABLISHED);
        client.client.cm(CmRequest::Disconnect { id: active }).unwrap();
        server.expect(passive, DISCONNECTED);
        server.client.cm(CmRequest::Disconnect { id: passive }).unwrap();
        assert_eq!(client.expect(active, DISCONNECTED).status, 0);
        let status = client.client.status().unwrap();
        assert!(status.counters.management >= 5, "{:?}", status.counters);
        for (program, id) in [(&client, active), (&server, passive), (&server, listener)] {
            program.client.cm(CmRequest::Destroy { id }).unwrap();
        }
    }
}

/// Every program's ids are shown to whoever asks, however many there are.
#[test]
fn ids_are_listed() {
    let (_service, options) = host();
    let (mut server, mut client) = (Program::new(&options), Program::new(&options));
    let (listener, addr) = server.listen(TCP, LOCALHOST, 0);
    let active = client.connect(addr);
    let passive = server.event().id;
    let ids = client.client.cm_ids().unwrap();
    let row = |id| ids.iter().find(|row| row.id == id).unwrap();
    let shown = |id| (row(id).space.as_str(), row(id).service.as_str(), row(id).state.as_str(), row(id).local);
    assert_eq!(shown(listener), ("TCP", "connected", "LISTEN", Some(addr)));
    assert_eq!(shown(passive), ("TCP", "connected", "REQ_RCVD", Some(addr)));
    // On a busy machine the passive end has asked for more time by now.
    assert!(["REQ_SENT", "MRA_REQ_RCVD"].contains(&row(active).state.as_str()), "{}", row(active).state);
    assert_eq!(row(active).peer, Some(addr));
    assert_eq!((row(active).qpn, row(passive).remote_qpn), (Some(client.next_qpn), Some(client.next_qpn)));
    assert!(ids.iter().all(|row| row.pid == std::process::id()));

    let many = 2 * ferroce_service::protocol::CM_ID_PAGE;
    let made: Vec<u64> = (0..many).map(|_| client.client.cm_create_id(&client.channel, UDP, true).unwrap()).collect();
    let ids = client.client.cm_ids().unwrap();
    assert_eq!(ids.len(), many + 3);
    assert!(made.iter().all(|id| ids.iter().any(|row| row.id == *id && row.state == "IDLE")));
}

#[test]
fn refused_and_rejected() {
    let (_service, options) = host();
    let (mut server, mut client) = (Program::new(&options), Program::new(&options));
    let (_, addr) = server.listen(TCP, LOCALHOST, 0);
    let nobody = client.connect(SocketAddr::new(LOCALHOST, addr.port().wrapping_add(1)));
    assert_eq!(client.expect(nobody, REJECTED).status, 8);

    let rejected = client.connect(addr);
    let request = server.event();
    let reject = CmRequest::Reject { id: request.id, reason: 28, private_data: b"go away".to_vec() };
    server.client.cm(reject).unwrap();
    let event = client.expect(rejected, REJECTED);
    assert_eq!((event.status, event.private_data.len()), (28, 148));
    assert!(event.private_data.starts_with(b"go away\0"));
}

#[test]
fn datagrams() {
    let (_service, options) = host();
    let (mut server, client) = (Program::new(&options), Program::new(&options));
    let (listener, addr) = server.listen(UDP, LOCALHOST, 0);
    let id = client.client.cm_create_id(&client.channel, UDP, true).unwrap();
    let resolve = |id, port| CmRequest::Resolve { id, path: path(LOCALHOST), port, private_data: b"who".to_vec() };
    client.client.cm(resolve(id, addr.port())).unwrap();
    let request = server.event();
    assert!(matches!(request.detail, Detail::Request { listener: at, datagram: true, .. } if at == listener));
    let qpn = server.param().qpn;
    let private_data = b"me".to_vec();
    let answer = CmRequest::AcceptDatagram { id: request.id, qpn, qkey: 0x0123_4567, private_data, ece: ECE };
    server.client.cm(answer).unwrap();
    let event = client.expect(id, ESTABLISHED);
    let Detail::Datagram { qpn: theirs, qkey, .. } = event.detail else { panic!("{event:?}") };
    assert_eq!((theirs, qkey), (qpn, 0x0123_4567));

    let other = client.client.cm_create_id(&client.channel, UDP, true).unwrap();
    client.client.cm(resolve(other, addr.port().wrapping_add(1))).unwrap();
    assert_eq!(client.expect(other, UNREACHABLE).status, 1);
}

/// A program is gone in the middle: its peer hears of it, and its port is free.
#[test]
fn a_program_is_gone() {
    let (_service, options) = host();
    let (mut server, mut client) = (Program::new(&options), Program::new(&options));
    let (_, addr) = server.listen(TCP, LOCALHOST, 0);
    let active = client.connect(addr);
    let passive = server.event().id;
    server.accept(passive);
    client.expect(active, CONNECT_RESPONSE);
    client.client.cm(CmRequest::Establish { id: active }).unwrap();
    server.expect(passive, ESTABLISHED);
    let waiting = client.connect(addr);
    server.expect_request();
    drop(server);
    // In any order: each is a message of its own.
    let mut ends = [client.event(), client.event()].map(|event| (event.id, event.code));
    ends.sort_unstable();
    assert_eq!(ends, [(active, DISCONNECTED), (waiting, REJECTED)]);

    let again = Program::new(&options);
    let id = again.client.cm_create_id(&again.channel, TCP, false).unwrap();
    assert_eq!(again.client.cm_bind(id, addr, false, false).unwrap(), addr);
}

/// A channel is closed while its program lives: its ids are gone, those of other channels stay.
#[test]
fn a_channel_is_closed() {
    let (_service, options) = host();
    let mut program = Program::new(&options);
    let other = EventChannel::open(&program.client).unwrap();
    let (_, addr) = program.listen(TCP, LOCALHOST, 0);
    let kept = program.client.cm_create_id(&other, TCP, false).unwrap();
    program.channel = EventChannel::open(&program.client).unwrap();
    // The service sees the end of the channel before the request, or shortly after.
    let give_up = Instant::now() + Duration::from_secs(60);
    while program.client.cm_bind(kept, addr, false, false).is_err() {
        assert!(Instant::now() < give_up, "the port of the closed channel's listener is not free");
        std::thread::sleep(Duration::from_millis(5));
    }
    program.client.cm(CmRequest::Listen { id: kept, backlog: 1 }).unwrap();
    // Its events move to a channel that is read.
    program.client.cm(CmRequest::Migrate { id: kept, channel: program.channel.number() }).unwrap();
    program.connect(addr);
    program.expect_request();
}

impl Program {
    fn expect_request(&self) -> CmEvent {
        let event = self.event();
        assert_eq!(event.code, CONNECT_REQUEST, "{event:?}");
        event
    }
}

/// The descriptor of a channel obeys O_NONBLOCK.
#[test]
fn channels_do_not_block_if_told_so() {
    let (_service, options) = host();
    let program = Program::new(&options);
    let flags = fcntl_getfl(program.channel.fd()).unwrap();
    assert!(!flags.contains(OFlags::NONBLOCK));
    fcntl_setfl(program.channel.fd(), flags | OFlags::NONBLOCK).unwrap();
    let error = program.channel.next_event().unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
}

/// A program does not read its events: they wait in the service, others are served, and in the end nothing is missing.
#[test]
fn a_program_that_does_not_read() {
    const REQUESTS: usize = 400;
    let (_service, options) = host();
    let (mut server, mut client) = (Program::new(&options), Program::new(&options));
    let (_, addr) = server.listen(TCP, LOCALHOST, 0);
    let active: Vec<u64> = (0..REQUESTS).map(|_| client.connect(addr)).collect();
    // Meanwhile others connect.
    let mut other = Program::new(&options);
    let (_, elsewhere) = other.listen(TCP, LOCALHOST, 0);
    other.connect(elsewhere);
    other.expect_request();

    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..REQUESTS {
        let event = server.expect_request();
        assert!(seen.insert(event.id), "twice: {event:?}");
        server.client.cm(CmRequest::Destroy { id: event.id }).unwrap();
    }
    let mut rejected: Vec<u64> = (0..REQUESTS).map(|_| client.event()).map(|event| event.id).collect();
    rejected.sort_unstable();
    assert_eq!(rejected, active);
}

/// What a program may not do: each is refused, and changes nothing for others.
#[test]
fn what_is_not_ones_own() {
    let (_service, options) = host();
    let (mut victim, mut attacker) = (Program::new(&options), Program::new(&options));
    let (listener, addr) = victim.listen(TCP, LOCALHOST, 0);
    let errno = |result: Result<(), ferroce_service::ServiceError>| result.unwrap_err().errno();

    let foreign = [
        CmRequest::Destroy { id: listener },
        CmRequest::Disconnect { id: listener },
        CmRequest::Listen { id: listener, backlog: 1 },
        CmRequest::Migrate { id: listener, channel: attacker.channel.number() },
        CmRequest::Reject { id: listener, reason: 28, private_data: Vec::new() },
        CmRequest::Destroy { id: u64::MAX },
    ];
    for request in foreign {
        assert_eq!(errno(attacker.client.cm(request)), libc::EINVAL);
    }
    let on_foreign_channel = attacker.client.cm_create_id(&victim.channel, TCP, false);
    assert_eq!(on_foreign_channel.unwrap_err().errno(), libc::EINVAL);
    assert_eq!(
        attacker.client.cm_create_id(&attacker.channel, 0x1234, false).unwrap_err().errno(),
        libc::EPROTONOSUPPORT
    );

    let id = attacker.client.cm_create_id(&attacker.channel, TCP, false).unwrap();
    assert_eq!(attacker.client.cm_bind(id, addr, false, false).unwrap_err().errno(), libc::EADDRINUSE);
    let connect = |param: Param, local: IpAddr, len: usize| {
        let path = Path { local, ..path(LOCALHOST) };
        CmRequest::Connect { id, path, port: addr.port(), param, private_data: vec![0; len], ece: ECE }
    };
    let (mut foreign, own) = (attacker.param(), attacker.param());
    foreign.qpn = victim.param().qpn;
    assert_eq!(errno(attacker.client.cm(connect(foreign, LOCALHOST, 0))), libc::EINVAL);
    let nowhere = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 1));
    assert_eq!(errno(attacker.client.cm(connect(own, nowhere, 0))), libc::ENODEV);
    assert_eq!(errno(attacker.client.cm(connect(own, LOCALHOST, 57))), libc::EINVAL);
    attacker.client.cm(connect(own, LOCALHOST, 56)).unwrap();
    victim.expect_request();
    assert_ne!(attacker.lane.lane(), victim.lane.lane());
}

impl std::os::fd::AsFd for Program {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.channel.fd()
    }
}
