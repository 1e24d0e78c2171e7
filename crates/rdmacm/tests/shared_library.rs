//! The shared library as programs find it: its symbols and versions, and C programs of ours that listen, connect, reject and talk
//! through it.
//!
//! As in `crates/ibverbs/tests/shared_library.rs` the libraries are built in the profile of the tests and linked the way a release is.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use ferroce_testkit::SharedFolder;

#[path = "../../../xtask/src/dylib.rs"]
mod dylib;

/// A folder with both libraries, and the service for them.
struct Installation {
    lib: SharedFolder,
    service: PathBuf,
}

/// Built once for all tests.
fn installation() -> &'static Installation {
    static ONCE: OnceLock<Installation> = OnceLock::new();
    ONCE.get_or_init(|| {
        let profile = ferroce_testkit::build(&["ferroce-ibverbs", "ferroce-rdmacm", "ferroce-service"]);
        let lib = SharedFolder::new();
        dylib::link_libibverbs(&profile.join("libibverbs.a"), lib.path()).expect("libibverbs can be linked");
        dylib::link_librdmacm(&profile.join("librdmacm.a"), lib.path()).expect("librdmacm can be linked");
        for name in ["libibverbs", "librdmacm"] {
            std::os::unix::fs::symlink(format!("{name}.so.1"), lib.path().join(format!("{name}.so"))).expect("a link");
        }
        Installation { lib, service: profile.join("ferroced") }
    })
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn the_library_exports_what_rdma_core_44_does_and_nothing_else() {
    let output = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--with-symbol-versions"])
        .arg(installation().lib.path().join("librdmacm.so.1"))
        .output()
        .expect("nm is installed");
    assert!(output.status.success(), "{}", text(&output));
    let text = String::from_utf8(output.stdout).expect("symbols are ASCII");
    let exported: BTreeSet<&str> =
        text.lines().filter_map(|line| line.split(' ').next_back()).filter(|name| name.contains('@')).collect();
    let wanted: BTreeSet<&str> = include_str!("exports-rdma-core-44.txt").lines().collect();
    assert_eq!(wanted.len(), 68);
    assert_eq!(exported, wanted);
}

#[test]
fn the_library_has_its_name_stays_loaded_and_finds_verbs_beside_it() {
    let output = Command::new("readelf")
        .args(["--wide", "--dynamic"])
        .arg(installation().lib.path().join("librdmacm.so.1"))
        .output()
        .expect("readelf is installed");
    let text = text(&output);
    for wanted in ["soname: [librdmacm.so.1]", "NODELETE", "Shared library: [libibverbs.so.1]", "[$ORIGIN]"] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
}

#[test]
fn a_program_of_c_connects_to_itself() {
    run("connections");
}

#[test]
fn a_program_of_c_uses_rsockets() {
    run("rsockets");
}

#[test]
fn a_program_of_c_uses_datagram_rsockets_and_multicast() {
    run("datagrams");
}

#[test]
fn a_forked_child_is_refused_its_parent_s_ids_and_makes_its_own() {
    run("forks");
}

/// The service dies, with its keeper, four times.
#[test]
fn programs_of_c_go_on_when_the_service_is_killed() {
    run("survivors");
}

/// Compiles and runs a program of this folder, which says `good` in the end.
fn run(name: &str) {
    let installation = installation();
    let program = installation.lib.path().join(name);
    let output = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-g", "-o"])
        .arg(&program)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/{name}.c")))
        .arg("-L")
        .arg(installation.lib.path())
        .args(["-lrdmacm", "-libverbs", "-lpthread"])
        .output()
        .expect("cc is installed");
    assert!(output.status.success(), "{}", text(&output));

    // In a network namespace of its own: no other service is in the way, and none of the host's is killed.
    let output = ferroce_testkit::in_namespace()
        .arg(&program)
        .env("LD_LIBRARY_PATH", installation.lib.path())
        .env("FERROCE_SERVICE", &installation.service)
        .env("FERROCE_SERVICE_IDLE_S", "1")
        .env_remove("FERROCE_LOG")
        .env_remove("FERROCE_REFUSAL")
        .output()
        .expect("unshare is installed");
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(text(&output), "good\n");
}
