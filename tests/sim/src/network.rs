//! The network between the nodes: links with a rate and a latency, and everything that can happen to a frame on them.

use ferroce_transport::Nanos;

use crate::coverage::{Coverage, Met};
use crate::forge;
use crate::frame::{Damage, Datagram, Frame};
use crate::log::Log;
use crate::random::Random;

/// Ethernet, IP and UDP around a RoCEv2 frame, and the gap between frames.
const FRAME_OVERHEAD: u32 = 14 + 40 + 8 + 4 + 20;

/// How often faults happen: in a million frames (or trains).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rates {
    pub(crate) loss: u32,
    /// Whole trains.
    pub(crate) train_loss: u32,
    pub(crate) duplicate: u32,
    pub(crate) delay: u32,
    pub(crate) delay_max: Nanos,
    pub(crate) corrupt: u32,
    pub(crate) truncate: u32,
    /// Of frames between queue pairs that are exposed to it.
    pub(crate) forge: u32,
    pub(crate) stranger: u32,
}

/// What an outage does to frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutageKind {
    BlackHole,
    Stall,
}

/// One direction is dead for a while.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outage {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) start: Nanos,
    pub(crate) end: Nanos,
    pub(crate) kind: OutageKind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkSpeed {
    pub(crate) latency: Nanos,
    /// Bits a nanosecond.
    pub(crate) gbps: u64,
}

/// Who sends a train to whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Journey {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Frames of this train may be forged.
    pub(crate) exposed: bool,
}

/// What became of a train: datagrams by time of arrival, and how many frames were doubled.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    pub(crate) datagrams: Vec<(Nanos, Datagram)>,
    pub(crate) duplicates: u32,
    /// Some frame does not arrive as it should.
    pub(crate) disturbed: bool,
}

#[derive(Debug)]
pub(crate) struct Network {
    speed: LinkSpeed,
    rates: Rates,
    outages: Vec<Outage>,
    /// A train arrives as one datagram, as GRO and loopback deliver it.
    gro: bool,
    random: Random,
    nodes: usize,
    /// When each link has sent what it was given.
    free_at: Vec<Nanos>,
}

impl Network {
    pub(crate) fn new(
        nodes: usize,
        speed: LinkSpeed,
        rates: Rates,
        outages: Vec<Outage>,
        gro: bool,
        random: Random,
    ) -> Network {
        Network { speed, rates, outages, gro, random, nodes, free_at: vec![0; nodes * nodes] }
    }

    /// From now on nothing happens to frames.
    pub(crate) fn calm(&mut self) {
        self.rates = Rates::default();
        self.outages.clear();
    }

    pub(crate) fn send(
        &mut self,
        now: Nanos,
        journey: Journey,
        mut train: Datagram,
        cover: &mut Coverage,
        log: &mut Log,
    ) -> Arrivals {
        let link = journey.from * self.nodes + journey.to;
        let outage = self
            .outages
            .iter()
            .find(|o| (o.from, o.to) == (journey.from, journey.to) && (o.start..o.end).contains(&now))
            .copied();
        let mut leaves = self.free_at[link].max(now);
        if let Some(Outage { kind: OutageKind::Stall, end, .. }) = outage {
            cover.add(Met::Stall);
            leaves = leaves.max(end);
        }
        let mut arrivals = Arrivals::default();
        let train_lost = self.random.chance(self.rates.train_loss);
        let sent = train.frames.len();
        let mut kept: Vec<Frame> = Vec::with_capacity(train.frames.len());
        for frame in std::mem::take(&mut train.frames) {
            leaves += u64::from(frame.len + FRAME_OVERHEAD) * 8 / self.speed.gbps;
            let arrives = leaves + self.speed.latency;
            if matches!(outage, Some(Outage { kind: OutageKind::BlackHole, .. })) {
                cover.add(Met::BlackHole);
                log.remark(now, || "    lost: the direction is dead".to_owned());
                continue;
            }
            if train_lost {
                continue;
            }
            self.frame(arrives, journey, &train, frame, &mut kept, &mut arrivals, (cover, log));
        }
        if train_lost {
            cover.add(Met::TrainLoss);
            log.remark(now, || "    lost: the whole train".to_owned());
        }
        self.free_at[link] = leaves;
        arrivals.disturbed = outage.is_some() || kept.len() < sent;
        if !kept.is_empty() {
            if self.gro {
                arrivals.datagrams.push((leaves + self.speed.latency, Datagram { frames: kept, ..train }));
            } else {
                self.separate(leaves, &train, &kept, &mut arrivals);
            }
        }
        arrivals
    }

    /// Without GRO every frame is a datagram of its own.
    fn separate(&self, leaves: Nanos, train: &Datagram, kept: &[Frame], arrivals: &mut Arrivals) {
        let mut after: Nanos = 0;
        for frame in kept.iter().rev() {
            arrivals.datagrams.push((leaves + self.speed.latency - after, train.single(frame)));
            after += u64::from(frame.len + FRAME_OVERHEAD) * 8 / self.speed.gbps;
            after = after.min(leaves);
        }
    }

    /// Decides the fate of one frame.
    #[expect(clippy::too_many_arguments, reason = "one frame's whole surroundings, from one place")]
    fn frame(
        &mut self,
        arrives: Nanos,
        journey: Journey,
        train: &Datagram,
        frame: Frame,
        kept: &mut Vec<Frame>,
        arrivals: &mut Arrivals,
        (cover, log): (&mut Coverage, &mut Log),
    ) {
        let now = arrives;
        let rates = self.rates;
        let random = &mut self.random;
        if random.chance(rates.duplicate) {
            cover.add(Met::Duplicate);
            log.remark(now, || format!("    frame {} doubled", frame.id));
            arrivals.duplicates += 1;
            let later = random.below(1 + rates.delay_max);
            arrivals.datagrams.push((arrives + later, train.single(&frame)));
        }
        if journey.exposed && random.chance(rates.forge) {
            cover.add(Met::Forged);
            let mut copy = train.single(&frame);
            forge::forge(&mut copy, random);
            log.remark(now, || format!("    a forgery of frame {}: {}", frame.id, summary(&copy)));
            arrivals.duplicates += 1;
            arrivals.datagrams.push((arrives + random.below(1 + rates.delay_max), copy));
            if random.percent(50) {
                return;
            }
        }
        if random.chance(rates.stranger) {
            cover.add(Met::Stranger);
            let mut copy = train.single(&frame);
            forge::estrange(&mut copy, random);
            log.remark(now, || format!("    a stranger's frame {}: {}", frame.id, summary(&copy)));
            arrivals.datagrams.push((arrives + random.below(1 + rates.delay_max), copy));
        }
        if random.chance(rates.loss) {
            cover.add(Met::Loss);
            log.remark(now, || format!("    frame {} lost", frame.id));
            return;
        }
        if random.chance(rates.corrupt) {
            let mut copy = train.single(&frame);
            let damage = corrupt(copy.bytes_mut(0), random);
            cover.add(if damage == Damage::Masked { Met::CorruptMasked } else { Met::Corrupt });
            log.remark(now, || format!("    frame {} damaged: {damage:?}", frame.id));
            copy.frames[0].damage = damage;
            arrivals.datagrams.push((arrives, copy));
            return;
        }
        if random.chance(rates.truncate) {
            cover.add(Met::Truncated);
            log.remark(now, || format!("    frame {} cut short", frame.id));
            let mut copy = train.single(&frame);
            copy.frames[0].len = random.below(u64::from(frame.len)) as u32;
            copy.frames[0].damage = Damage::Below;
            arrivals.datagrams.push((arrives, copy));
            return;
        }
        if random.chance(rates.delay) {
            cover.add(Met::Delay);
            let later = random.between(1, 1 + rates.delay_max);
            log.remark(now, || format!("    frame {} delayed by {later} ns", frame.id));
            arrivals.datagrams.push((arrives + later, train.single(&frame)));
            return;
        }
        kept.push(frame);
    }
}

/// Flips one to three bits: so few that no CRC-32 can miss them.
fn corrupt(bytes: &mut [u8], random: &mut Random) -> Damage {
    // Now and then where a router may write, which the ICRC leaves out.
    if random.percent(10) {
        bytes[4] ^= 1 << random.below(8);
        return Damage::Masked;
    }
    let bits = bytes.len() as u64 * 8;
    let mut flipped: Vec<u64> = Vec::new();
    for _ in 0..random.between(1, 3) {
        let bit = random.below(bits);
        if !flipped.contains(&bit) {
            flipped.push(bit);
            bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
    }
    if flipped.iter().all(|bit| bit / 8 == 4) { Damage::Masked } else { Damage::Below }
}

fn summary(datagram: &Datagram) -> String {
    let bytes = datagram.bytes(&datagram.frames[0]);
    match ferroce_wire::Headers::parse(&bytes[..bytes.len().saturating_sub(ferroce_wire::ICRC_LEN)]) {
        Ok((headers, payload)) => format!("{headers} and {} bytes", payload.len()),
        Err(error) => error.to_string(),
    }
}
