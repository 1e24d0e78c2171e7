//! Commands of programs and packets of attackers on one connection manager.
#![no_main]

#[path = "../../crates/cm/tests/common/check.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(check::any_steps(bytes)));
