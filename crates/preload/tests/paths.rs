//! Programs with the library preloaded, on a folder of the test's own.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| ferroce_testkit::build(&["ferroce-preload"]).join("libferroce_sysfs.so"))
}

/// A folder with a device `soft0`.
fn tree() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let class = dir.path().join("sys/class");
    for folder in ["infiniband/soft0/ports/1/gids", "infiniband_verbs/uverbs0"] {
        fs::create_dir_all(class.join(folder)).expect("can make folders");
    }
    fs::write(class.join("infiniband/soft0/node_type"), "1: CA\n").expect("can write");
    fs::write(class.join("infiniband/soft0/ports/1/gids/0"), "fe80::1\n").expect("can write");
    symlink("node_type", class.join("infiniband/soft0/link")).expect("can link");
    fs::create_dir_all(dir.path().join("dev/infiniband")).expect("can make folders");
    symlink("/dev/null", dir.path().join("dev/infiniband/soft0")).expect("can link");
    dir
}

fn run(tree: &Path, program: &str, args: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(args).env("LD_PRELOAD", library()).env("FERROCE_SYSFS", tree);
    command.output().unwrap_or_else(|error| panic!("{program}: {error}"))
}

#[track_caller]
fn says(tree: &Path, program: &str, args: &[&str], expected: &str) {
    let output = run(tree, program, args);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!((&*out, &*err), (expected, ""), "{program} {args:?}");
}

#[test]
fn every_function_that_takes_a_path_finds_the_device() {
    let tree = tree();
    let program = tree.path().join("calls");
    // Once with the compiler's checks (`open` is `__open_2` then), once without.
    for checks in ["-D_FORTIFY_SOURCE=2", "-U_FORTIFY_SOURCE"] {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/calls.c");
        let cc = Command::new("cc").args(["-O2", "-w", checks, "-o"]).arg(&program).arg(source).status();
        assert!(cc.expect("a C compiler is installed").success());
        says(tree.path(), program.to_str().expect("a plain name"), &[], "ok\n");
        fs::remove_file(tree.path().join("sys/class/infiniband/soft0/made")).expect("the program made it");
    }
}

#[test]
fn stock_programs_see_it() {
    let tree = tree();
    says(tree.path(), "ls", &["/sys/class/infiniband"], "soft0\n");
    says(tree.path(), "ls", &["/dev/infiniband"], "soft0\n");
    says(tree.path(), "cat", &["/sys/class/infiniband/soft0/ports/1/gids/0"], "fe80::1\n");
    says(tree.path(), "stat", &["-L", "-c", "%F", "/dev/infiniband/soft0"], "character special file\n");
    says(
        tree.path(),
        "find",
        &["/sys/class/infiniband/soft0", "-name", "gids"],
        "/sys/class/infiniband/soft0/ports/1/gids\n",
    );
    says(
        tree.path(),
        "sh",
        &["-c", "test -c /dev/infiniband/soft0 && test -w /dev/infiniband/soft0 && echo /sys/class/infiniband/*"],
        "/sys/class/infiniband/soft0\n",
    );
    let python = "import os; print(os.listdir('/sys/class/infiniband'), open('/sys/class/infiniband/soft0/node_type').read(), \
                  os.path.realpath('/sys/class/infiniband/soft0/link'), os.access('/dev/infiniband/soft0', os.R_OK | os.W_OK))";
    says(tree.path(), "python3", &["-c", python], "['soft0'] 1: CA\n /sys/class/infiniband/soft0/node_type True\n");
}

#[test]
fn a_path_that_leads_out_again_is_not_ours() {
    let tree = tree();
    fs::create_dir_all(tree.path().join("sys/class/net")).expect("can make a folder");
    fs::write(tree.path().join("sys/class/net/secret"), "").expect("can write");
    for path in ["/sys/class/infiniband/../net/secret", "/sys/class/infiniband/soft0/../../net/secret"] {
        assert!(!run(tree.path(), "cat", &[path]).status.success(), "{path}");
    }
    says(tree.path(), "cat", &["/sys/class/infiniband/soft0/ports/../node_type"], "1: CA\n");
}

/// `ls -la /sys/class/infiniband` could not look at `..` where Linux has no such folder.
#[test]
fn what_is_beside_the_folder_is_found_through_it() {
    let tree = tree();
    says(tree.path(), "stat", &["-c", "%F", "/sys/class/infiniband/.."], "directory\n");
    says(tree.path(), "ls", &["/sys/class/infiniband/soft0/../../infiniband_verbs"], "uverbs0\n");
}

#[test]
fn without_a_folder_nothing_changes() {
    let output =
        Command::new("cat").arg("/proc/self/comm").env("LD_PRELOAD", library()).env_remove("FERROCE_SYSFS").output();
    assert_eq!(output.expect("cat runs").stdout, b"cat\n");
    // Relative folders could mean any.
    let output = run(Path::new("relative"), "ls", &["/sys/class/infiniband/soft0"]);
    assert!(!output.status.success());
}
