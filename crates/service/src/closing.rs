//! What others send is closed where it may take its time.
//!
//! Whoever has a Unix socket to the service can send any descriptor, and closing it can last as long as its sender likes: a TCP socket
//! that lingers, a file of the sender's own file system. A socket is closed by whoever has the last copy, also by the kernel: those that do
//! not fit a buffer in the call that receives the message, those of unread messages in the call that closes the socket. Of a file each copy
//! that is closed asks its file system (flush), and waits for the answer whatever is signalled meanwhile. So
//!
//! - messages are received with room for all descriptors that one can have ([`Closer::recv`]);
//! - what was received is asked what it is, by calls that no file system answers ([`Foreign`]); what it is not meant to be goes to a
//!   thread of the sender's user, whose queue is bounded;
//! - a socket with unread descriptors goes there too ([`Closer::retire`]);
//! - where more sockets of one user wait than its queue holds, a process of its own takes them and ends ([`sys::Heir`]): no socket lingers for
//!   a process that ends, and its copies make those here none that anybody waits for;
//! - whatever else waits stays with the thread, and no more descriptors of that user are received: handing it over would be closing a copy here.
//!
//! Since Linux 6.16 a socket can refuse descriptors altogether ([`refuse`]); the service's do, except where they are expected.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, Shutdown, SocketType, sockopt};
use rustix::process::Pid;

use crate::protocol::RING_BYTES_MAX;
use crate::seqpacket::DESCRIPTORS_OF_ANY_MAX;
use crate::{seqpacket, sys};

/// So many descriptors of one user wait for its thread. If there are more, and so many are sockets, these are handed to a process that ends;
/// where none can be had, and of what is not a socket, no more of that user's are received.
const PENDING_MAX: usize = 64;

/// Where so many wait, because no process could be had to hand them to, connections are accepted slowly.
const PENDING_OF_ALL_MAX: usize = 1024;

/// Processes that have been handed what one user has sent, and have not ended yet. (Nothing that is known to us holds one up: they have sockets
/// only.)
const HEIRS_MAX: usize = 4;

/// Threads that close, not counting those of the service's own user and root.
const THREADS_MAX: usize = 64;

/// So many numbers for descriptors are free after the service's own user's, or root's, were received: closing can need one to see
/// what is there.
const NUMBERS_LEFT: usize = 2;

/// After anybody else's.
const NUMBERS_LEFT_BY_OTHERS: usize = 64;

/// So long none is asked for after one could not be had, for which it may have been waited.
const HEIR_PAUSE: Duration = Duration::from_secs(1);

/// Users that are remembered although nothing of theirs waits.
const USERS_KEPT: usize = 64;

/// Whose descriptors are, where that is not known any more.
pub(crate) const NOBODY_KNOWN: u32 = u32::MAX;

/// All users' closers.
#[derive(Debug)]
pub(crate) struct Closers {
    own_uid: u32,
    of_users: BTreeMap<u32, Closer>,
    shared: Arc<Shared>,
}

/// What closers have together.
#[derive(Debug, Default)]
struct Shared {
    pending: AtomicUsize,
    threads: AtomicUsize,
}

/// Closes what one user has sent.
#[derive(Clone, Debug)]
pub(crate) struct Closer {
    queue: Arc<Queue>,
}

#[derive(Debug)]
struct Queue {
    /// The service's own user's, or root's.
    is_own: bool,
    state: Mutex<State>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct State {
    sockets: VecDeque<OwnedFd>,
    /// What is no socket: no copy of it may be closed but by the thread.
    files: VecDeque<OwnedFd>,
    /// One is being closed.
    closing: bool,
    /// There is a thread.
    running: bool,
    /// They were handed sockets that waited, or were to be.
    heirs: Vec<Pid>,
    /// Set: no process could be had, and none is asked for until then.
    heir_again: Option<Instant>,
}

impl Closers {
    pub(crate) fn new(own_uid: u32) -> Closers {
        sys::keep_low_numbers();
        Closers { own_uid, of_users: BTreeMap::new(), shared: Arc::default() }
    }

    /// The closer of a user.
    pub(crate) fn of(&mut self, uid: u32) -> Closer {
        if self.of_users.len() > USERS_KEPT {
            self.of_users.retain(|_, closer| Arc::strong_count(&closer.queue) > 1 || closer.is_busy());
        }
        let (own_uid, shared) = (self.own_uid, &self.shared);
        let made = || {
            let is_own = uid == own_uid || uid == 0;
            Closer { queue: Arc::new(Queue { is_own, state: Mutex::default(), shared: Arc::clone(shared) }) }
        };
        self.of_users.entry(uid).or_insert_with(made).clone()
    }

    /// What of a user waits to be closed.
    pub(crate) fn pending(&self, uid: u32) -> usize {
        self.of_users.get(&uid).map_or(0, Closer::pending)
    }

    /// What waits to be closed, by user.
    pub(crate) fn all_pending(&self) -> impl Iterator<Item = (u32, usize)> {
        self.of_users.iter().map(|(uid, closer)| (*uid, closer.pending()))
    }

    /// So much waits to be closed that connections are to be accepted slowly.
    pub(crate) fn are_many_pending(&self) -> bool {
        self.shared.pending.load(Ordering::Relaxed) > PENDING_OF_ALL_MAX
    }

    /// Starts threads where none could be started before, and takes note of processes that have ended. False: there is still something
    /// to do.
    pub(crate) fn attend(&self) -> bool {
        self.of_users.values().map(Closer::attend).fold(true, |all, one| all & one)
    }
}

impl Closer {
    /// Receives one message without waiting, with all its descriptors.
    pub(crate) fn recv(&self, socket: impl AsFd, buffer: &mut [u8]) -> Result<Message, Errno> {
        let received = seqpacket::recv_all(socket, buffer, RecvFlags::DONTWAIT)?;
        let descriptors = Foreign { descriptors: received.descriptors, closer: self.clone() };
        Ok(Message { len: received.len, truncated: received.truncated, descriptors })
    }

    /// Whether the next message of a socket is not to be received: it has descriptors, and too many of this user's wait to be closed
    /// (others' do not count), or there may be no numbers for them. (What gets no number is closed by the call that receives it, which
    /// waits.)
    pub(crate) fn must_not_receive(&self, socket: impl AsFd) -> bool {
        seqpacket::carries_descriptors(&socket)
            && (self.pending() > PENDING_MAX || !self.has_numbers_for(socket.as_fd()))
    }

    /// Whether there are numbers for the descriptors of the next message. Others leave some to the service's own user, and to `accept`.
    fn has_numbers_for(&self, socket: BorrowedFd<'_>) -> bool {
        let unread = sys::unread_descriptors(socket).and_then(|unread| usize::try_from(unread).ok());
        let wanted = unread.unwrap_or(DESCRIPTORS_OF_ANY_MAX).min(DESCRIPTORS_OF_ANY_MAX);
        let left = if self.queue.is_own { NUMBERS_LEFT } else { NUMBERS_LEFT_BY_OTHERS };
        sys::free_numbers() >= wanted + left
    }

    /// Closes a socket that this user could send to. Its other end learns so at once.
    pub(crate) fn retire(&self, socket: OwnedFd) {
        // Nothing is added to it from now on.
        let _not_connected = rustix::net::shutdown(&socket, Shutdown::Both);
        if sys::unread_descriptors(socket.as_fd()) != Some(0) {
            self.close([socket]);
        }
    }

    fn close(&self, descriptors: impl IntoIterator<Item = OwnedFd>) {
        let mut state = self.queue.state.lock();
        self.queue.add(&mut state, descriptors);
        self.queue.hand_over(&mut state);
        self.queue.attend(&mut state);
    }

    /// These wait for ever.
    #[cfg(test)]
    pub(crate) fn hold(&self, descriptors: impl IntoIterator<Item = OwnedFd>) {
        let mut state = self.queue.state.lock();
        state.running = true;
        self.queue.add(&mut state, descriptors);
    }

    fn pending(&self) -> usize {
        let state = self.queue.state.lock();
        state.waiting() + usize::from(state.closing)
    }

    fn is_busy(&self) -> bool {
        self.pending() > 0 || !self.queue.state.lock().heirs.is_empty()
    }

    /// False: there is still something to do.
    fn attend(&self) -> bool {
        let mut state = self.queue.state.lock();
        self.queue.hand_over(&mut state);
        self.queue.attend(&mut state) & state.heirs.is_empty()
    }
}

impl State {
    fn waiting(&self) -> usize {
        self.sockets.len() + self.files.len()
    }
}

impl Queue {
    fn add(&self, state: &mut State, descriptors: impl IntoIterator<Item = OwnedFd>) {
        let before = state.waiting();
        for descriptor in descriptors {
            let queue = if is_socket(descriptor.as_fd()) { &mut state.sockets } else { &mut state.files };
            queue.push_back(descriptor);
        }
        self.shared.pending.fetch_add(state.waiting() - before, Ordering::Relaxed);
    }

    /// Leaves the sockets that wait to processes that end, if they are too many: what was sent to lie there for long does not lie with the
    /// service. Where no process can be had they go on waiting.
    fn hand_over(&self, state: &mut State) {
        state.heirs.retain(|heir| !sys::has_ended(*heir));
        if state.heir_again.is_some_and(|again| Instant::now() < again) {
            return;
        }
        while state.sockets.len() > PENDING_MAX && state.heirs.len() < HEIRS_MAX {
            match sys::Heir::of(state.sockets.make_contiguous(), &mut state.heirs) {
                Ok(heir) => {
                    let count = state.sockets.drain(..heir.heirlooms()).count();
                    self.shared.pending.fetch_sub(count, Ordering::Relaxed);
                    // It ends now, and closes the last copies.
                    drop(heir);
                }
                Err(error) => {
                    log::debug!("no process to close what others have sent: {error}");
                    state.heir_again = Some(Instant::now() + HEIR_PAUSE);
                    return;
                }
            }
        }
    }

    /// Sees to it that somebody closes what waits. False: there can be no thread at present.
    fn attend(self: &Arc<Queue>, state: &mut State) -> bool {
        if state.running || state.waiting() == 0 {
            return true;
        }
        let threads = &self.shared.threads;
        if !self.is_own && threads.fetch_add(1, Ordering::Relaxed) >= THREADS_MAX {
            threads.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        let queue = Arc::clone(self);
        let started =
            std::thread::Builder::new().name("ferroced-close".into()).stack_size(STACK_BYTES).spawn(move || {
                sys::mask_signals();
                queue.close_all();
            });
        match started {
            Ok(_) => state.running = true,
            Err(error) => {
                log::warn!("no thread to close what others have sent: {error}");
                self.leave();
            }
        }
        state.running
    }

    fn close_all(&self) {
        while let Some(descriptor) = self.next() {
            drop(descriptor);
            self.shared.pending.fetch_sub(1, Ordering::Relaxed);
        }
        self.leave();
    }

    /// None: the thread ends.
    fn next(&self) -> Option<OwnedFd> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let next = state.sockets.pop_front().or_else(|| state.files.pop_front());
        state.closing = next.is_some();
        state.running = next.is_some();
        next
    }

    fn leave(&self) {
        if !self.is_own {
            self.shared.threads.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Enough for closing.
const STACK_BYTES: usize = 64 << 10;

impl Drop for Queue {
    fn drop(&mut self) {
        // No thread could be had for these. The process ends, and the system then closes them without waiting.
        let State { sockets, files, .. } = self.state.get_mut();
        sockets.drain(..).chain(files.drain(..)).for_each(mem::forget);
    }
}

/// A received message.
#[derive(Debug)]
pub(crate) struct Message {
    /// Bytes in the buffer; 0: the other end has closed, or it has sent an empty one.
    pub(crate) len: usize,
    /// It did not fit the buffer.
    pub(crate) truncated: bool,
    pub(crate) descriptors: Foreign,
}

/// Descriptors that somebody has sent. What is not taken as something that it is goes to its sender's closer.
#[derive(Debug)]
pub(crate) struct Foreign {
    descriptors: Vec<OwnedFd>,
    closer: Closer,
}

/// What a descriptor that was sent is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unexpected(&'static str);

impl std::fmt::Display for Unexpected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl Foreign {
    pub(crate) fn len(&self) -> usize {
        self.descriptors.len()
    }

    pub(crate) fn none(self) -> Result<(), Unexpected> {
        if self.descriptors.is_empty() { Ok(()) } else { Err(Unexpected("a descriptor came with what has none")) }
    }

    /// A pidfd, or nothing.
    pub(crate) fn pidfd(self) -> Result<Option<OwnedFd>, Unexpected> {
        self.only(sys::is_pidfd, "what came with it is not one pidfd")
    }

    /// A UDP socket, or nothing.
    pub(crate) fn udp_socket(self) -> Result<Option<OwnedFd>, Unexpected> {
        self.only(is_udp_socket, "what came with it is not one UDP socket")
    }

    /// A ring's memory, or nothing.
    pub(crate) fn ring_memory(self) -> Result<Option<OwnedFd>, Unexpected> {
        self.only(is_ring_memory, "what came with it is not the memory of one ring")
    }

    fn only(mut self, is: fn(BorrowedFd<'_>) -> bool, what: &'static str) -> Result<Option<OwnedFd>, Unexpected> {
        match self.descriptors.as_slice() {
            [] => Ok(None),
            [one] if is(one.as_fd()) => Ok(self.descriptors.pop()),
            _ => Err(Unexpected(what)),
        }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if !self.descriptors.is_empty() {
            self.closer.close(mem::take(&mut self.descriptors));
        }
    }
}

/// Asking what is no socket answers ENOTSOCK, without a question to a file system.
fn is_socket(descriptor: BorrowedFd<'_>) -> bool {
    sockopt::socket_type(descriptor).is_ok()
}

/// Closing one does not wait, whatever its options are.
fn is_udp_socket(descriptor: BorrowedFd<'_>) -> bool {
    sockopt::socket_type(descriptor) == Ok(SocketType::DGRAM)
        && matches!(sockopt::socket_domain(descriptor), Ok(AddressFamily::INET | AddressFamily::INET6))
        && sockopt::socket_protocol(descriptor) == Ok(Some(rustix::net::ipproto::UDP))
}

/// Whether it is sealed memory of no more than a ring has, which is soon given back. (Only memory has seals: nothing else is asked for its
/// size, which a file system may not tell. It can have more than its size: `fallocate` with `FALLOC_FL_KEEP_SIZE`.)
fn is_ring_memory(descriptor: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(descriptor).is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::GROW))
        && rustix::fs::fstat(descriptor).is_ok_and(|stat| {
            let allocated = stat.st_blocks.saturating_mul(STAT_BLOCK_BYTES);
            [stat.st_size, allocated].into_iter().all(|bytes| (0..=RING_BYTES_MAX).contains(&bytes))
        })
}

/// What `st_blocks` counts, whatever the file system's blocks are (stat(3type)).
const STAT_BLOCK_BYTES: i64 = 512;

/// Has a socket, or those that a listener accepts, refuse descriptors (EPERM), or take them again. Linux before 6.16 cannot.
pub(crate) fn refuse(socket: impl AsFd, refused: bool) {
    if let Err(error) = sys::pass_rights(socket.as_fd(), !refused) {
        log::debug!("descriptor {} takes descriptors: {error}", socket.as_fd().as_raw_fd());
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    /// Memory of that size, with so much behind its end.
    fn memory(bytes: u64, behind: u64) -> OwnedFd {
        let memory = memfd_create("ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&memory, bytes).unwrap();
        if behind > 0 {
            fallocate(&memory, FallocateFlags::KEEP_SIZE, bytes, behind).unwrap();
        }
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        memory
    }

    /// Whoever had filled all places for what waits had other users' programs disconnected.
    #[test]
    fn what_one_user_has_sent_is_in_no_others_way() {
        let mut closers = Closers::new(7);
        let (greedy, other) = (closers.of(8), closers.of(9));
        let (ours, theirs) = seqpacket::pair().unwrap();
        seqpacket::send(&theirs, &[b"x"], &[theirs.as_fd()], rustix::net::SendFlags::empty()).unwrap();
        greedy.hold((0..PENDING_MAX).map(|_| rustix::io::dup(&ours).unwrap()));
        assert!(!greedy.must_not_receive(&ours));
        greedy.hold([rustix::io::dup(&ours).unwrap()]);
        // As if there were so many.
        closers.shared.pending.fetch_add(PENDING_OF_ALL_MAX, Ordering::Relaxed);
        assert!(closers.are_many_pending());
        assert!(greedy.must_not_receive(&ours));
        assert!(!other.must_not_receive(&ours));
    }

    /// Handing them over was closing copies of them here: each close of a file asks its file system, which may not answer.
    #[test]
    fn sockets_only_are_handed_to_a_process_that_ends() {
        let mut closers = Closers::new(7);
        let closer = closers.of(8);
        let (socket, _other) = seqpacket::pair().unwrap();
        let file = memfd_create("file", MemfdFlags::CLOEXEC).unwrap();
        let (read, written) = rustix::pipe::pipe().unwrap();
        let mixed = (0..=PENDING_MAX).flat_map(|_| [&socket, &file, &read].map(|one| rustix::io::dup(one).unwrap()));
        closer.hold(mixed);
        assert_eq!(closer.pending(), 3 * (PENDING_MAX + 1));
        let give_up = Instant::now() + Duration::from_secs(60);
        loop {
            closer.attend();
            let left = closer.queue.state.lock().sockets.len();
            if left == 0 {
                break;
            }
            assert!(Instant::now() < give_up, "no process takes the sockets: {left} are left");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(closer.pending(), 2 * (PENDING_MAX + 1), "the sockets are gone, and nothing else");
        assert!(closer.queue.state.lock().files.iter().all(|file| !is_socket(file.as_fd())));
        let (ours, theirs) = seqpacket::pair().unwrap();
        seqpacket::send(&theirs, &[b"x"], &[written.as_fd()], rustix::net::SendFlags::empty()).unwrap();
        assert!(closer.must_not_receive(&ours), "no more is received");
    }

    /// It had a small size, and as much memory as its sender liked.
    #[test]
    fn memory_behind_the_end_of_a_ring_counts() {
        const RING: u64 = RING_BYTES_MAX as u64;
        assert!(is_ring_memory(memory(RING, 0).as_fd()));
        assert!(is_ring_memory(memory(4096, 4096).as_fd()));
        assert!(!is_ring_memory(memory(RING + 1, 0).as_fd()));
        assert!(!is_ring_memory(memory(4096, RING + 4096).as_fd()));
    }
}
