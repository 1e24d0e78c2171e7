//! Protection domains.

use std::sync::Arc;

use crate::abi::{ibv_context, ibv_pd};
use crate::context::{ContextObject, ContextRef};
use crate::entry::{Pointer, Refusal, Status, Verb, Void, verb};
use crate::handle::{Shared, handle};
use crate::registry::Registry;

/// Domains that can be imported.
pub(crate) static DOMAINS: Registry<Domain> = Registry::new();

/// A protection domain, however many C objects stand for it: the one it was made with, parent domains, imported ones.
pub(crate) struct Domain {
    pub(crate) pd: Arc<ferroce::Pd>,
}

/// `struct ibv_pd` and what is behind it.
#[repr(C)]
pub struct PdObject {
    c: Shared<ibv_pd>,
    pub(crate) domain: Arc<Domain>,
    pub(crate) context: ContextRef,
    /// How this C object came about.
    origin: Origin,
}

enum Origin {
    /// `ibv_alloc_pd`, with the number of its parent domains.
    Allocated { children: Arc<()> },
    /// `ibv_alloc_parent_domain`: counts in its parent and in its thread domain.
    Parent { _of: Option<Arc<()>>, _td: Option<Arc<()>> },
    /// `ibv_import_pd`.
    Imported,
}

handle!(PdObject, ibv_pd, "pd");

impl PdObject {
    fn make(context: ContextRef, domain: Arc<Domain>, origin: Origin) -> Verb<*mut ibv_pd> {
        let c = ibv_pd { context: context.as_ptr(), handle: domain.pd.handle() };
        PdObject::publish(|_| Ok(PdObject { c: Shared::new(c), domain, context, origin }))
    }

    /// A parent domain of a protection domain.
    pub(crate) fn make_child(context: ContextRef, of: &PdObject, td: Option<Arc<()>>) -> Verb<*mut ibv_pd> {
        let children = match &of.origin {
            Origin::Allocated { children } => Some(children.clone()),
            Origin::Imported => None,
            Origin::Parent { .. } => return Err(Refusal::invalid("pd is a parent domain itself")),
        };
        PdObject::make(context, of.domain.clone(), Origin::Parent { _of: children, _td: td })
    }

    /// Is it a parent domain?
    pub(crate) fn is_parent_domain(&self) -> bool {
        matches!(self.origin, Origin::Parent { .. })
    }

    /// The Ferroce object.
    pub(crate) fn pd(&self) -> &Arc<ferroce::Pd> {
        &self.domain.pd
    }
}

verb! {
    /// `ibv_alloc_pd(3)`.
    fn ibv_alloc_pd(context: *mut ibv_context) -> Pointer<ibv_pd> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        let domain = Arc::new(Domain { pd: context.context().alloc_pd()? });
        DOMAINS.add(domain.pd.handle(), &domain);
        PdObject::make(context, domain, Origin::Allocated { children: Arc::new(()) })
    }

    /// `ibv_dealloc_pd(3)`, also for parent domains: `EBUSY` while something uses it.
    fn ibv_dealloc_pd(pd: *mut ibv_pd) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { PdObject::of(pd) }?;
        match &object.origin {
            Origin::Allocated { children } if Arc::strong_count(children) > 1 => {
                return Err(Refusal::new(libc::EBUSY, "parent domains still use the protection domain"));
            }
            Origin::Allocated { .. } | Origin::Imported => object.pd().dealloc()?,
            Origin::Parent { .. } => {}
        }
        // SAFETY: the domain is gone, so the program has no use for the pointer any more.
        drop(unsafe { PdObject::reclaim(pd) });
        Ok(())
    }

    /// `ibv_import_pd(3)`: from another context of this process.
    fn ibv_import_pd(context: *mut ibv_context, handle: u32) -> Pointer<ibv_pd> {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        let domain = DOMAINS
            .get(handle)
            .ok_or_else(|| Refusal::new(libc::ENOENT, format!("no protection domain of this process has the handle {handle}")))?;
        PdObject::make(context, domain, Origin::Imported)
    }

    /// `ibv_unimport_pd(3)`: the domain stays with who made it.
    fn ibv_unimport_pd(pd: *mut ibv_pd) -> Void {
        // SAFETY: by the contract of the verb.
        unsafe { PdObject::of(pd) }?;
        // SAFETY: the program gives the pointer back.
        drop(unsafe { PdObject::reclaim(pd) });
        Ok(())
    }
}
