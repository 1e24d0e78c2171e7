//! Network namespaces that the harness makes itself, joined by veth pairs, and always removed.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::failure::Failure;

/// What the names of our namespaces start with; the harness's PID namespace, its process id in there, and a number follow. The names are
/// seen from all PID namespaces of the machine. Names from before the PID namespace stood in them began otherwise: harnesses of both kinds
/// side by side must not take each other's for their own.
const PREFIX: &str = "ferroce-net";

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A network namespace of ours. Dropping it ends the processes in it and removes it.
#[derive(Debug)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Makes a namespace in which loopback is up and IPv6 addresses are usable at once.
    pub fn new() -> Result<Namespace, Failure> {
        if !rustix::process::geteuid().is_root() {
            return Err(Failure::new(
                "network namespaces can only be made by root: run this as root (programs under \
                                     test run as an ordinary user all the same)",
            ));
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}-{}-{}-{number}", pid_namespace(), std::process::id());
        run(Command::new("ip").args(["netns", "add", &name]))?;
        let namespace = Namespace { name };
        for what in ["all", "default"] {
            namespace.sysctl(&format!("net/ipv6/conf/{what}/accept_dad"), "0")?;
        }
        namespace.ip(&["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// Its name, as `ip netns` knows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip` in it.
    pub fn ip(&self, args: &[&str]) -> Result<String, Failure> {
        run(Command::new("ip").args(["-n", &self.name]).args(args))
    }

    /// Runs a program in it, as root.
    pub fn exec(&self, args: &[&str]) -> Result<String, Failure> {
        run(Command::new("ip").args(["netns", "exec", &self.name]).args(args))
    }

    fn sysctl(&self, key: &str, value: &str) -> Result<(), Failure> {
        self.exec(&["sh", "-c", &format!("echo {value} > /proc/sys/{key}")]).map(|_| ())
    }

    /// Brings up the interface `name`, made before, with addresses (`10.0.0.1/24`, `fd00::1/64`).
    pub fn address(&self, name: &str, mtu: u32, addresses: &[&str]) -> Result<(), Failure> {
        self.ip(&["link", "set", name, "mtu", &mtu.to_string()])?;
        if addresses.is_empty() {
            self.ip(&["link", "set", name, "addrgenmode", "none"])?;
        }
        self.ip(&["link", "set", name, "up"])?;
        for address in addresses {
            let mut args = vec!["addr", "add", address, "dev", name];
            if address.contains(':') {
                args.push("nodad");
            }
            self.ip(&args)?;
        }
        Ok(())
    }

    /// Makes the interface behave like a card's: what comes in is merged (GRO), what goes out is cut before it is on
    /// the wire (no TSO, no GSO), so that the receiver sees packets and not the sender's batches, and what does not fit the
    /// ring waits in a queue. (A veth has none by itself, and drops what 256 entries do not hold.)
    pub fn behave_like_card(&self, name: &str) -> Result<(), Failure> {
        let features = ["gro", "on", "tso", "off", "gso", "off", "tx-udp-segmentation", "off"];
        self.exec(&[&["ethtool", "-K", name], features.as_slice()].concat())?;
        self.exec(&["tc", "qdisc", "replace", "dev", name, "root", "pfifo", "limit", "10000"]).map(|_| ())
    }

    /// Processes that run in it.
    pub fn processes(&self) -> Vec<Pid> {
        let pids = run(Command::new("ip").args(["netns", "pids", &self.name])).unwrap_or_default();
        pids.split_whitespace().filter_map(|word| Pid::from_raw(word.parse().ok()?)).collect()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        remove(self);
    }
}

/// Ends what runs in the namespace and removes it.
fn remove(namespace: &Namespace) {
    // Whatever runs there was started by a program under test: nobody else knows the namespace.
    for _ in 0..100 {
        let pids = namespace.processes();
        if pids.is_empty() {
            break;
        }
        for pid in pids {
            let _ = kill_process(pid, Signal::KILL);
        }
        sleep(Duration::from_millis(5));
    }
    if let Err(error) = run(Command::new("ip").args(["netns", "del", &namespace.name])) {
        let _ = writeln!(std::io::stderr(), "cannot remove namespace {}: {error}", namespace.name);
    }
}

/// Joins two namespaces by a cable: `eth0` in one, `eth0` in the other.
pub fn join(left: &Namespace, right: &Namespace) -> Result<(), Failure> {
    left.ip(&["link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", &right.name]).map(|_| ())
}

/// The number of this process's PID namespace; 0: it is not told.
fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// Removes the namespaces of harnesses that were ended by kill -9. Whether one of another PID namespace lives cannot be told from here.
pub fn remove_leftovers() {
    let Ok(entries) = fs::read_dir("/run/netns") else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if owner(&name, pid_namespace()).is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH)) {
            drop(Namespace { name });
        }
    }
}

/// The harness of our PID namespace that made the network namespace of this name.
fn owner(name: &str, pid_namespace: u64) -> Option<Pid> {
    let mut words = name.strip_prefix(PREFIX)?.strip_prefix('-')?.split('-');
    let theirs: u64 = words.next()?.parse().ok()?;
    let pid = words.next()?.parse().ok()?;
    words.next()?;
    Pid::from_raw(pid).filter(|_| theirs == pid_namespace)
}

/// True if the namespace is known to `ip netns`.
pub fn exists(name: &str) -> bool {
    Path::new("/run/netns").join(name).exists()
}

/// Runs a command of the system and gives what it printed.
fn run(command: &mut Command) -> Result<String, Failure> {
    let shown = || {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    };
    let shown = shown();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Failure::new(format!("cannot run `{shown}`: {e}; is it installed?")))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::new(format!("`{shown}` failed ({}): {}", output.status, why.trim())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_namespaces_of_harnesses_that_can_be_seen_are_left_over() {
        assert_eq!(owner("ferroce-net-4026531836-77-0", 4_026_531_836), Pid::from_raw(77));
        for name in [
            "ferroce-net-4026532000-77-0",
            "ferroce-net-77-0",
            "ferroce-net-x-77-0",
            "ferroce-net",
            "ferroce-test-77-0",
        ] {
            assert_eq!(owner(name, 4_026_531_836), None, "{name}");
        }
    }

    #[test]
    fn namespaces_are_joined_and_removed_or_root_is_asked_for() {
        if !rustix::process::geteuid().is_root() {
            let error = Namespace::new().expect_err("an ordinary user may not");
            assert!(error.to_string().contains("run this as root"), "{error}");
            return;
        }
        let (left, right) = (Namespace::new().expect("root may"), Namespace::new().expect("root may"));
        join(&left, &right).expect("both are there");
        left.address("eth0", 9000, &["10.11.12.1/24", "fd11::1/64"]).expect("fresh interface");
        right.address("eth0", 9000, &["10.11.12.2/24", "fd11::2/64"]).expect("fresh interface");
        right.behave_like_card("eth0").expect("ethtool is there");
        assert!(left.ip(&["-o", "addr", "show", "dev", "eth0"]).expect("is there").contains("fd11::1/64"));
        assert!(!left.ip(&["-6", "addr", "show", "tentative"]).expect("is there").contains("fd11"));
        let mut idle =
            Command::new("ip").args(["netns", "exec", left.name(), "sleep", "1000"]).spawn().expect("sleep is there");
        while left.processes().is_empty() {
            sleep(Duration::from_millis(5));
        }
        let name = left.name().to_owned();
        drop(left);
        idle.wait().expect("it was ended");
        assert!(!exists(&name) && exists(right.name()));
    }
}
