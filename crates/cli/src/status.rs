//! `ferroce status`: what the service holds, and for whom.

use std::collections::BTreeMap;

use anyhow::Result;
use ferroce_service::config::ProcessLimits;
use ferroce_service::protocol::{ClientStatus, Status};

use crate::output::{Out, Table};
use crate::programs;

/// Show what the service holds: programs, their lanes, how many of their ids listen for connections or connect (RDMA-CM), and how many
/// descriptors it has open for them; what users have of it all, and how much they may have by ferroce.toml (-: it says nothing; see
/// `ferroced --help`).
///
/// The service starts with the first program that opens a device, and ends by itself when nobody uses it. A lane is a
/// receive socket and a prefix of queue pair numbers: the table of users counts them, that of programs lists their numbers.
///
/// KNOWN FOR is how long this service has known a program: since it opened its device, or since the service was started anew under it
/// (restarts; `up` is the service's own age).
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ferroce status
  ferroce status --json | jq '.clients | length'      (null: no service runs)")]
pub(crate) struct StatusArgs {
    /// Print JSON for programs
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &StatusArgs) -> Result<u8> {
    let status = programs::service()?.map(|client| programs::status(&client)).transpose()?;
    let mut out = Out::new();
    match status {
        _ if args.json => out.json(&status)?,
        None => out.line("No service runs in this network namespace; it starts with the first program.")?,
        Some(status) => {
            for line in lines(&status).into_iter().chain(programs::settings_too_late(&status)) {
                out.line(line)?;
            }
        }
    }
    Ok(0)
}

fn lines(status: &Status) -> Vec<String> {
    let mut lines = vec![format!(
        "service: pid {}, keeper {}, uid {}, UDP port {}, up {} s, {}, {}, {} lingering",
        status.pid,
        status.keeper,
        status.uid,
        status.port,
        status.uptime_s,
        counted(status.restarts, "restart"),
        counted(status.sockets, "socket"),
        status.lingering
    )];
    let counters = status.counters;
    lines.push(format!(
        "packets: {}, {} handed in, {} forwarded; dropped: {} short, {} without a lane, {} full, {} in a loop, {} beyond a limit",
        counted(counters.strays, "stray"),
        counters.relay_in,
        counters.relay_out,
        counters.drop_short,
        counters.drop_no_lane,
        counters.drop_full,
        counters.drop_loop,
        counters.drop_limit
    ));
    lines.extend(of_users(status).lines());
    let columns = [">PID", ">UID", ">KNOWN FOR s", ">LISTENERS", ">PENDING", ">DESCRIPTORS", "LANE NUMBERS", "PROGRAM"];
    let mut table = Table::new(&columns);
    for client in &status.clients {
        let lanes: Vec<String> = client.lanes.iter().map(u16::to_string).collect();
        table.row([
            client.pid.to_string(),
            client.uid.to_string(),
            client.age_s.to_string(),
            client.listeners.to_string(),
            client.pending.to_string(),
            client.descriptors.to_string(),
            lanes.join(","),
            client.program.clone(),
        ]);
    }
    lines.extend(table.lines());
    lines
}

/// "1 restart", "2 restarts".
fn counted(number: impl Into<u64>, thing: &str) -> String {
    let number = number.into();
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// What users have of what they may have, and what one program may have.
fn of_users(status: &Status) -> Table {
    /// Programs, lanes, event channels, ids, listeners, connections that are being made, and descriptors.
    type Amounts = [u32; 7];
    let mut users: BTreeMap<u32, Amounts> = BTreeMap::new();
    for client in &status.clients {
        let ClientStatus { channels, ids, listeners, pending, descriptors, .. } = *client;
        let has = [1, client.lanes.len() as u32, channels, ids, listeners, pending, descriptors];
        let user = users.entry(client.uid).or_default();
        user.iter_mut().zip(has).for_each(|(sum, has)| *sum += has);
    }
    let (process, user) = (status.limits.process, status.limits.user);
    let columns = ["USE", ">PROGRAMS", ">LANES", ">CHANNELS", ">IDS", ">LISTENERS", ">PENDING", ">DESCRIPTORS"];
    let mut table = Table::new(&columns);
    let mut row = |name: String, amounts: [Option<u32>; 7]| {
        // None: ferroce.toml says nothing of it.
        let amounts = amounts.map(|amount| amount.map_or("-".into(), |amount| amount.to_string()));
        table.row(std::iter::once(name).chain(amounts));
    };
    for (uid, amounts) in users {
        row(format!("uid {uid}"), amounts.map(Some));
    }
    let (listeners, pending) = (Some(user.listeners), Some(user.pending_connections));
    let of_user = [user.programs, user.lanes, user.event_channels, user.ids, listeners, pending, user.descriptors];
    row("limit of a user".into(), of_user);
    let ProcessLimits { lanes, ids, listeners, pending_connections, event_channels, descriptors, .. } = process;
    let of_program = [1, lanes, event_channels, ids, listeners, pending_connections, descriptors];
    row("limit of a program".into(), of_program.map(Some));
    table
}

#[cfg(test)]
mod tests {
    use ferroce_service::protocol::Counters;

    use super::*;

    #[test]
    fn one_is_singular() {
        assert_eq!([0u64, 1, 2].map(|number| counted(number, "restart")), ["0 restarts", "1 restart", "2 restarts"]);
    }

    #[test]
    fn clients_are_listed_with_their_lanes() {
        let status = Status {
            pid: 10,
            keeper: 9,
            uid: 1000,
            port: 4791,
            uptime_s: 5,
            clients: vec![ClientStatus {
                pid: 11,
                uid: 1000,
                program: "ib_write_bw".into(),
                age_s: 3,
                lanes: vec![1, 2],
                groups: 0,
                channels: 2,
                ids: 7,
                listeners: 1,
                pending: 5,
                descriptors: 8,
            }],
            sockets: 4,
            lingering: 0,
            counters: Counters { strays: 2, ..Counters::default() },
            ..Status::default()
        };
        assert_eq!(
            lines(&status),
            [
                "service: pid 10, keeper 9, uid 1000, UDP port 4791, up 5 s, 0 restarts, 4 sockets, 0 lingering",
                "packets: 2 strays, 0 handed in, 0 forwarded; dropped: 0 short, 0 without a lane, 0 full, 0 in a loop, \
                 0 beyond a limit",
                "USE                 PROGRAMS  LANES  CHANNELS    IDS  LISTENERS  PENDING  DESCRIPTORS",
                "uid 1000                   1      2         2      7          1        5            8",
                "limit of a user            -      -         -      -      16384    16384            -",
                "limit of a program         1     64      1024  16384       4096     4096         2048",
                "PID   UID  KNOWN FOR s  LISTENERS  PENDING  DESCRIPTORS  LANE NUMBERS  PROGRAM",
                " 11  1000            3          1        5            8  1,2           ib_write_bw",
            ]
        );
    }
}
