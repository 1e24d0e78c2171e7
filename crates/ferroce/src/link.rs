//! The link of a lane: UDP, with the middlewares that the environment asks for.
//!
//! `FERROCE_FAULT=loss=0.01,dup=0.01,seed=7` makes a bad network (see [`FaultConfig`]); `FERROCE_PCAP=FILE` captures what goes over
//! the wire, with `%p` in the name standing for the process id.

use std::env;
use std::os::fd::OwnedFd;

use ferroce_link::{FaultConfig, FaultLink, Link, PcapLink, UdpLink, WireHooks};

use crate::error::{Error, Result};

/// Makes the link over a lane's receive sockets.
pub(crate) fn make(rx: Vec<OwnedFd>) -> Result<Box<dyn Link>> {
    let udp = UdpLink::new(rx).map_err(|error| {
        Error::new(error.raw_os_error().unwrap_or(libc::EIO), format!("cannot set up the UDP link: {error}"))
    })?;
    match env::var("FERROCE_PCAP") {
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
    let Ok(spec) = env::var("FERROCE_FAULT") else { return Ok(Box::new(link)) };
    let config: FaultConfig =
        spec.parse().map_err(|error| Error::new(libc::EINVAL, format!("FERROCE_FAULT is {spec:?}: {error}")))?;
    Ok(Box::new(FaultLink::new(link, &config)))
}
