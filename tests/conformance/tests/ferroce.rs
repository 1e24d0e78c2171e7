//! All cases against Ferroce, in a network namespace of its own, as any user may make one.

use std::path::Path;

use ferroce_conformance::cases::cases;
use ferroce_conformance::place::{self, Install};
use ferroce_conformance::report;

#[path = "../../../xtask/src/dylib.rs"]
#[allow(dead_code)]
mod dylib;

/// Builds the library and the service in the profile of this test, and lays them out as an installation.
fn install(to: &Path) -> Install {
    let profile = ferroce_testkit::build(&["ferroce-ibverbs", "ferroce-service"]);
    for part in ["lib", "bin"] {
        std::fs::create_dir(to.join(part)).expect("the folder is ours");
    }
    dylib::link_libibverbs(&profile.join("libibverbs.a"), &to.join("lib")).expect("the library can be linked");
    std::fs::copy(profile.join("ferroced"), to.join("bin/ferroced")).expect("the service was built");
    Install(to.to_owned())
}

#[test]
fn ferroce_follows_the_specification_as_the_table_says() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let install = install(dir.path());
    let program = Path::new(env!("CARGO_BIN_EXE_ferroce-conformance"));
    let ferroce = place::ferroce(&install, program, &[]).unwrap_or_else(|error| panic!("{error:#}"));
    let cases = cases();
    println!("{}", report::lines(&cases, Some(&ferroce), None));
    let faults = report::faults(&cases, &ferroce);
    assert!(faults.is_empty(), "Ferroce departs:\n{}", faults.join("\n"));

    let rxe = report::recorded().unwrap_or_else(|error| panic!("{error:#}"));
    let table = std::fs::read_to_string(report::table_path()).expect("the table is in the repository");
    let now = report::table(&cases, &ferroce, &rxe);
    let first = table.lines().zip(now.lines()).find(|(old, new)| old != new);
    assert!(table == now, "TABLE.md is old (`cargo xtask conformance --write`); first difference: {first:#?}");
}
