//! Environment variables that Ferroce obeys.
//!
//! An empty variable is as one that is not set, whatever it is called: `FERROCE_PCAP= command` captures nothing. A value that cannot be
//! is refused in one line, which [`wrong`] makes. README.md has the table of all variables (`cargo xtask check` compares).
//!
//! A program with a set-user-ID or set-group-ID bit or with file capabilities may do what its caller may not, and the caller wrote the
//! environment: what that names would be executed, written or believed with rights that the caller does not have. The kernel marks such
//! programs (`AT_SECURE`, getauxval(3)), and in them no variable is obeyed.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use crate::{ServiceError, sys};

/// The value of a variable; None also if it is empty, and in a program that has more rights than its caller.
pub fn var_os(name: &str) -> Option<OsString> {
    if is_foreign() { None } else { set(std::env::var_os(name)) }
}

/// `FERROCE_LOG`, which every program obeys; None also if it is empty.
pub fn log_level() -> Option<OsString> {
    set(std::env::var_os("FERROCE_LOG"))
}

/// [`var_os`] as text.
///
/// # Errors
/// EINVAL: it is no text.
pub fn text(name: &str) -> Result<Option<String>, ServiceError> {
    var_os(name).map(|value| as_text(name, value)).transpose()
}

/// [`text`] as the name of a file that a process writes, in which `%p` stands for the process id.
///
/// # Errors
/// EINVAL: it is no text.
pub fn file_to_write(name: &str) -> Result<Option<PathBuf>, ServiceError> {
    Ok(text(name)?.map(|file| with_pid(&file, std::process::id())))
}

/// [`text`] where only some words are allowed; gives the index of the one that it is.
///
/// # Errors
/// EINVAL: it is none of them. The text names all, the first one as what counts without the variable.
pub fn word(name: &str, allowed: &[&str]) -> Result<Option<usize>, ServiceError> {
    text(name)?.map(|value| index(name, &value, allowed)).transpose()
}

/// The refusal of a value: names the variable, what it is, and what is allowed.
pub fn wrong(name: &str, value: impl AsRef<OsStr>, allowed: impl std::fmt::Display) -> ServiceError {
    /// As much of the value as is shown, in characters.
    const SHOWN_MAX: usize = 80;
    let value = format!("{:?}", value.as_ref());
    let (shown, rest) = value.char_indices().nth(SHOWN_MAX).map_or((&*value, ""), |(at, _)| (&value[..at], "..."));
    ServiceError::new(libc::EINVAL, format!("{name} is {shown}{rest}: {allowed}; correct it, or unset it"))
}

/// Whether the environment is that of somebody with fewer rights.
pub fn is_foreign() -> bool {
    sys::is_secure_execution()
}

/// All that there are; none in a program that has more rights than its caller.
pub(crate) fn vars_os() -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os().filter(|_| !is_foreign())
}

fn set(value: Option<OsString>) -> Option<OsString> {
    value.filter(|value| !value.is_empty())
}

fn as_text(name: &str, value: OsString) -> Result<String, ServiceError> {
    value.into_string().map_err(|value| wrong(name, value, "it must be text in UTF-8"))
}

fn with_pid(file: &str, pid: u32) -> PathBuf {
    file.replace("%p", &pid.to_string()).into()
}

fn index(name: &str, value: &str, allowed: &[&str]) -> Result<usize, ServiceError> {
    allowed.iter().position(|word| *word == value).ok_or_else(|| {
        let (default, others) = allowed.split_first().expect("something is allowed");
        wrong(name, value, format_args!("it can be {default} (as without it) or {}", others.join(" or ")))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn an_empty_variable_is_as_one_that_is_not_set() {
        assert_eq!(set(None), None);
        assert_eq!(set(Some("".into())), None);
        assert_eq!(set(Some(" ".into())), Some(" ".into()));
    }

    /// It counted as unset for one part of the library, and as set for another.
    #[test]
    fn a_variable_that_is_no_text_is_refused() {
        assert_eq!(as_text("FERROCE_PCAP", "/tmp/%p".into()).unwrap(), "/tmp/%p");
        let error = as_text("FERROCE_PCAP", OsString::from_vec(b"/tmp/\xff".to_vec())).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
        assert!(error.to_string().starts_with(r#"FERROCE_PCAP is "/tmp/\xFF": it must be text in UTF-8"#), "{error}");
    }

    #[test]
    fn a_word_that_is_not_allowed_is_told_with_those_that_are() {
        assert_eq!(index("FERROCE_LOOPBACK", "1", &["0", "1"]), Ok(1));
        assert_eq!(
            index("FERROCE_LOOPBACK", "yes", &["0", "1"]).unwrap_err().to_string(),
            r#"FERROCE_LOOPBACK is "yes": it can be 0 (as without it) or 1; correct it, or unset it"#
        );
    }

    #[test]
    fn a_refusal_is_one_short_line() {
        let text = wrong("X", "\u{1b}[31m\n".repeat(1000), "it can be 1").to_string();
        assert!(text.starts_with("X is \"\\u{1b}[31m\\n"), "{text}");
        assert!(text.len() < 200 && !text.contains(char::is_control), "{text}");
    }

    #[test]
    fn a_file_is_named_after_its_process() {
        assert_eq!(with_pid("/tmp/x.%p.pcap", 7), PathBuf::from("/tmp/x.7.pcap"));
    }
}
