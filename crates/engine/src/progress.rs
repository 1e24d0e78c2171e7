//! The progress thread: what makes one-sided operations one-sided.
//!
//! While the program polls, the program turns the lane and this thread only looks now and then whether it still does. When the
//! polling stops, the thread sleeps on the lane's sockets and turns the lane itself.

use std::sync::{Arc, Weak};
use std::thread;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::time::TimeSpec;

use crate::clock;
use crate::lane::Lane;

/// How long the thread leaves the lane to a polling program before it looks again.
const WATCH_NS: i64 = 250_000;
/// Longest sleep; bounds what a lost wake-up could cost.
const SLEEP_MAX_NS: u64 = 100_000_000;

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
    let mut polls_seen = u64::MAX;
    let mut hung_up = Vec::new();
    loop {
        let Some(lane) = weak.upgrade() else { return };
        if lane.is_closed() {
            return;
        }
        let polls = lane.polls();
        if polls != polls_seen {
            polls_seen = polls;
            drop(lane);
            sleep_ns(WATCH_NS);
            continue;
        }
        sleep_on(&lane, &mut hung_up);
        if lane.polls() == polls_seen {
            lane.turn_blocking();
        }
    }
}

fn sleep_ns(ns: i64) {
    // EINTR only makes the nap shorter.
    let _ = ppoll(&mut [], Some(TimeSpec::new(0, ns)), None);
}

/// Sleeps until a packet, a timer or a wake-up. `hung_up` are the descriptors whose other end is gone for good (the service's relay
/// after the service): they would wake us without end.
fn sleep_on(lane: &Lane, hung_up: &mut Vec<usize>) {
    let now = clock::now();
    let until = lane.next_deadline().unwrap_or(u64::MAX).min(now + SLEEP_MAX_NS);
    lane.announce_sleep(until);
    // A doorbell rung or deadline armed before the announcement was seen by nobody: look once more.
    let until = lane.next_deadline().unwrap_or(u64::MAX).min(until);
    let nap = until.saturating_sub(clock::now());
    let (places, mut polled): (Vec<usize>, Vec<PollFd<'_>>) = lane
        .sleep_fds()
        .enumerate()
        .filter(|(place, _)| !hung_up.contains(place))
        .map(|(place, fd)| (place, PollFd::new(fd.as_fd(), PollFlags::POLLIN)))
        .unzip();
    let timeout = TimeSpec::new((nap / 1_000_000_000) as i64, (nap % 1_000_000_000) as i64);
    // Errors (EINTR) count as a wake-up.
    let _ = ppoll(&mut polled, Some(timeout), None);
    lane.end_sleep();
    let gone =
        places.iter().zip(&polled).filter(|(_, fd)| fd.revents().is_some_and(|r| r.contains(PollFlags::POLLHUP)));
    hung_up.extend(gone.map(|(place, _)| *place));
}
