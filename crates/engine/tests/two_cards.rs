//! Two cards of one process, joined by a wire in memory: the lanes, doorbells and progress threads without sockets.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferroce_core::{AsyncQueue, Buffer, Cq, RawRegion, RecvQueue};
use ferroce_engine::{Card, Lane, QueueCaps, QueuePair, QueuePairInit, RecvSource, packets};
use ferroce_link::{Link, LinkStats, SendError};
use ferroce_transport::{
    Access, Completion, PathAddr, QpAttr, QpAttrMask, QpInit, QpState, QpType, RecvWr, SendData, SendFlags, SendOp,
    SendWr, Sge, Train, WcFlags, WcOpcode, WcStatus,
};
use ferroce_wire::{Headers, NetHeader, Psn};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;

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

struct Node {
    card: Card,
    lane: Arc<Lane>,
    cq: Arc<Cq>,
    qp: Arc<QueuePair>,
    buffer: Arc<Buffer>,
    key: u32,
}

const BYTES: usize = 1 << 20;
const PD: u32 = 1;

fn node(number: u16, tx: &Arc<Pipe>, rx: &Arc<Pipe>) -> Node {
    let card = Card::new(u64::from(number));
    let sleep: OwnedFd = rx.ready.as_fd().try_clone_to_owned().expect("a descriptor");
    let link = Box::new(MemoryLink { tx: Arc::clone(tx), rx: Arc::clone(rx) });
    let lane = Lane::open(number, 7, Arc::clone(card.keys()), link, None, vec![sleep], None).expect("a lane");
    card.add_lane(Arc::clone(&lane));
    let events = Arc::new(AsyncQueue::new().expect("an event queue"));
    let cq = Arc::new(Cq::new(1024, None, Arc::clone(&events), 0).expect("a completion queue"));
    let qp = lane
        .create_qp(QueuePairInit {
            transport: QpInit { qpn: 0, qp_type: QpType::Rc, pd: PD, has_srq: false },
            caps: QueueCaps {
                max_send_wr: 128,
                max_recv_wr: 128,
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline_data: 64,
            },
            sq_sig_all: true,
            send_cq: Arc::clone(&cq),
            recv_cq: Arc::clone(&cq),
            recv: RecvSource::Own(Arc::new(RecvQueue::new(128, 2).expect("a receive queue"))),
            events,
            cookie: 0,
        })
        .expect("a queue pair");
    let buffer = Arc::new(Buffer::new(BYTES));
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let key = card.keys().register_buffer(PD, &buffer, access).expect("a region").lkey;
    Node { card, lane, cq, qp, buffer, key }
}

fn connect(node: &Node, own: u8, peer: u8, dest_qpn: u32) {
    let address = |n| IpAddr::V4(Ipv4Addr::new(10, 0, 0, n));
    let path = PathAddr { src: address(own), dst: address(peer), ifindex: 0, tclass: 0, hop_limit: 64, flow_label: 0 };
    let mut attr = QpAttr {
        state: QpState::Init,
        port_num: 1,
        access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
        path: Some(Arc::new(path)),
        path_mtu: 1024,
        dest_qpn,
        rq_psn: Psn::new(100),
        sq_psn: Psn::new(100),
        max_rd_atomic: 16,
        max_dest_rd_atomic: 16,
        min_rnr_timer: 1,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        ..QpAttr::default()
    };
    let init = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
    node.qp.modify(&attr, init).expect("to INIT");
    attr.state = QpState::Rtr;
    let rtr = QpAttrMask::STATE
        | QpAttrMask::AV
        | QpAttrMask::PATH_MTU
        | QpAttrMask::DEST_QPN
        | QpAttrMask::RQ_PSN
        | QpAttrMask::MAX_DEST_RD_ATOMIC
        | QpAttrMask::MIN_RNR_TIMER;
    node.qp.modify(&attr, rtr).expect("to RTR");
    attr.state = QpState::Rts;
    let rts = QpAttrMask::STATE
        | QpAttrMask::TIMEOUT
        | QpAttrMask::RETRY_CNT
        | QpAttrMask::RNR_RETRY
        | QpAttrMask::SQ_PSN
        | QpAttrMask::MAX_QP_RD_ATOMIC;
    node.qp.modify(&attr, rts).expect("to RTS");
}

fn connected() -> (Node, Node) {
    let (there, back) = (Pipe::new(), Pipe::new());
    let a = node(1, &there, &back);
    let b = node(2, &back, &there);
    connect(&a, 1, 2, b.qp.qpn());
    connect(&b, 2, 1, a.qp.qpn());
    (a, b)
}

impl Node {
    fn post(&self, wr_id: u64, op: SendOp, length: u32) {
        let sge = Sge { addr: self.buffer.addr(), length, lkey: self.key };
        let data = SendData::Sges([sge].into_iter().collect());
        self.qp.post_send(SendWr { wr_id, op, flags: SendFlags::empty(), data, ud: None }).expect("room");
        self.qp.ring();
    }

    /// Waits for a completion; with `polling` off it only looks at the queue and leaves the work to the progress thread.
    fn wait(&self, polling: bool) -> Completion {
        let start = Instant::now();
        loop {
            if let Some(completion) = self.cq.poll_one() {
                return completion;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "no completion came");
            if polling {
                self.card.turn();
            } else {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.buffer.read(0, &mut bytes);
        bytes
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.qp.destroy();
        self.lane.close();
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 253) as u8).collect()
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
