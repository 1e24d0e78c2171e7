//! What a program uses to talk to the service.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use crate::cm::protocol::{CmReply, CmRequest};
use crate::protocol::{self, CmIdStatus, REPLY_BYTES_MAX, RelayHeader, Reply, Request, RingCall, Status, VERSION};
use crate::start::{self, Started};
use crate::{DEFAULT_NAME, ROCE_PORT, ServiceError, seqpacket, sys};

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
            port: ROCE_PORT,
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
/// In a forked child every method fails with ESTALE and dropping does nothing to the parent's leases.
#[derive(Clone, Debug)]
pub struct Client {
    connection: Arc<Connection>,
}

#[derive(Debug)]
struct Connection {
    /// Requests take turns; the number is the last request's id.
    exchange: Mutex<u64>,
    socket: OwnedFd,
    patience: Duration,
    /// The process that made it.
    pid: rustix::process::Pid,
}

impl Client {
    /// Connects to the service of this network namespace; starts it if nobody listens. Any number of processes may do
    /// this at once: one service comes of it.
    pub fn connect_or_start(options: &StartOptions) -> Result<Client, ServiceError> {
        /// Enough for a service that ends just now, and for losing the race to start the next one.
        const STARTS_MAX: u32 = 10;
        /// Whoever has the name and does not listen has not been scheduled for a moment. Each time it gets more.
        const PAUSE: Duration = Duration::from_millis(10);
        let mut starts = 0;
        loop {
            match Connection::open(options) {
                Ok(connection) => return Ok(Client { connection: Arc::new(connection) }),
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

    /// Connects to the service of this network namespace and never starts it (ECONNREFUSED if nobody listens).
    pub fn connect(options: &StartOptions) -> Result<Client, ServiceError> {
        match Connection::open(options) {
            Ok(connection) => Ok(Client { connection: Arc::new(connection) }),
            Err(Refusal::Nobody(error) | Refusal::Final(error)) => Err(error),
        }
    }

    /// Leases a lane: a receive socket of the port's group and a prefix of QP numbers.
    pub fn lease_lane(&self) -> Result<LaneLease, ServiceError> {
        match self.connection.request(Request::LeaseLane)? {
            (Reply::Lane { lane, seed, lease }, mut descriptors) if descriptors.len() >= 2 => {
                let relay = descriptors.pop().expect("there are at least two");
                Ok(LaneLease { lane, seed, lease, rx: descriptors, relay, connection: Arc::clone(&self.connection) })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// The lease under which a lane is at present, of whatever program; None: nobody leases it.
    pub fn lease_of(&self, lane: u16) -> Result<Option<u64>, ServiceError> {
        match self.connection.request(Request::Lease { lane })? {
            (Reply::Leased { lease, .. }, _) => Ok(Some(lease).filter(|lease| *lease != 0)),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// A lane of this program joins a multicast group on an interface: what is sent to the group then comes to its receive sockets, from
    /// this host as well. The service leaves it when the lane is given back or the program ends.
    ///
    /// # Errors
    /// EINVAL: not a multicast address, or not a lane of this program. ENODEV: no such interface. ENOMEM: too many groups.
    pub fn join_group(&self, lane: u16, group: IpAddr, ifindex: u32) -> Result<(), ServiceError> {
        match self.connection.request(Request::JoinGroup { lane, group, ifindex })? {
            (Reply::Joined, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Ends that.
    ///
    /// # Errors
    /// EINVAL: not a lane of this program.
    pub fn leave_group(&self, lane: u16, group: IpAddr, ifindex: u32) -> Result<(), ServiceError> {
        match self.connection.request(Request::LeaveGroup { lane, group, ifindex })? {
            (Reply::Left, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Asks something about connections.
    pub(crate) fn cm_exchange(&self, request: CmRequest) -> Result<(CmReply, Vec<OwnedFd>), ServiceError> {
        match self.connection.request(Request::Cm(request))? {
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

/// Why there is no connection.
enum Refusal {
    /// Nobody listens, or whoever did is ending: starting a service may help.
    Nobody(ServiceError),
    Final(ServiceError),
}

impl Connection {
    fn open(options: &StartOptions) -> Result<Connection, Refusal> {
        let failed = |errno| {
            let what = format!("cannot connect to the Ferroce service at the abstract name {:?}", options.name);
            Refusal::Final(ServiceError::system(what, errno))
        };
        let socket = seqpacket::socket(SocketFlags::empty()).map_err(failed)?;
        let socket = rustix::io::fcntl_dupfd_cloexec(&socket, 3).map_err(failed)?;
        for timeout in [Timeout::Recv, Timeout::Send] {
            sockopt::set_socket_timeout(&socket, timeout, Some(options.patience)).map_err(failed)?;
        }
        let address = seqpacket::address(&options.name).map_err(failed)?;
        match rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)) {
            Ok(()) => {}
            Err(Errno::CONNREFUSED) => {
                let what = "no Ferroce service runs in this network namespace";
                return Err(Refusal::Nobody(ServiceError::new(libc::ECONNREFUSED, what)));
            }
            Err(errno) => return Err(failed(errno)),
        }
        let connection = Connection { exchange: Mutex::new(0), socket, patience: options.patience, pid: getpid() };
        connection.check_service().map_err(Refusal::Final)?;
        connection.greet(options)?;
        Ok(connection)
    }

    /// Sockets from a stranger would give it our packets.
    fn check_service(&self) -> Result<(), ServiceError> {
        let service = sys::peer(self.socket.as_fd())
            .map_err(|error| ServiceError::system("cannot tell whose service this is", sys::errno(&error)))?;
        let own = rustix::process::geteuid().as_raw();
        if service.uid == own || service.uid == 0 {
            return Ok(());
        }
        Err(ServiceError::new(
            libc::EACCES,
            format!(
                "the Ferroce service of this network namespace (pid {}) belongs to uid {}, this program to uid {own}: \
                 for now a program uses its own user's service only. Run the program as that user, end that user's \
                 programs (the service then ends by itself), or use a network namespace of your own (`unshare -rn`)",
                service.pid, service.uid
            ),
        ))
    }

    fn greet(&self, options: &StartOptions) -> Result<(), Refusal> {
        let pid = getpid();
        let program = match options.program.as_str() {
            "" => std::fs::read_to_string("/proc/self/comm").unwrap_or_default(),
            named => named.to_owned(),
        };
        let hello = Request::Hello {
            version: VERSION,
            pid: pid.as_raw_nonzero().get() as u32,
            program: program.trim().chars().take(protocol::PROGRAM_CHARS_MAX).collect(),
        };
        let pidfd = pidfd_open(pid, PidfdFlags::empty())
            .inspect_err(|errno| log::debug!("no pidfd ({errno}): the service sees only the end of the connection"));
        let descriptors: Vec<BorrowedFd<'_>> = pidfd.iter().map(AsFd::as_fd).collect();
        match self.exchange(hello, &descriptors) {
            Ok((Reply::Welcome { .. }, _)) => Ok(()),
            Ok((other, _)) => Err(Refusal::Final(unexpected(&other))),
            // It was in the backlog of a service that has just ended.
            Err(error) if error.errno() == libc::ECONNRESET => Err(Refusal::Nobody(error)),
            Err(error) => Err(Refusal::Final(error)),
        }
    }

    fn is_stale(&self) -> bool {
        getpid() != self.pid
    }

    fn request(&self, request: Request) -> Result<(Reply, Vec<OwnedFd>), ServiceError> {
        if self.is_stale() {
            let what =
                "the connection to the service belongs to the parent of this forked process; open the device anew";
            return Err(ServiceError::new(libc::ESTALE, what));
        }
        self.exchange(request, &[])
    }

    /// Sends a request and waits for its reply; an error reply is an error.
    fn exchange(&self, request: Request, send: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>), ServiceError> {
        let mut id = self.exchange.lock();
        *id += 1;
        // The same request may be sent several times; the answer to any of them is the answer.
        let first = *id;
        let send_as = |id| {
            let message = protocol::encode(id, request.clone());
            seqpacket::send(&self.socket, &[&message], send, SendFlags::empty()).map_err(|errno| self.lost(errno))
        };
        send_as(first)?;
        let deadline = Instant::now() + self.patience;
        let mut buffer = vec![0; REPLY_BYTES_MAX];
        loop {
            let received = match seqpacket::recv(&self.socket, &mut buffer, RecvFlags::empty()) {
                Ok(received) if received.len == 0 => return Err(self.lost(Errno::CONNRESET)),
                Ok(received) => received,
                Err(Errno::INTR) if Instant::now() < deadline => continue,
                Err(errno) => return Err(self.lost(errno)),
            };
            let reply = protocol::decode::<Reply>(&buffer[..received.len]).map_err(|error| {
                ServiceError::new(libc::EPROTO, format!("the service's reply cannot be understood: {error}"))
            })?;
            match reply.body {
                // 0: it could not tell to which request.
                Reply::Error { errno, what } if (first..=*id).contains(&reply.id) || reply.id == 0 => {
                    return Err(ServiceError::new(errno, what));
                }
                Reply::Restarted if Instant::now() < deadline => {
                    *id += 1;
                    send_as(*id)?;
                }
                body if (first..=*id).contains(&reply.id) => return Ok((body, received.descriptors)),
                // To a request that was given up or answered already; its lane, if any, goes back with its descriptors.
                _ => {}
            }
        }
    }

    fn lost(&self, errno: Errno) -> ServiceError {
        match errno {
            Errno::AGAIN | Errno::INTR => ServiceError::new(
                libc::ETIMEDOUT,
                format!("the Ferroce service did not answer within {:?}; is it stopped?", self.patience),
            ),
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => ServiceError::new(
                libc::ECONNRESET,
                "the Ferroce service has ended; lanes that were leased work on, new ones need a device opened anew",
            ),
            errno => ServiceError::system("cannot talk to the Ferroce service", errno),
        }
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
    /// UDP payload: BTH to ICRC, one packet.
    pub bytes: &'a [u8],
}

/// A leased lane. Dropping it gives the lane back.
///
/// Close the receive sockets first, or at the same time: the service takes the end of the lease as their end.
#[derive(Debug)]
pub struct LaneLease {
    lane: u16,
    seed: u64,
    lease: u64,
    rx: Vec<OwnedFd>,
    relay: OwnedFd,
    connection: Arc<Connection>,
}

impl LaneLease {
    /// Longest message of the relay, in bytes: what a buffer for [`Self::relay_recv`] holds.
    pub const RELAY_BYTES_MAX: usize = 65_536 + RelayHeader::LEN;

    /// Lane number, 1..=1023: the upper 10 bits of the QP numbers that are steered here.
    pub fn lane(&self) -> u16 {
        self.lane
    }

    /// Random seed for this lane's keys and QP numbers.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Names this lease: unlike the lane's number, nobody gets it again.
    pub fn id(&self) -> u64 {
        self.lease
    }

    /// Hands out the receive sockets (bound, not blocking, closed on exec), once; later calls give none.
    pub fn take_rx(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.rx)
    }

    /// Readable when the relay has a packet for this lane, and for good when the service has ended.
    pub fn relay_fd(&self) -> BorrowedFd<'_> {
        self.relay.as_fd()
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

    fn hand_in(&self, parts: &[&[u8]], descriptors: &[BorrowedFd<'_>]) -> io::Result<bool> {
        match seqpacket::send(&self.relay, parts, descriptors, SendFlags::DONTWAIT) {
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
        let received = match rustix::io::retry_on_intr(|| seqpacket::recv(&self.relay, buffer, RecvFlags::DONTWAIT)) {
            Ok(received) if received.len == 0 => return Err(Errno::CONNRESET.into()),
            Ok(received) => received,
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
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
        match self.connection.request(Request::ReleaseLane { lane: self.lane }) {
            Ok((Reply::Released { .. }, _)) => Ok(()),
            Ok((other, _)) => Err(unexpected(&other)),
            // It was given back before: the service crashed between doing it and saying it.
            Err(error) if error.errno() == libc::EINVAL => Ok(()),
            Err(error) => Err(error),
        }
    }
}
