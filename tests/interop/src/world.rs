//! The wire and both hosts on it: a namespace with a tap for Ferroce, the guest with rxe behind the tap.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use program_tests::failure::Failure;
use program_tests::launch::{Identity, Launcher};
use program_tests::net::Namespace;
use program_tests::parse;
use program_tests::process::Running;
use tempfile::TempDir;

use crate::capture::Tap;
use crate::ends::{End, Side};
use crate::guest::{Guest, Machine};
use crate::kernel::Kernel;
use crate::table::{Family, Place};
use crate::trouble::Trouble;

/// Ferroce's interface.
const TAP: &str = "tap0";
/// The guest's interface.
const CARD: &str = "eth0";
const MAC: &str = "52:54:00:88:00:02";
/// Addresses of the two: Ferroce's, the guest's.
const V4: [&str; 2] = ["10.88.0.1", "10.88.0.2"];
const V6: [&str; 2] = ["fd00:88::1", "fd00:88::2"];
/// Longest time of a small command in the guest.
const SMALL: Duration = Duration::from_secs(60);

/// Both hosts.
pub struct World {
    // Order of fields is order of dropping: programs and the guest end before the namespace is removed.
    guest: Option<Guest>,
    namespace: Namespace,
    launcher: Launcher,
    machine: Machine,
    place: Option<&'static Place>,
    gids: BTreeMap<&'static str, [u32; 2]>,
    /// Folder in which programs leave counters and captures; theirs to write.
    notes: TempDir,
}

impl World {
    /// Makes the wire and boots the guest, whose root is made of the programs `launcher` compiled and this machine's.
    pub fn new(kernel: Kernel, root: PathBuf, launcher: Launcher) -> Result<World, Trouble> {
        let namespace = Namespace::new().map_err(Trouble::network)?;
        let network = || -> Result<(), Failure> {
            namespace.ip(&["tuntap", "add", TAP, "mode", "tap"])?;
            namespace.address(TAP, 1500, &[&format!("{}/24", V4[0]), &format!("{}/64", V6[0])])
        };
        network().map_err(Trouble::network)?;
        let notes = tempfile::Builder::new()
            .prefix("ferroce-interop-")
            .tempdir()
            .and_then(|dir| fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).map(|()| dir))
            .map_err(|e| Trouble::program(Failure::new(format!("cannot make a temporary folder: {e}"))))?;
        let netns = namespace.name().to_owned();
        let machine = Machine { kernel, root, netns, tap: TAP.to_owned(), mac: MAC, memory_mib: 1024 };
        Ok(World { guest: None, namespace, launcher, machine, place: None, gids: BTreeMap::new(), notes })
    }

    /// Makes sure that the guest is up and the wire is as `place` wants it, for programs on both sides.
    pub fn enter(&mut self, place: &'static Place) -> Result<(), Trouble> {
        let before = self.place;
        self.boot(place)?;
        if self.gids.is_empty() {
            self.watch_icrc()?;
        }
        if before.is_none_or(|old| old.name != place.name) || !self.gids.contains_key(place.name) {
            self.look_up_gids(place)?;
        }
        Ok(())
    }

    /// Makes sure that the guest is up and the wire is as `place` wants it; what programs on Ferroce need is not looked for.
    pub fn boot(&mut self, place: &'static Place) -> Result<(), Trouble> {
        if self.guest.is_none() {
            self.guest = Some(Guest::boot(&self.machine).map_err(Trouble::guest)?);
            self.place = None;
            let v4 = format!("{}/24", V4[1]);
            let v6 = format!("{}/64", V6[1]);
            for command in [
                "ip link set lo up",
                &format!("ip link set {CARD} up"),
                &format!("ip addr add {v4} dev {CARD}"),
                &format!("ip addr add {v6} dev {CARD} nodad"),
            ] {
                self.guest_command(command)?;
            }
            // What it said while booting is of no use later.
            self.kernel_log();
        }
        if self.place.is_none_or(|old| old.mtu != place.mtu) {
            self.set_mtu(place.mtu)?;
        }
        if self.place.is_none_or(|old| old.name != place.name) {
            self.reachable()?;
        }
        self.place = Some(place);
        Ok(())
    }

    /// rxe takes the path MTU of its interface when it is made.
    fn set_mtu(&mut self, mtu: u32) -> Result<(), Trouble> {
        self.namespace.ip(&["link", "set", TAP, "mtu", &mtu.to_string()]).map_err(Trouble::network)?;
        if self.place.is_some() {
            self.guest_command("rdma link del rxe0")?;
        }
        self.guest_command(&format!("ip link set {CARD} mtu {mtu}"))?;
        self.guest_command(&format!("rdma link add rxe0 type rxe netdev {CARD}"))
    }

    /// rxe has no counter of packets that it drops because their ICRC is wrong, so its check is watched by a probe.
    fn watch_icrc(&self) -> Result<(), Trouble> {
        const SCRIPT: &str = "set -e; busybox mount -t tracefs tracefs /sys/kernel/tracing; cd /sys/kernel/tracing; \
                              echo 'r:ferroce/icrc rxe_icrc_check ret=$retval:s32' > kprobe_events; \
                              echo 'ret != 0' > events/ferroce/icrc/filter; echo 1 > events/ferroce/icrc/enable";
        let run = || self.agent()?.run(&["/bin/busybox", "sh", "-c", SCRIPT], SMALL)?.check_success();
        run().map_err(|failure| {
            Trouble::guest(Failure::new("the guest's ICRC check cannot be watched").with(failure.to_string()))
        })
    }

    fn look_up_gids(&mut self, place: &'static Place) -> Result<(), Trouble> {
        let listed = [
            self.on_ferroce("ibv_devinfo", &["-v".to_owned()], &[], "ibv_devinfo").map_err(Trouble::program)?,
            self.on_kernel("ibv_devinfo", &["-v".to_owned()], SMALL, "ibv_devinfo").map_err(Trouble::guest)?,
        ];
        let finished = crate::ends::wait_all(listed.into(), SMALL).map_err(Trouble::program)?;
        let index = |side: usize| {
            let wanted = match place.family {
                Family::V4 => format!("::ffff:{}", V4[side]),
                Family::V6 => V6[side].to_owned(),
            };
            let gids = parse::gids(&finished[side].stdout);
            let found = gids.iter().find(|(_, gid)| *gid == wanted).map(|(index, _)| *index);
            found.ok_or_else(|| {
                let failure = Failure::new(format!("no GID is {wanted}")).with(finished[side].report());
                if side == 0 { Trouble::program(failure) } else { Trouble::guest(failure) }
            })
        };
        self.gids.insert(place.name, [index(0)?, index(1)?]);
        Ok(())
    }

    /// Is a guest up, or was at last?
    pub fn has_guest(&self) -> bool {
        self.guest.is_some()
    }

    /// Forgets the guest, so that the next line boots a new one.
    pub fn drop_guest(&mut self) {
        self.guest = None;
        self.gids.clear();
    }

    fn guest(&self) -> Result<&Guest, Failure> {
        self.guest.as_ref().ok_or_else(|| Failure::new("there is no guest"))
    }

    /// Who starts programs in the guest.
    pub fn agent(&self) -> Result<&crate::remote::Agent, Failure> {
        Ok(self.guest()?.agent())
    }

    /// Release of the guest's kernel.
    pub fn kernel(&self) -> &str {
        &self.machine.kernel.release
    }

    /// Folder in which programs may write.
    pub fn notes(&self) -> &Path {
        self.notes.path()
    }

    /// Name of the tap device in it, behind which the guest is.
    pub fn tap(&self) -> &'static str {
        TAP
    }

    /// The namespace of the wire.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Index of the GID of `place` on a side.
    pub fn gid(&self, place: &Place, side: Side) -> u32 {
        let gids = self.gids.get(place.name).expect("the place was entered");
        gids[side as usize]
    }

    /// Address of a side for the programs' own TCP connection; stock programs know only IPv4 there.
    pub fn address(side: Side) -> &'static str {
        V4[side as usize]
    }

    /// The address of a side that is of the family of `place`.
    pub fn address_in(place: &Place, side: Side) -> &'static str {
        match place.family {
            Family::V4 => V4[side as usize],
            Family::V6 => V6[side as usize],
        }
    }

    /// A `ferroce status --json` in the namespace of the wire.
    pub fn status(&self) -> Command {
        let args = ["status".into(), "--json".into()];
        self.launcher.plain(
            Some(self.namespace.name()),
            Identity::Ordinary,
            &[],
            self.launcher.ferroce().as_os_str(),
            &args,
        )
    }

    /// Captures into `file` what passes the tap.
    pub fn capture(&self, file: &Path) -> Result<Tap, Failure> {
        Tap::start(self.namespace.name(), TAP, file, &self.launcher.output())
    }

    /// Starts a program on Ferroce, in a process with the environment `env`.
    pub fn on_ferroce(&self, program: &str, args: &[String], env: &[(&str, &str)], name: &str) -> Result<End, Failure> {
        let own = self.launcher.programs().join(program);
        let program = if own.is_file() { own.into_os_string() } else { program.into() };
        let args: Vec<std::ffi::OsString> = args.iter().map(Into::into).collect();
        let netns = Some(self.namespace.name());
        let command = self.launcher.command(netns, Identity::Ordinary, env, &program, &args);
        Ok(End::Here(Running::start(name, command, &self.launcher.output())?))
    }

    /// Starts a program in the guest.
    pub fn on_kernel(&self, program: &str, args: &[String], limit: Duration, name: &str) -> Result<End, Failure> {
        let argv: Vec<String> = std::iter::once(format!("/bin/{program}")).chain(args.iter().cloned()).collect();
        End::there(self.agent()?, name, &argv, limit)
    }

    /// An error if the guest or the network is not in order.
    pub fn check(&mut self) -> Result<(), Trouble> {
        if let Some(guest) = &mut self.guest {
            guest.check().map_err(Trouble::guest)?;
        }
        self.reachable()
    }

    /// An error unless the guest answers to ICMP over both families.
    fn reachable(&self) -> Result<(), Trouble> {
        for address in [V4[1], V6[1]] {
            // There is a second between two questions; the first may be lost in a guest that is busy.
            let ping = |count| self.namespace.exec(&["busybox", "ping", "-c", count, "-W", "5", address]);
            ping("1").or_else(|_| ping("2")).map_err(|failure| {
                Trouble::network(
                    Failure::new(format!("the guest does not answer from {address}")).with(failure.to_string()),
                )
            })?;
        }
        Ok(())
    }

    /// Runs a small command in the guest.
    pub fn guest_command(&self, line: &str) -> Result<(), Trouble> {
        let argv: Vec<&str> = line.split_whitespace().collect();
        let run = || self.guest()?.agent().run(&argv, SMALL)?.check_success();
        run().map_err(|failure| {
            Trouble::guest(Failure::new(format!("`{line}` failed in the guest")).with(failure.to_string()))
        })
    }

    /// rxe's counters; `udp_datagrams`, which the guest received; `icrc_checked` and `icrc_errors`, once watched.
    pub fn kernel_counters(&self) -> Result<BTreeMap<String, u64>, Failure> {
        // Read by the agent itself: to start programs for it would take a tenth of a short line's time.
        const FILES: &[&str] = &[
            "/sys/class/infiniband/rxe0/ports/1/hw_counters/*",
            "/proc/net/snmp",
            "/proc/net/snmp6",
            "/sys/kernel/tracing/kprobe_profile",
            "/sys/kernel/tracing/trace",
        ];
        let counters = counters(&self.agent()?.read(FILES, SMALL)?);
        if counters.contains_key("rcvd_pkts") { Ok(counters) } else { Err(Failure::new("rxe has no counters")) }
    }

    /// What the kernel said since the last time that this was asked, the end of it.
    pub fn kernel_log(&self) -> String {
        const LINES: usize = 60;
        let script = format!("busybox dmesg -c | busybox tail -n {LINES}");
        let run = || self.agent()?.run(&["/bin/busybox", "sh", "-c", &script], SMALL);
        run().map(|finished| finished.stdout).unwrap_or_default()
    }
}

/// Numbers in the files of `kernel_counters`, by path.
fn counters(files: &[(String, String)]) -> BTreeMap<String, u64> {
    let mut counters = BTreeMap::from([("udp_datagrams".to_owned(), 0)]);
    for (path, text) in files {
        let (folder, name) = path.rsplit_once('/').unwrap_or_default();
        let found = match name {
            _ if folder.ends_with("hw_counters") => text.trim().parse().ok().map(|value| (name, value)),
            "snmp" | "snmp6" => datagrams(text).map(|value| ("udp_datagrams", value)),
            "kprobe_profile" => icrc_checked(text).map(|value| ("icrc_checked", value)),
            "trace" => entries_written(text).map(|value| ("icrc_errors", value)),
            _ => None,
        };
        if let Some((name, value)) = found {
            *counters.entry(name.to_owned()).or_default() += value;
        }
    }
    counters
}

/// Datagrams received: "Udp: 56 0 0" below a line of names, or "Udp6InDatagrams 7".
fn datagrams(text: &str) -> Option<u64> {
    text.lines().find_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
        ["Udp:" | "Udp6InDatagrams", value, ..] => value.parse().ok(),
        _ => None,
    })
}

/// "  icrc  HITS  MISSED": all checks that were made, wrong ICRC or not.
fn icrc_checked(text: &str) -> Option<u64> {
    text.lines().find_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
        ["icrc", hits, ..] => hits.parse().ok(),
        _ => None,
    })
}

/// "# entries-in-buffer/entries-written: 2/2   #P:1": one entry for each check that failed.
fn entries_written(text: &str) -> Option<u64> {
    let (_, counts) = text.split_once("entries-written:")?;
    counts.split_whitespace().next()?.split('/').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_the_kernel() {
        let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
        let counters = counters(&[
            file("/sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts", "12\n"),
            file("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts", "34\n"),
            file("/proc/net/snmp", "Tcp: Min\nTcp: 5\nUdp: InDatagrams NoPorts InErrors\nUdp: 56 0 0\n"),
            file("/proc/net/snmp6", "Udp6InDatagrams                 \t7\nUdp6NoPorts 8\n"),
            file("/sys/kernel/tracing/kprobe_profile", "  icrc                  61               0\n"),
            file("/sys/kernel/tracing/trace", "# tracer: nop\n# entries-in-buffer/entries-written: 2/3   #P:1\n"),
        ]);
        assert_eq!((counters["rcvd_pkts"], counters["sent_pkts"], counters["udp_datagrams"]), (12, 34, 63));
        assert_eq!((counters["icrc_checked"], counters["icrc_errors"]), (61, 3));
    }
}
