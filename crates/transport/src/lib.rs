//! The InfiniBand transport (IBA volume 1, chapter 9) as sans-IO state machines.
//!
//! Nothing here knows a clock, a socket, a thread or `unsafe`. Time is a number of nanoseconds passed in; packets, completions and
//! memory go through the [`Host`] trait.

pub mod host;
pub mod verbs;

pub use host::*;
pub use verbs::*;
