//! The one error type of the API.

use ferroce_core::CoreError;
use ferroce_service::ServiceError;

/// Why a verb was refused. Displays as one sentence: what is wrong and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Error {
    errno: i32,
    reason: String,
}

impl Error {
    /// An error with the errno of the verb's contract.
    pub fn new(errno: i32, reason: impl Into<String>) -> Error {
        Error { errno, reason: reason.into() }
    }

    /// The errno that the C library gives for it (positive).
    pub fn errno(&self) -> i32 {
        self.errno
    }

    /// What an object says that was made before a fork, in the child.
    pub(crate) fn stale() -> Error {
        Error::new(
            libc::EIO,
            "this object belongs to the parent process: RDMA objects do not survive fork; open the device anew in the child",
        )
    }
}

impl From<CoreError> for Error {
    fn from(error: CoreError) -> Error {
        Error::new(error.errno, error.to_string())
    }
}

impl From<ServiceError> for Error {
    fn from(error: ServiceError) -> Error {
        Error::new(error.errno(), error.to_string())
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Error {
        Error::new(error.raw_os_error().unwrap_or(libc::EIO), error.to_string())
    }
}

/// What verbs return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
