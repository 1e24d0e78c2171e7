//! What the bench needs of the machine; each that is missing is one line that says how to get it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

/// A program that is needed, and the Debian package that has it.
#[derive(Clone, Copy, Debug)]
pub struct Tool {
    /// Name of the program.
    pub program: &'static str,
    /// Debian package.
    pub package: &'static str,
}

const fn tool(program: &'static str, package: &'static str) -> Tool {
    Tool { program, package }
}

/// Programs of the host.
pub const TOOLS: &[Tool] = &[
    tool("qemu-system-x86_64", "qemu-system-x86"),
    tool("ip", "iproute2"),
    tool("ethtool", "ethtool"),
    tool("rdma", "iproute2"),
    tool("depmod", "kmod"),
    tool("xz", "xz-utils"),
    tool("dpkg-deb", "dpkg"),
    tool("apt-get", "apt"),
    tool("ldd", "libc-bin"),
    tool("cc", "gcc"),
    tool("ibv_rc_pingpong", "ibverbs-utils"),
    tool("ib_write_bw", "perftest"),
    tool("rping", "rdmacm-utils"),
];

/// Programs of the host that capture and dissect.
pub const CAPTURE_TOOLS: &[Tool] = &[tool("tshark", "tshark"), tool("dumpcap", "wireshark-common")];

/// Files of the guest that belong to no program.
pub const FILES: &[Tool] = &[
    tool("/etc/libibverbs.d/rxe.driver", "ibverbs-providers"),
    tool("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    tool("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
    tool("/bin/busybox", "busybox-static"),
];

/// Where a program lies.
pub fn find(program: &str) -> Option<PathBuf> {
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        .iter()
        .map(|dir| Path::new(dir).join(program))
        .find(|path| path.is_file())
}

/// Debian packages that are missing, each once; `captures` are wanted, or not.
pub fn missing_packages(captures: bool) -> Vec<&'static str> {
    let more = if captures { CAPTURE_TOOLS } else { &[] };
    let tools = TOOLS.iter().chain(more).filter(|tool| find(tool.program).is_none());
    let files = FILES.iter().filter(|file| !Path::new(file.program).exists());
    let mut packages: Vec<&str> = tools.chain(files).map(|tool| tool.package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

/// Checks all but what captures need; with `install`, missing packages are installed.
pub fn check(install: bool) -> Result<()> {
    check_all(install, false)
}

/// Checks all, also what captures need if they are wanted.
pub fn check_all(install: bool, captures: bool) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("only root can make a network namespace and a tap device: run this as root");
    }
    if !Path::new("/dev/net/tun").exists() {
        bail!(
            "/dev/net/tun is missing, so there is no tap device for the guest: modprobe tun, or give it to the container"
        );
    }
    if !cfg!(target_arch = "x86_64") {
        bail!("the guest is an x86_64 machine with this machine's programs: run this on x86_64");
    }
    let missing = missing_packages(captures);
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    if !install {
        bail!("missing Debian packages: apt-get install {names} (or give --install-packages)");
    }
    let installed = Command::new("apt-get")
        .args(["install", "--yes", "--quiet=2", "--no-install-recommends"])
        .args(&missing)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(std::process::Stdio::null())
        .output();
    let good = installed.as_ref().is_ok_and(|output| output.status.success());
    let left = missing_packages(captures);
    if !good || !left.is_empty() {
        let why = installed.map(|output| last_line(&output.stderr)).unwrap_or_else(|error| error.to_string());
        bail!("cannot install {names}: {why}; apt-get update, and is the package mirror reachable?");
    }
    Ok(())
}

/// The last line that says something.
pub(crate) fn last_line(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let mut lines = text.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    lines.next().unwrap_or("it did not say why").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_and_each_package_is_named_once() {
        assert!(find("sh").is_some());
        assert!(find("no-such-program").is_none());
        let missing = missing_packages(true);
        let mut once = missing.clone();
        once.dedup();
        assert_eq!(missing, once);
    }

    #[test]
    fn the_last_words_are_told() {
        assert_eq!(last_line(b"W: a\nE: b \n\n"), "E: b");
        assert_eq!(last_line(b"\n"), "it did not say why");
    }
}
