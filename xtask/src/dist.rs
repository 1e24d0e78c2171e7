//! `cargo xtask build` and `install`: what an installation holds, in `target/ferroce/` or elsewhere.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cargo_metadata::MetadataCommand;

use crate::ci::cargo;
use crate::dylib;
use crate::process::{run, say};

/// Programs of an installation.
const PROGRAMS: &[&str] = &["ferroce", "ferroced"];
/// The libraries by their sonames, with the names that some programs open instead.
const LIBRARIES: &[(&str, &str)] = &[("libibverbs.so.1", "libibverbs.so"), ("librdmacm.so.1", "librdmacm.so")];
/// What cargo makes of `crates/preload`, and what it is called in an installation.
const PRELOAD: (&str, &str) = ("libferroce_sysfs.so", "libferroce-sysfs.so");
/// The crates that all of it is made from.
const CRATES: &[&str] = &["ferroce-cli", "ferroce-service", "ferroce-ibverbs", "ferroce-rdmacm", "ferroce-preload"];

/// Where [`build`] lays out what an installation holds: `<target>/ferroce/`.
pub(crate) fn folder(root: &Path) -> Result<PathBuf> {
    Ok(target_dir(root)?.join("ferroce"))
}

/// Builds a release and lays it out in [`folder`], whose path it returns.
pub(crate) fn build(root: &Path) -> Result<PathBuf> {
    let target = target_dir(root)?;
    run(cargo(root, &["build", "--release", "--locked"]).args(CRATES.iter().flat_map(|name| ["-p", name])))?;
    let release = target.join("release");
    let out = folder(root)?;
    let (bin, lib) = (out.join("bin"), out.join("lib"));
    for dir in [&bin, &lib] {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    for program in PROGRAMS {
        place(&release.join(program), &bin.join(program))?;
    }
    dylib::link_libibverbs(&release.join("libibverbs.a"), &lib)?;
    dylib::link_librdmacm(&release.join("librdmacm.a"), &lib)?;
    place(&release.join(PRELOAD.0), &lib.join(PRELOAD.1))?;
    for (library, name) in LIBRARIES {
        link(library, &lib.join(name))?;
    }
    say(format_args!("built {}", out.display()));
    Ok(out)
}

/// Builds and copies the result to `prefix/bin` and `prefix/lib`.
pub(crate) fn install(root: &Path, prefix: &Path) -> Result<()> {
    let from = build(root)?;
    let (bin, lib) = (prefix.join("bin"), prefix.join("lib"));
    for dir in [&bin, &lib] {
        fs::create_dir_all(dir)
            .with_context(|| format!("cannot make {}: choose a --prefix that you may write to", dir.display()))?;
    }
    for program in PROGRAMS {
        place(&from.join("bin").join(program), &bin.join(program))?;
    }
    for (library, name) in LIBRARIES {
        place(&from.join("lib").join(library), &lib.join(library))?;
        link(library, &lib.join(name))?;
    }
    place(&from.join("lib").join(PRELOAD.1), &lib.join(PRELOAD.1))?;
    say(format_args!("installed in {}: try {}", prefix.display(), bin.join("ferroce").display()));
    Ok(())
}

/// Copies a file so that a running program that has the old one open keeps it: write beside, then rename.
fn place(from: &Path, to: &Path) -> Result<()> {
    if !from.is_file() {
        bail!("{} was not built: `cargo build --release` succeeded without making it", from.display());
    }
    let fresh = to.with_file_name(format!("{}.new", to.file_name().unwrap_or_default().to_string_lossy()));
    fs::copy(from, &fresh)
        .and_then(|_| fs::rename(&fresh, to))
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

/// Makes or replaces the symbolic link `at` -> `to`.
fn link(to: &str, at: &Path) -> Result<()> {
    if at.symlink_metadata().is_ok() {
        fs::remove_file(at).with_context(|| format!("cannot replace {}", at.display()))?;
    }
    symlink(to, at).with_context(|| format!("cannot make the link {}", at.display()))
}

/// Where cargo puts what it builds (it may lie outside the workspace).
fn target_dir(root: &Path) -> Result<PathBuf> {
    let metadata = MetadataCommand::new()
        .manifest_path(root.join("Cargo.toml"))
        .no_deps()
        .exec()
        .context("cannot ask cargo for its target folder")?;
    Ok(metadata.target_directory.into_std_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placing_replaces_by_rename() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let (from, to) = (dir.path().join("from"), dir.path().join("libx.so.1"));
        fs::write(&from, "new").expect("can write");
        fs::write(&to, "old").expect("can write");
        let kept = fs::File::open(&to).expect("can open");
        place(&from, &to).expect("can replace");
        assert_eq!(fs::read_to_string(&to).expect("can read"), "new");
        assert_eq!(std::io::read_to_string(kept).expect("can read"), "old");
    }

    #[test]
    fn placing_what_was_not_built_says_so() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let error = place(&dir.path().join("absent"), &dir.path().join("to")).expect_err("nothing to copy");
        assert!(error.to_string().contains("was not built"), "{error}");
    }

    #[test]
    fn links_are_replaced() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let at = dir.path().join("libx.so");
        link("absent", &at).expect("can make a dangling link");
        link("libx.so.1", &at).expect("can replace it");
        assert_eq!(fs::read_link(&at).expect("is a link"), Path::new("libx.so.1"));
    }
}
