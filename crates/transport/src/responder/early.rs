//! RC responder: request packets that come before their turn.
//!
//! Where packets are missing, what is behind them is kept until they come, and is then executed in its turn as if it had just arrived. So
//! a requester that sends only the missing packet again loses no more than that, and one that goes back sends what is known already.
//! The NAK for a gap is the same in both cases (IBA 9.7.5.2.4).
//!
//! Kept packets have passed the ICRC and the admission of the queue pair; all other checks wait for their turn.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferroce_wire::{Bth, Headers, NetHeader, Psn};

use crate::host::Packet;
use crate::timer::{MS, Nanos};

/// So far ahead of the expected PSN a packet is kept. A window of the other end has at most some hundred packets; what is further away is
/// no honest peer's, or will come again.
const AHEAD_MAX: u32 = 1024;
/// Most bytes that one queue pair keeps: more than the window of a Ferroce end.
const BYTES_MAX: usize = 768 << 10;
/// What a packet takes besides its payload: its place in a tree whose nodes may be half empty.
const PLACE: usize = 2 * size_of::<(u64, Early)>();
/// So long after the last of them came packets wait for what is missing: who sends nothing more is gone, or begins anew.
const PATIENCE: Nanos = 4_000 * MS;

/// Bytes that queue pairs keep together: a peer with thousands of them shall not have a process keep gigabytes.
#[derive(Debug, Default)]
pub struct EarlyBudget {
    kept: AtomicUsize,
}

impl EarlyBudget {
    /// Most bytes.
    pub const MAX: usize = 32 << 20;

    /// Bytes that are kept now.
    pub fn kept(&self) -> usize {
        self.kept.load(Ordering::Relaxed)
    }

    /// False: there is no room.
    fn take(&self, bytes: usize) -> bool {
        let more = |kept: usize| kept.checked_add(bytes).filter(|kept| *kept <= EarlyBudget::MAX);
        self.kept.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        let before = self.kept.fetch_sub(bytes, Ordering::Relaxed);
        assert!(before >= bytes, "{bytes} of {before} bytes given back");
    }
}

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

    /// Bytes of memory.
    fn cost(&self) -> usize {
        PLACE + self.payload.len()
    }

    /// Is that the same packet once more? If it asks for an answer, this one does from now on.
    fn is_again(&mut self, packet: &Packet<'_>) -> bool {
        let ack_req = self.headers.bth.ack_req | packet.headers.bth.ack_req;
        let asking = |headers: &Headers| Headers { bth: Bth { ack_req: true, ..headers.bth }, ..*headers };
        let same = asking(&self.headers) == asking(packet.headers) && *self.payload == *packet.payload;
        if same {
            self.headers.bth.ack_req = ack_req;
        }
        same
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
    /// When they are waited for no longer.
    until: Nanos,
    budget: Arc<EarlyBudget>,
    /// The PSN that was expected at the last look, and its place.
    expected: Psn,
    place: u64,
}

impl EarlyPackets {
    /// None, as long as that is expected.
    pub(super) fn new(expected: Psn, budget: Arc<EarlyBudget>) -> EarlyPackets {
        EarlyPackets { waiting: BTreeMap::new(), bytes: 0, until: 0, budget, expected, place: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Keeps a packet that is ahead of the expected PSN. Payload beyond `mtu` is refused in its turn, and not worth any memory.
    pub(super) fn keep(&mut self, now: Nanos, expected: Psn, mtu: u32, packet: &Packet<'_>) -> Kept {
        self.look(expected);
        let ahead = packet.headers.bth.psn.diff(expected) as u32;
        let len = packet.payload.len();
        if ahead > AHEAD_MAX || len > mtu as usize {
            return Kept::No;
        }
        let place = self.place + u64::from(ahead);
        if let Some(early) = self.waiting.get_mut(&place) {
            if early.is_again(packet) {
                return Kept::Already;
            }
            // One of the two is nobody's who means it well: whose turn it is comes again.
            self.waiting.remove(&place).inspect(|early| self.forget(early.cost()));
            return Kept::No;
        }
        let early = Early { headers: *packet.headers, net: *packet.net, payload: packet.payload.into() };
        if self.bytes + early.cost() > BYTES_MAX || !self.budget.take(early.cost()) {
            return Kept::No;
        }
        self.bytes += early.cost();
        self.until = now + PATIENCE;
        self.waiting.insert(place, early);
        Kept::Now
    }

    /// When the packets are to be forgotten if no other is kept until then.
    pub(super) fn until(&self) -> Nanos {
        self.until
    }

    /// Takes the packet whose turn it is.
    pub(super) fn take(&mut self, expected: Psn) -> Option<Early> {
        self.look(expected);
        while let Some(first) = self.waiting.first_entry()
            && *first.key() <= self.place
        {
            let (place, early) = first.remove_entry();
            self.forget(early.cost());
            if place == self.place {
                return Some(early);
            }
            // It lay among the responses of a READ: no PSN of a request.
        }
        None
    }

    fn clear(&mut self) {
        self.waiting.clear();
        self.forget(self.bytes);
    }

    fn forget(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.budget.give_back(bytes);
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
        assert_eq!(self.waiting.values().map(Early::cost).sum::<usize>(), self.bytes);
        assert!(!self.is_empty() && self.bytes <= BYTES_MAX, "{} bytes wait", self.bytes);
        let (first, last) = (self.waiting.first_key_value(), self.waiting.last_key_value());
        assert!(first.is_none_or(|(place, _)| *place > self.place), "what waits is ahead");
        assert!(last.is_none_or(|(place, _)| *place <= self.place + u64::from(AHEAD_MAX)), "and not far");
    }
}

impl Drop for EarlyPackets {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use ferroce_wire::Opcode;

    use super::*;

    #[test]
    fn queue_pairs_keep_no_more_than_is_theirs_together() {
        let budget = Arc::new(EarlyBudget::default());
        let payload = vec![0; 4096];
        let here = std::net::Ipv4Addr::LOCALHOST.into();
        let net = NetHeader { src: here, dst: here, src_port: 0, tclass: 0, hop_limit: 64, udp_len: 4116, ifindex: 1 };
        let keep = |early: &mut EarlyPackets, psn| {
            let headers = Headers::new(Bth::new(Opcode::RC_SEND_MIDDLE, 7, Psn::new(psn)));
            early.keep(0, Psn::new(0), 4096, &Packet { headers: &headers, payload: &payload, net: &net })
        };
        let of_each = BYTES_MAX / (PLACE + payload.len());
        let mut all: Vec<EarlyPackets> = Vec::new();
        for _ in 0..EarlyBudget::MAX / (of_each * (PLACE + payload.len())) {
            let mut early = EarlyPackets::new(Psn::new(0), Arc::clone(&budget));
            assert!((1..=of_each as u32).all(|psn| keep(&mut early, psn) == Kept::Now));
            assert_eq!(keep(&mut early, of_each as u32 + 1), Kept::No, "one has its own limit");
            all.push(early);
        }
        let mut further = EarlyPackets::new(Psn::new(0), Arc::clone(&budget));
        let room = (EarlyBudget::MAX - budget.kept()) / (PLACE + payload.len());
        assert!((1..=room as u32).all(|psn| keep(&mut further, psn) == Kept::Now));
        assert_eq!(keep(&mut further, 999), Kept::No);
        assert!(all[0].take(Psn::new(1)).is_some());
        assert_eq!(keep(&mut further, 999), Kept::Now);
        drop((all, further));
        assert_eq!(budget.kept(), 0);
    }
}
