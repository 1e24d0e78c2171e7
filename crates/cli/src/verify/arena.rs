//! Memory with a model of what it must hold.

use std::fmt;
use std::sync::Arc;

use ferroce::{Pd, Sge};
use serde::{Deserialize, Serialize};

use crate::rig::Registered;

/// Registered memory whose every byte is known. Bytes that no operation may touch keep their background: each of them is
/// a guard byte.
pub(super) struct Arena {
    memory: Registered,
    model: Vec<u8>,
}

/// A byte that is not what it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Mismatch {
    pub(super) offset: u64,
    pub(super) found: u8,
    pub(super) expected: u8,
    /// How many bytes are wrong.
    pub(super) wrong: u64,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes are wrong, the first at offset {}: {:#04x} instead of {:#04x}",
            self.wrong, self.offset, self.found, self.expected
        )
    }
}

impl Arena {
    /// `len` bytes, a multiple of 8.
    pub(super) fn new(pd: &Arc<Pd>, len: usize) -> ferroce::Result<Arena> {
        assert!(len.is_multiple_of(8), "an arena is made of words");
        Ok(Arena { memory: Registered::new(pd, len)?, model: vec![0; len] })
    }

    pub(super) fn registered(&self) -> &Registered {
        &self.memory
    }

    /// Address of the byte at `offset`.
    pub(super) fn address(&self, offset: usize) -> u64 {
        self.memory.area().addr + offset as u64
    }

    /// Fills everything with the background of `seed`.
    pub(super) fn reset(&mut self, seed: u64) {
        for (index, chunk) in self.model.chunks_exact_mut(8).enumerate() {
            chunk.copy_from_slice(&background(seed, index * 8).to_ne_bytes());
        }
        self.memory.write(0, &self.model);
    }

    /// Puts `data` at `offset`, in the memory and in the model.
    pub(super) fn put(&mut self, offset: usize, data: &[u8]) {
        self.expect(offset, data);
        self.memory.write(offset, data);
    }

    /// From now on the memory must hold `data` at `offset`.
    pub(super) fn expect(&mut self, offset: usize, data: &[u8]) {
        self.model[offset..offset + data.len()].copy_from_slice(data);
    }

    /// From now on the memory may hold anything in this range: it is taken as it is.
    pub(super) fn accept(&mut self, offset: usize, length: usize) {
        let present = self.memory.copy(offset, length);
        self.expect(offset, &present);
    }

    /// Elements for these pieces of memory.
    pub(super) fn sges(&self, pieces: &[(usize, usize)]) -> Vec<Sge> {
        pieces.iter().map(|&(offset, length)| self.memory.sge(offset, length as u32)).collect()
    }

    /// What the memory must hold.
    pub(super) fn model(&self) -> &[u8] {
        &self.model
    }

    /// Compares every byte.
    pub(super) fn check(&self) -> Result<(), Mismatch> {
        self.check_partial(&self.model)
    }

    /// Compares every byte; it may also be as in `before`, an earlier [`Arena::model`].
    pub(super) fn check_partial(&self, before: &[u8]) -> Result<(), Mismatch> {
        let found = self.memory.copy(0, self.model.len());
        compare(&found, &self.model, before)
    }

    /// Bytes that [`Arena::check`] looks at.
    pub(super) fn len(&self) -> usize {
        self.model.len()
    }
}

/// Each byte of `found` must be that of `expected` or that of `before`.
fn compare(found: &[u8], expected: &[u8], before: &[u8]) -> Result<(), Mismatch> {
    if found == expected {
        return Ok(());
    }
    let bytes = found.iter().zip(expected).zip(before).enumerate();
    let mut wrong = bytes.filter(|(_, ((found, expected), before))| found != expected && found != before);
    let Some((offset, ((&found, &expected), _))) = wrong.next() else { return Ok(()) };
    Err(Mismatch { offset: offset as u64, found, expected, wrong: 1 + wrong.count() as u64 })
}

/// The word at `offset` after a reset.
pub(super) fn background(seed: u64, offset: usize) -> u64 {
    mix(seed ^ (offset as u64 / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The data of a message: `size` bytes that depend on every bit of `seed`.
pub(super) fn pattern(seed: u64, size: usize) -> Vec<u8> {
    let words =
        (0..size.div_ceil(8) as u64).map(|index| mix(seed.wrapping_add(index).wrapping_mul(0xd134_2543_de82_ef95)));
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.truncate(size);
    bytes
}

/// The mixing function of splitmix64 (Steele, Lea, Flood 2014): every bit of the input changes half of the output.
pub(super) fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_of_a_message_is_right_and_a_third_value_is_not() {
        let (before, expected) = ([1, 1, 1, 1], [1, 2, 3, 1]);
        for right in [[1, 1, 1, 1], [1, 2, 1, 1], [1, 1, 3, 1], [1, 2, 3, 1]] {
            assert_eq!(compare(&right, &expected, &before), Ok(()));
        }
        let mismatch = Mismatch { offset: 2, found: 2, expected: 3, wrong: 2 };
        assert_eq!(compare(&[1, 2, 2, 9], &expected, &before), Err(mismatch));
        assert!(compare(&[1, 2, 1, 1], &expected, &expected).is_err(), "nothing may be missing");
    }
}
