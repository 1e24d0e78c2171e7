//! Build, test and release tasks: `cargo xtask --help`.

mod bench;
mod bindings;
mod checks;
mod ci;
mod conformance;
mod demo;
mod dist;
mod dylib;
mod goals;
mod interop;
mod pair;
mod process;
mod programs;
mod suite;

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
    /// Everything a change must pass: formatting, checks, clippy, documentation, release build, tests, stock programs.
    Ci,
    /// Build a release and lay it out in target/ferroce/ (bin/ and lib/).
    Build,
    /// Build, then put bin/ and lib/ below a folder of your choice.
    Install {
        /// Folder that gets bin/ and lib/, for instance ~/.local
        #[arg(long)]
        prefix: PathBuf,
    },
    /// Build, and show two processes at work: verified contents, speed, stock programs.
    Demo,
    /// Build, and measure the table of README: Ferroce and TCP on loopback and on a veth pair (as root).
    Bench(bench::BenchArgs),
    /// Build, and run the test suites and examples of the crates `ibverbs` and `sideway` (needs cmake and libclang).
    Bindings,
    /// Build, and run stock programs in all places (as root; long). Arguments choose lines.
    Matrix {
        /// What `program-tests run` takes: parts of lines' names, --rounds N, --fail-fast, --trixie (Debian 13's perftest too) ...
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Build, and judge Ferroce by the specification, packet by packet; with --rxe the rxe of a Linux kernel too (as root).
    Conformance {
        /// What `ferroce-conformance run` takes: parts of cases' names, --rxe, --write, --json ...
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Build, and run rdma-core's own test suite on Ferroce, in one run and test by test.
    Suite(suite::SuiteArgs),
    /// Build, and run stock programs between Ferroce and the rxe of a Linux kernel in QEMU (as root; long).
    Interop {
        /// What `interop-tests` takes [default: run]: smoke, list, run LINES --rounds N --set rc ...
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    // In the virtual machine of `bench --goals` the kernel starts this executable by this name.
    if std::env::args_os().next().is_some_and(|name| name == "/init") {
        return done(interop_tests::agent::main());
    }
    let root = workspace_root();
    let result = match Args::parse().task {
        Task::Check => checks::run(&root),
        Task::Ci => ci::ci(&root),
        Task::Build => dist::build(&root).map(|_| ()),
        Task::Demo => demo::demo(&root),
        Task::Bindings => bindings::bindings(&root),
        Task::Bench(args) => bench::bench(&root, &args),
        Task::Conformance { arguments } => conformance::conformance(&root, &arguments),
        Task::Interop { arguments } => interop::interop(&root, &arguments),
        Task::Suite(args) => suite::suite(&root, &args),
        Task::Matrix { arguments } => programs::matrix(&root, &arguments),
        Task::Install { prefix } => dist::install(&root, &prefix),
    };
    done(result)
}

fn done(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The folder of the workspace's Cargo.toml: of the one that `cargo xtask` was called in, should several share a target
/// folder.
fn workspace_root() -> PathBuf {
    let manifest_dir = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&manifest_dir).parent().expect("xtask lies in the workspace").to_path_buf()
}
