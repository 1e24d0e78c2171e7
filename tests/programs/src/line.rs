//! Runs one line: programs started in order, watched, and what they print judged.

use std::ffi::OsString;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use crate::connection;
use crate::failure::Failure;
use crate::launch::{Identity, Launcher};
use crate::parse;
use crate::place::{Family, Host, Wire};
use crate::process::{Finished, Running, wait_all};
use crate::scenario;
use crate::table::{Kind, Line, Row, What};

/// How long a server may take until it listens.
pub const UNTIL_LISTENING: Duration = Duration::from_secs(30);

/// What perftest may write to stderr: remarks about the CPU's clock; that it does not know the part number of the device
/// (it has a list of cards to choose a default of `-I` by, and else takes 0); that datagrams are no larger than the MTU.
pub(crate) const PERFTEST_REMARKS: &[&str] = &[
    "Conflicting CPU frequency values",
    "CPU Frequency is not max",
    "Device not recognized to implement inline feature. Disabling it",
    "Max msg size in UD is MTU",
    "Changing to this MTU",
];

/// perftest holds the processor's clock against the time of day before it reports, and reports nothing if others disturbed it there.
const CLOCK_DISTURBED: &str = "Correlation coefficient r^2";
/// How often a line is run whose perftest could not tell the time.
const CLOCK_ATTEMPTS: usize = 10;

/// Runs a line in its place, which was made before.
pub fn run(line: &Line, wire: &Wire, launcher: &Launcher) -> Result<(), Failure> {
    let mut outcome = run_once(line, wire, launcher);
    for _ in 1..CLOCK_ATTEMPTS {
        match &outcome {
            Err(failure) if failure.mentions(CLOCK_DISTURBED) => outcome = run_once(line, wire, launcher),
            _ => break,
        }
    }
    outcome
}

fn run_once(line: &Line, wire: &Wire, launcher: &Launcher) -> Result<(), Failure> {
    let launcher = &launcher.on(line.system)?;
    match line.what {
        What::Program(row) if row.kind == Kind::List => list(row, wire, launcher),
        What::Program(row) => pairs(row, wire, launcher),
        What::Scenario(scenario) => (scenario.run)(&scenario::World { wire, launcher }),
    }
}

/// A TCP port for a side channel that no other line of this run uses.
pub fn next_port() -> u16 {
    static PORT: AtomicU16 = AtomicU16::new(0);
    // Below the range that the system gives to clients.
    const FIRST: u16 = 18_515;
    const COUNT: u16 = 10_000;
    FIRST + PORT.fetch_add(1, Ordering::Relaxed) % COUNT
}

fn list(row: &'static Row, wire: &Wire, launcher: &Launcher) -> Result<(), Failure> {
    let command = wire.server.command(launcher, row.program, row.options.split_whitespace());
    let running = Running::start(row.program, command, &launcher.output())?;
    let finished = wait_all(vec![running], Duration::from_secs(row.limit_s))?.remove(0);
    finished.check_stderr(&[])?;
    let wanted: &[&str] = match (row.program, row.options) {
        ("ibv_devinfo", "-v") => &["ferroce0", "PORT_ACTIVE", "GID[  0]", "max_qp"],
        _ => &["ferroce0"],
    };
    match wanted.iter().find(|text| !finished.stdout.contains(**text)) {
        None => Ok(()),
        Some(text) => Err(Failure::new(format!("{} did not print {text:?}", row.program)).with(finished.report())),
    }
}

fn pairs(row: &'static Row, wire: &Wire, launcher: &Launcher) -> Result<(), Failure> {
    let mut running = Vec::new();
    for i in 0..row.pairs {
        let suffix = if row.pairs > 1 { format!(" {}", i + 1) } else { String::new() };
        let port = next_port();
        let mut server = start(row, &wire.server, launcher, &format!("server{suffix}"), port, None)?;
        let to = side_channel(row.kind, &wire.server)?;
        if row.kind == Kind::Connection || row.has("-R") {
            let ferroce = launcher.ferroce();
            let host = &wire.server;
            let args = ["status".into(), "--json".into()];
            let status = || launcher.plain(host.netns(), Identity::Ordinary, host.env, ferroce.as_os_str(), &args);
            server.wait_connectable(status, UNTIL_LISTENING)?;
        } else {
            server.wait_listening(port, UNTIL_LISTENING)?;
        }
        let client = start(row, &wire.client, launcher, &format!("client{suffix}"), port, Some(to))?;
        running.extend([server, client]);
    }
    let finished = wait_all(running, Duration::from_secs(row.limit_s))?;
    for program in &finished {
        judge(row, wire.place.path_mtu(), program)?;
    }
    Ok(())
}

/// The address that a client connects to.
fn side_channel(kind: Kind, server: &Host) -> Result<&'static str, Failure> {
    if matches!(kind, Kind::Own | Kind::Connection) {
        return Ok(server.address);
    }
    server.address_v4.ok_or_else(|| Failure::new("stock programs need an IPv4 address for their side channel"))
}

/// Starts one end of a pair; `to` makes it the client.
fn start(
    row: &'static Row,
    host: &Host,
    launcher: &Launcher,
    role: &str,
    port: u16,
    to: Option<&str>,
) -> Result<Running, Failure> {
    let args = match row.kind {
        Kind::Connection => connection::arguments(row.program, row.options, port, host.address, to),
        _ => arguments(row, host, launcher, port, to)?,
    };
    let program: OsString = match row.kind {
        Kind::Connection if to.is_none() => connection::server(row.program).into(),
        Kind::Own => launcher.programs().join(row.program).into(),
        _ => row.program.into(),
    };
    let command = host.command(launcher, program, args);
    Running::start(&format!("{role} {}", row.program), command, &launcher.output())
}

fn arguments(
    row: &'static Row,
    host: &Host,
    launcher: &Launcher,
    port: u16,
    to: Option<&str>,
) -> Result<Vec<String>, Failure> {
    let mut args = Vec::new();
    for word in row.options.split_whitespace() {
        args.push(match word {
            "{gid}" => host.gid_index(launcher)?.to_string(),
            "{mtu}" => host.path_mtu.to_string(),
            word => word.to_owned(),
        });
    }
    // perftest finds the IPv4 GID by itself; for another it is told.
    if matches!(row.kind, Kind::Bandwidth | Kind::Latency) && host.family == Family::V6 && !row.has("-R") {
        args.extend(["-x".to_owned(), host.gid_index(launcher)?.to_string()]);
    }
    args.extend(["-p".to_owned(), port.to_string()]);
    args.extend(to.map(str::to_owned));
    Ok(args)
}

/// Judges what one end printed. Its exit code was 0.
fn judge(row: &Row, path_mtu: u32, program: &Finished) -> Result<(), Failure> {
    let fail = |what: String| Err(Failure::new(format!("{} {what}", program.name)).with(program.report()));
    match row.kind {
        Kind::List => Ok(()),
        Kind::Pingpong => {
            program.check_stderr(&[])?;
            if row.program == "ibv_xsrq_pingpong" {
                // It measures nothing.
                let done = program.stdout.lines().last() == Some("success");
                return if done { Ok(()) } else { fail("did not end with `success`".to_owned()) };
            }
            match parse::pingpong(&program.stdout) {
                Some((bytes, iterations)) if bytes > 0 && iterations > 0 => Ok(()),
                _ => fail("printed no result".to_owned()),
            }
        }
        Kind::Bandwidth | Kind::Latency => {
            program.check_stderr(PERFTEST_REMARKS)?;
            let rows = parse::perftest(&program.stdout).map_err(|f| f.with(program.report()))?;
            let is_client = program.name.starts_with("client");
            // The server of a one-way test measures nothing and prints an empty table, or one row.
            if rows.is_empty() && is_client {
                return fail("printed no result".to_owned());
            }
            if row.has("-a") && is_client {
                let last = if row.has("UD") { u64::from(path_mtu) } else { 8 << 20 };
                let sizes: Vec<u64> = rows.iter().map(|row| row.bytes).collect();
                let wanted: Vec<u64> = (1..).map(|power| 1 << power).take_while(|&size| size <= last).collect();
                if sizes != wanted {
                    return fail(format!("printed results for {sizes:?} instead of {wanted:?}"));
                }
            }
            // A very small bandwidth is printed as 0.00: accept that only for messages of a few bytes.
            match rows.iter().find(|row| row.average <= 0.0 && row.bytes > 1024) {
                Some(row) => fail(format!("measured nothing at {} bytes", row.bytes)),
                None => Ok(()),
            }
        }
        Kind::Connection => connection::judge(row.program, row.options, program),
        Kind::Own => {
            program.check_stderr(&[])?;
            match program.stdout.lines().last() {
                Some(line) if line.starts_with("ok") => Ok(()),
                _ => fail("did not end with `ok`".to_owned()),
            }
        }
    }
}

impl Row {
    pub(crate) fn has(&self, word: &str) -> bool {
        self.options.split_whitespace().any(|option| option == word)
    }
}
