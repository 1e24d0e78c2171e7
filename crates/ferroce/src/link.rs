//! The link of a lane: UDP, with the middlewares that the environment asks for.
//!
//! `FERROCE_FAULT=loss=0.01,dup=0.01,seed=7` makes a bad network (see [`FaultConfig`]); `FERROCE_PCAP=FILE` captures what goes over
//! the wire, with `%p` in the name standing for the process id.
//!
//! Between processes of one host packets go through memory (rings) instead, unless one of the two is set, or `FERROCE_SAME_HOST=udp`.

use std::ffi::OsString;
use std::os::fd::OwnedFd;

use ferroce_link::ring::WakeSocket;
use ferroce_link::{FaultConfig, FaultLink, Link, PcapLink, UdpLink, WireHooks};
use ferroce_service::environment;

use crate::error::{Error, Result};

/// What a lane needs to have rings; None: it is to have none.
///
/// # Errors
/// EINVAL: `FERROCE_SAME_HOST` says what nobody understands.
pub(crate) fn wake_socket() -> Result<Option<WakeSocket>> {
    match variable("FERROCE_SAME_HOST")?.as_deref() {
        None | Some("" | "ring") => {}
        Some("udp") => return Ok(None),
        Some(other) => {
            return Err(Error::new(
                libc::EINVAL,
                format!("FERROCE_SAME_HOST is {other:?}: it can be \"ring\" (the default) or \"udp\""),
            ));
        }
    }
    // Both are about the wire.
    if ["FERROCE_PCAP", "FERROCE_FAULT"].iter().any(|name| environment::var_os(name).is_some()) {
        return Ok(None);
    }
    match WakeSocket::bind() {
        Ok(socket) => Ok(Some(socket)),
        Err(error) => {
            log::debug!("no rings to other processes of this host: {error}");
            Ok(None)
        }
    }
}

/// Makes the link over a lane's receive sockets.
pub(crate) fn make(rx: Vec<OwnedFd>) -> Result<Box<dyn Link>> {
    let udp = UdpLink::new(rx).map_err(|error| {
        Error::new(error.raw_os_error().unwrap_or(libc::EIO), format!("cannot set up the UDP link: {error}"))
    })?;
    match variable("FERROCE_PCAP")? {
        None => with_faults(udp),
        Some(name) => {
            let name = name.replace("%p", &std::process::id().to_string());
            let link = PcapLink::create(udp, &name).map_err(|error| {
                Error::new(
                    error.raw_os_error().unwrap_or(libc::EIO),
                    format!("cannot write the capture {name} that FERROCE_PCAP asks for: {error}"),
                )
            })?;
            with_faults(link)
        }
    }
}

fn with_faults<L: Link + WireHooks + 'static>(link: L) -> Result<Box<dyn Link>> {
    let Some(spec) = variable("FERROCE_FAULT")? else { return Ok(Box::new(link)) };
    let config: FaultConfig =
        spec.parse().map_err(|error| Error::new(libc::EINVAL, format!("FERROCE_FAULT is {spec:?}: {error}")))?;
    Ok(Box::new(FaultLink::new(link, &config)))
}

/// What a variable says.
///
/// # Errors
/// EINVAL: it is no text.
fn variable(name: &str) -> Result<Option<String>> {
    environment::var_os(name).map(|value| text(name, value)).transpose()
}

fn text(name: &str, value: OsString) -> Result<String> {
    value.into_string().map_err(|value| {
        Error::new(libc::EINVAL, format!("{name} is {value:?}, which is no UTF-8: set it to text, or unset it"))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    /// It counted as unset here, and as set where rings are left out for it.
    #[test]
    fn a_variable_that_is_no_text_is_refused() {
        assert_eq!(text("FERROCE_PCAP", "/tmp/%p".into()).unwrap(), "/tmp/%p");
        let error = text("FERROCE_PCAP", OsString::from_vec(b"/tmp/\xff".to_vec())).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
        assert!(error.to_string().starts_with(r#"FERROCE_PCAP is "/tmp/\xFF", which is no UTF-8"#), "{error}");
    }
}
