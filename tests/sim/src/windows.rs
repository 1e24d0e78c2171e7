//! Congestion windows of a node, as the engine keeps them for a lane: one for each destination, one for what was asked for.

use std::sync::Arc;

use ferroce_transport::cc::{Aimd, CongestionControl};
use ferroce_transport::{EarlyBudget, WindowSignal};

#[derive(Debug, Default)]
struct Entry {
    control: Aimd,
    /// Queue pairs that found too little room.
    waiting: Vec<usize>,
}

/// Names a window of a node: the destination node, or [`Windows::RESPONSES`].
pub(crate) type WindowId = usize;

#[derive(Debug)]
pub(crate) struct Windows {
    entries: Vec<Entry>,
    /// What all queue pairs of the node keep of early packets.
    pub(crate) early: Arc<EarlyBudget>,
}

impl Windows {
    /// READ responses towards this node: bounded by its own receive buffer.
    pub(crate) const RESPONSES: WindowId = 0;

    pub(crate) fn new(nodes: usize) -> Windows {
        Windows { entries: (0..=nodes).map(|_| Entry::default()).collect(), early: Arc::default() }
    }

    /// The window towards a node.
    pub(crate) fn towards(node: usize) -> WindowId {
        node + 1
    }

    pub(crate) fn available(&self, id: WindowId) -> u32 {
        self.entries[id].control.available()
    }

    pub(crate) fn take(&mut self, id: WindowId, bytes: u32) {
        self.entries[id].control.take(bytes);
    }

    pub(crate) fn give_back(&mut self, id: WindowId, bytes: u32, signal: WindowSignal) {
        self.entries[id].control.give_back(bytes, signal);
    }

    pub(crate) fn lost(&mut self, id: WindowId, bytes: u32) {
        self.entries[id].control.lost(bytes);
    }

    pub(crate) fn wait(&mut self, id: WindowId, qp: usize) {
        let waiting = &mut self.entries[id].waiting;
        if !waiting.contains(&qp) {
            waiting.push(qp);
        }
    }

    pub(crate) fn take_waiting(&mut self, id: WindowId) -> Vec<usize> {
        std::mem::take(&mut self.entries[id].waiting)
    }

    /// The first window that still has bytes in flight.
    pub(crate) fn find_in_flight(&self) -> Option<(WindowId, u32)> {
        self.entries.iter().map(|entry| entry.control.in_flight()).enumerate().find(|&(_, bytes)| bytes > 0)
    }
}
