//! Numbers of `verbs.h` that this crate decides by. Enumerations of the verbs vocabulary live in `ferroce` with the same values.

/// `IBV_NODE_CA`.
pub const NODE_CA: i32 = 1;
/// `IBV_TRANSPORT_IB`.
pub const TRANSPORT_IB: i32 = 0;

/// `IBV_LINK_LAYER_ETHERNET`.
pub const LINK_LAYER_ETHERNET: u8 = 2;
/// `IBV_PORT_DOWN`.
pub const PORT_DOWN: u32 = 1;
/// `IBV_PORT_ACTIVE`.
pub const PORT_ACTIVE: u32 = 4;
/// Physical state "Disabled".
pub const PHYS_DISABLED: u8 = 3;
/// Physical state "LinkUp".
pub const PHYS_LINK_UP: u8 = 5;
/// `IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS`, what RoCE ports of the kernel show.
pub const PORT_CAPS: u32 = 1 << 16 | 1 << 26;
/// The default partition, full member: the one entry of the P_Key table.
pub const PKEY_DEFAULT: u16 = 0xffff;

/// `IBV_GID_TYPE_ROCE_V2`.
pub const GID_TYPE_ROCE_V2: u32 = 2;
/// `IBV_GID_TYPE_SYSFS_ROCE_V2`, of the private `ibv_query_gid_type`.
pub const GID_TYPE_SYSFS_ROCE_V2: u32 = 1;

/// `IBV_FORK_UNNEEDED`.
pub const FORK_UNNEEDED: u32 = 2;

/// `enum ibv_wr_opcode`.
#[allow(missing_docs)]
pub mod wr {
    pub const RDMA_WRITE: u32 = 0;
    pub const RDMA_WRITE_WITH_IMM: u32 = 1;
    pub const SEND: u32 = 2;
    pub const SEND_WITH_IMM: u32 = 3;
    pub const RDMA_READ: u32 = 4;
    pub const ATOMIC_CMP_AND_SWP: u32 = 5;
    pub const ATOMIC_FETCH_AND_ADD: u32 = 6;
    pub const LOCAL_INV: u32 = 7;
    pub const BIND_MW: u32 = 8;
    pub const SEND_WITH_INV: u32 = 9;
    pub const TSO: u32 = 10;
    pub const DRIVER1: u32 = 11;
    pub const FLUSH: u32 = 14;
    pub const ATOMIC_WRITE: u32 = 15;
}

/// `enum ibv_qp_init_attr_mask`.
#[allow(missing_docs)]
pub mod qp_init {
    pub const PD: u32 = 1 << 0;
    pub const XRCD: u32 = 1 << 1;
    pub const CREATE_FLAGS: u32 = 1 << 2;
    pub const MAX_TSO_HEADER: u32 = 1 << 3;
    pub const IND_TABLE: u32 = 1 << 4;
    pub const RX_HASH: u32 = 1 << 5;
    pub const SEND_OPS_FLAGS: u32 = 1 << 6;
}

/// `enum ibv_qp_create_send_ops_flags`.
#[allow(missing_docs)]
pub mod send_ops {
    pub const RDMA_WRITE: u64 = 1 << 0;
    pub const RDMA_WRITE_WITH_IMM: u64 = 1 << 1;
    pub const SEND: u64 = 1 << 2;
    pub const SEND_WITH_IMM: u64 = 1 << 3;
    pub const RDMA_READ: u64 = 1 << 4;
    pub const ATOMIC_CMP_AND_SWP: u64 = 1 << 5;
    pub const ATOMIC_FETCH_AND_ADD: u64 = 1 << 6;
    pub const LOCAL_INV: u64 = 1 << 7;
    pub const BIND_MW: u64 = 1 << 8;
    pub const SEND_WITH_INV: u64 = 1 << 9;
    pub const TSO: u64 = 1 << 10;
    pub const FLUSH: u64 = 1 << 11;
    pub const ATOMIC_WRITE: u64 = 1 << 12;
}

/// `enum ibv_srq_init_attr_mask` and `enum ibv_srq_type`.
#[allow(missing_docs)]
pub mod srq_init {
    pub const TYPE: u32 = 1 << 0;
    pub const PD: u32 = 1 << 1;
    pub const XRCD: u32 = 1 << 2;
    pub const CQ: u32 = 1 << 3;
    pub const TM: u32 = 1 << 4;
    pub const TYPE_BASIC: u32 = 0;
    pub const TYPE_XRC: u32 = 1;
    pub const TYPE_TM: u32 = 2;
}

/// Tag matching: `enum ibv_ops_wr_opcode`, `enum ibv_ops_flags`, `enum ibv_tm_cap_flags`.
#[allow(missing_docs)]
pub mod tm {
    pub const ADD: u32 = 0;
    pub const DEL: u32 = 1;
    pub const SYNC: u32 = 2;
    pub const SIGNALED: i32 = 1 << 0;
    pub const TELLS_COUNT: i32 = 1 << 1;
    pub const CAP_RC: u32 = 1 << 0;
}

/// `enum ibv_xrcd_init_attr_mask`.
#[allow(missing_docs)]
pub mod xrcd_init {
    pub const FD: u32 = 1 << 0;
    pub const OFLAGS: u32 = 1 << 1;
    pub const ALL: u32 = FD | OFLAGS;
}

/// `enum ibv_qp_open_attr_mask`.
#[allow(missing_docs)]
pub mod qp_open {
    pub const NUM: u32 = 1 << 0;
    pub const XRCD: u32 = 1 << 1;
    pub const CONTEXT: u32 = 1 << 2;
    pub const TYPE: u32 = 1 << 3;
    pub const ALL: u32 = NUM | XRCD | CONTEXT | TYPE;
}

/// `enum ibv_create_cq_wc_flags`, `enum ibv_cq_init_attr_mask`, `enum ibv_create_cq_attr_flags`, `enum ibv_cq_attr_mask`.
#[allow(missing_docs)]
pub mod cq_init {
    /// Byte length, immediate, QP numbers, SLID, SL, path bits.
    pub const WC_STANDARD: u64 = (1 << 7) - 1;
    pub const WC_COMPLETION_TIMESTAMP: u64 = 1 << 7;
    pub const WC_FLOW_TAG: u64 = 1 << 9;
    pub const WC_TM_INFO: u64 = 1 << 10;
    pub const WC_COMPLETION_WALLCLOCK: u64 = 1 << 11;
    pub const MASK_FLAGS: u32 = 1 << 0;
    pub const MASK_PD: u32 = 1 << 1;
    pub const SINGLE_THREADED: u32 = 1 << 0;
    pub const IGNORE_OVERRUN: u32 = 1 << 1;
    pub const ATTR_MODERATE: u32 = 1 << 0;
}

/// `enum ibv_wq_attr_mask`, and the one bit of `enum ibv_wq_init_attr_mask`.
#[allow(missing_docs)]
pub mod wq_attr {
    pub const STATE: u32 = 1 << 0;
    pub const CURR_STATE: u32 = 1 << 1;
    pub const FLAGS: u32 = 1 << 2;
    pub const INIT_FLAGS: u32 = 1 << 0;
}

/// `IBV_RX_HASH_FUNC_TOEPLITZ`.
pub const RX_HASH_TOEPLITZ: u8 = 1 << 0;

/// `enum ibv_flow_flags`.
#[allow(missing_docs)]
pub mod flow {
    pub const DONT_TRAP: u32 = 1 << 1;
    pub const EGRESS: u32 = 1 << 2;
}

/// `enum ibv_flow_spec_type`: those that are available, and the bit for headers inside of a tunnel.
#[allow(missing_docs)]
pub mod flow_spec {
    pub const ETH: u32 = 0x20;
    pub const IPV4: u32 = 0x30;
    pub const IPV6: u32 = 0x31;
    pub const IPV4_EXT: u32 = 0x32;
    pub const TCP: u32 = 0x40;
    pub const UDP: u32 = 0x41;
    pub const INNER: u32 = 0x100;
    pub const ACTION_TAG: u32 = 0x1000;
    pub const ACTION_DROP: u32 = 0x1001;
    pub const ACTION_COUNT: u32 = 0x1003;
}

/// `enum ibv_values_mask`.
#[allow(missing_docs)]
pub mod values {
    pub const RAW_CLOCK: u32 = 1 << 0;
}

/// `enum ibv_rereg_mr_flags` and `enum ibv_rereg_mr_err_code`.
#[allow(missing_docs)]
pub mod rereg {
    pub const CHANGE_TRANSLATION: i32 = 1 << 0;
    pub const CHANGE_PD: i32 = 1 << 1;
    pub const CHANGE_ACCESS: i32 = 1 << 2;
    pub const ALL: i32 = CHANGE_TRANSLATION | CHANGE_PD | CHANGE_ACCESS;
    /// The old region is still valid; the input was bad.
    pub const ERR_INPUT: i32 = -1;
    /// The region must not be used any more.
    pub const ERR_CMD: i32 = -4;
}

/// `IBV_ACCESS_OPTIONAL_RANGE`: hints that a library drops if it does not know them.
pub const ACCESS_OPTIONAL_RANGE: u32 = 0x3ff0_0000;

/// `enum ibv_wc_flags`: only GRH, immediate and invalidation occur.
pub const WC_GRH: u32 = 1 << 0;
