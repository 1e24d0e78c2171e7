//! Many connections at once.

use std::time::{Duration, Instant};

use super::{World, all_ok};
use crate::failure::Failure;
use crate::launch::Identity;
use crate::process::wait_all;

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
