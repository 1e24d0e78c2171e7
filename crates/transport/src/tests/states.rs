//! What the states do to requests, packets and events.

use super::{acquaint, ends, sent_by, wr};
use crate::host::{Count, Drop};
use crate::testing::{Pair, Setup, Who};
use crate::verbs::{QpAttr, QpAttrMask, QpEvent, QpState, QpType, SendOp, WcStatus};

const OK: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;
const TYPES: [QpType; 3] = [QpType::Rc, QpType::Uc, QpType::Ud];

#[test]
fn comm_est_on_the_first_packet_in_rtr_only() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let setup = Setup::new(qp_type);
        let mut pair = Pair::unconnected(&setup);
        for who in [Who::A, Who::B] {
            pair.init(who, &setup);
            pair.ready_to_receive(who, &setup);
        }
        pair.ready_to_send(Who::A, &setup);
        pair.b.post_recvs(100, 2, 0, 100);
        pair.post(1, SendOp::Send, 0, 8);
        pair.post(2, SendOp::Send, 0, 8);
        pair.run();
        assert_eq!(pair.b.host.events, [QpEvent::CommEst]);
        assert_eq!(ends(&pair.b.host.received), [(100, OK), (101, OK)], "RTR receives");
    }
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(100, 1, 0, 100);
    pair.post(1, SendOp::Send, 0, 8);
    pair.run();
    assert!(pair.b.host.events.is_empty(), "in RTS nobody waits for it");
}

#[test]
fn rtr_answers_but_does_not_send() {
    let setup = Setup::new(QpType::Rc);
    let mut pair = Pair::unconnected(&setup);
    for who in [Who::A, Who::B] {
        pair.init(who, &setup);
        pair.ready_to_receive(who, &setup);
    }
    pair.ready_to_send(Who::A, &setup);
    pair.post(1, pair.read_op(0), 5000, 100);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
}

#[test]
fn packets_before_rtr_are_dropped() {
    let setup = Setup::new(QpType::Rc);
    let mut pair = Pair::unconnected(&setup);
    for who in [Who::A, Who::B] {
        pair.init(who, &setup);
    }
    pair.ready_to_receive(Who::A, &setup);
    pair.ready_to_send(Who::A, &setup);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.run_for(5_000);
    assert_eq!(pair.b.host.dropped(Drop::QpState), 1);
    // The peer gets ready a little later: the retransmission finds it.
    pair.ready_to_receive(Who::B, &setup);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
}

#[test]
fn err_flushes_sends_and_receives_in_order() {
    for qp_type in TYPES {
        let mut pair = Pair::new(qp_type);
        pair.a.post_recvs(100, 3, 0, 100);
        pair.post_flags(1, SendOp::Send, 0, 8, crate::SendFlags::empty());
        pair.post(2, SendOp::Send, 0, 8);
        pair.to_state(Who::A, QpState::Err);
        assert_eq!(ends(&pair.a.host.sent), [(1, FLUSHED), (2, FLUSHED)]);
        assert_eq!(ends(&pair.a.host.received), [(100, FLUSHED), (101, FLUSHED), (102, FLUSHED)]);
        assert_eq!(pair.a.host.released, 2);
        assert!(pair.a.host.events.is_empty());
        // What is posted later is flushed at once.
        pair.post(3, SendOp::Send, 0, 8);
        pair.a.post_recvs(103, 1, 0, 100);
        pair.a.qp.flush_recv(&mut pair.a.host);
        assert_eq!(ends(&pair.a.host.sent)[2..], [(3, FLUSHED)]);
        assert_eq!(ends(&pair.a.host.received)[3..], [(103, FLUSHED)]);
        pair.run();
        assert!(pair.seen.is_empty());
    }
}

#[test]
fn err_in_the_middle_of_a_received_message_flushes_its_receive_first() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut pair = Pair::new(qp_type);
        pair.b.post_recvs(100, 2, 0, 4000);
        pair.drop_nth(Who::A, &[1, 2, 3, 4, 5, 6, 7, 8]);
        pair.post(1, SendOp::Send, 0, 3000);
        pair.run_for(8_000);
        assert_eq!(pair.b.host.receives.len(), 1, "one is in use");
        pair.to_state(Who::B, QpState::Err);
        assert_eq!(ends(&pair.b.host.received), [(100, FLUSHED), (101, FLUSHED)]);
    }
}

#[test]
fn with_an_srq_receives_stay_and_an_event_tells() {
    let mut pair = Pair::with(&Setup { srq_b: true, ..Setup::new(QpType::Rc) });
    pair.b.post_recvs(100, 3, 0, 100);
    pair.post(1, SendOp::Send, 0, 8);
    pair.run();
    pair.to_state(Who::B, QpState::Err);
    assert_eq!(ends(&pair.b.host.received), [(100, OK)]);
    assert_eq!(pair.b.host.receives.len(), 2);
    assert_eq!(pair.b.host.events, [QpEvent::LastWqeReached]);
    pair.to_state(Who::B, QpState::Err);
    assert_eq!(pair.b.host.events.len(), 1, "told once");
}

#[test]
fn err_while_much_is_in_flight_gives_the_window_back() {
    let mut pair = Pair::new(QpType::Rc);
    pair.post(1, pair.write_op(0), 0, 500_000);
    pair.post(2, pair.read_op(0), 500_000, 200_000);
    pair.run_for(7_000);
    assert!(pair.a.host.windows[0].in_flight() > 0);
    pair.to_state(Who::A, QpState::Err);
    assert_eq!(pair.a.host.windows[0].in_flight(), 0);
    assert_eq!(ends(&pair.a.host.sent), [(1, FLUSHED), (2, FLUSHED)]);
    assert_eq!(pair.a.qp.next_timeout(), None);
    pair.run();
}

#[test]
fn reset_forgets_everything_silently() {
    for qp_type in TYPES {
        let setup = Setup::new(qp_type);
        let mut pair = Pair::with(&setup);
        pair.a.post_recvs(100, 3, 0, 100);
        pair.post(1, SendOp::Send, 0, 8);
        pair.post(2, SendOp::Send, 0, 8);
        pair.drain();
        pair.to_state(Who::A, QpState::Reset);
        assert_eq!(pair.a.qp.state(), QpState::Reset);
        assert_eq!(pair.a.host.released, 2, "slots come back");
        assert!(pair.a.host.received.is_empty() && pair.a.host.receives.is_empty());
        assert_eq!(pair.a.host.sent.len(), if qp_type == QpType::Rc { 0 } else { 2 }, "nothing is added");
        assert_eq!(pair.a.qp.next_timeout(), None);
        // And it can be used anew.
        pair.to_state(Who::B, QpState::Reset);
        for who in [Who::A, Who::B] {
            pair.init(who, &setup);
            pair.ready_to_receive(who, &setup);
            pair.ready_to_send(who, &setup);
        }
        pair.b.post_recvs(200, 1, 0, 100);
        pair.post(3, SendOp::Send, 0, 8);
        pair.run();
        assert_eq!(ends(&pair.b.host.received), [(200, OK)]);
        assert_eq!(pair.a.host.sent.last().map(|done| (done.wr_id, done.status)), Some((3, OK)));
    }
}

fn drain(pair: &mut Pair, notify: bool) {
    let attr = QpAttr { state: QpState::Sqd, en_sqd_async_notify: notify, ..QpAttr::default() };
    pair.modify(Who::A, &attr, QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY);
}

#[test]
fn sqd_finishes_what_was_started_and_holds_the_rest() {
    let mut pair = Pair::new(QpType::Rc);
    pair.post(1, pair.write_op(0), 0, 500_000);
    pair.drain();
    pair.post(2, pair.write_op(0), 0, 8);
    drain(&mut pair, true);
    assert!(pair.a.qp.attr().sq_draining);
    assert!(pair.a.host.events.is_empty());
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(pair.a.host.events, [QpEvent::SqDrained]);
    assert!(!pair.a.qp.attr().sq_draining);
    // The other direction goes on meanwhile.
    pair.post_wr(Who::B, wr(9, super::write_to(pair.a.region, 0), &[pair.b.region.sge(0, 8)]));
    pair.run();
    assert_eq!(ends(&pair.b.host.sent), [(9, OK)]);
    pair.to_state(Who::A, QpState::Rts);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
    assert_eq!(pair.a.host.events.len(), 1);
}

#[test]
fn sqd_waits_through_a_retransmission() {
    let mut pair = Pair::new(QpType::Rc);
    acquaint(&mut pair);
    pair.drop_nth(Who::A, &[0]);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.drain();
    drain(&mut pair, true);
    pair.run_for(8_000);
    assert!(pair.a.host.events.is_empty());
    pair.run();
    assert_eq!(pair.a.host.counted(Count::ProbeSent), 1);
    assert_eq!((ends(&pair.a.host.sent), pair.a.host.events.as_slice()), (vec![(1, OK)], &[QpEvent::SqDrained][..]));
}

#[test]
fn sqd_is_not_drained_while_a_request_waits_to_end_in_error() {
    let mut pair = Pair::new(QpType::Rc);
    let mut bad = pair.a.region.sge(0, 8);
    bad.lkey += 1;
    pair.post(1, pair.write_op(0), 0, 8);
    pair.post_wr(Who::A, wr(2, pair.write_op(0), &[bad]));
    pair.drain();
    drain(&mut pair, true);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, WcStatus::LocProtErr)]);
    assert!(pair.a.host.events.is_empty(), "an error ended it, not draining");
    assert_eq!(pair.a.qp.state(), QpState::Err);
}

#[test]
fn sqd_of_an_idle_queue_is_drained_at_once() {
    for qp_type in TYPES {
        let mut pair = Pair::new(qp_type);
        drain(&mut pair, true);
        assert_eq!(pair.a.host.events, [QpEvent::SqDrained]);
        pair.post(1, SendOp::Send, 0, 8);
        pair.run();
        assert!(sent_by(&pair, Who::A).is_empty());
        pair.to_state(Who::A, QpState::Rts);
        pair.b.post_recvs(100, 1, 0, 100);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    }
    let mut pair = Pair::new(QpType::Rc);
    drain(&mut pair, false);
    assert!(pair.a.host.events.is_empty(), "only if asked for");
}

#[test]
fn attributes_may_change_in_sqd() {
    let mut pair = Pair::new(QpType::Rc);
    drain(&mut pair, false);
    let attr = QpAttr { state: QpState::Sqd, timeout: 10, retry_cnt: 1, max_rd_atomic: 1, ..QpAttr::default() };
    let mask = QpAttrMask::TIMEOUT | QpAttrMask::RETRY_CNT | QpAttrMask::MAX_QP_RD_ATOMIC;
    pair.modify(Who::A, &attr, QpAttrMask::STATE | mask);
    let now = pair.a.qp.attr();
    assert_eq!((now.timeout, now.retry_cnt, now.max_rd_atomic), (10, 1, 1));
    assert_eq!(now.min_rnr_timer, 12, "what the mask does not name stays");
    pair.to_state(Who::A, QpState::Rts);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)], "PSNs go on where they were");
}

#[test]
fn sqd_notifies_only_if_asked_this_time() {
    let mut pair = Pair::new(QpType::Rc);
    drain(&mut pair, true);
    pair.to_state(Who::A, QpState::Rts);
    pair.to_state(Who::A, QpState::Sqd);
    assert_eq!(pair.a.host.events, [QpEvent::SqDrained], "the second time it was not asked for");
}

#[test]
fn a_query_tells_the_psns_that_come_next() {
    for qp_type in TYPES {
        let mut pair = Pair::new(qp_type);
        let psns = |pair: &Pair| (pair.a.qp.query().sq_psn.get(), pair.b.qp.query().rq_psn.get());
        let ud = qp_type == QpType::Ud;
        assert_eq!(psns(&pair), (0x1000, if ud { 0 } else { 0x1000 }));
        pair.b.post_recvs(100, 2, 0, 2000);
        pair.post(1, SendOp::Send, 0, 1000);
        pair.post(2, SendOp::Send, 0, 1000);
        pair.run();
        assert_eq!(psns(&pair), (0x1002, if ud { 0 } else { 0x1002 }));
        pair.to_state(Who::A, QpState::Err);
        pair.to_state(Who::B, QpState::Err);
        assert_eq!(psns(&pair), (0x1002, if ud { 0 } else { 0x1002 }));
        pair.to_state(Who::A, QpState::Reset);
        assert_eq!(pair.a.qp.query().sq_psn.get(), 0);
    }
}
