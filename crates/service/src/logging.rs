//! The service's log: lines in a file, or on standard error where `FERROCE_LOG` asks for it.

use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use log::{LevelFilter, Metadata, Record};

use crate::{ServiceError, config, environment, regular_file};

/// Where lines go, each in one write so that those of keeper and worker do not mix.
struct Lines {
    /// None: standard error.
    file: Option<File>,
    /// That the file cannot be written was told.
    told: AtomicBool,
}

impl Lines {
    fn new(file: Option<File>) -> Lines {
        Lines { file, told: AtomicBool::new(false) }
    }

    /// What to say on standard error of a line that could not be written. Nothing else is done: a log that cannot be written is no reason
    /// to serve nobody.
    fn write(&self, line: &str) -> Option<String> {
        let Some(mut file) = self.file.as_ref() else {
            // Nowhere is a failure of this to be told.
            let _ = io::stderr().write_all(line.as_bytes());
            return None;
        };
        let error = file.write_all(line.as_bytes()).err()?;
        let is_first = !self.told.swap(true, Ordering::Relaxed);
        is_first.then(|| {
            format!("ferroced: lines of the log are lost: {error}; make room there, or have log.file name another file")
        })
    }
}

impl log::Log for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let (seconds, millis) = (time.as_secs(), time.subsec_millis());
        // What clients call themselves has no control characters; neither has anything else that is told.
        let line =
            format!("{seconds}.{millis:03} ferroced[{}] {} {}\n", std::process::id(), record.level(), record.args());
        if let Some(complaint) = self.write(&line) {
            let _ = writeln!(io::stderr(), "{complaint}");
        }
    }

    fn flush(&self) {}
}

/// Starts the log. The error: the file cannot be opened.
pub fn start(config: &config::Log) -> Result<(), ServiceError> {
    let (file, level) = match (&config.file, environment::var_os("FERROCE_LOG")) {
        (Some(path), _) => {
            let file = regular_file::append(path).map_err(|error| {
                let what = format!("the log {}, which log.file names, cannot be written: {error}", path.display());
                ServiceError::new(error.raw_os_error().unwrap_or(libc::EINVAL), what)
            })?;
            (Some(file), config.level.into())
        }
        (None, Some(level)) => (None, of_environment(&level.to_string_lossy())),
        (None, None) => return Ok(()),
    };
    if log::set_logger(Box::leak(Box::new(Lines::new(file)))).is_ok() {
        log::set_max_level(level);
    }
    Ok(())
}

/// What `FERROCE_LOG` says. What is no level is told on standard error, and taken for `warn`.
fn of_environment(value: &str) -> LevelFilter {
    value.trim().parse().unwrap_or_else(|_| {
        let known = "it can be error, warn, info, debug, trace or off";
        let complaint = environment::wrong("FERROCE_LOG", value, known);
        let _ = writeln!(std::io::stderr(), "ferroced: {complaint}. Taken for warn");
        LevelFilter::Warn
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It was silent; and who wants to know need not be told of each line.
    #[test]
    fn a_line_that_is_lost_is_told_once() {
        let lines = Lines::new(Some(File::options().write(true).open("/dev/full").unwrap()));
        let complaint = lines.write("a line\n").unwrap();
        assert!(complaint.contains("os error 28") && complaint.contains("log.file"), "{complaint}");
        assert_eq!(lines.write("another one\n"), None);
    }

    /// A service waited for a reader of the one, and wrote all into the other without a word.
    #[test]
    fn what_is_no_regular_file_is_refused() {
        for path in ["/dev/full", "/"] {
            let config = config::Log { file: Some(path.into()), ..config::Log::default() };
            let error = start(&config).unwrap_err();
            assert_eq!(error.errno(), libc::EINVAL);
            let told = format!("the log {path}, which log.file names, cannot be written: it is no regular file");
            assert!(error.to_string().starts_with(&told), "{error}");
        }
    }
}
