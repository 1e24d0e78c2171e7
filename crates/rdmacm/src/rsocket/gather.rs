//! Bytes of the program that are to be sent, from one place or several, taken in order.

use std::marker::PhantomData;
use std::ptr;

use libc::iovec;

/// The rest of what is to be sent.
pub(super) struct Gather<'a> {
    pieces: &'a [iovec],
    /// In the first piece.
    offset: usize,
    left: usize,
    /// The bytes are the program's, and live during the call.
    lifetime: PhantomData<&'a [u8]>,
}

impl<'a> Gather<'a> {
    pub(super) fn empty() -> Gather<'static> {
        Gather { pieces: &[], offset: 0, left: 0, lifetime: PhantomData }
    }

    /// # Safety
    ///
    /// The pieces are readable while it lives. `left` is their length in all.
    pub(super) unsafe fn new(pieces: &'a [iovec], left: usize) -> Gather<'a> {
        Gather { pieces, offset: 0, left, lifetime: PhantomData }
    }

    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// Takes the next `len` bytes if they lie together.
    pub(super) fn contiguous(&mut self, len: usize) -> Option<*const u8> {
        self.skip_empty();
        let piece = self.pieces.first()?;
        if piece.iov_len - self.offset < len {
            return None;
        }
        let start = piece.iov_base.cast_const().cast::<u8>().wrapping_add(self.offset);
        self.offset += len;
        self.left -= len;
        Some(start)
    }

    /// Takes as many bytes as there is room for; there are as many.
    pub(super) fn copy_to(&mut self, to: &mut [u8]) {
        let mut done = 0;
        while done < to.len() {
            self.skip_empty();
            let piece = &self.pieces[0];
            let len = (piece.iov_len - self.offset).min(to.len() - done);
            let start = self.contiguous(len).expect("no more than the piece has");
            // SAFETY: readable by the contract of `new`; the target is no memory of the program.
            unsafe { ptr::copy_nonoverlapping(start, to[done..].as_mut_ptr(), len) };
            done += len;
        }
    }

    fn skip_empty(&mut self) {
        while let [first, rest @ ..] = self.pieces
            && first.iov_len == self.offset
        {
            self.pieces = rest;
            self.offset = 0;
        }
    }
}
