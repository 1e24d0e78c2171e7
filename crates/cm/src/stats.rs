//! Counters.

use crate::DropReason;

/// What happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Datagrams sent, with those sent again.
    pub tx_msgs: u64,
    /// Datagrams sent again because no answer came.
    pub tx_retries: u64,
    /// Datagrams that were not sent because the host did not take what came before.
    pub tx_overflow: u64,
    /// Datagrams received.
    pub rx_msgs: u64,
    /// Of these: no MADs of communication management.
    pub rx_malformed: u64,
    /// Of these: duplicates.
    pub rx_duplicates: u64,
    /// Of these: without meaning in their connection's state.
    pub rx_stray: u64,
    /// Of these: for unknown communication ids.
    pub rx_unknown_id: u64,
    /// Of these: from another address than the connection's peer, or with fields that are not the connection's.
    pub rx_forged: u64,
    /// Of these: rejected, or not resolved.
    pub rx_rejected: u64,
    /// Of these: dropped because a backlog or another limit was reached.
    pub rx_limited: u64,
    /// Messages that got no answer in time.
    pub timeouts: u64,
    /// Ids that lingered and went before their time.
    pub lingering_evicted: u64,
}

impl Stats {
    pub(crate) fn count(&mut self, reason: &DropReason) {
        let counter = match reason {
            DropReason::Malformed(_) => &mut self.rx_malformed,
            DropReason::Duplicate { .. } => &mut self.rx_duplicates,
            DropReason::Stray { .. } => &mut self.rx_stray,
            DropReason::UnknownId { .. } => &mut self.rx_unknown_id,
            DropReason::WrongPeer { .. } | DropReason::Field { .. } => &mut self.rx_forged,
            DropReason::Rejected(_) | DropReason::IpHeader(_) | DropReason::NotResolved => &mut self.rx_rejected,
            DropReason::Closing
            | DropReason::BacklogFull
            | DropReason::PeerLimit
            | DropReason::OwnerLimit
            | DropReason::UserLimit
            | DropReason::IdLimit => &mut self.rx_limited,
        };
        *counter += 1;
    }
}
