//! PSN order: gaps, the window of PSNs, and what the responder says of them.

use ferroce_wire::{Opcode, Syndrome};

use super::responder::{acked, receiver};
use super::{Case, case};
use crate::bench::{SETUP, add, pattern, status};

pub(super) const CASES: &[Case] = &[
    case(
        "Sequence error",
        "9.7.4.1.2, 9.7.5.2.4",
        "a SEND one PSN ahead, then the missing one, then it again",
        "NAK sequence error with the expected PSN; nothing of the packet is executed; both are executed after",
        |b| {
            let (mut c, region) = receiver(b, SETUP, 2, 64)?;
            b.say(&c.request(Opcode::RC_SEND_ONLY).psn(add(c.psn, 1)).payload(b"late"))?;
            b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
            b.expect_bytes(region, 0, &[0; 4])?;
            b.say(&c.request(Opcode::RC_SEND_ONLY).payload(b"soon"))?;
            acked(b, &mut c)?;
            b.say(&c.request(Opcode::RC_SEND_ONLY).payload(b"late"))?;
            acked(b, &mut c)?;
            b.expect_completions(&c, &[(0, status::SUCCESS), (1, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Sequence error, MSN of the NAK",
        "9.7.7.1",
        "two good WRITEs, then one two PSNs ahead",
        "the NAK has the MSN of completed messages, 2",
        |b| {
            let mut c = b.connect(SETUP)?;
            b.expect_unmoved(&mut c)?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).psn(add(c.psn, 2)).reth(0, 0, 0))?;
            let heard = b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
            crate::bench::must(heard.headers.aeth.is_some_and(|aeth| aeth.msn == 2), || format!("answered {heard}"))
        },
    ),
    case(
        "One NAK for a gap",
        "9.7.5.2.4",
        "five packets ahead of the expected PSN, then the expected one",
        "one NAK; then the ACK, nothing between",
        |b| {
            let mut c = b.connect(SETUP)?;
            for ahead in 1..6 {
                b.say(&c.request(Opcode::RC_WRITE_ONLY).psn(add(c.psn, ahead)).reth(0, 0, 0))?;
            }
            b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
            b.expect_unmoved(&mut c)
        },
    ),
    case(
        "A NAK for each gap",
        "9.7.5.2.4",
        "a gap, the expected packet, another gap",
        "the second gap has a NAK of its own",
        |b| {
            let mut c = b.connect(SETUP)?;
            for _ in 0..3 {
                b.say(&c.request(Opcode::RC_WRITE_ONLY).psn(add(c.psn, 1)).reth(0, 0, 0))?;
                b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
                b.expect_unmoved(&mut c)?;
            }
            Ok(())
        },
    ),
    case(
        "Gap in a message",
        "9.7.4.1.2, 9.7.5.2.4",
        "SEND FIRST, the MIDDLE lost, LAST; then MIDDLE and LAST",
        "NAK for the MIDDLE; the message goes on from there and is whole",
        |b| {
            let (mut c, region) = receiver(b, SETUP, 1, 4096)?;
            let bytes = pattern(2050);
            let packets = super::responder::segments(&c, super::responder::Send, &bytes, 1024);
            b.say(&packets[0])?;
            b.say(&packets[2])?;
            b.expect_nak(&c, add(c.psn, 1), Syndrome::NAK_SEQUENCE)?;
            b.say(&packets[1])?;
            b.say(&packets[2])?;
            c.psn = add(c.psn, 2);
            acked(b, &mut c)?;
            b.expect_bytes(region, 0, &bytes)
        },
    ),
    case(
        "Gap of a READ request and of an atomic",
        "9.7.4.1.2",
        "a READ, then a FETCH ADD, each one PSN ahead",
        "sequence NAK; neither is executed",
        |b| {
            let mut c = b.connect(SETUP)?;
            let region = b.region(64, crate::bench::ALL)?;
            b.say(&c.request(Opcode::RC_READ_REQUEST).psn(add(c.psn, 1)).reth(region.addr, region.rkey, 8))?;
            b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
            b.expect_unmoved(&mut c)?;
            b.say(&c.request(Opcode::RC_FETCH_ADD).psn(add(c.psn, 1)).atomic(region.addr, region.rkey, 1, 0))?;
            b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
            b.expect_unmoved(&mut c)?;
            b.expect_bytes(region, 0, &[0; 8])
        },
    ),
    case(
        "Half of the PSNs are ahead",
        "9.7.4.1.2 (figure of the PSN regions)",
        "a WRITE with the expected PSN + 2^23 - 1",
        "it is ahead: sequence NAK",
        |b| {
            let mut c = b.connect(SETUP)?;
            b.expect_unmoved(&mut c)?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).psn(add(c.psn, (1 << 23) - 1)).reth(0, 0, 0))?;
            b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
            b.expect_unmoved(&mut c)
        },
    ),
    case(
        "Half of the PSNs are behind",
        "9.7.4.1.2 (figure of the PSN regions)",
        "a WRITE with the expected PSN - 2^23",
        "it is a duplicate: acknowledged, not executed",
        |b| {
            let mut c = b.connect(SETUP)?;
            let region = b.region(64, crate::bench::ALL)?;
            b.expect_unmoved(&mut c)?;
            let old = c.request(Opcode::RC_WRITE_ONLY).psn(add(c.psn, 1 << 23));
            b.say(&old.reth(region.addr, region.rkey, 4).payload(b"oops"))?;
            b.expect_ack(&c, add(c.psn, 0xff_ffff), 2)?;
            b.expect_unmoved(&mut c)?;
            b.expect_bytes(region, 0, &[0; 4])
        },
    ),
];
