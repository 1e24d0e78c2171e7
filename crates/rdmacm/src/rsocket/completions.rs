//! A completion queue with a channel of its own, which tells of the next completion once it is armed.

use std::ffi::{c_int, c_void};
use std::ptr;

use ferroce_abi::{ibv_comp_channel, ibv_context, ibv_cq, ibv_wc};

use crate::entry::{Call, Refusal};
use crate::verbs;

/// Events that are acknowledged together.
const EVENTS_MAX: u32 = 1000;

/// See the module's text. It must outlive the queue pair that uses it.
pub(super) struct Completions {
    channel: *mut ibv_comp_channel,
    cq: *mut ibv_cq,
    /// An event comes with the next completion.
    armed: bool,
    /// Events taken and not acknowledged.
    events: u32,
}

impl Completions {
    /// For so many completions at once, in an open context. The channel does not block.
    pub(super) fn new(context: *mut ibv_context, entries: c_int) -> Call<Completions> {
        // SAFETY: an open context.
        let channel = unsafe { verbs::ibv_create_comp_channel(context) };
        if channel.is_null() {
            return Err(Refusal::last());
        }
        // SAFETY: as above, and the channel was just made.
        let cq = unsafe { verbs::ibv_create_cq(context, entries, ptr::null_mut(), channel, 0) };
        if cq.is_null() {
            let refusal = Refusal::last();
            // SAFETY: nobody uses it.
            unsafe { verbs::ibv_destroy_comp_channel(channel) };
            return Err(refusal);
        }
        let completions = Completions { channel, cq, armed: false, events: 0 };
        // SAFETY: the descriptor of a live channel.
        let result = unsafe { libc::fcntl(completions.fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        if result == 0 { Ok(completions) } else { Err(Refusal::last()) }
    }

    /// For a queue pair.
    pub(super) fn cq(&self) -> *mut ibv_cq {
        self.cq
    }

    /// Descriptor of the channel.
    pub(super) fn fd(&self) -> c_int {
        // SAFETY: live until dropped.
        unsafe { (*self.channel).fd }
    }

    /// Takes what has come: how many. None: the device is gone, or the process is a forked child.
    pub(super) fn take(&mut self, room: &mut [ibv_wc]) -> Option<usize> {
        // SAFETY: a live CQ; its context's table is filled; the room is the caller's.
        let count = unsafe {
            let poll = (*(*self.cq).context).ops.poll_cq.expect("libibverbs fills its table");
            poll(self.cq, room.len() as c_int, room.as_mut_ptr())
        };
        usize::try_from(count).ok()
    }

    /// From now on the descriptor becomes readable with the next completion.
    pub(super) fn arm(&mut self) {
        if self.armed {
            return;
        }
        // SAFETY: a live CQ; its context's table is filled.
        let result = unsafe {
            let request = (*(*self.cq).context).ops.req_notify_cq.expect("libibverbs fills its table");
            request(self.cq, 0)
        };
        self.armed = result == 0;
    }

    /// Takes the event, if there is one and nobody was faster.
    pub(super) fn disarm(&mut self) {
        let (mut cq, mut cookie): (*mut ibv_cq, *mut c_void) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live channel that does not block; places of ours.
        if unsafe { verbs::ibv_get_cq_event(self.channel, &raw mut cq, &raw mut cookie) } == 0 {
            self.armed = false;
            self.events += 1;
            if self.events >= EVENTS_MAX {
                self.acknowledge();
            }
        }
    }

    fn acknowledge(&mut self) {
        // SAFETY: a live CQ, and as many events as were taken.
        unsafe { verbs::ibv_ack_cq_events(self.cq, self.events) };
        self.events = 0;
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        self.acknowledge();
        // SAFETY: made by `new`; the queue pair that used them is gone.
        unsafe {
            verbs::ibv_destroy_cq(self.cq);
            verbs::ibv_destroy_comp_channel(self.channel);
        }
    }
}
