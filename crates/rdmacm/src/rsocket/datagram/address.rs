//! Addresses of C, and those of Rust.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

use crate::addr;
use crate::entry::{Call, Refusal};

/// As C has it.
pub(super) fn storage(from: SocketAddr) -> sockaddr_storage {
    // SAFETY: integers, for which zero is a value.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    match from {
        SocketAddr::V4(from) => {
            let sin = sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: from.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(from.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: a storage has room for, and the alignment of, any address.
            unsafe { (&raw mut storage).cast::<sockaddr_in>().write(sin) };
        }
        SocketAddr::V6(from) => {
            let sin6 = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: from.port().to_be(),
                sin6_flowinfo: from.flowinfo().to_be(),
                sin6_addr: libc::in6_addr { s6_addr: from.ip().octets() },
                sin6_scope_id: from.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<sockaddr_in6>().write(sin6) };
        }
    }
    storage
}

/// Bytes of such an address.
pub(super) fn length(of: SocketAddr) -> socklen_t {
    (if of.is_ipv4() { size_of::<sockaddr_in>() } else { size_of::<sockaddr_in6>() }) as socklen_t
}

/// As Rust has it; None: neither of IPv4 nor of IPv6.
pub(super) fn from_storage(storage: &sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: an address of this family; a storage is aligned for all of them.
            let sin = unsafe { *addr::plain(storage).cast::<sockaddr_in>() };
            let ip = Ipv4Addr::from(sin.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddrV4::new(ip, u16::from_be(sin.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let sin6 = unsafe { *addr::plain(storage).cast::<sockaddr_in6>() };
            let (ip, port) = (Ipv6Addr::from(sin6.sin6_addr.s6_addr), u16::from_be(sin6.sin6_port));
            Some(SocketAddrV6::new(ip, port, u32::from_be(sin6.sin6_flowinfo), sin6.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// An address of the program.
pub(super) fn given(pointer: *const sockaddr, len: socklen_t) -> Call<SocketAddr> {
    let storage = super::super::connect::address(pointer, len)?;
    from_storage(&storage).ok_or_else(|| Refusal::told(libc::EAFNOSUPPORT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive() {
        let v6 = SocketAddrV6::new("fe80::1".parse().unwrap(), 7174, 0x12345, 3);
        for address in ["10.1.2.3:7174".parse().unwrap(), SocketAddr::from(v6)] {
            let storage = storage(address);
            assert_eq!(from_storage(&storage), Some(address));
            assert_eq!(given(addr::plain(&storage), length(address)).ok(), Some(address));
            assert!(given(addr::plain(&storage), length(address) - 1).is_err());
        }
    }
}
