//! Receive work queues and tables of them (RSS).

use std::sync::Arc;

use ferroce::{RwqTable, Wq, WqCreate, WqState, limits};

use crate::abi::consts::wq_attr;
use crate::abi::{
    ibv_context, ibv_recv_wr, ibv_rwq_ind_table, ibv_rwq_ind_table_init_attr, ibv_wq, ibv_wq_attr, ibv_wq_init_attr,
};
use crate::context::{ContextObject, ContextRef};
use crate::cq::CqObject;
use crate::entry::{Pointer, Refusal, Status, Verb, slot};
use crate::events::acknowledged;
use crate::handle::{Shared, handle, handle_number};
use crate::pd::PdObject;
use crate::post::post_list;

/// `IBV_WQT_RQ`, the one type of work queues.
const RECEIVE: u32 = 0;

/// `struct ibv_wq` and what is behind it.
#[repr(C)]
pub(crate) struct WqObject {
    c: Shared<ibv_wq>,
    wq: Arc<Wq>,
    context: ContextRef,
}

handle!(WqObject, ibv_wq, "wq");

/// `struct ibv_rwq_ind_table` and what is behind it.
#[repr(C)]
pub(crate) struct TableObject {
    c: Shared<ibv_rwq_ind_table>,
    pub(crate) table: Arc<RwqTable>,
    _context: ContextRef,
}

handle!(TableObject, ibv_rwq_ind_table, "rwq_ind_tbl");

/// `enum ibv_wq_state`.
fn state(number: u32, field: &str) -> Verb<WqState> {
    [WqState::Reset, WqState::Ready, WqState::Err]
        .into_iter()
        .find(|state| *state as u32 == number)
        .ok_or_else(|| Refusal::invalid(format!("{field} {number} is no state of a WQ")))
}

slot! {
    /// `ibv_create_wq(3)`: the sizes granted are told in the request. (The inline function prepares the mutex.)
    fn create_wq as "ibv_create_wq" (context: *mut ibv_context, attr: *mut ibv_wq_init_attr) -> Pointer<ibv_wq> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("wq_init_attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller, used by nobody else during the call.
        let attr = unsafe { &mut *attr };
        if attr.comp_mask & !wq_attr::INIT_FLAGS != 0 {
            return Err(Refusal::invalid(format!("comp_mask {:#x} has unknown bits", attr.comp_mask)));
        }
        if attr.comp_mask & wq_attr::INIT_FLAGS != 0 && attr.create_flags != 0 {
            return Err(Refusal::unsupported(format!("create_flags {:#x} are not available", attr.create_flags)));
        }
        if attr.wq_type != RECEIVE {
            return Err(Refusal::invalid(format!("wq_type {}: there is IBV_WQT_RQ only", attr.wq_type)));
        }
        // SAFETY: by the contract of the verb; so below.
        let domain = unsafe { PdObject::of(attr.pd) }?;
        // SAFETY: as above.
        let cq = unsafe { CqObject::of(attr.cq) }?.cq.clone();
        WqObject::publish(|address| {
            let (max_wr, max_sge, cookie) = (attr.max_wr, attr.max_sge, address as u64);
            let wq = domain.pd().create_wq(&WqCreate { cq, max_wr, max_sge, cookie })?;
            (attr.max_wr, attr.max_sge) = wq.sizes();
            let c = ibv_wq {
                context: context.as_ptr(),
                wq_context: attr.wq_context,
                pd: attr.pd,
                cq: attr.cq,
                wq_num: wq.number(),
                handle: handle_number(),
                state: wq.state() as u32,
                wq_type: RECEIVE,
                post_recv: Some(post_recv),
                mutex: libc::PTHREAD_MUTEX_INITIALIZER,
                cond: libc::PTHREAD_COND_INITIALIZER,
                events_completed: 0,
                comp_mask: 0,
            };
            Ok(WqObject { c: Shared::new(c), wq, context })
        })
    }

    /// `ibv_modify_wq(3)`.
    fn modify_wq as "ibv_modify_wq" (wq: *mut ibv_wq, attr: *mut ibv_wq_attr) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { WqObject::of(wq) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("wq_attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let attr = unsafe { attr.read() };
        let other = attr.attr_mask & !(wq_attr::STATE | wq_attr::CURR_STATE);
        if other & wq_attr::FLAGS != 0 {
            return Err(Refusal::unsupported("attr_mask: IBV_WQ_ATTR_FLAGS: there are no flags"));
        }
        if other != 0 {
            return Err(Refusal::invalid(format!("attr_mask {:#x} has unknown bits", attr.attr_mask)));
        }
        if attr.attr_mask & wq_attr::CURR_STATE != 0 && state(attr.curr_wq_state, "curr_wq_state")? != object.wq.state() {
            return Err(Refusal::invalid(format!("curr_wq_state: the WQ is in {:?}", object.wq.state())));
        }
        if attr.attr_mask & wq_attr::STATE != 0 {
            object.wq.modify(state(attr.wq_state, "wq_state")?)?;
            // SAFETY: the field is written here only; programs read it after calls that changed it.
            unsafe { (*object.c.as_ptr()).state = object.wq.state() as u32 };
        }
        Ok(())
    }

    /// `ibv_post_wq_recv(3)`, which programs call through the structure.
    fn post_recv as "ibv_post_wq_recv" (wq: *mut ibv_wq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> Status {
        // SAFETY: by the contract of the verb; so below.
        let object = unsafe { WqObject::of(wq) }?;
        // SAFETY: as above.
        unsafe { post_list(wr, bad, |request| object.wq.post_recv(request)) }
    }

    /// `ibv_destroy_wq(3)`: `EBUSY` while a table has it. Waits until its events were acknowledged.
    fn destroy_wq as "ibv_destroy_wq" (wq: *mut ibv_wq) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { WqObject::of(wq) }?;
        let delivered = object.wq.destroy()?;
        // In a forked child the counts belong to the parent, and so do the locks.
        if !object.context.is_stale() {
            // SAFETY: the counter lies in the live WQ.
            unsafe { acknowledged!(wq, events_completed).wait(delivered) };
        }
        // SAFETY: the WQ is gone and no event of it is out; the program has no use for the pointer any more.
        drop(unsafe { WqObject::reclaim(wq) });
        Ok(())
    }

    /// `ibv_create_rwq_ind_table(3)`.
    fn create_rwq_ind_table as "ibv_create_rwq_ind_table" (
        context: *mut ibv_context,
        attr: *mut ibv_rwq_ind_table_init_attr,
    ) -> Pointer<ibv_rwq_ind_table> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("init_attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let (log, entries, mask) = unsafe { ((*attr).log_ind_tbl_size, (*attr).ind_tbl, (*attr).comp_mask) };
        if mask != 0 {
            return Err(Refusal::invalid(format!("comp_mask {mask:#x} has unknown bits")));
        }
        let count = 1u32.checked_shl(log).filter(|count| *count <= limits::MAX_RWQ_TABLE).ok_or_else(|| {
            Refusal::invalid(format!("log_ind_tbl_size {log}: a table has at most {} entries", limits::MAX_RWQ_TABLE))
        })?;
        if entries.is_null() {
            return Err(Refusal::invalid("ind_tbl is NULL"));
        }
        let wqs = (0..count as usize).map(|index| {
            // SAFETY: by the contract of the verb the caller has `count` pointers to live WQs there.
            Ok(unsafe { WqObject::of(entries.add(index).read()) }?.wq.clone())
        });
        let table = RwqTable::new(wqs.collect::<Verb<_>>()?)?;
        let number = handle_number() as i32;
        let c = ibv_rwq_ind_table {
            context: context.as_ptr(),
            ind_tbl_handle: number,
            ind_tbl_num: number,
            comp_mask: 0,
        };
        TableObject::publish(|_| Ok(TableObject { c: Shared::new(c), table, _context: context }))
    }

    /// `ibv_destroy_rwq_ind_table(3)`: `EBUSY` while a queue pair uses it.
    fn destroy_rwq_ind_table as "ibv_destroy_rwq_ind_table" (table: *mut ibv_rwq_ind_table) -> Status {
        // SAFETY: by the contract of the verb.
        unsafe { TableObject::of(table) }?.table.check_unused()?;
        // SAFETY: nothing uses the table, so the program has no use for the pointer any more.
        drop(unsafe { TableObject::reclaim(table) });
        Ok(())
    }
}
