//! XRC: domains, and opening a target queue pair once more.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ferroce::XrcdOpen;

use crate::abi::consts::{qp_open, xrcd_init};
use crate::abi::{ibv_context, ibv_qp, ibv_qp_open_attr, ibv_srq, ibv_xrcd, ibv_xrcd_init_attr};
use crate::context::{ContextObject, ContextRef};
use crate::entry::{Pointer, Refusal, Status, slot};
use crate::handle::{Shared, handle};
use crate::qp::{self, QpObject};
use crate::srq::SrqObject;

/// `struct ibv_xrcd` and what is behind it.
#[repr(C)]
pub(crate) struct XrcdObject {
    c: Shared<ibv_xrcd>,
    pub(crate) xrcd: Arc<ferroce::Xrcd>,
    pub(crate) context: ContextRef,
}

handle!(XrcdObject, ibv_xrcd, "xrcd");

slot! {
    /// `ibv_open_xrcd(3)`: `oflags` may be `O_CREAT` and `O_EXCL`; with `fd` -1 the domain has no name.
    fn open_xrcd as "ibv_open_xrcd" (
        context: *mut ibv_context,
        attr: *mut ibv_xrcd_init_attr,
    ) -> Pointer<ibv_xrcd> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("xrcd_init_attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let attr = unsafe { attr.read() };
        if attr.comp_mask & !xrcd_init::ALL != 0 {
            return Err(Refusal::unsupported(format!("comp_mask {:#x} has unknown bits", attr.comp_mask)));
        }
        if attr.comp_mask != xrcd_init::ALL {
            return Err(Refusal::invalid("comp_mask must name both fd and oflags"));
        }
        if attr.oflags & !(libc::O_CREAT | libc::O_EXCL) != 0 {
            return Err(Refusal::invalid(format!("oflags {:#o} are not O_CREAT and O_EXCL", attr.oflags)));
        }
        let name = match attr.fd {
            -1 => None,
            fd if fd < 0 => return Err(Refusal::new(libc::EBADF, format!("fd is {fd}"))),
            // SAFETY: the caller says that this is an open descriptor; if it is not, the system says so.
            fd => Some(unsafe { BorrowedFd::borrow_raw(fd) }),
        };
        let (create, exclusive) = (attr.oflags & libc::O_CREAT != 0, attr.oflags & libc::O_EXCL != 0);
        let xrcd = context.context().open_xrcd(&XrcdOpen { name, create, exclusive })?;
        let c = ibv_xrcd { context: context.as_ptr() };
        XrcdObject::publish(|_| Ok(XrcdObject { c: Shared::new(c), xrcd, context }))
    }

    /// `ibv_close_xrcd(3)`: `EBUSY` while SRQs or queue pairs of it are alive.
    fn close_xrcd as "ibv_close_xrcd" (xrcd: *mut ibv_xrcd) -> Status {
        // SAFETY: by the contract of the verb.
        unsafe { XrcdObject::of(xrcd) }?.xrcd.close()?;
        // SAFETY: nothing uses it, and the program has no use for the pointer any more.
        drop(unsafe { XrcdObject::reclaim(xrcd) });
        Ok(())
    }

    /// `ibv_get_srq_num(3)`.
    fn get_srq_num as "ibv_get_srq_num" (srq: *mut ibv_srq, srq_num: *mut u32) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { SrqObject::of(srq) }?;
        let number = object.srq.number().ok_or_else(|| {
            Refusal::unsupported("only shared receive queues of XRC domains have a number")
        })?;
        if srq_num.is_null() {
            return Err(Refusal::invalid("srq_num is NULL"));
        }
        // SAFETY: not NULL, so it points to a number of the caller.
        unsafe { srq_num.write(number) };
        Ok(())
    }

    /// `ibv_open_qp(3)`: a target of this process.
    fn open_qp as "ibv_open_qp" (context: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> Pointer<ibv_qp> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("qp_open_attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let attr = unsafe { attr.read() };
        if attr.comp_mask & !qp_open::ALL != 0 {
            return Err(Refusal::unsupported(format!("comp_mask {:#x} has unknown bits", attr.comp_mask)));
        }
        const NEEDED: u32 = qp_open::NUM | qp_open::XRCD | qp_open::TYPE;
        if attr.comp_mask & NEEDED != NEEDED || attr.qp_type != ferroce::QpType::XrcRecv as u32 {
            return Err(Refusal::invalid("comp_mask must name qp_num, xrcd and qp_type, which must be IBV_QPT_XRC_RECV"));
        }
        // SAFETY: by the contract of the verb.
        let object = unsafe { XrcdObject::of(attr.xrcd) }?;
        let qp_context = if attr.comp_mask & qp_open::CONTEXT != 0 { attr.qp_context } else { std::ptr::null_mut() };
        QpObject::publish(|address| {
            let target = object.xrcd.open_target(attr.qp_num, address as u64)?;
            Ok(qp::target_object(&context, target, qp_context))
        })
    }
}
