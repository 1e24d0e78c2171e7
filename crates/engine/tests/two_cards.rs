//! Two cards of one process, joined by a wire in memory: the lanes, doorbells and progress threads without sockets.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferroce_core::{Buffer, RawRegion};
use ferroce_engine::packets;
use ferroce_link::{Link, LinkStats, SendError};
use ferroce_transport::{
    Access, PathAddr, RecvWr, SendData, SendFlags, SendOp, SendWr, Sge, Train, WcFlags, WcOpcode, WcStatus,
};
use ferroce_wire::{Headers, NetHeader};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

mod common;

use common::{BYTES, Node, PD, Parts, connect, node, pattern};

type Packet = (NetHeader, Headers, Vec<u8>);

/// One direction of the wire.
struct Pipe {
    packets: Mutex<VecDeque<Packet>>,
    ready: EventFd,
}

impl Pipe {
    fn new() -> Arc<Pipe> {
        let ready = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).expect("an eventfd");
        Arc::new(Pipe { packets: Mutex::default(), ready })
    }
}

struct MemoryLink {
    tx: Arc<Pipe>,
    rx: Arc<Pipe>,
}

impl Link for MemoryLink {
    fn send(&mut self, _cookie: u64, _src_qpn: u32, path: &PathAddr, train: &Train) -> Result<(), SendError> {
        let mut bytes = vec![0; train.len as usize];
        packets::load(train, &mut bytes).map_err(|_| SendError::Fault)?;
        let mut queue = self.tx.packets.lock();
        for index in 0..train.packets {
            let (headers, range) = packets::packet(train, index);
            let payload = bytes[range].to_vec();
            queue.push_back((packets::net_header(path, &headers, payload.len()), headers, payload));
        }
        drop(queue);
        self.tx.ready.write(1).expect("the counter has room");
        Ok(())
    }

    fn flush(&mut self, _failed: &mut dyn FnMut(u64, SendError)) {}

    fn recv(&mut self, budget: usize, sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8])) -> usize {
        let taken: Vec<Packet> = {
            let mut queue = self.rx.packets.lock();
            let count = queue.len().min(budget * 8);
            queue.drain(..count).collect()
        };
        if self.rx.packets.lock().is_empty() {
            let _ = self.rx.ready.read();
        }
        for (net, headers, payload) in &taken {
            sink(net, headers, payload);
        }
        taken.len()
    }

    fn rx_fds(&self) -> Vec<RawFd> {
        vec![self.rx.ready.as_fd().as_raw_fd()]
    }

    fn stats(&self) -> LinkStats {
        LinkStats::default()
    }
}

fn wired(tx: &Arc<Pipe>, rx: &Arc<Pipe>) -> Parts {
    let sleep = rx.ready.as_fd().try_clone_to_owned().expect("a descriptor");
    let link = Box::new(MemoryLink { tx: Arc::clone(tx), rx: Arc::clone(rx) });
    Parts { link, sleep: vec![sleep], relay: None, wake: None }
}

fn connected() -> (Node, Node) {
    let (there, back) = (Pipe::new(), Pipe::new());
    let a = node(1, wired(&there, &back));
    let b = node(2, wired(&back, &there));
    connect(&a, 1, 2, b.qp.qpn());
    connect(&b, 2, 1, a.qp.qpn());
    (a, b)
}

#[test]
fn every_kind_of_request_moves_its_bytes() {
    let (a, b) = connected();
    let (raddr, rkey) = (b.buffer.addr(), b.key);
    for polling in [true, false] {
        for len in [0, 1, 63, 1023, 1024, 1025, 61_440, 61_441, BYTES] {
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
            a.post(3, SendOp::SendImm { imm: 0x1234_5678 }, len as u32);
            assert_eq!(a.wait(polling).status, WcStatus::Success, "SEND of {len}");
            let received = b.wait(polling);
            assert_eq!((received.opcode, received.byte_len, received.imm), (WcOpcode::Recv, len as u32, 0x1234_5678));
            assert!(received.flags.contains(WcFlags::WITH_IMM));
            assert_eq!(b.bytes(len), pattern(len));
        }
    }
}

#[test]
fn threads_that_post_to_one_queue_pair_lose_nothing() {
    let (a, b) = connected();
    let (raddr, rkey) = (b.buffer.addr(), b.key);
    const THREADS: u64 = 4;
    const EACH: u64 = 500;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let a = &a;
            scope.spawn(move || {
                for n in 0..EACH {
                    let data = SendData::Inline(Box::new([1; 8]));
                    let wr = SendWr {
                        wr_id: thread * EACH + n,
                        op: SendOp::Write { raddr, rkey },
                        flags: SendFlags::INLINE,
                        data,
                        ud: None,
                        xrc_srqn: None,
                    };
                    while a.qp.post_send(wr.clone()).is_err() {
                        std::thread::yield_now();
                    }
                    a.qp.ring();
                }
            });
        }
        let mut seen = vec![false; (THREADS * EACH) as usize];
        for _ in 0..THREADS * EACH {
            let completion = a.wait(false);
            assert_eq!(completion.status, WcStatus::Success);
            assert!(!std::mem::replace(&mut seen[completion.wr_id as usize], true), "completed twice");
        }
    });
    assert_eq!(a.cq.poll_one(), None);
}

#[test]
fn destroying_a_queue_pair_under_traffic_leaves_no_completion_of_it() {
    let (a, b) = connected();
    let (raddr, rkey) = (b.buffer.addr(), b.key);
    for n in 0..64 {
        a.post(n, SendOp::Write { raddr, rkey }, 65_536);
    }
    a.qp.destroy();
    assert_eq!(a.cq.poll_one(), None);
    std::mem::forget(a);
    b.lane.close();
}

/// The ACK of a message may wait for the program's answer: not when the program answers by destroying the queue pair.
#[test]
fn the_last_message_is_acknowledged_although_its_receiver_leaves_at_once() {
    for _ in 0..20 {
        let (a, b) = connected();
        let sge = Sge { addr: b.buffer.addr(), length: 64, lkey: b.key };
        b.qp.post_recv(RecvWr { wr_id: 9, sges: [sge].into_iter().collect() }).expect("room");
        // A program that polls gets the message itself, not by the progress thread.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(5) {
            b.card.turn();
        }
        a.post(1, SendOp::Send, 64);
        assert_eq!(b.wait(true).wr_id, 9);
        b.qp.destroy();
        assert_eq!(a.wait(false).status, WcStatus::Success);
        a.qp.destroy();
        // Both are destroyed; only the lanes are left to close.
        for node in [a, b] {
            node.lane.close();
            std::mem::forget(node);
        }
    }
}

/// A region whose addresses begin at 0 may lie anywhere: an atomic on an aligned address of it need not be one on aligned memory.
#[test]
fn an_atomic_on_misaligned_memory_is_refused() {
    let (a, b) = connected();
    let buffer = Buffer::new(64);
    // SAFETY: the buffer outlives the cards' use of it.
    let region = unsafe { RawRegion::new(buffer.addr() as usize + 4, 32) };
    let access = Access::LOCAL_WRITE | Access::REMOTE_ATOMIC | Access::ZERO_BASED;
    let rkey = b.card.keys().register(PD, region, 0, access).expect("a region").rkey;
    a.post(1, SendOp::FetchAdd { raddr: 8, rkey, add: 1 }, 8);
    assert_eq!(a.wait(true).status, WcStatus::RemInvReqErr);
    let mut bytes = [0xff; 64];
    buffer.read(0, &mut bytes);
    assert_eq!(bytes, [0; 64]);
    b.card.deregister(rkey).expect("it is registered");
}

#[test]
fn what_queue_pairs_did_can_be_seen_and_outlives_them_in_their_device() {
    let (a, b) = connected();
    let value = |counters: ferroce_engine::CounterSnapshot, name: &str| {
        counters.into_iter().find(|(known, _)| *known == name).expect("a counter's name").1
    };
    a.post(1, SendOp::Write { raddr: b.buffer.addr(), rkey: b.key }, 3000);
    assert_eq!(a.wait(true).status, WcStatus::Success);

    let page = a.lane.queue_pairs(0);
    let [view] = page.views.as_slice() else { panic!("one queue pair: {page:?}") };
    assert_eq!((view.qpn, view.attr.dest_qpn, page.next), (a.qp.qpn(), b.qp.qpn(), None));
    assert_eq!((view.attr.state, view.carrier), (ferroce_transport::QpState::Rts, Some(ferroce_engine::Carrier::Link)));
    let standing = view.standing.expect("RC");
    assert_eq!((standing.una, standing.in_flight), (view.attr.sq_psn, 0), "all is answered");
    assert!(view.cqs.iter().all(|cq| cq.upgrade().is_some_and(|cq| Arc::ptr_eq(&cq, &a.cq))));
    assert_eq!(value(view.counters.snapshot(), "sent_pkts"), 3);
    assert_eq!(value(view.counters.snapshot(), "sent_bytes"), 3000);
    assert_eq!(value(view.counters.snapshot(), "ack_received"), 1);
    assert_eq!(value(b.lane.counters(), "rcvd_bytes"), 3000);

    let lane = Arc::clone(&a.lane);
    drop(a);
    assert!(lane.queue_pairs(0).views.is_empty());
    let devices = lane.device_counters();
    let [(1, counters)] = devices.as_slice() else { panic!("the nodes' device: {devices:?}") };
    assert_eq!(value(counters.snapshot(), "sent_bytes"), 3000);
}
