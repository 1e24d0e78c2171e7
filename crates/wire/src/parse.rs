//! From bytes to headers.

use core::ops::Range;

use crate::{Aeth, AtomicEth, BTH_LEN, Bth, Deth, Ext, Feth, Headers, Opcode, Psn, Reth, Syndrome};

/// Why bytes are not a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Shorter than a BTH.
    #[error("{len} bytes are too short for a BTH of 12")]
    TooShort {
        /// Bytes between UDP header and ICRC.
        len: usize,
    },
    /// A transport header version other than 0.
    #[error("unknown transport header version {tver}")]
    Version {
        /// The version found.
        tver: u8,
    },
    /// The packet ends inside a header that its opcode asks for.
    #[error("{opcode} ends inside its {header}: {have} of {need} bytes")]
    Truncated {
        /// What the packet says it is.
        opcode: Opcode,
        /// The specification's name of the header.
        header: &'static str,
        /// Bytes that were left.
        have: usize,
        /// Bytes that the header has.
        need: usize,
    },
    /// PadCnt is larger than what follows the headers.
    #[error("{pad} bytes of pad in {rest} bytes after the headers")]
    Pad {
        /// PadCnt of the BTH.
        pad: u8,
        /// Bytes of payload and pad.
        rest: usize,
    },
}

impl Headers {
    /// Takes the headers off a UDP payload whose ICRC was cut off, and tells where in it the payload without its pad is.
    ///
    /// An unknown opcode has a BTH only; what follows counts as payload. Payload behind an opcode that has none (an
    /// acknowledge, say) is reported as it is: to judge it is the transport's part.
    pub fn parse(packet: &[u8]) -> Result<(Headers, Range<usize>), ParseError> {
        let Some((bth, rest)) = packet.split_first_chunk::<BTH_LEN>() else {
            return Err(ParseError::TooShort { len: packet.len() });
        };
        let mut headers = Headers::new(Bth::read(bth));
        if headers.bth.tver != 0 {
            return Err(ParseError::Version { tver: headers.bth.tver });
        }
        let mut reader = Reader { rest, opcode: headers.bth.opcode };
        headers.read_extended(&mut reader)?;

        let rest = reader.rest.len();
        let pad = headers.bth.pad;
        let Some(payload) = rest.checked_sub(pad.into()) else {
            return Err(ParseError::Pad { pad, rest });
        };
        let start = packet.len() - rest;
        Ok((headers, start..start + payload))
    }

    fn read_extended(&mut self, reader: &mut Reader<'_>) -> Result<(), ParseError> {
        let ext = self.bth.opcode.layout().map_or(Ext::empty(), |layout| layout.ext);
        if ext.contains(Ext::XRCETH) {
            let [resv8, srqn @ ..] = reader.take::<4>("XRCETH")?;
            self.resv8 = resv8;
            self.xrc_srqn = Some(be24(srqn));
        }
        if ext.contains(Ext::DETH) {
            let [q0, q1, q2, q3, resv8, src_qp @ ..] = reader.take::<8>("DETH")?;
            self.resv8 = resv8;
            self.deth = Some(Deth { qkey: u32::from_be_bytes([q0, q1, q2, q3]), src_qp: be24(src_qp) });
        }
        if ext.contains(Ext::FETH) {
            self.feth = Some(Feth(reader.be32("FETH")?));
        }
        if ext.contains(Ext::RETH) {
            let mut fields = reader.fields::<16>("RETH")?;
            self.reth = Some(Reth { va: fields.be64(), rkey: fields.be32(), len: fields.be32() });
        }
        if ext.contains(Ext::ATOMIC_ETH) {
            let mut fields = reader.fields::<28>("AtomicETH")?;
            self.atomic = Some(AtomicEth {
                va: fields.be64(),
                rkey: fields.be32(),
                swap_add: fields.be64(),
                compare: fields.be64(),
            });
        }
        if ext.contains(Ext::AETH) {
            let [syndrome, msn @ ..] = reader.take::<4>("AETH")?;
            self.aeth = Some(Aeth { syndrome: Syndrome(syndrome), msn: be24(msn) });
        }
        if ext.contains(Ext::ATOMIC_ACK_ETH) {
            self.atomic_ack = Some(u64::from_be_bytes(reader.take("AtomicAckETH")?));
        }
        if ext.contains(Ext::IMM_DT) {
            self.imm = Some(reader.be32("ImmDt")?);
        }
        if ext.contains(Ext::IETH) {
            self.ieth = Some(reader.be32("IETH")?);
        }
        Ok(())
    }
}

impl Bth {
    /// Reads the twelve bytes of a BTH. Every pattern of bytes is one.
    pub const fn read(bytes: &[u8; BTH_LEN]) -> Bth {
        let &[opcode, flags, p0, p1, congestion, d0, d1, d2, ack, s0, s1, s2] = bytes;
        Bth {
            opcode: Opcode(opcode),
            solicited: flags & 0x80 != 0,
            mig_req: flags & 0x40 != 0,
            pad: flags >> 4 & 3,
            tver: flags & 0xf,
            pkey: u16::from_be_bytes([p0, p1]),
            fecn: congestion & 0x80 != 0,
            becn: congestion & 0x40 != 0,
            resv6: congestion & 0x3f,
            dest_qp: be24([d0, d1, d2]),
            ack_req: ack & 0x80 != 0,
            resv7: ack & 0x7f,
            psn: Psn::new(be24([s0, s1, s2])),
        }
    }
}

const fn be24([a, b, c]: [u8; 3]) -> u32 {
    u32::from_be_bytes([0, a, b, c])
}

/// What is left of a packet.
struct Reader<'a> {
    rest: &'a [u8],
    opcode: Opcode,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self, header: &'static str) -> Result<[u8; N], ParseError> {
        let Some((bytes, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(ParseError::Truncated { opcode: self.opcode, header, have: self.rest.len(), need: N });
        };
        self.rest = rest;
        Ok(*bytes)
    }

    fn be32(&mut self, header: &'static str) -> Result<u32, ParseError> {
        Ok(u32::from_be_bytes(self.take(header)?))
    }

    fn fields<const N: usize>(&mut self, header: &'static str) -> Result<Fields<N>, ParseError> {
        Ok(Fields { bytes: self.take(header)?, at: 0 })
    }
}

/// The fields of one header; its reader knows their sizes.
struct Fields<const N: usize> {
    bytes: [u8; N],
    at: usize,
}

impl<const N: usize> Fields<N> {
    fn next<const M: usize>(&mut self) -> [u8; M] {
        let mut field = [0; M];
        field.copy_from_slice(&self.bytes[self.at..self.at + M]);
        self.at += M;
        field
    }

    fn be32(&mut self) -> u32 {
        u32::from_be_bytes(self.next())
    }

    fn be64(&mut self) -> u64 {
        u64::from_be_bytes(self.next())
    }
}
