//! Compiles the C programs of this folder against the system's verbs headers and library.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::failure::Failure;

/// The programs: `NAME.c` beside the manifest.
pub const PROGRAMS: &[&str] = &[
    "verify",
    "operations",
    "resources",
    "connect",
    "frames",
    "events",
    "sleeper",
    "ticker",
    "lastbyte",
    "vanish",
    "churn",
    "traffic",
    "status",
    "objects",
    "mesh",
    "wrong",
    "forker",
    "flood",
];

/// Compiles all programs into `dir`.
pub fn all(dir: &Path) -> Result<(), Failure> {
    every(Path::new(env!("CARGO_MANIFEST_DIR")), PROGRAMS, dir)
}

/// Compiles `NAME.c` of the folder `sources` into `dir`, for every name.
pub fn every(sources: &Path, names: &[&str], dir: &Path) -> Result<(), Failure> {
    names.iter().try_for_each(|name| compile(&sources.join(format!("{name}.c")), name, dir))
}

/// Where the script `name` lies.
pub fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn compile(source: &Path, name: &str, dir: &Path) -> Result<(), Failure> {
    let output = Command::new("cc")
        .args(["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(dir.join(name))
        .arg(source)
        .args(["-Wl,--as-needed", "-lrdmacm", "-libverbs", "-lpthread"])
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Failure::new(format!("cannot run cc: {e}; is gcc installed?")))?;
    if output.status.success() {
        return Ok(());
    }
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failure::new(format!(
        "cannot compile {name}.c (are the headers of libibverbs-dev and librdmacm-dev installed?)"
    ))
    .with(messages))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_compiles() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        all(dir.path()).unwrap_or_else(|failure| panic!("{failure}"));
    }
}
