//! Build, test and release tasks: `cargo xtask --help`.

mod checks;
mod ci;
mod dist;
mod dylib;
mod process;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks of the Ferroce workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", disable_version_flag = true)]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Static checks only: layers, unsafe and its proofs, skipped tests, file length, documents.
    Check,
    /// Everything a change must pass: formatting, checks, clippy, documentation, release build, tests.
    Ci,
    /// Build a release and lay it out in target/ferroce/ (bin/ and lib/).
    Build,
    /// Build, then put bin/ and lib/ below a folder of your choice.
    Install {
        /// Folder that gets bin/ and lib/, for instance ~/.local
        #[arg(long)]
        prefix: PathBuf,
    },
}

fn main() -> ExitCode {
    let root = workspace_root();
    let result = match Args::parse().task {
        Task::Check => checks::run(&root),
        Task::Ci => ci::ci(&root),
        Task::Build => dist::build(&root).map(|_| ()),
        Task::Install { prefix } => dist::install(&root, &prefix),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The folder of the workspace's Cargo.toml.
fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_path_buf()
}
