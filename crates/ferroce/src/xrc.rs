//! XRC domains: shared receive queues that requests name by number, and the targets whose requests may name them.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use ferroce_core::XrcDomain;
use ferroce_core::sync::Mutex;
use ferroce_engine::{Listener, QueuePair};

use crate::context::Context;
use crate::cq::Cq;
use crate::error::{Error, Result};
use crate::pd::{AhAttr, Pd};
use crate::qp::Qp;
use crate::srq::{Srq, SrqCreate};

/// How [`Context::open_xrcd`] finds or makes a domain.
#[derive(Clone, Copy, Debug)]
pub struct XrcdOpen<'fd> {
    /// The file whose inode is the domain's name, in this process; None: a domain without a name.
    pub name: Option<BorrowedFd<'fd>>,
    /// Make the domain if there is none of that name (`O_CREAT`).
    pub create: bool,
    /// Refuse if there is one (`O_EXCL`).
    pub exclusive: bool,
}

/// A domain, however often it is open.
#[derive(Debug)]
pub(crate) struct Domain {
    /// What the lanes look into.
    queues: Arc<XrcDomain>,
    targets: Mutex<HashMap<u32, Target>>,
    /// Keeps the inode from being another file's.
    _name: Option<File>,
}

/// A target queue pair, however often it is open.
#[derive(Debug)]
struct Target {
    pair: Arc<QueuePair>,
    ah: Arc<Mutex<AhAttr>>,
    handles: u32,
}

/// Device (by interface index) and file of a name.
type Name = (u32, u64, u64);

/// The domains of a process that have names.
#[derive(Debug, Default)]
pub(crate) struct Names {
    domains: Mutex<HashMap<Name, Weak<Domain>>>,
}

/// An XRC domain that was opened.
#[derive(Debug)]
pub struct Xrcd {
    context: Arc<Context>,
    domain: Arc<Domain>,
    /// Shared receive queues and targets alive that were made or opened through this.
    pub(crate) users: AtomicU32,
}

impl Xrcd {
    pub(crate) fn open(context: &Arc<Context>, open: &XrcdOpen<'_>) -> Result<Arc<Xrcd>> {
        let domain = match open.name {
            Some(file) => context.xrc_names().open(context, file, open)?,
            None if open.create => Domain::new(None),
            None => {
                return Err(Error::new(
                    libc::EINVAL,
                    "a domain without a file can only be made: oflags must be O_CREAT",
                ));
            }
        };
        Ok(Arc::new(Xrcd { context: Arc::clone(context), domain, users: AtomicU32::new(0) }))
    }

    /// The context that it was opened in.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Makes a shared receive queue of this domain, in protection domain `pd`, whose receives complete in `cq`.
    ///
    /// # Errors
    /// EINVAL: sizes above the device's limits, `pd` or `cq` of another context. ENOMEM: no number is left.
    pub fn create_srq(self: &Arc<Self>, pd: &Arc<Pd>, cq: &Arc<Cq>, create: &SrqCreate) -> Result<Arc<Srq>> {
        self.context.check()?;
        if ![pd.context(), cq.context()].into_iter().all(|of| Arc::ptr_eq(of, &self.context)) {
            return Err(Error::new(libc::EINVAL, "pd or cq belongs to another device context than the XRC domain"));
        }
        Srq::create_in(self, pd, cq, create)
    }

    /// Makes a target in RESET. `cookie` names it in asynchronous events.
    ///
    /// # Errors
    /// ENOMEM: no queue pair number is left.
    pub fn create_target(self: &Arc<Self>, cookie: u64) -> Result<Arc<Qp>> {
        self.context.check()?;
        Qp::create_target(self, cookie)
    }

    /// Opens a target of this domain once more (`ibv_open_qp(3)`): it lives until all who have it open destroyed it.
    ///
    /// # Errors
    /// EINVAL: this process has no target of this number in the domain.
    pub fn open_target(self: &Arc<Self>, qpn: u32, cookie: u64) -> Result<Arc<Qp>> {
        self.context.check()?;
        let mut targets = self.domain.targets.lock();
        let target = targets.get_mut(&qpn).ok_or_else(|| {
            Error::new(
                libc::EINVAL,
                format!(
                    "the XRC domain has no target queue pair {qpn:#x} (targets of other processes cannot be opened)"
                ),
            )
        })?;
        target.handles += 1;
        target.pair.add_listener(Listener { events: Arc::clone(self.context.events()), cookie });
        Ok(Qp::of_target(self, &target.pair, &target.ah, cookie))
    }

    /// Closes it. The domain lives as long as others have it open.
    ///
    /// # Errors
    /// EBUSY: shared receive queues or targets that came about through it are alive.
    pub fn close(&self) -> Result<()> {
        if self.context.is_stale() {
            return Ok(());
        }
        match self.users.load(Ordering::Relaxed) {
            0 => Ok(()),
            users => Err(Error::new(
                libc::EBUSY,
                format!("{users} shared receive queues or target queue pairs of the XRC domain are still alive"),
            )),
        }
    }
}

impl Domain {
    fn new(name: Option<File>) -> Arc<Domain> {
        Arc::new(Domain { queues: Arc::default(), targets: Mutex::default(), _name: name })
    }

    pub(crate) fn queues(&self) -> &Arc<XrcDomain> {
        &self.queues
    }

    /// A target was made.
    pub(crate) fn add_target(&self, pair: &Arc<QueuePair>, ah: &Arc<Mutex<AhAttr>>) {
        let target = Target { pair: Arc::clone(pair), ah: Arc::clone(ah), handles: 1 };
        self.targets.lock().insert(pair.qpn(), target);
    }

    /// One of those who have a target open destroys it: with the last one it ends.
    pub(crate) fn close_target(&self, pair: &QueuePair, cookie: u64) {
        let mut targets = self.targets.lock();
        pair.remove_listener(cookie);
        let Some(target) = targets.get_mut(&pair.qpn()) else { return };
        target.handles -= 1;
        if target.handles == 0 {
            targets.remove(&pair.qpn());
            pair.destroy();
        }
    }
}

impl Names {
    fn open(&self, context: &Context, file: BorrowedFd<'_>, open: &XrcdOpen<'_>) -> Result<Arc<Domain>> {
        let file = File::from(file.try_clone_to_owned()?);
        let inode = file.metadata()?;
        let name = (context.device().ifindex(), inode.dev(), inode.ino());
        let mut domains = self.domains.lock();
        domains.retain(|_, domain| domain.strong_count() > 0);
        match domains.get(&name).and_then(Weak::upgrade) {
            // The errors are the kernel's (ib_uverbs).
            Some(_) if open.exclusive => {
                Err(Error::new(libc::EINVAL, "there is an XRC domain of this file, and oflags has O_EXCL"))
            }
            Some(domain) => Ok(domain),
            None if open.create => {
                let domain = Domain::new(Some(file));
                domains.insert(name, Arc::downgrade(&domain));
                Ok(domain)
            }
            None => Err(Error::new(
                libc::EAGAIN,
                "this process has no XRC domain of this file, and oflags lacks O_CREAT (domains of other processes are not shared)",
            )),
        }
    }
}
