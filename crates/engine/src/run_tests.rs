//! Turns of a lane one by one, with a link and a time of the test's own.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::RawFd;

use ferroce_core::{Cq, KeyTable, RecvQueue};
use ferroce_transport::{QpInit, QpType, RecvWr, SendData, SendFlags, SendOp, SendWr, WcStatus};
use ferroce_wire::{Aeth, Bth, MULTICAST_QPN, NetHeader, Opcode, Psn, Syndrome};
use parking_lot::Mutex;

use super::machines::Waiting;
use super::*;
use crate::lane::Lane;
use crate::queue_pair::{QueueCaps, QueuePairInit, RecvSource};

const MS: Nanos = 1_000_000;
const LANE: u16 = 1;
const SLOT: u16 = 2;
const QPN: u32 = (LANE as u32) << LANE_SHIFT | SLOT as u32;
const PEER: u32 = 0x8005;

/// What arrives, and the trains that left.
#[derive(Default)]
struct Wire {
    arriving: VecDeque<Headers>,
    left: Vec<Train>,
    /// Whose they were.
    senders: Vec<u32>,
}

struct TestLink(Arc<Mutex<Wire>>);

impl Link for TestLink {
    fn send(&mut self, _cookie: u64, src_qpn: u32, _path: &PathAddr, train: &Train) -> Result<(), SendError> {
        let mut wire = self.0.lock();
        wire.left.push(train.clone());
        wire.senders.push(src_qpn);
        Ok(())
    }

    fn flush(&mut self, _failed: &mut dyn FnMut(u64, SendError)) {}

    fn recv(&mut self, budget: usize, sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8])) -> usize {
        let net = NetHeader {
            src: address(2),
            dst: address(1),
            src_port: 1,
            tclass: 0,
            hop_limit: 64,
            udp_len: 0,
            ifindex: 0,
        };
        let mut wire = self.0.lock();
        let taken = budget.min(wire.arriving.len());
        for headers in wire.arriving.drain(..taken) {
            sink(&net, &headers, &[]);
        }
        taken
    }

    fn rx_fds(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn stats(&self) -> LinkStats {
        LinkStats::default()
    }
}

fn address(last: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
}

fn path(to: u8) -> Option<Arc<PathAddr>> {
    let (src, dst) = (address(1), address(to));
    Some(Arc::new(PathAddr { src, dst, ifindex: 0, tclass: 0, hop_limit: 64, flow_label: 0 }))
}

/// A lane that nothing comes to.
pub(crate) fn idle_lane() -> Arc<Lane> {
    let keys = Arc::new(KeyTable::new(7));
    Lane::open(LANE, 7, keys, Box::new(TestLink(Arc::default())), None, Vec::new(), None).expect("a lane")
}

fn queue_pair(slot: u16, lane: &Arc<Lane>) -> Arc<QueuePair> {
    let qpn = u32::from(LANE) << LANE_SHIFT | u32::from(slot);
    let events = Arc::new(AsyncQueue::new().expect("an event queue"));
    let cq = Arc::new(Cq::new(16, None, Arc::clone(&events), 0).expect("a completion queue"));
    let caps = QueueCaps { max_send_wr: 16, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
    let init = QueuePairInit {
        transport: QpInit { qpn, qp_type: QpType::Rc, pd: 1, has_srq: false, max_send_wr: caps.max_send_wr },
        caps,
        sq_sig_all: true,
        send_cq: Some(Arc::clone(&cq)),
        recv_cq: Some(cq),
        recv: RecvSource::Own(Arc::new(RecvQueue::new(1, 1).expect("a receive queue"))),
        events,
        cookie: 0,
        device: 2,
    };
    Arc::new(QueuePair::new(slot, qpn, init, Arc::clone(lane)))
}

/// A lane with one RC queue pair in RTS, connected to a peer that the test plays.
struct Bench {
    state: LaneState,
    shared: LaneShared,
    wire: Arc<Mutex<Wire>>,
    qp: Arc<QueuePair>,
    lane: Arc<Lane>,
}

impl Bench {
    fn new() -> Bench {
        let keys = Arc::new(KeyTable::new(7));
        let wire = Arc::new(Mutex::new(Wire::default()));
        // Only there because a queue pair has a lane; nothing runs in it.
        let lane = Lane::open(LANE, 7, Arc::clone(&keys), Box::new(TestLink(Arc::default())), None, Vec::new(), None);
        let lane = lane.expect("a lane");
        let qp = queue_pair(SLOT, &lane);
        let mut state = LaneState::new(Box::new(TestLink(Arc::clone(&wire))), None, None, Arc::default(), 7);
        state.insert(Arc::clone(&qp));
        let shared = LaneShared { number: LANE, keys };
        let mut bench = Bench { state, shared, wire, qp, lane };
        bench.connect(SLOT);
        bench
    }

    /// One more of the same.
    fn add(&mut self, slot: u16) -> Arc<QueuePair> {
        let qp = queue_pair(slot, &self.lane);
        self.state.insert(Arc::clone(&qp));
        self.connect(slot);
        qp
    }

    fn connect(&mut self, slot: u16) {
        use QpAttrMask as M;
        let attr = QpAttr {
            port_num: 1,
            path: path(2),
            dest_qpn: PEER,
            sq_psn: Psn::new(100),
            max_rd_atomic: 1,
            max_dest_rd_atomic: 1,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..QpAttr::default()
        };
        for (state, mask) in [
            (QpState::Init, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
            (QpState::Rtr, M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER),
            (QpState::Rts, M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC),
        ] {
            self.modify(slot, &QpAttr { state, ..attr.clone() }, M::STATE | mask);
        }
    }

    fn modify(&mut self, slot: u16, attr: &QpAttr, mask: QpAttrMask) {
        let qp = Arc::clone(&self.state.entries(slot).next().expect("it is there").qp);
        self.state.modify(&self.shared, &qp, attr, mask).expect("a change that may be");
    }

    fn turn(&mut self, now: Nanos, turn: Turn) {
        self.state.run(&self.shared, now, turn, &[]);
    }

    /// Posts a WRITE of nothing and sends it.
    fn write(&mut self, now: Nanos) {
        let qp = Arc::clone(&self.qp);
        self.write_by(now, &qp);
    }

    fn write_by(&mut self, now: Nanos, qp: &QueuePair) {
        let op = SendOp::Write { raddr: 0, rkey: 0 };
        let data = SendData::Sges(SmallVec::new());
        qp.post_send(SendWr { wr_id: 1, op, flags: SendFlags::empty(), data, ud: None, xrc_srqn: None }).expect("room");
        self.state.run(&self.shared, now, Turn::POST, &[qp.slot]);
    }

    fn ack(&self, psn: u32) {
        self.ack_to(QPN, psn);
    }

    fn ack_to(&self, qpn: u32, psn: u32) {
        let mut headers = Headers::new(Bth::new(Opcode::RC_ACKNOWLEDGE, qpn, Psn::new(psn)));
        headers.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: 1 });
        self.wire.lock().arriving.push_back(headers);
    }

    fn counted(&self, name: &str) -> u64 {
        let counters = self.state.counters();
        counters.iter().find(|(known, _)| *known == name).expect("a counter's name").1
    }

    fn statuses(&self) -> Vec<WcStatus> {
        std::iter::from_fn(|| self.qp.init.send_cq.as_ref()?.poll_one()).map(|completion| completion.status).collect()
    }
}

/// The lane did not run for a while, and many packets came: the answer is behind them.
#[test]
fn an_answer_that_waits_behind_others_comes_before_the_timer() {
    let mut bench = Bench::new();
    bench.write(MS);
    assert_eq!(bench.wire.lock().left.len(), 1);
    // Ghosts, more than one turn takes.
    (0..10 * RECEIVE_BUDGET).for_each(|_| bench.ack(99));
    bench.ack(100);
    bench.turn(5_000 * MS, Turn::PROGRAM);
    assert_eq!(bench.statuses(), [WcStatus::Success]);
    assert_eq!((bench.counted("probe_sent"), bench.counted("local_ack_timeout_err")), (0, 0));
    assert_eq!(bench.wire.lock().left.len(), 1, "nothing went out for it");
}

/// A program that polls may answer soon: the ACK waits a turn for that. One that sleeps for events answers late, and what its peer
/// takes from one channel for sends and receives shall come in the order of cards: first the ACK, then the answer.
#[test]
fn the_ack_of_what_raises_an_event_does_not_wait() {
    let mut bench = Bench::new();
    let send = |bench: &Bench, psn| {
        bench.qp.post_recv(RecvWr { wr_id: 1, sges: SmallVec::new() }).expect("room");
        let mut bth = Bth::new(Opcode::RC_SEND_ONLY, QPN, Psn::new(psn));
        bth.ack_req = true;
        bench.wire.lock().arriving.push_back(Headers::new(bth));
    };
    // It was just connected, and is looked at for that.
    bench.turn(1, Turn::PROGRAM);
    send(&bench, 0);
    bench.turn(MS, Turn::PROGRAM);
    assert!(bench.wire.lock().left.is_empty(), "it waits");
    bench.turn(2 * MS, Turn::PROGRAM);
    assert_eq!(bench.wire.lock().left.len(), 1);

    bench.qp.init.recv_cq.as_ref().expect("it receives").arm(false);
    send(&bench, 1);
    bench.turn(3 * MS, Turn::PROGRAM);
    assert_eq!(bench.wire.lock().left.len(), 2);
}

/// A poster does not read the link, so it cannot know that nothing came.
#[test]
fn a_poster_runs_no_timers() {
    let mut bench = Bench::new();
    bench.write(MS);
    bench.ack(100);
    bench.turn(2 * MS, Turn::PROGRAM);
    assert_eq!(bench.statuses(), [WcStatus::Success], "something a probe can repeat");
    bench.write(3 * MS);
    bench.ack(101);
    bench.turn(15 * MS, Turn::POST);
    assert_eq!(bench.counted("probe_sent"), 0);
    assert_eq!(bench.state.next_deadline().map(|at| at < 15 * MS), Some(true), "the lane wants a turn at once");
    bench.turn(15 * MS, Turn::PROGRESS);
    assert_eq!(bench.statuses(), [WcStatus::Success]);
    assert_eq!(bench.counted("probe_sent"), 0);
    bench.write(20 * MS);
    bench.turn(100 * MS, Turn::PROGRESS);
    assert_eq!(bench.counted("probe_sent"), 1, "who reads runs them");
}

/// Many queue pairs wait for room in the window of one destination: what comes back with one ACK does not make the lane poll all of them,
/// and all get their turn.
#[test]
fn an_ack_does_not_wake_all_who_wait_for_the_window() {
    const COUNT: u16 = 300;
    let mut bench = Bench::new();
    let qps: Vec<_> = (0..COUNT).map(|n| bench.add(SLOT + 1 + n)).collect();
    qps.iter().for_each(|qp| bench.write_by(MS, qp));
    let in_line = |bench: &Bench| {
        let waits = |entry: &&Entry| entry.waiting.iter().any(|waiting| matches!(waiting, Waiting::InLine(_)));
        bench.state.entries(0).filter(waits).count()
    };
    let left = bench.wire.lock().left.len();
    assert_eq!(in_line(&bench) + left, usize::from(COUNT), "the window lets some go, the rest waits");
    assert!(left > 0 && in_line(&bench) > 100);
    // One answer, and what would be polled now.
    bench.ack_to(qps[0].qpn, 100);
    bench.state.receive(&bench.shared, MS, false);
    assert!(bench.state.machines.active.len() <= 2, "{} to be polled", bench.state.machines.active.len());
    // Two go without having sent: one that waits, and the one whose turn it is.
    let called = bench.state.entries(0).find(|entry| entry.waiting.iter().any(|w| matches!(w, Waiting::Called(_))));
    let called = Arc::clone(&called.expect("somebody's turn").qp);
    let last = Arc::clone(&qps[usize::from(COUNT) - 1]);
    for gone in [&called, &last] {
        bench.state.remove(&bench.shared, gone);
    }
    let mut answered = 1;
    while answered < usize::from(COUNT) - 2 {
        bench.turn(2 * MS, Turn::PROGRAM);
        let more = bench.wire.lock().senders[answered..].to_vec();
        assert!(!more.is_empty(), "{answered} sent, and nobody is called any more");
        more.iter().for_each(|qpn| bench.ack_to(*qpn, 100));
        answered += more.len();
    }
    while !bench.wire.lock().arriving.is_empty() {
        bench.turn(2 * MS, Turn::PROGRAM);
    }
    let done = |qp: &&Arc<QueuePair>| qp.init.send_cq.as_ref().is_some_and(|cq| cq.poll_one().is_some());
    assert_eq!(qps.iter().filter(done).count(), usize::from(COUNT) - 2);
    assert_eq!(in_line(&bench), 0);
    assert_eq!(bench.counted("probe_sent"), 0);
}

/// Strangers may send anything to a group: only datagrams for the multicast queue pair number reach its members, those of the interface.
#[test]
fn of_what_comes_by_a_group_only_datagrams_for_it_reach_members() {
    let mut bench = Bench::new();
    let (group, ifindex) = (IpAddr::from([239, 1, 2, 3]), 5);
    let net = NetHeader { src: address(2), dst: group, src_port: 1, tclass: 0, hop_limit: 1, udp_len: 0, ifindex };
    let came = |bench: &mut Bench, opcode, dest, net: &NetHeader| {
        let headers = Headers::new(Bth::new(opcode, dest, Psn::new(100)));
        let packet = Packet { headers: &headers, payload: &[], net };
        bench.state.machines.receive(&bench.shared, 0, &packet, false);
        let strays = bench.state.machines.strays;
        let received = bench.state.entries(0).next().expect("the queue pair").counters.snapshot();
        let received = received.iter().find(|(name, _)| *name == "rcvd_pkts").expect("a counter").1;
        (received, strays.bad_multicast, strays.no_member, strays.foreign_lane + strays.no_queue_pair)
    };
    use Opcode as O;
    assert_eq!(came(&mut bench, O::UD_SEND_ONLY, MULTICAST_QPN, &net), (0, 0, 1, 0), "nobody is attached");
    bench.state.attach(&bench.qp, Group { addr: group, ifindex }).expect("there is room");
    assert_eq!(came(&mut bench, O::UD_SEND_ONLY, MULTICAST_QPN, &net), (1, 0, 1, 0));
    assert_eq!(came(&mut bench, O::UD_SEND_ONLY, QPN, &net), (1, 1, 1, 0), "for a queue pair, but by the group");
    assert_eq!(came(&mut bench, O::UD_SEND_ONLY, 0x77_0001, &net), (1, 2, 1, 0), "another lane's: not relayed");
    assert_eq!(came(&mut bench, O::RC_SEND_ONLY, MULTICAST_QPN, &net), (1, 3, 1, 0));
    assert_eq!(came(&mut bench, O::FERROCE_FLOW, MULTICAST_QPN, &net), (1, 4, 1, 0));
    let elsewhere = NetHeader { ifindex: 6, ..net };
    assert_eq!(came(&mut bench, O::UD_SEND_ONLY, MULTICAST_QPN, &elsewhere), (1, 4, 2, 0));
    let unicast = NetHeader { dst: address(1), ..net };
    assert_eq!(came(&mut bench, O::UD_SEND_ONLY, MULTICAST_QPN, &unicast), (1, 4, 2, 1), "that lane is not ours");
    bench.state.detach(&bench.qp, Group { addr: group, ifindex }).expect("it is alive");
    assert_eq!(came(&mut bench, O::UD_SEND_ONLY, MULTICAST_QPN, &net), (1, 4, 3, 1));
}

/// A system call for each empty poll of a program whose packets come by rings would be most of what the poll costs.
#[test]
fn what_had_nothing_rests_a_moment_and_what_had_something_is_read_in_every_turn() {
    let mut watch = ReadWatch::default();
    watch.was_read(MS, 0);
    assert!(!watch.is_due(MS) && !watch.is_due(MS + UNREAD_NS - 1));
    assert!(watch.is_due(MS + UNREAD_NS));
    watch.was_read(2 * MS, 1);
    watch.was_read(2 * MS + 1, 0);
    assert!(watch.is_due(2 * MS + 1) && watch.is_due(2 * MS + BUSY_NS - 1));
    watch.was_read(2 * MS + BUSY_NS, 0);
    assert!(!watch.is_due(2 * MS + BUSY_NS));
}
