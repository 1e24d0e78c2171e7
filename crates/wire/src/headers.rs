//! Headers of one packet: BTH and whatever its opcode adds.

use crate::{Ext, Opcode, Psn};

/// Bytes of a BTH.
pub const BTH_LEN: usize = 12;

/// The destination of datagrams to multicast groups (IBA 10.5.2): no queue pair has this number.
pub const MULTICAST_QPN: u32 = 0xff_ffff;

/// Bytes of the longest headers that an opcode asks for: BTH, XRCETH, AtomicETH.
pub const MAX_HEADER_LEN: usize = BTH_LEN + 4 + 28;

/// Reserved bytes that follow the BTH of a CNP (IBA annex A17.9.3); they pass as its payload.
pub const CNP_RESERVED_LEN: usize = 16;

/// Base transport header (IBA 9.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bth {
    /// What the packet is.
    pub opcode: Opcode,
    /// Solicited event.
    pub solicited: bool,
    /// MigReq; hardware sets it on everything, kernel rxe never does.
    pub mig_req: bool,
    /// Pad bytes after the payload, 0 to 3.
    pub pad: u8,
    /// Transport header version; 0.
    pub tver: u8,
    /// Partition key; 0xffff.
    pub pkey: u16,
    /// Forward congestion notification.
    pub fecn: bool,
    /// Backward congestion notification.
    pub becn: bool,
    /// Six reserved bits behind FECN and BECN.
    pub resv6: u8,
    /// Destination queue pair, 24 bits.
    pub dest_qp: u32,
    /// The responder shall acknowledge.
    pub ack_req: bool,
    /// Seven reserved bits behind AckReq.
    pub resv7: u8,
    /// Sequence number.
    pub psn: Psn,
}

impl Bth {
    /// A BTH as Ferroce sends it: default P_Key, MigReq set as hardware has it, everything else zero.
    pub const fn new(opcode: Opcode, dest_qp: u32, psn: Psn) -> Bth {
        Bth {
            opcode,
            solicited: false,
            mig_req: true,
            pad: 0,
            tver: 0,
            pkey: 0xffff,
            fecn: false,
            becn: false,
            resv6: 0,
            dest_qp,
            ack_req: false,
            resv7: 0,
            psn,
        }
    }
}

/// RDMA extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Reth {
    pub va: u64,
    pub rkey: u32,
    pub len: u32,
}

/// Datagram extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Deth {
    pub qkey: u32,
    pub src_qp: u32,
}

/// ACK extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// Kind and value, see [`Syndrome`].
    pub syndrome: Syndrome,
    /// Message sequence number, 24 bits.
    pub msn: u32,
}

/// The syndrome byte of an AETH (IBA 9.7.5.1.2). Open: every byte has a meaning or survives as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Syndrome(pub u8);

impl Syndrome {
    /// Positive acknowledge without credits.
    pub const ACK: Syndrome = Syndrome(0x1f);
    /// NAK: PSN sequence error.
    pub const NAK_SEQUENCE: Syndrome = Syndrome(0x60);
    /// NAK: invalid request.
    pub const NAK_INVALID_REQUEST: Syndrome = Syndrome(0x61);
    /// NAK: remote access error.
    pub const NAK_REMOTE_ACCESS: Syndrome = Syndrome(0x62);
    /// NAK: remote operational error.
    pub const NAK_REMOTE_OPERATIONAL: Syndrome = Syndrome(0x63);
    /// Receiver not ready, with a timer code.
    pub const fn rnr(code: u8) -> Syndrome {
        Syndrome(0x20 | (code & 0x1f))
    }
    /// A positive acknowledge (any credit count).
    pub const fn is_ack(self) -> bool {
        self.0 >> 5 == 0
    }
    /// The timer code if it is an RNR NAK.
    pub const fn rnr_code(self) -> Option<u8> {
        if self.0 >> 5 == 1 { Some(self.0 & 0x1f) } else { None }
    }
    /// The credit count code of a positive acknowledge; 31 means that no credits are given.
    pub const fn credits(self) -> Option<u8> {
        if self.is_ack() { Some(self.0 & 0x1f) } else { None }
    }
    /// A NAK other than RNR.
    pub const fn is_nak(self) -> bool {
        self.0 >> 5 == 3
    }
}

/// Atomic extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct AtomicEth {
    pub va: u64,
    pub rkey: u32,
    /// Swap value, or the addend of FETCH_ADD.
    pub swap_add: u64,
    pub compare: u64,
}

/// FLUSH extended transport header (IBA annex A19): placement type in bits 0 to 3, selectivity level in bits 4 and 5. Open: the
/// reserved bits survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feth(pub u32);

impl Feth {
    /// Placement type bit: global visibility.
    pub const GLOBAL: u32 = 1;
    /// Placement type bit: persistence.
    pub const PERSISTENT: u32 = 2;

    /// Placement type: [`Feth::GLOBAL`], [`Feth::PERSISTENT`] or both.
    pub const fn placement(self) -> u32 {
        self.0 & 0xf
    }

    /// Selectivity level: 0 the range of the RETH, 1 the whole region.
    pub const fn selectivity(self) -> u32 {
        self.0 >> 4 & 3
    }
}

/// All headers of one packet. Which optional ones are there is decided by the opcode alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Headers {
    pub bth: Bth,
    pub xrc_srqn: Option<u32>,
    pub deth: Option<Deth>,
    pub feth: Option<Feth>,
    pub reth: Option<Reth>,
    pub atomic: Option<AtomicEth>,
    pub aeth: Option<Aeth>,
    pub atomic_ack: Option<u64>,
    pub imm: Option<u32>,
    pub ieth: Option<u32>,
    /// The reserved first byte of the XRCETH, or the fifth of the DETH; 0 in what we send. No packet has both.
    pub resv8: u8,
}

impl Headers {
    /// Only a BTH.
    pub const fn new(bth: Bth) -> Headers {
        Headers {
            bth,
            xrc_srqn: None,
            deth: None,
            feth: None,
            reth: None,
            atomic: None,
            aeth: None,
            atomic_ack: None,
            imm: None,
            ieth: None,
            resv8: 0,
        }
    }

    /// The headers of a congestion notification to the queue pair that sends too much. [`CNP_RESERVED_LEN`] zero bytes follow.
    pub const fn cnp(dest_qp: u32) -> Headers {
        let mut bth = Bth::new(Opcode::CNP, dest_qp, Psn::new(0));
        bth.becn = true;
        Headers::new(bth)
    }

    /// The extended headers that are there.
    pub fn ext(&self) -> Ext {
        let mut ext = Ext::empty();
        ext.set(Ext::XRCETH, self.xrc_srqn.is_some());
        ext.set(Ext::DETH, self.deth.is_some());
        ext.set(Ext::FETH, self.feth.is_some());
        ext.set(Ext::RETH, self.reth.is_some());
        ext.set(Ext::ATOMIC_ETH, self.atomic.is_some());
        ext.set(Ext::AETH, self.aeth.is_some());
        ext.set(Ext::ATOMIC_ACK_ETH, self.atomic_ack.is_some());
        ext.set(Ext::IMM_DT, self.imm.is_some());
        ext.set(Ext::IETH, self.ieth.is_some());
        ext
    }

    /// The extended headers are those that the opcode asks for. True of all that was parsed; what we send must be so too.
    pub fn matches_opcode(&self) -> bool {
        self.ext() == self.bth.opcode.layout().map_or(Ext::empty(), |layout| layout.ext)
    }
}
