//! Congestion control: how many bytes may be on their way to one destination lane.
//!
//! The host keeps one such object for each destination lane and direction, shared by all queue pairs that talk to it, and answers
//! [`Host::window`](crate::Host::window) from it. The bytes counted are the charges of the transport: what is on the wire plus the
//! kernel's bookkeeping of a datagram.

use crate::host::WindowSignal;
use crate::requester::charge;
use crate::{MAX_TRAIN_BYTES, MAX_TRAIN_PACKETS};

/// The charge of the largest train: a window never shuts it out when nothing is in flight.
pub const TRAIN_CHARGE_MAX: u32 = charge(MAX_TRAIN_BYTES, MAX_TRAIN_PACKETS);

/// A window on bytes in flight.
pub trait CongestionControl: Send {
    /// Bytes that may still be sent. When nothing is in flight this is at least [`TRAIN_CHARGE_MAX`], whatever the window: there
    /// would be nothing left to open it.
    fn available(&self) -> u32;
    /// Bytes go in flight.
    fn take(&mut self, bytes: u32);
    /// Bytes come back.
    fn give_back(&mut self, bytes: u32, signal: WindowSignal);
    /// The window as a whole.
    fn window(&self) -> u32;
    /// Bytes in flight.
    fn in_flight(&self) -> u32;
}

/// A window that never changes.
#[derive(Clone, Debug)]
pub struct FixedWindow {
    window: u32,
    in_flight: u32,
}

impl FixedWindow {
    /// A window of `bytes`.
    pub fn new(bytes: u32) -> FixedWindow {
        FixedWindow { window: bytes, in_flight: 0 }
    }
}

impl CongestionControl for FixedWindow {
    fn available(&self) -> u32 {
        available(self.window, self.in_flight)
    }

    fn take(&mut self, bytes: u32) {
        self.in_flight = self.in_flight.saturating_add(bytes);
    }

    fn give_back(&mut self, bytes: u32, _signal: WindowSignal) {
        self.in_flight = give(self.in_flight, bytes);
    }

    fn window(&self) -> u32 {
        self.window
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }
}

/// Additive increase, multiplicative decrease.
///
/// Sized for a peer whose receive buffer is Linux's default (`net.core.rmem_max` 212,992 bytes, of which the kernel makes 425,984
/// of bookkept memory: about six trains). The window starts at two trains and never passes four.
#[derive(Clone, Debug)]
pub struct Aimd {
    window: u32,
    in_flight: u32,
    /// Bytes acknowledged since the window last grew.
    acked: u32,
    /// Bytes that were in flight when the window was last cut and have not come back: until then further losses are the same loss.
    cut_in_flight: u32,
}

impl Aimd {
    /// Where a window starts.
    pub const INITIAL: u32 = 128 * 1024;
    /// What it never passes: four trains.
    pub const MAX: u32 = 250 * 1024;
    /// What it never goes below: one train.
    pub const MIN: u32 = TRAIN_CHARGE_MAX;
    /// What it grows by for each window acknowledged.
    pub const INCREMENT: u32 = 8 * 1024;

    /// A window at its start.
    pub fn new() -> Aimd {
        Aimd { window: Aimd::INITIAL, in_flight: 0, acked: 0, cut_in_flight: 0 }
    }

    fn grow(&mut self, bytes: u32) {
        self.acked = self.acked.saturating_add(bytes);
        if self.acked >= self.window {
            self.acked = 0;
            self.window = (self.window + Aimd::INCREMENT).min(Aimd::MAX);
        }
    }

    fn cut(&mut self, to: u32) {
        if self.cut_in_flight == 0 {
            self.window = to.max(Aimd::MIN);
            self.acked = 0;
            self.cut_in_flight = self.in_flight;
        }
    }
}

impl Default for Aimd {
    fn default() -> Self {
        Aimd::new()
    }
}

impl CongestionControl for Aimd {
    fn available(&self) -> u32 {
        available(self.window, self.in_flight)
    }

    fn take(&mut self, bytes: u32) {
        self.in_flight = self.in_flight.saturating_add(bytes);
    }

    fn give_back(&mut self, bytes: u32, signal: WindowSignal) {
        match signal {
            WindowSignal::Acked => self.grow(bytes),
            WindowSignal::Lost => self.cut(self.window / 2),
            WindowSignal::TimedOut => self.cut(Aimd::MIN),
            WindowSignal::Released => {}
        }
        self.in_flight = give(self.in_flight, bytes);
        self.cut_in_flight = self.cut_in_flight.saturating_sub(bytes);
    }

    fn window(&self) -> u32 {
        self.window
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }
}

fn available(window: u32, in_flight: u32) -> u32 {
    if in_flight == 0 { window.max(TRAIN_CHARGE_MAX) } else { window.saturating_sub(in_flight) }
}

fn give(in_flight: u32, bytes: u32) -> u32 {
    in_flight.checked_sub(bytes).expect("no more comes back than was taken")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_trains_fit_the_cap_and_the_cap_fits_a_default_socket() {
        assert!(Aimd::MAX >= 4 * charge(MAX_TRAIN_BYTES, 15) - 4096);
        const { assert!(Aimd::MAX < 425_984 * 2 / 3) };
        const { assert!(Aimd::MIN <= Aimd::INITIAL && Aimd::INITIAL <= Aimd::MAX) };
    }

    #[test]
    fn grows_by_windows_acknowledged_up_to_the_cap() {
        let mut cc = Aimd::new();
        for _ in 0..3 {
            cc.take(60_000);
            cc.give_back(60_000, WindowSignal::Acked);
        }
        assert_eq!(cc.window(), Aimd::INITIAL + Aimd::INCREMENT);
        for _ in 0..1000 {
            cc.take(60_000);
            cc.give_back(60_000, WindowSignal::Acked);
        }
        assert_eq!(cc.window(), Aimd::MAX);
    }

    #[test]
    fn halves_once_for_a_window_and_again_for_the_next() {
        let mut cc = Aimd::new();
        for _ in 0..1000 {
            cc.take(60_000);
            cc.give_back(60_000, WindowSignal::Acked);
        }
        cc.take(100_000);
        cc.take(100_000);
        cc.give_back(100_000, WindowSignal::Lost);
        assert_eq!(cc.window(), Aimd::MAX / 2);
        cc.give_back(100_000, WindowSignal::Lost);
        assert_eq!(cc.window(), Aimd::MAX / 2, "the same window's second loss");
        cc.take(100_000);
        cc.give_back(100_000, WindowSignal::Lost);
        assert_eq!(cc.window(), Aimd::MIN, "a new window's loss");
    }

    #[test]
    fn timeout_goes_to_the_minimum_and_release_changes_nothing() {
        let mut cc = Aimd::new();
        cc.take(1000);
        cc.give_back(1000, WindowSignal::Released);
        assert_eq!(cc.window(), Aimd::INITIAL);
        cc.take(1000);
        cc.give_back(1000, WindowSignal::TimedOut);
        assert_eq!(cc.window(), Aimd::MIN);
    }

    #[test]
    fn a_tiny_window_still_lets_a_train_go_when_nothing_is_in_flight() {
        let mut cc = FixedWindow::new(100);
        assert_eq!(cc.available(), TRAIN_CHARGE_MAX);
        cc.take(1);
        assert_eq!(cc.available(), 99);
        cc.take(200);
        assert_eq!(cc.available(), 0);
        cc.give_back(201, WindowSignal::Acked);
        assert_eq!(cc.available(), TRAIN_CHARGE_MAX);
    }
}
