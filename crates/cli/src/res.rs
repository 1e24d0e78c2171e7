//! `ferroce res`: the objects of all programs.

use anyhow::Result;
use clap::ValueEnum;
use ferroce_service::inspect::{CqRow, Listed, MrRow, PdRow, QpRow, Snapshot, SrqRow};
use ferroce_service::protocol::CmIdStatus;
use serde::Serialize;

use crate::output::{Out, Table};
use crate::programs::{self, Program, printable};
use crate::watch::WatchArgs;

/// Show the RDMA objects of all programs: queue pairs, connection ids, memory regions, completion queues (what `rdma resource show`
/// is for cards).
///
/// Each program answers for itself; one that does not within a second (stopped, say) is named with the reason. Only programs of the
/// own user answer, to root all. Of each kind a program tells at most 4096 objects; what is left out is counted.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ferroce res                              everything
  ferroce res qp --watch                   queue pairs, again every second
  ferroce res qp mr --pid 4711             of one program
  ferroce res --json | jq '.qps[] | select(.state == \"ERR\")'

Columns of queue pairs:
  VIA        udp; ring: memory shared with a process of this host; self: the peer is in the same process
  SQ-PSN     what the requester sends next; UNA: the oldest without an answer; FLY: packets from there on
  RQ-PSN     what the responder expects
  RETRY      times sent again since the last progress / retry_cnt
  RNR        RNR NAKs since the last progress / rnr_retry (7: any number)
  SEND, RECV requests outstanding / room for them (srq: they come from an SRQ)

With --json numbers of queue pairs and keys are plain numbers; a null says that no service runs; with --watch each object is one line.")]
pub(crate) struct ResArgs {
    /// Kinds of objects to show (default: all)
    #[arg(value_name = "KIND")]
    kinds: Vec<Kind>,
    /// Only of the program with this process id; may be given several times
    #[arg(long, value_name = "PID")]
    pid: Vec<u32>,
    /// Print JSON for programs
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    watch: WatchArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Kind {
    /// Queue pairs
    Qp,
    /// Ids and listeners of the connection manager
    CmId,
    /// Memory regions, and windows that are bound
    Mr,
    /// Completion queues
    Cq,
    /// Shared receive queues
    Srq,
    /// Protection domains
    Pd,
}

pub(crate) fn run(args: &ResArgs) -> Result<u8> {
    args.watch.run(!args.json, |out| {
        let found = Resources::ask(&args.pid)?;
        match found {
            found if args.json && args.watch.repeats() => out.json_line(&found),
            found if args.json => out.json(&found),
            None => Ok(out.line("No service runs in this network namespace; it starts with the first program.")?),
            Some(found) => found.print(&args.kinds, out),
        }
    })
}

/// An object, and whose it is.
#[derive(Debug, Serialize)]
struct Owned<T> {
    pid: u32,
    program: String,
    #[serde(flatten)]
    row: T,
}

/// All objects, as `--json` shows them.
#[derive(Debug, Default, Serialize)]
struct Resources {
    qps: Vec<Owned<QpRow>>,
    cm_ids: Vec<CmIdStatus>,
    mrs: Vec<Owned<MrRow>>,
    cqs: Vec<Owned<CqRow>>,
    srqs: Vec<Owned<SrqRow>>,
    pds: Vec<Owned<PdRow>>,
    /// Objects that programs did not tell because there are too many.
    left_out: u64,
    /// Programs that did not answer, and why.
    silent: Vec<String>,
}

impl Resources {
    /// `None`: no service runs.
    fn ask(pids: &[u32]) -> Result<Option<Resources>> {
        let Some(service) = programs::service()? else { return Ok(None) };
        let mut cm_ids = service.cm_ids()?;
        cm_ids.retain(|id| pids.is_empty() || pids.contains(&id.pid));
        Ok(Some(Resources::of(programs::ask(&service, pids)?, cm_ids)))
    }

    fn of(programs: Vec<Program>, cm_ids: Vec<CmIdStatus>) -> Resources {
        let mut found = Resources { cm_ids, silent: programs::silent(&programs), ..Resources::default() };
        for Program { client, answer } in programs {
            let Ok(Snapshot { qps, mrs, cqs, srqs, pds, .. }) = answer else { continue };
            let (pid, program) = (client.pid, client.program.as_str());
            found.left_out += [
                take(pid, program, qps, &mut found.qps),
                take(pid, program, mrs, &mut found.mrs),
                take(pid, program, cqs, &mut found.cqs),
                take(pid, program, srqs, &mut found.srqs),
                take(pid, program, pds, &mut found.pds),
            ]
            .iter()
            .sum::<u64>();
        }
        found
    }

    fn print(&self, kinds: &[Kind], out: &mut Out) -> Result<()> {
        let counts = [
            ("qp", self.qps.len()),
            ("cm_id", self.cm_ids.len()),
            ("mr", self.mrs.len()),
            ("cq", self.cqs.len()),
            ("srq", self.srqs.len()),
            ("pd", self.pds.len()),
        ];
        out.line(counts.map(|(name, count)| format!("{name} {count}")).join("  "))?;
        let tables: [(Kind, Table); 6] = [
            (Kind::Qp, qp_table(&self.qps)),
            (Kind::CmId, cm_id_table(&self.cm_ids)),
            (Kind::Mr, mr_table(&self.mrs)),
            (Kind::Cq, cq_table(&self.cqs)),
            (Kind::Srq, srq_table(&self.srqs)),
            (Kind::Pd, pd_table(&self.pds)),
        ];
        for (kind, table) in tables {
            if table.is_empty() || !kinds.is_empty() && !kinds.contains(&kind) {
                continue;
            }
            out.line("")?;
            table.print(out)?;
        }
        if self.left_out > 0 {
            out.line(format_args!("{} more objects are not shown", self.left_out))?;
        }
        for line in &self.silent {
            out.line(line)?;
        }
        Ok(())
    }
}

/// Adds a program's rows; gives the number of those that it left out.
fn take<T>(pid: u32, program: &str, listed: Listed<T>, rows: &mut Vec<Owned<T>>) -> u64 {
    let left_out = listed.left_out();
    rows.extend(listed.rows.into_iter().map(|row| Owned { pid, program: program.to_owned(), row }));
    left_out
}

/// A value, or a dash for none.
fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

/// A queue pair number as programs of verbs print it; its upper ten bits name the lane.
pub(crate) fn hex_qpn(qpn: u32) -> String {
    format!("{qpn:#08x}")
}

/// What is used and how much there is.
fn of(used: Option<impl ToString>, all: impl ToString) -> String {
    used.map_or_else(|| "-".into(), |used| format!("{}/{}", used.to_string(), all.to_string()))
}

fn qp_table(rows: &[Owned<QpRow>]) -> Table {
    let mut table = Table::new(&[
        ">PID", "PROGRAM", "DEVICE", ">QPN", "TYPE", "STATE", "LOCAL", "REMOTE", ">RQPN", "VIA", ">MTU", ">SQ-PSN",
        ">UNA", ">FLY", ">RQ-PSN", ">RETRY", ">RNR", ">SEND", ">RECV",
    ]);
    for Owned { pid, program, row } in rows {
        let receives = match row.receives {
            Some(receives) => of(Some(receives), row.max_recv_wr),
            None => "srq".into(),
        };
        table.row([
            pid.to_string(),
            printable(program),
            printable(&row.device),
            hex_qpn(row.qpn),
            printable(&row.qp_type),
            printable(&row.state),
            or_dash(row.local),
            or_dash(row.remote),
            or_dash(row.remote_qpn.map(hex_qpn)),
            printable(row.carrier.as_deref().unwrap_or("-")),
            row.path_mtu.to_string(),
            row.sq_psn.to_string(),
            or_dash(row.una_psn),
            or_dash(row.in_flight),
            row.rq_psn.to_string(),
            of(row.retries, row.retry_cnt),
            of(row.rnr_retries, row.rnr_retry),
            of(Some(row.sends), row.max_send_wr),
            receives,
        ]);
    }
    table
}

fn cm_id_table(rows: &[CmIdStatus]) -> Table {
    let mut table =
        Table::new(&[">PID", ">CM-ID", "SPACE", "SERVICE", "STATE", "LOCAL", "REMOTE", ">QPN", ">RQPN", ">WAITING"]);
    for row in rows {
        table.row([
            row.pid.to_string(),
            row.id.to_string(),
            row.space.clone(),
            row.service.clone(),
            row.state.clone(),
            or_dash(row.local),
            or_dash(row.peer),
            or_dash(row.qpn.map(hex_qpn)),
            or_dash(row.remote_qpn.map(hex_qpn)),
            row.waiting.to_string(),
        ]);
    }
    table
}

fn mr_table(rows: &[Owned<MrRow>]) -> Table {
    let mut table = Table::new(&[">PID", "PROGRAM", "KIND", ">KEY", ">PD", ">BYTES", ">IOVA", "ACCESS"]);
    for Owned { pid, program, row } in rows {
        table.row([
            pid.to_string(),
            printable(program),
            printable(&row.kind),
            format!("{:#010x}", row.key),
            row.pdn.to_string(),
            row.len.to_string(),
            format!("{:#x}", row.iova),
            printable(&row.access),
        ]);
    }
    table
}

fn cq_table(rows: &[Owned<CqRow>]) -> Table {
    let mut table = Table::new(&[">PID", "PROGRAM", "DEVICE", ">CQ", ">CQE", ">WAITING", "CHANNEL"]);
    for Owned { pid, program, row } in rows {
        table.row([
            pid.to_string(),
            printable(program),
            printable(&row.device),
            row.cqn.to_string(),
            row.cqe.to_string(),
            row.waiting.to_string(),
            if row.channel { "yes" } else { "no" }.into(),
        ]);
    }
    table
}

fn srq_table(rows: &[Owned<SrqRow>]) -> Table {
    let mut table = Table::new(&[">PID", "PROGRAM", "DEVICE", ">SRQ", ">PD", ">RECV", ">LIMIT"]);
    for Owned { pid, program, row } in rows {
        table.row([
            pid.to_string(),
            printable(program),
            printable(&row.device),
            row.srqn.to_string(),
            row.pdn.to_string(),
            of(Some(row.receives), row.max_wr),
            row.limit.to_string(),
        ]);
    }
    table
}

fn pd_table(rows: &[Owned<PdRow>]) -> Table {
    let mut table = Table::new(&[">PID", "PROGRAM", "DEVICE", ">PD"]);
    for Owned { pid, program, row } in rows {
        table.row([pid.to_string(), printable(program), printable(&row.device), row.pdn.to_string()]);
    }
    table
}

#[cfg(test)]
mod tests {
    use ferroce_service::ServiceError;
    use ferroce_service::protocol::ClientStatus;

    use super::*;

    fn program(pid: u32, name: &str, answer: Result<Snapshot, ServiceError>) -> Program {
        Program { client: ClientStatus { pid, program: name.into(), ..ClientStatus::default() }, answer }
    }

    fn snapshot() -> Snapshot {
        let qp = QpRow {
            qpn: 16_390,
            qp_type: "RC".into(),
            state: "RTS".into(),
            device: "ferroce0".into(),
            local: Some([192, 0, 2, 7].into()),
            remote: Some([192, 0, 2, 8].into()),
            remote_qpn: Some(32_777),
            carrier: Some("udp".into()),
            path_mtu: 1024,
            sq_psn: 105,
            una_psn: Some(100),
            in_flight: Some(5),
            retries: Some(1),
            rnr_retries: Some(0),
            retry_cnt: 7,
            rnr_retry: 6,
            max_send_wr: 16,
            sends: 2,
            ..QpRow::default()
        };
        let mut snapshot = Snapshot::default();
        snapshot.qps.push(qp);
        snapshot.mrs.total = 3;
        snapshot
    }

    #[test]
    fn queue_pairs_show_where_they_stand() {
        let found = Resources::of(vec![program(11, "ib_write_bw", Ok(snapshot()))], vec![]);
        assert_eq!(found.left_out, 3, "regions that were not told");
        assert_eq!(
            qp_table(&found.qps).lines(),
            [
                "PID  PROGRAM      DEVICE         QPN  TYPE  STATE  LOCAL      REMOTE         RQPN  VIA   MTU  SQ-PSN  UNA  FLY  RQ-PSN  RETRY  RNR  SEND  RECV",
                " 11  ib_write_bw  ferroce0  0x004006  RC    RTS    192.0.2.7  192.0.2.8  0x008009  udp  1024     105  100    5       0    1/7  0/6  2/16   srq",
            ]
        );
    }

    #[test]
    fn a_hostile_name_cannot_move_the_cursor() {
        let mut hostile = snapshot();
        hostile.qps.rows[0].state = "\u{1b}[31mRTS".into();
        let found = Resources::of(vec![program(11, "\u{7}bell", Ok(hostile))], vec![]);
        let lines = qp_table(&found.qps).lines().concat();
        assert!(!lines.contains(char::is_control) && lines.contains("?bell"), "{lines:?}");
    }

    #[test]
    fn rows_are_flat_for_programs() {
        let silent = program(12, "sleeper", Err(ServiceError::new(110, "did not answer")));
        let found = Resources::of(vec![program(11, "ib_write_bw", Ok(snapshot())), silent], vec![]);
        let json = serde_json::to_value(&found).expect("can be JSON");
        assert_eq!(json["qps"][0]["pid"], 11);
        assert_eq!(json["qps"][0]["qpn"], 16_390);
        assert_eq!(json["qps"][0]["remote"], "192.0.2.8");
        assert_eq!(json["qps"][0]["receives"], serde_json::Value::Null);
        assert_eq!(json["silent"][0], "pid 12 (sleeper) did not answer");
    }
}
