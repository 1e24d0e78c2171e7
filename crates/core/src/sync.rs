//! Locks that a fork does not spoil.
//!
//! The lock of the standard library is one word that only its own threads look at. (Locks of other crates queue their waiters in tables
//! of the whole process; in a forked child those keep the threads that the child does not have.) A panic with the lock held does not
//! poison it: what it guards is either consistent at every step, or the panic ends the card.

use std::sync::PoisonError;
pub use std::sync::{Condvar, MutexGuard};

/// A mutual exclusion lock.
#[derive(Debug, Default)]
pub struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// An open lock.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(std::sync::Mutex::new(value))
    }

    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}

/// Lets go of a lock until `condvar` is notified.
pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::Mutex;

    #[test]
    fn a_panic_does_not_poison() {
        let lock = Mutex::new(1);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut guard = lock.lock();
            *guard = 2;
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(lock.try_lock().map(|guard| *guard), Some(2));
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        drop(held);
    }
}
