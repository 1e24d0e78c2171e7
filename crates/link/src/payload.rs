//! Where the payload of a train comes from, piece by piece.

use ferroce_transport::{Payload, Span, Train};

/// A run of payload bytes.
pub(crate) enum Piece<'a> {
    /// Memory of the program, to be reached through `ferroce_core::mem`.
    Memory { addr: u64, len: usize },
    /// Bytes that were copied when they were posted.
    Bytes(&'a [u8]),
}

/// What is left of a train's payload.
pub(crate) enum Source<'a> {
    Spans { first: Span, rest: &'a [Span] },
    Bytes(&'a [u8]),
}

impl<'a> Source<'a> {
    /// # Panics
    /// If the train contradicts itself: its packets do not make its length, or its payload has fewer bytes.
    pub(crate) fn new(train: &'a Train) -> Source<'a> {
        let (len, mtu, packets) = (train.len as usize, train.mtu as usize, train.packets as usize);
        assert!(
            packets == 1 || packets > 1 && train.tail.is_some() && (packets - 1) * mtu < len && len <= packets * mtu,
            "a train of {packets} packets of {mtu} bytes does not make {len} bytes"
        );
        let spans = match &train.payload {
            Payload::Gather(spans) => spans.as_slice(),
            Payload::Copy(span) | Payload::Lent(span) => std::slice::from_ref(span),
            Payload::Inline(bytes, start) => return Source::Bytes(&bytes[*start as usize..][..len]),
        };
        let have: usize = spans.iter().map(|span| span.len as usize).sum();
        assert!(have >= len, "a train of {len} bytes has {have} bytes of payload");
        Source::Spans { first: Span { addr: 0, len: 0 }, rest: spans }
    }

    /// Passes over bytes.
    ///
    /// # Panics
    /// If fewer are left.
    pub(crate) fn skip(&mut self, bytes: u32) {
        let mut left = bytes as usize;
        while left > 0 {
            left -= match self.next(left) {
                Piece::Memory { len, .. } => len,
                Piece::Bytes(bytes) => bytes.len(),
            };
        }
    }

    /// Takes the next piece, of at most `limit` bytes and at least one.
    ///
    /// # Panics
    /// If nothing is left, or `limit` is 0.
    pub(crate) fn next(&mut self, limit: usize) -> Piece<'a> {
        match self {
            Source::Spans { first, rest } => {
                while first.len == 0 {
                    let (next, others) = rest.split_first().expect("the payload's length was checked");
                    (*first, *rest) = (*next, others);
                }
                let len = limit.min(first.len as usize);
                let addr = first.addr;
                *first = Span { addr: addr + len as u64, len: first.len - len as u32 };
                Piece::Memory { addr, len }
            }
            Source::Bytes(bytes) => {
                let (piece, left) = bytes.split_at(limit.min(bytes.len()));
                *bytes = left;
                Piece::Bytes(piece)
            }
        }
    }
}
