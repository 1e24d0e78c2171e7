//! `ferroced`: the service of a network namespace. Programs start it by themselves; see `ferroced --help`.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, ExitCode};
use std::time::Duration;

use ferroce_service::server::{ServerOptions, Service, raise_descriptor_limit};
use ferroce_service::start::{READY, TAKEN};
use ferroce_service::{ServiceError, keeper};

const HELP: &str = "\
ferroced: the Ferroce service, which shares UDP port 4791 of a network namespace among its programs.
Programs start it by themselves; it ends when nobody has used it for a while.

  --name NAME   listen at this abstract Unix socket name
  --port PORT   use this UDP port (for tests: RoCEv2 is 4791)
  --ready       say `ready` on standard output when it listens, then let go of it

  FERROCE_SERVICE_IDLE_S   seconds without users after which it ends (10; 0: never)
";

/// What the keeper calls its child with.
const WORKER: &str = "--worker";

/// What a service that has lost its keeper calls the next one with.
const KEEPER: &str = "--keeper";

/// This program, also when its file was replaced.
const THIS_PROGRAM: &str = "/proc/self/exe";

fn main() -> ExitCode {
    let arguments = std::env::args().skip(1).collect();
    let parsed = match parse(arguments, std::env::var("FERROCE_SERVICE_IDLE_S").ok()) {
        Ok(Some(parsed)) => parsed,
        Ok(None) => {
            let _ = std::io::stdout().write_all(HELP.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(what) => return fail(&what),
    };
    raise_descriptor_limit();
    let outcome = match parsed.role {
        Role::Worker => work(parsed.options),
        Role::NextKeeper => take_over(&parsed.options),
        Role::Keeper { ready } => match keep(&parsed.options, ready) {
            Err(error) if error.errno() == libc::EADDRINUSE && ready => {
                let _ = std::io::stdout().write_all(TAKEN.as_bytes());
                Ok(())
            }
            outcome => outcome,
        },
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string()),
    }
}

fn keep(options: &ServerOptions, ready: bool) -> Result<(), ServiceError> {
    keeper::run(&options.name, &|| this_program(WORKER, options), || {
        if ready {
            let _ = std::io::stdout().write_all(READY.as_bytes()).and_then(|()| std::io::stdout().flush());
            // Whoever waits for the end of our output need not wait for ours.
            if let Ok(null) = std::fs::File::options().write(true).open("/dev/null") {
                let _ = rustix::stdio::dup2_stdout(null);
            }
        }
    })
}

/// This program in another role, with the same name and port.
fn this_program(role: &str, options: &ServerOptions) -> Command {
    let mut command = Command::new(THIS_PROGRAM);
    command.args([role, "--name", &options.name, "--port", &options.port.to_string()]);
    command
}

/// Serves; the keeper is at standard input.
fn work(options: ServerOptions) -> Result<(), ServiceError> {
    let keeper = standard_input()?;
    let next_keeper = {
        let options = options.clone();
        move || this_program(KEEPER, &options)
    };
    Service::resume(options, keeper, Box::new(next_keeper))?.run()
}

/// Keeps; the service is at standard input.
fn take_over(options: &ServerOptions) -> Result<(), ServiceError> {
    keeper::take_over(&standard_input()?, &|| this_program(WORKER, options))
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
    role: Role,
}

enum Role {
    Keeper { ready: bool },
    NextKeeper,
    Worker,
}

/// None: help.
fn parse(arguments: Vec<String>, idle_s: Option<String>) -> Result<Option<Parsed>, String> {
    let mut options = ServerOptions::default();
    let mut role = Role::Keeper { ready: false };
    if let Some(text) = idle_s {
        let seconds: u64 = text.parse().map_err(|_| format!("FERROCE_SERVICE_IDLE_S={text} is not a number"))?;
        options.idle = (seconds > 0).then(|| Duration::from_secs(seconds));
    }
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--name" => options.name = value()?,
            "--port" => options.port = value()?.parse().map_err(|_| "--port needs a number up to 65535")?,
            "--ready" => role = Role::Keeper { ready: true },
            WORKER => role = Role::Worker,
            KEEPER => role = Role::NextKeeper,
            "--help" | "-h" => return Ok(None),
            other => return Err(format!("unknown argument {other}; see --help")),
        }
    }
    Ok(Some(Parsed { options, role }))
}
