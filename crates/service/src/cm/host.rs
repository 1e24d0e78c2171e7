//! The connection manager of a service: whose ids are whose, and where events go.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ferroce_cm::{
    AcceptDatagramParam, AcceptParam, BindOptions, Cm, CmError, CmId, Config, ConnectParam, DropReason, Event,
    EventKind, IdInfo, Kinds, Nanos, Owner, ResolveParam, Service, State, User,
};
use ferroce_wire::mad::{PortSpace, RejReason};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::protocol::{CmEvent, CmReply, CmRequest, Kept};
use super::{Gsi, Inbound};
use crate::closing::{self, Closer};
use crate::config::Limits;
use crate::protocol::CM_ID_PAGE;
use crate::{ServiceError, seqpacket};

/// The log is told of limits once within this time.
const SAY_AGAIN: Duration = Duration::from_secs(10);

/// Messages from one channel that are taken before others get their turn.
const TAKEN_PER_TURN: usize = 64;

/// Everything of the connection manager that a service owns.
#[derive(Debug)]
pub(crate) struct Host {
    cm: Cm,
    gsi: Gsi,
    /// Time 0 of `cm`.
    epoch: Instant,
    channels: BTreeMap<u64, Channel>,
    /// Channels of clients; who has none is left out.
    channels_of: BTreeMap<u64, BTreeSet<u64>>,
    last_channel: u64,
    /// Where an id's events go.
    channel_of: BTreeMap<CmId, u64>,
    /// Channels whose descriptors the service shall watch differently: they have events to send, or none any more.
    rewatch: Vec<u64>,
    refuses_descriptors: bool,
    /// Packets that could not be sent.
    pub(crate) unsent: u64,
    /// When the log was told of a limit.
    said: Option<Instant>,
}

/// The service's end of an event channel.
#[derive(Debug)]
struct Channel {
    client: u64,
    socket: OwnedFd,
    /// Events that did not fit the socket.
    waiting: VecDeque<Event>,
    /// Ids whose events go here.
    ids: BTreeSet<CmId>,
}

/// What the service does with a request.
pub(crate) enum Outcome {
    Reply(CmReply),
    /// The number of the new channel, and the program's end of it.
    Channel(u64, OwnedFd),
}

/// What a request needs to know about its client.
pub(crate) struct Asker<'a> {
    pub(crate) client: u64,
    /// Whether a queue pair number lies in one of its lanes.
    pub(crate) holds_qpn: &'a dyn Fn(u32) -> bool,
    /// GUID of the device with a local address.
    pub(crate) guid_of: &'a dyn Fn(std::net::IpAddr) -> Option<u64>,
}

impl Host {
    pub(crate) fn new(port: u16, limits: &Limits, fault: crate::config::Fault) -> Host {
        let mut config = Config::new(rand::random());
        let of_cm = &mut config.limits;
        of_cm.backlog = of_cm.backlog.min(limits.process.pending_connections as usize);
        of_cm.ids_per_owner = limits.process.ids as usize;
        of_cm.listeners_per_owner = limits.process.listeners as usize;
        of_cm.ids_per_user = limits.user.ids.map(|ids| ids as usize);
        let first = far_from_others();
        config.ids_after = first;
        Host {
            cm: Cm::new(config),
            gsi: Gsi::new(port, fault),
            epoch: Instant::now(),
            channels: BTreeMap::new(),
            channels_of: BTreeMap::new(),
            last_channel: first,
            channel_of: BTreeMap::new(),
            rewatch: Vec::new(),
            refuses_descriptors: !fault.old_kernel,
            unsent: 0,
            said: None,
        }
    }

    fn now(&self) -> Nanos {
        self.epoch.elapsed().as_nanos() as Nanos
    }

    /// When [`Host::tick`] is due.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.cm.next_timeout().map(|at| self.epoch + Duration::from_nanos(at))
    }

    /// Programs may be bringing along what an earlier service knew.
    pub(crate) fn gather(&mut self, time: Duration) {
        self.cm.gather((self.epoch.elapsed() + time).as_nanos() as Nanos);
    }

    /// Nothing is left to do, not even for programs that are gone.
    pub(crate) fn is_idle(&self) -> bool {
        self.cm.next_timeout().is_none() && self.channels.is_empty()
    }

    /// Says whose a new client is.
    pub(crate) fn enroll(&mut self, client: u64, user: User) {
        self.cm.enroll(Owner(client), user);
    }

    /// How many ids a client has.
    pub(crate) fn ids_of(&self, client: u64) -> usize {
        self.cm.ids_of_owner(Owner(client))
    }

    /// How many of a client's ids are of which kind.
    pub(crate) fn kinds_of(&self, client: u64) -> Kinds {
        self.cm.kinds_of_owner(Owner(client))
    }

    /// How many of a user's.
    pub(crate) fn kinds_of_user(&self, user: User) -> Kinds {
        self.cm.kinds_of_user(user)
    }

    /// How many ids all clients have.
    pub(crate) fn ids_of_all(&self) -> usize {
        self.cm.ids_with_owners()
    }

    /// How many ids a user has, and all guests together.
    pub(crate) fn ids_of_user(&self, user: User) -> (usize, usize) {
        (self.cm.ids_of_user(user), self.cm.ids_of_guests())
    }

    /// How many event channels a client has.
    pub(crate) fn channels_of(&self, client: u64) -> usize {
        self.channels_of.get(&client).map_or(0, BTreeSet::len)
    }

    /// Ids from a number on, as many as a page has, and the number of the next one. None: all users' and those that linger.
    pub(crate) fn page_of_ids(&self, from: u64, user: Option<User>) -> (Vec<IdInfo>, Option<u64>) {
        let from = CmId::from_number(from);
        match user {
            Some(user) => page(self.cm.ids_of_user_from(user, from)),
            None => page(self.cm.ids_from(from)),
        }
    }

    /// Time has passed.
    pub(crate) fn tick(&mut self) {
        let now = self.now();
        if self.cm.next_timeout().is_some_and(|at| at <= now) {
            self.cm.handle_timeout(now);
            self.drain();
        }
    }

    /// Whether packets from there are ours.
    pub(crate) fn sends_from(&self, from: std::net::SocketAddr) -> bool {
        self.gsi.sends_from(from)
    }

    /// A packet to queue pair 1 arrived.
    pub(crate) fn packet(&mut self, inbound: &Inbound<'_>) {
        let now = self.now();
        if let Err(reason) = self.cm.handle_packet(now, &inbound.arrival, inbound.payload) {
            log::debug!("CM: from {}: {reason}", inbound.arrival.src);
            self.say_limit(inbound, reason);
        }
        self.drain();
    }

    /// Requests that are dropped because a limit is reached are told of once in a while, whoever sends them.
    fn say_limit(&mut self, inbound: &Inbound<'_>, reason: DropReason) {
        use DropReason::{BacklogFull, IdLimit, OwnerLimit, PeerLimit, UserLimit};
        let is_limit = matches!(reason, BacklogFull | PeerLimit | OwnerLimit | UserLimit | IdLimit);
        if is_limit && self.said.is_none_or(|at| at.elapsed() >= SAY_AGAIN) {
            self.said = Some(Instant::now());
            log::warn!("requests for connections are dropped, the last one from {}: {reason}", inbound.arrival.src);
        }
    }

    /// A client is gone, with its ids and channels. Gives the channels' descriptors, which are watched no more.
    pub(crate) fn remove_client(&mut self, client: u64) -> Vec<OwnedFd> {
        let now = self.now();
        self.cm.release_owner(now, Owner(client));
        let theirs = self.channels_of.remove(&client).unwrap_or_default();
        let channels: Vec<Channel> = theirs.iter().filter_map(|number| self.channels.remove(number)).collect();
        for id in channels.iter().flat_map(|channel| &channel.ids) {
            self.channel_of.remove(id);
        }
        let sockets = channels.into_iter().map(|channel| channel.socket).collect();
        self.drain();
        sockets
    }

    /// Serves a request.
    pub(crate) fn answer(&mut self, asker: &Asker<'_>, request: CmRequest) -> Result<Outcome, ServiceError> {
        let id = request.id().map(|id| self.own_id(asker.client, id)).transpose()?;
        let reply = match (id, request) {
            (_, CmRequest::OpenChannel) => return self.open_channel(asker.client),
            (_, CmRequest::CreateId { channel, space, datagram }) => self.create_id(asker, channel, space, datagram)?,
            (_, CmRequest::Adopt { channel, connection }) => self.adopt(asker, channel, &connection)?,
            (Some(id), CmRequest::Migrate { channel, .. }) => self.migrate(asker, id, channel)?,
            (Some(id), request) => {
                let reply = self.command(asker, id, request)?;
                self.drain();
                reply
            }
            (None, request) => unreachable!("{request:?} is about an id"),
        };
        Ok(Outcome::Reply(reply))
    }

    fn open_channel(&mut self, client: u64) -> Result<Outcome, ServiceError> {
        let failed = |errno| ServiceError::system("no event channel: cannot make its socket", errno);
        let (socket, theirs) = seqpacket::pair().map_err(failed)?;
        if self.refuses_descriptors {
            closing::refuse(&socket, true);
        }
        // The program's end blocks until the program says otherwise.
        rustix::fs::fcntl_setfl(&theirs, rustix::fs::OFlags::RDWR).map_err(failed)?;
        self.last_channel += 1;
        self.channels
            .insert(self.last_channel, Channel { client, socket, waiting: VecDeque::new(), ids: BTreeSet::new() });
        self.channels_of.entry(client).or_default().insert(self.last_channel);
        Ok(Outcome::Channel(self.last_channel, theirs))
    }

    /// Where an id's events go from now on. Gives where they went before.
    fn attach(&mut self, id: CmId, channel: u64) -> Option<u64> {
        let before = self.detach(id);
        self.channel_of.insert(id, channel);
        self.channels.get_mut(&channel).expect("the caller has looked").ids.insert(id);
        before
    }

    /// An id's events go nowhere any more. Gives where they went.
    fn detach(&mut self, id: CmId) -> Option<u64> {
        let before = self.channel_of.remove(&id)?;
        if let Some(channel) = self.channels.get_mut(&before) {
            channel.ids.remove(&id);
        }
        Some(before)
    }

    /// A channel of the client.
    fn own_channel(&self, client: u64, channel: u64) -> Result<(), ServiceError> {
        match self.channels.get(&channel) {
            Some(entry) if entry.client == client => Ok(()),
            _ => Err(ServiceError::new(libc::EINVAL, format!("the program has no event channel {channel}"))),
        }
    }

    /// An id of the client.
    fn own_id(&self, client: u64, id: u64) -> Result<CmId, ServiceError> {
        let cm_id = CmId::from_number(id);
        match self.cm.owner(cm_id) {
            Ok(owner) if owner == Owner(client) => Ok(cm_id),
            _ => Err(ServiceError::new(libc::EINVAL, format!("the program has no id {id}"))),
        }
    }

    fn create_id(
        &mut self,
        asker: &Asker<'_>,
        channel: u64,
        space: u16,
        datagram: bool,
    ) -> Result<CmReply, ServiceError> {
        self.own_channel(asker.client, channel)?;
        let space = PortSpace::from_number(space).ok_or_else(|| unknown_space(space))?;
        let service = if datagram { Service::Datagram } else { Service::Connected };
        let id = self.cm.create_id(Owner(asker.client), space, service).map_err(refused)?;
        self.attach(id, channel);
        Ok(CmReply::Id { id: id.number() })
    }

    fn adopt(&mut self, asker: &Asker<'_>, channel: u64, connection: &Kept) -> Result<CmReply, ServiceError> {
        self.own_channel(asker.client, channel)?;
        own_qpn(asker, connection.param.qpn)?;
        guid(asker, connection.path.local)?;
        let established = connection.established().ok_or_else(|| unknown_space(connection.space))?;
        let id = self.cm.adopt(Owner(asker.client), &established).map_err(refused)?;
        self.attach(id, channel);
        Ok(CmReply::Id { id: id.number() })
    }

    fn migrate(&mut self, asker: &Asker<'_>, id: CmId, to: u64) -> Result<CmReply, ServiceError> {
        self.own_channel(asker.client, to)?;
        let from = self.attach(id, to).expect("an id has a channel");
        if let Some(channel) = self.channels.get_mut(&from) {
            let (theirs, others) = channel.waiting.drain(..).partition(|event| event.id == id);
            channel.waiting = others;
            let theirs: VecDeque<Event> = theirs;
            self.channels.get_mut(&to).expect("it was just looked up").waiting.extend(theirs);
            self.flush(to);
        }
        Ok(CmReply::Done)
    }

    /// Serves a request about an id of the client.
    fn command(&mut self, asker: &Asker<'_>, id: CmId, request: CmRequest) -> Result<CmReply, ServiceError> {
        let now = self.now();
        match request {
            CmRequest::OpenChannel
            | CmRequest::CreateId { .. }
            | CmRequest::Migrate { .. }
            | CmRequest::Adopt { .. } => unreachable!("served before"),
            CmRequest::Keep { .. } => {
                return Ok(CmReply::Kept(self.cm.established(id).map_err(refused)?.into()));
            }
            CmRequest::Bind { addr, reuse, v6_only, .. } => {
                let addr = self.cm.bind(id, addr, BindOptions { reuse, v6_only }).map_err(refused)?;
                return Ok(CmReply::Address { addr });
            }
            CmRequest::QpParameters { .. } => {
                return Ok(CmReply::QpParameters(self.cm.qp_parameters(id).map_err(refused)?.into()));
            }
            CmRequest::Listen { backlog, .. } => self.cm.listen(id, backlog),
            CmRequest::Connect { path, port, param, private_data, ece, .. } => {
                own_qpn(asker, param.qpn)?;
                let ca_guid = guid(asker, path.local)?;
                let (path, param, ece) = (path.into(), param.into(), ece.into());
                let connect = ConnectParam { path, port, ca_guid, param, private_data: &private_data, ece };
                self.cm.connect(now, id, &connect)
            }
            CmRequest::Resolve { path, port, private_data, .. } => {
                guid(asker, path.local)?;
                self.cm.resolve(now, id, &ResolveParam { path: path.into(), port, private_data: &private_data })
            }
            CmRequest::Accept { param, private_data, ece, .. } => {
                own_qpn(asker, param.qpn)?;
                let (local, _) = self.cm.addresses(id).map_err(refused)?;
                let ca_guid = local.map_or(Ok(0), |local| guid(asker, local.ip()))?;
                let (param, ece) = (param.into(), ece.into());
                self.cm.accept(now, id, &AcceptParam { ca_guid, param, private_data: &private_data, ece })
            }
            CmRequest::AcceptDatagram { qpn, qkey, private_data, ece, .. } => {
                own_qpn(asker, qpn)?;
                let ece = ece.into();
                let accept = AcceptDatagramParam { qpn, qkey, private_data: &private_data, ece };
                self.cm.accept_datagram(now, id, &accept)
            }
            CmRequest::Reject { reason, private_data, .. } => self.cm.reject(now, id, RejReason(reason), &private_data),
            CmRequest::Establish { .. } => self.cm.establish(id),
            CmRequest::Notify { .. } => self.cm.notify(id),
            CmRequest::Disconnect { .. } => self.cm.disconnect(now, id),
            CmRequest::Destroy { .. } => {
                // Requests that were not taken go with it.
                let requests = self.cm.waiting_at(id);
                let listened = self.cm.state(id) == Ok(State::Listen);
                let outcome = self.cm.destroy(now, id);
                self.forget_events_of(id, listened);
                for id in requests.into_iter().chain([id]) {
                    self.detach(id);
                }
                outcome
            }
        }
        .map_err(refused)?;
        Ok(CmReply::Done)
    }

    /// Events that wait for an id that was given up: a program that makes and destroys ids and never reads would have them grow. Of a
    /// listener, those of requests that went with it, too.
    fn forget_events_of(&mut self, id: CmId, listened: bool) {
        let Some(number) = self.channel_of.get(&id).copied() else { return };
        let Some(channel) = self.channels.get_mut(&number).filter(|channel| !channel.waiting.is_empty()) else {
            return;
        };
        let cm = &self.cm;
        channel.waiting.retain(|event| event.id != id && (!listened || cm.owner(event.id).is_ok()));
        if channel.waiting.is_empty() {
            // It waits for room no more.
            self.rewatch.push(number);
        }
    }

    /// Sends what the machine wants to send, and hands its events out.
    fn drain(&mut self) {
        while let Some(transmit) = self.cm.poll_transmit() {
            if let Err(error) = self.gsi.send(&transmit) {
                // As if it had been lost: the machine sends again, or the peer does.
                self.unsent += 1;
                log::debug!("CM: cannot send to {}: {error}", transmit.path.remote);
            }
        }
        while let Some(event) = self.cm.poll_event() {
            if let EventKind::ConnectRequest(request) = &event.kind
                && let Some(channel) = self.channel_of.get(&request.listener).copied()
            {
                self.attach(event.id, channel);
            }
            let Some(number) = self.channel_of.get(&event.id).copied() else { continue };
            let Some(channel) = self.channels.get_mut(&number) else { continue };
            channel.waiting.push_back(event);
            self.flush(number);
        }
    }

    /// Sends events until the channel's socket is full.
    pub(crate) fn flush(&mut self, number: u64) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let waited = !channel.waiting.is_empty();
        while let Some(event) = channel.waiting.pop_front() {
            // Its id was given up meanwhile.
            if self.cm.owner(event.id).is_err() {
                self.channel_of.remove(&event.id);
                channel.ids.remove(&event.id);
                continue;
            }
            let message = serde_json::to_vec(&CmEvent::from(event.clone())).expect("events have string keys");
            match seqpacket::send(&channel.socket, &[&message], &[], SendFlags::DONTWAIT) {
                Ok(()) => {}
                Err(Errno::AGAIN) => {
                    channel.waiting.push_front(event);
                    break;
                }
                // Its other end is closed; the hang-up follows.
                Err(_) => channel.waiting.clear(),
            }
        }
        if waited || !channel.waiting.is_empty() {
            self.rewatch.push(number);
        }
    }

    /// Channels to watch differently, each with its descriptor and whether it waits for room.
    pub(crate) fn rewatch(&mut self) -> impl Iterator<Item = (u64, BorrowedFd<'_>, bool)> {
        let numbers = std::mem::take(&mut self.rewatch);
        numbers.into_iter().filter_map(|number| {
            let channel = self.channels.get(&number)?;
            Some((number, channel.socket.as_fd(), !channel.waiting.is_empty()))
        })
    }

    /// Whose channel it is.
    pub(crate) fn client_of(&self, number: u64) -> Option<u64> {
        self.channels.get(&number).map(|channel| channel.client)
    }

    /// The service's end of a channel.
    pub(crate) fn channel_fd(&self, number: u64) -> Option<BorrowedFd<'_>> {
        self.channels.get(&number).map(|channel| channel.socket.as_fd())
    }

    /// The program took events: those that were requests free their places in the backlog. Gives the descriptor if the program has
    /// closed its end for good; its ids are gone then.
    pub(crate) fn serve_channel(&mut self, number: u64, hung_up: bool, closer: &Closer) -> Option<OwnedFd> {
        for _ in 0..TAKEN_PER_TURN {
            let channel = self.channels.get(&number)?;
            let client = channel.client;
            let mut id = [0; 8];
            if closer.must_not_receive(&channel.socket) {
                return self.close_channel(number);
            }
            match closer.recv(&channel.socket, &mut id) {
                Ok(received) if received.descriptors.len() > 0 => return self.close_channel(number),
                Ok(received) if received.len == 8 => {
                    if let Ok(id) = self.own_id(client, u64::from_le_bytes(id)) {
                        self.cm.take_request(id);
                    }
                }
                Ok(received) if received.len > 0 => {}
                Err(Errno::AGAIN) if !hung_up => return None,
                Err(Errno::INTR) => {}
                Ok(_) | Err(_) => return self.close_channel(number),
            }
        }
        None
    }

    fn close_channel(&mut self, number: u64) -> Option<OwnedFd> {
        let channel = self.channels.remove(&number)?;
        let theirs = self.channels_of.get_mut(&channel.client).expect("its client has it");
        theirs.remove(&number);
        if theirs.is_empty() {
            self.channels_of.remove(&channel.client);
        }
        let now = self.now();
        for id in channel.ids {
            self.detach(id);
            // A listener takes requests with it: they may come later in this list, or be in another channel's.
            let requests = self.cm.waiting_at(id);
            let _gone = self.cm.destroy(now, id);
            for request in requests {
                self.detach(request);
            }
        }
        self.drain();
        Some(channel.socket)
    }
}

fn page(mut ids: impl Iterator<Item = IdInfo>) -> (Vec<IdInfo>, Option<u64>) {
    let page = ids.by_ref().take(CM_ID_PAGE).collect();
    (page, ids.next().map(|info| info.id.number()))
}

/// Where numbers of ids and channels begin: programs bring theirs over from a service that has crashed, and still use the old numbers for a
/// moment. Numbers stay below 2^53, which every reader of JSON can take.
fn far_from_others() -> u64 {
    const APART_SHIFT: u32 = 20;
    u64::from(rand::random::<u32>()) << APART_SHIFT
}

fn unknown_space(space: u16) -> ServiceError {
    ServiceError::new(libc::EPROTONOSUPPORT, format!("unknown port space {space:#x}"))
}

fn refused(error: CmError) -> ServiceError {
    ServiceError::new(error.errno(), error.to_string())
}

/// Queue pairs are the program's own: others' numbers would stop them from connecting.
fn own_qpn(asker: &Asker<'_>, qpn: u32) -> Result<(), ServiceError> {
    if (asker.holds_qpn)(qpn) {
        Ok(())
    } else {
        Err(ServiceError::new(libc::EINVAL, format!("queue pair {qpn:#x} is in no lane of this program")))
    }
}

fn guid(asker: &Asker<'_>, local: std::net::IpAddr) -> Result<u64, ServiceError> {
    (asker.guid_of)(local.to_canonical())
        .ok_or_else(|| ServiceError::new(libc::ENODEV, format!("no RDMA device has the address {local}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It made ids, had events come for them, gave them up, and never read: the service kept them all.
    #[test]
    fn events_of_ids_that_are_gone_are_not_kept() {
        let mut host = Host::new(ferroce_testkit::free_port(), &Limits::default(), crate::config::Fault::default());
        let asker = Asker { client: 1, holds_qpn: &|_| true, guid_of: &|_| Some(1) };
        let Ok(Outcome::Channel(channel, _theirs)) = host.answer(&asker, CmRequest::OpenChannel) else {
            panic!("no channel")
        };
        let create = |host: &mut Host| {
            let create = CmRequest::CreateId { channel, space: 0x0106, datagram: false };
            match host.answer(&asker, create) {
                Ok(Outcome::Reply(CmReply::Id { id })) => id,
                _ => panic!("no id"),
            }
        };
        let event = |id| {
            let kind = EventKind::Disconnected { timed_out: false };
            Event { id: CmId::from_number(id), owner: Owner(1), kind }
        };
        let (kept, gone) = (create(&mut host), create(&mut host));
        host.channels.get_mut(&channel).unwrap().waiting.extend([event(gone), event(kept), event(gone)]);
        assert!(host.answer(&asker, CmRequest::Destroy { id: gone }).is_ok());
        assert_eq!(host.channels[&channel].waiting, [event(kept)]);
        assert_eq!((host.channels_of(1), host.ids_of(1)), (1, 1));
        drop(host.close_channel(channel));
        assert_eq!((host.channels_of(1), host.ids_of(1)), (0, 0));
    }

    /// A listener goes with its channel, and takes requests with it whose events went to another one.
    #[test]
    fn nothing_is_kept_of_requests_whose_listener_is_gone() {
        let mut host = Host::new(ferroce_testkit::free_port(), &Limits::default(), crate::config::Fault::default());
        let asker = Asker { client: 1, holds_qpn: &|_| true, guid_of: &|_| Some(1) };
        let mut ends = Vec::new();
        let mut channel = |host: &mut Host| match host.answer(&asker, CmRequest::OpenChannel) {
            Ok(Outcome::Channel(channel, theirs)) => {
                ends.push(theirs);
                channel
            }
            _ => panic!("no channel"),
        };
        let (first, second) = (channel(&mut host), channel(&mut host));
        let ask = |host: &mut Host, request| match host.answer(&asker, request) {
            Ok(Outcome::Reply(reply)) => reply,
            _ => panic!("refused"),
        };
        let space = PortSpace::Tcp as u16;
        let CmReply::Id { id } = ask(&mut host, CmRequest::CreateId { channel: first, space, datagram: false }) else {
            panic!("no id")
        };
        let here = "127.0.0.1:0".parse().unwrap();
        let CmReply::Address { addr } =
            ask(&mut host, CmRequest::Bind { id, addr: here, reuse: false, v6_only: false })
        else {
            panic!("no address")
        };
        ask(&mut host, CmRequest::Listen { id, backlog: 0 });
        request(&mut host, addr);
        assert_eq!((host.ids_of(1), host.kinds_of(1).pending), (2, 1));
        ask(&mut host, CmRequest::Migrate { id, channel: second });
        drop(host.close_channel(second));
        assert_eq!((host.ids_of(1), host.channel_of.len(), host.channels[&first].ids.len()), (0, 0, 0));
    }

    /// A request of a stranger for a connection.
    fn request(host: &mut Host, to: std::net::SocketAddr) {
        let peer: std::net::IpAddr = [10, 0, 0, 2].into();
        let mut cm = Cm::new(Config::new([7; 32]));
        let id = cm.create_id(Owner(1), PortSpace::Tcp, Service::Connected).unwrap();
        let path = ferroce_cm::Path::new(peer, to.ip());
        let param = ferroce_cm::ConnectionParam { qpn: 0x11, ..Default::default() };
        let connect =
            ConnectParam { path, port: to.port(), ca_guid: 2, param, private_data: &[], ece: Default::default() };
        cm.connect(0, id, &connect).unwrap();
        let mad = cm.poll_transmit().unwrap().mad.emit();
        let arrival = ferroce_cm::Arrival { src: peer, dst: to.ip(), ifindex: 1 };
        let now = host.now();
        host.cm.handle_packet(now, &arrival, &mad).unwrap();
        host.drain();
    }
}
