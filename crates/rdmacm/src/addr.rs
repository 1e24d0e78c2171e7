//! Addresses and routes of ids.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV6};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use ferroce_abi::cm::ferroce_cm_path;
use ferroce_abi::ibv_sa_path_rec;
use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage};

use crate::abi::{event, rdma_cm_id};
use crate::device::{self, Opened};
use crate::entry::{Call, Refusal, calloc, check, enter, given, rdma};
use crate::id::{self, IdObject};
use crate::verbs;

/// The one partition.
const PKEY: u16 = 0xffff;

/// Bytes of an address of IPv4 or IPv6.
pub(crate) fn length(addr: *const sockaddr) -> Call<usize> {
    // SAFETY: an address of the program, by the contract of the functions of C, or of ours.
    match c_int::from(unsafe { given(addr, "the address") }?.sa_family) {
        libc::AF_INET => Ok(size_of::<sockaddr_in>()),
        libc::AF_INET6 => Ok(size_of::<sockaddr_in6>()),
        other => Err(Refusal::new(
            libc::EAFNOSUPPORT,
            format!("address family {other}: only AF_INET and AF_INET6 are available (RoCE has no AF_IB addresses)"),
        )),
    }
}

/// A copy that is as long as its family says.
pub(crate) fn copy(addr: *const sockaddr) -> Call<sockaddr_storage> {
    let len = length(addr)?;
    // SAFETY: integers, for which zero is a value; then `len` bytes of an address of that family, which is no longer than a storage.
    unsafe {
        let mut storage: sockaddr_storage = std::mem::zeroed();
        ptr::copy_nonoverlapping(addr.cast::<u8>(), (&raw mut storage).cast::<u8>(), len);
        Ok(storage)
    }
}

/// An address as the functions of C take it.
pub(crate) fn plain(storage: &sockaddr_storage) -> *const sockaddr {
    ptr::from_ref(storage).cast()
}

/// The port, in the order of the network; 0 without an address.
pub(crate) fn port(storage: &sockaddr_storage) -> u16 {
    match c_int::from(storage.ss_family) {
        // SAFETY: an address of this family; a storage is aligned for all of them.
        libc::AF_INET => unsafe { (*plain(storage).cast::<sockaddr_in>()).sin_port },
        // SAFETY: as above.
        libc::AF_INET6 => unsafe { (*plain(storage).cast::<sockaddr_in6>()).sin6_port },
        _ => 0,
    }
}

/// The same for people; None: it is no address.
pub(crate) fn readable(storage: &sockaddr_storage) -> Option<SocketAddr> {
    let port = u16::from_be(port(storage));
    match c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: an address of this family; a storage is aligned for all of them.
            let sin = unsafe { *plain(storage).cast::<sockaddr_in>() };
            Some((Ipv4Addr::from_bits(u32::from_be(sin.sin_addr.s_addr)), port).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let sin6 = unsafe { *plain(storage).cast::<sockaddr_in6>() };
            Some(SocketAddrV6::new(sin6.sin6_addr.s6_addr.into(), port, 0, sin6.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Whether it is a wildcard, or no address.
fn is_unspecified(storage: &sockaddr_storage) -> bool {
    match c_int::from(storage.ss_family) {
        // SAFETY: an address of this family; a storage is aligned for all of them.
        libc::AF_INET => unsafe { (*plain(storage).cast::<sockaddr_in>()).sin_addr.s_addr == 0 },
        // SAFETY: as above.
        libc::AF_INET6 => unsafe { (*plain(storage).cast::<sockaddr_in6>()).sin6_addr.s6_addr == [0; 16] },
        _ => true,
    }
}

/// The local end of a path, with a port in the order of the network.
fn local_end(path: &ferroce_cm_path, port: u16) -> sockaddr_storage {
    // SAFETY: integers, for which zero is a value.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    let raw = path.local.raw;
    let is_v4 = raw[..10] == [0; 10] && raw[10..12] == [0xff; 2];
    if is_v4 {
        let sin = sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: port,
            sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([raw[12], raw[13], raw[14], raw[15]]) },
            sin_zero: [0; 8],
        };
        // SAFETY: a storage has room for, and the alignment of, any address.
        unsafe { (&raw mut storage).cast::<sockaddr_in>().write(sin) };
    } else {
        let sin6 = sockaddr_in6 {
            sin6_family: libc::AF_INET6 as libc::sa_family_t,
            sin6_port: port,
            sin6_flowinfo: 0,
            sin6_addr: libc::in6_addr { s6_addr: raw },
            sin6_scope_id: path.ifindex,
        };
        // SAFETY: as above.
        unsafe { (&raw mut storage).cast::<sockaddr_in6>().write(sin6) };
    }
    storage
}

/// Shows an id's device and GIDs to the program.
pub(crate) fn show_device(id: &IdObject, path: &ferroce_cm_path, opened: Opened) {
    let c = id.as_ptr();
    // SAFETY: fields that the library writes during calls about the id.
    unsafe {
        (*c).verbs = opened.context;
        (*c).pd = opened.pd;
        (*c).port_num = 1;
        (*c).route.addr.ibaddr.sgid = path.local;
        (*c).route.addr.ibaddr.dgid = path.remote;
        (*c).route.addr.ibaddr.pkey = PKEY.to_be();
    }
}

/// Shows the path to the program.
pub(crate) fn show_route(id: &IdObject) -> Call<()> {
    let path = id.inner().resolved_path()?;
    let c = id.as_ptr();
    // SAFETY: fields that the library writes during calls about the id.
    unsafe {
        if (*c).route.path_rec.is_null() {
            (*c).route.path_rec = calloc::<ibv_sa_path_rec>(1)?;
        }
        let record = (*c).route.path_rec;
        (*record).dgid = path.remote;
        (*record).sgid = path.local;
        (*record).flow_label = path.flow_label.to_be();
        (*record).hop_limit = path.hop_limit;
        (*record).traffic_class = path.traffic_class;
        (*record).reversible = 1;
        (*record).numb_path = 1;
        (*record).pkey = PKEY.to_be();
        // Exactly.
        (*record).mtu_selector = 2;
        (*record).mtu = path.mtu;
        (*record).rate_selector = 2;
        (*record).packet_life_time_selector = 2;
        (*record).packet_life_time = path.ack_timeout.saturating_sub(1);
        (*c).route.num_paths = 1;
    }
    Ok(())
}

/// Gives an id an address.
pub(crate) fn bind(id: &IdObject, addr: &sockaddr_storage) -> Call<()> {
    id.ask(|number| bind_as(id, number, addr))
}

/// The same where the service's number of the id is known.
pub(crate) fn bind_as(id: &IdObject, number: u64, addr: &sockaddr_storage) -> Call<()> {
    let (reuse, v6_only) = {
        let inner = id.inner();
        (inner.reuse.into(), inner.v6_only.into())
    };
    let mut bound = MaybeUninit::<sockaddr_storage>::uninit();
    // SAFETY: an address of ours; room for another.
    check(unsafe { verbs::ferroce_cm_bind(number, plain(addr), reuse, v6_only, bound.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so it is written. The field is the library's during calls about the id.
    unsafe { (*id.as_ptr()).route.addr.src = bound.assume_init() };
    id.inner().bound = true;
    Ok(())
}

/// The way to `dst`: `rdma_resolve_addr` but for its event.
pub(crate) fn resolve(id: &IdObject, src: *const sockaddr, dst: *const sockaddr) -> Call<()> {
    let dst = copy(dst)?;
    let c = id.as_ptr();
    let bound = id.inner().bound;
    // SAFETY: the field is the library's during calls about the id.
    let known = unsafe { (*c).route.addr.src };
    let src = if src.is_null() { known } else { copy(src)? };
    let has_src = matches!(c_int::from(src.ss_family), libc::AF_INET | libc::AF_INET6);
    let from = if has_src && !is_unspecified(&src) { plain(&src) } else { ptr::null() };
    let mut path = MaybeUninit::<ferroce_cm_path>::uninit();
    // SAFETY: addresses of ours, or none; room for a path.
    check(unsafe { verbs::ferroce_cm_route(plain(&dst), from, path.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so it is written.
    let mut path = unsafe { path.assume_init() };
    let opened = device::named(&path.device)?;
    if !bound {
        bind(id, &local_end(&path, port(&src)))?;
    } else {
        // SAFETY: the field is the library's during calls about the id.
        unsafe { (*c).route.addr.src = local_end(&path, port(&known)) };
    }
    {
        let mut inner = id.inner();
        path.traffic_class = inner.tos;
        if let Some(timeout) = inner.ack_timeout {
            path.ack_timeout = timeout;
        }
        inner.path = Some(path);
    }
    // SAFETY: as above.
    unsafe { (*c).route.addr.dst = dst };
    show_device(id, &path, opened);
    Ok(())
}

/// Raises the event of `rdma_resolve_addr`, at once if it is known who takes the packets of the id's path.
fn ask_for_neighbour(id: &IdObject, timeout_ms: u32) -> Call<()> {
    /// No two waits of the process have the same.
    static COOKIE: AtomicU64 = AtomicU64::new(0);
    let cookie = COOKIE.fetch_add(1, Ordering::Relaxed);
    let path = {
        let mut inner = id.inner();
        inner.routed = false;
        inner.path.ok_or_else(|| Refusal::invalid("the id has no path"))?
    };
    id.begin_asking(cookie);
    // SAFETY: a path of ours; the function lives as long as the library, which is never unloaded.
    match unsafe { verbs::ferroce_cm_neighbour(&raw const path, timeout_ms, neighbour_told, cookie) } {
        libc::EINPROGRESS => Ok(()),
        errno => {
            id.stop_asking();
            check(errno)?;
            id.raise(event::ADDR_RESOLVED, 0);
            Ok(())
        }
    }
}

/// Called by libibverbs, from a thread of its own, for an id that may be gone meanwhile.
extern "C" fn neighbour_told(cookie: u64, errno: c_int) {
    enter("rdma_resolve_addr\0", || {
        let Some(counted) = id::done_asking(cookie) else { return Ok(()) };
        let object = counted.id();
        if errno == 0 {
            object.raise(event::ADDR_RESOLVED, 0);
        } else {
            object.inner().path = None;
            object.raise(event::ADDR_ERROR, -errno);
        }
        counted.release();
        Ok(())
    });
}

rdma! {
    /// `rdma_bind_addr(3)`.
    fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        let addr = copy(addr)?;
        if is_unspecified(&addr) {
            bind(object, &addr)?;
            return Ok(0);
        }
        let mut path = MaybeUninit::<ferroce_cm_path>::uninit();
        // SAFETY: an address of ours; room for a path.
        check(unsafe { verbs::ferroce_cm_locate(plain(&addr), path.as_mut_ptr()) })?;
        // SAFETY: the call succeeded, so it is written.
        let path = unsafe { path.assume_init() };
        let opened = device::named(&path.device)?;
        bind(object, &addr)?;
        show_device(object, &path, opened);
        Ok(0)
    }

    /// `rdma_resolve_addr(3)`: asks the kernel's routing table, and then who is there, for which alone there may be something to wait
    /// for. Times are those of Linux's: a negative one is endless.
    fn rdma_resolve_addr(id: *mut rdma_cm_id, src: *mut sockaddr, dst: *mut sockaddr, timeout_ms: c_int) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        if object.inner().asking.is_some() {
            return Err(Refusal::invalid("the id's address is being resolved; wait for RDMA_CM_EVENT_ADDR_RESOLVED"));
        }
        resolve(object, src, dst)?;
        ask_for_neighbour(object, timeout_ms as u32)?;
        object.complete()
    }

    /// `rdma_resolve_route(3)`: RoCE has no subnet administrator that knew more than the address says.
    fn rdma_resolve_route(id: *mut rdma_cm_id, _timeout_ms: c_int) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        show_route(object)?;
        object.inner().routed = true;
        object.raise(event::ROUTE_RESOLVED, 0);
        object.complete()
    }

    /// `rdma_get_src_port(3)`: in the order of the network.
    fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
        // SAFETY: by the contract of the function.
        Ok(port(unsafe { &(*IdObject::of(id)?.as_ptr()).route.addr.src }))
    }

    /// `rdma_get_dst_port(3)`: in the order of the network.
    fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
        // SAFETY: by the contract of the function.
        Ok(port(unsafe { &(*IdObject::of(id)?.as_ptr()).route.addr.dst }))
    }

    /// `rdma_set_option(3)`.
    fn rdma_set_option(id: *mut rdma_cm_id, level: c_int, option: c_int, value: *mut c_void, len: usize) -> c_int {
        const LEVEL_ID: c_int = 0;
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        let is_int = matches!(option, 1 | 2);
        if level != LEVEL_ID || !(0..=3).contains(&option) {
            return Err(Refusal::new(
                libc::EOPNOTSUPP,
                format!("option {option} of level {level}: only those of RDMA_OPTION_ID are available (RoCE has no path records to set)"),
            ));
        }
        // SAFETY: as above.
        unsafe { given(value.cast::<u8>(), "the option's value") }?;
        if len != if is_int { 4 } else { 1 } {
            return Err(Refusal::invalid(format!("the option's value has {len} bytes")));
        }
        let number = if is_int {
            // SAFETY: not NULL, and four bytes long; alignment is not relied on.
            unsafe { value.cast::<c_int>().read_unaligned() }
        } else {
            // SAFETY: not NULL, and a byte long.
            c_int::from(unsafe { value.cast::<u8>().read() })
        };
        let mut inner = object.inner();
        match option {
            0 => {
                inner.tos = number as u8;
                if let Some(path) = &mut inner.path {
                    path.traffic_class = number as u8;
                }
            }
            1 => inner.reuse = number != 0,
            2 => inner.v6_only = number != 0,
            _ => {
                if number > 31 {
                    return Err(Refusal::invalid(format!("ACK timeout {number} is more than 31")));
                }
                inner.ack_timeout = Some(number as u8);
                if let Some(path) = &mut inner.path {
                    path.ack_timeout = number as u8;
                }
            }
        }
        Ok(0)
    }
}
