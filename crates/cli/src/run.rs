//! `ferroce run`: a command whose verbs are Ferroce's.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};

use anyhow::{Context, Result};
use clap::ValueEnum;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGALRM, SIGCHLD, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;

use crate::layout::Layout;
use crate::output::complain;
use crate::refusal::Record;
use crate::sysfs::Sysfs;

/// Run a command with Ferroce as its RDMA stack.
///
/// The command and all that it starts load Ferroce's libibverbs instead of the system's, also where a program carries
/// a renamed copy of its own (Python wheels). Signals are passed on. If the command fails, the last verb that Ferroce
/// refused is printed with the reason and the remedy.
///
/// With --sysfs the command also finds the devices where Linux shows those of cards: /sys/class/infiniband (ports, gids, gid_attrs,
/// counters, device/net), /sys/class/infiniband_verbs, and /dev/infiniband with a character device for each. UCX, Mooncake and
/// rdma-core's own tests look there. A preloaded library redirects what the C library is asked about these paths, so that it works in
/// any container and without privilege; static programs and Go's, which do without the C library, do not see it: for these there is
/// --sysfs=mount, which needs CAP_SYS_ADMIN. Devices are those of the start; counters are written once a second. The folder behind it, in
/// TMPDIR or /tmp, is removed after the command; if this process is killed, by the next one, once nothing of the command runs any more.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ferroce run -- ibv_devinfo -v
  ferroce run -- ibv_rc_pingpong -g 0                 (one terminal)
  ferroce run -- ibv_rc_pingpong -g 0 localhost       (another)
  ferroce run -- ib_write_bw -a 192.0.2.7
  FERROCE_LOG=info ferroce run -- python3 train.py
  ferroce run --sysfs -- ucx_info -d
  sudo ferroce run --sysfs=mount -- ./static-program
  ferroce run --sysfs -- sh -c 'cat /sys/class/infiniband/*/ports/1/gids/0'

Exit code:
  the command's; 128 + n if signal n ended it; 127 if there is no such command; 126 if it cannot
  be executed; 125 if Ferroce itself is at fault

Environment:
  FERROCE_LIB      folder of libibverbs.so.1 (default: ../lib of this program)
  FERROCE_SERVICE  the service's program (default: ferroced beside this program)
  FERROCE_LOG      log level of the library: error, warn, info, debug, trace")]
pub(crate) struct RunArgs {
    /// Show the devices below /sys/class/infiniband and /dev/infiniband, too
    #[arg(long, value_name = "HOW", num_args = 0..=1, require_equals = true, default_missing_value = "preload")]
    sysfs: Option<How>,
    /// The command and its arguments, after --
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// How a command is shown the devices in the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum How {
    /// By a library that redirects paths: everywhere, for programs that use the C library
    Preload,
    /// By mounts that only the command sees: for all programs, where mounting is allowed
    Mount,
}

/// Signals that someone may send to us and mean the command.
const PASSED_ON: &[i32] = &[SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM];

/// Runs the command and gives the code to exit with.
pub(crate) fn run(args: &RunArgs) -> Result<u8> {
    let layout = Layout::find(unless_empty(env::var_os("FERROCE_LIB")).map(PathBuf::from))?;
    // A sandbox may forbid such memory: then nothing is told after the command, which runs all the same.
    let mut record = Record::make().ok();
    let (program, arguments) = args.command.split_first().expect("clap requires a command");
    let mut command = Command::new(program);
    command.args(arguments).envs(environment(&layout, |name| env::var_os(name)));
    if let Some(record) = &record {
        command.env("FERROCE_REFUSAL", record.name().context("cannot name the memory for what is refused")?);
    }
    // Kept until the command has ended.
    let sysfs = args.sysfs.map(|_| Sysfs::make()).transpose()?;
    match (args.sysfs, &sysfs) {
        (Some(How::Preload), Some(sysfs)) => {
            let others = prepend(layout.preload()?.as_os_str(), env::var_os("LD_PRELOAD"));
            command.env("LD_PRELOAD", prepend(layout.library().as_os_str(), Some(others)));
            command.env("FERROCE_SYSFS", sysfs.root());
        }
        (Some(How::Mount), Some(sysfs)) => sysfs.mount_for_this_thread()?,
        _ => {}
    }

    // Before the start: a signal must find the handlers, or it would end us and leave the command alone.
    let mut signals = Signals::new().context("cannot handle signals")?;
    let child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let (code, what) = cannot_run(program, &error);
            complain(what);
            return Ok(code);
        }
    };
    let status = signals.wait(child)?;

    if worth_explaining(status)
        && let Some(record) = &mut record
        && let Some(refusal) = record.last().context("cannot read what was refused")?
    {
        complain(refusal);
    }
    Ok(exit_code(status))
}

/// Variables that make a program use Ferroce. `old` looks up the present value of a variable.
fn environment(layout: &Layout, old: impl Fn(&str) -> Option<OsString>) -> BTreeMap<&'static str, OsString> {
    let mut set = BTreeMap::new();
    set.insert("LD_PRELOAD", prepend(layout.library().as_os_str(), old("LD_PRELOAD")));
    // For programs that open the library by name after they have started.
    set.insert("LD_LIBRARY_PATH", prepend(layout.lib.as_os_str(), old("LD_LIBRARY_PATH")));
    if let (Some(service), None) = (&layout.service, unless_empty(old("FERROCE_SERVICE"))) {
        set.insert("FERROCE_SERVICE", service.into());
    }
    set
}

/// An empty variable is as one that is not set.
fn unless_empty(value: Option<OsString>) -> Option<OsString> {
    value.filter(|value| !value.is_empty())
}

/// `item:list`; `list` alone if it starts with the item already (a command within a command).
fn prepend(item: &OsStr, list: Option<OsString>) -> OsString {
    match list {
        Some(list) if !list.is_empty() => {
            let bytes = list.as_encoded_bytes();
            let first = bytes.split(|&b| b == b':').next().unwrap_or_default();
            if first == item.as_encoded_bytes() {
                return list;
            }
            let mut joined = item.to_os_string();
            joined.push(":");
            joined.push(&list);
            joined
        }
        _ => item.to_os_string(),
    }
}

/// Why a command could not be started, with the exit code that shells give.
fn cannot_run(program: &OsStr, error: &io::Error) -> (u8, String) {
    let program = program.to_string_lossy();
    match error.kind() {
        io::ErrorKind::NotFound if program.contains('/') => (127, format!("{program}: no such file")),
        io::ErrorKind::NotFound => (127, format!("{program}: no such command in PATH")),
        io::ErrorKind::PermissionDenied => (126, format!("{program}: may not be executed")),
        _ => (126, format!("{program}: {error}")),
    }
}

/// The signals that concern us while the command runs.
struct Signals(SignalsInfo<WithOrigin>);

impl Signals {
    fn new() -> io::Result<Signals> {
        let ignored = ignored_signals();
        // A signal that we were started to ignore (nohup, a shell's background job) stays ignored for the command too:
        // a handler of ours would become the default action in it.
        let wanted = PASSED_ON.iter().copied().filter(|signal| ignored >> (signal - 1) & 1 == 0);
        SignalsInfo::new(wanted.chain([SIGCHLD])).map(Signals)
    }

    /// Passes signals on until the child has ended.
    fn wait(&mut self, mut child: Child) -> Result<ExitStatus> {
        let pid = Pid::from_child(&child);
        loop {
            if let Some(status) = child.try_wait().context("cannot wait for the command")? {
                return Ok(status);
            }
            for origin in self.0.wait() {
                // The terminal's signals (no sender) reach the command without our help: it is in our process group.
                if origin.signal != SIGCHLD
                    && origin.process.is_some()
                    && let Some(signal) = Signal::from_named_raw(origin.signal)
                {
                    // An error means that the command has ended; the next round sees it.
                    let _ = kill_process(pid, signal);
                }
            }
        }
    }
}

/// Bit n - 1 is set if signal n is ignored.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// True unless the command did well or somebody ended it.
fn worth_explaining(status: ExitStatus) -> bool {
    match status.signal() {
        Some(signal) => ![SIGINT, SIGTERM, SIGHUP, SIGPIPE].contains(&signal),
        None => !status.success(),
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(service: bool) -> Layout {
        Layout { lib: "/opt/f/lib".into(), service: service.then(|| "/opt/f/bin/ferroced".into()) }
    }

    #[test]
    fn variables_of_a_first_run() {
        let set = environment(&layout(true), |_| None);
        assert_eq!(set["LD_PRELOAD"], "/opt/f/lib/libibverbs.so.1");
        assert_eq!(set["LD_LIBRARY_PATH"], "/opt/f/lib");
        assert_eq!(set["FERROCE_SERVICE"], "/opt/f/bin/ferroced");
    }

    #[test]
    fn other_values_are_kept_behind_ours_and_a_chosen_service_stays() {
        let set = environment(&layout(true), |_| Some("/other".into()));
        assert_eq!(set["LD_PRELOAD"], "/opt/f/lib/libibverbs.so.1:/other");
        assert_eq!(set["LD_LIBRARY_PATH"], "/opt/f/lib:/other");
        assert!(!set.contains_key("FERROCE_SERVICE"));
    }

    #[test]
    fn empty_variables_are_as_if_not_set() {
        let set = environment(&layout(true), |_| Some(OsString::new()));
        assert_eq!(set, environment(&layout(true), |_| None));
    }

    #[test]
    fn a_run_within_a_run_adds_nothing() {
        let first = environment(&layout(true), |_| None);
        let second = environment(&layout(true), |name| first.get(name).cloned());
        assert_eq!(second["LD_PRELOAD"], first["LD_PRELOAD"]);
        assert_eq!(second["LD_LIBRARY_PATH"], first["LD_LIBRARY_PATH"]);
    }

    #[test]
    fn an_unknown_service_is_left_to_the_library() {
        assert!(!environment(&layout(false), |_| None).contains_key("FERROCE_SERVICE"));
    }

    #[test]
    fn exit_codes_are_the_shell_s() {
        assert_eq!(exit_code(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(exit_code(ExitStatus::from_raw(SIGTERM)), 128 + 15);
    }
}
