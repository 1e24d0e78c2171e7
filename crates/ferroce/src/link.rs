//! The link of a lane: UDP, with the middlewares that the environment asks for.
//!
//! `FERROCE_FAULT=loss=0.01,dup=0.01,seed=7` makes a bad network (see [`FaultConfig`]); `FERROCE_PCAP=FILE` captures what goes over
//! the wire, with `%p` in the name standing for the process id: a regular file, or a FIFO that somebody reads (`tshark -i`).
//!
//! Between processes of one host packets go through memory (rings) instead, unless one of the two is set, or `FERROCE_SAME_HOST=udp`.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use ferroce_link::fault::FaultConfigError;
use ferroce_link::ring::WakeSocket;
use ferroce_link::{FaultConfig, FaultLink, Link, PcapLink, UdpLink, WireHooks};
use ferroce_service::{environment, regular_file};

use crate::error::{Error, Result};

/// What a lane needs to have rings; None: it is to have none.
///
/// # Errors
/// EINVAL: `FERROCE_SAME_HOST` says what nobody understands.
pub(crate) fn wake_socket() -> Result<Option<WakeSocket>> {
    let by_udp = same_host()? == SameHost::Udp;
    // The other two are about the wire.
    if by_udp || ["FERROCE_PCAP", "FERROCE_FAULT"].iter().any(|name| environment::var_os(name).is_some()) {
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

/// How packets go to other processes of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SameHost {
    /// Through memory.
    Ring,
    /// As to other hosts.
    Udp,
    /// Through memory, and the payload of large WRITEs is fetched from the programs that send it.
    Fetch,
}

/// What `FERROCE_SAME_HOST` says.
pub(crate) fn same_host() -> Result<SameHost> {
    Ok(match environment::word("FERROCE_SAME_HOST", &["ring", "udp", "fetch"])? {
        Some(1) => SameHost::Udp,
        Some(2) => SameHost::Fetch,
        _ => SameHost::Ring,
    })
}

/// What `FERROCE_FAULT` asks for.
pub(crate) fn faults() -> Result<Option<FaultConfig>> {
    let Some(spec) = environment::text("FERROCE_FAULT")? else { return Ok(None) };
    let config = spec.parse().map_err(|error: FaultConfigError| environment::wrong("FERROCE_FAULT", &spec, error))?;
    Ok(Some(config))
}

/// Whether `FERROCE_PCAP` asks for a capture, which can be as far as that shows without touching the file.
pub(crate) fn capture_could_be_written() -> Result<bool> {
    let Some(file) = environment::file_to_write("FERROCE_PCAP")? else { return Ok(false) };
    // Whether a FIFO has a reader, that would notice who looks.
    let is_fifo = std::fs::metadata(&file).is_ok_and(|found| found.file_type().is_fifo());
    if !is_fifo {
        regular_file::could_append(&file).map_err(|error| no_capture(&file, error.raw_os_error(), &error))?;
    }
    Ok(true)
}

fn no_capture(file: &Path, errno: Option<i32>, why: &dyn std::fmt::Display) -> Error {
    let what = format!("cannot write the capture {} that FERROCE_PCAP asks for: {why}", file.display());
    Error::new(errno.unwrap_or(libc::EINVAL), what)
}

/// Makes the link over a lane's receive sockets.
pub(crate) fn make(rx: Vec<OwnedFd>) -> Result<Box<dyn Link>> {
    let udp = UdpLink::new(rx).map_err(|error| {
        Error::new(error.raw_os_error().unwrap_or(libc::EIO), format!("cannot set up the UDP link: {error}"))
    })?;
    match environment::file_to_write("FERROCE_PCAP")? {
        None => with_faults(udp),
        Some(file) => {
            let link = PcapLink::create(udp, &file).map_err(|error| no_capture(&file, Some(error.errno()), &error))?;
            with_faults(link)
        }
    }
}

fn with_faults<L: Link + WireHooks + 'static>(link: L) -> Result<Box<dyn Link>> {
    let Some(config) = faults()? else { return Ok(Box::new(link)) };
    Ok(Box::new(FaultLink::new(link, &config)))
}
