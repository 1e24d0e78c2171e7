//! Completion channels and their events.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use crate::abi::{ibv_comp_channel, ibv_context, ibv_cq};
use crate::context::{ContextObject, ContextRef};
use crate::cq::CqObject;
use crate::entry::{MinusOne, Pointer, Refusal, Status, Void, verb};
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

impl ChannelObject {
    /// Runs the card until an event is there, instead of sleeping in read(2): a packet then wakes one thread instead of two. Keeps
    /// the manners of that read(2): a non-blocking descriptor is left alone, and a signal ends the wait unless its handler
    /// restarts system calls.
    fn wait(&self) -> Result<(), Refusal> {
        while !self.channel.is_readable() && !self.channel.is_nonblocking() {
            match self.context.context().attend(self.channel.as_fd()) {
                Ok(()) => {}
                Err(error) if error.errno() == libc::EINTR => {
                    if !handlers_restart() {
                        return Err(Refusal::routine(libc::EINTR, "a signal came"));
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
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

/// An error of the operating system while waiting: `EAGAIN` on a non-blocking descriptor is the ordinary answer.
pub(crate) fn waiting(error: &std::io::Error) -> Refusal {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    match errno {
        libc::EAGAIN | libc::EINTR => Refusal::routine(errno, "no event"),
        _ => Refusal::new(errno, format!("cannot read the next event: {error}")),
    }
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

    /// `ibv_get_cq_event(3)`: blocks unless the program made the descriptor non-blocking.
    fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        cq_context: *mut *mut c_void,
    ) -> MinusOne {
        // SAFETY: by the contract of the verb.
        let channel = unsafe { ChannelObject::of(channel) }?;
        if cq.is_null() || cq_context.is_null() {
            return Err(Refusal::invalid("no place for the completion queue or its context"));
        }
        channel.wait()?;
        let source = channel.channel.next_event().map_err(|error| waiting(&error))? as *mut ibv_cq;
        // SAFETY: the cookie of a CQ is its address, and the CQ cannot be freed before the event just taken is acknowledged. The
        // places are the caller's.
        unsafe {
            *cq = source;
            *cq_context = (*source).cq_context;
        }
        Ok(0)
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
