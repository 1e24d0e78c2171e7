//! The memory of a ring, mapped by two processes, and the system call that wakes the other one.
//!
//! The other process may write to all of it at any time, whatever it agreed to, and take its pages away, which then may not be had anew:
//! so no reference to its bytes is ever made. They are copied in and out by the routines of [`mem`], which are made for memory that
//! changes or vanishes meanwhile, words as well.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use ferroce_core::mem;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};

use super::wake::Token;
use super::{Broken, Refusal};

/// Bytes of data in each direction.
pub(super) const AREA: usize = 512 << 10;
/// Bytes of the smallest page.
pub(super) const PAGE: usize = 4096;
/// Bytes before the data.
const HEADER: usize = 4096;
/// Bytes of the whole. No multiple of a huge page: memory of such pages, which may be missing when they are touched, is refused by
/// its size alone.
pub(super) const SIZE: usize = HEADER + 2 * AREA;
/// "ferroce\0", then the version of the layout.
const MAGIC: u64 = u64::from_be_bytes(*b"ferroce\x03");
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
/// | 144, 528 | recalls of each direction: how often the producer took back what it lent |
/// | 152, 536 | the producer's process number |
/// | 160, 544 | where in its memory the mark is; 0: it has not told |
/// | 256, 640 | tail of each direction: where the consumer will read next |
/// | 264, 648 | the challenge: what the consumer wants to find in the mark |
/// | 272, 656 | the verdict: may the producer lend (0 not yet, 1 yes, 2 no) |
/// | 384, 768 | the consumer of each direction sleeps (0 or 1) |
/// | 4096, 4096 + 512 Ki | the data of each direction |
///
/// What different sides write is two cache lines apart: processors fetch them in pairs.
#[derive(Debug)]
pub(super) struct Memory {
    base: NonNull<u8>,
}

// SAFETY: the mapping belongs to no thread; what is in it is reached by accesses alone that expect it to change.
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
        memory.word(0).store(MAGIC).map_err(|Broken| io::Error::from_raw_os_error(libc::ENOMEM))?;
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
        let gone = |Broken| Refusal::System(libc::ENOMEM);
        if memory.word(0).load().map_err(gone)? != MAGIC {
            return Err(Refusal::Version);
        }
        if memory.settle(TAKEN).map_err(gone)? { Ok(memory) } else { Err(Refusal::Withdrawn) }
    }

    /// For who offered it: takes the offer back. False: the peer was first.
    pub(super) fn withdraw(&self) -> bool {
        // Memory that is gone is of no use to the peer either.
        self.settle(WITHDRAWN).unwrap_or(true)
    }

    /// Settles what becomes of the offer; false: the other side settled it otherwise.
    fn settle(&self, fate: u64) -> Result<bool, Broken> {
        let before = self.word(64).compare_swap(OPEN, fate)?;
        Ok(before == OPEN || before == fate)
    }

    /// For tests: a ring whose memory can be taken away, so that it is missing as it is when the system has none.
    #[cfg(test)]
    pub(super) fn create_unsealed() -> (Memory, OwnedFd) {
        let fd =
            memfd_create("ferroce-ring-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memory file");
        ftruncate(&fd, SIZE as u64).expect("it grows");
        (Memory::map(&fd).expect("it is mapped"), fd)
    }

    fn map(fd: &OwnedFd) -> io::Result<Memory> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the system's choice changes nothing that exists.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        mem::check_handler();
        Ok(Memory { base: NonNull::new(base.cast()).expect("a mapping is nowhere at 0") })
    }

    /// Where the producer will write next.
    pub(super) fn head(&self, way: Way) -> Word<'_> {
        self.word_of(way, 128)
    }

    /// The position that is at the start of the area.
    pub(super) fn base(&self, way: Way) -> Word<'_> {
        self.word_of(way, 136)
    }

    /// Where the consumer will read next.
    pub(super) fn tail(&self, way: Way) -> Word<'_> {
        self.word_of(way, 256)
    }

    /// How often the producer took back what it lent.
    pub(super) fn recalls(&self, way: Way) -> Word<'_> {
        self.word_of(way, 144)
    }

    /// The producer's process number.
    pub(super) fn process(&self, way: Way) -> Word<'_> {
        self.word_of(way, 152)
    }

    /// Where the producer's mark is.
    pub(super) fn mark(&self, way: Way) -> Word<'_> {
        self.word_of(way, 160)
    }

    /// What the consumer wants to find in the mark.
    pub(super) fn challenge(&self, way: Way) -> Word<'_> {
        self.word_of(way, 264)
    }

    /// May the producer lend?
    pub(super) fn verdict(&self, way: Way) -> Word<'_> {
        self.word_of(way, 272)
    }

    /// The consumer sleeps.
    pub(super) fn sleeping(&self, way: Way) -> Word<'_> {
        self.word_of(way, 384)
    }

    /// The word before a record's bytes.
    ///
    /// # Panics
    /// If `offset` is no multiple of 8 inside the area.
    pub(super) fn record(&self, way: Way, offset: usize) -> Word<'_> {
        assert!(offset.is_multiple_of(8) && offset < AREA, "no record begins at {offset}");
        self.word(area(way) + offset)
    }

    /// A word that each direction has.
    fn word_of(&self, way: Way, at: usize) -> Word<'_> {
        /// Those of the way back lie so much further on.
        const BACK: usize = 384;
        self.word(if way == Way::There { at } else { at + BACK })
    }

    fn word(&self, at: usize) -> Word<'_> {
        assert!(at.is_multiple_of(8) && at + 8 <= SIZE, "no word is at {at}");
        Word { addr: (self.base.as_ptr() as usize + at) as u64, memory: PhantomData }
    }

    /// Copies bytes of ours into the area.
    ///
    /// # Errors
    /// The memory cannot be had (out of memory).
    ///
    /// # Panics
    /// If they would not lie inside the area.
    pub(super) fn put(&self, way: Way, offset: usize, bytes: &[u8]) -> Result<(), Broken> {
        mem::store(self.addr(way, offset, bytes.len()), bytes, false).map_err(|mem::Fault| Broken)
    }

    /// Copies memory of the program into the area.
    ///
    /// # Errors
    /// The program's memory is gone; or that of the area cannot be had.
    ///
    /// # Panics
    /// If the bytes would not lie inside the area.
    pub(super) fn put_memory(
        &self,
        way: Way,
        offset: usize,
        addr: u64,
        len: usize,
    ) -> Result<Result<(), mem::Fault>, Broken> {
        let to = self.addr(way, offset, len);
        // SAFETY: `len` bytes from there lie inside the mapping (checked by `addr`), to which nobody has a reference.
        match unsafe { mem::load_shared(addr, to as *mut u8, len) } {
            Ok(()) => Ok(Ok(())),
            // Whose fault was it?
            Err(mem::Fault) => self.touch(way, offset, len).map(|()| Err(mem::Fault)),
        }
    }

    /// Writes to each page of a piece of the area.
    fn touch(&self, way: Way, offset: usize, len: usize) -> Result<(), Broken> {
        let ends = [offset, offset + len.saturating_sub(1)];
        let pages = (offset.next_multiple_of(PAGE)..offset + len).step_by(PAGE);
        ends.into_iter().chain(pages).try_for_each(|at| self.put(way, at, &[0]))
    }

    /// Has the system take back the pages of the area behind the first one, up to `end`: what was in them is gone, and they are there
    /// anew when somebody touches them.
    ///
    /// # Errors
    /// The system does not do that: the program locked its memory, pages are larger, a sandbox.
    pub(super) fn give_back(&self, way: Way, end: usize) -> io::Result<()> {
        let end = end.next_multiple_of(PAGE).min(AREA);
        let from = self.base.as_ptr().wrapping_add(area(way) + PAGE);
        // SAFETY: the pages lie inside the mapping, behind the area's first one. Nobody has a reference to them, and whoever reads them, as
        // the other process may, expects them to change.
        let result = unsafe { libc::madvise(from.cast::<c_void>(), end.saturating_sub(PAGE), libc::MADV_REMOVE) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Copies bytes out of the area.
    ///
    /// # Errors
    /// The memory cannot be had (out of memory).
    ///
    /// # Panics
    /// If they do not lie inside the area.
    pub(super) fn take(&self, way: Way, offset: usize, into: &mut [u8]) -> Result<(), Broken> {
        mem::load(self.addr(way, offset, into.len()), into).map_err(|mem::Fault| Broken)
    }

    fn addr(&self, way: Way, offset: usize, len: usize) -> u64 {
        assert!(offset <= AREA && len <= AREA - offset, "{len} bytes at {offset} are not inside the area");
        (self.base.as_ptr() as usize + area(way) + offset) as u64
    }
}

/// A word of a ring's memory. Every access may find that the memory cannot be had: then the ring is broken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Word<'a> {
    addr: u64,
    memory: PhantomData<&'a Memory>,
}

impl Word<'_> {
    /// With acquire order.
    pub(super) fn load(self) -> Result<u64, Broken> {
        mem::load_word(self.addr).map_err(|mem::Fault| Broken)
    }

    /// With release order.
    pub(super) fn store(self, value: u64) -> Result<(), Broken> {
        mem::store_word(self.addr, value).map_err(|mem::Fault| Broken)
    }

    /// Replaces `compare` by `swap`, in sequence with everything; gives what was there.
    pub(super) fn compare_swap(self, compare: u64, swap: u64) -> Result<u64, Broken> {
        mem::compare_swap(self.addr, compare, swap).map_err(|mem::Fault| Broken)
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

/// Sends a token over a connected Unix datagram socket. Never waits, whatever the socket's flags are. Past the C library, as the
/// system calls of the UDP link: its function is a cancellation point.
pub(super) fn send_token(fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the kernel reads the bytes of a local.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_sendto,
            fd.as_raw_fd(),
            token.as_ptr(),
            token.len(),
            flags,
            std::ptr::null::<c_void>(),
            0usize,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Has the kernel drop what comes to a datagram socket and does not begin with the token.
pub(super) fn take_only(fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
    const LOAD_WORD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let instruction = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    // Words of a filter are big-endian; a load past the end drops.
    let word = |at: usize| u32::from_be_bytes([token[at], token[at + 1], token[at + 2], token[at + 3]]);
    let mut program = [
        instruction(LOAD_WORD, 0, 0),
        instruction(JUMP_IF_EQUAL, 3, word(0)),
        instruction(LOAD_WORD, 0, 4),
        instruction(JUMP_IF_EQUAL, 1, word(4)),
        instruction(RETURN, 0, u32::MAX),
        instruction(RETURN, 0, 0),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the kernel reads the structure and the instructions that it points to; both are locals.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes one datagram from a socket and forgets it. Never waits. False: there was none.
pub(super) fn take_datagram(fd: BorrowedFd<'_>) -> bool {
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
