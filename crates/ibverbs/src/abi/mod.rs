//! The C side: structures and numbers of `verbs.h` as of rdma-core 65, x86-64 and AArch64 Linux.
//!
//! Names are the header's. Sizes and offsets are checked at compile time in `layout.rs`; programs built against older headers
//! see prefixes of these structures.

mod attr;
pub mod consts;
mod context;
mod domain;
mod kern;
mod layout;
mod object;
mod wr;

pub use attr::*;
pub use context::*;
pub use domain::*;
pub use kern::*;
pub use object::*;
pub use wr::*;
