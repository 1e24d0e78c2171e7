//! Network namespaces for tests that need one.

use std::process::Command;
use std::sync::OnceLock;

/// After this a program hangs: some ten times of what the longest takes on two busy cores.
const LIMIT: &str = "300s";

/// A command in a network namespace of its own, in which only loopback is up. The program and its arguments are to be added. One that
/// hangs is ended, with its children, and fails.
///
/// # Panics
/// The system gives no namespace: what tests do to a network they do not do to the host's.
pub fn in_namespace() -> Command {
    let mut command = Command::new("unshare");
    command.args([
        options(),
        "sh",
        "-c",
        "ip link set lo up && exec timeout --verbose --kill-after=10s \"$@\"",
        "sh",
        LIMIT,
    ]);
    command
}

/// What `unshare(1)` needs to be told here: a namespace of users makes one of networks possible without privilege; root needs none.
fn options() -> &'static str {
    static ONCE: OnceLock<&'static str> = OnceLock::new();
    ONCE.get_or_init(|| {
        let works = |options: &&str| {
            let tried =
                Command::new("unshare").args([options, "true"]).output().expect("unshare (util-linux) is installed");
            tried.status.success()
        };
        ["-rn", "-n"].into_iter().find(works).expect(
            "this test needs a network namespace of its own: run it where `unshare -rn` works, or `unshare -n` as root",
        )
    })
}
