//! The ICRC against a bit-by-bit one, against a packet of the Linux kernel, and the search for the Identification.

use std::net::IpAddr;

use ferroce_wire::icrc::{self, ID_TO_BTH, Pseudo, icrc_over, solve_identification, verify};
use ferroce_wire::{GRH_LEN, NetHeader};
use proptest::collection::vec;
use proptest::prelude::*;

/// CRC-32 of Ethernet, one bit at a time.
fn plain_crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |register, byte| {
        (0..8).fold(register ^ u32::from(*byte), |r, _| if r & 1 == 1 { r >> 1 ^ 0xedb8_8320 } else { r >> 1 })
    })
}

/// The definition, step by step: all headers as bytes, masked, in one piece.
fn plain_icrc(net: &NetHeader, identification: u16, packet: &[u8]) -> u32 {
    let mut bytes = vec![0xff; 8];
    let grh = net.grh();
    if net.src.is_ipv4() {
        let mut ip = grh[20..].to_vec();
        ip[4..6].copy_from_slice(&identification.to_be_bytes());
        for masked in [1, 8, 10, 11] {
            ip[masked] = 0xff;
        }
        bytes.extend(ip);
    } else {
        let mut ip = grh;
        ip[0] |= 0x0f;
        ip[1..4].fill(0xff);
        ip[7] = 0xff;
        bytes.extend(ip);
    }
    bytes.extend(net.src_port.to_be_bytes());
    bytes.extend(4791u16.to_be_bytes());
    bytes.extend((net.udp_len + 8).to_be_bytes());
    bytes.extend([0xff, 0xff]);
    let bth = bytes.len();
    bytes.extend(packet);
    if packet.len() >= 12 {
        bytes[bth + 4] = 0xff;
    }
    plain_crc(&bytes)
}

prop_compose! {
    fn net()(v4: bool, src: [u8; 16], dst: [u8; 16], src_port: u16, tclass: u8, hop_limit: u8, udp_len in 0..65_000u16) -> NetHeader {
        let addr = |octets: [u8; 16]| {
            if v4 { IpAddr::from(*octets.first_chunk::<4>().unwrap()) } else { IpAddr::from(octets) }
        };
        NetHeader { src: addr(src), dst: addr(dst), src_port, tclass, hop_limit, udp_len, ifindex: 0 }
    }
}

proptest! {
    #[test]
    fn agrees_with_the_definition(net in net(), identification: u16, packet in vec(any::<u8>(), 0..200)) {
        prop_assert_eq!(icrc_over(&net, identification, &packet), plain_icrc(&net, identification, &packet));
    }

    #[test]
    fn masked_fields_do_not_count(net in net(), identification: u16, packet in vec(any::<u8>(), 12..80), byte: u8, tclass: u8, hop_limit: u8) {
        let mut marked = packet.clone();
        marked[4] = byte;
        let routed = NetHeader { tclass, hop_limit, ..net };
        prop_assert_eq!(icrc_over(&routed, identification, &marked), icrc_over(&net, identification, &packet));
    }

    #[test]
    fn sums_in_pieces(net in net(), identification: u16, packet in vec(any::<u8>(), 12..200), cut in any::<prop::sample::Index>()) {
        let (bth, rest) = packet.split_first_chunk().unwrap();
        let (front, back) = rest.split_at(cut.index(rest.len() + 1));
        let state = Pseudo::new(net.src, net.dst, net.src_port).state(net.udp_len, identification);
        let state = icrc::update(icrc::update(icrc::bth(state, bth), front), back);
        prop_assert_eq!(state, icrc_over(&net, identification, &packet));
        prop_assert_eq!(icrc::finish(state), state.to_le_bytes());
    }

    #[test]
    fn the_identification_is_found(net in net(), identification: u16, packet in vec(any::<u8>(), 0..300)) {
        let received = icrc_over(&net, identification, &packet);
        let expected = if net.src.is_ipv4() { identification } else { 0 };
        prop_assert_eq!(verify(&net, &packet, received), Some(expected));
        if net.src.is_ipv4() {
            let difference = received ^ icrc_over(&net, 0, &packet);
            prop_assert_eq!(solve_identification(difference, ID_TO_BTH + packet.len()), Some(identification));
        }
    }

    #[test]
    fn any_length_and_difference_is_safe(difference: u32, bytes: usize) {
        let _ = solve_identification(difference, bytes);
    }
}

/// Whole space of the field at the lengths where the tables of the search change over, and at the longest packet.
#[test]
fn each_identification_has_one_image() {
    for bytes_after in [0, 22, 253, 254, 255, 509, 510, 65_513] {
        let image = |id: u16| {
            let mut field = vec![0; bytes_after + 2];
            field[..2].copy_from_slice(&id.to_be_bytes());
            crc32fast::hash(&field)
        };
        let zero = image(0);
        for id in (0..=u16::MAX).step_by(if bytes_after > 1000 { 4_369 } else { 257 }) {
            assert_eq!(solve_identification(image(id) ^ zero, bytes_after), Some(id), "{bytes_after} bytes after");
        }
    }
}

/// Of a packet's 2^32 possible ICRCs exactly 2^16 belong to an Identification: the search must refuse the others.
#[test]
fn nothing_else_is_found() {
    let (net, packet, _) = kernel_packet();
    let mut by_low_half = vec![None; 1 << 16];
    for id in 0..=u16::MAX {
        let icrc = icrc_over(&net, id, &packet);
        by_low_half[usize::from(icrc as u16)] = Some((icrc, id));
    }
    let mut refused = 0;
    for (low, image) in by_low_half.iter().enumerate() {
        let Some((icrc, id)) = *image else { continue };
        assert_eq!(verify(&net, &packet, icrc), Some(id));
        for damage in [1 << 16, 1 << 31, 0x5555_0000, 0xffff_0000] {
            assert_eq!(verify(&net, &packet, icrc ^ damage), None, "low half {low:#x}");
            refused += 1;
        }
    }
    // At this length every low half occurs once, so what shares it and differs above cannot be right.
    assert_eq!(refused, 4 << 16);
}

/// A single damaged bit anywhere from BTH to pad is found in spite of the freedom that the unknown Identification gives.
#[test]
fn single_bit_errors_are_found() {
    let (net, packet, received) = kernel_packet();
    for bit in 0..8 * packet.len() {
        if bit / 8 == 4 {
            continue; // masked
        }
        let mut damaged = packet.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(verify(&net, &damaged, received), None, "bit {bit}");
    }
    for bit in 0..32 {
        assert_eq!(verify(&net, &packet, received ^ 1 << bit), None, "bit {bit} of the ICRC");
    }
}

/// An ATOMIC WRITE by kernel rxe 6.12: Identification 0x51db.
fn kernel_packet() -> (NetHeader, Vec<u8>, u32) {
    let net = NetHeader {
        src: [10, 88, 0, 1].into(),
        dst: [10, 88, 0, 2].into(),
        src_port: 53250,
        tclass: 0,
        hop_limit: 64,
        udp_len: 40,
        ifindex: 0,
    };
    let packet = [
        0x1d, 0x00, 0xff, 0xff, 0x00, 0x00, 0x00, 0xc0, 0x80, 0x00, 0x10, 0x00, //
        0x00, 0x00, 0x7f, 0x0a, 0x9b, 0xbd, 0x40, 0x00, 0x00, 0x00, 0x68, 0x21, 0x00, 0x00, 0x00, 0x08, //
        0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,
    ];
    (net, packet.to_vec(), 0x3ccb_4d07)
}

#[test]
fn a_packet_of_the_kernel() {
    let (net, packet, received) = kernel_packet();
    assert_eq!(icrc_over(&net, 0x51db, &packet), received);
    assert_eq!(verify(&net, &packet, received), Some(0x51db));
}

#[test]
fn grh_of_ipv4_is_its_header() {
    let (net, ..) = kernel_packet();
    let grh = net.grh();
    assert_eq!(grh[..20], [0; 20]);
    // As captured, save Identification 0 and the checksum that follows from it.
    assert_eq!(grh[20..], [0x45, 0, 0, 68, 0, 0, 0x40, 0, 64, 17, 0x25, 0xf7, 10, 88, 0, 1, 10, 88, 0, 2]);
}

#[test]
fn grh_of_ipv6_is_its_header() {
    let net = NetHeader {
        src: "fd00:88::1".parse().unwrap(),
        dst: "fd00:88::2".parse().unwrap(),
        src_port: 1,
        tclass: 0x68,
        hop_limit: 7,
        udp_len: 0x120,
        ifindex: 0,
    };
    let mut expected = [0; GRH_LEN];
    expected[..8].copy_from_slice(&[0x66, 0x80, 0, 0, 0x01, 0x28, 17, 7]);
    (expected[8], expected[11], expected[23]) = (0xfd, 0x88, 1);
    (expected[24], expected[27], expected[39]) = (0xfd, 0x88, 2);
    assert_eq!(net.grh(), expected);
}

proptest! {
    /// The sum over a right IPv4 header is all ones (RFC 1071).
    #[test]
    fn grh_checksum_is_right(net in net()) {
        let grh = net.grh();
        if net.src.is_ipv4() {
            let sum: u32 = grh[20..].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
            prop_assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        }
    }
}
