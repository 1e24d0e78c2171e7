//! Flow steering. A rule is an `ibv_flow_attr` with its specifications behind it, one after the other.

use crate::ibv_context;

/// `struct ibv_flow_attr`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ibv_flow_attr {
    pub comp_mask: u32,
    pub type_: u32,
    pub size: u16,
    pub priority: u16,
    pub num_of_specs: u8,
    pub port: u8,
    pub flags: u32,
}

/// `struct ibv_flow`.
#[repr(C)]
pub struct ibv_flow {
    pub comp_mask: u32,
    pub context: *mut ibv_context,
    pub handle: u32,
}

/// What all specifications begin with: `hdr` of `struct ibv_flow_spec`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ibv_flow_spec_hdr {
    pub type_: u32,
    pub size: u16,
}

/// `struct ibv_flow_eth_filter`. Numbers are big-endian, here and below.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ibv_flow_eth_filter {
    pub dst_mac: [u8; 6],
    pub src_mac: [u8; 6],
    pub ether_type: u16,
    pub vlan_tag: u16,
}

/// `struct ibv_flow_ipv4_filter`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ibv_flow_ipv4_filter {
    pub src_ip: u32,
    pub dst_ip: u32,
}

/// `struct ibv_flow_ipv4_ext_filter`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ibv_flow_ipv4_ext_filter {
    pub src_ip: u32,
    pub dst_ip: u32,
    pub proto: u8,
    pub tos: u8,
    pub ttl: u8,
    pub flags: u8,
}

/// `struct ibv_flow_ipv6_filter`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ibv_flow_ipv6_filter {
    pub src_ip: [u8; 16],
    pub dst_ip: [u8; 16],
    pub flow_label: u32,
    pub next_hdr: u8,
    pub traffic_class: u8,
    pub hop_limit: u8,
}

/// `struct ibv_flow_tcp_udp_filter`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ibv_flow_tcp_udp_filter {
    pub dst_port: u16,
    pub src_port: u16,
}

/// `struct ibv_flow_spec_eth` and those of the other headers: type, size, what is wanted, and which bits of it count.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ibv_flow_spec_of<T> {
    pub type_: u32,
    pub size: u16,
    pub val: T,
    pub mask: T,
}

/// `struct ibv_flow_spec_action_tag`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ibv_flow_spec_action_tag {
    pub type_: u32,
    pub size: u16,
    pub tag_id: u32,
}

/// `struct ibv_flow_spec_action_drop`.
pub type ibv_flow_spec_action_drop = ibv_flow_spec_hdr;

/// `struct ibv_flow_spec_counter_action`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_flow_spec_counter_action {
    pub type_: u32,
    pub size: u16,
    pub counters: *mut ibv_counters,
}

/// `struct ibv_counters`.
#[repr(C)]
pub struct ibv_counters {
    pub context: *mut ibv_context,
}

/// `struct ibv_counters_init_attr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_counters_init_attr {
    pub comp_mask: u32,
}

/// `struct ibv_counter_attach_attr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_counter_attach_attr {
    pub counter_desc: u32,
    pub index: u32,
    pub comp_mask: u32,
}
