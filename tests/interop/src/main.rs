//! `interop-tests`: stock verbs programs between Ferroce and Linux's rxe. `interop-tests --help` is the manual.

#![deny(clippy::print_stdout, clippy::print_stderr, reason = "they panic on a closed pipe")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Parser, Subcommand};
use interop_tests::kernel::Kernel;
use interop_tests::line::Options;
use interop_tests::run::{Plan, Summary, run};
use interop_tests::table::{Line, lines, smoke};
use interop_tests::world::World;
use interop_tests::{agent, compile, image, needs};
use program_tests::known::matches;
use program_tests::launch::{Launcher, Via};
use program_tests::{interrupt, net};

/// Run stock verbs programs between Ferroce and the rxe of a Linux kernel in a virtual machine.
#[derive(Parser)]
#[command(
    name = "interop-tests",
    disable_version_flag = true,
    after_help = "\
Needs root (a network namespace and a tap device), QEMU, and once the package mirror, for Debian's kernel. Lines of which
captures are dissected (capture/) need tshark.

Examples:
  interop-tests list 1500-v4
  interop-tests smoke
  interop-tests run                               (the whole matrix)
  interop-tests run ib_read_bw --verbose          (lines that contain this)
  interop-tests run --set rc --rounds 100
  interop-tests run --set rc --first-round 41 --rounds 60
  interop-tests run 9000-v6/ib_send_bw/-n,50,-s,10000,-q,8/kernel-serves     (a line alone)

A round of the RC set takes every RC test in both directions: ibv_rc_pingpong; SEND, WRITE, READ and atomics of perftest for
latency and for bandwidth; verify. How (sizes, inline, events, SRQ, number of queue pairs, both ways at once) and where (MTU,
address family) follow from the round's number: 32 rounds run every line of the set, 100 every line three times or more.

A failure is said to be one of the guest, the network, a program, or the protocol.
The last line of a run is `N passed, N failed`; the exit code is 0 if none failed."
)]
struct Cli {
    #[command(subcommand)]
    command: Cmd,
}

#[derive(Subcommand)]
enum Cmd {
    /// Show the ids of lines.
    List(Filter),
    /// Run lines: all, or those chosen.
    Run {
        #[command(flatten)]
        filter: Filter,
        #[command(flatten)]
        settings: Settings,
    },
    /// Run the smoke set.
    Smoke(Settings),
}

#[derive(Args)]
struct Filter {
    /// Id of a line, a part of it, or a pattern with * at its start or end; none: all lines
    filters: Vec<String>,
    /// Only lines of this set
    #[arg(long, value_enum)]
    set: Option<Set>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Set {
    /// Reliable connections; each round takes a part of it
    Rc,
}

#[derive(Args)]
struct Settings {
    /// How many rounds are run; a round is all lines, or its part of a set
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of the first round
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    first_round: u32,
    /// End at the first failure
    #[arg(long)]
    fail_fast: bool,
    /// Tell what both ends counted, for each line
    #[arg(long)]
    verbose: bool,
    /// Install missing Debian packages
    #[arg(long)]
    install_packages: bool,
    /// Write captures of all lines into this folder: what Ferroce captured, and what passed the tap
    #[arg(long, value_name = "DIR")]
    captures: Option<PathBuf>,
    /// Variable for Ferroce's programs
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// What `cargo xtask build` made [default: target/ferroce of the workspace]
    #[arg(long, value_name = "DIR", env = "FERROCE_INSTALL")]
    install: Option<PathBuf>,
    /// Folder that keeps the guest's kernel [default: target/interop of the workspace]
    #[arg(long, value_name = "DIR", env = "FERROCE_INTEROP_CACHE")]
    cache: Option<PathBuf>,
    /// Number of the ordinary user that Ferroce's programs run as
    #[arg(long, default_value_t = 61_235, value_name = "UID", value_parser = clap::value_parser!(u32).range(1..))]
    uid: u32,
}

fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("must be NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn main() -> ExitCode {
    // In the guest the kernel starts this executable by this name.
    let result = if std::env::args_os().next().is_some_and(|name| name == "/init") {
        agent::main().map(|()| ExitCode::SUCCESS)
    } else {
        tool()
    };
    result.unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: {error:#}");
        ExitCode::from(2)
    })
}

fn tool() -> Result<ExitCode> {
    match Cli::parse().command {
        Cmd::List(filter) => list(&filter),
        Cmd::Run { filter, settings } => {
            select(&filter).and_then(|lines| execute(&lines, filter.set.is_some(), &settings))
        }
        Cmd::Smoke(settings) => execute(&smoke(), false, &settings),
    }
}

fn list(filter: &Filter) -> Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    for line in select(filter)? {
        if writeln!(out, "{}", line.id).is_err() {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The lines that one of the filters names.
fn select(filter: &Filter) -> Result<Vec<Line>> {
    let lines = lines();
    let chosen = |text: &str, id: &str| if text.contains('*') { matches(text, id) } else { id.contains(text) };
    for text in &filter.filters {
        if !lines.iter().any(|line| chosen(text, &line.id)) {
            bail!("no line matches {text:?}: see `interop-tests list`");
        }
    }
    let any = |line: &Line| filter.filters.is_empty() || filter.filters.iter().any(|text| chosen(text, &line.id));
    let in_set = |line: &Line| filter.set != Some(Set::Rc) || line.row.rc;
    Ok(lines.into_iter().filter(|line| any(line) && in_set(line)).collect())
}

/// Runs lines: in each round all of them, or the part of a set that is its own (`rotate`).
fn execute(lines: &[Line], rotate: bool, settings: &Settings) -> Result<ExitCode> {
    interrupt::install().context("cannot handle signals")?;
    let captures = settings.captures.is_some() || lines.iter().any(|line| line.row.capture.is_some());
    needs::check_all(settings.install_packages, captures)?;
    net::remove_leftovers();
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let cache = settings.cache.clone().unwrap_or_else(|| target.join("interop"));
    std::fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let kernel = Kernel::find(&cache)?;
    let install = settings.install.clone().unwrap_or_else(|| target.join("ferroce"));
    let launcher = Launcher::new(&install, Via::Run, settings.uid)?;
    program_tests::compile::all(&launcher.programs())?;
    compile::all(&launcher.programs())?;
    let own: Vec<PathBuf> = ["verify", "operations", "resources", "connect", "status"]
        .iter()
        .chain(compile::PROGRAMS)
        .map(|name| launcher.programs().join(name))
        .collect();
    let work = tempfile::Builder::new().prefix("ferroce-interop-").tempdir().context("cannot make a folder")?;
    let root = work.path().join("root.cpio");
    image::write(&kernel, &own, &root)?;
    if let Some(dir) = &settings.captures {
        make_captures_folder(dir)?;
    }
    say(&format!("Linux {} in the guest\n", kernel.release));
    let mut world = World::new(kernel, root, launcher).map_err(|trouble| anyhow!("{trouble}"))?;
    let plan = Plan {
        first_round: settings.first_round,
        rounds: settings.rounds,
        rotate,
        fail_fast: settings.fail_fast,
        verbose: settings.verbose,
        options: Options { captures: settings.captures.clone(), env: settings.env.clone() },
    };
    let summary = run(lines, &plan, &mut world);
    drop(world);
    conclude(&summary)
}

fn conclude(summary: &Summary) -> Result<ExitCode> {
    say(&summary.closing());
    if interrupt::interrupted() {
        bail!("interrupted: not all lines were run");
    }
    Ok(if summary.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A folder that the ordinary user may write to.
fn make_captures_folder(dir: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(dir)
        .and_then(|()| std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o777)))
        .with_context(|| format!("cannot make {}", dir.display()))
}

fn say(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}
