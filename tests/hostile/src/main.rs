//! `hostile-tests`: long runs of what `cargo test -p hostile-tests` does briefly. `hostile-tests --help` is the manual.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use hostile_tests::{campaign, legit, live};

/// Attack Ferroce.
#[derive(Parser)]
#[command(name = "hostile-tests", disable_version_flag = true)]
struct Cli {
    #[command(subcommand)]
    command: Cmd,
}

#[derive(Subcommand)]
enum Cmd {
    /// Mutated packets straight into queue pairs on the simulated host; the same seed does the same
    Machine {
        /// Packets in all
        #[arg(long, default_value_t = 1_000_000, value_name = "N")]
        packets: u64,
        /// First seed; each runs 4,000 operations
        #[arg(long, default_value_t = 1, value_name = "N")]
        seed: u64,
    },
    /// Mutated packets over sockets against a process with queue pairs of each type; needs `ferroced` beside this program
    Live {
        /// Packets in all
        #[arg(long, default_value_t = 100_000, value_name = "N")]
        packets: u64,
        /// Of the packets; their order in time is the machine's
        #[arg(long, default_value_t = 1, value_name = "N")]
        seed: u64,
        /// Use this network namespace instead of a fresh one
        #[arg(long)]
        here: bool,
    },
    /// A process that others connect to (started by this program)
    #[command(name = legit::PEER_COMMAND, hide = true)]
    Peer,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hostile-tests: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Cmd) -> Result<()> {
    match command {
        Cmd::Machine { packets, seed } => println!("{}", campaign::run(seed, |report| report.packets < packets)),
        Cmd::Live { here: false, .. } => return Err(in_fresh_namespace()),
        Cmd::Live { packets, seed, here: true } => {
            let report = live::attack(packets, seed)?;
            print!("{report}");
            let missing = report.missing();
            ensure!(packets < live::ENOUGH || missing.is_empty(), "ways that no packet went: {}", missing.join(", "));
        }
        Cmd::Peer => legit::peer(&live::loopback()?.open()?)?,
    }
    Ok(())
}

/// Becomes this program in a network namespace of its own, where loopback is all there is. Comes back only if that fails.
fn in_fresh_namespace() -> anyhow::Error {
    let again = || -> Result<std::io::Error> {
        let program = std::env::current_exe().context("which file is this program?")?;
        let mut command = Command::new("unshare");
        command.args(["-rn", "sh", "-c", "ip link set lo up && exec \"$0\" \"$@\" --here"]).arg(program);
        Ok(command.args(std::env::args_os().skip(1)).exec())
    };
    match again() {
        Ok(error) => anyhow::Error::new(error).context("cannot run `unshare -rn`"),
        Err(error) => error,
    }
}
