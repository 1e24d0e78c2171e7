//! Deadlines of a lane's queue pairs: a heap that tolerates stale entries.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ferroce_transport::Nanos;

/// Earliest deadline first. A queue pair's deadline moves with every acknowledge; instead of moving its entry, the heap keeps the
/// earlier one, and the owner compares when it surfaces. So a deadline that is pushed out costs nothing.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Nanos, u16)>>,
}

impl Timers {
    /// Makes sure that `slot` surfaces by `deadline`. `queued` is the owner's note of the entry that it already has in the heap.
    pub(crate) fn arm(&mut self, slot: u16, deadline: Nanos, queued: &mut Option<Nanos>) {
        if queued.is_none_or(|earlier| deadline < earlier) {
            self.heap.push(Reverse((deadline, slot)));
            *queued = Some(deadline);
        }
    }

    /// Is an entry due?
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        self.next().is_some_and(|deadline| deadline <= now)
    }

    /// Takes the next entry that is due.
    pub(crate) fn pop_due(&mut self, now: Nanos) -> Option<(Nanos, u16)> {
        let Reverse((deadline, _)) = *self.heap.peek()?;
        if deadline > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }

    /// When the next entry surfaces.
    pub(crate) fn next(&self) -> Option<Nanos> {
        self.heap.peek().map(|Reverse((deadline, _))| *deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_deadline_adds_no_entry_and_an_earlier_one_does() {
        let mut timers = Timers::default();
        let mut queued = None;
        timers.arm(3, 100, &mut queued);
        timers.arm(3, 200, &mut queued);
        assert_eq!(timers.heap.len(), 1);
        timers.arm(3, 50, &mut queued);
        assert_eq!((timers.next(), queued), (Some(50), Some(50)));
        assert_eq!(timers.pop_due(49), None);
        assert_eq!(timers.pop_due(50), Some((50, 3)));
        assert_eq!(timers.next(), Some(100));
    }
}
