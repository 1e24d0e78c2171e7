//! Links carry the packets of trains to the lane of a peer and bring packets back: [`UdpLink`] over UDP sockets with GSO and GRO,
//! and the middlewares [`FaultLink`] (seeded loss, duplication, reordering, delay, corruption) and [`PcapLink`] (capture).
//!
//! A link owns what is below the BTH: sockets, IP and UDP facts, the ICRC, the cut of a train into datagrams. It knows nothing
//! of queue pairs, PSN order or completions. Between lanes of one host packets also go through memory that both map: [`ring`].
//! Frames of RAW_PACKET queue pairs go another way: [`raw`]. `unsafe` lives only in `udp/sys.rs`, `ring/shared.rs`, `raw/sys.rs` and
//! `sched.rs`.
//!
//! # When memory is read
//! [`Link::send`] reads the memory of a train at once. A link may read it again until [`Link::flush`] returns, so a caller that
//! guards memory with a lock calls `flush` before it lets go of the lock. ([`UdpLink`] copies, and does not read it again.)

use std::os::fd::RawFd;

use ferroce_transport::{PathAddr, Train};
use ferroce_wire::{Headers, NetHeader};

mod capture_file;
pub mod fault;
mod payload;
pub mod pcap;
pub mod raw;
pub mod ring;
pub mod sched;
mod stats;
pub mod udp;

pub use fault::{FaultConfig, FaultLink};
pub use pcap::{PcapLink, finish_captures};
pub use stats::LinkStats;
pub use udp::{UdpLink, UdpOptions, prepare};

pub use ferroce_wire::UDP_PORT as ROCE_PORT;

/// Why a train (or a part of it) could not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Memory of the train is unmapped, truncated or protected.
    #[error("the memory of the message is gone")]
    Fault,
    /// The system refused the destination: no route, forbidden, or larger than the path carries (EMSGSIZE).
    #[error("the system does not send to this destination: {}", std::io::Error::from_raw_os_error(*.errno))]
    Unreachable {
        /// What the system said.
        errno: i32,
    },
}

/// A carrier of packets. One thread at a time uses a link; it never blocks and spawns nothing.
pub trait Link: Send {
    /// Queues one train from queue pair `src_qpn` along `path` (for UD the train's own path wins). Its memory is read now,
    /// and perhaps again by `flush`. An error concerns this train alone and means that nothing of it will be sent.
    ///
    /// A link whose queue is full flushes by itself; what fails then is kept and reported by the next `flush`. `cookie` comes
    /// back in that report; it is not looked at.
    fn send(&mut self, cookie: u64, src_qpn: u32, path: &PathAddr, train: &Train) -> Result<(), SendError>;

    /// Hands everything queued to the system. Calls `failed` with the cookie of each train of which some packet did not go;
    /// other packets of that train may have gone. Packets that the system had no room for are dropped, counted and not
    /// reported: the transport recovers them.
    fn flush(&mut self, failed: &mut dyn FnMut(u64, SendError));

    /// Reads up to about `budget` datagrams and gives every packet that parses and whose ICRC is right to `sink`: network facts,
    /// headers, payload without pad. Packets of one datagram batch come in order. Returns the number of datagrams read, good
    /// and bad ones: 0 means that nothing is waiting.
    fn recv(&mut self, budget: usize, sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8])) -> usize;

    /// The descriptors that become readable when `recv` has work, for epoll.
    fn rx_fds(&self) -> Vec<RawFd>;

    /// The counters.
    fn stats(&self) -> LinkStats;

    /// Nanoseconds until the link wants to be turned (`recv` or `flush`) although nothing happened; `None` for never. Only
    /// middlewares that hold packets back answer something else.
    fn next_due(&self) -> Option<u64> {
        None
    }
}

impl<L: Link + ?Sized> Link for Box<L> {
    fn send(&mut self, cookie: u64, src_qpn: u32, path: &PathAddr, train: &Train) -> Result<(), SendError> {
        (**self).send(cookie, src_qpn, path, train)
    }
    fn flush(&mut self, failed: &mut dyn FnMut(u64, SendError)) {
        (**self).flush(failed);
    }
    fn recv(&mut self, budget: usize, sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8])) -> usize {
        (**self).recv(budget, sink)
    }
    fn rx_fds(&self) -> Vec<RawFd> {
        (**self).rx_fds()
    }
    fn stats(&self) -> LinkStats {
        (**self).stats()
    }
    fn next_due(&self) -> Option<u64> {
        (**self).next_due()
    }
}

/// Which way a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Direction {
    Tx,
    Rx,
}

/// A packet as it is on the wire, shown to a [`Tap`].
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Sent or received.
    pub direction: Direction,
    /// IP and UDP facts.
    pub net: &'a NetHeader,
    /// IPv4 Identification that the ICRC was made with; for a received packet with a wrong ICRC, 0.
    pub identification: u16,
    /// UDP payload, BTH to ICRC.
    pub bytes: &'a [u8],
}

/// Sees every packet: sent ones when they are queued, received ones before they are dropped for a fault.
pub type Tap = Box<dyn FnMut(&Frame<'_>) + Send>;

/// Decides for each packet of so many bytes whether to damage it, and which bit to flip: before a sent packet leaves, and before the
/// ICRC of a received one is checked. Byte 4 of the BTH, which the ICRC does not cover, is spared.
pub type Corrupt = Box<dyn FnMut(Direction, usize) -> Option<usize> + Send>;

/// A link that lets middlewares at its packets' bytes.
pub trait WireHooks {
    /// Shows all packets to `tap` from now on.
    fn set_tap(&mut self, tap: Tap);
    /// Lets `corrupt` damage packets from now on.
    fn set_corrupt(&mut self, corrupt: Corrupt);
}
