//! Ethernet, IP and UDP headers of a recorded frame.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::Malformed;

/// A UDP datagram with what its IP header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// IP source.
    pub src: IpAddr,
    /// IP destination.
    pub dst: IpAddr,
    /// TOS or traffic class.
    pub tclass: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// IPv4 Identification; `None` for IPv6.
    pub identification: Option<u16>,
    /// IPv4 Don't Fragment, and true for IPv6.
    pub dont_fragment: bool,
    /// UDP source port.
    pub src_port: u16,
    /// UDP destination port.
    pub dst_port: u16,
    /// UDP payload.
    pub payload: Vec<u8>,
}

impl Datagram {
    /// Takes a whole UDP datagram out of an Ethernet frame; `None` if the frame is something else.
    pub fn from_ethernet(frame: &[u8]) -> Result<Option<Datagram>, Malformed> {
        let bad = |what| Malformed::new("frame", what);
        let (ethernet, packet) =
            frame.split_first_chunk::<14>().ok_or_else(|| bad("shorter than an Ethernet header"))?;
        let datagram = match (ethernet[12], ethernet[13]) {
            (0x08, 0x00) => {
                let (header, _) = packet.split_first_chunk::<20>().ok_or_else(|| bad("shorter than an IPv4 header"))?;
                if header[9] != UDP {
                    return Ok(None);
                }
                if header[0] != 0x45 || be16(header, 6) & 0x3fff != 0 {
                    return Err(bad("IPv4 options or fragments"));
                }
                if ones_complement_sum(header) != 0xffff {
                    return Err(bad("wrong IPv4 header checksum"));
                }
                let body =
                    packet.get(20..be16(header, 2).into()).ok_or_else(|| bad("IPv4 total length does not fit"))?;
                let blank = Datagram {
                    src: Ipv4Addr::from(octets::<4>(header, 12)).into(),
                    dst: Ipv4Addr::from(octets::<4>(header, 16)).into(),
                    tclass: header[1],
                    hop_limit: header[8],
                    identification: Some(be16(header, 4)),
                    dont_fragment: header[6] & 0x40 != 0,
                    src_port: 0,
                    dst_port: 0,
                    payload: Vec::new(),
                };
                (blank, body)
            }
            (0x86, 0xdd) => {
                let (header, _) = packet.split_first_chunk::<40>().ok_or_else(|| bad("shorter than an IPv6 header"))?;
                if header[6] != UDP {
                    return Ok(None);
                }
                let body = packet[40..]
                    .get(..be16(header, 4).into())
                    .ok_or_else(|| bad("IPv6 payload length does not fit"))?;
                let blank = Datagram {
                    src: Ipv6Addr::from(octets::<16>(header, 8)).into(),
                    dst: Ipv6Addr::from(octets::<16>(header, 24)).into(),
                    tclass: header[0] << 4 | header[1] >> 4,
                    hop_limit: header[7],
                    identification: None,
                    dont_fragment: true,
                    src_port: 0,
                    dst_port: 0,
                    payload: Vec::new(),
                };
                (blank, body)
            }
            _ => return Ok(None),
        };
        let (blank, body) = datagram;
        let (udp, payload) = body.split_first_chunk::<8>().ok_or_else(|| bad("shorter than a UDP header"))?;
        if usize::from(be16(udp, 4)) != body.len() {
            return Err(bad("the UDP length contradicts the IP length"));
        }
        Ok(Some(Datagram { src_port: be16(udp, 0), dst_port: be16(udp, 2), payload: payload.to_vec(), ..blank }))
    }
}

const UDP: u8 = 17;

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn octets<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut octets = [0; N];
    octets.copy_from_slice(&bytes[at..at + N]);
    octets
}

fn ones_complement_sum(header: &[u8]) -> u32 {
    let sum: u32 = header.chunks(2).map(|pair| u32::from(be16(pair, 0))).sum();
    (sum & 0xffff) + (sum >> 16)
}
