//! The RC responder: executes request packets in PSN order, and answers them (IBA 9.7.4, 9.7.5).
//!
//! `request` decides what a packet means and does it; `early` keeps those that come before their turn, and `gap` is what a gap means;
//! `reply` sends the answers. Between them is one queue, so that answers leave in the order of the requests.

mod early;
mod gap;
mod reply;
mod request;
mod tags;

use std::collections::VecDeque;

use ferroce_wire::{Psn, Syndrome};

use crate::host::Host;
use crate::qp::{Conn, Upset};
use crate::receive::Receive;
use crate::verbs::{QpAttr, QpEvent};
use crate::wqe::Failure;

pub use early::EarlyBudget;
use early::EarlyPackets;
use gap::Gap;
pub use tags::MAX_RNDV_HDR;
pub(crate) use tags::Rendezvous;

/// READs and atomics whose answers may wait, and whose results are kept for duplicates, for each one agreed on: requesters that
/// know of no limit (kernel rxe) pass it.
const DEPTH_TOLERANCE: usize = 4;
/// The same at least.
const DEPTH_MIN: usize = 16;

/// What a queue pair keeps of READs and atomics, when it has served as many as it may: nothing before it has served one, and less than
/// 64 KiB ever.
const _: () = {
    let depth = crate::MAX_RD_ATOMIC as usize * DEPTH_TOLERANCE;
    let answers = (depth + reply::REPLIES_MAX) * size_of::<Reply>();
    assert!(depth * size_of::<Saved>() + answers < 64 << 10);
};

/// The message that is arriving.
#[derive(Debug)]
enum Message {
    None,
    Send(Receive),
    Write(Write),
}

/// An RDMA WRITE that is arriving.
#[derive(Clone, Copy, Debug)]
struct Write {
    va: u64,
    rkey: u32,
    len: u32,
    done: u32,
}

/// An answer that waits to be sent.
#[derive(Clone, Copy, Debug)]
enum Reply {
    Ack {
        psn: Psn,
        msn: u32,
    },
    Nak {
        psn: Psn,
        msn: u32,
        syndrome: Syndrome,
    },
    Atomic {
        psn: Psn,
        msn: u32,
        value: u64,
    },
    /// An ATOMIC WRITE or FLUSH was done: a READ response without bytes (IBA annex A19).
    Placed {
        psn: Psn,
        msn: u32,
    },
    Read(ReadReply),
}

impl Reply {
    fn is_sequence_nak(&self) -> bool {
        matches!(self, Reply::Nak { syndrome: Syndrome::NAK_SEQUENCE, .. })
    }
}

/// What is left of a READ's answer.
#[derive(Clone, Copy, Debug)]
struct ReadReply {
    psn: Psn,
    msn: u32,
    pd: u32,
    va: u64,
    rkey: u32,
    len: u32,
    /// Nothing of it was sent yet.
    fresh: bool,
    /// The request came again.
    again: bool,
}

/// A READ, atomic, ATOMIC WRITE or FLUSH that was executed, for when it comes again.
#[derive(Clone, Copy, Debug)]
enum Saved {
    Read { psn: Psn, packets: u32, pd: u32, va: u64, rkey: u32, len: u32 },
    Atomic { psn: Psn, value: u64 },
    Placed { psn: Psn },
}

/// Responder state of one RC queue pair, or of an XRC target.
#[derive(Debug)]
pub(crate) struct Responder {
    /// PSN expected next.
    expected: Psn,
    /// Newest SEND or WRITE PSN received in order: what a duplicate is acknowledged with. READs and atomics do not move it: an ACK
    /// must not claim that their responses arrived.
    acked: Psn,
    /// Messages completed, modulo 2^24.
    msn: u32,
    /// A NAK tells the requester where to go on; no other until it does.
    nak_sent: bool,
    /// That NAK is a sequence NAK and still waits among `replies`: it tells what is expected when it leaves.
    nak_queued: bool,
    gap: Gap,
    /// Packets behind a gap, if there are any.
    early: Option<Box<EarlyPackets>>,
    message: Message,
    /// XRC: the shared receive queue that it is for.
    srqn: u32,
    replies: VecDeque<Reply>,
    /// READs and atomics among `replies`.
    replies_owed: usize,
    saved: VecDeque<Saved>,
    /// Rendezvous requests that matched: the requester reads their data.
    rendezvous: Vec<Rendezvous>,
    /// A fatal NAK is the last word: what is queued up to it still goes out in ERR.
    dying: bool,
}

impl Responder {
    pub(crate) fn new() -> Responder {
        Responder {
            expected: Psn::new(0),
            acked: Psn::new(0),
            msn: 0,
            nak_sent: false,
            nak_queued: false,
            gap: Gap::default(),
            early: None,
            message: Message::None,
            srqn: 0,
            replies: VecDeque::new(),
            replies_owed: 0,
            saved: VecDeque::new(),
            rendezvous: Vec::new(),
            dying: false,
        }
    }

    /// Sets the first PSN: the queue pair goes to RTR.
    pub(crate) fn start(&mut self, psn: Psn) {
        self.expected = psn;
        self.acked = psn.sub(1);
    }

    /// The PSN expected next.
    pub(crate) fn expected_psn(&self) -> Psn {
        self.expected
    }

    /// The queue pair went to ERR: takes the receive request that a message was being put into. Answers are dropped, unless
    /// they end with a fatal NAK.
    pub(crate) fn flush(&mut self, conn: Conn<'_>, host: &mut impl Host) {
        if let Message::Send(receive) = std::mem::replace(&mut self.message, Message::None) {
            if conn.init.qp_type.is_xrc() {
                host.choose_srq(self.srqn);
            }
            receive.flush(conn.init, conn.attr.dest_qpn, host);
        }
        self.saved = VecDeque::new();
        self.early = None;
        if !self.dying {
            self.replies = VecDeque::new();
            self.replies_owed = 0;
            self.nak_queued = false;
        }
    }

    /// Ends with a NAK: the receive request that is in use (if any) fails, an event tells if there is none, the queue pair goes
    /// to ERR (IBA 9.9.3, 11.6.3.2).
    fn fatal(&mut self, fault: Fault, conn: Conn<'_>, host: &mut impl Host) -> Upset {
        let Fault { psn, syndrome, failure, event } = fault;
        self.queue_nak(psn, syndrome, host);
        self.dying = true;
        if let Some((receive, failure)) = failure {
            receive.fail(conn.init, conn.attr.dest_qpn, failure, host);
        }
        if let Some(event) = event {
            host.event(event);
        }
        Upset::Err
    }

    /// The most READs and atomics that may wait for their answers. The specification lets a responder refuse what is above the number
    /// agreed on with a fatal NAK; kernel rxe serves it. We serve it up to this bound, and above it lose the packet: whoever
    /// keeps to the agreement but sends again too early must not be punished for it.
    fn depth(attr: &QpAttr) -> usize {
        (usize::from(attr.max_dest_rd_atomic) * DEPTH_TOLERANCE).max(DEPTH_MIN)
    }

    /// As after `msn` messages: nobody waits for 2^24 of them.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn start_msn(&mut self, msn: u32) {
        assert!(msn < 1 << 24, "it has 24 bits");
        self.msn = msn;
    }

    /// Drops what comes before its turn, as kernel rxe and cards do, or keeps it.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn go_back_n(&mut self, on: bool) {
        self.gap.keeps_none = on;
    }

    /// What holds between inputs, whatever comes.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn assert_invariants(&self, attr: &QpAttr) {
        let owed = self.replies.iter().filter(|reply| !matches!(reply, Reply::Ack { .. } | Reply::Nak { .. })).count();
        assert_eq!(owed, self.replies_owed);
        assert!(self.replies_owed <= Self::depth(attr) && self.saved.len() <= Self::depth(attr));
        assert!(self.replies.len() - self.replies_owed <= reply::REPLIES_MAX + 1, "{} answers", self.replies.len());
        let naks = self.replies.iter().filter(|reply| reply.is_sequence_nak());
        assert_eq!(naks.count(), usize::from(self.nak_queued));
        assert!(self.nak_sent || !self.nak_queued);
        if let Some(early) = &self.early {
            early.assert_invariants();
        }
    }

    fn save(&mut self, saved: Saved, attr: &QpAttr) {
        if self.saved.len() >= Self::depth(attr) {
            self.saved.pop_front();
        }
        self.saved.push_back(saved);
    }
}

/// What a responder error brings with it.
struct Fault {
    psn: Psn,
    syndrome: Syndrome,
    failure: Option<(Receive, Failure)>,
    event: Option<QpEvent>,
}

impl Fault {
    /// A request that no receive request is used for.
    fn of_request(psn: Psn, syndrome: Syndrome) -> Fault {
        let event = match syndrome {
            Syndrome::NAK_REMOTE_ACCESS => Some(QpEvent::AccessErr),
            Syndrome::NAK_INVALID_REQUEST => Some(QpEvent::ReqErr),
            _ => Some(QpEvent::Fatal),
        };
        Fault { psn, syndrome, failure: None, event }
    }

    /// A message that a receive request is used for: its completion tells.
    fn of_receive(psn: Psn, syndrome: Syndrome, receive: Receive, failure: Failure) -> Fault {
        Fault { psn, syndrome, failure: Some((receive, failure)), event: None }
    }
}
