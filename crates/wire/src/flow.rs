//! Flow control of UC and UD between two Ferroce ends: a packet of our own.
//!
//! The specification leaves opcodes 0xc0 to 0xff to manufacturers (IBA table 38). Ours has the plain BTH of any packet and, as its
//! payload, the bytes of a [`Flow`]. It is only ever sent to an end that asked for it or that answered with one before.

/// What a packet with opcode [`FERROCE_FLOW`](crate::Opcode::FERROCE_FLOW) says. The PSN of its BTH is the PSN asked about.
///
/// | byte | content |
/// |---|---|
/// | 0, 1 | `Fe`: others may use the opcode too |
/// | 2 | version of this layout, 1 |
/// | 3 | bit 0: question or answer; bit 1: packets were missing; others zero |
/// | 4 to 7 | Q_Key of a question to a UD queue pair, else zero |
/// | 8 | zero |
/// | 9 to 11 | the queue pair that sends this |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Question or answer.
    pub kind: FlowKind,
    /// Q_Key of a question to a UD queue pair, else 0.
    pub qkey: u32,
    /// The queue pair that sends this, 24 bits.
    pub src_qp: u32,
}

/// What a [`Flow`] packet is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlowKind {
    /// Asks whether everything up to the PSN was taken from the receive buffer. (Ordinary UC and UD packets ask by AckReq.)
    Question,
    /// Everything up to the PSN was taken from the receive buffer, or did not arrive.
    Answer {
        /// Packets were missing since the answer before (UC).
        missing: bool,
    },
}

/// Bytes of a [`Flow`].
pub const FLOW_LEN: usize = 12;

const MAGIC: [u8; 3] = [b'F', b'e', 1];
const ANSWER: u8 = 1;
const MISSING: u8 = 1 << 1;

impl Flow {
    /// The payload of the packet.
    pub const fn bytes(&self) -> [u8; FLOW_LEN] {
        let kind = match self.kind {
            FlowKind::Question => 0,
            FlowKind::Answer { missing: false } => ANSWER,
            FlowKind::Answer { missing: true } => ANSWER | MISSING,
        };
        let [m0, m1, version] = MAGIC;
        let [q0, q1, q2, q3] = self.qkey.to_be_bytes();
        let [_, s0, s1, s2] = self.src_qp.to_be_bytes();
        [m0, m1, version, kind, q0, q1, q2, q3, 0, s0, s1, s2]
    }

    /// Reads the payload of a packet. `None`: it is not one of ours, or of a version that we do not know.
    pub fn parse(payload: &[u8]) -> Option<Flow> {
        let &[m0, m1, version, kind, q0, q1, q2, q3, _, s0, s1, s2] = payload else { return None };
        if [m0, m1, version] != MAGIC {
            return None;
        }
        let kind = match kind {
            0 => FlowKind::Question,
            ANSWER => FlowKind::Answer { missing: false },
            kind if kind == ANSWER | MISSING => FlowKind::Answer { missing: true },
            _ => return None,
        };
        Some(Flow { kind, qkey: u32::from_be_bytes([q0, q1, q2, q3]), src_qp: u32::from_be_bytes([0, s0, s1, s2]) })
    }
}
