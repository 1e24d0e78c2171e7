//! Descriptors of completion channels and asynchronous events.

use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ferroce_core::{AsyncEvent, AsyncQueue, CompChannel, Cq, EventSource, PortEvent, SrqEvent};
use ferroce_transport::QpEvent;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ioctl_fionbio;

use crate::completion;

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

fn cq_on(channel: &Arc<CompChannel>, cookie: u64) -> Cq {
    Cq::new(16, Some(Arc::clone(channel)), Arc::new(AsyncQueue::new().unwrap()), cookie).unwrap()
}

fn tell(cq: &Cq) {
    cq.arm(false);
    cq.push(completion(1, 1));
}

#[test]
fn the_descriptor_is_readable_while_events_wait() {
    let channel = Arc::new(CompChannel::new().unwrap());
    let (first, second) = (cq_on(&channel, 1), cq_on(&channel, 2));
    assert!(!is_readable(channel.as_fd()));
    tell(&second);
    tell(&first);
    assert!(is_readable(channel.as_fd()));
    assert_eq!(channel.next_event().unwrap(), 2, "in order");
    assert!(is_readable(channel.as_fd()), "one remains");
    assert_eq!(channel.next_event().unwrap(), 1);
    assert!(!is_readable(channel.as_fd()));
}

#[test]
fn the_programs_nonblocking_flag_is_obeyed() {
    let channel = Arc::new(CompChannel::new().unwrap());
    ioctl_fionbio(channel.as_fd(), true).unwrap();
    assert_eq!(channel.next_event().unwrap_err().kind(), ErrorKind::WouldBlock);
    tell(&cq_on(&channel, 5));
    assert_eq!(channel.next_event().unwrap(), 5);
    assert_eq!(channel.next_event().unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn a_sleeper_is_woken() {
    let channel = Arc::new(CompChannel::new().unwrap());
    let cq = cq_on(&channel, 9);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| channel.next_event().unwrap());
        tell(&cq);
        assert_eq!(sleeper.join().unwrap(), 9);
    });
}

/// Two sleepers and as many events as both take: each event is handed out once, none is lost.
#[test]
fn sleepers_share_the_events() {
    const EACH: usize = 2_000;
    let channel = Arc::new(CompChannel::new().unwrap());
    let cqs = [cq_on(&channel, 0), cq_on(&channel, 1)];
    let mut seen = [0; 2];
    std::thread::scope(|scope| {
        let take = || (0..EACH).map(|_| channel.next_event().unwrap()).collect::<Vec<_>>();
        let sleepers = [scope.spawn(take), scope.spawn(take)];
        for _ in 0..EACH {
            for cq in &cqs {
                tell(cq);
                cq.poll_one().unwrap();
            }
        }
        for cookie in sleepers.into_iter().flat_map(|sleeper| sleeper.join().unwrap()) {
            seen[cookie as usize] += 1;
        }
    });
    assert_eq!(seen, [EACH; 2]);
    assert_eq!(channel.forget(0), EACH as u64, "handed out over its life");
}

#[test]
fn forgotten_events_do_not_wake_anybody() {
    let channel = Arc::new(CompChannel::new().unwrap());
    let (kept, gone) = (cq_on(&channel, 1), cq_on(&channel, 2));
    tell(&gone);
    assert_eq!(channel.next_event().unwrap(), 2);
    tell(&gone);
    tell(&kept);
    tell(&gone);
    assert_eq!(channel.forget(2), 1, "one was read");
    assert_eq!(channel.unread(2), 0);
    assert!(is_readable(channel.as_fd()));
    assert_eq!(channel.next_event().unwrap(), 1);
    assert!(!is_readable(channel.as_fd()), "their tokens are gone too");
    assert_eq!(channel.forget(2), 0, "a new queue at the same address starts anew");
}

/// Events that come and are forgotten while somebody reads: the reader gets every event of the queue that stays.
#[test]
fn forgetting_races_with_reading() {
    const ROUNDS: usize = 5_000;
    let channel = Arc::new(CompChannel::new().unwrap());
    let (kept, gone) = (cq_on(&channel, 1), cq_on(&channel, 2));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut count = 0;
            while count < ROUNDS {
                count += usize::from(channel.next_event().unwrap() == 1);
            }
        });
        for _ in 0..ROUNDS {
            tell(&gone);
            tell(&kept);
            channel.forget(2);
            gone.poll_one().unwrap();
            kept.poll_one().unwrap();
        }
        reader.join().unwrap();
    });
    channel.forget(2);
    assert!(!is_readable(channel.as_fd()));
}

#[test]
fn asynchronous_events_arrive_in_order() {
    let queue = AsyncQueue::new().unwrap();
    let events = [
        AsyncEvent::Qp { cookie: 1, qpn: 17, event: QpEvent::CommEst },
        AsyncEvent::Srq { cookie: 2, event: SrqEvent::LimitReached },
        AsyncEvent::Port { port: 1, event: PortEvent::Active },
        AsyncEvent::Qp { cookie: 1, qpn: 17, event: QpEvent::Fatal },
        AsyncEvent::DeviceFatal,
    ];
    events.iter().for_each(|&event| queue.push(event));
    assert_eq!(queue.unread(EventSource::Qp(1)), 2);
    assert_eq!(queue.next_event().unwrap(), events[0]);
    assert_eq!(queue.forget(EventSource::Qp(1)), 1);
    for expected in [events[1], events[2], events[4]] {
        assert_eq!(queue.next_event().unwrap(), expected);
    }
    assert!(!is_readable(queue.as_fd()));
    assert_eq!(events.map(|event| event.event_type()), [4, 15, 9, 1, 8], "values of enum ibv_event_type");
    assert_eq!(AsyncEvent::Cq { cookie: 0 }.event_type(), 0);
}
