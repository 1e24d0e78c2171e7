//! Private symbols: what vendor libraries (libmlx5, libefa) import from libibverbs.
//!
//! Programs link those libraries whether or not there is such a card, so the symbols must exist. They belong to a kernel interface
//! that is not there: each refuses. The one that vendor libraries call by themselves, to register at load, has nothing to do.

use std::ffi::{c_char, c_uint, c_void};
use std::sync::atomic::AtomicBool;

use crate::entry::{MinusOne, Pointer, Refusal, Status, Verb, verb};

fn no_kernel_device<T>() -> Verb<T> {
    Err(Refusal::unsupported("there is no kernel RDMA device behind Ferroce's own; vendor drivers cannot be used"))
}

/// Functions that answer `EOPNOTSUPP`, whatever their arguments are.
macro_rules! refusing {
    ($($name:ident)*) => {
        $(
            verb! {
                /// Private to providers: refused.
                fn $name() -> Status { no_kernel_device() }
            }
        )*
    };
}

refusing! {
    execute_ioctl
    ibv_cmd_advise_mr ibv_cmd_alloc_dm ibv_cmd_alloc_dmah ibv_cmd_alloc_mw ibv_cmd_alloc_pd ibv_cmd_attach_mcast
    ibv_cmd_close_xrcd ibv_cmd_create_ah ibv_cmd_create_comp_cntr ibv_cmd_create_counters ibv_cmd_create_cq
    ibv_cmd_create_cq_ex ibv_cmd_create_cq_ex2 ibv_cmd_create_flow ibv_cmd_create_flow_action_esp ibv_cmd_create_qp
    ibv_cmd_create_qp_ex ibv_cmd_create_qp_ex2 ibv_cmd_create_rwq_ind_table ibv_cmd_create_srq ibv_cmd_create_srq_ex
    ibv_cmd_create_wq ibv_cmd_dealloc_mw ibv_cmd_dealloc_pd ibv_cmd_dereg_mr ibv_cmd_destroy_ah
    ibv_cmd_destroy_comp_cntr ibv_cmd_destroy_counters ibv_cmd_destroy_cq ibv_cmd_destroy_flow
    ibv_cmd_destroy_flow_action ibv_cmd_destroy_qp ibv_cmd_destroy_rwq_ind_table ibv_cmd_destroy_srq
    ibv_cmd_destroy_wq ibv_cmd_detach_mcast ibv_cmd_export_dmabuf_fd ibv_cmd_free_dm ibv_cmd_free_dmah
    ibv_cmd_get_context ibv_cmd_inc_comp_cntr ibv_cmd_inc_err_comp_cntr ibv_cmd_modify_cq
    ibv_cmd_modify_flow_action_esp ibv_cmd_modify_qp ibv_cmd_modify_qp_ex ibv_cmd_modify_srq ibv_cmd_modify_wq
    ibv_cmd_open_qp ibv_cmd_open_xrcd ibv_cmd_post_recv ibv_cmd_post_send ibv_cmd_post_srq_recv
    ibv_cmd_qp_attach_comp_cntr ibv_cmd_query_comp_cntr_caps ibv_cmd_query_context ibv_cmd_query_device_any
    ibv_cmd_query_mr ibv_cmd_query_port ibv_cmd_query_port_speed ibv_cmd_query_qp ibv_cmd_query_srq
    ibv_cmd_read_comp_cntr ibv_cmd_read_counters ibv_cmd_read_err_comp_cntr ibv_cmd_reg_dm_mr ibv_cmd_reg_dmabuf_mr
    ibv_cmd_reg_mr ibv_cmd_reg_mr_ex ibv_cmd_req_notify_cq ibv_cmd_rereg_mr ibv_cmd_resize_cq ibv_cmd_set_comp_cntr
    ibv_cmd_set_err_comp_cntr
}

verb! {
    /// Private to providers: no entries can be polled.
    fn ibv_cmd_poll_cq() -> MinusOne { no_kernel_device() }

    /// Private to providers: no context can be made.
    fn _verbs_init_and_alloc_context() -> Pointer<c_void> { no_kernel_device() }

    /// Private to providers: no device can be opened by them.
    fn verbs_open_device() -> Pointer<c_void> { no_kernel_device() }

    /// Private to providers.
    fn ibv_dmabuf_heap_alloc() -> Pointer<c_void> { no_kernel_device() }

    /// Private to providers.
    fn ibv_dmabuf_heap_cc_shared_init() -> Pointer<c_void> { no_kernel_device() }
}

/// Functions without a result and without anything to do.
macro_rules! nothing_to_do {
    ($($name:ident)*) => {
        $(
            /// Private to providers: nothing to do.
            // SAFETY: the name is the C library's own, and is defined once.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() {}
        )*
    };
}

nothing_to_do! {
    verbs_register_driver_34 verbs_register_driver_57 verbs_register_driver_59 verbs_register_driver_64
    verbs_register_driver_65
    verbs_init_cq verbs_set_ops verbs_uninit_context
    ibv_dmabuf_heap_destroy ibv_dmabuf_heap_free
    ferroce_register_driver
}

/// Private to providers: their log lines about a device that cannot be.
// SAFETY: the name is the C library's own, and is defined once. It is variadic in C; a callee that looks at none of its arguments is
// called the same on x86-64 and AArch64.
#[unsafe(no_mangle)]
pub extern "C" fn __verbs_log(_context: *mut c_void, _level: u32, _format: *const c_char) {}

/// Private to providers: how many attributes a kernel command has in the end; those that it was given.
// SAFETY: the name is the C library's own, and is defined once.
#[unsafe(no_mangle)]
pub extern "C" fn __ioctl_final_num_attrs(attributes: c_uint, _link: *mut c_void) -> c_uint {
    attributes
}

/// Private to providers: whether destroying survives the loss of the kernel device (`RDMAV_ALLOW_DISASSOC_DESTROY`). A C `bool`.
#[unsafe(no_mangle)]
// SAFETY: the name is the C library's own, and is defined once.
pub static verbs_allow_disassociate_destroy: AtomicBool = AtomicBool::new(false);
