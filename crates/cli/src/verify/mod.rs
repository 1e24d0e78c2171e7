//! `ferroce verify`: every opcode, every byte.

mod arena;
mod case;
mod end;
mod queues;

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use self::case::{Case, Op, Transport, cases};
use self::end::{End, Remote, SETTINGS, Verdict};
use self::queues::Role;
use crate::output::{Closed, Columns, Out, complain};
use crate::rig::{Client, Control, INTRODUCTION_PATIENCE, Partner, Peer, Place, Reception, Settings, listen};

/// How often an unreliable message may be lost before its case is given up.
const MAX_LOSSES: u32 = 3;

/// Check what RDMA does between two processes, byte by byte.
///
/// Runs SEND, WRITE, READ (with immediate, inline, in pieces, of zero length), atomics, ATOMIC WRITE, FLUSH and memory windows over RC, UC, UD
/// and XRC, as far as each has them, with seeded contents, sizes around every boundary and odd addresses. After each case both ends compare every byte of their
/// memory, what was to be changed and what was not, and every field of the completions.
///
/// UC and UD may lose messages (FERROCE_FAULT=loss=0.01 makes them do so): a lost one is sent again, and given up after three losses;
/// what arrived of it must be right all the same. Lost messages (LOST) and cases given up (GIVEN UP) are counted and are no fault,
/// unless no message of an operation arrived at all.
///
/// Exit code: 0 if all that arrived is right, 1 if something is wrong, 125 if the test could not be done.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ferroce verify --self                    on this machine
  ferroce verify server                    (one machine)
  ferroce verify 192.0.2.7 --rounds 10     (another)
  ferroce verify --self --seed 7 --json")]
pub(crate) struct VerifyArgs {
    /// `server`, or the host where the server runs
    #[arg(value_name = "server|HOST")]
    target: Option<String>,
    #[command(flatten)]
    place: Place,
    /// How often to run all cases, each time with other contents
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Where the contents come from; a run with the same seed does the same
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Sleep until completions come, instead of polling
    #[arg(long)]
    events: bool,
    /// Path MTU in bytes [default: the largest that both ends can do]
    #[arg(long)]
    mtu: Option<u32>,
    /// Print JSON for programs
    #[arg(long)]
    json: bool,
}

/// First message of the client.
#[derive(Serialize, Deserialize)]
struct Greeting {
    hello: String,
    settings: Settings,
}

const HELLO: &str = "ferroce verify 2";

/// What the client tells the server.
#[derive(Serialize, Deserialize)]
enum Step {
    /// Get ready for the case, then say so.
    Prepare(Case),
    /// It is done: judge, and answer a [`Verdict`].
    Judge,
    End,
}

#[derive(Serialize, Deserialize)]
struct Ready {
    /// Key of the window that the case takes.
    window: Option<u32>,
}

/// What was found for one operation of one service type.
#[derive(Clone, Debug, Serialize)]
struct Tally {
    transport: Transport,
    operation: Op,
    cases: u64,
    /// Bytes of messages.
    message_bytes: u64,
    /// Bytes compared at both ends.
    checked_bytes: u64,
    /// Unreliable messages that were lost.
    lost: u64,
    /// Cases whose message was lost each time.
    given_up: u64,
}

impl Tally {
    fn new(case: &Case) -> Tally {
        let (transport, operation) = (case.transport, case.op);
        Tally { transport, operation, cases: 0, message_bytes: 0, checked_bytes: 0, lost: 0, given_up: 0 }
    }

    /// Its row.
    fn cells(&self) -> [String; 7] {
        let lossy = |count: u64| if self.transport.is_reliable() { "-".into() } else { count.to_string() };
        [
            self.transport.to_string(),
            self.operation.to_string(),
            self.cases.to_string(),
            self.message_bytes.to_string(),
            self.checked_bytes.to_string(),
            lossy(self.lost),
            lossy(self.given_up),
        ]
    }

    /// That is no loss, but a path that carries nothing.
    fn fault(&self) -> Option<String> {
        (self.cases == 0 && self.given_up > 0)
            .then(|| format!("{} {}: none of {} messages arrived", self.transport, self.operation, self.lost))
    }
}

#[derive(Serialize)]
struct Report<'a> {
    client: &'a str,
    server_address: String,
    path_mtu: u32,
    seed: u64,
    rounds: u32,
    results: Vec<&'a Tally>,
    failures: &'a [String],
}

pub(crate) fn run(args: &VerifyArgs) -> Result<u8> {
    match args.target.as_deref() {
        Some("server") => serve(args),
        host => check(args, host),
    }
}

fn serve(args: &VerifyArgs) -> Result<u8> {
    let listener = listen(args.place.port)?;
    Out::new().line(Partner::greeting(listener.local_addr()?.port()))?;
    let mut reception = Reception::open(listener, HELLO)?;
    loop {
        let client = reception.next()?;
        let from = client.from;
        let result = serve_client(args, client);
        if args.place.once {
            return result.map(|()| 0);
        }
        if let Err(error) = result {
            complain(format_args!("client {from}: {error:#}"));
        }
    }
}

fn serve_client(args: &VerifyArgs, client: Client<Greeting>) -> Result<()> {
    let Client { greeting, mut control, .. } = client;
    let settings = Settings { events: greeting.settings.events, ..SETTINGS };
    let mut end = End::open(&args.place, &control, settings, Role::Server)?;
    control.send(&(end.introduction(), end.srqn()))?;
    let (peer, mtu): (Peer, u32) = control.recv_within(INTRODUCTION_PATIENCE)?;
    let peer = end.connect(peer, None, mtu)?.peer;
    let mut present = None;
    loop {
        match control.recv()? {
            Step::Prepare(case) => {
                case.check().map_err(anyhow::Error::msg)?;
                let window = end.prepare(&case, &peer)?;
                present = Some(case);
                control.send(&Ready { window })?;
            }
            Step::Judge => {
                let case = present.as_ref().context("the client wants a verdict before any case")?;
                control.send(&end.judge(case, &peer)?)?;
            }
            Step::End => return Ok(()),
        }
    }
}

fn check(args: &VerifyArgs, host: Option<&str>) -> Result<u8> {
    let (mut control, _partner) = args.place.reach("verify", host)?;
    let settings = Settings { events: args.events, ..SETTINGS };
    control.send(&Greeting { hello: HELLO.into(), settings })?;
    let (peer, srqn): (Peer, Option<u32>) = control.recv()?;
    let mut end = End::open(&args.place, &control, settings, Role::Client)?;
    let mtu = args.mtu.unwrap_or_else(|| end.introduction().mtu.min(peer.mtu));
    let mut remote = end.connect(peer, srqn, mtu)?;
    control.send(&(end.introduction(), mtu))?;
    let client = end.describe();
    let mut out = Out::new();
    if !args.json {
        out.line(format_args!("{client} -> {}; path MTU {mtu}, seed {}", remote.peer.addr, args.seed))?;
    }

    let mut rows = Rows::new((!args.json).then_some(&mut out))?;
    let mut tallies = Tallies::new();
    let mut failures = Vec::new();
    'all: for round in 0..args.rounds {
        for case in cases(args.seed.wrapping_add(u64::from(round) << 32), mtu) {
            if round + 1 == args.rounds {
                rows.show(tallies.range(..(case.transport, case.op)))?;
            }
            let tally = tallies.entry((case.transport, case.op)).or_insert_with(|| Tally::new(&case));
            if let Some(fault) = one_case(&mut control, &mut end, &case, &mut remote, tally)? {
                failures.push(format!("{case}: {fault}"));
                // Whatever comes after a wrong case may be wrong because of it.
                break 'all;
            }
        }
    }
    rows.show(tallies.range(..))?;
    control.send(&Step::End)?;
    failures.extend(tallies.values().filter_map(Tally::fault));

    let results: Vec<&Tally> = tallies.values().collect();
    if args.json {
        let server_address = remote.peer.addr.to_string();
        let (seed, rounds, failures) = (args.seed, args.rounds, &failures[..]);
        out.json(&Report { client: &client, server_address, path_mtu: mtu, seed, rounds, results, failures })?;
    } else if failures.is_empty() {
        out.line(summary(&results))?;
    }
    for failure in &failures {
        complain(format_args!("WRONG: {failure}"));
    }
    Ok(u8::from(!failures.is_empty()))
}

/// Runs one case, again while an unreliable message gets lost, [`MAX_LOSSES`] times at most. Gives what is wrong.
fn one_case(
    control: &mut Control,
    end: &mut End,
    case: &Case,
    remote: &mut Remote,
    tally: &mut Tally,
) -> Result<Option<String>> {
    for _ in 0..MAX_LOSSES {
        control.send(&Step::Prepare(*case))?;
        remote.window = control.recv::<Ready>()?.window;
        if let Some(fault) = end.perform(case, remote).with_context(|| case.to_string())? {
            return Ok(Some(fault));
        }
        control.send(&Step::Judge)?;
        match control.recv()? {
            Verdict::Right => {
                tally.cases += 1;
                tally.message_bytes += u64::from(case.size);
                tally.checked_bytes += 2 * end.bytes_checked();
                return Ok(None);
            }
            Verdict::Lost => tally.lost += 1,
            Verdict::Wrong(fault) => return Ok(Some(fault)),
        }
    }
    tally.given_up += 1;
    Ok(None)
}

fn summary(tallies: &[&Tally]) -> String {
    let sum = |count: fn(&Tally) -> u64| tallies.iter().map(|tally| count(tally)).sum::<u64>();
    let mut text = format!("{} cases: every byte at both ends is right", sum(|tally| tally.cases));
    let lost = sum(|tally| tally.lost);
    if lost > 0 {
        let given_up = sum(|tally| tally.given_up);
        text += &format!("; {lost} messages of UC and UD were lost, as they may be, and {given_up} cases given up");
    }
    text
}

/// By service type and operation, in the order of the cases.
type Tallies = BTreeMap<(Transport, Op), Tally>;

/// The table, whose rows are written as soon as they are complete.
struct Rows<'a> {
    /// None: nothing is written.
    out: Option<&'a mut Out>,
    columns: Columns,
    /// So many are written.
    shown: usize,
}

impl<'a> Rows<'a> {
    /// Writes the headings.
    fn new(mut out: Option<&'a mut Out>) -> Result<Rows<'a>, Closed> {
        let columns = Columns::new(&[
            ("TYPE", 4),
            ("OPERATION", 25),
            (">CASES", 8),
            (">MESSAGE BYTES", 15),
            (">BYTES CHECKED", 15),
            (">LOST", 6),
            (">GIVEN UP", 8),
        ]);
        if let Some(out) = &mut out {
            out.line(columns.heading())?;
        }
        Ok(Rows { out, columns, shown: 0 })
    }

    /// Writes those of the first tallies that are not written yet.
    fn show<'t>(&mut self, first: impl Iterator<Item = (&'t (Transport, Op), &'t Tally)>) -> Result<(), Closed> {
        let Some(out) = &mut self.out else { return Ok(()) };
        for (_, tally) in first.skip(self.shown) {
            out.line(self.columns.row(&tally.cells()))?;
            self.shown += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(cases: u64, lost: u64, given_up: u64) -> Tally {
        let case = Case { transport: Transport::Uc, op: Op::Send, size: 1, inline: false, seed: 1 };
        Tally { cases, lost, given_up, ..Tally::new(&case) }
    }

    #[test]
    fn losses_are_told_and_are_no_fault_unless_nothing_arrives() {
        assert_eq!(tally(5, 3, 1).fault(), None);
        assert_eq!(tally(0, 0, 0).fault(), None, "ended before");
        assert_eq!(tally(0, 6, 2).fault().as_deref(), Some("UC SEND: none of 6 messages arrived"));
        assert_eq!(summary(&[&tally(5, 0, 0)]), "5 cases: every byte at both ends is right");
        assert_eq!(
            summary(&[&tally(5, 3, 1), &tally(2, 1, 0)]),
            "7 cases: every byte at both ends is right; 4 messages of UC and UD were lost, as they may be, and 1 cases given up"
        );
    }
}
