//! Memory of another process of this host, fetched by the kernel (`process_vm_readv(2)`): one copy, whatever the other does meanwhile.

use std::ffi::c_void;
use std::io;

/// Why nothing was fetched, or only a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfetched {
    /// Some of the memory is gone, theirs or ours.
    #[error("some of the memory is gone")]
    Fault,
    /// There is no such process, or the system does not let this one read its memory (ptrace rules, a sandbox).
    #[error("the system does not give the other process's memory: {}", io::Error::from_raw_os_error(*.0))]
    Refused(i32),
}

/// Copies `len` bytes at `from` in the process `pid` to `to` in this one, and then reads the word at `mark` there: who finds it as it
/// should be knows that the bytes were of the process that it belongs to, and that it still had them.
///
/// `to` is memory as the module's invariant has it.
///
/// # Errors
/// See [`Unfetched`]; the memory at `to` may have been written.
pub fn fetch(pid: i32, from: u64, to: u64, len: usize, mark: u64) -> Result<u64, Unfetched> {
    // SAFETY: what is at `to` may be written, as the module's invariant has it; the kernel checks that it is there.
    unsafe { copy(pid, from, to as *mut u8, len, mark) }
}

/// [`fetch`] into a buffer.
///
/// # Errors
/// See [`Unfetched`].
pub fn fetch_into(pid: i32, from: u64, buffer: &mut [u8], mark: u64) -> Result<u64, Unfetched> {
    // SAFETY: a slice is valid for writes of its length.
    unsafe { copy(pid, from, buffer.as_mut_ptr(), buffer.len(), mark) }
}

/// # Safety
/// Whatever of the `len` bytes at `to` is mapped may be written; no reference to them is used meanwhile.
unsafe fn copy(pid: i32, from: u64, to: *mut u8, len: usize, mark: u64) -> Result<u64, Unfetched> {
    let mut word = 0u64;
    let ours = [vector(to.cast(), len), vector((&raw mut word).cast(), size_of::<u64>())];
    let theirs = [vector(from as *mut c_void, len), vector(mark as *mut c_void, size_of::<u64>())];
    // SAFETY: the kernel writes to `to`, as the caller vouches, and to a local; it checks the other process's addresses.
    let count = unsafe { libc::process_vm_readv(pid, ours.as_ptr(), 2, theirs.as_ptr(), 2, 0) };
    if count == (len + size_of::<u64>()) as isize {
        return Ok(word);
    }
    let error = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    // A short count: the next page is not there.
    Err(if count >= 0 || error == libc::EFAULT { Unfetched::Fault } else { Unfetched::Refused(error) })
}

fn vector(base: *mut c_void, len: usize) -> libc::iovec {
    libc::iovec { iov_base: base, iov_len: len }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;

    fn own() -> i32 {
        std::process::id() as i32
    }

    #[test]
    fn bytes_and_the_word_behind_them() {
        let (source, target) = (Buffer::new(3 << 12), Buffer::new(3 << 12));
        source.write(0, &[7; 3 << 12]);
        let mark = 0x1234_5678_9abc_def0_u64;
        let at = (&raw const mark) as u64;
        assert_eq!(fetch(own(), source.addr() + 5, target.addr() + 1, 9_000, at), Ok(mark));
        let mut read = vec![0; 3 << 12];
        target.read(0, &mut read);
        assert!(read[1..=9_000].iter().all(|byte| *byte == 7) && read[0] == 0 && read[9_001] == 0);
        let mut buffer = [0; 100];
        assert_eq!(fetch_into(own(), source.addr(), &mut buffer, at), Ok(mark));
        assert_eq!(buffer, [7; 100]);
    }

    #[test]
    fn memory_and_processes_that_are_not_there() {
        let (source, mark) = (Buffer::new(4096), 1u64);
        let at = (&raw const mark) as u64;
        let mut buffer = [0; 64];
        assert_eq!(fetch_into(own(), 64, &mut buffer, at), Err(Unfetched::Fault));
        assert_eq!(fetch_into(own(), source.addr(), &mut buffer, 64), Err(Unfetched::Fault), "the word is not there");
        assert_eq!(fetch(own(), source.addr(), 64, 64, at), Err(Unfetched::Fault), "there is no room for them");
        // Above every limit of process numbers.
        assert_eq!(fetch_into(1 << 30, source.addr(), &mut buffer, at), Err(Unfetched::Refused(libc::ESRCH)));
    }
}
