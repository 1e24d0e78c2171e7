//! Descriptors whose closing waits, sent in every way that there is. The service goes on.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::time::Duration;

use ferroce_service::client::{Client, LaneLease, StartOptions};
use ferroce_service::cm::client::EventChannel;
use ferroce_service::protocol::{RingCall, RingStep};
use ferroce_service::server::{Hosted, ServerOptions, Service};
use ferroce_testkit::{free_name, free_port};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use self::lingering::{Lingering, send};

mod lingering;

/// Sends a lingering connection as the last one of several. None: this process had the last copy, as the service was faster. What the kernel does not let
/// through harms nobody.
fn send_last(to: OwnedFd, bytes: &[u8], pidfds: usize) -> Option<TcpStream> {
    let (bytes, (closed, wait)) = (bytes.to_vec(), mpsc::channel());
    let Lingering { socket, other_end } = Lingering::new();
    std::thread::spawn(move || {
        let pidfds: Vec<OwnedFd> = (0..pidfds).map(|_| pidfd_open(getpid(), PidfdFlags::empty()).unwrap()).collect();
        let descriptors: Vec<_> = pidfds.iter().chain([&socket]).map(AsFd::as_fd).collect();
        if let Err(errno) = send(&to, &bytes, &descriptors) {
            assert!(matches!(errno, Errno::PERM | Errno::PIPE | Errno::CONNRESET), "{errno}");
            sockopt::set_socket_linger(&socket, None).unwrap();
        }
        drop(socket);
        closed.send(())
    });
    wait.recv_timeout(Duration::from_secs(5)).ok().map(|()| other_end)
}

/// A service, a program that it serves, and the other ends of what was sent to it.
struct Scene {
    // First: its end, too, waits for nobody.
    service: Hosted,
    options: StartOptions,
    client: Client,
    other_ends: RefCell<Vec<TcpStream>>,
}

impl Scene {
    fn new(old_kernel: bool) -> Scene {
        let mut options =
            ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
        options.fault.old_kernel = old_kernel;
        Scene::of(options)
    }

    fn of(options: ServerOptions) -> Scene {
        let client = StartOptions { name: options.name.clone(), port: options.port, ..StartOptions::default() };
        let service = Service::spawn_in_process(options).unwrap();
        Scene { service, client: Client::connect(&client).unwrap(), options: client, other_ends: RefCell::default() }
    }

    /// Sends what lingers, after so many pidfds, to a new one of the service's sockets.
    fn send_only<S: AsFd>(&self, to: impl Fn() -> S, bytes: &[u8], pidfds: usize) {
        let attempt = |_| send_last(rustix::io::dup(to()).unwrap(), bytes, pidfds);
        let other_end = (0..10).find_map(attempt).expect("the service gets a last copy");
        self.other_ends.borrow_mut().push(other_end);
    }

    /// Does so, and looks whether others are served.
    fn send<S: AsFd>(&self, what: &str, to: impl Fn() -> S, bytes: &[u8], pidfds: usize) {
        self.send_only(to, bytes, pidfds);
        self.check(what);
    }

    fn connect(&self) -> OwnedFd {
        lingering::connect(&self.options.name)
    }

    /// A connection that has said `Hello`.
    fn greeted(&self) -> OwnedFd {
        let socket = self.connect();
        send(&socket, HELLO, &[]).unwrap();
        assert!(answer(&socket).contains("Welcome"));
        socket
    }

    /// Others are served.
    fn check(&self, after: &str) {
        let served = self.client.status().and_then(|_| Client::connect(&self.options)?.lease_lane());
        served.unwrap_or_else(|error| panic!("after {after}: {error}"));
    }
}

fn answer(socket: &OwnedFd) -> String {
    let mut buffer = vec![0; 65_536];
    let (len, _) = rustix::net::recv(socket, &mut buffer[..], rustix::net::RecvFlags::empty()).unwrap();
    String::from_utf8_lossy(&buffer[..len]).into_owned()
}

const HELLO: &[u8] = br#"{"id":1,"body":{"Hello":{"version":5,"pid":1,"program":"hostile"}}}"#;
const HELLO_AGAIN: &[u8] = br#"{"id":1,"body":{"Hello":{"version":5,"pid":1,"program":"hostile","again":true}}}"#;
const LEASE: &[u8] = br#"{"id":2,"body":{"Lease":{"lane":5}}}"#;
const RECLAIM: &[u8] = br#"{"id":2,"body":{"Reclaim":{"lane":5,"lease":6}}}"#;

#[test]
fn closing_what_connections_bring_holds_nobody_up() {
    for old_kernel in [false, true] {
        let scene = Scene::new(old_kernel);
        let (fresh, greeted) = (|| scene.connect(), || scene.greeted());
        scene.send("a Hello with a second descriptor", fresh, HELLO, 1);
        scene.send("a Hello with something else than a pidfd", fresh, HELLO, 0);
        scene.send("garbage", fresh, b"garbage", 0);
        scene.send("an empty message", fresh, b"", 0);
        scene.send("more descriptors than a message of ours has", fresh, b"garbage", 10);
        scene.send("too long a message", fresh, &[b' '; 5000], 0);
        scene.send("a request without descriptors", greeted, LEASE, 0);
        scene.send("a socket that is no UDP socket", greeted, RECLAIM, 0);
        let bringing = || {
            let connection = fresh();
            send(&connection, HELLO_AGAIN, &[]).unwrap();
            assert!(answer(&connection).contains("Welcome"));
            connection
        };
        scene.send("the same where sockets are expected", bringing, RECLAIM, 0);
        let cut = || {
            let connection = fresh();
            send(&connection, b"garbage", &[]).unwrap();
            connection
        };
        scene.send("a message that is not read", cut, HELLO, 0);
        let channel = || EventChannel::open(&scene.client).unwrap();
        let channels = RefCell::new(Vec::new());
        let end_of_channel = || {
            channels.borrow_mut().push(channel());
            rustix::io::dup(channels.borrow().last().unwrap().fd()).unwrap()
        };
        scene.send("a message in an event channel", end_of_channel, b"12345678", 0);
    }
}

#[test]
fn closing_what_relays_bring_holds_nobody_up() {
    let scene = Scene::new(false);
    let other = scene.client.lease_lane().unwrap();
    let call = RingCall { step: RingStep::Offer, lane: other.lane(), lease: other.id(), id: 7, wake: [9; 16] };
    let offer = call.encode();
    let accept = RingCall { step: RingStep::Accept, ..call }.encode();
    let messages: [(&str, &[u8]); 4] = [
        ("an offer of something else than memory", &offer),
        ("an answer with a descriptor", &accept),
        ("garbage", b"garbage"),
        ("an empty message", b""),
    ];
    let programs = RefCell::new(Vec::new());
    let relay = || {
        let program = Client::connect(&scene.options).unwrap();
        let lease = program.lease_lane().unwrap();
        let relay = relay_of(&lease);
        programs.borrow_mut().push((program, lease));
        relay
    };
    for (what, bytes) in messages {
        scene.send(what, relay, bytes, 0);
        assert!(other.relay_recv(&mut Vec::new()).unwrap().is_none(), "{what}: it is passed on");
    }
    // Nobody reads the relay of a lane that was given back.
    let given_back = || {
        let relay = relay();
        programs.borrow_mut().pop().unwrap().1.release().unwrap();
        relay
    };
    scene.send("the end of a relay with a message that is not read", given_back, &offer, 0);
}

/// On older kernels, a connection that is refused, and the service's end.
#[test]
fn closing_what_was_never_read_holds_nobody_up() {
    let mut options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
    options.fault.old_kernel = true;
    options.limits.user.programs = Some(2);
    let scene = Scene::of(options);
    let last = scene.greeted();
    // It waits in the backlog, with its message, or is refused before that.
    scene.send_only(|| scene.connect(), HELLO, 0);
    scene.client.status().expect("after a refused connection");
    scene.send_only(|| &last, LEASE, 0);
    drop(scene.service);
}

/// The end of a lane's relay that its program has.
fn relay_of(lease: &LaneLease) -> OwnedFd {
    let relay = lease.not_for_children().next().unwrap();
    // SAFETY: the lease has it open, and keeps it so.
    rustix::io::dup(unsafe { BorrowedFd::borrow_raw(relay) }).unwrap()
}
