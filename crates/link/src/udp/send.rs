//! Sending: private sockets, one for each path and destination lane; what they have queued goes out by `sendmmsg`.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, OwnedFd};

use ferroce_transport::{PathAddr, Train};
use ferroce_wire::icrc::Pseudo;
use ferroce_wire::{LANE_SHIFT, NetHeader, Opcode};

use super::arena::Arena;
use super::queue::{Limits, Queue};
use super::sum::PathSum;
use super::sys::{self, Buffer, Message, Name};
use super::{Hooks, UdpOptions};
use crate::{Direction, Frame, LinkStats, SendError};

/// Bytes for headers and copied payload between two flushes. Small enough to stay in a core's second-level cache.
const ARENA: usize = 256 << 10;
/// Send buffer to ask for. A train's datagrams must fit at once even where the device is slow to take them.
const SNDBUF: usize = 4 << 20;
/// How often a full socket is tried again, each time after letting others run, before its datagrams are dropped.
const FULL_RETRIES: u32 = 32;
/// Sockets for answers to strangers: one for each source address of late.
const ANSWER_SOCKETS: usize = 4;
/// A GSO or plain datagram's most bytes: 65,535 less the headers that count.
const MAX_BYTES_V4: usize = 65_507;
const MAX_BYTES_V6: usize = 65_527;
/// The hop limit that stands for "not given" in an address handle, and what is sent instead.
const DEFAULT_HOP_LIMIT: u8 = 64;

/// What a socket is for. Its lane is the destination's: GRO merges by addresses and ports alone, so that packets for two lanes
/// must not share a source port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    path: PathAddr,
    lane: u16,
}

impl Key {
    fn is(&self, path: &PathAddr, lane: u16) -> bool {
        self.lane == lane && self.path == *path
    }
}

struct TxSocket {
    fd: OwnedFd,
    key: Key,
    peer: Name,
    src_port: u16,
    queue: Queue,
    /// Turn of its last use.
    used: u64,
}

/// The sending half of a UDP link.
pub(super) struct Sender {
    port: u16,
    max_sockets: usize,
    max_packets: u16,
    sockets: Vec<TxSocket>,
    index: HashMap<Key, usize>,
    /// For answers to datagrams of whom the program sends nothing to. Anybody in the network may ask, from any address, queue pair and
    /// with any traffic class: a socket for each would be theirs to open, and to close others by.
    answers: Vec<TxSocket>,
    /// The socket of the last train: most often that of the next one.
    last: usize,
    /// Sockets with something queued, in the order of their first train.
    dirty: Vec<usize>,
    turn: u64,
    arena: Arena,
    /// Failures since the last report.
    failed: Vec<(u64, SendError)>,
}

impl Sender {
    pub(super) fn new(options: &UdpOptions, gso_segments: u16) -> Sender {
        Sender {
            port: options.port,
            max_sockets: options.max_sockets.max(1),
            max_packets: gso_segments.max(1),
            sockets: Vec::new(),
            index: HashMap::new(),
            answers: Vec::new(),
            last: 0,
            dirty: Vec::new(),
            turn: 0,
            arena: Arena::new(ARENA),
            failed: Vec::new(),
        }
    }

    pub(super) fn send(
        &mut self,
        cookie: u64,
        path: &PathAddr,
        train: &Train,
        hooks: &mut Hooks,
        stats: &mut LinkStats,
    ) -> Result<(), SendError> {
        let need = Queue::arena_need(train);
        assert!(need <= ARENA, "a train of {} bytes is longer than any may be", train.len);
        if self.arena.room() < need {
            stats.tx_auto_flush += 1;
            self.flush_all(stats);
        }
        let path = train.path.as_deref().unwrap_or(path);
        let lane = (train.head.bth.dest_qp >> LANE_SHIFT) as u16;
        self.turn += 1;
        let (socket, slot) = if is_answer(train) && !self.index.contains_key(&Key { path: path.clone(), lane }) {
            let at = self.answer_socket(path, stats)?;
            (&mut self.answers[at], None)
        } else {
            let slot = self.socket(path, lane, stats)?;
            (&mut self.sockets[slot], Some(slot))
        };
        socket.used = self.turn;
        let fresh = socket.queue.batches() == 0;
        let queued = if hooks.is_empty() {
            socket.queue.push(cookie, train, &mut self.arena, None)
        } else {
            let (path, src_port) = (&socket.key.path, socket.src_port);
            let mut inspect =
                |identification, bytes: &mut [u8]| show(hooks, path, src_port, identification, bytes, stats);
            socket.queue.push(cookie, train, &mut self.arena, Some(&mut inspect))
        };
        stats.tx_fault += u64::from(queued.is_err());
        queued?;
        stats.tx_trains += 1;
        if fresh {
            self.dirty.extend(slot);
        }
        Ok(())
    }

    pub(super) fn flush(&mut self, stats: &mut LinkStats, failed: &mut dyn FnMut(u64, SendError)) {
        self.flush_all(stats);
        for (cookie, error) in self.failed.drain(..) {
            failed(cookie, error);
        }
    }

    /// The socket for a path and lane, opened if need be.
    fn socket(&mut self, path: &PathAddr, lane: u16, stats: &mut LinkStats) -> Result<usize, SendError> {
        if self.sockets.get(self.last).is_some_and(|socket| socket.key.is(path, lane)) {
            return Ok(self.last);
        }
        let key = Key { path: path.clone(), lane };
        if let Some(&slot) = self.index.get(&key) {
            self.last = slot;
            return Ok(slot);
        }
        if self.sockets.len() >= self.max_sockets {
            self.close_oldest(stats);
        }
        let mut socket = TxSocket::open(key.clone(), self.port, self.max_packets);
        if let Err(error) = &socket
            && matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
            && !self.sockets.is_empty()
        {
            // The program is out of descriptors: go on with fewer of them.
            self.close_oldest(stats);
            socket = TxSocket::open(key.clone(), self.port, self.max_packets);
        }
        self.last = self.sockets.len();
        self.sockets.push(socket.map_err(|error| unreachable(&error))?);
        self.index.insert(key, self.last);
        Ok(self.last)
    }

    /// The socket for answers from a source address, aimed at the destination. What goes to another one is sent first.
    fn answer_socket(&mut self, path: &PathAddr, stats: &mut LinkStats) -> Result<usize, SendError> {
        let path = PathAddr { tclass: 0, flow_label: 0, hop_limit: DEFAULT_HOP_LIMIT, ..path.clone() };
        let known = self.answers.iter().position(|socket| socket.key.path.src == path.src);
        if let Some(at) = known {
            let socket = &mut self.answers[at];
            if socket.key.path != path {
                socket.flush(&mut self.arena, stats, &mut self.failed);
                socket.aim(path, self.port);
            }
            return Ok(at);
        }
        let socket = TxSocket::open(Key { path, lane: 0 }, self.port, self.max_packets);
        let socket = socket.map_err(|error| unreachable(&error))?;
        if self.answers.len() < ANSWER_SOCKETS {
            self.answers.push(socket);
            return Ok(self.answers.len() - 1);
        }
        let oldest = (0..self.answers.len()).min_by_key(|&at| self.answers[at].used).expect("there are some");
        self.answers[oldest].flush(&mut self.arena, stats, &mut self.failed);
        self.answers[oldest] = socket;
        Ok(oldest)
    }

    /// Closes the least recently used socket. Slots change.
    fn close_oldest(&mut self, stats: &mut LinkStats) {
        self.flush_all(stats);
        let Some(oldest) = (0..self.sockets.len()).min_by_key(|&slot| self.sockets[slot].used) else { return };
        let closed = self.sockets.swap_remove(oldest);
        self.index.remove(&closed.key);
        if let Some(moved) = self.sockets.get(oldest) {
            self.index.insert(moved.key.clone(), oldest);
        }
        stats.tx_sockets_evicted += 1;
    }

    fn flush_all(&mut self, stats: &mut LinkStats) {
        for slot in self.dirty.drain(..) {
            self.sockets[slot].flush(&mut self.arena, stats, &mut self.failed);
        }
        for socket in &mut self.answers {
            socket.flush(&mut self.arena, stats, &mut self.failed);
        }
        self.arena.rewind(0);
    }
}

impl TxSocket {
    fn open(key: Key, port: u16, max_packets: u16) -> io::Result<TxSocket> {
        let (src, dst) = (key.path.src.to_canonical(), key.path.dst.to_canonical());
        if src.is_ipv4() != dst.is_ipv4() {
            return Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT));
        }
        if src.is_unspecified() {
            // The ICRC covers the source address; one that the route chooses would not be known.
            return Err(io::Error::from_raw_os_error(libc::EADDRNOTAVAIL));
        }
        let socket = sys::udp_socket(dst.is_ipv6())?;
        let fd = socket.as_fd();
        set_options(fd, &key.path, dst)?;
        sys::bind(fd, &with_scope(src, 0, &key.path))?;
        let src_port = sys::local_addr(fd)?.port();
        let bytes = if dst.is_ipv4() { MAX_BYTES_V4 } else { MAX_BYTES_V6 };
        let sum = PathSum::new(Pseudo::new(src, dst, src_port), dst.is_ipv4());
        let queue = Queue::new(sum, Limits { packets: max_packets, bytes });
        let peer = Name::from(&with_scope(dst, port, &key.path));
        Ok(TxSocket { fd: socket, key, peer, src_port, queue, used: 0 })
    }

    /// From now on it sends from its address to another one, by a path with the same options. Nothing is queued.
    fn aim(&mut self, path: PathAddr, port: u16) {
        let (src, dst) = (path.src.to_canonical(), path.dst.to_canonical());
        self.queue.aim(PathSum::new(Pseudo::new(src, dst, self.src_port), dst.is_ipv4()));
        self.peer = Name::from(&with_scope(dst, port, &path));
        self.key.path = path;
    }

    /// Sends what is queued, in order; leaves nothing queued.
    fn flush(&mut self, arena: &mut Arena, stats: &mut LinkStats, failed: &mut Vec<(u64, SendError)>) {
        let mut at = 0;
        let mut retries = 0;
        while at < self.queue.batches() {
            stats.tx_calls += 1;
            match sys::send_messages(self.fd.as_fd(), &self.peer, self.queue.messages(at)) {
                Ok(sent) => {
                    for batch in at..at + sent {
                        let (packets, bytes) = self.queue.size(batch);
                        count_sent(stats, packets, bytes);
                    }
                    at += sent;
                }
                Err(error) if is_full(&error) && retries < FULL_RETRIES => {
                    retries += 1;
                    std::thread::yield_now();
                }
                Err(error) => {
                    self.give_up(at, &error, arena, stats, failed);
                    at += 1;
                }
            }
        }
        self.queue.clear();
    }

    /// Deals with a datagram that the system refused.
    fn give_up(
        &mut self,
        at: usize,
        error: &io::Error,
        arena: &mut Arena,
        stats: &mut LinkStats,
        failed: &mut Vec<(u64, SendError)>,
    ) {
        let (packets, _) = self.queue.size(at);
        match error.raw_os_error() {
            _ if is_full(error) => stats.tx_drop_full += u64::from(packets),
            // Whether it is batches that this route cannot carry shows packet by packet.
            Some(libc::EINVAL | libc::EIO | libc::EOPNOTSUPP) if packets > 1 => {
                if self.send_singly(at, arena, stats, failed) {
                    stats.tx_gso_refused += 1;
                    log::debug!("batches to {} are refused ({error}): sending single packets", self.key.path.dst);
                    self.queue.stop_batching();
                }
            }
            _ => {
                for (cookie, packets) in self.queue.owners(at) {
                    fail(cookie, packets, error, stats, failed);
                }
            }
        }
    }

    /// Sends the packets of one datagram as datagrams of their own; tells whether the system took any.
    fn send_singly(
        &mut self,
        at: usize,
        arena: &mut Arena,
        stats: &mut LinkStats,
        failed: &mut Vec<(u64, SendError)>,
    ) -> bool {
        let mut any = false;
        let owners = self.queue.owners(at).flat_map(|(cookie, packets)| std::iter::repeat_n(cookie, packets.into()));
        let owners: Vec<u64> = owners.collect();
        for (index, cookie) in (0..).zip(owners) {
            let pieces = self.queue.single(at, index, arena);
            let mut retries = 0;
            stats.tx_calls += 1;
            loop {
                let message = Message { pieces: &pieces, segment: 0 };
                match sys::send_messages(self.fd.as_fd(), &self.peer, std::iter::once(message)) {
                    Ok(_) => {
                        any = true;
                        count_sent(stats, 1, pieces.iter().map(|piece| piece.len).sum());
                    }
                    Err(error) if is_full(&error) && retries < FULL_RETRIES => {
                        retries += 1;
                        std::thread::yield_now();
                        continue;
                    }
                    Err(error) if is_full(&error) => stats.tx_drop_full += 1,
                    Err(error) => fail(cookie, 1, &error, stats, failed),
                }
                break;
            }
        }
        any
    }
}

/// A packet of our own to whom a datagram names.
fn is_answer(train: &Train) -> bool {
    train.head.bth.opcode == Opcode::FERROCE_FLOW && train.path.is_some()
}

fn set_options(fd: std::os::fd::BorrowedFd<'_>, path: &PathAddr, dst: IpAddr) -> io::Result<()> {
    let (tclass, hops) = (libc::c_int::from(path.tclass), libc::c_int::from(hop_limit(path)));
    let ifindex = libc::c_int::try_from(path.ifindex).unwrap_or(0);
    // A dual-stack socket would need the IPv4 options too; one family a socket keeps it plain.
    let (level, options) = match dst {
        IpAddr::V4(_) => (
            libc::IPPROTO_IP,
            // Don't Fragment on an unconnected socket makes the Identification known: 0, or counting in a batch.
            [
                (libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO),
                (libc::IP_TOS, tclass),
                if dst.is_multicast() { (libc::IP_MULTICAST_TTL, hops) } else { (libc::IP_TTL, hops) },
            ],
        ),
        IpAddr::V6(_) => (
            libc::IPPROTO_IPV6,
            [
                (libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO),
                (libc::IPV6_TCLASS, tclass),
                if dst.is_multicast() { (libc::IPV6_MULTICAST_HOPS, hops) } else { (libc::IPV6_UNICAST_HOPS, hops) },
            ],
        ),
    };
    for (option, value) in options {
        sys::set_option(fd, level, option, value)?;
    }
    // IPv4 goes out by the interface that has the source address.
    if dst.is_ipv6() {
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
        if dst.is_multicast() {
            sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF, ifindex)?;
        }
        if path.flow_label != 0 {
            sys::set_option(fd, libc::IPPROTO_IPV6, sys::IPV6_FLOWINFO_SEND, 1)?;
        }
    }
    sys::grow_buffer(fd, Buffer::Send, SNDBUF);
    // Nobody answers to this port; what strangers send to it shall not fill memory.
    sys::set_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, 1)
}

/// A socket address. The interface index is given only where the address means nothing without one: for others the route decides,
/// since binding them to an interface would cut off the host's other addresses.
fn with_scope(ip: IpAddr, port: u16, path: &PathAddr) -> SocketAddr {
    match ip {
        IpAddr::V4(ip) => SocketAddr::from((ip, port)),
        IpAddr::V6(ip) => {
            let local = ip.is_unicast_link_local() || ip.is_multicast();
            let scope = if local { path.ifindex } else { 0 };
            SocketAddrV6::new(ip, port, path.flow_label & 0xf_ffff, scope).into()
        }
    }
}

/// Errors that pass: the socket's or device's queue is full, or a signal came.
fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM | libc::EINTR))
}

fn unreachable(error: &io::Error) -> SendError {
    SendError::Unreachable { errno: error.raw_os_error().unwrap_or(libc::EIO) }
}

fn fail(cookie: u64, packets: u16, error: &io::Error, stats: &mut LinkStats, failed: &mut Vec<(u64, SendError)>) {
    stats.tx_unreachable += u64::from(packets);
    let reason = unreachable(error);
    // The packets of a train stand together: one report for all of them.
    if failed.last() != Some(&(cookie, reason)) {
        failed.push((cookie, reason));
    }
}

fn count_sent(stats: &mut LinkStats, packets: u16, bytes: usize) {
    stats.tx_datagrams += 1;
    stats.tx_packets += u64::from(packets);
    stats.tx_bytes += bytes as u64;
    stats.tx_gso_batches += u64::from(packets > 1);
}

/// Shows a packet to the link's hooks.
fn show(
    hooks: &mut Hooks,
    path: &PathAddr,
    src_port: u16,
    identification: u16,
    bytes: &mut [u8],
    stats: &mut LinkStats,
) {
    if let Some(corrupt) = &mut hooks.corrupt
        && let Some(bit) = corrupt(Direction::Tx, bytes.len())
    {
        stats.fault_corrupted += 1;
        super::flip(bytes, bit);
    }
    if let Some(tap) = &mut hooks.tap {
        let net = NetHeader {
            src: path.src.to_canonical(),
            dst: path.dst.to_canonical(),
            src_port,
            tclass: path.tclass,
            hop_limit: hop_limit(path),
            udp_len: bytes.len() as u16,
            ifindex: 0,
        };
        tap(&Frame { direction: Direction::Tx, net: &net, identification, bytes });
    }
}

fn hop_limit(path: &PathAddr) -> u8 {
    if path.hop_limit == 0 { DEFAULT_HOP_LIMIT } else { path.hop_limit }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use ferroce_transport::{Payload, Side};
    use ferroce_wire::{Bth, Headers, Opcode, Psn};

    use super::super::{Capabilities, ingest};
    use super::*;

    fn message(psn: u32, payload: &[u8]) -> Train {
        let mut head = Headers::new(Bth::new(Opcode::RC_SEND_ONLY, 5, Psn::new(psn)));
        head.bth.pad = (payload.len().wrapping_neg() & 3) as u8;
        Train {
            head,
            body: Opcode::RC_SEND_MIDDLE,
            tail: None,
            packets: 1,
            mtu: 4096,
            len: payload.len() as u32,
            payload: Payload::Inline(payload.into(), 0),
            path: None,
            from: Side::Requester,
        }
    }

    /// Strangers choose whom to answer: that opens no socket for each, and closes none of the program's.
    #[test]
    fn answers_to_many_strangers_go_by_one_socket() {
        const STRANGERS: u32 = 600;
        let rx = UdpSocket::bind("0.0.0.0:0").unwrap();
        rx.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        let localhost = IpAddr::from([127, 0, 0, 1]);
        let to = |dst: IpAddr, tclass: u8| PathAddr {
            src: localhost,
            dst,
            ifindex: 0,
            tclass,
            hop_limit: 64,
            flow_label: 0,
        };
        let stranger = |n: u32| IpAddr::from([127, 1, 0, (n % 200) as u8]);
        let options = UdpOptions { port: rx.local_addr().unwrap().port(), max_sockets: 2, ..Default::default() };
        let (mut stats, mut hooks) = (LinkStats::default(), Hooks::default());
        let mut sender = Sender::new(&options, Capabilities::probe().gso_segments);
        let of_program = sender.socket(&to(localhost, 0), 7, &mut stats).unwrap();
        let answer = |n: u32, path: PathAddr| {
            let mut train = message(n, &n.to_be_bytes());
            train.head.bth = Bth::new(Opcode::FERROCE_FLOW, n << 14 | 5, Psn::new(n));
            Train { body: Opcode::FERROCE_FLOW, path: Some(path.into()), from: Side::Responder, ..train }
        };
        let mut bytes = [0; 1000];
        for n in 0..STRANGERS {
            let train = answer(n, to(stranger(n), n as u8));
            sender.send(0, &to(localhost, 0), &train, &mut hooks, &mut stats).unwrap();
            if n % 5 != 4 {
                continue;
            }
            sender.flush(&mut stats, &mut |cookie, error| panic!("{cookie}: {error}"));
            for n in n - 4..=n {
                let (len, from) = rx.recv_from(&mut bytes).unwrap();
                let net = NetHeader {
                    src: from.ip(),
                    dst: stranger(n),
                    src_port: from.port(),
                    tclass: 0,
                    hop_limit: 64,
                    udp_len: 0,
                    ifindex: 0,
                };
                let (mut check, mut seen) = (LinkStats::default(), Vec::new());
                ingest(&net, 0, &bytes[..len], &mut check, &mut |_, headers, payload| {
                    seen.push((headers.bth.psn.get(), payload.to_vec()));
                });
                assert_eq!((check.rx_icrc_known, seen), (1, vec![(n, n.to_be_bytes().to_vec())]));
            }
        }
        assert_eq!((sender.sockets.len(), sender.answers.len(), stats.tx_sockets_evicted), (1, 1, 0));
        // Whom the program sends to is answered by the socket for that.
        sender.send(0, &to(localhost, 0), &answer(7, to(localhost, 0)), &mut hooks, &mut stats).unwrap();
        assert_eq!(sender.sockets[of_program].queue.batches(), 1);
        // More addresses of our own than there are sockets for answers.
        for n in 0..20u8 {
            let path = PathAddr { src: IpAddr::from([127, 2, 0, n]), ..to(localhost, 0) };
            sender.send(0, &path, &answer(n.into(), path.clone()), &mut hooks, &mut stats).unwrap();
        }
        assert_eq!((sender.sockets.len(), sender.answers.len()), (1, ANSWER_SOCKETS));
        sender.flush(&mut stats, &mut |cookie, error| panic!("{cookie}: {error}"));
    }

    /// Some routes refuse batches (here: because the socket sends no checksums). The packets go out one by one, each with the ICRC for
    /// the Identification that it has then, and so do later ones.
    #[test]
    fn refused_batches_go_out_as_single_packets() {
        let rx = UdpSocket::bind("127.0.0.1:0").unwrap();
        rx.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        let localhost = IpAddr::from([127, 0, 0, 1]);
        let path = PathAddr { src: localhost, dst: localhost, ifindex: 0, tclass: 0, hop_limit: 64, flow_label: 0 };
        let options = UdpOptions { port: rx.local_addr().unwrap().port(), ..Default::default() };
        let mut stats = LinkStats::default();
        let mut hooks = Hooks::default();
        let mut sender = Sender::new(&options, Capabilities::probe().gso_segments.max(64));
        let slot = sender.socket(&path, 0, &mut stats).unwrap();
        sys::set_option(sender.sockets[slot].fd.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();

        for round in 0..2 {
            for psn in 0..10 {
                let payload = vec![psn as u8; if psn == 9 { 33 } else { 500 }];
                sender.send(psn.into(), &path, &message(psn, &payload), &mut hooks, &mut stats).unwrap();
            }
            sender.flush(&mut stats, &mut |cookie, error| panic!("{cookie}: {error}"));
            assert_eq!(
                (stats.tx_gso_refused, stats.tx_packets, stats.tx_datagrams),
                (1, 10 * (round + 1), 10 * (round + 1))
            );
            for psn in 0..10 {
                let mut bytes = [0; 1000];
                let (len, from) = rx.recv_from(&mut bytes).unwrap();
                let net = NetHeader {
                    src: from.ip(),
                    dst: localhost,
                    src_port: from.port(),
                    tclass: 0,
                    hop_limit: 64,
                    udp_len: 0,
                    ifindex: 0,
                };
                let mut check = LinkStats::default();
                let mut seen = Vec::new();
                ingest(&net, 0, &bytes[..len], &mut check, &mut |_, headers, payload| {
                    seen.push((headers.bth.psn.get(), payload.to_vec()));
                });
                assert_eq!(check.rx_icrc_known, 1, "packet {psn} is not summed for Identification 0");
                assert_eq!(seen, [(psn, vec![psn as u8; if psn == 9 { 33 } else { 500 }])]);
            }
        }
    }
}
