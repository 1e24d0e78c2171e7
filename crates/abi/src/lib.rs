//! The C side: structures and numbers of `verbs.h` as of rdma-core 65, x86-64 and AArch64 Linux.
//!
//! Names are the header's. Sizes and offsets are checked at compile time in `layout.rs`; programs built against older headers
//! see prefixes of these structures. `cm.rs` is our own: what `librdmacm.so.1` and `libibverbs.so.1` tell each other.
//!
//! Only declarations: both C libraries have them, and neither has anything of the other's.

// The names of verbs.h stay what they are in C; its fields need no second documentation.
#![allow(non_camel_case_types, non_snake_case, missing_docs)]

mod attr;
pub mod cm;
pub mod consts;
mod context;
mod domain;
mod flow;
mod kern;
mod layout;
mod object;
mod wq;
mod wr;

pub use attr::*;
pub use context::*;
pub use domain::*;
pub use flow::*;
pub use kern::*;
pub use object::*;
pub use wq::*;
pub use wr::*;
