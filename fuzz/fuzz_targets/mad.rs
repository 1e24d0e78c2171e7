//! Any bytes as the payload of a packet to queue pair 1: parse, print, emit.
#![no_main]

#[path = "../../crates/wire/tests/common/check_mad.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check::any_mad(bytes));
