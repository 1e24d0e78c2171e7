//! Requests of the wrong shape: opcodes out of place, lengths that do not fit, pad.

use ferroce_wire::{Opcode, Syndrome};

use super::responder::{acked, receiver};
use super::{Case, case};
use crate::bench::{ALL, Bench, Conn, ERR, SETUP, Seen, Stop, add, must, pattern, status};
use crate::dut::Region;
use crate::frame::Packet;

/// Makes the packets of a trial.
type Make = fn(&Conn, Region) -> Vec<Packet>;

const INVALID: &str = "NAK invalid request with the PSN of the wrong packet; the queue pair goes to ERR";

pub(super) const CASES: &[Case] = &[
    case(
        "MIDDLE or LAST without FIRST",
        "9.7.4.1.3, 9.9.3",
        "SEND MIDDLE, SEND LAST, WRITE MIDDLE, WRITE LAST as the first packet",
        INVALID,
        |b| {
            let alone = |opcode| move |c: &Conn| vec![c.request(opcode).payload(&pattern(1024))];
            for opcode in [Opcode::RC_SEND_MIDDLE, Opcode::RC_SEND_LAST, Opcode::RC_WRITE_MIDDLE, Opcode::RC_WRITE_LAST]
            {
                invalid(b, &opcode.to_string(), |c, _| alone(opcode)(c))?;
            }
            Ok(())
        },
    ),
    case(
        "A new message inside a message",
        "9.7.4.1.3, 9.9.3",
        "behind SEND FIRST: FIRST, ONLY, WRITE ONLY, WRITE LAST, READ request, FETCH ADD; behind WRITE FIRST: FIRST, SEND LAST, SEND ONLY",
        INVALID,
        |b| {
            let trials: &[(&str, Make)] = &[
                ("SEND FIRST, SEND FIRST", |c, _| {
                    vec![send_first(c), second(c, Opcode::RC_SEND_FIRST).payload(&pattern(1024))]
                }),
                ("SEND FIRST, SEND ONLY", |c, _| {
                    vec![send_first(c), second(c, Opcode::RC_SEND_ONLY).payload(&pattern(4))]
                }),
                ("SEND FIRST, WRITE ONLY", |c, r| {
                    vec![send_first(c), second(c, Opcode::RC_WRITE_ONLY).reth(r.addr, r.rkey, 4).payload(&pattern(4))]
                }),
                ("SEND FIRST, WRITE LAST", |c, _| {
                    vec![send_first(c), second(c, Opcode::RC_WRITE_LAST).payload(&pattern(4))]
                }),
                ("SEND FIRST, READ", |c, r| {
                    vec![send_first(c), second(c, Opcode::RC_READ_REQUEST).reth(r.addr, r.rkey, 4)]
                }),
                ("SEND FIRST, FETCH ADD", |c, r| {
                    vec![send_first(c), second(c, Opcode::RC_FETCH_ADD).atomic(r.addr, r.rkey, 1, 0)]
                }),
                ("WRITE FIRST, WRITE FIRST", |c, r| {
                    vec![
                        write_first(c, r),
                        second(c, Opcode::RC_WRITE_FIRST).reth(r.addr, r.rkey, 2048).payload(&pattern(1024)),
                    ]
                }),
                ("WRITE FIRST, SEND LAST", |c, r| {
                    vec![write_first(c, r), second(c, Opcode::RC_SEND_LAST).payload(&pattern(4))]
                }),
                ("WRITE FIRST, SEND ONLY", |c, r| {
                    vec![write_first(c, r), second(c, Opcode::RC_SEND_ONLY).payload(&pattern(4))]
                }),
            ];
            trials.iter().try_for_each(|(name, make)| invalid(b, name, make))
        },
    ),
    case(
        "Reserved opcodes of the RC class",
        "9.7.4.1.4, 9.9.3",
        "opcodes 0x15 (RESYNC, of RD only), 0x18, 0x1f at the expected PSN",
        INVALID,
        |b| {
            for code in [0x15, 0x18, 0x1f] {
                invalid(b, &format!("opcode {code:#04x}"), |c, _| vec![c.request(Opcode(code)).payload(&pattern(4))])?;
            }
            Ok(())
        },
    )
    .remark("rxe drops what its table of opcodes does not have before it reaches the queue pair"),
    case(
        "Opcodes of another transport class",
        "9.6.1.1",
        "UC SEND ONLY, UD SEND ONLY and RD class packets on an RC queue pair",
        "dropped silently",
        |b| {
            let mut c = b.connect(SETUP)?;
            b.say(&c.request(Opcode::UC_SEND_ONLY).payload(&pattern(4)))?;
            b.say(&c.request(Opcode::UD_SEND_ONLY).deth(1, 2).payload(&pattern(4)))?;
            b.say(&c.request(Opcode(0x44)).payload(&pattern(16)))?;
            b.expect_unmoved(&mut c)
        },
    ),
    case(
        "Length, SEND",
        "9.7.4.1.6 (C9-92)",
        "FIRST and MIDDLE below one MTU, ONLY and LAST above it, LAST without payload",
        INVALID,
        |b| {
            let trials: &[(&str, Make)] = &[
                ("FIRST of 1020", |c, _| vec![c.request(Opcode::RC_SEND_FIRST).payload(&pattern(1020))]),
                ("FIRST of 1028", |c, _| vec![c.request(Opcode::RC_SEND_FIRST).payload(&pattern(1028))]),
                ("ONLY of 1028", |c, _| vec![c.request(Opcode::RC_SEND_ONLY).payload(&pattern(1028))]),
                ("MIDDLE of 1020", |c, _| {
                    vec![send_first(c), second(c, Opcode::RC_SEND_MIDDLE).payload(&pattern(1020))]
                }),
                ("LAST of 1028", |c, _| vec![send_first(c), second(c, Opcode::RC_SEND_LAST).payload(&pattern(1028))]),
                ("LAST of 0", |c, _| vec![send_first(c), second(c, Opcode::RC_SEND_LAST)]),
            ];
            trials.iter().try_for_each(|(name, make)| invalid(b, name, make))
        },
    ),
    case(
        "Length, WRITE against its RETH",
        "9.7.4.1.6",
        "ONLY with less and with more than the DMA length; FIRST that holds all of it; LAST that leaves bytes missing, and one with more",
        INVALID,
        |b| {
            let trials: &[(&str, Make)] = &[
                ("ONLY of 4, length 8", |c, r| vec![write_only(c, r, 8).payload(&pattern(4))]),
                ("ONLY of 8, length 4", |c, r| vec![write_only(c, r, 4).payload(&pattern(8))]),
                ("ONLY of 0, length 4", |c, r| vec![write_only(c, r, 4)]),
                ("FIRST of 1024, length 1024", |c, r| {
                    let first = c.request(Opcode::RC_WRITE_FIRST).reth(r.addr, r.rkey, 1024);
                    vec![first.payload(&pattern(1024)).ack_req(false), second(c, Opcode::RC_WRITE_LAST)]
                }),
                ("LAST of 4, 1024 missing", |c, r| {
                    vec![write_first(c, r), second(c, Opcode::RC_WRITE_LAST).payload(&pattern(4))]
                }),
                ("LAST of 1024, 8 missing", |c, r| {
                    let first = c
                        .request(Opcode::RC_WRITE_FIRST)
                        .reth(r.addr, r.rkey, 1032)
                        .payload(&pattern(1024))
                        .ack_req(false);
                    vec![first, second(c, Opcode::RC_WRITE_LAST).payload(&pattern(1024))]
                }),
            ];
            for (name, make) in trials {
                let (c, region) = (b.connect(SETUP)?, b.region(4096, ALL)?);
                for packet in make(&c, region) {
                    b.say(&packet)?;
                }
                // Whether the FIRST or the LAST is the wrong one is the device's choice.
                let heard = b.hear(&c)?;
                let good = heard.headers.aeth.is_some_and(|aeth| aeth.syndrome == Syndrome::NAK_INVALID_REQUEST);
                must(good, || format!("{name}: answered {heard}"))?;
                b.expect_state(&c, ERR)?;
            }
            Ok(())
        },
    ),
    case(
        "Length, above 2^31",
        "9.7.4.1.6 (C9-94)",
        "READ request and WRITE FIRST with DMA length 2^31 + 1",
        INVALID,
        |b| {
            invalid(b, "READ", |c, r| vec![c.request(Opcode::RC_READ_REQUEST).reth(r.addr, r.rkey, (1 << 31) + 1)])?;
            invalid(b, "WRITE", |c, r| {
                vec![c.request(Opcode::RC_WRITE_FIRST).reth(r.addr, r.rkey, (1 << 31) + 1).payload(&pattern(1024))]
            })
        },
    ),
    case(
        "Length, READ request with payload",
        "9.7.4.1.6, 9.4.4",
        "a READ request with 4 bytes behind its RETH",
        "not answered with data: NAK invalid request, or dropped silently",
        |b| {
            let (mut c, region) = (b.connect(SETUP)?, b.region(64, ALL)?);
            b.say(&c.request(Opcode::RC_READ_REQUEST).reth(region.addr, region.rkey, 8).payload(&pattern(4)))?;
            unexecuted(b, &mut c)
        },
    )
    .remark("rxe answers it, with a response that is four bytes too long"),
    case(
        "SEND longer than the receive",
        "9.7.4.1.6, 9.9.3, 11.6.2",
        "SEND ONLY of 12 bytes into a receive of 8; SEND of two packets into a receive of 1024",
        "NAK invalid request; the receive completes with a local length error; the queue pair goes to ERR",
        |b| {
            for (len, packets) in [(8, 1), (1024, 2)] {
                let (c, region) = receiver(b, SETUP, 1, len)?;
                let message = super::responder::segments(&c, super::responder::Send, &pattern(len as usize + 4), 1024);
                must(message.len() == packets, || format!("{} packets", message.len()))?;
                message.iter().try_for_each(|packet| b.say(packet))?;
                b.expect_nak(&c, add(c.psn, packets as u32 - 1), Syndrome::NAK_INVALID_REQUEST)?;
                b.expect_completions(&c, &[(0, status::LOC_LEN)])?;
                b.expect_state(&c, ERR)?;
                b.expect_bytes(region, i64::from(len), &[0; 8])?;
            }
            Ok(())
        },
    )
    .remark("rxe takes it for a fault of its own memory: NAK remote operational error and a local QP operation error"),
    case(
        "Pad, each number of bytes",
        "9.2.4, 9.7.4.1.6",
        "SENDs of 1 to 8 bytes with 3 to 0 pad bytes",
        "the receive completes with the length without pad, nothing is written behind",
        |b| {
            let (mut c, region) = receiver(b, SETUP, 8, 64)?;
            for len in 1..=8 {
                b.dut.put(region, 0, &[0xee; 64])?;
                b.say(&c.request(Opcode::RC_SEND_ONLY).payload(&pattern(len)))?;
                acked(b, &mut c)?;
                let wc = b.expect_completions(&c, &[(len as u64 - 1, status::SUCCESS)])?;
                must(wc[0].byte_len == len as u32, || format!("{len} bytes complete as {}", wc[0].byte_len))?;
                b.expect_bytes(region, 0, &[pattern(len), vec![0xee; 64 - len]].concat())?;
            }
            Ok(())
        },
    ),
    case(
        "Pad, bytes that are not zero",
        "9.2.4",
        "a SEND of 5 bytes with pad 0xff 0xff 0xff",
        "executed: pad is not looked at",
        |b| {
            let (mut c, region) = receiver(b, SETUP, 1, 64)?;
            let mut packet = c.request(Opcode::RC_SEND_ONLY).payload(&pattern(5));
            packet.pad = Some(vec![0xff; 3]);
            b.say(&packet)?;
            acked(b, &mut c)?;
            b.expect_bytes(region, 0, &[pattern(5), vec![0; 3]].concat())
        },
    ),
    case(
        "Pad, count larger than what is there",
        "9.2.4, 9.7.4.1.6",
        "a SEND without payload and PadCnt 3; a WRITE of 4 bytes with PadCnt 3",
        "not executed: NAK invalid request, or dropped silently",
        |b| {
            let (mut c, _) = receiver(b, SETUP, 1, 64)?;
            let mut packet = c.request(Opcode::RC_SEND_ONLY);
            packet.pad_count = Some(3);
            b.say(&packet)?;
            unexecuted(b, &mut c)?;
            let (mut c, region) = (b.connect(SETUP)?, b.region(64, ALL)?);
            let mut packet = write_only(&c, region, 4).payload(&pattern(4));
            packet.pad_count = Some(3);
            b.say(&packet)?;
            unexecuted(b, &mut c)?;
            b.expect_bytes(region, 0, &[0; 4])
        },
    ),
    case(
        "Pad, length that is no multiple of 4",
        "9.2.4, 7.7.5",
        "a SEND of 5 bytes without pad",
        "not executed: NAK invalid request, or dropped silently",
        |b| {
            let (mut c, _) = receiver(b, SETUP, 1, 64)?;
            let mut packet = c.request(Opcode::RC_SEND_ONLY).payload(&pattern(5));
            packet.pad = Some(Vec::new());
            b.say(&packet)?;
            unexecuted(b, &mut c)
        },
    )
    .remark("InfiniBand's own packets are counted in words; rxe takes the UDP length as it is"),
    case(
        "Pad in a FIRST",
        "9.2.4, 9.7.4.1.6 (C9-92)",
        "SEND FIRST of 1021 bytes and 3 pad bytes (one MTU together)",
        INVALID,
        |b| invalid(b, "FIRST", |c, _| vec![c.request(Opcode::RC_SEND_FIRST).payload(&pattern(1021))]),
    ),
];

fn send_first(c: &Conn) -> Packet {
    c.request(Opcode::RC_SEND_FIRST).payload(&pattern(1024)).ack_req(false)
}

fn write_first(c: &Conn, region: Region) -> Packet {
    let first = c.request(Opcode::RC_WRITE_FIRST).reth(region.addr, region.rkey, 2048);
    first.payload(&pattern(1024)).ack_req(false)
}

fn write_only(c: &Conn, region: Region, len: u32) -> Packet {
    c.request(Opcode::RC_WRITE_ONLY).reth(region.addr, region.rkey, len)
}

/// A packet at the PSN behind the next.
fn second(c: &Conn, opcode: Opcode) -> Packet {
    c.request(opcode).psn(add(c.psn, 1))
}

/// The last of these packets is refused as an invalid request.
fn invalid(b: &mut Bench, name: &str, make: impl Fn(&Conn, Region) -> Vec<Packet>) -> Seen {
    let (c, region) = receiver(b, SETUP, 1, 4096)?;
    let packets = make(&c, region);
    let psn = add(c.psn, packets.len() as u32 - 1);
    packets.iter().try_for_each(|packet| b.say(packet))?;
    let mut check = || {
        b.expect_nak(&c, psn, Syndrome::NAK_INVALID_REQUEST)?;
        b.expect_state(&c, ERR)
    };
    check().map_err(|stop| match stop {
        Stop::Departs(what) => Stop::Departs(format!("{name}: {what}")),
        trouble => trouble,
    })
}

/// What was said was refused as an invalid request, or dropped: then good requests from its PSN on are in order.
fn unexecuted(b: &mut Bench, c: &mut Conn) -> Seen {
    match b.expect_unmoved(c) {
        Ok(()) => Ok(()),
        Err(Stop::Departs(what)) if what.contains("nak invalid request") => b.expect_state(c, ERR),
        stop => stop,
    }
}
