//! Congestion windows of a lane: one for each lane it sends to, and one for what it asked others to send. Lanes behind a ring have
//! two windows of their own.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use ferroce_transport::WindowSignal;
use ferroce_transport::cc::{Aimd, CongestionControl, FixedWindow, TRAIN_CHARGE_MAX};

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

/// Windows that are kept although nobody uses them: who comes back to a destination need not find out anew what it bears.
const KEPT: usize = 1024;

struct Entry {
    control: Box<dyn CongestionControl>,
    /// Connected queue pairs that it belongs to. (UC and UD name the destination each time.)
    users: u32,
    /// Queue pairs that found too little room, the first one in front.
    line: VecDeque<u16>,
}

impl Entry {
    fn is_idle(&self) -> bool {
        self.users == 0 && self.control.in_flight() == 0 && self.line.is_empty()
    }
}

/// All windows of a lane. One is made for each destination lane; [`Windows::tidy`] bounds their number.
#[derive(Default)]
pub(crate) struct Windows {
    /// None: free.
    entries: Vec<Option<Entry>>,
    free: Vec<WindowId>,
    by_destination: HashMap<(IpAddr, u32), WindowId>,
    by_ring: HashMap<u16, Pair>,
    /// So many were left by the last [`Windows::tidy`].
    left: usize,
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

    /// The windows of a queue pair whose packets go over the link. [`Windows::leave`] ends its use.
    pub(crate) fn over_link(&mut self, dst: IpAddr, lane: u32) -> Pair {
        let pair = [self.towards(dst, lane), RESPONSES];
        self.join(pair)
    }

    /// The windows of a queue pair whose packets go through the ring to a lane. Nobody else uses that memory: that an answer takes long
    /// tells only that the peer's thread waited for a core, and a smaller window would make it wait for each message.
    /// [`Windows::leave`] ends its use.
    pub(crate) fn over_ring(&mut self, lane: u16) -> Pair {
        if let Some(pair) = self.by_ring.get(&lane) {
            return self.join(*pair);
        }
        let pair = [(); 2].map(|()| self.add(Box::new(FixedWindow::new(RING_WINDOW))));
        self.by_ring.insert(lane, pair);
        self.join(pair)
    }

    fn join(&mut self, pair: Pair) -> Pair {
        pair.iter().for_each(|id| self.entry(*id).users += 1);
        pair
    }

    /// A queue pair uses its windows no more, and has given back all that it took.
    pub(crate) fn leave(&mut self, pair: Pair) {
        pair.iter().for_each(|id| self.entry(*id).users -= 1);
    }

    fn add(&mut self, control: Box<dyn CongestionControl>) -> WindowId {
        let entry = Some(Entry { control, users: 0, line: VecDeque::new() });
        match self.free.pop() {
            Some(id) => {
                self.entries[id] = entry;
                id
            }
            None => {
                self.entries.push(entry);
                self.entries.len() - 1
            }
        }
    }

    fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Removes the windows that nobody uses, if there are many. Only between two turns: the names of those end.
    pub(crate) fn tidy(&mut self) {
        if self.len() < KEPT.max(2 * self.left) {
            return;
        }
        let (entries, free) = (&mut self.entries, &mut self.free);
        let mut remove = |ids: &[WindowId]| {
            let idle = ids.iter().all(|id| entries[*id].as_ref().is_some_and(Entry::is_idle));
            if idle {
                ids.iter().for_each(|id| entries[*id] = None);
                free.extend(ids);
            }
            idle
        };
        self.by_destination.retain(|_, id| !remove(&[*id]));
        self.by_ring.retain(|_, pair| !remove(pair));
        self.left = self.len();
    }

    fn entry(&mut self, id: WindowId) -> &mut Entry {
        self.entries[id].as_mut().expect("a window in use is there")
    }

    pub(crate) fn available(&self, id: WindowId) -> u32 {
        self.entries[id].as_ref().expect("a window in use is there").control.available()
    }

    pub(crate) fn take(&mut self, id: WindowId, bytes: u32) {
        self.entry(id).control.take(bytes);
    }

    pub(crate) fn give_back(&mut self, id: WindowId, bytes: u32, signal: WindowSignal) {
        self.entry(id).control.give_back(bytes, signal);
    }

    pub(crate) fn lost(&mut self, id: WindowId, bytes: u32) {
        self.entry(id).control.lost(bytes);
    }

    /// `slot`, which stands in no line for this window, asked for room and sends nothing. If that may be for want of room, it stands
    /// in line from now on; false: it has nothing to wait for here.
    pub(crate) fn line_up(&mut self, id: WindowId, slot: u16) -> bool {
        // Any train would have found room.
        let waits = self.available(id) < TRAIN_CHARGE_MAX;
        if waits {
            self.entry(id).line.push_back(slot);
        }
        waits
    }

    /// `slot` stands in line no more.
    pub(crate) fn step_out(&mut self, id: WindowId, slot: u16) {
        self.entry(id).line.retain(|waiting| *waiting != slot);
    }

    /// Takes the first queue pair out of the line, if there is room: it is to be polled. The next one's turn comes after that. (The
    /// window may be gone: then nobody waited.)
    pub(crate) fn call_next(&mut self, id: WindowId) -> Option<u16> {
        let entry = self.entries.get_mut(id)?.as_mut()?;
        if entry.control.available() == 0 {
            return None;
        }
        entry.line.pop_front()
    }
}

impl std::fmt::Debug for Windows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Windows").field("count", &self.len()).finish_non_exhaustive()
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

    #[test]
    fn windows_that_nobody_uses_are_removed_when_there_are_many() {
        let mut windows = Windows::new();
        let peer = |n: u32| IpAddr::V4(Ipv4Addr::from_bits(n));
        let connected = windows.over_link(peer(1), 5);
        let ring = windows.over_ring(7);
        let busy = windows.towards(peer(2), 5);
        windows.take(busy, 1000);
        let waited_for = windows.towards(peer(3), 5);
        windows.take(waited_for, Aimd::INITIAL);
        assert!(windows.line_up(waited_for, 9));
        windows.give_back(waited_for, Aimd::INITIAL, WindowSignal::Released);
        for n in 10..100_000 {
            windows.towards(peer(n), 5);
            windows.tidy();
        }
        assert!(windows.entries.len() <= KEPT, "{} windows", windows.entries.len());
        assert_eq!(windows.over_link(peer(1), 5), connected);
        assert_eq!(windows.over_ring(7), ring);
        windows.give_back(busy, 1000, WindowSignal::Released);
        assert_eq!(windows.call_next(waited_for), Some(9));
        // Both were joined twice.
        for _ in 0..2 {
            windows.leave(connected);
            windows.leave(ring);
        }
        for n in 10..2 * KEPT as u32 {
            windows.towards(peer(n), 5);
            windows.tidy();
        }
        assert!(windows.by_ring.is_empty() && !windows.by_destination.contains_key(&(peer(1), 5)));
        assert!(windows.entries[RESPONSES].is_some(), "that one is always there");
    }

    #[test]
    fn who_waits_is_called_one_by_one_and_only_for_room() {
        let mut windows = Windows::new();
        let id = windows.towards(IpAddr::V4(Ipv4Addr::LOCALHOST), 5);
        assert!(!windows.line_up(id, 1), "there is room for any train");
        windows.take(id, Aimd::INITIAL);
        assert!((1..=4).all(|slot| windows.line_up(id, slot)));
        assert_eq!(windows.call_next(id), None);
        windows.step_out(id, 2);
        windows.give_back(id, 1, WindowSignal::Released);
        assert_eq!([(); 4].map(|()| windows.call_next(id)), [Some(1), Some(3), Some(4), None]);
    }
}
