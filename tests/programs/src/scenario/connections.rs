//! Many connections at once.

use std::time::{Duration, Instant};

use super::{World, all_ok};
use crate::failure::Failure;
use crate::launch::Identity;
use crate::line::{UNTIL_LISTENING, next_port};
use crate::process::{Running, wait_all};

const MINUTE: Duration = Duration::from_secs(60);

/// What one client makes; four make 2,000.
const EACH: &str = "500";

/// Eight processes set up, use and tear down 2,000 connections, while one in fifty packets of the connection managers is lost.
/// Afterwards the services hold nothing of them.
pub(super) fn flood(world: &World<'_>) -> Result<(), Failure> {
    // Services of its own, which read this configuration.
    let wire = world.wire.place.make()?;
    let world = World { wire: &wire, launcher: world.launcher };
    let config = world.launcher.scratch("ferroce.toml");
    std::fs::write(&config, "[fault]\ncm_loss_permille = 20\n")
        .map_err(|e| Failure::new(format!("cannot write {}: {e}", config.display())))?;
    let env = [("FERROCE_CONFIG", config.to_str().expect("temporary folders have plain names"))];
    let end = (Identity::Ordinary, &["-n", EACH][..]);
    let mut running = Vec::new();
    for _ in 0..4 {
        let (server, client) = world.start_pair_as(&env, "flood", end, end)?;
        running.extend([server, client]);
    }
    all_ok(&wait_all(running, Duration::from_secs(300))?)?;
    [&wire.server, &wire.client].into_iter().try_for_each(|host| {
        let give_up = Instant::now() + Duration::from_secs(60);
        loop {
            let seen = world.ferroce(host, &["res", "--json"])?;
            let seen: serde_json::Value = serde_json::from_str(&seen.stdout)
                .map_err(|e| Failure::new(format!("`ferroce res --json`: {e}")).with(seen.report()))?;
            let held = |kind: &str| seen[kind].as_array().map_or(usize::MAX, Vec::len);
            match held("qps") + held("cm_ids") {
                0 => return Ok(()),
                held if Instant::now() > give_up => {
                    return Err(Failure::new(format!("a minute later {held} queue pairs and ids are left")));
                }
                _ => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    })
}

/// cmtime's server serves until it is ended: a thousand connections at once, twice.
pub(super) fn cmtime(world: &World<'_>) -> Result<(), Failure> {
    let port = next_port().to_string();
    let args = ["-p", &port, "-c", "1000"];
    let mut server = serve(world, "cmtime", &[&args[..], &["-b", world.wire.server.address]].concat())?;
    for _ in 0..2 {
        let args = [&args[..], &["-s", world.wire.server.address]].concat();
        let client = world.start("client", &world.wire.client, Identity::Ordinary, &[], "cmtime", &args)?;
        let finished = wait_all(vec![client], 2 * MINUTE)?.remove(0);
        finished.check_stderr(&[])?;
        let step = |name: &str| finished.stdout.lines().any(|line| line.starts_with(name) && line.contains(':'));
        if let Some(name) = ["connect", "disconnect", "destroy"].iter().find(|name| !step(name)) {
            return Err(Failure::new(format!("cmtime tells no times of {name:?}")).with(finished.report()));
        }
    }
    still_serves(&mut server)
}

/// rping's server for many clients: one after the other, and four at once, which bind to a source address and check what they read.
///
/// Each is waited for before the next one asks: the server keeps the last request in one place, and loses one that it has not looked at
/// when the next comes. Many pings, as rping shows what it prints by pages only.
pub(super) fn rping_persistent(world: &World<'_>) -> Result<(), Failure> {
    let port = next_port().to_string();
    let (from, to) = (world.wire.client.address, world.wire.server.address);
    let mut server = serve(world, "rping", &["-s", "-P", "-a", to, "-p", &port])?;
    let client = |i: usize| {
        let args = ["-c", "-a", to, "-I", from, "-p", &port, "-V", "-v", "-C", "2000"];
        world.start(&format!("client {i}"), &world.wire.client, Identity::Ordinary, &[], "rping", &args)
    };
    for clients in [1, 1, 4] {
        let mut running = Vec::new();
        for i in 1..=clients {
            let mut one = client(i)?;
            one.wait_printed("ping data: rdma-ping-", MINUTE)?;
            running.push(one);
        }
        for finished in wait_all(running, MINUTE)? {
            finished.check_stderr(&["DISCONNECT EVENT..."])?;
            if !finished.stdout.contains("ping data: rdma-ping-1999:") {
                return Err(Failure::new("not all pings came back").with(finished.report()));
            }
        }
    }
    still_serves(&mut server)
}

/// A server of rdmacm-utils that does not end by itself.
pub(super) fn serve(world: &World<'_>, program: &str, args: &[&str]) -> Result<Running, Failure> {
    let mut server = world.start("server", &world.wire.server, Identity::Ordinary, &[], program, args)?;
    server.wait_connectable(|| world.status(&world.wire.server, Identity::Ordinary, &[]), UNTIL_LISTENING)?;
    Ok(server)
}

fn still_serves(server: &mut Running) -> Result<(), Failure> {
    match server.poll()? {
        None => Ok(()),
        Some(status) => Err(Failure::new(format!("the server has ended: {status}"))),
    }
}
