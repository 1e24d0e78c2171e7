//! Memory whose mapping tests change under the library.

#![allow(dead_code, reason = "each test binary uses some of it")]

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

/// Bytes of a page on every system the tests run on.
pub(crate) const PAGE: usize = 4096;

/// A mapping of whole pages, used only by address.
pub(crate) struct Map {
    addr: usize,
    len: usize,
    file: Option<File>,
}

impl Map {
    /// Private anonymous memory, zeroed.
    pub(crate) fn anonymous(pages: usize) -> Map {
        Map::new(pages, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None)
    }

    /// A shared mapping of a file in memory that can be truncated.
    pub(crate) fn file(pages: usize) -> Map {
        // SAFETY: the name is a C string.
        let fd = unsafe { libc::memfd_create(c"ferroce-test".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0, "memfd_create: {}", std::io::Error::last_os_error());
        // SAFETY: the call succeeded; nobody else has the descriptor.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len((pages * PAGE) as u64).expect("a file in memory grows");
        Map::new(pages, libc::MAP_SHARED, Some(file))
    }

    fn new(pages: usize, flags: i32, file: Option<File>) -> Map {
        let (len, fd) = (pages * PAGE, file.as_ref().map_or(-1, |file| file.as_raw_fd()));
        // SAFETY: a new mapping at an address that the kernel chooses.
        let addr = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
        assert_ne!(addr, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        Map { addr: addr as usize, len, file }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.addr as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Takes pages away. They stay reserved by nobody: tests that map in other threads use [`Map::protect`] instead.
    pub(crate) fn unmap(&self, pages: Range<usize>) {
        // SAFETY: whole pages of this mapping, which holds no Rust object.
        let result = unsafe { libc::munmap(self.page(pages.start), pages.len() * PAGE) };
        assert_eq!(result, 0);
    }

    /// Maps fresh anonymous pages over the old ones, in one step.
    pub(crate) fn replace(&self, pages: Range<usize>, protection: i32) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: as in `unmap`.
        let addr = unsafe { libc::mmap(self.page(pages.start), pages.len() * PAGE, protection, flags, -1, 0) };
        assert_ne!(addr, libc::MAP_FAILED);
    }

    pub(crate) fn protect(&self, pages: Range<usize>, protection: i32) {
        // SAFETY: as in `unmap`.
        let result = unsafe { libc::mprotect(self.page(pages.start), pages.len() * PAGE, protection) };
        assert_eq!(result, 0);
    }

    /// Truncates the file behind the mapping to some pages, or grows it again.
    pub(crate) fn truncate(&self, pages: usize) {
        let file = self.file.as_ref().expect("the mapping has a file");
        file.set_len((pages * PAGE) as u64).expect("a file in memory can be resized");
    }

    /// Copies bytes out, by the test's own access.
    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: inside the mapping, whose pages the test left readable.
        unsafe { ptr::copy_nonoverlapping((self.addr + offset) as *const u8, bytes.as_mut_ptr(), len) };
        bytes
    }

    /// Copies bytes in, by the test's own access.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        // SAFETY: inside the mapping, whose pages the test left writable.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), (self.addr + offset) as *mut u8, bytes.len()) };
    }

    fn page(&self, index: usize) -> *mut libc::c_void {
        assert!(index * PAGE <= self.len);
        (self.addr + index * PAGE) as *mut libc::c_void
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; pages that are gone already do not matter.
        unsafe { libc::munmap(self.addr as *mut libc::c_void, self.len) };
    }
}
