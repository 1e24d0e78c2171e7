//! A live process under attack over its own sockets, in a network namespace of its own. Long runs:
//! `cargo build --release && target/release/hostile-tests live --packets 10000000`.

mod common;

use common::hostile_tests;

#[test]
fn a_process_under_attack_keeps_its_memory_its_secrets_and_its_honest_connections() {
    let output = hostile_tests(&["live", "--packets", "100000"]);
    println!("{output}");
    assert!(output.contains("honest traffic meanwhile"), "{output}");
}
