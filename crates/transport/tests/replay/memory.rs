//! The memory of one machine of a recording, at the addresses and behind the keys that it had then.

use ferroce_transport::{Access, AtomicOp, Memory, MemoryError, Sge, Span};

/// Bytes of a region (`rc-nak-bounds` shows them).
pub(crate) const REGION_LEN: usize = 1 << 20;
/// Bytes at its beginning that are filled with the end's pattern.
const PATTERN_LEN: usize = 32_768;

struct Region {
    addr: u64,
    key: u32,
    access: Access,
    bytes: Vec<u8>,
}

/// A memory window of type 2. One whose key does not work any more is gone from the list.
struct Window {
    key: u32,
    addr: u64,
    len: u64,
    access: Access,
}

/// Regions and windows. There is one protection domain.
#[derive(Default)]
pub(crate) struct NodeMemory {
    regions: Vec<Region>,
    windows: Vec<Window>,
}

impl NodeMemory {
    /// Registers a region as the recording program filled it: byte i is `first` + i mod 251, behind 32 KiB `rest`.
    pub(crate) fn register_pattern(&mut self, addr: u64, key: u32, access: Access, first: u8, rest: u8) {
        let mut bytes = vec![rest; REGION_LEN];
        for (i, byte) in bytes[..PATTERN_LEN].iter_mut().enumerate() {
            *byte = first.wrapping_add((i % 251) as u8);
        }
        self.register(addr, key, access, bytes);
    }

    /// Registers a region.
    pub(crate) fn register(&mut self, addr: u64, key: u32, access: Access, bytes: Vec<u8>) {
        self.regions.push(Region { addr, key, access, bytes });
    }

    /// Binds a window.
    pub(crate) fn bind(&mut self, key: u32, addr: u64, len: u64, access: Access) {
        self.windows.push(Window { key, addr, len, access });
    }

    /// Bytes at an address inside a region.
    ///
    /// # Panics
    /// If there is no region.
    pub(crate) fn read(&self, addr: u64, len: usize) -> &[u8] {
        let region = self.regions.iter().find(|region| region.holds(addr, len as u64)).expect("inside a region");
        let start = (addr - region.addr) as usize;
        &region.bytes[start..start + len]
    }

    /// Puts bytes at an address inside a region.
    ///
    /// # Panics
    /// If there is no region.
    pub(crate) fn write(&mut self, addr: u64, data: &[u8]) {
        let region = self.regions.iter_mut().find(|region| region.holds(addr, data.len() as u64));
        let region = region.expect("inside a region");
        let start = (addr - region.addr) as usize;
        region.bytes[start..start + data.len()].copy_from_slice(data);
    }

    fn check(&self, key: u32, addr: u64, len: u32, need: Access) -> Result<Span, MemoryError> {
        let region = self.regions.iter().find(|region| region.key == key).ok_or(MemoryError::BadKey)?;
        if !region.holds(addr, len.into()) {
            return Err(MemoryError::Bounds);
        }
        if !region.access.contains(need) {
            return Err(MemoryError::Access);
        }
        Ok(Span { addr, len })
    }
}

impl Region {
    fn holds(&self, addr: u64, len: u64) -> bool {
        within(addr, len, self.addr, self.bytes.len() as u64)
    }
}

/// Does `[addr, addr + len)` lie in `[start, start + size)`?
fn within(addr: u64, len: u64, start: u64, size: u64) -> bool {
    addr >= start && addr.checked_add(len).is_some_and(|end| end <= start + size)
}

impl Memory for NodeMemory {
    fn resolve_local(&mut self, _pd: u32, sge: &Sge, write: bool) -> Result<Span, MemoryError> {
        if sge.length == 0 {
            return Ok(Span { addr: sge.addr, len: 0 });
        }
        let need = if write { Access::LOCAL_WRITE } else { Access::empty() };
        self.check(sge.lkey, sge.addr, sge.length, need)
    }

    fn resolve_remote(&mut self, _pd: u32, rkey: u32, va: u64, len: u32, access: Access) -> Result<Span, MemoryError> {
        let Some(window) = self.windows.iter().find(|window| window.key == rkey) else {
            return self.check(rkey, va, len, access);
        };
        if !within(va, len.into(), window.addr, window.len) {
            return Err(MemoryError::Bounds);
        }
        if !window.access.contains(access) {
            return Err(MemoryError::Access);
        }
        Ok(Span { addr: va, len })
    }

    fn load(&mut self, span: Span, into: &mut [u8]) -> Result<(), MemoryError> {
        into.copy_from_slice(self.read(span.addr, span.len as usize));
        Ok(())
    }

    fn store(&mut self, span: Span, data: &[u8], _last: bool) -> Result<(), MemoryError> {
        assert!(data.len() <= span.len as usize, "no more than the span has");
        self.write(span.addr, data);
        Ok(())
    }

    fn atomic(&mut self, span: Span, op: AtomicOp) -> Result<u64, MemoryError> {
        assert_eq!((span.len, span.addr % 8), (8, 0), "an aligned word");
        let old = u64::from_le_bytes(self.read(span.addr, 8).try_into().expect("eight bytes"));
        let new = match op {
            AtomicOp::CompareSwap { compare, swap } if old == compare => swap,
            AtomicOp::CompareSwap { .. } => old,
            AtomicOp::FetchAdd { add } => old.wrapping_add(add),
        };
        self.write(span.addr, &new.to_le_bytes());
        Ok(old)
    }

    fn invalidate(&mut self, _pd: u32, rkey: u32, _qpn: u32) -> Result<(), MemoryError> {
        let windows = self.windows.len();
        self.windows.retain(|window| window.key != rkey);
        if self.windows.len() == windows { Err(MemoryError::BadKey) } else { Ok(()) }
    }
}
