//! How much programs and users may have ([`Limits`](crate::config::Limits)), and what they have.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ferroce_cm::{Kinds, leaves_room, part_of_guests};
use rustix::process::{Resource, getrlimit};

use super::groups::Memberships;
use super::{CLIENTS_MAX, Holder, Service, SocketId, has_socket};
use crate::cm::protocol::CmRequest;
use crate::config::{DESCRIPTORS_MAX, GROUPS_OF_ALL_MAX, IDS_MAX, RING_OFFERS_MAX};
use crate::seqpacket::DESCRIPTORS_OF_ANY_MAX;
use crate::sys::{self, Peer};
use crate::{LANE_MAX, ServiceError};

/// Descriptors that are for the service itself: sockets of queue pair 1, looking up devices, what comes with a request (any message
/// can have so many), connections of those who are refused, and the lowest numbers ([`sys::keep_low_numbers`]).
const DESCRIPTORS_KEPT: usize = 160 + DESCRIPTORS_OF_ANY_MAX + sys::LOW_NUMBERS;

/// Descriptors that a program's connection takes: its socket and its pidfd.
const OF_CONNECTION: usize = 2;

/// Lends for each lane that there may be, with those that were given back.
const LENDS_PER_LANE: u32 = 2;

/// Lends of all programs.
pub(super) const LENDS_MAX: usize = LANE_MAX as usize * LENDS_PER_LANE as usize;

/// A refusal is written to the log once within this time for each user and limit: who asks again and again shall not fill it.
const SAY_AGAIN: Duration = Duration::from_secs(10);

/// Users and limits that are remembered for that.
const SAID_MAX: usize = 1024;

/// Who asks for something.
struct Who<'a> {
    peer: Peer,
    /// None: it has not said who it is.
    program: Option<&'a str>,
}

impl fmt::Display for Who<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.program {
            Some(name) => write!(f, "{name} (pid {}, uid {})", self.peer.pid, self.peer.uid),
            None => write!(f, "pid {} (uid {})", self.peer.pid, self.peer.uid),
        }
    }
}

/// Something of which there is so much.
#[derive(Clone, Copy, Debug)]
struct Good {
    what: &'static str,
    /// The places of its limits in the configuration, below `limits.process` and `limits.user`.
    keys: [&'static str; 2],
    /// So many for each one that these limits say.
    times: u32,
    /// For all programs.
    most: usize,
    /// For those of users other than the service's own and root: what these cannot take is there for the service's own user, whatever
    /// the limits of one user are.
    others: usize,
    errno: i32,
}

const PROGRAMS: Good = Good {
    what: "programs",
    keys: ["process.programs", "user.programs"],
    times: 1,
    most: CLIENTS_MAX,
    others: part_of_guests(CLIENTS_MAX),
    errno: libc::EUSERS,
};
const LANES: Good = Good {
    what: "lanes",
    keys: ["process.lanes", "user.lanes"],
    times: 1,
    most: LANE_MAX as usize,
    others: part_of_guests(LANE_MAX as usize),
    errno: libc::ENOSPC,
};
/// Lanes, with those that were given back and whose relay somebody still has: the service keeps its end of that, and an entry.
const LENDS: Good = Good {
    what: "lanes, with those given back whose relay is open still (in a forked child, say),",
    times: LENDS_PER_LANE,
    most: LENDS_MAX,
    others: part_of_guests(LENDS_MAX),
    ..LANES
};
const IDS: Good = Good {
    what: "ids",
    keys: ["process.ids", "user.ids"],
    times: 1,
    most: IDS_MAX as usize,
    others: part_of_guests(IDS_MAX as usize),
    errno: libc::ENOMEM,
};
/// Bounded by ids.
const LISTENERS: Good = Good {
    what: "listeners",
    keys: ["process.listeners", "user.listeners"],
    most: usize::MAX,
    others: usize::MAX,
    ..IDS
};
/// Bounded by ids.
const PENDING: Good = Good {
    what: "pending connections",
    keys: ["process.pending_connections", "user.pending_connections"],
    ..LISTENERS
};
/// Bounded by descriptors.
const CHANNELS: Good = Good {
    what: "event channels",
    keys: ["process.event_channels", "user.event_channels"],
    times: 1,
    most: usize::MAX,
    others: usize::MAX,
    errno: libc::EMFILE,
};

/// Multicast groups of lanes without sockets, which have the service's together.
const GROUPS_V4: &str = "IPv4 groups of lanes without sockets (net.ipv4.igmp_max_memberships says how many there are)";
const GROUPS_V6: &str = "IPv6 groups of lanes without sockets";

/// How much of a good is taken.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    all: usize,
    by_others: usize,
    by_user: usize,
    by_program: usize,
}

/// Why there is no more.
#[derive(Debug, PartialEq, Eq)]
struct Refusal {
    /// The limit's place in the configuration, or whose part is used up.
    limit: &'static str,
    why: String,
}

impl Good {
    /// Whether there is more of it, also for another user. `limits` are those of a program and of a user, if there are any.
    fn check(&self, is_other: bool, taken: Taken, wanted: usize, limits: [Option<u32>; 2]) -> Result<(), Refusal> {
        let Good { what, keys, times, most, others, .. } = self;
        let refuse = |limit, why| Err(Refusal { limit, why });
        let left = |most: usize, taken: usize| most.saturating_sub(taken);
        let by_key = [("the program", taken.by_program, limits[0]), ("the user", taken.by_user, limits[1])];
        for ((whose, used, limit), key) in by_key.into_iter().zip(keys) {
            let allowed = |limit: u32| limit as usize * *times as usize;
            let Some(limit) = limit.filter(|limit| left(allowed(*limit), used) < wanted) else { continue };
            let how = "give some back, or raise it in ferroce.toml";
            let each = if *times > 1 { format!(", for {times} each") } else { String::new() };
            return refuse(key, format!("{whose} has {used} {what} already, and limits.{key} is {limit}{each}; {how}"));
        }
        if left(*most, taken.all) < wanted {
            return refuse(
                "all",
                format!("the service has {most} {what} at most, and no more are free; end some programs"),
            );
        }
        if !is_other {
            return Ok(());
        }
        if left(*others, taken.by_others) < wanted {
            let rest = "the rest is for that user; end some programs";
            return refuse(
                "others",
                format!("users other than the service's own have {others} {what} already, and {rest}"),
            );
        }
        if limits[1].is_none() && !(0..wanted).all(|n| leaves_room(taken.by_user + n, taken.by_others + n, *others)) {
            let (used, key) = (taken.by_user, keys[1]);
            let how = format!("give some back, or set limits.{key} in ferroce.toml");
            return refuse(
                key,
                format!("the user has {used} {what} already, and leaves as many to further users; {how}"),
            );
        }
        Ok(())
    }
}

/// What was written to the log lately: user and limit.
#[derive(Debug, Default)]
pub(super) struct Said(BTreeMap<(u32, &'static str), Instant>);

impl Said {
    /// Whether it is to be said now.
    pub(super) fn is_due(&mut self, uid: u32, limit: &'static str, now: Instant) -> bool {
        let recent = |at: &Instant| now.saturating_duration_since(*at) < SAY_AGAIN;
        if self.0.get(&(uid, limit)).is_some_and(recent) {
            return false;
        }
        self.0.retain(|_, at| recent(at));
        if self.0.len() >= SAID_MAX {
            return false;
        }
        self.0.insert((uid, limit), now);
        true
    }
}

/// Descriptors that a lend takes: the service's end of its relay, and its socket.
fn descriptors_of(socket: SocketId) -> usize {
    if has_socket(socket) { 2 } else { 1 }
}

/// Groups of an IP version that the kernel lets one socket be in, as far as the service uses them.
pub(super) fn groups_max(version_of: IpAddr) -> usize {
    /// Where the system does not tell (`IP_MAX_MEMBERSHIPS` of ip(7)).
    const USUAL: usize = 20;
    let most = GROUPS_OF_ALL_MAX as usize;
    if version_of.is_ipv6() {
        return most;
    }
    let told = std::fs::read_to_string("/proc/sys/net/ipv4/igmp_max_memberships");
    told.ok().and_then(|told| told.trim().parse().ok()).unwrap_or(USUAL).min(most)
}

/// Descriptors of this process that programs may have: what the system allows, but for those that the service needs itself.
pub(super) fn descriptors_for_programs() -> usize {
    let allowed = getrlimit(Resource::Nofile).current.map_or(DESCRIPTORS_MAX as usize, |limit| limit as usize);
    let allowed = allowed.min(DESCRIPTORS_MAX as usize);
    // Where there are very few, half of them.
    allowed - DESCRIPTORS_KEPT.min(allowed / 2)
}

impl Service {
    /// Whether one more program of this user may connect.
    pub(super) fn may_connect(&mut self, peer: Peer) -> Result<(), ServiceError> {
        let mut taken = self.taken(peer.uid, None, |_, _| 1);
        // Connections that cannot be closed count.
        taken.add(self.closers.pending(peer.uid), self.is_other(peer.uid), true, false);
        let user = self.options.limits.user.programs;
        self.check(peer, None, &PROGRAMS, taken, 1, [None, user])?;
        self.may_hold_descriptors(peer, None, OF_CONNECTION)
    }

    /// Whether a client may have one more lane.
    pub(super) fn may_have_lane(&mut self, id: u64) -> Result<(), ServiceError> {
        let peer = self.clients[&id].peer;
        self.may_be_served(peer)?;
        let taken = self.taken(peer.uid, Some(id), |_, client| client.lanes.len());
        let (process, user) = (self.options.limits.process.lanes, self.options.limits.user.lanes);
        self.check(peer, Some(id), &LANES, taken, 1, [Some(process), user])?;
        self.check(peer, Some(id), &LENDS, self.lends_taken(peer.uid, id), 1, [Some(process), user])?;
        // Its socket, and the service's end of the relay.
        let descriptors = if self.may_hold_sockets(peer) { 2 } else { 1 };
        self.may_hold_descriptors(peer, Some(id), descriptors)
    }

    /// Whether a client may ask this of the connection manager.
    pub(super) fn may_ask(&mut self, id: u64, asked: &CmRequest) -> Result<(), ServiceError> {
        match asked {
            CmRequest::OpenChannel => self.may_open_channel(id),
            CmRequest::CreateId { .. } | CmRequest::Adopt { .. } => self.may_have_id(id),
            CmRequest::Listen { .. } => {
                let (process, user) = (self.options.limits.process.listeners, self.options.limits.user.listeners);
                self.may_use_ids(id, &LISTENERS, |kinds| kinds.listeners, [process, user])
            }
            CmRequest::Connect { .. } | CmRequest::Resolve { .. } => {
                let (process, user) = (&self.options.limits.process, &self.options.limits.user);
                let limits = [process.pending_connections, user.pending_connections];
                self.may_use_ids(id, &PENDING, |kinds| kinds.pending, limits)
            }
            _ => Ok(()),
        }
    }

    /// Lends, given back or not.
    fn lends_taken(&self, uid: u32, id: u64) -> Taken {
        let mut taken = Taken::default();
        for holder in self.lends.values().map(|lend| lend.holder) {
            taken.add(1, self.is_other(holder.uid), holder.uid == uid, holder.client == id);
        }
        taken
    }

    fn may_open_channel(&mut self, id: u64) -> Result<(), ServiceError> {
        let peer = self.clients[&id].peer;
        let taken = self.taken(peer.uid, Some(id), |id, _| self.cm.channels_of(id));
        let (process, user) = (self.options.limits.process.event_channels, self.options.limits.user.event_channels);
        self.check(peer, Some(id), &CHANNELS, taken, 1, [Some(process), user])?;
        self.may_hold_descriptors(peer, Some(id), 1)
    }

    fn may_have_id(&mut self, id: u64) -> Result<(), ServiceError> {
        let peer = self.clients[&id].peer;
        let by_program = self.cm.ids_of(id);
        let (by_user, by_others) = self.cm.ids_of_user(self.user(peer.uid));
        // Those that linger are nobody's, and have a limit of their own.
        let taken = Taken { all: self.cm.ids_of_all(), by_others, by_user, by_program };
        let (process, user) = (self.options.limits.process.ids, self.options.limits.user.ids);
        self.check(peer, Some(id), &IDS, taken, 1, [Some(process), user])
    }

    fn may_use_ids(
        &mut self,
        id: u64,
        good: &Good,
        count: fn(Kinds) -> usize,
        [process, user]: [u32; 2],
    ) -> Result<(), ServiceError> {
        let peer = self.clients[&id].peer;
        // Ids bound them for all together.
        let by_user = count(self.cm.kinds_of_user(self.user(peer.uid)));
        let taken = Taken { by_user, by_program: count(self.cm.kinds_of(id)), ..Taken::default() };
        self.check(peer, Some(id), good, taken, 1, [Some(process), Some(user)])
    }

    /// Whether a program may have one more offer of a ring on its way.
    pub(super) fn may_offer_ring(&mut self, holder: Holder) -> bool {
        // Each is a descriptor in flight, of which a user who has no say in it may have as many as it may have open.
        let most = (RING_OFFERS_MAX as usize).min(self.descriptors / 4);
        let good = Good {
            what: "offers of rings on their way",
            keys: ["process.ring_offers", "user.ring_offers"],
            times: 1,
            most,
            others: part_of_guests(most),
            errno: libc::ENOBUFS,
        };
        let Some(peer) = self.clients.get(&holder.client).map(|client| client.peer) else { return false };
        let limits = [Some(self.options.limits.process.ring_offers), self.options.limits.user.ring_offers];
        if good.check(self.is_other(peer.uid), self.offers_taken(holder), 1, limits).is_ok() {
            return true;
        }
        self.forget_read_offers(holder.uid);
        self.check(peer, Some(holder.client), &good, self.offers_taken(holder), 1, limits).is_ok()
    }

    fn offers_taken(&self, holder: Holder) -> Taken {
        let mut taken = Taken::default();
        for sender in self.lends.values().flat_map(|lend| &lend.offers) {
            taken.add(1, self.is_other(sender.uid), sender.uid == holder.uid, sender.client == holder.client);
        }
        taken
    }

    /// Whether the service's own socket may be in one more multicast group for a user's lanes that have none.
    pub(super) fn may_join(&mut self, id: u64, wanted: (IpAddr, u32)) -> Result<(), ServiceError> {
        let peer = self.clients[&id].peer;
        let most = groups_max(wanted.0);
        let good = Good {
            what: if wanted.0.is_ipv4() { GROUPS_V4 } else { GROUPS_V6 },
            keys: ["process.groups", "user.groups"],
            times: 1,
            most,
            // The service's own user needs none of them: its lanes have sockets.
            others: most,
            errno: libc::ENOMEM,
        };
        let mut users = Memberships::new();
        let mut all = Memberships::new();
        for lend in self.lends.iter().filter(|(socket, _)| !has_socket(**socket)).map(|(_, lend)| lend) {
            let of_kind = lend.groups.iter().filter(|(group, _)| group.is_ipv4() == wanted.0.is_ipv4());
            let others = of_kind.filter(|membership| **membership != wanted);
            if lend.holder.uid == peer.uid {
                users.extend(others.clone());
            }
            all.extend(others);
        }
        let taken = Taken { all: all.len(), by_others: all.len(), by_user: users.len(), by_program: 0 };
        let limits = [None, self.options.limits.user.groups];
        self.check(peer, Some(id), &good, taken, 1, limits)
    }

    /// Whether a program may make the service hold so many more descriptors.
    fn may_hold_descriptors(&mut self, peer: Peer, id: Option<u64>, wanted: usize) -> Result<(), ServiceError> {
        let good = Good {
            what: "descriptors of the service",
            keys: ["process.descriptors", "user.descriptors"],
            times: 1,
            most: self.descriptors,
            others: part_of_guests(self.descriptors),
            errno: libc::EMFILE,
        };
        let taken = self.descriptors_taken(peer.uid, id);
        let (process, user) = (self.options.limits.process.descriptors, self.options.limits.user.descriptors);
        self.check(peer, id, &good, taken, wanted, [Some(process), user])
    }

    /// Descriptors that a program's connection and its event channels take.
    pub(super) fn descriptors_of_client(&self, id: u64) -> usize {
        OF_CONNECTION + self.cm.channels_of(id)
    }

    /// Those that lanes take, by program; one of which a lane that was given back is open still may be gone.
    pub(super) fn descriptors_of_lends(&self) -> BTreeMap<u64, usize> {
        let mut of_clients = BTreeMap::new();
        for (socket, lend) in &self.lends {
            *of_clients.entry(lend.holder.client).or_default() += descriptors_of(*socket);
        }
        of_clients
    }

    /// Descriptors that the service holds for programs: connections, lanes (also those that were given back, as long as a copy of the
    /// relay's other end is there), event channels, and what waits to be closed, though its program may be gone.
    fn descriptors_taken(&self, uid: u32, id: Option<u64>) -> Taken {
        let mut taken = self.taken(uid, id, |id, _| self.descriptors_of_client(id));
        for (socket, lend) in &self.lends {
            let holder = lend.holder;
            taken.add(descriptors_of(*socket), self.is_other(holder.uid), holder.uid == uid, Some(holder.client) == id);
        }
        for (of, pending) in self.closers.all_pending() {
            taken.add(pending, self.is_other(of), of == uid, false);
        }
        taken
    }

    /// How much of something clients have, by what each one has.
    fn taken(&self, uid: u32, id: Option<u64>, has: impl Fn(u64, &super::Client) -> usize) -> Taken {
        let mut taken = Taken::default();
        for (number, client) in &self.clients {
            let (other, users) = (self.is_other(client.peer.uid), client.peer.uid == uid);
            taken.add(has(*number, client), other, users, Some(*number) == id);
        }
        taken
    }

    /// Whether a user is neither the service's own nor root.
    fn is_other(&self, uid: u32) -> bool {
        uid != self.uid && uid != 0
    }

    /// A user as the connection manager knows it.
    pub(super) fn user(&self, uid: u32) -> ferroce_cm::User {
        ferroce_cm::User { number: uid.into(), guest: self.is_other(uid) }
    }

    /// Refuses what would go beyond a limit, and says so in the log.
    fn check(
        &mut self,
        peer: Peer,
        id: Option<u64>,
        good: &Good,
        taken: Taken,
        wanted: usize,
        limits: [Option<u32>; 2],
    ) -> Result<(), ServiceError> {
        let Err(refusal) = good.check(self.is_other(peer.uid), taken, wanted, limits) else { return Ok(()) };
        if self.said.is_due(peer.uid, refusal.limit, Instant::now()) {
            let program = id.and_then(|id| self.clients.get(&id)).map(super::Client::name);
            log::warn!("{} gets no more {}: {}", Who { peer, program }, good.what, refusal.why);
        }
        Err(ServiceError::new(good.errno, refusal.why))
    }
}

impl Taken {
    fn add(&mut self, amount: usize, by_other: bool, by_user: bool, by_program: bool) {
        self.all += amount;
        self.by_others += if by_other { amount } else { 0 };
        self.by_user += if by_user { amount } else { 0 };
        self.by_program += if by_program { amount } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use ferroce_testkit::{free_name, free_port};

    use super::*;
    use crate::protocol::{self, REQUEST_BYTES_MAX, Reply, Request, VERSION};
    use crate::seqpacket;
    use crate::server::ServerOptions;

    /// Of these, so much is another user's.
    fn taken(all: usize, by_others: usize, by_user: usize) -> Taken {
        Taken { all, by_others, by_user, by_program: 0 }
    }

    /// Any user can connect, as often as it likes.
    #[test]
    fn other_users_leave_something_for_the_services_own() {
        for good in [PROGRAMS, LANES, IDS] {
            let (used, by_others) = (good.others, good.others);
            assert!(used < good.most, "{}", good.what);
            let no_limits = [None; 2];
            good.check(true, taken(used - 1, by_others - 1, 0), 1, no_limits).unwrap();
            let refused = good.check(true, taken(used, by_others, 0), 1, no_limits).unwrap_err();
            assert!(refused.why.contains("users other than the service's own have"), "{refused:?}");
            good.check(false, taken(used, by_others, 0), 1, no_limits).unwrap();
            good.check(false, taken(good.most - 1, by_others, good.most - 1), 1, no_limits).unwrap();
            assert_eq!(good.check(false, taken(good.most, by_others, 0), 1, no_limits).unwrap_err().limit, "all");
            assert_eq!(good.check(true, taken(good.most, 0, 0), 1, no_limits).unwrap_err().limit, "all");
        }
    }

    /// By itself: what ferroce.toml says goes before it.
    #[test]
    fn one_other_user_leaves_room_for_further_ones() {
        let all = LANES.others;
        let most = (0..).find(|n| LANES.check(true, taken(*n, *n, *n), 1, [None; 2]).is_err()).unwrap();
        assert_eq!((all, most), (765, 382));
        let refused = LANES.check(true, taken(most, most, most), 1, [None; 2]).unwrap_err();
        assert_eq!(refused.limit, "user.lanes");
        assert!(refused.why.contains("leaves as many to further users"), "{refused:?}");
        LANES.check(true, taken(most, most, 0), 1, [None; 2]).unwrap();
        LANES.check(true, taken(700, 700, 700), 1, [None, Some(701)]).unwrap();
        let refused = LANES.check(true, taken(701, 701, 701), 1, [None, Some(701)]).unwrap_err();
        assert!(refused.why.contains("limits.user.lanes is 701"), "{refused:?}");
        LANES.check(false, taken(1000, 0, 1000), 1, [None; 2]).unwrap();
    }

    #[test]
    fn what_takes_several_is_had_whole_or_not_at_all() {
        LANES.check(false, taken(1021, 0, 0), 2, [None; 2]).unwrap();
        LANES.check(false, taken(1022, 0, 0), 2, [None; 2]).unwrap_err();
        LANES.check(true, taken(381, 381, 381), 1, [None; 2]).unwrap();
        LANES.check(true, taken(381, 381, 381), 2, [None; 2]).unwrap_err();
    }

    #[test]
    fn a_refusal_is_logged_once_in_a_while() {
        let (mut said, now) = (Said::default(), Instant::now());
        assert!(said.is_due(7, "user.ids", now));
        assert!(!said.is_due(7, "user.ids", now + SAY_AGAIN / 2));
        assert!(said.is_due(8, "user.ids", now) && said.is_due(7, "all", now));
        assert!(said.is_due(7, "user.ids", now + SAY_AGAIN));
        let many = (0..10_000).filter(|uid| said.is_due(100 + uid, "user.ids", now + SAY_AGAIN)).count();
        assert_eq!((many, said.0.len()), (SAID_MAX - 1, SAID_MAX));
    }

    /// Descriptors, too: nobody could connect any more, and the service not say why.
    #[test]
    fn another_user_leaves_descriptors_for_the_services_own() {
        let mut service = service();
        (service.uid, service.descriptors) = (7, 40);
        let connect = |service: &mut Service, uid| {
            let (ours, theirs) = seqpacket::pair().unwrap();
            service.enlist_client(theirs, Peer { pid: 1, uid });
            ours
        };
        let told = |connection: &std::os::fd::OwnedFd| {
            let mut buffer = [0; REQUEST_BYTES_MAX];
            let received = seqpacket::recv(connection, &mut buffer, rustix::net::RecvFlags::DONTWAIT).ok()?;
            match protocol::decode::<Reply>(&buffer[..received.len]).unwrap().body {
                Reply::Error { errno, .. } => Some(errno),
                reply => panic!("{reply:?}"),
            }
        };
        // 30 are for others, and half of these for one.
        let of_one: Vec<_> = (0..20).map(|_| connect(&mut service, 8)).collect();
        let said: Vec<_> = of_one.iter().map(told).collect();
        assert_eq!(said, [vec![None; 7], vec![Some(libc::EMFILE); 13]].concat());
        let of_many: Vec<_> = (100..120).map(|uid| connect(&mut service, uid)).collect();
        assert!(of_many.iter().any(|connection| told(connection).is_none()), "there is something for another");
        for _ in 0..5 {
            assert_eq!(told(&connect(&mut service, 7)), None, "the service's own user");
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

    /// The service had heard it, and crashed before it could answer: the program was told of a second Hello.
    #[test]
    fn a_program_of_a_service_that_crashed_says_hello_again() {
        let mut service = service();
        let (ours, theirs) = seqpacket::pair().unwrap();
        service.add_client(theirs);
        let say_hello = |service: &mut Service, program: &str| {
            let hello = Request::Hello { version: VERSION, pid: 1, program: program.into(), again: false };
            let hello = protocol::encode(1, &hello);
            seqpacket::send(&ours, &[&hello], &[], rustix::net::SendFlags::empty()).unwrap();
            service.serve_client(1);
            let mut buffer = [0; REQUEST_BYTES_MAX];
            let received = seqpacket::recv(&ours, &mut buffer, rustix::net::RecvFlags::DONTWAIT).unwrap();
            match protocol::decode::<Reply>(&buffer[..received.len]).unwrap().body {
                Reply::Welcome { .. } => Ok(()),
                Reply::Error { what, .. } => Err(what),
                reply => panic!("{reply:?}"),
            }
        };
        say_hello(&mut service, "x\n").unwrap();
        assert_eq!(say_hello(&mut service, "x\n").unwrap_err(), "a second Hello");
        service.clients.get_mut(&1).unwrap().taken_over = true;
        say_hello(&mut service, "x\n").unwrap();
        say_hello(&mut service, "y").unwrap_err();
    }

    /// Descriptors of a user's that cannot be closed, though its programs are gone.
    #[test]
    fn what_waits_to_be_closed_counts() {
        let mut service = service();
        (service.uid, service.descriptors) = (7, 40);
        let before = service.descriptors_taken(8, None);
        service.closers.of(8).hold((0..5).map(|_| seqpacket::pair().unwrap().0));
        let taken = service.descriptors_taken(8, None);
        assert_eq!([taken.all - before.all, taken.by_others, taken.by_user], [5, 5, 5]);
        assert_eq!(service.descriptors_taken(9, None).by_user, 0);
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
