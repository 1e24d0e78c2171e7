//! The C library's own functions, which ours stand before.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// A function that comes after ours in the order in which the loader looks.
pub(crate) struct Real {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Real {
    pub(crate) const fn new(name: &'static CStr) -> Real {
        Real { name, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Its address; NULL: the C library has no such function.
    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Relaxed);
        // A constructor of another library may call before ours has run.
        if known.is_null() { self.look_up() } else { known }
    }

    pub(crate) fn look_up(&self) -> *mut c_void {
        // SAFETY: the name has its end.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Relaxed);
        found
    }
}

/// Looks all of them up, so that nothing has to be looked up in a signal handler.
pub(crate) fn look_up_all() {
    for real in crate::hooks::ALL {
        real.look_up();
    }
}

/// `errno` for a function that the C library does not have.
pub(crate) fn set_enosys() {
    // SAFETY: the place is the calling thread's own.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
}
