//! Who has which lane.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::groups::Memberships;
use super::{Holder, Lend, Service, SocketId, Source, has_socket, socketless};
use crate::config::Serve;
use crate::protocol::Reply;
use crate::store::Key;
use crate::sys::Peer;
use crate::{LANE_MAX, ServiceError, seqpacket};

/// After the death of an earlier service, programs that it had leased lanes to get so long to bring them along before others
/// get new ones: nobody else knows which lanes they have.
const STRANGERS_FIRST: Duration = Duration::from_secs(1);

impl Service {
    pub(super) fn lease(&mut self, id: u64, request: u64) {
        let group = match self.open_group() {
            Ok(group) => group,
            Err(error) => return self.reply_error(id, request, error),
        };
        if group.has_strangers() && self.opened.is_some_and(|opened| opened.elapsed() < STRANGERS_FIRST) {
            self.waiting.push((id, request));
            return;
        }
        match self.new_lane(id) {
            Ok((lane, copy, relay)) => {
                let (seed, lease) = (rand::random(), self.lease_of(lane));
                let descriptors: Vec<_> = copy.iter().chain([&relay]).map(AsFd::as_fd).collect();
                self.reply(id, request, Reply::Lane { lane, seed, lease }, &descriptors);
                self.audit(id, if copy.is_some() { "leased" } else { "leased without a socket" }, lane, lease);
            }
            Err(error) => self.reply_error(id, request, error),
        }
    }

    /// When those who wait for a lane get one at the latest.
    pub(super) fn waiting_until(&self) -> Option<Instant> {
        self.opened.filter(|_| !self.waiting.is_empty()).map(|opened| opened + STRANGERS_FIRST)
    }

    /// Serves those who wait for a lane, if they need not wait any more.
    pub(super) fn serve_waiting(&mut self) {
        let all_known = self.group.as_ref().is_some_and(|group| !group.has_strangers());
        if all_known || self.waiting_until().is_some_and(|until| until <= Instant::now()) {
            for (id, request) in std::mem::take(&mut self.waiting) {
                if self.clients.contains_key(&id) {
                    self.lease(id, request);
                }
            }
        }
    }

    /// A program offers the socket of a lane that an earlier service leased to it.
    pub(super) fn reclaim(&mut self, id: u64, request: u64, lane: u16, lease: u64, socket: Option<OwnedFd>) {
        match self.take_back(id, lane, lease, socket) {
            Ok(relay) => {
                self.audit(id, "brought along from an earlier service", lane, lease);
                self.reply(id, request, Reply::Reclaimed { lane }, &[relay.as_fd()]);
            }
            Err(error) => self.reply_error(id, request, error),
        }
    }

    /// Gives the program's end of the lane's new relay.
    fn take_back(&mut self, id: u64, lane: u16, lease: u64, socket: Option<OwnedFd>) -> Result<OwnedFd, ServiceError> {
        if let Some(socket) = self.clients[&id].lanes.get(&lane).copied()
            && self.lends[&socket].lease == lease
        {
            // It has it already: no limit is in its way.
            return self.renew_relay(socket);
        }
        self.may_have_lane(id)?;
        if !(1..=LANE_MAX).contains(&lane) || lease == 0 {
            return Err(ServiceError::new(libc::EINVAL, format!("lane {lane} under lease {lease:#x} cannot be")));
        }
        let is_lent = |lend: &Lend| lend.lane.is_some() && lend.lease == lease;
        if self.lanes.contains_key(&lane) || self.lends.values().any(is_lent) {
            return Err(ServiceError::new(
                libc::EBUSY,
                format!("lane {lane} or its lease is another program's by now"),
            ));
        }
        let Some(socket) = socket else {
            // Whoever had a lane without a socket has nothing that shows it; anybody might take another's place.
            let what =
                format!("lane {lane} comes without its socket: nothing shows whose it was; open the device anew");
            return Err(ServiceError::new(libc::EINVAL, what));
        };
        if !self.may_hold_sockets(self.clients[&id].peer) {
            return Err(ServiceError::new(libc::EACCES, format!("lane {lane} comes with a socket of another user")));
        }
        let (ours, theirs) = relay_pair()?;
        let socket = self.open_group()?.adopt(lane, socket)?;
        self.brought_along = true;
        // It was taken for given back, and is not: the end of its former relay says nothing any more.
        let before = self.lends.remove(&socket);
        if let Some(before) = &before {
            self.unwatch(&before.relay);
        }
        let enlisted = self.enlist(id, lane, socket, self.new_lend(id, ours, lane, lease));
        // The keeper's copy of it has gone before.
        if let Some(before) = before {
            before.closer.retire(before.relay);
        }
        enlisted.map(|()| theirs)
    }

    /// Steers packets to lanes that were brought along.
    pub(super) fn settle_brought_along(&mut self) {
        if std::mem::take(&mut self.brought_along)
            && let Some(group) = self.group.as_mut()
        {
            group.settle();
        }
    }

    /// The program asks again, because the service crashed before it could answer.
    fn renew_relay(&mut self, socket: SocketId) -> Result<OwnedFd, ServiceError> {
        let (ours, theirs) = relay_pair()?;
        epoll::add(&self.epoll, &ours, Source::Relay(socket).token(), epoll::EventFlags::IN)
            .and_then(|()| self.store.put(Key::Relay(socket), &ours))
            .map_err(|errno| ServiceError::system("cannot watch a relay", errno))?;
        let lend = self.lends.get_mut(&socket).expect("the lane is leased");
        let before = std::mem::replace(&mut lend.relay, ours);
        lend.offers.clear();
        let closer = lend.closer.clone();
        self.unwatch(&before);
        closer.retire(before);
        Ok(theirs)
    }

    /// Lane, and what the client gets: a copy of its socket, if it may have one, and the relay's other end.
    pub(super) fn new_lane(&mut self, id: u64) -> Result<(u16, Option<OwnedFd>, OwnedFd), ServiceError> {
        self.may_have_lane(id)?;
        let lane = self.free_lane_number()?;
        let (ours, theirs) = relay_pair()?;
        let lease = self.new_lease();
        let (socket, copy) = if self.may_hold_sockets(self.clients[&id].peer) {
            let (socket, copy) = self.open_group()?.lease(lane)?;
            (socket, Some(copy))
        } else {
            (socketless(lease), None)
        };
        self.enlist(id, lane, socket, self.new_lend(id, ours, lane, lease))?;
        Ok((lane, copy, theirs))
    }

    fn new_lend(&self, id: u64, relay: OwnedFd, lane: u16, lease: u64) -> Lend {
        let client = &self.clients[&id];
        let holder = Holder { client: id, uid: client.peer.uid };
        let (closer, groups, offers) = (client.closer.clone(), Memberships::new(), Vec::new());
        Lend { relay, closer, lane: Some(lane), lease, groups, offers, holder }
    }

    /// A name for a lease: random, not 0, and good for an id without a socket.
    fn new_lease(&self) -> u64 {
        loop {
            let lease = rand::random_range(1..=u64::MAX);
            if !self.lends.contains_key(&socketless(lease)) {
                return lease;
            }
        }
    }

    /// Notes that a client has a lane, whose socket is steered to already.
    fn enlist(&mut self, id: u64, lane: u16, socket: SocketId, lend: Lend) -> Result<(), ServiceError> {
        let watch = epoll::add(&self.epoll, &lend.relay, Source::Relay(socket).token(), epoll::EventFlags::IN)
            .and_then(|()| self.store.put(Key::Relay(socket), &lend.relay));
        if let Err(errno) = watch {
            if has_socket(socket) {
                let group = self.group.as_mut().expect("the socket is in it");
                group.unmap(socket);
                group.let_go(socket);
            }
            return Err(ServiceError::system("no lane: cannot watch its relay", errno));
        }
        self.dirty = true;
        self.lends.insert(socket, lend);
        self.lanes.insert(lane, socket);
        self.clients.get_mut(&id).expect("the client asks").lanes.insert(lane, socket);
        Ok(())
    }

    /// The same for a client that wants a ring to it; 0 also if the lane is that of another user: a ring is the peer's to fill, and so
    /// only for who could do the same to the program anyway.
    pub(super) fn lease_for(&self, id: u64, lane: u16) -> u64 {
        let holder = self.clients.values().find(|client| client.lanes.contains_key(&lane));
        let own = self.clients[&id].peer.uid;
        if holder.is_some_and(|holder| self.is_same_user(holder.peer.uid, own)) { self.lease_of(lane) } else { 0 }
    }

    /// One line for everything that happens to a lease.
    fn audit(&self, id: u64, what: &str, lane: u16, lease: u64) {
        if let Some(client) = self.clients.get(&id) {
            let Peer { pid, uid } = client.peer;
            log::info!("lane {lane} (lease {lease:016x}) {what}: {}, pid {pid}, uid {uid}", client.name());
        }
    }

    /// Names the lease of a lane; 0: there is none.
    pub(super) fn lease_of(&self, lane: u16) -> u64 {
        self.lanes.get(&lane).map_or(0, |socket| self.lends[socket].lease)
    }

    /// A socket of the group is power over all of it, so that only the service's own user gets one.
    pub(super) fn may_hold_sockets(&self, peer: Peer) -> bool {
        self.is_same_user(peer.uid, self.uid)
    }

    /// Whether these are the uids of one user, and not of two that both are unknown in the service's user namespace.
    pub(super) fn is_same_user(&self, a: u32, b: u32) -> bool {
        a == b && (a != OVERFLOW_UID || self.all_users_are_mapped)
    }

    /// Whether the service is for programs of this user.
    pub(super) fn may_be_served(&self, peer: Peer) -> Result<(), ServiceError> {
        let serve = self.options.serve.unwrap_or(Serve::default_of(self.uid));
        if serve == Serve::Namespace || self.may_hold_sockets(peer) {
            return Ok(());
        }
        let hidden = |uid| if uid == OVERFLOW_UID { " (a user that is unknown here)" } else { "" };
        Err(ServiceError::new(
            libc::EACCES,
            format!(
                "the service of this network namespace (pid {}) belongs to uid {}{}, this program to uid {}{}, and it \
                 serves its own user only. Let that user have `serve = \"namespace\"` in ferroce.toml, run the program as \
                 that user, end that user's programs (the service then ends by itself), or use a network namespace of your \
                 own (`unshare -rn`, then `ip link set lo up`)",
                std::process::id(),
                self.uid,
                hidden(self.uid),
                peer.uid,
                hidden(peer.uid),
            ),
        ))
    }

    /// Round robin, so that a number is not used again soon.
    fn free_lane_number(&mut self) -> Result<u16, ServiceError> {
        for _ in 0..LANE_MAX {
            let lane = self.next_lane;
            self.next_lane = if lane == LANE_MAX { 1 } else { lane + 1 };
            if !self.lanes.contains_key(&lane) {
                return Ok(lane);
            }
        }
        Err(ServiceError::new(libc::ENOSPC, format!("no lane: all {LANE_MAX} lanes of this host are leased")))
    }

    pub(super) fn release(&mut self, id: u64, lane: u16) -> Result<Reply, ServiceError> {
        let client = self.clients.get_mut(&id).expect("the client asks");
        if client.lanes.remove(&lane).is_none() {
            return Err(ServiceError::new(libc::EINVAL, format!("lane {lane} is not leased to this program")));
        }
        self.free_lane(lane);
        self.dirty = true;
        Ok(Reply::Released { lane })
    }

    /// Steers nothing to the lane any more. Its socket stays until the relay's other end is closed everywhere.
    pub(super) fn free_lane(&mut self, lane: u16) {
        let socket = self.lanes.remove(&lane).expect("the lane is leased");
        let lend = self.lends.get_mut(&socket).expect("its socket is lent");
        lend.lane = None;
        let groups = std::mem::take(&mut lend.groups);
        log::info!("lane {lane} (lease {:016x}) is free", lend.lease);
        if has_socket(socket) {
            self.group.as_mut().expect("a lane is leased, so the port is open").unmap(socket);
        }
        // Its former holder may keep the socket; the host shall not stay in its groups for that.
        self.leave_all(socket, groups);
        let lend = self.lends.get_mut(&socket).expect("its socket is lent");
        // Only the hang-up counts now.
        let token = Source::Relay(socket).token();
        if let Err(errno) = epoll::modify(&self.epoll, &lend.relay, token, epoll::EventFlags::empty()) {
            log::error!("cannot change how a relay is watched: {errno}");
        }
    }

    /// All copies of the lane's relay end are closed: nobody has its socket.
    pub(super) fn let_go(&mut self, socket: SocketId) {
        let Some(lend) = self.lends.get(&socket) else {
            return;
        };
        if let Some(lane) = lend.lane {
            for client in self.clients.values_mut() {
                client.lanes.remove(&lane);
            }
            self.free_lane(lane);
        }
        // The keeper first: whoever closes it last closes what is in it.
        self.store.remove(Key::Relay(socket));
        if let Some(lend) = self.lends.remove(&socket) {
            self.unwatch(&lend.relay);
            lend.closer.retire(lend.relay);
        }
        self.dirty = true;
        if has_socket(socket) {
            self.group.as_mut().expect("a socket is lent, so the port is open").let_go(socket);
        }
    }
}

/// The two ends of a lane's relay.
fn relay_pair() -> Result<(OwnedFd, OwnedFd), ServiceError> {
    seqpacket::pair().map_err(|errno| ServiceError::system("no lane: cannot make its relay", errno))
}

/// What every user without a number in this user namespace looks like.
const OVERFLOW_UID: u32 = 65_534;

/// Whether the overflow uid can only be the real user of that number.
pub(super) fn all_users_are_mapped() -> bool {
    std::fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_ascii_whitespace().eq(["0", "0", "4294967295"]))
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;

    use ferroce_testkit::{free_name, free_port};
    use rustix::event::Timespec;

    use super::*;
    use crate::server::ServerOptions;

    /// Serves what has happened so far.
    fn serve(service: &mut Service) {
        let mut events = [MaybeUninit::uninit(); 16];
        let (ready, _) = epoll::wait(&service.epoll, &mut events, Some(&Timespec::default())).unwrap();
        for event in ready {
            let (source, flags) = (Source::of(event.data), event.flags);
            service.handle(source, flags);
        }
        service.keep_house();
    }

    fn service() -> Service {
        let options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
        Service::bind(options).unwrap()
    }

    fn connect(service: &mut Service) -> (u64, OwnedFd) {
        let (ours, theirs) = seqpacket::pair().unwrap();
        let id = service.next_client;
        service.add_client(theirs);
        (id, ours)
    }

    /// They were taken for one user: each could write to the other's ring, and saw its programs and ids.
    #[test]
    fn users_without_a_number_here_are_strangers_to_each_other() {
        let options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
        let mut service = Service::bind(ServerOptions { serve: Some(Serve::Namespace), ..options }).unwrap();
        service.uid = 7;
        let mut connections = Vec::new();
        let holders = [OVERFLOW_UID; 2].map(|uid| {
            let (ours, theirs) = seqpacket::pair().unwrap();
            connections.push(ours);
            let id = service.next_client;
            service.enlist_client(theirs, Peer { pid: 1, uid });
            let (lane, _, relay) = service.new_lane(id).unwrap();
            (id, lane, relay)
        });
        let [(first, ..), (second, lane, _)] = holders;
        let lease = service.lease_of(lane);
        let seen = |service: &Service| service.status(first, 0).status.clients.len();

        service.all_users_are_mapped = true;
        assert_eq!((service.lease_for(first, lane), seen(&service)), (lease, 2), "there is one user of that number");
        service.all_users_are_mapped = false;
        assert_eq!((service.lease_for(first, lane), seen(&service)), (0, 1), "itself");
        assert_eq!(service.lease_for(second, lane), 0);
        let of = |uid| Peer { pid: 1, uid };
        assert!(service.may_hold_sockets(of(7)) && !service.may_hold_sockets(of(OVERFLOW_UID)));
        service.uid = OVERFLOW_UID;
        assert!(!service.may_hold_sockets(of(OVERFLOW_UID)));
        assert_eq!(seen(&service), 1);
    }

    /// The service crashed before it could answer, and the program, which has all lanes that it may have, asks again.
    #[test]
    fn a_lane_that_is_the_programs_already_is_brought_along_again() {
        let mut service = service();
        service.options.limits.process.lanes = 1;
        let (client, _connection) = connect(&mut service);
        let (lane, socket, _relay) = service.new_lane(client).unwrap();
        let lease = service.lease_of(lane);
        service.new_lane(client).unwrap_err();
        service.take_back(client, lane, lease, socket).unwrap();
        assert_eq!((service.lease_of(lane), service.lends.len()), (lease, 1));
        service.take_back(client, lane, lease + 1, None).unwrap_err();
    }

    /// Whoever kept the relays of lanes that were given back could have ever more.
    #[test]
    fn lanes_that_were_given_back_count_as_long_as_their_relays_are_there() {
        let mut service = service();
        service.options.limits.process.lanes = 2;
        let (client, _connection) = connect(&mut service);
        let mut relays = Vec::new();
        for _ in 0..4 {
            let (lane, _socket, relay) = service.new_lane(client).unwrap();
            service.release(client, lane).unwrap();
            relays.push(relay);
        }
        let refused = service.new_lane(client).unwrap_err().to_string();
        assert!(refused.contains("limits.process.lanes is 2, for 2 each"), "{refused}");
        relays.truncate(3);
        serve(&mut service);
        service.new_lane(client).unwrap();
    }

    /// A program whose connection has ended, though it lives, has its lane's socket and relay still.
    #[test]
    fn a_lane_that_was_taken_for_given_back_comes_back() {
        let options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
        let mut service = Service::bind(options).unwrap();
        let connect = |service: &mut Service| {
            let (ours, theirs) = seqpacket::pair().unwrap();
            let id = service.next_client;
            service.add_client(theirs);
            (id, ours)
        };
        let (first, _connection) = connect(&mut service);
        let (lane, socket, relay) = service.new_lane(first).unwrap();
        let lease = service.lease_of(lane);
        service.remove_client(first, "its connection failed");
        assert_eq!(service.lease_of(lane), 0);

        let (second, _connection) = connect(&mut service);
        let next_relay = service.take_back(second, lane, lease, socket).unwrap();
        assert_eq!(service.lease_of(lane), lease);
        drop(relay);
        serve(&mut service);
        assert_eq!(service.lease_of(lane), lease, "the former relay tells nothing any more");
        drop(next_relay);
        serve(&mut service);
        assert_eq!(service.lease_of(lane), 0);
    }
}
