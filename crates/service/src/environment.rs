//! Environment variables that Ferroce obeys.
//!
//! A program with a set-user-ID or set-group-ID bit or with file capabilities may do what its caller may not, and the caller wrote the
//! environment: what that names would be executed, written or believed with rights that the caller does not have. The kernel marks such
//! programs (`AT_SECURE`, getauxval(3)), and in them no variable is obeyed.

use std::env::VarError;
use std::ffi::OsString;

use crate::sys;

/// The value of a variable; None also in a program that has more rights than its caller.
pub fn var_os(name: &str) -> Option<OsString> {
    if is_foreign() { None } else { std::env::var_os(name) }
}

/// [`var_os`], if it is text.
pub fn var(name: &str) -> Result<String, VarError> {
    var_os(name).ok_or(VarError::NotPresent)?.into_string().map_err(VarError::NotUnicode)
}

/// All that there are; none in a program that has more rights than its caller.
pub(crate) fn vars_os() -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os().filter(|_| !is_foreign())
}

/// Whether the environment is that of somebody with fewer rights.
pub fn is_foreign() -> bool {
    sys::is_secure_execution()
}
