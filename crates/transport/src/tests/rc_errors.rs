//! RC requests that are refused, on either side, and what is left behind.

use ferroce_wire::{Bth, Headers, Opcode as O, Psn, Reth};

use super::{answers, ends, sent_by, wr, write_to};
use crate::host::{Count, Drop};
use crate::testing::{Fate, Pair, Setup, Who};
use crate::verbs::{Access, QpAttr, QpEvent, QpState, QpType, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus};

const OK: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;

/// Posts one request between a good one and one behind it, and expects its status, the answer, and B's event.
fn refused(pair: &mut Pair, op: SendOp, len: u32, status: WcStatus, syndrome: u8, event: QpEvent) {
    pair.b.post_recvs(100, 2, 0, 100);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.post(2, op, 0, len);
    pair.post(3, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, status), (3, FLUSHED)]);
    assert_eq!((pair.a.qp.state(), pair.b.qp.state()), (QpState::Err, QpState::Err));
    assert_eq!(answers(pair, Who::B).last(), Some(&(syndrome, 0x1001)));
    assert_eq!(pair.b.host.events, [event]);
    assert_eq!(ends(&pair.b.host.received), [(100, FLUSHED), (101, FLUSHED)]);
    assert_eq!(pair.a.host.released, 3);
    let (sent, received) = match status {
        WcStatus::RemInvReqErr => (Count::NakInvalidRequestSent, Count::NakInvalidRequestReceived),
        WcStatus::RemAccessErr => (Count::NakRemoteAccessSent, Count::NakRemoteAccessReceived),
        _ => (Count::NakRemoteOperationSent, Count::NakRemoteOperationReceived),
    };
    assert_eq!((pair.b.host.counted(sent), pair.a.host.counted(received)), (1, 1));
    assert_eq!(pair.a.host.sent[1].vendor_err, 0x100 + u32::from(syndrome));
}

#[test]
fn bad_rkey() {
    let access = (WcStatus::RemAccessErr, 0x62, QpEvent::AccessErr);
    for len in [8, 3000] {
        let mut pair = Pair::new(QpType::Rc);
        let op = SendOp::Write { raddr: pair.b.region.addr, rkey: 0xdead };
        refused(&mut pair, op, len, access.0, access.1, access.2);
        assert_eq!(pair.b.host.memory.stores, 1, "nothing of it was placed");
    }
    let mut pair = Pair::new(QpType::Rc);
    let op = SendOp::Read { raddr: pair.b.region.addr, rkey: 0xdead };
    refused(&mut pair, op, 8, access.0, access.1, access.2);
    let mut pair = Pair::new(QpType::Rc);
    let op = SendOp::FetchAdd { raddr: pair.b.region.addr, rkey: 0xdead, add: 1 };
    refused(&mut pair, op, 8, access.0, access.1, access.2);
}

/// Posts one WRITE with immediate of `len` bytes to two receives, and expects the requester's and the receives' statuses.
fn refused_immediate(op: SendOp, len: u32, pair: &mut Pair, status: WcStatus, received: [WcStatus; 2]) {
    pair.b.post_recvs(100, 2, 0, 100);
    pair.post(1, op, 0, len);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, status)]);
    assert_eq!(ends(&pair.b.host.received), [(100, received[0]), (101, received[1])]);
    assert_eq!((pair.a.qp.state(), pair.b.qp.state()), (QpState::Err, QpState::Err));
    assert_eq!(pair.b.host.memory.stores, 0, "nothing of it was placed");
}

#[test]
fn a_refused_immediate_fails_the_receive_that_it_would_have_used() {
    let wrong_key = |pair: &Pair| SendOp::WriteImm { raddr: pair.b.region.addr, rkey: 0xdead, imm: 1 };
    let access = WcStatus::RemAccessErr;
    let mut pair = Pair::new(QpType::Rc);
    refused_immediate(wrong_key(&pair), 8, &mut pair, access, [access, FLUSHED]);
    assert!(pair.b.host.events.is_empty(), "the completion tells");
    // One byte behind the region.
    let mut pair = Pair::new(QpType::Rc);
    let raddr = pair.b.region.addr + u64::from(pair.b.region.len) - 7;
    let op = SendOp::WriteImm { raddr, rkey: pair.b.region.key, imm: 1 };
    refused_immediate(op, 8, &mut pair, access, [access, FLUSHED]);
    // Several packets are refused at the first, which uses no receive.
    let mut pair = Pair::new(QpType::Rc);
    refused_immediate(wrong_key(&pair), 3000, &mut pair, access, [FLUSHED, FLUSHED]);
    assert_eq!(pair.b.host.events, [QpEvent::AccessErr]);
    // Our memory is gone.
    let mut pair = Pair::new(QpType::Rc);
    let gone = pair.b.host.memory.register(7, 100, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    pair.b.host.memory.unmap(gone);
    let op = SendOp::WriteImm { raddr: gone.addr, rkey: gone.key, imm: 1 };
    refused_immediate(op, 8, &mut pair, WcStatus::RemOpErr, [WcStatus::LocAccessErr, FLUSHED]);
}

#[test]
fn a_refused_immediate_without_a_receive_is_an_event() {
    let mut pair = Pair::new(QpType::Rc);
    pair.post(1, SendOp::WriteImm { raddr: pair.b.region.addr, rkey: 0xdead, imm: 1 }, 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RemAccessErr)]);
    assert_eq!(pair.b.host.events, [QpEvent::AccessErr]);
}

#[test]
fn zero_length_is_good_with_any_key() {
    let mut pair = Pair::new(QpType::Rc);
    pair.post(1, SendOp::Write { raddr: 1, rkey: 0xdead }, 0, 0);
    pair.post(2, SendOp::Read { raddr: 1, rkey: 0xdead }, 0, 0);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
}

#[test]
fn bounds_are_those_of_the_whole_message() {
    let end = |pair: &Pair| u64::from(pair.b.region.len);
    // Just inside.
    let mut pair = Pair::new(QpType::Rc);
    pair.post(1, write_to(pair.b.region, end(&pair) - 2048), 0, 2048);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    // Only the second packet's last byte is outside: refused at the first.
    let mut pair = Pair::new(QpType::Rc);
    let op = write_to(pair.b.region, end(&pair) - 2047);
    refused(&mut pair, op, 2048, WcStatus::RemAccessErr, 0x62, QpEvent::AccessErr);
    assert_eq!(pair.b.host.memory.stores, 1);
    // Before the start; past the end of the address space.
    for raddr in [0, u64::MAX - 3] {
        let mut pair = Pair::new(QpType::Rc);
        let op = SendOp::Read { raddr, rkey: pair.b.region.key };
        refused(&mut pair, op, 8, WcStatus::RemAccessErr, 0x62, QpEvent::AccessErr);
    }
}

#[test]
fn region_without_the_right() {
    let mut pair = Pair::new(QpType::Rc);
    let bare = pair.b.host.memory.register(7, 100, Access::LOCAL_WRITE);
    refused(&mut pair, write_to(bare, 0), 8, WcStatus::RemAccessErr, 0x62, QpEvent::AccessErr);
}

#[test]
fn region_of_another_domain() {
    let mut pair = Pair::new(QpType::Rc);
    let other = pair.b.host.memory.register(8, 100, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    refused(&mut pair, write_to(other, 0), 8, WcStatus::RemAccessErr, 0x62, QpEvent::AccessErr);
}

#[test]
fn queue_pair_without_the_right_is_an_invalid_request() {
    type Op = fn(&Pair) -> SendOp;
    let cases: [(Access, Op); 3] = [
        (Access::REMOTE_READ | Access::REMOTE_ATOMIC, |pair| pair.write_op(0)),
        (Access::REMOTE_WRITE | Access::REMOTE_ATOMIC, |pair| pair.read_op(0)),
        (Access::REMOTE_WRITE | Access::REMOTE_READ, |pair| pair.add_op(0, 1)),
    ];
    for (access, op) in cases {
        let attr = QpAttr { access: access | Access::REMOTE_WRITE, ..Setup::new(QpType::Rc).attr };
        let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) });
        // The right to WRITE is taken away only now: the case's first request is a WRITE.
        pair.post(0, pair.write_op(0), 0, 8);
        pair.run();
        let attr = QpAttr { state: QpState::Rts, access, ..QpAttr::default() };
        pair.modify(Who::B, &attr, crate::QpAttrMask::STATE | crate::QpAttrMask::ACCESS_FLAGS);
        let op = op(&pair);
        pair.post(1, op, 0, 8);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(0, OK), (1, WcStatus::RemInvReqErr)]);
        assert_eq!(pair.b.host.events, [QpEvent::ReqErr]);
    }
}

#[test]
fn misaligned_atomic() {
    let mut pair = Pair::new(QpType::Rc);
    let op = pair.add_op(4, 1);
    refused(&mut pair, op, 8, WcStatus::RemInvReqErr, 0x61, QpEvent::ReqErr);
    assert_eq!(pair.b.host.memory.atomics, 0);
}

#[test]
fn memory_gone_under_a_good_key_is_an_operational_error() {
    let mut pair = Pair::new(QpType::Rc);
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let gone = pair.b.host.memory.register(7, 100, all);
    pair.b.host.memory.unmap(gone);
    refused(&mut pair, write_to(gone, 0), 8, WcStatus::RemOpErr, 0x63, QpEvent::Fatal);
}

#[test]
fn read_memory_gone_when_the_link_reads_it() {
    let mut pair = Pair::new(QpType::Rc);
    let gone = pair.b.host.memory.register(7, 100, Access::REMOTE_READ);
    pair.b.host.memory.unmap(gone);
    let op = SendOp::Read { raddr: gone.addr, rkey: gone.key };
    refused(&mut pair, op, 8, WcStatus::RemOpErr, 0x63, QpEvent::Fatal);
}

#[test]
fn read_key_gone_between_two_trains_of_the_answer() {
    let mut pair = Pair::new(QpType::Rc);
    let region = pair.b.host.memory.register(7, 200_000, Access::REMOTE_READ);
    let now = pair.now;
    // One request for more than a train, as a foreign requester makes it.
    let mut headers = Headers::new(Bth::new(O::RC_READ_REQUEST, 0, Psn::new(0x1000)));
    headers.reth = Some(Reth { va: region.addr, rkey: region.key, len: 200_000 });
    let packet = crate::Packet { headers: &headers, payload: &[], net: &net(&pair) };
    pair.b.qp.handle_packet(now, &packet, &mut pair.b.host);
    let first = pair.b.qp.poll_transmit(now, &mut pair.b.host).expect("the first train of the answer");
    assert_eq!((first.packets, first.len), (60, 61_440));
    pair.b.host.memory.deregister(region);
    let nak = pair.b.qp.poll_transmit(now, &mut pair.b.host).expect("a NAK instead of the second train");
    assert_eq!(nak.head.aeth.unwrap().syndrome.0, 0x62);
    assert_eq!(nak.head.bth.psn.get(), 0x1000 + 60);
    assert_eq!(pair.b.qp.state(), QpState::Err);
    assert!(pair.b.qp.poll_transmit(now, &mut pair.b.host).is_none());
}

fn net(pair: &Pair) -> ferroce_wire::NetHeader {
    ferroce_wire::NetHeader {
        src: pair.a.path.src,
        dst: pair.a.path.dst,
        src_port: 1,
        tclass: 0,
        hop_limit: 64,
        udp_len: 100,
        ifindex: 0,
    }
}

#[test]
fn bad_lkey_stays_off_the_wire_and_waits_for_its_turn() {
    let mut pair = Pair::new(QpType::Rc);
    let mut bad = pair.a.region.sge(0, 3000);
    bad.lkey = 0xdead;
    pair.post(1, pair.write_op(0), 0, 100_000);
    pair.post_wr(Who::A, wr(2, pair.write_op(0), &[pair.a.region.sge(0, 3000), bad]));
    pair.post(3, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, WcStatus::LocProtErr), (3, FLUSHED)]);
    assert_eq!(sent_by(&pair, Who::A).len(), 98, "the packets of the first request");
    assert_eq!(pair.b.qp.state(), QpState::Rts, "the peer does not notice");
}

#[test]
fn source_gone_when_the_link_reads_it() {
    let mut pair = Pair::new(QpType::Rc);
    let gone = pair.a.host.memory.register(7, 100, Access::LOCAL_WRITE);
    pair.a.host.memory.unmap(gone);
    pair.post(1, pair.write_op(0), 0, 2000);
    pair.post_wr(Who::A, wr(2, pair.write_op(0), &[gone.sge(0, 50)]));
    pair.post(3, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, WcStatus::LocProtErr), (3, FLUSHED)]);
}

#[test]
fn key_gone_in_the_middle_of_a_message() {
    let mut pair = Pair::new(QpType::Rc);
    let region = pair.a.host.memory.register(7, 300_000, Access::empty());
    pair.post_wr(Who::A, wr(1, pair.write_op(0), &[region.sge(0, 300_000)]));
    pair.drain();
    pair.a.host.memory.deregister(region);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::LocProtErr)]);
}

#[test]
fn a_response_that_has_nowhere_to_go_is_never_asked_for() {
    let readonly = |pair: &mut Pair, len| pair.a.host.memory.register(7, 100, Access::empty()).sge(0, len);
    let bad_key = |pair: &mut Pair, len| Sge { lkey: 0xdead, ..pair.a.region.sge(0, len) };
    let buffers: [fn(&mut Pair, u32) -> Sge; 2] = [readonly, bad_key];
    for buffer in buffers {
        for (atomic, len) in [(false, 64), (true, 8)] {
            let mut pair = Pair::new(QpType::Rc);
            pair.b.host.memory.write(pair.b.region, 0, &5u64.to_ne_bytes());
            let op = if atomic { pair.add_op(0, 1) } else { pair.read_op(0) };
            let sge = buffer(&mut pair, len);
            pair.post_wr(Who::A, wr(1, op, &[sge]));
            pair.post(2, pair.write_op(8), 0, 8);
            pair.run();
            assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::LocProtErr), (2, FLUSHED)]);
            assert_eq!((pair.seen.len(), pair.b.host.memory.atomics), (0, 0), "the peer does not notice");
            assert_eq!(pair.b.bytes(0, 8), 5u64.to_ne_bytes());
        }
    }
}

#[test]
fn requests_that_cannot_be_are_refused_locally() {
    let no_reads = QpAttr { max_rd_atomic: 0, ..Setup::new(QpType::Rc).attr };
    let mut pair = Pair::with(&Setup { attr: no_reads, ..Setup::new(QpType::Rc) });
    pair.post(1, pair.read_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::LocQpOpErr)]);

    let mut pair = Pair::new(QpType::Rc);
    pair.post(1, pair.add_op(0, 1), 0, 16);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::LocLenErr)]);

    let mut pair = Pair::new(QpType::Rc);
    let huge = crate::Sge { length: 1 << 31, ..pair.a.region.sge(0, 1) };
    pair.post_wr(Who::A, wr(1, pair.write_op(0), &[huge, pair.a.region.sge(0, 1)]));
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::LocLenErr)]);
    assert!(pair.seen.is_empty());
}

#[test]
fn send_longer_than_the_receive() {
    for (room, len, at) in [(99, 100, 0), (2048, 2049, 2), (1000, 3000, 0)] {
        let mut pair = Pair::new(QpType::Rc);
        pair.b.post_recvs(100, 2, 0, room);
        pair.post(1, SendOp::Send, 0, len);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RemInvReqErr)], "{room} {len}");
        assert_eq!(ends(&pair.b.host.received), [(100, WcStatus::LocLenErr), (101, FLUSHED)]);
        assert_eq!(answers(&pair, Who::B), [(0x61, 0x1000 + at)]);
        assert!(pair.b.host.events.is_empty(), "the completion tells");
    }
}

#[test]
fn receive_with_a_bad_lkey() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(100, 1, 0, 100);
    pair.b.host.receives[0].sges[0].lkey = 0xdead;
    pair.post(1, SendOp::Send, 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RemOpErr)]);
    assert_eq!(ends(&pair.b.host.received), [(100, WcStatus::LocProtErr)]);
}

#[test]
fn send_with_invalidate_of_what_cannot_be() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(100, 1, 0, 100);
    pair.post(1, SendOp::SendInv { rkey: pair.b.region.key }, 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RemAccessErr)]);
    assert_eq!(ends(&pair.b.host.received), [(100, WcStatus::MwBindErr)]);
}

/// A request packet as no requester makes it; B's answer, or `None`.
fn injected(packets: &[(O, usize, Option<u32>)]) -> (Pair, Option<u8>) {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.post_recvs(100, 4, 0, 5000);
    for (index, &(opcode, len, reth)) in packets.iter().enumerate() {
        let mut headers = Headers::new(Bth::new(opcode, 0, Psn::new(0x1000 + index as u32)));
        headers.reth = reth.map(|len| Reth { va: pair.b.region.addr + 100_000, rkey: pair.b.region.key, len });
        headers.imm =
            headers.bth.opcode.layout().is_some_and(|l| l.ext.contains(ferroce_wire::Ext::IMM_DT)).then_some(0);
        pair.inject(Who::A, headers, &vec![0x55; len]);
        pair.run_for(0);
    }
    let answer = answers(&pair, Who::B).last().map(|answer| answer.0);
    (pair, answer)
}

#[test]
fn opcodes_out_of_sequence() {
    let refused: &[&[(O, usize, Option<u32>)]] = &[
        &[(O::RC_SEND_MIDDLE, 1024, None)],
        &[(O::RC_SEND_LAST, 10, None)],
        &[(O::RC_WRITE_MIDDLE, 1024, None)],
        &[(O::RC_WRITE_LAST_IMM, 10, None)],
        &[(O::RC_SEND_FIRST, 1024, None), (O::RC_WRITE_MIDDLE, 1024, None)],
        &[(O::RC_SEND_FIRST, 1024, None), (O::RC_SEND_ONLY, 4, None)],
        &[(O::RC_SEND_FIRST, 1024, None), (O::RC_SEND_FIRST, 1024, None)],
        &[(O::RC_SEND_FIRST, 1024, None), (O::RC_READ_REQUEST, 0, Some(8))],
        &[(O::RC_WRITE_FIRST, 1024, Some(2000)), (O::RC_SEND_LAST, 976, None)],
        &[(O::RC_WRITE_FIRST, 1024, Some(2000)), (O::RC_WRITE_ONLY, 8, Some(8))],
    ];
    for packets in refused {
        let (pair, answer) = injected(packets);
        assert_eq!(answer, Some(0x61), "{packets:?}");
        assert_eq!(pair.b.qp.state(), QpState::Err);
        let in_use = packets[0].0 == O::RC_SEND_FIRST;
        assert_eq!(pair.b.host.events.is_empty(), in_use, "{packets:?}");
        assert_eq!(pair.b.host.received[0].status == WcStatus::RemInvReqErr, in_use, "{packets:?}");
    }
    let (pair, answer) =
        injected(&[(O::RC_SEND_FIRST, 1024, None), (O::RC_SEND_MIDDLE, 1024, None), (O::RC_SEND_LAST, 1, None)]);
    assert_eq!((answer, pair.b.qp.state()), (None, QpState::Rts), "the good sequence (and no AckReq, so no ACK)");
    assert_eq!(pair.b.host.received[0].byte_len, 2049);
}

#[test]
fn requests_that_are_reserved_or_not_supported() {
    for opcode in [O::RC_RESYNC, ferroce_wire::Opcode(0x18), ferroce_wire::Opcode(0x1f)] {
        let (pair, answer) = injected(&[(opcode, 8, None)]);
        assert_eq!(answer, Some(0x61), "{opcode}");
        assert_eq!((pair.b.qp.state(), pair.b.host.dropped(Drop::BadOpcode)), (QpState::Err, 1), "{opcode}");
        let (pair, answer) = injected(&[(O::RC_SEND_FIRST, 1024, None), (opcode, 8, None)]);
        assert_eq!(answer, Some(0x61), "{opcode} inside a message");
        assert_eq!(pair.b.host.received[0].status, WcStatus::RemInvReqErr);
    }
}

#[test]
fn lengths_that_do_not_fit() {
    let refused: &[&[(O, usize, Option<u32>)]] = &[
        &[(O::RC_SEND_FIRST, 1000, None)],
        &[(O::RC_SEND_FIRST, 1028, None)],
        &[(O::RC_SEND_ONLY, 1028, None)],
        &[(O::RC_SEND_FIRST, 1024, None), (O::RC_SEND_MIDDLE, 1020, None)],
        &[(O::RC_SEND_FIRST, 1024, None), (O::RC_SEND_LAST, 0, None)],
        &[(O::RC_WRITE_ONLY, 12, Some(8))],
        &[(O::RC_WRITE_ONLY, 8, Some(12))],
        &[(O::RC_WRITE_ONLY, 1028, Some(1028))],
        &[(O::RC_WRITE_FIRST, 1024, Some(1024))],
        &[(O::RC_WRITE_FIRST, 1024, Some(2000)), (O::RC_WRITE_LAST, 975, None)],
        &[(O::RC_WRITE_FIRST, 1024, Some(2000)), (O::RC_WRITE_LAST, 977, None)],
        &[(O::RC_WRITE_FIRST, 1024, Some(2048)), (O::RC_WRITE_MIDDLE, 1024, None)],
        &[(O::RC_WRITE_ONLY, 0, Some((1 << 31) + 1))],
        &[(O::RC_READ_REQUEST, 0, Some((1 << 31) + 1))],
        &[(O::RC_READ_REQUEST, 4, Some(8))],
    ];
    for packets in refused {
        let (pair, answer) = injected(packets);
        assert_eq!(answer, Some(0x61), "{packets:?}");
        assert_eq!(pair.b.qp.state(), QpState::Err);
    }
    // With an immediate, the receive that it would have used up tells.
    let immediates: &[&[(O, usize, Option<u32>)]] = &[
        &[(O::RC_WRITE_ONLY_IMM, 12, Some(8))],
        &[(O::RC_WRITE_ONLY_IMM, 1028, Some(1028))],
        &[(O::RC_WRITE_FIRST, 1024, Some(2000)), (O::RC_WRITE_LAST_IMM, 975, None)],
    ];
    for packets in immediates {
        let (pair, answer) = injected(packets);
        assert_eq!(answer, Some(0x61), "{packets:?}");
        let receives = ends(&pair.b.host.received);
        assert_eq!(receives[..2], [(100, WcStatus::RemInvReqErr), (101, FLUSHED)], "{packets:?}");
        assert!(pair.b.host.events.is_empty(), "{packets:?}");
    }
    let (pair, _) = injected(&[(O::RC_WRITE_FIRST, 1024, Some(2000)), (O::RC_WRITE_LAST, 976, None)]);
    assert_eq!(pair.b.qp.state(), QpState::Rts);
    assert_eq!(pair.b.bytes(100_000, 2000), [0x55; 2000]);
}

#[test]
fn packets_that_are_not_for_this_queue_pair_change_nothing() {
    let mut pair = Pair::new(QpType::Rc);
    let good = || Headers::new(Bth::new(O::RC_SEND_ONLY, 0, Psn::new(0x1000)));
    let with = |change: fn(&mut Bth)| {
        let mut headers = good();
        change(&mut headers.bth);
        headers
    };
    let cases = [
        (with(|bth| bth.tver = 1), Drop::Version),
        (with(|bth| bth.pkey = 0x8001), Drop::PKey),
        (with(|bth| bth.opcode = O::UC_SEND_ONLY), Drop::WrongTransport),
        (with(|bth| bth.opcode = O::UD_SEND_ONLY), Drop::WrongTransport),
        (with(|bth| (bth.opcode, bth.psn) = (O::RC_RESYNC, Psn::new(0x1001))), Drop::BadOpcode),
        (with(|bth| (bth.opcode, bth.psn) = (ferroce_wire::Opcode(0x1f), Psn::new(0xfff))), Drop::BadOpcode),
        (with(|bth| bth.opcode = O::CNP), Drop::Cnp),
    ];
    for (headers, reason) in cases {
        let before = pair.b.host.dropped(reason);
        pair.inject(Who::A, headers, &[]);
        pair.run_for(0);
        assert_eq!(pair.b.host.dropped(reason), before + 1, "{headers:?}");
    }
    let mut net = net(&pair);
    net.src = pair.b.path.src;
    let packet = crate::Packet { headers: &good(), payload: &[], net: &net };
    pair.b.qp.handle_packet(0, &packet, &mut pair.b.host);
    assert_eq!(pair.b.host.dropped(Drop::WrongSource), 1);
    assert!(pair.seen.is_empty(), "no answer to any of them");

    // Limited member, MigReq either way: good.
    pair.b.post_recvs(100, 3, 0, 10);
    for (psn, change) in [(0x1000, 0x7fff), (0x1001, 0xffff)] {
        let mut headers = good();
        headers.bth.psn = Psn::new(psn);
        headers.bth.pkey = change;
        headers.bth.mig_req = psn == 0x1000;
        pair.inject(Who::A, headers, &[]);
        pair.run_for(0);
    }
    assert_eq!(pair.b.host.received.len(), 2);
}

#[test]
fn a_queue_pair_in_error_answers_nothing() {
    let mut pair = Pair::new(QpType::Rc);
    pair.to_state(Who::B, QpState::Err);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RetryExcErr)]);
    assert!(sent_by(&pair, Who::B).is_empty());
    assert!(pair.b.host.dropped(Drop::QpState) > 0);
}

#[test]
fn answers_before_a_fatal_nak_still_go_out() {
    let mut pair = Pair::new(QpType::Rc);
    pair.post(1, pair.read_op(0), 5000, 2000);
    pair.post(2, SendOp::Write { raddr: 0, rkey: 0xdead }, 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, WcStatus::RemAccessErr)]);
    assert_eq!(pair.a.bytes(5000, 2000), pair.b.bytes(0, 2000));
}

#[test]
fn unsignaled_failures_complete() {
    let mut pair = Pair::new(QpType::Rc);
    let data = SendData::Sges([pair.a.region.sge(0, 8)].into_iter().collect());
    let op = SendOp::Write { raddr: 0, rkey: 0xdead };
    pair.post_wr(Who::A, SendWr { wr_id: 1, op, flags: SendFlags::empty(), data, ud: None, xrc_srqn: None });
    pair.post_flags(2, pair.write_op(0), 0, 8, SendFlags::empty());
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RemAccessErr), (2, FLUSHED)]);
}

#[test]
fn naks_for_what_is_not_in_flight_are_ghosts() {
    for syndrome in [0x1f, 0x20, 0x60, 0x61, 0x62, 0x63] {
        for psn in [0x0fff, 0x1000, 0x1001, 0x80_1000] {
            let mut pair = Pair::new(QpType::Rc);
            let mut headers = Headers::new(Bth::new(O::RC_ACKNOWLEDGE, 0, Psn::new(psn)));
            headers.aeth = Some(ferroce_wire::Aeth { syndrome: ferroce_wire::Syndrome(syndrome), msn: 0 });
            pair.inject(Who::B, headers, &[]);
            pair.run();
            assert_eq!(pair.a.host.dropped(Drop::GhostResponse), 1);
            pair.post(1, pair.write_op(0), 0, 8);
            pair.run();
            assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
        }
    }
}

#[test]
fn responses_that_do_not_fit_the_request() {
    let respond = |opcode, len: usize| {
        let mut pair = Pair::new(QpType::Rc);
        pair.rule(|_, _| Fate::Drop);
        pair.post(1, pair.read_op(0), 5000, 1500);
        pair.run_for(0);
        let mut headers = Headers::new(Bth::new(opcode, 0, Psn::new(0x1000)));
        headers.atomic_ack = (opcode == O::RC_ATOMIC_ACKNOWLEDGE).then_some(0);
        headers.aeth = Some(ferroce_wire::Aeth { syndrome: ferroce_wire::Syndrome::ACK, msn: 0 });
        pair.inject(Who::B, headers, &vec![1; len]);
        pair.run_for(0);
        ends(&pair.a.host.sent)
    };
    let bad = [(1, WcStatus::BadRespErr)];
    assert_eq!(respond(O::RC_READ_RESPONSE_FIRST, 1023), bad);
    assert_eq!(respond(O::RC_READ_RESPONSE_FIRST, 1025), bad);
    assert_eq!(respond(O::RC_READ_RESPONSE_ONLY, 1024), bad, "the end comes too early");
    assert_eq!(respond(O::RC_READ_RESPONSE_LAST, 476), bad);
    assert_eq!(respond(O::RC_ATOMIC_ACKNOWLEDGE, 0), bad);
    assert_eq!(respond(O::RC_READ_RESPONSE_FIRST, 1024), []);
    assert_eq!(respond(O::RC_READ_RESPONSE_MIDDLE, 1024), [], "as the rest of an older answer");
}
