//! When a message is sent again, and when its sender gives up.

use crate::{Nanos, Timing};

/// The wait for an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retry {
    /// Until the message is sent again.
    interval: Nanos,
    /// Largest interval.
    response_timeout: Nanos,
    /// When the wait is over.
    give_up: Nanos,
    /// How long it lasts in all, counted anew after each MRA.
    patience: Nanos,
    /// MRAs that still count.
    mras: u8,
}

impl Retry {
    /// A message leaves now.
    pub(crate) fn start(now: Nanos, timing: &Timing, response_timeout: Nanos, max_retries: u8) -> Retry {
        let patience = response_timeout * (1 + Nanos::from(max_retries));
        Retry {
            interval: timing.first_retry.min(response_timeout),
            response_timeout,
            give_up: now + patience,
            patience,
            mras: timing.max_mras,
        }
    }

    /// When to look again. `spread` is a random number: those that lost a packet together shall not send again together.
    pub(crate) fn at(&self, now: Nanos, spread: u32) -> Nanos {
        let spread = self.interval / 4 / 1_024 * Nanos::from(spread >> 22);
        (now + self.interval + spread).min(self.give_up)
    }

    pub(crate) fn is_over(&self, now: Nanos) -> bool {
        now >= self.give_up
    }

    /// The message is sent again.
    pub(crate) fn back_off(&mut self) {
        self.interval = (self.interval * 2).min(self.response_timeout);
    }

    /// The peer asks for time. Gives when to send again; `None` if it asked too often.
    pub(crate) fn prolong(&mut self, now: Nanos, timing: &Timing, service_timeout: Nanos) -> Option<Nanos> {
        self.mras = self.mras.checked_sub(1)?;
        let until = now + service_timeout + self.response_timeout;
        self.give_up = until + self.patience;
        self.interval = timing.first_retry.min(self.response_timeout);
        Some(until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Nanos = 1_000_000;

    #[test]
    fn sends_again_soon_and_gives_up_when_the_specification_says() {
        let timing = Timing::default();
        let timeout = timing.time(20);
        let mut retry = Retry::start(0, &timing, timeout, 15);
        let (mut now, mut sent) = (0, Vec::new());
        while !retry.is_over(now) {
            now = retry.at(now, 0);
            sent.push(now / MS);
            retry.back_off();
        }
        assert_eq!(sent[..8], [50, 150, 350, 750, 1_550, 3_150, 6_350, 10_644]);
        assert_eq!(now, 16 * timeout);
        assert_eq!(sent.len(), 22);
    }

    #[test]
    fn a_peer_gets_the_time_it_asks_for_but_not_for_ever() {
        let timing = Timing::default();
        let timeout = timing.time(20);
        let mut retry = Retry::start(0, &timing, timeout, 0);
        assert!(retry.is_over(timeout));
        let service = timing.time(24);
        let mut now = 0;
        for _ in 0..timing.max_mras {
            let until = retry.prolong(now, &timing, service).expect("it may ask");
            assert_eq!(until, now + service + timeout);
            assert!(!retry.is_over(until));
            now = until;
        }
        assert_eq!(retry.prolong(now, &timing, service), None);
        assert!(retry.is_over(now + timeout));
    }

    #[test]
    fn spread_stays_below_a_quarter() {
        let retry = Retry::start(0, &Timing::default(), 4_000 * MS, 15);
        assert_eq!(retry.at(0, 0), 50 * MS);
        assert!((62 * MS..50 * MS * 5 / 4).contains(&retry.at(0, u32::MAX)));
    }
}
