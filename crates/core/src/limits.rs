//! The numbers of `ibv_query_device`: what this card can do.
//!
//! They are those of a capable software card. Limits bound memory and table sizes, not speed: queues grow as they fill, so a high
//! limit costs nothing until it is used.

use ferroce_transport::Access;

/// IEEE OUI that names the vendor. No OUI was bought: this is a locally administered one (second bit of the first byte set).
pub const VENDOR_ID: u32 = 0x02_fe_00;
/// Model of the card within [`VENDOR_ID`].
pub const VENDOR_PART_ID: u32 = 1;
/// Revision of the card.
pub const HW_VER: u32 = 1;
/// Bytes of the largest memory region.
pub const MAX_MR_SIZE: u64 = u64::MAX;
/// Bit n: a page size of 2^n bytes is supported. Regions are byte ranges, so every size from 4 KiB is.
pub const PAGE_SIZE_CAP: u64 = 0xffff_ffff_ffff_f000;
/// Queue pairs of a context: a lane has 16,384 numbers, of which three are never given out.
pub const MAX_QP: u32 = 16_381;
/// Outstanding requests of one send or receive queue.
pub const MAX_QP_WR: u32 = 16_384;
/// Scatter/gather elements of one request.
pub const MAX_SGE: u32 = 32;
/// Scatter/gather elements of one READ.
pub const MAX_SGE_RD: u32 = 32;
/// Bytes of an inline send.
pub const MAX_INLINE_DATA: u32 = 1_024;
/// Completion queues of a context.
pub const MAX_CQ: u32 = 65_536;
/// Entries of one completion queue.
pub const MAX_CQE: u32 = 1 << 20;
/// Memory regions of a process.
pub const MAX_MR: u32 = 1 << 20;
/// Protection domains of a context.
pub const MAX_PD: u32 = 65_536;
/// READs and atomics that one queue pair can have outstanding, as requester and as responder.
pub const MAX_QP_RD_ATOM: u32 = ferroce_transport::MAX_RD_ATOMIC as u32;
/// READs and atomics that the card can serve at once as responder.
pub const MAX_RES_RD_ATOM: u32 = MAX_QP * MAX_QP_RD_ATOM;
/// Multicast groups of a process: what the kernel lets a socket join unless it is told otherwise (`net.ipv4.igmp_max_memberships`).
pub const MAX_MCAST_GRP: u32 = 20;
/// Queue pairs of a process in one multicast group: each packet is copied so many times.
pub const MAX_MCAST_QP_ATTACH: u32 = 64;
/// Address handles of a context.
pub const MAX_AH: u32 = 65_536;
/// Shared receive queues of a context.
pub const MAX_SRQ: u32 = 65_536;
/// Those of them that belong to XRC domains, which have numbers; of a process.
pub const MAX_XRC_SRQ: u32 = 16_383;
/// Outstanding requests of one shared receive queue.
pub const MAX_SRQ_WR: u32 = 16_384;
/// Scatter/gather elements of one request in a shared receive queue.
pub const MAX_SRQ_SGE: u32 = MAX_SGE;
/// Buffers in the tag list of a shared receive queue: a message may be compared with all of them.
pub const MAX_NUM_TAGS: u32 = 1_024;
/// Operations on a tag list that are not complete: each is complete when it is posted, so any number will do.
pub const MAX_TAG_OPS: u32 = 16_384;
/// Bytes of the longest rendezvous request that tags match.
pub const MAX_RNDV_HDR_SIZE: u32 = ferroce_transport::MAX_RNDV_HDR as u32;
/// Rates that queue pairs can keep to, in kbit/s.
pub const RATE_LIMIT: std::ops::RangeInclusive<u32> =
    ferroce_transport::RATE_LIMIT_MIN..=ferroce_transport::RATE_LIMIT_MAX;
/// Bytes that a queue pair that keeps to a rate may send in one go.
pub const RATE_LIMIT_BURST: u32 = ferroce_transport::MAX_TRAIN_BYTES;
/// Partition keys: only the default one, 0xffff.
pub const MAX_PKEYS: u16 = 1;
/// Delay of the local ACK as the code of 4.096 us * 2^code: 65 us.
pub const LOCAL_CA_ACK_DELAY: u8 = 4;
/// Receive work queues of a context, and tables of them: they have numbers of queue pairs.
pub const MAX_WQ: u32 = MAX_QP;
/// Entries of a table of receive work queues.
pub const MAX_RWQ_TABLE: u32 = crate::flow::RSS_TABLE_MAX;
/// Ports of the device.
pub const PHYS_PORT_CNT: u8 = 1;
/// Largest completion moderation count.
pub const MAX_CQ_COUNT: u16 = u16::MAX;
/// Largest completion moderation period, in microseconds.
pub const MAX_CQ_PERIOD_US: u16 = u16::MAX;

/// `enum ibv_atomic_cap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AtomicCap {
    /// No atomics.
    None = 0,
    /// Atomic among the queue pairs of this card.
    Hca = 1,
    /// Atomic also with the CPU's own atomics: ours are the CPU's.
    Glob = 2,
}

bitflags::bitflags! {
    /// `enum ibv_device_cap_flags`: the ones that hold for this card.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DeviceCap: u32 {
        /// `cur_qp_state` is honoured in RTR to RTS.
        const CURR_QP_STATE_MOD = 1 << 7;
        /// The system image GUID is valid.
        const SYS_IMAGE_GUID = 1 << 11;
        /// RC answers RNR NAKs.
        const RC_RNR_NAK_GEN = 1 << 12;
        /// There are XRC queue pairs, domains and shared receive queues.
        const XRC = 1 << 20;
        /// An SRQ can be resized.
        const SRQ_RESIZE = 1 << 13;
        /// There are memory windows.
        const MEM_WINDOW = 1 << 17;
        /// Windows of type 2 are bound to a queue pair and checked against its protection domain too.
        const MEM_WINDOW_TYPE_2B = 1 << 24;
        /// Frames are steered to RAW_PACKET queue pairs by flows.
        const MANAGED_FLOW_STEERING = 1 << 29;
    }
}

/// Capabilities beyond the 32 bits of [`DeviceCap`] (`device_cap_flags_ex`): FLUSH to global visibility, ATOMIC WRITE.
pub const DEVICE_CAP_EX: u64 = 1 << 38 | 1 << 40;

/// `struct ibv_device_attr` as far as it is not about one device in particular (name, GUID and firmware are the device's own).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct DeviceAttr {
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub device_cap: DeviceCap,
    pub max_sge: u32,
    pub max_sge_rd: u32,
    pub max_inline_data: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_qp_rd_atom: u32,
    pub max_ee_rd_atom: u32,
    pub max_res_rd_atom: u32,
    pub max_qp_init_rd_atom: u32,
    pub max_ee_init_rd_atom: u32,
    pub atomic_cap: AtomicCap,
    pub max_ee: u32,
    pub max_rdd: u32,
    pub max_mw: u32,
    pub max_raw_ipv6_qp: u32,
    pub max_raw_ethy_qp: u32,
    pub max_mcast_grp: u32,
    pub max_mcast_qp_attach: u32,
    pub max_total_mcast_qp_attach: u32,
    pub max_ah: u32,
    pub max_fmr: u32,
    pub max_map_per_fmr: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
    pub max_cq_count: u16,
    pub max_cq_period_us: u16,
}

/// The limits of every device. What is 0 does not exist on this card.
pub const DEVICE_ATTR: DeviceAttr = DeviceAttr {
    max_mr_size: MAX_MR_SIZE,
    page_size_cap: PAGE_SIZE_CAP,
    vendor_id: VENDOR_ID,
    vendor_part_id: VENDOR_PART_ID,
    hw_ver: HW_VER,
    max_qp: MAX_QP,
    max_qp_wr: MAX_QP_WR,
    device_cap: DeviceCap::CURR_QP_STATE_MOD
        .union(DeviceCap::SYS_IMAGE_GUID)
        .union(DeviceCap::RC_RNR_NAK_GEN)
        .union(DeviceCap::SRQ_RESIZE)
        .union(DeviceCap::XRC)
        .union(DeviceCap::MEM_WINDOW)
        .union(DeviceCap::MEM_WINDOW_TYPE_2B)
        .union(DeviceCap::MANAGED_FLOW_STEERING),
    max_sge: MAX_SGE,
    max_sge_rd: MAX_SGE_RD,
    max_inline_data: MAX_INLINE_DATA,
    max_cq: MAX_CQ,
    max_cqe: MAX_CQE,
    max_mr: MAX_MR,
    max_pd: MAX_PD,
    max_qp_rd_atom: MAX_QP_RD_ATOM,
    max_ee_rd_atom: 0,
    max_res_rd_atom: MAX_RES_RD_ATOM,
    max_qp_init_rd_atom: MAX_QP_RD_ATOM,
    max_ee_init_rd_atom: 0,
    atomic_cap: AtomicCap::Glob,
    max_ee: 0,
    max_rdd: 0,
    // They share the table of keys with regions.
    max_mw: MAX_MR,
    max_raw_ipv6_qp: 0,
    max_raw_ethy_qp: MAX_QP,
    max_mcast_grp: MAX_MCAST_GRP,
    max_mcast_qp_attach: MAX_MCAST_QP_ATTACH,
    max_total_mcast_qp_attach: MAX_MCAST_GRP * MAX_MCAST_QP_ATTACH,
    max_ah: MAX_AH,
    max_fmr: 0,
    max_map_per_fmr: 0,
    max_srq: MAX_SRQ,
    max_srq_wr: MAX_SRQ_WR,
    max_srq_sge: MAX_SRQ_SGE,
    max_pkeys: MAX_PKEYS,
    local_ca_ack_delay: LOCAL_CA_ACK_DELAY,
    phys_port_cnt: PHYS_PORT_CNT,
    max_cq_count: MAX_CQ_COUNT,
    max_cq_period_us: MAX_CQ_PERIOD_US,
};

/// Access flags that `ibv_reg_mr` understands.
pub const MR_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND)
    .union(Access::ZERO_BASED)
    .union(Access::ON_DEMAND)
    .union(Access::HUGETLB)
    .union(Access::FLUSH_GLOBAL);

/// `IBV_ACCESS_OPTIONAL_RANGE`: hints that a card may ignore.
pub const OPTIONAL_ACCESS: u32 = 0x3ff0_0000;
