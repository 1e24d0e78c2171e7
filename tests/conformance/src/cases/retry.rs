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
        "9.7.6.1.3 (C9-141)",
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
        "9.7.6.1.3 (C9-141)",
        "timeout code 16 (268 ms): a SEND that is not answered",
        "it comes again no sooner than 268 ms after it was sent",
        |b| {
            let c = sends(b, Setup { timeout: 16, ..SETUP }, 1)?;
            b.expect_request(&c, c.sq(0))?;
            let heard = Instant::now();
            b.expect_request(&c, c.sq(0))?;
            let waited = heard.elapsed();
            b.say(&c.ack(c.sq(0), 1))?;
            b.expect_completions(&c, &[(1, status::SUCCESS)])?;
            // What was heard late makes the wait look short: half is told from the nominal time.
            must(waited >= Duration::from_millis(134), || format!("again after {} ms", waited.as_millis()))
        },
    )
    .deliberate(
        "Ferroce sends again after a few of the round trips that it measures, as cards with adaptive retransmission do; the timeout \
         decides when it gives up",
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
        "9.7.6.1.3, 9.9.2 (table 56)",
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
                    return must(wc.status == status::RETRY_EXC && count > 2, || format!("sent {count} times, then {name}"));
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
