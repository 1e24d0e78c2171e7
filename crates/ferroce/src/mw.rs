//! Memory windows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferroce_core::WindowKind;

use crate::error::{Error, Result};
use crate::pd::Pd;

/// A memory window: a key of its own to a part of a region, bound by a work request ([`SendOp::BindMw`](crate::SendOp)) and, if of type 2,
/// taken back by one.
#[derive(Debug)]
pub struct Mw {
    pd: Arc<Pd>,
    kind: WindowKind,
    first_rkey: u32,
    gone: AtomicBool,
}

impl Mw {
    pub(crate) fn new(pd: &Arc<Pd>, kind: WindowKind) -> Result<Arc<Mw>> {
        let first_rkey = pd.context().card().keys().alloc_window(pd.handle(), kind)?;
        pd.users.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Mw { pd: Arc::clone(pd), kind, first_rkey, gone: AtomicBool::new(false) }))
    }

    /// The key that it was made with, not good for anything. Keys that it is bound under differ from it in the low 8 bits at most.
    pub fn first_rkey(&self) -> u32 {
        self.first_rkey
    }

    /// Which of the two types.
    pub fn kind(&self) -> WindowKind {
        self.kind
    }

    /// The protection domain it was made in.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Ends it, bound or not. When it returns, no peer reaches memory through it.
    ///
    /// # Errors
    /// EINVAL when it is done already.
    pub fn dealloc(&self) -> Result<()> {
        if self.pd.context().is_stale() {
            return Ok(());
        }
        if self.gone.swap(true, Ordering::AcqRel) {
            return Err(Error::new(libc::EINVAL, "the memory window is deallocated already"));
        }
        self.pd.context().card().dealloc_window(self.first_rkey)?;
        self.pd.users.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // Done already is fine here.
        let _ = self.dealloc();
    }
}
