//! Two cards of one process that talk through rings, with a relay of the test's own between them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferroce_engine::{Relay, Relayed, RingCall, RingWord};
use ferroce_link::ring::{WakeName, WakeSocket};
use ferroce_link::{Link, LinkStats, SendError};
use ferroce_transport::{PathAddr, RecvWr, SendOp, Sge, Train, WcStatus};
use ferroce_wire::{Headers, NetHeader};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

mod common;

use common::{BYTES, Node, Parts, connect, node, pattern};

/// A link that nothing goes over, but it tells what should have gone.
struct NoLink(Arc<Mutex<u32>>);

impl Link for NoLink {
    fn send(&mut self, _cookie: u64, _src_qpn: u32, _path: &PathAddr, train: &Train) -> Result<(), SendError> {
        *self.0.lock() += train.packets;
        Ok(())
    }

    fn flush(&mut self, _failed: &mut dyn FnMut(u64, SendError)) {}

    fn recv(&mut self, _budget: usize, _sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8])) -> usize {
        0
    }

    fn rx_fds(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn stats(&self) -> LinkStats {
        LinkStats::default()
    }
}

/// What waits for a lane, and what makes it look.
#[derive(Debug)]
struct Inbox {
    calls: Mutex<VecDeque<RingCall<OwnedFd>>>,
    ready: EventFd,
    /// Every message is lost.
    deaf: AtomicBool,
    /// Memory of the ring that was offered last.
    offered: Mutex<Option<OwnedFd>>,
}

impl Inbox {
    fn new() -> Arc<Inbox> {
        let ready = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).expect("an eventfd");
        Arc::new(Inbox { calls: Mutex::default(), ready, deaf: AtomicBool::new(false), offered: Mutex::default() })
    }

    fn put(&self, call: RingCall<OwnedFd>) {
        if let RingWord::Offer(memory) = &call.word {
            *self.offered.lock() = Some(memory.try_clone().expect("a descriptor"));
        }
        if !self.deaf.load(Ordering::Relaxed) {
            self.calls.lock().push_back(call);
            self.ready.write(1).expect("the counter has room");
        }
    }
}

/// The relay of one lane, as the service would run it: it puts the sender's lane and lease in.
#[derive(Debug)]
struct TestRelay {
    lane: u16,
    lease: u64,
    own: Arc<Inbox>,
    peer: Arc<Inbox>,
}

impl Relay for TestRelay {
    fn forward(&mut self, _net: &NetHeader, _packet: &[u8]) {
        panic!("no packet is on a wrong lane");
    }

    fn receive(&mut self, sink: &mut dyn FnMut(Relayed<'_>)) {
        let _ = self.own.ready.read();
        let calls = std::mem::take(&mut *self.own.calls.lock());
        calls.into_iter().for_each(|call| sink(Relayed::Ring(call)));
    }

    fn tell(&mut self, call: &RingCall<BorrowedFd<'_>>) {
        let word = match call.word {
            RingWord::Offer(memory) => RingWord::Offer(memory.try_clone_to_owned().expect("a descriptor")),
            RingWord::Accept => RingWord::Accept,
        };
        self.peer.put(RingCall { lane: self.lane, lease: self.lease, id: call.id, wake: call.wake, word });
    }
}

const LEASES: [u64; 2] = [0x1111, 0x2222];

struct Bench {
    a: Node,
    b: Node,
    inboxes: [Arc<Inbox>; 2],
    over_link: Arc<Mutex<u32>>,
}

/// Lanes 1 and 2, not connected yet.
fn bench() -> Bench {
    let inboxes = [Inbox::new(), Inbox::new()];
    let over_link = Arc::new(Mutex::new(0));
    let make = |at: usize| {
        let (own, peer) = (Arc::clone(&inboxes[at]), Arc::clone(&inboxes[1 - at]));
        let sleep = vec![own.ready.as_fd().try_clone_to_owned().expect("a descriptor")];
        let lane = at as u16 + 1;
        let relay = Box::new(TestRelay { lane, lease: LEASES[at], own, peer });
        let wake = Some(WakeSocket::bind().expect("a socket"));
        node(lane, Parts { link: Box::new(NoLink(Arc::clone(&over_link))), sleep, relay: Some(relay), wake })
    };
    let (a, b) = (make(0), make(1));
    Bench { a, b, inboxes, over_link }
}

impl Bench {
    /// Connects both at the same address.
    fn connect(&self) {
        connect(&self.a, 1, 1, self.b.qp.qpn());
        connect(&self.b, 1, 1, self.a.qp.qpn());
    }

    /// There is a ring, and both know of it. On a busy machine a peer may take longer than an offer is waited for: it is asked again.
    fn prefer_rings(&self) {
        eventually("a has a ring", || self.a.qp.prefer_ring(self.b.qp.qpn(), LEASES[1]));
        eventually("b has a ring", || self.b.qp.prefer_ring(self.a.qp.qpn(), LEASES[0]));
    }
}

/// Waits for something that must happen; the limit is there to end a test that fails.
fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(60);
    while !happened() {
        assert!(Instant::now() < give_up, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn counted(node: &Node, name: &str) -> u64 {
    node.lane.link_stats().iter().find(|(known, _)| *known == name).expect("a counter's name").1
}

/// WRITE, READ and SEND of several lengths from `a` to `b`.
fn talk(a: &Node, b: &Node, polling: bool) {
    let (raddr, rkey) = (b.buffer.addr(), b.key);
    for len in [0, 1, 1023, 1025, 61_441, BYTES] {
        a.buffer.write(0, &pattern(len));
        a.post(1, SendOp::Write { raddr, rkey }, len as u32);
        assert_eq!(a.wait(polling).status, WcStatus::Success, "WRITE of {len}");
        assert_eq!(b.bytes(len), pattern(len));
        b.buffer.write(0, &vec![9; len]);
        a.post(2, SendOp::Read { raddr, rkey }, len as u32);
        assert_eq!(a.wait(polling).status, WcStatus::Success, "READ of {len}");
        assert_eq!(a.bytes(len), vec![9; len]);
        let sge = Sge { addr: raddr, length: len as u32, lkey: rkey };
        b.qp.post_recv(RecvWr { wr_id: 77, sges: [sge].into_iter().collect() }).expect("room");
        a.buffer.write(0, &pattern(len));
        a.post(3, SendOp::Send, len as u32);
        assert_eq!(a.wait(polling).status, WcStatus::Success, "SEND of {len}");
        assert_eq!(b.wait(polling).byte_len, len as u32);
        assert_eq!(b.bytes(len), pattern(len));
    }
}

#[test]
fn every_kind_of_request_goes_through_the_ring_and_wakes_who_sleeps() {
    let bench = bench();
    for node in [&bench.a, &bench.b] {
        node.lane.borrow().expect("the lane lives");
    }
    bench.prefer_rings();
    bench.connect();
    for polling in [false, true] {
        talk(&bench.a, &bench.b, polling);
        talk(&bench.b, &bench.a, polling);
    }
    assert_eq!(*bench.over_link.lock(), 0);
    for node in [&bench.a, &bench.b] {
        assert!(counted(node, "ring_wakeups") > 0);
        for nothing in ["ring_broken", "ring_refused", "ring_rx_bad", "ring_rx_stranger", "ring_tx_drop_broken"] {
            assert_eq!(counted(node, nothing), 0, "{nothing}");
        }
    }
    for node in [&bench.a, &bench.b] {
        assert!(counted(node, "ring_tx_lent") > 0, "large WRITEs are fetched by the other end");
        assert_eq!(counted(node, "ring_rx_unfetched"), 0);
    }
    // An ACK that was asked for twice may still be under way.
    eventually("all is received", || counted(&bench.a, "ring_tx_packets") == counted(&bench.b, "ring_rx_packets"));
}

#[test]
fn two_offers_at_once_make_one_ring() {
    for _ in 0..20 {
        let bench = bench();
        std::thread::scope(|scope| {
            scope.spawn(|| bench.a.qp.prefer_ring(bench.b.qp.qpn(), LEASES[1]));
            scope.spawn(|| bench.b.qp.prefer_ring(bench.a.qp.qpn(), LEASES[0]));
        });
        // One that did not hear in time asks for what is there now.
        bench.prefer_rings();
        bench.connect();
        bench.a.post(1, SendOp::Write { raddr: bench.b.buffer.addr(), rkey: bench.b.key }, 100);
        assert_eq!(bench.a.wait(true).status, WcStatus::Success);
        assert_eq!(*bench.over_link.lock(), 0);
        assert_eq!(counted(&bench.a, "ring_refused") + counted(&bench.b, "ring_refused"), 0);
    }
}

#[test]
fn a_peer_that_hears_nothing_is_reached_over_the_link() {
    let bench = bench();
    bench.inboxes[1].deaf.store(true, Ordering::Relaxed);
    assert!(!bench.a.qp.prefer_ring(bench.b.qp.qpn(), LEASES[1]));
    bench.connect();
    bench.a.post(1, SendOp::Write { raddr: bench.b.buffer.addr(), rkey: bench.b.key }, 3_000);
    eventually("it goes over the link", || {
        bench.a.card.turn();
        *bench.over_link.lock() >= 3
    });
    assert_eq!(counted(&bench.a, "ring_tx_packets"), 0);
}

/// The answer to an offer is lost: who made it goes on over the link, and yet hears the one who took it.
#[test]
fn a_ring_that_only_one_end_knows_of_carries_its_packets() {
    let bench = bench();
    bench.inboxes[0].deaf.store(true, Ordering::Relaxed);
    assert!(!bench.a.qp.prefer_ring(bench.b.qp.qpn(), LEASES[1]));
    eventually("b has a ring", || bench.b.qp.prefer_ring(bench.a.qp.qpn(), LEASES[0]));
    bench.connect();
    bench.b.post(1, SendOp::Write { raddr: bench.a.buffer.addr(), rkey: bench.a.key }, 3_000);
    eventually("it comes through the ring", || counted(&bench.a, "ring_rx_packets") >= 3);
    eventually("its ACK goes over the link", || *bench.over_link.lock() > 0);
    assert_eq!((counted(&bench.a, "ring_rx_stranger"), counted(&bench.a, "ring_tx_packets")), (0, 0));
}

#[test]
fn packets_of_a_lane_that_a_queue_pair_is_not_connected_to_are_dropped() {
    let bench = bench();
    bench.prefer_rings();
    // Of the two only one is connected to the other.
    connect(&bench.a, 1, 1, bench.b.qp.qpn());
    connect(&bench.b, 1, 1, 3 << 14 | 5);
    bench.a.post(1, SendOp::Write { raddr: bench.b.buffer.addr(), rkey: bench.b.key }, 8);
    eventually("it is counted", || counted(&bench.b, "ring_rx_stranger") > 0);
    assert_eq!(bench.b.bytes(8), [0; 8]);
}

#[test]
fn a_new_lease_of_a_lane_has_a_ring_of_its_own() {
    let bench = bench();
    bench.prefer_rings();
    bench.connect();
    talk(&bench.a, &bench.b, true);
    // The lane is another process's now, so it seems: what the queue pair still sends is lost, and counted.
    bench.a.qp.prefer_ring(bench.b.qp.qpn(), 0x3333);
    bench.a.post(1, SendOp::Write { raddr: bench.b.buffer.addr(), rkey: bench.b.key }, 8);
    eventually("it is counted", || {
        bench.a.card.turn();
        counted(&bench.a, "ring_tx_drop_broken") > 0
    });
}

/// One end finds the ring broken: both ends know, and connect over the link.
#[test]
fn a_ring_that_one_end_breaks_is_used_by_neither() {
    let bench = bench();
    bench.prefer_rings();
    let memory = bench.inboxes[1].offered.lock().take().expect("a offered it");
    // The head of what comes to `a`: no position.
    std::fs::File::from(memory).write_all_at(&1u64.to_ne_bytes(), 512).expect("it takes bytes");
    eventually("a finds it broken", || {
        bench.a.card.turn();
        counted(&bench.a, "ring_broken") == 1
    });
    assert!(!bench.a.qp.prefer_ring(bench.b.qp.qpn(), LEASES[1]));
    assert!(!bench.b.qp.prefer_ring(bench.a.qp.qpn(), LEASES[0]), "told, whether it took a turn since or not");
    bench.connect();
    for (node, peer) in [(&bench.a, &bench.b), (&bench.b, &bench.a)] {
        let before = *bench.over_link.lock();
        node.post(1, SendOp::Write { raddr: peer.buffer.addr(), rkey: peer.key }, 8);
        eventually("it goes over the link", || {
            node.card.turn();
            *bench.over_link.lock() > before
        });
        assert_eq!(counted(node, "ring_tx_packets"), 0);
    }
    eventually("b found it given up", || counted(&bench.b, "ring_broken") == 1);
}

#[test]
fn garbage_that_is_offered_is_refused_and_changes_nothing() {
    let bench = bench();
    let wake = WakeSocket::bind().expect("a socket");
    let offer = |memory: OwnedFd, wake: WakeName| {
        let before = counted(&bench.b, "ring_refused");
        let word = RingWord::Offer(memory);
        bench.inboxes[1].put(RingCall { lane: 1, lease: LEASES[0], id: 5, wake, word });
        eventually("it is refused", || counted(&bench.b, "ring_refused") > before);
    };
    let (read, write) = std::io::pipe().expect("a pipe");
    offer(read.into(), wake.name());
    offer(write.into(), wake.name());
    offer(std::fs::File::open("/dev/zero").expect("it is there").into(), wake.name());
    // A ring whose maker cannot be woken.
    let (_, memory) = ferroce_link::ring::Ring::offer().expect("a ring");
    offer(memory, WakeName([0; 16]));
    let accept = RingCall { lane: 1, lease: LEASES[0], id: 5, wake: wake.name(), word: RingWord::Accept };
    bench.inboxes[1].put(accept);
    eventually("it is refused", || counted(&bench.b, "ring_refused") >= 5);
    bench.prefer_rings();
    bench.connect();
    talk(&bench.a, &bench.b, true);
    assert_eq!(*bench.over_link.lock(), 0);
}
