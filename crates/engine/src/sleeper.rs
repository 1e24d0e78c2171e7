//! A thread that sleeps while it looks after a lane, as those see it who may have to wake it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use ferroce_transport::Nanos;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// "Not asleep".
const AWAKE: u64 = u64::MAX;

/// One seat: at most one thread sleeps in it at a time.
#[derive(Debug)]
pub(crate) struct Sleeper {
    until: AtomicU64,
    wake: EventFd,
}

impl Sleeper {
    /// # Errors
    /// EMFILE and the like of `eventfd(2)`.
    pub(crate) fn new() -> io::Result<Sleeper> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Sleeper { until: AtomicU64::new(AWAKE), wake })
    }

    /// For the sleeper: says until when. Deadlines have to be looked at once more afterwards: an earlier one that was set before was
    /// told to nobody.
    pub(crate) fn announce(&self, until: Nanos) {
        self.until.store(until, Ordering::SeqCst);
    }

    /// For the sleeper: it is up again.
    pub(crate) fn rise(&self) {
        self.until.store(AWAKE, Ordering::SeqCst);
        // The count itself says nothing: an empty eventfd answers EAGAIN.
        let _ = self.wake.read();
    }

    /// Wakes the sleeper if it would oversleep `deadline`.
    pub(crate) fn mind(&self, deadline: Nanos) {
        let until = self.until.load(Ordering::SeqCst);
        if until != AWAKE && deadline < until {
            // Once is enough.
            self.until.store(AWAKE, Ordering::SeqCst);
            self.wake();
        }
    }

    /// Wakes the sleeper, now or at its next sleep.
    pub(crate) fn wake(&self) {
        // A full counter already wakes it.
        let _ = self.wake.write(1);
    }

    /// Readable when it is to wake.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::Sleeper;

    pub(crate) fn is_woken(sleeper: &Sleeper) -> bool {
        let mut fds = [PollFd::new(sleeper.fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).expect("poll works") == 1
    }

    #[test]
    fn only_an_earlier_deadline_wakes_and_only_a_sleeper() {
        let sleeper = Sleeper::new().expect("an eventfd");
        sleeper.mind(5);
        assert!(!is_woken(&sleeper), "nobody sleeps");
        sleeper.announce(100);
        sleeper.mind(100);
        assert!(!is_woken(&sleeper), "it wakes in time by itself");
        sleeper.mind(99);
        assert!(is_woken(&sleeper));
        sleeper.rise();
        assert!(!is_woken(&sleeper));
    }
}
