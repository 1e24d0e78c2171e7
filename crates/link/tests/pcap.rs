//! The capture middleware: what it writes is a capture file of RoCEv2 packets whose checksums hold.

#![allow(unsafe_code)] // signals as a program of C has them

mod common;

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use common::*;
use ferroce_link::pcap::CaptureError;
use ferroce_link::{FaultConfig, FaultLink, Link, PcapLink};
use ferroce_wire::{NetHeader, icrc};
use rustix::fs::{CWD, FileType, Mode, mknodat};

/// A file in memory.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Frames of a capture, from the Ethernet header on.
fn records(file: &[u8]) -> Vec<&[u8]> {
    let u32_at = |at: usize| u32::from_ne_bytes(file[at..at + 4].try_into().unwrap());
    assert_eq!(u32_at(0), 0xa1b2_3c4d);
    assert_eq!(u32_at(20), 1, "Ethernet");
    let mut frames = Vec::new();
    let mut at = 24;
    while at < file.len() {
        assert!(u32_at(at) > 1_700_000_000 && u32_at(at + 4) < 1_000_000_000);
        let len = u32_at(at + 8) as usize;
        assert_eq!(u32_at(at + 12) as usize, len);
        frames.push(&file[at + 16..at + 16 + len]);
        at += 16 + len;
    }
    assert_eq!(at, file.len());
    frames
}

/// The UDP payload of a frame whose IP and UDP headers, lengths, checksums and ICRC were checked.
fn checked(frame: &[u8]) -> (NetHeader, Vec<u8>) {
    let u16_at = |bytes: &[u8], at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let ip = &frame[14..];
    let (src, dst, udp, identification): (IpAddr, IpAddr, _, _) = match u16_at(frame, 12) {
        0x0800 => {
            assert_eq!(ones_sum(&ip[..20]), 0xffff, "IPv4 checksum");
            assert_eq!(usize::from(u16_at(ip, 2)), ip.len());
            let addr = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&ip[at..at + 4]).unwrap());
            (addr(12), addr(16), &ip[20..], u16_at(ip, 4))
        }
        0x86dd => {
            assert_eq!(usize::from(u16_at(ip, 4)), ip.len() - 40);
            let addr = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&ip[at..at + 16]).unwrap());
            (addr(8), addr(24), &ip[40..], 0)
        }
        other => panic!("ether type {other:#x}"),
    };
    assert_eq!((u16_at(udp, 2), usize::from(u16_at(udp, 4))), (4791, udp.len()));
    let mut pseudo = Vec::new();
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => pseudo.extend([src.octets(), dst.octets()].concat()),
        (IpAddr::V6(src), IpAddr::V6(dst)) => pseudo.extend([src.octets(), dst.octets()].concat()),
        _ => panic!("two families"),
    }
    pseudo.extend([0, 17]);
    pseudo.extend((udp.len() as u16).to_be_bytes());
    pseudo.extend(udp);
    assert_eq!(ones_sum(&pseudo), 0xffff, "UDP checksum");
    let packet = udp[8..].to_vec();
    let net = NetHeader {
        src,
        dst,
        src_port: u16_at(udp, 0),
        tclass: 0,
        hop_limit: 64,
        udp_len: packet.len() as u16,
        ifindex: 0,
    };
    let (body, trailer) = packet.split_last_chunk().unwrap();
    assert_eq!(icrc::icrc_over(&net, identification, body).to_le_bytes(), *trailer, "ICRC");
    (net, packet)
}

fn ones_sum(bytes: &[u8]) -> u32 {
    let mut sum: u32 =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

#[test]
fn both_ends_capture_the_same_packets() {
    for addr in [V4, V6] {
        let Pair { tx, rx, path } = Pair::new(addr);
        let (sent, received) = (Shared::default(), Shared::default());
        let mut tx = PcapLink::new(tx, sent.clone()).unwrap();
        let mut rx = PcapLink::new(rx, received.clone()).unwrap();
        let data = pattern(10_001, 7);
        let mut packets = 0;
        for (i, kind) in KINDS.into_iter().enumerate() {
            let train = train(kind, 5, 100 * i as u32, 1024, 10_001, spans(&[&data]));
            tx.send(1, 17, &path, &train).unwrap();
            packets += train.packets as usize;
        }
        tx.send(1, 17, &path, &ack(5, 3)).unwrap();
        tx.flush(&mut |_, error| panic!("{error}"));
        assert_eq!(receive(&mut rx, packets + 1).len(), packets + 1);
        // One side is closed, the other finds nothing more to receive: both have then written everything.
        drop(tx);
        assert_eq!(rx.recv(1, &mut |_, _, _| {}), 0);
        let (sent, received) = (sent.0.lock().unwrap(), received.0.lock().unwrap());
        let packets = |file: &[u8]| records(file).into_iter().map(checked).collect::<Vec<_>>();
        assert_eq!(packets(&sent), packets(&received));
        assert_eq!(records(&sent).len(), 52 - 1);
    }
}

/// A corrupted packet is in the receiver's capture although it is dropped.
#[test]
fn damaged_packets_are_captured() {
    let Pair { tx, rx, path } = Pair::new(V4);
    let file = Shared::default();
    let mut tx = FaultLink::new(tx, &"corrupt=1,dir=tx".parse::<FaultConfig>().unwrap());
    let mut rx = PcapLink::new(rx, file.clone()).unwrap();
    tx.send(1, 17, &path, &ack(5, 1)).unwrap();
    tx.flush(&mut |_, error| panic!("{error}"));
    eventually("it is dropped", || {
        rx.recv(1, &mut |_, _, _| panic!("a damaged packet came through"));
        rx.stats().rx_icrc_errors > 0
    });
    drop(rx);
    assert_eq!(records(&file.0.lock().unwrap()).len(), 1);
}

/// When the disk is full the capture stops and the link goes on.
#[test]
fn a_full_disk_does_not_stop_traffic() {
    struct Full(usize);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let Pair { tx, mut rx, path } = Pair::new(V4);
    let mut tx = PcapLink::new(tx, Full(1000)).unwrap();
    let data = pattern(61_440, 1);
    for i in 0..20 {
        tx.send(1, 17, &path, &train(Kind::Send, 5, 15 * i, 4096, 61_440, spans(&[&data]))).unwrap();
        tx.flush(&mut |_, error| panic!("{error}"));
        assert_eq!(receive(&mut rx, 15).len(), 15);
    }
}

/// A FIFO, gone after the test.
struct Fifo(PathBuf);

impl Fifo {
    fn make(name: &str) -> Fifo {
        let path = std::env::temp_dir().join(format!("ferroce-{name}-{}", std::process::id()));
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        Fifo(path)
    }

    /// Its other end, which answers `WouldBlock` where there is nothing.
    fn reader(&self) -> File {
        File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&self.0).unwrap()
    }
}

impl Drop for Fifo {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn send_full_trains(tx: &mut impl Link, path: &ferroce_transport::PathAddr, trains: u32) {
    let data = pattern(61_440, 1);
    for i in 0..trains {
        tx.send(1, 17, path, &train(Kind::Send, 5, 15 * i, 4096, 61_440, spans(&[&data]))).unwrap();
        tx.flush(&mut |_, error| panic!("{error}"));
    }
}

/// Each wrote from the start of the file, over the records of the other.
#[test]
fn links_of_a_process_share_a_file_and_other_processes_are_refused() {
    let path = std::env::temp_dir().join(format!("ferroce-shared-{}.pcap", std::process::id()));
    let (first, second) = (Pair::new(V4), Pair::new(V4));
    let mut one = PcapLink::create(first.tx, &path).unwrap();
    let mut two = PcapLink::create(second.tx, &path).unwrap();
    send_full_trains(&mut one, &first.path, 2);
    send_full_trains(&mut two, &second.path, 1);
    drop((one, two));
    let captured = std::fs::read(&path).unwrap();
    assert_eq!(records(&captured).into_iter().map(checked).count(), 3 * 15);

    // As another process has it.
    let other = File::options().write(true).open(&path).unwrap();
    rustix::fs::flock(&other, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let refused = PcapLink::create(Pair::new(V4).tx, &path).err().expect("it is taken");
    assert!(matches!(refused, CaptureError::Taken) && refused.to_string().contains("%p"), "{refused}");
    assert_eq!(std::fs::read(&path).unwrap(), captured, "and left as it is");
    std::fs::remove_file(&path).unwrap();
}

/// Opening it waited for a reader for ever.
#[test]
fn a_fifo_that_nobody_reads_is_refused() {
    let fifo = Fifo::make("unread");
    let Pair { tx, .. } = Pair::new(V4);
    let refused = PcapLink::create(tx, &fifo.0).err().expect("nobody reads it");
    assert!(matches!(refused, CaptureError::NoReader) && refused.errno() == libc::ENXIO, "{refused}");
}

#[test]
fn a_slow_reader_of_a_fifo_holds_up_nothing_and_what_it_misses_is_counted() {
    const TRAINS: u32 = 20;
    let fifo = Fifo::make("slow");
    let mut reader = fifo.reader();
    let Pair { tx, mut rx, path } = Pair::new(V4);
    let mut tx = PcapLink::create(tx, &fifo.0).unwrap();
    send_full_trains(&mut tx, &path, TRAINS);
    let lost = tx.stats().pcap_lost;
    assert!(lost > 0, "1.2 MiB are more than a FIFO and the buffer have room for");
    let mut captured = Vec::new();
    let mut drain = |captured: &mut Vec<u8>| match reader.read_to_end(captured) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
    };
    send_full_trains(&mut tx, &path, 1);
    let missed_all = tx.stats().pcap_lost;
    assert_eq!(missed_all - lost, 15, "there is no room yet");
    // Each look that finds nothing writes on what waits.
    for _ in 0..100 {
        drain(&mut captured);
        assert_eq!(tx.recv(1, &mut |_, _, _| {}), 0);
    }
    send_full_trains(&mut tx, &path, 1);
    for _ in 0..100 {
        assert_eq!(tx.recv(1, &mut |_, _, _| {}), 0);
        drain(&mut captured);
    }
    let lost = tx.stats().pcap_lost;
    assert_eq!(lost, missed_all, "now there was");
    drop(tx);
    drain(&mut captured);
    let whole = records(&captured).into_iter().map(checked).count();
    assert_eq!(whole as u64 + lost, u64::from((TRAINS + 2) * 15), "none in parts, none uncounted");
    assert!(!receive(&mut rx, 1).is_empty(), "traffic went on");
}

/// It ended in the middle of a record, although its reader was there.
#[test]
fn a_capture_into_a_fifo_ends_after_a_whole_record() {
    const TRAINS: u32 = 20;
    let fifo = Fifo::make("end");
    let mut reader = fifo.reader();
    let Pair { tx, path, .. } = Pair::new(V4);
    let mut tx = PcapLink::create(tx, &fifo.0).unwrap();
    send_full_trains(&mut tx, &path, TRAINS);
    let lost = tx.stats().pcap_lost;
    assert!(lost > 0, "FIFO and buffer are full");
    let captured = std::thread::spawn(move || {
        let mut captured = Vec::new();
        loop {
            match reader.read_to_end(&mut captured) {
                Ok(_) => return captured,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            std::thread::yield_now();
        }
    });
    drop(tx);
    let captured = captured.join().unwrap();
    let whole = records(&captured).into_iter().map(checked).count();
    assert_eq!(whole as u64 + lost, u64::from(TRAINS * 15), "none in parts, none uncounted");
}

/// The signal that it raised ended the program.
#[test]
fn a_reader_of_a_fifo_that_ends_ends_the_capture_only() {
    // SAFETY: no handler is installed; a test program of Rust ignores this signal, and the programs that capture do not.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let fifo = Fifo::make("ended");
    let reader = fifo.reader();
    let Pair { tx, mut rx, path } = Pair::new(V4);
    let mut tx = PcapLink::create(tx, &fifo.0).unwrap();
    drop(reader);
    send_full_trains(&mut tx, &path, 1);
    assert_eq!(tx.recv(1, &mut |_, _, _| {}), 0);
    assert_eq!(tx.stats().pcap_lost, 0, "known only now");
    send_full_trains(&mut tx, &path, 1);
    assert_eq!(tx.stats().pcap_lost, 15);
    assert_eq!(receive(&mut rx, 30).len(), 30);
    let mut pending = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: a set of signals, which the call fills.
    let is_pending = unsafe {
        libc::sigpending(pending.as_mut_ptr());
        libc::sigismember(pending.as_ptr(), libc::SIGPIPE)
    };
    assert_eq!(is_pending, 0, "nothing is left for the program");
}
