//! When the map of the group is compared with what packets really do.

use std::time::{Duration, Instant};

/// Comparisons after the order of the sockets was found out: who came or went meanwhile, and was in no list, shows by then.
const LOOKS: u32 = 5;

/// Between two comparisons. Each one that finds nothing doubles it: some senders' packets come to wrong sockets whatever the map says
/// (the kernel merges what one port sends to several lanes).
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Whether a comparison is due.
#[derive(Debug, Default)]
pub(crate) struct Doubt {
    /// Still due after a change.
    looks: u32,
    /// A packet came to the wrong socket since the last one.
    raised: bool,
    pause: Duration,
    /// None: at once.
    next: Option<Instant>,
}

impl Doubt {
    /// The order was found out, and compared once.
    pub(crate) fn begin(&mut self, now: Instant) {
        *self = Doubt { looks: LOOKS, raised: false, pause: PAUSE_MIN, next: Some(now + PAUSE_MIN) };
    }

    pub(crate) fn raise(&mut self) {
        self.raised = true;
    }

    /// Whether a comparison is due now or later.
    pub(crate) fn is_pending(&self) -> bool {
        self.raised || self.looks > 0
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.is_pending() && self.pause_is_over(now)
    }

    /// The order could not be found out: not again before this.
    pub(crate) fn postpone(&mut self, now: Instant) {
        self.looks = LOOKS;
        self.pause(now);
    }

    pub(crate) fn pause_is_over(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| next <= now)
    }

    /// A comparison has found nothing.
    pub(crate) fn relieve(&mut self, now: Instant) {
        self.looks = self.looks.saturating_sub(1);
        self.raised = false;
        self.pause(now);
    }

    fn pause(&mut self, now: Instant) {
        self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        self.next = Some(now + self.pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_looked_at_several_times_at_growing_intervals() {
        let start = Instant::now();
        let mut doubt = Doubt::default();
        assert!(!doubt.is_pending());
        doubt.begin(start);
        let (mut now, mut waited) = (start, Vec::new());
        while doubt.is_pending() {
            let before = now;
            while !doubt.is_due(now) {
                now += Duration::from_millis(1);
            }
            waited.push((now - before).as_millis());
            doubt.relieve(now);
        }
        assert_eq!(waited, [200, 400, 800, 1600, 3200]);
    }

    #[test]
    fn packets_that_always_come_to_the_wrong_socket_cost_little() {
        let mut doubt = Doubt::default();
        let start = Instant::now();
        let looks = (0..100_000)
            .map(|ms| start + Duration::from_millis(ms))
            .filter(|now| {
                doubt.raise();
                let due = doubt.is_due(*now);
                if due {
                    doubt.relieve(*now);
                }
                due
            })
            .count();
        assert!((8..=20).contains(&looks), "{looks}");
    }
}
