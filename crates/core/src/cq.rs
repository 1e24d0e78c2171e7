//! Completion queues.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::sync::Mutex;
use ferroce_transport::{Completion, WcStatus};

use crate::channel::CompChannel;
use crate::error::CoreError;
use crate::event::{AsyncEvent, AsyncQueue};
use crate::limits;

/// A completion queue. Any lane pushes, any thread polls.
#[derive(Debug)]
pub struct Cq {
    ring: Mutex<Ring>,
    /// Copy of the ring's length, to be read without the lock.
    len: AtomicU32,
    /// Completions that found no room.
    lost: AtomicU64,
    channel: Option<Arc<CompChannel>>,
    events: Arc<AsyncQueue>,
    cookie: u64,
    timestamps: bool,
}

#[derive(Debug)]
struct Ring {
    entries: VecDeque<Completion>,
    capacity: u32,
    armed: Armed,
    moderation: Moderation,
    /// Completions since the arming that wait for the moderation's count or period.
    held: u32,
    /// When the held ones are told in any case; known from the first [`Cq::on_timer`] after the first of them.
    deadline: Option<u64>,
    /// It overran: nothing is taken any more.
    bad: bool,
}

/// What the program waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Armed {
    No,
    Solicited,
    Any,
}

/// `ibv_modify_cq`: an event comes only after `count` completions or `period_us` microseconds after the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moderation {
    /// Completions; 0 and 1 mean every one.
    pub count: u16,
    /// Microseconds; 0 means that only the count decides.
    pub period_us: u16,
}

/// Entries that a new queue has room for before it allocates again.
const FIRST_ALLOCATION: u32 = 256;

impl Cq {
    /// A queue for `capacity` completions. Completion events go to `channel`, an overrun to `events`, both under `cookie`.
    ///
    /// # Errors
    /// EINVAL: a capacity of 0 or above the device's limit.
    pub fn new(
        capacity: u32,
        channel: Option<Arc<CompChannel>>,
        events: Arc<AsyncQueue>,
        cookie: u64,
    ) -> Result<Cq, CoreError> {
        check_capacity(capacity)?;
        let ring = Ring {
            entries: VecDeque::with_capacity(capacity.min(FIRST_ALLOCATION) as usize),
            capacity,
            armed: Armed::No,
            moderation: Moderation::default(),
            held: 0,
            deadline: None,
            bad: false,
        };
        let (ring, len, lost) = (Mutex::new(ring), AtomicU32::new(0), AtomicU64::new(0));
        Ok(Cq { ring, len, lost, channel, events, cookie, timestamps: false })
    }

    /// The same queue, whose completions shall tell when they were added.
    #[must_use]
    pub fn with_timestamps(self) -> Cq {
        Cq { timestamps: true, ..self }
    }

    /// Whoever adds a completion notes the time in it.
    pub fn wants_timestamps(&self) -> bool {
        self.timestamps
    }

    /// Adds a completion and raises the event that was asked for. In a full queue it is lost: the queue is bad from then on, which
    /// `IBV_EVENT_CQ_ERR` tells once.
    ///
    /// At [`News::Period`] the caller sees to it that [`Cq::on_timer`] is called soon, and again when [`Cq::next_timeout`] says so,
    /// until that is `None`.
    pub fn push(&self, completion: Completion) -> News {
        let mut ring = self.ring.lock();
        if ring.bad || ring.entries.len() >= ring.capacity as usize {
            self.lost.fetch_add(1, Ordering::Relaxed);
            let overran_now = !std::mem::replace(&mut ring.bad, true);
            if overran_now {
                log::error!("completion queue of {} entries overran: poll more often or make it larger", ring.capacity);
                self.events.push(AsyncEvent::Cq { cookie: self.cookie });
            }
            return News::None;
        }
        ring.entries.push_back(completion);
        self.len.store(ring.entries.len() as u32, Ordering::Release);
        let news = ring.news(&completion);
        if news == News::Event {
            ring.disarm();
            // Whom it wakes will want the lock.
            drop(ring);
            self.tell();
        }
        news
    }

    /// Adds a completion from outside of the lanes, where nobody runs moderation periods: what is asked for comes at once.
    pub fn push_at_once(&self, completion: Completion) {
        let timestamp = if self.timestamps { completion.timestamp } else { 0 };
        if self.push(Completion { timestamp, ..completion }) != News::Period {
            return;
        }
        let mut ring = self.ring.lock();
        if ring.held > 0 {
            ring.disarm();
            drop(ring);
            self.tell();
        }
    }

    /// Takes the oldest completions, as many as there are and fit. Gives their number.
    pub fn poll(&self, completions: &mut [Completion]) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut ring = self.ring.lock();
        let count = completions.len().min(ring.entries.len());
        for (to, from) in completions.iter_mut().zip(ring.entries.drain(..count)) {
            *to = from;
        }
        self.len.store(ring.entries.len() as u32, Ordering::Release);
        count
    }

    /// Takes the oldest completion.
    pub fn poll_one(&self) -> Option<Completion> {
        if self.is_empty() {
            return None;
        }
        let mut ring = self.ring.lock();
        let completion = ring.entries.pop_front();
        self.len.store(ring.entries.len() as u32, Ordering::Release);
        completion
    }

    /// Completions that wait. Takes no lock.
    pub fn len(&self) -> u32 {
        self.len.load(Ordering::Acquire)
    }

    /// No completion waits. Takes no lock.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Completions that fit.
    pub fn capacity(&self) -> u32 {
        self.ring.lock().capacity
    }

    /// Where its completion events go.
    pub fn channel(&self) -> Option<&Arc<CompChannel>> {
        self.channel.as_ref()
    }

    /// Named in its events.
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// It overran and takes no completions any more.
    pub fn is_bad(&self) -> bool {
        self.ring.lock().bad
    }

    /// Completions that were lost because it was full or bad.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// `ibv_req_notify_cq`: one event for the next completion that is added, or the next solicited one (errors count as
    /// solicited). Completions that wait already raise none. Asking for any outranks asking for solicited.
    pub fn arm(&self, solicited_only: bool) {
        let mut ring = self.ring.lock();
        ring.armed = match (ring.armed, solicited_only) {
            (Armed::Any, _) | (_, false) => Armed::Any,
            (Armed::No | Armed::Solicited, true) => Armed::Solicited,
        };
    }

    /// Forgets what was asked for and is held back: no event comes of it any more.
    pub fn disarm(&self) {
        self.ring.lock().disarm();
    }

    /// Changes the capacity.
    ///
    /// # Errors
    /// EINVAL: 0, above the device's limit, or fewer than wait now.
    pub fn resize(&self, capacity: u32) -> Result<(), CoreError> {
        check_capacity(capacity)?;
        let mut ring = self.ring.lock();
        if (capacity as usize) < ring.entries.len() {
            return Err(CoreError::new(
                libc::EINVAL,
                format!("cqe {capacity} is below the {} completions that wait", ring.entries.len()),
            ));
        }
        ring.capacity = capacity;
        Ok(())
    }

    /// Changes the moderation. What was held back under the old one is told when it would be under the new one.
    pub fn set_moderation(&self, moderation: Moderation) {
        let mut ring = self.ring.lock();
        ring.moderation = moderation;
        ring.deadline = None;
        if ring.held >= u32::from(moderation.count.max(1)) {
            ring.disarm();
            drop(ring);
            self.tell();
        }
    }

    /// When [`Cq::on_timer`] wants to be called, in monotonic nanoseconds; 0 is at once. `None` unless completions are held back by a moderation period.
    pub fn next_timeout(&self) -> Option<u64> {
        let ring = self.ring.lock();
        (ring.held > 0 && ring.moderation.period_us > 0).then_some(ring.deadline.unwrap_or(0))
    }

    /// Runs the moderation period; `now` in monotonic nanoseconds.
    pub fn on_timer(&self, now: u64) {
        let mut ring = self.ring.lock();
        if ring.held == 0 || ring.moderation.period_us == 0 {
            return;
        }
        let period = u64::from(ring.moderation.period_us) * 1_000;
        let deadline = *ring.deadline.get_or_insert(now.saturating_add(period));
        if now >= deadline {
            ring.disarm();
            drop(ring);
            self.tell();
        }
    }

    /// Removes the completions of a queue pair that goes to RESET or is destroyed. Gives their number.
    pub fn purge(&self, qpn: u32) -> usize {
        let mut ring = self.ring.lock();
        let before = ring.entries.len();
        ring.entries.retain(|completion| completion.qp_num != qpn);
        self.len.store(ring.entries.len() as u32, Ordering::Release);
        before - ring.entries.len()
    }

    /// Completion events that the program has not read.
    pub fn unread_events(&self) -> usize {
        self.channel.as_ref().map_or(0, |channel| channel.unread(self.cookie))
    }

    /// Raises the completion event.
    fn tell(&self) {
        if let Some(channel) = &self.channel {
            channel.push(self.cookie);
        }
    }
}

/// What a new completion means for who waits for an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// Nothing: nobody asked for an event, or not yet.
    None,
    /// Its event is held back for a moderation period that begins now.
    Period,
    /// Its event was told.
    Event,
}

impl Ring {
    fn news(&mut self, completion: &Completion) -> News {
        let failed = completion.status != WcStatus::Success;
        let counts = match self.armed {
            Armed::No => false,
            Armed::Solicited => completion.solicited || failed,
            Armed::Any => true,
        };
        if !counts {
            return News::None;
        }
        self.held = self.held.saturating_add(1);
        if failed || self.held >= u32::from(self.moderation.count.max(1)) {
            News::Event
        } else if self.held == 1 && self.moderation.period_us > 0 {
            News::Period
        } else {
            News::None
        }
    }

    fn disarm(&mut self) {
        self.armed = Armed::No;
        self.held = 0;
        self.deadline = None;
    }
}

fn check_capacity(capacity: u32) -> Result<(), CoreError> {
    if capacity == 0 || capacity > limits::MAX_CQE {
        return Err(CoreError::new(libc::EINVAL, format!("cqe {capacity} is not in 1..={}", limits::MAX_CQE)));
    }
    Ok(())
}
