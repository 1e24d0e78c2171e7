//! Datagram sockets, over UD queue pairs.
//!
//! Such a socket has a UDP port, and a queue pair for each local address that it sends from or is reached at. Who knows the peer's queue
//! pair number sends UD datagrams that begin with a [`DataHeader`], which says from which UDP address they come. Who does not sends an
//! [`Introduction`] with the data to the peer's UDP port; the peer answers it with one of its own, without data.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// Bytes of a datagram with either header: more fit into no receive buffer.
pub const DATAGRAM_MAX: usize = 2048;

/// Bytes of the longest header of either kind.
pub const DATAGRAM_HEADER_MAX: usize = 28;

const TAG: [u8; 4] = [0x55; 4];
const V4: u8 = 4;
const V6: u8 = 6;

/// A header as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderBytes {
    bytes: [u8; DATAGRAM_HEADER_MAX],
    len: usize,
}

impl HeaderBytes {
    fn new(len: usize) -> HeaderBytes {
        HeaderBytes { bytes: [0; DATAGRAM_HEADER_MAX], len }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// What a UD datagram begins with: version, length of the header, port, and for IPv4 the address, for IPv6 flow information and address;
/// in the order of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHeader {
    /// The sender's UDP address. Nobody vouches for it.
    pub src: SocketAddr,
}

impl DataHeader {
    const LEN_V4: usize = 8;
    const LEN_V6: usize = 24;

    /// As bytes.
    pub fn to_bytes(&self) -> HeaderBytes {
        let mut header = HeaderBytes::new(if self.src.is_ipv4() { Self::LEN_V4 } else { Self::LEN_V6 });
        let bytes = &mut header.bytes;
        bytes[1] = header.len as u8;
        bytes[2..4].copy_from_slice(&self.src.port().to_be_bytes());
        match self.src {
            SocketAddr::V4(src) => {
                bytes[0] = V4;
                bytes[4..8].copy_from_slice(&src.ip().octets());
            }
            SocketAddr::V6(src) => {
                bytes[0] = V6;
                bytes[4..8].copy_from_slice(&src.flowinfo().to_be_bytes());
                bytes[8..24].copy_from_slice(&src.ip().octets());
            }
        }
        header
    }

    /// Header and data of a datagram; None: it is not one.
    pub fn parse(datagram: &[u8]) -> Option<(DataHeader, &[u8])> {
        let (version, len) = (*datagram.first()?, usize::from(*datagram.get(1)?));
        let (header, data) = datagram.split_at_checked(len)?;
        let src = match (version, len) {
            (V4, Self::LEN_V4) => SocketAddr::new(ipv4(&header[4..]).into(), port(header)),
            (V6, Self::LEN_V6) => {
                let flow = u32::from_be_bytes(array(&header[4..]));
                SocketAddrV6::new(ipv6(&header[8..]), port(header), flow, 0).into()
            }
            _ => return None,
        };
        Some((DataHeader { src }, data))
    }
}

/// What an [`Introduction`] is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Data follows, and an answer is wanted.
    Data,
    /// It is an answer.
    Answer,
}

/// What a datagram over UDP begins with: tag, version, purpose, length of the header, a reserved byte, queue pair number (32 bits), address;
/// in the order of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Introduction {
    /// What it is for.
    pub purpose: Purpose,
    /// The sender's queue pair.
    pub qpn: u32,
    /// Its address.
    pub addr: IpAddr,
}

impl Introduction {
    const LEN_V4: usize = 16;
    const LEN_V6: usize = 28;
    const DATA: u8 = 0;
    const ANSWER: u8 = 7;
    const QPN_MAX: u32 = 0xff_ffff;

    /// As bytes.
    pub fn to_bytes(&self) -> HeaderBytes {
        let mut header = HeaderBytes::new(if self.addr.is_ipv4() { Self::LEN_V4 } else { Self::LEN_V6 });
        let bytes = &mut header.bytes;
        bytes[..4].copy_from_slice(&TAG);
        bytes[5] = match self.purpose {
            Purpose::Data => Self::DATA,
            Purpose::Answer => Self::ANSWER,
        };
        bytes[6] = header.len as u8;
        bytes[8..12].copy_from_slice(&(self.qpn & Self::QPN_MAX).to_be_bytes());
        match self.addr {
            IpAddr::V4(addr) => {
                bytes[4] = V4;
                bytes[12..16].copy_from_slice(&addr.octets());
            }
            IpAddr::V6(addr) => {
                bytes[4] = V6;
                bytes[12..28].copy_from_slice(&addr.octets());
            }
        }
        header
    }

    /// Header and data of a datagram; None: it is not one.
    pub fn parse(datagram: &[u8]) -> Option<(Introduction, &[u8])> {
        let (version, len) = (*datagram.get(4)?, usize::from(*datagram.get(6)?));
        let (header, data) = datagram.split_at_checked(len)?;
        let addr = match (version, len) {
            _ if header.get(..4) != Some(&TAG[..]) => return None,
            (V4, Self::LEN_V4) => ipv4(&header[12..]).into(),
            (V6, Self::LEN_V6) => ipv6(&header[12..]).into(),
            _ => return None,
        };
        let purpose = match header[5] {
            Self::DATA => Purpose::Data,
            Self::ANSWER => Purpose::Answer,
            _ => return None,
        };
        let qpn = u32::from_be_bytes(array(&header[8..])) & Self::QPN_MAX;
        Some((Introduction { purpose, qpn, addr }, data))
    }
}

fn port(header: &[u8]) -> u16 {
    u16::from_be_bytes(array(&header[2..]))
}

fn ipv4(bytes: &[u8]) -> Ipv4Addr {
    Ipv4Addr::from(array(bytes))
}

fn ipv6(bytes: &[u8]) -> Ipv6Addr {
    Ipv6Addr::from(array(bytes))
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes[..N].try_into().expect("the length was checked")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn headers_look_as_rdma_core_writes_them() {
        let v4 = DataHeader { src: "10.1.2.3:7174".parse().unwrap() };
        assert_eq!(v4.to_bytes().as_slice(), [4, 8, 0x1c, 0x06, 10, 1, 2, 3]);
        let v6 = DataHeader { src: SocketAddrV6::new("fd00::9".parse().unwrap(), 1, 5, 0).into() };
        let mut expected = vec![6, 24, 0, 1, 0, 0, 0, 5, 0xfd];
        expected.extend([0; 14]);
        expected.push(9);
        assert_eq!(v6.to_bytes().as_slice(), expected);
        let hello = Introduction { purpose: Purpose::Data, qpn: 0x01_0203, addr: "10.1.2.3".parse().unwrap() };
        let bytes = [0x55, 0x55, 0x55, 0x55, 4, 0, 16, 0, 0, 1, 2, 3, 10, 1, 2, 3];
        assert_eq!(hello.to_bytes().as_slice(), bytes);
        let answer = Introduction { purpose: Purpose::Answer, qpn: 7, addr: "fd00::9".parse().unwrap() };
        assert_eq!(answer.to_bytes().as_slice()[..12], [0x55, 0x55, 0x55, 0x55, 6, 7, 28, 0, 0, 0, 0, 7]);
    }

    #[test]
    fn what_is_cut_or_of_another_kind_is_nothing() {
        let hello = Introduction { purpose: Purpose::Data, qpn: 9, addr: "10.1.2.3".parse().unwrap() }.to_bytes();
        let data = DataHeader { src: "10.1.2.3:7174".parse().unwrap() }.to_bytes();
        for len in 0..hello.as_slice().len() {
            assert_eq!(Introduction::parse(&hello.as_slice()[..len]), None, "{len}");
        }
        for len in 0..data.as_slice().len() {
            assert_eq!(DataHeader::parse(&data.as_slice()[..len]), None, "{len}");
        }
        for (at, value) in [(0, 0x54), (4, 6), (4, 5), (5, 1), (6, 15), (6, 0), (6, 255)] {
            let mut bytes = hello.as_slice().to_vec();
            bytes[at] = value;
            assert_eq!(Introduction::parse(&bytes), None, "byte {at} is {value}");
        }
    }

    proptest! {
        #[test]
        fn headers_survive(ip: IpAddr, port: u16, qpn in 0..=0xff_ffffu32, is_data: bool, rest in proptest::collection::vec(any::<u8>(), 0..40)) {
            let header = DataHeader { src: SocketAddr::new(ip, port) };
            let bytes = [header.to_bytes().as_slice(), &rest].concat();
            prop_assert_eq!(DataHeader::parse(&bytes), Some((header, &rest[..])));
            let purpose = if is_data { Purpose::Data } else { Purpose::Answer };
            let hello = Introduction { purpose, qpn, addr: ip };
            let bytes = [hello.to_bytes().as_slice(), &rest].concat();
            prop_assert_eq!(Introduction::parse(&bytes), Some((hello, &rest[..])));
        }

        #[test]
        fn any_bytes_are_a_header_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some((_, data)) = DataHeader::parse(&bytes) {
                prop_assert!(bytes.ends_with(data));
            }
            if let Some((hello, _)) = Introduction::parse(&bytes) {
                prop_assert!(hello.qpn <= 0xff_ffff);
            }
        }
    }
}
