//! Trains as the transport makes them, and a pair of links over loopback to send them through.
#![allow(dead_code, unreachable_pub)] // every test file uses its own part

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ferroce_link::{Link, LinkStats, UdpLink, UdpOptions};
use ferroce_transport::{PathAddr, Payload, Side, Span, Train};
use ferroce_wire::{Aeth, Bth, Headers, NetHeader, Opcode, Psn, Reth, Syndrome};

pub const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

/// Kinds of messages that differ in their headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Send,
    SendImm,
    Write,
    WriteImm,
    ReadResponse,
}

pub const KINDS: [Kind; 5] = [Kind::Send, Kind::SendImm, Kind::Write, Kind::WriteImm, Kind::ReadResponse];

/// A train of one message with all its headers final.
pub fn train(kind: Kind, dest_qp: u32, psn: u32, mtu: u32, len: u32, payload: Payload) -> Train {
    let packets = len.div_ceil(mtu).max(1);
    let pad = (4 - (len % 4) as u8) % 4;
    let (only, first, middle, last) = match kind {
        Kind::Send => (Opcode::RC_SEND_ONLY, Opcode::RC_SEND_FIRST, Opcode::RC_SEND_MIDDLE, Opcode::RC_SEND_LAST),
        Kind::SendImm => {
            (Opcode::RC_SEND_ONLY_IMM, Opcode::RC_SEND_FIRST, Opcode::RC_SEND_MIDDLE, Opcode::RC_SEND_LAST_IMM)
        }
        Kind::Write => (Opcode::RC_WRITE_ONLY, Opcode::RC_WRITE_FIRST, Opcode::RC_WRITE_MIDDLE, Opcode::RC_WRITE_LAST),
        Kind::WriteImm => {
            (Opcode::RC_WRITE_ONLY_IMM, Opcode::RC_WRITE_FIRST, Opcode::RC_WRITE_MIDDLE, Opcode::RC_WRITE_LAST_IMM)
        }
        Kind::ReadResponse => (
            Opcode::RC_READ_RESPONSE_ONLY,
            Opcode::RC_READ_RESPONSE_FIRST,
            Opcode::RC_READ_RESPONSE_MIDDLE,
            Opcode::RC_READ_RESPONSE_LAST,
        ),
    };
    let mut head = Headers::new(Bth::new(if packets == 1 { only } else { first }, dest_qp, Psn::new(psn)));
    let mut tail = Headers::new(Bth::new(last, dest_qp, Psn::new(psn).add(packets - 1)));
    match kind {
        Kind::Write | Kind::WriteImm => head.reth = Some(Reth { va: 0x1000_2000_3000, rkey: 7, len }),
        Kind::ReadResponse => {
            let aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 77 });
            (head.aeth, tail.aeth) = (aeth, aeth);
        }
        _ => {}
    }
    let end = if packets == 1 { &mut head } else { &mut tail };
    end.bth.pad = pad;
    end.bth.ack_req = kind != Kind::ReadResponse;
    if matches!(kind, Kind::SendImm | Kind::WriteImm) {
        end.imm = Some(0xcafe_f00d);
    }
    Train {
        head,
        body: middle,
        tail: (packets > 1).then_some(tail),
        packets,
        mtu,
        len,
        payload,
        path: None,
        from: Side::Requester,
    }
}

/// An acknowledgement.
pub fn ack(dest_qp: u32, psn: u32) -> Train {
    let mut head = Headers::new(Bth::new(Opcode::RC_ACKNOWLEDGE, dest_qp, Psn::new(psn)));
    head.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: psn });
    Train {
        head,
        body: Opcode::RC_ACKNOWLEDGE,
        tail: None,
        packets: 1,
        mtu: 4096,
        len: 0,
        payload: Payload::Gather(Default::default()),
        path: None,
        from: Side::Responder,
    }
}

pub fn spans(pieces: &[&[u8]]) -> Payload {
    Payload::Gather(pieces.iter().map(|piece| span(piece)).collect())
}

pub fn span(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr() as u64, len: bytes.len() as u32 }
}

/// Bytes without a pattern that a mix-up of packets would leave the same.
pub fn pattern(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// A packet as the sink got it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Got {
    pub net: NetHeader,
    pub headers: Headers,
    pub payload: Vec<u8>,
}

/// A receiver on a loopback address and a sender to it.
pub struct Pair {
    pub tx: UdpLink,
    pub rx: UdpLink,
    pub path: PathAddr,
}

impl Pair {
    pub fn new(addr: IpAddr) -> Pair {
        Pair::with_options(addr, &UdpOptions::default())
    }

    pub fn with_options(addr: IpAddr, options: &UdpOptions) -> Pair {
        let (fd, port) = rx_socket(addr);
        let options = UdpOptions { port, ..options.clone() };
        Pair {
            tx: UdpLink::with_options(vec![], options.clone()).unwrap(),
            rx: UdpLink::with_options(vec![fd], options).unwrap(),
            path: path(addr, addr),
        }
    }

    pub fn send(&mut self, train: &Train) {
        self.tx.send(1, 17, &self.path, train).unwrap();
    }

    pub fn flush(&mut self) {
        self.tx.flush(&mut |cookie, error| panic!("train {cookie} failed: {error}"));
    }

    /// Receives until so many packets are there.
    pub fn expect(&mut self, packets: usize) -> Vec<Got> {
        receive(&mut self.rx, packets)
    }
}

pub fn rx_socket(addr: IpAddr) -> (OwnedFd, u16) {
    let socket = UdpSocket::bind((addr, 0)).unwrap();
    let port = socket.local_addr().unwrap().port();
    (socket.into(), port)
}

pub fn path(src: IpAddr, dst: IpAddr) -> PathAddr {
    PathAddr { src, dst, ifindex: 0, tclass: 0, hop_limit: 64, flow_label: 0 }
}

/// Receives until so many packets are there; panics if they do not come.
pub fn receive(link: &mut impl Link, packets: usize) -> Vec<Got> {
    let mut got = Vec::new();
    let deadline = Instant::now() + LIMIT;
    while got.len() < packets {
        let read = link.recv(64, &mut |net, headers, payload| {
            got.push(Got { net: *net, headers: *headers, payload: payload.to_vec() });
        });
        if read == 0 {
            assert!(Instant::now() < deadline, "{} of {packets} packets came: {:?}", got.len(), link.stats());
            std::thread::sleep(PAUSE);
        }
    }
    got
}

/// Waits for something that must happen.
pub fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !happened() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(PAUSE);
    }
}

/// Ends a test that fails.
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_micros(200);

/// Checks that packets are exactly a train's: opcodes, PSNs, headers, payload.
pub fn assert_is_train(got: &[Got], train: &Train, data: &[u8]) {
    assert_eq!(got.len(), train.packets as usize);
    for (i, packet) in got.iter().enumerate() {
        let mut want = if i == 0 {
            train.head
        } else if i + 1 == got.len() {
            train.tail.unwrap()
        } else {
            Headers::new(Bth { opcode: train.body, pad: 0, ack_req: false, ..train.head.bth })
        };
        want.bth.psn = train.head.bth.psn.add(i as u32);
        assert_eq!(packet.headers, want, "packet {i}");
        let start = i * train.mtu as usize;
        let end = (start + train.mtu as usize).min(data.len());
        assert_eq!(packet.payload, &data[start..end], "payload of packet {i}");
    }
}

/// All packets are accounted for: nothing was dropped on either side.
pub fn assert_clean(stats: &LinkStats) {
    let bad: Vec<_> = stats
        .iter()
        .filter(|(name, n)| {
            *n > 0
                && (name.contains("drop") || name.contains("error") || name.contains("bad") || name.contains("short"))
        })
        .collect();
    assert!(bad.is_empty(), "{bad:?}");
}
