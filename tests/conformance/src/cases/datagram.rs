//! UD and UC.

use std::net::IpAddr;

use ferroce_wire::Opcode;

use super::{Case, case};
use crate::bench::{ALL, Bench, Conn, RTS, SETUP, Seen, WC_GRH, add, must, pattern, status, wr};
use crate::dut::{Kind, Post, Region, Setup};
use crate::frame::Packet;

pub(super) const UD: Setup = Setup { kind: Kind::Ud, ..SETUP };
const UC: Setup = Setup { kind: Kind::Uc, ..SETUP };
/// Bytes of the area for the IP header.
pub(super) const GRH: usize = 40;

pub(super) const CASES: &[Case] = &[
    case(
        "UD, GRH area",
        "11.4.1.2, A17.4.5.2",
        "a datagram of 20 bytes",
        "the payload lies behind 40 bytes whose second half is the IPv4 header; byte_len counts them; flag GRH, source QP",
        |b| {
            let (c, region) = ud(b, &[256])?;
            b.say(&datagram(&c).payload(&pattern(20)))?;
            let wc = b.expect_completions(&c, &[(0, status::SUCCESS)])?;
            let good = wc[0].byte_len == 60 && wc[0].flags & WC_GRH != 0 && wc[0].src_qp == c.own;
            must(good, || format!("completes as {:?}", wc[0]))?;
            let area = b.dut.get(region, 20, 20)?;
            let octets = [b.own(false), b.peer(false)].map(octets).concat();
            let header = area[0] == 0x45 && area[9] == 17 && area[12..] == octets;
            must(header, || format!("the area holds {area:02x?}"))?;
            b.expect_bytes(region, GRH as i64, &pattern(20))
        },
    ),
    case("UD, zero length", "9.8.3, 11.4.1.2", "a datagram without payload", "completes with byte_len 40", |b| {
        let (c, _) = ud(b, &[40])?;
        b.say(&datagram(&c))?;
        let wc = b.expect_completions(&c, &[(0, status::SUCCESS)])?;
        must(wc[0].byte_len == 40, || format!("completes as {:?}", wc[0]))
    }),
    case("UD, immediate data", "9.8.3, 9.4.1", "a datagram with immediate", "the completion has it", |b| {
        let (c, _) = ud(b, &[256])?;
        let packet = Packet::new(Opcode::UD_SEND_ONLY_IMM, c.dut, 5).deth(UD.qkey, c.own).imm(0xa1b2_c3d4);
        b.say(&packet.payload(&pattern(4)))?;
        let wc = b.expect_completions(&c, &[(0, status::SUCCESS)])?;
        must(wc[0].imm == 0xa1b2_c3d4, || format!("completes as {:?}", wc[0]))
    }),
    case("UD, one MTU", "9.8.3, 9.7.4.1.6", "a datagram of one MTU of the port (4096)", "delivered", |b| {
        let (c, region) = ud(b, &[4096 + 40])?;
        b.say(&datagram(&c).payload(&pattern(4096)))?;
        let wc = b.expect_completions(&c, &[(0, status::SUCCESS)])?;
        must(wc[0].byte_len == 4136, || format!("completes as {:?}", wc[0]))?;
        b.expect_bytes(region, GRH as i64, &pattern(4096))
    }),
    case(
        "UD, Q_Key violation",
        "9.6.1.4, 10.2.5",
        "a datagram with another Q_Key, then a good one",
        "the first is dropped silently and takes no receive",
        |b| {
            let (c, _) = ud(b, &[256])?;
            b.say(&datagram(&c).deth(UD.qkey ^ 1, c.own).payload(b"evil"))?;
            only_good(b, &c)
        },
    ),
    case(
        "UD, P_Key violation",
        "9.6.1.1, 10.9.4",
        "a datagram with P_Key 0x8001, then a good one",
        "the first is dropped silently and takes no receive",
        |b| {
            let (c, _) = ud(b, &[256])?;
            b.say(&datagram(&c).bth(|bth| bth.pkey = 0x8001).payload(b"evil"))?;
            only_good(b, &c)
        },
    ),
    case(
        "UD, bad ICRC",
        "9.6, 7.8.1",
        "a datagram with a bad ICRC, then a good one",
        "the first is dropped silently and takes no receive",
        |b| {
            let (c, _) = ud(b, &[256])?;
            let mut packet = datagram(&c).payload(b"evil");
            packet.icrc_flip = 0x8000_0000;
            b.say(&packet)?;
            only_good(b, &c)
        },
    ),
    case(
        "UD, opcodes of other classes",
        "9.6.1.1",
        "RC SEND ONLY and UC SEND ONLY to a UD queue pair, then a good datagram",
        "the first two are dropped silently",
        |b| {
            let (c, _) = ud(b, &[256])?;
            b.say(&c.request(Opcode::RC_SEND_ONLY).payload(b"evil"))?;
            b.say(&c.request(Opcode::UC_SEND_ONLY).payload(b"evil"))?;
            only_good(b, &c)
        },
    ),
    case(
        "UD, no receive posted",
        "9.8.3, 9.9.3",
        "a datagram without a receive posted, then one with",
        "the first is dropped silently",
        |b| {
            let (c, region) = (b.connect(UD)?, b.region(256, ALL)?);
            b.say(&datagram(&c).payload(b"evil"))?;
            // An answer to a datagram behind it shows that the first was seen.
            let probe = b.connect(SETUP)?;
            let mut probe = probe;
            b.expect_unmoved(&mut probe)?;
            b.recv(&c, 0, region, 256)?;
            only_good(b, &c)
        },
    ),
    case(
        "UD, receive without room for the GRH area or the payload",
        "9.9.3, 11.4.1.2",
        "receives of 40 and 44 bytes for a datagram of 8",
        "not one byte behind the buffer is written; no completion tells success; the queue pair can still receive",
        |b| {
            for size in [40, 44] {
                let (c, region) = ud(b, &[size])?;
                b.say(&datagram(&c).payload(&pattern(8)))?;
                let mut probe = b.connect(SETUP)?;
                b.expect_unmoved(&mut probe)?;
                let done = b.dut.wait(c.id, 1, std::time::Duration::ZERO)?;
                must(done.iter().all(|wc| wc.status != status::SUCCESS), || format!("completes as {:?}", done[0]))?;
                b.expect_bytes(region, i64::from(size), &[0; 64])?;
                b.expect_state(&c, RTS)?;
            }
            Ok(())
        },
    ),
    case("UD, PSN is not checked", "9.8.3.1", "datagrams with PSNs 9, 3, 3, 0xffffff", "all are delivered", |b| {
        let (c, _) = ud(b, &[256; 4])?;
        for psn in [9, 3, 3, 0xff_ffff] {
            b.say(&datagram(&c).psn(psn).payload(&pattern(4)))?;
        }
        b.expect_completions(&c, &[0, 1, 2, 3].map(|id| (id, status::SUCCESS))).map(drop)
    }),
    case(
        "UD, what the device sends",
        "9.8.3.1, 9.3.2",
        "two datagrams of the device",
        "DETH with the Q_Key of the request and its own QP number; PSNs one by one; no AckReq is needed",
        |b| {
            let (c, region) = (b.connect(UD)?, b.region(256, ALL)?);
            b.dut.put(region, 0, &pattern(9))?;
            for id in 0..2 {
                let post = Post { opcode: wr::SEND, region: region.id, len: 9, key: 0x1234, ..Post::default() };
                b.post(&c, id, post)?;
                let heard = b.hear(&c)?;
                let deth = heard.headers.deth.map(|deth| (deth.qkey, deth.src_qp));
                let good = heard.opcode() == Opcode::UD_SEND_ONLY
                    && heard.psn() == c.sq(id as u32)
                    && deth == Some((0x1234, c.dut))
                    && heard.payload == pattern(9);
                must(good, || format!("sent {heard}"))?;
                b.expect_completions(&c, &[(id, status::SUCCESS)])?;
            }
            Ok(())
        },
    ),
    case(
        "UC, never answered",
        "9.8.2",
        "UC SENDs with a gap between, a WRITE with a bad R_Key",
        "no packet comes back; the SENDs arrive; the queue pair lives",
        |b| {
            let (c, region) = uc(b, 2)?;
            let bad = Packet::new(Opcode::UC_WRITE_ONLY, c.dut, add(c.psn, 4)).reth(4096, 0xdead, 4).payload(b"evil");
            b.say(&uc_send(&c, 0, b"one "))?;
            b.say(&bad)?;
            b.say(&uc_send(&c, 5, b"two "))?;
            b.expect_completions(&c, &[(0, status::SUCCESS), (1, status::SUCCESS)])?;
            b.expect_bytes(region, 0, b"two ")?;
            let heard = b.drain(&c)?;
            must(heard.is_empty(), || format!("sent {}", heard[0]))?;
            b.expect_state(&c, RTS)
        },
    ),
    case(
        "UC, message with a gap",
        "9.8.2.2",
        "a SEND of three packets without its MIDDLE, then two whole SENDs",
        "the broken one is dropped and its receive used again; both whole ones arrive",
        |b| {
            let (c, region) = uc(b, 2)?;
            let bytes = pattern(1024);
            b.say(&uc_packet(&c, Opcode::UC_SEND_FIRST, 0, &bytes))?;
            b.say(&uc_packet(&c, Opcode::UC_SEND_LAST, 2, b"end "))?;
            b.say(&uc_send(&c, 3, b"one "))?;
            b.say(&uc_send(&c, 4, b"two "))?;
            let wc = b.expect_completions(&c, &[(0, status::SUCCESS), (1, status::SUCCESS)])?;
            must(wc.iter().all(|wc| wc.byte_len == 4), || format!("completed {wc:?}"))?;
            b.expect_bytes(region, 0, b"two ")
        },
    )
    .remark("rxe still takes the next whole message for a part of the broken one and drops it too"),
    case(
        "UC, message broken off by the next",
        "9.8.2.2",
        "SEND FIRST, then a whole SEND with the next PSN",
        "the broken one is dropped, the whole one arrives",
        |b| {
            let (c, _) = uc(b, 2)?;
            b.say(&uc_packet(&c, Opcode::UC_SEND_FIRST, 0, &pattern(1024)))?;
            b.say(&uc_send(&c, 1, b"one "))?;
            let wc = b.expect_completions(&c, &[(0, status::SUCCESS)])?;
            must(wc[0].byte_len == 4, || format!("completed {wc:?}"))
        },
    )
    .remark("rxe drops the message that breaks the other off as well"),
    case(
        "UC, WRITE",
        "9.8.2, 9.7.4.1.5",
        "a WRITE of two packets; one with a bad R_Key; a SEND",
        "the good one is executed, the bad one dropped silently",
        |b| {
            let (c, region) = uc(b, 1)?;
            let target = b.region(4096, ALL)?;
            let bytes = pattern(1028);
            let first = uc_packet(&c, Opcode::UC_WRITE_FIRST, 0, &bytes[..1024]);
            b.say(&first.reth(target.addr, target.rkey, 1028))?;
            b.say(&uc_packet(&c, Opcode::UC_WRITE_LAST, 1, &bytes[1024..]))?;
            b.say(&uc_packet(&c, Opcode::UC_WRITE_ONLY, 2, b"evil").reth(target.addr, target.rkey ^ 0x5a, 4))?;
            b.say(&uc_send(&c, 3, b"one "))?;
            b.expect_completions(&c, &[(0, status::SUCCESS)])?;
            b.expect_bytes(region, 0, b"one ")?;
            b.expect_bytes(target, 0, &bytes)
        },
    ),
];

/// A UD queue pair with receives of these sizes, all into one region.
fn ud(b: &mut Bench, receives: &[u32]) -> Seen<(Conn, Region)> {
    let c = b.connect(Setup { mtu: 4096, ..UD })?;
    let region = b.region(8192, ALL)?;
    for (id, len) in receives.iter().enumerate() {
        b.recv(&c, id as u64, region, *len)?;
    }
    Ok((c, region))
}

pub(super) fn datagram(c: &Conn) -> Packet {
    c.request(Opcode::UD_SEND_ONLY).ack_req(false).psn(7).deth(UD.qkey, c.own)
}

/// A good datagram takes the first receive.
fn only_good(b: &mut Bench, c: &Conn) -> Seen {
    b.say(&datagram(c).payload(b"good"))?;
    let wc = b.expect_completions(c, &[(0, status::SUCCESS)])?;
    must(wc[0].byte_len == 44, || format!("completes as {:?}", wc[0]))
}

/// A UC connection with receives into one region.
fn uc(b: &mut Bench, receives: u64) -> Seen<(Conn, Region)> {
    let (c, region) = (b.connect(UC)?, b.region(4096, ALL)?);
    for id in 0..receives {
        b.recv(&c, id, region, 4096)?;
    }
    Ok((c, region))
}

fn uc_packet(c: &Conn, opcode: Opcode, n: u32, payload: &[u8]) -> Packet {
    Packet::new(opcode, c.dut, add(c.setup.rq_psn, n)).payload(payload)
}

fn uc_send(c: &Conn, n: u32, payload: &[u8]) -> Packet {
    uc_packet(c, Opcode::UC_SEND_ONLY, n, payload)
}

/// The bytes of an address as they stand in a header.
pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}
