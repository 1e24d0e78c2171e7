//! Completion queues and their channels.

use std::collections::VecDeque;
use std::sync::Arc;

use ferroce_core::cq::{Moderation, News};
use ferroce_core::{AsyncEvent, AsyncQueue, CompChannel, Cq, limits};
use ferroce_transport::{Completion, WcStatus};
use proptest::prelude::*;

use crate::completion;

struct Rig {
    cq: Cq,
    channel: Arc<CompChannel>,
    events: Arc<AsyncQueue>,
}

impl Rig {
    fn new(capacity: u32) -> Rig {
        let channel = Arc::new(CompChannel::new().unwrap());
        let events = Arc::new(AsyncQueue::new().unwrap());
        let cq = Cq::new(capacity, Some(Arc::clone(&channel)), Arc::clone(&events), 77).unwrap();
        Rig { cq, channel, events }
    }

    fn push(&self, wr_id: u64) -> bool {
        self.cq.push(completion(wr_id, 1)) == News::Period
    }

    /// Completion events that wait.
    fn told(&self) -> usize {
        self.channel.unread(77)
    }
}

fn solicited() -> Completion {
    Completion { solicited: true, ..completion(0, 1) }
}

fn failed() -> Completion {
    Completion { status: WcStatus::WrFlushErr, ..completion(0, 1) }
}

#[test]
fn one_event_for_the_next_completion_after_arming() {
    let rig = Rig::new(16);
    rig.push(1);
    assert_eq!(rig.told(), 0, "not armed");
    rig.cq.arm(false);
    assert_eq!(rig.told(), 0, "what waited before does not count");
    rig.push(2);
    rig.push(3);
    assert_eq!(rig.told(), 1, "one event an arming");
    rig.cq.arm(false);
    rig.cq.arm(false);
    rig.push(4);
    assert_eq!(rig.told(), 2, "arming twice is arming once; unread events do not merge");
    assert_eq!(rig.channel.next_event().unwrap(), 77);
    assert_eq!(rig.cq.unread_events(), 1);
    assert_eq!(rig.cq.len(), 4);
}

#[test]
fn solicited_arming_waits_for_solicited_or_failed() {
    let rig = Rig::new(16);
    rig.cq.arm(true);
    rig.push(1);
    assert_eq!(rig.told(), 0);
    rig.cq.push(solicited());
    assert_eq!(rig.told(), 1);
    rig.cq.arm(true);
    rig.cq.push(failed());
    assert_eq!(rig.told(), 2);
    rig.cq.arm(true);
    rig.cq.arm(false);
    rig.push(2);
    assert_eq!(rig.told(), 3, "any outranks solicited when it comes later");
    rig.cq.arm(false);
    rig.cq.arm(true);
    rig.push(3);
    assert_eq!(rig.told(), 4, "and when it came before");
}

#[test]
fn moderation_counts() {
    let rig = Rig::new(64);
    rig.cq.set_moderation(Moderation { count: 3, period_us: 0 });
    rig.push(0);
    rig.cq.arm(false);
    assert!(!rig.push(1), "no period, no timer");
    rig.push(2);
    assert_eq!((rig.told(), rig.cq.next_timeout()), (0, None));
    rig.push(3);
    assert_eq!(rig.told(), 1);
    rig.cq.arm(false);
    rig.cq.push(failed());
    assert_eq!(rig.told(), 2, "failures are told at once");
    rig.cq.arm(false);
    rig.push(4);
    rig.push(5);
    rig.cq.set_moderation(Moderation { count: 2, period_us: 0 });
    assert_eq!(rig.told(), 3, "two are held already");
}

#[test]
fn moderation_period_ends_the_wait() {
    let rig = Rig::new(64);
    rig.cq.set_moderation(Moderation { count: 100, period_us: 50 });
    rig.cq.on_timer(1);
    assert_eq!(rig.cq.next_timeout(), None);
    rig.cq.arm(false);
    assert!(rig.push(1), "the period begins");
    assert!(!rig.push(2), "and goes on");
    assert_eq!(rig.cq.next_timeout(), Some(0), "the clock is told at once");
    rig.cq.on_timer(1_000_000);
    assert_eq!(rig.cq.next_timeout(), Some(1_050_000));
    rig.cq.on_timer(1_049_999);
    assert_eq!(rig.told(), 0);
    rig.cq.on_timer(1_050_000);
    assert_eq!((rig.told(), rig.cq.next_timeout()), (1, None));
}

#[test]
fn a_disarmed_queue_tells_nothing_that_it_held_back() {
    let rig = Rig::new(64);
    rig.cq.set_moderation(Moderation { count: 100, period_us: 50 });
    rig.cq.arm(false);
    assert!(rig.push(1));
    rig.cq.on_timer(1_000_000);
    rig.cq.disarm();
    rig.cq.on_timer(2_000_000);
    assert_eq!((rig.told(), rig.cq.next_timeout()), (0, None));
}

#[test]
fn an_overrun_is_told_once_and_counted() {
    let rig = Rig::new(2);
    rig.push(1);
    rig.push(2);
    assert!(!rig.cq.is_bad());
    rig.push(3);
    assert!(rig.cq.is_bad());
    assert_eq!(rig.events.next_event().unwrap(), AsyncEvent::Cq { cookie: 77 });
    assert_eq!(rig.cq.poll_one().unwrap().wr_id, 1, "what is there can be polled");
    rig.push(4);
    assert_eq!(rig.cq.lost(), 2, "nothing is taken any more");
    assert_eq!(rig.cq.poll_one().unwrap().wr_id, 2);
    assert!(rig.cq.poll_one().is_none());
    assert_eq!(rig.events.unread(ferroce_core::EventSource::Cq(77)), 0, "told once");
}

#[test]
fn capacity_has_limits() {
    let events = Arc::new(AsyncQueue::new().unwrap());
    for bad in [0, limits::MAX_CQE + 1, u32::MAX] {
        assert_eq!(Cq::new(bad, None, Arc::clone(&events), 1).unwrap_err().errno, libc::EINVAL);
    }
    let rig = Rig::new(4);
    for wr_id in 0..3 {
        rig.push(wr_id);
    }
    for bad in [0, 2, limits::MAX_CQE + 1] {
        assert_eq!(rig.cq.resize(bad).unwrap_err().errno, libc::EINVAL, "{bad}");
    }
    assert_eq!(rig.cq.capacity(), 4);
    rig.cq.resize(3).unwrap();
    assert_eq!((rig.cq.capacity(), rig.cq.len()), (3, 3));
    rig.cq.resize(5).unwrap();
    for wr_id in 0..2 {
        rig.push(wr_id);
    }
    assert!(!rig.cq.is_bad());
}

#[test]
fn producers_keep_their_order() {
    const EACH: u64 = 20_000;
    let rig = Rig::new(limits::MAX_CQE);
    let mut next = [0; 2];
    std::thread::scope(|scope| {
        for producer in 0..2 {
            let cq = &rig.cq;
            scope.spawn(move || {
                for wr_id in 0..EACH {
                    cq.push(completion(wr_id, producer));
                }
            });
        }
        let mut batch = [completion(0, 0); 8];
        while next != [EACH; 2] {
            let count = rig.cq.poll(&mut batch);
            for polled in &batch[..count] {
                let expected = &mut next[polled.qp_num as usize];
                assert_eq!(polled.wr_id, *expected);
                *expected += 1;
            }
        }
    });
    assert!(rig.cq.is_empty());
}

#[derive(Clone, Debug)]
enum Step {
    Push(u32),
    Poll(usize),
    PollOne,
    Purge(u32),
    Resize(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u32..3).prop_map(Step::Push),
        2 => (0usize..5).prop_map(Step::Poll),
        2 => Just(Step::PollOne),
        1 => (0u32..3).prop_map(Step::Purge),
        1 => (0u32..12).prop_map(Step::Resize),
    ]
}

proptest! {
    /// Against a plain queue.
    #[test]
    fn it_is_a_bounded_queue(steps in prop::collection::vec(step(), 0..200)) {
        let rig = Rig::new(8);
        let (mut model, mut capacity, mut lost) = (VecDeque::<Completion>::new(), 8, 0);
        for (wr_id, step) in steps.into_iter().enumerate() {
            match step {
                Step::Push(qp) => {
                    let pushed = completion(wr_id as u64, qp);
                    rig.cq.push(pushed);
                    if lost > 0 || model.len() >= capacity { lost += 1 } else { model.push_back(pushed) }
                }
                Step::Poll(max) => {
                    let mut batch = vec![completion(0, 0); max];
                    let count = rig.cq.poll(&mut batch);
                    let expected: Vec<_> = model.drain(..max.min(model.len())).collect();
                    prop_assert_eq!(&batch[..count], &expected[..]);
                }
                Step::PollOne => prop_assert_eq!(rig.cq.poll_one(), model.pop_front()),
                Step::Purge(qp) => {
                    let before = model.len();
                    model.retain(|left| left.qp_num != qp);
                    prop_assert_eq!(rig.cq.purge(qp), before - model.len());
                }
                Step::Resize(to) => {
                    let fits = to > 0 && to as usize >= model.len();
                    prop_assert_eq!(rig.cq.resize(to).is_ok(), fits);
                    if fits { capacity = to as usize }
                }
            }
            prop_assert_eq!(rig.cq.len() as usize, model.len());
            prop_assert_eq!(rig.cq.lost(), lost);
            prop_assert_eq!(rig.cq.is_bad(), lost > 0);
        }
    }
}
