// What must hold for any packets and any commands. Shared by the replay of the fuzz corpus, the property test and the fuzz target.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ferroce_cm::{
    AcceptDatagramParam, AcceptParam, Arrival, BindOptions, Cm, CmId, Config, ConnectParam, ConnectionParam, EventKind,
    Nanos, Owner, Path, ResolveParam, Service, User,
};
use ferroce_wire::mad::{Ece, MAD_LEN, Mad, Message, PortSpace, RejReason, gid_of};

/// Bytes that are used up.
struct Source<'a>(&'a [u8]);

impl Source<'_> {
    fn byte(&mut self) -> u8 {
        let Some((byte, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *byte
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound
    }
}

const PEERS: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)),
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 3)),
    IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2)),
];
const US: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1)),
];

/// One machine, the programs on it, and what an attacker knows.
struct Bench {
    cm: Cm,
    now: Nanos,
    ids: Vec<CmId>,
    /// The last datagrams that the machine sent: an attacker may see all.
    seen: Vec<(usize, Mad)>,
    qpn: u32,
    transmits: u64,
    /// Events, states and reasons.
    met: BTreeSet<String>,
}

/// Commands of programs and packets of attackers, as the bytes say. Panics if anything is not as it must be. Gives what was met:
/// events, states, and reasons to drop a packet.
pub(crate) fn any_steps(bytes: &[u8]) -> BTreeSet<String> {
    let mut source = Source(bytes);
    let mut config = Config::new([source.byte(); 32]);
    config.limits.ids = 40;
    config.limits.ids_per_owner = 15;
    config.limits.ids_of_guests = 28;
    config.limits.listeners_per_owner = 4;
    config.limits.backlog = 4;
    config.limits.pending_per_peer = 3;
    config.limits.lingering = 8;
    let mut bench = Bench {
        cm: Cm::new(config),
        now: 1,
        ids: Vec::new(),
        seen: Vec::new(),
        qpn: 0x100,
        transmits: 0,
        met: BTreeSet::new(),
    };
    for owner in 1..=2 {
        bench.cm.enroll(Owner(owner), User { number: owner, guest: owner == 1 });
        for (space, service) in [(PortSpace::Tcp, Service::Connected), (PortSpace::Udp, Service::Datagram)] {
            bench.listen(Owner(owner), space, service);
        }
    }
    while !source.0.is_empty() {
        bench.step(&mut source);
        bench.drain();
        bench.cm.check();
        let states = bench.cm.ids().map(|info| info.state.to_string());
        bench.met.extend(states.collect::<Vec<_>>());
    }
    bench.end();
    bench.met
}

impl Bench {
    fn listen(&mut self, owner: Owner, space: PortSpace, service: Service) {
        let Ok(id) = self.cm.create_id(owner, space, service) else { return };
        let addr = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 7 + owner.0 as u16);
        if self.cm.bind(id, addr, BindOptions::default()).is_ok() {
            let _limit = self.cm.listen(id, 3);
        }
        self.ids.push(id);
    }

    fn any_id(&mut self, source: &mut Source<'_>) -> CmId {
        // One of the newest.
        let back = 1 + source.below(6);
        let at = self.ids.len().checked_sub(back);
        at.map_or(CmId::from_number(77), |at| self.ids[at])
    }

    fn step(&mut self, source: &mut Source<'_>) {
        let owner = Owner(1 + source.below(2) as u64);
        let peer = source.below(3);
        let (now, ece) = (self.now, Ece { vendor_id: 1, attr_mod: 2 });
        let path = Path { ifindex: 1, ack_timeout: source.byte() & 31, ..Path::new(US[peer], PEERS[peer]) };
        match source.below(16) {
            0 => {
                let Ok(id) = self.cm.create_id(owner, PortSpace::Tcp, Service::Connected) else { return };
                self.ids.push(id);
                self.qpn += 1;
                let param = ConnectionParam { qpn: self.qpn, ..ConnectionParam::default() };
                let connect = ConnectParam { path, port: 7, ca_guid: 1, param, private_data: b"data", ece };
                self.cm.connect(now, id, &connect).expect("the id is fresh and the queue pair too");
            }
            1 => {
                let Ok(id) = self.cm.create_id(owner, PortSpace::Udp, Service::Datagram) else { return };
                self.ids.push(id);
                self.cm.resolve(now, id, &ResolveParam { path, port: 7, private_data: b"" }).expect("the id is fresh");
            }
            2 => self.listen(owner, PortSpace::Tcp, Service::Connected),
            3 => {
                let id = self.any_id(source);
                self.qpn += u32::from(source.byte() & 1);
                let param = ConnectionParam { qpn: self.qpn, ..ConnectionParam::default() };
                let _state = self.cm.accept(now, id, &AcceptParam { ca_guid: 1, param, private_data: b"", ece });
                let answer = AcceptDatagramParam { qpn: self.qpn, qkey: 1, private_data: b"", ece };
                let _state = self.cm.accept_datagram(now, id, &answer);
            }
            4 => {
                let id = self.any_id(source);
                let _state = self.cm.reject(now, id, RejReason(source.byte().into()), b"no");
            }
            5 => _ = self.any_id(source).pipe(|id| self.cm.establish(id)),
            6 => _ = self.any_id(source).pipe(|id| self.cm.notify(id)),
            7 => _ = self.any_id(source).pipe(|id| self.cm.disconnect(now, id)),
            8 => _ = self.any_id(source).pipe(|id| self.cm.destroy(now, id)),
            9 => {
                let id = self.any_id(source);
                let _state = self.cm.mra(id, source.byte() & 31);
                self.cm.take_request(id);
            }
            10 if source.byte() & 15 == 0 => self.cm.release_owner(now, owner),
            11 => {
                let far = if source.byte() & 15 == 0 { 40 } else { 30 };
                self.now += 1 << (source.byte() % far);
                self.cm.handle_timeout(self.now);
            }
            _ => self.attack(source, peer),
        }
    }

    /// A packet: something that was sent, with its ends exchanged and bytes changed, or made up.
    fn attack(&mut self, source: &mut Source<'_>, peer: usize) {
        // One of the newest, from where it went to, or from elsewhere.
        let seen = self.seen.len().checked_sub(source.below(6)).and_then(|at| self.seen.get(at));
        let (peer, mut mad) = match seen {
            Some((to, mad)) => (if source.byte() & 15 == 0 { peer } else { *to }, *mad),
            None => (peer, made_up(source)),
        };
        address(&mut mad.message, peer);
        let mut bytes = mad.emit();
        let choices = source.byte();
        if choices & 3 != 0 {
            turn_round(&mut bytes, source);
        }
        if choices & 12 != 0 {
            // Another message with the same ids.
            bytes[17] = 0x10 + source.below(11) as u8;
        }
        const MRA: u8 = 0x11;
        const DREQ: u8 = 0x15;
        if bytes[17] == MRA {
            bytes[32] = source.byte();
        } else if bytes[17] == DREQ {
            let qpn = self.qpn.wrapping_sub(source.below(8) as u32) << 8;
            bytes[32..35].copy_from_slice(&qpn.to_be_bytes()[..3]);
        }
        let harm = source.byte();
        for _ in 0..if harm & 3 == 0 { harm >> 2 & 3 } else { 0 } {
            let at = 24 + source.below(MAD_LEN - 24);
            bytes[at] = source.byte();
        }
        let arrival = Arrival { src: PEERS[peer], dst: US[peer], ifindex: 1 };
        let before = (self.transmits, self.cm.stats().rx_msgs);
        let result = self.cm.handle_packet(self.now, &arrival, &bytes);
        assert_eq!(self.cm.stats().rx_msgs, before.1 + 1);
        if let Err(reason) = result {
            self.met.insert(reason.to_string().split([':', '1']).next().unwrap_or_default().to_owned());
        }
        self.drain();
        assert!(
            self.transmits <= before.0 + 2,
            "one packet makes at most two: its answer, and the end of what is stale"
        );
    }

    fn drain(&mut self) {
        while let Some(transmit) = self.cm.poll_transmit() {
            self.transmits += 1;
            assert_eq!(Mad::parse(&transmit.mad.emit()), Ok(transmit.mad));
            let peer = PEERS.iter().position(|peer| *peer == transmit.path.remote).expect("it goes to a peer");
            assert_eq!(transmit.path.local, US[peer]);
            if self.seen.len() == 64 {
                self.seen.remove(0);
            }
            self.seen.push((peer, transmit.mad));
        }
        while let Some(event) = self.cm.poll_event() {
            assert!(self.cm.state(event.id).is_ok(), "an event of an id that is gone");
            self.met.insert(event.kind.name().to_owned());
            if let EventKind::ConnectRequest(_) = event.kind {
                self.ids.push(event.id);
            }
        }
        if self.ids.len() > 200 {
            let cm = &self.cm;
            self.ids.retain(|id| cm.state(*id).is_ok());
        }
    }

    /// Programs end and time passes: nothing is left.
    fn end(&mut self) {
        for owner in 1..=2 {
            self.cm.release_owner(self.now, Owner(owner));
            self.cm.enroll(Owner(owner), User { number: 1, guest: true });
        }
        for _ in 0..10_000 {
            let Some(at) = self.cm.next_timeout() else { break };
            self.now = self.now.max(at);
            self.cm.handle_timeout(self.now);
            self.drain();
        }
        self.cm.check();
        assert_eq!(self.cm.next_timeout(), None, "it never ends");
        assert_eq!(self.cm.ids().count(), 0);
    }
}

trait Pipe: Sized {
    fn pipe<T>(self, f: impl FnOnce(Self) -> T) -> T {
        f(self)
    }
}

impl Pipe for CmId {}

/// A request of a stranger, with few different numbers, so that they meet.
fn made_up(source: &mut Source<'_>) -> Mad {
    let mut scratch = Cm::new(Config::new([source.byte(); 32]));
    let path = Path::new(PEERS[0], US[0]);
    let datagram = source.byte() & 3 == 0;
    let (space, service) =
        if datagram { (PortSpace::Udp, Service::Datagram) } else { (PortSpace::Tcp, Service::Connected) };
    let port = 8 + source.below(3) as u16;
    let id = scratch.create_id(Owner(9), space, service).expect("it is empty");
    if datagram {
        scratch.resolve(0, id, &ResolveParam { path, port, private_data: b"" }).expect("it is fresh");
    } else {
        let param = ConnectionParam { qpn: 2 + source.below(8) as u32, ..ConnectionParam::default() };
        let ece = Ece::default();
        let ca_guid = source.below(2) as u64;
        scratch.connect(0, id, &ConnectParam { path, port, ca_guid, param, private_data: b"", ece }).expect("fresh");
    }
    scratch.poll_transmit().expect("a request leaves at once").mad
}

/// What the peer of the sender would say: ids lie at the same place in all messages but those of SIDR.
fn turn_round(bytes: &mut [u8; MAD_LEN], source: &mut Source<'_>) {
    const REQ: u8 = 0x10;
    let (ids, _) = bytes[24..].split_first_chunk_mut::<8>().expect("256 bytes are more");
    let [l0, l1, l2, l3, r0, r1, r2, r3] = *ids;
    let theirs =
        if bytes[17] == REQ || [r0, r1, r2, r3] == [0; 4] { [0, 0, 0, source.byte()] } else { [r0, r1, r2, r3] };
    bytes[24..28].copy_from_slice(&theirs);
    bytes[28..32].copy_from_slice(&[l0, l1, l2, l3]);
}

/// A request names the addresses that it comes with.
fn address(message: &mut Message, peer: usize) {
    let header = |port: &[u8]| {
        let src_port = u16::from_be_bytes([port[2], port[3]]);
        ferroce_wire::mad::IpHeader { src_port, src: PEERS[peer], dst: US[peer] }.emit()
    };
    match message {
        Message::Req(req) => {
            req.primary.local_gid = gid_of(PEERS[peer]);
            req.primary.remote_gid = gid_of(US[peer]);
            let bytes = header(&req.private_data);
            req.private_data[..36].copy_from_slice(&bytes);
        }
        Message::SidrReq(req) => {
            let bytes = header(&req.private_data);
            req.private_data[..36].copy_from_slice(&bytes);
        }
        _ => {}
    }
}
