//! `librdmacm.so.1` on Ferroce: ids, event channels and helpers over the connection manager that `libibverbs.so.1` reaches.
//!
//! The library holds what a program sees (ids, events, which queue pair belongs to an id) and nothing of the engine: it calls verbs and
//! the private functions `ferroce_cm_*` of the one `libibverbs.so.1` of the process (`crates/abi/src/cm.rs`).
//!
//! | file | part |
//! |---|---|
//! | `abi` | the structures of `rdma_cma.h`, their layout checked at compile time |
//! | `verbs` | what `libibverbs.so.1` gives |
//! | `entry` | the boundary: panics and refusals |
//! | `channel`, `event` | event channels; what becomes of an event of the service |
//! | `id`, `addr`, `qp`, `connect` | ids: life, addresses, queue pairs, connections |
//! | `endpoint`, `addrinfo` | the helpers on top: `rdma_create_ep`, `rdma_getaddrinfo` |
//! | `fork` | what a forked child finds |
//! | `recover` | connections survive a crash of the service |
//! | `rsocket` | stream sockets on top |
//! | `multicast` | groups of datagram ids |
//!
//! `symbols.in` beside this source lists every exported symbol with its version.

// This crate is a C boundary: raw pointers come in with every call. Each block states its proof.
#![allow(unsafe_code)]
// The names of rdma_cma.h stay what they are in C; its fields need no second documentation.
#![allow(non_camel_case_types)]

#[allow(missing_docs)]
pub mod abi;
pub mod addr;
pub mod addrinfo;
pub mod channel;
pub mod connect;
pub mod device;
pub mod endpoint;
pub mod entry;
pub mod event;
mod fork;
pub mod id;
pub mod multicast;
pub mod qp;
pub mod recover;
pub mod rsocket;
mod verbs;
mod why;
