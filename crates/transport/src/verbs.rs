//! The vocabulary of verbs, with the numeric values of `verbs.h`, so that the C library needs no translation tables.

use core::net::IpAddr;
use std::sync::Arc;

use ferroce_wire::Psn;
use smallvec::SmallVec;

bitflags::bitflags! {
    /// `enum ibv_access_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// The owner may let the card write (receive buffers, READ and atomic results).
        const LOCAL_WRITE = 1;
        /// A peer may WRITE.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may READ.
        const REMOTE_READ = 1 << 2;
        /// A peer may run atomics.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to the region.
        const MW_BIND = 1 << 4;
        /// Addresses start at 0 instead of the region's address.
        const ZERO_BASED = 1 << 5;
        /// Pages are faulted in by use. Every Ferroce region behaves so.
        const ON_DEMAND = 1 << 6;
        /// The region lies on huge pages; only a hint.
        const HUGETLB = 1 << 7;
        /// A peer may FLUSH to global visibility.
        const FLUSH_GLOBAL = 1 << 8;
        /// A peer may FLUSH to persistence.
        const FLUSH_PERSISTENT = 1 << 9;
        /// Writes may be reordered; optional bit, a hint.
        const RELAXED_ORDERING = 1 << 20;
    }
}

bitflags::bitflags! {
    /// `enum ibv_send_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct SendFlags: u32 {
        /// Wait until earlier READs and atomics are complete.
        const FENCE = 1;
        /// Make a completion on success too.
        const SIGNALED = 1 << 1;
        /// Raise a solicited event at the receiver.
        const SOLICITED = 1 << 2;
        /// The payload was copied at posting time.
        const INLINE = 1 << 3;
        /// Checksum offload; meaningless for RC, UC and UD over RoCE.
        const IP_CSUM = 1 << 4;
    }
}

bitflags::bitflags! {
    /// `enum ibv_wc_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct WcFlags: u32 {
        /// The receive buffer starts with 40 bytes of GRH area (UD).
        const GRH = 1;
        /// `Completion::imm` is an immediate.
        const WITH_IMM = 1 << 1;
        /// `Completion::imm` is an rkey that was invalidated.
        const WITH_INV = 1 << 3;
        /// The tag list is out of step: the number of unexpected messages that the program handled is not the card's.
        const TM_SYNC_REQ = 1 << 4;
        /// The message matched a tag; `Completion::tm_tag` and `tm_app_ctx` hold.
        const TM_MATCH = 1 << 5;
        /// All bytes of a message that matched a tag are there.
        const TM_DATA_VALID = 1 << 6;
    }
}

/// `enum ibv_qp_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum QpType {
    Rc = 2,
    Uc = 3,
    Ud = 4,
    /// Whole Ethernet frames; what comes in is chosen by flow steering.
    RawPacket = 8,
    /// The initiator of an XRC connection: it requests, and receives nothing but answers (IBA annex A14).
    XrcSend = 9,
    /// The target of an XRC connection: it answers. Each request names the shared receive queue that it is for.
    XrcRecv = 10,
}

impl QpType {
    /// One of the two ends of an XRC connection.
    pub const fn is_xrc(self) -> bool {
        matches!(self, QpType::XrcSend | QpType::XrcRecv)
    }

    /// Requests are acknowledged.
    pub const fn is_reliable(self) -> bool {
        matches!(self, QpType::Rc) || self.is_xrc()
    }
}

/// `enum ibv_qp_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum QpState {
    Reset = 0,
    Init = 1,
    Rtr = 2,
    Rts = 3,
    Sqd = 4,
    Sqe = 5,
    Err = 6,
}

/// `enum ibv_wc_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum WcStatus {
    Success = 0,
    LocLenErr = 1,
    LocQpOpErr = 2,
    LocEecOpErr = 3,
    LocProtErr = 4,
    WrFlushErr = 5,
    MwBindErr = 6,
    BadRespErr = 7,
    LocAccessErr = 8,
    RemInvReqErr = 9,
    RemAccessErr = 10,
    RemOpErr = 11,
    RetryExcErr = 12,
    RnrRetryExcErr = 13,
    LocRddViolErr = 14,
    RemInvRdReqErr = 15,
    RemAbortErr = 16,
    InvEecnErr = 17,
    InvEecStateErr = 18,
    FatalErr = 19,
    RespTimeoutErr = 20,
    GeneralErr = 21,
    /// A tag is not in the list (any more).
    TmErr = 22,
    /// A rendezvous request matched a tag whose buffer is too small; the request is in the buffer.
    TmRndvIncomplete = 23,
}

/// `enum ibv_wc_opcode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum WcOpcode {
    Send = 0,
    RdmaWrite = 1,
    RdmaRead = 2,
    CompSwap = 3,
    FetchAdd = 4,
    BindMw = 5,
    LocalInv = 6,
    Flush = 8,
    AtomicWrite = 9,
    Recv = 128,
    RecvRdmaWithImm = 129,
    TmAdd = 130,
    TmDel = 131,
    TmSync = 132,
    TmRecv = 133,
    TmNoTag = 134,
}

/// One completion, as `struct ibv_wc` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The request's identifier.
    pub wr_id: u64,
    /// How it ended.
    pub status: WcStatus,
    /// What it was. Undefined in verbs when `status` is not success; we still tell the truth.
    pub opcode: WcOpcode,
    /// Bytes received, READ or returned (atomics: 8). For UD this includes the 40 bytes of GRH area.
    pub byte_len: u32,
    /// Immediate (as a number; big-endian on the wire) or invalidated rkey, per `flags`; with neither: the tag of the flow that brought the
    /// frame (RAW_PACKET), 0 if it has none.
    pub imm: u32,
    /// The local queue pair.
    pub qp_num: u32,
    /// The remote queue pair (UD receive; RC and UC: the connected one).
    pub src_qp: u32,
    /// Which of the optional fields hold.
    pub flags: WcFlags,
    /// Reason in Ferroce's own numbers; 0 for success.
    pub vendor_err: u32,
    /// The peer asked for a solicited event (receive side).
    pub solicited: bool,
    /// Service level. Ethernet has none; cards tell the kind of packet of a UD receive here instead (IBA annex A17.4.5.1): bit 3 for
    /// RoCE v2, then 1 for IPv6 or 2 for IPv4. Programs read it to find the addresses in the GRH area. 0 otherwise.
    pub sl: u8,
    /// When it was added to a completion queue that asks for that, in nanoseconds of the card's clock; else 0.
    pub timestamp: u64,
    /// With [`WcFlags::TM_MATCH`]: the message's tag; else 0.
    pub tm_tag: u64,
    /// With [`WcFlags::TM_MATCH`]: the sender's own data, from the message's tag matching header; else 0.
    pub tm_app_ctx: u32,
}

impl Completion {
    /// One that says nothing yet, for a poll to overwrite.
    pub const UNUSED: Completion = Completion {
        wr_id: 0,
        status: WcStatus::Success,
        opcode: WcOpcode::Send,
        byte_len: 0,
        imm: 0,
        qp_num: 0,
        src_qp: 0,
        flags: WcFlags::empty(),
        vendor_err: 0,
        solicited: false,
        sl: 0,
        timestamp: 0,
        tm_tag: 0,
        tm_app_ctx: 0,
    };
}

/// A scatter/gather element: `struct ibv_sge`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Address in the terms of the region named by `lkey`.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// The region.
    pub lkey: u32,
}

/// Where a packet goes and whence: what an address handle resolves to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PathAddr {
    /// Our address: the GID chosen by `sgid_index`.
    pub src: IpAddr,
    /// The peer's address: the destination GID.
    pub dst: IpAddr,
    /// Interface index for link-local destinations and packet info; 0 lets the route decide.
    pub ifindex: u32,
    /// Traffic class (TOS).
    pub tclass: u8,
    /// Hop limit (TTL).
    pub hop_limit: u8,
    /// Flow label as given in the address handle.
    pub flow_label: u32,
}

/// Destination of one UD work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UdDest {
    /// The resolved address handle.
    pub path: Arc<PathAddr>,
    /// Destination queue pair.
    pub qpn: u32,
    /// Q_Key of the request; if its top bit is set the QP's own Q_Key goes out instead (`ibv_post_send(3)`).
    pub qkey: u32,
}

/// What a send request does: `enum ibv_wr_opcode` with its operands.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SendOp {
    Send,
    SendImm {
        imm: u32,
    },
    SendInv {
        rkey: u32,
    },
    Write {
        raddr: u64,
        rkey: u32,
    },
    WriteImm {
        raddr: u64,
        rkey: u32,
        imm: u32,
    },
    Read {
        raddr: u64,
        rkey: u32,
    },
    CompareSwap {
        raddr: u64,
        rkey: u32,
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        raddr: u64,
        rkey: u32,
        add: u64,
    },
    LocalInv {
        rkey: u32,
    },
    BindMw(Box<MwBind>),
    /// Writes 8 bytes in one go to an address that is a multiple of 8.
    AtomicWrite {
        raddr: u64,
        rkey: u32,
    },
    /// Completes when what was written before, and is in the range, is placed as asked.
    Flush {
        rkey: u32,
        range: FlushRange,
        placement: Placement,
    },
}

/// What a FLUSH is about: `enum ibv_selectivity_level`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum FlushRange {
    Bytes {
        raddr: u64,
        len: u32,
    },
    /// All of the region.
    Region,
}

bitflags::bitflags! {
    /// `enum ibv_placement_type`: where a FLUSH puts what was written.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Placement: u8 {
        /// Where every processor of the host sees it.
        const GLOBAL = 1;
        /// Where it outlives a loss of power.
        const PERSISTENT = 1 << 1;
    }
}

/// Binding of a memory window to a part of a memory region: the operands of `IBV_WR_BIND_MW`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MwBind {
    /// The window's key from now on; its upper 24 bits say which window it is.
    pub rkey: u32,
    /// The region.
    pub lkey: u32,
    /// First byte, in the region's terms.
    pub addr: u64,
    /// Bytes; 0 unbinds a window of type 1.
    pub len: u64,
    /// Rights of peers, and whether they address the window from 0.
    pub access: Access,
}

/// The local side of a send request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SendData {
    /// Gathered from (or, for READ and atomics, scattered to) memory.
    Sges(SmallVec<[Sge; 2]>),
    /// Copied when posted.
    Inline(Box<[u8]>),
}

/// A send work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendWr {
    /// Given back in the completion.
    pub wr_id: u64,
    /// The operation.
    pub op: SendOp,
    /// `IBV_SEND_*`. With `sq_sig_all` the poster sets SIGNALED.
    pub flags: SendFlags,
    /// Bytes or where they are.
    pub data: SendData,
    /// UD only.
    pub ud: Option<UdDest>,
    /// XRC only: the number of the peer's shared receive queue that the request is for.
    pub xrc_srqn: Option<u32>,
}

/// A receive work request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecvWr {
    /// Given back in the completion.
    pub wr_id: u64,
    /// Where the bytes go, in order.
    pub sges: SmallVec<[Sge; 2]>,
}

/// Asynchronous events that the transport raises about a queue pair. Values of `enum ibv_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum QpEvent {
    /// `IBV_EVENT_QP_FATAL`
    Fatal = 1,
    /// `IBV_EVENT_QP_REQ_ERR`
    ReqErr = 2,
    /// `IBV_EVENT_QP_ACCESS_ERR`
    AccessErr = 3,
    /// `IBV_EVENT_COMM_EST`
    CommEst = 4,
    /// `IBV_EVENT_SQ_DRAINED`
    SqDrained = 5,
    /// `IBV_EVENT_QP_LAST_WQE_REACHED`
    LastWqeReached = 16,
    /// `IBV_EVENT_WQ_FATAL`: the receiving half of a RAW_PACKET queue pair ended by an error. The host tells it of receive work queues only;
    /// of a queue pair the completion tells it.
    WqFatal = 19,
}

/// What a queue pair is made with.
#[derive(Clone, Copy, Debug)]
pub struct QpInit {
    /// Its number, lane prefix included.
    pub qpn: u32,
    /// Service type.
    pub qp_type: QpType,
    /// Handle of its protection domain; keys of other domains do not work with it. An XRC target has none: it acts in that of the
    /// shared receive queue that a request names.
    pub pd: u32,
    /// Receives come from an SRQ (of an XRC target: always).
    pub has_srq: bool,
    /// Send requests that the poster lets be incomplete at a time.
    pub max_send_wr: u32,
}

bitflags::bitflags! {
    /// `enum ibv_qp_attr_mask`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct QpAttrMask: u32 {
        /// `IBV_QP_STATE`
        const STATE = 1 << 0;
        /// `IBV_QP_CUR_STATE`
        const CUR_STATE = 1 << 1;
        /// `IBV_QP_EN_SQD_ASYNC_NOTIFY`
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// `IBV_QP_ACCESS_FLAGS`
        const ACCESS_FLAGS = 1 << 3;
        /// `IBV_QP_PKEY_INDEX`
        const PKEY_INDEX = 1 << 4;
        /// `IBV_QP_PORT`
        const PORT = 1 << 5;
        /// `IBV_QP_QKEY`
        const QKEY = 1 << 6;
        /// `IBV_QP_AV`
        const AV = 1 << 7;
        /// `IBV_QP_PATH_MTU`
        const PATH_MTU = 1 << 8;
        /// `IBV_QP_TIMEOUT`
        const TIMEOUT = 1 << 9;
        /// `IBV_QP_RETRY_CNT`
        const RETRY_CNT = 1 << 10;
        /// `IBV_QP_RNR_RETRY`
        const RNR_RETRY = 1 << 11;
        /// `IBV_QP_RQ_PSN`
        const RQ_PSN = 1 << 12;
        /// `IBV_QP_MAX_QP_RD_ATOMIC`
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// `IBV_QP_ALT_PATH`
        const ALT_PATH = 1 << 14;
        /// `IBV_QP_MIN_RNR_TIMER`
        const MIN_RNR_TIMER = 1 << 15;
        /// `IBV_QP_SQ_PSN`
        const SQ_PSN = 1 << 16;
        /// `IBV_QP_MAX_DEST_RD_ATOMIC`
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// `IBV_QP_PATH_MIG_STATE`
        const PATH_MIG_STATE = 1 << 18;
        /// `IBV_QP_CAP`
        const CAP = 1 << 19;
        /// `IBV_QP_DEST_QPN`
        const DEST_QPN = 1 << 20;
        /// `IBV_QP_RATE_LIMIT`
        const RATE_LIMIT = 1 << 25;
    }
}

/// Queue pair attributes: the part of `struct ibv_qp_attr` that the transport needs. Which fields a call changes is told by a
/// [`QpAttrMask`]; the address vector arrives resolved.
#[derive(Clone, Debug)]
pub struct QpAttr {
    /// State to go to (in a query: the present one).
    pub state: QpState,
    /// State the caller believes the QP to be in.
    pub cur_state: QpState,
    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096.
    pub path_mtu: u32,
    /// UD Q_Key.
    pub qkey: u32,
    /// First PSN expected by the responder.
    pub rq_psn: Psn,
    /// First PSN sent by the requester.
    pub sq_psn: Psn,
    /// The connected peer.
    pub dest_qpn: u32,
    /// What a peer may do through this QP.
    pub access: Access,
    /// Resolved address vector.
    pub path: Option<Arc<PathAddr>>,
    /// P_Key table index; only 0 exists.
    pub pkey_index: u16,
    /// Port; only 1 exists.
    pub port_num: u8,
    /// Outstanding READs and atomics as requester.
    pub max_rd_atomic: u8,
    /// The same as responder.
    pub max_dest_rd_atomic: u8,
    /// RNR NAK timer code (IBA table 45).
    pub min_rnr_timer: u8,
    /// ACK timeout code: 4.096 us * 2^code, 0 for endless.
    pub timeout: u8,
    /// Transport retries, 0 to 7.
    pub retry_cnt: u8,
    /// RNR retries, 7 for endless.
    pub rnr_retry: u8,
    /// Raise SQ_DRAINED when draining is done.
    pub en_sqd_async_notify: bool,
    /// (query) the SQ is draining.
    pub sq_draining: bool,
    /// Rate that its requests keep to, in kbit/s of the wire; 0: none.
    pub rate_limit: u32,
}

/// Where the requester of an RC queue pair stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendStanding {
    /// The oldest PSN without an answer.
    pub una: Psn,
    /// PSNs from there on that were sent.
    pub in_flight: u32,
    /// Times sent again since the last progress.
    pub attempts: u32,
    /// RNR NAKs since the last progress.
    pub rnr_naks: u8,
}

impl Default for QpAttr {
    fn default() -> Self {
        QpAttr {
            state: QpState::Reset,
            cur_state: QpState::Reset,
            path_mtu: 1024,
            qkey: 0,
            rq_psn: Psn::new(0),
            sq_psn: Psn::new(0),
            dest_qpn: 0,
            access: Access::empty(),
            path: None,
            pkey_index: 0,
            port_num: 0,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            min_rnr_timer: 0,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            en_sqd_async_notify: false,
            sq_draining: false,
            rate_limit: 0,
        }
    }
}
