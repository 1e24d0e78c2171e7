//! The tester's end of the DUT's interface: a packet socket, whole IP datagrams in both directions.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Longest datagram that comes in one piece.
const LONGEST: usize = 65_536;

/// A packet socket on an interface. Needs CAP_NET_RAW in the namespace of the network.
#[derive(Debug)]
pub struct Wire {
    socket: OwnedFd,
    to: libc::sockaddr_ll,
}

impl Wire {
    /// Opens the interface `name`; datagrams go to the Ethernet address `mac`.
    pub fn open(name: &str, mac: [u8; 6]) -> io::Result<Wire> {
        let name = CString::new(name)?;
        // SAFETY: the pointer is to a C string that lives through the call.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        if index == 0 {
            return Err(io::Error::last_os_error());
        }
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, i32::from(protocol)) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and nobody else has it.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut address = [0; 8];
        address[..6].copy_from_slice(&mac);
        let to = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: protocol,
            sll_ifindex: index as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 6,
            sll_addr: address,
        };
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the address is a whole sockaddr_ll and its length is given.
        if unsafe { libc::bind(fd, (&raw const to).cast(), length) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let one: libc::c_int = 1;
        let size = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the value is an int and its size is given.
        let ignored = unsafe {
            libc::setsockopt(fd, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, (&raw const one).cast(), size)
        };
        if ignored != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Wire { socket, to })
    }

    /// Sends a datagram.
    pub fn send(&self, datagram: &[u8]) -> io::Result<()> {
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        let is_v6 = datagram.first().is_some_and(|byte| byte >> 4 == 6);
        let ethertype = if is_v6 { libc::ETH_P_IPV6 } else { libc::ETH_P_IP } as u16;
        let to = libc::sockaddr_ll { sll_protocol: ethertype.to_be(), ..self.to };
        // SAFETY: both buffers live through the call and their lengths are given.
        let sent = unsafe {
            libc::sendto(
                self.socket.as_raw_fd(),
                datagram.as_ptr().cast(),
                datagram.len(),
                0,
                (&raw const to).cast(),
                length,
            )
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The next datagram (of whatever protocol), or `None` if none comes until `deadline`.
    pub fn recv(&self, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up, so that the last part of a millisecond is no busy loop.
        let milliseconds = (left + Duration::from_micros(999)).as_millis().min(i32::MAX as u128) as i32;
        let mut poll = libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd is passed, and the count says so.
        let ready = unsafe { libc::poll(&raw mut poll, 1, milliseconds) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(None) } else { Err(error) };
        }
        if ready == 0 {
            return Ok(None);
        }
        let mut buffer = vec![0u8; LONGEST];
        // SAFETY: the buffer has as many bytes as are said.
        let got = unsafe {
            libc::recv(self.socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT)
        };
        if got < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        buffer.truncate(got as usize);
        Ok(Some(buffer))
    }
}
