//! Congestion control: how many bytes may be on their way to one destination lane.
//!
//! The host keeps one such object for each destination lane and direction, shared by all queue pairs that talk to it, and answers
//! [`Host::window`](crate::Host::window) from it. The bytes counted are the charges of the transport: what is on the wire plus the
//! kernel's bookkeeping of a datagram.

use crate::host::WindowSignal;
use crate::requester::charge;
use crate::timer::Nanos;
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
    /// Bytes in flight were lost, and are sent again in their own place.
    fn lost(&mut self, bytes: u32);
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

    fn lost(&mut self, _bytes: u32) {}

    fn window(&self) -> u32 {
        self.window
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }
}

/// Additive increase, multiplicative decrease, and restraint while packets wait in queues on the way.
///
/// A loss takes a quarter: on a path that loses packets by chance half would leave single trains, whose last packet nothing follows
/// that could reveal its loss (`tests/sim/goodput.txt` is the judge). Where only what was lost is sent again, it takes as much as was
/// lost, and a quarter at most: a receive buffer that overflows loses whole trains, chance single packets, which growth makes good.
///
/// Sized for a peer whose receive buffer is Linux's default (`net.core.rmem_max` 212,992 bytes, of which the kernel makes 425,984
/// of bookkept memory: about six trains). The window starts at one train, doubles until something speaks against it, and never
/// passes four.
///
/// Lanes do not know how many others share a card's receive ring (some hundred packets): the time that answers take tells before
/// packets are lost. A window whose answers come late goes down to one train.
#[derive(Clone, Debug)]
pub struct Aimd {
    window: u32,
    in_flight: u32,
    /// Bytes acknowledged since the window last changed.
    acked: u32,
    /// Bytes that were in flight when the window was last cut and have not come back: until then further losses are the same loss.
    cut_in_flight: u32,
    /// Bytes taken for single losses since the window last changed otherwise.
    yielded: u32,
    /// Nothing spoke against doubling yet.
    opening: bool,
    /// Shortest round trip; forgotten little by little, for the path may change.
    base: Option<Nanos>,
    /// Longest round trip since the window last changed.
    slowest: Nanos,
}

impl Aimd {
    /// Where a window starts.
    pub const INITIAL: u32 = TRAIN_CHARGE_MAX;
    /// What it never passes: four trains.
    pub const MAX: u32 = 250 * 1024;
    /// What it never goes below: one train.
    pub const MIN: u32 = TRAIN_CHARGE_MAX;
    /// What it grows by for each window acknowledged.
    pub const INCREMENT: u32 = 8 * 1024;
    /// A round trip that takes so much longer than the shortest means queues. A full window of one sender stays below on links of
    /// 10 Gbit/s and more.
    pub const QUEUEING: Nanos = 400_000;

    /// A window at its start.
    pub fn new() -> Aimd {
        Aimd {
            window: Aimd::INITIAL,
            in_flight: 0,
            acked: 0,
            cut_in_flight: 0,
            yielded: 0,
            opening: true,
            base: None,
            slowest: 0,
        }
    }

    fn acked(&mut self, bytes: u32, rtt: Option<Nanos>) {
        if let Some(rtt) = rtt {
            self.base = Some(self.base.map_or(rtt, |base| base.min(rtt)));
            self.slowest = self.slowest.max(rtt);
        }
        self.acked = self.acked.saturating_add(bytes);
        if self.acked >= self.window {
            self.acked = 0;
            self.resize();
        }
    }

    /// A window's worth came back.
    fn resize(&mut self) {
        self.yielded = 0;
        let slowest = std::mem::take(&mut self.slowest);
        let base = self.base.unwrap_or(slowest);
        self.base = self.base.map(|base| base + base / 128);
        let window = if slowest.saturating_sub(base) > Aimd::QUEUEING {
            self.opening = false;
            self.window - self.window / 4
        } else if self.opening {
            self.window * 2
        } else {
            self.window + Aimd::INCREMENT
        };
        self.window = window.clamp(Aimd::MIN, Aimd::MAX);
    }

    fn cut(&mut self, to: u32) {
        self.opening = false;
        if self.cut_in_flight == 0 {
            self.window = to.max(Aimd::MIN);
            (self.acked, self.yielded) = (0, 0);
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
            WindowSignal::Acked { rtt } => self.acked(bytes, rtt),
            WindowSignal::Lost => self.cut(self.window - self.window / 4),
            WindowSignal::TimedOut => self.cut(Aimd::MIN),
            WindowSignal::Released => {}
        }
        self.in_flight = give(self.in_flight, bytes);
        self.cut_in_flight = self.cut_in_flight.saturating_sub(bytes);
    }

    fn lost(&mut self, bytes: u32) {
        let taken = bytes.min((self.window / 4).saturating_sub(self.yielded));
        self.yielded += taken;
        self.window = (self.window - taken).max(Aimd::MIN);
        self.opening &= self.yielded < self.window / 8;
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

    const ACKED: WindowSignal = WindowSignal::Acked { rtt: None };

    #[test]
    fn four_trains_fit_the_cap_and_the_cap_fits_a_default_socket() {
        assert!(Aimd::MAX >= 4 * charge(MAX_TRAIN_BYTES, 15) - 4096);
        const { assert!(Aimd::MAX < 425_984 * 2 / 3) };
        const { assert!(Aimd::MIN <= Aimd::INITIAL && Aimd::INITIAL <= Aimd::MAX) };
    }

    fn pass(cc: &mut Aimd, windows: u32, rtt: Nanos) {
        for _ in 0..windows {
            let bytes = cc.window();
            cc.take(bytes);
            cc.give_back(bytes, WindowSignal::Acked { rtt: Some(rtt) });
        }
    }

    #[test]
    fn doubles_at_first_and_then_grows_by_windows_acknowledged_up_to_the_cap() {
        let mut cc = Aimd::new();
        pass(&mut cc, 1, 20_000);
        assert_eq!(cc.window(), 2 * Aimd::INITIAL);
        pass(&mut cc, 5, 20_000);
        assert_eq!(cc.window(), Aimd::MAX);
        cc.take(1000);
        cc.give_back(1000, WindowSignal::Lost);
        let cut = cc.window();
        pass(&mut cc, 1, 20_000);
        assert_eq!(cc.window(), cut + Aimd::INCREMENT);
    }

    #[test]
    fn late_answers_shrink_it_to_a_train_and_prompt_ones_open_it_again() {
        let mut cc = Aimd::new();
        pass(&mut cc, 5, 20_000);
        pass(&mut cc, 20, 20_000 + 2 * Aimd::QUEUEING);
        assert_eq!(cc.window(), Aimd::MIN);
        pass(&mut cc, 50, 20_000);
        assert_eq!(cc.window(), Aimd::MAX);
    }

    #[test]
    fn a_path_that_became_longer_is_no_queue_for_ever() {
        let mut cc = Aimd::new();
        pass(&mut cc, 5, 100_000);
        pass(&mut cc, 1000, 2_000_000);
        assert_eq!(cc.window(), Aimd::MAX);
    }

    #[test]
    fn a_loss_takes_a_quarter_once_for_a_window_and_again_for_the_next() {
        let mut cc = Aimd::new();
        for _ in 0..1000 {
            cc.take(60_000);
            cc.give_back(60_000, ACKED);
        }
        cc.take(100_000);
        cc.take(100_000);
        cc.give_back(100_000, WindowSignal::Lost);
        assert_eq!(cc.window(), Aimd::MAX / 4 * 3);
        cc.give_back(100_000, WindowSignal::Lost);
        assert_eq!(cc.window(), Aimd::MAX / 4 * 3, "the same window's second loss");
        for _ in 0..8 {
            let before = cc.window();
            cc.take(100_000);
            cc.give_back(100_000, WindowSignal::Lost);
            assert_eq!(cc.window(), (before - before / 4).max(Aimd::MIN), "a new window's loss");
        }
        assert_eq!(cc.window(), Aimd::MIN);
    }

    #[test]
    fn single_losses_take_what_was_lost_and_a_quarter_at_most() {
        let mut cc = Aimd::new();
        pass(&mut cc, 5, 20_000);
        cc.take(Aimd::MAX);
        cc.lost(2_000);
        cc.lost(2_000);
        assert_eq!((cc.window(), cc.in_flight()), (Aimd::MAX - 4_000, Aimd::MAX));
        cc.lost(TRAIN_CHARGE_MAX);
        assert!((Aimd::MAX / 4 * 3 - 4_000..=Aimd::MAX / 4 * 3 + 4_000).contains(&cc.window()), "{}", cc.window());
        let burst = cc.window();
        cc.lost(TRAIN_CHARGE_MAX);
        assert!(burst - cc.window() < 4_000, "the same window's loss: {}", burst - cc.window());
        // Two in a hundred packets are made good by growth.
        let mut cc = Aimd::new();
        pass(&mut cc, 5, 20_000);
        for _ in 0..20 {
            cc.lost(Aimd::MAX / 50);
            pass(&mut cc, 1, 20_000);
        }
        assert!(cc.window() > Aimd::MAX - Aimd::INCREMENT, "{}", cc.window());
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
        cc.give_back(201, ACKED);
        assert_eq!(cc.available(), TRAIN_CHARGE_MAX);
    }
}
