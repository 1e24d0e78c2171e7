//! `cargo xtask bench --goals`: stock programs on Ferroce against TCP, UCX, libfabric and rxe, beside the ratio that is wanted.
//!
//! What is measured is data (`rows.rs`). Each run goes through all rows; both sides of a ratio are measured one right after the other,
//! and what several rows of a set compare with is measured once in a run. The table shows medians and what lies around them.

mod bench;
mod counted;
mod guest;
mod parse;
mod plot;
mod profile;
mod report;
mod rows;
mod subject;

use std::path::{Path, PathBuf};

pub(crate) use self::profile::Under;
use anyhow::{Context, Result, anyhow, bail};
use program_tests::interrupt;

use self::bench::Bench;
use self::profile::{Files, Profiler};
use self::report::{Outcome, Profiled};
use self::rows::{Row, rows};
use self::subject::{Measure, Sample, Subject, Where};
use crate::process::{print, say};

/// Which rows, and what becomes of them.
#[derive(clap::Args)]
pub(crate) struct GoalArgs {
    /// With --goals: only rows whose name contains this, capitals or not; more than once: any of them
    #[arg(long, value_name = "FILTER", requires = "goals")]
    row: Vec<String>,
    /// With --goals: only show the names of rows
    #[arg(long, requires = "goals")]
    list: bool,
    /// With --goals: print JSON for programs
    #[arg(long, requires = "goals", conflicts_with = "list")]
    json: bool,
    /// With --goals: draw bandwidth and rate of messages by size, of the rows that are measured
    #[arg(long, value_name = "FILE.svg", requires = "goals", conflicts_with = "list")]
    plot: Option<PathBuf>,
    /// With --goals: run each program once more under a profiler; instructions, cycles and cache misses for each packet of each end are
    /// shown below the table (and in the JSON), and DIR gets its data and a report for people
    #[arg(long, value_name = "DIR", requires = "goals", conflicts_with = "list")]
    profile: Option<PathBuf>,
    /// With --profile: who counts [default: perf where the machine counts instructions, else callgrind]
    #[arg(long, requires = "profile")]
    profiler: Option<Profiler>,
}

/// Refuses what cannot be meant, and shows what could be measured if that is all that is asked for: then nothing else is to be done.
pub(crate) fn only_listed(args: &GoalArgs) -> Result<bool> {
    let rows = chosen(args)?;
    if args.list {
        rows.iter().for_each(|row| print(row.id()));
    }
    Ok(args.list)
}

/// Measures and shows; an error if anything that could be measured failed.
pub(crate) fn measure(install: &Path, args: &GoalArgs, runs: u32, seconds: f64) -> Result<()> {
    let rows = chosen(args)?;
    if let Some(path) = &args.plot {
        // Better now than in an hour.
        std::fs::write(path, "").with_context(|| format!("cannot write {}", path.display()))?;
    }
    let profiles = args.profile.as_deref().map(|dir| profile_folder(dir, args.profiler)).transpose()?;
    let mut bench = Bench::new(install, seconds);
    let mut outcomes: Vec<Outcome> = rows.iter().map(|row| Outcome::new(row, missing(&mut bench, row))).collect();
    if let Some(why) = outcomes.iter().map(|outcome| outcome.missing.as_ref()).collect::<Option<Vec<_>>>() {
        bail!("nothing of that can be measured here: {}", why.first().map_or("no rows", |why| why.as_str()));
    }
    for run in 1..=runs {
        one_run(&mut bench, &mut outcomes, &format!("run {run} of {runs}"))?;
    }
    let profiled = match profiles {
        Some((profiler, dir)) => profile_all(&mut bench, &outcomes, profiler, &dir)?,
        None => Vec::new(),
    };
    if args.json {
        print(report::json(&outcomes, &profiled, runs, seconds));
    } else {
        report::table(&outcomes).iter().for_each(print);
        report::profiles(&profiled).iter().for_each(print);
    }
    if let Some(path) = &args.plot {
        let drawn = plot::svg(&outcomes)?;
        std::fs::write(path, drawn).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let unprofiled = profiled.iter().filter(|profiled| profiled.has_failed()).count();
    match outcomes.iter().filter(|outcome| !outcome.errors.is_empty()).count() {
        0 if unprofiled == 0 => Ok(()),
        0 => bail!("{unprofiled} of {} profiles failed; why is above", profiled.len()),
        failed => bail!("{failed} of {} rows failed, at least once; why is above", outcomes.len()),
    }
}

/// Makes the folder, and finds out who can profile: better now than in an hour.
fn profile_folder(dir: &Path, wanted: Option<Profiler>) -> Result<(Profiler, PathBuf)> {
    let profiler = Profiler::choose(wanted)?;
    let cannot = || format!("cannot make the folder {}", dir.display());
    std::fs::create_dir_all(dir).with_context(cannot)?;
    // Programs begin elsewhere.
    Ok((profiler, dir.canonicalize().with_context(cannot)?))
}

/// Profiles what was measured, each subject once.
fn profile_all(bench: &mut Bench, outcomes: &[Outcome<'_>], profiler: Profiler, dir: &Path) -> Result<Vec<Profiled>> {
    let passing = tempfile::tempdir().context("cannot make a temporary folder")?;
    let rows: Vec<&Row> =
        outcomes.iter().filter(|outcome| outcome.missing.is_none()).map(|outcome| outcome.row).collect();
    let subjects = subjects(&rows);
    let mut profiled = Vec::new();
    for (number, (name, subject)) in subjects.iter().enumerate() {
        let ends = (subject.place != Where::Guest).then(|| {
            let files = Files::new(passing.path(), dir, name);
            bench.profile(subject, profiler, &files).map_err(|error| format!("{error:#}"))
        });
        interrupt::check().map_err(|failure| anyhow!("{failure}"))?;
        let profile = Profiled { name: name.clone(), profiler, ends };
        say(format_args!("profile {} of {}: {name}: {}", number + 1, subjects.len(), profile.in_words()));
        profiled.push(profile);
    }
    Ok(profiled)
}

/// What rows measure, each once, with names that tell them apart.
fn subjects(rows: &[&Row]) -> Vec<(String, Subject)> {
    let mut subjects: Vec<(String, Subject)> = Vec::new();
    let name = |row: &Row| format!("{}: {}", row.set, row.label());
    let ours = rows.iter().map(|row| (name(row), row.ours));
    let theirs = rows.iter().filter_map(|row| Some((format!("{}: {}", name(row), row.with()), row.theirs?)));
    for (name, subject) in ours.chain(theirs) {
        if !subjects.iter().any(|(_, known)| *known == subject) {
            subjects.push((name, subject));
        }
    }
    subjects
}

/// The rows that the user named.
fn chosen(args: &GoalArgs) -> Result<Vec<Row>> {
    let mut rows = rows();
    let words: Vec<String> = args.row.iter().map(|word| word.to_lowercase()).collect();
    for word in &words {
        if !rows.iter().any(|row| row.id().to_lowercase().contains(word)) {
            bail!("no row's name contains {word:?}: --goals --list shows them");
        }
    }
    rows.retain(|row| words.is_empty() || words.iter().any(|word| row.id().to_lowercase().contains(word)));
    if args.plot.is_some() && !rows.iter().any(|row| row.set == rows::Set::Sizes) {
        bail!("--plot draws rows of the set `sizes`, and none of those is chosen");
    }
    Ok(rows)
}

/// Why a row cannot be measured here, if so.
fn missing(bench: &mut Bench, row: &Row) -> Option<String> {
    [Some(row.ours), row.theirs].into_iter().flatten().find_map(|subject| bench.missing(&subject))
}

fn one_run(bench: &mut Bench, outcomes: &mut [Outcome<'_>], run: &str) -> Result<()> {
    let total = outcomes.len();
    let mut known = Known::default();
    for (number, outcome) in outcomes.iter_mut().enumerate() {
        if outcome.missing.is_some() {
            continue;
        }
        let row = outcome.row;
        known.enter(row);
        let ours = known.sample(bench, &row.ours, row.measure);
        let theirs = row.theirs.map(|theirs| known.sample(bench, &theirs, row.measure));
        interrupt::check().map_err(|failure| anyhow!("{failure}"))?;
        let added = outcome.add(ours, theirs);
        say(format_args!("{run}, row {} of {total}: {}: {added}", number + 1, row.id()));
    }
    Ok(())
}

/// What a subject gave: numbers, or an error in words.
type Measured = Result<Sample, String>;

/// What this run measured of the present set.
#[derive(Default)]
struct Known {
    set: Option<rows::Set>,
    samples: Vec<(Subject, Measured)>,
}

impl Known {
    /// What another set measured may be from some time ago.
    fn enter(&mut self, row: &Row) {
        if self.set.replace(row.set) != Some(row.set) {
            self.samples.clear();
        }
    }

    /// Rows of a set that measure CPU time do so for all of them.
    fn sample(&mut self, bench: &mut Bench, subject: &Subject, measure: Measure) -> Measured {
        if let Some((_, measured)) = self.samples.iter().find(|(known, _)| known == subject) {
            return measured.clone();
        }
        let measured = bench.run(subject, measure).map_err(|error| format!("{error:#}"));
        self.samples.push((*subject, measured.clone()));
        measured
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(row: &[&str]) -> GoalArgs {
        let row = row.iter().map(|word| (*word).to_owned()).collect();
        GoalArgs { row, list: true, json: false, plot: None, profile: None, profiler: None }
    }

    #[test]
    fn rows_are_chosen_by_parts_of_their_names() {
        assert_eq!(chosen(&named(&[])).expect("all").len(), rows().len());
        let chosen_rows = chosen(&named(&["objects: ", "QUEUE PAIRS: write"])).expect("some");
        assert!(chosen_rows.iter().all(|row| matches!(row.set, rows::Set::Memory | rows::Set::QueuePairs)));
        assert!(chosen_rows.len() > 12);
        let error = chosen(&named(&["goals", "no such row"])).expect_err("none");
        assert!(error.to_string().contains("no such row"), "{error}");
        let plotted = |word| GoalArgs { list: false, plot: Some("a.svg".into()), ..named(&[word]) };
        assert!(chosen(&plotted("sizes: ")).is_ok());
        assert!(chosen(&plotted("objects: ")).expect_err("nothing to draw").to_string().contains("--plot"));
    }

    #[test]
    fn a_subject_is_profiled_once_under_a_name_of_its_own() {
        let all = rows();
        let subjects = subjects(&all.iter().collect::<Vec<_>>());
        let names: std::collections::BTreeSet<String> =
            subjects.iter().map(|(name, _)| profile::file_name(name)).collect();
        assert_eq!(names.len(), subjects.len());
        assert!(subjects.len() < 2 * all.len());
        assert!(
            names.contains("goals-write-1-mib-one-host") && names.contains("goals-write-1-mib-one-host-tcp-iperf3"),
            "{names:#?}"
        );
    }

    #[test]
    fn what_cannot_be_measured_is_not_tried() {
        let all = rows();
        let mut outcomes = [Outcome::new(&all[0], Some("no such program".into()))];
        one_run(&mut Bench::new(Path::new("/nowhere"), 1.0), &mut outcomes, "run").expect("nothing to do");
        assert!(outcomes[0].errors.is_empty() && outcomes[0].ours.is_empty());
    }
}
