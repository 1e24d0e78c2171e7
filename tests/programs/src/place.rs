//! Places: between which two hosts a line's programs run, over what, by which addresses.

use std::ffi::OsString;
use std::sync::OnceLock;
use std::time::Duration;

use crate::failure::Failure;
use crate::launch::{Identity, Launcher};
use crate::net::{self, Namespace};
use crate::parse;
use crate::process::{Running, wait_all};

/// How the two ends of a place are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Two processes of one host with an ordinary interface, by its own address.
    Host,
    /// Two processes of one host that has only loopback (FERROCE_LOOPBACK=1).
    Loopback,
    /// Two network namespaces joined by veth.
    Veth,
    /// As veth, but the receiver merges packets and the sender cuts them, as with cards.
    Card,
}

/// Address family of the GIDs in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Family {
    V4,
    V6,
}

/// A place of the matrix.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// First part of the ids of its lines.
    pub name: &'static str,
    /// What joins the ends.
    pub shape: Shape,
    /// MTU of the interface, in bytes.
    pub mtu: u32,
    /// Addresses in use.
    pub family: Family,
    /// False where the interface has no IPv4 address at all.
    pub has_v4: bool,
}

/// One end of a place.
#[derive(Debug)]
pub struct Host {
    netns: Option<String>,
    /// Address that the other end connects to.
    pub address: &'static str,
    /// Address of the side channel of programs that know only IPv4 there.
    pub address_v4: Option<&'static str>,
    /// Environment of programs.
    pub env: &'static [(&'static str, &'static str)],
    /// Address family of the GIDs in use.
    pub family: Family,
    /// Path MTU that the interface allows, in bytes.
    pub path_mtu: u32,
    gids: OnceLock<Vec<(u32, String)>>,
}

/// A place made real. Dropping it removes its namespaces with all that runs in them.
#[derive(Debug)]
pub struct Wire {
    /// The place.
    pub place: &'static Place,
    /// Where servers run.
    pub server: Host,
    /// Where clients run.
    pub client: Host,
    namespaces: Vec<Namespace>,
}

const NO_ENV: &[(&str, &str)] = &[];
const LOOPBACK_ENV: &[(&str, &str)] = &[("FERROCE_LOOPBACK", "1")];

impl Place {
    /// The path MTU that RoCE makes of the interface's, in bytes.
    pub fn path_mtu(&self) -> u32 {
        // Bytes of Ethernet payload that headers of the longest kind take: IPv6, UDP, BTH, DETH, RETH or AtomicETH, ICRC.
        const HEADERS: u32 = 40 + 8 + 12 + 8 + 28 + 4;
        [4096, 2048, 1024, 512, 256].into_iter().find(|mtu| mtu + HEADERS <= self.mtu).unwrap_or(256)
    }

    /// Makes the place.
    pub fn make(&'static self) -> Result<Wire, Failure> {
        let left = Namespace::new()?;
        let mut namespaces = Vec::new();
        let (v4, v6) = (["10.65.0.1", "10.65.0.2"], ["fd65::1", "fd65::2"]);
        let addresses = |i: usize| {
            let mut list = vec![format!("{}/64", v6[i])];
            if self.has_v4 {
                list.insert(0, format!("{}/24", v4[i]));
            }
            list
        };
        let put = |namespace: &Namespace, i: usize| {
            let addresses = addresses(i);
            namespace.address("eth0", self.mtu, &addresses.iter().map(String::as_str).collect::<Vec<_>>())
        };
        let mut ends = [0, 1];
        match self.shape {
            Shape::Loopback => {}
            Shape::Host => {
                // The other end of the cable is in the same namespace, without an address: an interface that is up.
                left.ip(&["link", "add", "eth0", "type", "veth", "peer", "name", "cable"])?;
                left.address("cable", self.mtu, &[])?;
                put(&left, 0)?;
                left.ip(&["route", "add", "default", "dev", "eth0"])?;
                ends = [0, 0];
            }
            Shape::Veth | Shape::Card => {
                let right = Namespace::new()?;
                net::join(&left, &right)?;
                for (i, namespace) in [&left, &right].into_iter().enumerate() {
                    put(namespace, i)?;
                    if self.shape == Shape::Card {
                        namespace.behave_like_card("eth0")?;
                    }
                }
                namespaces.push(right);
            }
        }
        namespaces.insert(0, left);
        let loopback = self.shape == Shape::Loopback;
        let host = |namespace: &Namespace, i: usize| {
            let v4 = if loopback { "127.0.0.1" } else { v4[i] };
            let v6 = if loopback { "::1" } else { v6[i] };
            Host {
                netns: Some(namespace.name().to_owned()),
                address: if self.family == Family::V4 { v4 } else { v6 },
                address_v4: self.has_v4.then_some(v4),
                env: if loopback { LOOPBACK_ENV } else { NO_ENV },
                family: self.family,
                path_mtu: self.path_mtu(),
                gids: OnceLock::new(),
            }
        };
        let server = host(&namespaces[0], ends[0]);
        let client = host(&namespaces[namespaces.len() - 1], ends[1]);
        Ok(Wire { place: self, server, client, namespaces })
    }
}

impl Wire {
    /// The namespaces of the place, the server's first.
    pub fn namespaces(&self) -> &[Namespace] {
        &self.namespaces
    }
}

impl Host {
    /// The network namespace; `None`: the harness's own.
    pub fn netns(&self) -> Option<&str> {
        self.netns.as_deref()
    }

    /// Index of the GID of the place's family.
    ///
    /// An IPv4 address, where there is one, is GID 0: that promise is used here and so tested. Others are looked up
    /// once, as a person does, with `ibv_devinfo -v`.
    pub fn gid_index(&self, launcher: &Launcher) -> Result<u32, Failure> {
        if self.family == Family::V4 {
            return Ok(0);
        }
        if self.gids.get().is_none() {
            let command =
                launcher.command(self.netns(), Identity::Ordinary, self.env, "ibv_devinfo".as_ref(), &["-v".into()]);
            let running = Running::start("ibv_devinfo", command, &launcher.output())?;
            let finished = wait_all(vec![running], Duration::from_secs(30))?.remove(0);
            self.gids.get_or_init(|| parse::gids(&finished.stdout));
        }
        let gids = self.gids.get().expect("was set just now");
        let found = gids.iter().find(|(_, gid)| gid == self.address);
        found.map(|(index, _)| *index).ok_or_else(|| {
            let list: Vec<String> = gids.iter().map(|(index, gid)| format!("{index}: {gid}")).collect();
            Failure::new(format!("ibv_devinfo lists no GID for {}; it lists {}", self.address, list.join(", ")))
        })
    }

    /// A command on this host.
    pub fn command<A: Into<OsString>>(
        &self,
        launcher: &Launcher,
        program: impl Into<OsString>,
        args: impl IntoIterator<Item = A>,
    ) -> std::process::Command {
        let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
        launcher.command(self.netns(), Identity::Ordinary, self.env, &program.into(), &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::PLACES;

    fn place(name: &str) -> &'static Place {
        PLACES.iter().find(|place| place.name == name).expect("is in the table")
    }

    #[test]
    fn path_mtus() {
        assert_eq!(place("veth1500-v4").path_mtu(), 1024);
        assert_eq!(place("veth9000-v6").path_mtu(), 4096);
        assert_eq!(place("loop-v4").path_mtu(), 4096);
    }

    #[test]
    fn places_are_made_where_root_may() {
        if !rustix::process::geteuid().is_root() {
            place("host-v4").make().expect_err("an ordinary user may not");
            return;
        }
        for place in PLACES {
            let wire = place.make().unwrap_or_else(|e| panic!("{}: {e}", place.name));
            let expected = if matches!(place.shape, Shape::Veth | Shape::Card) { 2 } else { 1 };
            assert_eq!(wire.namespaces().len(), expected, "{}", place.name);
            let client = &wire.namespaces()[expected - 1];
            client.ip(&["route", "get", wire.server.address]).unwrap_or_else(|e| panic!("{}: {e}", place.name));
        }
    }
}
