//! How soon the system runs a thread that has just been woken.
#![allow(unsafe_code)]

use std::io;
use std::mem::{size_of, zeroed};

use libc::{c_int, c_uint};

/// The shortest slice that Linux grants.
const SHORTEST_NS: u64 = 100_000;

/// Asks for short slices for the calling thread. One that is woken then runs at once in place of another with longer slices, instead
/// of after that one's slice (milliseconds); its share of the core stays the same. Linux from 6.12 on knows this (`sched_setattr(2)`,
/// `sched_runtime` of a normal thread); older ones ignore it. Threads that are not scheduled normally are left alone.
///
/// # Errors
/// What `sched_getattr(2)` and `sched_setattr(2)` say: a sandbox may forbid them.
pub fn ask_for_short_slices() -> io::Result<()> {
    const THIS_THREAD: c_int = 0;
    const NO_FLAGS: c_uint = 0;
    // SAFETY: all fields are integers, for which zero is a value.
    let mut attr: libc::sched_attr = unsafe { zeroed() };
    let size = size_of::<libc::sched_attr>() as c_uint;
    // SAFETY: the system writes at most `size` bytes to `attr`, which has that many.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, THIS_THREAD, &raw mut attr, size, NO_FLAGS) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    if attr.sched_policy != libc::SCHED_OTHER as u32 {
        return Ok(());
    }
    attr.sched_runtime = SHORTEST_NS;
    // SAFETY: the system reads `attr.size` bytes of `attr`, which it set itself to no more than `size`.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, THIS_THREAD, &raw const attr, NO_FLAGS) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::ask_for_short_slices;

    #[test]
    fn any_thread_may_ask() {
        ask_for_short_slices().expect("an ordinary thread may");
        ask_for_short_slices().expect("and once more");
    }
}
