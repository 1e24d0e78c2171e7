//! Flow steering: which Ethernet frames a RAW_PACKET queue pair gets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferroce_core::flow::{FlowAttr, FlowId, FlowRule};
use ferroce_transport::QpType;

use crate::error::{Error, Result};
use crate::qp::Qp;

/// A rule that steers frames of its queue pair's device to it, until it is destroyed or dropped. It concerns the frames that come in by the
/// device's interface and those that this process sends to it; the host goes on getting what comes in for it.
#[derive(Debug)]
pub struct Flow {
    qp: Arc<Qp>,
    id: FlowId,
    gone: AtomicBool,
}

impl Flow {
    pub(crate) fn create(qp: &Arc<Qp>, attr: &FlowAttr) -> Result<Arc<Flow>> {
        qp.context().check()?;
        if qp.qp_type() != QpType::RawPacket {
            return Err(Error::new(libc::EINVAL, "qp: flows are for RAW_PACKET queue pairs"));
        }
        let id = qp.pair().add_flow(FlowRule::new(attr)?)?;
        qp.flows.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Flow { qp: Arc::clone(qp), id, gone: AtomicBool::new(false) }))
    }

    /// The queue pair that it steers to.
    pub fn qp(&self) -> &Arc<Qp> {
        &self.qp
    }

    /// Ends it. When it returns, no more frames come by it.
    ///
    /// # Errors
    /// EINVAL when it is done already.
    pub fn destroy(&self) -> Result<()> {
        if self.qp.context().is_stale() {
            return Ok(());
        }
        if self.gone.swap(true, Ordering::AcqRel) {
            return Err(Error::new(libc::EINVAL, "the flow is destroyed already"));
        }
        self.qp.flows.fetch_sub(1, Ordering::Relaxed);
        Ok(self.qp.pair().remove_flow(self.id)?)
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        // Done already is fine here.
        let _ = self.destroy();
    }
}
