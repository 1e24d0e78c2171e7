//! From a plan to a world: nodes, memory, queue pairs, receive buffers, and the faults that are to come.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ferroce_transport::{Access, Nanos, PathAddr, Qp, QpInit, QpType};
use ferroce_wire::GRH_LEN;

use crate::log::Log;
use crate::memory::{Iova, MrId, Piece};
use crate::oracle::{Book, Oracle, Patience, Stream, WELL_MAX};
use crate::pattern::Pattern;
use crate::plan::{ConnPlan, EndPlan, MS, Plan};
use crate::program::{Cell, Connection, Program, ReceiveSource, ReceiveTarget, Resources};
use crate::random::Random;
use crate::windows::Windows;
use crate::world::{Domain, Entry, Event, Node, World};

/// Bits of a queue pair number behind the node's.
const QPN_BITS: u32 = 14;
/// Protection domain of all queue pairs that are not exposed.
const PD: u32 = 1;
/// A protection domain without queue pairs.
const FOREIGN_PD: u32 = 9;
/// Bytes of the words for atomics.
const WORDS: u32 = 64;
const FRAGILE: u32 = 5_000;
/// Largest path MTU, for UD receives: any sender may come.
const MTU_MAX: u32 = 4096;
/// Shortest time before giving up: what the transport documents as its floor.
const GIVE_UP_FLOOR: Nanos = 1_000 * MS;

impl World {
    /// Everything in place, connected, and the first events scheduled.
    pub(crate) fn new(plan: Plan, log: Log, random: Random) -> World {
        let mut world = World::empty(plan, log, random);
        world.add_nodes();
        let mut shared = Vec::new();
        let library = world.plan.conns.iter().map(|conn| conn.max_len).max().unwrap_or(0) + MTU_MAX;
        for node in 0..world.plan.nodes {
            let domain = world.add_domain(node, PD, library);
            shared.push(Shared { domain, srq: None });
        }
        for index in 0..world.plan.conns.len() {
            world.add_connection(index, &mut shared);
        }
        world.add_events();
        world
    }

    fn add_nodes(&mut self) {
        let address = |node: usize, ipv6: bool| match ipv6 {
            true => IpAddr::V6(Ipv6Addr::new(0xfd00, 0x66, 0, 0, 0, 0, 0, node as u16 + 1)),
            false => IpAddr::V4(Ipv4Addr::new(10, 66, 0, node as u8 + 1)),
        };
        let nodes = self.plan.nodes;
        for node in 0..nodes {
            let own = address(node, self.plan.ipv6);
            self.nodes.push(Node::new(node, nodes, own));
            self.by_address.insert(own, node);
        }
        let path = |from: usize, to: usize| {
            let (src, dst) = (self.nodes[from].address, self.nodes[to].address);
            Arc::new(PathAddr { src, dst, ifindex: 0, tclass: 0, hop_limit: 64, flow_label: 0 })
        };
        self.paths = (0..nodes).map(|from| (0..nodes).map(|to| path(from, to)).collect()).collect();
    }

    fn register(&mut self, node: usize, pd: u32, len: u32, access: Access) -> MrId {
        let key = self.unknown_key(node);
        let iova = self.random.pick(&[Iova::Real, Iova::Real, Iova::Zero, Iova::Top]);
        self.nodes[node].memory.register(pd, len, access, key, iova)
    }

    /// A region that is filled with a pattern and given out as a whole.
    fn register_filled(&mut self, node: usize, pd: u32, len: u32, access: Access, pattern: Pattern) -> (MrId, Piece) {
        let mr = self.register(node, pd, len, access);
        let piece = self.nodes[node].memory.whole(mr);
        pattern.fill(self.nodes[node].memory.write(piece.at, len));
        (mr, piece)
    }

    fn add_domain(&mut self, node: usize, pd: u32, library_len: u32) -> usize {
        let pattern = Pattern::random(&mut self.random);
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let atomic = Access::LOCAL_WRITE | Access::REMOTE_ATOMIC;
        let (_, words) = self.register_filled(node, pd, WORDS, atomic, pattern);
        let (_, library) = self.register_filled(node, pd, library_len, Access::REMOTE_READ, pattern);
        let (_, foreign) = self.register_filled(node, FOREIGN_PD, MTU_MAX, all, pattern);
        // Of exposed words nobody knows what becomes.
        for offset in (0..u64::from(WORDS)).step_by(8).filter(|_| pd == PD) {
            let word = self.nodes[node].memory.word(words.at + offset);
            self.oracle.words.insert(words.at + offset, word);
        }
        self.domains.push(Domain { pd, words, library, library_pattern: pattern, foreign });
        self.domains.len() - 1
    }

    fn add_connection(&mut self, index: usize, shared: &mut [Shared]) {
        let conn = self.plan.conns[index].clone();
        let first = self.qps.len();
        for end in 0..2 {
            let peer = first + 1 - end;
            self.add_end(&conn, (index, end), peer, shared);
        }
        let qps = [first, first + 1];
        self.conns.push(Connection { qps, reconnect_scheduled: false, reconnections: 0, is_dead: false });
        for qp in qps {
            self.oracle.books[qp].stream = self.new_stream(qp);
        }
        for qp in qps {
            self.connect(qp);
        }
    }

    fn add_end(&mut self, conn: &ConnPlan, (index, end): (usize, usize), peer: usize, shared: &mut [Shared]) {
        let qp = self.qps.len();
        let plan = conn.ends[end].clone();
        let node = plan.node;
        let mut own = Shared { domain: 0, srq: None };
        let shared = if conn.exposed {
            let pd = 100 + index as u32;
            own.domain = self.add_domain(node, pd, conn.max_len + MTU_MAX);
            &mut own
        } else {
            &mut shared[node]
        };
        let domain = shared.domain;
        let pd = self.domains[domain].pd;
        let memory = self.add_resources(conn, end, domain, pd);
        let srq = if plan.srq {
            match shared.srq {
                Some(found) => Some(found),
                None => Some(self.add_srq(conn, node, pd, plan.receive_depth.max(4), plan.lazy_max)),
            }
        } else {
            None
        };
        shared.srq = srq.or(shared.srq);
        let source = match srq {
            Some((_, source)) => source,
            None => {
                let bad = conn.bad_receives;
                let capacity = capacity(conn);
                let depth = plan.receive_depth;
                self.add_source(node, pd, ReceiveTarget::Qp(qp), (depth, capacity), (plan.lazy_max, bad))
            }
        };
        let qpn = loop {
            let qpn = (node as u32 + 1) << QPN_BITS | self.random.between(2, (1 << QPN_BITS) - 1) as u32;
            if !self.by_qpn.contains_key(&qpn) {
                break qpn;
            }
        };
        let qp_type = conn.qp_type_of(end);
        // A target acts in the protection domain of the queue that a request names.
        let own_pd = if qp_type == QpType::XrcRecv { 0 } else { pd };
        let machine =
            Qp::new(QpInit { qpn, qp_type, pd: own_pd, has_srq: srq.is_some(), max_send_wr: plan.send_depth });
        let peer_node = conn.ends[1 - end].node;
        let path = Arc::clone(&self.paths[node][peer_node]);
        let mut entry = Entry::new(node, machine, (index, end), path, source);
        if qp_type.is_reliable() {
            entry.requests = Some(Windows::towards(peer_node));
        }
        self.qps.push(entry);
        self.nodes[node].qps.push(qp);
        self.by_qpn.insert(qpn, qp);
        self.oracle.books.push(Book {
            qpn,
            qp_type,
            pd,
            peer,
            exposed: conn.exposed,
            srq: srq.map(|(srq, _)| srq),
            stream: Stream::new(Patience { budget: None, rnr_naks: None, well_max: 0 }, true, false),
            past: Vec::new(),
            receives: VecDeque::new(),
            popped: None,
            charged: [0; 2],
            drained: false,
            duplicates: 0,
        });
        self.programs.push(Program::new(plan, memory));
    }

    fn add_resources(&mut self, conn: &ConnPlan, end: usize, domain: usize, pd: u32) -> Resources {
        let node = conn.ends[end].node;
        let room = |plan: &EndPlan| match self.plan.fixed_len {
            Some(len) => len,
            // Bytes of all messages; gaps, cells and atomics come on top.
            None => plan.bytes + plan.requests * 1_800 + MTU_MAX,
        };
        let (own, peers) = (room(&conn.ends[end]), room(&conn.ends[1 - end]));
        let local = Access::LOCAL_WRITE;
        let sources = self.register(node, pd, own, Access::empty());
        let results = self.register(node, pd, own, local);
        let targets = self.register(node, pd, peers, local | Access::REMOTE_WRITE);
        if conn.exposed {
            // Forged WRITEs may hit every byte that is open to WRITEs.
            self.nodes[node].memory.concede(targets);
        }
        if self.plan.fixed_len.is_some() {
            for mr in [sources, targets] {
                self.nodes[node].memory.concede(mr);
            }
            let pattern = self.fixed_pattern;
            let at = self.nodes[node].memory.piece_of(sources).at;
            pattern.fill(self.nodes[node].memory.write(at, own));
        }
        let pattern = Pattern::random(&mut self.random);
        let open = local | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let cells = [8, 100, 1_500, 1_024]
            .map(|len| self.register_filled(node, pd, len, open, pattern).1)
            .map(|piece| Cell { piece, pattern, read_by: None })
            .to_vec();
        let (fragile_in, fragile_in_piece) =
            self.register_filled(node, pd, FRAGILE, local | Access::REMOTE_WRITE, pattern);
        let (fragile_out, fragile_out_piece) = self.register_filled(node, pd, FRAGILE, Access::REMOTE_READ, pattern);
        Resources {
            domain,
            sources,
            results,
            targets,
            cells,
            fragile_in,
            fragile_in_piece,
            fragile_out,
            fragile_out_piece,
            fragile_pattern: pattern,
        }
    }

    fn add_srq(&mut self, conn: &ConnPlan, node: usize, pd: u32, depth: u32, lazy_max: Nanos) -> (usize, usize) {
        let srq = self.oracle.srqs.len();
        self.oracle.srqs.push(VecDeque::new());
        // Whoever shares it must find room.
        let capacity = match conn.exposed {
            true => capacity(conn),
            false => self.plan.conns.iter().filter(|conn| !conn.exposed).map(capacity).max().unwrap_or(0),
        };
        let bad = conn.bad_receives;
        let source = self.add_source(node, pd, ReceiveTarget::Srq(srq), (depth, capacity), (lazy_max, bad));
        self.schedule(0, Event::PostReceives(source));
        (srq, source)
    }

    fn add_source(
        &mut self,
        node: usize,
        pd: u32,
        target: ReceiveTarget,
        (depth, capacity): (u32, u32),
        (lazy_max, bad): (Nanos, u32),
    ) -> usize {
        let mr = self.register(node, pd, depth * (capacity + 32), Access::LOCAL_WRITE);
        let memory = &mut self.nodes[node].memory;
        let buffers: Vec<Piece> =
            (0..depth).map(|_| memory.alloc(mr, capacity, 8).expect("the inbox has room for all receives")).collect();
        let free = (0..buffers.len()).collect();
        let posted = BTreeMap::new();
        self.sources.push(ReceiveSource { node, target, buffers, free, posted, lazy_max, bad, scheduled: false });
        self.sources.len() - 1
    }

    fn add_events(&mut self) {
        for pause in self.plan.pauses.clone() {
            self.schedule(pause.start, Event::Pause(pause.node, pause.end));
        }
        for (index, conn) in self.plan.conns.clone().into_iter().enumerate() {
            for (at, end, action) in conn.actions {
                self.schedule(at, Event::Act(index, end, action));
            }
        }
        self.schedule(self.plan.calm_at, Event::Calm);
    }

    /// A stream for a queue pair that is about to be connected.
    pub(crate) fn new_stream(&self, qp: usize) -> Stream {
        let conn = &self.plan.conns[self.qps[qp].conn];
        let longest = self.plan.conns.iter().filter_map(budget).max().unwrap_or(0);
        let patience = Patience {
            budget: budget(conn),
            rnr_naks: (conn.rnr_retry < 7).then_some(u32::from(conn.rnr_retry)),
            well_max: WELL_MAX + longest,
        };
        Stream::new(patience, conn.qp_type.is_reliable(), conn.exposed)
    }

    /// Q_Key of a UD queue pair: one for all, and one for each exposed connection.
    pub(crate) fn qkey(&self, qp: usize) -> u32 {
        if self.oracle.books[qp].exposed { 0x0010_0000 + self.qps[qp].conn as u32 } else { 0x0001_1111 }
    }

    /// What peers may do through a queue pair.
    pub(crate) fn conns_access(&self, qp: usize) -> Access {
        let all = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        all - self.plan.conns[self.qps[qp].conn].denied
    }
}

/// What the queue pairs of a node share, or one exposed queue pair has for itself.
struct Shared {
    domain: usize,
    /// SRQ and its source of receives.
    srq: Option<(usize, usize)>,
}

/// Time without progress until a requester may give up; `None` for never. A timeout may take four times its value.
fn budget(conn: &ConnPlan) -> Option<Nanos> {
    let timeout: Nanos = (conn.timeout > 0).then_some(4 * (4_096 << conn.timeout))?;
    Some((timeout * (Nanos::from(conn.retry_cnt) + 1)).max(GIVE_UP_FLOOR))
}

/// Bytes of a receive that takes every message of a connection.
fn capacity(conn: &ConnPlan) -> u32 {
    if conn.qp_type == QpType::Ud { MTU_MAX + GRH_LEN as u32 } else { conn.max_len }
}

impl Oracle {
    /// Bytes charged to windows by all queue pairs together.
    pub(crate) fn charged(&self) -> u64 {
        self.books.iter().flat_map(|book| book.charged).sum()
    }
}
