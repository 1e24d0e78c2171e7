//! What a lane lends to a queue pair's machine for one call.

use std::sync::Arc;

use ferroce_core::cq::News;
use ferroce_core::{Cq, KeyTable, XrcSrq, mem};
use ferroce_link::ring::Lending;
use ferroce_transport::{
    Access, AtomicOp, Completion, Count, Drop, EarlyBudget, Host, Memory, MemoryError, MwBind, PathAddr, QpEvent,
    RecvWr, Sge, Span, TagMatch, WcFlags, WcStatus, Window, WindowSignal,
};
use smallvec::SmallVec;

use crate::clock;
use crate::counters::Counters;
use crate::lane::LANE_SHIFT;
use crate::queue_pair::{QueuePair, RecvSource};
use crate::windows::{Pair, WindowId, Windows};

/// The production [`Host`].
pub(crate) struct QpHost<'a> {
    pub(crate) qp: &'a QueuePair,
    pub(crate) keys: &'a KeyTable,
    pub(crate) counters: &'a mut Counters,
    pub(crate) windows: &'a mut Windows,
    /// What queue pairs of the lane keep of packets that come before their turn.
    pub(crate) early: &'a Arc<EarlyBudget>,
    /// Completion queues whose moderation period began.
    pub(crate) moderated: &'a mut Vec<Arc<Cq>>,
    /// Windows of a connected queue pair (RC, XRC).
    pub(crate) own: Option<Pair>,
    /// The peer is on this host, and may fetch memory of this process.
    pub(crate) lending: Option<&'a Lending>,
    /// Its packets still go to that peer.
    pub(crate) lends: bool,
    /// Where the payload of the packet at hand is already: the bytes that come with it are none.
    pub(crate) placed: Option<Span>,
    /// Windows that were asked for room in this call.
    pub(crate) asked: [Option<WindowId>; 2],
    /// Windows that got room back in this call.
    pub(crate) returned: SmallVec<[WindowId; 2]>,
    /// XRC targets: the shared receive queue that the request at hand names.
    pub(crate) srq: Option<Arc<XrcSrq>>,
    /// A receive was completed with success in this call, and the program polls for such: it may answer soon.
    pub(crate) received: bool,
}

impl<'a> QpHost<'a> {
    fn complete(&mut self, cq: &Arc<Cq>, mut completion: Completion) -> News {
        if cq.wants_timestamps() {
            completion.timestamp = clock::now();
        }
        let news = cq.push(completion);
        if news == News::Period && !self.moderated.iter().any(|known| Arc::ptr_eq(known, cq)) {
            self.moderated.push(Arc::clone(cq));
        }
        news
    }

    fn id(&self, window: Window) -> Option<WindowId> {
        self.own.map(|pair| pair[window as usize])
    }

    /// The window towards the lane of a queue pair (UC, UD).
    fn towards(&mut self, path: &PathAddr, qpn: u32) -> WindowId {
        self.windows.towards(path.dst, qpn >> LANE_SHIFT)
    }

    fn give_back(&mut self, id: WindowId, bytes: u32, signal: WindowSignal) {
        if !self.returned.contains(&id) {
            self.returned.push(id);
        }
        self.windows.give_back(id, bytes, signal);
    }
}

impl Memory for QpHost<'_> {
    fn resolve_local(&mut self, pd: u32, sge: &Sge, write: bool) -> Result<Span, MemoryError> {
        if sge.length == 0 {
            return Ok(Span { addr: sge.addr, len: 0 });
        }
        let need = if write { Access::LOCAL_WRITE } else { Access::empty() };
        self.keys.resolve(pd, sge.lkey, sge.addr, sge.length, need)
    }

    fn resolve_remote(&mut self, pd: u32, rkey: u32, va: u64, len: u32, access: Access) -> Result<Span, MemoryError> {
        if len == 0 {
            return Ok(Span { addr: va, len: 0 });
        }
        self.keys.resolve_remote(pd, self.qp.qpn, rkey, va, len, access)
    }

    fn check_key(&mut self, pd: u32, rkey: u32, access: Access) -> Result<(), MemoryError> {
        self.keys.check_remote(pd, self.qp.qpn, rkey, access)
    }

    fn load(&mut self, span: Span, into: &mut [u8]) -> Result<(), MemoryError> {
        mem::load(span.addr, into).map_err(|mem::Fault| MemoryError::Fault)
    }

    fn store(&mut self, span: Span, data: &[u8], last: bool) -> Result<(), MemoryError> {
        if let Some(placed) = self.placed {
            // Elsewhere, if the region was registered anew since.
            let inside =
                span.addr >= placed.addr && span.addr + data.len() as u64 <= placed.addr + u64::from(placed.len);
            return if inside { Ok(()) } else { Err(MemoryError::Fault) };
        }
        if mem::is_zeros(span.addr) {
            return Ok(());
        }
        mem::store(span.addr, data, last).map_err(|mem::Fault| MemoryError::Fault)
    }

    fn atomic(&mut self, span: Span, op: AtomicOp) -> Result<u64, MemoryError> {
        // The transport saw the peer's address; where the region's addresses begin otherwise than its memory, this one may differ.
        if !span.addr.is_multiple_of(8) {
            return Err(MemoryError::Misaligned);
        }
        let result = match op {
            AtomicOp::CompareSwap { compare, swap } => mem::compare_swap(span.addr, compare, swap),
            AtomicOp::FetchAdd { add } => mem::fetch_add(span.addr, add),
        };
        result.map_err(|mem::Fault| MemoryError::Fault)
    }

    fn invalidate(&mut self, pd: u32, rkey: u32, qpn: u32) -> Result<(), MemoryError> {
        self.keys.invalidate_window(pd, qpn, rkey)
    }

    fn bind(&mut self, pd: u32, bind: &MwBind, qpn: u32) -> Result<(), MemoryError> {
        self.keys.bind_window(pd, qpn, bind)
    }
}

impl Host for QpHost<'_> {
    fn pop_recv(&mut self) -> Option<RecvWr> {
        match &self.srq {
            Some(srq) => srq.queue.pop(),
            None => self.qp.pop_recv(),
        }
    }

    fn choose_srq(&mut self, srqn: u32) -> Option<u32> {
        let RecvSource::Domain(domain) = &self.qp.init.recv else { return None };
        self.srq = domain.find(srqn);
        self.srq.as_ref().map(|srq| srq.pd)
    }

    fn matches_tags(&self) -> bool {
        matches!(&self.qp.init.recv, RecvSource::Shared(srq) if srq.tags().is_some())
    }

    fn take_tagged(&mut self, tag: Option<u64>) -> Option<TagMatch> {
        let RecvSource::Shared(srq) = &self.qp.init.recv else { return None };
        srq.take_tagged(tag)
    }

    fn forget_unexpected(&mut self) {
        if let RecvSource::Shared(srq) = &self.qp.init.recv {
            srq.forget_unexpected();
        }
    }

    fn complete_send(&mut self, completion: Completion) {
        // The program may do with the memory what it likes, although the peer may not have read it.
        if completion.status != WcStatus::Success
            && let Some(lending) = self.lending
        {
            lending.recall();
        }
        let qp = self.qp;
        self.complete(qp.init.send_cq.as_ref().expect("who sends has a completion queue"), completion);
    }

    fn release_send(&mut self, count: u32) {
        self.qp.release_send(count);
    }

    fn complete_recv(&mut self, completion: Completion) {
        // After a match alone there may be something to send at once: the READ of a rendezvous request.
        let is_match_only = completion.flags & (WcFlags::TM_MATCH | WcFlags::TM_DATA_VALID) == WcFlags::TM_MATCH;
        let received = completion.status == WcStatus::Success && !is_match_only;
        let (qp, srq) = (self.qp, self.srq.clone());
        // A receive of an XRC domain whose queue is gone went with it.
        if let Some(cq) = srq.as_ref().map(|srq| &srq.cq).or(qp.init.recv_cq.as_ref()) {
            let news = self.complete(cq, completion);
            // Who sleeps for events takes long to answer. And who takes them of sends and receives from one channel may mistake one for
            // the other if an answer comes before the ACK (perftest's `ib_send_lat -e` then hangs now and then).
            self.received |= received && news == News::None;
        }
    }

    fn lends(&mut self) -> bool {
        self.lends && self.lending.is_some_and(Lending::is_allowed)
    }

    fn event(&mut self, event: QpEvent) {
        self.qp.tell(event);
    }

    fn drop_packet(&mut self, reason: Drop) {
        self.counters.drop_packet(reason);
    }

    fn count(&mut self, what: Count, n: u32) {
        self.counters.count(what, n);
    }

    fn window(&mut self, window: Window) -> u32 {
        let Some(id) = self.id(window) else { return u32::MAX };
        self.asked[window as usize] = Some(id);
        self.windows.available(id)
    }

    fn window_take(&mut self, window: Window, bytes: u32) {
        if let Some(id) = self.id(window) {
            self.windows.take(id, bytes);
        }
    }

    fn window_return(&mut self, window: Window, bytes: u32, signal: WindowSignal) {
        if let Some(id) = self.id(window) {
            self.give_back(id, bytes, signal);
        }
    }

    fn window_lost(&mut self, window: Window, bytes: u32) {
        if let Some(id) = self.id(window) {
            self.windows.lost(id, bytes);
        }
    }

    fn early_budget(&self) -> Arc<EarlyBudget> {
        Arc::clone(self.early)
    }

    fn window_towards(&mut self, path: &PathAddr, qpn: u32) -> u32 {
        let id = self.towards(path, qpn);
        self.asked[Window::Requests as usize] = Some(id);
        self.windows.available(id)
    }

    fn window_take_towards(&mut self, path: &PathAddr, qpn: u32, bytes: u32) {
        let id = self.towards(path, qpn);
        self.windows.take(id, bytes);
    }

    fn window_return_towards(&mut self, path: &PathAddr, qpn: u32, bytes: u32, signal: WindowSignal) {
        let id = self.towards(path, qpn);
        self.give_back(id, bytes, signal);
    }
}
