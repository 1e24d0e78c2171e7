//! Where a capture goes: a regular file, or a FIFO that somebody reads. Writing never waits, and raises no signal in the program.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Why no capture can be written.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// A device, a folder or a socket.
    #[error("it is neither a regular file nor a FIFO; name one of these, or a file that is not there yet")]
    WrongKind,
    /// Another process captures to it. Both would write over each other's records.
    #[error("another process captures to it; put %p into the name, which stands for the process id")]
    Taken,
    /// A FIFO at whose other end is nobody.
    #[error("nobody reads this FIFO; start the reader first, as `tshark -i FIFO`")]
    NoReader,
    /// It cannot be opened or written.
    #[error(transparent)]
    System(#[from] io::Error),
}

impl CaptureError {
    /// The error number of C (positive).
    pub fn errno(&self) -> i32 {
        match self {
            CaptureError::WrongKind => libc::EINVAL,
            CaptureError::Taken => libc::EBUSY,
            CaptureError::NoReader => libc::ENXIO,
            CaptureError::System(error) => error.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

/// The open file. What a FIFO has no room for is answered by `WouldBlock`.
pub(crate) struct CaptureFile(File);

impl CaptureFile {
    /// Opens a file, which begins anew, or a FIFO.
    pub(crate) fn open(path: &Path) -> Result<CaptureFile, CaptureError> {
        // Before it is opened, because that alone can do something; and after, because the first may be outdated.
        if let Ok(found) = std::fs::metadata(path) {
            check_kind(found.file_type())?;
        }
        let mut options = OpenOptions::new();
        // A FIFO would wait for its reader, and later for each byte to be read.
        options.write(true).create(true).truncate(false).custom_flags(libc::O_NONBLOCK);
        let file = options.open(path).map_err(|error| match error.raw_os_error() {
            Some(libc::ENXIO) => CaptureError::NoReader,
            _ => CaptureError::System(error),
        })?;
        let kind = file.metadata()?.file_type();
        check_kind(kind)?;
        // Where a file system has no locks, nobody is told apart.
        if flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
            return Err(CaptureError::Taken);
        }
        if kind.is_file() {
            file.set_len(0)?;
        }
        Ok(CaptureFile(file))
    }
}

fn check_kind(kind: std::fs::FileType) -> Result<(), CaptureError> {
    if kind.is_file() || kind.is_fifo() { Ok(()) } else { Err(CaptureError::WrongKind) }
}

impl Write for CaptureFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        without_signals(|| self.0.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes, and takes back the signal that a failure raises for this thread: SIGPIPE if a FIFO's reader is gone, SIGXFSZ above the
/// limit of a file's size. Either would end a program that knows nothing of a capture.
fn without_signals(write: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
    let raised = SigSet::from_iter([Signal::SIGPIPE, Signal::SIGXFSZ]);
    let before = raised.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let written = write();
    if written.as_ref().is_err_and(|error| matches!(error.raw_os_error(), Some(libc::EPIPE | libc::EFBIG))) {
        // Without a descriptor for it, the signal stays: better than to wait for one that was not raised.
        let taken = SignalFd::with_flags(&raised, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC);
        let _ = taken.and_then(|pending| pending.read_signal());
    }
    before.thread_set_mask()?;
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_neither_a_file_nor_a_fifo_is_refused() {
        for path in ["/dev/full", "/dev/zero", "/"] {
            let refused = CaptureFile::open(Path::new(path)).err().expect("is refused");
            assert!(matches!(refused, CaptureError::WrongKind), "{path}: {refused}");
        }
        let error = CaptureFile::open(Path::new("/nowhere/x.pcap")).err().expect("there is no such folder");
        assert_eq!(error.errno(), libc::ENOENT);
    }
}
