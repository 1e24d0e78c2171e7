//! Operations of a program and packets of an attacker on one queue pair.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile_tests::check::transport_packets(bytes));
