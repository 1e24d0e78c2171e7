#![forbid(unsafe_code)]
//! The protocol of rsockets (rsocket(7)), version 1, as rdma-core's `librdmacm` speaks it: a byte stream over an RC queue pair, and
//! datagrams over UD ones.
//!
//! Nothing here knows a clock, a socket, memory or `unsafe`: immediates and completions come in, work requests and places in buffers
//! come out. The entry is [`Stream`], whose documentation says how it is driven.
//!
//! # How a stream works
//!
//! Each end has a receive buffer of two halves, and a small table that the peer writes to. Data is written straight into the peer's
//! receive buffer, in order, by RDMA WRITE with an immediate that tells its length. A sender may write where the *target* says: address,
//! key and length of a half. The first target comes with the connection ([`ConnData`] in the private data of REQ and REP); each further
//! one is written by the receiver into the sender's table, two entries in turn, whenever half of the buffer has been read. The same
//! message grants *credits*, up to which message (of data or of a mapping) the sender may go.
//!
//! | module | part |
//! |---|---|
//! | `conn` | private data of the handshake |
//! | `imm` | immediates |
//! | `stream` | [`Stream`]: both directions of a connection |
//! | `ring` | the send buffer |
//! | `receive` | the receive buffer, credits and targets for the peer |
//! | `datagram` | headers of datagrams |
//! | `iomap` | memory that one end lets the other write to (`riomap`, `riowrite`) |

mod conn;
mod datagram;
mod imm;
mod iomap;
mod receive;
mod ring;
mod stream;

pub use conn::{CONN_DATA_LEN, ConnData, ConnError, SGE_LEN, Sge, TARGETS};
pub use datagram::{DATAGRAM_HEADER_MAX, DATAGRAM_MAX, DataHeader, HeaderBytes, Introduction, Purpose};
pub use imm::{Control, Message};
pub use iomap::{IOMAP_LEN, Iomap, from_scaled, to_scaled};
pub use receive::Span;
pub use stream::{
    CONTROL_MAX, Half, LOW_WATER, Limits, Phase, Post, QUEUE_MAX, QUEUE_MIN, Source, Stream, TRANSFER_MAX,
    TRANSFER_MIN, Violation,
};
