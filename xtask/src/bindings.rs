//! The Rust bindings that others wrote, crates `ibverbs` and `sideway`: their own test suites and examples on Ferroce.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use cargo_metadata::MetadataCommand;

use crate::ci::{Tally, cargo};
use crate::process::{installed, print, run, say, show, watch};
use crate::{dist, pair};

/// A crate of the registry, with what its examples are called.
struct Binding {
    name: &'static str,
    version: &'static str,
    /// Examples that need no other end.
    alone: &'static [&'static str],
    /// Examples with a server and a client, which find each other by `--port` and the server's address.
    pairs: &'static [&'static str],
}

const BINDINGS: &[Binding] = &[
    Binding { name: "ibverbs", version: "0.9.2", alone: &["loopback"], pairs: &[] },
    Binding {
        name: "sideway",
        version: "0.4.3",
        alone: &["ibv_devinfo", "show_gids"],
        pairs: &["rc_pingpong", "rc_pingpong_split"],
    },
];

/// Builds both as their authors say and runs everything that they test.
pub(crate) fn bindings(root: &Path) -> Result<()> {
    if !installed("cmake") {
        bail!("the bindings are made with cmake and libclang: apt-get install cmake libclang-dev");
    }
    let install = dist::build(root)?;
    // Not below the target folder, where `trybuild`, which sideway uses, takes sources for products.
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let place = Place { root, ferroce: install.join("bin/ferroce"), built: install.with_file_name("bindings") };
    let mut tally = Tally::default();
    for (binding, source) in BINDINGS.iter().zip(sources(root, folder.path())?) {
        say(format_args!("{} {}", binding.name, binding.version));
        place.judge(binding, &source, &mut tally)?;
    }
    print(format_args!("{} passed, {} failed", tally.passed, tally.failed));
    if tally.failed > 0 {
        bail!("{} of the bindings' tests failed; their output is above", tally.failed);
    }
    Ok(())
}

/// Copies of the crates' sources, which cargo can build and write beside; in the order of [`BINDINGS`].
fn sources(root: &Path, folder: &Path) -> Result<Vec<PathBuf>> {
    let fetch = folder.join("fetch");
    fs::create_dir_all(fetch.join("src")).with_context(|| format!("cannot make {}", fetch.display()))?;
    let wanted: String = BINDINGS.iter().map(|b| format!("{} = \"={}\"\n", b.name, b.version)).collect();
    let manifest = fetch.join("Cargo.toml");
    let package = "[package]\nname = \"fetch\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\n[dependencies]\n";
    fs::write(&manifest, format!("{package}{wanted}"))?;
    fs::write(fetch.join("src/lib.rs"), "")?;
    let metadata = MetadataCommand::new()
        .manifest_path(&manifest)
        .current_dir(root)
        .exec()
        .context("cannot get the crates ibverbs and sideway: is the registry reachable?")?;
    BINDINGS
        .iter()
        .map(|binding| {
            let package = metadata.packages.iter().find(|package| package.name.as_str() == binding.name);
            let package = package.with_context(|| format!("cargo knows no crate {}", binding.name))?;
            let from = package.manifest_path.parent().expect("a manifest lies in a folder");
            let to = folder.join(binding.name);
            copy(from.as_std_path(), &to)?;
            Ok(to)
        })
        .collect()
}

/// Copies a folder, over what is there.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy(&from, &to)?;
        } else {
            fs::copy(&from, &to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
        }
    }
    Ok(())
}

/// Where things are.
struct Place<'a> {
    root: &'a Path,
    ferroce: PathBuf,
    /// What cargo builds of the bindings, kept between runs.
    built: PathBuf,
}

impl Place<'_> {
    fn judge(&self, binding: &Binding, source: &Path, tally: &mut Tally) -> Result<()> {
        for what in [&["test", "--no-run"] as &[_], &["build", "--examples"]] {
            let mut build = cargo(source, what);
            run(build.env("CARGO_TARGET_DIR", &self.built))
                .context("needed for it: apt-get install cmake libclang-dev pkg-config")?;
        }
        let before = tally.failed;
        let mut suite = self.on_ferroce(Path::new("cargo"));
        suite.args(["test", "--no-fail-fast"]).current_dir(source);
        if !watch(&mut suite, |line| tally.look(line))? && tally.failed == before {
            bail!("`{}` failed before it ran tests; its messages are above", show(&suite));
        }
        let examples = self.built.join("debug/examples");
        for example in binding.alone {
            tally.count(example, run(&mut self.on_ferroce(&examples.join(example))));
        }
        for example in binding.pairs {
            tally.count(example, self.couple(&examples.join(example)));
        }
        Ok(())
    }

    /// A program on Ferroce, with the path view: `sideway` reads the names of interfaces there.
    fn on_ferroce(&self, program: &Path) -> Command {
        let mut command = Command::new(&self.ferroce);
        command.current_dir(self.root).env("CARGO_TARGET_DIR", &self.built);
        command.args(["run", "--sysfs", "--"]).arg(program);
        command
    }

    /// A server, and a client that finds it.
    fn couple(&self, program: &Path) -> Result<()> {
        let port = pair::free_port()?;
        let call = || {
            let mut command = self.on_ferroce(program);
            command.args(["--port", &port.to_string()]);
            command
        };
        pair::run(&mut call(), call().arg("127.0.0.1"), port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_whole() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir_all(from.join("src")).expect("can make folders");
        fs::write(from.join("Cargo.toml"), "[package]\nname = \"x\"\n").expect("can write");
        fs::write(from.join("src/lib.rs"), "//! x").expect("can write");
        for _ in 0..2 {
            copy(&from, &to).expect("can copy, also over a copy");
        }
        assert_eq!(fs::read_to_string(to.join("src/lib.rs")).expect("is there"), "//! x");
        assert!(to.join("Cargo.toml").is_file());
    }
}
