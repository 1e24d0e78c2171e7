//! Memory keys.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ferroce_core::keys::{Entry, Reregister};
use ferroce_core::mem::{self, Buffer, RawRegion};
use ferroce_core::{KeyTable, WindowKind, limits};
use ferroce_transport::{Access, MemoryError, MwBind, Span};
use proptest::prelude::*;

/// A buffer as memory that somebody vouches for.
#[expect(unsafe_code, reason = "whoever makes a region vouches for it")]
fn region(buffer: &Buffer) -> RawRegion {
    // SAFETY: the table only looks regions up in these tests; nothing touches the memory.
    unsafe { RawRegion::new(buffer.addr() as usize, buffer.len()) }
}

const ALL: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

#[test]
fn null_regions_are_zeros_of_any_length_for_this_process_only() {
    let table = KeyTable::new(1);
    let key = table.register_null(1).unwrap();
    assert_eq!(key.rkey, 0, "peers have no key to it");
    for (va, len) in [(0, 1), (u64::MAX, u32::MAX), (0x1234, 4096)] {
        for need in [Access::empty(), Access::LOCAL_WRITE] {
            let span = table.resolve(1, key.lkey, va, len, need).unwrap();
            assert_eq!(span.len, len);
            assert!(mem::is_zeros(span.addr) && mem::is_zeros(span.addr + u64::from(len) - 1));
        }
    }
    let span = table.resolve(1, key.lkey, 7, 5000, Access::empty()).unwrap();
    let mut bytes = vec![1; 5000];
    mem::load(span.addr, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 5000]);
    assert_eq!(table.resolve(2, key.lkey, 0, 1, Access::empty()), Err(MemoryError::WrongPd));
    for need in [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::empty()] {
        assert_eq!(table.resolve_remote(1, 5, key.lkey, 0, 1, need), Err(MemoryError::BadKey));
        assert_eq!(table.check_remote(1, 5, key.lkey, need), Err(MemoryError::BadKey));
    }
    assert!(table.reregister(key.lkey, &Reregister::default()).is_err());
    table.begin_deregister(key.lkey).unwrap();
    assert_eq!(table.resolve(1, key.lkey, 0, 1, Access::empty()), Err(MemoryError::BadKey));
    assert!(!mem::is_zeros(&raw const table as u64));
}

#[test]
fn bounds_are_exact() {
    let (table, buffer) = (KeyTable::new(1), Buffer::new(1_000));
    let addr = buffer.addr();
    let iova = 1 << 40;
    let key = table.register(1, region(&buffer), iova, ALL).unwrap().rkey;
    let resolve = |va, len| table.resolve(1, key, va, len, Access::REMOTE_READ);
    assert_eq!(resolve(iova, 1_000), Ok(Span { addr, len: 1_000 }));
    assert_eq!(resolve(iova + 999, 1), Ok(Span { addr: addr + 999, len: 1 }));
    for (va, len) in [
        (iova - 1, 1),
        (iova - 1, 2),
        (iova, 1_001),
        (iova + 999, 2),
        (iova + 1_000, 1),
        (addr, 1),
        (0, 1),
        (u64::MAX, 1),
        (u64::MAX, u32::MAX),
        (iova + 1, u32::MAX),
    ] {
        assert_eq!(resolve(va, len), Err(MemoryError::Bounds), "{va:#x} {len}");
    }
    assert!(table.resolve(9, 0, 0, 0, ALL).is_ok(), "nothing is always there");
}

#[test]
fn the_end_of_the_address_space_does_not_wrap() {
    let (table, buffer) = (KeyTable::new(1), Buffer::new(64));
    let iova = u64::MAX - 64;
    let key = table.register(1, region(&buffer), iova, ALL).unwrap().rkey;
    assert!(table.resolve(1, key, iova, 64, Access::empty()).is_ok());
    assert_eq!(table.resolve(1, key, iova + 1, 64, Access::empty()), Err(MemoryError::Bounds));
    assert_eq!(table.resolve(1, key, u64::MAX, 1, Access::empty()), Err(MemoryError::Bounds));
    assert_eq!(table.register(1, region(&buffer), iova + 1, ALL).unwrap_err().errno, libc::EINVAL);
}

#[test]
fn domains_and_rights_are_checked() {
    let (table, buffer) = (KeyTable::new(1), Buffer::new(64));
    let addr = buffer.addr();
    let rights = [Access::LOCAL_WRITE, Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC];
    for right in rights {
        let key = table.register(1, region(&buffer), addr, right | Access::LOCAL_WRITE).unwrap().lkey;
        for need in rights {
            let granted = need == right || need == Access::LOCAL_WRITE;
            let expected = if granted { Ok(Span { addr, len: 8 }) } else { Err(MemoryError::Access) };
            assert_eq!(table.resolve(1, key, addr, 8, need), expected);
            assert_eq!(table.resolve(2, key, addr, 8, need), Err(MemoryError::WrongPd));
        }
        assert!(table.resolve(1, key, addr, 8, Access::empty()).is_ok(), "local reads need no right");
    }
    let key = table.register(1, region(&buffer), addr, Access::empty()).unwrap().lkey;
    assert_eq!(table.resolve(1, key, addr, 8, Access::LOCAL_WRITE), Err(MemoryError::Access));
}

#[test]
fn registration_refuses() {
    let (table, buffer) = (KeyTable::new(1), Buffer::new(64));
    let refused = |access| table.register(1, region(&buffer), 0, access).unwrap_err().errno;
    assert_eq!(refused(Access::REMOTE_WRITE), libc::EINVAL);
    assert_eq!(refused(Access::REMOTE_ATOMIC | Access::REMOTE_READ), libc::EINVAL);
    assert_eq!(refused(Access::from_bits_retain(1 << 10)), libc::EINVAL);
    assert_eq!(refused(Access::from_bits_retain(1 << 30)), libc::EINVAL);
    assert_eq!(refused(Access::FLUSH_PERSISTENT), libc::EOPNOTSUPP);
    assert!(table.is_empty());
    for bit in 20..30 {
        assert!(
            table.register(1, region(&buffer), 0, Access::from_bits_retain(1 << bit)).is_ok(),
            "optional bit {bit}"
        );
    }
    let zero_based = table.register(1, region(&buffer), buffer.addr(), ALL | Access::ZERO_BASED).unwrap();
    assert_eq!(table.resolve(1, zero_based.rkey, 8, 8, ALL), Ok(Span { addr: buffer.addr() + 8, len: 8 }));
    assert_eq!(table.resolve(1, zero_based.rkey, buffer.addr(), 8, ALL), Err(MemoryError::Bounds));
}

#[test]
#[allow(unsafe_code)]
fn registration_refuses_ranges_that_are_no_memory() {
    let (table, buffer) = (KeyTable::new(1), Buffer::new(64));
    let addr = buffer.addr() as usize;
    for (addr, len, errno) in [
        (addr, 0, libc::EINVAL),
        (0, usize::MAX, libc::EFAULT),
        (addr, usize::MAX, libc::EINVAL),
        (usize::MAX, 1, libc::EINVAL),
        (0, 4096, libc::EFAULT),
        (usize::MAX - 8192, 64, libc::EFAULT),
    ] {
        // SAFETY: it is never registered, so nobody uses it.
        let region = unsafe { ferroce_core::RawRegion::new(addr, len) };
        assert_eq!(table.register(1, region, 0, ALL).unwrap_err().errno, errno, "{addr:#x} {len:#x}");
    }
}

#[test]
fn withdrawn_keys_fail_and_do_not_come_back_soon() {
    let (table, buffer) = (KeyTable::new(3), Buffer::new(64));
    let mut seen = HashSet::new();
    let mut indices = HashMap::new();
    for round in 0..3_000 {
        let key = table.register(1, region(&buffer), 0, ALL).unwrap().lkey;
        assert!(table.resolve(1, key, 0, 64, ALL).is_ok());
        table.begin_deregister(key).unwrap();
        assert_eq!(table.resolve(1, key, 0, 64, ALL), Err(MemoryError::BadKey));
        assert_eq!(table.begin_deregister(key).unwrap_err().errno, libc::EINVAL);
        if let Some(last) = indices.insert(key >> 12, round) {
            assert!(round - last >= 1_000, "slots rest");
        }
        seen.insert(key);
    }
    assert!(seen.len() > 2_990, "tags are random");
    assert!(table.is_empty());
}

#[test]
fn a_changed_region_keeps_its_key_and_what_was_not_changed() {
    let table = KeyTable::new(1);
    let (old, new) = (Buffer::new(64), Buffer::new(128));
    let key = table.register(1, region(&old), 1 << 40, ALL).unwrap().lkey;
    let entry = || table.entry(key).expect("the key is valid");
    let before = entry();

    table.reregister(key, &Reregister { access: Some(Access::LOCAL_WRITE), ..Reregister::default() }).unwrap();
    assert_eq!(entry(), Entry { access: Access::LOCAL_WRITE, ..before });
    assert_eq!(table.resolve(1, key, 1 << 40, 1, Access::REMOTE_READ), Err(MemoryError::Access));

    table.reregister(key, &Reregister { pd: Some(2), ..Reregister::default() }).unwrap();
    assert_eq!(table.resolve(1, key, 1 << 40, 1, Access::LOCAL_WRITE), Err(MemoryError::WrongPd));

    let translation = Some((region(&new), 1 << 41));
    table.reregister(key, &Reregister { translation, ..Reregister::default() }).unwrap();
    let after = Entry { pd: 2, addr: new.addr(), len: 128, iova: 1 << 41, access: Access::LOCAL_WRITE, ..before };
    assert_eq!(entry(), after);

    // A refusal changes nothing.
    let bad = Reregister { pd: Some(3), translation, access: Some(Access::REMOTE_WRITE) };
    assert_eq!(table.reregister(key, &bad).unwrap_err().errno, libc::EINVAL);
    assert_eq!(entry(), after);
    assert_eq!(table.len(), 1);
    table.begin_deregister(key).unwrap();
    assert_eq!(table.reregister(key, &Reregister::default()).unwrap_err().errno, libc::EINVAL);
}

#[test]
fn windows_show_a_part_of_a_region_to_peers() {
    let (table, buffer) = (KeyTable::new(1), Buffer::new(256));
    let lkey = table.register(1, region(&buffer), 1 << 40, ALL | Access::MW_BIND).unwrap().lkey;
    let plain = table.register(1, region(&buffer), 1 << 40, ALL).unwrap().lkey;
    let two = table.alloc_window(1, WindowKind::Two).unwrap();
    let write = Access::REMOTE_WRITE;
    let bind = MwBind { rkey: two ^ 1, lkey, addr: (1 << 40) + 64, len: 64, access: write };
    let reach = |qpn, va, len, need| table.resolve_remote(1, qpn, bind.rkey, va, len, need);
    for (bind, why) in [
        (MwBind { rkey: lkey, ..bind }, MemoryError::BadKey),
        (MwBind { lkey: two, ..bind }, MemoryError::BadKey),
        (MwBind { lkey: plain, ..bind }, MemoryError::Access),
        (MwBind { len: 193, ..bind }, MemoryError::Bounds),
        (MwBind { addr: 0, ..bind }, MemoryError::Bounds),
        (MwBind { access: Access::MW_BIND, ..bind }, MemoryError::Access),
        (MwBind { len: 0, ..bind }, MemoryError::Access),
    ] {
        assert_eq!(table.bind_window(1, 7, &bind), Err(why), "{bind:?}");
    }
    assert_eq!(table.bind_window(2, 7, &bind), Err(MemoryError::WrongPd));
    assert_eq!(reach(7, bind.addr, 1, write), Err(MemoryError::BadKey), "nothing was bound");

    table.bind_window(1, 7, &bind).unwrap();
    assert_eq!(reach(7, bind.addr, 64, write), Ok(Span { addr: buffer.addr() + 64, len: 64 }));
    let listed = || table.entries().map(|(key, _)| key).collect::<HashSet<u32>>();
    assert_eq!(listed(), HashSet::from([lkey, plain, bind.rkey]));
    assert_eq!(reach(8, bind.addr, 64, write), Err(MemoryError::BadKey), "another queue pair");
    assert_eq!(reach(7, bind.addr, 65, write), Err(MemoryError::Bounds));
    assert_eq!(reach(7, bind.addr - 1, 1, write), Err(MemoryError::Bounds));
    assert_eq!(reach(7, bind.addr, 1, Access::REMOTE_READ), Err(MemoryError::Access));
    assert_eq!(table.resolve(1, bind.rkey, bind.addr, 1, Access::empty()), Err(MemoryError::BadKey), "for peers only");
    assert_eq!(table.bind_window(1, 7, &bind), Err(MemoryError::Access), "it is bound");
    assert_eq!(table.begin_deregister(bind.rkey).unwrap_err().errno, libc::EINVAL, "no region");
    assert_eq!(table.begin_deregister(lkey).unwrap_err().errno, libc::EBUSY);
    assert_eq!(table.reregister(lkey, &Reregister::default()).unwrap_err().errno, libc::EBUSY);

    assert_eq!(table.invalidate_window(1, 8, bind.rkey), Err(MemoryError::Access));
    assert_eq!(table.invalidate_window(1, 7, plain), Err(MemoryError::Access), "a region");
    table.invalidate_window(1, 7, bind.rkey).unwrap();
    assert_eq!(table.invalidate_window(1, 7, bind.rkey), Err(MemoryError::BadKey));
    assert_eq!(reach(7, bind.addr, 1, write), Err(MemoryError::BadKey));

    // Type 1: any queue pair, rebound and unbound by binding.
    let one = table.alloc_window(1, WindowKind::One).unwrap();
    let zero_based = MwBind { rkey: one ^ 1, access: write | Access::ZERO_BASED, ..bind };
    table.bind_window(1, 7, &zero_based).unwrap();
    assert_eq!(table.resolve_remote(1, 9, one ^ 1, 63, 1, write), Ok(Span { addr: buffer.addr() + 127, len: 1 }));
    table.bind_window(1, 8, &MwBind { rkey: one ^ 2, ..bind }).unwrap();
    assert_eq!(table.resolve_remote(1, 9, one ^ 1, 63, 1, write), Err(MemoryError::BadKey), "the old key");
    table.bind_window(1, 8, &MwBind { rkey: one ^ 3, len: 0, ..bind }).unwrap();
    table.bind_window(1, 8, &MwBind { rkey: one ^ 2, ..bind }).unwrap();
    table.dealloc_window(one).unwrap();
    assert_eq!(table.resolve_remote(1, 9, one ^ 2, bind.addr, 1, write), Err(MemoryError::BadKey));
    assert_eq!(table.dealloc_window(one).unwrap_err().errno, libc::EINVAL);
    table.begin_deregister(lkey).unwrap();
    assert_eq!(listed(), HashSet::from([plain]));
}

#[test]
fn keys_follow_the_seed_and_no_sequence() {
    let buffer = Buffer::new(64);
    let keys = |seed| {
        let table = KeyTable::new(seed);
        (0..64).map(|_| table.register(1, region(&buffer), 0, ALL).unwrap().lkey).collect::<Vec<_>>()
    };
    assert_eq!(keys(7), keys(7));
    assert_ne!(keys(7), keys(8));
    let steps: HashSet<u32> = keys(7).windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
    assert!(steps.len() > 60, "no step tells the next key");
}

#[test]
fn the_table_is_bounded() {
    let (table, buffer) = (KeyTable::new(1), Buffer::new(64));
    let keys: Vec<u32> = (0..5_000).map(|_| table.register(1, region(&buffer), 0, ALL).unwrap().lkey).collect();
    assert_eq!(table.len(), 5_000);
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), 5_000);
    assert!(keys.iter().all(|&key| key >> 12 < limits::MAX_MR));
    assert!(keys.iter().all(|&key| table.resolve(1, key, 0, 64, ALL).is_ok()));
}

/// Regions come and go while another thread looks keys up: what it finds always fits together.
#[test]
fn look_ups_are_whole() {
    const FOUND: u32 = 20_000;
    let (table, buffer) = (KeyTable::new(1), Buffer::new(1 << 16));
    let (latest, done) = (AtomicU32::new(0), AtomicBool::new(false));
    let register = |pd: u32| {
        // Everything of an entry follows from its domain.
        table.register(pd, region(&buffer), u64::from(pd) << 20, Access::LOCAL_WRITE | access_of(pd)).unwrap().lkey
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // All slots of the first chunk but two are taken, so that slots come back at once.
            for pd in 0..1_022 {
                register(pd);
            }
            for pd in (0..1 << 24).cycle() {
                let key = register(pd);
                latest.store(key, Ordering::Relaxed);
                if done.load(Ordering::Acquire) {
                    break;
                }
                table.begin_deregister(key).unwrap();
            }
        });
        for _ in 0..FOUND {
            let entry = loop {
                if let Some(entry) = table.entry(latest.load(Ordering::Relaxed)) {
                    break entry;
                }
            };
            assert_eq!(entry.iova, u64::from(entry.pd) << 20);
            assert_eq!(entry.access, Access::LOCAL_WRITE | access_of(entry.pd));
            assert_eq!((entry.addr, entry.len), (buffer.addr(), 1 << 16));
        }
        done.store(true, Ordering::Release);
    });
}

fn access_of(pd: u32) -> Access {
    if pd.is_multiple_of(2) { Access::REMOTE_READ } else { Access::REMOTE_ATOMIC }
}

proptest! {
    /// Any key and range: found exactly if it is a live key's, inside its bounds.
    #[test]
    fn nothing_else_resolves(
        regions in prop::collection::vec((1u32..3, 1usize..5_000, any::<u32>()), 1..20),
        key in any::<u32>(), pick in any::<prop::sample::Index>(), pd in 1u32..3,
        offset in -10i64..6_000, len in 1u32..6_000,
    ) {
        let (table, buffer) = (KeyTable::new(5), Buffer::new(5_000));
        let keys: Vec<_> = regions.iter().map(|&(pd, size, iova)| {
            let part = part_of(&buffer, size);
            table.register(pd, part, u64::from(iova) + 100, ALL).unwrap().lkey
        }).collect();
        let chosen = pick.index(keys.len());
        let (owner, size, iova) = regions[chosen];
        let va = (i64::from(iova) + 100 + offset) as u64;
        let inside = offset >= 0 && offset + i64::from(len) <= size as i64;
        let expected = match (owner == pd, inside) {
            (false, _) => Err(MemoryError::WrongPd),
            (true, false) => Err(MemoryError::Bounds),
            (true, true) => Ok(Span { addr: buffer.addr() + offset as u64, len }),
        };
        prop_assert_eq!(table.resolve(pd, keys[chosen], va, len, ALL), expected);
        if !keys.contains(&key) {
            prop_assert_eq!(table.resolve(pd, key, va, len, ALL), Err(MemoryError::BadKey));
        }
    }
}

#[allow(unsafe_code)]
fn part_of(buffer: &Buffer, len: usize) -> ferroce_core::RawRegion {
    assert!(len <= buffer.len());
    // SAFETY: inside a buffer, which is made to be registered.
    unsafe { ferroce_core::RawRegion::new(buffer.addr() as usize, len) }
}
