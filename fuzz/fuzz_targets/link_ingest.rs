//! Any datagram through the receiving side of the UDP link.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile_tests::check::link_ingest(bytes));
