//! The simulation: events in virtual time, nodes that take turns as the engine's lanes do, and the calls into the transport.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use ferroce_transport::{MemoryError, Nanos, Packet, PathAddr, Payload, Qp, QpEvent, QpState, Side, Train};

use ferroce_wire::Opcode;

use crate::coverage::{Coverage, Met};
use crate::frame::{self, Damage, Datagram};
use crate::host::{Role, Seen, SimHost, kind};
use crate::log::{Log, Millis};
use crate::memory::{NodeMemory, Piece, Right};
use crate::network::{Journey, Network};
use crate::oracle::Oracle;
use crate::pattern::Pattern;
use crate::plan::{Action, Plan};
use crate::program::{Connection, Program, ReceiveSource};
use crate::random::Random;
use crate::windows::{WindowId, Windows};

/// Datagrams taken in one turn.
const RECEIVE_BUDGET: usize = 16;
/// Trains between two looks at the receive side, and rounds of that in a turn.
const TRAINS_PER_FLUSH: usize = 16;
const FLUSHES_PER_TURN: usize = 8;
/// Events, trains and frames after which a run counts as endless.
const STEPS_MAX: u64 = 3_000_000;

/// What is going to happen.
#[derive(Debug)]
pub(crate) enum Event {
    Arrive(usize, Box<Datagram>),
    Turn(usize),
    Post(usize),
    PostReceives(usize),
    Act(usize, usize, Action),
    Pause(usize, Nanos),
    Calm,
}

#[derive(Debug)]
struct Scheduled {
    at: Nanos,
    /// Keeps those of one time in order.
    number: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    /// The earliest is the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

/// A queue pair in its node.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) node: usize,
    pub(crate) machine: Qp,
    pub(crate) conn: usize,
    /// 0 or 1.
    pub(crate) end: usize,
    pub(crate) path: Arc<PathAddr>,
    pub(crate) requests: Option<WindowId>,
    /// Its receives come from here.
    pub(crate) source: usize,
    active: bool,
}

impl Entry {
    pub(crate) fn new(
        node: usize,
        machine: Qp,
        (conn, end): (usize, usize),
        path: Arc<PathAddr>,
        source: usize,
    ) -> Entry {
        Entry { node, machine, conn, end, path, requests: None, source, active: false }
    }
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) address: IpAddr,
    pub(crate) memory: NodeMemory,
    windows: Windows,
    /// Queue pairs that may have something to send, in turns.
    active: VecDeque<usize>,
    received: VecDeque<Box<Datagram>>,
    /// Bytes of the receive buffer in use.
    received_bytes: u32,
    turn_at: Option<Nanos>,
    paused_until: Nanos,
    pub(crate) qps: Vec<usize>,
}

impl Node {
    pub(crate) fn new(number: usize, nodes: usize, address: IpAddr) -> Node {
        Node {
            address,
            memory: NodeMemory::new(number),
            windows: Windows::new(nodes),
            active: VecDeque::new(),
            received: VecDeque::new(),
            received_bytes: 0,
            turn_at: None,
            paused_until: 0,
            qps: Vec::new(),
        }
    }

    pub(crate) fn windows(&self) -> &Windows {
        &self.windows
    }

    pub(crate) fn received(&self) -> usize {
        self.received.len()
    }
}

/// What the queue pairs of one protection domain share.
#[derive(Clone, Debug)]
pub(crate) struct Domain {
    pub(crate) pd: u32,
    /// For atomics.
    pub(crate) words: Piece,
    /// For READs; never changes.
    pub(crate) library: Piece,
    pub(crate) library_pattern: Pattern,
    /// A region of another domain.
    pub(crate) foreign: Piece,
}

/// Everything.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) now: Nanos,
    events: BinaryHeap<Scheduled>,
    numbered: u64,
    steps: u64,
    pub(crate) nodes: Vec<Node>,
    pub(crate) by_address: BTreeMap<IpAddr, usize>,
    pub(crate) by_qpn: BTreeMap<u32, usize>,
    pub(crate) qps: Vec<Entry>,
    pub(crate) oracle: Oracle,
    pub(crate) programs: Vec<Program>,
    pub(crate) conns: Vec<Connection>,
    pub(crate) sources: Vec<ReceiveSource>,
    pub(crate) domains: Vec<Domain>,
    /// From each node to each node.
    pub(crate) paths: Vec<Vec<Arc<PathAddr>>>,
    /// What all requests consist of when the plan has a fixed length.
    pub(crate) fixed_pattern: Pattern,
    network: Network,
    pub(crate) cover: Coverage,
    pub(crate) log: Log,
    pub(crate) complaint: Option<String>,
    /// Decisions of programs.
    pub(crate) random: Random,
    pub(crate) receives_numbered: u64,
    pub(crate) requests_numbered: u64,
}

impl World {
    /// A world without nodes; `setup` puts them in.
    pub(crate) fn empty(plan: Plan, log: Log, mut random: Random) -> World {
        let oracle = Oracle { lends: plan.lends, ..Oracle::default() };
        let network = Network::new(plan.nodes, plan.speed, plan.rates, plan.outages.clone(), plan.gro, random.fork());
        World {
            plan,
            now: 0,
            events: BinaryHeap::new(),
            numbered: 0,
            steps: 0,
            nodes: Vec::new(),
            by_address: BTreeMap::new(),
            by_qpn: BTreeMap::new(),
            qps: Vec::new(),
            oracle,
            programs: Vec::new(),
            conns: Vec::new(),
            sources: Vec::new(),
            domains: Vec::new(),
            paths: Vec::new(),
            fixed_pattern: Pattern::random(&mut random),
            network,
            cover: Coverage::default(),
            log,
            complaint: None,
            random,
            receives_numbered: 1,
            requests_numbered: 1,
        }
    }

    pub(crate) fn schedule(&mut self, at: Nanos, event: Event) {
        self.numbered += 1;
        self.events.push(Scheduled { at: at.max(self.now), number: self.numbered, event });
    }

    pub(crate) fn complain(&mut self, what: String) {
        self.complaint.get_or_insert(what);
    }

    /// Runs until nothing is to come, or something is wrong.
    pub(crate) fn run(&mut self) {
        while let Some(Scheduled { at, event, .. }) = self.events.pop() {
            self.now = at;
            self.handle(event);
            if self.complaint.is_some() {
                return;
            }
            self.steps += 1;
            if self.steps > STEPS_MAX || self.now > self.deadline() {
                self.complain(format!("no end after {} steps and {}", self.steps, Millis(self.now)));
                return;
            }
        }
    }

    /// When all must be over: faults end, programs post what is left at their pace, and what cannot succeed gives up.
    fn deadline(&self) -> Nanos {
        let budgets = self.oracle.books.iter().filter_map(|book| book.stream.patience.budget);
        2 * self.plan.calm_at + 60_000_000_000 + 8 * budgets.max().unwrap_or(0)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive(node, datagram) => self.arrive(node, datagram),
            Event::Turn(node) => self.turn(node),
            Event::Post(qp) => match self.paused(self.qps[qp].node) {
                Some(until) => self.schedule(until, Event::Post(qp)),
                None => self.post(qp),
            },
            Event::PostReceives(source) => match self.paused(self.sources[source].node) {
                Some(until) => self.schedule(until, Event::PostReceives(source)),
                None => self.post_receives(source),
            },
            Event::Act(conn, end, action) => self.act(conn, end, action),
            Event::Pause(node, until) => {
                self.cover.add(Met::NodePause);
                self.oracle.disturbed = true;
                self.log.remark(self.now, || format!("node {node} stands still until {}", Millis(until)));
                self.nodes[node].paused_until = until;
            }
            Event::Calm => {
                self.log.remark(self.now, || "the network is well from now on".to_owned());
                self.oracle.well_since = Some(self.now);
                self.network.calm();
            }
        }
    }

    /// Until when a node stands still.
    fn paused(&self, node: usize) -> Option<Nanos> {
        let until = self.nodes[node].paused_until;
        (until > self.now).then_some(until)
    }

    fn arrive(&mut self, to: usize, datagram: Box<Datagram>) {
        let size = truesize(&datagram);
        let node = &mut self.nodes[to];
        if node.received_bytes > self.plan.receive_buffer {
            self.cover.add(Met::ReceiveOverflow);
            self.oracle.disturbed = true;
            let frames = datagram.frames.len();
            self.log.note(self.now, kind::OVERFLOW, &[to as u64], || {
                format!("node {to}: receive buffer is full, {frames} frames lost")
            });
            return;
        }
        node.received_bytes += size;
        node.received.push_back(datagram);
        self.schedule_turn(to, self.now + self.plan.wakeup);
    }

    pub(crate) fn schedule_turn(&mut self, node: usize, at: Nanos) {
        let at = at.max(self.nodes[node].paused_until).max(self.now);
        if self.nodes[node].turn_at.is_none_or(|turn| at < turn) {
            self.nodes[node].turn_at = Some(at);
            self.schedule(at, Event::Turn(node));
        }
    }

    /// One turn of a node: receive, timers, transmit.
    fn turn(&mut self, node: usize) {
        if self.nodes[node].turn_at != Some(self.now) {
            return;
        }
        self.nodes[node].turn_at = None;
        if let Some(until) = self.paused(node) {
            self.schedule_turn(node, until);
            return;
        }
        // As a lane does: before timers that are due, all that came is read.
        let budget = if self.has_due_timer(node) { usize::MAX } else { RECEIVE_BUDGET };
        for _ in 0..budget {
            let Some(datagram) = self.nodes[node].received.pop_front() else { break };
            self.nodes[node].received_bytes -= truesize(&datagram);
            self.deliver(node, &datagram);
        }
        self.run_timers(node);
        for _ in 0..FLUSHES_PER_TURN {
            if self.nodes[node].active.is_empty() {
                break;
            }
            self.transmit(node);
        }
        if !self.nodes[node].active.is_empty() || !self.nodes[node].received.is_empty() {
            self.schedule_turn(node, self.now + self.plan.turn_cost);
        } else if let Some(due) =
            self.nodes[node].qps.iter().filter_map(|&qp| self.qps[qp].machine.next_timeout()).min()
        {
            self.schedule_turn(node, due);
        }
    }

    fn has_due_timer(&self, node: usize) -> bool {
        let due = |&qp: &usize| self.qps[qp].machine.next_timeout().is_some_and(|at| at <= self.now);
        self.nodes[node].qps.iter().any(due)
    }

    fn run_timers(&mut self, node: usize) {
        for index in 0..self.nodes[node].qps.len() {
            let qp = self.nodes[node].qps[index];
            let now = self.now;
            if self.qps[qp].machine.next_timeout().is_some_and(|due| due <= now) {
                self.log.note(now, kind::TIMEOUT, &[qp as u64], || format!("QP {qp}: timeout"));
                self.call(qp, Role::Responder, false, |machine, host| machine.handle_timeout(now, host));
                self.activate(qp);
                if self.qps[qp].machine.next_timeout().is_some_and(|due| due <= now) {
                    self.complain(format!("QP {qp}: a timeout at {now} leaves one that is due at once"));
                }
            }
        }
    }

    fn deliver(&mut self, node: usize, datagram: &Datagram) {
        for frame in &datagram.frames {
            self.steps += 1;
            let bytes = datagram.bytes(frame);
            let net = ferroce_wire::NetHeader { udp_len: bytes.len() as u16, ..datagram.net };
            match frame::parse(&net, bytes, frame.id) {
                Err(why) => {
                    self.log.note(self.now, kind::REFUSED, &[node as u64], || format!("node {node}: refused, {why:?}"));
                    if frame.damage == Damage::None || frame.damage == Damage::Masked {
                        self.complain(format!("a good frame is refused: {why:?}"));
                    }
                }
                Ok(_) if frame.damage == Damage::Below => {
                    self.complain("a damaged frame passes the ICRC".to_owned());
                }
                Ok((headers, payload)) => {
                    let packet = Packet { headers: &headers, payload: &bytes[payload], net: &net };
                    self.deliver_packet(node, &packet);
                }
            }
            if self.complaint.is_some() {
                return;
            }
        }
    }

    fn deliver_packet(&mut self, node: usize, packet: &Packet<'_>) {
        let bth = &packet.headers.bth;
        let qp = self.by_qpn.get(&bth.dest_qp).copied().filter(|&qp| self.qps[qp].node == node);
        let words = [node as u64, bth.dest_qp.into(), bth.opcode.0.into(), bth.psn.get().into()];
        self.log.note(self.now, kind::ARRIVE, &words, || {
            let target = qp.map_or("nobody".to_owned(), |qp| format!("QP {qp}"));
            format!("{target} <- {} and {} bytes", packet.headers, packet.payload.len())
        });
        let Some(qp) = qp else { return };
        let role = if bth.opcode.is_response() { Role::Requester } else { Role::Responder };
        let now = self.now;
        self.call(qp, role, false, |machine, host| machine.handle_packet(now, packet, host));
        self.activate(qp);
    }

    fn transmit(&mut self, node: usize) {
        let mut batch = Vec::new();
        for _ in 0..TRAINS_PER_FLUSH {
            let Some((qp, train)) = self.next_train(node) else { break };
            if self.plan.late_gather {
                batch.push((qp, train));
            } else {
                self.send_train(qp, &train);
            }
        }
        for (qp, train) in batch {
            self.send_train(qp, &train);
        }
    }

    fn next_train(&mut self, node: usize) -> Option<(usize, Train)> {
        while let Some(qp) = self.nodes[node].active.pop_front() {
            self.qps[qp].active = false;
            let now = self.now;
            let (train, seen) = self.call(qp, Role::Responder, false, |machine, host| machine.poll_transmit(now, host));
            if let Some(train) = train {
                self.check_train(qp, &train);
                self.activate(qp);
                return Some((qp, train));
            }
            for id in seen.asked {
                self.nodes[node].windows.wait(id, qp);
            }
        }
        None
    }

    /// What a train carries must have been resolved for it, and must belong to a request that is not over.
    fn check_train(&mut self, qp: usize, train: &Train) {
        if matches!(train.payload, Payload::Lent(_)) {
            self.cover.add(Met::Lent);
        }
        let memory = &self.nodes[self.qps[qp].node].memory;
        let right = if train.from == Side::Requester { Right::LocalRead } else { Right::RemoteRead };
        let spans = match &train.payload {
            Payload::Inline(..) => &[],
            Payload::Copy(span) | Payload::Lent(span) => std::slice::from_ref(span),
            Payload::Gather(spans) => spans.as_slice(),
        };
        let book = &mut self.oracle.books[qp];
        for span in spans.iter().filter(|span| span.len > 0) {
            let owned = train.from != Side::Requester
                || book.stream.outstanding().iter().any(|request| request.is_local(span.addr, span.len));
            if !memory.is_granted(span.addr, span.len, right) || !owned {
                self.complaint.get_or_insert(format!("QP {qp} sends {span:?}, which is not its to send: {train:?}"));
                return;
            }
        }
        let state = self.qps[qp].machine.state();
        if train.from == Side::Requester && (book.drained || !matches!(state, QpState::Rts | QpState::Sqd)) {
            self.complaint.get_or_insert(format!("QP {qp} sends in {state:?}, drained {}: {train:?}", book.drained));
            return;
        }
        let last = train.tail.as_ref().unwrap_or(&train.head);
        let ends = last.bth.opcode.layout().is_some_and(|layout| layout.position.ends());
        if ends && train.from == Side::Requester && !book.qp_type.is_reliable() {
            book.stream.handed += 1;
        }
    }

    /// Gives a train to the network, as a link does.
    fn send_train(&mut self, qp: usize, train: &Train) {
        let Entry { node, ref path, .. } = self.qps[qp];
        let path = train.path.as_ref().unwrap_or(path);
        let to = self.by_address.get(&path.dst).copied();
        let exposed = self.oracle.books[qp].exposed;
        self.steps += 1;
        let bth = train.head.bth;
        let words = [qp as u64, bth.opcode.0.into(), bth.psn.get().into(), train.packets.into(), train.len.into()];
        self.log.note(self.now, kind::TRANSMIT, &words, || {
            format!("QP {qp} -> {} x{}, {} bytes", train.head, train.packets, train.len)
        });
        if bth.opcode == Opcode::FERROCE_FLOW && self.plan.conns[self.qps[qp].conn].mutes_flow {
            self.cover.add(Met::FlowMuted);
            self.log.remark(self.now, || "    not sent: the peer is of another make".to_owned());
            return;
        }
        match frame::build(train, path, 0xc000 + node as u16, &self.nodes[node].memory) {
            Ok(datagram) => {
                let Some(to) = to else { return };
                let journey = Journey { from: node, to, exposed };
                let arrivals = self.network.send(self.now, journey, datagram, &mut self.cover, &mut self.log);
                self.oracle.disturbed |= arrivals.disturbed;
                if arrivals.duplicates > 0
                    && let Some(&target) = self.by_qpn.get(&bth.dest_qp)
                {
                    self.oracle.books[target].duplicates += arrivals.duplicates;
                }
                for (at, datagram) in arrivals.datagrams {
                    self.schedule(at, Event::Arrive(to, Box::new(datagram)));
                }
            }
            Err(error) => self.transmit_fault(qp, train, error),
        }
    }

    fn transmit_fault(&mut self, qp: usize, train: &Train, error: MemoryError) {
        let now = self.now;
        self.log.remark(now, || format!("QP {qp}: memory of the train is gone"));
        if train.from != Side::Requester {
            self.oracle.refuse(qp, ferroce_transport::WcStatus::RemOpErr);
        }
        self.call(qp, Role::Responder, false, |machine, host| {
            machine.handle_transmit_fault(train, error, host);
        });
        self.activate(qp);
    }

    pub(crate) fn activate(&mut self, qp: usize) {
        let entry = &mut self.qps[qp];
        if !entry.active {
            entry.active = true;
            self.nodes[entry.node].active.push_back(qp);
        }
    }

    /// Calls into a queue pair's machine, checks what it did, and settles it. `commanded`: a change of state was asked for.
    pub(crate) fn call<R>(
        &mut self,
        qp: usize,
        role: Role,
        commanded: bool,
        f: impl FnOnce(&mut Qp, &mut SimHost<'_>) -> R,
    ) -> (R, Seen) {
        let entry = &mut self.qps[qp];
        let node = &mut self.nodes[entry.node];
        let before = entry.machine.state();
        let mut host = SimHost::new(
            self.now,
            qp,
            role,
            &mut self.oracle,
            &mut node.memory,
            &mut node.windows,
            entry.requests,
            &self.by_address,
            &mut self.cover,
            &mut self.log,
            &mut self.complaint,
        );
        let result = f(&mut entry.machine, &mut host);
        entry.machine.assert_invariants();
        let settled = host.oracle.books[qp].stream.settle();
        host.check(settled);
        let seen = std::mem::take(&mut host.seen);
        self.after_call(qp, before, commanded, &seen);
        (result, seen)
    }

    fn after_call(&mut self, qp: usize, before: QpState, commanded: bool, seen: &Seen) {
        let Entry { node, ref machine, .. } = self.qps[qp];
        let after = machine.state();
        let due = machine.next_timeout();
        if seen.flushed > 0 && !matches!(after, QpState::Err | QpState::Sqe) {
            self.complain(format!("QP {qp}: requests are flushed in {after:?}"));
        }
        if after != before {
            self.oracle.books[qp].drained = false;
            self.log.note(self.now, kind::STATE, &[qp as u64, after as u64], || format!("QP {qp} is in {after:?}"));
            self.changed_state(qp, after, commanded, seen);
        }
        for &id in &seen.returned {
            for waiting in self.nodes[node].windows.take_waiting(id) {
                self.activate(waiting);
            }
            if !self.nodes[node].active.is_empty() {
                self.schedule_turn(node, self.now);
            }
        }
        if let Some(due) = due {
            self.schedule_turn(node, due);
        }
        self.notify(qp, seen);
    }

    /// Checks a change of state that was just made.
    fn changed_state(&mut self, qp: usize, after: QpState, commanded: bool, seen: &Seen) {
        let book = &self.oracle.books[qp];
        let told_by_event =
            seen.events.iter().any(|e| matches!(e, QpEvent::Fatal | QpEvent::ReqErr | QpEvent::AccessErr));
        let told = seen.send_failure || seen.receive_failure || told_by_event;
        let mut wrong = Vec::new();
        if matches!(after, QpState::Err | QpState::Sqe) {
            if !commanded && !told {
                wrong.push("no completion and no event tells why");
            }
            if !book.stream.outstanding().is_empty() {
                wrong.push("requests are not flushed");
            }
            if book.charged != [0, 0] {
                wrong.push("window bytes are not given back");
            }
        }
        if after == QpState::Err {
            if book.popped.is_some() || !book.receives.is_empty() {
                wrong.push("receives are not flushed");
            }
            if book.srq.is_some() && !seen.events.contains(&QpEvent::LastWqeReached) {
                wrong.push("LAST_WQE_REACHED is not raised");
            }
            if self.qps[qp].machine.next_timeout().is_some() {
                wrong.push("a timer runs on");
            }
        }
        // Who refuses still says so; who goes otherwise is silent.
        let refuses = seen.receive_failure || told_by_event;
        if after == QpState::Reset || (after == QpState::Err && !refuses) {
            let peer = self.oracle.books[qp].peer;
            self.oracle.books[peer].stream.abandoned = true;
        }
        if after == QpState::Sqe {
            self.cover.add(Met::ToSqe);
        }
        if !wrong.is_empty() {
            self.complain(format!("QP {qp} goes to {after:?}: {}", wrong.join(", ")));
        }
        if !commanded {
            self.failed_by_itself(qp, after);
        }
    }
}

/// What a datagram takes of a receive buffer: Linux counts the memory behind it, not its bytes.
fn truesize(datagram: &Datagram) -> u32 {
    const BOOKKEEPING: u32 = 768;
    if datagram.frames.len() > 1 {
        datagram.len().next_multiple_of(4096) + 2 * BOOKKEEPING
    } else {
        (datagram.len() + 256).next_power_of_two() + BOOKKEEPING
    }
}
