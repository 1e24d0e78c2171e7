//! `pthread_cancel`: the thread of a program that waits for an event may be ended in its sleep.
//!
//! The C library unwinds the stack of such a thread, which must not meet `catch_unwind`. So cancellation is disabled inside the boundary
//! ([`crate::entry::enter`]), where any system call could be a cancellation point, and verbs that wait leave the boundary to sleep: in a
//! frame of the `C-unwind` calling convention that holds nothing but what is good to drop.

use std::ffi::c_int;
use std::time::Duration;

const DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

unsafe extern "C-unwind" {
    // The C library's own declaration does not say that these may unwind.
    fn pthread_testcancel();
    fn ppoll(
        fds: *mut libc::pollfd,
        count: libc::nfds_t,
        longest: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int;
}

/// Runs `body` with cancellation disabled.
#[inline]
pub(crate) fn disabled<T>(body: impl FnOnce() -> T) -> T {
    let mut before = 0;
    // SAFETY: changes the calling thread's own state only; the place is ours.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    let result = body();
    // SAFETY: as above, and NULL is allowed.
    unsafe { pthread_setcancelstate(before, std::ptr::null_mut()) };
    result
}

/// Ends the thread here if that was asked for.
///
/// # Safety
///
/// No frame below, up to the program's, may catch an unwinding.
pub(crate) unsafe fn point() {
    // SAFETY: by the contract above.
    unsafe { pthread_testcancel() }
}

/// Sleeps until a descriptor is ready or the time is over; gives the error number, or 0. The thread may be ended in it.
///
/// # Safety
///
/// As for [`point`].
pub(crate) unsafe fn sleep(polled: &mut [libc::pollfd], longest: Option<Duration>) -> c_int {
    let longest = longest.map(|longest| libc::timespec {
        tv_sec: longest.as_secs() as libc::time_t,
        tv_nsec: longest.subsec_nanos().into(),
    });
    let longest = longest.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the array and the time live during the call; by the contract above it may unwind.
    let ready = unsafe { ppoll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, longest, std::ptr::null()) };
    if ready < 0 { std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) } else { 0 }
}

/// What a verb that waits does next.
pub(crate) enum Step<S> {
    /// It has its event.
    Done,
    /// It needs to sleep.
    Sleep(S),
}

/// [`Step`], or a refusal.
pub(crate) struct Steps<S>(std::marker::PhantomData<S>);

impl<S> crate::entry::Convention for Steps<S> {
    type Good = Step<S>;
    type Return = Option<Step<S>>;
    fn good(good: Step<S>) -> Option<Step<S>> {
        Some(good)
    }
    fn bad(_errno: c_int) -> Option<Step<S>> {
        None
    }
}
