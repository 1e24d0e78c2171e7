//! Runs what rows name, and tells what cannot be run here and why.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::resource::{UsageWho, getrusage};
use program_tests::compile;
use tempfile::TempDir;

use super::counted::{Counts, Packets};
use super::guest::Guest;
use super::parse;
use super::profile::{ENDS, End, Files, Per, Profile, Profiler, Under, counters_file};
use super::subject::{Measure, Program, Sample, Subject, Waiting, Where};
use crate::bench::{Place, iperf3_pair, lossy, one_host, veth};
use crate::pair::{self, free_port};
use crate::process::installed;

/// How long a measurement may take that should take a moment.
const PATIENCE: Duration = Duration::from_secs(180);
/// How much longer for each second that it should take.
const PATIENCE_FACTOR: f64 = 30.0;
/// Messages of a run that only tells what the start of a program takes. perftest wants at least 5.
const FEW: u64 = 10;
/// The same where a processor is simulated.
const LEAST: u64 = 5;
/// So much slower is a simulated processor.
const SIMULATED: u64 = 100;
/// Messages before the first one that counts: UCX's.
const UCX_WARM_UP: f64 = 1000.0;
/// The longest writes that iperf3 makes.
const IPERF3_MOST: u32 = 1 << 20;
/// Our own programs: `xtask/programs/NAME.c`.
const OWN: &[&str] = &["probe", "tcp_pingpong"];

/// Who measures. What is not needed is not made: places, our programs, the virtual machine.
pub(super) struct Bench {
    /// What `cargo xtask build` made.
    install: PathBuf,
    /// Folder that keeps the guest's kernel.
    cache: PathBuf,
    /// Seconds of each measurement, more or less.
    seconds: f64,
    places: BTreeMap<Where, Result<Place, String>>,
    own: Option<Result<TempDir, String>>,
    guest: Option<Result<Guest, String>>,
}

impl Bench {
    pub(super) fn new(install: &Path, seconds: f64) -> Bench {
        let (install, cache) = (install.to_owned(), install.with_file_name("interop"));
        Bench { install, cache, seconds, places: BTreeMap::new(), own: None, guest: None }
    }

    /// Why this cannot be measured here, if so.
    pub(super) fn missing(&mut self, subject: &Subject) -> Option<String> {
        if subject.place == Where::Guest {
            return self.guest().as_ref().err().cloned();
        }
        let (program, package) = match subject.program {
            Program::Perftest { name, .. } => (name, "perftest"),
            // It is a part of what was built.
            Program::Perf { .. } => ("ip", "iproute2"),
            Program::Iperf3 { .. } => ("iperf3", "iperf3"),
            Program::Ucx { .. } => ("ucx_perftest", "ucx-utils"),
            Program::Fabric { .. } => ("fi_pingpong", "libfabric-bin"),
            Program::TcpPingPong { .. } | Program::Probe { .. } => ("cc", "gcc"),
        };
        if !installed(program) {
            return Some(format!("{program} is not installed: apt-get install {package}"));
        }
        if program == "cc"
            && let Err(why) = self.own()
        {
            return Some(why.clone());
        }
        self.place(subject.place).as_ref().err().cloned()
    }

    /// Measures once; CPU time only if a CPU measure is asked for, for it takes a second run.
    pub(super) fn run(&mut self, subject: &Subject, measure: Measure) -> Result<Sample> {
        let whole_run = Amount { count: self.messages(subject), seconds: self.seconds };
        let count = whole_run.count;
        if subject.place == Where::Guest {
            let guest = self.guest().as_mut().map_err(|why| anyhow!("{why}"))?;
            return guest.run(subject, count);
        }
        let (mut sample, whole) = self.run_here(subject, whole_run, &Under::default())?;
        if measure.is_cpu() {
            // perftest spins for tenths of a second before it begins, to find out the frequency of the processor.
            let start = match subject.program {
                Program::Perftest { .. } => {
                    let few = Amount { count: FEW, ..whole_run };
                    self.run_here(subject, few, &Under::default())?.1
                }
                _ => Spent::default(),
            };
            sample.extend(whole.without(start)?.per(subject.bytes()));
        }
        Ok(sample)
    }

    /// What both ends did for their packets, counted by a profiler.
    pub(super) fn profile(&mut self, subject: &Subject, profiler: Profiler, files: &Files) -> Result<[Profile; 2]> {
        let (short, long) = self.amounts(subject, profiler);
        // It starts the service, which no program shall have to do under the profiler.
        self.run_here(subject, short, &Under::default())?;
        let (start, start_messages) = self.counted(subject, short, profiler, files)?;
        let (whole, messages) = self.counted(subject, long, profiler, files)?;
        if profiler == Profiler::Perf {
            self.run_here(subject, long, &profiler.recording(files))?;
        }
        let mut profiles = Vec::new();
        for ((end, whole), start) in ENDS.into_iter().zip(whole).zip(start) {
            let report = profiler.report(files, end)?;
            let messages = messages - start_messages;
            let (counts, packets) = (whole.0.without(start.0), whole.1.without(start.1));
            let profile = Profile { end, counts, packets, messages, report };
            // What sleeps, or has no packets: there is nothing to divide by, and nothing to take off.
            let is_whole = profile.per().0 == Per::Run;
            profiles.push(if is_whole { Profile { counts: whole.0, ..profile } } else { profile });
        }
        Ok(profiles.try_into().expect("there are two ends"))
    }

    /// A run under a profiler: what it and the ends themselves counted, and how many messages it was.
    fn counted(
        &mut self,
        subject: &Subject,
        amount: Amount,
        profiler: Profiler,
        files: &Files,
    ) -> Result<([(Counts, Packets); 2], f64)> {
        files.clear()?;
        let (_, spent) = self.run_here(subject, amount, &profiler.counting(files))?;
        let of = |end| -> Result<_> { Ok((profiler.counts(files, end)?, files.packets(end)?)) };
        let [server, client] = [of(End::Server)?, of(End::Client)?];
        let ends = [(server.0, server.1.or_by(client.1)), (client.0, client.1.or_by(server.1))];
        Ok((ends, spent.messages))
    }

    /// What is sent in the two runs whose difference is looked at.
    fn amounts(&self, subject: &Subject, profiler: Profiler) -> (Amount, Amount) {
        let usual = self.messages(subject);
        let (few, many) = match profiler {
            Profiler::Perf => (FEW, usual),
            Profiler::Callgrind => (LEAST, (usual / SIMULATED).max(4 * LEAST)),
        };
        // iperf3 takes whole seconds, at least one.
        let short = Amount { count: few, seconds: 0.1 };
        (short, Amount { count: many, seconds: self.seconds.max(1.0) + 1.0 })
    }

    /// The numbers of one run of `amount`, and what both ends spent.
    fn run_here(&mut self, subject: &Subject, amount: Amount, under: &Under) -> Result<(Sample, Spent)> {
        let before = cpu_of_children()?;
        let printed = self.printed(subject, amount, under)?;
        let nanos = (cpu_of_children()? - before).as_nanos() as f64;
        let parsed = parsed(subject, amount.count as f64, &printed);
        let (sample, messages) =
            parsed.with_context(|| format!("{:?} printed something else: {printed}", subject.program))?;
        Ok((sample, Spent { nanos, messages }))
    }

    /// What the client prints.
    fn printed(&mut self, subject: &Subject, amount: Amount, under: &Under) -> Result<String> {
        if let Program::Iperf3 { bytes } = subject.program {
            // It has a way of its own to say that it listens.
            return iperf3_pair(self.at(subject.place)?, bytes.min(IPERF3_MOST), amount.seconds, under);
        }
        let port = free_port()?;
        let (mut server, mut client) = self.commands(subject, amount, under, port)?;
        pair::output(&mut server, &mut client, port, self.limit() * (1 + under.more_patience))
    }

    /// Server and client.
    fn commands(&mut self, subject: &Subject, amount: Amount, under: &Under, port: u16) -> Result<(Command, Command)> {
        let arguments = arguments(&subject.program, amount.count, amount.seconds);
        let program = self.program(&subject.program)?;
        let ferroce = self.install.join("bin/ferroce");
        let place = self.at(subject.place)?;
        let command = |namespace, profiler: &[OsString], end, port_option: &str| {
            let mut command = match subject.program {
                Program::Perftest { .. } | Program::Probe { .. } => {
                    let mut command = place.command(namespace, &ferroce);
                    command.args(["run", "--"]).args(profiler).arg(&program);
                    command
                }
                _ => place.command_under(namespace, profiler, &program),
            };
            if let Some(dir) = &under.counters {
                command.env("FERROCE_COUNTERS", counters_file(dir, end));
            }
            command.args(&arguments.both).args([port_option, &port.to_string()]).stdin(Stdio::null());
            match subject.program {
                Program::Perftest { env, .. } => command.envs(env.iter().copied()),
                Program::Ucx { transports, .. } => command.env("UCX_TLS", transports),
                _ => &mut command,
            };
            command
        };
        let mut server = command(place.server.as_deref(), &under.server, End::Server, arguments.server_port);
        server.args(&arguments.server);
        let mut client = command(place.client.as_deref(), &under.client, End::Client, arguments.client_port);
        client.args(&arguments.client).arg(place.address);
        Ok((server, client))
    }

    /// What is executed.
    fn program(&mut self, program: &Program) -> Result<PathBuf> {
        Ok(match program {
            Program::Perftest { name, .. } => name.into(),
            Program::Perf { .. } => self.install.join("bin/ferroce"),
            Program::Iperf3 { .. } => "iperf3".into(),
            Program::Ucx { .. } => "ucx_perftest".into(),
            Program::Fabric { .. } => "fi_pingpong".into(),
            Program::TcpPingPong { .. } => self.own().as_ref().map_err(|why| anyhow!("{why}"))?.path().join(OWN[1]),
            Program::Probe { .. } => self.own().as_ref().map_err(|why| anyhow!("{why}"))?.path().join(OWN[0]),
        })
    }

    /// How many messages a program sends on each queue pair, so that it takes as long as it should.
    fn messages(&self, subject: &Subject) -> u64 {
        /// Bytes in a second that are aimed at.
        const BYTES: f64 = 3.0 * 1024.0 * 1024.0 * 1024.0;
        /// An emulated processor is slower.
        const EMULATED: f64 = 0.01;
        let (one_by_one, queue_pairs) = match subject.program {
            Program::Perftest { name, queue_pairs, .. } => (name.ends_with("_lat"), queue_pairs),
            Program::Ucx { test, .. } => (test == "tag_lat", 1),
            Program::Fabric { .. } => (true, 1),
            _ => (false, 1),
        };
        let most = match (one_by_one, subject.program) {
            (true, Program::Perftest { waiting: Waiting::Sleeping, .. }) => 30_000.0,
            (true, _) => 100_000.0,
            (false, Program::Perftest { waiting: Waiting::Sleeping, .. }) => 300_000.0,
            (false, _) => 1_000_000.0,
        };
        let speed = if subject.place == Where::Guest { EMULATED } else { 1.0 };
        let in_a_second = f64::min(most, BYTES / f64::from(subject.bytes().max(1))) * speed;
        (in_a_second * self.seconds / f64::from(queue_pairs)).max(5.0 * FEW as f64) as u64
    }

    fn limit(&self) -> Duration {
        PATIENCE + Duration::from_secs_f64(self.seconds * PATIENCE_FACTOR)
    }

    fn at(&mut self, place: Where) -> Result<&Place> {
        self.place(place).as_ref().map_err(|why| anyhow!("{why}"))
    }

    fn place(&mut self, place: Where) -> &Result<Place, String> {
        self.places.entry(place).or_insert_with(|| {
            let made = match place {
                Where::Loopback => one_host(),
                Where::Ethernet => veth(1500),
                Where::Jumbo => veth(9000),
                Where::Lossy => lossy("loss 1%"),
                Where::Guest => Err(anyhow!("the guest is no place of this machine")),
            };
            made.map_err(|error| format!("{error:#}"))
        })
    }

    fn own(&mut self) -> &Result<TempDir, String> {
        self.own.get_or_insert_with(|| {
            let dir = TempDir::new().map_err(|error| format!("cannot make a temporary folder: {error}"))?;
            let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
            compile::every(&sources, OWN, dir.path()).map_err(|failure| failure.to_string())?;
            Ok(dir)
        })
    }

    fn guest(&mut self) -> &mut Result<Guest, String> {
        let (install, cache) = (&self.install, &self.cache);
        self.guest.get_or_insert_with(|| Guest::boot(install, cache).map_err(|error| format!("{error:#}")))
    }
}

/// The numbers that a client printed, and how many messages both ends sent for them; 0 if that is not known.
fn parsed(subject: &Subject, count: f64, printed: &str) -> Result<(Sample, f64)> {
    let bytes = subject.bytes();
    match subject.program {
        Program::Perftest { name, queue_pairs, .. } => {
            let ways = if is_ping_pong(name) { 2.0 } else { 1.0 };
            parse::perftest(printed).map(|sample| (sample, ways * count * f64::from(queue_pairs)))
        }
        Program::Perf { .. } => parse::perf(printed),
        Program::Iperf3 { .. } => parse::iperf3(printed, bytes),
        Program::TcpPingPong { both_ways, .. } => {
            let ways = if both_ways { 2.0 } else { 1.0 };
            let whole = |sample: Sample| sample.into_iter().map(|(measure, us)| (measure, ways * us)).collect();
            parse::own(printed, bytes).map(|(sample, messages)| (whole(sample), messages))
        }
        Program::Probe { .. } => parse::own(printed, bytes),
        Program::Ucx { test, .. } => {
            let ways = if test == "tag_lat" { 2.0 } else { 1.0 };
            parse::ucx(printed, bytes).map(|sample| (sample, ways * (count + UCX_WARM_UP)))
        }
        Program::Fabric { .. } => parse::fabric(printed).map(|sample| (sample, 2.0 * count)),
    }
}

/// How much a run sends: each program takes the one that it knows.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Amount {
    /// Messages on each queue pair.
    count: u64,
    seconds: f64,
}

/// What both ends of a program took and did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Spent {
    /// Time of processors.
    nanos: f64,
    messages: f64,
}

impl Spent {
    /// What is left without a run of fewer messages.
    fn without(self, start: Spent) -> Result<Spent> {
        let left = Spent { nanos: self.nanos - start.nanos, messages: self.messages - start.messages };
        if left.nanos <= 0.0 || left.messages <= 0.0 {
            bail!("too few messages to tell what one takes: give more --seconds");
        }
        Ok(left)
    }

    fn per(self, bytes: u32) -> [(Measure, f64); 2] {
        let kib = self.messages * f64::from(bytes) / 1024.0;
        [(Measure::CpuPerMessage, self.nanos / self.messages), (Measure::CpuPerKib, self.nanos / kib)]
    }
}

/// What a program is called with.
struct Arguments {
    both: Vec<String>,
    server: Vec<String>,
    /// Of the client only; the address follows.
    client: Vec<String>,
    server_port: &'static str,
    client_port: &'static str,
}

fn arguments(program: &Program, count: u64, seconds: f64) -> Arguments {
    let words = |text: String| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let none = Vec::new;
    let mut arguments =
        Arguments { both: none(), server: none(), client: none(), server_port: "-p", client_port: "-p" };
    match *program {
        Program::Perftest { .. } => arguments.both = perftest(program, count),
        Program::Perf { test, bytes } => {
            arguments.both = words("perf".into());
            arguments.server = words("--once server".into());
            arguments.client = words(format!("--sizes {bytes} --duration {seconds} --events --no-tcp --json {test}"));
            (arguments.server_port, arguments.client_port) = ("--port", "--port");
        }
        Program::Iperf3 { .. } => {}
        Program::TcpPingPong { bytes, waiting, .. } => {
            let how = if waiting == Waiting::Sleeping { "-e" } else { "" };
            arguments.both = words(format!("--largest {bytes} -D {seconds} {how}"));
        }
        Program::Probe { mode, count, bytes } => {
            arguments.both = words(format!("--mode {mode} -n {count} --largest {bytes} -D {seconds}"));
        }
        Program::Ucx { test, bytes, .. } => {
            arguments.client = words(format!("-t {test} -s {bytes} -n {count} -w {UCX_WARM_UP} -f -v"));
        }
        Program::Fabric { provider, endpoint, bytes } => {
            arguments.both = words(format!("-p {provider} -e {endpoint} -I {count} -S {bytes}"));
            (arguments.server_port, arguments.client_port) = ("-B", "-P");
        }
    }
    arguments
}

/// Options of perftest, without port and address.
pub(super) fn perftest(program: &Program, count: u64) -> Vec<String> {
    let Program::Perftest { name, bytes, queue_pairs, waiting, .. } = *program else { return Vec::new() };
    let mut options = vec!["-F".to_owned(), "-n".into(), count.to_string()];
    // Atomics have one size, which cannot be given.
    if !name.contains("atomic") {
        options.extend(["-s".into(), bytes.to_string()]);
    }
    if queue_pairs > 1 {
        options.extend(["-q".into(), queue_pairs.to_string()]);
    }
    if waiting == Waiting::Sleeping {
        options.push("-e".into());
    }
    options
}

/// Messages go there and back; of READs and atomics the answer is no message.
fn is_ping_pong(name: &str) -> bool {
    name == "ib_send_lat" || name == "ib_write_lat"
}

/// What all programs took of the processors that were started here and have ended.
fn cpu_of_children() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("cannot ask for the CPU time of programs")?;
    let total = usage.user_time() + usage.system_time();
    let micros = u64::try_from(total.tv_sec() * 1_000_000 + total.tv_usec()).context("negative CPU time")?;
    Ok(Duration::from_micros(micros))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::rows::rows;

    #[test]
    fn our_own_programs_compile() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
        compile::every(&sources, OWN, dir.path()).unwrap_or_else(|failure| panic!("{failure}"));
    }

    #[test]
    fn children_s_time_is_counted_when_they_have_ended() {
        let before = cpu_of_children().expect("can be asked");
        // Whole seconds of work are not needed: the kernel counts to the microsecond.
        let status = Command::new("sh").args(["-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"]).status();
        assert!(status.expect("sh is there").success());
        assert!(cpu_of_children().expect("can be asked") > before);
    }

    #[test]
    fn options_of_perftest() {
        let options = |what: &str| {
            let row = rows().into_iter().find(|row| row.id().starts_with(what)).expect("is a row");
            perftest(&row.ours.program, 1000).join(" ")
        };
        assert_eq!(options("goals: WRITE 1 MiB, one host"), "-F -n 1000 -s 1048576");
        assert_eq!(options("sizes: FETCH_ADD 8 B, one host, sleeping"), "-F -n 1000 -e");
        assert_eq!(options("queue pairs: WRITE 8 B, one host, 100 QPs"), "-F -n 1000 -s 8 -q 100");
    }

    #[test]
    fn programs_send_as_much_as_time_allows() {
        let bench = Bench::new(Path::new("/nowhere"), 2.0);
        let count = |what: &str| {
            let row = rows().into_iter().find(|row| row.id().starts_with(what)).expect("is a row");
            bench.messages(&row.ours)
        };
        assert_eq!(count("sizes: WRITE 8 B, one host"), 2_000_000);
        assert_eq!(count("sizes: WRITE 1 MiB, one host"), 6144);
        assert_eq!(count("latency: SEND 2 B, one host"), 200_000);
        assert_eq!(count("queue pairs: WRITE 8 B, one host, 1000 QPs"), 2000);
        assert_eq!(count("queue pairs: WRITE 64 KiB, one host, 1000 QPs"), 98);
    }

    #[test]
    fn a_simulated_processor_is_given_less_to_do() {
        let bench = Bench::new(Path::new("/nowhere"), 1.0);
        for (row, many) in [
            ("sizes: WRITE 8 B, one host", 10_000),
            ("sizes: WRITE 1 MiB, one host", 30),
            ("queue pairs: WRITE 64 KiB, one host, 1000 QPs", 20),
        ] {
            let found = rows().into_iter().find(|found| found.id().starts_with(row)).expect("is a row");
            let (short, long) = bench.amounts(&found.ours, Profiler::Callgrind);
            assert_eq!((short.count, long.count, long.seconds), (LEAST, many, 2.0), "{row}");
            let (short, long) = bench.amounts(&found.ours, Profiler::Perf);
            assert_eq!((short.count, long.count), (FEW, bench.messages(&found.ours)), "{row}");
        }
    }

    #[test]
    fn what_the_start_of_a_program_takes_is_taken_off() {
        let spent = |nanos, messages| Spent { nanos, messages };
        let left = spent(1_000_500.0, 1010.0).without(spent(500.0, 10.0)).expect("there are more");
        assert_eq!(left, spent(1e6, 1e3));
        assert_eq!(left.per(2048), [(Measure::CpuPerMessage, 1000.0), (Measure::CpuPerKib, 500.0)]);
        assert!(spent(1.0, 10.0).without(spent(2.0, 5.0)).is_err());
        assert!(spent(2.0, 10.0).without(spent(1.0, 10.0)).is_err());
        assert!(spent(2.0, 0.0).without(Spent::default()).is_err(), "the program does not tell how many");
    }
}
