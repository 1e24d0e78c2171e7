//! The programs: they post requests and receives at their pace, change states, and connect again what broke.

use std::collections::BTreeMap;

use ferroce_transport::{Nanos, QpAttr, QpAttrMask, QpEvent, QpState, QpType, RecvWr, Sge};
use smallvec::SmallVec;

use crate::coverage::Met;
use crate::host::{Role, Seen, kind};
use crate::memory::{MrId, Piece};
use crate::oracle::{NO_RECEIVE_ID, receive_id};
use crate::pattern::Pattern;
use crate::plan::{Action, EndPlan, MS, US};
use crate::world::{Event, World};

/// Requests that a program posts to a queue pair in ERR, to see them flushed.
const POSTS_IN_ERR: u32 = 3;
/// Times that a connection is made again.
const RECONNECTIONS_MAX: u32 = 3;

/// A place that is written and read again and again by one peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    pub(crate) piece: Piece,
    pub(crate) pattern: Pattern,
    /// Place of the last READ of it in its stream.
    pub(crate) read_by: Option<usize>,
}

/// Memory that one end has for its connection.
#[derive(Debug)]
pub(crate) struct Resources {
    /// Protection domain of the queue pair.
    pub(crate) domain: usize,
    pub(crate) sources: MrId,
    pub(crate) results: MrId,
    /// What the peer writes to.
    pub(crate) targets: MrId,
    /// Cells that the peer works on.
    pub(crate) cells: Vec<Cell>,
    pub(crate) fragile_in: MrId,
    pub(crate) fragile_in_piece: Piece,
    pub(crate) fragile_out: MrId,
    pub(crate) fragile_out_piece: Piece,
    pub(crate) fragile_pattern: Pattern,
}

/// The program behind one queue pair.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) plan: EndPlan,
    pub(crate) left: u32,
    pub(crate) bytes_left: u32,
    pub(crate) memory: Resources,
    pub(crate) psn: u32,
    post_scheduled: bool,
    posts_in_err: u32,
}

impl Program {
    pub(crate) fn new(plan: EndPlan, memory: Resources) -> Program {
        Program {
            left: plan.requests,
            bytes_left: plan.bytes,
            psn: plan.psn,
            plan,
            memory,
            post_scheduled: false,
            posts_in_err: 0,
        }
    }
}

/// Two queue pairs.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) qps: [usize; 2],
    pub(crate) reconnect_scheduled: bool,
    pub(crate) reconnections: u32,
    /// It broke and stays so.
    pub(crate) is_dead: bool,
}

/// Where receives are posted: a queue pair or an SRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiveTarget {
    Qp(usize),
    Srq(usize),
}

/// A program's receive buffers for one receive queue.
#[derive(Debug)]
pub(crate) struct ReceiveSource {
    pub(crate) node: usize,
    pub(crate) target: ReceiveTarget,
    pub(crate) buffers: Vec<Piece>,
    pub(crate) free: Vec<usize>,
    /// Buffers by the id of the receive that has them.
    pub(crate) posted: BTreeMap<u64, usize>,
    pub(crate) lazy_max: Nanos,
    /// In a million: receives that are too small or have a bad key.
    pub(crate) bad: u32,
    pub(crate) scheduled: bool,
}

impl World {
    pub(crate) fn schedule_post(&mut self, qp: usize, within: Nanos) {
        let program = &mut self.programs[qp];
        if !program.post_scheduled && program.left > 0 {
            program.post_scheduled = true;
            let at = self.now + self.random.below(within + 1);
            self.schedule(at, Event::Post(qp));
        }
    }

    fn schedule_receives(&mut self, source: usize, within: Nanos) {
        if !self.sources[source].scheduled {
            self.sources[source].scheduled = true;
            let at = self.now + self.random.below(within + 1);
            self.schedule(at, Event::PostReceives(source));
        }
    }

    /// Posts some requests.
    pub(crate) fn post(&mut self, qp: usize) {
        self.programs[qp].post_scheduled = false;
        let burst = if self.plan.fixed_len.is_some() { u64::MAX } else { self.random.between(1, 8) };
        let mut posted = 0;
        while posted < burst && self.programs[qp].left > 0 {
            let state = self.qps[qp].machine.state();
            match state {
                QpState::Rts | QpState::Sqd | QpState::Sqe => {}
                QpState::Err if self.programs[qp].posts_in_err < POSTS_IN_ERR => self.programs[qp].posts_in_err += 1,
                // Connected again, or never.
                _ => return,
            }
            if self.oracle.books[qp].stream.outstanding().len() >= self.programs[qp].plan.send_depth as usize {
                break;
            }
            self.programs[qp].left -= 1;
            self.post_one(qp);
            posted += 1;
        }
        let node = self.qps[qp].node;
        self.activate(qp);
        self.schedule_turn(node, self.now);
        if self.oracle.books[qp].stream.outstanding().len() < self.programs[qp].plan.send_depth as usize {
            self.schedule_post(qp, self.programs[qp].plan.think_max);
        }
    }

    fn post_one(&mut self, qp: usize) {
        let (wr, request) = self.next_request(qp);
        let now = self.now;
        self.log.note(now, kind::POST, &[qp as u64, wr.wr_id, request.len.into()], || {
            format!(
                "QP {qp} posts {:#x}: {:?}, {} bytes, {:?}, {:?}",
                wr.wr_id, wr.op, request.len, wr.flags, request.fate
            )
        });
        self.oracle.books[qp].stream.post(now, request);
        self.call(qp, Role::Responder, false, |machine, host| machine.post_send(wr, host));
        let state = self.qps[qp].machine.state();
        if matches!(state, QpState::Err | QpState::Sqe) && !self.oracle.books[qp].stream.outstanding().is_empty() {
            self.complain(format!("QP {qp}: what is posted in {state:?} is not flushed"));
        }
    }

    /// Tops a receive queue up.
    pub(crate) fn post_receives(&mut self, source: usize) {
        self.sources[source].scheduled = false;
        let target = self.sources[source].target;
        if let ReceiveTarget::Qp(qp) = target
            && self.qps[qp].machine.state() == QpState::Reset
        {
            return;
        }
        while let Some(buffer) = self.sources[source].free.pop() {
            let wr = self.next_receive(source, buffer);
            let words = [source as u64, wr.wr_id];
            self.log.note(self.now, kind::POST_RECEIVE, &words, || format!("{target:?} gets receive {:#x}", wr.wr_id));
            match target {
                ReceiveTarget::Qp(qp) => self.oracle.books[qp].receives.push_back(wr),
                ReceiveTarget::Srq(srq) => self.oracle.srqs[srq].push_back(wr),
            }
        }
        if let ReceiveTarget::Qp(qp) = target
            && self.qps[qp].machine.state() == QpState::Err
        {
            // In ERR only so many: each comes back at once.
            self.call(qp, Role::Responder, false, |machine, host| machine.flush_recv(host));
        }
    }

    fn next_receive(&mut self, source: usize, buffer: usize) -> RecvWr {
        let (is_bad, bad_key) = (self.random.chance(self.sources[source].bad), self.random.percent(50));
        let piece = self.sources[source].buffers[buffer];
        let mut len = piece.len;
        if is_bad && !bad_key {
            self.cover.add(Met::ShortReceive);
            len = self.random.below(u64::from(len / 2) + 1) as u32;
        }
        let mut sges: SmallVec<[Sge; 2]> = SmallVec::new();
        let cut = if self.random.percent(30) { self.random.below(u64::from(len) + 1) as u32 } else { len };
        sges.push(piece.sge(0, cut));
        if cut < len {
            sges.push(piece.sge(cut, len - cut));
        }
        let bad_key = is_bad && bad_key && len > 0;
        if bad_key {
            self.cover.add(Met::BadReceive);
            for sge in &mut sges {
                sge.lkey = self.unknown_key(self.sources[source].node);
            }
        }
        self.receives_numbered += 1;
        let wr_id = receive_id(self.receives_numbered, bad_key);
        assert_ne!(wr_id, NO_RECEIVE_ID);
        self.sources[source].posted.insert(wr_id, buffer);
        RecvWr { wr_id, sges }
    }

    /// A key that no region of a node has.
    pub(crate) fn unknown_key(&mut self, node: usize) -> u32 {
        loop {
            let key = self.random.next() as u32;
            if !self.nodes[node].memory.has_key(key) {
                return key;
            }
        }
    }

    /// A call told something: programs react.
    pub(crate) fn notify(&mut self, qp: usize, seen: &Seen) {
        if seen.released > 0 {
            let think = self.programs[qp].plan.think_max;
            self.schedule_post(qp, think);
        }
        if !seen.receives.is_empty() {
            let source = self.qps[qp].source;
            for wr_id in &seen.receives {
                match self.sources[source].posted.remove(wr_id) {
                    Some(buffer) => self.sources[source].free.push(buffer),
                    None => self.complain(format!("QP {qp}: receive {wr_id:#x} completes, which was never posted")),
                }
            }
            // A queue pair in ERR sees few more receives; its buffers wait for the next connection.
            let in_err = self.qps[qp].machine.state() == QpState::Err && self.random.percent(80);
            if !in_err || self.oracle.books[qp].srq.is_some() {
                let lazy = self.sources[source].lazy_max;
                self.schedule_receives(source, lazy);
            }
        }
        for event in &seen.events {
            if *event == QpEvent::SqDrained {
                self.cover.add(Met::Drained);
                if self.qps[qp].machine.state() != QpState::Sqd {
                    self.complain(format!("QP {qp}: SQ_DRAINED in {:?}", self.qps[qp].machine.state()));
                }
                let (conn, end) = (self.qps[qp].conn, self.qps[qp].end);
                let at = self.now + self.random.below(MS);
                self.schedule(at, Event::Act(conn, end, Action::Resume));
            }
        }
    }

    /// A queue pair went to ERR or SQE of itself.
    pub(crate) fn failed_by_itself(&mut self, qp: usize, state: QpState) {
        let (conn, end) = (self.qps[qp].conn, self.qps[qp].end);
        match state {
            QpState::Sqe => {
                let at = self.now + self.random.below(500 * US);
                self.schedule(at, Event::Act(conn, end, Action::Resume));
            }
            QpState::Err => self.broke(conn),
            _ => {}
        }
    }

    /// A connection broke: it is made anew, or given up.
    fn broke(&mut self, conn: usize) {
        if self.conns[conn].reconnect_scheduled || self.conns[conn].is_dead {
            return;
        }
        let again = self.random.percent(self.plan.conns[conn].reconnects);
        let at = self.now + self.random.below(4 * MS);
        self.log
            .remark(self.now, || format!("connection {conn} broke: {}", if again { "made anew" } else { "stays so" }));
        if again && self.conns[conn].reconnections < RECONNECTIONS_MAX {
            self.conns[conn].reconnect_scheduled = true;
            self.schedule(at, Event::Act(conn, 0, Action::Reconnect));
            return;
        }
        self.conns[conn].is_dead = true;
        if self.plan.conns[conn].timeout == 0 {
            // Who never gives up has to be told.
            for end in 0..2 {
                self.schedule(at, Event::Act(conn, end, Action::ToErr));
            }
        }
    }

    pub(crate) fn act(&mut self, conn: usize, end: usize, action: Action) {
        let qp = self.conns[conn].qps[end];
        let state = self.qps[qp].machine.state();
        match action {
            Action::ToErr if matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe) => {
                self.cover.add(Met::ToErr);
                self.modify(qp, QpState::Err);
                self.broke(conn);
            }
            Action::ToReset if matches!(state, QpState::Rts | QpState::Sqd) => {
                self.cover.add(Met::ToReset);
                self.reset(qp);
                self.broke(conn);
            }
            Action::ToSqd { notify } if state == QpState::Rts => {
                self.cover.add(Met::ToSqd);
                self.drain(qp, notify);
            }
            Action::Resume => self.resume(qp, conn, end),
            Action::Reconnect => self.reconnect(conn),
            Action::Complete if !self.conns[conn].is_dead => self.connect(qp),
            Action::UnmapFragile => {
                self.cover.add(Met::MemoryGone);
                let Resources { fragile_in, fragile_out, .. } = self.programs[qp].memory;
                let memory = &mut self.nodes[self.qps[qp].node].memory;
                memory.unmap(fragile_in);
                memory.unmap(fragile_out);
            }
            Action::DeregisterFragile => {
                self.cover.add(Met::Deregistered);
                let Resources { fragile_in, fragile_out, .. } = self.programs[qp].memory;
                let memory = &mut self.nodes[self.qps[qp].node].memory;
                memory.deregister(fragile_in);
                memory.deregister(fragile_out);
            }
            _ => {}
        }
    }

    /// Takes a queue pair to a state that needs no attributes; must succeed.
    fn modify(&mut self, qp: usize, state: QpState) {
        self.modify_with(qp, &QpAttr { state, ..QpAttr::default() }, QpAttrMask::STATE);
    }

    pub(crate) fn modify_with(&mut self, qp: usize, attr: &QpAttr, mask: QpAttrMask) {
        let resetting = attr.state == QpState::Reset;
        let (result, _) = self.call(qp, Role::Responder, true, |machine, host| {
            host.resetting = resetting;
            machine.modify(attr, mask, host)
        });
        if let Err(error) = result {
            self.complain(format!("QP {qp} cannot be modified: {error}"));
        }
        self.activate(qp);
        let node = self.qps[qp].node;
        self.schedule_turn(node, self.now);
    }

    /// To RESET: everything vanishes.
    fn reset(&mut self, qp: usize) {
        self.modify(qp, QpState::Reset);
        let book = &mut self.oracle.books[qp];
        let popped = book.popped.take().map(|popped| popped.wr.wr_id);
        let rest = !book.receives.is_empty() || !book.stream.outstanding().is_empty() || book.charged != [0, 0];
        let has_srq = book.srq.is_some();
        let source = &mut self.sources[self.qps[qp].source];
        if has_srq {
            // The SRQ keeps its receives; the one in use is lost.
            if let Some(buffer) = popped.and_then(|wr_id| source.posted.remove(&wr_id)) {
                source.free.push(buffer);
            }
            let (source, lazy) = (self.qps[qp].source, source.lazy_max);
            self.schedule_receives(source, lazy);
        } else {
            source.free.extend(std::mem::take(&mut source.posted).into_values());
        }
        if rest || self.qps[qp].machine.next_timeout().is_some() {
            self.complain(format!("QP {qp}: RESET leaves something behind"));
        }
    }

    fn drain(&mut self, qp: usize, notify: bool) {
        let attr = QpAttr { state: QpState::Sqd, en_sqd_async_notify: notify, ..QpAttr::default() };
        self.modify_with(qp, &attr, QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY);
        if !notify {
            let (conn, end) = (self.qps[qp].conn, self.qps[qp].end);
            let at = self.now + self.random.below(2 * MS);
            self.schedule(at, Event::Act(conn, end, Action::Resume));
        }
    }

    /// Back to RTS from SQD or SQE.
    fn resume(&mut self, qp: usize, conn: usize, end: usize) {
        let state = self.qps[qp].machine.state();
        match state {
            QpState::Sqd if self.qps[qp].machine.attr().sq_draining => {
                // Without the event the program has to ask again.
                self.schedule(self.now + MS, Event::Act(conn, end, Action::Resume));
            }
            QpState::Sqd | QpState::Sqe => {
                let stream = &mut self.oracle.books[qp].stream;
                stream.failed = false;
                if state == QpState::Sqe {
                    stream.handed = stream.requests.len();
                }
                self.modify(qp, QpState::Rts);
                self.schedule_post(qp, MS);
            }
            _ => {}
        }
    }

    /// Both ends through RESET and connected again, one perhaps a little later.
    fn reconnect(&mut self, conn: usize) {
        self.cover.add(Met::Reconnect);
        self.conns[conn].reconnect_scheduled = false;
        self.conns[conn].reconnections += 1;
        let qps = self.conns[conn].qps;
        for qp in qps {
            self.reset(qp);
        }
        for qp in qps {
            self.begin_stream(qp);
        }
        let first = self.random.below(2) as usize;
        self.connect(qps[first]);
        let at = self.now + self.random.below(MS);
        self.schedule(at, Event::Act(conn, 1 - first, Action::Complete));
    }

    /// What is before, is past.
    fn begin_stream(&mut self, qp: usize) {
        let fresh = self.new_stream(qp);
        let book = &mut self.oracle.books[qp];
        book.past.push(std::mem::replace(&mut book.stream, fresh));
        // Far from all PSNs that may still be on their way.
        let step = 0x30_0000 + self.random.below(0x40_0000) as u32;
        let program = &mut self.programs[qp];
        program.psn = (program.psn + step) & 0x00ff_ffff;
        program.posts_in_err = 0;
        // Nobody knows what the cells of a broken connection hold.
        let node = self.qps[qp].node;
        for index in 0..self.programs[qp].memory.cells.len() {
            let pattern = Pattern::random(&mut self.random);
            let cell = &mut self.programs[qp].memory.cells[index];
            (cell.pattern, cell.read_by) = (pattern, None);
            pattern.fill(self.nodes[node].memory.write(cell.piece.at, cell.piece.len));
        }
    }

    /// RESET to RTS.
    pub(crate) fn connect(&mut self, qp: usize) {
        if self.qps[qp].machine.state() != QpState::Reset {
            return;
        }
        let conn = self.plan.conns[self.qps[qp].conn].clone();
        let peer = self.oracle.books[qp].peer;
        let attr = QpAttr {
            state: QpState::Init,
            port_num: 1,
            qkey: self.qkey(qp),
            access: self.conns_access(qp),
            ..QpAttr::default()
        };
        let datagrams = conn.qp_type == QpType::Ud;
        let right = if datagrams { QpAttrMask::QKEY } else { QpAttrMask::ACCESS_FLAGS };
        let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | right;
        self.modify_with(qp, &attr, mask);
        let source = self.qps[qp].source;
        if self.oracle.books[qp].srq.is_none() || !self.sources[source].free.is_empty() {
            let lazy = self.sources[source].lazy_max;
            self.schedule_receives(source, lazy);
        }

        let connected = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
        let requester =
            QpAttrMask::TIMEOUT | QpAttrMask::RETRY_CNT | QpAttrMask::RNR_RETRY | QpAttrMask::MAX_QP_RD_ATOMIC;
        let responder = QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
        let (to_rtr, to_rts) = match self.oracle.books[qp].qp_type {
            QpType::Rc => (connected | responder, requester),
            QpType::XrcSend => (connected, requester),
            QpType::XrcRecv => (connected | responder, QpAttrMask::TIMEOUT),
            QpType::Uc => (connected, QpAttrMask::empty()),
            QpType::Ud => (QpAttrMask::empty(), QpAttrMask::empty()),
            QpType::RawPacket => unreachable!("frames have no protocol to simulate"),
        };
        let attr = QpAttr {
            state: QpState::Rtr,
            path: Some(self.qps[qp].path.clone()),
            path_mtu: conn.mtu,
            dest_qpn: self.oracle.books[peer].qpn,
            rq_psn: ferroce_wire::Psn::new(self.programs[peer].psn),
            sq_psn: ferroce_wire::Psn::new(self.programs[qp].psn),
            max_dest_rd_atomic: conn.max_rd_atomic,
            max_rd_atomic: conn.max_rd_atomic,
            min_rnr_timer: conn.min_rnr_timer,
            timeout: conn.timeout,
            retry_cnt: conn.retry_cnt,
            rnr_retry: conn.rnr_retry,
            ..QpAttr::default()
        };
        self.modify_with(qp, &attr, QpAttrMask::STATE | to_rtr);
        if conn.goes_back[self.qps[qp].end] {
            self.qps[qp].machine.go_back_n(true);
        }
        let attr = QpAttr { state: QpState::Rts, ..attr };
        self.modify_with(qp, &attr, QpAttrMask::STATE | QpAttrMask::SQ_PSN | to_rts);
        self.schedule_post(qp, self.programs[qp].plan.think_max);
    }
}
