//! The second process of `--self`.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// What a server prints before its port.
const LISTENING: &str = "listening on TCP port ";

/// A server that we started; it ends with us.
pub(crate) struct Partner {
    child: Child,
    port: u16,
}

impl Partner {
    /// Starts `ferroce <command> server` and waits until it listens.
    pub(crate) fn start(command: &str, device: Option<&str>, gid: Option<u32>) -> Result<Partner> {
        let program = std::env::current_exe().context("cannot find out where this program lies (is /proc mounted?)")?;
        let mut call = Command::new(program);
        call.args([command, "server", "--once", "--port", "0"]).stdin(Stdio::null()).stdout(Stdio::piped());
        if let Some(device) = device {
            call.args(["--device", device]);
        }
        if let Some(gid) = gid {
            call.args(["--gid-index", &gid.to_string()]);
        }
        let mut child = call.spawn().context("cannot start the second process")?;
        let stdout = child.stdout.take().expect("stdout is a pipe");
        let mut partner = Partner { child, port: 0 };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).context("cannot read what the second process says")?;
        match line.trim_end().strip_prefix(LISTENING).and_then(|port| port.parse().ok()) {
            Some(port) => partner.port = port,
            None => bail!("the second process ended before it listened; its message is above"),
        }
        Ok(partner)
    }

    /// The line that tells the port.
    pub(crate) fn greeting(port: u16) -> String {
        format!("{LISTENING}{port}")
    }

    /// Waits a moment for it to end by itself.
    fn wait(&self) {
        const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
        if let Ok(ended) = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()) {
            let _ = poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&PATIENCE));
        }
    }

    /// Where it listens.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        // It may be about to end, and to say why.
        self.wait();
        // Ended already, or not needed any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
