//! Tag matching at a shared receive queue: B's.

use ferroce_wire::{Opcode as O, RVH_LEN, Rvh, TMH_LEN, TmOp, Tmh};

use super::{ends, sent_by, wr};
use crate::MAX_RNDV_HDR;
use crate::host::Drop;
use crate::testing::{Pair, Setup, Who};
use crate::verbs::{
    Completion, QpAttr, QpAttrMask, QpState, QpType, RecvWr, SendData, SendFlags, SendOp, SendWr, WcFlags, WcOpcode,
    WcStatus,
};

const OK: WcStatus = WcStatus::Success;
const MATCH: WcFlags = WcFlags::TM_MATCH;
const VALID: WcFlags = WcFlags::TM_DATA_VALID;
const TAG: u64 = 0x1234_5678_9abc_def0;
const APP_CTX: u32 = 0x0a0b_0c0d;
/// Where B's tagged buffer begins.
const BUFFER: u32 = 200_000;

/// B has one tagged buffer (id 7) of `room` bytes, and ordinary receives (ids 100 and so on); A can receive.
fn pair(room: u32) -> Pair {
    let mut pair = Pair::with(&Setup { srq_b: true, ..Setup::new(QpType::Rc) });
    pair.b.host.tagged =
        Some(vec![(TAG, RecvWr { wr_id: 7, sges: [pair.b.region.sge(BUFFER, room)].into_iter().collect() })]);
    for at in 0..4 {
        let sges = [pair.b.region.sge(at * 10_000, 10_000)].into_iter().collect();
        pair.b.host.receives.push_back(RecvWr { wr_id: 100 + u64::from(at), sges });
        let sges = [pair.a.region.sge(500_000 + at * 100, 100)].into_iter().collect();
        pair.a.host.receives.push_back(RecvWr { wr_id: 200 + u64::from(at), sges });
    }
    pair
}

/// Sends a message of A's region: the header is put at its beginning.
fn send(pair: &mut Pair, op: TmOp, tag: u64, rvh: Option<Rvh>, len: u32) {
    let header = Tmh { op, app_ctx: APP_CTX, tag }.bytes();
    let region = pair.a.region;
    pair.a.host.memory.write(region, 0, &header);
    if let Some(rvh) = rvh {
        pair.a.host.memory.write(region, TMH_LEN as u32, &rvh.bytes());
    }
    pair.post(1, SendOp::Send, 0, len);
    pair.run();
}

/// What B was told: id, opcode, flags, bytes.
fn told(pair: &Pair) -> Vec<(u64, WcOpcode, WcFlags, u32)> {
    pair.b.host.received.iter().map(|got| (got.wr_id, got.opcode, got.flags, got.byte_len)).collect()
}

fn tag_of(completion: &Completion) -> (u64, u32) {
    (completion.tm_tag, completion.tm_app_ctx)
}

#[test]
fn an_eager_message_of_one_packet_goes_to_its_tag_without_the_header() {
    let mut pair = pair(1000);
    send(&mut pair, TmOp::EAGER, TAG, None, 116);
    assert_eq!(told(&pair), [(7, WcOpcode::TmRecv, MATCH | VALID, 100)]);
    assert_eq!(tag_of(&pair.b.host.received[0]), (TAG, APP_CTX));
    assert_eq!(pair.b.bytes(BUFFER, 100), pair.a.bytes(16, 100));
    assert_eq!(pair.b.host.unexpected, 0);
}

#[test]
fn a_longer_one_tells_of_the_match_first() {
    let mut pair = pair(5000);
    send(&mut pair, TmOp::EAGER, TAG, None, 3016);
    assert_eq!(told(&pair), [(7, WcOpcode::TmRecv, MATCH, 0), (7, WcOpcode::TmRecv, VALID, 3000)]);
    assert_eq!(pair.b.host.received.iter().map(tag_of).collect::<Vec<_>>(), [(TAG, APP_CTX), (0, 0)]);
    assert_eq!(pair.b.bytes(BUFFER, 3000), pair.a.bytes(16, 3000));
}

#[test]
fn what_matches_no_tag_is_unexpected_and_comes_with_its_header() {
    let mut pair = pair(1000);
    send(&mut pair, TmOp::EAGER, TAG + 1, None, 3016);
    assert_eq!(told(&pair), [(100, WcOpcode::TmRecv, WcFlags::empty(), 3016)]);
    assert_eq!(tag_of(&pair.b.host.received[0]), (0, 0));
    assert_eq!(pair.b.bytes(0, 3016), pair.a.bytes(0, 3016));
    assert_eq!((pair.b.host.unexpected, pair.b.host.tagged.as_ref().map(Vec::len)), (1, Some(1)));
}

#[test]
fn messages_without_a_tag_and_unknown_ones_are_not_matched_nor_counted() {
    let mut pair = pair(1000);
    send(&mut pair, TmOp::NO_TAG, TAG, None, 50);
    send(&mut pair, TmOp::FIN, TAG, None, 50);
    send(&mut pair, TmOp(0x77), TAG, None, 50);
    send(&mut pair, TmOp::EAGER, TAG, None, TMH_LEN as u32 - 1);
    let expected = [(100, 50), (101, 50), (102, 50), (103, 15)];
    assert_eq!(told(&pair), expected.map(|(id, len)| (id, WcOpcode::TmNoTag, WcFlags::empty(), len)));
    assert_eq!((pair.b.host.unexpected, pair.b.host.tagged.as_ref().map(Vec::len)), (0, Some(1)));
}

#[test]
fn a_message_too_long_for_its_tag_ends_the_connection() {
    let mut pair = pair(99);
    send(&mut pair, TmOp::EAGER, TAG, None, 116);
    assert_eq!(ends(&pair.b.host.received), [(7, WcStatus::LocLenErr)]);
    assert_eq!(pair.b.host.received[0].opcode, WcOpcode::TmRecv);
    assert_eq!(ends(&pair.a.host.sent), [(1, WcStatus::RemInvReqErr)]);
}

#[test]
fn an_unexpected_message_that_breaks_off_does_not_count() {
    let mut pair = pair(1000);
    pair.drop_nth(Who::A, &[1, 2]);
    let header = Tmh { op: TmOp::EAGER, app_ctx: 0, tag: TAG + 1 }.bytes();
    let region = pair.a.region;
    pair.a.host.memory.write(region, 0, &header);
    pair.post(1, SendOp::Send, 0, 3016);
    pair.run_until(|pair| pair.b.host.unexpected == 1);
    pair.to_state(Who::B, QpState::Err);
    assert_eq!(ends(&pair.b.host.received), [(100, WcStatus::WrFlushErr)]);
    assert_eq!(pair.b.host.unexpected, 0);
}

fn rvh(pair: &Pair, offset: u64, len: u32) -> Rvh {
    Rvh { va: pair.a.region.addr + offset, rkey: pair.a.region.key, len }
}

#[test]
fn a_rendezvous_request_has_its_data_read_and_its_sender_told() {
    let mut pair = pair(5000);
    let rvh = rvh(&pair, 60_000, 3000);
    send(&mut pair, TmOp::RNDV, TAG, Some(rvh), 32);
    assert_eq!(told(&pair), [(7, WcOpcode::TmRecv, MATCH, 0), (7, WcOpcode::TmRecv, VALID, 3000)]);
    assert_eq!(pair.b.bytes(BUFFER, 3000), pair.a.bytes(60_000, 3000));
    assert_eq!(ends(&pair.b.host.sent), [], "these requests are not the program's");
    assert_eq!(pair.b.host.released, 0);
    assert_eq!(ends(&pair.a.host.received), [(200, OK)]);
    let fin: Vec<u8> =
        Tmh { op: TmOp::FIN, app_ctx: APP_CTX, tag: TAG }.bytes().into_iter().chain(rvh.bytes()).collect();
    assert_eq!(pair.a.bytes(500_000, (TMH_LEN + RVH_LEN) as u32), fin);
}

#[test]
fn the_sender_is_told_after_the_data_arrived_whatever_gets_lost() {
    for place in 0..6 {
        let mut pair = pair(5000);
        pair.drop_nth(Who::A, &[place]);
        let rvh = rvh(&pair, 60_000, 3000);
        send(&mut pair, TmOp::RNDV, TAG, Some(rvh), 32);
        assert_eq!(told(&pair), [(7, WcOpcode::TmRecv, MATCH, 0), (7, WcOpcode::TmRecv, VALID, 3000)], "{place}");
        assert_eq!(ends(&pair.a.host.received), [(200, OK)], "{place}");
    }
}

#[test]
fn a_rendezvous_without_data_is_one_all_the_same() {
    let mut pair = pair(0);
    let rvh = rvh(&pair, 0, 0);
    send(&mut pair, TmOp::RNDV, TAG, Some(rvh), 32);
    assert_eq!(told(&pair), [(7, WcOpcode::TmRecv, MATCH, 0), (7, WcOpcode::TmRecv, VALID, 0)]);
    assert_eq!(ends(&pair.a.host.received), [(200, OK)]);
}

#[test]
fn a_buffer_too_small_for_the_data_gets_the_request() {
    let mut pair = pair(2999);
    let rvh = rvh(&pair, 60_000, 3000);
    send(&mut pair, TmOp::RNDV, TAG, Some(rvh), 40);
    assert_eq!(ends(&pair.b.host.received), [(7, WcStatus::TmRndvIncomplete)]);
    assert_eq!(told(&pair), [(7, WcOpcode::TmRecv, MATCH, 32)]);
    assert_eq!(tag_of(&pair.b.host.received[0]), (TAG, APP_CTX));
    assert_eq!(pair.b.bytes(BUFFER, 32), pair.a.bytes(0, 32));
    assert_eq!(ends(&pair.a.host.received), []);
    assert_eq!(pair.b.qp.state(), QpState::Rts);
}

#[test]
fn rendezvous_requests_that_cannot_be_served_are_unexpected() {
    let long = MAX_RNDV_HDR as u32 + 1;
    for (tag, len) in [(TAG + 1, 32), (TAG, 31), (TAG, long), (TAG, 2000)] {
        let mut pair = pair(5000);
        let rvh = rvh(&pair, 60_000, 3000);
        send(&mut pair, TmOp::RNDV, tag, Some(rvh), len);
        assert_eq!(told(&pair), [(100, WcOpcode::TmRecv, WcFlags::empty(), len)], "{tag:x} {len}");
        assert_eq!(pair.b.host.unexpected, 1);
        assert_eq!(
            sent_by(&pair, Who::B).iter().filter(|seen| seen.headers.bth.opcode == O::RC_READ_REQUEST).count(),
            0
        );
    }
}

/// B is in RTR: it cannot read.
#[test]
fn who_cannot_send_matches_no_rendezvous() {
    let setup = Setup { srq_b: true, ..Setup::new(QpType::Rc) };
    let mut pair = Pair::unconnected(&setup);
    for who in [Who::A, Who::B] {
        pair.init(who, &setup);
        pair.ready_to_receive(who, &setup);
    }
    pair.ready_to_send(Who::A, &setup);
    let buffer = |wr_id| RecvWr { wr_id, sges: [pair.b.region.sge(0, 10_000)].into_iter().collect() };
    pair.b.host.tagged = Some(vec![(TAG, buffer(7))]);
    let ordinary = RecvWr { wr_id: 100, sges: [pair.b.region.sge(0, 10_000)].into_iter().collect() };
    pair.b.host.receives.push_back(ordinary);
    let rvh = rvh(&pair, 0, 10);
    send(&mut pair, TmOp::RNDV, TAG, Some(rvh), 32);
    assert_eq!(told(&pair), [(100, WcOpcode::TmRecv, WcFlags::empty(), 32)]);
}

#[test]
fn a_rendezvous_that_names_memory_it_may_not_ends_the_connection() {
    let mut pair = pair(5000);
    let rvh = Rvh { rkey: 0xdead_beef, ..rvh(&pair, 60_000, 3000) };
    send(&mut pair, TmOp::RNDV, TAG, Some(rvh), 32);
    assert_eq!(ends(&pair.b.host.received), [(7, OK), (7, WcStatus::RemAccessErr)]);
    assert_eq!(told(&pair)[1], (7, WcOpcode::TmRecv, WcFlags::empty(), 0));
    assert_eq!((ends(&pair.b.host.sent), pair.b.host.released), (vec![], 0));
    assert_eq!(pair.b.qp.state(), QpState::Err);
}

/// RESET forgets the card's own requests, too, and gives back the slots of the program's only.
#[test]
fn slots_of_the_programs_requests_come_back_and_no_others() {
    let mut pair = pair(5000);
    let rvh = rvh(&pair, 60_000, 3000);
    pair.rule(|who, packet| {
        if who == Who::B && packet.headers.bth.opcode == O::RC_READ_REQUEST {
            crate::testing::Fate::Drop
        } else {
            crate::testing::Fate::Deliver
        }
    });
    let header = Tmh { op: TmOp::RNDV, app_ctx: 0, tag: TAG }.bytes();
    let message: Vec<u8> = header.into_iter().chain(rvh.bytes()).collect();
    let inline = SendData::Inline(message.into_boxed_slice());
    let request =
        SendWr { wr_id: 1, op: SendOp::Send, flags: SendFlags::SIGNALED, data: inline, ud: None, xrc_srqn: None };
    pair.post_wr(Who::A, request);
    pair.run_until(|pair| !pair.b.host.received.is_empty());
    let element = pair.b.region.sge(0, 8);
    pair.post_wr(Who::B, wr(9, SendOp::Send, &[element]));
    pair.modify(Who::B, &QpAttr { state: QpState::Reset, ..QpAttr::default() }, QpAttrMask::STATE);
    assert_eq!(pair.b.host.released, 1);
    assert_eq!(pair.b.host.dropped(Drop::QpState), 0);
}
