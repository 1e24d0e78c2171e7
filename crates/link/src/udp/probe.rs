//! What the system's UDP sockets can do, found out by trying.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::OnceLock;

use super::sys::{self, Message, Name, Piece};

/// What the system can do for a UDP link. No privilege is needed for any of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// IPv6 sockets exist.
    pub ipv6: bool,
    /// Packets of one GSO batch (`UDP_SEGMENT`), at most; 0: there is no GSO.
    pub gso_segments: u16,
    /// GRO batches can be received (`UDP_GRO`).
    pub gro: bool,
    /// The destination address of a received packet is told (`IP_PKTINFO`). The ICRC cannot be checked without.
    pub packet_info: bool,
    /// IPv6 packets with UDP checksum 0, as kernel rxe and cards send them, are received (`UDP_NO_CHECK6_RX`).
    pub zero_checksum_v6: bool,
    /// Don't Fragment can be set, so that the IPv4 Identification is known (`IP_MTU_DISCOVER`).
    pub dont_fragment: bool,
    /// Bytes of receive buffer that a socket gets when it asks for all it can have, bookkeeping included.
    pub receive_buffer: usize,
}

impl Capabilities {
    /// Tries everything once for this process; later calls give the same answer.
    pub fn probe() -> Capabilities {
        static FOUND: OnceLock<Capabilities> = OnceLock::new();
        *FOUND.get_or_init(Capabilities::probe_now)
    }

    /// Tries everything now, with sockets of its own on the loopback address.
    pub fn probe_now() -> Capabilities {
        let mut found = Capabilities {
            ipv6: false,
            gso_segments: 0,
            gro: false,
            packet_info: false,
            zero_checksum_v6: false,
            dont_fragment: false,
            receive_buffer: 0,
        };
        if let Ok(v6) = sys::udp_socket(true) {
            found.ipv6 = sys::bind(v6.as_fd(), &SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))).is_ok();
            found.zero_checksum_v6 = sys::set_option(v6.as_fd(), libc::SOL_UDP, sys::UDP_NO_CHECK6_RX, 1).is_ok();
        }
        let Ok(v4) = sys::udp_socket(false) else { return found };
        let v4 = v4.as_fd();
        let works = |level, option, value| sys::set_option(v4, level, option, value).is_ok();
        found.gro = works(libc::SOL_UDP, libc::UDP_GRO, 1);
        found.packet_info = works(libc::IPPROTO_IP, libc::IP_PKTINFO, 1);
        found.dont_fragment = works(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO);
        found.receive_buffer = sys::grow_buffer(v4, sys::Buffer::Receive, 32 << 20);
        found.gso_segments = gso_segments();
        found
    }
}

/// Sends batches of one-byte packets to itself: the system must take them, and must have cut them.
fn gso_segments() -> u16 {
    let Ok(tx) = sys::udp_socket(false) else { return 0 };
    if sys::set_option(tx.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_err() {
        return 0;
    }
    for segments in [128, 64] {
        match cuts_batch(tx.as_fd(), segments) {
            Outcome::Cut => return segments,
            Outcome::Unknown => return 64,
            Outcome::Refused => {}
        }
    }
    0
}

enum Outcome {
    Cut,
    Refused,
    /// The loopback interface is down or filtered. The option exists, so most likely it works.
    Unknown,
}

fn cuts_batch(tx: std::os::fd::BorrowedFd<'_>, segments: u16) -> Outcome {
    let localhost = IpAddr::from(Ipv4Addr::LOCALHOST);
    let rx = sys::udp_socket(false).and_then(|rx| {
        sys::bind(rx.as_fd(), &SocketAddr::new(localhost, 0))?;
        Ok((sys::local_addr(rx.as_fd())?, rx))
    });
    let Ok((addr, rx)) = rx else { return Outcome::Unknown };
    let bytes = vec![0u8; segments.into()];
    let pieces = [Piece { addr: bytes.as_ptr().addr(), len: bytes.len() }];
    let message = Message { pieces: &pieces, segment: 1 };
    match sys::send_messages(tx, &Name::from(&addr), std::iter::once(message)) {
        Ok(_) => {}
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EIO | libc::EMSGSIZE)) => {
            return Outcome::Refused;
        }
        Err(_) => return Outcome::Unknown,
    }
    let mut buffers = sys::RxBuffers::new(1);
    if !sys::wait_readable(rx.as_fd(), 100) || buffers.fill(rx.as_fd(), 1).is_err() {
        return Outcome::Unknown;
    }
    match buffers.iter_mut().next() {
        Some((received, _)) if received.len == 1 => Outcome::Cut,
        _ => Outcome::Refused,
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |yes: bool| if yes { "yes" } else { "no" };
        match self.gso_segments {
            0 => writeln!(f, "GSO (UDP_SEGMENT)               no: every packet is a datagram of its own")?,
            n => writeln!(f, "GSO (UDP_SEGMENT)               yes, {n} packets a batch")?,
        }
        writeln!(f, "GRO (UDP_GRO)                   {}", yes(self.gro))?;
        writeln!(f, "packet info (IP_PKTINFO)        {}", yes(self.packet_info))?;
        writeln!(f, "Don't Fragment (IP_MTU_DISCOVER) {}", yes(self.dont_fragment))?;
        writeln!(f, "IPv6                            {}", yes(self.ipv6))?;
        writeln!(f, "IPv6 UDP checksum 0 accepted    {}", yes(self.zero_checksum_v6))?;
        write!(f, "receive buffer                  {} bytes", self.receive_buffer)
    }
}
