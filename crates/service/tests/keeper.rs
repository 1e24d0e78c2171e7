//! The keeper in a program of its own: it starts processes, which for a moment have copies of all descriptors. Tests that look at what
//! becomes of a closed socket must not be beside it.

use std::cell::Cell;
use std::path::Path;
use std::process::Command;

use ferroce_testkit::{SharedFolder, free_name};

#[test]
fn a_service_that_talks_nonsense_and_waits_is_replaced() {
    let started = Cell::new(0);
    let worker = || {
        started.set(started.get() + 1);
        // The socket to the keeper is standard input.
        shell(if started.get() == 1 { "printf nonsense >&0; exec sleep 60" } else { "" })
    };
    ferroce_service::keeper::run(&free_name(), &worker, || ()).expect("the second one ends in order");
    assert_eq!(started.get(), 2, "the first one was left to wait");
}

/// As when there is no memory for a process at the moment: what is kept is not let go for that.
#[test]
fn a_service_that_cannot_be_started_again_is_tried_again() {
    let started = Cell::new(0);
    let worker = || {
        started.set(started.get() + 1);
        match started.get() {
            1 => shell("exit 1"),
            2 | 3 => Command::new("/dev/null/no-such-program"),
            _ => shell("exit 0"),
        }
    };
    ferroce_service::keeper::run(&free_name(), &worker, || ()).expect("the fourth one ends in order");
    assert_eq!(started.get(), 4);
}

#[test]
fn a_service_that_cannot_be_started_at_all_is_told_at_once() {
    let started = Cell::new(0);
    let worker = || {
        started.set(started.get() + 1);
        Command::new("/dev/null/no-such-program")
    };
    let ready = || panic!("it is not");
    let error = ferroce_service::keeper::run(&free_name(), &worker, ready).unwrap_err();
    assert_eq!((error.errno(), started.get()), (libc::ENOTDIR, 1), "{error}");
}

#[test]
fn a_service_that_crashes_again_and_again_is_given_up_with_a_remedy() {
    let started = Cell::new(0);
    let worker = || {
        started.set(started.get() + 1);
        shell("exit 1")
    };
    let error = ferroce_service::keeper::run(&free_name(), &worker, || ()).unwrap_err();
    assert_eq!((error.errno(), started.get()), (libc::ECHILD, 11));
    assert!(error.to_string().contains("11 times"), "{error}");
    assert!(error.to_string().contains("by hand"), "{error}");
}

/// `Done` is what a keeper answers.
#[test]
fn a_service_that_talks_as_a_keeper_is_replaced() {
    let started = Cell::new(0);
    let worker = || {
        started.set(started.get() + 1);
        shell(if started.get() == 1 { "printf '\\5\\0\\0\\0\\0\\0\\0\\0\\0' >&0; exec sleep 60" } else { "" })
    };
    ferroce_service::keeper::run(&free_name(), &worker, || ()).expect("the second one ends in order");
    assert_eq!(started.get(), 2, "the first one was left to wait");
}

/// Another one was started beside it, over the same sockets.
#[test]
fn a_service_that_leaves_its_keeper_and_goes_on_is_ended() {
    let folder = SharedFolder::new();
    let pid_file = folder.path().join("pid");
    let started = Cell::new(0);
    let worker = || {
        started.set(started.get() + 1);
        if started.get() == 1 {
            return shell(&format!("echo $$ > {}; exec <&-; exec sleep 600", pid_file.display()));
        }
        let first = std::fs::read_to_string(&pid_file).unwrap();
        assert!(!Path::new(&format!("/proc/{}", first.trim())).exists(), "the first one is still there");
        shell("")
    };
    ferroce_service::keeper::run(&free_name(), &worker, || ()).expect("the second one ends in order");
    assert_eq!(started.get(), 2);
}

/// It lives, and says so once.
#[test]
fn a_service_that_hangs_is_replaced() {
    let started = Cell::new(0);
    let worker = || {
        started.set(started.get() + 1);
        shell(if started.get() == 1 { "printf '\\10\\0\\0\\0\\0\\0\\0\\0\\0' >&0; exec sleep 600" } else { "" })
    };
    ferroce_service::keeper::run(&free_name(), &worker, || ()).expect("the second one ends in order");
    assert_eq!(started.get(), 2);
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}
