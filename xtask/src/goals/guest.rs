//! The virtual machine of `tests/interop`, in which stock programs run on the kernel's rxe and on Ferroce.
//!
//! rxe has its queue pairs on the guest's card and reaches them through itself. Ferroce has a network namespace of the guest: rxe
//! holds UDP port 4791 in the first one.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use interop_tests::kernel::Kernel;
use interop_tests::remote::{Agent, SLACK, finished};
use interop_tests::table::{Family, PLACES};
use interop_tests::world::World;
use interop_tests::{image, needs};
use program_tests::failure::Failure;
use program_tests::launch::{Launcher, Via};
use tempfile::TempDir;

use super::bench::perftest;
use super::parse;
use super::subject::{Program, Sample, Stack, Subject};
use crate::process::say;

/// Ferroce's network namespace in the guest.
const NAMESPACE: &str = "ferroce";
/// The guest's address, which rxe's device has.
const RXE_ADDRESS: &str = "10.88.0.2";
/// MTU of the guest's card: path MTU 4096, which loopback gives Ferroce.
const MTU: u32 = 9000;
/// Longest time of a small command.
const SMALL: Duration = Duration::from_secs(60);
/// Longest time of a measurement.
const LIMIT: Duration = Duration::from_secs(180);
/// Nobody else has ports in the guest.
const PORT: &str = "18515";
/// The same as proc(5) has it.
const PORT_HEX: &str = "4853";
/// Ordinary user for programs of the bench outside of the guest, of which there are none here.
const UID: u32 = 61_235;

/// A guest that is up.
pub(super) struct Guest {
    world: World,
    /// Has its root.
    _work: TempDir,
}

impl Guest {
    /// Boots a guest with rxe and Ferroce. The kernel comes from `cache`, or from Debian's mirror.
    pub(super) fn boot(install: &Path, cache: &Path) -> Result<Guest> {
        say("booting a virtual machine");
        needs::check(false)?;
        std::fs::create_dir_all(cache).with_context(|| format!("cannot make {}", cache.display()))?;
        let kernel = Kernel::find(cache)?;
        let work = TempDir::new().context("cannot make a temporary folder")?;
        let root = work.path().join("root.cpio");
        let own = ["bin/ferroce", "bin/ferroced", "lib/libibverbs.so.1"].map(|part| install.join(part));
        image::write(&kernel, &own, &root)?;
        let place = PLACES.iter().find(|place| place.mtu == MTU && place.family == Family::V4);
        let launcher = Launcher::new(install, Via::Run, UID).map_err(in_words)?;
        let mut world = World::new(kernel, root, launcher).map_err(|trouble| anyhow!("{trouble}"))?;
        world.boot(place.context("the bench has no such place")?).map_err(|trouble| anyhow!("{trouble}"))?;
        let guest = Guest { world, _work: work };
        guest.make_namespace()?;
        Ok(guest)
    }

    fn make_namespace(&self) -> Result<()> {
        // busybox has a small `ip` of its own, which its shell prefers.
        let script =
            format!("mkdir -p /run /var/run && /bin/ip netns add {NAMESPACE} && /bin/ip -n {NAMESPACE} link set lo up");
        let run = || self.world.agent()?.run(&["/bin/busybox", "sh", "-c", &script], SMALL)?.check_success();
        run().map_err(in_words).context("the guest makes no network namespace")
    }

    /// Runs a program of perftest, both ends in the guest.
    pub(super) fn run(&self, subject: &Subject, count: u64) -> Result<Sample> {
        let Program::Perftest { name, stack, .. } = subject.program else { bail!("only perftest runs in the guest") };
        let options = perftest(&subject.program, count);
        let command = |more: &[&str]| -> Vec<String> {
            let program = format!("/bin/{name}");
            let words = prefix(stack).into_iter().chain([program]).chain(options.iter().cloned());
            words.chain(["-p", PORT].iter().chain(more).map(|word| (*word).to_owned())).collect()
        };
        let (server, client) = match stack {
            Stack::Rxe => (command(&["-d", "rxe0"]), command(&["-d", "rxe0", RXE_ADDRESS])),
            Stack::Ferroce => (command(&[]), command(&["127.0.0.1"])),
        };
        let agent = self.world.agent().map_err(in_words)?;
        parse::perftest(&two_ends(agent, stack, &server, &client).map_err(in_words)?)
    }
}

/// What the client printed.
fn two_ends(agent: &Agent, stack: Stack, server: &[String], client: &[String]) -> Result<String, Failure> {
    let ticket = agent.start(&as_str(server), LIMIT)?;
    let run = || -> Result<String, Failure> {
        wait_listening(agent, stack)?;
        let client = agent.run(&as_str(client), LIMIT)?;
        client.check_success()?;
        Ok(client.stdout)
    };
    let printed = run();
    if printed.is_err() {
        ticket.end();
    }
    let server = finished("the server", ticket.wait(LIMIT + SLACK)?)?;
    let printed = printed.map_err(|failure| failure.with(server.report()))?;
    server.check_success()?;
    Ok(printed)
}

/// What comes before a program that uses this stack.
fn prefix(stack: Stack) -> Vec<String> {
    let words = match stack {
        Stack::Rxe => String::new(),
        Stack::Ferroce => format!(
            "/bin/ip netns exec {NAMESPACE} /bin/busybox env FERROCE_LIB=/bin FERROCE_LOOPBACK=1 /bin/ferroce run --"
        ),
    };
    words.split_whitespace().map(str::to_owned).collect()
}

fn as_str(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Waits until a server listens in the namespace of `stack`.
fn wait_listening(agent: &Agent, stack: Stack) -> Result<(), Failure> {
    let begun = Instant::now();
    let script = format!("busybox grep -q ':{PORT_HEX} [0-9A-F]*:0000 0A' /proc/net/tcp /proc/net/tcp6");
    let mut words = match stack {
        Stack::Rxe => vec![],
        Stack::Ferroce => vec!["/bin/ip", "netns", "exec", NAMESPACE],
    };
    words.extend(["/bin/busybox", "sh", "-c", &script]);
    while agent.run(&words, SMALL)?.check_success().is_err() {
        if begun.elapsed() > SMALL {
            return Err(Failure::new("the server in the guest does not listen"));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn in_words(failure: Failure) -> anyhow::Error {
    anyhow!("{failure}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_the_one_that_is_looked_for() {
        assert_eq!(PORT.parse::<u16>().map(|port| format!("{port:04X}")).as_deref(), Ok(PORT_HEX));
    }

    #[test]
    fn rxe_s_programs_run_as_they_are() {
        assert!(prefix(Stack::Rxe).is_empty());
        assert_eq!(prefix(Stack::Ferroce).last().map(String::as_str), Some("--"));
    }
}
