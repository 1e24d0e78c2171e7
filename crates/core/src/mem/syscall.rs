//! Access by system calls: the kernel tells a fault by EFAULT. Slow, but it works whatever the program does with its signals.

use super::Fault;

/// Copies `data` to the memory at `addr`.
pub(super) fn write(addr: u64, data: &[u8]) -> Result<(), Fault> {
    copy(addr, data.as_ptr().cast_mut(), data.len(), libc::process_vm_writev)
}

/// Copies the memory at `addr` to `buffer`.
pub(super) fn read(addr: u64, buffer: &mut [u8]) -> Result<(), Fault> {
    copy(addr, buffer.as_mut_ptr(), buffer.len(), libc::process_vm_readv)
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

fn copy(addr: u64, ours: *mut u8, len: usize, transfer: Transfer) -> Result<(), Fault> {
    let mut done = 0;
    while done < len {
        let left = len - done;
        let local = libc::iovec { iov_base: ours.wrapping_add(done).cast(), iov_len: left };
        let remote = libc::iovec { iov_base: (addr as usize + done) as *mut libc::c_void, iov_len: left };
        // SAFETY: `local` lies in the caller's buffer, which is borrowed for as long as the call; `remote` is the memory that the
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

/// Checks that a word can be written, without changing it.
pub(super) fn probe_word(addr: u64) -> Result<(), Fault> {
    assert!(addr.is_multiple_of(8), "atomics are aligned");
    let ours = 0u32;
    // Operation: add 0; condition: old value equals 0. Wakes nobody but waiters of this word, who must expect that.
    let operation = libc::FUTEX_OP_ADD << 28 | libc::FUTEX_OP_CMP_EQ << 24;
    // SAFETY: FUTEX_WAKE_OP adds 0 to the word (atomically) and touches nothing else; the kernel checks that it is writable.
    let result = unsafe {
        libc::syscall(
            libc::SYS_futex,
            &ours,
            libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG,
            0,
            0usize,
            addr as usize,
            operation,
        )
    };
    if result < 0 { Err(Fault) } else { Ok(()) }
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
