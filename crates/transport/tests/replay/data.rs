//! The bytes that reached a queue pair, against which its memory is held when a message is complete.

use std::collections::HashMap;

use ferroce_wire::{Headers, Position, Psn, Reth};

/// Newest packets by PSN, from the peer's requester and responder.
#[derive(Default)]
pub(crate) struct Data {
    requests: HashMap<Psn, (Headers, Vec<u8>)>,
    responses: HashMap<Psn, Vec<u8>>,
}

impl Data {
    /// Keeps a packet.
    pub(crate) fn keep(&mut self, headers: &Headers, payload: &[u8]) {
        let psn = headers.bth.psn;
        if !headers.bth.opcode.is_response() {
            self.requests.insert(psn, (*headers, payload.to_vec()));
        } else if let Some(original) = headers.atomic_ack {
            // The word is given back in the host's byte order.
            self.responses.insert(psn, original.to_ne_bytes().to_vec());
        } else if position(headers).is_some() {
            self.responses.insert(psn, payload.to_vec());
        }
    }

    /// The message that ends with `last`, and where a WRITE puts it; `None` if a packet of it did not come.
    pub(crate) fn message(&self, last: Psn) -> Option<(Option<Reth>, Vec<u8>)> {
        let mut psn = last;
        let mut parts = Vec::new();
        loop {
            let (headers, payload) = self.requests.get(&psn)?;
            parts.push(payload.as_slice());
            if matches!(position(headers)?, Position::First | Position::Only) {
                parts.reverse();
                return Some((headers.reth, parts.concat()));
            }
            psn = psn.sub(1);
        }
    }

    /// What answered `count` PSNs from `first` on; `None` if some of it did not come.
    pub(crate) fn answer(&self, first: Psn, count: u32) -> Option<Vec<u8>> {
        let parts: Option<Vec<&[u8]>> =
            (0..count).map(|index| self.responses.get(&first.add(index)).map(Vec::as_slice)).collect();
        Some(parts?.concat())
    }
}

fn position(headers: &Headers) -> Option<Position> {
    Some(headers.bth.opcode.layout()?.position)
}
