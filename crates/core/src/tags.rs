//! Tag lists: where buffers wait for messages with a certain tag.
//!
//! A message that no tag matches is **unexpected**: the program gets it whole and does the matching itself. Buffers that it posts before it
//! knows of that message could be for it, so they must not match later ones: they are **held** until the program says that it handled as
//! many unexpected messages as there were (the two counts are in step).

use std::collections::VecDeque;
use std::sync::Arc;

use ferroce_transport::{Completion, RecvWr, WcFlags, WcOpcode, WcStatus};

use crate::cq::Cq;
use crate::error::CoreError;
use crate::limits;
use crate::sync::Mutex;

/// What a tag list is changed by: `struct ibv_ops_wr`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagOp {
    /// Given back in the operation's completion.
    pub wr_id: u64,
    /// Make a completion on success too.
    pub signaled: bool,
    /// Unexpected messages that the program has handled so far, modulo 2^16, if it tells that now.
    pub handled: Option<u32>,
    /// What to do.
    pub change: TagChange,
}

/// See [`TagOp`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TagChange {
    /// Adds a buffer to the end of the list.
    Add(TaggedRecv),
    /// Takes a buffer, by its handle, off the list. If it is not there any more, the completion has status
    /// [`TmErr`](WcStatus::TmErr).
    Delete(u32),
    /// Only tells how many unexpected messages were handled.
    Sync,
}

/// A buffer for the messages whose tag, masked with `mask`, is `tag`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaggedRecv {
    /// Where the data goes, without the tag matching header; `wr_id` is given back when a message matched.
    pub recv: RecvWr,
    /// Tag.
    pub tag: u64,
    /// Bits that count.
    pub mask: u64,
}

/// The list of a shared receive queue.
#[derive(Debug)]
pub struct TagList {
    list: Mutex<List>,
    /// Completions of operations go here, as those of receives do.
    cq: Arc<Cq>,
    max_tags: u32,
}

#[derive(Debug)]
struct List {
    /// In the order they were added; the held ones are the last.
    buffers: VecDeque<(u32, TaggedRecv)>,
    /// How many of them may match.
    live: usize,
    /// Handle of the next one.
    next: u32,
    /// Unexpected messages so far, modulo 2^16.
    unexpected: u16,
    /// What the program said last.
    handled: u16,
}

impl TagList {
    /// An empty list for `max_tags` buffers.
    ///
    /// # Errors
    /// EINVAL: no room for any, or more than the device's limit.
    pub fn new(max_tags: u32, cq: Arc<Cq>) -> Result<TagList, CoreError> {
        if max_tags == 0 || max_tags > limits::MAX_NUM_TAGS {
            return Err(CoreError::new(
                libc::EINVAL,
                format!("tm_cap.max_num_tags {max_tags} is not in 1..={}", limits::MAX_NUM_TAGS),
            ));
        }
        let list = List { buffers: VecDeque::new(), live: 0, next: 0, unexpected: 0, handled: 0 };
        Ok(TagList { list: Mutex::new(list), cq, max_tags })
    }

    /// Where its completions go.
    pub fn cq(&self) -> &Arc<Cq> {
        &self.cq
    }

    /// Buffers that fit.
    pub fn max_tags(&self) -> u32 {
        self.max_tags
    }

    /// Buffers in the list.
    pub fn len(&self) -> u32 {
        self.list.lock().buffers.len() as u32
    }

    /// No buffer is in the list.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Carries out an operation, at `now` in nanoseconds of the card's clock, and completes it. Gives the handle of a buffer that was added.
    ///
    /// # Errors
    /// EINVAL: too many elements. ENOMEM: the list is full.
    pub fn post(&self, op: TagOp, now: u64) -> Result<Option<u32>, CoreError> {
        let mut list = self.list.lock();
        if let TagChange::Add(buffer) = &op.change {
            self.check(buffer, &list)?;
        }
        if let Some(handled) = op.handled {
            list.synchronise(handled as u16);
        }
        let mut told = Completion { wr_id: op.wr_id, timestamp: now, ..Completion::UNUSED };
        let mut handle = None;
        match op.change {
            TagChange::Add(buffer) => {
                handle = Some(list.add(buffer));
                told.opcode = WcOpcode::TmAdd;
            }
            TagChange::Delete(handle) => {
                told.opcode = WcOpcode::TmDel;
                if !list.delete(handle) {
                    told.status = WcStatus::TmErr;
                }
            }
            TagChange::Sync => told.opcode = WcOpcode::TmSync,
        }
        told.flags.set(WcFlags::TM_SYNC_REQ, !list.is_in_step());
        // Under the lock: a message that matches the new buffer must not complete before it.
        if op.signaled || told.status != WcStatus::Success {
            self.cq.push_at_once(told);
        }
        Ok(handle)
    }

    fn check(&self, buffer: &TaggedRecv, list: &List) -> Result<(), CoreError> {
        if buffer.recv.sges.len() > limits::MAX_SGE as usize {
            return Err(CoreError::new(libc::EINVAL, "tm.add.num_sge is above the device's tm_caps.max_sge"));
        }
        if list.buffers.len() >= self.max_tags as usize {
            return Err(CoreError::new(
                libc::ENOMEM,
                "the tag list is full: wait for messages, delete tags, or ask for a larger max_num_tags",
            ));
        }
        Ok(())
    }

    /// Takes the oldest buffer that the tag matches. If there is none, the message is unexpected: `otherwise` is asked for its receive, and
    /// if it has one the message counts.
    pub(crate) fn take<T>(
        &self,
        tag: Option<u64>,
        tagged: impl FnOnce(RecvWr) -> T,
        otherwise: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        let mut list = self.list.lock();
        if let Some(buffer) = tag.and_then(|tag| list.take(tag)) {
            return Some(tagged(buffer.recv));
        }
        // Under the lock: a buffer that is added from now on is behind the message.
        let found = otherwise();
        if found.is_some() {
            list.unexpected = list.unexpected.wrapping_add(1);
        }
        found
    }

    /// An unexpected message failed after all: the program cannot count it.
    pub(crate) fn forget_unexpected(&self) {
        let mut list = self.list.lock();
        list.unexpected = list.unexpected.wrapping_sub(1);
        list.release_held();
    }
}

impl List {
    fn is_in_step(&self) -> bool {
        self.unexpected == self.handled
    }

    fn synchronise(&mut self, handled: u16) {
        self.handled = handled;
        self.release_held();
    }

    fn release_held(&mut self) {
        if self.is_in_step() {
            self.live = self.buffers.len();
        }
    }

    fn add(&mut self, buffer: TaggedRecv) -> u32 {
        let handle = self.next;
        self.next = self.next.wrapping_add(1);
        self.buffers.push_back((handle, buffer));
        self.release_held();
        handle
    }

    fn delete(&mut self, handle: u32) -> bool {
        let Some(place) = self.buffers.iter().position(|(known, _)| *known == handle) else { return false };
        self.remove(place);
        true
    }

    fn take(&mut self, tag: u64) -> Option<TaggedRecv> {
        let matches = |(_, buffer): &(u32, TaggedRecv)| tag & buffer.mask == buffer.tag;
        let place = self.buffers.iter().take(self.live).position(matches)?;
        self.remove(place)
    }

    fn remove(&mut self, place: usize) -> Option<TaggedRecv> {
        if place < self.live {
            self.live -= 1;
        }
        self.buffers.remove(place).map(|(_, buffer)| buffer)
    }
}
