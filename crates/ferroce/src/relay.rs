//! The engine's relay over the lease's socket.

use std::net::SocketAddr;
use std::sync::Arc;

use ferroce_engine::Relay;
use ferroce_service::client::{LaneLease, Relayed};
use ferroce_wire::NetHeader;

/// Packets taken from the service in one go.
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

    fn receive(&mut self, sink: &mut dyn FnMut(&NetHeader, &[u8])) {
        for _ in 0..RECEIVE_BUDGET {
            match self.lease.relay_recv(&mut self.buffer) {
                Ok(Some(Relayed::Packet(relayed))) => {
                    let net = NetHeader {
                        src: relayed.src.ip(),
                        dst: relayed.dst,
                        src_port: relayed.src.port(),
                        tclass: 0,
                        hop_limit: 64,
                        udp_len: (relayed.bytes.len() + 4) as u16,
                    };
                    sink(&net, relayed.bytes);
                }
                Ok(Some(Relayed::Ring(..))) => {}
                Ok(None) => return,
                Err(error) => {
                    log::debug!("relay: {error}");
                    return;
                }
            }
        }
    }
}

impl std::fmt::Debug for LeaseRelay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaseRelay").field("lane", &self.lease.lane()).finish_non_exhaustive()
    }
}
