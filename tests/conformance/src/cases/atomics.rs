//! Atomics at the responder.

use ferroce_wire::{Opcode, Syndrome};

use super::{Case, case};
use crate::bench::{ALL, Bench, Conn, ERR, SETUP, Seen, add, must};
use crate::dut::Region;
use crate::frame::Packet;

pub(super) const CASES: &[Case] = &[
    case(
        "COMPARE AND SWAP",
        "9.4.5",
        "one that matches, then one that does not",
        "the word changes once; both answers have the original value; MSN and PSN count on",
        |b| {
            let (mut c, region) = word(b, 5)?;
            b.say(&cas(&c, region, 5, 9))?;
            original(b, &mut c, 5)?;
            holds(b, region, 9)?;
            b.say(&cas(&c, region, 5, 11))?;
            original(b, &mut c, 9)?;
            holds(b, region, 9)
        },
    ),
    case(
        "FETCH AND ADD",
        "9.4.5",
        "+1 to 2^64 - 1, then + 2^32",
        "the sum wraps at 64 bits; the answers have the original values",
        |b| {
            let (mut c, region) = word(b, u64::MAX)?;
            b.say(&faa(&c, region, 1))?;
            original(b, &mut c, u64::MAX)?;
            b.say(&faa(&c, region, 1 << 32))?;
            original(b, &mut c, 0)?;
            holds(b, region, 1 << 32)
        },
    ),
    case(
        "Atomic replay",
        "9.7.5.1.3 (C9-105), 9.4.5",
        "FETCH ADD, then the same again; the memory changed between",
        "the saved result comes again; nothing is added",
        |b| {
            let (mut c, region) = word(b, 7)?;
            let packet = faa(&c, region, 1);
            b.say(&packet)?;
            original(b, &mut c, 7)?;
            b.dut.put(region, 0, &100u64.to_ne_bytes())?;
            b.say(&packet)?;
            replayed(b, &c, 0, 7)?;
            holds(b, region, 100)
        },
    ),
    case(
        "COMPARE AND SWAP replay",
        "9.7.5.1.3 (C9-105), 9.4.5",
        "COMPARE AND SWAP 1 to 2, back to 1 by the program, the request again",
        "the saved result comes again; the word stays",
        |b| {
            let (mut c, region) = word(b, 1)?;
            let packet = cas(&c, region, 1, 2);
            b.say(&packet)?;
            original(b, &mut c, 1)?;
            b.dut.put(region, 0, &1u64.to_ne_bytes())?;
            b.say(&packet)?;
            replayed(b, &c, 0, 1)?;
            holds(b, region, 1)
        },
    ),
    case(
        "Atomic replay, four in flight",
        "9.7.5.1.3, 9.4.5",
        "four FETCH ADDs (max_dest_rd_atomic 4), then all four again, the last first",
        "each has its own saved result",
        |b| {
            let (mut c, region) = word(b, 0)?;
            let packets: Vec<Packet> = (0..4).map(|i| faa(&c, region, 1).psn(add(c.psn, i))).collect();
            for (i, packet) in packets.iter().enumerate() {
                b.say(packet)?;
                original(b, &mut c, i as u64)?;
            }
            for i in (0..4).rev() {
                b.say(&packets[i])?;
                replayed(b, &c, i as u32, i as u64)?;
            }
            holds(b, region, 4)
        },
    ),
    case(
        "Atomic repeated that never was",
        "9.7.5.1.3",
        "a WRITE, then a FETCH ADD with the WRITE's PSN",
        "not executed: silence",
        |b| {
            let (mut c, region) = word(b, 0)?;
            b.expect_unmoved(&mut c)?;
            b.say(&faa(&c, region, 1).psn(SETUP.rq_psn))?;
            b.expect_unmoved(&mut c)?;
            holds(b, region, 0)
        },
    ),
    case(
        "Misaligned atomic",
        "9.4.5, 9.9.3",
        "FETCH ADD and COMPARE AND SWAP at an address that is no multiple of 8",
        "NAK invalid request; not executed; the queue pair goes to ERR",
        |b| {
            for opcode in [Opcode::RC_FETCH_ADD, Opcode::RC_COMPARE_SWAP] {
                let (c, region) = word(b, 0)?;
                b.say(&c.request(opcode).atomic(region.addr + 4, region.rkey, 1, 0))?;
                b.expect_nak(&c, c.psn, Syndrome::NAK_INVALID_REQUEST)?;
                b.expect_state(&c, ERR)?;
                b.expect_bytes(region, 0, &[0; 16])?;
            }
            Ok(())
        },
    ),
];

/// A connection and a region that begins with `value`.
fn word(b: &mut Bench, value: u64) -> Seen<(Conn, Region)> {
    let c = b.connect(SETUP)?;
    let region = b.region(64, ALL)?;
    b.dut.put(region, 0, &value.to_ne_bytes())?;
    Ok((c, region))
}

fn cas(c: &Conn, region: Region, compare: u64, swap: u64) -> Packet {
    c.request(Opcode::RC_COMPARE_SWAP).atomic(region.addr, region.rkey, swap, compare)
}

fn faa(c: &Conn, region: Region, value: u64) -> Packet {
    c.request(Opcode::RC_FETCH_ADD).atomic(region.addr, region.rkey, value, 0)
}

/// The atomic at the next PSN is answered with the original value.
fn original(b: &mut Bench, c: &mut Conn, value: u64) -> Seen {
    answered(b, c, c.psn, c.msn + 1, value)?;
    c.psn = add(c.psn, 1);
    c.msn += 1;
    Ok(())
}

/// The `n`th request is answered again.
fn replayed(b: &mut Bench, c: &Conn, n: u32, value: u64) -> Seen {
    answered(b, c, add(c.setup.rq_psn, n), c.msn, value)
}

fn answered(b: &mut Bench, c: &Conn, psn: u32, msn: u32, value: u64) -> Seen {
    let heard = b.hear(c)?;
    let good = heard.opcode() == Opcode::RC_ATOMIC_ACKNOWLEDGE
        && heard.psn() == psn
        && heard.headers.atomic_ack == Some(value)
        && heard.headers.aeth.is_some_and(|aeth| aeth.syndrome.is_ack() && aeth.msn == msn);
    must(good, || format!("answered {heard}, not psn {psn:#08x} msn {msn} original {value:#x}"))
}

fn holds(b: &mut Bench, region: Region, value: u64) -> Seen {
    b.expect_bytes(region, 0, &value.to_ne_bytes())
}
