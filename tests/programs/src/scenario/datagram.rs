//! rdmacm-utils' mckey, whose ends find each other by a multicast group, and udpong, whose server does not end by itself.

use std::time::Duration;

use super::{World, death};
use crate::failure::Failure;
use crate::launch::Identity;
use crate::line::{UNTIL_LISTENING, next_port};
use crate::place::{Family, Host};
use crate::process::{Finished, Running, wait_all};

const MINUTE: Duration = Duration::from_secs(60);

/// A sender, and two receivers of which one is on the sender's host. Few datagrams at once: nothing holds the sender of a group back, and
/// what a receiver's buffer has no room for is lost.
pub(super) fn mckey(world: &World<'_>) -> Result<(), Failure> {
    let (group, unmapped) = match world.wire.server.family {
        Family::V4 => ("239.255.71.1", "::ffff:239.255.71.2"),
        Family::V6 => ("ff0e::7:1", "ff0e::7:2"),
    };
    let calls = [
        ["-m", group].to_vec(),
        ["-m", group, "-c", "4", "-C", "10", "-S", "1024"].to_vec(),
        ["-m", group, "-p", "0x2"].to_vec(),
        ["-M", unmapped].to_vec(),
        ["-M", unmapped, "-c", "3", "-C", "1"].to_vec(),
    ];
    calls.iter().try_for_each(|call| send(world, call, receivers(world, call)?))
}

/// Who is in a group stays there when the service dies, and gets what is sent afterwards.
pub(super) fn mckey_kill_service(world: &World<'_>) -> Result<(), Failure> {
    let call = ["-m", "239.255.71.3", "-c", "2", "-C", "10"];
    let receivers = receivers(world, &call)?;
    death::end_services(world)?;
    send(world, &call, receivers)
}

/// Members of a group on both hosts.
fn receivers(world: &World<'_>, call: &[&str]) -> Result<Vec<Running>, Failure> {
    let mut receivers = Vec::new();
    for (role, host) in [("server", &world.wire.server), ("client", &world.wire.client)] {
        let mut receiver = start(world, role, host, "mckey", &[call, &["-b", host.address]].concat())?;
        receiver.wait_member(|| world.status(host, Identity::Ordinary, &[]), UNTIL_LISTENING)?;
        receivers.push(receiver);
    }
    Ok(receivers)
}

/// Sends to the group. All end well.
fn send(world: &World<'_>, call: &[&str], receivers: Vec<Running>) -> Result<(), Failure> {
    let host = &world.wire.client;
    let sender = start(world, "sender", host, "mckey", &[call, &["-s", "-b", host.address]].concat())?;
    let running = receivers.into_iter().chain([sender]).collect();
    wait_all(running, MINUTE)?.iter().try_for_each(|program| {
        program.check_stderr(&[])?;
        has(program, "return status 0")
    })
}

/// Datagram rsockets: each way to call, and what is longer than a packet of the device.
///
/// Few rounds only: udpong asks again after a millisecond, into the message that it receives answers to. An old answer that comes late makes
/// it ask the old question for ever, also over the kernel's UDP.
pub(super) fn udpong(world: &World<'_>) -> Result<(), Failure> {
    let calls: [&[&str]; 6] = [
        &["-T", "b", "-T", "e", "-S", "1000", "-C", "20"],
        &["-T", "n", "-T", "e", "-S", "64", "-C", "20"],
        &["-T", "a", "-T", "e", "-S", "16", "-C", "20"],
        &["-T", "a", "-S", "1000", "-C", "2000"],
        &["-T", "b", "-T", "e", "-S", "2000", "-C", "20"],
        &["-B", "8192", "-T", "e", "-S", "300", "-C", "20"],
    ];
    for options in calls {
        let port = next_port();
        let number = port.to_string();
        let (server, client) = (&world.wire.server, &world.wire.client);
        let args = [&["-b", server.address, "-p", &number], options].concat();
        let mut served = start(world, "server", server, "udpong", &args)?;
        served.wait_bound(port, UNTIL_LISTENING)?;
        let args = [&["-s", server.address, "-p", &number], options].concat();
        let asked = start(world, "client", client, "udpong", &args)?;
        let finished = wait_all(vec![asked], 2 * MINUTE)?.remove(0);
        finished.check_stderr(&[])?;
        has(&finished, "custom")?;
    }
    Ok(())
}

fn start(world: &World<'_>, role: &str, host: &Host, program: &str, args: &[&str]) -> Result<Running, Failure> {
    world.start(role, host, Identity::Ordinary, &[], program, args)
}

fn has(program: &Finished, text: &str) -> Result<(), Failure> {
    if program.stdout.contains(text) {
        return Ok(());
    }
    Err(Failure::new(format!("{} did not print {text:?}", program.name)).with(program.report()))
}
