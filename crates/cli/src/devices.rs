//! `ferroce devices`: what a verbs program would see.

use anyhow::Result;
use ferroce::Device;
use ferroce_service::devices::DeviceInfo;
use serde::Serialize;

use crate::output::{Out, Table};
use crate::programs;

/// Show the RDMA devices: interface, state, MTU and GIDs.
///
/// Each network interface that is up and has an address is a device. PATH MTU is the largest path MTU that queue pairs may ask for. A
/// program picks its own address by the GID's index (ibv_rc_pingpong -g 0, perftest -x 0). An address may stand at several indices: 0, 1
/// and 3 are IPv4 wherever the interface has such an address, for recipes name them. Last lines say if no program can open a device at
/// present, and why, and which variables of the environment have programs do otherwise than usual.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ferroce devices
  ferroce devices --json | jq -r '.[0].gids[0].address'
  FERROCE_LOOPBACK=1 ferroce devices       (list loopback beside the others)")]
pub(crate) struct DevicesArgs {
    /// Print JSON for programs
    #[arg(long)]
    json: bool,
}

/// One device, as `--json` shows it.
#[derive(Debug, Serialize)]
struct Shown {
    device: String,
    interface: String,
    interface_index: u32,
    /// `ACTIVE` or `DOWN`.
    state: &'static str,
    guid: String,
    /// MTU of the interface in bytes.
    interface_mtu: u32,
    /// Largest path MTU in bytes.
    path_mtu: u32,
    gids: Vec<ShownGid>,
}

#[derive(Debug, Serialize)]
struct ShownGid {
    index: usize,
    gid: String,
    address: String,
    /// All of Ferroce's GIDs are of this type.
    kind: &'static str,
}

/// Below the table.
const WHY_REPEATED: &str = "GIDs repeat on purpose: recipes name indices 1 and 3, so these are always there.";

pub(crate) fn run(args: &DevicesArgs) -> Result<u8> {
    let show = |device: &std::sync::Arc<Device>| Shown::of(&device.info(), device.port().active_mtu);
    let shown: Vec<Shown> = ferroce::devices()?.iter().map(show).collect();
    let mut out = Out::new();
    if args.json {
        out.json(&shown)?;
    } else {
        table(&shown).print(&mut out)?;
        if shown.iter().any(Shown::repeats) {
            out.line(WHY_REPEATED)?;
        }
        notes().into_iter().try_for_each(|line| out.line(line))?;
    }
    Ok(0)
}

/// What keeps programs from opening a device, and what has them do otherwise than usual.
fn notes() -> Vec<String> {
    let cannot = |why: &dyn std::fmt::Display| format!("No program can open a device at present: {why}");
    let mut notes = Vec::new();
    match programs::service() {
        Ok(Some(service)) => {
            // Only an attempt tells.
            notes.extend(service.lease_lane().err().map(|error| cannot(&error)));
            let status = programs::status(&service).ok();
            notes.extend(status.and_then(|status| programs::settings_too_late(&status)));
        }
        Ok(None) => notes.extend(ferroce_service::obstacle().map(|error| cannot(&error))),
        Err(error) => notes.push(cannot(&format_args!("{error:#}"))),
    }
    for setting in ferroce::settings() {
        notes.push(setting.effect.unwrap_or_else(|error| cannot(&error)));
    }
    notes
}

impl Shown {
    fn of(device: &DeviceInfo, path_mtu: u32) -> Shown {
        Shown {
            device: device.name.clone(),
            interface: device.ifname.clone(),
            interface_index: device.ifindex,
            state: if device.up { "ACTIVE" } else { "DOWN" },
            guid: format!("{:016x}", device.guid),
            interface_mtu: device.mtu,
            path_mtu,
            gids: device
                .gids
                .iter()
                .enumerate()
                .map(|(index, entry)| ShownGid {
                    index,
                    gid: std::net::Ipv6Addr::from(entry.gid).to_string(),
                    address: entry.addr.to_string(),
                    kind: "RoCE v2",
                })
                .collect(),
        }
    }

    /// Does an address stand at more than one index?
    fn repeats(&self) -> bool {
        self.gids.iter().enumerate().any(|(at, gid)| self.gids[..at].iter().any(|other| other.gid == gid.gid))
    }
}

fn table(devices: &[Shown]) -> Table {
    let mut table = Table::new(&["DEVICE", "INTERFACE", "STATE", ">MTU", ">PATH MTU", "GUID", ">GID", "ADDRESS"]);
    for device in devices {
        for (i, gid) in device.gids.iter().enumerate() {
            let index = gid.index.to_string();
            if i == 0 {
                let (mtu, path_mtu) = (device.interface_mtu.to_string(), device.path_mtu.to_string());
                table.row([
                    &device.device,
                    &device.interface,
                    device.state,
                    &mtu,
                    &path_mtu,
                    &device.guid,
                    &index,
                    &gid.address,
                ]);
            } else {
                table.row(["", "", "", "", "", "", &index, &gid.address]);
            }
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use ferroce::GidEntry;

    use super::*;

    fn device() -> DeviceInfo {
        let gid = |text: &str| GidEntry {
            gid: text.parse::<std::net::Ipv6Addr>().expect("an address").octets(),
            addr: text.parse::<std::net::Ipv6Addr>().expect("an address").to_canonical(),
        };
        DeviceInfo {
            name: "ferroce0".into(),
            ifname: "eth0".into(),
            ifindex: 2,
            guid: 0x0200_00ff_fe00_0001,
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            up: true,
            loopback: false,
            gids: vec![gid("::ffff:192.0.2.7"), gid("fe80::1")],
        }
    }

    #[test]
    fn a_person_sees_one_line_for_each_gid() {
        assert_eq!(
            table(&[Shown::of(&device(), 1024)]).lines(),
            [
                "DEVICE    INTERFACE  STATE    MTU  PATH MTU  GUID              GID  ADDRESS",
                "ferroce0  eth0       ACTIVE  1500      1024  020000fffe000001    0  192.0.2.7",
                "                                                                 1  fe80::1",
            ]
        );
    }

    #[test]
    fn a_repeated_address_is_noticed() {
        let mut info = device();
        assert!(!Shown::of(&info, 1024).repeats());
        info.gids.push(info.gids[0]);
        assert!(Shown::of(&info, 1024).repeats());
    }

    #[test]
    fn a_program_sees_numbers_as_numbers() {
        let json = serde_json::to_value(Shown::of(&device(), 1024)).expect("can be JSON");
        assert_eq!(json["path_mtu"], 1024);
        assert_eq!(json["gids"][0]["gid"], "::ffff:192.0.2.7");
        assert_eq!(json["gids"][1]["index"], 1);
        assert_eq!(json["state"], "ACTIVE");
    }
}
