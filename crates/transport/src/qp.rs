//! A queue pair: its state, and the machines of its service type.

use std::net::IpAddr;

use ferroce_wire::{Flow, FlowKind, Headers, Opcode};

use crate::decode::{CLASS_MASK, class};
use crate::flow::{Answers, Key};
use crate::host::{Drop, Host, MemoryError, Packet, Side, Span, Train};
use crate::pacer::Pacer;
use crate::qp_state::{self, ModifyError};
use crate::raw::{FrameFate, RawFrames};
use crate::receive;
use crate::requester::Requester;
use crate::responder::Responder;
use crate::send_once::SendOnce;
use crate::timer::Nanos;
use crate::uc::UcReceiver;
use crate::ud::UdReceiver;
use crate::verbs::{QpAttr, QpAttrMask, QpEvent, QpInit, QpState, QpType, SendStanding, SendWr};
use crate::wqe::Wqe;

/// The P_Key that every packet carries: the default partition. The top bit tells full from limited members.
const DEFAULT_PKEY: u16 = 0x7fff;

/// What the machines need to know of their queue pair.
#[derive(Clone, Copy)]
pub(crate) struct Conn<'a> {
    pub(crate) init: &'a QpInit,
    pub(crate) attr: &'a QpAttr,
    pub(crate) state: QpState,
}

/// The queue pair must leave its state. The request at fault was completed by the machine that says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Upset {
    /// To ERR: everything is flushed.
    Err,
    /// To SQE: the send queue is flushed, receiving goes on (UC, UD).
    Sqe,
}

impl Conn<'_> {
    /// What an opcode of RC is in the class of the queue pair (RC, XRC).
    pub(crate) fn opcode(&self, rc: Opcode) -> Opcode {
        Opcode(class(self.init.qp_type) | rc.0)
    }
}

/// How an input ended.
pub(crate) type Outcome = Result<(), Upset>;

#[derive(Debug)]
enum Machines {
    /// RC, and the two ends of XRC, of which each leaves one of the machines idle.
    // One of the two is always in use, and a process may have thousands of idle queue pairs: neither is boxed twice.
    Rc {
        requester: Requester,
        responder: Responder,
        responder_turn: bool,
    },
    Uc {
        sender: SendOnce,
        receiver: UcReceiver,
    },
    Ud {
        sender: SendOnce,
        receiver: UdReceiver,
    },
    Raw(RawFrames),
}

impl Machines {
    fn new(qp_type: QpType) -> Machines {
        match qp_type {
            QpType::Rc | QpType::XrcSend | QpType::XrcRecv => {
                Machines::Rc { requester: Requester::new(), responder: Responder::new(), responder_turn: false }
            }
            QpType::Uc => Machines::Uc { sender: SendOnce::new(), receiver: UcReceiver::new() },
            QpType::Ud => Machines::Ud { sender: SendOnce::new(), receiver: UdReceiver::default() },
            QpType::RawPacket => Machines::Raw(RawFrames::default()),
        }
    }
}

/// A queue pair.
///
/// Its methods are of three kinds. **Commands** ([`modify`](Qp::modify), [`post_send`](Qp::post_send),
/// [`flush_recv`](Qp::flush_recv)) come from the program; **inputs** ([`handle_packet`](Qp::handle_packet),
/// [`handle_timeout`](Qp::handle_timeout), [`handle_transmit_fault`](Qp::handle_transmit_fault)) from the network, the clock and
/// the link; **outputs** ([`poll_transmit`](Qp::poll_transmit), [`next_timeout`](Qp::next_timeout)) are asked for. After every
/// command and every input (or a batch of them) the host calls `poll_transmit` until it gives `None`, then asks `next_timeout`.
/// It calls `poll_transmit` again when a window that had no room has some.
///
/// A queue pair that is thrown away is taken to RESET before, so that what it holds of the windows goes back.
#[derive(Debug)]
pub struct Qp {
    init: QpInit,
    attr: QpAttr,
    machines: Machines,
    /// The first packet after RTR was seen.
    established: bool,
    /// SQ_DRAINED was told (or draining is not going on).
    drained: bool,
    /// Its requests keep to a rate.
    pacer: Option<Pacer>,
}

macro_rules! conn {
    ($qp:expr) => {
        Conn { init: &$qp.init, attr: &$qp.attr, state: $qp.attr.state }
    };
}

impl Qp {
    /// A queue pair in RESET.
    pub fn new(init: QpInit) -> Qp {
        let machines = Machines::new(init.qp_type);
        Qp { init, attr: QpAttr::default(), machines, established: false, drained: true, pacer: None }
    }

    /// What it was made with.
    pub fn init(&self) -> &QpInit {
        &self.init
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        self.attr.state
    }

    /// Its attributes.
    pub fn attr(&self) -> &QpAttr {
        &self.attr
    }

    /// Its attributes as `ibv_query_qp(3)` tells them: the PSNs are those that come next.
    pub fn query(&self) -> QpAttr {
        let mut attr = self.attr.clone();
        match &self.machines {
            Machines::Rc { requester, responder, .. } => {
                (attr.sq_psn, attr.rq_psn) = (requester.new_psn(), responder.expected_psn());
            }
            Machines::Uc { sender, receiver } => {
                (attr.sq_psn, attr.rq_psn) = (sender.new_psn(), receiver.expected_psn());
            }
            Machines::Ud { sender, .. } => attr.sq_psn = sender.new_psn(),
            Machines::Raw(_) => {}
        }
        attr
    }

    /// Where its requester stands; only RC waits for answers.
    pub fn send_standing(&self) -> Option<SendStanding> {
        match &self.machines {
            Machines::Rc { requester, .. } => Some(requester.standing()),
            Machines::Uc { .. } | Machines::Ud { .. } | Machines::Raw(_) => None,
        }
    }

    /// Changes the state or attributes (`ibv_modify_qp(3)`). On an error nothing was changed.
    ///
    /// The path MTU of a UD queue pair is not an attribute of verbs: it is the port's. The host puts it into `attr.path_mtu` when it
    /// takes the queue pair to RTR.
    ///
    /// With a rate limit, requests keep to it, but for one train that may leave at once; what the peer is answered does not wait.
    /// RESET forgets it.
    pub fn modify(&mut self, attr: &QpAttr, mask: QpAttrMask, host: &mut impl Host) -> Result<(), ModifyError> {
        let from = self.attr.state;
        let (to, mask) = qp_state::check(&self.init, from, attr, mask)?;
        match to {
            QpState::Reset => {
                self.reset(host);
                return Ok(());
            }
            QpState::Err => {
                self.enter_err(host);
                return Ok(());
            }
            _ => {}
        }
        qp_state::apply(&mut self.attr, attr, mask);
        self.attr.cur_state = to;
        self.attr.state = to;
        if from != to {
            self.entered(from, to, mask);
        }
        if mask.contains(QpAttrMask::RATE_LIMIT) {
            self.pacer = Pacer::new(self.attr.rate_limit);
        }
        self.settle(Ok(()), host);
        Ok(())
    }

    fn entered(&mut self, from: QpState, to: QpState, mask: QpAttrMask) {
        match to {
            QpState::Rtr => {
                let psn = self.attr.rq_psn;
                match &mut self.machines {
                    Machines::Rc { responder, .. } => responder.start(psn),
                    Machines::Uc { receiver, .. } => receiver.start(psn),
                    Machines::Ud { .. } | Machines::Raw(_) => {}
                }
            }
            QpState::Rts => {
                self.attr.sq_draining = false;
                self.drained = true;
                if from == QpState::Rtr {
                    let psn = self.attr.sq_psn;
                    match &mut self.machines {
                        Machines::Rc { requester, .. } => requester.start(psn),
                        Machines::Uc { sender, .. } | Machines::Ud { sender, .. } => sender.start(psn),
                        Machines::Raw(_) => {}
                    }
                }
            }
            QpState::Sqd => {
                // Asked for anew each time.
                self.attr.en_sqd_async_notify &= mask.contains(QpAttrMask::EN_SQD_ASYNC_NOTIFY);
                self.attr.sq_draining = true;
                self.drained = false;
            }
            _ => {}
        }
    }

    /// Posts a send request. The poster checked the room in the queue, and that the state takes requests at all (RTS, SQD, SQE,
    /// ERR); in SQE and ERR it completes as flushed.
    pub fn post_send(&mut self, wr: SendWr, host: &mut impl Host) {
        if matches!(self.attr.state, QpState::Err | QpState::Sqe) {
            Wqe::new(wr).flush(self.init.qpn, self.attr.dest_qpn, host);
            return;
        }
        match &mut self.machines {
            Machines::Rc { requester, .. } => requester.post(wr),
            Machines::Uc { sender, .. } | Machines::Ud { sender, .. } => sender.post(wr),
            Machines::Raw(frames) => frames.post(wr),
        }
    }

    /// Completes as flushed what is in the receive queue of a queue pair in ERR: for receives that were posted since. Those of an
    /// SRQ stay there.
    pub fn flush_recv(&mut self, host: &mut impl Host) {
        if self.init.has_srq || self.attr.state != QpState::Err {
            return;
        }
        while let Some(wr) = host.pop_recv() {
            receive::flush(&wr, &self.init, self.attr.dest_qpn, host);
        }
    }

    /// A packet for this queue pair that passed the ICRC.
    pub fn handle_packet(&mut self, now: Nanos, packet: &Packet<'_>, host: &mut impl Host) {
        if let Err(reason) = self.admit(packet) {
            host.drop_packet(reason);
            return;
        }
        if packet.headers.bth.opcode == Opcode::FERROCE_FLOW {
            if let Err(reason) = self.handle_flow(now, packet, host) {
                host.drop_packet(reason);
            }
            return;
        }
        let conn = conn!(self);
        let outcome = match &mut self.machines {
            Machines::Rc { requester, .. } if packet.headers.bth.opcode.is_response() => {
                requester.handle_packet(now, conn, packet, host)
            }
            Machines::Rc { requester, responder, .. } => {
                establish(&mut self.established, conn, host);
                let outcome = responder.handle_packet(now, conn, packet, host);
                for rendezvous in responder.take_rendezvous() {
                    requester.fetch(&rendezvous);
                }
                outcome
            }
            Machines::Uc { receiver, .. } => {
                establish(&mut self.established, conn, host);
                receiver.handle_packet(conn, packet, host)
            }
            Machines::Ud { receiver, .. } => receiver.handle_packet(conn, packet, host),
            // None was admitted.
            Machines::Raw(_) => Ok(()),
        };
        self.settle(outcome, host);
    }

    /// Where `len` bytes are to be put that come in the next packets of a message: packets that are full, the first of which has these
    /// headers, and at least one more behind them. `None`: packet by packet. The host that puts all of them there before it gives the packets to
    /// [`handle_packet`](Qp::handle_packet) saves a copy.
    pub fn place(&self, headers: &Headers, len: u32, host: &mut impl Host) -> Option<Span> {
        let Machines::Rc { responder, .. } = &self.machines else { return None };
        let receives = matches!(self.attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        (receives && self.expects(headers)).then(|| responder.place(conn!(self), headers, len, host)).flatten()
    }

    /// Is a packet of a request with these headers the next one in its order?
    pub fn expects(&self, headers: &Headers) -> bool {
        matches!(&self.machines, Machines::Rc { responder, .. } if responder.expected_psn() == headers.bth.psn)
    }

    /// RAW_PACKET: puts the frame that is to go out next into `frame`; false: there is none now. Its fate is told to
    /// [`handle_frame_fate`](Qp::handle_frame_fate) before anything else is asked of the queue pair.
    pub fn poll_frame(&mut self, frame: &mut Vec<u8>, host: &mut impl Host) -> bool {
        let conn = conn!(self);
        let Machines::Raw(frames) = &mut self.machines else { return false };
        let polled = frames.poll(conn, frame, host);
        self.settle(polled.map(drop), host);
        polled == Ok(true)
    }

    /// RAW_PACKET: what became of the frame that [`poll_frame`](Qp::poll_frame) gave.
    pub fn handle_frame_fate(&mut self, fate: FrameFate, host: &mut impl Host) {
        let conn = conn!(self);
        let Machines::Raw(frames) = &mut self.machines else { return };
        let outcome = frames.handle_fate(fate, conn, host);
        self.settle(outcome, host);
    }

    /// RAW_PACKET: a frame that was steered to this queue pair, with the tag of its rule (0: none).
    pub fn handle_frame(&mut self, frame: &[u8], tag: u32, host: &mut impl Host) {
        if matches!(self.attr.state, QpState::Reset | QpState::Init | QpState::Err) {
            host.drop_packet(Drop::QpState);
            return;
        }
        let conn = conn!(self);
        let outcome = match &mut self.machines {
            Machines::Raw(frames) => frames.handle_frame(conn, frame, tag, host),
            Machines::Rc { .. } | Machines::Uc { .. } | Machines::Ud { .. } => {
                host.drop_packet(Drop::WrongTransport);
                Ok(())
            }
        };
        self.settle(outcome, host);
    }

    /// What holds for packets of any kind (IBA 9.6.1).
    fn admit(&self, packet: &Packet<'_>) -> Result<(), Drop> {
        let bth = &packet.headers.bth;
        if matches!(self.attr.state, QpState::Reset | QpState::Init | QpState::Err) {
            return Err(Drop::QpState);
        }
        if bth.tver != 0 {
            return Err(Drop::Version);
        }
        if bth.pkey & DEFAULT_PKEY != DEFAULT_PKEY {
            return Err(Drop::PKey);
        }
        if bth.opcode == Opcode::CNP {
            return Err(Drop::Cnp);
        }
        let qp_type = self.init.qp_type;
        // It takes frames, which come another way.
        if qp_type == QpType::RawPacket {
            return Err(Drop::WrongTransport);
        }
        let flow = bth.opcode == Opcode::FERROCE_FLOW && !qp_type.is_reliable();
        if bth.opcode.0 & CLASS_MASK != class(qp_type) && !flow {
            return Err(Drop::WrongTransport);
        }
        // An initiator has no responder, and a target no requester.
        if qp_type.is_xrc() && bth.opcode.is_response() != (qp_type == QpType::XrcSend) {
            return Err(Drop::WrongTransport);
        }
        if self.init.qp_type != QpType::Ud && !self.is_peer(packet.net.src) {
            return Err(Drop::WrongSource);
        }
        Ok(())
    }

    /// A packet of the flow control between Ferroce ends (UC, UD).
    fn handle_flow(&mut self, now: Nanos, packet: &Packet<'_>, host: &mut impl Host) -> Result<(), Drop> {
        let flow = Flow::parse(packet.payload).ok_or(Drop::BadOpcode)?;
        let (conn, psn) = (conn!(self), packet.headers.bth.psn);
        if self.init.qp_type == QpType::Uc && flow.src_qp != self.attr.dest_qpn {
            return Err(Drop::WrongSource);
        }
        match (flow.kind, &mut self.machines) {
            (FlowKind::Question, Machines::Uc { receiver, .. }) => receiver.asked(conn, packet, host),
            (FlowKind::Question, Machines::Ud { receiver, .. }) => {
                if flow.qkey != self.attr.qkey {
                    return Err(Drop::QKey);
                }
                receiver.answers.asked(conn, packet.net, flow.src_qp, psn, false, host);
            }
            (FlowKind::Answer { missing }, Machines::Uc { sender, .. } | Machines::Ud { sender, .. }) => {
                return sender.answered(now, Key::new(packet.net.src, flow.src_qp), psn, missing, host);
            }
            (_, Machines::Rc { .. } | Machines::Raw(_)) => return Err(Drop::WrongTransport),
        }
        Ok(())
    }

    fn is_peer(&self, src: IpAddr) -> bool {
        self.attr.path.as_ref().is_some_and(|path| path.dst.to_canonical() == src.to_canonical())
    }

    /// The time that [`next_timeout`](Qp::next_timeout) named has come (or not: then nothing happens).
    pub fn handle_timeout(&mut self, now: Nanos, host: &mut impl Host) {
        if let Some(pacer) = &mut self.pacer {
            pacer.handle_timeout(now);
        }
        match &mut self.machines {
            Machines::Rc { requester, responder, .. } => {
                responder.handle_timeout(now);
                let outcome = requester.handle_timeout(now, conn!(self), host);
                self.settle(outcome, host);
            }
            Machines::Uc { sender, .. } | Machines::Ud { sender, .. } => sender.handle_timeout(now, host),
            Machines::Raw(frames) => frames.handle_timeout(now),
        }
    }

    /// The memory of a train was gone when the link read it: nothing of the train went out.
    pub fn handle_transmit_fault(&mut self, train: &Train, error: MemoryError, host: &mut impl Host) {
        if matches!(self.attr.state, QpState::Reset | QpState::Init) {
            return;
        }
        let conn = conn!(self);
        let outcome = match (&mut self.machines, train.from) {
            (Machines::Rc { requester, .. }, Side::Requester) => {
                requester.handle_transmit_fault(train, error, host);
                Ok(())
            }
            (Machines::Rc { responder, .. }, Side::Responder | Side::ResponderAgain) => {
                responder.handle_transmit_fault(train, error, conn, host)
            }
            (Machines::Uc { sender, .. } | Machines::Ud { sender, .. }, _) => {
                sender.handle_transmit_fault(train, error, conn, host)
            }
            // It sends no trains.
            (Machines::Raw(_), _) => Ok(()),
        };
        self.settle(outcome, host);
    }

    /// The next train to send.
    pub fn poll_transmit(&mut self, now: Nanos, host: &mut impl Host) -> Option<Train> {
        let mut out = None;
        loop {
            let may_request = self.pacer.as_mut().is_none_or(|pacer| pacer.lets_go(now));
            let conn = conn!(self);
            let polled = match &mut self.machines {
                Machines::Rc { requester, responder, responder_turn } => {
                    *responder_turn = !*responder_turn;
                    let requester = Some(requester).filter(|_| may_request);
                    poll_rc(now, requester, responder, *responder_turn, conn, host, &mut out)
                }
                Machines::Uc { sender, receiver } => {
                    let sender = Some(sender).filter(|_| may_request);
                    poll_once(now, sender, &mut receiver.answers, conn, host, &mut out)
                }
                Machines::Ud { sender, receiver } => {
                    let sender = Some(sender).filter(|_| may_request);
                    poll_once(now, sender, &mut receiver.answers, conn, host, &mut out)
                }
                // Its frames are asked for by `poll_frame`.
                Machines::Raw(_) => Ok(()),
            };
            // If a machine stopped, the other may still have something to say.
            let again = polled.is_err();
            self.settle(polled, host);
            if !again {
                self.note_sent(out.as_ref(), now);
                return out;
            }
        }
    }

    fn note_sent(&mut self, train: Option<&Train>, now: Nanos) {
        if let (Some(pacer), Some(train)) = (&mut self.pacer, train)
            && train.from == Side::Requester
        {
            pacer.sent(train, now);
        }
    }

    /// When [`handle_timeout`](Qp::handle_timeout) wants to be called.
    pub fn next_timeout(&self) -> Option<Nanos> {
        let paced = self.pacer.as_ref().and_then(Pacer::next_timeout);
        self.machines_timeout().into_iter().chain(paced).min()
    }

    fn machines_timeout(&self) -> Option<Nanos> {
        match &self.machines {
            Machines::Rc { requester, responder, .. } => {
                requester.next_timeout().into_iter().chain(responder.next_timeout()).min()
            }
            Machines::Uc { sender, .. } | Machines::Ud { sender, .. } => sender.next_timeout(),
            Machines::Raw(frames) => frames.next_timeout(),
        }
    }

    /// Panics if the queue pair's own state contradicts itself.
    #[cfg(any(test, feature = "testing"))]
    pub fn assert_invariants(&self) {
        match &self.machines {
            Machines::Rc { requester, responder, .. } => {
                requester.assert_invariants();
                responder.assert_invariants(&self.attr);
            }
            Machines::Uc { sender, .. } | Machines::Ud { sender, .. } => sender.assert_invariants(),
            Machines::Raw(_) => {}
        }
    }

    /// Until its next RESET an RC queue pair drops requests that come before their turn, as kernel rxe and cards do.
    #[cfg(any(test, feature = "testing"))]
    pub fn go_back_n(&mut self, on: bool) {
        if let Machines::Rc { responder, .. } = &mut self.machines {
            responder.go_back_n(on);
        }
    }

    /// An RC queue pair goes on as if it had completed `msn` messages of the peer's.
    #[cfg(any(test, feature = "testing"))]
    pub fn start_msn(&mut self, msn: u32) {
        if let Machines::Rc { responder, .. } = &mut self.machines {
            responder.start_msn(msn);
        }
    }

    /// Carries out what an input led to.
    fn settle(&mut self, outcome: Outcome, host: &mut impl Host) {
        match outcome {
            Ok(()) => {}
            Err(Upset::Err) => self.enter_err(host),
            Err(Upset::Sqe) => self.enter_sqe(host),
        }
        if !self.drained && self.is_drained() {
            self.drained = true;
            self.attr.sq_draining = false;
            if self.attr.en_sqd_async_notify {
                host.event(QpEvent::SqDrained);
            }
        }
    }

    fn is_drained(&self) -> bool {
        self.attr.state == QpState::Sqd
            && match &self.machines {
                Machines::Rc { requester, .. } => requester.is_drained(),
                Machines::Uc { sender, .. } | Machines::Ud { sender, .. } => sender.is_drained(),
                Machines::Raw(frames) => frames.is_drained(),
            }
    }

    /// Goes to ERR: send requests and receives are flushed in their order.
    fn enter_err(&mut self, host: &mut impl Host) {
        if self.attr.state == QpState::Err {
            return;
        }
        self.set_state(QpState::Err);
        let conn = conn!(self);
        match &mut self.machines {
            Machines::Rc { requester, responder, .. } => {
                requester.flush(conn, host);
                responder.flush(conn, host);
            }
            Machines::Uc { sender, receiver } => {
                sender.flush(conn, host);
                receiver.flush(conn, host);
            }
            Machines::Ud { sender, receiver } => {
                sender.flush(conn, host);
                receiver.flush(conn, host);
            }
            Machines::Raw(frames) => frames.flush(conn, host),
        }
        self.flush_recv(host);
        if self.init.has_srq {
            host.event(QpEvent::LastWqeReached);
        }
    }

    /// Goes to SQE: send requests are flushed.
    fn enter_sqe(&mut self, host: &mut impl Host) {
        self.set_state(QpState::Sqe);
        let conn = conn!(self);
        match &mut self.machines {
            Machines::Uc { sender, .. } | Machines::Ud { sender, .. } => sender.flush(conn, host),
            Machines::Raw(frames) => frames.flush_sends(conn, host),
            Machines::Rc { .. } => unreachable!("RC has no SQE"),
        }
    }

    /// Forgets everything, without completions.
    fn reset(&mut self, host: &mut impl Host) {
        match &mut self.machines {
            Machines::Rc { requester, .. } => requester.reset(host),
            Machines::Uc { sender, .. } | Machines::Ud { sender, .. } => sender.reset(host),
            Machines::Raw(frames) => frames.reset(host),
        }
        if !self.init.has_srq {
            while host.pop_recv().is_some() {}
        }
        *self = Qp::new(self.init);
    }

    fn set_state(&mut self, state: QpState) {
        self.attr.state = state;
        self.attr.cur_state = state;
        self.attr.sq_draining = false;
        self.drained = true;
    }
}

fn poll_rc(
    now: Nanos,
    requester: Option<&mut Requester>,
    responder: &mut Responder,
    responder_first: bool,
    conn: Conn<'_>,
    host: &mut impl Host,
    out: &mut Option<Train>,
) -> Outcome {
    // Neither side may starve the other: they take turns.
    if responder_first {
        responder.poll_transmit(conn, host, out)?;
    }
    if let Some(requester) = requester.filter(|_| out.is_none() && matches!(conn.state, QpState::Rts | QpState::Sqd)) {
        requester.poll_transmit(now, conn, host, out)?;
    }
    if out.is_none() && !responder_first {
        responder.poll_transmit(conn, host, out)?;
    }
    Ok(())
}

/// UC and UD: answers first; they are few and small.
fn poll_once(
    now: Nanos,
    sender: Option<&mut SendOnce>,
    answers: &mut Answers,
    conn: Conn<'_>,
    host: &mut impl Host,
    out: &mut Option<Train>,
) -> Outcome {
    answers.poll_transmit(conn, host, out);
    match sender.filter(|_| out.is_none()) {
        Some(sender) => sender.poll_transmit(now, conn, host, out),
        None => Ok(()),
    }
}

/// The first packet in RTR tells that the peer is there (IBA 11.6.3.1).
fn establish(established: &mut bool, conn: Conn<'_>, host: &mut impl Host) {
    if !*established {
        *established = true;
        if conn.state == QpState::Rtr {
            host.event(QpEvent::CommEst);
        }
    }
}
