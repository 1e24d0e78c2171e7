//! `--sysfs=mount`: the folder over the system's own, in a mount namespace that only the command has.
//!
//! Neither sysfs nor, as a rule, `/dev` take new entries (and in `/dev` all programs would see them). So a tmpfs takes the place of
//! `/sys/class` and of `/dev`: what is there is bound into it one by one, and our folders beside it.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// From now on the calling thread, and what it starts, sees the devices of `root` where Linux shows those of cards.
pub(super) fn mount_for_this_thread(root: &Path) -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context(
        "cannot make a mount namespace: --sysfs=mount needs CAP_SYS_ADMIN (root, or `unshare -r` before it); --sysfs alone does not",
    )?;
    // Nobody else shall see what follows.
    change("/", MsFlags::MS_PRIVATE | MsFlags::MS_REC).context("cannot keep mounts to ourselves")?;
    let class = root.join("sys/class");
    let of_class = [("infiniband", class.join("infiniband")), ("infiniband_verbs", class.join("infiniband_verbs"))];
    let of_dev = [("infiniband", root.join("dev/infiniband"))];
    for (folder, added) in [("/sys/class", &of_class[..]), ("/dev", &of_dev)] {
        overlay(Path::new(folder), added, &root.join("overlay"))
            .with_context(|| format!("cannot show the devices in {folder}"))?;
    }
    Ok(())
}

/// Puts a tmpfs in the place of `folder`, with what the folder has and with `added`. `staging` does not exist yet, nor afterwards.
fn overlay(folder: &Path, added: &[(&str, PathBuf)], staging: &Path) -> io::Result<()> {
    fs::create_dir(staging)?;
    mount(None::<&str>, staging, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, Some("mode=755"))?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !added.iter().any(|(name, _)| entry.file_name() == *name) {
            take_over(&entry, &staging.join(entry.file_name()))?;
        }
    }
    for (name, from) in added {
        let to = staging.join(name);
        fs::create_dir(&to)?;
        bind(from, &to)?;
    }
    mount(Some(staging), folder, None::<&str>, MsFlags::MS_MOVE, None::<&str>)?;
    fs::remove_dir(staging)
}

/// The same thing at another place: a link again, all else bound.
fn take_over(entry: &fs::DirEntry, to: &Path) -> io::Result<()> {
    let (from, kind) = (entry.path(), entry.file_type()?);
    if kind.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    if kind.is_dir() {
        fs::create_dir(to)?;
    } else {
        fs::File::create_new(to)?;
    }
    bind(&from, to)
}

fn bind(from: &Path, to: &Path) -> io::Result<()> {
    Ok(mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)?)
}

fn change(at: &str, flags: MsFlags) -> io::Result<()> {
    Ok(mount(None::<&str>, at, None::<&str>, flags, None::<&str>)?)
}
