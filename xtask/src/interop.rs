//! Ferroce beside Linux's rxe in a virtual machine: `tests/interop` knows how.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::ci::cargo;
use crate::dist;
use crate::process::watch;

/// The small set of CI, on what `cargo xtask build` left. Each line of output goes to `look`.
pub(crate) fn smoke(root: &Path, look: impl FnMut(&str)) -> Result<()> {
    let install = dist::folder(root)?;
    finish(watch(bench(root, &install).arg("smoke"), look)?)
}

/// The whole matrix, or what `arguments` say.
pub(crate) fn interop(root: &Path, arguments: &[String]) -> Result<()> {
    let install = dist::build(root)?;
    let mut bench = bench(root, &install);
    match arguments {
        [] => bench.arg("run"),
        words => bench.args(words),
    };
    finish(watch(&mut bench, |_| {})?)
}

fn bench(root: &Path, install: &Path) -> Command {
    let mut command = cargo(root, &["run", "--release", "--locked", "--quiet", "--package", "interop-tests", "--"]);
    command.env("FERROCE_INSTALL", install);
    // Kept between runs: the guest's kernel.
    command.env("FERROCE_INTEROP_CACHE", install.with_file_name("interop"));
    command
}

fn finish(good: bool) -> Result<()> {
    if !good {
        bail!("Ferroce and the Linux kernel do not agree, or could not be brought together; what happened is above");
    }
    Ok(())
}
