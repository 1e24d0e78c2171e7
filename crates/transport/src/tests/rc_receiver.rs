//! The receiver that is not ready (RNR).

use ferroce_wire::Opcode as O;

use super::{answers, attempts, ends, sent_by};
use crate::host::Count;
use crate::testing::{Pair, Setup, Who};
use crate::timer::{MS, rnr_delay};
use crate::verbs::{QpAttr, QpState, QpType, SendOp, WcStatus};

const OK: WcStatus = WcStatus::Success;

fn pair(rnr_retry: u8, min_rnr_timer: u8) -> Pair {
    let attr = QpAttr { rnr_retry, min_rnr_timer, ..Setup::new(QpType::Rc).attr };
    Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) })
}

#[test]
fn waits_the_time_that_the_receiver_asks_for() {
    for code in [0, 1, 12, 18] {
        let mut pair = pair(7, code);
        pair.post(1, SendOp::Send, 0, 8);
        pair.run_for(5_000);
        assert_eq!(answers(&pair, Who::B), [(0x20 | code, 0x1000)]);
        pair.b.post_recvs(100, 1, 0, 100);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
        let sent = sent_by(&pair, Who::A);
        assert_eq!(sent.len(), 2);
        assert_eq!(sent[1].at, 10_000 + rnr_delay(code), "code {code}");
    }
}

#[test]
fn packets_behind_the_refused_one_draw_no_answer() {
    let mut pair = pair(7, 14);
    pair.b.post_recvs(100, 1, 0, 100);
    for id in 0..3 {
        pair.post(id, SendOp::Send, 0, 8);
    }
    pair.post(3, pair.write_op(5000), 0, 8);
    pair.run_for(100_000);
    assert_eq!(answers(&pair, Who::B), [(0x1f, 0x1000), (0x2e, 0x1001)]);
    assert_eq!(ends(&pair.a.host.sent), [(0, OK)], "the NAK acknowledges what is before it");
    pair.b.post_recvs(101, 2, 0, 100);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK), (2, OK), (3, OK)]);
    assert_eq!(ends(&pair.b.host.received), [(100, OK), (101, OK), (102, OK)]);
}

#[test]
fn a_sequence_nak_during_the_wait_does_not_end_it() {
    // As kernel rxe does it.
    let mut pair = pair(7, 14);
    pair.post(1, SendOp::Send, 0, 3000);
    pair.run_for(10_000);
    let mut headers = sent_by(&pair, Who::B)[0].headers;
    headers.aeth.as_mut().unwrap().syndrome = ferroce_wire::Syndrome::NAK_SEQUENCE;
    pair.inject(Who::B, headers, &[]);
    pair.run_for(1_000_000);
    assert_eq!(sent_by(&pair, Who::A).len(), 3, "still waiting");
    pair.b.post_recvs(100, 1, 0, 4000);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
}

#[test]
fn counts_its_attempts() {
    for (rnr_retry, expected) in [(0, 1), (2, 3), (6, 7)] {
        let mut pair = pair(rnr_retry, 1);
        pair.post(1, SendOp::Send, 0, 8);
        pair.post(2, SendOp::Send, 0, 8);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RnrRetryExcErr), (2, WcStatus::WrFlushErr)]);
        assert_eq!(attempts(&pair, Who::A, 0x1000), expected);
        let waited = pair.a.host.counted(Count::RnrWaitUs);
        assert_eq!((waited, pair.a.host.counted(Count::RnrRetryExceeded)), (10 * u32::from(rnr_retry), 1));
        assert_eq!(pair.a.qp.state(), QpState::Err);
        assert_eq!(pair.b.qp.state(), QpState::Rts, "the receiver is none the worse");
    }
}

#[test]
fn seven_is_endless_and_outlives_the_transport_retries() {
    let mut pair = pair(7, 12);
    pair.post(1, SendOp::Send, 0, 8);
    pair.run_for(10_000 * MS);
    assert!(pair.a.host.sent.is_empty());
    assert!(pair.a.host.counted(Count::RnrNakReceived) > 10_000);
    assert_eq!(pair.a.host.counted(Count::Timeout), 0);
    pair.b.post_recvs(100, 1, 0, 100);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
}

#[test]
fn progress_gives_new_attempts() {
    let mut pair = pair(1, 12);
    for id in 0..4 {
        pair.post(id, SendOp::Send, 0, 8);
    }
    for id in 0..4 {
        pair.run_until(|pair| pair.a.host.counted(Count::RnrNakReceived) == id as u32 + 1);
        pair.b.post_recvs(100 + id, 1, 0, 100);
    }
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK), (2, OK), (3, OK)]);
}

#[test]
fn write_with_immediate_needs_its_receive_only_at_the_end() {
    let mut pair = pair(7, 14);
    let SendOp::Write { raddr, rkey } = pair.write_op(0) else { unreachable!() };
    pair.post(1, SendOp::WriteImm { raddr, rkey, imm: 5 }, 500_000, 3000);
    pair.run_for(100_000);
    assert_eq!(answers(&pair, Who::B), [(0x2e, 0x1002)]);
    pair.b.post_recvs(100, 1, 0, 0);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(pair.b.bytes(0, 3000), pair.a.bytes(500_000, 3000));
    assert_eq!(pair.sent_by(Who::A).split_off(3), [(O::RC_WRITE_LAST_IMM, 0x1002)]);
    assert_eq!(pair.b.host.received.len(), 1);
}

#[test]
fn reads_behind_a_refused_send_come_after_it() {
    let mut pair = pair(7, 14);
    pair.post(0, SendOp::Send, 0, 8);
    pair.post(1, pair.read_op(0), 5000, 10);
    pair.post(2, SendOp::Send, 0, 8);
    pair.run_for(100_000);
    assert!(pair.a.host.sent.is_empty());
    pair.b.post_recvs(100, 2, 0, 100);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, OK), (2, OK)]);
}
