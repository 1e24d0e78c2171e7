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

/// A service that crashes more often than this within [`RESTARTS_WITHIN`] is given up.
const RESTARTS_MAX: usize = 10;
const RESTARTS_WITHIN: Duration = Duration::from_secs(60);

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
    keep(held, worker, ready)
}

/// Keeps what a service that has lost its keeper says on `socket`, and runs services after it as [`run`] does.
pub fn take_over(socket: &OwnedFd, worker: &dyn Fn() -> Command) -> Result<(), ServiceError> {
    let mut held = Held::new();
    let failed = |what| ServiceError::new(libc::EPROTO, what);
    match attend(socket, &mut held).map_err(failed)? {
        Ended::InOrder => Ok(()),
        Ended::Crashed if held.contains_key(&Key::Listener) => {
            log::error!("the service has crashed; starting it again");
            keep(held, worker, || ())
        }
        Ended::Crashed => Err(failed("the service crashed before it had said what to keep".into())),
    }
}

/// Runs services one after the other until one ends in order.
fn keep(mut held: Held, worker: &dyn Fn() -> Command, ready: impl FnOnce()) -> Result<(), ServiceError> {
    let mut starts: Vec<Instant> = Vec::new();
    let mut ready = Some(ready);
    loop {
        let (mut child, socket) = start(worker())?;
        if let Some(ready) = ready.take() {
            ready();
        }
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
        let now = Instant::now();
        starts.retain(|start| now.duration_since(*start) < RESTARTS_WITHIN);
        starts.push(now);
        if starts.len() > RESTARTS_MAX {
            let what = format!("the service crashed {RESTARTS_MAX} times within {RESTARTS_WITHIN:?}: giving up");
            return Err(ServiceError::new(libc::ECHILD, what));
        }
    }
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
            // A descriptor that did not arrive: there are too many.
            Ok(Message { key, .. }) => (Operation::Failed, key),
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
