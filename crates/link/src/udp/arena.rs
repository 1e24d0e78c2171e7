//! Memory for what a link adds to packets or copies: headers, small or changing payload, pad, ICRC.

/// A buffer of fixed size and place that fills up between two flushes.
pub(super) struct Arena {
    bytes: Box<[u8]>,
    used: usize,
}

impl Arena {
    pub(super) fn new(size: usize) -> Arena {
        Arena { bytes: vec![0; size].into_boxed_slice(), used: 0 }
    }

    /// Bytes in use.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Bytes left.
    pub(super) fn room(&self) -> usize {
        self.bytes.len() - self.used
    }

    /// Takes the next `len` bytes. What is in them is left over from earlier use.
    ///
    /// # Panics
    /// If there are fewer: the caller asks for room before it starts a train.
    pub(super) fn take(&mut self, len: usize) -> &mut [u8] {
        let start = self.used;
        self.used += len;
        &mut self.bytes[start..self.used]
    }

    /// The bytes from a place on.
    pub(super) fn since(&mut self, start: usize) -> &mut [u8] {
        &mut self.bytes[start..self.used]
    }

    /// Gives back everything from a place on.
    pub(super) fn rewind(&mut self, used: usize) {
        assert!(used <= self.used, "an arena rewinds only backwards");
        self.used = used;
    }

    /// The address of a place, for the system to read from.
    pub(super) fn addr(&self, at: usize) -> usize {
        self.bytes.as_ptr().expose_provenance() + at
    }

    /// The `N` bytes that end at an address given out by [`Arena::addr`].
    ///
    /// # Panics
    /// If they are not in the arena.
    pub(super) fn ending_at<const N: usize>(&mut self, addr: usize) -> &mut [u8; N] {
        let end = addr.checked_sub(self.addr(0)).expect("an address of the arena");
        self.bytes[..end].last_chunk_mut().expect("an address of the arena")
    }
}
