//! Where choices come from: a seed, or the bytes of a fuzzer. The same code makes packets and operations from either.

/// A source of choices.
pub trait Source {
    /// Any number.
    fn u64(&mut self) -> u64;

    /// A number below `n`, which is not 0.
    fn below(&mut self, n: u32) -> u32;

    /// Nothing is left: every further choice is the first one.
    fn is_empty(&self) -> bool;

    /// Any number of 32 bits.
    fn u32(&mut self) -> u32 {
        self.u64() as u32
    }

    /// True once in `n` times.
    fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == n - 1
    }

    /// One of several.
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u32) as usize]
    }

    /// Bytes without meaning; their content is no choice.
    fn fill(&mut self, out: &mut [u8]) {
        let mut word = self.below(251) | 1;
        for byte in out {
            word = word.wrapping_mul(0x2c92_77b5).wrapping_add(0x3779);
            *byte = (word >> 16) as u8;
        }
    }
}

/// Choices from a seed: the same on every machine (splitmix64).
#[derive(Clone, Debug)]
pub struct Seed(u64);

impl Seed {
    /// The choices of one seed.
    pub fn new(seed: u64) -> Seed {
        Seed(seed)
    }
}

impl Source for Seed {
    fn u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    fn below(&mut self, n: u32) -> u32 {
        (((self.u64() >> 32) * u64::from(n)) >> 32) as u32
    }

    fn is_empty(&self) -> bool {
        false
    }
}

/// Choices from bytes, most often one byte each, so that a fuzzer can change one without moving the others.
#[derive(Clone, Debug)]
pub struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    /// The choices that these bytes stand for.
    pub fn new(bytes: &'a [u8]) -> Bytes<'a> {
        Bytes(bytes)
    }

    /// What is left.
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }

    fn number(&mut self, bytes: usize) -> u64 {
        let (taken, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        taken.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}

impl Source for Bytes<'_> {
    fn u64(&mut self) -> u64 {
        self.number(8)
    }

    fn u32(&mut self) -> u32 {
        self.number(4) as u32
    }

    fn below(&mut self, n: u32) -> u32 {
        let bytes = match n {
            0..=1 => 0,
            2..=0x100 => 1,
            0x101..=0x1_0000 => 2,
            _ => 4,
        };
        (self.number(bytes) % u64::from(n)) as u32
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_reaches_every_number_and_no_other() {
        let (mut source, mut seen) = (Seed::new(1), [0u32; 7]);
        (0..7000).for_each(|_| seen[source.below(7) as usize] += 1);
        assert!(seen.iter().all(|count| (800..1200).contains(count)), "{seen:?}");
    }

    #[test]
    fn bytes_are_choices_until_they_end() {
        let mut source = Bytes::new(&[3, 1, 2, 9]);
        assert_eq!(source.below(256), 3);
        assert_eq!(source.below(0x1000), 0x102);
        assert!(!source.is_empty() && source.below(5) == 4 && source.is_empty());
        assert_eq!((source.below(100), source.u64()), (0, 0));
    }
}
