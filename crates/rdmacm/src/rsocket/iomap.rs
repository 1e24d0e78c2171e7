//! Memory of the program that the peer may write to at offsets: `riomap`, `riounmap`, `riowrite`.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};

use ferroce_abi::ibv_mr;
use ferroce_rsocket::{Iomap, Sge, TRANSFER_MAX, TRANSFER_MIN};
use libc::iovec;

use super::connect::{connected, send_patience};
use super::gather::Gather;
use super::transfer::send_error;
use super::wait::Patience;
use super::{Inner, Socket, State, find};
use crate::entry::{Call, Refusal, rdma};
use crate::verbs;

const LOCAL_WRITE: c_int = 1;
const REMOTE_WRITE: c_int = 1 << 1;

/// What the program has mapped on a socket.
#[derive(Default)]
pub(super) struct Mappings {
    /// By entry of the peer's table.
    told: Vec<Option<Mapping>>,
    /// Entries that the peer is to be told of.
    untold: VecDeque<u16>,
    /// Mapped, but not for the peer (PROT_NONE).
    quiet: Vec<Mapping>,
}

struct Mapping {
    mr: *mut ibv_mr,
    addr: *mut c_void,
    len: usize,
    offset: u64,
}

// SAFETY: verbs may be called from any thread.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `riomap`; the peer cannot reach the memory any more.
        unsafe { verbs::ibv_dereg_mr(self.mr) };
    }
}

impl Mapping {
    fn is(&self, addr: *mut c_void, len: usize) -> bool {
        self.addr == addr && self.len == len
    }

    /// For the peer. The length fits: `riomap` has checked it.
    fn iomap(&self) -> Iomap {
        // SAFETY: live until dropped.
        let key = unsafe { (*self.mr).rkey };
        Iomap {
            offset: self.offset,
            sge: Sge { addr: self.addr.expose_provenance() as u64, key, length: self.len as u32 },
        }
    }
}

impl Mappings {
    pub(super) fn clear(&mut self) {
        *self = Mappings::default();
    }

    /// An entry of the peer's table, which has `size`, that is not in use.
    fn free_entry(&mut self, size: u16) -> Call<u16> {
        let free = (0..size).find(|entry| self.told.get(usize::from(*entry)).is_none_or(Option::is_none));
        free.ok_or_else(|| {
            Refusal::new(
                libc::ENOMEM,
                format!("the peer takes {size} mappings (its RDMA_IOMAPSIZE), and all are in use"),
            )
        })
    }

    fn remove(&mut self, addr: *mut c_void, len: usize) -> bool {
        let is_told = |mapping: &Option<Mapping>| mapping.as_ref().is_some_and(|mapping| mapping.is(addr, len));
        if let Some(entry) = self.told.iter().position(is_told) {
            self.told[entry] = None;
            self.untold.retain(|untold| usize::from(*untold) != entry);
            return true;
        }
        let Some(at) = self.quiet.iter().position(|mapping| mapping.is(addr, len)) else { return false };
        self.quiet.swap_remove(at);
        true
    }
}

/// A test for `until`: how many mappings the peer takes. An end that accepts knows it before the connection is made.
fn peer_iomaps(inner: &mut Inner) -> Call<Option<u16>> {
    let (State::Accepting(endpoint) | State::Connected(endpoint)) = &mut inner.state else {
        return connected(inner).map(|_| None);
    };
    Ok(endpoint.stream().map(|stream| stream.peer_iomaps()))
}

/// Tells the peer of what was mapped, before anything else is sent. The caller has the turn to send.
pub(super) fn announce(socket: &Socket, patience: Patience) -> Call<()> {
    if socket.inner().mappings.untold.is_empty() {
        return Ok(());
    }
    socket.until(patience, |inner| {
        while let Some(entry) = inner.mappings.untold.front().copied() {
            if let Some(refusal) = send_error(inner) {
                return Err(refusal);
            }
            let iomap = inner.mappings.told[usize::from(entry)].as_ref().expect("what is not told is mapped").iomap();
            if !inner.connection().is_some_and(|endpoint| endpoint.map(entry, iomap)) {
                return Ok(None);
            }
            inner.mappings.untold.pop_front();
        }
        Ok(Some(()))
    })
}

/// `riowrite`.
fn write(socket: c_int, buffer: *const c_void, count: usize, offset: u64, flags: c_int) -> Call<usize> {
    let socket = find(socket)?;
    if buffer.is_null() && count > 0 {
        return Err(Refusal::new(libc::EFAULT, format!("{count} bytes at NULL")));
    }
    if isize::try_from(count).is_err() {
        return Err(Refusal::invalid("more bytes than there can be"));
    }
    let patience = send_patience(&socket, flags);
    let _turn = socket.sending.lock();
    socket.until(patience, connected)?;
    announce(&socket, patience)?;
    let pieces = [iovec { iov_base: buffer.cast_mut(), iov_len: count }];
    // SAFETY: the program's bytes stay during the call.
    let mut data = unsafe { Gather::new(&pieces, count) };
    let mut longest = TRANSFER_MIN;
    while data.left() > 0 {
        let at = offset.checked_add((count - data.left()) as u64);
        let sent = socket.until(patience, |inner| {
            if let Some(refusal) = send_error(inner) {
                return Err(refusal);
            }
            let Some(endpoint) = inner.connection() else { return Err(Refusal::told(libc::ENOTCONN)) };
            let Some((at, iomap)) = at.and_then(|at| Some((at, endpoint.mapping(at)?))) else {
                return Err(Refusal::invalid("the peer has mapped nothing at this offset"));
            };
            Ok(endpoint.write_mapped(&mut data, longest, &iomap, at))
        });
        match sent {
            Ok(_) => longest = (longest * 2).min(TRANSFER_MAX),
            Err(_) if data.left() < count => break,
            Err(refusal) => return Err(refusal),
        }
    }
    Ok(count - data.left())
}

rdma! {
    /// `riomap`, see rsocket(7): the offset, or the buffer's address if it is -1.
    fn riomap(socket: c_int, buffer: *mut c_void, len: usize, protection: c_int, _flags: c_int, offset: i64) -> i64 {
        let socket = find(socket)?;
        if protection & !libc::PROT_WRITE != 0 {
            return Err(Refusal::invalid(format!("protection {protection:#x}: use PROT_WRITE or PROT_NONE")));
        }
        if buffer.is_null() || len == 0 || u32::try_from(len).is_err() {
            return Err(Refusal::invalid(format!("{len} bytes at {buffer:p} cannot be mapped")));
        }
        let offset = match offset {
            -1 => buffer.expose_provenance() as i64,
            offset => offset,
        };
        let size = socket.until(Patience::Endless, peer_iomaps)?;
        let mut guard = socket.inner();
        let inner: &mut Inner = &mut guard;
        // SAFETY: the field is the library's.
        let pd = unsafe { (*inner.id.get().as_ptr()).pd };
        let is_told = protection & libc::PROT_WRITE != 0;
        let entry = if is_told { Some(inner.mappings.free_entry(size)?) } else { None };
        let access = if is_told { LOCAL_WRITE | REMOTE_WRITE } else { LOCAL_WRITE };
        // SAFETY: a live PD; memory of the program.
        let mr = unsafe { verbs::ibv_reg_mr(pd, buffer, len, access) };
        if mr.is_null() {
            return Err(Refusal::last());
        }
        let mapping = Mapping { mr, addr: buffer, len, offset: offset as u64 };
        let Some(entry) = entry else {
            inner.mappings.quiet.push(mapping);
            return Ok(offset);
        };
        let at = usize::from(entry);
        if inner.mappings.told.len() <= at {
            inner.mappings.told.resize_with(at + 1, || None);
        }
        inner.mappings.told[at] = Some(mapping);
        inner.mappings.untold.push_back(entry);
        Ok(offset)
    }

    /// `riounmap`, see rsocket(7).
    fn riounmap(socket: c_int, buffer: *mut c_void, len: usize) -> c_int {
        let socket = find(socket)?;
        if socket.inner().mappings.remove(buffer, len) {
            Ok(0)
        } else {
            Err(Refusal::invalid(format!("{len} bytes at {buffer:p} are not mapped")))
        }
    }

    /// `riowrite`, see rsocket(7).
    fn riowrite(socket: c_int, buffer: *const c_void, count: usize, offset: i64, flags: c_int) -> usize {
        write(socket, buffer, count, offset as u64, flags)
    }
}
