//! The memory of a ring, mapped by two processes, and the system call that wakes the other one.
//!
//! The other process may write to all of it at any time, whatever it agreed to: so no reference to its bytes is ever made. They
//! are copied in and out by the routines of [`mem`], which are made for memory that changes meanwhile, and its words are atomics.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ferroce_core::mem;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};

use super::Refusal;

/// Bytes of data in each direction.
pub(super) const AREA: usize = 512 << 10;
/// Bytes before the data.
const HEADER: usize = 4096;
/// Bytes of the whole. No multiple of a huge page: memory of such pages, which may be missing when they are touched, is refused by
/// its size alone.
pub(super) const SIZE: usize = HEADER + 2 * AREA;
/// "ferroce\0", then the version of the layout.
const MAGIC: u64 = u64::from_be_bytes(*b"ferroce\x02");
/// Nobody took the offer yet.
const OPEN: u64 = 0;
/// The peer has taken it.
const TAKEN: u64 = 1;
/// Nobody can take it any more.
const WITHDRAWN: u64 = 2;
/// The size may not change any more, and no seal can be added that would forbid writing.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Which of the two directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// From who made the memory to who accepted it.
    There,
    /// The other one.
    Back,
}

/// A mapping of a ring's memory. Offsets in bytes:
///
/// | offset | content |
/// |---|---|
/// | 0 | magic and version |
/// | 64 | the offer: 0 open, 1 taken, 2 withdrawn |
/// | 128, 512 | head of each direction: where the producer will write next |
/// | 136, 520 | base of each direction: the position that is at the start of its data |
/// | 256, 640 | tail of each direction: where the consumer will read next |
/// | 384, 768 | the consumer of each direction sleeps (0 or 1) |
/// | 4096, 4096 + 512 Ki | the data of each direction |
///
/// What different sides write is two cache lines apart: processors fetch them in pairs.
#[derive(Debug)]
pub(super) struct Memory {
    base: NonNull<u8>,
}

// SAFETY: the mapping belongs to no thread; what is in it is reached by atomics and by copies that expect it to change.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Makes new memory; the descriptor is for the other process.
    ///
    /// # Errors
    /// What the system says: no descriptor, no memory, or a kernel or sandbox without memfd.
    pub(super) fn create() -> io::Result<(Memory, OwnedFd)> {
        let fd = memfd_create("ferroce-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, SIZE as u64)?;
        fcntl_add_seals(&fd, SEALS)?;
        let memory = Memory::map(&fd)?;
        memory.word(0).store(MAGIC, Ordering::Release);
        Ok((memory, fd))
    }

    /// Maps memory that another process made.
    ///
    /// # Errors
    /// It is no memory of the agreed size, could still be cut short, or is no ring of this version.
    pub(super) fn open(fd: &OwnedFd) -> Result<Memory, Refusal> {
        // Only memory files have seals, and whoever has this one cannot lift them.
        let seals = fcntl_get_seals(fd).map_err(|_| Refusal::NotSealed)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(Refusal::NotSealed);
        }
        let stat = fstat(fd).map_err(|errno| Refusal::System(errno.raw_os_error()))?;
        if stat.st_size != SIZE as i64 {
            return Err(Refusal::Size);
        }
        let memory = Memory::map(fd).map_err(|error| Refusal::System(error.raw_os_error().unwrap_or(libc::EIO)))?;
        if memory.word(0).load(Ordering::Acquire) != MAGIC {
            return Err(Refusal::Version);
        }
        if memory.settle(TAKEN) { Ok(memory) } else { Err(Refusal::Withdrawn) }
    }

    /// For who offered it: takes the offer back. False: the peer was first.
    pub(super) fn withdraw(&self) -> bool {
        self.settle(WITHDRAWN)
    }

    /// Settles what becomes of the offer, unless the other side settled it otherwise.
    fn settle(&self, fate: u64) -> bool {
        let settled = self.word(64).compare_exchange(OPEN, fate, Ordering::AcqRel, Ordering::Acquire);
        settled.is_ok() || settled == Err(fate)
    }

    fn map(fd: &OwnedFd) -> io::Result<Memory> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the system's choice changes nothing that exists.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Memory { base: NonNull::new(base.cast()).expect("a mapping is nowhere at 0") })
    }

    /// Where the producer will write next.
    pub(super) fn head(&self, way: Way) -> &AtomicU64 {
        self.word(if way == Way::There { 128 } else { 512 })
    }

    /// The position that is at the start of the area.
    pub(super) fn base(&self, way: Way) -> &AtomicU64 {
        self.word(if way == Way::There { 136 } else { 520 })
    }

    /// Where the consumer will read next.
    pub(super) fn tail(&self, way: Way) -> &AtomicU64 {
        self.word(if way == Way::There { 256 } else { 640 })
    }

    /// The consumer sleeps.
    pub(super) fn sleeping(&self, way: Way) -> &AtomicU32 {
        let at = if way == Way::There { 384 } else { 768 };
        // SAFETY: aligned, inside the mapping, which lives as long as `self`, and never reached other than by atomics.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// The word before a record's bytes.
    ///
    /// # Panics
    /// If `offset` is no multiple of 8 inside the area.
    pub(super) fn record(&self, way: Way, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < AREA, "no record begins at {offset}");
        self.word(area(way) + offset)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= SIZE, "no word is at {at}");
        // SAFETY: aligned and inside the mapping, as just seen; the mapping lives as long as `self`. Other accesses to these bytes are
        // atomic, or copies that are made for memory that changes meanwhile.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// Copies bytes of ours into the area.
    ///
    /// # Errors
    /// The memory cannot be had (out of memory).
    ///
    /// # Panics
    /// If they would not lie inside the area.
    pub(super) fn put(&self, way: Way, offset: usize, bytes: &[u8]) -> Result<(), mem::Fault> {
        mem::store(self.addr(way, offset, bytes.len()), bytes, false)
    }

    /// Copies memory of the program into the area.
    ///
    /// # Errors
    /// The program's memory is gone.
    ///
    /// # Panics
    /// If the bytes would not lie inside the area.
    pub(super) fn put_memory(&self, way: Way, offset: usize, addr: u64, len: usize) -> Result<(), mem::Fault> {
        let to = self.addr(way, offset, len);
        // SAFETY: `len` bytes from there lie inside the mapping (checked by `addr`), to which nobody has a reference.
        unsafe { mem::load_raw(addr, to as *mut u8, len) }
    }

    /// Copies bytes out of the area.
    ///
    /// # Errors
    /// The memory cannot be had (out of memory).
    ///
    /// # Panics
    /// If they do not lie inside the area.
    pub(super) fn take(&self, way: Way, offset: usize, into: &mut [u8]) -> Result<(), mem::Fault> {
        mem::load(self.addr(way, offset, into.len()), into)
    }

    fn addr(&self, way: Way, offset: usize, len: usize) -> u64 {
        assert!(offset <= AREA && len <= AREA - offset, "{len} bytes at {offset} are not inside the area");
        (self.base.as_ptr() as usize + area(way) + offset) as u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this size; no reference into it outlives `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast::<c_void>(), SIZE) };
    }
}

fn area(way: Way) -> usize {
    HEADER + if way == Way::There { 0 } else { AREA }
}

/// Sends one byte to a connected Unix datagram socket. Never waits, whatever the socket's flags are. Past the C library, as the
/// system calls of the UDP link: its function is a cancellation point.
pub(super) fn send_byte(fd: BorrowedFd<'_>) -> io::Result<()> {
    let byte = 1u8;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the kernel reads one byte of a local.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_sendto,
            fd.as_raw_fd(),
            &raw const byte,
            1usize,
            flags,
            std::ptr::null::<c_void>(),
            0usize,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes one datagram from a socket and forgets it. Never waits. False: there was none.
pub(super) fn take_byte(fd: BorrowedFd<'_>) -> bool {
    let mut byte = 0u8;
    // SAFETY: the kernel writes at most one byte to a local.
    let received = unsafe {
        libc::syscall(
            libc::SYS_recvfrom,
            fd.as_raw_fd(),
            &raw mut byte,
            1usize,
            libc::MSG_DONTWAIT,
            std::ptr::null_mut::<c_void>(),
            std::ptr::null_mut::<c_void>(),
        )
    };
    received >= 0
}
