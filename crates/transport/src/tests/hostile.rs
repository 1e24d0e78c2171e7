//! Packets that no honest peer sends: nothing panics, memory stays bounded, and every receive completes at most once.

use ferroce_wire::{Aeth, AtomicEth, Bth, Deth, Ext, Headers, Opcode, Psn, Reth, Syndrome};

use super::random::Random;
use crate::testing::{Fate, Pair, Setup, Who};
use crate::verbs::{QpState, QpType, SendOp};

/// Headers with fields near what the queue pair expects, so that many get past the first checks.
fn headers(random: &mut Random, pair: &Pair, codes: &[u8]) -> Headers {
    let opcode = Opcode(codes[random.below(codes.len() as u64) as usize]);
    let near = [0x1000, 0xa0_0000][random.below(2) as usize] + random.below(40) as u32;
    let psn = if random.below(8) == 0 { random.next() as u32 } else { near.wrapping_sub(4) };
    let mut headers = Headers::new(Bth::new(opcode, 0, Psn::new(psn)));
    headers.bth.ack_req = random.below(2) == 0;
    headers.bth.solicited = random.below(2) == 0;
    headers.bth.tver = u8::from(random.below(50) == 0);
    let ext = opcode.layout().map_or(Ext::empty(), |layout| layout.ext);
    let region = if random.below(2) == 0 { pair.b.region } else { pair.a.region };
    let va = match random.below(4) {
        0 => random.next(),
        1 => u64::MAX - random.below(5000),
        _ => region.addr + random.below(u64::from(region.len) + 10),
    };
    let rkey = if random.below(10) == 0 { random.next() as u32 } else { region.key };
    let len = [0, 8, 1000, 1024, 2048, 100_000, 1 << 31, u32::MAX][random.below(8) as usize];
    headers.reth = ext.contains(Ext::RETH).then_some(Reth { va, rkey, len });
    headers.atomic = ext.contains(Ext::ATOMIC_ETH).then_some(AtomicEth { va: va & !7, rkey, swap_add: 1, compare: 0 });
    let syndromes = [0x1f, 0x00, 0x21, 0x60, 0x61, 0x62, 0x63, 0x64, 0x7f, 0x40, 0x80, 0xff];
    let syndrome = Syndrome(syndromes[random.below(syndromes.len() as u64) as usize]);
    headers.aeth = ext.contains(Ext::AETH).then_some(Aeth { syndrome, msn: random.next() as u32 & 0xff_ffff });
    headers.atomic_ack = ext.contains(Ext::ATOMIC_ACK_ETH).then_some(random.next());
    headers.imm = ext.contains(Ext::IMM_DT).then_some(random.next() as u32);
    headers.ieth = ext.contains(Ext::IETH).then_some(rkey);
    headers.deth = ext.contains(Ext::DETH).then_some(Deth { qkey: 0x1234, src_qp: 0x22 });
    headers
}

fn attack(seed: u64, qp_type: QpType, codes: &[u8]) {
    let mut random = Random::new(seed);
    let mut pair = Pair::with(&Setup::new(qp_type));
    // The honest peer's own packets never arrive: only ours do.
    pair.rule(|_, _| Fate::Drop);
    pair.b.post_recvs(0, 20, 0, 3000);
    pair.a.post_recvs(0, 20, 0, 3000);
    for id in 0..10 {
        let op = match random.below(4) {
            0 => pair.read_op(0),
            1 => pair.add_op(64, 1),
            2 => SendOp::Send,
            _ => pair.write_op(0),
        };
        pair.post(id, op, 0, 8);
    }
    for _ in 0..300 {
        let target = if random.below(2) == 0 { Who::A } else { Who::B };
        let headers = headers(&mut random, &pair, codes);
        let len = [0, 1, 8, 1000, 1023, 1024, 1025, 4096][random.below(8) as usize];
        pair.inject(target.peer(), headers, &vec![0xee; len]);
        if random.below(3) == 0 {
            pair.run_for(random.below(2_000_000));
        }
    }
    pair.run_for(10_000_000_000);
    for end in [&pair.a, &pair.b] {
        assert!(end.host.received.len() + end.host.receives.len() <= 20, "seed {seed}");
        let mut ids: Vec<_> = end.host.received.iter().map(|done| done.wr_id).collect();
        ids.dedup();
        assert_eq!(ids.len(), end.host.received.len(), "seed {seed}: twice");
        assert!(ids.is_sorted(), "seed {seed}: {ids:?}");
    }
    let sent: Vec<_> = pair.a.host.sent.iter().map(|done| done.wr_id).collect();
    assert_eq!(sent, (0..sent.len() as u64).collect::<Vec<_>>(), "seed {seed}");
    if pair.a.qp.state() == QpState::Err {
        assert_eq!(sent.len(), 10, "seed {seed}: all flushed");
    }
    // However it ended, it can be used again.
    for who in [Who::A, Who::B] {
        pair.to_state(who, QpState::Reset);
    }
    for window in pair.a.host.windows.iter().chain(&pair.b.host.windows) {
        assert_eq!(window.in_flight(), 0);
    }
}

#[test]
fn any_opcode() {
    let codes: Vec<u8> = (0..=255).collect();
    for seed in 0..40 {
        attack(seed, QpType::Rc, &codes);
        attack(seed, QpType::Uc, &codes);
        attack(seed, QpType::Ud, &codes);
    }
}

#[test]
fn opcodes_of_its_own_class() {
    let rc: Vec<u8> = (0x00..=0x17).collect();
    let uc: Vec<u8> = (0x20..=0x2b).collect();
    for seed in 0..80 {
        attack(seed, QpType::Rc, &rc);
        attack(seed, QpType::Uc, &uc);
        attack(seed, QpType::Ud, &[0x64, 0x65]);
    }
}

#[test]
fn only_responses() {
    for seed in 0..50 {
        attack(seed, QpType::Rc, &[0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x11, 0x12]);
    }
}

#[test]
fn answers_behind_a_long_read_stay_bounded() {
    let mut pair = Pair::new(QpType::Rc);
    pair.b.qp.assert_invariants();
    let key = pair.b.region.key;
    let mut read = Headers::new(Bth::new(Opcode::RC_READ_REQUEST, 0, Psn::new(0x1000)));
    read.reth = Some(Reth { va: pair.b.region.addr, rkey: key, len: 1 << 20 });
    pair.inject(Who::A, read, &[]);
    let next = 0x1000 + 1024;
    for _ in 0..1000 {
        // A SEND without a receive, then a duplicate: an RNR NAK and an ACK, in turns, and nothing polled between.
        for psn in [next, 0x0fff] {
            pair.inject(Who::A, Headers::new(Bth::new(Opcode::RC_SEND_ONLY, 0, Psn::new(psn))), &[]);
        }
    }
    pair.run_for(0);
    let short = pair.seen.iter().filter(|seen| seen.headers.bth.opcode == Opcode::RC_ACKNOWLEDGE).count();
    assert!((2..=256).contains(&short), "{short}");
}
