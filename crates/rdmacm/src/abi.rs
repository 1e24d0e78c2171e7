//! Structures and numbers of `rdma_cma.h`, x86-64 and AArch64 Linux.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{offset_of, size_of};

use ferroce_abi::{
    ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_gid, ibv_pd, ibv_qp, ibv_sa_path_rec, ibv_srq,
};
use libc::sockaddr_storage;

pub(crate) const PS_IPOIB: c_int = 0x0002;
pub(crate) const PS_TCP: c_int = 0x0106;
pub(crate) const PS_UDP: c_int = 0x0111;
pub(crate) const PS_IB: c_int = 0x013f;

pub(crate) const QPT_RC: c_int = 2;
pub(crate) const QPT_UC: c_int = 3;
pub(crate) const QPT_UD: c_int = 4;
pub(crate) const QPT_XRC_SEND: c_int = 9;
pub(crate) const QPT_XRC_RECV: c_int = 10;

pub(crate) const UDP_QKEY: u32 = 0x0123_4567;

/// `enum rdma_cm_event_type`, as far as the library decides by it.
pub(crate) mod event {
    pub(crate) const ADDR_RESOLVED: u32 = 0;
    pub(crate) const ADDR_ERROR: u32 = 1;
    pub(crate) const ROUTE_RESOLVED: u32 = 2;
    pub(crate) const CONNECT_REQUEST: u32 = 4;
    pub(crate) const CONNECT_RESPONSE: u32 = 5;
    pub(crate) const CONNECT_ERROR: u32 = 6;
    pub(crate) const UNREACHABLE: u32 = 7;
    pub(crate) const REJECTED: u32 = 8;
    pub(crate) const ESTABLISHED: u32 = 9;
    pub(crate) const DISCONNECTED: u32 = 10;
    pub(crate) const MULTICAST_JOIN: u32 = 12;
    pub(crate) const MULTICAST_ERROR: u32 = 13;
}

pub(crate) const RAI_PASSIVE: c_int = 1;
pub(crate) const RAI_NUMERICHOST: c_int = 2;
pub(crate) const RAI_FAMILY: c_int = 8;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_ib_addr {
    pub sgid: ibv_gid,
    pub dgid: ibv_gid,
    pub pkey: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_addr {
    pub src: sockaddr_storage,
    pub dst: sockaddr_storage,
    pub ibaddr: rdma_ib_addr,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_route {
    pub addr: rdma_addr,
    pub path_rec: *mut ibv_sa_path_rec,
    pub num_paths: c_int,
}

#[repr(C)]
pub struct rdma_event_channel {
    pub fd: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_cm_id {
    pub verbs: *mut ibv_context,
    pub channel: *mut rdma_event_channel,
    pub context: *mut c_void,
    pub qp: *mut ibv_qp,
    pub route: rdma_route,
    pub ps: c_int,
    pub port_num: u8,
    pub event: *mut rdma_cm_event,
    pub send_cq_channel: *mut ibv_comp_channel,
    pub send_cq: *mut ibv_cq,
    pub recv_cq_channel: *mut ibv_comp_channel,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub pd: *mut ibv_pd,
    pub qp_type: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_conn_param {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_ud_param {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub ah_attr: ibv_ah_attr,
    pub qp_num: u32,
    pub qkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_cm_join_mc_attr_ex {
    pub comp_mask: u32,
    pub join_flags: u32,
    pub addr: *mut libc::sockaddr,
}

/// `struct sockaddr_ib` of rdma/ib.h: a GID where IP has an address.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct sockaddr_ib {
    pub sib_family: u16,
    pub sib_pkey: u16,
    pub sib_flowinfo: u32,
    pub sib_addr: [u8; 16],
    pub sib_sid: u64,
    pub sib_sid_mask: u64,
    pub sib_scope_id: u64,
}

impl sockaddr_ib {
    /// `AF_IB`.
    pub const FAMILY: c_int = 27;
}

/// Which member holds follows from the id's queue pair type.
#[derive(Clone, Copy)]
#[repr(C)]
pub union rdma_event_param {
    pub conn: rdma_conn_param,
    pub ud: rdma_ud_param,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_cm_event {
    pub id: *mut rdma_cm_id,
    pub listen_id: *mut rdma_cm_id,
    pub event: u32,
    pub status: c_int,
    pub param: rdma_event_param,
}

#[repr(C)]
pub struct rdma_addrinfo {
    pub ai_flags: c_int,
    pub ai_family: c_int,
    pub ai_qp_type: c_int,
    pub ai_port_space: c_int,
    pub ai_src_len: libc::socklen_t,
    pub ai_dst_len: libc::socklen_t,
    pub ai_src_addr: *mut libc::sockaddr,
    pub ai_dst_addr: *mut libc::sockaddr,
    pub ai_src_canonname: *mut c_char,
    pub ai_dst_canonname: *mut c_char,
    pub ai_route_len: usize,
    pub ai_route: *mut c_void,
    pub ai_connect_len: usize,
    pub ai_connect: *mut c_void,
    pub ai_next: *mut rdma_addrinfo,
}

/// Checks one structure: its size, then the offset of each field.
macro_rules! layout {
    ($type:ty, $size:literal $(, $field:ident @ $offset:literal)* $(,)?) => {
        const _: () = {
            assert!(size_of::<$type>() == $size);
            $(assert!(offset_of!($type, $field) == $offset);)*
        };
    };
}

layout!(rdma_ib_addr, 40, sgid @ 0, dgid @ 16, pkey @ 32);
layout!(rdma_addr, 296, src @ 0, dst @ 128, ibaddr @ 256);
layout!(rdma_route, 312, addr @ 0, path_rec @ 296, num_paths @ 304);
layout!(rdma_event_channel, 4, fd @ 0);
layout!(rdma_cm_id, 416, verbs @ 0, channel @ 8, context @ 16, qp @ 24, route @ 32, ps @ 344, port_num @ 348, event @ 352, send_cq_channel @ 360, send_cq @ 368, recv_cq_channel @ 376, recv_cq @ 384, srq @ 392, pd @ 400, qp_type @ 408);
layout!(rdma_conn_param, 24, private_data @ 0, private_data_len @ 8, responder_resources @ 9, initiator_depth @ 10, flow_control @ 11, retry_count @ 12, rnr_retry_count @ 13, srq @ 14, qp_num @ 16);
layout!(rdma_ud_param, 56, private_data @ 0, private_data_len @ 8, ah_attr @ 16, qp_num @ 48, qkey @ 52);
layout!(rdma_cm_join_mc_attr_ex, 16, comp_mask @ 0, join_flags @ 4, addr @ 8);
layout!(sockaddr_ib, 48, sib_family @ 0, sib_pkey @ 2, sib_flowinfo @ 4, sib_addr @ 8, sib_sid @ 24, sib_sid_mask @ 32, sib_scope_id @ 40);
layout!(rdma_cm_event, 80, id @ 0, listen_id @ 8, event @ 16, status @ 20, param @ 24);
layout!(rdma_addrinfo, 96, ai_flags @ 0, ai_family @ 4, ai_qp_type @ 8, ai_port_space @ 12, ai_src_len @ 16, ai_dst_len @ 20, ai_src_addr @ 24, ai_dst_addr @ 32, ai_src_canonname @ 40, ai_dst_canonname @ 48, ai_route_len @ 56, ai_route @ 64, ai_connect_len @ 72, ai_connect @ 80, ai_next @ 88);
