//! The way to an address: what `rdma_resolve_addr` and `rdma_resolve_route` find out. The program asks its own kernel; the service
//! is not needed for it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::protocol::Path;
use crate::ServiceError;
use crate::devices::{self, DeviceInfo, ListOptions};

/// Bytes of headers in front of and behind the payload: GRH, UDP, BTH, XRCETH, AtomicETH, ICRC. RDMA-CM of the kernel counts the
/// same, and so never asks for more than the active MTU of the device.
const HEADER_ROOM: u32 = 40 + 8 + 12 + 4 + 28 + 4;

/// Code of the local ACK timeout: 4.096 us * 2^17 is 0.54 s. Kernels have the same over RoCE.
const ACK_TIMEOUT: u8 = 17;

/// The way to an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// For [`CmRequest::Connect`](super::protocol::CmRequest::Connect).
    pub path: Path,
    /// The device that has the path's local address.
    pub device: DeviceInfo,
    /// Index of the path's local address in the device's GID table.
    pub gid_index: usize,
}

/// Finds the device, the source address and the path to `dst`; the source is chosen by the routing table unless it is given.
///
/// EADDRNOTAVAIL: the source is no address of this host. ENETUNREACH and the like: there is no route, as the kernel says. ENODEV:
/// the source is an address of this host, but of no RDMA device.
pub fn resolve(dst: SocketAddr, src: Option<SocketAddr>) -> Result<Route, ServiceError> {
    let local = source_for(dst, src)?;
    let devices = devices::list(ListOptions { loopback: true })?;
    let (device, gid_index) = device_of(devices, local).ok_or_else(|| {
        let what = format!(
            "the way to {} begins at {local}, which belongs to no RDMA device: its interface is down or has no usable address",
            dst.ip()
        );
        ServiceError::new(libc::ENODEV, what)
    })?;
    let path = Path {
        local,
        remote: dst.ip().to_canonical(),
        ifindex: scope(dst),
        mtu: mtu_code(device.mtu),
        ack_timeout: ACK_TIMEOUT,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
    };
    Ok(Route { path, device, gid_index })
}

/// The device that has an address, and the first index of it in the device's GID table.
pub fn device_of(devices: Vec<DeviceInfo>, local: IpAddr) -> Option<(DeviceInfo, usize)> {
    devices.into_iter().find_map(|device| {
        let index = device.gids.iter().position(|gid| gid.addr == local)?;
        Some((device, index))
    })
}

/// The source address that the kernel takes for packets to `dst`: a UDP socket that is connected there has it.
fn source_for(dst: SocketAddr, src: Option<SocketAddr>) -> Result<IpAddr, ServiceError> {
    let dst = canonical(dst);
    let from = match (src.map(canonical), dst) {
        (Some(src), _) if !src.ip().is_unspecified() => with_port(src, 0),
        (_, SocketAddr::V4(_)) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        (_, SocketAddr::V6(_)) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    if from.is_ipv4() != dst.is_ipv4() {
        let what = format!("the source {} and the destination {} are of different families", from.ip(), dst.ip());
        return Err(ServiceError::new(libc::EAFNOSUPPORT, what));
    }
    let failed = |what: String, error: io::Error| {
        ServiceError::new(error.raw_os_error().unwrap_or(libc::EIO), format!("{what}: {error}"))
    };
    let socket =
        bound_socket(from).map_err(|error| failed(format!("the source {} cannot be used", from.ip()), error))?;
    // Nothing is sent; the port does not matter.
    socket.connect(with_port(dst, 9)).map_err(|error| failed(format!("no route to {}", dst.ip()), error))?;
    let local = socket.local_addr().map_err(|error| failed(format!("no source address for {}", dst.ip()), error))?;
    Ok(local.ip().to_canonical())
}

/// A UDP socket bound to an address, made past the C library: its `socket` may be replaced by a preloaded library (librdmacm's, by one
/// that makes rsockets, which ask for the way in turn).
///
/// # Errors
/// Those of socket(2) and bind(2).
pub fn bound_socket(addr: SocketAddr) -> io::Result<UdpSocket> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&socket, &addr)?;
    Ok(socket.into())
}

/// IPv4-mapped addresses are IPv4 addresses.
fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr.ip().to_canonical() {
        IpAddr::V4(v4) => SocketAddr::from((v4, addr.port())),
        IpAddr::V6(_) => addr,
    }
}

fn with_port(mut addr: SocketAddr, port: u16) -> SocketAddr {
    addr.set_port(port);
    addr
}

/// The interface of a link-local address.
fn scope(addr: SocketAddr) -> u32 {
    match addr {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => SocketAddrV6::scope_id(&v6),
        _ => 0,
    }
}

/// The largest path MTU that an interface carries, as a code: 1 is 256 bytes, 5 is 4096.
fn mtu_code(mtu: u32) -> u8 {
    (2..=5).rev().find(|code| (128 << code) + HEADER_ROOM <= mtu).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_codes() {
        let codes = [65_536, 9_000, 4_191, 1_500, 576, 100].map(mtu_code);
        assert_eq!(codes, [5, 5, 4, 3, 1, 1]);
        assert_eq!([4_192, 4_191, 608, 607].map(mtu_code), [5, 4, 2, 1]);
    }

    #[test]
    fn to_loopback() {
        let dst = SocketAddr::from((Ipv4Addr::LOCALHOST, 7_174));
        let route = resolve(dst, None).unwrap();
        assert_eq!((route.path.local, route.path.remote), (dst.ip(), dst.ip()));
        assert!(route.device.loopback);
        assert_eq!(route.device.gids[route.gid_index].addr, dst.ip());
        let mapped = SocketAddr::from((Ipv4Addr::LOCALHOST.to_ipv6_mapped(), 7_174));
        assert_eq!(resolve(mapped, None).unwrap(), route);
        assert_eq!(resolve(dst, Some(dst)).unwrap(), route);
    }

    #[test]
    fn no_way() {
        let dst = SocketAddr::from((Ipv4Addr::LOCALHOST, 7_174));
        let foreign = SocketAddr::from(([203, 0, 113, 1], 0));
        assert_eq!(resolve(dst, Some(foreign)).unwrap_err().errno(), libc::EADDRNOTAVAIL);
        let other = SocketAddr::from((Ipv6Addr::LOCALHOST, 0));
        assert_eq!(resolve(dst, Some(other)).unwrap_err().errno(), libc::EAFNOSUPPORT);
        // Class E: no kernel has a route there.
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        assert!(resolve(SocketAddr::from(([255, 255, 255, 255], 1)), Some(nowhere)).is_err());
    }

    #[test]
    fn an_address_of_no_device() {
        assert_eq!(device_of(Vec::new(), IpAddr::V4(Ipv4Addr::LOCALHOST)), None);
    }
}
