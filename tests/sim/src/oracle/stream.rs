//! What one queue pair was asked to send, how far it got, and how it must end.

use ferroce_transport::{Completion, Nanos, SendFlags, SendOp, Sge, WcOpcode, WcStatus};
use smallvec::SmallVec;

use crate::pattern::Pattern;

/// A checker's complaint.
pub(crate) type Check = Result<(), String>;

/// Longest time that a request may take once the network is well, if it succeeds: retransmission timers have backed off, and a peer
/// with few receives may make it wait for each. On top comes the longest budget of any queue pair: one whose peer is gone holds
/// its part of a shared window until it gives up.
pub(crate) const WELL_MAX: Nanos = 2_000_000_000;

/// How a request must end, by how it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Good,
    /// Refused at home.
    Local(WcStatus),
    /// Refused by the peer.
    Remote(WcStatus),
    /// On memory that may go away: success, or the status of what became of it.
    Fragile,
}

/// A send request as its program remembers it.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) wr_id: u64,
    pub(crate) posted_at: Nanos,
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    pub(crate) len: u32,
    pub(crate) fate: Fate,
    /// Content of the message; of a READ what must come back.
    pub(crate) pattern: Pattern,
    /// Local memory: source, or where a response goes (real addresses and lengths).
    pub(crate) local: SmallVec<[(u64, u32); 4]>,
    /// Real address of the target of a WRITE or atomic.
    pub(crate) target: u64,
    /// UD: the destination.
    pub(crate) to: Option<usize>,
    /// Bytes of it that the responder stored.
    pub(crate) stored: u32,
    /// The responder did all of it.
    pub(crate) executed: bool,
    /// Bytes of the response stored.
    pub(crate) returned: u32,
    /// What the word held before an atomic.
    pub(crate) old: Option<u64>,
    /// UC and UD: receives that it completed.
    pub(crate) delivered: u32,
    pub(crate) completed: bool,
}

impl Request {
    pub(crate) fn is_read(&self) -> bool {
        matches!(self.op, SendOp::Read { .. })
    }

    pub(crate) fn is_atomic(&self) -> bool {
        matches!(self.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
    }

    pub(crate) fn is_write(&self) -> bool {
        matches!(self.op, SendOp::Write { .. } | SendOp::WriteImm { .. })
    }

    pub(crate) fn is_send(&self) -> bool {
        matches!(self.op, SendOp::Send | SendOp::SendImm { .. } | SendOp::SendInv { .. })
    }

    /// It completes a receive.
    pub(crate) fn takes_receive(&self) -> bool {
        self.is_send() || matches!(self.op, SendOp::WriteImm { .. })
    }

    /// The responder's host sees something of it.
    fn has_effect(&self) -> bool {
        self.takes_receive() || self.is_atomic() || (self.is_write() && self.len > 0)
    }

    fn is_signalled(&self) -> bool {
        self.flags.contains(SendFlags::SIGNALED)
    }

    fn opcode(&self) -> WcOpcode {
        match self.op {
            SendOp::Send | SendOp::SendImm { .. } | SendOp::SendInv { .. } => WcOpcode::Send,
            SendOp::Write { .. } | SendOp::WriteImm { .. } => WcOpcode::RdmaWrite,
            SendOp::Read { .. } => WcOpcode::RdmaRead,
            SendOp::CompareSwap { .. } => WcOpcode::CompSwap,
            SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
            SendOp::LocalInv { .. } => WcOpcode::LocalInv,
            SendOp::BindMw(_) => WcOpcode::BindMw,
            SendOp::AtomicWrite { .. } => WcOpcode::AtomicWrite,
            SendOp::Flush { .. } => WcOpcode::Flush,
        }
    }

    /// Does `[at, at + len)` lie in its local memory?
    pub(crate) fn is_local(&self, at: u64, len: u32) -> bool {
        self.local.iter().any(|&(start, size)| at >= start && at + u64::from(len) <= start + u64::from(size))
    }

    /// The address of byte `offset` of its local memory, and the bytes that follow there.
    pub(crate) fn locate(&self, offset: u32) -> Option<(u64, u32)> {
        locate(self.local.iter().copied(), offset)
    }
}

/// The address of byte `offset` of some pieces of memory, and how many bytes follow in that piece.
pub(crate) fn locate(pieces: impl IntoIterator<Item = (u64, u32)>, mut offset: u32) -> Option<(u64, u32)> {
    for (start, len) in pieces {
        if offset < len {
            return Some((start + u64::from(offset), len - offset));
        }
        offset -= len;
    }
    None
}

/// Bytes of some elements together.
pub(crate) fn total(sges: &[Sge]) -> u32 {
    sges.iter().map(|sge| sge.length).sum()
}

/// What a queue pair may give up for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Time without progress; `None` for ever.
    pub(crate) budget: Option<Nanos>,
    /// RNR NAKs without progress; `None` for any number.
    pub(crate) rnr_naks: Option<u32>,
    /// Longest time that a request may take once the network is well, if it succeeds.
    pub(crate) well_max: Nanos,
}

/// What came before a failure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Silence {
    /// Time without progress, at least.
    pub(crate) lasted: Nanos,
    /// RNR NAKs without progress, at most.
    pub(crate) rnr_naks: u32,
    /// Something happened to frames or nodes.
    pub(crate) disturbed: bool,
}

/// The send requests of one queue pair since it was connected.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    pub(crate) requests: Vec<Request>,
    /// Slots given back.
    pub(crate) released: usize,
    /// The last one released may still be completed.
    unsettled: bool,
    /// The responder's place.
    pub(crate) executing: usize,
    /// A request ended in error: all behind it are flushed.
    pub(crate) failed: bool,
    /// What the peer's responder refused with, when that was not foreseen.
    pub(crate) refusals: Vec<WcStatus>,
    pub(crate) patience: Patience,
    /// When the requester last heard something that counts as progress, at the earliest.
    pub(crate) progress_at: Nanos,
    pub(crate) rnr_naks: u32,
    /// Time that the last request released took since it was posted and the network was well.
    took: Nanos,
    /// The peer left the connection: no answer can be expected.
    pub(crate) abandoned: bool,
    /// UC and UD: messages handed to the link.
    pub(crate) handed: usize,
    reliable: bool,
    /// Nothing is known of what the peer gets to see.
    exposed: bool,
}

impl Stream {
    pub(crate) fn new(patience: Patience, reliable: bool, exposed: bool) -> Stream {
        Stream {
            requests: Vec::new(),
            released: 0,
            unsettled: false,
            executing: 0,
            failed: false,
            refusals: Vec::new(),
            patience,
            progress_at: 0,
            rnr_naks: 0,
            took: 0,
            abandoned: false,
            handed: 0,
            reliable,
            exposed,
        }
    }

    pub(crate) fn outstanding(&self) -> &[Request] {
        &self.requests[self.released..]
    }

    pub(crate) fn post(&mut self, now: Nanos, request: Request) {
        if self.released == self.requests.len() {
            self.progressed(now);
        }
        self.requests.push(request);
    }

    pub(crate) fn progressed(&mut self, now: Nanos) {
        self.progress_at = now;
        self.rnr_naks = 0;
    }

    // The responder's side.

    /// The request that the responder's next act belongs to.
    pub(crate) fn executing(&mut self) -> Result<&mut Request, String> {
        loop {
            let Some(request) = self.requests.get(self.executing) else {
                return Err("the responder executes what was never posted".to_owned());
            };
            let harmless = match request.fate {
                Fate::Good | Fate::Fragile => true,
                Fate::Local(_) => false,
                // A SEND whose key cannot be invalidated is refused only at its end.
                Fate::Remote(_) => matches!(request.op, SendOp::SendInv { .. }),
            };
            if !harmless {
                return Err(format!(
                    "the responder went past request {}, which must fail: {request:?}",
                    self.executing
                ));
            }
            if request.has_effect() {
                break;
            }
            self.executing += 1;
        }
        self.check_fence()?;
        Ok(&mut self.requests[self.executing])
    }

    /// The request that the responder executes next, be it one that it must refuse.
    pub(crate) fn next(&self) -> Option<&Request> {
        self.requests[self.executing..].iter().find(|request| request.has_effect())
    }

    fn check_fence(&self) -> Check {
        let index = self.executing;
        let request = &self.requests[index];
        if !request.flags.contains(SendFlags::FENCE) || index <= self.released {
            return Ok(());
        }
        match self.requests[self.released..index].iter().find(|earlier| earlier.is_read() || earlier.is_atomic()) {
            Some(earlier) => Err(format!("fenced request {:#x} overtook {:#x}", request.wr_id, earlier.wr_id)),
            None => Ok(()),
        }
    }

    /// The responder finished the request it executes.
    pub(crate) fn execute(&mut self) {
        self.requests[self.executing].executed = true;
        self.executing += 1;
    }

    // The requester's side.

    /// Slots come back, one for each request that ends.
    pub(crate) fn release(&mut self, now: Nanos, well_since: Option<Nanos>) -> Check {
        self.settle()?;
        let Some(request) = self.requests.get(self.released) else {
            return Err("a slot was released that no request holds".to_owned());
        };
        if let Some(since) = well_since {
            self.took = now - since.max(request.posted_at);
        }
        self.released += 1;
        self.unsettled = true;
        self.progressed(now);
        Ok(())
    }

    /// All slots come back: RESET.
    pub(crate) fn release_all(&mut self, count: usize) -> Check {
        self.settle()?;
        if self.released + count != self.requests.len() {
            return Err(format!("RESET released {count} slots of {}", self.outstanding().len()));
        }
        self.released = self.requests.len();
        Ok(())
    }

    /// A request that was released and not completed must have been an unsignalled success.
    pub(crate) fn settle(&mut self) -> Check {
        if !std::mem::take(&mut self.unsettled) {
            return Ok(());
        }
        let request = &self.requests[self.released - 1];
        if request.completed {
            return Ok(());
        }
        if request.is_signalled() {
            return Err(format!("signalled request {:#x} was released without a completion", request.wr_id));
        }
        self.check_success(self.released - 1)
    }

    pub(crate) fn complete(&mut self, completion: &Completion, silence: Silence) -> Check {
        let Some(index) = self.released.checked_sub(1).filter(|_| self.unsettled) else {
            return Err(format!("a completion before its slot was released: {completion:?}"));
        };
        let request = &mut self.requests[index];
        if request.completed {
            return Err(format!("request {:#x} completed twice: {completion:?}", request.wr_id));
        }
        request.completed = true;
        if (request.wr_id, request.opcode()) != (completion.wr_id, completion.opcode) {
            return Err(format!("request {:#x} is due to complete, not {completion:?}", request.wr_id));
        }
        match completion.status {
            WcStatus::Success => {
                if !request.is_signalled() {
                    return Err(format!("an unsignalled request completed: {completion:?}"));
                }
                let bytes = match request.opcode() {
                    WcOpcode::RdmaRead => request.len,
                    WcOpcode::CompSwap | WcOpcode::FetchAdd => 8,
                    _ => 0,
                };
                if completion.byte_len != bytes {
                    return Err(format!("byte_len should be {bytes}: {completion:?}"));
                }
                self.check_success(index)
            }
            WcStatus::WrFlushErr => {
                self.failed = true;
                Ok(())
            }
            status => {
                if std::mem::replace(&mut self.failed, true) {
                    return Err(format!("a second request failed by itself: {completion:?}"));
                }
                self.check_failure(index, status, silence)
            }
        }
    }

    fn check_success(&self, index: usize) -> Check {
        if self.took > self.patience.well_max && !self.exposed {
            return Err(format!("{} ns on a network that is well: {:?}", self.took, self.requests[index]));
        }
        let request = &self.requests[index];
        if self.failed {
            return Err(format!("a request succeeded behind one that failed: {request:?}"));
        }
        if matches!(request.fate, Fate::Local(_)) {
            return Err(format!("a request succeeded that must fail: {request:?}"));
        }
        if !self.reliable {
            let messages = self.requests[..=index].iter().filter(|r| !matches!(r.op, SendOp::LocalInv { .. })).count();
            if self.handed < messages {
                return Err(format!("a request completed before it was sent: {request:?}"));
            }
            return Ok(());
        }
        if self.exposed {
            return Ok(());
        }
        if matches!(request.fate, Fate::Remote(_)) {
            return Err(format!("a request succeeded that the peer must refuse: {request:?}"));
        }
        let done = if request.is_read() || request.is_atomic() {
            request.returned == request.len
        } else {
            !request.has_effect() || request.executed
        };
        if done { Ok(()) } else { Err(format!("a request completed before it was done: {request:?}")) }
    }

    fn check_failure(&self, index: usize, status: WcStatus, silence: Silence) -> Check {
        let Silence { lasted, rnr_naks, disturbed } = silence;
        let request = &self.requests[index];
        if self.exposed || request.fate == Fate::Local(status) || request.fate == Fate::Remote(status) {
            return Ok(());
        }
        let foreseen = match status {
            WcStatus::RetryExcErr => match self.patience.budget {
                Some(budget) if lasted < budget => {
                    return Err(format!("gave up after {lasted} ns of {budget}: {request:?}"));
                }
                Some(_) => disturbed || self.abandoned,
                None => false,
            },
            WcStatus::RnrRetryExcErr => match self.patience.rnr_naks {
                Some(allowed) if rnr_naks > allowed => true,
                Some(allowed) => return Err(format!("gave up after {rnr_naks} RNR NAKs of {allowed}: {request:?}")),
                None => false,
            },
            WcStatus::LocProtErr => request.fate == Fate::Fragile,
            // What is behind a READ may be executed before its response is made.
            _ => self.refusals.contains(&status) && (index >= self.executing || request.is_read()),
        };
        if foreseen {
            Ok(())
        } else {
            Err(format!(
                "request {index} ended with {status:?} for no reason (executing {}): {request:?}",
                self.executing
            ))
        }
    }
}
