//! Wrong input: refused at once, with the errno of the contract and one line that says what to do.

use std::time::Duration;

use super::World;
use crate::failure::Failure;
use crate::launch::{Identity, Via};
use crate::process::{Finished, Running};

/// "At once", for a machine that is busy.
const SOON: Duration = Duration::from_secs(30);
/// Makes the library say why it refuses.
const LOG: &[(&str, &str)] = &[("FERROCE_LOG", "warn")];

/// A `path_mtu` above the interface's.
pub(super) fn mtu(world: &World<'_>) -> Result<(), Failure> {
    says(&world.alone(LOG, "wrong", &["--mode", "mtu"], SOON)?, "path_mtu")
}

/// A GID index that does not exist.
pub(super) fn gid(world: &World<'_>) -> Result<(), Failure> {
    says(&world.alone(LOG, "wrong", &["--mode", "gid"], SOON)?, "sgid_index")
}

/// An address without a route.
pub(super) fn address(world: &World<'_>) -> Result<(), Failure> {
    says(&world.alone(LOG, "wrong", &["--mode", "unreachable"], SOON)?, "203.0.113.9")
}

/// Full queues.
pub(super) fn full(world: &World<'_>) -> Result<(), Failure> {
    quiet(&world.alone(&[], "wrong", &["--mode", "full"], SOON)?)
}

/// Calls that the state forbids.
pub(super) fn state(world: &World<'_>) -> Result<(), Failure> {
    quiet(&world.alone(&[], "wrong", &["--mode", "state"], SOON)?)
}

/// More than the device has.
pub(super) fn limits(world: &World<'_>) -> Result<(), Failure> {
    quiet(&world.alone(&[], "wrong", &["--mode", "limits"], SOON)?)
}

/// A QP number that nobody has.
pub(super) fn nobody(world: &World<'_>) -> Result<(), Failure> {
    quiet(&world.alone(&[], "wrong", &["--mode", "nobody"], SOON)?)
}

/// An address at which there is no host.
pub(super) fn absent(world: &World<'_>) -> Result<(), Failure> {
    quiet(&world.alone(&[], "wrong", &["--mode", "absent", "10.65.0.99"], SOON)?)
}

/// An address of the own subnet at which there is no host: `rdma_resolve_addr` says so, within rping's timeout of two seconds, with the
/// event and status that Linux's has. What comes out of rping is its own; why, the library tells.
pub(super) fn absent_for_connections(world: &World<'_>) -> Result<(), Failure> {
    for nobody in ["10.65.0.99", "fd65::99"] {
        let args = ["-c", "-a", nobody, "-C", "1"];
        let program = world.start("client", &world.wire.client, Identity::Ordinary, LOG, "rping", &args)?;
        let finished = ends_in_failure(program)?;
        says(&finished, "RDMA_CM_EVENT_ADDR_ERROR, error -110")?;
        says(&finished, &format!("no host answers at {nobody} within 2000 ms"))?;
    }
    Ok(())
}

/// A port at which nobody listens: the event says so by a number, the library in words.
pub(super) fn no_listener(world: &World<'_>) -> Result<(), Failure> {
    let to = world.wire.server.address;
    let port = crate::line::next_port();
    // There is a connection manager, and it has a listener.
    let _elsewhere = super::connections::serve(world, "rping", &["-s", "-a", to, "-p", &port.to_string()])?;
    let nobody = crate::line::next_port();
    let args = ["-c", "-a", to, "-p", &nobody.to_string(), "-C", "1"];
    let client = world.start("client", &world.wire.client, Identity::Ordinary, LOG, "rping", &args)?;
    let finished = ends_in_failure(client)?;
    says(&finished, "RDMA_CM_EVENT_REJECTED, error 8")?;
    says(&finished, &format!("no program listens at {to}:{nobody} (reason 8)"))
}

/// A host without RDMA: about a minute, as with Linux's, and then the event and the reason.
pub(super) fn no_rdma_there(world: &World<'_>) -> Result<(), Failure> {
    const LONG: Duration = Duration::from_secs(200);
    // One without a service at its other end.
    let wire = world.wire.place.make()?;
    let fresh = World { wire: &wire, launcher: world.launcher };
    let to = wire.server.address;
    let args = ["-c", "-a", to, "-p", "7174", "-C", "1"];
    let client = fresh.start("client", &wire.client, Identity::Ordinary, LOG, "rping", &args)?;
    let finished = failed(client.wait(LONG)?)?;
    says(&finished, "RDMA_CM_EVENT_UNREACHABLE, error -110")?;
    says(&finished, &format!("no connection manager answers at {to}:7174"))
}

/// `ibv_rc_pingpong` without `-g`, the commonest fault of all: `ferroce run` says that a GID is needed.
pub(super) fn pingpong_without_gid(world: &World<'_>) -> Result<(), Failure> {
    says(&failing_pingpong(world, &[])?, "GID")
}

/// `-g 99`: no such GID.
pub(super) fn pingpong_gid_99(world: &World<'_>) -> Result<(), Failure> {
    let server =
        world.start("server", &world.wire.server, Identity::Ordinary, LOG, "ibv_rc_pingpong", &["-g", "99"])?;
    let finished = ends_in_failure(server)?;
    says(&finished, "99")
}

/// A path MTU that an interface of 1500 bytes does not carry.
pub(super) fn pingpong_mtu_4096(world: &World<'_>) -> Result<(), Failure> {
    says(&failing_pingpong(world, &["-g", "0", "-m", "4096"])?, "path_mtu")
}

/// A server that is not there: the program's own error, not ours.
pub(super) fn pingpong_no_server(world: &World<'_>) -> Result<(), Failure> {
    let args = ["-g", "0", "-p", "9", world.wire.server.address];
    let client = world.start("client", &world.wire.client, Identity::Ordinary, LOG, "ibv_rc_pingpong", &args)?;
    says(&ends_in_failure(client)?, "Couldn't connect")
}

/// UDP port 4791 is held by a program that is no part of Ferroce: the error names it.
pub(super) fn port_held(world: &World<'_>) -> Result<(), Failure> {
    let wire = world.wire.place.make()?;
    let fresh = World { wire: &wire, launcher: world.launcher };
    let script = "import socket, time\n\
                  s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)\n\
                  s.bind(('::', 4791))\n\
                  print('bound', flush=True)\n\
                  time.sleep(1000)\n";
    let mut holder = {
        let args = ["-c".into(), script.into()];
        let command =
            world.launcher.plain(wire.server.netns(), Identity::Ordinary, &[], "/usr/bin/python3".as_ref(), &args);
        Running::start("holder", command, &world.launcher.output())?
    };
    holder.wait_printed("bound", SOON)?;
    let program = fresh.start("program", &wire.server, Identity::Ordinary, LOG, "wrong", &["--mode", "state"])?;
    let finished = ends_in_failure(program)?;
    says(&finished, "4791")?;
    says(&finished, &holder.program_pid().to_string())?;
    let shown = fresh.ferroce(&wire.server, &["devices"])?;
    let obstacle = format!(
        "No program can open a device at present: UDP port 4791, which RoCEv2 needs, is in use by python3 (pid {}",
        holder.program_pid()
    );
    if shown.stdout.contains(&obstacle) {
        return Ok(());
    }
    Err(Failure::new(format!("`ferroce devices` does not say {obstacle:?}")).with(shown.report()))
}

/// A file for counters that cannot be: said when the device is opened, not when all is over.
pub(super) fn counters(world: &World<'_>) -> Result<(), Failure> {
    let env = [LOG[0], ("FERROCE_COUNTERS", "/nowhere/counters")];
    let program =
        world.start("program", &world.wire.server, Identity::Ordinary, &env, "wrong", &["--mode", "state"])?;
    says(&ends_in_failure(program)?, "cannot write the counters to /nowhere/counters")
}

/// Values of variables that cannot be: refused in a line that names variable and value, and says what is allowed.
pub(super) fn variables(world: &World<'_>) -> Result<(), Failure> {
    let fifo = world.launcher.scratch("fifo");
    let fifo = fifo.to_str().expect("temporary folders have plain names");
    let made = std::process::Command::new("mkfifo").args(["--mode=666", fifo]).status();
    if !made.is_ok_and(|status| status.success()) {
        return Err(Failure::new(format!("cannot make the FIFO {fifo}")));
    }
    let args = ["--mode", "state"];
    for (variable, value, said) in [
        ("FERROCE_LOOPBACK", "yes", r#"FERROCE_LOOPBACK is "yes": it can be 0 (as without it) or 1"#),
        ("FERROCE_SAME_HOST", "tcp", r#"FERROCE_SAME_HOST is "tcp": it can be ring (as without it) or udp or fetch"#),
        ("FERROCE_FAULT", "loss=2", r#"FERROCE_FAULT is "loss=2": loss does not take `2` but a probability"#),
        ("FERROCE_PCAP", "/dev/full", "/dev/full that FERROCE_PCAP asks for: it is neither a regular file nor a FIFO"),
        ("FERROCE_PCAP", fifo, "FERROCE_PCAP asks for: nobody reads this FIFO"),
        ("FERROCE_COUNTERS", "/dev/full", "/dev/full, as FERROCE_COUNTERS asks: it is no regular file"),
        ("FERROCE_COUNTERS", fifo, "as FERROCE_COUNTERS asks: it is no regular file"),
    ] {
        let env = [LOG[0], (variable, value)];
        let program = world.start("program", &world.wire.server, Identity::Ordinary, &env, "wrong", &args)?;
        says(&ends_in_failure(program)?, said)?;
    }
    // Empty ones are as if they were not there.
    let empty = ["FERROCE_LOG", "FERROCE_SAME_HOST", "FERROCE_FAULT", "FERROCE_PCAP", "FERROCE_COUNTERS"];
    quiet(&world.alone(&empty.map(|name| (name, "")), "wrong", &args, SOON)?)
}

/// A configuration without end.
pub(super) fn config(world: &World<'_>) -> Result<(), Failure> {
    let wire = world.wire.place.make()?;
    let env = [LOG[0], ("FERROCE_CONFIG", "/dev/zero")];
    let fresh = World { wire: &wire, launcher: world.launcher };
    let program = fresh.start("program", &wire.server, Identity::Ordinary, &env, "wrong", &["--mode", "state"])?;
    says(&ends_in_failure(program)?, "the configuration /dev/zero cannot be read: it is no regular file")
}

/// A service that cannot be started.
pub(super) fn service_absent(world: &World<'_>) -> Result<(), Failure> {
    let wire = world.wire.place.make()?;
    let env = [LOG[0], ("FERROCE_SERVICE", "/nowhere/ferroced")];
    let fresh = World { wire: &wire, launcher: world.launcher };
    let program = fresh.start("program", &wire.server, Identity::Ordinary, &env, "wrong", &["--mode", "state"])?;
    let finished = ends_in_failure(program)?;
    if world.launcher.via() == Via::Run { says(&finished, "/nowhere/ferroced") } else { Ok(()) }
}

/// Runs a pair that must fail at both ends; gives the server, which connects first and so meets the fault.
fn failing_pingpong(world: &World<'_>, args: &[&str]) -> Result<Finished, Failure> {
    let port = crate::line::next_port();
    let port_text = port.to_string();
    let wire = world.wire;
    let server_args = [&["-p", &port_text], args].concat();
    let client_args = [server_args.as_slice(), &[wire.server.address]].concat();
    let program = "ibv_rc_pingpong";
    let mut server = world.start("server", &wire.server, Identity::Ordinary, LOG, program, &server_args)?;
    server.wait_listening(port, crate::line::UNTIL_LISTENING)?;
    let client = world.start("client", &wire.client, Identity::Ordinary, LOG, program, &client_args)?;
    ends_in_failure(client)?;
    ends_in_failure(server)
}

/// Waits for the end of a program that must fail, not hang and not crash.
fn ends_in_failure(program: Running) -> Result<Finished, Failure> {
    failed(program.wait(SOON)?)
}

/// An error unless it ended by itself, and not well.
fn failed(finished: Finished) -> Result<Finished, Failure> {
    match finished.status.code() {
        // 255: programs of rdmacm-utils return -1.
        Some(code) if (1..126).contains(&code) || code == 255 => Ok(finished),
        Some(0) => Err(Failure::new(format!("{} succeeded", finished.name)).with(finished.report())),
        _ => Err(Failure::new(format!("{} crashed", finished.name)).with(finished.report())),
    }
}

/// An error unless stderr has `word`.
fn says(program: &Finished, word: &str) -> Result<(), Failure> {
    if program.stderr.contains(word) {
        return Ok(());
    }
    Err(Failure::new(format!("{} does not say {word:?} on stderr", program.name)).with(program.report()))
}

fn quiet(program: &Finished) -> Result<(), Failure> {
    program.check_stderr(&[])
}
