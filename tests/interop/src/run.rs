//! Runs lines, tells progress, counts.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Instant;

use program_tests::interrupt;

use crate::counted::Counted;
use crate::line::{self, Options, References};
use crate::table::{self, Line};
use crate::trouble::{Blame, Trouble};
use crate::world::World;

/// How a run is made.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Number of the first round, from 1.
    pub first_round: u32,
    /// How many rounds there are.
    pub rounds: u32,
    /// A round takes its part of the lines ([`table::round`]), not all of them.
    pub rotate: bool,
    /// End at the first failure.
    pub fail_fast: bool,
    /// Tell what both ends counted.
    pub verbose: bool,
    /// How each line is run.
    pub options: Options,
}

impl Plan {
    /// All that is run: round and line.
    pub fn schedule(&self, lines: &[Line]) -> Vec<(u32, Line)> {
        let rounds = self.first_round..=self.first_round.saturating_add(self.rounds - 1);
        let of = |number| if self.rotate { table::round(lines, number) } else { lines.to_vec() };
        rounds.flat_map(|number| of(number).into_iter().map(move |line| (number, line))).collect()
    }

    /// The line's name in the output.
    fn name(&self, round: u32, line: &Line) -> String {
        if self.rounds == 1 && !self.rotate { line.id.clone() } else { format!("{} (round {round})", line.id) }
    }
}

/// Results of a run.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Lines that passed, over all rounds.
    pub passed: usize,
    /// Lines that failed.
    pub failed: Vec<Failed>,
    /// Attempts that failed for a reason that says nothing of the line, so that it was run once more: how often for each reason.
    pub repeated: BTreeMap<&'static str, usize>,
}

/// A line that failed.
#[derive(Clone, Debug)]
pub struct Failed {
    /// Its name in the output.
    pub name: String,
    /// Its id.
    pub id: String,
    /// First sentence of the reason.
    pub reason: String,
}

/// Runs lines as planned.
pub fn run(lines: &[Line], plan: &Plan, world: &mut World) -> Summary {
    let mut summary = Summary::default();
    let mut references = References::new();
    let schedule = plan.schedule(lines);
    for (index, (round, line)) in schedule.iter().enumerate() {
        if interrupt::interrupted() || (plan.fail_fast && !summary.failed.is_empty()) {
            break;
        }
        let name = plan.name(*round, line);
        let heading = format!("[{}/{}] {name}", index + 1, schedule.len());
        let begun = Instant::now();
        let attempt = attempts(&heading, line, plan, world, &mut references, &mut summary);
        if interrupt::interrupted() {
            break;
        }
        let seconds = begun.elapsed().as_secs_f64();
        match attempt.result {
            Ok(counted) => {
                summary.passed += 1;
                say(&format!("{heading} ... ok ({seconds:.1} s)\n"));
                if plan.verbose {
                    say(&indented(&counted.show()));
                }
            }
            Err(trouble) => {
                say(&format!("{heading} ... FAILED ({seconds:.1} s)\n{}", indented(&trouble.to_string())));
                let reason = format!("{}: {}", trouble.blame.word(), trouble.failure.what());
                summary.failed.push(Failed { name, id: line.id.clone(), reason });
            }
        }
        if attempt.hopeless {
            break;
        }
    }
    summary
}

/// Runs a line, and again where a failure says nothing of it.
fn attempts(
    heading: &str,
    line: &Line,
    plan: &Plan,
    world: &mut World,
    references: &mut References,
    summary: &mut Summary,
) -> Attempt {
    let mut last = attempt(line, plan, world, references);
    for _ in 1..ATTEMPTS {
        let Err(trouble) = &last.result else { break };
        let Some(reason) = excuse(trouble, last.begun) else { break };
        if last.hopeless || interrupt::interrupted() {
            break;
        }
        say(&format!("{heading}: once more: {reason}\n{}", indented(&trouble.to_string())));
        *summary.repeated.entry(reason).or_default() += 1;
        last = attempt(line, plan, world, references);
    }
    last
}

/// Attempts at a line that failed for a reason that says nothing of it.
const ATTEMPTS: u32 = 6;

/// Why a failure says nothing of the line, if so. `begun`: its programs had been started.
fn excuse(trouble: &Trouble, begun: bool) -> Option<&'static str> {
    // perftest compares two clocks before it reports, and complains or gives up where they do not agree.
    const CLOCK: [&str; 2] = ["Can't produce a report", "Correlation coefficient r^2"];
    // Its client connects when its server is about to listen: see the rows with -R.
    const EARLY: &str = "Event: RDMA_CM_EVENT_REJECTED; error: 8.";
    // It closes its event channel at the end without waiting for its thread, which may just be about to read it.
    const CHANNEL: &str = "rdma_get_cm_event: Bad file descriptor";
    // How its functions are called, in the kernel's traces.
    const RXE: &str = "rxe_";
    let text = trouble.to_string();
    match trouble.blame {
        // What breaks in rxe while it talks to Ferroce, Ferroce may have done.
        Blame::Guest | Blame::Network if begun && text.contains(RXE) => None,
        Blame::Guest | Blame::Network => Some("an emulated kernel may break by itself; this is a new guest"),
        Blame::Program | Blame::Protocol => {
            if CLOCK.iter().any(|complaint| text.contains(complaint)) {
                Some("perftest cannot measure the clock of a busy machine")
            } else if text.contains(EARLY) {
                Some("perftest's client connected before its server listened")
            } else if text.contains(CHANNEL) {
                Some("rping's thread found its event channel closed at the end")
            } else {
                None
            }
        }
    }
}

/// What came of a line.
struct Attempt {
    result: Result<Counted, Trouble>,
    /// The line's programs were about to be started, or had been.
    begun: bool,
    /// A guest that did not boot for this line will not boot for the next.
    hopeless: bool,
}

fn attempt(line: &Line, plan: &Plan, world: &mut World, references: &mut References) -> Attempt {
    let entered = world.enter(line.place);
    let begun = entered.is_ok();
    let hopeless = !begun && !world.has_guest();
    let result = entered
        .and_then(|()| line::run(line, world, &plan.options, references))
        .map_err(|trouble| blame(trouble, world));
    Attempt { result, begun, hopeless }
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
    /// The closing lines: what was run once more, which lines failed, then the counts.
    pub fn closing(&self) -> String {
        let mut text = String::new();
        for (reason, times) in &self.repeated {
            text += &format!("once more, {times} times: {reason}\n");
        }
        for Failed { name, id, reason } in &self.failed {
            text += &format!("FAILED {name}: {reason}\n    alone: cargo xtask interop run {id}\n");
        }
        format!("{text}{} passed, {} failed\n", self.passed, self.failed.len())
    }
}

#[cfg(test)]
mod tests {
    use program_tests::failure::Failure;

    use super::*;

    #[test]
    fn what_the_protocol_did_is_no_excuse() {
        let excuse = |trouble: &Trouble| super::excuse(trouble, true);
        assert!(excuse(&Trouble::protocol(Failure::new("wrong bytes"))).is_none());
        assert!(excuse(&Trouble::program(Failure::new("exited with 1"))).is_none());
        let clock = Failure::new("exited with 1").with("Can't produce a report".to_owned());
        assert!(excuse(&Trouble::protocol(clock)).is_some());
        let early = Failure::new("exited with 139").with("Event: RDMA_CM_EVENT_REJECTED; error: 8.".to_owned());
        assert!(excuse(&Trouble::protocol(early)).is_some());
        let rejected = Failure::new("exited with 1").with("Event: RDMA_CM_EVENT_REJECTED; error: 28.".to_owned());
        assert!(excuse(&Trouble::protocol(rejected)).is_none());
        let channel = Failure::new("exited with 255").with("rdma_get_cm_event: Bad file descriptor".to_owned());
        assert!(excuse(&Trouble::protocol(channel)).is_some());
        let clock = Failure::new("wrote to stderr: Correlation coefficient r^2: 0.704701 < 0.9");
        assert!(excuse(&Trouble::protocol(clock)).is_some());
    }

    /// Ferroce may crash the peer's kernel, now and then: that was run again until it went well.
    #[test]
    fn a_guest_that_breaks_in_rxe_while_programs_run_is_no_excuse() {
        let broken =
            |trace: &str| Trouble::guest(Failure::new("the guest's kernel is broken: Oops").with(trace.to_owned()));
        let in_rxe = "RIP: 0010:rxe_responder+0x8b/0x1e0 [rdma_rxe]";
        assert!(excuse(&broken(in_rxe), true).is_none());
        assert!(excuse(&broken(in_rxe), false).is_some(), "no packet of Ferroce was on its way");
        assert!(excuse(&broken("RIP: 0010:clockevents_program_event+0x1/0x2"), true).is_some());
        let unreachable = Failure::new("the guest does not answer from 10.88.0.2");
        assert!(excuse(&Trouble::network(unreachable.clone()), true).is_some());
        assert!(excuse(&Trouble::network(unreachable.with(in_rxe.to_owned())), true).is_none());
    }

    #[test]
    fn the_last_line_counts() {
        let failed =
            Failed { name: "a/b (round 7)".to_owned(), id: "a/b".to_owned(), reason: "guest: panic".to_owned() };
        let summary = Summary { passed: 3, failed: vec![failed], repeated: BTreeMap::from([("busy", 2)]) };
        let closing = "once more, 2 times: busy\nFAILED a/b (round 7): guest: panic\n    alone: cargo xtask interop run a/b\n\
                       3 passed, 1 failed\n";
        assert_eq!(summary.closing(), closing);
    }

    #[test]
    fn rounds_are_all_lines_or_parts_of_them() {
        let lines = table::lines();
        let plan = Plan { first_round: 1, rounds: 2, ..Plan::default() };
        assert_eq!(plan.schedule(&lines).len(), 2 * lines.len());
        let plan = Plan { first_round: 7, rounds: 3, rotate: true, ..Plan::default() };
        let schedule = plan.schedule(&lines);
        let of = |number| schedule.iter().filter(move |(round, _)| *round == number).map(|(_, line)| line.id.clone());
        for number in 7..10 {
            let expected: Vec<String> = table::round(&lines, number).into_iter().map(|line| line.id).collect();
            assert_eq!(of(number).collect::<Vec<_>>(), expected);
        }
        assert_eq!(schedule.iter().map(|(round, _)| *round).max(), Some(9));
        assert_eq!(plan.name(7, &lines[0]), format!("{} (round 7)", lines[0].id));
    }
}
