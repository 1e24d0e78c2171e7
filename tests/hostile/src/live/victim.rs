//! The queue pairs that are attacked, and the program that has them.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use ferroce::{
    Access, AhAttr, Completion, ConnectOptions, Context, Cq, Endpoint, Pd, Psn, Qp, QpAttr, QpAttrMask, QpCreate,
    QpModify, QpState, QpType, QueueCaps, RecvWr, SendData, SendFlags, SendOp, SendWr, Sge, Srq, SrqCreate, WcOpcode,
};
use ferroce_wire::Headers;
use smallvec::SmallVec;

use crate::arena::{Arena, SLOT, SLOT_USED, SLOTS};
use crate::forge::{Aim, Zone};
use crate::source::{Seed, Source};

const QKEY: u32 = 0x1111_1111;
/// Receives that a queue pair keeps posted.
const RECEIVES: u32 = 8;
/// Receives that the SRQ keeps posted.
const SHARED: u32 = 64;
/// Requests that are sent between two looks at completions.
const SENDS: u32 = 4;
const ALL: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// A group of queue pairs that are alike.
struct Group {
    count: u32,
    qp_type: QpType,
    mtu: u32,
    access: Access,
    rd_atomic: u8,
    /// Receives from the SRQ.
    shared: bool,
    /// Keeps receives posted.
    receives: bool,
}

const GROUPS: &[Group] = &[
    Group { count: 12, qp_type: QpType::Rc, mtu: 1024, access: ALL, rd_atomic: 16, shared: false, receives: true },
    Group { count: 12, qp_type: QpType::Rc, mtu: 256, access: ALL, rd_atomic: 1, shared: false, receives: true },
    Group { count: 4, qp_type: QpType::Rc, mtu: 4096, access: ALL, rd_atomic: 4, shared: true, receives: true },
    Group { count: 4, qp_type: QpType::Rc, mtu: 512, access: ALL, rd_atomic: 4, shared: false, receives: false },
    Group { count: 6, qp_type: QpType::Uc, mtu: 256, access: ALL, rd_atomic: 0, shared: false, receives: true },
    Group {
        count: 2,
        qp_type: QpType::Uc,
        mtu: 1024,
        access: Access::empty(),
        rd_atomic: 0,
        shared: true,
        receives: true,
    },
    Group { count: 5, qp_type: QpType::Ud, mtu: 1024, access: ALL, rd_atomic: 0, shared: false, receives: true },
    Group { count: 1, qp_type: QpType::Ud, mtu: 1024, access: ALL, rd_atomic: 0, shared: false, receives: false },
];

/// Queue pairs that grant READ only, in a protection domain where the keys grant all.
const READER: Group = Group {
    count: 2,
    qp_type: QpType::Rc,
    mtu: 1024,
    access: Access::REMOTE_READ,
    rd_atomic: 4,
    shared: false,
    receives: true,
};

struct Victim {
    group: &'static Group,
    qp: Arc<Qp>,
    aim: Aim,
    /// Receives posted and not complete.
    posted: u32,
}

/// All queue pairs under attack.
pub(super) struct Victims {
    pub(super) arena: Arena,
    victims: Vec<Victim>,
    cq: Arc<Cq>,
    srq: Arc<Srq>,
    gid: [u8; 16],
    /// Number of the first peer.
    first_peer: u32,
    next_slot: u32,
    lkey: u32,
    psn: Seed,
    pub(super) revived: u64,
    _pds: Vec<Arc<Pd>>,
}

impl Victims {
    /// Makes and connects them. Their peers are numbers of `lane`.
    pub(super) fn new(context: &Arc<Context>, lane: u16) -> Result<Victims> {
        let (pd, other, reader) = (context.alloc_pd()?, context.alloc_pd()?, context.alloc_pd()?);
        let arena = Arena::new(&pd, &other, &reader)?;
        let cq = context.create_cq(1 << 16, None, 0)?;
        let srq = pd.create_srq(&SrqCreate { max_wr: SHARED, max_sge: 2, cookie: 0 })?;
        let lkey = arena.local.key;
        let mut victims = Victims {
            arena,
            victims: Vec::new(),
            cq,
            srq,
            gid: context.device().gid(0)?.gid,
            first_peer: (u32::from(lane) << 14) + 100,
            next_slot: 0,
            lkey,
            psn: Seed::new(u64::from(lane)),
            revived: 0,
            _pds: vec![Arc::clone(&pd), other, Arc::clone(&reader)],
        };
        for group in GROUPS {
            (0..group.count).try_for_each(|_| victims.add(&pd, group))?;
        }
        (0..READER.count).try_for_each(|_| victims.add(&reader, &READER))?;
        Ok(victims)
    }

    fn add(&mut self, pd: &Arc<Pd>, group: &'static Group) -> Result<()> {
        let caps = QueueCaps {
            max_send_wr: 16,
            max_recv_wr: if group.shared { 0 } else { RECEIVES },
            max_send_sge: 2,
            max_recv_sge: if group.shared { 0 } else { 2 },
            max_inline_data: 64,
        };
        let qp = pd.create_qp(&QpCreate {
            send_cq: Arc::clone(&self.cq),
            recv_cq: Arc::clone(&self.cq),
            srq: group.shared.then(|| Arc::clone(&self.srq)),
            caps,
            qp_type: group.qp_type,
            sq_sig_all: false,
            cookie: self.victims.len() as u64,
        })?;
        let peer = self.first_peer + self.victims.len() as u32;
        let aim = Aim::new(group.qp_type, qp.qpn(), peer, group.mtu, QKEY);
        self.victims.push(Victim { group, qp, aim, posted: 0 });
        self.connect(self.victims.len() - 1)
    }

    pub(super) fn len(&self) -> usize {
        self.victims.len()
    }

    /// RESET to RTS, with receives.
    fn connect(&mut self, at: usize) -> Result<()> {
        let victim = &mut self.victims[at];
        victim.aim.forget();
        victim.posted = 0;
        let group = victim.group;
        let (rq, sq) = (self.psn.u32() & 0xff_ffff, self.psn.u32() & 0xff_ffff);
        if group.qp_type == QpType::Rc {
            let options = ConnectOptions {
                path_mtu: Some(group.mtu),
                access: group.access,
                rd_atomic: group.rd_atomic,
                timeout: 8,
                retry_cnt: 2,
                rnr_retry: 2,
                min_rnr_timer: 1,
                ..ConnectOptions::default()
            };
            victim.qp.connect(sq, &Endpoint { qpn: victim.aim.peer, psn: rq, gid: self.gid }, &options)?;
        } else {
            connect_unreliable(&victim.qp, group, victim.aim.peer, rq, sq, self.gid)?;
        }
        self.refill(at)
    }

    /// Keeps receives posted.
    fn refill(&mut self, at: usize) -> Result<()> {
        let group = self.victims[at].group;
        if group.shared || !group.receives {
            return Ok(());
        }
        while self.victims[at].posted < RECEIVES {
            let wr = self.receive();
            self.victims[at].qp.post_recv(wr).context("the receive queue has room")?;
            self.victims[at].posted += 1;
        }
        Ok(())
    }

    /// A receive request of one or two pieces.
    fn receive(&mut self) -> RecvWr {
        self.next_slot += 1;
        let slot = |n: u32| self.arena.local.va + u64::from(n % SLOTS * SLOT);
        let half = SLOT_USED / 2;
        let piece = |addr: u64, length: u32| Sge { addr, length, lkey: self.lkey };
        let first = slot(self.next_slot);
        let sges: SmallVec<[Sge; 2]> = if self.next_slot.is_multiple_of(3) {
            [piece(first, half), piece(slot(self.next_slot * 5) + u64::from(half), half)].into_iter().collect()
        } else {
            [piece(first, SLOT_USED)].into_iter().collect()
        };
        RecvWr { wr_id: 0, sges }
    }

    /// What is known of a queue pair.
    pub(super) fn aim(&self, at: usize) -> &Aim {
        &self.victims[at].aim
    }

    /// Brings what is known of a queue pair up to date; it is brought back to life before, if need be.
    pub(super) fn look_at(&mut self, at: usize) -> Result<()> {
        let state = self.victims[at].qp.state();
        // Some packets shall find it dead.
        if !matches!(state, QpState::Rts | QpState::Rtr) && self.psn.below(4) != 0 {
            let reset = QpModify { attr: QpAttr { state: QpState::Reset, ..QpAttr::default() }, ..QpModify::default() };
            self.victims[at].qp.modify(&reset, QpAttrMask::STATE)?;
            self.connect(at)?;
            self.revived += 1;
        }
        let victim = &mut self.victims[at];
        let attr = victim.qp.query()?.attr;
        (victim.aim.expected, victim.aim.next) = (attr.rq_psn, attr.sq_psn);
        Ok(())
    }

    /// A packet that a victim sent.
    pub(super) fn saw(&mut self, headers: &Headers) {
        let at = headers.bth.dest_qp.wrapping_sub(self.first_peer) as usize;
        if let Some(victim) = self.victims.get_mut(at) {
            victim.aim.saw(headers);
        }
    }

    /// Fills the SRQ. What it lacks is not known: RESET drops completions.
    fn refill_shared(&mut self) -> Result<()> {
        loop {
            let wr = self.receive();
            match self.srq.post(wr) {
                Ok(()) => {}
                Err(error) if error.errno() == libc::ENOMEM => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The program takes its completions, posts receives, and sends something now and then.
    pub(super) fn act(&mut self, source: &mut Seed) -> Result<()> {
        self.poll()?;
        self.refill_shared()?;
        for _ in 0..SENDS {
            let at = source.below(self.victims.len() as u32) as usize;
            if self.victims[at].qp.state() == QpState::Rts {
                self.send(at, source)?;
            }
        }
        for at in 0..self.victims.len() {
            if self.victims[at].posted < RECEIVES / 2 && self.victims[at].qp.state() == QpState::Rts {
                self.refill(at)?;
            }
        }
        self.poll()
    }

    fn poll(&mut self) -> Result<()> {
        let mut out = [Completion::UNUSED; 64];
        loop {
            let count = self.cq.poll(&mut out)?;
            out[..count].iter().for_each(|completion| self.completed(completion));
            if count < out.len() {
                return Ok(());
            }
        }
    }

    fn completed(&mut self, completion: &Completion) {
        if !matches!(completion.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm) {
            return;
        }
        assert!(completion.byte_len <= 40 + LONGEST, "{completion:?}");
        let Some(victim) = self.victims.iter_mut().find(|victim| victim.qp.qpn() == completion.qp_num) else {
            panic!("{completion:?} is of no queue pair");
        };
        // Of a queue pair's life before this one there may still be some.
        victim.posted = victim.posted.saturating_sub(1);
    }

    fn send(&mut self, at: usize, source: &mut Seed) -> Result<()> {
        let Zone { va, key, .. } = source.pick(self.arena.zones());
        let victim = &self.victims[at];
        let (raddr, rkey) = (va, key);
        let op = match (victim.group.qp_type, source.below(6)) {
            (QpType::Ud, _) => return Ok(()),
            (_, 0) => SendOp::Send,
            (_, 1) => SendOp::Write { raddr, rkey },
            (QpType::Uc, _) => SendOp::SendImm { imm: 1 },
            (_, 2) => SendOp::CompareSwap { raddr, rkey, compare: 0, swap: 1 },
            (_, 3) => SendOp::FetchAdd { raddr, rkey, add: 1 },
            _ => SendOp::Read { raddr, rkey },
        };
        let sge = match op {
            SendOp::Send | SendOp::SendImm { .. } | SendOp::Write { .. } => {
                Sge { addr: self.arena.public.va, length: source.below(4000), lkey: self.arena.public.key }
            }
            _ => {
                let atomic = !matches!(op, SendOp::Read { .. });
                let length = if atomic { 8 } else { source.below(SLOT_USED) };
                let addr = self.arena.local.va + u64::from(source.below(SLOTS) * SLOT);
                Sge { addr, length, lkey: self.lkey }
            }
        };
        let data = SendData::Sges([sge].into_iter().collect());
        let flags = if source.one_in(2) { SendFlags::SIGNALED } else { SendFlags::empty() };
        match victim.qp.post_send(SendWr { wr_id: 1, op, flags, data, ud: None, xrc_srqn: None }) {
            Ok(()) => victim.qp.ring(),
            // Its queue is full, or it has failed since.
            Err(error) => ensure!([libc::ENOMEM, libc::EINVAL].contains(&error.errno()), "post_send: {error}"),
        }
        Ok(())
    }

    /// Ends all queue pairs: what they had in flight is dropped.
    pub(super) fn quiet(&mut self) -> Result<()> {
        for victim in &self.victims {
            let err = QpModify { attr: QpAttr { state: QpState::Err, ..QpAttr::default() }, ..QpModify::default() };
            victim.qp.modify(&err, QpAttrMask::STATE)?;
        }
        self.poll()
    }
}

/// Longest message that a receive or a WRITE with immediate can tell of.
const LONGEST: u32 = crate::arena::ZONE as u32;

fn connect_unreliable(qp: &Qp, group: &Group, peer: u32, rq: u32, sq: u32, gid: [u8; 16]) -> Result<()> {
    let attr = QpAttr {
        state: QpState::Init,
        access: group.access & Access::REMOTE_WRITE,
        port_num: 1,
        qkey: QKEY,
        path_mtu: group.mtu,
        dest_qpn: peer,
        rq_psn: Psn::new(rq),
        sq_psn: Psn::new(sq),
        ..QpAttr::default()
    };
    let ah = AhAttr { is_global: true, dgid: gid, port_num: 1, ..AhAttr::default() };
    let mut change = QpModify { attr, ah };
    let datagram = group.qp_type == QpType::Ud;
    let first = if datagram { QpAttrMask::QKEY } else { QpAttrMask::ACCESS_FLAGS };
    qp.modify(&change, QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | first)?;
    change.attr.state = QpState::Rtr;
    let connected = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    qp.modify(&change, QpAttrMask::STATE | if datagram { QpAttrMask::empty() } else { connected })?;
    change.attr.state = QpState::Rts;
    Ok(qp.modify(&change, QpAttrMask::STATE | QpAttrMask::SQ_PSN)?)
}
