//! Seeds: those that once failed, the first ones, and new ones each time.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use ferroce_sim::{Coverage, Report, run, run_traced};

/// Seeds of the fixed set and of the fresh one.
const SEEDS: u64 = 500;
/// The first fresh seed. Without it the time decides, so that every run meets new ones.
const START: &str = "FERROCE_SIM_START";

fn must_be_good(seed: u64) -> Report {
    run(seed).unwrap_or_else(|failure| panic!("{failure}"))
}

#[test]
fn regressions() {
    for line in include_str!("../regressions.txt").lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (seed, reason) = line.split_once(' ').unwrap_or_else(|| panic!("`{line}` has no reason"));
        let seed = seed.parse().unwrap_or_else(|error| panic!("`{line}`: {error}"));
        run(seed).unwrap_or_else(|failure| panic!("{failure}\n  once it failed: {}", reason.trim()));
    }
}

/// The fixed seeds make sure that every operation and every fault is met; the fresh ones look further each time.
#[test]
fn first_and_fresh_seeds() {
    let start = match std::env::var(START) {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("{START}={text}: {error}")),
        Err(_) => {
            SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is after 1970").as_secs().wrapping_mul(1_000)
        }
    };
    let mut coverage = Coverage::default();
    for seed in (0..SEEDS).chain(start..start + SEEDS) {
        coverage.merge(&must_be_good(seed).coverage);
    }
    let text = format!("seeds 0 to {SEEDS} and {SEEDS} from {START}={start}:\n{coverage}");
    io::stdout().write_all(text.as_bytes()).expect("stdout takes the summary");
    assert!(coverage.missing().is_empty(), "never met: {:?}", coverage.missing());
}

#[test]
fn a_seed_gives_the_same_run_again() {
    for seed in 0..60 {
        assert_eq!(must_be_good(seed), must_be_good(seed), "seed {seed}");
    }
}

/// Collects what is written.
#[derive(Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("nobody panics with the buffer").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_trace_changes_nothing_and_tells_all() {
    let buffer = Buffer::default();
    for seed in 0..5 {
        let report = run_traced(seed, Some(Box::new(buffer.clone()))).unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(report, must_be_good(seed), "seed {seed}");
    }
    let text = String::from_utf8(buffer.0.lock().expect("nobody panics with the buffer").clone()).expect("text");
    for word in ["Plan {", " posts ", " -> ", " <- ", " completes ", "is in Rts", "well from now on"] {
        assert!(text.contains(word), "{word:?} is not in the trace");
    }
}
