//! Tests of whole queue pairs, over the simulated wire.

mod flow;
mod hostile;
mod lent;
mod pacing;
mod placement;
mod random;
mod raw;
mod rc_data;
mod rc_errors;
mod rc_loss;
mod rc_read;
mod rc_receiver;
mod rc_repair;
mod states;
mod tags;
mod uc;
mod ud;
mod windows;
mod xrc;

use smallvec::SmallVec;

use crate::testing::{Pair, Region, Seen, Who};
use crate::verbs::{Completion, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus};

/// Ids and statuses, in order.
fn ends(completions: &[Completion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|completion| (completion.wr_id, completion.status)).collect()
}

/// A signalled request over the given elements.
fn wr(wr_id: u64, op: SendOp, sges: &[Sge]) -> SendWr {
    SendWr {
        wr_id,
        op,
        flags: SendFlags::SIGNALED,
        data: SendData::Sges(sges.iter().copied().collect::<SmallVec<_>>()),
        ud: None,
        xrc_srqn: None,
    }
}

/// A first WRITE from A that is acknowledged, PSN 0x1000: before, there is nothing that a probe could repeat.
fn acquaint(pair: &mut Pair) {
    pair.post(0, pair.write_op(0), 0, 8);
    pair.run();
    assert_eq!(ends(&pair.a.host.sent), [(0, WcStatus::Success)]);
    pair.a.host.sent.clear();
    pair.a.host.released = 0;
    pair.seen.clear();
}

/// A WRITE to anywhere.
fn write_to(region: Region, offset: u64) -> SendOp {
    SendOp::Write { raddr: region.addr + offset, rkey: region.key }
}

/// Packets that one end sent.
fn sent_by(pair: &Pair, who: Who) -> Vec<Seen> {
    pair.seen.iter().filter(|seen| seen.from == who).copied().collect()
}

/// AETH syndromes and PSNs that one end sent.
fn answers(pair: &Pair, who: Who) -> Vec<(u8, u32)> {
    sent_by(pair, who)
        .iter()
        .filter_map(|seen| Some((seen.headers.aeth?.syndrome.0, seen.headers.bth.psn.get())))
        .collect()
}

/// Attempts at the first packet of PSN `psn`.
fn attempts(pair: &Pair, who: Who, psn: u32) -> usize {
    sent_by(pair, who).iter().filter(|seen| seen.headers.bth.psn.get() == psn).count()
}
