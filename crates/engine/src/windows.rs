//! Congestion windows of a lane: one for each lane it sends to, and one for what it asked others to send. Lanes behind a ring have
//! two windows of their own.

use std::collections::HashMap;
use std::net::IpAddr;

use ferroce_transport::WindowSignal;
use ferroce_transport::cc::{Aimd, CongestionControl, FixedWindow};

/// Names one window.
pub(crate) type WindowId = usize;

/// What comes over the link of READ responses towards this lane: bounded by its own receive buffer.
const RESPONSES: WindowId = 0;

/// The windows of a connected queue pair, by [`Window`](ferroce_transport::Window).
pub(crate) type Pair = [WindowId; 2];

/// Either direction of a ring carries requests and the responses to requests of the other one: both windows together stay below what
/// it holds.
const RING_WINDOW: u32 = Aimd::MAX;
const _: () = assert!(2 * (RING_WINDOW as usize) < ferroce_link::ring::CAPACITY);

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
    by_ring: HashMap<u16, Pair>,
}

impl Windows {
    pub(crate) fn new() -> Windows {
        let mut windows = Windows::default();
        windows.add(Box::new(Aimd::default()));
        windows
    }

    /// The window towards a destination lane.
    pub(crate) fn towards(&mut self, dst: IpAddr, lane: u32) -> WindowId {
        let key = (dst.to_canonical(), lane);
        if let Some(id) = self.by_destination.get(&key) {
            return *id;
        }
        let id = self.add(Box::new(Aimd::default()));
        self.by_destination.insert(key, id);
        id
    }

    /// The windows of a queue pair whose packets go over the link.
    pub(crate) fn over_link(&mut self, dst: IpAddr, lane: u32) -> Pair {
        [self.towards(dst, lane), RESPONSES]
    }

    /// The windows of a queue pair whose packets go through the ring to a lane. Nobody else uses that memory: that an answer takes long
    /// tells only that the peer's thread waited for a core, and a smaller window would make it wait for each message.
    pub(crate) fn over_ring(&mut self, lane: u16) -> Pair {
        if let Some(pair) = self.by_ring.get(&lane) {
            return *pair;
        }
        let pair = [(); 2].map(|()| self.add(Box::new(FixedWindow::new(RING_WINDOW))));
        self.by_ring.insert(lane, pair);
        pair
    }

    fn add(&mut self, control: Box<dyn CongestionControl>) -> WindowId {
        self.entries.push(Entry { control, waiting: Vec::new() });
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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_ring_has_windows_of_its_own_that_late_answers_do_not_shrink() {
        let mut windows = Windows::new();
        let peer = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let (link, ring) = (windows.over_link(peer, 5), windows.over_ring(5));
        assert_eq!(windows.over_ring(5), ring);
        assert_eq!(windows.over_link(peer, 6)[1], link[1], "responses over the link share one receive buffer");
        assert!(link.iter().all(|id| !ring.contains(id)));
        for round in 0..20 {
            for id in [link[0], ring[0]] {
                let late = if round < 5 { 1_000 } else { 5_000_000 };
                let bytes = windows.available(id);
                windows.take(id, bytes);
                windows.give_back(id, bytes, WindowSignal::Acked { rtt: Some(late) });
            }
        }
        assert_eq!(windows.available(ring[0]), RING_WINDOW);
        assert!(windows.available(link[0]) < RING_WINDOW, "over the link, late answers mean full queues");
    }
}
