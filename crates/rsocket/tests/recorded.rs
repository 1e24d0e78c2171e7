//! What rstream of rdma-core 44 said on the wire between two Linux 6.12 kernels (16 bytes to and fro, then 1024 bytes ten times), and
//! what this machine says in the client's place.

use ferroce_rsocket::{ConnData, Half, Limits, Post, Sge, Source, Stream};

const REQUEST: &str = "01020180000000000000563113233000\
                       00000ea40000000200007faa4301e00000000fd800080000";
const REPLY: &str = "010201800000000000007f1908003000\
                     000009890000000200007f190e87900000000a7100080000";

/// Address, key and length of each RDMA WRITE with immediate that the client sent, and the immediate.
const CLIENT: [(u64, u32, usize, u32); 12] = [
    (0x7f19_0800_3010, 0x989, 16, 0x8000_0180),
    (0x7f19_0e87_9000, 0xa71, 16, 0x10),
    (0x7f19_0e87_9010, 0xa71, 1024, 0x400),
    (0x7f19_0e87_9410, 0xa71, 1024, 0x400),
    (0x7f19_0e87_9810, 0xa71, 1024, 0x400),
    (0x7f19_0e87_9c10, 0xa71, 1024, 0x400),
    (0x7f19_0e87_a010, 0xa71, 1024, 0x400),
    (0x7f19_0e87_a410, 0xa71, 1024, 0x400),
    (0x7f19_0e87_a810, 0xa71, 1024, 0x400),
    (0x7f19_0e87_ac10, 0xa71, 1024, 0x400),
    (0x7f19_0e87_b010, 0xa71, 1024, 0x400),
    (0x7f19_0e87_b410, 0xa71, 1024, 0x400),
];

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal")).collect()
}

fn told(post: &Post) -> (u64, u32, usize, u32) {
    let len = match &post.source {
        Source::Nothing => 0,
        Source::Bytes(_, len) => *len,
        Source::Inline(len) => *len as usize,
        Source::Ring([first, second]) => (first.len + second.len) as usize,
    };
    (post.remote, post.key, len, post.imm.expect("all have one"))
}

#[test]
fn the_private_data_is_read_and_written_as_recorded() {
    for recorded in [REQUEST, REPLY] {
        let said = ConnData::parse(&bytes(recorded)).expect("an rsocket's");
        assert_eq!((said.big_endian, said.credits, said.iomaps), (false, 384, 0));
        assert_eq!(said.to_bytes().to_vec(), bytes(recorded));
    }
    let reply = ConnData::parse(&bytes(REPLY)).expect("an rsocket's");
    assert_eq!(reply.target, Sge { addr: 0x7f19_0e87_9000, key: 0xa71, length: 1 << 19 });
}

#[test]
fn the_client_of_the_recording_would_have_said_the_same() {
    let own = ConnData::parse(&bytes(REQUEST)).expect("an rsocket's");
    let peer = ConnData::parse(&bytes(REPLY)).expect("an rsocket's");
    let limits =
        Limits { send_queue: 384, receive_queue: 384, send_buffer: 1 << 20, receive_buffer: 1 << 20, inline: 64 };
    let mut client = Stream::new(limits, Sge { length: 1 << 20, ..own.target }, &peer);

    let control = client.next_control().expect("the second half");
    assert_eq!(told(&control), CLIENT[0]);
    let Source::Bytes(sge, _) = control.source else { panic!("{control:?}") };
    assert_eq!(
        sge[..16],
        Sge { addr: own.target.addr + (1 << 19), key: own.target.key, length: 1 << 19 }.to_le_bytes()
    );
    assert_eq!(client.next_control(), None);
    let ping = client.write(16, u32::MAX).expect("room");
    assert_eq!(told(&ping), CLIENT[1]);

    // The server's second half, and its answer.
    client.received(0x8000_0180).expect("as recorded");
    client.received(0x10).expect("as recorded");
    client.read(16);
    for expected in &CLIENT[2..] {
        let post = client.write(1024, u32::MAX).expect("room");
        assert_eq!(told(&post), *expected);
    }
    for _ in 0..10 {
        client.received(0x400).expect("as recorded");
    }
    assert_eq!(client.unread(), 10_240);
    // The recorded end, but for the address, which means nothing without payload.
    client.shutdown(Half::Both);
    let end = client.next_control().expect("the end");
    assert_eq!((end.source, end.imm), (Source::Nothing, Some(0xe000_0000)));
}
