//! Memory windows: keys of their own to a part of a region, bound and taken back by work requests.
//!
//! A window takes a slot of the table for its life. Bound, it looks like a region that only peers reach; unbound, its slot has no key.
//! Where it lies is copied from its region when it is bound, which is why a region with windows can neither change nor go.

use std::sync::atomic::Ordering;

use ferroce_transport::{Access, MemoryError, MwBind};

use super::{EntryKind, Fields, KeyTable, TAG_BITS, WINDOW, Writer, fresh_key};
use crate::error::CoreError;

/// `enum ibv_mw_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum WindowKind {
    /// Bound by a verb; reached through any queue pair of its protection domain.
    One = 1,
    /// Bound and invalidated by work requests; reached through the queue pair that bound it only.
    Two = 2,
}

/// Rights that a window can grant; `ZERO_BASED` is how it is addressed.
const GRANTED: Access =
    Access::REMOTE_READ.union(Access::REMOTE_WRITE).union(Access::REMOTE_ATOMIC).union(Access::ZERO_BASED);

/// What is known of a window besides what its slot says.
#[derive(Debug)]
pub(super) struct Window {
    pd: u32,
    kind: WindowKind,
    /// Key of the region that it is bound to.
    region: Option<u32>,
}

impl KeyTable {
    /// Makes a window, unbound. Gives its first key, which is good for nothing yet.
    ///
    /// # Errors
    /// ENOMEM: no slot is left.
    pub fn alloc_window(&self, pd: u32, kind: WindowKind) -> Result<u32, CoreError> {
        let mut writer = self.writer.lock();
        let mut index = self.take_slot(&mut writer)?;
        if index == 0 {
            // The program counts the low bits of a window's key up: here it could come to 0, which is no key.
            index = self.take_slot(&mut writer)?;
            writer.free.push_back(0);
        }
        let slot = self.slot(index).expect("a free slot lies in a chunk");
        let key = fresh_key(&mut writer.random, index, slot.last.load(Ordering::Relaxed));
        slot.last.store(key, Ordering::Relaxed);
        writer.windows.insert(index, Window { pd, kind, region: None });
        Ok(key)
    }

    /// Ends a window, bound or not. Who looked it up before may still use its memory: the caller waits for the lanes.
    ///
    /// # Errors
    /// EINVAL: no window has this key's number.
    pub fn dealloc_window(&self, rkey: u32) -> Result<(), CoreError> {
        let mut writer = self.writer.lock();
        let index = rkey >> TAG_BITS;
        self.unbind(&mut writer, index);
        if writer.windows.remove(&index).is_none() {
            return Err(CoreError::new(libc::EINVAL, format!("no memory window has the key {rkey:#010x}")));
        }
        writer.free.push_back(index);
        Ok(())
    }

    /// Binds a window, for queue pair `qpn` of protection domain `pd`.
    ///
    /// # Errors
    /// No such window or region, another protection domain, outside the region, a right that the region does not give; a window of type 2
    /// that is bound already. The window is then as it was.
    pub fn bind_window(&self, pd: u32, qpn: u32, bind: &MwBind) -> Result<(), MemoryError> {
        let mut writer = self.writer.lock();
        let index = bind.rkey >> TAG_BITS;
        let window = writer.windows.get(&index).ok_or(MemoryError::BadKey)?;
        let (kind, bound) = (window.kind, window.region.is_some());
        if window.pd != pd {
            return Err(MemoryError::WrongPd);
        }
        if kind == WindowKind::Two && (bound || bind.len == 0) {
            return Err(MemoryError::Access);
        }
        if bind.len == 0 {
            self.unbind(&mut writer, index);
            return Ok(());
        }
        let mut fields = self.part(pd, bind)?;
        fields.window = WINDOW | if kind == WindowKind::Two { qpn } else { 0 };
        self.unbind(&mut writer, index);
        let slot = self.slot(index).expect("a window has a slot");
        slot.last.store(bind.rkey, Ordering::Relaxed);
        slot.fill((slot.stamp.load(Ordering::Relaxed) >> 32) + 1, bind.rkey, fields);
        writer.windows.get_mut(&index).expect("it was there").region = Some(bind.lkey);
        *writer.bound.entry(bind.lkey).or_default() += 1;
        Ok(())
    }

    /// Takes a window of type 2 back: SEND with invalidate, and `IBV_WR_LOCAL_INV`.
    ///
    /// # Errors
    /// The key is of no such window, or of one that another queue pair bound.
    pub fn invalidate_window(&self, pd: u32, qpn: u32, rkey: u32) -> Result<(), MemoryError> {
        let mut writer = self.writer.lock();
        let entry = self.entry(rkey).ok_or(MemoryError::BadKey)?;
        if entry.pd != pd {
            return Err(MemoryError::WrongPd);
        }
        if entry.kind != EntryKind::Window || entry.qpn != qpn {
            return Err(MemoryError::Access);
        }
        self.unbind(&mut writer, rkey >> TAG_BITS);
        Ok(())
    }

    /// The part of a region that a window is to show.
    fn part(&self, pd: u32, bind: &MwBind) -> Result<Fields, MemoryError> {
        let region =
            self.entry(bind.lkey).filter(|entry| entry.kind == EntryKind::Region).ok_or(MemoryError::BadKey)?;
        if region.pd != pd {
            return Err(MemoryError::WrongPd);
        }
        let offset = bind.addr.checked_sub(region.iova).ok_or(MemoryError::Bounds)?;
        if offset > region.len || bind.len > region.len - offset {
            return Err(MemoryError::Bounds);
        }
        let writes = bind.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let may = region.access.contains(Access::MW_BIND) && (!writes || region.access.contains(Access::LOCAL_WRITE));
        if !may || !GRANTED.contains(bind.access) {
            return Err(MemoryError::Access);
        }
        let iova = if bind.access.contains(Access::ZERO_BASED) { 0 } else { bind.addr };
        Ok(Fields { pd, access: bind.access, addr: region.addr + offset, len: bind.len, iova, window: 0 })
    }

    fn unbind(&self, writer: &mut Writer, index: u32) {
        let Some(region) = writer.windows.get_mut(&index).and_then(|window| window.region.take()) else { return };
        let slot = self.slot(index).expect("a window has a slot");
        slot.stamp.store(((slot.stamp.load(Ordering::Relaxed) >> 32) + 1) << 32, Ordering::Release);
        if let Some(count) = writer.bound.get_mut(&region) {
            *count -= 1;
            if *count == 0 {
                writer.bound.remove(&region);
            }
        }
    }
}
