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
/// How long no spinning is tried on such a core.
const CROWDED_PAUSE_NS: Nanos = 20_000_000;

/// What one waiter learned about its waits.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    /// The next wait will probably be short.
    hopeful: AtomicBool,
    /// The core is crowded until then.
    crowded_until: AtomicU64,
}

impl Spin {
    /// Looks again and again until there is something, as long as that is worth while.
    pub(crate) fn wait(&self, mut look: impl FnMut() -> bool) -> bool {
        if !self.hopeful.load(Ordering::Relaxed) {
            return false;
        }
        let start = clock::now();
        if start < self.crowded_until.load(Ordering::Relaxed) {
            return false;
        }
        let mut before = start;
        while before - start < SPIN_MAX_NS {
            if look() {
                return true;
            }
            let offered = clock::now();
            std::thread::yield_now();
            before = clock::now();
            if before - offered > CROWDED_NS {
                self.crowded_until.store(before + CROWDED_PAUSE_NS, Ordering::Relaxed);
                return look();
            }
        }
        false
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
}
