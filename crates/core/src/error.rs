//! The one error of this crate.

use std::borrow::Cow;

/// A refused command: the errno that verbs prescribes, and a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason} (errno {errno})")]
pub struct CoreError {
    /// Positive errno, as the verbs call returns it.
    pub errno: i32,
    /// What was wrong, and where it helps, what to do.
    pub reason: Cow<'static, str>,
}

impl CoreError {
    /// An error with its errno and reason.
    pub fn new(errno: i32, reason: impl Into<Cow<'static, str>>) -> CoreError {
        CoreError { errno, reason: reason.into() }
    }
}

impl From<CoreError> for std::io::Error {
    fn from(error: CoreError) -> std::io::Error {
        std::io::Error::from_raw_os_error(error.errno)
    }
}
