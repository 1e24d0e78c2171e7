//! A hostile host on the network: random and mutated management datagrams, and floods of requests for connections, from many addresses.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, thread};

use ferroce_cm::{Cm, Config, ConnectParam, ConnectionParam, Owner, Path, ResolveParam, Service};
use ferroce_service::client::{Client, StartOptions};
use ferroce_service::cm::protocol::CmRequest;
use ferroce_testkit::SharedFolder;
use ferroce_wire::mad::{Ece, MAD_LEN, Mad, PortSpace, gsi_headers};
use ferroce_wire::{ICRC_LEN, NetHeader, Psn, icrc};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ends::{CONNECT_REQUEST, DISCONNECTED, ESTABLISHED, Program};
use super::{Helper, Scene, Stopper, say, wait_for_end_of_input};

const HOST: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
/// The hostile host's own address; it takes others below 10.99.128.0/17.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
/// Addresses that the hostile host sends from.
const SOURCES: u16 = 200;

/// What the host's service allows.
const CONFIG: &str = "[limits.process]\nids = 1000\npending_connections = 200\n";
const IDS: usize = 1000;
const PENDING: u64 = 200;

/// Rounds of honest connections, to each listener.
const ROUNDS: usize = 10;
/// Packets to queue pair 1 without which it was no flood; `FERROCE_FLOOD` says another number.
const PACKETS: u64 = 20_000;
/// By how much the service's memory may grow, in KiB: 1,000 ids, 16,384 that linger.
const GROWTH_KIB_MAX: u64 = 48 << 10;

/// Honest connections go on, limits hold, memory is bounded.
pub(super) fn a_hostile_host_keeps_nobody_from_connecting(scene: &Scene) {
    let available = Command::new("unshare").args(["-rn", "true"]).output();
    let available = available.expect("`unshare` of util-linux makes the namespaces of this test");
    // A test that nobody ran has not passed.
    assert!(
        available.status.success(),
        "this system lets nobody make a network namespace, which this test needs: {}",
        String::from_utf8_lossy(&available.stderr)
    );
    let folder = SharedFolder::new();
    let config = folder.path().join("ferroce.toml");
    fs::write(&config, CONFIG).unwrap();
    let helper = scene.helper_command("flooded");
    let mut command = Command::new("unshare");
    command.arg("-rn").arg(helper.get_program()).args(helper.get_args());
    command.env("FERROCE_CONFIG", config).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut helper = Helper::spawn(command);
    let said = helper.line();
    println!("{said}");
    assert!(said.starts_with("withstood"), "{said}");
    helper.end();
}

/// The host under attack, in a network namespace of its own.
pub(super) fn role_flooded(options: &StartOptions) {
    let attacker = make_network(options);
    let observer = Client::connect_or_start(options).unwrap();
    let mut others = Program::new(options);
    let mut flooded = Program::new(options);
    let mut sleeping = Program::new(options);
    let at = SocketAddr::new(HOST.into(), 0);
    let [elsewhere, target, deaf] = [&mut others, &mut flooded, &mut sleeping].map(|p| p.listen(at, 0x0106, 0));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| serve(&mut others, &stop));
        scope.spawn(|| serve(&mut flooded, &stop));
        let stopper = Stopper(&stop);
        let mut honest = Program::new(options);
        let mut round = || [elsewhere, target].into_iter().for_each(|to| honest.round_trip(to));
        round();
        let worker = observer.status().unwrap().pid;
        let before = resident_kib(worker);
        let mut attack = attacker.begin(&[target, deaf]);
        let packets = std::env::var("FERROCE_FLOOD").map_or(PACKETS, |text| text.parse().unwrap());
        let (mut most, mut rounds) = (0, 0);
        while rounds < ROUNDS || observer.status().unwrap().counters.management < packets {
            round();
            rounds += 1;
            most = most.max(check_limits(&observer));
        }
        let waiting = observer.cm_ids().unwrap().iter().find(|id| id.local == Some(deaf)).unwrap().waiting;
        assert_eq!(waiting, PENDING, "the listener that takes nothing is full");
        let sent = attack.stop();
        round();
        let status = observer.status().unwrap();
        let after = resident_kib(worker);
        assert!(after < before + GROWTH_KIB_MAX, "from {before} KiB to {after} KiB");
        assert_eq!((status.pid, status.restarts), (worker, 0));
        let (arrived, grown) = (status.counters.management, after.saturating_sub(before));
        drop(stopper);
        // With its namespace goes the interface here, too.
        attack.0.end();
        say(format_args!(
            "withstood: {sent} datagrams sent, {arrived} arrived; {rounds} honest rounds at each listener meanwhile; at most {most} ids; \
             memory grew by {grown} KiB"
        ));
    });
}

/// No program has more ids than it may. Gives the number of all ids.
fn check_limits(observer: &Client) -> usize {
    let ids = observer.cm_ids().unwrap();
    let waiting = ids.iter().map(|id| id.waiting).max();
    assert!(waiting <= Some(PENDING), "{waiting:?} requests wait at a listener");
    let status = observer.status().unwrap();
    for client in &status.clients {
        assert!(client.ids as usize <= IDS, "{client:?}");
    }
    ids.len()
}

/// A server that wants to be greeted, and lets everybody go who goes.
fn serve(program: &mut Program, stop: &AtomicBool) {
    const A_MOMENT: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    while !stop.load(Ordering::Relaxed) {
        if poll(&mut [PollFd::new(&program.channel.fd(), PollFlags::IN)], Some(&A_MOMENT)) != Ok(1) {
            continue;
        }
        let event = program.channel.next_event().unwrap();
        match event.code {
            CONNECT_REQUEST if event.private_data.starts_with(b"hello") => program.accept(event.id),
            ESTABLISHED => {}
            DISCONNECTED => {
                // Whoever disconnected may have died since.
                let _over = program.client.cm(CmRequest::Disconnect { id: event.id });
                program.ask(CmRequest::Destroy { id: event.id });
            }
            // A stranger's request, or the end of a connection.
            _ => program.ask(CmRequest::Destroy { id: event.id }),
        }
    }
}

fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split_ascii_whitespace()).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// The hostile host, which waits in its network namespace.
struct Attacker(Helper);

/// This namespace and the attacker's, joined.
fn make_network(options: &StartOptions) -> Attacker {
    ip("link set lo up");
    ip("link add here type veth peer name there");
    ip(&format!("addr add {HOST}/24 dev here"));
    ip("link set here up");
    let mut command = Command::new("unshare");
    command.arg("-n").arg(std::env::current_exe().unwrap()).args(["role", "attack", &options.name]);
    command.arg(options.port.to_string()).arg(&options.candidates[0]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut helper = Helper::spawn(command);
    assert_eq!(helper.line(), "there", "it is in its namespace");
    ip(&format!("link set there netns {}", helper.child.id()));
    ip(&format!("route add 10.99.128.0/17 via {GATEWAY}"));
    Attacker(helper)
}

impl Attacker {
    fn begin(mut self, targets: &[SocketAddr]) -> Attacker {
        let ports: Vec<String> = targets.iter().map(|target| target.port().to_string()).collect();
        writeln!(self.0.child.stdin.as_mut().unwrap(), "{}", ports.join(" ")).unwrap();
        self
    }

    /// Gives how many datagrams it has sent.
    fn stop(&mut self) -> u64 {
        writeln!(self.0.child.stdin.as_mut().unwrap(), "stop").unwrap();
        self.0.line().parse().unwrap()
    }
}

/// The hostile host: begins when it is told the ports, stops at the next line, and ends with its input.
pub(super) fn role_attack(options: &StartOptions) {
    say("there");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let ports: Vec<u16> = line.split_ascii_whitespace().map(|port| port.parse().unwrap()).collect();
    ip("link set lo up");
    ip(&format!("addr add {GATEWAY}/24 dev there"));
    ip("link set there up");
    ip("route add local 10.99.128.0/17 dev lo");
    let stop = AtomicBool::new(false);
    let sent = thread::scope(|scope| {
        let flood = scope.spawn(|| flood(options.port, &ports, &stop));
        std::io::stdin().read_line(&mut line).unwrap();
        stop.store(true, Ordering::Relaxed);
        flood.join().unwrap()
    });
    say(sent);
    wait_for_end_of_input();
}

fn flood(port: u16, ports: &[u16], stop: &AtomicBool) -> u64 {
    let seed = rand::random();
    eprintln!("(the flood's seed is {seed})");
    let mut rng = StdRng::seed_from_u64(seed);
    let sources: Vec<UdpSocket> = (0..SOURCES)
        .map(|n| UdpSocket::bind((Ipv4Addr::new(10, 99, 128 + (n >> 8) as u8, n as u8), 0)).unwrap())
        .collect();
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..64 {
            let source = sources.choose(&mut rng).unwrap();
            let from = source.local_addr().unwrap();
            let mad = datagram(&mut rng, from.ip(), ports);
            let packet = sealed(&mut rng, &mad, from);
            // The host's answers find nobody here, which the kernel tells the next one who sends; and its queues may be full.
            sent += u64::from(source.send_to(&packet, (HOST, port)).is_ok());
        }
        // The machine has others to serve, too.
        thread::sleep(Duration::from_millis(2));
    }
    sent
}

/// Attributes of communication management.
const ATTRIBUTES: std::ops::RangeInclusive<u16> = 0x10..=0x1d;

/// A request for a connection with numbers of its own, or one for a datagram queue pair; half of them with changes, which make other
/// messages of them, too; or anything.
fn datagram(rng: &mut StdRng, from: IpAddr, ports: &[u16]) -> Vec<u8> {
    if rng.random_bool(0.05) {
        return (0..rng.random_range(0..=MAD_LEN)).map(|_| rng.random()).collect();
    }
    let port = *ports.choose(rng).unwrap();
    let mut bytes = request(rng, from, port).emit().to_vec();
    if rng.random_bool(0.5) {
        if rng.random_bool(0.5) {
            bytes[16..18].copy_from_slice(&rng.random_range(ATTRIBUTES).to_be_bytes());
        }
        for _ in 0..rng.random_range(0..4) {
            let at = rng.random_range(0..bytes.len());
            bytes[at] = rng.random();
        }
    }
    bytes
}

fn request(rng: &mut StdRng, from: IpAddr, port: u16) -> Mad {
    let path = Path::new(from, HOST.into());
    let mut cm = Cm::new(Config::new(rng.random()));
    let id = |cm: &mut Cm, space, service| cm.create_id(Owner(1), space, service).unwrap();
    if rng.random_bool(0.9) {
        let id = id(&mut cm, PortSpace::Tcp, Service::Connected);
        let param = ConnectionParam { qpn: rng.random_range(2..1 << 24), ..ConnectionParam::default() };
        let (private_data, ece) = (&b"nonsense"[..], Ece::default());
        let connect = ConnectParam { path, port, ca_guid: rng.random(), param, private_data, ece };
        cm.connect(0, id, &connect).unwrap();
    } else {
        let id = id(&mut cm, PortSpace::Udp, Service::Datagram);
        cm.resolve(0, id, &ResolveParam { path, port, private_data: &[] }).unwrap();
    }
    cm.poll_transmit().unwrap().mad
}

/// A packet to queue pair 1, as the kernel sends it with Don't Fragment set.
fn sealed(rng: &mut StdRng, mad: &[u8], from: SocketAddr) -> Vec<u8> {
    let headers = gsi_headers(Psn::new(rng.random_range(0..1 << 24)));
    let mut packet = vec![0; headers.len()];
    headers.emit(&mut packet);
    packet.extend(mad);
    packet.resize(packet.len().next_multiple_of(4), 0);
    let udp_len = (packet.len() + ICRC_LEN) as u16;
    let net = NetHeader {
        src: from.ip(),
        dst: HOST.into(),
        src_port: from.port(),
        tclass: 0,
        hop_limit: 64,
        udp_len,
        ifindex: 0,
    };
    let icrc = icrc::icrc_over(&net, 0, &packet);
    packet.extend(icrc.to_le_bytes());
    packet
}
