//! A server and a client, two programs that find each other at a TCP port.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::process::{self, show};

/// How long a server may take until it listens.
const PATIENCE: Duration = Duration::from_secs(10);

/// Starts the server without its output, then the client once `port` is listened on; an error unless both exit with 0.
pub(crate) fn run(server: &mut Command, client: &mut Command, port: u16) -> Result<()> {
    serve(server, port, || process::run(client))
}

/// The same, and gives what the client printed.
pub(crate) fn output(server: &mut Command, client: &mut Command, port: u16) -> Result<String> {
    let shown = show(client);
    serve(server, port, || {
        let output = client.stderr(Stdio::inherit()).output().with_context(|| format!("cannot run `{shown}`"))?;
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            bail!("`{shown}` failed ({}): {stdout}", output.status);
        }
        Ok(stdout)
    })
}

fn serve<R>(server: &mut Command, port: u16, client: impl FnOnce() -> Result<R>) -> Result<R> {
    let shown = show(server);
    let started = server.stdout(Stdio::null()).spawn();
    let mut server = Running(started.with_context(|| format!("cannot start `{shown}`"))?);
    wait_until_listening(port, &mut server.0)?;
    let result = client()?;
    let status = server.0.wait()?;
    if !status.success() {
        bail!("the server `{shown}` failed ({status})");
    }
    Ok(result)
}

/// A process that does not outlive us.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It ended already, as a rule.
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
fn wait_until_listening(port: u16, server: &mut Child) -> Result<()> {
    let begun = Instant::now();
    // The tables of its network namespace.
    let tables = ["tcp", "tcp6"].map(|table| format!("/proc/{}/net/{table}", server.id()));
    while !tables.iter().any(|path| std::fs::read_to_string(path).is_ok_and(|table| listens(&table, port))) {
        if let Some(status) = server.try_wait()? {
            bail!("the server ended before it listened ({status})");
        }
        if begun.elapsed() > PATIENCE {
            bail!("the server did not listen on port {port} within {} s", PATIENCE.as_secs());
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
    use super::*;

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
