//! Hosts, programs and the network.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use ferroce_cm::{
    AcceptDatagramParam, AcceptParam, Arrival, BindOptions, Cm, CmError, CmId, Config, ConnectParam, ConnectionParam,
    Event, EventKind, Nanos, Owner, Path, ResolveParam, Service, State, UDP_QKEY,
};
use ferroce_wire::mad::{Ece, MAD_LEN, PortSpace, RejReason};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::model::{Model, Role};

const MS: Nanos = 1_000_000;
const SECOND: Nanos = 1_000 * MS;
const PORT: u16 = 7_000;

/// What the network does, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Storm {
    pub(crate) hosts: usize,
    /// Programs of a host.
    pub(crate) owners: u64,
    pub(crate) connects: usize,
    pub(crate) resolves: usize,
    pub(crate) crashes: usize,
    pub(crate) lasts: Nanos,
    pub(crate) lost_per_mille: u32,
    pub(crate) duplicated_per_mille: u32,
    pub(crate) delayed_per_mille: u32,
    /// Bits change and the ICRC does not notice.
    pub(crate) changed_per_mille: u32,
    pub(crate) latency: Nanos,
    pub(crate) longest_delay: Nanos,
    /// How long programs think.
    pub(crate) thinking: Nanos,
    /// Programs use queue pair numbers again as soon as they may.
    pub(crate) reuse: bool,
    pub(crate) small_limits: bool,
}

impl Storm {
    /// The weather of a seed.
    pub(crate) fn of(seed: u64) -> Storm {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x5707);
        Storm {
            hosts: rng.random_range(1..=4),
            owners: rng.random_range(1..=3),
            connects: rng.random_range(10..60),
            resolves: rng.random_range(0..15),
            crashes: rng.random_range(0..4),
            lasts: rng.random_range(1..40) * SECOND,
            lost_per_mille: rng.random_range(0..300),
            duplicated_per_mille: rng.random_range(0..200),
            delayed_per_mille: rng.random_range(0..200),
            changed_per_mille: 0,
            latency: rng.random_range(10_000..20 * MS),
            longest_delay: rng.random_range(MS..2 * SECOND),
            thinking: [MS, 100 * MS, 5 * SECOND, 60 * SECOND][rng.random_range(0..4)],
            reuse: rng.random_bool(0.5),
            small_limits: rng.random_bool(0.3),
        }
    }

    pub(crate) fn gentle() -> Storm {
        Storm {
            hosts: 4,
            owners: 2,
            connects: 0,
            resolves: 0,
            crashes: 0,
            lasts: 0,
            lost_per_mille: 20,
            duplicated_per_mille: 0,
            delayed_per_mille: 0,
            changed_per_mille: 0,
            latency: 50_000,
            longest_delay: 0,
            thinking: MS,
            reuse: true,
            small_limits: false,
        }
    }
}

struct Host {
    cm: Cm,
    addr: IpAddr,
    guid: u64,
    /// Queue pair numbers that were used.
    used: Vec<u32>,
    /// The last id that used a queue pair number.
    by_qpn: BTreeMap<u32, CmId>,
}

struct Packet {
    arrival: Arrival,
    payload: [u8; MAD_LEN],
}

#[derive(Clone, Copy, Debug)]
enum Task {
    Connect {
        host: usize,
    },
    Resolve {
        host: usize,
    },
    Decide {
        host: usize,
        id: CmId,
    },
    Answer {
        host: usize,
        id: CmId,
    },
    Establish {
        host: usize,
        id: CmId,
    },
    /// The queue pair of the peer received data.
    Data {
        host: usize,
        dest: IpAddr,
        qpn: u32,
    },
    Disconnect {
        host: usize,
        id: CmId,
    },
    Destroy {
        host: usize,
        id: CmId,
    },
    Crash {
        host: usize,
        owner: Owner,
    },
}

pub(crate) struct World {
    storm: Storm,
    seed: u64,
    now: Nanos,
    rng: StdRng,
    hosts: Vec<Host>,
    flying: BTreeMap<(Nanos, u64), Packet>,
    tasks: BTreeMap<(Nanos, u64), Task>,
    sequence: u64,
    models: BTreeMap<(usize, CmId), Model>,
    stormy: bool,
    steps: u64,
    last_steps: VecDeque<String>,
    hasher: DefaultHasher,
    next_qpn: u32,
    /// When connects began.
    began: BTreeMap<(usize, CmId), Nanos>,
    longest_connect: Nanos,
    pub(crate) seen: BTreeMap<&'static str, u64>,
}

impl World {
    pub(crate) fn new(seed: u64, storm: Storm) -> World {
        let mut rng = StdRng::seed_from_u64(seed);
        let hosts = (0..storm.hosts).map(|n| {
            let mut config = Config::new(rng.random());
            if storm.small_limits {
                config.limits.backlog = 4;
                config.limits.pending_per_peer = 3;
                config.limits.ids_per_owner = 20;
                config.limits.lingering = 100;
            }
            let addr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, n as u8 + 1));
            let guid = 0x0200_0000_0000_0001 + n as u64;
            Host { cm: Cm::new(config), addr, guid, used: Vec::new(), by_qpn: BTreeMap::new() }
        });
        let hosts = hosts.collect();
        World {
            storm,
            seed,
            now: SECOND,
            rng,
            hosts,
            flying: BTreeMap::new(),
            tasks: BTreeMap::new(),
            sequence: 0,
            models: BTreeMap::new(),
            stormy: true,
            steps: 0,
            last_steps: VecDeque::new(),
            hasher: DefaultHasher::new(),
            next_qpn: 0x100,
            began: BTreeMap::new(),
            longest_connect: 0,
            seen: BTreeMap::new(),
        }
    }

    pub(crate) fn run(&mut self) {
        let storm = self.storm;
        self.listeners();
        for _ in 0..storm.connects {
            let (host, at) = (self.any_host(), self.rng.random_range(0..storm.lasts));
            self.schedule(at, Task::Connect { host });
        }
        for _ in 0..storm.resolves {
            let (host, at) = (self.any_host(), self.rng.random_range(0..storm.lasts));
            self.schedule(at, Task::Resolve { host });
        }
        for _ in 0..storm.crashes {
            let (host, at) = (self.any_host(), self.rng.random_range(0..storm.lasts));
            let owner = Owner(self.rng.random_range(1..=storm.owners));
            self.schedule(at, Task::Crash { host, owner });
        }
        self.advance(Some(self.now + storm.lasts));
        self.say(|| "the network heals".to_owned());
        self.stormy = false;
        self.advance(None);
        self.check_quiet();
        self.end();
    }

    /// Listeners of each program, of both kinds.
    fn listeners(&mut self) {
        for host in 0..self.hosts.len() {
            for owner in 1..=self.storm.owners {
                self.listen(host, owner);
            }
        }
        self.drain();
    }

    fn listen(&mut self, host: usize, owner: u64) {
        let Host { cm, addr, .. } = &mut self.hosts[host];
        for (space, service) in [(PortSpace::Tcp, Service::Connected), (PortSpace::Udp, Service::Datagram)] {
            let id = cm.create_id(Owner(owner), space, service).unwrap();
            let port = PORT + owner as u16;
            let any = self.rng.random_bool(0.5);
            let ip = if any { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { *addr };
            cm.bind(id, SocketAddr::new(ip, port), BindOptions::default()).unwrap();
            cm.listen(id, self.rng.random_range(0..20)).unwrap();
        }
    }

    /// Each program of each host makes that many connections.
    pub(crate) fn run_many(&mut self, hosts: usize, owners: u64, each: usize) {
        assert_eq!((hosts, owners), (self.storm.hosts, self.storm.owners));
        self.listeners();
        for host in 0..hosts {
            for _ in 0..owners as usize * each {
                let at = self.rng.random_range(0..2 * SECOND);
                self.schedule(at, Task::Connect { host });
            }
        }
        self.advance(None);
        let all = hosts as u64 * owners * each as u64;
        for (name, expected) in [("CONNECT_RESPONSE", all), ("UNREACHABLE", 0), ("REJECTED", 0), ("stale", 0)] {
            assert_eq!(self.seen.get(name).copied().unwrap_or(0), expected, "{name}: {:?}", self.seen);
        }
        assert!(self.longest_connect < 2 * SECOND, "{} ms", self.longest_connect / MS);
        self.check_quiet();
        self.end();
        assert!(self.seen["lost"] > 100, "{:?}", self.seen);
    }

    fn any_host(&mut self) -> usize {
        self.rng.random_range(0..self.hosts.len())
    }

    fn schedule(&mut self, delay: Nanos, task: Task) {
        self.sequence += 1;
        self.tasks.insert((self.now + delay, self.sequence), task);
    }

    /// After a program has thought.
    fn later(&mut self, task: Task) {
        let delay = self.rng.random_range(0..self.storm.thinking);
        self.schedule(delay, task);
    }

    fn say(&mut self, text: impl FnOnce() -> String) {
        let line = format!("{:>12} us  {}", self.now / 1_000, text());
        line.hash(&mut self.hasher);
        if self.last_steps.len() == 2_000 {
            self.last_steps.pop_front();
        }
        self.last_steps.push_back(line);
    }

    pub(crate) fn story(&self) -> String {
        let mut story = format!("seed {}: {:?}\n", self.seed, self.storm);
        for line in &self.last_steps {
            writeln!(story, "{line}").expect("a string takes all");
        }
        story
    }

    pub(crate) fn digest(&self) -> u64 {
        self.hasher.finish()
    }

    fn count(&mut self, name: &'static str) {
        *self.seen.entry(name).or_default() += 1;
    }

    /// Lets things happen until a time, or until nothing is left to happen.
    fn advance(&mut self, until: Option<Nanos>) {
        let end = until.unwrap_or(self.now + 10_000 * SECOND);
        loop {
            let timers = self.hosts.iter().filter_map(|host| host.cm.next_timeout());
            let packets = self.flying.keys().map(|(at, _)| *at).take(1);
            let tasks = self.tasks.keys().map(|(at, _)| *at).take(1);
            let Some(at) = timers.chain(packets).chain(tasks).min() else { break };
            if at > end {
                assert!(until.is_some(), "it never ends");
                break;
            }
            self.now = self.now.max(at);
            self.step();
            self.drain();
            self.steps += 1;
            assert!(self.steps < 2_000_000, "it never ends");
            if self.steps.is_multiple_of(64) {
                self.hosts.iter().for_each(|host| host.cm.check());
            }
        }
        self.now = until.unwrap_or(self.now).max(self.now);
    }

    fn step(&mut self) {
        if let Some(entry) = self.flying.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let packet = entry.remove();
            let Some(host) = self.hosts.iter().position(|host| host.addr == packet.arrival.dst) else { return };
            let now = self.now;
            let result = self.hosts[host].cm.handle_packet(now, &packet.arrival, &packet.payload);
            if let Err(reason) = result {
                self.say(|| format!("host {host}: {reason}"));
            }
        } else if let Some(entry) = self.tasks.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let task = entry.remove();
            self.perform(task);
        } else {
            let now = self.now;
            self.hosts.iter_mut().for_each(|host| host.cm.handle_timeout(now));
        }
    }

    fn chance(&mut self, per_mille: u32) -> bool {
        self.rng.random_range(0..1_000) < per_mille
    }

    /// Takes what all hosts want to send and to tell.
    fn drain(&mut self) {
        for host in 0..self.hosts.len() {
            while let Some(transmit) = self.hosts[host].cm.poll_transmit() {
                self.say(|| format!("host {host} -> {}: {}", transmit.path.remote, transmit.mad));
                let arrival = Arrival { src: transmit.path.local, dst: transmit.path.remote, ifindex: 1 };
                self.carry(arrival, transmit.mad.emit());
            }
            while let Some(event) = self.hosts[host].cm.poll_event() {
                self.say(|| format!("host {host} {:?}: {}", event.id, event.kind.name()));
                self.count(event.kind.name());
                self.react(host, event);
            }
        }
    }

    /// What becomes of a datagram.
    fn carry(&mut self, arrival: Arrival, payload: [u8; MAD_LEN]) {
        let storm = self.storm;
        if !self.stormy {
            self.fly(storm.latency, arrival, payload);
            return;
        }
        if self.chance(storm.lost_per_mille) {
            self.count("lost");
            return;
        }
        let copies = if self.chance(storm.duplicated_per_mille) {
            self.count("duplicated");
            2
        } else {
            1
        };
        for _ in 0..copies {
            let mut delay = storm.latency;
            if self.chance(storm.delayed_per_mille) {
                self.count("delayed");
                delay += self.rng.random_range(0..storm.longest_delay);
            }
            let mut payload = payload;
            if self.chance(storm.changed_per_mille) {
                self.count("changed");
                for _ in 0..self.rng.random_range(1..4) {
                    payload[self.rng.random_range(0..100)] ^= 1 << self.rng.random_range(0..8);
                }
            }
            self.fly(delay, arrival, payload);
        }
    }

    fn fly(&mut self, delay: Nanos, arrival: Arrival, payload: [u8; MAD_LEN]) {
        self.sequence += 1;
        self.flying.insert((self.now + delay, self.sequence), Packet { arrival, payload });
    }

    /// What a program does when it is told something.
    fn react(&mut self, host: usize, event: Event) {
        let id = event.id;
        if let EventKind::ConnectRequest(request) = &event.kind {
            let role = if request.service == Service::Connected { Role::Passive } else { Role::Answerer };
            self.models.insert((host, id), Model::new(role));
        }
        self.models.get_mut(&(host, id)).expect("events are of ids that the program has").event(&event.kind);
        match event.kind {
            EventKind::ConnectRequest(request) if request.service == Service::Connected => {
                self.later(Task::Decide { host, id });
            }
            EventKind::ConnectRequest(_) => self.later(Task::Answer { host, id }),
            EventKind::ConnectResponse { .. } => {
                if let Some(began) = self.began.remove(&(host, id)) {
                    self.longest_connect = self.longest_connect.max(self.now - began);
                }
                self.later(Task::Establish { host, id });
            }
            EventKind::Established => {
                if self.rng.random_bool(0.5) {
                    self.later(Task::Disconnect { host, id });
                }
            }
            EventKind::Disconnected { .. } => {
                self.later(Task::Disconnect { host, id });
                if self.rng.random_bool(0.3) {
                    self.later(Task::Destroy { host, id });
                }
            }
            EventKind::Rejected { reason, .. } => {
                if reason == RejReason::STALE_CONNECTION {
                    self.count("stale");
                    assert!(self.storm.reuse || self.storm.changed_per_mille > 0, "stale without cause");
                }
                self.later(Task::Destroy { host, id });
            }
            EventKind::Unreachable
            | EventKind::ConnectError
            | EventKind::Resolved { .. }
            | EventKind::NotResolved { .. }
            | EventKind::TimewaitExit => self.later(Task::Destroy { host, id }),
        }
    }

    fn is_there(&self, host: usize, id: CmId) -> bool {
        self.models.get(&(host, id)).is_some_and(|model| !model.is_destroyed())
    }

    fn perform(&mut self, task: Task) {
        self.say(|| format!("{task:?}"));
        match task {
            Task::Connect { host } => self.connect(host),
            Task::Resolve { host } => self.resolve(host),
            Task::Crash { host, owner } => self.crash(host, owner),
            Task::Data { host, dest, qpn } => self.data(host, dest, qpn),
            Task::Decide { host, id } if self.is_there(host, id) => self.decide(host, id),
            Task::Answer { host, id } if self.is_there(host, id) => self.answer(host, id),
            Task::Establish { host, id } if self.is_there(host, id) => self.establish(host, id),
            Task::Disconnect { host, id } if self.is_there(host, id) => self.disconnect(host, id),
            Task::Destroy { host, id } if self.is_there(host, id) => self.destroy(host, id),
            // The id is gone meanwhile.
            _ => {}
        }
    }

    fn any_port(&mut self) -> u16 {
        // Some go where nobody listens.
        let extra = u64::from(self.storm.connects > 0);
        PORT + self.rng.random_range(1..=self.storm.owners + extra) as u16
    }

    fn new_qpn(&mut self, host: usize) -> u32 {
        let Host { cm, used, .. } = &mut self.hosts[host];
        let old = self.storm.reuse.then(|| used.iter().position(|qpn| !cm.holds_qpn(*qpn))).flatten();
        if let Some(old) = old {
            return used.remove(old);
        }
        self.next_qpn += 1;
        self.next_qpn
    }

    fn connect(&mut self, host: usize) {
        let (to, port) = (self.any_host(), self.any_port());
        let owner = Owner(self.rng.random_range(1..=self.storm.owners));
        let Ok(id) = self.hosts[host].cm.create_id(owner, PortSpace::Tcp, Service::Connected) else {
            return self.count("too many ids");
        };
        let (qpn, remote) = (self.new_qpn(host), self.hosts[to].addr);
        let now = self.now;
        let Host { cm, addr, guid, used, by_qpn } = &mut self.hosts[host];
        let param = ConnectionParam { qpn, responder_resources: 3, initiator_depth: 5, ..ConnectionParam::default() };
        let path = Path::new(*addr, remote);
        let connect = ConnectParam { path, port, ca_guid: *guid, param, private_data: &[], ece: Ece::default() };
        cm.connect(now, id, &connect).expect("the queue pair is free");
        used.push(qpn);
        by_qpn.insert(qpn, id);
        self.models.insert((host, id), Model::new(Role::Active));
        self.began.insert((host, id), now);
    }

    fn resolve(&mut self, host: usize) {
        let (to, port) = (self.any_host(), self.any_port());
        let owner = Owner(self.rng.random_range(1..=self.storm.owners));
        let Ok(id) = self.hosts[host].cm.create_id(owner, PortSpace::Udp, Service::Datagram) else {
            return self.count("too many ids");
        };
        let path = Path::new(self.hosts[host].addr, self.hosts[to].addr);
        let now = self.now;
        self.hosts[host].cm.resolve(now, id, &ResolveParam { path, port, private_data: &[] }).unwrap();
        self.models.insert((host, id), Model::new(Role::Resolver));
    }

    fn decide(&mut self, host: usize, id: CmId) {
        let now = self.now;
        self.hosts[host].cm.take_request(id);
        let choice = if self.storm.connects == 0 { 0 } else { self.rng.random_range(0..100) };
        match choice {
            0..80 => {
                let qpn = self.new_qpn(host);
                let Host { cm, guid, used, by_qpn, .. } = &mut self.hosts[host];
                let param =
                    ConnectionParam { qpn, responder_resources: 2, initiator_depth: 1, ..ConnectionParam::default() };
                let accept = AcceptParam { ca_guid: *guid, param, private_data: &[], ece: Ece::default() };
                match cm.accept(now, id, &accept) {
                    Ok(()) => {
                        used.push(qpn);
                        by_qpn.insert(qpn, id);
                        self.models.get_mut(&(host, id)).unwrap().accept();
                    }
                    // The peer gave up meanwhile.
                    Err(CmError::State { state: State::Done, .. }) => used.push(qpn),
                    Err(error) => panic!("{error}"),
                }
            }
            80..90 => {
                let result = self.hosts[host].cm.reject(now, id, RejReason::CONSUMER_DEFINED, b"no");
                assert!(matches!(result, Ok(()) | Err(CmError::State { state: State::Done, .. })), "{result:?}");
                self.later(Task::Destroy { host, id });
            }
            90..95 => {
                let _too_late = self.hosts[host].cm.mra(id, self.rng.random_range(0..22));
                self.later(Task::Decide { host, id });
            }
            _ => self.destroy(host, id),
        }
    }

    fn answer(&mut self, host: usize, id: CmId) {
        let (now, qpn) = (self.now, self.new_qpn(host));
        let cm = &mut self.hosts[host].cm;
        if self.rng.random_bool(0.8) {
            let accept = AcceptDatagramParam { qpn, qkey: UDP_QKEY, private_data: &[], ece: Ece::default() };
            cm.accept_datagram(now, id, &accept).unwrap();
        } else {
            cm.reject(now, id, RejReason::CONSUMER_DEFINED, &[]).unwrap();
        }
        self.later(Task::Destroy { host, id });
    }

    fn establish(&mut self, host: usize, id: CmId) {
        let now = self.now;
        let choice = if self.storm.connects == 0 { 0 } else { self.rng.random_range(0..100) };
        match choice {
            0..85 => {
                let cm = &mut self.hosts[host].cm;
                match cm.establish(id) {
                    Ok(()) => {
                        let parameters = cm.qp_parameters(id).unwrap();
                        let (dest, qpn) = (parameters.path.remote, parameters.dest_qpn);
                        if self.rng.random_bool(0.3) {
                            self.later(Task::Data { host, dest, qpn });
                        }
                        if self.rng.random_bool(0.3) {
                            self.later(Task::Disconnect { host, id });
                        }
                    }
                    // The peer gave up meanwhile.
                    Err(CmError::State { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            85..93 => {
                let _gone = self.hosts[host].cm.reject(now, id, RejReason::CONSUMER_DEFINED, &[]);
                self.later(Task::Destroy { host, id });
            }
            _ => self.destroy(host, id),
        }
    }

    /// Data arrive at a queue pair whose program waits for the RTU.
    fn data(&mut self, _from: usize, dest: IpAddr, qpn: u32) {
        let host = self.hosts.iter().position(|host| host.addr == dest).expect("packets go to hosts");
        if let Some(id) = self.hosts[host].by_qpn.get(&qpn).copied().filter(|id| self.is_there(host, *id)) {
            let _not_waiting = self.hosts[host].cm.notify(id);
        }
    }

    fn disconnect(&mut self, host: usize, id: CmId) {
        let now = self.now;
        let result = self.hosts[host].cm.disconnect(now, id);
        assert!(matches!(result, Ok(()) | Err(CmError::State { .. })), "{result:?}");
    }

    fn destroy(&mut self, host: usize, id: CmId) {
        let now = self.now;
        self.hosts[host].cm.destroy(now, id).unwrap();
        self.models.get_mut(&(host, id)).unwrap().destroy();
    }

    /// A program is killed, and started again.
    fn crash(&mut self, host: usize, owner: Owner) {
        self.count("crash");
        let now = self.now;
        let theirs: Vec<_> =
            self.hosts[host].cm.ids().filter(|info| info.owner == Some(owner)).map(|info| info.id).collect();
        self.hosts[host].cm.release_owner(now, owner);
        for id in theirs {
            if let Some(model) = self.models.get_mut(&(host, id)) {
                model.destroy();
            }
        }
        self.listen(host, owner.0);
    }

    /// Nothing moves any more, and programs have done what they wanted: what is connected has two ends that agree.
    fn check_quiet(&mut self) {
        let mut pairs = 0;
        for host in 0..self.hosts.len() {
            self.hosts[host].cm.check();
            for info in self.hosts[host].cm.ids() {
                let state = info.state;
                assert!(
                    matches!(state, State::Listen | State::Established | State::Done),
                    "host {host}: {:?} waits in {state}",
                    info.id
                );
                if state != State::Established || self.storm.changed_per_mille > 0 {
                    continue;
                }
                let ours = self.hosts[host].cm.qp_parameters(info.id).unwrap();
                let peer = self.hosts.iter().find(|peer| peer.addr == ours.path.remote).unwrap();
                let other = peer.by_qpn.get(&ours.dest_qpn).and_then(|id| peer.cm.qp_parameters(*id).ok());
                let theirs = other.unwrap_or_else(|| panic!("host {host}: {:?} is connected alone", info.id));
                assert_eq!(peer.cm.state(peer.by_qpn[&ours.dest_qpn]), Ok(State::Established));
                assert_eq!((theirs.dest_qpn, theirs.path.remote), (ours.qpn, ours.path.local));
                assert_eq!((theirs.rq_psn, theirs.sq_psn), (ours.sq_psn, ours.rq_psn));
                assert_eq!(theirs.path.mtu, ours.path.mtu);
                let reads = (theirs.max_rd_atomic, theirs.max_dest_rd_atomic);
                assert_eq!(reads, (ours.max_dest_rd_atomic, ours.max_rd_atomic));
                pairs += 1;
            }
        }
        assert_eq!(pairs % 2, 0);
        *self.seen.entry("pairs that last").or_default() += pairs / 2;
    }

    /// All programs end; after a while nothing is left.
    fn end(&mut self) {
        for host in 0..self.hosts.len() {
            for owner in 1..=self.storm.owners {
                let now = self.now;
                self.hosts[host].cm.release_owner(now, Owner(owner));
            }
        }
        self.models.values_mut().filter(|model| !model.is_destroyed()).for_each(Model::destroy);
        self.drain();
        self.advance(None);
        for host in 0..self.hosts.len() {
            let cm = &self.hosts[host].cm;
            cm.check();
            assert_eq!(cm.ids().collect::<Vec<_>>(), []);
            let stats = *cm.stats();
            for (name, count) in [
                ("retries", stats.tx_retries),
                ("rx_duplicates", stats.rx_duplicates),
                ("rx_stray", stats.rx_stray),
                ("rx_unknown_id", stats.rx_unknown_id),
                ("rx_limited", stats.rx_limited),
                ("rx_rejected", stats.rx_rejected),
            ] {
                *self.seen.entry(name).or_default() += count;
            }
        }
    }
}
