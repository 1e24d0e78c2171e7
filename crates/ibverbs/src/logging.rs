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
            // Not through the standard library's stderr, whose lock a forked child may find taken. A program that closed stderr does
            // not want to know.
            // SAFETY: the bytes live during the call.
            unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
        }
    }

    fn flush(&self) {}
}

/// Starts logging if `FERROCE_LOG` asks for it.
pub(crate) fn start() {
    let Some(value) = std::env::var_os("FERROCE_LOG") else { return };
    let level = level(&value.to_string_lossy());
    // A program written in Rust may have a logger, but not in this library's copy of the crate.
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(level);
    }
}

/// `error`, `warn`, `info`, `debug`, `trace`, `off`; anything else that is not empty means `warn`, where refusals are told.
fn level(value: &str) -> LevelFilter {
    match value.trim() {
        "" => LevelFilter::Off,
        value => value.parse().unwrap_or(LevelFilter::Warn),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels() {
        assert_eq!(level("debug"), LevelFilter::Debug);
        assert_eq!(level("INFO"), LevelFilter::Info);
        assert_eq!(level("off"), LevelFilter::Off);
        assert_eq!(level("1"), LevelFilter::Warn);
        assert_eq!(level(""), LevelFilter::Off);
    }
}
