//! How a program under test is started: as an ordinary user without privileges, in its namespace, on Ferroce.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

use crate::chroot::{self, Chroot};
use crate::failure::Failure;

/// Locked memory that a program may have, in bytes: what `ulimit -l 64` gives.
const MEMLOCK: u32 = 64 * 1024;
/// Where programs are looked for.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Files that name the XRC domains of `ibv_xsrq_pingpong` and perftest, which leave them behind.
const XRC_FILES: [&str; 3] = ["/tmp/xrc_domain", "/tmp/xrc_domain_server", "/tmp/xrc_domain_client"];

/// What makes a program use Ferroce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Via {
    /// `ferroce run -- PROGRAM`
    Run,
    /// The library in the environment: LD_PRELOAD, LD_LIBRARY_PATH and FERROCE_SERVICE
    Environment,
    /// Nothing: the system's own libibverbs (to try the harness, or beside real RDMA devices)
    System,
}

/// Who runs a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// A user without name, groups and capabilities.
    Ordinary,
    /// Another one of this kind.
    Other,
    /// Root, for programs that give privileges up by themselves.
    Root,
}

/// Whose programs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// Those of the machine.
    Own,
    /// Debian 13's, in a chroot.
    Trixie,
}

/// Starts programs.
#[derive(Clone, Debug)]
pub struct Launcher {
    via: Via,
    uid: u32,
    root: bool,
    dir: Arc<TempDir>,
    trixie: Option<Arc<Chroot>>,
    system: System,
}

/// Removes what a run of another user left in a place that programs of `uid` write to.
fn clear(path: &Path, uid: u32) -> Result<(), Failure> {
    let in_the_way = |e| Failure::new(format!("{} of another user is in the way; remove it: {e}", path.display()));
    match fs::symlink_metadata(path) {
        Ok(found) if found.uid() != uid => fs::remove_file(path).map_err(in_the_way),
        _ => Ok(()),
    }
}

impl Launcher {
    /// Copies the installation `install` (`bin/`, `lib/`) to where the user of number `uid` can read it.
    pub fn new(install: &Path, via: Via, uid: u32) -> Result<Launcher, Failure> {
        let io = |what: &str, e: std::io::Error| Failure::new(format!("{what}: {e}"));
        let dir = tempfile::Builder::new()
            .prefix("ferroce-programs-")
            .tempdir()
            .map_err(|e| io("cannot make a temporary folder", e))?;
        open_to_all(dir.path(), 0o755).map_err(|e| io("cannot open the temporary folder to all", e))?;
        if via != Via::System {
            for (part, needed) in [("bin", "ferroced"), ("lib", "libibverbs.so.1")] {
                let from = install.join(part);
                if !from.join(needed).is_file() {
                    let missing = from.join(needed);
                    return Err(Failure::new(format!("{} is missing: run `cargo xtask build`", missing.display())));
                }
                copy(&from, &dir.path().join(part)).map_err(|e| io(&format!("cannot copy {}", from.display()), e))?;
            }
        }
        for (part, mode) in [("programs", 0o755), ("out", 0o755), ("home", 0o777)] {
            let path = dir.path().join(part);
            fs::create_dir(&path)
                .and_then(|()| open_to_all(&path, mode))
                .map_err(|e| io(&format!("cannot make {}", path.display()), e))?;
        }
        XRC_FILES.iter().try_for_each(|path| clear(Path::new(path), uid))?;
        let root = rustix::process::geteuid().is_root();
        Ok(Launcher { via, uid, root, dir: Arc::new(dir), trixie: None, system: System::Own })
    }

    /// The same, and it knows where Debian 13 is.
    pub fn with_trixie(self, chroot: Chroot) -> Launcher {
        Launcher { trixie: Some(Arc::new(chroot)), ..self }
    }

    /// One that starts programs of `system`, with the same installation and folders.
    pub fn on(&self, system: System) -> Result<Launcher, Failure> {
        if system == System::Trixie && self.trixie.is_none() {
            return Err(Failure::new("Debian 13's programs need its chroot: give --trixie"));
        }
        Ok(Launcher { system, ..self.clone() })
    }

    /// Where programs run if not in the machine's own system.
    fn chroot(&self) -> Option<&Chroot> {
        match self.system {
            System::Own => None,
            System::Trixie => self.trixie.as_deref(),
        }
    }

    /// Folder of the programs that the harness compiles.
    pub fn programs(&self) -> PathBuf {
        self.dir.path().join("programs")
    }

    /// Folder of the output of programs.
    pub fn output(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    /// A file that does not exist yet and that programs may write.
    pub fn scratch(&self, name: &str) -> PathBuf {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        self.dir.path().join(format!("home/{name}-{}", NUMBER.fetch_add(1, Ordering::Relaxed)))
    }

    /// The user that programs run as; not the harness's own if that is root.
    pub fn uid(&self) -> u32 {
        if self.root { self.uid } else { rustix::process::geteuid().as_raw() }
    }

    /// What makes programs use Ferroce.
    pub fn via(&self) -> Via {
        self.via
    }

    /// The launcher's folder as programs see it.
    fn seen(&self) -> &Path {
        match self.system {
            System::Own => self.dir.path(),
            System::Trixie => Path::new(chroot::INSTALLATION),
        }
    }

    /// The `ferroce` command of the copied installation.
    pub fn ferroce(&self) -> PathBuf {
        self.seen().join("bin/ferroce")
    }

    /// A command that runs `program` on Ferroce in the network namespace `netns` (`None`: the harness's own), with no
    /// other environment than `env`.
    pub fn command(
        &self,
        netns: Option<&str>,
        identity: Identity,
        env: &[(&str, &str)],
        program: &OsStr,
        args: &[OsString],
    ) -> Command {
        let mut words = self.wrapper(netns, identity);
        match self.via {
            Via::Run => words.extend([self.ferroce().into(), "run".into(), "--".into()]),
            Via::Environment => {
                let lib = self.seen().join("lib");
                let set = [
                    ("FERROCE_SERVICE", self.seen().join("bin/ferroced")),
                    ("LD_PRELOAD", lib.join("libibverbs.so.1")),
                    ("LD_LIBRARY_PATH", lib),
                ];
                // Set by env(1) at the end of the chain, so that the wrappers do not load the library.
                words.push("env".into());
                words.extend(set.iter().map(|(name, value)| {
                    let mut word = OsString::from(format!("{name}="));
                    word.push(value);
                    word
                }));
            }
            Via::System => {}
        }
        words.push(program.to_owned());
        words.extend_from_slice(args);
        self.bare(words, env)
    }

    /// A command that runs `program` as it is, without Ferroce's library: commands of Ferroce itself.
    pub fn plain(
        &self,
        netns: Option<&str>,
        identity: Identity,
        env: &[(&str, &str)],
        program: &OsStr,
        args: &[OsString],
    ) -> Command {
        let mut words = self.wrapper(netns, identity);
        words.push(program.to_owned());
        words.extend_from_slice(args);
        self.bare(words, env)
    }

    fn bare(&self, words: Vec<OsString>, env: &[(&str, &str)]) -> Command {
        let (first, rest) = words.split_first().expect("there is a program");
        let mut command = Command::new(first);
        command.args(rest).env_clear().env("PATH", PATH).envs(env.iter().copied());
        command.current_dir(self.dir.path().join("home"));
        command
    }

    /// Programs that enter namespace and chroot and drop privileges, each of which executes the next in its own place.
    fn wrapper(&self, netns: Option<&str>, identity: Identity) -> Vec<OsString> {
        let mut words: Vec<OsString> = Vec::new();
        if let Some(netns) = netns {
            words.extend(["nsenter".into(), format!("--net=/run/netns/{netns}").into(), "--".into()]);
        }
        words.extend(["prlimit".into(), format!("--memlock={MEMLOCK}:{MEMLOCK}").into(), "--core=0".into()]);
        words.push("--".into());
        if let Some(chroot) = self.chroot() {
            words.extend(chroot.enter(self.dir.path(), &self.dir.path().join("home")));
        }
        let uid = match identity {
            Identity::Ordinary => Some(self.uid),
            Identity::Other => Some(self.uid + 1),
            Identity::Root => None,
        };
        if let Some(uid) = uid.filter(|_| self.root) {
            words.push("setpriv".into());
            words.extend([format!("--reuid={uid}").into(), format!("--regid={uid}").into()]);
            words.extend(
                ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"].map(Into::into),
            );
        }
        words
    }
}

/// Copies the files of a folder, links resolved, readable by all.
fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir(to)?;
    open_to_all(to, 0o755)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
            open_to_all(&target, 0o755)?;
        }
    }
    Ok(())
}

fn open_to_all(path: &Path, mode: u32) -> std::io::Result<()> {
    fs::set_permissions(path, Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::process::{Running, wait_all};

    fn installation() -> TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for file in ["bin/ferroce", "bin/ferroced", "lib/libibverbs.so.1"] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().expect("has a folder")).expect("can make folders");
            fs::write(path, "").expect("can write");
        }
        dir
    }

    fn words(command: &Command) -> String {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_file_of_another_user_is_cleared_away_and_one_s_own_is_left() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("xrc_domain");
        clear(&path, 1).expect("nothing there");
        fs::write(&path, "").expect("can write");
        let owner = fs::metadata(&path).expect("just made").uid();
        clear(&path, owner).expect("left alone");
        assert!(path.exists());
        clear(&path, owner + 1).expect("removed");
        assert!(!path.exists());
    }

    #[test]
    fn a_missing_installation_is_named_with_the_remedy() {
        let error = Launcher::new(Path::new("/nowhere"), Via::Run, 61_000).expect_err("nothing there");
        assert!(error.to_string().contains("bin/ferroced is missing: run `cargo xtask build`"), "{error}");
    }

    #[test]
    fn commands_go_through_ferroce_run_in_their_namespace() {
        let install = installation();
        let launcher = Launcher::new(install.path(), Via::Run, 61_000).expect("is complete");
        let command = launcher.command(Some("ns"), Identity::Ordinary, &[], "ib_write_bw".as_ref(), &["-a".into()]);
        let words = words(&command);
        assert!(words.starts_with("nsenter --net=/run/netns/ns -- prlimit --memlock=65536:65536 "), "{words}");
        assert!(words.ends_with("/bin/ferroce run -- ib_write_bw -a"), "{words}");
        assert_eq!(words.contains("setpriv --reuid=61000"), rustix::process::geteuid().is_root(), "{words}");
    }

    #[test]
    fn the_environment_alone_can_carry_the_library() {
        let install = installation();
        let launcher = Launcher::new(install.path(), Via::Environment, 61_000).expect("is complete");
        let words = words(&launcher.command(None, Identity::Ordinary, &[], "ibv_devices".as_ref(), &[]));
        for part in ["FERROCE_SERVICE=/", "/bin/ferroced ", "LD_PRELOAD=/", "/lib/libibverbs.so.1 ", " ibv_devices"] {
            assert!(words.contains(part), "{part} in {words}");
        }
    }

    #[test]
    fn programs_of_debian_13_enter_its_chroot_before_they_drop_privileges() {
        let install = installation();
        let launcher = Launcher::new(install.path(), Via::Run, 61_000).expect("is complete");
        let error = launcher.on(System::Trixie).expect_err("nobody said where it is");
        assert!(error.what().contains("give --trixie"), "{error}");
        let launcher = launcher.with_trixie(Chroot::at("/srv/trixie")).on(System::Trixie).expect("is there");
        let words = words(&launcher.command(Some("ns"), Identity::Ordinary, &[], "ib_write_bw".as_ref(), &[]));
        let order =
            ["nsenter --net=", "prlimit --memlock=65536:65536 ", "unshare --mount ", " /srv/trixie ", "setpriv "];
        let places = order.map(|part| words.find(part));
        let found = if rustix::process::geteuid().is_root() { order.len() } else { order.len() - 1 };
        assert!(places[..found].is_sorted() && places[0].is_some(), "{words}");
        assert!(words.ends_with(" /mnt/bin/ferroce run -- ib_write_bw"), "{words}");
    }

    #[test]
    fn a_chroot_is_mounted_for_its_program_alone() {
        // The machine's own system stands for another one.
        let launcher = Launcher::new(Path::new("/nowhere"), Via::System, 61_000).expect("needs no installation");
        let launcher = launcher.with_trixie(Chroot::at("/")).on(System::Trixie).expect("is there");
        let script = "id -u; ulimit -l; grep CapBnd /proc/self/status; : > /tmp/written; \
                      cut -d' ' -f5 /proc/self/mountinfo | sort -u | grep -xE '/mnt|/tmp'";
        let args = ["-c".into(), script.into()];
        let command = launcher.command(None, Identity::Ordinary, &[], "sh".as_ref(), &args);
        let running = Running::start("sh", command, &launcher.output()).expect("sh is there");
        let finished = running.wait(Duration::from_secs(60)).expect("it ends");
        if !rustix::process::geteuid().is_root() {
            assert!(finished.stderr.contains("unshare"), "{}", finished.report());
            return;
        }
        assert_eq!(finished.stdout, "61000\n64\nCapBnd:\t0000000000000000\n/mnt\n/tmp\n", "{}", finished.report());
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("is there");
        assert!(!mounts.contains("ferroce-programs-"), "{mounts}");
        assert!(launcher.dir.path().join("home/written").is_file());
    }

    #[test]
    fn programs_have_no_privileges_and_no_environment() {
        let launcher = Launcher::new(Path::new("/nowhere"), Via::System, 61_000).expect("needs no installation");
        let script = "grep -E '^(Cap(Eff|Prm|Bnd)|NoNewPrivs|Groups)' /proc/self/status; id -u; ulimit -l; env | sort";
        let args = ["-c".into(), script.into()];
        let command = launcher.command(None, Identity::Ordinary, &[("A", "b")], "sh".as_ref(), &args);
        let running = Running::start("sh", command, &launcher.output()).expect("sh is there");
        let finished = wait_all(vec![running], Duration::from_secs(60)).expect("it ends").remove(0);
        let out = &finished.stdout;
        assert!(out.contains("\nCapEff:\t0000000000000000\n") || out.contains("CapEff:\t0000000000000000\n"), "{out}");
        assert!(out.contains(&format!("\n{}\n64\nA=b\n", launcher.uid())), "{out}");
        assert!(!out.contains("HOME="), "{out}");
        assert_ne!(launcher.uid(), 0);
    }
}
