//! A lock whose thread may vanish from under it: programs leave signal handlers by `longjmp` (iperf3 does), also out of our calls. The
//! next call of that thread would wait for itself for ever; it is refused instead.

use std::ops::{Deref, DerefMut};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const NOBODY: usize = 0;

pub(super) struct Lock<T> {
    /// The thread that has it.
    owner: AtomicUsize,
    value: Mutex<T>,
}

pub(super) struct Guard<'a, T> {
    owner: &'a AtomicUsize,
    value: MutexGuard<'a, T>,
}

impl<T> Lock<T> {
    pub(super) fn new(value: T) -> Lock<T> {
        Lock { owner: AtomicUsize::new(NOBODY), value: Mutex::new(value) }
    }

    /// Waits for the lock. If the thread has it already, the call ends there with EIO: what was being done will never be finished.
    pub(super) fn lock(&self) -> Guard<'_, T> {
        let own = this_thread();
        // Only this thread writes this value, so if it is read it is no old one.
        if self.owner.load(Ordering::Relaxed) == own {
            resume_unwind(Box::new("a signal handler has left an earlier call on this rsocket by longjmp"));
        }
        self.guard(self.value.lock().unwrap_or_else(PoisonError::into_inner), own)
    }

    /// Takes the lock if it is free.
    pub(super) fn try_lock(&self) -> Option<Guard<'_, T>> {
        let value = match self.value.try_lock() {
            Ok(value) => value,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return None,
        };
        Some(self.guard(value, this_thread()))
    }

    fn guard<'a>(&'a self, value: MutexGuard<'a, T>, own: usize) -> Guard<'a, T> {
        self.owner.store(own, Ordering::Relaxed);
        Guard { owner: &self.owner, value }
    }
}

/// A number of the calling thread, which no other living one has.
pub(super) fn this_thread() -> usize {
    thread_local! {
        static PLACE: u8 = const { 0 };
    }
    PLACE.with(|place| std::ptr::from_ref(place).addr())
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        self.owner.store(NOBODY, Ordering::Relaxed);
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}
