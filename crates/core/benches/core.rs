//! Nanoseconds of the operations that every packet or every request pays: `cargo bench -p ferroce-core`.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use ferroce_core::mem::{self, Buffer};
use ferroce_core::{AsyncQueue, CompChannel, Cq, KeyTable, RecvQueue};
use ferroce_transport::{Access, Completion, RecvWr, WcFlags, WcOpcode, WcStatus};

/// Best of several runs of `rounds` calls each: the machine is shared.
fn nanoseconds(rounds: u32, mut call: impl FnMut()) -> f64 {
    let run = |call: &mut dyn FnMut()| {
        let start = Instant::now();
        for _ in 0..rounds {
            call();
        }
        start.elapsed().as_nanos() as f64 / f64::from(rounds)
    };
    (0..7).map(|_| run(&mut call)).fold(f64::INFINITY, f64::min)
}

fn report(name: &str, bytes: usize, nanos: f64) {
    if bytes == 0 {
        println!("{name:<34} {nanos:>10.1} ns");
    } else {
        println!("{name:<34} {nanos:>10.1} ns  {:>6.1} GB/s", bytes as f64 / nanos);
    }
}

fn main() {
    memory();
    keys();
    completions();
    receives();
}

fn memory() {
    const WINDOW: usize = 64 << 20;
    let user = Buffer::new(WINDOW);
    let mut ours = vec![1; 1 << 20];
    user.write(0, &vec![1; WINDOW]);
    for size in [8, 64, 256, 1 << 10, 4 << 10, 64 << 10, 1 << 20] {
        let rounds = (64 << 20 >> 2) / (size as u32 + 512);
        // In the cache, and running through memory that is not.
        for (place, window) in [("hot", size), ("cold", WINDOW)] {
            if place == "cold" && size < 1 << 10 {
                continue;
            }
            let mut offset = 0;
            let mut next = || {
                offset = if offset + 2 * size > window { 0 } else { offset + size };
                user.addr() + offset as u64
            };
            let nanos = nanoseconds(rounds, || mem::store(next(), black_box(&ours[..size]), true).unwrap());
            report(&format!("store {size} {place}"), size, nanos);
            let nanos = nanoseconds(rounds, || mem::load(next(), black_box(&mut ours[..size])).unwrap());
            report(&format!("load {size} {place}"), size, nanos);
            let nanos = nanoseconds(rounds, || {
                black_box(mem::crc(next(), size, 0).unwrap());
            });
            report(&format!("crc {size} {place}"), size, nanos);
            let nanos = nanoseconds(rounds, || {
                black_box(mem::load_crc(next(), &mut ours[..size], 0).unwrap());
            });
            report(&format!("load_crc {size} {place}"), size, nanos);
        }
    }
    report(
        "fetch_add",
        0,
        nanoseconds(100_000, || {
            black_box(mem::fetch_add(user.addr(), 1).unwrap());
        }),
    );
    report(
        "compare_swap",
        0,
        nanoseconds(100_000, || {
            black_box(mem::compare_swap(user.addr(), 1, 2).unwrap());
        }),
    );
}

fn keys() {
    let table = KeyTable::new(1);
    let buffer = Arc::new(Buffer::new(1 << 20));
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let register = || table.register_buffer(1, &buffer, access).unwrap();
    let keys: Vec<_> = (0..1_000).map(|_| register()).collect();
    let mut index = 0;
    let resolve = || {
        index = (index + 7) % keys.len();
        black_box(table.resolve(1, keys[index].rkey, buffer.addr() + 64, 4096, Access::REMOTE_WRITE)).unwrap();
    };
    report("resolve", 0, nanoseconds(200_000, resolve));
    report("register + deregister", 0, nanoseconds(20_000, || table.begin_deregister(register().lkey).unwrap()));
}

fn completions() {
    let completion = Completion {
        wr_id: 1,
        status: WcStatus::Success,
        opcode: WcOpcode::Send,
        byte_len: 0,
        imm: 0,
        qp_num: 1,
        src_qp: 2,
        flags: WcFlags::empty(),
        vendor_err: 0,
        solicited: false,
        ..Completion::UNUSED
    };
    let channel = Arc::new(CompChannel::new().unwrap());
    let cq = Cq::new(1_024, Some(channel.clone()), Arc::new(AsyncQueue::new().unwrap()), 1).unwrap();
    let mut batch = [completion; 16];
    let push_and_poll = || {
        cq.push(black_box(completion));
        assert_eq!(cq.poll(&mut batch), 1);
    };
    report("push + poll", 0, nanoseconds(200_000, push_and_poll));
    let mut batch = [completion; 16];
    let push_and_poll = || {
        for _ in 0..16 {
            cq.push(black_box(completion));
        }
        assert_eq!(cq.poll(&mut batch), 16);
    };
    report("16 x push + poll of 16", 0, nanoseconds(20_000, push_and_poll));
    report("poll of an empty queue", 0, nanoseconds(500_000, || assert!(black_box(&cq).poll_one().is_none())));
    let with_event = || {
        cq.arm(false);
        cq.push(completion);
        assert_eq!(channel.next_event().unwrap(), 1);
        cq.poll_one().unwrap();
    };
    report("arm + push + next_event + poll", 0, nanoseconds(20_000, with_event));
}

fn receives() {
    let queue = RecvQueue::new(1_024, 4).unwrap();
    let wr = RecvWr::default();
    let post_and_pop = || {
        queue.post(black_box(wr.clone())).unwrap();
        black_box(queue.pop()).unwrap();
    };
    report("post + pop of a receive", 0, nanoseconds(200_000, post_and_pop));
}
