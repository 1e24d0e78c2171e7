//! From trains to packets, as a link does it.

use std::net::IpAddr;

use ferroce_wire::{Headers, NetHeader};

use super::memory::SimMemory;
use crate::host::{MemoryError, Payload, Train};
use crate::verbs::PathAddr;

/// A packet between two simulated hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimPacket {
    /// Its headers.
    pub headers: Headers,
    /// Its payload without pad.
    pub payload: Vec<u8>,
    /// Its IP and UDP facts.
    pub net: NetHeader,
}

/// Cuts a train into its packets. Checks what the transport promises of trains.
pub fn explode(train: &Train, path: &PathAddr, memory: &SimMemory) -> Result<Vec<SimPacket>, MemoryError> {
    assert!(train.is_within_limits(), "{} packets of {} bytes", train.packets, train.len);
    assert_eq!(train.tail.is_some(), train.packets > 1);
    let path = train.path.as_deref().unwrap_or(path);
    let bytes = payload(train, memory)?;
    assert_eq!(bytes.len(), train.len as usize, "the payload is as long as the train says");
    let mut rest = bytes.as_slice();
    let mut packets = Vec::with_capacity(train.packets as usize);
    for index in 0..train.packets {
        let last = index + 1 == train.packets;
        let headers = headers(train, index);
        assert!(headers.matches_opcode(), "{headers:?}");
        let (this, later) = rest.split_at(if last { rest.len() } else { train.mtu as usize });
        rest = later;
        assert_eq!((this.len() + usize::from(headers.bth.pad)) % 4, 0, "pad of {headers:?}");
        packets.push(SimPacket { headers, payload: this.to_vec(), net: net(path, this.len()) });
    }
    Ok(packets)
}

fn headers(train: &Train, index: u32) -> Headers {
    let headers = match &train.tail {
        Some(tail) if index + 1 == train.packets => *tail,
        _ if index == 0 => train.head,
        _ => {
            let mut headers = train.middle();
            headers.bth.psn = headers.bth.psn.add(index);
            headers
        }
    };
    assert_eq!(headers.bth.psn, train.head.bth.psn.add(index), "PSNs of a train count up");
    headers
}

fn payload(train: &Train, memory: &SimMemory) -> Result<Vec<u8>, MemoryError> {
    match &train.payload {
        Payload::Gather(spans) => {
            let mut bytes = Vec::with_capacity(train.len as usize);
            for span in spans {
                bytes.extend_from_slice(memory.load(*span)?);
            }
            Ok(bytes)
        }
        Payload::Copy(span) | Payload::Lent(span) => Ok(memory.load(*span)?.to_vec()),
        Payload::Inline(bytes, offset) => Ok(bytes[*offset as usize..(*offset + train.len) as usize].to_vec()),
    }
}

fn net(path: &PathAddr, payload: usize) -> NetHeader {
    let canonical = |addr: IpAddr| addr.to_canonical();
    NetHeader {
        src: canonical(path.src),
        dst: canonical(path.dst),
        src_port: 0xc000,
        tclass: path.tclass,
        hop_limit: path.hop_limit,
        udp_len: payload as u16,
        ifindex: 0,
    }
}
