//! Ferroce, and Linux's rxe, judged by the specification: `tests/conformance` knows how.

use std::path::Path;

use anyhow::{Result, bail};

use crate::ci::cargo;
use crate::dist;
use crate::process::watch;

/// All cases against Ferroce, or what `arguments` say.
pub(crate) fn conformance(root: &Path, arguments: &[String]) -> Result<()> {
    let install = dist::build(root)?;
    let mut bench =
        cargo(root, &["run", "--release", "--locked", "--quiet", "--package", "ferroce-conformance", "--", "run"]);
    bench.args(arguments).env("FERROCE_INSTALL", &install);
    // Kept between runs: the guest's kernel.
    bench.env("FERROCE_INTEROP_CACHE", install.with_file_name("interop"));
    if !watch(&mut bench, |_| {})? {
        bail!("Ferroce departs from the specification, or a device could not be asked; what happened is above");
    }
    Ok(())
}
