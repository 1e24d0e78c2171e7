//! Access to user memory: against plain copies, and with the memory going away.

#![allow(unsafe_code)]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Map, PAGE};
use ferroce_core::mem::{self, Fault};
use proptest::prelude::*;

fn crc_of(bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(bytes);
    hasher.finalize()
}

/// Offsets and lengths around every alignment and every loop of the copies.
fn piece() -> impl Strategy<Value = (usize, usize)> {
    let len = prop_oneof![0usize..80, 0usize..600, 4000usize..4200, 8100usize..8300, 0usize..24_000];
    (0usize..72, len)
}

proptest! {
    #[test]
    fn store_writes_the_bytes_and_no_others((offset, len) in piece(), last: bool, seed: u8) {
        let map = Map::anonymous(8);
        let data: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        let mut expected = vec![0xaa; map.len()];
        map.write(0, &expected);
        expected[offset..offset + len].copy_from_slice(&data);
        prop_assert_eq!(mem::store(map.addr() + offset as u64, &data, last), Ok(()));
        prop_assert!(map.read(0, map.len()) == expected);
    }

    #[test]
    fn load_reads_the_bytes_and_writes_no_others((offset, len) in piece(), ours in 0usize..20, seed: u8) {
        let map = Map::anonymous(8);
        let bytes: Vec<u8> = (0..map.len()).map(|i| (i as u8).wrapping_mul(17).wrapping_add(seed)).collect();
        map.write(0, &bytes);
        let mut buffer = vec![0xaa; ours + len + 32];
        prop_assert_eq!(mem::load(map.addr() + offset as u64, &mut buffer[ours..ours + len]), Ok(()));
        prop_assert_eq!(&buffer[ours..ours + len], &bytes[offset..offset + len]);
        prop_assert!(buffer[..ours].iter().chain(&buffer[ours + len..]).all(|&byte| byte == 0xaa));
    }

    #[test]
    fn sums_are_those_of_the_bytes((offset, len) in piece(), split in 0usize..24_000, seed: u8) {
        let map = Map::anonymous(8);
        let bytes: Vec<u8> = (0..map.len()).map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed)).collect();
        map.write(0, &bytes);
        let (addr, split) = (map.addr() + offset as u64, split.min(len));
        let expected = crc_of(&bytes[offset..offset + len]);
        prop_assert_eq!(mem::crc(addr, len, 0), Ok(expected));
        let first = mem::crc(addr, split, 0).unwrap();
        prop_assert_eq!(mem::crc(addr + split as u64, len - split, first), Ok(expected));
        let mut buffer = vec![0; len];
        prop_assert_eq!(mem::load_crc(addr, &mut buffer, 0), Ok(expected));
        prop_assert_eq!(&buffer, &bytes[offset..offset + len]);
    }

    /// A hole anywhere: the answer is a fault exactly if the range touches it, and what precedes it was stored in order.
    #[test]
    fn holes_are_faults((offset, len) in piece(), hole in 0usize..7) {
        let map = Map::anonymous(8);
        map.replace(hole..hole + 1, libc::PROT_NONE);
        let touches = len > 0 && offset < (hole + 1) * PAGE && offset + len > hole * PAGE;
        let expected = if touches { Err(Fault) } else { Ok(()) };
        let addr = map.addr() + offset as u64;
        let mut buffer = vec![0x55; len];
        prop_assert_eq!(mem::store(addr, &buffer, true), expected);
        if touches && offset < hole * PAGE {
            let before = hole * PAGE - offset;
            prop_assert_eq!(map.read(offset, before), vec![0x55; before]);
        }
        prop_assert_eq!(mem::load(addr, &mut buffer), expected);
        prop_assert_eq!(mem::crc(addr, len, 0).map(drop), expected);
        prop_assert_eq!(mem::load_crc(addr, &mut buffer, 0).map(drop), expected);
        // SAFETY: as long as the buffer.
        prop_assert_eq!(unsafe { mem::load_shared(addr, buffer.as_mut_ptr(), len) }, expected);
        let ours = vec![0x66; len];
        // SAFETY: nobody else has the mapping.
        prop_assert_eq!(unsafe { mem::load_shared(ours.as_ptr() as u64, addr as *mut u8, len) }, expected);
        if !touches {
            prop_assert_eq!(map.read(offset, len), ours);
        }
        prop_assert!(mem::is_mapped(addr, len as u64));
    }
}

#[test]
fn atomics_are_those_of_the_cpu() {
    let map = Map::anonymous(1);
    map.write(8, &5u64.to_ne_bytes());
    let addr = map.addr() + 8;
    assert_eq!(mem::fetch_add(addr, u64::MAX), Ok(5));
    assert_eq!(mem::compare_swap(addr, 5, 9), Ok(4), "not equal: no change");
    assert_eq!(mem::compare_swap(addr, 4, 9), Ok(4));
    assert_eq!(map.read(0, 24), [0u64, 9, 0].map(u64::to_ne_bytes).concat());
}

#[test]
fn words_are_read_and_written_whole() {
    let map = Map::anonymous(1);
    let value = 0x0102_0304_0506_0708;
    assert_eq!(mem::store_word(map.addr() + 8, value), Ok(()));
    assert_eq!(map.read(0, 24), [0, value, 0].map(u64::to_ne_bytes).concat());
    assert_eq!(mem::load_word(map.addr() + 8), Ok(value));
}

#[test]
fn atomics_of_threads_add_up() {
    const ROUNDS: u64 = 20_000;
    let map = Map::anonymous(1);
    std::thread::scope(|scope| {
        scope.spawn(|| (0..ROUNDS).for_each(|_| assert!(mem::fetch_add(map.addr(), 1).is_ok())));
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                let mut seen = 0;
                loop {
                    match mem::compare_swap(map.addr(), seen, seen + 1).unwrap() {
                        old if old == seen => break,
                        old => seen = old,
                    }
                }
            }
        });
    });
    assert_eq!(map.read(0, 8), (2 * ROUNDS).to_ne_bytes());
}

#[test]
#[should_panic(expected = "misaligned")]
fn misaligned_atomics_are_a_broken_invariant() {
    let map = Map::anonymous(1);
    let _ = mem::fetch_add(map.addr() + 4, 1);
}

#[test]
fn each_kind_of_missing_memory_is_a_fault() {
    let check = |addr: u64, readable: bool, kind: &str| {
        let expected = if readable { Ok(()) } else { Err(Fault) };
        let mut buffer = [0; 16];
        assert_eq!(mem::store(addr, &[1; 16], true), Err(Fault), "store, {kind}");
        assert_eq!(mem::compare_swap(addr, 0, 1), Err(Fault), "compare_swap, {kind}");
        assert_eq!(mem::fetch_add(addr, 1), Err(Fault), "fetch_add, {kind}");
        assert_eq!(mem::store_word(addr, 1), Err(Fault), "store_word, {kind}");
        assert_eq!(mem::load_word(addr).map(drop), expected, "load_word, {kind}");
        assert_eq!(mem::load(addr, &mut buffer), expected, "load, {kind}");
        // SAFETY: as long as the buffer.
        assert_eq!(unsafe { mem::load_shared(addr, buffer.as_mut_ptr(), 16) }, expected, "load_shared, {kind}");
        assert_eq!(mem::crc(addr, 16, 0).map(drop), expected, "crc, {kind}");
        assert_eq!(mem::load_crc(addr, &mut buffer, 0).map(drop), expected, "load_crc, {kind}");
    };
    let map = Map::anonymous(4);
    map.replace(0..1, libc::PROT_NONE);
    check(map.addr(), false, "protected");
    map.protect(1..2, libc::PROT_READ);
    check(map.addr() + PAGE as u64, true, "read-only");
    let file = Map::file(2);
    file.truncate(1);
    check(file.addr() + PAGE as u64, false, "truncated");
    // Nobody can map there.
    check(0, false, "the null page");
    check(u64::MAX - 31, false, "kernel addresses");
    check(1 << 63, false, "not canonical: the CPU tells no address");
}

#[test]
fn is_mapped_sees_holes() {
    let map = Map::anonymous(4);
    let (addr, page) = (map.addr(), PAGE as u64);
    assert!(mem::is_mapped(addr, 4 * page));
    assert!(mem::is_mapped(addr + 1, 4 * page - 1));
    // The hole is made where no other thread of this test program maps: inside a reservation nobody else gives away.
    let kernel = u64::MAX - 2 * page;
    assert!(!mem::is_mapped(kernel, 1));
    assert!(!mem::is_mapped(u64::MAX - 1, 2), "wraps around");
    assert!(!mem::is_mapped(0, 1));
    assert!(mem::is_mapped(0, 0));
}

/// Words never tear, and they become visible in ascending order: who sees the last word of a message sees all of it.
#[test]
fn words_are_whole_and_ascending() {
    const WORDS: usize = 67;
    const ROUNDS: u64 = 20_000;
    let map = Map::anonymous(1);
    // The odd word at the start makes the copy unaligned to its own block size.
    let addr = map.addr() + 8;
    // SAFETY: aligned, mapped for as long as the test runs.
    let end = unsafe { AtomicU64::from_ptr((addr as usize + 8 * (WORDS - 1)) as *mut u64) };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                let word = round << 32 | round;
                let data = [word.to_ne_bytes(); WORDS].concat();
                mem::store(addr, &data, true).unwrap();
            }
            done.store(true, Ordering::Release);
        });
        let mut buffer = [0; 8 * WORDS];
        while !done.load(Ordering::Acquire) {
            let seen = end.load(Ordering::Acquire);
            mem::load(addr, &mut buffer).unwrap();
            for bytes in buffer.chunks(8) {
                let word = u64::from_ne_bytes(bytes.try_into().unwrap());
                assert_eq!(word >> 32, word & 0xffff_ffff, "a word was torn");
                assert!(word >= seen, "the last word was seen before an earlier one");
            }
        }
    });
    assert_eq!(end.load(Ordering::Acquire), ROUNDS << 32 | ROUNDS);
}

/// Accesses in one thread while another makes the memory come and go by `vanish` and `restore`. Every answer is right or a fault.
fn races(map: &Map, vanish: impl Fn() + Sync, restore: impl Fn() + Sync) {
    const ROUNDS: usize = 400;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                vanish();
                std::thread::yield_now();
                restore();
                std::thread::yield_now();
            }
            done.store(true, Ordering::Release);
        });
        let data = vec![7; map.len()];
        let mut buffer = vec![0; map.len()];
        while !done.load(Ordering::Acquire) {
            let _ = mem::store(map.addr(), &data, true);
            let _ = mem::crc(map.addr(), map.len(), 0);
            let _ = mem::fetch_add(map.addr() + PAGE as u64, 1);
            if let Ok(sum) = mem::load_crc(map.addr(), &mut buffer, 0) {
                assert_eq!(sum, crc_of(&buffer), "the sum is that of the copy");
            }
        }
    });
    assert_eq!(mem::store(map.addr(), &vec![9; map.len()], true), Ok(()), "the memory is back");
    assert_eq!(map.read(0, map.len()), vec![9; map.len()]);
}

#[test]
fn memory_is_protected_under_access() {
    let map = Map::anonymous(6);
    races(&map, || map.protect(1..5, libc::PROT_NONE), || map.protect(1..5, libc::PROT_READ | libc::PROT_WRITE));
}

#[test]
fn memory_is_replaced_under_access() {
    let map = Map::anonymous(6);
    races(&map, || map.replace(1..4, libc::PROT_READ), || map.replace(1..4, libc::PROT_READ | libc::PROT_WRITE));
}

#[test]
fn memory_is_truncated_under_access() {
    let map = Map::file(6);
    races(&map, || map.truncate(1), || map.truncate(6));
}
