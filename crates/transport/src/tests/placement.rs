//! ATOMIC WRITE and FLUSH (IBA annex A19).

use ferroce_wire::Opcode;

use super::{ends, sent_by, wr};
use crate::testing::{Fate, Pair, Setup, Who};
use crate::verbs::{
    Access, FlushRange, Placement, QpAttr, QpEvent, QpType, SendData, SendFlags, SendOp, SendWr, WcOpcode, WcStatus,
};

const OK: WcStatus = WcStatus::Success;

fn atomic_write(pair: &Pair, offset: u32) -> SendOp {
    SendOp::AtomicWrite { raddr: pair.b.region.addr + u64::from(offset), rkey: pair.b.region.key }
}

fn flush(pair: &Pair, offset: u32, len: u32, placement: Placement) -> SendOp {
    let range = FlushRange::Bytes { raddr: pair.b.region.addr + u64::from(offset), len };
    SendOp::Flush { rkey: pair.b.region.key, range, placement }
}

#[test]
fn both_are_answered_by_a_read_response_without_bytes() {
    for qp_type in [QpType::Rc, QpType::XrcSend] {
        let mut pair = Pair::new(qp_type);
        pair.post(1, atomic_write(&pair, 64), 0, 8);
        pair.post(2, flush(&pair, 0, 4096, Placement::GLOBAL), 0, 0);
        let whole = SendOp::Flush { rkey: pair.b.region.key, range: FlushRange::Region, placement: Placement::GLOBAL };
        pair.post(3, whole, 0, 0);
        pair.run();
        let done: Vec<_> = pair.a.host.sent.iter().map(|done| (done.wr_id, done.status, done.opcode)).collect();
        assert_eq!(done, [(1, OK, WcOpcode::AtomicWrite), (2, OK, WcOpcode::Flush), (3, OK, WcOpcode::Flush)]);
        assert_eq!(pair.b.bytes(64, 8), pair.a.bytes(0, 8));
        let class = if qp_type == QpType::Rc { 0 } else { 0xa0 };
        let sent: Vec<_> = sent_by(&pair, Who::A).iter().map(|seen| (seen.headers.bth.opcode.0, seen.len)).collect();
        assert_eq!(sent, [(class | 0x1d, 8), (class | 0x1c, 0), (class | 0x1c, 0)]);
        let feths: Vec<_> = sent_by(&pair, Who::A).iter().map(|seen| seen.headers.feth.map(|feth| feth.0)).collect();
        assert_eq!(feths, [None, Some(1), Some(0x11)]);
        for seen in sent_by(&pair, Who::B) {
            assert_eq!((seen.headers.bth.opcode.0, seen.len), (class | Opcode::RC_READ_RESPONSE_ONLY.0, 0));
        }
    }
}

#[test]
fn what_comes_again_is_answered_and_not_done_again() {
    let mut pair = Pair::new(QpType::Rc);
    pair.drop_nth(Who::B, &[0]);
    pair.post(1, atomic_write(&pair, 64), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!((sent_by(&pair, Who::A).len(), pair.b.host.memory.stores), (2, 1));
}

#[test]
fn they_count_among_reads_and_a_fence_waits_for_them() {
    let attr = QpAttr { max_rd_atomic: 1, ..Setup::new(QpType::Rc).attr };
    let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) });
    pair.rule(|who, _| if who == Who::B { Fate::Delay(1_000) } else { Fate::Deliver });
    pair.post(1, atomic_write(&pair, 64), 0, 8);
    pair.post(2, atomic_write(&pair, 72), 0, 8);
    pair.post_flags(3, pair.write_op(0), 0, 8, SendFlags::SIGNALED | SendFlags::FENCE);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK), (2, OK), (3, OK)]);
    let times: Vec<_> = sent_by(&pair, Who::A).iter().map(|seen| seen.at).collect();
    assert!(times[0] < times[1] && times[1] < times[2], "one at a time: {times:?}");
}

#[test]
fn inline_bytes_are_written() {
    let mut pair = Pair::new(QpType::Rc);
    let data = SendData::Inline(Box::new(*b"8 bytes!"));
    pair.post_wr(Who::A, SendWr { data, ..wr(1, atomic_write(&pair, 8), &[]) });
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(1, OK)]);
    assert_eq!(pair.b.bytes(8, 8), b"8 bytes!");
}

/// How one request ends, and the event at the responder.
fn refused(op: impl Fn(&Pair) -> SendOp, len: u32, access: Access) -> (WcStatus, Vec<QpEvent>) {
    let attr = QpAttr { access, ..Setup::new(QpType::Rc).attr };
    let mut pair = Pair::with(&Setup { attr, ..Setup::new(QpType::Rc) });
    pair.post(1, op(&pair), 0, len);
    pair.run();
    assert_eq!(pair.b.host.memory.stores, 0);
    (pair.a.host.sent[0].status, pair.b.host.events.clone())
}

#[test]
fn errors() {
    let all = Setup::new(QpType::Rc).attr.access;
    let invalid = (WcStatus::RemInvReqErr, vec![QpEvent::ReqErr]);
    let no_right = (WcStatus::RemAccessErr, vec![QpEvent::AccessErr]);
    let bad_key = |pair: &Pair| SendOp::AtomicWrite { raddr: pair.b.region.addr, rkey: 1 };
    assert_eq!(refused(|pair| atomic_write(pair, 4), 8, all), invalid, "misaligned");
    assert_eq!(refused(|pair| atomic_write(pair, 8), 8, all - Access::REMOTE_WRITE), invalid);
    assert_eq!(refused(bad_key, 8, all), no_right);
    assert_eq!(refused(|pair| atomic_write(pair, 1 << 20), 8, all), no_right, "behind the region");
    assert_eq!(refused(|pair| atomic_write(pair, 8), 4, all), (WcStatus::LocLenErr, vec![]));
    let global = |pair: &Pair| flush(pair, 0, 8, Placement::GLOBAL);
    assert_eq!(refused(global, 0, all - Access::FLUSH_GLOBAL), invalid);
    assert_eq!(refused(global, 8, all), (WcStatus::LocLenErr, vec![]), "a FLUSH has no bytes");
    assert_eq!(refused(|pair| flush(pair, 0, 8, Placement::empty()), 0, all), invalid);
    let persistent = |pair: &Pair| flush(pair, 0, 8, Placement::PERSISTENT);
    assert_eq!(refused(persistent, 0, all), invalid, "the queue pair does not allow it");
    assert_eq!(refused(persistent, 0, all | Access::FLUSH_PERSISTENT), no_right, "the region does not grant it");
    assert_eq!(refused(|pair| flush(pair, 1 << 20, 8, Placement::GLOBAL), 0, all), no_right);
    let unknown = |_: &Pair| SendOp::Flush { rkey: 1, range: FlushRange::Region, placement: Placement::GLOBAL };
    assert_eq!(refused(unknown, 0, all), no_right);
}
