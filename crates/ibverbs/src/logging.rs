//! `FERROCE_LOG`: log lines on stderr, if the user asks for them. Without it the library writes nothing.

use log::{LevelFilter, Log, Metadata, Record};

/// Lines on stderr, each in one write so that those of several processes do not mix.
struct Stderr;

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = format!(
                "ferroce[{}] {:5} {}: {}\n",
                std::process::id(),
                record.level(),
                record.target().trim_start_matches("ferroce::"),
                record.args()
            );
            write_to_stderr(&line);
        }
    }

    fn flush(&self) {}
}

/// Not through the standard library's stderr, whose lock a forked child may find taken. A program that closed stderr does not want to
/// know.
fn write_to_stderr(line: &str) {
    // SAFETY: the bytes live during the call.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// Starts logging if `FERROCE_LOG` asks for it.
pub(crate) fn start() {
    let Some(value) = std::env::var_os("FERROCE_LOG") else { return };
    let value = value.to_string_lossy();
    let level = level(&value).unwrap_or_else(|| {
        write_to_stderr(&complaint(&value));
        INSTEAD
    });
    // A program written in Rust may have a logger, but not in this library's copy of the crate.
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(level);
    }
}

/// For a value that is no level: whoever sets the variable wants to see what is refused.
const INSTEAD: LevelFilter = LevelFilter::Warn;

/// `error`, `warn`, `info`, `debug`, `trace`, `off`, in any case; nothing is `off`. None: no level.
fn level(value: &str) -> Option<LevelFilter> {
    match value.trim() {
        "" => Some(LevelFilter::Off),
        value => value.parse().ok(),
    }
}

fn complaint(value: &str) -> String {
    /// As much of the value as is shown, in characters.
    const SHOWN_MAX: usize = 40;
    let shown: String = value.chars().take(SHOWN_MAX).collect();
    let pid = std::process::id();
    format!(
        "ferroce[{pid}] FERROCE_LOG={shown:?} is no level: error, warn, info, debug, trace or off; taken for warn\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels() {
        assert_eq!(level("debug"), Some(LevelFilter::Debug));
        assert_eq!(level("INFO"), Some(LevelFilter::Info));
        assert_eq!(level("off"), Some(LevelFilter::Off));
        assert_eq!(level(""), Some(LevelFilter::Off));
        assert_eq!(level("1"), None);
    }

    #[test]
    fn a_wrong_value_is_shown_on_one_short_line() {
        let line = complaint("bogus\n\u{1b}[31m");
        assert!(line.contains(r#"FERROCE_LOG="bogus\n\u{1b}[31m" is no level: error, warn,"#), "{line}");
        assert_eq!(line.lines().count(), 1);
        assert!(complaint(&"x".repeat(10_000)).len() < 200);
    }
}
