//! When to send again, and when to give up.
//!
//! The two are apart. **Sending again** follows the round trips that this queue pair measures (the estimator of RFC 6298).
//! **Giving up** follows the verbs attributes: no progress for (`retry_cnt` + 1) times the ACK timeout, and no fewer than
//! `retry_cnt` attempts.

use crate::timer::{MS, Nanos, ack_timeout};
use crate::verbs::QpAttr;

/// Shortest time before sending again. Where many processes share few cores, a peer that is merely not scheduled stays away for
/// several milliseconds; a retransmission for that would be wasted.
pub(crate) const RTO_FLOOR: Nanos = 4 * MS;
/// Time before sending again while no round trip was measured: the peer may just be starting.
pub(crate) const RTO_INITIAL: Nanos = 10 * MS;
/// Longest time before sending again, however long the ACK timeout is.
pub(crate) const RTO_CEILING: Nanos = 1_000 * MS;
/// What one ACK timeout counts at least towards giving up. Programs set timeouts of tens of microseconds, which hardware rounds up
/// too.
pub(crate) const ACK_TIMEOUT_FLOOR: Nanos = 16 * MS;

/// The recovery state of one requester.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recovery {
    /// Smoothed round trip and its variation; `None` before the first sample.
    estimate: Option<Estimate>,
    /// Retransmission timeouts since the last round trip was measured: each doubles the time.
    backoff: u32,
    /// Times sent again since the last progress.
    attempts: u32,
    /// RNR NAKs since the last progress.
    rnr_naks: u8,
    /// When to give up without progress.
    deadline: Option<Nanos>,
}

#[derive(Clone, Copy, Debug)]
struct Estimate {
    srtt: Nanos,
    rttvar: Nanos,
}

impl Recovery {
    /// A round trip was measured on packets that were sent only once (Karn's rule). Only now the time before sending again is
    /// short again: an answer to what was sent twice may be one to the first time, from a peer that is slower than we think.
    pub(crate) fn sample(&mut self, rtt: Nanos) {
        self.backoff = 0;
        self.estimate = Some(match self.estimate {
            None => Estimate { srtt: rtt, rttvar: rtt / 2 },
            Some(Estimate { srtt, rttvar }) => {
                Estimate { srtt: (7 * srtt + rtt) / 8, rttvar: (3 * rttvar + srtt.abs_diff(rtt)) / 4 }
            }
        });
    }

    /// When to send again what goes out now.
    pub(crate) fn retransmit_at(&mut self, now: Nanos, attr: &QpAttr) -> Nanos {
        let at = now + self.timeout(attr);
        match self.start_deadline(now, attr) {
            // Later than the deadline would be later than allowed; a deadline already past waits for the last attempt's answer.
            Some(deadline) if deadline > now => at.min(deadline),
            _ => at,
        }
    }

    /// Time until sending again, for the present number of failures.
    fn timeout(&self, attr: &QpAttr) -> Nanos {
        let base = match self.estimate {
            None => RTO_INITIAL,
            Some(Estimate { srtt, rttvar }) => (srtt + 4 * rttvar).max(RTO_FLOOR),
        };
        // No longer than one ACK timeout, so that `retry_cnt` attempts fit in before the deadline.
        let ceiling =
            ack_timeout(attr.timeout).map_or(RTO_CEILING, |timeout| timeout.clamp(ACK_TIMEOUT_FLOOR, RTO_CEILING));
        (base << self.backoff.min(10)).min(ceiling)
    }

    fn start_deadline(&mut self, now: Nanos, attr: &QpAttr) -> Option<Nanos> {
        if self.deadline.is_none() {
            let timeout = ack_timeout(attr.timeout)?.max(ACK_TIMEOUT_FLOOR);
            self.deadline = Some(now + timeout * (Nanos::from(attr.retry_cnt) + 1));
        }
        self.deadline
    }

    /// Something was acknowledged.
    pub(crate) fn progress(&mut self) {
        self.attempts = 0;
        self.rnr_naks = 0;
        self.deadline = None;
    }

    /// A retransmission timer ran out.
    pub(crate) fn timed_out(&mut self) {
        self.backoff += 1;
    }

    /// May it be sent once more? `false`: give up.
    pub(crate) fn may_repeat(&mut self, now: Nanos, attr: &QpAttr) -> bool {
        if self.deadline.is_some_and(|deadline| now >= deadline) && self.attempts >= u32::from(attr.retry_cnt) {
            return false;
        }
        self.attempts += 1;
        true
    }

    /// The peer had no receive posted. `false`: too often.
    pub(crate) fn may_wait_for_receiver(&mut self, attr: &QpAttr) -> bool {
        // The peer lives: the time until giving up starts anew when it is sent again.
        self.attempts = 0;
        self.deadline = None;
        if attr.rnr_retry == 7 {
            return true;
        }
        if self.rnr_naks >= attr.rnr_retry {
            return false;
        }
        self.rnr_naks += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(timeout: u8, retry_cnt: u8) -> QpAttr {
        QpAttr { timeout, retry_cnt, ..QpAttr::default() }
    }

    /// Runs the timer until it gives up: times of the attempts and of the end.
    fn run(attr: &QpAttr, recovery: &mut Recovery) -> (Vec<Nanos>, Nanos) {
        let mut now = 0;
        let mut attempts = vec![];
        loop {
            now = recovery.retransmit_at(now, attr);
            recovery.timed_out();
            if !recovery.may_repeat(now, attr) {
                return (attempts, now);
            }
            attempts.push(now);
        }
    }

    #[test]
    fn gives_up_at_the_deadline_with_enough_attempts_for_every_attribute() {
        for timeout in 1..=31 {
            for retry_cnt in 0..=7 {
                let attr = attr(timeout, retry_cnt);
                let (attempts, end) = run(&attr, &mut Recovery::default());
                let one = ack_timeout(timeout).unwrap().max(ACK_TIMEOUT_FLOOR);
                assert_eq!(end, one * (Nanos::from(retry_cnt) + 1), "timeout {timeout} retry {retry_cnt}");
                assert!(attempts.len() >= usize::from(retry_cnt), "timeout {timeout} retry {retry_cnt}: {attempts:?}");
            }
        }
    }

    #[test]
    fn timeout_code_0_never_gives_up() {
        let (attr, mut recovery) = (attr(0, 0), Recovery::default());
        let mut now = 0;
        for _ in 0..1000 {
            now = recovery.retransmit_at(now, &attr);
            recovery.timed_out();
            assert!(recovery.may_repeat(now, &attr));
        }
        assert!(now > 900 * RTO_CEILING);
    }

    #[test]
    fn a_host_that_slept_past_the_deadline_still_makes_its_attempts() {
        let (attr, mut recovery) = (attr(14, 3), Recovery::default());
        recovery.retransmit_at(0, &attr);
        let mut now = 10_000 * MS;
        for _ in 0..3 {
            assert!(recovery.may_repeat(now, &attr));
            let next = recovery.retransmit_at(now, &attr);
            assert!(next > now, "each attempt gets its time");
            now = next;
        }
        assert!(!recovery.may_repeat(now, &attr));
    }

    #[test]
    fn follows_the_round_trip_between_floor_and_ceiling() {
        let attr = attr(18, 7);
        let mut recovery = Recovery::default();
        assert_eq!(recovery.timeout(&attr), RTO_INITIAL);
        for _ in 0..100 {
            recovery.sample(20_000);
        }
        assert_eq!(recovery.timeout(&attr), RTO_FLOOR);
        for _ in 0..100 {
            recovery.sample(50 * MS);
        }
        assert!((50 * MS..60 * MS).contains(&recovery.timeout(&attr)), "{}", recovery.timeout(&attr));
        recovery.timed_out();
        assert!((100 * MS..120 * MS).contains(&recovery.timeout(&attr)));
        recovery.progress();
        assert!((100 * MS..120 * MS).contains(&recovery.timeout(&attr)), "until a round trip is measured");
        recovery.sample(50 * MS);
        assert!((50 * MS..60 * MS).contains(&recovery.timeout(&attr)));
    }

    #[test]
    fn rnr_counts() {
        let waits = |rnr_retry: u8, naks: usize| {
            let mut recovery = Recovery::default();
            let attr = QpAttr { rnr_retry, ..QpAttr::default() };
            (0..naks).all(|_| recovery.may_wait_for_receiver(&attr))
        };
        assert!(!waits(0, 1));
        assert!(waits(2, 2));
        assert!(!waits(2, 3));
        assert!(waits(7, 1000));
    }
}
