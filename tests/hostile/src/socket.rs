//! The attacker's socket: many datagrams in one call, with or without segmentation by the kernel.

#![allow(unsafe_code)]

use std::io;
use std::mem;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;

use ferroce_wire::UDP_PORT;

use crate::forge::Packets;

/// Datagrams of one call.
const BATCH: usize = 64;
/// Segments that a kernel cuts from one send, at most.
const SEGMENTS_MAX: usize = 64;
/// Bytes of one send, at most.
const BYTES_MAX: usize = 60_000;

/// Room for one control message with a 16-bit number.
const CONTROL: usize = 32;

/// Sends to UDP port 4791 of one address.
#[derive(Debug)]
pub struct Attacker {
    socket: UdpSocket,
    to: libc::sockaddr_in,
}

impl Attacker {
    /// A socket with the address `from`; everything goes to `to`.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(from: Ipv4Addr, to: Ipv4Addr) -> io::Result<Attacker> {
        let socket = UdpSocket::bind((from, 0))?;
        // SAFETY: all zero is a valid value of this structure of numbers.
        let mut address: libc::sockaddr_in = unsafe { mem::zeroed() };
        address.sin_family = libc::AF_INET as libc::sa_family_t;
        address.sin_port = UDP_PORT.to_be();
        address.sin_addr.s_addr = u32::from(to).to_be();
        Ok(Attacker { socket, to: address })
    }

    /// Its port.
    ///
    /// # Errors
    /// What the system says.
    pub fn port(&self) -> io::Result<u16> {
        Ok(self.socket.local_addr()?.port())
    }

    /// Sends packets in their order; with `merge` neighbours of one size leave as one batch, which arrives as one.
    ///
    /// # Errors
    /// What the system says.
    pub fn send(&self, packets: &Packets, merge: bool) -> io::Result<()> {
        let mut sends: Vec<(Vec<libc::iovec>, usize)> = Vec::new();
        for packet in packets.iter() {
            let piece = libc::iovec { iov_base: packet.as_ptr().cast_mut().cast(), iov_len: packet.len() };
            let joins = |(pieces, size): &&mut (Vec<libc::iovec>, usize)| {
                merge && *size == packet.len() && pieces.len() < SEGMENTS_MAX && (pieces.len() + 1) * size <= BYTES_MAX
            };
            match sends.last_mut().filter(joins) {
                Some((pieces, _)) => pieces.push(piece),
                None => sends.push((vec![piece], packet.len())),
            }
        }
        for batch in sends.chunks_mut(BATCH) {
            self.send_batch(batch)?;
        }
        Ok(())
    }

    fn send_batch(&self, sends: &mut [(Vec<libc::iovec>, usize)]) -> io::Result<()> {
        let mut controls = [[0u64; CONTROL / 8]; BATCH];
        let mut headers: Vec<libc::mmsghdr> = Vec::with_capacity(sends.len());
        for ((pieces, size), control) in sends.iter_mut().zip(&mut controls) {
            // SAFETY: all zero is a valid value of this structure of numbers and pointers.
            let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
            header.msg_hdr.msg_name = (&raw const self.to).cast_mut().cast();
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
            header.msg_hdr.msg_iov = pieces.as_mut_ptr();
            header.msg_hdr.msg_iovlen = pieces.len();
            if pieces.len() > 1 {
                header.msg_hdr.msg_control = control.as_mut_ptr().cast();
                header.msg_hdr.msg_controllen = CONTROL;
                // SAFETY: the control buffer is aligned and has room for one message with a u16.
                unsafe {
                    let message = libc::CMSG_FIRSTHDR(&header.msg_hdr);
                    (*message).cmsg_level = libc::SOL_UDP;
                    (*message).cmsg_type = libc::UDP_SEGMENT;
                    (*message).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as usize;
                    libc::CMSG_DATA(message).cast::<u16>().write_unaligned(*size as u16);
                    header.msg_hdr.msg_controllen = libc::CMSG_SPACE(size_of::<u16>() as u32) as usize;
                }
            }
            headers.push(header);
        }
        let mut done = 0;
        while done < headers.len() {
            let rest = &mut headers[done..];
            // SAFETY: every pointer of the headers is to memory that lives until the end of this function.
            let sent = unsafe { libc::sendmmsg(self.socket.as_raw_fd(), rest.as_mut_ptr(), rest.len() as u32, 0) };
            match usize::try_from(sent) {
                Ok(sent) => done += sent,
                Err(_) => {
                    let error = io::Error::last_os_error();
                    match error.raw_os_error() {
                        Some(libc::EINTR | libc::ENOBUFS | libc::EAGAIN) => {}
                        // A reset relay of the destination (ICMP): the kernel tells it once.
                        Some(libc::ECONNREFUSED) => {}
                        _ => return Err(error),
                    }
                }
            }
        }
        Ok(())
    }
}
