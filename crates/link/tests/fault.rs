//! The fault middleware: faults befall packets, are counted, and come again with the same seed.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use ferroce_link::fault::FaultConfigError;
use ferroce_link::{FaultConfig, FaultLink, Link, LinkStats, UdpLink};
use ferroce_transport::Payload;

const TRAINS: u32 = 40;
const PACKETS: u32 = 60;

/// Sends the same traffic through faults at one end and tells the PSNs that came, in order, with the faulty end's counters.
fn run(config: &str) -> (Vec<u32>, LinkStats) {
    let config: FaultConfig = config.parse().unwrap();
    let Pair { tx, rx, path } = Pair::new(V4);
    // Time stands still until everything is sent, so that nothing depends on the machine's speed.
    let time = Arc::new(AtomicU64::new(0));
    let clock = || {
        let time = Arc::clone(&time);
        Box::new(move || time.load(Ordering::Relaxed))
    };
    let mut tx = FaultLink::with_clock(tx, &FaultConfig { rx: false, ..config.clone() }, clock());
    let mut rx = FaultLink::with_clock(rx, &FaultConfig { tx: false, ..config }, clock());
    let data = pattern(PACKETS as usize * 256, 5);
    let mut psns = Vec::new();
    // Takes everything that was sent.
    let mut take = |tx: &FaultLink<UdpLink>, rx: &mut FaultLink<UdpLink>| {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut read = 1;
        while read > 0 || rx.stats().rx_packets < tx.stats().tx_packets {
            assert!(Instant::now() < deadline, "packets did not come: {:?}", rx.stats());
            read = rx.recv(64, &mut |_, headers, payload| {
                let psn = headers.bth.psn.get();
                let start = (psn % PACKETS) as usize * 256;
                assert_eq!(payload, &data[start..start + 256], "packet {psn}");
                psns.push(psn);
            });
        }
    };
    for i in 0..TRAINS {
        let payload = match i % 3 {
            0 => spans(&[&data[..1000], &data[1000..]]),
            1 => Payload::Copy(span(&data)),
            _ => Payload::Inline(data.clone().into(), 0),
        };
        tx.send(1, 17, &path, &train(Kind::Send, 5, i * PACKETS, 256, PACKETS * 256, payload)).unwrap();
        tx.flush(&mut |_, error| panic!("{error}"));
        take(&tx, &mut rx);
    }
    time.store(u64::MAX / 2, Ordering::Relaxed);
    tx.flush(&mut |_, error| panic!("{error}"));
    take(&tx, &mut rx);
    assert_eq!((tx.next_due(), rx.next_due()), (None, None));
    let mut stats = tx.stats();
    stats.merge(&rx.stats());
    (psns, stats)
}

fn total() -> Vec<u32> {
    (0..TRAINS * PACKETS).collect()
}

fn sorted(mut psns: Vec<u32>) -> Vec<u32> {
    psns.sort_unstable();
    psns
}

#[test]
fn no_faults_change_nothing() {
    let (psns, stats) = run("seed=3");
    assert_eq!(psns, total());
    assert_clean(&stats);
}

#[test]
fn lost_packets_are_counted_and_nothing_else_is_missing() {
    for dir in ["tx", "rx", "both"] {
        let (psns, stats) = run(&format!("loss=0.05,seed=7,dir={dir}"));
        assert!(stats.fault_lost > 50, "{}", stats.fault_lost);
        assert_eq!(psns.len() as u64 + stats.fault_lost, u64::from(TRAINS * PACKETS));
        assert!(psns.is_sorted());
    }
}

#[test]
fn doubled_packets_stand_together() {
    for dir in ["tx", "rx"] {
        let (mut psns, stats) = run(&format!("dup=0.05,seed=7,dir={dir}"));
        assert!(stats.fault_duplicated > 50);
        assert_eq!(psns.len() as u64, u64::from(TRAINS * PACKETS) + stats.fault_duplicated);
        psns.dedup();
        assert_eq!(psns, total());
    }
}

#[test]
fn reordered_packets_all_come_a_little_late() {
    for dir in ["tx", "rx"] {
        let (psns, stats) = run(&format!("reorder=0.05,seed=7,dir={dir}"));
        assert!(stats.fault_reordered > 50);
        assert!(!psns.is_sorted());
        for (place, psn) in psns.iter().enumerate() {
            let moved = (place as i64 - i64::from(*psn)).abs();
            assert!(moved <= 16 || *psn >= TRAINS * PACKETS - 20, "{psn} moved by {moved}");
        }
        assert_eq!(sorted(psns), total());
    }
}

#[test]
fn delayed_packets_come_when_their_time_does() {
    for dir in ["tx", "rx"] {
        let (psns, stats) = run(&format!("delay=0.05,delay_us=300,seed=7,dir={dir}"));
        let delayed = stats.fault_delayed as usize;
        assert!(delayed > 50);
        // Time stood still while everything else went through.
        let (on_time, late) = psns.split_at(psns.len() - delayed);
        assert!(on_time.is_sorted() && late.is_sorted());
        assert_eq!(sorted(psns), total());
    }
}

#[test]
fn corrupted_packets_are_found_by_the_icrc() {
    for dir in ["tx", "rx"] {
        let (psns, stats) = run(&format!("corrupt=0.05,seed=7,dir={dir}"));
        assert!(stats.fault_corrupted > 50);
        assert_eq!(stats.rx_icrc_errors, stats.fault_corrupted);
        assert_eq!(psns.len() as u64 + stats.fault_corrupted, u64::from(TRAINS * PACKETS));
    }
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let all = "loss=0.02,dup=0.02,reorder=0.02,delay=0.02,corrupt=0.02";
    let first = run(&format!("{all},seed=1"));
    let again = run(&format!("{all},seed=1"));
    let other = run(&format!("{all},seed=2"));
    assert_eq!(first.0, again.0);
    assert_ne!(first.0, other.0);
}

#[test]
fn configuration_is_read_and_refused() {
    let text = "loss=0.01,dup=0.02,reorder=0.03,corrupt=0.04,delay=0.05,delay_us=250,seed=9,dir=rx";
    let config: FaultConfig = text.parse().unwrap();
    assert_eq!(config.to_string(), text);
    assert_eq!(config.to_string().parse(), Ok(config));
    assert_eq!("".parse(), Ok(FaultConfig::default()));
    for (text, part) in [
        ("loss", "name=value"),
        ("lost=1", "lost"),
        ("loss=2", "0 to 1"),
        ("loss=nan", "0 to 1"),
        ("seed=-1", "whole"),
        ("dir=up", "tx, rx"),
    ] {
        let error: FaultConfigError = text.parse::<FaultConfig>().unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
}
