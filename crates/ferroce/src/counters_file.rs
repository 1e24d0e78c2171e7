//! `FERROCE_COUNTERS=FILE`: a process leaves its counters behind, as lines of process id, name and value. `%p` in the name stands for
//! the process id.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Once;

use ferroce_service::{environment, regular_file};

use crate::error::{Error, Result};

const VARIABLE: &str = "FERROCE_COUNTERS";

/// Looks whether the file can be written, so that whoever asked for it is told before all is over.
///
/// # Errors
/// EINVAL: it is no regular file. Others: it cannot be opened.
pub(crate) fn check() -> Result<()> {
    open().map(drop)
}

/// Whether a file is asked for, which can be written as far as that shows without making it.
pub(crate) fn could_be_written() -> Result<bool> {
    let Some(path) = environment::file_to_write(VARIABLE)? else { return Ok(false) };
    regular_file::could_append(&path).map_err(|error| unwritable(&path, &error))?;
    Ok(true)
}

/// Appends what `counters` gives, if that is asked for. A failure is told, once.
pub(crate) fn leave(counters: impl FnOnce() -> Vec<(&'static str, u64)>) {
    static TOLD: Once = Once::new();
    let left = open().and_then(|file| file.map_or(Ok(()), |file| append(file, &counters())));
    if let Err(error) = left {
        TOLD.call_once(|| log::warn!("{error}"));
    }
}

fn append(mut file: File, counters: &[(&str, u64)]) -> Result<()> {
    let pid = std::process::id();
    let lines: String = counters.iter().map(|(name, value)| format!("{pid}\t{name}\t{value}\n")).collect();
    file.write_all(lines.as_bytes()).map_err(|error| {
        let what =
            format!("the counters that {VARIABLE} asks for are lost: {error}; make room there, or name another file");
        Error::new(error.raw_os_error().unwrap_or(libc::EIO), what)
    })
}

/// None: nobody asks for counters.
fn open() -> Result<Option<File>> {
    let Some(path) = environment::file_to_write(VARIABLE)? else { return Ok(None) };
    regular_file::append(&path).map(Some).map_err(|error| unwritable(&path, &error))
}

fn unwritable(path: &Path, error: &std::io::Error) -> Error {
    let what = format!("cannot write the counters to {}, as {VARIABLE} asks: {error}", path.display());
    Error::new(error.raw_os_error().unwrap_or(libc::EINVAL), what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_appended_to_a_regular_file() {
        let path = std::env::temp_dir().join(format!("ferroce-counters-{}", std::process::id()));
        for value in [1, 2] {
            append(regular_file::append(&path).unwrap(), &[("a", value), ("b", 0)]).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let pid = std::process::id();
        assert_eq!(text, format!("{pid}\ta\t1\n{pid}\tb\t0\n{pid}\ta\t2\n{pid}\tb\t0\n"));
    }

    #[test]
    fn a_full_disk_is_told_with_the_remedy() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = append(full, &[("a", 1)]).unwrap_err();
        assert_eq!(error.errno(), libc::ENOSPC);
        let text = error.to_string();
        assert!(
            text.contains("FERROCE_COUNTERS") && text.contains("os error 28") && text.contains("make room"),
            "{text}"
        );
    }
}
