//! The table of what rdma-core's tests do, `docs/suite.toml`: every test that passes has a row, which names lines of the matrix and of the
//! interop bench that exist, or says why there is none. `docs/suite.md` is made from it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::page::{finding, line_of, renew};
use super::{Finding, Tree};
use crate::suite::passing;

const TABLE: &str = "docs/suite.toml";
const PAGE: &str = "docs/suite.md";
/// Where the lines are, with two processes and with rxe, and those of the first with a procedure of their own.
const PAIRS: &str = "tests/programs/src/table.rs";
const SCENARIOS: &str = "tests/programs/src/scenario/mod.rs";
const RXE: &str = "tests/interop/src/table.rs";
/// Programs whose features a row may name.
const PROGRAMS: &str = "tests/programs";
/// Releases of rdma-core whose tests are run.
const RELEASES: [u32; 2] = [44, 56];

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    row: Vec<Row>,
}

/// Tests that do the same.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    what: String,
    /// Names without `tests.`; a `*` stands for any part.
    tests: Vec<String>,
    #[serde(default)]
    pair: Vec<String>,
    #[serde(default)]
    rxe: Vec<String>,
    /// Why `pair` is empty.
    #[serde(default)]
    alone: String,
    /// Why `rxe` is empty.
    #[serde(default)]
    no_rxe: String,
}

impl Row {
    fn has(&self, test: &str) -> bool {
        self.tests.iter().any(|pattern| matches(pattern, test))
    }
}

/// Checks the table if this is the workspace of the programs. A page that is not what the table says is written anew.
pub(super) fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let root = &tree.root;
    if !root.join(PAIRS).is_file() {
        return Ok(Vec::new());
    }
    let Ok(text) = fs::read_to_string(root.join(TABLE)) else {
        return Ok(vec![finding(TABLE, 0, "is not there: it says which lines do what rdma-core's tests do".into())]);
    };
    let table: Table = match toml::from_str(&text) {
        Ok(table) => table,
        Err(error) => return Ok(vec![finding(TABLE, 0, format!("cannot be read: {error}"))]),
    };
    let tests = passing_tests(root);
    let lines = Lines::read(root)?;
    let mut findings = tests_in_wrong_number(&tests, &table);
    for row in &table.row {
        let mut wrong = unknown_tests(row, &tests);
        wrong.extend(lines.complaints(row));
        let line = line_of(&text, &format!("what = {:?}", row.what));
        findings.extend(wrong.into_iter().map(|what| finding(TABLE, line, format!("{:?} {what}", row.what))));
    }
    findings.extend(renew(root, TABLE, PAGE, &render(&table, &tests))?);
    Ok(findings)
}

/// What passes of any release, without `tests.`.
fn passing_tests(root: &Path) -> BTreeSet<String> {
    let all = RELEASES.into_iter().flat_map(|release| passing(root, release).unwrap_or_default());
    all.map(|name| name.trim_start_matches("tests.").to_owned()).collect()
}

/// `*` stands for any part, once.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, end)) => name.strip_prefix(start).is_some_and(|rest| rest.ends_with(end)),
    }
}

fn tests_in_wrong_number(tests: &BTreeSet<String>, table: &Table) -> Vec<Finding> {
    let rows = |test: &str| table.row.iter().filter(|row| row.has(test)).count();
    let wrong = tests.iter().map(|test| (test, rows(test))).filter(|(_, rows)| *rows != 1);
    wrong.map(|(test, rows)| finding(TABLE, 0, format!("{test} passes and is in {rows} rows instead of one"))).collect()
}

fn unknown_tests(row: &Row, tests: &BTreeSet<String>) -> Vec<String> {
    let unknown = row.tests.iter().filter(|pattern| !tests.iter().any(|test| matches(pattern, test)));
    unknown.map(|pattern| format!("names {pattern}, and no test of that name passes")).collect()
}

/// The sources of the lines.
struct Lines<'a> {
    root: &'a Path,
    pairs: String,
    scenarios: String,
    rxe: String,
}

impl Lines<'_> {
    fn read(root: &Path) -> Result<Lines<'_>> {
        let read = |path| fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {path}"));
        Ok(Lines { root, pairs: read(PAIRS)?, scenarios: read(SCENARIOS)?, rxe: read(RXE)? })
    }

    /// What is wrong with a row's lines.
    fn complaints(&self, row: &Row) -> Vec<String> {
        let mut wrong = Vec::new();
        for (lines, reason, name) in [(&row.pair, &row.alone, "alone"), (&row.rxe, &row.no_rxe, "no_rxe")] {
            if lines.is_empty() == reason.is_empty() {
                wrong.push(format!("needs either lines or a reason in `{name}`"));
            }
        }
        let pairs = row.pair.iter().filter_map(|line| self.complaint(line, false));
        wrong.extend(pairs.chain(row.rxe.iter().filter_map(|line| self.complaint(line, true))));
        wrong
    }

    fn complaint(&self, line: &str, with_rxe: bool) -> Option<String> {
        let (name, feature) = line.split_once(": ").map_or((line, None), |(name, feature)| (name, Some(feature)));
        let (program, options) = name.split_once('/').unwrap_or((name, ""));
        let row = format!("(\"{program}\", \"{}\"", options.replace(',', " "));
        let exists = if with_rxe {
            self.rxe.contains(&row)
        } else {
            self.pairs.contains(&row) || self.scenarios.contains(&format!("scenario(\"{name}\","))
        };
        if !exists {
            return Some(format!("names a line {name}, which is not in {}", if with_rxe { RXE } else { PAIRS }));
        }
        feature.and_then(|feature| self.feature_complaint(program, feature, with_rxe))
    }

    /// A feature is a line of the program's list: name, functions, and which parts rxe has.
    fn feature_complaint(&self, program: &str, feature: &str, with_rxe: bool) -> Option<String> {
        let path = format!("{PROGRAMS}/{program}.c");
        let text = fs::read_to_string(self.root.join(&path)).unwrap_or_default();
        let Some(line) = text.lines().find(|line| line.contains(&format!("\"{feature}\","))) else {
            return Some(format!("names {feature}, which is not in {path}"));
        };
        let lacks = line.trim_end().ends_with(", 0),") || line.trim_end().ends_with(", 0},");
        (with_rxe && lacks).then(|| format!("names {feature} with rxe, which has no part of it by {path}"))
    }
}

const HEAD: &str = "\
# rdma-core's tests between two processes

rdma-core's own tests play both ends in one process. Which lines do the same between two processes, and which between Ferroce and the
kernel's rxe, across the wire; or why none does.

Lines of the second column are run by `cargo xtask matrix`, in many places (one host, two network namespaces, a bridge; MTUs; address
families); those of the third by `cargo xtask interop`, in both directions. Behind a colon stands a feature of the line's program, which
it tries with either end as the requester; what rxe lacks, the program knows, says, and makes sure of.

Made from suite.toml by `cargo xtask check`.
";

fn render(table: &Table, tests: &BTreeSet<String>) -> String {
    let mut page = HEAD.to_owned();
    for row in &table.row {
        let covered: Vec<&String> = tests.iter().filter(|test| row.has(test)).collect();
        let (pair, rxe) = (shown(&row.pair, &row.alone), shown(&row.rxe, &row.no_rxe));
        line(&mut page, format_args!("\n## {}\n", row.what));
        page += "| test | two processes | with rxe |\n|---|---|---|\n";
        for test in covered {
            line(&mut page, format_args!("| {test} | {pair} | {rxe} |"));
        }
    }
    page
}

fn line(page: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(page, "{text}").expect("a string takes everything");
}

fn shown(lines: &[String], reason: &str) -> String {
    let lines: Vec<String> = lines.iter().map(|line| format!("`{line}`")).collect();
    if lines.is_empty() { format!("none: {reason}") } else { lines.join(", ") }
}
