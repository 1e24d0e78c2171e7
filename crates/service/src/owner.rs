//! Who holds a UDP port: the kernel's list of sockets, and the descriptors of processes.

use std::collections::HashSet;
use std::path::Path;

use crate::netlink;

/// A UDP socket that is bound to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PortSocket {
    pub(crate) uid: u32,
    /// 0: a socket of the kernel itself.
    pub(crate) inode: u64,
}

/// All sockets of this network namespace that are bound to `port`. None: the kernel does not tell.
///
/// Neither source is one look at everything: a socket may be missed while others come and go. So this looks several
/// times; what was seen once may have gone, what was never seen is not there.
pub(crate) fn sockets_of_port(port: u16) -> Option<HashSet<PortSocket>> {
    const LOOKS: usize = 3;
    let looks: Vec<_> = (0..LOOKS).map_while(|_| from_netlink(port).or_else(|| from_proc(port))).collect();
    (looks.len() == LOOKS).then(|| looks.into_iter().flatten().collect())
}

fn from_netlink(port: u16) -> Option<Vec<PortSocket>> {
    let sockets =
        netlink::udp_sockets(port).inspect_err(|errno| log::debug!("no list of UDP sockets: {errno}")).ok()?;
    Some(sockets.into_iter().map(|socket| PortSocket { uid: socket.uid, inode: socket.inode }).collect())
}

fn from_proc(port: u16) -> Option<Vec<PortSocket>> {
    let tables = ["/proc/self/net/udp", "/proc/self/net/udp6"];
    let texts: Vec<String> = tables.iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect();
    if texts.is_empty() {
        return None;
    }
    Some(texts.iter().flat_map(|text| parse(text, port)).collect())
}

fn parse(table: &str, port: u16) -> Vec<PortSocket> {
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let mut fields = line.split_ascii_whitespace();
            let (_, local_port) = fields.nth(1)?.rsplit_once(':')?;
            if u16::from_str_radix(local_port, 16).ok()? != port {
                return None;
            }
            let uid = fields.nth(5)?.parse().ok()?;
            let inode = fields.nth(1)?.parse().ok()?;
            Some(PortSocket { uid, inode })
        })
        .collect()
}

/// "`name` (pid 1, uid 2)" of whoever holds these sockets, as far as it may be seen.
pub(crate) fn describe(sockets: &HashSet<PortSocket>) -> String {
    const NAMED_MAX: usize = 4;
    let Some(first) = sockets.iter().next() else {
        return "a program that cannot be seen from here".into();
    };
    if sockets.iter().all(|socket| socket.inode == 0) {
        return "the kernel itself (rdma_rxe?)".into();
    }
    let processes = processes_of(sockets);
    if processes.is_empty() {
        return format!("a program of uid {}, whose processes cannot be seen from here", first.uid);
    }
    let named: Vec<String> =
        processes.iter().take(NAMED_MAX).map(|(name, pid)| format!("{name} (pid {pid})")).collect();
    let rest = if processes.len() > NAMED_MAX { " and others" } else { "" };
    format!("{}{rest}, uid {}", named.join(", "), first.uid)
}

/// Names and pids of the processes that hold one of these sockets.
fn processes_of(sockets: &HashSet<PortSocket>) -> Vec<(String, u32)> {
    const PROCESSES_MAX: usize = 65_536;
    let targets: HashSet<String> = sockets.iter().map(|socket| format!("socket:[{}]", socket.inode)).collect();
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .take(PROCESSES_MAX)
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            holds(&entry.path().join("fd"), &targets).then(|| {
                let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
                (name.trim().to_owned(), pid)
            })
        })
        .collect()
}

fn holds(descriptors: &Path, targets: &HashSet<String>) -> bool {
    let Ok(entries) = std::fs::read_dir(descriptors) else {
        return false;
    };
    entries
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .any(|link| link.to_str().is_some_and(|link| targets.contains(link)))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use ferroce_testkit::free_port;

    use super::*;

    #[test]
    fn finds_this_process_as_the_holder_of_its_port() {
        // Not one that the kernel chooses: it may give the same to a socket at another address.
        let port = free_port();
        let socket = UdpSocket::bind(("127.0.0.1", port)).unwrap();
        let found = sockets_of_port(port).unwrap();
        assert_eq!(found.len(), 1);
        let text = describe(&found);
        assert!(text.contains(&format!("(pid {})", std::process::id())), "{text}");
        drop(socket);
        assert_eq!(sockets_of_port(port).unwrap(), HashSet::new());
    }

    #[test]
    fn both_sources_say_the_same() {
        let port = free_port();
        let _socket = UdpSocket::bind(("::1", port)).unwrap();
        let netlink = from_netlink(port).unwrap();
        assert_eq!(netlink.len(), 1);
        assert_eq!(netlink[0].uid, rustix::process::getuid().as_raw());
        // A single look at /proc may miss it.
        assert!((0..100).any(|_| from_proc(port).unwrap() == netlink));
    }

    #[test]
    fn rows_that_are_cut_off_are_skipped() {
        let table = "  sl  local_address ...\n\
            95: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000  1000        0 4242 2 x 0\n\
            96: 00000000:12B7 00000000:0000 07\n97: bad\n\
            98: 00000000:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4243 2 x 0\n";
        assert_eq!(parse(table, 4791), [PortSocket { uid: 1000, inode: 4242 }]);
    }

    #[test]
    fn kernel_sockets_are_named_as_such() {
        assert!(describe(&HashSet::from([PortSocket { uid: 0, inode: 0 }])).contains("kernel"));
    }
}
