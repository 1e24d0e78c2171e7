//! The thread that keeps house for a process: it follows the interfaces and tells the contexts of their devices (port events),
//! answers questions about the process, and brings its lanes along to another service when the service has died.

use std::sync::{Arc, Weak};
use std::time::Duration;

use ferroce_core::sync::Mutex;
use ferroce_core::{AsyncEvent, PortEvent};
use ferroce_service::client::Client;
use ferroce_service::devices::{DeviceInfo, DeviceWatch};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::context::Context;
use crate::device::{self, GidEntry};
use crate::error::Result;
use crate::inspect::Inspection;

/// How long the thread rests when it cannot wait for news.
const UNABLE: Duration = Duration::from_millis(500);

/// Contexts of this process that want to know. A forked child starts with a list of its own.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    watched: Mutex<Vec<Watched>>,
}

#[derive(Debug)]
struct Watched {
    context: Weak<Context>,
    seen: Seen,
}

/// What was last told about a port.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    active: bool,
    gids: Vec<GidEntry>,
}

impl Watch {
    /// Starts the thread; it lives as long as the process.
    pub(crate) fn start(client: Client, inspection: Option<Inspection>) -> Result<Arc<Watch>> {
        let watch = Arc::new(Watch::default());
        let changes = DeviceWatch::new()?;
        let thread = Arc::clone(&watch);
        ferroce_engine::spawn_quiet("ferroce-watch", move || thread.run(&changes, &client, inspection.as_ref()))?;
        Ok(watch)
    }

    pub(crate) fn add(&self, context: &Arc<Context>) {
        let seen = Seen::of(&context.device().info(), context.device().port().active);
        self.watched.lock().push(Watched { context: Arc::downgrade(context), seen });
    }

    fn run(&self, changes: &DeviceWatch, client: &Client, inspection: Option<&Inspection>) {
        /// Between attempts to find another service.
        const PAUSE_MS: u16 = 200;
        let mut lost = false;
        loop {
            let mut fds = vec![PollFd::new(changes.fd(), PollFlags::POLLIN)];
            fds.extend(inspection.map(|inspection| PollFd::new(inspection.fd(), PollFlags::POLLIN)));
            let timeout = if lost {
                PollTimeout::from(PAUSE_MS)
            } else {
                fds.push(PollFd::new(client.ended_fd(), PollFlags::POLLIN));
                PollTimeout::NONE
            };
            match poll(&mut fds, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                // For instance when the program took away its right to open descriptors: looked at now and then all the same.
                Err(error) => {
                    log::debug!("cannot wait for changes of the interfaces: {error}");
                    std::thread::sleep(UNABLE);
                }
            }
            if let Some(inspection) = inspection.filter(|_| fds[1].any() == Some(true)) {
                inspection.answer();
            }
            if changes.drain() {
                self.tell();
            }
            let recovered = client.recover();
            if let Err(error) = &recovered
                && !lost
            {
                log::error!("no service in place of the one that died; trying on: {error}");
            }
            lost = recovered.is_err();
        }
    }

    fn tell(&self) {
        let listed = device::list_now();
        self.watched.lock().retain_mut(|watched| {
            let Some(context) = watched.context.upgrade() else { return false };
            let info = listed.iter().find(|info| info.ifindex == context.device().ifindex());
            let now = match info {
                Some(info) => Seen::of(info, info.up),
                // An interface that is down or gone keeps its GIDs in our memory.
                None => Seen { active: false, gids: watched.seen.gids.clone() },
            };
            for event in news(&watched.seen, &now) {
                context.events().push(AsyncEvent::Port { port: 1, event });
            }
            watched.seen = now;
            true
        });
    }
}

impl Seen {
    fn of(info: &DeviceInfo, active: bool) -> Seen {
        Seen { active, gids: info.gids.clone() }
    }
}

fn news(before: &Seen, now: &Seen) -> Vec<PortEvent> {
    let mut events = Vec::new();
    if before.gids != now.gids {
        events.push(PortEvent::GidChange);
    }
    match (before.active, now.active) {
        (true, false) => events.push(PortEvent::Error),
        (false, true) => events.push(PortEvent::Active),
        _ => {}
    }
    events
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn seen(active: bool, hosts: &[u8]) -> Seen {
        let entry = |host| GidEntry { gid: [host; 16], addr: IpAddr::V4(Ipv4Addr::new(10, 0, 0, host)) };
        Seen { active, gids: hosts.iter().map(|host| entry(*host)).collect() }
    }

    #[test]
    fn each_change_is_told_once() {
        assert_eq!(news(&seen(true, &[1]), &seen(true, &[1])), []);
        assert_eq!(news(&seen(true, &[1]), &seen(false, &[1])), [PortEvent::Error]);
        assert_eq!(news(&seen(false, &[1]), &seen(true, &[1, 2])), [PortEvent::GidChange, PortEvent::Active]);
    }
}
