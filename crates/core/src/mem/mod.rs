//! The one door to the program's memory.
//!
//! Memory regions are ranges of this process's own address space that nobody pins: the program may unmap, truncate or protect them
//! at any time. Every access goes through the functions of this module, which answer [`Fault`] then; they never crash.
//!
//! # The invariant of the safe functions
//! The functions that take an address are safe to call only with ranges that come from
//! [`KeyTable::resolve`](crate::KeyTable::resolve) and whose region is not yet deregistered: whoever made the [`RawRegion`]
//! vouched for them.

#![allow(unsafe_code)]

mod syscall;

/// The memory is gone: unmapped, truncated, or protected against the access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory is unmapped, truncated or protected")]
pub struct Fault;

/// Memory of this process that the card may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawRegion {
    addr: usize,
    len: usize,
}

impl RawRegion {
    /// `len` bytes at `addr`.
    ///
    /// # Safety
    /// From its registration until the end of its deregistration, the card may read this memory at any time, and write it as far as
    /// the region's access flags grant (to this process or to peers). The caller vouches that this breaks nobody: no Rust reference
    /// of this process relies on it being unchanged or unread. It need not stay mapped.
    pub unsafe fn new(addr: usize, len: usize) -> RawRegion {
        RawRegion { addr, len }
    }

    /// Address of the first byte.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// It has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Writes `data` to the memory at `addr`. Bytes become visible in ascending order, aligned 8-byte words at once; with `last`,
/// the last word is stored after all others with release order, so that a program that polls it finds the rest.
///
/// # Errors
/// [`Fault`]: some of the memory is gone; what lies before it may have been written.
pub fn store(addr: u64, data: &[u8], _last: bool) -> Result<(), Fault> {
    syscall::write(addr, data)
}

/// Reads the memory at `addr` into `buffer`. Aligned 8-byte words are read at once.
///
/// # Errors
/// [`Fault`]: some of the memory is gone; the buffer's content is unspecified.
pub fn load(addr: u64, buffer: &mut [u8]) -> Result<(), Fault> {
    syscall::read(addr, buffer)
}

/// Bytes that are summed at a time, small enough to stay in the first-level cache.
const BLOCK: usize = 8 << 10;

/// Continues the CRC-32 `state` (as `crc32fast::Hasher` has it) over `len` bytes of the memory at `addr`.
///
/// # Errors
/// [`Fault`]: some of the memory is gone.
pub fn crc(addr: u64, len: usize, state: u32) -> Result<u32, Fault> {
    let mut block = [0; BLOCK];
    let mut hasher = crc32fast::Hasher::new_with_initial(state);
    for offset in (0..len).step_by(BLOCK) {
        let block = &mut block[..BLOCK.min(len - offset)];
        load(addr + offset as u64, block)?;
        hasher.update(block);
    }
    Ok(hasher.finalize())
}

/// Reads the memory at `addr` into `buffer` and continues the CRC-32 `state` over what the buffer holds then: sum and copy agree
/// even while the memory changes.
///
/// # Errors
/// [`Fault`]: some of the memory is gone; the buffer's content is unspecified.
pub fn load_crc(addr: u64, buffer: &mut [u8], state: u32) -> Result<u32, Fault> {
    let mut hasher = crc32fast::Hasher::new_with_initial(state);
    let mut addr = addr;
    for block in buffer.chunks_mut(BLOCK) {
        load(addr, block)?;
        hasher.update(block);
        addr += block.len() as u64;
    }
    Ok(hasher.finalize())
}

/// Compares the word at `addr` with `compare` and, if equal, replaces it by `swap`: atomically, also with the CPU's own atomics.
/// Gives the word's old value.
///
/// # Errors
/// [`Fault`]: the memory is gone or not writable.
pub fn compare_swap(addr: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
    syscall::probe_word(addr)?;
    // SAFETY: the word is mapped, writable (probed) and aligned (asserted by the probe); the module's invariant allows the write.
    let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(addr as *mut u64) };
    let order = std::sync::atomic::Ordering::SeqCst;
    Ok(word.compare_exchange(compare, swap, order, order).unwrap_or_else(|old| old))
}

/// Adds `add` to the word at `addr`, wrapping: atomically, also with the CPU's own atomics. Gives the word's old value.
///
/// # Errors
/// [`Fault`]: the memory is gone or not writable.
pub fn fetch_add(addr: u64, add: u64) -> Result<u64, Fault> {
    syscall::probe_word(addr)?;
    // SAFETY: as in `compare_swap`.
    let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(addr as *mut u64) };
    Ok(word.fetch_add(add, std::sync::atomic::Ordering::SeqCst))
}

/// Whether every page of the range is mapped, with whatever protection. An empty range is.
pub fn is_mapped(addr: u64, len: u64) -> bool {
    syscall::is_mapped(addr, len)
}
