//! `program-tests`: runs foreign verbs programs on Ferroce. `program-tests --help` is the manual.

#![deny(clippy::print_stdout, clippy::print_stderr, reason = "they panic on a closed pipe")]

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use program_tests::chroot::Chroot;
use program_tests::known::{Known, matches};
use program_tests::launch::{Launcher, System, Via};
use program_tests::run::{Plan, Summary, run};
use program_tests::table::{Line, lines, smoke};
use program_tests::{compile, interrupt, net};

/// Run foreign verbs programs, unmodified, on Ferroce.
#[derive(Parser)]
#[command(
    name = "program-tests",
    disable_version_flag = true,
    after_help = "\
Root is needed to make network namespaces; the programs run as an ordinary user.

Lines with `/trixie/` run perftest of Debian 13, which is newer, in a chroot. They are there once the
chroot is; `run --trixie` makes it (needs debootstrap and the package mirror), `list --trixie` shows
them all the same.

Examples:
  program-tests list veth9000
  program-tests smoke --rounds 20
  program-tests run                               (the whole matrix)
  program-tests run host-v4/ib_write_bw           (this line alone)
  program-tests run ib_read_ '*/-D,5' --json result.json
  program-tests run --trixie /trixie/             (Debian 13's programs alone)

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
        options: Options,
    },
    /// Run the smoke set, some 30 lines.
    Smoke(Options),
}

#[derive(Args)]
struct Filter {
    /// Id of a line, a part of ids, or a pattern with * at its start or end; none: all lines
    filters: Vec<String>,
    /// Debian 13's programs, too, also if their chroot is not there yet
    #[arg(long)]
    trixie: bool,
    /// Where the chroot of Debian 13 is, or is to be made [default: target/trixie of the workspace]
    #[arg(long, value_name = "DIR", env = "FERROCE_TRIXIE")]
    trixie_dir: Option<PathBuf>,
}

#[derive(Args)]
struct Options {
    /// How often each line is run
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// How many places are worked on at the same time
    #[arg(long, default_value_t = 1, value_name = "N")]
    jobs: usize,
    /// End at the first failure
    #[arg(long)]
    fail_fast: bool,
    /// Write all results here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// What `cargo xtask build` made [default: target/ferroce of the workspace]
    #[arg(long, value_name = "DIR", env = "FERROCE_INSTALL")]
    install: Option<PathBuf>,
    /// What makes programs use Ferroce
    #[arg(long, value_enum, default_value_t = Via::Run)]
    via: Via,
    /// Number of the ordinary user
    #[arg(long, default_value_t = 61_234, value_name = "UID", value_parser = clap::value_parser!(u32).range(1..))]
    uid: u32,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Cmd::List(filter) => list(&filter),
        Cmd::Run { filter, options } => {
            filter.lines().and_then(|lines| execute(&lines, Some(&filter.trixie_dir()), &options))
        }
        Cmd::Smoke(options) => execute(&smoke(), None, &options),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn list(filter: &Filter) -> Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    for line in filter.lines()? {
        if writeln!(out, "{}", line.id).is_err() {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Filter {
    fn trixie_dir(&self) -> PathBuf {
        self.trixie_dir.clone().unwrap_or_else(|| default_folder("trixie"))
    }

    fn lines(&self) -> Result<Vec<Line>> {
        select(lines(), &self.filters, self.trixie || Chroot::find(&self.trixie_dir()).is_ok())
    }
}

/// The lines that one of the filters names; Debian 13's only `with_trixie`.
fn select(mut lines: Vec<Line>, filters: &[String], with_trixie: bool) -> Result<Vec<Line>> {
    let ids: BTreeSet<String> = lines.iter().map(|line| line.id.clone()).collect();
    let chosen = |filter: &str, id: &str| {
        // A whole id means that line alone, although it may be the start of others.
        if filter.contains('*') || ids.contains(filter) { matches(filter, id) } else { id.contains(filter) }
    };
    for filter in filters {
        let mut matching = lines.iter().filter(|line| chosen(filter, &line.id)).peekable();
        if matching.peek().is_none() {
            bail!("no line matches {filter:?}: see `program-tests list`");
        }
        if !with_trixie && matching.all(|line| line.system == System::Trixie) {
            bail!("{filter:?} names programs of Debian 13, whose chroot is not there: give --trixie");
        }
    }
    lines.retain(|line| with_trixie || line.system == System::Own);
    Ok(lines
        .into_iter()
        .filter(|line| filters.is_empty() || filters.iter().any(|filter| chosen(filter, &line.id)))
        .collect())
}

/// Runs lines; programs of Debian 13 in the folder `trixie`.
fn execute(lines: &[Line], trixie: Option<&Path>, options: &Options) -> Result<ExitCode> {
    interrupt::install().context("cannot handle signals")?;
    net::remove_leftovers();
    let known = Known::built_in()?;
    let install = options.install.clone().unwrap_or_else(|| default_folder("ferroce"));
    let mut launcher = Launcher::new(&install, options.via, options.uid)?;
    if let Some(dir) = trixie.filter(|_| lines.iter().any(|line| line.system == System::Trixie)) {
        let chroot = Chroot::find_or_make(dir, &launcher.output())?;
        let what = format!("Debian 13's perftest is {}, in {}", chroot.perftest(), chroot.dir().display());
        let _ = writeln!(std::io::stderr(), "{what}");
        launcher = launcher.with_trixie(chroot);
    }
    compile::all(&launcher.programs())?;
    let plan = Plan { rounds: options.rounds, jobs: options.jobs, fail_fast: options.fail_fast };
    let summary = run(lines, plan, &known, &launcher);
    conclude(&summary, options)
}

fn conclude(summary: &Summary, options: &Options) -> Result<ExitCode> {
    if let Some(path) = &options.json {
        summary.write_json(path)?;
    }
    let _ = std::io::stdout().lock().write_all(summary.closing().as_bytes());
    if interrupt::interrupted() {
        bail!("interrupted: not all lines were run");
    }
    Ok(if summary.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Where xtask leaves an installation and Debian 13, if nobody says otherwise.
fn default_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target").join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(filters: &[&str]) -> Result<Vec<String>> {
        let filters: Vec<String> = filters.iter().map(|&filter| filter.to_owned()).collect();
        Ok(select(lines(), &filters, true)?.into_iter().map(|line| line.id).collect())
    }

    #[test]
    fn filters_choose_lines() {
        assert_eq!(ids(&[]).expect("all").len(), lines().len());
        assert_eq!(ids(&["host-v4/ib_write_lat/-a*"]).expect("one").len(), 1);
        assert!(ids(&["ib_atomic"]).expect("many").iter().all(|id| id.contains("/ib_atomic")));
        assert_eq!(ids(&["host-v4/ib_atomic_lat", "host-v4/ib_read_lat/-e"]).expect("two").len(), 2);
        assert_eq!(ids(&["loop-v4/trixie/ib_write_bw"]).expect("one").len(), 1);
        assert!(ids(&["no_such_program"]).is_err_and(|e| e.to_string().contains("program-tests list")));
    }

    #[test]
    fn programs_of_debian_13_are_there_only_if_asked_for() {
        let select = |filter: &str| select(lines(), &[filter.to_owned()], false);
        let found = select("ib_write_bw").expect("the machine's own");
        assert!(!found.is_empty() && found.iter().all(|line| line.system == System::Own));
        assert!(select("/trixie/").is_err_and(|e| e.to_string().contains("give --trixie")));
        assert!(select("/trixy/").is_err_and(|e| e.to_string().contains("no line matches")));
    }
}
