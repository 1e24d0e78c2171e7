//! Registered memory of a connection: the peer's card, or ours, reads and writes it while the program does not look.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use ferroce_abi::{ibv_mr, ibv_pd, ibv_sge};
use ferroce_rsocket::{Iomap, SGE_LEN, Sge, Span, TARGETS};

use crate::entry::{Call, Refusal};
use crate::verbs;

/// So that memory that is not inherited by children is nobody else's.
const PAGE: usize = 4096;

const LOCAL_WRITE: i32 = 1;
const REMOTE_WRITE: i32 = 1 << 1;

/// Memory with its registration, given back in the right order.
pub(super) struct Region {
    start: NonNull<u8>,
    layout: Layout,
    mr: *mut ibv_mr,
}

// SAFETY: it owns what it points to, and verbs may be called from any thread.
unsafe impl Send for Region {}

impl Region {
    /// `len` zeroed bytes, which the peer may write to if it is told the key.
    pub(super) fn new(pd: *mut ibv_pd, len: usize, remote_write: bool) -> Call<Region> {
        let no_memory = || Refusal::new(libc::ENOMEM, format!("no memory for a buffer of {len} bytes"));
        let layout = Layout::from_size_align(len.max(1), PAGE).map_err(|_| no_memory())?;
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(no_memory)?;
        let access = if remote_write { LOCAL_WRITE | REMOTE_WRITE } else { LOCAL_WRITE };
        // SAFETY: a live PD, and memory that stays until the registration is gone.
        let mr = unsafe { verbs::ibv_reg_mr(pd, start.as_ptr().cast(), layout.size(), access) };
        let region = Region { start, layout, mr };
        if mr.is_null() { Err(Refusal::last()) } else { Ok(region) }
    }

    /// Bytes of it.
    pub(super) fn len(&self) -> usize {
        self.layout.size()
    }

    pub(super) fn addr(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: live until dropped.
        unsafe { (*self.mr).rkey }
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.layout.size());
        assert!(is_inside, "{len} bytes at {offset} of {}", self.layout.size());
        // SAFETY: inside the allocation, as just checked.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// A place for bytes that are to be sent from.
    pub(super) fn place(&self, span: Span) -> *mut u8 {
        self.at(span.offset as usize, span.len as usize)
    }

    /// As a work request names it.
    pub(super) fn sge(&self, span: Span) -> ibv_sge {
        // SAFETY: live until dropped.
        let lkey = unsafe { (*self.mr).lkey };
        ibv_sge { addr: self.place(span).expose_provenance() as u64, length: span.len, lkey }
    }

    /// Copies out to memory of the program.
    ///
    /// # Safety
    ///
    /// `to` is room for `span.len` bytes.
    pub(super) unsafe fn copy_out(&self, span: Span, to: *mut u8) {
        // SAFETY: the source lies inside; the target by the contract. They are different allocations. An honest peer does not write
        // here before it is granted the place anew; from another one the program gets bytes that nobody vouches for.
        unsafe { ptr::copy_nonoverlapping(self.place(span), to, span.len as usize) };
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and no longer used. A registration that stays (the process is a forked child) is of memory that stays.
        unsafe {
            if self.mr.is_null() || verbs::ibv_dereg_mr(self.mr) == 0 {
                dealloc(self.start.as_ptr(), self.layout);
            }
        }
    }
}

/// The tables that the peer writes: targets, and behind them mappings.
pub(super) struct Tables {
    region: Region,
    iomaps: u16,
}

/// Bytes of the table of targets.
const TARGETS_LEN: usize = TARGETS * SGE_LEN;
/// 8-byte words of a mapping.
const IOMAP_WORDS: usize = ferroce_rsocket::IOMAP_LEN / 8;

impl Tables {
    pub(super) fn new(pd: *mut ibv_pd, iomaps: u16) -> Call<Tables> {
        let len = TARGETS_LEN + usize::from(iomaps) * ferroce_rsocket::IOMAP_LEN;
        Ok(Tables { region: Region::new(pd, len, true)?, iomaps })
    }

    /// For the peer.
    pub(super) fn sge(&self) -> Sge {
        Sge { addr: self.region.addr(), key: self.region.rkey(), length: TARGETS as u32 }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        let place = self.region.at(at * 8, 8).cast::<AtomicU64>();
        // SAFETY: inside the region, aligned (pages, multiples of 8), and never accessed otherwise than as atomic words by this process;
        // the card stores whole aligned words.
        unsafe { &*place }
    }

    /// Reads three integers at a word. The last word is the last to be written, so it is read first.
    fn sge_at(&self, at: usize) -> Sge {
        let last = self.word(at + 1).load(Ordering::Acquire).to_ne_bytes();
        let addr = self.word(at).load(Ordering::Acquire);
        let [k0, k1, k2, k3, l0, l1, l2, l3] = last;
        Sge { addr, key: u32::from_ne_bytes([k0, k1, k2, k3]), length: u32::from_ne_bytes([l0, l1, l2, l3]) }
    }

    /// A target, as far as the peer has written one.
    pub(super) fn target(&self, entry: usize) -> Sge {
        assert!(entry < TARGETS);
        self.sge_at(entry * SGE_LEN / 8)
    }

    /// The target was taken.
    pub(super) fn clear_target(&self, entry: usize) {
        assert!(entry < TARGETS);
        self.word(entry * SGE_LEN / 8 + 1).store(0, Ordering::Release);
    }

    /// The mapping that has an offset.
    pub(super) fn mapping(&self, offset: u64) -> Option<Iomap> {
        (0..usize::from(self.iomaps)).find_map(|index| {
            let at = TARGETS_LEN / 8 + index * IOMAP_WORDS;
            let sge = self.sge_at(at + 1);
            let iomap = Iomap { offset: self.word(at).load(Ordering::Acquire), sge };
            iomap.locate(offset).map(|_| iomap)
        })
    }
}
