//! What messages consist of: slices of one table of random bytes, so that a byte out of place shows, and filling and comparing
//! cost no more than a copy.

use std::sync::LazyLock;

use crate::random::Random;

/// Bytes after which a pattern repeats: a prime, so that no packet boundary falls on the same place twice.
const PERIOD: usize = 65_521;

static TABLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut random = Random::new(0x0070_6174_7465_726e);
    let mut once: Vec<u8> = (0..PERIOD).map(|_| random.next() as u8).collect();
    once.extend_from_within(..);
    once
});

/// A sequence of bytes without end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pattern {
    start: u32,
}

impl Pattern {
    pub(crate) fn random(random: &mut Random) -> Pattern {
        Pattern { start: random.below(PERIOD as u64) as u32 }
    }

    /// The sequence from byte `offset` on.
    pub(crate) fn skip(self, offset: u32) -> Pattern {
        Pattern { start: ((u64::from(self.start) + u64::from(offset)) % PERIOD as u64) as u32 }
    }

    fn pieces(self, len: usize) -> impl Iterator<Item = &'static [u8]> {
        let (mut start, mut left) = (self.start as usize, len);
        std::iter::from_fn(move || {
            let len = left.min(PERIOD);
            left -= len;
            let piece = &TABLE[start..start + len];
            start = (start + len) % PERIOD;
            (len > 0).then_some(piece)
        })
    }

    pub(crate) fn fill(self, mut into: &mut [u8]) {
        for piece in self.pieces(into.len()) {
            let (now, later) = into.split_at_mut(piece.len());
            now.copy_from_slice(piece);
            into = later;
        }
    }

    pub(crate) fn bytes(self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes);
        bytes
    }

    pub(crate) fn matches(self, mut bytes: &[u8]) -> bool {
        self.pieces(bytes.len()).all(|piece| {
            let (now, later) = bytes.split_at(piece.len());
            bytes = later;
            now == piece
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_one_sequence_however_it_is_cut() {
        let pattern = Pattern { start: 65_000 };
        let whole = pattern.bytes(200_000);
        for (offset, len) in [(0, 1), (500, 70_000), (65_521, 65_521), (199_999, 1)] {
            assert!(pattern.skip(offset as u32).matches(&whole[offset..offset + len]));
        }
        assert!(!pattern.skip(1).matches(&whole[..64]), "one byte off is seen");
    }
}
