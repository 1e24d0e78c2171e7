//! Good requests: what is executed, what is answered, MSN, credits, path MTU edges, PSN wrap.

use ferroce_wire::{Opcode, Syndrome};

use super::order::{empty_write, go_on};
use super::{Case, case};
use crate::bench::{
    ALL, Bench, Conn, SETUP, Seen, WC_RECV, WC_RECV_WRITE_IMM, WC_WITH_IMM, add, departs, must, pattern, status,
};
use crate::dut::{Region, Setup};
use crate::frame::Packet;

pub(super) const CASES: &[Case] = &[
    case(
        "SEND, one packet",
        "9.7.5.1.1, 9.4.1",
        "SEND ONLY of 101 bytes, 3 pad bytes",
        "executed; ACK with its PSN and MSN 1",
        |b| {
            let (mut c, region) = receiver(b, SETUP, 1, 256)?;
            let bytes = pattern(101);
            b.say(&c.request(Opcode::RC_SEND_ONLY).payload(&bytes))?;
            acked(b, &mut c)?;
            let wc = b.expect_completions(&c, &[(0, status::SUCCESS)])?;
            must(wc[0].byte_len == 101 && wc[0].opcode == WC_RECV, || format!("the receive completes as {:?}", wc[0]))?;
            b.expect_bytes(region, 0, &bytes)
        },
    ),
    case(
        "SEND, three packets",
        "9.7.4.1.3, 9.7.5.1.2",
        "SEND FIRST and MIDDLE without AckReq, LAST with",
        "executed once the LAST is there; one ACK for all suffices, of the last PSN",
        |b| {
            let (mut c, region) = receiver(b, SETUP, 1, 4096)?;
            let bytes = pattern(2 * 1024 + 5);
            for packet in segments(&c, Send, &bytes, 1024) {
                b.say(&packet)?;
            }
            c.psn = add(c.psn, 2);
            acked(b, &mut c)?;
            b.expect_completions(&c, &[(0, status::SUCCESS)])?;
            b.expect_bytes(region, 0, &bytes)
        },
    ),
    case(
        "SEND with immediate",
        "9.4.1, 9.2",
        "SEND ONLY with immediate 0x01020304",
        "the receive's completion has the immediate data in network byte order",
        |b| {
            let (mut c, _) = receiver(b, SETUP, 1, 256)?;
            b.say(&c.request(Opcode::RC_SEND_ONLY_IMM).imm(0x0102_0304).payload(&pattern(8)))?;
            acked(b, &mut c)?;
            let wc = b.expect_completions(&c, &[(0, status::SUCCESS)])?;
            must(wc[0].imm == 0x0102_0304 && wc[0].flags & WC_WITH_IMM != 0, || format!("completes as {:?}", wc[0]))
        },
    ),
    case(
        "WRITE with immediate",
        "9.4.3",
        "WRITE FIRST and LAST with immediate, one receive posted",
        "the bytes are in the region, the receive completes with the immediate and the message's length",
        |b| {
            let (mut c, _) = receiver(b, SETUP, 1, 256)?;
            let region = b.region(4096, ALL)?;
            let bytes = pattern(1024 + 7);
            let first = c.request(Opcode::RC_WRITE_FIRST).reth(region.addr, region.rkey, bytes.len() as u32);
            b.say(&first.payload(&bytes[..1024]).ack_req(false))?;
            c.psn = add(c.psn, 1);
            b.say(&c.request(Opcode::RC_WRITE_LAST_IMM).imm(77).payload(&bytes[1024..]))?;
            acked(b, &mut c)?;
            let wc = b.expect_completions(&c, &[(0, status::SUCCESS)])?;
            let good = wc[0].imm == 77 && wc[0].opcode == WC_RECV_WRITE_IMM && wc[0].byte_len == 1031;
            must(good, || format!("completes as {:?}", wc[0]))?;
            b.expect_bytes(region, 0, &bytes)
        },
    ),
    case(
        "MSN",
        "9.7.7.1",
        "SEND, WRITE of two packets with AckReq in both, READ, FETCH ADD, SEND",
        "the MSN counts each message when it is complete, READ and atomic too; the FIRST of a message has that of those before it",
        msn,
    ),
    case(
        "ACK of a message in progress",
        "9.7.5.1.1, 9.7.7.1",
        "WRITE FIRST with AckReq, nothing behind it",
        "ACK with its PSN and the MSN of completed messages",
        |b| {
            let c = b.connect(SETUP)?;
            let region = b.region(4096, ALL)?;
            b.say(&c.request(Opcode::RC_WRITE_FIRST).reth(region.addr, region.rkey, 1025).payload(&pattern(1024)))?;
            b.expect_ack(&c, c.psn, 0)?;
            b.expect_bytes(region, 0, &pattern(1024))
        },
    ),
    case(
        "Coalesced ACK by the responder",
        "9.7.5.1.2",
        "four SENDs, AckReq only in the last",
        "the answer to the last acknowledges all: its PSN, MSN 4",
        |b| {
            let (mut c, _) = receiver(b, SETUP, 4, 256)?;
            for i in 0..4 {
                b.say(&c.request(Opcode::RC_SEND_ONLY).payload(&pattern(4)).ack_req(i == 3))?;
                c.psn = add(c.psn, 1);
            }
            loop {
                // A responder may acknowledge earlier ones too.
                let heard = b.hear(&c)?;
                let aeth = heard.headers.aeth.filter(|aeth| aeth.syndrome.is_ack());
                let Some(aeth) = aeth else { return departs(format!("answered {heard}")) };
                let at = heard.psn().wrapping_sub(SETUP.rq_psn);
                must(at < 4 && aeth.msn == at + 1, || format!("answered {heard}"))?;
                if at == 3 {
                    break;
                }
            }
            b.expect_completions(&c, &[0, 1, 2, 3].map(|id| (id, status::SUCCESS))).map(drop)
        },
    ),
    case(
        "PSN wrap, SEND",
        "9.7.1",
        "a SEND of four packets from PSN 0xfffffe on, then another",
        "executed and acknowledged with PSN 0x000001, then 0x000002",
        |b| {
            let (mut c, region) = receiver(b, Setup { rq_psn: 0xff_fffe, ..SETUP }, 2, 4096)?;
            let bytes = pattern(3 * 1024 + 5);
            for packet in segments(&c, Send, &bytes, 1024) {
                b.say(&packet)?;
            }
            c.psn = 1;
            acked(b, &mut c)?;
            b.expect_bytes(region, 0, &bytes)?;
            b.say(&c.request(Opcode::RC_SEND_ONLY).payload(&pattern(4)))?;
            acked(b, &mut c)
        },
    ),
    case(
        "PSN wrap, READ",
        "9.7.1, 9.7.5.1.1",
        "READ of four responses from PSN 0xfffffe on, then a WRITE at 0x000002",
        "responses 0xfffffe, 0xffffff, 0, 1; the WRITE is in order",
        |b| {
            let mut c = b.connect(Setup { rq_psn: 0xff_fffe, ..SETUP })?;
            let region = b.region(8192, ALL)?;
            let bytes = pattern(4 * 1024);
            b.dut.put(region, 0, &bytes)?;
            b.say(&c.request(Opcode::RC_READ_REQUEST).reth(region.addr, region.rkey, 4096))?;
            read_back(b, &mut c, &bytes, 0)?;
            must(c.psn == 2, || format!("the next PSN is {:#x}", c.psn))?;
            b.expect_unmoved(&mut c)
        },
    ),
    case(
        "PSN wrap, gap and duplicate",
        "9.7.1, 9.7.5.1.3",
        "at expected PSN 0: a packet with PSN 2, then one with 0xfffffe, which was before, then 0, 1 and 2",
        "a sequence NAK for 0, an ACK for the duplicate; the rest is executed",
        |b| {
            let mut c = b.connect(Setup { rq_psn: 0xff_fffe, ..SETUP })?;
            b.expect_unmoved(&mut c)?;
            let packets = [0, 1, 2].map(|ahead| empty_write(&c, ahead));
            b.say(&packets[2])?;
            b.expect_nak(&c, 0, Syndrome::NAK_SEQUENCE)?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).reth(0, 0, 0).psn(0xff_fffe))?;
            b.expect_ack(&c, 0xff_ffff, 2)?;
            go_on(b, &mut c, &packets, 3)?;
            b.expect_unmoved(&mut c)
        },
    ),
    case(
        "Zero-length SEND, WRITE and READ",
        "9.7.4.1.5 (C9-88), 9.4.4",
        "each with length 0; WRITE and READ with an R_Key that does not exist",
        "ACK, ACK, and one READ RESPONSE ONLY without payload: the R_Key is not looked at",
        |b| {
            let (mut c, _) = receiver(b, SETUP, 1, 64)?;
            b.say(&c.request(Opcode::RC_SEND_ONLY))?;
            acked(b, &mut c)?;
            let wc = b.expect_completions(&c, &[(0, status::SUCCESS)])?;
            must(wc[0].byte_len == 0, || format!("completes as {:?}", wc[0]))?;
            b.say(&c.request(Opcode::RC_WRITE_ONLY).reth(0x10, 0xdead, 0))?;
            acked(b, &mut c)?;
            b.say(&c.request(Opcode::RC_READ_REQUEST).reth(0x10, 0xdead, 0))?;
            read_back(b, &mut c, &[], 0)
        },
    ),
    case(
        "Path MTU edges, SEND and WRITE",
        "9.7.4.1.6 (C9-92), 9.7.3",
        "at path MTU 256, 512, 1024, 2048, 4096: lengths MTU-1, MTU, MTU+1, 2*MTU",
        "all are executed, every byte",
        |b| {
            for mtu in MTUS {
                let (mut c, received) = receiver(b, Setup { mtu, ..SETUP }, 8, 8192)?;
                let region = b.region(8192, ALL)?;
                for len in [mtu - 1, mtu, mtu + 1, 2 * mtu] {
                    let bytes = pattern(len as usize);
                    for (kind, to) in [(Send, received), (Write(region), region)] {
                        let packets = segments(&c, kind, &bytes, mtu as usize);
                        for packet in &packets {
                            b.say(packet)?;
                        }
                        c.psn = add(c.psn, packets.len() as u32 - 1);
                        acked(b, &mut c).map_err(|stop| at(stop, mtu, len))?;
                        b.expect_bytes(to, 0, &bytes)?;
                    }
                }
            }
            Ok(())
        },
    ),
    case(
        "Path MTU edges, READ",
        "9.7.5.1.1, 9.4.4",
        "at path MTU 256 to 4096: READs of 1, MTU-1, MTU, MTU+1, 2*MTU, 3*MTU+5",
        "ONLY up to one MTU; else FIRST, MIDDLE.., LAST, all full but the last; AETH in all but MIDDLE; PSNs one by one",
        |b| {
            for mtu in MTUS {
                let mut c = b.connect(Setup { mtu, ..SETUP })?;
                let region = b.region(16384, ALL)?;
                b.dut.put(region, 0, &pattern(12_293))?;
                for len in [1, mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu + 5] {
                    b.say(&c.request(Opcode::RC_READ_REQUEST).reth(region.addr, region.rkey, len))?;
                    read_back(b, &mut c, &pattern(len as usize), 0).map_err(|stop| at(stop, mtu, len))?;
                }
            }
            Ok(())
        },
    ),
    case(
        "Credits",
        "9.7.7.2, 9.7.5.1.2",
        "SENDs with 3 receives posted",
        "the credit field of each ACK is 31 (no flow control), or says no more than what is posted",
        |b| {
            let (mut c, _) = receiver(b, SETUP, 3, 64)?;
            for left in [2u32, 1, 0] {
                b.say(&c.request(Opcode::RC_SEND_ONLY).payload(&pattern(4)))?;
                let heard = b.expect_ack(&c, c.psn, c.msn + 1)?;
                let code = heard.headers.aeth.and_then(|aeth| aeth.syndrome.credits()).unwrap_or(31);
                must(code == 31 || credits(code) <= left, || format!("{heard} with {left} receives posted"))?;
                c.psn = add(c.psn, 1);
                c.msn += 1;
            }
            Ok(())
        },
    ),
    case(
        "Solicited event bit ignored in a WRITE",
        "9.2.3, 9.7.4",
        "WRITE ONLY with SE set",
        "executed as without",
        |b| {
            let mut c = b.connect(SETUP)?;
            let region = b.region(64, ALL)?;
            let packet = c.request(Opcode::RC_WRITE_ONLY).reth(region.addr, region.rkey, 4).payload(&pattern(4));
            b.say(&packet.bth(|bth| bth.solicited = true))?;
            acked(b, &mut c)?;
            b.expect_bytes(region, 0, &pattern(4))
        },
    ),
];

/// Path MTUs that verbs have.
const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];

/// Credits by their code (IBA table 46).
fn credits(code: u8) -> u32 {
    match code {
        0 => 0,
        1 => 1,
        even if even % 2 == 0 => 1 << (even / 2),
        odd => (1 << (odd / 2)) + (1 << (odd / 2 - 1)),
    }
}

fn at(stop: crate::bench::Stop, mtu: u32, len: u32) -> crate::bench::Stop {
    match stop {
        crate::bench::Stop::Departs(what) => crate::bench::Stop::Departs(format!("MTU {mtu}, {len} bytes: {what}")),
        trouble => trouble,
    }
}

fn msn(b: &mut Bench) -> Seen {
    let (mut c, _) = receiver(b, SETUP, 2, 64)?;
    let region = b.region(4096, ALL)?;
    b.say(&c.request(Opcode::RC_SEND_ONLY).payload(&pattern(4)))?;
    acked(b, &mut c)?;
    let first = c.request(Opcode::RC_WRITE_FIRST).reth(region.addr, region.rkey, 1028).payload(&pattern(1024));
    b.say(&first)?;
    b.expect_ack(&c, c.psn, 1)?;
    c.psn = add(c.psn, 1);
    b.say(&c.request(Opcode::RC_WRITE_LAST).payload(&pattern(4)))?;
    acked(b, &mut c)?;
    b.say(&c.request(Opcode::RC_READ_REQUEST).reth(region.addr, region.rkey, 1028))?;
    let bytes = [pattern(1024), pattern(4)].concat();
    read_back(b, &mut c, &bytes, 0)?;
    b.say(&c.request(Opcode::RC_FETCH_ADD).atomic(region.addr, region.rkey, 1, 0))?;
    let heard = b.hear(&c)?;
    let good = heard.opcode() == Opcode::RC_ATOMIC_ACKNOWLEDGE && heard.headers.aeth.is_some_and(|aeth| aeth.msn == 4);
    must(good, || format!("answered {heard}, not with MSN 4"))?;
    (c.psn, c.msn) = (add(c.psn, 1), 4);
    b.say(&c.request(Opcode::RC_SEND_ONLY).payload(&pattern(4)))?;
    acked(b, &mut c)
}

/// A connection with `count` receives of `len` bytes, all into one region.
pub(super) fn receiver(b: &mut Bench, setup: Setup, count: u64, len: u32) -> Seen<(Conn, Region)> {
    let c = b.connect(setup)?;
    let region = b.region(len as usize, ALL)?;
    for wr_id in 0..count {
        b.recv(&c, wr_id, region, len)?;
    }
    Ok((c, region))
}

/// The request at the next PSN, which ends a message, is acknowledged.
pub(super) fn acked(b: &mut Bench, c: &mut Conn) -> Seen {
    b.expect_ack(c, c.psn, c.msn + 1)?;
    c.psn = add(c.psn, 1);
    c.msn += 1;
    Ok(())
}

/// What a message is.
#[derive(Clone, Copy)]
pub(super) enum Message {
    Send,
    Write(Region),
}
pub(super) use Message::{Send, Write};

/// A message in packets from the next PSN on; AckReq in the last.
pub(super) fn segments(c: &Conn, kind: Message, bytes: &[u8], mtu: usize) -> Vec<Packet> {
    let count = bytes.len().div_ceil(mtu).max(1);
    let chunk = |i: usize| &bytes[i * mtu..bytes.len().min((i + 1) * mtu)];
    let one = |i: usize| {
        let opcode = match (kind, i == 0, i + 1 == count) {
            (Send, true, true) => Opcode::RC_SEND_ONLY,
            (Send, true, false) => Opcode::RC_SEND_FIRST,
            (Send, false, false) => Opcode::RC_SEND_MIDDLE,
            (Send, false, true) => Opcode::RC_SEND_LAST,
            (Write(_), true, true) => Opcode::RC_WRITE_ONLY,
            (Write(_), true, false) => Opcode::RC_WRITE_FIRST,
            (Write(_), false, false) => Opcode::RC_WRITE_MIDDLE,
            (Write(_), false, true) => Opcode::RC_WRITE_LAST,
        };
        let packet = c.request(opcode).psn(add(c.psn, i as u32)).payload(chunk(i)).ack_req(i + 1 == count);
        match kind {
            Write(region) if i == 0 => packet.reth(region.addr, region.rkey, bytes.len() as u32),
            _ => packet,
        }
    };
    (0..count).map(one).collect()
}

/// The READ at the next PSN is answered with these bytes; `skip` packets of its first answer were asked for no more.
pub(super) fn read_back(b: &mut Bench, c: &mut Conn, bytes: &[u8], skip: u32) -> Seen {
    let count = read_responses(b, c, c.psn, bytes, c.msn + 1, skip)?;
    c.psn = add(c.psn, count);
    c.msn += 1;
    Ok(())
}

/// Responses of a READ from `psn` on; gives their number. Where the first of the original responses is not among them (`skip`),
/// both readings of the specification are taken: opcodes as of a new READ, or those that the first answer had at these PSNs.
pub(super) fn read_responses(b: &mut Bench, c: &Conn, psn: u32, bytes: &[u8], msn: u32, skip: u32) -> Seen<u32> {
    let mtu = c.setup.mtu as usize;
    let count = bytes.len().div_ceil(mtu).max(1);
    for i in 0..count {
        let heard = b.hear(c)?;
        let expected: &[Opcode] = match (i == 0, i + 1 == count) {
            (true, true) if skip > 0 => &[Opcode::RC_READ_RESPONSE_ONLY, Opcode::RC_READ_RESPONSE_LAST],
            (true, true) => &[Opcode::RC_READ_RESPONSE_ONLY],
            (true, false) if skip > 0 => &[Opcode::RC_READ_RESPONSE_FIRST, Opcode::RC_READ_RESPONSE_MIDDLE],
            (true, false) => &[Opcode::RC_READ_RESPONSE_FIRST],
            (false, false) => &[Opcode::RC_READ_RESPONSE_MIDDLE],
            (false, true) => &[Opcode::RC_READ_RESPONSE_LAST],
        };
        let chunk = &bytes[i * mtu..bytes.len().min((i + 1) * mtu)];
        let good = expected.contains(&heard.opcode()) && heard.psn() == add(psn, i as u32);
        must(good, || format!("answered {heard}, not {} psn {:#08x}", expected[0], add(psn, i as u32)))?;
        must(heard.payload == chunk, || {
            let first = heard.payload.iter().zip(chunk).position(|(a, b)| a != b);
            format!("{heard}: {} bytes, not {}; first difference at {first:?}", heard.payload.len(), chunk.len())
        })?;
        must(heard.pad.iter().all(|byte| *byte == 0), || format!("{heard}: pad {:?}", heard.pad))?;
        if let Some(aeth) = heard.headers.aeth {
            must(aeth.syndrome.is_ack() && aeth.msn == msn, || format!("answered {heard}, not with MSN {msn}"))?;
        }
    }
    Ok(count as u32)
}
