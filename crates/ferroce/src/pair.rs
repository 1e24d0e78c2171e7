//! Connecting queue pairs without a connection manager: what the two ends tell each other, and the three state changes.

use crate::error::Result;
use crate::pd::AhAttr;
use crate::qp::{Qp, QpModify};
use ferroce_transport::{Access, QpAttr, QpAttrMask, QpState};
use ferroce_wire::Psn;

/// What a peer must know to connect to a queue pair; exchange it by any means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Queue pair number.
    pub qpn: u32,
    /// First PSN that its requester sends.
    pub psn: u32,
    /// GID of its port.
    pub gid: [u8; 16],
}

/// How an RC connection is to behave; the defaults are those of most programs.
#[derive(Clone, Copy, Debug)]
pub struct ConnectOptions {
    /// GID index of the own port.
    pub sgid_index: u8,
    /// Path MTU in bytes; `None` takes the port's active MTU.
    pub path_mtu: Option<u32>,
    /// What the peer may do.
    pub access: Access,
    /// READs and atomics outstanding, in each direction.
    pub rd_atomic: u8,
    /// ACK timeout code: 4.096 us * 2^code.
    pub timeout: u8,
    /// Transport retries.
    pub retry_cnt: u8,
    /// RNR retries; 7 for endless.
    pub rnr_retry: u8,
    /// RNR NAK timer code.
    pub min_rnr_timer: u8,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions {
            sgid_index: 0,
            path_mtu: None,
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            rd_atomic: 16,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
        }
    }
}

impl Qp {
    /// What the peer has to know. `psn` is the caller's choice, best random.
    ///
    /// # Errors
    /// ENODATA: the GID index does not exist.
    pub fn endpoint(&self, sgid_index: u8, psn: u32) -> Result<Endpoint> {
        let gid = self.context().device().gid(u32::from(sgid_index))?;
        Ok(Endpoint { qpn: self.qpn(), psn, gid: gid.gid })
    }

    /// Brings an RC queue pair from RESET to RTS, connected to `peer`. `psn` is the one told to the peer.
    ///
    /// # Errors
    /// EINVAL with the attribute at fault.
    pub fn connect(&self, psn: u32, peer: &Endpoint, options: &ConnectOptions) -> Result<()> {
        let port = self.context().device().port();
        let attr = QpAttr {
            state: QpState::Init,
            access: options.access,
            port_num: 1,
            path_mtu: options.path_mtu.unwrap_or(port.active_mtu),
            dest_qpn: peer.qpn,
            rq_psn: Psn::new(peer.psn),
            sq_psn: Psn::new(psn),
            max_rd_atomic: options.rd_atomic,
            max_dest_rd_atomic: options.rd_atomic,
            timeout: options.timeout,
            retry_cnt: options.retry_cnt,
            rnr_retry: options.rnr_retry,
            min_rnr_timer: options.min_rnr_timer,
            ..QpAttr::default()
        };
        let ah = AhAttr {
            is_global: true,
            dgid: peer.gid,
            sgid_index: options.sgid_index,
            port_num: 1,
            ..AhAttr::default()
        };
        let mut change = QpModify { attr, ah };
        self.modify(&change, QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS)?;
        change.attr.state = QpState::Rtr;
        self.modify(
            &change,
            QpAttrMask::STATE
                | QpAttrMask::AV
                | QpAttrMask::PATH_MTU
                | QpAttrMask::DEST_QPN
                | QpAttrMask::RQ_PSN
                | QpAttrMask::MAX_DEST_RD_ATOMIC
                | QpAttrMask::MIN_RNR_TIMER,
        )?;
        change.attr.state = QpState::Rts;
        self.modify(
            &change,
            QpAttrMask::STATE
                | QpAttrMask::TIMEOUT
                | QpAttrMask::RETRY_CNT
                | QpAttrMask::RNR_RETRY
                | QpAttrMask::SQ_PSN
                | QpAttrMask::MAX_QP_RD_ATOMIC,
        )
    }
}
