//! Multicast and rsockets: not in this version.

use std::ffi::{c_int, c_ulong, c_void};

use crate::abi::rdma_cm_id;
use crate::entry::{Call, Refusal, rdma};

fn no_multicast<T>() -> Call<T> {
    Err(Refusal::new(libc::EOPNOTSUPP, "multicast is not available"))
}

fn no_rsockets<T>() -> Call<T> {
    Err(Refusal::new(libc::EOPNOTSUPP, "rsockets are not available; use TCP, or rdma_* functions"))
}

rdma! {
    /// `rdma_join_multicast(3)`.
    fn rdma_join_multicast(_id: *mut rdma_cm_id, _addr: *mut c_void, _context: *mut c_void) -> c_int { no_multicast() }

    /// `rdma_join_multicast_ex(3)`.
    fn rdma_join_multicast_ex(_id: *mut rdma_cm_id, _attr: *mut c_void, _context: *mut c_void) -> c_int { no_multicast() }

    /// `rdma_leave_multicast(3)`.
    fn rdma_leave_multicast(_id: *mut rdma_cm_id, _addr: *mut c_void) -> c_int { no_multicast() }

    /// `rsocket`, see rsocket(7).
    fn rsocket(_domain: c_int, _type: c_int, _protocol: c_int) -> c_int { no_rsockets() }

    /// `rbind`, see rsocket(7).
    fn rbind(_socket: c_int, _addr: *const c_void, _len: u32) -> c_int { no_rsockets() }

    /// `rlisten`, see rsocket(7).
    fn rlisten(_socket: c_int, _backlog: c_int) -> c_int { no_rsockets() }

    /// `raccept`, see rsocket(7).
    fn raccept(_socket: c_int, _addr: *mut c_void, _len: *mut u32) -> c_int { no_rsockets() }

    /// `rconnect`, see rsocket(7).
    fn rconnect(_socket: c_int, _addr: *const c_void, _len: u32) -> c_int { no_rsockets() }

    /// `rshutdown`, see rsocket(7).
    fn rshutdown(_socket: c_int, _how: c_int) -> c_int { no_rsockets() }

    /// `rclose`, see rsocket(7).
    fn rclose(_socket: c_int) -> c_int { no_rsockets() }

    /// `rrecv`, see rsocket(7).
    fn rrecv(_socket: c_int, _buffer: *mut c_void, _len: usize, _flags: c_int) -> isize { no_rsockets() }

    /// `rrecvfrom`, see rsocket(7).
    fn rrecvfrom(_socket: c_int, _buffer: *mut c_void, _len: usize, _flags: c_int, _addr: *mut c_void, _addr_len: *mut u32) -> isize { no_rsockets() }

    /// `rrecvmsg`, see rsocket(7).
    fn rrecvmsg(_socket: c_int, _message: *mut c_void, _flags: c_int) -> isize { no_rsockets() }

    /// `rsend`, see rsocket(7).
    fn rsend(_socket: c_int, _buffer: *const c_void, _len: usize, _flags: c_int) -> isize { no_rsockets() }

    /// `rsendto`, see rsocket(7).
    fn rsendto(_socket: c_int, _buffer: *const c_void, _len: usize, _flags: c_int, _addr: *const c_void, _addr_len: u32) -> isize { no_rsockets() }

    /// `rsendmsg`, see rsocket(7).
    fn rsendmsg(_socket: c_int, _message: *const c_void, _flags: c_int) -> isize { no_rsockets() }

    /// `rread`, see rsocket(7).
    fn rread(_socket: c_int, _buffer: *mut c_void, _count: usize) -> isize { no_rsockets() }

    /// `rreadv`, see rsocket(7).
    fn rreadv(_socket: c_int, _vector: *const c_void, _count: c_int) -> isize { no_rsockets() }

    /// `rwrite`, see rsocket(7).
    fn rwrite(_socket: c_int, _buffer: *const c_void, _count: usize) -> isize { no_rsockets() }

    /// `rwritev`, see rsocket(7).
    fn rwritev(_socket: c_int, _vector: *const c_void, _count: c_int) -> isize { no_rsockets() }

    /// `rpoll`, see rsocket(7).
    fn rpoll(_fds: *mut c_void, _count: c_ulong, _timeout: c_int) -> c_int { no_rsockets() }

    /// `rselect`, see rsocket(7).
    fn rselect(_count: c_int, _read: *mut c_void, _write: *mut c_void, _except: *mut c_void, _timeout: *mut c_void) -> c_int { no_rsockets() }

    /// `rgetpeername`, see rsocket(7).
    fn rgetpeername(_socket: c_int, _addr: *mut c_void, _len: *mut u32) -> c_int { no_rsockets() }

    /// `rgetsockname`, see rsocket(7).
    fn rgetsockname(_socket: c_int, _addr: *mut c_void, _len: *mut u32) -> c_int { no_rsockets() }

    /// `rsetsockopt`, see rsocket(7).
    fn rsetsockopt(_socket: c_int, _level: c_int, _option: c_int, _value: *const c_void, _len: u32) -> c_int { no_rsockets() }

    /// `rgetsockopt`, see rsocket(7).
    fn rgetsockopt(_socket: c_int, _level: c_int, _option: c_int, _value: *mut c_void, _len: *mut u32) -> c_int { no_rsockets() }

    /// `riomap`, see rsocket(7).
    fn riomap(_socket: c_int, _buffer: *mut c_void, _len: usize, _protection: c_int, _flags: c_int, _offset: i64) -> i64 { no_rsockets() }

    /// `riounmap`, see rsocket(7).
    fn riounmap(_socket: c_int, _buffer: *mut c_void, _len: usize) -> c_int { no_rsockets() }

    /// `riowrite`, see rsocket(7).
    fn riowrite(_socket: c_int, _buffer: *const c_void, _count: usize, _offset: i64, _flags: c_int) -> usize { no_rsockets() }

    /// `rfcntl`, see rsocket(7). (Variadic in C: the third argument arrives like a fixed one.)
    fn rfcntl(_socket: c_int, _command: c_int, _argument: usize) -> c_int { no_rsockets() }
}
