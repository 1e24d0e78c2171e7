//! The memory of one simulated process: an arena with registered regions, guard bytes between them, and a check that nothing is
//! touched but what was resolved for it in the same call.

use std::collections::BTreeMap;

use ferroce_transport::{Access, AtomicOp, MemoryError, Sge, Span};

use crate::pattern::Pattern;

/// What memory holds that nobody wrote.
pub(crate) const CANARY: u8 = 0xa5;
/// Canary bytes in front of and behind each region.
const GUARD: usize = 256;
/// First address of a node's arena, times its number plus one.
const NODE_STRIDE: u64 = 1 << 40;

/// What a span was resolved for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Right {
    LocalRead,
    LocalWrite,
    RemoteRead,
    RemoteWrite,
    RemoteAtomic,
}

/// The address that requests use for a region's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Iova {
    /// Its own.
    Real,
    /// 0.
    Zero,
    /// So high that the region ends where 64 bits end.
    Top,
}

/// Names a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MrId(usize);

#[derive(Debug)]
struct Mr {
    pd: u32,
    key: u32,
    /// Real address.
    start: u64,
    len: u32,
    /// The address that requests use for `start`.
    iova: u64,
    access: Access,
    valid: bool,
    window: bool,
    /// Bytes given out by `alloc`.
    used: u32,
}

/// A piece of a region that was given out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Real address.
    pub(crate) at: u64,
    /// Address for requests.
    pub(crate) va: u64,
    /// lkey and rkey.
    pub(crate) key: u32,
    pub(crate) len: u32,
}

impl Piece {
    pub(crate) fn sge(&self, offset: u32, len: u32) -> Sge {
        Sge { addr: self.va + u64::from(offset), length: len, lkey: self.key }
    }
}

#[derive(Debug)]
pub(crate) struct NodeMemory {
    base: u64,
    bytes: Vec<u8>,
    mrs: Vec<Mr>,
    by_key: BTreeMap<u32, usize>,
    /// Address ranges that were unmapped under their regions.
    gone: Vec<(u64, u64)>,
    /// Spans resolved in the present call.
    granted: Vec<(Span, Right)>,
    /// Ranges given out: outside of these every byte keeps the canary.
    allocated: Vec<(u64, u64)>,
}

impl NodeMemory {
    pub(crate) fn new(node: usize) -> NodeMemory {
        NodeMemory {
            base: NODE_STRIDE * (node as u64 + 1),
            bytes: Vec::new(),
            mrs: Vec::new(),
            by_key: BTreeMap::new(),
            gone: Vec::new(),
            granted: Vec::new(),
            allocated: Vec::new(),
        }
    }

    /// Registers `len` bytes of fresh memory under a new key.
    pub(crate) fn register(&mut self, pd: u32, len: u32, access: Access, key: u32, iova: Iova) -> MrId {
        let start = self.base + (self.bytes.len() + GUARD) as u64;
        let aligned = (len as usize).next_multiple_of(64);
        self.bytes.resize(self.bytes.len() + GUARD + aligned + GUARD, CANARY);
        let iova = match iova {
            Iova::Real => start,
            Iova::Zero => 0,
            Iova::Top => u64::MAX - aligned as u64 - 7,
        };
        self.add(Mr { pd, key, start, len, iova, access, valid: true, window: false, used: 0 })
    }

    /// Binds a window to a piece of a region: a key of its own that can be invalidated.
    pub(crate) fn bind_window(&mut self, pd: u32, piece: Piece, access: Access, key: u32) -> MrId {
        let (start, iova, len) = (piece.at, piece.va, piece.len);
        self.add(Mr { pd, key, start, len, iova, access, valid: true, window: true, used: len })
    }

    fn add(&mut self, mr: Mr) -> MrId {
        let index = self.mrs.len();
        assert!(self.by_key.insert(mr.key, index).is_none(), "each key is given once");
        self.mrs.push(mr);
        MrId(index)
    }

    pub(crate) fn contains(&self, at: u64) -> bool {
        (self.base..self.base + self.bytes.len() as u64).contains(&at)
    }

    pub(crate) fn has_key(&self, key: u32) -> bool {
        self.by_key.contains_key(&key)
    }

    /// Gives out the next `len` bytes of a region, with some canary bytes behind; `None` if it is used up.
    pub(crate) fn alloc(&mut self, mr: MrId, len: u32, gap: u32) -> Option<Piece> {
        let mr = &mut self.mrs[mr.0];
        let offset = mr.used;
        let end = offset.checked_add(len)?;
        if end > mr.len {
            return None;
        }
        mr.used = (end + gap).next_multiple_of(8);
        let piece = Piece { at: mr.start + u64::from(offset), va: mr.iova + u64::from(offset), key: mr.key, len };
        self.allocated.push((piece.at, piece.at + u64::from(len)));
        Some(piece)
    }

    /// The whole region as one piece.
    pub(crate) fn whole(&mut self, mr: MrId) -> Piece {
        let Mr { start, iova, key, len, .. } = self.mrs[mr.0];
        self.mrs[mr.0].used = len;
        self.allocated.push((start, start + u64::from(len)));
        Piece { at: start, va: iova, key, len }
    }

    /// A region as a piece, without giving it out.
    pub(crate) fn piece_of(&self, mr: MrId) -> Piece {
        let Mr { start, iova, key, len, .. } = self.mrs[mr.0];
        Piece { at: start, va: iova, key, len }
    }

    /// The first address of the region that a piece is of, as requests have it.
    pub(crate) fn begin_of(&self, piece: Piece) -> u64 {
        self.mrs[self.by_key[&piece.key]].iova
    }

    /// The address behind that region.
    pub(crate) fn end_of(&self, piece: Piece) -> u64 {
        let mr = &self.mrs[self.by_key[&piece.key]];
        mr.iova.wrapping_add(u64::from(mr.len))
    }

    /// Any byte of a region may be written by anyone.
    pub(crate) fn concede(&mut self, mr: MrId) {
        let Mr { start, len, .. } = self.mrs[mr.0];
        self.allocated.push((start, start + u64::from(len)));
    }

    pub(crate) fn deregister(&mut self, mr: MrId) {
        self.mrs[mr.0].valid = false;
    }

    /// Takes the memory of a region away; its key stays good.
    pub(crate) fn unmap(&mut self, mr: MrId) {
        let Mr { start, len, .. } = self.mrs[mr.0];
        self.gone.push((start, start + u64::from(len)));
    }

    /// The real address of an element, whatever its key is worth.
    pub(crate) fn place(&self, sge: &Sge) -> u64 {
        self.by_key.get(&sge.lkey).map_or(0, |&index| {
            let mr = &self.mrs[index];
            sge.addr.wrapping_sub(mr.iova).wrapping_add(mr.start)
        })
    }

    fn is_gone(&self, at: u64, len: u32) -> bool {
        self.gone.iter().any(|&(start, end)| at < end && at + u64::from(len) > start)
    }

    /// Reads as the program does.
    pub(crate) fn read(&self, at: u64, len: u32) -> &[u8] {
        let offset = (at - self.base) as usize;
        &self.bytes[offset..offset + len as usize]
    }

    /// Writes as the program does.
    pub(crate) fn write(&mut self, at: u64, len: u32) -> &mut [u8] {
        let offset = (at - self.base) as usize;
        &mut self.bytes[offset..offset + len as usize]
    }

    // What the transport sees.

    /// A call of the transport begins: what was resolved before is stale.
    pub(crate) fn begin_call(&mut self) {
        self.granted.clear();
    }

    pub(crate) fn resolve(&mut self, pd: u32, key: u32, va: u64, len: u32, right: Right) -> Result<Span, MemoryError> {
        let mr = self.by_key.get(&key).map(|&index| &self.mrs[index]).filter(|mr| mr.valid);
        let mr = mr.ok_or(MemoryError::BadKey)?;
        if mr.pd != pd {
            return Err(MemoryError::WrongPd);
        }
        let offset = va.checked_sub(mr.iova).ok_or(MemoryError::Bounds)?;
        if offset.checked_add(u64::from(len)).is_none_or(|end| end > u64::from(mr.len)) {
            return Err(MemoryError::Bounds);
        }
        let need = match right {
            Right::LocalRead => Access::empty(),
            Right::LocalWrite => Access::LOCAL_WRITE,
            Right::RemoteRead => Access::REMOTE_READ,
            Right::RemoteWrite => Access::REMOTE_WRITE,
            Right::RemoteAtomic => Access::REMOTE_ATOMIC,
        };
        if !mr.access.contains(need) {
            return Err(MemoryError::Access);
        }
        let span = Span { addr: mr.start + offset, len };
        self.granted.push((span, right));
        Ok(span)
    }

    /// Was `[at, at + len)` resolved for `right` in this call?
    pub(crate) fn is_granted(&self, at: u64, len: u32, right: Right) -> bool {
        self.granted.iter().any(|&(span, granted)| {
            granted == right && at >= span.addr && at + u64::from(len) <= span.addr + u64::from(span.len)
        })
    }

    pub(crate) fn store(&mut self, at: u64, data: &[u8]) -> Result<(), MemoryError> {
        if self.is_gone(at, data.len() as u32) {
            return Err(MemoryError::Fault);
        }
        self.write(at, data.len() as u32).copy_from_slice(data);
        Ok(())
    }

    /// Runs an atomic; gives the old value.
    pub(crate) fn atomic(&mut self, at: u64, op: AtomicOp) -> Result<u64, MemoryError> {
        if self.is_gone(at, 8) {
            return Err(MemoryError::Fault);
        }
        let old = self.word(at);
        let new = match op {
            AtomicOp::CompareSwap { compare, swap } if compare == old => swap,
            AtomicOp::CompareSwap { .. } => old,
            AtomicOp::FetchAdd { add } => old.wrapping_add(add),
        };
        self.write(at, 8).copy_from_slice(&new.to_ne_bytes());
        Ok(old)
    }

    pub(crate) fn word(&self, at: u64) -> u64 {
        u64::from_ne_bytes(self.read(at, 8).try_into().expect("eight bytes"))
    }

    /// The bytes of a span, as a link reads them.
    pub(crate) fn load(&self, span: Span) -> Result<&[u8], MemoryError> {
        if span.len == 0 {
            return Ok(&[]);
        }
        if self.is_gone(span.addr, span.len) {
            return Err(MemoryError::Fault);
        }
        Ok(self.read(span.addr, span.len))
    }

    pub(crate) fn invalidate(&mut self, pd: u32, key: u32) -> Result<(), MemoryError> {
        let index = self.by_key.get(&key).copied().filter(|&index| self.mrs[index].valid);
        let mr = &mut self.mrs[index.ok_or(MemoryError::BadKey)?];
        if mr.pd != pd {
            return Err(MemoryError::WrongPd);
        }
        if !mr.window {
            return Err(MemoryError::Access);
        }
        mr.valid = false;
        Ok(())
    }

    // Checks of the whole arena.

    /// The first byte outside everything given out that is no canary any more.
    pub(crate) fn find_stray_write(&mut self) -> Option<u64> {
        self.allocated.sort_unstable();
        let mut at = self.base;
        let end = self.base + self.bytes.len() as u64;
        let ends = std::iter::once((end, end));
        for (start, stop) in self.allocated.iter().copied().chain(ends) {
            if start > at {
                let gap = &self.bytes[(at - self.base) as usize..(start - self.base) as usize];
                if let Some(index) = first_other(gap, CANARY) {
                    return Some(at + index as u64);
                }
            }
            at = at.max(stop);
        }
        None
    }

    /// The first byte of `[at, at + len)` that is neither as the pattern has it up to `done` nor a canary behind.
    pub(crate) fn find_difference(&self, at: u64, len: u32, pattern: Pattern, done: u32) -> Option<u64> {
        let (written, rest) = self.read(at, len).split_at(done as usize);
        if !pattern.matches(written) {
            let expected = pattern.bytes(written.len());
            return written.iter().zip(&expected).position(|(a, b)| a != b).map(|index| at + index as u64);
        }
        first_other(rest, CANARY).map(|index| at + u64::from(done) + index as u64)
    }
}

/// The first byte that is not `byte`.
fn first_other(bytes: &[u8], byte: u8) -> Option<usize> {
    // Sixteen at a time: arenas have megabytes.
    let pattern = [byte; 16];
    let skip = bytes.chunks_exact(16).take_while(|chunk| *chunk == pattern).count() * 16;
    bytes[skip..].iter().position(|&b| b != byte).map(|index| skip + index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> (NodeMemory, MrId) {
        let mut memory = NodeMemory::new(0);
        let mr = memory.register(1, 100, Access::LOCAL_WRITE | Access::REMOTE_WRITE, 0x77, Iova::Real);
        (memory, mr)
    }

    #[test]
    fn keys_bounds_and_rights() {
        let (mut memory, mr) = memory();
        let whole = memory.whole(mr);
        assert_eq!(memory.resolve(1, 0x78, whole.va, 1, Right::RemoteWrite), Err(MemoryError::BadKey));
        assert_eq!(memory.resolve(2, 0x77, whole.va, 1, Right::RemoteWrite), Err(MemoryError::WrongPd));
        assert_eq!(memory.resolve(1, 0x77, whole.va + 1, 100, Right::RemoteWrite), Err(MemoryError::Bounds));
        assert_eq!(memory.resolve(1, 0x77, whole.va - 1, 1, Right::RemoteWrite), Err(MemoryError::Bounds));
        assert_eq!(memory.resolve(1, 0x77, whole.va, 100, Right::RemoteRead), Err(MemoryError::Access));
        let span = memory.resolve(1, 0x77, whole.va + 10, 90, Right::RemoteWrite).unwrap();
        assert_eq!(span.addr, whole.at + 10);
        assert!(memory.is_granted(span.addr, 90, Right::RemoteWrite));
        assert!(!memory.is_granted(span.addr, 91, Right::RemoteWrite));
        assert!(!memory.is_granted(span.addr, 90, Right::LocalWrite));
        memory.begin_call();
        assert!(!memory.is_granted(span.addr, 90, Right::RemoteWrite));
    }

    #[test]
    fn stray_bytes_are_found() {
        let (mut memory, mr) = memory();
        let piece = memory.alloc(mr, 10, 3).unwrap();
        memory.store(piece.at, &[1; 10]).unwrap();
        assert_eq!(memory.find_stray_write(), None);
        memory.store(piece.at + 10, &[1]).unwrap();
        assert_eq!(memory.find_stray_write(), Some(piece.at + 10));
    }

    #[test]
    fn unmapped_memory_faults() {
        let (mut memory, mr) = memory();
        let piece = memory.alloc(mr, 16, 0).unwrap();
        memory.unmap(mr);
        assert_eq!(memory.store(piece.at, &[0]), Err(MemoryError::Fault));
        assert_eq!(memory.load(Span { addr: piece.at, len: 1 }), Err(MemoryError::Fault));
        assert_eq!(memory.atomic(piece.at, AtomicOp::FetchAdd { add: 1 }), Err(MemoryError::Fault));
    }
}
