//! What the simulation lends to a queue pair's machine for one call: memory, receives, windows; and an ear for all it tells.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ferroce_transport::{
    Access, AtomicOp, Completion, Count, Drop, EarlyBudget, Host, Memory, MemoryError, Nanos, PathAddr, QpEvent,
    QpType, RecvWr, Sge, Span, WcStatus, Window, WindowSignal,
};

use crate::coverage::{Coverage, Met};
use crate::log::Log;
use crate::memory::{NodeMemory, Right};
use crate::oracle::{Check, Oracle, Silence};
use crate::windows::{WindowId, Windows};

/// Numbers of events in the log.
pub(crate) mod kind {
    pub(crate) const TRANSMIT: u64 = 1;
    pub(crate) const ARRIVE: u64 = 2;
    pub(crate) const OVERFLOW: u64 = 3;
    pub(crate) const COMPLETE_SEND: u64 = 4;
    pub(crate) const COMPLETE_RECEIVE: u64 = 5;
    pub(crate) const EVENT: u64 = 6;
    pub(crate) const DROP: u64 = 7;
    pub(crate) const POST: u64 = 8;
    pub(crate) const POST_RECEIVE: u64 = 9;
    pub(crate) const STATE: u64 = 10;
    pub(crate) const TIMEOUT: u64 = 11;
    pub(crate) const REFUSED: u64 = 12;
}

/// Which of the two machines of an RC queue pair stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// A response arrives.
    Requester,
    /// Anything else.
    Responder,
}

/// What happened in one call.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) released: u32,
    pub(crate) flushed: u32,
    /// Ids of receives that completed.
    pub(crate) receives: Vec<u64>,
    /// A request, a receive ended in error by itself.
    pub(crate) send_failure: bool,
    pub(crate) receive_failure: bool,
    pub(crate) events: Vec<QpEvent>,
    pub(crate) rnr_nak: bool,
    /// Windows that were asked for room, and such that got some back.
    pub(crate) asked: Vec<WindowId>,
    pub(crate) returned: Vec<WindowId>,
}

pub(crate) struct SimHost<'a> {
    pub(crate) now: Nanos,
    pub(crate) qp: usize,
    pub(crate) role: Role,
    /// The queue pair goes to RESET: receives vanish.
    pub(crate) resetting: bool,
    pub(crate) oracle: &'a mut Oracle,
    pub(crate) memory: &'a mut NodeMemory,
    pub(crate) windows: &'a mut Windows,
    /// Window towards the connected peer.
    pub(crate) requests: Option<WindowId>,
    pub(crate) by_address: &'a BTreeMap<IpAddr, usize>,
    pub(crate) cover: &'a mut Coverage,
    pub(crate) log: &'a mut Log,
    pub(crate) complaint: &'a mut Option<String>,
    pub(crate) seen: Seen,
    /// Progress and RNR NAKs as they were before the last release.
    patience: (Nanos, u32),
}

impl<'a> SimHost<'a> {
    #[expect(clippy::too_many_arguments, reason = "a record of borrows, made in one place")]
    pub(crate) fn new(
        now: Nanos,
        qp: usize,
        role: Role,
        oracle: &'a mut Oracle,
        memory: &'a mut NodeMemory,
        windows: &'a mut Windows,
        requests: Option<WindowId>,
        by_address: &'a BTreeMap<IpAddr, usize>,
        cover: &'a mut Coverage,
        log: &'a mut Log,
        complaint: &'a mut Option<String>,
    ) -> SimHost<'a> {
        memory.begin_call();
        SimHost {
            now,
            qp,
            role,
            resetting: false,
            oracle,
            memory,
            windows,
            requests,
            by_address,
            cover,
            log,
            complaint,
            seen: Seen::default(),
            patience: (0, 0),
        }
    }

    pub(crate) fn check(&mut self, check: Check) {
        if let Err(what) = check {
            self.complaint.get_or_insert_with(|| format!("QP {}: {what}", self.qp));
        }
    }

    fn id(&self, window: Window) -> Option<WindowId> {
        match window {
            Window::Requests => self.requests,
            Window::Responses => Some(Windows::RESPONSES),
        }
    }

    /// The window towards the node of a queue pair.
    fn towards(&mut self, path: &PathAddr, qpn: u32) -> WindowId {
        let node = self.by_address.get(&path.dst).copied();
        if self.qp_type().is_reliable() || self.oracle.books.iter().all(|book| book.qpn != qpn) {
            self.check(Err(format!("a window towards {qpn:#x}, which is none of its destinations")));
        }
        Windows::towards(node.unwrap_or(0))
    }

    fn ask(&mut self, id: WindowId) -> u32 {
        if !self.seen.asked.contains(&id) {
            self.seen.asked.push(id);
        }
        self.windows.available(id)
    }

    fn take(&mut self, id: WindowId, window: Window, bytes: u32) {
        self.oracle.books[self.qp].charged[window as usize] += u64::from(bytes);
        if bytes > self.windows.available(id) {
            self.check(Err(format!("{bytes} bytes go in flight, more than the window allows")));
        }
        self.windows.take(id, bytes);
    }

    fn give_back(&mut self, id: WindowId, window: Window, bytes: u32, signal: WindowSignal) {
        let charged = &mut self.oracle.books[self.qp].charged[window as usize];
        match charged.checked_sub(u64::from(bytes)) {
            Some(left) => *charged = left,
            None => self.check(Err(format!("{bytes} bytes come back, more than were taken"))),
        }
        if !self.seen.returned.contains(&id) {
            self.seen.returned.push(id);
        }
        self.windows.give_back(id, bytes, signal);
    }

    fn progressed(&mut self) {
        let stream = &mut self.oracle.books[self.qp].stream;
        stream.progressed(self.now);
        stream.rnr_naks = u32::from(self.seen.rnr_nak);
    }

    fn refuse_memory(&mut self, error: MemoryError) {
        let status = match error {
            MemoryError::Fault => WcStatus::RemOpErr,
            MemoryError::Misaligned => WcStatus::RemInvReqErr,
            _ => WcStatus::RemAccessErr,
        };
        self.oracle.refuse(self.qp, status);
    }

    fn qp_type(&self) -> QpType {
        self.oracle.books[self.qp].qp_type
    }
}

impl Memory for SimHost<'_> {
    fn resolve_local(&mut self, pd: u32, sge: &Sge, write: bool) -> Result<Span, MemoryError> {
        if sge.length == 0 {
            return Ok(Span { addr: sge.addr, len: 0 });
        }
        let right = if write { Right::LocalWrite } else { Right::LocalRead };
        self.memory.resolve(pd, sge.lkey, sge.addr, sge.length, right)
    }

    fn resolve_remote(&mut self, pd: u32, rkey: u32, va: u64, len: u32, access: Access) -> Result<Span, MemoryError> {
        if len == 0 {
            return Ok(Span { addr: va, len: 0 });
        }
        let right = match access {
            Access::REMOTE_READ => Right::RemoteRead,
            Access::REMOTE_WRITE => Right::RemoteWrite,
            Access::REMOTE_ATOMIC => Right::RemoteAtomic,
            _ => {
                self.check(Err(format!("a remote range is resolved for {access:?}")));
                return Err(MemoryError::Access);
            }
        };
        let resolved = self.memory.resolve(pd, rkey, va, len, right);
        if let Err(error) = resolved {
            self.refuse_memory(error);
        }
        resolved
    }

    fn load(&mut self, span: Span, into: &mut [u8]) -> Result<(), MemoryError> {
        if !self.memory.is_granted(span.addr, span.len, Right::LocalRead) {
            self.check(Err(format!("{span:?} is read, which was not resolved for it")));
        }
        into.copy_from_slice(self.memory.load(span)?);
        Ok(())
    }

    fn store(&mut self, span: Span, data: &[u8], _last: bool) -> Result<(), MemoryError> {
        let (at, len) = (span.addr, data.len() as u32);
        let remote = self.role == Role::Responder && self.memory.is_granted(at, len, Right::RemoteWrite);
        if data.is_empty() || len > span.len {
            self.check(Err(format!("{len} bytes are stored in {span:?}")));
            return Ok(());
        }
        if !remote && !self.memory.is_granted(at, len, Right::LocalWrite) {
            self.check(Err(format!("{len} bytes are stored at {at:#x}, which was not resolved for it")));
            return Ok(());
        }
        if let Err(error) = self.memory.store(at, data) {
            if remote {
                self.refuse_memory(error);
            }
            return Err(error);
        }
        let check = match (self.role, remote) {
            (Role::Requester, _) => self.oracle.response_store(self.qp, at, data),
            (Role::Responder, true) => self.oracle.remote_store(self.qp, at, data),
            (Role::Responder, false) => self.oracle.receive_store(self.qp, at, data),
        };
        self.check(check);
        Ok(())
    }

    fn atomic(&mut self, span: Span, op: AtomicOp) -> Result<u64, MemoryError> {
        let at = span.addr;
        if span.len != 8 || !self.memory.is_granted(at, 8, Right::RemoteAtomic) {
            self.check(Err(format!("{op:?} at {span:?}, which was not resolved for it")));
            return Err(MemoryError::Access);
        }
        let old = self.memory.atomic(at, op).inspect_err(|&error| self.refuse_memory(error))?;
        let new = self.memory.word(at);
        let check = self.oracle.atomic(self.qp, at, op, old, new);
        self.check(check);
        Ok(old)
    }

    fn invalidate(&mut self, pd: u32, rkey: u32, _qpn: u32) -> Result<(), MemoryError> {
        self.memory.invalidate(pd, rkey)
    }
}

impl Host for SimHost<'_> {
    fn pop_recv(&mut self) -> Option<RecvWr> {
        if self.resetting {
            return self.oracle.books[self.qp].receives.pop_front();
        }
        let memory = &*self.memory;
        match self.oracle.pop(self.qp, |wr| wr.sges.iter().map(|sge| (memory.place(sge), sge.length)).collect()) {
            Ok(wr) => {
                if wr.is_some() && self.oracle.books[self.qp].srq.is_some() {
                    self.cover.add(Met::SrqReceive);
                }
                wr
            }
            Err(what) => {
                self.check(Err(what));
                None
            }
        }
    }

    fn choose_srq(&mut self, srqn: u32) -> Option<u32> {
        let book = &self.oracle.books[self.qp];
        let is_its = book.qp_type == QpType::XrcRecv && book.srq.is_some_and(|srq| srq as u32 + 1 == srqn);
        is_its.then_some(book.pd)
    }

    fn lends(&mut self) -> bool {
        self.oracle.lends
    }

    fn complete_send(&mut self, completion: Completion) {
        let Completion { wr_id, status, opcode, .. } = completion;
        let qp = self.qp;
        self.log.note(self.now, kind::COMPLETE_SEND, &[qp as u64, wr_id, status as u64], || {
            format!("QP {qp} completes {opcode:?} {wr_id:#x}: {status:?}")
        });
        let (progress_at, rnr_naks) = self.patience;
        let disturbed = self.oracle.disturbed;
        let silence = Silence { lasted: self.now.saturating_sub(progress_at), rnr_naks, disturbed };
        let book = &mut self.oracle.books[qp];
        let check = match completion.qp_num == book.qpn {
            true => book.stream.complete(&completion, silence),
            false => Err(format!("another's completion: {completion:?}")),
        };
        self.check(check);
        if self.oracle.books[qp].drained && status != WcStatus::WrFlushErr {
            self.check(Err(format!("a request ends though the SQ is drained: {completion:?}")));
        }
        match status {
            WcStatus::Success => {}
            WcStatus::WrFlushErr => {
                self.seen.flushed += 1;
                self.cover.add(Met::Flushed);
            }
            status => {
                self.seen.send_failure = true;
                match status {
                    WcStatus::RetryExcErr => self.cover.add(Met::RetryExceeded),
                    WcStatus::RnrRetryExcErr => self.cover.add(Met::RnrExceeded),
                    WcStatus::RemAccessErr | WcStatus::RemInvReqErr | WcStatus::RemOpErr => {
                        self.cover.add(Met::RemoteError);
                    }
                    _ => {}
                }
            }
        }
    }

    fn release_send(&mut self, count: u32) {
        let well_since = self.oracle.well_since;
        let stream = &mut self.oracle.books[self.qp].stream;
        self.patience = (stream.progress_at, stream.rnr_naks);
        self.seen.released += count;
        let check = match (self.resetting, count) {
            (true, _) => stream.release_all(count as usize),
            (false, 1) => stream.release(self.now, well_since),
            (false, _) => Err(format!("{count} slots are released at once")),
        };
        self.check(check);
        self.progressed();
    }

    fn complete_recv(&mut self, completion: Completion) {
        let Completion { wr_id, status, byte_len, .. } = completion;
        let qp = self.qp;
        self.log.note(self.now, kind::COMPLETE_RECEIVE, &[qp as u64, wr_id, status as u64, byte_len.into()], || {
            format!("QP {qp} completes receive {wr_id:#x} of {byte_len} bytes: {status:?}")
        });
        self.seen.receives.push(wr_id);
        match status {
            WcStatus::Success => {}
            WcStatus::WrFlushErr => self.cover.add(Met::ReceiveFlushed),
            _ => self.seen.receive_failure = true,
        }
        let check = self.oracle.complete_receive(qp, &completion, self.memory);
        self.check(check);
    }

    fn event(&mut self, event: QpEvent) {
        let qp = self.qp;
        self.log.note(self.now, kind::EVENT, &[qp as u64, event as u64], || format!("QP {qp} raises {event:?}"));
        self.seen.events.push(event);
        match event {
            QpEvent::SqDrained => self.oracle.books[qp].drained = true,
            QpEvent::Fatal | QpEvent::ReqErr | QpEvent::AccessErr => {
                let check = self.oracle.check_error_event(qp, event);
                self.check(check);
            }
            _ => {}
        }
    }

    fn drop_packet(&mut self, reason: Drop) {
        let qp = self.qp;
        self.log.note(self.now, kind::DROP, &[qp as u64, reason as u64], || format!("QP {qp} drops it: {reason:?}"));
    }

    fn count(&mut self, what: Count, n: u32) {
        let met = match what {
            Count::RnrNakReceived => {
                self.seen.rnr_nak = true;
                let stream = &mut self.oracle.books[self.qp].stream;
                stream.rnr_naks += n;
                Met::RnrNak
            }
            Count::ProbeSent => Met::Probe,
            Count::Timeout => Met::Timeout,
            Count::PacketsRetransmitted => Met::Retransmitted,
            Count::NakSequenceReceived => Met::SequenceNak,
            Count::DuplicateRequest => Met::DuplicateRequest,
            Count::RequestHeld => Met::RequestHeld,
            Count::FlowQuestionSent => Met::FlowQuestion,
            Count::FlowAnswerReceived => Met::FlowAnswer,
            _ => return,
        };
        self.cover.add_n(met, n.into());
    }

    fn window(&mut self, window: Window) -> u32 {
        match self.id(window) {
            Some(id) => self.ask(id),
            None => {
                self.check(Err(format!("a {:?} queue pair asks for a window of its connection", self.qp_type())));
                u32::MAX
            }
        }
    }

    fn window_take(&mut self, window: Window, bytes: u32) {
        if let Some(id) = self.id(window) {
            self.take(id, window, bytes);
        }
    }

    fn window_return(&mut self, window: Window, bytes: u32, signal: WindowSignal) {
        if matches!(signal, WindowSignal::Acked { .. }) {
            self.progressed();
        }
        if let Some(id) = self.id(window) {
            self.give_back(id, window, bytes, signal);
        }
    }

    fn window_lost(&mut self, window: Window, bytes: u32) {
        if u64::from(bytes) > self.oracle.books[self.qp].charged[window as usize] {
            self.check(Err(format!("{bytes} bytes were lost, more than are in flight")));
        }
        if let Some(id) = self.id(window) {
            self.windows.lost(id, bytes);
        }
    }

    fn early_budget(&self) -> Arc<EarlyBudget> {
        Arc::clone(&self.windows.early)
    }

    fn window_towards(&mut self, path: &PathAddr, qpn: u32) -> u32 {
        let id = self.towards(path, qpn);
        self.ask(id)
    }

    fn window_take_towards(&mut self, path: &PathAddr, qpn: u32, bytes: u32) {
        let id = self.towards(path, qpn);
        self.take(id, Window::Requests, bytes);
    }

    fn window_return_towards(&mut self, path: &PathAddr, qpn: u32, bytes: u32, signal: WindowSignal) {
        let id = self.towards(path, qpn);
        self.give_back(id, Window::Requests, bytes, signal);
    }
}
