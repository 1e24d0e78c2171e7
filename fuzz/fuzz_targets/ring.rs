//! Any bytes as the memory of a ring.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile_tests::check::ring(bytes));
