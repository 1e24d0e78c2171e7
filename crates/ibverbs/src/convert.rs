//! Attributes of Ferroce as attributes of C and back.

use std::ffi::c_int;

use ferroce::limits::{self, DEVICE_ATTR};
use ferroce::{AhAttr, Device, PortAttr, QpType, QueueCaps};

use crate::abi::*;
use crate::device::c_chars;

/// Bytes of the largest message: one GiB. Longer ones would be legal on the wire (2 GiB), but nobody sends them.
const MAX_MSG_SZ: u32 = 1 << 30;
/// `active_width`: one lane.
const WIDTH_1X: u8 = 1;
/// `active_speed`: 10 Gbit/s (QDR); what a virtual port of unknown speed shows.
const SPEED_10G: u8 = 4;
/// The same in units of 100 Mbit/s.
pub(crate) const SPEED_100_MBPS: u64 = 100;

/// Entries that the GID table shows at least: addresses come and go without changing its length.
const GID_TABLE_LEN_MIN: u32 = 16;

/// Length of the GID table that programs see, used entries and free ones.
pub(crate) fn gid_table_len(used: u32) -> u32 {
    used.max(GID_TABLE_LEN_MIN)
}

/// `IBV_ODP_SUPPORT_*`: every memory region is on demand, for every operation.
mod odp {
    /// `IBV_ODP_SUPPORT` and `IBV_ODP_SUPPORT_IMPLICIT` (regions of all the address space).
    pub(super) const GENERAL: u64 = 1 << 0 | 1 << 1;
    /// SEND, RECV, SRQ_RECV.
    pub(super) const DATAGRAM: u32 = 1 << 0 | 1 << 1 | 1 << 5;
    /// WRITE besides.
    pub(super) const UNRELIABLE: u32 = DATAGRAM | 1 << 2;
    /// READ, ATOMIC, FLUSH and ATOMIC WRITE besides.
    pub(super) const RELIABLE: u32 = UNRELIABLE | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7;
}

/// `struct ibv_port_attr` of the newest form.
pub(crate) fn port_attr(port: &PortAttr) -> ibv_port_attr {
    ibv_port_attr {
        state: if port.active { consts::PORT_ACTIVE } else { consts::PORT_DOWN },
        max_mtu: mtu_enum(port.max_mtu),
        active_mtu: mtu_enum(port.active_mtu),
        gid_tbl_len: gid_table_len(port.gid_tbl_len) as c_int,
        port_cap_flags: consts::PORT_CAPS,
        max_msg_sz: MAX_MSG_SZ,
        bad_pkey_cntr: 0,
        qkey_viol_cntr: 0,
        pkey_tbl_len: limits::MAX_PKEYS,
        lid: 0,
        sm_lid: 0,
        lmc: 0,
        max_vl_num: 1,
        sm_sl: 0,
        subnet_timeout: 0,
        init_type_reply: 0,
        active_width: WIDTH_1X,
        active_speed: SPEED_10G,
        phys_state: if port.active { consts::PHYS_LINK_UP } else { consts::PHYS_DISABLED },
        link_layer: consts::LINK_LAYER_ETHERNET,
        flags: 0,
        port_cap_flags2: 0,
        active_speed_ex: SPEED_10G.into(),
    }
}

/// `struct ibv_device_attr`.
pub(crate) fn device_attr(device: &Device) -> ibv_device_attr {
    let limits = DEVICE_ATTR;
    ibv_device_attr {
        fw_ver: c_chars(env!("CARGO_PKG_VERSION")),
        node_guid: device.guid().to_be(),
        sys_image_guid: device.guid().to_be(),
        max_mr_size: limits.max_mr_size,
        page_size_cap: limits.page_size_cap,
        vendor_id: limits.vendor_id,
        vendor_part_id: limits.vendor_part_id,
        hw_ver: limits.hw_ver,
        max_qp: limits.max_qp as c_int,
        max_qp_wr: limits.max_qp_wr as c_int,
        device_cap_flags: limits.device_cap.bits(),
        max_sge: limits.max_sge as c_int,
        max_sge_rd: limits.max_sge_rd as c_int,
        max_cq: limits.max_cq as c_int,
        max_cqe: limits.max_cqe as c_int,
        max_mr: limits.max_mr as c_int,
        max_pd: limits.max_pd as c_int,
        max_qp_rd_atom: limits.max_qp_rd_atom as c_int,
        max_ee_rd_atom: limits.max_ee_rd_atom as c_int,
        max_res_rd_atom: limits.max_res_rd_atom as c_int,
        max_qp_init_rd_atom: limits.max_qp_init_rd_atom as c_int,
        max_ee_init_rd_atom: limits.max_ee_init_rd_atom as c_int,
        atomic_cap: limits.atomic_cap as u32,
        max_ee: limits.max_ee as c_int,
        max_rdd: limits.max_rdd as c_int,
        max_mw: limits.max_mw as c_int,
        max_raw_ipv6_qp: limits.max_raw_ipv6_qp as c_int,
        max_raw_ethy_qp: limits.max_raw_ethy_qp as c_int,
        max_mcast_grp: limits.max_mcast_grp as c_int,
        max_mcast_qp_attach: limits.max_mcast_qp_attach as c_int,
        max_total_mcast_qp_attach: limits.max_total_mcast_qp_attach as c_int,
        max_ah: limits.max_ah as c_int,
        max_fmr: limits.max_fmr as c_int,
        max_map_per_fmr: limits.max_map_per_fmr as c_int,
        max_srq: limits.max_srq as c_int,
        max_srq_wr: limits.max_srq_wr as c_int,
        max_srq_sge: limits.max_srq_sge as c_int,
        max_pkeys: limits.max_pkeys,
        local_ca_ack_delay: limits.local_ca_ack_delay,
        phys_port_cnt: limits.phys_port_cnt,
        _padding: [0; 4],
    }
}

/// `struct ibv_device_attr_ex`: what the card does not have is zero.
pub(crate) fn device_attr_ex(device: &Device) -> ibv_device_attr_ex {
    let limits = DEVICE_ATTR;
    ibv_device_attr_ex {
        orig_attr: device_attr(device),
        comp_mask: 0,
        odp_caps: ibv_odp_caps {
            general_caps: odp::GENERAL,
            per_transport_caps: [odp::RELIABLE, odp::UNRELIABLE, odp::DATAGRAM],
        },
        // All bits of a clock that counts nanoseconds; its frequency in kHz.
        completion_timestamp_mask: u64::MAX,
        hca_core_clock: 1_000_000,
        device_cap_flags_ex: u64::from(limits.device_cap.bits()) | limits::DEVICE_CAP_EX,
        tso_caps: ibv_tso_caps { max_tso: 0, supported_qpts: 0 },
        rss_caps: ibv_rss_caps {
            supported_qpts: 1 << ferroce::QpType::RawPacket as u32,
            max_rwq_indirection_tables: limits::MAX_WQ,
            max_rwq_indirection_table_size: limits::MAX_RWQ_TABLE,
            rx_hash_fields_mask: ferroce::flow::RssFields::all().bits(),
            rx_hash_function: consts::RX_HASH_TOEPLITZ,
        },
        max_wq_type_rq: limits::MAX_WQ,
        packet_pacing_caps: ibv_packet_pacing_caps {
            qp_rate_limit_min: *limits::RATE_LIMIT.start(),
            qp_rate_limit_max: *limits::RATE_LIMIT.end(),
            supported_qpts: 1 << QpType::Rc as u32 | 1 << QpType::Uc as u32 | 1 << QpType::Ud as u32,
        },
        raw_packet_caps: 0,
        tm_caps: ibv_tm_caps {
            max_rndv_hdr_size: limits::MAX_RNDV_HDR_SIZE,
            max_num_tags: limits::MAX_NUM_TAGS,
            flags: consts::tm::CAP_RC,
            max_ops: limits::MAX_TAG_OPS,
            max_sge: limits::MAX_SGE,
        },
        cq_mod_caps: ibv_cq_moderation_caps {
            max_cq_count: limits.max_cq_count,
            max_cq_period: limits.max_cq_period_us,
        },
        max_dm_size: crate::dm::MAX_SIZE as u64,
        pci_atomic_caps: ibv_pci_atomic_caps { fetch_add: 0, swap: 0, compare_swap: 0 },
        xrc_odp_caps: odp::RELIABLE,
        phys_port_cnt_ex: limits.phys_port_cnt.into(),
    }
}

/// `enum ibv_mtu` of a path MTU in bytes.
pub(crate) fn mtu_enum(bytes: u32) -> u32 {
    assert!(bytes.is_power_of_two() && (256..=4096).contains(&bytes), "{bytes} is no path MTU");
    bytes.trailing_zeros() - 7
}

/// Bytes of an `enum ibv_mtu`.
pub(crate) fn mtu_bytes(mtu: u32) -> Option<u32> {
    (1..=5).contains(&mtu).then(|| 128 << mtu)
}

/// `struct ibv_ah_attr` as Ferroce has it.
pub(crate) fn ah_attr(c: &ibv_ah_attr) -> AhAttr {
    AhAttr {
        is_global: c.is_global != 0,
        dgid: c.grh.dgid.raw,
        flow_label: c.grh.flow_label,
        sgid_index: c.grh.sgid_index,
        hop_limit: c.grh.hop_limit,
        traffic_class: c.grh.traffic_class,
        dlid: c.dlid,
        sl: c.sl,
        src_path_bits: c.src_path_bits,
        static_rate: c.static_rate,
        port_num: c.port_num,
    }
}

/// The way back, for queries.
pub(crate) fn ah_attr_c(ah: &AhAttr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: ah.dgid },
            flow_label: ah.flow_label,
            sgid_index: ah.sgid_index,
            hop_limit: ah.hop_limit,
            traffic_class: ah.traffic_class,
        },
        dlid: ah.dlid,
        sl: ah.sl,
        src_path_bits: ah.src_path_bits,
        static_rate: ah.static_rate,
        is_global: ah.is_global.into(),
        port_num: ah.port_num,
    }
}

/// `struct ibv_qp_cap` as Ferroce has it.
pub(crate) fn caps(c: &ibv_qp_cap) -> QueueCaps {
    QueueCaps {
        max_send_wr: c.max_send_wr,
        max_recv_wr: c.max_recv_wr,
        max_send_sge: c.max_send_sge,
        max_recv_sge: c.max_recv_sge,
        max_inline_data: c.max_inline_data,
    }
}

/// The way back: what was granted.
pub(crate) fn caps_c(caps: &QueueCaps) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: caps.max_send_wr,
        max_recv_wr: caps.max_recv_wr,
        max_send_sge: caps.max_send_sge,
        max_recv_sge: caps.max_recv_sge,
        max_inline_data: caps.max_inline_data,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtus_are_powers_of_two_from_256() {
        for (number, bytes) in [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)] {
            assert_eq!(mtu_enum(bytes), number);
            assert_eq!(mtu_bytes(number), Some(bytes));
        }
        assert_eq!(mtu_bytes(0), None);
        assert_eq!(mtu_bytes(6), None);
    }

    #[test]
    fn address_handles_survive_the_round_trip() {
        let c = ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: *b"0123456789abcdef" },
                flow_label: 7,
                sgid_index: 1,
                hop_limit: 2,
                traffic_class: 3,
            },
            dlid: 4,
            sl: 5,
            src_path_bits: 6,
            static_rate: 8,
            is_global: 1,
            port_num: 1,
        };
        assert_eq!(format!("{:?}", ah_attr_c(&ah_attr(&c))), format!("{c:?}"));
    }
}
