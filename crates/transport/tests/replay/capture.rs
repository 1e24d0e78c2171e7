//! The frames of a recording as the replay needs them: parsed, with who sent them and whom they reached.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ferroce_testkit::{End, Fate, Frame, Pair, Recording};
use ferroce_wire::{Headers, ICRC_LEN, NetHeader, Opcode, Psn, icrc};

/// A recorded frame.
pub(crate) struct Heard<'a> {
    /// As it was recorded.
    pub(crate) frame: &'a Frame,
    /// IP and UDP facts.
    pub(crate) net: NetHeader,
    /// Headers and payload; `None` for bytes that are no packet.
    pub(crate) packet: Option<(Headers, &'a [u8])>,
    /// It passes our ICRC check: what does not never reaches a queue pair.
    pub(crate) icrc_right: bool,
}

impl<'a> Heard<'a> {
    fn new(frame: &'a Frame) -> Heard<'a> {
        let datagram = &frame.datagram;
        let net = NetHeader {
            src: datagram.src,
            dst: datagram.dst,
            src_port: datagram.src_port,
            tclass: datagram.tclass,
            hop_limit: datagram.hop_limit,
            udp_len: datagram.payload.len() as u16,
            ifindex: 0,
        };
        let (packet, sum) = datagram.payload.split_last_chunk::<ICRC_LEN>().expect("a RoCE packet has an ICRC");
        let icrc_right = icrc::verify(&net, packet, u32::from_le_bytes(*sum)).is_some();
        let packet = Headers::parse(packet).ok().map(|(headers, payload)| (headers, &packet[payload]));
        Heard { frame, net, packet, icrc_right }
    }

    /// The frames of a recording, in order.
    pub(crate) fn all(recording: &'a Recording) -> Vec<Heard<'a>> {
        recording.frames.iter().map(Heard::new).collect()
    }

    /// The packet, if `end` itself sent this frame: not what the wire made up or copied.
    pub(crate) fn sent_by(&self, end: End) -> Option<&Headers> {
        let (headers, _) = self.packet.as_ref()?;
        let made = |fate: &Fate| matches!(fate, Fate::Duplicated | Fate::Injected(_));
        (machine(self.net.src) == Some(end) && !self.frame.fates.iter().any(made)).then_some(headers)
    }

    /// The packet, if it came to `end` in one piece.
    pub(crate) fn received_by(&self, end: End) -> Option<(&Headers, &'a [u8])> {
        let (headers, payload) = self.packet.as_ref()?;
        let arrived = machine(self.net.dst) == Some(end) && self.frame.arrived() && self.icrc_right;
        arrived.then_some((headers, *payload))
    }

    /// Whether it belongs to the dialogue of a pair, sent by `end` of it.
    pub(crate) fn belongs_to(&self, pair: &Pair, end: End) -> bool {
        self.packet.as_ref().is_some_and(|(headers, _)| {
            headers.bth.dest_qp == pair.qpn[end.peer() as usize]
                && headers.deth.is_none_or(|deth| deth.src_qp == pair.qpn[end as usize])
        })
    }

    /// The wire changed payload bytes.
    pub(crate) fn payload_altered(&self) -> bool {
        self.frame.fates.iter().any(|fate| matches!(fate, Fate::Altered(what) if what.starts_with("PAYLOAD")))
    }

    /// It was sent earlier than its place tells.
    pub(crate) fn is_delayed(&self) -> bool {
        self.frame.fates.contains(&Fate::Delayed)
    }
}

/// Which machine has this address.
pub(crate) fn machine(addr: IpAddr) -> Option<End> {
    [End::A, End::B].into_iter().find(|end| addresses(*end).contains(&addr))
}

/// The addresses of a machine: IPv4, IPv6, link-local.
fn addresses(end: End) -> [IpAddr; 3] {
    let host = 1 + end as u16;
    [
        Ipv4Addr::new(10, 88, 0, host as u8).into(),
        Ipv6Addr::new(0xfd00, 0x88, 0, 0, 0, 0, 0, host).into(),
        Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0x00ff, 0xfe88, host).into(),
    ]
}

/// The address that a machine used in a recording.
pub(crate) fn address(end: End, heard: &[Heard<'_>]) -> IpAddr {
    let used = addresses(end).into_iter().find(|addr| heard.iter().any(|heard| heard.net.src == *addr));
    used.unwrap_or(addresses(end)[0])
}

/// Whether a packet is for the responder of the other end.
pub(crate) fn is_request(headers: &Headers) -> bool {
    !headers.bth.opcode.is_response() && headers.bth.opcode != Opcode::CNP
}

/// Is `psn` one of the `count` numbers from `first` on?
pub(crate) fn in_range(psn: Psn, first: Psn, count: u32) -> bool {
    let index = psn.diff(first);
    index >= 0 && (index as u32) < count
}
