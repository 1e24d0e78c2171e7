//! Compiles the C programs of this folder, which stand on those of `tests/programs`.

use std::path::Path;

use program_tests::failure::Failure;

/// The programs: `NAME.c` beside the manifest.
pub const PROGRAMS: &[&str] = &["bad_network", "death", "errors"];

/// Compiles all programs into `dir`.
pub fn all(dir: &Path) -> Result<(), Failure> {
    program_tests::compile::every(Path::new(env!("CARGO_MANIFEST_DIR")), PROGRAMS, dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_compiles() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        all(dir.path()).unwrap_or_else(|failure| panic!("{failure}"));
    }
}
