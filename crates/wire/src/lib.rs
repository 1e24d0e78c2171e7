#![no_std]
//! RoCEv2 packet layouts, opcodes, PSN arithmetic and ICRC.

mod headers;
mod net;
mod opcode;
mod psn;

pub use headers::*;
pub use net::*;
pub use opcode::*;
pub use psn::*;
