//! The machine: ids and their owners, timers, what goes out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use ferroce_wire::mad::{Mad, PortSpace};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};

use crate::conn::{Conn, Peer};
use crate::event::{Event, EventKind};
use crate::limit::{Kinds, Users};
use crate::param::{BindOptions, Path, QpParameters, Transmit};
use crate::ports::Ports;
use crate::{CmError, CmId, Config, Nanos, Owner, Service, State, Stats, User};

/// Datagrams that wait for the host to take them; more are dropped, as the network could have done.
const MAX_TRANSMITS: usize = 16_384;

/// Timers that one call serves; the next call serves more.
const TIMERS_PER_CALL: usize = 1_024;

/// The connection manager of a host.
///
/// How a host drives it: time never goes back; every method that takes `now` counts it in the same nanoseconds.
///
/// - *Commands* of programs: [`create_id`](Cm::create_id), [`bind`](Cm::bind), [`listen`](Cm::listen), [`connect`](Cm::connect),
///   [`resolve`](Cm::resolve), [`accept`](Cm::accept), [`accept_datagram`](Cm::accept_datagram), [`reject`](Cm::reject),
///   [`mra`](Cm::mra), [`establish`](Cm::establish), [`notify`](Cm::notify), [`disconnect`](Cm::disconnect),
///   [`take_request`](Cm::take_request), [`adopt`](Cm::adopt), [`destroy`](Cm::destroy), and [`release_owner`](Cm::release_owner) when a process is gone.
/// - *Inputs*: [`handle_packet`](Cm::handle_packet) for each management datagram to queue pair 1, [`handle_timeout`](Cm::handle_timeout)
///   when [`next_timeout`](Cm::next_timeout) is due.
/// - *Outputs*: after each command or input, [`poll_transmit`](Cm::poll_transmit) and [`poll_event`](Cm::poll_event) until both
///   give `None`.
///
/// An id belongs to its owner until it is destroyed, and each event goes to the owner. What the specification wants after that
/// (a DREQ sent again, timewait) goes on without it.
#[derive(Debug)]
pub struct Cm {
    pub(crate) config: Config,
    pub(crate) rng: StdRng,
    last_id: u64,
    pub(crate) ids: BTreeMap<CmId, Id>,
    pub(crate) owners: BTreeMap<Owner, Usage>,
    pub(crate) users: Users,
    pub(crate) ports: Ports,
    /// By our communication id, and by our request id.
    pub(crate) by_comm_id: BTreeMap<u32, CmId>,
    /// By the peer's communication id, CA GUID and address: finds duplicates of a REQ.
    pub(crate) by_remote: BTreeMap<(u32, u64, Peer), CmId>,
    /// By the peer's queue pair, CA GUID and address: finds stale connections.
    pub(crate) by_remote_qpn: BTreeMap<(u32, u64, Peer), CmId>,
    /// By our queue pair.
    pub(crate) by_qpn: BTreeMap<u32, CmId>,
    /// By the peer's request id and address: finds duplicates of a SIDR_REQ.
    pub(crate) by_request: BTreeMap<(u32, Peer), CmId>,
    timers: BTreeSet<(Nanos, CmId)>,
    /// Ids without an owner that wait for a DREP: their peers would stay connected alone.
    owing: BTreeSet<CmId>,
    /// Ids without an owner that only wait for their time to be over.
    waiting: BTreeSet<CmId>,
    /// Ports whose listener has gone, and until when requests for them are dropped instead of rejected, whatever their port space:
    /// a program may listen for datagrams next.
    pub(crate) closing: BTreeMap<u16, Nanos>,
    /// Until when owners may bring along what another machine knew.
    pub(crate) gathering: Nanos,
    transmits: VecDeque<Transmit>,
    events: VecDeque<Event>,
    pub(crate) stats: Stats,
}

#[derive(Debug)]
pub(crate) struct Id {
    /// `None`: destroyed, but something is left to do.
    pub owner: Option<Owner>,
    pub space: PortSpace,
    pub service: Service,
    /// The address with its port.
    pub bound: Option<SocketAddr>,
    /// The listener whose backlog has a place for it, and for whom.
    pub waits_at: Option<(CmId, Peer)>,
    pub role: Role,
}

#[derive(Debug)]
pub(crate) enum Role {
    Idle,
    Listener(Listener),
    Conn(Box<Conn>),
    Done,
}

#[derive(Debug)]
pub(crate) struct Listener {
    pub backlog: usize,
    /// Requests that wait, by peer.
    pub waiting: BTreeMap<Peer, usize>,
    /// Their ids.
    pub waiting_ids: BTreeSet<CmId>,
}

/// What an owner has.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    pub ids: BTreeSet<CmId>,
    pub kinds: Kinds,
}

/// One id, for tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdInfo {
    /// The id.
    pub id: CmId,
    /// Whose; `None` if it was destroyed and lingers.
    pub owner: Option<Owner>,
    /// Its port space.
    pub space: PortSpace,
    /// Connections or datagrams.
    pub service: Service,
    /// Its state.
    pub state: State,
    /// Its address.
    pub local: Option<SocketAddr>,
    /// The peer's.
    pub peer: Option<SocketAddr>,
    /// Its queue pair.
    pub qpn: Option<u32>,
    /// The peer's.
    pub remote_qpn: Option<u32>,
    /// Requests that wait at a listener.
    pub waiting: usize,
}

impl Id {
    pub(crate) fn state(&self) -> State {
        match &self.role {
            Role::Idle => State::Idle,
            Role::Listener(_) => State::Listen,
            Role::Conn(conn) => conn.state,
            Role::Done => State::Done,
        }
    }

    fn info(&self, id: CmId) -> IdInfo {
        let conn = self.conn();
        IdInfo {
            id,
            owner: self.owner,
            space: self.space,
            service: self.service,
            state: self.state(),
            local: conn.map(|conn| conn.local).or(self.bound),
            peer: conn.map(|conn| conn.peer),
            qpn: conn.map(|conn| conn.param.qpn).filter(|qpn| *qpn != 0),
            remote_qpn: conn.and_then(|conn| conn.remote).map(|remote| remote.qpn),
            waiting: if let Role::Listener(listener) = &self.role { listener.waiting_ids.len() } else { 0 },
        }
    }

    pub(crate) fn conn(&self) -> Option<&Conn> {
        if let Role::Conn(conn) = &self.role { Some(conn) } else { None }
    }
}

impl Cm {
    /// A machine without ids.
    pub fn new(config: Config) -> Cm {
        Cm {
            rng: StdRng::from_seed(config.seed),
            last_id: config.ids_after,
            config,
            ids: BTreeMap::new(),
            owners: BTreeMap::new(),
            users: Users::default(),
            ports: Ports::default(),
            by_comm_id: BTreeMap::new(),
            by_remote: BTreeMap::new(),
            by_remote_qpn: BTreeMap::new(),
            by_qpn: BTreeMap::new(),
            by_request: BTreeMap::new(),
            timers: BTreeSet::new(),
            owing: BTreeSet::new(),
            waiting: BTreeSet::new(),
            closing: BTreeMap::new(),
            gathering: 0,
            transmits: VecDeque::new(),
            events: VecDeque::new(),
            stats: Stats::default(),
        }
    }

    /// Owners bring along until then what another machine knew, listeners and connections: requests that nobody listens for, and messages
    /// of connections that nobody knows, are dropped instead of refused. Peers send them again.
    pub fn gather(&mut self, until: Nanos) {
        self.gathering = self.gathering.max(until);
    }

    /// A new id (`rdma_create_id`). [`CmError::Limit`] if the owner or the host has too many.
    pub fn create_id(&mut self, owner: Owner, space: PortSpace, service: Service) -> Result<CmId, CmError> {
        self.room_for_id(owner).map_err(|full| CmError::Limit { what: full.what(), limit: full.limit() })?;
        Ok(self.insert_id(owner, space, service, Role::Idle))
    }

    pub(crate) fn insert_id(&mut self, owner: Owner, space: PortSpace, service: Service, role: Role) -> CmId {
        self.last_id += 1;
        let id = CmId(self.last_id);
        let entry = Id { owner: Some(owner), space, service, bound: None, waits_at: None, role };
        let state = entry.state();
        self.ids.insert(id, entry);
        self.owners.entry(owner).or_default().ids.insert(id);
        self.users.count(owner, id);
        self.recount(owner, None, Some(state));
        id
    }

    /// What an id is from now on.
    pub(crate) fn set_role(&mut self, id: CmId, role: Role) {
        self.change(id, |entry| entry.role = role);
    }

    /// The state of a connection from now on.
    pub(crate) fn set_state(&mut self, id: CmId, state: State) {
        self.change(id, |entry| match &mut entry.role {
            Role::Conn(conn) => conn.state = state,
            _ => panic!("tables name connections that exist"),
        });
    }

    /// Changes an id, and what its owner and its user have of its kind.
    fn change(&mut self, id: CmId, change: impl FnOnce(&mut Id)) {
        let entry = self.ids.get_mut(&id).expect("only ids that exist are changed");
        let before = entry.state();
        change(entry);
        let (after, owner) = (entry.state(), entry.owner);
        if let Some(owner) = owner {
            self.recount(owner, Some(before), Some(after));
        }
    }

    /// An id of an owner had one state, and has another; None: it is not there, or not the owner's any more.
    fn recount(&mut self, owner: Owner, before: Option<State>, after: Option<State>) {
        self.owners.get_mut(&owner).expect("the owner of an id has a usage").kinds.change(before, after);
        self.users.recount(owner, before, after);
    }

    /// Gives an idle id an address; port 0 stands for any free one (`rdma_bind_addr`). Gives the address with its port.
    pub fn bind(&mut self, id: CmId, addr: SocketAddr, options: BindOptions) -> Result<SocketAddr, CmError> {
        let entry = self.ids.get_mut(&id).filter(|entry| entry.owner.is_some()).ok_or(CmError::NoSuchId(id))?;
        if entry.bound.is_some() {
            return Err(CmError::Bound);
        }
        if !matches!(entry.role, Role::Idle) {
            return Err(CmError::State { command: "bind", state: entry.state() });
        }
        let port = self.ports.bind(entry.space, addr, id, options, &mut self.rng)?;
        let mut bound = addr;
        bound.set_port(port);
        entry.bound = Some(bound);
        Ok(bound)
    }

    /// Takes requests from now on (`rdma_listen`). The backlog counts requests that the program has not taken; 0 stands for the
    /// most.
    pub fn listen(&mut self, id: CmId, backlog: u32) -> Result<(), CmError> {
        let limits = self.config.limits;
        let entry = self.ids.get_mut(&id).ok_or(CmError::NoSuchId(id))?;
        let owner = entry.owner.ok_or(CmError::NoSuchId(id))?;
        if !matches!(entry.role, Role::Idle) {
            return Err(CmError::State { command: "listen", state: entry.state() });
        }
        let bound = entry.bound.ok_or(CmError::NotBound)?;
        let usage = self.owners.get(&owner).expect("the owner of an id has a usage");
        if usage.kinds.listeners >= limits.listeners_per_owner {
            return Err(CmError::Limit { what: "listeners for a process", limit: limits.listeners_per_owner });
        }
        self.ports.listen(entry.space, bound.port(), id)?;
        let backlog = match usize::try_from(backlog).unwrap_or(limits.backlog) {
            0 => limits.backlog,
            backlog => backlog.min(limits.backlog),
        };
        self.set_role(id, Role::Listener(Listener { backlog, waiting: BTreeMap::new(), waiting_ids: BTreeSet::new() }));
        Ok(())
    }

    /// The program took the event of a connect request: its place in the backlog is free. Harmless at other times.
    pub fn take_request(&mut self, id: CmId) {
        let Some((listener, peer)) = self.ids.get_mut(&id).and_then(|entry| entry.waits_at.take()) else { return };
        // The listener may be gone, but then its number means nobody else.
        let Some(Role::Listener(listener)) = self.ids.get_mut(&listener).map(|entry| &mut entry.role) else { return };
        listener.waiting_ids.remove(&id);
        let count = listener.waiting.get_mut(&peer).expect("it was counted when it came");
        *count -= 1;
        if *count == 0 {
            listener.waiting.remove(&peer);
        }
    }

    /// A process is gone: destroys all its ids.
    pub fn release_owner(&mut self, now: Nanos, owner: Owner) {
        // Destroying a listener destroys others with it.
        while let Some(id) = self.owners.get(&owner).and_then(|usage| usage.ids.first().copied()) {
            self.destroy(now, id).expect("an owner has only ids that exist");
        }
        self.users.leave(owner);
    }

    /// The owner gives an id up: it hears no more of it, and its number and port are free.
    pub(crate) fn disown(&mut self, id: CmId) {
        self.take_request(id);
        let entry = self.ids.get_mut(&id).expect("the caller has looked");
        let owner = entry.owner.take().expect("the caller has looked");
        let state = entry.state();
        if let Some(bound) = entry.bound.take() {
            self.ports.release(entry.space, bound.port(), id);
        }
        self.recount(owner, Some(state), None);
        self.users.discount(owner, id);
        let usage = self.owners.get_mut(&owner).expect("the owner of an id has a usage");
        usage.ids.remove(&id);
        if usage.ids.is_empty() {
            self.owners.remove(&owner);
        }
    }

    /// An id without an owner is done, or has something left to do.
    pub(crate) fn linger(&mut self, id: CmId) {
        let Some(entry) = self.ids.get(&id).filter(|entry| entry.owner.is_none()) else { return };
        if entry.state() == State::DreqSent {
            self.owing.insert(id);
        } else {
            self.owing.remove(&id);
            self.waiting.insert(id);
        }
    }

    /// Ids without an owner.
    pub(crate) fn lingering(&self) -> usize {
        self.owing.len() + self.waiting.len()
    }

    /// Ids that linger are not kept beyond the limit. Those that owe their peer nothing go first.
    pub(crate) fn evict(&mut self) {
        while self.lingering() > self.config.limits.lingering {
            let oldest = *self.waiting.first().or(self.owing.first()).expect("it is not empty");
            self.finish(oldest);
            self.stats.lingering_evicted += 1;
        }
    }

    /// Nothing is left to do for the connection. Without an owner the id is gone.
    pub(crate) fn finish(&mut self, id: CmId) {
        self.unregister(id);
        let entry = self.ids.get_mut(&id).expect("only ids that exist are finished");
        if entry.owner.is_some() {
            self.set_role(id, Role::Done);
        } else {
            self.ids.remove(&id);
            self.owing.remove(&id);
            self.waiting.remove(&id);
        }
    }

    /// Takes a connection out of all tables and stops its timer.
    fn unregister(&mut self, id: CmId) {
        self.set_timer(id, None);
        let Some(conn) = self.ids.get(&id).and_then(Id::conn) else { return };
        let peer = Peer::of(&conn.path);
        let (comm_id, qpn, remote) = (conn.comm_id, conn.param.qpn, conn.remote);
        remove_own(&mut self.by_comm_id, &comm_id, id);
        remove_own(&mut self.by_request, &(comm_id, peer), id);
        remove_own(&mut self.by_qpn, &qpn, id);
        if let Some(remote) = remote {
            remove_own(&mut self.by_remote, &(remote.comm_id, remote.ca_guid, peer), id);
            remove_own(&mut self.by_remote_qpn, &(remote.qpn, remote.ca_guid, peer), id);
        }
    }

    /// Both ends may use their queue pairs again at once.
    pub(crate) fn free_queue_pairs(&mut self, id: CmId) {
        let conn = self.conn(id);
        let (qpn, remote, peer) = (conn.param.qpn, conn.remote, Peer::of(&conn.path));
        remove_own(&mut self.by_qpn, &qpn, id);
        if let Some(remote) = remote {
            remove_own(&mut self.by_remote_qpn, &(remote.qpn, remote.ca_guid, peer), id);
        }
    }

    /// Whether a queue pair number is in a connection or in timewait. Such a number is not given out anew: the old peer would take
    /// it for the old connection.
    pub fn holds_qpn(&self, qpn: u32) -> bool {
        self.by_qpn.contains_key(&qpn)
    }

    /// A queue pair may connect to `peer` unless it has a connection, or had one with that peer moments ago.
    pub(crate) fn check_qpn(&self, qpn: u32, peer: Peer) -> Result<(), CmError> {
        let Some(holder) = self.by_qpn.get(&qpn) else { return Ok(()) };
        let conn = self.conn(*holder);
        if conn.state == State::Timewait && Peer::of(&conn.path) != peer {
            return Ok(());
        }
        Err(CmError::QpBusy { qpn })
    }

    /// A number for a new connection or request: random, so that nobody else can guess it.
    pub(crate) fn new_comm_id(&mut self) -> u32 {
        loop {
            let comm_id = self.rng.next_u32();
            if comm_id != 0 && !self.by_comm_id.contains_key(&comm_id) {
                return comm_id;
            }
        }
    }

    pub(crate) fn new_psn(&mut self) -> u32 {
        self.rng.random_range(0..1 << 24)
    }

    /// The id, if it is its owner's still.
    pub(crate) fn owned(&self, id: CmId) -> Result<&Id, CmError> {
        self.ids.get(&id).filter(|entry| entry.owner.is_some()).ok_or(CmError::NoSuchId(id))
    }

    /// The id is its owner's, for that service and in one of the states.
    pub(crate) fn require(
        &self,
        command: &'static str,
        id: CmId,
        service: Service,
        states: &[State],
    ) -> Result<State, CmError> {
        let entry = self.owned(id)?;
        if entry.service != service {
            return Err(CmError::Service { command });
        }
        let state = entry.state();
        if states.contains(&state) { Ok(state) } else { Err(CmError::State { command, state }) }
    }

    pub(crate) fn conn(&self, id: CmId) -> &Conn {
        self.ids.get(&id).and_then(Id::conn).expect("tables name connections that exist")
    }

    pub(crate) fn conn_mut(&mut self, id: CmId) -> &mut Conn {
        match self.ids.get_mut(&id).map(|entry| &mut entry.role) {
            Some(Role::Conn(conn)) => conn,
            _ => panic!("tables name connections that exist"),
        }
    }

    pub(crate) fn set_timer(&mut self, id: CmId, at: Option<Nanos>) {
        let Some(Role::Conn(conn)) = self.ids.get_mut(&id).map(|entry| &mut entry.role) else { return };
        if let Some(old) = std::mem::replace(&mut conn.timer, at) {
            self.timers.remove(&(old, id));
        }
        if let Some(at) = at {
            self.timers.insert((at, id));
        }
    }

    pub(crate) fn send(&mut self, path: Path, mad: Mad) {
        if self.transmits.len() >= MAX_TRANSMITS {
            self.stats.tx_overflow += 1;
            return;
        }
        self.stats.tx_msgs += 1;
        self.transmits.push_back(Transmit { path, mad });
    }

    /// Sends a message of a connection.
    pub(crate) fn send_of(&mut self, id: CmId, mad: Mad) {
        let path = self.conn(id).path;
        self.send(path, mad);
    }

    pub(crate) fn raise(&mut self, id: CmId, kind: EventKind) {
        if let Some(owner) = self.ids.get(&id).and_then(|entry| entry.owner) {
            self.events.push_back(Event { id, owner, kind });
        }
    }

    /// The next datagram to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// The next event. An event of an id that was destroyed meanwhile does not come.
    pub fn poll_event(&mut self) -> Option<Event> {
        loop {
            let event = self.events.pop_front()?;
            if self.ids.get(&event.id).is_some_and(|entry| entry.owner == Some(event.owner)) {
                return Some(event);
            }
        }
    }

    /// When [`Cm::handle_timeout`] is due.
    pub fn next_timeout(&self) -> Option<Nanos> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Time has passed. If more is due than one call does, [`Cm::next_timeout`] lies in the past still.
    pub fn handle_timeout(&mut self, now: Nanos) {
        for _ in 0..TIMERS_PER_CALL {
            let Some((at, id)) = self.timers.first().copied().filter(|(at, _)| *at <= now) else { break };
            debug_assert_eq!(self.conn(id).timer, Some(at));
            self.set_timer(id, None);
            self.timer_ran_out(now, id);
        }
        self.evict();
    }

    /// Whose an id is.
    pub fn owner(&self, id: CmId) -> Result<Owner, CmError> {
        self.owned(id).map(|entry| entry.owner.expect("it has an owner"))
    }

    /// The state of an id.
    pub fn state(&self, id: CmId) -> Result<State, CmError> {
        self.owned(id).map(Id::state)
    }

    /// Requests that came to a listener and that the program has not taken.
    pub fn waiting_at(&self, listener: CmId) -> Vec<CmId> {
        match self.ids.get(&listener).map(|entry| &entry.role) {
            Some(Role::Listener(listener)) => listener.waiting_ids.iter().copied().collect(),
            _ => Vec::new(),
        }
    }

    /// The address of an id, and the peer's.
    pub fn addresses(&self, id: CmId) -> Result<(Option<SocketAddr>, Option<SocketAddr>), CmError> {
        let entry = self.owned(id)?;
        let conn = entry.conn();
        Ok((conn.map(|conn| conn.local).or(entry.bound), conn.map(|conn| conn.peer)))
    }

    /// The attributes for the queue pair of an id: from CONNECT_REQUEST or CONNECT_RESPONSE on.
    pub fn qp_parameters(&self, id: CmId) -> Result<QpParameters, CmError> {
        let entry = self.owned(id)?;
        entry.conn().and_then(Conn::parameters).ok_or(CmError::State { command: "init_qp_attr", state: entry.state() })
    }

    /// All ids, those that linger included.
    pub fn ids(&self) -> impl Iterator<Item = IdInfo> {
        self.ids_from(CmId(0))
    }

    /// Those from a number on.
    pub fn ids_from(&self, first: CmId) -> impl Iterator<Item = IdInfo> {
        self.ids.range(first..).map(|(id, entry)| entry.info(*id))
    }

    /// Those of a user's owners, from a number on.
    pub fn ids_of_user_from(&self, user: User, first: CmId) -> impl Iterator<Item = IdInfo> {
        self.users.ids(user).into_iter().flat_map(move |ids| ids.range(first..)).map(|id| self.ids[id].info(*id))
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// What must hold between any two calls; for tests and fuzzers. The work grows with the number of ids.
    ///
    /// # Panics
    /// It does not hold.
    pub fn check(&self) {
        let limits = &self.config.limits;
        assert!(self.ids_with_owners() <= limits.ids, "{} ids", self.ids_with_owners());
        assert!(self.owing.len() + self.waiting.len() <= limits.lingering);
        assert!(self.owing.is_disjoint(&self.waiting));
        let mut timers = 0;
        let mut waiting = BTreeMap::<CmId, usize>::new();
        for (id, entry) in &self.ids {
            let lingers = if entry.state() == State::DreqSent { &self.owing } else { &self.waiting };
            assert_eq!(entry.owner.is_none(), lingers.contains(id), "{id:?} lingers or has an owner");
            if let Some(owner) = entry.owner {
                assert!(self.owners[&owner].ids.contains(id), "{id:?} is counted");
            } else {
                assert!(entry.conn().is_some_and(|conn| conn.timer.is_some()), "{id:?} lingers for ever");
            }
            if let Some((listener, _)) = entry.waits_at {
                *waiting.entry(listener).or_default() += 1;
            }
            let Some(conn) = entry.conn() else { continue };
            timers += usize::from(conn.timer.is_some());
            assert_eq!(conn.timer.is_some(), conn.timer.is_some_and(|at| self.timers.contains(&(at, *id))));
            let must_time = matches!(
                conn.state,
                State::ReqSent
                    | State::MraReqRcvd
                    | State::RepSent
                    | State::MraRepRcvd
                    | State::DreqSent
                    | State::Timewait
                    | State::SidrReqSent
                    | State::SidrRepSent
            );
            assert_eq!(conn.timer.is_some(), must_time, "{id:?} in {}", conn.state);
        }
        assert_eq!(self.timers.len(), timers, "timers of ids that are gone");
        for (id, entry) in &self.ids {
            let Role::Listener(listener) = &entry.role else { continue };
            assert_eq!(listener.waiting_ids.len(), waiting.get(id).copied().unwrap_or(0), "{id:?}");
            assert_eq!(listener.waiting_ids.len(), listener.waiting.values().sum::<usize>());
            assert!(listener.waiting_ids.len() <= listener.backlog);
        }
        for usage in self.owners.values() {
            assert!(!usage.ids.is_empty() && usage.ids.len() <= limits.ids_per_owner);
            assert!(usage.kinds.listeners <= limits.listeners_per_owner);
            let mut kinds = Kinds::default();
            usage.ids.iter().for_each(|id| kinds.change(None, Some(self.ids[id].state())));
            assert_eq!(usage.kinds, kinds);
        }
        self.users.check(&self.owners);
        assert!(self.users.ids_of_guests() <= limits.ids_of_guests);
        let tables = [
            self.by_comm_id.values().collect::<Vec<_>>(),
            self.by_remote.values().collect(),
            self.by_remote_qpn.values().collect(),
            self.by_qpn.values().collect(),
            self.by_request.values().collect(),
        ];
        for id in tables.into_iter().flatten() {
            assert!(self.ids.get(id).and_then(Id::conn).is_some(), "a table names {id:?}, which is no connection");
        }
        if self.ids.is_empty() {
            assert!(self.ports.is_empty() && self.owners.is_empty());
        }
    }
}

/// Takes an entry out if it is that id's.
fn remove_own<K: Ord>(table: &mut BTreeMap<K, CmId>, key: &K, id: CmId) {
    if table.get(key) == Some(&id) {
        table.remove(key);
    }
}
