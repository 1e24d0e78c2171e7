//! From headers to bytes.

use crate::{BTH_LEN, Bth, Ext, Headers};

impl Headers {
    /// Bytes of these headers on the wire.
    pub fn len(&self) -> usize {
        self.ext().header_len()
    }

    /// Never: there is always a BTH.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Writes the headers to the first [`Headers::len`] bytes of `out`. Bits beyond the width of a field on the wire are cut off.
    ///
    /// # Panics
    /// If `out` is shorter.
    pub fn emit(&self, out: &mut [u8]) {
        let mut writer = Writer { out };
        writer.put(self.bth.bytes());
        if let Some(srqn) = self.xrc_srqn {
            writer.put(with_resv8(self.resv8, srqn));
        }
        if let Some(deth) = self.deth {
            writer.put(deth.qkey.to_be_bytes());
            writer.put(with_resv8(self.resv8, deth.src_qp));
        }
        if let Some(feth) = self.feth {
            writer.put(feth.0.to_be_bytes());
        }
        if let Some(reth) = self.reth {
            writer.put(reth.va.to_be_bytes());
            writer.put(reth.rkey.to_be_bytes());
            writer.put(reth.len.to_be_bytes());
        }
        if let Some(atomic) = self.atomic {
            writer.put(atomic.va.to_be_bytes());
            writer.put(atomic.rkey.to_be_bytes());
            writer.put(atomic.swap_add.to_be_bytes());
            writer.put(atomic.compare.to_be_bytes());
        }
        if let Some(aeth) = self.aeth {
            writer.put(with_resv8(aeth.syndrome.0, aeth.msn));
        }
        if let Some(original) = self.atomic_ack {
            writer.put(original.to_be_bytes());
        }
        if let Some(imm) = self.imm {
            writer.put(imm.to_be_bytes());
        }
        if let Some(rkey) = self.ieth {
            writer.put(rkey.to_be_bytes());
        }
    }
}

impl Ext {
    /// Bytes of a BTH with these headers behind it.
    pub const fn header_len(self) -> usize {
        const LENGTHS: [(Ext, usize); 9] = [
            (Ext::XRCETH, 4),
            (Ext::DETH, 8),
            (Ext::FETH, 4),
            (Ext::RETH, 16),
            (Ext::ATOMIC_ETH, 28),
            (Ext::AETH, 4),
            (Ext::ATOMIC_ACK_ETH, 8),
            (Ext::IMM_DT, 4),
            (Ext::IETH, 4),
        ];
        let mut len = BTH_LEN;
        let mut i = 0;
        while i < LENGTHS.len() {
            if self.contains(LENGTHS[i].0) {
                len += LENGTHS[i].1;
            }
            i += 1;
        }
        len
    }
}

impl Bth {
    /// The twelve bytes on the wire.
    pub const fn bytes(&self) -> [u8; BTH_LEN] {
        let flags = (self.solicited as u8) << 7 | (self.mig_req as u8) << 6 | (self.pad & 3) << 4 | self.tver & 0xf;
        let congestion = (self.fecn as u8) << 7 | (self.becn as u8) << 6 | self.resv6 & 0x3f;
        let ack = (self.ack_req as u8) << 7 | self.resv7 & 0x7f;
        let [p0, p1] = self.pkey.to_be_bytes();
        let [_, d0, d1, d2] = self.dest_qp.to_be_bytes();
        let [_, s0, s1, s2] = self.psn.get().to_be_bytes();
        [self.opcode.0, flags, p0, p1, congestion, d0, d1, d2, ack, s0, s1, s2]
    }
}

/// A byte and a number of 24 bits.
fn with_resv8(byte: u8, value: u32) -> [u8; 4] {
    (u32::from(byte) << 24 | value & 0x00ff_ffff).to_be_bytes()
}

struct Writer<'a> {
    out: &'a mut [u8],
}

impl Writer<'_> {
    fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        let out = core::mem::take(&mut self.out);
        let (field, rest) = out.split_at_mut(N);
        field.copy_from_slice(&bytes);
        self.out = rest;
    }
}
