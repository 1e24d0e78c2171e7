//! Runs one line and judges it: what the programs print, and what both ends count.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use program_tests::failure::Failure;
use program_tests::line::{UNTIL_LISTENING, next_port};
use program_tests::parse;
use program_tests::process::Finished;

use crate::ends::{End, Side, wait_all};
use crate::table::{Kind, Line};
use crate::trouble::Trouble;
use crate::world::World;

/// What perftest may write to stderr: remarks about the CPU's clock, and that it does not know the device.
const PERFTEST_REMARKS: &[&str] = &[
    "Conflicting CPU frequency values",
    "CPU Frequency is not max",
    "Device not recognized to implement inline feature. Disabling it",
];

/// Counters of Ferroce that must stay 0 on a good network.
const FERROCE_ZERO: &[&str] = &[
    "rx_icrc_errors",
    "rx_too_short",
    "rx_bad_version",
    "rx_bad_pad",
    "rx_bad_datagram",
    "tx_unreachable",
    "tx_fault",
];

/// How a line is run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Folder that gets a capture of each line.
    pub captures: Option<std::path::PathBuf>,
    /// Environment of Ferroce's programs.
    pub env: Vec<(String, String)>,
}

/// What both ends counted during a line.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// rxe's counters, as differences.
    pub kernel: BTreeMap<String, u64>,
    /// Ferroce's.
    pub ferroce: BTreeMap<String, u64>,
}

/// Runs a line; the world has entered its place.
pub fn run(line: &Line, world: &World, options: &Options) -> Result<Counted, Trouble> {
    let before = world.kernel_counters().map_err(Trouble::guest)?;
    let notes = world.notes().join("counters");
    let _ = fs::remove_file(&notes);
    let ran = programs(line, world, options, &notes);
    let after = world.kernel_counters().map_err(Trouble::guest)?;
    let grown = |(name, value): (&String, &u64)| (name.clone(), value - before.get(name).unwrap_or(value).min(value));
    let counted = Counted { kernel: after.iter().map(grown).collect(), ferroce: ferroce_counters(&notes) };
    let finished = match ran {
        Ok(finished) => finished,
        Err(failure) => {
            let failure = failure.with(counted.show());
            // Without a packet it is not the protocol that failed.
            let packets = counted.kernel["rcvd_pkts"] + counted.kernel["sent_pkts"];
            return Err(if packets == 0 { Trouble::program(failure) } else { Trouble::protocol(failure) });
        }
    };
    for program in &finished {
        judge(line, program).map_err(|failure| Trouble::protocol(failure.with(counted.show())))?;
    }
    if line.row.fault.is_none() {
        counted.check().map_err(|failure| Trouble::protocol(failure.with(counted.show())))?;
    }
    Ok(counted)
}

fn programs(line: &Line, world: &World, options: &Options, notes: &Path) -> Result<Vec<Finished>, Failure> {
    let port = next_port();
    let start = |side: Side| {
        let role = if side == line.server { "server" } else { "client" };
        let args = arguments(line, world, side, port);
        match side {
            Side::Ferroce => {
                let notes = notes.display().to_string();
                let capture =
                    options.captures.as_ref().map(|dir| dir.join(format!("{}.%p.pcap", line.id.replace('/', "_"))));
                let capture = capture.map(|path| path.display().to_string());
                let mut env = vec![("FERROCE_COUNTERS", notes.as_str())];
                env.extend(capture.as_deref().map(|path| ("FERROCE_PCAP", path)));
                env.extend(line.row.fault.map(|fault| ("FERROCE_FAULT", fault)));
                env.extend(options.env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
                world.on_ferroce(line.row.program, &args, &env, &format!("{role} {} (Ferroce)", line.row.program))
            }
            Side::Kernel => {
                let limit = Duration::from_secs(line.row.limit_s) + UNTIL_LISTENING;
                world.on_kernel(line.row.program, &args, limit, &format!("{role} {} (kernel)", line.row.program))
            }
        }
    };
    let mut server = start(line.server)?;
    server.wait_listening(world.agent()?, port, UNTIL_LISTENING)?;
    let client: End = start(line.server.other())?;
    wait_all(vec![server, client], Duration::from_secs(line.row.limit_s))
}

fn arguments(line: &Line, world: &World, side: Side, port: u16) -> Vec<String> {
    let words = line.row.options.split_whitespace();
    let mut args: Vec<String> = words.map(|word| word.replace("{mtu}", &line.place.path_mtu.to_string())).collect();
    let gid = if line.row.kind == Kind::Perftest { "-x" } else { "-g" };
    args.extend([gid.to_owned(), world.gid(line.place, side).to_string()]);
    args.extend(["-p".to_owned(), port.to_string()]);
    if side != line.server {
        args.push(World::address(line.server).to_owned());
    }
    args
}

/// Judges what one end printed. Its exit code was 0.
fn judge(line: &Line, program: &Finished) -> Result<(), Failure> {
    let fail = |what: &str| Err(Failure::new(format!("{} {what}", program.name)).with(program.report()));
    match line.row.kind {
        Kind::Pingpong => match parse::pingpong(&program.stdout) {
            Some((bytes, iterations)) if bytes > 0 && iterations > 0 => program.check_stderr(&[]),
            _ => fail("printed no result"),
        },
        Kind::Perftest => {
            program.check_stderr(PERFTEST_REMARKS)?;
            let rows = parse::perftest(&program.stdout).map_err(|failure| failure.with(program.report()))?;
            // The server of a one-way test measures nothing and prints an empty table.
            if rows.is_empty() && program.name.starts_with("client") { fail("printed no result") } else { Ok(()) }
        }
        Kind::Own => {
            program.check_stderr(&[])?;
            let good = program.stdout.lines().any(|line| line.starts_with("ok "));
            if good { Ok(()) } else { fail("did not say ok") }
        }
    }
}

/// Sum over all processes that left counters.
fn ferroce_counters(path: &Path) -> BTreeMap<String, u64> {
    let mut counters = BTreeMap::new();
    for line in fs::read_to_string(path).unwrap_or_default().lines() {
        let mut fields = line.split('\t').skip(1);
        if let (Some(name), Some(Ok(value))) = (fields.next(), fields.next().map(str::parse::<u64>)) {
            *counters.entry(name.to_owned()).or_default() += value;
        }
    }
    counters
}

impl Counted {
    fn of(map: &BTreeMap<String, u64>, name: &str) -> u64 {
        map.get(name).copied().unwrap_or(0)
    }

    /// Packets that reached the kernel's UDP port and that rxe dropped before it counted them: a wrong ICRC, or no such
    /// queue pair any more. (rxe has no counter of ICRC errors.)
    pub fn dropped_by_kernel(&self) -> u64 {
        Counted::of(&self.kernel, "udp_datagrams").saturating_sub(Counted::of(&self.kernel, "rcvd_pkts"))
    }

    /// An error if a counter says that the ends do not understand each other.
    pub fn check(&self) -> Result<(), Failure> {
        for name in FERROCE_ZERO {
            if Counted::of(&self.ferroce, name) > 0 {
                return Err(Failure::new(format!("Ferroce counts {} {name}", self.ferroce[*name])));
            }
        }
        // Gaps that are no fault: a full socket buffer makes one, and so does rxe for what is under way when it says that no
        // receive is posted.
        let gaps = [
            ("out_of_seq_request", Counted::of(&self.kernel, "send_rnr_err")),
            ("rcvd_seq_err", Counted::of(&self.ferroce, "rx_drop_full")),
            ("send_err", 0),
        ];
        for (name, allowed) in gaps {
            let value = Counted::of(&self.kernel, name);
            if value > allowed {
                return Err(Failure::new(format!("rxe counts {value} {name}")));
            }
        }
        // Acknowledgements may come when the queue pair is gone: a few at the end.
        const LATE: u64 = 64;
        let (dropped, got) = (self.dropped_by_kernel(), Counted::of(&self.kernel, "rcvd_pkts"));
        if dropped > LATE.min(got / 4 + 2) {
            return Err(Failure::new(format!(
                "rxe dropped {dropped} packets of {}: is their ICRC wrong?",
                got + dropped
            )));
        }
        Ok(())
    }

    /// Counters that are not 0, for a report.
    pub fn show(&self) -> String {
        let side = |name: &str, map: &BTreeMap<String, u64>| {
            let parts: Vec<String> =
                map.iter().filter(|(_, value)| **value > 0).map(|(name, value)| format!("{name} {value}")).collect();
            format!("{name} counted: {}", parts.join(", "))
        };
        format!("{}\n{}", side("rxe", &self.kernel), side("Ferroce", &self.ferroce))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(kernel: &[(&str, u64)], ferroce: &[(&str, u64)]) -> Counted {
        let map = |pairs: &[(&str, u64)]| pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        Counted { kernel: map(kernel), ferroce: map(ferroce) }
    }

    #[test]
    fn gaps_fail_unless_a_reason_is_known() {
        counted(&[("rcvd_pkts", 100), ("udp_datagrams", 101)], &[]).check().expect("one came late");
        counted(&[("rcvd_seq_err", 1)], &[]).check().expect_err("a gap");
        counted(&[("rcvd_seq_err", 1)], &[("rx_drop_full", 9)]).check().expect("the buffer was full");
        counted(&[("out_of_seq_request", 1)], &[]).check().expect_err("a gap");
        counted(&[("out_of_seq_request", 1), ("send_rnr_err", 1)], &[]).check().expect("no receive was posted");
        counted(&[("rcvd_pkts", 10), ("udp_datagrams", 30)], &[]).check().expect_err("rxe dropped most");
        counted(&[], &[("rx_icrc_errors", 1)]).check().expect_err("rxe's ICRC is right");
    }
}
