//! The private interface by which `librdmacm.so.1` reaches the connection manager: the functions `ferroce_cm_*` of `libibverbs.so.1`,
//! version node `FERROCE_PRIVATE_1`. From the first release on, whatever changes here needs a new node: programs may load the two libraries of
//! two installations. Before it there are no two that have to fit: the node has what is there, and both libraries come from one build.

use std::ffi::{c_char, c_int};

use crate::ibv_gid;

/// Most private data of any event, in bytes.
pub const PRIVATE_DATA_MAX: usize = 256;

/// The way to a peer. Addresses are GIDs: IPv4 as `::ffff:a.b.c.d`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ferroce_cm_path {
    pub local: ibv_gid,
    pub remote: ibv_gid,
    /// Interface of a link-local address, else 0.
    pub ifindex: u32,
    pub flow_label: u32,
    /// Code: 1 is 256 bytes, 5 is 4096.
    pub mtu: u8,
    /// Code: 4.096 us * 2^code.
    pub ack_timeout: u8,
    pub traffic_class: u8,
    pub hop_limit: u8,
    /// Index of `local` in the device's GID table.
    pub sgid_index: u32,
    /// Name of the device, with its NUL.
    pub device: [c_char; 64],
}

/// Told of the end of a wait: its cookie, and 0 or an error number.
pub type ferroce_cm_told = extern "C" fn(cookie: u64, errno: c_int);

/// What one end says of its queue pair.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ferroce_cm_param {
    pub qpn: u32,
    /// Of datagram queue pairs.
    pub qkey: u32,
    pub ece_vendor: u32,
    pub ece_options: u32,
    /// `IBV_QPT_*`.
    pub qp_type: u8,
    pub srq: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub _padding: u8,
}

/// Nothing belongs to the event.
pub const DETAIL_NONE: u32 = 0;
/// Of CONNECT_REQUEST: listener, addresses, path, param.
pub const DETAIL_REQUEST: u32 = 1;
/// Of CONNECT_RESPONSE: param.
pub const DETAIL_RESPONSE: u32 = 2;
/// Of ESTABLISHED of a datagram id: `param.qpn`, `param.qkey`.
pub const DETAIL_DATAGRAM: u32 = 3;

/// An event.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ferroce_cm_event {
    /// The id; of a CONNECT_REQUEST the new one.
    pub id: u64,
    pub listener: u64,
    /// `enum rdma_cm_event_type`.
    pub event: u32,
    pub status: i32,
    /// `DETAIL_*`: which of the fields below mean something.
    pub detail: u32,
    /// The new id of a CONNECT_REQUEST is for datagrams.
    pub datagram: u32,
    pub local: libc::sockaddr_storage,
    pub peer: libc::sockaddr_storage,
    pub path: ferroce_cm_path,
    pub param: ferroce_cm_param,
    pub private_data_len: u32,
    pub private_data: [u8; PRIVATE_DATA_MAX],
}

/// What brings a queue pair to RTR and RTS.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ferroce_cm_qp {
    pub path: ferroce_cm_path,
    pub dest_qpn: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub max_dest_rd_atomic: u8,
    pub max_rd_atomic: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    /// `IBV_QPT_*`.
    pub qp_type: u8,
}

/// Longest text of [`ferroce_cm_kept`].
pub const KEPT_MAX: usize = 1020;

/// An established connection as the service that comes after a crash needs it; only the library that wrote it reads it.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ferroce_cm_kept {
    pub len: u32,
    pub text: [u8; KEPT_MAX],
}
