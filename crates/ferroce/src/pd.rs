//! Protection domains, memory regions and address handles.

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ferroce_core::mem::page_size;
use ferroce_core::sync::Mutex;
use ferroce_core::{Buffer, CoreError, KeyTable, Mapping, MrKey, RawRegion, Reregister, WindowKind};
use ferroce_transport::{Access, PathAddr};

use crate::context::Context;
use crate::cq::Cq;
use crate::error::{Error, Result};
use crate::mw::Mw;
use crate::objects;
use crate::qp::{InitiatorCreate, Qp, QpCreate};
use crate::route;
use crate::srq::{Srq, SrqCreate, TagSrqCreate};
use crate::wq::{SpreadCreate, Wq, WqCreate};

/// Rights that a region of a dma-buf can have (`ibv_reg_dmabuf_mr(3)`).
pub const DMABUF_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::RELAXED_ORDERING);

/// A protection domain: the boundary inside which regions and queue pairs may meet.
#[derive(Debug)]
pub struct Pd {
    context: Arc<Context>,
    handle: u32,
    /// Regions, windows, queue pairs, SRQs and address handles alive.
    pub(crate) users: AtomicU32,
    /// Lists it among the process's objects.
    _entry: objects::Entry,
}

impl Pd {
    pub(crate) fn new(context: Arc<Context>, handle: u32) -> Arc<Pd> {
        let entry = context.objects().add_pd(handle, context.device().ifindex());
        Arc::new(Pd { context, handle, users: AtomicU32::new(0), _entry: entry })
    }

    /// The context it was made in.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its handle, unique in the process.
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Registers memory. Peers address it by `iova`, which is usually the address itself.
    ///
    /// # Errors
    /// EINVAL: remote write or atomic without local write, empty or overflowing range. EFAULT: not mapped.
    pub fn reg_mr(self: &Arc<Self>, region: RawRegion, iova: u64, access: Access) -> Result<Arc<Mr>> {
        self.register(|keys| keys.register(self.handle, region, iova, access))
    }

    /// Registers a buffer, which lives at least as long as the registration.
    ///
    /// # Errors
    /// EINVAL: remote write or atomic without local write.
    pub fn reg_buffer(self: &Arc<Self>, buffer: &Arc<Buffer>, access: Access) -> Result<Arc<Mr>> {
        self.register(|keys| keys.register_buffer(self.handle, buffer, access))
    }

    /// Registers `len` bytes of a dma-buf from `offset` on, which peers call `iova`; or of any other file that can be mapped, such as a memfd.
    /// Whoever else has mapped it sees what the card writes, and may change what it reads. The file may be closed afterwards.
    ///
    /// # Errors
    /// EINVAL: no bytes, or not all of them are in the file; `iova` and `offset` lie differently in their pages; rights other than
    /// [`DMABUF_ACCESS`], or remote write or atomic without local write. What the system says if the file cannot be mapped with these rights: EACCES,
    /// ENODEV.
    pub fn reg_dmabuf(
        self: &Arc<Self>,
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<Arc<Mr>> {
        self.context.check()?;
        let unknown = access.difference(DMABUF_ACCESS);
        if !unknown.is_empty() {
            return Err(Error::new(libc::EINVAL, format!("access flags {:#x} are not for dma-bufs", unknown.bits())));
        }
        let page = page_size() as u64;
        if offset % page != iova % page {
            return Err(Error::new(
                libc::EINVAL,
                format!("offset {offset:#x} and iova {iova:#x} must lie in their pages of {page} bytes alike"),
            ));
        }
        let mapping = Mapping::of_file(file, offset, len, access.contains(Access::LOCAL_WRITE)).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
            Error::new(errno, format!("cannot map {len} bytes at {offset} of the file: {error}"))
        })?;
        self.reg_mapping(&Arc::new(mapping), iova, access)
    }

    /// Registers mapped memory, which stays mapped at least as long.
    ///
    /// # Errors
    /// EINVAL: remote write or atomic without local write.
    pub fn reg_mapping(self: &Arc<Self>, mapping: &Arc<Mapping>, iova: u64, access: Access) -> Result<Arc<Mr>> {
        self.register(|keys| keys.register_mapping(self.handle, mapping, iova, access))
    }

    /// Makes a null region: scatter/gather elements that name it, with any address and length, read zeros, and what they receive goes
    /// nowhere. Peers cannot name it: its rkey is 0.
    ///
    /// # Errors
    /// ENOMEM: no key or no address space is left.
    pub fn alloc_null_mr(self: &Arc<Self>) -> Result<Arc<Mr>> {
        self.register(|keys| keys.register_null(self.handle))
    }

    fn register(self: &Arc<Self>, make: impl FnOnce(&KeyTable) -> Result<MrKey, CoreError>) -> Result<Arc<Mr>> {
        self.context.check()?;
        let key = make(self.context.card().keys())?;
        self.users.fetch_add(1, Ordering::Relaxed);
        let (context, pd) = (Arc::clone(&self.context), Mutex::new(Arc::clone(self)));
        Ok(Arc::new(Mr { context, pd, lkey: key.lkey, rkey: key.rkey, gone: AtomicBool::new(false) }))
    }

    /// Makes a memory window, unbound.
    ///
    /// # Errors
    /// ENOMEM: no key is left.
    pub fn alloc_mw(self: &Arc<Self>, kind: WindowKind) -> Result<Arc<Mw>> {
        self.context.check()?;
        Mw::new(self, kind)
    }

    /// Makes a queue pair in RESET.
    ///
    /// # Errors
    /// EINVAL: sizes above the device's limits, an SRQ or CQ of another context. ENOMEM: no number left. EPERM: a RAW_PACKET queue pair without
    /// CAP_NET_RAW.
    pub fn create_qp(self: &Arc<Self>, create: &QpCreate) -> Result<Arc<Qp>> {
        self.context.check()?;
        Qp::create(self, create)
    }

    /// Makes an XRC initiator in RESET.
    ///
    /// # Errors
    /// EINVAL: sizes above the device's limits, a CQ of another context. ENOMEM: no number left.
    pub fn create_initiator(self: &Arc<Self>, create: &InitiatorCreate) -> Result<Arc<Qp>> {
        self.context.check()?;
        Qp::create_initiator(self, create)
    }

    /// Makes a receive work queue in RESET.
    ///
    /// # Errors
    /// EINVAL: sizes above the device's limits, a CQ of another context. ENOMEM: no number left. EPERM: no CAP_NET_RAW.
    pub fn create_wq(self: &Arc<Self>, create: &WqCreate) -> Result<Arc<Wq>> {
        self.context.check()?;
        Wq::create(self, create)
    }

    /// Makes a RAW_PACKET queue pair that spreads the frames steered to it over receive work queues.
    ///
    /// # Errors
    /// EINVAL: a key of another length than 40 bytes, a table of another context. ENOMEM: no number left. EPERM: no CAP_NET_RAW.
    pub fn create_spread_qp(self: &Arc<Self>, create: &SpreadCreate<'_>) -> Result<Arc<Qp>> {
        self.context.check()?;
        Qp::create_spread(self, create)
    }

    /// Makes a shared receive queue.
    ///
    /// # Errors
    /// EINVAL: sizes above the device's limits.
    pub fn create_srq(self: &Arc<Self>, create: &SrqCreate) -> Result<Arc<Srq>> {
        self.context.check()?;
        Srq::create(self, create)
    }

    /// Makes a shared receive queue that matches tags. What RC queue pairs receive by it, and what is done with its tag list, completes in `cq`.
    ///
    /// # Errors
    /// EINVAL: sizes above the device's limits, no room for tags, a CQ of another context.
    pub fn create_tag_srq(self: &Arc<Self>, cq: &Arc<Cq>, create: &TagSrqCreate) -> Result<Arc<Srq>> {
        self.context.check()?;
        Srq::create_with_tags(self, cq, create)
    }

    /// Makes an address handle.
    ///
    /// # Errors
    /// EINVAL: no GRH (a RoCE device needs a GID), a port other than 1, a GID index that does not exist. ENETUNREACH, EHOSTUNREACH: no
    /// route leads to the destination.
    pub fn create_ah(self: &Arc<Self>, attr: &AhAttr) -> Result<Arc<Ah>> {
        self.context.check()?;
        let path = Arc::new(attr.resolve(&self.context)?);
        self.users.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Ah { pd: Arc::clone(self), attr: *attr, path }))
    }

    /// Ends it.
    ///
    /// # Errors
    /// EBUSY: regions, queue pairs, SRQs or address handles are alive in it.
    pub fn dealloc(&self) -> Result<()> {
        if self.context.is_stale() {
            return Ok(());
        }
        match self.users.load(Ordering::Relaxed) {
            0 => Ok(()),
            users => Err(Error::new(
                libc::EBUSY,
                format!(
                    "{users} memory regions, queue pairs, SRQs or address handles are still alive in the protection domain"
                ),
            )),
        }
    }
}

/// A memory region.
#[derive(Debug)]
pub struct Mr {
    context: Arc<Context>,
    /// The domain that it is in now. Held while the region is changed or ended.
    pd: Mutex<Arc<Pd>>,
    lkey: u32,
    rkey: u32,
    gone: AtomicBool,
}

impl Mr {
    /// Names the region in local scatter/gather elements.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Names the region to a peer.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Changes the domain, the memory with the address that peers call its first byte, or the rights; the keys stay. When it returns,
    /// the card uses the region as it was no more. Work requests that name it meanwhile may fail.
    ///
    /// # Errors
    /// EINVAL: the region is gone, the domain belongs to another context, or as for [`Pd::reg_mr`]. EFAULT: not mapped. EBUSY: memory
    /// windows are bound to it. The region is then as it was.
    pub fn rereg(
        &self,
        pd: Option<&Arc<Pd>>,
        translation: Option<(RawRegion, u64)>,
        access: Option<Access>,
    ) -> Result<()> {
        self.context.check()?;
        let mut domain = self.pd.lock();
        if self.gone.load(Ordering::Acquire) {
            return Err(Mr::gone());
        }
        if pd.is_some_and(|pd| !Arc::ptr_eq(&pd.context, &self.context)) {
            return Err(Error::new(libc::EINVAL, "pd belongs to another device context than the memory region"));
        }
        let change = Reregister { pd: pd.map(|pd| pd.handle), translation, access };
        self.context.card().reregister(self.lkey, &change)?;
        if let Some(pd) = pd {
            pd.users.fetch_add(1, Ordering::Relaxed);
            domain.users.fetch_sub(1, Ordering::Relaxed);
            *domain = Arc::clone(pd);
        }
        Ok(())
    }

    /// Ends the registration. When it returns, the card touches the memory no more.
    ///
    /// # Errors
    /// EINVAL when it is done already. EBUSY: memory windows are bound to it.
    pub fn dereg(&self) -> Result<()> {
        if self.context.is_stale() {
            return Ok(());
        }
        let domain = self.pd.lock();
        if self.gone.load(Ordering::Acquire) {
            return Err(Mr::gone());
        }
        self.context.card().deregister(self.lkey)?;
        self.gone.store(true, Ordering::Release);
        domain.users.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    fn gone() -> Error {
        Error::new(libc::EINVAL, "the memory region is deregistered already")
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // Done already is fine here.
        let _ = self.dereg();
    }
}

/// Attributes of an address handle or of a connected path (`struct ibv_ah_attr`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AhAttr {
    /// Is there a GRH (`is_global`)? RoCE cannot do without.
    pub is_global: bool,
    /// Destination GID.
    pub dgid: [u8; 16],
    /// Flow label.
    pub flow_label: u32,
    /// Index of the source GID in the port's table.
    pub sgid_index: u8,
    /// Hop limit; 0 stands for 64.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Destination LID; unused by RoCE, kept for queries.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Source path bits; unused by RoCE, kept for queries.
    pub src_path_bits: u8,
    /// Static rate, `enum ibv_rate`; kept for queries.
    pub static_rate: u8,
    /// Port; 1.
    pub port_num: u8,
}

impl AhAttr {
    /// Turns GIDs into addresses between which there is a route.
    pub(crate) fn resolve(&self, context: &Context) -> Result<PathAddr> {
        if !self.is_global {
            return Err(Error::new(
                libc::EINVAL,
                "ah_attr.is_global is 0: a RoCE device needs a GID at both ends; set is_global and grh (ibv_*_pingpong: -g 0, perftest: \
                 -x 0). Programs leave it out, too, if the GID that the peer told is `::`: there the index is missing or empty",
            ));
        }
        if self.port_num != 1 {
            return Err(Error::new(
                libc::EINVAL,
                format!("ah_attr.port_num is {}: the device has port 1 only", self.port_num),
            ));
        }
        let src = context.device().source(u32::from(self.sgid_index))?;
        let dst = address_of(&self.dgid);
        if src.is_ipv4() != dst.is_ipv4() {
            return Err(Error::new(
                libc::EINVAL,
                format!(
                    "ah_attr.grh: sgid_index {} is {src}, but dgid is {dst}: both must be IPv4 or both IPv6",
                    self.sgid_index
                ),
            ));
        }
        if dst.is_unspecified() {
            return Err(Error::new(libc::EINVAL, "ah_attr.grh.dgid is all zero: exchange GIDs with the peer first"));
        }
        let ifindex = context.device().ifindex();
        let path = PathAddr {
            src,
            dst,
            ifindex: if is_link_local(&dst) || dst.is_multicast() { ifindex } else { 0 },
            tclass: self.traffic_class,
            hop_limit: if self.hop_limit == 0 { 64 } else { self.hop_limit },
            flow_label: self.flow_label,
        };
        route::check(&path, ifindex)?;
        Ok(path)
    }
}

/// The address that a RoCE v2 GID stands for: IPv4 ones are mapped (`::ffff:a.b.c.d`, IBA annex A17).
pub fn address_of(gid: &[u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(*gid);
    v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
}

fn is_link_local(addr: &IpAddr) -> bool {
    matches!(addr, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// An address handle: a resolved path for datagrams.
#[derive(Debug)]
pub struct Ah {
    pd: Arc<Pd>,
    attr: AhAttr,
    path: Arc<PathAddr>,
}

impl Ah {
    /// The resolved path.
    pub fn path(&self) -> &Arc<PathAddr> {
        &self.path
    }

    /// What it was made of.
    pub fn attr(&self) -> &AhAttr {
        &self.attr
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        self.pd.users.fetch_sub(1, Ordering::Relaxed);
    }
}
