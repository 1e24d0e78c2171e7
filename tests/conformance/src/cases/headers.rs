//! Header fields: ICRC, version, P_Key, queue pair number, addresses, and bits that are to be ignored.

use ferroce_wire::Opcode;

use super::responder::{acked, receiver};
use super::{Case, case};
use crate::bench::{ALL, Bench, Conn, ERR, SETUP, Seen, pattern};
use crate::frame::Packet;
use std::net::Ipv4Addr;

const SILENT: &str = "dropped silently; the same packet made right is then in order";

pub(super) const CASES: &[Case] = &[
    case(
        "Bad ICRC",
        "9.6, 7.8.1, A17.3.4 (CA17-24)",
        "a WRITE with one bit of the ICRC wrong, in each byte",
        SILENT,
        |b| {
            for byte in 0..4 {
                dropped(b, |mut packet| {
                    packet.icrc_flip = 1 << (8 * byte + 3);
                    packet
                })?;
            }
            Ok(())
        },
    ),
    case(
        "Altered payload under the old ICRC",
        "7.8.1, A17.3.4 (CA17-24)",
        "a WRITE with a payload byte changed behind the ICRC",
        SILENT,
        |b| {
            let mut c = b.connect(SETUP)?;
            let region = b.region(64, ALL)?;
            let packet = write(&c, region.addr, region.rkey);
            // The ICRC of other bytes: found by the difference of two good ones.
            let sum = |packet: &Packet| {
                let datagram = packet.datagram(b.own(false), b.peer(false), 0xc123, 1);
                u32::from_le_bytes(datagram[datagram.len() - 4..].try_into().expect("four bytes"))
            };
            let mut other = packet.clone().payload(b"evil");
            other.icrc_flip = sum(&packet) ^ sum(&other);
            b.say(&other)?;
            b.expect_unmoved(&mut c)?;
            b.expect_bytes(region, 0, &[0; 4])
        },
    ),
    case("Transport header version", "9.6.1.1, 9.2.5", "a WRITE with TVer 1", SILENT, |b| {
        dropped(b, |packet| packet.bth(|bth| bth.tver = 1))
    }),
    case(
        "P_Key of another partition",
        "9.6.1.1, 10.9.4, A17.4.7",
        "WRITEs with P_Key 0x8001, 0x0001, 0xfffe",
        SILENT,
        |b| {
            for pkey in [0x8001, 0x0001, 0xfffe] {
                dropped(b, |packet| packet.bth(|bth| bth.pkey = pkey))?;
            }
            Ok(())
        },
    ),
    case(
        "P_Key of a limited member",
        "10.9.3, A17.4.7",
        "a WRITE with P_Key 0x7fff to a full member",
        "accepted",
        |b| accepted(b, |packet| packet.bth(|bth| bth.pkey = 0x7fff)),
    ),
    case("P_Key zero", "10.9.4", "a WRITE with P_Key 0 (an invalid key)", SILENT, |b| {
        dropped(b, |packet| packet.bth(|bth| bth.pkey = 0))
    }),
    case(
        "Queue pair that does not exist",
        "9.6.1.1",
        "a WRITE to a queue pair number not in use, with answers awaited at all",
        "silence",
        |b| {
            let mut c = b.connect(SETUP)?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).reth(0, 0, 0).bth(|bth| bth.dest_qp ^= 0x1000))?;
            b.expect_unmoved(&mut c)
        },
    ),
    case(
        "Another source address",
        "9.6.1.2.3, A17.4.4.2",
        "a WRITE from an address that is not the connection's",
        SILENT,
        |b| {
            dropped(b, |mut packet| {
                packet.source = Some(Ipv4Addr::new(10, 88, 0, 77).into());
                packet
            })
        },
    ),
    case("MigReq", "9.2", "WRITEs with MigReq 0 and 1", "accepted both: there is no migration", |b| {
        accepted(b, |packet| packet.bth(|bth| bth.mig_req = false))?;
        accepted(b, |packet| packet.bth(|bth| bth.mig_req = true))
    }),
    case(
        "FECN, BECN, reserved bits",
        "A17.4.8 (CA17-29), 9.2",
        "a WRITE with all of them set",
        "accepted: they are ignored",
        |b| {
            accepted(b, |packet| {
                packet.bth(|bth| {
                    (bth.fecn, bth.becn) = (true, true);
                    (bth.resv6, bth.resv7) = (0x3f, 0x7f);
                })
            })
        },
    ),
    case("Congestion experienced", "A17.9.3", "a WRITE with ECN CE", "accepted and acknowledged", |b| {
        accepted(b, |mut packet| {
            packet.tos = 3;
            packet
        })
    }),
    case("Congestion notification", "A17.9.3", "a CNP to the queue pair", "no answer, and the connection lives", |b| {
        let mut c = b.connect(SETUP)?;
        let cnp = Packet::new(Opcode::CNP, c.dut, 0).payload(&[0; 16]).bth(|bth| bth.becn = true);
        b.say(&cnp)?;
        b.expect_unmoved(&mut c)
    }),
    case(
        "Response opcodes without a request",
        "9.7.6.1",
        "READ RESPONSE ONLY, ACKNOWLEDGE, ATOMIC ACKNOWLEDGE to an idle requester",
        "dropped silently",
        |b| {
            let mut c = b.connect(SETUP)?;
            for opcode in [Opcode::RC_READ_RESPONSE_ONLY, Opcode::RC_ACKNOWLEDGE, Opcode::RC_ATOMIC_ACKNOWLEDGE] {
                let mut packet = c.response(opcode, c.sq(0), ferroce_wire::Syndrome::ACK, 1);
                if opcode == Opcode::RC_ATOMIC_ACKNOWLEDGE {
                    packet.headers.atomic_ack = Some(7);
                }
                b.say(&packet)?;
            }
            b.expect_unmoved(&mut c)
        },
    ),
    case(
        "Truncated extended header",
        "9.6.1, 9.7.4.1.6",
        "a WRITE ONLY that ends within its RETH",
        "not executed, and the connection is as before or in error",
        |b| {
            let mut c = b.connect(SETUP)?;
            // The bytes of half a RETH as the payload of an opcode that has none, then the right opcode over it.
            let mut packet = c.request(Opcode::RC_WRITE_ONLY).payload(&[0; 8]);
            packet.headers.reth = None;
            b.say(&packet)?;
            let alive = c.request(Opcode::RC_WRITE_ONLY).reth(0, 0, 0);
            b.say(&alive)?;
            let heard = b.hear(&c)?;
            match heard.headers.aeth {
                Some(aeth) if aeth.syndrome == ferroce_wire::Syndrome::NAK_INVALID_REQUEST => b.expect_state(&c, ERR),
                Some(aeth) if aeth.syndrome.is_ack() && aeth.msn == 1 && heard.psn() == c.psn => {
                    (c.psn, c.msn) = (crate::bench::add(c.psn, 1), 1);
                    b.expect_unmoved(&mut c)
                }
                _ => crate::bench::departs(format!("answered {heard}")),
            }
        },
    ),
    case(
        "Requester's own fields",
        "9.2, 9.6.1, A17.3",
        "a SEND of the device",
        "TVer 0, P_Key 0xffff, reserved bits 0, the right addresses, lengths, checksum and ICRC; pad zero",
        |b| {
            let (c, region) = (b.connect(SETUP)?, b.region(64, ALL)?);
            let post =
                crate::dut::Post { opcode: crate::bench::wr::SEND, region: region.id, len: 5, ..Default::default() };
            b.post(&c, 1, post)?;
            let heard = b.expect_request(&c, c.sq(0))?;
            let bth = heard.headers.bth;
            let good =
                bth.tver == 0 && bth.pkey == 0xffff && bth.resv6 == 0 && bth.resv7 == 0 && !bth.fecn && !bth.becn;
            crate::bench::must(good && heard.pad == [0; 3] && heard.src == b.peer(false), || {
                format!("sent {heard}, pad {:?}", heard.pad)
            })?;
            b.say(&c.ack(c.sq(0), 1))?;
            b.expect_completions(&c, &[(1, crate::bench::status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Receive after wrong packets",
        "9.6",
        "a SEND with a bad ICRC, a bad P_Key and TVer 1, then a good one",
        "the receive is used by the good one only",
        |b| {
            let (mut c, region) = receiver(b, SETUP, 1, 64)?;
            let good = c.request(Opcode::RC_SEND_ONLY).payload(b"good");
            let mut bad = good.clone().payload(b"evil");
            bad.icrc_flip = 1;
            b.say(&bad)?;
            b.say(&good.clone().payload(b"evil").bth(|bth| bth.pkey = 0x8001))?;
            b.say(&good.clone().payload(b"evil").bth(|bth| bth.tver = 1))?;
            b.say(&good)?;
            acked(b, &mut c)?;
            b.expect_completions(&c, &[(0, crate::bench::status::SUCCESS)])?;
            b.expect_bytes(region, 0, b"good")
        },
    ),
];

fn write(c: &Conn, va: u64, rkey: u32) -> Packet {
    c.request(Opcode::RC_WRITE_ONLY).reth(va, rkey, 4).payload(&pattern(4))
}

/// A WRITE that is changed so is dropped silently.
fn dropped(b: &mut Bench, change: impl FnOnce(Packet) -> Packet) -> Seen {
    let mut c = b.connect(SETUP)?;
    let region = b.region(64, ALL)?;
    b.say(&change(write(&c, region.addr, region.rkey)))?;
    b.expect_unmoved(&mut c)?;
    b.expect_bytes(region, 0, &[0; 4])
}

/// A WRITE that is changed so is executed.
fn accepted(b: &mut Bench, change: impl FnOnce(Packet) -> Packet) -> Seen {
    let mut c = b.connect(SETUP)?;
    let region = b.region(64, ALL)?;
    b.say(&change(write(&c, region.addr, region.rkey)))?;
    acked(b, &mut c)?;
    b.expect_bytes(region, 0, &pattern(4))
}
