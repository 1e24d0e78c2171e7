//! Memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use ferroce::{Access, RawRegion};

use crate::abi::{consts, ibv_mr, ibv_mr_init_attr, ibv_pd};
use crate::context::ContextRef;
use crate::entry::{Convention, Pointer, Refusal, Status, Verb, verb};
use crate::handle::{Shared, handle};
use crate::pd::PdObject;

/// `struct ibv_mr` and what is behind it.
#[repr(C)]
pub struct MrObject {
    c: Shared<ibv_mr>,
    mr: Arc<ferroce::Mr>,
    _context: ContextRef,
}

handle!(MrObject, ibv_mr, "mr");

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
    // SAFETY: by the contract above.
    let domain = unsafe { PdObject::of(pd) }?;
    let access = access(flags)?;
    if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC) && !access.contains(Access::LOCAL_WRITE) {
        return Err(Refusal::invalid("access grants a remote write without IBV_ACCESS_LOCAL_WRITE; set both"));
    }
    // SAFETY: by the contract above, which is the one of `RawRegion::new`.
    let region = unsafe { RawRegion::new(addr as usize, length) };
    let mr = domain.pd.reg_mr(region, iova, access)?;
    let c = ibv_mr {
        context: domain.context.as_ptr(),
        pd,
        addr,
        length,
        handle: mr.lkey() >> 8,
        lkey: mr.lkey(),
        rkey: mr.rkey(),
    };
    MrObject::publish(|_| Ok(MrObject { c: Shared::new(c), mr, _context: domain.context.clone() }))
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

verb! {
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

    /// `ibv_reg_mr_ex(3)`: the form with an address; DMA handles, files and buffers need hardware.
    fn ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> Pointer<ibv_mr> {
        /// `IBV_REG_MR_MASK_IOVA`.
        const IOVA: u64 = 1 << 0;
        /// `IBV_REG_MR_MASK_ADDR`.
        const ADDR: u64 = 1 << 1;
        if attr.is_null() {
            return Err(Refusal::invalid("mr_init_attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let attr = unsafe { attr.read() };
        if attr.comp_mask & !(IOVA | ADDR) != 0 {
            return Err(Refusal::unsupported(format!(
                "comp_mask {:#x}: only an address and an IOVA can be given",
                attr.comp_mask
            )));
        }
        if attr.comp_mask & ADDR == 0 {
            return Err(Refusal::invalid("comp_mask names no address"));
        }
        let flags = attr.access as c_uint;
        let iova = if attr.comp_mask & IOVA != 0 { attr.iova } else { default_iova(attr.addr, flags) };
        // SAFETY: by the contract of the verb.
        unsafe { register(pd, attr.addr, attr.length, iova, flags) }
    }

    /// `ibv_reg_dmabuf_mr(3)`: there is no card that could reach a device's memory.
    fn ibv_reg_dmabuf_mr(
        pd: *mut ibv_pd,
        _offset: u64,
        _length: usize,
        _iova: u64,
        _fd: c_int,
        _access: c_int,
    ) -> Pointer<ibv_mr> {
        // SAFETY: by the contract of the verb.
        unsafe { PdObject::of(pd) }?;
        Err(Refusal::unsupported("dma-buf memory is not reachable; register host memory"))
    }

    /// `ibv_rereg_mr(3)`: not available, the region stays as it was.
    fn ibv_rereg_mr(
        mr: *mut ibv_mr,
        _flags: c_int,
        _pd: *mut ibv_pd,
        _addr: *mut c_void,
        _length: usize,
        _access: c_int,
    ) -> Rereg {
        // SAFETY: by the contract of the verb.
        unsafe { MrObject::of(mr) }?;
        Err(Refusal::unsupported("regions cannot be changed; deregister and register anew"))
    }

    /// `ibv_dereg_mr(3)`: returns when the card cannot touch the memory any more.
    fn ibv_dereg_mr(mr: *mut ibv_mr) -> Status {
        // SAFETY: by the contract of the verb.
        unsafe { MrObject::of(mr) }?.mr.dereg()?;
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
