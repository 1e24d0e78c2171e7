//! Frames made and read by hand: IPv4, UDP, RoCEv2 headers, payload, pad, ICRC.

use std::net::{IpAddr, Ipv4Addr};

use ferroce_wire::{
    AtomicEth, BTH_LEN, Bth, Deth, Headers, ICRC_LEN, NetHeader, Opcode, Psn, Reth, Syndrome, UDP_PORT, icrc,
};

const IP_LEN: usize = 20;
const UDP_LEN: usize = 8;

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
    /// ECN and DSCP.
    pub tos: u8,
    /// IP source in place of the tester's.
    pub source: Option<Ipv4Addr>,
}

impl Packet {
    /// A packet with these headers, no payload.
    pub fn new(opcode: Opcode, dest_qp: u32, psn: u32) -> Packet {
        let headers = Headers::new(Bth::new(opcode, dest_qp, Psn::new(psn)));
        Packet { headers, payload: Vec::new(), pad: None, pad_count: None, icrc_flip: 0, tos: 0, source: None }
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

    /// The IPv4 datagram, without Ethernet header.
    pub fn datagram(&self, src: Ipv4Addr, dst: Ipv4Addr, src_port: u16, identification: u16) -> Vec<u8> {
        let src = self.source.unwrap_or(src);
        let pad = self.pad.clone().unwrap_or_else(|| vec![0; (4 - self.payload.len() % 4) % 4]);
        let mut headers = self.headers;
        headers.bth.pad = self.pad_count.unwrap_or(pad.len() as u8);
        let mut packet = vec![0; headers.len()];
        headers.emit(&mut packet);
        packet.extend_from_slice(&self.payload);
        packet.extend_from_slice(&pad);
        let udp_len = (packet.len() + ICRC_LEN) as u16;
        let net = net(src, dst, src_port, self.tos, 64, udp_len);
        let sum = icrc::icrc_over(&net, identification, &packet) ^ self.icrc_flip;

        let mut out = vec![0x45, self.tos];
        out.extend_from_slice(&(udp_len + (IP_LEN + UDP_LEN) as u16).to_be_bytes());
        out.extend_from_slice(&identification.to_be_bytes());
        out.extend_from_slice(&[0x40, 0, 64, 17, 0, 0]);
        out.extend_from_slice(&src.octets());
        out.extend_from_slice(&dst.octets());
        let checksum = checksum(&out);
        out[10..12].copy_from_slice(&checksum.to_be_bytes());
        out.extend_from_slice(&src_port.to_be_bytes());
        out.extend_from_slice(&UDP_PORT.to_be_bytes());
        out.extend_from_slice(&(udp_len + UDP_LEN as u16).to_be_bytes());
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(&packet);
        out.extend_from_slice(&sum.to_le_bytes());
        out
    }
}

fn net(src: Ipv4Addr, dst: Ipv4Addr, src_port: u16, tclass: u8, hop_limit: u8, udp_len: u16) -> NetHeader {
    NetHeader { src: IpAddr::V4(src), dst: IpAddr::V4(dst), src_port, tclass, hop_limit, udp_len }
}

/// RFC 1071.
fn checksum(header: &[u8]) -> u16 {
    let mut sum: u32 = header.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
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
    pub src: Ipv4Addr,
    /// IP destination.
    pub dst: Ipv4Addr,
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
    /// Reads an IPv4 datagram; `None`: it is not RoCEv2.
    pub fn parse(datagram: &[u8]) -> Option<Result<Heard, Malformed>> {
        let (ip, rest) = datagram.split_first_chunk::<IP_LEN>()?;
        let (udp, rest) = rest.split_first_chunk::<UDP_LEN>()?;
        let be16 = |bytes: &[u8]| u16::from_be_bytes([bytes[0], bytes[1]]);
        if ip[0] != 0x45 || ip[9] != 17 || be16(&udp[2..]) != UDP_PORT {
            return None;
        }
        Some(Heard::read(datagram.len(), ip, udp, rest))
    }

    fn read(frame: usize, ip: &[u8; IP_LEN], udp: &[u8; UDP_LEN], rest: &[u8]) -> Result<Heard, Malformed> {
        let be16 = |bytes: &[u8]| u16::from_be_bytes([bytes[0], bytes[1]]);
        let length = usize::from(be16(&udp[4..]));
        // Short frames may carry Ethernet's padding.
        let agrees = usize::from(be16(&ip[2..])) == length + IP_LEN
            && length >= UDP_LEN + BTH_LEN + ICRC_LEN
            && length - UDP_LEN <= rest.len();
        if !agrees {
            return Err(Malformed::Length(frame));
        }
        if checksum(ip) != 0 {
            return Err(Malformed::Checksum);
        }
        let (packet, sum) = rest[..length - UDP_LEN].split_at(length - UDP_LEN - ICRC_LEN);
        let (headers, range) = Headers::parse(packet)?;
        let address = |at: usize| Ipv4Addr::new(ip[at], ip[at + 1], ip[at + 2], ip[at + 3]);
        let (src, dst) = (address(12), address(16));
        let net = net(src, dst, be16(udp), ip[1], ip[8], (length - UDP_LEN) as u16);
        let right = icrc::icrc_over(&net, be16(&ip[4..]), packet);
        if sum != right.to_le_bytes() {
            return Err(Malformed::Icrc(headers.to_string()));
        }
        let words = packet.len() - range.start;
        if !words.is_multiple_of(4) {
            return Err(Malformed::Words(words));
        }
        Ok(Heard { headers, payload: packet[range.clone()].to_vec(), pad: packet[range.end..].to_vec(), src, dst })
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

    const A: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
    const B: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

    #[test]
    fn what_is_made_can_be_read() {
        let packet = Packet::new(Opcode::RC_SEND_ONLY, 0x123456, 0xfffffe).payload(b"12345");
        let heard = Heard::parse(&packet.datagram(A, B, 0xc001, 7)).expect("is RoCEv2").expect("is good");
        assert_eq!(
            (heard.psn(), heard.payload.as_slice(), heard.pad.as_slice()),
            (0xfffffe, &b"12345"[..], &[0; 3][..])
        );
        assert_eq!((heard.src, heard.dst), (A, B));
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
