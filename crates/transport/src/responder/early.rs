//! RC responder: request packets that come before their turn.
//!
//! Where packets are missing, what is behind them is kept until they come, and is then executed in its turn as if it had just arrived. So
//! a requester that sends only the missing packet again loses no more than that, and one that goes back sends what is known already.
//! The NAK for a gap is the same in both cases (IBA 9.7.5.2.4).
//!
//! Kept packets have passed the ICRC and the admission of the queue pair; all other checks wait for their turn.

use std::collections::BTreeMap;

use ferroce_wire::{Headers, NetHeader, Psn};

use crate::host::Packet;

/// So far ahead of the expected PSN a packet is kept. A window of the other end has at most some hundred packets; what is further away is
/// no honest peer's, or will come again.
const AHEAD_MAX: u32 = 1024;
/// Most bytes of payload that one queue pair keeps: twice the window of a Ferroce end.
const BYTES_MAX: usize = 512 << 10;

/// A packet that waits for its turn.
#[derive(Debug)]
pub(super) struct Early {
    headers: Headers,
    net: NetHeader,
    payload: Box<[u8]>,
}

impl Early {
    pub(super) fn packet(&self) -> Packet<'_> {
        Packet { headers: &self.headers, payload: &self.payload, net: &self.net }
    }
}

/// What became of a packet that came early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// It waits now.
    Now,
    /// It waits since before.
    Already,
    /// There is no room for it.
    No,
}

/// The packets that wait, by their place in a count that does not wrap.
#[derive(Debug)]
pub(super) struct EarlyPackets {
    waiting: BTreeMap<u64, Early>,
    bytes: usize,
    /// The PSN that was expected at the last look, and its place.
    expected: Psn,
    place: u64,
}

impl EarlyPackets {
    /// None, as long as that is expected.
    pub(super) fn new(expected: Psn) -> EarlyPackets {
        EarlyPackets { waiting: BTreeMap::new(), bytes: 0, expected, place: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Keeps a packet that is ahead of the expected PSN. Payload beyond `mtu` is refused in its turn, and not worth any memory.
    pub(super) fn keep(&mut self, expected: Psn, mtu: u32, packet: &Packet<'_>) -> Kept {
        self.look(expected);
        let ahead = packet.headers.bth.psn.diff(expected) as u32;
        let len = packet.payload.len();
        if ahead > AHEAD_MAX || len > mtu as usize {
            return Kept::No;
        }
        let place = self.place + u64::from(ahead);
        if self.waiting.contains_key(&place) {
            return Kept::Already;
        }
        if self.bytes + len > BYTES_MAX {
            return Kept::No;
        }
        self.bytes += len;
        let early = Early { headers: *packet.headers, net: *packet.net, payload: packet.payload.into() };
        self.waiting.insert(place, early);
        Kept::Now
    }

    /// Takes the packet whose turn it is.
    pub(super) fn take(&mut self, expected: Psn) -> Option<Early> {
        self.look(expected);
        while let Some(first) = self.waiting.first_entry()
            && *first.key() <= self.place
        {
            let (place, early) = first.remove_entry();
            self.bytes -= early.payload.len();
            if place == self.place {
                return Some(early);
            }
            // It lay among the responses of a READ: no PSN of a request.
        }
        None
    }

    fn clear(&mut self) {
        self.waiting.clear();
        self.bytes = 0;
    }

    /// Notes how far the queue pair has come.
    fn look(&mut self, expected: Psn) {
        match u64::try_from(expected.diff(self.expected)) {
            Ok(step) => self.place += step,
            // After as much as PSNs can tell apart (a READ of 2 GiB in the smallest packets) nothing says what they are.
            Err(_) => self.clear(),
        }
        self.expected = expected;
    }

    /// What holds between inputs, whatever comes.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn assert_invariants(&self) {
        assert_eq!(self.waiting.values().map(|early| early.payload.len()).sum::<usize>(), self.bytes);
        assert!(!self.is_empty() && self.bytes <= BYTES_MAX, "{} bytes wait", self.bytes);
        let (first, last) = (self.waiting.first_key_value(), self.waiting.last_key_value());
        assert!(first.is_none_or(|(place, _)| *place > self.place), "what waits is ahead");
        assert!(last.is_none_or(|(place, _)| *place <= self.place + u64::from(AHEAD_MAX)), "and not far");
    }
}
