//! The devices a program sees: one for each usable network interface.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::ServiceError;

/// What the caller wants listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListOptions {
    /// List the loopback interface also beside others (`FERROCE_LOOPBACK=1`).
    /// Without it, loopback is listed only when there is nothing else.
    pub loopback: bool,
}

/// One entry of a GID table; its index is its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// The GID as verbs has it: 16 bytes, network order; IPv4 as `::ffff:a.b.c.d`.
    pub gid: [u8; 16],
    /// The address the GID stands for (never an IPv4-mapped IPv6 address).
    pub addr: IpAddr,
}

/// One device: a network interface as verbs sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `ferroce0`, `ferroce1`, ...
    pub name: String,
    /// The network interface's name.
    pub ifname: String,
    /// The network interface's index.
    pub ifindex: u32,
    /// Node and port GUID, host byte order; never zero, the same from start to start.
    pub guid: u64,
    /// The interface's MAC address; zero where it has none.
    pub mac: [u8; 6],
    /// The interface's MTU in bytes.
    pub mtu: u32,
    /// Whether the interface is up and has a carrier.
    pub up: bool,
    /// Whether it is the loopback interface.
    pub loopback: bool,
    /// The GID table; at least 4 entries.
    pub gids: Vec<GidEntry>,
}

/// Lists the devices of this network namespace.
pub fn list(options: ListOptions) -> Result<Vec<DeviceInfo>, ServiceError> {
    let _ = options;
    Err(ServiceError::new(libc::ENOSYS, "the list of devices is not built yet"))
}

/// Tells when interfaces or addresses change.
#[derive(Debug)]
pub struct DeviceWatch {
    fd: OwnedFd,
}

impl DeviceWatch {
    /// Starts watching this network namespace.
    pub fn new() -> Result<DeviceWatch, ServiceError> {
        Err(ServiceError::new(libc::ENOSYS, "watching devices is not built yet"))
    }

    /// Readable when something changed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Takes what was reported; true if [`list`] may give something else now.
    pub fn drain(&self) -> bool {
        false
    }
}
