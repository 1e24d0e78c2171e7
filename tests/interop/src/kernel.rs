//! Debian's kernel: found, downloaded, unpacked, kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, anyhow, bail};

use crate::needs::last_line;

/// Kernel series that are known to have `rdma_rxe`, the best first.
const SERIES: &[&str] = &["6.12", "6.1"];
/// A mirror that does not answer at once is asked again.
const RETRIES: &str = "--option=Acquire::Retries=3";
/// What of the package is unpacked.
const PARTS: &[&str] = &[
    "./boot/vmlinuz-*",
    "./lib/modules/*/modules.*",
    "./lib/modules/*/kernel/arch/x86/crypto/*",
    "./lib/modules/*/kernel/crypto/*",
    "./lib/modules/*/kernel/drivers/char/*",
    "./lib/modules/*/kernel/drivers/infiniband/core/*",
    "./lib/modules/*/kernel/drivers/infiniband/sw/*",
    "./lib/modules/*/kernel/drivers/net/net_failover*",
    "./lib/modules/*/kernel/drivers/net/virtio_net*",
    "./lib/modules/*/kernel/drivers/virtio/*",
    "./lib/modules/*/kernel/fs/configfs/*",
    "./lib/modules/*/kernel/lib/*",
    "./lib/modules/*/kernel/net/core/*",
    "./lib/modules/*/kernel/net/ipv4/*",
    "./lib/modules/*/kernel/net/ipv6/*",
];

/// A kernel that was unpacked.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Release, for instance `6.12.117+deb12-amd64`.
    pub release: String,
    /// The bootable image.
    pub image: PathBuf,
    /// Folder with `modules.dep` and what it names.
    pub modules: PathBuf,
}

impl Kernel {
    /// The newest kernel of the best series that is in `cache`, or else that Debian has; kept in `cache`.
    pub fn find(cache: &Path) -> Result<Kernel> {
        if let Some(kernel) = SERIES.iter().find_map(|series| Kernel::cached(cache, series)) {
            return Ok(kernel);
        }
        let package = fetch(cache)?;
        let series = SERIES.iter().find_map(|series| Kernel::cached(cache, series));
        series.ok_or_else(|| anyhow!("the package {package} holds no kernel"))
    }

    fn cached(cache: &Path, series: &str) -> Option<Kernel> {
        let mut found: Vec<Kernel> = fs::read_dir(cache.join("kernels"))
            .ok()?
            .flatten()
            .filter_map(|entry| Kernel::in_folder(&entry.path()))
            .filter(|kernel| kernel.release.starts_with(&format!("{series}.")))
            .collect();
        found.sort_by_key(|kernel| version(&kernel.release));
        found.pop()
    }

    fn in_folder(folder: &Path) -> Option<Kernel> {
        let release = folder.file_name()?.to_str()?.to_owned();
        let image = folder.join(format!("boot/vmlinuz-{release}"));
        let modules = folder.join("lib/modules").join(&release);
        (image.is_file() && modules.join("modules.dep").is_file()).then_some(Kernel { release, image, modules })
    }
}

/// Downloads the newest kernel of the best series; names its package.
fn fetch(cache: &Path) -> Result<String> {
    // Package lists are empty in fresh containers; old ones may lack the best series, or name what the mirror does not have
    // any more.
    let known = newest_package()?;
    if let Some(package) = known.as_ref().filter(|package| is_best(package))
        && download(package, cache).is_ok()
    {
        return Ok(package.clone());
    }
    let updated = apt("apt-get", &["update", "--quiet=2", RETRIES], Path::new("/"));
    let package = match (updated, known) {
        (Ok(_), _) => newest_package()?.ok_or_else(|| {
            anyhow!(
                "no kernel package linux-image-6.12* or 6.1* is known to apt: it needs Debian's lists (apt-get update)"
            )
        })?,
        // One of an older series will do.
        (Err(_), Some(package)) => package,
        (Err(error), None) => return Err(error),
    };
    download(&package, cache)?;
    Ok(package)
}

/// Of the best series?
fn is_best(package: &str) -> bool {
    package.starts_with(&format!("linux-image-{}.", SERIES[0]))
}

/// The newest package of the best series that apt knows.
fn newest_package() -> Result<Option<String>> {
    let output = apt("apt-cache", &["pkgnames", "linux-image-6."], Path::new("/"))?;
    Ok(choose(&String::from_utf8_lossy(&output.stdout)))
}

fn choose(names: &str) -> Option<String> {
    SERIES.iter().find_map(|series| {
        let prefix = format!("linux-image-{series}.");
        let ours = |name: &&str| {
            name.starts_with(&prefix)
                && name.ends_with("-amd64-unsigned")
                && !["-cloud-", "-rt-"].iter().any(|flavour| name.contains(flavour))
        };
        names.lines().map(str::trim).filter(ours).max_by_key(|name| version(name)).map(str::to_owned)
    })
}

/// The numbers in a release, for comparing.
fn version(release: &str) -> Vec<u64> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

/// Downloads and unpacks a package; nothing half-made is left in `cache`.
fn download(package: &str, cache: &Path) -> Result<()> {
    let kernels = cache.join("kernels");
    fs::create_dir_all(&kernels).with_context(|| format!("cannot make {}", kernels.display()))?;
    let work = tempfile::Builder::new().prefix(".download-").tempdir_in(cache).context("cannot make a folder")?;
    apt("apt-get", &["download", "--quiet=2", RETRIES, package], work.path())
        .context("cannot download the guest's kernel: is the package mirror reachable?")?;
    let deb = fs::read_dir(work.path())?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .with_context(|| format!("apt-get download {package} left no file"))?;
    let tree = work.path().join("tree");
    fs::create_dir(&tree)?;
    unpack(&deb, &tree)?;
    let release = fs::read_dir(tree.join("lib/modules"))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .next()
        .with_context(|| format!("{package} has no modules"))?;
    output(Command::new("depmod").arg("-b").arg(&tree).arg(&release))?;
    let target = kernels.join(&release);
    if target.exists() {
        fs::remove_dir_all(&target)?;
    }
    fs::rename(&tree, &target).with_context(|| format!("cannot keep the kernel in {}", target.display()))
}

fn unpack(deb: &Path, tree: &Path) -> Result<()> {
    let mut archive = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(deb)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run dpkg-deb")?;
    let pipe = archive.stdout.take().expect("is piped");
    let unpacked = Command::new("tar")
        .args(["-x", "--no-same-owner", "--wildcards", "-C"])
        .arg(tree)
        .args(PARTS)
        .stdin(pipe)
        .output()
        .context("cannot run tar")?;
    let read = archive.wait()?;
    // Parts that this package does not have are no harm: what is needed is looked for later.
    let absent = String::from_utf8_lossy(&unpacked.stderr)
        .lines()
        .all(|line| line.contains("Not found in archive") || line.contains("previous errors"));
    if !read.success() || !(unpacked.status.success() || absent) {
        bail!("cannot unpack {}: {}", deb.display(), last_line(&unpacked.stderr));
    }
    Ok(())
}

fn apt(program: &str, args: &[&str], dir: &Path) -> Result<Output> {
    output(Command::new(program).args(args).current_dir(dir))
}

fn output(command: &mut Command) -> Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        bail!("{name} failed: {}", last_line(&output.stderr));
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_ordinary_kernel_of_the_best_series_is_chosen() {
        let names = "linux-image-6.1.0-57-amd64-unsigned\nlinux-image-6.12.99+deb12-amd64-unsigned\n\
                     linux-image-6.12.117+deb12-amd64-unsigned\nlinux-image-6.12.118+deb12-cloud-amd64-unsigned\n\
                     linux-image-6.12.119+deb12-amd64-dbg\nlinux-image-6.12.119+deb12-rt-amd64-unsigned\n";
        assert_eq!(choose(names).as_deref(), Some("linux-image-6.12.117+deb12-amd64-unsigned"));
        let old = "linux-image-6.1.0-9-amd64-unsigned\nlinux-image-6.1.0-57-amd64-unsigned\n";
        assert_eq!(choose(old).as_deref(), Some("linux-image-6.1.0-57-amd64-unsigned"));
        assert_eq!(choose("linux-image-5.10.0-9-amd64-unsigned\n"), None);
        assert!(
            is_best("linux-image-6.12.117+deb12-amd64-unsigned") && !is_best("linux-image-6.1.0-57-amd64-unsigned")
        );
    }

    #[test]
    fn half_a_kernel_is_none() {
        let cache = tempfile::tempdir().expect("a temporary folder");
        assert!(Kernel::cached(cache.path(), "6.12").is_none());
        for release in ["6.12.9-amd64", "6.12.10-amd64", "6.12.11-amd64"] {
            let folder = cache.path().join("kernels").join(release);
            fs::create_dir_all(folder.join("boot")).expect("can make folders");
            fs::create_dir_all(folder.join("lib/modules").join(release)).expect("can make folders");
            fs::write(folder.join(format!("boot/vmlinuz-{release}")), "").expect("can write");
            if release != "6.12.11-amd64" {
                fs::write(folder.join("lib/modules").join(release).join("modules.dep"), "").expect("can write");
            }
        }
        assert_eq!(Kernel::cached(cache.path(), "6.12").expect("is there").release, "6.12.10-amd64");
        assert!(Kernel::cached(cache.path(), "6.1").is_none(), "6.12 is not 6.1");
    }
}
