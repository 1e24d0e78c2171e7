//! `hostile-tests`: long runs of what `cargo test -p hostile-tests` does briefly. `hostile-tests --help` is the manual.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use hostile_tests::campaign;

/// Attack Ferroce.
#[derive(Parser)]
#[command(name = "hostile-tests", disable_version_flag = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Mutated packets straight into queue pairs on the simulated host; the same seed does the same
    Machine {
        /// Packets in all
        #[arg(long, default_value_t = 1_000_000, value_name = "N")]
        packets: u64,
        /// First seed; each runs 4,000 operations
        #[arg(long, default_value_t = 1, value_name = "N")]
        seed: u64,
    },
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Machine { packets, seed } => {
            let report = campaign::run(seed, |report| report.packets < packets);
            println!("{report}");
        }
    }
    ExitCode::SUCCESS
}
