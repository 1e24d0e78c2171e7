//! Queue pairs.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferroce_core::sync::Mutex;
use ferroce_core::{EventSource, RecvQueue, limits};
use ferroce_engine::{Group, QueueCaps, QueuePair, QueuePairInit, RecvSource};
use ferroce_transport::{QpAttr, QpAttrMask, QpInit, QpState, QpType, RecvWr, SendWr};

use crate::cq::Cq;
use crate::error::{Error, Result};
use crate::pd::{AhAttr, Pd};
use crate::srq::{Srq, check_limit};

/// What a queue pair is made with.
#[derive(Clone, Debug)]
pub struct QpCreate {
    /// Completions of sends.
    pub send_cq: Arc<Cq>,
    /// Completions of receives.
    pub recv_cq: Arc<Cq>,
    /// Receives come from here instead of an own receive queue.
    pub srq: Option<Arc<Srq>>,
    /// Sizes asked for; the QP has at least these.
    pub caps: QueueCaps,
    /// Service type.
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

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    pd: Arc<Pd>,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    srq: Option<Arc<Srq>>,
    pair: Arc<QueuePair>,
    /// Address vector as given, for queries.
    ah: Mutex<AhAttr>,
    /// Multicast groups that it is attached to.
    groups: Mutex<BTreeSet<IpAddr>>,
    destroyed: AtomicBool,
}

impl Qp {
    pub(crate) fn create(pd: &Arc<Pd>, create: &QpCreate) -> Result<Arc<Qp>> {
        check_caps(&create.caps)?;
        check_context(pd, create)?;
        let caps = granted(&create.caps, create.srq.is_some());
        let recv = match &create.srq {
            Some(srq) => RecvSource::Shared(Arc::clone(srq.queue())),
            None => RecvSource::Own(Arc::new(RecvQueue::new(caps.max_recv_wr, caps.max_recv_sge)?)),
        };
        let context = pd.context();
        let init = QueuePairInit {
            transport: QpInit {
                qpn: 0,
                qp_type: create.qp_type,
                pd: pd.handle(),
                has_srq: create.srq.is_some(),
                max_send_wr: caps.max_send_wr,
            },
            caps,
            sq_sig_all: create.sq_sig_all,
            send_cq: Arc::clone(create.send_cq.queue()),
            recv_cq: Arc::clone(create.recv_cq.queue()),
            recv,
            events: Arc::clone(context.events()),
            cookie: create.cookie,
            device: context.device().ifindex(),
        };
        let lane = context.card().lanes().into_iter().next().expect("a card has a lane");
        let pair = lane.create_qp(init)?;
        pd.users.fetch_add(1, Ordering::Relaxed);
        create.send_cq.users.fetch_add(1, Ordering::Relaxed);
        create.recv_cq.users.fetch_add(1, Ordering::Relaxed);
        if let Some(srq) = &create.srq {
            srq.users.fetch_add(1, Ordering::Relaxed);
        }
        Ok(Arc::new(Qp {
            pd: Arc::clone(pd),
            send_cq: Arc::clone(&create.send_cq),
            recv_cq: Arc::clone(&create.recv_cq),
            srq: create.srq.clone(),
            pair,
            ah: Mutex::new(AhAttr::default()),
            groups: Mutex::new(BTreeSet::new()),
            destroyed: AtomicBool::new(false),
        }))
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

    /// The protection domain it was made in.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Changes attributes and state.
    ///
    /// # Errors
    /// EINVAL with the attribute at fault and the remedy. ENETUNREACH, EHOSTUNREACH: no route leads to the destination.
    pub fn modify(&self, change: &QpModify, mask: QpAttrMask) -> Result<()> {
        self.pd.context().check()?;
        let mut attr = change.attr.clone();
        if mask.contains(QpAttrMask::AV) {
            attr.path = Some(Arc::new(change.ah.resolve(self.pd.context())?));
        }
        if mask.contains(QpAttrMask::PATH_MTU) {
            self.check_path_mtu(attr.path_mtu)?;
        }
        if self.qp_type() == QpType::Ud {
            // Not an attribute of a UD queue pair: a datagram is as large as the port's MTU lets it be.
            attr.path_mtu = self.pd.context().device().port().active_mtu;
        }
        let connects = mask.contains(QpAttrMask::STATE | QpAttrMask::AV | QpAttrMask::DEST_QPN)
            && (self.state(), attr.state) == (QpState::Init, QpState::Rtr);
        if let Some(path) = attr.path.as_ref().filter(|_| connects && self.qp_type() != QpType::Ud) {
            self.pd.context().prefer_ring(&self.pair, path, attr.dest_qpn);
        }
        self.pair.modify(&attr, mask)?;
        if mask.contains(QpAttrMask::AV) {
            *self.ah.lock() = change.ah;
        }
        Ok(())
    }

    fn check_path_mtu(&self, path_mtu: u32) -> Result<()> {
        let device = self.pd.context().device();
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
        self.pd.context().check()?;
        Ok(QpModify { attr: self.pair.query()?, ah: *self.ah.lock() })
    }

    /// Queues a send request; [`Qp::ring`] sets it going. One ring serves a whole list.
    ///
    /// # Errors
    /// EINVAL: wrong state, too many elements, too much inline data, an operation that the service type lacks. ENOMEM: full.
    pub fn post_send(&self, wr: SendWr) -> Result<()> {
        self.pd.context().check()?;
        Ok(self.pair.post_send(wr)?)
    }

    /// Queues several send requests: all of them, or none.
    ///
    /// # Errors
    /// As for [`Qp::post_send`], for any of them.
    pub fn post_send_all(&self, wrs: Vec<SendWr>) -> Result<()> {
        self.pd.context().check()?;
        Ok(self.pair.post_send_all(wrs)?)
    }

    /// Rings the doorbell.
    pub fn ring(&self) {
        if !self.pd.context().is_stale() {
            self.pair.ring();
        }
    }

    /// Posts a receive request.
    ///
    /// # Errors
    /// EINVAL: RESET, an SRQ is used, too many elements. ENOMEM: full.
    pub fn post_recv(&self, wr: RecvWr) -> Result<()> {
        self.pd.context().check()?;
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
        let (memberships, lane) = (self.pd.context().groups(), self.pair.lane().number());
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
        self.pd.context().groups().leave(self.pair.lane().number(), group);
    }

    fn multicast_group(&self, addr: IpAddr) -> Result<Group> {
        self.pd.context().check()?;
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
        Ok(Group { addr, ifindex: self.pd.context().device().ifindex() })
    }

    /// Ends it. When it returns, no thread touches its memory and queues any more, and no more events come from it. Gives the
    /// number of asynchronous events it handed out.
    ///
    /// # Errors
    /// EINVAL when it is done already. EBUSY: it is attached to multicast groups.
    pub fn destroy(&self) -> Result<u64> {
        if self.pd.context().is_stale() {
            return Ok(0);
        }
        let groups = self.groups.lock();
        if let Some(group) = groups.first() {
            return Err(Error::new(
                libc::EBUSY,
                format!("the queue pair is attached to multicast group {group}: ibv_detach_mcast it first"),
            ));
        }
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return Err(Error::new(libc::EINVAL, "the queue pair is destroyed already"));
        }
        drop(groups);
        self.pair.destroy();
        self.send_cq.users.fetch_sub(1, Ordering::Relaxed);
        self.recv_cq.users.fetch_sub(1, Ordering::Relaxed);
        if let Some(srq) = &self.srq {
            srq.users.fetch_sub(1, Ordering::Relaxed);
        }
        self.pd.users.fetch_sub(1, Ordering::Relaxed);
        Ok(self.pd.context().events().forget(EventSource::Qp(self.pair.init().cookie)))
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        if !self.pd.context().is_stale() {
            let ifindex = self.pd.context().device().ifindex();
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
    let srq = create.srq.as_ref().map(|srq| srq.pd().context());
    let contexts = [("send_cq", create.send_cq.context()), ("recv_cq", create.recv_cq.context())];
    for (name, context) in contexts.into_iter().chain(srq.map(|context| ("srq", context))) {
        if !Arc::ptr_eq(context, pd.context()) {
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
