//! Hostile input: packets that are nearly right, operations in any order, programs that misbehave.
//!
//! [`forge`] makes packets from what an attacker who sees everything knows; [`machine`] lets them loose on one queue pair with
//! the simulated host, from a seed or from the bytes of a fuzzer ([`source`]).

pub mod arena;
pub mod campaign;
pub mod check;
pub mod forge;
pub mod legit;
pub mod live;
pub mod machine;
pub mod recorded;
pub mod socket;
pub mod source;
