//! Whole Ethernet frames of an interface, by packet sockets (packet(7)). They need CAP_NET_RAW in the interface's network namespace.

mod sys;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ferroce_transport::MAX_FRAME;

use crate::LinkStats;
use crate::udp::sys::{Buffer, grow_buffer};

/// Bytes of a frame's two addresses: a VLAN tag follows them.
const ADDRESSES: usize = 12;
/// Bytes of a VLAN tag.
const TAG: usize = 4;
/// Frames that are left out in one look at a socket, at most: the rest waits for the next.
const LEFT_OUT_MAX: usize = 64;
/// Bytes of frames that may wait to be read, if the system lets us have them.
const RECEIVE_BUFFER: usize = 4 << 20;

/// Sends frames to an interface, and receives none.
#[derive(Debug)]
pub struct FrameSender {
    fd: OwnedFd,
    loops: bool,
}

impl FrameSender {
    /// For the interface with this index.
    ///
    /// # Errors
    /// EPERM: no CAP_NET_RAW. ENODEV: no such interface. What `socket(2)` says.
    pub fn open(ifindex: u32) -> io::Result<FrameSender> {
        let fd = sys::socket()?;
        sys::bind(fd.as_fd(), ifindex, sys::Take::Nothing)?;
        let loops = sys::is_loopback(fd.as_fd())?;
        Ok(FrameSender { fd, loops })
    }

    /// The interface gives back what is sent to it: a [`FrameReceiver`] gets it.
    pub fn loops(&self) -> bool {
        self.loops
    }

    /// Gives a frame to the interface, without waiting.
    ///
    /// # Errors
    /// WouldBlock, ENOBUFS: it has no room now. EMSGSIZE: the frame is longer than the MTU allows. What else `send(2)` says.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        sys::send(self.fd.as_fd(), frame)
    }
}

/// Receives all frames that come in by an interface.
#[derive(Debug)]
pub struct FrameReceiver {
    fd: OwnedFd,
    /// Frames that the system dropped so far, modulo 2^32.
    dropped: u32,
}

impl FrameReceiver {
    /// For the interface with this index.
    ///
    /// # Errors
    /// As for [`FrameSender::open`].
    pub fn open(ifindex: u32) -> io::Result<FrameReceiver> {
        let fd = sys::socket()?;
        sys::ask_for_facts(fd.as_fd())?;
        // A smaller buffer loses frames sooner, and works.
        grow_buffer(fd.as_fd(), Buffer::Receive, RECEIVE_BUFFER);
        sys::bind(fd.as_fd(), ifindex, sys::Take::All)?;
        Ok(FrameReceiver { fd, dropped: 0 })
    }

    /// The next frame; `None`: nothing is waiting, or much that is left out. What the host itself sends by the interface is left out (it comes back by loopback).
    ///
    /// # Errors
    /// What `recvmsg(2)` says, such as ENETDOWN, once for each time the interface goes down.
    pub fn recv<'b>(&mut self, buffer: &'b mut FrameBuffer, stats: &mut LinkStats) -> io::Result<Option<&'b [u8]>> {
        let FrameBuffer(bytes) = buffer;
        let room = bytes.len() - TAG;
        for _ in 0..LEFT_OUT_MAX {
            let frame = match sys::recv(self.fd.as_fd(), &mut bytes[..room]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => {
                    stats.frame_rx_errors += 1;
                    return Err(error);
                }
                Ok(frame) => frame,
            };
            if let Some(dropped) = frame.dropped {
                stats.frame_rx_drop_full +=
                    u64::from(dropped.wrapping_sub(std::mem::replace(&mut self.dropped, dropped)));
            }
            if frame.outgoing {
                continue;
            }
            stats.frame_rx += 1;
            if !(ADDRESSES..=room).contains(&frame.len) {
                stats.frame_rx_bad_length += 1;
                continue;
            }
            return Ok(Some(match frame.tag {
                Some((tpid, tci)) => tagged(bytes, frame.len, tpid, tci),
                None => &bytes[..frame.len],
            }));
        }
        Ok(None)
    }
}

/// Becomes readable when there are frames.
impl AsFd for FrameReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The system takes the tag out of a frame before it shows it: puts it back.
fn tagged(bytes: &mut [u8], len: usize, tpid: u16, tci: u16) -> &[u8] {
    bytes.copy_within(ADDRESSES..len, ADDRESSES + TAG);
    bytes[ADDRESSES..ADDRESSES + 2].copy_from_slice(&tpid.to_be_bytes());
    bytes[ADDRESSES + 2..ADDRESSES + TAG].copy_from_slice(&tci.to_be_bytes());
    &bytes[..len + TAG]
}

/// Room for a frame of any length.
#[derive(Debug)]
pub struct FrameBuffer(Box<[u8]>);

impl Default for FrameBuffer {
    fn default() -> Self {
        FrameBuffer(vec![0; MAX_FRAME as usize + TAG].into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_put_back_behind_the_addresses() {
        let mut bytes: Vec<u8> = (0..24).collect();
        let frame = tagged(&mut bytes, 20, 0x8100, 0x6007);
        let expected: Vec<u8> = (0..12).chain([0x81, 0x00, 0x60, 0x07]).chain(12..20).collect();
        assert_eq!(frame, expected);
    }
}
