//! The card of a process: its lanes, and the keys that they share.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferroce_core::limits::MAX_XRC_SRQ;
use ferroce_core::{CoreError, KeyTable, Reregister};
use parking_lot::{Mutex, RwLock};

use crate::attendance::Attendance;
use crate::lane::{LANE_SHIFT, Lane};
use crate::slots::Slots;

/// A software RDMA card.
#[derive(Debug)]
pub struct Card {
    keys: Arc<KeyTable>,
    lanes: RwLock<Vec<Arc<Lane>>>,
    /// Numbers of shared receive queues that are free.
    srq_numbers: Mutex<Slots>,
    /// Since when a program that polls on a crowded core found nothing; 0: it is not known.
    nothing_since: AtomicU64,
}

impl Card {
    /// A card without lanes. `seed` makes its keys unguessable.
    pub fn new(seed: u64) -> Card {
        Card {
            keys: Arc::new(KeyTable::new(seed)),
            lanes: RwLock::new(Vec::new()),
            srq_numbers: Mutex::new(Slots::new(1, MAX_XRC_SRQ as u16 + 1, !seed)),
            nothing_since: AtomicU64::new(0),
        }
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

    /// A number for a shared receive queue of an XRC domain: no other of this process has it, nor, as it has a lane's prefix, one of
    /// another process of the host.
    ///
    /// # Errors
    /// ENOMEM: all are taken.
    pub fn take_srq_number(&self) -> Result<u32, CoreError> {
        let lane = self.lanes.read().first().map_or(0, |lane| lane.number());
        let slot = self.srq_numbers.lock().take().ok_or_else(|| {
            CoreError::new(libc::ENOMEM, format!("all {MAX_XRC_SRQ} XRC SRQs of the process are in use"))
        })?;
        Ok(u32::from(lane) << LANE_SHIFT | u32::from(slot))
    }

    /// The queue with this number is gone, and no lane uses it any more.
    pub fn give_back_srq_number(&self, srqn: u32) {
        self.srq_numbers.lock().give_back((srqn & ((1 << LANE_SHIFT) - 1)) as u16);
    }

    /// One turn of every lane, for a program that found its completion queue empty.
    pub fn turn(&self) {
        for lane in self.lanes.read().iter() {
            lane.turn();
        }
    }

    /// For a program that polled and found something in a completion queue.
    pub fn found_something(&self) {
        // Most often it is 0 already: a look costs less than a write to what other threads look at, too.
        if self.nothing_since.load(Ordering::Relaxed) != 0 {
            self.nothing_since.store(0, Ordering::Relaxed);
        }
    }

    /// For a program that polls in vain: lets others have the core.
    pub fn give_way(&self) {
        match self.lanes.read().as_slice() {
            [lane] => lane.give_way(&self.nothing_since),
            // One of them would sleep through what comes to the others.
            _ => std::thread::yield_now(),
        }
    }

    /// For a program thread that waits until `event` is readable, which `is_there` tells without a system call: lets it look after the
    /// lane meanwhile.
    pub fn attendance<'e>(&self, event: BorrowedFd<'e>, is_there: &dyn Fn() -> bool) -> Attendance<'e> {
        match self.lanes.read().as_slice() {
            [lane] => Attendance::new(lane, event, is_there),
            // With several lanes their progress threads do the work.
            _ => Attendance::idle(event),
        }
    }

    /// Sends what is owed, in a process that is about to end: the peer of a program that exits right after it was given a message has
    /// its ACK all the same.
    pub fn settle(&self) {
        for lane in self.lanes() {
            lane.settle();
        }
    }

    /// Takes a region away. When it returns, no lane touches the memory any more.
    ///
    /// # Errors
    /// EINVAL: no such region.
    pub fn deregister(&self, lkey: u32) -> Result<(), CoreError> {
        self.keys.begin_deregister(lkey)?;
        self.quiesce();
        self.keys.release(lkey);
        Ok(())
    }

    /// Changes a region. When it returns, no lane uses it as it was any more.
    ///
    /// # Errors
    /// As for [`KeyTable::reregister`].
    pub fn reregister(&self, lkey: u32, change: &Reregister) -> Result<(), CoreError> {
        self.keys.reregister(lkey, change)?;
        self.quiesce();
        if change.translation.is_some() {
            self.keys.release(lkey);
        }
        Ok(())
    }

    /// Ends a memory window. When it returns, no lane uses it any more.
    ///
    /// # Errors
    /// EINVAL: no such window.
    pub fn dealloc_window(&self, rkey: u32) -> Result<(), CoreError> {
        self.keys.dealloc_window(rkey)?;
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
