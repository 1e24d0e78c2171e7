//! PSN order: gaps, the window of PSNs, and what the responder says of them.
//!
//! The tester goes on behind a gap as a requester does that goes back: it says again what it said. Whether the device dropped that or
//! kept it for its turn is left to it.

use ferroce_wire::{Opcode, Psn, Syndrome};

use super::responder::receiver;
use super::{Case, case};
use crate::bench::{ALL, Bench, Conn, SETUP, Seen, add, must, pattern, status};
use crate::frame::Packet;

pub(super) const CASES: &[Case] = &[
    case(
        "Sequence error",
        "9.7.4.1.2, 9.7.5.2.4",
        "a SEND one PSN ahead, then the missing one, then it again",
        "NAK sequence error with the expected PSN; nothing of the packet is executed before its turn; both are executed after, once",
        |b| {
            let (mut c, region) = receiver(b, SETUP, 2, 64)?;
            let late = c.request(Opcode::RC_SEND_ONLY).psn(add(c.psn, 1)).payload(b"late");
            b.say(&late)?;
            b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
            b.expect_bytes(region, 0, &[0; 4])?;
            let soon = c.request(Opcode::RC_SEND_ONLY).payload(b"soon");
            go_on(b, &mut c, &[soon, late], 2)?;
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
        "five packets ahead of the expected PSN, then the expected one, then the five again",
        "one NAK; then ACKs, nothing between",
        |b| {
            let mut c = b.connect(SETUP)?;
            let packets: Vec<Packet> = (0..6).map(|ahead| empty_write(&c, ahead)).collect();
            packets[1..].iter().try_for_each(|packet| b.say(packet))?;
            b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
            go_on(b, &mut c, &packets, 6)?;
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
                let packets = [empty_write(&c, 0), empty_write(&c, 1)];
                b.say(&packets[1])?;
                b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
                go_on(b, &mut c, &packets, 2)?;
            }
            b.expect_unmoved(&mut c)
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
            c.psn = add(c.psn, 1);
            b.expect_nak(&c, c.psn, Syndrome::NAK_SEQUENCE)?;
            let rest: Vec<Packet> = packets.into_iter().skip(1).map(|packet| packet.ack_req(true)).collect();
            go_on(b, &mut c, &rest, 1)?;
            b.expect_bytes(region, 0, &bytes)
        },
    ),
    case(
        "Gap of a READ request and of an atomic",
        "9.7.4.1.2",
        "a READ, then a FETCH ADD, each one PSN ahead, then the expected packet, then the READ or FETCH ADD again",
        "sequence NAK; neither is executed before its turn, and the FETCH ADD once",
        |b| {
            let mut c = b.connect(SETUP)?;
            let region = b.region(64, ALL)?;
            let read = c.request(Opcode::RC_READ_REQUEST).reth(region.addr, region.rkey, 8);
            answered_behind_a_gap(b, &mut c, read, Opcode::RC_READ_RESPONSE_ONLY)?;
            let add = c.request(Opcode::RC_FETCH_ADD).atomic(region.addr, region.rkey, 1, 0);
            answered_behind_a_gap(b, &mut c, add, Opcode::RC_ATOMIC_ACKNOWLEDGE)?;
            b.expect_bytes(region, 0, &1u64.to_ne_bytes())
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

/// A WRITE of nothing, `ahead` of the next PSN.
pub(super) fn empty_write(c: &Conn, ahead: u32) -> Packet {
    c.request(Opcode::RC_WRITE_ONLY).psn(add(c.psn, ahead)).reth(0, 0, 0)
}

/// Says packets from the next PSN on, which end `messages` messages, each when the one before was answered: with an ACK of it or of
/// some behind it. The first one may be answered by a NAK for one behind it that is missing still.
pub(super) fn go_on(b: &mut Bench, c: &mut Conn, packets: &[Packet], messages: u32) -> Seen {
    let last = add(c.psn, packets.len() as u32 - 1);
    for (index, packet) in packets.iter().enumerate() {
        b.say(packet)?;
        let heard = b.hear(c)?;
        let at = Psn::new(heard.psn());
        let said = at.diff(Psn::new(c.psn)) >= 0 && at.diff(Psn::new(last)) <= 0;
        let good = match heard.headers.aeth.map(|aeth| aeth.syndrome) {
            Some(Syndrome::NAK_SEQUENCE) => index == 0 && said && heard.psn() != c.psn,
            Some(syndrome) => said && syndrome.is_ack(),
            None => false,
        };
        must(good, || format!("answered {heard} to psn {:#08x} of up to {last:#08x}", c.psn))?;
        c.psn = add(c.psn, 1);
    }
    c.msn += messages;
    Ok(())
}

/// Says a READ or atomic one PSN ahead, then the missing packet, then the request again, which is answered once or twice.
fn answered_behind_a_gap(b: &mut Bench, c: &mut Conn, request: Packet, answer: Opcode) -> Seen {
    let (psn, request) = (add(c.psn, 1), request.psn(add(c.psn, 1)));
    b.say(&request)?;
    b.expect_nak(c, c.psn, Syndrome::NAK_SEQUENCE)?;
    b.say(&empty_write(c, 0))?;
    b.expect_ack(c, c.psn, c.msn + 1)?;
    b.say(&request)?;
    (c.psn, c.msn) = (add(psn, 1), c.msn + 2);
    b.say(&empty_write(c, 0))?;
    let mut answers = 0;
    loop {
        let heard = b.hear(c)?;
        if heard.opcode() == Opcode::RC_ACKNOWLEDGE {
            must(heard.psn() == c.psn && answers > 0, || format!("answered {heard}"))?;
            (c.psn, c.msn) = (add(c.psn, 1), c.msn + 1);
            return Ok(());
        }
        let same = heard.headers.atomic_ack.is_none_or(|old| old == 0) && heard.payload.iter().all(|byte| *byte == 0);
        must(heard.opcode() == answer && heard.psn() == psn && same, || format!("answered {heard}"))?;
        answers += 1;
    }
}
