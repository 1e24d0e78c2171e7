//! Shared receive queues.

use std::ffi::c_int;
use std::sync::Arc;

use ferroce::{SrqCreate, TagSrqCreate};

use crate::abi::{
    consts::srq_init, ibv_context, ibv_cq, ibv_pd, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, ibv_srq_init_attr_ex,
    ibv_xrcd,
};
use crate::context::{ContextObject, ContextRef};
use crate::cq::CqObject;
use crate::entry::{Pointer, Refusal, Status, Verb, slot, verb};
use crate::events::acknowledged;
use crate::handle::{Shared, handle, handle_number};
use crate::pd::PdObject;
use crate::xrc::XrcdObject;

/// `struct ibv_srq` and what is behind it.
#[repr(C)]
pub struct SrqObject {
    c: Shared<ibv_srq>,
    pub(crate) srq: Arc<ferroce::Srq>,
    context: ContextRef,
}

handle!(SrqObject, ibv_srq, "srq");

/// `enum ibv_srq_attr_mask`.
const MAX_WR: c_int = 1 << 0;
/// `enum ibv_srq_attr_mask`.
const LIMIT: c_int = 1 << 1;

/// What an SRQ has besides the basic things.
enum Kind {
    Basic,
    Xrc(*mut ibv_xrcd, *mut ibv_cq),
    /// Tag matching: tags, operations.
    Tags(*mut ibv_cq, [u32; 2]),
}

/// Makes an SRQ and tells the sizes that were granted.
///
/// # Safety
///
/// The pointers are NULL or live.
unsafe fn create(pd: *mut ibv_pd, init: &mut ibv_srq_init_attr, kind: &Kind) -> Verb<*mut ibv_srq> {
    // SAFETY: by the contract above.
    let domain = unsafe { PdObject::of(pd) }?;
    if init.attr.max_wr == 0 {
        return Err(Refusal::invalid("attr.max_wr is 0; an SRQ needs room for at least one request"));
    }
    let cq = match *kind {
        Kind::Basic => None,
        // SAFETY: by the contract above.
        Kind::Xrc(_, cq) | Kind::Tags(cq, _) => Some(unsafe { CqObject::of(cq) }?.cq.clone()),
    };
    let xrcd = match *kind {
        // SAFETY: by the contract above.
        Kind::Xrc(xrcd, _) => Some(unsafe { XrcdObject::of(xrcd) }?.xrcd.clone()),
        Kind::Basic | Kind::Tags(..) => None,
    };
    SrqObject::publish(|address| {
        let create = SrqCreate { max_wr: init.attr.max_wr, max_sge: init.attr.max_sge, cookie: address as u64 };
        let srq = match (&cq, &xrcd, kind) {
            (Some(cq), Some(xrcd), _) => xrcd.create_srq(domain.pd(), cq, &create)?,
            (Some(cq), None, &Kind::Tags(_, [max_num_tags, max_ops])) => {
                domain.pd().create_tag_srq(cq, &TagSrqCreate { srq: create, max_num_tags, max_ops })?
            }
            _ => domain.pd().create_srq(&create)?,
        };
        let (max_wr, max_sge, _) = srq.query();
        init.attr.max_wr = max_wr;
        init.attr.max_sge = max_sge;
        let context = domain.context.clone();
        let c = ibv_srq {
            context: context.as_ptr(),
            srq_context: init.srq_context,
            pd,
            handle: handle_number(),
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            cond: libc::PTHREAD_COND_INITIALIZER,
            events_completed: 0,
        };
        Ok(SrqObject { c: Shared::new(c), srq, context })
    })
}

slot! {
    /// `ibv_create_srq_ex(3)`: basic SRQs, those of XRC domains and those that match tags. (The inline function calls `ibv_create_srq` for the simple case.)
    fn create_srq_ex as "ibv_create_srq_ex" (
        context: *mut ibv_context,
        init: *mut ibv_srq_init_attr_ex,
    ) -> Pointer<ibv_srq> {
        // SAFETY: by the contract of the verb.
        unsafe { ContextObject::of(context) }?;
        if init.is_null() {
            return Err(Refusal::invalid("srq_init_attr_ex is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller, which may be shorter than ours: fields behind the mask are
        // read only if the mask names them.
        let mask = unsafe { (*init).comp_mask };
        const XRC: u32 = srq_init::XRCD | srq_init::CQ;
        const TM: u32 = srq_init::CQ | srq_init::TM;
        if mask & !(srq_init::TYPE | srq_init::PD | XRC | TM) != 0 {
            return Err(Refusal::unsupported(format!("comp_mask {mask:#x} has unknown bits")));
        }
        if mask & srq_init::PD == 0 {
            return Err(Refusal::invalid("comp_mask names no protection domain"));
        }
        // SAFETY: the mask says that the fields are there; the first two fields are those of `ibv_srq_init_attr`.
        unsafe {
            let srq_type = if mask & srq_init::TYPE != 0 { (*init).srq_type } else { srq_init::TYPE_BASIC };
            let kind = match srq_type {
                srq_init::TYPE_BASIC => Kind::Basic,
                srq_init::TYPE_XRC if mask & XRC == XRC => Kind::Xrc((*init).xrcd, (*init).cq),
                srq_init::TYPE_XRC => return Err(Refusal::invalid("IBV_SRQT_XRC needs xrcd and cq: comp_mask must name both")),
                srq_init::TYPE_TM if mask & TM == TM => Kind::Tags((*init).cq, (*init).tm_cap),
                srq_init::TYPE_TM => return Err(Refusal::invalid("IBV_SRQT_TM needs cq and tm_cap: comp_mask must name both")),
                other => return Err(Refusal::unsupported(format!("srq_type {other} is unknown"))),
            };
            create((*init).pd, &mut *init.cast::<ibv_srq_init_attr>(), &kind)
        }
    }
}

verb! {
    /// `ibv_create_srq(3)`.
    fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> Pointer<ibv_srq> {
        if init.is_null() {
            return Err(Refusal::invalid("srq_init_attr is NULL"));
        }
        // SAFETY: by the contract of the verb; not NULL, so it points to a structure of the caller.
        unsafe { create(pd, &mut *init, &Kind::Basic) }
    }

    /// `ibv_modify_srq(3)`: the capacity, the limit, or both.
    fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { SrqObject::of(srq) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("srq_attr is NULL"));
        }
        if mask & !(MAX_WR | LIMIT) != 0 {
            return Err(Refusal::invalid(format!("srq_attr_mask {mask:#x} has unknown bits")));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let attr = unsafe { attr.read() };
        if mask & MAX_WR != 0 {
            object.srq.resize(attr.max_wr)?;
        }
        if mask & LIMIT != 0 {
            object.srq.set_limit(attr.srq_limit)?;
        }
        Ok(())
    }

    /// `ibv_query_srq(3)`.
    fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { SrqObject::of(srq) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("srq_attr is NULL"));
        }
        let (max_wr, max_sge, srq_limit) = object.srq.query();
        // SAFETY: not NULL, so it points to a structure of the caller.
        unsafe { attr.write(ibv_srq_attr { max_wr, max_sge, srq_limit }) };
        Ok(())
    }

    /// `ibv_destroy_srq(3)`: `EBUSY` while a queue pair uses it; blocks until every event told was acknowledged.
    fn ibv_destroy_srq(srq: *mut ibv_srq) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { SrqObject::of(srq) }?;
        let delivered = object.srq.destroy()?;
        // In a forked child the counts belong to the parent, and so do the locks.
        if !object.context.is_stale() {
            // SAFETY: the counter lies in the live SRQ.
            unsafe { acknowledged!(srq, events_completed).wait(delivered) };
        }
        // SAFETY: the SRQ is gone and no event of it is out; the program has no use for the pointer any more.
        drop(unsafe { SrqObject::reclaim(srq) });
        Ok(())
    }
}
