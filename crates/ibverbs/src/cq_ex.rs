//! Extended completion queues: `ibv_start_poll` and the functions that read the completion it found.

use std::ffi::c_uint;
use std::ptr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ferroce::{Completion, WcFlags};
use parking_lot::lock_api::RawMutex as _;

use crate::abi::{
    consts::cq_init, ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_poll_cq_attr, ibv_wc_tm_info,
};
use crate::cq::{self, CqCreate, CqObject, imm_data};
use crate::entry::{Plain, Pointer, Refusal, Status, Verb, Void, slot};
use crate::pd::PdObject;

/// Both kinds of timestamps.
const TIMESTAMPS: u64 = cq_init::WC_COMPLETION_TIMESTAMP | cq_init::WC_COMPLETION_WALLCLOCK;

/// The structure of any CQ; all functions are there, since inline code calls them unchecked.
pub(crate) fn structure(cq: ibv_cq) -> ibv_cq_ex {
    ibv_cq_ex {
        cq,
        comp_mask: 0,
        status: 0,
        wr_id: 0,
        start_poll: Some(start_poll),
        next_poll: Some(next_poll),
        end_poll: Some(end_poll),
        read_opcode: Some(read_opcode),
        read_vendor_err: Some(read_vendor_err),
        read_byte_len: Some(read_byte_len),
        read_imm_data: Some(read_imm_data),
        read_qp_num: Some(read_qp_num),
        read_src_qp: Some(read_src_qp),
        read_wc_flags: Some(read_wc_flags),
        read_slid: Some(read_slid),
        read_sl: Some(read_sl),
        read_dlid_path_bits: Some(read_dlid_path_bits),
        read_completion_ts: Some(read_completion_ts),
        read_cvlan: Some(read_cvlan),
        read_flow_tag: Some(read_flow_tag),
        read_tm_info: Some(read_tm_info),
        read_completion_wallclock_ns: Some(read_completion_wallclock_ns),
    }
}

/// The completion that `start_poll` or `next_poll` found.
///
/// # Safety
///
/// NULL or live, and the caller is the one that polls.
unsafe fn current(cq: *mut ibv_cq_ex) -> Verb<Completion> {
    // SAFETY: by the contract above; the extended structure starts with the plain one.
    let object = unsafe { CqObject::of(cq.cast()) }?;
    // SAFETY: written by the thread that polls, which is the one that reads (lock `polling`).
    Ok(unsafe { object.current.as_ptr().read() })
}

/// When the current completion was added.
///
/// # Safety
///
/// As for [`current`].
unsafe fn timestamp(cq: *mut ibv_cq_ex) -> Verb<u64> {
    // SAFETY: by the contract above.
    match unsafe { current(cq) }?.timestamp {
        0 => Err(Refusal::invalid("the completion queue was not created with completion timestamps in wc_flags")),
        timestamp => Ok(timestamp),
    }
}

/// Takes one completion and shows it. `ENOENT` if there is none.
///
/// # Safety
///
/// `cq` is the structure of `object`, and the caller holds `polling`.
unsafe fn advance(object: &CqObject, cq: *mut ibv_cq_ex) -> Verb<()> {
    let mut one = [Completion::UNUSED];
    if object.cq.poll(&mut one)? == 0 {
        return Err(Refusal::routine(libc::ENOENT, "the completion queue is empty"));
    }
    let [completion] = one;
    // SAFETY: the holder of `polling` may write both; the program reads the plain fields between its calls.
    unsafe {
        (*cq).status = completion.status as u32;
        (*cq).wr_id = completion.wr_id;
        object.current.as_ptr().write(completion);
    }
    Ok(())
}

slot! {
    /// `ibv_create_cq_ex(3)`.
    fn create_cq_ex as "ibv_create_cq_ex" (
        context: *mut ibv_context,
        attr: *mut ibv_cq_init_attr_ex,
    ) -> Pointer<ibv_cq_ex> {
        if attr.is_null() {
            return Err(Refusal::invalid("cq_attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller, which may be shorter than ours: the last field is read only if
        // the mask names it.
        let mask = unsafe { (*attr).comp_mask };
        if mask & !(cq_init::MASK_FLAGS | cq_init::MASK_PD) != 0 {
            return Err(Refusal::unsupported(format!("comp_mask {mask:#x} has unknown bits")));
        }
        if mask & cq_init::MASK_PD != 0 {
            // SAFETY: the mask says that the field is there; it is NULL or a live domain.
            let domain = unsafe { PdObject::of((*attr).parent_domain) }?;
            if !domain.is_parent_domain() {
                return Err(Refusal::invalid("parent_domain is not from ibv_alloc_parent_domain"));
            }
        }
        // SAFETY: as above; these fields are as old as the structure.
        let (wc_flags, flags, request) = unsafe {
            let (cqe, cq_context, channel, comp_vector) =
                ((*attr).cqe, (*attr).cq_context, (*attr).channel, (*attr).comp_vector);
            let timestamps = (*attr).wc_flags & TIMESTAMPS != 0;
            ((*attr).wc_flags, (*attr).flags, CqCreate { cqe, cq_context, channel, comp_vector, timestamps })
        };
        let unknown = wc_flags & !(cq_init::WC_STANDARD | cq_init::WC_FLOW_TAG | cq_init::WC_TM_INFO | TIMESTAMPS);
        if unknown != 0 {
            return Err(Refusal::unsupported(format!(
                "wc_flags {unknown:#x}: VLAN tags are not available"
            )));
        }
        if mask & cq_init::MASK_FLAGS != 0 && flags & !cq_init::SINGLE_THREADED != 0 {
            return Err(Refusal::unsupported("flags: only IBV_CREATE_CQ_ATTR_SINGLE_THREADED is known"));
        }
        // SAFETY: by the contract of the verb.
        Ok(unsafe { cq::create(context, &request) }?.cast())
    }

    /// `ibv_start_poll`: on success the CQ is locked until `ibv_end_poll`.
    fn start_poll as "ibv_start_poll" (cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> Status {
        // SAFETY: by the contract of the verb; the extended structure starts with the plain one.
        let object = unsafe { CqObject::of(cq.cast()) }?;
        // SAFETY: a pointer that is not NULL points to a structure of the caller.
        if !attr.is_null() && unsafe { (*attr).comp_mask } != 0 {
            return Err(Refusal::invalid("ibv_poll_cq_attr.comp_mask has unknown bits"));
        }
        object.polling.lock();
        // SAFETY: `polling` is held.
        let found = unsafe { advance(object, cq) };
        if found.is_err() {
            // SAFETY: locked above.
            unsafe { object.polling.unlock() };
        }
        found
    }

    /// `ibv_next_poll`.
    fn next_poll as "ibv_next_poll" (cq: *mut ibv_cq_ex) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { CqObject::of(cq.cast()) }?;
        if !object.polling.is_locked() {
            return Err(Refusal::invalid("ibv_next_poll without ibv_start_poll"));
        }
        // SAFETY: `polling` is held by the caller since its ibv_start_poll.
        unsafe { advance(object, cq) }
    }

    /// `ibv_end_poll`.
    fn end_poll as "ibv_end_poll" (cq: *mut ibv_cq_ex) -> Void {
        // SAFETY: by the contract of the verb.
        let object = unsafe { CqObject::of(cq.cast()) }?;
        if !object.polling.is_locked() {
            return Err(Refusal::invalid("ibv_end_poll without ibv_start_poll"));
        }
        // SAFETY: locked by the caller's ibv_start_poll.
        unsafe { object.polling.unlock() };
        Ok(())
    }

    /// `ibv_wc_read_opcode`.
    fn read_opcode as "ibv_wc_read_opcode" (cq: *mut ibv_cq_ex) -> Plain<u32> {
        // SAFETY: by the contract of the verb; so in the functions below.
        Ok(unsafe { current(cq) }?.opcode as u32)
    }

    /// `ibv_wc_read_vendor_err`.
    fn read_vendor_err as "ibv_wc_read_vendor_err" (cq: *mut ibv_cq_ex) -> Plain<u32> {
        // SAFETY: by the contract of the verb.
        Ok(unsafe { current(cq) }?.vendor_err)
    }

    /// `ibv_wc_read_byte_len`.
    fn read_byte_len as "ibv_wc_read_byte_len" (cq: *mut ibv_cq_ex) -> Plain<u32> {
        // SAFETY: by the contract of the verb.
        Ok(unsafe { current(cq) }?.byte_len)
    }

    /// `ibv_wc_read_imm_data`, which also serves `ibv_wc_read_invalidated_rkey`.
    fn read_imm_data as "ibv_wc_read_imm_data" (cq: *mut ibv_cq_ex) -> Plain<u32> {
        // SAFETY: by the contract of the verb.
        Ok(imm_data(&unsafe { current(cq) }?))
    }

    /// `ibv_wc_read_qp_num`.
    fn read_qp_num as "ibv_wc_read_qp_num" (cq: *mut ibv_cq_ex) -> Plain<u32> {
        // SAFETY: by the contract of the verb.
        Ok(unsafe { current(cq) }?.qp_num)
    }

    /// `ibv_wc_read_src_qp`.
    fn read_src_qp as "ibv_wc_read_src_qp" (cq: *mut ibv_cq_ex) -> Plain<u32> {
        // SAFETY: by the contract of the verb.
        Ok(unsafe { current(cq) }?.src_qp)
    }

    /// `ibv_wc_read_wc_flags`.
    fn read_wc_flags as "ibv_wc_read_wc_flags" (cq: *mut ibv_cq_ex) -> Plain<c_uint> {
        // SAFETY: by the contract of the verb.
        Ok(unsafe { current(cq) }?.flags.bits())
    }

    /// `ibv_wc_read_slid`: Ethernet has none.
    fn read_slid as "ibv_wc_read_slid" (_cq: *mut ibv_cq_ex) -> Plain<u32> {
        Ok(0)
    }

    /// `ibv_wc_read_sl`.
    fn read_sl as "ibv_wc_read_sl" (cq: *mut ibv_cq_ex) -> Plain<u8> {
        // SAFETY: by the contract of the verb.
        Ok(unsafe { current(cq) }?.sl)
    }

    /// `ibv_wc_read_dlid_path_bits`: Ethernet has none.
    fn read_dlid_path_bits as "ibv_wc_read_dlid_path_bits" (_cq: *mut ibv_cq_ex) -> Plain<u8> {
        Ok(0)
    }

    /// `ibv_wc_read_completion_ts`, in nanoseconds of the clock that `ibv_query_rt_values_ex` tells.
    fn read_completion_ts as "ibv_wc_read_completion_ts" (cq: *mut ibv_cq_ex) -> Plain<u64> {
        // SAFETY: by the contract of the verb.
        unsafe { timestamp(cq) }
    }

    /// `ibv_wc_read_cvlan`: not granted at creation, so nobody may ask.
    fn read_cvlan as "ibv_wc_read_cvlan" (_cq: *mut ibv_cq_ex) -> Plain<u16> {
        Err(Refusal::unsupported("VLAN tags stay in the frames: there is no stripping"))
    }

    /// `ibv_wc_read_flow_tag`: of the flow that brought the frame; 0 if it has none, or it was no frame.
    fn read_flow_tag as "ibv_wc_read_flow_tag" (cq: *mut ibv_cq_ex) -> Plain<u32> {
        // SAFETY: by the contract of the verb.
        let completion = unsafe { current(cq) }?;
        let is_something_else = completion.flags.intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV);
        Ok(if is_something_else { 0 } else { completion.imm })
    }

    /// `ibv_wc_read_tm_info`: of a message whose tag matched; else zero.
    fn read_tm_info as "ibv_wc_read_tm_info" (cq: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) -> Void {
        // SAFETY: by the contract of the verb.
        let completion = unsafe { current(cq) }?;
        if info.is_null() {
            return Err(Refusal::invalid("tm_info is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        unsafe { ptr::write(info, ibv_wc_tm_info { tag: completion.tm_tag, priv_: completion.tm_app_ctx }) };
        Ok(())
    }

    /// `ibv_wc_read_completion_wallclock_ns`: nanoseconds since 1970, as the system's clock counts them now.
    fn read_completion_wallclock_ns as "ibv_wc_read_completion_wallclock_ns" (cq: *mut ibv_cq_ex) -> Plain<u64> {
        // SAFETY: by the contract of the verb.
        let timestamp = unsafe { timestamp(cq) }?;
        // SAFETY: as above.
        let context = &unsafe { CqObject::of(cq.cast()) }?.context;
        let ago = Duration::from_nanos(context.context().clock().saturating_sub(timestamp));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(now.saturating_sub(ago).as_nanos() as u64)
    }
}
