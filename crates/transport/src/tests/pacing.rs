//! Packet pacing.

use super::ends;
use crate::testing::{Pair, Setup, Who};
use crate::verbs::{QpAttr, QpAttrMask, QpState, QpType, SendOp, WcStatus};
use crate::{ModifyError, RATE_LIMIT_MAX, RATE_LIMIT_MIN};

const OK: WcStatus = WcStatus::Success;
const MS: u64 = 1_000_000;

/// Has A's requests keep to a rate.
fn limit(pair: &mut Pair, rate_kbps: u32) -> Result<(), ModifyError> {
    let attr = QpAttr { rate_limit: rate_kbps, ..QpAttr::default() };
    pair.a.qp.modify(&attr, QpAttrMask::RATE_LIMIT, &mut pair.a.host)
}

/// How long A takes to send `count` messages of 60,000 bytes, with a rate limit or without.
fn time(qp_type: QpType, rate_kbps: u32, count: u64) -> u64 {
    let mut pair = Pair::with(&Setup { mtu: 4096, ..Setup::new(qp_type) });
    limit(&mut pair, rate_kbps).unwrap();
    for id in 0..count {
        if qp_type == QpType::Rc {
            pair.post(id, pair.write_op(0), 0, 60_000);
        } else {
            pair.post(id, SendOp::Send, 0, 4_096);
        }
    }
    let began = pair.now;
    pair.run_until(|pair| pair.a.host.sent.len() as u64 == count);
    assert_eq!(ends(&pair.a.host.sent), (0..count).map(|id| (id, OK)).collect::<Vec<_>>());
    pair.now - began
}

#[test]
fn what_is_sent_keeps_to_the_rate() {
    // 100 messages of 60,000 bytes are 48 Mbit: 480 ms at 100 Mbit/s, and the headers of 1,500 packets 7 more. The first goes at once.
    let taken = time(QpType::Rc, 100_000, 100);
    assert!((475 * MS..495 * MS).contains(&taken), "{taken} ns");
    assert!(time(QpType::Rc, 0, 100) < 200 * MS, "without a limit");
    // 200 messages of 4,096 bytes are 6.65 Mbit with their headers.
    for qp_type in [QpType::Uc, QpType::Ud] {
        let taken = time(qp_type, 10_000, 200);
        assert!((655 * MS..675 * MS).contains(&taken), "{qp_type:?}: {taken} ns");
    }
}

#[test]
fn the_peer_is_answered_at_once_all_the_same() {
    let mut pair = Pair::new(QpType::Rc);
    limit(&mut pair, RATE_LIMIT_MIN).unwrap();
    pair.post(1, pair.write_op(0), 0, 60_000);
    pair.run_until(|pair| pair.a.host.sent.len() == 1);
    // Its own next message has to wait for 48 ms.
    pair.post(2, pair.write_op(0), 0, 60_000);
    let (element, to) = (pair.b.region.sge(0, 8), pair.a.region);
    pair.post_wr(Who::B, super::wr(3, super::write_to(to, 0), &[element]));
    let began = pair.now;
    pair.run_until(|pair| pair.b.host.sent.len() == 1);
    assert!(pair.now - began < MS, "{} ns", pair.now - began);
    pair.run_until(|pair| pair.a.host.sent.len() == 2);
    assert!(pair.now - began > 40 * MS);
}

#[test]
fn a_limit_can_be_changed_and_taken_away_and_has_bounds() {
    let mut pair = Pair::new(QpType::Rc);
    assert_eq!(pair.a.qp.attr().rate_limit, 0);
    limit(&mut pair, RATE_LIMIT_MIN).unwrap();
    assert_eq!(pair.a.qp.attr().rate_limit, RATE_LIMIT_MIN);
    for wrong in [1, RATE_LIMIT_MIN - 1, RATE_LIMIT_MAX + 1] {
        assert_eq!(limit(&mut pair, wrong).unwrap_err().attr, "rate_limit");
    }
    pair.post(1, pair.write_op(0), 0, 60_000);
    pair.post(2, pair.write_op(0), 0, 60_000);
    let began = pair.now;
    pair.run_for(10 * MS);
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)], "the other one waits");
    limit(&mut pair, 0).unwrap();
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK)]);
    assert!(pair.now - began < 100 * MS);
    limit(&mut pair, RATE_LIMIT_MAX).unwrap();
    pair.to_state(Who::A, QpState::Reset);
    assert_eq!(pair.a.qp.attr().rate_limit, 0, "RESET forgets it");
    assert!(limit(&mut pair, RATE_LIMIT_MAX).is_err(), "it is for those that send");
}

#[test]
fn who_sends_otherwise_has_no_rate() {
    for qp_type in [QpType::RawPacket, QpType::XrcSend] {
        let mut pair = Pair::new(qp_type);
        assert_eq!(limit(&mut pair, RATE_LIMIT_MIN).unwrap_err().attr, "rate_limit");
    }
}
