//! The InfiniBand transport (IBA volume 1, chapter 9) as sans-IO state machines.
//!
//! Nothing here knows a clock, a socket, a thread or `unsafe`. Time is a number of nanoseconds passed in; packets, completions and
//! memory go through the [`Host`] trait. The entry is [`Qp`].

pub mod cc;
pub mod host;
pub mod verbs;

mod decode;
mod qp;
mod qp_state;
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
pub use qp::Qp;
pub use qp_state::{MAX_RD_ATOMIC, ModifyError};
pub use timer::Nanos;
pub use verbs::*;

/// Most payload bytes of a train. With headers a train stays below the 65,507 bytes that one UDP send takes.
pub const MAX_TRAIN_BYTES: u32 = 61_440;
/// Most packets of a train: kernels cut at most 64 segments from one send.
pub const MAX_TRAIN_PACKETS: u32 = 60;
/// Most bytes that one READ request asks for: one train. A longer READ is sent as several requests, so that the requester governs
/// the flow of responses.
pub const READ_CHUNK: u32 = MAX_TRAIN_BYTES;
