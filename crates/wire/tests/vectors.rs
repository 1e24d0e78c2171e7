//! Every recorded frame: it parses as its text says, prints, emits to the same bytes, and its ICRC verifies, with and without
//! knowledge of the IPv4 Identification.

use std::collections::BTreeSet;
use std::fs;

use ferroce_testkit::{Args, Datagram, Fate, Frame, IcrcNote, Recording, read_pcap};
use ferroce_wire::icrc::{ID_TO_BTH, icrc_over, solve_identification, verify};
use ferroce_wire::{Headers, ICRC_LEN, NetHeader, Opcode, ParseError, UDP_PORT};

/// Frames that do not parse, all made by the wire to see what rxe does with them: recording, number, error.
const UNPARSABLE: &[(&str, usize, ParseError)] = &[
    ("rc-bth-fields", 11, ParseError::Version { tver: 1 }),
    ("rc-nak-length", 67, ParseError::Pad { pad: 3, rest: 0 }),
];

fn net(datagram: &Datagram) -> NetHeader {
    NetHeader {
        src: datagram.src,
        dst: datagram.dst,
        src_port: datagram.src_port,
        tclass: datagram.tclass,
        hop_limit: datagram.hop_limit,
        udp_len: datagram.payload.len() as u16,
        ifindex: 0,
    }
}

/// Cuts the ICRC off.
fn split_icrc(datagram: &Datagram) -> (&[u8], u32) {
    let (packet, icrc) = datagram.payload.split_last_chunk::<ICRC_LEN>().expect("a RoCE packet has an ICRC");
    (packet, u32::from_le_bytes(*icrc))
}

/// How rxe 6.12 sums a FLUSH: BTH to RETH twice, the second time unmasked.
fn rxe_flush_icrc(net: &NetHeader, identification: u16, packet: &[u8]) -> u32 {
    ferroce_wire::icrc::update(icrc_over(net, identification, packet), packet)
}

#[derive(Default)]
struct Seen {
    frames: usize,
    right: usize,
    wrong: usize,
    flush_quirk: usize,
    unparsable: usize,
    opcodes: BTreeSet<u8>,
}

#[test]
fn all_recordings() {
    let mut seen = Seen::default();
    for recording in Recording::all().unwrap() {
        for frame in &recording.frames {
            let place = format!("{}, frame {}", recording.name, frame.number);
            check_icrc(&place, frame, &mut seen);
            check_headers(&place, &recording.name, frame, &mut seen);
            seen.frames += 1;
        }
    }
    assert_eq!(seen.frames, 2079);
    assert_eq!((seen.right, seen.wrong, seen.flush_quirk), (2066, 2, 11));
    assert_eq!(seen.unparsable, UNPARSABLE.len());
    // The recordings have every opcode we know, XRC aside.
    let unseen: Vec<&str> = (0..=255)
        .map(Opcode)
        .filter(|opcode| opcode.layout().is_some() && opcode.0 < 0xa0 && !seen.opcodes.contains(&opcode.0))
        .filter_map(Opcode::name)
        .collect();
    assert_eq!(unseen, [""; 0]);
}

fn check_icrc(place: &str, frame: &Frame, seen: &mut Seen) {
    let net = net(&frame.datagram);
    let (packet, received) = split_icrc(&frame.datagram);
    assert_eq!(frame.datagram.dst_port, UDP_PORT, "{place}");
    assert!(frame.datagram.dont_fragment, "{place}");
    let identification = frame.datagram.identification.unwrap_or(0);
    let computed = icrc_over(&net, identification, packet);
    match frame.icrc {
        IcrcNote::Right => {
            assert_eq!(computed, received, "{place}");
            assert_eq!(verify(&net, packet, received), Some(identification), "{place}");
            if net.src.is_ipv4() {
                let difference = icrc_over(&net, 0, packet) ^ received;
                let found = solve_identification(difference, ID_TO_BTH + packet.len());
                assert_eq!(found, Some(identification), "{place}");
            }
            seen.right += 1;
        }
        IcrcNote::Wrong => {
            assert_ne!(computed, received, "{place}");
            assert_eq!(verify(&net, packet, received), None, "{place}");
            assert!(matches!(frame.fates[0], Fate::Altered(_)), "{place}");
            seen.wrong += 1;
        }
        IcrcNote::FlushQuirk => {
            assert_ne!(computed, received, "{place}");
            assert_eq!(verify(&net, packet, received), None, "{place}");
            assert_eq!(rxe_flush_icrc(&net, identification, packet), received, "{place}");
            assert_eq!(packet[0], Opcode::RC_FLUSH.0, "{place}");
            seen.flush_quirk += 1;
        }
    }
}

fn check_headers(place: &str, name: &str, frame: &Frame, seen: &mut Seen) {
    let (packet, _) = split_icrc(&frame.datagram);
    seen.opcodes.insert(packet[0]);
    if let Some((.., error)) = UNPARSABLE.iter().find(|(n, number, _)| (*n, *number) == (name, frame.number)) {
        assert_eq!(Headers::parse(packet), Err(*error), "{place}");
        seen.unparsable += 1;
        return;
    }
    let (headers, payload) = Headers::parse(packet).unwrap_or_else(|error| panic!("{place}: {error}"));
    let mut emitted = packet.to_vec();
    emitted[..headers.len()].fill(0xee);
    headers.emit(&mut emitted[..headers.len()]);
    assert_eq!(emitted, packet, "{place}: {headers}");
    assert!(headers.matches_opcode(), "{place}");
    assert_eq!((payload.start, payload.end + usize::from(headers.bth.pad)), (headers.len(), packet.len()), "{place}");
    assert!(headers.to_string().starts_with(&headers.bth.opcode.to_string()), "{place}");
    check_against_text(place, frame, &headers, payload.len());
}

/// The texts were decoded by another program.
fn check_against_text(place: &str, frame: &Frame, headers: &Headers, payload: usize) {
    let says = frame.says();
    let number = |name: &str| says.number(name);
    let is = |name: &str, ours: u64| assert_eq!(number(name), Some(ours), "{place}: {name} of {headers}");
    let (_, opcode) = frame.decoded[0].split_once("(0x").unwrap();
    assert_eq!(u8::from_str_radix(&opcode[..2], 16), Ok(headers.bth.opcode.0), "{place}");
    let bth = &headers.bth;
    is("psn", bth.psn.get().into());
    is("ackreq", bth.ack_req.into());
    is("dqp", bth.dest_qp.into());
    is("se", bth.solicited.into());
    is("mig", bth.mig_req.into());
    is("pad", bth.pad.into());
    is("tver", bth.tver.into());
    is("pkey", bth.pkey.into());
    is("rsvd7", bth.resv7.into());
    is("fecn/becn", u64::from(bth.fecn) << 7 | u64::from(bth.becn) << 6 | u64::from(bth.resv6));
    assert_eq!(number("id"), frame.datagram.identification.map(u64::from), "{place}");

    let address =
        headers.reth.map(|reth| (reth.va, reth.rkey)).or(headers.atomic.map(|atomic| (atomic.va, atomic.rkey)));
    assert_eq!(number("va").zip(number("rkey")), address.map(|(va, rkey)| (va, rkey.into())), "{place}");
    if let Some(reth) = headers.reth {
        is("len", reth.len.into());
    }
    if let Some(atomic) = headers.atomic {
        is("swap/add", atomic.swap_add);
        is("cmp", atomic.compare);
    }
    assert_eq!(number("msn"), headers.aeth.map(|aeth| aeth.msn.into()), "{place}");
    if let Some(aeth) = headers.aeth {
        let syndrome = frame.decoded.iter().find_map(|line| line.strip_prefix("AETH 0x")).unwrap();
        assert_eq!(u8::from_str_radix(&syndrome[..2], 16), Ok(aeth.syndrome.0), "{place}");
    }
    if let Some(feth) = headers.feth {
        let text = frame.decoded.iter().find(|line| line.starts_with("FETH")).unwrap();
        let expected = format!("FETH {:#010x}(type={} level={})", feth.0, feth.placement(), feth.selectivity());
        assert!(text.starts_with(&expected), "{place}: {text}");
    }
    assert_eq!(number("orig"), headers.atomic_ack, "{place}");
    assert_eq!(number("imm"), headers.imm.map(u64::from), "{place}");
    if let Some(deth) = headers.deth {
        is("qkey", deth.qkey.into());
        is("sqp", deth.src_qp.into());
    }
    if let Some(rkey) = headers.ieth {
        let text = frame.decoded.iter().find(|line| line.starts_with("IETH")).unwrap();
        assert_eq!(Args::parse(text).number("rkey"), Some(rkey.into()), "{place}: {text}");
    }
    // `extra` where the opcode has no payload; nothing where there is none and the opcode has none.
    assert_eq!(number("payload").or(number("extra")).unwrap_or(0), payload as u64, "{place}");
}

/// Connection management by rxe 6.12: MADs of QP1 and the data of the tools that ran over it.
#[test]
fn connection_management() {
    let file = fs::read(Recording::folder().join("cm/cm-golden-rxe-6.12.pcap")).unwrap();
    let mut seen = 0;
    for (index, record) in read_pcap(&file).unwrap().iter().enumerate() {
        let Some(datagram) = Datagram::from_ethernet(&record.frame).unwrap() else { continue };
        assert_eq!(datagram.dst_port, UDP_PORT);
        let net = net(&datagram);
        let (packet, received) = split_icrc(&datagram);
        assert_eq!(verify(&net, packet, received), datagram.identification, "record {}", index + 1);
        let (headers, _) = Headers::parse(packet).unwrap();
        let mut emitted = packet.to_vec();
        headers.emit(&mut emitted[..headers.len()]);
        assert_eq!(emitted, packet, "{headers}");
        seen += 1;
    }
    assert_eq!(seen, 135);
}
