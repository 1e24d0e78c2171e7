//! The send buffer: bytes leave in the order in which they came, so places are taken and given back in a ring.

use crate::receive::Span;

#[derive(Debug)]
pub(crate) struct Ring {
    size: u32,
    /// Where the next byte goes.
    head: u32,
    used: u32,
}

impl Ring {
    pub(crate) fn new(size: u32) -> Ring {
        Ring { size, head: 0, used: 0 }
    }

    pub(crate) fn free(&self) -> u32 {
        self.size - self.used
    }

    /// Takes `len` bytes, no more than are free: one place, or two where it wraps.
    pub(crate) fn take(&mut self, len: u32) -> [Span; 2] {
        assert!(len <= self.free(), "{len} of {} free bytes", self.free());
        let first = len.min(self.size - self.head);
        let places = [Span { offset: self.head, len: first }, Span { offset: 0, len: len - first }];
        self.used += len;
        self.head = if first < len {
            len - first
        } else if self.head + len == self.size {
            0
        } else {
            self.head + len
        };
        places
    }

    /// The oldest bytes are no longer needed.
    pub(crate) fn give_back(&mut self, len: u32) {
        assert!(len <= self.used, "{len} of {} used bytes", self.used);
        self.used -= len;
    }
}
