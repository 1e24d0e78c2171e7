//! A server and a client, two programs that find each other at a TCP port.

use std::io::{Read, Seek};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::process::{self, show};

/// How long a server may take until it listens.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a program that is to end may take for that by itself.
const GRACE: Duration = Duration::from_secs(1);

/// Starts the server without its output, then the client once `port` is listened on; an error unless both exit with 0.
pub(crate) fn run(server: &mut Command, client: &mut Command, port: u16) -> Result<()> {
    serve(server, port, PATIENCE, || process::run(client))
}

/// The same, and gives what the client printed; an error, too, if that takes longer than `limit`. What both complain about is told
/// in the error only.
pub(crate) fn output(server: &mut Command, client: &mut Command, port: u16, limit: Duration) -> Result<String> {
    let mut complaints = tempfile::tempfile().context("cannot make a temporary file")?;
    server.stderr(complaints.try_clone()?);
    client.stderr(complaints.try_clone()?);
    let result = output_loud(server, client, port, limit);
    result.map_err(|error| {
        let mut said = String::new();
        // Without it the error still says what failed.
        let _ = complaints.rewind().and_then(|()| complaints.read_to_string(&mut said));
        if said.is_empty() { error } else { error.context(said.trim().to_owned()) }
    })
}

fn output_loud(server: &mut Command, client: &mut Command, port: u16, limit: Duration) -> Result<String> {
    let shown = show(client);
    serve(server, port, limit, || {
        let started = client.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut client = Running(started.with_context(|| format!("cannot run `{shown}`"))?);
        let stdout = client.0.stdout.take().expect("stdout is a pipe");
        let Some(stdout) = read_within(stdout, limit)? else {
            bail!("`{shown}` did not end within {} s", limit.as_secs());
        };
        let status = client.0.wait()?;
        if !status.success() {
            bail!("`{shown}` failed ({status}): {stdout}");
        }
        Ok(stdout)
    })
}

/// All that comes, if its end does within `limit`.
fn read_within(mut from: impl Read + Send + 'static, limit: Duration) -> Result<Option<String>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let result = from.read_to_end(&mut bytes).map(|_| bytes);
        // Nobody waits for it any more: then its program is ended, too.
        let _ = sender.send(result);
    });
    match receiver.recv_timeout(limit) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes?).into_owned())),
        Err(_) => Ok(None),
    }
}

/// `limit` is how long the server may take until it listens, and how long it may go on after the client.
fn serve<R>(server: &mut Command, port: u16, limit: Duration, client: impl FnOnce() -> Result<R>) -> Result<R> {
    let shown = show(server);
    let started = server.stdout(Stdio::null()).spawn();
    let mut server = Running(started.with_context(|| format!("cannot start `{shown}`"))?);
    wait_until_listening(port, &mut server.0, limit)?;
    let result = client()?;
    match wait_within(&mut server.0, limit)? {
        Some(status) if status.success() => Ok(result),
        Some(status) => bail!("the server `{shown}` failed ({status})"),
        None => bail!("the server `{shown}` did not end within {} s after its client", limit.as_secs()),
    }
}

/// How it ended, if it did within `limit`.
fn wait_within(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        let status = child.try_wait()?;
        if status.is_some() || begun.elapsed() > limit {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process that does not outlive us.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It ended already, as a rule. If not: `ferroce run` passes SIGTERM on to its program, and cannot do so with SIGKILL.
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM);
        }
        let _ = wait_within(&mut self.0, GRACE);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A TCP port that nobody uses now.
pub(crate) fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("loopback is down: `ip link set lo up`")?;
    Ok(listener.local_addr()?.port())
}

/// Waits until somebody listens on `port`. A connection to find out would be taken for the client.
fn wait_until_listening(port: u16, server: &mut Child, limit: Duration) -> Result<()> {
    let begun = Instant::now();
    // The tables of its network namespace.
    let tables = ["tcp", "tcp6"].map(|table| format!("/proc/{}/net/{table}", server.id()));
    while !tables.iter().any(|path| std::fs::read_to_string(path).is_ok_and(|table| listens(&table, port))) {
        if let Some(status) = server.try_wait()? {
            bail!("the server ended before it listened ({status})");
        }
        if begun.elapsed() > limit {
            bail!("the server did not listen on port {port} within {} s", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Whether a table of proc(5) has a listening socket of `port`.
fn listens(table: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let local = fields.next().unwrap_or_default();
        local.ends_with(&format!(":{port:04X}")) && fields.nth(1) == Some(LISTEN)
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_a_program_prints_is_read_to_its_end_or_given_up() {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        writer.write_all(b"all of it").expect("is open");
        drop(writer);
        let read = read_within(reader, Duration::from_secs(60)).expect("can be read");
        assert_eq!(read.as_deref(), Some("all of it"));
        let (reader, _writer) = std::io::pipe().expect("a pipe");
        assert_eq!(read_within(reader, Duration::from_millis(1)).expect("can be read"), None);
    }

    #[test]
    fn a_program_that_is_given_up_is_asked_to_end_first() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let (ready, ended) = (dir.path().join("ready"), dir.path().join("ended"));
        let script = format!(
            "trap 'touch {}; exit' TERM; touch {}; while :; do sleep 0.01; done",
            ended.display(),
            ready.display()
        );
        let child = Command::new("sh").args(["-c", &script]).spawn().expect("sh is there");
        let running = Running(child);
        while !ready.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(running);
        assert!(ended.exists());
    }

    #[test]
    fn listening_sockets_are_found_in_the_kernel_s_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue\n   \
                     0: 0100007F:4854 00000000:0000 0A 00000000:00000000\n   \
                     1: 0100007F:4855 0100007F:4854 01 00000000:00000000\n";
        assert!(listens(table, 0x4854));
        assert!(!listens(table, 0x4855), "connected, not listening");
        assert!(!listens(table, 0x4856));
    }
}
