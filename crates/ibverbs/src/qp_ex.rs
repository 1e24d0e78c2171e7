//! Extended queue pairs: `ibv_wr_start` ... `ibv_wr_complete`, which build and post a batch of send requests.

use std::cell::UnsafeCell;
use std::ffi::c_void;

use ferroce::{FlushRange, Placement, QpType, SendData, SendFlags, SendOp, SendWr, UdDest, WindowKind};
use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;

use crate::abi::{ibv_ah, ibv_data_buf, ibv_mw, ibv_mw_bind_info, ibv_qp, ibv_qp_ex, ibv_sge};
use crate::entry::{Refusal, Status, Verb, Void, slot};
use crate::mw::binding;
use crate::post::{copy_inline, destination, posting, sge};
use crate::qp::QpObject;

/// The requests of a batch. The program locks it with `ibv_wr_start` and unlocks it with `ibv_wr_complete` or `ibv_wr_abort`.
pub(crate) struct Builder {
    lock: RawMutex,
    batch: UnsafeCell<Batch>,
}

// SAFETY: `batch` is only touched by the thread that holds `lock`.
unsafe impl Sync for Builder {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Builder {}

#[derive(Default)]
struct Batch {
    requests: Vec<SendWr>,
    /// The first thing that went wrong: the whole batch fails with it.
    failed: Option<Refusal>,
}

impl Builder {
    pub(crate) fn new() -> Builder {
        Builder { lock: RawMutex::INIT, batch: UnsafeCell::new(Batch::default()) }
    }
}

/// The structure of any queue pair; all functions are there, since inline code calls them unchecked.
pub(crate) fn structure(qp_base: ibv_qp) -> ibv_qp_ex {
    ibv_qp_ex {
        qp_base,
        comp_mask: 0,
        wr_id: 0,
        wr_flags: 0,
        wr_atomic_cmp_swp: Some(wr_atomic_cmp_swp),
        wr_atomic_fetch_add: Some(wr_atomic_fetch_add),
        wr_bind_mw: Some(wr_bind_mw),
        wr_local_inv: Some(wr_local_inv),
        wr_rdma_read: Some(wr_rdma_read),
        wr_rdma_write: Some(wr_rdma_write),
        wr_rdma_write_imm: Some(wr_rdma_write_imm),
        wr_send: Some(wr_send),
        wr_send_imm: Some(wr_send_imm),
        wr_send_inv: Some(wr_send_inv),
        wr_send_tso: Some(wr_send_tso),
        wr_set_ud_addr: Some(wr_set_ud_addr),
        wr_set_xrc_srqn: Some(wr_set_xrc_srqn),
        wr_set_inline_data: Some(wr_set_inline_data),
        wr_set_inline_data_list: Some(wr_set_inline_data_list),
        wr_set_sge: Some(wr_set_sge),
        wr_set_sge_list: Some(wr_set_sge_list),
        wr_start: Some(wr_start),
        wr_complete: Some(wr_complete),
        wr_abort: Some(wr_abort),
        wr_atomic_write: Some(wr_atomic_write),
        wr_flush: Some(wr_flush),
    }
}

/// The queue pair and its batch; refuses outside `ibv_wr_start` ... `ibv_wr_complete`.
///
/// # Safety
///
/// `qp` is NULL or live, and the calling thread is the one that called `ibv_wr_start`.
unsafe fn batch<'a>(qp: *mut ibv_qp_ex) -> Verb<(&'a QpObject, &'a mut Batch)> {
    // SAFETY: by the contract above; the extended structure starts with the plain one.
    let object = unsafe { QpObject::of(qp.cast()) }?;
    if !object.builder.lock.is_locked() {
        return Err(Refusal::invalid("no ibv_wr_start before"));
    }
    // SAFETY: by the contract above the caller holds the lock.
    Ok((object, unsafe { &mut *object.builder.batch.get() }))
}

/// Adds a request, with the identifier and flags that the program put into the structure.
///
/// # Safety
///
/// As for [`batch`].
unsafe fn begin(qp: *mut ibv_qp_ex, op: SendOp) -> Verb<()> {
    // SAFETY: by the contract above.
    let (_, batch) = unsafe { batch(qp) }?;
    // SAFETY: `batch` has checked that the pointer is not NULL; the fields are the program's, which is here.
    let (wr_id, wr_flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    // INLINE is said by `ibv_wr_set_inline_data`, not by a flag.
    let flags = SendFlags::from_bits_truncate(wr_flags) - SendFlags::INLINE;
    batch.requests.push(SendWr {
        wr_id,
        op,
        flags,
        data: SendData::Sges(Default::default()),
        ud: None,
        xrc_srqn: None,
    });
    Ok(())
}

/// A request that cannot be: the batch fails.
///
/// # Safety
///
/// As for [`batch`].
unsafe fn fail(qp: *mut ibv_qp_ex, refusal: Refusal) -> Verb<()> {
    // SAFETY: by the contract above.
    let (_, batch) = unsafe { batch(qp) }?;
    batch.failed.get_or_insert(refusal);
    Ok(())
}

/// Changes the request that was begun last; what goes wrong fails the batch.
///
/// # Safety
///
/// As for [`batch`].
unsafe fn amend(qp: *mut ibv_qp_ex, change: impl FnOnce(&QpObject, &mut SendWr) -> Verb<()>) -> Verb<()> {
    // SAFETY: by the contract above.
    let (object, batch) = unsafe { batch(qp) }?;
    if batch.failed.is_some() {
        return Ok(());
    }
    let changed = match batch.requests.last_mut() {
        Some(request) => change(object, request),
        None => Err(Refusal::invalid("a setter before any request of the batch")),
    };
    if let Err(refusal) = changed {
        batch.failed = Some(refusal);
    }
    Ok(())
}

/// Sets the elements of a request.
fn set_elements(object: &QpObject, request: &mut SendWr, list: &[ibv_sge]) -> Verb<()> {
    let max = object.qp.caps().max_send_sge;
    if list.len() > max as usize {
        return Err(Refusal::invalid(format!(
            "{} elements: the queue pair was made with max_send_sge {max}",
            list.len()
        )));
    }
    request.data = SendData::Sges(list.iter().map(sge).collect());
    Ok(())
}

/// Copies inline data into a request.
///
/// # Safety
///
/// The buffers may be read.
unsafe fn set_inline(object: &QpObject, request: &mut SendWr, list: &[ibv_data_buf]) -> Verb<()> {
    let pieces = list.iter().map(|buffer| (buffer.addr.cast_const().cast::<u8>(), buffer.length));
    // SAFETY: by the contract above.
    request.data = SendData::Inline(unsafe { copy_inline(pieces, object.qp.caps().max_inline_data) }?);
    request.flags |= SendFlags::INLINE;
    Ok(())
}

/// A list of the program; NULL only if it is empty.
///
/// # Safety
///
/// `list` has `count` elements.
unsafe fn slice<'a, T>(list: *const T, count: usize) -> Verb<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() {
        return Err(Refusal::invalid("the list is NULL although its length is not 0"));
    }
    // SAFETY: by the contract above.
    Ok(unsafe { std::slice::from_raw_parts(list, count) })
}

/// A FLUSH: `kind` is of `enum ibv_placement_type`, `level` of `enum ibv_selectivity_level`.
fn flush(rkey: u32, raddr: u64, length: usize, kind: u8, level: u8) -> Verb<SendOp> {
    let placement = Placement::from_bits(kind)
        .filter(|placement| !placement.is_empty())
        .ok_or_else(|| Refusal::invalid(format!("type {kind:#x} is no enum ibv_placement_type")))?;
    let range = match level {
        0 => {
            let len = u32::try_from(length)
                .map_err(|_| Refusal::invalid(format!("{length} bytes: a FLUSH names fewer than 2^32")))?;
            FlushRange::Bytes { raddr, len }
        }
        1 => FlushRange::Region,
        other => return Err(Refusal::invalid(format!("level {other} is no enum ibv_selectivity_level"))),
    };
    Ok(SendOp::Flush { rkey, range, placement })
}

/// Posts a batch: all of it or nothing.
fn post(object: &QpObject, batch: Batch) -> Verb<()> {
    if let Some(refusal) = batch.failed {
        return Err(refusal);
    }
    if batch.requests.is_empty() {
        return Ok(());
    }
    object.qp.post_send_all(batch.requests).map_err(posting)?;
    object.qp.ring();
    Ok(())
}

slot! {
    /// `ibv_wr_start`: waits for another thread's batch.
    fn wr_start as "ibv_wr_start" (qp: *mut ibv_qp_ex) -> Void {
        // SAFETY: by the contract of the verb.
        let object = unsafe { QpObject::of(qp.cast()) }?;
        object.builder.lock.lock();
        Ok(())
    }

    /// `ibv_wr_complete`.
    fn wr_complete as "ibv_wr_complete" (qp: *mut ibv_qp_ex) -> Status {
        // SAFETY: by the contract of the verb.
        let (object, batch) = unsafe { batch(qp) }?;
        let result = post(object, std::mem::take(batch));
        // SAFETY: locked by the caller's ibv_wr_start.
        unsafe { object.builder.lock.unlock() };
        result
    }

    /// `ibv_wr_abort`.
    fn wr_abort as "ibv_wr_abort" (qp: *mut ibv_qp_ex) -> Void {
        // SAFETY: by the contract of the verb.
        let (object, batch) = unsafe { batch(qp) }?;
        *batch = Batch::default();
        // SAFETY: locked by the caller's ibv_wr_start.
        unsafe { object.builder.lock.unlock() };
        Ok(())
    }

    /// `ibv_wr_send`.
    fn wr_send as "ibv_wr_send" (qp: *mut ibv_qp_ex) -> Void {
        // SAFETY: by the contract of the verb; so in the functions below.
        unsafe { begin(qp, SendOp::Send) }
    }

    /// `ibv_wr_send_imm`.
    fn wr_send_imm as "ibv_wr_send_imm" (qp: *mut ibv_qp_ex, imm_data: u32) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { begin(qp, SendOp::SendImm { imm: u32::from_be(imm_data) }) }
    }

    /// `ibv_wr_send_inv`.
    fn wr_send_inv as "ibv_wr_send_inv" (qp: *mut ibv_qp_ex, rkey: u32) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { begin(qp, SendOp::SendInv { rkey }) }
    }

    /// `ibv_wr_local_inv`.
    fn wr_local_inv as "ibv_wr_local_inv" (qp: *mut ibv_qp_ex, rkey: u32) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { begin(qp, SendOp::LocalInv { rkey }) }
    }

    /// `ibv_wr_rdma_write`.
    fn wr_rdma_write as "ibv_wr_rdma_write" (qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { begin(qp, SendOp::Write { raddr: remote_addr, rkey }) }
    }

    /// `ibv_wr_rdma_write_imm`.
    fn wr_rdma_write_imm as "ibv_wr_rdma_write_imm" (
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        imm_data: u32,
    ) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { begin(qp, SendOp::WriteImm { raddr: remote_addr, rkey, imm: u32::from_be(imm_data) }) }
    }

    /// `ibv_wr_rdma_read`.
    fn wr_rdma_read as "ibv_wr_rdma_read" (qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { begin(qp, SendOp::Read { raddr: remote_addr, rkey }) }
    }

    /// `ibv_wr_atomic_cmp_swp`.
    fn wr_atomic_cmp_swp as "ibv_wr_atomic_cmp_swp" (
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        compare: u64,
        swap: u64,
    ) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { begin(qp, SendOp::CompareSwap { raddr: remote_addr, rkey, compare, swap }) }
    }

    /// `ibv_wr_atomic_fetch_add`.
    fn wr_atomic_fetch_add as "ibv_wr_atomic_fetch_add" (
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        add: u64,
    ) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { begin(qp, SendOp::FetchAdd { raddr: remote_addr, rkey, add }) }
    }

    /// `ibv_wr_bind_mw`.
    fn wr_bind_mw as "ibv_wr_bind_mw" (
        qp: *mut ibv_qp_ex,
        mw: *mut ibv_mw,
        rkey: u32,
        info: *const ibv_mw_bind_info,
    ) -> Void {
        // SAFETY: by the contract of the verb.
        let (object, _) = unsafe { batch(qp) }?;
        let bound = if info.is_null() {
            Err(Refusal::invalid("bind_info is NULL"))
        } else {
            // SAFETY: not NULL, so it points to a structure of the caller; by the contract of the verb.
            unsafe { binding(object, mw, WindowKind::Two, rkey, &*info) }
        };
        match bound {
            // SAFETY: by the contract of the verb.
            Ok(op) => unsafe { begin(qp, op) },
            // SAFETY: as above.
            Err(refusal) => unsafe { fail(qp, refusal) },
        }
    }

    /// `ibv_wr_send_tso`: never granted at creation.
    fn wr_send_tso as "ibv_wr_send_tso" (qp: *mut ibv_qp_ex, _hdr: *mut c_void, _size: u16, _mss: u16) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { fail(qp, Refusal::unsupported("TSO is not available")) }
    }

    /// `ibv_wr_atomic_write`: `data` are eight bytes.
    fn wr_atomic_write as "ibv_wr_atomic_write" (
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        data: *const c_void,
    ) -> Void {
        if data.is_null() {
            // SAFETY: by the contract of the verb.
            return unsafe { fail(qp, Refusal::invalid("atomic_wr is NULL")) };
        }
        // SAFETY: by the contract of the verb; not NULL, so it points to eight bytes of the caller, of any alignment.
        unsafe {
            begin(qp, SendOp::AtomicWrite { raddr: remote_addr, rkey })?;
            let bytes = data.cast::<[u8; 8]>().read_unaligned();
            amend(qp, |_, request| {
                request.data = SendData::Inline(Box::new(bytes));
                request.flags |= SendFlags::INLINE;
                Ok(())
            })
        }
    }

    /// `ibv_wr_flush`.
    fn wr_flush as "ibv_wr_flush" (
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        length: usize,
        kind: u8,
        level: u8,
    ) -> Void {
        match flush(rkey, remote_addr, length, kind, level) {
            // SAFETY: by the contract of the verb.
            Ok(op) => unsafe { begin(qp, op) },
            // SAFETY: as above.
            Err(refusal) => unsafe { fail(qp, refusal) },
        }
    }

    /// `ibv_wr_set_ud_addr`.
    fn wr_set_ud_addr as "ibv_wr_set_ud_addr" (
        qp: *mut ibv_qp_ex,
        ah: *mut ibv_ah,
        remote_qpn: u32,
        remote_qkey: u32,
    ) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe {
            amend(qp, |_, request| {
                let to: UdDest = destination(ah, remote_qpn, remote_qkey)?;
                request.ud = Some(to);
                Ok(())
            })
        }
    }

    /// `ibv_wr_set_xrc_srqn`.
    fn wr_set_xrc_srqn as "ibv_wr_set_xrc_srqn" (qp: *mut ibv_qp_ex, srqn: u32) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe {
            amend(qp, |object, request| {
                if object.qp.qp_type() != QpType::XrcSend {
                    return Err(Refusal::invalid("only requests of XRC_SEND queue pairs name an SRQ of the peer"));
                }
                request.xrc_srqn = Some(srqn & 0xff_ffff);
                Ok(())
            })
        }
    }

    /// `ibv_wr_set_inline_data`.
    fn wr_set_inline_data as "ibv_wr_set_inline_data" (qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { amend(qp, |object, request| set_inline(object, request, &[ibv_data_buf { addr, length }])) }
    }

    /// `ibv_wr_set_inline_data_list`.
    fn wr_set_inline_data_list as "ibv_wr_set_inline_data_list" (
        qp: *mut ibv_qp_ex,
        count: usize,
        list: *const ibv_data_buf,
    ) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { amend(qp, |object, request| set_inline(object, request, slice(list, count)?)) }
    }

    /// `ibv_wr_set_sge`.
    fn wr_set_sge as "ibv_wr_set_sge" (qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { amend(qp, |object, request| set_elements(object, request, &[ibv_sge { addr, length, lkey }])) }
    }

    /// `ibv_wr_set_sge_list`.
    fn wr_set_sge_list as "ibv_wr_set_sge_list" (qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { amend(qp, |object, request| set_elements(object, request, slice(list, count)?)) }
    }
}
