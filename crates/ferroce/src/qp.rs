//! Queue pairs.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ferroce_core::flow::FlowAttr;
use ferroce_core::sync::Mutex;
use ferroce_core::{EventSource, RecvQueue, limits};
use ferroce_engine::{Group, QueueCaps, QueuePair, QueuePairInit, RecvSource};
use ferroce_transport::{QpAttr, QpAttrMask, QpInit, QpState, QpType, RecvWr, SendWr};

use crate::context::Context;
use crate::cq::Cq;
use crate::error::{Error, Result};
use crate::pd::{AhAttr, Pd};
use crate::srq::{Srq, check_limit};
use crate::steering::Flow;
use crate::wq::{RwqTable, SpreadCreate, WqCreate};
use crate::xrc::Xrcd;

/// What a queue pair is made with.
#[derive(Clone, Debug)]
pub struct QpCreate {
    /// Completions of sends.
    pub send_cq: Arc<Cq>,
    /// Completions of receives; those of an SRQ that matches tags go to its own.
    pub recv_cq: Arc<Cq>,
    /// Receives come from here instead of an own receive queue.
    pub srq: Option<Arc<Srq>>,
    /// Sizes asked for; the QP has at least these.
    pub caps: QueueCaps,
    /// Service type: RC, UC, UD or RAW_PACKET.
    pub qp_type: QpType,
    /// Every send request makes a completion.
    pub sq_sig_all: bool,
    /// Named in asynchronous events.
    pub cookie: u64,
}

/// Attributes for [`Qp::modify`], with the address vector as programs give it.
#[derive(Clone, Debug, Default)]
pub struct QpModify {
    /// Everything but the address vector.
    pub attr: QpAttr,
    /// Address vector, used if the mask has AV.
    pub ah: AhAttr,
}

/// What an XRC initiator is made with.
#[derive(Clone, Debug)]
pub struct InitiatorCreate {
    /// Completions of sends.
    pub send_cq: Arc<Cq>,
    /// Sizes asked for; those of receives mean nothing.
    pub caps: QueueCaps,
    /// Every send request makes a completion.
    pub sq_sig_all: bool,
    /// Named in asynchronous events.
    pub cookie: u64,
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    context: Arc<Context>,
    uses: Uses,
    pair: Arc<QueuePair>,
    /// Named in asynchronous events.
    cookie: u64,
    /// Address vector as given, for queries.
    ah: Arc<Mutex<AhAttr>>,
    /// Multicast groups that it is attached to.
    groups: Mutex<BTreeSet<IpAddr>>,
    /// Flows that steer to it.
    pub(crate) flows: AtomicU32,
    destroyed: AtomicBool,
}

/// What a queue pair uses, which cannot end before it.
#[derive(Debug, Default)]
struct Uses {
    pd: Option<Arc<Pd>>,
    send_cq: Option<Arc<Cq>>,
    recv_cq: Option<Arc<Cq>>,
    srq: Option<Arc<Srq>>,
    /// The domain of an XRC target.
    xrcd: Option<Arc<Xrcd>>,
    /// Where a queue pair spreads its frames.
    table: Option<Arc<RwqTable>>,
}

impl Uses {
    fn counters(&self) -> impl Iterator<Item = &AtomicU32> {
        let cqs = [&self.send_cq, &self.recv_cq].into_iter().flatten().map(|cq| &cq.users);
        let pd = self.pd.iter().map(|pd| &pd.users);
        let table = self.table.iter().map(|table| &table.users);
        let (srq, xrcd) = (self.srq.iter().map(|srq| &srq.users), self.xrcd.iter().map(|xrcd| &xrcd.users));
        cqs.chain(pd).chain(srq).chain(xrcd).chain(table)
    }

    fn begin(&self) {
        for users in self.counters() {
            users.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn end(&self) {
        for users in self.counters() {
            users.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Sizes of what has no queues of its own.
const NO_QUEUES: QueueCaps =
    QueueCaps { max_send_wr: 0, max_recv_wr: 0, max_send_sge: 0, max_recv_sge: 0, max_inline_data: 0 };

/// What the engine has to know besides what is used.
struct Plan {
    qp_type: QpType,
    caps: QueueCaps,
    recv: RecvSource,
    sq_sig_all: bool,
    cookie: u64,
}

impl Qp {
    pub(crate) fn create(pd: &Arc<Pd>, create: &QpCreate) -> Result<Arc<Qp>> {
        if create.qp_type.is_xrc() {
            return Err(Error::new(
                libc::EINVAL,
                "the two ends of XRC are made by Pd::create_initiator and Xrcd::create_target",
            ));
        }
        if create.qp_type == QpType::RawPacket && create.srq.is_some() {
            return Err(Error::new(libc::EOPNOTSUPP, "srq: RAW_PACKET queue pairs have receive queues of their own"));
        }
        let tag_cq = create.srq.as_ref().and_then(|srq| srq.tag_cq());
        if tag_cq.is_some() && create.qp_type != QpType::Rc {
            return Err(Error::new(libc::EINVAL, "srq matches tags, which is for RC queue pairs"));
        }
        check_caps(&create.caps)?;
        check_context(pd, create)?;
        let caps = granted(&create.caps, create.srq.is_some());
        let recv = match &create.srq {
            Some(srq) => RecvSource::Shared(Arc::clone(srq.queue())),
            None => RecvSource::Own(Arc::new(RecvQueue::new(caps.max_recv_wr, caps.max_recv_sge)?)),
        };
        let uses = Uses {
            pd: Some(Arc::clone(pd)),
            send_cq: Some(Arc::clone(&create.send_cq)),
            recv_cq: Some(Arc::clone(tag_cq.unwrap_or(&create.recv_cq))),
            srq: create.srq.clone(),
            ..Uses::default()
        };
        let (qp_type, sq_sig_all, cookie) = (create.qp_type, create.sq_sig_all, create.cookie);
        Qp::make(pd.context(), uses, Plan { qp_type, caps, recv, sq_sig_all, cookie })
    }

    pub(crate) fn create_initiator(pd: &Arc<Pd>, create: &InitiatorCreate) -> Result<Arc<Qp>> {
        check_caps(&create.caps)?;
        check_contexts(pd.context(), [("send_cq", create.send_cq.context())])?;
        let caps = QueueCaps { max_recv_wr: 0, max_recv_sge: 0, ..granted(&create.caps, true) };
        let uses = Uses { pd: Some(Arc::clone(pd)), send_cq: Some(Arc::clone(&create.send_cq)), ..Uses::default() };
        let (qp_type, recv) = (QpType::XrcSend, RecvSource::None);
        Qp::make(pd.context(), uses, Plan { qp_type, caps, recv, sq_sig_all: create.sq_sig_all, cookie: create.cookie })
    }

    /// The receiving half of a RAW_PACKET queue pair: a receive work queue.
    pub(crate) fn create_half(pd: &Arc<Pd>, create: &WqCreate) -> Result<Arc<Qp>> {
        check_limit("max_wr", create.max_wr, limits::MAX_QP_WR)?;
        check_limit("max_sge", create.max_sge, limits::MAX_SGE)?;
        check_contexts(pd.context(), [("cq", create.cq.context())])?;
        let caps = QueueCaps { max_recv_wr: create.max_wr, max_recv_sge: create.max_sge.max(1), ..NO_QUEUES };
        let recv = RecvSource::Own(Arc::new(RecvQueue::new(caps.max_recv_wr, caps.max_recv_sge)?));
        let uses = Uses { pd: Some(Arc::clone(pd)), recv_cq: Some(Arc::clone(&create.cq)), ..Uses::default() };
        let plan = Plan { qp_type: QpType::RawPacket, caps, recv, sq_sig_all: false, cookie: create.cookie };
        Qp::make(pd.context(), uses, plan)
    }

    pub(crate) fn create_spread(pd: &Arc<Pd>, create: &SpreadCreate<'_>) -> Result<Arc<Qp>> {
        if !create.table.is_of(pd) {
            return Err(Error::new(
                libc::EINVAL,
                "rwq_ind_tbl belongs to another device context than the protection domain",
            ));
        }
        let recv = RecvSource::Spread(Arc::new(create.table.spread(create.key, create.fields)?));
        let uses = Uses { pd: Some(Arc::clone(pd)), table: Some(Arc::clone(&create.table)), ..Uses::default() };
        let (qp_type, caps) = (QpType::RawPacket, NO_QUEUES);
        Qp::make(pd.context(), uses, Plan { qp_type, caps, recv, sq_sig_all: false, cookie: create.cookie })
    }

    pub(crate) fn create_target(xrcd: &Arc<Xrcd>, cookie: u64) -> Result<Arc<Qp>> {
        let caps = NO_QUEUES;
        let recv = RecvSource::Domain(Arc::clone(xrcd.domain().queues()));
        let uses = Uses { xrcd: Some(Arc::clone(xrcd)), ..Uses::default() };
        let plan = Plan { qp_type: QpType::XrcRecv, caps, recv, sq_sig_all: false, cookie };
        let qp = Qp::make(xrcd.context(), uses, plan)?;
        xrcd.domain().add_target(&qp.pair, &qp.ah);
        Ok(qp)
    }

    /// A target that is open already.
    pub(crate) fn of_target(xrcd: &Arc<Xrcd>, pair: &Arc<QueuePair>, ah: &Arc<Mutex<AhAttr>>, cookie: u64) -> Arc<Qp> {
        let uses = Uses { xrcd: Some(Arc::clone(xrcd)), ..Uses::default() };
        Qp::new(xrcd.context(), uses, Arc::clone(pair), Arc::clone(ah), cookie)
    }

    fn make(context: &Arc<Context>, uses: Uses, plan: Plan) -> Result<Arc<Qp>> {
        let Plan { qp_type, caps, recv, sq_sig_all, cookie } = plan;
        let init = QueuePairInit {
            transport: QpInit {
                qpn: 0,
                qp_type,
                pd: uses.pd.as_ref().map_or(0, |pd| pd.handle()),
                has_srq: uses.srq.is_some() || qp_type == QpType::XrcRecv,
                max_send_wr: caps.max_send_wr,
            },
            caps,
            sq_sig_all,
            send_cq: uses.send_cq.as_ref().map(|cq| Arc::clone(cq.queue())),
            recv_cq: uses.recv_cq.as_ref().map(|cq| Arc::clone(cq.queue())),
            recv,
            events: Arc::clone(context.events()),
            cookie,
            device: context.device().ifindex(),
        };
        let lane = context.card().lanes().into_iter().next().expect("a card has a lane");
        Ok(Qp::new(context, uses, lane.create_qp(init)?, Arc::default(), cookie))
    }

    fn new(context: &Arc<Context>, uses: Uses, pair: Arc<QueuePair>, ah: Arc<Mutex<AhAttr>>, cookie: u64) -> Arc<Qp> {
        uses.begin();
        Arc::new(Qp {
            context: Arc::clone(context),
            uses,
            pair,
            cookie,
            ah,
            groups: Mutex::new(BTreeSet::new()),
            flows: AtomicU32::new(0),
            destroyed: AtomicBool::new(false),
        })
    }

    /// Its number on the wire.
    pub fn qpn(&self) -> u32 {
        self.pair.qpn()
    }

    /// The state it was last seen in.
    pub fn state(&self) -> QpState {
        self.pair.state()
    }

    /// Its service type.
    pub fn qp_type(&self) -> QpType {
        self.pair.init().transport.qp_type
    }

    /// Sizes as granted.
    pub fn caps(&self) -> QueueCaps {
        self.pair.init().caps
    }

    /// Does every send request make a completion?
    pub fn sq_sig_all(&self) -> bool {
        self.pair.init().sq_sig_all
    }

    /// The protection domain it was made in; an XRC target has none.
    pub fn pd(&self) -> Option<&Arc<Pd>> {
        self.uses.pd.as_ref()
    }

    /// The context it was made in.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Changes attributes and state.
    ///
    /// # Errors
    /// EINVAL with the attribute at fault and the remedy. EOPNOTSUPP: it spreads its frames over WQs, which have the states. ENETUNREACH, EHOSTUNREACH: no route leads to the destination.
    pub fn modify(&self, change: &QpModify, mask: QpAttrMask) -> Result<()> {
        self.context.check()?;
        if self.uses.table.is_some() {
            return Err(Error::new(
                libc::EOPNOTSUPP,
                "a queue pair that spreads its frames over WQs has no states: ibv_modify_wq these",
            ));
        }
        let mut attr = change.attr.clone();
        if mask.contains(QpAttrMask::AV) {
            attr.path = Some(Arc::new(change.ah.resolve(&self.context)?));
        }
        if mask.contains(QpAttrMask::PATH_MTU) {
            self.check_path_mtu(attr.path_mtu)?;
        }
        if self.qp_type() == QpType::Ud {
            // Not an attribute of a UD queue pair: a datagram is as large as the port's MTU lets it be.
            attr.path_mtu = self.context.device().port().active_mtu;
        }
        let connects = mask.contains(QpAttrMask::STATE | QpAttrMask::AV | QpAttrMask::DEST_QPN)
            && (self.state(), attr.state) == (QpState::Init, QpState::Rtr);
        if let Some(path) = attr.path.as_ref().filter(|_| connects && self.qp_type() != QpType::Ud) {
            self.context.prefer_ring(&self.pair, path, attr.dest_qpn);
        }
        self.pair.modify(&attr, mask)?;
        if mask.contains(QpAttrMask::AV) {
            *self.ah.lock() = change.ah;
        }
        Ok(())
    }

    fn check_path_mtu(&self, path_mtu: u32) -> Result<()> {
        let device = self.context.device();
        let active = device.port().active_mtu;
        if path_mtu > active {
            return Err(Error::new(
                libc::EINVAL,
                format!(
                    "path_mtu is {path_mtu}: interface {} carries at most {active} (active_mtu); ask for that or raise the interface's MTU",
                    device.ifname()
                ),
            ));
        }
        Ok(())
    }

    /// Present attributes and the address vector as it was given.
    ///
    /// # Errors
    /// EIO in a forked child. EINVAL: it is destroyed.
    pub fn query(&self) -> Result<QpModify> {
        self.context.check()?;
        Ok(QpModify { attr: self.pair.query()?, ah: *self.ah.lock() })
    }

    /// Has its requests keep to a rate, in kbit/s of the wire, as [`QpAttrMask::RATE_LIMIT`] does; 0 takes the limit away, as RESET does. Up to [`limits::RATE_LIMIT_BURST`] bytes go in
    /// one go; what the peer is answered does not wait.
    ///
    /// # Errors
    /// EINVAL: another service type than RC, UC and UD, neither in RTS nor in SQD, a rate outside [`limits::RATE_LIMIT`].
    pub fn set_rate_limit(&self, rate_kbps: u32) -> Result<()> {
        let attr = QpAttr { rate_limit: rate_kbps, ..QpAttr::default() };
        self.modify(&QpModify { attr, ah: AhAttr::default() }, QpAttrMask::RATE_LIMIT)
    }

    /// Queues a send request; [`Qp::ring`] sets it going. One ring serves a whole list.
    ///
    /// # Errors
    /// EINVAL: wrong state, too many elements, too much inline data, an operation that the service type lacks. ENOMEM: full.
    pub fn post_send(&self, wr: SendWr) -> Result<()> {
        self.context.check()?;
        Ok(self.pair.post_send(wr)?)
    }

    /// Queues several send requests: all of them, or none.
    ///
    /// # Errors
    /// As for [`Qp::post_send`], for any of them.
    pub fn post_send_all(&self, wrs: Vec<SendWr>) -> Result<()> {
        self.context.check()?;
        Ok(self.pair.post_send_all(wrs)?)
    }

    /// Rings the doorbell.
    pub fn ring(&self) {
        if !self.context.is_stale() {
            self.pair.ring();
        }
    }

    /// Posts a receive request.
    ///
    /// # Errors
    /// EINVAL: RESET, an SRQ is used, too many elements. ENOMEM: full.
    pub fn post_recv(&self, wr: RecvWr) -> Result<()> {
        self.context.check()?;
        Ok(self.pair.post_recv(wr)?)
    }

    /// Joins a multicast group on the device's interface: the queue pair gets a copy of every datagram to the group that has its Q_Key,
    /// also of those from this host. Datagrams to a group are sent to queue pair number 0xffffff. A second time changes nothing.
    ///
    /// # Errors
    /// EINVAL: not a UD queue pair, not a multicast address. ENOMEM: the process is in too many groups, or the group has too many of its
    /// queue pairs. What the service says.
    pub fn attach_mcast(&self, group: IpAddr) -> Result<()> {
        let group = self.multicast_group(group)?;
        let mut groups = self.groups.lock();
        if self.destroyed.load(Ordering::Acquire) {
            return Err(Error::new(libc::EINVAL, "the queue pair is destroyed"));
        }
        if groups.contains(&group.addr) {
            return Ok(());
        }
        let (memberships, lane) = (self.context.groups(), self.pair.lane().number());
        memberships.join(lane, group)?;
        if let Err(error) = self.pair.attach(group) {
            memberships.leave(lane, group);
            return Err(error.into());
        }
        groups.insert(group.addr);
        Ok(())
    }

    /// Leaves a multicast group.
    ///
    /// # Errors
    /// EINVAL: it is not attached to it.
    pub fn detach_mcast(&self, group: IpAddr) -> Result<()> {
        let group = self.multicast_group(group)?;
        let mut groups = self.groups.lock();
        if !groups.remove(&group.addr) {
            return Err(Error::new(libc::EINVAL, format!("the queue pair is not attached to {}", group.addr)));
        }
        self.leave(group);
        Ok(())
    }

    fn leave(&self, group: Group) {
        // A destroyed queue pair is attached to nothing.
        let _ = self.pair.detach(group);
        self.context.groups().leave(self.pair.lane().number(), group);
    }

    fn multicast_group(&self, addr: IpAddr) -> Result<Group> {
        self.context.check()?;
        if self.qp_type() != QpType::Ud {
            return Err(Error::new(libc::EINVAL, "only UD queue pairs can be attached to multicast groups"));
        }
        let addr = addr.to_canonical();
        if !addr.is_multicast() {
            return Err(Error::new(
                libc::EINVAL,
                format!("gid stands for {addr}, which is not a multicast address (::ffff:224.0.0.0/100 or ff00::/8)"),
            ));
        }
        Ok(Group { addr, ifindex: self.context.device().ifindex() })
    }

    /// Has frames steered to a RAW_PACKET queue pair: those that match, of what comes in by the device's interface and of what this process
    /// sends to it.
    ///
    /// # Errors
    /// EINVAL: not a RAW_PACKET queue pair, or specifications that contradict each other. ENOMEM: the device has too many flows. EPERM: no
    /// CAP_NET_RAW any more.
    pub fn create_flow(self: &Arc<Self>, attr: &FlowAttr) -> Result<Arc<Flow>> {
        Flow::create(self, attr)
    }

    pub(crate) fn pair(&self) -> &Arc<QueuePair> {
        &self.pair
    }

    /// Ends it. When it returns, no thread touches its memory and queues any more, and no more events come from it. Gives the
    /// number of asynchronous events it handed out.
    ///
    /// # Errors
    /// EINVAL when it is done already. EBUSY: it is attached to multicast groups, or flows steer to it.
    pub fn destroy(&self) -> Result<u64> {
        if self.context.is_stale() {
            return Ok(0);
        }
        let groups = self.groups.lock();
        if let Some(group) = groups.first() {
            return Err(Error::new(
                libc::EBUSY,
                format!("the queue pair is attached to multicast group {group}: ibv_detach_mcast it first"),
            ));
        }
        let flows = self.flows.load(Ordering::Relaxed);
        if flows > 0 {
            return Err(Error::new(
                libc::EBUSY,
                format!("{flows} flows steer to the queue pair: ibv_destroy_flow them first"),
            ));
        }
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return Err(Error::new(libc::EINVAL, "the queue pair is destroyed already"));
        }
        drop(groups);
        match &self.uses.xrcd {
            Some(xrcd) => xrcd.domain().close_target(&self.pair, self.cookie),
            None => self.pair.destroy(),
        }
        self.uses.end();
        Ok(self.context.events().forget(EventSource::Qp(self.cookie)))
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        if !self.context.is_stale() {
            let ifindex = self.context.device().ifindex();
            for addr in std::mem::take(&mut *self.groups.lock()) {
                self.leave(Group { addr, ifindex });
            }
        }
        // Done already is fine here.
        let _ = self.destroy();
    }
}

fn check_caps(caps: &QueueCaps) -> Result<()> {
    check_limit("cap.max_send_wr", caps.max_send_wr, limits::MAX_QP_WR)?;
    check_limit("cap.max_recv_wr", caps.max_recv_wr, limits::MAX_QP_WR)?;
    check_limit("cap.max_send_sge", caps.max_send_sge, limits::MAX_SGE)?;
    check_limit("cap.max_recv_sge", caps.max_recv_sge, limits::MAX_SGE)?;
    check_limit("cap.max_inline_data", caps.max_inline_data, limits::MAX_INLINE_DATA)
}

/// A queue pair tells its events where its protection domain was made; so must its queues.
fn check_context(pd: &Pd, create: &QpCreate) -> Result<()> {
    let srq = create.srq.as_ref().map(|srq| ("srq", srq.pd().context()));
    let cqs = [("send_cq", create.send_cq.context()), ("recv_cq", create.recv_cq.context())];
    check_contexts(pd.context(), cqs.into_iter().chain(srq))?;
    if create.srq.as_ref().is_some_and(|srq| srq.number().is_some()) {
        return Err(Error::new(libc::EINVAL, "srq belongs to an XRC domain: only XRC targets receive from it"));
    }
    Ok(())
}

fn check_contexts<'a>(
    of: &Arc<Context>,
    others: impl IntoIterator<Item = (&'static str, &'a Arc<Context>)>,
) -> Result<()> {
    for (name, context) in others {
        if !Arc::ptr_eq(context, of) {
            return Err(Error::new(
                libc::EINVAL,
                format!("{name} belongs to another device context than the protection domain"),
            ));
        }
    }
    Ok(())
}

fn granted(asked: &QueueCaps, has_srq: bool) -> QueueCaps {
    /// A gather list's entry in drivers' send queues, whose place inline data takes: programs (rdma_xclient) count on it.
    const ENTRY: u32 = 16;
    QueueCaps {
        max_send_wr: asked.max_send_wr,
        max_recv_wr: if has_srq { 0 } else { asked.max_recv_wr },
        max_send_sge: asked.max_send_sge.max(1),
        max_recv_sge: if has_srq { 0 } else { asked.max_recv_sge.max(1) },
        max_inline_data: asked.max_inline_data.max(ENTRY * asked.max_send_sge.max(1)).min(limits::MAX_INLINE_DATA),
    }
}
