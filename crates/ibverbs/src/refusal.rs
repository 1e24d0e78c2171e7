//! Telling what was refused: a log line, and for `ferroce run` a line in a file.
//!
//! A program that meets an error of verbs often prints only "failed". `FERROCE_LOG` shows the reason as it happens; the file named by
//! `FERROCE_REFUSAL` keeps it for the command that started the program. Without either, nothing is written anywhere.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::entry::Refusal;
use crate::start;

/// Lines one process writes at most, so that a program that retries for ever does not fill a disk.
const LINES_MAX: u32 = 200;

/// What `FERROCE_REFUSAL` names; set by [`start()`].
static FILE: OnceLock<PathBuf> = OnceLock::new();

/// Looks where refusals are to be kept.
pub(crate) fn start() {
    if let Some(file) = std::env::var_os("FERROCE_REFUSAL").filter(|name| !name.is_empty()) {
        // It was set already only if this was called twice.
        let _ = FILE.set(PathBuf::from(file));
    }
}

/// Tells a refusal that is worth telling.
pub(crate) fn tell(verb: &'static str, refusal: &Refusal) {
    if refusal.is_routine() {
        return;
    }
    start::start();
    log::warn!(target: "ferroce::verbs", "{verb}: {refusal} ({})", errno_name(refusal.errno()));
    static LINES: AtomicU32 = AtomicU32::new(0);
    if let Some(file) = FILE.get()
        && LINES.fetch_add(1, Ordering::Relaxed) < LINES_MAX
    {
        record(file, verb, refusal);
    }
}

/// Appends one line: verb, error number, sentence, separated by tabs. A file that cannot be written is no reason to disturb the
/// program.
fn record(file: &Path, verb: &str, refusal: &Refusal) {
    let sentence = refusal.to_string().replace(['\n', '\t'], " ");
    let line = format!("{verb}\t{}\t{sentence}\n", refusal.errno());
    if let Ok(mut file) = OpenOptions::new().append(true).create(true).open(file) {
        let _ = file.write_all(line.as_bytes());
    }
}

/// The symbolic name, for the numbers that verbs use.
fn errno_name(errno: i32) -> String {
    let name = match errno {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::EIO => "EIO",
        libc::EBADF => "EBADF",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::ENODEV => "ENODEV",
        libc::EINVAL => "EINVAL",
        libc::EMFILE => "EMFILE",
        libc::ENOSPC => "ENOSPC",
        libc::ENOSYS => "ENOSYS",
        libc::ENODATA => "ENODATA",
        libc::EPROTO => "EPROTO",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        libc::EADDRINUSE => "EADDRINUSE",
        libc::ENETDOWN => "ENETDOWN",
        libc::ENETUNREACH => "ENETUNREACH",
        libc::EHOSTUNREACH => "EHOSTUNREACH",
        libc::ECONNREFUSED => "ECONNREFUSED",
        libc::ETIMEDOUT => "ETIMEDOUT",
        _ => return format!("errno {errno}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_one_line_of_three_columns() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("refusals");
        record(&path, "ibv_create_qp", &Refusal::invalid("cap.max_send_wr is 0\nand a\ttab"));
        record(&path, "ibv_reg_mr", &Refusal::new(libc::EFAULT, "not mapped"));
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "ibv_create_qp\t22\tcap.max_send_wr is 0 and a tab\nibv_reg_mr\t14\tnot mapped\n");
    }
}
