//! The corpora of the fuzz targets, run again by every `cargo test`.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use hostile_tests::check;

/// Runs a check over every file of a corpus.
fn replay(target: &str, check: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut files = 0;
    for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("a folder can be listed").path();
        let bytes = fs::read(&path).expect("a file can be read");
        let outcome = catch_unwind(AssertUnwindSafe(|| check(&bytes)));
        assert!(outcome.is_ok(), "{} fails", path.display());
        files += 1;
    }
    assert!(files >= 10, "{} holds {files} files", folder.display());
}

#[test]
fn transport_packets() {
    replay("transport_packets", check::transport_packets);
}

#[test]
fn link_ingest() {
    replay("link_ingest", check::link_ingest);
}

#[test]
fn service_protocol() {
    replay("service_protocol", check::service_protocol);
}

#[test]
fn ring() {
    replay("ring", check::ring);
}
