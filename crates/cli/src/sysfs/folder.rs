//! The folder of a `ferroce run --sysfs`, which is removed with it, or by the next one if it was killed.
//!
//! Whoever uses a folder holds a lock on it: the command and all that it starts inherit the descriptor. So one is left behind if the
//! process that its name carries is gone and nobody holds the lock; the end of a process lets go of it, however it ends.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, open};
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::process::{Pid, geteuid, test_kill_process};
use tempfile::TempDir;

use crate::refusal::INHERITED_FD_MIN;

/// Start of the name; the process id follows, and what makes it unique.
const PREFIX: &str = "ferroce-sysfs-";

/// Folders of others that are removed at once at most.
const REMOVED_MAX: usize = 64;

/// A folder that is there as long as this is.
pub(super) struct Folder {
    folder: TempDir,
    /// Inherited by the command.
    _lock: OwnedFd,
}

impl Folder {
    /// Makes one, after removing those that were left behind.
    pub(super) fn make_in(parent: &Path) -> Result<Folder> {
        sweep(parent);
        /// Only who takes a folder for one that was left behind can be in the way: from another PID namespace, just after it was made.
        const ATTEMPTS: usize = 3;
        for _ in 0..ATTEMPTS {
            let prefix = format!("{PREFIX}{}-", std::process::id());
            let folder = tempfile::Builder::new().prefix(&prefix).tempdir_in(parent);
            let folder = folder.with_context(|| format!("cannot make a folder in {}", parent.display()))?;
            if let Some(lock) = lock(folder.path()).filter(|lock| is_at(lock, folder.path())) {
                let lock = inherited(lock).context("cannot pass a descriptor on to the command")?;
                // Not before: others could hold the lock. The command may become another user.
                fs::set_permissions(folder.path(), Permissions::from_mode(0o755))
                    .context("cannot change a folder's mode")?;
                return Ok(Folder { folder, _lock: lock });
            }
        }
        bail!("cannot keep a folder in {}: something removes or locks it", parent.display())
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Removes what was left behind. That is a courtesy: what cannot be removed stays.
fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    let left = entries.filter_map(|entry| {
        let entry = entry.ok()?;
        let maker = maker(&entry.file_name())?;
        let lock = (!is_alive(maker)).then(|| lock(&entry.path())).flatten()?;
        Some((entry.path(), lock))
    });
    for (path, _lock) in left.take(REMOVED_MAX) {
        let _ = fs::remove_dir_all(path);
    }
}

/// The process whose folder has this name.
fn maker(name: &OsStr) -> Option<Pid> {
    let (pid, unique) = name.to_str()?.strip_prefix(PREFIX)?.split_once('-')?;
    if unique.is_empty() { None } else { Pid::from_raw(pid.parse().ok().filter(|pid| *pid > 0)?) }
}

/// Its number may be another process's by now: then the folder stays until that is gone, too.
fn is_alive(pid: Pid) -> bool {
    test_kill_process(pid) != Err(Errno::SRCH)
}

/// Takes the lock of a folder of this user. None: somebody has it, or it is something else.
fn lock(path: &Path) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = open(path, flags, Mode::empty()).ok()?;
    let is_own = fstat(&folder).is_ok_and(|status| status.st_uid == geteuid().as_raw());
    (is_own && flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok()).then_some(folder)
}

/// Whether the folder is still there, under this name.
fn is_at(folder: &OwnedFd, path: &Path) -> bool {
    let (Ok(held), Ok(there)) = (fstat(folder), fs::symlink_metadata(path)) else { return false };
    (held.st_dev, held.st_ino) == (there.dev(), there.ino())
}

/// The same descriptor, with a number that is not where programs' own begin, and for them, too.
fn inherited(fd: OwnedFd) -> io::Result<OwnedFd> {
    // A low limit of descriptors allows no high number.
    let fd = fcntl_dupfd_cloexec(&fd, INHERITED_FD_MIN).unwrap_or(fd);
    fcntl_setfd(&fd, FdFlags::empty())?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The id of a process that is gone.
    fn gone() -> u32 {
        let mut child = std::process::Command::new("true").spawn().expect("true can be run");
        child.wait().expect("it ends");
        child.id()
    }

    #[test]
    fn what_nobody_uses_any_more_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let make = |name: String| {
            let path = parent.path().join(name);
            fs::create_dir_all(path.join("sys/class")).expect("can be made");
            path
        };
        let gone = gone();
        let left = make(format!("{PREFIX}{gone}-abc"));
        let used = make(format!("{PREFIX}{gone}-used"));
        let _lock = lock(&used).expect("nobody has it");
        let others = [
            make(format!("{PREFIX}{}-abc", std::process::id())),
            make(format!("{PREFIX}{gone}")),
            make(format!("{PREFIX}-1-abc")),
            make(format!("other-{gone}-abc")),
            used,
        ];
        let target = make("target".into());
        let link = parent.path().join(format!("{PREFIX}{gone}-link"));
        std::os::unix::fs::symlink(&target, &link).expect("can be made");
        let file = parent.path().join(format!("{PREFIX}{gone}-file"));
        fs::write(&file, "x").expect("can be written");
        sweep(parent.path());
        assert!(!left.exists());
        for path in others.iter().chain([&target, &link, &file]) {
            assert!(path.exists(), "{}", path.display());
        }
    }

    #[test]
    fn a_folder_is_locked_and_goes_with_its_owner() {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let folder = Folder::make_in(parent.path()).expect("can be made");
        let path = folder.path().to_owned();
        assert!(lock(&path).is_none(), "it is held");
        assert_eq!(fs::metadata(&path).expect("is there").mode() & 0o7777, 0o755);
        assert_eq!(maker(path.file_name().expect("has one")), Pid::from_raw(std::process::id() as i32));
        drop(folder);
        assert!(!path.exists());
    }
}
