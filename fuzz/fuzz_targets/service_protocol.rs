//! Any bytes as a message of the service, of a program or of the relay.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile_tests::check::service_protocol(bytes));
