//! Messages about connections. Numbers are those of `rdma_cma.h` and of the wire; all are open, and what cannot be is refused.

use std::net::{IpAddr, SocketAddr};

use ferroce_cm as cm;
use ferroce_wire::mad::{Ece as WireEce, PortSpace};
use serde::{Deserialize, Serialize};

/// Longest event, in bytes.
pub const EVENT_BYTES_MAX: usize = 4096;

/// What a program asks. Ids and channels are the program's own, or the request is refused with EINVAL.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CmRequest {
    /// A new event channel. Answered by [`CmReply::Channel`], with the program's end of its socket.
    OpenChannel,
    /// A new id (`rdma_create_id`). Answered by [`CmReply::Id`].
    CreateId {
        /// Where its events go.
        channel: u64,
        /// `enum rdma_port_space`.
        space: u16,
        /// For UD queue pairs.
        datagram: bool,
    },
    /// Events that were not sent yet go to another channel (`rdma_migrate_id`). Answered by [`CmReply::Done`].
    Migrate {
        /// The id.
        id: u64,
        /// Where its events go from now on.
        channel: u64,
    },
    /// An address for an idle id; port 0: any. Answered by [`CmReply::Address`].
    Bind {
        /// The id.
        id: u64,
        /// The address.
        addr: SocketAddr,
        /// `RDMA_OPTION_ID_REUSEADDR`.
        reuse: bool,
        /// `RDMA_OPTION_ID_AFONLY`.
        v6_only: bool,
    },
    /// Takes requests from now on; 0: the largest backlog. Answered by [`CmReply::Done`].
    Listen {
        /// The id.
        id: u64,
        /// Requests that wait at once.
        backlog: u32,
    },
    /// Answered by [`CmReply::Done`], and later by an event.
    Connect {
        /// The id.
        id: u64,
        /// The way there.
        path: Path,
        /// Port at the peer.
        port: u16,
        /// The queue pair, which must be in a lane of the program.
        param: Param,
        /// At most 56 bytes.
        private_data: Vec<u8>,
        /// Options of the driver.
        ece: Ece,
    },
    /// Connect of a datagram id. Answered by [`CmReply::Done`], and later by an event.
    Resolve {
        /// The id.
        id: u64,
        /// The way there.
        path: Path,
        /// Port at the peer.
        port: u16,
        /// At most 180 bytes.
        private_data: Vec<u8>,
    },
    /// Takes a request for a connection. Answered by [`CmReply::Done`], and later by an event.
    Accept {
        /// The id.
        id: u64,
        /// The queue pair, which must be in a lane of the program.
        param: Param,
        /// At most 196 bytes.
        private_data: Vec<u8>,
        /// Options of the driver.
        ece: Ece,
    },
    /// Answers the resolution of a service id. Answered by [`CmReply::Done`].
    AcceptDatagram {
        /// The id.
        id: u64,
        /// The queue pair, which must be in a lane of the program.
        qpn: u32,
        /// Its Q_Key.
        qkey: u32,
        /// At most 136 bytes.
        private_data: Vec<u8>,
        /// Options of the driver.
        ece: Ece,
    },
    /// Rejects a request or a reply. Answered by [`CmReply::Done`].
    Reject {
        /// The id.
        id: u64,
        /// `enum ib_cm_rej_reason`: 28 by the program, 35 because of the driver's options.
        reason: u16,
        /// At most 148 bytes, or 136 for a datagram request.
        private_data: Vec<u8>,
    },
    /// The active end is ready. Answered by [`CmReply::Done`].
    Establish {
        /// The id.
        id: u64,
    },
    /// The passive end has received something (`IBV_EVENT_COMM_EST`). Answered by [`CmReply::Done`].
    Notify {
        /// The id.
        id: u64,
    },
    /// Ends a connection, or agrees to its end. Answered by [`CmReply::Done`].
    Disconnect {
        /// The id.
        id: u64,
    },
    /// Gives an id up. Events that are on the channel already may still be read there. Answered by [`CmReply::Done`].
    Destroy {
        /// The id.
        id: u64,
    },
    /// What the queue pair needs (`rdma_init_qp_attr`). Answered by [`CmReply::QpParameters`].
    QpParameters {
        /// The id.
        id: u64,
    },
    /// What a service that is started anew needs to go on with an established connection. Answered by [`CmReply::Kept`].
    Keep {
        /// The id.
        id: u64,
    },
    /// Goes on with a connection of a service that crashed. Answered by [`CmReply::Id`]; EBUSY or EINVAL: another connection has
    /// its queue pair or its numbers.
    Adopt {
        /// Where its events go.
        channel: u64,
        /// From [`CmReply::Kept`].
        connection: Kept,
    },
}

impl CmRequest {
    /// The id that it is about, as programs number it. None: it is about a channel, or about an id to come.
    pub(crate) fn id(&self) -> Option<u64> {
        match *self {
            CmRequest::OpenChannel | CmRequest::CreateId { .. } | CmRequest::Adopt { .. } => None,
            CmRequest::Migrate { id, .. }
            | CmRequest::Bind { id, .. }
            | CmRequest::Listen { id, .. }
            | CmRequest::Connect { id, .. }
            | CmRequest::Resolve { id, .. }
            | CmRequest::Accept { id, .. }
            | CmRequest::AcceptDatagram { id, .. }
            | CmRequest::Reject { id, .. }
            | CmRequest::Establish { id }
            | CmRequest::Notify { id }
            | CmRequest::Disconnect { id }
            | CmRequest::Destroy { id }
            | CmRequest::QpParameters { id }
            | CmRequest::Keep { id } => Some(id),
        }
    }
}

/// What the service answers; a refusal is [`Reply::Error`](crate::protocol::Reply::Error).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CmReply {
    /// To `OpenChannel`.
    Channel {
        /// Its number.
        channel: u64,
    },
    /// To `CreateId` and `Adopt`.
    Id {
        /// Its number.
        id: u64,
    },
    /// To `Bind`.
    Address {
        /// With its port.
        addr: SocketAddr,
    },
    /// To `QpParameters`.
    QpParameters(QpParameters),
    /// To `Keep`.
    Kept(Kept),
    /// To the others.
    Done,
}

/// An event: one datagram on its channel's socket, JSON. For each CONNECT_REQUEST that the program takes, it sends the new id's
/// number back, 8 bytes little-endian: that gives a place in the backlog free.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CmEvent {
    /// The id; of a CONNECT_REQUEST the new one.
    pub id: u64,
    /// `enum rdma_cm_event_type`.
    pub code: u32,
    /// As `rdma_cm_event.status`.
    pub status: i32,
    /// What the peer's program said, padded with zeros to all that the message carries.
    pub private_data: Vec<u8>,
    /// What belongs to the event.
    pub detail: Detail,
}

/// What belongs to an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Detail {
    /// Nothing.
    None,
    /// Of CONNECT_REQUEST.
    Request {
        /// Where it arrived.
        listener: u64,
        /// For a UD queue pair.
        datagram: bool,
        /// Our address, with the listener's port.
        local: SocketAddr,
        /// The peer's.
        peer: SocketAddr,
        /// The path to the peer.
        path: Path,
        /// The peer's end, resources and depth seen from ours.
        param: Param,
        /// Options of the peer's driver.
        ece: Ece,
    },
    /// Of CONNECT_RESPONSE.
    Response {
        /// The peer's end, resources and depth seen from ours.
        param: Param,
        /// Options of the peer's driver.
        ece: Ece,
    },
    /// Of ESTABLISHED of a datagram id.
    Datagram {
        /// The peer's queue pair.
        qpn: u32,
        /// Its Q_Key.
        qkey: u32,
        /// Options of the peer's driver.
        ece: Ece,
    },
}

/// Types of queue pairs that connect; see [`cm::QpType`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum QpType {
    #[default]
    Rc,
    Uc,
    XrcInitiator,
    XrcTarget,
}

/// `struct rdma_conn_param` without private data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Param {
    pub qpn: u32,
    pub qp_type: QpType,
    pub srq: bool,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: bool,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
}

/// `struct ibv_ece`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Ece {
    pub vendor_id: u32,
    pub attr_mod: u32,
}

/// The way to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Path {
    pub local: IpAddr,
    pub remote: IpAddr,
    /// 0: as the routing table says.
    pub ifindex: u32,
    /// Code: 1 is 256 bytes, 5 is 4096.
    pub mtu: u8,
    /// Code: 4.096 us * 2^code.
    pub ack_timeout: u8,
    pub traffic_class: u8,
    pub flow_label: u32,
    pub hop_limit: u8,
}

/// What brings a queue pair to RTR and RTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct QpParameters {
    pub path: Path,
    pub dest_qpn: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub max_dest_rd_atomic: u8,
    pub max_rd_atomic: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub qp_type: QpType,
}

/// An established connection, for the service that comes after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Kept {
    pub space: u16,
    pub active: bool,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub path: Path,
    pub comm_id: u32,
    pub remote_comm_id: u32,
    pub remote_ca_guid: u64,
    pub param: Param,
    pub remote_qpn: u32,
    pub psn: u32,
    pub remote_psn: u32,
    pub tid: u64,
}

impl From<cm::Established> for Kept {
    fn from(established: cm::Established) -> Kept {
        Kept {
            space: established.space as u16,
            active: established.active,
            local: established.local,
            peer: established.peer,
            path: established.path.into(),
            comm_id: established.comm_id,
            remote_comm_id: established.remote_comm_id,
            remote_ca_guid: established.remote_ca_guid,
            param: established.param.into(),
            remote_qpn: established.remote_qpn,
            psn: established.psn,
            remote_psn: established.remote_psn,
            tid: established.tid,
        }
    }
}

impl Kept {
    /// For the machine. `None`: there is no such port space.
    pub(crate) fn established(&self) -> Option<cm::Established> {
        Some(cm::Established {
            space: PortSpace::from_number(self.space)?,
            active: self.active,
            local: self.local,
            peer: self.peer,
            path: self.path.into(),
            comm_id: self.comm_id,
            remote_comm_id: self.remote_comm_id,
            remote_ca_guid: self.remote_ca_guid,
            param: self.param.into(),
            remote_qpn: self.remote_qpn,
            psn: self.psn,
            remote_psn: self.remote_psn,
            tid: self.tid,
        })
    }
}

impl From<QpType> for cm::QpType {
    fn from(qp_type: QpType) -> cm::QpType {
        match qp_type {
            QpType::Rc => cm::QpType::Rc,
            QpType::Uc => cm::QpType::Uc,
            QpType::XrcInitiator => cm::QpType::XrcInitiator,
            QpType::XrcTarget => cm::QpType::XrcTarget,
        }
    }
}

impl From<cm::QpType> for QpType {
    fn from(qp_type: cm::QpType) -> QpType {
        match qp_type {
            cm::QpType::Rc => QpType::Rc,
            cm::QpType::Uc => QpType::Uc,
            cm::QpType::XrcInitiator => QpType::XrcInitiator,
            cm::QpType::XrcTarget => QpType::XrcTarget,
        }
    }
}

impl From<Param> for cm::ConnectionParam {
    fn from(param: Param) -> cm::ConnectionParam {
        cm::ConnectionParam {
            qpn: param.qpn,
            qp_type: param.qp_type.into(),
            srq: param.srq,
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            flow_control: param.flow_control,
            retry_count: param.retry_count,
            rnr_retry_count: param.rnr_retry_count,
        }
    }
}

impl From<cm::ConnectionParam> for Param {
    fn from(param: cm::ConnectionParam) -> Param {
        Param {
            qpn: param.qpn,
            qp_type: param.qp_type.into(),
            srq: param.srq,
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            flow_control: param.flow_control,
            retry_count: param.retry_count,
            rnr_retry_count: param.rnr_retry_count,
        }
    }
}

impl From<Ece> for WireEce {
    fn from(ece: Ece) -> WireEce {
        WireEce { vendor_id: ece.vendor_id, attr_mod: ece.attr_mod }
    }
}

impl From<WireEce> for Ece {
    fn from(ece: WireEce) -> Ece {
        Ece { vendor_id: ece.vendor_id, attr_mod: ece.attr_mod }
    }
}

impl From<Path> for cm::Path {
    fn from(path: Path) -> cm::Path {
        cm::Path {
            ifindex: path.ifindex,
            mtu: path.mtu,
            ack_timeout: path.ack_timeout,
            traffic_class: path.traffic_class,
            flow_label: path.flow_label,
            hop_limit: path.hop_limit,
            ..cm::Path::new(path.local.to_canonical(), path.remote.to_canonical())
        }
    }
}

impl From<cm::Path> for Path {
    fn from(path: cm::Path) -> Path {
        Path {
            local: path.local,
            remote: path.remote,
            ifindex: path.ifindex,
            mtu: path.mtu,
            ack_timeout: path.ack_timeout,
            traffic_class: path.traffic_class,
            flow_label: path.flow_label,
            hop_limit: path.hop_limit,
        }
    }
}

impl From<cm::QpParameters> for QpParameters {
    fn from(parameters: cm::QpParameters) -> QpParameters {
        QpParameters {
            path: parameters.path.into(),
            dest_qpn: parameters.dest_qpn,
            rq_psn: parameters.rq_psn,
            sq_psn: parameters.sq_psn,
            max_dest_rd_atomic: parameters.max_dest_rd_atomic,
            max_rd_atomic: parameters.max_rd_atomic,
            retry_cnt: parameters.retry_cnt,
            rnr_retry: parameters.rnr_retry,
            qp_type: parameters.qp_type.into(),
        }
    }
}

impl From<cm::Event> for CmEvent {
    fn from(event: cm::Event) -> CmEvent {
        use cm::EventKind as Kind;
        let (id, code, status) = (event.id.number(), event.kind.code(), event.kind.status());
        let (private_data, detail) = match event.kind {
            Kind::ConnectRequest(request) => {
                let detail = Detail::Request {
                    listener: request.listener.number(),
                    datagram: request.service == cm::Service::Datagram,
                    local: request.local,
                    peer: request.peer,
                    path: request.path.into(),
                    param: request.param.into(),
                    ece: request.ece.into(),
                };
                (request.private_data, detail)
            }
            Kind::ConnectResponse { param, private_data, ece } => {
                (private_data, Detail::Response { param: param.into(), ece: ece.into() })
            }
            Kind::Resolved { qpn, qkey, private_data, ece } => {
                (private_data, Detail::Datagram { qpn, qkey, ece: ece.into() })
            }
            Kind::Rejected { private_data, .. } | Kind::NotResolved { private_data, .. } => {
                (private_data, Detail::None)
            }
            Kind::Established
            | Kind::Unreachable
            | Kind::ConnectError
            | Kind::Disconnected { .. }
            | Kind::TimewaitExit => (Box::default(), Detail::None),
        };
        CmEvent { id, code, status, private_data: private_data.into(), detail }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;
    use crate::protocol::{REQUEST_BYTES_MAX, Request, decode, encode};

    fn path() -> Path {
        let ip = IpAddr::V6(Ipv6Addr::from([0xfe; 16]));
        Path {
            local: ip,
            remote: ip,
            ifindex: u32::MAX,
            mtu: 5,
            ack_timeout: 31,
            traffic_class: 255,
            flow_label: 0xf_ffff,
            hop_limit: 255,
        }
    }

    const PARAM: Param = Param {
        qpn: 0xff_ffff,
        qp_type: QpType::Uc,
        srq: true,
        responder_resources: 255,
        initiator_depth: 255,
        flow_control: true,
        retry_count: 7,
        rnr_retry_count: 7,
    };

    const ECE: Ece = Ece { vendor_id: u32::MAX, attr_mod: u32::MAX };

    #[test]
    fn the_longest_messages_fit() {
        let accept = CmRequest::Accept { id: u64::MAX, param: PARAM, private_data: vec![255; 196], ece: ECE };
        let connect = CmRequest::Connect {
            id: u64::MAX,
            path: path(),
            port: u16::MAX,
            param: PARAM,
            private_data: vec![255; 56],
            ece: ECE,
        };
        for request in [accept, connect] {
            let bytes = encode(u64::MAX, Request::Cm(request.clone()));
            assert!(bytes.len() < REQUEST_BYTES_MAX, "{}", bytes.len());
            assert_eq!(decode::<Request>(&bytes).unwrap().body, Request::Cm(request));
        }
        let addr = SocketAddr::new(path().local, u16::MAX);
        let event = CmEvent {
            id: u64::MAX,
            code: 4,
            status: i32::MIN,
            private_data: vec![255; 196],
            detail: Detail::Request {
                listener: u64::MAX,
                datagram: false,
                local: addr,
                peer: addr,
                path: path(),
                param: PARAM,
                ece: ECE,
            },
        };
        let bytes = serde_json::to_vec(&event).unwrap();
        assert!(bytes.len() < EVENT_BYTES_MAX, "{}", bytes.len());
        assert_eq!(serde_json::from_slice::<CmEvent>(&bytes).unwrap(), event);
    }

    #[test]
    fn values_survive() {
        assert_eq!(Param::from(cm::ConnectionParam::from(PARAM)), PARAM);
        assert_eq!(Path::from(cm::Path::from(path())), path());
        assert_eq!(Ece::from(WireEce::from(ECE)), ECE);
        let addr = SocketAddr::new(path().local, 7);
        let kept = Kept {
            space: 0x0106,
            active: true,
            local: addr,
            peer: addr,
            path: path(),
            comm_id: 1,
            remote_comm_id: 2,
            remote_ca_guid: 3,
            param: PARAM,
            remote_qpn: 4,
            psn: 5,
            remote_psn: 6,
            tid: 7,
        };
        assert_eq!(kept.established().map(Kept::from), Some(kept));
        assert_eq!(Kept { space: 1, ..kept }.established(), None);
    }
}
