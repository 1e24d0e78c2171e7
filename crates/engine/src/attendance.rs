//! A program thread that waits for a completion event and looks after the lane meanwhile: so a packet wakes one thread, not two.
//!
//! The C library sleeps itself, in a frame that `pthread_cancel` may unwind: hence the descriptors and the time are there to be had, and
//! the seat is given back by dropping.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use smallvec::SmallVec;

use crate::clock;
use crate::lane::Lane;
use crate::progress;

/// One wait for an event. Begins with a short wait awake, where that is worth while.
#[derive(Debug)]
pub struct Attendance<'e> {
    /// None: somebody else looks after the lane and raises our event too.
    lane: Option<Arc<Lane>>,
    event: BorrowedFd<'e>,
    /// When it began.
    since: u64,
    /// The event came before there was any need to sleep.
    came: bool,
    /// Nanoseconds to sleep at most.
    nap: Option<u64>,
}

impl<'e> Attendance<'e> {
    /// Waits for the event alone.
    pub(crate) fn idle(event: BorrowedFd<'e>) -> Attendance<'e> {
        Attendance { lane: None, event, since: 0, came: false, nap: None }
    }

    /// Takes the seat if it is free, and the lane has not ended. One attendant is enough. `is_there` tells without a system call whether the event came.
    pub(crate) fn new(lane: &Arc<Lane>, event: BorrowedFd<'e>, is_there: &dyn Fn() -> bool) -> Attendance<'e> {
        if lane.is_closed() || !lane.sit_down() {
            return Attendance::idle(event);
        }
        let since = clock::now();
        let came = lane.spin(is_there);
        // What came in since the last look ends the sleep at once.
        let nap = if came { 0 } else { progress::announce(lane, lane.attendant()) };
        Attendance { lane: Some(Arc::clone(lane)), event, since, came, nap: Some(nap) }
    }

    /// Sleeps until the event is readable or something else happened.
    ///
    /// # Errors
    /// EINTR: a signal handler ran.
    pub fn wait(self) -> io::Result<()> {
        if self.came {
            return Ok(());
        }
        let (places, mut polled): (Vec<usize>, Vec<PollFd<'_>>) =
            self.fds().map(|(place, fd)| (place, PollFd::new(fd, PollFlags::POLLIN))).unzip();
        let slept = ppoll(&mut polled, self.longest().map(TimeSpec::from), None);
        if let Some(lane) = &self.lane {
            progress::note_hung_up(lane, &places, &polled);
        }
        slept.map(drop).map_err(Into::into)
    }

    /// What to poll for reading, and how long at most. They stay open as long as `self` lives.
    pub fn polled(&self) -> (SmallVec<[libc::pollfd; 8]>, Option<Duration>) {
        let polled =
            |(_, fd): (usize, BorrowedFd<'_>)| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        (self.fds().map(polled).collect(), self.longest())
    }

    /// Says what became of [`Attendance::polled`].
    pub fn woken(&self, polled: &[libc::pollfd]) {
        let Some(lane) = &self.lane else { return };
        for gone in polled.iter().filter(|polled| polled.revents & libc::POLLHUP != 0) {
            for (place, _) in self.fds().filter(|(_, fd)| fd.as_raw_fd() == gone.fd) {
                lane.note_hung_up(place);
            }
        }
    }

    /// Descriptors with their places, which count those that hung up too.
    fn fds(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        let lane = self.lane.as_deref();
        lane.into_iter().flat_map(|lane| progress::fds(lane, lane.attendant())).chain([(usize::MAX, self.event)])
    }

    fn longest(&self) -> Option<Duration> {
        self.nap.map(Duration::from_nanos)
    }
}

impl Drop for Attendance<'_> {
    fn drop(&mut self) {
        if let Some(lane) = &self.lane {
            if !self.came {
                lane.wake_up();
            }
            lane.stand_up(clock::now() - self.since);
        }
    }
}
