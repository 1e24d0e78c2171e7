//! `--profile DIR`: what the processors do for each packet, at each end, and files that tell where.
//!
//! A program's start is taken off by a second, shorter run: what both have in common is no work of packets.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::counted::{self, Counts, Packets};
use crate::process::{installed, show};

/// Who counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Profiler {
    /// The machine: instructions, cycles, cache misses (perf, of the package linux-perf)
    Perf,
    /// A simulated processor: a program's own instructions, misses of simulated caches (valgrind); slow, with fewer messages
    Callgrind,
}

/// What perf counts; the order is that of [`Counts`].
const EVENTS: &str = "instructions:u,instructions:k,cycles,cache-misses";

/// The end of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Server,
    Client,
}

pub(super) const ENDS: [End; 2] = [End::Server, End::Client];

/// What a program at each end runs under: words before it.
#[derive(Debug, Default)]
pub(crate) struct Under {
    pub(crate) server: Vec<OsString>,
    pub(crate) client: Vec<OsString>,
    /// Folder in which both ends leave their counters, if they are Ferroce's.
    pub(super) counters: Option<PathBuf>,
    /// So much more patience it takes, in multiples of the usual; 0: none.
    pub(super) more_patience: u32,
}

/// What one end did.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Profile {
    pub(super) end: End,
    pub(super) counts: Counts,
    /// Sent and received; 0 where there are none, or nobody counts them.
    pub(super) packets: Packets,
    /// Of both ends together; 0: not known.
    pub(super) messages: f64,
    /// For people: what took how much.
    pub(super) report: PathBuf,
}

/// What numbers of a profile are divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Per {
    /// Sent or received.
    Packet,
    Message,
    Run,
}

impl Profiler {
    /// The one that is asked for, or the first that works.
    pub(super) fn choose(wanted: Option<Profiler>) -> Result<Profiler> {
        let perf = match wanted {
            Some(Profiler::Callgrind) => None,
            _ => Some(perf_trouble()),
        };
        let valgrind = installed("valgrind");
        match (wanted, perf) {
            (_, Some(None)) => Ok(Profiler::Perf),
            (Some(Profiler::Perf), Some(Some(why))) => bail!("--profiler perf: {why}"),
            _ if valgrind => Ok(Profiler::Callgrind),
            (_, Some(Some(why))) => bail!("--profile: {why}; and valgrind is not installed: apt-get install valgrind"),
            (_, None) => bail!("--profiler callgrind: valgrind is not installed: apt-get install valgrind"),
        }
    }

    /// Both ends count what they do, into `files`.
    pub(super) fn counting(self, files: &Files) -> Under {
        self.under(files, |end| match self {
            Profiler::Perf => words(&["perf", "stat", "-x", ",", "-e", EVENTS, "-o"], &files.counts(end), &["--"]),
            Profiler::Callgrind => {
                let option = |name: &str, path: PathBuf| {
                    let mut option = OsString::from(name);
                    option.push(path);
                    option
                };
                // It tells much that is nothing to the program's own complaints.
                let log = option("--log-file=", files.dir.join(format!("{}.log", end.name())));
                let out = option("--callgrind-out-file=", files.data(self, end));
                let simulated = ["valgrind", "--tool=callgrind", "--cache-sim=yes", "--fair-sched=yes"];
                simulated.into_iter().map(OsString::from).chain([log, out]).collect()
            }
        })
    }

    /// Both ends leave data about where they spend their time.
    pub(super) fn recording(self, files: &Files) -> Under {
        self.under(files, |end| {
            // No cache of programs in the user's home folder.
            words(&["perf", "record", "-q", "-N", "-e", "cycles", "-o"], &files.data(self, end), &["--"])
        })
    }

    fn under(self, files: &Files, words: impl Fn(End) -> Vec<OsString>) -> Under {
        // perftest fills the memory of 1,000 queue pairs byte by byte.
        let more_patience = if self == Profiler::Callgrind { 2 } else { 0 };
        let (server, client) = (words(End::Server), words(End::Client));
        Under { server, client, counters: Some(files.dir.clone()), more_patience }
    }

    /// What an end counted.
    pub(super) fn counts(self, files: &Files, end: End) -> Result<Counts> {
        let path = match self {
            Profiler::Perf => files.counts(end),
            Profiler::Callgrind => files.data(self, end),
        };
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let counts = match self {
            Profiler::Perf => counted::perf(&text),
            Profiler::Callgrind => counted::callgrind(&text),
        };
        counts.with_context(|| format!("{} is something else", path.display()))
    }

    /// Makes the text for people of the data that an end left.
    pub(super) fn report(self, files: &Files, end: End) -> Result<PathBuf> {
        let (data, report) = (files.data(self, end), files.report(self, end));
        let mut command = match self {
            Profiler::Perf => {
                let mut command = Command::new("perf");
                command.args(["report", "--stdio", "-n", "--sort", "dso,symbol", "-i"]);
                command
            }
            Profiler::Callgrind => Command::new("callgrind_annotate"),
        };
        let text = File::create(&report).with_context(|| format!("cannot write {}", report.display()))?;
        let shown = show(command.arg(&data));
        let done = command.stdin(Stdio::null()).stdout(text).stderr(Stdio::piped()).output();
        let done = done.with_context(|| format!("cannot run `{shown}`"))?;
        if !done.status.success() {
            bail!("`{shown}` failed ({}): {}", done.status, String::from_utf8_lossy(&done.stderr).trim());
        }
        Ok(report)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Profiler::Perf => "perf",
            Profiler::Callgrind => "callgrind",
        }
    }
}

/// Why perf is of no use here, if so.
fn perf_trouble() -> Option<String> {
    if !installed("perf") {
        return Some("perf is not installed: apt-get install linux-perf".into());
    }
    let tried =
        Command::new("perf").args(["stat", "-x", ",", "-e", EVENTS, "--", "true"]).stdin(Stdio::null()).output();
    let counts = match tried {
        Ok(done) => counted::perf(&String::from_utf8_lossy(&done.stderr)).unwrap_or_default(),
        Err(_) => Counts::default(),
    };
    let counts_all = counts.instructions_user.is_some() && counts.cycles.is_some();
    let why = "perf counts neither instructions nor cycles here (a virtual machine without counters, or sysctl kernel.perf_event_paranoid)";
    (!counts_all).then(|| why.into())
}

fn words(first: &[&str], path: &Path, last: &[&str]) -> Vec<OsString> {
    first.iter().map(Into::into).chain([path.into()]).chain(last.iter().map(Into::into)).collect()
}

/// Where the data of a subject are.
#[derive(Debug)]
pub(super) struct Files {
    /// For those that nobody wants to keep.
    dir: PathBuf,
    /// Of those that are kept, without what tells them apart.
    stem: PathBuf,
}

impl Files {
    /// `dir` is for what need not be kept; `kept` for the rest, by the name of what is profiled.
    pub(super) fn new(dir: &Path, kept: &Path, name: &str) -> Files {
        Files { dir: dir.to_owned(), stem: kept.join(file_name(name)) }
    }

    fn counts(&self, end: End) -> PathBuf {
        self.dir.join(format!("{}.counts", end.name()))
    }

    fn data(&self, profiler: Profiler, end: End) -> PathBuf {
        match profiler {
            Profiler::Perf => self.kept(end, "perf.data"),
            Profiler::Callgrind => self.kept(end, "callgrind.out"),
        }
    }

    fn report(&self, profiler: Profiler, end: End) -> PathBuf {
        self.kept(end, &format!("{}.txt", profiler.name()))
    }

    fn kept(&self, end: End, ending: &str) -> PathBuf {
        let mut path = self.stem.clone().into_os_string();
        path.push(format!("-{}.{ending}", end.name()));
        path.into()
    }

    /// What an end counted of packets. (No file: it is not Ferroce's.)
    pub(super) fn packets(&self, end: End) -> Result<Packets> {
        let path = counters_file(&self.dir, end);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(counted::packets(&text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Packets::default()),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// What an earlier run left would be taken for the next one's.
    pub(super) fn clear(&self) -> Result<()> {
        for end in ENDS {
            for path in [self.counts(end), counters_file(&self.dir, end)] {
                match fs::remove_file(&path) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(error).with_context(|| format!("cannot remove {}", path.display()));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// Where an end leaves its counters.
pub(super) fn counters_file(dir: &Path, end: End) -> PathBuf {
    dir.join(format!("{}.counters", end.name()))
}

/// Letters and digits of a name, joined by dashes.
pub(super) fn file_name(name: &str) -> String {
    let parts = name.split(|c: char| !c.is_ascii_alphanumeric() && c != '.' && c != '_');
    parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-").to_lowercase()
}

impl Profile {
    /// What the numbers are divided by, and by how many of these.
    pub(super) fn per(&self) -> (Per, f64) {
        match (self.packets.all(), self.messages) {
            (packets, _) if packets > 0.0 => (Per::Packet, packets),
            (_, messages) if messages > 0.0 => (Per::Message, messages),
            _ => (Per::Run, 1.0),
        }
    }
}

impl End {
    pub(super) fn name(self) -> &'static str {
        match self {
            End::Server => "server",
            End::Client => "client",
        }
    }
}

impl Per {
    pub(super) fn name(self) -> &'static str {
        match self {
            Per::Packet => "packet",
            Per::Message => "message",
            Per::Run => "run",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &[OsString]) -> String {
        words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ends_run_under_the_profiler_each_with_files_of_its_own() {
        let files = Files::new(Path::new("/tmp"), Path::new("/kept"), "WRITE 8 B, one host");
        let under = Profiler::Perf.counting(&files);
        assert_eq!(line(&under.server), format!("perf stat -x , -e {EVENTS} -o /tmp/server.counts --"));
        let under = Profiler::Perf.recording(&files);
        let wanted = "perf record -q -N -e cycles -o /kept/write-8-b-one-host-client.perf.data --";
        assert_eq!(line(&under.client), wanted);
        let under = Profiler::Callgrind.counting(&files);
        assert!(line(&under.server).ends_with(" --callgrind-out-file=/kept/write-8-b-one-host-server.callgrind.out"));
        let text = files.report(Profiler::Callgrind, End::Client);
        assert_eq!(text, Path::new("/kept/write-8-b-one-host-client.callgrind.txt"));
    }

    #[test]
    fn numbers_are_those_of_a_packet_or_else_of_a_message() {
        let (counts, end) = (Counts::default(), End::Client);
        let mut profile = Profile {
            end,
            counts,
            packets: Packets { sent: 5.0, received: 3.0 },
            messages: 4.0,
            report: PathBuf::new(),
        };
        assert_eq!(profile.per(), (Per::Packet, 8.0));
        profile.packets = Packets::default();
        assert_eq!(profile.per(), (Per::Message, 4.0));
        profile.messages = 0.0;
        assert_eq!(profile.per(), (Per::Run, 1.0));
    }

    #[test]
    fn a_file_of_an_earlier_run_is_taken_away_and_none_is_no_error() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let files = Files::new(dir.path(), dir.path(), "x");
        assert_eq!(files.packets(End::Server).expect("none"), Packets::default());
        fs::write(counters_file(dir.path(), End::Server), "1\ttx_packets\t5\n").expect("can write");
        assert_eq!(files.packets(End::Server).expect("is there"), Packets { sent: 5.0, received: 0.0 });
        files.clear().expect("removed");
        assert_eq!(files.packets(End::Server).expect("none"), Packets::default());
    }
}
