//! The card of a process: its lanes, and the keys that they share.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ferroce_core::{CoreError, KeyTable};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::RwLock;

use crate::lane::Lane;

/// A software RDMA card.
#[derive(Debug)]
pub struct Card {
    keys: Arc<KeyTable>,
    lanes: RwLock<Vec<Arc<Lane>>>,
}

impl Card {
    /// A card without lanes. `seed` makes its keys unguessable.
    pub fn new(seed: u64) -> Card {
        Card { keys: Arc::new(KeyTable::new(seed)), lanes: RwLock::new(Vec::new()) }
    }

    /// The memory regions of all protection domains.
    pub fn keys(&self) -> &Arc<KeyTable> {
        &self.keys
    }

    /// Adds a lane; it must share this card's keys.
    pub fn add_lane(&self, lane: Arc<Lane>) {
        self.lanes.write().push(lane);
    }

    /// The lanes at present.
    pub fn lanes(&self) -> Vec<Arc<Lane>> {
        self.lanes.read().clone()
    }

    /// One turn of every lane, for a program that found its completion queue empty.
    pub fn turn(&self) {
        for lane in self.lanes.read().iter() {
            lane.turn();
        }
    }

    /// One turn of every lane by a thread that sleeps until `event` is readable, or until something else happens.
    ///
    /// # Errors
    /// EINTR: a signal handler ran.
    pub fn attend(&self, event: BorrowedFd<'_>) -> std::io::Result<()> {
        let lanes = self.lanes();
        match lanes.as_slice() {
            [lane] => lane.attend(event),
            // With several lanes their progress threads do the work.
            _ => {
                let mut polled = [PollFd::new(event, PollFlags::POLLIN)];
                poll(&mut polled, PollTimeout::NONE)?;
                Ok(())
            }
        }
    }

    /// Takes a region away. When it returns, no lane touches the memory any more.
    ///
    /// # Errors
    /// EINVAL: no such region.
    pub fn deregister(&self, lkey: u32) -> Result<(), CoreError> {
        self.keys.begin_deregister(lkey)?;
        self.quiesce();
        Ok(())
    }

    /// Waits until no thread is inside a lane: what was resolved or decided there before is over.
    pub fn quiesce(&self) {
        for lane in self.lanes.read().iter() {
            lane.quiesce();
        }
    }
}
