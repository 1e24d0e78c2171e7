//! Memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;

use ferroce::sync::Mutex;
use ferroce::{Access, RawRegion};

use crate::abi::{consts, ibv_mr, ibv_mr_init_attr, ibv_pd, ibv_sge};
use crate::context::ContextRef;
use crate::dm::Piece;
use crate::entry::{Convention, Pointer, Refusal, Status, Verb, Void, slot, verb};
use crate::handle::{Shared, handle};
use crate::pd::PdObject;
use crate::registry::Registry;

/// Regions by key: for import, and for advice.
pub(crate) static REGIONS: Registry<Region> = Registry::new();

/// A memory region, however many C objects stand for it: the one it was made with, and imported ones.
pub(crate) struct Region {
    mr: Arc<ferroce::Mr>,
    /// As it was last registered.
    range: Mutex<Range>,
    /// What must not go away while the region is registered. Fields are dropped in this order: the registration first.
    keeps: Option<Arc<Piece>>,
    /// It is of a file, which the card has mapped.
    of_file: bool,
}

/// Where a region lies.
#[derive(Clone, Copy)]
struct Range {
    /// Handle of its protection domain.
    pd: u32,
    start: usize,
    length: usize,
    iova: u64,
    access: Access,
}

impl Region {
    fn range(&self) -> Range {
        *self.range.lock()
    }
}

/// `struct ibv_mr` and what is behind it.
#[repr(C)]
pub struct MrObject {
    c: Shared<ibv_mr>,
    region: Arc<Region>,
    _context: ContextRef,
}

handle!(MrObject, ibv_mr, "mr");

impl MrObject {
    /// Handle of the protection domain that it is in now.
    pub(crate) fn domain(&self) -> u32 {
        self.region.range().pd
    }

    /// Its key.
    pub(crate) fn lkey(&self) -> u32 {
        self.region.mr.lkey()
    }
}

/// Checks access flags. Unknown bits of the optional range are hints and dropped; unknown bits outside it are refused.
pub(crate) fn access(flags: c_uint) -> Verb<Access> {
    let mandatory = flags & !consts::ACCESS_OPTIONAL_RANGE;
    let unknown = mandatory & !Access::all().bits();
    if unknown != 0 {
        return Err(Refusal::unsupported(format!("access has bits that are not supported: {unknown:#x}")));
    }
    Ok(Access::from_bits_truncate(flags))
}

/// Registers `[addr, addr + length)`, known to keys as `[iova, iova + length)`.
///
/// # Safety
///
/// `pd` is NULL or live; the memory stays the card's to use, as far as `flags` grant, until deregistration (the contract of
/// `ibv_reg_mr`).
unsafe fn register(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, flags: c_uint) -> Verb<*mut ibv_mr> {
    let access = access(flags)?;
    // SAFETY: by the contract above.
    let (region, context) = unsafe { region(pd, addr as usize, length, iova, access, None) }?;
    object(pd, addr, length, region, context)
}

/// Registers device memory, zero-based. The C object shows no address.
///
/// # Safety
///
/// As for [`register`]; `piece` is what keeps the memory.
pub(crate) unsafe fn register_piece(
    pd: *mut ibv_pd,
    start: usize,
    length: usize,
    access: Access,
    piece: Arc<Piece>,
) -> Verb<*mut ibv_mr> {
    // SAFETY: by the contract above.
    let (region, context) = unsafe { region(pd, start, length, 0, access, Some(piece)) }?;
    object(pd, ptr::null_mut(), length, region, context)
}

/// Registers a part of a dma-buf, or of another file that can be mapped.
///
/// # Safety
///
/// `pd` is NULL or live.
unsafe fn register_file(
    pd: *mut ibv_pd,
    file: c_int,
    offset: u64,
    length: usize,
    iova: u64,
    flags: c_uint,
) -> Verb<*mut ibv_mr> {
    // SAFETY: by the contract above.
    let domain = unsafe { PdObject::of(pd) }?;
    // Hints may be dropped; what else is unknown, is wrong here.
    let access = Access::from_bits_retain(flags & !consts::ACCESS_OPTIONAL_RANGE);
    if file < 0 {
        return Err(Refusal::new(libc::EBADF, format!("fd is {file}")));
    }
    // SAFETY: the caller says that this is an open descriptor; if it is not, the system says so.
    let mr = domain.pd().reg_dmabuf(unsafe { BorrowedFd::borrow_raw(file) }, offset, length, iova, access)?;
    let lkey = mr.lkey();
    let range = Mutex::new(Range { pd: domain.pd().handle(), start: 0, length, iova, access });
    let region = Arc::new(Region { mr, range, keeps: None, of_file: true });
    REGIONS.add(lkey, &region);
    object(pd, offset as usize as *mut c_void, length, region, domain.context.clone())
}

/// The registration proper.
///
/// # Safety
///
/// As for [`register`].
unsafe fn region(
    pd: *mut ibv_pd,
    start: usize,
    length: usize,
    iova: u64,
    access: Access,
    keeps: Option<Arc<Piece>>,
) -> Verb<(Arc<Region>, ContextRef)> {
    // SAFETY: by the contract above.
    let domain = unsafe { PdObject::of(pd) }?;
    if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC) && !access.contains(Access::LOCAL_WRITE) {
        return Err(Refusal::invalid("access grants a remote write without IBV_ACCESS_LOCAL_WRITE; set both"));
    }
    let mr = if length == 0 && keeps.is_some() {
        empty(domain)?
    } else {
        // SAFETY: by the contract above, which is the one of `RawRegion::new`.
        let raw = unsafe { RawRegion::new(start, length) };
        domain.pd().reg_mr(raw, iova, access)?
    };
    let lkey = mr.lkey();
    let range = Mutex::new(Range { pd: domain.pd().handle(), start, length, iova, access });
    let region = Arc::new(Region { mr, range, keeps, of_file: false });
    REGIONS.add(lkey, &region);
    Ok((region, domain.context.clone()))
}

/// A region without any byte, which device memory may have: a key that fits nothing. It belongs to a domain of its own, in which
/// there is no queue pair.
fn empty(domain: &PdObject) -> Verb<Arc<ferroce::Mr>> {
    let nobodys = domain.context.context().alloc_pd()?;
    Ok(nobodys.reg_buffer(&Arc::new(ferroce::Buffer::new(1)), Access::empty())?)
}

/// The C object of a region.
fn object(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    region: Arc<Region>,
    context: ContextRef,
) -> Verb<*mut ibv_mr> {
    let (lkey, rkey) = (region.mr.lkey(), region.mr.rkey());
    let c = ibv_mr { context: context.as_ptr(), pd, addr, length, handle: lkey, lkey, rkey };
    MrObject::publish(|_| Ok(MrObject { c: Shared::new(c), region, _context: context }))
}

/// Changes what `flags` name. Before the C structure changes, everything else has succeeded.
///
/// # Safety
///
/// The contract of `ibv_rereg_mr`: as for [`register`], and `mr` is NULL or live.
unsafe fn reregister(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_uint,
) -> Verb<()> {
    // SAFETY: by the contract above.
    let region = &unsafe { MrObject::of(mr) }?.region;
    if flags == 0 || flags & !consts::rereg::ALL != 0 {
        return Err(Refusal::invalid(format!("flags {flags:#x}: one or more of IBV_REREG_MR_CHANGE_* are needed")));
    }
    let asked = |flag| flags & flag != 0;
    if asked(consts::rereg::CHANGE_TRANSLATION) && (region.keeps.is_some() || region.of_file) {
        return Err(Refusal::unsupported("a region of device memory or of a file stays where it is"));
    }
    // SAFETY: by the contract above.
    let domain = if asked(consts::rereg::CHANGE_PD) { Some(unsafe { PdObject::of(pd) }?) } else { None };
    let rights = if asked(consts::rereg::CHANGE_ACCESS) { Some(self::access(access)?) } else { None };
    let mut range = region.range.lock();
    let mut after = *range;
    after.pd = domain.map_or(after.pd, |domain| domain.pd().handle());
    after.access = rights.unwrap_or(after.access);
    let translation = asked(consts::rereg::CHANGE_TRANSLATION).then(|| {
        (after.start, after.length, after.iova) = (addr as usize, length, default_iova(addr, after.access.bits()));
        // SAFETY: by the contract above, which is the one of `RawRegion::new`.
        (unsafe { RawRegion::new(after.start, length) }, after.iova)
    });
    region.mr.rereg(domain.map(|domain| domain.pd()), translation, rights)?;
    *range = after;
    // SAFETY: the object is live, and nobody else writes these fields: changing a region is the program's to serialise.
    unsafe {
        if domain.is_some() {
            (*mr).pd = pd;
        }
        if translation.is_some() {
            ((*mr).addr, (*mr).length) = (addr, length);
        }
    }
    Ok(())
}

/// The first address of a region registered without one: its own, or 0 if it is zero-based.
fn default_iova(addr: *mut c_void, flags: c_uint) -> u64 {
    if flags & Access::ZERO_BASED.bits() != 0 { 0 } else { addr as u64 }
}

/// The results of `ibv_rereg_mr` are an enumeration of their own.
pub struct Rereg;

impl Convention for Rereg {
    type Good = ();
    type Return = c_int;
    fn good((): ()) -> c_int {
        0
    }
    fn bad(_errno: c_int) -> c_int {
        consts::rereg::ERR_INPUT
    }
}

/// `enum ibv_advise_mr_advice`: prefetch for reading, for writing, and without making pages.
const ADVICE_PREFETCH: std::ops::RangeInclusive<c_int> = 0..=2;
/// `IBV_ADVISE_MR_FLAG_FLUSH`: wait until it is done.
const ADVICE_FLUSH: u32 = 1 << 0;

/// Tells the kernel that an element will be needed.
fn prefetch(pd: u32, sge: &ibv_sge) -> Verb<()> {
    let known = REGIONS.get(sge.lkey).map(|region| (region.range(), region.of_file));
    let (region, of_file) = known
        .filter(|(region, _)| region.pd == pd)
        .ok_or_else(|| Refusal::new(libc::ENOENT, format!("lkey {:#x} is no region of the domain", sge.lkey)))?;
    let offset = sge.addr.wrapping_sub(region.iova);
    if offset > region.length as u64 || u64::from(sge.length) > region.length as u64 - offset {
        return Err(Refusal::new(libc::EFAULT, format!("the range is outside the region with lkey {:#x}", sge.lkey)));
    }
    if of_file {
        // What the file's pages are is the affair of whoever made it.
        return Ok(());
    }
    const PAGE: usize = 4096;
    let address = region.start + offset as usize;
    let start = address & !(PAGE - 1);
    // SAFETY: MADV_WILLNEED changes no content, whatever is mapped there.
    let refused =
        unsafe { libc::madvise(start as *mut c_void, address + sge.length as usize - start, libc::MADV_WILLNEED) };
    if refused != 0 {
        log::debug!("madvise: {}", std::io::Error::last_os_error());
    }
    Ok(())
}

slot! {
    /// `ibv_advise_mr(3)`: prefetching. Every region is on demand, so this is a hint to the kernel, never needed.
    fn advise_mr as "ibv_advise_mr" (
        pd: *mut ibv_pd,
        advice: c_int,
        flags: u32,
        list: *mut ibv_sge,
        count: u32,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let domain = unsafe { PdObject::of(pd) }?;
        if !ADVICE_PREFETCH.contains(&advice) {
            return Err(Refusal::unsupported(format!("advice {advice} is unknown; the prefetches 0 to 2 are known")));
        }
        if flags & !ADVICE_FLUSH != 0 || list.is_null() || count == 0 {
            return Err(Refusal::invalid("flags has unknown bits, or the list is empty"));
        }
        // SAFETY: the caller has `count` elements there.
        let list = unsafe { std::slice::from_raw_parts(list, count as usize) };
        list.iter().try_for_each(|sge| prefetch(domain.pd().handle(), sge))
    }
}

slot! {
    /// `ibv_alloc_null_mr(3)`: zeros to read, and a sink to write to, of any length. Only its lkey is valid.
    fn alloc_null_mr as "ibv_alloc_null_mr" (pd: *mut ibv_pd) -> Pointer<ibv_mr> {
        // SAFETY: by the contract of the verb.
        let domain = unsafe { PdObject::of(pd) }?;
        let mr = domain.pd().alloc_null_mr()?;
        let (pd_handle, length, access) = (domain.pd().handle(), usize::MAX, Access::LOCAL_WRITE);
        let range = Mutex::new(Range { pd: pd_handle, start: 0, length, iova: 0, access });
        // It is nobody else's: it can neither be imported nor advised.
        object(pd, ptr::null_mut(), length, Arc::new(Region { mr, range, keeps: None, of_file: false }), domain.context.clone())
    }
}

verb! {
    /// `ibv_import_mr(3)`: from another context of this process. Its address stays unknown.
    fn ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> Pointer<ibv_mr> {
        // SAFETY: by the contract of the verb.
        let domain = unsafe { PdObject::of(pd) }?;
        let region = REGIONS
            .get(handle)
            .filter(|region| region.range().pd == domain.pd().handle())
            .ok_or_else(|| Refusal::new(libc::ENOENT, format!("no region of the domain has the handle {handle:#x}")))?;
        object(pd, ptr::null_mut(), region.range().length, region, domain.context.clone())
    }

    /// `ibv_unimport_mr(3)`: the region stays with who registered it.
    fn ibv_unimport_mr(mr: *mut ibv_mr) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { MrObject::of(mr) }?;
        // SAFETY: the program gives the pointer back.
        drop(unsafe { MrObject::reclaim(mr) });
        Ok(())
    }

    /// `ibv_reg_mr(3)`.
    fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> Pointer<ibv_mr> {
        // SAFETY: by the contract of the verb.
        unsafe { register(pd, addr, length, default_iova(addr, access as c_uint), access as c_uint) }
    }

    /// `ibv_reg_mr_iova(3)`.
    fn ibv_reg_mr_iova(
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        iova: u64,
        access: c_int,
    ) -> Pointer<ibv_mr> {
        // SAFETY: by the contract of the verb.
        unsafe { register(pd, addr, length, iova, access as c_uint) }
    }

    /// What the macros `ibv_reg_mr` and `ibv_reg_mr_iova` call when the access flags may have optional bits.
    fn ibv_reg_mr_iova2(
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        iova: u64,
        access: c_uint,
    ) -> Pointer<ibv_mr> {
        let iova = if iova == addr as u64 { default_iova(addr, access) } else { iova };
        // SAFETY: by the contract of the verb.
        unsafe { register(pd, addr, length, iova, access) }
    }

    /// `ibv_reg_mr_ex(3)`: of an address or of a file; DMA handles need hardware, and the library gives out no buffers.
    fn ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> Pointer<ibv_mr> {
        /// `IBV_REG_MR_MASK_IOVA`.
        const IOVA: u64 = 1 << 0;
        /// `IBV_REG_MR_MASK_ADDR`.
        const ADDR: u64 = 1 << 1;
        /// `IBV_REG_MR_MASK_FD`.
        const FD: u64 = 1 << 2;
        /// `IBV_REG_MR_MASK_FD_OFFSET`.
        const FD_OFFSET: u64 = 1 << 3;
        if attr.is_null() {
            return Err(Refusal::invalid("mr_init_attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let attr = unsafe { attr.read() };
        if attr.comp_mask & !(IOVA | ADDR | FD | FD_OFFSET) != 0 {
            return Err(Refusal::unsupported(format!(
                "comp_mask {:#x}: only an address or a file, and an IOVA, can be given",
                attr.comp_mask
            )));
        }
        let flags = attr.access as c_uint;
        match attr.comp_mask & (ADDR | FD | FD_OFFSET) {
            ADDR => {}
            of_file if of_file == FD | FD_OFFSET && attr.comp_mask & IOVA != 0 => {
                // SAFETY: by the contract of the verb.
                return unsafe { register_file(pd, attr.fd, attr.fd_offset, attr.length, attr.iova, flags) };
            }
            _ => return Err(Refusal::invalid("comp_mask must name an address, or a file with its offset and an IOVA")),
        }
        let iova = if attr.comp_mask & IOVA != 0 { attr.iova } else { default_iova(attr.addr, flags) };
        // SAFETY: by the contract of the verb.
        unsafe { register(pd, attr.addr, attr.length, iova, flags) }
    }

    /// `ibv_reg_dmabuf_mr(3)`: also of other files that can be mapped, such as a memfd.
    fn ibv_reg_dmabuf_mr(
        pd: *mut ibv_pd,
        offset: u64,
        length: usize,
        iova: u64,
        fd: c_int,
        access: c_int,
    ) -> Pointer<ibv_mr> {
        // SAFETY: by the contract of the verb.
        unsafe { register_file(pd, fd, offset, length, iova, access as c_uint) }
    }

    /// `ibv_rereg_mr(3)`: the keys stay. A refusal leaves the region as it was.
    fn ibv_rereg_mr(
        mr: *mut ibv_mr,
        flags: c_int,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        access: c_int,
    ) -> Rereg {
        // SAFETY: by the contract of the verb.
        unsafe { reregister(mr, flags, pd, addr, length, access as c_uint) }
    }

    /// `ibv_dereg_mr(3)`: returns when the card cannot touch the memory any more.
    fn ibv_dereg_mr(mr: *mut ibv_mr) -> Status {
        // SAFETY: by the contract of the verb.
        unsafe { MrObject::of(mr) }?.region.mr.dereg()?;
        // SAFETY: the region is gone, so the program has no use for the pointer any more.
        drop(unsafe { MrObject::reclaim(mr) });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_access_bits_are_hints() {
        assert_eq!(access(1 | 1 << 20 | 1 << 29).unwrap(), Access::LOCAL_WRITE | Access::RELAXED_ORDERING);
        assert_eq!(access(1 << 15).unwrap_err().errno(), libc::EOPNOTSUPP);
        assert_eq!(access(1 << 30).unwrap_err().errno(), libc::EOPNOTSUPP);
    }

    #[test]
    fn zero_based_regions_start_at_zero() {
        let addr = 0x1000 as *mut c_void;
        assert_eq!(default_iova(addr, 0), 0x1000);
        assert_eq!(default_iova(addr, Access::ZERO_BASED.bits()), 0);
    }
}
