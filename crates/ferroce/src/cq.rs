//! Completion queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ferroce_core::cq::Moderation;
use ferroce_core::{CompChannel, EventSource};
use ferroce_transport::Completion;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::objects;

/// Events that a completion queue handed out over its life; its destruction waits until the program acknowledged as many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventsDelivered {
    /// By the completion channel.
    pub completion: u64,
    /// Asynchronous ones.
    pub asynchronous: u64,
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    context: Arc<Context>,
    queue: Arc<ferroce_core::Cq>,
    /// Empty polls in a row: a program that spins lets others have the core now and then.
    empty_polls: AtomicU32,
    /// Queue pairs that complete here.
    pub(crate) users: AtomicU32,
    destroyed: AtomicBool,
    /// Lists it among the process's objects.
    _entry: objects::Entry,
}

/// Empty polls in a row after which a poll also offers the core to others. Where there is one to spare, that costs a fraction of a
/// microsecond; where there is not, the peer that we wait for gets to run.
const POLLS_BEFORE_GIVING_WAY: u32 = 64;

impl Cq {
    pub(crate) fn new(
        context: Arc<Context>,
        cqe: u32,
        channel: Option<Arc<CompChannel>>,
        cookie: u64,
        timestamps: bool,
    ) -> Result<Arc<Cq>> {
        let events = Arc::clone(context.events());
        let queue = ferroce_core::Cq::new(cqe, channel, events, cookie)?;
        let queue = Arc::new(if timestamps { queue.with_timestamps() } else { queue });
        Ok(Arc::new(Cq {
            _entry: context.objects().add_cq(context.device().ifindex(), &queue),
            context,
            queue,
            empty_polls: AtomicU32::new(0),
            users: AtomicU32::new(0),
            destroyed: AtomicBool::new(false),
        }))
    }

    pub(crate) fn queue(&self) -> &Arc<ferroce_core::Cq> {
        &self.queue
    }

    /// The context it was made in.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Completions that it can hold.
    pub fn capacity(&self) -> u32 {
        self.queue.capacity()
    }

    /// Takes completions. If there are none, the card is turned once and the queue looked at again.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn poll(&self, out: &mut [Completion]) -> Result<usize> {
        self.context.check()?;
        if out.is_empty() {
            return Ok(0);
        }
        let mut taken = self.queue.poll(out);
        if taken == 0 {
            self.context.card().turn();
            taken = self.queue.poll(out);
        }
        if taken > 0 {
            self.empty_polls.store(0, Ordering::Relaxed);
            self.context.card().found_something();
        } else if self.empty_polls.fetch_add(1, Ordering::Relaxed) >= POLLS_BEFORE_GIVING_WAY {
            self.context.card().give_way();
        }
        Ok(taken)
    }

    /// Asks for one event on the channel at the next completion (`solicited_only`: at the next solicited or failed one).
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn req_notify(&self, solicited_only: bool) -> Result<()> {
        self.context.check()?;
        self.queue.arm(solicited_only);
        Ok(())
    }

    /// Changes the capacity.
    ///
    /// # Errors
    /// EINVAL: 0, above the limit, or below the number of completions that wait to be polled.
    pub fn resize(&self, cqe: u32) -> Result<()> {
        self.context.check()?;
        Ok(self.queue.resize(cqe)?)
    }

    /// Delays events until `count` completions or `period_us` microseconds.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn set_moderation(&self, count: u16, period_us: u16) -> Result<()> {
        self.context.check()?;
        self.queue.set_moderation(Moderation { count, period_us });
        Ok(())
    }

    /// Ends it: no more events come from it.
    ///
    /// # Errors
    /// EBUSY: queue pairs complete here.
    pub fn destroy(&self) -> Result<EventsDelivered> {
        if self.context.is_stale() {
            return Ok(EventsDelivered::default());
        }
        let users = self.users.load(Ordering::Relaxed);
        if users > 0 {
            return Err(Error::new(libc::EBUSY, format!("{users} queue pairs or SRQs still use the completion queue")));
        }
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return Ok(EventsDelivered::default());
        }
        // A lane may be about to tell an event that a moderation period held back: of a queue that is gone there must be none.
        self.queue.disarm();
        self.context.card().quiesce();
        let cookie = self.queue.cookie();
        Ok(EventsDelivered {
            completion: self.queue.channel().map_or(0, |channel| channel.forget(cookie)),
            asynchronous: self.context.events().forget(EventSource::Cq(cookie)),
        })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // No queue pair holds it any more, or the process is a forked child.
        let _ = self.destroy();
    }
}
