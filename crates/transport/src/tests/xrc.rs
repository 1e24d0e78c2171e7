//! XRC: an initiator and a target, whose requests name the shared receive queue that they are for.

use ferroce_wire::{Bth, Class, Headers, Opcode, Psn};

use super::{ends, sent_by, wr};
use crate::host::{Drop, Packet};
use crate::testing::{Fate, Pair, Region, SRQN, SimSrq, Who};
use crate::verbs::{Access, QpEvent, QpState, QpType, RecvWr, SendOp, SendWr, WcOpcode, WcStatus};

const OK: WcStatus = WcStatus::Success;
/// A second shared receive queue at B, and its protection domain.
const OTHER: u32 = 0x55_0002;
const OTHER_PD: u32 = 8;

fn pair() -> Pair {
    Pair::new(QpType::XrcSend)
}

/// Gives B a second queue in another protection domain, with `receives` receives, and a region of that domain.
fn with_other_queue(pair: &mut Pair, receives: u32) -> Region {
    let host = &mut pair.b.host;
    let region =
        host.memory.register(OTHER_PD, 1 << 16, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ);
    let receives = (0..receives)
        .map(|i| RecvWr { wr_id: u64::from(100 + i), sges: [region.sge(i * 4096, 4096)].into_iter().collect() });
    host.srqs.insert(OTHER, SimSrq { pd: OTHER_PD, receives: receives.collect(), received: Vec::new() });
    region
}

fn to_queue(srqn: u32, wr: SendWr) -> SendWr {
    SendWr { xrc_srqn: Some(srqn), ..wr }
}

/// Hands B a packet that A did not send.
fn deliver_to_b(pair: &mut Pair, headers: &Headers, payload: &[u8]) {
    let net = ferroce_wire::NetHeader {
        ifindex: 0,
        src: pair.a.path.src,
        dst: pair.a.path.dst,
        src_port: 0xc000,
        tclass: 0,
        hop_limit: 64,
        udp_len: (headers.len() + payload.len() + 4) as u16,
    };
    let now = pair.now;
    pair.b.qp.handle_packet(now, &Packet { headers, payload, net: &net }, &mut pair.b.host);
}

fn forged(opcode: Opcode, psn: u32, srqn: u32) -> Headers {
    Headers { xrc_srqn: Some(srqn), ..Headers::new(Bth::new(opcode, 0x22, Psn::new(psn))) }
}

#[test]
fn every_operation_and_every_request_names_the_queue() {
    let mut pair = pair();
    pair.b.post_recvs(0, 3, 500_000, 8192);
    pair.b.host.memory.write(pair.b.region, 64, &7u64.to_ne_bytes());
    pair.post(1, SendOp::Send, 0, 5000);
    pair.post(2, SendOp::SendImm { imm: 9 }, 0, 10);
    pair.post(3, pair.write_op(100_000), 0, 3000);
    let SendOp::Write { raddr, rkey } = pair.write_op(120_000) else { unreachable!() };
    pair.post(4, SendOp::WriteImm { raddr, rkey, imm: 11 }, 0, 100);
    pair.post(5, pair.read_op(0), 200_000, 3000);
    pair.post(6, pair.add_op(64, 2), 300_000, 8);
    pair.post(7, SendOp::CompareSwap { raddr: pair.b.region.addr + 64, rkey, compare: 9, swap: 1 }, 300_008, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), (1..8).map(|id| (id, OK)).collect::<Vec<_>>());
    let received: Vec<_> =
        pair.b.received().iter().map(|got| (got.wr_id, got.opcode, got.byte_len, got.imm, got.qp_num)).collect();
    let recv = WcOpcode::Recv;
    assert_eq!(
        received,
        [(0, recv, 5000, 0, 0x22), (1, recv, 10, 9, 0x22), (2, WcOpcode::RecvRdmaWithImm, 100, 11, 0x22)]
    );
    assert_eq!(pair.b.bytes(500_000, 5000), pair.a.bytes(0, 5000));
    assert_eq!(pair.a.bytes(200_000, 3000), pair.b.bytes(0, 3000));
    assert_eq!(pair.a.bytes(300_000, 16), [7u64.to_ne_bytes(), 9u64.to_ne_bytes()].concat());
    for seen in sent_by(&pair, Who::A) {
        assert_eq!((seen.headers.bth.opcode.class(), seen.headers.xrc_srqn), (Class::Xrc, Some(SRQN)), "{seen:?}");
    }
    for seen in sent_by(&pair, Who::B) {
        assert_eq!((seen.headers.bth.opcode.class(), seen.headers.xrc_srqn), (Class::Xrc, None), "{seen:?}");
        assert!(seen.headers.bth.opcode.is_response());
    }
}

#[test]
fn each_message_goes_to_its_queue_in_that_queues_protection_domain() {
    let mut pair = pair();
    let region = with_other_queue(&mut pair, 1);
    pair.b.post_recvs(0, 1, 0, 4096);
    pair.post_wr(Who::A, to_queue(OTHER, wr(1, SendOp::Send, &[pair.a.region.sge(10, 3000)])));
    pair.post_wr(Who::A, to_queue(SRQN, wr(2, SendOp::Send, &[pair.a.region.sge(20, 3000)])));
    let write = SendOp::Write { raddr: region.addr + 5000, rkey: region.key };
    pair.post_wr(Who::A, to_queue(OTHER, wr(3, write, &[pair.a.region.sge(30, 3000)])));
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK)]);
    assert_eq!(ends(&pair.b.host.srqs[&OTHER].received), [(100, OK)]);
    assert_eq!(ends(pair.b.received()), [(0, OK)]);
    let other = pair.b.host.memory.read(region, 0, 3000).to_vec();
    assert_eq!((&other[..], pair.b.bytes(0, 3000)), (pair.a.bytes(10, 3000), pair.a.bytes(20, 3000)));
    assert_eq!(pair.b.host.memory.read(region, 5000, 3000), pair.a.bytes(30, 3000));
}

#[test]
fn a_key_of_another_domain_than_the_queues_is_refused() {
    let mut pair = pair();
    let region = with_other_queue(&mut pair, 0);
    pair.post(1, SendOp::Write { raddr: region.addr, rkey: region.key }, 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RemAccessErr)]);
    assert_eq!(pair.b.host.events, [QpEvent::AccessErr, QpEvent::LastWqeReached]);
}

#[test]
fn a_queue_that_the_domain_does_not_have_is_an_invalid_request() {
    let mut pair = pair();
    pair.post_wr(Who::A, to_queue(0x99, wr(1, SendOp::Send, &[pair.a.region.sge(0, 8)])));
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RemInvReqErr)]);
    assert_eq!(pair.b.host.events, [QpEvent::ReqErr, QpEvent::LastWqeReached]);
    assert_eq!((pair.a.qp.state(), pair.b.qp.state()), (QpState::Err, QpState::Err));
}

#[test]
fn a_queue_that_goes_in_the_middle_of_a_message_ends_the_connection() {
    let mut pair = pair();
    pair.b.post_recvs(0, 1, 0, 8192);
    pair.drop_nth(Who::A, &[2]);
    pair.post(1, SendOp::Send, 0, 8000);
    pair.run_until(|pair| sent_by(pair, Who::B).len() == 1);
    pair.b.host.srqs.remove(&SRQN);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RemInvReqErr)]);
    assert!(pair.b.host.received.is_empty(), "the receive went with its queue");
}

#[test]
fn another_queue_in_the_middle_of_a_message_is_an_invalid_request() {
    let mut pair = pair();
    with_other_queue(&mut pair, 1);
    pair.b.post_recvs(0, 1, 0, 8192);
    deliver_to_b(&mut pair, &forged(Opcode::XRC_SEND_FIRST, 0x1000, SRQN), &[1; 1024]);
    deliver_to_b(&mut pair, &forged(Opcode::XRC_SEND_MIDDLE, 0x1001, OTHER), &[1; 1024]);
    assert_eq!(ends(pair.b.received()), [(0, WcStatus::RemInvReqErr)]);
    assert!(pair.b.host.srqs[&OTHER].received.is_empty());
    assert_eq!((pair.b.host.srqs[&OTHER].receives.len(), pair.b.qp.state()), (1, QpState::Err));
}

#[test]
fn an_initiator_takes_no_requests_and_a_target_no_answers() {
    let mut pair = pair();
    let mut answer = forged(Opcode::XRC_ACKNOWLEDGE, 0xa0_0000, 0);
    answer.xrc_srqn = None;
    deliver_to_b(&mut pair, &answer, &[]);
    deliver_to_b(&mut pair, &Headers::new(Bth::new(Opcode::RC_SEND_ONLY, 0x22, Psn::new(0x1000))), &[]);
    assert_eq!(pair.b.host.dropped(Drop::WrongTransport), 2);
    let headers = forged(Opcode::XRC_SEND_ONLY, 0xa0_0000, SRQN);
    let net = ferroce_wire::NetHeader {
        ifindex: 0,
        src: pair.b.path.src,
        dst: pair.b.path.dst,
        src_port: 0xc000,
        tclass: 0,
        hop_limit: 64,
        udp_len: 0,
    };
    pair.a.qp.handle_packet(0, &Packet { headers: &headers, payload: &[], net: &net }, &mut pair.a.host);
    assert_eq!(pair.a.host.dropped(Drop::WrongTransport), 1);
}

#[test]
fn an_empty_queue_is_waited_for() {
    let mut pair = pair();
    pair.post(1, SendOp::Send, 0, 8);
    pair.run_for(2_000_000);
    assert!(pair.a.host.sent.is_empty());
    pair.b.post_recvs(0, 1, 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
}

#[test]
fn a_repeated_read_is_answered_from_the_domain_that_it_was_for() {
    let mut pair = pair();
    let region = with_other_queue(&mut pair, 0);
    pair.b.host.memory.write(region, 0, &[0x77; 3000]);
    // The answer's middle is lost, and a WRITE for the other queue was executed meanwhile.
    let mut lost = false;
    pair.rule(move |_, packet| {
        let loses = !lost && packet.headers.bth.opcode == Opcode::XRC_READ_RESPONSE_MIDDLE;
        lost |= loses;
        if loses { Fate::Drop } else { Fate::Deliver }
    });
    let read = SendOp::Read { raddr: region.addr, rkey: region.key };
    pair.post_wr(Who::A, to_queue(OTHER, wr(1, read, &[pair.a.region.sge(0, 3000)])));
    pair.post(2, pair.write_op(0), 4000, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
    assert_eq!(pair.a.bytes(0, 3000), [0x77; 3000]);
}

#[test]
fn a_receive_in_use_is_flushed_into_its_queue() {
    let mut pair = pair();
    with_other_queue(&mut pair, 1);
    pair.b.post_recvs(0, 1, 0, 8192);
    deliver_to_b(&mut pair, &forged(Opcode::XRC_SEND_FIRST, 0x1000, OTHER), &[1; 1024]);
    pair.to_state(Who::B, QpState::Err);
    assert_eq!(ends(&pair.b.host.srqs[&OTHER].received), [(100, WcStatus::WrFlushErr)]);
    assert_eq!(pair.b.host.srqs[&SRQN].receives.len(), 1, "what no message used stays");
    assert_eq!(pair.b.host.events, [QpEvent::LastWqeReached]);
}
