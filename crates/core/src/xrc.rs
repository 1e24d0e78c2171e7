//! XRC domains: which shared receive queues the requests of an XRC target may name.

use std::collections::HashMap;
use std::sync::Arc;

use crate::cq::Cq;
use crate::srq::Srq;
use crate::sync::Mutex;

/// A shared receive queue of an XRC domain. Unlike others it says itself where its receives complete and whose memory they reach.
#[derive(Debug)]
pub struct XrcSrq {
    /// Receive requests.
    pub queue: Arc<Srq>,
    /// Their completions.
    pub cq: Arc<Cq>,
    /// Handle of its protection domain: requests that name the queue reach what belongs to this domain.
    pub pd: u32,
}

/// The shared receive queues of an XRC domain, by the number that requests carry.
#[derive(Debug, Default)]
pub struct XrcDomain {
    queues: Mutex<HashMap<u32, Arc<XrcSrq>>>,
}

impl XrcDomain {
    /// The queue with this number.
    pub fn find(&self, srqn: u32) -> Option<Arc<XrcSrq>> {
        self.queues.lock().get(&srqn).cloned()
    }

    /// Adds a queue under a number that no queue of the process has.
    pub fn add(&self, srqn: u32, queue: XrcSrq) {
        let before = self.queues.lock().insert(srqn, Arc::new(queue));
        assert!(before.is_none(), "SRQ number {srqn:#x} was given out twice");
    }

    /// Takes a queue away. A lane that found it before may still use it: the caller waits for the lanes.
    pub fn remove(&self, srqn: u32) {
        self.queues.lock().remove(&srqn);
    }
}
