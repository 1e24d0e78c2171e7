//! Completion channels: `struct ibv_comp_channel`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use crate::event_fd::EventQueue;

/// Tells programs that sleep in `ibv_get_cq_event`, `poll` or `epoll` which completion queues have something.
#[derive(Debug)]
pub struct CompChannel {
    queue: EventQueue<u64, u64>,
}

impl CompChannel {
    /// A channel without events.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM of `eventfd(2)`.
    pub fn new() -> io::Result<CompChannel> {
        Ok(CompChannel { queue: EventQueue::new()? })
    }

    /// The descriptor that is readable while an event waits. The program may poll it and set `O_NONBLOCK`; only
    /// [`CompChannel::next_event`] may read it.
    pub fn fd(&self) -> RawFd {
        self.queue.fd().as_raw_fd()
    }

    /// The same, borrowed.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.fd()
    }

    /// Takes the next event and gives the cookie of its completion queue. Sleeps, without a lock, unless `O_NONBLOCK` is set.
    ///
    /// # Errors
    /// EAGAIN with `O_NONBLOCK` and nothing there; EINTR when a signal handler ran.
    pub fn next_event(&self) -> io::Result<u64> {
        self.queue.next()
    }

    /// Takes the next event if there is one; never sleeps.
    pub fn try_event(&self) -> Option<u64> {
        self.queue.take()
    }

    /// Would [`CompChannel::next_event`] find an event at once?
    pub fn is_readable(&self) -> bool {
        self.queue.is_readable()
    }

    /// Did the program set `O_NONBLOCK`?
    pub fn is_nonblocking(&self) -> bool {
        self.queue.is_nonblocking()
    }

    /// Events of a completion queue that wait to be read.
    pub fn unread(&self, cookie: u64) -> usize {
        self.queue.unread(cookie)
    }

    /// Removes the unread events of a completion queue that is being destroyed. Gives the number of its events that were handed
    /// out over its life: `ibv_destroy_cq` returns when as many were acknowledged.
    pub fn forget(&self, cookie: u64) -> u64 {
        self.queue.forget(cookie)
    }

    /// Queues the event of a completion queue.
    pub(crate) fn push(&self, cookie: u64) {
        self.queue.push(Some(cookie), cookie);
    }
}
