//! Taking over from a service that crashed.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::event::epoll;
use rustix::net::SendFlags;
use serde::{Deserialize, Serialize};

use super::groups::{GROUPS_PER_LANE_MAX, Memberships};
use super::kept::{Kept, NextKeeper};
use super::limits::LENDS_MAX;
use super::{CLIENTS_MAX, Client, Holder, Lend, ServerOptions, Service, SocketId, Source, has_socket};
use crate::group::Group;
use crate::protocol::{self, Counters, Reply};
use crate::store::{Held, Key, StateFile, Store};
use crate::sys::{self, Peer};
use crate::{LANE_MAX, ServiceError, closing, seqpacket};

/// What of a service is not a descriptor and not in the group's state.
#[derive(Serialize, Deserialize)]
struct Saved {
    started_s: u64,
    restarts: u32,
    next_client: u64,
    next_lane: u16,
    counters: Counters,
    clients: Vec<SavedClient>,
    /// Lent sockets.
    lends: Vec<SavedLend>,
}

#[derive(Clone, Serialize, Deserialize)]
struct SavedLend {
    socket: SocketId,
    /// None: given back.
    lane: Option<u16>,
    lease: u64,
    #[serde(default)]
    groups: Memberships,
    holder: Holder,
}

#[derive(Serialize, Deserialize)]
struct SavedClient {
    id: u64,
    pid: u32,
    uid: u32,
    since_s: u64,
    program: Option<String>,
    lanes: BTreeMap<u16, SocketId>,
}

/// Names of at most 64 characters in JSON, and numbers; without lanes.
const CLIENT_BYTES_MAX: usize = 512;
/// A lane's entry at its client.
const LANE_BYTES_MAX: usize = 32;
/// A lend without its groups.
const LEND_BYTES_MAX: usize = 256;
/// A group's address, and its interface.
const GROUP_BYTES_MAX: usize = 64;

// What there can be fits its place.
const _: () = {
    let lanes = LANE_MAX as usize * (LANE_BYTES_MAX + GROUPS_PER_LANE_MAX * GROUP_BYTES_MAX);
    let longest = CLIENTS_MAX * CLIENT_BYTES_MAX + LENDS_MAX * LEND_BYTES_MAX + lanes;
    assert!(longest + 4096 <= StateFile::STATE_BYTES_MAX);
};

impl Service {
    /// Makes a service of what the keeper at the other end of `keeper` has: the first one, or one that takes over.
    /// `next_keeper` starts another keeper when this one is gone.
    pub fn resume(options: ServerOptions, keeper: OwnedFd, next_keeper: NextKeeper) -> Result<Service, ServiceError> {
        let failed = |errno| ServiceError::system("cannot take over from the keeper", errno);
        let keeper = sys::with_higher_number(keeper);
        sys::keep_low_numbers();
        let kept = Kept::by_parent(keeper.as_fd(), next_keeper);
        let (store, mut held) = Store::open(keeper).map_err(failed)?;
        let listener = held.remove(&Key::Listener).ok_or_else(|| failed(rustix::io::Errno::PROTO))?;
        // As in [`Service::run`].
        let mut service = ManuallyDrop::new(Service::new(options, listener, store)?);
        service.kept = Some(kept);
        service.watch_keeper()?;
        let saved: Option<Saved> = service.store.load_service();
        let Some(saved) = saved else {
            service.dirty = true;
            service.save();
            return Ok(ManuallyDrop::into_inner(service));
        };
        service.take_over(saved, held)?;
        Ok(ManuallyDrop::into_inner(service))
    }

    /// Saves what has changed.
    pub(super) fn save(&mut self) {
        if !std::mem::take(&mut self.dirty) {
            return;
        }
        let client = |(id, client): (&u64, &Client)| SavedClient {
            id: *id,
            pid: client.peer.pid,
            uid: client.peer.uid,
            since_s: client.since_s,
            program: client.program.clone(),
            lanes: client.lanes.clone(),
        };
        let saved_lend = |(socket, lend): (&SocketId, &Lend)| SavedLend {
            socket: *socket,
            lane: lend.lane,
            lease: lend.lease,
            groups: lend.groups.clone(),
            holder: lend.holder,
        };
        self.store.save_service(&Saved {
            started_s: self.started_s,
            restarts: self.restarts,
            next_client: self.next_client,
            next_lane: self.next_lane,
            counters: self.counters,
            clients: self.clients.iter().map(client).collect(),
            lends: self.lends.iter().map(saved_lend).collect(),
        });
    }

    fn take_over(&mut self, saved: Saved, mut held: Held) -> Result<(), ServiceError> {
        self.started_s = saved.started_s;
        self.restarts = saved.restarts + 1;
        self.next_client = saved.next_client;
        self.next_lane = saved.next_lane;
        self.counters = saved.counters;
        self.cm.gather(super::GATHERING);
        self.group = Group::resume(self.options.port, std::sync::Arc::clone(&self.store), &mut held)?;
        if let Some(group) = &self.group {
            self.watch_strays(group)?;
            self.opened = Some(Instant::now());
        }
        let mut clients = BTreeMap::new();
        for client in saved.clients {
            if let Some(connection) = held.remove(&Key::Client(client.id)) {
                clients.insert(client.id, (connection, held.remove(&Key::Pidfd(client.id)), client));
            }
        }
        let relays: BTreeMap<SocketId, OwnedFd> =
            saved.lends.iter().filter_map(|lend| Some((lend.socket, held.remove(&Key::Relay(lend.socket))?))).collect();
        // What it was about to keep or to close: nobody was told of it, or somebody was told that it is gone.
        for (key, descriptor) in held {
            self.store.remove(key);
            self.forget(key, descriptor);
        }

        self.agree_on_lanes(&saved.lends, &clients, relays)?;
        for (id, (connection, pidfd, saved)) in clients {
            self.take_client(id, connection, pidfd, saved);
        }
        self.dirty = true;
        self.save();
        log::warn!("took over {} clients with {} lanes", self.clients.len(), self.lanes.len());
        Ok(())
    }

    /// Closes what is not to be kept, and the keeper has closed.
    fn forget(&mut self, key: Key, descriptor: OwnedFd) {
        let uid = match key {
            Key::Client(_) => sys::peer(descriptor.as_fd()).map_or(closing::NOBODY_KNOWN, |peer| peer.uid),
            Key::Relay(_) => closing::NOBODY_KNOWN,
            // Closing these does not wait: the service made them, or knows what they are.
            _ => return,
        };
        self.closers.of(uid).retire(descriptor);
    }

    /// A lane is leased if the group steers to it, its client is there, and its relay is. Whatever is less was just being
    /// made or given back, and is given back.
    fn agree_on_lanes(
        &mut self,
        lends: &[SavedLend],
        clients: &BTreeMap<u64, (OwnedFd, Option<OwnedFd>, SavedClient)>,
        relays: BTreeMap<SocketId, OwnedFd>,
    ) -> Result<(), ServiceError> {
        let Some(group) = self.group.as_mut() else {
            return Ok(());
        };
        let owned: BTreeSet<(u16, SocketId)> = clients
            .values()
            .flat_map(|(_, _, client)| client.lanes.iter().map(|(lane, socket)| (*lane, *socket)))
            .collect();
        let steered: Vec<(SocketId, u16)> = group.leased().collect();
        for (socket, lane) in steered {
            let whole = owned.contains(&(lane, socket))
                && lends.iter().any(|lend| (lend.socket, lend.lane) == (socket, Some(lane)))
                && relays.contains_key(&socket);
            if whole {
                self.lanes.insert(lane, socket);
            } else {
                group.unmap(socket);
            }
        }
        let socketless = lends.iter().filter_map(|lend| Some((lend.socket, lend.lane?)));
        for (socket, lane) in socketless.filter(|(socket, _)| !has_socket(*socket)) {
            if owned.contains(&(lane, socket)) && relays.contains_key(&socket) {
                self.lanes.insert(lane, socket);
            }
        }
        let leased: BTreeMap<SocketId, u16> = self.lanes.iter().map(|(lane, socket)| (*socket, *lane)).collect();
        let unmapped: Vec<SocketId> = group.unmapped().collect();
        for socket in &unmapped {
            // Without a relay nobody can have it.
            if !relays.contains_key(socket) {
                group.let_go(*socket);
            }
        }
        let is_unknown = |socket: &SocketId| !leased.contains_key(socket) && !unmapped.contains(socket);
        let (unknown, relays): (BTreeMap<_, _>, BTreeMap<_, _>) =
            relays.into_iter().partition(|(socket, _)| is_unknown(socket));
        for (socket, relay) in unknown {
            self.store.remove(Key::Relay(socket));
            self.forget(Key::Relay(socket), relay);
        }
        for (socket, relay) in relays {
            let lane = leased.get(&socket).copied();
            let wanted = if lane.is_some() { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
            epoll::add(&self.epoll, &relay, Source::Relay(socket).token(), wanted)
                .map_err(|errno| ServiceError::system("cannot watch a relay", errno))?;
            let saved = lends.iter().find(|lend| lend.socket == socket);
            let lease = saved.map_or(0, |lend| lend.lease);
            // What no state tells of was just being made.
            let holder = saved.map_or(Holder { client: 0, uid: self.uid }, |lend| lend.holder);
            let mut groups = saved.map(|lend| lend.groups.clone()).unwrap_or_default();
            if lane.is_none() {
                self.leave_all(socket, std::mem::take(&mut groups));
            }
            let closer = self.closers.of(saved.map_or(closing::NOBODY_KNOWN, |lend| lend.holder.uid));
            self.lends.insert(socket, Lend { relay, closer, lane, lease, groups, offers: Vec::new(), holder });
        }
        Ok(())
    }

    fn take_client(&mut self, id: u64, connection: OwnedFd, pidfd: Option<OwnedFd>, saved: SavedClient) {
        let lanes: BTreeMap<u16, SocketId> =
            saved.lanes.into_iter().filter(|(lane, socket)| self.lanes.get(lane) == Some(socket)).collect();
        let client = Client {
            connection,
            peer: Peer { pid: saved.pid, uid: saved.uid },
            closer: self.closers.of(saved.uid),
            since_s: saved.since_s,
            program: saved.program,
            taken_over: true,
            pidfd,
            lanes,
        };
        let watch = epoll::add(&self.epoll, &client.connection, Source::Client(id).token(), epoll::EventFlags::IN)
            .and_then(|()| match &client.pidfd {
                Some(pidfd) => epoll::add(&self.epoll, pidfd, Source::Death(id).token(), epoll::EventFlags::IN),
                None => Ok(()),
            });
        let restarted = protocol::encode(0, Reply::Restarted);
        let told = seqpacket::send(&client.connection, &[&restarted], &[], SendFlags::DONTWAIT);
        self.cm.enroll(id, self.user(client.peer.uid));
        self.clients.insert(id, client);
        self.silent.push_back((Instant::now() + super::HELLO_WITHIN, id));
        if let Err(errno) = watch.and(told) {
            log::debug!("client {id} is not taken over: {errno}");
            self.remove_client(id, "it went while the service restarted");
        }
    }
}
