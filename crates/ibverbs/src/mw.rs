//! Memory windows.

use std::sync::Arc;

use ferroce::{Access, MwBind, QpType, SendData, SendFlags, SendOp, SendWr, WindowKind};

use crate::abi::{ibv_mw, ibv_mw_bind, ibv_mw_bind_info, ibv_pd, ibv_qp};
use crate::context::ContextRef;
use crate::entry::{Pointer, Refusal, Status, Verb, slot};
use crate::handle::{Shared, handle, handle_number};
use crate::mr::{self, MrObject};
use crate::pd::PdObject;
use crate::post::posting;
use crate::qp::QpObject;

/// `struct ibv_mw` and what is behind it.
#[repr(C)]
pub struct MwObject {
    c: Shared<ibv_mw>,
    mw: Arc<ferroce::Mw>,
    _context: ContextRef,
}

handle!(MwObject, ibv_mw, "mw");

/// The bits of a key that change from one binding to the next.
const KEY_PART: u32 = 0xff;

/// The operation that binds a window of type `kind` under `rkey`.
///
/// # Safety
///
/// `mw` is NULL or live, and so is the region in `info`.
pub(crate) unsafe fn binding(
    object: &QpObject,
    mw: *mut ibv_mw,
    kind: WindowKind,
    rkey: u32,
    info: &ibv_mw_bind_info,
) -> Verb<SendOp> {
    // SAFETY: by the contract above.
    let window = unsafe { MwObject::of(mw) }?;
    if window.mw.kind() != kind {
        return Err(Refusal::invalid("ibv_bind_mw binds windows of type 1, work requests those of type 2"));
    }
    if matches!(object.qp.qp_type(), QpType::Ud | QpType::RawPacket) {
        return Err(Refusal::invalid("memory windows are bound on RC and UC queue pairs"));
    }
    if (rkey ^ window.mw.first_rkey()) & !KEY_PART != 0 {
        return Err(Refusal::invalid(format!(
            "rkey {rkey:#010x} is of another window; use ibv_inc_rkey of this one's"
        )));
    }
    // Programs ask for local write too; through a window nobody writes locally.
    let access = mr::access(info.mw_access_flags)? - Access::LOCAL_WRITE;
    if !(access - (Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC | Access::ZERO_BASED)).is_empty()
    {
        return Err(Refusal::invalid("mw_access_flags may have remote rights and IBV_ACCESS_ZERO_BASED only"));
    }
    let lkey = if info.mr.is_null() && info.length == 0 {
        0
    } else {
        // SAFETY: by the contract above.
        let region = unsafe { MrObject::of(info.mr) }?;
        if region.domain() != window.mw.pd().handle() {
            return Err(Refusal::new(libc::EPERM, "the window and the region are of different protection domains"));
        }
        region.lkey()
    };
    Ok(SendOp::BindMw(Box::new(MwBind { rkey, lkey, addr: info.addr, len: info.length, access })))
}

slot! {
    /// `ibv_alloc_mw(3)`.
    fn alloc_mw as "ibv_alloc_mw" (pd: *mut ibv_pd, kind: u32) -> Pointer<ibv_mw> {
        // SAFETY: by the contract of the verb.
        let domain = unsafe { PdObject::of(pd) }?;
        let window = match kind {
            1 => WindowKind::One,
            2 => WindowKind::Two,
            other => return Err(Refusal::invalid(format!("memory window type {other}: there are 1 and 2"))),
        };
        let mw = domain.pd().alloc_mw(window)?;
        let context = domain.context.clone();
        let c = ibv_mw { context: context.as_ptr(), pd, rkey: mw.first_rkey(), handle: handle_number(), type_: kind };
        MwObject::publish(|_| Ok(MwObject { c: Shared::new(c), mw, _context: context }))
    }

    /// `ibv_bind_mw(3)`: type 1. The new key is in the window when it returns, and good when the request is complete.
    fn bind_mw as "ibv_bind_mw" (qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { QpObject::of(qp) }?;
        if mw.is_null() || bind.is_null() {
            return Err(Refusal::invalid("mw or mw_bind is NULL"));
        }
        // SAFETY: not NULL, so they point to structures of the caller.
        let (bind, before) = unsafe { (bind.read(), (*mw).rkey) };
        let rkey = before & !KEY_PART | before.wrapping_add(1) & KEY_PART;
        // SAFETY: by the contract of the verb.
        let op = unsafe { binding(object, mw, WindowKind::One, rkey, &bind.bind_info) }?;
        let flags = SendFlags::from_bits_truncate(bind.send_flags) - SendFlags::INLINE;
        let data = SendData::Sges(Default::default());
        object.qp.post_send(SendWr { wr_id: bind.wr_id, op, flags, data, ud: None, xrc_srqn: None }).map_err(posting)?;
        // SAFETY: as above; binding one window from several threads is the program's to serialise.
        unsafe { (*mw).rkey = rkey };
        object.qp.ring();
        Ok(())
    }

    /// `ibv_dealloc_mw(3)`: also of a window that is bound.
    fn dealloc_mw as "ibv_dealloc_mw" (mw: *mut ibv_mw) -> Status {
        // SAFETY: by the contract of the verb.
        unsafe { MwObject::of(mw) }?.mw.dealloc()?;
        // SAFETY: the window is gone, so the program has no use for the pointer any more.
        drop(unsafe { MwObject::reclaim(mw) });
        Ok(())
    }
}
