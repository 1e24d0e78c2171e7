//! Verdicts, and the table made of them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::bench::{Bench, SILENCE, Stop};
use crate::cases::Case;

/// Attempts at a case: a busy machine may have held the device up, or lost a packet.
const ATTEMPTS: u32 = 3;

/// As many cases of a hundred may follow at a later attempt only.
const LATE_PERCENT: usize = 3;

/// The verdict on one case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Name of the case.
    pub name: String,
    /// What was seen if the device departs from the clause.
    pub departs: Option<String>,
    /// Attempts until the device followed, or all that there are.
    pub attempts: u32,
    /// What was seen at attempts before the last.
    pub before: Vec<String>,
}

/// What a device did in all cases.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Results {
    /// Which device, with its version.
    pub device: String,
    /// One for each case.
    pub records: Vec<Record>,
}

impl Results {
    /// The record of a case.
    pub fn of(&self, case: &Case) -> Option<&Record> {
        self.records.iter().find(|record| record.name == case.name)
    }

    /// Cases that went well, and those that did not.
    pub fn counts(&self) -> (usize, usize) {
        let departs = self.records.iter().filter(|record| record.departs.is_some()).count();
        (self.records.len() - departs, departs)
    }
}

/// Which departures are looked at again.
#[derive(Clone, Copy, Debug)]
pub enum Again {
    /// All: for a device that is not ours to blame for what it does now and then.
    All,
    /// Silence where an answer was due. A packet that is wrong is one that the device sent, however seldom it does.
    Silence,
}

/// Runs a case, again after departures that `again` has.
pub fn judge(bench: &mut Bench, case: &Case, again: Again) -> Result<Record> {
    attempts(case.name, again, || {
        bench.clear().with_context(|| format!("before {:?}", case.name))?;
        match (case.run)(bench) {
            Ok(()) => Ok(None),
            Err(Stop::Departs(what)) => Ok(Some(what)),
            Err(Stop::Trouble(error)) => Err(error.context(format!("in {:?}", case.name))),
        }
    })
}

/// Makes attempts, each of which gives what was seen if the device departs.
fn attempts(name: &str, again: Again, mut attempt: impl FnMut() -> Result<Option<String>>) -> Result<Record> {
    let mut before = Vec::new();
    let is_seen_again = |what: &str| match again {
        Again::All => true,
        Again::Silence => what.ends_with(SILENCE),
    };
    loop {
        let attempts = before.len() as u32 + 1;
        match attempt()? {
            Some(what) if attempts < ATTEMPTS && is_seen_again(&what) => before.push(what),
            departs => return Ok(Record { name: name.to_owned(), departs, attempts, before }),
        }
    }
}

/// The recorded results of rxe.
pub fn recorded_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("rxe.json")
}

/// The table for the repository.
pub fn table_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("TABLE.md")
}

/// Results of rxe as they were recorded last.
pub fn recorded() -> Result<Results> {
    let path = recorded_path();
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
}

/// The table as Markdown. What varies from run to run is left out, so that it can be compared.
pub fn table(cases: &[Case], ferroce: &Results, rxe: &Results) -> String {
    let (all, rxe_follows) = (cases.len(), rxe.counts().0);
    let departures = departures(cases, ferroce).count();
    let mut text = format!(
        "# Conformance\n\n\
         Made by `cargo xtask conformance --rxe --write`; compared with what Ferroce does by `cargo test`. The tester plays one end by\n\
         hand, the device is the other. Sections and compliance statements (C9-...) are those of the InfiniBand Architecture\n\
         Specification, volume 1; A17 is its annex on RoCEv2.\n\n\
         {all} cases. Ferroce follows in {}. {} follows in {rxe_follows}.\n\n\
         | case | clause | what the tester does | what the clause asks | Ferroce | rxe | where they differ |\n\
         |---|---|---|---|---|---|---|\n",
        all - departures,
        rxe.device,
    );
    for case in cases {
        let [ours, theirs] = [cell(ferroce.of(case)), cell(rxe.of(case))];
        let columns =
            [case.name, case.clause, case.stimulus, case.expectation, &ours, &theirs, &difference(case, ferroce, rxe)];
        let columns = columns.map(|column| column.replace('|', "\\|"));
        let _ = writeln!(text, "| {} |", columns.join(" | "));
    }
    text
}

fn cell(record: Option<&Record>) -> String {
    match record {
        None => "not run".to_owned(),
        Some(Record { departs: None, .. }) => "follows".to_owned(),
        Some(Record { departs: Some(what), .. }) => format!("departs: {}", steady(what)),
    }
}

/// Without numbers that differ from run to run: queue pairs and addresses.
fn steady(what: &str) -> String {
    let mut words = Vec::new();
    let mut hide = false;
    for word in what.split(' ') {
        words.push(if hide { "..." } else { word });
        hide = matches!(word, "qp" | "va" | "rkey");
    }
    words.join(" ")
}

fn difference(case: &Case, ferroce: &Results, rxe: &Results) -> String {
    let departs = |results: &Results| results.of(case).map(|record| record.departs.is_some());
    let who = match (departs(ferroce), departs(rxe)) {
        (Some(false), Some(true)) => "Ferroce follows the clause, rxe does not",
        (Some(true), Some(false)) => "rxe follows the clause, Ferroce does not",
        (Some(true), Some(true)) => "neither follows",
        _ => return String::new(),
    };
    if case.remark.is_empty() { who.to_owned() } else { format!("{who}: {}", case.remark) }
}

/// The table for people: one line for each case.
pub fn lines(cases: &[Case], ferroce: Option<&Results>, rxe: Option<&Results>) -> String {
    let width = cases.iter().map(|case| case.name.len()).max().unwrap_or_default();
    let mut text = String::new();
    for case in cases {
        let _ = write!(text, "{:width$}", case.name);
        for (name, results) in [("Ferroce", ferroce), ("rxe", rxe)] {
            let Some(record) = results.and_then(|results| results.of(case)) else { continue };
            match &record.departs {
                None if record.attempts > 1 => {
                    let _ =
                        write!(text, "  {name} follows at attempt {} (before: {})", record.attempts, record.before[0]);
                }
                None => {
                    let _ = write!(text, "  {name} follows");
                }
                Some(what) => {
                    let _ = write!(text, "  {name} DEPARTS: {what} [{}]", case.clause);
                }
            }
        }
        text.push('\n');
    }
    text
}

/// What is wrong with Ferroce's results.
pub fn faults(cases: &[Case], ferroce: &Results) -> Vec<String> {
    departures(cases, ferroce).chain(late(ferroce)).collect()
}

fn departures<'a>(cases: &'a [Case], ferroce: &'a Results) -> impl Iterator<Item = String> + 'a {
    cases.iter().filter_map(|case| {
        let what = ferroce.of(case)?.departs.as_ref()?;
        Some(format!("{}: {what} ({}: {})", case.name, case.clause, case.expectation))
    })
}

/// What is wrong if more cases than a busy machine explains went well at a later attempt only.
fn late(ferroce: &Results) -> Option<String> {
    let late: Vec<&str> =
        ferroce.records.iter().filter(|record| record.attempts > 1).map(|record| record.name.as_str()).collect();
    let most = (ferroce.records.len() * LATE_PERCENT / 100).max(1);
    (late.len() > most)
        .then(|| format!("{} cases, not {most} at most, needed another attempt: {}", late.len(), late.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_run_do_not_stand_in_the_table() {
        let text = "answered RC_ACKNOWLEDGE qp 0x4001 psn 0x001000 nak invalid request msn 0";
        assert_eq!(steady(text), "answered RC_ACKNOWLEDGE qp ... psn 0x001000 nak invalid request msn 0");
    }

    /// A device that is wrong now and then was said to follow.
    #[test]
    fn only_silence_is_looked_at_again() {
        let run = |seen: &[Option<&str>]| {
            let mut seen = seen.iter().map(|what| what.map(str::to_owned));
            attempts("case", Again::Silence, || Ok(seen.next().expect("no more attempts than that")))
                .expect("no trouble")
        };
        let wrong = "answered RC_ACKNOWLEDGE psn 1, not ACK psn 2";
        assert_eq!(run(&[Some(wrong)]).departs.as_deref(), Some(wrong));
        let late = run(&[Some(SILENCE), None]);
        assert_eq!((late.departs, late.attempts, late.before.len()), (None, 2, 1));
        let behind = format!("a good request behind it: {SILENCE}");
        assert_eq!(run(&[Some(&behind), Some(wrong)]).departs.as_deref(), Some(wrong));
        assert_eq!(run(&[Some(SILENCE); 3]).attempts, ATTEMPTS);
        let mut seen = [Some(wrong.to_owned()), None].into_iter();
        let other = attempts("case", Again::All, || Ok(seen.next().expect("two attempts"))).expect("no trouble");
        assert_eq!((other.departs, other.attempts), (None, 2));
    }

    #[test]
    fn more_late_cases_than_a_busy_machine_explains_are_a_fault() {
        let record =
            |at: u32, attempts| Record { name: format!("case {at}"), departs: None, attempts, before: Vec::new() };
        let results = |late: u32| Results {
            device: "Ferroce".to_owned(),
            records: (0..100).map(|at| record(at, if at < late { 2 } else { 1 })).collect(),
        };
        assert_eq!(faults(&[], &results(LATE_PERCENT as u32)), Vec::<String>::new());
        let faults = faults(&[], &results(LATE_PERCENT as u32 + 1));
        assert!(faults.len() == 1 && faults[0].starts_with("4 cases, not 3 at most"), "{faults:?}");
    }

    #[test]
    fn departures_are_faults() {
        let cases = crate::cases::cases();
        let record = |case: &Case, departs: bool| Record {
            name: case.name.to_owned(),
            departs: departs.then(|| "seen".to_owned()),
            attempts: 1,
            before: Vec::new(),
        };
        let results = |departs| Results {
            device: "Ferroce".to_owned(),
            records: cases.iter().map(|case| record(case, departs)).collect(),
        };
        assert_eq!(faults(&cases, &results(false)), Vec::<String>::new());
        assert_eq!(faults(&cases, &results(true)).len(), cases.len());
    }
}
