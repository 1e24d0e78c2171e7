//! The service's side of its keeper: one that dies is replaced.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::process::{Signal, pidfd_send_signal};

use super::{Service, Source};
use crate::store::Key;
use crate::{ServiceError, keeper};

/// A keeper that lived shorter than this is not replaced at once, and failed attempts are not repeated sooner.
const PAUSE: Duration = Duration::from_secs(1);

/// Makes the command that runs [`keeper::take_over`] with its standard input.
pub type NextKeeper = Box<dyn Fn() -> Command + Send>;

/// A service's keeper.
pub(super) struct Kept {
    /// 0: there is none at present.
    pub(super) pid: u32,
    /// The keeper, where this service started it.
    child: Option<Child>,
    /// Earlier ones that this service started, and which have not ended yet.
    replaced: Vec<Child>,
    /// The keeper, where it started this service.
    parent: Option<OwnedFd>,
    since: Instant,
    /// When the next one is started.
    pub(super) again: Option<Instant>,
    /// When it is told next that the service lives.
    pub(super) beat: Instant,
    next: NextKeeper,
}

impl Kept {
    /// By the process that started this one, which made the two ends of `socket`.
    pub(super) fn by_parent(socket: BorrowedFd<'_>, next: NextKeeper) -> Kept {
        let (pid, parent) = keeper::parent_at(socket);
        let now = Instant::now();
        Kept { pid, child: None, replaced: Vec::new(), parent, since: now, again: None, beat: now, next }
    }
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("pid", &self.pid).field("again", &self.again).finish_non_exhaustive()
    }
}

impl Service {
    /// Wants to know of the keeper's end.
    pub(super) fn watch_keeper(&self) -> Result<(), ServiceError> {
        let watch = |keeper: BorrowedFd<'_>| {
            // Its answers are waited for where they are asked for.
            epoll::add(&self.epoll, keeper, Source::Keeper.token(), epoll::EventFlags::empty())
        };
        let watched = self.store.with_keeper(watch).unwrap_or(Ok(()));
        watched.map_err(|errno| ServiceError::system("cannot watch the keeper", errno))
    }

    /// The keeper is gone: what it kept would end with this service.
    pub(super) fn lose_keeper(&mut self) {
        self.store.forget_keeper();
        let Some(kept) = self.kept.as_mut() else { return };
        log::error!("the keeper (pid {}) is gone; starting another one", kept.pid);
        kept.pid = 0;
        // It has ended, or is of no use any more. One that is only stopped would start a service of its own when it goes on.
        if let Some(parent) = kept.parent.take() {
            let _ = pidfd_send_signal(parent, Signal::KILL);
        }
        if let Some(mut child) = kept.child.take() {
            let _ = child.kill();
            // Its end may wait for a file system.
            kept.replaced.push(child);
        }
        if kept.since.elapsed() < PAUSE {
            kept.again = Some(Instant::now() + PAUSE);
        } else {
            self.replace_keeper();
        }
    }

    /// The keeper takes a service that says nothing for long for one that hangs.
    pub(super) fn beat(&mut self, now: Instant) {
        if let Some(kept) = self.kept.as_mut().filter(|kept| kept.beat <= now) {
            kept.beat = now + keeper::BEAT;
            kept.replaced.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
            self.store.beat();
        }
    }

    pub(super) fn replace_keeper(&mut self) {
        let Some(kept) = self.kept.as_mut() else { return };
        let started = keeper::start((kept.next)());
        kept.since = Instant::now();
        kept.again = Some(kept.since + PAUSE);
        match started {
            Ok((child, socket)) => {
                (kept.pid, kept.child) = (child.id(), Some(child));
                if let Err(errno) = self.store.change_keeper(socket, self.everything()) {
                    log::error!("the new keeper does not keep: {errno}");
                    return self.lose_keeper();
                }
                match self.watch_keeper() {
                    Ok(()) => self.kept.as_mut().expect("it was just there").again = None,
                    Err(error) => log::error!("{error}"),
                }
            }
            Err(error) => log::error!("no keeper: {error}"),
        }
    }

    /// Every descriptor that must outlive this service.
    fn everything(&self) -> impl Iterator<Item = (Key, BorrowedFd<'_>)> {
        let connections = self.clients.iter().map(|(id, client)| (Key::Client(*id), client.connection.as_fd()));
        let pidfds =
            self.clients.iter().filter_map(|(id, client)| Some((Key::Pidfd(*id), client.pidfd.as_ref()?.as_fd())));
        let relays = self.lends.iter().map(|(socket, lend)| (Key::Relay(*socket), lend.relay.as_fd()));
        let sockets = self.group.iter().flat_map(|group| group.sockets());
        std::iter::once((Key::Listener, self.listener.as_fd()))
            .chain(connections)
            .chain(pidfds)
            .chain(relays)
            .chain(sockets)
    }
}
