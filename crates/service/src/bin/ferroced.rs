//! `ferroced`: the service of a network namespace. Programs start it by themselves; see `ferroced --help`.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, ExitCode};
use std::time::Duration;

use ferroce_service::config::{self, Config};
use ferroce_service::server::{ServerOptions, Service, raise_descriptor_limit};
use ferroce_service::start::{READY, TAKEN};
use ferroce_service::{ServiceError, keeper, logging, standing};

const HELP: &str = "\
ferroced: the Ferroce service, which shares UDP port 4791 of a network namespace among its programs.
Programs start it by themselves; it ends when nobody has used it for a while.

  --name NAME   listen at this abstract Unix socket name
  --port PORT   use this UDP port (for tests: RoCEv2 is 4791)
  --ready       say `ready` on standard output when it listens, then let go of it

  FERROCE_SERVICE_IDLE_S   seconds without users after which it ends (10; 0: never)
  FERROCE_CONFIG           the configuration, instead of /etc/ferroce/ferroce.toml and ~/.config/ferroce/ferroce.toml
  FERROCE_LOG              without a log file: log on standard error (error, warn, info, debug, trace)
An empty variable is as one that is not set. README.md has all variables, those of programs too.

The configuration, with what it has by itself:

  idle_s = 10                      # FERROCE_SERVICE_IDLE_S goes before it
  serve = \"user\"                   # or \"namespace\", root's default: programs of all users, those of others by the relay
  trust = []                       # read by programs: uids, besides their own and root, whose service they use; or \"any\"
  [log]
  file = \"...\"                     # none; lines are appended
  level = \"info\"                   # info tells every lease
  [limits.process]                 # of one program
  lanes = 64                       # 1 to 64
  ids = 16384                      # of the connection manager, 1 to 49152; so listeners and pending_connections
  listeners = 4096
  pending_connections = 4096       # connections that are being made, datagram ids that ask; also requests that wait at a listener, but
                                   # at most 1024
  event_channels = 1024            # 1 to 65536
  descriptors = 2048               # that the service holds: 2 for a program, 2 for a lane, 1 for an event channel; from 4
  ring_offers = 128                # of memory for rings, until they are read; 1 to 2048
  [limits.user]                    # of all programs of a user
  listeners = 16384
  pending_connections = 16384
  programs = ...                   # not set, as these: the service's own user and root have as much as there is; another user
  lanes = ...                      # has as much as it leaves to further ones, of three quarters of all (4096 programs, 1023 lanes,
  ids = ...                        # 49152 ids, and the descriptors that the system allows, RLIMIT_NOFILE, without 541)
  event_channels = ...             # not set: as descriptors allow
  descriptors = ...
  ring_offers = ...                # not set: as above, of three quarters of 2048 (or of a quarter of the descriptors, if that is less)
  groups = ...                     # multicast groups of lanes without sockets, which have the service's together: not set, as above, of
                                   # all that one socket joins (IPv4: net.ipv4.igmp_max_memberships; at most 128); 1 to 128
  [fault]                          # for tests
  cm_loss_permille = 0             # of the connection manager's packets
  old_kernel = false               # sockets as on Linux before 6.5
  panic_at_program = ...           # not set: the first worker does not panic as this program connects
";

/// What the keeper calls its child with.
const WORKER: &str = "--worker";

/// What a service that has lost its keeper calls the next one with.
const KEEPER: &str = "--keeper";

/// Before the configuration that the first process has read, as JSON.
const CONFIG: &str = "--config-json";

/// This program, also when its file was replaced.
const THIS_PROGRAM: &str = "/proc/self/exe";

fn main() -> ExitCode {
    let arguments = std::env::args().skip(1).collect();
    let idle_s = config::idle_s().map_err(|error| error.to_string());
    let parsed = match idle_s.and_then(|idle_s| parse(arguments, idle_s)) {
        Ok(Some(parsed)) => parsed,
        Ok(None) => {
            let _ = std::io::stdout().write_all(HELP.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(what) => return fail(&what),
    };
    name_process(&parsed.role);
    if let Err(error) = logging::start(&parsed.config.log) {
        return fail(&error.to_string());
    }
    raise_descriptor_limit();
    let outcome = match parsed.role {
        Role::Worker => work(parsed.options, parsed.config),
        Role::NextKeeper => take_over(&parsed.options, &parsed.config),
        Role::Keeper { ready } => match keep(&parsed.options, &parsed.config, ready) {
            Err(error) if error.errno() == libc::EADDRINUSE && ready => {
                let _ = std::io::stdout().write_all(TAKEN.as_bytes());
                Ok(())
            }
            Err(error) if error.errno() == libc::EADDRINUSE => Err(standing::name_is_taken(&parsed.options.name)),
            outcome => outcome,
        },
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string()),
    }
}

/// What ps and top show: keeper and worker were started as `/proc/self/exe`, by which nobody would know them.
fn name_process(role: &Role) {
    let name = match role {
        Role::Keeper { .. } | Role::NextKeeper => c"ferroced",
        Role::Worker => c"ferroced-worker",
    };
    // It is for people; serving goes on without it.
    let _ = rustix::thread::set_name(name);
}

fn keep(options: &ServerOptions, config: &Config, ready: bool) -> Result<(), ServiceError> {
    keeper::run(&options.name, &|| this_program(WORKER, options, config), || {
        if ready {
            let _ = std::io::stdout().write_all(READY.as_bytes()).and_then(|()| std::io::stdout().flush());
            // Whoever waits for the end of our output need not wait for ours.
            if let Ok(null) = std::fs::File::options().write(true).open("/dev/null") {
                let _ = rustix::stdio::dup2_stdout(null);
            }
        }
    })
}

/// This program in another role, with the same name, port and configuration: files may change, and be wrong by then.
fn this_program(role: &str, options: &ServerOptions, config: &Config) -> Command {
    let config = serde_json::to_string(config).expect("a configuration has string keys and paths that were text");
    let mut command = Command::new(THIS_PROGRAM);
    command.args([role, "--name", &options.name, "--port", &options.port.to_string(), CONFIG, &config]);
    command
}

/// Serves; the keeper is at standard input.
fn work(options: ServerOptions, config: Config) -> Result<(), ServiceError> {
    let keeper = standard_input()?;
    let next_keeper = {
        let options = options.clone();
        move || this_program(KEEPER, &options, &config)
    };
    Service::resume(options, keeper, Box::new(next_keeper))?.run()
}

/// Keeps; the service is at standard input.
fn take_over(options: &ServerOptions, config: &Config) -> Result<(), ServiceError> {
    keeper::take_over(&standard_input()?, &|| this_program(WORKER, options, config))
}

/// The socket at standard input, whose place /dev/null takes.
fn standard_input() -> Result<OwnedFd, ServiceError> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let socket = socket.map_err(|error| ServiceError::new(libc::EBADF, format!("no standard input: {error}")))?;
    if let Ok(null) = std::fs::File::open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(null);
    }
    Ok(socket)
}

/// Standard error of a service that a program started is /dev/null; that program reads standard output.
fn fail(what: &str) -> ExitCode {
    let _ = writeln!(std::io::stdout(), "{what}");
    let _ = writeln!(std::io::stderr(), "ferroced: {what}");
    ExitCode::FAILURE
}

struct Parsed {
    options: ServerOptions,
    config: Config,
    role: Role,
}

enum Role {
    Keeper { ready: bool },
    NextKeeper,
    Worker,
}

/// None: help.
fn parse(arguments: Vec<String>, idle_s: Option<u64>) -> Result<Option<Parsed>, String> {
    let mut options = ServerOptions::default();
    let mut role = Role::Keeper { ready: false };
    let mut config = None;
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--name" => options.name = value()?,
            "--port" => options.port = value()?.parse().map_err(|_| "--port needs a number up to 65535")?,
            "--ready" => role = Role::Keeper { ready: true },
            WORKER => role = Role::Worker,
            KEEPER => role = Role::NextKeeper,
            CONFIG => config = Some(serde_json::from_str(&value()?).map_err(|error| format!("{CONFIG}: {error}"))?),
            "--help" | "-h" => return Ok(None),
            other => return Err(format!("unknown argument {other}; see --help")),
        }
    }
    let config: Config = match config {
        Some(config) => config,
        None => Config::load().map_err(|error| error.to_string())?,
    };
    if let Some(seconds) = idle_s.or(config.idle_s) {
        options.idle = (seconds > 0).then(|| Duration::from_secs(seconds));
    }
    options.limits = config.limits;
    options.serve = config.serve;
    options.fault = config.fault;
    Ok(Some(Parsed { options, config, role }))
}
