//! RC over a good wire: what goes out, what arrives, what completes.

use ferroce_wire::{Bth, Headers, Opcode as O, Psn, Syndrome};
use smallvec::smallvec;

use super::{acquaint, ends, sent_by, wr};
use crate::cc::{Aimd, FixedWindow};
use crate::host::Count;
use crate::recovery::PROBE_FLOOR;
use crate::testing::{Fate, Pair, Setup, Who};
use crate::verbs::{
    Access, QpAttr, QpAttrMask, QpEvent, QpState, QpType, SendData, SendFlags, SendOp, SendWr, Sge, WcFlags, WcOpcode,
    WcStatus,
};

const OK: WcStatus = WcStatus::Success;

fn opcodes(pair: &Pair, who: Who) -> Vec<O> {
    sent_by(pair, who).iter().map(|seen| seen.headers.bth.opcode).collect()
}

#[test]
fn send_of_each_size() {
    for len in [0, 1, 63, 1024, 1025, 200_000] {
        let mut pair = Pair::new(QpType::Rc);
        pair.b.post_recvs(100, 1, 0, 300_000);
        pair.post(1, SendOp::Send, 0, len);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
        assert_eq!(pair.a.host.sent[0].opcode, WcOpcode::Send);
        let got = &pair.b.host.received;
        assert_eq!(ends(got), [(100, OK)]);
        assert_eq!((got[0].opcode, got[0].byte_len, got[0].flags), (WcOpcode::Recv, len, WcFlags::empty()));
        assert_eq!(pair.b.bytes(0, len), pair.a.bytes(0, len));
        assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 0);
    }
}

#[test]
fn opcodes_flags_and_psns_of_a_message() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(100, 2, 0, 4000);
    pair.post_flags(1, SendOp::SendImm { imm: 0x0102_0304 }, 0, 2049, SendFlags::SIGNALED | SendFlags::SOLICITED);
    pair.post(2, SendOp::Send, 0, 5);
    pair.run();
    let sent = sent_by(&pair, Who::A);
    assert_eq!(
        pair.sent_by(Who::A),
        [
            (O::RC_SEND_FIRST, 0x1000),
            (O::RC_SEND_MIDDLE, 0x1001),
            (O::RC_SEND_LAST_IMM, 0x1002),
            (O::RC_SEND_ONLY, 0x1003)
        ]
    );
    let flags: Vec<_> = sent.iter().map(|seen| (seen.headers.bth.ack_req, seen.headers.bth.solicited)).collect();
    assert_eq!(flags, [(false, false), (false, false), (true, true), (true, false)]);
    assert_eq!(sent[2].headers.bth.pad, 3);
    assert!(sent.iter().all(|seen| seen.headers.bth.pkey == 0xffff && seen.headers.bth.dest_qp == 0x22));
    let got = &pair.b.host.received;
    assert_eq!((got[0].imm, got[0].flags, got[0].solicited), (0x0102_0304, WcFlags::WITH_IMM, true));
    assert!(!got[1].solicited);
}

#[test]
fn write_of_each_size() {
    for len in [0, 1, 63, 1024, 1025, 200_000] {
        let mut pair = Pair::new(QpType::Rc);
        pair.post(1, pair.write_op(500_000), 0, len);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
        assert_eq!(pair.a.host.sent[0].opcode, WcOpcode::RdmaWrite);
        assert_eq!(pair.b.bytes(500_000, len), pair.a.bytes(0, len));
        assert!(pair.b.host.received.is_empty());
    }
}

#[test]
fn the_last_word_of_a_message_is_stored_last_and_once() {
    let mut pair = Pair::new(QpType::Rc);
    pair.post(1, pair.write_op(0), 0, 5000);
    pair.run();
    let end = pair.b.region.addr + 5000;
    assert_eq!(pair.b.host.memory.last_stores, [end]);
    assert_eq!(pair.b.host.memory.stores, 5);
}

#[test]
fn solicited_is_never_set_on_a_plain_write() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(0, 1, 0, 0);
    pair.post_flags(1, pair.write_op(0), 0, 8, SendFlags::SIGNALED | SendFlags::SOLICITED);
    let SendOp::Write { raddr, rkey } = pair.write_op(0) else { unreachable!() };
    pair.post_flags(2, SendOp::WriteImm { raddr, rkey, imm: 1 }, 0, 8, SendFlags::SOLICITED);
    pair.run();
    let flags: Vec<_> = sent_by(&pair, Who::A).iter().map(|seen| seen.headers.bth.solicited).collect();
    assert_eq!(flags, [false, true]);
}

#[test]
fn write_with_immediate_uses_a_receive_and_tells_the_length() {
    for len in [0, 7, 3000] {
        let mut pair = Pair::new(QpType::Rc);
        pair.b.post_recvs(100, 1, 0, 0);
        let SendOp::Write { raddr, rkey } = pair.write_op(10_000) else { unreachable!() };
        pair.post(1, SendOp::WriteImm { raddr, rkey, imm: 77 }, 0, len);
        pair.run();
        let got = pair.b.host.received[0];
        assert_eq!((got.wr_id, got.opcode, got.byte_len, got.imm), (100, WcOpcode::RecvRdmaWithImm, len, 77));
        assert_eq!(pair.b.bytes(10_000, len), pair.a.bytes(0, len));
    }
}

#[test]
fn read_of_each_size() {
    for len in [0, 1, 1024, 1025, 3077, 200_000] {
        let mut pair = Pair::new(QpType::Rc);
        pair.post(1, pair.read_op(1000), 300_000, len);
        pair.run();
        let done = pair.a.host.sent[0];
        assert_eq!((done.status, done.opcode, done.byte_len), (OK, WcOpcode::RdmaRead, len));
        assert_eq!(pair.a.bytes(300_000, len), pair.b.bytes(1000, len));
    }
}

#[test]
fn a_long_read_is_several_requests_of_one_train_each() {
    let mut pair = Pair::new(QpType::Rc);
    pair.post(1, pair.read_op(0), 300_000, 150_000);
    pair.run();
    let asked: Vec<_> = sent_by(&pair, Who::A)
        .iter()
        .filter_map(|seen| seen.headers.reth.map(|reth| (reth.va - pair.b.region.addr, reth.len)))
        .collect();
    assert_eq!(asked, [(0, 61_440), (61_440, 61_440), (122_880, 27_120)]);
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)], "one completion for all of them");
}

#[test]
fn atomics() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.host.memory.write(pair.b.region, 64, &5u64.to_ne_bytes());
    let SendOp::FetchAdd { raddr, rkey, .. } = pair.add_op(64, 0) else { unreachable!() };
    pair.post(1, pair.add_op(64, 3), 0, 8);
    pair.post(2, SendOp::CompareSwap { raddr, rkey, compare: 8, swap: 100 }, 8, 8);
    pair.post(3, SendOp::CompareSwap { raddr, rkey, compare: 8, swap: 200 }, 16, 8);
    pair.post(4, pair.add_op(64, u64::MAX), 24, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK), (4, OK)]);
    let opcodes: Vec<_> = pair.a.host.sent.iter().map(|done| (done.opcode, done.byte_len)).collect();
    assert_eq!(opcodes[..2], [(WcOpcode::FetchAdd, 8), (WcOpcode::CompSwap, 8)]);
    let old = |at| u64::from_ne_bytes(pair.a.bytes(at, 8).try_into().unwrap());
    assert_eq!([old(0), old(8), old(16), old(24)], [5, 8, 100, 100]);
    assert_eq!(pair.b.bytes(64, 8), 99u64.to_ne_bytes());
}

#[test]
fn inline_data_may_change_after_posting() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(100, 2, 0, 4000);
    for (id, bytes) in [(1, vec![7u8; 200]), (2, vec![])] {
        let data = SendData::Inline(bytes.into());
        pair.post_wr(
            Who::A,
            SendWr {
                wr_id: id,
                op: SendOp::Send,
                flags: SendFlags::SIGNALED | SendFlags::INLINE,
                data,
                ud: None,
                xrc_srqn: None,
            },
        );
    }
    let long = SendData::Inline(vec![9u8; 2500].into());
    let op = pair.write_op(10_000);
    pair.post_wr(Who::A, SendWr { wr_id: 3, op, flags: SendFlags::SIGNALED, data: long, ud: None, xrc_srqn: None });
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK)]);
    assert_eq!(pair.b.bytes(0, 200), [7; 200]);
    assert_eq!(pair.b.host.received[1].byte_len, 0);
    assert_eq!(pair.b.bytes(10_000, 2500), [9; 2500]);
}

#[test]
fn gathers_and_scatters_over_several_elements() {
    let mut pair = Pair::new(QpType::Rc);
    let (a, b) = (pair.a.region, pair.b.region);
    pair.b.host.receives.push_back(crate::RecvWr {
        wr_id: 100,
        sges: smallvec![b.sge(0, 3), b.sge(5000, 0), b.sge(1000, 1500), b.sge(9000, 2000)],
    });
    pair.post_wr(Who::A, wr(1, SendOp::Send, &[a.sge(10, 5), a.sge(100, 0), a.sge(200, 6), a.sge(3000, 2000)]));
    pair.run();
    let sent: Vec<u8> = [pair.a.bytes(10, 5), pair.a.bytes(200, 6), pair.a.bytes(3000, 2000)].concat();
    let got: Vec<u8> = [pair.b.bytes(0, 3), pair.b.bytes(1000, 1500), pair.b.bytes(9000, 508)].concat();
    assert_eq!(sent, got);
    assert_eq!(
        pair.b.host.memory.last_stores,
        [b.addr + 9000 + 508],
        "the last word of the message, not of each element"
    );
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
}

#[test]
fn unsignaled_requests_free_their_slots_without_a_completion() {
    let mut pair = Pair::new(QpType::Rc);
    for id in 0..5 {
        pair.post_flags(id, pair.write_op(0), 0, 8, SendFlags::empty());
    }
    pair.post(5, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(5, OK)]);
    assert_eq!(pair.a.host.released, 6);
}

#[test]
fn acks_of_requests_that_arrive_together_are_one() {
    let mut pair = Pair::new(QpType::Rc);
    for id in 0..8 {
        pair.post(id, pair.write_op(0), 0, 8);
    }
    pair.run();
    assert_eq!(pair.a.host.sent.len(), 8);
    let acks = sent_by(&pair, Who::B);
    assert_eq!(acks.len(), 1);
    let aeth = acks[0].headers.aeth.unwrap();
    assert_eq!((acks[0].headers.bth.psn.get(), aeth.msn, aeth.syndrome), (0x1007, 8, Syndrome::ACK));
}

#[test]
fn answers_keep_the_order_of_requests_and_count_messages() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(0, 2, 0, 100);
    pair.post(1, SendOp::Send, 0, 10);
    pair.post(2, pair.write_op(0), 0, 10);
    pair.post(3, pair.read_op(0), 5000, 2048);
    pair.post(4, pair.add_op(64, 1), 9000, 8);
    pair.post(5, SendOp::Send, 0, 10);
    pair.run();
    let answers: Vec<_> = sent_by(&pair, Who::B)
        .iter()
        .map(|seen| (seen.headers.bth.opcode, seen.headers.bth.psn.get(), seen.headers.aeth.map(|aeth| aeth.msn)))
        .collect();
    assert_eq!(
        answers,
        [
            (O::RC_ACKNOWLEDGE, 0x1001, Some(2)),
            (O::RC_READ_RESPONSE_FIRST, 0x1002, Some(3)),
            (O::RC_READ_RESPONSE_LAST, 0x1003, Some(3)),
            (O::RC_ATOMIC_ACKNOWLEDGE, 0x1004, Some(4)),
            (O::RC_ACKNOWLEDGE, 0x1005, Some(5)),
        ]
    );
    assert_eq!(pair.a.host.sent.len(), 5);
}

#[test]
fn fence_waits_for_reads_and_atomics_only_when_set() {
    let order = |flags| {
        let mut pair = Pair::new(QpType::Rc);
        pair.post(1, pair.read_op(0), 5000, 10);
        pair.post(2, pair.add_op(64, 1), 6000, 8);
        pair.post_flags(3, pair.write_op(0), 0, 8, SendFlags::SIGNALED | flags);
        pair.run();
        assert_eq!(pair.a.host.sent.len(), 3);
        let at = |opcode| pair.seen.iter().position(|seen| seen.headers.bth.opcode == opcode).unwrap();
        at(O::RC_WRITE_ONLY) > at(O::RC_ATOMIC_ACKNOWLEDGE)
    };
    assert!(order(SendFlags::FENCE));
    assert!(!order(SendFlags::empty()));
}

#[test]
fn local_invalidate_runs_in_order_and_takes_no_psn() {
    let mut pair = Pair::new(QpType::Rc);
    let window = pair.a.host.memory.bind_window(7, 100, crate::Access::REMOTE_READ);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.post(2, SendOp::LocalInv { rkey: window.key }, 0, 0);
    pair.post(3, SendOp::LocalInv { rkey: window.key }, 0, 0);
    pair.post(4, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(
        ends(&pair.a.host.sent),
        [(1, OK), (2, OK), (3, WcStatus::MwBindErr), (4, WcStatus::WrFlushErr)],
        "the second invalidation finds nothing"
    );
    assert_eq!(pair.a.host.sent[1].opcode, WcOpcode::LocalInv);
    assert_eq!(pair.sent_by(Who::A), [(O::RC_WRITE_ONLY, 0x1000)]);
}

#[test]
fn local_invalidate_alone_completes_at_once() {
    let mut pair = Pair::new(QpType::Rc);
    let window = pair.a.host.memory.bind_window(7, 100, crate::Access::REMOTE_READ);
    pair.post(1, SendOp::LocalInv { rkey: window.key }, 0, 0);
    pair.drain();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
}

#[test]
fn send_with_invalidate() {
    let mut pair = Pair::new(QpType::Rc);
    let window = pair.b.host.memory.bind_window(7, 100, crate::Access::REMOTE_WRITE);
    pair.b.post_recvs(100, 1, 0, 4000);
    pair.post(1, SendOp::SendInv { rkey: window.key }, 0, 3000);
    pair.run();
    assert_eq!(opcodes(&pair, Who::A).last(), Some(&O::RC_SEND_LAST_INV));
    let got = pair.b.host.received[0];
    assert_eq!((got.flags, got.imm, got.byte_len), (WcFlags::WITH_INV, window.key, 3000));
    // The window is gone.
    pair.post(2, super::write_to(window, 0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, WcStatus::RemAccessErr)]);
}

#[test]
fn psns_wrap() {
    let setup = Setup { psn_a: 0xff_fffe, psn_b: 0xff_fffd, ..Setup::new(QpType::Rc) };
    let mut pair = Pair::with(&setup);
    pair.b.post_recvs(0, 1, 0, 5000);
    pair.post(1, SendOp::Send, 0, 3077);
    pair.post(2, pair.read_op(0), 20_000, 4096);
    pair.post(3, pair.write_op(0), 0, 4096);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK)]);
    assert_eq!(sent_by(&pair, Who::A).last().unwrap().headers.bth.psn.get(), 0x00_0009);
}

#[test]
fn every_path_mtu() {
    for mtu in [256, 512, 1024, 2048, 4096] {
        let mut pair = Pair::with(&Setup { mtu, ..Setup::new(QpType::Rc) });
        pair.post(1, pair.write_op(500_000), 0, 130_001);
        pair.post(2, pair.read_op(0), 300_000, 130_001);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
        assert_eq!(pair.b.bytes(500_000, 130_001), pair.a.bytes(0, 130_001));
        assert_eq!(pair.a.bytes(300_000, 130_001), pair.b.bytes(0, 130_001));
        assert_eq!(sent_by(&pair, Who::A).iter().map(|seen| seen.len).max(), Some(mtu as usize));
    }
}

#[test]
fn both_directions_at_once() {
    let mut pair = Pair::new(QpType::Rc);
    for (who, id) in [(Who::A, 1), (Who::B, 2)] {
        let (own, peer) = (pair.end(who).region, pair.end(who.peer()).region);
        pair.post_wr(who, wr(id, super::write_to(peer, 500_000), &[own.sge(0, 100_000)]));
        pair.post_wr(who, wr(id, SendOp::Read { raddr: peer.addr, rkey: peer.key }, &[own.sge(700_000, 100_000)]));
    }
    pair.run();
    assert_eq!((ends(&pair.a.host.sent), ends(&pair.b.host.sent)), (vec![(1, OK); 2], vec![(2, OK); 2]));
    assert_eq!(pair.a.bytes(700_000, 100_000), pair.b.bytes(0, 100_000));
    assert_eq!(pair.a.bytes(500_000, 100_000), pair.b.bytes(0, 100_000));
}

#[test]
fn outstanding_reads_stay_within_max_rd_atomic() {
    let attr = QpAttr { max_rd_atomic: 2, ..Setup::new(QpType::Rc).attr };
    let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) });
    for id in 0..4 {
        pair.post(id, pair.read_op(0), 5000, 10);
    }
    pair.post(4, pair.add_op(64, 1), 6000, 8);
    pair.run();
    assert_eq!(pair.a.host.sent.len(), 5);
    let mut outstanding = 0i32;
    for seen in &pair.seen {
        outstanding += if seen.from == Who::A { 1 } else { -1 };
        assert!(outstanding <= 2);
    }
}

#[test]
fn idle_queue_pair_is_small() {
    assert!(size_of::<crate::Qp>() < 1024, "{}", size_of::<crate::Qp>());
}

/// Which messages asked for an ACK, and how many sends were released, when `messages` without a completion but the `signaled` were
/// posted.
fn unsignaled(pair: &mut Pair, messages: u64, signaled: &[u64]) -> Vec<u64> {
    pair.a.host.windows[0] = Box::new(FixedWindow::new(Aimd::MAX));
    acquaint(pair);
    pair.b.post_recvs(100, messages as u32, 0, 4000);
    for id in 0..messages {
        let flags = if signaled.contains(&id) { SendFlags::SIGNALED } else { SendFlags::empty() };
        pair.post_flags(id, SendOp::Send, 0, 5, flags);
    }
    pair.run();
    assert_eq!(pair.b.host.received.len(), messages as usize);
    assert_eq!(pair.a.host.sent.len(), signaled.len());
    let sends = sent_by(pair, Who::A).into_iter().filter(|seen| seen.headers.bth.opcode == O::RC_SEND_ONLY);
    sends.enumerate().filter(|(_, seen)| seen.headers.bth.ack_req).map(|(id, _)| id as u64).collect()
}

#[test]
fn an_ack_is_asked_for_where_the_program_waits_and_now_and_then() {
    let mut pair = Pair::new(QpType::Rc);
    assert_eq!(unsignaled(&mut pair, 40, &[3, 4]), [3, 4, 21, 38]);
    // The last one is asked for by a probe: it releases its place in the send queue.
    assert_eq!(pair.a.host.released, 40);
    assert_eq!(pair.a.host.counted(Count::ProbeSent), 1);
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 0);
}

#[test]
fn a_full_send_queue_has_asked_for_an_ack() {
    for (max_send_wr, asked) in [(1, vec![0, 1, 2]), (2, vec![1]), (16, vec![8]), (17, vec![8]), (64, vec![16, 33, 50])]
    {
        let setup = Setup { max_send_wr, ..Setup::new(QpType::Rc) };
        let messages = u64::from(max_send_wr.max(3));
        assert_eq!(unsignaled(&mut Pair::with(&setup), messages, &[]), asked, "{max_send_wr}");
    }
}

/// Nothing to wait for a timer for: the ACK that was not asked for with a WRITE is asked for when it is wanted.
#[test]
fn what_waits_for_the_end_of_others_asks_at_once() {
    fn after_a_write(act: impl Fn(&mut Pair)) -> Pair {
        let mut pair = Pair::new(QpType::Rc);
        pair.a.host.windows[0] = Box::new(FixedWindow::new(Aimd::MAX));
        acquaint(&mut pair);
        let began = pair.now;
        pair.post_flags(1, pair.write_op(0), 0, 8, SendFlags::empty());
        pair.drain();
        assert!(!sent_by(&pair, Who::A)[0].headers.bth.ack_req);
        act(&mut pair);
        pair.run();
        assert!(pair.now - began < PROBE_FLOOR, "{} ns", pair.now - began);
        assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 0);
        pair
    }
    let local = |pair: &mut Pair, flags| {
        let window = pair.a.host.memory.bind_window(7, 100, Access::REMOTE_READ);
        pair.post_flags(2, SendOp::LocalInv { rkey: window.key }, 0, 0, flags);
    };

    let pair = after_a_write(|pair| local(pair, SendFlags::SIGNALED));
    assert_eq!((ends(&pair.a.host.sent), pair.a.host.counted(Count::ProbeSent)), (vec![(2, OK)], 1));

    // The message behind asks itself.
    let pair = after_a_write(|pair| {
        local(pair, SendFlags::SIGNALED);
        local(pair, SendFlags::empty());
        pair.post_flags(3, pair.write_op(0), 0, 8, SendFlags::empty());
    });
    assert_eq!((ends(&pair.a.host.sent), pair.a.host.released), (vec![(2, OK)], 4));
    assert_eq!(pair.a.host.counted(Count::ProbeSent), 0);

    let pair = after_a_write(|pair| {
        let bad = Sge { lkey: pair.a.region.key + 1, ..pair.a.region.sge(0, 8) };
        pair.post_wr(Who::A, wr(2, pair.write_op(0), &[bad]));
    });
    assert_eq!(ends(&pair.a.host.sent), [(2, WcStatus::LocProtErr)]);

    let pair = after_a_write(|pair| {
        let attr = QpAttr { state: QpState::Sqd, en_sqd_async_notify: true, ..QpAttr::default() };
        pair.modify(Who::A, &attr, QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY);
    });
    assert_eq!(pair.a.host.events, [QpEvent::SqDrained]);
}

#[test]
fn what_asked_for_no_ack_is_found_lost_all_the_same() {
    let mut pair = Pair::new(QpType::Rc);
    let mut dropped = false;
    pair.rule(move |_, packet| {
        let drop = !dropped && packet.headers.bth.psn.get() == 0x1003;
        dropped |= drop;
        if drop { Fate::Drop } else { Fate::Deliver }
    });
    assert_eq!(unsignaled(&mut pair, 3, &[]), [3], "what is sent again asks");
    assert_eq!(pair.a.host.released, 3);
    assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 1);
}

#[test]
fn a_window_with_little_room_lets_nothing_go_without_asking() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(100, 5, 0, 4000);
    for id in 0..5 {
        pair.post_flags(id, SendOp::Send, 0, 5, SendFlags::empty());
    }
    pair.run();
    assert!(sent_by(&pair, Who::A).iter().all(|seen| seen.headers.bth.ack_req));
}

#[test]
fn the_msn_wraps_at_24_bits() {
    // IBA 9.7.7.1: modulo 2^24, in every kind of answer.
    let mut pair = Pair::new(QpType::Rc);
    pair.b.qp.start_msn(0xff_fffd);
    pair.b.post_recvs(100, 2, 0, 100);
    let ops: [(SendOp, u32); 6] = [
        (SendOp::Send, 8),
        (pair.write_op(5000), 3000),
        (pair.read_op(0), 2000),
        (pair.add_op(0, 1), 8),
        (pair.read_op(0), 8),
        (SendOp::Send, 0),
    ];
    for (id, (op, len)) in ops.into_iter().enumerate() {
        pair.post(id as u64, op, 400_000, len);
        pair.run();
    }
    assert_eq!(ends(&pair.a.host.sent), (0..6).map(|id| (id, OK)).collect::<Vec<_>>());
    let msns = |pair: &Pair| sent_by(pair, Who::B).iter().filter_map(|seen| Some(seen.headers.aeth?.msn)).collect();
    let all: Vec<u32> = msns(&pair);
    // The first READ has two responses.
    assert_eq!(all, [0xff_fffe, 0xff_ffff, 0, 0, 1, 2, 3]);
    // What comes again is answered with the present MSN.
    pair.seen.clear();
    let first = Headers::new(Bth::new(O::RC_SEND_ONLY, 0, Psn::new(0x1000)));
    pair.inject(Who::A, first, &[0; 8]);
    pair.run();
    assert_eq!(msns(&pair), [3]);
}
