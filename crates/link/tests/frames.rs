//! Whole frames by packet sockets, over loopback in a network namespace of the test's own; it fails where the system allows none.

use std::time::{Duration, Instant};

use ferroce_link::LinkStats;
use ferroce_link::raw::{FrameBuffer, FrameReceiver, FrameSender};

/// Set in the process that runs inside of the namespace.
const INSIDE: &str = "FERROCE_TEST_INSIDE";
/// Loopback is the first interface of a namespace.
const LOOPBACK: u32 = 1;

/// Runs this test once more, inside of a namespace. False: this is that run.
fn is_outside(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return false;
    }
    let program = std::env::current_exe().expect("a program knows its file");
    let output = ferroce_testkit::in_namespace()
        .arg(program)
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .expect("unshare is installed");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    true
}

/// The next frame with this EtherType (others may be about).
fn next(receiver: &mut FrameReceiver, ether_type: [u8; 2], stats: &mut LinkStats) -> Vec<u8> {
    let mut buffer = FrameBuffer::default();
    let give_up = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < give_up, "a frame of type {ether_type:x?} never came: {stats:?}");
        match receiver.recv(&mut buffer, stats).expect("the interface is up") {
            Some(frame) if frame[12..14] == ether_type => return frame.to_vec(),
            Some(_) => {}
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn frame(ether_type: [u8; 2], len: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| i as u8).collect();
    frame[12..14].copy_from_slice(&ether_type);
    frame
}

#[test]
fn frames_come_back_by_loopback_as_they_were() {
    if is_outside("frames_come_back_by_loopback_as_they_were") {
        return;
    }
    let (sender, mut receiver) = (FrameSender::open(LOOPBACK).unwrap(), FrameReceiver::open(LOOPBACK).unwrap());
    let mut stats = LinkStats::default();
    assert!(sender.loops());
    // Local experimental (IEEE 802), VLAN (its tag goes through the kernel's own hands), and the longest that loopback takes.
    for (ether_type, len) in [([0x88, 0xb5], 60), ([0x88, 0xb5], 15), ([0x81, 0x00], 64), ([0x88, 0xb6], 14 + 65_536)] {
        let sent = frame(ether_type, len);
        sender.send(&sent).expect("there is room");
        assert_eq!(next(&mut receiver, ether_type, &mut stats), sent, "{ether_type:x?}, {len} bytes");
    }
    // What the host sends is seen once, as it comes back; nothing is left.
    let mut buffer = FrameBuffer::default();
    while let Some(frame) = receiver.recv(&mut buffer, &mut stats).expect("the interface is up") {
        assert_ne!(frame[12..14], [0x88, 0xb5]);
    }
    assert!(stats.frame_rx >= 4, "{stats:?}");
    assert_eq!((stats.frame_rx_drop_full, stats.frame_rx_bad_length, stats.frame_rx_errors), (0, 0, 0));
    let too_long = sender.send(&frame([0x88, 0xb5], 14 + 65_537)).expect_err("above the MTU");
    assert_eq!(too_long.raw_os_error(), Some(libc::EMSGSIZE));
}

#[test]
fn frames_that_are_not_read_in_time_are_counted() {
    if is_outside("frames_that_are_not_read_in_time_are_counted") {
        return;
    }
    const SENT: u64 = 2000;
    let (sender, mut receiver) = (FrameSender::open(LOOPBACK).unwrap(), FrameReceiver::open(LOOPBACK).unwrap());
    let (mut stats, mut buffer) = (LinkStats::default(), FrameBuffer::default());
    // More bytes than any buffer that the system lets us have; loopback delivers while `send` runs.
    for _ in 0..SENT {
        sender.send(&frame([0x88, 0xb5], 14 + 65_536)).expect("there is room");
    }
    let mut read = 0;
    // The count comes with the next frame that finds room, when the kernel is done with those before.
    for _ in 0..10_000 {
        while receiver.recv(&mut buffer, &mut stats).expect("the interface is up").is_some() {
            read += 1;
        }
        if stats.frame_rx_drop_full > 0 {
            break;
        }
        sender.send(&frame([0x88, 0xb5], 60)).expect("there is room");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(stats.frame_rx_drop_full > 0, "{stats:?}");
    assert_eq!(stats.frame_rx, read, "what was dropped is not counted as received");
}

#[test]
fn an_interface_that_is_not_there_is_an_error() {
    if is_outside("an_interface_that_is_not_there_is_an_error") {
        return;
    }
    for error in [FrameSender::open(4_000_000).map(drop), FrameReceiver::open(u32::MAX).map(drop)] {
        assert_eq!(error.expect_err("no such interface").raw_os_error(), Some(libc::ENODEV));
    }
}
