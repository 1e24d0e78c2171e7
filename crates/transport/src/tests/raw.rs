//! RAW_PACKET: frames go out and come in as they are.

use ferroce_wire::{Bth, Headers, Opcode, Psn};

use super::{ends, wr};
use crate::host::Drop;
use crate::raw::{FrameFate, MAX_FRAME, MIN_FRAME};
use crate::testing::{Pair, Setup, Who};
use crate::verbs::{
    QpEvent, QpState, QpType, RecvWr, SendData, SendFlags, SendOp, SendWr, WcFlags, WcOpcode, WcStatus,
};

const OK: WcStatus = WcStatus::Success;

/// The next frame of A.
fn poll(pair: &mut Pair) -> Option<Vec<u8>> {
    let mut frame = vec![0xa5; 3];
    pair.a.qp.poll_frame(&mut frame, &mut pair.a.host).then_some(frame)
}

fn fate(pair: &mut Pair, fate: FrameFate) {
    pair.a.qp.handle_frame_fate(fate, &mut pair.a.host);
}

#[test]
fn a_frame_is_gathered_sent_and_completed() {
    let mut pair = Pair::new(QpType::RawPacket);
    let sges = [pair.a.region.sge(0, 10), pair.a.region.sge(500, 0), pair.a.region.sge(100, 50)];
    pair.post_wr(Who::A, wr(1, SendOp::Send, &sges));
    let frame = poll(&mut pair).expect("a frame");
    assert_eq!(frame, [pair.a.bytes(0, 10), pair.a.bytes(100, 50)].concat());
    assert!(pair.a.host.sent.is_empty(), "nobody has it yet");
    fate(&mut pair, FrameFate::Taken);
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!((pair.a.host.sent[0].opcode, pair.a.host.released), (WcOpcode::Send, 1));
    assert_eq!(poll(&mut pair), None);
    assert!(pair.a.qp.poll_transmit(0, &mut pair.a.host).is_none(), "it makes no packets");
}

#[test]
fn inline_frames_and_unsignalled_ones() {
    let mut pair = Pair::new(QpType::RawPacket);
    let data = SendData::Inline(vec![7; 60].into());
    pair.post_wr(Who::A, SendWr { data, flags: SendFlags::empty(), ..wr(1, SendOp::Send, &[]) });
    assert_eq!(poll(&mut pair), Some(vec![7; 60]));
    fate(&mut pair, FrameFate::Taken);
    assert_eq!((ends(&pair.a.host.sent), pair.a.host.released), (vec![], 1));
}

#[test]
fn lengths_at_their_limits_and_past_them() {
    for (len, status) in [
        (MIN_FRAME, OK),
        (MAX_FRAME, OK),
        (0, WcStatus::LocLenErr),
        (MIN_FRAME - 1, WcStatus::LocLenErr),
        (MAX_FRAME + 1, WcStatus::LocLenErr),
    ] {
        let mut pair = Pair::with(&Setup { region: MAX_FRAME + 1, ..Setup::new(QpType::RawPacket) });
        pair.post(1, SendOp::Send, 0, len);
        pair.post(2, SendOp::Send, 0, 60);
        let frame = poll(&mut pair);
        assert_eq!(frame.map(|frame| frame.len() as u32), (status == OK).then_some(len));
        if status == OK {
            fate(&mut pair, FrameFate::Taken);
        } else {
            assert_eq!(ends(&pair.a.host.sent), [(1, status), (2, WcStatus::WrFlushErr)]);
            assert_eq!(pair.a.qp.state(), QpState::Sqe);
        }
    }
}

#[test]
fn a_bad_key_and_a_frame_above_the_mtu_stop_the_send_queue() {
    let mut pair = Pair::new(QpType::RawPacket);
    let bad = crate::Sge { lkey: 0xdead, ..pair.a.region.sge(0, 60) };
    pair.post_wr(Who::A, wr(1, SendOp::Send, &[bad]));
    assert_eq!(poll(&mut pair), None);
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::LocProtErr)]);
    assert_eq!(pair.a.qp.state(), QpState::Sqe);
    pair.to_state(Who::A, QpState::Rts);
    pair.post(2, SendOp::Send, 0, 2000);
    assert!(poll(&mut pair).is_some());
    fate(&mut pair, FrameFate::TooLong);
    assert_eq!(pair.a.host.sent[1].status, WcStatus::LocLenErr);
    assert_eq!(pair.a.qp.state(), QpState::Sqe);
}

#[test]
fn what_is_no_send_is_refused_in_the_queue() {
    let mut pair = Pair::new(QpType::RawPacket);
    pair.post(1, SendOp::SendImm { imm: 1 }, 0, 60);
    assert_eq!(poll(&mut pair), None);
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::LocQpOpErr)]);
}

#[test]
fn a_full_interface_is_asked_again_later() {
    let mut pair = Pair::new(QpType::RawPacket);
    pair.post(1, SendOp::Send, 0, 60);
    assert!(poll(&mut pair).is_some());
    fate(&mut pair, FrameFate::NoRoom { again: 500 });
    assert_eq!((poll(&mut pair), pair.a.qp.next_timeout()), (None, Some(500)));
    pair.a.qp.handle_timeout(499, &mut pair.a.host);
    assert_eq!(poll(&mut pair), None);
    // What was started goes out in SQD too, and draining waits for it.
    pair.to_state(Who::A, QpState::Sqd);
    pair.a.qp.handle_timeout(500, &mut pair.a.host);
    assert!(pair.a.qp.query().sq_draining);
    assert!(poll(&mut pair).is_some());
    fate(&mut pair, FrameFate::Taken);
    assert_eq!((ends(&pair.a.host.sent), pair.a.qp.next_timeout()), (vec![(1, OK)], None));
    assert!(!pair.a.qp.query().sq_draining);
    pair.post(2, SendOp::Send, 0, 60);
    assert_eq!(poll(&mut pair), None, "not before RTS");
    pair.to_state(Who::A, QpState::Rts);
    assert!(poll(&mut pair).is_some());
}

#[test]
fn frames_are_received_with_their_tag() {
    let mut pair = Pair::new(QpType::RawPacket);
    pair.b.post_recvs(100, 2, 1000, 64);
    pair.b.qp.handle_frame(&[9; 60], 77, &mut pair.b.host);
    let got = pair.b.host.received[0];
    assert_eq!((got.wr_id, got.status, got.opcode, got.byte_len), (100, OK, WcOpcode::Recv, 60));
    assert_eq!((got.imm, got.flags, got.src_qp), (77, WcFlags::empty(), 0));
    assert_eq!(pair.b.bytes(1000, 60), [9; 60]);
}

#[test]
fn no_receive_or_one_too_small_drops_the_frame_and_keeps_the_receive() {
    let mut pair = Pair::new(QpType::RawPacket);
    pair.b.qp.handle_frame(&[9; 60], 0, &mut pair.b.host);
    assert_eq!(pair.b.host.dropped(Drop::NoReceive), 1);
    pair.b.post_recvs(100, 1, 0, 64);
    pair.b.qp.handle_frame(&[9; 65], 0, &mut pair.b.host);
    assert_eq!(pair.b.host.dropped(Drop::BadLength), 1);
    pair.b.qp.handle_frame(&[9; 64], 0, &mut pair.b.host);
    assert_eq!(ends(&pair.b.host.received), [(100, OK)]);
}

#[test]
fn a_receive_into_memory_that_may_not_be_written_ends_it_and_is_told() {
    let mut pair = Pair::new(QpType::RawPacket);
    let bad = crate::Sge { lkey: 0xdead, ..pair.b.region.sge(0, 60) };
    pair.b.host.receives.push_back(RecvWr { wr_id: 100, sges: [bad].into_iter().collect() });
    pair.b.qp.handle_frame(&[9; 60], 0, &mut pair.b.host);
    assert_eq!(ends(&pair.b.host.received), [(100, WcStatus::LocProtErr)]);
    assert_eq!((pair.b.qp.state(), pair.b.host.events.as_slice()), (QpState::Err, &[QpEvent::WqFatal][..]));
}

#[test]
fn errors_and_reset_leave_nothing_behind() {
    let mut pair = Pair::new(QpType::RawPacket);
    pair.b.post_recvs(100, 2, 0, 20);
    pair.b.qp.handle_frame(&[9; 60], 0, &mut pair.b.host);
    pair.to_state(Who::B, QpState::Err);
    assert_eq!(ends(&pair.b.host.received), [(100, WcStatus::WrFlushErr), (101, WcStatus::WrFlushErr)]);
    pair.b.qp.handle_frame(&[9; 60], 0, &mut pair.b.host);
    assert_eq!(pair.b.host.dropped(Drop::QpState), 1);
    pair.post(1, SendOp::Send, 0, 60);
    assert!(poll(&mut pair).is_some());
    pair.to_state(Who::A, QpState::Reset);
    assert_eq!((ends(&pair.a.host.sent), pair.a.host.released), (vec![], 1));
}

#[test]
fn packets_of_roce_are_not_for_it_and_frames_not_for_others() {
    let mut pair = Pair::new(QpType::RawPacket);
    pair.b.post_recvs(100, 1, 0, 2000);
    for (count, opcode) in [Opcode::UD_SEND_ONLY, Opcode::RC_SEND_ONLY, Opcode::FERROCE_FLOW].into_iter().enumerate() {
        pair.inject(Who::A, Headers::new(Bth::new(opcode, 0x22, Psn::new(0))), &[0; 8]);
        pair.run();
        assert_eq!(pair.b.host.dropped(Drop::WrongTransport) as usize, count + 1);
    }
    let mut other = Pair::new(QpType::Ud);
    other.b.post_recvs(100, 1, 0, 2000);
    other.b.qp.handle_frame(&[9; 60], 0, &mut other.b.host);
    assert_eq!((other.b.host.dropped(Drop::WrongTransport), other.b.host.received.len()), (1, 0));
}
