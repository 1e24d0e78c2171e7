//! The program's side of a queue pair: what posting and polling threads touch without the lane's lock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ferroce_core::flow::{FlowId, FlowRule, Rss};
use ferroce_core::{AsyncEvent, AsyncQueue, CoreError, Cq, RecvQueue, Srq, XrcDomain};
use ferroce_transport::{
    QpAttr, QpAttrMask, QpEvent, QpInit, QpState, QpType, RecvWr, SendData, SendFlags, SendOp, SendWr,
};
use parking_lot::Mutex;

use crate::groups::Group;
use crate::lane::{FAILED, LANE_SHIFT, Lane};

/// Sizes of a queue pair, as granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCaps {
    /// Send requests that may be outstanding.
    pub max_send_wr: u32,
    /// Receive requests that may be posted (0 with an SRQ).
    pub max_recv_wr: u32,
    /// Scatter/gather elements of a send request.
    pub max_send_sge: u32,
    /// Scatter/gather elements of a receive request.
    pub max_recv_sge: u32,
    /// Bytes of an inline send.
    pub max_inline_data: u32,
}

/// Where a queue pair's receive requests come from.
#[derive(Clone, Debug)]
pub enum RecvSource {
    /// Its own receive queue.
    Own(Arc<RecvQueue>),
    /// A shared receive queue.
    Shared(Arc<Srq>),
    /// The shared receive queues of an XRC domain, of which each request names one (XRC targets).
    Domain(Arc<XrcDomain>),
    /// Frames are spread over the receive queues of other RAW_PACKET queue pairs of the lane, by a hash.
    Spread(Arc<Rss<Arc<QueuePair>>>),
    /// It receives nothing (XRC initiators).
    None,
}

/// What a queue pair is made of.
#[derive(Debug)]
pub struct QueuePairInit {
    /// For the transport; `qpn` is filled in by the lane.
    pub transport: QpInit,
    /// Sizes.
    pub caps: QueueCaps,
    /// Every send request makes a completion.
    pub sq_sig_all: bool,
    /// Completions of sends; an XRC target has none.
    pub send_cq: Option<Arc<Cq>>,
    /// Completions of receives; the two ends of XRC have none.
    pub recv_cq: Option<Arc<Cq>>,
    /// Receives.
    pub recv: RecvSource,
    /// Asynchronous events go here.
    pub events: Arc<AsyncQueue>,
    /// Named in asynchronous events.
    pub cookie: u64,
    /// Which of the card's devices it belongs to, by a number of the caller's: what it counts counts for that device, too.
    pub device: u32,
}

/// A queue pair of a lane. The transport's machine lives in the lane, behind its lock; this is the rest.
#[derive(Debug)]
pub struct QueuePair {
    pub(crate) slot: u16,
    pub(crate) qpn: u32,
    pub(crate) init: QueuePairInit,
    pub(crate) lane: Arc<Lane>,
    /// Posted, not yet seen by the lane.
    posted: Mutex<VecDeque<SendWr>>,
    /// Send requests outstanding, posted ones included.
    send_used: AtomicU32,
    state: AtomicU32,
    /// The lease of the peer to whose lane there is a ring, for the change to RTR; 0: none.
    peer_lease: AtomicU64,
    /// The doorbell is rung and not yet answered.
    pub(crate) bell: AtomicBool,
    /// Who is told of asynchronous events: at first whoever made it. XRC targets can be opened more than once.
    listeners: Mutex<Vec<Listener>>,
}

/// Who is told of a queue pair's asynchronous events.
#[derive(Clone, Debug)]
pub struct Listener {
    /// Where.
    pub events: Arc<AsyncQueue>,
    /// Named in the events.
    pub cookie: u64,
}

impl QueuePair {
    pub(crate) fn new(slot: u16, qpn: u32, mut init: QueuePairInit, lane: Arc<Lane>) -> QueuePair {
        init.transport.qpn = qpn;
        let first = Listener { events: Arc::clone(&init.events), cookie: init.cookie };
        QueuePair {
            slot,
            qpn,
            init,
            lane,
            posted: Mutex::new(VecDeque::new()),
            send_used: AtomicU32::new(0),
            state: AtomicU32::new(QpState::Reset as u32),
            peer_lease: AtomicU64::new(0),
            bell: AtomicBool::new(false),
            listeners: Mutex::new(vec![first]),
        }
    }

    /// Send requests that are not complete.
    pub(crate) fn sends_outstanding(&self) -> u32 {
        self.send_used.load(Ordering::Relaxed)
    }

    /// Its number on the wire.
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// What it was made with.
    pub fn init(&self) -> &QueuePairInit {
        &self.init
    }

    /// The lane that runs it.
    pub fn lane(&self) -> &Arc<Lane> {
        &self.lane
    }

    /// The state it was last seen in.
    pub fn state(&self) -> QpState {
        match self.state.load(Ordering::Acquire) {
            0 => QpState::Reset,
            1 => QpState::Init,
            2 => QpState::Rtr,
            3 => QpState::Rts,
            4 => QpState::Sqd,
            5 => QpState::Sqe,
            6 => QpState::Err,
            other => unreachable!("state {other} was never stored"),
        }
    }

    pub(crate) fn set_state(&self, state: QpState) {
        self.state.store(state as u32, Ordering::Release);
    }

    /// Queues a send request. [`QueuePair::ring`] makes the lane look at it; one ring serves a whole list.
    ///
    /// # Errors
    /// EINVAL: wrong state (RESET, INIT, RTR), too many elements, too much inline data. ENOMEM: the queue is full.
    pub fn post_send(&self, wr: SendWr) -> Result<(), CoreError> {
        self.check_send(&wr)?;
        self.queue_sends(std::iter::once(wr))
    }

    /// Queues several send requests: all of them, or none.
    ///
    /// # Errors
    /// As for [`QueuePair::post_send`], for any of them.
    pub fn post_send_all(&self, wrs: Vec<SendWr>) -> Result<(), CoreError> {
        wrs.iter().try_for_each(|wr| self.check_send(wr))?;
        self.queue_sends(wrs.into_iter())
    }

    fn check_send(&self, wr: &SendWr) -> Result<(), CoreError> {
        if matches!(self.state(), QpState::Reset | QpState::Init | QpState::Rtr) {
            return Err(CoreError::new(
                libc::EINVAL,
                "post_send before the queue pair is in RTS: ibv_modify_qp it to RTS first",
            ));
        }
        if self.lane.is_closed() {
            return Err(CoreError::new(libc::EIO, FAILED));
        }
        self.check_operation(wr)?;
        self.check_data(wr)
    }

    fn queue_sends(&self, wrs: impl ExactSizeIterator<Item = SendWr>) -> Result<(), CoreError> {
        let count = u32::try_from(wrs.len()).unwrap_or(u32::MAX);
        let mut posted = self.posted.lock();
        // Others only make it smaller meanwhile.
        let used = self.send_used.load(Ordering::Acquire);
        if used.saturating_add(count) > self.init.caps.max_send_wr {
            return Err(CoreError::new(
                libc::ENOMEM,
                "the send queue is full: poll completions before posting more, or ask for a larger max_send_wr",
            ));
        }
        self.send_used.fetch_add(count, Ordering::AcqRel);
        posted.extend(wrs.map(|mut wr| {
            if self.init.sq_sig_all {
                wr.flags |= SendFlags::SIGNALED;
            }
            wr
        }));
        Ok(())
    }

    /// The operations of each service type: IBA table 35.
    fn check_operation(&self, wr: &SendWr) -> Result<(), CoreError> {
        let offered = match self.init.transport.qp_type {
            QpType::Rc | QpType::XrcSend => true,
            QpType::XrcRecv => false,
            QpType::Uc => {
                matches!(wr.op, SendOp::Send | SendOp::SendImm { .. } | SendOp::Write { .. } | SendOp::WriteImm { .. })
            }
            QpType::Ud => matches!(wr.op, SendOp::Send | SendOp::SendImm { .. }),
            QpType::RawPacket => matches!(wr.op, SendOp::Send),
        };
        if !offered {
            return Err(CoreError::new(
                libc::EINVAL,
                "opcode: the queue pair's service type does not have this operation",
            ));
        }
        if self.init.transport.qp_type == QpType::Ud && wr.ud.is_none() {
            return Err(CoreError::new(libc::EINVAL, "wr.ud.ah: a UD request needs an address handle"));
        }
        if self.init.transport.qp_type == QpType::RawPacket && wr.flags.contains(SendFlags::IP_CSUM) {
            return Err(CoreError::new(
                libc::EINVAL,
                "send_flags: IBV_SEND_IP_CSUM is not among the device's raw_packet_caps",
            ));
        }
        let is_of_this_host = matches!(wr.op, SendOp::LocalInv { .. } | SendOp::BindMw(_));
        if self.init.transport.qp_type == QpType::XrcSend && wr.xrc_srqn.is_none() && !is_of_this_host {
            return Err(CoreError::new(
                libc::EINVAL,
                "qp_type.xrc.remote_srqn: an XRC request needs the peer's SRQ number",
            ));
        }
        Ok(())
    }

    fn check_data(&self, wr: &SendWr) -> Result<(), CoreError> {
        match &wr.data {
            SendData::Sges(sges) if sges.len() > self.init.caps.max_send_sge as usize => {
                Err(CoreError::new(libc::EINVAL, "num_sge is above the queue pair's max_send_sge"))
            }
            SendData::Inline(bytes) if bytes.len() > self.init.caps.max_inline_data as usize => {
                Err(CoreError::new(libc::EINVAL, "inline data is longer than the queue pair's max_inline_data"))
            }
            _ => Ok(()),
        }
    }

    /// Tells the lane that requests were posted; runs it here and now if it is free.
    pub fn ring(&self) {
        self.lane.ring(self);
    }

    /// Posts a receive request to the queue pair's own receive queue.
    ///
    /// # Errors
    /// EINVAL: the QP is in RESET, uses an SRQ or receives nothing, or too many elements. ENOMEM: the queue is full.
    pub fn post_recv(&self, wr: RecvWr) -> Result<(), CoreError> {
        let queue = match &self.init.recv {
            RecvSource::Own(queue) => queue,
            RecvSource::Shared(_) | RecvSource::Domain(_) => {
                return Err(CoreError::new(
                    libc::EINVAL,
                    "post_recv to a queue pair that uses an SRQ: use ibv_post_srq_recv",
                ));
            }
            RecvSource::Spread(_) => {
                return Err(CoreError::new(
                    libc::EINVAL,
                    "post_recv to a queue pair that spreads its frames over WQs: use ibv_post_wq_recv",
                ));
            }
            RecvSource::None => {
                return Err(CoreError::new(
                    libc::EINVAL,
                    "post_recv to an XRC_SEND queue pair, which receives nothing",
                ));
            }
        };
        let state = self.state();
        if state == QpState::Reset {
            return Err(CoreError::new(libc::EINVAL, "post_recv in RESET: ibv_modify_qp the queue pair to INIT first"));
        }
        queue.post(wr)?;
        if state == QpState::Err || self.state() == QpState::Err {
            self.ring();
        }
        Ok(())
    }

    /// Before a change to RTR, towards a queue pair of another process at the same address: sees to it that the packets go through
    /// a ring, if the peer takes it within a moment. `lease` is the one under which the peer's process has its lane now. False: there is
    /// none, and the packets will go over the link.
    pub fn prefer_ring(&self, dest_qpn: u32, lease: u64) -> bool {
        let ready = self.lane.make_ring((dest_qpn >> LANE_SHIFT) as u16, lease);
        self.peer_lease.store(if ready { lease } else { 0 }, Ordering::Release);
        ready
    }

    pub(crate) fn take_peer_lease(&self) -> Option<u64> {
        Some(self.peer_lease.swap(0, Ordering::AcqRel)).filter(|lease| *lease != 0)
    }

    /// Changes attributes and state.
    ///
    /// # Errors
    /// EINVAL with the attribute at fault. EIO, as for the changes below: the card has failed.
    pub fn modify(&self, attr: &QpAttr, mask: QpAttrMask) -> Result<(), CoreError> {
        self.lane.modify(self, attr, mask)
    }

    /// Present attributes.
    ///
    /// # Errors
    /// EINVAL: it is destroyed.
    pub fn query(&self) -> Result<QpAttr, CoreError> {
        self.lane.query(self)
    }

    /// Gives it a copy of every datagram to the group that the lane's link receives. Whether the host joined the group is the caller's
    /// affair. A second time changes nothing.
    ///
    /// # Errors
    /// ENOMEM: the group has too many queue pairs here. EINVAL: it is destroyed.
    pub fn attach(&self, group: Group) -> Result<(), CoreError> {
        self.lane.attach(self, group)
    }

    /// Ends that.
    ///
    /// # Errors
    /// EINVAL: it is destroyed.
    pub fn detach(&self, group: Group) -> Result<(), CoreError> {
        self.lane.detach(self, group)
    }

    /// Steers frames of its device to it (RAW_PACKET).
    ///
    /// # Errors
    /// EINVAL: it takes no frames, or is destroyed. ENOMEM: the device has too many flows. EPERM: the process may not receive frames any more.
    pub fn add_flow(&self, rule: FlowRule) -> Result<FlowId, CoreError> {
        self.lane.add_flow(self, rule)
    }

    /// Ends that. When it returns, no frame comes by the flow any more.
    ///
    /// # Errors
    /// EINVAL: there is no such flow.
    pub fn remove_flow(&self, id: FlowId) -> Result<(), CoreError> {
        self.lane.remove_flow(self, id)
    }

    /// Tells one more of asynchronous events.
    pub fn add_listener(&self, listener: Listener) {
        self.listeners.lock().push(listener);
    }

    /// Tells who has this cookie no more. When it returns, no event of the kind is on its way.
    pub fn remove_listener(&self, cookie: u64) {
        self.listeners.lock().retain(|listener| listener.cookie != cookie);
    }

    pub(crate) fn tell(&self, event: QpEvent) {
        if event == QpEvent::WqFatal {
            if !self.is_work_queue() {
                return;
            }
            // The machine says so when it is done with the frame; who hears of it now may ask at once.
            self.set_state(QpState::Err);
        }
        for Listener { events, cookie } in &*self.listeners.lock() {
            events.push(AsyncEvent::Qp { cookie: *cookie, qpn: self.qpn, event });
        }
    }

    /// Is it a receive work queue, of which a program does not know that it is half a queue pair?
    fn is_work_queue(&self) -> bool {
        self.init.transport.qp_type == QpType::RawPacket && self.init.send_cq.is_none()
    }

    /// Takes the queue pair off its lane. When it returns, no thread touches its memory or queues any more.
    pub fn destroy(&self) {
        self.lane.destroy(self);
    }

    pub(crate) fn take_posted(&self) -> Option<SendWr> {
        self.posted.lock().pop_front()
    }

    pub(crate) fn forget_posted(&self) {
        // Both under one lock, as in posting: a request posted just now is either forgotten or counted.
        let mut posted = self.posted.lock();
        posted.clear();
        self.send_used.store(0, Ordering::Release);
        drop(posted);
        if let RecvSource::Own(queue) = &self.init.recv {
            while queue.pop().is_some() {}
        }
    }

    pub(crate) fn release_send(&self, count: u32) {
        let before = self.send_used.fetch_sub(count, Ordering::AcqRel);
        assert!(before >= count, "more send requests completed than were posted");
    }

    pub(crate) fn pop_recv(&self) -> Option<RecvWr> {
        match &self.init.recv {
            RecvSource::Own(queue) => queue.pop(),
            RecvSource::Shared(srq) => srq.pop(),
            // The host knows which queue a request chose.
            RecvSource::Domain(_) | RecvSource::Spread(_) | RecvSource::None => None,
        }
    }
}
