//! Any bytes as the payload of a UDP datagram to the RoCE port: parse, print, emit, ICRC.
#![no_main]

#[path = "../../crates/wire/tests/common/check.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check::any_bytes(bytes));
