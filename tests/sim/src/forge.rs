//! Frames that nobody honest sent: with a good ICRC, so that only the transport stands between them and memory.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ferroce_wire::{Headers, ICRC_LEN, Opcode};

use crate::frame::{Damage, Datagram, seal};
use crate::random::Random;

/// Turns the one frame of `datagram` into something that looks like its sender's, but is not what it sent: bits flipped, fields
/// replaced, cut short or longer. It stays addressed to the same queue pair.
pub(crate) fn forge(datagram: &mut Datagram, random: &mut Random) {
    let frame = datagram.frames[0];
    let mut bytes = datagram.data[..(frame.len as usize) - ICRC_LEN].to_vec();
    let dest: [u8; 3] = bytes[5..8].try_into().expect("three bytes of a destination QPN");
    match random.below(6) {
        0 => flip_bits(&mut bytes, random),
        1 => flip_header_bits(&mut bytes, random),
        2 => {
            // XRC has the operations of RC in a class of its own.
            let class = if bytes[0] >> 5 == 5 { 0xa0 } else { 0 };
            bytes[0] = class | random.pick(&OPCODES).0;
        }
        3 => {
            let psn = u32::from_be_bytes([0, bytes[9], bytes[10], bytes[11]]);
            let by = random.pick(&[1, 2, 3, 7, 16, 0x00ff_ffff, 0x00ff_fffe, 0x0080_0000, 1 << 22]);
            bytes[9..12].copy_from_slice(&(psn.wrapping_add(by)).to_be_bytes()[1..]);
        }
        4 => resize(&mut bytes, random),
        _ => fields(&mut bytes, random),
    }
    bytes[5..8].copy_from_slice(&dest);
    finish(datagram, bytes);
}

/// Turns the one frame of `datagram` into one that every queue pair must refuse without any effect.
pub(crate) fn estrange(datagram: &mut Datagram, random: &mut Random) {
    let frame = datagram.frames[0];
    let mut bytes = datagram.data[..(frame.len as usize) - ICRC_LEN].to_vec();
    let datagrams = bytes[0] >> 5 == 3;
    match random.below(if datagrams { 4 } else { 5 }) {
        // Not the P_Key.
        0 => bytes[2..4].copy_from_slice(&random.pick(&[0u16, 0x1234, 0x7ffe, 0x8000]).to_be_bytes()),
        // Not the version.
        1 => bytes[1] |= random.between(1, 15) as u8,
        // Not the transport: CNP, XRC, RD, or another type's.
        2 => bytes[0] = (bytes[0] & 0x1f) | (bytes[0] >> 5).wrapping_add(random.between(1, 7) as u8) << 5,
        // UD: not the Q_Key. RC and UC: a queue pair that does not exist.
        3 if datagrams => bytes[12] ^= 0x40,
        3 => bytes[5..8].copy_from_slice(&[0xff, 0xff, 0xf0 | random.below(16) as u8]),
        // Not the peer's address.
        _ => datagram.net.src = stranger(datagram.net.src),
    }
    finish(datagram, bytes);
}

fn finish(datagram: &mut Datagram, mut bytes: Vec<u8>) {
    bytes.extend_from_slice(&[0; ICRC_LEN]);
    let frame = &mut datagram.frames[0];
    frame.damage = Damage::Forged;
    frame.len = bytes.len() as u32;
    seal(&datagram.net, frame.id, &mut bytes);
    datagram.data = bytes;
}

fn stranger(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::new(203, 0, 113, 66)),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0x666, 0, 0, 0, 0, 1)),
    }
}

const OPCODES: [Opcode; 16] = [
    Opcode::RC_SEND_FIRST,
    Opcode::RC_SEND_MIDDLE,
    Opcode::RC_SEND_LAST,
    Opcode::RC_SEND_ONLY,
    Opcode::RC_SEND_ONLY_INV,
    Opcode::RC_WRITE_FIRST,
    Opcode::RC_WRITE_LAST_IMM,
    Opcode::RC_WRITE_ONLY,
    Opcode::RC_READ_REQUEST,
    Opcode::RC_READ_RESPONSE_FIRST,
    Opcode::RC_READ_RESPONSE_LAST,
    Opcode::RC_READ_RESPONSE_ONLY,
    Opcode::RC_ACKNOWLEDGE,
    Opcode::RC_ATOMIC_ACKNOWLEDGE,
    Opcode::RC_FETCH_ADD,
    Opcode::RC_RESYNC,
];

fn flip_bits(bytes: &mut [u8], random: &mut Random) {
    for _ in 0..random.between(1, 8) {
        let at = random.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << random.below(8);
    }
}

fn flip_header_bits(bytes: &mut [u8], random: &mut Random) {
    let end = bytes.len().min(40);
    flip_bits(&mut bytes[..end], random);
}

fn resize(bytes: &mut Vec<u8>, random: &mut Random) {
    let len = match random.below(3) {
        0 => random.between(12, bytes.len() as u64),
        1 => bytes.len() as u64 + random.between(1, 64),
        _ => bytes.len() as u64 + 4 * random.between(1, 1100),
    };
    bytes.resize(len as usize, 0x5a);
}

/// Replaces a field of an extended header by something extreme.
fn fields(bytes: &mut [u8], random: &mut Random) {
    let Ok((headers, _)) = Headers::parse(bytes) else { return };
    let mut forged = headers;
    let extreme = random.pick(&[0, 1, 7, 0x7fff_ffff, 0x8000_0000, 0x8000_0001, u32::MAX - 3, u32::MAX]);
    if let Some(reth) = &mut forged.reth {
        match random.below(3) {
            0 => reth.len = extreme,
            1 => reth.va = reth.va.wrapping_add(random.pick(&[1, 4096, u64::MAX - 7, 1 << 63])),
            _ => reth.rkey ^= 1 << random.below(32),
        }
    }
    if let Some(atomic) = &mut forged.atomic {
        match random.below(3) {
            0 => atomic.va = atomic.va.wrapping_add(random.pick(&[1, 8, 4, u64::MAX - 7])),
            1 => atomic.rkey ^= 1 << random.below(32),
            _ => atomic.swap_add = u64::from(extreme),
        }
    }
    if let Some(aeth) = &mut forged.aeth {
        aeth.syndrome.0 = random.next() as u8;
        aeth.msn = extreme & 0x00ff_ffff;
    }
    if let Some(rkey) = &mut forged.ieth {
        *rkey ^= 1 << random.below(32);
    }
    forged.bth.pad = random.below(4) as u8;
    forged.bth.ack_req = random.percent(50);
    forged.emit(bytes);
}
