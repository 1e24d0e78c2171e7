//! The invariant CRC of RoCEv2 (IBA 7.8.1, annex A17.3.3).
//!
//! Ethernet's CRC-32 over eight bytes 0xff, the IP and UDP headers and all from BTH to pad, with the fields that a router may
//! change read as ones: IPv4 TOS, TTL and header checksum; IPv6 traffic class, flow label and hop limit; the UDP checksum; byte 4
//! of the BTH. The four bytes of the result follow the pad in little-endian order.
//!
//! A running sum is a `u32` as `crc32fast` has it: what the CRC would be if the packet ended here. So a sum can be taken in pieces:
//!
//! ```
//! use ferroce_wire::icrc::{self, Pseudo};
//! # let (src, dst) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
//! # let (bth, payload) = ([0; 12], [1, 2, 3, 4]);
//! let path = Pseudo::new(src, dst, 49152);      // once a path
//! let state = path.state(12 + 4 + 4, 0);        // a packet: UDP payload bytes, IPv4 Identification
//! let state = icrc::bth(state, &bth);
//! let state = icrc::update(state, &payload);
//! let trailer = icrc::finish(state);
//! ```
//!
//! # The Identification of IPv4
//! The sum covers it, but a UDP socket does not tell a receiver its value. CRC is linear, so the difference between the ICRC
//! received and the one computed for Identification 0 must be the image of a single 16-bit number; [`solve_identification`] finds
//! it. Of random damage one in 2^16 then passes, where a known Identification lets pass one in 2^32.

use core::net::IpAddr;

use crate::net::{Addresses, DONT_FRAGMENT, IPV4_HEADER_LEN, PROTOCOL_UDP, UDP_HEADER_LEN, addresses};
use crate::{BTH_LEN, NetHeader, UDP_PORT};

/// Bytes from behind the IPv4 Identification to the BTH: the rest of the IPv4 header and the UDP header.
pub const ID_TO_BTH: usize = 14 + UDP_HEADER_LEN as usize;

/// The sum up to the BTH for one path: addresses and source port are in, length and Identification are added per packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pseudo {
    /// The sum with all lengths and the Identification zero.
    base: u32,
    v4: bool,
}

impl Pseudo {
    /// A path. IPv4 packets have Don't Fragment set, no options, and are whole. Addresses of two families are both taken as IPv6.
    pub fn new(src: IpAddr, dst: IpAddr, src_port: u16) -> Pseudo {
        match addresses(src, dst) {
            Addresses::V4(src, dst) => {
                let mut ip = [0; 20];
                ip[0] = 0x45;
                ip[1] = 0xff;
                ip[6..8].copy_from_slice(&DONT_FRAGMENT.to_be_bytes());
                ip[8] = 0xff;
                ip[9] = PROTOCOL_UDP;
                ip[10..12].fill(0xff);
                ip[12..16].copy_from_slice(&src.octets());
                ip[16..20].copy_from_slice(&dst.octets());
                Pseudo { base: update(update(ONES, &ip), &udp(src_port)), v4: true }
            }
            Addresses::V6(src, dst) => {
                let mut ip = [0; 40];
                ip[0] = 0x6f;
                ip[1..4].fill(0xff);
                ip[6] = PROTOCOL_UDP;
                ip[7] = 0xff;
                ip[8..24].copy_from_slice(&src.octets());
                ip[24..40].copy_from_slice(&dst.octets());
                Pseudo { base: update(update(ONES, &ip), &udp(src_port)), v4: false }
            }
        }
    }

    /// The running sum before the BTH of a packet with `udp_len` bytes of UDP payload (BTH to ICRC). IPv6 has no Identification
    /// and ignores it. A few nanoseconds: senders call this per packet.
    pub const fn state(&self, udp_len: u16, identification: u16) -> u32 {
        let udp = udp_len.saturating_add(UDP_HEADER_LEN);
        let state = self.base ^ image(udp, &UDP_LENGTH);
        if self.v4 {
            let total = udp.saturating_add(IPV4_HEADER_LEN);
            state ^ image(total, &IPV4_TOTAL_LENGTH) ^ image(identification, &IPV4_IDENTIFICATION)
        } else {
            state ^ image(udp, &IPV6_PAYLOAD_LENGTH)
        }
    }
}

/// The UDP header with length zero and the checksum masked.
fn udp(src_port: u16) -> [u8; 8] {
    let [s0, s1] = src_port.to_be_bytes();
    let [d0, d1] = UDP_PORT.to_be_bytes();
    [s0, s1, d0, d1, 0, 0, 0xff, 0xff]
}

/// Adds bytes to a running sum.
pub fn update(state: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(state);
    hasher.update(bytes);
    hasher.finalize()
}

/// Adds a BTH, with its byte 4 (FECN, BECN, reserved) masked.
pub fn bth(state: u32, bth: &[u8; BTH_LEN]) -> u32 {
    let mut masked = *bth;
    masked[4] = 0xff;
    update(state, &masked)
}

/// The ICRC as it stands on the wire.
pub const fn finish(state: u32) -> [u8; 4] {
    state.to_le_bytes()
}

/// The ICRC of a packet: `packet` is the UDP payload without ICRC. `net.udp_len` counts as it is given, so that a UDP length
/// that contradicts the packet does not verify.
pub fn icrc_over(net: &NetHeader, identification: u16, packet: &[u8]) -> u32 {
    let state = Pseudo::new(net.src, net.dst, net.src_port).state(net.udp_len, identification);
    body(state, packet)
}

/// Adds everything from the BTH on.
pub fn body(state: u32, packet: &[u8]) -> u32 {
    match packet.split_first_chunk::<BTH_LEN>() {
        Some((header, rest)) => update(bth(state, header), rest),
        // No BTH, hence nothing to mask that a router could have changed; the parser refuses it.
        None => update(state, packet),
    }
}

/// Checks a received packet (`packet` as for [`icrc_over`], `received` read as little-endian) and gives its Identification: over
/// IPv4 the one that makes the ICRC right, over IPv6 0. `None` if there is no such value, so the packet is damaged.
///
/// Over IPv4, a caller who knows what the Identification must be has the stronger check in comparing.
pub fn verify(net: &NetHeader, packet: &[u8], received: u32) -> Option<u16> {
    let path = Pseudo::new(net.src, net.dst, net.src_port);
    let difference = body(path.state(net.udp_len, 0), packet) ^ received;
    if path.v4 { solve_identification(difference, ID_TO_BTH + packet.len()) } else { (difference == 0).then_some(0) }
}

/// Finds the IPv4 Identification that explains `difference`, the exclusive or of the ICRC received and the one computed with
/// Identification 0, when `bytes_after_id` summed bytes follow the field (the constant [`ID_TO_BTH`] and the packet from BTH to
/// pad). `None` if no value does.
///
/// Takes well below a microsecond: dividing by x^8 once a byte undoes those bytes, and two look-ups make one division of any number.
pub const fn solve_identification(difference: u32, bytes_after_id: usize) -> Option<u16> {
    // Back to the register as it was before the field's own two bytes went in; there they lie bare in the low half.
    let bytes = bytes_after_id.saturating_add(2);
    if bytes >= FINE.len() * COARSE.len() {
        return None;
    }
    let field = multiply(multiply(difference, FINE[bytes % FINE.len()]), COARSE[bytes / FINE.len()]);
    if field > 0xffff { None } else { Some((field as u16).swap_bytes()) }
}

// Arithmetic modulo the CRC polynomial. Bits are reflected, as in the CRC itself: the top bit of a u32 is the coefficient of x^0.

/// The polynomial without its x^32.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// 1.
const ONE: u32 = 1 << 31;

const fn times_x(a: u32) -> u32 {
    (a >> 1) ^ if a & 1 == 1 { POLYNOMIAL } else { 0 }
}

/// The polynomial has a term x^0, so x has an inverse.
const fn divided_by_x(a: u32) -> u32 {
    if a & ONE != 0 { (a ^ POLYNOMIAL) << 1 | 1 } else { a << 1 }
}

const fn multiply(a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut power = b;
    let mut bit = 0;
    while bit < 32 {
        // All ones if `a` has this coefficient: without a branch, since its bits are random.
        product ^= power & (a << bit).cast_signed().wrapping_shr(31).cast_unsigned();
        power = (power >> 1) ^ (POLYNOMIAL & (power & 1).wrapping_neg());
        bit += 1;
    }
    product
}

/// x^(-8 n) for n below 256.
static FINE: [u32; 256] = inverse_powers(1);

/// x^(-8 * 256 n): with [`FINE`] all lengths that an IP packet can have, and one page more.
static COARSE: [u32; 257] = inverse_powers(256);

const fn inverse_powers<const N: usize>(bytes: usize) -> [u32; N] {
    let mut step = ONE;
    let mut i = 0;
    while i < 8 * bytes {
        step = divided_by_x(step);
        i += 1;
    }
    let mut powers = [ONE; N];
    let mut i = 1;
    while i < N {
        powers[i] = multiply(powers[i - 1], step);
        i += 1;
    }
    powers
}

/// The running sum after eight bytes 0xff.
const ONES: u32 = {
    let mut register = u32::MAX;
    let mut byte = 0;
    while byte < 8 {
        register ^= 0xff;
        let mut bit = 0;
        while bit < 8 {
            register = times_x(register);
            bit += 1;
        }
        byte += 1;
    }
    !register
};

/// What each bit of a big-endian 16-bit field, the lowest first, changes in a sum that goes on for some bytes after the field.
type Images = [u32; 16];

const UDP_LENGTH: Images = images(2);
const IPV4_TOTAL_LENGTH: Images = images(ID_TO_BTH + 2);
const IPV4_IDENTIFICATION: Images = images(ID_TO_BTH);
const IPV6_PAYLOAD_LENGTH: Images = images(34 + UDP_HEADER_LEN as usize);

const fn images(bytes_after: usize) -> Images {
    let mut images = [0; 16];
    let mut bit = 0;
    while bit < 16 {
        let mut register = (1u16 << bit).swap_bytes() as u32;
        let mut i = 0;
        while i < 8 * (2 + bytes_after) {
            register = times_x(register);
            i += 1;
        }
        images[bit] = register;
        bit += 1;
    }
    images
}

const fn image(value: u16, images: &Images) -> u32 {
    let mut sum = 0;
    let mut bit = 0;
    while bit < 16 {
        sum ^= images[bit] & ((value >> bit & 1) as u32).wrapping_neg();
        bit += 1;
    }
    sum
}
