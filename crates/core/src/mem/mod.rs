//! The one door to the program's memory.
//!
//! Memory regions are ranges of this process's own address space that nobody pins: the program may unmap, truncate or protect them
//! at any time. Every access goes through the functions of this module, which answer [`Fault`] then; they never crash.
//!
//! # The invariant of the safe functions
//! The functions that take an address are safe to call only with ranges that come from
//! [`KeyTable::resolve`](crate::KeyTable::resolve) and whose region is not yet deregistered: whoever made the [`RawRegion`]
//! vouched for them.
//!
//! # How
//! On x86-64 the memory is touched by a few routines in assembler (`direct`); a chained signal handler (`handler`) makes their
//! faults come back as errors. Where faults would not come to that handler (the program put its own over it, or the thread blocks
//! SIGSEGV or SIGBUS), and on other architectures, the kernel does the copying (`syscall`): correct, but several times slower, and
//! without the promise of ascending order inside a message but for its last word. Where a sandbox forbids the kernel's help too, memory is
//! touched unguarded, and a log line says so.

#![allow(unsafe_code)]

mod buffer;
#[cfg(target_arch = "x86_64")]
mod direct;
#[cfg(target_arch = "x86_64")]
mod handler;
mod mapping;
pub mod peer;
mod syscall;

use std::mem::MaybeUninit;
#[cfg(not(target_arch = "x86_64"))]
use std::sync::atomic::{AtomicU64, Ordering};

/// The signals that tell a fault. A thread that blocks them is served by slow system calls: the engine's own threads must not.
pub const FAULT_SIGNALS: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];

pub use buffer::Buffer;
pub(crate) use mapping::zeros;
pub use mapping::{Mapping, is_zeros, page_size};

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
    /// the region's access flags grant then (to this process or to peers). The caller vouches that this breaks nobody: no Rust reference
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

/// Writes `data` to the memory at `addr`. Bytes become visible in ascending order, aligned words of up to 8 bytes at once; with
/// `last`, the last word is stored after all others with release order, so that a program that polls it finds the rest.
///
/// # Errors
/// [`Fault`]: some of the memory is gone; what lies before it may have been written.
#[inline]
pub fn store(addr: u64, data: &[u8], last: bool) -> Result<(), Fault> {
    #[cfg(target_arch = "x86_64")]
    if handler::ready() {
        // Every store of x86 is a release store, in order: `last` is kept anyway.
        return direct::write(addr, data);
    }
    syscall::write(addr, data, last)
}

/// Reads the memory at `addr` into `buffer`. Aligned words of up to 8 bytes are read at once.
///
/// # Errors
/// [`Fault`]: some of the memory is gone; the buffer's content is unspecified.
#[inline]
pub fn load(addr: u64, buffer: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: a slice is valid for writes of its length.
    unsafe { load_raw(addr, buffer.as_mut_ptr(), buffer.len()) }
}

/// [`load`] into memory that may be uninitialised, or that other processes share; on success all of it is written.
///
/// # Errors
/// [`Fault`]: some of the memory at `addr` is gone; the buffer's content is unspecified.
///
/// # Safety
/// `buffer` is valid for writes of `len` bytes; no reference to them exists.
#[inline]
pub unsafe fn load_raw(addr: u64, buffer: *mut u8, len: usize) -> Result<(), Fault> {
    #[cfg(target_arch = "x86_64")]
    if handler::ready() {
        // SAFETY: as the caller vouches.
        return unsafe { direct::read(addr, buffer, len) };
    }
    // SAFETY: as the caller vouches.
    unsafe { syscall::read(addr, buffer, len) }
}

/// [`load`] into memory that may be gone like that at `addr` (what processes share).
///
/// # Errors
/// [`Fault`]: some of the memory on either side is gone; the buffer's content is unspecified.
///
/// # Safety
/// Whatever of the `len` bytes at `buffer` is mapped may be written; no reference to them exists.
#[inline]
pub unsafe fn load_shared(addr: u64, buffer: *mut u8, len: usize) -> Result<(), Fault> {
    #[cfg(target_arch = "x86_64")]
    if handler::ready() {
        // SAFETY: as the caller vouches.
        return unsafe { direct::read_shared(addr, buffer, len) };
    }
    // SAFETY: the kernel checks both sides; what is mapped may be written, as the caller vouches.
    unsafe { syscall::read(addr, buffer, len) }
}

/// Reads the word at `addr`, a multiple of 8: at once, with acquire order. Where no handler answers faults (see the module's text) it is
/// touched unguarded: words are looked at too often for system calls. Nor is it asked whether one does, which takes longer than
/// the word: the instruction is the same. [`check_handler`] is called before.
///
/// # Errors
/// [`Fault`]: the memory is gone.
#[inline]
pub fn load_word(addr: u64) -> Result<u64, Fault> {
    assert!(addr.is_multiple_of(8), "no word is at {addr:#x}");
    #[cfg(target_arch = "x86_64")]
    return direct::load_word(addr);
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: aligned, and memory that the module's invariant allows. The reference lives for one operation.
    Ok(unsafe { AtomicU64::from_ptr(addr as *mut u64) }.load(Ordering::Acquire))
}

/// Writes the word at `addr`, a multiple of 8: at once, with release order. Unguarded where [`load_word`] is.
///
/// # Errors
/// [`Fault`]: the memory is gone or not writable.
#[inline]
pub fn store_word(addr: u64, value: u64) -> Result<(), Fault> {
    assert!(addr.is_multiple_of(8), "no word is at {addr:#x}");
    #[cfg(target_arch = "x86_64")]
    return direct::store_word(addr, value);
    #[cfg(not(target_arch = "x86_64"))]
    {
        // SAFETY: as in `load_word`.
        unsafe { AtomicU64::from_ptr(addr as *mut u64) }.store(value, Ordering::Release);
        Ok(())
    }
}

/// Bytes that are summed at a time, small enough to stay in the first-level cache.
const BLOCK: usize = 8 << 10;

/// Continues the CRC-32 `state` (as `crc32fast::Hasher` has it) over `len` bytes of the memory at `addr`.
///
/// It sums blocks of a copy that stay in the first-level cache: the memory may change under us, which no Rust code over a slice may
/// meet.
///
/// # Errors
/// [`Fault`]: some of the memory is gone.
pub fn crc(addr: u64, len: usize, state: u32) -> Result<u32, Fault> {
    let mut block = MaybeUninit::<[u8; BLOCK]>::uninit();
    let mut hasher = crc32fast::Hasher::new_with_initial(state);
    for offset in (0..len).step_by(BLOCK) {
        let count = BLOCK.min(len - offset);
        // SAFETY: the block is valid for writes of `count` bytes, which are at most its size; they are initialised afterwards.
        let copy = unsafe {
            load_raw(addr + offset as u64, block.as_mut_ptr().cast(), count)?;
            std::slice::from_raw_parts(block.as_ptr().cast::<u8>(), count)
        };
        hasher.update(copy);
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

/// Compares the word at `addr`, a multiple of 8, with `compare` and, if equal, replaces it by `swap`: atomically, also with the CPU's
/// own atomics. Gives the word's old value.
///
/// # Errors
/// [`Fault`]: the memory is gone or not writable.
#[inline]
pub fn compare_swap(addr: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
    assert!(addr.is_multiple_of(8), "the transport refuses misaligned atomics");
    #[cfg(target_arch = "x86_64")]
    if handler::ready() {
        return direct::compare_swap(addr, compare, swap);
    }
    syscall::compare_swap(addr, compare, swap)
}

/// Adds `add` to the word at `addr`, a multiple of 8, wrapping: atomically, also with the CPU's own atomics. Gives the word's old
/// value.
///
/// # Errors
/// [`Fault`]: the memory is gone or not writable.
#[inline]
pub fn fetch_add(addr: u64, add: u64) -> Result<u64, Fault> {
    assert!(addr.is_multiple_of(8), "the transport refuses misaligned atomics");
    #[cfg(target_arch = "x86_64")]
    if handler::ready() {
        return direct::fetch_add(addr, add);
    }
    syscall::fetch_add(addr, add)
}

/// Whether every page of the range is mapped, with whatever protection. An empty range is.
pub fn is_mapped(addr: u64, len: u64) -> bool {
    syscall::is_mapped(addr, len)
}

/// Looks at once whether the program put a signal handler over ours, which is else done every 1,000 accesses of a thread. Called by
/// every registration; to be called also when a thread of ours starts, and before words are touched.
pub fn check_handler() {
    #[cfg(target_arch = "x86_64")]
    handler::check();
}
