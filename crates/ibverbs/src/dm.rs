//! Device memory: memory of the card. This card's memory is the process's, kept by the library; each piece is a file without a name,
//! so that it can be exported.

use std::ffi::{c_uint, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferroce::{Access, Mapping};

use crate::abi::{ibv_alloc_dm_attr, ibv_context, ibv_dm, ibv_mr, ibv_pd};
use crate::context::{ContextObject, ContextRef};
use crate::entry::{MinusOne, Pointer, Refusal, Status, Verb, Void, slot, verb};
use crate::handle::{Shared, handle, handle_number};
use crate::mr;
use crate::registry::Registry;

/// Bytes of device memory that a process can have.
pub(crate) const MAX_SIZE: usize = 1 << 20;
/// Offsets and lengths of copies are multiples of this, as on cards that have such memory.
const GRAIN: u64 = 4;
/// Alignment that every piece has, as a power of two.
const LOG_ALIGN: u32 = 12;

pub(crate) static PIECES: Registry<Piece> = Registry::new();
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

/// A piece of device memory. Regions that were registered over it keep it.
pub(crate) struct Piece {
    memory: Mapping,
    file: OwnedFd,
    length: usize,
    _share: Share,
}

/// So much of the memory that a process can have.
struct Share(usize);

impl Share {
    fn take(length: usize) -> Verb<Share> {
        let fits = |allocated: usize| allocated.checked_add(length).filter(|sum| *sum <= MAX_SIZE);
        ALLOCATED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).map_err(|allocated| {
            Refusal::new(libc::ENOMEM, format!("{length} bytes of device memory: {} are left", MAX_SIZE - allocated))
        })?;
        Ok(Share(length))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        ALLOCATED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// A file of whole pages whose length nobody can change: who maps it, here or elsewhere, finds all of it.
fn file(length: usize) -> io::Result<OwnedFd> {
    let page = ferroce::page_size();
    let size = length.div_ceil(page) * page;
    // SAFETY: the name is a string of C.
    let fd = unsafe { libc::memfd_create(c"ferroce-dm".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just made and is nobody else's.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(size as u64)?;
    // SAFETY: an operation on our descriptor with a number.
    if unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file.into())
}

impl Piece {
    fn allocate(length: usize) -> Verb<Arc<Piece>> {
        let share = Share::take(length)?;
        let made = file(length).and_then(|file| Ok((Mapping::of_file(file.as_fd(), 0, length, true)?, file)));
        let (memory, file) = made.map_err(|error| {
            Refusal::new(error.raw_os_error().unwrap_or(libc::ENOMEM), format!("no file for device memory: {error}"))
        })?;
        Ok(Arc::new(Piece { memory, file, length, _share: share }))
    }

    /// Checks a copy of `length` bytes at `offset`.
    fn check(&self, offset: u64, length: usize) -> Verb<usize> {
        let end = offset.checked_add(length as u64).filter(|end| *end <= self.length as u64);
        if end.is_none() || !offset.is_multiple_of(GRAIN) || !(length as u64).is_multiple_of(GRAIN) {
            return Err(Refusal::invalid(format!(
                "offset {offset} and length {length}: both must be multiples of {GRAIN} inside the {} bytes of the piece",
                self.length
            )));
        }
        Ok(offset as usize)
    }
}

fn gone(_: ferroce::Fault) -> Refusal {
    Refusal::new(libc::EFAULT, "there is no memory left for the piece's file")
}

/// `struct ibv_dm` and what is behind it.
#[repr(C)]
pub struct DmObject {
    c: Shared<ibv_dm>,
    piece: Arc<Piece>,
    _context: ContextRef,
}

handle!(DmObject, ibv_dm, "dm");

impl DmObject {
    fn make(context: ContextRef, piece: Arc<Piece>, handle: u32) -> Verb<*mut ibv_dm> {
        let c = ibv_dm {
            context: context.as_ptr(),
            memcpy_to_dm: Some(memcpy_to_dm),
            memcpy_from_dm: Some(memcpy_from_dm),
            comp_mask: 0,
            handle,
        };
        DmObject::publish(|_| Ok(DmObject { c: Shared::new(c), piece, _context: context }))
    }
}

slot! {
    /// `ibv_alloc_dm(3)`.
    fn alloc_dm as "ibv_alloc_dm" (context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> Pointer<ibv_dm> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let attr = unsafe { attr.read() };
        if attr.comp_mask != 0 {
            return Err(Refusal::unsupported("ibv_alloc_dm_attr.comp_mask has unknown bits"));
        }
        if attr.length == 0 || attr.log_align_req > LOG_ALIGN {
            return Err(Refusal::invalid(format!("length is 0 or log_align_req is above {LOG_ALIGN}")));
        }
        let piece = Piece::allocate(attr.length)?;
        let handle = handle_number();
        PIECES.add(handle, &piece);
        DmObject::make(context, piece, handle)
    }

    /// `ibv_free_dm(3)`: `EBUSY` while a region is registered over it.
    fn free_dm as "ibv_free_dm" (dm: *mut ibv_dm) -> Status {
        // SAFETY: by the contract of the verb.
        let users = Arc::strong_count(&unsafe { DmObject::of(dm) }?.piece) - 1;
        if users > 0 {
            return Err(Refusal::new(libc::EBUSY, format!("{users} regions or imported objects still use the memory")));
        }
        // SAFETY: nothing uses it, and the program has no use for the pointer any more.
        drop(unsafe { DmObject::reclaim(dm) });
        Ok(())
    }

    /// `ibv_memcpy_to_dm(3)`.
    fn memcpy_to_dm as "ibv_memcpy_to_dm" (dm: *mut ibv_dm, offset: u64, from: *const c_void, length: usize) -> Status {
        // SAFETY: by the contract of the verb.
        let piece = &unsafe { DmObject::of(dm) }?.piece;
        let offset = piece.check(offset, length)?;
        if from.is_null() || length == 0 {
            return if length == 0 { Ok(()) } else { Err(Refusal::invalid("host_addr is NULL")) };
        }
        // SAFETY: the caller has `length` bytes there.
        let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), length) };
        piece.memory.write(offset, from).map_err(gone)
    }

    /// `ibv_memcpy_from_dm(3)`.
    fn memcpy_from_dm as "ibv_memcpy_from_dm" (to: *mut c_void, dm: *mut ibv_dm, offset: u64, length: usize) -> Status {
        // SAFETY: by the contract of the verb.
        let piece = &unsafe { DmObject::of(dm) }?.piece;
        let offset = piece.check(offset, length)?;
        if to.is_null() || length == 0 {
            return if length == 0 { Ok(()) } else { Err(Refusal::invalid("host_addr is NULL")) };
        }
        // SAFETY: the caller has room for `length` bytes there; zeroing first makes them initialised.
        let to = unsafe {
            std::ptr::write_bytes(to.cast::<u8>(), 0, length);
            std::slice::from_raw_parts_mut(to.cast::<u8>(), length)
        };
        piece.memory.read(offset, to).map_err(gone)
    }

    /// `ibv_reg_dm_mr(3)`: addresses of the region start at 0.
    fn reg_dm_mr as "ibv_reg_dm_mr" (
        pd: *mut ibv_pd,
        dm: *mut ibv_dm,
        offset: u64,
        length: usize,
        flags: c_uint,
    ) -> Pointer<ibv_mr> {
        // SAFETY: by the contract of the verb.
        let piece = unsafe { DmObject::of(dm) }?.piece.clone();
        let access = mr::access(flags)?;
        if !access.contains(Access::ZERO_BASED) {
            return Err(Refusal::invalid("access lacks IBV_ACCESS_ZERO_BASED, which device memory needs"));
        }
        let offset = piece.check(offset, length)?;
        // SAFETY: by the contract of the verb; the region keeps the piece, and so its memory, until it is deregistered.
        unsafe { mr::register_piece(pd, piece.memory.addr() + offset, length, access, piece) }
    }
}

verb! {
    /// `ibv_dm_export_dmabuf_fd(3)`: the piece's file, whole pages of it. It can be mapped, passed on and registered.
    fn ibv_dm_export_dmabuf_fd(dm: *mut ibv_dm) -> MinusOne {
        // SAFETY: by the contract of the verb.
        let piece = &unsafe { DmObject::of(dm) }?.piece;
        // SAFETY: an operation on our descriptor with a number.
        match unsafe { libc::fcntl(piece.file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) } {
            fd if fd >= 0 => Ok(fd),
            _ => Err(Refusal::new(
                io::Error::last_os_error().raw_os_error().unwrap_or(libc::EMFILE),
                "no descriptor for the piece's file",
            )),
        }
    }

    /// `ibv_import_dm(3)`: from another context of this process.
    fn ibv_import_dm(context: *mut ibv_context, handle: u32) -> Pointer<ibv_dm> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        let piece = PIECES.get(handle).ok_or_else(|| Refusal::new(libc::ENOENT, "no device memory of this process has the handle"))?;
        DmObject::make(context, piece, handle)
    }

    /// `ibv_unimport_dm(3)`: the memory stays with who allocated it.
    fn ibv_unimport_dm(dm: *mut ibv_dm) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { DmObject::of(dm) }?;
        // SAFETY: the program gives the pointer back.
        drop(unsafe { DmObject::reclaim(dm) });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_inside_and_on_the_grain() {
        let piece = Piece::allocate(100).unwrap();
        assert_eq!(piece.check(0, 100).unwrap(), 0);
        assert_eq!(piece.check(96, 4).unwrap(), 96);
        for (offset, length) in [(1, 4), (4, 1), (104, 4), (0, 104), (u64::MAX - 3, 4)] {
            assert_eq!(piece.check(offset, length).unwrap_err().errno(), libc::EINVAL, "{offset} {length}");
        }
    }

    #[test]
    fn there_is_only_so_much() {
        assert_eq!(Piece::allocate(MAX_SIZE + 1).err().unwrap().errno(), libc::ENOMEM);
        assert_eq!(Piece::allocate(usize::MAX).err().unwrap().errno(), libc::ENOMEM);
    }
}
