//! Waking a lane that sleeps: a Unix datagram socket with a name that is told to the lanes it shares rings with.
//!
//! Not an eventfd: that would be one open file for both processes, and a write to it can be made to wait for ever by the one that made
//! it (it fills the counter and clears `O_NONBLOCK`). Here each process has a socket of its own, and nobody waits.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use super::shared;

/// Datagrams that are taken from the socket at once.
const DRAIN_MAX: usize = 64;

/// Names a [`WakeSocket`] within its network namespace. Random: nobody else has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WakeName(pub [u8; 16]);

impl WakeName {
    fn address(&self) -> io::Result<SocketAddr> {
        let hex: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        SocketAddr::from_abstract_name(format!("ferroce-wake-{hex}"))
    }
}

/// What a lane sleeps on. Readable when a peer put something into a ring while the lane slept.
#[derive(Debug)]
pub struct WakeSocket {
    name: WakeName,
    socket: UnixDatagram,
}

impl WakeSocket {
    /// Makes one under a new name.
    ///
    /// # Errors
    /// No descriptor, or a sandbox without such sockets.
    pub fn bind() -> io::Result<WakeSocket> {
        let name = WakeName(rand::random());
        Ok(WakeSocket { name, socket: UnixDatagram::bind_addr(&name.address()?)? })
    }

    /// Its name.
    pub fn name(&self) -> WakeName {
        self.name
    }

    /// Takes what woke us, so that it does not wake us again: up to `peers` wake-ups. What is left wakes once more.
    pub fn drain(&self, peers: usize) {
        for _ in 0..peers.min(DRAIN_MAX) {
            if !shared::take_byte(self.socket.as_fd()) {
                return;
            }
        }
    }
}

impl AsFd for WakeSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The way to wake one peer.
#[derive(Debug)]
pub struct Waker {
    name: WakeName,
    socket: UnixDatagram,
}

impl Waker {
    /// For the lane with this wake socket.
    ///
    /// # Errors
    /// ECONNREFUSED: there is no such socket (any more); no descriptor; a sandbox.
    pub fn connect(name: WakeName) -> io::Result<Waker> {
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&name.address()?)?;
        Ok(Waker { name, socket })
    }

    /// Wakes the peer. Never waits; a full queue means that it is being woken already.
    pub fn wake(&self) {
        // A peer that is gone needs no waking.
        let _ = shared::send_byte(self.socket.as_fd());
    }

    /// Has the peer closed its socket, that is: ended?
    pub fn is_gone(&self) -> bool {
        let probe = Waker::connect(self.name);
        probe.is_err_and(|error| error.raw_os_error() == Some(libc::ECONNREFUSED))
    }
}
