//! What `libibverbs.so.1` gives: verbs, and the connection manager.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::offset_of;

use ferroce_abi::cm::{
    ferroce_cm_event, ferroce_cm_kept, ferroce_cm_param, ferroce_cm_path, ferroce_cm_qp, ferroce_cm_told,
};
use ferroce_abi::{
    ibv_ah, ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_mr, ibv_pd,
    ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_srq, ibv_srq_init_attr, verbs_context,
};
use libc::{sockaddr, sockaddr_storage};

unsafe extern "C" {
    pub(crate) fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device;
    pub(crate) fn ibv_free_device_list(list: *mut *mut ibv_device);
    pub(crate) fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
    pub(crate) fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
    pub(crate) fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    pub(crate) fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    pub(crate) fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    pub(crate) fn ibv_create_cq(
        context: *mut ibv_context,
        cqe: c_int,
        cookie: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> *mut ibv_cq;
    pub(crate) fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    pub(crate) fn ibv_create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    pub(crate) fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int;
    pub(crate) fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    pub(crate) fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    pub(crate) fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
    pub(crate) fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int;
    pub(crate) fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
    pub(crate) fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
    pub(crate) fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;

    pub(crate) fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
    pub(crate) fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
    pub(crate) fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        context: *mut *mut c_void,
    ) -> c_int;
    pub(crate) fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint);

    pub(crate) fn ferroce_cm_channel_open(place: *mut *mut c_void) -> c_int;
    pub(crate) fn ferroce_cm_channel_close(channel: *mut c_void);
    pub(crate) fn ferroce_cm_channel_fd(channel: *const c_void, place: *mut c_int) -> c_int;
    pub(crate) fn ferroce_cm_channel_next(channel: *const c_void, place: *mut ferroce_cm_event) -> c_int;
    pub(crate) fn ferroce_cm_create_id(channel: *const c_void, space: u16, datagram: c_int, id: *mut u64) -> c_int;
    pub(crate) fn ferroce_cm_migrate(id: u64, to: *const c_void) -> c_int;
    pub(crate) fn ferroce_cm_bind(
        id: u64,
        addr: *const sockaddr,
        reuse: c_int,
        v6_only: c_int,
        bound: *mut sockaddr_storage,
    ) -> c_int;
    pub(crate) fn ferroce_cm_route(dst: *const sockaddr, src: *const sockaddr, place: *mut ferroce_cm_path) -> c_int;
    pub(crate) fn ferroce_cm_neighbour(
        path: *const ferroce_cm_path,
        timeout_ms: u32,
        told: ferroce_cm_told,
        cookie: u64,
    ) -> c_int;
    pub(crate) fn ferroce_cm_neighbour_cancel(cookie: u64);
    pub(crate) fn ferroce_cm_locate(addr: *const sockaddr, place: *mut ferroce_cm_path) -> c_int;
    pub(crate) fn ferroce_cm_device(name: *const c_char) -> *mut ibv_device;
    pub(crate) fn ferroce_cm_listen(id: u64, backlog: u32) -> c_int;
    pub(crate) fn ferroce_cm_connect(
        id: u64,
        path: *const ferroce_cm_path,
        port: u16,
        param: *const ferroce_cm_param,
        data: *const c_void,
        len: u8,
    ) -> c_int;
    pub(crate) fn ferroce_cm_resolve(
        id: u64,
        path: *const ferroce_cm_path,
        port: u16,
        data: *const c_void,
        len: u8,
    ) -> c_int;
    pub(crate) fn ferroce_cm_accept(id: u64, param: *const ferroce_cm_param, data: *const c_void, len: u8) -> c_int;
    pub(crate) fn ferroce_cm_accept_datagram(
        id: u64,
        param: *const ferroce_cm_param,
        data: *const c_void,
        len: u8,
    ) -> c_int;
    pub(crate) fn ferroce_cm_reject(id: u64, reason: u16, data: *const c_void, len: u8) -> c_int;
    pub(crate) fn ferroce_cm_establish(id: u64) -> c_int;
    pub(crate) fn ferroce_cm_notify(id: u64) -> c_int;
    pub(crate) fn ferroce_cm_disconnect(id: u64) -> c_int;
    pub(crate) fn ferroce_cm_destroy(id: u64) -> c_int;
    pub(crate) fn ferroce_cm_qp_parameters(id: u64, place: *mut ferroce_cm_qp) -> c_int;
    pub(crate) fn ferroce_cm_keep(id: u64, place: *mut ferroce_cm_kept) -> c_int;
    pub(crate) fn ferroce_cm_adopt(channel: *const c_void, kept: *const ferroce_cm_kept, id: *mut u64) -> c_int;
    pub(crate) fn ferroce_cm_tell(function: *const c_char, errno: c_int, sentence: *const c_char);
}

/// A function of the table below a context, if the library that made the context has it.
pub(crate) fn slot<T: Copy>(context: *mut ibv_context, offset: usize) -> Option<T> {
    let whole = context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast::<verbs_context>();
    // SAFETY: contexts of our libibverbs lie in a `verbs_context`; the offset is of a nullable function pointer in it.
    unsafe { whole.wrapping_byte_add(offset).cast::<Option<T>>().read() }
}
