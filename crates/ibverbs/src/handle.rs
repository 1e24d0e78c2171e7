//! C objects: a box whose first field is the C structure.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};

/// A C structure that the program also reads and writes, at any time and without telling Rust. Access goes through the raw pointer,
/// never through a reference to the whole.
#[repr(transparent)]
pub(crate) struct Shared<T>(UnsafeCell<T>);

// SAFETY: the structure is plain memory; who may touch which field when is the contract of verbs.h (and of the field's own mutex),
// not Rust's. This type only hands out a raw pointer.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Wraps an initial value.
    pub(crate) fn new(value: T) -> Shared<T> {
        Shared(UnsafeCell::new(value))
    }

    /// The structure, as C sees it.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.get()
    }
}

/// Ties a Rust object to the C structure at its start.
macro_rules! handle {
    ($object:ty, $c:ty, $name:literal) => {
        impl $object {
            /// The object behind a C pointer; `EINVAL` for NULL.
            ///
            /// # Safety
            ///
            /// The pointer is NULL or was made by [`Self::publish`] and is not reclaimed while the reference lives.
            pub(crate) unsafe fn of<'a>(pointer: *const $c) -> $crate::entry::Verb<&'a $object> {
                if pointer.is_null() {
                    return Err($crate::entry::Refusal::invalid(concat!($name, " is NULL")));
                }
                // SAFETY: by the contract above it points to the first field of a live box of this (repr(C)) type.
                Ok(unsafe { &*pointer.cast::<$object>() })
            }

            /// Hands a new object to C. `make` gets its address first, for use as the cookie of events.
            pub(crate) fn publish(
                make: impl FnOnce(*mut $c) -> $crate::entry::Verb<$object>,
            ) -> $crate::entry::Verb<*mut $c> {
                let mut place = Box::<$object>::new_uninit();
                let object = make(place.as_mut_ptr().cast())?;
                Ok(Box::into_raw(Box::write(place, object)).cast())
            }

            /// Takes the object back from C, to be dropped.
            ///
            /// # Safety
            ///
            /// The pointer was made by [`Self::publish`], and nobody uses it any more.
            pub(crate) unsafe fn reclaim(pointer: *mut $c) -> Box<Self> {
                // SAFETY: by the contract above.
                unsafe { Box::from_raw(pointer.cast()) }
            }
        }
    };
}

pub(crate) use handle;

/// A number for the `handle` field of a C object: unique in the process, and not 0.
pub(crate) fn handle_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
