//! `ferroced`: the service of a network namespace. Programs start it by themselves; see `ferroced --help`.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use ferroce_service::server::{ServerOptions, Service};
use ferroce_service::start::{READY, TAKEN};

const HELP: &str = "\
ferroced: the Ferroce service, which shares UDP port 4791 of a network namespace among its programs.
Programs start it by themselves; it ends when nobody has used it for a while.

  --name NAME   listen at this abstract Unix socket name
  --port PORT   use this UDP port (for tests: RoCEv2 is 4791)
  --ready       say `ready` on standard output when it listens, then let go of it

  FERROCE_SERVICE_IDLE_S   seconds without users after which it ends (10; 0: never)
";

fn main() -> ExitCode {
    let arguments = std::env::args().skip(1).collect();
    let (options, ready) = match parse(arguments, std::env::var("FERROCE_SERVICE_IDLE_S").ok()) {
        Ok(Some(parsed)) => parsed,
        Ok(None) => {
            let _ = std::io::stdout().write_all(HELP.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(what) => return fail(&what),
    };
    let service = match Service::bind(options) {
        Ok(service) => service,
        Err(error) if error.errno() == libc::EADDRINUSE && ready => {
            let _ = std::io::stdout().write_all(TAKEN.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(error) => return fail(&error.to_string()),
    };
    service.raise_descriptor_limit();
    if ready {
        let _ = std::io::stdout().write_all(READY.as_bytes()).and_then(|()| std::io::stdout().flush());
        // Whoever waits for the end of our output need not wait for ours.
        if let Ok(null) = std::fs::File::options().write(true).open("/dev/null") {
            let _ = rustix::stdio::dup2_stdout(null);
        }
    }
    match service.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string()),
    }
}

/// Standard error of a service that a program started is /dev/null; that program reads standard output.
fn fail(what: &str) -> ExitCode {
    let _ = writeln!(std::io::stdout(), "{what}");
    let _ = writeln!(std::io::stderr(), "ferroced: {what}");
    ExitCode::FAILURE
}

/// Options and whether to say `ready`; None: help.
fn parse(arguments: Vec<String>, idle_s: Option<String>) -> Result<Option<(ServerOptions, bool)>, String> {
    let mut options = ServerOptions::default();
    let mut ready = false;
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
            "--ready" => ready = true,
            "--help" | "-h" => return Ok(None),
            other => return Err(format!("unknown argument {other}; see --help")),
        }
    }
    Ok(Some((options, ready)))
}
