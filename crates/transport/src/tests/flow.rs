//! Flow control of UC and UD: nothing is lost in a small receive buffer of another Ferroce end, strangers notice nothing, and nothing
//! blocks for good.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ferroce_wire::{Bth, Deth, Flow, FlowKind, Headers, NetHeader, Opcode as O, Psn};
use smallvec::SmallVec;

use super::{sent_by, wr, write_to};
use crate::cc::{Aimd, FixedWindow};
use crate::host::{Count, Drop, Packet};
use crate::testing::{Fate, Pair, Seen, Setup, SimPacket, Who};
use crate::timer::{MS, Nanos};
use crate::verbs::{Access, PathAddr, QpState, QpType, RecvWr, SendOp, SendWr, UdDest, WcStatus};

/// What Linux gives a socket by default, as it counts.
const BUFFER: u32 = 425_984;
const LEN: u32 = 2048;
/// A window of our own size: four questions.
const WINDOW: u32 = Aimd::INITIAL;

fn pair(qp_type: QpType) -> Pair {
    Pair::with(&Setup { mtu: 4096, region: 4 << 20, ..Setup::new(qp_type) })
}

/// `count` messages from A to B: 64 KiB each on UC, 2 KiB on UD, where B gets receives for them.
fn post(pair: &mut Pair, count: u64) {
    let ud = pair.a.qp.init().qp_type == QpType::Ud;
    for id in 0..count {
        if ud {
            let sges: SmallVec<[_; 2]> = [pair.b.region.sge(0, LEN + 40)].into_iter().collect();
            pair.b.host.receives.push_back(RecvWr { wr_id: id, sges });
            pair.post(id, SendOp::Send, 0, LEN);
        } else {
            pair.post(id, pair.write_op(0), 0, 65_536);
        }
    }
}

fn all_sent(pair: &Pair, count: usize) {
    assert_eq!(pair.a.host.sent.len(), count);
    assert!(pair.a.host.sent.iter().all(|done| done.status == WcStatus::Success));
}

fn is_flow(packet: &SimPacket) -> bool {
    packet.headers.bth.opcode == O::FERROCE_FLOW
}

/// B never answers.
fn mute(pair: &mut Pair) {
    pair.rule(|who, packet| if who == Who::B && is_flow(packet) { Fate::Drop } else { Fate::Deliver });
}

/// Data packets of A that ask.
fn asks(pair: &Pair) -> Vec<Seen> {
    sent_by(pair, Who::A).into_iter().filter(|seen| seen.headers.bth.ack_req).collect()
}

/// Our own packets.
fn flows(pair: &Pair, who: Who) -> Vec<Seen> {
    sent_by(pair, who).into_iter().filter(|seen| seen.headers.bth.opcode == O::FERROCE_FLOW).collect()
}

fn data_bytes(pair: &Pair) -> usize {
    sent_by(pair, Who::A).iter().filter(|seen| seen.headers.bth.opcode != O::FERROCE_FLOW).map(|seen| seen.len).sum()
}

fn in_flight(pair: &Pair) -> u32 {
    pair.a.host.windows[0].in_flight()
}

/// Puts a flow packet on the wire as if `from` had sent it.
fn inject(pair: &mut Pair, from: Who, psn: Psn, flow: Flow) {
    pair.inject(from, Headers::new(Bth::new(O::FERROCE_FLOW, 0, psn)), &flow.bytes());
}

const fn answer(src_qp: u32) -> Flow {
    Flow { kind: FlowKind::Answer { missing: false }, qkey: 0, src_qp }
}

#[test]
fn a_small_buffer_of_a_slow_receiver_loses_nothing() {
    for (qp_type, count, bytes) in [(QpType::Uc, 300, 65_536), (QpType::Ud, 5000, 2048)] {
        let mut flowing = pair(qp_type);
        flowing.buffer(Who::B, BUFFER, 20_000);
        post(&mut flowing, count);
        for pause in [30, 3, 200] {
            flowing.pause(Who::B, pause * MS);
            let goal = data_bytes(&flowing) + 1_000_000;
            flowing.run_until(|pair| data_bytes(pair) >= goal);
        }
        flowing.run();
        all_sent(&flowing, count as usize);
        assert_eq!(data_bytes(&flowing), count as usize * bytes);
        assert_eq!(flowing.overflown, 0, "{qp_type:?}");
        if qp_type == QpType::Ud {
            assert_eq!(flowing.b.host.received.len(), count as usize);
        }
        // Who does not answer is sent to at once, and loses.
        let mut lossy = pair(qp_type);
        lossy.buffer(Who::B, BUFFER, 20_000);
        mute(&mut lossy);
        post(&mut lossy, count);
        lossy.run();
        all_sent(&lossy, count as usize);
        assert!(lossy.overflown > 100, "{qp_type:?}: the buffer was never too small");
    }
}

#[test]
fn a_receiver_that_sleeps_from_the_start_loses_nothing_while_the_first_answer_is_waited_for() {
    let mut pair = pair(QpType::Ud);
    pair.buffer(Who::B, BUFFER, 1000);
    pair.pause(Who::B, 49 * MS);
    post(&mut pair, 1000);
    pair.run();
    assert_eq!((pair.overflown, pair.b.host.received.len()), (0, 1000));
    assert!(flows(&pair, Who::A).is_empty(), "who never answered gets no packet of ours");
}

#[test]
fn little_is_neither_asked_for_nor_charged_nor_timed() {
    // UD: 13 * (2048 + 92 + 1024) is more than 32 KiB, ten are not.
    for (qp_type, op) in [(QpType::Ud, None), (QpType::Uc, Some(()))] {
        let mut pair = pair(qp_type);
        match op {
            None => post(&mut pair, 10),
            Some(()) => pair.post(0, pair.write_op(0), 0, 30_000),
        }
        pair.drain();
        assert_eq!(in_flight(&pair), 0);
        assert_eq!(pair.a.qp.next_timeout(), None);
        pair.run();
        assert!(asks(&pair).is_empty() && flows(&pair, Who::B).is_empty() && !pair.seen.is_empty());
    }
}

#[test]
fn questions_are_rare_and_each_is_answered_with_its_psn() {
    let mut pair = pair(QpType::Ud);
    // One at a time, as a ping-pong does.
    for _ in 0..110 {
        post(&mut pair, 1);
        pair.run();
    }
    let asked: Vec<_> = asks(&pair).iter().map(|seen| seen.headers.bth.psn).collect();
    assert_eq!(
        asked.iter().map(|psn| psn.diff(Psn::new(0x1000))).collect::<Vec<_>>(),
        (1..=10).map(|i| i * 11 - 1).collect::<Vec<_>>()
    );
    let answered: Vec<_> = flows(&pair, Who::B).iter().map(|seen| seen.headers.bth.psn).collect();
    assert_eq!(answered, asked);
    assert_eq!(pair.a.host.counted(Count::FlowAnswerReceived), 10);
    assert_eq!(pair.b.host.counted(Count::FlowAnswerSent), 10);
    assert!(flows(&pair, Who::A).is_empty());
    assert_eq!(pair.now, 110 * 5_000 + 10 * 5_000, "nothing waited");
}

#[test]
fn what_is_in_flight_stays_within_the_window() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        for window in [20_000, 70_000, 200_000] {
            let mut pair = pair(qp_type);
            pair.a.host.windows[0] = Box::new(FixedWindow::new(window));
            post(&mut pair, 100);
            let mut most = 0;
            pair.run_until(|pair| {
                most = most.max(in_flight(pair));
                pair.a.host.sent.len() == 100
            });
            pair.run();
            all_sent(&pair, 100);
            assert!(most > 0 && most <= window.max(crate::cc::TRAIN_CHARGE_MAX), "{most} of {window}");
        }
    }
}

#[test]
fn a_stranger_costs_one_pause_and_gets_no_packet_of_ours() {
    for (qp_type, count) in [(QpType::Uc, 200), (QpType::Ud, 6000)] {
        let mut pair = pair(qp_type);
        mute(&mut pair);
        post(&mut pair, count);
        pair.run_until(|pair| pair.a.host.sent.len() == count as usize);
        all_sent(&pair, count as usize);
        assert_eq!(pair.now, 50 * MS, "the rest went at once");
        assert!(flows(&pair, Who::A).is_empty());
        assert_eq!((in_flight(&pair), pair.a.qp.next_timeout()), (0, None));

        // From then on a packet asks every 100 ms; nothing waits for it.
        let before = asks(&pair).len();
        for _ in 0..10 {
            post(&mut pair, count);
            pair.drain();
            pair.run_for(50 * MS);
        }
        all_sent(&pair, 11 * count as usize);
        assert_eq!(asks(&pair).len() - before, 4, "in half a second");
        assert!(flows(&pair, Who::A).is_empty());
    }
}

#[test]
fn a_late_first_answer_is_still_believed() {
    let mut pair = pair(QpType::Uc);
    pair.buffer(Who::B, u32::MAX, 100);
    pair.pause(Who::B, 70 * MS);
    post(&mut pair, 100);
    pair.run();
    assert!(pair.now > 70 * MS && pair.a.host.counted(Count::FlowAnswerReceived) == 1);
    // Now it has a window.
    post(&mut pair, 100);
    pair.drain();
    assert!(in_flight(&pair) > 60_000 && pair.a.host.sent.len() < 110);
    pair.run();
    all_sent(&pair, 200);
}

#[test]
fn a_lost_answer_is_covered_by_the_next_one() {
    let mut pair = pair(QpType::Ud);
    pair.buffer(Who::B, BUFFER, 1000);
    pair.drop_nth(Who::B, &[0, 2]);
    post(&mut pair, 200);
    pair.run();
    all_sent(&pair, 200);
    assert!(pair.now < MS && flows(&pair, Who::B).len() > 10, "{}", pair.now);
}

#[test]
fn lost_questions_and_answers_are_asked_for_again() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut pair = pair(qp_type);
        post(&mut pair, 100);
        pair.run();
        let start = pair.now;
        // All that asks or answers is lost for 12 ms.
        pair.rule(|_, packet| if is_flow(packet) || packet.headers.bth.ack_req { Fate::Drop } else { Fate::Deliver });
        post(&mut pair, 100);
        pair.run_for(12 * MS);
        assert!(in_flight(&pair) > 0 && pair.a.host.sent.len() < 200);
        assert_eq!(flows(&pair, Who::A).len(), 1, "5 ms after the start");
        pair.rule(|_, _| Fate::Deliver);
        pair.run();
        all_sent(&pair, 200);
        assert_eq!((pair.now - start) / MS, 15, "the second question was answered");
        assert_eq!(pair.a.host.counted(Count::FlowQuestionSent), 2);
    }
}

#[test]
fn the_death_of_a_peer_blocks_for_a_while_and_then_never() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut pair = pair(qp_type);
        post(&mut pair, 100);
        pair.run();
        let start = pair.now;
        pair.rule(|_, _| Fate::Drop);
        post(&mut pair, 3000);
        pair.run_until(|pair| pair.a.host.sent.len() == 3100);
        all_sent(&pair, 3100);
        assert_eq!((pair.now - start) / MS, 635);
        let times: Vec<Nanos> = flows(&pair, Who::A).iter().map(|seen| (seen.at - start) / MS).collect();
        assert_eq!(times, [5, 15, 35, 75, 155, 315]);
        assert_eq!(in_flight(&pair), 0);
        // It lives again, and is asked now and then.
        pair.rule(|_, _| Fate::Deliver);
        pair.run_for(100 * MS);
        post(&mut pair, 100);
        pair.run();
        post(&mut pair, 100);
        pair.drain();
        assert!(in_flight(&pair) > 0, "it has a window again");
        pair.run();
        all_sent(&pair, 3300);
    }
}

#[test]
fn duplicated_and_late_answers_are_dropped_and_counted() {
    for fate in [Fate::Duplicate, Fate::Delay(300_000)] {
        let mut pair = pair(QpType::Ud);
        pair.buffer(Who::B, BUFFER, 1000);
        let mut n = 0;
        pair.rule(move |who, packet| {
            n += u32::from(who == Who::B && is_flow(packet));
            if who == Who::B && n % 2 == 1 { fate } else { Fate::Deliver }
        });
        post(&mut pair, 500);
        pair.run();
        all_sent(&pair, 500);
        assert!(pair.a.host.dropped(Drop::GhostResponse) > 5, "{fate:?}");
    }
}

#[test]
fn psns_wrap() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let setup = Setup { mtu: 4096, region: 4 << 20, psn_a: 0xff_fff0, ..Setup::new(qp_type) };
        let mut pair = Pair::with(&setup);
        pair.buffer(Who::B, BUFFER, 20_000);
        post(&mut pair, 100);
        pair.run();
        all_sent(&pair, 100);
        let answered = flows(&pair, Who::B);
        assert_eq!(pair.a.host.counted(Count::FlowAnswerReceived) as usize, answered.len());
        assert!(answered.first().unwrap().headers.bth.psn.get() > answered.last().unwrap().headers.bth.psn.get());
    }
}

#[test]
fn forged_answers_open_nothing() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut pair = pair(qp_type);
        mute(&mut pair);
        post(&mut pair, 200);
        pair.drain();
        let held = in_flight(&pair);
        let asked = asks(&pair)[0].headers.bth.psn;
        assert!(held > WINDOW / 2);
        // Not the PSN of a question; another queue pair; a body that is none.
        inject(&mut pair, Who::B, asked.add(1), answer(0x22));
        inject(&mut pair, Who::B, asked, answer(0x23));
        pair.inject(Who::B, Headers::new(Bth::new(O::FERROCE_FLOW, 0, asked)), &answer(0x22).bytes()[..11]);
        pair.inject(Who::B, Headers::new(Bth::new(O::FERROCE_FLOW, 0, asked)), b"FE\x01\x01\0\0\0\0\0\0\0\x22");
        pair.run_for(MS);
        let ghosts = pair.a.host.dropped(Drop::GhostResponse) + pair.a.host.dropped(Drop::WrongSource);
        assert_eq!((ghosts, pair.a.host.dropped(Drop::BadOpcode)), (2, 2));
        // From another host.
        let headers = Headers::new(Bth::new(O::FERROCE_FLOW, 0x11, asked));
        let net = net(IpAddr::from([10, 88, 0, 9]), pair.a.path.src);
        let packet = Packet { headers: &headers, payload: &answer(0x22).bytes(), net: &net };
        pair.a.qp.handle_packet(pair.now, &packet, &mut pair.a.host);
        let ghosts = pair.a.host.dropped(Drop::GhostResponse) + pair.a.host.dropped(Drop::WrongSource);
        assert_eq!(ghosts, 3);
        assert_eq!(in_flight(&pair), held);
        // The right one is believed.
        inject(&mut pair, Who::B, asked, answer(0x22));
        pair.run_for(1);
        assert!(pair.a.host.counted(Count::FlowAnswerReceived) == 1 && pair.a.host.sent.len() < 200);
    }
}

#[test]
fn an_answer_to_who_never_asked_is_dropped() {
    for qp_type in [QpType::Uc, QpType::Ud, QpType::Rc] {
        let mut pair = pair(qp_type);
        inject(&mut pair, Who::B, Psn::new(0x1000), answer(0x22));
        pair.run();
        let reason = if qp_type == QpType::Rc { Drop::WrongTransport } else { Drop::GhostResponse };
        assert_eq!(pair.a.host.dropped(reason), 1, "{qp_type:?}");
        assert!(pair.seen.is_empty());
    }
}

fn net(src: IpAddr, dst: IpAddr) -> NetHeader {
    NetHeader { src, dst, src_port: 1, tclass: 3, hop_limit: 64, udp_len: 0, ifindex: 0 }
}

/// Gives B a datagram of a sender that asks; takes what B sends at once.
fn datagram(pair: &mut Pair, src: IpAddr, src_qp: u32, psn: u32, qkey: u32) {
    let mut headers = Headers::new(Bth::new(O::UD_SEND_ONLY, 0x22, Psn::new(psn)));
    headers.bth.ack_req = true;
    headers.deth = Some(Deth { qkey, src_qp });
    let net = net(src, pair.b.path.src);
    pair.b.qp.handle_packet(pair.now, &Packet { headers: &headers, payload: &[], net: &net }, &mut pair.b.host);
}

#[test]
fn who_asks_is_answered_the_way_it_came() {
    let mut pair = pair(QpType::Ud);
    let src = IpAddr::from([10, 88, 7, 7]);
    datagram(&mut pair, src, 0x77, 100, 0x1234);
    let train = pair.b.qp.poll_transmit(0, &mut pair.b.host).expect("an answer");
    let path = PathAddr { src: pair.b.path.src, dst: src, ifindex: 0, tclass: 3, hop_limit: 64, flow_label: 0 };
    assert_eq!(train.path.as_deref(), Some(&path));
    assert_eq!(train.head, Headers::new(Bth::new(O::FERROCE_FLOW, 0x77, Psn::new(100))));
    assert_eq!(pair.b.host.dropped(Drop::NoReceive), 1, "it is the buffer that is asked about, not the receives");
    assert!(pair.b.qp.poll_transmit(0, &mut pair.b.host).is_none());
}

#[test]
fn questions_that_come_together_get_one_answer() {
    let mut pair = pair(QpType::Ud);
    let src = IpAddr::from([10, 88, 7, 7]);
    for psn in [0xff_fffe, 3, 1] {
        datagram(&mut pair, src, 0x77, psn, 0x1234);
    }
    let train = pair.b.qp.poll_transmit(0, &mut pair.b.host).expect("an answer");
    assert_eq!(train.head.bth.psn, Psn::new(3));
    assert!(pair.b.qp.poll_transmit(0, &mut pair.b.host).is_none());
}

#[test]
fn hostile_questions_cost_little_and_strangers_keys_get_no_answer() {
    let mut pair = pair(QpType::Ud);
    let src = IpAddr::from([10, 88, 7, 7]);
    datagram(&mut pair, src, 0x77, 1, 0x1235);
    assert_eq!(pair.b.host.dropped(Drop::QKey), 1);
    let question = |qkey| Flow { kind: FlowKind::Question, qkey, src_qp: 0x11 };
    inject(&mut pair, Who::A, Psn::new(1), question(0x1235));
    pair.run();
    assert_eq!(pair.b.host.dropped(Drop::QKey), 2);
    // Management, multicast and addresses that need an interface.
    for qpn in [0, 1] {
        datagram(&mut pair, src, qpn, 1, 0x1234);
    }
    datagram(&mut pair, IpAddr::from([224, 0, 0, 5]), 0x77, 1, 0x1234);
    datagram(&mut pair, IpAddr::from([0xfe80, 0, 0, 0, 0, 0, 0, 1]), 0x77, 1, 0x1234);
    assert!(pair.b.qp.poll_transmit(0, &mut pair.b.host).is_none());
    // Many at once.
    for host in 0..1000u32 {
        datagram(&mut pair, IpAddr::from(Ipv4Addr::from(0x0a58_0000 + host)), 0x77, 1, 0x1234);
    }
    let mut answers = 0;
    while pair.b.qp.poll_transmit(0, &mut pair.b.host).is_some() {
        answers += 1;
    }
    assert_eq!((answers, pair.b.host.dropped(Drop::Overload)), (64, 1000 - 64));
    // A question by a packet of its own is answered too.
    inject(&mut pair, Who::A, Psn::new(9), question(0x1234));
    pair.run();
    assert_eq!(pair.sent_by(Who::B), [(O::FERROCE_FLOW, 9)]);
}

#[test]
fn a_pending_answer_ends_with_its_queue_pair() {
    for state in [QpState::Err, QpState::Reset] {
        let mut pair = pair(QpType::Ud);
        datagram(&mut pair, IpAddr::from([10, 88, 7, 7]), 0x77, 1, 0x1234);
        pair.to_state(Who::B, state);
        assert!(pair.b.qp.poll_transmit(0, &mut pair.b.host).is_none());
    }
}

#[test]
fn leaving_rts_gives_the_window_back() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        for state in [QpState::Err, QpState::Reset] {
            let mut pair = pair(qp_type);
            post(&mut pair, 100);
            pair.drain();
            assert!(in_flight(&pair) > WINDOW / 2);
            pair.to_state(Who::A, state);
            assert_eq!((in_flight(&pair), pair.a.qp.next_timeout()), (0, None));
            // Answers that come now find nothing.
            pair.run();
            assert_eq!(pair.a.host.counted(Count::FlowAnswerReceived), 0);
        }
    }
}

#[test]
fn the_error_of_a_request_gives_the_window_back() {
    let mut pair = pair(QpType::Uc);
    post(&mut pair, 1);
    let mut bad = pair.a.region.sge(0, 8);
    bad.lkey = 0xdead;
    let op = write_to(pair.b.region, 0);
    pair.post_wr(Who::A, wr(1, op, &[bad]));
    pair.drain();
    assert_eq!((pair.a.qp.state(), in_flight(&pair)), (QpState::Sqe, 0));
    pair.run();
    pair.to_state(Who::A, QpState::Rts);
    post(&mut pair, 100);
    pair.run();
    assert_eq!(pair.a.host.sent.len(), 102);
    assert_eq!(pair.now, pair.now.min(40 * MS), "what is known of the peer stays");
}

#[test]
fn a_train_that_did_not_go_out_is_not_waited_for() {
    let mut pair = pair(QpType::Uc);
    let gone = pair.a.host.memory.register(7, 65_536, Access::empty());
    let op = pair.write_op(0);
    pair.post_wr(Who::A, wr(1, op, &[gone.sge(0, 61_440)]));
    let train = pair.a.qp.poll_transmit(0, &mut pair.a.host).expect("a train");
    assert!(train.tail.expect("of several packets").bth.ack_req && in_flight(&pair) > 0);
    // Complete, and then the link finds the memory gone: the program's own fault.
    assert!(pair.a.qp.poll_transmit(0, &mut pair.a.host).is_none());
    pair.a.qp.handle_transmit_fault(&train, crate::MemoryError::Fault, &mut pair.a.host);
    assert_eq!((in_flight(&pair), pair.a.qp.state()), (0, QpState::Rts));
    pair.run();
    assert!(pair.now <= 50 * MS && pair.a.host.sent.len() == 1);
}

#[test]
fn missing_packets_make_the_window_smaller() {
    let mut pair = pair(QpType::Uc);
    post(&mut pair, 20);
    pair.run();
    let before = pair.a.host.windows[0].window();
    pair.drop_nth(Who::A, &[3]);
    post(&mut pair, 20);
    pair.run();
    assert!(pair.a.host.windows[0].window() < before);
    all_sent(&pair, 40);
}

#[test]
fn multicast_and_management_are_never_asked() {
    for (dst, qpn) in [(IpAddr::from([224, 0, 0, 1]), 0xff_ffff), (IpAddr::from([10, 88, 0, 2]), 1)] {
        let mut pair = pair(QpType::Ud);
        let path = Arc::new(PathAddr { dst, ..(*pair.a.path).clone() });
        for id in 0..200 {
            let ud = Some(UdDest { path: Arc::clone(&path), qpn, qkey: 1 });
            pair.post_wr(Who::A, SendWr { ud, ..wr(id, SendOp::Send, &[pair.a.region.sge(0, LEN)]) });
        }
        pair.drain();
        all_sent(&pair, 200);
        assert!(asks(&pair).is_empty());
    }
}

#[test]
fn more_destinations_than_are_kept_in_mind() {
    let mut pair = pair(QpType::Ud);
    mute(&mut pair);
    let to = |pair: &mut Pair, qpn: u32, count: u64| {
        for id in 0..count {
            let ud = Some(UdDest { path: Arc::clone(&pair.a.path), qpn, qkey: 1 });
            pair.post_wr(Who::A, SendWr { ud, ..wr(id, SendOp::Send, &[pair.a.region.sge(0, LEN)]) });
        }
    };
    pair.a.host.windows[0] = Box::new(FixedWindow::new(u32::MAX));
    for qpn in 2..3002 {
        to(&mut pair, qpn, 1);
    }
    pair.drain();
    pair.a.qp.assert_invariants();
    all_sent(&pair, 3000);
    // All with something under way: one more goes without.
    for qpn in 2..2002 {
        to(&mut pair, qpn, 12);
        pair.drain();
    }
    pair.a.qp.assert_invariants();
    all_sent(&pair, 3000 + 12 * 2000);
    let asked: std::collections::HashSet<u32> = asks(&pair).iter().map(|seen| seen.headers.bth.dest_qp).collect();
    assert_eq!(asked.len(), 1024);
    pair.run();
    assert_eq!(pair.now, 50 * MS);
}

/// While one destination holds the queue pair back, what is under way to others is answered.
#[test]
fn windows_of_datagrams_are_towards_their_own_destinations() {
    let mut pair = pair(QpType::Ud);
    post(&mut pair, 15);
    let other = Arc::new(PathAddr { dst: IpAddr::from([10, 88, 0, 9]), ..(*pair.a.path).clone() });
    for id in 0..15 {
        let ud = Some(UdDest { path: Arc::clone(&other), qpn: 5, qkey: 1 });
        pair.post_wr(Who::A, SendWr { ud, ..wr(id, SendOp::Send, &[pair.a.region.sge(0, LEN)]) });
    }
    // B takes all for its own and answers for itself only.
    pair.rule(|_, packet| if packet.headers.bth.dest_qp == 5 { Fate::Drop } else { Fate::Deliver });
    pair.run();
    all_sent(&pair, 30);
    assert_eq!(pair.a.host.counted(Count::FlowAnswerReceived), 1, "to two questions");
    assert_eq!(pair.now, 50 * MS, "until the other one counts as a stranger");
}
