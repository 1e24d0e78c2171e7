//! Waking a lane that sleeps: a Unix datagram socket with a name that is told to the lanes it shares rings with.
//!
//! Not an eventfd: that would be one open file for both processes, and a write to it can be made to wait for ever by the one that made
//! it (it fills the counter and clears `O_NONBLOCK`). Here each process has a socket of its own, and nobody waits.
//!
//! Everybody in the network namespace, whoever's process it is, can read the socket's address and send to it. What wakes is therefore a
//! token that only those know who were told; all else a filter drops before it is queued.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use super::shared;

/// Datagrams that are taken from the socket at once.
const DRAIN_MAX: usize = 64;

/// What a datagram that wakes consists of.
pub(super) type Token = [u8; 8];

/// Names a [`WakeSocket`] within its network namespace, and lets wake it. Random: nobody else has it. The first half is its address, the
/// second one the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WakeName(pub [u8; 16]);

impl WakeName {
    fn address(&self) -> io::Result<SocketAddr> {
        let hex: String = self.0[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        SocketAddr::from_abstract_name(format!("ferroce-wake-{hex}"))
    }

    fn token(&self) -> Token {
        *self.0.last_chunk().expect("a name is longer")
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
    /// No descriptor, or a sandbox without such sockets and their filters.
    pub fn bind() -> io::Result<WakeSocket> {
        let name = WakeName(rand::random());
        let socket = UnixDatagram::bind_addr(&name.address()?)?;
        shared::take_only(socket.as_fd(), name.token())?;
        Ok(WakeSocket { name, socket })
    }

    /// Its name.
    pub fn name(&self) -> WakeName {
        self.name
    }

    /// Takes what woke us, so that it does not wake us again: up to `peers` wake-ups. What is left wakes once more.
    pub fn drain(&self, peers: usize) {
        for _ in 0..peers.min(DRAIN_MAX) {
            if !shared::take_datagram(self.socket.as_fd()) {
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
    token: Token,
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
        Ok(Waker { token: name.token(), socket })
    }

    /// Wakes the peer. Never waits; a full queue means that it is being woken already.
    pub fn wake(&self) {
        // A peer that is gone needs no waking.
        let _ = shared::send_token(self.socket.as_fd(), self.token);
    }

    /// Has the peer closed its socket, that is: ended? Wakes it if not. (Its address tells nothing: another process may have taken it.)
    pub fn is_gone(&self) -> bool {
        // The first to see it is told that the connection is refused, and from then on there is none.
        let sent = shared::send_token(self.socket.as_fd(), self.token);
        sent.is_err_and(|error| matches!(error.raw_os_error(), Some(libc::ECONNREFUSED | libc::ENOTCONN)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_woken(wake: &WakeSocket) -> bool {
        shared::take_datagram(wake.as_fd())
    }

    #[test]
    fn only_who_has_the_token_wakes() {
        let wake = WakeSocket::bind().expect("a socket");
        let stranger = UnixDatagram::unbound().expect("a socket");
        stranger.connect_addr(&wake.name().address().expect("an address")).expect("everybody can");
        let token = wake.name().token();
        let mut almost = token;
        almost[7] ^= 1;
        for bytes in [&b""[..], &b"x"[..], &token[..7], &[0; 8], &almost, &[0; 100]] {
            // Dropped, or refused: that differs with the kernel.
            let _ = stranger.send(bytes);
            assert!(!is_woken(&wake), "{bytes:?}");
        }
        let waker = Waker::connect(wake.name()).expect("it is there");
        waker.wake();
        assert!(is_woken(&wake) && !is_woken(&wake));
    }

    #[test]
    fn a_stranger_at_the_same_address_does_not_hide_an_end() {
        let wake = WakeSocket::bind().expect("a socket");
        let address = wake.name().address().expect("an address");
        let wakers = [(); 2].map(|()| Waker::connect(wake.name()).expect("it is there"));
        drop(wake);
        let _squatter = UnixDatagram::bind_addr(&address).expect("it is free again");
        wakers[1].wake();
        for waker in &wakers {
            assert!(waker.is_gone() && waker.is_gone());
        }
    }
}
