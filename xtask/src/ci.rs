//! `cargo xtask ci`: everything a change must pass, in the order that finds the cheap faults first.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::process::{elapsed, print, run, say, watch};
use crate::{checks, dist, interop, programs, suite};

/// Tests counted from the closing lines of `cargo test` and of the program matrix.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
}

impl Tally {
    /// Adds a line such as `test result: ok. 21 passed; 0 failed; ...` or `30 passed, 0 failed`.
    pub(crate) fn look(&mut self, line: &str) {
        let Some((passed, failed)) = counts(line) else { return };
        self.passed += passed;
        self.failed += failed;
    }

    /// Adds one test, and says how it ended.
    pub(crate) fn count(&mut self, name: &str, result: Result<()>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(error) => {
                self.failed += 1;
                say(format_args!("{name}: FAILED: {error:#}"));
            }
        }
    }
}

/// Passed and failed tests in a closing line.
fn counts(line: &str) -> Option<(u64, u64)> {
    let rest = match line.strip_prefix("test result: ") {
        Some(rest) => rest.split_once(". ")?.1,
        None => line,
    };
    let (passed, rest) = rest.split_once(" passed")?;
    let (failed, _) = rest.trim_start_matches([',', ';']).trim_start().split_once(" failed")?;
    Some((passed.parse().ok()?, failed.parse().ok()?))
}

/// Runs all steps, also after a failed one, and ends with `N passed, N failed`. A failed step counts as one failure.
pub(crate) fn ci(root: &Path) -> Result<()> {
    let start = Instant::now();
    let mut tally = Tally::default();
    type Step = fn(&Path, &mut Tally) -> Result<()>;
    let steps: &[(&str, Step)] = &[
        ("formatting", |root, _| run(&mut cargo(root, &["fmt", "--all", "--", "--check"]))),
        ("rules of the tree", |root, _| checks::run(root)),
        ("clippy", |root, _| {
            run(&mut cargo(
                root,
                &["clippy", "--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"],
            ))
        }),
        ("fuzz targets", |root, _| {
            run(&mut cargo(
                root,
                &["check", "--manifest-path", "fuzz/Cargo.toml", "--no-default-features", "--locked", "--quiet"],
            ))
        }),
        ("documentation", |root, _| {
            run(cargo(root, &["doc", "--workspace", "--no-deps", "--document-private-items", "--locked", "--quiet"])
                .env("RUSTDOCFLAGS", "-D warnings"))
        }),
        ("release build", |root, _| dist::build(root).map(|_| ())),
        ("tests", |root, tally| {
            let before = tally.failed;
            let good =
                watch(&mut cargo(root, &["test", "--workspace", "--locked", "--no-fail-fast"]), |l| tally.look(l))?;
            if !good && tally.failed == before {
                bail!("`cargo test` failed before it ran tests; its messages are above");
            }
            Ok(())
        }),
        ("rdma-core's own tests", |root, tally| suite::smoke(root, |line| tally.look(line))),
        ("stock programs, a small set", |root, tally| programs::smoke(root, |line| tally.look(line))),
        ("stock programs between Ferroce and a Linux kernel in QEMU, a small set", |root, tally| {
            interop::smoke(root, |line| tally.look(line))
        }),
    ];
    let mut broken = Vec::new();
    for (i, (name, step)) in steps.iter().enumerate() {
        let begun = Instant::now();
        say(format_args!("[{}/{}] {name}", i + 1, steps.len()));
        match step(root, &mut tally) {
            Ok(()) => say(format_args!("[{}/{}] {name}: done in {}", i + 1, steps.len(), elapsed(begun))),
            Err(error) => {
                say(format_args!("[{}/{}] {name}: FAILED: {error:#}", i + 1, steps.len()));
                tally.failed += 1;
                broken.push(*name);
            }
        }
    }
    say(format_args!("all steps took {}", elapsed(start)));
    print(format_args!("{} passed, {} failed", tally.passed, tally.failed));
    match (broken.as_slice(), tally.failed) {
        ([], 0) => Ok(()),
        ([], n) => bail!("{n} tests failed; their output is above"),
        (steps, _) => bail!("failed: {}; their output is above", steps.join(", ")),
    }
}

/// Cargo in the workspace, with the toolchain that runs us.
pub(crate) fn cargo(root: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root).args(args);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_counted() {
        let cargo =
            "test result: FAILED. 16 passed; 5 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.27s";
        assert_eq!(counts(cargo), Some((16, 5)));
        assert_eq!(counts("test result: ok. 21 passed; 0 failed; 0 ignored"), Some((21, 0)));
        assert_eq!(counts("30 passed, 2 failed"), Some((30, 2)));
    }

    #[test]
    fn other_lines_are_not() {
        for line in ["test checks::passed ... ok", "running 21 tests", "it passed, 3 failed", "", "all passed"] {
            assert_eq!(counts(line), None, "{line}");
        }
    }
}
