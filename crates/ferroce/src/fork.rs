//! What is left of RDMA in a forked child: nothing, said politely.
//!
//! Threads do not survive fork and locks may be held in the copy. Every object remembers the generation of the process that made
//! it; the C library counts the generation up in the child (`pthread_atfork`), and from then on old objects refuse at once without
//! touching a lock. Fresh objects work as in any process: the few locks that are the process's rather than an object's are taken by the
//! forking thread before the fork and let go after it, at both ends.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use ferroce_core::sync::MutexGuard;

use crate::context::{self, CardSlot};
use crate::device;
use crate::error::{Error, Result};
use crate::reach;

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Receive descriptors that a child must not keep: a socket of the port's group stays in the group, and is sent packets, as long as
/// anybody has it open.
static NOT_FOR_CHILDREN: [AtomicI32; 64] = [const { AtomicI32::new(NO_FD) }; 64];
const NO_FD: i32 = -1;

/// Notes descriptors to close in a forked child. What does not fit is left open, which only costs the child's parent a hash
/// collision in the group after its death.
pub(crate) fn close_in_child(fds: impl Iterator<Item = RawFd>) {
    for fd in fds {
        for slot in &NOT_FOR_CHILDREN {
            if slot.compare_exchange(NO_FD, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                break;
            }
        }
    }
}

/// The locks of the process, in the order in which they are taken.
struct Held {
    _card: MutexGuard<'static, CardSlot>,
    _devices: MutexGuard<'static, Vec<device::Entry>>,
    _waiting: MutexGuard<'static, reach::State>,
}

thread_local! {
    /// What this thread holds while it forks.
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

/// Makes what the process keeps for its whole life and would else make at its first use, perhaps just when another thread forks. The
/// caller sees to it that no fork happens meanwhile.
pub fn prepare() {
    ferroce_engine::prepare();
}

/// To be called before a fork, by the thread that forks. Waits for no more than a few instructions of other threads.
pub fn before_fork() {
    let held = Held { _card: context::hold(), _devices: device::hold(), _waiting: reach::hold() };
    // In a thread that is ending there is no place left to remember: then its fork is as it was without us.
    let _ = HELD.try_with(|place| place.replace(Some(held)));
}

/// To be called after a fork, by the thread that forked, in the parent.
pub fn after_fork_in_parent() {
    let _ = HELD.try_with(RefCell::take);
}

/// To be called in the child of a fork, before any verb. Only atomics, close(2) and letting go of locks: allowed in an atfork handler.
pub fn after_fork_in_child() {
    let _ = HELD.try_with(RefCell::take);
    GENERATION.fetch_add(1, Ordering::Relaxed);
    for slot in &NOT_FOR_CHILDREN {
        let fd = slot.swap(NO_FD, Ordering::Relaxed);
        if fd != NO_FD {
            // The objects that own it are never used nor dropped in the child.
            let _ = nix::unistd::close(fd);
        }
    }
}

/// The process that an object belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Generation(u32);

impl Generation {
    pub(crate) fn current() -> Generation {
        Generation(GENERATION.load(Ordering::Relaxed))
    }

    pub(crate) fn is_stale(self) -> bool {
        self != Generation::current()
    }

    pub(crate) fn check(self) -> Result<()> {
        if self.is_stale() { Err(Error::stale()) } else { Ok(()) }
    }
}
