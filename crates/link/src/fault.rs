//! A middleware that breaks traffic on purpose, by a seed.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::RawFd;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use ferroce_core::mem;
use ferroce_transport::{PathAddr, Payload, Span, Train};
use ferroce_wire::{Bth, Headers, NetHeader};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::{Corrupt, Direction, Link, LinkStats, SendError, Tap, WireHooks};

/// Longest time that a reordered packet waits for others to overtake it.
const REORDER_NANOS: u64 = 1_000_000;
/// Most packets that overtake a reordered one.
const REORDER_PACKETS: u32 = 4;
/// Packets held back at once, each way; beyond that they pass unharmed.
const HELD_MAX: usize = 4096;

/// What a [`FaultLink`] does, as text: `loss=0.01,dup=0.01,reorder=0.01,corrupt=0.001,delay=0.01,delay_us=500,seed=7,dir=tx`.
///
/// Each fault has the probability with which it befalls a packet. Not named: 0. `dir` is `tx`, `rx` or `both`; not named: `both`.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultConfig {
    /// The packet vanishes.
    pub loss: f64,
    /// The packet comes twice.
    pub dup: f64,
    /// One to four later packets overtake the packet; if none come, it goes on after a millisecond.
    pub reorder: f64,
    /// One bit of the packet flips on the wire. The ICRC check finds it.
    pub corrupt: f64,
    /// The packet is held back for `delay_us`.
    pub delay: f64,
    /// Microseconds of delay.
    pub delay_us: u64,
    /// Start of the random numbers: the same seed and the same traffic give the same faults.
    pub seed: u64,
    /// Sent packets suffer.
    pub tx: bool,
    /// Received packets suffer.
    pub rx: bool,
}

impl Default for FaultConfig {
    fn default() -> Self {
        FaultConfig {
            loss: 0.0,
            dup: 0.0,
            reorder: 0.0,
            corrupt: 0.0,
            delay: 0.0,
            delay_us: 1000,
            seed: 0,
            tx: true,
            rx: true,
        }
    }
}

/// Why a text is no [`FaultConfig`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultConfigError {
    /// An entry is not `name=value`.
    #[error("`{0}` is not name=value")]
    NotAPair(String),
    /// No fault of this name.
    #[error("no fault is called `{0}`: there are loss, dup, reorder, corrupt, delay, delay_us, seed and dir")]
    UnknownName(String),
    /// A value that its name does not take.
    #[error("{name} does not take `{value}` but {expected}")]
    Value {
        /// The name.
        name: String,
        /// What was given.
        value: String,
        /// What it takes.
        expected: &'static str,
    },
}

impl FromStr for FaultConfig {
    type Err = FaultConfigError;

    fn from_str(text: &str) -> Result<FaultConfig, FaultConfigError> {
        let mut config = FaultConfig::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (name, value) = entry.split_once('=').ok_or_else(|| FaultConfigError::NotAPair(entry.to_owned()))?;
            let (name, value) = (name.trim(), value.trim());
            let wrong = |expected| FaultConfigError::Value { name: name.to_owned(), value: value.to_owned(), expected };
            let probability = || {
                let number = value.parse().ok().filter(|number| (0.0..=1.0).contains(number));
                number.ok_or_else(|| wrong("a probability from 0 to 1"))
            };
            let number = || value.parse().map_err(|_| wrong("a whole number"));
            match name {
                "loss" => config.loss = probability()?,
                "dup" => config.dup = probability()?,
                "reorder" => config.reorder = probability()?,
                "corrupt" => config.corrupt = probability()?,
                "delay" => config.delay = probability()?,
                "delay_us" => config.delay_us = number()?,
                "seed" => config.seed = number()?,
                "dir" => {
                    (config.tx, config.rx) = match value {
                        "tx" => (true, false),
                        "rx" => (false, true),
                        "both" => (true, true),
                        _ => return Err(wrong("tx, rx or both")),
                    }
                }
                _ => return Err(FaultConfigError::UnknownName(name.to_owned())),
            }
        }
        Ok(config)
    }
}

impl fmt::Display for FaultConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dir = match (self.tx, self.rx) {
            (true, false) => "tx",
            (false, true) => "rx",
            _ => "both",
        };
        let FaultConfig { loss, dup, reorder, corrupt, delay, delay_us, seed, .. } = self;
        write!(
            f,
            "loss={loss},dup={dup},reorder={reorder},corrupt={corrupt},delay={delay},delay_us={delay_us},seed={seed},dir={dir}"
        )
    }
}

/// What happens to one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Pass,
    Lose,
    Duplicate,
    /// Behind so many packets.
    Reorder(u32),
    Delay,
}

/// The dice of one direction.
struct Dice {
    rng: StdRng,
    config: FaultConfig,
    on: bool,
}

impl Dice {
    fn roll(&mut self) -> Fate {
        if !self.on {
            return Fate::Pass;
        }
        let FaultConfig { loss, dup, reorder, delay, .. } = self.config;
        // One throw decides: the probabilities lie side by side, so that none hides another.
        let mut throw: f64 = self.rng.random();
        for (probability, fate) in [
            (loss, Fate::Lose),
            (dup, Fate::Duplicate),
            (reorder, Fate::Reorder(self.rng.random_range(1..=REORDER_PACKETS))),
            (delay, Fate::Delay),
        ] {
            if throw < probability {
                return fate;
            }
            throw -= probability;
        }
        Fate::Pass
    }
}

/// A packet held back.
struct Held<T> {
    /// Goes on when so many packets have passed it ...
    behind: Option<u32>,
    /// ... or at this time.
    due: u64,
    packet: T,
}

struct TxPacket {
    cookie: u64,
    src_qpn: u32,
    path: PathAddr,
    train: Train,
}

struct RxPacket {
    net: NetHeader,
    headers: Headers,
    payload: Box<[u8]>,
}

/// A link whose packets get lost, doubled, reordered, delayed or corrupted.
///
/// Faults befall packets, not trains: what is left of a train is sent as the shorter trains between the gaps. A packet that is held back
/// while it is sent is copied, so that it needs nobody's memory later. Corruption happens in the link below, before the ICRC
/// check. Faults are counted in [`LinkStats`].
///
/// Held packets move when the link is turned; [`Link::next_due`] tells when that is wanted.
pub struct FaultLink<L> {
    link: L,
    tx: Dice,
    rx: Dice,
    delay: u64,
    tx_held: VecDeque<Held<TxPacket>>,
    rx_held: VecDeque<Held<RxPacket>>,
    failed: Vec<(u64, SendError)>,
    stats: LinkStats,
    clock: Clock,
}

type Clock = Box<dyn Fn() -> u64 + Send>;

impl<L: Link + WireHooks> FaultLink<L> {
    /// Puts faults into a link.
    pub fn new(link: L, config: &FaultConfig) -> FaultLink<L> {
        let start = Instant::now();
        FaultLink::with_clock(link, config, Box::new(move || start.elapsed().as_nanos() as u64))
    }

    /// The same with a clock of the caller's, in nanoseconds.
    pub fn with_clock(mut link: L, config: &FaultConfig, clock: Clock) -> FaultLink<L> {
        // Every use has its own random numbers, so that the traffic one way does not change the faults the other way.
        let rng = |stream: u64| StdRng::seed_from_u64(config.seed.wrapping_mul(4).wrapping_add(stream));
        let dice = |on, stream| Dice { rng: rng(stream), config: config.clone(), on };
        if config.corrupt > 0.0 {
            link.set_corrupt(corruption(config.clone(), rng(2), rng(3)));
        }
        FaultLink {
            link,
            tx: dice(config.tx, 0),
            rx: dice(config.rx, 1),
            delay: config.delay_us.saturating_mul(1000),
            tx_held: VecDeque::new(),
            rx_held: VecDeque::new(),
            failed: Vec::new(),
            stats: LinkStats::default(),
            clock,
        }
    }

    /// The link below.
    pub fn inner(&self) -> &L {
        &self.link
    }
}

fn corruption(config: FaultConfig, mut tx: StdRng, mut rx: StdRng) -> Corrupt {
    Box::new(move |direction, len| {
        let (on, rng) = match direction {
            Direction::Tx => (config.tx, &mut tx),
            Direction::Rx => (config.rx, &mut rx),
        };
        (on && len > 0 && rng.random_bool(config.corrupt)).then(|| rng.random_range(0..len * 8))
    })
}

impl<L: Link> FaultLink<L> {
    /// Sends packets `from..to` of a train.
    fn send_part(
        &mut self,
        cookie: u64,
        src_qpn: u32,
        path: &PathAddr,
        train: &Train,
        (from, to): (u32, u32),
    ) -> Result<(), SendError> {
        if from == to {
            return Ok(());
        }
        if (from, to) == (0, train.packets) {
            self.link.send(cookie, src_qpn, path, train)?;
        } else {
            self.link.send(cookie, src_qpn, path, &part(train, from, to))?;
        }
        pass(&mut self.tx_held, to - from);
        Ok(())
    }

    /// Sends what is due. What the link below refuses is reported by the next flush.
    fn release_tx(&mut self) {
        let now = (self.clock)();
        while let Some(held) = take_due(&mut self.tx_held, now) {
            let TxPacket { cookie, src_qpn, path, train } = held;
            if let Err(error) = self.link.send(cookie, src_qpn, &path, &train) {
                self.failed.push((cookie, error));
            }
            pass(&mut self.tx_held, 1);
        }
    }
}

impl<L: Link> Link for FaultLink<L> {
    /// If memory of the train is gone, packets in front of a fault may have been sent all the same.
    fn send(&mut self, cookie: u64, src_qpn: u32, path: &PathAddr, train: &Train) -> Result<(), SendError> {
        self.release_tx();
        // Packets `start..i` pass together.
        let mut start = 0;
        for i in 0..train.packets {
            if self.tx_held.iter().any(|held| held.behind.is_some_and(|behind| behind <= i - start)) {
                self.send_part(cookie, src_qpn, path, train, (start, i))?;
                start = i;
                self.release_tx();
            }
            let fate = self.tx.roll();
            if fate == Fate::Pass || fate != Fate::Lose && self.tx_held.len() >= HELD_MAX {
                continue;
            }
            self.send_part(cookie, src_qpn, path, train, (start, i))?;
            start = i + 1;
            match fate {
                Fate::Pass => {}
                Fate::Lose => self.stats.fault_lost += 1,
                Fate::Duplicate => {
                    self.stats.fault_duplicated += 1;
                    self.send_part(cookie, src_qpn, path, train, (i, i + 1))?;
                    self.send_part(cookie, src_qpn, path, train, (i, i + 1))?;
                }
                Fate::Reorder(_) | Fate::Delay => {
                    let train = owned(part(train, i, i + 1))?;
                    let packet = TxPacket { cookie, src_qpn, path: path.clone(), train };
                    hold(&mut self.tx_held, fate, (self.clock)(), self.delay, packet, &mut self.stats);
                }
            }
        }
        self.send_part(cookie, src_qpn, path, train, (start, train.packets))
    }

    fn flush(&mut self, failed: &mut dyn FnMut(u64, SendError)) {
        self.release_tx();
        self.link.flush(failed);
        for (cookie, error) in self.failed.drain(..) {
            failed(cookie, error);
        }
    }

    fn recv(&mut self, budget: usize, sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8])) -> usize {
        let FaultLink { link, rx, rx_held, stats, clock, delay, .. } = self;
        let mut released = release_rx(rx_held, clock(), sink);
        let read = link.recv(budget, &mut |net, headers, payload| {
            let fate = if rx_held.len() < HELD_MAX { rx.roll() } else { Fate::Pass };
            let times = match fate {
                Fate::Pass => 1,
                Fate::Duplicate => {
                    stats.fault_duplicated += 1;
                    2
                }
                Fate::Lose => {
                    stats.fault_lost += 1;
                    0
                }
                Fate::Reorder(_) | Fate::Delay => {
                    let packet = RxPacket { net: *net, headers: *headers, payload: payload.into() };
                    hold(rx_held, fate, clock(), *delay, packet, stats);
                    0
                }
            };
            for _ in 0..times {
                sink(net, headers, payload);
                pass(rx_held, 1);
                if !rx_held.is_empty() {
                    released += release_rx(rx_held, clock(), sink);
                }
            }
        });
        read + released
    }

    fn rx_fds(&self) -> Vec<RawFd> {
        self.link.rx_fds()
    }

    fn stats(&self) -> LinkStats {
        let mut stats = self.link.stats();
        stats.merge(&self.stats);
        stats
    }

    fn next_due(&self) -> Option<u64> {
        let now = (self.clock)();
        let due = |due: u64| due.saturating_sub(now);
        let tx = self.tx_held.iter().map(|held| due(held.due));
        let rx = self.rx_held.iter().map(|held| due(held.due));
        tx.chain(rx).chain(self.link.next_due()).min()
    }
}

impl<L: WireHooks> WireHooks for FaultLink<L> {
    fn set_tap(&mut self, tap: Tap) {
        self.link.set_tap(tap);
    }

    fn set_corrupt(&mut self, corrupt: Corrupt) {
        self.link.set_corrupt(corrupt);
    }
}

fn hold<T>(list: &mut VecDeque<Held<T>>, fate: Fate, now: u64, delay: u64, packet: T, stats: &mut LinkStats) {
    match fate {
        Fate::Reorder(behind) => {
            stats.fault_reordered += 1;
            list.push_back(Held { behind: Some(behind), due: now.saturating_add(REORDER_NANOS), packet });
        }
        _ => {
            stats.fault_delayed += 1;
            list.push_back(Held { behind: None, due: now.saturating_add(delay), packet });
        }
    }
}

/// Gives received packets that are due to the sink, and tells how many.
fn release_rx(
    list: &mut VecDeque<Held<RxPacket>>,
    now: u64,
    sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8]),
) -> usize {
    let mut released = 0;
    while let Some(packet) = take_due(list, now) {
        sink(&packet.net, &packet.headers, &packet.payload);
        pass(list, 1);
        released += 1;
    }
    released
}

/// Packets passed those held back.
fn pass<T>(list: &mut VecDeque<Held<T>>, packets: u32) {
    for behind in list.iter_mut().filter_map(|held| held.behind.as_mut()) {
        *behind = behind.saturating_sub(packets);
    }
}

fn take_due<T>(list: &mut VecDeque<Held<T>>, now: u64) -> Option<T> {
    let at = list.iter().position(|held| held.behind == Some(0) || held.due <= now)?;
    list.remove(at).map(|held| held.packet)
}

/// Packets `from..to` of a train, as a train. The payload stays where it is.
fn part(train: &Train, from: u32, to: u32) -> Train {
    let packets = to - from;
    let start = from * train.mtu;
    let len = if to == train.packets { train.len - start } else { packets * train.mtu };
    Train {
        head: headers_of(train, from),
        body: train.body,
        tail: (packets > 1).then(|| headers_of(train, to - 1)),
        packets,
        mtu: train.mtu,
        len,
        payload: payload_part(&train.payload, start, len),
        path: train.path.clone(),
        from: train.from,
    }
}

/// Headers of the `i`th packet.
fn headers_of(train: &Train, i: u32) -> Headers {
    let headers = match train.tail {
        _ if i == 0 => train.head,
        Some(tail) if i + 1 == train.packets => tail,
        _ => train.middle(),
    };
    Headers { bth: Bth { psn: train.head.bth.psn.add(i), ..headers.bth }, ..headers }
}

fn payload_part(payload: &Payload, mut start: u32, mut len: u32) -> Payload {
    let mut cut = |span: &Span| {
        let skipped = start.min(span.len);
        start -= skipped;
        let taken = (span.len - skipped).min(len);
        len -= taken;
        Span { addr: span.addr + u64::from(skipped), len: taken }
    };
    match payload {
        Payload::Gather(spans) => Payload::Gather(spans.iter().map(&mut cut).filter(|span| span.len > 0).collect()),
        Payload::Copy(span) => Payload::Copy(cut(span)),
        Payload::Lent(span) => Payload::Lent(cut(span)),
        Payload::Inline(bytes, at) => Payload::Inline(Arc::clone(bytes), at + start),
    }
}

/// The same train with its payload copied.
fn owned(train: Train) -> Result<Train, SendError> {
    let mut bytes = vec![0; train.len as usize];
    let spans = match &train.payload {
        Payload::Gather(spans) => spans.as_slice(),
        Payload::Copy(span) | Payload::Lent(span) => std::slice::from_ref(span),
        Payload::Inline(..) => return Ok(train),
    };
    let mut rest = bytes.as_mut_slice();
    for span in spans {
        let (chunk, others) = rest.split_at_mut(span.len as usize);
        mem::load(span.addr, chunk).map_err(|mem::Fault| SendError::Fault)?;
        rest = others;
    }
    Ok(Train { payload: Payload::Inline(bytes.into(), 0), ..train })
}
