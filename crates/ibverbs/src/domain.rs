//! Thread domains and parent domains: hints of a program about its threads and memory. This library needs neither its locks nor its
//! allocators, so a parent domain is another name of its protection domain.

use std::sync::Arc;

use crate::abi::{ibv_context, ibv_parent_domain_init_attr, ibv_pd, ibv_td, ibv_td_init_attr};
use crate::context::{ContextObject, ContextRef};
use crate::entry::{Pointer, Refusal, Status, slot};
use crate::handle::{Shared, handle};
use crate::pd::PdObject;

/// `struct ibv_td` and what is behind it.
#[repr(C)]
pub struct TdObject {
    c: Shared<ibv_td>,
    /// One reference here, one in each parent domain that uses it.
    users: Arc<()>,
    _context: ContextRef,
}

handle!(TdObject, ibv_td, "td");

/// `IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS` and `IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT`.
const KNOWN: u32 = 1 << 0 | 1 << 1;

slot! {
    /// `ibv_alloc_td(3)`.
    fn alloc_td as "ibv_alloc_td" (context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> Pointer<ibv_td> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        // SAFETY: a pointer that is not NULL points to a structure of the caller.
        if attr.is_null() || unsafe { (*attr).comp_mask } != 0 {
            return Err(Refusal::invalid("init_attr is NULL or its comp_mask has unknown bits"));
        }
        let c = ibv_td { context: context.as_ptr() };
        TdObject::publish(|_| Ok(TdObject { c: Shared::new(c), users: Arc::new(()), _context: context }))
    }

    /// `ibv_dealloc_td(3)`: `EBUSY` while a parent domain uses it.
    fn dealloc_td as "ibv_dealloc_td" (td: *mut ibv_td) -> Status {
        // SAFETY: by the contract of the verb.
        let users = Arc::strong_count(&unsafe { TdObject::of(td) }?.users) - 1;
        if users > 0 {
            return Err(Refusal::new(libc::EBUSY, format!("{users} parent domains still use the thread domain")));
        }
        // SAFETY: nothing uses it, and the program has no use for the pointer any more.
        drop(unsafe { TdObject::reclaim(td) });
        Ok(())
    }

    /// `ibv_alloc_parent_domain(3)`.
    fn alloc_parent_domain as "ibv_alloc_parent_domain" (
        context: *mut ibv_context,
        attr: *mut ibv_parent_domain_init_attr,
    ) -> Pointer<ibv_pd> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let attr = unsafe { attr.read() };
        if attr.comp_mask & !KNOWN != 0 {
            return Err(Refusal::unsupported(format!("comp_mask {:#x} has unknown bits", attr.comp_mask)));
        }
        // SAFETY: by the contract of the verb.
        let parent = unsafe { PdObject::of(attr.pd) }?;
        let td = if attr.td.is_null() {
            None
        } else {
            // SAFETY: by the contract of the verb.
            Some(unsafe { TdObject::of(attr.td) }?.users.clone())
        };
        PdObject::make_child(context, parent, td)
    }
}
