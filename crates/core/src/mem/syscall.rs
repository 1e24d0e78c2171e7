//! Access by system calls: the kernel tells a fault by EFAULT. Slow, but it works whatever the program does with its signals.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use super::Fault;

/// Why a copy was not made.
enum Refusal {
    Fault,
    /// A sandbox forbids the system call (old seccomp profiles of containers do).
    Forbidden,
}

/// Copies `data` to the memory at `addr`. With `last` the last word goes by a call of its own, after the others.
pub(super) fn write(addr: u64, data: &[u8], last: bool) -> Result<(), Fault> {
    let (body, end) = data.split_at(if last { last_word(addr, data.len()) } else { data.len() });
    write_piece(addr, body)?;
    fence(Ordering::Release);
    write_piece(addr + body.len() as u64, end)
}

/// Offset of the last piece of `len` bytes at `addr` that lies in one aligned 8-byte word.
fn last_word(addr: u64, len: usize) -> usize {
    let end = addr + len as u64;
    let word = end.saturating_sub(1) & !7;
    word.saturating_sub(addr) as usize
}

fn write_piece(addr: u64, data: &[u8]) -> Result<(), Fault> {
    // SAFETY: `process_vm_writev` only reads the slice, which is borrowed.
    match unsafe { copy(addr, data.as_ptr().cast_mut(), data.len(), libc::process_vm_writev) } {
        Ok(()) => Ok(()),
        Err(Refusal::Fault) => Err(Fault),
        #[cfg(target_arch = "x86_64")]
        Err(Refusal::Forbidden) => super::direct::write(addr, data),
        #[cfg(not(target_arch = "x86_64"))]
        Err(Refusal::Forbidden) => Err(Fault),
    }
}

/// Copies `len` bytes of the memory at `addr` to `buffer`.
///
/// # Safety
/// `buffer` is valid for writes of `len` bytes.
pub(super) unsafe fn read(addr: u64, buffer: *mut u8, len: usize) -> Result<(), Fault> {
    // SAFETY: as the caller vouches.
    match unsafe { copy(addr, buffer, len, libc::process_vm_readv) } {
        Ok(()) => Ok(()),
        Err(Refusal::Fault) => Err(Fault),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as the caller vouches.
        Err(Refusal::Forbidden) => unsafe { super::direct::read(addr, buffer, len) },
        #[cfg(not(target_arch = "x86_64"))]
        Err(Refusal::Forbidden) => Err(Fault),
    }
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
unsafe fn copy(addr: u64, ours: *mut u8, len: usize, transfer: Transfer) -> Result<(), Refusal> {
    let mut done = 0;
    while done < len {
        let left = len - done;
        let local = libc::iovec { iov_base: ours.wrapping_add(done).cast(), iov_len: left };
        let remote = libc::iovec { iov_base: (addr as usize + done) as *mut libc::c_void, iov_len: left };
        // SAFETY: `local` is what the caller vouches for; `remote` is the memory that the module's invariant lets us use, and the
        // kernel checks that it is there.
        let count = unsafe { transfer(libc::getpid(), &local, 1, &remote, 1, 0) };
        // A short count means that a later page faulted; the next round tells whether it still does.
        if count <= 0 {
            return Err(refusal(io::Error::last_os_error()));
        }
        done += count as usize;
    }
    Ok(())
}

fn refusal(error: io::Error) -> Refusal {
    if !matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::ENOSYS)) {
        return Refusal::Fault;
    }
    static TOLD: AtomicBool = AtomicBool::new(false);
    if !TOLD.swap(true, Ordering::Relaxed) {
        log::warn!(
            "the program replaced the SIGSEGV or SIGBUS handler or blocks the signal, and process_vm_readv is forbidden ({error}): \
             memory that vanishes under a transfer will be a fault of the program"
        );
    }
    Refusal::Forbidden
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
