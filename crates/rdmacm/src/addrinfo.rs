//! `rdma_getaddrinfo`: names to addresses.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use libc::{addrinfo, sockaddr};

use crate::abi::{
    PS_IB, PS_IPOIB, PS_TCP, PS_UDP, QPT_RC, QPT_UD, RAI_FAMILY, RAI_NUMERICHOST, RAI_PASSIVE, rdma_addrinfo,
};
use crate::addr;
use crate::entry::{Call, Refusal, calloc, free, put, rdma};

/// What the program wants, with what follows from it.
#[derive(Clone, Copy)]
struct Wanted {
    flags: c_int,
    family: c_int,
    qp_type: c_int,
    port_space: c_int,
    src: *const sockaddr,
    dst: *const sockaddr,
}

fn wanted(hints: *const rdma_addrinfo) -> Wanted {
    // SAFETY: NULL, or hints of the program.
    let hints = unsafe { hints.as_ref() };
    let (qp_type, port_space) = match hints.map_or((0, 0), |hints| (hints.ai_qp_type, hints.ai_port_space)) {
        (0, PS_UDP | PS_IPOIB) => (QPT_UD, hints.map_or(0, |hints| hints.ai_port_space)),
        (0, 0) => (QPT_RC, PS_TCP),
        (0, space) => (QPT_RC, space),
        (QPT_UD, 0) => (QPT_UD, PS_UDP),
        (qp_type, 0) => (qp_type, if qp_type == QPT_RC { PS_TCP } else { PS_IB }),
        both => both,
    };
    Wanted {
        flags: hints.map_or(0, |hints| hints.ai_flags),
        family: hints.map_or(libc::AF_UNSPEC, |hints| hints.ai_family),
        qp_type,
        port_space,
        src: hints.map_or(ptr::null(), |hints| hints.ai_src_addr),
        dst: hints.map_or(ptr::null(), |hints| hints.ai_dst_addr),
    }
}

/// A copy of an address in memory of the C library, and its length.
fn keep(from: *const sockaddr) -> Call<(*mut sockaddr, libc::socklen_t)> {
    let len = addr::length(from)?;
    let copy = calloc::<u8>(len)?;
    // SAFETY: `len` bytes at both ends: an address of its family, and fresh memory.
    unsafe { ptr::copy_nonoverlapping(from.cast::<u8>(), copy, len) };
    Ok((copy.cast(), len as libc::socklen_t))
}

fn keep_name(name: *const c_char) -> *mut c_char {
    // SAFETY: NULL, or a string of the C library; `free` fits.
    if name.is_null() { ptr::null_mut() } else { unsafe { libc::strdup(name) } }
}

/// One result.
fn result(wanted: &Wanted, found: *const sockaddr, canonical: *const c_char) -> Call<*mut rdma_addrinfo> {
    let info = calloc::<rdma_addrinfo>(1)?;
    // SAFETY: fresh memory, zeroed, of that type; what is not set stays NULL.
    let fill = unsafe { &mut *info };
    fill.ai_flags = wanted.flags;
    fill.ai_qp_type = wanted.qp_type;
    fill.ai_port_space = wanted.port_space;
    let addresses = if wanted.flags & RAI_PASSIVE != 0 { (found, ptr::null()) } else { (wanted.src, found) };
    let filled = (|| {
        if !addresses.0.is_null() {
            (fill.ai_src_addr, fill.ai_src_len) = keep(addresses.0)?;
        }
        if !addresses.1.is_null() {
            (fill.ai_dst_addr, fill.ai_dst_len) = keep(addresses.1)?;
        }
        let told = if found.is_null() { addresses.0 } else { found };
        if !told.is_null() {
            // SAFETY: an address.
            fill.ai_family = c_int::from(unsafe { (*told).sa_family });
        }
        Ok(())
    })();
    let name = keep_name(canonical);
    if wanted.flags & RAI_PASSIVE != 0 {
        fill.ai_src_canonname = name;
    } else {
        fill.ai_dst_canonname = name;
    }
    match filled {
        Ok(()) => Ok(info),
        Err(refusal) => {
            release(info);
            Err(refusal)
        }
    }
}

/// Frees a list.
fn release(mut info: *mut rdma_addrinfo) {
    while !info.is_null() {
        // SAFETY: made by `result`, and given up by the program.
        unsafe {
            let next = (*info).ai_next;
            free((*info).ai_src_addr);
            free((*info).ai_dst_addr);
            free((*info).ai_src_canonname);
            free((*info).ai_dst_canonname);
            free((*info).ai_route);
            free((*info).ai_connect);
            free(info);
            info = next;
        }
    }
}

/// Asks the C library; the error is its own (`EAI_*`).
fn ask(node: *const c_char, service: *const c_char, wanted: &Wanted) -> Result<*mut addrinfo, c_int> {
    // SAFETY: integers and pointers, for which zero is a value.
    let mut hints: addrinfo = unsafe { std::mem::zeroed() };
    if wanted.flags & RAI_PASSIVE != 0 {
        hints.ai_flags |= libc::AI_PASSIVE;
    }
    if wanted.flags & RAI_NUMERICHOST != 0 {
        hints.ai_flags |= libc::AI_NUMERICHOST;
    }
    if wanted.flags & RAI_FAMILY != 0 {
        hints.ai_family = wanted.family;
    }
    // One of each address: ports are the same for all kinds of sockets.
    hints.ai_socktype = if wanted.port_space == PS_TCP { libc::SOCK_STREAM } else { libc::SOCK_DGRAM };
    let mut found = ptr::null_mut();
    // SAFETY: strings of the program or NULL, hints and a place of ours.
    let error = unsafe { libc::getaddrinfo(node, service, &raw const hints, &raw mut found) };
    if error == 0 { Ok(found) } else { Err(error) }
}

/// All results, in order.
fn results(wanted: &Wanted, found: *const addrinfo) -> Call<*mut rdma_addrinfo> {
    let mut first = ptr::null_mut();
    let mut last: *mut *mut rdma_addrinfo = &raw mut first;
    let mut at = found;
    // SAFETY: the C library's list ends with NULL.
    while let Some(entry) = unsafe { at.as_ref() } {
        if matches!(entry.ai_family, libc::AF_INET | libc::AF_INET6) {
            match result(wanted, entry.ai_addr, entry.ai_canonname) {
                Ok(info) => {
                    // SAFETY: the end of the list so far.
                    unsafe {
                        *last = info;
                        last = &raw mut (*info).ai_next;
                    }
                }
                Err(refusal) => {
                    release(first);
                    return Err(refusal);
                }
            }
        }
        at = entry.ai_next;
    }
    if first.is_null() {
        Err(Refusal::new(libc::ENODATA, "the name has no address of IPv4 or IPv6"))
    } else {
        Ok(first)
    }
}

fn is_empty(text: *const c_char) -> bool {
    // SAFETY: NULL, or a string of the program.
    text.is_null() || unsafe { CStr::from_ptr(text) }.is_empty()
}

rdma! {
    /// `rdma_getaddrinfo(3)`. Gives an error of getaddrinfo(3) as that does, or -1 and errno.
    fn rdma_getaddrinfo(
        node: *const c_char,
        service: *const c_char,
        hints: *const rdma_addrinfo,
        res: *mut *mut rdma_addrinfo,
    ) -> c_int {
        let wanted = wanted(hints);
        if is_empty(node) && is_empty(service) {
            let known = if wanted.flags & RAI_PASSIVE != 0 { wanted.src } else { wanted.dst };
            // A source alone says where packets to some group leave.
            if known.is_null() && wanted.src.is_null() {
                return Err(Refusal::invalid("neither a node nor a service nor an address in the hints"));
            }
            let only = result(&wanted, known, ptr::null())?;
            // SAFETY: by the contract of the function.
            unsafe { put(res, only) }?;
            return Ok(0);
        }
        let found = match ask(node, service, &wanted) {
            Ok(found) => found,
            Err(error) => return Ok(error),
        };
        let list = results(&wanted, found);
        // SAFETY: the C library's list, of which copies were taken.
        unsafe { libc::freeaddrinfo(found) };
        // SAFETY: by the contract of the function.
        unsafe { put(res, list?) }?;
        Ok(0)
    }

    /// `rdma_freeaddrinfo(3)`.
    fn rdma_freeaddrinfo(res: *mut rdma_addrinfo) -> () {
        release(res);
        Ok(())
    }
}
