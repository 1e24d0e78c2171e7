//! Management datagrams of communication management (IBA 12.6, 13.4.2; annex A11 for the IP header in their private data).
//!
//! A MAD is the 256 bytes of payload of a UD SEND_ONLY between two queue pairs 1: a header of 24 bytes and 232 bytes that depend on
//! the message. [`Mad::parse`] and [`Mad::emit`] deal with both; [`gsi_headers`] and [`check_gsi`] with the packet around them;
//! [`IpHeader`] and [`ServiceId`] with what RDMA-CM puts into service ids and private data.

mod codes;
mod display;
mod fields;
mod ip;
mod messages;

pub use codes::*;
pub use ip::*;
pub use messages::*;

use crate::{Bth, Deth, Headers, Opcode, Psn};
use fields::Data;

/// Bytes of a MAD.
pub const MAD_LEN: usize = 256;

/// Bytes of the header common to all MADs.
pub const MAD_HEADER_LEN: usize = 24;

/// The queue pair of the general services interface.
pub const GSI_QPN: u32 = 1;

/// The Q_Key of queue pair 1 (IBA 10.2.5).
pub const GSI_QKEY: u32 = 0x8001_0000;

const BASE_VERSION: u8 = 1;
const CLASS_COMMUNICATION_MANAGEMENT: u8 = 0x07;
const CLASS_VERSION: u8 = 2;
const METHOD_SEND: u8 = 0x03;

/// A management datagram of the communication management class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mad {
    /// Transaction id: an answer has that of the request.
    pub tid: u64,
    /// Status of the header; 0 in all that is sent.
    pub status: u16,
    /// Attribute modifier: the options of Enhanced Connection Establishment in REQ, REP and SIDR_REP, else 0.
    pub attr_mod: u32,
    /// What it says.
    pub message: Message,
}

/// Why bytes are no MAD of communication management.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MadError {
    /// Not 256 bytes.
    #[error("a MAD has 256 bytes, not {len}")]
    Length {
        /// Bytes found.
        len: usize,
    },
    /// Base version other than 1.
    #[error("unknown MAD base version {version}")]
    BaseVersion {
        /// The version found.
        version: u8,
    },
    /// Another management class than communication management.
    #[error("management class {class:#04x} is not communication management (0x07)")]
    Class {
        /// The class found.
        class: u8,
    },
    /// Class version other than 2. IBA 12.6.7.2 would have a REJ; an unknown layout cannot be answered safely.
    #[error("unknown version {version} of the communication management class")]
    ClassVersion {
        /// The version found.
        version: u8,
    },
    /// Method other than Send.
    #[error("method {method:#04x} is not Send (0x03)")]
    Method {
        /// The method found.
        method: u8,
    },
    /// An attribute that is no message known here.
    #[error("unknown attribute {attribute:#06x}")]
    Attribute {
        /// The attribute id found.
        attribute: u16,
    },
}

impl Mad {
    /// A MAD with status and attribute modifier 0.
    pub const fn new(tid: u64, message: Message) -> Mad {
        Mad { tid, status: 0, attr_mod: 0, message }
    }

    /// Reads the payload of a UD packet to queue pair 1. Reserved fields are ignored, codes of all kinds survive.
    pub fn parse(payload: &[u8]) -> Result<Mad, MadError> {
        let Ok(bytes) = <&[u8; MAD_LEN]>::try_from(payload) else {
            return Err(MadError::Length { len: payload.len() });
        };
        let (header, data) = split(bytes);
        let &[base, class, version, method, s0, s1, _, _, tid @ .., a0, a1, _, _, m0, m1, m2, m3] = header;
        if base != BASE_VERSION {
            return Err(MadError::BaseVersion { version: base });
        }
        if class != CLASS_COMMUNICATION_MANAGEMENT {
            return Err(MadError::Class { class });
        }
        if version != CLASS_VERSION {
            return Err(MadError::ClassVersion { version });
        }
        if method != METHOD_SEND {
            return Err(MadError::Method { method });
        }
        let attribute = u16::from_be_bytes([a0, a1]);
        let Some(message) = Message::read(attribute, data) else {
            return Err(MadError::Attribute { attribute });
        };
        Ok(Mad {
            tid: u64::from_be_bytes(tid),
            status: u16::from_be_bytes([s0, s1]),
            attr_mod: u32::from_be_bytes([m0, m1, m2, m3]),
            message,
        })
    }

    /// The bytes on the wire; reserved fields are zero, bits beyond the width of a field are cut off.
    pub fn emit(&self) -> [u8; MAD_LEN] {
        let mut bytes = [0; MAD_LEN];
        bytes[..4].copy_from_slice(&[BASE_VERSION, CLASS_COMMUNICATION_MANAGEMENT, CLASS_VERSION, METHOD_SEND]);
        bytes[4..6].copy_from_slice(&self.status.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.tid.to_be_bytes());
        bytes[16..18].copy_from_slice(&self.message.attribute().to_be_bytes());
        bytes[20..24].copy_from_slice(&self.attr_mod.to_be_bytes());
        let mut data: Data = [0; _];
        self.message.write(&mut data);
        bytes[MAD_HEADER_LEN..].copy_from_slice(&data);
        bytes
    }

    /// What Enhanced Connection Establishment says in a REQ, REP or SIDR_REP; zero in the others.
    pub fn ece(&self) -> Ece {
        let vendor_id = match &self.message {
            Message::Req(req) => req.vendor_id,
            Message::Rep(rep) => u32::from_be_bytes([0, rep.vendor_id_h, rep.vendor_id_m, rep.vendor_id_l]),
            Message::SidrRep(rep) => u32::from(rep.vendor_id_h) << 8 | u32::from(rep.vendor_id_l),
            _ => return Ece::default(),
        };
        Ece { vendor_id, attr_mod: self.attr_mod }
    }

    /// The same MAD with these options; a message that has no place for them is left as it is.
    pub fn with_ece(mut self, ece: Ece) -> Mad {
        let [_, h, m, l] = ece.vendor_id.to_be_bytes();
        match &mut self.message {
            Message::Req(req) => req.vendor_id = ece.vendor_id & 0x00ff_ffff,
            Message::Rep(rep) => (rep.vendor_id_h, rep.vendor_id_m, rep.vendor_id_l) = (h, m, l),
            Message::SidrRep(rep) => (rep.vendor_id_h, rep.vendor_id_l) = (u16::from_be_bytes([h, m]), l),
            _ => return self,
        }
        self.attr_mod = ece.attr_mod;
        self
    }
}

/// Enhanced Connection Establishment (IBA annex A16 as the kernel has it): what a vendor's driver wants to tell the other end's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ece {
    /// IEEE OUI of the vendor, 24 bits; 0 means that there are no options.
    pub vendor_id: u32,
    /// The options.
    pub attr_mod: u32,
}

fn split(bytes: &[u8; MAD_LEN]) -> (&[u8; MAD_HEADER_LEN], &Data) {
    let (header, data) = bytes.split_first_chunk().expect("256 is more than 24");
    (header, data.try_into().expect("256 bytes without 24 are 232"))
}

/// The headers of a packet that carries a MAD to queue pair 1 of the other end, as kernels send them.
pub const fn gsi_headers(psn: Psn) -> Headers {
    let mut bth = Bth::new(Opcode::UD_SEND_ONLY, GSI_QPN, psn);
    bth.ack_req = true;
    let mut headers = Headers::new(bth);
    headers.deth = Some(Deth { qkey: GSI_QKEY, src_qp: GSI_QPN });
    headers
}

/// Why a packet to queue pair 1 is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GsiError {
    /// Not for queue pair 1.
    #[error("queue pair {qpn:#x} is not the general services interface")]
    Destination {
        /// The destination queue pair.
        qpn: u32,
    },
    /// Queue pair 1 takes UD SEND_ONLY and nothing else.
    #[error("{opcode} is no datagram of one packet")]
    Opcode {
        /// The opcode found.
        opcode: Opcode,
    },
    /// A Q_Key other than that of queue pair 1.
    #[error("Q_Key {qkey:#x} is not that of queue pair 1")]
    QKey {
        /// The key found.
        qkey: u32,
    },
    /// Sent by an ordinary queue pair: programs may not speak for their host.
    #[error("queue pair {qpn:#x} is not the other end's queue pair 1")]
    Source {
        /// The source queue pair.
        qpn: u32,
    },
}

/// Whether the headers are those of a packet from one queue pair 1 to another.
pub fn check_gsi(headers: &Headers) -> Result<(), GsiError> {
    if headers.bth.dest_qp != GSI_QPN {
        return Err(GsiError::Destination { qpn: headers.bth.dest_qp });
    }
    let Some(deth) = headers.deth.filter(|_| headers.bth.opcode == Opcode::UD_SEND_ONLY) else {
        return Err(GsiError::Opcode { opcode: headers.bth.opcode });
    };
    if deth.qkey != GSI_QKEY {
        return Err(GsiError::QKey { qkey: deth.qkey });
    }
    if deth.src_qp != GSI_QPN {
        return Err(GsiError::Source { qpn: deth.src_qp });
    }
    Ok(())
}
