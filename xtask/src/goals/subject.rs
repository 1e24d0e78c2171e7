//! What can be measured: a program with its options in a place, and the numbers that a run of it gives.

use std::collections::BTreeMap;
use std::fmt;

/// Where the two ends are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Where {
    /// Two processes at 127.0.0.1.
    Loopback,
    /// Two network namespaces, joined by a veth pair of MTU 1500.
    Ethernet,
    /// The same with MTU 9000.
    Jumbo,
    /// MTU 1500, and the kernel (netem) loses one packet in a hundred in each direction.
    Lossy,
    /// Two processes in a virtual machine with a Linux kernel of its own.
    Guest,
}

/// What both ends do until something comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    Polling,
    Sleeping,
}

/// Whose verbs a program uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stack {
    Ferroce,
    /// The kernel's rdma_rxe: in the guest only.
    Rxe,
}

/// Two processes of a program, and how they are started.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Program {
    /// A program of perftest.
    Perftest {
        name: &'static str,
        bytes: u32,
        queue_pairs: u32,
        waiting: Waiting,
        stack: Stack,
        /// Variables of both ends.
        env: &'static [(&'static str, &'static str)],
    },
    /// A test of `ferroce perf` that sleeps: perftest's ib_write_bw cannot.
    Perf { test: &'static str, bytes: u32 },
    /// One stream of TCP, with writes of `bytes`, or of 1 MiB if that is less: iperf3 has no larger ones.
    Iperf3 { bytes: u32 },
    /// Messages over TCP, there and back (`xtask/programs/tcp_pingpong.c`): latency of one way, or of both.
    TcpPingPong { bytes: u32, waiting: Waiting, both_ways: bool },
    /// A test of ucx_perftest over these transports.
    Ucx { transports: &'static str, test: &'static str, bytes: u32 },
    /// libfabric's fi_pingpong.
    Fabric { provider: &'static str, endpoint: &'static str, bytes: u32 },
    /// A mode of `xtask/programs/probe.c` with `count` objects.
    Probe { mode: &'static str, count: u32, bytes: u32 },
}

/// A program in a place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Subject {
    pub(super) place: Where,
    pub(super) program: Program,
}

/// What a number tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Measure {
    Rate,
    Messages,
    /// The average of one way, or of a whole READ or atomic.
    Latency,
    Median,
    P99,
    P999,
    /// Time of the processors of both ends for each message.
    CpuPerMessage,
    /// The same for each KiB.
    CpuPerKib,
    /// Time of one operation.
    Time,
    /// Share of a core that a process takes.
    Core,
}

/// What one run gave.
pub(super) type Sample = BTreeMap<Measure, f64>;

impl Measure {
    pub(super) fn is_cpu(self) -> bool {
        matches!(self, Measure::CpuPerMessage | Measure::CpuPerKib)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Measure::Rate => "rate",
            Measure::Messages => "messages",
            Measure::Latency => "latency, average",
            Measure::Median => "latency, median",
            Measure::P99 => "latency, 99 %",
            Measure::P999 => "latency, 99.9 %",
            Measure::CpuPerMessage => "CPU per message",
            Measure::CpuPerKib => "CPU per KiB",
            Measure::Time => "time",
            Measure::Core => "CPU",
        }
    }

    pub(super) fn unit(self) -> &'static str {
        match self {
            Measure::Rate => "Gbit/s",
            Measure::Messages => "M/s",
            Measure::Latency | Measure::Median | Measure::P99 | Measure::P999 | Measure::Time => "us",
            Measure::CpuPerMessage | Measure::CpuPerKib => "ns",
            Measure::Core => "% of a core",
        }
    }
}

impl Subject {
    /// What a row calls it when it is what Ferroce is compared with.
    pub(super) fn name(&self) -> String {
        match self.program {
            Program::Perftest { stack: Stack::Rxe, .. } => "rxe".into(),
            Program::Perftest { queue_pairs: 1, .. } => "Ferroce, 1 QP".into(),
            Program::Perftest { queue_pairs, .. } => format!("Ferroce, {queue_pairs} QPs"),
            Program::Perf { .. } => "ferroce perf".into(),
            Program::Iperf3 { .. } => "TCP (iperf3)".into(),
            Program::TcpPingPong { waiting, both_ways, .. } => {
                let what = if both_ways { "TCP, there and back" } else { "TCP" };
                let how = if waiting == Waiting::Polling { "spinning" } else { "sleeping" };
                format!("{what}, {how}")
            }
            Program::Ucx { transports, .. } => format!("UCX {transports}"),
            Program::Fabric { provider, .. } => format!("libfabric {provider}"),
            Program::Probe { mode: "register", bytes, .. } => format!("Ferroce, {}", Bytes(bytes)),
            Program::Probe { count, .. } => format!("Ferroce, {count}"),
        }
    }

    /// Both ends sleep until something comes.
    pub(super) fn is_sleeping(&self) -> bool {
        match self.program {
            Program::Perftest { waiting, .. } | Program::TcpPingPong { waiting, .. } => waiting == Waiting::Sleeping,
            Program::Perf { .. } => true,
            _ => false,
        }
    }

    /// Bytes of a message.
    pub(super) fn bytes(&self) -> u32 {
        match self.program {
            Program::Perftest { bytes, .. }
            | Program::Perf { bytes, .. }
            | Program::Iperf3 { bytes }
            | Program::TcpPingPong { bytes, .. }
            | Program::Ucx { bytes, .. }
            | Program::Fabric { bytes, .. }
            | Program::Probe { bytes, .. } => bytes,
        }
    }
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Where::Loopback => "one host",
            Where::Ethernet => "veth, MTU 1500",
            Where::Jumbo => "veth, MTU 9000",
            Where::Lossy => "veth, MTU 1500, netem loss 1 %",
            Where::Guest => "inside a VM",
        })
    }
}

/// A number of bytes, for people.
pub(super) struct Bytes(pub(super) u32);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 30 && bytes.is_multiple_of(1 << 30) => write!(f, "{} GiB", bytes >> 30),
            bytes if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => write!(f, "{} MiB", bytes >> 20),
            bytes if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => write!(f, "{} KiB", bytes >> 10),
            bytes => write!(f, "{bytes} B"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_for_people() {
        let shown = |bytes| Bytes(bytes).to_string();
        assert_eq!([2, 1000, 4096, 1 << 20, 1 << 30].map(shown), ["2 B", "1000 B", "4 KiB", "1 MiB", "1 GiB"]);
    }
}
