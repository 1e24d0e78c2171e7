//! Running other programs: one place that says what was run and how it ended.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// A line of progress on stderr.
pub(crate) fn say(what: impl std::fmt::Display) {
    // A closed stderr must not end the work.
    let _ = writeln!(std::io::stderr().lock(), "xtask: {what}");
}

/// A line of results on stdout.
pub(crate) fn print(what: impl std::fmt::Display) {
    // Who closed stdout does not want to know.
    let _ = writeln!(std::io::stdout().lock(), "{what}");
}

/// Runs `command` with our own stdout and stderr; an error unless it exits with 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    let status = command.status().with_context(|| format!("cannot run `{shown}`: is it installed?"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status}); its messages are above");
    }
    Ok(())
}

/// Runs `command`, shows its stdout line by line and gives each line to `look`. True if it exits with 0.
pub(crate) fn watch(command: &mut Command, mut look: impl FnMut(&str)) -> Result<bool> {
    let shown = show(command);
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot run `{shown}`: is it installed?"))?;
    let stdout = child.stdout.take().expect("stdout is a pipe");
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.with_context(|| format!("cannot read the output of `{shown}`"))?;
        let line = String::from_utf8_lossy(&line);
        look(&line);
        print(&line);
    }
    Ok(child.wait()?.success())
}

/// The command as one would type it.
pub(crate) fn show(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|a| a.to_string_lossy().into_owned()));
    words.join(" ")
}

/// True if `program` can be found in PATH.
pub(crate) fn installed(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// Time since `start`, for people.
pub(crate) fn elapsed(start: Instant) -> String {
    let seconds = start.elapsed().as_secs();
    if seconds < 60 { format!("{seconds} s") } else { format!("{} min {} s", seconds / 60, seconds % 60) }
}
