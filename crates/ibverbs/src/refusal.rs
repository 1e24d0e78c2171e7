//! Telling what was refused: a log line, and for `ferroce run` a line in its record.
//!
//! A program that meets an error of verbs often prints only "failed". `FERROCE_LOG` shows the reason as it happens; what
//! `FERROCE_REFUSAL` names keeps it for the command that started the program. Without either, nothing is written anywhere.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use ferroce::environment;

use crate::entry::Refusal;
use crate::start;

/// Lines one process writes at most, so that a program that retries for ever does not fill a disk.
const LINES_MAX: u32 = 200;

/// What `FERROCE_REFUSAL` names; set by [`start()`].
static PLACE: OnceLock<Place> = OnceLock::new();

/// Where refusals are kept.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// A file, made if it is not there.
    File(PathBuf),
    Memory(Memory),
}

/// Memory of `ferroce run`, which is in no folder. Its name is `memfd:DEVICE:INODE:/proc/PID/fd/NUMBER`.
///
/// The program has inherited it with the same number. If it has closed that, it can open the one of `ferroce run`, unless it became
/// another user or entered other namespaces. Numbers of descriptors and processes are used again, so it is looked at what they lead to:
/// nothing else is opened.
#[derive(Debug, PartialEq, Eq)]
struct Memory {
    device: u64,
    inode: u64,
    paths: [PathBuf; 2],
}

/// Looks where refusals are to be kept.
pub(crate) fn start() {
    if let Some(place) = environment::var_os("FERROCE_REFUSAL").and_then(|name| Place::named(Path::new(&name))) {
        // It was set already only if this was called twice.
        let _ = PLACE.set(place);
    }
}

impl Place {
    fn named(name: &Path) -> Option<Place> {
        if name.as_os_str().is_empty() {
            return None;
        }
        match name.to_str().and_then(|name| name.strip_prefix("memfd:")) {
            Some(memory) => Memory::named(memory).map(Place::Memory),
            None => Some(Place::File(name.to_owned())),
        }
    }

    fn open(&self) -> io::Result<File> {
        match self {
            Place::File(path) => OpenOptions::new().append(true).create(true).open(path),
            Place::Memory(memory) => {
                memory.paths.iter().find_map(|path| memory.open(path)).ok_or(io::ErrorKind::NotFound.into())
            }
        }
    }
}

impl Memory {
    fn named(name: &str) -> Option<Memory> {
        let mut parts = name.splitn(3, ':');
        let (device, inode) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let path = PathBuf::from(parts.next()?);
        let inherited = Path::new("/proc/self/fd").join(path.file_name()?);
        Some(Memory { device, inode, paths: [inherited, path] })
    }

    fn open(&self, path: &Path) -> Option<File> {
        let is_it = |metadata: &Metadata| metadata.dev() == self.device && metadata.ino() == self.inode;
        // Before it is opened, because that alone can do something (a pipe, a device); and after, because the first may be outdated.
        std::fs::metadata(path).ok().filter(is_it)?;
        let file = OpenOptions::new().append(true).open(path).ok()?;
        is_it(&file.metadata().ok()?).then_some(file)
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
    if let Some(place) = PLACE.get()
        && LINES.fetch_add(1, Ordering::Relaxed) < LINES_MAX
    {
        record(place, verb, refusal);
    }
}

/// Appends one line: verb, error number, sentence, separated by tabs. A place that cannot be written is no reason to disturb
/// the program.
fn record(place: &Place, verb: &str, refusal: &Refusal) {
    let sentence = refusal.to_string().replace(['\n', '\t'], " ");
    let line = format!("{verb}\t{}\t{sentence}\n", refusal.errno());
    if let Ok(mut file) = place.open() {
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
    use std::io::Read;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_record_is_one_line_of_three_columns() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("refusals");
        let place = Place::named(&path).unwrap();
        record(&place, "ibv_create_qp", &Refusal::invalid("cap.max_send_wr is 0\nand a\ttab"));
        record(&place, "ibv_reg_mr", &Refusal::new(libc::EFAULT, "not mapped"));
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "ibv_create_qp\t22\tcap.max_send_wr is 0 and a tab\nibv_reg_mr\t14\tnot mapped\n");
    }

    /// A file without a name, and what `ferroce run` would call it if it had this number.
    fn unnamed(number: Option<i32>) -> (File, Place) {
        let file = tempfile::tempfile().unwrap();
        let metadata = file.metadata().unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), number.unwrap_or(file.as_raw_fd()));
        let name = format!("memfd:{}:{}:{path}", metadata.dev(), metadata.ino());
        let place = Place::named(Path::new(&name)).unwrap();
        (file, place)
    }

    #[test]
    fn what_has_no_name_is_found_by_its_number() {
        let (mut file, place) = unnamed(None);
        record(&place, "ibv_reg_mr", &Refusal::new(libc::EFAULT, "not mapped"));
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "ibv_reg_mr\t14\tnot mapped\n");
    }

    #[test]
    fn it_is_found_in_the_process_that_has_it_when_the_own_number_is_closed() {
        let (file, place) = unnamed(None);
        let Place::Memory(mut memory) = place else { panic!("{place:?}") };
        // Numbers this high are not given.
        memory.paths[0] = "/proc/self/fd/1000000".into();
        record(&Place::Memory(memory), "ibv_reg_mr", &Refusal::new(libc::EFAULT, "not mapped"));
        assert_eq!(file.metadata().unwrap().len(), "ibv_reg_mr\t14\tnot mapped\n".len() as u64);
    }

    #[test]
    fn another_file_at_its_number_is_left_alone() {
        let other = tempfile::tempfile().unwrap();
        let (file, place) = unnamed(Some(other.as_raw_fd()));
        record(&place, "ibv_reg_mr", &Refusal::new(libc::EFAULT, "not mapped"));
        assert_eq!((other.metadata().unwrap().len(), file.metadata().unwrap().len()), (0, 0));
    }

    #[test]
    fn broken_names_are_no_places() {
        for name in ["", "memfd:", "memfd:1", "memfd:1:2", "memfd:x:2:/proc/1/fd/3", "memfd:1:2:/"] {
            assert_eq!(Place::named(Path::new(name)), None, "{name:?}");
        }
    }
}
