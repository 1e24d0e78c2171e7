//! Parts of the workspace that a test needs beside itself.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds packages of the workspace in the profile of the running test, and gives the folder with what came of it.
///
/// # Panics
/// They cannot be built, or this is no test of the workspace.
pub fn build(packages: &[&str]) -> PathBuf {
    let profile = profile_dir();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--locked"]).args(packages.iter().flat_map(|package| ["-p", package]));
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.arg("--target-dir").arg(profile.parent().expect("a profile lies in the target folder"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().expect("cargo runs").success(), "{packages:?} can be built");
    profile
}

/// `target/debug` or `target/release`: two above the test's program.
fn profile_dir() -> PathBuf {
    let program = std::env::current_exe().expect("a program knows its file");
    program.parent().and_then(Path::parent).expect("tests lie in <profile>/deps").to_path_buf()
}
