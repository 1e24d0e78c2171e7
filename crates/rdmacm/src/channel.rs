//! Event channels. `fd` is an epoll descriptor over two: the service's socket, and an eventfd for events that the library makes itself
//! (addresses and routes are resolved without the service). So it polls like any descriptor, and a program's O_NONBLOCK on it counts.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferroce_abi::cm::{DETAIL_REQUEST, ferroce_cm_event};

use crate::abi::rdma_event_channel;
use crate::entry::{Call, Refusal, check, given, rdma};
use crate::{fork, id, recover, verbs};

/// An event that no program has seen yet.
pub(crate) enum Queued {
    /// Made by the library.
    Local { id: u64, event: u32, status: c_int },
    /// A group was joined.
    Joined { id: u64, join: u64 },
    /// From the service.
    Service(Box<ferroce_cm_event>),
}

impl Queued {
    /// The id without which nobody can be told of it: of a request the listener.
    pub(crate) fn owner(&self) -> u64 {
        match self {
            Queued::Local { id, .. } | Queued::Joined { id, .. } => *id,
            Queued::Service(event) if event.detail == DETAIL_REQUEST => event.listener,
            Queued::Service(event) => event.id,
        }
    }

    /// Whether a peer asks for a connection.
    fn is_request(&self) -> bool {
        matches!(self, Queued::Service(event) if event.detail == DETAIL_REQUEST)
    }

    fn renumber(&mut self, old: u64, new: u64) {
        let event_id = match self {
            Queued::Local { id, .. } | Queued::Joined { id, .. } => id,
            Queued::Service(event) => &mut event.id,
        };
        if *event_id == old {
            *event_id = new;
        }
    }
}

/// `struct rdma_event_channel` and what is behind it.
#[repr(C)]
pub(crate) struct ChannelObject {
    c: UnsafeCell<rdma_event_channel>,
    /// The process that made it.
    pid: u32,
    epoll: OwnedFd,
    wake: OwnedFd,
    state: Mutex<State>,
    /// Held while ids are brought over to another service. Taken before all other locks.
    recovering: Mutex<()>,
    /// An id was destroyed, and events of it may wait. Held while they are looked for, so that nobody takes that look for his own; taken
    /// before `state` and the table of ids.
    stale: Mutex<bool>,
}

struct State {
    /// The channel of libibverbs.
    service: *mut c_void,
    /// Events that are ready before those in the service's socket. `wake` is readable while there are any.
    queue: VecDeque<Queued>,
}

// SAFETY: the service's channel may be used from any thread, one at a time: the mutex sees to that. `c` is written once.
unsafe impl Send for ChannelObject {}
// SAFETY: as above.
unsafe impl Sync for ChannelObject {}

impl Drop for State {
    fn drop(&mut self) {
        // SAFETY: opened by `open_service`, and nobody uses it any more.
        unsafe { verbs::ferroce_cm_channel_close(self.service) };
    }
}

fn owned(fd: c_int) -> Call<OwnedFd> {
    if fd < 0 {
        return Err(Refusal::last());
    }
    // SAFETY: a descriptor that was just made and is nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn open_service() -> Call<*mut c_void> {
    let mut service = ptr::null_mut();
    // SAFETY: the place is ours.
    check(unsafe { verbs::ferroce_cm_channel_open(&raw mut service) })?;
    Ok(service)
}

impl ChannelObject {
    pub(crate) fn open() -> Call<Arc<ChannelObject>> {
        let state = State { service: open_service()?, queue: VecDeque::new() };
        // SAFETY: make descriptors, nothing else.
        let (epoll, wake) = unsafe {
            (
                owned(libc::epoll_create1(libc::EPOLL_CLOEXEC))?,
                owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?,
            )
        };
        let c = UnsafeCell::new(rdma_event_channel { fd: epoll.as_raw_fd() });
        let channel = Arc::new(ChannelObject {
            c,
            pid: std::process::id(),
            epoll,
            wake,
            state: Mutex::new(state),
            recovering: Mutex::new(()),
            stale: Mutex::new(false),
        });
        channel.watch(channel.wake.as_raw_fd())?;
        let service = channel.state().service;
        channel.watch(service_fd(service)?)?;
        Ok(channel)
    }

    fn watch(&self, fd: c_int) -> Call<()> {
        let mut interest = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        // SAFETY: open descriptors; the structure is only read.
        let result = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut interest) };
        if result == 0 { Ok(()) } else { Err(Refusal::last()) }
    }

    fn unwatch(&self, fd: c_int) {
        // SAFETY: open descriptors; nothing is read or written. An error means that it is not in the set.
        unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, ptr::null_mut()) };
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pointer for C.
    pub(crate) fn as_ptr(&self) -> *mut rdma_event_channel {
        self.c.get()
    }

    /// The channel behind a C pointer, with a reference of its own; `EINVAL` for NULL, `EIO` in a forked child.
    ///
    /// # Safety
    ///
    /// NULL, or made by `rdma_create_event_channel` or an id's channel, and not destroyed.
    pub(crate) unsafe fn of(pointer: *const rdma_event_channel) -> Call<Arc<ChannelObject>> {
        // SAFETY: NULL or live, by the contract.
        let object: *const ChannelObject = ptr::from_ref(unsafe { given(pointer, "the event channel") }?).cast();
        // SAFETY: by the contract it lies at the start of the object, which lives.
        fork::check_process(unsafe { (*object).pid }, "event channel")?;
        // SAFETY: as above, and an `Arc` holds it.
        unsafe {
            Arc::increment_strong_count(object);
            Ok(Arc::from_raw(object))
        }
    }

    /// Did the program make the descriptor non-blocking?
    pub(crate) fn is_nonblocking(&self) -> bool {
        // SAFETY: asks for the flags of an open descriptor.
        unsafe { libc::fcntl(self.epoll.as_raw_fd(), libc::F_GETFL) & libc::O_NONBLOCK != 0 }
    }

    pub(crate) fn fd(&self) -> c_int {
        self.epoll.as_raw_fd()
    }

    /// Has the service do something with the channel. If the service has crashed, the next one gets the channel and its ids before.
    pub(crate) fn ask(self: &Arc<Self>, mut call: impl FnMut(*const c_void) -> c_int) -> Call<()> {
        recover::if_ended(self)?;
        match check(self.with_service(&mut call)) {
            Err(_) if self.has_ended() => {
                recover::channel(self)?;
                check(self.with_service(call))
            }
            outcome => outcome,
        }
    }

    /// Whether the service has closed its end for good.
    pub(crate) fn has_ended(&self) -> bool {
        let state = self.state();
        let Ok(fd) = service_fd(state.service) else { return false };
        let mut polled = libc::pollfd { fd, events: 0, revents: 0 };
        // SAFETY: one descriptor, in a place of ours.
        let looked = unsafe { libc::poll(&raw mut polled, 1, 0) };
        looked > 0 && polled.revents & (libc::POLLHUP | libc::POLLERR) != 0
    }

    /// One thread brings ids over, others wait until it has.
    pub(crate) fn recovering(&self) -> MutexGuard<'_, ()> {
        self.recovering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An id has another number: also in events that wait.
    pub(crate) fn renumber(&self, old: u64, new: u64) {
        self.state().queue.iter_mut().for_each(|event| event.renumber(old, new));
    }

    /// Calls something of the service with the channel. The channel is not taken from while it runs.
    pub(crate) fn with_service<T>(&self, call: impl FnOnce(*const c_void) -> T) -> T {
        call(self.state().service)
    }

    /// Adds an event.
    pub(crate) fn push(&self, event: Queued) {
        self.push_all([event]);
    }

    fn push_all(&self, events: impl IntoIterator<Item = Queued>) {
        let mut state = self.state();
        let was_empty = state.queue.is_empty();
        state.queue.extend(events);
        if was_empty && !state.queue.is_empty() {
            self.raise();
        }
    }

    fn raise(&self) {
        let one: u64 = 1;
        // SAFETY: writes eight bytes of ours to an eventfd.
        unsafe { libc::write(self.wake.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    fn lower(&self) {
        let mut count: u64 = 0;
        // SAFETY: reads eight bytes into a place of ours from an eventfd that does not block.
        unsafe { libc::read(self.wake.as_raw_fd(), (&raw mut count).cast(), 8) };
    }

    /// Takes the next event of those that are ready.
    fn pop(&self, state: &mut State) -> Option<Queued> {
        let event = state.queue.pop_front()?;
        if state.queue.is_empty() {
            self.lower();
        }
        Some(event)
    }

    /// Takes the next event, if there is one.
    pub(crate) fn pull(self: &Arc<Self>) -> Call<Option<Queued>> {
        let next = {
            let mut state = self.state();
            if let Some(event) = self.pop(&mut state) {
                return Ok(Some(event));
            }
            next_of_service(&state)
        };
        match next {
            Err(refusal) if refusal.errno() == libc::ECONNRESET => {
                recover::channel(self)?;
                Ok(self.pop(&mut self.state()))
            }
            // It asks for what nobody can answer any more; the look that it takes finds the end.
            Ok(Some(event)) if event.is_request() && self.has_ended() => {
                recover::channel(self)?;
                self.pull()
            }
            next => next,
        }
    }

    /// An id of the channel was destroyed: events of it are nobody's.
    pub(crate) fn forget_stale(&self) {
        *self.stale() = true;
        self.drop_stale();
    }

    fn stale(&self) -> MutexGuard<'_, bool> {
        self.stale.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops events of destroyed ids up to the first one of a live id: what is left makes the descriptor readable rightly.
    pub(crate) fn drop_stale(&self) {
        let mut stale = self.stale();
        if !*stale {
            return;
        }
        while let Some(owner) = self.owner_of_next() {
            if id::is_live(owner) {
                // More may lie behind: whoever takes this one looks again.
                return;
            }
            self.drop_next(owner);
        }
        *stale = false;
    }

    /// Whose the next event is, if there is one.
    fn owner_of_next(&self) -> Option<u64> {
        let mut state = self.state();
        if state.queue.is_empty()
            && let Ok(Some(event)) = next_of_service(&state)
        {
            state.queue.push_back(event);
            self.raise();
        }
        state.queue.front().map(Queued::owner)
    }

    /// Drops the next event, if it is still that of `owner`.
    fn drop_next(&self, owner: u64) {
        let mut state = self.state();
        if state.queue.front().is_some_and(|event| event.owner() == owner) {
            self.pop(&mut state);
        }
    }

    /// Events of an id that is leaving for another channel, all that have come so far.
    pub(crate) fn take_events_of(&self, id: u64) -> Vec<Queued> {
        let mut state = self.state();
        let had = !state.queue.is_empty();
        while let Ok(Some(event)) = next_of_service(&state) {
            state.queue.push_back(event);
        }
        let (theirs, rest): (Vec<_>, Vec<_>) = state.queue.drain(..).partition(|event| event.owner() == id);
        state.queue = rest.into();
        match (had, state.queue.is_empty()) {
            (false, false) => self.raise(),
            (true, true) => self.lower(),
            _ => {}
        }
        theirs
    }

    /// Adds events that came with an id.
    pub(crate) fn adopt_events(&self, events: Vec<Queued>) {
        self.push_all(events);
    }

    /// The service has ended: a channel of the next one takes the place of the old one, and what the old one has still to say is
    /// kept, but for requests, which nobody can answer any more: their peers ask the next one again. False: somebody was faster.
    pub(crate) fn reopen(&self) -> Call<bool> {
        let mut state = self.state();
        let had = !state.queue.is_empty();
        let said = loop {
            match next_of_service(&state) {
                Ok(Some(event)) => state.queue.push_back(event),
                outcome => break outcome,
            }
        };
        let has_ended = said.is_err_and(|refusal| refusal.errno() == libc::ECONNRESET);
        if has_ended {
            state.queue.retain(|event| !event.is_request());
        }
        match (had, state.queue.is_empty()) {
            (false, false) => self.raise(),
            (true, true) => self.lower(),
            _ => {}
        }
        if !has_ended {
            return Ok(false);
        }
        let fresh = open_service()?;
        let old = std::mem::replace(&mut state.service, fresh);
        // A forked child may have the socket, too: it would stay in the set, readable for ever.
        self.unwatch(service_fd(old)?);
        // SAFETY: opened by `open_service`; it is in no hand but this one.
        unsafe { verbs::ferroce_cm_channel_close(old) };
        self.watch(service_fd(fresh)?)?;
        Ok(true)
    }
}

fn service_fd(service: *const c_void) -> Call<c_int> {
    let mut fd = -1;
    // SAFETY: an open channel; the place is ours.
    check(unsafe { verbs::ferroce_cm_channel_fd(service, &raw mut fd) })?;
    Ok(fd)
}

fn next_of_service(state: &State) -> Call<Option<Queued>> {
    let mut event = MaybeUninit::<ferroce_cm_event>::uninit();
    // SAFETY: an open channel, which the lock of the state keeps to this thread; room for an event.
    match unsafe { verbs::ferroce_cm_channel_next(state.service, event.as_mut_ptr()) } {
        // SAFETY: it is written when the call succeeds.
        0 => Ok(Some(Queued::Service(Box::new(unsafe { event.assume_init() })))),
        libc::EAGAIN => Ok(None),
        errno => Err(Refusal::told(errno)),
    }
}

rdma! {
    /// `rdma_create_event_channel(3)`.
    fn rdma_create_event_channel() -> *mut rdma_event_channel {
        Ok(Arc::into_raw(ChannelObject::open()?).cast_mut().cast())
    }

    /// `rdma_destroy_event_channel(3)`. Its ids must be destroyed before.
    fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) -> () {
        if !channel.is_null() {
            // SAFETY: by the contract of the function.
            unsafe { ChannelObject::of(channel) }?;
            // SAFETY: the program's own reference, which it gives up. (The object starts with the C structure.)
            drop(unsafe { Arc::from_raw(channel.cast_const().cast::<ChannelObject>()) });
        }
        Ok(())
    }
}
