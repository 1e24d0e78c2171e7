//! RC: a loss costs what was lost. Packets behind a gap are kept, and only the missing one is sent again.

use ferroce_wire::{Aeth, AtomicEth, Bth, Headers, Opcode as O, Psn, Reth, Syndrome};

use super::{acquaint, answers, attempts, ends, sent_by};
use crate::host::{Count, Drop};
use crate::testing::{Fate, Pair, Setup, Who};
use crate::timer::MS;
use crate::verbs::{QpState, QpType, SendFlags, SendOp, WcStatus};

const OK: WcStatus = WcStatus::Success;
const ACK: u8 = 0x1f;
const NAK: u8 = 0x60;

/// A request from A that asks for an ACK.
fn request(opcode: O, psn: u32) -> Headers {
    let mut headers = Headers::new(Bth::new(opcode, 0, Psn::new(psn)));
    headers.bth.ack_req = true;
    headers
}

/// A WRITE of nothing that asks for an ACK.
fn empty_write(psn: u32) -> Headers {
    Headers { reth: Some(Reth { va: 0, rkey: 0, len: 0 }), ..request(O::RC_WRITE_ONLY, psn) }
}

/// Drops the packets with these PSNs from A the first time.
fn lose_once(pair: &mut Pair, psns: &[u32]) {
    let mut psns = psns.to_vec();
    pair.rule(move |who, packet| {
        let hit = psns.iter().position(|&psn| who == Who::A && psn == packet.headers.bth.psn.get());
        match hit {
            Some(index) => {
                psns.swap_remove(index);
                Fate::Drop
            }
            None => Fate::Deliver,
        }
    });
}

/// A knows that B keeps packets: after an acknowledged WRITE, the loss of PSN 0x1001 of five packets up to 0x1005.
fn keeps(pair: &mut Pair) {
    acquaint(pair);
    lose_once(pair, &[0x1001]);
    pair.post(0, pair.write_op(0), 0, 5000);
    pair.run();
    forget(pair);
}

fn forget(pair: &mut Pair) {
    for end in [&mut pair.a, &mut pair.b] {
        end.host.counts.clear();
        end.host.drops.clear();
        end.host.sent.clear();
    }
    pair.seen.clear();
}

/// PSNs that A sent more than once, in order.
fn again(pair: &Pair) -> Vec<u32> {
    let mut seen = std::collections::BTreeSet::new();
    sent_by(pair, Who::A).iter().map(|sent| sent.headers.bth.psn.get()).filter(|&psn| !seen.insert(psn)).collect()
}

#[test]
fn the_first_loss_is_repaired_by_one_packet() {
    let mut pair = Pair::new(QpType::Rc);
    pair.drop_nth(Who::A, &[1]);
    pair.post(1, pair.write_op(0), 500_000, 5000);
    pair.run();
    assert_eq!(pair.b.bytes(0, 5000), pair.a.bytes(500_000, 5000));
    assert_eq!(pair.sent_by(Who::A).split_off(5), [(O::RC_WRITE_MIDDLE, 0x1001)]);
    assert_eq!(answers(&pair, Who::B), [(NAK, 0x1001), (ACK, 0x1004)]);
    assert_eq!(pair.b.host.counted(Count::RequestHeld), 3);
    assert_eq!((pair.b.host.dropped(Drop::Psn), pair.a.host.counted(Count::Timeout)), (0, 0));
}

#[test]
fn every_loss_costs_one_packet_while_others_go_on() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    // Of 400 packets in eight messages: some from the middle, and the first ones of two messages.
    let lost = [0x1010, 0x1080, 0x1095, 0x1006 + 50, 0x1006 + 109, 0x1006 + 120, 0x1006 + 300];
    lose_once(&mut pair, &lost);
    for id in 0..8 {
        pair.post(id, pair.write_op(100_000 * id as u32), 0, 50 * 1024);
    }
    pair.run();
    assert!(pair.a.host.sent.len() == 8 && pair.a.host.sent.iter().all(|done| done.status == OK));
    for id in 0..8 {
        assert_eq!(pair.b.bytes(100_000 * id, 50 * 1024), pair.a.bytes(0, 50 * 1024));
    }
    let (mut lost, mut again) = (lost.to_vec(), again(&pair));
    lost.sort_unstable();
    again.sort_unstable();
    assert_eq!(again, lost);
    assert_eq!((pair.a.host.counted(Count::Timeout), pair.a.host.counted(Count::ProbeSent)), (0, 0));
    assert_eq!(pair.b.host.counted(Count::NakSequenceSent), 7);
}

#[test]
fn new_packets_go_on_while_a_gap_is_open() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    lose_once(&mut pair, &[0x1006, 0x1006]);
    for id in 0..30 {
        pair.post(id, pair.write_op(0), 0, 1024);
        pair.run_for(1_000);
    }
    assert!(pair.a.host.sent.is_empty(), "its repair is lost, too");
    assert_eq!(pair.b.host.counted(Count::RequestHeld), 25, "as far as they arrived");
    pair.run();
    assert_eq!(pair.a.host.sent.len(), 30);
    assert_eq!(again(&pair).iter().filter(|&&psn| psn != 0x1005).collect::<Vec<_>>(), [&0x1006, &0x1006]);
}

#[test]
fn the_loss_of_a_repair_is_found_by_a_probe() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    lose_once(&mut pair, &[0x1007, 0x1007]);
    pair.post(1, pair.write_op(0), 0, 8000);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!((pair.a.host.counted(Count::ProbeSent), pair.a.host.counted(Count::Timeout)), (1, 0));
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 2);
    assert!(pair.now < 10 * MS, "{}", pair.now);
}

/// Drops, besides these packets of A, the first NAK of B for `nak`.
fn lose_once_with_nak(pair: &mut Pair, psns: &[u32], nak: u32) {
    let (mut psns, mut lost) = (psns.to_vec(), false);
    pair.rule(move |who, packet| {
        let psn = packet.headers.bth.psn.get();
        if who == Who::B {
            let hit = psn == nak && packet.headers.aeth.is_some_and(|aeth| aeth.syndrome == Syndrome::NAK_SEQUENCE);
            return if hit && !std::mem::replace(&mut lost, true) { Fate::Drop } else { Fate::Deliver };
        }
        match psns.iter().position(|&lost| lost == psn) {
            Some(index) => {
                psns.swap_remove(index);
                Fate::Drop
            }
            None => Fate::Deliver,
        }
    });
}

#[test]
fn a_lost_nak_costs_one_packet_too() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    lose_once_with_nak(&mut pair, &[0x1007], 0x1007);
    pair.post(1, pair.write_op(0), 0, 8000);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(again(&pair).iter().filter(|&&psn| psn > 0x1005).collect::<Vec<_>>(), [&0x1007]);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0);
}

#[test]
fn the_answer_to_a_probe_shows_the_next_gap_if_its_nak_was_lost() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    lose_once_with_nak(&mut pair, &[0x1007, 0x1009], 0x1009);
    pair.post(1, pair.write_op(0), 0, 8000);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(again(&pair).iter().filter(|&&psn| psn > 0x1005).collect::<Vec<_>>(), [&0x1007, &0x1009]);
    assert_eq!((pair.a.host.counted(Count::ProbeSent), pair.a.host.counted(Count::Timeout)), (1, 0));
}

#[test]
fn the_end_of_all_that_is_in_flight_goes_again_as_a_whole() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    lose_once(&mut pair, &[0x1009, 0x100a, 0x100b, 0x100c, 0x100d]);
    pair.post(1, pair.write_op(0), 0, 8 * 1024);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(again(&pair), [0x1009, 0x100a, 0x100b, 0x100c, 0x100d]);
    assert_eq!((pair.a.host.counted(Count::ProbeSent), pair.a.host.counted(Count::Timeout)), (1, 0));
}

#[test]
fn a_long_first_message_does_not_wait_for_the_ack_timeout() {
    let mut pair = Pair::new(QpType::Rc);
    // In the second train, and its repair.
    lose_once(&mut pair, &[0x1050, 0x1050]);
    pair.post(1, pair.write_op(0), 0, 200_000);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0);
    assert_eq!(pair.b.bytes(0, 200_000), pair.a.bytes(0, 200_000));
}

#[test]
fn a_burst_is_repaired_in_two_steps_or_goes_again() {
    // Packets lost in a row, and packets sent again.
    for (lost, sent) in [(1, 1), (2, 1 + 8), (9, 1 + 8), (10, 1 + 8 + 30 - 9)] {
        let mut pair = Pair::new(QpType::Rc);
        keeps(&mut pair);
        let psns: Vec<u32> = (0x1008..0x1008 + lost).collect();
        lose_once(&mut pair, &psns);
        pair.post(1, pair.write_op(0), 0, 2 * 1024 + 30 * 1024);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
        assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), sent, "{lost} lost");
        assert_eq!((pair.a.host.counted(Count::ProbeSent), pair.a.host.counted(Count::Timeout)), (0, 0));
    }
}

#[test]
fn two_gaps_that_adjoin_the_first_loss_tell_that_the_peer_keeps_packets() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    lose_once(&mut pair, &[0x1002, 0x1003]);
    pair.post(0, pair.write_op(0), 0, 10_000);
    pair.run();
    assert_eq!(answers(&pair, Who::B)[..2], [(NAK, 0x1002), (NAK, 0x1003)], "no ACK of one packet between");
    // From now on single packets are sent again.
    forget(&mut pair);
    lose_once(&mut pair, &[0x1010]);
    pair.post(1, pair.write_op(0), 0, 10_000);
    pair.run();
    assert_eq!(again(&pair), [0x1010]);
}

#[test]
fn swapped_packets_cost_nothing() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(100, 4, 0, 100);
    for psn in [0x1000, 0x1003, 0x1002, 0x1001] {
        pair.inject(Who::A, request(O::RC_SEND_ONLY, psn), &[psn as u8; 10]);
    }
    pair.run();
    assert_eq!(answers(&pair, Who::B), [(ACK, 0x1000), (ACK, 0x1003)]);
    assert_eq!(ends(&pair.b.host.received), [(100, OK), (101, OK), (102, OK), (103, OK)]);
    assert_eq!(pair.b.bytes(300, 10), [3; 10]);
    assert_eq!(pair.b.host.counted(Count::NakSequenceSent), 0);
}

#[test]
fn a_late_packet_that_comes_before_its_repair_leaves_is_not_sent_again() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    pair.rule(|who, _| if who == Who::B { Fate::Drop } else { Fate::Deliver });
    pair.post(1, pair.write_op(0), 0, 5000);
    pair.run_for(6_000);
    // The NAK and the ACK in one batch.
    for (psn, syndrome) in [(0x1007, Syndrome::NAK_SEQUENCE), (0x100a, Syndrome::ACK)] {
        let mut headers = Headers::new(Bth::new(O::RC_ACKNOWLEDGE, 0, Psn::new(psn)));
        headers.aeth = Some(Aeth { syndrome, msn: 3 });
        pair.inject(Who::B, headers, &[]);
    }
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 0);
}

#[test]
fn a_peer_that_goes_back_is_found_out_by_one_round_trip() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    pair.b.qp.go_back_n(true);
    lose_once(&mut pair, &[0x1003]);
    pair.post(1, pair.write_op(0), 0, 10_000);
    let start = pair.now;
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    // 0x1001 to 0x100a; 0x1003 alone, then 0x1004 to 0x100a.
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 8);
    assert_eq!(pair.now - start, 3 * 10_000, "there and back: the message, the trial, the rest");
    // From now on there is no trial.
    forget(&mut pair);
    lose_once(&mut pair, &[0x100c]);
    pair.post(2, pair.write_op(0), 0, 10_000);
    let start = pair.now;
    pair.run();
    assert_eq!(pair.now - start, 2 * 10_000);
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 9);
    assert_eq!((pair.a.host.counted(Count::ProbeSent), pair.a.host.counted(Count::Timeout)), (0, 0));
}

#[test]
fn a_trial_without_an_answer_ends_soon_and_leaves_the_question_open() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    // The repaired packet is lost again.
    lose_once(&mut pair, &[0x1003, 0x1003]);
    pair.post(1, pair.write_op(0), 0, 10_000);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert!(pair.now < 5 * MS && pair.a.host.counted(Count::Timeout) == 0);
    forget(&mut pair);
    for first in [0x100c, 0x101c] {
        lose_once(&mut pair, &[first]);
        pair.post(2, pair.write_op(0), 0, 16 * 1024);
        pair.run();
    }
    assert_eq!(again(&pair), [0x100c, 0x101c]);
}

/// Whoever goes back hears of no gap that it is about to fill.
#[test]
fn a_requester_that_goes_back_is_not_told_of_the_next_gap() {
    let mut pair = Pair::new(QpType::Rc);
    let writes = |pair: &mut Pair, psns: &[u32]| {
        psns.iter().for_each(|&psn| pair.inject(Who::A, empty_write(psn), &[]));
        pair.run_for(MS);
    };
    // 0x1001 and 0x1003 are missing.
    writes(&mut pair, &[0x1000, 0x1002, 0x1004]);
    writes(&mut pair, &[0x1001, 0x1002, 0x1003, 0x1004]);
    let before = [(ACK, 0x1000), (NAK, 0x1001)];
    assert_eq!(answers(&pair, Who::B)[..2], before);
    assert!(answers(&pair, Who::B)[2..].iter().all(|answer| answer.0 == ACK), "{:x?}", answers(&pair, Who::B));
    // And now it is known, packet by packet; what is still missing when it has passed by is told.
    pair.seen.clear();
    writes(&mut pair, &[0x1006, 0x1008]);
    writes(&mut pair, &[0x1005]);
    assert_eq!(answers(&pair, Who::B), [(NAK, 0x1005), (ACK, 0x1006)]);
    writes(&mut pair, &[0x1006]);
    assert_eq!(answers(&pair, Who::B).last(), Some(&(ACK, 0x1006)));
    writes(&mut pair, &[0x1008]);
    assert_eq!(answers(&pair, Who::B).last(), Some(&(NAK, 0x1007)));
    // One that sends only what was missing is told at once.
    pair.seen.clear();
    writes(&mut pair, &[0x1007]);
    writes(&mut pair, &[0x100a, 0x100c]);
    writes(&mut pair, &[0x1009]);
    writes(&mut pair, &[0x100d]);
    assert_eq!(answers(&pair, Who::B), [(ACK, 0x1008), (NAK, 0x1009), (NAK, 0x100b)]);
    pair.seen.clear();
    writes(&mut pair, &[0x100b]);
    writes(&mut pair, &[0x100f, 0x1011]);
    writes(&mut pair, &[0x100e]);
    assert_eq!(answers(&pair, Who::B), [(ACK, 0x100d), (NAK, 0x100e), (NAK, 0x1010)]);
}

#[test]
fn what_a_peer_can_have_kept_is_bounded() {
    let mut pair = Pair::new(QpType::Rc);
    let first = 0x1000;
    pair.inject(Who::A, empty_write(first), &[]);
    for ahead in 2..3000 {
        pair.inject(Who::A, request(O::RC_SEND_MIDDLE, first + ahead), &[0; 1024]);
    }
    pair.run_for(MS);
    let kept = pair.b.host.counted(Count::RequestHeld);
    assert!((256..768).contains(&kept), "{kept}: less than 768 KiB with what each takes besides its payload");
    assert_eq!(pair.b.host.dropped(Drop::Psn), 2998 - kept);
    // Small ones, by their number; longer ones than any good one, at all; and the farthest that is near enough.
    let mut pair = Pair::new(QpType::Rc);
    pair.inject(Who::A, empty_write(first), &[]);
    for ahead in 2..3000 {
        pair.inject(Who::A, request(O::RC_SEND_MIDDLE, first + ahead), &[]);
        pair.inject(Who::A, request(O::RC_SEND_MIDDLE, first + ahead), &[0; 1028]);
    }
    pair.run_for(MS);
    assert_eq!(pair.b.host.counted(Count::RequestHeld), 1024);
    assert_eq!(pair.b.host.counted(Count::NakSequenceSent), 1);
    pair.to_state(Who::B, QpState::Reset);
    pair.b.qp.assert_invariants();
}

#[test]
fn doubles_of_kept_packets_are_kept_once() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    let mut lost = false;
    pair.rule(move |who, packet| match (who, packet.headers.bth.psn.get()) {
        (Who::A, 0x1006) if !std::mem::replace(&mut lost, true) => Fate::Drop,
        (Who::A, _) => Fate::Duplicate,
        _ => Fate::Deliver,
    });
    pair.b.host.memory.write(pair.b.region, 64, &0u64.to_ne_bytes());
    pair.post(1, pair.write_op(1000), 0, 2000);
    for id in 2..5 {
        pair.post(id, pair.add_op(64, 1), id as u32 * 8, 8);
    }
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK), (4, OK)]);
    assert_eq!((pair.b.host.memory.atomics, pair.b.bytes(64, 8)), (3, &3u64.to_ne_bytes()[..]));
    assert_eq!(pair.b.host.counted(Count::RequestHeld), 4);
}

#[test]
fn reads_and_atomics_behind_a_gap_are_answered_when_it_closes() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    lose_once(&mut pair, &[0x1006]);
    pair.b.host.memory.write(pair.b.region, 64, &7u64.to_ne_bytes());
    pair.post(1, pair.write_op(1000), 0, 8);
    pair.post(2, pair.read_op(0), 5000, 3000);
    pair.post(3, pair.add_op(64, 1), 9000, 8);
    pair.post(4, pair.write_op(2000), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK), (4, OK)]);
    assert_eq!((again(&pair), pair.a.bytes(9000, 8)), (vec![0x1006], &7u64.to_ne_bytes()[..]));
}

#[test]
fn a_lost_read_or_atomic_is_asked_for_in_its_order() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    lose_once(&mut pair, &[0x1006, 0x1009]);
    pair.b.host.memory.write(pair.b.region, 64, &7u64.to_ne_bytes());
    pair.post(1, pair.read_op(0), 5000, 3000);
    pair.post(2, pair.add_op(64, 1), 9000, 8);
    pair.post(3, pair.write_op(2000), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK)]);
    assert_eq!((pair.b.host.memory.atomics, pair.a.bytes(9000, 8)), (1, &7u64.to_ne_bytes()[..]));
}

#[test]
fn what_was_kept_behind_a_receiver_not_ready_comes_again() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    lose_once(&mut pair, &[0x1006]);
    pair.b.post_recvs(100, 1, 0, 100);
    for id in 0..4 {
        pair.post(id, SendOp::Send, id as u32 * 10, 10);
    }
    pair.run_for(100_000);
    assert_eq!(answers(&pair, Who::B), [(NAK, 0x1006), (ACK, 0x1006), (0x2c, 0x1007)]);
    assert_eq!(ends(&pair.a.host.sent), [(0, OK)]);
    pair.b.post_recvs(101, 3, 100, 100);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK), (2, OK), (3, OK)]);
    for id in 0..4 {
        assert_eq!(pair.b.bytes(id * 100, 10), pair.a.bytes(id * 10, 10));
    }
    assert_eq!(pair.b.host.counted(Count::RnrNakSent), 1);
}

#[test]
fn an_error_in_a_kept_packet_is_told_in_its_turn() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    lose_once(&mut pair, &[0x1006]);
    let bad = SendOp::Write { raddr: pair.b.region.addr, rkey: !pair.b.region.key };
    pair.post(1, pair.write_op(0), 0, 8);
    pair.post(2, pair.write_op(0), 0, 8);
    pair.post(3, bad, 0, 8);
    pair.post(4, pair.write_op(0), 0, 8);
    pair.run();
    let flushed = WcStatus::WrFlushErr;
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, WcStatus::RemAccessErr), (4, flushed)]);
    assert_eq!(pair.b.qp.state(), QpState::Err);
    pair.b.qp.assert_invariants();
}

#[test]
fn gaps_across_the_wrap_of_psns() {
    for lost in [0x00ff_fffe, 0x00ff_ffff, 0, 1] {
        // The first loss is a trial, the others are repaired one by one.
        let mut pair = Pair::with(&Setup { psn_a: 0x00ff_ffea, ..Setup::new(QpType::Rc) });
        lose_once(&mut pair, &[0x00ff_ffec, 0x00ff_fffa, lost]);
        for id in 0..3 {
            pair.post(id.into(), pair.write_op(20_000 * id), 500_000, 10 * 1024);
            pair.run();
            assert_eq!(pair.b.bytes(20_000 * id, 10 * 1024), pair.a.bytes(500_000, 10 * 1024));
        }
        assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK), (2, OK)]);
        assert_eq!(again(&pair), [0x00ff_ffec, 0x00ff_fffa, lost]);
        assert_eq!(pair.b.host.dropped(Drop::Psn), 0);
    }
}

/// Losing these packets of `requests`, one after the other, costs one packet each.
fn repairs_singly(pair: &mut Pair, lost: &[u32], mut requests: impl FnMut(&mut Pair)) {
    for &psn in lost {
        forget(pair);
        lose_once(pair, &[psn]);
        requests(pair);
        assert_eq!(again(pair), [psn]);
    }
}

/// The ACK of the packet that closed the gap, alone, would look like that of a peer that goes back.
#[test]
fn the_ack_of_a_repair_stands_for_what_was_kept_behind_it() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    repairs_singly(&mut pair, &[0x1002, 0x1009, 0x1012], |pair| {
        // Only the last one asks for an ACK, and comes when all is repaired.
        for id in 0..7 {
            pair.post_flags(id, pair.write_op(0), 0, 8, SendFlags::empty());
        }
        pair.run_for(MS / 10);
        pair.post(7, pair.write_op(0), 0, 8);
        pair.run();
    });
}

/// Nor does any ACK pass the response of a READ.
#[test]
fn a_read_behind_the_first_loss_says_nothing_of_the_peer() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    lose_once(&mut pair, &[0x1001]);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.post(2, pair.read_op(0), 5000, 3000);
    pair.post(3, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(pair.b.host.counted(Count::RequestHeld), 2);
    repairs_singly(&mut pair, &[0x1006, 0x100b], |pair| {
        pair.post(4, pair.write_op(0), 0, 5000);
        pair.run();
    });
}

#[test]
fn a_peer_that_went_back_is_tried_again_after_some_losses() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    pair.b.qp.go_back_n(true);
    let message = |pair: &mut Pair, round: u32| {
        forget(pair);
        lose_once(pair, &[0x1002 + 10 * round]);
        pair.post(1, pair.write_op(0), 0, 10 * 1024);
        pair.run();
        again(pair).len()
    };
    assert_eq!(message(&mut pair, 0), 9);
    pair.b.qp.go_back_n(false);
    // It was a shortage that is over.
    let rounds: Vec<usize> = (1..20).map(|round| message(&mut pair, round)).collect();
    assert_eq!(rounds[..16], [9; 16]);
    assert_eq!(rounds[16..], [1; 3]);
}

/// Packets that come one by one, each later than its followers, draw no NAK each.
#[test]
fn a_gap_that_becomes_narrower_is_told_of_twice() {
    let mut pair = Pair::new(QpType::Rc);
    for psn in [0x1000, 0x1006, 0x1001, 0x1002, 0x1003, 0x1004, 0x1005] {
        pair.inject(Who::A, empty_write(psn), &[]);
        pair.run_for(MS);
    }
    let said =
        [(ACK, 0x1000), (NAK, 0x1001), (NAK, 0x1002), (ACK, 0x1002), (ACK, 0x1003), (ACK, 0x1004), (ACK, 0x1006)];
    assert_eq!(answers(&pair, Who::B), said);
    // What does not ask gets no answer at all, as inside the messages of a requester that goes back.
    let mut pair = Pair::new(QpType::Rc);
    for psn in [0x1000, 0x1006, 0x1001, 0x1002, 0x1003, 0x1004, 0x1005] {
        let mut write = empty_write(psn);
        write.bth.ack_req = psn == 0x1005;
        pair.inject(Who::A, write, &[]);
        pair.run_for(MS);
    }
    assert_eq!(answers(&pair, Who::B), [(NAK, 0x1001), (ACK, 0x1006)]);
}

/// A NAK tells of the READ before it: so it follows the response.
#[test]
fn a_nak_that_waits_goes_behind_the_response_of_a_read() {
    let mut pair = Pair::new(QpType::Rc);
    let read = |psn| Headers {
        reth: Some(Reth { va: pair.b.region.addr, rkey: pair.b.region.key, len: 8 }),
        ..request(O::RC_READ_REQUEST, psn)
    };
    let packets = [empty_write(0x1000), read(0x1002), empty_write(0x1004), empty_write(0x1001)];
    packets.into_iter().for_each(|packet| pair.inject(Who::A, packet, &[]));
    pair.run_for(MS);
    let said: Vec<_> = pair.sent_by(Who::B);
    assert_eq!(said.last(), Some(&(O::RC_ACKNOWLEDGE, 0x1003)), "{said:x?}");
    assert!(said.contains(&(O::RC_READ_RESPONSE_ONLY, 0x1002)), "{said:x?}");
}

/// After a RESET both ends may begin with the PSNs of before, while packets of before are on their way.
#[test]
fn nothing_is_kept_before_the_first_packet_in_its_turn() {
    let mut pair = Pair::new(QpType::Rc);
    let old = Headers {
        reth: Some(Reth { va: pair.b.region.addr, rkey: pair.b.region.key, len: 4 }),
        ..request(O::RC_WRITE_ONLY, 0x1001)
    };
    pair.inject(Who::A, old, b"old!");
    pair.run_for(MS);
    assert_eq!((pair.b.host.counted(Count::RequestHeld), pair.b.host.dropped(Drop::Psn)), (0, 1));
    pair.post(1, pair.write_op(8), 0, 4);
    pair.post(2, pair.write_op(0), 100, 4);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
    assert_eq!(pair.b.bytes(0, 4), pair.a.bytes(100, 4));
}

/// Whoever can guess a PSN may send something before the peer does.
#[test]
fn of_two_packets_with_one_psn_none_is_kept() {
    let mut pair = Pair::new(QpType::Rc);
    let write = |text: &[u8; 4], psn, pair: &mut Pair| {
        let reth = Reth { va: pair.b.region.addr, rkey: pair.b.region.key, len: 4 };
        pair.inject(Who::A, Headers { reth: Some(reth), ..request(O::RC_WRITE_ONLY, psn) }, text);
        pair.run_for(MS);
    };
    for (text, psn) in [(b"0000", 0x1000), (b"evil", 0x1002), (b"good", 0x1002), (b"1111", 0x1001)] {
        write(text, psn, &mut pair);
    }
    assert_eq!(pair.b.bytes(0, 4), b"1111");
    write(b"good", 0x1002, &mut pair);
    assert_eq!(pair.b.bytes(0, 4), b"good");
}

#[test]
fn what_is_kept_is_forgotten_when_nothing_comes_any_more() {
    let mut pair = Pair::new(QpType::Rc);
    pair.inject(Who::A, empty_write(0x1000), &[]);
    pair.inject(Who::A, empty_write(0x1002), &[]);
    pair.run_for(2_000 * MS);
    pair.inject(Who::A, empty_write(0x1003), &[]);
    pair.run_for(3_900 * MS);
    assert!(pair.b.qp.next_timeout().is_some(), "waits since the last one");
    pair.run_for(200 * MS);
    assert_eq!(pair.b.qp.next_timeout(), None);
    pair.inject(Who::A, empty_write(0x1001), &[]);
    pair.run_for(MS);
    assert_eq!(answers(&pair, Who::B).last(), Some(&(ACK, 0x1001)));
}

#[test]
fn memory_that_is_gone_when_a_packet_is_sent_again_fails_the_request() {
    let mut pair = Pair::new(QpType::Rc);
    keeps(&mut pair);
    lose_once(&mut pair, &[0x1007]);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.post(2, pair.write_op(0), 0, 3000);
    pair.post(3, pair.write_op(0), 0, 8);
    pair.drain();
    let region = pair.a.region;
    pair.a.host.memory.deregister(region);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, WcStatus::LocProtErr), (3, WcStatus::WrFlushErr)]);
}

#[test]
fn an_atomic_far_ahead_is_neither_executed_nor_kept() {
    let mut pair = Pair::new(QpType::Rc);
    let mut headers = request(O::RC_FETCH_ADD, 0x1000 + 1025);
    headers.atomic = Some(AtomicEth { va: pair.b.region.addr, rkey: pair.b.region.key, swap_add: 1, compare: 0 });
    pair.inject(Who::A, headers, &[]);
    pair.run();
    assert_eq!((pair.b.host.dropped(Drop::Psn), pair.b.host.counted(Count::RequestHeld)), (1, 0));
    assert_eq!(answers(&pair, Who::B), [(NAK, 0x1000)]);
    assert_eq!(attempts(&pair, Who::B, 0x1000), 1);
}
