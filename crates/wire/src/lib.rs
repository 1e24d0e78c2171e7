#![no_std]
#![forbid(unsafe_code)]
//! RoCEv2 packet layouts, opcodes, PSN arithmetic and ICRC.
//!
//! A RoCEv2 packet is a UDP datagram to port 4791: BTH, the extended headers that its opcode asks for, payload, 0 to 3 pad bytes
//! and the ICRC. [`Headers::parse`] and [`Headers::emit`] deal with the headers, [`icrc`] with the checksum, [`mad`] with the
//! datagrams of connection management. Nothing here allocates, knows an operating system, or panics on any bytes.

mod display;
mod emit;
mod flow;
mod headers;
pub mod icrc;
pub mod mad;
mod net;
mod opcode;
mod parse;
mod psn;
mod tm;

pub use flow::*;
pub use headers::*;
pub use net::*;
pub use opcode::*;
pub use parse::*;
pub use psn::*;
pub use tm::*;

/// The UDP destination port of RoCEv2 (IBA annex A17).
pub const UDP_PORT: u16 = 4791;

/// Bits of a QP number below the number of its lane. (Ferroce's, not the standard's: to peers a QP number is just that.)
pub const LANE_SHIFT: u32 = 14;

/// Bytes of the ICRC behind payload and pad.
pub const ICRC_LEN: usize = 4;
