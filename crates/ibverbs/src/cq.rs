//! Completion queues.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use ferroce::{Completion, WcFlags};
use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;

use crate::abi::{consts, ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_modify_cq_attr, ibv_wc};
use crate::channel::ChannelObject;
use crate::context::{ContextObject, ContextRef};
use crate::cq_ex;
use crate::entry::{Convention, Pointer, Refusal, Status, Verb, slot, verb};
use crate::events::acknowledged;
use crate::handle::{Shared, handle, handle_number};

/// `struct ibv_cq_ex`, which starts with `struct ibv_cq`, and what is behind it. Plain CQs are made the same.
#[repr(C)]
pub struct CqObject {
    c: Shared<ibv_cq_ex>,
    pub(crate) cq: Arc<ferroce::Cq>,
    channel: Option<&'static ChannelObject>,
    /// Held between `start_poll` and `end_poll`.
    pub(crate) polling: RawMutex,
    /// The completion that `read_*` functions look at.
    pub(crate) current: Shared<Completion>,
    pub(crate) context: ContextRef,
}

handle!(CqObject, ibv_cq, "cq");

/// What both ways to make a CQ need.
pub(crate) struct CqCreate {
    pub cqe: u32,
    pub cq_context: *mut c_void,
    pub channel: *mut ibv_comp_channel,
    pub comp_vector: u32,
    pub timestamps: bool,
}

/// Makes a CQ.
///
/// # Safety
///
/// The pointers are NULL or live.
pub(crate) unsafe fn create(context: *mut ibv_context, create: &CqCreate) -> Verb<*mut ibv_cq> {
    // SAFETY: by the contract above.
    let context = unsafe { ContextObject::of(context) }?;
    if create.cqe == 0 {
        return Err(Refusal::invalid("cqe is 0; a completion queue needs at least one entry"));
    }
    if create.comp_vector >= context.vectors() {
        return Err(Refusal::invalid(format!(
            "comp_vector {} is not below num_comp_vectors ({})",
            create.comp_vector,
            context.vectors()
        )));
    }
    let channel: Option<&'static ChannelObject> = if create.channel.is_null() {
        None
    } else {
        // SAFETY: by the contract above; its `refcnt` keeps it alive as long as the CQ.
        Some(unsafe { ChannelObject::of(create.channel) }?)
    };
    CqObject::publish(|address| {
        let (owner, events) = (context.context(), channel.map(|channel| &channel.channel));
        let cq = if create.timestamps {
            owner.create_cq_with_timestamps(create.cqe, events, address as u64)?
        } else {
            owner.create_cq(create.cqe, events, address as u64)?
        };
        if let Some(channel) = channel {
            channel.count(1);
        }
        let c = ibv_cq {
            context: context.as_ptr(),
            channel: create.channel,
            cq_context: create.cq_context,
            handle: handle_number(),
            cqe: cq.capacity() as c_int,
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            cond: libc::PTHREAD_COND_INITIALIZER,
            comp_events_completed: 0,
            async_events_completed: 0,
        };
        Ok(CqObject {
            c: Shared::new(cq_ex::structure(c)),
            cq,
            channel,
            polling: RawMutex::INIT,
            current: Shared::new(Completion::UNUSED),
            context,
        })
    })
}

/// A completion as C sees it.
pub(crate) fn wc(completion: &Completion) -> ibv_wc {
    ibv_wc {
        wr_id: completion.wr_id,
        status: completion.status as u32,
        opcode: completion.opcode as u32,
        vendor_err: completion.vendor_err,
        byte_len: completion.byte_len,
        imm_data: imm_data(completion),
        qp_num: completion.qp_num,
        src_qp: completion.src_qp,
        wc_flags: completion.flags.bits(),
        pkey_index: 0,
        slid: 0,
        sl: completion.sl,
        dlid_path_bits: 0,
    }
}

/// The immediate in network order, or the invalidated rkey in host order: the two share a field.
pub(crate) fn imm_data(completion: &Completion) -> u32 {
    if completion.flags.contains(WcFlags::WITH_INV) { completion.imm } else { completion.imm.to_be() }
}

/// Completions moved in one go by `poll_cq`.
const BATCH: usize = 16;

/// `ibv_poll_cq` returns a count, or a negative number.
pub(crate) struct Polled;

impl Convention for Polled {
    type Good = c_int;
    type Return = c_int;
    fn good(count: c_int) -> c_int {
        count
    }
    fn bad(errno: c_int) -> c_int {
        -errno
    }
}

slot! {
    /// `ibv_poll_cq(3)`.
    fn poll_cq as "ibv_poll_cq" (cq: *mut ibv_cq, num_entries: c_int, entries: *mut ibv_wc) -> Polled {
        // SAFETY: by the contract of the verb.
        let object = unsafe { CqObject::of(cq) }?;
        let wanted = usize::try_from(num_entries).map_err(|_| Refusal::invalid("num_entries is negative"))?;
        if entries.is_null() && wanted > 0 {
            return Err(Refusal::invalid("wc is NULL"));
        }
        let mut done = 0;
        // Most programs poll for one: do not clear room for more.
        if wanted == 1 {
            let mut one = [Completion::UNUSED];
            done = object.cq.poll(&mut one)?;
            if done == 1 {
                // SAFETY: the caller has room for one entry.
                unsafe { entries.write(wc(&one[0])) };
            }
            return Ok(done as c_int);
        }
        while done < wanted {
            let mut batch = [Completion::UNUSED; BATCH];
            let room = (wanted - done).min(BATCH);
            let got = match object.cq.poll(&mut batch[..room]) {
                Ok(got) => got,
                // What was taken already must reach the program; the error will be there the next time.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error.into()),
            };
            for (at, completion) in batch[..got].iter().enumerate() {
                // SAFETY: the caller has room for `num_entries` entries, and `done + at` is below that.
                unsafe { entries.add(done + at).write(wc(completion)) };
            }
            done += got;
            if got < room {
                break;
            }
        }
        Ok(done as c_int)
    }

    /// `ibv_req_notify_cq(3)`.
    fn req_notify_cq as "ibv_req_notify_cq" (cq: *mut ibv_cq, solicited_only: c_int) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { CqObject::of(cq) }?;
        object.cq.req_notify(solicited_only != 0)?;
        Ok(())
    }

    /// `ibv_modify_cq(3)`: moderation.
    fn modify_cq as "ibv_modify_cq" (cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { CqObject::of(cq) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let attr = unsafe { attr.read() };
        if attr.attr_mask != consts::cq_init::ATTR_MODERATE {
            return Err(Refusal::invalid(format!("attr_mask {:#x} is not IBV_CQ_ATTR_MODERATE", attr.attr_mask)));
        }
        object.cq.set_moderation(attr.moderate.cq_count, attr.moderate.cq_period)?;
        Ok(())
    }
}

verb! {
    /// `ibv_create_cq(3)`.
    fn ibv_create_cq(
        context: *mut ibv_context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: c_int,
    ) -> Pointer<ibv_cq> {
        let request = CqCreate {
            cqe: u32::try_from(cqe).map_err(|_| Refusal::invalid("cqe is negative"))?,
            cq_context,
            channel,
            comp_vector: u32::try_from(comp_vector).map_err(|_| Refusal::invalid("comp_vector is negative"))?,
            timestamps: false,
        };
        // SAFETY: by the contract of the verb.
        unsafe { create(context, &request) }
    }

    /// `ibv_resize_cq(3)`.
    fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { CqObject::of(cq) }?;
        let wanted = u32::try_from(cqe).ok().filter(|&wanted| wanted > 0);
        object.cq.resize(wanted.ok_or_else(|| Refusal::invalid(format!("cqe is {cqe}; at least 1 is needed")))?)?;
        // SAFETY: the field is written by this function only, and resizing is the program's to serialise.
        unsafe { (*cq).cqe = object.cq.capacity() as c_int };
        Ok(())
    }

    /// `ibv_destroy_cq(3)`: `EBUSY` while a queue pair uses it; blocks until every event told was acknowledged.
    fn ibv_destroy_cq(cq: *mut ibv_cq) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { CqObject::of(cq) }?;
        let delivered = object.cq.destroy()?;
        // In a forked child the counts belong to the parent, and so do the locks.
        if !object.context.is_stale() {
            // SAFETY: both counters lie in the live CQ.
            unsafe {
                acknowledged!(cq, comp_events_completed).wait(delivered.completion);
                acknowledged!(cq, async_events_completed).wait(delivered.asynchronous);
            }
        }
        if let Some(channel) = object.channel {
            channel.count(-1);
        }
        // SAFETY: the CQ is gone and no event of it is out; the program has no use for the pointer any more.
        drop(unsafe { CqObject::reclaim(cq) });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediates_are_big_endian_and_rkeys_are_not() {
        let mut completion = Completion::UNUSED;
        completion.imm = 0x0102_0304;
        completion.flags = WcFlags::WITH_IMM;
        assert_eq!(wc(&completion).imm_data.to_ne_bytes(), [1, 2, 3, 4]);
        completion.flags = WcFlags::WITH_INV;
        assert_eq!(wc(&completion).imm_data, 0x0102_0304);
    }
}
