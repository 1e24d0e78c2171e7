//! A counter in remote memory, counted up by FETCH_ADD and reset by COMPARE_SWAP: `cargo run --example atomics_counter`.

use ferroce::{Result, SendOp};

mod common;

fn main() -> Result<()> {
    let (a, b) = common::connected_pair(4096)?;
    let (raddr, rkey) = (b.buffer.addr(), b.mr.rkey());
    for expected in 0..1000u64 {
        a.post(expected, SendOp::FetchAdd { raddr, rkey, add: 1 }, 8)?;
        a.wait()?;
        assert_eq!(word(&a.buffer), expected, "FETCH_ADD gives the value before");
    }
    a.post(0, SendOp::CompareSwap { raddr, rkey, compare: 1000, swap: 0 }, 8)?;
    a.wait()?;
    println!("counted to {} and back to {}", word(&a.buffer), word(&b.buffer));
    assert_eq!((word(&a.buffer), word(&b.buffer)), (1000, 0));
    Ok(())
}

fn word(buffer: &ferroce::Buffer) -> u64 {
    let mut bytes = [0; 8];
    buffer.read(0, &mut bytes);
    u64::from_ne_bytes(bytes)
}
