//! A program under test: started in a process group of its own, watched, and ended whatever happens.

use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::failure::Failure;
use crate::interrupt;

/// How often a waiting loop looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(3);
/// How long the other programs of a line may go on after one of them failed.
const GRACE: Duration = Duration::from_secs(5);
/// How much of a program's output a report shows, in bytes.
const TAIL: usize = 2_000;

/// A program under test. Dropping it ends it.
pub struct Running {
    name: String,
    child: Child,
    status: Option<ExitStatus>,
    stdout: PathBuf,
    stderr: PathBuf,
    started: Instant,
    ended: Option<Instant>,
}

/// A program that has ended, with all that it printed.
#[derive(Clone, Debug)]
pub struct Finished {
    /// What reports call it.
    pub name: String,
    /// How it ended.
    pub status: ExitStatus,
    /// All of its standard output.
    pub stdout: String,
    /// All of its standard error.
    pub stderr: String,
    /// From its start to its end.
    pub took: Duration,
}

impl Running {
    /// Starts `command`; its output goes to files in `dir`.
    pub fn start(name: &str, mut command: Command, dir: &Path) -> Result<Running, Failure> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let file = |end: &str| dir.join(format!("{number}.{end}"));
        let (stdout, stderr) = (file("out"), file("err"));
        let create = |path: &Path| {
            File::create(path).map_err(|e| Failure::new(format!("cannot create {}: {e}", path.display())))
        };
        command.stdin(Stdio::null()).stdout(create(&stdout)?).stderr(create(&stderr)?).process_group(0);
        let child = command
            .spawn()
            .map_err(|e| Failure::new(format!("cannot start {}: {e}", command.get_program().to_string_lossy())))?;
        Ok(Running { name: name.to_owned(), child, status: None, stdout, stderr, started: Instant::now(), ended: None })
    }

    /// What reports call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process that was started, which may be a wrapper of the program.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The program itself: behind `ferroce run`, its child.
    pub fn program_pid(&self) -> Pid {
        let pid = self.pid();
        let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if comm.trim() != "ferroce" {
            return pid;
        }
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let child = children.split_whitespace().next().and_then(|word| word.parse().ok()).and_then(Pid::from_raw);
        child.unwrap_or(pid)
    }

    /// How it ended; `None` while it runs.
    pub fn poll(&mut self) -> Result<Option<ExitStatus>, Failure> {
        if self.status.is_none() {
            self.status =
                self.child.try_wait().map_err(|e| Failure::new(format!("cannot wait for {}: {e}", self.name)))?;
            if self.status.is_some() {
                self.ended = Some(Instant::now());
            }
        }
        Ok(self.status)
    }

    /// Waits until the program listens on TCP `port` in its own network namespace.
    pub fn wait_listening(&mut self, port: u16, limit: Duration) -> Result<(), Failure> {
        let listens = move |this: &Running| {
            ["tcp", "tcp6"].iter().any(|table| {
                let path = format!("/proc/{}/net/{table}", this.pid());
                fs::read_to_string(path).is_ok_and(|table| has_listener(&table, port))
            })
        };
        self.wait_for(&format!("listen on TCP port {port}"), limit, listens)
    }

    /// Waits until the program listens for connections by RDMA-CM, which `status` tells: it makes a `ferroce status --json` in the
    /// program's place.
    pub fn wait_connectable(&mut self, status: impl Fn() -> Command, limit: Duration) -> Result<(), Failure> {
        self.wait_for("listen for connections", limit, |this| this.status_number(&status, "listeners") > 0)
    }

    /// Waits until the program has a UDP port.
    pub fn wait_bound(&mut self, port: u16, limit: Duration) -> Result<(), Failure> {
        let is_bound = move |this: &Running| {
            ["udp", "udp6"].iter().any(|table| {
                let path = format!("/proc/{}/net/{table}", this.pid());
                let suffix = format!(":{port:04X}");
                fs::read_to_string(path).is_ok_and(|table| {
                    let mut locals = table.lines().filter_map(|line| line.split_whitespace().nth(1));
                    locals.any(|local| local.ends_with(&suffix))
                })
            })
        };
        self.wait_for(&format!("bind UDP port {port}"), limit, is_bound)
    }

    /// Waits until the program is in a multicast group, which `status` tells as for [`Running::wait_connectable`].
    pub fn wait_member(&mut self, status: impl Fn() -> Command, limit: Duration) -> Result<(), Failure> {
        self.wait_for("join a multicast group", limit, |this| this.status_number(&status, "groups") > 0)
    }

    /// A number that the service's status has of the program; 0: none.
    fn status_number(&self, status: impl Fn() -> Command, name: &str) -> i64 {
        let pid = self.program_pid().as_raw_nonzero().get();
        let output = status().stdin(Stdio::null()).output().ok();
        let status = output.and_then(|output| serde_json::from_slice::<serde_json::Value>(&output.stdout).ok());
        let clients = status.as_ref().and_then(|status| status.get("clients")?.as_array());
        let number = |client: &serde_json::Value, name| client.get(name).and_then(serde_json::Value::as_i64);
        let own = clients.into_iter().flatten().find(|client| number(client, "pid") == Some(pid.into()));
        own.and_then(|client| number(client, name)).unwrap_or(0)
    }

    /// Waits until the program has printed `text` on its standard output.
    pub fn wait_printed(&mut self, text: &str, limit: Duration) -> Result<(), Failure> {
        let wanted = text.to_owned();
        let printed = move |this: &Running| read(&this.stdout).contains(&wanted);
        self.wait_for(&format!("print {text:?}"), limit, printed)
    }

    fn wait_for(&mut self, what: &str, limit: Duration, done: impl Fn(&Running) -> bool) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        loop {
            if done(self) {
                return Ok(());
            }
            if let Some(status) = self.poll()? {
                // It may have printed and ended between the two looks.
                if done(self) {
                    return Ok(());
                }
                let failure = Failure::new(format!("{} {} and did not {what}", self.name, ended_how(status)));
                return Err(failure.with(self.report()));
            }
            if Instant::now() > deadline {
                let failure = Failure::new(format!("{} did not {what} within {limit:?}", self.name));
                return Err(failure.with(self.hang()).with(self.report()));
            }
            interrupt::check()?;
            sleep(LOOK_AGAIN);
        }
    }

    /// Ends the program with SIGKILL, as `kill -9` does, without a wrapper's help.
    pub fn kill_program(&self) {
        // An error means that it has ended already.
        let _ = kill_process(self.program_pid(), Signal::KILL);
    }

    /// Sends `signal` to the program.
    pub fn signal(&self, signal: Signal) {
        // An error means that it has ended already.
        let _ = kill_process(self.program_pid(), signal);
    }

    /// Waits for the end.
    pub fn wait(mut self, limit: Duration) -> Result<Finished, Failure> {
        self.wait_for("end", limit, |this| this.status.is_some())?;
        Ok(self.finish())
    }

    /// The output of a program that has ended.
    fn finish(mut self) -> Finished {
        let status = self.status.expect("only a program that has ended is finished");
        let took = self.ended.unwrap_or_else(Instant::now) - self.started;
        Finished {
            name: std::mem::take(&mut self.name),
            status,
            stdout: read(&self.stdout),
            stderr: read(&self.stderr),
            took,
        }
    }

    /// Where each thread of the program stands.
    fn hang(&self) -> String {
        let mut text = format!("{} still runs; its threads:\n", self.name);
        for pid in processes_of_group(self.pid()) {
            let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
            for task in tasks.flatten() {
                let field = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
                let stat = field("stat");
                let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).unwrap_or("?");
                text += &format!(
                    "  {pid}/{} {} state {state} wchan {} syscall {}\n",
                    task.file_name().to_string_lossy(),
                    field("comm").trim(),
                    field("wchan").trim(),
                    field("syscall").split_whitespace().next().unwrap_or("?"),
                );
            }
            text += &backtrace(pid);
        }
        text
    }

    /// The last lines of its output.
    fn report(&self) -> String {
        output(&self.name, &read(&self.stdout), &read(&self.stderr))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.status.is_none() {
            // The whole group: a wrapper and its child. An error means that all have ended.
            let _ = kill_process_group(self.pid(), Signal::KILL);
            let _ = self.child.wait();
        }
        for file in [&self.stdout, &self.stderr] {
            let _ = fs::remove_file(file);
        }
    }
}

impl Finished {
    /// The last lines of its output.
    pub fn report(&self) -> String {
        output(&self.name, &self.stdout, &self.stderr)
    }

    /// An error unless it exited with 0.
    pub fn check_success(&self) -> Result<(), Failure> {
        if self.status.success() {
            return Ok(());
        }
        Err(Failure::new(format!("{} {}", self.name, ended_how(self.status))).with(self.report()))
    }

    /// An error if it wrote to standard error anything but lines that hold one of `allowed`.
    pub fn check_stderr(&self, allowed: &[&str]) -> Result<(), Failure> {
        let odd = self
            .stderr
            .lines()
            .find(|line| !line.trim().is_empty() && !allowed.iter().any(|allowed| line.contains(allowed)));
        match odd {
            None => Ok(()),
            Some(line) => Err(Failure::new(format!("{} wrote to stderr: {line}", self.name)).with(self.report())),
        }
    }
}

/// Waits until all programs have ended. When one fails, the others get a short while; what still runs then is reported.
pub fn wait_all(mut programs: Vec<Running>, limit: Duration) -> Result<Vec<Finished>, Failure> {
    let begun = Instant::now();
    let mut deadline = begun + limit;
    let mut first_failed: Option<String> = None;
    loop {
        let mut running = 0;
        for program in &mut programs {
            match program.poll()? {
                None => running += 1,
                Some(status) if !status.success() && first_failed.is_none() => {
                    first_failed = Some(format!("{} {}", program.name, ended_how(status)));
                    deadline = deadline.min(Instant::now() + GRACE);
                }
                Some(_) => {}
            }
        }
        if running == 0 {
            break;
        }
        if Instant::now() > deadline {
            let hung: Vec<&str> = programs.iter().filter(|p| p.status.is_none()).map(|p| p.name.as_str()).collect();
            let hung = hung.join(", ");
            let mut failure = Failure::new(match &first_failed {
                Some(what) => format!("{what}; {hung} went on"),
                None => format!("{hung} hung: did not end within {limit:?}"),
            });
            for program in &programs {
                if program.status.is_none() && first_failed.is_none() {
                    failure = failure.with(program.hang());
                }
                failure = failure.with(program.report());
            }
            return Err(failure);
        }
        interrupt::check()?;
        sleep(LOOK_AGAIN);
    }
    let finished: Vec<Finished> = programs.into_iter().map(Running::finish).collect();
    if let Some(what) = first_failed {
        return Err(finished.iter().fold(Failure::new(what), |failure, program| failure.with(program.report())));
    }
    Ok(finished)
}

/// How a program ended, for a report.
pub fn ended_how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        // `ferroce run` passes a signal on as an exit code, as shells do.
        (Some(code), _) if code > 128 => format!("exited with {code} (signal {})", code - 128),
        (Some(code), _) => format!("exited with {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended in an unknown way".to_owned(),
    }
}

/// True if the table (`/proc/net/tcp` or `tcp6`) has a socket that listens on `port`.
fn has_listener(table: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let suffix = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, state) = (fields.next(), fields.nth(1));
        local.is_some_and(|local| local.ends_with(&suffix)) && state == Some(LISTEN)
    })
}

/// The processes of a group, by /proc.
fn processes_of_group(group: Pid) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // After the name in parentheses: state, parent, group.
        let rest = stat.rsplit(')').next().unwrap_or_default();
        rest.split_whitespace().nth(2).and_then(|word| word.parse().ok()) == Some(group.as_raw_nonzero().get())
    })
    .collect()
}

/// The stacks of a process by gdb, where it is installed and does not take long.
fn backtrace(pid: i32) -> String {
    let output = Command::new("timeout")
        .args(["--signal=KILL", "20", "gdb", "-batch", "-nx", "-p", &pid.to_string(), "-ex", "thread apply all bt 12"])
        .stdin(Stdio::null())
        .output();
    let Ok(output) = output else { return String::new() };
    let text = String::from_utf8_lossy(&output.stdout);
    let stacks = text.lines().filter(|line| line.starts_with('#') || line.starts_with("Thread "));
    stacks.map(|line| format!("    {line}\n")).collect()
}

/// What the program printed, the end of it.
fn output(name: &str, stdout: &str, stderr: &str) -> String {
    let mut text = String::new();
    for (stream, content) in [("stdout", stdout), ("stderr", stderr)] {
        if content.trim().is_empty() {
            continue;
        }
        text += &format!("{name} {stream}:\n");
        for line in tail(content, TAIL).lines() {
            text += &format!("    {line}\n");
        }
    }
    text
}

/// The last lines of `text` that fit in `bytes`.
fn tail(text: &str, bytes: usize) -> &str {
    if text.len() <= bytes {
        return text;
    }
    let mut start = text.len() - bytes;
    while !text.is_char_boundary(start) {
        start += 1;
    }
    let end = &text[start..];
    end.split_once('\n').map_or(end, |(_, rest)| rest)
}

fn read(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str, script: &str, dir: &Path) -> Running {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Running::start(name, command, dir).expect("sh is there")
    }

    fn dir() -> tempfile::TempDir {
        tempfile::tempdir().expect("a temporary folder")
    }

    #[test]
    fn output_and_status_of_programs_that_end() {
        let dir = dir();
        let programs = vec![shell("server", "echo a", dir.path()), shell("client", "echo b >&2", dir.path())];
        let finished = wait_all(programs, Duration::from_secs(60)).expect("both exit with 0");
        assert_eq!((finished[0].stdout.as_str(), finished[1].stderr.as_str()), ("a\n", "b\n"));
        finished[0].check_stderr(&[]).expect("nothing on stderr");
        let failure = finished[1].check_stderr(&["c"]).expect_err("b is not allowed");
        assert!(failure.to_string().contains("client wrote to stderr: b"), "{failure}");
        finished[1].check_stderr(&["b"]).expect("b is allowed");
    }

    #[test]
    fn a_hung_program_is_named_with_its_output_and_ended() {
        let dir = dir();
        let limit = Duration::from_secs(60);
        let mut hung = shell("server", "echo waiting; sleep 1000", dir.path());
        let pid = hung.pid();
        let mut done = shell("client", "true", dir.path());
        hung.wait_printed("waiting", limit).expect("it prints first");
        done.wait_for("end", limit, |this| this.status.is_some()).expect("it ends at once");
        let failure = wait_all(vec![hung, done], Duration::ZERO).expect_err("the server hangs");
        let text = failure.to_string();
        assert!(text.contains("server hung") && text.contains("waiting") && text.contains("state"), "{text}");
        assert!(!text.contains("client hung"), "{text}");
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "the group was ended and reaped");
    }

    #[test]
    fn a_failed_program_does_not_wait_for_the_limit() {
        let dir = dir();
        let programs = vec![shell("server", "sleep 1000", dir.path()), shell("client", "exit 3", dir.path())];
        let failure = wait_all(programs, Duration::from_secs(1000)).expect_err("the client fails");
        assert!(failure.to_string().contains("client exited with 3; server went on"), "{failure}");
    }

    #[test]
    fn a_listener_is_seen_and_an_early_end_told() {
        let dir = dir();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("can listen");
        let port = listener.local_addr().expect("is bound").port();
        let mut idle = shell("server", "sleep 1000", dir.path());
        idle.wait_listening(port, Duration::from_secs(60)).expect("someone in this namespace listens");
        let mut dead = shell("server", "echo no device; exit 1", dir.path());
        // Nobody can listen there. (The other port may be somebody's again.)
        let failure = dead.wait_listening(0, Duration::from_secs(60)).expect_err("it ends");
        assert!(failure.to_string().contains("exited with 1 and did not listen"), "{failure}");
        assert!(failure.to_string().contains("no device"), "{failure}");
    }

    #[test]
    fn listeners_in_the_kernel_s_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n   \
                     0: 0100007F:4853 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0\n   \
                     1: 0100007F:4854 0100007F:1234 01 00000000:00000000 00:00000000 00000000     0\n";
        assert!(has_listener(table, 0x4853));
        assert!(!has_listener(table, 0x4854), "connected, not listening");
        assert!(!has_listener(table, 0x853));
    }

    #[test]
    fn tails_start_at_a_line() {
        assert_eq!(tail("one\ntwo\nthree\n", 10), "three\n");
        assert_eq!(tail("one\n", 10), "one\n");
    }
}
