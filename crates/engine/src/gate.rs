//! The lock of a lane, which nobody waits for on the data path.
//!
//! Who finds it taken leaves a doorbell and goes away; the holder looks at the doorbells again after letting go. Generic over its
//! primitives by the name `sync`, so that the loom test runs this very file.

use super::sync::{AtomicUsize, Mutex, MutexGuard, Ordering, fence};

/// A lock with doorbells.
#[derive(Debug)]
pub(crate) struct Gate<T> {
    inside: Mutex<T>,
    bells: Mutex<Vec<u16>>,
    /// Bells rung and not yet taken.
    rung: AtomicUsize,
}

impl<T> Gate<T> {
    pub(crate) fn new(inside: T) -> Gate<T> {
        Gate { inside: Mutex::new(inside), bells: Mutex::new(Vec::new()), rung: AtomicUsize::new(0) }
    }

    /// Waits for the lock: control path only. Whoever lets go of it calls [`Gate::run_if_free`] afterwards.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.inside.lock()
    }

    /// Leaves a doorbell. [`Gate::run_if_free`] has to follow.
    pub(crate) fn ring(&self, slot: u16) {
        let mut bells = self.bells.lock();
        bells.push(slot);
        // Inside the lock: a holder that takes a bell not yet counted would count below zero and spin until it is.
        self.rung.fetch_add(1, Ordering::SeqCst);
    }

    /// For the holder: takes the doorbells.
    pub(crate) fn take_bells(&self) -> Vec<u16> {
        if self.rung.load(Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        let mut bells = self.bells.lock();
        self.rung.fetch_sub(bells.len(), Ordering::SeqCst);
        std::mem::take(&mut *bells)
    }

    /// Runs `turn` if the lock is free, and again as long as doorbells were left meanwhile. `turn` takes the doorbells and lets go of
    /// the lock.
    pub(crate) fn run_if_free(&self, mut turn: impl FnMut(MutexGuard<'_, T>)) {
        // Pairs with the fence below: either the holder sees our doorbell after letting go, or we see the lock free.
        fence(Ordering::SeqCst);
        loop {
            let Some(guard) = self.inside.try_lock() else { return };
            turn(guard);
            fence(Ordering::SeqCst);
            if self.rung.load(Ordering::SeqCst) == 0 {
                return;
            }
        }
    }
}
