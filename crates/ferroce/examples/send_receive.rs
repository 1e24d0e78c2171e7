//! Two queue pairs of one process greet each other: `cargo run --example send_receive`.

use ferroce::{RecvWr, Result, SendOp};

mod common;

fn main() -> Result<()> {
    let (a, b) = common::connected_pair(4096)?;
    let greeting = b"hello through a queue pair";
    a.buffer.write(0, greeting);
    b.qp.post_recv(RecvWr { wr_id: 7, sges: [b.sge(4096)].into_iter().collect() })?;
    a.post(1, SendOp::Send, greeting.len() as u32)?;
    let received = b.wait()?;
    a.wait()?;
    let mut text = vec![0; received.byte_len as usize];
    b.buffer.read(0, &mut text);
    assert_eq!(text, greeting);
    println!("request {} received {} bytes: {}", received.wr_id, received.byte_len, String::from_utf8_lossy(&text));
    Ok(())
}
