//! Any commands and packets: random ones, and the corpus that fuzzing starts from.

#[path = "common/check.rs"]
mod check;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use ferroce_cm::State;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

#[test]
fn random_steps() {
    for seed in 0..600 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut bytes = vec![0; rng.random_range(0..1_500)];
        rng.fill(&mut bytes[..]);
        let outcome = std::panic::catch_unwind(|| check::any_steps(&bytes));
        assert!(outcome.is_ok(), "seed {seed} fails");
    }
}

/// The corpus gets everywhere.
#[test]
fn fuzz_corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/cm_steps");
    let mut met = BTreeSet::new();
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        let outcome = std::panic::catch_unwind(|| check::any_steps(&bytes));
        met.extend(outcome.unwrap_or_else(|_| panic!("{} fails", path.display())));
    }
    let states = State::ALL.map(|state| state.to_string());
    let events = ["CONNECT_REQUEST", "CONNECT_RESPONSE", "CONNECT_ERROR", "ESTABLISHED", "REJECTED", "UNREACHABLE"];
    let events = [&events[..], &["DISCONNECTED", "TIMEWAIT_EXIT"]].concat();
    let missing: Vec<_> = states.iter().map(String::as_str).chain(events).filter(|name| !met.contains(*name)).collect();
    assert_eq!(missing, [""; 0]);
}
