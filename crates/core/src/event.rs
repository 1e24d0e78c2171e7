//! Asynchronous events: `ibv_get_async_event`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use ferroce_transport::QpEvent;

use crate::event_fd::EventQueue;

/// Events of shared receive queues. Values of `enum ibv_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum SrqEvent {
    /// `IBV_EVENT_SRQ_ERR`
    Error = 14,
    /// `IBV_EVENT_SRQ_LIMIT_REACHED`
    LimitReached = 15,
}

/// Events of ports. Values of `enum ibv_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum PortEvent {
    /// `IBV_EVENT_PORT_ACTIVE`
    Active = 9,
    /// `IBV_EVENT_PORT_ERR`
    Error = 10,
    /// `IBV_EVENT_GID_CHANGE`
    GidChange = 18,
}

/// `IBV_EVENT_CQ_ERR`
pub const CQ_ERR: u32 = 0;
/// `IBV_EVENT_DEVICE_FATAL`
pub const DEVICE_FATAL: u32 = 8;

/// One asynchronous event. Cookies are what the objects were made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AsyncEvent {
    /// About a queue pair.
    Qp {
        /// The queue pair.
        cookie: u64,
        /// Its number.
        qpn: u32,
        /// What happened.
        event: QpEvent,
    },
    /// A completion queue overran; completions were lost.
    Cq {
        /// The completion queue.
        cookie: u64,
    },
    /// About a shared receive queue.
    Srq {
        /// The shared receive queue.
        cookie: u64,
        /// What happened.
        event: SrqEvent,
    },
    /// About a port.
    Port {
        /// Port number, from 1.
        port: u8,
        /// What happened.
        event: PortEvent,
    },
    /// The device is gone for good.
    DeviceFatal,
}

/// An object that raises asynchronous events and can be destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventSource {
    /// The queue pair with this cookie.
    Qp(u64),
    /// The completion queue with this cookie.
    Cq(u64),
    /// The shared receive queue with this cookie.
    Srq(u64),
}

impl AsyncEvent {
    /// The object it came from, if that is one that can be destroyed.
    pub fn source(&self) -> Option<EventSource> {
        match *self {
            AsyncEvent::Qp { cookie, .. } => Some(EventSource::Qp(cookie)),
            AsyncEvent::Cq { cookie } => Some(EventSource::Cq(cookie)),
            AsyncEvent::Srq { cookie, .. } => Some(EventSource::Srq(cookie)),
            AsyncEvent::Port { .. } | AsyncEvent::DeviceFatal => None,
        }
    }

    /// The value of `enum ibv_event_type`.
    pub fn event_type(&self) -> u32 {
        match *self {
            AsyncEvent::Qp { event, .. } => event as u32,
            AsyncEvent::Cq { .. } => CQ_ERR,
            AsyncEvent::Srq { event, .. } => event as u32,
            AsyncEvent::Port { event, .. } => event as u32,
            AsyncEvent::DeviceFatal => DEVICE_FATAL,
        }
    }
}

/// The asynchronous events of one device context.
#[derive(Debug)]
pub struct AsyncQueue {
    queue: EventQueue<EventSource, AsyncEvent>,
}

impl AsyncQueue {
    /// A queue without events.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM of `eventfd(2)`.
    pub fn new() -> io::Result<AsyncQueue> {
        Ok(AsyncQueue { queue: EventQueue::new()? })
    }

    /// `async_fd`: readable while an event waits. The program may poll it and set `O_NONBLOCK`; only [`AsyncQueue::next_event`]
    /// may read it.
    pub fn fd(&self) -> RawFd {
        self.queue.fd().as_raw_fd()
    }

    /// The same, borrowed.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.fd()
    }

    /// Queues an event.
    pub fn push(&self, event: AsyncEvent) {
        log::debug!("asynchronous event {event:?}");
        self.queue.push(event.source(), event);
    }

    /// Takes the next event. Sleeps, without a lock, unless `O_NONBLOCK` is set.
    ///
    /// # Errors
    /// EAGAIN with `O_NONBLOCK` and nothing there; EINTR when a signal handler ran.
    pub fn next_event(&self) -> io::Result<AsyncEvent> {
        self.queue.next()
    }

    /// Takes the next event if there is one; never sleeps.
    pub fn try_event(&self) -> Option<AsyncEvent> {
        self.queue.take()
    }

    /// Did the program set `O_NONBLOCK`?
    pub fn is_nonblocking(&self) -> bool {
        self.queue.is_nonblocking()
    }

    /// Events of an object that wait to be read.
    pub fn unread(&self, source: EventSource) -> usize {
        self.queue.unread(source)
    }

    /// Removes the unread events of an object that is being destroyed. Gives the number of its events that were handed out over
    /// its life: its destruction returns when as many were acknowledged.
    pub fn forget(&self, source: EventSource) -> u64 {
        self.queue.forget(source)
    }
}
