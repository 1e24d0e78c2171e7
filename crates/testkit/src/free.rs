//! Names and ports that nobody else has. Other tests may share the network namespace, also those of another PID namespace: process ids do
//! not tell them apart.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

/// Below the range from which the kernel gives ports to others.
const PORTS: Range<u16> = 10_000..32_000;

/// A name for a service of a test.
pub fn free_name() -> String {
    format!("ferroce-test-{:016x}", rand::random::<u64>())
}

/// A UDP port that nobody uses, and that no other call in this process gives.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static FIRST: OnceLock<u16> = OnceLock::new();
    let count = PORTS.end - PORTS.start;
    let first = *FIRST.get_or_init(|| rand::random_range(0..count));
    loop {
        let number = u32::from(first) + u32::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = PORTS.start + (number % u32::from(count)) as u16;
        if std::net::UdpSocket::bind(("::", port)).is_ok() {
            return port;
        }
    }
}
