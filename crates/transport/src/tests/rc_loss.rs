//! RC over a wire that loses, doubles and reorders.

use ferroce_wire::{Bth, Headers, Opcode as O, Psn};

use super::{acquaint, answers, attempts, ends, sent_by};
use crate::host::{Count, Drop};
use crate::testing::{Fate, Pair, Setup, Who};
use crate::timer::MS;
use crate::verbs::{QpAttr, QpState, QpType, SendOp, WcStatus};

const OK: WcStatus = WcStatus::Success;
const ACK: u8 = 0x1f;
const NAK: u8 = 0x60;

/// Five SENDs of one packet each.
fn five_sends(pair: &mut Pair) {
    pair.b.post_recvs(100, 5, 0, 100);
    for id in 0..5 {
        pair.post(id, SendOp::Send, id as u32 * 10, 10);
    }
}

fn five_arrived(pair: &Pair) {
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK), (2, OK), (3, OK), (4, OK)]);
    assert_eq!(ends(&pair.b.host.received), [(100, OK), (101, OK), (102, OK), (103, OK), (104, OK)]);
    for i in 0..5 {
        assert_eq!(pair.b.bytes(i * 100, 10), pair.a.bytes(i * 10, 10));
    }
}

#[test]
fn a_lost_packet_draws_one_nak_and_go_back_n() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.qp.go_back_n(true);
    pair.drop_nth(Who::A, &[2]);
    five_sends(&mut pair);
    pair.run();
    five_arrived(&pair);
    assert_eq!(answers(&pair, Who::B), [(ACK, 0x1001), (NAK, 0x1002), (ACK, 0x1002), (ACK, 0x1004)]);
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 3);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0);
    assert_eq!(pair.b.host.counted(Count::NakSequenceSent), 1);
    assert_eq!(pair.b.host.dropped(Drop::Psn), 2);
}

#[test]
fn a_lost_middle_of_a_message_resumes_where_it_broke() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.qp.go_back_n(true);
    pair.drop_nth(Who::A, &[1]);
    pair.post(1, pair.write_op(0), 500_000, 5000);
    pair.run();
    assert_eq!(pair.b.bytes(0, 5000), pair.a.bytes(500_000, 5000));
    let again: Vec<_> = pair.sent_by(Who::A).split_off(5);
    assert_eq!(
        again,
        [
            (O::RC_WRITE_MIDDLE, 0x1001),
            (O::RC_WRITE_MIDDLE, 0x1002),
            (O::RC_WRITE_MIDDLE, 0x1003),
            (O::RC_WRITE_LAST, 0x1004)
        ]
    );
}

#[test]
fn a_lost_last_packet_is_found_by_a_probe() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    pair.drop_nth(Who::A, &[2]);
    pair.b.post_recvs(100, 1, 0, 4000);
    pair.post(1, SendOp::Send, 0, 3000);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0);
    assert_eq!(pair.b.host.received.len(), 1);
    assert!(pair.now < 30 * MS, "long before the verbs timeout of 67 ms");
    // The answer to the first probe is that the peer has the first two; to the second that it still has no more.
    let again: Vec<_> = pair.sent_by(Who::A).split_off(3);
    assert_eq!(again, [(O::RC_WRITE_ONLY, 0x1000), (O::RC_WRITE_ONLY, 0x1000), (O::RC_SEND_LAST, 0x1003)]);
}

/// What a probe is on the wire: as the first packet was, and with its bytes, although the program has other ones there now.
#[test]
fn a_probe_is_a_packet_that_was_acknowledged_before() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    let (there, here) = (pair.b.bytes(0, 8).to_vec(), pair.a.region);
    pair.a.host.memory.write(here, 0, &[0xee; 8]);
    pair.rule(|who, _| if who == Who::B { Fate::Delay(30 * MS) } else { Fate::Deliver });
    pair.post(1, pair.write_op(0), 0, 8);
    pair.run();
    let probes: Vec<_> = sent_by(&pair, Who::A).split_off(1);
    assert!(!probes.is_empty());
    for probe in probes {
        let bth = probe.headers.bth;
        assert_eq!((bth.opcode, bth.psn.get(), bth.ack_req, probe.len), (O::RC_WRITE_ONLY, 0x1000, true, 8));
        assert_eq!(probe.headers.reth.map(|reth| (reth.va, reth.len)), Some((pair.b.region.addr, 8)));
    }
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_ne!(pair.b.bytes(0, 8), there, "the second WRITE");
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 0);
    assert_eq!(pair.b.host.counted(Count::DuplicateRequest), pair.a.host.counted(Count::ProbeSent));
    assert_eq!(pair.b.host.memory.atomics, 0);
}

#[test]
fn a_lost_acknowledge_is_told_again_to_a_probe() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    pair.drop_nth(Who::B, &[0]);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!((pair.a.host.counted(Count::ProbeSent), pair.a.host.counted(Count::PacketsRetransmitted)), (1, 0));
}

#[test]
fn a_peer_that_is_away_for_long_is_asked_and_not_sent_to_again() {
    // Nothing reaches it for 150 ms, and nothing is lost.
    let mut pair = Pair::new(QpType::Rc);
    pair.post(0, pair.write_op(0), 0, 8);
    pair.run();
    let until = pair.now + 150 * MS;
    for id in 1..10 {
        pair.post(id, if id % 2 == 0 { pair.write_op(0) } else { pair.read_op(0) }, 0, 20_000);
    }
    pair.buffer(Who::B, u32::MAX, 0);
    pair.pause(Who::B, 150 * MS);
    pair.run();
    assert_eq!(pair.a.host.sent.len(), 10);
    assert!(pair.now >= until && pair.a.host.sent.iter().all(|done| done.status == OK));
    assert!((1..11).contains(&pair.a.host.counted(Count::ProbeSent)));
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 0);
}

/// The answer to a first probe comes late, when there was news and another one was sent. It is about what was there before.
#[test]
fn a_late_answer_to_a_probe_says_nothing_of_what_came_since() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    let mut probes = 0;
    pair.rule(move |who, packet| match (who, packet.headers.bth.psn.get()) {
        (Who::B, 0x1001) => Fate::Delay(10 * MS),
        (Who::B, 0x1002) => Fate::Delay(40 * MS),
        // READs do not move what is acknowledged: both probes are answered by this.
        (Who::B, 0x1000) => {
            probes += 1;
            Fate::Delay(if probes == 1 { 20 * MS } else { 60 * MS })
        }
        _ => Fate::Deliver,
    });
    pair.post(1, pair.read_op(0), 0, 8);
    pair.run_for(MS);
    pair.post(2, pair.read_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
    assert!(pair.a.host.counted(Count::ProbeSent) > 1);
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 0);
}

#[test]
fn a_peer_that_answers_no_probes_is_sent_to_again_all_the_same() {
    let mut pair = Pair::new(QpType::Rc);
    let mut first = true;
    pair.rule(move |who, packet| {
        let probe = packet.headers.bth.psn.get() == 0x0fff;
        let lost = who == Who::A && (probe || std::mem::take(&mut first));
        if lost { Fate::Drop } else { Fate::Deliver }
    });
    pair.post(1, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!((pair.a.host.counted(Count::Timeout), pair.now / MS), (1, 268));
}

#[test]
fn a_lost_ack_delivers_once() {
    let mut pair = Pair::new(QpType::Rc);
    pair.drop_nth(Who::B, &[0]);
    pair.b.post_recvs(100, 2, 0, 100);
    pair.post(1, SendOp::Send, 0, 10);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(pair.b.host.received.len(), 1);
    assert_eq!(pair.b.host.counted(Count::DuplicateRequest), 1);
}

#[test]
fn a_later_ack_completes_earlier_requests() {
    let mut pair = Pair::new(QpType::Rc);
    pair.drop_nth(Who::B, &[0, 1, 2]);
    pair.b.post_recvs(100, 4, 0, 100);
    for id in 0..4 {
        pair.post(id, SendOp::Send, 0, 10);
        pair.run_for(1000);
    }
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK), (2, OK), (3, OK)]);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0);
}

#[test]
fn a_lost_nak_is_found_by_a_probe_for_there_is_only_one() {
    let mut pair = Pair::new(QpType::Rc);
    let mut lost = (false, false);
    pair.rule(move |who, packet| {
        let nak = packet.headers.aeth.is_some_and(|aeth| aeth.syndrome.is_nak());
        let lose = match who {
            Who::A => packet.headers.bth.psn.get() == 0x1001 && !std::mem::replace(&mut lost.0, true),
            Who::B => nak && !std::mem::replace(&mut lost.1, true),
        };
        if lose { Fate::Drop } else { Fate::Deliver }
    });
    five_sends(&mut pair);
    pair.run();
    five_arrived(&pair);
    assert_eq!(pair.b.host.counted(Count::NakSequenceSent), 1);
    assert_eq!((pair.a.host.counted(Count::Timeout), pair.a.host.counted(Count::ProbeSent)), (0, 1));
}

#[test]
fn the_same_packet_lost_twice() {
    let mut pair = Pair::new(QpType::Rc);
    let mut times = 0;
    pair.rule(move |who, packet| {
        let hit = who == Who::A && packet.headers.bth.psn.get() == 0x1002;
        times += u32::from(hit);
        if hit && times <= 2 { Fate::Drop } else { Fate::Deliver }
    });
    five_sends(&mut pair);
    pair.run();
    five_arrived(&pair);
}

#[test]
fn doubled_requests_are_executed_once() {
    let mut pair = Pair::new(QpType::Rc);
    pair.rule(|who, _| if who == Who::A { Fate::Duplicate } else { Fate::Deliver });
    pair.b.host.memory.write(pair.b.region, 64, &0u64.to_ne_bytes());
    five_sends(&mut pair);
    pair.post(5, pair.add_op(64, 1), 8000, 8);
    pair.post(6, pair.read_op(0), 9000, 2053);
    pair.run();
    assert_eq!(pair.a.host.sent.len(), 7);
    assert_eq!(pair.b.host.received.len(), 5);
    assert_eq!((pair.b.host.memory.atomics, pair.b.bytes(64, 8)), (1, &1u64.to_ne_bytes()[..]));
    assert_eq!(pair.a.bytes(9000, 2053), pair.b.bytes(0, 2053));
}

#[test]
fn doubled_answers_are_ghosts() {
    let mut pair = Pair::new(QpType::Rc);
    pair.rule(|who, _| if who == Who::B { Fate::Duplicate } else { Fate::Deliver });
    five_sends(&mut pair);
    pair.post(5, pair.read_op(0), 9000, 2053);
    pair.post(6, pair.add_op(64, 1), 8000, 8);
    pair.run();
    assert_eq!(pair.a.host.sent.len(), 7);
    assert_eq!(pair.a.host.dropped(Drop::GhostResponse), 5);
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 0);
}

#[test]
fn a_nak_asks_for_what_is_missing_when_it_leaves() {
    // In one batch, packet 1 behind packet 2: packet 2 was dropped, and packet 1 is there.
    let mut pair = Pair::new(QpType::Rc);
    pair.b.qp.go_back_n(true);
    pair.b.post_recvs(100, 3, 0, 100);
    for psn in [0x1000, 0x1002, 0x1001] {
        let mut headers = Headers::new(Bth::new(O::RC_SEND_ONLY, 0, Psn::new(psn)));
        headers.bth.ack_req = true;
        pair.inject(Who::A, headers, &[0; 10]);
    }
    pair.run();
    assert_eq!(answers(&pair, Who::B), [(ACK, 0x1000), (NAK, 0x1002), (ACK, 0x1001)]);
    assert_eq!(pair.b.host.received.len(), 2);
    // The gap still is that NAK's: no other for it.
    for psn in [0x1003, 0x1004] {
        pair.inject(Who::A, Headers::new(Bth::new(O::RC_SEND_ONLY, 0, Psn::new(psn))), &[0; 10]);
        pair.run();
    }
    assert_eq!(answers(&pair, Who::B).len(), 3);
    assert_eq!(pair.b.host.counted(Count::NakSequenceSent), 1);
}

#[test]
fn a_late_packet_is_asked_for() {
    let mut pair = Pair::new(QpType::Rc);
    pair.fate_nth(Who::A, &[1], Fate::Delay(20_000));
    five_sends(&mut pair);
    pair.run();
    five_arrived(&pair);
    assert_eq!(answers(&pair, Who::B)[..2], [(ACK, 0x1000), (NAK, 0x1001)]);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0);
}

#[test]
fn a_late_ack_is_a_ghost() {
    let mut pair = Pair::new(QpType::Rc);
    pair.fate_nth(Who::B, &[0], Fate::Delay(20_000));
    pair.b.post_recvs(100, 2, 0, 100);
    pair.post(0, SendOp::Send, 0, 10);
    pair.run_for(1000);
    pair.post(1, SendOp::Send, 0, 10);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK)]);
    assert_eq!(pair.a.host.dropped(Drop::GhostResponse), 1);
}

#[test]
fn a_duplicate_is_acknowledged_with_the_newest_send_or_write_not_a_read() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(100, 2, 0, 100);
    pair.post(0, SendOp::Send, 0, 10);
    pair.post(1, pair.read_op(0), 5000, 2048);
    pair.run();
    pair.inject(Who::A, Headers::new(Bth::new(O::RC_SEND_ONLY, 0, Psn::new(0x1000))), &[0; 10]);
    pair.run();
    assert_eq!(answers(&pair, Who::B).last(), Some(&(ACK, 0x1000)));
    assert_eq!(pair.b.host.received.len(), 1);
    // From long ago, even from before the start.
    pair.inject(Who::A, Headers::new(Bth::new(O::RC_SEND_MIDDLE, 0, Psn::new(0x80_1004))), &[0; 10]);
    pair.run();
    assert_eq!(answers(&pair, Who::B).last(), Some(&(ACK, 0x1000)));
}

#[test]
fn half_the_circle_behind_is_behind_and_less_is_ahead() {
    let expected = 0x1000;
    for (psn, ahead) in [(expected + 0x80_0000, false), (expected + 0x7f_ffff, true)] {
        let mut pair = Pair::new(QpType::Rc);
        pair.inject(Who::A, Headers::new(Bth::new(O::RC_SEND_ONLY, 0, Psn::new(psn))), &[0; 10]);
        pair.run();
        let expect = if ahead { (NAK, expected) } else { (ACK, expected - 1) };
        assert_eq!(answers(&pair, Who::B), [expect]);
    }
}

#[test]
fn lost_atomics_are_executed_once() {
    for lost in [Who::A, Who::B] {
        let mut pair = Pair::new(QpType::Rc);
        pair.b.host.memory.write(pair.b.region, 64, &0u64.to_ne_bytes());
        pair.drop_nth(lost, &[0]);
        pair.post(1, pair.add_op(64, 1), 0, 8);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
        assert_eq!(pair.b.bytes(64, 8), 1u64.to_ne_bytes());
        assert_eq!(pair.a.bytes(0, 8), 0u64.to_ne_bytes());
    }
}

#[test]
fn a_missing_atomic_answer_is_asked_for_when_a_later_one_comes() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.host.memory.write(pair.b.region, 64, &0u64.to_ne_bytes());
    pair.drop_nth(Who::B, &[0, 1]);
    for id in 0..4 {
        pair.post(id, pair.add_op(64, 1), id as u32 * 8, 8);
    }
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK), (2, OK), (3, OK)]);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0, "the gap told");
    assert_eq!(pair.b.host.memory.atomics, 4);
    for id in 0..4 {
        assert_eq!(pair.a.bytes(id * 8, 8), u64::from(id).to_ne_bytes());
    }
}

#[test]
fn an_unknown_duplicate_atomic_or_read_stays_unanswered() {
    let mut pair = Pair::new(QpType::Rc);
    let mut headers = Headers::new(Bth::new(O::RC_FETCH_ADD, 0, Psn::new(0x0fff)));
    let va = pair.b.region.addr;
    headers.atomic = Some(ferroce_wire::AtomicEth { va, rkey: pair.b.region.key, swap_add: 1, compare: 0 });
    pair.inject(Who::A, headers, &[]);
    let mut headers = Headers::new(Bth::new(O::RC_READ_REQUEST, 0, Psn::new(0x0ffe)));
    headers.reth = Some(ferroce_wire::Reth { va, rkey: pair.b.region.key, len: 8 });
    pair.inject(Who::A, headers, &[]);
    pair.run();
    assert!(pair.seen.is_empty());
    assert_eq!(pair.b.host.dropped(Drop::DuplicateUnknown), 2);
    assert_eq!(pair.b.host.memory.atomics, 0);
}

#[test]
fn gives_up_after_the_verbs_time_with_enough_attempts() {
    for (timeout, retry_cnt, ms) in [(10, 3, 1_000), (14, 7, 2_147), (14, 0, 1_000), (16, 1, 2_147), (18, 2, 12_884)] {
        let attr = QpAttr { timeout, retry_cnt, ..Setup::new(QpType::Rc).attr };
        let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) });
        pair.post(0, pair.write_op(0), 0, 8);
        pair.run();
        pair.rule(|who, _| if who == Who::A { Fate::Drop } else { Fate::Deliver });
        let start = pair.now;
        pair.post(1, pair.write_op(0), 0, 8);
        pair.post(2, pair.write_op(0), 0, 8);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, WcStatus::RetryExcErr), (2, WcStatus::WrFlushErr)]);
        assert_eq!((pair.now - start) / MS, ms, "timeout {timeout} retry {retry_cnt}");
        assert!(attempts(&pair, Who::A, 0x1001) > usize::from(retry_cnt));
        assert_eq!(pair.a.qp.state(), QpState::Err);
    }
}

#[test]
fn timeout_zero_waits_for_ever() {
    let attr = QpAttr { timeout: 0, retry_cnt: 0, ..Setup::new(QpType::Rc).attr };
    let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) });
    pair.rule(|_, _| Fate::Drop);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.run_for(3_600_000 * MS);
    assert!(pair.a.host.sent.is_empty());
    pair.rule(|_, _| Fate::Deliver);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
}

#[test]
fn progress_starts_the_time_anew() {
    let attr = QpAttr { timeout: 10, retry_cnt: 1, ..Setup::new(QpType::Rc).attr };
    let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) });
    // Every packet needs a timeout; the whole needs many times the second of one. Probes find no way.
    let mut last = None;
    pair.rule(move |who, packet| {
        let psn = packet.headers.bth.psn;
        let lost = who == Who::A && last.is_none_or(|last| psn.diff(last) != 0);
        if who == Who::A && last.is_none_or(|last: Psn| psn.diff(last) > 0) {
            last = Some(psn);
        }
        if lost { Fate::Drop } else { Fate::Deliver }
    });
    for id in 0..20 {
        pair.post(id, pair.write_op(0), 0, 8);
        pair.run();
    }
    assert_eq!(pair.a.host.sent.len(), 20);
    assert!(pair.a.host.sent.iter().all(|done| done.status == OK));
    assert!(pair.now > 2 * 1_000 * MS);
    assert_eq!(pair.a.host.counted(Count::Timeout), 20);
}

#[test]
fn endless_naks_without_progress_end_too() {
    let attr = QpAttr { timeout: 10, retry_cnt: 2, ..Setup::new(QpType::Rc).attr };
    let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) });
    pair.rule(|_, _| Fate::Drop);
    pair.post(1, pair.write_op(0), 0, 8);
    let mut headers = Headers::new(Bth::new(O::RC_ACKNOWLEDGE, 0, Psn::new(0x1000)));
    headers.aeth = Some(ferroce_wire::Aeth { syndrome: ferroce_wire::Syndrome::NAK_SEQUENCE, msn: 0 });
    for _ in 0..200 {
        pair.run_for(10 * MS);
        pair.inject(Who::B, headers, &[]);
    }
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RetryExcErr)]);
}

#[test]
fn a_slow_peer_is_not_sent_to_again() {
    // The peer's answers take 1 ms, or 9 ms, or 50 ms, as on a machine where it is not scheduled. One that is always slow is learnt.
    for (delay, probes) in [(1, 0), (9, 0), (50, 4), (250, 8)] {
        let mut pair = Pair::new(QpType::Rc);
        pair.rule(move |who, _| if who == Who::B { Fate::Delay(delay * MS) } else { Fate::Deliver });
        for id in 0..50 {
            pair.post(id, pair.write_op(0), 0, 100_000);
            pair.run();
        }
        assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 0);
        assert!(
            pair.a.host.counted(Count::ProbeSent) <= probes,
            "{delay} ms: {}",
            pair.a.host.counted(Count::ProbeSent)
        );
    }
}

#[test]
fn answers_to_the_first_sending_count_while_it_is_sent_again() {
    // The first sending's ACKs come after the timeout: what they cover need not be sent again.
    let mut pair = Pair::new(QpType::Rc);
    pair.rule(|who, _| if who == Who::B { Fate::Delay(290 * MS) } else { Fate::Deliver });
    for id in 0..4 {
        pair.post(id, pair.write_op(0), 0, 60_000);
    }
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK), (2, OK), (3, OK)]);
    assert!(sent_by(&pair, Who::A).len() < 3 * 4 * 59);
}
