//! The queue pair numbers of a lane: handed out in random order, reused as late as possible.

use std::collections::VecDeque;

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// Free slots of a lane. A freed slot goes to the end of the queue, so that a late packet of a dead queue pair does not meet its
/// successor, and a peer's connection manager does not take a new connection for a stale one.
#[derive(Debug)]
pub(crate) struct Slots {
    free: VecDeque<u16>,
}

impl Slots {
    /// Slots `first..count`, shuffled by `seed`.
    pub(crate) fn new(first: u16, count: u16, seed: u64) -> Slots {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut free: Vec<u16> = (first..count).collect();
        free.shuffle(&mut rng);
        Slots { free: free.into() }
    }

    pub(crate) fn take(&mut self) -> Option<u16> {
        self.free.pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.is_empty()
    }

    pub(crate) fn give_back(&mut self, slot: u16) {
        self.free.push_back(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_slot_is_the_last_to_come_back() {
        let mut slots = Slots::new(0, 100, 7);
        let first = slots.take().expect("100 are free");
        slots.give_back(first);
        for _ in 0..99 {
            assert_ne!(slots.take(), Some(first));
        }
        assert_eq!(slots.take(), Some(first));
        assert_eq!(slots.take(), None);
    }

    #[test]
    fn another_seed_gives_another_order() {
        let order = |seed| -> Vec<_> {
            let mut slots = Slots::new(0, 50, seed);
            std::iter::from_fn(move || slots.take()).collect()
        };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }
}
