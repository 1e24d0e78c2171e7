//! A ring whose other side writes what it likes.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use ferroce_core::Buffer;
use ferroce_transport::{Payload, Span, Train};
use proptest::prelude::*;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create};

use super::tests::{End, inline_train, pair, write_train};
use super::*;

fn memory_file(size: u64, seals: SealFlags, content: &[u8]) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memory file");
    ftruncate(&fd, size).expect("it grows");
    std::os::unix::fs::FileExt::write_all_at(&File::from(fd.try_clone().expect("a descriptor")), content, 0)
        .expect("it takes bytes");
    fcntl_add_seals(&fd, seals).expect("it takes seals");
    fd
}

/// What an honest peer's memory begins with.
fn beginning() -> Vec<u8> {
    let (ring, fd) = Ring::offer().expect("a ring");
    let mut bytes = vec![0; 8];
    std::os::unix::fs::FileExt::read_exact_at(&File::from(fd), &mut bytes, 0).expect("it is there");
    drop(ring);
    bytes
}

#[test]
fn only_sealed_memory_of_the_right_size_and_version_is_taken() {
    let (size, seals) = (shared::SIZE as u64, SealFlags::SHRINK | SealFlags::GROW);
    let good = beginning();
    Ring::accept(&memory_file(size, seals, &good)).expect("a ring");
    let refused = |fd: OwnedFd| Ring::accept(&fd).map(drop).expect_err("it is none");
    assert_eq!(refused(memory_file(size, SealFlags::GROW, &good)), Refusal::NotSealed);
    assert_eq!(refused(memory_file(size, SealFlags::empty(), &good)), Refusal::NotSealed);
    assert_eq!(refused(memory_file(size - 1, seals, &good)), Refusal::Size);
    assert_eq!(refused(memory_file(size + 4096, seals, &good)), Refusal::Size);
    assert_eq!(refused(memory_file(size, seals, &good[..7])), Refusal::Version);
    assert_eq!(refused(memory_file(size, seals, b"")), Refusal::Version);
    let sealed_for_writing = memory_file(size, seals | SealFlags::WRITE, &good);
    assert_eq!(refused(sealed_for_writing), Refusal::System(libc::EPERM));
    let (_, pipe) = std::io::pipe().expect("a pipe");
    assert_eq!(refused(pipe.into()), Refusal::NotSealed);
    let file = tempfile_of(size, &good);
    assert_eq!(refused(file.into()), Refusal::NotSealed);
    let read_only = File::open("/proc/self/exe").expect("it is there");
    assert_eq!(refused(read_only.into()), Refusal::NotSealed);
    // A copy that can only be read cannot be used.
    let path = memory_file(size, seals, &good);
    let copy = File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&path))).expect("it opens");
    assert_eq!(refused(copy.into()), Refusal::System(libc::EACCES));
}

fn tempfile_of(size: u64, content: &[u8]) -> File {
    let path = std::env::temp_dir().join(format!("ferroce-ring-test-{:016x}", rand::random::<u64>()));
    let options = File::options().read(true).write(true).create_new(true).open(&path);
    let file = options.expect("a temporary file");
    std::fs::remove_file(&path).expect("its name goes");
    file.set_len(size).expect("it grows");
    std::os::unix::fs::FileExt::write_all_at(&file, content, 0).expect("it takes bytes");
    file
}

fn set(word: shared::Word<'_>, value: u64) {
    word.store(value).expect("the memory is there");
}

/// What the other side does to the memory.
#[derive(Clone, Debug)]
enum Act {
    Head(u64),
    MoveHead(i64),
    Tail(u64),
    Base(u64),
    Sleeping(u32),
    /// A word of the data, at 8 times that.
    Word(u16, u64),
    /// Words of lending: of the producer, of the consumer.
    Lending(u8, u64),
    /// A record that is a loan, or nearly.
    Loan(u16, u32, u32),
    /// The other side sends honestly.
    Send(u16),
    /// We do.
    SendBack(u16),
    Recv(u16),
}

fn act() -> impl Strategy<Value = Act> {
    let position =
        prop_oneof![any::<u64>(), (0u64..70_000).prop_map(|n| n * 8), (0u64..2_000).prop_map(|n| u64::MAX - n * 4),];
    let length = prop_oneof![Just(super::WRAP), any::<u64>(), 0u64..5_000, 12u64..64];
    prop_oneof![
        1 => position.clone().prop_map(Act::Head),
        3 => (-64i64..4_096).prop_map(|n| Act::MoveHead(n * 8)),
        1 => position.clone().prop_map(Act::Tail),
        1 => position.prop_map(Act::Base),
        1 => any::<u32>().prop_map(Act::Sleeping),
        6 => (any::<u16>(), length.clone()).prop_map(|(at, word)| Act::Word(at, word)),
        6 => (0u16..64, length).prop_map(|(at, word)| Act::Word(at, word)),
        2 => (any::<u8>(), prop_oneof![any::<u64>(), 0u64..3]).prop_map(|(which, value)| Act::Lending(which, value)),
        2 => (0u16..200, 0u32..300, prop_oneof![Just(4096u32), Just(1024u32), any::<u32>()])
            .prop_map(|(len, packets, mtu)| Act::Loan(len, packets, mtu)),
        4 => (0u16..4_096).prop_map(Act::Send),
        4 => (0u16..4_096).prop_map(Act::SendBack),
        6 => any::<u16>().prop_map(Act::Recv),
    ]
}

fn play(ours: &mut End, theirs: &mut End, act: &Act) {
    let (memory, way) = theirs.ring.producer.memory_and_way();
    match *act {
        Act::Head(position) => set(memory.head(way), position),
        Act::MoveHead(by) => {
            set(memory.head(way), memory.head(way).load().expect("it is there").wrapping_add(by as u64));
        }
        Act::Tail(position) => set(memory.tail(ours.ring.producer.memory_and_way().1), position),
        Act::Base(position) => set(memory.base(way), position),
        Act::Sleeping(flag) => set(memory.sleeping(way), flag.into()),
        Act::Word(at, word) => set(memory.record(way, usize::from(at) * 8), word),
        Act::Lending(which, value) => match which % 5 {
            0 => set(memory.recalls(way), value),
            1 => set(memory.process(way), value),
            2 => set(memory.mark(way), value),
            3 => set(memory.challenge(ours.ring.producer.memory_and_way().1), value),
            _ => set(memory.verdict(ours.ring.producer.memory_and_way().1), value),
        },
        Act::Loan(len, packets, mtu) => {
            // Where an honest producer that is at its beginning would write.
            let mut bytes = vec![0; len.into()];
            for (at, word) in [packets, mtu, 12, 12].into_iter().enumerate() {
                let to = bytes.get_mut(16 + 4 * at..20 + 4 * at);
                to.into_iter().for_each(|to| to.copy_from_slice(&word.to_ne_bytes()));
            }
            for at in [32, 44] {
                if let Some(opcode) = bytes.get_mut(at).filter(|_| packets % 8 != 0) {
                    *opcode = ferroce_wire::Opcode::RC_WRITE_MIDDLE.0;
                }
            }
            set(memory.record(way, 0), loan::LOAN | u64::from(len));
            memory.put(way, 8, &bytes).expect("it is there");
            set(memory.head(way), 8 + u64::from(len).next_multiple_of(8));
        }
        Act::Send(len) => {
            let _ = theirs.send(&inline_train(&vec![1; len.into()], 0));
        }
        Act::SendBack(len) => ours.send(&inline_train(&vec![2; len.into()], 0)).expect("its memory is there"),
        Act::Recv(budget) => {
            let before = ours.stats.ring_rx_packets;
            for (_, payload) in ours.recv(budget.into()) {
                assert!(payload.len() <= PACKET_MAX);
            }
            let most = 64 * u64::from(ferroce_transport::MAX_LENT_PACKETS);
            assert!(ours.stats.ring_rx_packets - before <= most, "bounded work");
        }
    }
    let _ = ours.ring.show(&mut ours.stats);
    ours.ring.is_empty();
    let watch = ours.ring.watch();
    watch.announce_sleep();
    watch.has_something();
    watch.announce_awake();
}

proptest! {
    #[test]
    fn whatever_the_other_side_does_our_side_stands(acts in prop::collection::vec(act(), 1..200), accepts: bool) {
        let (a, b) = pair();
        let (mut ours, mut theirs) = if accepts { (b, a) } else { (a, b) };
        ours.ring.borrow();
        for act in &acts {
            play(&mut ours, &mut theirs, act);
        }
        // Broken is for good, and counted once.
        prop_assert_eq!(ours.stats.ring_broken, u64::from(ours.ring.is_broken()));
        if ours.ring.is_broken() {
            let before = ours.stats;
            prop_assert!(ours.recv(1 << 20).is_empty());
            ours.send(&inline_train(b"x", 0)).expect("its memory is there");
            prop_assert_eq!(ours.stats.ring_tx_packets, before.ring_tx_packets);
            prop_assert_eq!(ours.stats.ring_tx_drop_broken, before.ring_tx_drop_broken + 1);
            prop_assert!(!ours.ring.watch().has_something());
        }
    }
}

/// Positions that no honest peer writes, one by one.
#[test]
fn impossible_positions_and_lengths_break_the_ring() {
    let sent = |spoil: &dyn Fn(&Memory, Way)| {
        let (mut a, mut b) = pair();
        a.send(&inline_train(b"some", 0)).expect("sent");
        let (memory, way) = a.ring.producer.memory_and_way();
        spoil(memory, way);
        b.recv(1 << 20);
        (b.ring.is_broken(), b.stats.ring_broken)
    };
    let record = 8 + 16;
    assert_eq!(sent(&|_, _| {}), (false, 0));
    for head in [1, record - 1, record + 4, shared::AREA as u64 + 8, u64::MAX, u64::MAX - 7] {
        assert_eq!(sent(&|memory, way| set(memory.head(way), head)), (true, 1), "head {head}");
    }
    for length in [0, 11, 17, 24, PACKET_MAX as u64, PACKET_MAX as u64 + 1, super::WRAP, super::WRAP + 1, u64::MAX] {
        assert_eq!(sent(&|memory, way| set(memory.record(way, 0), length)), (true, 1), "{length}");
    }
    assert_eq!(sent(&|memory, way| set(memory.base(way), 4)), (true, 1));
    // At the end of the area a record must fit, whatever lies behind.
    let at_end = |memory: &Memory, way| {
        set(memory.base(way), (shared::AREA as u64 - 8).wrapping_neg());
        set(memory.record(way, shared::AREA - 8), 16);
    };
    assert_eq!(sent(&at_end), (true, 1));
    // The head goes back after something was read.
    let (mut a, mut b) = pair();
    a.send(&inline_train(b"some", 0)).expect("sent");
    assert_eq!(b.recv(1 << 20).len(), 1);
    let (memory, way) = a.ring.producer.memory_and_way();
    set(memory.head(way), 0);
    assert!(b.recv(1 << 20).is_empty());
    assert!(b.ring.is_broken());
}

#[test]
fn a_tail_that_no_consumer_writes_breaks_the_ring() {
    for tail in [8, 1, u64::MAX] {
        let (mut a, b) = pair();
        let (memory, way) = a.ring.producer.memory_and_way();
        set(memory.tail(way), tail);
        // The tail is looked at when room is short.
        for _ in 0..300 {
            a.send(&inline_train(&[0; 4096], 0)).expect("its memory is there");
        }
        // 8 is a position, but none that was reached by whole records: only the reader of it could know.
        assert_eq!(a.ring.is_broken(), tail != 8, "tail {tail}");
        drop(b);
    }
}

/// An offer is taken or withdrawn, never both: nobody writes into a ring that the other side has forgotten.
#[test]
fn an_offer_is_taken_or_withdrawn() {
    let (ring, memory) = Ring::offer().expect("a ring");
    let _peer = Ring::accept(&memory).expect("it was just made");
    assert!(!ring.withdraw());
    Ring::accept(&memory).expect("who took it may ask for it again");
    let (ring, memory) = Ring::offer().expect("a ring");
    assert!(ring.withdraw());
    assert_eq!(Ring::accept(&memory).map(drop), Err(Refusal::Withdrawn));
    assert!(ring.withdraw(), "still");
}

/// What an honest end had in the ring is lost, and it is told: it must not go on writing for nobody.
#[test]
fn an_end_that_gives_up_tells_the_other() {
    let (mut a, mut b) = pair();
    a.send(&inline_train(b"some", 0)).expect("sent");
    let (memory, way) = a.ring.producer.memory_and_way();
    set(memory.record(way, 0), u64::MAX);
    assert!(a.ring.is_usable() && b.ring.is_usable());
    b.recv(1 << 20);
    assert!(b.ring.is_broken() && !b.ring.is_usable());
    assert!(!a.ring.is_broken() && !a.ring.is_usable(), "seen before it is read");
    assert!(a.ring.watch().has_something(), "who sleeps is told as well");
    assert!(a.recv(1 << 20).is_empty());
    assert!(a.ring.is_broken() && !a.ring.watch().has_something());
    assert_eq!((a.stats.ring_broken, b.stats.ring_broken), (1, 1));
}

/// The other side scribbles while we read and write.
#[test]
fn scribbling_during_our_turns_harms_nobody() {
    const ROUNDS: usize = 300;
    let stop = AtomicBool::new(false);
    for seed in 0..4u64 {
        let (a, mut b) = pair();
        let (memory, way) = a.ring.producer.memory_and_way();
        std::thread::scope(|scope| {
            let scribbler = || {
                let mut state = seed + 1;
                let mut random = || {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    state >> 33
                };
                let mut head = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    let at = (random() as usize % 4096) * 8;
                    let word = if random() % 4 == 0 { super::WRAP } else { random() % 5_000 };
                    set(memory.record(way, at), word);
                    // Mostly forward, so that the ring lives a while.
                    head = memory.tail(way).load().expect("it is there") + random() % 512 * 8;
                    set(memory.head(way), head);
                }
                head
            };
            let thread = scope.spawn(scribbler);
            for _ in 0..ROUNDS {
                b.recv(64 << 10);
                b.send(&inline_train(&[3; 100], 0)).expect("its memory is there");
                std::thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
            thread.join().expect("it only writes");
        });
        stop.store(false, Ordering::Relaxed);
        assert!(b.stats.ring_broken <= 1);
    }
}

/// The system has no memory for pages of the ring when they are touched: the ring breaks, the program lives.
#[test]
fn memory_that_cannot_be_had_breaks_the_ring() {
    let buffer = Buffer::new(20_000);
    let long = write_train(&buffer, 0, 20_000, 4096, 1);
    // What is left of the memory: nothing, the header alone, the first page of what is sent.
    for left in [0, 4096, 8192] {
        let acts: [&dyn Fn(&mut End); 6] = [
            &|end| end.send(&long).expect("the program's memory is there"),
            &|end| end.send(&inline_train(&[1; 4096], 0)).expect("its memory is there"),
            &|end| _ = end.ring.show(&mut end.stats),
            &|end| _ = end.recv(1 << 20),
            &|end| _ = (end.ring.is_empty(), end.ring.is_usable(), end.ring.withdraw()),
            &|end| {
                let watch = end.ring.watch();
                watch.announce_sleep();
                assert!(watch.has_something() || left > 0, "there is something to find out");
                watch.announce_awake();
            },
        ];
        for (at, act) in acts.iter().enumerate() {
            let (memory, fd) = Memory::create_unsealed();
            let mut end = End::new(Ring::new(memory, Way::There, Way::Back));
            ftruncate(&fd, left).expect("it shrinks");
            act(&mut end);
            let breaks = at < 2 || at < 4 && left == 0;
            assert_eq!(end.ring.is_broken(), breaks, "act {at} with {left} bytes");
            assert_eq!(end.stats.ring_broken, u64::from(breaks));
            assert_eq!(end.stats.tx_fault, 0, "not the program's");
        }
    }
}

/// What was read of the ring is gone before the rest is: found by who reads.
#[test]
fn records_that_vanish_break_the_ring() {
    let (memory, fd) = Memory::create_unsealed();
    let mut end = End::new(Ring::new(memory, Way::There, Way::There));
    end.send(&inline_train(&[1; 4000], 0)).expect("its memory is there");
    end.send(&inline_train(&[2; 4000], 0)).expect("its memory is there");
    ftruncate(&fd, 8192).expect("it shrinks");
    assert_eq!(end.recv(1).len(), 1);
    assert!(end.recv(1 << 20).is_empty());
    assert!(end.ring.is_broken());
}

/// Holes where pages were read as zeros: lengths that nobody writes.
#[test]
fn holes_in_the_memory_break_the_ring() {
    let (ring, fd) = Ring::offer().expect("a ring");
    let (mut a, mut b) = (End::new(ring), End::new(Ring::accept(&fd).expect("it was just made")));
    a.send(&inline_train(b"some", 0)).expect("sent");
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&fd, punch, 0, shared::SIZE as u64).expect("the seals let it");
    assert!(b.recv(1 << 20).is_empty());
    a.send(&inline_train(b"more", 0)).expect("sent");
    assert!(b.recv(1 << 20).is_empty());
    assert!(b.ring.is_broken() && !a.ring.is_usable());
    a.recv(1 << 20);
    assert!(a.ring.is_broken());
}

#[test]
fn who_has_not_the_challenge_in_its_memory_may_not_lend() {
    let word = 5u64;
    // Another word of this process; no process; no number; no memory.
    for (process, mark) in [
        (u64::from(std::process::id()), (&raw const word) as u64),
        (1 << 30, (&raw const word) as u64),
        (u64::MAX, (&raw const word) as u64),
        (u64::from(std::process::id()), 64),
    ] {
        let (mut a, mut b) = pair();
        b.ring.borrow();
        assert!(!a.ring.lending().is_allowed());
        let (memory, way) = a.ring.producer.memory_and_way();
        set(memory.process(way), process);
        set(memory.mark(way), mark);
        a.send(&inline_train(b"any", 0)).expect("sent");
        assert_eq!(b.recv(1 << 20).len(), 1);
        assert!(!a.ring.lending().is_allowed(), "{process} {mark:#x}");
        // Whatever it says itself.
        let (memory, way) = a.ring.producer.memory_and_way();
        set(memory.verdict(way), 1);
        let buffer = Buffer::new(8_192);
        let span = Span { addr: buffer.addr(), len: 8_192 };
        let train = Train { payload: Payload::Lent(span), ..write_train(&buffer, 0, 8_192, 4096, 0) };
        a.send(&train).expect("sent");
        assert_eq!((b.recv(1 << 20).len(), b.lost), (1, 1));
    }
}
