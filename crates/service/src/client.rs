//! What a program uses to talk to the service.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use crate::protocol::Status;
use crate::{DEFAULT_NAME, ServiceError};

/// How to find the service, and how to start it.
#[derive(Clone, Debug)]
pub struct StartOptions {
    /// Abstract Unix socket name, without the leading zero byte.
    pub name: String,
    /// Paths of `ferroced` to try, best first (`FERROCE_SERVICE`, beside the library, beside
    /// the program). `PATH` is searched after them.
    pub candidates: Vec<PathBuf>,
    /// What the program calls itself; shown by `status`.
    pub program: String,
    /// How long to wait for a started service to accept, and for each answer.
    pub patience: Duration,
}

impl Default for StartOptions {
    fn default() -> StartOptions {
        StartOptions {
            name: DEFAULT_NAME.into(),
            candidates: Vec::new(),
            program: String::new(),
            patience: Duration::from_secs(2),
        }
    }
}

/// A connection to the service. Leases live as long as it or any of them does.
#[derive(Debug)]
pub struct Client {}

impl Client {
    /// Connects to the service of this network namespace; starts it if nobody listens.
    pub fn connect_or_start(options: &StartOptions) -> Result<Client, ServiceError> {
        let _ = options;
        Err(ServiceError::new(libc::ENOSYS, "the service is not built yet"))
    }

    /// Connects to the service of this network namespace; never starts it (ENOENT-like: ECONNREFUSED).
    pub fn connect(options: &StartOptions) -> Result<Client, ServiceError> {
        Client::connect_or_start(options)
    }

    /// Leases a lane: a receive socket of the port's group and a prefix of QP numbers.
    pub fn lease_lane(&self) -> Result<LaneLease, ServiceError> {
        Err(ServiceError::new(libc::ENOSYS, "the service is not built yet"))
    }

    /// What the service holds, and for whom.
    pub fn status(&self) -> Result<Status, ServiceError> {
        Err(ServiceError::new(libc::ENOSYS, "the service is not built yet"))
    }

    /// Whether this object was made by a process of which this one is a forked child; every
    /// method fails with ESTALE then.
    pub fn is_stale(&self) -> bool {
        false
    }
}

/// A packet that was steered to the wrong lane, as the relay brings it to the right one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relayed<'a> {
    /// IP source and UDP source port.
    pub src: SocketAddr,
    /// IP destination.
    pub dst: IpAddr,
    /// UDP payload: BTH to ICRC, one packet.
    pub bytes: &'a [u8],
}

/// A leased lane. Dropping it gives the lane back.
#[derive(Debug)]
pub struct LaneLease {
    lane: u16,
    seed: u64,
    rx: Vec<OwnedFd>,
    relay: OwnedFd,
}

impl LaneLease {
    /// Lane number, 1..=1023: the upper 10 bits of the QP numbers that are steered here.
    pub fn lane(&self) -> u16 {
        self.lane
    }

    /// Random seed for this lane's keys and QP numbers.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Hands out the receive sockets, once; later calls give none.
    pub fn take_rx(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.rx)
    }

    /// Readable when the relay has a packet for this lane.
    pub fn relay_fd(&self) -> BorrowedFd<'_> {
        self.relay.as_fd()
    }

    /// Hands a packet for a foreign QP number to the service, which forwards it. Never blocks;
    /// false: dropped, because the relay is full.
    pub fn relay_send(&self, src: SocketAddr, dst: IpAddr, bytes: &[u8]) -> io::Result<bool> {
        let _ = (src, dst, bytes);
        Ok(false)
    }

    /// Takes one packet that the relay brought, if there is one. Never blocks.
    pub fn relay_recv<'b>(&self, buffer: &'b mut Vec<u8>) -> io::Result<Option<Relayed<'b>>> {
        let _ = buffer;
        Ok(None)
    }

    /// Gives the lane back and waits for the service to confirm it.
    pub fn release(self) -> Result<(), ServiceError> {
        Ok(())
    }
}
