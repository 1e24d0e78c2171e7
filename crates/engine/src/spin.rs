//! Spinning before sleeping: to wake a sleeping core costs more than a short wait.
//!
//! Whoever waits often and shortly spins; whoever waits long sleeps at once. A thread that spins offers its core at every look; when
//! somebody takes it for long, spinning only delays us, and the kernel wakes a sleeper sooner than it runs one who yielded.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ferroce_transport::Nanos;

use crate::clock;

/// Longest spin. Two ends that both sleep answer each other in about half of it.
const SPIN_MAX_NS: Nanos = 100_000;
/// A core that was offered and came back only after so long is wanted by somebody who computes.
const CROWDED_NS: Nanos = 30_000;
/// How long no spinning is tried on such a core: at first, and when it was found crowded again and again. Each try costs a slice of
/// the other thread's.
const PAUSE_NS: Nanos = 20_000_000;
const PAUSE_MAX_NS: Nanos = 160_000_000;

/// What one waiter learned about its waits.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    /// The next wait will probably be short.
    hopeful: AtomicBool,
    /// The core is crowded until then.
    crowded_until: AtomicU64,
    /// How long it was taken for crowded the last time; 0: it was not when it was last offered.
    paused: AtomicU64,
}

impl Spin {
    /// Looks again and again until there is something, as long as that is worth while.
    pub(crate) fn wait(&self, mut look: impl FnMut() -> bool) -> bool {
        if !self.hopeful.load(Ordering::Relaxed) {
            return false;
        }
        let start = clock::now();
        if self.is_crowded(start) {
            return false;
        }
        while clock::now() - start < SPIN_MAX_NS {
            if look() {
                return true;
            }
            if !self.offer_core() {
                return look();
            }
        }
        false
    }

    /// Lets others have the core for a moment. False: it is crowded, whoever waits had better sleep.
    pub(crate) fn offer_core(&self) -> bool {
        let offered = clock::now();
        if self.is_crowded(offered) {
            return false;
        }
        std::thread::yield_now();
        let back = clock::now();
        let crowded = back - offered > CROWDED_NS;
        if crowded {
            self.found_crowded(back);
        } else if self.paused.load(Ordering::Relaxed) != 0 {
            self.paused.store(0, Ordering::Relaxed);
        }
        !crowded
    }

    /// No more tries for a while.
    pub(crate) fn found_crowded(&self, now: Nanos) {
        let pause = (self.paused.load(Ordering::Relaxed) * 2).clamp(PAUSE_NS, PAUSE_MAX_NS);
        self.paused.store(pause, Ordering::Relaxed);
        self.crowded_until.store(now + pause, Ordering::Relaxed);
    }

    fn is_crowded(&self, now: Nanos) -> bool {
        now < self.crowded_until.load(Ordering::Relaxed)
    }

    /// A wait, spun or slept, took so long.
    pub(crate) fn learn(&self, waited: Nanos) {
        self.hopeful.store(waited < SPIN_MAX_NS, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spins_only_after_a_short_wait() {
        let spin = Spin::default();
        assert!(!spin.wait(|| panic!("nothing gives hope yet")));
        spin.learn(SPIN_MAX_NS - 1);
        let mut looks = 0;
        assert!(spin.wait(|| {
            looks += 1;
            true
        }));
        assert_eq!(looks, 1);
        spin.learn(SPIN_MAX_NS);
        assert!(!spin.wait(|| panic!("the last wait was long")));
    }

    #[test]
    fn ends_by_itself_and_spares_a_crowded_core() {
        let spin = Spin::default();
        spin.learn(0);
        assert!(!spin.wait(|| false));
        spin.crowded_until.store(clock::now() + 60_000_000_000, Ordering::Relaxed);
        assert!(!spin.wait(|| panic!("others want the core")));
    }

    #[test]
    fn the_longer_a_core_is_crowded_the_rarer_it_is_tried() {
        let spin = Spin::default();
        let mut now = 1;
        for pause in [PAUSE_NS, 2 * PAUSE_NS, 4 * PAUSE_NS, PAUSE_MAX_NS, PAUSE_MAX_NS] {
            spin.found_crowded(now);
            assert!(spin.is_crowded(now + pause - 1) && !spin.is_crowded(now + pause));
            now += pause;
        }
    }
}
