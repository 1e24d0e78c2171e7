//! Multicast: not in this version.

use std::ffi::{c_int, c_void};

use crate::abi::rdma_cm_id;
use crate::entry::{Call, Refusal, rdma};

fn no_multicast<T>() -> Call<T> {
    Err(Refusal::new(libc::EOPNOTSUPP, "multicast is not available"))
}

rdma! {
    /// `rdma_join_multicast(3)`.
    fn rdma_join_multicast(_id: *mut rdma_cm_id, _addr: *mut c_void, _context: *mut c_void) -> c_int { no_multicast() }

    /// `rdma_join_multicast_ex(3)`.
    fn rdma_join_multicast_ex(_id: *mut rdma_cm_id, _attr: *mut c_void, _context: *mut c_void) -> c_int { no_multicast() }

    /// `rdma_leave_multicast(3)`.
    fn rdma_leave_multicast(_id: *mut rdma_cm_id, _addr: *mut c_void) -> c_int { no_multicast() }
}
