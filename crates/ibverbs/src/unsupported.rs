//! Public verbs that Ferroce does not have, and those that need nothing.

use std::ffi::{c_int, c_void};

use crate::abi::{consts, ibv_context, ibv_mr, ibv_pd, ibv_qp};
use crate::context::ContextObject;
use crate::convert;
use crate::entry::{MinusOne, Plain, Pointer, Refusal, Status, Verb, Void, verb};

fn refused<T>(why: &'static str) -> Verb<T> {
    Err(Refusal::unsupported(why))
}

const COUNTERS: &str = "completion counters are not implemented";
const DMAH: &str = "DMA handles need PCIe hardware";

verb! {
    /// `ibv_alloc_dmah(3)`.
    fn ibv_alloc_dmah(_context: *mut ibv_context, _attr: *mut c_void) -> Pointer<c_void> { refused(DMAH) }

    /// `ibv_dealloc_dmah(3)`.
    fn ibv_dealloc_dmah(_dmah: *mut c_void) -> Status { refused(DMAH) }

    /// `ibv_query_port_speed(3)`: in units of 100 Mbit/s.
    fn ibv_query_port_speed(context: *mut ibv_context, port_num: u32, speed: *mut u64) -> Status {
        // SAFETY: by the contract of the verb.
        unsafe { ContextObject::of(context) }?;
        if port_num != 1 || speed.is_null() {
            return Err(Refusal::invalid("port_num is not 1 or port_speed is NULL"));
        }
        // SAFETY: not NULL, so it points to a number of the caller.
        unsafe { *speed = convert::SPEED_100_MBPS };
        Ok(())
    }

    /// `ibv_alloc_buf(3)`.
    fn ibv_alloc_buf(_pd: *mut ibv_pd, _size: usize, _buf: *mut *mut c_void) -> Pointer<c_void> {
        refused("the library allocates no buffers; register memory of your own")
    }

    /// `ibv_free_buf(3)`: none was ever given out.
    fn ibv_free_buf(_buf: *mut c_void) -> Void { Ok(()) }

    /// `ibv_reg_buf_mr(3)`.
    fn ibv_reg_buf_mr(
        _pd: *mut ibv_pd,
        _buf: *mut c_void,
        _addr: *mut c_void,
        _length: usize,
        _access: c_int,
    ) -> Pointer<ibv_mr> {
        refused("the library allocates no buffers; register memory of your own")
    }

    /// `ibv_export_buf_dmabuf_fd(3)`.
    fn ibv_export_buf_dmabuf_fd(_buf: *mut c_void) -> MinusOne { refused("the library allocates no buffers") }

    /// Behind `ibv_query_comp_cntr_caps(3)`.
    fn _ibv_query_comp_cntr_caps(_context: *mut ibv_context, _caps: *mut c_void, _size: usize) -> Status { refused(COUNTERS) }

    /// `ibv_create_comp_cntr(3)`.
    fn ibv_create_comp_cntr(_context: *mut ibv_context, _attr: *mut c_void) -> Pointer<c_void> { refused(COUNTERS) }

    /// `ibv_destroy_comp_cntr(3)`.
    fn ibv_destroy_comp_cntr(_counter: *mut c_void) -> Status { refused(COUNTERS) }

    /// `ibv_set_comp_cntr(3)`.
    fn ibv_set_comp_cntr(_counter: *mut c_void, _value: u64) -> Status { refused(COUNTERS) }

    /// `ibv_set_err_comp_cntr(3)`.
    fn ibv_set_err_comp_cntr(_counter: *mut c_void, _value: u64) -> Status { refused(COUNTERS) }

    /// `ibv_inc_comp_cntr(3)`.
    fn ibv_inc_comp_cntr(_counter: *mut c_void, _amount: u64) -> Status { refused(COUNTERS) }

    /// `ibv_inc_err_comp_cntr(3)`.
    fn ibv_inc_err_comp_cntr(_counter: *mut c_void, _amount: u64) -> Status { refused(COUNTERS) }

    /// `ibv_read_comp_cntr(3)`.
    fn ibv_read_comp_cntr(_counter: *mut c_void, _value: *mut u64) -> Status { refused(COUNTERS) }

    /// `ibv_read_err_comp_cntr(3)`.
    fn ibv_read_err_comp_cntr(_counter: *mut c_void, _value: *mut u64) -> Status { refused(COUNTERS) }

    /// `ibv_qp_attach_comp_cntr(3)`.
    fn ibv_qp_attach_comp_cntr(_qp: *mut ibv_qp, _counter: *mut c_void, _attr: *mut c_void) -> Status { refused(COUNTERS) }

    /// `ibv_fork_init(3)`: pages are not pinned and not shared with a card, so nothing needs protection.
    fn ibv_fork_init() -> Status { Ok(()) }

    /// `ibv_is_fork_initialized(3)`: `IBV_FORK_UNNEEDED`.
    fn ibv_is_fork_initialized() -> Plain<u32> { Ok(consts::FORK_UNNEEDED) }

    /// For providers: as `ibv_fork_init`.
    fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> Status { Ok(()) }

    /// For providers: as `ibv_fork_init`.
    fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> Status { Ok(()) }
}
