//! UD: datagrams with a Q_Key and a GRH area.

use std::sync::Arc;

use ferroce_wire::{GRH_LEN, Opcode as O};

use super::{ends, wr};
use crate::host::Drop;
use crate::testing::{Pair, Setup, Who};
use crate::verbs::{QpState, QpType, SendFlags, SendOp, UdDest, WcFlags, WcOpcode, WcStatus};

const OK: WcStatus = WcStatus::Success;
const GRH: u32 = GRH_LEN as u32;

fn to_b(pair: &Pair, qkey: u32) -> Option<UdDest> {
    Some(UdDest { path: Arc::clone(&pair.a.path), qpn: 0x22, qkey })
}

#[test]
fn datagrams_of_each_size_behind_a_grh_area() {
    for len in [0, 1, 63, 1024] {
        let mut pair = Pair::new(QpType::Ud);
        pair.b.post_recvs(100, 2, 0, 2000);
        pair.post_flags(1, SendOp::SendImm { imm: 5 }, 500_000, len, SendFlags::SIGNALED | SendFlags::SOLICITED);
        pair.post(2, SendOp::Send, 500_000, len);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
        let got = pair.b.host.received[0];
        assert_eq!((got.wr_id, got.opcode, got.byte_len, got.imm), (100, WcOpcode::Recv, len + GRH, 5));
        assert_eq!((got.flags, got.src_qp, got.solicited), (WcFlags::GRH | WcFlags::WITH_IMM, 0x11, true));
        assert_eq!(pair.b.host.received[1].flags, WcFlags::GRH);
        assert_eq!(got.sl, 0b1010, "RoCE v2 over IPv4");
        assert_eq!(pair.b.bytes(GRH, len), pair.a.bytes(500_000, len));
        let header = pair.b.bytes(20, 20);
        assert_eq!((header[0], &header[12..16]), (0x45, &[10, 88, 0, 1][..]), "IPv4 header in the area's second half");
        assert_eq!(pair.sent_by(Who::A), [(O::UD_SEND_ONLY_IMM, 0x1000), (O::UD_SEND_ONLY, 0x1001)]);
        assert_eq!(pair.b.host.memory.last_stores.len(), 2);
    }
}

#[test]
fn the_q_key_must_be_the_receivers() {
    let mut pair = Pair::new(QpType::Ud);
    pair.b.post_recvs(100, 2, 0, 2000);
    for (id, qkey) in [(1, 0x1235), (2, 0x1234), (3, 0x8000_9999)] {
        let ud = to_b(&pair, qkey);
        pair.post_wr(Who::A, crate::SendWr { ud, ..wr(id, SendOp::Send, &[pair.a.region.sge(0, 8)]) });
    }
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK)]);
    assert_eq!(pair.b.host.dropped(Drop::QKey), 1);
    assert_eq!(pair.b.host.received.len(), 2, "with the top bit set the queue pair's own Q_Key went out");
    let keys: Vec<_> = pair.seen.iter().map(|seen| seen.headers.deth.unwrap().qkey).collect();
    assert_eq!(keys, [0x1235, 0x1234, 0x1234]);
}

#[test]
fn a_datagram_longer_than_the_mtu_is_refused() {
    let mut pair = Pair::new(QpType::Ud);
    pair.post(1, SendOp::Send, 0, 1025);
    pair.post(2, SendOp::Send, 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::LocLenErr), (2, WcStatus::WrFlushErr)]);
    assert_eq!(pair.a.qp.state(), QpState::Sqe);
    assert!(pair.seen.is_empty());
}

#[test]
fn the_mtu_is_the_ports() {
    let mut pair = Pair::with(&Setup { mtu: 4096, ..Setup::new(QpType::Ud) });
    pair.b.post_recvs(100, 1, 0, 5000);
    pair.post(1, SendOp::Send, 0, 4096);
    pair.run();
    assert_eq!(pair.b.host.received[0].byte_len, 4096 + GRH);
}

#[test]
fn no_receive_or_one_too_small_drops_the_datagram_and_keeps_the_receive() {
    let mut pair = Pair::new(QpType::Ud);
    pair.post(1, SendOp::Send, 0, 8);
    pair.run();
    assert_eq!(pair.b.host.dropped(Drop::NoReceive), 1);
    pair.b.post_recvs(100, 1, 0, GRH + 4);
    pair.post(2, SendOp::Send, 0, 8);
    pair.post(3, SendOp::Send, 0, 4);
    pair.run();
    assert_eq!(pair.b.host.dropped(Drop::BadLength), 1);
    assert_eq!(ends(&pair.b.host.received), [(100, OK)]);
    assert_eq!(pair.b.host.received[0].byte_len, GRH + 4);
    assert_eq!(pair.b.qp.state(), QpState::Rts);
}

#[test]
fn a_receive_kept_back_is_flushed_first() {
    let mut pair = Pair::new(QpType::Ud);
    pair.b.post_recvs(100, 2, 0, GRH + 4);
    pair.post(1, SendOp::Send, 0, 8);
    pair.run();
    pair.to_state(Who::B, QpState::Err);
    assert_eq!(ends(&pair.b.host.received), [(100, WcStatus::WrFlushErr), (101, WcStatus::WrFlushErr)]);
}

#[test]
fn completions_wait_until_the_link_has_the_packet() {
    let mut pair = Pair::new(QpType::Ud);
    pair.post(1, SendOp::Send, 0, 8);
    let train = pair.a.qp.poll_transmit(0, &mut pair.a.host).expect("a datagram");
    assert_eq!(train.packets, 1);
    assert!(pair.a.host.sent.is_empty(), "the link still reads the memory");
    assert!(pair.a.qp.poll_transmit(0, &mut pair.a.host).is_none());
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
}

#[test]
fn a_receive_with_a_bad_lkey_is_an_error_of_the_queue_pair() {
    let mut pair = Pair::new(QpType::Ud);
    pair.b.post_recvs(100, 2, 0, 100);
    pair.b.host.receives[0].sges[0].lkey = 0xdead;
    pair.post(1, SendOp::Send, 0, 8);
    pair.run();
    assert_eq!(ends(&pair.b.host.received), [(100, WcStatus::LocProtErr), (101, WcStatus::WrFlushErr)]);
    assert_eq!(pair.b.qp.state(), QpState::Err);
}

#[test]
fn operations_that_ud_does_not_have() {
    let mut pair = Pair::new(QpType::Ud);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::LocQpOpErr)]);
}

#[test]
fn foreign_opcodes_are_dropped() {
    let mut pair = Pair::new(QpType::Ud);
    pair.b.post_recvs(100, 1, 0, 100);
    for (opcode, reason) in [
        (O::RC_SEND_ONLY, Drop::WrongTransport),
        (O::UC_SEND_ONLY, Drop::WrongTransport),
        (ferroce_wire::Opcode(0x60), Drop::BadOpcode),
    ] {
        let bth = ferroce_wire::Bth::new(opcode, 0, ferroce_wire::Psn::new(0));
        pair.inject(Who::A, ferroce_wire::Headers::new(bth), &[]);
        pair.run();
        assert!(pair.b.host.dropped(reason) > 0, "{opcode:?}");
    }
    assert!(pair.b.host.received.is_empty());
}
