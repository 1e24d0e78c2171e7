//! Counters of flows.

use std::sync::Arc;

use ferroce::flow::{CounterKind, FlowCounters};

use crate::abi::{ibv_context, ibv_counter_attach_attr, ibv_counters, ibv_counters_init_attr, ibv_flow};
use crate::context::{ContextObject, ContextRef};
use crate::entry::{Pointer, Refusal, Status, slot};
use crate::handle::{Shared, handle};

/// `struct ibv_counters` and what is behind it.
#[repr(C)]
pub(crate) struct CountersObject {
    _c: Shared<ibv_counters>,
    pub(crate) counters: Arc<FlowCounters>,
    _context: ContextRef,
}

handle!(CountersObject, ibv_counters, "counters");

/// `IBV_READ_COUNTERS_ATTR_PREFER_CACHED`: there is nothing but a cache.
const PREFER_CACHED: u32 = 1 << 0;

slot! {
    /// `ibv_create_counters(3)`.
    fn create_counters as "ibv_create_counters" (
        context: *mut ibv_context,
        init: *mut ibv_counters_init_attr,
    ) -> Pointer<ibv_counters> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        // SAFETY: a pointer that is not NULL points to a structure of the caller.
        if !init.is_null() && unsafe { (*init).comp_mask } != 0 {
            return Err(Refusal::unsupported("ibv_counters_init_attr.comp_mask has unknown bits"));
        }
        let c = ibv_counters { context: context.as_ptr() };
        CountersObject::publish(|_| {
            Ok(CountersObject { _c: Shared::new(c), counters: Arc::new(FlowCounters::new()), _context: context })
        })
    }

    /// `ibv_attach_counters_point_flow(3)`: what the flows that will be made with it count. Flows that are there already are not counted.
    fn attach_counters as "ibv_attach_counters_point_flow" (
        counters: *mut ibv_counters,
        attr: *mut ibv_counter_attach_attr,
        flow: *mut ibv_flow,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { CountersObject::of(counters) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("counter_attach_attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let attr = unsafe { attr.read() };
        if attr.comp_mask != 0 {
            return Err(Refusal::unsupported("ibv_counter_attach_attr.comp_mask has unknown bits"));
        }
        if !flow.is_null() {
            return Err(Refusal::unsupported("flow: counters are for flows that are made with IBV_FLOW_SPEC_ACTION_COUNT"));
        }
        let kind = match attr.counter_desc {
            0 => CounterKind::Packets,
            1 => CounterKind::Bytes,
            other => return Err(Refusal::unsupported(format!("counter_desc {other} is unknown"))),
        };
        Ok(object.counters.attach(kind, attr.index).map_err(ferroce::Error::from)?)
    }

    /// `ibv_read_counters(3)`.
    fn read_counters as "ibv_read_counters" (
        counters: *mut ibv_counters,
        values: *mut u64,
        count: u32,
        flags: u32,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { CountersObject::of(counters) }?;
        if flags & !PREFER_CACHED != 0 || values.is_null() || count == 0 {
            return Err(Refusal::invalid("flags has unknown bits, or there is no room for values"));
        }
        // SAFETY: the caller has room for `count` values there; zeroing first makes them initialised.
        let values = unsafe {
            std::ptr::write_bytes(values, 0, count as usize);
            std::slice::from_raw_parts_mut(values, count as usize)
        };
        Ok(object.counters.read(values).map_err(ferroce::Error::from)?)
    }

    /// `ibv_destroy_counters(3)`: `EBUSY` while a flow is counted.
    fn destroy_counters as "ibv_destroy_counters" (counters: *mut ibv_counters) -> Status {
        // SAFETY: by the contract of the verb.
        let flows = unsafe { CountersObject::of(counters) }?.counters.flows();
        if flows > 0 {
            return Err(Refusal::new(libc::EBUSY, format!("{flows} flows are counted by it: ibv_destroy_flow them first")));
        }
        // SAFETY: no flow has it, and the program has no use for the pointer any more.
        drop(unsafe { CountersObject::reclaim(counters) });
        Ok(())
    }
}
