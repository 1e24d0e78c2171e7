//! What RDMA-CM puts into service ids and private data (IBA annex A11), and GIDs of RoCEv2.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::fields::{Data, Field};
use crate::net::{Addresses, addresses};

/// A port's address; of RoCEv2 an IPv6 address or an IPv4-mapped one.
pub type Gid = [u8; 16];

/// The GID of an address.
pub const fn gid_of(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address of a GID.
pub fn address_of(gid: Gid) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(gid)).to_canonical()
}

/// `enum rdma_port_space`: each has its own ports, which have nothing to do with those of TCP and UDP sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum PortSpace {
    /// IP over InfiniBand: datagrams with the Q_Key of its multicast group.
    Ipoib = 0x0002,
    /// Connections.
    Tcp = 0x0106,
    /// Datagrams.
    Udp = 0x0111,
    /// Connections or datagrams.
    Ib = 0x013f,
}

impl PortSpace {
    /// All of them.
    pub const ALL: [PortSpace; 4] = [PortSpace::Ipoib, PortSpace::Tcp, PortSpace::Udp, PortSpace::Ib];

    /// The port space with that number.
    pub fn from_number(number: u16) -> Option<PortSpace> {
        PortSpace::ALL.into_iter().find(|space| *space as u16 == number)
    }
}

/// Names what a REQ or SIDR_REQ wants to reach. Open: any number is one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceId(pub u64);

impl ServiceId {
    /// The service id of a port.
    pub const fn new(space: PortSpace, port: u16) -> ServiceId {
        ServiceId((space as u64) << 16 | port as u64)
    }

    /// Port space and port, if RDMA-CM made it.
    pub fn port(self) -> Option<(PortSpace, u16)> {
        let space = u16::try_from(self.0 >> 16).ok().and_then(PortSpace::from_number)?;
        Some((space, self.0 as u16))
    }
}

impl core::fmt::Debug for ServiceId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{self}")
    }
}

impl core::fmt::Display for ServiceId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.port() {
            Some((space, port)) => write!(f, "{space:?} port {port}"),
            None => write!(f, "{:#018x}", self.0),
        }
    }
}

impl Field for ServiceId {
    fn read(data: &Data, at: usize, width: usize) -> ServiceId {
        ServiceId(Field::read(data, at, width))
    }

    fn write(&self, data: &mut Data, at: usize, width: usize) {
        self.0.write(data, at, width);
    }
}

/// Bytes of an [`IpHeader`].
pub const IP_HEADER_LEN: usize = 36;

/// The first 36 bytes of private data in a REQ or SIDR_REQ of RDMA-CM: who connects, and to which address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct IpHeader {
    pub src_port: u16,
    pub src: IpAddr,
    pub dst: IpAddr,
}

/// Why private data does not begin with an [`IpHeader`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IpHeaderError {
    /// Fewer than 36 bytes.
    #[error("{len} bytes are too short for an IP header of 36")]
    TooShort {
        /// Bytes found.
        len: usize,
    },
    /// A version other than 0.
    #[error("unknown version {version:#04x} of the IP header")]
    Version {
        /// The version found.
        version: u8,
    },
    /// Neither IPv4 nor IPv6.
    #[error("IP version {version} is neither 4 nor 6")]
    IpVersion {
        /// The version found.
        version: u8,
    },
}

impl IpHeader {
    /// Reads the beginning of private data.
    pub fn parse(private_data: &[u8]) -> Result<IpHeader, IpHeaderError> {
        let Some((header, _)) = private_data.split_first_chunk::<IP_HEADER_LEN>() else {
            return Err(IpHeaderError::TooShort { len: private_data.len() });
        };
        let &[version, ip_version, p0, p1, ref addresses @ ..] = header;
        if version != 0 {
            return Err(IpHeaderError::Version { version });
        }
        let (mut src, mut dst) = ([0; 16], [0; 16]);
        src.copy_from_slice(&addresses[..16]);
        dst.copy_from_slice(&addresses[16..]);
        let v4 = |[.., a, b, c, d]: [u8; 16]| IpAddr::V4(Ipv4Addr::new(a, b, c, d));
        let v6 = |octets: [u8; 16]| IpAddr::V6(Ipv6Addr::from(octets));
        let (src, dst) = match ip_version >> 4 {
            4 => (v4(src), v4(dst)),
            6 => (v6(src), v6(dst)),
            version => return Err(IpHeaderError::IpVersion { version }),
        };
        Ok(IpHeader { src_port: u16::from_be_bytes([p0, p1]), src, dst })
    }

    /// The bytes on the wire. If the families of the two addresses differ, the IPv4 one becomes IPv4-mapped.
    pub fn emit(&self) -> [u8; IP_HEADER_LEN] {
        let mut bytes = [0; IP_HEADER_LEN];
        bytes[2..4].copy_from_slice(&self.src_port.to_be_bytes());
        match addresses(self.src, self.dst) {
            Addresses::V4(src, dst) => {
                bytes[1] = 4 << 4;
                bytes[16..20].copy_from_slice(&src.octets());
                bytes[32..36].copy_from_slice(&dst.octets());
            }
            Addresses::V6(src, dst) => {
                bytes[1] = 6 << 4;
                bytes[4..20].copy_from_slice(&src.octets());
                bytes[20..36].copy_from_slice(&dst.octets());
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_ids() {
        let rping = ServiceId::new(PortSpace::Tcp, 7174);
        assert_eq!(rping, ServiceId(0x0106_1c06));
        assert_eq!(rping.port(), Some((PortSpace::Tcp, 7174)));
        assert_eq!(ServiceId(0x0107_1c06).port(), None);
        assert_eq!(ServiceId(0x1_0106_1c06).port(), None);
        assert_eq!(ServiceId::new(PortSpace::Ib, 0xffff).port(), Some((PortSpace::Ib, 0xffff)));
    }

    #[test]
    fn bad_ip_headers() {
        let good = IpHeader { src_port: 9, src: Ipv4Addr::LOCALHOST.into(), dst: Ipv4Addr::new(10, 0, 0, 1).into() };
        let bytes = good.emit();
        assert_eq!(IpHeader::parse(&bytes), Ok(good));
        assert_eq!(IpHeader::parse(&bytes[..35]), Err(IpHeaderError::TooShort { len: 35 }));
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes;
            bytes[at] = byte;
            IpHeader::parse(&bytes)
        };
        assert_eq!(with(0, 1), Err(IpHeaderError::Version { version: 1 }));
        assert_eq!(with(1, 0x50), Err(IpHeaderError::IpVersion { version: 5 }));
    }

    #[test]
    fn gids() {
        let v4 = IpAddr::V4(Ipv4Addr::new(10, 88, 0, 2));
        assert_eq!(gid_of(v4), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 88, 0, 2]);
        assert_eq!(address_of(gid_of(v4)), v4);
        let v6 = IpAddr::V6(Ipv6Addr::LOCALHOST);
        assert_eq!(address_of(gid_of(v6)), v6);
    }
}
