//! Whole frames by packet sockets, over loopback in a network namespace of the test's own (where the system allows one).

use std::process::Command;
use std::time::Duration;

use ferroce_link::raw::{FrameBuffer, FrameReceiver, FrameSender, Received};

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
    let output = Command::new("unshare")
        .args(["-rn", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh"])
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
fn next(receiver: &FrameReceiver, buffer: &mut FrameBuffer, ether_type: [u8; 2]) -> Vec<u8> {
    loop {
        match receiver.recv(buffer).expect("the interface is up") {
            Some(Received::Frame(frame)) if frame[12..14] == ether_type => return frame.to_vec(),
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
    let (sender, receiver) = (FrameSender::open(LOOPBACK).unwrap(), FrameReceiver::open(LOOPBACK).unwrap());
    let mut buffer = FrameBuffer::default();
    assert!(sender.loops());
    // Local experimental (IEEE 802), VLAN (its tag goes through the kernel's own hands), and the longest that loopback takes.
    for (ether_type, len) in [([0x88, 0xb5], 60), ([0x88, 0xb5], 15), ([0x81, 0x00], 64), ([0x88, 0xb6], 14 + 65_536)] {
        let sent = frame(ether_type, len);
        sender.send(&sent).expect("there is room");
        assert_eq!(next(&receiver, &mut buffer, ether_type), sent, "{ether_type:x?}, {len} bytes");
    }
    // What the host sends is seen once, as it comes back; nothing is left.
    while let Some(received) = receiver.recv(&mut buffer).expect("the interface is up") {
        assert!(!matches!(received, Received::Frame(frame) if frame[12..14] == [0x88, 0xb5]));
    }
    let too_long = sender.send(&frame([0x88, 0xb5], 14 + 65_537)).expect_err("above the MTU");
    assert_eq!(too_long.raw_os_error(), Some(libc::EMSGSIZE));
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
