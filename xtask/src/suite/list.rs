//! The committed lists of a release's tests, and the judgement by them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use program_tests::known::matches;
use serde::Deserialize;

use super::{Ended, Outcome};

/// What is expected of the tests of one release of rdma-core.
pub(super) struct Lists {
    release: u32,
    skipped: Vec<Entry>,
    passed: BTreeSet<String>,
}

/// `skipped-*.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Skips {
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

/// Something that is not as the lists have it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    /// A test, or an entry of a list.
    pub(super) subject: String,
    /// The rest of the sentence.
    pub(super) what: String,
}

impl Lists {
    /// The lists of `release` in `tests/suite`.
    pub(super) fn read(root: &Path, release: u32) -> Result<Lists> {
        let file = format!("tests/suite/skipped-{release}.toml");
        let text = fs::read_to_string(root.join(&file)).with_context(|| format!("cannot read {file}"))?;
        let skipped = parse_skipped(&text).context(file)?;
        Ok(Lists { release, skipped, passed: passing(root, release)? })
    }

    /// Takes what passed for what has to pass, and writes it down.
    pub(super) fn write_passed(&mut self, root: &Path, ended: &[Ended]) -> Result<()> {
        let passed = ended.iter().filter(|ended| ended.outcome == Outcome::Passed);
        self.passed = passed.map(|ended| ended.test.clone()).collect();
        let path = passed_path(root, self.release);
        let text: String = self.passed.iter().flat_map(|test| [test, "\n"]).collect();
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Names of the tests of `release` that pass on Ferroce.
pub(crate) fn passing(root: &Path, release: u32) -> Result<BTreeSet<String>> {
    let path = passed_path(root, release);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect())
}

fn passed_path(root: &Path, release: u32) -> PathBuf {
    root.join(format!("tests/suite/passed-{release}.txt"))
}

fn parse_skipped(text: &str) -> Result<Vec<Entry>> {
    let skips: Skips = toml::from_str(text)?;
    match skips.skipped.iter().find(|entry| entry.reason.trim().is_empty()) {
        None => Ok(skips.skipped),
        Some(entry) => bail!("{} has no reason", entry.test),
    }
}

/// What is wrong: failures, skips and passes that the lists do not have, and entries of the lists that are not true any more.
pub(super) fn judge(ended: &[Ended], lists: &Lists) -> Vec<Wrong> {
    let mut wrong = Vec::new();
    let mut complain = |subject: &str, what: String| wrong.push(Wrong { subject: subject.to_owned(), what });
    let mut skips: BTreeMap<&str, u32> = lists.skipped.iter().map(|entry| (entry.test.as_str(), 0)).collect();
    let mut absent: BTreeSet<&str> = lists.passed.iter().map(String::as_str).collect();
    for Ended { test, outcome, why } in ended {
        absent.remove(test.as_str());
        let entry = lists.skipped.iter().find(|entry| matches(&entry.test, test));
        match (outcome, entry) {
            (Outcome::Failed, _) => complain(test, format!("failed: {}", why.trim())),
            (Outcome::Skipped, None) => complain(test, format!("is skipped, and the list does not say why: {why}")),
            (Outcome::Skipped, Some(entry)) => *skips.entry(&entry.test).or_default() += 1,
            (Outcome::Passed, Some(entry)) => {
                *skips.entry(&entry.test).or_default() += 1;
                complain(test, format!("passes: its entry {} has to go", entry.test));
            }
            (Outcome::Passed, None) if !lists.passed.contains(test) => {
                complain(test, "passes, and the list of what passes does not have it: --write adds it".to_owned());
            }
            (Outcome::Passed, None) => {}
        }
    }
    for test in absent {
        complain(test, "is in the list of what passes, and was not run".to_owned());
    }
    for (entry, _) in skips.iter().filter(|(_, count)| **count == 0) {
        complain(entry, "is an entry of the list, and names no test that is skipped".to_owned());
    }
    if ended.is_empty() {
        complain("the suite", "ran no test".to_owned());
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists() -> Lists {
        let skipped = parse_skipped("[[skipped]]\ntest = \"t.Card.*\"\nreason = \"hardware\"\n").expect("is valid");
        Lists { release: 0, skipped, passed: ["t.Other.one".to_owned()].into() }
    }

    fn ended(test: &str, outcome: Outcome) -> Ended {
        Ended { test: test.to_owned(), outcome, why: "why".to_owned() }
    }

    fn sentences(ends: &[Ended]) -> Vec<String> {
        judge(ends, &lists()).into_iter().map(|Wrong { subject, what }| format!("{subject} {what}")).collect()
    }

    #[test]
    fn what_is_as_the_lists_have_it_is_right() {
        let ends = [ended("t.Card.one", Outcome::Skipped), ended("t.Other.one", Outcome::Passed)];
        assert_eq!(sentences(&ends), [""; 0]);
    }

    #[test]
    fn failures_new_skips_and_entries_that_are_over_are_wrong() {
        let wrong = |outcome, test: &str| sentences(&[ended("t.Card.two", Outcome::Skipped), ended(test, outcome)]);
        let absent = "t.Other.one is in the list of what passes, and was not run";
        assert_eq!(wrong(Outcome::Failed, "t.Other.one"), ["t.Other.one failed: why"]);
        assert_eq!(wrong(Outcome::Failed, "t.Card.one"), ["t.Card.one failed: why", absent]);
        let skipped = wrong(Outcome::Skipped, "t.Other.one");
        assert_eq!(skipped, ["t.Other.one is skipped, and the list does not say why: why"]);
        assert_eq!(wrong(Outcome::Passed, "t.Card.one"), ["t.Card.one passes: its entry t.Card.* has to go", absent]);
        let unknown = wrong(Outcome::Passed, "t.Other.two");
        let added = "t.Other.two passes, and the list of what passes does not have it: --write adds it";
        assert_eq!(unknown, [added, absent]);
        let unused = sentences(&[ended("t.Other.one", Outcome::Passed)]);
        assert_eq!(unused, ["t.Card.* is an entry of the list, and names no test that is skipped"]);
        assert_eq!(sentences(&[]).len(), 3, "no tests, one that should pass, and an entry for none");
    }

    #[test]
    fn entries_need_a_reason_and_the_lists_of_this_workspace_have_them() {
        parse_skipped("[[skipped]]\ntest = \"a\"\nreason = \" \"\n").expect_err("no reason");
        parse_skipped("[[skipped]]\ntest = \"a\"\n").expect_err("no reason");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace");
        for release in [44, 56] {
            let lists = Lists::read(root, release).expect("is valid");
            assert!(!lists.skipped.is_empty() && !lists.passed.is_empty(), "{release}");
        }
    }

    #[test]
    fn what_passes_is_written_down_and_read_again() {
        let root = tempfile::tempdir().expect("a temporary folder");
        fs::create_dir_all(root.path().join("tests/suite")).expect("can make folders");
        let ends = [
            ended("t.B.one", Outcome::Passed),
            ended("t.A.one", Outcome::Passed),
            ended("t.Card.one", Outcome::Skipped),
            ended("t.C.one", Outcome::Failed),
        ];
        lists().write_passed(root.path(), &ends).expect("can write");
        let text = fs::read_to_string(passed_path(root.path(), 0)).expect("was written");
        assert_eq!(text, "t.A.one\nt.B.one\n");
        assert_eq!(passing(root.path(), 0).expect("can be read").len(), 2);
    }
}
