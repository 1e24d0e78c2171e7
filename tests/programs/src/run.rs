//! Runs lines, tells progress, counts, and writes the summary.

use std::collections::VecDeque;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::failure::Failure;
use crate::interrupt;
use crate::known::Known;
use crate::launch::Launcher;
use crate::line;
use crate::table::Line;

/// How a run is made.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How often all lines are run.
    pub rounds: u32,
    /// How many places are worked on at the same time.
    pub jobs: usize,
    /// End at the first failure.
    pub fail_fast: bool,
}

/// How a line ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It passed.
    Passed,
    /// It failed.
    Failed,
    /// It failed, and is on the list of known failures.
    KnownFailure,
}

/// One line's result.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Id of the line.
    pub line: String,
    /// Round, counted from 1.
    pub round: u32,
    /// How it ended.
    pub verdict: Verdict,
    /// Time that it took, in seconds.
    pub seconds: f64,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// All results of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Lines that passed, over all rounds.
    pub passed: usize,
    /// Lines that failed, over all rounds.
    pub failed: usize,
    /// Lines that failed as the list of known failures says.
    pub known_failures: usize,
    /// Each line of each round.
    pub lines: Vec<Outcome>,
}

/// Runs all lines as planned.
pub fn run(lines: &[Line], plan: Plan, known: &Known, launcher: &Launcher) -> Summary {
    let groups = by_place(lines);
    let total = lines.len() * plan.rounds as usize;
    let progress = Progress { total, summary: Mutex::new(Summary::default()), fail_fast: plan.fail_fast };
    for round in 1..=plan.rounds {
        let queue = Mutex::new(groups.iter().copied().collect::<VecDeque<_>>());
        let work = || {
            loop {
                let Some(group) = queue.lock().expect("no holder panics").pop_front() else { break };
                run_group(group, round, known, launcher, &progress);
            }
        };
        thread::scope(|scope| {
            for _ in 1..plan.jobs.max(1) {
                scope.spawn(work);
            }
            work();
        });
    }
    progress.summary.into_inner().expect("no holder panics")
}

/// Runs of lines in the same place.
fn by_place(lines: &[Line]) -> Vec<&[Line]> {
    lines.chunk_by(|a, b| a.place.name == b.place.name).collect()
}

/// Runs the lines of one place, which is made for them and removed afterwards.
fn run_group(group: &[Line], round: u32, known: &Known, launcher: &Launcher, progress: &Progress) {
    let mut wire = group[0].place.make();
    for line in group {
        if progress.stop() {
            return;
        }
        let begun = Instant::now();
        let result = match &wire {
            Ok(wire) => line::run(line, wire, launcher),
            Err(failure) => Err(Failure::new(format!("the place cannot be made: {failure}"))),
        };
        if interrupt::interrupted() {
            return;
        }
        let failed = result.is_err();
        progress.note(&line.id, round, result, known.reason(&line.id), begun.elapsed());
        if failed && wire.is_ok() {
            // A fault must not spread to the next line by a service that is stuck.
            drop(wire);
            wire = group[0].place.make();
        }
    }
}

struct Progress {
    total: usize,
    summary: Mutex<Summary>,
    fail_fast: bool,
}

impl Progress {
    fn stop(&self) -> bool {
        let failed = self.summary.lock().expect("no holder panics").failed > 0;
        interrupt::interrupted() || (self.fail_fast && failed)
    }

    fn note(&self, id: &str, round: u32, result: Result<(), Failure>, known: Option<&str>, took: Duration) {
        let (verdict, reason) = judge(result, known);
        let mut summary = self.summary.lock().expect("no holder panics");
        let done = summary.lines.len() + 1;
        let word = match verdict {
            Verdict::Passed => {
                summary.passed += 1;
                "ok"
            }
            Verdict::Failed => {
                summary.failed += 1;
                "FAILED"
            }
            Verdict::KnownFailure => {
                summary.known_failures += 1;
                "known failure"
            }
        };
        let round_text = if round > 1 { format!(" (round {round})") } else { String::new() };
        let mut text = format!("[{done}/{}] {id}{round_text} ... {word} ({:.1} s)\n", self.total, took.as_secs_f64());
        if let (Verdict::Failed, Some(reason)) = (verdict, &reason) {
            for line in reason.lines() {
                text += &format!("    {line}\n");
            }
        }
        // A closed stdout must not end the run: guards would not work.
        let _ = std::io::stdout().lock().write_all(text.as_bytes());
        let seconds = took.as_secs_f64();
        summary.lines.push(Outcome { line: id.to_owned(), round, verdict, seconds, reason });
    }
}

fn judge(result: Result<(), Failure>, known: Option<&str>) -> (Verdict, Option<String>) {
    match (result, known) {
        (Ok(()), None) => (Verdict::Passed, None),
        (Ok(()), Some(known)) => {
            let reason = format!("passes, but known.toml says that it fails ({known}): remove the entry");
            (Verdict::Failed, Some(reason))
        }
        (Err(failure), Some(known)) => (Verdict::KnownFailure, Some(format!("{known}\n{failure}"))),
        (Err(failure), None) => (Verdict::Failed, Some(failure.to_string())),
    }
}

impl Summary {
    /// The closing lines: which lines failed and how often, then the counts.
    pub fn closing(&self) -> String {
        let mut text = String::new();
        let mut told: Vec<&str> = Vec::new();
        for outcome in self.lines.iter().filter(|outcome| outcome.verdict == Verdict::Failed) {
            if told.contains(&outcome.line.as_str()) {
                continue;
            }
            told.push(&outcome.line);
            let same = |other: &&Outcome| other.line == outcome.line;
            let runs = self.lines.iter().filter(same).count();
            let failed = self.lines.iter().filter(same).filter(|other| other.verdict == Verdict::Failed).count();
            let first = outcome.reason.as_deref().unwrap_or_default().lines().next().unwrap_or_default();
            text += &format!("FAILED {failed} of {runs}: {}: {first}\n", outcome.line);
        }
        if self.known_failures > 0 {
            text += &format!("{} known failures\n", self.known_failures);
        }
        text + &format!("{} passed, {} failed\n", self.passed, self.failed)
    }

    /// Writes all results as JSON.
    pub fn write_json(&self, path: &Path) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(self).expect("plain data");
        std::fs::write(path, text + "\n").map_err(|e| Failure::new(format!("cannot write {}: {e}", path.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table;

    #[test]
    fn known_failures_do_not_count_and_known_passes_fail() {
        assert_eq!(judge(Ok(()), None).0, Verdict::Passed);
        assert_eq!(judge(Err(Failure::new("a")), None), (Verdict::Failed, Some("a".to_owned())));
        assert_eq!(judge(Err(Failure::new("a")), Some("b")), (Verdict::KnownFailure, Some("b\na".to_owned())));
        let (verdict, reason) = judge(Ok(()), Some("b"));
        assert_eq!(verdict, Verdict::Failed);
        assert!(reason.is_some_and(|reason| reason.contains("remove the entry")));
    }

    #[test]
    fn the_closing_lines_name_each_failure_once() {
        let progress = Progress { total: 3, summary: Mutex::new(Summary::default()), fail_fast: true };
        progress.note("p/a", 1, Err(Failure::new("hung").with("more")), None, Duration::ZERO);
        progress.note("p/a", 2, Ok(()), None, Duration::ZERO);
        progress.note("p/a", 3, Err(Failure::new("hung")), None, Duration::ZERO);
        assert!(progress.stop());
        let closing = progress.summary.into_inner().expect("no holder panics").closing();
        assert_eq!(closing, "FAILED 2 of 3: p/a: hung\n1 passed, 2 failed\n");
    }

    #[test]
    fn lines_of_a_place_are_run_together() {
        let lines = table::lines();
        let groups = by_place(&lines);
        assert_eq!(groups.len(), table::PLACES.len());
    }
}
