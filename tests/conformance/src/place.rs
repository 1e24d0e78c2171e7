//! Where the devices are: Ferroce behind a veth pair in a network namespace of its own, rxe in a guest behind a tap.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use interop_tests::ends::End;
use interop_tests::kernel::Kernel;
use interop_tests::table::PLACES;
use interop_tests::world::World;
use interop_tests::{image, needs};
use program_tests::launch::{Launcher, Via};

use crate::bench::Bench;
use crate::cases::Case;
use crate::dut::{self, Dut};
use crate::report::{Again, Results, judge};
use crate::wire::Wire;

/// The device's addresses.
pub const DUT: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(10, 88, 0, 2)), IpAddr::V6(Ipv6Addr::new(0xfd00, 0x88, 0, 0, 0, 0, 0, 2))];
/// The tester's addresses. No interface has them: the tester's packets are made by hand.
pub const TESTER: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(10, 88, 0, 9)), IpAddr::V6(Ipv6Addr::new(0xfd00, 0x88, 0, 0, 0, 0, 0, 9))];
/// Ethernet address that the tester's packets seem to come from.
const TESTER_MAC: &str = "02:00:00:88:00:09";
/// Ferroce's Ethernet address; rxe's is that of the guest.
const FERROCE_MAC: &str = "02:00:00:88:00:02";
const GUEST_MAC: &str = "52:54:00:88:00:02";
/// TCP port of the program in the guest.
const GUEST_PORT: u16 = 4900;
/// Longest time that all cases may take in the guest.
const GUEST_LIMIT: Duration = Duration::from_secs(40 * 60);

/// Longest wait for what must come. Ferroce's machine may be busy; the guest is emulated besides.
const FERROCE_PATIENCE: Duration = Duration::from_secs(30);
const GUEST_PATIENCE: Duration = Duration::from_secs(30);

/// An installation of Ferroce: `lib/libibverbs.so.1` and `bin/ferroced`.
#[derive(Clone, Debug)]
pub struct Install(pub PathBuf);

impl Install {
    fn check(&self) -> Result<()> {
        for part in ["lib/libibverbs.so.1", "bin/ferroced"] {
            let path = self.0.join(part);
            ensure!(path.is_file(), "{} is missing: run `cargo xtask build`", path.display());
        }
        Ok(())
    }
}

/// What makes the network of Ferroce's place, in a fresh namespace. Packets must reach the tester as they are on a wire, so the
/// kernel cuts what Ferroce sends in batches.
fn ferroce_network() -> String {
    let ([v4, v6], [tester_v4, tester_v6]) = (DUT, TESTER);
    format!(
        "set -e\n\
         ip link set lo up\n\
         ip link add dut0 address {FERROCE_MAC} mtu 9000 type veth peer name wire0 mtu 9000\n\
         ip link set dut0 gso_max_segs 1\n\
         ip link set wire0 up\n\
         ip link set dut0 up\n\
         ip addr add {v4}/24 dev dut0\n\
         ip addr add {v6}/64 dev dut0 nodad\n\
         ip neigh add {tester_v4} lladdr {TESTER_MAC} dev dut0 nud permanent\n\
         ip neigh add {tester_v6} lladdr {TESTER_MAC} dev dut0 nud permanent\n\
         exec \"$0\" \"$@\""
    )
}

/// Runs cases against Ferroce: this program again, in a user and a network namespace of its own.
pub fn ferroce(install: &Install, program: &Path, names: &[&str]) -> Result<Results> {
    install.check()?;
    let mut command = Command::new("unshare");
    command.args(["-rn", "sh", "-c", &ferroce_network()]).arg(program).arg("play-ferroce").arg(&install.0).args(names);
    play(command).context("Ferroce's run (it needs `unshare -rn`, ip from iproute2 and veth)")
}

/// Runs cases against the rxe of a Linux kernel in QEMU.
pub fn rxe(program: &Path, names: &[&str], cache: &Path, install_packages: bool) -> Result<Results> {
    needs::check(install_packages)?;
    std::fs::create_dir_all(cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let kernel = Kernel::find(cache)?;
    let work = tempfile::Builder::new().prefix("ferroce-conformance-").tempdir().context("cannot make a folder")?;
    let dut = work.path().join("dut");
    dut::compile(&dut)?;
    let root = work.path().join("root.cpio");
    // The guest's first program is that of the interop bench; it knows how to be one.
    image::write(&kernel, &[dut], &root)?;
    let release = kernel.release.clone();
    let launcher = Launcher::new(Path::new("/"), Via::System, 61_235)?;
    let mut world = World::new(kernel, root, launcher).map_err(|trouble| anyhow!("{trouble}"))?;
    let mut results = in_guest(&mut world, program, names).map_err(|error| {
        let log = world.kernel_log();
        if log.trim().is_empty() { error } else { error.context(format!("kernel log:\n{log}")) }
    })?;
    results.device = format!("rxe of Linux {release}");
    Ok(results)
}

fn in_guest(world: &mut World, program: &Path, names: &[&str]) -> Result<Results> {
    let place = PLACES.iter().find(|place| place.mtu == 9000).context("the interop bench has a place with MTU 9000")?;
    world.boot(place).map_err(|trouble| anyhow!("{trouble}"))?;
    for tester in TESTER {
        world
            .guest_command(&format!("ip neigh add {tester} lladdr {TESTER_MAC} dev eth0 nud permanent"))
            .map_err(|trouble| anyhow!("{trouble}"))?;
    }
    let mut dut: End = world.on_kernel("dut", &[GUEST_PORT.to_string()], GUEST_LIMIT, "dut")?;
    dut.wait_listening(world.agent()?, GUEST_PORT, Duration::from_secs(60))?;
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/run/netns/{}", world.namespace().name())).arg("--").arg(program);
    command.arg("play-guest").arg(world.tap()).args(names);
    play(command)
}

/// Runs this program as the tester and reads its results. Its progress goes to our stderr.
fn play(mut command: Command) -> Result<Results> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("cannot start the tester")?;
    ensure!(output.status.success(), "the tester failed ({}); its last words are above", output.status);
    serde_json::from_slice(&output.stdout).context("the tester's results are damaged")
}

/// The tester in Ferroce's namespace: starts the program under test and plays.
pub fn play_ferroce(install: &Install, cases: &[Case]) -> Result<Results> {
    let work = tempfile::Builder::new().prefix("ferroce-conformance-").tempdir().context("cannot make a folder")?;
    let path = work.path().join("dut");
    dut::compile(&path)?;
    let program = Program::start(&path, install)?;
    let control = SocketAddr::from(([127, 0, 0, 1], program.port));
    let mut results = run("wire0", FERROCE_MAC, control, (FERROCE_PATIENCE, Again::Silence), cases)?;
    results.device = "Ferroce".to_owned();
    Ok(results)
}

/// The tester at the tap of the guest.
pub fn play_guest(tap: &str, cases: &[Case]) -> Result<Results> {
    run(tap, GUEST_MAC, SocketAddr::from((DUT[0], GUEST_PORT)), (GUEST_PATIENCE, Again::All), cases)
}

fn run(
    interface: &str,
    mac: &str,
    control: SocketAddr,
    (patience, again): (Duration, Again),
    cases: &[Case],
) -> Result<Results> {
    let wire =
        Wire::open(interface, parse_mac(mac)?).with_context(|| format!("cannot open {interface} for packets"))?;
    let dut = Dut::connect(control, DUT)?;
    let mut bench = Bench::new(wire, dut, TESTER, DUT, patience);
    let mut results = Results { device: bench.dut.device.clone(), records: Vec::new() };
    for case in cases {
        let record = judge(&mut bench, case, again)?;
        if let Some(what) = record.departs.as_ref().or(record.before.first()) {
            // Someone waits at a terminal; nobody there is no harm.
            let _ = writeln!(std::io::stderr(), "{}: {what}", case.name);
        }
        results.records.push(record);
    }
    Ok(results)
}

fn parse_mac(text: &str) -> Result<[u8; 6]> {
    let bytes: Vec<u8> = text.split(':').map(|word| u8::from_str_radix(word, 16)).collect::<Result<_, _>>()?;
    bytes.try_into().map_err(|_| anyhow!("{text} is no Ethernet address"))
}

/// The program under test on Ferroce. Dropping it ends it.
struct Program {
    child: Child,
    port: u16,
}

impl Program {
    fn start(path: &Path, install: &Install) -> Result<Program> {
        let child = Command::new(path)
            .env("LD_LIBRARY_PATH", install.0.join("lib"))
            .env("FERROCE_SERVICE", install.0.join("bin/ferroced"))
            .env("FERROCE_SERVICE_IDLE_S", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start the program under test")?;
        let mut program = Program { child, port: 0 };
        let mut line = String::new();
        let stdout = program.child.stdout.take().context("stdout is a pipe")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let port = line.trim().strip_prefix("listening on ").and_then(|word| word.parse().ok());
        let Some(port) = port else { bail!("the program under test said {line:?}") };
        program.port = port;
        Ok(program)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // An error means that it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ethernet_addresses_are_read() {
        assert_eq!(parse_mac(GUEST_MAC).expect("is one"), [0x52, 0x54, 0, 0x88, 0, 2]);
        parse_mac("52:54").expect_err("is too short");
    }

    #[test]
    fn a_missing_installation_is_named() {
        let error = Install("/nowhere".into()).check().expect_err("nothing there");
        assert!(error.to_string().contains("cargo xtask build"), "{error}");
    }
}
