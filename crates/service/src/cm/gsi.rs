//! Queue pair 1: management datagrams as UDP packets.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::AsFd;

use ferroce_cm::{Arrival, Path, Transmit};
use ferroce_wire::mad::{GSI_QPN, GsiError, MAD_LEN, check_gsi, gsi_headers};
use ferroce_wire::{Headers, ICRC_LEN, NetHeader, ParseError, Psn, icrc};

use crate::config::Fault;
use crate::sys;

/// Local addresses with a socket of their own, at most; a host with more opens some of them again and again.
const SOCKETS_MAX: usize = 64;

/// The sending side of queue pair 1. Packets arrive at the service's socket of the group.
#[derive(Debug)]
pub(crate) struct Gsi {
    /// Where the peers' services listen.
    port: u16,
    /// By local address and interface. Never connected: then the kernel's IPv4 Identification is 0, which the ICRC covers.
    sockets: BTreeMap<(IpAddr, u32), UdpSocket>,
    psn: u32,
    fault: Fault,
}

impl Gsi {
    pub(crate) fn new(port: u16, fault: Fault) -> Gsi {
        Gsi { port, sockets: BTreeMap::new(), psn: rand::random_range(0..1 << 24), fault }
    }

    /// Sends one datagram; what fails may as well have been lost.
    pub(crate) fn send(&mut self, transmit: &Transmit) -> io::Result<()> {
        if rand::random_range(0..1000) < self.fault.cm_loss_permille {
            return Ok(());
        }
        let path = &transmit.path;
        let port = self.port;
        self.psn = (self.psn + 1) & 0xff_ffff;
        let headers = gsi_headers(Psn::new(self.psn));
        let socket = self.socket(path)?;
        let src_port = socket.local_addr()?.port();
        let mut packet = vec![0; headers.len() + MAD_LEN + ICRC_LEN];
        let (body, trailer) = packet.split_at_mut(headers.len() + MAD_LEN);
        headers.emit(body);
        body[headers.len()..].copy_from_slice(&transmit.mad.emit());
        let udp_len = (body.len() + ICRC_LEN) as u16;
        let net = NetHeader {
            src: path.local,
            dst: path.remote,
            src_port,
            tclass: 0,
            hop_limit: path.hop_limit,
            udp_len,
            ifindex: 0,
        };
        trailer.copy_from_slice(&icrc::icrc_over(&net, 0, body).to_le_bytes());
        socket.send_to(&packet, scoped(path.remote, port, path.ifindex))?;
        Ok(())
    }

    /// Whether a datagram from there is one of ours: it came back to this host.
    pub(crate) fn sends_from(&self, from: SocketAddr) -> bool {
        let from_there = self.sockets.iter().filter(|((local, _), _)| local.to_canonical() == from.ip().to_canonical());
        from_there
            .map(|(_, socket)| socket)
            .any(|socket| socket.local_addr().is_ok_and(|own| own.port() == from.port()))
    }

    fn socket(&mut self, path: &Path) -> io::Result<&UdpSocket> {
        let key = (path.local, path.ifindex);
        if !self.sockets.contains_key(&key) {
            if self.sockets.len() >= SOCKETS_MAX {
                self.sockets.clear();
            }
            let socket = UdpSocket::bind(scoped(path.local, 0, path.ifindex))?;
            socket.set_nonblocking(true)?;
            let (level, option) = match path.local {
                IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
                IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
            };
            // Do not fragment: only then is the Identification 0. The number is the same for IPv6.
            sys::set_int_option(socket.as_fd(), level, option, libc::IP_PMTUDISC_DO)?;
            self.sockets.insert(key, socket);
        }
        Ok(&self.sockets[&key])
    }
}

fn scoped(ip: IpAddr, port: u16, ifindex: u32) -> SocketAddr {
    match ip {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => SocketAddrV6::new(v6, port, 0, ifindex).into(),
        ip => SocketAddr::new(ip, port),
    }
}

/// A packet to queue pair 1.
pub(crate) struct Inbound<'a> {
    pub(crate) arrival: Arrival,
    pub(crate) payload: &'a [u8],
}

/// Why a packet is not for queue pair 1, or not as it must be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotGsi {
    #[error(transparent)]
    Packet(#[from] ParseError),
    #[error(transparent)]
    Gsi(#[from] GsiError),
}

impl<'a> Inbound<'a> {
    /// Whether the packet is for queue pair 1, right or wrong.
    pub(crate) fn is_for_us(packet: &[u8]) -> bool {
        packet.get(5..8).is_some_and(|qpn| qpn == &GSI_QPN.to_be_bytes()[1..])
    }

    /// Takes a packet without its ICRC, which was right.
    pub(crate) fn parse(src: SocketAddr, dst: IpAddr, packet: &'a [u8]) -> Result<Inbound<'a>, NotGsi> {
        let (headers, payload) = Headers::parse(packet)?;
        check_gsi(&headers)?;
        let ifindex = if let SocketAddr::V6(v6) = src { v6.scope_id() } else { 0 };
        let arrival = Arrival { src: src.ip(), dst, ifindex };
        Ok(Inbound { arrival, payload: &packet[payload] })
    }
}
