//! The primitives of [`crate::gate`].

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering, fence};

pub(crate) use parking_lot::{Mutex, MutexGuard};
