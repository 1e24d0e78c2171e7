//! What profilers and programs counted, from the files that they leave.

use anyhow::{Context, Result, bail};

/// Of a run; what is not there was not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counts {
    pub(super) instructions_user: Option<f64>,
    pub(super) instructions_kernel: Option<f64>,
    /// User and kernel.
    pub(super) cycles: Option<f64>,
    /// Of the last cache before memory.
    pub(super) cache_misses: Option<f64>,
}

impl Counts {
    /// What is left without a shorter run. If that is less than nothing, as runs differ from each other, it is not known.
    pub(super) fn without(self, short: Counts) -> Counts {
        let left = |long: Option<f64>, short: Option<f64>| Some(long? - short?).filter(|left| *left >= 0.0);
        Counts {
            instructions_user: left(self.instructions_user, short.instructions_user),
            instructions_kernel: left(self.instructions_kernel, short.instructions_kernel),
            cycles: left(self.cycles, short.cycles),
            cache_misses: left(self.cache_misses, short.cache_misses),
        }
    }

    /// In the order of columns.
    pub(super) fn all(self) -> [Option<f64>; 4] {
        [self.instructions_user, self.instructions_kernel, self.cycles, self.cache_misses]
    }
}

/// Packets of a process, over UDP and through rings.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Packets {
    pub(super) sent: f64,
    pub(super) received: f64,
}

impl Packets {
    pub(super) fn all(self) -> f64 {
        self.sent + self.received
    }

    /// Those of an end, or what the other one says of it: perftest's ib_send_bw does not close its device, and so counts nothing.
    pub(super) fn or_by(self, peer: Packets) -> Packets {
        if self.all() > 0.0 { self } else { Packets { sent: peer.received, received: peer.sent } }
    }

    /// What is left without a shorter run.
    pub(super) fn without(self, short: Packets) -> Packets {
        Packets { sent: self.sent - short.sent, received: self.received - short.received }
    }
}

/// The lines of `perf stat -x ,`: a value, its unit, the event, and what is not looked at.
pub(super) fn perf(text: &str) -> Result<Counts> {
    let mut counts = Counts::default();
    let mut known = false;
    for line in text.lines() {
        let mut fields = line.split(',');
        let (Some(value), Some(_unit), Some(event)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let place = match event {
            "instructions:u" => &mut counts.instructions_user,
            "instructions:k" => &mut counts.instructions_kernel,
            // Who may not look at the kernel is told so by the name.
            "cycles" | "cycles:u" => &mut counts.cycles,
            "cache-misses" | "cache-misses:u" => &mut counts.cache_misses,
            _ => continue,
        };
        known = true;
        // `<not supported>`, or `<not counted>`.
        *place = value.parse().ok();
    }
    if !known {
        bail!("there is no known event");
    }
    Ok(counts)
}

/// The head and the last line of a file of callgrind. It counts what programs do themselves, without the kernel and without a clock.
pub(super) fn callgrind(text: &str) -> Result<Counts> {
    let line = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
    let events = line("events:").context("there are no events")?;
    let totals = line("totals:").or_else(|| line("summary:")).context("there is no total")?;
    let value = |name: &str| {
        let place = events.split_whitespace().position(|event| event == name)?;
        totals.split_whitespace().nth(place)?.parse::<f64>().ok()
    };
    let instructions_user = Some(value("Ir").context("there are no instructions")?);
    let misses = ["ILmr", "DLmr", "DLmw"].map(value).into_iter().sum();
    Ok(Counts { instructions_user, cache_misses: misses, ..Counts::default() })
}

/// What `FERROCE_COUNTERS` has a process leave: lines of process id, name and value.
pub(super) fn packets(text: &str) -> Packets {
    let sum = |names: [&str; 2]| {
        let lines = text.lines().filter_map(|line| {
            let mut fields = line.split('\t').skip(1);
            names.contains(&fields.next()?).then_some(fields.next()?.parse::<u64>().ok()? as f64)
        });
        lines.sum()
    };
    Packets { sent: sum(["tx_packets", "ring_tx_packets"]), received: sum(["rx_packets", "ring_rx_packets"]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Lines of real output, shortened.

    const PERF: &str = "\
# started on Mon Nov 30 21:19:37 2026

1204331,,instructions:u,5821001,100.00,1.02,insn per cycle
902113,,instructions:k,5821001,100.00,,
2104000,,cycles,5821001,100.00,,
<not supported>,,cache-misses,0,100.00,,
";
    const CALLGRIND: &str = "\
# callgrind format
version: 1
creator: callgrind-3.19.0
pid: 9
cmd:  /usr/bin/ib_write_bw
part: 1

desc: I1 cache: 32768 B, 64 B, 8-way associative
desc: Timerange: Basic block 0 - 30
desc: Trigger: Program termination

positions: line
events: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw
summary: 1000 300 200 10 20 30 1 2 3

fn=(0) main
16 400 0 0 1
totals: 1000 300 200 10 20 30 1 2 3
";

    #[test]
    fn perf_s_lines() {
        let counts = perf(PERF).expect("has events");
        assert_eq!(counts.all(), [Some(1_204_331.0), Some(902_113.0), Some(2_104_000.0), None]);
        let unprivileged = perf("17,,cycles:u,1,100.00,,\n5,,cache-misses:u,1,50.00,,\n").expect("has events");
        assert_eq!(unprivileged.all(), [None, None, Some(17.0), Some(5.0)]);
        for wrong in ["", "# started\n\n", "perf: command not found\n", "1,,task-clock,1,100.00,,\n"] {
            assert!(perf(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn callgrind_s_totals() {
        let counts = callgrind(CALLGRIND).expect("has totals");
        assert_eq!(counts.all(), [Some(1000.0), None, None, Some(6.0)]);
        let without_caches = callgrind("events: Ir\nsummary: 5\n").expect("has a summary");
        assert_eq!(without_caches.all(), [Some(5.0), None, None, None]);
        for wrong in ["", "events: Ir\n", "totals: 5\n", "events: Dr\ntotals: 5\n", "events: Ir\ntotals: x\n"] {
            assert!(callgrind(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn packets_over_udp_and_rings_are_added() {
        let text = "7\ttx_packets\t5\n7\tring_tx_packets\t2\n7\trx_packets\t1\n7\ttx_bytes\t900\n7\tring_rx_packets\tx\nbroken\n";
        assert_eq!(packets(text), Packets { sent: 7.0, received: 1.0 });
        assert_eq!(packets(""), Packets::default());
    }

    #[test]
    fn an_end_that_counted_nothing_sent_what_the_other_one_received() {
        let (peer, none) = (Packets { sent: 7.0, received: 1.0 }, Packets::default());
        assert_eq!(none.or_by(peer), Packets { sent: 1.0, received: 7.0 });
        assert_eq!((peer.or_by(none), none.or_by(none)), (peer, none));
    }

    #[test]
    fn a_shorter_run_is_taken_off() {
        let long = Counts { instructions_user: Some(10.0), cycles: Some(7.0), ..Counts::default() };
        let short = Counts { instructions_user: Some(4.0), ..Counts::default() };
        assert_eq!(long.without(short).all(), [Some(6.0), None, None, None]);
        assert_eq!(short.without(long).instructions_user, None, "that is no number of instructions");
        let (long, short) = (Packets { sent: 9.0, received: 5.0 }, Packets { sent: 1.0, received: 2.0 });
        assert_eq!(long.without(short), Packets { sent: 8.0, received: 3.0 });
    }
}
