//! UC: whole messages or none, and never an acknowledgement.

use ferroce_wire::Opcode as O;

use super::{ends, wr};
use crate::host::Drop;
use crate::testing::{Pair, Setup, Who};
use crate::verbs::{Access, QpAttr, QpState, QpType, SendOp, WcFlags, WcOpcode, WcStatus};

const OK: WcStatus = WcStatus::Success;

#[test]
fn send_and_write_of_each_size() {
    for len in [0, 1, 1024, 1025, 200_000] {
        let mut pair = Pair::new(QpType::Uc);
        pair.b.post_recvs(100, 3, 0, 200_000);
        let SendOp::Write { raddr, rkey } = pair.write_op(700_000) else { unreachable!() };
        pair.post(1, SendOp::SendImm { imm: 9 }, 0, len);
        pair.post(2, SendOp::Write { raddr, rkey }, 0, len);
        pair.post(3, SendOp::WriteImm { raddr, rkey, imm: 8 }, 0, len);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK)]);
        assert_eq!(pair.a.host.released, 3);
        let got = &pair.b.host.received;
        assert_eq!(
            got.iter().map(|done| (done.opcode, done.byte_len, done.imm)).collect::<Vec<_>>(),
            [(WcOpcode::Recv, len, 9), (WcOpcode::RecvRdmaWithImm, len, 8)]
        );
        assert_eq!(got[0].flags, WcFlags::WITH_IMM);
        assert_eq!(pair.b.bytes(0, len), pair.a.bytes(0, len));
        assert_eq!(pair.b.bytes(700_000, len), pair.a.bytes(0, len));
        let short = pair.seen.iter().all(|seen| seen.from == Who::A && !seen.headers.bth.ack_req);
        assert_eq!(short, len < 10_000, "little is sent as any other end sends it");
    }
}

/// A SEND of three packets of which `lost` are lost, then three of one packet: which receives complete, with which lengths.
fn after_loss(lost: &[u32]) -> Vec<(u64, u32)> {
    let mut pair = Pair::new(QpType::Uc);
    pair.b.post_recvs(100, 5, 0, 4000);
    pair.drop_nth(Who::A, lost);
    pair.post(1, SendOp::Send, 0, 3000);
    for id in 2..5 {
        pair.post(id, SendOp::Send, 0, id as u32);
    }
    pair.run();
    assert_eq!(pair.a.host.sent.len(), 4, "the sender does not notice");
    assert_eq!(pair.b.qp.state(), QpState::Rts);
    pair.b.host.received.iter().map(|done| (done.wr_id, done.byte_len)).collect()
}

#[test]
fn a_broken_message_is_not_delivered_and_its_receive_is_used_again() {
    assert_eq!(after_loss(&[]), [(100, 3000), (101, 2), (102, 3), (103, 4)]);
    for lost in [&[0], &[1], &[2]] {
        assert_eq!(after_loss(lost), [(100, 2), (101, 3), (102, 4)], "{lost:?}");
    }
    assert_eq!(after_loss(&[2, 3]), [(100, 3), (101, 4)]);
}

#[test]
fn a_broken_write_leaves_no_completion() {
    let mut pair = Pair::new(QpType::Uc);
    pair.b.post_recvs(100, 1, 0, 0);
    pair.drop_nth(Who::A, &[1]);
    let SendOp::Write { raddr, rkey } = pair.write_op(0) else { unreachable!() };
    pair.post(1, SendOp::WriteImm { raddr, rkey, imm: 1 }, 0, 3000);
    pair.post(2, SendOp::WriteImm { raddr, rkey, imm: 2 }, 0, 4);
    pair.run();
    assert_eq!(pair.b.host.received.iter().map(|done| (done.wr_id, done.imm)).collect::<Vec<_>>(), [(100, 2)]);
    assert_eq!(pair.b.host.dropped(Drop::MessageBroken), 1);
}

#[test]
fn refused_writes_are_dropped_silently() {
    let mut pair = Pair::new(QpType::Uc);
    pair.b.post_recvs(100, 1, 0, 100);
    pair.post(1, SendOp::Write { raddr: pair.b.region.addr, rkey: 0xdead }, 0, 3000);
    let end = u64::from(pair.b.region.len);
    pair.post(2, super::write_to(pair.b.region, end - 4), 0, 8);
    pair.post(3, SendOp::Send, 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK)]);
    assert_eq!(ends(&pair.b.host.received), [(100, OK)]);
    assert_eq!(pair.b.host.dropped(Drop::Access), 2);
    assert_eq!(pair.b.host.dropped(Drop::MessageBroken), 2, "the rest of the first");
    assert!(pair.b.host.events.is_empty());
    assert!(pair.seen.iter().all(|seen| seen.from == Who::A));
}

#[test]
fn a_receive_kept_from_a_broken_message_survives_a_write_into_memory_that_is_gone() {
    let mut pair = Pair::new(QpType::Uc);
    let gone = pair.b.host.memory.register(7, 100, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    pair.b.host.memory.unmap(gone);
    pair.b.post_recvs(100, 1, 0, 3000);
    pair.drop_nth(Who::A, &[1]);
    pair.post(1, SendOp::Send, 0, 2000);
    pair.post(2, super::write_to(gone, 0), 0, 8);
    pair.post(3, SendOp::Send, 0, 8);
    pair.run();
    assert_eq!(ends(&pair.b.host.received), [(100, OK)]);
}

#[test]
fn write_without_the_right_of_the_queue_pair() {
    let attr = QpAttr { access: Access::empty(), ..Setup::new(QpType::Uc).attr };
    let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Uc) });
    pair.post(1, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!((pair.b.host.dropped(Drop::Access), pair.b.host.memory.stores), (1, 0));
}

#[test]
fn without_a_receive_a_message_is_dropped() {
    let mut pair = Pair::new(QpType::Uc);
    let SendOp::Write { raddr, rkey } = pair.write_op(0) else { unreachable!() };
    pair.post(1, SendOp::Send, 0, 3000);
    pair.post(2, SendOp::WriteImm { raddr, rkey, imm: 1 }, 0, 8);
    pair.run();
    assert_eq!(pair.b.host.dropped(Drop::NoReceive), 2);
    pair.b.post_recvs(100, 1, 0, 100);
    pair.post(3, SendOp::Send, 0, 8);
    pair.run();
    assert_eq!(ends(&pair.b.host.received), [(100, OK)]);
}

#[test]
fn a_message_longer_than_its_receive_is_the_receivers_error() {
    let mut pair = Pair::new(QpType::Uc);
    pair.b.post_recvs(100, 2, 0, 2000);
    pair.post(1, SendOp::Send, 0, 2001);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(ends(&pair.b.host.received), [(100, WcStatus::LocLenErr), (101, WcStatus::WrFlushErr)]);
    assert_eq!(pair.b.qp.state(), QpState::Err);
}

#[test]
fn send_errors_stop_the_send_queue_only() {
    let mut pair = Pair::new(QpType::Uc);
    pair.a.post_recvs(200, 1, 0, 100);
    let mut bad = pair.a.region.sge(0, 8);
    bad.lkey = 0xdead;
    pair.post(1, pair.write_op(0), 0, 8);
    pair.post_wr(Who::A, wr(2, pair.write_op(0), &[bad]));
    pair.post(3, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, WcStatus::LocProtErr), (3, WcStatus::WrFlushErr)]);
    assert_eq!(pair.a.qp.state(), QpState::Sqe);
    // Posting goes on to be flushed, receiving goes on.
    pair.post(4, pair.write_op(0), 0, 8);
    assert_eq!(ends(&pair.a.host.sent)[3], (4, WcStatus::WrFlushErr));
    pair.post_wr(Who::B, wr(5, SendOp::Send, &[pair.b.region.sge(0, 8)]));
    pair.run();
    assert_eq!(ends(&pair.a.host.received), [(200, OK)]);
    // And back to RTS, PSNs where they were.
    pair.to_state(Who::A, QpState::Rts);
    pair.post(6, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(pair.a.host.sent.last().unwrap().status, OK);
    assert_eq!(pair.sent_by(Who::A), [(O::UC_WRITE_ONLY, 0x1000), (O::UC_WRITE_ONLY, 0x1001)]);
}

#[test]
fn operations_that_uc_does_not_have() {
    for op in [|pair: &Pair| pair.read_op(0), |pair: &Pair| pair.add_op(0, 1), |_: &Pair| SendOp::SendInv { rkey: 1 }] {
        let mut pair = Pair::new(QpType::Uc);
        let op = op(&pair);
        pair.post(1, op, 0, 8);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::LocQpOpErr)]);
    }
}

#[test]
fn source_gone_when_the_link_reads_it() {
    let mut pair = Pair::new(QpType::Uc);
    let gone = pair.a.host.memory.register(7, 100, Access::empty());
    pair.a.host.memory.unmap(gone);
    pair.post_wr(Who::A, wr(1, pair.write_op(0), &[gone.sge(0, 50)]));
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::LocProtErr)]);
    assert_eq!(pair.a.qp.state(), QpState::Sqe);
}
