//! `libibverbs.so.1` on Ferroce: a thin C skin over [`ferroce`].
//!
//! The library has three parts.
//! - [`abi`] (`crates/abi`): the structures and numbers of `verbs.h`, their layout checked at compile time. Programs read and write these structures
//!   themselves, since a third of verbs is inline functions that never enter the library.
//! - [`entry`]: the boundary. Every function that C can call is made by one of two macros, which stop panics and turn refusals into
//!   the (mixed) conventions of verbs.
//! - the verbs, a file for each object. A C object is a Rust box that starts with the C structure and owns an `Arc` of the
//!   `ferroce` object behind it; it holds no state of its own beyond what inline functions read.
//!
//! `symbols.in` beside this source lists every exported symbol with its version. The shared library is linked from this crate's static
//! library (`cargo xtask`), because rustc itself cannot give versions to symbols.

// This crate is a C boundary: raw pointers come in with every call. Each block states its proof.
#![allow(unsafe_code)]
// The names of verbs.h stay what they are in C; its fields need no second documentation.
#![allow(non_camel_case_types, non_snake_case)]

pub use ferroce_abi as abi;

pub mod entry;

pub mod ah;
pub mod async_event;
mod cancel;
pub mod channel;
pub mod cm;
pub mod context;
mod convert;
mod counters;
pub mod cq;
mod cq_ex;
pub mod device;
pub mod dm;
pub mod domain;
mod events;
mod flow;
mod handle;
pub mod kern;
mod logging;
pub mod mr;
pub mod mw;
pub mod pd;
mod post;
pub mod private;
pub mod qp;
mod qp_ex;
pub mod query;
pub mod rates;
mod refusal;
mod registry;
mod slots;
pub mod srq;
mod start;
pub mod strings;
pub mod sysfs;
mod tags;
pub mod unsupported;
mod wq;
mod xrc;
