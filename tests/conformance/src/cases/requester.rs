//! The device as requester: what it sends, and what answers do to it.

use ferroce_wire::{Opcode, Syndrome};

use super::{Case, case};
use crate::bench::{ALL, Bench, Conn, ERR, RTS, SETUP, Seen, add, flag, must, pattern, status, wr};
use crate::dut::{Post, Region, Setup};
use crate::frame::Packet;

pub(super) const CASES: &[Case] = &[
    case(
        "Requests cut at the path MTU",
        "9.7.3, 9.7.4.1.6 (C9-92)",
        "SENDs and WRITEs of 0, 1, MTU-1, MTU, MTU+1, 2*MTU bytes at path MTU 256, 1024 and 4096",
        "ONLY, or FIRST, MIDDLE.., LAST, all full but the last; RETH in the first of a WRITE with the whole length; PSNs one by one; AckReq in the last",
        |b| {
            for mtu in [256, 1024, 4096] {
                let c = b.connect(Setup { mtu, ..SETUP })?;
                let region = patterned(b, 8192)?;
                let mut next = 0;
                for len in [0, 1, mtu - 1, mtu, mtu + 1, 2 * mtu] {
                    for opcode in [wr::SEND, wr::WRITE] {
                        next = message(b, &c, region, opcode, len, next).map_err(|stop| match stop {
                            crate::bench::Stop::Departs(what) => {
                                crate::bench::Stop::Departs(format!("MTU {mtu}, {len} bytes: {what}"))
                            }
                            trouble => trouble,
                        })?;
                    }
                }
            }
            Ok(())
        },
    ),
    case(
        "Solicited event",
        "9.2.3, 9.4.1",
        "a SEND of three packets with IBV_SEND_SOLICITED, and one without",
        "SE in the LAST of the first only",
        |b| {
            let (c, region) = (b.connect(SETUP)?, patterned(b, 4096)?);
            let post = Post { opcode: wr::SEND, region: region.id, len: 2050, ..Post::default() };
            b.post(&c, 1, Post { flags: flag::SOLICITED, ..post })?;
            b.post(&c, 2, post)?;
            for i in 0..6 {
                let heard = b.expect_request(&c, c.sq(i))?;
                must(heard.headers.bth.solicited == (i == 2), || format!("sent {heard}"))?;
            }
            b.say(&c.ack(c.sq(5), 2))?;
            b.expect_completions(&c, &[(1, status::SUCCESS), (2, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Immediate data",
        "9.4.1, 9.4.3",
        "SEND and WRITE with immediate",
        "ImmDt in network byte order in the last packet",
        |b| {
            let (c, region) = (b.connect(SETUP)?, patterned(b, 64)?);
            let post = Post { region: region.id, len: 8, imm: 0x0102_0304, remote: 64, key: 1, ..Post::default() };
            b.post(&c, 1, Post { opcode: wr::SEND_IMM, ..post })?;
            b.post(&c, 2, Post { opcode: wr::WRITE_IMM, ..post })?;
            for (i, opcode) in [Opcode::RC_SEND_ONLY_IMM, Opcode::RC_WRITE_ONLY_IMM].into_iter().enumerate() {
                let heard = b.expect_request(&c, c.sq(i as u32))?;
                must(heard.opcode() == opcode && heard.headers.imm == Some(0x0102_0304), || format!("sent {heard}"))?;
            }
            b.say(&c.ack(c.sq(1), 2))?;
            b.expect_completions(&c, &[(1, status::SUCCESS), (2, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Coalesced ACK at the requester",
        "9.7.5.1.2",
        "four SENDs; one ACK, of the last",
        "all four complete",
        |b| {
            let c = sends(b, SETUP, 4)?;
            b.expect_request(&c, c.sq(3))?;
            b.say(&c.ack(c.sq(3), 4))?;
            b.expect_completions(&c, &[1, 2, 3, 4].map(|id| (id, status::SUCCESS))).map(drop)
        },
    ),
    case(
        "ACK of some",
        "9.7.5.1.2",
        "four SENDs; an ACK of the second",
        "the first two complete, no more",
        |b| {
            let c = sends(b, SETUP, 4)?;
            b.expect_request(&c, c.sq(3))?;
            b.say(&c.ack(c.sq(1), 2))?;
            b.expect_completions(&c, &[(1, status::SUCCESS), (2, status::SUCCESS)])?;
            b.say(&c.ack(c.sq(3), 4))?;
            b.expect_completions(&c, &[(3, status::SUCCESS), (4, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "ACK inside a message",
        "9.7.5.1.2",
        "a SEND of three packets; an ACK of the second",
        "the request does not complete before the last is acknowledged",
        |b| {
            let (c, region) = (b.connect(SETUP)?, patterned(b, 4096)?);
            let post = Post { opcode: wr::SEND, region: region.id, len: 2050, ..Post::default() };
            b.post(&c, 1, post)?;
            b.post(&c, 2, Post { len: 4, ..post })?;
            b.expect_request(&c, c.sq(3))?;
            b.say(&c.ack(c.sq(1), 0))?;
            b.say(&c.ack(c.sq(2), 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            b.say(&c.ack(c.sq(3), 2))?;
            b.expect_completions(&c, &[(2, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Ghost ACK",
        "9.7.6.1.2, 9.7.6.1.1",
        "two SENDs; ACKs of PSNs that were not sent yet, and of PSNs from before; then the ACK of the first",
        "ghosts are ignored: only the first completes",
        |b| {
            let c = sends(b, SETUP, 2)?;
            b.expect_request(&c, c.sq(1))?;
            for ghost in [c.sq(2), c.sq(500), c.sq(0x7f_ffff), add(c.sq(0), 0xff_ffff), add(c.sq(0), 0x80_0000)] {
                b.say(&c.ack(ghost, 2))?;
            }
            b.say(&c.ack(c.sq(0), 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            b.say(&c.ack(c.sq(1), 2))?;
            b.expect_completions(&c, &[(2, status::SUCCESS)]).map(drop)
        },
    )
    .remark("rxe compares an answer's PSN with what waits, not with what was sent: an ACK ahead of everything counts as one of all"),
    case(
        "Ghost NAK",
        "9.7.6.1.2",
        "a SEND; each fatal NAK for a PSN not sent and for one from before; then its ACK",
        "ignored: the SEND succeeds",
        |b| {
            let c = sends(b, SETUP, 1)?;
            b.expect_request(&c, c.sq(0))?;
            for syndrome in [0x61, 0x62, 0x63] {
                b.say(&c.nak(c.sq(9), 1, Syndrome(syndrome)))?;
                b.say(&c.nak(add(c.sq(0), 0xff_fffe), 1, Syndrome(syndrome)))?;
            }
            b.say(&c.ack(c.sq(0), 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            b.expect_state(&c, RTS)
        },
    ),
    case(
        "Duplicate ACK",
        "9.7.6.1.2",
        "a SEND and its ACK three times, then another SEND",
        "each completes once",
        |b| {
            let c = sends(b, SETUP, 1)?;
            b.expect_request(&c, c.sq(0))?;
            for _ in 0..3 {
                b.say(&c.ack(c.sq(0), 1))?;
            }
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            let region = patterned(b, 64)?;
            b.post(&c, 2, Post { opcode: wr::SEND, region: region.id, len: 4, ..Post::default() })?;
            b.expect_request(&c, c.sq(1))?;
            b.say(&c.ack(c.sq(1), 2))?;
            b.expect_completions(&c, &[(2, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "NAK sequence error",
        "9.7.5.2.4, 9.9.2",
        "five SENDs; NAK sequence error with the PSN of the third",
        "the first two complete; the third to fifth come again, in order, with the same PSNs",
        |b| {
            let c = sends(b, SETUP, 5)?;
            b.expect_request(&c, c.sq(4))?;
            b.drain(&c)?;
            b.say(&c.nak(c.sq(2), 2, Syndrome::NAK_SEQUENCE))?;
            b.expect_completions(&c, &[(1, status::SUCCESS), (2, status::SUCCESS)])?;
            for i in 2..5 {
                let heard = b.expect_request(&c, c.sq(i))?;
                must(heard.opcode() == Opcode::RC_SEND_ONLY, || format!("sent {heard}"))?;
            }
            b.say(&c.ack(c.sq(4), 5))?;
            b.expect_completions(&c, &[3, 4, 5].map(|id| (id, status::SUCCESS))).map(drop)
        },
    ),
    case(
        "NAK sequence error inside a WRITE",
        "9.7.5.2.4, 9.4.3",
        "a WRITE of four packets; NAK with the PSN of the third",
        "it goes on with the third: MIDDLE, LAST",
        |b| {
            let (c, region) = (b.connect(SETUP)?, patterned(b, 4096)?);
            let post = Post { opcode: wr::WRITE, region: region.id, len: 3077, remote: 64, key: 1, ..Post::default() };
            b.post(&c, 1, post)?;
            b.expect_request(&c, c.sq(3))?;
            b.drain(&c)?;
            b.say(&c.nak(c.sq(2), 0, Syndrome::NAK_SEQUENCE))?;
            for (i, opcode) in [(2, Opcode::RC_WRITE_MIDDLE), (3, Opcode::RC_WRITE_LAST)] {
                let heard = b.expect_request(&c, c.sq(i))?;
                let (from, to) = (1024 * i as usize, 3077.min(1024 * (i as usize + 1)));
                must(heard.opcode() == opcode && heard.payload == pattern(4096)[from..to], || format!("sent {heard}"))?;
            }
            b.say(&c.ack(c.sq(3), 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Fatal NAKs",
        "9.7.5.2.4, 9.9.2, 11.6.2",
        "SEND, SEND, SEND; for the second: NAK invalid request, remote access error, remote operational error",
        "the first succeeds, the second fails with the NAK's status, the third is flushed; the queue pair goes to ERR",
        |b| {
            for (syndrome, expected) in
                [(0x61, status::REM_INV_REQ), (0x62, status::REM_ACCESS), (0x63, status::REM_OP)]
            {
                let c = sends(b, SETUP, 3)?;
                b.expect_request(&c, c.sq(2))?;
                b.say(&c.nak(c.sq(1), 1, Syndrome(syndrome)))?;
                b.expect_completions(&c, &[(1, status::SUCCESS), (2, expected), (3, status::FLUSHED)])?;
                b.expect_state(&c, ERR)?;
            }
            Ok(())
        },
    ),
    case(
        "Implied ACK",
        "9.7.5.1.2",
        "SEND, WRITE, READ of the device; only the READ is answered",
        "all three complete",
        |b| {
            let (c, region) = (b.connect(SETUP)?, patterned(b, 64)?);
            let post = Post { region: region.id, len: 8, remote: 64, key: 1, ..Post::default() };
            for (id, opcode) in [(1, wr::SEND), (2, wr::WRITE), (3, wr::READ)] {
                b.post(&c, id, Post { opcode, ..post })?;
            }
            b.expect_request(&c, c.sq(2))?;
            b.say(&c.response(Opcode::RC_READ_RESPONSE_ONLY, c.sq(2), Syndrome::ACK, 3).payload(b"response"))?;
            b.expect_completions(&c, &[1, 2, 3].map(|id| (id, status::SUCCESS)))?;
            b.expect_bytes(region, 0, b"response")
        },
    ),
    case(
        "Implied NAK, READ response missing",
        "9.7.5.2.9, 9.7.6.1.2",
        "READ and SEND of the device; only the SEND is acknowledged",
        "the READ is asked for again and nothing completes before its response; then both complete in order",
        |b| implied_nak(b, wr::READ),
    ),
    case(
        "Implied NAK, atomic response missing",
        "9.7.5.2.9, 9.7.6.1.2",
        "FETCH ADD and SEND of the device; only the SEND is acknowledged",
        "the atomic is sent again with the same PSN and values; both complete after its response",
        |b| implied_nak(b, wr::FETCH_ADD),
    ),
    case(
        "READ, FIRST response lost",
        "9.7.5.2.9, 9.4.4",
        "a READ of four packets; the first response is lost, the others come",
        "asked for again from the first PSN, whole",
        |b| lost_response(b, 0),
    ),
    case(
        "READ, MIDDLE response lost",
        "9.7.5.2.9, 9.4.4",
        "a READ of four packets; the third response is lost",
        "asked for again from the third PSN on, address and length moved on; opcodes as of a new READ are taken",
        |b| lost_response(b, 2),
    ),
    case(
        "READ, LAST response lost",
        "9.7.6.1.3, 9.4.4",
        "a READ of four packets; the last response is lost",
        "asked for again after the timeout, from the last PSN on",
        |b| lost_response(b, 3),
    ),
    case(
        "READ, repeated with the first answer's opcodes",
        "9.7.5.1.3",
        "as before with the third response lost; the repeat is answered with MIDDLE and LAST, the opcodes those PSNs had",
        "taken: a responder repeats what it sent",
        |b| {
            let (c, region) = (b.connect(Setup { timeout: 14, ..SETUP })?, b.region(4096, ALL)?);
            read_until_gap(b, &c, region, 2)?;
            b.say(&c.response(Opcode::RC_READ_RESPONSE_MIDDLE, c.sq(2), Syndrome::ACK, 1).payload(&pattern(4096)[2048..3072]).no_aeth())?;
            b.say(&c.response(Opcode::RC_READ_RESPONSE_LAST, c.sq(3), Syndrome::ACK, 1).payload(&pattern(4096)[3072..3077]))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            b.expect_bytes(region, 0, &pattern(3077))
        },
    ),
    case(
        "READ response with the wrong opcode",
        "9.7.6.1.1, 9.9.2, 11.6.2",
        "a READ of two packets, answered by ONLY; one of one packet, answered by FIRST; one answered by ATOMIC ACKNOWLEDGE",
        "bad response; the queue pair goes to ERR",
        |b| {
            for (len, opcode, size) in [
                (1028, Opcode::RC_READ_RESPONSE_ONLY, 1024),
                (8, Opcode::RC_READ_RESPONSE_FIRST, 8),
                (8, Opcode::RC_ATOMIC_ACKNOWLEDGE, 0),
            ] {
                let (c, region) = (b.connect(SETUP)?, b.region(4096, ALL)?);
                b.post(&c, 1, read_post(region, len))?;
                b.expect_request(&c, c.sq(0))?;
                let mut packet = c.response(opcode, c.sq(0), Syndrome::ACK, 1).payload(&pattern(size));
                packet.headers.atomic_ack = (opcode == Opcode::RC_ATOMIC_ACKNOWLEDGE).then_some(1);
                b.say(&packet)?;
                b.expect_completions(&c, &[(1, status::BAD_RESP)]).map_err(|stop| named(stop, &opcode.to_string()))?;
                b.expect_state(&c, ERR)?;
            }
            Ok(())
        },
    )
    .remark("rxe counts the bytes and does not look at FIRST, LAST and ONLY: it waits for the rest"),
    case(
        "READ response with the wrong length",
        "9.7.6.1, 9.9.2, 11.6.2",
        "a READ of 8 bytes answered with 4, with 12; the FIRST of two with 1020",
        "ends in error (bad response or local length error); nothing behind the buffer is touched",
        |b| {
            for (len, opcode, size) in [
                (8, Opcode::RC_READ_RESPONSE_ONLY, 4),
                (8, Opcode::RC_READ_RESPONSE_ONLY, 12),
                (1028, Opcode::RC_READ_RESPONSE_FIRST, 1020),
            ] {
                let (c, region) = (b.connect(SETUP)?, b.region(4096, ALL)?);
                b.post(&c, 1, read_post(region, len))?;
                b.expect_request(&c, c.sq(0))?;
                b.say(&c.response(opcode, c.sq(0), Syndrome::ACK, 1).payload(&pattern(size)))?;
                let got = b.dut.wait(c.id, 1, b.patience)?;
                let good = got.first().is_some_and(|wc| [status::BAD_RESP, status::LOC_LEN].contains(&wc.status));
                must(good, || {
                    let seen = got.first().map_or("nothing".to_owned(), |wc| crate::bench::status_name(wc.status));
                    format!("{opcode} with {size} bytes: completed {seen}")
                })?;
                b.expect_bytes(region, i64::from(len), &[0; 16])?;
            }
            Ok(())
        },
    )
    .remark("rxe takes the bytes that come and waits for the rest"),
    case(
        "Atomic response",
        "9.4.5",
        "FETCH ADD and COMPARE SWAP of the device, answered with original values",
        "AtomicETH as posted; the original value lies in the local buffer in host byte order",
        |b| {
            let (c, region) = (b.connect(SETUP)?, b.region(64, ALL)?);
            let post = Post { region: region.id, len: 8, remote: 0x40, key: 7, compare_add: 5, swap: 9, ..Post::default() };
            for (i, opcode) in [wr::FETCH_ADD, wr::CMP_SWAP].into_iter().enumerate() {
                b.post(&c, i as u64, Post { opcode, ..post })?;
                let heard = b.expect_request(&c, c.sq(i as u32))?;
                let eth = heard.headers.atomic.map(|eth| (eth.va, eth.rkey, eth.swap_add));
                let value = if opcode == wr::FETCH_ADD { 5 } else { 9 };
                let compares = opcode == wr::FETCH_ADD || heard.headers.atomic.is_some_and(|eth| eth.compare == 5);
                must(eth == Some((0x40, 7, value)) && compares, || format!("sent {heard}"))?;
                let mut answer = c.response(Opcode::RC_ATOMIC_ACKNOWLEDGE, c.sq(i as u32), Syndrome::ACK, i as u32 + 1);
                answer.headers.atomic_ack = Some(0x1122_3344_5566_7788);
                b.say(&answer)?;
                b.expect_completions(&c, &[(i as u64, status::SUCCESS)])?;
                b.expect_bytes(region, 0, &0x1122_3344_5566_7788u64.to_ne_bytes())?;
            }
            Ok(())
        },
    ),
    case(
        "No more READs in flight than max_rd_atomic",
        "9.7.3.1, 11.2.4.2",
        "max_rd_atomic 2; five READs and atomics of the device",
        "never more than two are out without a response",
        |b| {
            let c = b.connect(Setup { rd_atomic: 2, ..SETUP })?;
            let region = b.region(64, ALL)?;
            for id in 0..5 {
                let opcode = if id % 2 == 0 { wr::READ } else { wr::FETCH_ADD };
                b.post(&c, id, Post { opcode, region: region.id, len: 8, remote: 64, key: 1, ..Post::default() })?;
            }
            let mut heard = 0;
            for i in 0..5u32 {
                while heard < (i + 2).min(5) {
                    b.expect_request(&c, c.sq(heard))?;
                    heard += 1;
                }
                let early = b.drain(&c)?.into_iter().find(|heard| heard.psn() > c.sq(i + 1));
                must(early.is_none(), || format!("sent {} with psn {:#08x} unanswered", early.expect("is there"), c.sq(i)))?;
                b.say(&answer(&c, i))?;
            }
            b.expect_completions(&c, &[0, 1, 2, 3, 4].map(|id| (id, status::SUCCESS))).map(drop)
        },
    ),
    case(
        "PSN wrap at the requester",
        "9.7.1",
        "SENDs of three packets from PSN 0xfffffe on; NAK for 0, ACK of 0",
        "PSNs 0xfffffe, 0xffffff, 0; the NAK brings 0 again; then it completes",
        |b| {
            let (c, region) = (b.connect(Setup { sq_psn: 0xff_fffe, ..SETUP })?, patterned(b, 4096)?);
            b.post(&c, 1, Post { opcode: wr::SEND, region: region.id, len: 2050, ..Post::default() })?;
            for psn in [0xff_fffe, 0xff_ffff, 0] {
                b.expect_request(&c, psn)?;
            }
            b.drain(&c)?;
            b.say(&c.nak(0, 0, Syndrome::NAK_SEQUENCE))?;
            let heard = b.expect_request(&c, 0)?;
            must(heard.opcode() == Opcode::RC_SEND_LAST, || format!("sent {heard}"))?;
            b.say(&c.ack(0, 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Bad answers are no answers",
        "9.6, 7.8.1, 10.9.4",
        "a SEND; its ACK with a bad ICRC, a bad P_Key, TVer 1, from another address; each fatal NAK the same; then the good ACK",
        "ignored; the good one completes the SEND",
        |b| {
            let c = sends(b, SETUP, 1)?;
            b.expect_request(&c, c.sq(0))?;
            let nak = c.nak(c.sq(0), 0, Syndrome::NAK_REMOTE_ACCESS);
            let mut damaged = nak.clone();
            damaged.icrc_flip = 0x100;
            let mut foreign = nak.clone();
            foreign.source = Some(std::net::Ipv4Addr::new(10, 88, 0, 77).into());
            b.say(&damaged)?;
            b.say(&foreign)?;
            b.say(&nak.clone().bth(|bth| bth.pkey = 0x8001))?;
            b.say(&nak.bth(|bth| bth.tver = 1))?;
            b.say(&c.ack(c.sq(0), 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            b.expect_state(&c, RTS)
        },
    ),
    case(
        "Fence",
        "10.8.3.3, 9.7.3",
        "a READ, then a SEND with IBV_SEND_FENCE; the READ is answered late",
        "the SEND is not sent before the READ's response is there",
        |b| {
            let (c, region) = (b.connect(SETUP)?, b.region(64, ALL)?);
            b.post(&c, 1, read_post(region, 8))?;
            b.post(&c, 2, Post { opcode: wr::SEND, flags: flag::FENCE, region: region.id, len: 8, ..Post::default() })?;
            b.expect_request(&c, c.sq(0))?;
            let early = b.drain(&c)?.into_iter().find(|heard| heard.psn() == c.sq(1));
            must(early.is_none(), || "the SEND was sent at once".to_owned())?;
            b.say(&c.response(Opcode::RC_READ_RESPONSE_ONLY, c.sq(0), Syndrome::ACK, 1).payload(b"response"))?;
            let heard = b.expect_request(&c, c.sq(1))?;
            must(heard.payload == b"response", || format!("sent {heard}, not the bytes of the READ"))?;
            b.say(&c.ack(c.sq(1), 2))?;
            b.expect_completions(&c, &[(1, status::SUCCESS), (2, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Credits at the requester",
        "9.7.7.2",
        "a SEND is acknowledged with credit code 0; three more SENDs are posted, each acknowledged with code 0",
        "no deadlock: at least one SEND goes out without a credit, and all complete",
        |b| {
            let (c, region) = (b.connect(SETUP)?, patterned(b, 64)?);
            for id in 0..4 {
                b.post(&c, id, Post { opcode: wr::SEND, region: region.id, len: 8, ..Post::default() })?;
                b.expect_request(&c, c.sq(id as u32))?;
                b.say(&c.response(Opcode::RC_ACKNOWLEDGE, c.sq(id as u32), Syndrome(0), id as u32 + 1))?;
                b.expect_completions(&c, &[(id, status::SUCCESS)])?;
            }
            Ok(())
        },
    ),
];

fn named(stop: crate::bench::Stop, what: &str) -> crate::bench::Stop {
    match stop {
        crate::bench::Stop::Departs(seen) => crate::bench::Stop::Departs(format!("{what}: {seen}")),
        trouble => trouble,
    }
}

fn patterned(b: &mut Bench, size: usize) -> Seen<Region> {
    let region = b.region(size, ALL)?;
    b.dut.put(region, 0, &pattern(size))?;
    Ok(region)
}

/// A connection whose device has posted `count` SENDs of 4 bytes, numbered from 1.
pub(super) fn sends(b: &mut Bench, setup: Setup, count: u64) -> Seen<Conn> {
    let (c, region) = (b.connect(setup)?, b.region(64, ALL)?);
    for id in 1..=count {
        b.post(&c, id, Post { opcode: wr::SEND, region: region.id, len: 4, ..Post::default() })?;
    }
    Ok(c)
}

fn read_post(region: Region, len: u32) -> Post {
    Post { opcode: wr::READ, region: region.id, len, remote: 0x7000, key: 1, ..Post::default() }
}

/// The device's request `i` is answered as a READ of 8 bytes (even) or an atomic (odd).
fn answer(c: &Conn, i: u32) -> Packet {
    if i.is_multiple_of(2) {
        return c.response(Opcode::RC_READ_RESPONSE_ONLY, c.sq(i), Syndrome::ACK, i + 1).payload(b"response");
    }
    let mut packet = c.response(Opcode::RC_ATOMIC_ACKNOWLEDGE, c.sq(i), Syndrome::ACK, i + 1);
    packet.headers.atomic_ack = Some(1);
    packet
}

/// The device sends a message of `len` patterned bytes in packets from `next` on, and completes it; gives the packet after.
fn message(b: &mut Bench, c: &Conn, region: Region, opcode: u32, len: u32, next: u32) -> Seen<u32> {
    let mtu = c.setup.mtu;
    let post = Post { opcode, region: region.id, len, remote: 0x5000, key: 0x77, ..Post::default() };
    b.post(c, u64::from(next), post)?;
    let count = len.div_ceil(mtu).max(1);
    for i in 0..count {
        let heard = b.expect_request(c, c.sq(next + i))?;
        let expected = match (opcode == wr::SEND, i == 0, i + 1 == count) {
            (true, true, true) => Opcode::RC_SEND_ONLY,
            (true, true, false) => Opcode::RC_SEND_FIRST,
            (true, false, false) => Opcode::RC_SEND_MIDDLE,
            (true, false, true) => Opcode::RC_SEND_LAST,
            (false, true, true) => Opcode::RC_WRITE_ONLY,
            (false, true, false) => Opcode::RC_WRITE_FIRST,
            (false, false, false) => Opcode::RC_WRITE_MIDDLE,
            (false, false, true) => Opcode::RC_WRITE_LAST,
        };
        let bytes = &pattern(8192)[(i * mtu) as usize..len.min((i + 1) * mtu) as usize];
        let reth = heard.headers.reth.map(|reth| (reth.va, reth.rkey, reth.len));
        let wants = (opcode == wr::WRITE && i == 0).then_some((0x5000, 0x77, len));
        let good = heard.opcode() == expected && heard.payload == bytes && reth == wants;
        must(good && heard.pad.iter().all(|byte| *byte == 0), || format!("sent {heard}, not {expected}"))?;
        must(i + 1 < count || heard.headers.bth.ack_req, || format!("sent {heard} without AckReq"))?;
    }
    b.say(&c.ack(c.sq(next + count - 1), 1))?;
    b.expect_completions(c, &[(u64::from(next), status::SUCCESS)])?;
    Ok(next + count)
}

fn implied_nak(b: &mut Bench, opcode: u32) -> Seen {
    let (c, region) = (b.connect(SETUP)?, b.region(64, ALL)?);
    let post = Post { region: region.id, len: 8, remote: 64, key: 1, compare_add: 3, ..Post::default() };
    b.post(&c, 1, Post { opcode, ..post })?;
    b.post(&c, 2, Post { opcode: wr::SEND, ..post })?;
    let first = b.expect_request(&c, c.sq(0))?;
    b.expect_request(&c, c.sq(1))?;
    b.drain(&c)?;
    b.say(&c.ack(c.sq(1), 2))?;
    let again = b.expect_request(&c, c.sq(0))?;
    let same = again.opcode() == first.opcode()
        && again.headers.reth == first.headers.reth
        && again.headers.atomic == first.headers.atomic;
    must(same, || format!("sent {again}, not {first}"))?;
    b.expect_completions(&c, &[])?;
    let response = match opcode {
        wr::READ => answer(&c, 0),
        _ => {
            let mut packet = c.response(Opcode::RC_ATOMIC_ACKNOWLEDGE, c.sq(0), Syndrome::ACK, 1);
            packet.headers.atomic_ack = Some(1);
            packet
        }
    };
    b.say(&response)?;
    b.say(&c.ack(c.sq(1), 2))?;
    b.expect_completions(&c, &[(1, status::SUCCESS), (2, status::SUCCESS)]).map(drop)
}

/// A READ of 3077 bytes whose responses but that of packet `lost` have come; the request that asks for the rest was heard and is
/// right. (What asks from the first PSN on was under way before.)
fn read_until_gap(b: &mut Bench, c: &Conn, region: Region, lost: u32) -> Seen {
    b.post(c, 1, read_post(region, 3077))?;
    let first = b.expect_request(c, c.sq(0))?;
    let reth = first.headers.reth;
    must(reth.is_some_and(|reth| (reth.va, reth.len) == (0x7000, 3077)), || format!("sent {first}"))?;
    b.drain(c)?;
    for i in (0..4).filter(|i| *i != lost) {
        b.say(&read_response(c, i, i == 0, i == 3))?;
    }
    let heard = b.expect_request(c, c.sq(lost))?;
    let rest = (0x7000 + u64::from(lost) * 1024, 3077 - lost * 1024);
    must(heard.headers.reth.is_some_and(|reth| (reth.va, reth.len) == rest), || format!("sent {heard}"))
}

fn lost_response(b: &mut Bench, lost: u32) -> Seen {
    let (c, region) = (b.connect(Setup { timeout: 14, ..SETUP })?, b.region(4096, ALL)?);
    read_until_gap(b, &c, region, lost)?;
    for i in lost..4 {
        b.say(&read_response(&c, i, i == lost, i == 3))?;
    }
    b.expect_completions(&c, &[(1, status::SUCCESS)])?;
    b.expect_bytes(region, 0, &pattern(3077))
}

/// Response `i` of a READ of 3077 patterned bytes.
fn read_response(c: &Conn, i: u32, first: bool, last: bool) -> Packet {
    let opcode = match (first, last) {
        (true, true) => Opcode::RC_READ_RESPONSE_ONLY,
        (true, false) => Opcode::RC_READ_RESPONSE_FIRST,
        (false, false) => Opcode::RC_READ_RESPONSE_MIDDLE,
        (false, true) => Opcode::RC_READ_RESPONSE_LAST,
    };
    let bytes = &pattern(4096)[i as usize * 1024..3077.min((i as usize + 1) * 1024)];
    let packet = c.response(opcode, c.sq(i), Syndrome::ACK, 1).payload(bytes);
    if opcode == Opcode::RC_READ_RESPONSE_MIDDLE { packet.no_aeth() } else { packet }
}
