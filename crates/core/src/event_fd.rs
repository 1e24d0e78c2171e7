//! A queue of events behind a descriptor that programs poll: what completion channels and asynchronous event queues have in
//! common.
//!
//! An eventfd in semaphore mode counts the queued events, so that `poll`, `epoll` and `O_NONBLOCK` behave as on the kernel's
//! descriptors; which events they are is told by a queue in memory. The queue may run behind the descriptor only for a moment
//! inside [`EventQueue::next`]: it never holds a lock while it sleeps.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::hash::Hash;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use crate::sync::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{ReadWriteFlags, preadv2};

/// Events of type `E` from sources named by `K`.
#[derive(Debug)]
pub(crate) struct EventQueue<K, E> {
    /// In semaphore mode. Its flags belong to the program.
    tokens: File,
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
        Ok(EventQueue { tokens: File::from(fd), state: Mutex::new(state) })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.tokens.as_fd()
    }

    /// Queues an event. `source` is `None` if nobody will ever forget it.
    pub(crate) fn push(&self, source: Option<K>, event: E) {
        let mut state = self.state.lock();
        state.queued.push_back((source, event));
        // Under the lock, so that there are never more tokens than events. It cannot sleep: the counter would have to reach 2^64.
        if let Err(error) = (&self.tokens).write(&1u64.to_ne_bytes()) {
            log::error!("event is queued but its descriptor cannot be signalled: {error}");
        }
    }

    /// Takes the next event; sleeps for one unless the program set `O_NONBLOCK`.
    ///
    /// # Errors
    /// EAGAIN with `O_NONBLOCK`; EINTR when a signal handler without `SA_RESTART` ran, as `read(2)` in libibverbs has it.
    pub(crate) fn next(&self) -> io::Result<E> {
        loop {
            let mut token = [0; 8];
            let count = (&self.tokens).read(&mut token)?;
            assert_eq!(count, token.len(), "an eventfd is read in whole words");
            let mut state = self.state.lock();
            // Empty if the event was forgotten after its token was read: as if neither had been.
            if let Some((source, event)) = state.queued.pop_front() {
                if let Some(source) = source {
                    *state.handed_out.entry(source).or_default() += 1;
                }
                return Ok(event);
            }
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

    /// Takes back one token without sleeping, whatever the descriptor's flags. If a reader has it already, that reader will find
    /// the queue short and go on; if the kernel has no RWF_NOWAIT for eventfds, a poller may wake once in vain.
    fn drop_token(&self) {
        let mut token = [0; 8];
        let mut buffers = [io::IoSliceMut::new(&mut token)];
        // Offset -1: the descriptor has no position.
        if let Err(error) = preadv2(&self.tokens, &mut buffers, u64::MAX, ReadWriteFlags::NOWAIT) {
            log::trace!("token of a forgotten event stays: {error}");
        }
    }
}
