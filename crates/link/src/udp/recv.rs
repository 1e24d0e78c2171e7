//! Receiving: datagrams from the group's sockets, cut into packets, checked and parsed.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ferroce_wire::icrc::{self, ID_TO_BTH, Pseudo};
use ferroce_wire::{BTH_LEN, Headers, ICRC_LEN, NetHeader, ParseError};

use super::sum::PathSum;
use super::sys::{self, Buffer, Received, RxBuffers};
use super::{Hooks, UdpOptions};
use crate::{Direction, Frame, LinkStats};

/// Receive buffers. Only the first bytes of each are touched when datagrams are small.
const BUFFERS: usize = 32;
/// Buffers offered when little was waiting: to offer one costs time even if it stays empty, and to look for a second datagram delays
/// the first. After a large one too: the answer to it shall be on its way while the next one is summed and stored, else both ends wait
/// for each other in turn.
const BUFFERS_IDLE: usize = 1;
/// What counts as large.
const LARGE: usize = 8192;

/// The receiving half of a UDP link.
pub(super) struct Receiver {
    sockets: Vec<OwnedFd>,
    /// What each socket said of its drops last.
    dropped: Vec<u32>,
    /// The socket to read first next time, so that none starves.
    next: usize,
    buffers: RxBuffers,
    /// Datagrams to ask for at once.
    ask: usize,
    paths: Paths,
}

impl Receiver {
    pub(super) fn new(sockets: Vec<OwnedFd>, options: &UdpOptions) -> io::Result<Receiver> {
        for socket in &sockets {
            prepare(socket.as_fd(), options)?;
        }
        let dropped = vec![0; sockets.len()];
        Ok(Receiver {
            sockets,
            dropped,
            next: 0,
            buffers: RxBuffers::new(BUFFERS),
            ask: BUFFERS_IDLE,
            paths: Paths::default(),
        })
    }

    pub(super) fn sockets(&self) -> &[OwnedFd] {
        &self.sockets
    }

    pub(super) fn recv(
        &mut self,
        budget: usize,
        hooks: &mut Hooks,
        stats: &mut LinkStats,
        sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8]),
    ) -> usize {
        let mut read = 0;
        for _ in 0..self.sockets.len() {
            let socket = self.next;
            while read < budget {
                let ask = self.ask.min(budget - read);
                stats.rx_calls += 1;
                let count = match self.buffers.fill(self.sockets[socket].as_fd(), ask) {
                    Ok(count) => count,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => {
                        stats.rx_errors += 1;
                        break;
                    }
                };
                let mut largest = 0;
                for (received, bytes) in self.buffers.iter_mut() {
                    largest = largest.max(bytes.len());
                    if let Some(dropped) = received.dropped {
                        let before = std::mem::replace(&mut self.dropped[socket], dropped);
                        stats.rx_drop_full += u64::from(dropped.wrapping_sub(before));
                    }
                    take(received, bytes, &mut self.paths, hooks, stats, sink);
                }
                self.ask = if largest < LARGE && count == ask { (2 * self.ask).min(BUFFERS) } else { BUFFERS_IDLE };
                read += count;
                if count < ask || ask == BUFFERS_IDLE {
                    break;
                }
            }
            if read >= budget {
                // The rest of this socket waits until the others had their turn.
                self.next = (socket + 1) % self.sockets.len();
                break;
            }
            self.next = (socket + 1) % self.sockets.len();
        }
        read
    }
}

/// Sets on a bound socket what receiving needs.
fn prepare(fd: BorrowedFd<'_>, options: &UdpOptions) -> io::Result<()> {
    let v6 = sys::local_addr(fd)?.is_ipv6();
    sys::set_nonblocking(fd)?;
    // A socket of both families tells of IPv4 packets too by the IPv6 option; to be told twice costs time.
    sys::set_option(fd, libc::IPPROTO_IP, libc::IP_PKTINFO, (!v6).into())?;
    if v6 {
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
    }
    // Without the following it works too: slower, with default TOS and TTL in GRH areas, or without the traffic of cards over IPv6.
    let wish = |level, option| {
        if let Err(error) = sys::set_option(fd, level, option, 1) {
            log::debug!("socket option {level}/{option} is not to be had: {error}");
        }
    };
    wish(libc::SOL_SOCKET, libc::SO_RXQ_OVFL);
    wish(libc::IPPROTO_IP, libc::IP_RECVTOS);
    wish(libc::IPPROTO_IP, libc::IP_RECVTTL);
    if v6 {
        wish(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS);
        wish(libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT);
        wish(libc::SOL_UDP, sys::UDP_NO_CHECK6_RX);
    }
    if options.gro {
        wish(libc::SOL_UDP, libc::UDP_GRO);
    }
    sys::grow_buffer(fd, Buffer::Receive, options.rcvbuf);
    Ok(())
}

/// Deals with one datagram from a socket.
fn take(
    received: &Received,
    bytes: &mut [u8],
    paths: &mut Paths,
    hooks: &mut Hooks,
    stats: &mut LinkStats,
    sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8]),
) {
    let (Some(src), Some(dst), false) = (received.src, received.dst, received.truncated) else {
        stats.rx_datagrams += 1;
        stats.rx_bad_datagram += 1;
        return;
    };
    let net = NetHeader {
        src: src.ip().to_canonical(),
        dst: dst.to_canonical(),
        src_port: src.port(),
        tclass: received.tclass,
        hop_limit: received.hop_limit,
        udp_len: 0,
        ifindex: received.ifindex,
    };
    if let Some(corrupt) = &mut hooks.corrupt {
        let segment = if received.segment == 0 { bytes.len().max(1) } else { received.segment };
        for packet in bytes.chunks_mut(segment) {
            if let Some(bit) = corrupt(Direction::Rx, packet.len()) {
                stats.fault_corrupted += 1;
                super::flip(packet, bit);
            }
        }
    }
    ingest_with(paths, &net, received.segment, bytes, &mut hooks.tap, stats, sink);
}

/// Cuts a received datagram into packets and gives the good ones to `sink`: ICRC checked, headers parsed, payload without pad.
///
/// `net` tells the datagram's addresses and source port (its `udp_len` is not looked at), `segment` the size of every packet but
/// the last when the system merged several (GRO), or 0. The bytes may be anything: what is no packet is counted and dropped. Work
/// is in proportion to the bytes.
///
/// Over IPv4 the ICRC covers the Identification, which a socket does not tell. Our own senders count it from 0 in each batch, others
/// send 0 or count on and on: so the first packet of a datagram is taken to have 0 and each further one the next number; failing
/// that it is solved for (see `ferroce_wire::icrc`).
pub fn ingest(
    net: &NetHeader,
    segment: usize,
    datagram: &[u8],
    stats: &mut LinkStats,
    sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8]),
) {
    ingest_with(&mut Paths::default(), net, segment, datagram, &mut None, stats, sink);
}

fn ingest_with(
    paths: &mut Paths,
    net: &NetHeader,
    segment: usize,
    datagram: &[u8],
    tap: &mut Option<super::Tap>,
    stats: &mut LinkStats,
    sink: &mut dyn FnMut(&NetHeader, &Headers, &[u8]),
) {
    stats.rx_datagrams += 1;
    stats.rx_bytes += datagram.len() as u64;
    if datagram.len() > usize::from(u16::MAX) {
        stats.rx_bad_datagram += 1;
        return;
    }
    if datagram.is_empty() {
        stats.rx_packets += 1;
        stats.rx_too_short += 1;
        return;
    }
    let segment = if segment == 0 { datagram.len() } else { segment };
    stats.rx_gro_batches += u64::from(segment < datagram.len());
    let path = paths.of(net);
    let mut foretold = 0;
    for packet in datagram.chunks(segment) {
        stats.rx_packets += 1;
        let net = NetHeader { udp_len: packet.len() as u16, ..*net };
        let checked = check(&mut path.sum, &net, foretold, packet);
        if let Some(tap) = tap {
            let identification = checked.unwrap_or(0);
            tap(&Frame { direction: Direction::Rx, net: &net, identification, bytes: packet });
        }
        match checked {
            Ok(identification) => {
                let known = identification == foretold || identification == 0 || identification == path.next;
                stats.rx_icrc_known += u64::from(known);
                stats.rx_icrc_solved += u64::from(!known);
                foretold = identification.wrapping_add(1);
                path.next = foretold;
            }
            Err(Bad::TooShort) => {
                stats.rx_too_short += 1;
                continue;
            }
            Err(Bad::Icrc) => {
                stats.rx_icrc_errors += 1;
                foretold = foretold.wrapping_add(1);
                continue;
            }
        }
        let body = &packet[..packet.len() - ICRC_LEN];
        // By reference: moving the headers once more would cost as much as parsing them.
        match &Headers::parse(body) {
            // InfiniBand counts packets in words (IBA 7.7.5); what is not filled up has no PadCnt that could be right.
            Ok(_) if !body.len().is_multiple_of(4) => stats.rx_bad_pad += 1,
            Ok((headers, payload)) => sink(&net, headers, &body[payload.clone()]),
            Err(ParseError::TooShort { .. } | ParseError::Truncated { .. }) => stats.rx_too_short += 1,
            Err(ParseError::Version { .. }) => stats.rx_bad_version += 1,
            Err(ParseError::Pad { .. }) => stats.rx_bad_pad += 1,
        }
    }
}

#[derive(Clone, Copy)]
enum Bad {
    TooShort,
    Icrc,
}

/// Checks the ICRC of a packet and gives its Identification. One pass over the bytes, whatever the Identification is.
fn check(path: &mut PathSum, net: &NetHeader, foretold: u16, packet: &[u8]) -> Result<u16, Bad> {
    let Some((body, icrc)) = packet.split_last_chunk::<ICRC_LEN>().filter(|(body, _)| body.len() >= BTH_LEN) else {
        return Err(Bad::TooShort);
    };
    let sum = icrc::body(path.state(net.udp_len, foretold), body);
    let difference = sum ^ u32::from_le_bytes(*icrc);
    if difference == 0 {
        return Ok(foretold);
    }
    if net.dst.is_ipv6() {
        return Err(Bad::Icrc);
    }
    // CRC is linear: the difference is the image of the true Identification and the foretold one, exclusive-or'ed.
    icrc::solve_identification(difference, ID_TO_BTH + body.len()).map(|other| foretold ^ other).ok_or(Bad::Icrc)
}

/// What is known of the path of the last datagram: most often that of the next one too.
#[derive(Default)]
struct Paths(Option<Path>);

struct Path {
    key: (IpAddr, IpAddr, u16),
    /// The ICRC up to the BTH.
    sum: PathSum,
    /// The Identification that follows the last one, for peers that count on.
    next: u16,
}

impl Paths {
    fn of(&mut self, net: &NetHeader) -> &mut Path {
        let key = (net.src, net.dst, net.src_port);
        if self.0.as_ref().is_none_or(|path| path.key != key) {
            let sum = PathSum::new(Pseudo::new(net.src, net.dst, net.src_port), net.dst.is_ipv4());
            self.0 = Some(Path { key, sum, next: 0 });
        }
        self.0.as_mut().expect("set above")
    }
}
