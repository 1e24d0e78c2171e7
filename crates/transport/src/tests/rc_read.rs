//! READ and its answers when some get lost.

use ferroce_wire::{Aeth, Bth, Headers, Opcode as O, Psn, Reth, Syndrome};

use super::{acquaint, answers, ends, sent_by};
use crate::host::{Count, Drop};
use crate::testing::{Fate, Pair, Region, Setup, Who};
use crate::timer::ack_timeout;
use crate::verbs::{Access, QpAttr, QpState, QpType, SendOp, WcStatus};

const OK: WcStatus = WcStatus::Success;

/// (PSN, offset, length) of the READ requests sent.
fn requests(pair: &Pair) -> Vec<(u32, u64, u32)> {
    sent_by(pair, Who::A)
        .iter()
        .filter_map(|seen| {
            let reth = seen.headers.reth.filter(|_| seen.headers.bth.opcode == O::RC_READ_REQUEST)?;
            Some((seen.headers.bth.psn.get(), reth.va - pair.b.region.addr, reth.len))
        })
        .collect()
}

#[test]
fn a_lost_request_is_repeated() {
    let mut pair = Pair::new(QpType::Rc);
    pair.drop_nth(Who::A, &[0]);
    pair.post(1, pair.read_op(0), 50_000, 3077);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(pair.a.bytes(50_000, 3077), pair.b.bytes(0, 3077));
    assert_eq!(requests(&pair), [(0x1000, 0, 3077), (0x1000, 0, 3077)]);
}

#[test]
fn a_missing_response_is_asked_for_from_there_on_once() {
    let mut pair = Pair::new(QpType::Rc);
    pair.drop_nth(Who::B, &[2]);
    pair.post(1, pair.read_op(0), 50_000, 10_000);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(pair.a.bytes(50_000, 10_000), pair.b.bytes(0, 10_000));
    assert_eq!(requests(&pair), [(0x1000, 0, 10_000), (0x1002, 2048, 7952)]);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0);
    let answers = pair.sent_by(Who::B);
    assert_eq!(answers[10], (O::RC_READ_RESPONSE_FIRST, 0x1002), "as a new request is answered");
    assert_eq!(answers.len(), 10 + 8);
}

#[test]
fn a_missing_last_response_is_found_by_a_probe() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    pair.drop_nth(Who::B, &[3]);
    pair.post(1, pair.read_op(0), 50_000, 3077);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(requests(&pair), [(0x1001, 0, 3077), (0x1004, 3072, 5)]);
    assert_eq!((pair.a.host.counted(Count::Timeout), pair.a.host.counted(Count::ProbeSent)), (0, 1));
}

/// Nothing was acknowledged that a probe could repeat.
#[test]
fn a_queue_pair_that_only_reads_finds_it_by_the_ack_timeout() {
    let mut pair = Pair::new(QpType::Rc);
    pair.post(1, pair.read_op(0), 50_000, 8);
    pair.run();
    pair.drop_nth(Who::B, &[0]);
    let began = pair.now;
    pair.post(2, pair.read_op(0), 50_000, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
    assert_eq!((pair.a.host.counted(Count::Timeout), pair.a.host.counted(Count::ProbeSent)), (1, 0));
    let nominal = ack_timeout(pair.a.qp.attr().timeout).expect("not endless");
    assert!((nominal..=5 * nominal).contains(&(pair.now - began)), "{} ns", pair.now - began);
}

#[test]
fn the_rest_of_an_old_answer_is_taken_after_a_repeat() {
    // As kernel rxe answers a repeated request: MIDDLE, LAST.
    for lost in [0, 1, 2, 3] {
        let mut pair = Pair::new(QpType::Rc);
        pair.rule(|_, _| Fate::Drop);
        pair.post(1, pair.read_op(0), 50_000, 3077);
        pair.run_for(0);
        let aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 1 });
        let answer = |pair: &mut Pair, index: u32| {
            let opcode = [
                O::RC_READ_RESPONSE_FIRST,
                O::RC_READ_RESPONSE_MIDDLE,
                O::RC_READ_RESPONSE_MIDDLE,
                O::RC_READ_RESPONSE_LAST,
            ];
            let mut headers = Headers::new(Bth::new(opcode[index as usize], 0, Psn::new(0x1000 + index)));
            headers.aeth = aeth;
            let bytes = pair.b.bytes(index * 1024, 1024.min(3077 - index * 1024)).to_vec();
            pair.inject(Who::B, headers, &bytes);
            pair.run_for(0);
        };
        (0..4).filter(|&index| index < lost).for_each(|index| answer(&mut pair, index));
        pair.run_for(290_000_000);
        assert!(requests(&pair).len() > 1, "asked again");
        (lost..4).for_each(|index| answer(&mut pair, index));
        assert_eq!(ends(&pair.a.host.sent), [(1, OK)], "lost {lost}");
        assert_eq!(pair.a.bytes(50_000, 3077), pair.b.bytes(0, 3077));
    }
}

#[test]
fn a_later_read_shows_that_an_earlier_answer_is_missing() {
    let mut pair = Pair::new(QpType::Rc);
    pair.drop_nth(Who::B, &[0, 1]);
    for id in 0..3 {
        pair.post(id, pair.read_op(id as u32 * 2048), 50_000 + id as u32 * 2048, 2048);
    }
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK), (2, OK)]);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0);
    assert_eq!(pair.a.bytes(50_000, 6144), pair.b.bytes(0, 6144));
    assert_eq!(requests(&pair).len(), 6, "repeated once");
}

#[test]
fn a_response_acknowledges_what_was_before() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(100, 1, 0, 100);
    pair.rule(|who, packet| {
        let ack = packet.headers.bth.opcode == O::RC_ACKNOWLEDGE;
        if who == Who::B && ack { Fate::Drop } else { Fate::Deliver }
    });
    pair.post(0, crate::SendOp::Send, 0, 10);
    pair.post(1, pair.write_op(0), 0, 10);
    pair.post(2, pair.read_op(0), 50_000, 10);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK), (2, OK)]);
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 0);
}

#[test]
fn an_ack_behind_a_read_shows_that_its_answer_is_missing() {
    let mut pair = Pair::new(QpType::Rc);
    pair.drop_nth(Who::B, &[0]);
    pair.post(0, pair.read_op(0), 50_000, 10);
    pair.post(1, pair.write_op(0), 0, 10);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK)]);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0);
    assert_eq!(pair.a.bytes(50_000, 10), pair.b.bytes(0, 10));
}

#[test]
fn overtaking_responses_end_well() {
    let mut pair = Pair::new(QpType::Rc);
    pair.fate_nth(Who::B, &[1], Fate::Delay(1_000_000));
    pair.post(1, pair.read_op(0), 50_000, 4096);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(pair.a.bytes(50_000, 4096), pair.b.bytes(0, 4096));
}

#[test]
fn a_repeated_read_must_lie_within_what_was_asked() {
    let ask = |psn: u32, offset: u64, len: u32| {
        let mut pair = Pair::new(QpType::Rc);
        pair.post(1, pair.read_op(0), 50_000, 4000);
        pair.run();
        let before = sent_by(&pair, Who::B).len();
        let mut headers = Headers::new(Bth::new(O::RC_READ_REQUEST, 0, Psn::new(psn)));
        headers.reth = Some(Reth { va: pair.b.region.addr + offset, rkey: pair.b.region.key, len });
        pair.inject(Who::A, headers, &[]);
        pair.run();
        assert_eq!(pair.b.qp.state(), QpState::Rts);
        let answered = sent_by(&pair, Who::B).len() - before;
        assert_eq!(answered == 0, pair.b.host.dropped(Drop::DuplicateUnknown) == 1);
        answered
    };
    assert_eq!(ask(0x1000, 0, 4000), 4);
    assert_eq!(ask(0x1002, 2048, 1952), 2);
    assert_eq!(ask(0x1002, 2048, 100), 1);
    assert_eq!(ask(0x1002, 2048, 1953), 0, "past the end");
    assert_eq!(ask(0x1002, 2047, 1000), 0, "another place");
    assert_eq!(ask(0x0fff, 0, 1000), 0, "before it");
}

#[test]
fn more_reads_than_agreed_are_served_up_to_a_bound() {
    let flood = |count: u32| {
        let attr = QpAttr { max_dest_rd_atomic: 1, ..Setup::new(QpType::Rc).attr };
        let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) });
        for index in 0..count {
            let mut headers = Headers::new(Bth::new(O::RC_READ_REQUEST, 0, Psn::new(0x1000 + index)));
            headers.reth = Some(Reth { va: pair.b.region.addr, rkey: pair.b.region.key, len: 10 });
            pair.inject(Who::A, headers, &[]);
        }
        // All arrive in one batch: nothing is answered between.
        pair.run();
        let lost = (pair.b.host.dropped(Drop::Overload), pair.b.host.counted(Count::RequestHeld));
        (sent_by(&pair, Who::B).len(), pair.b.qp.state(), lost)
    };
    assert_eq!(flood(16), (16, QpState::Rts, (0, 0)));
    assert_eq!(flood(20), (17, QpState::Rts, (1, 3)), "one is as if lost, a NAK asks for it, and three wait");
}

#[test]
fn a_repeat_of_a_read_that_still_waits_for_its_answer_is_answered_once() {
    let mut pair = Pair::new(QpType::Rc);
    let mut headers = Headers::new(Bth::new(O::RC_READ_REQUEST, 0, Psn::new(0x1000)));
    headers.reth = Some(Reth { va: pair.b.region.addr, rkey: pair.b.region.key, len: 10 });
    for _ in 0..3 {
        pair.inject(Who::A, headers, &[]);
    }
    pair.run();
    assert_eq!(sent_by(&pair, Who::B).len(), 1);
}

#[test]
fn a_missing_answer_is_asked_for_once_however_many_later_ones_show_it() {
    let mut pair = Pair::new(QpType::Rc);
    let mut place = 0;
    pair.rule(move |who, _| {
        if who == Who::A {
            return Fate::Deliver;
        }
        place += 1;
        // The first is lost; the rest of the first round come one by one, far apart.
        match place {
            1 => Fate::Drop,
            2..=8 => Fate::Delay(place * 50_000),
            _ => Fate::Delay(400_000),
        }
    });
    for id in 0..8 {
        pair.post(id, pair.read_op(0), 50_000, 10);
    }
    pair.run();
    assert_eq!(pair.a.host.sent.len(), 8);
    assert_eq!(requests(&pair).len(), 16);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0);
}

#[test]
fn an_answer_of_several_trains_is_one_answer() {
    // One request for more than a train, as a foreign requester makes it. The last train has one packet, or two.
    for (len, packets) in [(61_441, 61), (62_465, 62), (122_880, 120)] {
        let mut pair = Pair::new(QpType::Rc);
        let mut headers = Headers::new(Bth::new(O::RC_READ_REQUEST, 0, Psn::new(0x1000)));
        headers.reth = Some(Reth { va: pair.b.region.addr, rkey: pair.b.region.key, len });
        pair.inject(Who::A, headers, &[]);
        pair.run();
        let answer = sent_by(&pair, Who::B);
        assert_eq!(answer.len(), packets);
        for (index, seen) in answer.iter().enumerate() {
            let (opcode, aeth) = match index {
                0 => (O::RC_READ_RESPONSE_FIRST, true),
                _ if index + 1 == packets => (O::RC_READ_RESPONSE_LAST, true),
                _ => (O::RC_READ_RESPONSE_MIDDLE, false),
            };
            assert_eq!((seen.headers.bth.opcode, seen.headers.aeth.is_some()), (opcode, aeth), "packet {index}");
            assert_eq!(seen.headers.bth.psn.get(), 0x1000 + index as u32);
        }
        assert_eq!(answer.iter().map(|seen| seen.len).sum::<usize>(), len as usize);
    }
}

/// A READ request for the first bytes of a region of B, as A sends it.
fn read_request(psn: u32, region: Region, len: u32) -> Headers {
    let mut headers = Headers::new(Bth::new(O::RC_READ_REQUEST, 0, Psn::new(psn)));
    headers.reth = Some(Reth { va: region.addr, rkey: region.key, len });
    headers
}

#[test]
fn a_repeat_of_a_read_that_was_answered_harms_nobody_when_its_memory_is_gone() {
    for unmapped in [false, true] {
        let mut pair = Pair::new(QpType::Rc);
        let region = pair.b.host.memory.register(7, 200_000, Access::REMOTE_READ);
        pair.post(1, SendOp::Read { raddr: region.addr, rkey: region.key }, 50_000, 100);
        pair.run();
        if unmapped {
            pair.b.host.memory.unmap(region);
        } else {
            pair.b.host.memory.deregister(region);
        }
        pair.inject(Who::A, read_request(0x1000, region, 100), &[]);
        pair.post(2, pair.read_op(0), 50_000, 100);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
        assert_eq!((pair.a.qp.state(), pair.b.qp.state()), (QpState::Rts, QpState::Rts));
        assert_eq!(pair.b.host.events, []);
        assert_eq!(pair.a.host.dropped(Drop::GhostResponse), 1, "the refusal of the repeat");
    }
}

#[test]
fn a_read_whose_answer_was_lost_is_told_that_its_memory_is_gone_since() {
    for (unmapped, status) in [(false, WcStatus::RemAccessErr), (true, WcStatus::RemOpErr)] {
        let mut pair = Pair::new(QpType::Rc);
        let region = pair.b.host.memory.register(7, 200_000, Access::REMOTE_READ);
        pair.drop_nth(Who::B, &[0]);
        pair.post(1, SendOp::Read { raddr: region.addr, rkey: region.key }, 50_000, 100);
        pair.run_for(1_000_000);
        assert_eq!(sent_by(&pair, Who::B).len(), 1, "answered once");
        if unmapped {
            pair.b.host.memory.unmap(region);
        } else {
            pair.b.host.memory.deregister(region);
        }
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, status)]);
        assert_eq!(pair.b.qp.state(), QpState::Rts, "a request that was executed is no error of the responder");
    }
}

#[test]
fn a_long_repeat_whose_memory_is_gone_is_refused_once() {
    for unmapped in [false, true] {
        let mut pair = Pair::new(QpType::Rc);
        let region = pair.b.host.memory.register(7, 200_000, Access::REMOTE_READ);
        pair.inject(Who::A, read_request(0x1000, region, 200_000), &[]);
        pair.run();
        if unmapped {
            pair.b.host.memory.unmap(region);
        } else {
            pair.b.host.memory.deregister(region);
        }
        let before = answers(&pair, Who::B).len();
        pair.inject(Who::A, read_request(0x1000, region, 200_000), &[]);
        pair.run();
        let syndrome = if unmapped { Syndrome::NAK_REMOTE_OPERATIONAL } else { Syndrome::NAK_REMOTE_ACCESS };
        assert_eq!(answers(&pair, Who::B)[before..], [(syndrome.0, 0x1000)]);
        assert_eq!(pair.b.qp.state(), QpState::Rts);
    }
}

#[test]
fn as_many_reads_as_the_limit_allows_are_outstanding_at_once_and_acknowledges_still_find_their_place() {
    let limit = crate::MAX_RD_ATOMIC;
    let attr = QpAttr { max_rd_atomic: limit, max_dest_rd_atomic: limit, ..Setup::new(QpType::Rc).attr };
    let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) });
    for id in 0..u64::from(limit) {
        pair.post(id, pair.read_op(0), 50_000, 8);
    }
    pair.drain();
    assert!(requests(&pair).len() > 50, "as many as a new window lets through, before an answer");
    pair.run();
    assert_eq!(pair.a.host.sent.len(), usize::from(limit));
    // A flood up to the responder's own bound, all in one batch, and a WRITE behind it.
    let first = 0x1000 + u32::from(limit);
    let flood = 4 * u32::from(limit);
    for index in 0..flood {
        pair.inject(Who::A, read_request(first + index, pair.b.region, 8), &[]);
    }
    let mut write = Headers::new(Bth::new(O::RC_WRITE_ONLY, 0, Psn::new(first + flood)));
    write.reth = Some(Reth { va: 0, rkey: 0, len: 0 });
    write.bth.ack_req = true;
    pair.inject(Who::A, write, &[]);
    let before = sent_by(&pair, Who::B).len();
    pair.run_for(0);
    let answers = sent_by(&pair, Who::B).split_off(before);
    assert_eq!(answers.len(), flood as usize + 1);
    assert_eq!(answers.last().unwrap().headers.bth.opcode, O::RC_ACKNOWLEDGE);
}
