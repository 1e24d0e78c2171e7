//! Access by system calls: the kernel tells a fault by EFAULT. Slow, but it works whatever the program does with its signals.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::Fault;

/// Copies `data` to the memory at `addr`. With `last` the last word goes by a call of its own, after the others.
pub(super) fn write(addr: u64, data: &[u8], last: bool) -> Result<(), Fault> {
    let (body, end) = data.split_at(if last { last_word(addr, data.len()) } else { data.len() });
    // SAFETY: `process_vm_writev` only reads the slices, which are borrowed.
    unsafe {
        copy(addr, body.as_ptr().cast_mut(), body.len(), libc::process_vm_writev)?;
        fence(Ordering::Release);
        copy(addr + body.len() as u64, end.as_ptr().cast_mut(), end.len(), libc::process_vm_writev)
    }
}

/// Offset of the last piece of `len` bytes at `addr` that lies in one aligned 8-byte word.
fn last_word(addr: u64, len: usize) -> usize {
    let end = addr + len as u64;
    let word = end.saturating_sub(1) & !7;
    word.saturating_sub(addr) as usize
}

/// Copies `len` bytes of the memory at `addr` to `buffer`.
///
/// # Safety
/// `buffer` is valid for writes of `len` bytes.
pub(super) unsafe fn read(addr: u64, buffer: *mut u8, len: usize) -> Result<(), Fault> {
    // SAFETY: as the caller vouches.
    unsafe { copy(addr, buffer, len, libc::process_vm_readv) }
}

/// `process_vm_readv` or `process_vm_writev`.
type Transfer = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

/// # Safety
/// `ours` is valid for `len` bytes of what `transfer` does with it.
unsafe fn copy(addr: u64, ours: *mut u8, len: usize, transfer: Transfer) -> Result<(), Fault> {
    let mut done = 0;
    while done < len {
        let left = len - done;
        let local = libc::iovec { iov_base: ours.wrapping_add(done).cast(), iov_len: left };
        let remote = libc::iovec { iov_base: (addr as usize + done) as *mut libc::c_void, iov_len: left };
        // SAFETY: `local` is what the caller vouches for; `remote` is the memory that the
        // module's invariant lets us use, and the kernel checks that it is there.
        let count = unsafe { transfer(libc::getpid(), &local, 1, &remote, 1, 0) };
        // Short counts mean that a later page faulted; the next round tells whether it still does.
        if count <= 0 {
            return Err(Fault);
        }
        done += count as usize;
    }
    Ok(())
}

/// Compares and swaps the word at `addr`; gives the old value.
pub(super) fn compare_swap(addr: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
    let word = probe_word(addr)?;
    Ok(word.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst).unwrap_or_else(|old| old))
}

/// Adds to the word at `addr`; gives the old value.
pub(super) fn fetch_add(addr: u64, add: u64) -> Result<u64, Fault> {
    Ok(probe_word(addr)?.fetch_add(add, Ordering::SeqCst))
}

/// Checks that a word can be written, without changing it. The kernel has no atomics of 8 bytes to offer, so the caller does it
/// itself right after: the one access here that would crash if the memory went away in between.
fn probe_word<'a>(addr: u64) -> Result<&'a AtomicU64, Fault> {
    let ours = 0u32;
    // FUTEX_WAKE_OP with "add 0": an atomic write that changes nothing. It may wake waiters of this word, who must expect that.
    let operation = libc::FUTEX_OP_ADD << 28 | libc::FUTEX_OP_CMP_EQ << 24;
    let command = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel touches nothing but `ours`, which it does not change, and the word, which it checks to be writable.
    let result = unsafe { libc::syscall(libc::SYS_futex, &ours, command, 0, 0usize, addr as usize, operation) };
    if result < 0 {
        return Err(Fault);
    }
    // SAFETY: writable (just seen), a multiple of 8 (asserted by our callers' caller), and shared by the module's invariant. The
    // reference lives for one operation.
    Ok(unsafe { AtomicU64::from_ptr(addr as *mut u64) })
}

/// Whether every page of the range is mapped.
pub(super) fn is_mapped(addr: u64, len: u64) -> bool {
    // SAFETY: no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let first = addr / page * page;
    let Some(end) = addr.checked_add(len).and_then(|end| end.checked_next_multiple_of(page)) else { return false };
    if len == 0 {
        return true;
    }
    // SAFETY: MS_ASYNC starts nothing and changes nothing on Linux; it only walks the mappings and reports holes.
    unsafe { libc::msync(first as *mut libc::c_void, (end - first) as usize, libc::MS_ASYNC) == 0 }
}
