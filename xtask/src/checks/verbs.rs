//! The table of verbs, `docs/verbs.toml`: it has every verb, names tests that exist, and `docs/verbs.md` is made from it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::page::{finding, line_of, renew};
use super::{Finding, Tree};
use crate::suite::passing;

const TABLE: &str = "docs/verbs.toml";
const PAGE: &str = "docs/verbs.md";
const SYMBOLS: &str = "crates/ibverbs/symbols.in";
const SOURCES: &str = "crates/ibverbs/src";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    section: Vec<Section>,
    #[serde(default)]
    event: Vec<Event>,
}

/// An asynchronous event: raised, as a test shows, or not, for which there is a reason.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Event {
    event: String,
    /// What raises it, or why nothing does.
    cause: String,
    /// Empty if nothing raises it.
    #[serde(default)]
    test: String,
}

/// `enum ibv_event_type` of rdma-core 65.
pub(super) const EVENTS: [&str; 21] = [
    "IBV_EVENT_CQ_ERR",
    "IBV_EVENT_QP_FATAL",
    "IBV_EVENT_QP_REQ_ERR",
    "IBV_EVENT_QP_ACCESS_ERR",
    "IBV_EVENT_COMM_EST",
    "IBV_EVENT_SQ_DRAINED",
    "IBV_EVENT_PATH_MIG",
    "IBV_EVENT_PATH_MIG_ERR",
    "IBV_EVENT_DEVICE_FATAL",
    "IBV_EVENT_PORT_ACTIVE",
    "IBV_EVENT_PORT_ERR",
    "IBV_EVENT_LID_CHANGE",
    "IBV_EVENT_PKEY_CHANGE",
    "IBV_EVENT_SM_CHANGE",
    "IBV_EVENT_SRQ_ERR",
    "IBV_EVENT_SRQ_LIMIT_REACHED",
    "IBV_EVENT_QP_LAST_WQE_REACHED",
    "IBV_EVENT_CLIENT_REREGISTER",
    "IBV_EVENT_GID_CHANGE",
    "IBV_EVENT_WQ_FATAL",
    "IBV_EVENT_DEVICE_SPEED_CHANGE",
];

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Section {
    title: String,
    verbs: Vec<Row>,
}

/// A verb on four devices.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    verb: String,
    ferroce: Support,
    rxe: Support,
    siw: Support,
    mlx5: Support,
    /// What proves the column of Ferroce; see [`Test`].
    test: String,
    #[serde(default)]
    note: String,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Support {
    Yes,
    Part,
    No,
}

impl Support {
    fn word(self) -> &'static str {
        match self {
            Support::Yes => "yes",
            Support::Part => "part",
            Support::No => "no",
        }
    }
}

/// Where a proof is.
#[derive(Debug, PartialEq, Eq)]
enum Test<'a> {
    /// `rdma-core 44: NAME`
    Suite { release: u32, name: &'a str },
    /// `FILE`, which calls the verb, or `FILE::FUNCTION`.
    Own { file: &'a str, function: Option<&'a str> },
}

impl Test<'_> {
    fn parse(text: &str) -> Option<Test<'_>> {
        if let Some(rest) = text.strip_prefix("rdma-core ") {
            let (release, name) = rest.split_once(": ")?;
            return Some(Test::Suite { release: release.parse().ok()?, name });
        }
        Some(match text.split_once("::") {
            Some((file, function)) => Test::Own { file, function: Some(function) },
            None => Test::Own { file: text, function: None },
        })
    }
}

/// Checks the table if this is the workspace of a libibverbs. A page that is not what the table says is written anew.
pub(super) fn check(tree: &Tree) -> Result<Vec<Finding>> {
    if !tree.root.join(SYMBOLS).is_file() {
        return Ok(Vec::new());
    }
    let Ok(text) = fs::read_to_string(tree.root.join(TABLE)) else {
        return Ok(vec![finding(
            TABLE,
            0,
            "is not there: it says what each verb does, and which test proves it".into(),
        )]);
    };
    let table: Table = match toml::from_str(&text) {
        Ok(table) => table,
        Err(error) => return Ok(vec![finding(TABLE, 0, format!("cannot be read: {error}"))]),
    };
    let rows: Vec<&Row> = table.section.iter().flat_map(|section| &section.verbs).collect();
    let sources = Sources::read(tree)?;
    let mut findings = missing_rows(&tree.root, &rows, &sources)?;
    let mut tests = Tests { root: &tree.root, suites: BTreeMap::new() };
    let mut seen = BTreeSet::new();
    for row in &rows {
        let mut wrong: Vec<String> = tests.complaint(&row.verb, &row.test).into_iter().collect();
        wrong.extend(sources.complaint(row));
        if !seen.insert(&row.verb) {
            wrong.push("has two rows".into());
        }
        if row.ferroce == Support::Part && row.note.is_empty() {
            wrong.push("works in part: its note must say which".into());
        }
        let line = line_of(&text, &format!("verb = \"{}\"", row.verb));
        findings.extend(wrong.into_iter().map(|what| finding(TABLE, line, format!("{} {what}", row.verb))));
    }
    findings.extend(events(&table.event, &mut tests, &text));
    findings.extend(renew(&tree.root, TABLE, PAGE, &render(&table))?);
    Ok(findings)
}

/// What is wrong with the rows of events, if there are any: then all must be there.
fn events(rows: &[Event], tests: &mut Tests<'_>, text: &str) -> Vec<Finding> {
    if rows.is_empty() {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for name in EVENTS {
        let count = rows.iter().filter(|row| row.event == name).count();
        if count != 1 {
            findings.push(finding(TABLE, 0, format!("{name} has {count} rows instead of one")));
        }
    }
    for row in rows {
        let complaint = match row.test.as_str() {
            "" => row.cause.is_empty().then(|| "has no test and no reason for that".to_owned()),
            test => tests.complaint(&row.event, test),
        };
        let line = line_of(text, &format!("event = \"{}\"", row.event));
        findings.extend(complaint.map(|what| finding(TABLE, line, format!("{} {what}", row.event))));
    }
    findings
}

/// Public symbols, and verbs behind inline functions, that no row is about.
fn missing_rows(root: &Path, rows: &[&Row], sources: &Sources) -> Result<Vec<Finding>> {
    let has_row = |name: &str| rows.iter().any(|row| row.verb == name);
    let symbols = fs::read_to_string(root.join(SYMBOLS)).with_context(|| format!("cannot read {SYMBOLS}"))?;
    let mut findings = Vec::new();
    for (index, line) in symbols.lines().enumerate() {
        let mut columns = line.split_whitespace();
        let (node, name) = (columns.next().unwrap_or_default(), columns.nth(1).unwrap_or_default());
        // A symbol with an underscore is behind an inline function without one.
        let name = name.trim_start_matches('_');
        if node.starts_with("IBVERBS_1.") && !has_row(name) {
            findings.push(finding(SYMBOLS, index + 1, format!("{name} is public and has no row in {TABLE}")));
        }
    }
    for name in sources.inline_verbs().filter(|name| !has_row(name)) {
        findings.push(finding(SOURCES, 0, format!("{name} has no row in {TABLE}")));
    }
    Ok(findings)
}

/// The text of the C library's crate, for a look at what its verbs do.
struct Sources(String);

impl Sources {
    fn read(tree: &Tree) -> Result<Sources> {
        let mut text = String::new();
        for file in tree.rust_files()?.iter().filter(|file| file.starts_with(SOURCES)) {
            text +=
                &fs::read_to_string(tree.root.join(file)).with_context(|| format!("cannot read {}", file.display()))?;
        }
        Ok(Sources(text))
    }

    /// Verbs that are slots of a dispatch table: `fn name as "verb"`.
    fn inline_verbs(&self) -> impl Iterator<Item = &str> {
        let after = self.0.split(" as \"").skip(1);
        after.filter_map(|rest| rest.split('"').next()).filter(|name| name.starts_with("ibv_"))
    }

    /// What follows the verb's name where it is defined, up to the next definition.
    fn definition(&self, verb: &str) -> Option<&str> {
        let names = [format!(" as \"{verb}\""), format!("fn {verb}("), format!("fn _{verb}(")];
        let rest = names.iter().find_map(|name| self.0.split_once(name.as_str()))?.1;
        let end = ["fn ", " as \""].iter().filter_map(|start| rest.find(start)).min();
        Some(&rest[..end.unwrap_or(rest.len())])
    }

    /// What the row says otherwise than the source does.
    fn complaint(&self, row: &Row) -> Option<String> {
        let definition = self.definition(&row.verb)?;
        // In the list of refusing slots the convention follows at once.
        let always = definition.starts_with(" -> ") || definition.contains("refused(");
        let perhaps = always || definition.contains("unsupported(");
        match row.ferroce {
            Support::No if !perhaps => Some(format!("is not refused in {SOURCES}, and the table says so")),
            Support::Yes | Support::Part if always => {
                Some(format!("is refused in {SOURCES}, and the table says that it works"))
            }
            _ => None,
        }
    }
}

/// Tests that exist.
struct Tests<'a> {
    root: &'a Path,
    suites: BTreeMap<u32, BTreeSet<String>>,
}

impl Tests<'_> {
    /// Why a test proves nothing about a verb, or an event.
    fn complaint(&mut self, name: &str, test: &str) -> Option<String> {
        match Test::parse(test) {
            None => Some(format!("names no test: {test:?}")),
            Some(Test::Suite { release, name }) => self.suite_complaint(release, name),
            Some(Test::Own { file, function }) => self.own_complaint(name, file, function),
        }
    }

    fn suite_complaint(&mut self, release: u32, name: &str) -> Option<String> {
        let root = self.root;
        let passed = self.suites.entry(release).or_insert_with(|| passing(root, release).unwrap_or_default());
        let passes = passed.contains(name);
        (!passes).then(|| format!("names {name}, which is not among what passes of rdma-core {release} (tests/suite)"))
    }

    fn own_complaint(&self, verb: &str, file: &str, function: Option<&str>) -> Option<String> {
        let Ok(text) = fs::read_to_string(self.root.join(file)) else {
            return Some(format!("names {file}, which cannot be read"));
        };
        match function {
            Some(function) if !text.contains(&format!("fn {function}(")) => {
                Some(format!("names {function}, which is not in {file}"))
            }
            None if !words(&text).any(|word| word.trim_start_matches('_') == verb) => {
                Some(format!("is not called in {file}"))
            }
            _ => None,
        }
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}

const HEAD: &str = "\
# Verbs

What each verb does on Ferroce, on the kernel's software devices rxe (RoCE) and siw (iWARP), and on mlx5, the cards that rdma-core
serves most completely; and the test that proves the column of Ferroce.

*yes*: it works. *part*: some of it does; the note says what. *no*: it is refused, with EOPNOTSUPP.

Tests are rdma-core's own, by release and name (`cargo xtask suite`, for 56 with `--trixie`), or files of ours that call the verb. The
other columns are by what the providers in rdma-core and the kernel's drivers fill in; nothing of them was measured for this table.

Made from verbs.toml by `cargo xtask check`.
";

fn render(table: &Table) -> String {
    let mut page = HEAD.to_owned();
    page += "\n| verbs | yes | part | no |\n|---|--:|--:|--:|\n";
    count(&mut page, table, "Ferroce", |row| row.ferroce);
    count(&mut page, table, "rxe", |row| row.rxe);
    count(&mut page, table, "siw", |row| row.siw);
    count(&mut page, table, "mlx5", |row| row.mlx5);
    for section in &table.section {
        line(&mut page, format_args!("\n## {}\n", section.title));
        page += "| verb | Ferroce | rxe | siw | mlx5 | test | note |\n|---|---|---|---|---|---|---|\n";
        for Row { verb, ferroce, rxe, siw, mlx5, test, note } in &section.verbs {
            let [ferroce, rxe, siw, mlx5] = [ferroce, rxe, siw, mlx5].map(|support| support.word());
            let test = shown(test);
            line(&mut page, format_args!("| `{verb}` | {ferroce} | {rxe} | {siw} | {mlx5} | {test} | {note} |"));
        }
    }
    if !table.event.is_empty() {
        page +=
            "\n## Asynchronous events\n\n| event | raised | cause, or why there is none | test |\n|---|---|---|---|\n";
    }
    for Event { event, cause, test } in &table.event {
        let raised = if test.is_empty() { "no" } else { "yes" };
        let test = if test.is_empty() { String::new() } else { shown(test) };
        line(&mut page, format_args!("| `{event}` | {raised} | {cause} | {test} |"));
    }
    page
}

/// How many verbs a device has.
fn count(page: &mut String, table: &Table, device: &str, column: fn(&Row) -> Support) {
    let rows = || table.section.iter().flat_map(|section| &section.verbs);
    let of = |support| rows().filter(|row| column(row) == support).count();
    let [yes, part, no] = [Support::Yes, Support::Part, Support::No].map(of);
    line(page, format_args!("| {device} | {yes} | {part} | {no} |"));
}

fn line(page: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(page, "{text}").expect("a string takes everything");
}

/// A test as the page shows it.
fn shown(test: &str) -> String {
    match Test::parse(test) {
        Some(Test::Suite { release, name }) => format!("{release}: {}", name.trim_start_matches("tests.")),
        Some(Test::Own { file, function }) => {
            let name = file.rsplit('/').next().unwrap_or(file);
            let function = function.map(|function| format!(": {function}")).unwrap_or_default();
            format!("[{name}](../{file}){function}")
        }
        None => test.to_owned(),
    }
}
