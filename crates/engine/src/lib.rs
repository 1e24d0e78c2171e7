//! The soft card: [`ferroce_transport`] over [`ferroce_link`], with the only real clock and the only threads.
//!
//! A [`Card`] is what a process has instead of hardware. Its [`Lane`]s are what hardware queues are to a card: each owns a link, a
//! range of queue pair numbers, timers and congestion windows, behind one lock. Whoever holds the lock runs the card for a moment:
//! a program that posts or polls, or the lane's progress thread when the program does neither.

mod attendance;
mod card;
mod clock;
mod counters;
mod gate;
mod groups;
mod host;
mod inspect;
mod lane;
pub mod packets;
mod progress;
mod queue_pair;
mod raw;
mod relay;
mod rings;
mod run;
mod sleeper;
mod slots;
mod spin;
mod sync;
mod timers;
mod trust;
mod windows;

pub use attendance::Attendance;
pub use card::Card;
pub use clock::now as clock_now;
pub use counters::{CounterSnapshot, Counters, Strays};
pub use groups::Group;
pub use inspect::{Carrier, QpPage, QpView};
pub use lane::{LANE_SHIFT, Lane, SLOTS_PER_LANE};
pub use progress::spawn_quiet;
pub use queue_pair::{Listener, QueueCaps, QueuePair, QueuePairInit, RecvSource};
pub use relay::{Relay, Relayed, RingCall, RingWord};

/// Makes what the card keeps for the life of the process: the origin of its clock and the tables of its link. Otherwise made at first
/// use, which in a forked child may never end.
pub fn prepare() {
    clock::now();
    ferroce_link::prepare();
}
