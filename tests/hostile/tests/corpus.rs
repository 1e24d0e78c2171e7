//! The corpora of the fuzz targets, run again by every `cargo test`: as they are, and with random changes. `FUZZ_SEED` makes the changes
//! of an earlier run again.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use hostile_tests::check;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngCore, SeedableRng};

/// Changed inputs for each target.
const MUTANTS: u32 = 10_000;
/// Longest changed input, in bytes.
const LEN_MAX: usize = 4096;

/// Runs a check over every file of a corpus, then over changed ones.
fn replay(target: &str, check: fn(&[u8])) {
    let corpus = corpus(target);
    assert!(corpus.len() >= 10, "the corpus of {target} holds {} files", corpus.len());
    for (path, bytes) in &corpus {
        let outcome = catch_unwind(AssertUnwindSafe(|| check(bytes)));
        assert!(outcome.is_ok(), "{} fails", path.display());
    }
    let inputs: Vec<Vec<u8>> = corpus.into_iter().map(|(_, bytes)| bytes).collect();
    let seed: u64 = std::env::var("FUZZ_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().expect("a number"));
    for number in 0..MUTANTS {
        let bytes = mutant(&inputs, &mut StdRng::seed_from_u64(seed ^ u64::from(number)));
        let outcome = catch_unwind(AssertUnwindSafe(|| check(&bytes)));
        assert!(outcome.is_ok(), "{target}, FUZZ_SEED={seed}, input {number} fails: {bytes:02x?}");
    }
}

/// The files in the order of their names.
fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a folder can be listed").path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(path).expect("a file can be read"))).collect()
}

/// An input with some changes of the kinds that fuzzers make.
fn mutant(inputs: &[Vec<u8>], rng: &mut StdRng) -> Vec<u8> {
    let mut bytes = inputs.choose(rng).expect("there are some").clone();
    for _ in 0..rng.random_range(1..=4) {
        change(&mut bytes, inputs, rng);
    }
    bytes.truncate(LEN_MAX);
    bytes
}

fn change(bytes: &mut Vec<u8>, inputs: &[Vec<u8>], rng: &mut StdRng) {
    let at = rng.random_range(0..=bytes.len());
    let end = rng.random_range(at..=bytes.len());
    match rng.random_range(0..6) {
        0 if at < bytes.len() => bytes[at] ^= 1 << rng.random_range(0..8),
        1 if at < bytes.len() => bytes[at] = *[0, 1, 0x7f, 0x80, 0xff].choose(rng).expect("there are some"),
        2 => drop(bytes.drain(at..end)),
        3 => {
            let again = bytes[at..end].to_vec();
            bytes.splice(at..at, again);
        }
        4 => {
            let other = inputs.choose(rng).expect("there are some");
            let from = rng.random_range(0..=other.len());
            bytes.splice(at.., other[from..].iter().copied());
        }
        _ => {
            let mut random = vec![0; rng.random_range(1..=16)];
            rng.fill_bytes(&mut random);
            bytes.splice(at..at, random);
        }
    }
}

#[test]
fn transport_packets() {
    replay("transport_packets", check::transport_packets);
}

#[test]
fn link_ingest() {
    replay("link_ingest", check::link_ingest);
}

#[test]
fn service_protocol() {
    replay("service_protocol", check::service_protocol);
}

#[test]
fn ring() {
    replay("ring", check::ring);
}
