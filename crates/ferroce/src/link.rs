//! The link of a lane: UDP, with the middlewares that the environment asks for.
//!
//! `FERROCE_FAULT=loss=0.01,dup=0.01,seed=7` makes a bad network (see [`FaultConfig`]); `FERROCE_PCAP=FILE` captures what goes over
//! the wire, with `%p` in the name standing for the process id.
//!
//! Between processes of one host packets go through memory (rings) instead, unless one of the two is set, or `FERROCE_SAME_HOST=udp`.

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
    match environment::var("FERROCE_SAME_HOST").as_deref() {
        Err(_) | Ok("" | "ring") => {}
        Ok("udp") => return Ok(None),
        Ok(other) => {
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
    match environment::var("FERROCE_PCAP") {
        Err(_) => with_faults(udp),
        Ok(name) => {
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
    let Ok(spec) = environment::var("FERROCE_FAULT") else { return Ok(Box::new(link)) };
    let config: FaultConfig =
        spec.parse().map_err(|error| Error::new(libc::EINVAL, format!("FERROCE_FAULT is {spec:?}: {error}")))?;
    Ok(Box::new(FaultLink::new(link, &config)))
}
