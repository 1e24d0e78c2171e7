//! Programs over rsockets that need more than two command lines.

use std::time::Duration;

use super::{World, all_ok};
use crate::failure::Failure;
use crate::launch::Identity;
use crate::line::{UNTIL_LISTENING, next_port};
use crate::process::{Finished, Running, wait_all};

const MINUTE: Duration = Duration::from_secs(60);
/// librdmacm's own library that puts rsockets in the place of a program's sockets, as Debian installs it.
const PRELOAD: &str = "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so";

/// rdmacm-utils' rcopy copies a file to the other end.
pub(super) fn copy(world: &World<'_>) -> Result<(), Failure> {
    const BYTES: u32 = 20_000_003;
    let (from, to) = (world.launcher.scratch("original"), world.launcher.scratch("copy"));
    // Of a length that is no multiple of anything, without a period that buffers could hide.
    let contents: Vec<u8> = (0..BYTES).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
    std::fs::write(&from, &contents).map_err(|e| Failure::new(format!("cannot write {}: {e}", from.display())))?;
    let port = next_port().to_string();
    // It serves until it is ended.
    let _server = connectable(world, "rcopy", &["-p", &port])?;
    let target = format!("{}:{}", world.wire.server.address, to.display());
    let from = from.display().to_string();
    let client = start(world, "client", "rcopy", &[&from, &target, "-p", &port])?;
    wait_all(vec![client], 2 * MINUTE)?[0].check_stderr(&[])?;
    match std::fs::read(&to) {
        Ok(copied) if copied == contents => Ok(()),
        Ok(copied) => Err(Failure::new(format!("{} bytes arrived, and they differ", copied.len()))),
        Err(e) => Err(Failure::new(format!("no copy: {e}"))),
    }
}

/// A program of TCP, unmodified, with its sockets replaced by rsockets. No TCP port is listened on, so a client that fell back to TCP
/// would be refused.
pub(super) fn iperf3(world: &World<'_>) -> Result<(), Failure> {
    for options in [&["-n", "200M"][..], &["-n", "100M", "-R"], &["-n", "100M", "-P", "4"]] {
        let port = next_port().to_string();
        let server = connectable(world, "iperf3", &["-s", "-1", "-p", &port])?;
        let args = [&["-c", world.wire.server.address, "-p", &port], options].concat();
        let client = start(world, "client", "iperf3", &args)?;
        for program in wait_all(vec![server, client], 3 * MINUTE)? {
            check(&program)?;
        }
    }
    Ok(())
}

/// A server of TCP that forks: with the preload library's fork support its children's connections become rsockets.
pub(super) fn fork(world: &World<'_>) -> Result<(), Failure> {
    // The preload library's semaphore, by which servers take turns; of a run that was ended it may be left locked.
    match std::fs::remove_file("/dev/shm/sem.rsocket_fork") {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(Failure::new(format!("cannot remove /dev/shm/sem.rsocket_fork of an earlier run: {e}")));
        }
        _ => {}
    }
    let port_number = next_port();
    let port = port_number.to_string();
    let program = world.launcher.programs().join("forker").display().to_string();
    let args = ["RDMAV_FORK_SAFE=1", PRELOAD, &program, "-p", &port];
    let identity = Identity::Ordinary;
    let mut server = world.start("server", &world.wire.server, identity, &[], "env", &args)?;
    server.wait_listening(port_number, UNTIL_LISTENING)?;
    let args = [&args[..], &[world.wire.server.address]].concat();
    let client = world.start("client", &world.wire.client, identity, &[], "env", &args)?;
    all_ok(&wait_all(vec![server, client], 2 * MINUTE)?)
}

fn check(program: &Finished) -> Result<(), Failure> {
    program.check_stderr(&[])?;
    // The server of a test with -R knows what it has sent only.
    if ["receiver", "sender"].iter().any(|end| program.stdout.lines().any(|line| line.ends_with(end))) {
        return Ok(());
    }
    Err(Failure::new(format!("{} tells no result", program.name)).with(program.report()))
}

/// A server that listens for connections.
fn connectable(world: &World<'_>, program: &str, args: &[&str]) -> Result<Running, Failure> {
    let mut server = start(world, "server", program, args)?;
    server.wait_connectable(|| world.status(&world.wire.server, Identity::Ordinary, &[]), UNTIL_LISTENING)?;
    Ok(server)
}

/// Starts an end; of programs of TCP with the preload library.
fn start(world: &World<'_>, role: &str, program: &str, args: &[&str]) -> Result<Running, Failure> {
    let host = if role == "server" { &world.wire.server } else { &world.wire.client };
    if program == "rcopy" {
        return world.start(role, host, Identity::Ordinary, &[], program, args);
    }
    let args = [&[PRELOAD, program], args].concat();
    world.start(role, host, Identity::Ordinary, &[], "env", &args)
}
