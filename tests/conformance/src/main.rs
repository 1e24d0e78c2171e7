//! `ferroce-conformance`: plays one end by hand and judges the other. `ferroce-conformance --help` is the manual.

#![deny(clippy::print_stdout, clippy::print_stderr, reason = "they panic on a closed pipe")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use ferroce_conformance::cases::{Case, cases};
use ferroce_conformance::place::{self, Install};
use ferroce_conformance::report::{self, Results};

/// Judge Ferroce, and the rxe of a Linux kernel, by the InfiniBand specification, packet by packet.
#[derive(Parser)]
#[command(
    name = "ferroce-conformance",
    disable_version_flag = true,
    after_help = "\
Ferroce needs no privilege: the tester makes a user and a network namespace (unshare, iproute2, gcc, libibverbs-dev).
rxe needs root, QEMU, and once the package mirror, for Debian's kernel.

Examples:
  ferroce-conformance list
  ferroce-conformance run                   (Ferroce)
  ferroce-conformance run RNR --verbose     (cases that contain this)
  ferroce-conformance run --rxe --write     (both devices; TABLE.md and rxe.json anew)

The exit code is 0 if Ferroce follows in every case."
)]
struct Cli {
    #[command(subcommand)]
    command: Cmd,
}

#[derive(Subcommand)]
enum Cmd {
    /// Show the cases with their clauses.
    List,
    /// Run cases: all, or those that contain one of the words.
    Run(Run),
    /// The tester in Ferroce's namespace (started by `run`).
    #[command(hide = true)]
    PlayFerroce { install: PathBuf, names: Vec<String> },
    /// The tester at the guest's tap (started by `run`).
    #[command(hide = true)]
    PlayGuest { tap: String, names: Vec<String> },
}

#[derive(Args)]
struct Run {
    /// Part of a case's name
    filters: Vec<String>,
    /// Run the kernel's rxe too
    #[arg(long)]
    rxe: bool,
    /// Leave Ferroce out
    #[arg(long, conflicts_with = "write")]
    no_ferroce: bool,
    /// Write TABLE.md, and with --rxe the record of rxe
    #[arg(long, conflicts_with = "filters")]
    write: bool,
    /// Results as JSON
    #[arg(long)]
    json: bool,
    /// Install missing Debian packages
    #[arg(long)]
    install_packages: bool,
    /// What `cargo xtask build` made [default: target/ferroce of the workspace]
    #[arg(long, value_name = "DIR", env = "FERROCE_INSTALL")]
    install: Option<PathBuf>,
    /// Folder that keeps the guest's kernel [default: target/interop of the workspace]
    #[arg(long, value_name = "DIR", env = "FERROCE_INTEROP_CACHE")]
    cache: Option<PathBuf>,
}

fn main() -> ExitCode {
    // In the guest the kernel starts this executable by this name.
    let result = if std::env::args_os().next().is_some_and(|name| name == "/init") {
        interop_tests::agent::main().map(|()| ExitCode::SUCCESS)
    } else {
        tool(Cli::parse().command)
    };
    result.unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: {error:#}");
        ExitCode::from(2)
    })
}

fn tool(command: Cmd) -> Result<ExitCode> {
    match command {
        Cmd::List => {
            for case in cases() {
                say(&format!("{}  [{}]\n", case.name, case.clause));
            }
        }
        Cmd::Run(settings) => return run(&settings),
        Cmd::PlayFerroce { install, names } => results(&place::play_ferroce(&Install(install), &named(&names))?)?,
        Cmd::PlayGuest { tap, names } => results(&place::play_guest(&tap, &named(&names))?)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn results(results: &Results) -> Result<()> {
    say(&serde_json::to_string(results)?);
    Ok(())
}

/// The cases of these names; all if there are none.
fn named(names: &[String]) -> Vec<Case> {
    cases().into_iter().filter(|case| names.is_empty() || names.iter().any(|name| name == case.name)).collect()
}

fn run(settings: &Run) -> Result<ExitCode> {
    let all = cases();
    let chosen: Vec<Case> = all
        .iter()
        .filter(|case| settings.filters.is_empty() || settings.filters.iter().any(|part| case.name.contains(part)))
        .copied()
        .collect();
    if chosen.is_empty() {
        bail!("no case has that name: see `ferroce-conformance list`");
    }
    let names: Vec<&str> =
        if settings.filters.is_empty() { Vec::new() } else { chosen.iter().map(|case| case.name).collect() };
    let program = std::env::current_exe().context("which file is this program?")?;
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let ferroce = if settings.no_ferroce {
        None
    } else {
        let install = settings.install.clone().unwrap_or_else(|| target.join("ferroce"));
        Some(place::ferroce(&Install(install), &program, &names)?)
    };
    let rxe = if settings.rxe {
        let cache = settings.cache.clone().unwrap_or_else(|| target.join("interop"));
        Some(place::rxe(&program, &names, &cache, settings.install_packages)?)
    } else {
        None
    };
    if settings.json {
        say(&serde_json::to_string_pretty(&[&ferroce, &rxe])?);
    } else {
        say(&report::lines(&chosen, ferroce.as_ref(), rxe.as_ref()));
    }
    for results in [&ferroce, &rxe].into_iter().flatten() {
        let (follows, departs) = results.counts();
        let _ = writeln!(std::io::stderr(), "{} follows in {follows} cases, departs in {departs}", results.device);
    }
    if settings.write {
        write(&all, ferroce.as_ref(), rxe)?;
    }
    let faults = ferroce.map_or_else(Vec::new, |results| report::faults(&chosen, &results));
    for fault in &faults {
        let _ = writeln!(std::io::stderr(), "FAULT {fault}");
    }
    Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn write(cases: &[Case], ferroce: Option<&Results>, rxe: Option<Results>) -> Result<()> {
    let rxe = match rxe {
        Some(results) => {
            std::fs::write(report::recorded_path(), serde_json::to_string_pretty(&results)? + "\n")?;
            results
        }
        None => report::recorded()?,
    };
    let ferroce = ferroce.context("the table needs Ferroce's results")?;
    std::fs::write(report::table_path(), report::table(cases, ferroce, &rxe)).context("cannot write the table")
}

fn say(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}
