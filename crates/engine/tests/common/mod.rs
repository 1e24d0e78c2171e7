//! A card with one lane, one queue pair and one buffer.

#![allow(dead_code, reason = "each test binary uses some of it")]

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferroce_core::{AsyncQueue, Buffer, Cq, RecvQueue};
use ferroce_engine::{Card, Lane, QueueCaps, QueuePair, QueuePairInit, RecvSource, Relay};
use ferroce_link::Link;
use ferroce_link::ring::WakeSocket;
use ferroce_transport::{
    Access, Completion, PathAddr, QpAttr, QpAttrMask, QpInit, QpState, QpType, SendData, SendFlags, SendOp, SendWr, Sge,
};
use ferroce_wire::Psn;

/// See the module's text.
pub(crate) struct Node {
    pub(crate) card: Card,
    pub(crate) lane: Arc<Lane>,
    pub(crate) cq: Arc<Cq>,
    pub(crate) qp: Arc<QueuePair>,
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) key: u32,
}

pub(crate) const BYTES: usize = 1 << 20;
pub(crate) const PD: u32 = 1;

/// What the lane of a node is made with.
pub(crate) struct Parts {
    pub(crate) link: Box<dyn Link>,
    pub(crate) sleep: Vec<OwnedFd>,
    pub(crate) relay: Option<Box<dyn Relay>>,
    pub(crate) wake: Option<WakeSocket>,
}

pub(crate) fn node(number: u16, parts: Parts) -> Node {
    let card = Card::new(u64::from(number));
    let Parts { link, sleep, relay, wake } = parts;
    let lane = Lane::open(number, 7, Arc::clone(card.keys()), link, relay, sleep, wake).expect("a lane");
    card.add_lane(Arc::clone(&lane));
    let events = Arc::new(AsyncQueue::new().expect("an event queue"));
    let cq = Arc::new(Cq::new(1024, None, Arc::clone(&events), 0).expect("a completion queue"));
    let qp = lane
        .create_qp(QueuePairInit {
            transport: QpInit { qpn: 0, qp_type: QpType::Rc, pd: PD, has_srq: false, max_send_wr: 128 },
            caps: QueueCaps {
                max_send_wr: 128,
                max_recv_wr: 128,
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline_data: 64,
            },
            sq_sig_all: true,
            send_cq: Some(Arc::clone(&cq)),
            recv_cq: Some(Arc::clone(&cq)),
            recv: RecvSource::Own(Arc::new(RecvQueue::new(128, 2).expect("a receive queue"))),
            events,
            cookie: 0,
            device: 1,
        })
        .expect("a queue pair");
    let buffer = Arc::new(Buffer::new(BYTES));
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let key = card.keys().register_buffer(PD, &buffer, access).expect("a region").lkey;
    Node { card, lane, cq, qp, buffer, key }
}

pub(crate) fn connect(node: &Node, own: u8, peer: u8, dest_qpn: u32) {
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
        // A busy machine is not a fault: half a minute until it gives up.
        timeout: 18,
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

impl Node {
    pub(crate) fn post(&self, wr_id: u64, op: SendOp, length: u32) {
        let sge = Sge { addr: self.buffer.addr(), length, lkey: self.key };
        let data = SendData::Sges([sge].into_iter().collect());
        self.qp
            .post_send(SendWr { wr_id, op, flags: SendFlags::empty(), data, ud: None, xrc_srqn: None })
            .expect("room");
        self.qp.ring();
    }

    /// Waits for a completion; with `polling` off it only looks at the queue and leaves the work to the progress thread.
    pub(crate) fn wait(&self, polling: bool) -> Completion {
        let start = Instant::now();
        loop {
            if let Some(completion) = self.cq.poll_one() {
                return completion;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "no completion came");
            if polling {
                self.card.turn();
            } else {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    pub(crate) fn bytes(&self, len: usize) -> Vec<u8> {
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

pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 253) as u8).collect()
}
