//! What IP and UDP say about a packet.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes of the GRH area in front of a UD receive.
pub const GRH_LEN: usize = 40;

/// IP protocol number of UDP.
pub(crate) const PROTOCOL_UDP: u8 = 17;

/// Flags and fragment offset of every packet we send: do not fragment.
pub(crate) const DONT_FRAGMENT: u16 = 0x4000;

/// Bytes of a UDP header.
pub(crate) const UDP_HEADER_LEN: u16 = 8;

/// Bytes of an IPv4 header without options.
pub(crate) const IPV4_HEADER_LEN: u16 = 20;

/// IP and UDP facts of a received packet, as far as the receiver knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetHeader {
    /// IP source.
    pub src: IpAddr,
    /// IP destination.
    pub dst: IpAddr,
    /// UDP source port.
    pub src_port: u16,
    /// TOS or traffic class (0 if unknown).
    pub tclass: u8,
    /// TTL or hop limit (64 if unknown).
    pub hop_limit: u8,
    /// UDP payload bytes: BTH to ICRC.
    pub udp_len: u16,
    /// The interface it came in by (0 if unknown). Multicast groups belong to one.
    pub ifindex: u32,
}

impl NetHeader {
    /// The 40 bytes in front of a UD receive (IBA annex A17.4.5.2): the IPv6 header, or 20 zero bytes and the IPv4 header.
    ///
    /// What a UDP socket does not tell (flow label, Identification) is zero; the IPv4 checksum is right for that.
    pub fn grh(&self) -> [u8; GRH_LEN] {
        let udp = self.udp_len.saturating_add(UDP_HEADER_LEN);
        let mut grh = [0; GRH_LEN];
        match addresses(self.src, self.dst) {
            Addresses::V4(src, dst) => {
                let header = &mut grh[20..];
                header[0] = 0x45;
                header[1] = self.tclass;
                header[2..4].copy_from_slice(&udp.saturating_add(IPV4_HEADER_LEN).to_be_bytes());
                header[6..8].copy_from_slice(&DONT_FRAGMENT.to_be_bytes());
                header[8] = self.hop_limit;
                header[9] = PROTOCOL_UDP;
                header[12..16].copy_from_slice(&src.octets());
                header[16..20].copy_from_slice(&dst.octets());
                let checksum = internet_checksum(header);
                header[10..12].copy_from_slice(&checksum.to_be_bytes());
            }
            Addresses::V6(src, dst) => {
                let first = 6 << 28 | u32::from(self.tclass) << 20;
                grh[..4].copy_from_slice(&first.to_be_bytes());
                grh[4..6].copy_from_slice(&udp.to_be_bytes());
                grh[6] = PROTOCOL_UDP;
                grh[7] = self.hop_limit;
                grh[8..24].copy_from_slice(&src.octets());
                grh[24..40].copy_from_slice(&dst.octets());
            }
        }
        grh
    }
}

/// Source and destination in one family.
pub(crate) enum Addresses {
    V4(Ipv4Addr, Ipv4Addr),
    V6(Ipv6Addr, Ipv6Addr),
}

/// A packet has one family; if the caller's two differ, the IPv4 one is meant as IPv4-mapped.
pub(crate) fn addresses(src: IpAddr, dst: IpAddr) -> Addresses {
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => Addresses::V4(src, dst),
        (IpAddr::V6(src), IpAddr::V6(dst)) => Addresses::V6(src, dst),
        (IpAddr::V4(src), IpAddr::V6(dst)) => Addresses::V6(src.to_ipv6_mapped(), dst),
        (IpAddr::V6(src), IpAddr::V4(dst)) => Addresses::V6(src, dst.to_ipv6_mapped()),
    }
}

/// RFC 1071, over a header of even length whose checksum field is zero.
fn internet_checksum(header: &[u8]) -> u16 {
    let mut sum: u32 = header.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
