//! What must hold for any bytes. The fuzz targets call these functions, and so does the replay of their corpora.

use std::fs::File;
use std::net::IpAddr;
use std::os::unix::fs::FileExt;

use ferroce_link::LinkStats;
use ferroce_link::ring::{Arrival, Lost, PACKET_MAX, Ring};
use ferroce_link::udp::ingest;
use ferroce_service::protocol::{self, Envelope, RelayHeader, Reply, Request, RingCall};
use ferroce_transport::{MAX_LENT_BYTES, MAX_LENT_PACKETS};
use ferroce_wire::icrc::{self, Pseudo};
use ferroce_wire::{BTH_LEN, ICRC_LEN, NetHeader};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::machine::{KIND_COUNT, Machine};
use crate::source::{Bytes, Source};

/// A program's operations and an attacker's packets on one queue pair, as the bytes say.
///
/// # Panics
/// What must hold does not.
pub fn transport_packets(bytes: &[u8]) {
    let mut source = Bytes::new(bytes);
    let mut machine = Machine::new(source.below(KIND_COUNT), Vec::new());
    while !source.is_empty() {
        machine.step(&mut source);
    }
}

/// A datagram for [`ingest`]: one byte of choices, two with the size of its segments, then the datagram itself.
///
/// # Panics
/// What must hold does not.
pub fn link_ingest(bytes: &[u8]) {
    let Some(([choices, s0, s1], datagram)) = bytes.split_first_chunk() else { return };
    let v6 = choices & 1 != 0;
    let segment = if choices & 2 != 0 { 0 } else { usize::from(u16::from_be_bytes([*s0, *s1])) };
    let address = |last: u8| if v6 { IpAddr::from([last; 16]) } else { IpAddr::from([10, 0, 0, last]) };
    let net = NetHeader {
        src: address(1),
        dst: address(2),
        src_port: 50_000,
        tclass: 0,
        hop_limit: 64,
        udp_len: 0,
        ifindex: 0,
    };
    let mut datagram = datagram.to_vec();
    if choices & 4 != 0 {
        let size = if segment == 0 { datagram.len().max(1) } else { segment };
        let identification = |index: u16| index.wrapping_mul(u16::from(choices >> 3));
        for (index, packet) in (0..).zip(datagram.chunks_mut(size)) {
            sum(&net, identification(index), packet);
        }
    }
    let (mut stats, mut delivered) = (LinkStats::default(), 0);
    ingest(&net, segment, &datagram, &mut stats, &mut |net, headers, payload| {
        delivered += 1;
        assert!(headers.matches_opcode(), "{headers:?}");
        let parts = headers.len() + payload.len() + usize::from(headers.bth.pad) + ICRC_LEN;
        assert_eq!(parts, usize::from(net.udp_len), "a packet is the sum of its parts: {headers:?}");
    });
    let bad = stats.rx_too_short + stats.rx_icrc_errors + stats.rx_bad_version + stats.rx_bad_pad;
    assert_eq!(delivered + bad, stats.rx_packets, "every packet is counted once: {stats:?}");
    assert_eq!(stats.rx_bytes, datagram.len() as u64);
    assert_eq!(stats.rx_datagrams, 1);
}

/// Memory of a ring as another process left it: the head, base and tail (8 bytes each, little-endian) that it wrote, then what it
/// wrote to the data of its direction.
///
/// # Panics
/// What must hold does not.
pub fn ring(bytes: &[u8]) {
    /// Where they are: see `ferroce_link::ring`.
    const HEAD: u64 = 128;
    const BASE: u64 = 136;
    const TAIL_OF_OURS: u64 = 640;
    const DATA: u64 = 4096;
    const ROUNDS_MAX: usize = 600_000 / 16;

    let Some((words, data)) = bytes.split_first_chunk::<24>() else { return };
    let (theirs, fd) = Ring::offer().expect("a ring");
    let mut ours = Ring::accept(&fd).expect("it was just made");
    let memory = File::from(fd);
    let write = |at: u64, bytes: &[u8]| memory.write_all_at(bytes, at).expect("it can be written");
    write(DATA, &data[..data.len().min(512 << 10)]);
    write(BASE, &words[8..16]);
    write(TAIL_OF_OURS, &words[16..]);
    write(HEAD, &words[..8]);
    let (mut stats, mut scratch) = (LinkStats::default(), Box::new([0; PACKET_MAX]));
    let (mut delivered, mut taken, mut rounds) = (0, 0, 0);
    loop {
        let packets = ours.recv(10_000, &mut scratch, &mut stats, &mut |arrival| match arrival {
            Arrival::Packet(headers, payload) => {
                delivered += 1;
                assert!(headers.matches_opcode(), "{headers:?}");
                assert!(headers.len() + payload.len() + usize::from(headers.bth.pad) <= PACKET_MAX, "{headers:?}");
            }
            Arrival::Loan(loan) => {
                delivered += u64::from(loan.packets());
                assert!(loan.bytes() <= MAX_LENT_BYTES && loan.packets() <= MAX_LENT_PACKETS, "{loan:?}");
                assert!((0..loan.packets()).all(|index| loan.headers(index).matches_opcode()), "{loan:?}");
                let nothing = loan.read(&mut [0; 4096], &mut |_, _| panic!("nobody may lend"));
                assert_eq!(nothing, Err(Lost));
            }
        });
        taken += packets as u64;
        if ours.is_empty() {
            break;
        }
        rounds += 1;
        assert!(rounds < ROUNDS_MAX, "a ring holds only so much");
    }
    assert_eq!(stats.ring_broken, u64::from(ours.is_broken()));
    if !ours.is_broken() {
        assert_eq!((delivered + stats.ring_rx_bad, stats.ring_rx_packets), (taken, taken), "{stats:?}");
    }
    drop(theirs);
}

/// Gives a packet its right ICRC, if it has room for one.
fn sum(net: &NetHeader, identification: u16, packet: &mut [u8]) {
    let len = packet.len();
    let Some((body, trailer)) = packet.split_last_chunk_mut::<ICRC_LEN>().filter(|(body, _)| body.len() >= BTH_LEN)
    else {
        return;
    };
    let state = Pseudo::new(net.src, net.dst, net.src_port).state(len as u16, identification);
    *trailer = icrc::finish(icrc::body(state, body));
}

/// A message between program and service, or one of the relay.
///
/// # Panics
/// What must hold does not.
pub fn service_protocol(bytes: &[u8]) {
    message::<Request>(bytes);
    message::<Reply>(bytes);
    if let Some((header, packet)) = RelayHeader::decode(bytes) {
        let again = [&header.encode()[..], packet].concat();
        assert_eq!(RelayHeader::decode(&again), Some((header, packet)));
    }
    if let Some(call) = RingCall::decode(bytes) {
        assert_eq!(RingCall::decode(&call.encode()), Some(call));
    }
}

/// What decodes, encodes to something that decodes to the same; what does not, is told why.
fn message<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    match protocol::decode::<T>(bytes) {
        Ok(Envelope { id, body }) => {
            let again = protocol::encode(id, &body);
            assert_eq!(protocol::decode::<T>(&again), Ok(Envelope { id, body }));
        }
        Err(what) => assert!(!what.is_empty()),
    }
}
