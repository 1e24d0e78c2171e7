//! Finding out at which indices of the kernel's group sockets are that others opened.
//!
//! After the death of keeper and service the sockets of the group that programs have live on, in an order that nobody wrote
//! down. Each index in turn is made the target of all packets, and probes are sent: the socket that gets them is the one there.
//! Their holders read those sockets meanwhile, so that it cannot be seen by reading: a filter drops the probes, and
//! the kernel counts, for each socket, what it dropped. Packets of programs that arrive meanwhile come to the wrong lane, which relays them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use crate::{steer, sys};

/// Probes that are sent to one index and must all be dropped by the same socket.
const PROBES: u32 = 2;

/// How often a socket's count is looked at before nobody is taken to be at an index, and the pause between.
const LOOKS: u32 = 10;
const PAUSE: Duration = Duration::from_micros(50);

/// Length of a probe. To whom it comes, it is too short to be a packet.
pub(crate) const MARK_BYTES: usize = 8;

/// Attempts at an index where the counts contradict each other.
const ATTEMPTS: u32 = 5;

/// The indices of sockets of one group, in their order; None: not found below `bound`, the number of sockets that the group can have.
///
/// Leaves a program behind that steers everything to one socket: the caller attaches the right one.
pub(crate) fn indices(port: u16, bound: u32, sockets: &[BorrowedFd<'_>]) -> io::Result<Vec<Option<u32>>> {
    let mut found = vec![None; sockets.len()];
    let Some(group) = sockets.first() else { return Ok(found) };
    let prober = Prober::new(port, sockets)?;
    let mut left: Vec<usize> = (0..sockets.len()).collect();
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

/// Sends probes to sockets that have its filter; takes the filter off when it is dropped.
struct Prober<'a> {
    sockets: &'a [BorrowedFd<'a>],
    sender: UdpSocket,
    mark: [u8; MARK_BYTES],
}

impl<'a> Prober<'a> {
    fn new(port: u16, sockets: &'a [BorrowedFd<'a>]) -> io::Result<Prober<'a>> {
        let prober = Prober { sockets, sender: sender(port)?, mark: rand::random() };
        for socket in sockets {
            sys::attach_filter(*socket, &steer::drop_marked(prober.mark))?;
        }
        Ok(prober)
    }

    /// Which of the sockets gets what is sent now; None: none of them.
    fn receiver(&self, among: &[usize]) -> io::Result<Option<usize>> {
        for _ in 0..ATTEMPTS {
            let Some(socket) = self.drops_all(among)? else { return Ok(None) };
            // A packet on its way under the program before may have been dropped by another one.
            if self.drops_all(&[socket])?.is_some() {
                return Ok(Some(socket));
            }
        }
        Ok(None)
    }

    fn drops_all(&self, among: &[usize]) -> io::Result<Option<usize>> {
        let count = |socket: &usize| sys::drops(self.sockets[*socket]);
        let before = among.iter().map(count).collect::<io::Result<Vec<u32>>>()?;
        for _ in 0..PROBES {
            self.sender.send(&self.mark)?;
        }
        for look in 0..LOOKS {
            if look > 0 {
                std::thread::sleep(PAUSE);
            }
            for (socket, before) in among.iter().zip(&before) {
                if count(socket)?.wrapping_sub(*before) >= PROBES {
                    return Ok(Some(*socket));
                }
            }
        }
        Ok(None)
    }
}

impl Drop for Prober<'_> {
    fn drop(&mut self) {
        for socket in self.sockets {
            let off = sys::set_int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_DETACH_FILTER, 0);
            if let Err(error) = off {
                // It would drop this mark, which is never sent again.
                log::debug!("a filter stays: {error}");
            }
        }
    }
}

/// A socket that sends to the port over loopback.
fn sender(port: u16) -> io::Result<UdpSocket> {
    let connect = |ip: IpAddr| {
        let socket = UdpSocket::bind((ip, 0))?;
        socket.connect((ip, port))?;
        Ok(socket)
    };
    connect(Ipv4Addr::LOCALHOST.into()).or_else(|_: io::Error| connect(Ipv6Addr::LOCALHOST.into()))
}
