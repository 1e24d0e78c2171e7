//! The keeper: a process beside the service, which holds what must outlive it and parses nothing that comes from outside.
//!
//! As long as it lives, a service that crashes is replaced at once: no socket of the group moves, no connection breaks,
//! and no lane is lost. It ends with the service's orderly end. A keeper that dies is replaced by the service: the first
//! one is the service's parent, later ones are started by it.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};
use rustix::process::{PidfdFlags, Signal, getppid, pidfd_open, pidfd_send_signal};

use crate::server;
use crate::standing::Process;
use crate::store::{self, Held, Key, Message, Operation, StateFile};
use crate::{ServiceError, sys};

/// A service that crashes more often than this within [`CRASHES_WITHIN`] is given up.
const CRASHES_MAX: usize = 10;
const CRASHES_WITHIN: Duration = Duration::from_secs(60);

/// After the first crash within that time the service is started again at once, after the second after this; after each further
/// one it takes twice as long, up to the longest.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// How often a service says that it lives, and how long the keeper waits at a time.
pub(crate) const BEAT: Duration = Duration::from_secs(2);

/// A service that said nothing in so many waits of [`BEAT`], and at the end of each did not want to run, hangs. Waits that the keeper
/// slept through (it was stopped, the machine was suspended) count as one: the service did not run either.
const SILENT_MAX: u32 = 6;

/// So many waits may be silent in all: it may want to run and not get a core, or be busy, or not have begun.
const SILENT_BUSY_MAX: u32 = 30;

/// So long the keeper waits for its own copy of a connection to be closed, so that the service has the last one.
const CLOSE_WITHIN: Duration = Duration::from_millis(100);

/// Connections whose closing waits, at most; copies of further ones stay.
const CLOSING_MAX: usize = 64;

/// So long a service that has left its keeper has to end by itself, and so long the end of a killed one is waited for. That one runs no
/// more, but may have to wait for a file system to close its files.
const END_WITHIN: Duration = Duration::from_secs(5);

/// Listens at the name, runs services one after the other, and returns when one ended in order.
///
/// `worker` gives the command that calls [`server::Service::resume`] with its standard input. `ready` is called when
/// clients can connect. The process is to end after this: what was kept stays open until then. EADDRINUSE: another service runs already.
pub fn run(name: &str, worker: &dyn Fn() -> Command, ready: impl FnOnce()) -> Result<(), ServiceError> {
    let mut held = Held::new();
    held.insert(Key::Listener, server::listen(name)?);
    for (key, name) in [(Key::GroupState, "ferroce-group"), (Key::ServiceState, "ferroce-service")] {
        let file = StateFile::create(name).map_err(|errno| ServiceError::system("no memory for the state", errno))?;
        held.insert(key, file);
    }
    let started = start(worker())?;
    ready();
    keep(held, started, worker, Crashes::default())
}

/// Keeps what a service that has lost its keeper says on `socket`, and runs services after it as [`run`] does.
pub fn take_over(socket: &OwnedFd, worker: &dyn Fn() -> Command) -> Result<(), ServiceError> {
    // As in [`keep`].
    let mut held = ManuallyDrop::new(Held::new());
    let failed = |what| ServiceError::new(libc::EPROTO, what);
    let (pid, parent) = parent_at(socket.as_fd());
    let attended = limit_waits(socket, BEAT).and_then(|()| attend(socket, &mut held, &mut Silence::of(pid)));
    let ended = attended.map_err(failed)?;
    if ended != Ended::InOrder {
        parent.iter().for_each(|parent| end_parent(parent, ended));
    }
    match ended {
        Ended::InOrder => Ok(()),
        Ended::Crashed | Ended::Hung if held.contains_key(&Key::Listener) => {
            log::error!("the service has crashed; starting it again");
            let mut crashes = Crashes::default();
            crashes.pause()?;
            let started = start_again(worker, &mut crashes)?;
            keep(ManuallyDrop::into_inner(held), started, worker, crashes)
        }
        Ended::Crashed | Ended::Hung => Err(failed("the service crashed before it had said what to keep".into())),
    }
}

/// Runs services, the first one of which is `started`, one after the other until one ends in order.
fn keep(
    held: Held,
    mut started: (Child, OwnedFd),
    worker: &dyn Fn() -> Command,
    mut crashes: Crashes,
) -> Result<(), ServiceError> {
    // There may be messages in the sockets whose descriptors wait as they are closed. The process ends after this, and the system does not
    // wait then.
    let mut held = ManuallyDrop::new(held);
    loop {
        let (mut child, socket) = started;
        let ended = serve(&socket, &mut held, child.id()).unwrap_or_else(|what| {
            // It waits for an answer, or believes to be kept when it is not: better a new one.
            log::error!("{what}");
            Ended::Hung
        });
        if ended == Ended::InOrder {
            // Nobody is to wait for an answer at a name where nobody listens.
            held.remove(&Key::Listener).into_iter().for_each(close_aside);
        }
        drop(socket);
        let status = end(&mut child, ended)?;
        if ended == Ended::InOrder || status.is_some_and(|status| status.success()) {
            return Ok(());
        }
        match status {
            Some(status) => log::error!("the service has ended with {status}; starting it again"),
            None => log::error!("the service was killed, and does not end; starting another one"),
        }
        crashes.pause()?;
        started = start_again(worker, &mut crashes)?;
    }
}

/// Gives a service what was kept, and keeps what it says, until it is gone. An error: there is no understanding with it.
fn serve(socket: &OwnedFd, held: &mut Held, pid: u32) -> Result<Ended, String> {
    let mut silence = Silence::of(pid);
    limit_waits(socket, BEAT)?;
    match give(socket, held, &mut silence)? {
        Some(ended) => Ok(ended),
        None => attend(socket, held, &mut silence),
    }
}

/// The process at the other end of a socket which started this one, and made the socket: its number, and a pidfd if it is still our parent.
pub(crate) fn parent_at(socket: BorrowedFd<'_>) -> (u32, Option<OwnedFd>) {
    let pid = sys::peer(socket).map_or(0, |peer| peer.pid);
    // Nobody else has the number as long as it is our parent's. If it has died already, we have another one.
    let is_parent = || getppid().is_some_and(|parent| parent.as_raw_nonzero().get() as u32 == pid);
    let parent = getppid().filter(|_| is_parent());
    let parent = parent.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()).filter(|_| is_parent());
    (pid, parent)
}

/// Sees to it that a service runs no more: two of them would take what is kept from each other. (One that ended in order takes its time
/// and is not followed by another.) None: it has not ended yet.
fn end(child: &mut Child, ended: Ended) -> Result<Option<ExitStatus>, ServiceError> {
    if ended != Ended::Hung {
        let status = wait_for(child)?;
        if status.is_some() || ended == Ended::InOrder {
            return Ok(status);
        }
        log::error!("the service (pid {}) has left its keeper and goes on; killing it", child.id());
    }
    // It fails for one that has ended.
    let _ = child.kill();
    wait_for(child)
}

/// The same for a service that is not this process's child.
fn end_parent(pidfd: &OwnedFd, ended: Ended) {
    if ended == Ended::Hung || !has_ended_within(pidfd, END_WITHIN) {
        let _ = pidfd_send_signal(pidfd, Signal::KILL);
        has_ended_within(pidfd, END_WITHIN);
    }
}

fn has_ended_within(pidfd: &OwnedFd, time: Duration) -> bool {
    let timeout = Timespec::try_from(time).ok();
    rustix::event::poll(&mut [PollFd::new(pidfd, PollFlags::IN)], timeout.as_ref()) == Ok(1)
}

/// How a service has ended; None: not within [`END_WITHIN`].
fn wait_for(child: &mut Child) -> Result<Option<ExitStatus>, ServiceError> {
    const PAUSE: Duration = Duration::from_millis(5);
    let give_up = Instant::now() + END_WITHIN;
    loop {
        let status = child.try_wait();
        let status = status.map_err(|error| ServiceError::system("cannot wait for the service", sys::errno(&error)))?;
        if status.is_some() || Instant::now() > give_up {
            return Ok(status);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Starts a service in place of one that has crashed. That it cannot be started for the moment (no memory, no process to be had) is
/// no reason to let go of what it is to be given; it counts as a crash.
fn start_again(worker: &dyn Fn() -> Command, crashes: &mut Crashes) -> Result<(Child, OwnedFd), ServiceError> {
    loop {
        match start(worker()) {
            Ok(started) => return Ok(started),
            Err(error) => {
                log::error!("{error}; trying again");
                crashes.pause()?;
            }
        }
    }
}

/// When services have crashed lately.
#[derive(Default)]
struct Crashes(Vec<Instant>);

impl Crashes {
    /// Notes a crash, and waits until the next service may be started. ECHILD: it is given up.
    fn pause(&mut self) -> Result<(), ServiceError> {
        let now = Instant::now();
        self.0.retain(|crash| now.duration_since(*crash) < CRASHES_WITHIN);
        self.0.push(now);
        let pause = pause_after(self.0.len()).ok_or_else(|| given_up(self.0.len()))?;
        std::thread::sleep(pause);
        Ok(())
    }
}

/// How long to wait after so many crashes; None: there were too many.
fn pause_after(crashes: usize) -> Option<Duration> {
    let doublings = match crashes {
        0 | 1 => return Some(Duration::ZERO),
        more if more <= CRASHES_MAX => (more - 2) as u32,
        _ => return None,
    };
    Some(PAUSE_MIN.saturating_mul(1 << doublings).min(PAUSE_MAX))
}

fn given_up(crashes: usize) -> ServiceError {
    let what = format!(
        "the service crashed, or could not be started, {crashes} times within {CRASHES_WITHIN:?}: giving up. Programs that run keep \
         their lanes, and the next program starts another service. `ferroced` run by hand with FERROCE_LOG=debug, or [log] in \
         ferroce.toml, tells why"
    );
    ServiceError::new(libc::ECHILD, what)
}

/// How a service ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    InOrder,
    Crashed,
    /// It is to be killed.
    Hung,
}

/// How long a service has said nothing.
struct Silence {
    pid: u32,
    waits: u32,
    /// The last ones of these, at the end of which it did not want to run.
    idle: u32,
    /// It has said something before.
    has_begun: bool,
}

impl Silence {
    fn of(pid: u32) -> Silence {
        Silence { pid, waits: 0, idle: 0, has_begun: false }
    }

    fn break_it(&mut self) {
        (self.waits, self.idle, self.has_begun) = (0, 0, true);
    }

    /// It has read something, which it does before it begins.
    fn is_heard(&mut self) {
        (self.waits, self.idle) = (0, 0);
    }

    /// One more wait was over. True: the service hangs.
    fn is_too_long(&mut self) -> bool {
        let state = Process::of(self.pid).map(|process| process.state);
        let is_too_long = self.goes_on_in(state);
        if is_too_long {
            let state = state.map_or_else(|| "unknown".into(), |state| state.to_string());
            let silent = BEAT * self.waits;
            log::error!("the service (pid {}, state {state}) has said nothing for {silent:?}; replacing it", self.pid);
        }
        is_too_long
    }

    /// The same of a wait at whose end the service was in this state (of proc(5); None: unknown).
    fn goes_on_in(&mut self, state: Option<char>) -> bool {
        match state {
            // Somebody looks at it with a debugger: as long as he likes, and then it has all its time.
            Some('t') => (self.waits, self.idle) = (0, 0),
            Some('R') | None => (self.waits, self.idle) = (self.waits + 1, 0),
            Some(_) => (self.waits, self.idle) = (self.waits + 1, self.idle + 1),
        }
        self.waits >= SILENT_BUSY_MAX || (self.has_begun && self.idle >= SILENT_MAX)
    }
}

/// Starts a process that finds the other end of a socket at its standard input.
pub(crate) fn start(mut command: Command) -> Result<(Child, OwnedFd), ServiceError> {
    let failed = |errno| ServiceError::system("cannot start the service's process", errno);
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
    let child =
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn().map_err(|error| failed(sys::errno(&error)))?;
    Ok((child, ours))
}

/// A service is waited for so long at a time, whether it is to say something or to read.
fn limit_waits(socket: &OwnedFd, wait: Duration) -> Result<(), String> {
    [Timeout::Recv, Timeout::Send]
        .into_iter()
        .try_for_each(|timeout| sockopt::set_socket_timeout(socket, timeout, Some(wait)))
        .map_err(|errno| format!("the service cannot be waited for: {errno}"))
}

/// Gives a service what was kept; one that does not read is watched as one that says nothing. None: it has it all, or has ended, which shows
/// when it is listened to. An error: there is no understanding with it.
fn give(socket: &OwnedFd, held: &Held, silence: &mut Silence) -> Result<Option<Ended>, String> {
    let all = held.iter().map(|(key, descriptor)| (Operation::Held, *key, Some(descriptor.as_fd())));
    for (operation, key, descriptor) in all.chain([(Operation::End, Key::Listener, None)]) {
        let mut in_flight = InFlight::default();
        loop {
            match store::send(socket, operation, key, descriptor) {
                Ok(()) => break,
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(None),
                Err(Errno::AGAIN) if silence.is_too_long() => return Ok(Some(Ended::Hung)),
                Err(Errno::AGAIN) => {}
                Err(Errno::TOOMANYREFS) if in_flight.pause() => {}
                Err(errno) => return Err(format!("cannot hand over to the service: {errno}")),
            }
        }
        silence.is_heard();
    }
    Ok(None)
}

/// Waiting until this user has fewer descriptors on their way: it is the fault of whoever sends some and does not read them, not of the
/// service, and a new one would be given no more.
#[derive(Default)]
struct InFlight {
    pauses: u32,
}

impl InFlight {
    const PAUSE: Duration = Duration::from_millis(50);
    const PAUSES_MAX: u32 = 1200;

    /// False: it was waited for long enough.
    fn pause(&mut self) -> bool {
        if self.pauses == 0 {
            log::error!("{}; waiting", sys::MANY_IN_FLIGHT);
        }
        self.pauses += 1;
        std::thread::sleep(InFlight::PAUSE);
        self.pauses <= InFlight::PAUSES_MAX
    }
}

/// Keeps what the service says until it is gone. An error: there is no understanding with it.
fn attend(socket: &OwnedFd, held: &mut Held, silence: &mut Silence) -> Result<Ended, String> {
    loop {
        let message = store::recv(socket);
        if message.is_ok() {
            silence.break_it();
        }
        let (answer, key) = match message {
            Ok(Message { operation: Operation::Alive, .. }) => continue,
            Err(Errno::AGAIN) if silence.is_too_long() => return Ok(Ended::Hung),
            Err(Errno::AGAIN) => continue,
            Ok(Message { operation: Operation::Put, key, descriptor: Some(descriptor) }) => {
                held.insert(key, descriptor).into_iter().for_each(close_aside);
                (Operation::Done, key)
            }
            Ok(Message { operation: Operation::Remove, key, .. }) => {
                let removed = held.remove(&key);
                let known = removed.is_some();
                removed.into_iter().for_each(|descriptor| close(key, descriptor));
                (if known { Operation::Done } else { Operation::Failed }, key)
            }
            Ok(Message { operation: Operation::Leave, key, .. }) => {
                let _told = store::send(socket, Operation::Done, key, None);
                return Ok(Ended::InOrder);
            }
            // Its descriptor did not arrive: this process has too many.
            Ok(Message { operation: Operation::Put, key, descriptor: None }) => (Operation::Failed, key),
            Ok(Message {
                operation: operation @ (Operation::Held | Operation::End | Operation::Done | Operation::Failed),
                ..
            }) => return Err(format!("the service says {operation:?}, which is for the keeper to say")),
            Err(Errno::CONNRESET) => return Ok(Ended::Crashed),
            Err(errno) => return Err(format!("the service cannot be understood: {errno}")),
        };
        match store::send(socket, answer, key, None) {
            Ok(()) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(Ended::Crashed),
            Err(errno) => return Err(format!("the service cannot be answered: {errno}")),
        }
    }
}

/// Closes what the service has no use for any more.
fn close(key: Key, descriptor: OwnedFd) {
    if let Key::Client(_) | Key::Relay(_) = key {
        // As the service itself does it: nothing is added to what is in it.
        let _not_connected = rustix::net::shutdown(&descriptor, Shutdown::Both);
        if sys::unread_descriptors(descriptor.as_fd()) != Some(0) {
            return close_aside(descriptor);
        }
    }
    // Closing this does not wait: nothing of others is in it, or the service has made it.
    drop(descriptor);
}

/// Closes what may have messages of others in it. The service has another copy, unless it has just died; then what is in the messages is
/// closed here, which can last as long as its sender likes.
fn close_aside(descriptor: OwnedFd) {
    // Where it cannot be closed it stays open. Its other end has been told.
    let descriptor = ManuallyDrop::new(descriptor);
    let Some(place) = Closing::place() else { return };
    let (closed, wait) = mpsc::channel();
    let close = move || {
        drop(ManuallyDrop::into_inner(descriptor));
        drop(place);
        let _nobody_waits = closed.send(());
    };
    match std::thread::Builder::new().name("ferroced-close".into()).spawn(close) {
        Ok(_) => drop(wait.recv_timeout(CLOSE_WITHIN)),
        Err(error) => log::warn!("no thread to close a connection: {error}"),
    }
}

/// One of [`CLOSING_MAX`].
struct Closing;

static CLOSING: AtomicUsize = AtomicUsize::new(0);

impl Closing {
    fn place() -> Option<Closing> {
        let place = Closing;
        if CLOSING.fetch_add(1, Ordering::Relaxed) < CLOSING_MAX { Some(place) } else { None }
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        CLOSING.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use rustix::net::SendFlags;

    use super::*;
    use crate::seqpacket;

    /// After how many waits, at whose ends a service was in these states (?: unknown), it is taken for one that hangs.
    fn hangs_after(has_begun: bool, states: &str) -> Option<usize> {
        let mut silence = Silence { has_begun, ..Silence::of(0) };
        let state = |state: char| Some(state).filter(|state| *state != '?');
        states.chars().position(|at_end| silence.goes_on_in(state(at_end))).map(|before| before + 1)
    }

    #[test]
    fn who_is_looked_at_by_a_debugger_may_be_silent() {
        assert_eq!(hangs_after(true, &"t".repeat(1000)), None);
        assert_eq!(hangs_after(true, "TTTTTtTTTTTTTT"), Some(12));
    }

    #[test]
    fn who_sleeps_or_is_stopped_hangs_sooner_than_who_wants_to_run() {
        assert!(BEAT * SILENT_MAX >= Duration::from_secs(10));
        for (state, most) in [("T", 6), ("S", 6), ("D", 6), ("R", 30), ("?", 30)] {
            assert_eq!(hangs_after(true, &state.repeat(100)), Some(most), "{state}");
            assert_eq!(hangs_after(false, &state.repeat(100)), Some(30), "{state}");
        }
    }

    /// One that was busy for long, and slept for a moment when it was looked at, was taken for one that hangs.
    #[test]
    fn who_sleeps_for_a_moment_does_not_hang() {
        assert_eq!(hangs_after(true, "RRRRRRRRRRRRSRRRRRSSSSSSSS"), Some(24));
    }

    /// A connection whose closing waits for the other end, which reads nothing.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other_end, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        while (&socket).write(&[0; 65_536]).is_ok() {}
        sockopt::set_socket_linger(&socket, Some(Duration::from_secs(120))).unwrap();
        (socket, other_end)
    }

    /// The keeper, which had the last copy, closed it itself.
    #[test]
    fn what_lingers_in_a_connection_does_not_hold_up_the_keeper() {
        let (kept, program) = seqpacket::pair().unwrap();
        let (socket, other_end) = lingering();
        seqpacket::send(&program, &[b"x"], &[socket.as_fd()], SendFlags::empty()).unwrap();
        drop(socket);
        let mut held = Held::from([(Key::Client(1), kept)]);
        let flags = SocketFlags::CLOEXEC;
        let (ours, service) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        std::thread::scope(|scope| {
            let keeper = scope.spawn(|| attend(&ours, &mut held, &mut Silence::of(std::process::id())));
            store::send(&service, Operation::Remove, Key::Client(1), None).unwrap();
            assert_eq!(store::recv(&service).unwrap().operation, Operation::Done);
            assert_eq!(CLOSING.load(Ordering::Relaxed), 1, "it was waited for");
            store::send(&service, Operation::Leave, Key::Listener, None).unwrap();
            assert_eq!(keeper.join().unwrap(), Ok(Ended::InOrder));
        });
        drop(other_end);
    }

    /// The keeper waited for ever until it had read what it was given.
    #[test]
    fn a_service_that_is_stopped_before_it_reads_hangs() {
        let (ours, _service) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let descriptor = || rustix::io::dup(&ours).unwrap();
        // More than a socket has room for.
        let held: Held = (0..400).map(|id| (Key::Relay(id), descriptor())).collect();
        limit_waits(&ours, Duration::from_millis(5)).unwrap();
        assert_eq!(give(&ours, &held, &mut Silence::of(0)), Ok(Some(Ended::Hung)));
    }

    /// Reading is a sign of life, too.
    #[test]
    fn a_service_that_reads_slowly_does_not_hang() {
        let mut silence = Silence::of(0);
        for _ in 0..10 {
            assert!((1..SILENT_BUSY_MAX).all(|_| !silence.goes_on_in(None)));
            silence.is_heard();
        }
        assert!(!silence.has_begun);
        assert!((0..SILENT_BUSY_MAX).any(|_| silence.goes_on_in(None)));
    }

    #[test]
    fn pauses_grow_until_it_is_given_up() {
        let pauses: Vec<u128> = (0..=CRASHES_MAX).map(|crashes| pause_after(crashes).unwrap().as_millis()).collect();
        assert_eq!(pauses, [0, 0, 10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(pause_after(CRASHES_MAX + 1), None);
        let told = given_up(CRASHES_MAX + 1).to_string();
        assert!(told.contains("11 times") && told.contains("FERROCE_LOG=debug"), "{told}");
    }
}
