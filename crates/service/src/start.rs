//! Starting the service from a program that wants nothing to do with it.

use std::ffi::{CString, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferroce_wire::UDP_PORT;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Access, Mode, OFlags};
use rustix::io::Errno;

use crate::client::StartOptions;
use crate::standing::{self, WORD_AFTER};
use crate::sys::{self, Command};
use crate::{ServiceError, environment};

/// File name of the service.
pub const PROGRAM: &str = "ferroced";

/// Environment variable with the path of the service; goes before everything else.
pub const SERVICE_VARIABLE: &str = "FERROCE_SERVICE";

/// What the service writes to its standard output when it accepts connections, if started with `--ready`.
pub const READY: &str = "ready\n";

/// The same if another service was faster.
pub const TAKEN: &str = "taken\n";

/// Variables that the service gets. It outlives the program: nothing private stays in its environment, and nothing that
/// was meant for the program (LD_PRELOAD) acts on it.
const ENVIRONMENT: [&str; 9] =
    ["PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"];

/// The same, by prefix.
const ENVIRONMENT_PREFIX: &str = "FERROCE_";

/// What came of starting a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Started {
    /// It listens.
    Ready,
    /// Another one has the name. It listens, or is about to, or is just ending.
    Taken,
}

/// Starts `ferroced` and waits until it accepts, or finds that another one has the name.
pub(crate) fn start(options: &StartOptions) -> Result<Started, ServiceError> {
    let path = find(environment::var_os(SERVICE_VARIABLE), &options.candidates)?;
    log::debug!("starting {}", path.display());
    let failed = |what: &str, errno| ServiceError::system(format!("cannot start {}: {what}", path.display()), errno);
    let (ready, stdout) = pipe().map_err(|errno| failed("no pipe", errno))?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .and_then(above_stdio)
        .map_err(|errno| failed("/dev/null", errno))?;
    let text = |os: &[u8]| CString::new(os).map_err(|_| failed("a zero byte in its command line", Errno::INVAL));
    let path_text = text(path.as_os_str().as_bytes())?;
    let mut arguments = vec![path_text.clone(), c"--ready".into(), c"--name".into(), text(options.name.as_bytes())?];
    if options.port != UDP_PORT {
        arguments.extend([c"--port".into(), text(options.port.to_string().as_bytes())?]);
    }
    sys::spawn_detached(&Command {
        path: &path_text,
        arguments: &arguments,
        environment: &passed_on(environment::vars_os()),
        null: null.as_fd(),
        stdout: stdout.as_fd(),
    })
    .map_err(|error| failed("it could not be executed", sys::errno(&error)))?;
    drop(stdout);
    wait_until_ready(&ready, options.patience, &path)
}

fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    Ok((read, above_stdio(write)?))
}

/// The program may have closed its standard descriptors; what the child puts there must not be among them.
fn above_stdio(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    rustix::io::fcntl_dupfd_cloexec(fd, 3)
}

/// The program that [`SERVICE_VARIABLE`] names, if it is set.
pub(crate) fn named() -> Result<Option<PathBuf>, ServiceError> {
    named_by(environment::var_os(SERVICE_VARIABLE))
}

fn named_by(variable: Option<OsString>) -> Result<Option<PathBuf>, ServiceError> {
    let Some(path) = variable.filter(|path| !path.is_empty()).map(PathBuf::from) else { return Ok(None) };
    if is_executable(&path) {
        return Ok(Some(path));
    }
    let path = path.display();
    let what = format!(
        "{SERVICE_VARIABLE}={path} is not a program that can be executed; unset the variable, or set it to the path of {PROGRAM}"
    );
    Err(ServiceError::new(libc::ENOENT, what))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, Access::EXEC_OK).is_ok()
}

/// The first of the variable's path, the candidates and `PATH` that can be executed. A variable that names something
/// else is an error of its own.
fn find(variable: Option<OsString>, candidates: &[PathBuf]) -> Result<PathBuf, ServiceError> {
    // Relative paths are the caller's; the service runs in `/`.
    let absolute = |path: &Path| {
        std::path::absolute(path)
            .map_err(|error| ServiceError::system("cannot tell the current directory", sys::errno(&error)))
    };
    if let Some(path) = named_by(variable)? {
        return absolute(&path);
    }
    let path = environment::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).filter(|dir| dir.is_absolute()).map(|dir| dir.join(PROGRAM));
    let mut looked = Vec::new();
    for candidate in candidates.iter().cloned().chain(in_path) {
        if is_executable(&candidate) {
            return absolute(&candidate);
        }
        looked.push(candidate.display().to_string());
    }
    Err(ServiceError::new(
        libc::ENOENT,
        format!(
            "no Ferroce service runs in this network namespace, and {PROGRAM} was not found to start one; looked at: {}. \
             Set {SERVICE_VARIABLE} to its path",
            if looked.is_empty() { "nothing (no candidates, PATH is empty)".into() } else { looked.join(", ") }
        ),
    ))
}

/// What the service gets of an environment.
fn passed_on(variables: impl Iterator<Item = (OsString, OsString)>) -> Vec<CString> {
    variables
        .filter(|(name, _)| {
            ENVIRONMENT.iter().any(|kept| name == kept) || name.as_bytes().starts_with(ENVIRONMENT_PREFIX.as_bytes())
        })
        .filter_map(|(mut entry, value)| {
            entry.push("=");
            entry.push(value);
            CString::new(entry.into_vec()).ok()
        })
        .collect()
}

/// The service says `ready`, or why it is not.
fn wait_until_ready(ready: &OwnedFd, patience: Duration, path: &Path) -> Result<Started, ServiceError> {
    const TEXT_MAX: usize = 4096;
    let deadline = Instant::now() + patience;
    let mut word_at = (patience > WORD_AFTER).then(|| Instant::now() + WORD_AFTER);
    let mut said = Vec::new();
    loop {
        let next = word_at.unwrap_or(deadline);
        let timeout = Timespec::try_from(next.saturating_duration_since(Instant::now())).unwrap_or_default();
        let mut polled = [PollFd::new(ready, PollFlags::IN)];
        match rustix::event::poll(&mut polled, Some(&timeout)) {
            Ok(0) if word_at.take().is_some() => {
                standing::say(&format!(
                    "waiting up to {patience:?} for {}, which was started and is not ready yet; on a busy machine that \
                     takes a while, else run it by hand to see why",
                    path.display()
                ));
                continue;
            }
            Ok(0) => {
                let what = format!("{} did not get ready within {patience:?}", path.display());
                return Err(ServiceError::new(libc::ETIMEDOUT, what));
            }
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(ServiceError::system("cannot wait for the service", errno)),
        }
        let mut part = [0; 512];
        let len = rustix::io::retry_on_intr(|| rustix::io::read(ready, &mut part[..]))
            .map_err(|errno| ServiceError::system("cannot wait for the service", errno))?;
        said.extend_from_slice(&part[..len]);
        for (word, started) in [(READY, Started::Ready), (TAKEN, Started::Taken)] {
            if said == word.as_bytes() {
                return Ok(started);
            }
        }
        if len == 0 || said.len() > TEXT_MAX {
            let said = String::from_utf8_lossy(&said);
            let (path, said) = (path.display(), said.trim());
            let what = if said.is_empty() {
                format!(
                    "cannot start {path}: it ended without a word; run it by hand to see why, or set {SERVICE_VARIABLE} to the path of {PROGRAM}"
                )
            } else {
                format!("cannot start {path}: {said}")
            };
            return Err(ServiceError::new(libc::ECONNREFUSED, what));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_gets_nothing_private() {
        let variables = [("PATH", "/bin"), ("SECRET", "x"), ("LD_PRELOAD", "y.so"), ("FERROCE_SERVICE_IDLE_S", "3")]
            .map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let kept: [CString; 2] = [c"PATH=/bin".into(), c"FERROCE_SERVICE_IDLE_S=3".into()];
        assert_eq!(passed_on(variables.into_iter()), kept);
    }

    #[test]
    fn a_missing_service_is_reported_with_where_it_was_looked_for() {
        let error = find(None, &["/nonexistent/ferroced".into(), "/etc/passwd".into()]).unwrap_err();
        assert_eq!(error.errno(), libc::ENOENT);
        let text = error.to_string();
        assert!(text.contains("/nonexistent/ferroced, /etc/passwd"), "{text}");
        assert!(text.contains("FERROCE_SERVICE"), "{text}");
    }

    #[test]
    fn the_variable_goes_first_and_must_be_right() {
        let candidates = ["/bin/ls".into()];
        assert_eq!(find(Some("/bin/sh".into()), &candidates).unwrap(), Path::new("/bin/sh"));
        assert_eq!(find(Some("".into()), &candidates).unwrap(), Path::new("/bin/ls"));
        let error = find(Some("/nonexistent".into()), &candidates).unwrap_err();
        assert!(error.to_string().contains("FERROCE_SERVICE=/nonexistent"), "{error}");
        assert!(error.to_string().contains("unset the variable"), "{error}");
    }

    #[test]
    fn what_a_failing_service_says_is_passed_on() {
        let says = |text: &[u8]| {
            let (read, write) = pipe().unwrap();
            rustix::io::write(&write, text).unwrap();
            drop(write);
            wait_until_ready(&read, Duration::from_secs(60), Path::new("/x/ferroced")).unwrap_err().to_string()
        };
        assert_eq!(says(b"because"), "cannot start /x/ferroced: because");
        assert!(says(b"").contains("run it by hand"));
    }
}
