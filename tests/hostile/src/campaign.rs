//! Many seeds of [`Machine`].

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use ferroce_transport::{Count, Drop};

use crate::machine::{KIND_COUNT, Machine};
use crate::recorded;
use crate::source::{Seed, Source};

/// Operations of one seed.
const STEPS: u32 = 4_000;

/// What a campaign did.
#[derive(Debug)]
pub struct Report {
    /// Seeds run.
    pub seeds: u64,
    /// Packets that arrived.
    pub packets: u64,
    /// Those that were packets, with the right ICRC.
    pub delivered: u64,
    /// Times that a queue pair was connected.
    pub connections: u64,
    /// Packets dropped by the queue pairs, by reason.
    pub drops: BTreeMap<String, u64>,
    /// What else was counted.
    pub counts: BTreeMap<String, u64>,
    /// Since the start.
    pub time: Duration,
}

impl Report {
    /// How often packets were dropped for a reason.
    pub fn dropped(&self, reason: Drop) -> u64 {
        self.drops.get(&format!("{reason:?}")).copied().unwrap_or(0)
    }

    /// How often something was counted.
    pub fn counted(&self, what: Count) -> u64 {
        self.counts.get(&format!("{what:?}")).copied().unwrap_or(0)
    }

    fn add(&mut self, machine: &Machine) {
        let link = machine.link();
        let bad = link.rx_too_short + link.rx_icrc_errors + link.rx_bad_version + link.rx_bad_pad;
        self.seeds += 1;
        self.packets += link.rx_packets;
        self.delivered += link.rx_packets - bad;
        self.connections += u64::from(machine.lives());
        for (reason, count) in &machine.host().drops {
            *self.drops.entry(format!("{reason:?}")).or_default() += u64::from(*count);
        }
        for (what, count) in &machine.host().counts {
            *self.counts.entry(format!("{what:?}")).or_default() += u64::from(*count);
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.packets as f64 / self.time.as_secs_f64();
        writeln!(
            f,
            "{} packets, {} of them good, over {} connections of {} seeds in {:.1?} ({rate:.0} a second)",
            self.packets, self.delivered, self.connections, self.seeds, self.time
        )?;
        writeln!(f, "dropped: {:?}", self.drops)?;
        write!(f, "counted: {:?}", self.counts)
    }
}

/// Runs seeds from `first` on, as long as `more` wants.
///
/// # Panics
/// What must hold does not. The seed stands on standard error, and `run(seed, ...)` does it again.
pub fn run(first: u64, more: impl Fn(&Report) -> bool) -> Report {
    let recorded = recorded::packets();
    let start = Instant::now();
    let mut report = Report {
        seeds: 0,
        packets: 0,
        delivered: 0,
        connections: 0,
        drops: BTreeMap::new(),
        counts: BTreeMap::new(),
        time: Duration::ZERO,
    };
    while more(&report) {
        report.add(&one(first + report.seeds, &recorded));
        report.time = start.elapsed();
    }
    report
}

fn one(seed: u64, recorded: &[Vec<u8>]) -> Machine {
    let mut done = 0;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let mut source = Seed::new(seed);
        let mut machine = Machine::new(source.below(KIND_COUNT), recorded.to_vec());
        while done < STEPS {
            machine.step(&mut source);
            done += 1;
        }
        machine
    }));
    outcome.unwrap_or_else(|panic| {
        eprintln!(
            "seed {seed} failed in operation {done}: `hostile-tests machine --packets 1 --seed {seed}` runs it again"
        );
        resume_unwind(panic)
    })
}
