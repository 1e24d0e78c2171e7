//! The receive buffer: what the peer has written and the program has not read, and what the peer may write next.

use std::collections::VecDeque;

use crate::stream::Violation;

/// A place in a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// From its start, in bytes.
    pub offset: u32,
    /// In bytes.
    pub len: u32,
}

#[derive(Debug)]
pub(crate) struct Receive {
    size: u32,
    /// Messages that may be unread at once.
    queue: u16,
    /// Bytes left of each message that is not read to its end.
    messages: VecDeque<u32>,
    read_at: u32,
    unread: u32,
    /// Bytes that the peer may still announce.
    granted: u32,
    /// Bytes that were read, and not granted again.
    freed: u32,
    /// The half that is granted next.
    grant_at: u32,
    /// Messages read, modulo 2^16.
    seq: u16,
    /// From which message on credits are granted even if no half is free.
    announce_at: u16,
}

/// What the peer is told.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) limit: u16,
    /// A half that it may write to.
    pub(crate) half: Option<Span>,
}

impl Receive {
    /// The peer knows of the first half.
    pub(crate) fn new(size: u32, queue: u16) -> Receive {
        let half = size / 2;
        Receive {
            size,
            queue,
            messages: VecDeque::new(),
            read_at: 0,
            unread: 0,
            granted: half,
            freed: half,
            grant_at: half,
            seq: 0,
            announce_at: queue / 2,
        }
    }

    pub(crate) fn unread(&self) -> u32 {
        self.unread
    }

    /// The peer says that it has written `len` bytes. It is believed only within what it was granted, so that what is read lies in
    /// the buffer, and nothing is read that it may still change.
    pub(crate) fn data(&mut self, len: u32) -> Result<(), Violation> {
        if len > self.granted {
            return Err(Violation::MoreThanGranted { len, granted: self.granted });
        }
        if self.messages.len() >= usize::from(self.queue) {
            return Err(Violation::NoCredit);
        }
        if len == 0 {
            self.seq = self.seq.wrapping_add(1);
            return Ok(());
        }
        self.granted -= len;
        self.unread += len;
        self.messages.push_back(len);
        Ok(())
    }

    /// A message that is read as soon as it is there.
    pub(crate) fn count(&mut self) {
        self.seq = self.seq.wrapping_add(1);
    }

    /// Where the next bytes are, after `skip` of them; None if there are no more.
    pub(crate) fn next(&self, skip: u32) -> Option<Span> {
        let left = self.unread.checked_sub(skip).filter(|left| *left > 0)?;
        // Both are less than the size, which is at most 2^30.
        let offset = (self.read_at + skip) % self.size;
        Some(Span { offset, len: left.min(self.size - offset) })
    }

    /// The program has read `len` bytes.
    pub(crate) fn read(&mut self, len: u32) {
        assert!(len <= self.unread, "{len} of {} bytes", self.unread);
        self.read_at = (self.read_at + len) % self.size;
        self.unread -= len;
        self.freed += len;
        let mut left = len;
        while left > 0 {
            let first = self.messages.front_mut().expect("unread bytes are in messages");
            let part = left.min(*first);
            *first -= part;
            left -= part;
            if *first == 0 {
                self.messages.pop_front();
                self.seq = self.seq.wrapping_add(1);
            }
        }
    }

    /// Is there something to tell the peer?
    pub(crate) fn owes_grant(&self) -> bool {
        let past = self.seq.wrapping_sub(self.announce_at) as i16;
        self.freed >= self.size / 2 || past >= 0
    }

    pub(crate) fn grant(&mut self) -> Grant {
        self.announce_at = self.seq.wrapping_add(self.queue / 2);
        let half = self.size / 2;
        let has_half = self.freed >= half;
        let granted = Span { offset: self.grant_at, len: half };
        if has_half {
            self.freed -= half;
            self.granted += half;
            self.grant_at = if self.grant_at == 0 { half } else { 0 };
        }
        Grant { limit: self.seq.wrapping_add(self.queue), half: has_half.then_some(granted) }
    }
}
