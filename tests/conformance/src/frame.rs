//! Frames made and read by hand: IPv4 or IPv6, UDP, RoCEv2 headers, payload, pad, ICRC.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ferroce_wire::{
    AtomicEth, BTH_LEN, Bth, Deth, Headers, ICRC_LEN, NetHeader, Opcode, Psn, Reth, Syndrome, UDP_PORT, icrc,
};

const V4_LEN: usize = 20;
const V6_LEN: usize = 40;
const UDP_LEN: usize = 8;
/// Protocol number, or next header.
const UDP: u8 = 17;

/// A packet to send. Fields that are not named take the values that a good packet has.
#[derive(Clone, Debug)]
pub struct Packet {
    /// BTH and extended headers.
    pub headers: Headers,
    /// Payload without pad.
    pub payload: Vec<u8>,
    /// Pad bytes in place of those that the payload needs.
    pub pad: Option<Vec<u8>>,
    /// PadCnt in place of the number of pad bytes.
    pub pad_count: Option<u8>,
    /// What the ICRC is changed by (exclusive or).
    pub icrc_flip: u32,
    /// ECN and DSCP; the traffic class.
    pub tos: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Flow label (IPv6).
    pub flow_label: u32,
    /// With a UDP checksum; without it the field is 0.
    pub udp_checksum: bool,
    /// IP source in place of the tester's.
    pub source: Option<IpAddr>,
    /// Goes over IPv6.
    pub v6: bool,
}

impl Packet {
    /// A packet with these headers, no payload.
    pub fn new(opcode: Opcode, dest_qp: u32, psn: u32) -> Packet {
        let headers = Headers::new(Bth::new(opcode, dest_qp, Psn::new(psn)));
        Packet {
            headers,
            payload: Vec::new(),
            pad: None,
            pad_count: None,
            icrc_flip: 0,
            tos: 0,
            hop_limit: 64,
            flow_label: 0,
            udp_checksum: false,
            source: None,
            v6: false,
        }
    }

    /// With another PSN.
    pub fn psn(mut self, psn: u32) -> Packet {
        self.headers.bth.psn = Psn::new(psn);
        self
    }

    /// With a payload.
    pub fn payload(mut self, bytes: &[u8]) -> Packet {
        self.payload = bytes.to_vec();
        self
    }

    /// With another AckReq.
    pub fn ack_req(mut self, ack_req: bool) -> Packet {
        self.headers.bth.ack_req = ack_req;
        self
    }

    /// With a RETH.
    pub fn reth(mut self, va: u64, rkey: u32, len: u32) -> Packet {
        self.headers.reth = Some(Reth { va, rkey, len });
        self
    }

    /// With an AtomicETH.
    pub fn atomic(mut self, va: u64, rkey: u32, swap_add: u64, compare: u64) -> Packet {
        self.headers.atomic = Some(AtomicEth { va, rkey, swap_add, compare });
        self
    }

    /// With immediate data.
    pub fn imm(mut self, imm: u32) -> Packet {
        self.headers.imm = Some(imm);
        self
    }

    /// With an IETH.
    pub fn ieth(mut self, rkey: u32) -> Packet {
        self.headers.ieth = Some(rkey);
        self
    }

    /// With a DETH.
    pub fn deth(mut self, qkey: u32, src_qp: u32) -> Packet {
        self.headers.deth = Some(Deth { qkey, src_qp });
        self
    }

    /// With an AETH.
    pub fn aeth(mut self, syndrome: Syndrome, msn: u32) -> Packet {
        self.headers.aeth = Some(ferroce_wire::Aeth { syndrome, msn });
        self
    }

    /// Without an AETH, as the MIDDLE of a READ's responses.
    pub fn no_aeth(mut self) -> Packet {
        self.headers.aeth = None;
        self
    }

    /// With changes to its BTH.
    pub fn bth(mut self, change: impl FnOnce(&mut Bth)) -> Packet {
        change(&mut self.headers.bth);
        self
    }

    /// The IP datagram, without Ethernet header.
    pub fn datagram(&self, src: IpAddr, dst: IpAddr, src_port: u16, identification: u16) -> Vec<u8> {
        let src = self.source.unwrap_or(src);
        let pad = self.pad.clone().unwrap_or_else(|| vec![0; (4 - self.payload.len() % 4) % 4]);
        let mut headers = self.headers;
        headers.bth.pad = self.pad_count.unwrap_or(pad.len() as u8);
        let mut packet = vec![0; headers.len()];
        headers.emit(&mut packet);
        packet.extend_from_slice(&self.payload);
        packet.extend_from_slice(&pad);
        let udp_len = (packet.len() + ICRC_LEN) as u16;
        let net = net(src, dst, src_port, self.tos, self.hop_limit, udp_len);
        let sum = icrc::icrc_over(&net, identification, &packet) ^ self.icrc_flip;

        let mut udp = Vec::new();
        udp.extend_from_slice(&src_port.to_be_bytes());
        udp.extend_from_slice(&UDP_PORT.to_be_bytes());
        udp.extend_from_slice(&(udp_len + UDP_LEN as u16).to_be_bytes());
        udp.extend_from_slice(&[0, 0]);
        udp.extend_from_slice(&packet);
        udp.extend_from_slice(&sum.to_le_bytes());
        if self.udp_checksum {
            let checksum = udp_checksum(src, dst, &udp);
            // A sum of zero is sent as its other form (RFC 768).
            udp[6..8].copy_from_slice(&(if checksum == 0 { 0xffff } else { checksum }).to_be_bytes());
        }
        let mut out = self.ip_header(src, dst, udp.len() as u16, identification);
        out.extend_from_slice(&udp);
        out
    }

    /// The IP header of `length` bytes of UDP.
    fn ip_header(&self, src: IpAddr, dst: IpAddr, length: u16, identification: u16) -> Vec<u8> {
        match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let mut out = vec![0x45, self.tos];
                out.extend_from_slice(&(length + V4_LEN as u16).to_be_bytes());
                out.extend_from_slice(&identification.to_be_bytes());
                out.extend_from_slice(&[0x40, 0, self.hop_limit, UDP, 0, 0]);
                out.extend_from_slice(&src.octets());
                out.extend_from_slice(&dst.octets());
                let checksum = checksum(&out);
                out[10..12].copy_from_slice(&checksum.to_be_bytes());
                out
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let first = 6 << 28 | u32::from(self.tos) << 20 | (self.flow_label & 0xf_ffff);
                let mut out = first.to_be_bytes().to_vec();
                out.extend_from_slice(&length.to_be_bytes());
                out.extend_from_slice(&[UDP, self.hop_limit]);
                out.extend_from_slice(&src.octets());
                out.extend_from_slice(&dst.octets());
                out
            }
            _ => panic!("{src} and {dst} are of two families"),
        }
    }
}

fn net(src: IpAddr, dst: IpAddr, src_port: u16, tclass: u8, hop_limit: u8, udp_len: u16) -> NetHeader {
    NetHeader { src, dst, src_port, tclass, hop_limit, udp_len, ifindex: 0 }
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Of a UDP header with its data and the pseudo header. 0 if the checksum that is in there is right.
fn udp_checksum(src: IpAddr, dst: IpAddr, udp: &[u8]) -> u16 {
    let mut bytes = pseudo_header(src, dst, udp.len());
    bytes.extend_from_slice(udp);
    checksum(&bytes)
}

/// What UDP's checksum covers besides (RFC 768, RFC 8200 8.1; the sums of the two forms agree for `length` below 2^16).
fn pseudo_header(src: IpAddr, dst: IpAddr, length: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for address in [src, dst] {
        match address {
            IpAddr::V4(address) => bytes.extend_from_slice(&address.octets()),
            IpAddr::V6(address) => bytes.extend_from_slice(&address.octets()),
        }
    }
    bytes.extend_from_slice(&(length as u32).to_be_bytes());
    bytes.extend_from_slice(&[0, 0, 0, UDP]);
    bytes
}

/// Does the UDP checksum wait for a card to complete it? Where a virtual interface does as if it were one, the field holds the sum
/// of the pseudo header.
fn is_left_to_card(ip: &Ip, field: u16) -> bool {
    field == !checksum(&pseudo_header(ip.src, ip.dst, usize::from(ip.payload)))
}

/// A packet that came.
#[derive(Clone, Debug)]
pub struct Heard {
    /// BTH and extended headers.
    pub headers: Headers,
    /// Payload without pad.
    pub payload: Vec<u8>,
    /// Pad bytes.
    pub pad: Vec<u8>,
    /// IP source.
    pub src: IpAddr,
    /// IP destination.
    pub dst: IpAddr,
    /// TTL or hop limit.
    pub hop_limit: u8,
}

/// Why a datagram is no packet that a good device sends.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Malformed {
    /// The IP or UDP header contradicts the length.
    #[error("IP and UDP lengths do not agree with the frame of {0} bytes")]
    Length(usize),
    /// IP header checksum.
    #[error("a wrong IP header checksum")]
    Checksum,
    /// UDP checksum that is neither absent nor right.
    #[error("a wrong UDP checksum")]
    UdpChecksum,
    /// ICRC.
    #[error("a wrong ICRC in {0}")]
    Icrc(String),
    /// Headers.
    #[error("{0}")]
    Headers(#[from] ferroce_wire::ParseError),
    /// Payload and pad are not words.
    #[error("{0} bytes of payload and pad, not a multiple of 4")]
    Words(usize),
}

impl Heard {
    /// Reads an IP datagram; `None`: it is not RoCEv2.
    pub fn parse(datagram: &[u8]) -> Option<Result<Heard, Malformed>> {
        let ip = Ip::parse(datagram)?;
        let udp = datagram.get(ip.len..)?;
        if udp.len() < UDP_LEN || be16(&udp[2..]) != UDP_PORT {
            return None;
        }
        Some(Heard::read(datagram.len(), &ip, udp))
    }

    fn read(frame: usize, ip: &Ip, udp: &[u8]) -> Result<Heard, Malformed> {
        let length = usize::from(be16(&udp[4..]));
        // Short frames may carry Ethernet's padding.
        if usize::from(ip.payload) != length || length < UDP_LEN + BTH_LEN + ICRC_LEN || length > udp.len() {
            return Err(Malformed::Length(frame));
        }
        if !ip.checksum_right {
            return Err(Malformed::Checksum);
        }
        let field = be16(&udp[6..]);
        if field != 0 && udp_checksum(ip.src, ip.dst, &udp[..length]) != 0 && !is_left_to_card(ip, field) {
            return Err(Malformed::UdpChecksum);
        }
        let (packet, sum) = udp[UDP_LEN..length].split_at(length - UDP_LEN - ICRC_LEN);
        let (headers, range) = Headers::parse(packet)?;
        let net = net(ip.src, ip.dst, be16(udp), ip.tclass, ip.hop_limit, (length - UDP_LEN) as u16);
        let right = icrc::icrc_over(&net, ip.identification, packet);
        if sum != right.to_le_bytes() {
            return Err(Malformed::Icrc(headers.to_string()));
        }
        let words = packet.len() - range.start;
        if !words.is_multiple_of(4) {
            return Err(Malformed::Words(words));
        }
        let (payload, pad) = (packet[range.clone()].to_vec(), packet[range.end..].to_vec());
        Ok(Heard { headers, payload, pad, src: ip.src, dst: ip.dst, hop_limit: ip.hop_limit })
    }

    /// PSN.
    pub fn psn(&self) -> u32 {
        self.headers.bth.psn.get()
    }

    /// Opcode.
    pub fn opcode(&self) -> Opcode {
        self.headers.bth.opcode
    }
}

/// What an IP header says.
struct Ip {
    /// Bytes of it.
    len: usize,
    /// Bytes behind it.
    payload: u16,
    tclass: u8,
    hop_limit: u8,
    /// 0 over IPv6, which has none.
    identification: u16,
    checksum_right: bool,
    src: IpAddr,
    dst: IpAddr,
}

impl Ip {
    /// A header without options or extensions before UDP.
    fn parse(datagram: &[u8]) -> Option<Ip> {
        match datagram.first()? >> 4 {
            4 => Ip::parse_v4(datagram.first_chunk()?),
            6 => Ip::parse_v6(datagram.first_chunk()?),
            _ => None,
        }
    }

    fn parse_v4(ip: &[u8; V4_LEN]) -> Option<Ip> {
        let address = |at: usize| IpAddr::V4(Ipv4Addr::new(ip[at], ip[at + 1], ip[at + 2], ip[at + 3]));
        (ip[0] == 0x45 && ip[9] == UDP).then(|| Ip {
            len: V4_LEN,
            payload: be16(&ip[2..]).saturating_sub(V4_LEN as u16),
            tclass: ip[1],
            hop_limit: ip[8],
            identification: be16(&ip[4..]),
            checksum_right: checksum(ip) == 0,
            src: address(12),
            dst: address(16),
        })
    }

    fn parse_v6(ip: &[u8; V6_LEN]) -> Option<Ip> {
        let address = |at: usize| {
            let octets: [u8; 16] = ip[at..at + 16].try_into().expect("sixteen bytes");
            IpAddr::V6(Ipv6Addr::from(octets))
        };
        (ip[6] == UDP).then(|| Ip {
            len: V6_LEN,
            payload: be16(&ip[4..]),
            tclass: ip[0] << 4 | ip[1] >> 4,
            hop_limit: ip[7],
            identification: 0,
            checksum_right: true,
            src: address(8),
            dst: address(24),
        })
    }
}

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

impl std::fmt::Display for Heard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.headers)?;
        if !self.payload.is_empty() {
            write!(f, " with {} bytes", self.payload.len())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const B: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
    const A6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1));
    const B6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2));

    #[test]
    fn what_is_made_can_be_read() {
        for (src, dst) in [(A, B), (A6, B6)] {
            for udp_checksum in [false, true] {
                let mut packet = Packet::new(Opcode::RC_SEND_ONLY, 0x123456, 0xfffffe).payload(b"12345");
                (packet.udp_checksum, packet.tos, packet.flow_label) = (udp_checksum, 0x62, 0xabcde);
                let heard = Heard::parse(&packet.datagram(src, dst, 0xc001, 7)).expect("is RoCEv2").expect("is good");
                assert_eq!(
                    (heard.psn(), heard.payload.as_slice(), heard.pad.as_slice()),
                    (0xfffffe, &b"12345"[..], &[0; 3][..])
                );
                assert_eq!((heard.src, heard.dst, heard.hop_limit), (src, dst, 64));
            }
        }
    }

    #[test]
    fn a_wrong_udp_checksum_is_told() {
        for (src, dst) in [(A, B), (A6, B6)] {
            let mut packet = Packet::new(Opcode::RC_SEND_ONLY, 1, 2).payload(b"1234");
            packet.udp_checksum = true;
            let mut datagram = packet.datagram(src, dst, 0xc001, 7);
            let at = datagram.len() - packet.payload.len() - BTH_LEN - ICRC_LEN - 2;
            datagram[at] ^= 1;
            let error = Heard::parse(&datagram).expect("is RoCEv2").expect_err("the checksum is wrong");
            assert_eq!(error, Malformed::UdpChecksum);
        }
    }

    #[test]
    fn a_damaged_packet_is_told() {
        let mut packet = Packet::new(Opcode::RC_SEND_ONLY, 1, 2).payload(b"1234");
        packet.icrc_flip = 1;
        let error = Heard::parse(&packet.datagram(A, B, 0xc001, 7)).expect("is RoCEv2").expect_err("the ICRC is wrong");
        assert!(matches!(error, Malformed::Icrc(_)), "{error}");
        let mut odd = Packet::new(Opcode::RC_SEND_ONLY, 1, 2).payload(b"12345");
        odd.pad = Some(Vec::new());
        let error = Heard::parse(&odd.datagram(A, B, 0xc001, 7)).expect("is RoCEv2").expect_err("has no words");
        assert_eq!(error, Malformed::Words(5));
    }
}
