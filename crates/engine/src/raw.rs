//! The frames of RAW_PACKET queue pairs: packet sockets of the devices, and the flows that say who gets what comes in.
//!
//! A device has one socket to send by, and one to receive by while it has flows: what no flow wants is not read. A frame goes to the flows
//! of this process as well, as a card's own switch has it: loopback brings it back by itself, for other interfaces it is done here.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use ferroce_core::CoreError;
use ferroce_core::flow::{FlowId, FlowRule, FlowTable, Receivers};
use ferroce_link::LinkStats;
use ferroce_link::raw::{FrameBuffer, FrameReceiver, FrameSender};
use ferroce_transport::{FrameFate, Nanos};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

/// Frames taken from a device in one turn.
const RECEIVE_BUDGET: usize = 16;
/// How long a queue pair waits that found no room at the interface.
const NO_ROOM_NS: Nanos = 50_000;

/// What sleepers of a lane wait for besides packets: frames. Empty until the first flow.
#[derive(Debug, Default)]
pub(crate) struct RawSleep(OnceLock<Epoll>);

impl RawSleep {
    /// Readable when there are frames.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.get().map(|epoll| epoll.0.as_fd())
    }

    fn epoll(&self) -> io::Result<&Epoll> {
        if let Some(epoll) = self.0.get() {
            return Ok(epoll);
        }
        let fresh = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(self.0.get_or_init(|| fresh))
    }
}

/// What sleepers are woken by until it is dropped.
struct Watched<T: AsFd> {
    source: T,
    sleep: Arc<RawSleep>,
}

impl<T: AsFd> Watched<T> {
    fn new(source: T, sleep: Arc<RawSleep>) -> io::Result<Watched<T>> {
        sleep.epoll()?.add(&source, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        Ok(Watched { source, sleep })
    }
}

impl<T: AsFd> Drop for Watched<T> {
    /// Closing it is not enough: the set watches the open file, and a forked child may still have that.
    fn drop(&mut self) {
        if let Err(error) = self.sleep.epoll().and_then(|epoll| Ok(epoll.delete(&self.source)?)) {
            log::warn!("a packet socket that is closed still wakes sleepers: {error}");
        }
    }
}

impl<T: AsFd> Deref for Watched<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.source
    }
}

impl<T: AsFd> DerefMut for Watched<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.source
    }
}

/// A device with RAW_PACKET queue pairs.
struct Port {
    ifindex: u32,
    sender: FrameSender,
    /// There are flows.
    receiver: Option<Watched<FrameReceiver>>,
    /// To the slots of queue pairs.
    flows: FlowTable<u16>,
    /// Queue pairs.
    users: u32,
}

/// The devices of a lane that have RAW_PACKET queue pairs.
pub(crate) struct RawPorts {
    ports: Vec<Port>,
    buffer: Option<FrameBuffer>,
    sleep: Arc<RawSleep>,
    stats: LinkStats,
}

impl RawPorts {
    pub(crate) fn new(sleep: Arc<RawSleep>) -> RawPorts {
        RawPorts { ports: Vec::new(), buffer: None, sleep, stats: LinkStats::default() }
    }

    /// A queue pair of the device comes.
    ///
    /// # Errors
    /// EPERM: the process may not send and receive frames. What the system says.
    pub(crate) fn enter(&mut self, ifindex: u32) -> Result<(), CoreError> {
        if let Some(port) = self.port(ifindex) {
            port.users += 1;
            return Ok(());
        }
        let sender = FrameSender::open(ifindex).map_err(|error| refused(&error))?;
        self.ports.push(Port { ifindex, sender, receiver: None, flows: FlowTable::default(), users: 1 });
        Ok(())
    }

    /// It goes, and so do its flows.
    pub(crate) fn leave(&mut self, ifindex: u32, slot: u16) {
        if let Some(port) = self.port(ifindex) {
            port.flows.remove_receiver(slot);
            port.rest();
            port.users -= 1;
        }
        self.ports.retain(|port| port.users > 0);
    }

    /// Steers frames to a queue pair of the device.
    ///
    /// # Errors
    /// ENOMEM: the device has too many flows. What the system says.
    pub(crate) fn add_flow(&mut self, ifindex: u32, slot: u16, rule: FlowRule) -> Result<FlowId, CoreError> {
        let sleep = Arc::clone(&self.sleep);
        self.buffer.get_or_insert_default();
        let port = self.port(ifindex).expect("a RAW_PACKET queue pair has entered its device");
        if port.receiver.is_none() {
            let receiver = FrameReceiver::open(ifindex).map_err(|error| refused(&error))?;
            port.receiver = Some(Watched::new(receiver, sleep).map_err(|error| refused(&error))?);
        }
        port.flows.insert(rule, slot)
    }

    /// Ends that; false: there is no such flow.
    pub(crate) fn remove_flow(&mut self, ifindex: u32, id: FlowId) -> bool {
        let Some(port) = self.port(ifindex) else { return false };
        let was_there = port.flows.remove(id);
        port.rest();
        was_there
    }

    /// Takes frames that came in, and gives each to whom it is steered to, by slot and with the flow's tag; tells their number.
    pub(crate) fn receive(&mut self, sink: &mut dyn FnMut(u16, u32, &[u8])) -> usize {
        let Some(buffer) = &mut self.buffer else { return 0 };
        let mut count = 0;
        for port in &mut self.ports {
            let Some(receiver) = &mut port.receiver else { continue };
            for _ in 0..RECEIVE_BUDGET {
                let frame = match receiver.recv(buffer, &mut self.stats) {
                    Ok(Some(frame)) => frame,
                    Ok(None) => break,
                    Err(error) => {
                        log::debug!("interface {}: no frames: {error}", port.ifindex);
                        break;
                    }
                };
                count += 1;
                let receivers = port.flows.steer(frame);
                self.stats.frame_rx_unwanted += u64::from(receivers.is_empty());
                receivers.into_iter().for_each(|(slot, tag)| sink(slot, tag, frame));
            }
        }
        count
    }

    /// Gives a frame to the device; tells what became of it, and who in this process gets it as well.
    pub(crate) fn send(&mut self, ifindex: u32, frame: &[u8], now: Nanos) -> (FrameFate, Receivers<u16>) {
        let port = self.ports.iter().find(|port| port.ifindex == ifindex).expect("its queue pair has entered it");
        match port.sender.send(frame).map_err(|error| error.raw_os_error()) {
            Ok(()) => {
                self.stats.frame_tx += 1;
                let comes_back = port.sender.loops();
                (FrameFate::Taken, if comes_back { Receivers::new() } else { port.flows.steer(frame) })
            }
            Err(Some(libc::EAGAIN | libc::ENOBUFS | libc::EINTR)) => {
                (FrameFate::NoRoom { again: now + NO_ROOM_NS }, Receivers::new())
            }
            Err(Some(libc::EMSGSIZE)) => (FrameFate::TooLong, Receivers::new()),
            // An interface that is down loses it, as a cable that is not plugged in.
            Err(_) => {
                self.stats.frame_tx_lost += 1;
                (FrameFate::Taken, Receivers::new())
            }
        }
    }

    /// What it counted.
    pub(crate) fn stats(&self) -> &LinkStats {
        &self.stats
    }

    fn port(&mut self, ifindex: u32) -> Option<&mut Port> {
        self.ports.iter_mut().find(|port| port.ifindex == ifindex)
    }
}

impl Port {
    /// Without flows nothing needs to be received.
    fn rest(&mut self) {
        if self.flows.is_empty() {
            self.receiver = None;
        }
    }
}

/// What the system said to a packet socket.
fn refused(error: &io::Error) -> CoreError {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    let reason = match errno {
        libc::EPERM | libc::EACCES => {
            "RAW_PACKET queue pairs need CAP_NET_RAW in the network namespace: run as root, or in a namespace of your own \
             (`unshare -rn`)"
                .to_owned()
        }
        _ => format!("the system gives no packet socket: {error}"),
    };
    CoreError::new(if errno == libc::EACCES { libc::EPERM } else { errno }, reason)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn wakes(sleep: &RawSleep) -> bool {
        let fd = sleep.fd().expect("something was watched");
        poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::ZERO).expect("poll works") > 0
    }

    #[test]
    fn a_socket_that_is_dropped_wakes_nobody_although_a_copy_of_it_is_open() {
        let sleep = Arc::new(RawSleep::default());
        let (socket, mut peer) = UnixStream::pair().expect("a pair of sockets");
        let copy = socket.try_clone().expect("a second descriptor, as a forked child has it");
        let watched = Watched::new(socket, Arc::clone(&sleep)).expect("it can be watched");
        assert!(!wakes(&sleep));
        peer.write_all(b"frame").expect("there is room");
        assert!(wakes(&sleep));
        drop(watched);
        assert!(!wakes(&sleep));
        drop(copy);
    }
}
