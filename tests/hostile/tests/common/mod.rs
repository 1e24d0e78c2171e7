//! What the tests that run this package's program share.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

/// Runs `hostile-tests` with arguments and gives what it printed; it must end well. The service is built beside it before, since a
/// test of this package alone does not build it.
pub(crate) fn hostile_tests(args: &[&str]) -> String {
    static SERVICE: OnceLock<()> = OnceLock::new();
    let program = Path::new(env!("CARGO_BIN_EXE_hostile-tests"));
    SERVICE.get_or_init(|| {
        let folder = program.parent().expect("a program lies in a folder");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "ferroce-service", "--bin", "ferroced"]);
        cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
        cargo.arg("--target-dir").arg(folder.parent().expect("a profile lies in the target folder"));
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo can be run").success(), "ferroced can be built");
    });
    let output = Command::new(program).args(args).output().expect("the program can be run");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {}\n{stdout}{stderr}", output.status);
    stdout
}
