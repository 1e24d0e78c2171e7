//! Timers of a queue pair, and the two tables of times that the specification gives.

/// A point in time or a span of it: nanoseconds of the host's monotonic clock.
pub type Nanos = u64;

/// One millisecond.
pub(crate) const MS: Nanos = 1_000_000;

/// What a queue pair waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timer {
    /// No news of what is in flight: ask, send it again, or give up.
    Silence,
    /// The peer had no receive posted: send again when its time is over.
    RnrWait,
}

const TIMERS: usize = 2;

/// When each timer runs out, if it runs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TimerTable {
    at: [Option<Nanos>; TIMERS],
}

impl TimerTable {
    pub(crate) fn arm(&mut self, timer: Timer, at: Nanos) {
        self.at[timer as usize] = Some(at);
    }

    pub(crate) fn cancel(&mut self, timer: Timer) {
        self.at[timer as usize] = None;
    }

    pub(crate) fn is_armed(&self, timer: Timer) -> bool {
        self.at[timer as usize].is_some()
    }

    /// Takes the timer off if it ran out, and tells when it did.
    pub(crate) fn take_expired(&mut self, timer: Timer, now: Nanos) -> Option<Nanos> {
        self.at[timer as usize].take_if(|at| *at <= now)
    }

    /// When the next one runs out.
    pub(crate) fn next(&self) -> Option<Nanos> {
        self.at.iter().flatten().copied().min()
    }
}

/// RNR NAK timer codes in units of 10 us (IBA volume 1, table 45).
const RNR_TIMES_10US: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024, 1_536, 2_048, 3_072,
    4_096, 6_144, 8_192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

/// How long an RNR NAK's timer code asks to wait.
pub(crate) fn rnr_delay(code: u8) -> Nanos {
    Nanos::from(RNR_TIMES_10US[usize::from(code & 0x1f)]) * 10_000
}

/// The local ACK timeout for its code: 4.096 us * 2^code (IBA 9.7.6.1.3). `None` for code 0: never.
pub(crate) fn ack_timeout(code: u8) -> Option<Nanos> {
    match code & 0x1f {
        0 => None,
        code => Some(4_096 << code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_table_45() {
        assert_eq!(rnr_delay(0), 655_360_000);
        assert_eq!(rnr_delay(1), 10_000);
        assert_eq!(rnr_delay(12), 640_000);
        assert_eq!(rnr_delay(18), 5_120_000);
        assert_eq!(rnr_delay(31), 491_520_000);
        // From code 4 on every second one is the double.
        for code in 4..=29 {
            assert_eq!(rnr_delay(code + 2), 2 * rnr_delay(code), "code {code}");
        }
    }

    #[test]
    fn ack_timeout_codes() {
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(1), Some(8_192));
        assert_eq!(ack_timeout(14), Some(67_108_864));
        assert_eq!(ack_timeout(31), Some(4_096 << 31));
    }

    #[test]
    fn next_is_the_earliest_and_expiry_takes_it() {
        let mut timers = TimerTable::default();
        assert_eq!(timers.next(), None);
        timers.arm(Timer::Silence, 20);
        timers.arm(Timer::RnrWait, 10);
        assert_eq!(timers.next(), Some(10));
        assert_eq!(timers.take_expired(Timer::Silence, 19), None);
        assert_eq!(timers.take_expired(Timer::RnrWait, 11), Some(10));
        assert!(!timers.is_armed(Timer::RnrWait));
        assert_eq!(timers.next(), Some(20));
    }
}
