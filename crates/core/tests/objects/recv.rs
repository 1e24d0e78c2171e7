//! Receive queues, own and shared.

use std::sync::Arc;

use ferroce_core::{AsyncEvent, AsyncQueue, EventSource, RecvQueue, Srq, SrqEvent, limits};
use ferroce_transport::{RecvWr, Sge};

fn request(wr_id: u64, elements: usize) -> RecvWr {
    let sge = Sge { addr: 0, length: 1, lkey: 1 };
    RecvWr { wr_id, sges: std::iter::repeat_n(sge, elements).collect() }
}

#[test]
fn requests_leave_in_order_and_are_bounded() {
    let queue = RecvQueue::new(2, 3).unwrap();
    assert!(queue.pop().is_none());
    queue.post(request(1, 0)).unwrap();
    queue.post(request(2, 3)).unwrap();
    assert_eq!(queue.post(request(3, 1)).unwrap_err().errno, libc::ENOMEM);
    assert_eq!(queue.len(), 2);
    assert_eq!(queue.pop(), Some(request(1, 0)));
    assert_eq!(queue.post(request(3, 4)).unwrap_err().errno, libc::EINVAL, "one element too many");
    queue.post(request(3, 1)).unwrap();
    assert_eq!(queue.clear(), 2);
    assert!(queue.is_empty() && queue.pop().is_none());
}

#[test]
fn queues_have_limits() {
    assert!(RecvQueue::new(0, 0).unwrap().post(request(1, 0)).is_err(), "a queue for nothing");
    assert_eq!(RecvQueue::new(limits::MAX_QP_WR + 1, 1).unwrap_err().errno, libc::EINVAL);
    assert_eq!(RecvQueue::new(1, limits::MAX_SGE + 1).unwrap_err().errno, libc::EINVAL);
    let events = Arc::new(AsyncQueue::new().unwrap());
    for (max_wr, max_sge) in [(0, 1), (limits::MAX_SRQ_WR + 1, 1), (1, limits::MAX_SRQ_SGE + 1)] {
        assert_eq!(Srq::new(max_wr, max_sge, Arc::clone(&events), 1).unwrap_err().errno, libc::EINVAL);
    }
}

/// A shared queue of 8 with 4 requests, and where its events go.
fn shared() -> (Srq, Arc<AsyncQueue>) {
    let events = Arc::new(AsyncQueue::new().unwrap());
    let srq = Srq::new(8, 2, Arc::clone(&events), 6).unwrap();
    (0..4).for_each(|wr_id| srq.post(request(wr_id, 1)).unwrap());
    (srq, events)
}

const SOURCE: EventSource = EventSource::Srq(6);

#[test]
fn the_limit_is_told_once() {
    let (srq, events) = shared();
    srq.modify(Some(3), None).unwrap();
    srq.pop().unwrap();
    assert_eq!((events.unread(SOURCE), srq.limit()), (0, 3), "three are not fewer than three");
    srq.pop().unwrap();
    assert_eq!((events.unread(SOURCE), srq.limit()), (1, 0));
    srq.pop().unwrap();
    assert_eq!(events.unread(SOURCE), 1, "disarmed");
    assert_eq!(events.next_event().unwrap(), AsyncEvent::Srq { cookie: 6, event: SrqEvent::LimitReached });
    srq.modify(Some(2), None).unwrap();
    assert_eq!((events.unread(SOURCE), srq.limit()), (1, 0), "below it already");
    srq.modify(Some(0), None).unwrap();
    srq.pop().unwrap();
    assert_eq!(events.unread(SOURCE), 1, "0 disarms");
}

#[test]
fn a_shared_queue_is_resized() {
    let (srq, events) = shared();
    for (limit, max_wr) in [(Some(9), None), (None, Some(3)), (None, Some(limits::MAX_SRQ_WR + 1)), (Some(6), Some(5))]
    {
        assert_eq!(srq.modify(limit, max_wr).unwrap_err().errno, libc::EINVAL, "{limit:?} {max_wr:?}");
    }
    assert_eq!((srq.limit(), srq.queue().max_wr()), (0, 8), "nothing was changed");
    srq.modify(Some(4), Some(5)).unwrap();
    srq.post(request(4, 1)).unwrap();
    assert_eq!(srq.post(request(5, 1)).unwrap_err().errno, libc::ENOMEM);
    srq.modify(None, Some(6)).unwrap();
    srq.post(request(5, 1)).unwrap();
    assert_eq!((srq.limit(), events.unread(SOURCE)), (4, 0));
    assert_eq!(srq.modify(None, Some(6)), Ok(()));
}
