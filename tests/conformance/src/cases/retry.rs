//! The device as requester when no answer comes: timeouts and retry counts.

use std::time::{Duration, Instant};

use ferroce_wire::{Opcode, Syndrome};

use super::requester::sends;
use super::{Case, case};
use crate::bench::{ERR, SETUP, must, status};
use crate::dut::Setup;

pub(super) const CASES: &[Case] = &[
    case(
        "Retry limit",
        "9.7.6.1.3, 9.9.2, 11.6.2",
        "timeout code 12 (16.8 ms), retry_cnt 0, 1, 3: a SEND that is never answered, another behind it",
        "sent at least 1 + retry_cnt times; then retry exceeded, the other flushed, ERR",
        |b| {
            for retry in [0, 1, 3] {
                let c = sends(b, Setup { timeout: 12, retry_cnt: retry, ..SETUP }, 2)?;
                b.expect_completions(&c, &[(1, status::RETRY_EXC), (2, status::FLUSHED)])?;
                b.expect_state(&c, ERR)?;
                let count = b.drain(&c)?.iter().filter(|heard| heard.psn() == c.sq(0)).count();
                must(count > usize::from(retry), || format!("retry_cnt {retry}: sent {count} times"))?;
            }
            Ok(())
        },
    ),
    case(
        "Not given up before the timeouts are over",
        "9.7.6.1.3",
        "timeout code 14 (67 ms), retry_cnt 2: a SEND that is never answered",
        "retry exceeded no sooner than 3 times 67 ms (one tick of 4 ms each is allowed)",
        |b| {
            let begun = Instant::now();
            let c = sends(b, Setup { timeout: 14, retry_cnt: 2, ..SETUP }, 1)?;
            b.expect_completions(&c, &[(1, status::RETRY_EXC)])?;
            let took = begun.elapsed();
            must(took + Duration::from_millis(12) >= 3 * Duration::from_micros(67_109), || format!("after {took:?}"))
        },
    ),
    case(
        "Retransmission no sooner than the timeout",
        "9.7.6.1.3",
        "timeout code 18 (1.07 s): a SEND that is not answered",
        "it comes again no sooner than 1.07 s after it was sent",
        |b| {
            let c = sends(b, Setup { timeout: 18, ..SETUP }, 1)?;
            b.expect_request(&c, c.sq(0))?;
            let heard = Instant::now();
            b.expect_request(&c, c.sq(0))?;
            let waited = heard.elapsed();
            b.say(&c.ack(c.sq(0), 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            // What was heard late makes the wait look short: half is told from the nominal time.
            must(waited >= Duration::from_millis(537), || format!("again after {} ms", waited.as_millis()))
        },
    ),
    case(
        "What is repeated is what was sent",
        "9.7.1, 9.7.3",
        "timeout code 14: a SEND that is acknowledged, then one that is not, until it comes again",
        "a packet with a PSN of before is that packet again",
        |b| {
            let c = sends(b, Setup { timeout: 14, ..SETUP }, 1)?;
            let first = b.expect_request(&c, c.sq(0))?;
            b.say(&c.ack(c.sq(0), 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            let region = b.region(64, crate::bench::ALL)?;
            b.post(
                &c,
                2,
                crate::dut::Post { opcode: crate::bench::wr::SEND, region: region.id, len: 8, ..Default::default() },
            )?;
            let second = b.expect_among(&c, c.sq(1))?;
            let mut odd = None;
            loop {
                let heard = b.hear(&c)?;
                let original = if heard.psn() == c.sq(1) { &second } else { &first };
                if heard.opcode() != original.opcode() || heard.payload != original.payload {
                    odd = odd.or(Some(heard));
                } else if heard.psn() == c.sq(1) {
                    break;
                }
            }
            b.say(&c.ack(c.sq(1), 2))?;
            b.expect_completions(&c, &[(2, status::SUCCESS)])?;
            must(odd.is_none(), || format!("sent {}", odd.expect("is there")))
        },
    ),
    case(
        "Retry count starts anew after an answer",
        "9.7.6.1.3",
        "retry_cnt 1, timeout code 14: SENDs that are each answered at their second coming",
        "all succeed: an answer resets the count",
        |b| {
            let c = sends(b, Setup { timeout: 14, retry_cnt: 1, ..SETUP }, 4)?;
            for i in 0..4u32 {
                // The others are under way too, and are repeated with it.
                for _ in 0..2 {
                    b.expect_among(&c, c.sq(i))?;
                }
                b.say(&c.ack(c.sq(i), i + 1))?;
                b.expect_completions(&c, &[(u64::from(i) + 1, status::SUCCESS)])?;
            }
            Ok(())
        },
    ),
    case(
        "Lost ACK",
        "9.7.6.1.3, 9.7.5.1.3",
        "timeout code 14: a SEND whose ACK is lost",
        "the same packet again: PSN, opcode, payload; its ACK completes it once",
        |b| {
            let c = sends(b, Setup { timeout: 14, ..SETUP }, 1)?;
            let first = b.expect_request(&c, c.sq(0))?;
            let again = b.expect_request(&c, c.sq(0))?;
            let same = first.opcode() == again.opcode() && first.payload == again.payload;
            must(same && again.opcode() == Opcode::RC_SEND_ONLY, || format!("sent {again}, not {first}"))?;
            b.say(&c.ack(c.sq(0), 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)]).map(drop)
        },
    ),
    case(
        "Sequence NAKs count against the retry limit",
        "9.7.6.1.3, 9.9.2",
        "retry_cnt 2: a SEND that is answered by a NAK sequence error for itself, again and again",
        "ends as retry exceeded after at least 1 + retry_cnt transmissions",
        |b| {
            let c = sends(b, Setup { timeout: 12, retry_cnt: 2, ..SETUP }, 1)?;
            let mut count = 0;
            let end = Instant::now() + b.patience;
            loop {
                let done = b.dut.wait(c.id, 1, Duration::ZERO)?;
                if let Some(wc) = done.first() {
                    count += b.drain(&c)?.len();
                    let name = crate::bench::status_name(wc.status);
                    return must(wc.status == status::RETRY_EXC && count > 2, || {
                        format!("sent {count} times, then {name}")
                    });
                }
                must(Instant::now() < end, || format!("sent {count} times and did not end"))?;
                for heard in b.drain(&c)? {
                    count += 1;
                    b.say(&c.nak(heard.psn(), 0, Syndrome::NAK_SEQUENCE))?;
                }
            }
        },
    ),
];
