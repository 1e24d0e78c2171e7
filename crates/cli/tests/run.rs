//! `ferroce run` with shell commands, on a library that does nothing.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// A folder with an empty `libibverbs.so.1`, which the loader accepts without a word.
fn empty_library() -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let library = dir.path().join("libibverbs.so.1");
    let status = Command::new("cc").args(["-shared", "-x", "c", "/dev/null", "-o"]).arg(&library).status();
    assert!(status.expect("a C compiler is installed").success(), "the C compiler makes an empty library");
    dir
}

fn ferroce(lib: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferroce"));
    command.env("FERROCE_LIB", lib).env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
    command
}

fn run(script: &str) -> Output {
    let lib = empty_library();
    ferroce(lib.path()).args(["run", "--", "sh", "-c", script]).output().expect("ferroce can be run")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_command_gets_the_library_and_its_output_is_untouched() {
    let lib = empty_library();
    let output = ferroce(lib.path())
        .args(["run", "--", "sh", "-c", "echo \"$LD_PRELOAD $LD_LIBRARY_PATH\"; cat /proc/self/maps"])
        .output()
        .expect("ferroce can be run");
    let dir = lib.path().canonicalize().expect("exists");
    let stdout = text(&output.stdout);
    let (first, maps) = stdout.split_once('\n').expect("several lines");
    assert_eq!(first, format!("{0}/libibverbs.so.1 {0}", dir.display()));
    assert!(maps.contains("libibverbs.so.1"), "a grandchild has the library mapped");
    assert_eq!(text(&output.stderr), "");
    assert!(output.status.success());
}

#[test]
fn options_of_the_command_are_its_own() {
    let lib = empty_library();
    let output = ferroce(lib.path()).args(["run", "echo", "--help", "-x"]).output().expect("ferroce can be run");
    assert_eq!(text(&output.stdout), "--help -x\n");
}

#[test]
fn the_exit_code_is_the_command_s() {
    assert_eq!(run("exit 0").status.code(), Some(0));
    assert_eq!(run("exit 42").status.code(), Some(42));
    assert_eq!(run("kill -KILL $$").status.code(), Some(128 + 9));
}

#[test]
fn a_failure_is_explained_by_the_last_refused_verb() {
    let output =
        run("printf 'ibv_modify_qp\\t22\\tah_attr.is_global is 0: use -g 0\\n' >> ${FERROCE_REFUSAL##*:}; exit 3");
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(
        text(&output.stderr),
        "ferroce: the last refused verb was ibv_modify_qp (errno 22, Invalid argument): ah_attr.is_global is 0: use -g \
         0\n"
    );
}

#[test]
fn nothing_is_said_when_all_is_well_or_nothing_was_refused() {
    assert_eq!(text(&run("printf 'ibv_x\\t22\\tprobed\\n' >> ${FERROCE_REFUSAL##*:}; exit 0").stderr), "");
    assert_eq!(text(&run("exit 1").stderr), "");
    assert_eq!(text(&run("printf 'ibv_x\\t22\\tprobed\\n' >> ${FERROCE_REFUSAL##*:}; kill -TERM $$").stderr), "");
}

#[test]
fn a_refusal_is_told_by_a_program_that_closed_all_descriptors() {
    let script = "path=${FERROCE_REFUSAL##*:}; eval \"exec ${path##*/}>&-\"; test ! -e /proc/self/fd/${path##*/} || exit 1; \
                  printf 'ibv_x\\t22\\tclosed\\n' >> $path; exit 3";
    let output =
        ferroce(empty_library().path()).args(["run", "--", "bash", "-c", script]).output().expect("ferroce can be run");
    assert!(text(&output.stderr).ends_with(": closed\n"), "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(3));
}

/// As the library does it: in another user namespace the descriptors of this process cannot be opened, the inherited one can.
#[test]
fn a_refusal_is_told_by_a_program_in_another_user_namespace() {
    let allowed = Command::new("unshare").args(["-rn", "true"]).output().is_ok_and(|output| output.status.success());
    let namespace = if allowed { "unshare -rn" } else { "" };
    let output = run(&format!(
        "exec {namespace} sh -c 'printf \"ibv_x\\t22\\tinherited\\n\" >> /proc/self/fd/${{FERROCE_REFUSAL##*/}}; exit 3'"
    ));
    assert!(text(&output.stderr).ends_with(": inherited\n"), "{}", text(&output.stderr));
}

#[test]
fn a_run_that_is_killed_leaves_no_file() {
    let (lib, folder) = (empty_library(), tempfile::tempdir().expect("a temporary folder"));
    let mut child = ferroce(lib.path())
        .args(["run", "--", "sh", "-c", "echo $PPID; exec sleep 600"])
        .env("TMPDIR", folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .expect("ferroce can be run");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("the command runs");
    assert_eq!(line.trim(), child.id().to_string());
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).expect("can be read");
    child.kill().expect("it runs");
    child.wait().expect("it has ended");
    let left = std::fs::read_dir(folder.path()).expect("is there").count();
    let ended = Command::new("kill").args(children.split_whitespace()).status().expect("kill can be run");
    assert_eq!(left, 0);
    assert!(ended.success());
}

#[test]
fn signals_are_passed_on() {
    let lib = empty_library();
    let mut child = ferroce(lib.path())
        .args(["run", "--", "sh", "-c", "trap 'echo got TERM; exit 7' TERM; echo ready; while :; do sleep 0.05; done"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("ferroce can be run");
    let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("the command says that it is ready");
    assert_eq!(line, "ready\n");
    let killed = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill can be run");
    assert!(killed.success());
    assert_eq!(child.wait().expect("it ends").code(), Some(7));
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("can read");
    assert_eq!(rest, "got TERM\n");
}

#[test]
fn an_ignored_signal_stays_ignored() {
    let lib = empty_library();
    let script = format!("trap '' HUP; exec {} run -- sh -c 'kill -HUP $$; echo alive'", env!("CARGO_BIN_EXE_ferroce"));
    let output =
        Command::new("sh").args(["-c", &script]).env("FERROCE_LIB", lib.path()).output().expect("sh can be run");
    assert_eq!(text(&output.stdout), "alive\n");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn a_command_that_is_not_there() {
    let lib = empty_library();
    let output = ferroce(lib.path()).args(["run", "no-such-command-here"]).output().expect("ferroce can be run");
    assert_eq!(output.status.code(), Some(127));
    assert_eq!(text(&output.stderr), "ferroce: no-such-command-here: no such command in PATH\n");
    let output = ferroce(lib.path()).args(["run", "/etc/passwd"]).output().expect("ferroce can be run");
    assert_eq!(output.status.code(), Some(126));
}

#[test]
fn a_library_that_is_not_there() {
    let output = ferroce(Path::new("/nowhere")).args(["run", "true"]).output().expect("ferroce can be run");
    assert_eq!(output.status.code(), Some(125));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("/nowhere/libibverbs.so.1 does not exist: correct FERROCE_LIB"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_ferroce"))
        .arg("devices")
        .env("FERROCE_LOOPBACK", "1")
        .stdout(writer)
        .output()
        .expect("ferroce can be run");
    assert_eq!((text(&output.stderr), output.status.code()), (String::new(), Some(0)));
}

/// Without the library that redirects: what it would be told. (With it: crates/preload/tests and tests/programs.)
#[test]
fn sysfs_makes_a_folder_for_the_command_and_takes_it_away() {
    let lib = empty_library();
    std::fs::copy(lib.path().join("libibverbs.so.1"), lib.path().join("libferroce-sysfs.so")).expect("can copy");
    let script = "echo $FERROCE_SYSFS; echo $LD_PRELOAD; cd $FERROCE_SYSFS; \
                  cat sys/class/infiniband/ferroce0/ports/1/gid_attrs/types/0 sys/class/infiniband_verbs/uverbs0/ibdev; \
                  test -c dev/infiniband/ferroce0 && test -w dev/infiniband/ferroce0 && echo device";
    let output =
        ferroce(lib.path()).args(["run", "--sysfs", "--", "sh", "-c", script]).output().expect("ferroce can be run");
    let stdout = text(&output.stdout);
    let lines: Vec<&str> = stdout.lines().collect();
    let dir = lib.path().canonicalize().expect("exists").display().to_string();
    assert_eq!(
        lines[1..],
        [&*format!("{dir}/libibverbs.so.1:{dir}/libferroce-sysfs.so"), "RoCE v2", "ferroce0", "device"]
    );
    assert!(lines[0].starts_with('/') && !Path::new(lines[0]).exists(), "{stdout}");
    assert_eq!(text(&output.stderr), "");
}

/// The folder stayed for ever.
#[test]
fn the_folder_of_a_killed_run_is_removed_by_a_later_one_and_not_before_the_command_has_ended() {
    let (lib, folder) = (empty_library(), tempfile::tempdir().expect("a temporary folder"));
    std::fs::copy(lib.path().join("libibverbs.so.1"), lib.path().join("libferroce-sysfs.so")).expect("can copy");
    let run = |script| {
        let mut command = ferroce(lib.path());
        command.args(["run", "--sysfs", "--", "sh", "-c", script]).env("TMPDIR", folder.path());
        command
    };
    let mut killed =
        run("echo $$; echo $FERROCE_SYSFS; exec sleep 600").stdout(Stdio::piped()).spawn().expect("can be run");
    let mut lines = BufReader::new(killed.stdout.take().expect("a pipe")).lines();
    let mut line = || lines.next().expect("the command runs").expect("can read");
    let (command, left) = (line(), line());
    let is_there = || Path::new(&left).exists();
    let later = || assert!(run("exit 0").status().expect("can be run").success());
    later();
    assert!(is_there(), "its owner lives");
    killed.kill().expect("it runs");
    killed.wait().expect("it has ended");
    later();
    assert!(is_there(), "the command uses it");
    assert!(Command::new("kill").arg(&command).status().expect("kill can be run").success());
    // It ends soon.
    for _ in 0..600 {
        later();
        if !is_there() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("is there").count(), 0);
}

#[test]
fn sysfs_needs_its_library() {
    let lib = empty_library();
    let output = ferroce(lib.path()).args(["run", "--sysfs", "true"]).output().expect("ferroce can be run");
    assert_eq!(output.status.code(), Some(125));
    assert!(
        text(&output.stderr).contains("libferroce-sysfs.so does not exist: --sysfs needs"),
        "{}",
        text(&output.stderr)
    );
}

/// By mounts, where they are allowed; else the reason is told.
#[test]
fn sysfs_is_mounted_for_the_command_alone() {
    let lib = empty_library();
    let script = "echo $FERROCE_SYSFS; cat /sys/class/infiniband/ferroce0/ports/1/gid_attrs/types/0; ls -d /sys/class/net/lo/mtu; \
                  ls /dev/infiniband; test -c /dev/infiniband/ferroce0 && echo > /dev/null && ls -d /dev/fd/0";
    let output =
        ferroce(lib.path()).args(["run", "--sysfs=mount", "--", "sh", "-c", script]).output().expect("it can be run");
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    if output.status.code() == Some(125) {
        assert!(stderr.contains("--sysfs=mount needs CAP_SYS_ADMIN"), "{stderr}");
        return;
    }
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines[..4], ["", "RoCE v2", "/sys/class/net/lo/mtu", "ferroce0"], "{stdout}{stderr}");
    assert_eq!((lines.last(), &*stderr), (Some(&"/dev/fd/0"), ""));
    assert!(!Path::new("/dev/infiniband/ferroce0").exists(), "only the command sees it");
}
