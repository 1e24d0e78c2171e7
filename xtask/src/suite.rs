//! rdma-core's own test suite on Ferroce: in one run, and each test in a process of its own. `tests/suite` has the runner and the list
//! of the tests that are skipped; the tests themselves are rdma-core's and come from Debian's package.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use program_tests::known::matches;
use serde::Deserialize;

use crate::dist;
use crate::process::{installed, print, run, say};

/// Where Debian's package `rdma-core` has the tests, some of them compressed.
const PACKAGED: &str = "/usr/share/doc/rdma-core/tests";
/// Debian's own Python has Debian's pyverbs.
const PYTHON: &str = "/usr/bin/python3";
/// Longest time of the one run, and of all single ones, in seconds.
const LIMIT_S: u32 = 1_800;

/// Options of `cargo xtask suite`.
#[derive(clap::Args)]
pub(crate) struct SuiteArgs {
    /// Folder with the tests (run_tests.py lies in it) [default: those of Debian's package rdma-core]
    #[arg(long)]
    tests: Option<PathBuf>,
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

/// `skipped.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    skipped: Vec<Entry>,
}

/// Tests that are skipped, and why.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// A test's name, or a part of names that ends with `*`.
    test: String,
    reason: String,
}

/// Builds, runs the suite twice and judges it by the list.
pub(crate) fn suite(root: &Path, args: &SuiteArgs) -> Result<()> {
    let list = List::parse(&fs::read_to_string(root.join("tests/suite/skipped.toml"))?)?;
    let install = dist::build(root)?;
    check_needs()?;
    let work = install.with_file_name("suite");
    let tests = match &args.tests {
        Some(folder) => folder.clone(),
        None => unpack(&work)?,
    };
    if !tests.join("run_tests.py").is_file() {
        bail!("{} has no run_tests.py: name the folder of rdma-core's tests with --tests", tests.display());
    }
    let mut complaints = Vec::new();
    for (name, each) in [("all in one run", false), ("each in a process of its own", true)] {
        let ended = execute(root, &install, &work, &tests, each).with_context(|| name.to_owned())?;
        let count = |outcome| ended.iter().filter(|ended| ended.outcome == outcome).count();
        let (passed, skipped) = (count(Outcome::Passed), count(Outcome::Skipped));
        let wrong = judge(&ended, &list);
        print(format_args!("{name}: {passed} passed, {skipped} skipped, {} failed", count(Outcome::Failed)));
        complaints.extend(wrong.into_iter().map(|what| format!("{name}: {what}")));
    }
    complaints.iter().for_each(|what| print(format_args!("FAILED {what}")));
    if complaints.is_empty() { Ok(()) } else { bail!("{} things are not as they should be", complaints.len()) }
}

/// Says what is not there.
fn check_needs() -> Result<()> {
    let has_pyverbs =
        Command::new(PYTHON).args(["-c", "import pyverbs"]).output().is_ok_and(|out| out.status.success());
    if !has_pyverbs {
        bail!("{PYTHON} cannot import pyverbs: apt-get install python3-pyverbs");
    }
    for program in ["unshare", "ip", "gzip", "timeout"] {
        if !installed(program) {
            bail!("`{program}` is not installed");
        }
    }
    Ok(())
}

/// Copies the packaged tests to a folder of ours, uncompressed.
fn unpack(work: &Path) -> Result<PathBuf> {
    if !Path::new(PACKAGED).is_dir() {
        bail!("{PACKAGED} is not there: apt-get install rdma-core, or name a folder with --tests");
    }
    let tests = work.join("tests");
    match fs::remove_dir_all(&tests) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => fs::create_dir_all(&tests)?,
    }
    for entry in fs::read_dir(PACKAGED)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), tests.join(entry.file_name()))?;
        }
    }
    run(Command::new("gzip").args(["--decompress", "--force", "--recursive", "--quiet"]).arg(&tests))?;
    Ok(tests)
}

/// Runs all tests in a network namespace that has loopback only, and reads how they ended.
fn execute(root: &Path, install: &Path, work: &Path, tests: &Path, each: bool) -> Result<Vec<Ended>> {
    fs::create_dir_all(work)?;
    let report = work.join("report");
    match fs::remove_file(&report) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    say(format_args!("rdma-core's tests of {}{}", tests.display(), if each { ", one by one" } else { "" }));
    let mut command = Command::new("timeout");
    command.arg(LIMIT_S.to_string()).args(["unshare", "--map-root-user", "--net", "sh", "-c"]);
    // The files that librdmacm's tests look for are shown by --sysfs.
    command.args(["ip link set lo up && exec \"$0\" run --sysfs -- \"$@\""]).arg(install.join("bin/ferroce"));
    command.arg(PYTHON).arg(root.join("tests/suite/run.py")).arg(tests.canonicalize()?).arg(&report);
    command.args(each.then_some("--each"));
    // What the tests print is theirs; what became of each is in the report.
    let output = command.output().context("cannot run `timeout`")?;
    if !output.status.success() {
        say(String::from_utf8_lossy(&output.stderr));
        bail!("the runner failed ({}); its messages are above", output.status);
    }
    let text = fs::read_to_string(&report).context("the runner left no report")?;
    text.lines().map(|line| serde_json::from_str(line).with_context(|| format!("report: {line}"))).collect()
}

/// What is wrong: failures, skips that the list does not have, and entries of the list that are not true any more.
fn judge(ended: &[Ended], list: &List) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut skips: BTreeMap<&str, u32> = list.skipped.iter().map(|entry| (entry.test.as_str(), 0)).collect();
    for Ended { test, outcome, why } in ended {
        let entry = list.skipped.iter().find(|entry| matches(&entry.test, test));
        match (outcome, entry) {
            (Outcome::Failed, _) => wrong.push(format!("{test}: {}", why.trim())),
            (Outcome::Skipped, None) => wrong.push(format!("{test} is skipped, and the list does not say why: {why}")),
            (Outcome::Skipped, Some(entry)) => *skips.entry(&entry.test).or_default() += 1,
            (Outcome::Passed, Some(entry)) => {
                wrong.push(format!("{test} passes: its entry {} has to go", entry.test));
            }
            (Outcome::Passed, None) => {}
        }
    }
    let idle = skips.iter().filter(|(_, count)| **count == 0);
    wrong.extend(idle.map(|(entry, _)| format!("the list's entry {entry} names no test that is skipped")));
    if ended.is_empty() {
        wrong.push("no test was run".to_owned());
    }
    wrong
}

impl List {
    fn parse(text: &str) -> Result<List> {
        let list: List = toml::from_str(text).context("tests/suite/skipped.toml")?;
        match list.skipped.iter().find(|entry| entry.reason.trim().is_empty()) {
            None => Ok(list),
            Some(entry) => bail!("tests/suite/skipped.toml: {} has no reason", entry.test),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> List {
        List::parse("[[skipped]]\ntest = \"t.Card.*\"\nreason = \"hardware\"\n").expect("is valid")
    }

    fn ended(test: &str, outcome: Outcome) -> Ended {
        Ended { test: test.to_owned(), outcome, why: "why".to_owned() }
    }

    #[test]
    fn what_is_as_the_list_has_it_is_right() {
        let ends = [ended("t.Card.one", Outcome::Skipped), ended("t.Other.one", Outcome::Passed)];
        assert_eq!(judge(&ends, &list()), [""; 0]);
    }

    #[test]
    fn failures_new_skips_and_entries_that_are_over_are_wrong() {
        let wrong =
            |outcome, test: &str| judge(&[ended("t.Card.two", Outcome::Skipped), ended(test, outcome)], &list());
        assert_eq!(wrong(Outcome::Failed, "t.Other.one"), ["t.Other.one: why"]);
        assert_eq!(wrong(Outcome::Failed, "t.Card.one"), ["t.Card.one: why"]);
        let skipped = wrong(Outcome::Skipped, "t.Other.one");
        assert_eq!(skipped, ["t.Other.one is skipped, and the list does not say why: why"]);
        assert_eq!(wrong(Outcome::Passed, "t.Card.one"), ["t.Card.one passes: its entry t.Card.* has to go"]);
        let unused = judge(&[ended("t.Other.one", Outcome::Passed)], &list());
        assert_eq!(unused, ["the list's entry t.Card.* names no test that is skipped"]);
        assert_eq!(judge(&[], &list()).len(), 2, "no tests, and an entry for none");
    }

    #[test]
    fn entries_need_a_reason_and_the_list_of_this_workspace_has_them() {
        List::parse("[[skipped]]\ntest = \"a\"\nreason = \" \"\n").expect_err("no reason");
        List::parse("[[skipped]]\ntest = \"a\"\n").expect_err("no reason");
        List::parse(include_str!("../../tests/suite/skipped.toml")).expect("is valid");
    }
}
