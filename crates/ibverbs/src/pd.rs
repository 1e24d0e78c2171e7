//! Protection domains.

use std::sync::Arc;

use crate::abi::{ibv_context, ibv_pd};
use crate::context::{ContextObject, ContextRef};
use crate::entry::{Pointer, Status, verb};
use crate::handle::{Shared, handle};

/// `struct ibv_pd` and what is behind it.
#[repr(C)]
pub struct PdObject {
    c: Shared<ibv_pd>,
    pub(crate) pd: Arc<ferroce::Pd>,
    pub(crate) context: ContextRef,
}

handle!(PdObject, ibv_pd, "pd");

verb! {
    /// `ibv_alloc_pd(3)`.
    fn ibv_alloc_pd(context: *mut ibv_context) -> Pointer<ibv_pd> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        let pd = context.context().alloc_pd()?;
        let c = ibv_pd { context: context.as_ptr(), handle: pd.handle() };
        PdObject::publish(|_| Ok(PdObject { c: Shared::new(c), pd, context }))
    }

    /// `ibv_dealloc_pd(3)`: `EBUSY` while something uses it.
    fn ibv_dealloc_pd(pd: *mut ibv_pd) -> Status {
        // SAFETY: by the contract of the verb.
        unsafe { PdObject::of(pd) }?.pd.dealloc()?;
        // SAFETY: the domain is gone, so the program has no use for the pointer any more.
        drop(unsafe { PdObject::reclaim(pd) });
        Ok(())
    }
}
