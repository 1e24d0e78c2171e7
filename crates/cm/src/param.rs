//! Values that go in and out.

use std::net::{IpAddr, SocketAddr};

use ferroce_wire::mad::{Ece, Mad};

use crate::CmError;

/// Where a datagram came from, and to which of our addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// IP source.
    pub src: IpAddr,
    /// IP destination.
    pub dst: IpAddr,
    /// The interface it came in by; 0 if unknown. Needed to answer link-local addresses.
    pub ifindex: u32,
}

/// A management datagram to send, from queue pair 1 to queue pair 1. It may get lost: what matters is sent again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Addresses and IP fields.
    pub path: Path,
    /// The datagram; [`Mad::emit`] makes bytes of it.
    pub mad: Mad,
}

/// The way to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Our address.
    pub local: IpAddr,
    /// The peer's.
    pub remote: IpAddr,
    /// The interface; 0 leaves it to the routing table.
    pub ifindex: u32,
    /// Path MTU code: 1 is 256 bytes, 5 is 4096.
    pub mtu: u8,
    /// Code of the local ACK timeout: 4.096 us * 2^code. Also the length of timewait.
    pub ack_timeout: u8,
    /// Static rate code.
    pub packet_rate: u8,
    /// Traffic class or TOS.
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit or TTL.
    pub hop_limit: u8,
    /// Service level.
    pub sl: u8,
    /// Partition key.
    pub pkey: u16,
}

impl Path {
    /// A path of 1024 bytes MTU with the other values as kernels have them over RoCEv2.
    pub const fn new(local: IpAddr, remote: IpAddr) -> Path {
        Path {
            local,
            remote,
            ifindex: 0,
            mtu: 3,
            ack_timeout: 17,
            packet_rate: 0,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            sl: 0,
            pkey: 0xffff,
        }
    }
}

/// Types of queue pairs that connect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum QpType {
    #[default]
    Rc,
    Uc,
    /// The end of an XRC connection that sends requests (`IBV_QPT_XRC_SEND`); it connects.
    XrcInitiator,
    /// The end that takes them (`IBV_QPT_XRC_RECV`); it accepts.
    XrcTarget,
}

/// `struct rdma_conn_param`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionParam {
    /// The queue pair's number.
    pub qpn: u32,
    /// Its type.
    pub qp_type: QpType,
    /// It has a shared receive queue.
    pub srq: bool,
    /// READs and atomics that the end takes at once.
    pub responder_resources: u8,
    /// READs and atomics that the end issues at once.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// How often the peer shall send again, 0 to 7; only connect says it.
    pub retry_count: u8,
    /// How often the peer shall send again after RNR, 0 to 7.
    pub rnr_retry_count: u8,
}

/// What connect needs.
#[derive(Clone, Copy, Debug)]
pub struct ConnectParam<'a> {
    /// The way there.
    pub path: Path,
    /// The port at the peer; the address is the path's.
    pub port: u16,
    /// GUID of the device that the queue pair belongs to.
    pub ca_guid: u64,
    /// The queue pair and what it can do.
    pub param: ConnectionParam,
    /// At most [`CONNECT_PRIVATE_DATA`](crate::CONNECT_PRIVATE_DATA) bytes.
    pub private_data: &'a [u8],
    /// Options of the driver.
    pub ece: Ece,
}

/// What accept needs.
#[derive(Clone, Copy, Debug)]
pub struct AcceptParam<'a> {
    /// GUID of the device that the queue pair belongs to.
    pub ca_guid: u64,
    /// The queue pair and what it can do; type and retry count are the request's.
    pub param: ConnectionParam,
    /// At most [`ACCEPT_PRIVATE_DATA`](crate::ACCEPT_PRIVATE_DATA) bytes.
    pub private_data: &'a [u8],
    /// Options of the driver.
    pub ece: Ece,
}

/// What the resolution of a service id needs.
#[derive(Clone, Copy, Debug)]
pub struct ResolveParam<'a> {
    /// The way there.
    pub path: Path,
    /// The port at the peer; the address is the path's.
    pub port: u16,
    /// At most [`RESOLVE_PRIVATE_DATA`](crate::RESOLVE_PRIVATE_DATA) bytes.
    pub private_data: &'a [u8],
}

/// What the answer to the resolution of a service id needs.
#[derive(Clone, Copy, Debug)]
pub struct AcceptDatagramParam<'a> {
    /// The datagram queue pair.
    pub qpn: u32,
    /// Its Q_Key.
    pub qkey: u32,
    /// At most [`ANSWER_PRIVATE_DATA`](crate::ANSWER_PRIVATE_DATA) bytes.
    pub private_data: &'a [u8],
    /// Options of the driver.
    pub ece: Ece,
}

/// How an id is bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BindOptions {
    /// `RDMA_OPTION_ID_REUSEADDR`: others with the same option may have the same address until one of them listens.
    pub reuse: bool,
    /// `RDMA_OPTION_ID_AFONLY`: the IPv6 wildcard does not stand for IPv4 as well.
    pub v6_only: bool,
}

/// The attributes that bring the queue pair of a connection to RTR and RTS (`rdma_init_qp_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpParameters {
    /// Our queue pair; 0 before accept.
    pub qpn: u32,
    /// The peer's queue pair.
    pub dest_qpn: u32,
    /// First PSN that we receive.
    pub rq_psn: u32,
    /// First PSN that we send.
    pub sq_psn: u32,
    /// The path, with MTU and local ACK timeout.
    pub path: Path,
    /// READs and atomics that we take at once.
    pub max_dest_rd_atomic: u8,
    /// READs and atomics that we issue at once.
    pub max_rd_atomic: u8,
    /// How often we send again.
    pub retry_cnt: u8,
    /// How often we send again after RNR.
    pub rnr_retry: u8,
    /// The queue pair's type.
    pub qp_type: QpType,
    /// The peer's CA GUID.
    pub remote_ca_guid: u64,
}

/// Private data with zeros up to what the message carries.
pub(crate) fn padded<const N: usize>(command: &'static str, data: &[u8]) -> Result<[u8; N], CmError> {
    let mut padded = [0; N];
    let Some(room) = padded.get_mut(..data.len()) else {
        return Err(CmError::PrivateData { command, len: data.len(), max: N });
    };
    room.copy_from_slice(data);
    Ok(padded)
}

/// The value of a field of `bits` bits.
pub(crate) fn in_range(name: &'static str, value: u64, bits: u32) -> Result<(), CmError> {
    if value >> bits == 0 { Ok(()) } else { Err(CmError::Value { name, value }) }
}

/// An address of a port in the family of `ip`; the scope of a link-local one is the path's interface.
pub(crate) fn socket_addr(ip: IpAddr, port: u16, ifindex: u32) -> SocketAddr {
    match ip {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => std::net::SocketAddrV6::new(v6, port, 0, ifindex).into(),
        ip => SocketAddr::new(ip, port),
    }
}
