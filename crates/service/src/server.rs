//! The service: one thread, one epoll, bounded work for each event.
//!
//! It knows a client by its connection and by the client's pidfd. When either ends, the client's lanes are free at once;
//! a lane's socket is closed when the last copy of the lane's relay end is gone too (a forked child may hold one).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use ferroce_wire::UDP_PORT;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, SocketFlags};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::closing::{self, Closer, Closers, Foreign};
use crate::config::{Fault, Limits, Serve};
use crate::group::{Group, SocketId};
use crate::protocol::{
    self, ClientStatus, Counters, PROGRAM_CHARS_MAX, REQUEST_BYTES_MAX, Reply, Request, STATUS_PAGE, Status,
    StatusPage, VERSION,
};
use crate::store::{Key, Store};
use crate::sys::Peer;
use groups::Memberships;

use crate::{DEFAULT_NAME, LANE_MAX, ServiceError, cm, seqpacket, sys};

mod connections;
mod groups;
mod kept;
mod lanes;
mod limits;
mod relay;
mod resume;

use kept::Kept;
pub use kept::NextKeeper;

/// Lanes of one program, whatever the limits say. (A lane has room for 16,381 queue pairs.)
pub const LANES_PER_CLIENT_MAX: u32 = 64;

/// Programs, at most.
pub const CLIENTS_MAX: usize = 4096;

/// So long a program has for its `Hello`. One that is held up longer is told that its connection has ended, and connects anew.
const HELLO_WITHIN: Duration = Duration::from_secs(10);

/// Connections that wait for `accept`.
const BACKLOG: i32 = 1024;

/// Requests of one client that are served before others get their turn.
const REQUESTS_PER_TURN: usize = 8;

/// Connections that are accepted before others get their turn.
const ACCEPTS_PER_TURN: usize = 16;

/// How long nothing is accepted after descriptors ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long until a thread is tried to be started again.
const CLOSE_PAUSE: Duration = Duration::from_millis(100);

/// How often sockets that could not be closed are looked at.
const SWEEP_INTERVAL: Duration = Duration::from_millis(200);

/// After the death of an earlier service or worker, peers are not told so long that a listener or a connection is not there: its program
/// may be about to bring it along.
const GATHERING: Duration = Duration::from_secs(3);

/// So long programs may claim to come from an earlier service.
const NEW: Duration = Duration::from_secs(10);

/// How the service runs.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Abstract Unix socket name, without the leading zero byte.
    pub name: String,
    /// UDP port of the group; other than 4791 for tests only.
    pub port: u16,
    /// Exit after this time without clients; None: never.
    pub idle: Option<Duration>,
    /// How much programs may have.
    pub limits: Limits,
    /// Whose programs it is for; None: as [`Serve::default_of`] has it.
    pub serve: Option<Serve>,
    /// Faults, for tests.
    pub fault: Fault,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            name: DEFAULT_NAME.into(),
            port: UDP_PORT,
            idle: Some(Duration::from_secs(10)),
            limits: Limits::default(),
            serve: None,
            fault: Fault::default(),
        }
    }
}

/// What an epoll event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Listener,
    Stop,
    Strays,
    Client(u64),
    Death(u64),
    Relay(SocketId),
    /// An event channel.
    Channel(u64),
    Keeper,
}

impl Source {
    const KIND_SHIFT: u32 = 56;

    fn token(self) -> epoll::EventData {
        let (kind, id) = match self {
            Source::Listener => (0, 0),
            Source::Stop => (1, 0),
            Source::Strays => (2, 0),
            Source::Client(id) => (3, id),
            Source::Death(id) => (4, id),
            Source::Relay(id) => (5, id),
            Source::Channel(id) => (6, id),
            Source::Keeper => (7, 0),
        };
        epoll::EventData::new_u64(kind << Self::KIND_SHIFT | id)
    }

    fn of(token: epoll::EventData) -> Source {
        let id = token.u64() & ((1 << Self::KIND_SHIFT) - 1);
        match token.u64() >> Self::KIND_SHIFT {
            0 => Source::Listener,
            1 => Source::Stop,
            2 => Source::Strays,
            3 => Source::Client(id),
            4 => Source::Death(id),
            5 => Source::Relay(id),
            6 => Source::Channel(id),
            7 => Source::Keeper,
            kind => panic!("no token has kind {kind}"),
        }
    }
}

/// A connected program.
#[derive(Debug)]
struct Client {
    connection: OwnedFd,
    peer: Peer,
    /// Of its user.
    closer: Closer,
    /// Seconds of Unix time.
    since_s: u64,
    /// None before its `Hello`.
    program: Option<String>,
    /// Of a service that crashed, perhaps before it could answer: the program sends its request again.
    taken_over: bool,
    /// Ends (becomes readable) with the process.
    pidfd: Option<OwnedFd>,
    /// Lanes and their sockets.
    lanes: BTreeMap<u16, SocketId>,
}

/// The service's end of a lane's relay, for as long as the socket was lent. A program of another user has a lane without a socket:
/// what is sent to it comes to the service's own, and goes on by the relay. Its id here is one that no socket has ([`socketless`]).
#[derive(Debug)]
struct Lend {
    relay: OwnedFd,
    /// Of the user who has the relay's other end.
    closer: Closer,
    /// None: given back.
    lane: Option<u16>,
    /// Names the lease; random, not 0.
    lease: u64,
    /// Multicast groups that the socket joined, and the interfaces.
    groups: Memberships,
    /// Whose the offers of rings are that the relay's other end may not have read yet. (Those that an earlier process of the service
    /// has passed on are not known.)
    offers: Vec<Holder>,
    /// Whose it is, or was.
    holder: Holder,
}

/// Who holds a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Holder {
    client: u64,
    uid: u32,
}

/// Ids of lends without a socket have this bit; sockets are counted from 0.
const SOCKETLESS: SocketId = 1 << 48;

/// An id for a lend without a socket.
fn socketless(lease: u64) -> SocketId {
    SOCKETLESS | (lease & (SOCKETLESS - 1))
}

/// Whether a lend is one of a socket.
fn has_socket(id: SocketId) -> bool {
    id & SOCKETLESS == 0
}

/// The service, bound to its name.
#[derive(Debug)]
pub struct Service {
    options: ServerOptions,
    epoll: OwnedFd,
    /// Open from the first lease on.
    group: Option<Group>,
    /// When it was opened.
    opened: Option<Instant>,
    listener: OwnedFd,
    uid: u32,
    /// The overflow uid can only be the real user of that number.
    all_users_are_mapped: bool,
    /// Seconds of Unix time.
    started_s: u64,
    /// When this process of it began.
    begun: Instant,
    /// How often the service crashed and was taken over.
    restarts: u32,
    store: Arc<Store>,
    /// None: in-process.
    kept: Option<Kept>,
    /// The store does not have the state as it is.
    dirty: bool,
    closers: Closers,
    /// Some that is to be closed has no thread yet: looked at again then.
    close_again: Option<Instant>,
    /// Descriptors that it may hold for programs.
    descriptors: usize,
    /// Refusals that the log was told of lately.
    said: limits::Said,
    clients: BTreeMap<u64, Client>,
    /// Clients that are still to say `Hello`, and until when, in that order. Those that have, or are gone, leave at the front.
    silent: VecDeque<(Instant, u64)>,
    lends: BTreeMap<SocketId, Lend>,
    /// Lane of each lent socket, by lane number.
    lanes: BTreeMap<u16, SocketId>,
    /// Sockets of an earlier service were adopted in this turn.
    brought_along: bool,
    /// When sockets of others were last looked at.
    swept: Instant,
    /// Requests for a lane that wait until earlier programs have brought theirs along: client and request.
    waiting: Vec<(u64, u64)>,
    next_client: u64,
    next_lane: u16,
    counters: Counters,
    cm: cm::Host,
    /// GUIDs of devices by address, and when they were looked up.
    guids: Option<(Instant, BTreeMap<std::net::IpAddr, u64>)>,
    /// Addresses of this host, as they were then.
    own_addresses: Option<(Instant, BTreeSet<std::net::IpAddr>)>,
    /// Since when there is nothing to do.
    idle_since: Instant,
    /// Set: descriptors ran out, nothing is accepted until then.
    accept_again: Option<Instant>,
    buffer: Vec<u8>,
    stop: bool,
}

impl Service {
    /// Binds the name. EADDRINUSE: another service runs already.
    pub fn bind(options: ServerOptions) -> Result<Service, ServiceError> {
        let listener = listen(&options.name)?;
        Service::new(options, listener, Store::default())
    }

    fn new(options: ServerOptions, listener: OwnedFd, store: Store) -> Result<Service, ServiceError> {
        let failed = |errno| ServiceError::system("cannot watch the service's sockets", errno);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        epoll::add(&epoll, &listener, Source::Listener.token(), epoll::EventFlags::IN).map_err(failed)?;
        let uid = rustix::process::geteuid().as_raw();
        if !options.fault.old_kernel {
            closing::refuse(&listener, true);
        }
        Ok(Service {
            cm: cm::Host::new(options.port, &options.limits, options.fault),
            guids: None,
            own_addresses: None,
            options,
            epoll,
            group: None,
            opened: None,
            listener,
            uid,
            all_users_are_mapped: lanes::all_users_are_mapped(),
            started_s: unix_time_s(),
            begun: Instant::now(),
            restarts: 0,
            store: Arc::new(store),
            kept: None,
            dirty: false,
            closers: Closers::new(uid),
            close_again: None,
            descriptors: limits::descriptors_for_programs(),
            said: limits::Said::default(),
            clients: BTreeMap::new(),
            silent: VecDeque::new(),
            lends: BTreeMap::new(),
            lanes: BTreeMap::new(),
            brought_along: false,
            swept: Instant::now(),
            waiting: Vec::new(),
            next_client: 1,
            next_lane: rand::random_range(1..=LANE_MAX),
            counters: Counters::default(),
            idle_since: Instant::now(),
            accept_again: None,
            buffer: vec![0; relay::BUFFER_BYTES],
            stop: false,
        })
    }

    /// Serves until idle for the time that the options say. The process of one that has a keeper is to end after this.
    pub fn run(mut self) -> Result<(), ServiceError> {
        if self.kept.is_none() {
            return self.serve();
        }
        // One that fails has a successor, to which the keeper gives the same connections: whatever is here ends with the process only.
        ManuallyDrop::new(self).serve()
    }

    /// Serves from a thread of this process until the handle is dropped. For tests, and for programs that are the only
    /// user of their namespace. A forked child of the process keeps the service's name and sockets taken.
    pub fn spawn_in_process(options: ServerOptions) -> Result<Hosted, ServiceError> {
        let mut service = Service::bind(options)?;
        let failed = |errno| ServiceError::system("cannot host the service in this process", errno);
        let (ours, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(failed)?;
        epoll::add(&service.epoll, &ours, Source::Stop.token(), epoll::EventFlags::IN).map_err(failed)?;
        let thread = std::thread::Builder::new()
            .name("ferroced".into())
            .spawn(move || {
                sys::mask_signals();
                let result = service.serve();
                drop(ours);
                result
            })
            .map_err(|error| failed(sys::errno(&error)))?;
        Ok(Hosted { stop: Some(stop), thread: Some(thread) })
    }

    fn serve(&mut self) -> Result<(), ServiceError> {
        const EVENTS: usize = 64;
        while !self.stop {
            let timeout = self.timeout();
            let mut events = [MaybeUninit::uninit(); EVENTS];
            let ready = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
                Ok((ready, _)) => ready,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(ServiceError::system("cannot wait for events", errno)),
            };
            for event in ready {
                let (source, flags) = (Source::of(event.data), event.flags);
                self.handle(source, flags);
            }
            self.keep_house();
            self.save();
        }
        self.store.leave();
        self.end();
        Ok(())
    }

    fn handle(&mut self, source: Source, flags: epoll::EventFlags) {
        match source {
            Source::Listener => self.accept(),
            Source::Stop => self.stop = true,
            Source::Strays => self.forward_strays(),
            Source::Client(id) => self.serve_client(id),
            Source::Death(id) => self.remove_client(id, "its process has ended"),
            Source::Relay(id) => self.serve_relay(id, flags),
            Source::Channel(id) => self.serve_channel(id, flags),
            Source::Keeper => self.lose_keeper(),
        }
    }

    /// How long to wait for events.
    fn timeout(&self) -> Option<Timespec> {
        let now = Instant::now();
        let idle = self.options.idle.filter(|_| self.is_idle()).map(|idle| self.idle_since + idle);
        let sweep = self.group.as_ref().filter(|group| group.wants_sweep()).map(|_| now + SWEEP_INTERVAL);
        let keeper = self.kept.as_ref().and_then(|kept| kept.again);
        let silent = self.silent.front().map(|(until, _)| *until);
        let beat = self.kept.as_ref().map(|kept| kept.beat);
        let house = [beat, idle, sweep, keeper, silent, self.waiting_until(), self.accept_again, self.close_again];
        let times = house.into_iter().chain([self.cm.next_timeout()]);
        let next = times.flatten().min()?;
        // One millisecond more: not just before the time.
        let wait = next.saturating_duration_since(now) + Duration::from_millis(1);
        Timespec::try_from(wait).ok()
    }

    /// Nobody is connected, and no process holds a socket of the group that must not move.
    fn is_idle(&self) -> bool {
        self.clients.is_empty()
            && self.lends.is_empty()
            && self.cm.is_idle()
            && self.group.as_ref().is_none_or(|group| !group.unsettled())
    }

    fn keep_house(&mut self) {
        let now = Instant::now();
        self.beat(now);
        self.settle_brought_along();
        self.cm.tick();
        self.rewatch_channels();
        self.close_silent(now);
        self.close_again = (!self.closers.attend()).then_some(now + CLOSE_PAUSE);
        if let Some(group) = self.group.as_mut()
            && (group.unsettled() || (group.wants_sweep() && self.swept + SWEEP_INTERVAL <= now))
        {
            self.swept = now;
            group.sweep();
        }
        self.serve_waiting();
        if self.kept.as_ref().and_then(|kept| kept.again).is_some_and(|again| again <= now) {
            self.replace_keeper();
        }
        if self.accept_again.is_some_and(|again| again <= now) {
            self.accept_again = None;
            self.watch_listener(epoll::EventFlags::IN);
        }
        if !self.is_idle() {
            self.idle_since = now;
        } else if self.options.idle.is_some_and(|idle| now >= self.idle_since + idle) {
            // Who connected in this moment is served; who connects later finds nobody and starts a service.
            self.accept();
            self.stop |= self.is_idle();
        }
    }

    fn watch_listener(&self, flags: epoll::EventFlags) {
        if let Err(errno) = epoll::modify(&self.epoll, &self.listener, Source::Listener.token(), flags) {
            log::error!("cannot change how the listener is watched: {errno}");
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&self.listener, flags) {
                Ok(connection) => self.add_client(connection),
                Err(Errno::AGAIN) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                    // The listener stays readable: without a pause this would spin.
                    if self.said.is_due(self.uid, "accept", Instant::now()) {
                        log::warn!("out of descriptors: accepting nobody for {ACCEPT_PAUSE:?} each time");
                    }
                    return self.pause_accepting();
                }
                // The connection has ended again.
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::INVAL) => {
                    // It stays so, and readable.
                    log::error!(
                        "nobody can connect any more: the listener was shut down; serving those who are connected"
                    );
                    return self.watch_listener(epoll::EventFlags::empty());
                }
                Err(errno) => {
                    log::warn!("accepting nobody for {ACCEPT_PAUSE:?}: {errno}");
                    return self.pause_accepting();
                }
            }
        }
        if self.closers.are_many_pending() {
            self.pause_accepting();
        }
    }

    fn pause_accepting(&mut self) {
        self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
        self.watch_listener(epoll::EventFlags::empty());
    }

    fn add_client(&mut self, connection: OwnedFd) {
        match sys::peer(connection.as_fd()) {
            Ok(peer) => self.enlist_client(connection, peer),
            Err(error) => {
                log::warn!("a client without credentials: {error}");
                self.closers.of(closing::NOBODY_KNOWN).retire(connection);
            }
        }
    }

    fn enlist_client(&mut self, connection: OwnedFd, peer: Peer) {
        let id = self.next_client;
        let closer = self.closers.of(peer.uid);
        let admitted = self.may_connect(peer).and_then(|()| {
            let failed = |errno| ServiceError::system("the service cannot watch the program", errno);
            self.watch_connection(id, &connection).map_err(failed)
        });
        if let Err(error) = admitted {
            let error = self.in_words(error);
            let refusal = protocol::encode(0, Reply::Error { errno: error.errno(), what: error.to_string() });
            let _ = seqpacket::send(&connection, &[&refusal], &[], SendFlags::DONTWAIT);
            return closer.retire(connection);
        }
        self.next_client += 1;
        let (since_s, lanes) = (unix_time_s(), BTreeMap::new());
        let client = Client { connection, peer, closer, since_s, program: None, taken_over: false, pidfd: None, lanes };
        self.clients.insert(id, client);
        self.cm.enroll(id, self.user(peer.uid));
        self.watch_process(id);
        self.silent.push_back((Instant::now() + HELLO_WITHIN, id));
        self.dirty = true;
    }

    fn watch_connection(&self, id: u64, connection: &OwnedFd) -> Result<(), Errno> {
        epoll::add(&self.epoll, connection, Source::Client(id).token(), epoll::EventFlags::IN)?;
        // Whoever is refused may stay open for a while, and the next one has the same number.
        self.store.put(Key::Client(id), connection).inspect_err(|_| self.unwatch(connection))
    }

    /// Asks the kernel for the pidfd of a client's process.
    fn watch_process(&mut self, id: u64) {
        if self.options.fault.old_kernel {
            return;
        }
        let pidfd = sys::peer_pidfd(self.clients[&id].connection.as_fd()).map_err(|error| sys::errno(&error));
        if let Err(errno) = pidfd.and_then(|pidfd| self.watch_death(id, pidfd)) {
            log::debug!("client {id} is to bring a pidfd: {errno}");
        }
    }

    fn watch_death(&mut self, id: u64, pidfd: OwnedFd) -> Result<(), Errno> {
        epoll::add(&self.epoll, &pidfd, Source::Death(id).token(), epoll::EventFlags::IN)?;
        if let Err(errno) = self.store.put(Key::Pidfd(id), &pidfd) {
            // Its process has it open as well: epoll would still watch it.
            self.unwatch(&pidfd);
            return Err(errno);
        }
        self.clients.get_mut(&id).expect("it is there").pidfd = Some(pidfd);
        Ok(())
    }

    /// Closes connections on which nobody has said `Hello` in time: they take the place of programs.
    fn close_silent(&mut self, now: Instant) {
        while let Some((until, id)) = self.silent.front().copied() {
            if self.is_silent(id) {
                if until > now {
                    return;
                }
                // It may have come while this process could not run.
                self.serve_client(id);
                if self.is_silent(id) {
                    self.remove_client(id, "it says nothing");
                }
            }
            self.silent.pop_front();
        }
    }

    /// Whether a client is there and has not said `Hello`.
    fn is_silent(&self, id: u64) -> bool {
        self.clients.get(&id).is_some_and(|client| client.program.is_none())
    }

    fn remove_client(&mut self, id: u64, why: &str) {
        // Several events of one client may be in the same batch.
        let Some(client) = self.clients.remove(&id) else {
            return;
        };
        log::debug!("client {:?} (pid {}) goes: {why}", client.program, client.peer.pid);
        self.dirty = true;
        if let Some(pidfd) = &client.pidfd {
            // Closing is not enough: the client has another copy of the same open file, which epoll would still watch.
            let _ = epoll::delete(&self.epoll, pidfd);
            self.store.remove(Key::Pidfd(id));
        }
        for channel in self.cm.remove_client(id) {
            self.unwatch(&channel);
            client.closer.retire(channel);
        }
        self.unwatch(&client.connection);
        // The keeper first: whoever closes it last closes what is in it.
        self.store.remove(Key::Client(id));
        client.closer.retire(client.connection);
        for lane in client.lanes.keys() {
            self.free_lane(*lane);
        }
    }

    fn serve_client(&mut self, id: u64) {
        let mut buffer = [0; REQUEST_BYTES_MAX];
        for _ in 0..REQUESTS_PER_TURN {
            let Some(client) = self.clients.get(&id) else {
                return;
            };
            if client.closer.must_not_receive(&client.connection) {
                return self.remove_client(id, "too much that its user has sent cannot be closed");
            }
            let received = match client.closer.recv(&client.connection, &mut buffer) {
                Ok(received) => received,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => continue,
                Err(_) => return self.remove_client(id, "its connection failed"),
            };
            if received.len == 0 {
                return self.remove_client(id, "it closed the connection");
            }
            if received.truncated {
                let what = format!("a request is longer than {REQUEST_BYTES_MAX} bytes");
                self.reply_error(id, 0, ServiceError::new(libc::EMSGSIZE, what));
                return self.remove_client(id, "its request was too long");
            }
            match protocol::decode::<Request>(&buffer[..received.len]) {
                Ok(request) => self.answer(id, request.id, request.body, received.descriptors),
                Err(error) => {
                    let what = format!("not a request of version {VERSION}: {error}");
                    self.reply_error(id, 0, ServiceError::new(libc::EPROTO, what));
                    return self.remove_client(id, "it does not speak the protocol");
                }
            }
        }
    }

    fn answer(&mut self, id: u64, request: u64, body: Request, descriptors: Foreign) {
        let descriptor = match &body {
            Request::Hello { .. } => descriptors.pidfd(),
            Request::Reclaim { .. } => descriptors.udp_socket(),
            _ => descriptors.none().map(|()| None),
        };
        let descriptor = match descriptor {
            Ok(descriptor) => descriptor,
            Err(unexpected) => {
                self.reply_error(id, request, ServiceError::new(libc::EPROTO, unexpected.to_string()));
                return self.remove_client(id, "it sends descriptors that nobody wants");
            }
        };
        let greeted = self.clients.get(&id).is_some_and(|client| client.program.is_some());
        if !matches!(body, Request::Reclaim { .. }) {
            // Whoever gets another answer finds lanes steered to. (For several of one program the order is found out once.)
            self.settle_brought_along();
        }
        let outcome = match body {
            Request::Hello { version, pid: _, program, again } if !greeted || self.is_greeted_anew(id, &program) => {
                if again && self.begun.elapsed() < NEW {
                    self.cm.gather(GATHERING);
                }
                self.greet(id, version, program, descriptor).inspect(|_| self.expect_sockets(id, again))
            }
            Request::Hello { .. } => Err(ServiceError::new(libc::EPROTO, "a second Hello")),
            _ if !greeted => Err(ServiceError::new(libc::EPROTO, "the first request is not Hello")),
            Request::LeaseLane => return self.lease(id, request),
            Request::Reclaim { lane, lease } => return self.reclaim(id, request, lane, lease, descriptor),
            Request::ReleaseLane { lane } => self.release(id, lane),
            Request::Lease { lane } => Ok(Reply::Leased { lane, lease: self.lease_for(id, lane) }),
            Request::JoinGroup { lane, group, ifindex } => self.join_group(id, lane, group, ifindex),
            Request::LeaveGroup { lane, group, ifindex } => self.leave_group(id, lane, group, ifindex),
            Request::Status { from } => Ok(Reply::Status(self.status(id, from))),
            Request::CmIds { from } => Ok(Reply::CmIds(self.cm_ids(id, from))),
            Request::Cm(asked) => return self.answer_cm(id, request, asked),
        };
        match outcome {
            Ok(reply) => self.reply(id, request, reply, &[]),
            Err(error) => self.reply_error(id, request, error),
        }
    }

    fn greet(&mut self, id: u64, version: u32, program: String, pidfd: Option<OwnedFd>) -> Result<Reply, ServiceError> {
        if self.restarts == 0 && self.options.fault.panic_at_program.is_some_and(|at| at <= id) {
            panic!("as fault.panic_at_program says");
        }
        if version != VERSION {
            return Err(ServiceError::new(
                libc::EPROTONOSUPPORT,
                format!(
                    "the running service (pid {}) speaks protocol version {VERSION}, this program {version}; they are \
                     of different releases: end the programs that use it, it then ends by itself",
                    std::process::id()
                ),
            ));
        }
        if let Some(pidfd) = pidfd.filter(|_| self.clients[&id].pidfd.is_none()) {
            let failed = |errno| ServiceError::system("cannot watch the program's process", errno);
            self.watch_death(id, pidfd).map_err(failed)?;
        }
        self.dirty = true;
        let client = self.clients.get_mut(&id).expect("the client asks");
        client.program = Some(printable(&program));
        Ok(Reply::Welcome { version: VERSION, pid: std::process::id(), uid: self.uid })
    }

    /// Whether a program says the same `Hello` again, which a service that crashed has heard and perhaps not answered.
    fn is_greeted_anew(&self, id: u64, program: &str) -> bool {
        self.clients.get(&id).is_some_and(|client| client.taken_over && client.program == Some(printable(program)))
    }

    /// A program that had an earlier service may bring sockets along.
    fn expect_sockets(&self, id: u64, again: bool) {
        let client = &self.clients[&id];
        if again && self.may_hold_sockets(client.peer) {
            closing::refuse(&client.connection, false);
        }
    }

    fn open_group(&mut self) -> Result<&mut Group, ServiceError> {
        if self.group.is_none() {
            let group = Group::open(self.options.port, Arc::clone(&self.store))?;
            self.watch_strays(&group)?;
            if group.has_strangers() {
                self.cm.gather(GATHERING);
            }
            self.group = Some(group);
            self.opened = Some(Instant::now());
        }
        Ok(self.group.as_mut().expect("it was just opened"))
    }

    fn watch_strays(&self, group: &Group) -> Result<(), ServiceError> {
        epoll::add(&self.epoll, group.own_socket(), Source::Strays.token(), epoll::EventFlags::IN)
            .map_err(|errno| ServiceError::system("cannot watch the service's own socket", errno))
    }

    /// Closing is not enough for what others have copies of (the keeper): epoll would still watch it.
    fn unwatch(&self, descriptor: &OwnedFd) {
        if let Err(errno) = epoll::delete(&self.epoll, descriptor) {
            log::debug!("not watched: {errno}");
        }
    }

    /// Whether a client is told of what a program of this user has: root, the service's user and that user are.
    fn may_see(&self, id: u64, uid: u32) -> bool {
        let own = self.clients[&id].peer.uid;
        own == 0 || self.is_same_user(own, uid) || self.is_same_user(own, self.uid)
    }

    fn status(&self, id: u64, from: u64) -> StatusPage {
        let mut rest =
            self.clients.range(from..).filter(|(of, client)| **of == id || self.may_see(id, client.peer.uid));
        let of_lends = self.descriptors_of_lends();
        let status = |(id, client): (&u64, &Client)| {
            let kinds = self.cm.kinds_of(*id);
            let of_lends = of_lends.get(id).copied().unwrap_or(0);
            ClientStatus {
                descriptors: (self.descriptors_of_client(*id) + of_lends) as u32,
                groups: self.groups_of(client),
                ids: self.cm.ids_of(*id) as u32,
                channels: self.cm.channels_of(*id) as u32,
                listeners: kinds.listeners as u32,
                pending: kinds.pending as u32,
                ..client.status()
            }
        };
        let clients = rest.by_ref().take(STATUS_PAGE).map(status).collect();
        let status = Status {
            pid: std::process::id(),
            keeper: self.kept.as_ref().map_or(0, |kept| kept.pid),
            uid: self.uid,
            port: self.options.port,
            uptime_s: unix_time_s().saturating_sub(self.started_s),
            restarts: self.restarts,
            clients,
            sockets: self.group.as_ref().map_or(0, |group| group.len() as u32),
            lingering: self.group.as_ref().map_or(0, |group| group.lingering() as u32),
            counters: Counters { probings: self.group.as_ref().map_or(0, Group::probings), ..self.counters },
            limits: self.options.limits,
        };
        StatusPage { status, next: rest.next().map(|(id, _)| *id) }
    }

    fn reply(&mut self, id: u64, request: u64, reply: Reply, descriptors: &[BorrowedFd<'_>]) {
        let message = protocol::encode(request, reply);
        // What the client is told must survive a crash.
        self.save();
        let Some(client) = self.clients.get(&id) else {
            return;
        };
        match seqpacket::send(&client.connection, &[&message], descriptors, SendFlags::DONTWAIT) {
            Ok(()) => {}
            // What it cannot be given goes with the descriptors, of which it was to have the only copies.
            Err(Errno::TOOMANYREFS) => {
                let error = ServiceError::system("the service cannot send what was asked for", Errno::TOOMANYREFS);
                self.reply_error(id, request, error);
            }
            // A client that does not read its replies is no client.
            Err(errno) => {
                log::debug!("no reply to client {id}: {errno}");
                self.remove_client(id, "it does not take its replies");
            }
        }
    }

    fn reply_error(&mut self, id: u64, request: u64, error: ServiceError) {
        let error = self.in_words(error);
        self.reply(id, request, Reply::Error { errno: error.errno(), what: error.to_string() }, &[]);
    }

    /// An error as a program is told it. That this user has too many descriptors on their way is over as soon as they are read: EAGAIN.
    fn in_words(&mut self, error: ServiceError) -> ServiceError {
        if error.errno() != libc::ETOOMANYREFS {
            return error;
        }
        self.say_many_in_flight("programs are told to try again");
        ServiceError::new(libc::EAGAIN, format!("{error}: {}; or try again", sys::MANY_IN_FLIGHT))
    }

    fn say_many_in_flight(&mut self, so: &str) {
        if self.said.is_due(self.uid, "in flight", Instant::now()) {
            log::warn!("uid {}: {}; meanwhile {so}", self.uid, sys::MANY_IN_FLIGHT);
        }
    }
}

impl Service {
    /// Ends all connections. This holds nobody up either: neither the next service, which waits for the name, nor the process.
    fn end(&mut self) {
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        for _ in 0..=BACKLOG {
            match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(connection) => self.closers.of(closing::NOBODY_KNOWN).retire(connection),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => break,
            }
        }
        for (id, client) in std::mem::take(&mut self.clients) {
            self.cm.remove_client(id).into_iter().for_each(|channel| client.closer.retire(channel));
            client.closer.retire(client.connection);
        }
        for lend in std::mem::take(&mut self.lends).into_values() {
            lend.closer.retire(lend.relay);
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // To end a connection ends the keeper's copy too, which a successor would have served.
        if self.kept.is_none() {
            self.end();
        }
    }
}

impl Client {
    /// What it calls itself.
    fn name(&self) -> &str {
        self.program.as_deref().unwrap_or("a program without a name")
    }

    /// What it has by itself, without what it has of the connection manager.
    fn status(&self) -> ClientStatus {
        ClientStatus {
            pid: self.peer.pid,
            uid: self.peer.uid,
            program: self.program.clone().unwrap_or_default(),
            age_s: unix_time_s().saturating_sub(self.since_s),
            lanes: self.lanes.keys().copied().collect(),
            ..ClientStatus::default()
        }
    }
}

/// Lets this process have as many descriptors as the system allows: each lane needs several. For the service's own
/// processes only.
pub fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(errno) = setrlimit(Resource::Nofile, limit) {
        log::warn!("cannot raise the limit of descriptors: {errno}");
    }
}

/// Listens at an abstract Unix socket name. EADDRINUSE: another service runs already.
pub(crate) fn listen(name: &str) -> Result<OwnedFd, ServiceError> {
    let failed =
        |errno: Errno| ServiceError::system(format!("cannot listen at the abstract Unix socket name {name:?}"), errno);
    let listener = seqpacket::socket(SocketFlags::NONBLOCK).map_err(failed)?;
    rustix::net::bind(&listener, &seqpacket::address(name).map_err(failed)?).map_err(failed)?;
    rustix::net::listen(&listener, BACKLOG).map_err(failed)?;
    Ok(listener)
}

/// A program's name as it is kept.
fn printable(program: &str) -> String {
    program.chars().map(|c| if c.is_control() { '?' } else { c }).take(PROGRAM_CHARS_MAX).collect()
}

fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A service in a thread of this process; dropping it ends the service.
#[derive(Debug)]
pub struct Hosted {
    stop: Option<OwnedFd>,
    thread: Option<std::thread::JoinHandle<Result<(), ServiceError>>>,
}

impl Drop for Hosted {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(Ok(Err(error))) = self.thread.take().map(|thread| thread.join()) {
            log::error!("the service in this process failed: {error}");
        }
    }
}
