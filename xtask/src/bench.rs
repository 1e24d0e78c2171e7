//! `cargo xtask bench`: the table of README, measured anew on this machine.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::rc::Rc;

use anyhow::{Context, Result, anyhow, bail};
use program_tests::net::{Namespace, join};
use program_tests::{interrupt, net};
use serde_json::Value;

use crate::goals::{GoalArgs, Under};
use crate::pair::{Running, free_port};
use crate::process::{installed, print, say, show};
use crate::{dist, goals};

/// Message sizes, in bytes.
const SIZES: [u32; 4] = [2, 4 << 10, 64 << 10, 1 << 20];
/// Addresses of the two ends of the veth pair.
const LEFT: &str = "10.77.0.1";
const RIGHT: &str = "10.77.0.2";

/// How long and how often.
#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    /// Runs, of which the medians are shown
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Instead of the table: stock programs on Ferroce against TCP, UCX (ucx-utils), libfabric (libfabric-bin) and, in a virtual machine,
    /// rxe, some beside the ratio that is wanted; long, unless rows are named
    #[arg(long)]
    goals: bool,
    #[command(flatten)]
    rows: GoalArgs,
}

/// Where the two ends are.
pub(crate) struct Place {
    name: &'static str,
    pub(crate) client: Option<Rc<Namespace>>,
    pub(crate) server: Option<Rc<Namespace>>,
    pub(crate) address: &'static str,
}

/// What is measured of each size.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Column {
    WriteRate,
    ReadRate,
    TcpRate,
    SendPolling,
    TcpPolling,
    SendSleeping,
    TcpSleeping,
}

/// Values of all runs.
type Values = BTreeMap<(u32, Column), Vec<f64>>;

/// Prints the table.
pub(crate) fn bench(root: &Path, args: &BenchArgs) -> Result<()> {
    if goals::only_listed(&args.rows)? {
        return Ok(());
    }
    let out = dist::build(root)?;
    let ferroce = out.join("bin/ferroce");
    if !args.goals && !installed("iperf3") {
        bail!("iperf3 measures TCP here and is not installed (apt-get install iperf3)");
    }
    // Ctrl-C must not leave namespaces behind.
    interrupt::install().context("cannot handle signals")?;
    net::remove_leftovers();
    if args.goals {
        return goals::measure(&out, &args.rows, args.runs, args.seconds);
    }
    let mut lines = heading();
    for place in [loopback(), veth(1500)?] {
        say(format_args!("{}: {} runs", place.name, args.runs));
        let mut values = Values::new();
        for round in 1..=args.runs {
            measure(&place, &ferroce, args.seconds, &mut values)?;
            interrupt::check().map_err(|failure| anyhow!("{failure}"))?;
            say(format_args!("{}: run {round} of {} done", place.name, args.runs));
        }
        lines.extend(SIZES.iter().map(|&size| row(place.name, size, &values)));
    }
    for line in lines {
        print(line);
    }
    Ok(())
}

fn loopback() -> Place {
    Place { name: "loopback", client: None, server: None, address: "127.0.0.1" }
}

/// Loopback of a network namespace of its own: nobody else's service is in the way, and none of ours in theirs.
pub(crate) fn one_host() -> Result<Place> {
    let namespace = Namespace::new().map_err(|failure| anyhow!("no network namespace: {failure}"))?;
    let both = Some(Rc::new(namespace));
    Ok(Place { name: "loopback", client: both.clone(), server: both, address: "127.0.0.1" })
}

pub(crate) fn veth(mtu: u32) -> Result<Place> {
    let make = || -> Result<Place, program_tests::failure::Failure> {
        let (client, server) = (Namespace::new()?, Namespace::new()?);
        join(&client, &server)?;
        client.address("eth0", mtu, &[&format!("{LEFT}/24")])?;
        server.address("eth0", mtu, &[&format!("{RIGHT}/24")])?;
        let name = if mtu == 1500 { "veth, MTU 1500" } else { "veth, MTU 9000" };
        Ok(Place { name, client: Some(Rc::new(client)), server: Some(Rc::new(server)), address: RIGHT })
    };
    make().map_err(|failure| anyhow!("no veth pair: {failure}"))
}

/// The same with MTU 1500, over which the kernel's netem does what it is told to each packet, in both directions.
pub(crate) fn lossy(netem: &str) -> Result<Place> {
    let place = veth(1500)?;
    for end in [&place.client, &place.server].into_iter().flatten() {
        let mut words = vec!["tc", "qdisc", "add", "dev", "eth0", "root", "netem"];
        words.extend(netem.split(' '));
        // What tc says is behind the command that was run.
        end.exec(&words).map_err(|failure| {
            let why = failure.to_string();
            anyhow!("no netem: {}", why.rsplit("Error: ").next().unwrap_or(&why).trim())
        })?;
    }
    Ok(place)
}

/// One run: all columns of all sizes.
fn measure(place: &Place, ferroce: &Path, seconds: f64, values: &mut Values) -> Result<()> {
    let server = Server::start(place, ferroce)?;
    let sizes = SIZES.map(|size| size.to_string()).join(",");
    let duration = seconds.to_string();
    let port = server.port.to_string();
    let perf = |test: &str, more: &[&str]| -> Result<Value> {
        let mut command = place.command(place.client.as_deref(), ferroce);
        command.args([
            "perf",
            test,
            place.address,
            "--port",
            &port,
            "--sizes",
            &sizes,
            "--duration",
            &duration,
            "--json",
        ]);
        json_of(command.args(more))
    };
    for (test, column) in [("write-bw", Column::WriteRate), ("read-bw", Column::ReadRate)] {
        for result in results(&perf(test, &["--no-tcp"])?)? {
            put(values, result, column, number(&result["gbit_per_second"])?)?;
        }
    }
    for (more, ours, tcp) in [
        (&[][..], Column::SendPolling, Column::TcpPolling),
        (&["--events"][..], Column::SendSleeping, Column::TcpSleeping),
    ] {
        for result in results(&perf("send-lat", more)?)? {
            put(values, result, ours, number(&result["latency_us"]["median"])?)?;
            put(values, result, tcp, number(&result["tcp"]["latency_us"]["median"])?)?;
        }
    }
    for size in SIZES {
        let rate = iperf3(place, size, seconds)?;
        values.entry((size, Column::TcpRate)).or_default().push(rate);
    }
    Ok(())
}

/// TCP's rate in Gbit/s with writes of `size` bytes.
fn iperf3(place: &Place, size: u32, seconds: f64) -> Result<f64> {
    let report: Value = serde_json::from_str(&iperf3_pair(place, size, seconds, &Under::default())?)
        .context("iperf3 printed no JSON")?;
    Ok(number(&report["end"]["sum_received"]["bits_per_second"])? / 1e9)
}

/// What iperf3 tells of writes of `size` bytes, in JSON.
pub(crate) fn iperf3_pair(place: &Place, size: u32, seconds: f64, under: &Under) -> Result<String> {
    let port = free_port()?.to_string();
    let mut server = place.command_under(place.server.as_deref(), &under.server, Path::new("iperf3"));
    let mut server = Running(
        server
            .args(["-s", "-1", "-p", &port, "--forceflush"])
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run iperf3")?,
    );
    let stdout = server.0.stdout.take().expect("stdout is a pipe");
    // It says so when it listens; what comes after the first lines is only drained.
    let mut lines = BufReader::new(stdout).lines();
    for line in lines.by_ref() {
        if line?.starts_with("Server listening") {
            break;
        }
    }
    let drain = std::thread::spawn(move || lines.map_while(Result::ok).count());
    let mut client = place.command_under(place.client.as_deref(), &under.client, Path::new("iperf3"));
    let length = size.to_string();
    // iperf3 takes whole seconds.
    let time = seconds.ceil().to_string();
    let report = output_of(client.args(["-c", place.address, "-p", &port, "-l", &length, "-t", &time, "-J"]))?;
    server.0.wait()?;
    drain.join().expect("counting lines does not panic");
    Ok(report)
}

impl Place {
    /// A command in a namespace, or in ours, where loopback counts as a device.
    pub(crate) fn command(&self, namespace: Option<&Namespace>, program: &Path) -> Command {
        self.command_under(namespace, &[], program)
    }

    /// The same with other programs before it, each of which runs the next.
    pub(crate) fn command_under(&self, namespace: Option<&Namespace>, before: &[OsString], program: &Path) -> Command {
        let enter = namespace.map(|namespace| ["ip", "netns", "exec", namespace.name()].map(OsString::from));
        let mut words = enter.into_iter().flatten().chain(before.iter().cloned()).chain([program.into()]);
        let mut command = Command::new(words.next().expect("there is a program"));
        command.args(words);
        if namespace.is_none() {
            command.env("FERROCE_LOOPBACK", "1");
        }
        command
    }
}

/// A server of `ferroce perf`.
struct Server {
    port: u16,
    _process: Running,
}

impl Server {
    fn start(place: &Place, ferroce: &Path) -> Result<Server> {
        let mut command = place.command(place.server.as_deref(), ferroce);
        command.args(["perf", "server", "--port", "0"]).stdout(Stdio::piped());
        let mut process = Running(command.spawn().with_context(|| format!("cannot run {}", ferroce.display()))?);
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().expect("stdout is a pipe")).read_line(&mut line)?;
        let port = line.rsplit(' ').next().and_then(|word| word.trim().parse().ok());
        Ok(Server {
            port: port.context("the server ended before it listened; its message is above")?,
            _process: process,
        })
    }
}

/// Runs a command that prints JSON.
fn json_of(command: &mut Command) -> Result<Value> {
    let printed = output_of(command)?;
    serde_json::from_str(&printed).with_context(|| format!("`{}` printed no JSON", show(command)))
}

/// Runs a command and gives what it printed.
fn output_of(command: &mut Command) -> Result<String> {
    let shown = show(command);
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot run `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` failed ({})", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn results(report: &Value) -> Result<&Vec<Value>> {
    report["results"].as_array().context("the report has no results")
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().context("the report lacks a number")
}

fn put(values: &mut Values, result: &Value, column: Column, value: f64) -> Result<()> {
    let size = result["bytes"].as_u64().and_then(|size| u32::try_from(size).ok()).context("the report lacks a size")?;
    values.entry((size, column)).or_default().push(value);
    Ok(())
}

fn heading() -> Vec<String> {
    vec![
        "| where | bytes | WRITE Gbit/s | READ Gbit/s | TCP Gbit/s | WRITE : TCP | SEND us, polling | TCP us, polling | SEND us, sleeping | TCP us, sleeping |".into(),
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|".into(),
    ]
}

fn row(place: &str, size: u32, values: &Values) -> String {
    let value = |column| median(values.get(&(size, column)).map_or(&[][..], Vec::as_slice));
    let (write, tcp) = (value(Column::WriteRate), value(Column::TcpRate));
    let cells = [
        format!("{write:.2}"),
        format!("{:.2}", value(Column::ReadRate)),
        format!("{tcp:.2}"),
        format!("{:.2}", write / tcp),
        format!("{:.1}", value(Column::SendPolling)),
        format!("{:.1}", value(Column::TcpPolling)),
        format!("{:.1}", value(Column::SendSleeping)),
        format!("{:.1}", value(Column::TcpSleeping)),
    ];
    format!("| {place} | {size} | {} |", cells.join(" | "))
}

/// The middle of the values; of an even number, the mean of the two in the middle.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match (sorted.len() / 2, sorted.len() % 2) {
        (0, 0) => f64::NAN,
        (middle, 1) => sorted[middle],
        (middle, _) => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn a_row_has_a_cell_for_each_heading() {
        let mut values = Values::new();
        values.insert((2, Column::WriteRate), vec![1.0]);
        values.insert((2, Column::TcpRate), vec![2.0]);
        let cells = |line: &str| line.matches('|').count();
        let row = row("here", 2, &values);
        assert!(heading().iter().all(|line| cells(line) == cells(&row)), "{row}");
        assert!(row.contains("| 0.50 |"), "{row}");
    }
}
