//! A bad wire, by seed: whatever it does, every request completes once, in order, with success, and every byte is where it belongs.

use smallvec::SmallVec;

use crate::testing::{Fate, Pair, Region, Setup, Who};
use crate::verbs::{FlushRange, Placement, QpAttr, QpType, SendData, SendFlags, SendOp, SendWr, WcOpcode, WcStatus};

/// xorshift64*: enough to be nasty, and the same on every machine.
#[derive(Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Room of one request in each region.
const SLOT: u32 = 70_000;
const REQUESTS: u32 = 24;
/// Each region: sources and READ results, then targets of WRITEs, then receives, then what READs read, then the atomics' word.
const TARGETS: u32 = REQUESTS * SLOT;
const INBOX: u32 = 2 * REQUESTS * SLOT;
const LIBRARY: u32 = 3 * REQUESTS * SLOT;
const WORD: u32 = LIBRARY + SLOT;

fn bad_wire(qp_type: QpType, seed: u64, loss: u64) {
    let mut random = Random::new(seed);
    let mtu = [256, 1024, 4096][random.below(3) as usize];
    let setup = Setup {
        mtu,
        psn_a: if random.below(2) == 0 { 0x00ff_fff0 } else { 0x1000 },
        region: WORD + 8,
        attr: QpAttr {
            max_rd_atomic: 1 + random.below(16) as u8,
            timeout: 0,
            min_rnr_timer: 1,
            ..Setup::new(qp_type).attr
        },
        ..Setup::new(qp_type)
    };
    let mut pair = Pair::with(&setup);
    let mut wire = random.clone();
    pair.rule(move |_, _| match wire.below(1000) {
        n if n < loss => Fate::Drop,
        n if n < loss + 30 => Fate::Duplicate,
        n if n < loss + 60 => Fate::Delay(wire.below(300_000)),
        _ => Fate::Deliver,
    });
    // An XRC target requests nothing.
    let ends = if qp_type.is_xrc() { &[Who::A][..] } else { &[Who::A, Who::B] };
    let plans: Vec<Plan> = ends.iter().map(|&who| plan(&mut pair, who, &mut random)).collect();
    pair.run();
    for (who, plan) in ends.iter().zip(&plans) {
        check(&pair, *who, plan, seed);
    }
}

/// A FLUSH of what is behind `offset`.
fn flush(region: Region, offset: u32) -> SendOp {
    let range = FlushRange::Bytes { raddr: region.addr + u64::from(offset), len: SLOT };
    SendOp::Flush { rkey: region.key, range, placement: Placement::GLOBAL }
}

struct Plan {
    /// Expected bytes at the other end (or, for READs, here): offset and bytes.
    writes: Vec<(u32, Vec<u8>)>,
    reads: Vec<(u32, Vec<u8>)>,
    sends: Vec<(Vec<u8>, Option<u32>)>,
    adds: u64,
}

fn plan(pair: &mut Pair, who: Who, random: &mut Random) -> Plan {
    let mut plan = Plan { writes: vec![], reads: vec![], sends: vec![], adds: 0 };
    let (peer, own) = (pair.end(who.peer()).region, pair.end(who).region);
    for id in 0..REQUESTS {
        let offset = id * SLOT;
        let len = match random.below(4) {
            0 => random.below(64),
            1 => random.below(5000),
            _ => random.below(u64::from(SLOT)),
        } as u32;
        let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        let raddr = peer.addr + u64::from(TARGETS + offset);
        let rkey = peer.key;
        let (op, len) = match random.below(8) {
            0 => (SendOp::Write { raddr, rkey }, len),
            1 => (SendOp::WriteImm { raddr, rkey, imm: id }, len),
            2 => (SendOp::Read { raddr: peer.addr + u64::from(LIBRARY), rkey }, len),
            3 => (SendOp::FetchAdd { raddr: peer.addr + u64::from(WORD), rkey, add: 1 }, 8),
            4 => (SendOp::SendImm { imm: id }, len),
            5 => (SendOp::AtomicWrite { raddr, rkey }, 8),
            6 => (flush(peer, TARGETS), 0),
            _ => (SendOp::Send, len),
        };
        let memory = &mut pair.end_mut(who).host.memory;
        match op {
            SendOp::Write { .. } | SendOp::WriteImm { .. } | SendOp::AtomicWrite { .. } => {
                let bytes = if matches!(op, SendOp::AtomicWrite { .. }) { vec![0x60 | id as u8; 8] } else { bytes };
                memory.write(own, offset, &bytes);
                plan.writes.push((TARGETS + offset, bytes.clone()));
                if let SendOp::WriteImm { imm, .. } = op {
                    plan.sends.push((bytes, Some(imm)));
                }
            }
            SendOp::Read { .. } => {
                let source = pair.end(who.peer()).bytes(LIBRARY, len).to_vec();
                plan.reads.push((offset, source));
            }
            SendOp::FetchAdd { .. } => plan.adds += 1,
            SendOp::Flush { .. } => {}
            SendOp::SendImm { imm } => {
                memory.write(own, offset, &bytes);
                plan.sends.push((bytes, Some(imm)));
            }
            _ => {
                memory.write(own, offset, &bytes);
                plan.sends.push((bytes, None));
            }
        }
        let half = len / 2;
        let sges: SmallVec<_> = [own.sge(offset, half), own.sge(offset + half, len - half)].into_iter().collect();
        let mut flags = SendFlags::SIGNALED;
        flags.set(SendFlags::FENCE, random.below(8) == 0);
        pair.post_wr(
            who,
            SendWr { wr_id: u64::from(id), op, flags, data: SendData::Sges(sges), ud: None, xrc_srqn: None },
        );
    }
    let count = plan.sends.len() as u32;
    pair.end_mut(who.peer()).post_recvs(0, count, INBOX, SLOT);
    plan
}

fn check(pair: &Pair, who: Who, plan: &Plan, seed: u64) {
    let (here, there) = (pair.end(who), pair.end(who.peer()));
    let ids: Vec<u64> = here.host.sent.iter().map(|completion| completion.wr_id).collect();
    assert_eq!(ids, (0..u64::from(REQUESTS)).collect::<Vec<_>>(), "seed {seed}");
    assert!(here.host.sent.iter().all(|completion| completion.status == WcStatus::Success), "seed {seed}");
    assert_eq!(here.host.released, REQUESTS);
    for (offset, bytes) in &plan.writes {
        assert_eq!(there.bytes(*offset, bytes.len() as u32), bytes, "seed {seed}: WRITE");
    }
    for (offset, bytes) in &plan.reads {
        assert_eq!(here.bytes(*offset, bytes.len() as u32), bytes, "seed {seed}: READ");
    }
    assert_eq!(there.host.memory.atomics, plan.adds as u32, "seed {seed}: each atomic once");
    assert_eq!(there.received().len(), plan.sends.len(), "seed {seed}");
    for (slot, (completion, (bytes, imm))) in there.received().iter().zip(&plan.sends).enumerate() {
        if completion.opcode == WcOpcode::Recv {
            let offset = INBOX + slot as u32 * SLOT;
            assert_eq!(there.bytes(offset, bytes.len() as u32), bytes, "seed {seed}: SEND");
        }
        assert_eq!(completion.status, WcStatus::Success);
        assert_eq!(completion.byte_len, bytes.len() as u32, "seed {seed}");
        assert_eq!(completion.flags.contains(crate::WcFlags::WITH_IMM).then_some(completion.imm), *imm);
    }
}

#[test]
fn clean_wire() {
    for seed in 0..10 {
        bad_wire(QpType::Rc, seed, 0);
        bad_wire(QpType::XrcSend, seed, 0);
    }
}

#[test]
fn some_loss() {
    for seed in 0..40 {
        bad_wire(QpType::Rc, seed, 20);
        bad_wire(QpType::XrcSend, seed, 20);
    }
}

#[test]
fn heavy_loss() {
    for seed in 0..20 {
        bad_wire(QpType::Rc, seed, 200);
        bad_wire(QpType::XrcSend, seed, 200);
    }
}
