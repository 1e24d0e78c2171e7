//! Programs that are ended by kill -9 in the middle of a transfer, and what their end leaves behind.

use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{World, check_ok, pairs, seen};
use crate::failure::Failure;
use crate::launch::Identity;
use crate::place::Host;
use crate::process::{Running, wait_all};

const MINUTE: Duration = Duration::from_secs(60);
/// Long enough that transfers run, short enough not to wait.
const A_WHILE: Duration = Duration::from_millis(500);

/// `COMMAND | cat` ends when the command ends, although the command started the service, which runs on.
pub(super) fn pipe_ends(world: &World<'_>) -> Result<(), Failure> {
    // No service may run before.
    let wire = world.wire.place.make()?;
    let fresh = World { wire: &wire, launcher: world.launcher };
    let args = ["-c", "ibv_devinfo | cat"];
    let shell = fresh.start("pipe", &wire.server, Identity::Ordinary, &[], "sh", &args)?;
    let finished = wait_all(vec![shell], Duration::from_secs(20))?.remove(0);
    finished.check_stderr(&[])?;
    if !finished.stdout.contains("ferroce0") {
        return Err(Failure::new("ibv_devinfo | cat showed no device").with(finished.report()));
    }
    if wire.namespaces()[0].processes().is_empty() {
        return Err(Failure::new("no service runs after ibv_devinfo: the command was no test of its descriptors"));
    }
    Ok(())
}

/// The server dies; the client's requests complete with RETRY_EXC_ERR in time.
pub(super) fn kill_server(world: &World<'_>) -> Result<(), Failure> {
    let (server, client) = endless(world)?;
    kill_one(world, (&world.wire.server, server), client)
}

/// The client dies; the server's requests complete with RETRY_EXC_ERR in time.
pub(super) fn kill_client(world: &World<'_>) -> Result<(), Failure> {
    let (server, client) = endless(world)?;
    kill_one(world, (&world.wire.client, client), server)
}

/// The server dies while a child that it forked lives on with all that it inherited.
pub(super) fn kill_with_child(world: &World<'_>) -> Result<(), Failure> {
    let (server, client) = world.start_pair("traffic", &["--mode", "hold", "-D", "1000"], &["--mode", "endless"])?;
    let mut client = client;
    client.wait_printed("running", MINUTE)?;
    sleep(A_WHILE);
    kill_one(world, (&world.wire.server, server), client)
}

fn endless(world: &World<'_>) -> Result<(Running, Running), Failure> {
    let args = ["--mode", "endless"];
    let (mut server, mut client) = world.start_pair("traffic", &args, &args)?;
    server.wait_printed("running", MINUTE)?;
    client.wait_printed("running", MINUTE)?;
    sleep(A_WHILE);
    Ok((server, client))
}

/// Ends `victim` on its host and looks at the survivor, at the service, and at the next run. The victim's wrapper and
/// children, if any, live on until all that is done.
fn kill_one(world: &World<'_>, (host, victim): (&Host, Running), survivor: Running) -> Result<(), Failure> {
    let dead = victim.program_pid();
    victim.kill_program();
    // `traffic` judges the time by its timeout and retry count; this limit is far beyond.
    let finished = wait_all(vec![survivor], MINUTE)?.remove(0);
    check_ok(&finished)?;
    finished.check_stderr(&[])?;
    holds_nothing_of(world, host, dead.as_raw_nonzero().get())?;
    pairs::works(world)
}

/// An error unless `ferroce status` soon shows nothing of the process.
fn holds_nothing_of(world: &World<'_>, host: &Host, pid: i32) -> Result<(), Failure> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let status = world.ferroce(host, &["status", "--json"])?;
        let json: serde_json::Value = serde_json::from_str(&status.stdout)
            .map_err(|e| Failure::new(format!("ferroce status --json: {e}")).with(status.report()))?;
        let clients = json.get("clients").and_then(|clients| clients.as_array()).cloned().unwrap_or_default();
        if !clients.iter().any(|client| client.get("pid").and_then(serde_json::Value::as_i64) == Some(pid.into())) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Failure::new(format!("the service still holds the dead process {pid}")).with(status.report()));
        }
        sleep(Duration::from_millis(20));
    }
}

/// ib_write_bw's server dies: its client says so and ends.
pub(super) fn kill_perftest_server(world: &World<'_>) -> Result<(), Failure> {
    let (server, client) = perftest(world)?;
    kill_perftest(world, server, client)
}

/// ib_write_bw's client dies: its server ends, and the next run works.
pub(super) fn kill_perftest_client(world: &World<'_>) -> Result<(), Failure> {
    let (server, client) = perftest(world)?;
    kill_perftest(world, client, server)
}

fn perftest(world: &World<'_>) -> Result<(Running, Running), Failure> {
    let port = crate::line::next_port();
    let port_text = port.to_string();
    let wire = world.wire;
    let ordinary = Identity::Ordinary;
    let args = ["-D", "30", "-p", &port_text];
    let mut server = world.start("server", &wire.server, ordinary, &[], "ib_write_bw", &args)?;
    server.wait_listening(port, crate::line::UNTIL_LISTENING)?;
    let to = wire.server.address_v4.ok_or_else(|| Failure::new("perftest needs an IPv4 address"))?;
    let args = ["-D", "30", "-p", &port_text, to];
    let client = world.start("client", &wire.client, ordinary, &[], "ib_write_bw", &args)?;
    sleep(2 * A_WHILE);
    Ok((server, client))
}

fn kill_perftest(world: &World<'_>, victim: Running, mut survivor: Running) -> Result<(), Failure> {
    victim.kill_program();
    let deadline = Instant::now() + MINUTE;
    // Which exit code a stock program then has is its own affair: that it ends is ours.
    while survivor.poll()?.is_none() {
        if Instant::now() > deadline {
            return wait_all(vec![survivor], Duration::ZERO).map(|_| ());
        }
        crate::interrupt::check()?;
        sleep(Duration::from_millis(10));
    }
    pairs::works(world)
}

/// The service dies under traffic: what runs goes on, and what starts next starts another service.
pub(super) fn kill_service(world: &World<'_>) -> Result<(), Failure> {
    let (server, mut client) = world.start_pair("traffic", &["-D", "4"], &["-D", "4"])?;
    sleep(2 * A_WHILE);
    end_services(world)?;
    client.poll()?;
    super::all_ok(&wait_all(vec![server, client], MINUTE)?)?;
    pairs::works(world)
}

/// Kills keepers and workers, of whom none sees the other die.
pub(super) fn end_services(world: &World<'_>) -> Result<(), Failure> {
    // The worker is not named ferroced, as it is started by /proc/self/exe.
    let services: Vec<Pid> =
        world.wire.namespaces().iter().flat_map(|namespace| namespace.processes()).filter(is_service).collect();
    for signal in [Signal::STOP, Signal::KILL] {
        if services.len() < 2 || !services.iter().all(|pid| kill_process(*pid, signal).is_ok()) {
            return Err(Failure::new(format!("keeper and worker cannot be ended: {services:?}")));
        }
    }
    Ok(())
}

fn is_service(pid: &Pid) -> bool {
    let exe = std::fs::read_link(format!("/proc/{pid}/exe"));
    exe.is_ok_and(|exe| exe.file_name().is_some_and(|name| name == "ferroced"))
}

/// The worker, the keeper, or both at once die under traffic that goes through sockets, ten times: it goes on, others begin and
/// end meanwhile, and what the service then says is true.
pub(super) fn kill_service_ten_times(world: &World<'_>) -> Result<(), Failure> {
    // Longer than the ten rounds take: it is ended.
    let end = (Identity::Ordinary, &["-D", "600"][..]);
    let (mut server, mut client) = world.start_pair_as(&[("FERROCE_SAME_HOST", "udp")], "traffic", end, end)?;
    sleep(2 * A_WHILE);
    for round in 0..10 {
        let services = seen::services(world)?;
        let (worker, keeper) = (services[0], services[1]);
        // A service that lives starts another keeper at once.
        let victims: &[(Pid, Signal)] = match round % 3 {
            0 => &[(worker, Signal::STOP), (keeper, Signal::KILL), (worker, Signal::KILL)],
            1 => &[(worker, Signal::KILL)],
            _ => &[(keeper, Signal::KILL)],
        };
        if !victims.iter().all(|(pid, signal)| kill_process(*pid, *signal).is_ok()) {
            return Err(Failure::new(format!("round {round}: the service could not be ended")));
        }
        pairs::works(world)?;
        check_lanes(world, [&server, &client]).map_err(|failure| {
            Failure::new(format!("round {round}: not what programs have")).with(failure.to_string())
        })?;
        for end in [&mut server, &mut client] {
            if end.poll()?.is_some() {
                return Err(Failure::new(format!("round {round}: the traffic has ended")));
            }
        }
    }
    server.kill_program();
    client.kill_program();
    Ok(())
}

/// The service has one lane for each of these programs, and `ferroce res` shows what they have.
fn check_lanes(world: &World<'_>, ends: [&Running; 2]) -> Result<(), Failure> {
    let status = seen::json(world, &world.wire.server, &["status", "--json"])?;
    let found = seen::json(world, &world.wire.server, &["res", "--json"])?;
    for end in ends {
        let (clients, pairs) = (seen::rows(&status, "clients", end)?, seen::rows(&found, "qps", end)?);
        let lanes = clients.iter().filter_map(|row| row["lanes"].as_array()).map(Vec::len).sum::<usize>();
        if lanes != 1 || pairs.is_empty() {
            return Err(Failure::new(format!("{lanes} lanes, {} queue pairs: {status}", pairs.len())));
        }
    }
    Ok(())
}
