//! A seeded simulator over the production transport and wire formats.
//!
//! A seed decides everything: nodes, network, queue pairs, what their programs do and what goes wrong. Time is virtual and jumps to
//! the next event, so that minutes take milliseconds; the same seed gives the same run, event for event. While it runs, every
//! store, completion, event and window byte is checked against the book that is kept of every request ([`run()`] says what a
//! complaint looks like); in the end every request must be over and every byte of memory accounted for.
//!
//! Frames are real ones: built by `ferroce-wire` with their ICRC, damaged as bytes, checked and parsed again.

mod coverage;
mod forge;
mod frame;
pub mod goodput;
mod host;
mod log;
mod memory;
mod network;
mod oracle;
mod pattern;
mod plan;
mod program;
mod random;
mod requests;
mod run;
mod setup;
mod verdict;
mod windows;
mod world;

pub use coverage::{Coverage, Met};
pub use log::Sink;
pub use run::{Failure, Report, run, run_traced};
