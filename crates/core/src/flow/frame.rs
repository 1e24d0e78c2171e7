//! What rules look at in a frame. Frames are any bytes: what is cut short or not understood is not there.

use super::{ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, Ipv4Filter, Ipv6Filter, PROTO_TCP, PROTO_UDP, PortFilter};

/// EtherTypes of VLAN tags: 802.1Q and 802.1ad.
const VLAN_TPIDS: [u16; 2] = [0x8100, 0x88a8];
/// VLAN tags that are looked behind.
const VLAN_TAGS_MAX: usize = 2;
/// Extension headers of IPv6 that are looked behind.
const EXTENSIONS_MAX: usize = 8;

/// The fields of a frame.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) dst_mac: [u8; 6],
    pub(super) src_mac: [u8; 6],
    pub(super) ether_type: u16,
    pub(super) vlan_tag: Option<u16>,
    pub(super) ip: Option<Ip>,
    ports: Option<Ports>,
}

/// The ports of TCP or UDP.
#[derive(Clone, Copy, Debug)]
struct Ports {
    proto: u8,
    ports: PortFilter,
    /// Other fragments of the datagram follow, which have no ports.
    is_fragment: bool,
}

/// The IP header.
#[derive(Debug)]
pub(super) enum Ip {
    V4(Ipv4Filter),
    V6(Ipv6Filter),
}

impl Frame {
    /// None: it is shorter than an Ethernet header.
    pub(super) fn parse(bytes: &[u8]) -> Option<Frame> {
        let (dst_mac, rest) = bytes.split_first_chunk()?;
        let (src_mac, rest) = rest.split_first_chunk()?;
        let (mut ether_type, mut rest) = number(rest)?;
        let mut vlan_tag = None;
        for _ in 0..VLAN_TAGS_MAX {
            let is_tag = VLAN_TPIDS.contains(&ether_type);
            let Some((tag, (inner, behind))) =
                number(rest).filter(|_| is_tag).and_then(|(tag, rest)| Some((tag, number(rest)?)))
            else {
                break;
            };
            (vlan_tag, ether_type, rest) = (Some(tag), inner, behind);
        }
        let (ip, ports) = match ether_type {
            ETHER_TYPE_IPV4 => ipv4(rest).unzip(),
            ETHER_TYPE_IPV6 => ipv6(rest).unzip(),
            _ => (None, None),
        };
        let (dst_mac, src_mac) = (*dst_mac, *src_mac);
        Some(Frame { dst_mac, src_mac, ether_type, vlan_tag, ip, ports: ports.flatten() })
    }

    /// The ports, if it is of this protocol.
    pub(super) fn ports_of(&self, proto: u8) -> Option<PortFilter> {
        self.ports.filter(|known| known.proto == proto).map(|known| known.ports)
    }

    /// The same, unless it is a part of a datagram only: what goes by the ports shall not tear datagrams apart.
    pub(super) fn ports_of_whole(&self, proto: u8) -> Option<PortFilter> {
        self.ports_of(proto).filter(|_| self.ports.is_some_and(|known| !known.is_fragment))
    }
}

/// A big-endian number, and what is behind it.
fn number(bytes: &[u8]) -> Option<(u16, &[u8])> {
    bytes.split_first_chunk().map(|(number, rest)| (u16::from_be_bytes(*number), rest))
}

type Parsed = (Ip, Option<Ports>);

fn ipv4(bytes: &[u8]) -> Option<Parsed> {
    let (header, _) = bytes.split_first_chunk::<20>()?;
    let header_len = usize::from(header[0] & 0xf) * 4;
    if header[0] >> 4 != 4 || header_len < header.len() {
        return None;
    }
    let fragment = u16::from_be_bytes([header[6], header[7]]);
    let (dont_fragment, more) = (fragment & 0x4000 != 0, fragment & 0x2000 != 0);
    let proto = header[9];
    let ip = Ipv4Filter {
        src: [header[12], header[13], header[14], header[15]],
        dst: [header[16], header[17], header[18], header[19]],
        proto,
        tos: header[1],
        ttl: header[8],
        flags: u8::from(dont_fragment) << 1 | u8::from(more) << 2,
    };
    let is_first = fragment & 0x1fff == 0;
    let ports = bytes.get(header_len..).filter(|_| is_first).and_then(|payload| ports(proto, payload, more));
    Some((Ip::V4(ip), ports))
}

fn ipv6(bytes: &[u8]) -> Option<Parsed> {
    let (header, payload) = bytes.split_first_chunk::<40>()?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let first = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
    let (mut src, mut dst) = ([0; 16], [0; 16]);
    src.copy_from_slice(&header[8..24]);
    dst.copy_from_slice(&header[24..]);
    let ip = Ipv6Filter {
        src,
        dst,
        flow_label: first & 0xf_ffff,
        next_hdr: header[6],
        traffic_class: (first >> 20) as u8,
        hop_limit: header[7],
    };
    let ports = behind_extensions(ip.next_hdr, payload)
        .and_then(|(proto, payload, is_fragment)| ports(proto, payload, is_fragment));
    Some((Ip::V6(ip), ports))
}

/// Protocol and payload behind the extension headers (RFC 8200), and whether other fragments follow. None: it is a later fragment, or cut
/// short.
fn behind_extensions(first: u8, payload: &[u8]) -> Option<(u8, &[u8], bool)> {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const FRAGMENT: u8 = 44;
    const DESTINATION: u8 = 60;
    const OFFSET: u16 = 0xfff8;
    const MORE: u16 = 1;
    let (mut next, mut rest, mut is_fragment) = (first, payload, false);
    for _ in 0..EXTENSIONS_MAX {
        let len = match next {
            HOP_BY_HOP | ROUTING | DESTINATION => 8 + usize::from(*rest.get(1)?) * 8,
            FRAGMENT => {
                let fragment = u16::from_be_bytes([*rest.get(2)?, *rest.get(3)?]);
                if fragment & OFFSET != 0 {
                    return None;
                }
                is_fragment |= fragment & MORE != 0;
                8
            }
            _ => return Some((next, rest, is_fragment)),
        };
        (next, rest) = (rest[0], rest.get(len..)?);
    }
    None
}

fn ports(proto: u8, payload: &[u8], is_fragment: bool) -> Option<Ports> {
    let (src, rest) = number(payload).filter(|_| matches!(proto, PROTO_TCP | PROTO_UDP))?;
    let (dst, _) = number(rest)?;
    Some(Ports { proto, ports: PortFilter { dst, src }, is_fragment })
}
