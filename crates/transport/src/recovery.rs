//! When to ask, when to send again, and when to give up.
//!
//! The three are apart. While nothing comes back, **probes** ask the peer what it has: the first after about one round trip as this
//! queue pair measures it (the estimator of RFC 6298), later ones after twice as long each. A probe repeats nothing. Its answer
//! shows that what is in flight was lost, or acknowledges it; where there is no answer, the peer may merely not be scheduled, and
//! what it has not looked at yet is not sent again. **Sending again** without an answer, and **giving up**, follow the verbs
//! attributes: all attempts together have `retry_cnt` + 1 times the longest time that the specification lets an ACK timeout take
//! (but a second at least), and each has its share of that (but no more than a second, or the ACK timeout if it is longer).
//!
//! Time in which this end did not run (a timer that is looked at late) does not count: the peer had no chance to be heard.

use crate::timer::{MS, Nanos, ack_timeout};
use crate::verbs::QpAttr;

/// Shortest time before the first probe. Where the last packets of all that is in flight are lost, or their ACK, nothing else finds
/// it: some round trips of a local network, so that a loss costs no more than the window that is sent again. A peer that is not
/// scheduled for milliseconds is asked some times in vain.
pub(crate) const PROBE_FLOOR: Nanos = MS / 5;
/// The same behind the repair of a gap: the peer is known to look, and to ask for one packet in vain costs little.
const REPAIR_FLOOR: Nanos = MS / 20;
/// Time before the first probe while no round trip was measured: the peer may just be starting.
pub(crate) const PROBE_INITIAL: Nanos = 10 * MS;
/// The time between probes doubles so many times.
const PROBE_DOUBLINGS: u32 = 9;
/// Longest time before sending again, however long the ACK timeout is.
pub(crate) const RTO_CEILING: Nanos = 1_000 * MS;
/// Shortest time before sending again to a peer that cannot be asked.
const UNASKED_FLOOR: Nanos = 100 * MS;
/// How many times its nominal value an ACK timeout may take (IBA 9.7.6.1.3).
const ACK_TIMEOUT_FACTOR: Nanos = 4;
/// Shortest time before giving up. Programs set timeouts of microseconds, for networks of cards; a process that is stopped or not
/// scheduled for a moment is not dead.
pub(crate) const GIVE_UP_FLOOR: Nanos = 1_000 * MS;

/// The recovery state of one requester.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recovery {
    /// Smoothed round trip and its variation; `None` before the first sample.
    estimate: Option<Estimate>,
    /// Times sent again for want of news since the last round trip was measured: each doubles the times.
    backoff: u32,
    /// Since when the peer is silent.
    since: Nanos,
    /// Probes in this silence.
    probes: u32,
    /// A repair is waited for.
    hurried: bool,
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

/// What is due in the silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// To ask what the peer has.
    Probe,
    /// To send again, or to give up.
    Repeat,
}

impl Recovery {
    /// A round trip was measured on packets that were sent only once (Karn's rule). Only now the times are short again: an answer to
    /// what was sent twice may be one to the first time, from a peer that is slower than we think.
    pub(crate) fn sample(&mut self, rtt: Nanos) {
        self.backoff = 0;
        self.estimate = Some(match self.estimate {
            None => Estimate { srtt: rtt, rttvar: rtt / 2 },
            Some(Estimate { srtt, rttvar }) => {
                Estimate { srtt: (7 * srtt + rtt) / 8, rttvar: (3 * rttvar + srtt.abs_diff(rtt)) / 4 }
            }
        });
    }

    /// Something goes out into silence, or was heard while more is in flight: when to look again.
    pub(crate) fn watch(&mut self, now: Nanos, attr: &QpAttr, can_probe: bool) -> Nanos {
        (self.since, self.probes, self.hurried) = (now, 0, false);
        self.next(now, attr, can_probe)
    }

    /// The same for the repair of a gap.
    pub(crate) fn watch_repair(&mut self, now: Nanos, attr: &QpAttr, can_probe: bool) -> Nanos {
        (self.since, self.probes, self.hurried) = (now, 0, true);
        self.next(now, attr, can_probe)
    }

    /// When to look again.
    pub(crate) fn next(&mut self, now: Nanos, attr: &QpAttr, can_probe: bool) -> Nanos {
        let at = if can_probe {
            (now + (self.interval() << self.probes.min(PROBE_DOUBLINGS))).min(self.since + timeout(attr))
        } else {
            now.max(self.since + timeout_unasked(attr))
        };
        match self.start_deadline(now, attr) {
            // Later than the deadline would be later than allowed; a deadline already past waits for the last attempt's answer.
            Some(deadline) if deadline > now => at.min(deadline),
            _ => at,
        }
    }

    /// The time that was to look again, `due`, has come.
    pub(crate) fn silent(&mut self, now: Nanos, due: Nanos, attr: &QpAttr, can_probe: bool) -> Due {
        let late = now - due;
        self.since += late;
        self.deadline = self.deadline.map(|deadline| deadline + late);
        let over = now >= self.since + if can_probe { timeout(attr) } else { timeout_unasked(attr) }
            || self.deadline.is_some_and(|deadline| now >= deadline && self.since < deadline);
        if over {
            self.unheard();
            return Due::Repeat;
        }
        self.probes += 1;
        Due::Probe
    }

    /// What is in flight is sent again for want of news.
    pub(crate) fn unheard(&mut self) {
        self.backoff += 1;
    }

    /// Time until the first probe.
    fn interval(&self) -> Nanos {
        let (floor, backoff) = if self.hurried { (REPAIR_FLOOR, 0) } else { (PROBE_FLOOR, self.backoff.min(8)) };
        let base = self.estimate.map_or(PROBE_INITIAL, |Estimate { srtt, rttvar }| (srtt + 4 * rttvar).max(floor));
        base << backoff
    }

    fn start_deadline(&mut self, now: Nanos, attr: &QpAttr) -> Option<Nanos> {
        if self.deadline.is_none() {
            self.deadline = patience(attr).map(|patience| now + patience);
        }
        self.deadline
    }

    /// Something was acknowledged.
    pub(crate) fn progress(&mut self) {
        self.attempts = 0;
        self.rnr_naks = 0;
        self.deadline = None;
    }

    /// Times sent again, and RNR NAKs, since the last progress.
    pub(crate) fn failed(&self) -> (u32, u8) {
        (self.attempts, self.rnr_naks)
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

/// Time until sending again without an answer to probes: so short that `retry_cnt` attempts fit in before giving up, and no shorter
/// than the ACK timeout.
fn timeout(attr: &QpAttr) -> Nanos {
    let share = patience(attr).map_or(RTO_CEILING, |patience| patience / (Nanos::from(attr.retry_cnt) + 1));
    share.min(RTO_CEILING.max(ack_timeout(attr.timeout).unwrap_or(0)))
}

/// The same while nothing can be asked: what was lost is found by nothing else. The longest that an ACK timeout may take, but not as
/// short as programs set it for networks of cards.
fn timeout_unasked(attr: &QpAttr) -> Nanos {
    let longest = ack_timeout(attr.timeout).map_or(RTO_CEILING, |timeout| ACK_TIMEOUT_FACTOR * timeout);
    timeout(attr).min(longest.max(UNASKED_FLOOR))
}

/// How long to wait for progress before giving up; `None` for ever.
pub(crate) fn patience(attr: &QpAttr) -> Option<Nanos> {
    let timeout = ack_timeout(attr.timeout)?;
    Some((ACK_TIMEOUT_FACTOR * timeout * (Nanos::from(attr.retry_cnt) + 1)).max(GIVE_UP_FLOOR))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(timeout: u8, retry_cnt: u8) -> QpAttr {
        QpAttr { timeout, retry_cnt, ..QpAttr::default() }
    }

    /// Lets nothing be heard until it gives up: times of the probes, of the attempts and of the end.
    fn run(attr: &QpAttr, recovery: &mut Recovery) -> (Vec<Nanos>, Vec<Nanos>, Nanos) {
        let (mut probes, mut attempts) = (vec![], vec![]);
        let mut at = recovery.watch(0, attr, true);
        loop {
            match recovery.silent(at, at, attr, true) {
                Due::Probe => {
                    probes.push(at);
                    at = recovery.next(at, attr, true);
                }
                Due::Repeat if recovery.may_repeat(at, attr) => {
                    attempts.push(at);
                    at = recovery.watch(at, attr, true);
                }
                Due::Repeat => return (probes, attempts, at),
            }
        }
    }

    #[test]
    fn gives_up_at_the_deadline_with_enough_attempts_for_every_attribute() {
        for timeout in 1..=31 {
            for retry_cnt in 0..=7 {
                let attr = attr(timeout, retry_cnt);
                let (probes, attempts, end) = run(&attr, &mut Recovery::default());
                let promise = 4 * ack_timeout(timeout).unwrap() * (Nanos::from(retry_cnt) + 1);
                assert_eq!(end, promise.max(GIVE_UP_FLOOR), "timeout {timeout} retry {retry_cnt}");
                assert!(attempts.len() >= usize::from(retry_cnt), "timeout {timeout} retry {retry_cnt}: {attempts:?}");
                assert!(probes[0] == PROBE_INITIAL && attempts.first().is_none_or(|&first| probes[0] < first));
            }
        }
    }

    #[test]
    fn however_near_the_peer_nothing_is_sent_again_before_the_ack_timeout() {
        for timeout in 1..=25 {
            let (attr, mut recovery) = (attr(timeout, 7), Recovery::default());
            recovery.sample(20_000);
            let (_, attempts, _) = run(&attr, &mut recovery);
            let least = ack_timeout(timeout).unwrap();
            assert!(attempts[0] >= least, "timeout {timeout}: {attempts:?}");
            assert!(attempts.windows(2).all(|pair| pair[1] - pair[0] >= least), "timeout {timeout}: {attempts:?}");
        }
    }

    #[test]
    fn asks_at_doubling_intervals_before_it_sends_again() {
        let (probes, attempts, end) = run(&attr(14, 3), &mut Recovery::default());
        let ms = |times: &[Nanos]| times.iter().map(|at| at / MS).collect::<Vec<_>>();
        assert_eq!(ms(&attempts), [268, 536, 805]);
        assert_eq!(ms(&probes), [10, 30, 70, 150, 288, 328, 408, 576, 656, 885, 1_045]);
        assert_eq!(end / MS, 1_073);
    }

    #[test]
    fn timeout_code_0_never_gives_up() {
        let (attr, mut recovery) = (attr(0, 0), Recovery::default());
        let mut at = recovery.watch(0, &attr, true);
        let mut attempts = 0;
        while attempts < 1000 {
            match recovery.silent(at, at, &attr, true) {
                Due::Probe => at = recovery.next(at, &attr, true),
                Due::Repeat => {
                    assert!(recovery.may_repeat(at, &attr));
                    attempts += 1;
                    at = recovery.watch(at, &attr, true);
                }
            }
        }
        assert!(at > 900 * RTO_CEILING);
    }

    #[test]
    fn time_in_which_this_end_slept_does_not_count() {
        let (attr, mut recovery) = (attr(14, 0), Recovery::default());
        let due = recovery.watch(0, &attr, true);
        // Ten seconds late, far past everything that was promised.
        let slept = 10_000 * MS;
        assert_eq!(recovery.silent(due + slept, due, &attr, true), Due::Probe);
        let (mut at, mut repeated) = (recovery.next(due + slept, &attr, true), None);
        loop {
            match recovery.silent(at, at, &attr, true) {
                Due::Probe => at = recovery.next(at, &attr, true),
                Due::Repeat if recovery.may_repeat(at, &attr) => {
                    repeated.get_or_insert(at);
                    at = recovery.watch(at, &attr, true);
                }
                Due::Repeat => break,
            }
        }
        assert_eq!((repeated, at), (None, slept + GIVE_UP_FLOOR));
    }

    #[test]
    fn an_end_that_is_always_late_sends_again_after_some_probes() {
        let (attr, mut recovery) = (attr(14, 7), Recovery::default());
        let mut at = recovery.watch(0, &attr, true);
        let mut probes = 0;
        loop {
            let now = at + 1_000 * MS;
            match recovery.silent(now, at, &attr, true) {
                Due::Probe => probes += 1,
                Due::Repeat => break,
            }
            at = recovery.next(now, &attr, true);
            assert!(at > now);
        }
        assert!((1..=16).contains(&probes), "{probes}");
    }

    #[test]
    fn probes_follow_the_round_trip() {
        let mut recovery = Recovery::default();
        assert_eq!(recovery.interval(), PROBE_INITIAL);
        for _ in 0..100 {
            recovery.sample(20_000);
        }
        assert_eq!(recovery.interval(), PROBE_FLOOR);
        for _ in 0..100 {
            recovery.sample(300 * MS);
        }
        let near = |time: Nanos, by: Nanos| (300 * MS * by..320 * MS * by).contains(&time);
        assert!(near(recovery.interval(), 1));
        recovery.unheard();
        assert!(near(recovery.interval(), 2));
        recovery.progress();
        assert!(near(recovery.interval(), 2), "until a round trip is measured");
        recovery.sample(300 * MS);
        assert!(near(recovery.interval(), 1));
    }

    #[test]
    fn a_repair_is_asked_about_soon_however_often_others_were_in_vain() {
        let (attr, mut recovery) = (attr(14, 7), Recovery::default());
        for _ in 0..100 {
            recovery.sample(10_000);
        }
        recovery.unheard();
        assert_eq!(recovery.watch(0, &attr, true), 2 * PROBE_FLOOR);
        let first = recovery.watch_repair(0, &attr, true);
        assert_eq!(first, REPAIR_FLOOR);
        assert_eq!(recovery.silent(first, first, &attr, true), Due::Probe);
        assert_eq!(recovery.next(first, &attr, true), 3 * REPAIR_FLOOR);
        assert_eq!(recovery.watch(0, &attr, true), 2 * PROBE_FLOOR);
    }

    #[test]
    fn sending_again_takes_the_longest_time_of_an_ack_timeout_up_to_a_second_or_the_timeout() {
        for (code, retry_cnt, ms) in
            [(14, 7, 268), (1, 7, 125), (1, 0, 1_000), (18, 2, 1_073), (17, 2, 1_000), (0, 7, 1_000)]
        {
            assert_eq!(timeout(&attr(code, retry_cnt)) / MS, ms, "timeout {code} retry {retry_cnt}");
        }
    }

    #[test]
    fn a_peer_that_cannot_be_asked_is_sent_to_again_within_the_time_of_an_ack_timeout() {
        for (code, retry_cnt, ms) in [(14, 0, 268), (14, 7, 268), (1, 0, 100), (18, 2, 1_073), (0, 7, 1_000)] {
            let (attr, mut recovery) = (attr(code, retry_cnt), Recovery::default());
            let at = recovery.watch(0, &attr, false);
            assert_eq!(at / MS, ms, "timeout {code} retry {retry_cnt}");
            assert_eq!(recovery.silent(at, at, &attr, false), Due::Repeat);
        }
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
