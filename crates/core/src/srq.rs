//! Shared receive queues.

use std::sync::Arc;

use crate::sync::Mutex;
use ferroce_transport::{RecvWr, TagMatch};

use crate::error::CoreError;
use crate::event::{AsyncEvent, AsyncQueue, SrqEvent};
use crate::limits;
use crate::recv_queue::RecvQueue;
use crate::tags::TagList;

/// A receive queue that several queue pairs draw from, with a low-water event.
#[derive(Debug)]
pub struct Srq {
    queue: RecvQueue,
    /// 0 while disarmed.
    limit: Mutex<u32>,
    events: Arc<AsyncQueue>,
    cookie: u64,
    tags: Option<TagList>,
}

impl Srq {
    /// A disarmed queue for `max_wr` outstanding requests of at most `max_sge` elements. Its events go to `events` under `cookie`.
    ///
    /// # Errors
    /// EINVAL: zero requests, or above the device's limits.
    pub fn new(max_wr: u32, max_sge: u32, events: Arc<AsyncQueue>, cookie: u64) -> Result<Srq, CoreError> {
        check_max_wr(max_wr)?;
        if max_sge > limits::MAX_SRQ_SGE {
            return Err(CoreError::new(
                libc::EINVAL,
                format!("SRQ max_sge {max_sge} is above {}", limits::MAX_SRQ_SGE),
            ));
        }
        Ok(Srq { queue: RecvQueue::new(max_wr, max_sge)?, limit: Mutex::new(0), events, cookie, tags: None })
    }

    /// The same queue, for messages that match no tag of this list.
    #[must_use]
    pub fn with_tags(self, tags: TagList) -> Srq {
        Srq { tags: Some(tags), ..self }
    }

    /// Its tag list, if it has one.
    pub fn tags(&self) -> Option<&TagList> {
        self.tags.as_ref()
    }

    /// Queues a request.
    ///
    /// # Errors
    /// EINVAL: more elements than `max_sge`. ENOMEM: `max_wr` requests wait already.
    pub fn post(&self, wr: RecvWr) -> Result<(), CoreError> {
        self.queue.post(wr)
    }

    /// Takes the oldest request. If that leaves fewer than the armed limit, the limit event is raised once.
    pub fn pop(&self) -> Option<RecvWr> {
        let wr = self.queue.pop()?;
        self.check_limit(&mut self.limit.lock());
        Some(wr)
    }

    /// Takes the receive of a message with this tag: the oldest buffer that it matches, else the oldest request; then the message is unexpected.
    /// Without a tag it is in any case.
    pub fn take_tagged(&self, tag: Option<u64>) -> Option<TagMatch> {
        let otherwise = || self.pop().map(TagMatch::Unexpected);
        match &self.tags {
            Some(tags) => tags.take(tag, TagMatch::Tagged, otherwise),
            None => otherwise(),
        }
    }

    /// An unexpected message failed: it does not count.
    pub fn forget_unexpected(&self) {
        if let Some(tags) = &self.tags {
            tags.forget_unexpected();
        }
    }

    /// Arms the limit (`IBV_SRQ_LIMIT`; 0 disarms) and changes the size (`IBV_SRQ_MAX_WR`). All or nothing. If fewer requests than
    /// the limit wait already, the event is raised at once: nobody might ever pop again.
    ///
    /// # Errors
    /// EINVAL: limit above the size, size above the device's limit or below what waits now.
    pub fn modify(&self, limit: Option<u32>, max_wr: Option<u32>) -> Result<(), CoreError> {
        let mut armed = self.limit.lock();
        let size = max_wr.unwrap_or_else(|| self.queue.max_wr());
        if let Some(limit) = limit
            && limit > size
        {
            return Err(CoreError::new(libc::EINVAL, format!("srq_limit {limit} is above max_wr {size}")));
        }
        if let Some(max_wr) = max_wr {
            check_max_wr(max_wr)?;
            self.queue.resize(max_wr)?;
        }
        if let Some(limit) = limit {
            *armed = limit;
            self.check_limit(&mut armed);
        }
        Ok(())
    }

    /// The armed limit, 0 if none is.
    pub fn limit(&self) -> u32 {
        *self.limit.lock()
    }

    /// The requests.
    pub fn queue(&self) -> &RecvQueue {
        &self.queue
    }

    /// Named in its events.
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    fn check_limit(&self, limit: &mut u32) {
        if self.queue.len() < *limit {
            *limit = 0;
            self.events.push(AsyncEvent::Srq { cookie: self.cookie, event: SrqEvent::LimitReached });
        }
    }
}

fn check_max_wr(max_wr: u32) -> Result<(), CoreError> {
    if max_wr == 0 || max_wr > limits::MAX_SRQ_WR {
        return Err(CoreError::new(libc::EINVAL, format!("SRQ max_wr {max_wr} is not in 1..={}", limits::MAX_SRQ_WR)));
    }
    Ok(())
}
