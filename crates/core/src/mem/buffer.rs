//! Memory for programs in Rust that own their buffers.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use super::{RawRegion, load, store};

/// Page-aligned memory that the card may write at any moment. Nobody gets a reference into it: bytes are copied in and out, so a
/// peer's WRITE is a race of data, never undefined behaviour.
#[derive(Debug)]
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is only reached through `load` and `store`, which are made for memory that others change meanwhile.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

const PAGE: usize = 4096;

impl Buffer {
    /// `len` zero bytes.
    ///
    /// # Panics
    /// If `len` is 0 or no address space is left, as for a `Vec`.
    pub fn new(len: usize) -> Buffer {
        assert!(len > 0, "a buffer has at least one byte");
        let layout = Buffer::layout(len);
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Buffer { start, len }
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, PAGE).expect("a length below isize::MAX")
    }

    /// Address of the first byte, as work requests and peers name it.
    pub fn addr(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a buffer has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The memory for registration.
    pub(crate) fn region(&self) -> RawRegion {
        // SAFETY: only `load` and `store` reach the memory; they expect it to change.
        unsafe { RawRegion::new(self.addr() as usize, self.len) }
    }

    /// Copies bytes in at `offset`.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        store(self.addr() + offset as u64, bytes, false).expect("a buffer's own memory is mapped");
    }

    /// Copies bytes out from `offset`.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.check(offset, bytes.len());
        load(self.addr() + offset as u64, bytes).expect("a buffer's own memory is mapped");
    }

    fn check(&self, offset: usize, len: usize) {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {offset} do not fit into a buffer of {}", self.len);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), Buffer::layout(self.len)) };
    }
}

#[cfg(test)]
mod tests {
    use super::Buffer;

    #[test]
    fn what_is_written_is_read() {
        let buffer = Buffer::new(10_000);
        buffer.write(4_090, b"across a page");
        let mut back = [0; 13];
        buffer.read(4_090, &mut back);
        assert_eq!(&back, b"across a page");
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn a_range_past_the_end_panics() {
        Buffer::new(16).write(8, &[0; 9]);
    }
}
