//! What a program uses to talk to the service.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ferroce_wire::UDP_PORT;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SendFlags, SocketAddrUnix, SocketFlags};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use crate::cm::protocol::{CmReply, CmRequest};
use crate::config::{Config, Trust};
use crate::protocol::{self, CmIdStatus, REPLY_BYTES_MAX, RelayHeader, Reply, Request, RingCall, Status, VERSION};
use crate::standing::WORD_AFTER;
use crate::start::{self, Started};
use crate::{DEFAULT_NAME, ServiceError, seqpacket, standing, sys};

/// How to find the service, and how to start it.
#[derive(Clone, Debug)]
pub struct StartOptions {
    /// Abstract Unix socket name, without the leading zero byte.
    pub name: String,
    /// UDP port for a service that is started; other than 4791 for tests only.
    pub port: u16,
    /// Paths of `ferroced` to try, best first (beside the library, beside the program). `FERROCE_SERVICE` goes before
    /// them, `PATH` is searched after them.
    pub candidates: Vec<PathBuf>,
    /// What the program calls itself; shown by [`Client::status`]. Empty: the name of its process.
    pub program: String,
    /// How long to wait for a started service to accept, and for each answer.
    pub patience: Duration,
}

impl Default for StartOptions {
    fn default() -> StartOptions {
        StartOptions {
            name: DEFAULT_NAME.into(),
            port: UDP_PORT,
            candidates: Vec::new(),
            program: String::new(),
            // On a machine with many more runnable threads than cores, or with a slow disk, everything takes seconds.
            patience: Duration::from_secs(30),
        }
    }
}

/// A connection to the service, shared by its copies and the leases made through it. The service takes its end as the
/// end of all leases.
///
/// One that was made by [`Client::connect_or_start`] outlives its service: when that has died with its keeper, the next request,
/// or [`Client::recover`], connects to another one and brings the lanes along.
///
/// In a forked child every method fails with ESTALE and dropping does nothing to the parent's leases.
#[derive(Clone, Debug)]
pub struct Client {
    connection: Arc<Connection>,
}

#[derive(Debug)]
struct Connection {
    /// Requests take turns.
    line: Mutex<Line>,
    /// Readable when the service has gone: an epoll set with the line's socket.
    ended: OwnedFd,
    /// How to find another service; None: it does without.
    again: Option<StartOptions>,
    leases: Mutex<Vec<Weak<Held>>>,
    /// The process that made it.
    pid: rustix::process::Pid,
}

impl Client {
    /// Connects to the service of this network namespace; starts it if nobody listens. Any number of processes may do
    /// this at once: one service comes of it.
    pub fn connect_or_start(options: &StartOptions) -> Result<Client, ServiceError> {
        Client::new(Line::open_or_start(options, false)?, Some(options.clone()))
    }

    /// Connects to the service of this network namespace and never starts it (ECONNREFUSED if nobody listens).
    pub fn connect(options: &StartOptions) -> Result<Client, ServiceError> {
        match patiently(|| Line::open(options, false)) {
            Ok(line) => Client::new(line, None),
            Err(Refusal::Nobody(error) | Refusal::Final(error)) => Err(error),
        }
    }

    fn new(line: Line, again: Option<StartOptions>) -> Result<Client, ServiceError> {
        let ended = hang_up_of(&line.socket)
            .map_err(|errno| ServiceError::system("cannot watch the connection to the service", errno))?;
        let leases = Mutex::default();
        Ok(Client { connection: Arc::new(Connection { line: Mutex::new(line), ended, again, leases, pid: getpid() }) })
    }

    /// Readable when the service has died together with its keeper: [`Client::recover`] is due.
    pub fn ended_fd(&self) -> BorrowedFd<'_> {
        self.connection.ended.as_fd()
    }

    /// If the service has died together with its keeper: connects to the next one, starts it if need be, and brings the lanes
    /// along. Traffic goes on meanwhile, as far as packets find their lanes.
    ///
    /// ECONNRESET: it has died, and the connection is not one to look for another. Others: there is no other yet; try later.
    pub fn recover(&self) -> Result<(), ServiceError> {
        self.connection.check_process()?;
        let mut line = self.connection.line.lock();
        if line.has_ended() { self.connection.recover(&mut line) } else { Ok(()) }
    }

    /// Leases a lane: a receive socket of the port's group and a prefix of QP numbers. Another user's service gives no socket: all
    /// packets then come by the relay.
    pub fn lease_lane(&self) -> Result<LaneLease, ServiceError> {
        match patiently(|| self.connection.request(Request::LeaseLane))? {
            (Reply::Lane { lane, seed, lease }, mut descriptors) if !descriptors.is_empty() => {
                let relay = descriptors.pop().expect("there is one at least");
                let held = Held::new(lane, lease, &descriptors, relay)
                    .map_err(|errno| ServiceError::system("no lane: cannot keep what is needed of it", errno))?;
                let (held, connection) = (Arc::new(held), Arc::clone(&self.connection));
                connection.remember(&held);
                Ok(LaneLease { seed, rx: descriptors, held, connection })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// The lease under which a lane is at present, of whatever program; None: nobody leases it.
    pub fn lease_of(&self, lane: u16) -> Result<Option<u64>, ServiceError> {
        leased(self.connection.request(Request::Lease { lane })?.0)
    }

    /// The same for who can do without: waits for the answer no longer than `patience`, and no longer for its turn to ask.
    ///
    /// # Errors
    /// ETIMEDOUT: the service did not answer in time, or another request still waits for its answer.
    pub fn lease_of_within(&self, lane: u16, patience: Duration) -> Result<Option<u64>, ServiceError> {
        leased(self.connection.request_within(patience, Request::Lease { lane })?.0)
    }

    /// A lane of this program joins a multicast group on an interface: what is sent to the group then comes to its receive sockets, from
    /// this host as well. The service leaves it when the lane is given back or the program ends.
    ///
    /// # Errors
    /// EINVAL: not a multicast address, or not a lane of this program. ENODEV: no such interface. ENOMEM: too many groups.
    pub fn join_group(&self, lane: u16, group: IpAddr, ifindex: u32) -> Result<(), ServiceError> {
        // Before it is asked for: the next service hears of it, should this one die meanwhile.
        self.connection.note_groups(lane, |groups| groups.insert((group, ifindex)));
        let joined = match self.connection.request(Request::JoinGroup { lane, group, ifindex }) {
            Ok((Reply::Joined, _)) => Ok(()),
            Ok((other, _)) => Err(unexpected(&other)),
            Err(error) => Err(error),
        };
        if joined.is_err() {
            self.connection.note_groups(lane, |groups| groups.remove(&(group, ifindex)));
        }
        joined
    }

    /// Ends that.
    ///
    /// # Errors
    /// EINVAL: not a lane of this program.
    pub fn leave_group(&self, lane: u16, group: IpAddr, ifindex: u32) -> Result<(), ServiceError> {
        self.connection.note_groups(lane, |groups| groups.remove(&(group, ifindex)));
        match self.connection.request(Request::LeaveGroup { lane, group, ifindex })? {
            (Reply::Left, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Asks something about connections.
    pub(crate) fn cm_exchange(&self, request: CmRequest) -> Result<(CmReply, Vec<OwnedFd>), ServiceError> {
        let asked = match &request {
            CmRequest::OpenChannel => patiently(|| self.connection.request(Request::Cm(request.clone()))),
            _ => self.connection.request(Request::Cm(request)),
        };
        match asked? {
            (Reply::Cm(reply), descriptors) => Ok((reply, descriptors)),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// What the service holds, and for whom.
    pub fn status(&self) -> Result<Status, ServiceError> {
        let mut status: Option<Status> = None;
        let mut from = Some(0);
        while let Some(at) = from {
            let page = match self.connection.request(Request::Status { from: at })? {
                (Reply::Status(page), _) => page,
                (other, _) => return Err(unexpected(&other)),
            };
            from = page.next.filter(|next| *next > at);
            match &mut status {
                None => status = Some(page.status),
                Some(status) => status.clients.extend(page.status.clients),
            }
        }
        Ok(status.expect("there is a first page"))
    }

    /// The connection manager's ids, of all programs.
    pub fn cm_ids(&self) -> Result<Vec<CmIdStatus>, ServiceError> {
        let mut ids = Vec::new();
        let mut from = Some(0);
        while let Some(at) = from {
            let page = match self.connection.request(Request::CmIds { from: at })? {
                (Reply::CmIds(page), _) => page,
                (other, _) => return Err(unexpected(&other)),
            };
            from = page.next.filter(|next| *next > at);
            ids.extend(page.ids);
        }
        Ok(ids)
    }

    /// Whether a process of which this one is a forked child made the connection.
    pub fn is_stale(&self) -> bool {
        self.connection.is_stale()
    }
}

/// Asks again for a while where the service is out of something for the moment, as of descriptors on their way.
fn patiently<T, E: Again>(mut ask: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    const PAUSE: Duration = Duration::from_millis(50);
    const WITHIN: Duration = Duration::from_secs(2);
    let give_up = Instant::now() + WITHIN;
    loop {
        match ask() {
            Err(error) if error.is_again() && Instant::now() < give_up => std::thread::sleep(PAUSE),
            outcome => return outcome,
        }
    }
}

/// What may be worth to be tried again.
trait Again {
    fn is_again(&self) -> bool;
}

impl Again for ServiceError {
    fn is_again(&self) -> bool {
        self.errno() == libc::EAGAIN
    }
}

impl Again for Refusal {
    fn is_again(&self) -> bool {
        matches!(self, Refusal::Final(error) if error.is_again())
    }
}

impl Again for Failure {
    fn is_again(&self) -> bool {
        matches!(self, Failure::Refused(error) if error.is_again())
    }
}

/// Why there is no connection.
enum Refusal {
    /// Nobody listens, or whoever did is ending: starting a service may help.
    Nobody(ServiceError),
    Final(ServiceError),
}

impl Connection {
    fn is_stale(&self) -> bool {
        getpid() != self.pid
    }

    fn check_process(&self) -> Result<(), ServiceError> {
        if !self.is_stale() {
            return Ok(());
        }
        let what = "the connection to the service belongs to the parent of this forked process; open the device anew";
        Err(ServiceError::new(libc::ESTALE, what))
    }

    fn request(&self, request: Request) -> Result<(Reply, Vec<OwnedFd>), ServiceError> {
        self.check_process()?;
        self.request_on(&mut self.line.lock(), request)
    }

    /// [`Connection::request`] for what is not worth the line's patience.
    fn request_within(&self, patience: Duration, request: Request) -> Result<(Reply, Vec<OwnedFd>), ServiceError> {
        self.check_process()?;
        let mut line = self.line.try_lock_for(patience).ok_or_else(|| ended(Errno::AGAIN, patience))?;
        let usual = std::mem::replace(&mut line.patience, patience);
        let outcome = self.request_on(&mut line, request);
        // Another line has come if the service has died.
        line.patience = usual;
        outcome
    }

    fn request_on(&self, line: &mut Line, request: Request) -> Result<(Reply, Vec<OwnedFd>), ServiceError> {
        match line.exchange(request.clone(), &[]) {
            Err(Failure::Lost(_)) if self.again.is_some() => {
                self.recover(line)?;
                Ok(line.exchange(request, &[])?)
            }
            outcome => Ok(outcome?),
        }
    }

    fn remember(&self, held: &Arc<Held>) {
        let mut leases = self.leases.lock();
        leases.retain(|lease| lease.strong_count() > 0);
        leases.push(Arc::downgrade(held));
    }

    /// Changes what is known of the multicast groups of a lane, if it is one of this program.
    fn note_groups(&self, lane: u16, change: impl FnOnce(&mut BTreeSet<(IpAddr, u32)>) -> bool) {
        let lease = self.leases.lock().iter().filter_map(Weak::upgrade).find(|held| held.lane == lane);
        if let Some(held) = lease {
            change(&mut held.groups.lock());
        }
    }

    /// Goes over to the next service, with all lanes.
    fn recover(&self, line: &mut Line) -> Result<(), ServiceError> {
        let options = self.again.as_ref().ok_or_else(|| ended(Errno::CONNRESET, line.patience))?;
        let next = Line::reopen_or_start(options)?;
        let failed = |errno| ServiceError::system("cannot watch the connection to the service", errno);
        let before = std::mem::replace(line, next);
        // It may have left the set with its last copy.
        let _gone = epoll::delete(&self.ended, &before.socket);
        watch_hang_up(&self.ended, &line.socket).map_err(failed)?;
        let leases: Vec<Arc<Held>> = self.leases.lock().iter().filter_map(Weak::upgrade).collect();
        for held in leases {
            held.bring_along(line)?;
        }
        Ok(())
    }
}

/// A connection to one service.
#[derive(Debug)]
struct Line {
    socket: OwnedFd,
    /// Of the last request.
    last_id: u64,
    /// So long each request and its reply may take together.
    patience: Duration,
}

/// How long a reply is waited for.
struct Wait {
    deadline: Instant,
    /// When it is told what is waited for; None: not, or it was.
    word_at: Option<Instant>,
    /// Looks at what has come after the deadline.
    overdue: u32,
}

impl Wait {
    /// What is there already counts, as after this process was stopped for long.
    const OVERDUE_MAX: u32 = 64;

    fn of(patience: Duration) -> Wait {
        let now = Instant::now();
        // Who waits less need not say so.
        let word_at = (patience > WORD_AFTER).then(|| now + WORD_AFTER);
        Wait { deadline: now + patience, word_at, overdue: 0 }
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// How long to wait now; None: it is enough.
    fn step(&mut self) -> Option<Duration> {
        if self.is_over() {
            self.overdue += 1;
        }
        let until = self.word_at.map_or(self.deadline, |at| at.min(self.deadline));
        (self.overdue <= Wait::OVERDUE_MAX).then(|| until.saturating_duration_since(Instant::now()))
    }
}

/// What became of a request.
enum Failure {
    /// The service is gone.
    Lost(ServiceError),
    /// It says no, or nothing, or what cannot be understood.
    Refused(ServiceError),
}

impl From<Failure> for ServiceError {
    fn from(failure: Failure) -> ServiceError {
        match failure {
            Failure::Lost(error) | Failure::Refused(error) => error,
        }
    }
}

impl Line {
    /// `again`: the program had another service.
    fn open_or_start(options: &StartOptions, again: bool) -> Result<Line, ServiceError> {
        /// Enough for a service that ends just now, and for losing the race to start the next one.
        const STARTS_MAX: u32 = 10;
        /// Whoever has the name and does not listen has not been scheduled for a moment. Each time it gets more.
        const PAUSE: Duration = Duration::from_millis(10);
        let mut starts = 0;
        loop {
            match patiently(|| Line::open(options, again)) {
                Ok(line) => return Ok(line),
                Err(Refusal::Nobody(_)) if starts < STARTS_MAX => {
                    if start::start(options)? == Started::Taken {
                        std::thread::sleep(starts * PAUSE);
                    }
                }
                Err(Refusal::Nobody(error) | Refusal::Final(error)) => return Err(error),
            }
            starts += 1;
        }
    }

    /// The same where many do it at once, because the service of all of them has died: not everybody need start one.
    fn reopen_or_start(options: &StartOptions) -> Result<Line, ServiceError> {
        const LOOKS: u32 = 3;
        const PAUSE_US: std::ops::Range<u64> = 0..4000;
        for _ in 0..LOOKS {
            match Line::open(options, true) {
                Ok(line) => return Ok(line),
                Err(Refusal::Nobody(_)) => std::thread::sleep(Duration::from_micros(rand::random_range(PAUSE_US))),
                Err(Refusal::Final(error)) => return Err(error),
            }
        }
        Line::open_or_start(options, true)
    }

    fn open(options: &StartOptions, again: bool) -> Result<Line, Refusal> {
        let failed = |errno| {
            let what = format!("cannot connect to the Ferroce service at the abstract name {:?}", options.name);
            Refusal::Final(ServiceError::system(what, errno))
        };
        standing::know_stderr();
        let socket = seqpacket::socket(SocketFlags::empty()).map_err(failed)?;
        let socket = rustix::io::fcntl_dupfd_cloexec(&socket, 3).map_err(failed)?;
        let mut line = Line { socket, last_id: 0, patience: options.patience };
        let address = seqpacket::address(&options.name).map_err(failed)?;
        match line.connect(&address) {
            Ok(()) => {}
            Err(Errno::CONNREFUSED) => {
                let what = "no Ferroce service runs in this network namespace";
                return Err(Refusal::Nobody(ServiceError::new(libc::ECONNREFUSED, what)));
            }
            Err(errno) => return Err(failed(errno)),
        }
        line.check_service().map_err(Refusal::Final)?;
        line.greet(options, again)?;
        Ok(line)
    }

    /// Waits while the backlog is full, and says so if that takes long. (Nothing else that is done with the socket blocks.)
    fn connect(&self, address: &SocketAddrUnix) -> Result<(), Errno> {
        let attempt = |patience: Duration| {
            sockopt::set_socket_timeout(&self.socket, Timeout::Send, Some(patience))?;
            rustix::io::retry_on_intr(|| rustix::net::connect(&self.socket, address))
        };
        match attempt(self.patience.min(WORD_AFTER)) {
            Err(Errno::AGAIN) if self.patience > WORD_AFTER => {
                standing::say(&format!(
                    "waiting up to {:?} for the Ferroce service, which accepts no programs: it is stopped, or busy; \
                     `ps -C ferroced,ferroced-worker` shows its processes",
                    self.patience
                ));
                attempt(self.patience - WORD_AFTER)
            }
            outcome => outcome,
        }
    }

    /// Sockets from a stranger would give it our packets.
    fn check_service(&self) -> Result<(), ServiceError> {
        let service = sys::peer(self.socket.as_fd())
            .map_err(|error| ServiceError::system("cannot tell whose service this is", sys::errno(&error)))?;
        let own = rustix::process::geteuid().as_raw();
        let trust = if service.uid == own { Trust::default() } else { Config::load()?.trust };
        if trust.includes(own, service.uid) {
            return Ok(());
        }
        let pid = standing::pid_of(&self.socket).unwrap_or(service.pid);
        Err(ServiceError::new(
            libc::EACCES,
            format!(
                "the Ferroce service of this network namespace (pid {}) belongs to uid {}, this program to uid {own}, \
                 which does not trust it. To use it, write `trust = [{}]` in this user's ferroce.toml (that user then reads what is \
                 sent to this program), and have that user write `serve = \"namespace\"` in theirs, which a service reads when it \
                 starts. Or run the program as that user, end that user's programs (the service then ends by itself), \
                 or use a network namespace of your own (`unshare -rn`, then `ip link set lo up`)",
                pid, service.uid, service.uid
            ),
        ))
    }

    fn greet(&mut self, options: &StartOptions, again: bool) -> Result<(), Refusal> {
        let pid = getpid();
        let program = match options.program.as_str() {
            "" => std::fs::read_to_string("/proc/self/comm").unwrap_or_default(),
            named => named.to_owned(),
        };
        let hello = Request::Hello {
            version: VERSION,
            pid: pid.as_raw_nonzero().get() as u32,
            program: program.trim().chars().take(protocol::PROGRAM_CHARS_MAX).collect(),
            again,
        };
        let pidfd = pidfd_open(pid, PidfdFlags::empty())
            .inspect_err(|errno| log::debug!("no pidfd ({errno}): the service sees only the end of the connection"));
        let descriptors: Vec<BorrowedFd<'_>> = pidfd.iter().map(AsFd::as_fd).collect();
        match self.exchange(hello, &descriptors) {
            Ok((Reply::Welcome { .. }, _)) => Ok(()),
            Ok((other, _)) => Err(Refusal::Final(unexpected(&other))),
            // It was in the backlog of a service that has just ended.
            Err(Failure::Lost(error)) => Err(Refusal::Nobody(error)),
            Err(Failure::Refused(error)) => Err(Refusal::Final(error)),
        }
    }

    /// Whether the service has closed its end.
    fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::empty())];
        let looked = rustix::event::poll(&mut polled, Some(&Timespec::default()));
        looked.is_ok() && polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// Sends a request and waits for its reply; an error reply is an error.
    fn exchange(&mut self, request: Request, send: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>), Failure> {
        // The same request may be sent several times; the answer to any of them is the answer.
        let first = self.last_id + 1;
        let mut wait = Wait::of(self.patience);
        self.send(&request, send, &mut wait)?;
        let mut buffer = vec![0; REPLY_BYTES_MAX];
        loop {
            self.wait(PollFlags::IN, &mut wait)?;
            let received = match seqpacket::recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT) {
                Ok(received) if received.len == 0 => return Err(self.lost(Errno::CONNRESET)),
                Ok(received) => received,
                Err(Errno::AGAIN | Errno::INTR) => continue,
                Err(errno) => return Err(self.lost(errno)),
            };
            let reply = protocol::decode::<Reply>(&buffer[..received.len]).map_err(|error| {
                let what = format!("the service's reply cannot be understood: {error}");
                Failure::Refused(ServiceError::new(libc::EPROTO, what))
            })?;
            match reply.body {
                // 0: it could not tell to which request.
                Reply::Error { errno, what } if (first..=self.last_id).contains(&reply.id) || reply.id == 0 => {
                    return Err(Failure::Refused(ServiceError::new(errno, what)));
                }
                Reply::Restarted if !wait.is_over() => self.send(&request, send, &mut wait)?,
                body if (first..=self.last_id).contains(&reply.id) => return Ok((body, received.descriptors)),
                // To a request that was given up or answered already; its lane, if any, goes back with its descriptors.
                _ => {}
            }
        }
    }

    /// Waits until the socket can be read or written, or has failed. If that takes long, says once what it waits for.
    fn wait(&self, events: PollFlags, wait: &mut Wait) -> Result<(), Failure> {
        while let Some(time) = wait.step() {
            let timeout = Timespec::try_from(time).unwrap_or_default();
            match rustix::event::poll(&mut [PollFd::new(&self.socket, events)], Some(&timeout)) {
                Ok(0) if wait.is_over() => break,
                Ok(0) => self.say_a_word(wait),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.lost(errno)),
            }
        }
        Err(self.lost(Errno::AGAIN))
    }

    fn say_a_word(&self, wait: &mut Wait) {
        if wait.word_at.take_if(|at| *at <= Instant::now()).is_some() {
            let silence = standing::silence_of(&self.socket);
            standing::say(&format!(
                "waiting up to {:?} for the Ferroce service, which does not answer: {silence}",
                self.patience
            ));
        }
    }

    /// Sends a request under the next id.
    fn send(&mut self, request: &Request, descriptors: &[BorrowedFd<'_>], wait: &mut Wait) -> Result<(), Failure> {
        self.last_id += 1;
        let message = protocol::encode(self.last_id, request);
        let mut descriptors = descriptors;
        loop {
            match seqpacket::send(&self.socket, &[&message], descriptors, SendFlags::DONTWAIT) {
                Ok(()) => return Ok(()),
                // The service takes none at this stage, as it has what it needs.
                Err(Errno::PERM) if !descriptors.is_empty() => descriptors = &[],
                // It can do without the pidfd.
                Err(Errno::TOOMANYREFS) if matches!(request, Request::Hello { .. }) => descriptors = &[],
                Err(Errno::TOOMANYREFS) => {
                    return Err(Failure::Refused(ServiceError::new(libc::EAGAIN, sys::MANY_IN_FLIGHT)));
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, wait)?,
                Err(errno) => return Err(self.lost(errno)),
            }
        }
    }

    fn lost(&self, errno: Errno) -> Failure {
        /// Who waits less has no time to look.
        const LOOK_AFTER: Duration = Duration::from_secs(1);
        let error = ended(errno, self.patience);
        if error.errno() == libc::ETIMEDOUT && self.patience >= LOOK_AFTER {
            let what = format!("{error} ({})", standing::silence_of(&self.socket));
            return Failure::Refused(ServiceError::new(libc::ETIMEDOUT, what));
        }
        if error.errno() != libc::ECONNRESET {
            return Failure::Refused(error);
        }
        self.last_words().map_or(Failure::Lost(error), Failure::Refused)
    }

    /// What the service said before it closed its end: it did not even read what was asked.
    fn last_words(&self) -> Option<ServiceError> {
        /// The first one may tell that there was an unread request.
        const LOOKS: usize = 2;
        let mut buffer = vec![0; REPLY_BYTES_MAX];
        let received = (0..LOOKS).find_map(|_| seqpacket::recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT).ok())?;
        match protocol::decode::<Reply>(&buffer[..received.len]).ok()?.body {
            Reply::Error { errno, what } => Some(ServiceError::new(errno, what)),
            _ => None,
        }
    }
}

/// Why a service does not answer.
fn ended(errno: Errno, patience: Duration) -> ServiceError {
    match errno {
        Errno::AGAIN | Errno::INTR => {
            ServiceError::new(libc::ETIMEDOUT, format!("the Ferroce service did not answer within {patience:?}"))
        }
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => ServiceError::new(
            libc::ECONNRESET,
            "the Ferroce service has ended; lanes that were leased work on, new ones need a device opened anew",
        ),
        errno => ServiceError::system("cannot talk to the Ferroce service", errno),
    }
}

/// An epoll set that is readable when the other end of a socket has closed.
fn hang_up_of(socket: &OwnedFd) -> Result<OwnedFd, Errno> {
    let set = rustix::io::fcntl_dupfd_cloexec(epoll::create(epoll::CreateFlags::CLOEXEC)?, 3)?;
    watch_hang_up(&set, socket)?;
    Ok(set)
}

fn watch_hang_up(set: &OwnedFd, socket: &OwnedFd) -> Result<(), Errno> {
    // Hang-ups are told without being asked for.
    epoll::add(set, socket, epoll::EventData::new_u64(0), epoll::EventFlags::empty())
}

fn leased(reply: Reply) -> Result<Option<u64>, ServiceError> {
    match reply {
        Reply::Leased { lease, .. } => Ok(Some(lease).filter(|lease| *lease != 0)),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(reply: &Reply) -> ServiceError {
    ServiceError::new(libc::EPROTO, format!("the service gave an answer to another question: {reply:?}"))
}

/// What the relay brings.
#[derive(Debug)]
pub enum Relayed<'a> {
    /// A packet that was steered to the wrong lane.
    Packet(RelayedPacket<'a>),
    /// Word of another lane about a ring, with the descriptors that came along.
    Ring(RingCall, Vec<OwnedFd>),
}

impl<'a> Relayed<'a> {
    /// The packet, if it is one.
    pub fn packet(self) -> Option<RelayedPacket<'a>> {
        match self {
            Relayed::Packet(packet) => Some(packet),
            Relayed::Ring(..) => None,
        }
    }
}

/// A packet that was steered to the wrong lane, as the relay brings it to the right one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayedPacket<'a> {
    /// IP source and UDP source port.
    pub src: SocketAddr,
    /// IP destination.
    pub dst: IpAddr,
    /// UDP payload of one packet without its ICRC, which was checked: BTH to pad.
    pub bytes: &'a [u8],
}

/// What is needed to bring a lane along to another service.
#[derive(Debug)]
struct Held {
    lane: u16,
    lease: u64,
    /// A copy of the receive socket; None: another user's service gave none.
    rx: Option<OwnedFd>,
    relay: Mutex<OwnedFd>,
    /// Multicast groups and their interfaces.
    groups: Mutex<BTreeSet<(IpAddr, u32)>>,
    /// Readable when the relay has something: an epoll set, so that it stays the same for those who sleep on it.
    arrived: OwnedFd,
}

impl Held {
    fn new(lane: u16, lease: u64, rx: &[OwnedFd], relay: OwnedFd) -> Result<Held, Errno> {
        let rx = rx.first().map(|rx| rustix::io::fcntl_dupfd_cloexec(rx, 3)).transpose()?;
        let arrived = rustix::io::fcntl_dupfd_cloexec(epoll::create(epoll::CreateFlags::CLOEXEC)?, 3)?;
        epoll::add(&arrived, &relay, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Held { lane, lease, rx, relay: Mutex::new(relay), groups: Mutex::default(), arrived })
    }

    /// Offers the lane to the service at the other end of `line`. Its refusal is told in the log only: the process goes on with
    /// what works without (its rings).
    fn bring_along(&self, line: &mut Line) -> Result<(), ServiceError> {
        let request = Request::Reclaim { lane: self.lane, lease: self.lease };
        let rx: Vec<BorrowedFd<'_>> = self.rx.iter().map(AsFd::as_fd).collect();
        match patiently(|| line.exchange(request.clone(), &rx)) {
            Ok((Reply::Reclaimed { .. }, mut descriptors)) if !descriptors.is_empty() => {
                let failed = |errno| ServiceError::system("cannot use the relay of a lane", errno);
                self.change_relay(&descriptors.swap_remove(0)).map_err(failed)?;
                self.join_again(line)
            }
            Ok((other, _)) => Err(unexpected(&other)),
            Err(Failure::Refused(error)) => {
                log::error!("lane {} gets no packets over the network any more: {error}", self.lane);
                Ok(())
            }
            Err(Failure::Lost(error)) => Err(error),
        }
    }

    /// Tells the service of the lane's groups: the socket is still in them, but not all that is sent to them comes to it by itself.
    fn join_again(&self, line: &mut Line) -> Result<(), ServiceError> {
        let groups = self.groups.lock().clone();
        for (group, ifindex) in groups {
            match line.exchange(Request::JoinGroup { lane: self.lane, group, ifindex }, &[]) {
                Ok((Reply::Joined, _)) => {}
                Ok((other, _)) => return Err(unexpected(&other)),
                Err(Failure::Refused(error)) => log::error!("lane {} is out of {group}: {error}", self.lane),
                Err(Failure::Lost(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// Puts another socket in the relay's place, under the same number.
    fn change_relay(&self, next: &OwnedFd) -> Result<(), Errno> {
        let mut relay = self.relay.lock();
        self.mute(&relay);
        rustix::io::dup3(next, &mut relay, rustix::io::DupFlags::CLOEXEC)?;
        epoll::add(&self.arrived, &*relay, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
    }

    /// A relay without another end would wake sleepers without end.
    fn mute(&self, relay: &OwnedFd) {
        let _not_there = epoll::delete(&self.arrived, relay);
    }
}

/// A leased lane. Dropping it gives the lane back.
///
/// Close the receive sockets first, or at the same time: the service takes the end of the lease as their end.
#[derive(Debug)]
pub struct LaneLease {
    seed: u64,
    rx: Vec<OwnedFd>,
    held: Arc<Held>,
    connection: Arc<Connection>,
}

impl LaneLease {
    /// Longest message of the relay, in bytes: what a buffer for [`Self::relay_recv`] holds.
    pub const RELAY_BYTES_MAX: usize = 65_536 + RelayHeader::LEN;

    /// Lane number, 1..=1023: the upper 10 bits of the QP numbers that are steered here.
    pub fn lane(&self) -> u16 {
        self.held.lane
    }

    /// Random seed for this lane's keys and QP numbers.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Names this lease: unlike the lane's number, nobody gets it again.
    pub fn id(&self) -> u64 {
        self.held.lease
    }

    /// Hands out the receive sockets (bound, not blocking, closed on exec), once; later calls give none. A lane of another user's
    /// service has none.
    pub fn take_rx(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.rx)
    }

    /// Readable when the relay has something for this lane; the same for as long as the lease lasts.
    pub fn relay_fd(&self) -> BorrowedFd<'_> {
        self.held.arrived.as_fd()
    }

    /// The numbers of the lease's descriptors that a forked child must close: whoever has them keeps the lane's socket open.
    pub fn not_for_children(&self) -> impl Iterator<Item = RawFd> {
        let rx = self.held.rx.as_ref().map(AsRawFd::as_raw_fd);
        [self.held.relay.lock().as_raw_fd(), self.held.arrived.as_raw_fd()].into_iter().chain(rx)
    }

    /// Hands a packet for a foreign QP number to the service, which forwards it to the right lane. Never blocks. False:
    /// dropped, because the relay is full. A packet that came from the relay must not be handed in again.
    ///
    /// ESTALE: in a forked child. EPIPE or ECONNRESET: the service has ended.
    pub fn relay_send(&self, src: SocketAddr, dst: IpAddr, bytes: &[u8]) -> io::Result<bool> {
        if self.connection.is_stale() {
            return Err(Errno::STALE.into());
        }
        let header = RelayHeader { src, dst }.encode();
        self.hand_in(&[&header, bytes], &[])
    }

    /// Hands word about a ring to the service, which passes it on to the lane that `call` names. Never blocks. False:
    /// dropped, because the relay is full.
    ///
    /// ESTALE: in a forked child. EPIPE or ECONNRESET: the service has ended.
    pub fn ring_send(&self, call: &RingCall, memory: Option<BorrowedFd<'_>>) -> io::Result<bool> {
        if self.connection.is_stale() {
            return Err(Errno::STALE.into());
        }
        self.hand_in(&[&call.encode()], memory.as_slice())
    }

    /// Hands in what need not be a message, as broken and hostile programs do. For tests.
    #[doc(hidden)]
    pub fn relay_send_raw(&self, bytes: &[u8]) -> io::Result<bool> {
        self.hand_in(&[bytes], &[])
    }

    fn hand_in(&self, parts: &[&[u8]], descriptors: &[BorrowedFd<'_>]) -> io::Result<bool> {
        match seqpacket::send(&*self.held.relay.lock(), parts, descriptors, SendFlags::DONTWAIT) {
            Ok(()) => Ok(true),
            Err(Errno::AGAIN | Errno::NOBUFS) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Takes one message that the relay brought, if there is one. Never blocks. The buffer is grown as needed.
    ///
    /// ESTALE: in a forked child. ECONNRESET: the service has ended.
    pub fn relay_recv<'b>(&self, buffer: &'b mut Vec<u8>) -> io::Result<Option<Relayed<'b>>> {
        if self.connection.is_stale() {
            return Err(Errno::STALE.into());
        }
        buffer.resize(Self::RELAY_BYTES_MAX, 0);
        let relay = self.held.relay.lock();
        let received = match rustix::io::retry_on_intr(|| seqpacket::recv(&*relay, buffer, RecvFlags::DONTWAIT)) {
            Ok(received) if received.len > 0 => received,
            Err(Errno::AGAIN) => return Ok(None),
            ended => {
                self.held.mute(&relay);
                return Err(ended.err().unwrap_or(Errno::CONNRESET).into());
            }
        };
        drop(relay);
        let message = &buffer[..received.len];
        if let Some(call) = RingCall::decode(message) {
            return Ok(Some(Relayed::Ring(call, received.descriptors)));
        }
        let (header, bytes) = RelayHeader::decode(message).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Some(Relayed::Packet(RelayedPacket { src: header.src, dst: header.dst, bytes })))
    }

    /// Gives the lane back and waits for the service to confirm it: nothing is steered to it any more. Receive sockets
    /// that were taken out should be closed before.
    pub fn release(self) -> Result<(), ServiceError> {
        match self.connection.request(Request::ReleaseLane { lane: self.held.lane }) {
            Ok((Reply::Released { .. }, _)) => Ok(()),
            Ok((other, _)) => Err(unexpected(&other)),
            // It was given back before: the service crashed between doing it and saying it.
            Err(error) if error.errno() == libc::EINVAL => Ok(()),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each one gave the service all its time again.
    #[test]
    fn late_replies_do_not_start_the_time_anew() {
        let (ours, theirs) = seqpacket::pair().unwrap();
        let mut line = Line { socket: ours, last_id: 0, patience: Duration::from_millis(200) };
        let service = std::thread::spawn(move || {
            let late = protocol::encode(99, Reply::Joined);
            // It ends with the line, or with a test that fails.
            let give_up = Instant::now() + Duration::from_secs(60);
            let send = || seqpacket::send(&theirs, &[&late], &[], SendFlags::DONTWAIT);
            while Instant::now() < give_up && !matches!(send(), Err(Errno::PIPE | Errno::CONNRESET)) {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let Err(Failure::Refused(error)) = line.exchange(Request::LeaseLane, &[]) else { panic!("it was answered") };
        assert_eq!(error.errno(), libc::ETIMEDOUT);
        drop(line);
        service.join().unwrap();
    }

    /// As after this process was stopped.
    #[test]
    fn what_came_in_time_counts_although_it_is_late() {
        let (ours, theirs) = seqpacket::pair().unwrap();
        let mut line = Line { socket: ours, last_id: 0, patience: Duration::ZERO };
        for id in [99, 1] {
            seqpacket::send(&theirs, &[&protocol::encode(id, Reply::Joined)], &[], SendFlags::empty()).unwrap();
        }
        assert!(matches!(line.exchange(Request::LeaseLane, &[]), Ok((Reply::Joined, _))));
    }

    #[test]
    fn a_full_socket_is_not_waited_for_longer() {
        let (ours, _theirs) = seqpacket::pair().unwrap();
        while seqpacket::send(&ours, &[&[0; 1024]], &[], SendFlags::DONTWAIT).is_ok() {}
        let mut line = Line { socket: ours, last_id: 0, patience: Duration::from_millis(50) };
        let Err(Failure::Refused(error)) = line.exchange(Request::LeaseLane, &[]) else { panic!("it was sent") };
        assert_eq!(error.errno(), libc::ETIMEDOUT);
    }
}
