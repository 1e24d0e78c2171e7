//! Hosts with a connection manager each, and a network between them that can be told what to do.
#![allow(dead_code)] // Each test file uses its part.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use ferroce_cm::{
    AcceptParam, Arrival, BindOptions, Cm, CmId, Config, ConnectParam, ConnectionParam, DropReason, Event, EventKind,
    Nanos, Owner, Path, Service, State,
};
use ferroce_wire::mad::{Ece, Mad, Message, PortSpace};

pub(crate) const MS: Nanos = 1_000_000;
pub(crate) const SECOND: Nanos = 1_000 * MS;
pub(crate) const PORT: u16 = 7_174;
pub(crate) const OWNER: Owner = Owner(1);

/// Host `n` of the network.
pub(crate) fn addr(n: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, n as u8 + 1).into()
}

pub(crate) fn guid(n: usize) -> u64 {
    0x0200_0000_0000_0001 + n as u64
}

pub(crate) fn param(qpn: u32) -> ConnectionParam {
    ConnectionParam {
        qpn,
        responder_resources: 4,
        initiator_depth: 8,
        retry_count: 7,
        rnr_retry_count: 6,
        ..ConnectionParam::default()
    }
}

pub(crate) fn connect_param(from: usize, to: usize, qpn: u32) -> ConnectParam<'static> {
    let path = Path::new(addr(from), addr(to));
    let ece = Ece::default();
    ConnectParam { path, port: PORT, ca_guid: guid(from), param: param(qpn), private_data: b"hello", ece }
}

pub(crate) fn accept_param(at: usize, qpn: u32) -> AcceptParam<'static> {
    AcceptParam { ca_guid: guid(at), param: param(qpn), private_data: b"welcome", ece: Ece::default() }
}

/// A datagram on its way.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) from: usize,
    pub(crate) arrival: Arrival,
    pub(crate) mad: Mad,
}

/// What becomes of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Arrives,
    Lost,
}

type Rule = Box<dyn FnMut(&Packet) -> Fate>;

/// Two or more hosts; packets take a millisecond.
pub(crate) struct Net {
    pub(crate) now: Nanos,
    pub(crate) hosts: Vec<Cm>,
    flying: VecDeque<(Nanos, Packet)>,
    /// All that was sent, with its time.
    pub(crate) sent: Vec<(Nanos, Packet)>,
    pub(crate) events: Vec<VecDeque<Event>>,
    pub(crate) drops: Vec<DropReason>,
    pub(crate) rule: Rule,
}

impl Net {
    pub(crate) fn new(hosts: usize) -> Net {
        Net::with(hosts, Config::new([0; 32]))
    }

    pub(crate) fn with(hosts: usize, config: Config) -> Net {
        let make = |n: usize| Cm::new(Config { seed: [n as u8 + 1; 32], ..config.clone() });
        Net {
            now: SECOND,
            hosts: (0..hosts).map(make).collect(),
            flying: VecDeque::new(),
            sent: Vec::new(),
            events: vec![VecDeque::new(); hosts],
            drops: Vec::new(),
            rule: Box::new(|_| Fate::Arrives),
        }
    }

    /// Takes what a host wants to send and to tell.
    pub(crate) fn drain(&mut self, host: usize) {
        while let Some(transmit) = self.hosts[host].poll_transmit() {
            let arrival = Arrival { src: transmit.path.local, dst: transmit.path.remote, ifindex: 1 };
            let packet = Packet { from: host, arrival, mad: transmit.mad };
            self.sent.push((self.now, packet.clone()));
            if (self.rule)(&packet) == Fate::Arrives {
                self.flying.push_back((self.now + MS, packet));
            }
        }
        while let Some(event) = self.hosts[host].poll_event() {
            self.events[host].push_back(event);
        }
        self.hosts[host].check();
    }

    /// A command of a program, and what comes out.
    pub(crate) fn at<T>(&mut self, host: usize, command: impl FnOnce(&mut Cm, Nanos) -> T) -> T {
        let result = command(&mut self.hosts[host], self.now);
        self.drain(host);
        result
    }

    /// A datagram arrives, from whomever.
    pub(crate) fn inject(&mut self, host: usize, src: IpAddr, mad: &Mad) -> Result<(), DropReason> {
        let arrival = Arrival { src, dst: addr(host), ifindex: 1 };
        let now = self.now;
        self.at(host, |cm, _| cm.handle_packet(now, &arrival, &mad.emit()))
    }

    /// What is on its way gets lost.
    pub(crate) fn forget(&mut self) {
        self.flying.clear();
    }

    fn next(&self) -> Option<Nanos> {
        let timers = self.hosts.iter().filter_map(Cm::next_timeout);
        timers.chain(self.flying.front().map(|(at, _)| *at)).min()
    }

    fn step(&mut self) {
        if self.flying.front().is_some_and(|(at, _)| *at <= self.now)
            && let Some((_, packet)) = self.flying.pop_front()
        {
            let host = (0..self.hosts.len()).find(|n| addr(*n) == packet.arrival.dst);
            let Some(host) = host else { return };
            let now = self.now;
            let result = self.at(host, |cm, _| cm.handle_packet(now, &packet.arrival, &packet.mad.emit()));
            self.drops.extend(result.err());
            return;
        }
        for host in 0..self.hosts.len() {
            if self.hosts[host].next_timeout().is_some_and(|at| at <= self.now) {
                self.at(host, Cm::handle_timeout);
            }
        }
    }

    /// Lets time pass.
    pub(crate) fn run(&mut self, span: Nanos) {
        let end = self.now + span;
        while let Some(at) = self.next().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.step();
        }
        self.now = end;
    }

    /// Lets time pass until nothing is left to happen by itself. Fails after two hours.
    pub(crate) fn settle(&mut self) {
        let end = self.now + 7_200 * SECOND;
        while let Some(at) = self.next() {
            assert!(at < end, "it never ends");
            self.now = self.now.max(at);
            self.step();
        }
    }

    /// The names of a host's events, which are taken.
    pub(crate) fn names(&mut self, host: usize) -> Vec<&'static str> {
        self.events[host].drain(..).map(|event| event.kind.name()).collect()
    }

    /// A host's only event.
    pub(crate) fn event(&mut self, host: usize) -> Event {
        let event = self.events[host].pop_front().expect("an event");
        assert_eq!(self.events[host], [], "no other event");
        event
    }

    /// Messages sent since the start, by name.
    pub(crate) fn messages(&self) -> Vec<&'static str> {
        self.sent.iter().map(|(_, packet)| packet.mad.message.name()).collect()
    }

    /// The last datagram of that name.
    pub(crate) fn last(&self, name: &str) -> Mad {
        let found = self.sent.iter().rev().find(|(_, packet)| packet.mad.message.name() == name);
        found.unwrap_or_else(|| panic!("no {name}")).1.mad
    }

    pub(crate) fn listen(&mut self, host: usize, backlog: u32) -> CmId {
        self.listen_as(host, OWNER, backlog)
    }

    pub(crate) fn listen_as(&mut self, host: usize, owner: Owner, backlog: u32) -> CmId {
        self.at(host, |cm, _| {
            let id = cm.create_id(owner, PortSpace::Tcp, Service::Connected).unwrap();
            cm.bind(id, SocketAddr::new(addr(host), PORT), BindOptions::default()).unwrap();
            cm.listen(id, backlog).unwrap();
            id
        })
    }

    /// A new id of the port space TCP.
    pub(crate) fn id(&mut self, host: usize) -> CmId {
        self.at(host, |cm, _| cm.create_id(OWNER, PortSpace::Tcp, Service::Connected).unwrap())
    }

    pub(crate) fn connect(&mut self, from: usize, to: usize, qpn: u32) -> CmId {
        let id = self.id(from);
        self.at(from, |cm, now| cm.connect(now, id, &connect_param(from, to, qpn))).unwrap();
        id
    }

    pub(crate) fn state(&self, host: usize, id: CmId) -> State {
        self.hosts[host].state(id).unwrap()
    }

    /// Host 0 connects to host 1: the client's id, and the server's id, which has not answered.
    pub(crate) fn requested(&mut self) -> (CmId, CmId) {
        self.listen(1, 0);
        let client = self.connect(0, 1, 0x11);
        self.run(10 * MS);
        let event = self.event(1);
        assert!(matches!(event.kind, EventKind::ConnectRequest(_)), "{event:?}");
        self.at(1, |cm, _| cm.take_request(event.id));
        (client, event.id)
    }

    /// The same, accepted: the client has not established.
    pub(crate) fn replied(&mut self) -> (CmId, CmId) {
        let (client, server) = self.requested();
        self.at(1, |cm, now| cm.accept(now, server, &accept_param(1, 0x22))).unwrap();
        self.run(10 * MS);
        assert_eq!(self.names(0), ["CONNECT_RESPONSE"]);
        (client, server)
    }

    /// The same, connected.
    pub(crate) fn established(&mut self) -> (CmId, CmId) {
        let (client, server) = self.replied();
        self.at(0, |cm, _| cm.establish(client)).unwrap();
        self.run(10 * MS);
        assert_eq!(self.names(1), ["ESTABLISHED"]);
        (client, server)
    }

    /// Loses the first `count` datagrams of that name.
    pub(crate) fn lose(&mut self, name: &'static str, mut count: usize) {
        self.rule = Box::new(move |packet| {
            let lost = packet.mad.message.name() == name && count > 0;
            count -= usize::from(lost);
            if lost { Fate::Lost } else { Fate::Arrives }
        });
    }

    /// Every id of every host is given up; after some time nothing is left.
    pub(crate) fn end(&mut self) {
        for host in 0..self.hosts.len() {
            let owners: Vec<_> = self.hosts[host].ids().filter_map(|info| info.owner).collect();
            for owner in owners {
                self.at(host, |cm, now| cm.release_owner(now, owner));
            }
        }
        self.settle();
        for cm in &self.hosts {
            assert_eq!(cm.ids().collect::<Vec<_>>(), []);
            cm.check();
        }
    }
}

/// How often each message was sent.
pub(crate) fn count(messages: &[&'static str]) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for message in messages {
        *counts.entry(*message).or_default() += 1;
    }
    counts
}

/// The ids in a message: sender's, receiver's.
pub(crate) fn ids(message: &Message) -> (u32, u32) {
    match message {
        Message::Req(m) => (m.local_comm_id, 0),
        Message::Mra(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Rej(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Rep(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Rtu(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Dreq(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Drep(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Lap(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Apr(m) => (m.local_comm_id, m.remote_comm_id),
        Message::SidrReq(m) => (m.request_id, 0),
        Message::SidrRep(m) => (0, m.request_id),
    }
}
