//! Scenarios that the C programs of this folder judge themselves.

use std::time::Duration;

use super::{World, all_ok};
use crate::compile;
use crate::failure::Failure;
use crate::launch::Identity;
use crate::line;
use crate::process::{Running, wait_all};

const MINUTE: Duration = Duration::from_secs(60);

/// A target that sleeps in pause() is written, read and counted in all the while.
pub(super) fn target_sleeps(world: &World<'_>) -> Result<(), Failure> {
    world.pair("sleeper", &["-n", "3000"], 3 * MINUTE)
}

/// A word that its owner increments is READ a million times, and no frame is lost by it.
pub(super) fn word_ticks(world: &World<'_>) -> Result<(), Failure> {
    let counters = world.counted(1, "ticker", &["-n", "1000000"], 20 * MINUTE)?;
    counters.check_zero(&["rx_icrc_errors", "rx_drop_full", "tx_drop_full"])
}

/// Whoever polls the last byte of a WRITE sees no older bytes before it.
pub(super) fn last_byte(world: &World<'_>) -> Result<(), Failure> {
    world.pair("lastbyte", &["-n", "200000"], 10 * MINUTE)
}

/// The same ten million times.
pub(super) fn last_byte_long(world: &World<'_>) -> Result<(), Failure> {
    world.pair("lastbyte", &["-n", "10000000"], 90 * MINUTE)
}

/// Registered memory is unmapped, truncated, protected under traffic.
pub(super) fn memory_vanishes(world: &World<'_>) -> Result<(), Failure> {
    world.pair("vanish", &[], 5 * MINUTE)
}

/// The target's regions are deregistered and unmapped under traffic.
pub(super) fn churn_remote(world: &World<'_>) -> Result<(), Failure> {
    world.pair("churn", &["--mode", "remote", "-D", "10"], 2 * MINUTE)
}

/// The requester's own regions are deregistered and unmapped under its requests.
pub(super) fn churn_local(world: &World<'_>) -> Result<(), Failure> {
    world.pair("churn", &["--mode", "local", "-D", "10"], 2 * MINUTE)
}

/// Requests that may not be, and their statuses at both ends.
pub(super) fn statuses(world: &World<'_>) -> Result<(), Failure> {
    world.pair("status", &[], 3 * MINUTE)
}

/// Four processes with four others at the same time, all bytes checked, without a retransmission.
pub(super) fn four_with_four(world: &World<'_>) -> Result<(), Failure> {
    let counters = world.counted(4, "traffic", &["-D", "10"], 2 * MINUTE)?;
    counters.check_zero(&["packets_retransmitted", "rx_icrc_errors", "rx_drop_full", "tx_drop_full"])
}

/// Both ends fork under traffic; the children open the device anew.
pub(super) fn fork(world: &World<'_>) -> Result<(), Failure> {
    world.pair("traffic", &["--mode", "fork", "-D", "5"], 2 * MINUTE)
}

/// Both ends fork and execute under traffic.
pub(super) fn fork_and_exec(world: &World<'_>) -> Result<(), Failure> {
    world.pair("traffic", &["--mode", "exec", "-D", "5"], 2 * MINUTE)
}

/// A server that root starts becomes an ordinary user after it has opened the device.
pub(super) fn setuid(world: &World<'_>) -> Result<(), Failure> {
    // In a namespace where no other user's service runs yet.
    let wire = world.wire.place.make()?;
    let world = World { wire: &wire, launcher: world.launcher };
    let uid = world.launcher.uid().to_string();
    let server = ["--mode", "setuid", "-n", &uid, "-D", "4"];
    let (server, client) =
        world.start_pair_as(&[], "traffic", (Identity::Root, &server), (Identity::Ordinary, &["-D", "4"]))?;
    all_ok(&wait_all(vec![server, client], 2 * MINUTE)?)
}

/// Whole frames from host to host, for which root has the right.
pub(super) fn frames(world: &World<'_>) -> Result<(), Failure> {
    // In a namespace where no other user's service runs yet.
    let wire = world.wire.place.make()?;
    let world = World { wire: &wire, launcher: world.launcher };
    let root = (Identity::Root, &[][..]);
    let (server, client) = world.start_pair_as(&[], "frames", root, root)?;
    all_ok(&wait_all(vec![server, client], 2 * MINUTE)?)
}

/// Python's multiprocessing under traffic, with Debian's pyverbs.
pub(super) fn python(world: &World<'_>) -> Result<(), Failure> {
    let script = world.launcher.programs().join("fork.py");
    std::fs::copy(compile::script("fork.py"), &script)
        .map_err(|e| Failure::new(format!("cannot copy fork.py: {e}")))?;
    let host = &world.wire.server;
    let gid = host.gid_index(world.launcher)?.to_string();
    // Debian's own Python: python3-pyverbs is built for it.
    let command = host.command(world.launcher, "/usr/bin/python3", [script.into_os_string(), gid.into()]);
    let running = Running::start("python3", command, &world.launcher.output())?;
    all_ok(&wait_all(vec![running], 2 * MINUTE)?)
}

/// Processes of one host, each connected with each other one: all bytes checked, and the memory of their rings counted.
fn mesh(world: &World<'_>, processes: &str) -> Result<(), Failure> {
    // With a service of their own, which may open no more files than they.
    let wire = world.wire.place.make()?;
    let world = World { wire: &wire, launcher: world.launcher };
    let ended = world.alone(&[], "mesh", &["-n", processes], 10 * MINUTE)?;
    ended.check_stderr(&[])
}

/// Four of them.
pub(super) fn mesh_4(world: &World<'_>) -> Result<(), Failure> {
    mesh(world, "4")
}

/// 64 of them: 2,016 pairs, whose rings come to lie below 64 MiB.
pub(super) fn mesh_64(world: &World<'_>) -> Result<(), Failure> {
    mesh(world, "64")
}

/// 10,000 QPs in one process, and what an idle one costs.
pub(super) fn many_qps(world: &World<'_>) -> Result<(), Failure> {
    world.alone(&[], "objects", &["--mode", "many"], 5 * MINUTE).and_then(|program| program.check_stderr(&[]))
}

/// 100,000 objects made and destroyed.
pub(super) fn leak(world: &World<'_>) -> Result<(), Failure> {
    world.alone(&[], "objects", &["--mode", "leak"], 10 * MINUTE).and_then(|program| program.check_stderr(&[]))
}

/// A short exchange that must work: proof that a fault before left nothing behind.
pub(super) fn works(world: &World<'_>) -> Result<(), Failure> {
    world.pair("traffic", &["-D", "0.5"], line::UNTIL_LISTENING + MINUTE)
}
