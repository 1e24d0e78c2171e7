//! How much programs and users may have ([`Limits`](crate::config::Limits)), and what they have.

use std::collections::BTreeMap;

use ferroce_cm::{Owner, State};

use super::{CLIENTS_MAX, Service};
use crate::cm::protocol::CmRequest;
use crate::{LANE_MAX, ServiceError};

/// Ids of one client that the limits are about.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IdUse {
    pub(super) listeners: u32,
    /// Connections that are being made.
    pub(super) pending: u32,
}

/// A limit that a request would go beyond.
struct Limit<'a> {
    /// Its place in the configuration.
    key: &'a str,
    what: &'a str,
    used: u32,
    most: u32,
    errno: i32,
}

/// Of all programs together, and of those of users other than the service's own and root: what these cannot take is there for the
/// service's own user, whatever the limits of one user are.
const CLIENTS: Share = Share { what: "programs", most: CLIENTS_MAX, others: CLIENTS_MAX / 4 * 3, errno: libc::EUSERS };
const LANES: Share =
    Share { what: "lanes", most: LANE_MAX as usize, others: LANE_MAX as usize / 4 * 3, errno: libc::ENOSPC };

/// How much of something there is for all, and for other users than the service's own.
struct Share {
    what: &'static str,
    most: usize,
    others: usize,
    errno: i32,
}

impl Share {
    /// Whether there is one more, also for another user, where so many are taken and so many of them by other users.
    fn check(&self, is_other: bool, taken: usize, by_others: usize) -> Result<(), ServiceError> {
        let Share { what, most, others, errno } = self;
        if taken >= *most {
            let what = format!("the service has {most} {what} already; end some programs");
            return Err(ServiceError::new(*errno, what));
        }
        if is_other && by_others >= *others {
            let what = format!(
                "users other than the service's own have {others} {what} already, and the rest is for that user; end some programs"
            );
            return Err(ServiceError::new(*errno, what));
        }
        Ok(())
    }
}

impl Service {
    /// What clients have of the connection manager; who has nothing is left out.
    pub(super) fn id_use(&self) -> BTreeMap<u64, IdUse> {
        let mut by_client: BTreeMap<u64, IdUse> = BTreeMap::new();
        for info in self.cm.ids() {
            let Some(Owner(client)) = info.owner else { continue };
            let used = by_client.entry(client).or_default();
            match info.state {
                State::Listen => used.listeners += 1,
                _ if is_pending(info.state) => used.pending += 1,
                _ => {}
            }
        }
        by_client
    }

    /// Whether one more program of this user may connect.
    pub(super) fn may_connect(&self, uid: u32) -> Result<(), ServiceError> {
        let of_others = self.clients.values().filter(|client| self.is_other(client.peer.uid)).count();
        CLIENTS.check(self.is_other(uid), self.clients.len(), of_others)?;
        let used = self.clients.values().filter(|client| client.peer.uid == uid).count();
        // Connections that cannot be closed count.
        let used = (used + self.closers.pending(uid)) as u32;
        let (key, what, most) = ("user.programs", "programs", self.options.limits.user.programs);
        within(&format!("uid {uid}"), &Limit { key, what, used, most, errno: libc::EUSERS })
    }

    /// Whether a client may have one more lane.
    pub(super) fn may_have_lane(&self, id: u64) -> Result<(), ServiceError> {
        let client = &self.clients[&id];
        self.may_be_served(client.peer)?;
        let of_others = self.clients.values().filter(|other| self.is_other(other.peer.uid));
        let of_others = of_others.map(|client| client.lanes.len()).sum();
        LANES.check(self.is_other(client.peer.uid), self.lanes.len(), of_others)?;
        let limits = &self.options.limits;
        let of_user = self.clients.values().filter(|other| other.peer.uid == client.peer.uid);
        let of_user = of_user.map(|client| client.lanes.len()).sum::<usize>() as u32;
        let limit = |key, used, most| Limit { key, what: "lanes", used, most, errno: libc::ENOSPC };
        self.check(
            id,
            &[
                limit("process.lanes", client.lanes.len() as u32, limits.process.lanes),
                limit("user.lanes", of_user, limits.user.lanes),
            ],
        )
    }

    /// Whether a client may ask this of the connection manager.
    pub(super) fn may_ask(&self, id: u64, asked: &CmRequest) -> Result<(), ServiceError> {
        let (what, of): (_, fn(&IdUse) -> u32) = match asked {
            CmRequest::Listen { .. } => ("listeners", |used| used.listeners),
            CmRequest::Connect { .. } | CmRequest::Resolve { .. } => ("pending connections", |used| used.pending),
            _ => return Ok(()),
        };
        let used = self.id_use();
        let uid = self.clients[&id].peer.uid;
        let of_client = used.get(&id).map_or(0, of);
        let of_user =
            used.iter().filter(|(client, _)| self.clients.get(client).is_some_and(|client| client.peer.uid == uid));
        let of_user = of_user.map(|(_, used)| of(used)).sum();
        let (process, user) = (&self.options.limits.process, &self.options.limits.user);
        let (keys, process, user) = match asked {
            CmRequest::Listen { .. } => (["process.listeners", "user.listeners"], process.listeners, user.listeners),
            _ => (
                ["process.pending_connections", "user.pending_connections"],
                process.pending_connections,
                user.pending_connections,
            ),
        };
        let limit = |key, used, most| Limit { key, what, used, most, errno: libc::ENOMEM };
        self.check(id, &[limit(keys[0], of_client, process), limit(keys[1], of_user, user)])
    }

    /// Whether a user is neither the service's own nor root.
    fn is_other(&self, uid: u32) -> bool {
        uid != self.uid && uid != 0
    }

    fn check(&self, id: u64, limits: &[Limit<'_>]) -> Result<(), ServiceError> {
        let client = &self.clients[&id];
        let who = || format!("{} (pid {}, uid {})", client.name(), client.peer.pid, client.peer.uid);
        limits.iter().try_for_each(|limit| within(&who(), limit))
    }
}

fn is_pending(state: State) -> bool {
    matches!(
        state,
        State::ReqSent | State::MraReqRcvd | State::ReqRcvd | State::RepSent | State::MraRepRcvd | State::RepRcvd
    )
}

/// Refuses what would go beyond a limit, and says so in the log.
fn within(who: &str, limit: &Limit<'_>) -> Result<(), ServiceError> {
    let Limit { key, what, used, most, errno } = limit;
    if used < most {
        return Ok(());
    }
    log::warn!("limit limits.{key} = {most}: {who} gets no more {what}");
    let of = if key.starts_with("user.") { "the user" } else { "the program" };
    Err(ServiceError::new(
        *errno,
        format!(
            "{of} has {used} {what} already, and limits.{key} is {most}; give some back, or raise it in ferroce.toml"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use ferroce_testkit::{free_name, free_port};

    use super::*;
    use crate::protocol::{self, REQUEST_BYTES_MAX, Request, VERSION};
    use crate::seqpacket;
    use crate::server::ServerOptions;

    /// Any user can connect, as often as it likes.
    #[test]
    fn other_users_leave_something_for_the_services_own() {
        for share in [CLIENTS, LANES] {
            let (used, by_others) = (share.others, share.others);
            assert!(used < share.most, "{}", share.what);
            share.check(true, used - 1, by_others - 1).unwrap();
            let refused = share.check(true, used, by_others).unwrap_err();
            assert_eq!(refused.errno(), share.errno);
            assert!(refused.to_string().contains("users other than the service's own have"), "{refused}");
            share.check(false, used, by_others).unwrap();
            share.check(false, share.most - 1, by_others).unwrap();
            assert_eq!(share.check(false, share.most, by_others).unwrap_err().errno(), share.errno);
            assert_eq!(share.check(true, share.most, 0).unwrap_err().errno(), share.errno);
        }
    }

    fn service() -> Service {
        let options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
        Service::bind(options).unwrap()
    }

    #[test]
    fn users_other_than_the_services_own_and_root_are_others() {
        let mut service = service();
        service.uid = 7;
        assert_eq!([0, 7, 8].map(|uid| service.is_other(uid)), [false, false, true]);
    }

    /// It took the place of a program for ever.
    #[test]
    fn a_connection_on_which_nobody_says_hello_is_closed() {
        let mut service = service();
        let connect = |service: &mut Service| {
            let (ours, theirs) = seqpacket::pair().unwrap();
            service.add_client(theirs);
            ours
        };
        let hello = Request::Hello { version: VERSION, pid: 1, program: "x".into(), again: false };
        let say_hello = |connection: &std::os::fd::OwnedFd| {
            let hello = protocol::encode(1, &hello);
            seqpacket::send(connection, &[&hello], &[], rustix::net::SendFlags::empty()).unwrap();
        };
        let greeted = connect(&mut service);
        say_hello(&greeted);
        service.serve_client(1);
        let silent = connect(&mut service);
        let late = connect(&mut service);
        let _last = connect(&mut service);
        service.keep_house();
        assert_eq!((service.clients.len(), service.silent.len()), (4, 3), "the greeted one is not waited for");
        assert!(service.timeout().is_some());

        let now = Instant::now();
        service.silent.iter_mut().take(2).for_each(|(until, _)| *until = now);
        // It was said, but not heard yet.
        say_hello(&late);
        service.keep_house();
        assert_eq!(service.clients.keys().copied().collect::<Vec<_>>(), [1, 3, 4]);
        assert_eq!(service.silent.len(), 1);
        let closed = seqpacket::recv(&silent, &mut [0; REQUEST_BYTES_MAX], rustix::net::RecvFlags::empty());
        assert_eq!(closed.unwrap().len, 0);
    }
}
