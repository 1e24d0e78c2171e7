//! Flow: the windows bound what is in flight, and never stop it for good.

use super::{ends, sent_by};
use crate::cc::{Aimd, FixedWindow, TRAIN_CHARGE_MAX};
use crate::host::{Count, Host, Window};
use crate::testing::{Pair, Setup, Who};
use crate::verbs::{QpType, WcStatus};
use crate::{MAX_TRAIN_BYTES, READ_CHUNK};

const OK: WcStatus = WcStatus::Success;

fn fixed(pair: &mut Pair, requests: u32, responses: u32) {
    pair.a.host.windows = [Box::new(FixedWindow::new(requests)), Box::new(FixedWindow::new(responses))];
}

#[test]
fn what_is_in_flight_stays_within_the_window() {
    for mtu in [256, 1024, 4096] {
        let mut pair = Pair::with(&Setup { mtu, ..Setup::new(QpType::Rc) });
        pair.post(1, pair.write_op(0), 0, 1_000_000);
        pair.post(2, pair.read_op(0), 0, 1_000_000);
        pair.run_until(|pair| {
            let [requests, responses] = &pair.a.host.windows;
            assert!(requests.in_flight() <= requests.window() && responses.in_flight() <= responses.window());
            pair.a.host.sent.len() == 2
        });
        assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
        assert_eq!(pair.a.host.counted(Count::PacketsRetransmitted), 0);
    }
}

#[test]
fn a_default_window_survives_a_default_receive_buffer() {
    // Linux keeps 425,984 bytes for a socket by default; a train of 61 KB takes about 68 KB of them.
    let mut pair = Pair::with(&Setup { mtu: 4096, region: 4 << 20, ..Setup::new(QpType::Rc) });
    for id in 0..40 {
        pair.post(id, pair.write_op(0), 0, 1 << 20);
    }
    let mut most = 0;
    pair.run_until(|pair| {
        most = most.max(pair.a.host.windows[0].in_flight());
        false
    });
    assert!(most > Aimd::INITIAL, "it opened");
    assert!(most <= Aimd::MAX);
    assert_eq!(pair.a.host.sent.len(), 40);
}

#[test]
fn a_window_smaller_than_a_train_still_moves_everything() {
    for window in [1, 2_000, 20_000, TRAIN_CHARGE_MAX - 1] {
        let mut pair = Pair::new(QpType::Rc);
        fixed(&mut pair, window, window);
        pair.post(1, pair.write_op(500_000), 0, 200_000);
        pair.post(2, pair.read_op(0), 300_000, 200_000);
        pair.post(3, pair.add_op(64, 1), 700_000, 8);
        pair.run();
        assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK)], "window {window}");
    }
}

#[test]
fn crumbs_wait_for_the_answer_that_makes_them_a_train() {
    let mut pair = Pair::with(&Setup { mtu: 4096, ..Setup::new(QpType::Rc) });
    // One train and a bit.
    fixed(&mut pair, TRAIN_CHARGE_MAX + 10_000, 0);
    pair.post(1, pair.write_op(0), 0, 4 * MAX_TRAIN_BYTES);
    pair.drain();
    assert_eq!(sent_by(&pair, Who::A).len(), 15, "the first train, and no crumbs");
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    let mut times: Vec<_> = sent_by(&pair, Who::A).iter().map(|seen| seen.at).collect();
    assert_eq!(times.len(), 60);
    times.dedup();
    assert_eq!(times.len(), 4, "a train at a time");
}

#[test]
fn a_window_that_others_hold_stops_the_queue_pair_until_polled_again() {
    let mut pair = Pair::new(QpType::Rc);
    fixed(&mut pair, 10_000, 10_000);
    // Another queue pair of the lane has it all.
    pair.a.host.window_take(Window::Requests, 10_000);
    pair.post(1, pair.write_op(0), 0, 8);
    pair.run_for(1_000_000_000);
    assert!(pair.seen.is_empty());
    assert_eq!(pair.a.host.counted(Count::Timeout), 0, "nothing was sent, so nothing times out");
    pair.a.host.window_return(Window::Requests, 10_000, crate::WindowSignal::Acked { rtt: None });
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
}

#[test]
fn loss_shrinks_the_window_and_success_opens_it() {
    let mut pair = Pair::new(QpType::Rc);
    pair.post(1, pair.write_op(0), 0, 1_000_000);
    pair.run();
    let before = pair.a.host.windows[0].window();
    pair.drop_nth(Who::A, &[5]);
    pair.post(2, pair.write_op(0), 0, 200_000);
    pair.run();
    assert!(pair.a.host.windows[0].window() < before);
    for id in 3..40 {
        pair.post(id, pair.write_op(0), 0, 1_000_000);
    }
    pair.run();
    assert_eq!(pair.a.host.windows[0].window(), Aimd::MAX);
}

#[test]
fn a_read_request_never_asks_for_more_than_a_train() {
    for mtu in [256, 512, 1024, 2048, 4096] {
        let mut pair = Pair::with(&Setup { mtu, ..Setup::new(QpType::Rc) });
        pair.post(1, pair.read_op(0), 0, 500_000);
        pair.run();
        let most = sent_by(&pair, Who::A).iter().filter_map(|seen| Some(seen.headers.reth?.len)).max().unwrap();
        assert!(most <= READ_CHUNK && most / mtu <= 60, "{most}");
        assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    }
}

#[test]
fn both_sides_of_a_queue_pair_take_turns() {
    let mut pair = Pair::with(&Setup { mtu: 4096, ..Setup::new(QpType::Rc) });
    // A long answer waits at B, and B has something to send itself.
    let mut headers = ferroce_wire::Headers::new(ferroce_wire::Bth::new(
        ferroce_wire::Opcode::RC_READ_REQUEST,
        0,
        ferroce_wire::Psn::new(0x1000),
    ));
    headers.reth = Some(ferroce_wire::Reth { va: pair.b.region.addr, rkey: pair.b.region.key, len: 1_000_000 });
    // The READ arrives while B is busy; then B posts, and only then anything goes out.
    let net = ferroce_wire::NetHeader {
        src: pair.a.path.src,
        dst: pair.a.path.dst,
        src_port: 1,
        tclass: 0,
        hop_limit: 64,
        udp_len: 0,
        ifindex: 0,
    };
    let packet = crate::Packet { headers: &headers, payload: &[], net: &net };
    pair.b.qp.handle_packet(0, &packet, &mut pair.b.host);
    let op = super::write_to(pair.a.region, 0);
    pair.post_wr(Who::B, super::wr(1, op, &[pair.b.region.sge(0, 8)]));
    pair.drain();
    assert_eq!(sent_by(&pair, Who::B).len(), 245 + 1);
    let write =
        sent_by(&pair, Who::B).iter().position(|seen| seen.headers.bth.opcode == ferroce_wire::Opcode::RC_WRITE_ONLY);
    assert!(write.is_some_and(|at| at <= 15), "{write:?}");
}
