//! The programs on this host that use Ferroce: who they are, says the service; what they are at, they say themselves.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use ferroce_service::ServiceError;
use ferroce_service::client::{Client, StartOptions};
use ferroce_service::inspect::{self, Snapshot};
use ferroce_service::protocol::{ClientStatus, Status};

/// How long the service may take for an answer, to a command that changes nothing. It answers in less than a millisecond; where it does
/// not in this time, it is stopped or the machine is not to be used for anything else either.
const SERVICE_PATIENCE: Duration = Duration::from_secs(3);

/// The same for a program.
const PROGRAM_PATIENCE: Duration = Duration::from_secs(1);

/// Programs that are asked at the same time.
const ASKED_AT_ONCE: usize = 32;

/// A connection to the service; `None` if none runs.
pub(crate) fn service() -> Result<Option<Client>> {
    let options = StartOptions { program: "ferroce".into(), patience: SERVICE_PATIENCE, ..StartOptions::default() };
    match Client::connect(&options) {
        Ok(client) => Ok(Some(client)),
        Err(error) if kind(&error) == std::io::ErrorKind::ConnectionRefused => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// What the service holds, without ourselves: nobody asked about us.
pub(crate) fn status(client: &Client) -> Result<Status, ServiceError> {
    let mut status = client.status()?;
    status.clients.retain(|client| client.pid != std::process::id());
    Ok(status)
}

/// A line about variables that a service obeys as it starts, and that the one which runs was started without.
pub(crate) fn settings_too_late(status: &Status) -> Option<String> {
    let environment = std::fs::read(format!("/proc/{}/environ", status.pid)).ok()?;
    let program = std::fs::read_link(format!("/proc/{}/exe", status.pid)).ok()?;
    let late = late(&environment, &program, ferroce::environment::var_os);
    (!late.is_empty()).then(|| {
        format!(
            "{} is read when a service starts, and the one that runs (pid {}) was started otherwise: it counts for the next one, which \
             starts after the end of this one's last program",
            late.join(", "),
            status.pid
        )
    })
}

/// The variables that are set otherwise than in an environment, or name another program.
fn late(environment: &[u8], program: &Path, own: impl Fn(&str) -> Option<OsString>) -> Vec<&'static str> {
    let has = |name: &str, value: &OsStr| {
        environment.split(|byte| *byte == 0).any(|entry| {
            let rest = entry.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="));
            rest == Some(value.as_encoded_bytes())
        })
    };
    let differs = |name: &&str| own(name).is_some_and(|value| !has(name, &value));
    let mut late: Vec<&str> = ["FERROCE_CONFIG", "FERROCE_SERVICE_IDLE_S"].into_iter().filter(differs).collect();
    let names_another = |value: OsString| std::fs::canonicalize(value).is_ok_and(|named| named != program);
    late.extend(own("FERROCE_SERVICE").is_some_and(names_another).then_some("FERROCE_SERVICE"));
    late
}

fn kind(error: &ServiceError) -> std::io::ErrorKind {
    std::io::Error::from_raw_os_error(error.errno()).kind()
}

/// A program that holds a lane.
pub(crate) struct Program {
    /// What the service knows of it.
    pub(crate) client: ClientStatus,
    /// What it says, or why it says nothing.
    pub(crate) answer: Result<Snapshot, ServiceError>,
}

/// Asks all programs that hold a lane, or only those with one of these process ids. One that has ended meanwhile is left out.
pub(crate) fn ask(service: &Client, pids: &[u32]) -> Result<Vec<Program>> {
    let clients = status(service)?.clients.into_iter();
    let mut asked = Vec::new();
    for client in clients.filter(|client| pids.is_empty() || pids.contains(&client.pid)) {
        // Any of its lanes leads to it.
        let Some(lane) = client.lanes.first().copied() else { continue };
        if let Some(lease) = service.lease_of(lane)? {
            asked.push((client, lane, lease));
        }
    }
    let mut programs = Vec::new();
    for some in asked.chunks(ASKED_AT_ONCE) {
        std::thread::scope(|scope| {
            let answers: Vec<_> = some
                .iter()
                .map(|(_, lane, lease)| scope.spawn(|| inspect::ask(*lane, *lease, PROGRAM_PATIENCE)))
                .collect();
            for ((client, ..), answer) in some.iter().zip(answers) {
                let answer = answer.join().expect("asking does not panic");
                programs.push(Program { client: client.clone(), answer });
            }
        });
    }
    programs.retain(|program| !has_ended(program));
    Ok(programs)
}

/// Nobody listens any more, and the process is gone. (Without a listener and alive: of a release that does not answer.)
fn has_ended(program: &Program) -> bool {
    let refused = program.answer.as_ref().is_err_and(|error| kind(error) == std::io::ErrorKind::ConnectionRefused);
    let pid = i32::try_from(program.client.pid).ok().and_then(rustix::process::Pid::from_raw);
    refused && pid.is_some_and(|pid| rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH))
}

/// Lines about the programs that did not answer.
pub(crate) fn silent(programs: &[Program]) -> Vec<String> {
    let line = |program: &Program| {
        let error = program.answer.as_ref().err()?;
        Some(format!("pid {} ({}) {error}", program.client.pid, printable(&program.client.program)))
    };
    programs.iter().filter_map(line).collect()
}

/// Text of another process, for a terminal: without what a terminal would obey.
pub(crate) fn printable(text: &str) -> String {
    /// Longer text is no name.
    const CHARS_MAX: usize = 256;
    text.chars().take(CHARS_MAX).map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_answer_is_named() {
        let client = ClientStatus { pid: 7, program: "ib_write_bw".into(), ..ClientStatus::default() };
        let answer = Err(ServiceError::new(libc_etimedout(), "did not answer within 1s; is it stopped?"));
        assert_eq!(
            silent(&[Program { client, answer }]),
            ["pid 7 (ib_write_bw) did not answer within 1s; is it stopped?"]
        );
    }

    #[test]
    fn what_a_service_was_started_without_is_noticed() {
        let own = |name: &str| match name {
            "FERROCE_CONFIG" => Some("/f.toml".into()),
            "FERROCE_SERVICE_IDLE_S" => Some("5".into()),
            _ => None,
        };
        let started = b"PATH=/bin\0FERROCE_CONFIG=/f.toml\0FERROCE_SERVICE_IDLE_S=50\0";
        let program = std::env::current_exe().expect("/proc is mounted").canonicalize().expect("is there");
        assert_eq!(late(started, &program, own), ["FERROCE_SERVICE_IDLE_S"]);
        assert_eq!(late(b"", &program, own), ["FERROCE_CONFIG", "FERROCE_SERVICE_IDLE_S"]);
        assert_eq!(late(b"", &program, |_| None), [""; 0]);
        let service = |name: &str| (name == "FERROCE_SERVICE").then(|| program.clone().into_os_string());
        assert_eq!(late(b"", &program, service), [""; 0]);
        assert_eq!(late(b"", Path::new("/other/ferroced"), service), ["FERROCE_SERVICE"]);
    }

    fn libc_etimedout() -> i32 {
        rustix::io::Errno::TIMEDOUT.raw_os_error()
    }

    #[test]
    fn a_terminal_obeys_nobody_s_names() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a?[2Jb?");
        assert_eq!(printable(&"x".repeat(1000)).len(), 256);
    }
}
