//! Build, test and release tasks: `cargo xtask --help`.

mod checks;

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
}

fn main() -> ExitCode {
    let result = match Args::parse().task {
        Task::Check => checks::run(&workspace_root()),
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
