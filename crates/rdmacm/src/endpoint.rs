//! `rdma_create_ep`: an id with all that belongs to it, from what `rdma_getaddrinfo` found.

use std::ffi::c_int;
use std::ptr;

use ferroce_abi::{ibv_pd, ibv_qp_init_attr};

use crate::abi::{RAI_PASSIVE, rdma_addrinfo, rdma_cm_id};
use crate::addr::{rdma_bind_addr, rdma_resolve_addr, rdma_resolve_route};
use crate::entry::{Call, Refusal, given, put, rdma};
use crate::id::{self, IdObject, rdma_destroy_id};
use crate::qp;

/// Of a call into the library itself, which has told the reason.
fn inner(result: c_int) -> Call<()> {
    if result == 0 { Ok(()) } else { Err(Refusal::last()) }
}

/// Resolves or binds what was made.
fn furnish(object: &IdObject, found: &rdma_addrinfo, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> Call<()> {
    let c = object.as_ptr();
    if found.ai_flags & RAI_PASSIVE != 0 {
        // SAFETY: a fresh id, and an address of the program.
        inner(unsafe { rdma_bind_addr(c, found.ai_src_addr) })?;
        if !init.is_null() {
            // SAFETY: attributes of the program.
            let mut init = *unsafe { given(init, "qp_init_attr") }?;
            init.qp_type = found.ai_qp_type as u32;
            object.inner().template = Some((pd as usize, init));
        }
        return Ok(());
    }
    const TIMEOUT_MS: c_int = 2000;
    // SAFETY: as above.
    inner(unsafe { rdma_resolve_addr(c, found.ai_src_addr, found.ai_dst_addr, TIMEOUT_MS) })?;
    // SAFETY: a fresh id.
    inner(unsafe { rdma_resolve_route(c, TIMEOUT_MS) })?;
    if !init.is_null() {
        // SAFETY: attributes of the program.
        let mut wanted = *unsafe { given(init, "qp_init_attr") }?;
        wanted.qp_type = found.ai_qp_type as u32;
        qp::create(object, pd, &mut wanted)?;
        // SAFETY: as above.
        unsafe { put(init, wanted) }?;
    }
    Ok(())
}

rdma! {
    /// `rdma_create_ep(3)`: a synchronous id, bound (passive) or with a route and, if asked for, a queue pair.
    fn rdma_create_ep(
        id: *mut *mut rdma_cm_id,
        res: *mut rdma_addrinfo,
        pd: *mut ibv_pd,
        qp_init_attr: *mut ibv_qp_init_attr,
    ) -> c_int {
        // SAFETY: by the contract of the function.
        let found = unsafe { given(res, "the address information") }?;
        id::check_space(found.ai_port_space, found.ai_qp_type)?;
        let made = id::create(ptr::null_mut(), ptr::null_mut(), found.ai_port_space, found.ai_qp_type)?;
        // SAFETY: just made.
        let object = unsafe { IdObject::of(made.cast()) }?;
        if let Err(refusal) = furnish(object, found, pd, qp_init_attr) {
            // SAFETY: the program never sees it.
            unsafe { rdma_destroy_id(made.cast()) };
            return Err(refusal);
        }
        // SAFETY: by the contract of the function.
        unsafe { put(id, made.cast()) }?;
        Ok(0)
    }

    /// `rdma_destroy_ep(3)`.
    fn rdma_destroy_ep(id: *mut rdma_cm_id) -> () {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        qp::destroy(object);
        qp::destroy_srq(object);
        // SAFETY: by the contract of the function.
        unsafe { rdma_destroy_id(id) };
        Ok(())
    }
}
