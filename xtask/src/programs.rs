//! Stock programs on Ferroce: `tests/programs` knows how.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::ci::cargo;
use crate::dist;
use crate::process::watch;

/// The small set of CI, on what `cargo xtask build` left. Each line of output goes to `look`.
pub(crate) fn smoke(root: &Path, look: impl FnMut(&str)) -> Result<()> {
    let install = dist::folder(root)?;
    finish(watch(harness(root, &install).arg("smoke"), look)?)
}

/// The whole matrix, or what `arguments` choose of it.
pub(crate) fn matrix(root: &Path, arguments: &[String]) -> Result<()> {
    let install = dist::build(root)?;
    finish(watch(harness(root, &install).arg("run").args(arguments), |_| {})?)
}

fn harness(root: &Path, install: &Path) -> Command {
    let mut command = cargo(root, &["run", "--release", "--locked", "--quiet", "--package", "program-tests", "--"]);
    command.env("FERROCE_INSTALL", install);
    // Kept between runs: Debian 13, where --trixie asks for it.
    command.env("FERROCE_TRIXIE", install.with_file_name("trixie"));
    command
}

fn finish(good: bool) -> Result<()> {
    if !good {
        bail!("stock programs failed; what they did is above");
    }
    Ok(())
}
