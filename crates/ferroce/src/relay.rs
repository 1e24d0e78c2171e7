//! The engine's relay over the lease's socket.

use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferroce_engine::{Relay, Relayed, RingCall, RingWord};
use ferroce_link::ring::WakeName;
use ferroce_service::client::{self, LaneLease};
use ferroce_service::protocol::{self, RingStep};
use ferroce_wire::NetHeader;

/// Messages taken from the service in one go.
const RECEIVE_BUDGET: usize = 64;

/// The relay of a leased lane.
pub(crate) struct LeaseRelay {
    pub(crate) lease: Arc<LaneLease>,
    pub(crate) buffer: Vec<u8>,
}

impl Relay for LeaseRelay {
    fn forward(&mut self, net: &NetHeader, packet: &[u8]) {
        if let Err(error) = self.lease.relay_send(SocketAddr::new(net.src, net.src_port), net.dst, packet) {
            log::debug!("relay: {error}");
        }
    }

    fn receive(&mut self, sink: &mut dyn FnMut(Relayed<'_>)) {
        for _ in 0..RECEIVE_BUDGET {
            match self.lease.relay_recv(&mut self.buffer) {
                Ok(Some(client::Relayed::Packet(relayed))) => {
                    let net = NetHeader {
                        src: relayed.src.ip(),
                        dst: relayed.dst,
                        src_port: relayed.src.port(),
                        tclass: 0,
                        hop_limit: 64,
                        udp_len: (relayed.bytes.len() + 4) as u16,
                        ifindex: 0,
                    };
                    sink(Relayed::Packet(&net, relayed.bytes));
                }
                Ok(Some(client::Relayed::Ring(call, descriptors))) => {
                    if let Some(call) = ring_call(&call, descriptors) {
                        sink(Relayed::Ring(call));
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    log::debug!("relay: {error}");
                    return;
                }
            }
        }
    }

    fn tell(&mut self, call: &RingCall<BorrowedFd<'_>>) {
        let (step, memory) = match call.word {
            RingWord::Offer(memory) => (RingStep::Offer, Some(memory)),
            RingWord::Accept => (RingStep::Accept, None),
        };
        let message = protocol::RingCall { step, lane: call.lane, lease: call.lease, id: call.id, wake: call.wake.0 };
        match self.lease.ring_send(&message, memory) {
            Ok(true) => {}
            Ok(false) => log::debug!("relay: full, lane {} hears nothing of a ring", call.lane),
            Err(error) => log::debug!("relay: {error}"),
        }
    }
}

/// None: an offer without memory, which the service does not let through (or its descriptor found no room here).
fn ring_call(call: &protocol::RingCall, descriptors: Vec<OwnedFd>) -> Option<RingCall<OwnedFd>> {
    let word = match call.step {
        RingStep::Offer => RingWord::Offer(descriptors.into_iter().next()?),
        RingStep::Accept => RingWord::Accept,
    };
    Some(RingCall { lane: call.lane, lease: call.lease, id: call.id, wake: WakeName(call.wake), word })
}

impl std::fmt::Debug for LeaseRelay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaseRelay").field("lane", &self.lease.lane()).finish_non_exhaustive()
    }
}
