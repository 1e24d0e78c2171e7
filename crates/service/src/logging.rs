//! The service's log: lines in a file, or on standard error where `FERROCE_LOG` asks for it.

use std::fs::File;
use std::io::Write;

use log::{LevelFilter, Metadata, Record};

use crate::{ServiceError, config, environment, sys};

/// Where lines go, each in one write so that those of keeper and worker do not mix.
struct Lines {
    /// None: standard error.
    file: Option<File>,
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
        // A log that cannot be written is no reason to serve nobody.
        let _ = match &self.file {
            Some(file) => (&*file).write_all(line.as_bytes()),
            None => std::io::stderr().write_all(line.as_bytes()),
        };
    }

    fn flush(&self) {}
}

/// Starts the log. The error: the file cannot be opened.
pub fn start(config: &config::Log) -> Result<(), ServiceError> {
    let (file, level) = match (&config.file, environment::var_os("FERROCE_LOG")) {
        (Some(path), _) => {
            let file = File::options().append(true).create(true).open(path).map_err(|error| {
                let what = format!("the log {}, which log.file names, cannot be written", path.display());
                ServiceError::system(what, sys::errno(&error))
            })?;
            (Some(file), config.level.into())
        }
        (None, Some(level)) => (None, of_environment(&level.to_string_lossy())),
        (None, None) => return Ok(()),
    };
    if log::set_logger(Box::leak(Box::new(Lines { file }))).is_ok() {
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
