//! The two ends of a line: a program here on Ferroce, or one in the guest on rxe.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};

use program_tests::failure::Failure;
use program_tests::interrupt;
use program_tests::process::{Finished, Running, ended_how};
use rustix::process::Signal;

use crate::remote::{self, Agent, Reply, Request, Ticket};

/// How long the other end may go on after one failed.
const GRACE: Duration = Duration::from_secs(10);
/// How often the guest is asked whether someone listens: a question costs it a fraction of a millisecond.
const ASK_AGAIN: Duration = Duration::from_millis(15);
/// How often a waiting loop looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Which side of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// This machine, with Ferroce.
    Ferroce,
    /// The guest, with the kernel's rxe.
    Kernel,
}

impl Side {
    /// The other one.
    pub fn other(self) -> Side {
        match self {
            Side::Ferroce => Side::Kernel,
            Side::Kernel => Side::Ferroce,
        }
    }
}

/// A program at one end. Dropping it ends it.
pub enum End {
    /// On this machine.
    Here(Running),
    /// In the guest.
    There(Remote),
}

/// A program in the guest.
pub struct Remote {
    name: String,
    ticket: Ticket,
    reply: Option<Reply>,
}

impl End {
    /// Starts a program in the guest.
    pub fn there(agent: &Agent, name: &str, argv: &[String], limit: Duration) -> Result<End, Failure> {
        let words: Vec<&str> = argv.iter().map(String::as_str).collect();
        let ticket = agent.start(&words, limit)?;
        Ok(End::There(Remote { name: name.to_owned(), ticket, reply: None }))
    }

    /// What reports call it.
    pub fn name(&self) -> &str {
        match self {
            End::Here(running) => running.name(),
            End::There(remote) => &remote.name,
        }
    }

    /// Waits until it listens on TCP `port`.
    pub fn wait_listening(&mut self, agent: &Agent, port: u16, limit: Duration) -> Result<(), Failure> {
        match self {
            End::Here(running) => running.wait_listening(port, limit),
            End::There(remote) => remote.wait_until(&format!("listen on TCP port {port}"), limit, || {
                Ok(matches!(agent.ask(Request::Listening(port))?.wait(limit)?, Reply::Listening(true)))
            }),
        }
    }

    /// Waits until it listens for connections by RDMA-CM; `status` makes a `ferroce status --json`.
    pub fn wait_connectable(
        &mut self,
        agent: &Agent,
        status: impl Fn() -> Command,
        limit: Duration,
    ) -> Result<(), Failure> {
        match self {
            End::Here(running) => running.wait_connectable(status, limit),
            // No other program is there that could listen.
            End::There(remote) => remote.wait_until("listen for connections", limit, || {
                let ids = agent.run(&["/bin/rdma", "resource", "show", "cm_id"], limit)?;
                ids.check_success()?;
                Ok(ids.stdout.contains("state LISTEN"))
            }),
        }
    }

    /// Waits until it is member of a multicast group of IPv4; `status` makes a `ferroce status --json`.
    pub fn wait_member(&mut self, agent: &Agent, status: impl Fn() -> Command, limit: Duration) -> Result<(), Failure> {
        match self {
            End::Here(running) => running.wait_member(status, limit),
            End::There(remote) => remote.wait_until("join a multicast group", limit, || {
                let listed = agent.read(&["/proc/net/igmp"], limit)?;
                Ok(listed.iter().any(|(_, text)| has_joined_group(text)))
            }),
        }
    }

    /// Ends the program as `kill -9` does, and waits until it has ended; an error if something else had ended it.
    pub fn kill(mut self) -> Result<Finished, Failure> {
        match &self {
            End::Here(running) => running.kill_program(),
            End::There(remote) => remote.ticket.end(),
        }
        let deadline = Instant::now() + GRACE;
        while self.poll()?.is_none() {
            if Instant::now() > deadline {
                return Err(Failure::new(format!("{} was killed and did not end within {GRACE:?}", self.name())));
            }
            interrupt::check()?;
            sleep(LOOK_AGAIN);
        }
        let finished = self.finish()?;
        // `ferroce run` passes the signal on as an exit code.
        let killed = Signal::KILL.as_raw();
        if finished.status.signal() == Some(killed) || finished.status.code() == Some(128 + killed) {
            return Ok(finished);
        }
        let what = format!("{} {} before it was killed", finished.name, ended_how(finished.status));
        Err(Failure::new(what).with(finished.report()))
    }

    fn poll(&mut self) -> Result<Option<ExitStatus>, Failure> {
        match self {
            End::Here(running) => running.poll(),
            End::There(remote) => remote.poll(),
        }
    }

    /// Ends it and tells what it printed.
    fn stop(self) -> String {
        match self {
            // The limit has passed: this ends it and says where it hangs.
            End::Here(running) => {
                running.wait(Duration::ZERO).map_or_else(|failure| failure.to_string(), |finished| finished.report())
            }
            End::There(mut remote) => {
                remote.ticket.end();
                let deadline = Instant::now() + GRACE;
                while Instant::now() < deadline && matches!(remote.poll(), Ok(None)) {
                    sleep(LOOK_AGAIN);
                }
                remote.finish().map_or_else(|failure| failure.to_string(), |finished| finished.report())
            }
        }
    }

    fn finish(self) -> Result<Finished, Failure> {
        match self {
            End::Here(running) => running.wait(GRACE),
            End::There(mut remote) => remote.finish(),
        }
    }
}

/// Does /proc/net/igmp list a group besides 224.0.0.1, which every host is in? Addresses are in network order, here read backwards.
fn has_joined_group(igmp: &str) -> bool {
    const ALL_HOSTS: &str = "010000E0";
    let groups = igmp.lines().filter(|line| line.starts_with('\t')).filter_map(|line| line.split_whitespace().next());
    groups.into_iter().any(|group| group != ALL_HOSTS)
}

impl Remote {
    /// Asks again and again until `done`; an error if the program ends before, or `limit` is over.
    fn wait_until(
        &mut self,
        what: &str,
        limit: Duration,
        done: impl Fn() -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        while !done()? {
            if self.poll()?.is_some() {
                let finished = self.finish()?;
                let how = ended_how(finished.status);
                return Err(Failure::new(format!("{} {how} and did not {what}", self.name)).with(finished.report()));
            }
            if Instant::now() > deadline {
                return Err(Failure::new(format!("{} did not {what} within {limit:?}", self.name)));
            }
            interrupt::check()?;
            sleep(ASK_AGAIN);
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<Option<ExitStatus>, Failure> {
        if self.reply.is_none() {
            self.reply = self.ticket.poll()?;
        }
        match &self.reply {
            None => Ok(None),
            Some(reply) => Ok(Some(remote::finished(&self.name, reply.clone())?.status)),
        }
    }

    fn finish(&mut self) -> Result<Finished, Failure> {
        let reply = self.reply.clone().ok_or_else(|| Failure::new(format!("{} has not ended", self.name)))?;
        remote::finished(&self.name, reply)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if self.reply.is_none() {
            self.ticket.end();
        }
    }
}

/// Waits until all have ended well. When one fails, the others get a short while.
pub fn wait_all(mut ends: Vec<End>, limit: Duration) -> Result<Vec<Finished>, Failure> {
    let mut deadline = Instant::now() + limit;
    let mut first_failed: Option<String> = None;
    loop {
        let mut running = Vec::new();
        for end in &mut ends {
            match end.poll()? {
                None => running.push(end.name().to_owned()),
                Some(status) if !status.success() && first_failed.is_none() => {
                    first_failed = Some(format!("{} {}", end.name(), ended_how(status)));
                    deadline = deadline.min(Instant::now() + GRACE);
                }
                Some(_) => {}
            }
        }
        if running.is_empty() {
            break;
        }
        if Instant::now() > deadline {
            let hung = running.join(", ");
            let failure = Failure::new(match &first_failed {
                Some(what) => format!("{what}; {hung} went on"),
                None => format!("{hung} hung: did not end within {limit:?}"),
            });
            return Err(ends.into_iter().fold(failure, |failure, end| failure.with(end.stop())));
        }
        interrupt::check()?;
        sleep(LOOK_AGAIN);
    }
    let finished = ends.into_iter().map(End::finish).collect::<Result<Vec<_>, _>>()?;
    match first_failed {
        None => Ok(finished),
        Some(what) => Err(finished.iter().fold(Failure::new(what), |failure, program| failure.with(program.report()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_seen() {
        let alone = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
                     2\teth0      :     1      V3\n\t\t\t\t010000E0     1 0:00000000\t\t0\n";
        assert!(!has_joined_group(alone));
        let member = alone.replace("\t\t\t\t010000E0", "\t\t\t\t0147FFEF     1 0:00000000\t\t0\n\t\t\t\t010000E0");
        assert!(has_joined_group(&member));
    }
}
