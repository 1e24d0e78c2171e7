//! A queue of events behind a descriptor that programs poll: what completion channels and asynchronous event queues have in
//! common.
//!
//! An eventfd in semaphore mode counts the queued events, so that `poll`, `epoll` and `O_NONBLOCK` behave as on the kernel's
//! descriptors; which events they are is told by a queue in memory. Both change together under one lock, which nobody holds while he
//! sleeps. No call here is a cancellation point (`pthread_cancel`) but the sleep of [`EventQueue::next`].

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::sync::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read, write};

/// Events of type `E` from sources named by `K`.
#[derive(Debug)]
pub(crate) struct EventQueue<K, E> {
    /// In semaphore mode. Its flags belong to the program.
    tokens: OwnedFd,
    state: Mutex<State<K, E>>,
}

#[derive(Debug)]
struct State<K, E> {
    queued: VecDeque<(Option<K>, E)>,
    /// Events handed out, by source: a destroyer waits until that many were acknowledged.
    handed_out: HashMap<K, u64>,
}

impl<K: Copy + Eq + Hash, E> EventQueue<K, E> {
    /// An empty queue.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM of `eventfd(2)`.
    pub(crate) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC)?;
        let state = State { queued: VecDeque::new(), handed_out: HashMap::new() };
        Ok(EventQueue { tokens: fd, state: Mutex::new(state) })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.tokens.as_fd()
    }

    /// Queues an event. `source` is `None` if nobody will ever forget it.
    pub(crate) fn push(&self, source: Option<K>, event: E) {
        let mut state = self.state.lock();
        state.queued.push_back((source, event));
        // Under the lock, so that there are never more tokens than events. It cannot sleep: the counter would have to reach 2^64.
        if let Err(error) = write(&self.tokens, &1u64.to_ne_bytes()) {
            log::error!("event is queued but its descriptor cannot be signalled: {error}");
        }
    }

    /// Takes the next event if there is one; never sleeps.
    pub(crate) fn take(&self) -> Option<E> {
        let mut state = self.state.lock();
        let (source, event) = state.queued.pop_front()?;
        self.drop_token();
        if let Some(source) = source {
            *state.handed_out.entry(source).or_default() += 1;
        }
        Some(event)
    }

    /// Takes the next event; sleeps for one unless the program set `O_NONBLOCK`.
    ///
    /// # Errors
    /// EAGAIN with `O_NONBLOCK`; EINTR when a signal handler ran.
    pub(crate) fn next(&self) -> io::Result<E> {
        loop {
            if let Some(event) = self.take() {
                return Ok(event);
            }
            if self.is_nonblocking() {
                return Err(Errno::AGAIN.into());
            }
            poll(&mut [PollFd::new(&self.tokens, PollFlags::IN)], None)?;
        }
    }

    /// Is there an event to take?
    pub(crate) fn is_readable(&self) -> bool {
        !self.state.lock().queued.is_empty()
    }

    /// Did the program set `O_NONBLOCK`? Only a system call knows.
    pub(crate) fn is_nonblocking(&self) -> bool {
        fcntl_getfl(&self.tokens).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
    }

    /// Events of `source` that wait to be read.
    pub(crate) fn unread(&self, source: K) -> usize {
        self.state.lock().queued.iter().filter(|(queued, _)| *queued == Some(source)).count()
    }

    /// Removes what waits from `source` and gives the number of its events that were handed out before.
    pub(crate) fn forget(&self, source: K) -> u64 {
        let mut state = self.state.lock();
        let before = state.queued.len();
        state.queued.retain(|(queued, _)| *queued != Some(source));
        for _ in state.queued.len()..before {
            self.drop_token();
        }
        state.handed_out.remove(&source).unwrap_or(0)
    }

    /// Takes back one token, which is there. A program that read the descriptor itself may have stolen it: this sleeps all the same not.
    fn drop_token(&self) {
        let mut token = [0; 8];
        // Offset -1: the descriptor has no position.
        let dropped = preadv2(&self.tokens, &mut [io::IoSliceMut::new(&mut token)], u64::MAX, ReadWriteFlags::NOWAIT);
        // Kernels before 5.8 do not know that for eventfds.
        if matches!(dropped, Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS)) {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if poll(&mut [PollFd::new(&self.tokens, PollFlags::IN)], Some(&now)) == Ok(1) {
                // Nobody else reads without the lock.
                let _ = read(&self.tokens, &mut token[..]);
            }
        }
    }
}
