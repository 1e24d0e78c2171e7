//! Parsing and emitting headers, opcode by opcode.

mod common;

use ferroce_wire::{
    Aeth, BTH_LEN, Bth, CNP_RESERVED_LEN, Class, Direction, Ext, Headers, MAX_HEADER_LEN, Opcode, Operation,
    ParseError, Position, Psn, Reth, Syndrome,
};
use proptest::prelude::*;

fn emitted(headers: &Headers) -> Vec<u8> {
    let mut bytes = vec![0xee; headers.len()];
    headers.emit(&mut bytes);
    bytes
}

/// A packet with the given opcode, zero fields and `rest` bytes behind the BTH.
fn packet(opcode: Opcode, pad: u8, rest: usize) -> Vec<u8> {
    let mut bytes = Bth { pad, ..Bth::new(opcode, 1, Psn::new(2)) }.bytes().to_vec();
    bytes.resize(BTH_LEN + rest, 0);
    bytes
}

fn all_opcodes() -> impl Iterator<Item = Opcode> {
    (0..=255).map(Opcode)
}

proptest! {
    #[test]
    fn what_was_emitted_parses_back(headers in common::headers(), payload in proptest::collection::vec(any::<u8>(), 0..64)) {
        prop_assert!(headers.matches_opcode());
        prop_assert!(headers.len() <= MAX_HEADER_LEN);
        let mut bytes = emitted(&headers);
        bytes.extend(&payload);
        let parsed = Headers::parse(&bytes);
        match payload.len().checked_sub(headers.bth.pad.into()) {
            Some(len) => prop_assert_eq!(parsed, Ok((headers, headers.len()..headers.len() + len))),
            None => prop_assert_eq!(parsed, Err(ParseError::Pad { pad: headers.bth.pad, rest: payload.len() })),
        }
    }

    #[test]
    fn any_truncation_is_an_error_that_names_the_header(headers in common::headers(), cut in any::<proptest::sample::Index>()) {
        let bytes = emitted(&Headers { bth: Bth { pad: 0, ..headers.bth }, ..headers });
        let cut = cut.index(bytes.len());
        match Headers::parse(&bytes[..cut]) {
            Err(ParseError::TooShort { len }) => prop_assert!(len == cut && cut < BTH_LEN),
            Err(ParseError::Truncated { opcode, header, have, need }) => {
                prop_assert_eq!(opcode, headers.bth.opcode);
                prop_assert!(have < need && BTH_LEN + have <= cut);
                prop_assert!(!header.is_empty());
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }
}

#[test]
fn every_field_has_its_place() {
    let bth = Bth {
        opcode: Opcode::RC_WRITE_ONLY_IMM,
        solicited: true,
        mig_req: false,
        pad: 2,
        tver: 0,
        pkey: 0x1234,
        fecn: true,
        becn: false,
        resv6: 0x21,
        dest_qp: 0xabcdef,
        ack_req: true,
        resv7: 0x55,
        psn: Psn::new(0x987654),
    };
    let reth = Reth { va: 0x1122_3344_5566_7788, rkey: 0x99aa_bbcc, len: 0xddee_ff00 };
    let headers = Headers { reth: Some(reth), imm: Some(0x0102_0304), ..Headers::new(bth) };
    let expected = [
        0x0b, 0xa0, 0x12, 0x34, 0xa1, 0xab, 0xcd, 0xef, 0xd5, 0x98, 0x76, 0x54, // BTH
        0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff, 0x00, // RETH
        0x01, 0x02, 0x03, 0x04, // immediate
    ];
    assert_eq!(emitted(&headers), expected);
}

#[test]
fn emitting_cuts_numbers_to_their_width() {
    let bth = Bth {
        pad: 0xff,
        tver: 0xf0,
        resv6: 0xff,
        resv7: 0xff,
        dest_qp: u32::MAX,
        ..Bth::new(Opcode::RC_ACKNOWLEDGE, 0, Psn::new(0))
    };
    let headers = Headers { aeth: Some(Aeth { syndrome: Syndrome::ACK, msn: u32::MAX }), ..Headers::new(bth) };
    assert_eq!(
        emitted(&headers),
        [0x11, 0x70, 0xff, 0xff, 0x3f, 0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0x1f, 0xff, 0xff, 0xff]
    );
}

#[test]
fn errors_say_what_is_wrong() {
    let error = |bytes: &[u8]| Headers::parse(bytes).unwrap_err().to_string();
    assert_eq!(error(&[0; 11]), "11 bytes are too short for a BTH of 12");
    let mut versioned = packet(Opcode::RC_SEND_ONLY, 0, 0);
    versioned[1] |= 1;
    assert_eq!(error(&versioned), "unknown transport header version 1");
    assert_eq!(error(&packet(Opcode::RC_SEND_ONLY, 3, 2)), "3 bytes of pad in 2 bytes after the headers");
    assert_eq!(
        error(&packet(Opcode::RC_WRITE_ONLY_IMM, 0, 15)),
        "RC_WRITE_ONLY_IMM ends inside its RETH: 15 of 16 bytes"
    );
    assert_eq!(
        error(&packet(Opcode::RC_WRITE_ONLY_IMM, 0, 19)),
        "RC_WRITE_ONLY_IMM ends inside its ImmDt: 3 of 4 bytes"
    );
    assert_eq!(
        error(&packet(Opcode::XRC_COMPARE_SWAP, 0, 4)),
        "XRC_COMPARE_SWAP ends inside its AtomicETH: 0 of 28 bytes"
    );
}

#[test]
fn unknown_opcodes_have_only_a_bth() {
    let unknown: Vec<Opcode> = all_opcodes().filter(|opcode| opcode.layout().is_none()).collect();
    assert!(unknown.contains(&Opcode::RC_RESYNC) && unknown.contains(&Opcode(0xff)));
    for opcode in unknown {
        let (headers, payload) = Headers::parse(&packet(opcode, 1, 9)).unwrap();
        assert_eq!((headers.bth.opcode, headers.len(), payload), (opcode, BTH_LEN, 12..20));
    }
}

#[test]
fn layouts_agree_with_the_names() {
    let mut known = 0;
    for opcode in all_opcodes() {
        let Some(layout) = opcode.layout() else { continue };
        known += 1;
        let name = opcode.name().unwrap_or_else(|| panic!("{:#04x} has a layout but no name", opcode.0));
        let class = match opcode.class() {
            Class::Cnp => "CNP".to_owned(),
            class => format!("{class:?}_").to_uppercase(),
        };
        assert!(name.starts_with(&class), "{name}");

        // Positions that the name does not tell belong to operations of one packet.
        let position = [("_FIRST", Position::First), ("_MIDDLE", Position::Middle), ("_LAST", Position::Last)]
            .into_iter()
            .find_map(|(word, position)| name.contains(word).then_some(position))
            .unwrap_or(Position::Only);
        assert_eq!(layout.position, position, "{name}");

        assert_eq!(layout.ext.contains(Ext::IMM_DT), name.ends_with("_IMM"), "{name}");
        assert_eq!(layout.ext.contains(Ext::IETH), name.ends_with("_INV"), "{name}");
        assert_eq!(layout.ext.contains(Ext::DETH), opcode.class() == Class::Ud, "{name}");
        let response = name.contains("ACKNOWLEDGE") || name.contains("READ_RESPONSE") || opcode == Opcode::CNP;
        assert_eq!(layout.direction == Direction::Response, response, "{name}");
        assert_eq!(opcode.is_response(), response, "{name}");
        assert_eq!(layout.ext.contains(Ext::XRCETH), opcode.class() == Class::Xrc && !response, "{name}");
        let reth = match layout.operation {
            Operation::Write => position.starts(),
            Operation::ReadRequest | Operation::Flush | Operation::AtomicWrite => true,
            _ => false,
        };
        assert_eq!(layout.ext.contains(Ext::RETH), reth, "{name}");
        let atomic = matches!(layout.operation, Operation::CompareSwap | Operation::FetchAdd);
        assert_eq!(layout.ext.contains(Ext::ATOMIC_ETH), atomic, "{name}");
        let aeth = response && opcode != Opcode::CNP && position != Position::Middle;
        assert_eq!(layout.ext.contains(Ext::AETH), aeth, "{name}");
    }
    // RC and XRC 25 each, UC 12, UD 2, CNP.
    assert_eq!(known, 25 + 25 + 12 + 2 + 1);
}

#[test]
fn longest_headers() {
    let longest = all_opcodes().map(|opcode| opcode.layout().map_or(BTH_LEN, |layout| layout.ext.header_len())).max();
    assert_eq!(longest, Some(MAX_HEADER_LEN));
}

#[test]
fn congestion_notification() {
    let headers = Headers::cnp(0x123456);
    let mut bytes = emitted(&headers);
    assert_eq!(bytes, [0x81, 0x40, 0xff, 0xff, 0x40, 0x12, 0x34, 0x56, 0, 0, 0, 0]);
    bytes.extend([0; CNP_RESERVED_LEN]);
    assert_eq!(Headers::parse(&bytes), Ok((headers, 12..28)));
}

#[test]
fn reads_like_a_capture() {
    let bth = Bth { mig_req: false, ack_req: true, pad: 3, ..Bth::new(Opcode::RC_WRITE_ONLY, 0x11, Psn::new(0x1000)) };
    let reth = Reth { va: 0x7f0a_9bbd_4000, rkey: 0x6821, len: 5 };
    let write = Headers { reth: Some(reth), ..Headers::new(bth) };
    assert_eq!(
        write.to_string(),
        "RC_WRITE_ONLY qp 0x11 psn 0x001000 ackreq pad 0x3 reth va 0x7f0a9bbd4000 rkey 0x6821 len 5"
    );

    let ack = |syndrome| Headers {
        aeth: Some(Aeth { syndrome, msn: 7 }),
        ..Headers::new(Bth::new(Opcode::RC_ACKNOWLEDGE, 0x11, Psn::new(0x1000)))
    };
    for (syndrome, words) in [
        (Syndrome::ACK, "ack"),
        (Syndrome(3), "ack credits 3"),
        (Syndrome::rnr(12), "rnr nak timer 12"),
        (Syndrome::NAK_SEQUENCE, "nak PSN sequence error"),
        (Syndrome::NAK_REMOTE_ACCESS, "nak remote access error"),
        (Syndrome(0x7f), "syndrome 0x7f"),
    ] {
        assert_eq!(ack(syndrome).to_string(), format!("RC_ACKNOWLEDGE qp 0x11 psn 0x001000 mig {words} msn 7"));
    }
    let unknown = Headers::new(Bth::new(Opcode(0x1e), 1, Psn::new(2)));
    assert_eq!(unknown.to_string(), "Rc_0x1e qp 0x1 psn 0x000002 mig");
}
