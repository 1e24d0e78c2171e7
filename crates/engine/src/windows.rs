//! Congestion windows of a lane: one for each lane it sends to, and one for what it asked others to send.

use std::collections::HashMap;
use std::net::IpAddr;

use ferroce_transport::WindowSignal;
use ferroce_transport::cc::{Aimd, CongestionControl};

/// Names one window.
pub(crate) type WindowId = usize;

/// READ responses towards this lane: bounded by its own receive buffer.
pub(crate) const RESPONSES: WindowId = 0;

struct Entry {
    control: Box<dyn CongestionControl>,
    /// Queue pairs that found too little room.
    waiting: Vec<u16>,
}

/// All windows of a lane. One is made for each destination lane and kept: their number is bounded by the peers' lanes.
#[derive(Default)]
pub(crate) struct Windows {
    entries: Vec<Entry>,
    by_destination: HashMap<(IpAddr, u32), WindowId>,
}

impl Windows {
    pub(crate) fn new() -> Windows {
        let mut windows = Windows::default();
        windows.add();
        windows
    }

    /// The window towards a destination lane.
    pub(crate) fn towards(&mut self, dst: IpAddr, lane: u32) -> WindowId {
        let key = (dst.to_canonical(), lane);
        if let Some(id) = self.by_destination.get(&key) {
            return *id;
        }
        let id = self.add();
        self.by_destination.insert(key, id);
        id
    }

    fn add(&mut self) -> WindowId {
        self.entries.push(Entry { control: Box::new(Aimd::default()), waiting: Vec::new() });
        self.entries.len() - 1
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

    /// `slot` found too little room: it is polled again when some came back.
    pub(crate) fn wait(&mut self, id: WindowId, slot: u16) {
        let waiting = &mut self.entries[id].waiting;
        if !waiting.contains(&slot) {
            waiting.push(slot);
        }
    }

    /// Queue pairs to poll again, now that something came back.
    pub(crate) fn take_waiting(&mut self, id: WindowId) -> Vec<u16> {
        std::mem::take(&mut self.entries[id].waiting)
    }
}

impl std::fmt::Debug for Windows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Windows").field("count", &self.entries.len()).finish_non_exhaustive()
    }
}
