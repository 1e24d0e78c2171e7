//! One seed from beginning to end.

use std::fmt;
use std::panic::{self, AssertUnwindSafe};

use ferroce_transport::Nanos;

use crate::coverage::Coverage;
use crate::log::{Log, Millis, Sink};
use crate::plan::Plan;
use crate::random::Random;
use crate::world::World;

/// What a run that found nothing wrong tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Hash of all events: equal for equal runs.
    pub hash: u64,
    /// Virtual time at the end.
    pub end: Nanos,
    /// What happened.
    pub coverage: Coverage,
}

/// Something is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The seed that shows it.
    pub seed: u64,
    /// Virtual time; `None` if an assertion of the transport (or of the simulator) failed.
    pub at: Option<Nanos>,
    /// What was found.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}", self.seed)?;
        if let Some(at) = self.at {
            write!(f, " at {}", Millis(at))?;
        }
        write!(f, ": {}\n  replay: cargo run --release -p ferroce-sim -- --seed {} --trace", self.what, self.seed)
    }
}

impl std::error::Error for Failure {}

/// Runs a seed.
pub fn run(seed: u64) -> Result<Report, Failure> {
    run_traced(seed, None)
}

/// Runs a seed and writes down what happens, a line for each event.
pub fn run_traced(seed: u64, sink: Option<Sink>) -> Result<Report, Failure> {
    let result = panic::catch_unwind(AssertUnwindSafe(|| {
        let plan = Plan::from_seed(seed);
        let mut log = Log::new(sink);
        log.remark(0, || format!("{plan:#?}"));
        // The plan's own numbers are drawn; what happens under way draws from another sequence.
        let mut world = World::new(plan, log, Random::new(!seed));
        world.run();
        world.judge();
        world
    }));
    match result {
        Ok(mut world) => match world.complaint.take() {
            None => Ok(Report { hash: world.log.hash(), end: world.now, coverage: world.cover }),
            Some(what) => {
                world.log.remark(world.now, || format!("WRONG: {what}"));
                Err(Failure { seed, at: Some(world.now), what })
            }
        },
        Err(payload) => {
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Err(Failure { seed, at: None, what: format!("assertion: {text}") })
        }
    }
}
