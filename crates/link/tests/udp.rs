//! Trains over real sockets of the loopback interface.

mod common;

use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;

use common::*;
use ferroce_link::udp::Capabilities;
use ferroce_link::{Link, SendError, UdpLink, UdpOptions};
use ferroce_transport::{PathAddr, Payload, Span};

fn options() -> [UdpOptions; 3] {
    let plain = UdpOptions::default();
    [plain.clone(), UdpOptions { gso: false, ..plain.clone() }, UdpOptions { gro: false, ..plain }]
}

/// Every kind of message and payload in odd sizes, IPv4 and IPv6, with and without batches.
#[test]
fn trains_arrive_as_sent() {
    for addr in [V4, V6] {
        for options in options() {
            let mut pair = Pair::with_options(addr, &options);
            for kind in KINDS {
                for (mtu, len) in sizes() {
                    check_train(&mut pair, kind, mtu, len);
                }
            }
            let (tx, rx) = (pair.tx.stats(), pair.rx.stats());
            assert_clean(&tx);
            assert_clean(&rx);
            assert_eq!((tx.tx_packets, tx.tx_bytes), (rx.rx_packets, rx.rx_bytes));
            assert_eq!(rx.rx_icrc_known, rx.rx_packets, "an Identification was not as foretold");
            let batches = options.gso && Capabilities::probe().gso_segments > 0;
            assert_eq!(tx.tx_gso_batches > 0, batches);
        }
    }
}

fn sizes() -> impl Iterator<Item = (u32, u32)> {
    let of_mtu = |mtu: u32| {
        [0, 1, 3, 63, 64, 511, 512, 513, mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu - 1, 5 * mtu].map(|len| (mtu, len))
    };
    let long = [(1024, 61_440), (1024, 61_439), (4096, 61_440), (256, 15_360)];
    [256, 1024, 4096].into_iter().flat_map(of_mtu).chain(long)
}

fn check_train(pair: &mut Pair, kind: Kind, mtu: u32, len: u32) {
    let data = pattern(len as usize, len);
    let (a, b) = data.split_at(data.len() / 3);
    let (b, c) = b.split_at(b.len().min(7));
    let inline: Arc<[u8]> = [&[0xee; 5], &data[..]].concat().into();
    let payloads =
        [spans(&[&data]), spans(&[a, &[], b, c, &[]]), Payload::Copy(span(&data)), Payload::Inline(inline, 5)];
    for payload in payloads {
        let train = train(kind, 0x01_0203, 0xff_fff0, mtu, len, payload);
        pair.send(&train);
        pair.flush();
        let got = pair.expect(train.packets as usize);
        assert_is_train(&got, &train, &data);
        for packet in &got {
            assert_eq!((packet.net.src, packet.net.dst), (pair.path.src, pair.path.dst));
        }
    }
}

/// Small messages to one lane share a batch; another lane gets another source port.
#[test]
fn messages_share_batches_but_lanes_do_not() {
    let mut pair = Pair::new(V4);
    let data = pattern(64, 3);
    for i in 0..40 {
        pair.send(&train(Kind::Write, 5, i, 1024, 64, spans(&[&data])));
        pair.send(&train(Kind::Write, 5 | 1 << 14, i, 1024, 64, spans(&[&data])));
        pair.send(&ack(5, i));
    }
    pair.flush();
    let got = pair.expect(120);
    assert!(got.iter().all(|packet| packet.payload == if packet.headers.aeth.is_some() { &[] } else { &data[..] }));
    let ports = |lane| {
        let mut ports: Vec<_> = got
            .iter()
            .filter(|packet| packet.headers.bth.dest_qp >> ferroce_wire::LANE_SHIFT == lane)
            .map(|packet| packet.net.src_port)
            .collect();
        ports.dedup();
        ports
    };
    assert_eq!((ports(0).len(), ports(1).len()), (1, 1));
    assert_ne!(ports(0), ports(1));
    for lane in 0..2 {
        let psns: Vec<_> = got
            .iter()
            .filter(|packet| {
                packet.headers.bth.dest_qp >> ferroce_wire::LANE_SHIFT == lane && packet.headers.reth.is_some()
            })
            .map(|packet| packet.headers.bth.psn.get())
            .collect();
        assert_eq!(psns, (0..40).collect::<Vec<_>>());
    }
    if Capabilities::probe().gso_segments > 0 {
        // 40 pairs of a WRITE and an ACK, which ends its batch, and 40 equal WRITEs.
        assert_eq!(pair.tx.stats().tx_datagrams, 41);
    }
    assert_clean(&pair.rx.stats());
}

/// A queue longer than the link's memory flushes itself on the way; nothing is lost by that.
#[test]
fn a_full_queue_flushes_itself() {
    let mut pair = Pair::new(V6);
    let data = pattern(61_440, 9);
    let mut rx = Vec::new();
    for i in 0..12 {
        pair.send(&train(Kind::ReadResponse, 5, i * 60, 1024, 61_440, Payload::Copy(span(&data))));
        if pair.tx.stats().tx_auto_flush > rx.len() as u64 / 180 {
            rx.extend(pair.expect(180));
        }
    }
    pair.flush();
    rx.extend(pair.expect(720 - rx.len()));
    assert!(pair.tx.stats().tx_auto_flush >= 2);
    for (i, packets) in rx.chunks(60).enumerate() {
        let train = train(Kind::ReadResponse, 5, i as u32 * 60, 1024, 61_440, Payload::Copy(span(&data)));
        assert_is_train(packets, &train, &data);
    }
}

/// The packets of a batch that names unmapped memory: only its owner hears of it, the others go out, with right ICRCs.
#[test]
fn memory_that_goes_away_fails_only_its_own_train() {
    let mut pair = Pair::new(V4);
    let data = pattern(8192, 1);
    let good = train(Kind::Send, 5, 0, 1024, 4096, spans(&[&data[..4096]]));
    let hole = Span { addr: 0x1000, len: 4096 };
    let bad = train(Kind::Send, 5, 4, 1024, 4096, Payload::Gather([hole].into_iter().collect()));
    let late = train(Kind::Send, 5, 8, 1024, 4096, spans(&[&data[..4096]]));
    pair.send(&good);
    assert_eq!(pair.tx.send(2, 17, &pair.path, &bad), Err(SendError::Fault));
    pair.send(&late);
    pair.flush();
    let got = pair.expect(8);
    assert_is_train(&got[..4], &good, &data[..4096]);
    assert_is_train(&got[4..], &late, &data[..4096]);
    assert_clean(&pair.rx.stats());
}

/// A destination without a route fails with its reason and its cookie, another one beside it does not.
#[test]
fn refused_destinations_are_reported() {
    let mut pair = Pair::new(V4);
    let data = pattern(64, 1);
    let message = train(Kind::Send, 5, 0, 1024, 64, spans(&[&data]));
    // A loopback source cannot reach a routable address.
    let nowhere = path(V4, Ipv4Addr::new(192, 0, 2, 1).into());
    let foreign = path(Ipv4Addr::new(192, 0, 2, 1).into(), V4);
    let mixed = path(V6, V4);
    let mut failed = Vec::new();
    for (cookie, path) in [(7, &nowhere), (8, &foreign), (9, &mixed)] {
        if let Err(error) = pair.tx.send(cookie, 17, path, &message) {
            failed.push((cookie, error));
        }
    }
    pair.send(&message);
    pair.tx.flush(&mut |cookie, error| failed.push((cookie, error)));
    assert_eq!(pair.expect(1)[0].payload, data);
    failed.sort_by_key(|(cookie, _)| *cookie);
    assert_eq!(failed.iter().map(|(cookie, _)| *cookie).collect::<Vec<_>>(), [7, 8, 9]);
    assert!(
        failed.iter().all(|(_, error)| matches!(error, SendError::Unreachable { errno } if *errno != 0)),
        "{failed:?}"
    );
}

/// A dual-stack socket receives IPv4 and tells plain IPv4 addresses; TOS and TTL of the path arrive.
#[test]
fn dual_stack_socket_tells_ipv4_addresses() {
    let (fd, port) = rx_socket(Ipv6Addr::UNSPECIFIED.into());
    let options = UdpOptions { port, ..Default::default() };
    let mut rx = UdpLink::with_options(vec![fd], options.clone()).unwrap();
    let mut tx = UdpLink::with_options(vec![], options).unwrap();
    let data = pattern(3000, 4);
    let message = train(Kind::Write, 5, 0, 1024, 3000, spans(&[&data]));
    for addr in [V4, V6] {
        let path = PathAddr { tclass: 0x6a, hop_limit: 17, flow_label: 0x12345, ..path(addr, addr) };
        tx.send(1, 17, &path, &message).unwrap();
        tx.flush(&mut |_, error| panic!("{error}"));
        let got = receive(&mut rx, 3);
        assert_is_train(&got, &message, &data);
        let net = got[0].net;
        assert_eq!((net.src, net.dst, net.tclass, net.hop_limit), (addr, addr, 0x6a, 17));
    }
    assert_eq!(rx.stats().rx_icrc_known, 6);
}

/// More peers than sockets: old ones are closed, traffic goes on.
#[test]
fn sockets_are_bounded() {
    let mut pair = Pair::with_options(V4, &UdpOptions { max_sockets: 3, ..Default::default() });
    let data = pattern(64, 1);
    // Two busy lanes among many: theirs is never the oldest socket, whatever slot it is in.
    let mut sent = Vec::new();
    for lane in 2..12u32 {
        for lane in [0, lane, 1] {
            pair.send(&train(Kind::Send, lane << 14, sent.len() as u32, 1024, 64, spans(&[&data])));
            sent.push(lane);
        }
    }
    pair.flush();
    let mut got = pair.expect(30);
    got.sort_by_key(|packet| packet.headers.bth.psn.get());
    assert_eq!(
        got.iter().map(|packet| packet.headers.bth.dest_qp >> ferroce_wire::LANE_SHIFT).collect::<Vec<_>>(),
        sent
    );
    let mut ports: Vec<_> = got
        .iter()
        .filter(|packet| packet.headers.bth.dest_qp >> ferroce_wire::LANE_SHIFT < 2)
        .map(|packet| packet.net.src_port)
        .collect();
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 2);
    assert_clean(&pair.rx.stats());
    assert_eq!(pair.tx.stats().tx_sockets_evicted, 9);
}

/// Datagrams from strangers: counted by reason, never delivered, and good ones after them are.
#[test]
fn hostile_datagrams_are_dropped() {
    let (fd, port) = rx_socket(V4);
    let options = UdpOptions { port, ..Default::default() };
    let mut rx = UdpLink::with_options(vec![fd], options.clone()).unwrap();
    let mut tx = UdpLink::with_options(vec![], options).unwrap();
    let stranger = UdpSocket::bind((V4, 0)).unwrap();
    for len in [0, 1, 15, 16, 17, 1000, 65_507] {
        stranger.send_to(&pattern(len, 5), (V4, port)).unwrap();
    }
    tx.send(1, 17, &path(V4, V4), &ack(5, 1)).unwrap();
    tx.flush(&mut |_, error| panic!("{error}"));
    let mut got = Vec::new();
    eventually("all are counted", || {
        rx.recv(64, &mut |_, headers, _| got.push(*headers));
        rx.stats().rx_packets >= 8
    });
    assert_eq!(got, [ack(5, 1).head]);
    let stats = rx.stats();
    assert_eq!((stats.rx_too_short, stats.rx_icrc_errors, stats.rx_packets), (3, 4, 8));
}

/// What the system drops because nobody reads is counted as soon as somebody does.
#[test]
fn overflow_of_the_receive_buffer_is_counted() {
    let mut pair = Pair::with_options(V4, &UdpOptions { rcvbuf: 0, ..Default::default() });
    assert!(pair.rx.receive_buffer() > 4096 && pair.tx.receive_buffer() == 0);
    let data = pattern(61_440, 1);
    let trains = (pair.rx.receive_buffer() / 61_440 + 10) as u32;
    for i in 0..trains {
        pair.send(&train(Kind::Send, 5, i, 4096, 61_440, spans(&[&data])));
        pair.flush();
    }
    let mut packets = 0;
    let mut take = |rx: &mut UdpLink| while rx.recv(64, &mut |_, _, _| packets += 1) > 0 {};
    take(&mut pair.rx);
    pair.send(&ack(5, 1));
    pair.flush();
    let tx = pair.tx.stats();
    eventually("all are read or counted as dropped", || {
        take(&mut pair.rx);
        let rx = pair.rx.stats();
        rx.rx_drop_full + rx.rx_datagrams >= tx.tx_datagrams
    });
    let rx = pair.rx.stats();
    assert!(rx.rx_drop_full > 0);
    assert_eq!(rx.rx_drop_full + rx.rx_datagrams, tx.tx_datagrams);
    assert!(packets < u64::from(trains) * 15);
}

#[test]
fn capabilities_are_printable() {
    let text = Capabilities::probe().to_string();
    assert!(text.lines().count() == 7 && text.contains("GSO"), "{text}");
}

#[test]
fn a_descriptor_that_is_no_udp_socket_is_refused() {
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(UdpLink::new(vec![file.into()]).is_err());
}
