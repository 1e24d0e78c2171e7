//! Asking a silent peer what it has.
//!
//! A probe is a SEND or WRITE packet that the peer acknowledged before, sent once more as it was (IBA 9.7.1): a duplicate, which a
//! responder acknowledges with the newest PSN that it executed (IBA 9.7.5.1.2, C9-105), and which does nothing. Responders take
//! packets in order. So an answer that tells of nothing new shows that what is in flight was lost, and one that does acknowledges
//! it.
//!
//! What was acknowledged is the program's again; so now and then a packet is copied when it is sent. A queue pair of which no SEND
//! or WRITE was acknowledged yet asks nothing.

use std::sync::Arc;

use ferroce_wire::Headers;

use super::IN_FLIGHT_MAX;
use crate::MAX_LENT_PACKETS;
use crate::host::{Memory, MemoryError, Payload, Side, Span, Train};

/// Where asking stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Probe {
    /// There is no need.
    None,
    /// One is to be sent.
    Due,
    /// One was sent, and nothing was heard since.
    Sent,
}

/// Counts probes and their answers, which come in order but may be late: an answer to a probe of before says nothing of what was sent
/// since.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Answers {
    /// Probes whose answers may still come.
    due: u32,
    /// As many of these are of before the last news, or before all was sent again.
    stale: u32,
    /// PSNs of the requester that had been sent before the last probe.
    sent_before: u64,
}

impl Answers {
    /// A probe goes out behind so many PSNs.
    pub(super) fn probe_sent(&mut self, behind: u64) {
        self.due += 1;
        self.sent_before = behind;
    }

    /// There is news, so that `answered` PSNs have their answers, or what is in flight is sent again: probes until now ask nothing
    /// of interest any more.
    pub(super) fn start_anew(&mut self, answered: u64) {
        if answered > self.sent_before {
            // The answer to what was sent behind the last probe has come: so have those to probes, or they never will.
            self.due = 0;
        }
        self.stale = self.due;
    }

    /// Had the PSN at this place been sent before the last probe?
    pub(super) fn was_sent_before(&self, place: u64) -> bool {
        place < self.sent_before
    }

    /// Some may still come.
    pub(super) fn are_due(&self) -> bool {
        self.due > 0
    }

    /// What answers a probe came. Tells whether it is one since the last start. Each is answered once: what else looks so is of duplicates, and
    /// must not draw more of them.
    pub(super) fn take(&mut self) -> bool {
        let fresh = self.due > 0 && self.stale == 0;
        self.due = self.due.saturating_sub(1);
        self.stale = self.stale.saturating_sub(1);
        fresh
    }
}

/// For so many PSNs one copy serves.
const KEPT_FOR: u64 = 1 << 16;
/// An older one is not sent any more. With all that may be in flight it stays well below 2^23 PSNs from what the responder expects,
/// which it would take for new.
const KEPT_MAX: u64 = 1 << 21;
const _: () = assert!(KEPT_MAX + (IN_FLIGHT_MAX + MAX_LENT_PACKETS) as u64 <= 1 << 23);

/// A packet as it was sent.
#[derive(Debug)]
pub(super) struct Copy {
    headers: Headers,
    payload: Arc<[u8]>,
    /// Its place among all PSNs of the requester.
    at: u64,
}

impl Copy {
    /// Copies the last packet of a train.
    pub(super) fn of_last(train: &Train, at: u64, host: &mut impl Memory) -> Result<Copy, MemoryError> {
        let skip = (train.packets - 1) * train.mtu;
        let mut bytes = vec![0; (train.len - skip) as usize];
        load(&train.payload, skip, &mut bytes, host)?;
        let mut headers = train.tail.unwrap_or(train.head);
        headers.bth.ack_req = true;
        Ok(Copy { headers, payload: bytes.into(), at })
    }

    pub(super) fn train(&self, mtu: u32) -> Train {
        Train {
            head: self.headers,
            body: self.headers.bth.opcode,
            tail: None,
            packets: 1,
            mtu,
            len: self.payload.len() as u32,
            payload: Payload::Inline(Arc::clone(&self.payload), 0),
            path: None,
            from: Side::Requester,
        }
    }
}

/// The copies that a requester keeps.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Was acknowledged.
    old: Option<Box<Copy>>,
    /// Will be.
    new: Option<Box<Copy>>,
}

impl Copies {
    /// Should the packet at this place be copied?
    pub(super) fn want(&self, at: u64) -> bool {
        self.new.is_none() && self.old.as_ref().is_none_or(|old| at >= old.at + KEPT_FOR)
    }

    /// There is none yet: even one from the middle of a message is welcome.
    pub(super) fn are_none(&self) -> bool {
        self.old.is_none() && self.new.is_none()
    }

    pub(super) fn put(&mut self, copy: Copy) {
        self.new = Some(Box::new(copy));
    }

    /// The first `answered` PSNs of the requester have their answers.
    pub(super) fn answered(&mut self, answered: u64) {
        if self.new.as_ref().is_some_and(|new| new.at < answered) {
            self.old = self.new.take();
        }
    }

    /// What can be sent as a probe when `answered` PSNs have their answers.
    pub(super) fn to_send(&self, answered: u64) -> Option<&Copy> {
        self.old.as_deref().filter(|old| answered - old.at <= KEPT_MAX)
    }
}

/// Copies payload from byte `skip` on.
fn load(payload: &Payload, skip: u32, into: &mut [u8], host: &mut impl Memory) -> Result<(), MemoryError> {
    let spans = match payload {
        Payload::Inline(bytes, start) => {
            into.copy_from_slice(&bytes[(start + skip) as usize..][..into.len()]);
            return Ok(());
        }
        Payload::Gather(spans) => spans.as_slice(),
        Payload::Copy(span) | Payload::Lent(span) => std::slice::from_ref(span),
    };
    let (mut skip, mut rest) = (skip, into);
    for span in spans {
        let passed = skip.min(span.len);
        skip -= passed;
        let len = rest.len().min((span.len - passed) as usize);
        let (part, behind) = rest.split_at_mut(len);
        if len > 0 {
            host.load(Span { addr: span.addr + u64::from(passed), len: len as u32 }, part)?;
        }
        rest = behind;
    }
    assert!(rest.is_empty(), "a train has the payload that it tells");
    Ok(())
}
