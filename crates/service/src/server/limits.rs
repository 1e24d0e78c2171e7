//! How much programs and users may have ([`Limits`](crate::config::Limits)), and what they have.

use std::collections::BTreeMap;

use ferroce_cm::{Owner, State};

use super::{CLIENTS_MAX, Service};
use crate::ServiceError;
use crate::cm::protocol::CmRequest;

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
        if self.clients.len() >= CLIENTS_MAX {
            let what = format!("the service has {CLIENTS_MAX} clients already; end some of them");
            return Err(ServiceError::new(libc::EUSERS, what));
        }
        let used = self.clients.values().filter(|client| client.peer.uid == uid).count() as u32;
        let (key, what, most) = ("user.programs", "programs", self.options.limits.user.programs);
        within(&format!("uid {uid}"), &Limit { key, what, used, most, errno: libc::EUSERS })
    }

    /// Whether a client may have one more lane.
    pub(super) fn may_have_lane(&self, id: u64) -> Result<(), ServiceError> {
        let client = &self.clients[&id];
        self.may_be_served(client.peer)?;
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
