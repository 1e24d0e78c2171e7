//! Whether anybody is at an address: `rdma_resolve_addr` says so within its timeout, as Linux's does, instead of leaving it to the
//! connection manager's retries, which take a minute.
//!
//! The kernel's table of neighbours knows who takes packets on a link (the peer, or the gateway before it). What it does not know it
//! finds out by ARP or neighbour discovery when it has a packet for somebody: an empty UDP datagram to the discard port, which needs no
//! privilege. Where the kernel cannot be asked (a sandbox, a firewall, a kernel before 5.1) the answer is that there is nothing to wait
//! for, and the connection manager finds out.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SendFlags;

use super::protocol::Path;
use super::route::bound_socket;
use crate::netlink::{self, IFF_LOOPBACK, IFF_NOARP, IFF_POINTOPOINT, NextHop};

/// How often the kernel is made to ask again: it gives up after three seconds by itself.
const AGAIN: Duration = Duration::from_secs(1);
/// Anything there, or not, takes a datagram to this port without an effect (RFC 863).
const DISCARD: u16 = 9;
/// States of a neighbour whose hardware address is known, or needs not be: NUD_REACHABLE, STALE, DELAY, PROBE, NOARP, PERMANENT.
const NUD_VALID: u16 = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80;

/// A host on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Neighbour {
    ifindex: u32,
    addr: IpAddr,
}

/// Somebody whom the kernel does not know yet, before a peer or the peer itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Unknown {
    neighbour: Neighbour,
    local: IpAddr,
    remote: IpAddr,
    /// Interface of a link-local address, else 0.
    scope: u32,
}

impl Unknown {
    /// Whom the kernel asks for: the peer, or the gateway to it.
    pub fn addr(&self) -> IpAddr {
        self.neighbour.addr
    }

    /// Whether the kernel knows it by now; true also if that cannot be found out.
    pub fn is_known(&self) -> bool {
        is_known(self.neighbour)
    }

    /// Makes the kernel ask.
    fn provoke(&self) -> Result<(), Errno> {
        let from = socket_addr(self.local, 0, self.scope);
        let socket = bound_socket(from).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let to = socket_addr(self.remote, DISCARD, self.scope);
        match rustix::net::sendto(&socket, &[], SendFlags::DONTWAIT, &to) {
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Makes the kernel ask anew; it may know by now.
    pub fn ask_again(&self) -> bool {
        if let Err(errno) = self.provoke() {
            log::debug!("the kernel cannot be made to look for {}: {errno}", self.addr());
        }
        self.is_known()
    }
}

/// Whom to wait for before packets of a path can arrive; none if the kernel knows already, or there is nobody to be known. The kernel
/// is asking when this returns.
pub fn unknown(path: &Path) -> Option<Unknown> {
    let hop = netlink::next_hop(path.local, path.remote, path.ifindex)
        .inspect_err(|errno| log::debug!("no way to {}: {errno}", path.remote))
        .ok()?;
    let NextHop { ifindex, addr, is_unicast } = hop;
    let neighbour = Neighbour { ifindex, addr };
    if !is_unicast || is_known(neighbour) || !has_neighbours(ifindex) {
        return None;
    }
    let unknown = Unknown { neighbour, local: path.local, remote: path.remote, scope: path.ifindex };
    match unknown.provoke() {
        Ok(()) => Some(unknown),
        Err(errno) => {
            log::debug!("the kernel cannot be made to look for {addr}: {errno}");
            None
        }
    }
}

fn is_known(of: Neighbour) -> bool {
    match netlink::neighbour(of.ifindex, of.addr) {
        Ok(neighbour) => neighbour.state & NUD_VALID != 0,
        Err(Errno::NOENT) => false,
        Err(errno) => {
            log::debug!("the kernel does not tell of neighbour {}: {errno}", of.addr);
            true
        }
    }
}

/// Whether hosts on the link have hardware addresses. (In tunnels they have none.)
fn has_neighbours(ifindex: u32) -> bool {
    let links = netlink::links().unwrap_or_default();
    let link = links.iter().find(|link| link.index == ifindex);
    link.is_some_and(|link| link.flags & (IFF_LOOPBACK | IFF_NOARP | IFF_POINTOPOINT) == 0)
}

fn socket_addr(ip: IpAddr, port: u16, scope: u32) -> SocketAddr {
    match ip {
        IpAddr::V4(v4) => (v4, port).into(),
        IpAddr::V6(v6) => SocketAddrV6::new(v6, port, 0, scope).into(),
    }
}

/// Questions that are open: `T` is what each was asked for. Without a clock: the time is passed in.
#[derive(Debug)]
pub struct Inquiries<T> {
    open: Vec<Inquiry<T>>,
}

#[derive(Debug)]
struct Inquiry<T> {
    whom: Unknown,
    /// None: further away than any clock counts.
    deadline: Option<Instant>,
    again: Instant,
    about: T,
}

impl<T> Default for Inquiries<T> {
    fn default() -> Self {
        Inquiries::new()
    }
}

impl<T> Inquiries<T> {
    /// None is open.
    pub const fn new() -> Inquiries<T> {
        Inquiries { open: Vec::new() }
    }

    /// Waits for somebody, for `timeout` at most.
    pub fn open(&mut self, now: Instant, whom: Unknown, timeout: Duration, about: T) {
        self.open.push(Inquiry { whom, deadline: now.checked_add(timeout), again: now + AGAIN, about });
    }

    /// True: nothing is waited for.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Forgets questions. False: there were none.
    pub fn cancel(&mut self, which: impl Fn(&T) -> bool) -> bool {
        !self.take(|inquiry| which(&inquiry.about)).is_empty()
    }

    /// When to call [`Inquiries::expired`] and [`Inquiries::due`] again.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.open.iter().map(|inquiry| inquiry.deadline.map_or(inquiry.again, |at| at.min(inquiry.again))).min()
    }

    /// The kernel has news: takes the questions that they answer.
    pub fn hear(&mut self, now: Instant, news: &News) -> Vec<T> {
        match news {
            News::Known(known) => {
                let known: HashSet<&Neighbour> = known.iter().collect();
                self.take(|inquiry| known.contains(&inquiry.whom.neighbour))
            }
            News::Lost => {
                self.open.iter_mut().for_each(|inquiry| inquiry.again = now);
                Vec::new()
            }
        }
    }

    /// Takes the questions about those who are known now.
    pub fn answered(&mut self, known: &[Unknown]) -> Vec<T> {
        let known: HashSet<&Unknown> = known.iter().collect();
        self.take(|inquiry| known.contains(&inquiry.whom))
    }

    /// Takes those whose time is over.
    pub fn expired(&mut self, now: Instant) -> Vec<T> {
        self.take(|inquiry| inquiry.deadline.is_some_and(|deadline| deadline <= now))
    }

    /// Whom the kernel should be made to ask for anew, from time to time: [`Unknown::ask_again`].
    pub fn due(&mut self, now: Instant) -> Vec<Unknown> {
        let due = self.open.iter_mut().filter(|inquiry| inquiry.again <= now);
        let whom = due.map(|inquiry| {
            inquiry.again = now + AGAIN;
            inquiry.whom
        });
        let mut seen = HashSet::new();
        whom.filter(|whom| seen.insert(*whom)).collect()
    }

    fn take(&mut self, mut which: impl FnMut(&Inquiry<T>) -> bool) -> Vec<T> {
        self.open.extract_if(.., |inquiry| which(inquiry)).map(|inquiry| inquiry.about).collect()
    }
}

/// What the kernel tells of neighbours.
#[derive(Debug)]
pub enum News {
    /// These are known now.
    Known(Vec<Neighbour>),
    /// There were more than it kept.
    Lost,
}

/// Where the kernel tells of neighbours as they change.
#[derive(Debug)]
pub struct NewsSocket(OwnedFd);

impl NewsSocket {
    /// # Errors
    /// Those of socket(2) and bind(2).
    pub fn open() -> std::io::Result<NewsSocket> {
        Ok(NewsSocket(netlink::neighbour_changes()?))
    }

    /// Readable when there are news.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// What has been told since the last time; never waits.
    pub fn read(&self) -> News {
        /// Others may change neighbours faster than this reads.
        const READS_MAX: usize = 256;
        let mut known = Vec::new();
        for _ in 0..READS_MAX {
            match netlink::changed_neighbours(&self.0) {
                Ok(changed) => {
                    let valid = changed.into_iter().filter(|neighbour| neighbour.state & NUD_VALID != 0);
                    known.extend(valid.map(|netlink::Neighbour { ifindex, addr, .. }| Neighbour { ifindex, addr }));
                }
                Err(Errno::AGAIN) => return News::Known(known),
                Err(_) => break,
            }
        }
        News::Lost
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn host(last: u8) -> Unknown {
        let addr = IpAddr::from([192, 0, 2, last]);
        Unknown { neighbour: Neighbour { ifindex: 3, addr }, local: [192, 0, 2, 1].into(), remote: addr, scope: 0 }
    }

    fn ms(number: u64) -> Duration {
        Duration::from_millis(number)
    }

    #[test]
    fn an_answer_ends_the_question() {
        let now = Instant::now();
        let mut inquiries = Inquiries::new();
        inquiries.open(now, host(7), ms(2_000), "seven");
        inquiries.open(now, host(8), ms(2_000), "eight");
        assert_eq!(inquiries.hear(now, &News::Known(vec![host(9).neighbour, host(8).neighbour])), ["eight"]);
        assert_eq!(inquiries.answered(&[host(8)]), [""; 0]);
        assert!(!inquiries.is_empty());
        assert_eq!(inquiries.answered(&[host(7)]), ["seven"]);
        assert!(inquiries.is_empty());
        assert_eq!(inquiries.next_timeout(), None);
    }

    #[test]
    fn each_has_its_own_time() {
        let now = Instant::now();
        let mut inquiries = Inquiries::new();
        inquiries.open(now, host(7), ms(300), "short");
        inquiries.open(now, host(7), ms(700), "long");
        assert_eq!(inquiries.next_timeout(), Some(now + ms(300)));
        assert_eq!(inquiries.expired(now + ms(299)), [""; 0]);
        assert_eq!(inquiries.expired(now + ms(300)), ["short"]);
        assert_eq!(inquiries.next_timeout(), Some(now + ms(700)));
        assert_eq!(inquiries.expired(now + ms(5_000)), ["long"]);
    }

    #[test]
    fn no_time_at_all_is_over_at_once() {
        let now = Instant::now();
        let mut inquiries = Inquiries::new();
        inquiries.open(now, host(7), Duration::ZERO, ());
        assert_eq!(inquiries.expired(now).len(), 1);
    }

    #[test]
    fn the_kernel_is_made_to_ask_again_each_second() {
        let now = Instant::now();
        let mut inquiries = Inquiries::new();
        inquiries.open(now, host(7), ms(u32::MAX.into()), ());
        assert_eq!(inquiries.next_timeout(), Some(now + AGAIN));
        assert_eq!(inquiries.due(now + ms(999)), []);
        assert_eq!(inquiries.due(now + AGAIN), [host(7)]);
        assert_eq!(inquiries.due(now + AGAIN), []);
        assert_eq!(inquiries.next_timeout(), Some(now + AGAIN + AGAIN));
    }

    /// Only neighbours in the list were told apart: two hosts by turns were asked for as often as somebody waited for them.
    #[test]
    fn each_is_asked_for_once_however_many_wait() {
        let now = Instant::now();
        let mut inquiries = Inquiries::new();
        for last in [7, 8, 7, 8] {
            inquiries.open(now, host(last), ms(2_000), ());
        }
        assert_eq!(inquiries.due(now + AGAIN), [host(7), host(8)]);
    }

    #[test]
    fn after_lost_news_all_are_looked_at() {
        let now = Instant::now();
        let mut inquiries = Inquiries::new();
        inquiries.open(now, host(7), ms(2_000), ());
        assert_eq!(inquiries.hear(now, &News::Lost).len(), 0);
        assert_eq!(inquiries.due(now), [host(7)]);
    }

    #[test]
    fn what_is_given_up_is_not_answered() {
        let now = Instant::now();
        let mut inquiries = Inquiries::new();
        inquiries.open(now, host(7), ms(300), 1);
        inquiries.open(now, host(7), ms(300), 2);
        assert!(inquiries.cancel(|number| *number == 1));
        assert!(!inquiries.cancel(|number| *number == 1));
        assert_eq!(inquiries.expired(now + ms(300)), [2]);
    }

    #[test]
    fn nobody_is_asked_for_this_host() {
        let here = IpAddr::from(Ipv4Addr::LOCALHOST);
        let path = Path {
            local: here,
            remote: here,
            ifindex: 0,
            mtu: 5,
            ack_timeout: 17,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
        };
        assert_eq!(unknown(&path), None);
    }
}
