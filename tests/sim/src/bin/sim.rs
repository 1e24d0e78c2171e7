//! `sim`: runs seeds of the simulator, or one with its log.

use std::io::{self, BufWriter, IsTerminal, Write};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use clap::Parser;
use ferroce_sim::{Coverage, Failure, goodput};

/// Runs the transport over a simulated bad network, by seed, and checks everything it does.
#[derive(Debug, Parser)]
#[command(name = "sim")]
struct Args {
    /// How many seeds to run
    #[arg(long, default_value_t = 1000, conflicts_with = "seed")]
    seeds: u64,
    /// The first of them
    #[arg(long, default_value_t = 0, conflicts_with = "seed")]
    start: u64,
    /// Threads
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Go on after a failure and list all failing seeds
    #[arg(long)]
    keep_going: bool,
    /// Run only this seed
    #[arg(long)]
    seed: Option<u64>,
    /// Print the plan and all events of the seed
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Print the goodput table, and nothing else
    #[arg(long)]
    goodput: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    // A failed assertion is reported as a failure of its seed.
    std::panic::set_hook(Box::new(|info| {
        let _ = writeln!(io::stderr(), "{info}");
    }));
    let mut out = io::stdout().lock();
    let good = if args.goodput {
        write!(out, "{}", goodput::table()).is_ok()
    } else if let Some(seed) = args.seed {
        drop(out);
        one(seed, args.trace)
    } else {
        many(&args, &mut out)
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn one(seed: u64, trace: bool) -> bool {
    let sink = trace.then(|| Box::new(BufWriter::new(io::stdout())) as ferroce_sim::Sink);
    match ferroce_sim::run_traced(seed, sink) {
        Ok(report) => {
            let _ = writeln!(io::stdout(), "seed {seed}: good, {} ns, hash {:016x}", report.end, report.hash);
            true
        }
        Err(failure) => {
            report(&failure);
            false
        }
    }
}

fn many(args: &Args, out: &mut impl Write) -> bool {
    let begun = Instant::now();
    let next = AtomicU64::new(args.start);
    let stop = AtomicBool::new(false);
    let total = Mutex::new((Coverage::default(), 0u64, 0u64));
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.max(1) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed - args.start >= args.seeds {
                        return;
                    }
                    let result = ferroce_sim::run(seed);
                    let mut total = total.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    total.1 += 1;
                    match result {
                        Ok(report) => total.0.merge(&report.coverage),
                        Err(failure) => {
                            total.2 += 1;
                            report(&failure);
                            stop.fetch_or(!args.keep_going, Ordering::Relaxed);
                        }
                    }
                    if io::stderr().is_terminal() && total.1.is_multiple_of(500) {
                        let _ = writeln!(io::stderr(), "{} seeds", total.1);
                    }
                }
            });
        }
    });
    let (coverage, ran, failed) = total.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    let seconds = begun.elapsed().as_secs_f64();
    let _ = write!(out, "{coverage}");
    let _ = writeln!(
        out,
        "{ran} seeds from {}, {failed} failed, {seconds:.1} s, {:.0} seeds a second",
        args.start,
        ran as f64 / seconds
    );
    failed == 0
}

fn report(failure: &Failure) {
    let _ = writeln!(io::stderr(), "{failure}\n  commit: {}", commit());
}

/// The commit that the failure is of, as far as git knows.
fn commit() -> String {
    let output = Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=12"]).output();
    match output {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}
