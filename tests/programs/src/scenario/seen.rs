//! What `ferroce res`, `ferroce stat` and `ferroce status` show of programs that run, and of those that are stopped.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{World, all_ok};
use crate::failure::Failure;
use crate::launch::Identity;
use crate::place::Host;
use crate::process::{Running, wait_all};

const MINUTE: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Asynchronous events, those of the port too, whose interface is changed meanwhile.
pub(super) fn events(world: &World<'_>) -> Result<(), Failure> {
    let wire = world.wire.place.make()?;
    let fresh = World { wire: &wire, launcher: world.launcher };
    let namespace = &wire.namespaces()[0];
    let mut program = fresh.start("program", &wire.server, Identity::Ordinary, &[], "events", &[])?;
    program.wait_printed("waiting for an address\n", MINUTE)?;
    namespace.ip(&["addr", "add", "192.0.2.77/24", "dev", "eth0"])?;
    program.wait_printed("waiting for the end of the interface\n", MINUTE)?;
    namespace.ip(&["link", "set", "eth0", "down"])?;
    program.wait_printed("waiting for the interface\n", MINUTE)?;
    namespace.ip(&["link", "set", "eth0", "up"])?;
    all_ok(&wait_all(vec![program], MINUTE)?)
}

/// Queue pairs, regions, and counters that grow; a stopped program is named and holds nothing up.
pub(super) fn resources(world: &World<'_>) -> Result<(), Failure> {
    let args = ["--mode", "endless"];
    let (mut server, mut client) = world.start_pair("traffic", &args, &args)?;
    server.wait_printed("running", MINUTE)?;
    client.wait_printed("running", MINUTE)?;
    let ends = [(&world.wire.server, &server), (&world.wire.client, &client)];

    let [ours, theirs] = ends.map(|(host, program)| {
        let found = json(world, host, &["res", "--json"])?;
        let qps = rows(&found, "qps", program)?;
        let connected: Vec<Value> = qps.into_iter().filter(|row| row["state"] == "RTS").collect();
        if connected.is_empty() || rows(&found, "mrs", program)?.is_empty() || rows(&found, "cqs", program)?.is_empty()
        {
            return Err(Failure::new(format!("no queue pair in RTS, no region or no queue of a program: {found}")));
        }
        Ok(connected)
    });
    let (ours, theirs) = (ours?, theirs?);
    for row in &ours {
        let is_peer = |peer: &&Value| peer["qpn"] == row["remote_qpn"] && peer["remote_qpn"] == row["qpn"];
        let peer = theirs.iter().find(is_peer).ok_or_else(|| Failure::new(format!("nobody is the peer of {row}")))?;
        if peer["local"] != row["remote"] || peer["carrier"] != row["carrier"] {
            return Err(Failure::new(format!("the ends disagree: {row} and {peer}")));
        }
    }

    for (host, program) in ends {
        let sent = || {
            let found = json(world, host, &["stat", "--json"])?;
            let program = rows(&found, "programs", program)?;
            let sent =
                program.iter().filter_map(|row| row["devices"][0]["counters"]["sent_pkts"].as_u64()).sum::<u64>();
            Ok::<_, Failure>(sent)
        };
        let first = sent()?;
        // It may take a moment on a busy machine, but traffic goes on.
        let grown = (0..600).any(|_| {
            std::thread::sleep(LOOK_AGAIN);
            sent().is_ok_and(|now| now > first)
        });
        if !grown {
            return Err(Failure::new(format!("sent_pkts stays {first} under traffic")));
        }
    }

    server.signal(Signal::STOP);
    let found = wait_stopped(server.program_pid()).and_then(|()| json(world, &world.wire.server, &["res", "--json"]));
    server.signal(Signal::CONT);
    let found = found?;
    let pid = server.program_pid().as_raw_nonzero().get();
    let names = |line: &Value| line.as_str().is_some_and(|line| line.starts_with(&format!("pid {pid} ")));
    if !found["silent"].as_array().is_some_and(|lines| lines.iter().any(names)) {
        return Err(Failure::new(format!("the stopped program {pid} is not named: {found}")));
    }
    server.kill_program();
    client.kill_program();
    Ok(())
}

/// A service that is stopped: commands say so instead of waiting long, and go on when it does.
pub(super) fn stopped_service(world: &World<'_>) -> Result<(), Failure> {
    let wire = world.wire.place.make()?;
    let fresh = World { wire: &wire, launcher: world.launcher };
    let (server, client) = fresh.start_pair("traffic", &["-D", "6"], &["-D", "6"])?;
    let services = services(&fresh)?;
    let signal = |signal| services.iter().all(|pid| kill_process(*pid, signal).is_ok());
    if !signal(Signal::STOP) {
        return Err(Failure::new("the service cannot be stopped"));
    }
    let stopped = services.iter().try_for_each(|pid| wait_stopped(*pid));
    let asked = [&["status"][..], &["res"], &["stat"]]
        .map(|args| fresh.start_ferroce(&wire.server, args).and_then(|asked| asked.wait(MINUTE)));
    signal(Signal::CONT);
    stopped?;
    for asked in asked {
        let asked = asked?;
        let is_told = ["did not answer within 3s", "is stopped, state T", "`kill -CONT "]
            .iter()
            .all(|part| asked.stderr.contains(part));
        if asked.status.success() || !is_told {
            return Err(Failure::new("a stopped service is not told").with(asked.report()));
        }
    }
    fresh.ferroce(&wire.server, &["status"])?;
    super::all_ok(&wait_all(vec![server, client], MINUTE)?)
}

/// The service and its keeper, once there is one.
pub(super) fn services(world: &World<'_>) -> Result<Vec<Pid>, Failure> {
    for _ in 0..600 {
        let status = json(world, &world.wire.server, &["status", "--json"])?;
        let pid = |name: &str| status[name].as_i64().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let (Some(service), Some(keeper)) = (pid("pid"), pid("keeper")) {
            return Ok(vec![service, keeper]);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    Err(Failure::new("no service came"))
}

/// Waits until no thread of a process runs: a signal that stops it reaches one after the other.
fn wait_stopped(pid: Pid) -> Result<(), Failure> {
    let stopped = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
        Some(stat.rsplit_once(") ")?.1.starts_with('T'))
    };
    for _ in 0..600 {
        let tasks =
            std::fs::read_dir(format!("/proc/{pid}/task")).map_err(|e| Failure::new(format!("process {pid}: {e}")))?;
        if tasks.map(stopped).all(|stopped| stopped == Some(true)) {
            return Ok(());
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    Err(Failure::new(format!("process {pid} does not stop")))
}

/// What a command of Ferroce prints on a host.
pub(super) fn json(world: &World<'_>, host: &Host, args: &[&str]) -> Result<Value, Failure> {
    let finished = world.ferroce(host, args)?;
    serde_json::from_str(&finished.stdout)
        .map_err(|error| Failure::new(format!("ferroce {args:?}: {error}")).with(finished.report()))
}

/// Rows of a kind that belong to a program.
pub(super) fn rows(found: &Value, kind: &str, program: &Running) -> Result<Vec<Value>, Failure> {
    let pid = program.program_pid().as_raw_nonzero().get();
    let rows = found[kind].as_array().ok_or_else(|| Failure::new(format!("no list of {kind}: {found}")))?;
    Ok(rows.iter().filter(|row| row["pid"] == pid).cloned().collect())
}
