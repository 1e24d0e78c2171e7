//! Shared receive queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ferroce_core::{EventSource, TagList, TagOp, XrcSrq, limits};
use ferroce_transport::RecvWr;

use crate::cq::Cq;
use crate::error::{Error, Result};
use crate::objects;
use crate::pd::Pd;
use crate::xrc::Xrcd;

/// What a shared receive queue is made with.
#[derive(Clone, Copy, Debug)]
pub struct SrqCreate {
    /// Requests that it can hold.
    pub max_wr: u32,
    /// Scatter/gather elements of a request.
    pub max_sge: u32,
    /// Named in asynchronous events.
    pub cookie: u64,
}

/// What a shared receive queue that matches tags is made with.
#[derive(Clone, Copy, Debug)]
pub struct TagSrqCreate {
    /// The ordinary requests, for messages that match no tag.
    pub srq: SrqCreate,
    /// Buffers that the tag list can hold.
    pub max_num_tags: u32,
    /// Operations on it that may be incomplete at a time.
    pub max_ops: u32,
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    pd: Arc<Pd>,
    queue: Arc<ferroce_core::Srq>,
    pub(crate) users: AtomicU32,
    xrc: Option<Xrc>,
    /// If it matches tags: where all its completions go.
    cq: Option<Arc<Cq>>,
    /// Lists it among the process's objects.
    _entry: objects::Entry,
}

/// What a shared receive queue of an XRC domain has besides.
#[derive(Debug)]
struct Xrc {
    xrcd: Arc<Xrcd>,
    cq: Arc<Cq>,
    number: u32,
    gone: AtomicBool,
}

impl Srq {
    pub(crate) fn create(pd: &Arc<Pd>, create: &SrqCreate) -> Result<Arc<Srq>> {
        Srq::make(pd, create, None, |_| Ok(None))
    }

    /// Matching tags.
    pub(crate) fn create_with_tags(pd: &Arc<Pd>, cq: &Arc<Cq>, create: &TagSrqCreate) -> Result<Arc<Srq>> {
        check_limit("tm_cap.max_ops", create.max_ops, limits::MAX_TAG_OPS)?;
        if !Arc::ptr_eq(cq.context(), pd.context()) {
            return Err(Error::new(libc::EINVAL, "cq belongs to another device context than the protection domain"));
        }
        let tags = TagList::new(create.max_num_tags, Arc::clone(cq.queue()))?;
        Srq::make(pd, &create.srq, Some((tags, cq)), |_| Ok(None))
    }

    /// In an XRC domain.
    pub(crate) fn create_in(xrcd: &Arc<Xrcd>, pd: &Arc<Pd>, cq: &Arc<Cq>, create: &SrqCreate) -> Result<Arc<Srq>> {
        Srq::make(pd, create, None, |queue| {
            let number = xrcd.context().card().take_srq_number()?;
            let entry = XrcSrq { queue: Arc::clone(queue), cq: Arc::clone(cq.queue()), pd: pd.handle() };
            xrcd.domain().queues().add(number, entry);
            xrcd.users.fetch_add(1, Ordering::Relaxed);
            cq.users.fetch_add(1, Ordering::Relaxed);
            Ok(Some(Xrc { xrcd: Arc::clone(xrcd), cq: Arc::clone(cq), number, gone: AtomicBool::new(false) }))
        })
    }

    fn make(
        pd: &Arc<Pd>,
        create: &SrqCreate,
        tags: Option<(TagList, &Arc<Cq>)>,
        xrc: impl FnOnce(&Arc<ferroce_core::Srq>) -> Result<Option<Xrc>>,
    ) -> Result<Arc<Srq>> {
        check_limit("max_wr", create.max_wr, limits::MAX_SRQ_WR)?;
        check_limit("max_sge", create.max_sge, limits::MAX_SRQ_SGE)?;
        let events = Arc::clone(pd.context().events());
        let queue = ferroce_core::Srq::new(create.max_wr, create.max_sge, events, create.cookie)?;
        let (queue, cq) = match tags {
            Some((tags, cq)) => (Arc::new(queue.with_tags(tags)), Some(Arc::clone(cq))),
            None => (Arc::new(queue), None),
        };
        let xrc = xrc(&queue)?;
        pd.users.fetch_add(1, Ordering::Relaxed);
        if let Some(cq) = &cq {
            cq.users.fetch_add(1, Ordering::Relaxed);
        }
        let context = pd.context();
        let entry = context.objects().add_srq(context.device().ifindex(), pd.handle(), &queue);
        Ok(Arc::new(Srq { pd: Arc::clone(pd), queue, users: AtomicU32::new(0), xrc, cq, _entry: entry }))
    }

    pub(crate) fn queue(&self) -> &Arc<ferroce_core::Srq> {
        &self.queue
    }

    /// The protection domain it was made in.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The number that requests name it by, if it belongs to an XRC domain.
    pub fn number(&self) -> Option<u32> {
        self.xrc.as_ref().map(|xrc| xrc.number)
    }

    /// Where its completions go, if it matches tags.
    pub(crate) fn tag_cq(&self) -> Option<&Arc<Cq>> {
        self.cq.as_ref()
    }

    /// Changes the tag list (`ibv_post_srq_ops(3)`). The operation is complete when this returns. Gives the handle of a buffer that was
    /// added.
    ///
    /// # Errors
    /// EINVAL: the queue matches no tags, or too many elements. ENOMEM: the list is full.
    pub fn post_tag_op(&self, op: TagOp) -> Result<Option<u32>> {
        let context = self.pd.context();
        context.check()?;
        let tags = self.queue.tags().ok_or_else(|| Error::new(libc::EINVAL, "srq: its type is not IBV_SRQT_TM"))?;
        Ok(tags.post(op, context.clock())?)
    }

    /// Posts a receive request.
    ///
    /// # Errors
    /// EINVAL: too many elements. ENOMEM: the queue is full.
    pub fn post(&self, wr: RecvWr) -> Result<()> {
        self.pd.context().check()?;
        Ok(self.queue.post(wr)?)
    }

    /// Arms the limit event: it is raised once, when fewer than `limit` requests are left. 0 disarms.
    ///
    /// # Errors
    /// EINVAL: above the capacity.
    pub fn set_limit(&self, limit: u32) -> Result<()> {
        self.pd.context().check()?;
        Ok(self.queue.modify(Some(limit), None)?)
    }

    /// Changes the capacity.
    ///
    /// # Errors
    /// EINVAL: 0, above the device's limit, or below what is posted.
    pub fn resize(&self, max_wr: u32) -> Result<()> {
        self.pd.context().check()?;
        check_limit("max_wr", max_wr, limits::MAX_SRQ_WR)?;
        Ok(self.queue.modify(None, Some(max_wr))?)
    }

    /// Capacity, elements of a request, and the limit that is armed.
    pub fn query(&self) -> (u32, u32, u32) {
        (self.queue.queue().max_wr(), self.queue.queue().max_sge(), self.queue.limit())
    }

    /// Ends it: no more events come from it. Gives the number of asynchronous events it handed out.
    ///
    /// # Errors
    /// EBUSY: queue pairs receive from it.
    pub fn destroy(&self) -> Result<u64> {
        if self.pd.context().is_stale() {
            return Ok(0);
        }
        let users = self.users.load(Ordering::Relaxed);
        if users > 0 {
            return Err(Error::new(libc::EBUSY, format!("{users} queue pairs still receive from the SRQ")));
        }
        self.leave_domain();
        Ok(self.pd.context().events().forget(EventSource::Srq(self.queue.cookie())))
    }

    /// No request can name it any more. When it returns, no lane uses it.
    fn leave_domain(&self) {
        let Some(xrc) = self.xrc.as_ref().filter(|xrc| !xrc.gone.swap(true, Ordering::AcqRel)) else { return };
        let card = xrc.xrcd.context().card();
        xrc.xrcd.domain().queues().remove(xrc.number);
        card.quiesce();
        card.give_back_srq_number(xrc.number);
        xrc.xrcd.users.fetch_sub(1, Ordering::Relaxed);
        xrc.cq.users.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // A forked child leaves alone what is its parent's.
        if !self.pd.context().is_stale() {
            self.leave_domain();
        }
        self.pd.users.fetch_sub(1, Ordering::Relaxed);
        if let Some(cq) = &self.cq {
            cq.users.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

pub(crate) fn check_limit(name: &str, value: u32, max: u32) -> Result<()> {
    if value > max {
        return Err(Error::new(libc::EINVAL, format!("{name} is {value}: the device's limit is {max}")));
    }
    Ok(())
}
