//! Tag lists.

use std::sync::Arc;

use ferroce_core::cq::Moderation;
use ferroce_core::{AsyncQueue, CompChannel, Cq, Srq, TagChange, TagList, TagOp, TaggedRecv, limits};
use ferroce_transport::{RecvWr, TagMatch, WcFlags, WcOpcode, WcStatus};

/// A shared queue with two ordinary requests (ids 100 and 101) and a list for three tags.
fn queue() -> (Srq, Arc<Cq>) {
    let events = Arc::new(AsyncQueue::new().unwrap());
    let cq = Arc::new(Cq::new(16, None, Arc::clone(&events), 1).unwrap());
    let srq = Srq::new(8, 2, events, 6).unwrap().with_tags(TagList::new(3, Arc::clone(&cq)).unwrap());
    for wr_id in [100, 101] {
        srq.post(RecvWr { wr_id, ..RecvWr::default() }).unwrap();
    }
    (srq, cq)
}

fn recv(wr_id: u64) -> RecvWr {
    RecvWr { wr_id, ..RecvWr::default() }
}

fn add(srq: &Srq, wr_id: u64, tag: u64, mask: u64) -> u32 {
    let change = TagChange::Add(TaggedRecv { recv: recv(wr_id), tag, mask });
    post(srq, change, None).unwrap().unwrap()
}

fn post(srq: &Srq, change: TagChange, handled: Option<u32>) -> Result<Option<u32>, ferroce_core::CoreError> {
    srq.tags().unwrap().post(TagOp { wr_id: 5, signaled: true, handled, change }, 77)
}

fn told(cq: &Cq) -> Vec<(WcOpcode, WcStatus, WcFlags)> {
    std::iter::from_fn(|| cq.poll_one()).map(|got| (got.opcode, got.status, got.flags)).collect()
}

const NOTHING: WcFlags = WcFlags::empty();
const OK: WcStatus = WcStatus::Success;

#[test]
fn the_oldest_buffer_whose_masked_tag_fits_is_taken() {
    let (srq, cq) = queue();
    add(&srq, 1, 0x0100, 0xff00);
    add(&srq, 2, 0x0123, 0xffff);
    add(&srq, 3, 0, 0);
    assert_eq!(told(&cq), [(WcOpcode::TmAdd, OK, NOTHING); 3]);
    assert_eq!(srq.take_tagged(Some(0x0123)), Some(TagMatch::Tagged(recv(1))));
    assert_eq!(srq.take_tagged(Some(0x0123)), Some(TagMatch::Tagged(recv(2))));
    assert_eq!(srq.take_tagged(Some(0x9999)), Some(TagMatch::Tagged(recv(3))), "no bit counts");
    assert_eq!(srq.take_tagged(Some(0x0123)), Some(TagMatch::Unexpected(recv(100))));
    assert!(told(&cq).is_empty());
}

#[test]
fn a_buffer_added_behind_an_unexpected_message_is_held_until_the_program_handled_that() {
    let (srq, cq) = queue();
    add(&srq, 1, 1, u64::MAX);
    assert_eq!(srq.take_tagged(Some(2)), Some(TagMatch::Unexpected(recv(100))));
    add(&srq, 2, 2, u64::MAX);
    let late = (WcOpcode::TmAdd, OK, WcFlags::TM_SYNC_REQ);
    assert_eq!(told(&cq), [(WcOpcode::TmAdd, OK, NOTHING), late]);
    assert_eq!(srq.take_tagged(Some(1)), Some(TagMatch::Tagged(recv(1))), "it was there before");
    assert_eq!(srq.take_tagged(Some(2)), Some(TagMatch::Unexpected(recv(101))), "the new one is held");
    assert_eq!(srq.take_tagged(Some(2)), None, "nothing to put it in: it does not count");
    post(&srq, TagChange::Sync, Some(1)).unwrap();
    assert_eq!(told(&cq), [(WcOpcode::TmSync, OK, WcFlags::TM_SYNC_REQ)], "there were two");
    assert_eq!(srq.take_tagged(Some(2)), None);
    post(&srq, TagChange::Sync, Some(2)).unwrap();
    assert_eq!(told(&cq), [(WcOpcode::TmSync, OK, NOTHING)]);
    assert_eq!(srq.take_tagged(Some(2)), Some(TagMatch::Tagged(recv(2))));
}

#[test]
fn an_operation_can_tell_the_count_itself() {
    let (srq, cq) = queue();
    assert!(srq.take_tagged(Some(2)).is_some());
    let change = TagChange::Add(TaggedRecv { recv: recv(1), tag: 2, mask: u64::MAX });
    post(&srq, change, Some(1)).unwrap();
    assert_eq!(told(&cq), [(WcOpcode::TmAdd, OK, NOTHING)]);
    assert_eq!(srq.take_tagged(Some(2)), Some(TagMatch::Tagged(recv(1))));
}

#[test]
fn an_unexpected_message_that_failed_releases_what_it_held() {
    let (srq, _cq) = queue();
    assert!(srq.take_tagged(None).is_some());
    add(&srq, 1, 1, u64::MAX);
    srq.forget_unexpected();
    assert_eq!(srq.take_tagged(Some(1)), Some(TagMatch::Tagged(recv(1))));
}

#[test]
fn a_deleted_buffer_matches_no_more_and_a_consumed_one_cannot_be_deleted() {
    let (srq, cq) = queue();
    let (first, second) = (add(&srq, 1, 1, u64::MAX), add(&srq, 2, 1, u64::MAX));
    told(&cq);
    post(&srq, TagChange::Delete(first), None).unwrap();
    assert_eq!(srq.take_tagged(Some(1)), Some(TagMatch::Tagged(recv(2))));
    let unsignaled = TagOp { wr_id: 6, signaled: false, handled: None, change: TagChange::Delete(second) };
    srq.tags().unwrap().post(unsignaled, 0).unwrap();
    assert_eq!(told(&cq), [(WcOpcode::TmDel, OK, NOTHING), (WcOpcode::TmDel, WcStatus::TmErr, NOTHING)]);
}

#[test]
fn a_held_buffer_can_be_deleted() {
    let (srq, _cq) = queue();
    add(&srq, 1, 1, u64::MAX);
    assert!(srq.take_tagged(None).is_some());
    let (held, kept) = (add(&srq, 2, 2, u64::MAX), add(&srq, 3, 3, u64::MAX));
    post(&srq, TagChange::Delete(held), None).unwrap();
    assert_eq!(srq.take_tagged(Some(3)), Some(TagMatch::Unexpected(recv(101))), "still held");
    post(&srq, TagChange::Delete(kept), Some(2)).unwrap();
    assert_eq!(srq.take_tagged(Some(1)), Some(TagMatch::Tagged(recv(1))));
    assert!(srq.tags().unwrap().is_empty());
}

#[test]
fn lists_are_bounded_and_a_refused_operation_changes_nothing() {
    let (srq, cq) = queue();
    for tag in 1..=3 {
        add(&srq, tag, tag, u64::MAX);
    }
    told(&cq);
    assert!(srq.take_tagged(None).is_some());
    let change = TagChange::Add(TaggedRecv { recv: recv(4), tag: 4, mask: u64::MAX });
    assert_eq!(post(&srq, change, Some(1)).unwrap_err().errno, libc::ENOMEM);
    post(&srq, TagChange::Sync, None).unwrap();
    assert_eq!(told(&cq), [(WcOpcode::TmSync, OK, WcFlags::TM_SYNC_REQ)], "the count was refused, too");
    let sges =
        std::iter::repeat_n(ferroce_transport::Sge { addr: 0, length: 1, lkey: 1 }, limits::MAX_SGE as usize + 1);
    let change = TagChange::Add(TaggedRecv { recv: RecvWr { wr_id: 1, sges: sges.collect() }, tag: 4, mask: 0 });
    assert_eq!(post(&srq, change, None).unwrap_err().errno, libc::EINVAL);
    for max_tags in [0, limits::MAX_NUM_TAGS + 1] {
        assert_eq!(TagList::new(max_tags, Arc::clone(&cq)).unwrap_err().errno, libc::EINVAL);
    }
}

/// Counts wrap at 2^16, as cards' do.
#[test]
fn the_counts_are_compared_modulo_65536() {
    let (srq, cq) = queue();
    for _ in 0..=0xffff {
        srq.post(recv(9)).unwrap();
        assert!(srq.take_tagged(None).is_some());
    }
    post(&srq, TagChange::Sync, Some(0x10_0000)).unwrap();
    assert_eq!(told(&cq), [(WcOpcode::TmSync, OK, NOTHING)]);
}

/// Operations are posted outside of the lanes, where nobody would run a moderation period.
#[test]
fn the_event_of_an_operation_does_not_wait_for_moderation() {
    let events = Arc::new(AsyncQueue::new().unwrap());
    let channel = Arc::new(CompChannel::new().unwrap());
    let cq = Arc::new(Cq::new(16, Some(Arc::clone(&channel)), events, 1).unwrap().with_timestamps());
    let list = TagList::new(3, Arc::clone(&cq)).unwrap();
    cq.set_moderation(Moderation { count: 10, period_us: 1000 });
    cq.arm(false);
    list.post(TagOp { wr_id: 5, signaled: true, handled: None, change: TagChange::Sync }, 77).unwrap();
    assert_eq!(channel.unread(1), 1);
    assert_eq!(cq.next_timeout(), None);
    assert_eq!(cq.poll_one().map(|got| got.timestamp), Some(77));
}
