//! RoCEv2 over UDP sockets, with batches (GSO, GRO) where the system has them.
//!
//! # Sending
//! Private, unconnected sockets: one for each path and destination lane, hence one source port a lane (GRO at the receiver merges
//! by ports, not by QPN), opened on demand and bound to the path's source address. They set Don't Fragment, which makes the
//! IPv4 Identification known that the ICRC covers: 0, or 0, 1, 2 ... in a GSO batch.
//!
//! Packets queue per socket. Neighbours of equal size, of one train or of several, become one GSO batch; a shorter one may end
//! it. All payload is copied and summed in one pass, also where the transport would allow to gather it: `core` sums a copy anyway,
//! because the memory may change under it, and one long piece is cheaper for the system than two pieces a packet. Measured on
//! cold memory, a train of 61,440 bytes: gathered 13.4 us (MTU 4096), 15.3 us (2048), 19.6 us (1024); copied 13.2, 14.3, 17.3 us.
//! A copy also keeps its ICRC when the program changes the memory, and is independent of it once queued.
//!
//! # Receiving
//! From sockets that somebody else bound, never sending from them. See [`ingest`].

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use ferroce_transport::{PathAddr, Train};
use ferroce_wire::{Headers, NetHeader};

use crate::{Corrupt, Link, LinkStats, ROCE_PORT, SendError, Tap, WireHooks};

mod arena;
mod probe;
mod queue;
mod recv;
mod send;
mod sum;
pub(crate) mod sys;

pub use probe::Capabilities;
pub use recv::ingest;

/// Makes what the link keeps for the life of the process: what the system can do, and tables.
pub fn prepare() {
    Capabilities::probe();
    sum::prepare();
}

/// What a [`UdpLink`] is made with.
#[derive(Clone, Debug)]
pub struct UdpOptions {
    /// UDP port that is sent to: 4791, or a test's. The ICRC takes it to be 4791 in any case.
    pub port: u16,
    /// Send sockets kept open at once, at least 1; the least recently used is closed for a new one.
    pub max_sockets: usize,
    /// Send equal-sized packets as one GSO batch where the system can.
    pub gso: bool,
    /// Receive GRO batches where the system can.
    pub gro: bool,
    /// Bytes of socket receive buffer to ask for; the system may give less.
    pub rcvbuf: usize,
}

impl Default for UdpOptions {
    fn default() -> Self {
        UdpOptions { port: ROCE_PORT, max_sockets: 256, gso: true, gro: true, rcvbuf: 32 << 20 }
    }
}

/// What middlewares hung into a link.
#[derive(Default)]
struct Hooks {
    tap: Option<Tap>,
    corrupt: Option<Corrupt>,
}

impl Hooks {
    fn is_empty(&self) -> bool {
        self.tap.is_none() && self.corrupt.is_none()
    }
}

/// A link over UDP: receives from the sockets of a lane, sends from private ones, one source port per destination lane.
pub struct UdpLink {
    receiver: recv::Receiver,
    sender: send::Sender,
    hooks: Hooks,
    stats: LinkStats,
}

impl UdpLink {
    /// Takes over bound UDP sockets to receive from, and sets on them what receiving needs. With none the link only sends.
    ///
    /// # Errors
    /// What the system says about a descriptor that is no bound UDP socket, or that does not tell destination addresses.
    pub fn new(rx: Vec<OwnedFd>) -> std::io::Result<UdpLink> {
        UdpLink::with_options(rx, UdpOptions::default())
    }

    /// The same with other than default options.
    ///
    /// # Errors
    /// As [`UdpLink::new`].
    pub fn with_options(rx: Vec<OwnedFd>, options: UdpOptions) -> std::io::Result<UdpLink> {
        let gso_segments = if options.gso { Capabilities::probe().gso_segments } else { 0 };
        Ok(UdpLink {
            receiver: recv::Receiver::new(rx, &options)?,
            sender: send::Sender::new(&options, gso_segments),
            hooks: Hooks::default(),
            stats: LinkStats::default(),
        })
    }
}

impl UdpLink {
    /// Bytes of receive buffer that the smallest of the receiving sockets has, by the system's bookkeeping (a datagram counts with the
    /// memory that holds it, a few hundred bytes more than its own); 0 without sockets. Peers must not have more in flight.
    pub fn receive_buffer(&self) -> usize {
        self.receiver
            .sockets()
            .iter()
            .map(|socket| sys::buffer_size(socket.as_fd(), sys::Buffer::Receive))
            .min()
            .unwrap_or(0)
    }
}

impl Link for UdpLink {
    fn send(&mut self, cookie: u64, _src_qpn: u32, path: &PathAddr, train: &Train) -> Result<(), SendError> {
        self.sender.send(cookie, path, train, &mut self.hooks, &mut self.stats)
    }

    fn flush(&mut self, failed: &mut dyn FnMut(u64, SendError)) {
        self.sender.flush(&mut self.stats, failed);
    }

    fn recv(&mut self, budget: usize, sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8])) -> usize {
        self.receiver.recv(budget, &mut self.hooks, &mut self.stats, sink)
    }

    fn rx_fds(&self) -> Vec<RawFd> {
        self.receiver.sockets().iter().map(AsRawFd::as_raw_fd).collect()
    }

    fn stats(&self) -> LinkStats {
        self.stats
    }
}

impl WireHooks for UdpLink {
    fn set_tap(&mut self, tap: Tap) {
        self.hooks.tap = Some(tap);
    }

    fn set_corrupt(&mut self, corrupt: Corrupt) {
        self.hooks.corrupt = Some(corrupt);
    }
}

/// Flips one bit, counted modulo all that there are. Byte 4 of the BTH is spared: the ICRC does not cover it.
fn flip(bytes: &mut [u8], bit: usize) {
    let Some(bits) = (bytes.len() * 8).checked_sub(1) else { return };
    let bit = bit % (bits + 1);
    let byte = if bit / 8 == 4 { 0 } else { bit / 8 };
    bytes[byte] ^= 1 << (bit % 8);
}
