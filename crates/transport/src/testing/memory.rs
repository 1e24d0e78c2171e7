//! Simulated memory behind keys.

use crate::host::{AtomicOp, Memory, MemoryError, Span};
use crate::verbs::{Access, Sge};

/// Distance between regions: nothing that leaves one reaches the next.
const STRIDE: u64 = 1 << 32;

/// A registered region. Its lkey and rkey are the same number; addresses are the region's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// lkey and rkey.
    pub key: u32,
}

impl Region {
    /// The element `[offset, offset + len)` of it.
    pub fn sge(&self, offset: u32, len: u32) -> Sge {
        Sge { addr: self.addr + u64::from(offset), length: len, lkey: self.key }
    }
}

#[derive(Debug)]
struct Entry {
    region: Region,
    pd: u32,
    access: Access,
    bytes: Vec<u8>,
    /// The key still works.
    valid: bool,
    /// A memory window: its key can be invalidated.
    window: bool,
    /// The memory is gone, though the key is good.
    gone: bool,
}

/// Memory of one simulated process.
#[derive(Debug, Default)]
pub struct SimMemory {
    entries: Vec<Entry>,
    /// End addresses of stores that were the last of a message.
    pub last_stores: Vec<u64>,
    /// Stores made.
    pub stores: u32,
    /// Atomics executed.
    pub atomics: u32,
}

impl SimMemory {
    /// Registers `len` zero bytes.
    pub fn register(&mut self, pd: u32, len: u32, access: Access) -> Region {
        self.insert(pd, len, access, false)
    }

    /// Makes a window: a region of its own whose rkey can be invalidated.
    pub fn bind_window(&mut self, pd: u32, len: u32, access: Access) -> Region {
        self.insert(pd, len, access, true)
    }

    fn insert(&mut self, pd: u32, len: u32, access: Access, window: bool) -> Region {
        let index = self.entries.len() as u32 + 1;
        let region = Region { addr: STRIDE * u64::from(index), len, key: index << 8 | 0x5a };
        self.entries.push(Entry { region, pd, access, bytes: vec![0; len as usize], valid: true, window, gone: false });
        region
    }

    fn entry(&mut self, region: Region) -> &mut Entry {
        self.entries.iter_mut().find(|entry| entry.region == region).expect("the region is of this memory")
    }

    /// Deregisters: its key works no more.
    pub fn deregister(&mut self, region: Region) {
        self.entry(region).valid = false;
    }

    /// Takes the memory away under a key that stays good.
    pub fn unmap(&mut self, region: Region) {
        self.entry(region).gone = true;
    }

    /// Writes as the program does.
    pub fn write(&mut self, region: Region, offset: u32, bytes: &[u8]) {
        let offset = offset as usize;
        self.entry(region).bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Reads as the program does.
    pub fn read(&self, region: Region, offset: u32, len: u32) -> &[u8] {
        let entry = self.entries.iter().find(|entry| entry.region == region).expect("the region is of this memory");
        &entry.bytes[offset as usize..(offset + len) as usize]
    }

    /// The bytes of a span, as a link reads them.
    pub fn load(&self, span: Span) -> Result<&[u8], MemoryError> {
        if span.len == 0 {
            return Ok(&[]);
        }
        let entry = self.entries.iter().find(|entry| entry.contains(span)).ok_or(MemoryError::Fault)?;
        if entry.gone {
            return Err(MemoryError::Fault);
        }
        let offset = (span.addr - entry.region.addr) as usize;
        Ok(&entry.bytes[offset..offset + span.len as usize])
    }

    fn bytes_mut(&mut self, span: Span) -> Result<&mut [u8], MemoryError> {
        let entry = self.entries.iter_mut().find(|entry| entry.contains(span)).expect("spans come from resolving");
        if entry.gone {
            return Err(MemoryError::Fault);
        }
        let offset = (span.addr - entry.region.addr) as usize;
        Ok(&mut entry.bytes[offset..offset + span.len as usize])
    }

    fn resolve(&self, pd: u32, key: u32, addr: u64, len: u32, need: Access) -> Result<Span, MemoryError> {
        let span = Span { addr, len };
        let entry =
            self.entries.iter().find(|entry| entry.region.key == key && entry.valid).ok_or(MemoryError::BadKey)?;
        if entry.pd != pd {
            return Err(MemoryError::WrongPd);
        }
        if !entry.contains(span) {
            return Err(MemoryError::Bounds);
        }
        if !entry.access.contains(need) {
            return Err(MemoryError::Access);
        }
        Ok(span)
    }
}

impl Entry {
    fn contains(&self, span: Span) -> bool {
        let Region { addr, len, .. } = self.region;
        span.addr >= addr && span.addr.checked_add(u64::from(span.len)).is_some_and(|end| end <= addr + u64::from(len))
    }
}

impl Memory for SimMemory {
    fn resolve_local(&mut self, pd: u32, sge: &Sge, write: bool) -> Result<Span, MemoryError> {
        if sge.length == 0 {
            return Ok(Span { addr: sge.addr, len: 0 });
        }
        let need = if write { Access::LOCAL_WRITE } else { Access::empty() };
        self.resolve(pd, sge.lkey, sge.addr, sge.length, need)
    }

    fn resolve_remote(&mut self, pd: u32, rkey: u32, va: u64, len: u32, access: Access) -> Result<Span, MemoryError> {
        if len == 0 {
            return Ok(Span { addr: va, len: 0 });
        }
        self.resolve(pd, rkey, va, len, access)
    }

    fn check_key(&mut self, pd: u32, rkey: u32, access: Access) -> Result<(), MemoryError> {
        let addr = self.entries.iter().find(|entry| entry.region.key == rkey).map_or(0, |entry| entry.region.addr);
        self.resolve(pd, rkey, addr, 0, access).map(drop)
    }

    fn load(&mut self, span: Span, into: &mut [u8]) -> Result<(), MemoryError> {
        into.copy_from_slice(SimMemory::load(self, span)?);
        Ok(())
    }

    fn store(&mut self, span: Span, data: &[u8], last: bool) -> Result<(), MemoryError> {
        assert!(data.len() <= span.len as usize, "a store stays inside its span");
        assert!(!data.is_empty(), "an empty store means nothing");
        let span = Span { len: data.len() as u32, ..span };
        self.bytes_mut(span)?.copy_from_slice(data);
        self.stores += 1;
        if last {
            self.last_stores.push(span.addr + data.len() as u64);
        }
        Ok(())
    }

    fn atomic(&mut self, span: Span, op: AtomicOp) -> Result<u64, MemoryError> {
        assert_eq!((span.len, span.addr % 8), (8, 0), "the transport checked alignment");
        let bytes = self.bytes_mut(span)?;
        let old = u64::from_ne_bytes(bytes.try_into().expect("a span of 8 bytes"));
        let new = match op {
            AtomicOp::CompareSwap { compare, swap } if compare == old => swap,
            AtomicOp::CompareSwap { .. } => old,
            AtomicOp::FetchAdd { add } => old.wrapping_add(add),
        };
        bytes.copy_from_slice(&new.to_ne_bytes());
        self.atomics += 1;
        Ok(old)
    }

    fn invalidate(&mut self, pd: u32, rkey: u32, _qpn: u32) -> Result<(), MemoryError> {
        let entry =
            self.entries.iter_mut().find(|entry| entry.region.key == rkey && entry.valid).ok_or(MemoryError::BadKey)?;
        if entry.pd != pd {
            return Err(MemoryError::WrongPd);
        }
        if !entry.window {
            return Err(MemoryError::Access);
        }
        entry.valid = false;
        Ok(())
    }
}
