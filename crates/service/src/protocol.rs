//! Messages between program and service.

use serde::{Deserialize, Serialize};

/// What the service holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Process id of the service, in its own pid namespace.
    pub pid: u32,
    /// Effective user id of the service.
    pub uid: u32,
    /// Seconds since the service started.
    pub uptime_s: u64,
    /// The programs that are connected.
    pub clients: Vec<ClientStatus>,
    /// Sockets of the group, lane 0's and spare ones included.
    pub sockets: u32,
    /// Sockets of returned lanes that some process still holds (a forked child).
    pub lingering: u32,
    /// Packets.
    pub counters: Counters,
}

/// What one program holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Process id as the service's pid namespace shows it (0: from a foreign pid namespace).
    pub pid: u32,
    /// User id as the service's user namespace shows it.
    pub uid: u32,
    /// What the program calls itself.
    pub program: String,
    /// Seconds since it connected.
    pub age_s: u64,
    /// Its lanes.
    pub lanes: Vec<u16>,
}

/// Packets that the service touched. Every one is counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Counters {
    /// Arrived at lane 0.
    pub strays: u64,
    /// Handed in by lanes.
    pub relay_in: u64,
    /// Forwarded to the right lane.
    pub relay_out: u64,
    /// Too short to hold a QP number.
    pub drop_short: u64,
    /// For a lane that nobody leases (lane 0 included).
    pub drop_no_lane: u64,
    /// The right lane's relay was full or gone.
    pub drop_full: u64,
    /// A lane handed in a packet for itself.
    pub drop_loop: u64,
}
