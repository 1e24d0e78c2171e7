//! Debian 13 in a folder: its perftest and rdma-core are newer than those of the system that most tests run on.
//!
//! `debootstrap` makes the folder once. Programs enter it in a mount namespace of their own, so that nothing stays mounted
//! when they end.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::failure::Failure;
use crate::launch::PATH;
use crate::process::{Finished, Running};

/// The release, as Debian names it.
const RELEASE: &str = "trixie";
/// What is run of it: programs by lines; rdma-core's tests (in the package rdma-core) by `cargo xtask suite`, with what they call.
const PACKAGES: [&str; 5] = ["perftest", "ibverbs-utils", "rdma-core", "python3-pyverbs", "iproute2"];
/// What the name of a folder ends with until all is in it.
const UNFINISHED: &str = ".unfinished";
/// Some 100 MB are downloaded and unpacked: a minute, or many over a slow line.
const LIMIT: Duration = Duration::from_secs(3_600);

/// Where an installation (`bin/`, `lib/`) is seen by programs in a chroot: Debian keeps this place free.
pub const INSTALLATION: &str = "/mnt";
/// Where programs in a chroot see the folder that they may write.
pub const HOME: &str = "/tmp";

/// Makes a chroot look like a system that runs, and executes the rest of its arguments in it.
const ENTER: &str = r#"set -e
root=$1 installation=$2 home=$3
shift 3
for part in proc sys dev; do mount --rbind "/$part" "$root/$part"; done
mount --bind "$installation" "$root/mnt"
mount --bind "$home" "$root/tmp"
exec chroot "$root" "$@""#;

/// A folder with Debian 13 and the packages that are run of it.
#[derive(Clone, Debug)]
pub struct Chroot {
    dir: PathBuf,
    perftest: String,
    rdma_core: String,
}

impl Chroot {
    /// The chroot in `dir`; an error says what is wrong with it.
    pub fn find(dir: &Path) -> Result<Chroot, Failure> {
        let read = |file: &str| {
            let path = dir.join(file);
            fs::read_to_string(&path).map_err(|e| Failure::new(format!("cannot read {}: {e}", path.display())))
        };
        if !read("etc/os-release")?.lines().any(|line| line == format!("VERSION_CODENAME={RELEASE}")) {
            return Err(Failure::new(format!("{} is not Debian's {RELEASE}", dir.display())));
        }
        let status = read("var/lib/dpkg/status")?;
        for package in PACKAGES {
            if installed(&status, package).is_none() {
                return Err(Failure::new(format!("{package} is not installed in {}", dir.display())));
            }
        }
        let version = |package| installed(&status, package).expect("was found just now").to_owned();
        let (perftest, rdma_core) = (version("perftest"), version("rdma-core"));
        // Programs are started in other folders than this process.
        let dir = dir.canonicalize().map_err(|e| Failure::new(format!("cannot find {}: {e}", dir.display())))?;
        Ok(Chroot { dir, perftest, rdma_core })
    }

    /// The chroot in `dir`, made by `debootstrap` if it is not there. Output goes to `log`, a folder, meanwhile.
    pub fn find_or_make(dir: &Path, log: &Path) -> Result<Chroot, Failure> {
        if let Ok(chroot) = Chroot::find(dir) {
            return Ok(chroot);
        }
        if !rustix::process::geteuid().is_root() {
            return Err(Failure::new("a chroot can only be made by root: run this as root"));
        }
        let debootstrap = std::env::split_paths(PATH).map(|dir| dir.join("debootstrap")).find(|path| path.is_file());
        let debootstrap = debootstrap.ok_or_else(|| {
            Failure::new("debootstrap is missing, which makes Debian 13's chroot: apt-get install debootstrap")
        })?;
        make(&debootstrap, dir, log)?;
        Chroot::find(dir)
    }

    #[cfg(test)]
    pub(crate) fn at(dir: &str) -> Chroot {
        Chroot { dir: dir.into(), perftest: String::new(), rdma_core: String::new() }
    }

    /// Where it lies.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Version of its package perftest.
    pub fn perftest(&self) -> &str {
        &self.perftest
    }

    /// Version of its package rdma-core, and of all that is made from that.
    pub fn rdma_core(&self) -> &str {
        &self.rdma_core
    }

    /// The start of a command line that goes on in the chroot, where `installation` is seen as [`INSTALLATION`] and `home` as
    /// [`HOME`]. Only root may run it.
    pub fn enter(&self, installation: &Path, home: &Path) -> Vec<OsString> {
        let mut words: Vec<OsString> =
            ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", ENTER, "sh"].map(Into::into).into();
        words.extend([self.dir.clone().into(), installation.into(), home.into()]);
        words
    }
}

/// Makes a chroot in `dir`, which must be empty or absent.
fn make(debootstrap: &Path, dir: &Path, log: &Path) -> Result<(), Failure> {
    let cannot = |e: io::Error| Failure::new(format!("cannot make {}: {e}", dir.display()));
    let (Some(name), Some(parent)) = (dir.file_name(), dir.parent()) else {
        return Err(Failure::new(format!("{} can be no chroot: name a folder of its own", dir.display())));
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    fs::create_dir_all(parent).map_err(cannot)?;
    let parent = parent.canonicalize().map_err(cannot)?;
    let dir = parent.join(name);
    // Another harness that makes the same folder is waited for.
    let lock = File::open(&parent).map_err(cannot)?;
    lock.lock().map_err(cannot)?;
    if Chroot::find(&dir).is_ok() {
        return Ok(());
    }
    // What is there and is not ours to remove, a person must have put there.
    if fs::read_dir(&dir).is_ok_and(|mut entries| entries.next().is_some()) {
        let why = Chroot::find(&dir).expect_err("was looked for just now");
        return Err(Failure::new(format!("{why}; remove {} or name another folder", dir.display())));
    }
    let mut unfinished = name.to_owned();
    unfinished.push(UNFINISHED);
    let unfinished = parent.join(unfinished);
    remove(&unfinished).map_err(cannot)?;
    let _ = writeln!(io::stderr(), "making Debian 13's chroot in {} (a minute or more)", dir.display());
    let result = bootstrap(debootstrap, &unfinished, log)
        .and_then(|()| Chroot::find(&unfinished))
        .and_then(|_| fs::rename(&unfinished, &dir).map_err(cannot));
    if result.is_err() {
        // What cannot be removed now is removed before the next attempt.
        let _ = remove(&unfinished);
    }
    result
}

fn bootstrap(debootstrap: &Path, dir: &Path, log: &Path) -> Result<(), Failure> {
    // It ends when we do, however that happens, and takes along what it mounts.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]);
    command.args(["--pid", "--fork", "--kill-child", "--"]).arg(debootstrap).arg("--variant=minbase");
    command.arg(format!("--include={}", PACKAGES.join(","))).arg(RELEASE).arg(dir);
    command.env("PATH", PATH).env("LC_ALL", "C");
    let finished = Running::start("debootstrap", command, log)?.wait(LIMIT)?;
    if finished.status.success() {
        return Ok(());
    }
    let what = format!("debootstrap cannot make Debian 13's chroot: {}", reason(&finished));
    Err(Failure::new(format!("{what}; is the package mirror reachable (http_proxy)?")))
}

/// The last error that debootstrap told, else the last line of all.
fn reason(finished: &Finished) -> String {
    let lines = || finished.stdout.lines().chain(finished.stderr.lines()).map(str::trim);
    let error = lines().filter_map(|line| line.strip_prefix("E: ")).next_back();
    let last = || lines().rfind(|line| !line.is_empty());
    error.or_else(last).unwrap_or("it did not say why").to_owned()
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// The version of `package` if dpkg's `status` says that it is installed.
fn installed<'a>(status: &'a str, package: &str) -> Option<&'a str> {
    let stanza = status.split("\n\n").find(|stanza| field(stanza, "Package") == Some(package))?;
    (field(stanza, "Status")? == "install ok installed").then(|| field(stanza, "Version"))?
}

fn field<'a>(stanza: &'a str, name: &str) -> Option<&'a str> {
    stanza.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use tempfile::TempDir;

    use super::*;

    /// What dpkg keeps of a system with all packages.
    fn status() -> String {
        let version = |package| if package == "perftest" { "25.01.0+0.80-1" } else { "56.1-1" };
        let stanza =
            |package| format!("Package: {package}\nStatus: install ok installed\nVersion: {}\n", version(package));
        PACKAGES.map(stanza).join("\n")
    }

    fn write(dir: &Path, codename: &str, status: &str) {
        for (file, text) in
            [("etc/os-release", format!("VERSION_CODENAME={codename}\n")), ("var/lib/dpkg/status", status.to_owned())]
        {
            let path = dir.join(file);
            fs::create_dir_all(path.parent().expect("has a folder")).expect("can make folders");
            fs::write(path, text).expect("can write");
        }
    }

    #[test]
    fn a_chroot_is_the_right_release_with_all_packages() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let error = |dir: &TempDir| Chroot::find(dir.path()).expect_err("is none").to_string();
        assert!(error(&dir).contains("os-release"), "{}", error(&dir));
        write(dir.path(), "bookworm", &status());
        assert!(error(&dir).contains("is not Debian's trixie"), "{}", error(&dir));
        write(dir.path(), "trixie", &status().replace("Package: ibverbs-utils", "Package: other"));
        assert!(error(&dir).contains("ibverbs-utils is not installed"), "{}", error(&dir));
        write(dir.path(), "trixie", &status().replacen("ok installed", "ok unpacked", 1));
        assert!(error(&dir).contains("perftest is not installed"), "{}", error(&dir));
        write(dir.path(), "trixie", &status());
        let chroot = Chroot::find(dir.path()).expect("is one");
        assert_eq!((chroot.perftest(), chroot.rdma_core()), ("25.01.0+0.80-1", "56.1-1"));
    }

    /// A program that stands for debootstrap: `script` gets the folder as `$dir`, and what a good one leaves as `$good`.
    fn stand_in(at: &TempDir, script: &str) -> PathBuf {
        let good = at.path().join("good");
        write(&good, "trixie", &status());
        let path = at.path().join("debootstrap");
        let head = format!("#!/bin/sh\ngood={}\nfor dir; do :; done\n", good.display());
        fs::write(&path, format!("{head}{script}\n")).expect("can write");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("is ours");
        path
    }

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    #[test]
    fn it_is_made_once_and_what_was_left_half_made_is_removed() {
        let at = tempfile::tempdir().expect("a temporary folder");
        let debootstrap = stand_in(&at, "[ -e \"$dir\" ] && { echo 'E: in the way'; exit 1; }\ncp -r $good $dir");
        let dir = at.path().join("below/trixie");
        if !is_root() {
            let error = Chroot::find_or_make(&dir, at.path()).expect_err("an ordinary user may not");
            assert!(error.to_string().contains("run this as root"), "{error}");
            return;
        }
        let half = at.path().join("below/trixie.unfinished/etc");
        fs::create_dir_all(&half).expect("can make folders");
        make(&debootstrap, &dir, at.path()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(Chroot::find(&dir).expect("was made").dir(), dir.canonicalize().expect("is there"));
        assert!(!half.exists());
        // The second time nothing is run.
        make(Path::new("/nowhere"), &dir, at.path()).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn a_failure_tells_the_reason_and_leaves_nothing() {
        let at = tempfile::tempdir().expect("a temporary folder");
        let debootstrap = stand_in(&at, "mkdir $dir; echo 'E: Failed getting release file'; echo bye; exit 1");
        let dir = at.path().join("trixie");
        let error = make(&debootstrap, &dir, at.path()).expect_err("it fails");
        // An ordinary user's does not even start.
        let reason = if is_root() { "chroot: Failed getting release file; is the package mirror" } else { "unshare" };
        assert!(error.what().contains(reason), "{error}");
        // One that claims to have done its work.
        let debootstrap = stand_in(&at, "mkdir $dir");
        make(&debootstrap, &dir, at.path()).expect_err("the folder is empty");
        assert!(!dir.exists() && !at.path().join("trixie.unfinished").exists());
    }

    #[test]
    fn a_folder_with_something_else_is_left_alone() {
        let at = tempfile::tempdir().expect("a temporary folder");
        let dir = at.path().join("home");
        fs::create_dir_all(dir.join("letters")).expect("can make folders");
        let error = make(Path::new("/nowhere"), &dir, at.path()).expect_err("is not empty");
        assert!(error.what().contains("or name another folder"), "{error}");
        assert!(dir.join("letters").exists());
        make(Path::new("/nowhere"), Path::new("/"), at.path()).expect_err("no folder of its own");
    }
}
