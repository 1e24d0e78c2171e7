//! Random numbers that are the same for a seed on every machine and with every version of every library.

/// xoshiro256++, seeded by splitmix64.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: [u64; 4],
}

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        let mut x = seed;
        let state = std::array::from_fn(|_| {
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = x;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        });
        Random { state }
    }

    pub(crate) fn next(&mut self) -> u64 {
        let [a, b, c, d] = self.state;
        let out = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (c, d) = (c ^ a, d ^ b);
        self.state = [a ^ d, b ^ c, c ^ (b << 17), d.rotate_left(45)];
        out
    }

    /// A generator of its own: what it gives does not depend on how much is drawn here later.
    pub(crate) fn fork(&mut self) -> Random {
        Random::new(self.next())
    }

    /// 0 .. n; 0 for n = 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// low ..= high
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True `ppm` times in a million.
    pub(crate) fn chance(&mut self, ppm: u32) -> bool {
        ppm != 0 && self.below(1_000_000) < u64::from(ppm)
    }

    pub(crate) fn percent(&mut self, percent: u32) -> bool {
        self.chance(percent * 10_000)
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// An index, by weight. At least one weight is not zero.
    pub(crate) fn weighted(&mut self, weights: &[u32]) -> usize {
        let mut at = self.below(weights.iter().map(|&w| u64::from(w)).sum());
        for (index, &weight) in weights.iter().enumerate() {
            match at.checked_sub(u64::from(weight)) {
                Some(rest) => at = rest,
                None => return index,
            }
        }
        unreachable!("a number below the sum of the weights falls to one of them")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_for_ever() {
        let mut random = Random::new(1);
        assert_eq!([random.next(), random.next()], [0xcfc5_d07f_6f03_c29b, 0xbf42_4132_963f_e08d]);
    }

    #[test]
    fn numbers_stay_in_range_and_reach_its_ends() {
        let mut random = Random::new(7);
        let mut seen = [0u32; 4];
        for _ in 0..1000 {
            seen[random.between(2, 5) as usize - 2] += 1;
            assert!(random.weighted(&[0, 3, 0, 1]) % 2 == 1);
        }
        assert!(seen.iter().all(|&n| n > 180), "{seen:?}");
        assert!((0..1000).filter(|_| random.chance(100_000)).count().abs_diff(100) < 60);
    }
}
