//! Runs one line and judges it: what the programs print, and what both ends count.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use program_tests::connection;
use program_tests::failure::Failure;
use program_tests::line::{UNTIL_LISTENING, next_port};
use program_tests::parse;
use program_tests::process::Finished;

use crate::capture::{self, Tap};
use crate::counted::Counted;
use crate::ends::{End, Side, wait_all};
use crate::table::{Kind, Line, Row};
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

/// What the two programs of a row see where both ends are the kernel's, by place and row: lines of the server, of the client.
pub type References = BTreeMap<(&'static str, String), [Vec<String>; 2]>;

/// Runs a line; the world has entered its place.
pub fn run(line: &Line, world: &World, options: &Options, references: &mut References) -> Result<Counted, Trouble> {
    let reference = match line.row.kind {
        Kind::Compared | Kind::Death => Some(reference(line, world, references)?),
        Kind::Pingpong | Kind::Perftest | Kind::Connection | Kind::Own => None,
    };
    let before = world.kernel_counters().map_err(Trouble::guest)?;
    let notes = world.notes().join("counters");
    let _ = fs::remove_file(&notes);
    let captures = Captures::begin(line, world, options).map_err(Trouble::program)?;
    let mut env = vec![("FERROCE_COUNTERS", notes.display().to_string())];
    env.extend(captures.iter().map(|captures| ("FERROCE_PCAP", captures.pattern())));
    env.extend(line.row.fault.map(|fault| ("FERROCE_FAULT", fault.spec.to_owned())));
    env.extend(options.env.iter().map(|(name, value)| (name.as_str(), value.clone())));
    let ran = programs(line, line.server.other(), world, &env);
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
    if let Some(reference) = reference {
        compare(&finished, reference).map_err(protocol)?;
    }
    if let (Some((ferroce, tap)), Some(opcodes)) = (captures, line.row.capture) {
        capture::judge(&ferroce, &tap, opcodes).map_err(protocol)?;
    }
    let died = (line.row.kind == Kind::Death).then_some(line.server);
    counted.check(line.row, died).map_err(protocol)?;
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

/// What both ends of a line see if both are the kernel's. It is asked once.
fn reference<'a>(line: &Line, world: &World, references: &'a mut References) -> Result<&'a [Vec<String>; 2], Trouble> {
    let key = (line.place.name, line.row.name());
    if !references.contains_key(&key) {
        let kernels = Line { server: Side::Kernel, ..line.clone() };
        let seen = programs(&kernels, Side::Kernel, world, &[]).map(|finished| finished.each_ref().map(saw));
        let seen = seen.map_err(|failure| {
            Trouble::guest(Failure::new("two programs on the kernel's rxe do not work").with(failure.to_string()))
        })?;
        references.insert(key.clone(), seen);
    }
    Ok(&references[&key])
}

/// What a program says that it saw.
fn saw(program: &Finished) -> Vec<String> {
    program.stdout.lines().filter_map(|line| line.strip_prefix("saw ")).map(str::to_owned).collect()
}

/// An error unless both ends saw what two kernels see.
fn compare(finished: &[Finished; 2], reference: &[Vec<String>; 2]) -> Result<(), Failure> {
    if reference.iter().all(Vec::is_empty) {
        return Err(Failure::new("two kernels saw nothing"));
    }
    for (program, reference) in finished.iter().zip(reference) {
        let seen = saw(program);
        let longer = seen.len().max(reference.len());
        if let Some(at) = (0..longer).find(|&at| seen.get(at) != reference.get(at)) {
            let told = |lines: &[String]| lines.get(at).cloned().unwrap_or_else(|| "nothing".to_owned());
            let what =
                format!("{} saw {:?} where with two kernels it is {:?}", program.name, told(&seen), told(reference));
            return Err(Failure::new(what).with(program.report()));
        }
    }
    Ok(())
}

/// Runs the two programs of a line, the client on the side `client`, Ferroce's with the environment `env`: server, client.
fn programs(line: &Line, client: Side, world: &World, env: &[(&str, String)]) -> Result<[Finished; 2], Failure> {
    let row = line.row;
    let limit = Duration::from_secs(row.limit_s);
    let port = next_port();
    // On which a client says that the transfer is under way.
    let under_way = next_port();
    let start = |role: &str, side: Side| {
        let is_client = role == "client";
        let program =
            if row.kind == Kind::Connection && !is_client { connection::server(row.program) } else { row.program };
        let mut args = arguments(line, world, side, port, is_client);
        if row.kind == Kind::Death {
            args.extend(["-n".to_owned(), under_way.to_string()]);
        }
        match side {
            Side::Ferroce => {
                let env: Vec<_> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
                world.on_ferroce(program, &args, &env, &format!("{role} {program} (Ferroce)"))
            }
            Side::Kernel => {
                let name = format!("{role} {program} (kernel)");
                world.on_kernel(program, &args, limit + UNTIL_LISTENING, &name)
            }
        }
    };
    let mut server = start("server", line.server)?;
    wait_ready(&mut server, row, port, world)?;
    let mut client = start("client", client)?;
    let finished = if row.kind == Kind::Death {
        client.wait_listening(world.agent()?, under_way, limit)?;
        let server = server.kill()?;
        let mut client = wait_all(vec![client], limit)?;
        vec![server, client.remove(0)]
    } else {
        wait_all(vec![server, client], limit)?
    };
    Ok(finished.try_into().expect("two were started"))
}

/// Waits until a client may come.
fn wait_ready(server: &mut End, row: &Row, port: u16, world: &World) -> Result<(), Failure> {
    match row.kind {
        Kind::Connection if row.program == "mckey" => {
            server.wait_member(world.agent()?, || world.status(), UNTIL_LISTENING)
        }
        Kind::Connection | Kind::Perftest if row.rdmacm => {
            server.wait_connectable(world.agent()?, || world.status(), UNTIL_LISTENING)
        }
        _ => server.wait_listening(world.agent()?, port, UNTIL_LISTENING),
    }
}

fn arguments(line: &Line, world: &World, side: Side, port: u16, is_client: bool) -> Vec<String> {
    if line.row.kind == Kind::Connection {
        let address = World::address_in(line.place, side);
        let to = is_client.then(|| World::address_in(line.place, line.server));
        return connection::arguments(line.row.program, line.row.options, port, address, to);
    }
    let words = line.row.options.split_whitespace();
    let mut args: Vec<String> = words.map(|word| word.replace("{mtu}", &line.place.path_mtu.to_string())).collect();
    if !line.row.rdmacm {
        let gid = if line.row.kind == Kind::Perftest { "-x" } else { "-g" };
        args.extend([gid.to_owned(), world.gid(line.place, side).to_string()]);
    }
    args.extend(["-p".to_owned(), port.to_string()]);
    let to = if line.row.rdmacm { World::address_in(line.place, line.server) } else { World::address(line.server) };
    args.extend(is_client.then(|| to.to_owned()));
    args
}

/// Judges what one end printed. Its exit code was 0, unless it was killed.
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
        Kind::Connection => connection::judge(line.row.program, line.row.options, program),
        Kind::Death if program.name.starts_with("server") => program.check_stderr(&[]),
        Kind::Own | Kind::Compared | Kind::Death => {
            program.check_stderr(&[])?;
            let good = program.stdout.lines().any(|line| line.starts_with("ok "));
            if good { Ok(()) } else { fail("did not say ok") }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn finished(stdout: &str) -> Finished {
        Finished {
            name: "client".to_owned(),
            status: ExitStatus::from_raw(0),
            stdout: stdout.to_owned(),
            stderr: String::new(),
            took: Duration::ZERO,
        }
    }

    #[test]
    fn what_was_seen_is_compared() {
        let two = |server: &str, client: &str| [finished(server), finished(client)];
        let reference = two("saw a\nb\nsaw c\n", "saw d\nok\n").each_ref().map(saw);
        compare(&two("saw a\nsaw c\nmore", "saw d"), &reference).expect("only what was seen counts");
        let failure = compare(&two("saw a\nsaw x", "saw d"), &reference).expect_err("x is not c");
        assert_eq!(failure.what(), "client saw \"x\" where with two kernels it is \"c\"");
        compare(&two("saw a", "saw d"), &reference).expect_err("c was not seen");
        compare(&two("saw a\nsaw c", "saw d\nsaw e"), &reference).expect_err("e was seen besides");
        compare(&two("", ""), &two("", "").each_ref().map(saw)).expect_err("nothing was compared");
    }
}
