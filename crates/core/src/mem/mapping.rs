//! Address space that the card maps itself.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Fault, RawRegion, load, store};

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

/// A part of a file that is mapped for the card, shared with whoever has the file: of a dma-buf, or of whatever else can be mapped.
#[derive(Debug)]
pub struct Mapping {
    /// Address of the first page.
    page: usize,
    /// Bytes of all its pages.
    mapped: usize,
    /// Of the first byte in the first page.
    in_page: usize,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes of a file from `offset` on, also for writing if asked for.
    ///
    /// # Errors
    /// EINVAL: no bytes, or not all of them are in the file. What the system says: EACCES, for instance, if the file is open for reading only,
    /// ENODEV if it cannot be mapped.
    pub fn of_file(file: BorrowedFd<'_>, offset: u64, len: usize, writable: bool) -> io::Result<Mapping> {
        check_size(file, offset, len)?;
        let in_page = (offset % page_size() as u64) as usize;
        let mapped = len.checked_add(in_page).ok_or(io::ErrorKind::InvalidInput)?;
        let start = libc::off_t::try_from(offset - in_page as u64).map_err(|_| io::ErrorKind::InvalidInput)?;
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping, at an address that the system chooses.
        let page =
            unsafe { libc::mmap(ptr::null_mut(), mapped, protection, libc::MAP_SHARED, file.as_raw_fd(), start) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { page: page as usize, mapped, in_page, len })
    }

    /// Address of the first byte.
    pub fn addr(&self) -> usize {
        self.page + self.in_page
    }

    /// The memory for registration.
    pub(crate) fn region(&self) -> RawRegion {
        // SAFETY: nobody has a reference into the mapping; whoever else has the file shares its bytes with the card on purpose.
        unsafe { RawRegion::new(self.addr(), self.len) }
    }

    /// Copies bytes in at `offset`.
    ///
    /// # Errors
    /// [`Fault`]: the file became shorter.
    ///
    /// # Panics
    /// If the range is not inside.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Fault> {
        self.check(offset, bytes.len());
        store((self.addr() + offset) as u64, bytes, false)
    }

    /// Copies bytes out from `offset`.
    ///
    /// # Errors
    /// [`Fault`]: the file became shorter.
    ///
    /// # Panics
    /// If the range is not inside.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Fault> {
        self.check(offset, bytes.len());
        load((self.addr() + offset) as u64, bytes)
    }

    fn check(&self, offset: usize, len: usize) {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {offset} are not inside a mapping of {}", self.len);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `of_file`; keys to it, and so the card's use of it, ended before.
        unsafe { libc::munmap(self.page as *mut libc::c_void, self.mapped) };
    }
}

/// Are the bytes in the file? Files that do not tell their size (devices) say so when they are mapped.
fn check_size(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<()> {
    // SAFETY: numbers, of which zero is one.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is ours.
    if unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let tells = stat.st_size > 0 || stat.st_mode & libc::S_IFMT == libc::S_IFREG;
    let fits = offset.checked_add(len as u64).is_some_and(|end| !tells || end <= stat.st_size as u64);
    if len == 0 || !fits {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    Ok(())
}

/// Bytes of a page.
pub fn page_size() -> usize {
    // SAFETY: it only asks.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}
