//! Receiver not ready: the responder that has no receive posted, and the requester that is told so.

use ferroce_wire::{Opcode, Syndrome};
use std::time::{Duration, Instant};

use super::responder::{Send, acked, segments};
use super::{Case, case};
use crate::bench::{ALL, Bench, RTS, SETUP, Seen, add, must, pattern, status, wr};
use crate::dut::{Post, Setup};

pub(super) const CASES: &[Case] = &[
    case(
        "RNR NAK with each timer code",
        "9.7.5.2.8 (table 45)",
        "for each min_rnr_timer 0 to 31: a SEND without a receive posted, then with one",
        "RNR NAK with this code and the SEND's PSN; then it is executed at the same PSN, MSN 1",
        |b| {
            for code in 0..32 {
                let mut c = b.connect(Setup { min_rnr_timer: code, ..SETUP })?;
                let region = b.region(64, ALL)?;
                b.say(&c.request(Opcode::RC_SEND_ONLY).payload(&pattern(8)))?;
                b.expect_nak(&c, c.psn, Syndrome::rnr(code))?;
                b.recv(&c, 0, region, 64)?;
                b.say(&c.request(Opcode::RC_SEND_ONLY).payload(&pattern(8)))?;
                acked(b, &mut c)?;
                b.expect_completions(&c, &[(0, status::SUCCESS)])?;
                if code % 8 == 7 {
                    b.clear().map_err(crate::bench::Stop::Trouble)?;
                }
            }
            Ok(())
        },
    ),
    case(
        "RNR NAK, packets behind it",
        "9.7.5.2.8, 9.7.5.2.4",
        "a SEND of three packets without a receive posted, then again with one",
        "one RNR NAK for the FIRST; what is behind it draws no further NAK",
        |b| {
            let mut c = b.connect(SETUP)?;
            let region = b.region(4096, ALL)?;
            let packets = segments(&c, Send, &pattern(2050), 1024);
            packets.iter().try_for_each(|packet| b.say(packet))?;
            b.expect_nak(&c, c.psn, Syndrome::rnr(SETUP.min_rnr_timer))?;
            b.recv(&c, 0, region, 4096)?;
            packets.iter().try_for_each(|packet| b.say(packet))?;
            c.psn = add(c.psn, 2);
            acked(b, &mut c)?;
            b.expect_bytes(region, 0, &pattern(2050))
        },
    )
    .remark("rxe does not note that a NAK was sent when it is an RNR NAK: the packets behind it draw a sequence NAK as well"),
    case(
        "RNR NAK for a WRITE with immediate",
        "9.7.5.2.8, 9.4.3",
        "WRITE FIRST and LAST with immediate without a receive posted",
        "the FIRST is executed; RNR NAK with the PSN of the LAST, which is executed when it comes again",
        |b| {
            let mut c = b.connect(SETUP)?;
            let region = b.region(4096, ALL)?;
            let bytes = pattern(1028);
            b.say(&c.request(Opcode::RC_WRITE_FIRST).reth(region.addr, region.rkey, 1028).payload(&bytes[..1024]))?;
            b.expect_ack(&c, c.psn, 0)?;
            c.psn = add(c.psn, 1);
            let last = c.request(Opcode::RC_WRITE_LAST_IMM).imm(1).payload(&bytes[1024..]);
            b.say(&last)?;
            b.expect_nak(&c, c.psn, Syndrome::rnr(SETUP.min_rnr_timer))?;
            b.recv(&c, 0, region, 0)?;
            b.say(&last)?;
            acked(b, &mut c)?;
            b.expect_completions(&c, &[(0, status::SUCCESS)])?;
            b.expect_bytes(region, 0, &bytes)
        },
    ),
    case(
        "RNR leaves WRITE, READ and atomics alone",
        "9.7.5.2.8",
        "no receive posted: WRITE, READ of no bytes",
        "executed: they need no receive",
        |b| {
            let mut c = b.connect(SETUP)?;
            b.expect_unmoved(&mut c)?;
            b.say(&c.request(Opcode::RC_READ_REQUEST).reth(0, 0, 0))?;
            super::responder::read_back(b, &mut c, &[], 0)
        },
    ),
    case(
        "Requester waits as each timer code says",
        "9.7.5.2.8 (table 45)",
        "a SEND of the device, refused 32 times, with each code",
        "it comes again after each, and no sooner than the time of the code (one tick of 4 ms is allowed)",
        |b| {
            let c = b.connect(SETUP)?;
            let region = b.region(64, ALL)?;
            b.post(&c, 1, Post { opcode: wr::SEND, region: region.id, len: 8, ..Post::default() })?;
            b.expect_request(&c, c.sq(0))?;
            for code in (0..32).rev() {
                // What was repeated before the NAK is no answer to it.
                b.drain(&c)?;
                let sent = Instant::now();
                b.say(&c.nak(c.sq(0), 0, Syndrome::rnr(code)))?;
                b.expect_request(&c, c.sq(0))?;
                let waited = sent.elapsed();
                let asked = Duration::from_micros(u64::from(TIMES_10US[usize::from(code)]) * 10);
                must(waited + TICK >= asked, || format!("code {code}: again after {waited:?}, not {asked:?}"))?;
            }
            b.say(&c.ack(c.sq(0), 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "RNR retry limit",
        "9.7.5.2.8, 11.6.2",
        "rnr_retry 0, 1, 3: a SEND that is always refused",
        "it comes 1 + rnr_retry times; then RNR retry exceeded, and what is behind it is flushed",
        |b| {
            for retry in [0, 1, 3] {
                let c = b.connect(Setup { rnr_retry: retry, ..SETUP })?;
                let region = b.region(64, ALL)?;
                for id in [1, 2] {
                    b.post(&c, id, Post { opcode: wr::SEND, region: region.id, len: 8, ..Post::default() })?;
                }
                for _ in 0..=retry {
                    b.expect_among(&c, c.sq(0))?;
                    b.drain(&c)?;
                    b.say(&c.nak(c.sq(0), 0, Syndrome::rnr(1)))?;
                }
                b.expect_completions(&c, &[(1, status::RNR_RETRY_EXC), (2, status::FLUSHED)])?;
            }
            Ok(())
        },
    ),
    case(
        "RNR retry without limit",
        "9.7.5.2.8, 11.2.4.2",
        "rnr_retry 7: a SEND that is refused 20 times, then acknowledged",
        "it comes again each time, and succeeds",
        |b| {
            let c = b.connect(SETUP)?;
            let region = b.region(64, ALL)?;
            b.post(&c, 1, Post { opcode: wr::SEND, region: region.id, len: 8, ..Post::default() })?;
            for _ in 0..20 {
                b.expect_request(&c, c.sq(0))?;
                b.drain(&c)?;
                b.say(&c.nak(c.sq(0), 0, Syndrome::rnr(1)))?;
            }
            b.expect_request(&c, c.sq(0))?;
            b.say(&c.ack(c.sq(0), 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            b.expect_state(&c, RTS)
        },
    ),
    case(
        "RNR NAK acknowledges what is before it",
        "9.7.5.1.2, 9.7.5.2.8",
        "WRITE and SEND of the device; RNR NAK for the SEND",
        "the WRITE completes; only the SEND comes again",
        |b| {
            let c = b.connect(SETUP)?;
            let region = b.region(64, ALL)?;
            write_and_send(b, &c, region)?;
            b.expect_request(&c, c.sq(1))?;
            b.say(&c.nak(c.sq(1), 1, Syndrome::rnr(1)))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            let heard = b.expect_among(&c, c.sq(1))?;
            must(heard.opcode() == Opcode::RC_SEND_ONLY, || format!("sent {heard}"))?;
            b.say(&c.ack(c.sq(1), 2))?;
            b.expect_completions(&c, &[(2, status::SUCCESS)]).map(drop)
        },
    ),
];

fn write_and_send(b: &mut Bench, c: &crate::bench::Conn, region: crate::dut::Region) -> Seen {
    let base = Post { region: region.id, len: 8, ..Post::default() };
    b.post(c, 1, Post { opcode: wr::WRITE, remote: 4096, key: 1, ..base })?;
    b.post(c, 2, Post { opcode: wr::SEND, ..base })
}

/// A timer of the kernel may fire up to one tick before its time.
const TICK: Duration = Duration::from_millis(4);

/// Table 45: RNR timer codes in units of 10 us.
const TIMES_10US: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024, 1_536, 2_048, 3_072,
    4_096, 6_144, 8_192, 12_288, 16_384, 24_576, 32_768, 49_152,
];
