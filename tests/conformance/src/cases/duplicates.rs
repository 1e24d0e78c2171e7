//! Requests that come again.

use ferroce_wire::{Opcode, Syndrome};

use super::order::{empty_write, go_on};
use super::responder::{Send, Write, acked, receiver, segments};
use super::{Case, case};
use crate::bench::{ALL, Bench, SETUP, Seen, add, departs, must, pattern, status};

pub(super) const CASES: &[Case] = &[
    case(
        "Duplicate SEND",
        "9.7.5.1.3 (C9-105)",
        "a SEND twice, two receives posted",
        "acknowledged again with the newest PSN, executed once: the second receive stays",
        |b| {
            let (mut c, _) = receiver(b, SETUP, 2, 64)?;
            let packet = c.request(Opcode::RC_SEND_ONLY).payload(&pattern(8));
            b.say(&packet)?;
            acked(b, &mut c)?;
            b.say(&packet)?;
            b.expect_ack(&c, SETUP.rq_psn, 1)?;
            b.expect_completions(&c, &[(0, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Duplicate SEND without a receive",
        "9.7.5.1.3 (C9-105)",
        "a SEND twice, one receive posted",
        "acknowledged again: no receive is asked for",
        |b| {
            let (mut c, _) = receiver(b, SETUP, 1, 64)?;
            let packet = c.request(Opcode::RC_SEND_ONLY).payload(&pattern(8));
            b.say(&packet)?;
            acked(b, &mut c)?;
            b.say(&packet)?;
            b.expect_ack(&c, SETUP.rq_psn, 1).map(drop)
        },
    ),
    case(
        "Duplicate SEND of three packets",
        "9.7.5.1.3 (C9-105)",
        "a SEND of three packets; all three again",
        "not executed again; the answers have the newest PSN and the MSN",
        |b| {
            let (mut c, _) = receiver(b, SETUP, 2, 4096)?;
            let packets = segments(&c, Send, &pattern(2050), 1024);
            packets.iter().try_for_each(|packet| b.say(packet))?;
            c.psn = add(c.psn, 2);
            acked(b, &mut c)?;
            packets.iter().try_for_each(|packet| b.say(packet))?;
            quiet_after_acks(b, &mut c, 1)?;
            b.expect_completions(&c, &[(0, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Duplicate WRITE",
        "9.7.5.1.3 (C9-105)",
        "a WRITE; the memory changes; the WRITE again",
        "acknowledged again, the memory stays as it is",
        |b| {
            let mut c = b.connect(SETUP)?;
            let region = b.region(64, ALL)?;
            let packet = c.request(Opcode::RC_WRITE_ONLY).reth(region.addr, region.rkey, 8).payload(&pattern(8));
            b.say(&packet)?;
            acked(b, &mut c)?;
            b.dut.put(region, 0, b"changed!")?;
            b.say(&packet)?;
            b.expect_ack(&c, SETUP.rq_psn, 1)?;
            b.expect_bytes(region, 0, b"changed!")
        },
    ),
    case(
        "Duplicate WRITE with immediate",
        "9.7.5.1.3 (C9-105)",
        "a WRITE with immediate twice, two receives posted",
        "acknowledged again; one receive is used",
        |b| {
            let (mut c, region) = receiver(b, SETUP, 2, 64)?;
            let packet = c.request(Opcode::RC_WRITE_ONLY_IMM).reth(region.addr, region.rkey, 4).imm(5);
            let packet = packet.payload(&pattern(4));
            b.say(&packet)?;
            acked(b, &mut c)?;
            b.say(&packet)?;
            b.expect_ack(&c, SETUP.rq_psn, 1)?;
            b.expect_completions(&c, &[(0, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Duplicate FIRST while its message goes on",
        "9.7.5.1.3 (C9-105)",
        "WRITE FIRST, FIRST again, then LAST",
        "the message is not disturbed",
        |b| {
            let mut c = b.connect(SETUP)?;
            let region = b.region(4096, ALL)?;
            let bytes = pattern(1030);
            let packets = segments(&c, Write(region), &bytes, 1024);
            b.say(&packets[0])?;
            b.say(&packets[0])?;
            b.say(&packets[1])?;
            c.psn = add(c.psn, 1);
            loop {
                let heard = b.hear(&c)?;
                let Some(aeth) = heard.headers.aeth.filter(|aeth| aeth.syndrome.is_ack()) else {
                    return departs(format!("answered {heard}"));
                };
                if heard.psn() == c.psn {
                    must(aeth.msn == 1, || format!("answered {heard}"))?;
                    break;
                }
                must(heard.psn() == SETUP.rq_psn && aeth.msn == 0, || format!("answered {heard}"))?;
            }
            b.expect_bytes(region, 0, &bytes)
        },
    ),
    case(
        "Duplicate SEND behind a READ",
        "9.7.5.1.3, 9.7.5.1.2",
        "SEND, READ of two responses, the SEND again",
        "the ACK's PSN is not beyond what the requester has surely got: that of the SEND, or of the READ's last response",
        |b| {
            let (mut c, region) = receiver(b, SETUP, 1, 4096)?;
            let send = c.request(Opcode::RC_SEND_ONLY).payload(&pattern(8));
            b.say(&send)?;
            acked(b, &mut c)?;
            b.dut.put(region, 0, &pattern(2048))?;
            b.say(&c.request(Opcode::RC_READ_REQUEST).reth(region.addr, region.rkey, 2048))?;
            super::responder::read_back(b, &mut c, &pattern(2048), 0)?;
            b.say(&send)?;
            let heard = b.hear(&c)?;
            let good = heard.opcode() == Opcode::RC_ACKNOWLEDGE
                && [SETUP.rq_psn, add(SETUP.rq_psn, 2)].contains(&heard.psn())
                && heard.headers.aeth.is_some_and(|aeth| aeth.syndrome.is_ack() && aeth.msn == 2);
            must(good, || format!("answered {heard}"))
        },
    ),
    case(
        "Duplicate with a bad R_Key",
        "9.7.4.1.2, 9.7.5.1.3",
        "a WRITE with an unknown R_Key at a PSN from before",
        "a duplicate is not validated: acknowledged, and the connection lives",
        |b| {
            let mut c = b.connect(SETUP)?;
            b.expect_unmoved(&mut c)?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).psn(SETUP.rq_psn).reth(4096, 0xdead, 4).payload(b"oops"))?;
            b.expect_ack(&c, add(SETUP.rq_psn, 1), 2)?;
            b.expect_unmoved(&mut c)
        },
    ),
    case(
        "Duplicate in a gap",
        "9.7.5.1.3, 9.7.5.2.4",
        "after a sequence NAK: an old WRITE, then the expected one and those behind it",
        "the duplicate is acknowledged, the others too, the first of them by an ACK or by a NAK for the next one",
        |b| {
            let mut c = b.connect(SETUP)?;
            b.expect_unmoved(&mut c)?;
            let packets = [0, 1, 2, 3].map(|ahead| empty_write(&c, ahead));
            b.say(&packets[3])?;
            b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).psn(SETUP.rq_psn).reth(0, 0, 0))?;
            b.expect_ack(&c, add(SETUP.rq_psn, 1), 2)?;
            go_on(b, &mut c, &packets, 4)?;
            b.expect_unmoved(&mut c)
        },
    ),
];

/// Hears ACKs of the newest PSN (one or more), then the answer to a good request.
pub(super) fn quiet_after_acks(b: &mut Bench, c: &mut crate::bench::Conn, msn: u32) -> Seen {
    let newest = add(c.psn, 0xff_ffff);
    b.say(&c.request(Opcode::RC_WRITE_ONLY).reth(0, 0, 0))?;
    loop {
        let heard = b.hear(c)?;
        let Some(aeth) = heard.headers.aeth.filter(|aeth| aeth.syndrome.is_ack()) else {
            return departs(format!("answered {heard}"));
        };
        if heard.psn() == c.psn {
            must(aeth.msn == msn + 1, || format!("answered {heard}"))?;
            c.psn = add(c.psn, 1);
            c.msn = msn + 1;
            return Ok(());
        }
        must(heard.psn() == newest && aeth.msn == msn, || format!("answered {heard}"))?;
    }
}
