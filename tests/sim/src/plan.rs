//! What a seed stands for: nodes, network, queue pairs, work and faults.

use ferroce_transport::{Access, Nanos, QpType};

use crate::network::{LinkSpeed, Outage, OutageKind, Rates};
use crate::random::Random;

pub(crate) const US: Nanos = 1_000;
pub(crate) const MS: Nanos = 1_000_000;

/// What Linux makes of the default `net.core.rmem_max` of 212,992 bytes.
pub(crate) const RECEIVE_BUFFER: u32 = 212_992 * 2;

/// A node stands still for a while: its process is stopped, its receive buffer fills.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pause {
    pub(crate) node: usize,
    pub(crate) start: Nanos,
    pub(crate) end: Nanos,
}

/// What programs do to a connection besides posting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    ToErr,
    ToReset,
    /// To SQD, with or without the event; back to RTS when drained.
    ToSqd {
        notify: bool,
    },
    /// SQD or SQE back to RTS.
    Resume,
    /// Both ends through RESET and connected anew.
    Reconnect,
    /// The second end of a reconnection.
    Complete,
    UnmapFragile,
    DeregisterFragile,
}

/// One end of a connection.
#[derive(Clone, Debug)]
pub(crate) struct EndPlan {
    pub(crate) node: usize,
    pub(crate) psn: u32,
    pub(crate) srq: bool,
    /// Requests that its program posts.
    pub(crate) requests: u32,
    /// Payload bytes of all of them together, about.
    pub(crate) bytes: u32,
    pub(crate) send_depth: u32,
    pub(crate) receive_depth: u32,
    /// Time between posts.
    pub(crate) think_max: Nanos,
    /// Time until a used receive is replaced.
    pub(crate) lazy_max: Nanos,
}

/// Two queue pairs that talk to each other.
#[derive(Clone, Debug)]
pub(crate) struct ConnPlan {
    /// Of both ends; with `XrcSend` the second is the target.
    pub(crate) qp_type: QpType,
    pub(crate) ends: [EndPlan; 2],
    pub(crate) mtu: u32,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_len: u32,
    /// Weights of [`OPS`].
    pub(crate) mix: [u32; OPS],
    /// Percent of requests.
    pub(crate) signalled: u32,
    pub(crate) fenced: u32,
    pub(crate) inline: u32,
    /// In a million requests: such that must fail.
    pub(crate) bad: u32,
    /// A right that the queue pairs' access flags do not give.
    pub(crate) denied: Access,
    /// In a million receives: too small or with a bad key.
    pub(crate) bad_receives: u32,
    /// Forged frames may reach it: nothing is promised then but that memory outside its regions stays as it is.
    pub(crate) exposed: bool,
    /// UC and UD: neither end says anything of the flow control between Ferroce ends, as if it were of another make.
    pub(crate) mutes_flow: bool,
    /// RC and XRC: this end drops request packets that come before their turn, as if it were of another make.
    pub(crate) goes_back: [bool; 2],
    pub(crate) actions: Vec<(Nanos, usize, Action)>,
    /// Percent: whether it is connected again after an error.
    pub(crate) reconnects: u32,
}

/// SEND, SEND with immediate, SEND with invalidate, WRITE, WRITE with immediate, READ, compare and swap, fetch and add, local
/// invalidate, WRITE to a cell, READ of a cell.
pub(crate) const OPS: usize = 11;

/// Everything about a run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) nodes: usize,
    pub(crate) ipv6: bool,
    pub(crate) speed: LinkSpeed,
    pub(crate) gro: bool,
    /// The link reads memory only after more trains were asked for.
    pub(crate) late_gather: bool,
    pub(crate) receive_buffer: u32,
    pub(crate) turn_cost: Nanos,
    /// Time from an arrival until a node looks.
    pub(crate) wakeup: Nanos,
    pub(crate) rates: Rates,
    pub(crate) outages: Vec<Outage>,
    pub(crate) pauses: Vec<Pause>,
    /// When faults and mischief end.
    pub(crate) calm_at: Nanos,
    pub(crate) conns: Vec<ConnPlan>,
    /// Peers fetch the payload of large WRITEs themselves.
    pub(crate) lends: bool,
    /// The same source and target for all requests, all of one length: for measuring.
    pub(crate) fixed_len: Option<u32>,
}

impl Plan {
    pub(crate) fn from_seed(seed: u64) -> Plan {
        let mut random = Random::new(seed);
        let random = &mut random;
        let nodes = random.pick(&[2, 2, 2, 3, 3, 4]);
        let calm_at = random.pick(&[2 * MS, 8 * MS, 20 * MS, 50 * MS, 120 * MS, 400 * MS]);
        let latency = random.pick(&[US, 5 * US, 5 * US, 20 * US, 100 * US, 2 * MS]);
        let severity = random.weighted(&[8, 20, 30, 30, 10]);
        let many = random.percent(4);
        let conns = if many { random.between(10, 30) } else { random.pick(&[1, 2, 2, 2, 3, 4]) };
        let rates = rates(severity, random);
        let outages = if severity > 0 && random.percent(35) { outages(nodes, calm_at, random) } else { Vec::new() };
        let pauses = if severity > 0 && random.percent(30) { pauses(nodes, calm_at, random) } else { Vec::new() };
        Plan {
            nodes,
            ipv6: random.percent(30),
            speed: LinkSpeed { latency, gbps: random.pick(&[1, 10, 25, 100]) },
            gro: random.percent(60),
            late_gather: random.percent(50),
            receive_buffer: random.pick(&[RECEIVE_BUFFER, RECEIVE_BUFFER, RECEIVE_BUFFER, RECEIVE_BUFFER / 2]),
            turn_cost: random.pick(&[0, 500, 2 * US, 10 * US]),
            wakeup: random.pick(&[0, 0, US, 5 * US, 50 * US]),
            rates,
            outages,
            pauses,
            calm_at,
            conns: (0..conns).map(|_| conn(nodes, calm_at, many, random)).collect(),
            lends: false,
            fixed_len: None,
        }
        .with_xrc(seed)
        .with_go_back(seed)
        .with_lending(seed)
    }

    /// One seed in eight has XRC connections among its reliable ones: from a stream of random numbers of their own, so that the other
    /// seeds, of which some once failed, stand for what they always stood for.
    fn with_xrc(mut self, seed: u64) -> Plan {
        if seed % 8 == 5 {
            let mut random = Random::new(!seed);
            for conn in self.conns.iter_mut().filter(|conn| conn.qp_type == QpType::Rc) {
                if random.percent(70) {
                    conn.qp_type = QpType::XrcSend;
                    // The target requests nothing and has no receives of its own.
                    let [initiator, target] = &mut conn.ends;
                    (initiator.srq, target.srq) = (false, true);
                    (target.requests, target.bytes) = (0, 0);
                }
            }
        }
        self
    }
}

impl Plan {
    /// One seed in four has ends that go back N, from a stream of random numbers of their own, as with XRC.
    fn with_go_back(mut self, seed: u64) -> Plan {
        if seed % 4 == 2 {
            let mut random = Random::new(seed.rotate_left(32));
            for conn in &mut self.conns {
                conn.goes_back = [(); 2].map(|()| random.percent(60));
            }
        }
        self
    }
}

impl Plan {
    /// One seed in eight is of a network through which memory could be lent: no such one is real, but what long trains meet in it is.
    fn with_lending(self, seed: u64) -> Plan {
        Plan { lends: seed % 8 == 3, ..self }
    }
}

impl ConnPlan {
    /// The type of one end.
    pub(crate) fn qp_type_of(&self, end: usize) -> QpType {
        match (self.qp_type, end) {
            (QpType::XrcSend, 1) => QpType::XrcRecv,
            (qp_type, _) => qp_type,
        }
    }
}

fn rates(severity: usize, random: &mut Random) -> Rates {
    if severity == 0 {
        return Rates::default();
    }
    let scale: u32 = [0, 1_000, 8_000, 40_000, 150_000][severity];
    let mut rate = |percent: u32, divisor: u32| {
        if random.percent(percent) {
            random.between(u64::from(scale / 4), u64::from(scale)) as u32 / divisor
        } else {
            0
        }
    };
    let (loss, train_loss) = (rate(70, 1), rate(25, 1));
    let (duplicate, delay) = (rate(50, 1), rate(50, 1));
    let (corrupt, truncate) = (rate(40, 2), rate(25, 4));
    let stranger = rate(35, 2);
    // Exposed connections are there to be attacked.
    let forge = random.pick(&[2_000, 20_000, 100_000]);
    let delay_max = random.pick(&[5 * US, 50 * US, 500 * US, 5 * MS, 30 * MS]);
    Rates { loss, train_loss, duplicate, delay, delay_max, corrupt, truncate, forge, stranger }
}

fn outages(nodes: usize, calm_at: Nanos, random: &mut Random) -> Vec<Outage> {
    let mut outages = Vec::new();
    for _ in 0..random.between(1, 4) {
        let start = random.below(calm_at);
        let end = start + random.below(calm_at - start) + 1;
        let (from, to) = (random.below(nodes as u64) as usize, random.below(nodes as u64) as usize);
        let kind = random.pick(&[OutageKind::BlackHole, OutageKind::Stall]);
        outages.push(Outage { from, to, start, end, kind });
        if random.percent(30) {
            outages.push(Outage { from: to, to: from, start, end, kind });
        }
    }
    outages
}

fn pauses(nodes: usize, calm_at: Nanos, random: &mut Random) -> Vec<Pause> {
    (0..random.between(1, 3))
        .map(|_| {
            let start = random.below(calm_at);
            let end = start + random.below((calm_at - start).min(60 * MS)) + 1;
            Pause { node: random.below(nodes as u64) as usize, start, end }
        })
        .collect()
}

fn conn(nodes: usize, calm_at: Nanos, many: bool, random: &mut Random) -> ConnPlan {
    let qp_type = [QpType::Rc, QpType::Uc, QpType::Ud][random.weighted(&[70, 15, 15])];
    let a = random.below(nodes as u64) as usize;
    // Now and then a node talks to itself.
    let b = if random.percent(4) { a } else { (a + 1 + random.below(nodes as u64 - 1) as usize) % nodes };
    let mtu = random.pick(&[256, 512, 1024, 1024, 2048, 4096, 4096]);
    let size = if many { random.weighted(&[4, 3, 2]) } else { random.weighted(&[20, 30, 30, 28, 16, 4, 4]) };
    let mut max_len = [64, 2_000, 9_000, 40_000, 130_000, 400_000, 1_300_000][size];
    if qp_type == QpType::Ud {
        max_len = max_len.min(mtu);
    }
    let exposed = random.percent(15);
    let troubled = random.percent(40);
    let mut actions = Vec::new();
    if troubled {
        for _ in 0..random.between(1, 3) {
            let notify = random.percent(70);
            let action = match random.weighted(&[2, 2, 6, 2, 2]) {
                0 => Action::ToErr,
                1 => Action::ToReset,
                2 => Action::ToSqd { notify },
                3 => Action::UnmapFragile,
                _ => Action::DeregisterFragile,
            };
            actions.push((random.below(calm_at), random.below(2) as usize, action));
        }
    }
    let has_bad = random.percent(30);
    let denied = if has_bad && random.percent(25) {
        random.pick(&[Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC])
    } else {
        Access::empty()
    };
    let has_bad_receives = random.percent(12);
    let mut mix = [0; OPS];
    while mix[..8].iter().sum::<u32>() == 0 {
        mix = std::array::from_fn(|_| random.pick(&[0, 1, 1, 2, 4]));
    }
    let bad = if has_bad { random.pick(&[15_000, 60_000, 250_000]) } else { 0 };
    let bad_receives = if has_bad_receives { random.pick(&[10_000, 60_000]) } else { 0 };
    ConnPlan {
        qp_type,
        ends: [a, b].map(|node| end(node, max_len, calm_at, many, random)),
        mtu,
        // Whoever is attacked must be able to give up.
        timeout: if exposed { random.pick(&[8, 12, 14]) } else { random.pick(&[0, 1, 8, 12, 14, 14, 15, 17]) },
        retry_cnt: random.pick(&[0, 1, 3, 7, 7, 7]),
        rnr_retry: random.pick(&[0, 1, 6, 7, 7, 7, 7]),
        min_rnr_timer: random.pick(&[1, 1, 4, 12, 12, 16, 20]),
        max_rd_atomic: random.pick(&[1, 2, 4, 16, 128]),
        max_len,
        mix,
        signalled: random.pick(&[10, 50, 90, 100, 100]),
        fenced: random.pick(&[0, 5, 30]),
        inline: random.pick(&[0, 10, 50]),
        bad,
        denied,
        bad_receives,
        exposed,
        mutes_flow: random.percent(20),
        goes_back: [false; 2],
        actions,
        reconnects: random.pick(&[0, 50, 100]),
    }
}

fn end(node: usize, max_len: u32, calm_at: Nanos, many: bool, random: &mut Random) -> EndPlan {
    let idle = random.percent(15);
    let requests = match (idle, many) {
        (true, _) => 0,
        (_, true) => random.between(1, 8),
        _ => random.pick(&[1, 8, 20, 40, 80]) + random.below(10),
    };
    let psn = match random.below(4) {
        // Near the wrap and near the half, where comparison turns.
        0 => 0x00ff_fff0 + random.below(16) as u32,
        1 => 0x007f_fff0 + random.below(32) as u32,
        _ => random.below(1 << 24) as u32,
    };
    let hasty = random.percent(40);
    let spread = calm_at / requests.max(1);
    EndPlan {
        node,
        psn,
        srq: random.percent(25),
        requests: requests as u32,
        bytes: max_len
            * if max_len < 10_000 {
                16
            } else if max_len < 200_000 {
                4
            } else {
                2
            }
            + 2_000,
        send_depth: random.pick(&[1, 2, 4, 16, 64]),
        receive_depth: if max_len > 300_000 { random.pick(&[1, 2]) } else { random.pick(&[1, 3, 8, 16]) },
        think_max: if hasty { random.pick(&[0, US, 20 * US]) } else { random.between(1, spread.max(2)) },
        lazy_max: random.pick(&[0, 0, 10 * US, 300 * US, 3 * MS]),
    }
}
