//! Bytes from anyone: random ones, and the corpus that fuzzing starts from.

#[path = "common/check.rs"]
mod check;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use ferroce_wire::{Headers, Opcode, ParseError};
use proptest::collection::vec;
use proptest::prelude::*;

proptest! {
    #[test]
    fn random_bytes(bytes in vec(any::<u8>(), 0..128)) {
        check::any_bytes(&bytes);
    }

    /// Version 0 and an opcode that exists, so that more bytes get further.
    #[test]
    fn random_packets(opcode in 0..0xc0u8, flags: u8, rest in vec(any::<u8>(), 0..128)) {
        let mut bytes = vec![opcode, flags & 0xf0];
        bytes.extend(rest);
        check::any_bytes(&bytes);
    }
}

/// The corpus has each opcode, each header cut short, and each other error, whole packets without their ICRC.
#[test]
fn fuzz_corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/parse");
    let mut opcodes = BTreeSet::new();
    let mut errors = BTreeSet::new();
    for entry in fs::read_dir(&folder).unwrap() {
        let bytes = fs::read(entry.unwrap().path()).unwrap();
        check::any_bytes(&bytes);
        match Headers::parse(&bytes) {
            Ok((headers, _)) => drop(opcodes.insert(headers.bth.opcode.0)),
            Err(ParseError::Truncated { header, .. }) => drop(errors.insert(header)),
            Err(ParseError::TooShort { .. }) => drop(errors.insert("too short")),
            Err(ParseError::Version { .. }) => drop(errors.insert("version")),
            Err(ParseError::Pad { .. }) => drop(errors.insert("pad")),
        }
    }
    let known = (0..=255).map(Opcode).filter(|opcode| opcode.layout().is_some());
    let missing: Vec<_> = known.filter(|opcode| !opcodes.contains(&opcode.0)).collect();
    assert_eq!(missing, []);
    let expected = [
        "AETH",
        "AtomicAckETH",
        "AtomicETH",
        "DETH",
        "FETH",
        "IETH",
        "ImmDt",
        "RETH",
        "XRCETH",
        "pad",
        "too short",
        "version",
    ];
    assert_eq!(errors, BTreeSet::from(expected));
}
