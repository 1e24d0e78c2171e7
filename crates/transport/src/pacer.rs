//! Packet pacing: what a queue pair sends keeps to a rate.

use crate::host::Train;
use crate::timer::Nanos;

/// The lowest rate, in kbit/s: a train takes 50 ms of it, in which what got lost is not sent again. More would be more than the times of
/// retransmission bear.
pub const RATE_LIMIT_MIN: u32 = 10_000;
/// The highest, in kbit/s.
pub const RATE_LIMIT_MAX: u32 = 100_000_000;

/// Bytes of a packet around its payload: Ethernet, IPv4, UDP, BTH, ICRC; extended headers are not counted.
const AROUND: u64 = 14 + 20 + 8 + 12 + 4;
/// What was not sent in so long a time may be made up for: whoever asks does not come on the dot.
const GRACE: Nanos = 1_000_000;

/// Lets trains go when the rate has room for them: each takes its time on a wire of that speed, and the next waits for its end.
#[derive(Debug)]
pub(crate) struct Pacer {
    rate_kbps: u32,
    /// When the wire is free.
    free: Nanos,
    /// Somebody was told to wait until then.
    wake: Option<Nanos>,
}

impl Pacer {
    /// For a rate in kbit/s; none for 0, which is no limit.
    pub(crate) fn new(rate_kbps: u32) -> Option<Pacer> {
        (rate_kbps != 0).then_some(Pacer { rate_kbps, free: 0, wake: None })
    }

    /// May something be sent now? If not, it wants to be asked again at [`next_timeout`](Pacer::next_timeout).
    pub(crate) fn lets_go(&mut self, now: Nanos) -> bool {
        let free = self.free <= now;
        self.wake = if free { None } else { Some(self.free) };
        free
    }

    /// A train goes.
    pub(crate) fn sent(&mut self, train: &Train, now: Nanos) {
        let bytes = u64::from(train.len) + u64::from(train.packets) * AROUND;
        let time = bytes * 8 * 1_000_000 / u64::from(self.rate_kbps);
        self.free = self.free.max(now.saturating_sub(GRACE)) + time;
    }

    pub(crate) fn next_timeout(&self) -> Option<Nanos> {
        self.wake
    }

    /// The time has come, if it has.
    pub(crate) fn handle_timeout(&mut self, now: Nanos) {
        self.wake = self.wake.filter(|at| *at > now);
    }
}
