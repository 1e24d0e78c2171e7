//! `ferroce stat`: what is counted, by device, by program, by queue pair.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;
use ferroce_service::inspect::{Counted, Snapshot};
use ferroce_service::protocol::Counters as ServiceCounters;
use serde::Serialize;

use crate::output::{Out, Table};
use crate::programs::{self, Program, printable};
use crate::res::hex_qpn;
use crate::watch::WatchArgs;

/// Show what devices, programs and queue pairs count: packets and bytes, ACKs and NAKs by kind, the time lost to receivers that were
/// not ready, retries, drops by reason, congestion marks.
///
/// A program counts from its start on, and its counters end with it. Looking costs the programs nothing while they send.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ferroce stat                             sums for each device
  ferroce stat --by program --watch        with growth in a second
  ferroce stat --by qp --pid 4711
  ferroce stat --json | jq '.devices[0].counters.rnr_wait_us'

Names (those of Linux's mlx5 and rxe drivers where the meaning is the same):
  sent_pkts, rcvd_pkts, sent_bytes, rcvd_bytes   packets of queue pairs, and their payload
  ack_sent, ack_received                         positive acknowledges
  nak_sequence_sent, packet_seq_err              NAK for a gap: sent, received
  send_rnr_err, rnr_nak_retry_err                RNR NAK (no receive was posted): sent, received
  rnr_wait_us                                    microseconds that requesters were told to wait for a receive
  resp_..., req_remote_invalid_request           NAK that ends a connection, sent and received: not to be
  resp_..., req_remote_access_errors             understood; key, bounds or rights; memory gone
  resp_..., req_remote_operation_errors
  local_ack_timeout_err, packets_retransmitted   no answer in the ACK timeout; packets sent again
  retry_exceeded_err, retry_rnr_exceeded_err     requests given up
  probe_sent                                     asked a silent peer what it has, by a request that it has
  duplicate_request                              requests that came again, probes among them
  (Both grow where nothing is lost, through rings too: a peer whose process waits for a core is silent, and is asked.
  What was lost, packets_retransmitted tells.)
  np_ecn_marked_roce_packets, rp_cnp_ignored     packets marked by a congested network; congestion
                                                 notifications, to which nothing reacts
  drop_...                                       packets dropped, by reason
Of the link below (of a program, not of a device):
  tx_..., rx_..., rx_icrc_errors, rx_drop_full   UDP sockets; drop_full: a socket's buffer was full
  ring_...                                       rings in memory, between processes of this host
  fault_...                                      what FERROCE_FAULT did
Of the service: packets that it touched (`ferroce status`).

What is 0 is left out, unless --all is given; in JSON it is left out of queue pairs only. With --json a null says that no service
runs; with --watch each sample is one line.")]
pub(crate) struct StatArgs {
    /// What to sum up
    #[arg(long, value_enum, default_value = "device")]
    by: By,
    /// Only of the program with this process id; may be given several times
    #[arg(long, value_name = "PID")]
    pid: Vec<u32>,
    /// Show counters that are 0, too
    #[arg(long)]
    all: bool,
    /// Print JSON for programs: devices, programs and queue pairs
    #[arg(long, conflicts_with = "by")]
    json: bool,
    #[command(flatten)]
    watch: WatchArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    /// Devices, over all programs
    Device,
    /// Programs, and their devices
    Program,
    /// Queue pairs
    Qp,
}

pub(crate) fn run(args: &StatArgs) -> Result<u8> {
    let mut last: Option<(Instant, Vec<Block>)> = None;
    args.watch.run(!args.json, |out| {
        let found = Statistics::ask(&args.pid)?;
        match found {
            found if args.json && args.watch.repeats() => out.json_line(&found),
            found if args.json => out.json(&found),
            None => Ok(out.line("No service runs in this network namespace; it starts with the first program.")?),
            Some(found) => {
                let now = Instant::now();
                let mut blocks = found.blocks(args.by);
                if found.programs.is_empty() && found.silent.is_empty() {
                    out.line(nobody(&args.pid))?;
                    blocks.retain(|block| args.all || block.has_counted());
                }
                let before = last.as_ref().map(|(at, blocks)| (now.duration_since(*at).as_secs_f64(), &blocks[..]));
                print(&blocks, before, args.all, out)?;
                note(&blocks).into_iter().try_for_each(|line| out.line(line))?;
                found.silent.iter().try_for_each(|line| out.line(line))?;
                last = Some((now, blocks));
                Ok(())
            }
        }
    })
}

/// In the place of tables without rows.
fn nobody(pids: &[u32]) -> &'static str {
    if pids.is_empty() { "No program uses Ferroce now." } else { "No program with these process ids uses Ferroce." }
}

/// Everything, as `--json` shows it.
#[derive(Debug, Default, Serialize)]
struct Statistics {
    devices: Vec<Device>,
    programs: Vec<OfProgram>,
    /// Links of all programs.
    link: Counted,
    service: Counted,
    /// Programs that did not answer, and why.
    silent: Vec<String>,
}

/// A device, over all programs.
#[derive(Debug, Default, Serialize)]
struct Device {
    device: String,
    interface: String,
    counters: Counted,
}

/// A program.
#[derive(Debug, Serialize)]
struct OfProgram {
    pid: u32,
    program: String,
    devices: Vec<Device>,
    link: Counted,
    qps: Vec<OfQp>,
}

/// A queue pair.
#[derive(Debug, Serialize)]
struct OfQp {
    qpn: u32,
    qp_type: String,
    state: String,
    device: String,
    counters: Counted,
}

/// Counters under a heading.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    title: String,
    counters: Counted,
}

impl Block {
    fn has_counted(&self) -> bool {
        self.counters.values().any(|value| *value > 0)
    }
}

impl Statistics {
    /// `None`: no service runs.
    fn ask(pids: &[u32]) -> Result<Option<Statistics>> {
        let Some(service) = programs::service()? else { return Ok(None) };
        let status = programs::status(&service)?;
        Ok(Some(Statistics::of(programs::ask(&service, pids)?, &status.counters)))
    }

    fn of(programs: Vec<Program>, service: &ServiceCounters) -> Statistics {
        let mut found =
            Statistics { silent: programs::silent(&programs), service: of_service(service), ..Statistics::default() };
        let mut devices: BTreeMap<String, Device> = BTreeMap::new();
        for Program { client, answer } in programs {
            let Ok(snapshot) = answer else { continue };
            let program = OfProgram::of(client.pid, client.program, snapshot);
            for device in &program.devices {
                let sum = devices.entry(device.device.clone()).or_insert_with(|| Device {
                    device: device.device.clone(),
                    interface: device.interface.clone(),
                    counters: Counted::new(),
                });
                add(&mut sum.counters, &device.counters);
            }
            add(&mut found.link, &program.link);
            found.programs.push(program);
        }
        found.devices = devices.into_values().collect();
        found
    }

    fn blocks(&self, by: By) -> Vec<Block> {
        let block = |title: String, counters: &Counted| Block { title, counters: counters.clone() };
        let mut blocks = Vec::new();
        match by {
            By::Device => {
                for device in &self.devices {
                    blocks.push(block(device.title(), &device.counters));
                }
                blocks.push(block("links of all programs".into(), &self.link));
                blocks.push(block("service".into(), &self.service));
            }
            By::Program => {
                for program in &self.programs {
                    for device in &program.devices {
                        blocks.push(block(format!("{}, {}", program.title(), device.title()), &device.counters));
                    }
                    blocks.push(block(format!("{}, link", program.title()), &program.link));
                }
            }
            By::Qp => {
                for program in &self.programs {
                    for qp in &program.qps {
                        blocks.push(block(format!("{}, {}", program.title(), qp.title()), &qp.counters));
                    }
                }
            }
        }
        blocks
    }
}

impl Device {
    fn title(&self) -> String {
        format!("{} ({})", printable(&self.device), printable(&self.interface))
    }
}

impl OfProgram {
    fn of(pid: u32, program: String, snapshot: Snapshot) -> OfProgram {
        let devices = snapshot.devices.into_iter();
        let qps = snapshot.qps.rows.into_iter();
        OfProgram {
            pid,
            program,
            devices: devices
                .map(|row| Device { device: row.device, interface: row.interface, counters: row.counters })
                .collect(),
            link: snapshot.link,
            qps: qps
                .map(|row| OfQp {
                    qpn: row.qpn,
                    qp_type: row.qp_type,
                    state: row.state,
                    device: row.device,
                    counters: row.counters,
                })
                .collect(),
        }
    }

    fn title(&self) -> String {
        format!("pid {} ({})", self.pid, printable(&self.program))
    }
}

impl OfQp {
    fn title(&self) -> String {
        format!(
            "{} qp {} {} {}",
            printable(&self.device),
            hex_qpn(self.qpn),
            printable(&self.qp_type),
            printable(&self.state)
        )
    }
}

fn add(sum: &mut Counted, more: &Counted) {
    for (name, value) in more {
        let entry = sum.entry(name.clone()).or_default();
        // A program may say anything.
        *entry = entry.saturating_add(*value);
    }
}

fn of_service(counters: &ServiceCounters) -> Counted {
    let named = [
        ("strays", counters.strays),
        ("relay_in", counters.relay_in),
        ("relay_out", counters.relay_out),
        ("astray", counters.astray),
        ("probings", counters.probings),
        ("management", counters.management),
        ("drop_short", counters.drop_short),
        ("drop_icrc", counters.drop_icrc),
        ("drop_no_lane", counters.drop_no_lane),
        ("drop_full", counters.drop_full),
        ("drop_loop", counters.drop_loop),
    ];
    ferroce_service::inspect::from_pairs(named)
}

/// Prints the blocks; with what they were some seconds before, also the growth in a second.
fn print(blocks: &[Block], before: Option<(f64, &[Block])>, all: bool, out: &mut Out) -> Result<()> {
    for (at, block) in blocks.iter().enumerate() {
        if at > 0 {
            out.line("")?;
        }
        out.line(&block.title)?;
        table(block, before, all).print(out)?;
    }
    Ok(())
}

/// What probes mean, where there are some: through rings, which lose nothing, they look like a fault.
fn note(blocks: &[Block]) -> Option<&'static str> {
    let counted = |name| blocks.iter().any(|block| block.counters.get(name).is_some_and(|value| *value > 0));
    if !counted("probe_sent") && !counted("duplicate_request") {
        return None;
    }
    Some(if counted("packets_retransmitted") {
        "probe_sent, duplicate_request: silent peers were asked what they have. What was sent again is packets_retransmitted."
    } else {
        "probe_sent, duplicate_request: silent peers (waiting for a core, most often) were asked what they have. Nothing was sent again."
    })
}

fn table(block: &Block, before: Option<(f64, &[Block])>, all: bool) -> Table {
    let headings: &[&str] = &["COUNTER", ">VALUE", ">PER SECOND"];
    let mut table = Table::new(if before.is_some() { headings } else { &headings[..2] });
    let old = before.and_then(|(seconds, blocks)| {
        let old = blocks.iter().find(|old| old.title == block.title)?;
        Some((seconds, &old.counters))
    });
    for (name, value) in block.counters.iter().filter(|(_, value)| all || **value != 0) {
        let grown = old.map(|(seconds, old)| {
            value.saturating_sub(old.get(name).copied().unwrap_or(0)) as f64 / seconds.max(f64::MIN_POSITIVE)
        });
        let mut row = vec![printable(name), value.to_string()];
        if before.is_some() {
            // Empty: this block was not there before.
            row.push(grown.map_or_else(String::new, |grown| format!("{grown:.0}")));
        }
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use ferroce_service::inspect::{DeviceRow, QpRow, from_pairs};
    use ferroce_service::protocol::ClientStatus;

    use super::*;

    fn program(pid: u32, sent: u64) -> Program {
        let counters = from_pairs([("sent_pkts", sent), ("rnr_wait_us", 0)]);
        let device = DeviceRow { device: "ferroce0".into(), interface: "eth0".into(), contexts: 1, counters };
        let mut snapshot = Snapshot { devices: vec![device], ..Snapshot::default() };
        snapshot.link = from_pairs([("tx_packets", sent)]);
        snapshot.qps.push(QpRow {
            qpn: 5,
            qp_type: "RC".into(),
            state: "RTS".into(),
            device: "ferroce0".into(),
            counters: from_pairs([("sent_pkts", sent)]),
            ..QpRow::default()
        });
        let client = ClientStatus { pid, program: "p".into(), ..ClientStatus::default() };
        Program { client, answer: Ok(snapshot) }
    }

    fn found() -> Statistics {
        Statistics::of(vec![program(1, 10), program(2, u64::MAX)], &ServiceCounters::default())
    }

    /// It was a table without rows, below the name of no device.
    #[test]
    fn where_nothing_was_counted_there_is_no_table() {
        let service = ServiceCounters { strays: 1, ..ServiceCounters::default() };
        let blocks = Statistics::of(Vec::new(), &service).blocks(By::Device);
        let titles: Vec<_> = blocks.iter().filter(|block| block.has_counted()).map(|block| &*block.title).collect();
        assert_eq!(titles, ["service"]);
        assert_ne!(nobody(&[]), nobody(&[7]));
    }

    #[test]
    fn devices_are_sums_over_programs_that_nobody_can_overflow() {
        let found = found();
        assert_eq!(found.devices.len(), 1);
        assert_eq!(found.devices[0].counters["sent_pkts"], u64::MAX);
        let titles = |by| found.blocks(by).into_iter().map(|block| block.title).collect::<Vec<_>>();
        assert_eq!(titles(By::Device), ["ferroce0 (eth0)", "links of all programs", "service"]);
        assert_eq!(titles(By::Program)[..2], ["pid 1 (p), ferroce0 (eth0)", "pid 1 (p), link"]);
        assert_eq!(
            titles(By::Qp),
            ["pid 1 (p), ferroce0 qp 0x000005 RC RTS", "pid 2 (p), ferroce0 qp 0x000005 RC RTS"]
        );
    }

    #[test]
    fn probes_are_explained_where_there_are_some() {
        let block = |counters: &[(&'static str, u64)]| Block {
            title: "t".into(),
            counters: from_pairs(counters.iter().copied()),
        };
        assert_eq!(note(&[block(&[("sent_pkts", 7), ("probe_sent", 0)])]), None);
        let asked = block(&[("duplicate_request", 1)]);
        assert!(note(std::slice::from_ref(&asked)).is_some_and(|note| note.ends_with("Nothing was sent again.")));
        let repeated = block(&[("packets_retransmitted", 1)]);
        assert!(note(&[asked, repeated]).is_some_and(|note| note.ends_with("is packets_retransmitted.")));
    }

    #[test]
    fn growth_is_by_the_second() {
        let block = |value| Block { title: "t".into(), counters: from_pairs([("a", value), ("b", 0)]) };
        let before = [block(100)];
        let lines = |before, all| table(&block(300), before, all).lines();
        assert_eq!(lines(None, false), ["COUNTER  VALUE", "a          300"]);
        assert_eq!(
            lines(Some((2.0, &before[..])), true),
            ["COUNTER  VALUE  PER SECOND", "a          300         100", "b            0           0"]
        );
        let other = [Block { title: "other".into(), counters: Counted::new() }];
        assert_eq!(
            lines(Some((2.0, &other[..])), false),
            ["COUNTER  VALUE  PER SECOND", "a          300"],
            "it was not there before"
        );
    }
}
