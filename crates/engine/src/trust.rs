//! Whether the lane can be left to a program that polls.
//!
//! Most programs that poll go on until they have what they wait for. Some poll for the end of their own request and then look at a word
//! in memory until the peer has written it (`ib_write_lat`, MPI and NCCL's flags): were the lane left to them, the peer's WRITE would
//! wait for the progress thread's next look.

/// Naps at whose end packets had waited weigh so much; those without, 1.
const LATE_WEIGHT: u32 = 2;
/// From this weight on the lane is not left to the program.
const LATE_MAX: u32 = 4;
/// So many times in a row the thread has to be of no use before it leaves the lane to the program again.
const NEEDLESS_MAX: u32 = 32;

/// What the progress thread thinks of the program.
#[derive(Debug, Default)]
pub(crate) struct Trust {
    late: u32,
    needless: u32,
    lost: bool,
}

impl Trust {
    pub(crate) fn leaves_the_lane(&self) -> bool {
        !self.lost
    }

    /// The lane was left to the program for a nap. `late`: packets had come, and the program was gone.
    pub(crate) fn napped(&mut self, late: bool) {
        self.late = if late { self.late + LATE_WEIGHT } else { self.late.saturating_sub(1) };
        if self.late >= LATE_MAX {
            *self = Trust { lost: true, ..Trust::default() };
        }
    }

    /// The thread watched the lane itself. `needed`: packets came, and the program did not poll.
    pub(crate) fn watched(&mut self, needed: bool) {
        self.needless = if needed { 0 } else { self.needless + 1 };
        if self.needless >= NEEDLESS_MAX {
            *self = Trust::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_goes_away_again_and_again_loses_trust() {
        let mut trust = Trust::default();
        for _ in 0..100 {
            trust.napped(true);
            assert!(trust.leaves_the_lane(), "once in a while is chance");
            trust.napped(false);
            trust.napped(false);
        }
        trust.napped(true);
        trust.napped(true);
        assert!(!trust.leaves_the_lane());
    }

    #[test]
    fn who_polls_all_the_time_gets_it_back() {
        let mut trust = Trust { lost: true, ..Trust::default() };
        for _ in 0..100 {
            for _ in 1..NEEDLESS_MAX {
                trust.watched(false);
            }
            trust.watched(true);
            assert!(!trust.leaves_the_lane());
        }
        for _ in 0..NEEDLESS_MAX {
            assert!(!trust.leaves_the_lane());
            trust.watched(false);
        }
        assert!(trust.leaves_the_lane());
        trust.napped(true);
        assert!(trust.leaves_the_lane(), "what was is forgotten");
    }
}
