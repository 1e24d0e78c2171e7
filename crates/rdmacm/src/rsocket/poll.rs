//! Waiting for several rsockets and other descriptors: `rpoll`, `rselect`.

use std::ffi::{c_int, c_short, c_ulong};
use std::time::{Duration, Instant};

use ferroce_rsocket::Phase;
use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT, POLLPRI, POLLRDHUP, POLLRDNORM, POLLWRNORM, pollfd, timeval};

use super::wait::{Patience, Seat, Waker, own_waker, sleep};
use super::{Entry, Inner, State, config, lookup};
use crate::entry::{Call, Refusal, rdma};

/// More descriptors than a process can have.
const FDS_MAX: usize = 1 << 20;

const READ: c_short = POLLIN | POLLRDNORM;
const WRITE: c_short = POLLOUT | POLLWRNORM;

/// What is to be told of a socket to who asks for `wanted`.
fn events(inner: &mut Inner, wanted: c_short) -> c_short {
    told(inner, wanted) & (wanted | POLLERR | POLLHUP)
}

fn told(inner: &mut Inner, wanted: c_short) -> c_short {
    match &mut inner.state {
        State::Idle => WRITE | POLLHUP,
        State::Listening { accepted, .. } => {
            if accepted.is_empty() {
                0
            } else {
                READ
            }
        }
        State::Connecting(_) | State::Accepting(_) => 0,
        State::Failed(_) | State::Closed => READ | WRITE | POLLERR | POLLHUP,
        State::Connected(endpoint) => {
            let has_room = endpoint.has_room();
            let Some(stream) = endpoint.stream() else { return 0 };
            let mut told = 0;
            if stream.unread() > 0 || !stream.is_readable() {
                told |= READ;
            }
            if !stream.is_readable() {
                told |= POLLRDHUP;
            }
            if has_room || !stream.is_writable() {
                told |= WRITE;
            }
            // Programs take POLLHUP for the end, so what came before is read first.
            let is_read = stream.unread() == 0 || wanted & READ == 0;
            told | match stream.phase() {
                Phase::Disconnected if is_read => POLLHUP,
                Phase::Broken if is_read => POLLHUP | POLLERR,
                _ => 0,
            }
        }
    }
}

/// What is to be told of an rsocket, after what has come was taken.
fn look(entry: &Entry, wanted: c_short, events_too: bool, arm: bool) -> c_short {
    match entry {
        Entry::Stream(socket) => {
            let mut inner = socket.inner();
            if arm {
                inner.arm();
            }
            inner.advance(socket, events_too);
            if arm {
                // What was just taken may have made the connection.
                inner.arm();
            }
            events(&mut inner, wanted)
        }
        Entry::Datagram(socket) => {
            if arm {
                socket.arm();
            }
            let (can_read, can_write) = socket.look();
            if arm {
                // Who was just heard may have made a queue pair necessary.
                socket.arm();
            }
            (if can_read { READ } else { 0 } | if can_write { WRITE } else { 0 }) & wanted
        }
    }
}

/// The descriptors that wake who sleeps on an rsocket; -1: none.
fn wake_fds(entry: &Entry) -> [c_int; 2] {
    match entry {
        Entry::Stream(socket) => [socket.channel.fd(), socket.inner().completion_fd().unwrap_or(-1)],
        Entry::Datagram(socket) => [socket.wake_fd(), -1],
    }
}

/// After a sleep: which of the two told.
fn woken(entry: &Entry, [first, second]: [bool; 2]) {
    match entry {
        Entry::Stream(socket) => {
            // The channel's descriptor stays readable until its events are taken.
            if first {
                socket.inner().advance(socket, true);
            }
            if second {
                socket.inner().disarm();
            }
        }
        Entry::Datagram(socket) if first => socket.disarm(),
        Entry::Datagram(_) => {}
    }
}

/// `poll` over a mixed list.
struct Round<'a> {
    fds: &'a mut [pollfd],
    /// The rsocket of each, if it is one.
    sockets: Vec<Option<Entry>>,
    /// Others, as the kernel is asked for them, and which they are.
    plain: Vec<pollfd>,
    plain_at: Vec<usize>,
}

impl<'a> Round<'a> {
    fn new(fds: &'a mut [pollfd]) -> Round<'a> {
        let pid = std::process::id();
        let sockets: Vec<_> = fds.iter().map(|polled| lookup(polled.fd).filter(|socket| socket.pid() == pid)).collect();
        let plain_at: Vec<usize> = (0..fds.len()).filter(|at| sockets[*at].is_none()).collect();
        let plain = plain_at.iter().map(|at| pollfd { revents: 0, ..fds[*at] }).collect();
        Round { fds, sockets, plain, plain_at }
    }

    /// Looks at everything, without waiting: how many have something to tell. `events_too` costs a system call for each connection.
    fn look(&mut self, events_too: bool, arm: bool) -> Call<usize> {
        let mut count = 0;
        for (polled, socket) in self.fds.iter_mut().zip(&self.sockets) {
            let Some(socket) = socket else { continue };
            polled.revents = look(socket, polled.events, events_too, arm);
            count += usize::from(polled.revents != 0);
        }
        if !self.plain.is_empty() {
            sleep(&mut self.plain, Some(Duration::ZERO))?;
            count += self.take_plain();
        }
        Ok(count)
    }

    /// What the kernel said of the others: how many have something to tell.
    fn take_plain(&mut self) -> usize {
        let said = self.plain.iter().zip(&self.plain_at);
        said.filter(|(said, at)| {
            self.fds[**at].revents = said.revents;
            said.revents != 0
        })
        .count()
    }

    /// Waits for the first that has something to tell.
    fn run(&mut self, patience: Patience) -> Call<usize> {
        let started = Instant::now();
        loop {
            let count = self.look(false, false)?;
            if count > 0 {
                return Ok(count);
            }
            if matches!(patience, Patience::None) {
                return self.look(true, false);
            }
            let has_rsockets = self.plain.len() < self.fds.len();
            if !has_rsockets || started.elapsed() >= config::get().polling {
                break;
            }
        }
        let waker = own_waker()?;
        let sockets = std::mem::take(&mut self.sockets);
        let seats: Vec<_> = sockets.iter().flatten().map(|socket| Seat::take(socket, &waker)).collect();
        self.sockets.clone_from(&sockets);
        let result = self.sleep_until(patience, &waker);
        drop(seats);
        result
    }

    fn sleep_until(&mut self, patience: Patience, waker: &Waker) -> Call<usize> {
        let watch = |fd| pollfd { fd, events: POLLIN, revents: 0 };
        loop {
            let count = self.look(false, true)?;
            if count > 0 {
                return Ok(count);
            }
            let mut list = vec![watch(waker.fd())];
            for socket in self.sockets.iter().flatten() {
                list.extend(wake_fds(socket).map(watch));
            }
            let own = list.len();
            list.extend(&self.plain);
            match sleep(&mut list, patience.left()) {
                Ok(0) => return self.look(true, false),
                Ok(_) => {}
                // poll(2) is never restarted.
                Err(refusal) => return Err(refusal),
            }
            if list[0].revents != 0 {
                waker.calm();
            }
            for (socket, polled) in self.sockets.iter().flatten().zip(list[1..own].chunks_exact(2)) {
                woken(socket, [polled[0].revents != 0, polled[1].revents != 0]);
            }
        }
    }
}

fn poll(fds: &mut [pollfd], timeout: Option<Duration>) -> Call<usize> {
    let patience = match timeout {
        None => Patience::Endless,
        Some(Duration::ZERO) => Patience::None,
        Some(timeout) => Instant::now().checked_add(timeout).map_or(Patience::Endless, Patience::Until),
    };
    Round::new(fds).run(patience)
}

/// A set of descriptors of a program (`fd_set`), of which the first `count` mean something.
struct Set {
    words: *mut c_ulong,
}

const WORD_BITS: usize = c_ulong::BITS as usize;

impl Set {
    /// # Safety
    ///
    /// `words` is NULL, or has a bit for `fd`.
    unsafe fn has(&self, fd: usize) -> bool {
        // SAFETY: by the contract.
        !self.words.is_null() && unsafe { *self.words.add(fd / WORD_BITS) } >> (fd % WORD_BITS) & 1 != 0
    }

    /// # Safety
    ///
    /// `words` is NULL, or has a bit for `fd`.
    unsafe fn add(&self, fd: usize) -> usize {
        if self.words.is_null() {
            return 0;
        }
        // SAFETY: by the contract.
        unsafe { *self.words.add(fd / WORD_BITS) |= 1 << (fd % WORD_BITS) };
        1
    }

    /// # Safety
    ///
    /// `words` is NULL, or has `count` bits.
    unsafe fn clear(&self, count: usize) {
        if !self.words.is_null() {
            // SAFETY: by the contract; sets have whole words.
            unsafe { std::ptr::write_bytes(self.words, 0, count.div_ceil(WORD_BITS)) };
        }
    }
}

/// The time of a `select`.
fn duration(timeout: *const timeval) -> Call<Option<Duration>> {
    // SAFETY: by the contract of the functions of C, NULL or a live object.
    let Some(timeout) = (unsafe { timeout.as_ref() }) else { return Ok(None) };
    let (Ok(seconds), Ok(micros)) = (u64::try_from(timeout.tv_sec), u64::try_from(timeout.tv_usec)) else {
        return Err(Refusal::invalid("the timeout is negative"));
    };
    Ok(Some(Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros))))
}

rdma! {
    /// `rpoll`, see rsocket(7).
    fn rpoll(fds: *mut pollfd, count: libc::nfds_t, timeout: c_int) -> c_int {
        let count = count as usize;
        if count > FDS_MAX {
            return Err(Refusal::invalid(format!("{count} descriptors")));
        }
        if fds.is_null() && count > 0 {
            return Err(Refusal::new(libc::EFAULT, "the descriptors are at NULL"));
        }
        // SAFETY: `count` elements by the contract of the function; none at NULL.
        let fds = if count == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(fds, count) } };
        let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
        Ok(poll(fds, timeout)? as c_int)
    }

    /// `rselect`, see rsocket(7).
    fn rselect(
        count: c_int,
        read: *mut c_ulong,
        write: *mut c_ulong,
        except: *mut c_ulong,
        timeout: *mut timeval,
    ) -> c_int {
        let count = usize::try_from(count).ok().filter(|count| *count <= FDS_MAX);
        let count = count.ok_or_else(|| Refusal::invalid("the number of descriptors"))?;
        let timeout = duration(timeout)?;
        let (read, write, except) = (Set { words: read }, Set { words: write }, Set { words: except });
        let mut fds = Vec::new();
        for fd in 0..count {
            // SAFETY: the sets of the program have `count` bits.
            let (r, w, e) = unsafe { (read.has(fd), write.has(fd), except.has(fd)) };
            if r || w || e {
                let events = if r { READ } else { 0 } | if w { WRITE } else { 0 } | if e { POLLPRI } else { 0 };
                fds.push(pollfd { fd: fd as c_int, events, revents: 0 });
            }
        }
        poll(&mut fds, timeout)?;
        if fds.iter().any(|polled| polled.revents & libc::POLLNVAL != 0) {
            return Err(Refusal::told(libc::EBADF));
        }
        let mut found = 0;
        // SAFETY: as above.
        unsafe {
            for set in [&read, &write, &except] {
                set.clear(count);
            }
            for polled in &fds {
                let fd = polled.fd as usize;
                // As select(2) has it: what has ended or broken does not block.
                if polled.events & READ != 0 && polled.revents & (READ | POLLHUP | POLLERR) != 0 {
                    found += read.add(fd);
                }
                if polled.events & WRITE != 0 && polled.revents & (WRITE | POLLERR) != 0 {
                    found += write.add(fd);
                }
                if polled.events & POLLPRI != 0 && polled.revents & POLLPRI != 0 {
                    found += except.add(fd);
                }
            }
        }
        Ok(found as c_int)
    }
}
