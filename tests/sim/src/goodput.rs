//! What the transport makes of a link, by loss and message size: WRITEs from one queue pair over a link of 25 Gb/s and 10 us one
//! way, path MTU 4096, in virtual time and without any cost of processors. The numbers say nothing about a real machine; they
//! say what recovery and windows do, and they are the same on every machine.

use std::fmt;

use ferroce_transport::{Access, Nanos, QpType};

use crate::log::Log;
use crate::network::{LinkSpeed, Rates};
use crate::plan::{ConnPlan, EndPlan, OPS, Plan, RECEIVE_BUFFER, US};
use crate::random::Random;
use crate::world::World;

/// Frames lost in a million.
pub const LOSSES: [u32; 4] = [0, 1_000, 10_000, 30_000];
/// Message sizes in bytes, and how many of each are sent.
pub const SIZES: [(u32, u32); 4] = [(64, 20_000), (4_096, 5_000), (65_536, 400), (1 << 20, 32)];

/// A day: nothing ends before the messages do.
const FOREVER: Nanos = 86_400_000_000_000;

/// Goodput in Mb/s, by size and loss: of a target that keeps what comes before its turn, and of one that goes back N.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    mbps: [Vec<[u64; LOSSES.len()]>; 2],
}

/// Measures all.
///
/// # Panics
/// If a run fails a check.
pub fn table() -> Table {
    let of =
        |goes_back| SIZES.iter().map(|&(len, count)| LOSSES.map(|loss| measure(len, count, loss, goes_back))).collect();
    Table { mbps: [of(false), of(true)] }
}

fn measure(len: u32, count: u32, loss: u32, goes_back: bool) -> u64 {
    let mut world = World::new(plan(len, count, loss, goes_back), Log::new(None), Random::new(1));
    world.run();
    world.judge();
    assert_eq!(world.complaint, None, "{len} bytes at a loss of {loss} ppm");
    let stream = &world.oracle.books[0].stream;
    assert!(stream.released == count as usize && !stream.failed, "{len} bytes at a loss of {loss} ppm");
    u64::from(len) * u64::from(count) * 8_000 / stream.progress_at
}

fn plan(len: u32, count: u32, loss: u32, goes_back: bool) -> Plan {
    let end = |node, requests| EndPlan {
        node,
        psn: 0,
        srq: false,
        requests,
        bytes: 0,
        send_depth: 128,
        receive_depth: 1,
        think_max: 0,
        lazy_max: 0,
    };
    Plan {
        nodes: 2,
        ipv6: false,
        speed: LinkSpeed { latency: 10 * US, gbps: 25 },
        gro: true,
        late_gather: false,
        receive_buffer: RECEIVE_BUFFER,
        turn_cost: 0,
        wakeup: 0,
        rates: Rates { loss, ..Rates::default() },
        outages: Vec::new(),
        pauses: Vec::new(),
        calm_at: FOREVER,
        conns: vec![ConnPlan {
            qp_type: QpType::Rc,
            ends: [end(0, count), end(1, 0)],
            mtu: 4096,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 16,
            max_len: len,
            mix: [0; OPS],
            signalled: 100,
            fenced: 0,
            inline: 0,
            bad: 0,
            denied: Access::empty(),
            bad_receives: 0,
            exposed: false,
            mutes_flow: false,
            goes_back: [false, goes_back],
            actions: Vec::new(),
            reconnects: 0,
        }],
        lends: false,
        fixed_len: Some(len),
    }
}

/// The text of the snapshot.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# Goodput in Mb/s of RC WRITEs over 25 Gb/s, 10 us one way, path MTU 4096, in virtual time.")?;
        writeln!(
            f,
            "# Update after a change that is meant: cargo run --release -p ferroce-sim -- --goodput > tests/sim/goodput.txt"
        )?;
        for (rows, what) in self.mbps.iter().zip(["keeps what comes before its turn", "goes back N"]) {
            writeln!(f, "# The target {what}:")?;
            write!(f, "{:<12}", "size \\ loss")?;
            for loss in LOSSES {
                write!(f, "{:>10}", format!("{} %", f64::from(loss) / 10_000.0))?;
            }
            writeln!(f)?;
            for ((len, _), row) in SIZES.iter().zip(rows) {
                write!(f, "{len:<12}")?;
                for mbps in row {
                    write!(f, "{mbps:>10}")?;
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }
}
