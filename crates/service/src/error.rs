//! The one error type of the crate.

use rustix::io::Errno;

/// Why the service or the list of devices could not do what was asked.
///
/// The text says what failed, why, and what to do about it; `errno` is what a
/// C caller of verbs is told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct ServiceError {
    errno: i32,
    what: String,
}

impl ServiceError {
    /// An error with the number a C caller gets and the sentence a human gets.
    pub fn new(errno: i32, what: impl Into<String>) -> ServiceError {
        ServiceError { errno, what: what.into() }
    }

    /// A failed system call: `what` names the attempt, the reason is appended.
    pub(crate) fn system(what: impl AsRef<str>, errno: Errno) -> ServiceError {
        ServiceError { errno: errno.raw_os_error(), what: format!("{}: {}", what.as_ref(), describe(errno)) }
    }

    /// The error number (positive, as in `errno`).
    pub fn errno(&self) -> i32 {
        self.errno
    }
}

impl From<ServiceError> for std::io::Error {
    fn from(error: ServiceError) -> std::io::Error {
        let kind = std::io::Error::from_raw_os_error(error.errno).kind();
        std::io::Error::new(kind, error)
    }
}

/// The system's own words for an error number.
pub(crate) fn describe(errno: Errno) -> String {
    std::io::Error::from_raw_os_error(errno.raw_os_error()).to_string()
}
