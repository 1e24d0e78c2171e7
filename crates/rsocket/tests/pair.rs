//! Two ends, coupled by a network that delivers in order and as slowly as it likes: every byte arrives, nothing is written outside what
//! was granted, and nobody waits for ever.

use std::collections::VecDeque;

use ferroce_rsocket::{
    ConnData, Half, IOMAP_LEN, Iomap, LOW_WATER, Limits, Phase, Post, SGE_LEN, Sge, Source, Stream, TARGETS,
};
use proptest::prelude::*;

/// What an end exposes: its receive buffer, and its tables.
struct Memory {
    buffer: Vec<u8>,
    tables: Vec<u8>,
}

const BUFFER_AT: u64 = 0x7f00_0000_1000;
const TABLES_AT: u64 = 0x7f11_0000_2000;
const BUFFER_KEY: u32 = 77;
const TABLES_KEY: u32 = 99;
const IOMAPS: u16 = 3;

struct End {
    stream: Stream,
    limits: Limits,
    big_endian: bool,
    memory: Memory,
    send_buffer: Vec<u8>,
    /// Posted, with their payload; completed by delivery.
    wire: VecDeque<(Post, Vec<u8>)>,
    /// Delivered, and not yet completed here.
    acked: VecDeque<u64>,
    sent: u64,
    received: u64,
}

/// The byte at a position of everybody's stream.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn limits(send_queue: u16, receive_queue: u16, send_buffer: u32, half: u32, inline: u32) -> Limits {
    Limits { send_queue, receive_queue, send_buffer, receive_buffer: half * 2, inline }
}

fn conn_data(limits: &Limits, big_endian: bool) -> ConnData {
    ConnData {
        big_endian,
        credits: limits.receive_queue,
        iomaps: IOMAPS,
        table: Sge { addr: TABLES_AT, key: TABLES_KEY, length: TARGETS as u32 },
        target: Sge { addr: BUFFER_AT, key: BUFFER_KEY, length: limits.receive_buffer / 2 },
    }
}

impl End {
    fn new(limits: Limits, big_endian: bool, peer: &Limits, peer_big_endian: bool) -> End {
        let said = conn_data(peer, peer_big_endian).to_bytes();
        let peer = ConnData::parse(&said).expect("an honest peer");
        let buffer = Sge { addr: BUFFER_AT, key: BUFFER_KEY, length: limits.receive_buffer };
        End {
            stream: Stream::new(limits, buffer, &peer),
            limits,
            big_endian,
            memory: Memory {
                buffer: vec![0xa5; limits.receive_buffer as usize],
                tables: vec![0; TARGETS * SGE_LEN + usize::from(IOMAPS) * IOMAP_LEN],
            },
            send_buffer: vec![0xa5; limits.send_buffer as usize],
            wire: VecDeque::new(),
            acked: VecDeque::new(),
            sent: 0,
            received: 0,
        }
    }

    /// Reads an integer of the tables as this end's processor would.
    fn integer(&self, at: usize, len: usize) -> u64 {
        let bytes = &self.memory.tables[at..at + len];
        let fold = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
        if self.big_endian { bytes.iter().fold(0, fold) } else { bytes.iter().rev().fold(0, fold) }
    }

    fn sge(&self, at: usize) -> Sge {
        Sge { addr: self.integer(at, 8), key: self.integer(at + 8, 4) as u32, length: self.integer(at + 12, 4) as u32 }
    }

    fn look_for_target(&mut self) {
        if let Some(entry) = self.stream.target_entry() {
            let at = entry * SGE_LEN;
            if self.stream.take_target(self.sge(at)) {
                self.memory.tables[at..at + SGE_LEN].fill(0);
            }
        }
    }

    fn post(&mut self, post: Post, program: &mut impl Iterator<Item = u8>) {
        let payload = match post.source {
            Source::Nothing => Vec::new(),
            Source::Bytes(bytes, len) => bytes[..len].to_vec(),
            Source::Inline(len) => program.take(len as usize).collect(),
            Source::Ring(places) => {
                let mut payload = Vec::new();
                for place in places {
                    let place = place.offset as usize..(place.offset + place.len) as usize;
                    for (to, from) in self.send_buffer[place.clone()].iter_mut().zip(&mut *program) {
                        *to = from;
                    }
                    payload.extend(&self.send_buffer[place]);
                }
                payload
            }
        };
        self.wire.push_back((post, payload));
        // A queue pair has no more room than it was made with.
        assert!(self.wire.len() + self.acked.len() <= usize::from(self.limits.send_queue));
    }

    fn control(&mut self) {
        while let Some(post) = self.stream.next_control() {
            self.post(post, &mut std::iter::empty());
        }
    }

    fn write(&mut self, want: usize) -> usize {
        self.look_for_target();
        let Some(post) = self.stream.write(want, 4096) else { return 0 };
        let sent = self.sent;
        let mut bytes = (sent..).map(byte);
        self.post(post, &mut bytes);
        let len = self.wire.back().expect("just posted").1.len();
        assert!(len > 0 && len <= want);
        self.sent += len as u64;
        len
    }

    fn read(&mut self, want: u32) {
        let mut left = want;
        while let Some(span) = self.stream.next_data(0).filter(|_| left > 0) {
            let len = span.len.min(left);
            for offset in span.offset..span.offset + len {
                assert_eq!(self.memory.buffer[offset as usize], byte(self.received), "byte {}", self.received);
                self.received += 1;
            }
            self.stream.read(len);
            left -= len;
        }
        self.control();
    }

    /// Takes what the peer has posted longest ago.
    fn deliver(&mut self, peer: &mut End) -> bool {
        let Some((post, payload)) = peer.wire.pop_front() else { return false };
        let mut memory = match post.key {
            BUFFER_KEY => &mut self.memory.buffer[(post.remote - BUFFER_AT) as usize..],
            TABLES_KEY => &mut self.memory.tables[(post.remote - TABLES_AT) as usize..],
            _ => &mut [][..],
        };
        // Panics where the card would answer with an error.
        memory = &mut memory[..payload.len()];
        memory.copy_from_slice(&payload);
        if let Some(imm) = post.imm {
            self.stream.received(imm).expect("the peer is honest");
        }
        self.control();
        peer.acked.push_back(post.id);
        true
    }

    fn complete(&mut self) -> bool {
        let Some(id) = self.acked.pop_front() else { return false };
        self.stream.sent(id, true);
        self.control();
        true
    }
}

/// Everything that can move moves.
fn settle(a: &mut End, b: &mut End) {
    loop {
        let moved = [a.deliver(b), b.deliver(a), a.complete(), b.complete()];
        if moved == [false; 4] {
            return;
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(usize),
    Read(u32),
    Deliver,
    Complete,
}

fn steps() -> impl Strategy<Value = Vec<(bool, Step)>> {
    let step = prop_oneof![
        3 => (1..20_000usize).prop_map(Step::Write),
        3 => (1..20_000u32).prop_map(Step::Read),
        4 => Just(Step::Deliver),
        4 => Just(Step::Complete),
    ];
    proptest::collection::vec((any::<bool>(), step), 1..400)
}

fn sizes() -> impl Strategy<Value = Limits> {
    (16..40u16, 16..40u16, LOW_WATER..20_000, 1..10_000u32, 0..200u32)
        .prop_map(|(sq, rq, buffer, half, inline)| limits(sq, rq, buffer, half, inline))
}

proptest! {
    #[test]
    fn what_is_written_is_read(a in sizes(), b in sizes(), endian in any::<(bool, bool)>(), steps in steps()) {
        let mut ends = [End::new(a, endian.0, &b, endian.1), End::new(b, endian.1, &a, endian.0)];
        for end in &mut ends {
            end.control();
        }
        for (second, step) in steps {
            let [a, b] = &mut ends;
            let (end, peer) = if second { (b, a) } else { (a, b) };
            match step {
                Step::Write(want) => drop(end.write(want)),
                Step::Read(want) => end.read(want),
                Step::Deliver => drop(end.deliver(peer)),
                Step::Complete => drop(end.complete()),
            }
        }
        // However they came to stand, both directions go on: much more than the buffers hold.
        let goals = [ends[0].sent + 100_000, ends[1].sent + 100_000];
        let [a, b] = &mut ends;
        while a.sent < goals[0] || b.sent < goals[1] {
            settle(a, b);
            a.read(u32::MAX);
            b.read(u32::MAX);
            settle(a, b);
            let moved = a.write((goals[0] - a.sent) as usize) + b.write((goals[1] - b.sent) as usize);
            prop_assert!(moved > 0, "both ends wait: {:?} {:?}", a.stream, b.stream);
        }
        settle(a, b);
        a.read(u32::MAX);
        b.read(u32::MAX);
        settle(a, b);
        prop_assert_eq!((a.received, b.received), (b.sent, a.sent));

        // One ends its direction, the other answers with more, and ends too.
        a.stream.shutdown(Half::Write);
        a.control();
        settle(a, b);
        prop_assert!(!b.stream.is_readable() && b.stream.is_writable() && a.stream.is_readable());
        prop_assert_eq!(a.write(10), 0);
        prop_assert!(b.write(10) > 0);
        settle(a, b);
        b.stream.shutdown(Half::Write);
        b.control();
        settle(a, b);
        a.read(u32::MAX);
        prop_assert_eq!(a.received, b.sent);
        prop_assert_eq!((a.stream.phase(), b.stream.phase()), (Phase::Disconnected, Phase::Disconnected));
        prop_assert!(a.stream.is_settled() && b.stream.is_settled());
    }

    /// Whatever a peer says: what the program is shown lies in the buffer, and is no more than was granted.
    #[test]
    fn any_immediates(limits in sizes(), imms in proptest::collection::vec(hostile_imm(), 0..300), reads in any::<u64>()) {
        let mut end = End::new(limits, false, &limits, false);
        let mut reads = reads;
        for imm in imms {
            if end.stream.received(imm).is_err() {
                prop_assert_ne!(end.stream.phase(), Phase::Connected);
            }
            end.control();
            while end.complete() {}
            let drained: Vec<_> = end.wire.drain(..).map(|(post, _)| post.id).collect();
            end.acked.extend(drained);
            prop_assert!(end.stream.unread() <= limits.receive_buffer);
            let mut seen = 0;
            while let Some(span) = end.stream.next_data(seen) {
                prop_assert!(span.len > 0 && span.offset + span.len <= limits.receive_buffer);
                seen += span.len;
            }
            prop_assert_eq!(seen, end.stream.unread());
            reads = reads.rotate_left(7) ^ 0x55;
            end.stream.read((reads % (u64::from(seen) + 1)) as u32);
        }
    }

    /// Whatever lies in the tables: what is sent comes from the send buffer, and there is an end to it.
    #[test]
    fn any_targets(limits in sizes(), found in proptest::collection::vec(any::<(u64, u32, u32)>(), 0..50), want in 1..100_000usize) {
        let mut end = End::new(limits, false, &limits, false);
        let mut found = found.into_iter().map(|(addr, key, length)| Sge { addr, key, length });
        for _ in 0..200 {
            if end.stream.target_entry().is_some() {
                let Some(sge) = found.next() else { break };
                end.stream.take_target(sge);
            }
            if let Some(post) = end.stream.write(want, u32::MAX) {
                if let Source::Ring(places) = post.source {
                    for place in places {
                        prop_assert!(place.offset + place.len <= limits.send_buffer);
                    }
                }
                end.stream.sent(post.id, true);
            }
            let iomap = Iomap { offset: want as u64, sge: found.next().unwrap_or_default() };
            for offset in [0, want as u64, u64::MAX] {
                if let Some(post) = end.stream.write_mapped(want, u32::MAX, &iomap, offset) {
                    end.stream.sent(post.id, true);
                }
            }
        }
    }
}

/// Immediates that get far, and others.
fn hostile_imm() -> impl Strategy<Value = u32> {
    prop_oneof![
        6 => 0..6000u32,
        1 => any::<u32>(),
        1 => (0..0x1_0000u32).prop_map(|limit| 4 << 29 | limit),
        1 => (0..4u32).prop_map(|control| 7 << 29 | control),
        1 => (0..8u32).prop_map(|index| 6 << 29 | index),
    ]
}

#[test]
fn a_mapping_arrives_behind_the_targets_and_its_credit_comes_back() {
    let size = limits(16, 16, 4096, 4096, 64);
    let mut a = End::new(size, false, &size, true);
    let mut b = End::new(size, true, &size, false);
    a.control();
    b.control();
    settle(&mut a, &mut b);
    let iomap = Iomap { offset: 0x1_0000_0000, sge: Sge { addr: 0xdead_0000, key: 5, length: 100 } };
    assert_eq!(a.stream.map(IOMAPS, iomap), None);
    // Many more than there are credits.
    for round in 0..100u16 {
        let index = round % IOMAPS;
        let post = a.stream.map(index, iomap).expect("room");
        a.post(post, &mut std::iter::empty());
        settle(&mut a, &mut b);
        let at = TARGETS * SGE_LEN + usize::from(index) * IOMAP_LEN;
        let found = Iomap { offset: b.integer(at, 8), sge: b.sge(at + 8) };
        assert_eq!(found, iomap);
    }
    assert_eq!(iomap.locate(0x1_0000_0000), Some((0xdead_0000, 100)));
    assert_eq!(iomap.locate(0x1_0000_0063), Some((0xdead_0063, 1)));
    assert_eq!(iomap.locate(0x1_0000_0064), None);
    assert_eq!(iomap.locate(0xffff_ffff), None);
    let post = b.stream.write_mapped(1000, 4096, &iomap, 0x1_0000_000a).expect("room");
    assert_eq!((post.imm, post.remote, post.key), (None, 0xdead_000a, 5));
    assert!(matches!(post.source, Source::Ring([place, _]) if place.len == 90));
}

#[test]
fn disconnect_is_the_last_word() {
    let size = limits(16, 16, 4096, 4096, 64);
    let mut a = End::new(size, false, &size, false);
    let mut b = End::new(size, false, &size, false);
    assert!(a.write(1000) > 0);
    a.stream.shutdown(Half::Both);
    a.control();
    assert!(!a.stream.is_settled());
    settle(&mut a, &mut b);
    assert_eq!((a.stream.phase(), b.stream.phase()), (Phase::Disconnected, Phase::Disconnected));
    assert!(a.stream.is_settled());
    // What came before it can be read.
    assert_eq!(b.stream.unread(), 1000);
    b.read(u32::MAX);
    assert_eq!(b.received, 1000);
    assert_eq!(b.stream.next_control(), None);
    assert!(b.stream.write(10, 100).is_none());
}

#[test]
fn a_failed_send_breaks_the_stream_and_gives_its_room_back() {
    let size = limits(16, 16, 4096, 4096, 0);
    let mut a = End::new(size, false, &size, false);
    let post = a.stream.write(4000, u32::MAX).expect("room");
    a.stream.sent(post.id, false);
    assert_eq!(a.stream.phase(), Phase::Broken);
    assert!(a.stream.is_settled() && !a.stream.has_room());
}

#[test]
fn after_a_violation_nothing_more_is_readable() {
    let size = limits(16, 16, 4096, 4096, 0);
    let mut a = End::new(size, false, &size, false);
    a.stream.received(100).expect("data that was granted");
    a.stream.received(5000).expect_err("more than was granted");
    assert_eq!((a.stream.phase(), a.stream.unread()), (Phase::Broken, 100));
    a.stream.received(100).expect("not looked at");
    assert_eq!(a.stream.unread(), 100);
}

#[test]
fn both_ends_closing_their_direction_at_once_still_deliver() {
    let size = limits(16, 16, 4096, 4096, 0);
    let mut a = End::new(size, false, &size, false);
    let mut b = End::new(size, false, &size, false);
    assert!(a.write(100) > 0 && b.write(200) > 0);
    a.stream.shutdown(Half::Write);
    b.stream.shutdown(Half::Write);
    a.control();
    b.control();
    // B's data and its end come before A's have left.
    while a.deliver(&mut b) {}
    assert_eq!(a.stream.phase(), Phase::Disconnected);
    assert!(!a.stream.is_settled(), "B has not got A's bytes");
    settle(&mut a, &mut b);
    assert_eq!((a.stream.unread(), b.stream.unread()), (200, 100));
    assert!(a.stream.is_settled() && b.stream.is_settled());
}
