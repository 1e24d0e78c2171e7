//! Memory keys: which memory a number on the wire, or in a scatter/gather element, stands for.

mod windows;

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use crate::sync::Mutex;
use ferroce_transport::{Access, MemoryError, Span};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::error::CoreError;
use crate::limits;
use crate::mem::{self, Buffer, Mapping, RawRegion};

use windows::Window;
pub use windows::WindowKind;

/// The low bits of a key are a random tag, the rest is the index of a slot.
const TAG_BITS: u32 = 12;
/// Slots of one allocation.
const CHUNK: usize = 1_024;
const CHUNKS: usize = limits::MAX_MR as usize / CHUNK;
const _: () = assert!(limits::MAX_MR <= 1 << (32 - TAG_BITS), "every slot must have a key");

/// The keys of a memory region. The same number serves both ends; which rights it carries is checked at each use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MrKey {
    /// For scatter/gather elements of this process.
    pub lkey: u32,
    /// For peers.
    pub rkey: u32,
}

/// What a key stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum EntryKind {
    /// A memory region.
    Region = 1,
    /// A memory window that is bound: for peers only.
    Window = 2,
    /// Zeros of any length, at any address, for this process only; writes to them go nowhere.
    Null = 3,
}

/// A live entry of the table, for introspection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub kind: EntryKind,
    /// Protection domain.
    pub pd: u32,
    /// Address in the process.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The address that peers and scatter/gather elements use for the first byte.
    pub iova: u64,
    /// Rights.
    pub access: Access,
    /// Of a window of type 2: the queue pair that it is bound to; else 0.
    pub qpn: u32,
}

impl Entry {
    /// Peers of queue pair `qpn` may use it.
    #[inline]
    fn is_for(&self, qpn: u32) -> bool {
        self.kind != EntryKind::Null && (self.qpn == 0 || self.qpn == qpn)
    }

    #[inline]
    fn span(&self, pd: u32, va: u64, len: u32, need: Access) -> Result<Span, MemoryError> {
        if self.pd != pd {
            return Err(MemoryError::WrongPd);
        }
        let offset = va.checked_sub(self.iova).ok_or(MemoryError::Bounds)?;
        if offset > self.len || u64::from(len) > self.len - offset {
            return Err(MemoryError::Bounds);
        }
        if !self.access.contains(need) {
            return Err(MemoryError::Access);
        }
        Ok(Span { addr: self.addr + offset, len })
    }
}

/// What [`KeyTable::reregister`] changes of a region; the rest stays.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reregister {
    /// Another protection domain.
    pub pd: Option<u32>,
    /// Other memory, and what peers call its first byte.
    pub translation: Option<(RawRegion, u64)>,
    /// Other rights.
    pub access: Option<Access>,
}

/// The keys of a process, shared by its threads and lanes.
///
/// A look-up takes no lock and writes nothing. The table only grows, in chunks; each slot is a sequence lock made of atomics: its
/// `stamp` holds the key it is valid for and a generation, and is changed before and after the other fields are.
#[derive(Debug)]
pub struct KeyTable {
    chunks: Box<[OnceLock<Box<[Slot]>>]>,
    writer: Mutex<Writer>,
}

#[derive(Debug, Default)]
struct Slot {
    /// Generation in the upper half, the key in the lower; a key of 0 is none.
    stamp: AtomicU64,
    /// The key that it had last, which it does not get again at once; touched only by writers.
    last: AtomicU32,
    pd: AtomicU32,
    access: AtomicU32,
    addr: AtomicU64,
    len: AtomicU64,
    iova: AtomicU64,
    /// 0: a region. [`WINDOW`] and the queue pair that it is bound to, if to one. [`NULL`].
    window: AtomicU32,
}

/// Marks a window in a slot.
const WINDOW: u32 = 1 << 31;
/// Marks a null region.
const NULL: u32 = 1 << 30;
/// Bits of a queue pair's number.
const QPN: u32 = (1 << 24) - 1;

#[derive(Debug)]
struct Writer {
    /// Slots to use next; freed ones join at the end, so that a slot rests as long as possible.
    free: VecDeque<u32>,
    chunks: usize,
    live: u32,
    random: StdRng,
    /// Memory that lives as long as it is registered, by key: buffers and mappings.
    kept: HashMap<u32, Arc<dyn Any + Send + Sync>>,
    /// Windows by index of their slot.
    windows: HashMap<u32, Window>,
    /// How many windows are bound to a region, by its key.
    bound: HashMap<u32, u32>,
}

impl KeyTable {
    /// An empty table whose tags follow from `seed`.
    pub fn new(seed: u64) -> KeyTable {
        KeyTable {
            chunks: (0..CHUNKS).map(|_| OnceLock::new()).collect(),
            writer: Mutex::new(Writer {
                free: VecDeque::new(),
                chunks: 0,
                live: 0,
                random: StdRng::seed_from_u64(seed),
                kept: HashMap::new(),
                windows: HashMap::new(),
                bound: HashMap::new(),
            }),
        }
    }

    /// Registers memory: `ibv_reg_mr` and `ibv_reg_mr_iova`. `iova` is what peers call the first byte; with `ZERO_BASED` it is 0.
    ///
    /// # Errors
    /// EINVAL: no length, addresses that wrap, unknown access flags, or remote writes or atomics without local write.
    /// EOPNOTSUPP: flags of operations that this card does not have. EFAULT: not all of it is mapped (without `ON_DEMAND`). ENOMEM: no slot is left.
    pub fn register(&self, pd: u32, region: RawRegion, iova: u64, access: Access) -> Result<MrKey, CoreError> {
        let access = check_access(access)?;
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        check_range(region, iova, access)?;
        mem::check_handler();
        let (addr, len) = (region.addr() as u64, region.len() as u64);
        let key = self.insert(Fields { pd, access, addr, len, iova, window: 0 })?;
        Ok(MrKey { lkey: key, rkey: key })
    }

    fn insert(&self, fields: Fields) -> Result<u32, CoreError> {
        let mut writer = self.writer.lock();
        let index = self.take_slot(&mut writer)?;
        let slot = self.slot(index).expect("a free slot lies in a chunk");
        let before = slot.stamp.load(Ordering::Relaxed);
        let key = fresh_key(&mut writer.random, index, slot.last.load(Ordering::Relaxed));
        slot.last.store(key, Ordering::Relaxed);
        slot.fill((before >> 32) + 1, key, fields);
        writer.live += 1;
        Ok(key)
    }

    /// Makes a null region: `ibv_alloc_null_mr`. Its key is for scatter/gather elements only, of any address and length: they read zeros, and
    /// what they receive goes nowhere.
    ///
    /// # Errors
    /// ENOMEM: no slot or no address space is left.
    pub fn register_null(&self, pd: u32) -> Result<MrKey, CoreError> {
        let zeros = mem::zeros()
            .map_err(|error| CoreError::new(libc::ENOMEM, format!("no address space for a null region: {error}")))?;
        mem::check_handler();
        let fields = Fields { pd, access: Access::LOCAL_WRITE, addr: zeros, len: u64::MAX, iova: 0, window: NULL };
        let key = self.insert(fields)?;
        Ok(MrKey { lkey: key, rkey: 0 })
    }

    /// Changes a region under the same key: `ibv_rereg_mr`. For a moment the key is not valid: who uses the region meanwhile is refused.
    /// Who looked it up before may still use it as it was: the caller waits for the lanes, and lets go of a registered buffer
    /// ([`KeyTable::release`]) if the memory is another.
    ///
    /// # Errors
    /// As for [`KeyTable::register`], EINVAL if no region has this key, EBUSY if windows are bound to it; then all is as it was.
    pub fn reregister(&self, lkey: u32, change: &Reregister) -> Result<(), CoreError> {
        mem::check_handler();
        // One change at a time; look-ups go on.
        let writer = self.writer.lock();
        let old = self.entry(lkey).filter(|entry| entry.kind == EntryKind::Region).ok_or_else(|| unknown(lkey))?;
        writer.check_unbound(lkey)?;
        let access = change.access.map_or(Ok(old.access), check_access)?;
        let pd = change.pd.unwrap_or(old.pd);
        let mut fields = Fields { pd, access, addr: old.addr, len: old.len, iova: old.iova, window: 0 };
        if let Some((region, iova)) = change.translation {
            let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
            check_range(region, iova, access)?;
            fields = Fields { addr: region.addr() as u64, len: region.len() as u64, iova, ..fields };
        }
        let slot = self.slot(lkey >> TAG_BITS).expect("it has an entry");
        let generation = (slot.stamp.load(Ordering::Relaxed) >> 32) + 1;
        slot.stamp.store(generation << 32, Ordering::Relaxed);
        slot.fill(generation + 1, lkey, fields);
        Ok(())
    }

    /// Registers a buffer under its own address. The table keeps it alive until [`KeyTable::release`].
    ///
    /// # Errors
    /// As for [`KeyTable::register`].
    pub fn register_buffer(&self, pd: u32, buffer: &Arc<Buffer>, access: Access) -> Result<MrKey, CoreError> {
        let key = self.register(pd, buffer.region(), buffer.addr(), access)?;
        self.keep(key, Arc::clone(buffer) as _);
        Ok(key)
    }

    /// Registers mapped memory, which peers call `iova`. The table keeps it mapped until [`KeyTable::release`].
    ///
    /// # Errors
    /// As for [`KeyTable::register`].
    pub fn register_mapping(
        &self,
        pd: u32,
        mapping: &Arc<Mapping>,
        iova: u64,
        access: Access,
    ) -> Result<MrKey, CoreError> {
        let key = self.register(pd, mapping.region(), iova, access)?;
        self.keep(key, Arc::clone(mapping) as _);
        Ok(key)
    }

    fn keep(&self, key: MrKey, memory: Arc<dyn Any + Send + Sync>) {
        self.writer.lock().kept.insert(key.lkey, memory);
    }

    /// After [`KeyTable::begin_deregister`], when no lane can touch the memory any more: lets go of a registered buffer or
    /// mapping.
    pub fn release(&self, lkey: u32) {
        let kept = self.writer.lock().kept.remove(&lkey);
        // Not under the lock: its memory may be given back here.
        drop(kept);
    }

    /// Makes every later look-up of a region fail. Who looked it up before may still use its memory: the caller waits for the
    /// lanes before the program gets its memory back.
    ///
    /// # Errors
    /// EINVAL: no region has this key. EBUSY: memory windows are bound to it.
    pub fn begin_deregister(&self, lkey: u32) -> Result<(), CoreError> {
        let mut writer = self.writer.lock();
        let index = lkey >> TAG_BITS;
        let slot = self.slot(index).filter(|slot| slot.stamp.load(Ordering::Relaxed) as u32 == lkey && lkey != 0);
        let Some(slot) = slot.filter(|slot| slot.window.load(Ordering::Relaxed) & WINDOW == 0) else {
            return Err(unknown(lkey));
        };
        writer.check_unbound(lkey)?;
        let generation = (slot.stamp.load(Ordering::Relaxed) >> 32) + 1;
        slot.stamp.store(generation << 32, Ordering::Release);
        writer.free.push_back(index);
        writer.live -= 1;
        Ok(())
    }

    /// Resolves `len` bytes at `va` (in the region's terms) for use with `need`: empty for local reads, `LOCAL_WRITE` for local
    /// writes. A length of 0 is good with any key.
    ///
    /// # Errors
    /// In this order: no such key, another protection domain, outside the region, right not granted.
    #[inline]
    pub fn resolve(&self, pd: u32, key: u32, va: u64, len: u32, need: Access) -> Result<Span, MemoryError> {
        if len == 0 {
            return Ok(Span { addr: va, len: 0 });
        }
        let entry = self.entry(key).ok_or(MemoryError::BadKey)?;
        match entry.kind {
            EntryKind::Region => entry.span(pd, va, len, need),
            EntryKind::Null if entry.pd != pd => Err(MemoryError::WrongPd),
            EntryKind::Null => Ok(Span { addr: entry.addr, len }),
            EntryKind::Window => Err(MemoryError::BadKey),
        }
    }

    /// The same for a peer that reaches queue pair `qpn`, with one of the `REMOTE_*` as `need`: windows count too.
    ///
    /// # Errors
    /// As for [`KeyTable::resolve`]; a window that is bound to another queue pair is no such key.
    #[inline]
    pub fn resolve_remote(
        &self,
        pd: u32,
        qpn: u32,
        key: u32,
        va: u64,
        len: u32,
        need: Access,
    ) -> Result<Span, MemoryError> {
        if len == 0 {
            return Ok(Span { addr: va, len: 0 });
        }
        let entry = self.entry(key).filter(|entry| entry.is_for(qpn)).ok_or(MemoryError::BadKey)?;
        entry.span(pd, va, len, need)
    }

    /// Does a key grant the rights to peers of queue pair `qpn`, whatever the range?
    ///
    /// # Errors
    /// As for [`KeyTable::resolve_remote`], but for the range.
    pub fn check_remote(&self, pd: u32, qpn: u32, key: u32, need: Access) -> Result<(), MemoryError> {
        let entry = self.entry(key).filter(|entry| entry.is_for(qpn)).ok_or(MemoryError::BadKey)?;
        entry.span(pd, entry.iova, 0, need).map(drop)
    }

    /// What a key stands for now.
    #[inline]
    pub fn entry(&self, key: u32) -> Option<Entry> {
        let slot = self.slot(key >> TAG_BITS)?;
        let stamp = slot.stamp.load(Ordering::Acquire);
        if stamp as u32 != key || key == 0 {
            return None;
        }
        let window = slot.window.load(Ordering::Relaxed);
        let entry = Entry {
            kind: match window {
                0 => EntryKind::Region,
                NULL => EntryKind::Null,
                _ => EntryKind::Window,
            },
            pd: slot.pd.load(Ordering::Relaxed),
            addr: slot.addr.load(Ordering::Relaxed),
            len: slot.len.load(Ordering::Relaxed),
            iova: slot.iova.load(Ordering::Relaxed),
            access: Access::from_bits_retain(slot.access.load(Ordering::Relaxed)),
            qpn: window & QPN,
        };
        fence(Ordering::Acquire);
        // Changed meanwhile: the key was withdrawn, which is what it would have found a moment later.
        (slot.stamp.load(Ordering::Relaxed) == stamp).then_some(entry)
    }

    /// All keys that stand for something now, in the order of their slots. Takes no lock: of what changes meanwhile, any part may be
    /// missing.
    pub fn entries(&self) -> impl Iterator<Item = (u32, Entry)> {
        let slots = self.chunks.iter().map_while(OnceLock::get).flat_map(|chunk| chunk.iter());
        slots.filter_map(|slot| {
            let key = slot.stamp.load(Ordering::Relaxed) as u32;
            Some((key, self.entry(key)?))
        })
    }

    /// Regions that are registered.
    pub fn len(&self) -> u32 {
        self.writer.lock().live
    }

    /// No region is registered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    fn slot(&self, index: u32) -> Option<&Slot> {
        let index = index as usize;
        self.chunks.get(index / CHUNK)?.get()?.get(index % CHUNK)
    }

    fn take_slot(&self, writer: &mut Writer) -> Result<u32, CoreError> {
        if writer.free.is_empty() {
            let chunk = self.chunks.get(writer.chunks).ok_or_else(|| {
                CoreError::new(libc::ENOMEM, format!("all {} memory regions of the process are in use", limits::MAX_MR))
            })?;
            chunk.get_or_init(|| (0..CHUNK).map(|_| Slot::default()).collect());
            let first = (writer.chunks * CHUNK) as u32;
            // In random order: the next key does not follow from the last.
            let mut fresh: Vec<u32> = (first..first + CHUNK as u32).collect();
            fresh.shuffle(&mut writer.random);
            writer.free.extend(fresh);
            writer.chunks += 1;
        }
        Ok(writer.free.pop_front().expect("a chunk has slots"))
    }
}

/// What a slot says.
struct Fields {
    pd: u32,
    access: Access,
    addr: u64,
    len: u64,
    iova: u64,
    window: u32,
}

impl Writer {
    fn check_unbound(&self, lkey: u32) -> Result<(), CoreError> {
        match self.bound.get(&lkey) {
            Some(windows) => Err(CoreError::new(
                libc::EBUSY,
                format!("{windows} memory windows are bound to the region; invalidate or deallocate them first"),
            )),
            None => Ok(()),
        }
    }
}

impl Slot {
    /// Fills it in and makes it valid for `key`. Its stamp must have no key.
    fn fill(&self, generation: u64, key: u32, fields: Fields) {
        // No new look-up succeeds; one that began before the last key was withdrawn and sees a field of this entry must also see that
        // withdrawal: hence the fence.
        fence(Ordering::Release);
        self.pd.store(fields.pd, Ordering::Relaxed);
        self.access.store(fields.access.bits(), Ordering::Relaxed);
        self.addr.store(fields.addr, Ordering::Relaxed);
        self.len.store(fields.len, Ordering::Relaxed);
        self.iova.store(fields.iova, Ordering::Relaxed);
        self.window.store(fields.window, Ordering::Relaxed);
        self.stamp.store(generation << 32 | u64::from(key), Ordering::Release);
    }
}

fn unknown(lkey: u32) -> CoreError {
    CoreError::new(libc::EINVAL, format!("no memory region has the key {lkey:#010x}"))
}

/// A key for a slot: not 0, and not the slot's last one.
fn fresh_key(random: &mut StdRng, index: u32, last: u32) -> u32 {
    loop {
        let key = index << TAG_BITS | random.random_range(0..1 << TAG_BITS);
        if key != 0 && key != last {
            return key;
        }
    }
}

fn check_access(access: Access) -> Result<Access, CoreError> {
    let access = Access::from_bits_retain(access.bits() & !limits::OPTIONAL_ACCESS);
    if access.contains(Access::FLUSH_PERSISTENT) {
        return Err(CoreError::new(
            libc::EOPNOTSUPP,
            "access flags ask for RDMA FLUSH to persistence, which this card cannot promise",
        ));
    }
    let unknown = access.difference(limits::MR_ACCESS);
    if !unknown.is_empty() {
        return Err(CoreError::new(libc::EINVAL, format!("unknown access flags {:#x}", unknown.bits())));
    }
    let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
    if writes && !access.contains(Access::LOCAL_WRITE) {
        return Err(CoreError::new(
            libc::EINVAL,
            "IBV_ACCESS_REMOTE_WRITE and IBV_ACCESS_REMOTE_ATOMIC need IBV_ACCESS_LOCAL_WRITE as well",
        ));
    }
    Ok(access)
}

fn check_range(region: RawRegion, iova: u64, access: Access) -> Result<(), CoreError> {
    let (addr, len) = (region.addr() as u64, region.len() as u64);
    if len == 0 {
        return Err(CoreError::new(libc::EINVAL, "a memory region cannot have length 0"));
    }
    if addr.checked_add(len).is_none() {
        return Err(CoreError::new(libc::EINVAL, format!("memory {addr:#x} + {len:#x} wraps around")));
    }
    if iova.checked_add(len).is_none() {
        return Err(CoreError::new(libc::EINVAL, format!("iova {iova:#x} + {len:#x} wraps around")));
    }
    // Who asks for paging on demand may map the memory later, or means all of the address space.
    if !access.contains(Access::ON_DEMAND) && !mem::is_mapped(addr, len) {
        return Err(CoreError::new(libc::EFAULT, format!("memory {addr:#x} + {len:#x} is not all mapped")));
    }
    Ok(())
}
