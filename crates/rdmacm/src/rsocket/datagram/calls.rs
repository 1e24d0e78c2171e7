//! What the functions of rsocket(7) do with a datagram socket.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use libc::{iovec, msghdr, sockaddr, sockaddr_storage, socklen_t};

use super::super::connect::{patience, show};
use super::super::gather::Gather;
use super::super::options::{self, Value};
use super::super::wait::Patience;
use super::port::Port;
use super::{Arrived, Datagram, Place, Work, address};
use crate::addr;
use crate::entry::{Call, Refusal};

/// How long `rclose` waits for what was sent to leave: flow control of datagrams gives up before.
const CLOSE_WAIT: Duration = Duration::from_secs(1);

/// Where a datagram is received to.
pub(in super::super) struct Received {
    /// Bytes copied.
    pub(in super::super) len: usize,
    /// It was longer.
    pub(in super::super) is_cut: bool,
    /// Whose it is.
    pub(in super::super) src: sockaddr_storage,
}

fn system(result: c_int) -> Call<()> {
    if result == 0 { Ok(()) } else { Err(Refusal::last()) }
}

/// Names and connections.
impl Datagram {
    pub(in super::super) fn bind(&self, pointer: *const sockaddr, len: socklen_t) -> Call<()> {
        let wanted = address::storage(address::given(pointer, len)?);
        // SAFETY: an open socket; an address of ours, of which the kernel reads as much as its family has.
        system(unsafe { libc::bind(self.number(), addr::plain(&wanted), len) })
    }

    /// Datagrams go to this peer, and come from it only over UDP, from now on.
    pub(in super::super) fn connect(&self, pointer: *const sockaddr, len: socklen_t) -> Call<()> {
        let peer = address::given(pointer, len)?;
        let name = address::storage(peer);
        let mut work = self.work();
        // SAFETY: an open socket; an address of ours, with its length.
        system(unsafe { libc::connect(self.number(), addr::plain(&name), address::length(peer)) })?;
        self.meet(&mut work, peer)?;
        work.connected = Some(peer);
        Ok(())
    }

    pub(in super::super) fn own_name(&self, place: *mut sockaddr, len: *mut socklen_t) -> Call<()> {
        show(&address::storage(self.name()?), place, len)
    }

    pub(in super::super) fn peer_name(&self, place: *mut sockaddr, len: *mut socklen_t) -> Call<()> {
        let connected = self.work().connected.ok_or_else(|| Refusal::told(libc::ENOTCONN))?;
        show(&address::storage(connected), place, len)
    }

    /// Waits a moment for what was sent, and ends it: no call can find it any more.
    pub(in super::super) fn close(&self) {
        let patience = Instant::now().checked_add(CLOSE_WAIT).map_or(Patience::None, Patience::Until);
        loop {
            match self.until(patience, |work| Ok(work.ports.iter().all(Port::all_sent).then_some(()))) {
                Err(refusal) if refusal.errno() == libc::EINTR => {}
                _ => break,
            }
        }
        let mut work = self.work();
        work.closed = true;
        work.wake_others();
        work.queue.clear();
        work.peers.clear();
        work.ports.clear();
    }
}

/// Transfer.
impl Datagram {
    fn patience(&self, flags: c_int, timeout: impl FnOnce(&Work) -> Option<Duration>) -> Patience {
        let work = self.work();
        patience(work.options.is_nonblocking || flags & libc::MSG_DONTWAIT != 0, timeout(&work))
    }

    /// Sends the pieces as one datagram; without an address to the peer that it is connected to.
    pub(in super::super) fn transmit(
        &self,
        pieces: &[iovec],
        total: usize,
        flags: c_int,
        to: (*const sockaddr, socklen_t),
    ) -> Call<isize> {
        let to: Option<SocketAddr> = if to.0.is_null() { None } else { Some(address::given(to.0, to.1)?) };
        let patience = self.patience(flags, |work| work.options.send_timeout);
        let flags = if matches!(patience, Patience::None) { libc::MSG_DONTWAIT } else { 0 };
        self.until(patience, |work| {
            let to =
                to.or(work.connected).ok_or_else(|| Refusal::new(libc::EDESTADDRREQ, "the rsocket has no peer"))?;
            // SAFETY: the program's bytes stay during the call.
            let mut data = unsafe { Gather::new(pieces, total) };
            self.send(work, to, &mut data, flags)
        })?;
        Ok(total as isize)
    }

    /// Receives a datagram.
    pub(in super::super) fn receive(&self, pieces: &[iovec], flags: c_int) -> Call<Received> {
        let patience = self.patience(flags, |work| work.options.receive_timeout);
        self.until(patience, |work| {
            let Some(arrived) = work.queue.pop_front() else { return Ok(None) };
            let received = copy_out(work, &arrived, pieces);
            if flags & libc::MSG_PEEK != 0 {
                work.queue.push_front(arrived);
            } else if let Place::Slot { port, slot, .. } = arrived.place {
                work.ports[port].release(slot);
            }
            Ok(Some(received))
        })
    }
}

fn copy_out(work: &Work, arrived: &Arrived, pieces: &[iovec]) -> Received {
    let whole = match &arrived.place {
        Place::Slot { port, span, .. } => work.ports[*port].bytes(*span),
        Place::Bytes(bytes) => bytes,
    };
    let mut rest = whole;
    for piece in pieces {
        let (part, behind) = rest.split_at(piece.iov_len.min(rest.len()));
        // SAFETY: room for so many bytes, by the contract of the functions of C.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), piece.iov_base.cast::<u8>(), part.len()) };
        rest = behind;
    }
    Received { len: whole.len() - rest.len(), is_cut: !rest.is_empty(), src: address::storage(arrived.src) }
}

impl Received {
    /// Writes the sender's address for the program, if it wants it.
    pub(in super::super) fn show_src(&self, place: *mut sockaddr, len: *mut socklen_t) -> Call<()> {
        if place.is_null() || len.is_null() { Ok(()) } else { show(&self.src, place, len) }
    }

    /// As `recvmsg` tells it.
    pub(in super::super) fn show_message(&self, message: &mut msghdr) -> Call<()> {
        message.msg_controllen = 0;
        message.msg_flags = if self.is_cut { libc::MSG_TRUNC } else { 0 };
        if message.msg_name.is_null() {
            message.msg_namelen = 0;
            return Ok(());
        }
        show(&self.src, message.msg_name.cast(), &raw mut message.msg_namelen)
    }
}

/// Options.
impl Datagram {
    /// Sizes and times are the rsocket's, all else is the UDP socket's.
    pub(in super::super) fn set_option(&self, level: c_int, option: c_int, value: &Value) -> Call<()> {
        let mut work = self.work();
        let is_open = work.ports.is_empty();
        if let Some(done) = options::set_sizes(&mut work.options, level, option, value, is_open) {
            return done;
        }
        let (start, len) = value.raw();
        // SAFETY: an open socket; the program's value, by the contract of the function.
        system(unsafe { libc::setsockopt(self.number(), level, option, start, len) })
    }

    pub(in super::super) fn option(
        &self,
        level: c_int,
        option: c_int,
        value: *mut c_void,
        len: *mut socklen_t,
    ) -> Call<()> {
        if let Some(bytes) = options::sizes_of(&self.work().options, level, option) {
            return options::give(&bytes, value, len);
        }
        // SAFETY: an open socket; the program's places, by the contract of the function.
        system(unsafe { libc::getsockopt(self.number(), level, option, value, len) })
    }

    pub(in super::super) fn control(&self, command: c_int, argument: c_int) -> Call<c_int> {
        options::control(&mut self.work().options, command, argument)
    }
}
