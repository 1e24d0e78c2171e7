//! The progress thread: what makes one-sided operations one-sided.
//!
//! While the program polls, the program turns the lane and this thread only looks now and then whether it still does. When the
//! polling stops, the thread sleeps on the lane's sockets and turns the lane itself.

use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::time::TimeSpec;

use crate::clock;
use crate::lane::{Lane, Progress};
use crate::rings::RingSleep;
use crate::sleeper::Sleeper;
use crate::spin::Spin;
use crate::trust::Trust;

/// How long the thread leaves the lane to a polling program before it looks again.
const WATCH_NS: i64 = 250_000;
/// A program that polled so often since the last look waits by polling. One that sleeps in a completion channel also polls now and
/// then, to find its queue empty: leaving the lane to it would delay the next packet.
const SPINNER_POLLS: u64 = 4;
/// A program that turned the lane last so long ago does not poll now: after a nap, and when this thread was woken for a packet, which
/// a program that polls takes before this thread runs.
const GONE_NS: u64 = 15_000;
const ELSEWHERE_NS: u64 = 5_000;
/// Longest sleep; bounds what a lost wake-up could cost. An idle process is to cost next to nothing: each look takes some 80 us.
const SLEEP_MAX_NS: u64 = 500_000_000;

/// Starts the thread. It ends when the lane is closed or dropped.
///
/// # Errors
/// What `pthread_create` says.
pub(crate) fn spawn(lane: &Arc<Lane>) -> std::io::Result<()> {
    let weak = Arc::downgrade(lane);
    spawn_quiet(&format!("ferroce-lane{}", lane.number()), move || run(&weak))
}

/// Starts a thread that takes none of the program's signals.
///
/// # Errors
/// What `pthread_create` says.
pub fn spawn_quiet(name: &str, f: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    with_signals_blocked(|| thread::Builder::new().name(name.into()).stack_size(256 * 1024).spawn(f).map(drop))
}

/// The program's signals are the program's: its handlers never run on our thread. Faults stay open: they are synchronous.
fn with_signals_blocked<R>(f: impl FnOnce() -> R) -> R {
    let mut blocked = SigSet::all();
    for fault in [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGFPE, Signal::SIGILL, Signal::SIGTRAP] {
        blocked.remove(fault);
    }
    let before = blocked.thread_swap_mask(SigmaskHow::SIG_SETMASK).ok();
    let result = f();
    if let Some(before) = before {
        // Cannot fail: the set came from the kernel.
        let _ = before.thread_set_mask();
    }
    result
}

fn run(weak: &Weak<Lane>) {
    // Where a sandbox forbids it, peers wait for us a little longer on a busy core.
    if let Err(error) = ferroce_link::sched::ask_for_short_slices() {
        log::debug!("no short slices for the progress thread: {error}");
    }
    let mut watcher = Watcher::default();
    loop {
        let Some(lane) = weak.upgrade() else { return };
        if lane.is_closed() {
            return;
        }
        let look = || watcher.look(&lane);
        match catch_unwind(AssertUnwindSafe(look)) {
            Ok(Next::Nap) => {
                drop(lane);
                sleep_ns(WATCH_NS);
            }
            Ok(Next::Look) => {}
            Err(_) => {
                lane.fail();
                return;
            }
        }
    }
}

/// What the thread does next.
enum Next {
    Look,
    /// The lane is left to the program for [`WATCH_NS`].
    Nap,
}

/// What the thread knows of the program.
#[derive(Debug, Default)]
struct Watcher {
    /// How often the program had polled at the last look.
    polls_seen: u64,
    napped: bool,
    spin: Spin,
    trust: Trust,
}

impl Watcher {
    fn look(&mut self, lane: &Lane) -> Next {
        if std::mem::take(&mut self.napped) {
            let gone = is_gone(lane, GONE_NS) && !lane.is_attended();
            self.trust.napped(gone && lane.turn_blocking());
        }
        let polls = lane.polls();
        let spins = polls - self.polls_seen >= SPINNER_POLLS;
        self.polls_seen = polls;
        if spins && self.trust.leaves_the_lane() {
            self.napped = true;
            return Next::Nap;
        }
        if lane.is_attended() {
            // Who waits for events looks after the lane in time.
            self.trust.watched(false);
            sleep_relieved(lane);
        } else {
            self.watch(lane);
        }
        Next::Look
    }

    /// Waits for something to do and does it, unless the program comes back to polling and can be trusted to go on.
    fn watch(&mut self, lane: &Lane) {
        let is_polled = || lane.polls() - self.polls_seen >= SPINNER_POLLS;
        let is_left = || self.trust.leaves_the_lane() && is_polled();
        let start = clock::now();
        let (mut came, mut gone) = (false, false);
        // The packets of a stream come faster than a sleeping core wakes.
        let spun = self.spin.wait(|| {
            is_left() || lane.is_attended() || {
                gone = is_gone(lane, ELSEWHERE_NS);
                came = lane.turn_awake();
                came
            }
        });
        if !spun {
            lane.set_progress(Progress::OnDuty);
            let slept = sleep_on(lane, lane.progress_sleeper());
            lane.set_progress(Progress::Awake);
            gone = is_gone(lane, ELSEWHERE_NS);
            came = !is_left() && lane.turn_blocking();
            if !came && !slept && !is_left() {
                // Somebody else holds the lane, and may need this core to go on. (Without need nobody is offered it: on a crowded one that
                // takes milliseconds.)
                thread::yield_now();
            }
        }
        self.trust.watched(came && gone);
        self.spin.learn(clock::now() - start);
    }
}

fn is_gone(lane: &Lane, ns: u64) -> bool {
    clock::now().saturating_sub(lane.last_turn()) > ns
}

fn sleep_ns(ns: i64) {
    // EINTR only makes the nap shorter.
    let _ = ppoll(&mut [], Some(TimeSpec::new(0, ns)), None);
}

/// An attendant looks after the lane: sleeps until it says that it goes.
fn sleep_relieved(lane: &Lane) {
    lane.set_progress(Progress::Relieved);
    // It may have gone before it could see that we rely on it.
    if lane.is_attended() {
        let mut polled = [PollFd::new(lane.progress_sleeper().fd(), PollFlags::POLLIN)];
        // EINTR counts as a wake-up.
        let _ = ppoll(&mut polled, Some(time_spec(SLEEP_MAX_NS)), None);
    }
    lane.set_progress(Progress::Awake);
    lane.progress_sleeper().rise();
}

/// Sleeps until a packet, a timer or a wake-up. EINTR counts as one. False: there was something already.
fn sleep_on(lane: &Lane, sleeper: &Sleeper) -> bool {
    let nap = announce(lane, sleeper);
    if nap > 0 {
        sleep_for(lane, sleeper, nap);
    }
    lane.rise(sleeper);
    nap > 0
}

/// The same for a program's thread that only polls: what it polls for may come by another thread, which does not wake it.
pub(crate) fn nap(lane: &Lane, sleeper: &Sleeper) {
    const NAP_MAX_NS: u64 = 100_000;
    let nap = announce(lane, sleeper).min(NAP_MAX_NS);
    if nap > 0 {
        sleep_for(lane, sleeper, nap);
    }
}

fn sleep_for(lane: &Lane, sleeper: &Sleeper, ns: u64) {
    let (places, mut polled): (Vec<usize>, Vec<PollFd<'_>>) =
        fds(lane, sleeper).map(|(place, fd)| (place, PollFd::new(fd, PollFlags::POLLIN))).unzip();
    let _ = ppoll(&mut polled, Some(time_spec(ns)), None);
    note_hung_up(lane, &places, &polled);
}

/// Waits until the lane's sockets or its relay have something, but not long: it may be for another thread.
pub(crate) fn doze(lane: &Lane) {
    const DOZE_NS: u64 = 200_000;
    let mut polled: Vec<PollFd<'_>> = lane.sleep_fds().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    // EINTR only makes it shorter.
    let _ = ppoll(&mut polled, Some(time_spec(DOZE_NS)), None);
}

/// Tells those who may have to wake `sleeper` until when it sleeps, and gives the nanoseconds. When it is up again it tells the rings
/// so.
pub(crate) fn announce(lane: &Lane, sleeper: &Sleeper) -> u64 {
    let until = lane.next_deadline().unwrap_or(u64::MAX).min(clock::now() + SLEEP_MAX_NS);
    sleeper.announce(until);
    // A doorbell rung or deadline armed before the announcement was seen by nobody: look once more.
    let until = lane.next_deadline().unwrap_or(u64::MAX).min(until);
    let may_sleep = lane.ring_sleep().is_none_or(RingSleep::lie_down);
    if may_sleep { until.saturating_sub(clock::now()) } else { 0 }
}

/// What to sleep on, with places that stay the same.
pub(crate) fn fds<'a>(lane: &'a Lane, sleeper: &'a Sleeper) -> impl Iterator<Item = (usize, BorrowedFd<'a>)> {
    lane.sleep_fds().chain([sleeper.fd()]).enumerate().filter(|(place, _)| !lane.is_hung_up(*place))
}

pub(crate) fn note_hung_up(lane: &Lane, places: &[usize], polled: &[PollFd<'_>]) {
    let gone = |fd: &PollFd<'_>| fd.revents().is_some_and(|revents| revents.contains(PollFlags::POLLHUP));
    places.iter().zip(polled).filter(|(_, fd)| gone(fd)).for_each(|(place, _)| lane.note_hung_up(*place));
}

fn time_spec(ns: u64) -> TimeSpec {
    TimeSpec::new((ns / 1_000_000_000) as i64, (ns % 1_000_000_000) as i64)
}
