//! `cargo xtask demo`: the README's first command.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::dist;
use crate::process::{installed, print, run, show};

/// How long a server may take until it listens.
const PATIENCE: Duration = Duration::from_secs(10);

/// Stock programs worth showing: name, Debian package, options of both ends, option of the port.
const STOCK: &[(&str, &str, &[&str], &str)] = &[
    ("ibv_rc_pingpong", "ibverbs-utils", &["-g", "0"], "-p"),
    ("ib_write_bw", "perftest", &["-x", "0", "-s", "65536", "-n", "5000"], "-p"),
    ("ib_send_lat", "perftest", &["-x", "0", "-n", "5000"], "-p"),
];

/// Builds all and shows it at work. Fails if anything that is shown fails.
pub(crate) fn demo(root: &Path) -> Result<()> {
    let out = dist::build(root)?;
    let ferroce = out.join("bin/ferroce");

    title("The RDMA devices of this machine");
    run(Command::new(&ferroce).arg("devices"))?;

    title("Two processes: SEND, WRITE, READ, atomics; every byte checked at both ends");
    run(Command::new(&ferroce).args(["verify", "--self"]))?;

    title("How fast, and TCP between the same addresses");
    run(Command::new(&ferroce).args(["perf", "all", "--self", "--duration", "0.5"]))?;

    for (program, package, options, port) in STOCK {
        if installed(program) {
            title(&format!("Debian's own {program}, unmodified, in two processes"));
            pair(&ferroce, program, options, port)?;
        } else {
            title(&format!("Debian's own {program} is not installed (apt-get install {package})"));
        }
    }
    title("That was Ferroce. Now a program of yours");
    println!("{} run -- ibv_devinfo -v", ferroce.display());
    Ok(())
}

fn title(text: &str) {
    // Standard output and standard error meet on a terminal only; a title belongs to what comes after it.
    print(format_args!("\n== {text}"));
}

/// Runs a server and a client of one stock program.
fn pair(ferroce: &Path, program: &str, options: &[&str], port_option: &str) -> Result<()> {
    let port = free_port()?;
    let call = |host: &[&str]| {
        let mut command = Command::new(ferroce);
        command.args(["run", "--", program]).args(options).args([port_option, &port.to_string()]).args(host);
        command
    };
    let mut server = call(&[]);
    server.stdout(Stdio::null());
    print(format_args!("$ {}", show(&call(&["localhost"]))));
    let mut server = Running(server.spawn().with_context(|| format!("cannot start {}", ferroce.display()))?);
    wait_until_listening(port, &mut server.0)?;
    run(&mut call(&["localhost"]))?;
    let status = server.0.wait()?;
    if !status.success() {
        bail!("the server of {program} failed ({status})");
    }
    Ok(())
}

/// A server that does not outlive us.
struct Running(Child);

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
    while !["tcp", "tcp6"]
        .iter()
        .any(|table| std::fs::read_to_string(format!("/proc/net/{table}")).is_ok_and(|table| listens(&table, port)))
    {
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
