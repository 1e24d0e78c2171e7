// What must hold for any bytes that come as a packet. Shared by the property test, the replay of the fuzz corpus and the fuzz target.

use std::net::{Ipv4Addr, Ipv6Addr};

use ferroce_wire::{Headers, ICRC_LEN, MAX_HEADER_LEN, NetHeader, icrc};

/// Parses, prints, emits and sums a UDP payload. Panics if anything is not as it must be.
pub(crate) fn any_bytes(udp_payload: &[u8]) {
    let packet = udp_payload.split_last_chunk::<ICRC_LEN>().map_or(udp_payload, |(packet, _)| packet);
    headers(udp_payload);
    headers(packet);

    let udp_len = udp_payload.len().min(usize::from(u16::MAX)) as u16;
    let v4 = (Ipv4Addr::new(10, 0, 0, 1).into(), Ipv4Addr::new(10, 0, 0, 2).into());
    let v6 = (Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).into(), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2).into());
    for (src, dst) in [v4, v6] {
        let net = NetHeader { src, dst, src_port: 49_152, tclass: 0, hop_limit: 64, udp_len, ifindex: 0 };
        let received = udp_payload.last_chunk::<ICRC_LEN>().map_or(0, |icrc| u32::from_le_bytes(*icrc));
        let right = icrc::icrc_over(&net, 0, packet);
        match icrc::verify(&net, packet, received) {
            Some(identification) => assert_eq!(icrc::icrc_over(&net, identification, packet), received),
            None => assert_ne!(right, received),
        }
        assert_eq!(icrc::verify(&net, packet, right), Some(0));
    }
}

fn headers(packet: &[u8]) {
    match Headers::parse(packet) {
        Ok((headers, payload)) => {
            let mut emitted = [0xee; MAX_HEADER_LEN];
            let emitted = &mut emitted[..headers.len()];
            headers.emit(emitted);
            assert_eq!(emitted, &packet[..headers.len()], "{headers}");
            assert_eq!(payload.start, headers.len(), "{headers}");
            assert_eq!(payload.end + usize::from(headers.bth.pad), packet.len(), "{headers}");
            assert!(headers.matches_opcode(), "{headers}");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
