//! Runs lines, tells progress, counts.

use std::io::Write;
use std::time::Instant;

use program_tests::interrupt;

use crate::counted::Counted;
use crate::line::{self, Options, References};
use crate::table::Line;
use crate::trouble::{Blame, Trouble};
use crate::world::World;

/// How a run is made.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// How often all lines are run.
    pub rounds: u32,
    /// End at the first failure.
    pub fail_fast: bool,
    /// Tell what both ends counted.
    pub verbose: bool,
    /// How each line is run.
    pub options: Options,
}

/// Results of a run.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Lines that passed, over all rounds.
    pub passed: usize,
    /// Lines that failed: id, and the first sentence of the reason.
    pub failed: Vec<(String, String)>,
}

/// Runs all lines as planned.
pub fn run(lines: &[Line], plan: &Plan, world: &mut World) -> Summary {
    let mut summary = Summary::default();
    let total = lines.len() * plan.rounds as usize;
    let mut number = 0;
    let mut references = References::new();
    for round in 1..=plan.rounds {
        for line in lines {
            if interrupt::interrupted() || (plan.fail_fast && !summary.failed.is_empty()) {
                return summary;
            }
            number += 1;
            let begun = Instant::now();
            let mut attempt = attempt(line, plan, world, &mut references);
            for _ in 1..ATTEMPTS {
                let Err(trouble) = &attempt.result else { break };
                let Some(reason) = excuse(trouble) else { break };
                if attempt.hopeless || interrupt::interrupted() {
                    break;
                }
                say(&format!(
                    "[{number}/{total}] {}: once more: {reason}\n{}",
                    line.id,
                    indented(&trouble.to_string())
                ));
                attempt = self::attempt(line, plan, world, &mut references);
            }
            let Attempt { result, hopeless } = attempt;
            if interrupt::interrupted() {
                return summary;
            }
            let mut text = format!("[{number}/{total}] {}", line.id);
            if plan.rounds > 1 {
                text += &format!(" (round {round})");
            }
            let seconds = begun.elapsed().as_secs_f64();
            match result {
                Ok(counted) => {
                    summary.passed += 1;
                    text += &format!(" ... ok ({seconds:.1} s)\n");
                    if plan.verbose {
                        text += &indented(&counted.show());
                    }
                }
                Err(trouble) => {
                    text += &format!(" ... FAILED ({seconds:.1} s)\n{}", indented(&trouble.to_string()));
                    summary
                        .failed
                        .push((line.id.clone(), format!("{}: {}", trouble.blame.word(), trouble.failure.what())));
                }
            }
            say(&text);
            if hopeless {
                return summary;
            }
        }
    }
    summary
}

/// Attempts at a line that failed for a reason that says nothing of it.
const ATTEMPTS: u32 = 6;

/// Why a failure says nothing of the line, if so.
fn excuse(trouble: &Trouble) -> Option<&'static str> {
    // perftest compares two clocks before it reports, and complains or gives up where they do not agree.
    const CLOCK: [&str; 2] = ["Can't produce a report", "Correlation coefficient r^2"];
    match trouble.blame {
        Blame::Guest | Blame::Network => Some("an emulated kernel may break by itself; this is a new guest"),
        Blame::Program | Blame::Protocol => {
            let text = trouble.to_string();
            let clock = CLOCK.iter().any(|complaint| text.contains(complaint));
            clock.then_some("perftest cannot measure the clock of a busy machine")
        }
    }
}

/// What came of a line.
struct Attempt {
    result: Result<Counted, Trouble>,
    /// A guest that did not boot for this line will not boot for the next.
    hopeless: bool,
}

fn attempt(line: &Line, plan: &Plan, world: &mut World, references: &mut References) -> Attempt {
    let entered = world.enter(line.place);
    let hopeless = entered.is_err() && !world.has_guest();
    let result = entered
        .and_then(|()| line::run(line, world, &plan.options, references))
        .map_err(|trouble| blame(trouble, world));
    Attempt { result, hopeless }
}

fn say(text: &str) {
    // A closed stdout must not end the run: guards would not work.
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

/// Looks whether guest and network are in order before a program or the protocol is blamed; a broken guest is given up,
/// so that the next line boots a new one.
fn blame(trouble: Trouble, world: &mut World) -> Trouble {
    let trouble = match world.check() {
        Ok(()) => Trouble { failure: trouble.failure.with(format!("kernel log:\n{}", world.kernel_log())), ..trouble },
        Err(deeper) if trouble.blame != Blame::Guest => {
            Trouble { blame: deeper.blame, failure: deeper.failure.with(format!("seen after: {trouble}")) }
        }
        Err(_) => trouble,
    };
    if matches!(trouble.blame, Blame::Guest | Blame::Network) {
        world.drop_guest();
    }
    trouble
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

impl Summary {
    /// The closing lines: which lines failed, then the counts.
    pub fn closing(&self) -> String {
        let failed: String = self.failed.iter().map(|(id, reason)| format!("FAILED {id}: {reason}\n")).collect();
        format!("{failed}{} passed, {} failed\n", self.passed, self.failed.len())
    }
}

#[cfg(test)]
mod tests {
    use program_tests::failure::Failure;

    use super::*;

    #[test]
    fn what_the_protocol_did_is_no_excuse() {
        assert!(excuse(&Trouble::protocol(Failure::new("wrong bytes"))).is_none());
        assert!(excuse(&Trouble::program(Failure::new("exited with 1"))).is_none());
        assert!(excuse(&Trouble::guest(Failure::new("panic"))).is_some());
        let clock = Failure::new("exited with 1").with("Can't produce a report".to_owned());
        assert!(excuse(&Trouble::protocol(clock)).is_some());
        let clock = Failure::new("wrote to stderr: Correlation coefficient r^2: 0.704701 < 0.9");
        assert!(excuse(&Trouble::protocol(clock)).is_some());
    }

    #[test]
    fn the_last_line_counts() {
        let summary = Summary { passed: 3, failed: vec![("a/b".to_owned(), "guest: panic".to_owned())] };
        assert_eq!(summary.closing(), "FAILED a/b: guest: panic\n3 passed, 1 failed\n");
    }
}
