//! A simulated host and an in-memory pair of queue pairs in virtual time: what the tests of this crate and the seeded simulator
//! stand on. Nothing here runs on a clock; time jumps to the next arrival or timeout.

mod host;
mod memory;
mod pair;

pub use host::{SimHost, SimSrq};
pub use memory::{Region, SimMemory};
pub use pair::{End, Fate, Pair, SRQN, Seen, Setup, Who};
pub use train::{SimPacket, explode};

mod train;
