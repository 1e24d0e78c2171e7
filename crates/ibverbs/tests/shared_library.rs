//! The shared library as programs find it: its symbols and versions, and every entry point called from C.
//!
//! The tests build the static library and the service in the profile they run in themselves, and link the library the way a
//! release is linked.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use ferroce_testkit::SharedFolder;

#[path = "../../../xtask/src/dylib.rs"]
#[allow(dead_code)]
mod dylib;

/// A folder with `libibverbs.so.1`, and the service for it.
struct Installation {
    lib: SharedFolder,
    service: PathBuf,
}

/// Built once for all tests.
fn installation() -> &'static Installation {
    static ONCE: OnceLock<Installation> = OnceLock::new();
    ONCE.get_or_init(|| {
        let profile = ferroce_testkit::build(&["ferroce-ibverbs", "ferroce-service"]);
        let lib = SharedFolder::new();
        dylib::link_libibverbs(&profile.join("libibverbs.a"), lib.path()).expect("the library can be linked");
        std::os::unix::fs::symlink("libibverbs.so.1", lib.path().join("libibverbs.so")).expect("a link");
        Installation { lib, service: profile.join("ferroced") }
    })
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Defined symbols with their versions, as `nm` prints them: `name@@NODE` or `name@NODE`.
fn exported(library: &Path) -> BTreeSet<String> {
    let output = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--with-symbol-versions"])
        .arg(library)
        .output()
        .expect("nm is installed");
    assert!(output.status.success(), "{}", text(&output));
    let text = String::from_utf8(output.stdout).expect("symbols are ASCII");
    // The nodes themselves are absolute symbols without a version.
    text.lines()
        .filter_map(|line| line.split(' ').next_back())
        .filter(|name| name.contains('@'))
        .map(str::to_owned)
        .collect()
}

/// What `symbols.in` promises.
fn promised() -> BTreeSet<String> {
    let mut promised = BTreeSet::new();
    for line in include_str!("../symbols.in").lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let mut nodes = columns[0].split(',');
        let first = nodes.next().expect("a node");
        let series = first.trim_end_matches(|c: char| c.is_ascii_digit());
        let default = if columns[1] == "old" { "@" } else { "@@" };
        promised.insert(format!("{}{default}{first}", columns[2]));
        promised.extend(nodes.map(|number| format!("{}@{series}{number}", columns[2])));
    }
    promised
}

#[test]
fn the_library_exports_what_the_list_says_and_nothing_else() {
    let exported = exported(&installation().lib.path().join("libibverbs.so.1"));
    let promised = promised();
    let missing: Vec<_> = promised.difference(&exported).collect();
    let surplus: Vec<_> = exported.difference(&promised).collect();
    assert!(missing.is_empty() && surplus.is_empty(), "missing: {missing:?}\nsurplus: {surplus:?}");
}

#[test]
fn everything_that_rdma_core_44_exports_by_default_is_there() {
    let exported = exported(&installation().lib.path().join("libibverbs.so.1"));
    let missing: Vec<&str> =
        include_str!("exports-rdma-core-44.txt").lines().filter(|name| !exported.contains(*name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn the_library_stays_loaded_and_has_its_name() {
    let output = Command::new("readelf")
        .args(["--wide", "--dynamic"])
        .arg(installation().lib.path().join("libibverbs.so.1"))
        .output()
        .expect("readelf is installed");
    let text = text(&output);
    assert!(text.contains("[libibverbs.so.1]"), "{text}");
    assert!(text.contains("NODELETE"), "{text}");
    assert!(!text.contains("TEXTREL"), "{text}");
}

/// A program compiled against the distribution's headers and linked to our library. Each test names its own.
fn compile(source: &str, name: &str) -> PathBuf {
    let installation = installation();
    let program = installation.lib.path().join(name);
    let output = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-Wno-unused-result", "-O1", "-g", "-o"])
        .arg(&program)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source))
        .arg("-L")
        .arg(installation.lib.path())
        .args(["-libverbs", "-ldl", "-lpthread"])
        .output()
        .expect("cc is installed");
    assert!(output.status.success(), "{}", text(&output));
    program
}

/// Runs a program on our library, in a network namespace of its own: no other service and no other interface is in the way, and what
/// it does to interfaces is not done to the host's.
fn run(program: &Path, environment: &[(&str, &str)]) -> Output {
    let installation = installation();
    ferroce_testkit::in_namespace()
        .arg(program)
        .env("LD_LIBRARY_PATH", installation.lib.path())
        .env("FERROCE_SERVICE", &installation.service)
        .env("FERROCE_SERVICE_IDLE_S", "1")
        .env_remove("FERROCE_LOG")
        .env_remove("FERROCE_REFUSAL")
        .envs(environment.iter().copied())
        .output()
        .expect("unshare is installed")
}

#[test]
fn every_entry_point_answers_nonsense_as_its_contract_says() {
    let output = run(&compile("entry_points.c", "nonsense"), &[]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 wrong answers\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "stderr belongs to the program");
}

#[test]
fn extended_verbs_and_events_between_two_queue_pairs() {
    let output = run(&compile("extended.c", "extended"), &[]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(text(&output), "good\n");
}

#[test]
fn frames_go_between_interfaces_and_are_steered_by_flows() {
    let output = run(&compile("raw.c", "raw"), &[]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(text(&output), "good\n");
}

#[test]
fn a_fork_in_the_middle_of_an_open_leaves_the_child_free_to_open_anew() {
    let record = installation().lib.path().join("refusals of forks");
    let output = run(&compile("forks.c", "forks"), &[("FERROCE_REFUSAL", record.to_str().expect("a plain path"))]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(text(&output), "good\n");
}

#[test]
fn cancelled_threads_leave_everything_in_order() {
    let output = run(&compile("cancelled.c", "cancelled"), &[]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(text(&output), "good\n");
}

#[test]
fn refusals_are_logged_and_recorded_on_request() {
    let installation = installation();
    let record = installation.lib.path().join("refusals");
    let output = run(
        &compile("entry_points.c", "logged"),
        &[("FERROCE_LOG", "warn"), ("FERROCE_REFUSAL", record.to_str().expect("a plain path"))],
    );
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(log.contains("ibv_create_ah: ah_attr.is_global is 0"), "{log}");
    assert!(log.contains("(EOPNOTSUPP)"), "{log}");
    let recorded = std::fs::read_to_string(&record).expect("the record was written");
    assert!(recorded.lines().all(|line| line.split('\t').count() == 3), "{recorded}");
    assert!(recorded.contains("ibv_open_device\t22\t"), "{recorded}");
}
