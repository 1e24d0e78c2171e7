//! Sleeping until something happens on a socket.
//!
//! Several threads may sleep on one socket, each on the descriptors of its channels and on an eventfd of its own. Whichever takes a
//! completion or an event wakes the others, so that none sleeps through what another one has taken.

use std::cell::RefCell;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lock::this_thread;
use super::{Entry, Inner, Socket, State, config, connect};
use crate::entry::{Call, Refusal};
use crate::event::handlers_restart;

/// How long events of the connection manager may stay unread while a socket is looked at.
const EVENTS_UNREAD: Duration = Duration::from_millis(10);

/// A sleeping thread's eventfd.
pub(super) struct Waker {
    fd: OwnedFd,
    thread: usize,
}

impl Waker {
    fn new() -> Call<Waker> {
        // SAFETY: makes a descriptor, nothing else.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(Refusal::last());
        }
        // SAFETY: just made, and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Waker { fd, thread: this_thread() })
    }

    pub(super) fn fd(&self) -> c_int {
        self.fd.as_raw_fd()
    }

    /// Something happened: all but the calling thread, which is awake, look again.
    pub(super) fn wake_others(waiters: &[Arc<Waker>]) {
        let own = this_thread();
        for waker in waiters.iter().filter(|waker| waker.thread != own) {
            waker.wake();
        }
    }

    /// Its thread looks again.
    fn wake(&self) {
        let one: u64 = 1;
        // SAFETY: writes eight bytes of ours to an eventfd.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }

    /// Its thread is awake.
    pub(super) fn calm(&self) {
        let mut count: u64 = 0;
        // SAFETY: reads eight bytes into a place of ours from an eventfd that does not block.
        unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
    }
}

/// The calling thread's, made at its first sleep; a forked child makes its own.
pub(super) fn own_waker() -> Call<Arc<Waker>> {
    thread_local! {
        static OWN: RefCell<Option<(u32, Arc<Waker>)>> = const { RefCell::new(None) };
    }
    let pid = std::process::id();
    let fresh = || Ok(Arc::new(Waker::new()?));
    OWN.try_with(|own| {
        let mut own = own.borrow_mut();
        match &*own {
            Some((of, waker)) if *of == pid => Ok(Arc::clone(waker)),
            _ => {
                let waker = fresh()?;
                *own = Some((pid, Arc::clone(&waker)));
                Ok(waker)
            }
        }
    })
    // The thread is ending.
    .unwrap_or_else(|_| fresh())
}

impl Inner {
    /// Something happened: everybody else who sleeps here looks again. (This thread is awake.)
    pub(super) fn wake_others(&self) {
        Waker::wake_others(&self.waiters);
    }

    /// Takes what has come for a connection. What has come from the connection manager is taken too if `events`; that costs a system
    /// call. It is taken now and then in any case: a program whose other sockets always have something to tell never waits here.
    pub(super) fn advance(&mut self, socket: &Socket, events: bool) {
        let mut moved = self.connection().is_some_and(|endpoint| endpoint.progress());
        let is_making = !matches!(self.state, State::Connected(_) | State::Idle);
        if events || is_making || self.events_at.elapsed() >= EVENTS_UNREAD {
            self.events_at = Instant::now();
            moved |= connect::take_events(self, socket);
        }
        if moved {
            self.wake_others();
        }
    }

    /// Before a sleep: from now on the descriptors tell.
    pub(super) fn arm(&mut self) {
        if let Some(endpoint) = self.connection() {
            endpoint.arm();
        }
    }

    /// Descriptor of the completions of a connection.
    pub(super) fn completion_fd(&mut self) -> Option<c_int> {
        self.connection().map(|endpoint| endpoint.fd())
    }

    /// The descriptor was readable. Others who rely on it arm it anew.
    pub(super) fn disarm(&mut self) {
        if let Some(endpoint) = self.connection() {
            endpoint.disarm();
        }
        self.wake_others();
    }
}

/// What threads sleep on.
pub(super) trait Sleepers {
    /// Changes the list of those that do.
    fn with(&self, change: &mut dyn FnMut(&mut Vec<Arc<Waker>>));
}

impl Sleepers for Socket {
    fn with(&self, change: &mut dyn FnMut(&mut Vec<Arc<Waker>>)) {
        change(&mut self.inner().waiters);
    }
}

impl Sleepers for Entry {
    fn with(&self, change: &mut dyn FnMut(&mut Vec<Arc<Waker>>)) {
        match self {
            Entry::Stream(socket) => socket.with(change),
            Entry::Datagram(socket) => socket.with(change),
        }
    }
}

/// A thread's place among those that sleep on a socket.
pub(super) struct Seat<'a> {
    socket: &'a dyn Sleepers,
    waker: &'a Arc<Waker>,
}

impl<'a> Seat<'a> {
    pub(super) fn take(socket: &'a dyn Sleepers, waker: &'a Arc<Waker>) -> Seat<'a> {
        socket.with(&mut |waiters| waiters.push(Arc::clone(waker)));
        Seat { socket, waker }
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.socket.with(&mut |waiters| {
            if let Some(at) = waiters.iter().position(|waiter| Arc::ptr_eq(waiter, self.waker)) {
                waiters.swap_remove(at);
            }
        });
    }
}

/// How long a call waits.
#[derive(Clone, Copy)]
pub(super) enum Patience {
    /// Not at all: EAGAIN.
    None,
    /// Until then: EAGAIN.
    Until(Instant),
    /// For ever.
    Endless,
}

impl Patience {
    pub(super) fn left(self) -> Option<Duration> {
        match self {
            Patience::None => Some(Duration::ZERO),
            Patience::Until(end) => Some(end.saturating_duration_since(Instant::now())),
            Patience::Endless => None,
        }
    }
}

impl Socket {
    /// As [`Socket::until`], but `test` is asked first as things are: mostly that is enough, and only else what has come is looked at.
    ///
    /// # Errors
    /// As there.
    pub(super) fn at_once_or_until<T>(
        &self,
        patience: Patience,
        mut test: impl FnMut(&mut Inner) -> Call<Option<T>>,
    ) -> Call<T> {
        let at_once = test(&mut self.inner())?;
        at_once.map_or_else(|| self.until(patience, test), Ok)
    }

    /// Waits until `test` gives something. It is asked under the lock, after what has come was taken.
    ///
    /// # Errors
    /// EAGAIN when there is no patience left, EINTR for a signal, EBADF if the socket is closed meanwhile; and what `test` says.
    pub(super) fn until<T>(&self, patience: Patience, mut test: impl FnMut(&mut Inner) -> Call<Option<T>>) -> Call<T> {
        let mut ask = |inner: &mut Inner, events| {
            inner.advance(self, events);
            if matches!(inner.state, State::Closed) {
                return Err(Refusal::new(libc::EBADF, "the rsocket was closed by another thread"));
            }
            test(inner)
        };
        let is_patient = !matches!(patience, Patience::None);
        let started = Instant::now();
        loop {
            if let Some(found) = ask(&mut self.inner(), false)? {
                return Ok(found);
            }
            if !is_patient {
                return ask(&mut self.inner(), true)?.ok_or_else(|| Refusal::told(libc::EAGAIN));
            }
            if started.elapsed() >= config::get().polling {
                break;
            }
            std::hint::spin_loop();
        }
        let waker = own_waker()?;
        let _seat = Seat::take(self, &waker);
        // The channel's descriptor stays readable until its events are taken, so a sleep tells of those that are there before it.
        let mut has_events = false;
        loop {
            let completion_fd = {
                let mut inner = self.inner();
                inner.arm();
                if let Some(found) = ask(&mut inner, has_events)? {
                    return Ok(found);
                }
                // What was just taken may have made the connection.
                inner.arm();
                inner.completion_fd()
            };
            let watch = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut polled = [watch(waker.fd()), watch(self.channel.fd()), watch(completion_fd.unwrap_or(-1))];
            match sleep(&mut polled, patience.left()) {
                Ok(0) => return Err(Refusal::told(libc::EAGAIN)),
                Ok(_) => {}
                Err(refusal) if refusal.errno() == libc::EINTR && handlers_restart() => {}
                Err(refusal) => return Err(refusal),
            }
            if polled[0].revents != 0 {
                waker.calm();
            }
            has_events = polled[1].revents != 0;
            if polled[2].revents != 0 {
                self.inner().disarm();
            }
        }
    }
}

/// `ppoll`: how many descriptors are ready.
pub(super) fn sleep(polled: &mut [libc::pollfd], longest: Option<Duration>) -> Call<usize> {
    let longest = longest.map(|longest| libc::timespec {
        tv_sec: libc::time_t::try_from(longest.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: longest.subsec_nanos().into(),
    });
    let longest = longest.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: descriptors in a place of ours; a time of ours, or none.
    let ready = unsafe { libc::ppoll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, longest, ptr::null()) };
    usize::try_from(ready).map_err(|_| Refusal::last())
}
