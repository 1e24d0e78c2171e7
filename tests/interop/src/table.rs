//! The matrix as data: which programs run with which options, in which places, in which directions.

use crate::ends::Side;

/// Address family of the GIDs in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Family {
    V4,
    V6,
}

/// A place: how the wire is.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// First part of the ids of its lines.
    pub name: &'static str,
    /// MTU of both interfaces, in bytes.
    pub mtu: u32,
    /// Path MTU that RoCE makes of it, in bytes.
    pub path_mtu: u32,
    /// Addresses in use.
    pub family: Family,
}

/// All places.
pub static PLACES: &[Place] = &[
    Place { name: "1500-v4", mtu: 1500, path_mtu: 1024, family: Family::V4 },
    Place { name: "1500-v6", mtu: 1500, path_mtu: 1024, family: Family::V6 },
    Place { name: "9000-v4", mtu: 9000, path_mtu: 4096, family: Family::V4 },
    Place { name: "9000-v6", mtu: 9000, path_mtu: 4096, family: Family::V6 },
];

/// Kind of a program: how it is called and what it prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `ibv_*_pingpong` of ibverbs-utils.
    Pingpong,
    /// perftest.
    Perftest,
    /// A program of rdmacm-utils, named by its client: two processes that find each other by RDMA-CM.
    Connection,
    /// A C program of `tests/programs` or of this folder, which checks every byte.
    Own,
    /// Such a program, of which each end tells what it saw: that must be what it sees where both ends are the kernel's.
    Compared,
    /// The same; the server is ended by kill -9 while the transfer runs.
    Death,
}

/// A bad network, which Ferroce's fault middleware makes.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// What the names of its rows begin with.
    pub name: &'static str,
    /// FERROCE_FAULT.
    pub spec: &'static str,
    /// Packets are altered, so that both ends must find wrong ICRCs.
    pub corrupts: bool,
}

/// A row of the matrix; it makes a line in each place and each direction.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Program.
    pub program: &'static str,
    /// Options of both ends. `{mtu}` stands for the path MTU.
    pub options: &'static str,
    /// What the program is.
    pub kind: Kind,
    /// Longest time that it may take, in seconds.
    pub limit_s: u64,
    /// The bad network that it runs on, if so.
    pub fault: Option<Fault>,
    /// Ferroce and the tap capture, and the captures are dissected: opcodes (of the BTH) that must be in both.
    pub capture: Option<&'static [u8]>,
    /// What rxe must count at least, or else the row did not do what it is for: names of counters.
    pub at_least: &'static [(&'static str, u64)],
    /// Belongs to the RC set (`--set rc`), of which [`round`] takes a part.
    pub rc: bool,
    /// Its programs find each other by RDMA-CM, and not by GIDs that they are told.
    pub rdmacm: bool,
    /// The only side that it is served from, if it cannot be both.
    pub only: Option<Side>,
}

/// A line: a row in a place with the server on one side.
#[derive(Clone, Debug)]
pub struct Line {
    /// For instance `1500-v4/ib_write_bw/-b/kernel-serves`.
    pub id: String,
    /// Where.
    pub place: &'static Place,
    /// What.
    pub row: &'static Row,
    /// Where the server runs.
    pub server: Side,
}

const fn row(program: &'static str, options: &'static str, kind: Kind) -> Row {
    Row {
        program,
        options,
        kind,
        limit_s: 120,
        fault: None,
        capture: None,
        at_least: &[],
        rc: false,
        rdmacm: false,
        only: None,
    }
}

/// In the RC set: what takes seconds at most.
const fn rc(row: Row) -> Row {
    Row { rc: true, ..row }
}

/// Loss, duplication and reordering of what Ferroce sends and of what it receives.
const BAD: Fault = Fault { name: "bad", spec: "loss=0.01,dup=0.01,reorder=0.01,seed=7", corrupts: false };
/// The same only on the way to the kernel.
const BAD_TX: Fault = Fault { name: "bad-tx", spec: "loss=0.01,dup=0.01,reorder=0.01,dir=tx,seed=8", corrupts: false };
/// The same only on the way from the kernel.
const BAD_RX: Fault = Fault { name: "bad-rx", spec: "loss=0.01,dup=0.01,reorder=0.01,dir=rx,seed=9", corrupts: false };
/// Bits that flip. It shows also that wrong ICRCs would be seen, of which other rows must have none.
const CORRUPT: Fault = Fault { name: "corrupt", spec: "corrupt=0.01,seed=10", corrupts: true };

/// On a bad network.
const fn on(fault: Fault, row: Row) -> Row {
    Row { fault: Some(fault), limit_s: 240, ..row }
}

/// With captures that are dissected, in which these opcodes must be.
const fn captured(opcodes: &'static [u8], row: Row) -> Row {
    Row { capture: Some(opcodes), ..row }
}

/// SEND, WRITE, READ and its responses, acknowledgements, atomics.
const RC_OPCODES: &[u8] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20];
/// SEND and WRITE.
const UC_OPCODES: &[u8] = &[32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43];
/// SEND.
const UD_OPCODES: &[u8] = &[100, 101];
/// SEND with invalidate, and NAKs among the acknowledgements.
const ERROR_OPCODES: &[u8] = &[17, 22, 23];

const fn pingpong(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::Pingpong)
}

const fn perf(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::Perftest)
}

const fn connection(program: &'static str, options: &'static str) -> Row {
    rdmacm(row(program, options, Kind::Connection))
}

const fn rdmacm(row: Row) -> Row {
    Row { rdmacm: true, ..row }
}

const fn only(side: Side, row: Row) -> Row {
    Row { only: Some(side), ..row }
}

const fn own(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::Own)
}

/// Rights and keys across; "no receive" has its own counter: rnr_retry 7 means without end, so more than 7 refusals each way.
const fn errors() -> Row {
    Row { at_least: &[("send_rnr_err", 20), ("rcvd_rnr_err", 20)], ..row("errors", "", Kind::Compared) }
}

const fn death(options: &'static str) -> Row {
    death_of("death", options)
}

const fn death_of(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::Death)
}

/// The rows. The guest moves a few MB/s: few iterations. `-o 16`: a program asks its device for as many outstanding READs
/// as the peer can answer, and rxe answers 128, more than Ferroce (or a card) asks for.
pub static ROWS: &[Row] = &[
    rc(pingpong("ibv_rc_pingpong", "-n 100")),
    rc(pingpong("ibv_rc_pingpong", "-n 100 -e")),
    rc(pingpong("ibv_rc_pingpong", "-n 20 -c -s 100003")),
    rc(pingpong("ibv_rc_pingpong", "-n 50 -m 256 -s 3000 -c")),
    rc(pingpong("ibv_rc_pingpong", "-n 50 -m {mtu} -s 20000 -c")),
    pingpong("ibv_uc_pingpong", "-n 50"),
    pingpong("ibv_uc_pingpong", "-n 50 -e -c -s 3000"),
    pingpong("ibv_ud_pingpong", "-n 50 -s {mtu}"),
    pingpong("ibv_ud_pingpong", "-n 50 -s 700 -e -c"),
    pingpong("ibv_srq_pingpong", "-n 100"),
    pingpong("ibv_srq_pingpong", "-n 100 -e -q 8"),
    // perftest, RC latency. Not with events: it looks once for each message into a completion queue of one entry, which overflows if
    // an acknowledgement is late, and hangs then, half of the time between two kernels, too.
    rc(perf("ib_send_lat", "-n 50 -s 2")),
    rc(perf("ib_send_lat", "-n 50 -s 1")),
    rc(perf("ib_send_lat", "-n 20 -s 5000")),
    rc(perf("ib_send_lat", "-n 50 -s 100 -I 200")),
    rc(perf("ib_write_lat", "-n 50 -s 2")),
    rc(perf("ib_write_lat", "-n 50 -s 1")),
    rc(perf("ib_write_lat", "-n 20 -s 65536 -I 0")),
    rc(perf("ib_read_lat", "-o 16 -n 50 -s 2")),
    rc(perf("ib_read_lat", "-o 16 -n 10 -s 1048576")),
    rc(perf("ib_atomic_lat", "-o 16 -n 50")),
    rc(perf("ib_atomic_lat", "-o 16 -n 50 -A CMP_AND_SWAP")),
    // perftest, RC bandwidth.
    rc(perf("ib_send_bw", "-n 50 -s 65536")),
    rc(perf("ib_send_bw", "-n 5 -s 1048576")),
    rc(perf("ib_send_bw", "-n 500 -s 1")),
    rc(perf("ib_send_bw", "-n 500 -s 64 -I 64")),
    rc(perf("ib_send_bw", "-n 50 -s 10000 -q 8")),
    rc(perf("ib_send_bw", "-n 50 -s 65536 -b")),
    rc(perf("ib_send_bw", "-n 50 -s 3000 --use-srq -q 4")),
    rc(perf("ib_send_bw", "-n 100 -s 3000 -e")),
    perf("ib_send_bw", "-n 5 -a"),
    rc(perf("ib_write_bw", "-n 50 -s 65536")),
    rc(perf("ib_write_bw", "-n 5 -s 1048576")),
    rc(perf("ib_write_bw", "-n 500 -s 1")),
    rc(perf("ib_write_bw", "-n 500 -s 64 -I 64")),
    rc(perf("ib_write_bw", "-n 50 -s 10000 -q 8")),
    rc(perf("ib_write_bw", "-n 50 -s 65536 -b")),
    rc(perf("ib_write_bw", "-n 20 -s 65536 -q 4 -b")),
    perf("ib_write_bw", "-n 5 -a"),
    rc(perf("ib_read_bw", "-o 16 -n 50 -s 65536")),
    rc(perf("ib_read_bw", "-o 16 -n 5 -s 1048576")),
    rc(perf("ib_read_bw", "-o 16 -n 200 -s 1")),
    rc(perf("ib_read_bw", "-o 16 -n 50 -s 10000 -q 8")),
    rc(perf("ib_read_bw", "-o 16 -n 50 -s 65536 -b")),
    perf("ib_read_bw", "-o 16 -n 5 -a"),
    rc(perf("ib_atomic_bw", "-o 16 -n 100")),
    rc(perf("ib_atomic_bw", "-o 16 -n 100 -A CMP_AND_SWAP -q 4")),
    rc(perf("ib_atomic_bw", "-o 16 -n 100 -b")),
    // perftest, UC and UD.
    perf("ib_send_lat", "-n 50 -s 64 -c UC"),
    perf("ib_write_lat", "-n 50 -s 3000 -c UC"),
    perf("ib_send_lat", "-n 50 -s 64 -c UD"),
    perf("ib_write_bw", "-n 50 -s 4096 -c UC"),
    perf("ib_send_bw", "-n 50 -s 1024 -c UD"),
    // (Debian 12's perftest knows no immediates: `verify` has them, of SEND and of WRITE, their values checked at both ends.)
    // Every byte of every operation, both ends requesting at once.
    rc(own("verify", "-n 5 --largest 70000 -e")),
    rc(own("verify", "-n 20 --largest 1048579 -e")),
    rc(own("verify", "-n 20 --largest 70000 --srq")),
    own("verify", "-n 20 --largest 70000 -c UC"),
    own("verify", "-n 20 -c UD"),
    // What else verbs have, as far as both ends have it.
    own("operations", ""),
    own("resources", ""),
    // Connections by librdmacm: Ferroce's connection manager and the kernel's rdma_cm.
    connection("rping", "-C 5 -v -V -S 60000"),
    connection("ucmatose", "-c 1 -C 10"),
    connection("ucmatose", "-c 5 -C 10 -S 4096"),
    connection("udaddy", "-c 1 -C 10"),
    connection("udaddy", "-c 4 -C 10"),
    connection("rdma_client", ""),
    connection("rstream", "-T b -T v -S 70000 -I 20 -C 20"),
    connection("rstream", "-T r -T v -S 1000000 -I 2 -C 2"),
    connection("rping", "-C 20 -v -V"),
    connection("rping", "-C 20 -v -V -q"),
    // With poll, only where the server is the slower end. Its last bytes and its shutdown may both have come when the client looks: then
    // librdmacm says POLLIN and POLLHUP, and rstream gives up for the latter.
    only(Side::Kernel, connection("rstream", "-T a -T v -S 1 -I 50 -C 50")),
    // The sender leaves when its requests are posted, not when they are sent, and rxe sends them a little later: one only from there.
    connection("mckey", "-m 239.255.71.1 -C 1"),
    only(Side::Kernel, connection("mckey", "-m 239.255.71.1 -c 2 -C 5 -S 1024")),
    // The server of perftest tells the client to connect before it listens. A client that comes too early is rejected, and connects once
    // more by an id that it has destroyed, and dies. Before it connects it fills its buffer, and with a large one it does not come early.
    rdmacm(perf("ib_send_bw", "-R -n 5 -s 4194304")),
    rdmacm(perf("ib_send_lat", "-R -n 5 -s 4194304")),
    rdmacm(perf("ib_write_bw", "-R -n 5 -s 2097152")),
    rdmacm(perf("ib_write_lat", "-R -n 5 -s 2097152")),
    rdmacm(perf("ib_read_bw", "-R -o 16 -n 5 -s 4194304")),
    rdmacm(perf("ib_read_lat", "-R -o 16 -n 5 -s 4194304")),
    only(Side::Ferroce, rdmacm(perf("ib_send_bw", "-R -n 50 -s 64 -q 8"))),
    only(Side::Ferroce, rdmacm(perf("ib_send_bw", "-R -n 50 -c UD -s 512"))),
    only(Side::Ferroce, rdmacm(perf("ib_atomic_lat", "-R -o 16 -n 50"))),
    // Connections that do not come about, or end, and what both ends see of it.
    rdmacm(row("connect", "", Kind::Compared)),
    rdmacm(death_of("connect", "--mode death")),
    // What may not be: statuses at both ends.
    own("status", "--mode foreign"),
    errors(),
    // The server's end is the end of its requests, and of nothing else.
    death("--mode write"),
    death("--mode read"),
    death("--mode atomic"),
    death("--mode send"),
    death("--mode receive"),
    // Frames of both ends as Wireshark understands them.
    captured(RC_OPCODES, own("verify", "-n 5 --largest 70000 -e")),
    captured(UC_OPCODES, own("verify", "-n 5 --largest 70000 -c UC")),
    captured(UD_OPCODES, own("verify", "-n 5 -c UD")),
    captured(ERROR_OPCODES, errors()),
    // A bad network. Not the pingpongs: an end that has its last message leaves at once, and if the acknowledgement that it
    // sent was lost, the other waits in vain (rxe without end), on every RDMA network.
    on(BAD, perf("ib_send_bw", "-n 50 -s 65536")),
    on(BAD, perf("ib_write_bw", "-n 50 -s 65536 -b")),
    on(BAD, perf("ib_read_bw", "-o 16 -n 50 -s 65536 -b")),
    on(BAD, perf("ib_atomic_bw", "-o 16 -n 200")),
    on(BAD, own("bad_network", "-n 3")),
    on(BAD_TX, own("bad_network", "-n 2")),
    on(BAD_RX, own("bad_network", "-n 2")),
    on(CORRUPT, own("bad_network", "-n 2")),
];

/// Ids of the smoke set, which CI runs: parts of them, each in the places beside it, in both directions.
pub static SMOKE: &[(&str, &[&str])] = &[
    ("ibv_rc_pingpong/-n,100", &["1500-v4", "9000-v6"]),
    ("ibv_rc_pingpong/-n,100,-e", &["1500-v4"]),
    ("ibv_uc_pingpong/-n,50", &["1500-v4"]),
    ("ibv_ud_pingpong/-n,50,-s,{mtu}", &["1500-v4", "9000-v6"]),
    ("ibv_srq_pingpong/-n,100", &["1500-v4"]),
    ("ib_send_bw/-n,50,-s,65536", &["1500-v4"]),
    ("ib_write_bw/-n,50,-s,65536", &["1500-v4", "9000-v6"]),
    ("ib_read_bw/-o,16,-n,50,-s,65536", &["1500-v4", "9000-v6"]),
    ("ib_write_lat/-n,50,-s,2", &["1500-v4"]),
    ("ib_atomic_lat/-o,16,-n,50", &["1500-v4"]),
    ("verify/-n,5,--largest,70000,-e", &["1500-v4", "9000-v6"]),
    ("verify/-n,20,-c,UD", &["1500-v4"]),
    ("operations", &["1500-v4"]),
    ("resources", &["1500-v4"]),
    ("ucmatose/-c,1,-C,10", &["1500-v4"]),
    ("udaddy/-c,1,-C,10", &["1500-v4"]),
    ("rdma_client", &["1500-v4"]),
    ("rping/-C,20,-v,-V", &["9000-v6"]),
    ("connect", &["1500-v4", "9000-v6"]),
    ("errors", &["1500-v4"]),
    ("death/--mode,write", &["1500-v4"]),
    ("death/--mode,receive", &["1500-v4"]),
    ("bad/ib_write_bw/-n,50,-s,65536,-b", &["1500-v4"]),
    ("bad/ib_read_bw/-o,16,-n,50,-s,65536,-b", &["1500-v4"]),
    ("bad/bad_network/-n,3", &["1500-v4"]),
    ("corrupt/bad_network/-n,2", &["1500-v4"]),
];

impl Row {
    /// Is it run in `place`? perftest's own address is an IPv4 one, and with `-R` it connects to that; a group is of one family; and
    /// rdma_server listens at the first address for no name, which is 0.0.0.0.
    fn runs_in(&self, place: &Place) -> bool {
        let only_v4 = ["mckey", "rdma_client"].contains(&self.program) || (self.rdmacm && self.kind == Kind::Perftest);
        !only_v4 || place.family == Family::V4
    }

    /// Does `side` serve it?
    fn is_served_by(&self, side: Side) -> bool {
        self.only.is_none_or(|only| only == side)
    }

    /// The id of its lines without place and direction.
    pub fn name(&self) -> String {
        let mut name = self.program.to_owned();
        if let Some(fault) = self.fault {
            name = format!("{}/{name}", fault.name);
        }
        if self.capture.is_some() {
            name = format!("capture/{name}");
        }
        if !self.options.is_empty() {
            name = format!("{name}/{}", self.options.replace(' ', ","));
        }
        name
    }
}

/// All lines, those of a place together.
pub fn lines() -> Vec<Line> {
    let mut lines = Vec::new();
    for place in PLACES {
        for row in ROWS.iter().filter(|row| row.runs_in(place)) {
            let sides = [(Side::Kernel, "kernel-serves"), (Side::Ferroce, "ferroce-serves")];
            for (server, word) in sides.into_iter().filter(|(side, _)| row.is_served_by(*side)) {
                lines.push(Line { id: format!("{}/{}/{word}", place.name, row.name()), place, row, server });
            }
        }
    }
    lines
}

/// The lines of `set` that round `number`, from 1, takes: of each program one row, in one place, in both directions. Place by
/// place a row goes through all of them; then comes the next row. So some tens of rounds take every line, and a number tells
/// which lines a round had.
pub fn round(set: &[Line], number: u32) -> Vec<Line> {
    let index = number as usize - 1;
    let places = distinct(set.iter().map(|line| line.place.name));
    let Some(place) = places.get(index % places.len().max(1)) else { return Vec::new() };
    let here: Vec<&Line> = set.iter().filter(|line| line.place.name == *place).collect();
    let taken = distinct(here.iter().map(|line| line.row.program)).into_iter().flat_map(|program| {
        let ours: Vec<&Line> = here.iter().copied().filter(|line| line.row.program == program).collect();
        let rows = distinct(ours.iter().map(|line| line.row.name()));
        let row = &rows[index / places.len() % rows.len()];
        ours.into_iter().filter(|line| line.row.name() == *row).cloned().collect::<Vec<_>>()
    });
    taken.collect()
}

/// Each once, in the order of their first.
fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for one in all {
        if !found.contains(&one) {
            found.push(one);
        }
    }
    found
}

/// The lines of the smoke set.
pub fn smoke() -> Vec<Line> {
    let in_set =
        |line: &Line| SMOKE.iter().any(|(name, places)| *name == line.row.name() && places.contains(&line.place.name));
    lines().into_iter().filter(in_set).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ids_are_unique() {
        let lines = lines();
        let ids: BTreeSet<&str> = lines.iter().map(|line| line.id.as_str()).collect();
        assert_eq!(ids.len(), lines.len());
        assert!(ids.contains("9000-v6/ib_write_bw/-n,5,-a/kernel-serves"));
    }

    fn rc_set() -> Vec<Line> {
        lines().into_iter().filter(|line| line.row.rc).collect()
    }

    #[test]
    fn a_round_takes_every_rc_program_both_ways_in_one_place() {
        let programs = [
            "ibv_rc_pingpong",
            "ib_send_lat",
            "ib_write_lat",
            "ib_read_lat",
            "ib_atomic_lat",
            "ib_send_bw",
            "ib_write_bw",
            "ib_read_bw",
            "ib_atomic_bw",
            "verify",
        ];
        let set = rc_set();
        for number in [1, 2, 33, 100, u32::MAX] {
            let round = round(&set, number);
            assert_eq!(distinct(round.iter().map(|line| line.row.program)), programs, "round {number}");
            assert_eq!(distinct(round.iter().map(|line| line.place.name)).len(), 1, "round {number}");
            for program in programs {
                let lines: Vec<&Line> = round.iter().filter(|line| line.row.program == program).collect();
                assert_eq!(lines.len(), 2, "round {number}: {program}");
                assert!(lines[0].server != lines[1].server && lines[0].row.name() == lines[1].row.name());
            }
        }
    }

    #[test]
    fn a_hundred_rounds_take_every_rc_line_three_times() {
        let set = rc_set();
        let taken: Vec<String> = (1..=100).flat_map(|number| round(&set, number)).map(|line| line.id).collect();
        for line in &set {
            let times = taken.iter().filter(|id| **id == line.id).count();
            assert!(times >= 3, "{}: {times} times", line.id);
        }
    }

    #[test]
    fn rounds_of_what_a_filter_left() {
        let one: Vec<Line> = lines().into_iter().filter(|line| line.id == "9000-v6/errors/kernel-serves").collect();
        assert_eq!(round(&one, 7).len(), 1);
        assert!(round(&[], 7).is_empty());
    }

    #[test]
    fn the_smoke_set_is_found_in_the_matrix() {
        let wanted: usize = SMOKE.iter().map(|(_, places)| 2 * places.len()).sum();
        assert_eq!(smoke().len(), wanted);
    }
}
