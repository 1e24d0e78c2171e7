//! Devices: one for each interface that is up and has an address.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferroce_core::sync::{Mutex, MutexGuard};
use ferroce_service::cm::route;
use ferroce_service::devices::{self, DeviceInfo, ListOptions};
use ferroce_service::environment;

pub use ferroce_service::devices::GidEntry;

use crate::context::Context;
use crate::error::{Error, Result};

/// Bytes that headers may take of the interface's MTU: IPv6, UDP, BTH, the largest extended headers and the ICRC, as kernel rxe
/// counts them, so that both choose the same path MTU.
const HEADER_ROOM: u32 = 80;
/// How old what we know of an interface may be.
const FRESH: Duration = Duration::from_millis(50);

/// All devices ever listed in this process, by their index, so that a device is the same object each time. One lock for all: it is
/// held across a fork, so that the child finds it open.
static KNOWN: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

/// A device of this host.
#[derive(Debug)]
pub struct Device {
    name: String,
    index: u32,
    ifindex: u32,
}

/// A device and what is known of it.
#[derive(Debug)]
pub(crate) struct Entry {
    device: Arc<Device>,
    known: Known,
}

#[derive(Debug)]
struct Known {
    info: DeviceInfo,
    present: bool,
    at: Instant,
}

/// Keeps the table consistent across a fork.
pub(crate) fn hold() -> MutexGuard<'static, Vec<Entry>> {
    KNOWN.lock()
}

/// State of a device's port (there is one, number 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// The interface is up: `IBV_PORT_ACTIVE`, else `IBV_PORT_DOWN`.
    pub active: bool,
    /// Largest path MTU that the device supports, in bytes.
    pub max_mtu: u32,
    /// Largest path MTU that the interface's MTU allows now, in bytes.
    pub active_mtu: u32,
    /// Entries of the GID table.
    pub gid_tbl_len: u32,
}

/// The devices of this host, the default route's interface first. The same device is the same `Arc` each time.
///
/// # Errors
/// ENODEV with the reason when no interface qualifies (a fresh network namespace has loopback down). EINVAL: `FERROCE_LOOPBACK` says
/// what nobody understands.
pub fn devices() -> Result<Vec<Arc<Device>>> {
    let infos = devices::list(options()?)?;
    let mut known = KNOWN.lock();
    Ok(infos.into_iter().map(|info| remember(&mut known, info)).collect())
}

/// The device that has an address, and the address's index in its GID table. The loopback device is found too, which [`devices()`] lists
/// only when it is asked to.
///
/// # Errors
/// ENODEV: no device has it.
pub fn device_of(addr: IpAddr) -> Result<(Arc<Device>, u32)> {
    let all = devices::list(EVERY)?;
    let (info, index) = route::device_of(all, addr)
        .ok_or_else(|| Error::new(libc::ENODEV, format!("no RDMA device has the address {addr}")))?;
    Ok((remember(&mut KNOWN.lock(), info), index as u32))
}

/// The device of a name, as [`device_of`] finds it.
///
/// # Errors
/// ENODEV: there is none.
pub fn device_named(name: &str) -> Result<Arc<Device>> {
    let info = devices::list(EVERY)?.into_iter().find(|info| info.name == name);
    let info = info.ok_or_else(|| Error::new(libc::ENODEV, format!("there is no device {name} any more")))?;
    Ok(remember(&mut KNOWN.lock(), info))
}

/// The interfaces as they are now; none if they cannot be listed.
pub(crate) fn list_now() -> Vec<DeviceInfo> {
    devices::list(EVERY).unwrap_or_default()
}

/// With the loopback device.
const EVERY: ListOptions = ListOptions { loopback: true };

fn options() -> Result<ListOptions> {
    let asked = environment::word("FERROCE_LOOPBACK", &["0", "1"])?;
    Ok(ListOptions { loopback: asked == Some(1) })
}

fn remember(table: &mut Vec<Entry>, info: DeviceInfo) -> Arc<Device> {
    let (name, ifindex) = (info.name.clone(), info.ifindex);
    let known = Known { info, present: true, at: Instant::now() };
    if let Some(entry) = table.iter_mut().find(|entry| entry.device.name == name && entry.device.ifindex == ifindex) {
        entry.known = known;
        return Arc::clone(&entry.device);
    }
    let device = Arc::new(Device { name, index: table.len() as u32, ifindex });
    table.push(Entry { device: Arc::clone(&device), known });
    device
}

impl Device {
    /// `ferroce0` and so on.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A number for the device, unique in this process (`ibv_get_device_index`).
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The interface behind it.
    pub fn ifname(&self) -> String {
        self.with_known(|known| known.info.ifname.clone())
    }

    /// Index of the interface.
    pub fn ifindex(&self) -> u32 {
        self.ifindex
    }

    /// Node GUID as a number (most significant byte first on the wire).
    pub fn guid(&self) -> u64 {
        self.with_known(|known| known.info.guid)
    }

    /// What the interface looks like now.
    pub fn info(&self) -> DeviceInfo {
        self.refresh();
        self.with_known(|known| known.info.clone())
    }

    /// State of port 1.
    pub fn port(&self) -> PortAttr {
        self.refresh();
        self.with_known(|known| PortAttr {
            active: known.present && known.info.up,
            max_mtu: 4096,
            active_mtu: path_mtu(known.info.mtu),
            gid_tbl_len: known.info.gids.len() as u32,
        })
    }

    /// The GID table, by index.
    pub fn gids(&self) -> Vec<GidEntry> {
        self.refresh();
        self.with_known(|known| known.info.gids.clone())
    }

    /// One entry of the GID table.
    ///
    /// # Errors
    /// ENODATA: no such index.
    pub fn gid(&self, index: u32) -> Result<GidEntry> {
        let gids = self.gids();
        gids.get(index as usize).cloned().ok_or_else(|| {
            let have = gids.len().saturating_sub(1);
            Error::new(libc::ENODATA, format!("GID index {index} of {} is empty: indices 0 to {have} exist", self.name))
        })
    }

    /// The address that a GID index stands for.
    pub(crate) fn source(&self, sgid_index: u32) -> Result<IpAddr> {
        self.gid(sgid_index)
            .map(|entry| entry.addr)
            .map_err(|error| Error::new(libc::EINVAL, format!("sgid_index: {error}")))
    }

    /// Opens it. The first open in a process asks the service for a lane and starts the service if need be.
    ///
    /// # Errors
    /// What the service says: port 4791 held by someone else (EADDRINUSE, the owner is named), no `ferroced` to start (ENOENT) ...
    pub fn open(self: &Arc<Self>) -> Result<Arc<Context>> {
        Context::open(Arc::clone(self))
    }

    fn refresh(&self) {
        if self.with_known(|known| known.at.elapsed() < FRESH) {
            return;
        }
        // An interface that went away leaves its last state, marked as down.
        let listed = list_now();
        self.with_known(|known| {
            known.at = Instant::now();
            match listed.into_iter().find(|info| info.ifindex == self.ifindex) {
                Some(info) => {
                    known.info = info;
                    known.present = true;
                }
                None => known.present = false,
            }
        });
    }

    fn with_known<T>(&self, look: impl FnOnce(&mut Known) -> T) -> T {
        look(&mut KNOWN.lock()[self.index as usize].known)
    }
}

/// The largest path MTU (256 to 4096) that fits into an interface's MTU.
fn path_mtu(mtu: u32) -> u32 {
    [4096, 2048, 1024, 512].into_iter().find(|path| path + HEADER_ROOM <= mtu).unwrap_or(256)
}

#[cfg(test)]
mod tests {
    use super::path_mtu;

    #[test]
    fn path_mtu_as_kernel_rxe_chooses_it() {
        assert_eq!(path_mtu(65_536), 4096);
        assert_eq!(path_mtu(9000), 4096);
        assert_eq!(path_mtu(4175), 2048);
        assert_eq!(path_mtu(1500), 1024);
        assert_eq!(path_mtu(576), 256);
    }
}
