//! `ingest`: recorded packets of kernel rxe come through, any bytes come to nothing worse than a counter.

mod common;

use common::*;
use ferroce_link::LinkStats;
use ferroce_link::udp::ingest;
use ferroce_testkit::{Datagram, IcrcNote, Recording};
use ferroce_wire::NetHeader;
use ferroce_wire::icrc::{self, Pseudo};
use proptest::prelude::*;

fn net(datagram: &Datagram) -> NetHeader {
    NetHeader {
        src: datagram.src,
        dst: datagram.dst,
        src_port: datagram.src_port,
        tclass: datagram.tclass,
        hop_limit: datagram.hop_limit,
        udp_len: 0,
        ifindex: 0,
    }
}

fn take(net: &NetHeader, segment: usize, bytes: &[u8]) -> (Vec<Got>, LinkStats) {
    let (mut got, mut stats) = (Vec::new(), LinkStats::default());
    ingest(net, segment, bytes, &mut stats, &mut |net, headers, payload| {
        got.push(Got { net: *net, headers: *headers, payload: payload.to_vec() });
    });
    (got, stats)
}

/// What became of every packet is counted exactly once.
fn assert_accounted(delivered: usize, stats: &LinkStats) {
    let bad = stats.rx_too_short + stats.rx_icrc_errors + stats.rx_bad_version + stats.rx_bad_pad;
    assert_eq!(delivered as u64 + bad, stats.rx_packets);
}

/// Kernel rxe counts its Identifications on, so that nearly all have to be solved for.
#[test]
fn recordings_of_rxe_come_through() {
    let (mut right, mut wrong) = (0, 0);
    for recording in Recording::all().unwrap() {
        for frame in &recording.frames {
            let datagram = &frame.datagram;
            let place = format!("{}, frame {}", recording.name, frame.number);
            let (got, stats) = take(&net(datagram), 0, &datagram.payload);
            assert_accounted(got.len(), &stats);
            if frame.icrc == IcrcNote::Right {
                assert_eq!(stats.rx_icrc_errors, 0, "{place}");
                right += 1;
            } else {
                assert_eq!(got, [], "{place}");
                wrong += 1;
            }
        }
    }
    assert!(right > 1900 && wrong > 0, "{right} right, {wrong} wrong");
}

/// A packet with a payload, as it is on the wire.
fn packet(net: &NetHeader, identification: u16, psn: u32, payload: &[u8]) -> Vec<u8> {
    let train = train(Kind::Send, 5, psn, 4096, payload.len() as u32, spans(&[payload]));
    let mut packet = vec![0; train.head.len()];
    train.head.emit(&mut packet);
    packet.extend(payload);
    packet.extend(&[0; 3][..train.head.bth.pad.into()]);
    sealed(net, identification, packet)
}

/// With its ICRC.
fn sealed(net: &NetHeader, identification: u16, mut packet: Vec<u8>) -> Vec<u8> {
    let state = Pseudo::new(net.src, net.dst, net.src_port).state(packet.len() as u16 + 4, identification);
    let sum = icrc::body(state, &packet);
    packet.extend(icrc::finish(sum));
    packet
}

fn any_net() -> impl Strategy<Value = NetHeader> {
    let v4 = any::<([u8; 4], [u8; 4])>().prop_map(|(src, dst)| (src.into(), dst.into()));
    let v6 = any::<([u8; 16], [u8; 16])>().prop_map(|(src, dst)| (src.into(), dst.into()));
    (prop_oneof![v4, v6], any::<u16>(), any::<u8>(), any::<u8>()).prop_map(
        |((src, dst), src_port, tclass, hop_limit)| NetHeader {
            src,
            dst,
            src_port,
            tclass,
            hop_limit,
            udp_len: 0,
            ifindex: 0,
        },
    )
}

proptest! {
    #[test]
    fn any_bytes_are_survived(
        net in any_net(),
        segment in prop_oneof![0..200usize, any::<usize>()],
        bytes in proptest::collection::vec(any::<u8>(), 0..2000),
    ) {
        let (got, stats) = take(&net, segment, &bytes);
        assert_accounted(got.len(), &stats);
        prop_assert_eq!(stats.rx_bytes, bytes.len() as u64);
    }

    /// A batch with whatever Identifications, one packet of it damaged: the others come through, in order.
    #[test]
    fn one_damaged_packet_harms_no_other(
        net in any_net(),
        first in any::<u16>(),
        step in prop_oneof![Just(0u16), Just(1), any::<u16>()],
        packets in 1..40u32,
        size in 0..300usize,
        victim in any::<prop::sample::Index>(),
        bit in any::<prop::sample::Index>(),
    ) {
        let payload = pattern(size, 3);
        let identification = |i: u32| first.wrapping_add(step.wrapping_mul(i as u16));
        let wire: Vec<_> = (0..packets).map(|i| packet(&net, identification(i), i, &payload)).collect();
        let segment = wire[0].len();
        let mut bytes = wire.concat();
        let (got, stats) = take(&net, segment, &bytes);
        prop_assert_eq!(got.len(), packets as usize);
        assert_accounted(got.len(), &stats);

        let victim = victim.index(packets as usize);
        let bit = bit.index(segment * 8);
        prop_assume!(bit / 8 != 4); // masked: the ICRC does not cover it
        bytes[victim * segment + bit / 8] ^= 1 << (bit % 8);
        let (got, stats) = take(&net, segment, &bytes);
        assert_accounted(got.len(), &stats);
        prop_assert_eq!(stats.rx_icrc_errors, 1);
        let psns: Vec<_> = got.iter().map(|got| got.headers.bth.psn.get()).collect();
        let want: Vec<_> = (0..packets).filter(|i| *i as usize != victim).collect();
        prop_assert_eq!(psns, want);
        prop_assert!(got.iter().all(|got| got.payload == payload));
    }
}

/// Packets are counted in words: one that pad does not fill up is no packet, whatever its PadCnt says.
#[test]
fn packets_that_are_not_filled_up_to_words_are_dropped() {
    let net = NetHeader { src: V4, dst: V4, src_port: 50_000, tclass: 0, hop_limit: 64, udp_len: 0, ifindex: 0 };
    for len in 0..16 {
        let mut body = packet(&net, 0, 7, &[])[..12].to_vec();
        body.extend(&pattern(len, 3));
        let (got, stats) = take(&net, 0, &sealed(&net, 0, body));
        assert_eq!((got.len(), stats.rx_bad_pad), if len % 4 == 0 { (1, 0) } else { (0, 1) }, "{len} bytes");
    }
}

/// Identifications that can be foretold are told apart from those that had to be solved for: the check is stronger.
#[test]
fn foretold_identifications_are_counted_as_known() {
    let net = NetHeader { src: V4, dst: V4, src_port: 50_000, tclass: 0, hop_limit: 64, udp_len: 0, ifindex: 0 };
    let batch = |identifications: &[u16]| -> Vec<u8> {
        identifications.iter().enumerate().flat_map(|(i, id)| packet(&net, *id, i as u32, &[7; 64])).collect()
    };
    let segment = packet(&net, 0, 0, &[7; 64]).len();
    for (identifications, known) in [
        (&[0, 1, 2, 3][..], 4), // a batch of our own
        (&[0, 0, 0], 3),        // single packets of our own, merged by GRO
        (&[2, 3, 4], 2),        // the rest of a batch that GRO did not get whole
        (&[900, 901, 902], 2),  // a peer that counts on
        (&[7, 99, 4], 0),
    ] {
        let (got, stats) = take(&net, segment, &batch(identifications));
        assert_eq!(got.len(), identifications.len());
        assert_eq!(
            (stats.rx_icrc_known, stats.rx_icrc_solved),
            (known, got.len() as u64 - known),
            "{identifications:?}"
        );
    }
}
