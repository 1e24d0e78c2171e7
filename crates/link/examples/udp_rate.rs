//! Throughput of the UDP link over loopback, each train sent, received, checked and stored.
//!
//! `cargo run --release -p ferroce-link --example udp_rate -- [mtu=4096] [train bytes=61440] [seconds=3]`
//!
//! First on one thread, sending and receiving in turns: the fastest tenth of the times tells what each side costs, also on a busy
//! machine. Then on two threads, with a window of bytes in flight that stands for the transport's flow control.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferroce_link::udp::Capabilities;
use ferroce_link::{Link, UdpLink, UdpOptions};
use ferroce_transport::{PathAddr, Payload, Side, Span, Train};
use ferroce_wire::{Bth, Headers, Opcode, Psn};

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default: u32| args.next().map_or(default, |text| text.parse().expect("a number"));
    let (mtu, len, seconds) = (number(4096), number(61_440), number(3));
    println!("{}", Capabilities::probe());
    let time = Duration::from_secs(seconds.into());
    let load = Load { mtu, len };
    println!("mtu {mtu}, trains of {len} bytes");
    in_turns(&load, time);
    on_two_threads(&load, time);
}

struct Load {
    mtu: u32,
    len: u32,
}

impl Load {
    fn gbit(&self, trains: f64, seconds: f64) -> f64 {
        f64::from(self.len) * trains * 8.0 / seconds / 1e9
    }

    /// Trains to queue before a flush.
    fn depth(&self) -> u32 {
        (4 * 61_440 / self.len.max(1)).clamp(1, 64)
    }
}

struct Ends {
    tx: UdpLink,
    rx: UdpLink,
    path: PathAddr,
}

impl Ends {
    fn new() -> Ends {
        let localhost = IpAddr::from(Ipv4Addr::LOCALHOST);
        let socket = UdpSocket::bind((localhost, 0)).expect("a socket on loopback");
        let port = socket.local_addr().expect("it is bound").port();
        let options = UdpOptions { port, ..Default::default() };
        let rx = UdpLink::with_options(vec![socket.into()], options.clone()).expect("a receiving link");
        let tx = UdpLink::with_options(vec![], options).expect("a sending link");
        let path = PathAddr { src: localhost, dst: localhost, ifindex: 0, tclass: 0, hop_limit: 64, flow_label: 0 };
        Ends { tx, rx, path }
    }

    fn report(&self) {
        for (who, stats) in [("tx", self.tx.stats()), ("rx", self.rx.stats())] {
            let counters: Vec<_> =
                stats.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {n}")).collect();
            println!("  {who}: {}", counters.join(", "));
        }
    }
}

fn in_turns(load: &Load, time: Duration) {
    let mut ends = Ends::new();
    let mut source = Ring::new();
    let mut target = Ring::new();
    let (mut sending, mut receiving) = (Vec::new(), Vec::new());
    let mut psn = Psn::new(0);
    let start = Instant::now();
    while start.elapsed() < time {
        let begin = Instant::now();
        for _ in 0..load.depth() {
            let train = train(psn, load, source.next(load.len as usize));
            ends.tx.send(0, 1, &ends.path, &train).expect("mapped memory");
            psn = psn.add(train.packets);
        }
        ends.tx.flush(&mut |_, error| panic!("{error}"));
        let sent = Instant::now();
        while ends.rx.recv(32, &mut |_, _, payload| target.store(payload)) > 0 {}
        receiving.push(sent.elapsed());
        sending.push(sent - begin);
    }
    for (who, mut times) in [("sending", sending), ("receiving", receiving)] {
        times.sort_unstable();
        let typical = times[times.len() / 10].as_secs_f64();
        let trains = f64::from(load.depth());
        println!(
            "  {who}: {:.2} us a train, {:.2} Gb/s on one core",
            typical / trains * 1e6,
            load.gbit(trains, typical)
        );
    }
    ends.report();
}

/// A few MiB of memory, used round and round.
struct Ring {
    bytes: Vec<u8>,
    at: usize,
}

impl Ring {
    fn new() -> Ring {
        Ring { bytes: vec![7; 64 << 20], at: 0 }
    }

    fn next(&mut self, len: usize) -> Span {
        if self.at + len > self.bytes.len() {
            self.at = 0;
        }
        let addr = self.bytes.as_ptr() as u64 + self.at as u64;
        self.at += len;
        Span { addr, len: len as u32 }
    }

    fn store(&mut self, payload: &[u8]) {
        let span = self.next(payload.len());
        ferroce_core::mem::store(span.addr, payload, false).expect("mapped memory");
    }
}

/// Bytes that may be on the way.
const WINDOW: u64 = 400 << 10;

fn on_two_threads(load: &Load, time: Duration) {
    let Ends { mut tx, mut rx, path } = Ends::new();
    let received = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut target = Ring::new();
            while !stop.load(Ordering::Relaxed) {
                let mut bytes = 0;
                rx.recv(32, &mut |_, _, payload| {
                    target.store(payload);
                    bytes += payload.len() as u64;
                });
                received.fetch_add(bytes, Ordering::Release);
                if bytes == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let mut source = Ring::new();
        let mut sent = 0;
        let mut psn = Psn::new(0);
        let start = Instant::now();
        while start.elapsed() < time {
            // As many trains as the window takes, then a flush: what an engine does after a doorbell.
            let mut queued = 0;
            while queued < load.depth() && sent + u64::from(load.len) <= received.load(Ordering::Acquire) + WINDOW {
                let train = train(psn, load, source.next(load.len as usize));
                tx.send(0, 1, &path, &train).expect("mapped memory");
                psn = psn.add(train.packets);
                sent += u64::from(load.len);
                queued += 1;
            }
            tx.flush(&mut |_, error| panic!("{error}"));
            if queued == 0 {
                std::thread::yield_now();
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        let trains = received.load(Ordering::Acquire) as f64 / f64::from(load.len);
        println!("  two threads: {:.2} Gb/s, {:.0} trains/s", load.gbit(trains, seconds), trains / seconds);
    });
    Ends { tx, rx, path }.report();
}

fn train(psn: Psn, load: &Load, span: Span) -> Train {
    let Load { mtu, len } = *load;
    let packets = len.div_ceil(mtu).max(1);
    let (first, last) = if packets == 1 {
        (Opcode::RC_SEND_ONLY, None)
    } else {
        (Opcode::RC_SEND_MIDDLE, Some(Headers::new(Bth::new(Opcode::RC_SEND_MIDDLE, 5, psn.add(packets - 1)))))
    };
    Train {
        head: Headers::new(Bth::new(first, 5, psn)),
        body: Opcode::RC_SEND_MIDDLE,
        tail: last,
        packets,
        mtu,
        len,
        payload: Payload::Gather([span].into_iter().collect()),
        path: None,
        from: Side::Requester,
    }
}
