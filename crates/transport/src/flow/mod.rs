//! Flow control of UC and UD between two Ferroce ends.
//!
//! UC and UD have no acknowledgement, and on the lossless fabrics that they are made for they need none: the fabric holds the
//! sender back. Over UDP nobody does, and a burst overflows the peer's receive buffer (by default 425,984 bytes of bookkept
//! memory). So two Ferroce ends tell each other what was taken from the buffer, and the sender keeps a window, the same that RC
//! keeps towards that lane.
//!
//! - **Asking**: the last packet of a train now and then has AckReq set ([`ASK_EVERY`] bytes of charge since the last time). Where
//!   less than that is sent nothing is asked, charged or timed.
//! - **Answering**: a receiver that sees AckReq says so with a [`Flow`] packet that has the PSN of the packet
//!   that asked. An answer covers all that was sent to it before: what did not arrive is not in the buffer either.
//! - **Strangers** (kernel rxe, hardware) ignore AckReq on UC and UD, and get no packet of ours. Who answers nothing for
//!   [`PROBE`] is one, and nothing holds the sender back any more; now and then ([`PROBE_AGAIN`]) AckReq asks anew.
//! - **Silence** of one who answered before is the loss of a question or an answer, or a process that is not scheduled. It is
//!   asked by packets of our own ([`QUESTION_FIRST`], then twice as long, [`QUESTIONS_MAX`] times: 635 ms in all). They take no
//!   room worth mentioning in a full buffer, whereas data sent on a guess would be lost just when the machine is busiest. Then it
//!   counts as gone, like a stranger: nothing blocks for good.
//! - A request is complete when its packets were handed to the link, as ever.
//!
//! Answers are hostile input: one that does not name the PSN of an open question to just this sender is dropped and counted.

mod receiver;
mod sender;

pub(crate) use receiver::Answers;
pub(crate) use sender::{Flows, Size, To};

use std::net::IpAddr;
use std::sync::Arc;

use ferroce_wire::{Bth, Flow, Headers, Opcode, Psn};

use crate::host::{Payload, Side, Train};
use crate::timer::{MS, Nanos};
use crate::verbs::PathAddr;

/// Charged bytes from one question to the next. A window of 128 KiB has four questions in it, so that one lost does not stop it; and
/// no more than one small packet in 29 of a ping-pong is answered.
const ASK_EVERY: u32 = 32 * 1024;
/// How long the first answer is waited for. A stranger costs one pause of so long, if more than a window is sent to it; a Ferroce
/// end on a machine with ten runnable threads a core may need tens of milliseconds.
const PROBE: Nanos = 50 * MS;
/// From one question to a stranger to the next.
const PROBE_AGAIN: Nanos = 100 * MS;
/// From the last answer until the first question by a packet of our own.
const QUESTION_FIRST: Nanos = 5 * MS;
/// Questions without an answer until the peer counts as gone.
const QUESTIONS_MAX: u32 = 6;

/// Who is at the other end of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    addr: IpAddr,
    qpn: u32,
}

impl Key {
    pub(crate) fn new(addr: IpAddr, qpn: u32) -> Key {
        Key { addr: addr.to_canonical(), qpn }
    }

    /// Multicast has many receivers, and QPs 0 and 1 speak management datagrams: on these AckReq has been seen from rxe, which
    /// means nothing by it.
    fn has_flow(self) -> bool {
        !self.addr.is_multicast() && !is_management(self.qpn)
    }
}

fn is_management(qpn: u32) -> bool {
    qpn <= 1
}

/// A train of one packet of our own.
fn packet(dest_qpn: u32, psn: Psn, flow: &Flow, path: Option<&Arc<PathAddr>>) -> Train {
    let bytes = flow.bytes();
    Train {
        head: Headers::new(Bth::new(Opcode::FERROCE_FLOW, dest_qpn, psn)),
        body: Opcode::FERROCE_FLOW,
        tail: None,
        packets: 1,
        mtu: bytes.len() as u32,
        len: bytes.len() as u32,
        payload: Payload::Inline(Arc::from(bytes), 0),
        path: path.cloned(),
        from: Side::Responder,
    }
}
