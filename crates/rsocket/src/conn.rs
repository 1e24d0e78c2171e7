//! What the two ends tell each other in the private data of REQ and REP.

use crate::iomap;

/// Bytes of [`ConnData`].
pub const CONN_DATA_LEN: usize = 40;
/// Bytes of an [`Sge`].
pub const SGE_LEN: usize = 16;
/// Entries of our table of targets.
pub const TARGETS: usize = 2;

const VERSION: u8 = 1;
/// The sender's integers in memory are big-endian.
const FLAG_BIG_ENDIAN: u8 = 1 << 0;
/// `target_iomap_size` means something.
const FLAG_IOMAP: u8 = 1 << 1;

/// A piece of an end's memory that the other one may write to (`struct rs_sge`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Address at its owner.
    pub addr: u64,
    /// Remote key.
    pub key: u32,
    /// Bytes; of a table its entries.
    pub length: u32,
}

impl Sge {
    /// As it lies in the table of an end with little-endian integers.
    pub fn to_le_bytes(self) -> [u8; SGE_LEN] {
        self.bytes(u64::to_le_bytes, u32::to_le_bytes)
    }

    /// As it lies in the private data, and in the table of an end with big-endian integers.
    pub fn to_be_bytes(self) -> [u8; SGE_LEN] {
        self.bytes(u64::to_be_bytes, u32::to_be_bytes)
    }

    fn bytes(self, long: fn(u64) -> [u8; 8], short: fn(u32) -> [u8; 4]) -> [u8; SGE_LEN] {
        let mut bytes = [0; SGE_LEN];
        bytes[..8].copy_from_slice(&long(self.addr));
        bytes[8..12].copy_from_slice(&short(self.key));
        bytes[12..].copy_from_slice(&short(self.length));
        bytes
    }

    fn from_be_bytes(bytes: &[u8; SGE_LEN]) -> Sge {
        Sge { addr: u64_at(bytes, 0), key: u32_at(bytes, 8), length: u32_at(bytes, 12) }
    }
}

/// `struct rs_conn_data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnData {
    /// The sender's integers in memory are big-endian.
    pub big_endian: bool,
    /// Messages that the sender has room for.
    pub credits: u16,
    /// Entries of its table of mappings, which lies behind the table of targets; rounded as [`iomap::to_scaled`] does it.
    pub iomaps: u16,
    /// Its table of targets.
    pub table: Sge,
    /// The first target.
    pub target: Sge,
}

/// Why a peer's private data is not that of an rsocket that we can talk to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnError {
    /// Fewer bytes than [`CONN_DATA_LEN`].
    #[error("the private data has {0} bytes, fewer than the {CONN_DATA_LEN} of an rsocket's")]
    Short(usize),
    /// Not version 1.
    #[error("version {0} of the protocol of rsockets; only version 1 is known")]
    Version(u8),
    /// No room for a target beside the first.
    #[error("the table of targets has {0} entries, fewer than {TARGETS}")]
    Table(u32),
}

impl ConnData {
    /// As sent.
    pub fn to_bytes(&self) -> [u8; CONN_DATA_LEN] {
        let mut bytes = [0; CONN_DATA_LEN];
        bytes[0] = VERSION;
        bytes[1] = FLAG_IOMAP | if self.big_endian { FLAG_BIG_ENDIAN } else { 0 };
        bytes[2..4].copy_from_slice(&self.credits.to_be_bytes());
        bytes[7] = iomap::to_scaled(self.iomaps.into());
        bytes[8..24].copy_from_slice(&self.table.to_be_bytes());
        bytes[24..].copy_from_slice(&self.target.to_be_bytes());
        bytes
    }

    /// Reads what a peer sent; bytes behind it are padding.
    ///
    /// # Errors
    /// It is no rsocket, or one that we cannot talk to.
    pub fn parse(bytes: &[u8]) -> Result<ConnData, ConnError> {
        let bytes: &[u8; CONN_DATA_LEN] = bytes.first_chunk().ok_or(ConnError::Short(bytes.len()))?;
        let [version, flags, credits_high, credits_low, _, _, _, iomaps, rest @ ..] = bytes;
        let (table, target) = rest.split_first_chunk::<SGE_LEN>().expect("32 bytes are left");
        let target: &[u8; SGE_LEN] = target.first_chunk().expect("16 bytes are left");
        if *version != VERSION {
            return Err(ConnError::Version(*version));
        }
        let table = Sge::from_be_bytes(table);
        if (table.length as usize) < TARGETS {
            return Err(ConnError::Table(table.length));
        }
        Ok(ConnData {
            big_endian: flags & FLAG_BIG_ENDIAN != 0,
            credits: u16::from_be_bytes([*credits_high, *credits_low]),
            iomaps: if flags & FLAG_IOMAP != 0 { iomap::from_scaled(*iomaps) } else { 0 },
            table,
            target: Sge::from_be_bytes(target),
        })
    }
}

fn u64_at(bytes: &[u8; SGE_LEN], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u32_at(bytes: &[u8; SGE_LEN], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}
