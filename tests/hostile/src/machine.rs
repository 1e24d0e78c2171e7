//! One queue pair on the simulated host, with memory under guard, and an attacker: operations of the program, packets, faults and
//! time in any order. What must hold is looked at after every operation.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ferroce_link::LinkStats;
use ferroce_link::udp::ingest;
use ferroce_transport::testing::{Region, SRQN, SimHost, SimSrq, explode};
use ferroce_transport::{
    Access, Completion, FlushRange, MemoryError, Nanos, Packet, PathAddr, Placement, Qp, QpAttr, QpAttrMask, QpInit,
    QpState, QpType, RecvWr, SendData, SendFlags, SendOp, SendWr, Sge, Train, UdDest, WcStatus,
};
use ferroce_wire::{NetHeader, Opcode, Psn};
use smallvec::SmallVec;

use crate::forge::{Aim, Forge, Packets, Zone};
use crate::source::Source;

const PD: u32 = 7;
const FOREIGN_PD: u32 = 8;
const QKEY: u32 = 0x1234_5678;
const QPN: u32 = 0x4321;
const PEER: u32 = 0x8765;
const SRC: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));
const DST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));
const SRC_PORT: u16 = 51_000;

/// Bytes of a region.
const REGION: u32 = 4096;
/// Receives are put here, in the local region; so are the results of READs and atomics. The rest of it nobody may touch.
const SLOTS: u32 = 16;
const SLOT: u32 = 256;
/// Bytes of a slot that a request names; the others are guards.
const SLOT_USED: u32 = 200;
/// What secret memory is filled with. It never leaves the process.
pub(crate) const SECRET: &[u8; 8] = b"SECRET!\x9d";
/// Requests that a program keeps in its queues.
const QUEUE: usize = 32;
/// How often the region with all rights stands among those that packets name, besides the eleven others.
const GOOD_SHARE: u32 = 8;
/// Trains that are taken at once; a queue pair that has ever more to say is a runaway.
const TRAINS_MAX: u32 = 4096;

/// The kinds of queue pairs that are attacked.
#[derive(Clone, Copy, Debug)]
struct Kind {
    qp_type: QpType,
    mtu: u32,
    has_srq: bool,
    access: Access,
    rd_atomic: u8,
    psn: u32,
}

const ALL: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

const KINDS: &[Kind] = &[
    Kind { qp_type: QpType::Rc, mtu: 256, has_srq: false, access: ALL, rd_atomic: 4, psn: 0x1000 },
    Kind { qp_type: QpType::Rc, mtu: 1024, has_srq: true, access: ALL, rd_atomic: 1, psn: 0xff_fff0 },
    Kind { qp_type: QpType::Rc, mtu: 4096, has_srq: false, access: Access::REMOTE_READ, rd_atomic: 16, psn: 0x7f_fff0 },
    Kind { qp_type: QpType::Uc, mtu: 256, has_srq: false, access: Access::REMOTE_WRITE, rd_atomic: 0, psn: 0xff_fffe },
    Kind { qp_type: QpType::Uc, mtu: 1024, has_srq: true, access: Access::empty(), rd_atomic: 0, psn: 5 },
    Kind { qp_type: QpType::Ud, mtu: 1024, has_srq: false, access: Access::empty(), rd_atomic: 0, psn: 0 },
    Kind { qp_type: QpType::Rc, mtu: 512, has_srq: false, access: ALL, rd_atomic: 16, psn: 0 },
    Kind { qp_type: QpType::XrcRecv, mtu: 1024, has_srq: true, access: ALL, rd_atomic: 4, psn: 0xff_fff0 },
    Kind { qp_type: QpType::XrcSend, mtu: 256, has_srq: false, access: ALL, rd_atomic: 4, psn: 0x1000 },
];

/// Number of [`Machine::new`]'s kinds.
pub const KIND_COUNT: u32 = KINDS.len() as u32;

/// A region and what may happen to it.
#[derive(Clone, Copy, Debug)]
struct Guarded {
    region: Region,
    /// A peer's packets may change it.
    writable: bool,
    /// Its bytes must not be seen on the wire.
    secret: bool,
}

/// A queue pair under attack.
pub struct Machine {
    kind: Kind,
    qp: Qp,
    host: SimHost,
    now: Nanos,
    memory: Vec<Guarded>,
    /// Receives land here.
    local: Region,
    /// Sends come from here.
    public: Region,
    zones: Vec<Zone>,
    aim: Aim,
    forge: Forge,
    packets: Packets,
    path: Arc<PathAddr>,
    next_id: u64,
    /// Send requests without a completion, and whether success would make one.
    sending: VecDeque<(u64, bool)>,
    /// Send requests posted since the last look at the slots given back.
    posted: u32,
    /// Receive requests without a completion: number and bytes.
    receiving: VecDeque<(u64, u32)>,
    /// Memory was unmapped or deregistered: it is made anew with the next connection.
    tampered: bool,
    lives: u32,
    /// Stores and atomics at the last look at the memory.
    written: u32,
    /// What secret regions hold.
    secret: Vec<u8>,
    link: LinkStats,
}

impl Machine {
    /// The queue pair of a kind, in RTS.
    pub fn new(kind: u32, recorded: Vec<Vec<u8>>) -> Machine {
        let kind = KINDS[kind as usize];
        // A target acts in the domain of its shared receive queue.
        let pd = if kind.qp_type == QpType::XrcRecv { 0 } else { PD };
        let init = QpInit { qpn: QPN, qp_type: kind.qp_type, pd, has_srq: kind.has_srq, max_send_wr: 64 };
        let path = PathAddr { src: DST, dst: SRC, ifindex: 0, tclass: 0, hop_limit: 64, flow_label: 0 };
        let nothing = Region { addr: 0, len: 0, key: 0 };
        let mut machine = Machine {
            kind,
            qp: Qp::new(init),
            host: SimHost::default(),
            now: 0,
            memory: Vec::new(),
            local: nothing,
            public: nothing,
            zones: Vec::new(),
            aim: Aim::new(kind.qp_type, QPN, PEER, kind.mtu, QKEY),
            forge: Forge::new(SRC, DST, SRC_PORT).with_recorded(recorded),
            packets: Packets::default(),
            path: Arc::new(path),
            next_id: 0,
            sending: VecDeque::new(),
            posted: 0,
            receiving: VecDeque::new(),
            tampered: false,
            lives: 0,
            written: 0,
            secret: SECRET.repeat(REGION as usize / SECRET.len()),
            link: LinkStats::default(),
        };
        machine.lay_out();
        machine.connect(kind.psn);
        machine
    }

    /// Times that the queue pair was connected.
    pub fn lives(&self) -> u32 {
        self.lives
    }

    /// What the ingest of packets counted.
    pub fn link(&self) -> &LinkStats {
        &self.link
    }

    /// What the host counted: packets dropped by reason.
    pub fn host(&self) -> &SimHost {
        &self.host
    }

    /// One operation, and a look at everything.
    pub fn step(&mut self, source: &mut impl Source) {
        let broken = !matches!(self.qp.state(), QpState::Rts | QpState::Rtr);
        if broken && source.one_in(2) {
            self.repair(source);
            return self.settle(source);
        }
        match source.below(64) {
            0..=43 => self.attack(source),
            44..=48 => self.post_send(source),
            49..=53 => self.post_recv(source),
            54..=57 => self.pass_time(source),
            58 => self.modify(source),
            59 => self.tamper(source),
            60 => self.inject(source),
            61 => self.qp.flush_recv(&mut self.host),
            _ => self.repair(source),
        }
        self.settle(source);
    }

    /// The receives that wait.
    fn receives(&mut self) -> &mut VecDeque<RecvWr> {
        match self.host.srqs.get_mut(&SRQN) {
            Some(srq) => &mut srq.receives,
            None => &mut self.host.receives,
        }
    }

    /// Registers memory of each kind.
    fn lay_out(&mut self) {
        let counts = std::mem::take(&mut self.host.counts);
        let drops = std::mem::take(&mut self.host.drops);
        self.host = SimHost { counts, drops, ..SimHost::default() };
        if self.kind.qp_type == QpType::XrcRecv {
            self.host.srqs.insert(SRQN, SimSrq { pd: PD, ..SimSrq::default() });
        }
        self.memory.clear();
        self.zones.clear();
        self.tampered = false;
        let write = Access::LOCAL_WRITE;
        self.public = self.region(PD, write | ALL, true, false);
        for _ in 0..GOOD_SHARE {
            self.zone(self.public);
        }
        self.region(PD, write | Access::REMOTE_WRITE, true, true);
        self.region(PD, Access::REMOTE_READ, false, false);
        self.region(PD, write | Access::REMOTE_ATOMIC, true, true);
        self.region(PD, write, false, true);
        self.region(FOREIGN_PD, write | ALL, false, true);
        let freed = self.region(PD, write | ALL, false, true);
        self.host.memory.deregister(freed);
        let gone = self.host.memory.register(PD, REGION, write | ALL);
        self.host.memory.unmap(gone);
        self.zone(gone);
        let window = self.host.memory.bind_window(PD, REGION, write | ALL);
        self.zone(window);
        self.local = self.host.memory.register(PD, SLOTS * SLOT, write);
        self.host.memory.write(self.local, 0, &SECRET.repeat((SLOTS * SLOT / 8) as usize));
        self.zone(self.local);
    }

    fn region(&mut self, pd: u32, access: Access, writable: bool, secret: bool) -> Region {
        let region = self.host.memory.register(pd, REGION, access);
        if secret {
            self.host.memory.write(region, 0, &self.secret);
        }
        self.memory.push(Guarded { region, writable, secret });
        self.zone(region);
        region
    }

    fn zone(&mut self, region: Region) {
        self.zones.push(Zone { va: region.addr, len: region.len, key: region.key });
    }

    /// RESET to RTS.
    fn connect(&mut self, psn: u32) {
        let kind = self.kind;
        self.lives += 1;
        self.aim.forget();
        let attr = QpAttr {
            access: kind.access,
            port_num: 1,
            qkey: QKEY,
            path: Some(Arc::clone(&self.path)),
            path_mtu: kind.mtu,
            dest_qpn: PEER,
            rq_psn: Psn::new(psn),
            sq_psn: Psn::new(psn ^ 0x5555),
            max_rd_atomic: kind.rd_atomic,
            max_dest_rd_atomic: kind.rd_atomic,
            min_rnr_timer: 1,
            timeout: 14,
            retry_cnt: 3,
            rnr_retry: 3,
            ..QpAttr::default()
        };
        let connected = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
        let (init, rtr, rts) = match kind.qp_type {
            QpType::Rc | QpType::XrcSend | QpType::XrcRecv => (
                QpAttrMask::ACCESS_FLAGS,
                connected | QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER,
                QpAttrMask::TIMEOUT | QpAttrMask::RETRY_CNT | QpAttrMask::RNR_RETRY | QpAttrMask::MAX_QP_RD_ATOMIC,
            ),
            QpType::Uc => (QpAttrMask::ACCESS_FLAGS, connected, QpAttrMask::empty()),
            QpType::Ud => (QpAttrMask::QKEY, QpAttrMask::empty(), QpAttrMask::empty()),
            QpType::RawPacket => unreachable!("no packet is for a queue pair of frames, see `KINDS`"),
        };
        let steps = [
            (QpState::Init, init | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT),
            (QpState::Rtr, rtr),
            (QpState::Rts, rts | QpAttrMask::SQ_PSN),
        ];
        for (state, mask) in steps {
            let attr = QpAttr { state, ..attr.clone() };
            let done = self.qp.modify(&attr, QpAttrMask::STATE | mask, &mut self.host);
            done.unwrap_or_else(|error| panic!("{error}"));
        }
    }

    /// Packets arrive.
    fn attack(&mut self, source: &mut impl Source) {
        let attr = self.qp.query();
        (self.aim.expected, self.aim.next) = (attr.rq_psn, attr.sq_psn);
        self.packets.clear();
        self.forge.burst(source, &self.aim, &self.zones, &mut self.packets);
        let stranger = source.one_in(64);
        let net =
            NetHeader { src: SRC, dst: DST, src_port: SRC_PORT, tclass: 0, hop_limit: 64, udp_len: 0, ifindex: 0 };
        let (qp, host, now) = (&mut self.qp, &mut self.host, self.now);
        for bytes in self.packets.iter() {
            ingest(&net, 0, bytes, &mut self.link, &mut |net, headers, payload| {
                if headers.bth.dest_qp == QPN {
                    let net = NetHeader { src: if stranger { DST } else { SRC }, ..*net };
                    qp.handle_packet(now, &Packet { headers, payload, net: &net }, host);
                    qp.assert_invariants();
                }
            });
        }
    }

    fn post_send(&mut self, source: &mut impl Source) {
        let taken = !matches!(self.qp.state(), QpState::Reset | QpState::Init | QpState::Rtr);
        let is_target = self.kind.qp_type == QpType::XrcRecv;
        if !taken || is_target || self.sending.len() >= QUEUE {
            return;
        }
        let remote = source.pick(&self.zones);
        let (raddr, rkey) = (remote.va, remote.key);
        let op = match (self.kind.qp_type, source.below(11)) {
            (QpType::Ud, n) => {
                if n % 2 == 0 {
                    SendOp::Send
                } else {
                    SendOp::SendImm { imm: n }
                }
            }
            (_, 0) => SendOp::Send,
            (_, 1) => SendOp::SendImm { imm: 7 },
            (_, 2) => SendOp::Write { raddr, rkey },
            (_, 3) => SendOp::WriteImm { raddr, rkey, imm: 9 },
            (QpType::Uc, _) => SendOp::Send,
            (_, 4) => SendOp::SendInv { rkey },
            (_, 5) => SendOp::CompareSwap { raddr, rkey, compare: 1, swap: 2 },
            (_, 6) => SendOp::FetchAdd { raddr, rkey, add: 1 },
            (_, 7) => SendOp::LocalInv { rkey },
            (_, 8) => SendOp::AtomicWrite { raddr, rkey },
            (_, 9) => {
                let range = FlushRange::Bytes { raddr, len: remote.len };
                SendOp::Flush { rkey, range, placement: Placement::GLOBAL }
            }
            _ => SendOp::Read { raddr, rkey },
        };
        let data = self.send_data(source, &op);
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, !source.one_in(4));
        flags.set(SendFlags::FENCE, source.one_in(8));
        let ud =
            (self.kind.qp_type == QpType::Ud).then(|| UdDest { path: Arc::clone(&self.path), qpn: PEER, qkey: QKEY });
        let xrc_srqn = (self.kind.qp_type == QpType::XrcSend).then_some(SRQN);
        self.next_id += 1;
        self.sending.push_back((self.next_id, flags.contains(SendFlags::SIGNALED)));
        self.posted += 1;
        self.qp.post_send(SendWr { wr_id: self.next_id, op, flags, data, ud, xrc_srqn }, &mut self.host);
    }

    /// Where a request's bytes come from or go to: mostly right, sometimes with a bad key or beyond the end.
    fn send_data(&mut self, source: &mut impl Source, op: &SendOp) -> SendData {
        if matches!(op, SendOp::Flush { .. }) {
            return SendData::Sges(SmallVec::new());
        }
        if matches!(op, SendOp::AtomicWrite { .. }) && !source.one_in(4) {
            return SendData::Inline(vec![0x11; 8].into());
        }
        let atomic = matches!(op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        if atomic || matches!(op, SendOp::Read { .. }) {
            let slot = source.below(SLOTS);
            let length = if atomic { 8 } else { source.below(SLOT_USED) };
            return SendData::Sges([self.local.sge(slot * SLOT, length)].into_iter().collect());
        }
        if source.one_in(4) {
            return SendData::Inline(vec![0x11; source.below(64) as usize].into());
        }
        let mut sges: SmallVec<[Sge; 2]> = SmallVec::new();
        for _ in 0..source.below(3) {
            let offset = source.below(REGION);
            let length = source.below(REGION - offset + 1);
            let mut sge = self.public.sge(offset, length);
            if source.one_in(32) {
                sge = Sge { lkey: source.pick(&self.zones).key, ..sge };
            } else if source.one_in(32) {
                sge = Sge { length: source.u32(), ..sge };
            }
            sges.push(sge);
        }
        SendData::Sges(sges)
    }

    fn post_recv(&mut self, source: &mut impl Source) {
        if self.qp.state() == QpState::Reset {
            return;
        }
        for _ in 0..1 + source.below(4) {
            if self.receiving.len() >= QUEUE {
                return;
            }
            let first = source.below(SLOTS) * SLOT;
            let second = source.below(SLOTS) * SLOT;
            let half = SLOT_USED / 2;
            let mut sges: SmallVec<[Sge; 2]> = match source.below(3) {
                0 => SmallVec::new(),
                1 => [self.local.sge(first, SLOT_USED)].into_iter().collect(),
                _ => [self.local.sge(first, half), self.local.sge(second + half, half)].into_iter().collect(),
            };
            if source.one_in(32)
                && let Some(sge) = sges.first_mut()
            {
                sge.lkey = source.pick(&self.zones).key;
            }
            let room = sges.iter().map(|sge| sge.length).sum();
            self.next_id += 1;
            self.receiving.push_back((self.next_id, room));
            let wr = RecvWr { wr_id: self.next_id, sges };
            self.receives().push_back(wr);
        }
    }

    fn pass_time(&mut self, source: &mut impl Source) {
        let (passed, timers) = match source.below(4) {
            0 => (u64::from(source.below(1000)), 0),
            1 => (u64::from(source.below(20_000_000)), 0),
            2 => (0, 1),
            // A long silence: they run out one after the other.
            _ => (0, source.below(12)),
        };
        self.now += passed;
        self.qp.handle_timeout(self.now, &mut self.host);
        for _ in 0..timers {
            self.now = self.now.max(self.qp.next_timeout().unwrap_or(0));
            self.qp.handle_timeout(self.now, &mut self.host);
        }
    }

    /// The program changes attributes or the state as it may or may not.
    fn modify(&mut self, source: &mut impl Source) {
        let state = source.pick(&[
            QpState::Err,
            QpState::Sqd,
            QpState::Rts,
            QpState::Sqe,
            QpState::Reset,
            QpState::Init,
            QpState::Rtr,
        ]);
        let access = Access::from_bits_truncate(source.below(16));
        let attr = QpAttr { state, access, min_rnr_timer: source.below(33) as u8, ..QpAttr::default() };
        let any = QpAttrMask::from_bits_truncate(source.u32());
        let mask = source.pick(&[
            QpAttrMask::STATE,
            QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY,
            QpAttrMask::STATE | QpAttrMask::MIN_RNR_TIMER,
            QpAttrMask::ACCESS_FLAGS,
            any,
        ]);
        let before = self.qp.state();
        // Refused or not: both are good.
        let done = self.qp.modify(&attr, mask, &mut self.host).is_ok();
        if done && mask.contains(QpAttrMask::STATE) && state == QpState::Reset {
            self.after_reset();
        } else if !done {
            assert_eq!(self.qp.state(), before, "a refused change changes nothing");
        }
    }

    /// Memory goes away under a good key, or a key is withdrawn.
    fn tamper(&mut self, source: &mut impl Source) {
        if source.one_in(4) {
            self.tampered = true;
            if source.one_in(2) {
                self.host.memory.unmap(self.public)
            } else {
                self.host.memory.deregister(self.public)
            }
        }
    }

    /// A packet whose headers no parser lets through, and a window that gets room back.
    fn inject(&mut self, source: &mut impl Source) {
        let mut headers = ferroce_wire::Headers::new(ferroce_wire::Bth::new(
            Opcode(source.below(256) as u8),
            QPN,
            self.qp.query().rq_psn,
        ));
        headers.bth.tver = source.below(3) as u8;
        let net =
            NetHeader { src: SRC, dst: DST, src_port: SRC_PORT, tclass: 0, hop_limit: 64, udp_len: 0, ifindex: 0 };
        let payload = vec![0; source.below(600) as usize];
        let packet = Packet { headers: &headers, payload: &payload, net: &net };
        self.qp.handle_packet(self.now, &packet, &mut self.host);
    }

    /// A queue pair in a bad state is mended, sooner or later.
    fn repair(&mut self, source: &mut impl Source) {
        match self.qp.state() {
            QpState::Rts | QpState::Rtr if source.below(8) != 0 => {}
            QpState::Sqd | QpState::Sqe if source.one_in(2) => {
                let attr = QpAttr { state: QpState::Rts, ..QpAttr::default() };
                let done = self.qp.modify(&attr, QpAttrMask::STATE, &mut self.host);
                done.unwrap_or_else(|error| panic!("{error}"));
            }
            _ => self.reconnect(source),
        }
    }

    fn reconnect(&mut self, source: &mut impl Source) {
        let attr = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        let done = self.qp.modify(&attr, QpAttrMask::STATE, &mut self.host);
        done.unwrap_or_else(|error| panic!("every state goes to RESET: {error}"));
        self.after_reset();
        if self.tampered {
            self.receives().clear();
            self.receiving.clear();
            self.lay_out();
        }
        let psn = if source.one_in(4) { self.kind.psn } else { source.u32() };
        self.connect(psn);
    }

    /// RESET drops requests without completions, gives slots and windows back.
    fn after_reset(&mut self) {
        self.check_completions();
        self.sending.clear();
        assert_eq!(self.host.released, self.posted, "every slot is given back");
        (self.host.released, self.posted) = (0, 0);
        if !self.kind.has_srq {
            assert!(self.host.receives.is_empty(), "RESET empties the receive queue");
            self.receiving.clear();
        } else {
            // A message that was arriving takes its receive request along.
            let waiting = self.receives().front().map_or(u64::MAX, |wr| wr.wr_id);
            self.receiving.retain(|(id, _)| *id >= waiting);
        }
        self.check_windows();
    }

    /// Takes out what the queue pair has to say, and looks at everything.
    fn settle(&mut self, source: &mut impl Source) {
        let mut trains = 0;
        while let Some(train) = self.qp.poll_transmit(self.now, &mut self.host) {
            trains += 1;
            assert!(trains < TRAINS_MAX, "it never ends");
            self.transmit(source, &train);
        }
        self.qp.assert_invariants();
        self.check_completions();
        self.check_memory();
        match self.qp.state() {
            QpState::Err => self.check_flushed(),
            QpState::Reset | QpState::Init => self.check_windows(),
            _ => {}
        }
        assert!(self.host.events.len() < 64, "{} events of one operation", self.host.events.len());
        self.host.events.clear();
        self.host.memory.last_stores.clear();
    }

    /// A train goes out, or its memory is gone by then.
    fn transmit(&mut self, source: &mut impl Source, train: &Train) {
        let packets = match explode(train, &self.path, &self.host.memory) {
            Ok(_) if source.one_in(128) => Err(MemoryError::Fault),
            exploded => exploded,
        };
        match packets {
            Ok(packets) => {
                for packet in &packets {
                    assert!(!tells_secret(&packet.payload), "{:?} tells a secret", packet.headers);
                    self.aim.saw(&packet.headers);
                }
            }
            Err(error) => self.qp.handle_transmit_fault(train, error, &mut self.host),
        }
    }

    /// Every request completes once, in order.
    fn check_completions(&mut self) {
        for completion in std::mem::take(&mut self.host.sent) {
            loop {
                let (id, signaled) = self.sending.pop_front().expect("a completion has its request");
                if id == completion.wr_id {
                    assert!(signaled || completion.status != WcStatus::Success, "{completion:?} was not asked for");
                    break;
                }
                assert!(!signaled, "request {id} has no completion before {completion:?}");
            }
        }
        let received = match self.host.srqs.get_mut(&SRQN) {
            Some(srq) => &mut srq.received,
            None => &mut self.host.received,
        };
        for completion in std::mem::take(received) {
            self.check_received(&completion);
        }
    }

    fn check_received(&mut self, completion: &Completion) {
        // UC and UD keep a request that was too small or whose message broke off: but never let another overtake it.
        let (id, room) = self.receiving.pop_front().expect("a completion has its receive");
        assert_eq!(id, completion.wr_id, "receives complete in order: {completion:?}, {self:?}");
        if completion.status == WcStatus::Success && completion.opcode == ferroce_transport::WcOpcode::Recv {
            assert!(completion.byte_len <= room, "{completion:?} in {room} bytes");
        }
    }

    fn check_memory(&mut self) {
        let written = self.host.memory.stores + self.host.memory.atomics;
        if std::mem::replace(&mut self.written, written) == written {
            return;
        }
        for guarded in &self.memory {
            if guarded.writable {
                continue;
            }
            let bytes = self.host.memory.read(guarded.region, 0, guarded.region.len);
            let intact: &[u8] = if guarded.secret { &self.secret } else { &[0; REGION as usize] };
            assert!(bytes == intact, "{:?} was written", guarded.region);
        }
        for slot in 0..SLOTS {
            let guard = self.host.memory.read(self.local, slot * SLOT + SLOT_USED, SLOT - SLOT_USED);
            assert!(guard == &self.secret[..guard.len()], "behind slot {slot}");
        }
    }

    /// In ERR nothing waits any more.
    fn check_flushed(&mut self) {
        assert_eq!(self.host.released, self.posted, "every slot is given back");
        let unsignaled = self.sending.iter().all(|(_, signaled)| !signaled);
        assert!(unsignaled, "requests without completion in ERR: {:?}", self.sending);
        self.sending.clear();
        if !self.kind.has_srq {
            let waiting = self.host.receives.len();
            assert_eq!(self.receiving.len(), waiting, "receives without completion in ERR");
        }
        self.check_windows();
    }

    fn check_windows(&self) {
        for window in &self.host.windows {
            assert_eq!(window.in_flight(), 0, "all room is given back");
        }
    }
}

/// Does a payload hold a whole word of secret memory?
pub fn tells_secret(payload: &[u8]) -> bool {
    // Two words next to each other hold one that begins at a multiple of its size, wherever the payload began.
    payload.windows(SECRET.len()).any(|bytes| bytes == SECRET)
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine").field("kind", &self.kind).field("qp", &self.qp).finish_non_exhaustive()
    }
}
