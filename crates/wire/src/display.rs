//! One line per packet, for logs and captures.

use core::fmt::{Display, Formatter, Result};

use crate::{Aeth, Headers, Syndrome};

/// `RC_WRITE_ONLY qp 0x11 psn 0x001000 ackreq reth va 0x7f0a9bbd4000 rkey 0x6821 len 8`: fields at their usual value (no flags,
/// full P_Key, zero reserved bits) are left out.
impl Display for Headers {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let bth = &self.bth;
        write!(f, "{} qp {:#x} psn {}", bth.opcode, bth.dest_qp, bth.psn)?;
        for (set, name) in [
            (bth.solicited, "se"),
            (bth.mig_req, "mig"),
            (bth.ack_req, "ackreq"),
            (bth.fecn, "fecn"),
            (bth.becn, "becn"),
        ] {
            if set {
                write!(f, " {name}")?;
            }
        }
        for (value, usual, name) in [
            (u32::from(bth.pad), 0, "pad"),
            (u32::from(bth.tver), 0, "tver"),
            (u32::from(bth.pkey), 0xffff, "pkey"),
            (u32::from(bth.resv6), 0, "resv6"),
            (u32::from(bth.resv7), 0, "resv7"),
            (u32::from(self.resv8), 0, "resv8"),
        ] {
            if value != usual {
                write!(f, " {name} {value:#x}")?;
            }
        }
        if let Some(srqn) = self.xrc_srqn {
            write!(f, " srq {srqn:#x}")?;
        }
        if let Some(deth) = self.deth {
            write!(f, " deth qkey {:#x} src_qp {:#x}", deth.qkey, deth.src_qp)?;
        }
        if let Some(feth) = self.feth {
            write!(f, " feth placement {} selectivity {}", feth.placement(), feth.selectivity())?;
        }
        if let Some(reth) = self.reth {
            write!(f, " reth va {:#x} rkey {:#x} len {}", reth.va, reth.rkey, reth.len)?;
        }
        if let Some(atomic) = self.atomic {
            let crate::AtomicEth { va, rkey, swap_add, compare } = atomic;
            write!(f, " atomic va {va:#x} rkey {rkey:#x} swap_add {swap_add:#x} compare {compare:#x}")?;
        }
        if let Some(aeth) = self.aeth {
            write!(f, " {aeth}")?;
        }
        if let Some(original) = self.atomic_ack {
            write!(f, " original {original:#x}")?;
        }
        if let Some(imm) = self.imm {
            write!(f, " imm {imm:#x}")?;
        }
        if let Some(rkey) = self.ieth {
            write!(f, " inv {rkey:#x}")?;
        }
        Ok(())
    }
}

impl Display for Aeth {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "{} msn {}", self.syndrome, self.msn)
    }
}

impl Display for Syndrome {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match *self {
            Syndrome::NAK_SEQUENCE => f.write_str("nak PSN sequence error"),
            Syndrome::NAK_INVALID_REQUEST => f.write_str("nak invalid request"),
            Syndrome::NAK_REMOTE_ACCESS => f.write_str("nak remote access error"),
            Syndrome::NAK_REMOTE_OPERATIONAL => f.write_str("nak remote operational error"),
            Syndrome::ACK => f.write_str("ack"),
            other => match (other.credits(), other.rnr_code()) {
                (Some(credits), _) => write!(f, "ack credits {credits}"),
                (_, Some(code)) => write!(f, "rnr nak timer {code}"),
                _ => write!(f, "syndrome {:#04x}", other.0),
            },
        }
    }
}
