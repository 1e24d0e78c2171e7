use std::sync::Arc;

use ferroce_core::Buffer;
use ferroce_transport::{Payload, Side, Span, Train};
use ferroce_wire::{Bth, Headers, Opcode, Psn, Reth};

use super::*;

/// A WRITE of the buffer's bytes `from..from + len` in packets of `mtu`.
pub(super) fn write_train(buffer: &Buffer, from: usize, len: usize, mtu: usize, psn: u32) -> Train {
    let packets = len.div_ceil(mtu).max(1);
    let bth = |opcode, last: bool| Bth {
        pad: if last { (len.wrapping_neg() % 4) as u8 } else { 0 },
        ..Bth::new(opcode, 0x4011, Psn::new(psn))
    };
    let opcode = if packets == 1 { Opcode::RC_WRITE_ONLY } else { Opcode::RC_WRITE_FIRST };
    let mut head = Headers::new(bth(opcode, packets == 1));
    head.reth = Some(Reth { va: 0x1000, rkey: 7, len: len as u32 });
    let tail = (packets > 1).then(|| Headers::new(bth(Opcode::RC_WRITE_LAST, true)));
    let span = Span { addr: buffer.addr() + from as u64, len: len as u32 };
    Train {
        head,
        body: Opcode::RC_WRITE_MIDDLE,
        tail,
        packets: packets as u32,
        mtu: mtu as u32,
        len: len as u32,
        payload: Payload::Gather([span].into_iter().collect()),
        path: None,
        from: Side::Requester,
    }
}

pub(super) fn inline_train(bytes: &[u8], psn: u32) -> Train {
    let bth =
        Bth { pad: (bytes.len().wrapping_neg() % 4) as u8, ..Bth::new(Opcode::RC_SEND_ONLY, 0x4011, Psn::new(psn)) };
    Train {
        head: Headers::new(bth),
        body: Opcode::RC_SEND_MIDDLE,
        tail: None,
        packets: 1,
        mtu: 4096,
        len: bytes.len() as u32,
        payload: Payload::Inline(Arc::from(bytes), 0),
        path: None,
        from: Side::Requester,
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 251) as u8).collect()
}

pub(super) struct End {
    pub(super) ring: Ring,
    pub(super) stats: LinkStats,
    scratch: Box<[u8; PACKET_MAX]>,
    /// Loans whose payload could not be had.
    pub(super) lost: u64,
}

impl End {
    pub(super) fn new(ring: Ring) -> End {
        End { ring, stats: LinkStats::default(), scratch: Box::new([0; PACKET_MAX]), lost: 0 }
    }

    pub(super) fn send(&mut self, train: &Train) -> Result<(), SendError> {
        let sent = self.ring.send(train, &mut self.stats);
        let _ = self.ring.show(&mut self.stats);
        sent
    }

    /// Headers and payload of up to about `budget` bytes.
    pub(super) fn recv(&mut self, budget: usize) -> Vec<(Headers, Vec<u8>)> {
        let mut packets = Vec::new();
        self.ring.recv(budget, &mut self.scratch, &mut self.stats, &mut |arrival| match arrival {
            Arrival::Packet(headers, payload) => packets.push((*headers, payload.to_vec())),
            Arrival::Loan(loan) => {
                let mut sink = |index, payload: &[u8]| packets.push((loan.headers(index), payload.to_vec()));
                self.lost += u64::from(loan.read(&mut vec![0; 61_440], &mut sink).is_err());
            }
        });
        packets
    }
}

pub(super) fn pair() -> (End, End) {
    let (ring, fd) = Ring::offer().expect("a ring");
    let peer = Ring::accept(&fd).expect("it was just made");
    (End::new(ring), End::new(peer))
}

#[test]
fn a_train_arrives_packet_by_packet_in_both_directions() {
    let (mut a, mut b) = pair();
    let buffer = Buffer::new(20_000);
    buffer.write(0, &pattern(20_000));
    for _ in 0..100 {
        for len in [0, 1, 3, 4096, 4097, 12_288, 20_000] {
            for back in [false, true] {
                let (from, to) = if back { (&mut b, &mut a) } else { (&mut a, &mut b) };
                from.send(&write_train(&buffer, 0, len, 4096, 0xff_fffe)).expect("sent");
                let packets = to.recv(1 << 20);
                assert_eq!(packets.len(), len.div_ceil(4096).max(1), "{len} {:?} {:?}", from.stats, to.stats);
                let bytes: Vec<u8> = packets.iter().flat_map(|(_, payload)| payload.clone()).collect();
                assert_eq!(bytes, pattern(len));
                for (index, (headers, _)) in packets.iter().enumerate() {
                    assert_eq!(headers.bth.psn, Psn::new(0xff_fffe).add(index as u32));
                    assert_eq!(headers.reth.is_some(), index == 0);
                    assert!(headers.matches_opcode());
                }
                assert!(to.recv(1 << 20).is_empty());
            }
        }
    }
    assert_eq!(a.stats.ring_tx_packets, b.stats.ring_rx_packets);
    assert_eq!(a.stats.ring_tx_bytes, b.stats.ring_rx_bytes);
    assert_eq!((a.stats.ring_broken, b.stats.ring_broken, b.stats.ring_rx_bad), (0, 0, 0));
}

/// A program that gets an answer before the ACK that belongs to it is surprised.
#[test]
fn what_is_not_shown_is_not_seen_and_then_all_at_once() {
    let (mut a, mut b) = pair();
    for psn in 0..2 {
        a.ring.send(&inline_train(b"two", psn), &mut a.stats).expect("sent");
        assert!(b.recv(1 << 20).is_empty());
    }
    assert_eq!(a.ring.hidden(), 2 * (8 + 16));
    assert!(!a.ring.show(&mut a.stats), "nobody sleeps");
    assert_eq!((a.ring.hidden(), b.recv(1 << 20).len()), (0, 2));
}

#[test]
fn a_full_ring_drops_the_rest_and_goes_on_when_there_is_room() {
    let (mut a, mut b) = pair();
    let buffer = Buffer::new(61_440);
    buffer.write(0, &pattern(61_440));
    for psn in 0..20 {
        a.send(&write_train(&buffer, 0, 61_440, 4096, psn * 15)).expect("sent");
    }
    assert!(a.stats.ring_tx_drop_full > 0);
    assert_eq!(a.stats.ring_tx_packets + a.stats.ring_tx_drop_full, 300);
    let mut got = 0;
    loop {
        let packets = b.recv(10_000);
        if packets.is_empty() {
            break;
        }
        assert!(packets.len() <= 3, "the budget holds");
        for (headers, payload) in packets {
            // What came is a prefix of what was sent, as long as nothing was taken meanwhile.
            assert_eq!(headers.bth.psn, Psn::new(got));
            let at = got as usize % 15 * 4096;
            assert_eq!(payload, &pattern(61_440)[at..at + 4096]);
            got += 1;
        }
    }
    assert_eq!(u64::from(got), a.stats.ring_tx_packets);
    a.send(&inline_train(b"room again", 1)).expect("sent");
    assert_eq!(b.recv(1).pop().expect("a packet").1, b"room again");
}

#[test]
fn a_train_whose_memory_is_gone_is_not_seen() {
    let (mut a, mut b) = pair();
    let buffer = Buffer::new(8192);
    a.send(&inline_train(b"before", 0)).expect("sent");
    let mut train = write_train(&buffer, 0, 8192, 4096, 1);
    let nowhere = Span { addr: 8, len: 4096 };
    let here = Span { addr: buffer.addr(), len: 4096 };
    train.payload = Payload::Gather([here, nowhere].into_iter().collect());
    assert_eq!(a.send(&train), Err(SendError::Fault));
    a.send(&inline_train(b"after", 3)).expect("sent");
    let payloads: Vec<Vec<u8>> = b.recv(1 << 20).into_iter().map(|(_, payload)| payload).collect();
    assert_eq!(payloads, [b"before".to_vec(), b"after".to_vec()]);
    assert_eq!(a.stats.tx_fault, 1);
}

/// Two threads, one of which sleeps whenever it finds nothing: no wake-up is lost, nothing comes twice or out of order.
#[test]
fn a_sleeper_is_woken_for_every_packet_it_must_see() {
    const PACKETS: u32 = 30_000;
    let (mut a, mut b) = pair();
    let wake = WakeSocket::bind().expect("a socket");
    let waker = Waker::connect(wake.name()).expect("it is there");
    let watch = b.ring.watch();
    let limits = std::time::Duration::from_secs(60);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for psn in 0..PACKETS {
                let bytes = psn.to_le_bytes();
                let before = a.stats.ring_tx_packets;
                // Full: again, when there is room.
                while a.stats.ring_tx_packets == before {
                    a.ring
                        .send(&inline_train(&bytes[..psn as usize % 5], psn), &mut a.stats)
                        .expect("its memory is there");
                    if a.ring.show(&mut a.stats) {
                        waker.wake();
                    }
                }
                if psn % 7 == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let mut expected = 0;
        while expected < PACKETS {
            for (headers, payload) in b.recv(if expected % 3 == 0 { 1 } else { 10_000 }) {
                assert_eq!(headers.bth.psn, Psn::new(expected));
                assert_eq!(payload, &expected.to_le_bytes()[..expected as usize % 5]);
                expected += 1;
            }
            watch.announce_sleep();
            if expected < PACKETS && !watch.has_something() {
                let mut polled = [rustix::event::PollFd::new(&wake, rustix::event::PollFlags::IN)];
                let timeout = rustix::event::Timespec::try_from(limits).expect("it fits");
                let woken = rustix::event::poll(&mut polled, Some(&timeout)).expect("poll works");
                assert_eq!(woken, 1, "a wake-up was lost at {expected}");
            }
            wake.drain(1);
            watch.announce_awake();
        }
    });
    assert_eq!(b.stats.ring_broken, 0);
}

#[test]
fn a_socket_that_is_closed_is_gone() {
    let wake = WakeSocket::bind().expect("a socket");
    let waker = Waker::connect(wake.name()).expect("it is there");
    assert!(!waker.is_gone());
    // However often: the queue is full at some time, and that is all.
    (0..1000).for_each(|_| waker.wake());
    drop(wake);
    assert!(waker.is_gone());
    waker.wake();
}

/// Two lanes that say little use the start of the ring again and again.
#[test]
fn a_quiet_ring_touches_few_pages() {
    let (mut a, mut b) = pair();
    for psn in 0..10_000 {
        a.send(&inline_train(&[7; 100], psn)).expect("sent");
        assert_eq!(b.recv(1 << 20).len(), 1);
    }
    let (memory, way) = a.ring.producer.memory_and_way();
    let touched = |offset| memory.record(way, offset).load() != Ok(0);
    assert!(touched(0) && !(1..128).any(|page| (0..4096).step_by(8).any(|at| touched(page * 4096 + at))));
}

/// Bytes of memory that a ring has, by the descriptor that its peer was given.
fn memory_of(fd: &OwnedFd) -> u64 {
    rustix::fs::fstat(fd).expect("it is a file").st_blocks as u64 * 512
}

#[test]
fn memory_that_was_read_is_given_back_and_had_anew() {
    let (ring, fd) = Ring::offer().expect("a ring");
    let (mut a, mut b) = (End::new(ring), End::new(Ring::accept(&fd).expect("it was just made")));
    let buffer = Buffer::new(61_440);
    buffer.write(0, &pattern(61_440));
    for psn in 0..100 {
        a.send(&write_train(&buffer, 0, 61_440, 4096, psn * 15)).expect("sent");
        let spare = a.ring.spare();
        assert!(spare >= 61_440 - 4096 && memory_of(&fd) >= 61_440, "{spare}");
        // The peer reads a part: all stays.
        let mut packets = b.recv(20_000);
        a.ring.give_back(&mut a.stats);
        assert_eq!((a.ring.spare(), a.stats.ring_given_back), (spare, u64::from(psn)));
        packets.extend(b.recv(1 << 20));
        let bytes: Vec<u8> = packets.into_iter().flat_map(|(_, payload)| payload).collect();
        assert_eq!(bytes, pattern(61_440));
        a.ring.give_back(&mut a.stats);
        // The words of both directions, and a page of the one that was used.
        assert_eq!((a.ring.spare(), memory_of(&fd)), (0, 2 * 4096));
    }
    a.ring.give_back(&mut a.stats);
    assert_eq!((a.stats.ring_given_back, a.stats.ring_broken, b.stats.ring_broken), (100, 0, 0));
}

#[test]
fn memory_that_the_system_does_not_take_back_is_kept_and_not_counted() {
    let (memory, fd) = Memory::create_unsealed();
    let memory = Arc::new(memory);
    // From now on no page can be taken out of the file.
    rustix::fs::fcntl_add_seals(&fd, rustix::fs::SealFlags::FUTURE_WRITE).expect("it can be sealed");
    let mut producer = Producer::new(Arc::clone(&memory), Way::There);
    let mut consumer = Consumer::new(memory, Way::There);
    let (mut stats, mut scratch) = (LinkStats::default(), [0; PACKET_MAX]);
    let buffer = Buffer::new(61_440);
    for psn in 0..3 {
        let sent = producer.send(&write_train(&buffer, 0, 61_440, 4096, psn * 15), &mut stats);
        assert_eq!(sent, Ok(Ok(())));
        producer.show().expect("the memory is there");
        assert_eq!(producer.spare() > 0, psn == 0);
        let read = consumer.recv(1 << 20, &mut scratch, &mut stats, &mut |_| {});
        assert_eq!(read, Ok(15));
        assert_eq!(producer.give_back(), Ok(false));
        assert_eq!(producer.spare(), 0);
    }
}

/// A train whose payload is lent, in packets of 4 KiB.
fn lent_train(buffer: &Buffer, len: usize, psn: u32) -> Train {
    let train = write_train(buffer, 0, len, 4096, psn);
    Train { payload: Payload::Lent(Span { addr: buffer.addr(), len: len as u32 }), ..train }
}

/// The first side may lend to the second one.
fn lending_pair() -> (End, End) {
    let (mut a, mut b) = pair();
    a.send(&inline_train(b"any", 0)).expect("sent");
    assert_eq!(b.recv(1 << 20).len(), 1);
    assert!(!a.ring.lending().is_allowed(), "nobody asked for it");
    b.ring.borrow();
    assert!(!a.ring.lending().is_allowed(), "it was not found yet");
    a.send(&inline_train(b"any", 0)).expect("sent");
    assert_eq!(b.recv(1 << 20).len(), 1);
    assert!(a.ring.lending().is_allowed());
    (a, b)
}

fn payload_of(packets: &[(Headers, Vec<u8>)]) -> Vec<u8> {
    packets.iter().flat_map(|(_, payload)| payload.clone()).collect()
}

#[test]
fn what_is_lent_is_fetched_from_where_it_is() {
    let (mut a, mut b) = lending_pair();
    let buffer = Buffer::new(200_000);
    buffer.write(0, &pattern(200_000));
    for (round, len) in [200_000, 8_192, 4_097, 131_072].into_iter().enumerate() {
        let lent = a.stats.ring_tx_lent;
        a.send(&lent_train(&buffer, len, 0xff_fffe)).expect("sent");
        let packets = b.recv(1 << 20);
        assert_eq!(payload_of(&packets), pattern(len), "round {round}");
        for (index, (headers, _)) in packets.iter().enumerate() {
            assert_eq!(headers.bth.psn, Psn::new(0xff_fffe).add(index as u32));
            assert_eq!(headers.reth.is_some(), index == 0);
            assert!(headers.matches_opcode());
        }
        assert_eq!(a.stats.ring_tx_lent - lent, len.div_ceil(4096) as u64 - 1, "all but the last packet");
    }
    assert_eq!((a.stats.ring_tx_lent, a.stats.ring_tx_packets), (b.stats.ring_rx_borrowed, b.stats.ring_rx_packets));
    assert_eq!(a.stats.ring_tx_bytes, b.stats.ring_rx_bytes);
    assert_eq!((b.lost, a.ring.is_broken(), b.ring.is_broken()), (0, false, false));
}

#[test]
fn it_is_fetched_to_where_it_belongs() {
    let (mut a, mut b) = lending_pair();
    let (from, to) = (Buffer::new(40_960), Buffer::new(40_960));
    from.write(0, &pattern(40_960));
    a.send(&lent_train(&from, 40_960, 7)).expect("sent");
    let (mut scratch, mut stats, mut fetched) = (Box::new([0; PACKET_MAX]), LinkStats::default(), Vec::new());
    b.ring.recv(1 << 20, &mut scratch, &mut stats, &mut |arrival| {
        if let Arrival::Loan(loan) = arrival {
            fetched.push((loan.packets(), loan.bytes(), loan.fetch(to.addr()), loan.fetch(64)));
        }
    });
    assert_eq!(fetched, [(9, 36_864, Ok(()), Err(Lost))], "and not to where there is no memory");
    let mut bytes = vec![0; 40_960];
    to.read(0, &mut bytes);
    assert!(bytes[..36_864] == pattern(36_864) && bytes[36_864..].iter().all(|byte| *byte == 0));
    assert!(a.ring.lending().is_allowed());
}

#[test]
fn what_was_taken_back_is_lost_and_what_was_read_before_is_not() {
    let (mut a, mut b) = lending_pair();
    let buffer = Buffer::new(65_536);
    for round in 0..3 {
        a.send(&lent_train(&buffer, 65_536, 0)).expect("sent");
        assert_eq!(b.recv(1 << 20).len(), 16, "{round}");
        // It was read.
        a.ring.lending().recall();
        a.send(&lent_train(&buffer, 65_536, 0)).expect("sent");
        assert_eq!(b.recv(1 << 20).len(), 16);
        a.send(&lent_train(&buffer, 65_536, 0)).expect("sent");
        a.send(&lent_train(&buffer, 65_536, 16)).expect("sent");
        a.ring.lending().recall();
        a.send(&lent_train(&buffer, 65_536, 32)).expect("sent");
        let psns: Vec<u32> = b.recv(1 << 20).iter().map(|(headers, _)| headers.bth.psn.get()).collect();
        let expected: Vec<u32> = [15, 31].into_iter().chain(32..48).collect();
        assert_eq!(psns, expected, "the last packets of the first two, and all of the third");
        assert_eq!(b.lost, 2 * (round + 1));
    }
}

#[test]
fn memory_that_is_gone_is_lost_and_another_is_lent_all_the_same() {
    let (mut a, mut b) = lending_pair();
    let gone = Train {
        payload: Payload::Lent(Span { addr: 4096, len: 8_192 }),
        ..write_train(&Buffer::new(8_192), 0, 8_192, 4096, 0)
    };
    // The last packet is copied, and that its memory is gone is found here.
    assert_eq!(a.send(&gone), Err(SendError::Fault));
    assert!(b.recv(1 << 20).is_empty());
    // All but the last page is gone.
    let mapping = ferroce_core::mem::page_size();
    let buffer = Buffer::new(4 * mapping);
    let hole = Train {
        payload: Payload::Lent(Span { addr: buffer.addr(), len: 8_192 }),
        ..write_train(&buffer, 0, 8_192, 4096, 0)
    };
    a.send(&hole).expect("sent");
    assert_eq!(b.recv(1 << 20).len(), 2);
    assert!(a.ring.lending().is_allowed());
}

#[test]
fn who_ends_lends_nothing_any_more() {
    let (mut a, mut b) = lending_pair();
    let buffer = Buffer::new(65_536);
    a.send(&lent_train(&buffer, 65_536, 0)).expect("sent");
    drop(a);
    assert_eq!((b.recv(1 << 20).len(), b.lost), (1, 1));
}
