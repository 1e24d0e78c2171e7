//! The keeper: a process beside the service, which holds what must outlive it and parses nothing that comes from outside.
//!
//! As long as it lives, a service that crashes is replaced at once: no socket of the group moves, no connection breaks,
//! and no lane is lost. It ends with the service's orderly end. A keeper that dies is replaced by the service: the first
//! one is the service's parent, later ones are started by it.

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::server;
use crate::store::{self, Held, Key, Message, Operation, StateFile};
use crate::{ServiceError, sys};

/// A service that crashes more often than this within [`CRASHES_WITHIN`] is given up.
const CRASHES_MAX: usize = 10;
const CRASHES_WITHIN: Duration = Duration::from_secs(60);

/// After the first crash within that time the service is started again at once, after the second after this; after each further
/// one it takes twice as long, up to the longest.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Listens at the name, runs services one after the other, and returns when one ended in order.
///
/// `worker` gives the command that calls [`server::Service::resume`] with its standard input. `ready` is called when
/// clients can connect. EADDRINUSE: another service runs already.
pub fn run(name: &str, worker: &dyn Fn() -> Command, ready: impl FnOnce()) -> Result<(), ServiceError> {
    let mut held = Held::new();
    held.insert(Key::Listener, server::listen(name)?);
    for (key, name) in [(Key::GroupState, "ferroce-group"), (Key::ServiceState, "ferroce-service")] {
        let file = StateFile::create(name).map_err(|errno| ServiceError::system("no memory for the state", errno))?;
        held.insert(key, file);
    }
    let started = start(worker())?;
    ready();
    keep(held, started, worker, Crashes::default())
}

/// Keeps what a service that has lost its keeper says on `socket`, and runs services after it as [`run`] does.
pub fn take_over(socket: &OwnedFd, worker: &dyn Fn() -> Command) -> Result<(), ServiceError> {
    let mut held = Held::new();
    let failed = |what| ServiceError::new(libc::EPROTO, what);
    match attend(socket, &mut held).map_err(failed)? {
        Ended::InOrder => Ok(()),
        Ended::Crashed if held.contains_key(&Key::Listener) => {
            log::error!("the service has crashed; starting it again");
            let mut crashes = Crashes::default();
            crashes.pause()?;
            let started = start_again(worker, &mut crashes)?;
            keep(held, started, worker, crashes)
        }
        Ended::Crashed => Err(failed("the service crashed before it had said what to keep".into())),
    }
}

/// Runs services, the first one of which is `started`, one after the other until one ends in order.
fn keep(
    mut held: Held,
    mut started: (Child, OwnedFd),
    worker: &dyn Fn() -> Command,
    mut crashes: Crashes,
) -> Result<(), ServiceError> {
    loop {
        let (mut child, socket) = started;
        let ended = give(&socket, &held).and_then(|()| attend(&socket, &mut held)).unwrap_or_else(|what| {
            // It waits for an answer, or believes to be kept when it is not: better a new one.
            log::error!("{what}");
            let _ = child.kill();
            Ended::Crashed
        });
        drop(socket);
        let status =
            child.wait().map_err(|error| ServiceError::system("cannot wait for the service", sys::errno(&error)))?;
        if ended == Ended::InOrder || status.success() {
            return Ok(());
        }
        log::error!("the service has ended with {status}; starting it again");
        crashes.pause()?;
        started = start_again(worker, &mut crashes)?;
    }
}

/// Starts a service in place of one that has crashed. That it cannot be started for the moment (no memory, no process to be had) is
/// no reason to let go of what it is to be given; it counts as a crash.
fn start_again(worker: &dyn Fn() -> Command, crashes: &mut Crashes) -> Result<(Child, OwnedFd), ServiceError> {
    loop {
        match start(worker()) {
            Ok(started) => return Ok(started),
            Err(error) => {
                log::error!("{error}; trying again");
                crashes.pause()?;
            }
        }
    }
}

/// When services have crashed lately.
#[derive(Default)]
struct Crashes(Vec<Instant>);

impl Crashes {
    /// Notes a crash, and waits until the next service may be started. ECHILD: it is given up.
    fn pause(&mut self) -> Result<(), ServiceError> {
        let now = Instant::now();
        self.0.retain(|crash| now.duration_since(*crash) < CRASHES_WITHIN);
        self.0.push(now);
        let pause = pause_after(self.0.len()).ok_or_else(|| given_up(self.0.len()))?;
        std::thread::sleep(pause);
        Ok(())
    }
}

/// How long to wait after so many crashes; None: there were too many.
fn pause_after(crashes: usize) -> Option<Duration> {
    let doublings = match crashes {
        0 | 1 => return Some(Duration::ZERO),
        more if more <= CRASHES_MAX => (more - 2) as u32,
        _ => return None,
    };
    Some(PAUSE_MIN.saturating_mul(1 << doublings).min(PAUSE_MAX))
}

fn given_up(crashes: usize) -> ServiceError {
    let what = format!(
        "the service crashed, or could not be started, {crashes} times within {CRASHES_WITHIN:?}: giving up. Programs that run keep \
         their lanes, and the next program starts another service. `ferroced` run by hand with FERROCE_LOG=debug, or [log] in \
         ferroce.toml, tells why"
    );
    ServiceError::new(libc::ECHILD, what)
}

/// How a service ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    InOrder,
    Crashed,
}

/// Starts a process that finds the other end of a socket at its standard input.
pub(crate) fn start(mut command: Command) -> Result<(Child, OwnedFd), ServiceError> {
    let failed = |errno| ServiceError::system("cannot start the service's process", errno);
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
    let child =
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn().map_err(|error| failed(sys::errno(&error)))?;
    Ok((child, ours))
}

/// Gives a service what was kept. An error: there is no understanding with it.
fn give(socket: &OwnedFd, held: &Held) -> Result<(), String> {
    let given = held
        .iter()
        .try_for_each(|(key, descriptor)| store::send(socket, Operation::Held, *key, Some(descriptor.as_fd())))
        .and_then(|()| store::send(socket, Operation::End, Key::Listener, None));
    match given {
        // Its end shows when it is listened to.
        Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
        Err(errno) => Err(format!("cannot hand over to the service: {errno}")),
    }
}

/// Keeps what the service says until it is gone. An error: there is no understanding with it.
fn attend(socket: &OwnedFd, held: &mut Held) -> Result<Ended, String> {
    loop {
        let (answer, key) = match store::recv(socket) {
            Ok(Message { operation: Operation::Put, key, descriptor: Some(descriptor) }) => {
                held.insert(key, descriptor);
                (Operation::Done, key)
            }
            Ok(Message { operation: Operation::Remove, key, .. }) => {
                let known = held.remove(&key).is_some();
                (if known { Operation::Done } else { Operation::Failed }, key)
            }
            Ok(Message { operation: Operation::Leave, key, .. }) => {
                let _told = store::send(socket, Operation::Done, key, None);
                return Ok(Ended::InOrder);
            }
            // Its descriptor did not arrive: this process has too many.
            Ok(Message { operation: Operation::Put, key, descriptor: None }) => (Operation::Failed, key),
            Ok(Message {
                operation: operation @ (Operation::Held | Operation::End | Operation::Done | Operation::Failed),
                ..
            }) => return Err(format!("the service says {operation:?}, which is for the keeper to say")),
            Err(Errno::CONNRESET) => return Ok(Ended::Crashed),
            Err(errno) => return Err(format!("the service cannot be understood: {errno}")),
        };
        match store::send(socket, answer, key, None) {
            Ok(()) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(Ended::Crashed),
            Err(errno) => return Err(format!("the service cannot be answered: {errno}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_it_is_given_up() {
        let pauses: Vec<u128> = (0..=CRASHES_MAX).map(|crashes| pause_after(crashes).unwrap().as_millis()).collect();
        assert_eq!(pauses, [0, 0, 10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(pause_after(CRASHES_MAX + 1), None);
        let told = given_up(CRASHES_MAX + 1).to_string();
        assert!(told.contains("11 times") && told.contains("FERROCE_LOG=debug"), "{told}");
    }
}
