//! rsockets (rsocket(7)): sockets over RDMA, for programs and for librdmacm's preload library.
//!
//! The protocol is in `crates/rsocket`. Here is what drives it with ids, queue pairs and waiting:
//!
//! | file | part |
//! |---|---|
//! | `region`, `endpoint` | buffers, and a connection's queues over them |
//! | `gather` | the bytes of a send |
//! | `config`, `options` | defaults of the host; socket options |
//! | `connect` | from address to connection and back |
//! | `transfer` | sending and receiving |
//! | `datagram` | datagram sockets |
//! | `iomap` | memory mapped for the peer |
//! | `lock` | locks that a `longjmp` may abandon |
//! | `wait`, `poll` | sleeping on one socket, or on many |
//!
//! There is no thread: whoever calls does the work, as far as it can be done without waiting. The number of an rsocket is a copy of the
//! descriptor of its event channel, so that it is no other descriptor's.

mod completions;
mod config;
pub mod connect;
mod datagram;
mod endpoint;
mod gather;
pub mod iomap;
mod lock;
pub mod options;
pub mod poll;
mod region;
pub mod transfer;
mod wait;

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Instant;

use crate::abi::{PS_TCP, QPT_RC};
use crate::channel::ChannelObject;
use crate::entry::{Call, Refusal, check, rdma};
use crate::id::{Fresh, IdObject, rdma_destroy_id};
use crate::{fork, verbs};

use datagram::Datagram;
use endpoint::Endpoint;
use iomap::Mappings;
use lock::{Guard, Lock};
use options::Options;
use wait::Waker;

/// An rsocket.
struct Socket {
    /// The number that the program knows, once it does. librdmacm's preload library opens a descriptor of its own before it asks for
    /// an rsocket or accepts one, and relies on that being the smaller of the two; so this is opened when the program gets it.
    number: OnceLock<OwnedFd>,
    domain: c_int,
    /// The process that made it: a child inherits the descriptor, but not what is behind it.
    pid: u32,
    channel: Arc<ChannelObject>,
    /// One thread sends, and one receives, at a time: what a call transfers stays together.
    sending: Lock<()>,
    receiving: Lock<()>,
    inner: Lock<Inner>,
}

/// What the lock of a socket guards. It is held for as long as it takes to do work, never while sleeping.
struct Inner {
    state: State,
    id: OwnedId,
    options: Options,
    /// For `SO_ERROR`.
    error: c_int,
    /// Threads that sleep until something happens here.
    waiters: Vec<Arc<Waker>>,
    mappings: Mappings,
    /// When events of the connection manager were taken last.
    events_at: Instant,
}

/// How far a socket has come. Ordered: connections come after what makes them.
enum State {
    /// Neither connected nor listening.
    Idle,
    Listening {
        backlog: usize,
        /// Requests that were answered.
        accepted: VecDeque<Arc<Socket>>,
    },
    /// The request is sent.
    Connecting(Endpoint),
    /// The reply is sent.
    Accepting(Endpoint),
    /// Its endpoint has a stream.
    Connected(Endpoint),
    /// There was no connection, with this error.
    Failed(c_int),
    Closed,
}

/// An id that is destroyed with its socket.
struct OwnedId(*mut IdObject);

// SAFETY: ids may be used from any thread.
unsafe impl Send for OwnedId {}

impl OwnedId {
    fn get(&self) -> &IdObject {
        // SAFETY: destroyed by `drop` only.
        unsafe { &*self.0 }
    }
}

impl Drop for OwnedId {
    fn drop(&mut self) {
        // SAFETY: an id of this library, for the last time; its events are released as they are taken.
        unsafe { rdma_destroy_id(self.0.cast()) };
    }
}

/// An rsocket of either kind.
#[derive(Clone)]
enum Entry {
    Stream(Arc<Socket>),
    Datagram(Arc<Datagram>),
}

impl Entry {
    /// The process that made it.
    fn pid(&self) -> u32 {
        match self {
            Entry::Stream(socket) => socket.pid,
            Entry::Datagram(socket) => socket.pid,
        }
    }
}

/// All rsockets of the process by descriptor.
static TABLE: RwLock<Option<HashMap<c_int, Entry>>> = RwLock::new(None);

/// Locks the table, while a thread forks.
pub(crate) fn hold() -> Box<dyn fork::Guard> {
    Box::new(TABLE.write().unwrap_or_else(PoisonError::into_inner))
}

fn lookup(fd: c_int) -> Option<Entry> {
    TABLE.read().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(&fd).cloned()
}

fn insert(fd: c_int, entry: Entry) {
    TABLE.write().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(fd, entry);
}

/// The rsocket of a descriptor.
fn find_any(fd: c_int) -> Call<Entry> {
    let entry = lookup(fd).ok_or_else(|| Refusal::new(libc::EBADF, format!("{fd} is no rsocket")))?;
    fork::check_process(entry.pid(), "rsocket")?;
    Ok(entry)
}

/// The same, for what only streams have.
fn find(fd: c_int) -> Call<Arc<Socket>> {
    match find_any(fd)? {
        Entry::Stream(socket) => Ok(socket),
        Entry::Datagram(_) => Err(Refusal::new(libc::EOPNOTSUPP, format!("{fd} is a datagram socket"))),
    }
}

/// Gives a socket its number.
fn publish(socket: Arc<Socket>) -> Call<c_int> {
    // SAFETY: an open descriptor.
    let fd = unsafe { libc::fcntl(socket.channel.fd(), libc::F_DUPFD_CLOEXEC, 0) };
    if fd < 0 {
        return Err(Refusal::last());
    }
    // SAFETY: just made, and nobody else's.
    let number = unsafe { OwnedFd::from_raw_fd(fd) };
    socket.number.set(number).expect("a socket is given out once");
    insert(fd, Entry::Stream(socket));
    Ok(fd)
}

fn withdraw(fd: c_int) -> Option<Entry> {
    TABLE.write().unwrap_or_else(PoisonError::into_inner).as_mut()?.remove(&fd)
}

impl Socket {
    fn new(domain: c_int, channel: Arc<ChannelObject>, id: OwnedId, options: Options) -> Arc<Socket> {
        Arc::new(Socket {
            number: OnceLock::new(),
            domain,
            pid: std::process::id(),
            channel,
            sending: Lock::new(()),
            receiving: Lock::new(()),
            inner: Lock::new(Inner {
                state: State::Idle,
                id,
                options,
                error: 0,
                waiters: Vec::new(),
                mappings: Mappings::default(),
                events_at: Instant::now(),
            }),
        })
    }

    fn inner(&self) -> Guard<'_, Inner> {
        self.inner.lock()
    }
}

impl Inner {
    /// The endpoint of a connection that is made.
    fn connection(&mut self) -> Option<&mut Endpoint> {
        match &mut self.state {
            State::Connected(endpoint) => Some(endpoint),
            _ => None,
        }
    }
}

/// A fresh stream socket.
fn create(domain: c_int, options: Options) -> Call<Arc<Socket>> {
    let channel = ChannelObject::open()?;
    let mut number = 0;
    check(channel.with_service(|service| {
        // SAFETY: an open channel; the place is ours.
        unsafe { verbs::ferroce_cm_create_id(service, PS_TCP as u16, 0, &raw mut number) }
    }))?;
    let id = IdObject::publish(Fresh {
        number,
        channel: Arc::clone(&channel),
        is_sync: false,
        context: ptr::null_mut(),
        ps: PS_TCP,
        qp_type: QPT_RC,
    });
    Ok(Socket::new(domain, channel, OwnedId(id), options))
}

rdma! {
    /// `rsocket`, see rsocket(7): of AF_INET or AF_INET6, and SOCK_STREAM or SOCK_DGRAM.
    fn rsocket(domain: c_int, r#type: c_int, protocol: c_int) -> c_int {
        // Refusals here have no words: the preload library asks for each socket that anybody in the process makes by the C library, who
        // may hold the locks that telling needs. Then it makes an ordinary socket. (Our libraries make theirs by system calls.)
        if !matches!(domain, libc::AF_INET | libc::AF_INET6) {
            return Err(Refusal::told(libc::EAFNOSUPPORT));
        }
        let kind = r#type & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
        let own_protocol = match kind {
            libc::SOCK_STREAM => libc::IPPROTO_TCP,
            libc::SOCK_DGRAM => libc::IPPROTO_UDP,
            _ => return Err(Refusal::told(libc::ESOCKTNOSUPPORT)),
        };
        if protocol != 0 && protocol != own_protocol {
            return Err(Refusal::told(libc::EPROTONOSUPPORT));
        }
        let mut options = Options::new();
        options.is_nonblocking = r#type & libc::SOCK_NONBLOCK != 0;
        options.is_cloexec = r#type & libc::SOCK_CLOEXEC != 0;
        if kind == libc::SOCK_DGRAM { Datagram::open(domain, options) } else { publish(create(domain, options)?) }
    }

    /// `rclose`, see rsocket(7): waits until the peer has got what was sent, unless the connection is broken or lingers less.
    fn rclose(number: c_int) -> c_int {
        let entry = withdraw(number).ok_or_else(|| Refusal::new(libc::EBADF, format!("{number} is no rsocket")))?;
        if entry.pid() != std::process::id() {
            // What is behind it is the parent's.
            // SAFETY: the descriptor is this process's copy, of which nobody knows any more.
            unsafe { libc::close(number) };
            std::mem::forget(entry);
            return Ok(0);
        }
        match entry {
            Entry::Stream(socket) => connect::close(&socket),
            Entry::Datagram(socket) => socket.close(),
        }
        Ok(0)
    }
}
