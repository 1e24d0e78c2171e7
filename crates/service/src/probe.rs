//! Finding out at which indices of the kernel's group sockets are that others opened, and whether packets reach their lanes.
//!
//! After the death of keeper and service the sockets of the group that programs have live on, in an order that nobody wrote
//! down. Each index in turn is made the target of all packets, and probes are sent: the socket that gets them is the one there.
//! Their holders read those sockets meanwhile, so that it cannot be seen by reading: a filter drops the probes, and
//! the kernel counts, for each socket, what it dropped. (The holders count it as dropped by the system, too: a few packets
//! for each probing.) Packets of programs that arrive meanwhile come to the wrong lane, which relays them.
//!
//! Probes come from several ports: where an index is beyond the last socket, the kernel chooses a socket by the ports, and always
//! the same one for the same port.

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use ferroce_wire::LANE_SHIFT;

use crate::{steer, sys};

/// Ports that probes are sent from, one from each; the same socket must drop all of them.
const SENDERS: usize = 4;

/// How often a socket's count is looked at after the probes should have been dealt with, and the pause between.
const LOOKS: u32 = 4;
const PAUSE: Duration = Duration::from_micros(50);

/// How long the kernel may take to deal with what was sent; and how often a prober waits so long in vain before it waits no more.
const FENCE_PATIENCE: Duration = Duration::from_millis(100);
const FENCES_MISSED_MAX: u32 = 3;

/// Length of a probe. To whom it comes, it is too short to be a packet.
pub(crate) const MARK_BYTES: usize = 8;

/// What all probes of a prober begin with; a QP number follows, where packets have theirs.
pub(crate) const TAG_BYTES: usize = 5;

/// Attempts at an index where the counts contradict each other.
const ATTEMPTS: u32 = 5;

/// The indices of sockets of one group, in their order; None: not found below `bound`, the number of sockets that the group can have.
///
/// Leaves a program behind that steers everything to one socket: the caller attaches the right one.
pub(crate) fn indices(port: u16, bound: u32, sockets: &[BorrowedFd<'_>]) -> io::Result<Vec<Option<u32>>> {
    let mut found = vec![None; sockets.len()];
    let Some(group) = sockets.first() else { return Ok(found) };
    let prober = Prober::new(port, sockets.to_vec())?;
    let mut left = prober.with_filter.clone();
    for index in 0..bound {
        if left.is_empty() {
            break;
        }
        sys::attach_reuseport_program(*group, &steer::constant(index))?;
        if let Some(socket) = prober.receiver(&left)? {
            found[socket] = Some(index);
            left.retain(|other| *other != socket);
        }
    }
    Ok(found)
}

/// Those of the lanes whose packets do not come to the socket beside them. Changes nothing.
///
/// `TimedOut`: the kernel did not deal with the probes in time, so that nothing can be said.
pub(crate) fn astray(port: u16, lanes: &[(u16, BorrowedFd<'_>)]) -> io::Result<Vec<u16>> {
    let prober = Prober::new(port, lanes.iter().map(|(_, socket)| *socket).collect())?;
    // The kernel loses probes of a full queue: who is missed once is looked for again.
    let missed = prober.missed(lanes, &prober.with_filter)?;
    let astray = prober.missed(lanes, &missed)?;
    Ok(astray.into_iter().map(|at| lanes[at].0).collect())
}

/// Sends probes to sockets that have its filter; takes the filter off when it is dropped.
struct Prober<'a> {
    sockets: Vec<BorrowedFd<'a>>,
    /// Positions of those that have its filter: a program can refuse it, which harms only itself.
    with_filter: Vec<usize>,
    senders: Vec<UdpSocket>,
    to: SocketAddr,
    tag: [u8; TAG_BYTES],
    fence: Fence,
}

impl<'a> Prober<'a> {
    fn new(port: u16, sockets: Vec<BorrowedFd<'a>>) -> io::Result<Prober<'a>> {
        let on = |ip: IpAddr| {
            let senders = (0..SENDERS).map(|_| UdpSocket::bind((ip, 0))).collect::<io::Result<Vec<_>>>()?;
            Ok((senders, Fence::new(ip)?, SocketAddr::new(ip, port)))
        };
        let (senders, fence, to) =
            on(Ipv4Addr::LOCALHOST.into()).or_else(|_: io::Error| on(Ipv6Addr::LOCALHOST.into()))?;
        let tag = rand::random();
        let filter = steer::drop_marked(tag);
        let attach = |at: &usize| {
            let attached = sys::attach_filter(sockets[*at], &filter);
            attached.inspect_err(|error| log::debug!("a socket that takes no filter: {error}")).is_ok()
        };
        let with_filter = (0..sockets.len()).filter(attach).collect();
        Ok(Prober { sockets, with_filter, senders, to, tag, fence })
    }

    /// Which of the sockets gets what is sent now; None: none of them.
    fn receiver(&self, among: &[usize]) -> io::Result<Option<usize>> {
        for _ in 0..ATTEMPTS {
            let seen = self.drops_all(among)?;
            let Some(socket) = seen.by.first().copied() else {
                if seen.certain || self.fence.is_given_up() {
                    return Ok(None);
                }
                continue;
            };
            // A packet on its way under the program before may have been dropped by another one.
            if !self.drops_all(&[socket])?.by.is_empty() {
                return Ok(Some(socket));
            }
        }
        Ok(None)
    }

    fn drops_all(&self, among: &[usize]) -> io::Result<Seen> {
        let before = self.counts(among)?;
        self.send(0)?;
        self.look(among, &before, 1)
    }

    /// Which of the sockets, at positions of the lanes, do not get probes to their lanes. `TimedOut`: that cannot be seen.
    fn missed(&self, lanes: &[(u16, BorrowedFd<'_>)], among: &[usize]) -> io::Result<Vec<usize>> {
        /// So many lanes' probes fit the kernel's queues, whatever else is in them.
        const LANES_AT_ONCE: usize = 32;
        let mut missed = Vec::new();
        for some in among.chunks(LANES_AT_ONCE) {
            let before = self.counts(some)?;
            some.iter().try_for_each(|at| self.send(lanes[*at].0))?;
            let seen = self.look(some, &before, some.len())?;
            let here = missed.len();
            missed.extend(some.iter().filter(|at| !seen.by.contains(at)));
            if missed.len() > here && !seen.certain {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(missed)
    }

    /// Sends one probe from each port.
    fn send(&self, lane: u16) -> io::Result<()> {
        let mut mark = [0; MARK_BYTES];
        mark[..TAG_BYTES].copy_from_slice(&self.tag);
        mark[TAG_BYTES..].copy_from_slice(&(u32::from(lane) << LANE_SHIFT).to_be_bytes()[1..]);
        self.senders.iter().try_for_each(|sender| sender.send_to(&mark, self.to).map(drop))
    }

    fn counts(&self, of: &[usize]) -> io::Result<Vec<u32>> {
        of.iter().map(|socket| sys::drops(self.sockets[*socket])).collect()
    }

    /// Which of the sockets have dropped a probe from each port; looks again for a while if they are fewer than `expected`.
    fn look(&self, among: &[usize], before: &[u32], expected: usize) -> io::Result<Seen> {
        let mut seen = Seen { by: Vec::new(), certain: self.fence.pass(&self.senders[0]) };
        for look in 0..LOOKS {
            if look > 0 {
                std::thread::sleep(PAUSE);
            }
            let now = self.counts(among)?;
            let dropped = |at: &usize| now[*at].wrapping_sub(before[*at]) >= SENDERS as u32;
            seen.by = (0..among.len()).filter(dropped).map(|at| among[at]).collect();
            if seen.by.len() >= expected {
                break;
            }
        }
        Ok(seen)
    }
}

/// What became of probes.
struct Seen {
    /// Positions of the sockets that dropped one from each port.
    by: Vec<usize>,
    /// The kernel had dealt with all probes: no other socket has got them.
    certain: bool,
}

impl Drop for Prober<'_> {
    fn drop(&mut self) {
        for at in &self.with_filter {
            let socket = self.sockets[*at];
            let off = sys::set_int_option(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, 0);
            if let Err(error) = off {
                // It would drop probes of this tag, which are never sent again.
                log::debug!("a filter stays: {error}");
            }
        }
    }
}

/// What is sent to it last arrives last: loopback has one queue for each processor. (If this thread changes the processor in
/// between, it may be passed too early.)
struct Fence {
    socket: UdpSocket,
    to: SocketAddr,
    number: Cell<u32>,
    /// How often it was not passed in time.
    missed: Cell<u32>,
}

impl Fence {
    fn new(ip: IpAddr) -> io::Result<Fence> {
        let socket = UdpSocket::bind((ip, 0))?;
        socket.set_read_timeout(Some(FENCE_PATIENCE))?;
        Ok(Fence { to: socket.local_addr()?, socket, number: Cell::new(rand::random()), missed: Cell::new(0) })
    }

    /// There is no use in waiting for it any more.
    fn is_given_up(&self) -> bool {
        self.missed.get() >= FENCES_MISSED_MAX
    }

    /// Waits until the kernel has dealt with what was sent before. False: it took too long.
    fn pass(&self, sender: &UdpSocket) -> bool {
        /// Others may send to it, too.
        const DATAGRAMS_MAX: u32 = 16;
        if self.is_given_up() {
            return false;
        }
        let number = self.number.get().wrapping_add(1);
        self.number.set(number);
        let passed = sender.send_to(&number.to_be_bytes(), self.to).is_ok()
            && (0..DATAGRAMS_MAX).map_while(|_| self.next()).any(|came| came == number);
        self.missed.set(self.missed.get() + u32::from(!passed));
        passed
    }

    /// None: nothing came in time.
    fn next(&self) -> Option<u32> {
        let mut number = [0; 4];
        self.socket.recv(&mut number).ok()?;
        Some(u32::from_be_bytes(number))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use ferroce_testkit::free_port;
    use rustix::net::{AddressFamily, SocketAddrV4, SocketType, sockopt};

    use super::*;

    fn group_socket(port: u16) -> OwnedFd {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
        sockopt::set_socket_reuseport(&socket, true).unwrap();
        rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port)).unwrap();
        socket
    }

    /// On a machine that is short of cores: lanes were taken for astray after one fence that took too long.
    #[test]
    fn who_does_not_know_whether_probes_arrived_gives_no_verdict() {
        let port = free_port();
        let sockets = [group_socket(port), group_socket(port)];
        let lanes = [(1, sockets[0].as_fd()), (2, sockets[1].as_fd())];
        sys::attach_reuseport_program(lanes[0].1, &steer::constant(0)).unwrap();
        let mut prober = Prober::new(port, lanes.iter().map(|lane| lane.1).collect()).unwrap();
        assert_eq!(prober.missed(&lanes, &[0, 1]).unwrap(), [1]);

        let elsewhere = UdpSocket::bind("127.0.0.1:0").unwrap();
        let fence = std::mem::replace(&mut prober.fence.to, elsewhere.local_addr().unwrap());
        assert_eq!(prober.missed(&lanes, &[0, 1]).unwrap_err().kind(), io::ErrorKind::TimedOut);

        // Once is not for good; what never comes is not waited for any more.
        let elsewhere = std::mem::replace(&mut prober.fence.to, fence);
        assert_eq!(prober.missed(&lanes, &[0, 1]).unwrap(), [1]);
        prober.fence.to = elsewhere;
        for _ in 1..FENCES_MISSED_MAX {
            assert!(!prober.fence.is_given_up());
            prober.missed(&lanes, &[1]).unwrap_err();
        }
        assert!(prober.fence.is_given_up());
        assert_eq!(prober.missed(&lanes, &[1]).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
