//! What can be told of a service from outside: whose it is, and what its processes do.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{SocketAddrUnix, SocketFlags};

use crate::{DEFAULT_NAME, ServiceError, environment, seqpacket, sys};

/// A process, as `/proc/PID/stat` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    name: String,
    /// `R`, `S`, `D`, `T`, `t` and others of proc(5).
    pub(crate) state: char,
    parent: u32,
}

impl Process {
    /// None: it is gone, or hidden.
    pub(crate) fn of(pid: u32) -> Option<Process> {
        Process::parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(stat: &str) -> Option<Process> {
        // The name may have any characters.
        let (pid, rest) = stat.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(") ")?;
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        Some(Process { pid: pid.parse().ok()?, name: name.into(), state, parent })
    }

    fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// Whether it is one of a user's service in this network namespace that listens at a name, as far as that can be seen.
    fn serves(&self, name: &[u8], uid: u32) -> bool {
        let network = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net"));
        let pid = self.pid.to_string();
        // Anybody may call his program so.
        std::fs::metadata(format!("/proc/{pid}")).is_ok_and(|process| process.uid() == uid)
            && matches!((network("self"), network(&pid)), (Ok(own), Ok(its)) if own == its)
            && command_line(&pid).is_some_and(|line| name_in(&line) == name)
    }
}

impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let does = match self.state {
            'R' => "runs or waits for a core",
            'S' | 'I' => "sleeps",
            'D' => "waits for the system",
            'T' => "is stopped",
            't' => "is stopped by a debugger",
            'Z' | 'X' => "has ended",
            _ => "is in an unknown state",
        };
        let name: String = self.name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        write!(f, "{name} (pid {}) {does}, state {}", self.pid, self.state)
    }
}

/// The processes of the service at the other end of a connection, as far as they can be seen: who listened first, which tells whose it
/// is, others that it started, and those that came after it.
fn processes_of(socket: impl AsFd) -> Vec<Process> {
    const NAMED_MAX: usize = 4;
    let Ok(peer) = sys::peer(socket.as_fd()) else { return Vec::new() };
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let name = name_of_peer(&socket);
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_its = |process: &Process| {
        // 0 is a process of another PID namespace.
        let is_known = peer.pid != 0 && [process.pid, process.parent].contains(&peer.pid);
        process.name.starts_with("ferroced")
            && (is_known || name.as_ref().is_some_and(|name| process.serves(name, peer.uid)))
    };
    pids.filter_map(Process::of).filter(is_its).take(NAMED_MAX).collect()
}

/// The abstract name of the listener that accepted a connection.
fn name_of_peer(socket: impl AsFd) -> Option<Vec<u8>> {
    let address = SocketAddrUnix::try_from(rustix::net::getpeername(socket).ok()??).ok()?;
    // It is empty where there is none.
    address.abstract_name().filter(|name| !name.is_empty()).map(<[u8]>::to_vec)
}

/// The beginning of a process's arguments, each with a zero byte at its end.
fn command_line(pid: &str) -> Option<Vec<u8>> {
    /// What tells the name comes first.
    const BYTES_MAX: u64 = 4096;
    let mut line = Vec::new();
    std::fs::File::open(format!("/proc/{pid}/cmdline")).ok()?.take(BYTES_MAX).read_to_end(&mut line).ok()?;
    Some(line)
}

/// The name at which a service with these arguments listens.
fn name_in(command_line: &[u8]) -> &[u8] {
    let mut arguments = command_line.split(|byte| *byte == 0);
    arguments.find(|argument| *argument == b"--name").and_then(|_| arguments.next()).unwrap_or(DEFAULT_NAME.as_bytes())
}

/// A process of the service at the other end of a connection: who listened first, or, as that one may have ended, another one. None: none is
/// to be seen.
pub(crate) fn pid_of(socket: impl AsFd) -> Option<u32> {
    let peer = sys::peer(socket.as_fd()).ok()?;
    let seen = processes_of(&socket);
    let living = || seen.iter().filter(|process| !process.has_ended());
    let first = living().find(|process| process.pid == peer.pid).or_else(|| living().next()).map(|process| process.pid);
    // It may be hosted by a program that has another name.
    first.or_else(|| Process::of(peer.pid).filter(|process| !process.has_ended()).map(|process| process.pid))
}

/// For who waits for a service that does not answer: whose it is, what its processes do, and what to do.
pub(crate) fn silence_of(socket: impl AsFd) -> String {
    let processes = processes_of(&socket);
    let mut parts: Vec<String> = processes.iter().map(ToString::to_string).collect();
    if parts.is_empty() {
        parts.push("its processes cannot be seen from here".into());
    }
    let whose = sys::peer(socket.as_fd()).map_or_else(|_| "somebody".into(), |peer| user(peer.uid));
    let stopped = processes.iter().filter(|process| process.is_stopped());
    let stopped: Vec<String> = stopped.map(|process| process.pid.to_string()).collect();
    let remedy = if stopped.is_empty() {
        "a worker that hangs is replaced within a minute".into()
    } else {
        format!("`kill -CONT {}` lets it go on", stopped.join(" "))
    };
    format!("it is that of {whose}; {}; {remedy}", parts.join(", "))
}

/// After so long a program says what it waits for: it would seem to hang.
pub(crate) const WORD_AFTER: Duration = Duration::from_secs(5);

/// Says what a program waits for, one line: in the log, or, where nobody has said what is to be logged, on standard error.
pub(crate) fn say(line: &str) {
    if log::log_enabled!(log::Level::Warn) {
        log::warn!("{line}");
        return;
    }
    if environment::log_level().is_some() || !is_stderr_for_people() {
        return;
    }
    // Not through the standard library's stderr, whose lock a forked child may find taken; and only where that neither waits nor fails
    // (a pipe that nobody reads would end the program).
    let stderr = rustix::stdio::stderr();
    let mut polled = [PollFd::new(&stderr, PollFlags::OUT)];
    let is_ready = rustix::event::poll(&mut polled, Some(&Timespec::default())).is_ok();
    if is_ready && polled[0].revents() == PollFlags::OUT {
        let _ = rustix::io::write(stderr, format!("ferroce: {line}\n").as_bytes());
    }
}

/// Device and inode of standard error as it was at first. None: there was none.
static STDERR: OnceLock<Option<(u64, u64)>> = OnceLock::new();

/// Remembers what standard error is, once: to be called as early as can be, at the latest before this library opens anything.
pub fn know_stderr() {
    STDERR.get_or_init(|| identity(rustix::stdio::stderr()));
}

/// Whether descriptor 2 is what the program was started with, or a terminal: a daemon that closes its own may have a connection there, or a
/// file of data.
fn is_stderr_for_people() -> bool {
    let stderr = rustix::stdio::stderr();
    let known = STDERR.get().copied().flatten();
    rustix::termios::isatty(stderr) || known.is_some_and(|known| identity(stderr) == Some(known))
}

fn identity(descriptor: BorrowedFd<'_>) -> Option<(u64, u64)> {
    rustix::fs::fstat(descriptor).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// What to say where another service has the name.
pub fn name_is_taken(name: &str) -> ServiceError {
    let whose = holder_of(name).unwrap_or_else(|| "A Ferroce service that is just beginning or ending".into());
    ServiceError::new(
        libc::EADDRINUSE,
        format!(
            "{whose} listens at the abstract Unix socket name {name:?}: a network namespace has one service. It ends by itself when \
             the programs that use it have ended (`ferroce status` lists them); or run this one in a network namespace of its own \
             (`unshare -rn`, then `ip link set lo up`). For a service that serves all users, root's has to be the first"
        ),
    )
}

/// Who listens at a name.
fn holder_of(name: &str) -> Option<String> {
    let socket = connect(name)?;
    let user = user(sys::peer(socket.as_fd()).ok()?.uid);
    let process = pid_of(&socket).map_or_else(String::new, |pid| format!(" (pid {pid})"));
    Some(format!("The Ferroce service of {user}{process}"))
}

fn connect(name: &str) -> Option<OwnedFd> {
    // Not waiting: it may be stopped, with a full backlog.
    let socket = seqpacket::socket(SocketFlags::NONBLOCK).ok()?;
    rustix::net::connect(&socket, &seqpacket::address(name).ok()?).ok()?;
    Some(socket)
}

/// `uid 1000 (alice)`, or without the name where there is none.
fn user(uid: u32) -> String {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let name = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then_some(name)
    });
    name.map_or_else(|| format!("uid {uid}"), |name| format!("uid {uid} ({name})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_have_anything_in_them() {
        let process = Process::parse("12 (a) S (b) T 7 1 1 0 -1").unwrap();
        assert_eq!(process, Process { pid: 12, name: "a) S (b".into(), state: 'T', parent: 7 });
        assert_eq!(process.to_string(), "a) S (b (pid 12) is stopped, state T");
        assert_eq!(Process::parse("12 (a"), None);
    }

    #[test]
    fn this_process_is_seen() {
        let process = Process::of(std::process::id()).unwrap();
        assert_eq!(process.pid, std::process::id());
    }

    #[test]
    fn a_service_tells_its_name_in_its_arguments() {
        assert_eq!(name_in(b"ferroced\0--ready\0--name\0x y\0--port\0x\0"), b"x y");
        for without in [&b"ferroced\0--ready\0"[..], b"ferroced\0--name", b""] {
            assert_eq!(name_in(without), DEFAULT_NAME.as_bytes());
        }
    }

    #[test]
    fn the_name_of_a_listener_is_told_by_a_connection() {
        let name = ferroce_testkit::free_name();
        let _listener = crate::server::listen(&name).unwrap();
        assert_eq!(name_of_peer(connect(&name).unwrap()).unwrap(), name.as_bytes());
        assert_eq!(name_of_peer(seqpacket::pair().unwrap().0), None);
    }

    #[test]
    fn root_has_a_name_everywhere() {
        assert_eq!(user(0), "uid 0 (root)");
        assert_eq!(user(u32::MAX - 1), format!("uid {}", u32::MAX - 1));
    }

    #[test]
    fn who_has_the_name_is_told() {
        let name = ferroce_testkit::free_name();
        let _listener = crate::server::listen(&name).unwrap();
        let told = name_is_taken(&name).to_string();
        let own = rustix::process::geteuid().as_raw();
        assert!(told.contains(&user(own)) && told.contains(&format!("(pid {})", std::process::id())), "{told}");
    }
}
