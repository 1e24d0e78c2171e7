//! The same device over IPv6. What is above the IP header is no different; here is what could be.

use std::net::Ipv6Addr;

use ferroce_wire::{Opcode, Syndrome};

use super::datagram::{GRH, UD, datagram, octets};
use super::order::go_on;
use super::responder::{Send, Write, acked, read_back, receiver, segments};
use super::{Case, case};
use crate::bench::{ALL, Bench, Conn, SETUP, Seen, WC_GRH, add, must, pattern, status, wr};
use crate::dut::{Post, Setup};
use crate::frame::Packet;

const V6: Setup = Setup { v6: true, ..SETUP };

const SILENT: &str = "dropped silently; the same packet made right is then in order";

pub(super) const CASES: &[Case] = &[
    case(
        "IPv6, responder",
        "A17.3.1, 9.7.5",
        "SEND and WRITE of three packets, READ of three, FETCH ADD, over IPv6",
        "executed and answered as over IPv4",
        responder,
    ),
    case(
        "IPv6, requester",
        "A17.3.1, A17.3.2",
        "SEND, WRITE, READ and FETCH ADD of the device, over IPv6",
        "next header UDP, the right addresses, lengths and ICRC, a UDP checksum of 0, right, or left to the card; answers complete them",
        requester,
    ),
    case(
        "IPv6, bad ICRC",
        "9.6, 7.8.1, A17.3.4 (CA17-24)",
        "a WRITE with one bit of the ICRC wrong, in each byte",
        SILENT,
        |b| {
            for byte in 0..4 {
                dropped(b, |packet| packet.icrc_flip = 1 << (8 * byte + 3))?;
            }
            Ok(())
        },
    ),
    case(
        "IPv6, fields that routers change",
        "A17.3.4 (CA17-24)",
        "WRITEs with another traffic class, flow label, hop limit, under the ICRC that does not cover them",
        "accepted",
        |b| {
            accepted(b, |packet| packet.tos = 0xb8)?;
            accepted(b, |packet| packet.flow_label = 0xa_bcde)?;
            accepted(b, |packet| packet.hop_limit = 1)
        },
    ),
    case(
        "IPv6, UDP checksum",
        "A17.3.2",
        "WRITEs without a UDP checksum and with the right one",
        "accepted both",
        |b| {
            accepted(b, |packet| packet.udp_checksum = false)?;
            accepted(b, |packet| packet.udp_checksum = true)
        },
    ),
    case(
        "IPv6, another source address",
        "9.6.1.2.3, A17.4.4.2",
        "a WRITE from an address that is not the connection's",
        SILENT,
        |b| dropped(b, |packet| packet.source = Some(Ipv6Addr::new(0xfd00, 0x88, 0, 0, 0, 0, 0, 0x77).into())),
    ),
    case(
        "IPv6, the other family",
        "9.6.1.2.3, A17.4.4.2",
        "a WRITE over IPv4 to a queue pair whose connection is over IPv6",
        SILENT,
        |b| dropped(b, |packet| packet.v6 = false),
    ),
    case(
        "IPv6, sequence error",
        "9.7.5.2.4, A17.3.1",
        "two WRITEs of which the first comes behind the second, then the second again",
        "NAK sequence error with the expected PSN, once; both are then executed in order",
        |b| {
            let (mut c, region) = (b.connect(V6)?, b.region(64, ALL)?);
            let second = c.request(Opcode::RC_WRITE_ONLY).psn(add(c.psn, 1)).reth(region.addr + 4, region.rkey, 4);
            let second = second.payload(b"2nd.");
            b.say(&second)?;
            b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
            let first = c.request(Opcode::RC_WRITE_ONLY).reth(region.addr, region.rkey, 4).payload(b"1st.");
            go_on(b, &mut c, &[first, second], 2)?;
            b.expect_bytes(region, 0, b"1st.2nd.")
        },
    ),
    case(
        "IPv6, duplicates",
        "9.7.5.1.3 (C9-105), A17.3.1",
        "a SEND twice, one receive posted; a FETCH ADD twice",
        "acknowledged again; executed once",
        duplicates,
    ),
    case(
        "IPv6, GRH area",
        "11.4.1.2, A17.4.5.2",
        "a datagram of 20 bytes, over IPv6",
        "the payload lies behind the 40 bytes of the IPv6 header; byte_len counts them; flag GRH, source QP",
        |b| {
            let (c, region) = (b.connect(Setup { v6: true, ..UD })?, b.region(256, ALL)?);
            b.recv(&c, 0, region, 256)?;
            b.say(&datagram(&c).payload(&pattern(20)))?;
            let wc = b.expect_completions(&c, &[(0, status::SUCCESS)])?;
            let good = wc[0].byte_len == 60 && wc[0].flags & WC_GRH != 0 && wc[0].src_qp == c.own;
            must(good, || format!("completes as {:?}", wc[0]))?;
            let area = b.dut.get(region, 0, GRH)?;
            let addresses = [b.own(true), b.peer(true)].map(octets).concat();
            must(area[0] >> 4 == 6 && area[6] == 17 && area[8..] == addresses, || {
                format!("the area holds {area:02x?}")
            })?;
            b.expect_bytes(region, GRH as i64, &pattern(20))
        },
    ),
    case(
        "IPv6, path MTU",
        "9.7.4.1.6, A17.3.1",
        "WRITEs of two full packets and one byte more, path MTU 4096",
        "executed",
        |b| {
            let (mut c, region) = (b.connect(Setup { mtu: 4096, ..V6 })?, b.region(16384, ALL)?);
            for len in [8192, 8193] {
                let bytes = pattern(len);
                let packets = segments(&c, Write(region), &bytes, 4096);
                for packet in &packets {
                    b.say(packet)?;
                }
                c.psn = add(c.psn, packets.len() as u32 - 1);
                acked(b, &mut c)?;
                b.expect_bytes(region, 0, &bytes)?;
            }
            Ok(())
        },
    ),
];

fn write(c: &Conn, va: u64, rkey: u32) -> Packet {
    c.request(Opcode::RC_WRITE_ONLY).reth(va, rkey, 4).payload(&pattern(4))
}

/// A WRITE that is changed so is dropped silently.
fn dropped(b: &mut Bench, change: impl FnOnce(&mut Packet)) -> Seen {
    let (mut c, region) = (b.connect(V6)?, b.region(64, ALL)?);
    let mut packet = write(&c, region.addr, region.rkey);
    change(&mut packet);
    b.say(&packet)?;
    b.expect_unmoved(&mut c)?;
    b.expect_bytes(region, 0, &[0; 4])
}

/// A WRITE that is changed so is executed.
fn accepted(b: &mut Bench, change: impl FnOnce(&mut Packet)) -> Seen {
    let (mut c, region) = (b.connect(V6)?, b.region(64, ALL)?);
    let mut packet = write(&c, region.addr, region.rkey);
    change(&mut packet);
    b.say(&packet)?;
    acked(b, &mut c)?;
    b.expect_bytes(region, 0, &pattern(4))
}

fn responder(b: &mut Bench) -> Seen {
    let bytes = pattern(2 * 1024 + 5);
    let (mut c, received) = receiver(b, V6, 1, 4096)?;
    let region = b.region(4096, ALL)?;
    for kind in [Send, Write(region)] {
        for packet in segments(&c, kind, &bytes, 1024) {
            b.say(&packet)?;
        }
        c.psn = add(c.psn, 2);
        acked(b, &mut c)?;
    }
    b.expect_completions(&c, &[(0, status::SUCCESS)])?;
    b.expect_bytes(received, 0, &bytes)?;
    b.say(&c.request(Opcode::RC_READ_REQUEST).reth(region.addr, region.rkey, bytes.len() as u32))?;
    read_back(b, &mut c, &bytes, 0)?;
    b.dut.put(region, 0, &7u64.to_ne_bytes())?;
    b.say(&c.request(Opcode::RC_FETCH_ADD).atomic(region.addr, region.rkey, 5, 0))?;
    let heard = b.hear(&c)?;
    let good = heard.opcode() == Opcode::RC_ATOMIC_ACKNOWLEDGE && heard.headers.atomic_ack == Some(7);
    must(good, || format!("answered {heard}, not with 7"))?;
    b.expect_bytes(region, 0, &12u64.to_ne_bytes())
}

fn requester(b: &mut Bench) -> Seen {
    let (c, region) = (b.connect(V6)?, b.region(64, ALL)?);
    b.dut.put(region, 0, &pattern(8))?;
    let posts = [(wr::SEND, 5), (wr::WRITE, 6), (wr::READ, 8), (wr::FETCH_ADD, 8)];
    for (n, (opcode, len)) in posts.into_iter().enumerate() {
        let (n, id) = (n as u32, n as u64);
        let post = Post { opcode, region: region.id, len, remote: 4096, key: 77, compare_add: 1, ..Post::default() };
        b.post(&c, id, post)?;
        let heard = b.expect_request(&c, c.sq(n))?;
        let from_to = (heard.src, heard.dst) == (b.peer(true), b.own(true));
        must(from_to && heard.hop_limit > 0, || format!("sent {heard} from {} to {}", heard.src, heard.dst))?;
        let answer = match opcode {
            wr::READ => c.response(Opcode::RC_READ_RESPONSE_ONLY, c.sq(n), Syndrome::ACK, n + 1).payload(b"answered"),
            wr::FETCH_ADD => {
                let mut packet = c.response(Opcode::RC_ATOMIC_ACKNOWLEDGE, c.sq(n), Syndrome::ACK, n + 1);
                packet.headers.atomic_ack = Some(0x0102_0304_0506_0708);
                packet
            }
            _ => {
                let bytes = pattern(len as usize);
                must(heard.payload == bytes, || format!("{heard}: {:02x?} instead of {bytes:02x?}", heard.payload))?;
                c.ack(c.sq(n), n + 1)
            }
        };
        b.say(&answer)?;
        b.expect_completions(&c, &[(id, status::SUCCESS)])?;
        if opcode == wr::READ {
            b.expect_bytes(region, 0, b"answered")?;
        }
    }
    b.expect_bytes(region, 0, &0x0102_0304_0506_0708u64.to_ne_bytes())
}

fn duplicates(b: &mut Bench) -> Seen {
    let (mut c, received) = receiver(b, V6, 1, 64)?;
    let send = c.request(Opcode::RC_SEND_ONLY).payload(&pattern(8));
    b.say(&send)?;
    acked(b, &mut c)?;
    b.say(&send)?;
    b.expect_ack(&c, SETUP.rq_psn, 1)?;
    b.expect_completions(&c, &[(0, status::SUCCESS)])?;
    b.expect_bytes(received, 0, &pattern(8))?;
    let region = b.region(64, ALL)?;
    let add = c.request(Opcode::RC_FETCH_ADD).atomic(region.addr, region.rkey, 5, 0);
    for _ in 0..2 {
        b.say(&add)?;
        let heard = b.hear(&c)?;
        let good = heard.opcode() == Opcode::RC_ATOMIC_ACKNOWLEDGE && heard.headers.atomic_ack == Some(0);
        must(good, || format!("answered {heard}, not with 0"))?;
    }
    b.expect_bytes(region, 0, &5u64.to_ne_bytes())
}
