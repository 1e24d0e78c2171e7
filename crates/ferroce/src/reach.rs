//! Waiting until the kernel knows whether anybody is at an address: a thread that lives as long as something is waited for.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferroce_core::sync::{Mutex, MutexGuard};
use ferroce_service::cm::neighbour::{self, Inquiries, NewsSocket, Unknown};
use ferroce_service::cm::protocol::Path;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::fork::Generation;

/// What is waited for in this process. The lock is held across a fork; what is in there is then the parent's.
static WAITING: Mutex<State> = Mutex::new(State { generation: None, inquiries: Inquiries::new(), desk: None });

/// How long the thread rests when it cannot wait for news.
const UNABLE: Duration = Duration::from_millis(100);

/// See [`hold`].
pub(crate) struct State {
    generation: Option<Generation>,
    inquiries: Inquiries<Caller>,
    /// Of the thread, while there is one.
    desk: Option<Arc<Desk>>,
}

/// Who is told of the end.
struct Caller {
    cookie: u64,
    whom: IpAddr,
    tell: Box<dyn FnOnce(Verdict) + Send>,
}

/// Where the thread waits.
struct Desk {
    news: NewsSocket,
    wake: EventFd,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Somebody is there.
    Known,
    /// Nobody answered: the peer, or the gateway on the way to it.
    Silent(IpAddr),
}

/// Keeps the state consistent across a fork.
pub(crate) fn hold() -> MutexGuard<'static, State> {
    WAITING.lock()
}

/// The state of this process.
fn waiting() -> MutexGuard<'static, State> {
    let mut state = WAITING.lock();
    let now = Generation::current();
    if state.generation != Some(now) {
        // A forked child neither drops nor tells what it inherited.
        let fresh = State { generation: Some(now), inquiries: Inquiries::new(), desk: None };
        std::mem::forget(std::mem::replace(&mut *state, fresh));
    }
    state
}

/// Waits, in another thread, until the kernel knows who takes the packets of a path, for `timeout` at most. False: there is nothing to
/// wait for, and `tell` is not called. Else it is called once, perhaps before this returns, unless [`cancel`] comes before.
pub fn wait_for_neighbour(
    path: &Path,
    timeout: Duration,
    cookie: u64,
    tell: impl FnOnce(Verdict) + Send + 'static,
) -> bool {
    let Some(whom) = neighbour::unknown(path) else { return false };
    let caller = Caller { cookie, whom: whom.addr(), tell: Box::new(tell) };
    if let Err(error) = enlist(whom, timeout, caller) {
        log::warn!("cannot wait for an answer of {}: {error}", whom.addr());
        return false;
    }
    // What was told before the question was open was told to nobody.
    !(whom.is_known() && cancel(cookie))
}

/// Ends a wait. False: there is none, or `tell` is being called.
pub fn cancel(cookie: u64) -> bool {
    // The thread finds out at its next turn.
    waiting().inquiries.cancel(|caller| caller.cookie == cookie)
}

fn enlist(whom: Unknown, timeout: Duration, caller: Caller) -> std::io::Result<()> {
    let mut state = waiting();
    let desk = match &state.desk {
        Some(desk) => Arc::clone(desk),
        None => {
            let desk = Arc::new(Desk::new()?);
            let thread = Arc::clone(&desk);
            ferroce_engine::spawn_quiet("ferroce-reach", move || thread.run())?;
            state.desk = Some(Arc::clone(&desk));
            desk
        }
    };
    state.inquiries.open(Instant::now(), whom, timeout, caller);
    drop(state);
    // A full counter wakes it as well.
    let _ = desk.wake.write(1);
    Ok(())
}

impl Desk {
    fn new() -> std::io::Result<Desk> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Desk { news: NewsSocket::open()?, wake })
    }

    fn run(&self) {
        while let Some(next) = self.turn() {
            self.sleep_until(next);
        }
    }

    /// Looks after all questions; gives the time of the next look. None: there are no more.
    fn turn(&self) -> Option<Instant> {
        let news = self.news.read();
        let (mut known, silent, due) = {
            let (mut state, now) = (waiting(), Instant::now());
            let known = state.inquiries.hear(now, &news);
            (known, state.inquiries.expired(now), state.inquiries.due(now))
        };
        let found: Vec<Unknown> = due.into_iter().filter(Unknown::ask_again).collect();
        let next = {
            let mut state = waiting();
            known.extend(state.inquiries.answered(&found));
            if state.inquiries.is_empty() {
                state.desk = None;
            }
            state.inquiries.next_timeout()
        };
        for caller in known {
            (caller.tell)(Verdict::Known);
        }
        for caller in silent {
            let whom = caller.whom;
            (caller.tell)(Verdict::Silent(whom));
        }
        next
    }

    fn sleep_until(&self, next: Instant) {
        let mut fds =
            [PollFd::new(self.news.fd(), PollFlags::POLLIN), PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
        let rest = next.saturating_duration_since(Instant::now());
        // Rounded up: who wakes too early finds nothing to do.
        let timeout = PollTimeout::try_from(rest + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            // For instance when the program took away its right to open descriptors.
            Err(error) => {
                log::debug!("cannot wait for news of neighbours: {error}");
                std::thread::sleep(UNABLE);
            }
        }
        // The count itself says nothing.
        let _ = self.wake.read();
    }
}
