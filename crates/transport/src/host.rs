//! What the transport asks of whoever hosts it: memory behind keys, receive requests, completions, the window.

use ferroce_wire::{Bth, Headers, Syndrome};
use smallvec::SmallVec;

use crate::EarlyBudget;
use crate::timer::Nanos;
use crate::verbs::{Access, Completion, MwBind, PathAddr, QpEvent, RecvWr, Sge};
use std::sync::Arc;

/// A piece of memory whose key, bounds and rights were checked: valid until the host gives up its lane lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Address in the process (in the simulator: in the simulated memory).
    pub addr: u64,
    /// Bytes.
    pub len: u32,
}

/// Why memory could not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// No region has this key.
    #[error("no region has this key")]
    BadKey,
    /// The region belongs to another protection domain.
    #[error("the region belongs to another protection domain")]
    WrongPd,
    /// Outside the region.
    #[error("outside the region")]
    Bounds,
    /// The region does not grant the right.
    #[error("the region does not grant the right")]
    Access,
    /// The address is misaligned (atomics).
    #[error("the address is not a multiple of 8")]
    Misaligned,
    /// The region's memory is gone: unmapped, truncated or protected.
    #[error("the memory behind the region is gone")]
    Fault,
}

/// An atomic operation on a 64-bit word in host byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AtomicOp {
    CompareSwap { compare: u64, swap: u64 },
    FetchAdd { add: u64 },
}

/// Why a packet was dropped without effect. Each is a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Drop {
    QpState,
    WrongTransport,
    WrongSource,
    PKey,
    QKey,
    Psn,
    DuplicateUnknown,
    GhostResponse,
    BadOpcode,
    BadLength,
    NoReceive,
    MessageBroken,
    Version,
    Access,
    /// A congestion notification: nothing here reacts to them.
    Cnp,
    /// More READs or atomics, or senders to answer, at once than can be kept: lost, as it were; the other end asks again.
    Overload,
}

/// Things worth counting besides drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Count {
    AckSent,
    AckReceived,
    NakSequenceSent,
    NakSequenceReceived,
    NakInvalidRequestSent,
    NakInvalidRequestReceived,
    NakRemoteAccessSent,
    NakRemoteAccessReceived,
    /// Also the NAKs with reserved codes, which count as this one.
    NakRemoteOperationSent,
    NakRemoteOperationReceived,
    RnrNakSent,
    RnrNakReceived,
    /// Microseconds that the requester was told to wait for a receive; they count from the beginning of the wait.
    RnrWaitUs,
    DuplicateRequest,
    /// RC: a request packet came before its turn, and was kept until then.
    RequestHeld,
    /// RC: asked the peer what it has, by a packet that was acknowledged before.
    ProbeSent,
    Timeout,
    /// Gave up: no answer, `retry_cnt` times.
    RetryExceeded,
    /// Gave up: no receive at the peer, `rnr_retry` times.
    RnrRetryExceeded,
    PacketsRetransmitted,
    /// Questions between Ferroce ends on UC and UD by a packet of our own; AckReq on data is not counted.
    FlowQuestionSent,
    FlowAnswerSent,
    FlowAnswerReceived,
}

impl Count {
    /// What a NAK that ends the connection counts as at the responder.
    pub(crate) fn fatal_nak_sent(syndrome: Syndrome) -> Count {
        match syndrome {
            Syndrome::NAK_INVALID_REQUEST => Count::NakInvalidRequestSent,
            Syndrome::NAK_REMOTE_ACCESS => Count::NakRemoteAccessSent,
            _ => Count::NakRemoteOperationSent,
        }
    }

    /// And at the requester.
    pub(crate) fn fatal_nak_received(syndrome: Syndrome) -> Count {
        match syndrome {
            Syndrome::NAK_INVALID_REQUEST => Count::NakInvalidRequestReceived,
            Syndrome::NAK_REMOTE_ACCESS => Count::NakRemoteAccessReceived,
            _ => Count::NakRemoteOperationReceived,
        }
    }
}

/// Which congestion window is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Requests in flight towards the peer's lane: bounded by the peer's receive buffer.
    Requests,
    /// READ response bytes asked for: bounded by our own receive buffer.
    Responses,
}

/// What became of window bytes that come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowSignal {
    /// Acknowledged in order.
    Acked {
        /// How long the last of them took from its departure to the answer, if that is known.
        rtt: Option<Nanos>,
    },
    /// A sequence NAK or response gap: packets were lost.
    Lost,
    /// A retransmission timer ran out.
    TimedOut,
    /// Given back without news (flush, reset).
    Released,
}

/// Memory behind keys. `pd` is the QP's protection domain. Every call checks afresh: a key may be gone by the next packet.
pub trait Memory {
    /// Resolves a local element for reading (`write` false) or writing. Zero-length elements are always good.
    fn resolve_local(&mut self, pd: u32, sge: &Sge, write: bool) -> Result<Span, MemoryError>;
    /// Resolves a remote range. `access` is one of the REMOTE rights, or those of a FLUSH. A zero length is good with any key.
    fn resolve_remote(&mut self, pd: u32, rkey: u32, va: u64, len: u32, access: Access) -> Result<Span, MemoryError>;
    /// Is `rkey` a key whose region, or window, grants the rights, whatever the range (FLUSH of a region)? A memory without FLUSH knows
    /// none.
    fn check_key(&mut self, pd: u32, rkey: u32, access: Access) -> Result<(), MemoryError> {
        let _ = (pd, rkey, access);
        Err(MemoryError::BadKey)
    }
    /// Copies the bytes of a resolved span; `into` is as long.
    fn load(&mut self, span: Span, into: &mut [u8]) -> Result<(), MemoryError>;
    /// Stores `data` at a resolved span (its start); ascending visibility, `last` marks the end of the message.
    fn store(&mut self, span: Span, data: &[u8], last: bool) -> Result<(), MemoryError>;
    /// Runs an atomic at a resolved span of 8 bytes and gives the old value. Misalignment was checked by the transport.
    fn atomic(&mut self, span: Span, op: AtomicOp) -> Result<u64, MemoryError>;
    /// Invalidates a memory window's rkey (SEND with invalidate, local invalidate). Ordinary MRs refuse.
    fn invalidate(&mut self, pd: u32, rkey: u32, qpn: u32) -> Result<(), MemoryError>;
    /// Binds a memory window. A memory without windows refuses.
    fn bind(&mut self, pd: u32, bind: &MwBind, qpn: u32) -> Result<(), MemoryError> {
        let _ = (pd, bind, qpn);
        Err(MemoryError::BadKey)
    }
}

/// The receive of a message for a receive queue that matches tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TagMatch {
    /// A buffer of the tag list, which it left.
    Tagged(RecvWr),
    /// No tag matches: a request of the queue. The message counts as unexpected.
    Unexpected(RecvWr),
}

/// The host of one queue pair, lent for the duration of one call.
pub trait Host: Memory {
    /// Takes the next receive request from the QP's receive queue or SRQ.
    fn pop_recv(&mut self) -> Option<RecvWr>;
    /// XRC targets: from now until the end of the call, or the next choice, receive requests are taken from the shared receive queue
    /// with this number, and completed where it has them completed. Gives its protection domain. `None`: the target's XRC domain has no
    /// such queue (any more); nothing is chosen then, and a receive request that is completed all the same went with its queue.
    fn choose_srq(&mut self, srqn: u32) -> Option<u32> {
        let _ = srqn;
        None
    }
    /// The queue pair's shared receive queue matches tags: what arrives by SEND has a tag matching header.
    fn matches_tags(&self) -> bool {
        false
    }
    /// Takes the receive of a message with this tag (without one: of an unexpected message). `None`: there is neither.
    fn take_tagged(&mut self, tag: Option<u64>) -> Option<TagMatch> {
        let _ = tag;
        self.pop_recv().map(TagMatch::Unexpected)
    }
    /// An unexpected message failed: the program will not learn of it, so it does not count.
    fn forget_unexpected(&mut self) {}
    /// Completes a send request (signalled or in error).
    fn complete_send(&mut self, completion: Completion);
    /// Frees `count` slots of the send queue: called once per request, when it is complete, signalled or not.
    fn release_send(&mut self, count: u32);
    /// Completes a receive request.
    fn complete_recv(&mut self, completion: Completion);
    /// Raises an asynchronous event.
    fn event(&mut self, event: QpEvent);
    /// Counts a dropped packet.
    fn drop_packet(&mut self, reason: Drop);
    /// Counts something.
    fn count(&mut self, what: Count, n: u32);
    /// Bytes that may still be put in flight. A QP that finds too few stops; the host polls it again when some came back.
    fn window(&mut self, window: Window) -> u32;
    /// Puts bytes in flight.
    fn window_take(&mut self, window: Window, bytes: u32);
    /// Gives bytes back.
    fn window_return(&mut self, window: Window, bytes: u32, signal: WindowSignal);
    /// Bytes in flight were lost, and are sent again in their own place: as many stay in flight.
    fn window_lost(&mut self, window: Window, bytes: u32) {
        let _ = (window, bytes);
    }

    /// May the peer of this connected queue pair fetch the payload of large WRITEs from where it is? What it has not fetched when a request
    /// completes in error, or the queue pair is reset, the host takes back.
    fn lends(&mut self) -> bool {
        false
    }

    /// What queue pairs may keep together of packets that come before their turn. By itself each has a budget of its own.
    fn early_budget(&self) -> Arc<EarlyBudget> {
        Arc::default()
    }

    /// As [`window`](Host::window) for requests, where one queue pair sends to many: the window towards the lane of queue pair `qpn`
    /// behind `path` (UC and UD). The host waits for room in it all the same. A host without such windows leaves the three as they
    /// are.
    fn window_towards(&mut self, path: &PathAddr, qpn: u32) -> u32 {
        let _ = (path, qpn);
        u32::MAX
    }
    /// As [`window_take`](Host::window_take).
    fn window_take_towards(&mut self, path: &PathAddr, qpn: u32, bytes: u32) {
        let _ = (path, qpn, bytes);
    }
    /// As [`window_return`](Host::window_return).
    fn window_return_towards(&mut self, path: &PathAddr, qpn: u32, bytes: u32, signal: WindowSignal) {
        let _ = (path, qpn, bytes, signal);
    }
}

/// Where a train's payload comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Checked memory that the program may not change before completion: may be gathered without a copy.
    Gather(SmallVec<[Span; 2]>),
    /// Checked memory that may change at any moment (READ responses): is copied and summed in one pass.
    Copy(Span),
    /// As [`Gather`](Payload::Gather), in one piece, of a train that may be longer than [`MAX_TRAIN_BYTES`](crate::MAX_TRAIN_BYTES): the peer
    /// may fetch all but its last packet itself ([`Host::lends`]).
    Lent(Span),
    /// Bytes copied when posted (inline), by range of the shared buffer.
    Inline(Arc<[u8]>, u32),
}

/// A run of consecutive packets of one message. Packet 0 has `head`; packets between have [`middle`](Train::middle): the BTH of
/// `head` with `body` as opcode, and its XRCETH; the last of several has `tail`. PSNs count up from `head.bth.psn`; PadCnt and AckReq of the
/// headers are final (`body` packets have neither).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Train {
    /// Headers of the first packet.
    pub head: Headers,
    /// Opcode of the packets between first and last.
    pub body: ferroce_wire::Opcode,
    /// Headers of the last packet if there are several.
    pub tail: Option<Headers>,
    /// Number of packets, at least 1.
    pub packets: u32,
    /// Payload bytes of every packet but the last.
    pub mtu: u32,
    /// Payload bytes in all.
    pub len: u32,
    /// The payload.
    pub payload: Payload,
    /// Destination of a UD packet; `None` means the QP's connected path.
    pub path: Option<Arc<PathAddr>>,
    /// For the fault path: which side of the QP it came from.
    pub from: Side,
}

impl Train {
    /// Headers of the packets between first and last, with the PSN of the first.
    pub fn middle(&self) -> Headers {
        let bth = Bth { opcode: self.body, ack_req: false, solicited: false, pad: 0, ..self.head.bth };
        Headers { xrc_srqn: self.head.xrc_srqn, ..Headers::new(bth) }
    }

    /// It is no longer than the transport promises.
    pub fn is_within_limits(&self) -> bool {
        let (packets, bytes) = match self.payload {
            Payload::Lent(_) => (crate::MAX_LENT_PACKETS, crate::MAX_LENT_BYTES),
            _ => (crate::MAX_TRAIN_PACKETS, crate::MAX_TRAIN_BYTES),
        };
        (1..=packets).contains(&self.packets) && self.len <= bytes
    }

    /// Has the last packet ask for an ACK, or not.
    pub(crate) fn set_ack_req(&mut self, ack_req: bool) {
        self.tail.as_mut().unwrap_or(&mut self.head).bth.ack_req = ack_req;
    }
}

/// Which of a queue pair's two machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Side {
    Requester,
    Responder,
    /// The responder, answering a READ that came again.
    ResponderAgain,
}

/// A packet that passed the ICRC, for a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Parsed headers.
    pub headers: &'a Headers,
    /// Payload without pad and ICRC.
    pub payload: &'a [u8],
    /// IP and UDP facts.
    pub net: &'a ferroce_wire::NetHeader,
}
