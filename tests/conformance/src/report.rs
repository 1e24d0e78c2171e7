//! Verdicts, and the table made of them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::bench::{Bench, Stop};
use crate::cases::Case;

/// A device that departs does so each time: what a busy machine did is gone at the next attempt.
const ATTEMPTS: u32 = 3;

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

/// Runs a case, again if the device seems to depart.
pub fn judge(bench: &mut Bench, case: &Case) -> Result<Record> {
    let mut before = Vec::new();
    loop {
        bench.clear().with_context(|| format!("before {:?}", case.name))?;
        let attempts = before.len() as u32 + 1;
        let departs = match (case.run)(bench) {
            Ok(()) => None,
            Err(Stop::Departs(what)) => Some(what),
            Err(Stop::Trouble(error)) => return Err(error.context(format!("in {:?}", case.name))),
        };
        match departs {
            Some(what) if attempts < ATTEMPTS => before.push(what),
            departs => return Ok(Record { name: case.name.to_owned(), departs, attempts, before }),
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
    let faults = faults(cases, ferroce).len();
    let mut text = format!(
        "# Conformance\n\n\
         Made by `cargo xtask conformance --rxe --write`; compared with what Ferroce does by `cargo test`. The tester plays one end by\n\
         hand, the device is the other. Sections and compliance statements (C9-...) are those of the InfiniBand Architecture\n\
         Specification, volume 1; A17 is its annex on RoCEv2.\n\n\
         {all} cases. Ferroce follows in {}. {} follows in {rxe_follows}.\n\n\
         | case | clause | what the tester does | what the clause asks | Ferroce | rxe | where they differ |\n\
         |---|---|---|---|---|---|---|\n",
        all - faults,
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
    let fault = |case: &Case| {
        let what = ferroce.of(case)?.departs.as_ref()?;
        Some(format!("{}: {what} ({}: {})", case.name, case.clause, case.expectation))
    };
    cases.iter().filter_map(fault).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_run_do_not_stand_in_the_table() {
        let text = "answered RC_ACKNOWLEDGE qp 0x4001 psn 0x001000 nak invalid request msn 0";
        assert_eq!(steady(text), "answered RC_ACKNOWLEDGE qp ... psn 0x001000 nak invalid request msn 0");
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
