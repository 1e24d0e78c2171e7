//! Address space that the card maps itself.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that [`zeros`] has: as many as a scatter/gather element can name.
const ZEROS_LEN: usize = 1 << 32;

/// Where the zeros are; 0: nobody needed them yet.
static ZEROS: AtomicU64 = AtomicU64::new(0);

/// Address of 4 GiB that read as zeros. They cost address space only, and cannot be written: whoever writes asks [`is_zeros`].
///
/// # Errors
/// ENOMEM: no address space is left.
pub(crate) fn zeros() -> io::Result<u64> {
    let known = ZEROS.load(Ordering::Acquire);
    if known != 0 {
        return Ok(known);
    }
    let (protection, flags) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping, at an address that the system chooses.
    let fresh = unsafe { libc::mmap(ptr::null_mut(), ZEROS_LEN, protection, flags, -1, 0) };
    if fresh == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    match ZEROS.compare_exchange(0, fresh as u64, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(fresh as u64),
        Err(first) => {
            // SAFETY: mapped above, and nobody was told.
            unsafe { libc::munmap(fresh, ZEROS_LEN) };
            Ok(first)
        }
    }
}

/// Is it an address of the zeros, to which writes go nowhere?
#[inline]
pub fn is_zeros(addr: u64) -> bool {
    let start = ZEROS.load(Ordering::Relaxed);
    start != 0 && addr.wrapping_sub(start) < ZEROS_LEN as u64
}
