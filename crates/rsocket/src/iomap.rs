//! Mappings: memory of one end that the other writes to at offsets (`riomap`, `riowrite`).

use crate::conn::{SGE_LEN, Sge};

/// Bytes of an [`Iomap`] in the table.
pub const IOMAP_LEN: usize = 24;

/// Up to here numbers are exact in eight bits; above, the low eight bits of a multiple of 256 are left out.
const EXACT_MAX: u32 = 1 << 7;

/// Number of entries that eight bits stand for.
pub fn from_scaled(scaled: u8) -> u16 {
    let scaled = u16::from(scaled);
    if u32::from(scaled) <= EXACT_MAX { scaled } else { (scaled & 0x7f) << 8 }
}

/// Eight bits for a number of entries, rounded down. More than 32,512 count as so many.
pub fn to_scaled(value: u32) -> u8 {
    let value = value.min(0x7f00);
    let scaled = if value <= EXACT_MAX { value } else { EXACT_MAX | value >> 8 };
    // From 129 to 255 the rule gives 128, which stands for itself.
    scaled as u8
}

/// A mapping (`struct rs_iomap`): what a peer wrote into our table, or what we write into its.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Iomap {
    /// Which offset its first byte has.
    pub offset: u64,
    /// The memory.
    pub sge: Sge,
}

impl Iomap {
    /// As it lies in the table of the peer.
    pub fn to_bytes(self, big_endian: bool) -> [u8; IOMAP_LEN] {
        let mut bytes = [0; IOMAP_LEN];
        let offset = if big_endian { self.offset.to_be_bytes() } else { self.offset.to_le_bytes() };
        let sge = if big_endian { self.sge.to_be_bytes() } else { self.sge.to_le_bytes() };
        bytes[..IOMAP_LEN - SGE_LEN].copy_from_slice(&offset);
        bytes[IOMAP_LEN - SGE_LEN..].copy_from_slice(&sge);
        bytes
    }

    /// Where `offset` lies, and how many bytes there are from there on; None outside.
    pub fn locate(&self, offset: u64) -> Option<(u64, u32)> {
        let within = u32::try_from(offset.checked_sub(self.offset)?).ok()?;
        let left = self.sge.length.checked_sub(within)?;
        (left > 0).then(|| (self.sge.addr.wrapping_add(within.into()), left))
    }
}
