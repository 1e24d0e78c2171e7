//! `cargo xtask bench --goals`: stock programs on Ferroce against TCP and UCX, each beside the ratio that is wanted.
//!
//! Both sides of a ratio are measured one right after the other, in turns; the table shows the medians.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use program_tests::{interrupt, parse};

use crate::bench::{Place, iperf3, loopback, median, number, results, veth};
use crate::pair::{self, free_port};
use crate::process::{installed, print, say};

/// Bytes of a large message.
const LARGE: u32 = 1 << 20;
/// Bytes of a small one.
const SMALL: u32 = 8;
/// One way to move large ones through shared memory, as UCX has it.
const UCX_SHARED_MEMORY: &str = "posix,cma,self";

/// What a ratio has to be.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wanted {
    AtLeast(f64),
    AtMost(f64),
}

/// One ratio, measured some times.
struct Goal {
    what: &'static str,
    /// With what it is compared.
    with: &'static str,
    unit: &'static str,
    wanted: Wanted,
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

/// Who measures what.
struct Bench<'a> {
    ferroce: &'a Path,
    seconds: f64,
    loopback: Place,
    jumbo: Place,
    ethernet: Place,
}

/// A measurement of one number.
type Measure = fn(&Bench<'_>) -> Result<f64>;

/// What is compared: the row, the other side's name, the unit, the ratio that is wanted, ours, theirs.
type Row = (&'static str, &'static str, &'static str, Wanted, Measure, Measure);

/// WRITE latency spins on memory: with two cores the peer's progress thread has to share one with a spinning program.
fn write_latency_wanted() -> Wanted {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Wanted::AtMost(if cores >= 4 { 0.125 } else { 0.6 })
}

fn rows() -> Vec<Row> {
    use Wanted::{AtLeast, AtMost};
    let write: Measure = |b| b.rate(&b.loopback, "ib_write_bw", LARGE);
    let read: Measure = |b| b.rate(&b.loopback, "ib_read_bw", LARGE);
    let send_latency: Measure = |b| b.latency(&b.loopback, "ib_send_lat");
    let write_rate: Measure = |b| b.millions(&b.loopback, "ib_write_bw");
    let tcp: Measure = |b| iperf3(&b.loopback, LARGE, b.seconds);
    let ucx: Measure = |b| b.ucx_rate(&b.loopback, UCX_SHARED_MEMORY, LARGE);
    let tcp_latency: Measure = |b| b.tcp_latency(&b.loopback);
    vec![
        ("WRITE 1 MiB, one host", "iperf3", "Gbit/s", AtLeast(4.0), write, tcp),
        ("WRITE 1 MiB, one host", "UCX posix, cma", "Gbit/s", AtLeast(1.2), write, ucx),
        ("READ 1 MiB, one host", "iperf3", "Gbit/s", AtLeast(4.0), read, tcp),
        ("READ 1 MiB, one host", "UCX posix, cma", "Gbit/s", AtLeast(1.2), read, ucx),
        ("SEND latency 2 B, one host", "TCP, spinning", "us", AtMost(0.125), send_latency, tcp_latency),
        ("SEND latency 2 B, one host", "UCX posix", "us", AtMost(1.5), send_latency, |b| {
            b.ucx_latency(&b.loopback, UCX_SHARED_MEMORY)
        }),
        (
            "WRITE latency 2 B, one host",
            "TCP, spinning",
            "us",
            write_latency_wanted(),
            |b| b.latency(&b.loopback, "ib_write_lat"),
            tcp_latency,
        ),
        ("WRITE 8 B, one host, one queue pair", "UCX tcp", "M/s", AtLeast(10.0), write_rate, |b| {
            b.ucx_millions(&b.loopback)
        }),
        (
            "WRITE 1 MiB, veth, MTU 9000",
            "iperf3",
            "Gbit/s",
            AtLeast(1.0),
            |b| b.rate(&b.jumbo, "ib_write_bw", LARGE),
            |b| iperf3(&b.jumbo, LARGE, b.seconds),
        ),
        (
            "WRITE 1 MiB, veth, MTU 1500",
            "iperf3",
            "Gbit/s",
            AtLeast(0.7),
            |b| b.rate(&b.ethernet, "ib_write_bw", LARGE),
            |b| iperf3(&b.ethernet, LARGE, b.seconds),
        ),
        (
            "SEND latency 2 B, veth",
            "TCP, spinning",
            "us",
            AtMost(0.6),
            |b| b.latency(&b.ethernet, "ib_send_lat"),
            |b| b.tcp_latency(&b.ethernet),
        ),
        (
            "SEND 8 B, veth",
            "UCX tcp",
            "M/s",
            AtLeast(5.0),
            |b| b.millions(&b.ethernet, "ib_send_bw"),
            |b| b.ucx_millions(&b.ethernet),
        ),
        (
            "WRITE 1 MiB, veth, 1 % loss",
            "without loss",
            "Gbit/s",
            AtLeast(0.5),
            |b| b.rate_with_loss(&b.ethernet),
            |b| b.rate(&b.ethernet, "ib_write_bw", LARGE),
        ),
    ]
}

/// Prints the table.
pub(crate) fn measure(ferroce: &Path, runs: u32, seconds: f64) -> Result<()> {
    for (program, package) in [("ib_write_bw", "perftest"), ("ucx_perftest", "ucx-utils")] {
        if !installed(program) {
            bail!("{program} is needed here and not installed (apt-get install {package})");
        }
    }
    let bench = Bench { ferroce, seconds, loopback: loopback(), jumbo: veth(9000)?, ethernet: veth(1500)? };
    let rows = rows();
    let mut goals: Vec<Goal> = rows.iter().map(Goal::new).collect();
    for run in 1..=runs {
        for (goal, row) in goals.iter_mut().zip(&rows) {
            let (.., ours, theirs) = row;
            goal.ours.push(ours(&bench)?);
            goal.theirs.push(theirs(&bench)?);
            interrupt::check().map_err(|failure| anyhow!("{failure}"))?;
        }
        say(format_args!("run {run} of {runs} done"));
    }
    print("| what | unit | Ferroce | compared with | there | ratio | wanted | |");
    print("|---|---|--:|---|--:|--:|--:|---|");
    goals.iter().for_each(|goal| print(goal.line()));
    Ok(())
}

impl Goal {
    fn new((what, with, unit, wanted, ..): &Row) -> Goal {
        Goal { what, with, unit, wanted: *wanted, ours: Vec::new(), theirs: Vec::new() }
    }

    fn line(&self) -> String {
        let (ours, theirs) = (median(&self.ours), median(&self.theirs));
        let ratio = ours / theirs;
        let met = if self.wanted.is_met(ratio) { "met" } else { "not met" };
        format!(
            "| {} | {} | {ours:.2} | {} | {theirs:.2} | {ratio:.2} | {} | {met} |",
            self.what, self.unit, self.with, self.wanted
        )
    }
}

impl Wanted {
    fn is_met(self, ratio: f64) -> bool {
        match self {
            Wanted::AtLeast(wanted) => ratio >= wanted,
            Wanted::AtMost(wanted) => ratio <= wanted,
        }
    }
}

impl std::fmt::Display for Wanted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Wanted::AtLeast(wanted) => write!(f, ">= {wanted}"),
            Wanted::AtMost(wanted) => write!(f, "<= {wanted}"),
        }
    }
}

impl Bench<'_> {
    /// Bandwidth of a program of perftest, in Gbit/s.
    fn rate(&self, place: &Place, program: &str, bytes: u32) -> Result<f64> {
        self.gbit(place, program, bytes, &[])
    }

    /// Messages of 8 bytes in a second, in millions.
    fn millions(&self, place: &Place, program: &str) -> Result<f64> {
        Ok(millions_of(self.rate(place, program, SMALL)?))
    }

    /// Bandwidth of WRITE when each end loses one packet in a hundred.
    fn rate_with_loss(&self, place: &Place) -> Result<f64> {
        self.gbit(place, "ib_write_bw", LARGE, &[("FERROCE_FAULT", "loss=0.01")])
    }

    fn gbit(&self, place: &Place, program: &str, bytes: u32, env: &[(&str, &str)]) -> Result<f64> {
        let messages = if bytes == LARGE { 3_000.0 } else { 1_000_000.0 } * self.seconds.max(0.1);
        const MIB_PER_SECOND: f64 = 8.0 * 1_048_576.0 / 1e9;
        Ok(self.perftest(place, program, bytes, messages, env)? * MIB_PER_SECOND)
    }

    /// Average latency of a program of perftest with 2 bytes, in microseconds.
    fn latency(&self, place: &Place, program: &str) -> Result<f64> {
        self.perftest(place, program, 2, 100_000.0 * self.seconds.max(0.1), &[])
    }

    fn perftest(&self, place: &Place, program: &str, bytes: u32, messages: f64, env: &[(&str, &str)]) -> Result<f64> {
        let port = free_port()?;
        let command = |namespace| {
            let mut command = place.command(namespace, self.ferroce);
            let (size, count, port) = (bytes.to_string(), messages.to_string(), port.to_string());
            command.args(["run", "--", program, "-F", "-s", &size, "-n", &count, "-p", &port]);
            command.envs(env.iter().copied());
            command
        };
        let mut server = command(place.server.as_ref());
        let mut client = command(place.client.as_ref());
        let printed = pair::output(&mut server, client.arg(place.address), port)?;
        let rows = parse::perftest(&printed).map_err(|failure| anyhow!("{failure}"))?;
        rows.last().map(|row| row.average).with_context(|| format!("{program} printed no table: {printed}"))
    }

    /// Half a round trip of 2 bytes over TCP between two ends that spin, in microseconds.
    fn tcp_latency(&self, place: &Place) -> Result<f64> {
        let port = free_port()?;
        let (port_text, seconds) = (port.to_string(), self.seconds.to_string());
        let mut server = place.command(place.server.as_ref(), self.ferroce);
        server.args(["perf", "server", "--once", "--port", &port_text]);
        let mut client = place.command(place.client.as_ref(), self.ferroce);
        client.args(["perf", "send-lat", place.address, "--port", &port_text, "--duration", &seconds, "--json"]);
        let report = serde_json::from_str(&pair::output(&mut server, &mut client, port)?).context("no JSON")?;
        let result = results(&report)?.first().context("the report has no result")?;
        number(&result["tcp"]["latency_us"]["median"])
    }

    /// Bandwidth of UCX's tagged messages, in Gbit/s.
    fn ucx_rate(&self, place: &Place, transports: &str, bytes: u32) -> Result<f64> {
        let messages = if bytes == LARGE { 3_000.0 } else { 500_000.0 } * self.seconds.max(0.1);
        // The last rate of messages that it prints is that of the whole run.
        let per_second = self.ucx(place, transports, "tag_bw", bytes, messages, "overall_mr")?;
        Ok(per_second * f64::from(bytes) * 8.0 / 1e9)
    }

    /// UCX's tagged messages of 8 bytes over TCP in a second, in millions.
    fn ucx_millions(&self, place: &Place) -> Result<f64> {
        Ok(millions_of(self.ucx_rate(place, "tcp", SMALL)?))
    }

    /// Average latency of UCX's tagged messages of 2 bytes, in microseconds.
    fn ucx_latency(&self, place: &Place, transports: &str) -> Result<f64> {
        self.ucx(place, transports, "tag_lat", 2, 500_000.0 * self.seconds.max(0.1), "overall_lat")
    }

    fn ucx(&self, place: &Place, tls: &str, test: &str, bytes: u32, messages: f64, column: &str) -> Result<f64> {
        let port = free_port()?;
        let command = |namespace| {
            let mut command = place.command(namespace, Path::new("ucx_perftest"));
            command.env("UCX_TLS", tls).args(["-p", &port.to_string()]);
            command
        };
        let mut server = command(place.server.as_ref());
        let mut client = command(place.client.as_ref());
        let (size, count) = (bytes.to_string(), messages.to_string());
        client.args([place.address, "-t", test, "-s", &size, "-n", &count, "-f", "-v"]);
        column_of(&pair::output(&mut server, &mut client, port)?, column)
    }
}

/// Gbit/s of small messages as millions of messages in a second.
fn millions_of(gbit_per_second: f64) -> f64 {
    gbit_per_second * 1000.0 / f64::from(8 * SMALL)
}

/// A number of the last line of UCX's CSV.
fn column_of(csv: &str, column: &str) -> Result<f64> {
    let mut lines = csv.lines().filter(|line| line.contains(','));
    let head = lines.next().context("UCX printed no table")?;
    let place = head.split(',').position(|name| name == column).with_context(|| format!("no {column} in {head:?}"))?;
    let last = lines.next_back().context("UCX printed no numbers")?;
    let word = last.split(',').nth(place).with_context(|| format!("a line is too short: {last:?}"))?;
    word.parse().with_context(|| format!("no number: {word:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_judged_by_what_is_wanted() {
        assert!(Wanted::AtLeast(2.0).is_met(2.0) && !Wanted::AtLeast(2.0).is_met(1.9));
        assert!(Wanted::AtMost(0.5).is_met(0.5) && !Wanted::AtMost(0.5).is_met(0.6));
        let goal = Goal { ours: vec![1.0, 3.0, 2.0], theirs: vec![4.0], ..Goal::new(&rows()[0]) };
        assert!(goal.line().contains("| 2.00 | iperf3 | 4.00 | 0.50 | >= 4 | not met |"), "{}", goal.line());
    }

    #[test]
    fn small_messages_are_counted_from_their_bits() {
        assert_eq!(millions_of(0.64), 10.0);
    }

    #[test]
    fn ucx_s_table_is_read_by_its_heading() {
        let csv = "noise\niterations,avg_lat,overall_mr\n10,0.5,7\n20,0.6,8\n";
        assert_eq!(column_of(csv, "overall_mr").expect("a column"), 8.0);
        assert!(column_of(csv, "other").is_err());
        assert!(column_of("", "overall_mr").is_err());
    }
}
