//! Programs that look for RDMA devices in the file system: `ferroce run --sysfs`.

use std::time::Duration;

use super::World;
use crate::failure::Failure;
use crate::place::Host;
use crate::process::{Finished, Running, wait_all};

const MINUTE: Duration = Duration::from_secs(60);

/// What stock programs see of a device where Linux shows it.
pub(super) fn paths(world: &World<'_>) -> Result<(), Failure> {
    let host = &world.wire.server;
    let script = "ls /sys/class/infiniband /dev/infiniband; cat /sys/class/infiniband/ferroce0/ports/1/gid_attrs/types/0; \
                  ls /sys/class/infiniband/ferroce0/device/net; test -c /dev/infiniband/ferroce0 && echo device";
    let seen = run(world, host, &["sh", "-c", script])?;
    for line in ["/sys/class/infiniband:", "ferroce0", "uverbs0", "rdma_cm", "RoCE v2", "eth0", "device"] {
        if !seen.stdout.lines().any(|seen| seen == line) {
            return Err(Failure::new(format!("no line {line}")).with(seen.report()));
        }
    }
    Ok(())
}

/// UCX finds the device and its transports.
pub(super) fn ucx_info(world: &World<'_>) -> Result<(), Failure> {
    let info = run(world, &world.wire.server, &["ucx_info", "-d"])?;
    for line in ["Transport: rc_verbs", "Transport: ud_verbs", "Device: ferroce0:1"] {
        if !info.stdout.contains(line) {
            return Err(Failure::new(format!("ucx_info does not tell {line}")).with(info.report()));
        }
    }
    Ok(())
}

/// UCX's messages go through the device.
pub(super) fn ucx_perftest(world: &World<'_>) -> Result<(), Failure> {
    for transport in ["rc", "ud"] {
        let (port, transports) = (crate::line::next_port(), format!("UCX_TLS={transport},self"));
        let port_text = port.to_string();
        let words = ["env", &transports, "UCX_NET_DEVICES=ferroce0:1", "ucx_perftest", "-p", &port_text];
        let (wire, work) = (world.wire, ["-t", "tag_bw", "-s", "65536", "-n", "500", "-w", "10"]);
        let mut server = start(world, &wire.server, &words)?;
        server.wait_listening(port, crate::line::UNTIL_LISTENING)?;
        let to = wire.server.address_v4.ok_or_else(|| Failure::new("ucx_perftest needs an IPv4 address"))?;
        let client = start(world, &wire.client, &[&words[..], &work, &[to]].concat())?;
        wait_all(vec![server, client], MINUTE)?;
    }
    Ok(())
}

fn start(world: &World<'_>, host: &Host, words: &[&str]) -> Result<Running, Failure> {
    world.start_ferroce(host, &[&["run", "--sysfs", "--"], words].concat())
}

fn run(world: &World<'_>, host: &Host, words: &[&str]) -> Result<Finished, Failure> {
    Ok(wait_all(vec![start(world, host, words)?], MINUTE)?.remove(0))
}
