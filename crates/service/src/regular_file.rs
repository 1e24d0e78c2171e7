//! Regular files, where somebody else says which: a variable, or the configuration. Whoever opens a FIFO waits for its other end; a device
//! may have no end, or do whatever it likes.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The text of a file of no more than `bytes_max` bytes.
///
/// # Errors
/// InvalidInput: it is no regular file. FileTooLarge: it has more bytes. Others: it cannot be opened, or is no text.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<String> {
    check(&std::fs::metadata(path)?, "it is no regular file")?;
    let file = open(path, OpenOptions::new().read(true), "it is no regular file")?;
    let mut text = String::new();
    if file.take(bytes_max.saturating_add(1)).read_to_string(&mut text)? as u64 > bytes_max {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {bytes_max} bytes")));
    }
    Ok(text)
}

/// Opens a file to append to; makes it if it is not there.
///
/// # Errors
/// InvalidInput: it is no regular file, or one that keeps nothing, as those of /proc. Others: it cannot be opened.
pub fn append(path: &Path) -> io::Result<File> {
    const REFUSED: &str = "it is no regular file; name one, or one that is not there yet";
    if let Ok(found) = std::fs::metadata(path) {
        check(&found, REFUSED)?;
    }
    let file = open(path, OpenOptions::new().append(true).create(true), REFUSED)?;
    if keeps_no_text(&file) {
        let what = "what is written there is no file's text, but does something to the system; name another file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    Ok(file)
}

/// Whether [`append`] would open a file, as far as that shows without making one.
///
/// # Errors
/// Those of [`append`].
pub fn could_append(path: &Path) -> io::Result<()> {
    if path.exists() {
        return append(path).map(drop);
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(rustix::fs::access(folder, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)?)
}

/// Whether a file looks like a regular one, and is a window to something in the kernel (`/proc/self/mem`).
fn keeps_no_text(file: &File) -> bool {
    /// `*_MAGIC` of linux/magic.h and of those that have theirs elsewhere: proc, sysfs, debugfs, tracefs, cgroup, cgroup2, securityfs,
    /// configfs, bpf, selinuxfs, smackfs, efivarfs, pstorefs, binfmt_misc, nsfs.
    const WINDOWS: [u32; 15] = [
        0x9fa0,
        0x6265_6572,
        0x6462_6720,
        0x7472_6163,
        0x0027_e0eb,
        0x6367_7270,
        0x7363_6673,
        0x6265_6570,
        0xcafe_4a11,
        0xf97c_ff8c,
        0x4341_5d53,
        0xde5e_81e4,
        0x6165_676c,
        0x4249_4e4d,
        0x6e73_6673,
    ];
    rustix::fs::fstatfs(file).is_ok_and(|found| WINDOWS.contains(&(found.f_type as u32)))
}

/// Opens what was found to be a regular file: to open anything else can do something by itself. That may be outdated, so it is looked at again.
fn open(path: &Path, options: &mut OpenOptions, refused: &str) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NONBLOCK).open(path)?;
    check(&file.metadata()?, refused)?;
    Ok(file)
}

fn check(found: &Metadata, refused: &str) -> io::Result<()> {
    if found.is_file() { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, refused)) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = ferroce_testkit::SharedFolder::new();
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        for path in ["/dev/full", "/dev/zero", "/", fifo.to_str().unwrap()] {
            let path = Path::new(path);
            for error in [read(path, 1).unwrap_err(), append(path).unwrap_err()] {
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{}", path.display());
                assert!(error.to_string().starts_with("it is no regular file"), "{error}");
            }
        }
        assert_eq!(could_append(Path::new("/nowhere/file")).unwrap_err().raw_os_error(), Some(libc::ENOENT));
        for error in [read(Path::new("/nowhere/file"), 1).unwrap_err(), append(Path::new("/nowhere/file")).unwrap_err()]
        {
            assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
        }
    }

    /// Counters for /proc/self/mem went nowhere, without a word.
    #[test]
    fn a_window_to_the_kernel_is_no_file_for_text() {
        for path in ["/proc/self/mem", "/proc/self/comm"] {
            let error = append(Path::new(path)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path}");
            assert!(error.to_string().contains("name another file"), "{error}");
        }
    }

    #[test]
    fn what_is_appended_is_read_up_to_the_limit() {
        let folder = ferroce_testkit::SharedFolder::new();
        let path = folder.path().join("file");
        could_append(&path).unwrap();
        assert!(!path.exists());
        for part in ["ab", "c"] {
            append(&path).unwrap().write_all(part.as_bytes()).unwrap();
        }
        could_append(&path).unwrap();
        assert_eq!(read(&path, 3).unwrap(), "abc");
        assert_eq!(read(&path, 2).unwrap_err().to_string(), "it has more than 2 bytes");
    }
}
