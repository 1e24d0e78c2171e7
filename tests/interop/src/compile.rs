//! Compiles the C programs of this folder, which stand on those of `tests/programs`.

use std::path::Path;
use std::process::{Command, Stdio};

use program_tests::failure::Failure;

/// The programs: `NAME.c` beside the manifest.
pub const PROGRAMS: &[&str] = &["bad_network", "death", "errors"];

/// Compiles all programs into `dir`.
pub fn all(dir: &Path) -> Result<(), Failure> {
    PROGRAMS.iter().try_for_each(|name| compile(name, dir))
}

fn compile(name: &str, dir: &Path) -> Result<(), Failure> {
    let output = Command::new("cc")
        .args(["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(dir.join(name))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("{name}.c")))
        .arg("-libverbs")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Failure::new(format!("cannot run cc: {e}; is gcc installed?")))?;
    if output.status.success() {
        return Ok(());
    }
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Failure::new(format!("cannot compile {name}.c")).with(messages))
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
