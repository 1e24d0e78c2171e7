//! The body of our own flow-control packet.

use ferroce_wire::{BTH_LEN, Bth, Class, FLOW_LEN, Flow, FlowKind, Headers, Opcode, Psn};
use proptest::array::uniform12;
use proptest::prelude::*;

const KINDS: [FlowKind; 3] =
    [FlowKind::Question, FlowKind::Answer { missing: false }, FlowKind::Answer { missing: true }];

#[test]
fn layout() {
    let flow = Flow { kind: KINDS[2], qkey: 0x0102_0304, src_qp: 0xff_abcdef };
    let bytes = [b'F', b'e', 1, 3, 1, 2, 3, 4, 0, 0xab, 0xcd, 0xef];
    assert_eq!(flow.bytes(), bytes, "a number of the queue pair is cut to its width");
    assert_eq!(Flow::parse(&bytes), Some(Flow { src_qp: 0xab_cdef, ..flow }));
}

#[test]
fn all_kinds_there_and_back() {
    for kind in KINDS {
        let flow = Flow { kind, qkey: 7, src_qp: 0x44_0011 };
        assert_eq!(Flow::parse(&flow.bytes()), Some(flow));
    }
}

#[test]
fn others_packets_are_not_ours() {
    let bytes = Flow { kind: FlowKind::Question, qkey: 0, src_qp: 5 }.bytes();
    for at in 0..4 {
        let mut other = bytes;
        other[at] ^= 0x40;
        assert_eq!(Flow::parse(&other), None, "byte {at}");
    }
    assert_eq!(Flow::parse(&bytes[..FLOW_LEN - 1]), None);
    assert_eq!(Flow::parse(&[&bytes[..], &[0]].concat()), None);
    // A question has nothing to say of missing packets.
    assert_eq!(Flow::parse(&[b'F', b'e', 1, 2, 0, 0, 0, 0, 0, 0, 0, 5]), None);
}

/// To all who do not know it, the packet is one of a manufacturer: a BTH and a payload.
#[test]
fn a_manufacturers_opcode() {
    assert_eq!(Opcode::FERROCE_FLOW.class(), Class::Other);
    assert_eq!(Opcode::FERROCE_FLOW.layout(), None);
    let headers = Headers::new(Bth::new(Opcode::FERROCE_FLOW, 0x11, Psn::new(9)));
    let mut bytes = vec![0; headers.len()];
    headers.emit(&mut bytes);
    bytes.extend(Flow { kind: FlowKind::Question, qkey: 0, src_qp: 5 }.bytes());
    assert_eq!(Headers::parse(&bytes), Ok((headers, BTH_LEN..BTH_LEN + FLOW_LEN)));
    assert_eq!(headers.to_string(), "FERROCE_FLOW qp 0x11 psn 0x000009 mig");
}

proptest! {
    #[test]
    fn what_parses_says_what_it_was(mut bytes in uniform12(any::<u8>()), ours: bool) {
        if ours {
            bytes[..3].copy_from_slice(b"Fe\x01");
            bytes[3] &= 3;
        }
        if let Some(flow) = Flow::parse(&bytes) {
            bytes[8] = 0;
            prop_assert_eq!(flow.bytes(), bytes);
        }
    }
}
