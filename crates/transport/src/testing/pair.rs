//! Two queue pairs with a wire between them.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ferroce_wire::{Headers, Psn};
use smallvec::SmallVec;

use super::host::{SimHost, SimSrq};
use super::memory::Region;
use super::train::{SimPacket, explode};
use crate::host::{Packet, Payload};
use crate::qp::Qp;
use crate::timer::Nanos;
use crate::verbs::{
    Access, Completion, PathAddr, QpAttr, QpAttrMask, QpInit, QpState, QpType, RecvWr, SendData, SendFlags, SendOp,
    SendWr, Sge, UdDest,
};

/// One way across the wire.
const LATENCY: Nanos = 5_000;
/// Protection domain of both ends.
const PD: u32 = 7;
/// The shared receive queue of an XRC target that requests go to unless they say otherwise.
pub const SRQN: u32 = 0x55_0001;
/// Q_Key of both ends.
const QKEY: u32 = 0x1234;
/// Steps after which a run is a runaway.
const STEPS_MAX: u32 = 300_000;

/// One of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Who {
    A,
    B,
}

impl Who {
    /// The other one.
    pub fn peer(self) -> Who {
        match self {
            Who::A => Who::B,
            Who::B => Who::A,
        }
    }
}

/// What the wire does to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Fate {
    Deliver,
    Drop,
    Duplicate,
    /// Arrives so much later.
    Delay(Nanos),
}

/// A packet that was sent.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// When.
    pub at: Nanos,
    /// By whom.
    pub from: Who,
    /// Its headers.
    pub headers: Headers,
    /// Payload bytes.
    pub len: usize,
    /// What the wire did.
    pub fate: Fate,
}

/// One end: a queue pair and its host.
#[derive(Debug)]
pub struct End {
    /// The queue pair.
    pub qp: Qp,
    /// Its host.
    pub host: SimHost,
    /// Its path to the other end.
    pub path: Arc<PathAddr>,
    /// A region with all rights, filled with a pattern of the end's own.
    pub region: Region,
}

impl End {
    /// Posts receives of `len` bytes each, one behind the other from `offset` of the region; their ids count up from `first_id`.
    pub fn post_recvs(&mut self, first_id: u64, count: u32, offset: u32, len: u32) {
        for i in 0..count {
            let sges: SmallVec<[Sge; 2]> =
                if len == 0 { SmallVec::new() } else { [self.region.sge(offset + i * len, len)].into_iter().collect() };
            let wr = RecvWr { wr_id: first_id + u64::from(i), sges };
            match self.host.srqs.get_mut(&SRQN) {
                Some(srq) => srq.receives.push_back(wr),
                None => self.host.receives.push_back(wr),
            }
        }
    }

    /// Completions of receives, in order; of an XRC target: in the shared receive queue [`SRQN`].
    pub fn received(&self) -> &[Completion] {
        self.host.srqs.get(&SRQN).map_or(&self.host.received, |srq| &srq.received)
    }

    /// Bytes of the region.
    pub fn bytes(&self, offset: u32, len: u32) -> &[u8] {
        self.host.memory.read(self.region, offset, len)
    }
}

/// A receive buffer and how fast it is emptied.
#[derive(Clone, Debug)]
struct Buffer {
    capacity: u32,
    pace: Nanos,
    /// When each packet in it is read, and its bytes.
    waiting: VecDeque<(Nanos, u32)>,
    /// Nothing is read before.
    next_read: Nanos,
}

/// What the kernel keeps on a datagram's account besides its bytes.
const BOOKKEEPING: u32 = 1024;

impl Buffer {
    /// When a packet that arrives at `at` is read. `None`: there is no room for it.
    fn take(&mut self, at: Nanos, bytes: u32) -> Option<Nanos> {
        while self.waiting.front().is_some_and(|&(read, _)| read <= at) {
            self.waiting.pop_front();
        }
        let bytes = bytes + BOOKKEEPING;
        if self.waiting.iter().map(|&(_, bytes)| bytes).sum::<u32>() + bytes > self.capacity {
            return None;
        }
        let read = self.next_read.max(at);
        self.next_read = read + self.pace;
        self.waiting.push_back((read, bytes));
        Some(read)
    }
}

/// How two queue pairs are made and connected.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Their type; with `XrcSend`, A is the initiator and B the target, which has the shared receive queue [`SRQN`].
    pub qp_type: QpType,
    /// Path MTU.
    pub mtu: u32,
    /// First PSN of A.
    pub psn_a: u32,
    /// First PSN of B.
    pub psn_b: u32,
    /// Attributes of both; addresses, PSNs, MTU and state are put in.
    pub attr: QpAttr,
    /// B receives from an SRQ.
    pub srq_b: bool,
    /// Size of the send queues. Nothing keeps a test from posting more.
    pub max_send_wr: u32,
    /// Bytes of each end's region.
    pub region: u32,
}

impl Setup {
    /// Ordinary attributes for a type.
    pub fn new(qp_type: QpType) -> Setup {
        Setup {
            qp_type,
            mtu: 1024,
            psn_a: 0x00_1000,
            psn_b: 0xa0_0000,
            attr: QpAttr {
                qkey: QKEY,
                access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC | Access::FLUSH_GLOBAL,
                port_num: 1,
                max_rd_atomic: 16,
                max_dest_rd_atomic: 16,
                min_rnr_timer: 12,
                timeout: 14,
                retry_cnt: 7,
                rnr_retry: 7,
                ..QpAttr::default()
            },
            srq_b: false,
            max_send_wr: 128,
            region: 1 << 20,
        }
    }
}

impl Setup {
    fn qp_type_of(&self, who: Who) -> QpType {
        match (self.qp_type, who) {
            (QpType::XrcSend, Who::B) => QpType::XrcRecv,
            (qp_type, _) => qp_type,
        }
    }
}

type Rule = Box<dyn FnMut(Who, &SimPacket) -> Fate>;

/// Two connected queue pairs, in virtual time.
pub struct Pair {
    /// Virtual time.
    pub now: Nanos,
    /// One end.
    pub a: End,
    /// The other.
    pub b: End,
    /// All packets sent.
    pub seen: Vec<Seen>,
    rule: Rule,
    /// Packets on the wire by time of arrival; the number keeps those of one time in order.
    wire: BTreeMap<(Nanos, u64), (Who, SimPacket)>,
    numbered: u64,
    /// Receive buffers, by end; endless if not given.
    buffers: [Option<Buffer>; 2],
    /// Packets that found no room in a receive buffer.
    pub overflown: u32,
    /// Packets of trains whose payload was lent.
    pub lent: Vec<u32>,
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair").field("now", &self.now).field("a", &self.a).field("b", &self.b).finish_non_exhaustive()
    }
}

impl Pair {
    /// Two queue pairs in RTS.
    pub fn new(qp_type: QpType) -> Pair {
        Pair::with(&Setup::new(qp_type))
    }

    /// Two queue pairs in RTS, as `setup` has it.
    pub fn with(setup: &Setup) -> Pair {
        let mut pair = Pair::unconnected(setup);
        for who in [Who::A, Who::B] {
            pair.init(who, setup);
            pair.ready_to_receive(who, setup);
            pair.ready_to_send(who, setup);
        }
        pair
    }

    /// Two queue pairs in RESET.
    pub fn unconnected(setup: &Setup) -> Pair {
        let address = |last| IpAddr::V4(Ipv4Addr::new(10, 88, 0, last));
        let path = |src, dst| {
            Arc::new(PathAddr {
                src: address(src),
                dst: address(dst),
                ifindex: 0,
                tclass: 0,
                hop_limit: 64,
                flow_label: 0,
            })
        };
        let end = |qpn, who, has_srq, path, pattern: u8| {
            let mut host = SimHost::default();
            let qp_type = setup.qp_type_of(who);
            if qp_type == QpType::XrcRecv {
                host.srqs.insert(SRQN, SimSrq { pd: PD, ..SimSrq::default() });
            }
            let all = Access::LOCAL_WRITE
                | Access::REMOTE_WRITE
                | Access::REMOTE_READ
                | Access::REMOTE_ATOMIC
                | Access::FLUSH_GLOBAL;
            let region = host.memory.register(PD, setup.region, all);
            let bytes: Vec<u8> = (0..setup.region).map(|i| pattern.wrapping_add((i % 251) as u8)).collect();
            host.memory.write(region, 0, &bytes);
            let has_srq = has_srq || qp_type == QpType::XrcRecv;
            let pd = if qp_type == QpType::XrcRecv { 0 } else { PD };
            let init = QpInit { qpn, qp_type, pd, has_srq, max_send_wr: setup.max_send_wr };
            End { qp: Qp::new(init), host, path, region }
        };
        Pair {
            now: 0,
            a: end(0x11, Who::A, false, path(1, 2), 0x10),
            b: end(0x22, Who::B, setup.srq_b, path(2, 1), 0x20),
            seen: Vec::new(),
            rule: Box::new(|_, _| Fate::Deliver),
            wire: BTreeMap::new(),
            numbered: 0,
            buffers: [None, None],
            overflown: 0,
            lent: Vec::new(),
        }
    }

    /// RESET to INIT.
    pub fn init(&mut self, who: Who, setup: &Setup) {
        let more = match setup.qp_type {
            QpType::RawPacket => QpAttrMask::empty(),
            QpType::Ud => QpAttrMask::PKEY_INDEX | QpAttrMask::QKEY,
            _ => QpAttrMask::PKEY_INDEX | QpAttrMask::ACCESS_FLAGS,
        };
        let mask = QpAttrMask::STATE | QpAttrMask::PORT | more;
        self.modify(who, &QpAttr { state: QpState::Init, ..setup.attr.clone() }, mask);
    }

    /// INIT to RTR.
    pub fn ready_to_receive(&mut self, who: Who, setup: &Setup) {
        let peer = self.end(who.peer()).qp.init().qpn;
        let rq_psn = Psn::new(if who == Who::A { setup.psn_b } else { setup.psn_a });
        let attr = QpAttr {
            state: QpState::Rtr,
            path: Some(Arc::clone(&self.end(who).path)),
            dest_qpn: peer,
            rq_psn,
            path_mtu: setup.mtu,
            ..setup.attr.clone()
        };
        let connected = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
        let more = match setup.qp_type_of(who) {
            QpType::Rc | QpType::XrcRecv => connected | QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER,
            QpType::Uc | QpType::XrcSend => connected,
            QpType::Ud | QpType::RawPacket => QpAttrMask::empty(),
        };
        self.modify(who, &attr, QpAttrMask::STATE | more);
    }

    /// RTR to RTS.
    pub fn ready_to_send(&mut self, who: Who, setup: &Setup) {
        let sq_psn = Psn::new(if who == Who::A { setup.psn_a } else { setup.psn_b });
        let more = match setup.qp_type_of(who) {
            QpType::RawPacket => QpAttrMask::empty(),
            QpType::XrcRecv => QpAttrMask::SQ_PSN | QpAttrMask::TIMEOUT,
            QpType::Rc | QpType::XrcSend => {
                QpAttrMask::SQ_PSN
                    | QpAttrMask::TIMEOUT
                    | QpAttrMask::RETRY_CNT
                    | QpAttrMask::RNR_RETRY
                    | QpAttrMask::MAX_QP_RD_ATOMIC
            }
            QpType::Uc | QpType::Ud => QpAttrMask::SQ_PSN,
        };
        let attr = QpAttr { state: QpState::Rts, sq_psn, ..setup.attr.clone() };
        self.modify(who, &attr, QpAttrMask::STATE | more);
    }

    /// Modifies one end; must succeed.
    pub fn modify(&mut self, who: Who, attr: &QpAttr, mask: QpAttrMask) {
        let end = self.end_mut(who);
        end.qp.modify(attr, mask, &mut end.host).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Takes one end to a state without attributes (RESET, ERR, SQD, RTS again).
    pub fn to_state(&mut self, who: Who, state: QpState) {
        self.modify(who, &QpAttr { state, ..QpAttr::default() }, QpAttrMask::STATE);
    }

    /// Decides the fate of every packet from now on.
    pub fn rule(&mut self, rule: impl FnMut(Who, &SimPacket) -> Fate + 'static) {
        self.rule = Box::new(rule);
    }

    /// Drops the packets whose places among those that `from` sends from now on (counted from 0) are in `places`.
    pub fn drop_nth(&mut self, from: Who, places: &[u32]) {
        self.fate_nth(from, places, Fate::Drop);
    }

    /// The same with any fate.
    pub fn fate_nth(&mut self, from: Who, places: &[u32], fate: Fate) {
        let places = places.to_vec();
        let mut next = 0;
        self.rule(move |who, _| {
            if who != from {
                return Fate::Deliver;
            }
            next += 1;
            if places.contains(&(next - 1)) { fate } else { Fate::Deliver }
        });
    }

    /// One end.
    pub fn end(&self, who: Who) -> &End {
        match who {
            Who::A => &self.a,
            Who::B => &self.b,
        }
    }

    /// One end.
    pub fn end_mut(&mut self, who: Who) -> &mut End {
        match who {
            Who::A => &mut self.a,
            Who::B => &mut self.b,
        }
    }

    /// Posts at A: signalled, gathered from (or scattered to) `[offset, offset + len)` of its region.
    pub fn post(&mut self, wr_id: u64, op: SendOp, offset: u32, len: u32) {
        self.post_flags(wr_id, op, offset, len, SendFlags::SIGNALED);
    }

    /// The same with flags.
    pub fn post_flags(&mut self, wr_id: u64, op: SendOp, offset: u32, len: u32, flags: SendFlags) {
        let sges = if len == 0 { SmallVec::new() } else { [self.a.region.sge(offset, len)].into_iter().collect() };
        self.post_wr(Who::A, SendWr { wr_id, op, flags, data: SendData::Sges(sges), ud: None, xrc_srqn: None });
    }

    /// Posts any request at one end. On UD it goes to the other end unless it says otherwise.
    pub fn post_wr(&mut self, who: Who, mut wr: SendWr) {
        let qpn = self.end(who.peer()).qp.init().qpn;
        let end = self.end_mut(who);
        if end.qp.init().qp_type == QpType::Ud && wr.ud.is_none() {
            wr.ud = Some(UdDest { path: Arc::clone(&end.path), qpn, qkey: QKEY });
        }
        if end.qp.init().qp_type == QpType::XrcSend {
            wr.xrc_srqn.get_or_insert(SRQN);
        }
        end.qp.post_send(wr, &mut end.host);
    }

    /// A WRITE to `offset` of B's region.
    pub fn write_op(&self, offset: u32) -> SendOp {
        SendOp::Write { raddr: self.b.region.addr + u64::from(offset), rkey: self.b.region.key }
    }

    /// A READ from `offset` of B's region.
    pub fn read_op(&self, offset: u32) -> SendOp {
        SendOp::Read { raddr: self.b.region.addr + u64::from(offset), rkey: self.b.region.key }
    }

    /// A FETCH_ADD at `offset` of B's region.
    pub fn add_op(&self, offset: u32, add: u64) -> SendOp {
        SendOp::FetchAdd { raddr: self.b.region.addr + u64::from(offset), rkey: self.b.region.key, add }
    }

    /// Runs until nothing moves and nobody waits. Then every byte of the windows has come back.
    pub fn run(&mut self) {
        self.run_until(|_| false);
        for who in [Who::A, Who::B] {
            for window in &self.end(who).host.windows {
                assert_eq!(window.in_flight(), 0, "window bytes lost at {who:?}");
            }
        }
    }

    /// Runs for a time, and leaves the clock at its end.
    pub fn run_for(&mut self, time: Nanos) {
        let end = self.now + time;
        self.drain();
        while self.next_wakeup().is_some_and(|at| at <= end) {
            self.step();
        }
        self.now = end;
    }

    /// Runs until `done` holds or nothing moves any more.
    pub fn run_until(&mut self, mut done: impl FnMut(&Pair) -> bool) {
        for _ in 0..STEPS_MAX {
            self.drain();
            if done(self) || !self.step() {
                return;
            }
        }
        panic!("no end after {STEPS_MAX} steps: {self:?}");
    }

    /// Lets everything out that wants out.
    pub fn drain(&mut self) {
        for who in [Who::A, Who::B] {
            self.drain_end(who);
            self.end(who).qp.assert_invariants();
        }
    }

    fn drain_end(&mut self, who: Who) {
        let now = self.now;
        loop {
            let end = self.end_mut(who);
            let Some(train) = end.qp.poll_transmit(now, &mut end.host) else { return };
            let lent = matches!(train.payload, Payload::Lent(_)).then_some(train.packets);
            match explode(&train, &end.path, &end.host.memory) {
                Ok(packets) => packets.into_iter().for_each(|packet| self.send(who, packet)),
                Err(error) => end.qp.handle_transmit_fault(&train, error, &mut end.host),
            }
            self.lent.extend(lent);
        }
    }

    /// Puts a packet on the wire as if `from` had sent it.
    pub fn send(&mut self, from: Who, packet: SimPacket) {
        let fate = (self.rule)(from, &packet);
        self.seen.push(Seen { at: self.now, from, headers: packet.headers, len: packet.payload.len(), fate });
        let arrival = self.now + LATENCY;
        match fate {
            Fate::Deliver => self.enqueue(arrival, from, packet),
            Fate::Drop => {}
            Fate::Duplicate => {
                self.enqueue(arrival, from, packet.clone());
                self.enqueue(arrival, from, packet);
            }
            Fate::Delay(time) => self.enqueue(arrival + time, from, packet),
        }
    }

    /// Gives an end a receive buffer of `capacity` bytes from which a packet is read every `pace`.
    pub fn buffer(&mut self, who: Who, capacity: u32, pace: Nanos) {
        self.buffers[who as usize] = Some(Buffer { capacity, pace, waiting: VecDeque::new(), next_read: self.now });
    }

    /// An end that has a buffer reads nothing from it for a time.
    pub fn pause(&mut self, who: Who, time: Nanos) {
        let buffer = self.buffers[who as usize].as_mut().expect("the end has a buffer");
        buffer.next_read = buffer.next_read.max(self.now + time);
    }

    fn enqueue(&mut self, arrival: Nanos, from: Who, packet: SimPacket) {
        let bytes = (packet.headers.len() + packet.payload.len()) as u32;
        let at = match &mut self.buffers[from.peer() as usize] {
            Some(buffer) => buffer.take(arrival, bytes),
            None => Some(arrival),
        };
        let Some(at) = at else {
            self.overflown += 1;
            return;
        };
        self.wire.insert((at, self.numbered), (from.peer(), packet));
        self.numbered += 1;
    }

    /// A packet that a stranger to the queue pairs makes up: from `from`'s address and to the other end.
    pub fn inject(&mut self, from: Who, mut headers: Headers, payload: &[u8]) {
        let sender = self.end(from);
        headers.bth.dest_qp = self.end(from.peer()).qp.init().qpn;
        let net = ferroce_wire::NetHeader {
            src: sender.path.src,
            dst: sender.path.dst,
            src_port: 0xc000,
            tclass: 0,
            hop_limit: 64,
            udp_len: payload.len() as u16,
            ifindex: 0,
        };
        self.enqueue(self.now, from, SimPacket { headers, payload: payload.to_vec(), net });
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        let arrival = self.wire.first_key_value().map(|(&(at, _), _)| at);
        [arrival, self.a.qp.next_timeout(), self.b.qp.next_timeout()].into_iter().flatten().min()
    }

    /// Jumps to the next arrival or timeout and handles what is due then. `false`: nothing is to come.
    fn step(&mut self) -> bool {
        let Some(at) = self.next_wakeup() else { return false };
        self.now = self.now.max(at);
        while let Some(entry) = self.wire.first_entry()
            && entry.key().0 <= self.now
        {
            let (to, packet) = entry.remove();
            let now = self.now;
            let end = self.end_mut(to);
            let packet = Packet { headers: &packet.headers, payload: &packet.payload, net: &packet.net };
            end.qp.handle_packet(now, &packet, &mut end.host);
            end.qp.assert_invariants();
        }
        for who in [Who::A, Who::B] {
            let now = self.now;
            let end = self.end_mut(who);
            if end.qp.next_timeout().is_some_and(|at| at <= now) {
                end.qp.handle_timeout(now, &mut end.host);
            }
        }
        self.drain();
        true
    }

    /// What one end sent: opcode and PSN, in order.
    pub fn sent_by(&self, who: Who) -> Vec<(ferroce_wire::Opcode, u32)> {
        self.seen
            .iter()
            .filter(|seen| seen.from == who)
            .map(|seen| (seen.headers.bth.opcode, seen.headers.bth.psn.get()))
            .collect()
    }
}
