//! Questions to a running program: what it holds and what it counted.
//!
//! Every program that has a lane listens at an abstract Unix socket, whose name follows from the lane and its lease: who asks
//! learns both from the service, which has no other part in it, so that a program that does not answer holds nobody up. Whoever
//! connects is told a [`Snapshot`], one JSON document, and the connection ends. Only the program's own user and root are answered.
//!
//! What a program answers is hostile input to who asks: it has a bounded length, and its strings may contain anything.

mod snapshot;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

pub use snapshot::{
    Counted, CqRow, DeviceRow, Listed, MrRow, PdRow, QpRow, ROWS_MAX, Snapshot, SrqRow, VERSION, from_pairs,
};

use crate::{ServiceError, closing, seqpacket, sys};

/// Longest answer, in bytes.
pub const ANSWER_BYTES_MAX: usize = 32 << 20;

/// Connections that wait to be answered.
const BACKLOG: i32 = 64;

/// How long one asker is attended to, if it does not take its answer.
const ASKER_PATIENCE: Duration = Duration::from_secs(1);

/// The socket's name for a lane.
fn name(lane: u16, lease: u64) -> String {
    format!("ferroce-inspect-{lane}-{lease:016x}")
}

/// A program's end.
#[derive(Debug)]
pub struct Inspector {
    listener: OwnedFd,
}

impl Inspector {
    /// Listens for questions under the name of a lane.
    pub fn listen(lane: u16, lease: u64) -> Result<Inspector, ServiceError> {
        let failed = |errno: Errno| ServiceError::system("cannot listen for questions about the program", errno);
        let listener = socket(SocketFlags::NONBLOCK).map_err(failed)?;
        closing::refuse(&listener, true);
        rustix::net::bind(&listener, &seqpacket::address(&name(lane, lease)).map_err(failed)?).map_err(failed)?;
        rustix::net::listen(&listener, BACKLOG).map_err(failed)?;
        Ok(Inspector { listener })
    }

    /// Readable while somebody asks.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Answers one who asks, if there is one. Sending takes a second at most, however slowly the answer is read.
    pub fn answer(&self, snapshot: impl FnOnce() -> Snapshot) -> io::Result<()> {
        let asker = match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(asker) => asker,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        if !may_ask(sys::peer(asker.as_fd())?.uid) {
            return Ok(());
        }
        let text = serde_json::to_vec(&snapshot()).map_err(io::Error::other)?;
        send_all(&asker, &text, Instant::now() + ASKER_PATIENCE)
    }
}

fn may_ask(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

fn socket(flags: SocketFlags) -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags | SocketFlags::CLOEXEC, None)
}

/// Time that is left, as socket options take it: none is no time at all, which they would take as for ever.
fn left(deadline: Instant) -> Result<Duration, Errno> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left < Duration::from_micros(1) { Err(Errno::AGAIN) } else { Ok(left) }
}

fn send_all(asker: &OwnedFd, mut text: &[u8], deadline: Instant) -> io::Result<()> {
    while !text.is_empty() {
        sockopt::set_socket_timeout(asker, Timeout::Send, Some(left(deadline)?))?;
        match rustix::net::send(asker, text, SendFlags::NOSIGNAL) {
            Ok(sent) => text = &text[sent..],
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Asks the program that has a lane under this lease.
///
/// ECONNREFUSED: it has ended, or is of a release that does not answer. ETIMEDOUT: it did not answer in time. EACCES: whoever
/// listens there is another user. EMSGSIZE, EPROTO: its answer is too long, or none.
pub fn ask(lane: u16, lease: u64, patience: Duration) -> Result<Snapshot, ServiceError> {
    let deadline = Instant::now() + patience;
    let failed = |errno| match errno {
        Errno::AGAIN => {
            ServiceError::new(libc::ETIMEDOUT, format!("did not answer within {patience:?}; is it stopped?"))
        }
        Errno::CONNREFUSED => {
            ServiceError::new(libc::ECONNREFUSED, "has ended, or is of a release that does not answer")
        }
        errno => ServiceError::system("cannot be asked", errno),
    };
    let socket = connect(&name(lane, lease), deadline).map_err(failed)?;
    check_user(&socket)?;
    let text = receive_all(&socket, deadline).map_err(failed)?;
    if text.len() > ANSWER_BYTES_MAX {
        return Err(ServiceError::new(libc::EMSGSIZE, format!("answers more than {ANSWER_BYTES_MAX} bytes")));
    }
    if text.is_empty() {
        return Err(ServiceError::new(libc::EPROTO, "does not answer this user"));
    }
    let not_understood = |error| ServiceError::new(libc::EPROTO, format!("its answer cannot be understood: {error}"));
    let Version { version } = serde_json::from_slice(&text).map_err(not_understood)?;
    if version != VERSION {
        return Err(ServiceError::new(libc::EPROTO, format!("answers in version {version}, not {VERSION}")));
    }
    serde_json::from_slice(&text).map_err(not_understood)
}

/// The one member that all versions have.
#[derive(serde::Deserialize)]
struct Version {
    version: u32,
}

fn connect(name: &str, deadline: Instant) -> Result<OwnedFd, Errno> {
    let socket = socket(SocketFlags::empty())?;
    // Connecting waits as long as sending where too many wait to be answered.
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(left(deadline)?))?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &seqpacket::address(name)?))?;
    Ok(socket)
}

fn check_user(socket: &OwnedFd) -> Result<(), ServiceError> {
    let peer = sys::peer(socket.as_fd())
        .map_err(|error| ServiceError::system("cannot tell who answers", sys::errno(&error)))?;
    let own = rustix::process::geteuid().as_raw();
    if own == 0 || peer.uid == own {
        return Ok(());
    }
    Err(ServiceError::new(libc::EACCES, format!("belongs to uid {}, not to uid {own}", peer.uid)))
}

/// Everything until the other end closes, and at most a byte more than an answer may have.
fn receive_all(socket: &OwnedFd, deadline: Instant) -> Result<Vec<u8>, Errno> {
    let mut text = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    while text.len() <= ANSWER_BYTES_MAX {
        sockopt::set_socket_timeout(socket, Timeout::Recv, Some(left(deadline)?))?;
        match rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty()) {
            Ok((0, _)) => return Ok(text),
            Ok((received, _)) => text.extend_from_slice(&buffer[..received]),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests;
