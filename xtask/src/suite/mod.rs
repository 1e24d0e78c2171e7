//! rdma-core's own test suite on Ferroce: in one run, and each test in a process of its own. `tests/suite` has the runner and, for each
//! release of rdma-core, the lists of the tests that pass and of those that are skipped; the tests themselves are rdma-core's and come
//! from Debian's package.

mod list;
mod place;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::dist;
use crate::process::{print, say};
use list::{Lists, judge};
use place::Place;

pub(crate) use list::passing;

/// Options of `cargo xtask suite`.
#[derive(clap::Args)]
pub(crate) struct SuiteArgs {
    /// Folder with the tests (run_tests.py lies in it) [default: those of Debian's package rdma-core]
    #[arg(long)]
    tests: Option<PathBuf>,
    /// The tests of rdma-core 56 on Debian 13, in a chroot below the target folder, which this makes (as root)
    #[arg(long, conflicts_with = "tests")]
    trixie: bool,
    /// How often both runs are made
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Write down what passes (tests/suite/passed-*.txt) instead of comparing with it
    #[arg(long)]
    write: bool,
}

/// How a test ended.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Passed,
    Skipped,
    Failed,
}

/// A line of the runner's report.
#[derive(Clone, Debug, Deserialize)]
struct Ended {
    test: String,
    outcome: Outcome,
    why: String,
}

/// Builds, runs the suite twice in each round and judges it by the lists.
pub(crate) fn suite(root: &Path, args: &SuiteArgs) -> Result<()> {
    let release = if args.trixie { 56 } else { 44 };
    let mut lists = Lists::read(root, release)?;
    let install = dist::build(root)?;
    let place = if args.trixie { Place::debian13(&install)? } else { Place::here(&install, args.tests.as_deref())? };
    say(format_args!("rdma-core's tests of {}", place.origin()));
    let mut complaints = Complaints::default();
    for round in 1..=args.rounds {
        for (name, each) in [("all in one run", false), ("each in a process of its own", true)] {
            let name = if args.rounds > 1 { format!("round {round}, {name}") } else { name.to_owned() };
            let ended = place.execute(root, each).with_context(|| name.clone())?;
            if args.write && round == 1 && !each {
                lists.write_passed(root, &ended)?;
            }
            complaints.add(&name, &ended, &lists);
        }
    }
    complaints.conclude(args.rounds)
}

/// Release 44 once, with what is built; `look` is told how many passed, and how many were not as the lists have them.
pub(crate) fn smoke(root: &Path, mut look: impl FnMut(&str)) -> Result<()> {
    let lists = Lists::read(root, 44)?;
    let ended = Place::here(&dist::folder(root)?, None)?.execute(root, false)?;
    let mut complaints = Complaints::default();
    complaints.add("all in one run", &ended, &lists);
    look(&format!("{} passed, {} failed", count(&ended, Outcome::Passed), complaints.total));
    complaints.conclude(1)
}

fn count(ended: &[Ended], outcome: Outcome) -> usize {
    ended.iter().filter(|ended| ended.outcome == outcome).count()
}

/// What was wrong, in how many runs.
#[derive(Default)]
struct Complaints {
    total: usize,
    by_subject: BTreeMap<String, u32>,
}

impl Complaints {
    /// Tells how a run ended, and what was wrong in it, at once.
    fn add(&mut self, run: &str, ended: &[Ended], lists: &Lists) {
        let [passed, skipped, failed] =
            [Outcome::Passed, Outcome::Skipped, Outcome::Failed].map(|outcome| count(ended, outcome));
        print(format_args!("{run}: {passed} passed, {skipped} skipped, {failed} failed"));
        for list::Wrong { subject, what } in judge(ended, lists) {
            print(format_args!("FAILED {run}: {subject} {what}"));
            *self.by_subject.entry(subject).or_default() += 1;
            self.total += 1;
        }
    }

    fn conclude(self, rounds: u32) -> Result<()> {
        if rounds > 1 {
            for (subject, count) in &self.by_subject {
                print(format_args!("{subject}: wrong in {count} of {} runs", 2 * rounds));
            }
        }
        if self.total > 0 {
            bail!("{} things are not as they should be", self.total);
        }
        Ok(())
    }
}
