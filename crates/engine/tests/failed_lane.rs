//! A broken invariant in a program's own thread ends the lane: nobody goes on with what it left half changed.

use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ThreadId;

use ferroce_core::AsyncEvent;
use ferroce_link::{Link, LinkStats, SendError};
use ferroce_transport::{PathAddr, QpAttr, QpAttrMask, SendData, SendFlags, SendOp, SendWr, Train};
use ferroce_wire::{Headers, NetHeader};

mod common;

use common::{Node, Parts, connect, node};

/// What the link panics in, and how often it was called.
#[derive(Default)]
struct Fuse {
    in_recv: AtomicBool,
    in_flush: AtomicBool,
    calls: AtomicU64,
}

/// A link that panics in one thread.
struct PanickingLink {
    fuse: Arc<Fuse>,
    victim: ThreadId,
}

impl PanickingLink {
    fn called(&self, armed: &AtomicBool) {
        self.fuse.calls.fetch_add(1, Ordering::Relaxed);
        if armed.load(Ordering::Relaxed) && std::thread::current().id() == self.victim {
            panic!("on purpose");
        }
    }
}

impl Link for PanickingLink {
    fn send(&mut self, _cookie: u64, _src_qpn: u32, _path: &PathAddr, _train: &Train) -> Result<(), SendError> {
        Ok(())
    }

    fn flush(&mut self, _failed: &mut dyn FnMut(u64, SendError)) {
        self.called(&self.fuse.in_flush);
    }

    fn recv(&mut self, _budget: usize, _sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8])) -> usize {
        self.called(&self.fuse.in_recv);
        0
    }

    fn rx_fds(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn stats(&self) -> LinkStats {
        LinkStats::default()
    }
}

fn connected() -> (Node, Arc<Fuse>) {
    let fuse = Arc::new(Fuse::default());
    let link = PanickingLink { fuse: Arc::clone(&fuse), victim: std::thread::current().id() };
    let node = node(1, Parts { link: Box::new(link), sleep: Vec::new(), relay: None, wake: None });
    connect(&node, 1, 2, 9 << 14 | 5);
    (node, fuse)
}

fn modify(node: &Node) -> Result<(), i32> {
    node.qp.modify(&QpAttr::default(), QpAttrMask::ACCESS_FLAGS).map_err(|error| error.errno)
}

/// Does `act` until it panics, as it does once it has the lane, and looks at what is left.
fn ends_the_lane(node: &Node, fuse: &Fuse, act: impl Fn(&Node)) {
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        loop {
            act(node);
        }
    }));
    assert!(panicked.is_err());
    let events = &node.qp.init().events;
    assert_eq!(events.try_event(), Some(AsyncEvent::DeviceFatal));
    let calls = fuse.calls.load(Ordering::Relaxed);
    // What panicked once would do so again.
    node.card.turn();
    node.lane.settle();
    assert_eq!(fuse.calls.load(Ordering::Relaxed), calls);
    let (op, data) = (SendOp::Send, SendData::Inline(Box::default()));
    let wr = SendWr { wr_id: 1, op, flags: SendFlags::empty(), data, ud: None, xrc_srqn: None };
    assert_eq!(node.qp.post_send(wr).map_err(|error| error.errno), Err(libc::EIO));
    assert_eq!(modify(node), Err(libc::EIO));
    assert!(!node.qp.prefer_ring(2 << 14 | 5, 7));
    // Looking and leaving is possible.
    node.qp.query().expect("it is there");
    node.lane.counters();
    node.qp.destroy();
    assert_eq!(events.try_event(), None, "told once");
    assert_eq!(fuse.calls.load(Ordering::Relaxed), calls);
}

#[test]
fn a_panic_in_a_program_that_polls_ends_the_lane() {
    let (node, fuse) = connected();
    fuse.in_recv.store(true, Ordering::Relaxed);
    ends_the_lane(&node, &fuse, |node| node.card.turn());
}

#[test]
fn a_panic_in_a_change_ends_the_lane() {
    let (node, fuse) = connected();
    fuse.in_flush.store(true, Ordering::Relaxed);
    ends_the_lane(&node, &fuse, |node| modify(node).expect("a change that may be"));
}
