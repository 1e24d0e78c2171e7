//! Memory of a live process under attack: zones with each kind of right, guards between them, and a record of what must stay.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use ferroce::{Access, Buffer, Mr, Pd, RawRegion, Result};

use crate::forge::Zone;
use crate::machine::SECRET;

/// Bytes of a zone, and of the guard behind each.
pub const ZONE: usize = 8192;
/// Receives are put into slots of the local zone, and so are the results of READs and atomics.
pub const SLOTS: u32 = 32;
/// Bytes from one slot to the next.
pub const SLOT: u32 = ZONE as u32 / SLOTS;
/// Bytes of a slot that requests name; the others are guards.
pub const SLOT_USED: u32 = 200;

const ALL: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// The memory.
#[derive(Debug)]
pub struct Arena {
    buffer: Arc<Buffer>,
    next: usize,
    /// What no packet may change.
    fixed: Vec<(Range<usize>, &'static str)>,
    zones: Vec<Zone>,
    /// Source of sends, where peers may do all.
    pub public: Zone,
    /// Where receives go; no right for peers.
    pub local: Zone,
    regions: Vec<Arc<Mr>>,
}

impl Arena {
    /// Registers zones: those of `pd` are attacked through its queue pairs, those of `other` have no queue pair that is attacked,
    /// `reader`'s queue pairs grant READ only.
    ///
    /// # Errors
    /// A registration was refused.
    pub fn new(pd: &Arc<Pd>, other: &Arc<Pd>, reader: &Arc<Pd>) -> Result<Arena> {
        const ZONES: usize = 9;
        let none = Zone { va: 0, len: 0, key: 0 };
        let mut arena = Arena {
            buffer: Arc::new(Buffer::new((2 * ZONES + 1) * ZONE)),
            next: 0,
            fixed: Vec::new(),
            zones: Vec::new(),
            public: none,
            local: none,
            regions: Vec::new(),
        };
        arena.buffer.write(0, &SECRET.repeat(arena.buffer.len() / SECRET.len()));
        arena.guard();
        let local_only = Access::LOCAL_WRITE;
        arena.public = arena.add(pd, ALL, None)?;
        arena.buffer.write(arena.offset(arena.public.va), &[0; ZONE]);
        arena.add(pd, local_only | Access::REMOTE_WRITE, None)?;
        let readable = arena.add(pd, Access::REMOTE_READ, Some("a zone that may only be read"))?;
        arena.buffer.write(arena.offset(readable.va), &[0x33; ZONE]);
        arena.add(pd, local_only | Access::REMOTE_ATOMIC, None)?;
        arena.local = arena.add(pd, local_only, None)?;
        for slot in 0..SLOTS {
            let behind = arena.offset(arena.local.va) + (slot * SLOT + SLOT_USED) as usize;
            arena.fixed.push((behind..behind + (SLOT - SLOT_USED) as usize, "the rest of a receive slot"));
        }
        arena.add(other, ALL, Some("a zone of another protection domain"))?;
        let unread = arena.add(reader, ALL, Some("a zone whose queue pairs may only read"))?;
        // That one is readable by right.
        arena.buffer.write(arena.offset(unread.va), &[0x44; ZONE]);
        arena.add(pd, ALL, Some("a zone whose key was withdrawn"))?;
        arena.regions.pop().expect("it was just registered").dereg()?;
        arena.add_iova(pd)?;
        arena.add_vanished(pd)?;
        for _ in 0..arena.zones.len() {
            // Half of the packets name the zone where they get furthest.
            arena.zones.push(arena.public);
        }
        assert_eq!(arena.next, arena.buffer.len(), "all of the memory is a zone or a guard");
        Ok(arena)
    }

    fn offset(&self, va: u64) -> usize {
        (va - self.buffer.addr()) as usize
    }

    /// A guard of one zone's size.
    fn guard(&mut self) {
        self.fixed.push((self.next..self.next + ZONE, "a guard"));
        self.next += ZONE;
    }

    fn take(&mut self) -> usize {
        let at = self.next;
        self.next += ZONE;
        at
    }

    /// Registers the next zone under its own address. `fixed` says why nothing may change it.
    fn add(&mut self, pd: &Arc<Pd>, access: Access, fixed: Option<&'static str>) -> Result<Zone> {
        let at = self.take();
        let va = self.buffer.addr() + at as u64;
        self.register(pd, at, va, access)?;
        self.fixed.extend(fixed.map(|why| (at..at + ZONE, why)));
        self.guard();
        Ok(*self.zones.last().expect("it was just added"))
    }

    /// A zone that peers call by addresses from 0 on.
    fn add_iova(&mut self, pd: &Arc<Pd>) -> Result<()> {
        let at = self.take();
        self.register(pd, at, 0, ALL | Access::ZERO_BASED)?;
        self.buffer.write(at, &[0; ZONE]);
        self.guard();
        Ok(())
    }

    fn register(&mut self, pd: &Arc<Pd>, at: usize, va: u64, access: Access) -> Result<()> {
        let addr = self.buffer.addr() as usize + at;
        // SAFETY: only `Buffer::read` and `Buffer::write` reach the memory; they expect it to change. It outlives the process's
        // queue pairs, since the arena does.
        let region = unsafe { RawRegion::new(addr, ZONE) };
        let mr = pd.reg_mr(region, va, access)?;
        self.zones.push(Zone { va, len: ZONE as u32, key: mr.rkey() });
        self.regions.push(mr);
        Ok(())
    }

    /// Zones whose memory is gone, or cannot be written, though their keys are good.
    fn add_vanished(&mut self, pd: &Arc<Pd>) -> Result<()> {
        for protection in [libc::PROT_NONE, libc::PROT_READ] {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping where the system wants it.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), ZONE, protection, flags, -1, 0) };
            assert_ne!(start, libc::MAP_FAILED, "memory for a test");
            let addr = start as usize;
            // SAFETY: nothing of Rust lives there.
            let region = unsafe { RawRegion::new(addr, ZONE) };
            let mr = pd.reg_mr(region, addr as u64, ALL)?;
            self.zones.push(Zone { va: addr as u64, len: ZONE as u32, key: mr.rkey() });
            self.regions.push(mr);
        }
        Ok(())
    }

    /// Memory that packets name, as often as they should.
    pub fn zones(&self) -> &[Zone] {
        &self.zones
    }

    /// Panics if a byte changed that nobody had a right to change.
    ///
    /// # Panics
    /// It did.
    pub fn check(&self) {
        let mut bytes = vec![0; ZONE];
        for (range, what) in &self.fixed {
            let bytes = &mut bytes[..range.len()];
            self.buffer.read(range.start, bytes);
            let first = bytes[0];
            let intact = if first == SECRET[0] {
                bytes.chunks(SECRET.len()).all(|chunk| chunk == &SECRET[..chunk.len()])
            } else {
                (first == 0x33 || first == 0x44) && bytes.iter().all(|byte| *byte == first)
            };
            assert!(intact, "{what} was written: bytes {range:?} of the arena");
        }
    }
}
