//! What programs are told: the events of librdmacm.

use std::net::SocketAddr;

use ferroce_wire::mad::{Ece, RejReason, SidrStatus};

use crate::error::errno;
use crate::{CmId, ConnectionParam, Owner, Path, Service};

/// Private data of a message, padded with zeros to all that the message carries, as kernels deliver it.
pub type PrivateData = Box<[u8]>;

/// Something that the owner of an id is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The id. Of a connect request: the new one.
    pub id: CmId,
    /// Its owner.
    pub owner: Owner,
    /// What happened.
    pub kind: EventKind,
}

/// `enum rdma_cm_event_type`, as far as the connection manager raises them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A peer wants a connection or an answer. The id is new and belongs to the listener's owner, which accepts, rejects or
    /// destroys it; [`Cm::take_request`](crate::Cm::take_request) gives its place in the backlog free.
    ConnectRequest(Box<ConnectRequest>),
    /// The peer accepted. The program (or the library for it) brings its queue pair to RTS and calls
    /// [`Cm::establish`](crate::Cm::establish).
    ConnectResponse {
        /// What the peer said about its end, responder resources and initiator depth seen from ours.
        param: ConnectionParam,
        /// 196 bytes.
        private_data: PrivateData,
        /// Options of the peer's driver.
        ece: Ece,
    },
    /// The active end is ready too.
    Established,
    /// The service id is resolved. For librdmacm this is `RDMA_CM_EVENT_ESTABLISHED` too.
    Resolved {
        /// The peer's datagram queue pair.
        qpn: u32,
        /// Its Q_Key.
        qkey: u32,
        /// 136 bytes.
        private_data: PrivateData,
        /// Options of the peer's driver.
        ece: Ece,
    },
    /// The peer rejected the connection.
    Rejected {
        /// Why.
        reason: RejReason,
        /// 148 bytes.
        private_data: PrivateData,
    },
    /// The peer did not resolve the service id. For librdmacm this is `RDMA_CM_EVENT_UNREACHABLE`.
    NotResolved {
        /// Why.
        status: SidrStatus,
        /// 136 bytes.
        private_data: PrivateData,
    },
    /// The peer did not answer in time.
    Unreachable,
    /// The answer could not be taken: the peer's queue pair or communication id is in another connection already.
    ConnectError,
    /// The connection ended.
    Disconnected {
        /// The peer did not confirm it in time.
        timed_out: bool,
    },
    /// Packets of the connection are gone from the network: its queue pair may be used again.
    TimewaitExit,
}

impl EventKind {
    /// The number of `enum rdma_cm_event_type`.
    pub const fn code(&self) -> u32 {
        match self {
            EventKind::ConnectRequest(_) => 4,
            EventKind::ConnectResponse { .. } => 5,
            EventKind::ConnectError => 6,
            EventKind::Unreachable | EventKind::NotResolved { .. } => 7,
            EventKind::Rejected { .. } => 8,
            EventKind::Established | EventKind::Resolved { .. } => 9,
            EventKind::Disconnected { .. } => 10,
            EventKind::TimewaitExit => 15,
        }
    }

    /// `rdma_cm_event.status`: 0, a negative errno, or the peer's code.
    pub const fn status(&self) -> i32 {
        match self {
            EventKind::Rejected { reason, .. } => reason.0 as i32,
            EventKind::NotResolved { status, .. } => status.0 as i32,
            EventKind::Unreachable | EventKind::Disconnected { timed_out: true } => -errno::ETIMEDOUT,
            EventKind::ConnectError => -errno::EINVAL,
            _ => 0,
        }
    }

    /// The name without `RDMA_CM_EVENT_`.
    pub const fn name(&self) -> &'static str {
        match self {
            EventKind::ConnectRequest(_) => "CONNECT_REQUEST",
            EventKind::ConnectResponse { .. } => "CONNECT_RESPONSE",
            EventKind::ConnectError => "CONNECT_ERROR",
            EventKind::Unreachable | EventKind::NotResolved { .. } => "UNREACHABLE",
            EventKind::Rejected { .. } => "REJECTED",
            EventKind::Established | EventKind::Resolved { .. } => "ESTABLISHED",
            EventKind::Disconnected { .. } => "DISCONNECTED",
            EventKind::TimewaitExit => "TIMEWAIT_EXIT",
        }
    }
}

/// What a peer asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// Where it arrived.
    pub listener: CmId,
    /// Connection or datagram.
    pub service: Service,
    /// The address that the peer named, with the listener's port.
    pub local: SocketAddr,
    /// The peer's address and port.
    pub peer: SocketAddr,
    /// The path to the peer.
    pub path: Path,
    /// What the peer said about its end, responder resources and initiator depth seen from ours. Of a datagram request all zero.
    pub param: ConnectionParam,
    /// The peer's CA GUID; 0 of a datagram request.
    pub ca_guid: u64,
    /// 56 bytes, or 180 of a datagram request.
    pub private_data: PrivateData,
    /// Options of the peer's driver.
    pub ece: Ece,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_librdmacm() {
        let empty = PrivateData::default;
        for (kind, code, status) in [
            (EventKind::Established, 9, 0),
            (EventKind::Unreachable, 7, -110),
            (EventKind::NotResolved { status: SidrStatus::REJECTED, private_data: empty() }, 7, 2),
            (EventKind::Rejected { reason: RejReason::CONSUMER_DEFINED, private_data: empty() }, 8, 28),
            (EventKind::ConnectError, 6, -22),
            (EventKind::Disconnected { timed_out: false }, 10, 0),
            (EventKind::Disconnected { timed_out: true }, 10, -110),
            (EventKind::TimewaitExit, 15, 0),
        ] {
            assert_eq!((kind.code(), kind.status()), (code, status), "{}", kind.name());
        }
    }
}
