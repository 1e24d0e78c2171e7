//! One-sided operations: A writes into B's memory and reads it back, and B's program does nothing.
//! `cargo run --example read_write`.

use ferroce::{Result, SendOp};

mod common;

fn main() -> Result<()> {
    let (a, b) = common::connected_pair(1 << 20)?;
    let pattern: Vec<u8> = (0..1 << 20).map(|i| (i * 7 % 251) as u8).collect();
    let (raddr, rkey) = (b.buffer.addr(), b.mr.rkey());

    a.buffer.write(0, &pattern);
    a.post(1, SendOp::Write { raddr, rkey }, pattern.len() as u32)?;
    a.wait()?;
    let mut written = vec![0; pattern.len()];
    b.buffer.read(0, &mut written);
    assert_eq!(written, pattern);

    a.buffer.write(0, &vec![0; pattern.len()]);
    a.post(2, SendOp::Read { raddr, rkey }, pattern.len() as u32)?;
    a.wait()?;
    let mut read = vec![0; pattern.len()];
    a.buffer.read(0, &mut read);
    assert_eq!(read, pattern);
    println!("wrote and read back {} bytes of remote memory", pattern.len());
    Ok(())
}
