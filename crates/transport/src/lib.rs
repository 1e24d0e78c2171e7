//! The InfiniBand transport (IBA volume 1, chapter 9) as sans-IO state machines.
//!
//! Nothing here knows a clock, a socket, a thread or `unsafe`. Time is a number of nanoseconds passed in; packets, completions and
//! memory go through the [`Host`] trait. The entry is [`Qp`], whose documentation says how a host drives it.
//!
//! | module | part |
//! |---|---|
//! | `qp`, `qp_state` | the queue pair: admission of packets, states and their table, flushing |
//! | `requester` | RC, XRC initiators: requests out, answers in, what is sent again |
//! | `responder` | RC, XRC targets: requests in, answers out |
//! | `send_once`, `uc`, `ud` | the sender of UC and UD, and their receivers |
//! | `raw` | RAW_PACKET: frames that go out and come in as they are |
//! | `flow` | UC and UD between two Ferroce ends: who sends waits for the receive buffer of the other |
//! | `wqe`, `receive` | a send request and its packets; a receive request that is being filled |
//! | `recovery`, `timer`, [`cc`] | when to send again and when to give up; timers; windows |
//!
//! # Where the specification leaves a choice, or others do otherwise
//!
//! - **A silent peer** is asked what it has by a packet that it acknowledged before, which does nothing: the answer acknowledges what
//!   arrived, or shows that it was lost. What a peer merely has not looked at is sent again only after the ACK timeout.
//! - **Giving up**: the verbs timeout and retry count say when. It is the longest that the specification allows, four timeouts for
//!   each of `retry_cnt` + 1 attempts, and no less than a second in all. retry_cnt 7 is seven, not endless (kernel rxe takes it as
//!   endless); rnr_retry 7 is endless.
//! - **After an RNR NAK** packets behind the refused one are dropped silently (kernel rxe sends a sequence NAK as well).
//! - **A sequence NAK** carries the PSN expected when it leaves, not when the gap was seen, and does not leave if the gap closed before.
//! - **What comes behind a gap** is kept and executed in its turn, and a gap behind the one that closed is told at once (kernel rxe drops
//!   it, and tells when more comes). A requester sends only the missing packet again to a peer that does the same.
//! - **Where a response goes** is looked at before the READ or atomic is sent, so that an atomic that must fail here is not executed
//!   there (kernel rxe looks when the response comes).
//! - **A repeated READ** is answered as the new request that it is: FIRST or ONLY come first (kernel rxe answers with the opcodes of
//!   the first time; the requester takes both). It must lie within a READ on record.
//! - **A repeated READ whose memory is gone** draws a NAK, but does not end the connection: who has the response already ignores it.
//! - **More READs or atomics than agreed** are served up to a bound, and lost above it.
//! - **A SEND too long for its receive** is a local length error at the receiver and an invalid request at the sender, as
//!   hardware has it (kernel rxe: local QP operation error and remote operational error).
//! - **Memory that is gone under a good key** is a remote operational error; a bad key, bounds or rights are a remote access error.
//! - **SEND with invalidate that cannot** ends in a remote access error at the sender and a memory management error
//!   (`IBV_WC_MW_BIND_ERR`) at the receiver.
//! - **UC**: a broken message is forgotten and its receive used for the next one. Writes that are refused are dropped; a message too
//!   long for its receive is the receiver's error.
//! - **UD**: a datagram above the MTU is a local length error; one that finds no receive, or too small a one, is dropped, and the
//!   receive stays for the next. So does one that finds a frame too long for it (RAW_PACKET; some cards end the queue pair).
//! - **FLUSH and ATOMIC WRITE** (IBA annex A19) are answered by a READ response without bytes, as kernel rxe has it, and count among READs
//!   and atomics. A key that grants no persistence refuses a FLUSH to it.

pub mod cc;
pub mod host;
pub mod verbs;

mod decode;
mod flow;
mod pacer;
mod qp;
mod qp_state;
mod raw;
mod receive;
mod recovery;
mod requester;
mod responder;
mod send_once;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod timer;
mod uc;
mod ud;
mod wqe;

pub use host::*;
pub use pacer::{RATE_LIMIT_MAX, RATE_LIMIT_MIN};
pub use qp::Qp;
pub use qp_state::{MAX_RD_ATOMIC, ModifyError};
pub use raw::{FrameFate, MAX_FRAME, MIN_FRAME};
pub use responder::{EarlyBudget, MAX_RNDV_HDR};
pub use timer::Nanos;
pub use verbs::*;

/// Most payload bytes of a train. With headers a train stays below the 65,507 bytes that one UDP send takes.
pub const MAX_TRAIN_BYTES: u32 = 61_440;
/// Most packets of a train: kernels cut at most 64 segments from one send.
pub const MAX_TRAIN_PACKETS: u32 = 60;
/// The largest train whose payload the peer fetches itself ([`Payload::Lent`]): a call of the system for much of it, and yet not so long that others wait.
pub const MAX_LENT_BYTES: u32 = 256 << 10;
/// Packets of such a train.
pub const MAX_LENT_PACKETS: u32 = 256;
/// Most bytes that one READ request asks for: one train. A longer READ is sent as several requests, so that the requester governs
/// the flow of responses.
pub const READ_CHUNK: u32 = MAX_TRAIN_BYTES;
