//! What is left of RDMA in a forked child: nothing, said politely.
//!
//! Threads do not survive fork and locks may be held in the copy. Every object remembers the generation of the process that made
//! it; the C library counts the generation up in the child (`pthread_atfork`), and from then on old objects refuse at once without
//! touching a lock. Fresh objects work as in any process.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, Result};

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// To be called in the child of a fork, before any verb. Only an atomic add: allowed in an atfork handler.
pub fn after_fork_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
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
