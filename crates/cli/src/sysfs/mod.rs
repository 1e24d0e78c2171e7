//! `ferroce run --sysfs`: a folder that shows Ferroce's devices as Linux's sysfs and /dev show those of cards.
//!
//! Layout and formats are those of Documentation/ABI/stable/sysfs-class-infiniband in the kernel's source.

mod folder;
mod mount;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use ferroce::{Device, PortAttr};
use ferroce_service::devices::DeviceInfo;
use ferroce_service::inspect::{Counted, Snapshot, from_pairs};

use self::folder::Folder;
use crate::programs::{self, Program};

/// How often the counters are written anew.
const INTERVAL: Duration = Duration::from_secs(1);

/// `abi_version` of `ib_uverbs`, which our library answers as (verbs' structures are of that age).
const UVERBS_ABI: u32 = 6;

/// The folder, kept up to date as long as this lives, and gone then.
pub(crate) struct Sysfs {
    folder: Folder,
    /// Dropped, it ends the thread.
    alive: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sysfs {
    /// Makes the folder with all devices.
    pub(crate) fn make() -> Result<Sysfs> {
        let devices = ferroce::devices()?;
        let folder = Folder::make_in(&std::env::temp_dir())?;
        let tree = Tree { root: folder.path().to_owned() };
        let filled = tree.fill(&devices);
        filled.with_context(|| format!("cannot write in {}", folder.path().display()))?;
        let names: Vec<String> = devices.iter().map(|device| device.name().to_owned()).collect();
        let (alive, ended) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("sysfs".into()).spawn(move || {
            let mut totals = Totals::default();
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                // A service that does not answer, or a full disk: the counters stay as they are.
                let Ok(Some(service)) = programs::service() else { continue };
                let Ok(programs) = programs::ask(&service, &[]) else { continue };
                totals.see(&programs);
                for name in &names {
                    let _ = tree.write_counters(name, &totals.of_device(name));
                }
            }
        });
        let thread = Some(thread.context("cannot start a thread")?);
        Ok(Sysfs { folder, alive: Some(alive), thread })
    }

    /// From now on the calling thread, and what it starts, finds the folder's contents where Linux has its own.
    pub(crate) fn mount_for_this_thread(&self) -> Result<()> {
        mount::mount_for_this_thread(self.root())
    }

    /// Where `sys/` and `dev/` are.
    pub(crate) fn root(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Sysfs {
    fn drop(&mut self) {
        drop(self.alive.take());
        // It must not write into a folder that is being removed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Writes the folder.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn fill(&self, devices: &[std::sync::Arc<Device>]) -> io::Result<()> {
        self.write("sys/class/infiniband_verbs/abi_version", UVERBS_ABI)?;
        for device in devices {
            self.device(&device.info(), device.index(), &device.port())?;
        }
        // The connection manager's.
        self.null("rdma_cm")
    }

    fn device(&self, info: &DeviceInfo, index: u32, port: &PortAttr) -> io::Result<()> {
        let (name, uverbs) = (&info.name, format!("uverbs{index}"));
        let of_device = format!("sys/class/infiniband/{name}");
        let guid = groups(&info.guid.to_be_bytes());
        for (file, text) in [
            ("node_type", "1: CA".to_owned()),
            ("node_guid", guid.clone()),
            ("sys_image_guid", guid),
            ("node_desc", name.clone()),
            ("fw_ver", env!("CARGO_PKG_VERSION").to_owned()),
            ("device/numa_node", of_interface(&info.ifname, "device/numa_node").unwrap_or_else(|| "-1".into())),
        ] {
            self.write(format!("{of_device}/{file}"), text)?;
        }
        self.interface(&format!("{of_device}/device/net/{}", info.ifname), info)?;
        self.port(&format!("{of_device}/ports/1"), info, port)?;
        self.write_counters(name, &from_pairs(ferroce::Counters::default().snapshot()))?;

        let of_verbs = format!("sys/class/infiniband_verbs/{uverbs}");
        self.write(format!("{of_verbs}/ibdev"), name)?;
        self.write(format!("{of_verbs}/abi_version"), 1)?;
        self.null(&uverbs)?;
        self.null(name)
    }

    /// The device's interface. Not a link into /sys/class/net, which may be that of another network namespace.
    fn interface(&self, of_interface: &str, info: &DeviceInfo) -> io::Result<()> {
        let mac = info.mac.map(|byte| format!("{byte:02x}")).join(":");
        for (file, text) in [
            ("address", mac),
            ("ifindex", info.ifindex.to_string()),
            ("mtu", info.mtu.to_string()),
            ("operstate", if info.up { "up" } else { "down" }.to_owned()),
        ] {
            self.write(format!("{of_interface}/{file}"), text)?;
        }
        Ok(())
    }

    fn port(&self, of_port: &str, info: &DeviceInfo, port: &PortAttr) -> io::Result<()> {
        for (file, text) in [
            ("state", if port.active { "4: ACTIVE" } else { "1: DOWN" }),
            ("phys_state", if port.active { "5: LinkUp" } else { "3: Disabled" }),
            ("link_layer", "Ethernet"),
            // As `ibv_query_port` has it: what a port of unknown speed shows.
            ("rate", "10 Gb/sec (1X QDR)"),
            ("lid", "0x0"),
            ("lid_mask_count", "0"),
            ("sm_lid", "0x0"),
            ("sm_sl", "0"),
            ("pkeys/0", "0xffff"),
        ] {
            self.write(format!("{of_port}/{file}"), text)?;
        }
        for (index, entry) in info.gids.iter().enumerate() {
            self.write(format!("{of_port}/gids/{index}"), groups(&entry.gid))?;
            self.write(format!("{of_port}/gid_attrs/types/{index}"), "RoCE v2")?;
            self.write(format!("{of_port}/gid_attrs/ndevs/{index}"), &info.ifname)?;
        }
        Ok(())
    }

    /// Writes a device's counters: its own names below `hw_counters`, those of all ports below `counters`.
    fn write_counters(&self, name: &str, counted: &Counted) -> io::Result<()> {
        /// `port_xmit_data` and `port_rcv_data` count words.
        const WORD: u64 = 4;
        let of_port = format!("sys/class/infiniband/{name}/ports/1");
        let value = |name: &str| counted.get(name).copied().unwrap_or(0);
        for (file, value) in [
            ("port_xmit_packets", value("sent_pkts")),
            ("port_rcv_packets", value("rcvd_pkts")),
            ("port_xmit_data", value("sent_bytes") / WORD),
            ("port_rcv_data", value("rcvd_bytes") / WORD),
        ] {
            self.write(format!("{of_port}/counters/{file}"), value)?;
        }
        counted.iter().try_for_each(|(file, value)| self.write(format!("{of_port}/hw_counters/{file}"), value))
    }

    /// Writes a file of one line. A reader sees the old one or the new one.
    fn write(&self, file: impl AsRef<Path>, text: impl std::fmt::Display) -> io::Result<()> {
        let path = self.root.join(file);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        // Outside of the folders that programs list.
        let fresh = self.root.join("fresh");
        fs::write(&fresh, format!("{text}\n"))?;
        fs::rename(fresh, path)
    }

    /// A device node: a character device that may be read and written. There is nothing behind it: programs only look whether it is
    /// there, for who opens it is the verbs library. (A node of our own would need a privilege.)
    fn null(&self, name: &str) -> io::Result<()> {
        let folder = self.root.join("dev/infiniband");
        fs::create_dir_all(&folder)?;
        symlink("/dev/null", folder.join(name))
    }
}

/// What all programs counted, those that have ended included.
#[derive(Default)]
struct Totals {
    /// By process id and device.
    seen: BTreeMap<(u32, String), Counted>,
}

impl Totals {
    fn see(&mut self, programs: &[Program]) {
        for Program { client, answer } in programs {
            let Ok(Snapshot { devices, .. }) = answer else { continue };
            for row in devices {
                self.seen.insert((client.pid, row.device.clone()), row.counters.clone());
            }
        }
    }

    /// Only counters that we know: their names become names of files.
    fn of_device(&self, device: &str) -> Counted {
        let mut sum = from_pairs(ferroce::Counters::default().snapshot());
        for (_, counted) in self.seen.iter().filter(|((_, name), _)| name == device) {
            for (name, value) in &mut sum {
                *value = value.saturating_add(counted.get(name).copied().unwrap_or(0));
            }
        }
        sum
    }
}

/// A file of an interface, without its line end.
fn of_interface(ifname: &str, file: &str) -> Option<String> {
    let text = fs::read_to_string(Path::new("/sys/class/net").join(ifname).join(file)).ok()?;
    Some(text.trim().to_owned())
}

/// GUIDs and GIDs: groups of four digits.
fn groups(bytes: &[u8]) -> String {
    let group = |pair: &[u8]| pair.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    bytes.chunks(2).map(group).collect::<Vec<_>>().join(":")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileTypeExt;

    use ferroce::GidEntry;
    use ferroce_service::inspect::DeviceRow;
    use ferroce_service::protocol::ClientStatus;

    use super::*;

    fn info() -> DeviceInfo {
        let addr: std::net::IpAddr = [192, 0, 2, 7].into();
        let gid = std::net::Ipv4Addr::new(192, 0, 2, 7).to_ipv6_mapped().octets();
        DeviceInfo {
            name: "ferroce0".into(),
            ifname: "eth7".into(),
            ifindex: 7,
            guid: 0x0200_00ff_fe00_0001,
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            up: true,
            loopback: false,
            gids: vec![GidEntry { gid, addr }; 2],
        }
    }

    #[test]
    fn a_device_looks_as_in_sysfs() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let tree = Tree { root: dir.path().to_owned() };
        let port = PortAttr { active: true, max_mtu: 4096, active_mtu: 1024, gid_tbl_len: 2 };
        tree.device(&info(), 3, &port).expect("can write");
        let read = |file: &str| fs::read_to_string(dir.path().join("sys/class").join(file)).expect(file);
        for (file, text) in [
            ("infiniband/ferroce0/node_guid", "0200:00ff:fe00:0001\n"),
            ("infiniband/ferroce0/ports/1/state", "4: ACTIVE\n"),
            ("infiniband/ferroce0/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:c000:0207\n"),
            ("infiniband/ferroce0/ports/1/gid_attrs/types/1", "RoCE v2\n"),
            ("infiniband/ferroce0/ports/1/gid_attrs/ndevs/0", "eth7\n"),
            ("infiniband/ferroce0/ports/1/hw_counters/rnr_wait_us", "0\n"),
            ("infiniband/ferroce0/device/net/eth7/address", "02:00:00:00:00:01\n"),
            ("infiniband/ferroce0/device/net/eth7/mtu", "1500\n"),
            ("infiniband_verbs/uverbs3/ibdev", "ferroce0\n"),
        ] {
            assert_eq!(read(file), text, "{file}");
        }
        for node in ["ferroce0", "uverbs3"] {
            let kind = fs::metadata(dir.path().join("dev/infiniband").join(node)).expect("is there").file_type();
            assert!(kind.is_char_device(), "{node}");
        }
        let net = fs::read_dir(dir.path().join("sys/class/infiniband/ferroce0/device/net")).expect("is there");
        let net: Vec<_> = net.map(|entry| entry.expect("can be read")).collect();
        assert_eq!(net.iter().map(fs::DirEntry::file_name).collect::<Vec<_>>(), ["eth7"]);
        assert!(net[0].file_type().expect("can be read").is_dir(), "this machine has no such interface");
        assert!(!dir.path().join("fresh").exists());
    }

    #[test]
    fn counters_do_not_shrink_when_a_program_ends_and_have_no_names_of_a_program_s_choice() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let tree = Tree { root: dir.path().to_owned() };
        let program = |pid, sent| {
            let counters = from_pairs([("sent_bytes", sent), ("../../../../escape", 1)]);
            let row = DeviceRow { device: "ferroce0".into(), counters, ..DeviceRow::default() };
            let answer = Ok(Snapshot { devices: vec![row], ..Snapshot::default() });
            Program { client: ClientStatus { pid, ..ClientStatus::default() }, answer }
        };
        let mut totals = Totals::default();
        totals.see(&[program(1, 400), program(2, 40)]);
        totals.see(&[program(2, 80)]);
        tree.write_counters("ferroce0", &totals.of_device("ferroce0")).expect("can write");
        let of_port = dir.path().join("sys/class/infiniband/ferroce0/ports/1");
        assert_eq!(fs::read_to_string(of_port.join("counters/port_xmit_data")).expect("is there"), "120\n");
        assert_eq!(fs::read_to_string(of_port.join("hw_counters/sent_bytes")).expect("is there"), "480\n");
        assert!(
            !of_port.join("hw_counters/../../../../escape").exists() && !totals.of_device("x").contains_key("escape")
        );
    }
}
