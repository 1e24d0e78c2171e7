//! What is measured, as data: each row is a measure of two subjects and the ratio that is wanted.

use std::fmt;

use super::subject::{Bytes, Measure, Program, Stack, Subject, Waiting, Where};

/// What a ratio has to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Wanted {
    AtLeast(f64),
    AtMost(f64),
}

/// A part of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Set {
    Goals,
    Memory,
    Sizes,
    Latency,
    Cpu,
    QueuePairs,
    Guest,
}

/// A line of the table.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) set: Set,
    /// The operation, or the program if it is neither.
    pub(super) what: &'static str,
    pub(super) measure: Measure,
    pub(super) ours: Subject,
    pub(super) theirs: Option<Subject>,
    pub(super) wanted: Option<Wanted>,
}

/// Bytes of a large message.
const LARGE: u32 = 1 << 20;
/// One way to move messages through shared memory, as UCX has it.
const UCX_SHARED_MEMORY: &str = "posix,cma,self";
/// A program of perftest and the operation that it measures.
type Test = (&'static str, &'static str);
const WRITE_BW: Test = ("WRITE", "ib_write_bw");
const READ_BW: Test = ("READ", "ib_read_bw");
const SEND_BW: Test = ("SEND", "ib_send_bw");
const ATOMIC_BW: Test = ("FETCH_ADD", "ib_atomic_bw");
const WRITE_LAT: Test = ("WRITE", "ib_write_lat");
const READ_LAT: Test = ("READ", "ib_read_lat");
const SEND_LAT: Test = ("SEND", "ib_send_lat");
const ATOMIC_LAT: Test = ("FETCH_ADD", "ib_atomic_lat");
/// The steps from 2 B to 8 MiB.
const SIZES: [u32; 9] = [2, 8, 64, 512, 4 << 10, 32 << 10, 256 << 10, LARGE, 8 << 20];
const NETWORKS: [Where; 3] = [Where::Loopback, Where::Ethernet, Where::Jumbo];
const WAYS: [Waiting; 2] = [Waiting::Polling, Waiting::Sleeping];

/// All rows, in the order in which they are measured and shown.
pub(super) fn rows() -> Vec<Row> {
    [goals(), memory(), sizes(), latency(), cpu(), queue_pairs(), guest()].concat()
}

/// What Ferroce is for.
fn goals() -> Vec<Row> {
    use Measure::{Latency, Median, Messages, Rate};
    use Wanted::{AtLeast, AtMost};
    use Where::{Ethernet, Jumbo, Loopback, Lossy};
    let tcp_stream = |place| iperf3(place, LARGE);
    let spinning = |place| tcp(place, 2, Waiting::Polling, false);
    let shared_memory = |test, bytes| ucx(Loopback, UCX_SHARED_MEMORY, test, bytes);
    let row = |test: Test, measure, place, bytes, theirs, wanted| Row {
        set: Set::Goals,
        what: test.0,
        measure,
        ours: perftest(place, test, bytes),
        theirs: Some(theirs),
        wanted: Some(wanted),
    };
    vec![
        row(WRITE_BW, Rate, Loopback, LARGE, tcp_stream(Loopback), AtLeast(4.0)),
        row(WRITE_BW, Rate, Loopback, LARGE, shared_memory("tag_bw", LARGE), AtLeast(1.2)),
        row(READ_BW, Rate, Loopback, LARGE, tcp_stream(Loopback), AtLeast(4.0)),
        row(READ_BW, Rate, Loopback, LARGE, shared_memory("tag_bw", LARGE), AtLeast(1.2)),
        row(SEND_LAT, Median, Loopback, 2, spinning(Loopback), AtMost(0.125)),
        row(SEND_LAT, Latency, Loopback, 2, shared_memory("tag_lat", 2), AtMost(1.5)),
        row(WRITE_LAT, Median, Loopback, 2, spinning(Loopback), write_latency_wanted()),
        row(WRITE_BW, Messages, Loopback, 8, ucx(Loopback, "tcp", "tag_bw", 8), AtLeast(10.0)),
        row(WRITE_BW, Rate, Jumbo, LARGE, tcp_stream(Jumbo), AtLeast(1.0)),
        row(WRITE_BW, Rate, Ethernet, LARGE, tcp_stream(Ethernet), AtLeast(0.7)),
        row(SEND_LAT, Median, Ethernet, 2, spinning(Ethernet), AtMost(0.6)),
        row(SEND_BW, Messages, Ethernet, 8, ucx(Ethernet, "tcp", "tag_bw", 8), AtLeast(5.0)),
        with_env(row(SEND_BW, Messages, Loopback, 8, ucx(Loopback, "tcp", "tag_bw", 8), AtLeast(5.0)), UDP),
        with_env(row(WRITE_BW, Rate, Ethernet, LARGE, perftest(Ethernet, WRITE_BW, LARGE), AtLeast(0.5)), LOSS),
        Row { wanted: None, ..row(WRITE_BW, Rate, Lossy, LARGE, tcp_stream(Lossy), AtLeast(1.0)) },
    ]
}

/// Variables under which packets go over UDP although both ends are on one host.
const UDP: &[(&str, &str)] = &[("FERROCE_SAME_HOST", "udp")];
/// Each end loses one packet in a hundred.
const LOSS: &[(&str, &str)] = &[("FERROCE_FAULT", "loss=0.01")];

/// WRITE latency spins on memory: with two cores the peer's progress thread has to share one with a spinning program.
fn write_latency_wanted() -> Wanted {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Wanted::AtMost(if cores >= 4 { 0.125 } else { 0.6 })
}

/// What queue pairs and regions cost that are there and not in use.
fn memory() -> Vec<Row> {
    let probe = |mode, count, bytes| Subject { place: Where::Loopback, program: Program::Probe { mode, count, bytes } };
    let row = |what, measure, ours, theirs, wanted| Row { set: Set::Memory, what, measure, ours, theirs, wanted };
    let within_3_percent = Some(Wanted::AtLeast(0.97));
    let busy = |measure, bytes| {
        let (ours, theirs) = (probe("queue-pairs", 1001, bytes), probe("queue-pairs", 1, bytes));
        row("WRITE on one QP of", measure, ours, Some(theirs), within_3_percent)
    };
    let (many, one) = (probe("regions", 100_000, 8), probe("regions", 1, 8));
    let (large, small) = (probe("register", 1, 1 << 30), probe("register", 1, 4096));
    vec![
        busy(Measure::Messages, 8),
        busy(Measure::Rate, 64 << 10),
        row("WRITE, each to another region of", Measure::Messages, many, Some(one), None),
        row("ibv_reg_mr", Measure::Time, small, None, None),
        row("ibv_reg_mr", Measure::Time, large, Some(small), None),
        row("idle process, connected QPs:", Measure::Core, probe("idle", 10, 0), None, None),
    ]
}

/// Bandwidth and rate of messages by size. Rows with the same TCP come one after the other.
fn sizes() -> Vec<Row> {
    let mut rows = Vec::new();
    for place in NETWORKS {
        for waiting in WAYS {
            for bytes in SIZES {
                for test in [WRITE_BW, READ_BW, SEND_BW] {
                    let ours = waiting_by(perftest(place, test, bytes), waiting);
                    // What is small is a matter of messages.
                    let measure = if bytes < 4096 { Measure::Messages } else { Measure::Rate };
                    rows.push(compared(Set::Sizes, test.0, measure, ours, iperf3(place, bytes)));
                }
            }
            let ours = waiting_by(perftest(place, ATOMIC_BW, 8), waiting);
            rows.push(compared(Set::Sizes, ATOMIC_BW.0, Measure::Messages, ours, iperf3(place, 8)));
        }
    }
    rows
}

/// Latency: TCP's, and that of UCX and libfabric.
fn latency() -> Vec<Row> {
    let mut rows = Vec::new();
    for place in NETWORKS {
        for waiting in WAYS {
            for (test, bytes) in [(SEND_LAT, 2), (SEND_LAT, 64 << 10), (WRITE_LAT, 2), (READ_LAT, 2), (ATOMIC_LAT, 8)] {
                // It looks for a byte in memory and cannot sleep.
                if test == WRITE_LAT && waiting == Waiting::Sleeping {
                    continue;
                }
                let both_ways = test == READ_LAT || test == ATOMIC_LAT;
                let ours = waiting_by(perftest(place, test, bytes), waiting);
                let theirs = tcp(place, bytes, waiting, both_ways);
                let measures = [Measure::Median, Measure::P99, Measure::P999];
                rows.extend(measures.map(|measure| compared(Set::Latency, test.0, measure, ours, theirs)));
            }
        }
    }
    for (place, bytes, theirs) in [
        (Where::Loopback, 2, fabric(Where::Loopback, "shm", "rdm", 2)),
        (Where::Loopback, 2, fabric(Where::Loopback, "tcp", "msg", 2)),
        (Where::Loopback, 2, ucx(Where::Loopback, "tcp", "tag_lat", 2)),
        (Where::Loopback, LARGE, fabric(Where::Loopback, "shm", "rdm", LARGE)),
        (Where::Loopback, LARGE, ucx(Where::Loopback, UCX_SHARED_MEMORY, "tag_lat", LARGE)),
        (Where::Ethernet, 2, fabric(Where::Ethernet, "tcp", "msg", 2)),
        (Where::Ethernet, 2, ucx(Where::Ethernet, "tcp", "tag_lat", 2)),
    ] {
        let ours = perftest(place, SEND_LAT, bytes);
        rows.push(compared(Set::Latency, SEND_LAT.0, Measure::Latency, ours, theirs));
    }
    rows
}

/// What the processors of both ends spend.
fn cpu() -> Vec<Row> {
    let mut rows = Vec::new();
    for place in NETWORKS {
        for waiting in WAYS {
            for (bytes, measure) in [(LARGE, Measure::CpuPerKib), (8, Measure::CpuPerMessage)] {
                for test in [WRITE_BW, READ_BW, SEND_BW, ATOMIC_BW] {
                    if test != ATOMIC_BW || bytes == 8 {
                        let ours = waiting_by(perftest(place, test, bytes), waiting);
                        rows.push(compared(Set::Cpu, test.0, measure, ours, iperf3(place, bytes)));
                    }
                }
            }
            let ours = waiting_by(perftest(place, SEND_LAT, 2), waiting);
            let theirs = tcp(place, 2, waiting, false);
            rows.push(compared(Set::Cpu, "SEND, there and back", Measure::CpuPerMessage, ours, theirs));
        }
    }
    rows
}

/// The same traffic over more queue pairs.
fn queue_pairs() -> Vec<Row> {
    let mut rows = Vec::new();
    for place in [Where::Loopback, Where::Ethernet] {
        for (bytes, measure) in [(8, Measure::Messages), (64 << 10, Measure::Rate)] {
            for count in [10, 100, 1000] {
                let one = perftest(place, WRITE_BW, bytes);
                let ours = over_queue_pairs(one, count);
                rows.push(compared(Set::QueuePairs, WRITE_BW.0, measure, ours, one));
            }
        }
    }
    rows
}

/// The kernel's own RoCE in the same place, with the same programs. The guest has one core, which ends that poll share.
fn guest() -> Vec<Row> {
    let rows = [
        (WRITE_BW, 64 << 10, Measure::Rate),
        (READ_BW, 64 << 10, Measure::Rate),
        (SEND_BW, 64 << 10, Measure::Rate),
        (WRITE_BW, 8, Measure::Messages),
        (SEND_LAT, 2, Measure::Median),
        (READ_LAT, 2, Measure::Median),
        (WRITE_LAT, 2, Measure::Median),
    ];
    let polling = rows.into_iter().map(|row| (row, Waiting::Polling));
    // perftest's WRITEs do not sleep, and its ib_send_lat that sleeps was seen to wait for ever on rxe.
    let sleeps = [READ_BW, SEND_BW, READ_LAT];
    let sleeping = rows.into_iter().filter(|row| sleeps.contains(&row.0)).map(|row| (row, Waiting::Sleeping));
    let row = |((test, bytes, measure), waiting): ((Test, u32, Measure), Waiting)| {
        let ours = waiting_by(perftest(Where::Guest, test, bytes), waiting);
        compared(Set::Guest, test.0, measure, ours, by_rxe(ours))
    };
    polling.chain(sleeping).map(row).collect()
}

/// A row without a goal.
fn compared(set: Set, what: &'static str, measure: Measure, ours: Subject, theirs: Subject) -> Row {
    Row { set, what, measure, ours, theirs: Some(theirs), wanted: None }
}

fn perftest(place: Where, test: Test, bytes: u32) -> Subject {
    let (waiting, stack) = (Waiting::Polling, Stack::Ferroce);
    Subject { place, program: Program::Perftest { name: test.1, bytes, queue_pairs: 1, waiting, stack, env: &[] } }
}

fn iperf3(place: Where, bytes: u32) -> Subject {
    Subject { place, program: Program::Iperf3 { bytes } }
}

fn tcp(place: Where, bytes: u32, waiting: Waiting, both_ways: bool) -> Subject {
    Subject { place, program: Program::TcpPingPong { bytes, waiting, both_ways } }
}

fn ucx(place: Where, transports: &'static str, test: &'static str, bytes: u32) -> Subject {
    Subject { place, program: Program::Ucx { transports, test, bytes } }
}

fn fabric(place: Where, provider: &'static str, endpoint: &'static str, bytes: u32) -> Subject {
    Subject { place, program: Program::Fabric { provider, endpoint, bytes } }
}

fn with_env(mut row: Row, variables: &'static [(&'static str, &'static str)]) -> Row {
    if let Program::Perftest { env, .. } = &mut row.ours.program {
        *env = variables;
    }
    row
}

fn waiting_by(mut subject: Subject, way: Waiting) -> Subject {
    match (&mut subject.program, way) {
        (Program::Perftest { name: "ib_write_bw", bytes, .. }, Waiting::Sleeping) => {
            subject.program = Program::Perf { test: "write-bw", bytes: *bytes };
        }
        (Program::Perftest { waiting, .. }, _) => *waiting = way,
        _ => {}
    }
    subject
}

fn over_queue_pairs(mut subject: Subject, count: u32) -> Subject {
    if let Program::Perftest { queue_pairs, .. } = &mut subject.program {
        *queue_pairs = count;
    }
    subject
}

fn by_rxe(mut subject: Subject) -> Subject {
    if let Program::Perftest { stack, .. } = &mut subject.program {
        *stack = Stack::Rxe;
    }
    subject
}

impl Row {
    /// What is measured, where and how.
    pub(super) fn label(&self) -> String {
        let mut label = self.what.to_owned();
        if let Program::Probe { mode, count, .. } = self.ours.program
            && mode != "register"
        {
            label += &format!(" {count},");
        }
        if self.ours.bytes() > 0 {
            label += &format!(" {}", Bytes(self.ours.bytes()));
        }
        label = format!("{}, {}", label.trim_end_matches(','), self.ours.place);
        if self.ours.is_sleeping() {
            label += ", sleeping";
        }
        if let Program::Perftest { queue_pairs, env, .. } = self.ours.program {
            if queue_pairs > 1 {
                label += &format!(", {queue_pairs} QPs");
            }
            label.extend(env.iter().map(|(name, value)| format!(", {name}={value}")));
        }
        label
    }

    /// With what it is compared.
    pub(super) fn with(&self) -> String {
        match &self.theirs {
            // The faults of a network are the only difference: it would be called the same.
            Some(theirs) if self.is_with_faults() && matches!(theirs.program, Program::Perftest { .. }) => {
                "Ferroce, without".into()
            }
            Some(theirs) => theirs.name(),
            None => String::new(),
        }
    }

    fn is_with_faults(&self) -> bool {
        matches!(self.ours.program, Program::Perftest { env, .. } if env == LOSS)
    }

    /// What --row looks in.
    pub(super) fn id(&self) -> String {
        let id = format!("{}: {}: {}", self.set, self.label(), self.measure.name());
        if self.theirs.is_some() { format!("{id}: {}", self.with()) } else { id }
    }
}

impl Wanted {
    pub(super) fn is_met(self, ratio: f64) -> bool {
        match self {
            Wanted::AtLeast(wanted) => ratio >= wanted,
            Wanted::AtMost(wanted) => ratio <= wanted,
        }
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wanted::AtLeast(wanted) => write!(f, ">= {wanted}"),
            Wanted::AtMost(wanted) => write!(f, "<= {wanted}"),
        }
    }
}

impl fmt::Display for Set {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Set::Goals => "goals",
            Set::Memory => "objects",
            Set::Sizes => "sizes",
            Set::Latency => "latency",
            Set::Cpu => "cpu",
            Set::QueuePairs => "queue pairs",
            Set::Guest => "guest",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_ratio_is_judged_by_what_is_wanted() {
        assert!(Wanted::AtLeast(2.0).is_met(2.0) && !Wanted::AtLeast(2.0).is_met(1.9));
        assert!(Wanted::AtMost(0.5).is_met(0.5) && !Wanted::AtMost(0.5).is_met(0.6));
        assert!(!Wanted::AtMost(0.5).is_met(f64::NAN) && !Wanted::AtLeast(0.5).is_met(f64::NAN));
    }

    #[test]
    fn rows_of_different_subjects_have_different_names() {
        let rows = rows();
        let names: BTreeSet<String> = rows.iter().map(Row::id).collect();
        assert_eq!(names.len(), rows.len());
        assert!(rows.is_sorted_by_key(|row| row.set), "a set is shown in one piece");
        // What a run of a set measures is kept for all its rows.
        assert!(rows.iter().all(|row| row.measure.is_cpu() == (row.set == Set::Cpu)), "CPU time has its set");
    }

    #[test]
    fn nobody_is_asked_for_what_it_cannot_do() {
        for row in rows() {
            let write = matches!(row.ours.program, Program::Perftest { name: "ib_write_bw" | "ib_write_lat", .. });
            assert!(!(write && row.ours.is_sleeping()), "perftest's WRITEs do not sleep: {}", row.id());
            let guest = row.ours.place == Where::Guest;
            assert!(
                !guest || matches!(row.ours.program, Program::Perftest { .. }),
                "the guest has perftest: {}",
                row.id()
            );
        }
    }

    #[test]
    fn rows_say_what_is_special_about_them() {
        let ids: Vec<String> = rows().iter().map(Row::id).collect();
        for wanted in [
            "goals: WRITE 1 MiB, one host: rate: TCP (iperf3)",
            "goals: SEND 8 B, one host, FERROCE_SAME_HOST=udp: messages: UCX tcp",
            "goals: WRITE 1 MiB, veth, MTU 1500, FERROCE_FAULT=loss=0.01: rate: Ferroce, without",
            "goals: WRITE 1 MiB, veth, MTU 1500, netem loss 1 %: rate: TCP (iperf3)",
            "objects: WRITE on one QP of 1001, 8 B, one host: messages: Ferroce, 1",
            "objects: ibv_reg_mr 4 KiB, one host: time",
            "objects: ibv_reg_mr 1 GiB, one host: time: Ferroce, 4 KiB",
            "objects: idle process, connected QPs: 10, one host: CPU",
            "sizes: FETCH_ADD 8 B, veth, MTU 9000, sleeping: messages: TCP (iperf3)",
            "sizes: WRITE 8 MiB, veth, MTU 9000, sleeping: rate: TCP (iperf3)",
            "guest: READ 2 B, inside a VM, sleeping: latency, median: rxe",
            "latency: READ 2 B, one host: latency, 99.9 %: TCP, there and back, spinning",
            "cpu: SEND, there and back 2 B, one host, sleeping: CPU per message: TCP, sleeping",
            "queue pairs: WRITE 8 B, one host, 1000 QPs: messages: Ferroce, 1 QP",
            "guest: WRITE 64 KiB, inside a VM: rate: rxe",
        ] {
            assert!(ids.iter().any(|id| id == wanted), "{wanted:?} is not in {ids:#?}");
        }
    }
}
