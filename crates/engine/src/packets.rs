//! A train taken apart into single packets, for links that know no batches.

use std::ops::Range;

use ferroce_core::mem;
use ferroce_transport::{PathAddr, Payload, Train};
use ferroce_wire::{Headers, NetHeader};

/// Copies the payload of a train, `train.len` bytes.
///
/// # Errors
/// The memory of the message is gone.
pub fn load(train: &Train, into: &mut [u8]) -> Result<(), mem::Fault> {
    match &train.payload {
        Payload::Inline(bytes, from) => {
            let from = *from as usize;
            into.copy_from_slice(&bytes[from..from + into.len()]);
            Ok(())
        }
        Payload::Copy(span) | Payload::Lent(span) => mem::load(span.addr, into),
        Payload::Gather(spans) => {
            let mut rest = into;
            for span in spans {
                let (part, behind) = rest.split_at_mut(span.len as usize);
                mem::load(span.addr, part)?;
                rest = behind;
            }
            Ok(())
        }
    }
}

/// Headers and payload range of packet `index` of a train.
pub fn packet(train: &Train, index: u32) -> (Headers, Range<usize>) {
    let start = index * train.mtu;
    let end = if index + 1 == train.packets { train.len } else { start + train.mtu };
    let headers = match (index, &train.tail) {
        (0, _) => train.head,
        (_, Some(tail)) if index + 1 == train.packets => *tail,
        _ => {
            let mut headers = train.middle();
            headers.bth.psn = headers.bth.psn.add(index);
            headers
        }
    };
    (headers, start as usize..end as usize)
}

/// What a UDP socket would have told about it.
pub fn net_header(path: &PathAddr, headers: &Headers, payload: usize) -> NetHeader {
    let pad = usize::from(headers.bth.pad);
    NetHeader {
        src: path.src,
        dst: path.dst,
        src_port: 0xc000,
        tclass: path.tclass,
        hop_limit: path.hop_limit,
        udp_len: (headers.len() + payload + pad + 4) as u16,
        ifindex: 0,
    }
}
