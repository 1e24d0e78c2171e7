//! What a program tells about itself.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Version of a [`Snapshot`].
pub const VERSION: u32 = 1;

/// Rows of one kind in a snapshot, at most.
pub const ROWS_MAX: usize = 4096;

/// Counters by name.
pub type Counted = BTreeMap<String, u64>;

/// Counters as a map.
pub fn from_pairs(pairs: impl IntoIterator<Item = (&'static str, u64)>) -> Counted {
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Rows, of which some may be left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed<T> {
    /// How many there are.
    pub total: u64,
    /// The first of them.
    pub rows: Vec<T>,
}

impl<T> Default for Listed<T> {
    fn default() -> Listed<T> {
        Listed { total: 0, rows: Vec::new() }
    }
}

impl<T> Listed<T> {
    /// Adds a row; one too many is only counted, and not made.
    pub fn push_with(&mut self, row: impl FnOnce() -> T) {
        self.total += 1;
        if self.rows.len() < ROWS_MAX {
            self.rows.push(row());
        }
    }

    /// Adds a row; one too many is only counted.
    pub fn push(&mut self, row: T) {
        self.push_with(|| row);
    }

    /// Rows that are not in the list.
    pub fn left_out(&self) -> u64 {
        self.total.saturating_sub(self.rows.len() as u64)
    }
}

/// What a program holds and what it counted, seen while it runs: rows of different kinds may be of slightly different times.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`VERSION`].
    pub version: u32,
    /// Process id in the program's own pid namespace.
    pub pid: u32,
    /// The devices of which the program has or had queue pairs, or that it has open.
    pub devices: Vec<DeviceRow>,
    /// What reached no queue pair, and what the link below did: sockets, rings, middlewares.
    pub link: Counted,
    /// Protection domains.
    pub pds: Listed<PdRow>,
    /// Queue pairs.
    pub qps: Listed<QpRow>,
    /// Completion queues.
    pub cqs: Listed<CqRow>,
    /// Memory regions and windows that are bound.
    pub mrs: Listed<MrRow>,
    /// Shared receive queues.
    pub srqs: Listed<SrqRow>,
}

/// A device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRow {
    /// `ferroce0` and so on.
    pub device: String,
    /// Its network interface.
    pub interface: String,
    /// How often the program has it open.
    pub contexts: u32,
    /// What all queue pairs of the device counted, those that are gone included.
    pub counters: Counted,
}

/// A protection domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PdRow {
    /// Number in the process.
    pub pdn: u32,
    /// The device.
    pub device: String,
}

/// A queue pair.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpRow {
    /// Its number.
    pub qpn: u32,
    /// `RC`, `UC`, `UD`.
    pub qp_type: String,
    /// `RESET` to `ERR`.
    pub state: String,
    /// The device.
    pub device: String,
    /// Protection domain.
    pub pdn: u32,
    /// Completion queue for sends.
    pub send_cqn: Option<u32>,
    /// Completion queue for receives.
    pub recv_cqn: Option<u32>,
    /// Its own address, once it has a path.
    pub local: Option<IpAddr>,
    /// The peer's address.
    pub remote: Option<IpAddr>,
    /// The peer's number; None: it is not connected, or UD.
    pub remote_qpn: Option<u32>,
    /// `udp`, `ring` (memory shared with a process of this host), `self` (the peer is in the same process).
    pub carrier: Option<String>,
    /// Path MTU in bytes.
    pub path_mtu: u32,
    /// The PSN that the requester sends next.
    pub sq_psn: u32,
    /// The PSN that the responder expects.
    pub rq_psn: u32,
    /// RC: the oldest PSN without an answer.
    pub una_psn: Option<u32>,
    /// RC: packets without an answer.
    pub in_flight: Option<u32>,
    /// RC: times sent again since the last progress.
    pub retries: Option<u32>,
    /// RC: RNR NAKs since the last progress.
    pub rnr_retries: Option<u8>,
    /// Times that it may be sent again.
    pub retry_cnt: u8,
    /// RNR NAKs that are allowed; 7: any number.
    pub rnr_retry: u8,
    /// ACK timeout, as its code.
    pub timeout: u8,
    /// Send requests that are not complete.
    pub sends: u32,
    /// Room for them.
    pub max_send_wr: u32,
    /// Receive requests posted; None: they come from an SRQ.
    pub receives: Option<u32>,
    /// Room for them.
    pub max_recv_wr: u32,
    /// What it counted; what is 0 is left out.
    pub counters: Counted,
}

/// A completion queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CqRow {
    /// Number in the process.
    pub cqn: u32,
    /// The device.
    pub device: String,
    /// Completions that it can hold.
    pub cqe: u32,
    /// Completions that wait to be polled.
    pub waiting: u32,
    /// It tells a completion channel.
    pub channel: bool,
}

/// A memory region, or a window that is bound.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MrRow {
    /// `MR`, `MW`, or `null` for a null region.
    pub kind: String,
    /// The key: for a region lkey and rkey, for a window the rkey.
    pub key: u32,
    /// Protection domain.
    pub pdn: u32,
    /// Bytes.
    pub len: u64,
    /// What peers call its first byte.
    pub iova: u64,
    /// Names of the rights, joined by `,`.
    pub access: String,
}

/// A shared receive queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SrqRow {
    /// Number in the process.
    pub srqn: u32,
    /// The device.
    pub device: String,
    /// Protection domain.
    pub pdn: u32,
    /// Receive requests posted.
    pub receives: u32,
    /// Room for them.
    pub max_wr: u32,
    /// Fewer raise the limit event; 0: none is armed.
    pub limit: u32,
}
