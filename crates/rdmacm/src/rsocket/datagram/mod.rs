//! Datagram sockets: a UDP socket, by whose address a peer is found, and UD queue pairs that carry what is sent to peers that are known.
//!
//! | file | part |
//! |---|---|
//! | `port` | the queue pair at a local address, and its buffers |
//! | `address` | addresses of C and of Rust |
//! | `calls` | what the functions of rsocket(7) do with a datagram socket |
//!
//! As with streams there is no thread: whoever calls looks at the UDP socket and at the completions. What is longer than a packet of the
//! device goes over UDP, like what goes to a peer that has not answered yet. The UDP socket tells everybody's packets: what is no
//! introduction of an rsocket is dropped.

mod address;
pub(super) mod calls;
mod port;

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::time::Instant;

use ferroce_abi::cm::ferroce_cm_path;
use ferroce_abi::ibv_ah_attr;
use ferroce_rsocket::{DATAGRAM_HEADER_MAX, DATAGRAM_MAX, Introduction, Purpose, Span};
use libc::{sockaddr_storage, socklen_t};

use super::gather::Gather;
use super::lock::{Guard, Lock};
use super::options::Options;
use super::wait::{Patience, Seat, Sleepers, Waker, own_waker, sleep};
use super::{Entry, config, insert};
use crate::entry::{Call, Refusal, check};
use crate::event::handlers_restart;
use crate::{addr, qp, verbs};

use port::{Ah, Port};

/// Peers that a socket remembers. Any host may introduce itself as so many as it likes: others are forgotten, and found again.
const PEERS_MAX: usize = 4096;
/// Ways to hosts that a socket remembers.
const ROUTES_MAX: usize = 256;
/// Local addresses of a socket.
const PORTS_MAX: usize = 64;
/// Introductions taken in one go.
const INTRODUCTIONS_AT_ONCE: usize = 16;

/// A datagram socket.
pub(super) struct Datagram {
    /// The UDP socket. Its descriptor is the number that the program knows.
    udp: OwnedFd,
    /// Becomes readable when something may have come.
    epoll: OwnedFd,
    pub(super) pid: u32,
    work: Lock<Work>,
}

/// What the lock of a socket guards; never held while sleeping.
struct Work {
    options: Options,
    ports: Vec<Port>,
    peers: HashMap<SocketAddr, Peer>,
    routes: HashMap<IpAddr, Route>,
    connected: Option<SocketAddr>,
    queue: VecDeque<Arrived>,
    waiters: Vec<Arc<Waker>>,
    closed: bool,
}

/// A UDP address, and what is known of the queue pair there.
struct Peer {
    route: Route,
    /// None: it has not told its queue pair yet.
    known: Option<(Ah, u32)>,
}

/// The way to a host.
#[derive(Clone, Copy)]
struct Route {
    /// From this port.
    port: usize,
    address: ibv_ah_attr,
}

/// A datagram that nobody has read.
struct Arrived {
    src: SocketAddr,
    place: Place,
}

enum Place {
    /// In the receive buffer of a port.
    Slot { port: usize, slot: u32, span: Span },
    /// It came over UDP.
    Bytes(Vec<u8>),
}

impl Datagram {
    /// A fresh one, with its number.
    pub(super) fn open(domain: c_int, options: Options) -> Call<c_int> {
        let kind = libc::SOCK_DGRAM | if options.is_cloexec { libc::SOCK_CLOEXEC } else { 0 };
        // Past the C library: its function is what the preload library replaces by this one.
        // SAFETY: numbers only.
        let udp = unsafe { owned(libc::syscall(libc::SYS_socket, domain, kind, 0) as c_int)? };
        // SAFETY: makes a descriptor, nothing else.
        let epoll = unsafe { owned(libc::epoll_create1(libc::EPOLL_CLOEXEC))? };
        let number = udp.as_raw_fd();
        watch(&epoll, number)?;
        let work = Work {
            options,
            ports: Vec::new(),
            peers: HashMap::new(),
            routes: HashMap::new(),
            connected: None,
            queue: VecDeque::new(),
            waiters: Vec::new(),
            closed: false,
        };
        let socket = Datagram { udp, epoll, pid: std::process::id(), work: Lock::new(work) };
        insert(number, Entry::Datagram(Arc::new(socket)));
        Ok(number)
    }

    fn work(&self) -> Guard<'_, Work> {
        self.work.lock()
    }

    fn number(&self) -> c_int {
        self.udp.as_raw_fd()
    }

    /// Becomes readable when something may have come, once armed.
    pub(super) fn wake_fd(&self) -> c_int {
        self.epoll.as_raw_fd()
    }

    /// Before a sleep: from now on the descriptor tells.
    pub(super) fn arm(&self) {
        self.work().ports.iter_mut().for_each(Port::arm);
    }

    /// The descriptor was readable. Others who rely on it arm it anew.
    pub(super) fn disarm(&self) {
        let mut work = self.work();
        work.ports.iter_mut().for_each(Port::disarm);
        work.wake_others();
    }

    /// Takes what has come. Gives what is to be told of it: can be read, can be written.
    pub(super) fn look(&self) -> (bool, bool) {
        let mut work = self.work();
        self.advance(&mut work);
        (!work.queue.is_empty(), work.ports.iter().all(Port::has_room))
    }

    fn advance(&self, work: &mut Work) {
        let mut moved = false;
        let Work { ports, queue, .. } = &mut *work;
        for (own, port) in ports.iter_mut().enumerate() {
            while port.take_completions(own, queue) {
                moved = true;
            }
        }
        moved |= self.take_introductions(work);
        if moved {
            work.wake_others();
        }
    }

    /// Waits until `test` gives something: as for streams.
    fn until<T>(&self, patience: Patience, mut test: impl FnMut(&mut Work) -> Call<Option<T>>) -> Call<T> {
        let mut ask = |work: &mut Work| {
            if work.closed {
                return Err(Refusal::new(libc::EBADF, "the rsocket was closed by another thread"));
            }
            test(work)
        };
        if let Some(found) = ask(&mut self.work())? {
            return Ok(found);
        }
        let mut look = || {
            let mut work = self.work();
            self.advance(&mut work);
            ask(&mut work)
        };
        let started = Instant::now();
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if matches!(patience, Patience::None) {
                return Err(Refusal::told(libc::EAGAIN));
            }
            if started.elapsed() >= config::get().polling {
                break;
            }
            std::hint::spin_loop();
        }
        let waker = own_waker()?;
        let _seat = Seat::take(self, &waker);
        loop {
            self.arm();
            if let Some(found) = look()? {
                return Ok(found);
            }
            // What was just looked at may have made a port.
            self.arm();
            let watch = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut polled = [watch(waker.fd()), watch(self.wake_fd())];
            match sleep(&mut polled, patience.left()) {
                Ok(0) => return Err(Refusal::told(libc::EAGAIN)),
                Ok(_) => {}
                Err(refusal) if refusal.errno() == libc::EINTR && handlers_restart() => {}
                Err(refusal) => return Err(refusal),
            }
            if polled[0].revents != 0 {
                waker.calm();
            }
            if polled[1].revents != 0 {
                self.disarm();
            }
        }
    }
}

impl Sleepers for Datagram {
    fn with(&self, change: &mut dyn FnMut(&mut Vec<Arc<Waker>>)) {
        change(&mut self.work().waiters);
    }
}

impl Work {
    fn wake_others(&self) {
        Waker::wake_others(&self.waiters);
    }

    fn forget_somebody(&mut self) {
        let somebody = self.peers.keys().find(|peer| Some(**peer) != self.connected).copied();
        if let Some(peer) = somebody {
            self.peers.remove(&peer);
        }
    }
}

/// Peers.
impl Datagram {
    /// Makes sure that there is an entry for a peer.
    fn meet(&self, work: &mut Work, peer: SocketAddr) -> Call<()> {
        if work.peers.contains_key(&peer) {
            return Ok(());
        }
        let route = self.route(work, peer)?;
        if work.peers.len() >= PEERS_MAX {
            work.forget_somebody();
        }
        work.peers.insert(peer, Peer { route, known: None });
        Ok(())
    }

    fn route(&self, work: &mut Work, peer: SocketAddr) -> Call<Route> {
        if let Some(route) = work.routes.get(&peer.ip()) {
            return Ok(*route);
        }
        let mut own = self.name()?;
        if own.port() == 0 {
            // Who answers needs to know where.
            own = self.bind_any(own)?;
        }
        let (to, from) = (address::storage(peer), address::storage(own));
        let from = if own.ip().is_unspecified() { ptr::null() } else { addr::plain(&from) };
        let mut path = MaybeUninit::<ferroce_cm_path>::uninit();
        // SAFETY: addresses of ours, or none; room for a path.
        check(unsafe { verbs::ferroce_cm_route(addr::plain(&to), from, path.as_mut_ptr()) })?;
        // SAFETY: the call succeeded, so it is written.
        let path = unsafe { path.assume_init() };
        let route = Route { port: self.port(work, &path, own.port(), peer)?, address: qp::address(&path) };
        if work.routes.len() >= ROUTES_MAX {
            work.routes.clear();
        }
        work.routes.insert(peer.ip(), route);
        Ok(route)
    }

    /// The port at the local end of a path, made if need be.
    fn port(&self, work: &mut Work, path: &ferroce_cm_path, number: u16, peer: SocketAddr) -> Call<usize> {
        let raw = Ipv6Addr::from(path.local.raw);
        // In the family of the peer's address, which may be a mapped one.
        let mut local = SocketAddr::new(raw.into(), number);
        match (&mut local, raw.to_ipv4_mapped()) {
            (local, Some(v4)) if peer.is_ipv4() => local.set_ip(v4.into()),
            (SocketAddr::V6(local), _) => local.set_scope_id(path.ifindex),
            (SocketAddr::V4(_), _) => {}
        }
        if let Some(known) = work.ports.iter().position(|port| port.local().ip() == local.ip()) {
            return Ok(known);
        }
        if work.ports.len() >= PORTS_MAX {
            return Err(Refusal::new(libc::ENOBUFS, format!("the rsocket has {PORTS_MAX} local addresses already")));
        }
        let port = Port::new(local, 128 << path.mtu.min(5), &work.options.sizes)?;
        watch(&self.epoll, port.fd())?;
        work.ports.push(port);
        Ok(work.ports.len() - 1)
    }

    /// The address of the UDP socket.
    fn name(&self) -> Call<SocketAddr> {
        // SAFETY: integers, for which zero is a value.
        let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
        let mut len = size_of::<sockaddr_storage>() as socklen_t;
        // SAFETY: an open socket; a place of ours, with its length.
        let result = unsafe { libc::getsockname(self.number(), (&raw mut storage).cast(), &raw mut len) };
        if result != 0 {
            return Err(Refusal::last());
        }
        address::from_storage(&storage).ok_or_else(|| Refusal::told(libc::EAFNOSUPPORT))
    }

    /// Gives the UDP socket a port of the system's choice.
    fn bind_any(&self, unbound: SocketAddr) -> Call<SocketAddr> {
        let any = address::storage(unbound);
        // SAFETY: an open socket; an address of ours, with its length.
        if unsafe { libc::bind(self.number(), addr::plain(&any), address::length(unbound)) } != 0 {
            return Err(Refusal::last());
        }
        self.name()
    }

    /// A peer said which queue pair it has.
    fn learn(work: &mut Work, peer: SocketAddr, qpn: u32) -> Call<()> {
        let Some(entry) = work.peers.get_mut(&peer) else { return Ok(()) };
        match &mut entry.known {
            Some((_, known)) => *known = qpn,
            None => entry.known = Some((work.ports[entry.route.port].handle(&entry.route.address)?, qpn)),
        }
        Ok(())
    }
}

/// UDP.
impl Datagram {
    /// Takes what others say over UDP. True: somebody said something.
    fn take_introductions(&self, work: &mut Work) -> bool {
        let mut moved = false;
        for _ in 0..INTRODUCTIONS_AT_ONCE {
            let mut buffer = [0; DATAGRAM_MAX];
            // SAFETY: integers, for which zero is a value.
            let mut from: sockaddr_storage = unsafe { std::mem::zeroed() };
            let mut from_len = size_of::<sockaddr_storage>() as socklen_t;
            // With MSG_TRUNC the length is that of what was sent.
            // SAFETY: an open socket; places of ours, with their lengths.
            let len = unsafe {
                libc::recvfrom(
                    self.number(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    libc::MSG_DONTWAIT | libc::MSG_TRUNC,
                    (&raw mut from).cast(),
                    &raw mut from_len,
                )
            };
            let Ok(len) = usize::try_from(len) else {
                match Refusal::last().errno() {
                    libc::EAGAIN => break,
                    // What the network says of an earlier datagram; told once.
                    _ => continue,
                }
            };
            if let Some((from, datagram)) = address::from_storage(&from).zip(buffer.get(..len)) {
                moved |= self.hear(work, from, datagram);
            }
        }
        moved
    }

    /// True: it was an introduction.
    fn hear(&self, work: &mut Work, from: SocketAddr, datagram: &[u8]) -> bool {
        let Some((said, data)) = Introduction::parse(datagram) else { return false };
        // Of the same family, by the protocol.
        if said.addr.is_ipv4() != from.is_ipv4() || self.meet(work, from).is_err() {
            return false;
        }
        if said.purpose == Purpose::Data {
            // An answer that is lost is asked for by the next datagram.
            let _ = self.introduce(work, from, Purpose::Answer, &mut Gather::empty(), libc::MSG_DONTWAIT);
        }
        if let Err(refusal) = Datagram::learn(work, from, said.qpn) {
            crate::entry::note("rsocket\0", refusal.errno(), format!("no address handle for {from}"));
        }
        if said.purpose == Purpose::Data && work.queue.len() < usize::from(work.options.sizes.receive_queue) {
            work.queue.push_back(Arrived { src: from, place: Place::Bytes(data.to_vec()) });
        }
        true
    }

    /// Sends an introduction to a peer that was met.
    fn introduce(
        &self,
        work: &Work,
        to: SocketAddr,
        purpose: Purpose,
        data: &mut Gather<'_>,
        flags: c_int,
    ) -> Call<()> {
        let port = &work.ports[work.peers[&to].route.port];
        let header = Introduction { purpose, qpn: port.qpn(), addr: port.local().ip() }.to_bytes();
        let mut datagram = header.as_slice().to_vec();
        let header_len = datagram.len();
        datagram.resize(header_len + data.left(), 0);
        data.copy_to(&mut datagram[header_len..]);
        let name = address::storage(to);
        // SAFETY: an open socket; bytes and an address of ours, with their lengths.
        let sent = unsafe {
            libc::sendto(
                self.number(),
                datagram.as_ptr().cast(),
                datagram.len(),
                flags | libc::MSG_NOSIGNAL,
                addr::plain(&name),
                address::length(to),
            )
        };
        if sent < 0 { Err(Refusal::last()) } else { Ok(()) }
    }
}

/// Sending.
impl Datagram {
    /// Sends a datagram over the queue pair, or over UDP. None: there is no room.
    fn send(&self, work: &mut Work, to: SocketAddr, data: &mut Gather<'_>, flags: c_int) -> Call<Option<()>> {
        if data.left() > DATAGRAM_MAX - DATAGRAM_HEADER_MAX {
            return Err(Refusal::new(
                libc::EMSGSIZE,
                format!("{} bytes: a datagram has at most {}", data.left(), DATAGRAM_MAX - DATAGRAM_HEADER_MAX),
            ));
        }
        self.meet(work, to)?;
        if work.peers[&to].known.is_none() {
            self.take_introductions(work);
            // Others may have taken its place.
            self.meet(work, to)?;
        }
        let Work { peers, ports, .. } = &mut *work;
        let Peer { route, known } = &peers[&to];
        let port = &mut ports[route.port];
        match known {
            Some((ah, qpn)) if data.left() + DATAGRAM_HEADER_MAX <= port.longest() => {
                Ok(port.send(ah, *qpn, data)?.then_some(()))
            }
            _ => self.introduce(work, to, Purpose::Data, data, flags).map(Some),
        }
    }
}

fn owned(fd: c_int) -> Call<OwnedFd> {
    if fd < 0 {
        return Err(Refusal::last());
    }
    // SAFETY: a descriptor that was just made and is nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds a descriptor to those that wake.
fn watch(epoll: &OwnedFd, fd: c_int) -> Call<()> {
    let mut interest = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    // SAFETY: open descriptors; the structure is only read.
    let result = unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut interest) };
    if result == 0 { Ok(()) } else { Err(Refusal::last()) }
}
