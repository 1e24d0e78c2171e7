//! Runs one line and judges it: what the programs print, and what both ends count.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use program_tests::failure::Failure;
use program_tests::line::{UNTIL_LISTENING, next_port};
use program_tests::parse;
use program_tests::process::Finished;

use crate::capture::{self, Tap};
use crate::counted::Counted;
use crate::ends::{Side, wait_all};
use crate::table::{Kind, Line};
use crate::trouble::Trouble;
use crate::world::World;

/// What perftest may write to stderr: remarks about the CPU's clock, and that it does not know the device.
const PERFTEST_REMARKS: &[&str] = &[
    "Conflicting CPU frequency values",
    "CPU Frequency is not max",
    "Device not recognized to implement inline feature. Disabling it",
];

/// How a line is run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Folder that gets a capture of each line.
    pub captures: Option<std::path::PathBuf>,
    /// Environment of Ferroce's programs.
    pub env: Vec<(String, String)>,
}

/// Runs a line; the world has entered its place.
pub fn run(line: &Line, world: &World, options: &Options) -> Result<Counted, Trouble> {
    let before = world.kernel_counters().map_err(Trouble::guest)?;
    let notes = world.notes().join("counters");
    let _ = fs::remove_file(&notes);
    let captures = Captures::begin(line, world, options).map_err(Trouble::program)?;
    let mut env = vec![("FERROCE_COUNTERS", notes.display().to_string())];
    env.extend(captures.iter().map(|captures| ("FERROCE_PCAP", captures.pattern())));
    env.extend(line.row.fault.map(|fault| ("FERROCE_FAULT", fault.spec.to_owned())));
    env.extend(options.env.iter().map(|(name, value)| (name.as_str(), value.clone())));
    let ran = programs(line, world, &env);
    let captures = captures.map(Captures::end).transpose().map_err(Trouble::program)?;
    let after = world.kernel_counters().map_err(Trouble::guest)?;
    let counted = Counted::new(&before, &after, &notes);
    let finished = match ran {
        Ok(finished) => finished,
        Err(failure) => {
            let failure = failure.with(counted.show());
            // Without a packet it is not the protocol that failed.
            return Err(if counted.any() { Trouble::protocol(failure) } else { Trouble::program(failure) });
        }
    };
    let protocol = |failure: Failure| Trouble::protocol(failure.with(counted.show()));
    for program in &finished {
        judge(line, program).map_err(protocol)?;
    }
    if let (Some((ferroce, tap)), Some(opcodes)) = (captures, line.row.capture) {
        capture::judge(&ferroce, &tap, opcodes).map_err(protocol)?;
    }
    counted.check(line.row).map_err(protocol)?;
    Ok(counted)
}

/// Captures under way: Ferroce's own, a file for each process, and the tap's.
struct Captures {
    tap: Tap,
    tap_file: PathBuf,
    folder: PathBuf,
    /// What the names of the files begin with.
    name: String,
    /// Files of earlier runs.
    old: Vec<PathBuf>,
}

impl Captures {
    /// Begins, if the line or the options ask for captures.
    fn begin(line: &Line, world: &World, options: &Options) -> Result<Option<Captures>, Failure> {
        let folder = match &options.captures {
            Some(folder) => folder.clone(),
            None if line.row.capture.is_some() => world.notes().to_owned(),
            None => return Ok(None),
        };
        let name = format!("{}.", line.id.replace('/', "_"));
        let tap_file = folder.join(format!("{name}tap.pcap"));
        let tap = world.capture(&tap_file)?;
        let mut captures = Captures { tap, tap_file, folder, name, old: Vec::new() };
        captures.old = captures.files();
        Ok(Some(captures))
    }

    /// FERROCE_PCAP.
    fn pattern(&self) -> String {
        self.folder.join(format!("{}%p.pcap", self.name)).display().to_string()
    }

    fn files(&self) -> Vec<PathBuf> {
        let ours = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&self.name) && name.ends_with(".pcap") && *path != self.tap_file
        };
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(ours).collect()
    }

    /// Ends the captures; gives Ferroce's and the tap's.
    fn end(self) -> Result<(Vec<PathBuf>, PathBuf), Failure> {
        let new = self.files().into_iter().filter(|file| !self.old.contains(file)).collect();
        self.tap.stop()?;
        Ok((new, self.tap_file))
    }
}

/// Runs the two programs of a line, Ferroce's with the environment `env`: server, client.
fn programs(line: &Line, world: &World, env: &[(&str, String)]) -> Result<[Finished; 2], Failure> {
    let row = line.row;
    let limit = Duration::from_secs(row.limit_s);
    let port = next_port();
    let start = |role: &str, side: Side| {
        let mut args = arguments(line, world, side, port);
        if role == "client" {
            args.push(World::address(line.server).to_owned());
        }
        match side {
            Side::Ferroce => {
                let env: Vec<_> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
                world.on_ferroce(row.program, &args, &env, &format!("{role} {} (Ferroce)", row.program))
            }
            Side::Kernel => {
                let name = format!("{role} {} (kernel)", row.program);
                world.on_kernel(row.program, &args, limit + UNTIL_LISTENING, &name)
            }
        }
    };
    let mut server = start("server", line.server)?;
    server.wait_listening(world.agent()?, port, UNTIL_LISTENING)?;
    let client = start("client", line.server.other())?;
    let finished = wait_all(vec![server, client], limit)?;
    Ok(finished.try_into().expect("two were started"))
}

fn arguments(line: &Line, world: &World, side: Side, port: u16) -> Vec<String> {
    let words = line.row.options.split_whitespace();
    let mut args: Vec<String> = words.map(|word| word.replace("{mtu}", &line.place.path_mtu.to_string())).collect();
    let gid = if line.row.kind == Kind::Perftest { "-x" } else { "-g" };
    args.extend([gid.to_owned(), world.gid(line.place, side).to_string()]);
    args.extend(["-p".to_owned(), port.to_string()]);
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
