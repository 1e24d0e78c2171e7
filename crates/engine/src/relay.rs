//! The way for a packet that reached the wrong lane: over the service to the right one, never to the floor. Lanes agree on rings the
//! same way.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use ferroce_link::ring::WakeName;
use ferroce_wire::{Headers, NetHeader};

/// Word between two lanes about a ring: to another lane, or from it. `M` is the descriptor of its memory.
#[derive(Debug)]
pub struct RingCall<M> {
    /// The other lane. The service vouches for it.
    pub lane: u16,
    /// The lease under which it is that lane.
    pub lease: u64,
    /// Names the ring; chosen by who offers it.
    pub id: u64,
    /// Wakes who says it.
    pub wake: WakeName,
    /// What is said.
    pub word: RingWord<M>,
}

/// What a [`RingCall`] says.
#[derive(Debug)]
pub enum RingWord<M> {
    /// Here is a ring, in this memory.
    Offer(M),
    /// The ring was taken.
    Accept,
}

/// What the relay brings.
#[derive(Debug)]
pub enum Relayed<'a> {
    /// A packet for this lane: BTH to pad.
    Packet(&'a NetHeader, &'a [u8]),
    /// Word about a ring.
    Ring(RingCall<OwnedFd>),
}

/// A lane's door to the service's relay. Best effort, like the network: what does not fit is dropped and counted by the service.
pub trait Relay: Send + fmt::Debug {
    /// Hands over a packet of another lane: BTH to pad, without ICRC, which was right.
    fn forward(&mut self, net: &NetHeader, packet: &[u8]);

    /// Gives what the service brought to `sink`.
    fn receive(&mut self, sink: &mut dyn FnMut(Relayed<'_>));

    /// Tells another lane something about a ring.
    fn tell(&mut self, call: &RingCall<BorrowedFd<'_>>);
}

/// Writes a packet out again as it was, without ICRC. Pad bytes become 0.
pub(crate) fn packet_bytes(headers: &Headers, payload: &[u8], out: &mut Vec<u8>) {
    out.clear();
    out.resize(headers.len(), 0);
    headers.emit(out);
    out.extend_from_slice(payload);
    out.resize(out.len() + usize::from(headers.bth.pad), 0);
}

#[cfg(test)]
mod tests {
    use ferroce_wire::{Bth, Opcode, Psn};

    use super::*;

    #[test]
    fn a_packet_survives_the_relay() {
        let headers = Headers::new(Bth { pad: 3, ..Bth::new(Opcode::RC_SEND_ONLY, 0x4011, Psn::new(5)) });
        let mut bytes = vec![1, 2, 3];
        packet_bytes(&headers, b"12345", &mut bytes);
        let (parsed, payload) = Headers::parse(&bytes).expect("it was well-formed");
        assert_eq!((parsed, &bytes[payload]), (headers, &b"12345"[..]));
    }
}
