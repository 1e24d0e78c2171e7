//! The matrix as data: which programs run with which options in which places.

use crate::launch::System;
use crate::place::{Family, Place, Shape};
use crate::scenario::{self, Scenario};

/// Kind of a program: how it is called and what it prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `ibv_devices`, `ibv_devinfo`: one process that lists.
    List,
    /// `ibv_*_pingpong` of ibverbs-utils.
    Pingpong,
    /// perftest, bandwidth.
    Bandwidth,
    /// perftest, latency.
    Latency,
    /// A program of rdmacm-utils, named by its client: two processes that find each other by RDMA-CM.
    Connection,
    /// A program of this folder (`NAME.c`) that runs as two processes and checks itself.
    Own,
}

/// Which places a row is run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// All places.
    All,
    /// The places of the whole matrix (`Place::whole`).
    Whole,
    /// The named places.
    Only(&'static [&'static str]),
}

/// A row of the matrix; it makes one line in each of its places.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Program.
    pub program: &'static str,
    /// Options of both ends, separated by blanks. `{mtu}` stands for the path MTU, `{gid}` for the GID index.
    pub options: &'static str,
    /// What the program is.
    pub kind: Kind,
    /// Where it runs.
    pub places: Where,
    /// Pairs of processes at once.
    pub pairs: u8,
    /// Longest time that it may take, in seconds.
    pub limit_s: u64,
}

/// A line: a row in a place, or a scenario.
#[derive(Clone, Debug)]
pub struct Line {
    /// For instance `veth9000-v6/ib_write_bw/-a`, or `host-v4/trixie/ib_write_bw`.
    pub id: String,
    /// Where it runs.
    pub place: &'static Place,
    /// Whose programs run.
    pub system: System,
    /// What runs.
    pub what: What,
}

/// What a line does.
#[derive(Clone, Copy, Debug)]
pub enum What {
    /// A program and options.
    Program(&'static Row),
    /// Something with a procedure of its own.
    Scenario(&'static Scenario),
}

const fn place(name: &'static str, shape: Shape, mtu: u32, family: Family) -> Place {
    Place { name, shape, mtu, family, has_v4: true }
}

/// All places. The first six carry the whole matrix, the others a part of it.
pub static PLACES: &[Place] = &[
    place("host-v4", Shape::Host, 1500, Family::V4),
    place("loop-v4", Shape::Loopback, 65_536, Family::V4),
    place("veth1500-v4", Shape::Veth, 1500, Family::V4),
    place("veth1500-v6", Shape::Veth, 1500, Family::V6),
    place("veth9000-v4", Shape::Veth, 9000, Family::V4),
    place("veth9000-v6", Shape::Veth, 9000, Family::V6),
    place("host-v6", Shape::Host, 1500, Family::V6),
    place("loop-v6", Shape::Loopback, 65_536, Family::V6),
    place("card1500-v4", Shape::Card, 1500, Family::V4),
    place("card1500-v6", Shape::Card, 1500, Family::V6),
    place("card9000-v4", Shape::Card, 9000, Family::V4),
    Place { name: "only1500-v6", shape: Shape::Veth, mtu: 1500, family: Family::V6, has_v4: false },
];

/// How many of `PLACES` carry the whole matrix.
const WHOLE: usize = 6;

const fn row(program: &'static str, options: &'static str, kind: Kind, places: Where, limit_s: u64) -> Row {
    Row { program, options, kind, places, pairs: 1, limit_s }
}

const fn list(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::List, Where::All, 30)
}

const fn pingpong(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::Pingpong, Where::Whole, 60)
}

const fn pingpong_all(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::Pingpong, Where::All, 60)
}

/// perftest gives up by itself when nothing comes for 120 s, with a message that says more than ours.
const fn bw(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::Bandwidth, Where::Whole, 150)
}

const fn bw_all(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::Bandwidth, Where::All, 150)
}

/// All sizes to 8 MiB with perftest's own number of iterations: some 80 GB.
const fn bw_long(program: &'static str, options: &'static str, places: &'static [&'static str]) -> Row {
    row(program, options, Kind::Bandwidth, Where::Only(places), 900)
}

const fn lat(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::Latency, Where::Whole, 150)
}

const fn lat_all(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::Latency, Where::All, 150)
}

const fn connection(program: &'static str, options: &'static str) -> Row {
    row(program, options, Kind::Connection, Where::Whole, 60)
}

const HOST_AND_VETH: &[&str] = &["host-v4", "veth1500-v4"];

const fn four(row: Row) -> Row {
    Row { pairs: 4, limit_s: row.limit_s * 2, ..row }
}

const fn own(program: &'static str, options: &'static str, limit_s: u64) -> Row {
    row(program, options, Kind::Own, Where::All, limit_s)
}

/// The rows of the matrix.
pub static ROWS: &[Row] = &[
    // ibverbs-utils: lists.
    list("ibv_devices", ""),
    list("ibv_devinfo", "-l"),
    list("ibv_devinfo", "-v"),
    // ibverbs-utils: each transport, polling and events, the GID indices that recipes on the web name.
    pingpong_all("ibv_rc_pingpong", "-g {gid}"),
    pingpong("ibv_rc_pingpong", "-g 0"),
    pingpong("ibv_rc_pingpong", "-g 1"),
    pingpong("ibv_rc_pingpong", "-g 3"),
    pingpong("ibv_rc_pingpong", "-g 0 -e"),
    pingpong("ibv_rc_pingpong", "-g 1 -e"),
    pingpong("ibv_rc_pingpong", "-g 3 -e"),
    pingpong_all("ibv_rc_pingpong", "-g {gid} -c -s 1000"),
    pingpong("ibv_rc_pingpong", "-g {gid} -s 1 -n 10000"),
    pingpong("ibv_rc_pingpong", "-g {gid} -c -s 1000003 -n 200"),
    pingpong("ibv_rc_pingpong", "-g {gid} -m {mtu} -s 70000"),
    pingpong("ibv_rc_pingpong", "-g {gid} -m 256"),
    pingpong("ibv_rc_pingpong", "-g {gid} -N"),
    pingpong_all("ibv_uc_pingpong", "-g {gid}"),
    pingpong("ibv_uc_pingpong", "-g 0"),
    pingpong("ibv_uc_pingpong", "-g 1"),
    pingpong("ibv_uc_pingpong", "-g 3"),
    pingpong("ibv_uc_pingpong", "-g 0 -e"),
    pingpong("ibv_uc_pingpong", "-g 1 -e"),
    pingpong("ibv_uc_pingpong", "-g 3 -e"),
    pingpong("ibv_uc_pingpong", "-g {gid} -c -s 20000"),
    pingpong_all("ibv_ud_pingpong", "-g {gid} -s {mtu}"),
    pingpong("ibv_ud_pingpong", "-g 0 -s {mtu}"),
    pingpong("ibv_ud_pingpong", "-g 1 -s {mtu}"),
    pingpong("ibv_ud_pingpong", "-g 3 -s {mtu}"),
    pingpong("ibv_ud_pingpong", "-g 0 -s {mtu} -e"),
    pingpong("ibv_ud_pingpong", "-g 1 -s {mtu} -e"),
    pingpong("ibv_ud_pingpong", "-g 3 -s {mtu} -e"),
    pingpong("ibv_ud_pingpong", "-g {gid} -s 1 -c"),
    pingpong_all("ibv_srq_pingpong", "-g {gid}"),
    pingpong("ibv_srq_pingpong", "-g 0"),
    pingpong("ibv_srq_pingpong", "-g 1"),
    pingpong("ibv_srq_pingpong", "-g 3"),
    pingpong("ibv_srq_pingpong", "-g 0 -e"),
    pingpong("ibv_srq_pingpong", "-g 1 -e"),
    pingpong("ibv_srq_pingpong", "-g 3 -e"),
    pingpong("ibv_srq_pingpong", "-g {gid} -c -q 64 -s 5000"),
    // XRC: every client's queue pairs receive from one queue.
    pingpong_all("ibv_xsrq_pingpong", "-g {gid}"),
    pingpong("ibv_xsrq_pingpong", "-g {gid} -e"),
    pingpong("ibv_xsrq_pingpong", "-g {gid} -s 70000 -n 300"),
    // perftest: send.
    bw_all("ib_send_bw", ""),
    bw("ib_send_bw", "-a -n 100"),
    bw("ib_send_bw", "-b"),
    bw("ib_send_bw", "-a -b -n 50"),
    bw("ib_send_bw", "-q 16"),
    bw("ib_send_bw", "-e"),
    bw("ib_send_bw", "-e -b"),
    bw("ib_send_bw", "-I 64 -s 64"),
    bw("ib_send_bw", "--use-srq"),
    bw("ib_send_bw", "--use-srq -q 16"),
    bw("ib_send_bw", "-D 5"),
    bw("ib_send_bw", "-c UC"),
    bw("ib_send_bw", "-c UC -a -n 100"),
    bw("ib_send_bw", "-c UC -e"),
    bw_all("ib_send_bw", "-c UD -s {mtu}"),
    bw("ib_send_bw", "-c UD -a -n 100"),
    bw("ib_send_bw", "-c UD -e -s {mtu}"),
    bw("ib_send_bw", "-c UD -q 16 -s {mtu}"),
    bw("ib_send_bw", "-l 16 -n 4096"),
    bw_all("ib_send_bw", "-c XRC"),
    bw("ib_send_bw", "-c XRC -a -n 100"),
    bw("ib_send_bw", "-c XRC -q 4"),
    bw("ib_send_bw", "-c XRC -e"),
    lat_all("ib_send_lat", ""),
    lat("ib_send_lat", "-a -n 50"),
    lat("ib_send_lat", "-e"),
    lat("ib_send_lat", "-I 200 -s 200"),
    lat("ib_send_lat", "-I 0"),
    lat("ib_send_lat", "--use-srq"),
    lat("ib_send_lat", "-D 5"),
    lat("ib_send_lat", "-c UC"),
    lat("ib_send_lat", "-c UC -a -n 50"),
    lat("ib_send_lat", "-c UD"),
    lat("ib_send_lat", "-c UD -a -n 50"),
    lat("ib_send_lat", "-c UD -e"),
    lat("ib_send_lat", "-c XRC"),
    // perftest: write.
    bw_all("ib_write_bw", ""),
    bw_all("ib_write_bw", "-a -n 100"),
    bw("ib_write_bw", "-b"),
    bw("ib_write_bw", "-a -b -n 50"),
    bw("ib_write_bw", "-q 16"),
    bw("ib_write_bw", "-q 16 -b"),
    bw("ib_write_bw", "-I 64 -s 64"),
    bw("ib_write_bw", "-D 5"),
    bw("ib_write_bw", "-c UC"),
    bw("ib_write_bw", "-c UC -a -n 100"),
    bw("ib_write_bw", "-l 16 -n 4096 -s 4096"),
    bw("ib_write_bw", "-c XRC"),
    bw("ib_write_bw", "-c XRC -a -n 100"),
    bw_long("ib_write_bw", "-a", &["host-v4", "veth9000-v6"]),
    lat_all("ib_write_lat", ""),
    lat("ib_write_lat", "-a -n 50"),
    lat("ib_write_lat", "-I 200 -s 200"),
    lat("ib_write_lat", "-D 5"),
    lat("ib_write_lat", "-c UC"),
    lat("ib_write_lat", "-c XRC"),
    // perftest: read.
    bw_all("ib_read_bw", ""),
    bw_all("ib_read_bw", "-a -n 100"),
    bw("ib_read_bw", "-b"),
    bw("ib_read_bw", "-a -b -n 50"),
    bw("ib_read_bw", "-q 16"),
    bw("ib_read_bw", "-e"),
    bw("ib_read_bw", "-o 1"),
    bw("ib_read_bw", "-c XRC"),
    bw("ib_read_bw", "-D 5"),
    bw_long("ib_read_bw", "-a", &["veth1500-v4"]),
    lat_all("ib_read_lat", ""),
    lat("ib_read_lat", "-a -n 50"),
    lat("ib_read_lat", "-e"),
    lat("ib_read_lat", "-c XRC"),
    lat("ib_read_lat", "-D 5"),
    // perftest: atomics.
    bw_all("ib_atomic_bw", ""),
    bw("ib_atomic_bw", "-A CMP_AND_SWAP"),
    bw("ib_atomic_bw", "-b"),
    bw("ib_atomic_bw", "-q 16"),
    bw("ib_atomic_bw", "-e"),
    bw("ib_atomic_bw", "-c XRC"),
    bw("ib_atomic_bw", "-D 5"),
    lat_all("ib_atomic_lat", ""),
    lat("ib_atomic_lat", "-A CMP_AND_SWAP"),
    lat("ib_atomic_lat", "-e"),
    lat("ib_atomic_lat", "-c XRC"),
    lat("ib_atomic_lat", "-D 5"),
    // Connections by librdmacm: rdmacm-utils, and perftest with -R.
    connection("rping", "-C 20 -v"),
    connection("rping", "-C 5 -v -S 60000"),
    connection("rping", "-C 20 -v -q"),
    connection("ucmatose", "-c 1 -C 10"),
    connection("ucmatose", "-c 20 -C 10 -S 4096"),
    connection("ucmatose", "-c 5 -C 10 -m"),
    connection("udaddy", "-c 1 -C 10"),
    connection("udaddy", "-c 20 -C 10"),
    connection("udaddy", "-c 4 -C 10 -p 0x2"),
    connection("rdma_client", ""),
    connection("rdma_xclient", "-c r"),
    connection("rdma_xclient", "-c x"),
    // rsockets.
    connection("rstream", "-T b -T v -S 70000 -I 20 -C 20"),
    connection("rstream", "-T n -T v -S 70000 -I 20 -C 20"),
    connection("rstream", "-T a -T v -S 70000 -I 20 -C 20"),
    connection("rstream", "-T r -T v -S 1000000 -I 2 -C 5"),
    connection("rstream", "-T a -T v -S 1 -I 100 -C 100"),
    connection("rstream", "-T v -B 4096 -i 0 -S 100000 -I 5 -C 10"),
    row("rstream", "", Kind::Connection, Where::Only(HOST_AND_VETH), 300),
    row("rstream", "-S all", Kind::Connection, Where::Only(HOST_AND_VETH), 900),
    connection("riostream", "-T b -T v -S 100000 -I 5 -C 10"),
    connection("riostream", "-T n -T v -S 1000 -I 10 -C 10"),
    connection("riostream", "-T a -T v -S 100000 -I 5 -C 10"),
    bw("ib_send_bw", "-R"),
    bw("ib_send_bw", "-R -q 8"),
    bw("ib_send_bw", "-R -c UD -s 512"),
    bw("ib_write_bw", "-R -a -n 50"),
    bw("ib_read_bw", "-R -b"),
    lat("ib_send_lat", "-R"),
    lat("ib_write_lat", "-R"),
    lat("ib_read_lat", "-R"),
    lat("ib_atomic_lat", "-R"),
    // Four pairs at once.
    four(pingpong_all("ibv_rc_pingpong", "-g {gid} -n 5000")),
    four(pingpong("ibv_srq_pingpong", "-g {gid} -e")),
    four(bw_all("ib_send_bw", "")),
    four(bw_all("ib_write_bw", "")),
    four(bw("ib_write_bw", "-a -n 50")),
    four(bw("ib_read_bw", "-b")),
    four(bw_all("ib_read_bw", "")),
    four(lat("ib_send_lat", "")),
    four(lat("ib_write_lat", "")),
    four(lat("ib_atomic_lat", "")),
    // Contents, which the stock programs do not check.
    own("verify", "-g {gid}", 300),
    own("verify", "-g {gid} -c UC", 300),
    own("verify", "-g {gid} -c UD", 300),
    own("verify", "-g {gid} -e", 300),
    own("verify", "-g {gid} --srq", 300),
    // What else verbs have, case by case.
    own("operations", "-g {gid}", 120),
    own("resources", "-g {gid}", 120),
    // Connections that do not come about, or end.
    own("connect", "", 120),
];

/// Where programs of Debian 13 run.
pub static TRIXIE_PLACES: &[&str] = &["host-v4", "loop-v4", "veth1500-v4"];

/// What Debian 13's programs run besides the rows of perftest over RC: its ibverbs-utils, and options that only its
/// perftest has.
pub static TRIXIE_ROWS: &[Row] = &[
    list("ibv_devinfo", "-v"),
    pingpong("ibv_rc_pingpong", "-g {gid}"),
    bw("ib_write_bw", "--write_with_imm"),
    bw("ib_write_bw", "--write_with_imm -a -n 100"),
    bw("ib_write_bw", "--write_with_imm -b"),
    bw("ib_write_bw", "--write_with_imm -q 16"),
    lat("ib_write_lat", "--write_with_imm"),
    bw("ib_send_bw", "--no_lock"),
    bw("ib_read_bw", "--no_lock"),
];

/// Ids, without the place, of the smoke set: what is run often. Each is taken in the places beside it.
pub static SMOKE: &[(&str, &[&str])] = &[
    ("ibv_devices", &["host-v4"]),
    ("ibv_devinfo/-v", &["host-v4", "veth1500-v6"]),
    ("ibv_rc_pingpong/-g,{gid}", &["host-v4", "loop-v4", "veth1500-v4", "veth9000-v6", "card9000-v4"]),
    ("ibv_rc_pingpong/-g,3,-e", &["veth1500-v4"]),
    ("ibv_uc_pingpong/-g,{gid}", &["veth1500-v4"]),
    ("ibv_ud_pingpong/-g,{gid},-s,{mtu}", &["host-v4", "veth1500-v6"]),
    ("ibv_srq_pingpong/-g,{gid}", &["host-v4", "veth9000-v4"]),
    ("ib_send_bw/-q,16", &["host-v4"]),
    ("ib_send_bw/-c,UD,-s,{mtu}", &["veth1500-v4"]),
    ("ib_send_bw/--use-srq", &["veth1500-v6"]),
    ("ib_send_lat/-e", &["host-v4"]),
    ("ib_write_bw", &["host-v4", "loop-v4", "veth1500-v4", "veth9000-v6"]),
    ("ib_write_bw/-q,16,-b", &["veth9000-v4"]),
    ("ib_write_lat", &["host-v4"]),
    ("ib_read_bw", &["host-v4", "card1500-v4"]),
    ("ib_read_lat", &["veth1500-v4"]),
    ("ib_atomic_bw", &["veth1500-v6"]),
    ("ib_atomic_lat", &["host-v4"]),
    ("rping/-C,20,-v", &["veth1500-v4"]),
    ("rstream/-T,a,-T,v,-S,70000,-I,20,-C,20", &["host-v4", "veth1500-v6"]),
    ("ib_write_bw/-R,-a,-n,50", &["host-v4"]),
    ("operations/-g,{gid}", &["host-v4", "veth1500-v6"]),
    ("resources/-g,{gid}", &["host-v4", "veth1500-v6"]),
    ("ib_write_bw/x4", &["card1500-v4"]),
    ("ib_read_bw/x4", &["veth1500-v4"]),
];

/// All lines, those of a place together.
pub fn lines() -> Vec<Line> {
    let mut lines = Vec::new();
    for (i, place) in PLACES.iter().enumerate() {
        let here = |row: &&Row| match row.places {
            Where::All => true,
            Where::Whole => i < WHOLE,
            Where::Only(names) => names.contains(&place.name),
        };
        let line = |name: String, system: System, what: What| {
            let system_name = if system == System::Trixie { "trixie/" } else { "" };
            Line { id: format!("{}/{system_name}{name}", place.name), place, system, what }
        };
        let program = |system: System| move |row: &'static Row| line(row.name(), system, What::Program(row));
        let rows = ROWS.iter().filter(here).filter(|row| makes_sense(row, place));
        lines.extend(rows.clone().map(program(System::Own)));
        let scenarios = scenario::SCENARIOS.iter().filter(|s| s.places.contains(&place.name));
        lines.extend(scenarios.map(|s| line(s.name.to_owned(), System::Own, What::Scenario(s))));
        if TRIXIE_PLACES.contains(&place.name) {
            let rows = TRIXIE_ROWS.iter().chain(rows.filter(|row| is_perftest_over_rc(row)));
            lines.extend(rows.map(program(System::Trixie)));
        }
    }
    lines
}

/// The lines of the smoke set.
pub fn smoke() -> Vec<Line> {
    let in_set = |line: &Line| {
        let (What::Program(row), System::Own) = (line.what, line.system) else { return false };
        SMOKE.iter().any(|(name, places)| *name == row.name() && places.contains(&line.place.name))
    };
    lines().into_iter().filter(in_set).collect()
}

/// False for lines that say the same as another, or that the program itself cannot do there.
fn makes_sense(row: &Row, place: &Place) -> bool {
    // Servers of stock programs listen for their side channel on IPv4 only.
    // Of rdmacm-utils only these take other addresses without more options.
    let takes_any = matches!(row.program, "rping" | "rstream" | "riostream");
    let knows_family = row.kind != Kind::Connection || takes_any || place.family == Family::V4;
    knows_family && (place.has_v4 || matches!(row.kind, Kind::List | Kind::Own | Kind::Connection))
}

fn is_perftest_over_rc(row: &Row) -> bool {
    matches!(row.kind, Kind::Bandwidth | Kind::Latency) && !row.has("UC") && !row.has("UD")
}

impl Row {
    /// The id of its lines without place and system.
    pub fn name(&self) -> String {
        let mut name = self.program.to_owned();
        if !self.options.is_empty() {
            name = format!("{name}/{}", self.options.replace(' ', ","));
        }
        if self.pairs > 1 {
            name = format!("{name}/x{}", self.pairs);
        }
        name
    }
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
        assert!(ids.contains("veth9000-v6/ib_write_bw/-a,-n,100"));
    }

    #[test]
    fn the_smoke_set_is_found_in_the_matrix() {
        let wanted: usize = SMOKE.iter().map(|(_, places)| places.len()).sum();
        let found: Vec<String> = smoke().into_iter().map(|line| line.id).collect();
        assert_eq!(found.len(), wanted, "{found:#?}");
        assert!((28..=40).contains(&wanted), "{wanted} lines");
    }

    #[test]
    fn debian_13_runs_perftest_over_rc() {
        let lines = lines();
        let ids: BTreeSet<&str> =
            lines.iter().filter(|line| line.system == System::Trixie).map(|line| line.id.as_str()).collect();
        for place in TRIXIE_PLACES {
            for program in ["send", "write", "read", "atomic"] {
                for kind in ["bw", "lat"] {
                    let id = format!("{place}/trixie/ib_{program}_{kind}");
                    assert!(ids.contains(id.as_str()), "{id}");
                }
            }
            for row in ["ib_send_bw/-e", "ib_write_bw/-a,-n,100", "ib_read_bw/-q,16", "ib_atomic_bw/-b"] {
                assert!(ids.contains(format!("{place}/trixie/{row}").as_str()), "{row}");
            }
        }
        assert!(ids.iter().all(|id| id.contains("/trixie/") && !id.contains(",UD") && !id.contains(",UC")));
    }

    #[test]
    fn every_scenario_has_a_place() {
        for scenario in scenario::SCENARIOS {
            assert!(!scenario.places.is_empty(), "{}", scenario.name);
            for name in scenario.places {
                assert!(PLACES.iter().any(|place| place.name == *name), "{}: {name}", scenario.name);
            }
        }
    }
}
