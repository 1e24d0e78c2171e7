//! READ at the responder: repeats whole and in part, after the memory changed, and what may not be repeated.

use ferroce_wire::Opcode;

use super::responder::{acked, read_back, read_responses};
use super::{Case, case};
use crate::bench::{ALL, Bench, Conn, SETUP, Seen, add, must, pattern};
use crate::dut::{Region, Setup};

pub(super) const CASES: &[Case] = &[
    case(
        "Duplicate READ",
        "9.7.5.1.3 (C9-105)",
        "a READ of three responses, twice",
        "executed again: all responses come again, with the same PSNs",
        |b| {
            let (c, region) = read(b, 2053)?;
            b.say(&again(&c, region, 0, 2053))?;
            read_responses(b, &c, SETUP.rq_psn, &pattern(2053), c.msn, 0).map(drop)
        },
    ),
    case(
        "Duplicate READ of no bytes",
        "9.7.5.1.3 (C9-105)",
        "a READ of 100 bytes, one of none from another address, a WRITE; then the READ of no bytes again",
        "its empty response comes again, with the same PSN",
        |b| {
            let (mut c, region) = read(b, 100)?;
            let nothing = c.request(Opcode::RC_READ_REQUEST).reth(region.addr + 50, region.rkey, 0);
            let psn = c.psn;
            b.say(&nothing)?;
            read_back(b, &mut c, &[], 0)?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).reth(region.addr, region.rkey, 4).payload(b"next"))?;
            acked(b, &mut c)?;
            b.say(&nothing)?;
            read_responses(b, &c, psn, &[], c.msn, 0).map(drop)
        },
    )
    .remark("a requester whose empty response was lost gives up"),
    case(
        "Duplicate READ behind a WRITE of no bytes",
        "9.7.5.1.3 (C9-105)",
        "a READ of 100 bytes, a WRITE of none; then the READ again",
        "executed again: its response comes again, with the same PSN",
        |b| {
            let (mut c, region) = read(b, 100)?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).reth(0, 0, 0))?;
            acked(b, &mut c)?;
            b.say(&again(&c, region, 0, 100))?;
            read_responses(b, &c, SETUP.rq_psn, &pattern(100), c.msn, 0).map(drop)
        },
    )
    .remark("it looks at the length of the latest request"),
    case(
        "Re-read after loss, from the middle",
        "9.7.5.1.3, 9.4.4",
        "a READ of four responses; then a READ request at the third PSN for the rest",
        "the rest, from the third PSN on",
        |b| {
            let (c, region) = read(b, 3 * 1024 + 5)?;
            b.say(&again(&c, region, 2, 1029))?;
            read_responses(b, &c, add(SETUP.rq_psn, 2), &pattern(3077)[2048..], c.msn, 2).map(drop)
        },
    ),
    case(
        "Re-read after loss, the last response",
        "9.7.5.1.3, 9.4.4",
        "a READ request at the last PSN of four for the last 5 bytes",
        "one response with that PSN",
        |b| {
            let (c, region) = read(b, 3 * 1024 + 5)?;
            b.say(&again(&c, region, 3, 5))?;
            read_responses(b, &c, add(SETUP.rq_psn, 3), &pattern(3077)[3072..], c.msn, 3).map(drop)
        },
    ),
    case(
        "READ overlap",
        "9.7.5.1.3",
        "a READ of four responses; a READ request at the second PSN for one packet less than the rest",
        "the two packets asked for, no more",
        |b| {
            let (mut c, region) = read(b, 4 * 1024)?;
            b.say(&again(&c, region, 1, 2048))?;
            read_responses(b, &c, add(SETUP.rq_psn, 1), &pattern(4096)[1024..3072], c.msn, 1)?;
            b.expect_unmoved(&mut c)
        },
    )
    .remark("where a device answers with LAST or ONLY at the end is left open: a repeat may be cut as a new READ"),
    case(
        "Re-read after the memory changed",
        "9.7.5.1.3 (C9-105)",
        "a READ; the memory changes; the READ again",
        "executed again: the new bytes",
        |b| {
            let (c, region) = read(b, 100)?;
            let new: Vec<u8> = pattern(100).iter().map(|byte| byte ^ 0xff).collect();
            b.dut.put(region, 0, &new)?;
            b.say(&again(&c, region, 0, 100))?;
            read_responses(b, &c, SETUP.rq_psn, &new, c.msn, 0).map(drop)
        },
    ),
    case(
        "Older READ repeated behind newer ones",
        "9.7.5.1.3",
        "three READs; then the first again",
        "answered with the first one's PSN and bytes",
        |b| {
            let (mut c, region) = read(b, 100)?;
            for offset in [200u32, 300] {
                b.say(&c.request(Opcode::RC_READ_REQUEST).reth(region.addr + u64::from(offset), region.rkey, 10))?;
                read_back(b, &mut c, &pattern(2000)[offset as usize..offset as usize + 10], 0)?;
            }
            b.say(&again(&c, region, 0, 100))?;
            read_responses(b, &c, SETUP.rq_psn, &pattern(100), c.msn, 0).map(drop)
        },
    ),
    case(
        "READ repeated with more than it had",
        "9.7.5.1.3, 9.7.4.1.2",
        "a READ of 100 bytes; at its PSN a READ of 200",
        "no byte is given that the first one did not ask for",
        |b| {
            let (c, region) = read(b, 100)?;
            b.say(&again(&c, region, 0, 200))?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).reth(0, 0, 0))?;
            loop {
                let heard = b.hear(&c)?;
                must(heard.payload.len() <= 100, || format!("answered {heard}"))?;
                if heard.psn() == c.psn {
                    return Ok(());
                }
            }
        },
    ),
    case(
        "READ from a PSN where no READ was",
        "9.7.5.1.3",
        "a WRITE; then a READ with the WRITE's PSN",
        "not executed: silence",
        |b| {
            let mut c = b.connect(SETUP)?;
            let region = b.region(64, ALL)?;
            b.expect_unmoved(&mut c)?;
            b.say(&again(&c, region, 0, 8))?;
            b.expect_unmoved(&mut c)
        },
    ),
    case(
        "READs in flight, order of answers",
        "9.5, 9.7.5.1.2",
        "READ, WRITE, READ, SEND-like WRITE, one after the other without waiting",
        "answers in the order of requests; a WRITE's ACK may be merged into a later answer",
        |b| {
            let mut c = b.connect(SETUP)?;
            let region = b.region(4096, ALL)?;
            b.dut.put(region, 0, &pattern(2048))?;
            let first = c.psn;
            b.say(&c.request(Opcode::RC_READ_REQUEST).reth(region.addr, region.rkey, 1030))?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).psn(add(first, 2)).reth(0, 0, 0))?;
            b.say(&c.request(Opcode::RC_READ_REQUEST).psn(add(first, 3)).reth(region.addr, region.rkey, 10))?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).psn(add(first, 4)).reth(0, 0, 0))?;
            let mut last = None;
            c.psn = add(first, 4);
            while last != Some(c.psn) {
                let heard = b.hear(&c)?;
                let good = last.is_none_or(|last: u32| heard.psn() > last) && heard.psn() <= c.psn;
                must(good, || format!("{heard} behind psn {last:x?}"))?;
                last = Some(heard.psn());
            }
            Ok(())
        },
    ),
    case(
        "More READs than agreed on",
        "9.7.4.1.4, 9.9.3",
        "max_dest_rd_atomic 1; four READs without waiting",
        "each is answered, or NAK invalid request; nothing else",
        |b| {
            let mut c = b.connect(Setup { dest_rd_atomic: 1, ..SETUP })?;
            let region = b.region(4096, ALL)?;
            b.dut.put(region, 0, &pattern(16))?;
            for i in 0..4 {
                b.say(&c.request(Opcode::RC_READ_REQUEST).psn(add(c.psn, i)).reth(region.addr, region.rkey, 16))?;
            }
            for _ in 0..4 {
                let heard = b.hear(&c)?;
                let syndrome = heard.headers.aeth.map(|aeth| aeth.syndrome);
                if syndrome == Some(ferroce_wire::Syndrome::NAK_INVALID_REQUEST) {
                    return Ok(());
                }
                let good = heard.opcode() == Opcode::RC_READ_RESPONSE_ONLY && heard.psn() == c.psn;
                must(good && heard.payload == pattern(16), || format!("answered {heard}"))?;
                c.psn = add(c.psn, 1);
            }
            Ok(())
        },
    ),
];

/// A READ of `len` patterned bytes that was answered in full.
fn read(b: &mut Bench, len: u32) -> Seen<(Conn, Region)> {
    let mut c = b.connect(SETUP)?;
    let region = b.region(8192, ALL)?;
    b.dut.put(region, 0, &pattern(len.max(2000) as usize))?;
    b.say(&c.request(Opcode::RC_READ_REQUEST).reth(region.addr, region.rkey, len))?;
    read_back(b, &mut c, &pattern(len as usize), 0)?;
    Ok((c, region))
}

/// A READ request again, for `len` bytes from its packet `skip` on.
fn again(c: &Conn, region: Region, skip: u32, len: u32) -> crate::frame::Packet {
    let va = region.addr + u64::from(skip * c.setup.mtu);
    c.request(Opcode::RC_READ_REQUEST).psn(add(c.setup.rq_psn, skip)).reth(va, region.rkey, len)
}
