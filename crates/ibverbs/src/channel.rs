//! Completion channels and their events.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use ferroce::Attendance;

use crate::abi::{ibv_comp_channel, ibv_context, ibv_cq};
use crate::cancel::{self, Step, Steps};
use crate::context::{ContextObject, ContextRef};
use crate::cq::CqObject;
use crate::entry::{MinusOne, Pointer, Refusal, Status, Verb, Void, enter, verb};
use crate::events::acknowledged;
use crate::handle::{Shared, handle};

/// `struct ibv_comp_channel` and what is behind it.
#[repr(C)]
pub struct ChannelObject {
    c: Shared<ibv_comp_channel>,
    pub(crate) channel: Arc<ferroce::CompChannel>,
    context: ContextRef,
}

handle!(ChannelObject, ibv_comp_channel, "channel");

impl ChannelObject {
    /// Counts a CQ that uses (+1) or leaves (-1) the channel.
    pub(crate) fn count(&self, change: c_int) {
        if self.context.is_stale() {
            // In a forked child: the mutex may be held by a thread that does not exist here.
            return;
        }
        let c = self.c.as_ptr();
        // SAFETY: the field is guarded by the context's mutex, which is held.
        self.context.locked(|| unsafe { (*c).refcnt += change });
    }

    fn users(&self) -> c_int {
        if self.context.is_stale() {
            return 0;
        }
        let c = self.c.as_ptr();
        // SAFETY: as in `count`.
        self.context.locked(|| unsafe { (*c).refcnt })
    }
}

/// Takes the next event, or says that there is none yet: then the card runs in the sleep, so that a packet wakes one thread instead of
/// two. Keeps the manners of the read(2) that programs know: a non-blocking descriptor is left alone.
///
/// # Safety
///
/// The contract of `ibv_get_cq_event`.
unsafe fn next<'a>(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> Verb<Step<Attendance<'a>>> {
    // SAFETY: by the contract above.
    let object: &'a ChannelObject = unsafe { ChannelObject::of(channel) }?;
    if cq.is_null() || cq_context.is_null() {
        return Err(Refusal::invalid("no place for the completion queue or its context"));
    }
    let Some(cookie) = object.channel.try_event() else {
        if object.channel.is_nonblocking() {
            return Err(Refusal::routine(libc::EAGAIN, "no event"));
        }
        return Ok(Step::Sleep(object.context.context().attendance(&object.channel)?));
    };
    let source = cookie as *mut ibv_cq;
    // SAFETY: the cookie of a CQ is its address, and the CQ cannot be freed before the event just taken is acknowledged. The places are
    // the caller's.
    unsafe {
        *cq = source;
        *cq_context = (*source).cq_context;
    }
    Ok(Step::Done)
}

/// After a sleep: a signal ends the wait unless its handler restarts system calls.
pub(crate) fn slept(errno: c_int) -> Verb<c_int> {
    match errno {
        0 => Ok(0),
        libc::EINTR if handlers_restart() => Ok(0),
        libc::EINTR => Err(Refusal::routine(libc::EINTR, "a signal came")),
        errno => {
            Err(Refusal::new(errno, format!("cannot wait for an event: {}", std::io::Error::from_raw_os_error(errno))))
        }
    }
}

/// `ibv_get_cq_event(3)`: blocks unless the program made the descriptor non-blocking. A cancellation point, as read(2) is.
///
/// # Safety
///
/// The contract of the C function: pointers are NULL or point to live objects of their type.
// SAFETY: the name is the C library's own, and is defined once: symbols.in lists it, the link would report a second.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    const NAME: &str = "ibv_get_cq_event";
    // SAFETY: the caller is the program.
    unsafe { cancel::point() };
    loop {
        // SAFETY: by the contract above.
        match enter::<Steps<_>>(NAME, || unsafe { next(channel, cq, cq_context) }) {
            None => return -1,
            Some(Step::Done) => return 0,
            Some(Step::Sleep(attendance)) => {
                let (mut polled, longest) = attendance.polled();
                // SAFETY: as above. A thread that ends here drops `attendance`, which gives back its seat at the lane.
                let errno = unsafe { cancel::sleep(&mut polled, longest) };
                let go_on = enter::<MinusOne>(NAME, || {
                    attendance.woken(&polled);
                    drop(attendance);
                    slept(errno)
                });
                if go_on != 0 {
                    return go_on;
                }
            }
        }
    }
}

/// Do all of the program's signal handlers restart system calls? Which of them ran is not told, so one that does not decides.
fn handlers_restart() -> bool {
    /// The kernel's signals, 1 to 64.
    const SIGNALS: std::ops::RangeInclusive<c_int> = 1..=64;
    // The card's own handlers of memory faults are no reason to end a wait.
    const FAULTS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
    SIGNALS.filter(|signal| !FAULTS.contains(signal)).all(|signal| {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: only asks; the place is ours. A signal that cannot be asked for leaves the zeros: no handler.
        let action = unsafe {
            libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        let has_handler = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
        !has_handler || action.sa_flags & libc::SA_RESTART != 0
    })
}

verb! {
    /// `ibv_create_comp_channel(3)`.
    fn ibv_create_comp_channel(context: *mut ibv_context) -> Pointer<ibv_comp_channel> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        let channel = context.context().create_comp_channel()?;
        let c = ibv_comp_channel { context: context.as_ptr(), fd: channel.fd(), refcnt: 0 };
        ChannelObject::publish(|_| Ok(ChannelObject { c: Shared::new(c), channel, context }))
    }

    /// `ibv_destroy_comp_channel(3)`: `EBUSY` while a CQ uses it.
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> Status {
        // SAFETY: by the contract of the verb.
        let users = unsafe { ChannelObject::of(channel) }?.users();
        if users > 0 {
            return Err(Refusal::new(libc::EBUSY, format!("{users} completion queues still use the channel")));
        }
        // SAFETY: nothing uses it, and the program has no use for the pointer any more.
        drop(unsafe { ChannelObject::reclaim(channel) });
        Ok(())
    }

    /// `ibv_ack_cq_events(3)`.
    fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: c_uint) -> Void {
        // SAFETY: by the contract of the verb.
        if unsafe { CqObject::of(cq) }?.context.is_stale() {
            // In a forked child nobody waits for it, and the mutex may be held for ever.
            return Ok(());
        }
        // SAFETY: the counter lies in the live CQ.
        unsafe { acknowledged!(cq, comp_events_completed).add(nevents) };
        Ok(())
    }
}
