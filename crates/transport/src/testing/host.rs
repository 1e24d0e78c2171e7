//! A simulated host of one queue pair: it keeps what the transport tells, for tests to look at.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;

use super::memory::SimMemory;
use crate::cc::{Aimd, CongestionControl};
use crate::host::{AtomicOp, Count, Drop, Host, Memory, MemoryError, Span, TagMatch, Window, WindowSignal};
use crate::verbs::{Access, Completion, PathAddr, QpEvent, RecvWr, Sge};

/// The host of one queue pair.
pub struct SimHost {
    /// Its memory.
    pub memory: SimMemory,
    /// Receive requests that wait.
    pub receives: VecDeque<RecvWr>,
    /// If its receive queue matches tags: the tagged buffers that wait.
    pub tagged: Option<Vec<(u64, RecvWr)>>,
    /// Messages that matched none of them.
    pub unexpected: u32,
    /// Of an XRC target: the shared receive queues of its domain, by number. They have receives and completions of their own.
    pub srqs: BTreeMap<u32, SimSrq>,
    /// The one that the queue pair chose last, there or not.
    pub chosen_srq: Option<u32>,
    /// Completions of send requests, in order.
    pub sent: Vec<Completion>,
    /// Completions of receive requests, in order.
    pub received: Vec<Completion>,
    /// Send queue slots given back.
    pub released: u32,
    /// Events raised.
    pub events: Vec<QpEvent>,
    /// Packets dropped, by reason.
    pub drops: HashMap<Drop, u32>,
    /// What else was counted.
    pub counts: HashMap<Count, u32>,
    /// The peer fetches the payload of large WRITEs itself.
    pub lends: bool,
    /// The windows, by [`Window`].
    pub windows: [Box<dyn CongestionControl>; 2],
}

/// A shared receive queue of an XRC domain.
#[derive(Debug, Default)]
pub struct SimSrq {
    /// Its protection domain.
    pub pd: u32,
    /// Receive requests that wait.
    pub receives: VecDeque<RecvWr>,
    /// Their completions, in order.
    pub received: Vec<Completion>,
}

impl Default for SimHost {
    fn default() -> Self {
        SimHost {
            memory: SimMemory::default(),
            receives: VecDeque::new(),
            tagged: None,
            unexpected: 0,
            srqs: BTreeMap::new(),
            chosen_srq: None,
            sent: Vec::new(),
            received: Vec::new(),
            released: 0,
            events: Vec::new(),
            drops: HashMap::new(),
            counts: HashMap::new(),
            lends: false,
            windows: [Box::new(Aimd::new()), Box::new(Aimd::new())],
        }
    }
}

impl fmt::Debug for SimHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimHost")
            .field("sent", &self.sent)
            .field("received", &self.received)
            .field("events", &self.events)
            .field("drops", &self.drops)
            .field("counts", &self.counts)
            .finish_non_exhaustive()
    }
}

impl SimHost {
    /// How often packets were dropped for `reason`.
    pub fn dropped(&self, reason: Drop) -> u32 {
        self.drops.get(&reason).copied().unwrap_or(0)
    }

    /// How often `what` was counted.
    pub fn counted(&self, what: Count) -> u32 {
        self.counts.get(&what).copied().unwrap_or(0)
    }
}

impl Memory for SimHost {
    fn resolve_local(&mut self, pd: u32, sge: &Sge, write: bool) -> Result<Span, MemoryError> {
        self.memory.resolve_local(pd, sge, write)
    }

    fn resolve_remote(&mut self, pd: u32, rkey: u32, va: u64, len: u32, access: Access) -> Result<Span, MemoryError> {
        self.memory.resolve_remote(pd, rkey, va, len, access)
    }

    fn check_key(&mut self, pd: u32, rkey: u32, access: Access) -> Result<(), MemoryError> {
        self.memory.check_key(pd, rkey, access)
    }

    fn load(&mut self, span: Span, into: &mut [u8]) -> Result<(), MemoryError> {
        Memory::load(&mut self.memory, span, into)
    }

    fn store(&mut self, span: Span, data: &[u8], last: bool) -> Result<(), MemoryError> {
        self.memory.store(span, data, last)
    }

    fn atomic(&mut self, span: Span, op: AtomicOp) -> Result<u64, MemoryError> {
        self.memory.atomic(span, op)
    }

    fn invalidate(&mut self, pd: u32, rkey: u32, qpn: u32) -> Result<(), MemoryError> {
        self.memory.invalidate(pd, rkey, qpn)
    }
}

impl Host for SimHost {
    fn pop_recv(&mut self) -> Option<RecvWr> {
        match self.chosen_srq {
            Some(srqn) => self.srqs.get_mut(&srqn).and_then(|srq| srq.receives.pop_front()),
            None => self.receives.pop_front(),
        }
    }

    fn choose_srq(&mut self, srqn: u32) -> Option<u32> {
        self.chosen_srq = Some(srqn);
        self.srqs.get(&srqn).map(|srq| srq.pd)
    }

    fn matches_tags(&self) -> bool {
        self.tagged.is_some()
    }

    fn take_tagged(&mut self, tag: Option<u64>) -> Option<TagMatch> {
        let tagged = self.tagged.get_or_insert_default();
        if let Some(place) = tagged.iter().position(|(known, _)| Some(*known) == tag) {
            return Some(TagMatch::Tagged(tagged.remove(place).1));
        }
        let wr = self.receives.pop_front()?;
        self.unexpected += 1;
        Some(TagMatch::Unexpected(wr))
    }

    fn forget_unexpected(&mut self) {
        self.unexpected -= 1;
    }

    fn complete_send(&mut self, completion: Completion) {
        self.sent.push(completion);
    }

    fn release_send(&mut self, count: u32) {
        self.released += count;
    }

    fn complete_recv(&mut self, completion: Completion) {
        match self.chosen_srq {
            Some(srqn) => self.srqs.get_mut(&srqn).into_iter().for_each(|srq| srq.received.push(completion)),
            None => self.received.push(completion),
        }
    }

    fn lends(&mut self) -> bool {
        self.lends
    }

    fn event(&mut self, event: QpEvent) {
        self.events.push(event);
    }

    fn drop_packet(&mut self, reason: Drop) {
        *self.drops.entry(reason).or_default() += 1;
    }

    fn count(&mut self, what: Count, n: u32) {
        *self.counts.entry(what).or_default() += n;
    }

    fn window(&mut self, window: Window) -> u32 {
        self.windows[window as usize].available()
    }

    fn window_take(&mut self, window: Window, bytes: u32) {
        self.windows[window as usize].take(bytes);
    }

    fn window_return(&mut self, window: Window, bytes: u32, signal: WindowSignal) {
        self.windows[window as usize].give_back(bytes, signal);
    }

    fn window_lost(&mut self, window: Window, bytes: u32) {
        self.windows[window as usize].lost(bytes);
    }

    fn window_towards(&mut self, _path: &PathAddr, _qpn: u32) -> u32 {
        self.window(Window::Requests)
    }

    fn window_take_towards(&mut self, _path: &PathAddr, _qpn: u32, bytes: u32) {
        self.window_take(Window::Requests, bytes);
    }

    fn window_return_towards(&mut self, _path: &PathAddr, _qpn: u32, bytes: u32, signal: WindowSignal) {
        self.window_return(Window::Requests, bytes, signal);
    }
}
