//! A forked child inherits ids and event channels, and can do nothing with them: they are refused, so that the parent is not disturbed.
//! (Their descriptors are the parent's, too: an event that the child took or made would be the parent's.) It can make its own.
//!
//! A thread may fork at any moment while others use the library. What belongs to an object is not looked at in the child; what belongs to
//! the process (tables of ids, of devices, of rsockets) must be consistent and open there. So the thread that forks takes the process's
//! locks before, and lets go of them after. None of them is held while something waits for a fork. Those of `libibverbs.so.1` come after
//! ours, as they do in all calls: its handlers were there first, and what comes last is called first.

use std::cell::RefCell;
use std::ffi::c_int;

use crate::entry::{Call, Refusal};
use crate::{device, id, rsocket};

/// Refuses what another process made. `what` is its kind.
pub(crate) fn check_process(pid: u32, what: &str) -> Call<()> {
    if pid == std::process::id() {
        return Ok(());
    }
    let sentence = format!("the {what} belongs to the parent process: RDMA objects do not survive fork");
    Err(Refusal::new(libc::EIO, sentence))
}

/// What a thread holds while it forks.
struct Held {
    _rsockets: Box<dyn Guard>,
    _devices: Box<dyn Guard>,
    ids: id::Table,
}

/// Something that lets go when it is dropped.
pub(crate) trait Guard {}

impl<T> Guard for T {}

thread_local! {
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

extern "C" fn before() {
    let held = Held { _rsockets: rsocket::hold(), _devices: device::hold(), ids: id::Table::hold() };
    // In a thread that is ending there is no place left to remember: then its fork is as it was without us.
    let _ = HELD.try_with(|place| place.replace(Some(held)));
}

extern "C" fn after_in_parent() {
    let _ = HELD.try_with(RefCell::take);
}

extern "C" fn after_in_child() {
    let held = HELD.try_with(RefCell::take).ok().flatten();
    if let Some(mut held) = held {
        // The numbers of the parent's ids mean nothing here.
        held.ids.clear();
    }
}

/// Runs when the library is loaded, when no thread of the program can know it yet.
extern "C" fn on_load() {
    // SAFETY: the handlers wait for nothing but short critical sections of this library, and for devices being opened, in all of which
    // nobody forks; in the child they let go of what this thread took. They cannot go away: the library is never unloaded
    // (-z nodelete). The call fails only without memory; then a fork is as it was without us.
    let _: c_int = unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
}

#[used]
// SAFETY: the section holds pointers to functions that the dynamic loader calls with arguments that this one does not look at.
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;
