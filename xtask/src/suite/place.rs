//! Where the tests run: on this machine, or on Debian 13 in a chroot.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use program_tests::chroot::{self, Chroot};

use super::Ended;
use crate::process::{installed, run, say};

/// Where Debian's package `rdma-core` has the tests, some of them compressed.
const PACKAGED: &str = "usr/share/doc/rdma-core/tests";
/// Debian's own Python has Debian's pyverbs.
const PYTHON: &str = "/usr/bin/python3";
/// Longest time of the one run, and of all single ones, in seconds.
const LIMIT_S: u32 = 1_800;
/// What a system's programs expect.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A system with pyverbs, and the folders of a run on it.
pub(super) struct Place {
    install: PathBuf,
    /// Holds the report and, in a chroot, all that the tests see of this machine's files.
    work: PathBuf,
    /// The folder with `run_tests.py`, as this machine sees it.
    tests: PathBuf,
    chroot: Option<Chroot>,
}

impl Place {
    /// This machine, with the packaged tests if `tests` does not name a folder.
    pub(super) fn here(install: &Path, tests: Option<&Path>) -> Result<Place> {
        check_needs(&["unshare", "ip", "gzip", "timeout"])?;
        let has_pyverbs =
            Command::new(PYTHON).args(["-c", "import pyverbs"]).output().is_ok_and(|out| out.status.success());
        if !has_pyverbs {
            bail!("{PYTHON} cannot import pyverbs: apt-get install python3-pyverbs");
        }
        let work = install.with_file_name("suite");
        let tests = match tests {
            Some(folder) => folder.canonicalize().with_context(|| format!("cannot find {}", folder.display()))?,
            None => unpack(Path::new("/"), &work)?,
        };
        if !tests.join("run_tests.py").is_file() {
            bail!("{} has no run_tests.py: name the folder of rdma-core's tests with --tests", tests.display());
        }
        Ok(Place { install: install.to_owned(), work, tests, chroot: None })
    }

    /// Debian 13, in the chroot that the matrix of stock programs uses, too.
    pub(super) fn debian13(install: &Path) -> Result<Place> {
        check_needs(&["unshare", "ip", "gzip", "timeout"])?;
        let work = install.with_file_name("suite-trixie");
        fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
        let chroot = Chroot::find_or_make(&install.with_file_name("trixie"), &work)?;
        let tests = unpack(chroot.dir(), &work)?;
        Ok(Place { install: install.to_owned(), work, tests, chroot: Some(chroot) })
    }

    /// Where the tests come from, for people.
    pub(super) fn origin(&self) -> String {
        match &self.chroot {
            None => self.tests.display().to_string(),
            Some(chroot) => format!("Debian 13's rdma-core {}, in {}", chroot.rdma_core(), chroot.dir().display()),
        }
    }

    /// Runs all tests in a network namespace that has loopback only, and reads how they ended.
    pub(super) fn execute(&self, root: &Path, each: bool) -> Result<Vec<Ended>> {
        let report = self.work.join("report");
        match fs::remove_file(&report) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let mut command = match &self.chroot {
            None => self.command_here(root, &report),
            Some(chroot) => self.command_in(chroot, root)?,
        };
        command.args(each.then_some("--each"));
        // What the tests print is theirs; what became of each is in the report.
        let output = command.output().context("cannot run `timeout`")?;
        if !output.status.success() {
            say(String::from_utf8_lossy(&output.stderr));
            bail!("the runner failed ({}); its messages are above", output.status);
        }
        let text = fs::read_to_string(&report).context("the runner left no report")?;
        text.lines().map(|line| serde_json::from_str(line).with_context(|| format!("report: {line}"))).collect()
    }

    fn command_here(&self, root: &Path, report: &Path) -> Command {
        let mut command = namespaced(&["--map-root-user"]);
        // The files that librdmacm's tests look for are shown by --sysfs.
        command.arg(self.install.join("bin/ferroce")).args(["run", "--sysfs", "--", PYTHON]);
        command.arg(root.join("tests/suite/run.py")).arg(&self.tests).arg(report);
        command
    }

    fn command_in(&self, chroot: &Chroot, root: &Path) -> Result<Command> {
        let bin = self.work.join("bin");
        fs::create_dir_all(&bin)?;
        for (file, to) in [("run.py", self.work.join("run.py")), ("rdma", bin.join("rdma"))] {
            let from = root.join("tests/suite").join(file);
            fs::copy(&from, to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
        let seen = |file: &str| OsString::from(format!("{}/{file}", chroot::HOME));
        // A chroot needs the rights of root over this machine's mounts, which a user namespace does not have.
        let mut command = namespaced(&[]);
        command.args(chroot.enter(&self.install, &self.work));
        command.arg(format!("{}/bin/ferroce", chroot::INSTALLATION)).args(["run", "--sysfs", "--", PYTHON]);
        command.args(["run.py", "tests", "report"].map(seen));
        command.env("PATH", format!("{}/bin:{PATH}", chroot::HOME)).current_dir("/");
        Ok(command)
    }
}

/// The start of a command in a new network namespace, which is ended if it takes too long.
fn namespaced(options: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.arg(LIMIT_S.to_string()).arg("unshare").args(options).args(["--net", "sh", "-c"]);
    command.args(["ip link set lo up && exec \"$@\"", "sh"]);
    command
}

/// Says what is not there.
fn check_needs(programs: &[&str]) -> Result<()> {
    match programs.iter().find(|program| !installed(program)) {
        Some(program) => bail!("`{program}` is not installed"),
        None => Ok(()),
    }
}

/// Copies the tests of the system at `system` to a folder in `work`, uncompressed.
fn unpack(system: &Path, work: &Path) -> Result<PathBuf> {
    let packaged = system.join(PACKAGED);
    if !packaged.is_dir() {
        bail!("{} is not there: apt-get install rdma-core, or name a folder with --tests", packaged.display());
    }
    let tests = work.join("tests");
    match fs::remove_dir_all(&tests) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => fs::create_dir_all(&tests)?,
    }
    for entry in fs::read_dir(packaged)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), tests.join(entry.file_name()))?;
        }
    }
    run(Command::new("gzip").args(["--decompress", "--force", "--recursive", "--quiet"]).arg(&tests))?;
    Ok(tests)
}
