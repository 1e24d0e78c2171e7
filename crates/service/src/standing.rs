//! What can be told of a service from outside: whose it is, and what its processes do.

use std::os::fd::AsFd;

use rustix::net::SocketFlags;

use crate::{ServiceError, seqpacket, sys};

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
/// is, and others that it started.
fn processes_of(socket: impl AsFd) -> Vec<Process> {
    const NAMED_MAX: usize = 4;
    let Ok(peer) = sys::peer(socket.as_fd()) else { return Vec::new() };
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_its = |process: &Process| {
        process.name.starts_with("ferroced") && (process.pid == peer.pid || process.parent == peer.pid)
    };
    pids.filter_map(Process::of).filter(is_its).take(NAMED_MAX).collect()
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

/// What to say where another service has the name.
pub fn name_is_taken(name: &str) -> ServiceError {
    let whose = peer_at(name).map_or_else(
        || "A Ferroce service that is just beginning or ending".into(),
        |peer| format!("The Ferroce service of {} (pid {})", user(peer.uid), peer.pid),
    );
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
fn peer_at(name: &str) -> Option<sys::Peer> {
    // Not waiting: it may be stopped, with a full backlog.
    let socket = seqpacket::socket(SocketFlags::NONBLOCK).ok()?;
    rustix::net::connect(&socket, &seqpacket::address(name).ok()?).ok()?;
    sys::peer(socket.as_fd()).ok()
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
