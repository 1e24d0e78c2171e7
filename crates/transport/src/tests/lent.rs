//! Large WRITEs whose payload the peer fetches itself.

use ferroce_wire::{Bth, Headers, Opcode as O, Psn, Reth};

use super::{acquaint, attempts, ends, wr};
use crate::cc::FixedWindow;
use crate::host::Span;
use crate::testing::{Pair, Setup, Who};
use crate::verbs::{Access, QpAttr, QpType, SendOp, Sge, WcStatus};

const OK: WcStatus = WcStatus::Success;

fn lending(qp_type: QpType) -> Pair {
    let mut pair = Pair::new(qp_type);
    acquaint(&mut pair);
    pair.a.host.lends = true;
    pair
}

#[test]
fn a_large_write_goes_in_long_trains_and_arrives() {
    let mut pair = lending(QpType::Rc);
    pair.post(1, pair.write_op(3), 5, 600_001);
    pair.post(2, pair.write_op(700_000), 5, 32_767);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
    assert_eq!(pair.b.bytes(3, 600_001), pair.a.bytes(5, 600_001));
    // 586 packets; what is small is sent.
    assert_eq!(pair.lent, [256, 256, 74]);
}

#[test]
fn only_writes_of_rc_in_one_piece_are_lent() {
    for qp_type in [QpType::Rc, QpType::Uc, QpType::XrcSend] {
        let mut pair = Pair::new(qp_type);
        pair.a.host.lends = true;
        if qp_type == QpType::Rc {
            pair.b.post_recvs(1, 1, 0, 100_000);
            pair.post(1, SendOp::Send, 0, 100_000);
            let region = pair.a.region;
            let piece = |at: u64| Sge { addr: region.addr + at, length: 25_000, lkey: region.key };
            let pieces = wr(2, pair.write_op(0), &[piece(0), piece(30_000), piece(60_000), piece(90_000)]);
            pair.post_wr(Who::A, pieces);
            pair.post(3, pair.read_op(0), 0, 100_000);
        } else {
            pair.post(1, pair.write_op(0), 0, 100_000);
        }
        pair.run();
        assert!(pair.a.host.sent.iter().all(|done| done.status == OK), "{qp_type:?}: {:?}", pair.a.host.sent);
        assert_eq!(pair.lent, [0; 0], "{qp_type:?}");
    }
}

#[test]
fn what_comes_again_is_sent() {
    let mut pair = lending(QpType::Rc);
    pair.drop_nth(Who::A, &[7, 300]);
    pair.post(1, pair.write_op(0), 0, 400_000);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(pair.b.bytes(0, 400_000), pair.a.bytes(0, 400_000));
    assert_eq!(pair.lent, [256, 135], "each packet once");
    assert!(attempts(&pair, Who::A, 0x1001 + 7) > 1);
}

#[test]
fn a_window_is_charged_for_a_part_of_what_is_lent() {
    let mut pair = lending(QpType::Rc);
    pair.a.host.windows[0] = Box::new(FixedWindow::new(256 << 10));
    let before = pair.a.host.windows[0].available();
    pair.post(1, pair.write_op(0), 0, 1 << 20);
    pair.drain();
    assert_eq!(pair.lent, [256; 4], "all of it is on its way");
    let taken = before - pair.a.host.windows[0].available();
    assert!((64 << 10..96 << 10).contains(&taken), "{taken}");
    pair.run();
    assert_eq!((pair.a.host.windows[0].in_flight(), ends(&pair.a.host.sent)), (0, vec![(1, OK)]));
}

/// The headers of a packet for B.
fn headers(pair: &Pair, opcode: O, psn: u32, reth: Option<Reth>) -> Headers {
    let mut headers = Headers::new(Bth::new(opcode, pair.b.qp.init().qpn, Psn::new(psn)));
    headers.reth = reth;
    headers
}

fn place(pair: &mut Pair, headers: &Headers, len: u32) -> Option<Span> {
    pair.b.qp.place(headers, len, &mut pair.b.host)
}

#[test]
fn the_place_of_a_write_is_known_before_it_is_executed() {
    let mut pair = Pair::new(QpType::Rc);
    let region = pair.b.region;
    let reth = Reth { va: region.addr + 100, rkey: region.key, len: 5_000 };
    let first = |pair: &Pair, psn, reth| headers(pair, O::RC_WRITE_FIRST, psn, Some(reth));
    let good = first(&pair, 0x1000, reth);
    assert_eq!(place(&mut pair, &good, 4_096), Some(Span { addr: region.addr + 100, len: 4_096 }));
    assert_eq!(place(&mut pair, &good, 5_000), None, "its last packet is not among them");
    let beyond = Reth { va: region.addr + (1 << 20) - 4_999, ..reth };
    for (psn, reth) in [(0x1001, reth), (0x0fff, reth), (0x1000, beyond), (0x1000, Reth { rkey: 99, ..reth })] {
        let other = first(&pair, psn, reth);
        assert_eq!(place(&mut pair, &other, 4_096), None, "{psn:#x} {reth:?}");
    }
    for opcode in [O::RC_SEND_FIRST, O::RC_WRITE_MIDDLE, O::RC_WRITE_ONLY, O::RC_READ_RESPONSE_FIRST] {
        let other = headers(&pair, opcode, 0x1000, Some(reth));
        assert_eq!(place(&mut pair, &other, 4_096), None, "{opcode:?}");
    }
    // In the middle of the message.
    pair.inject(Who::A, good, &[1; 1024]);
    pair.run_for(100_000);
    let middle = headers(&pair, O::RC_WRITE_MIDDLE, 0x1001, None);
    assert_eq!(place(&mut pair, &middle, 2_048), Some(Span { addr: region.addr + 1_124, len: 2_048 }));
    assert_eq!(place(&mut pair, &middle, 3_976), None, "all that is left");
    let again = first(&pair, 0x1001, reth);
    assert_eq!(place(&mut pair, &again, 2_048), None, "no message begins in another");
    // A packet that came early has its bytes with it.
    let late = headers(&pair, O::RC_WRITE_MIDDLE, 0x1002, None);
    pair.inject(Who::A, late, &[2; 1024]);
    pair.run_for(100_000);
    assert_eq!(place(&mut pair, &middle, 2_048), None);
}

#[test]
fn who_may_not_write_has_no_place() {
    let attr = QpAttr { access: Access::REMOTE_READ, ..Setup::new(QpType::Rc).attr };
    let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) });
    let reth = Reth { va: pair.b.region.addr, rkey: pair.b.region.key, len: 5_000 };
    let first = headers(&pair, O::RC_WRITE_FIRST, 0x1000, Some(reth));
    assert_eq!(place(&mut pair, &first, 4_096), None);
}
