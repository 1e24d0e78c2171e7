#![forbid(unsafe_code)]
//! Readers for recorded packets and dialogues, what builds parts of the workspace, and names, ports, folders and network
//! namespaces that nobody else has; for tests only, and below every other crate.
//!
//! The recordings lie in `tests/vectors` of the repository, see the README there. [`Recording::all`] reads them.

mod build;
mod folder;
mod frame;
mod free;
mod namespace;
mod pcap;
mod recording;
mod script;

pub use build::*;
pub use folder::*;
pub use frame::*;
pub use free::*;
pub use namespace::*;
pub use pcap::*;
pub use recording::*;
pub use script::*;

/// Why a file could not be understood.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {what}")]
pub struct Malformed {
    /// File, and line or record in it.
    pub place: String,
    /// What is wrong there.
    pub what: String,
}

impl Malformed {
    fn new(place: impl ToString, what: impl ToString) -> Malformed {
        Malformed { place: place.to_string(), what: what.to_string() }
    }
}
