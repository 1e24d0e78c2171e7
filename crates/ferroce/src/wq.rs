//! Receive work queues, and tables of them over which the frames of a RAW_PACKET queue pair are spread by a hash (RSS).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ferroce_core::flow::{Rss, RssFields, check_table};
use ferroce_engine::QueuePair;
use ferroce_transport::{QpAttr, QpAttrMask, QpState, RecvWr};

use crate::cq::Cq;
use crate::error::{Error, Result};
use crate::pd::Pd;
use crate::qp::{Qp, QpModify};

/// What a receive work queue is made with.
#[derive(Clone, Debug)]
pub struct WqCreate {
    /// Completions.
    pub cq: Arc<Cq>,
    /// Requests that it can hold.
    pub max_wr: u32,
    /// Scatter/gather elements of a request.
    pub max_sge: u32,
    /// Named in asynchronous events.
    pub cookie: u64,
}

/// `enum ibv_wq_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum WqState {
    /// It receives nothing.
    Reset = 0,
    /// It receives what a queue pair spreads to it.
    Ready = 1,
    /// Its requests are flushed.
    Err = 2,
}

/// A receive work queue: a receive queue with a completion queue and a state of its own.
#[derive(Debug)]
pub struct Wq {
    /// It is the receiving half of a queue pair.
    half: Arc<Qp>,
    /// Tables that it is in.
    users: AtomicU32,
}

impl Wq {
    pub(crate) fn create(pd: &Arc<Pd>, create: &WqCreate) -> Result<Arc<Wq>> {
        Ok(Arc::new(Wq { half: Qp::create_half(pd, create)?, users: AtomicU32::new(0) }))
    }

    /// Its number: completions name it as their queue pair.
    pub fn number(&self) -> u32 {
        self.half.qpn()
    }

    /// Requests that it can hold, and elements of each.
    pub fn sizes(&self) -> (u32, u32) {
        let caps = self.half.caps();
        (caps.max_recv_wr, caps.max_recv_sge)
    }

    /// Its state.
    pub fn state(&self) -> WqState {
        match self.half.state() {
            QpState::Reset | QpState::Init => WqState::Reset,
            QpState::Err => WqState::Err,
            QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe => WqState::Ready,
        }
    }

    /// Takes it to a state. RESET forgets its requests, ERR flushes them.
    ///
    /// # Errors
    /// EINVAL: not from the state that it is in (READY comes after RESET, ERR after READY).
    pub fn modify(&self, to: WqState) -> Result<()> {
        match (self.state(), to) {
            (WqState::Reset, WqState::Ready) => {
                let port = QpAttr { port_num: 1, ..QpAttr::default() };
                self.step(QpState::Init, port, QpAttrMask::PORT)?;
                self.step(QpState::Rtr, QpAttr::default(), QpAttrMask::empty())
            }
            (WqState::Ready, WqState::Ready) => Ok(()),
            (WqState::Ready | WqState::Err, WqState::Err) => {
                self.step(QpState::Err, QpAttr::default(), QpAttrMask::empty())
            }
            (_, WqState::Reset) => self.step(QpState::Reset, QpAttr::default(), QpAttrMask::empty()),
            (from, to) => Err(Error::new(libc::EINVAL, format!("wq_state: a WQ cannot go from {from:?} to {to:?}"))),
        }
    }

    fn step(&self, state: QpState, attr: QpAttr, mask: QpAttrMask) -> Result<()> {
        let change = QpModify { attr: QpAttr { state, ..attr }, ..QpModify::default() };
        self.half.modify(&change, QpAttrMask::STATE | mask)
    }

    /// Posts a receive request.
    ///
    /// # Errors
    /// EINVAL: RESET, too many elements. ENOMEM: full.
    pub fn post_recv(&self, wr: RecvWr) -> Result<()> {
        self.half.post_recv(wr)
    }

    /// Ends it. When it returns, no thread touches its memory any more, and no more events come from it. Gives the number of
    /// asynchronous events it handed out.
    ///
    /// # Errors
    /// EINVAL when it is done already. EBUSY: it is in a table.
    pub fn destroy(&self) -> Result<u64> {
        if self.users.load(Ordering::Relaxed) > 0 {
            return Err(Error::new(libc::EBUSY, "the WQ is in an indirection table: destroy that first"));
        }
        self.half.destroy()
    }
}

/// A table of receive work queues.
#[derive(Debug)]
pub struct RwqTable {
    wqs: Vec<Arc<Wq>>,
    /// Queue pairs that spread their frames over it.
    pub(crate) users: AtomicU32,
}

impl RwqTable {
    /// Makes a table; a queue may be in it more than once.
    ///
    /// # Errors
    /// EINVAL: the number of entries is not a power of two up to 128, or the queues are of several contexts.
    pub fn new(wqs: Vec<Arc<Wq>>) -> Result<Arc<RwqTable>> {
        check_table(wqs.len())?;
        if wqs.iter().any(|wq| !Arc::ptr_eq(wq.half.context(), wqs[0].half.context())) {
            return Err(Error::new(libc::EINVAL, "ind_tbl: the WQs are of several contexts"));
        }
        for wq in &wqs {
            wq.users.fetch_add(1, Ordering::Relaxed);
        }
        Ok(Arc::new(RwqTable { wqs, users: AtomicU32::new(0) }))
    }

    /// Is a queue pair still spreading frames over it?
    ///
    /// # Errors
    /// EBUSY: yes.
    pub fn check_unused(&self) -> Result<()> {
        match self.users.load(Ordering::Relaxed) {
            0 => Ok(()),
            users => Err(Error::new(
                libc::EBUSY,
                format!("the indirection table is used by {users} queue pairs: destroy these first"),
            )),
        }
    }

    /// What the engine needs of it.
    pub(crate) fn spread(&self, key: &[u8], fields: RssFields) -> Result<Rss<Arc<QueuePair>>> {
        Ok(Rss::new(key, fields, self.wqs.iter().map(|wq| Arc::clone(wq.half.pair())).collect())?)
    }

    /// Its context is this one.
    pub(crate) fn is_of(&self, pd: &Pd) -> bool {
        self.wqs.iter().all(|wq| Arc::ptr_eq(wq.half.context(), pd.context()))
    }
}

impl Drop for RwqTable {
    fn drop(&mut self) {
        for wq in &self.wqs {
            wq.users.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// What a queue pair is made with that spreads the frames steered to it over a table. It sends nothing and has no states.
#[derive(Clone, Debug)]
pub struct SpreadCreate<'a> {
    /// Where the frames go.
    pub table: Arc<RwqTable>,
    /// Key of the hash (Toeplitz): 40 bytes.
    pub key: &'a [u8],
    /// What is hashed.
    pub fields: RssFields,
    /// Named in asynchronous events.
    pub cookie: u64,
}
