//! What a management datagram does.

use std::net::IpAddr;

use ferroce_wire::mad::{
    ApStatus, Apr, Dreq, IpHeader, Mad, Message, Mra, Rej, RejReason, Rep, Req, ServiceId, Subject, address_of,
};

use crate::cm::{Cm, Id, Role};
use crate::conn::{Conn, Peer, Remote, drep, rej};
use crate::event::{ConnectRequest, EventKind};
use crate::param::{Arrival, ConnectionParam, Path, QpType, socket_addr};
use crate::state::{Action, Kind, action};
use crate::{CmId, DropReason, Nanos, REJECT_PRIVATE_DATA, Service, State};

impl Cm {
    /// Takes the payload of a packet to queue pair 1, whose headers passed [`check_gsi`](ferroce_wire::mad::check_gsi). An error
    /// says why it did nothing, or nothing but an answer; it is counted, and only of interest to logs.
    pub fn handle_packet(&mut self, now: Nanos, arrival: &Arrival, payload: &[u8]) -> Result<(), DropReason> {
        self.stats.rx_msgs += 1;
        let arrival = Arrival { src: arrival.src.to_canonical(), dst: arrival.dst.to_canonical(), ..*arrival };
        let result = Mad::parse(payload).map_err(DropReason::from).and_then(|mad| self.handle(now, &arrival, &mad));
        if let Err(reason) = &result {
            self.stats.count(reason);
        }
        self.evict();
        result
    }

    fn handle(&mut self, now: Nanos, arrival: &Arrival, mad: &Mad) -> Result<(), DropReason> {
        match &mad.message {
            Message::Req(req) => self.handle_req(now, arrival, mad, req),
            Message::SidrReq(req) => self.handle_sidr_req(now, arrival, mad, req),
            Message::SidrRep(rep) => self.handle_sidr_rep(now, arrival, mad, rep),
            _ => match self.find(arrival, &mad.message)? {
                Some(id) => self.apply(now, id, mad),
                None => self.answer_unknown(now, arrival, mad),
            },
        }
    }

    /// The connection that a message other than a REQ or of SIDR is for.
    fn find(&self, arrival: &Arrival, message: &Message) -> Result<Option<CmId>, DropReason> {
        let (theirs, ours) = match message {
            Message::Mra(m) => (m.local_comm_id, m.remote_comm_id),
            Message::Rej(m) => (m.local_comm_id, m.remote_comm_id),
            Message::Rep(m) => (m.local_comm_id, m.remote_comm_id),
            Message::Rtu(m) => (m.local_comm_id, m.remote_comm_id),
            Message::Dreq(m) => (m.local_comm_id, m.remote_comm_id),
            Message::Drep(m) => (m.local_comm_id, m.remote_comm_id),
            Message::Lap(m) => (m.local_comm_id, m.remote_comm_id),
            Message::Apr(m) => (m.local_comm_id, m.remote_comm_id),
            Message::Req(_) | Message::SidrReq(_) | Message::SidrRep(_) => return Ok(None),
        };
        let peer = Peer::new(arrival.src, arrival.ifindex);
        if let (0, Message::Rej(rej)) = (ours, message) {
            return Ok(self.find_timed_out(rej, peer));
        }
        let Some(id) = self.by_comm_id.get(&ours).copied() else { return Ok(None) };
        let conn = self.conn(id);
        if conn.service == Service::Datagram {
            return Ok(None);
        }
        if Peer::of(&conn.path) != peer || conn.path.local != arrival.dst {
            return Err(DropReason::WrongPeer { message: message.name() });
        }
        // As long as there was no REP, the peer's number is not known.
        let known = conn.remote.is_none_or(|remote| remote.comm_id == theirs);
        Ok(known.then_some(id))
    }

    /// A REJ (timeout) whose sender never heard our number: it has its own, and its CA GUID (IBA 12.6.7.2).
    fn find_timed_out(&self, rej: &Rej, peer: Peer) -> Option<CmId> {
        if rej.reason != RejReason::TIMEOUT || rej.info_length < 8 {
            return None;
        }
        let guid = u64::from_be_bytes(*rej.info.first_chunk().expect("it has 72 bytes"));
        self.by_remote.get(&(rej.local_comm_id, guid, peer)).copied()
    }

    /// Nobody knows the connection: its other end shall not wait for us.
    fn answer_unknown(&mut self, now: Nanos, arrival: &Arrival, mad: &Mad) -> Result<(), DropReason> {
        if now < self.gathering {
            return Err(DropReason::UnknownId { message: mad.message.name() });
        }
        let answer = match &mad.message {
            Message::Rep(m) => rej(m.remote_comm_id, m.local_comm_id, Subject::REP, RejReason::INVALID_COMM_ID).into(),
            // Its sender is connected alone.
            Message::Rtu(m) => {
                rej(m.remote_comm_id, m.local_comm_id, Subject::OTHER, RejReason::INVALID_COMM_ID).into()
            }
            Message::Dreq(m) => drep(m.remote_comm_id, m.local_comm_id).into(),
            Message::Lap(m) => apr(m.remote_comm_id, m.local_comm_id, ApStatus::INVALID_COMM_ID).into(),
            message => return Err(DropReason::UnknownId { message: message.name() }),
        };
        self.answer(arrival, mad.tid, answer);
        Err(DropReason::UnknownId { message: mad.message.name() })
    }

    /// Answers without a connection.
    pub(crate) fn answer(&mut self, arrival: &Arrival, tid: u64, message: Message) {
        self.send(back(arrival), Mad::new(tid, message));
    }

    /// What the table says.
    pub(crate) fn apply(&mut self, now: Nanos, id: CmId, mad: &Mad) -> Result<(), DropReason> {
        let (state, message) = (self.conn(id).state, mad.message.name());
        let stray = Err(DropReason::Stray { message, state });
        let duplicate = Err(DropReason::Duplicate { message, state });
        match (action(state, Kind::of(&mad.message)), &mad.message) {
            (Action::AskTime, message) => {
                self.ask_time(id, message);
                duplicate
            }
            (Action::AnswerAgain, message) => {
                if self.answer_again(id, message) {
                    duplicate
                } else {
                    stray
                }
            }
            (Action::RejectAgain, _) => {
                self.reject_again(id, mad);
                duplicate
            }
            (Action::Repeated, _) => duplicate,
            (Action::ConfirmRelease, Message::Dreq(dreq)) => {
                self.send_drep(id, mad.tid, dreq);
                if state == State::Timewait {
                    self.prolong_timewait(now, id);
                }
                duplicate
            }
            (Action::RefusePath, Message::Lap(lap)) => {
                let answer = apr(self.conn(id).comm_id, lap.local_comm_id, ApStatus::UNSUPPORTED);
                self.send_of(id, Mad::new(mad.tid, answer.into()));
                Ok(())
            }
            (Action::Wait(to), Message::Mra(mra)) => self.wait(now, id, mra, to),
            (Action::Rejected(to), Message::Rej(rej)) => {
                self.rejected(now, id, rej, to);
                Ok(())
            }
            (Action::Replied, Message::Rep(rep)) => self.replied(now, id, mad, rep),
            (Action::Ready, _) => {
                self.ready(id);
                Ok(())
            }
            (Action::Released, Message::Dreq(dreq)) => self.released(id, mad.tid, dreq),
            (Action::Withdrawn, Message::Dreq(dreq)) => self.withdrawn(id, mad.tid, dreq),
            (Action::ReleasesCrossed, Message::Dreq(dreq)) => self.releases_crossed(now, id, mad.tid, dreq),
            (Action::ReleaseConfirmed, _) => {
                self.raise(id, EventKind::Disconnected { timed_out: false });
                self.enter_timewait(now, id);
                Ok(())
            }
            (Action::Resolved, Message::SidrRep(rep)) => {
                self.resolved(id, mad, rep);
                Ok(())
            }
            _ => stray,
        }
    }

    /// The program is not done with what came again.
    fn ask_time(&mut self, id: CmId, message: &Message) {
        let subject = if matches!(message, Message::Req(_)) { Subject::REQ } else { Subject::REP };
        let mad = self.conn(id).mra(subject, self.config.timing.service_timeout);
        self.send_of(id, mad);
    }

    /// Sends the last message again, if it answers this one: a REP is for the active end, and a REQ for the passive one.
    fn answer_again(&mut self, id: CmId, message: &Message) -> bool {
        let conn = self.conn(id);
        let is_answer = conn.active == matches!(message, Message::Rep(_));
        let Some(last) = conn.last.as_deref().copied().filter(|_| is_answer) else { return false };
        self.send_of(id, last);
        true
    }

    /// The peer has not heard that this is over.
    fn reject_again(&mut self, id: CmId, mad: &Mad) {
        let conn = self.conn(id);
        if let Some(mut reject) = conn.reject.as_deref().copied() {
            if let Message::Rej(rej) = &mut reject.message {
                rej.subject = match mad.message {
                    Message::Req(_) => Subject::REQ,
                    Message::Rep(_) => Subject::REP,
                    _ => Subject::OTHER,
                };
            }
            self.send_of(id, reject);
        } else if let Message::Rep(rep) = &mad.message {
            let answer = rej(conn.comm_id, rep.local_comm_id, Subject::REP, RejReason::INVALID_COMM_INSTANCE);
            self.send_of(id, Mad::new(mad.tid, answer.into()));
        }
    }

    /// Confirms a release, whatever is known of its sender.
    fn send_drep(&mut self, id: CmId, tid: u64, dreq: &Dreq) {
        let mut answer = self.conn(id).drep(tid);
        if let Message::Drep(drep) = &mut answer.message {
            drep.remote_comm_id = dreq.local_comm_id;
        }
        self.send_of(id, answer);
    }

    /// The peer wants more time for our REQ or REP.
    fn wait(&mut self, now: Nanos, id: CmId, mra: &Mra, to: State) -> Result<(), DropReason> {
        let expected = if to == State::MraReqRcvd { Subject::REQ } else { Subject::REP };
        if mra.subject != expected {
            return Err(DropReason::Field { message: "MRA", field: "MRAed message" });
        }
        let timing = self.config.timing;
        let conn = self.conn_mut(id);
        let retry = conn.retry.as_mut().expect("who sent a REQ or REP waits for an answer");
        let Some(until) = retry.prolong(now, &timing, timing.time(mra.service_timeout)) else {
            return Err(DropReason::Duplicate { message: "MRA", state: conn.state });
        };
        self.set_state(id, to);
        self.set_timer(id, Some(until));
        Ok(())
    }

    /// The peer releases the connection.
    fn released(&mut self, id: CmId, tid: u64, dreq: &Dreq) -> Result<(), DropReason> {
        check_dreq(self.conn(id), dreq)?;
        self.stop(id);
        self.set_state(id, State::DreqRcvd);
        let conn = self.conn_mut(id);
        conn.dreq_tid = tid;
        conn.announce_exit = true;
        self.raise(id, EventKind::Disconnected { timed_out: false });
        Ok(())
    }

    /// The peer releases what it only asked for.
    fn withdrawn(&mut self, id: CmId, tid: u64, dreq: &Dreq) -> Result<(), DropReason> {
        check_dreq(self.conn(id), dreq)?;
        self.send_drep(id, tid, dreq);
        let reason = RejReason::CONSUMER_DEFINED;
        self.raise(id, EventKind::Rejected { reason, private_data: Box::new([0; REJECT_PRIVATE_DATA]) });
        self.finish(id);
        Ok(())
    }

    /// Both ends release the connection at once.
    fn releases_crossed(&mut self, now: Nanos, id: CmId, tid: u64, dreq: &Dreq) -> Result<(), DropReason> {
        check_dreq(self.conn(id), dreq)?;
        self.conn_mut(id).dreq_tid = tid;
        self.raise(id, EventKind::Disconnected { timed_out: false });
        self.confirm_release(now, id);
        Ok(())
    }

    /// The peer rejects a REQ or REP, or gives the connection up.
    fn rejected(&mut self, now: Nanos, id: CmId, rej: &Rej, to: State) {
        // A stale connection: our queue pair number shall rest (IBA 12.9.8.3.1).
        let to = if rej.reason == RejReason::STALE_CONNECTION { State::Timewait } else { to };
        let reason = rej.reason;
        self.raise(id, EventKind::Rejected { reason, private_data: Box::new(rej.private_data) });
        if to == State::Timewait {
            self.conn_mut(id).announce_exit = true;
            self.enter_timewait(now, id);
        } else {
            self.finish(id);
        }
    }

    /// The peer accepts.
    fn replied(&mut self, now: Nanos, id: CmId, mad: &Mad, rep: &Rep) -> Result<(), DropReason> {
        let peer = Peer::of(&self.conn(id).path);
        let by_id = (rep.local_comm_id, rep.local_ca_guid, peer);
        let qpn = match self.conn(id).param.qp_type {
            QpType::Rc | QpType::Uc => rep.local_qpn,
            QpType::XrcInitiator | QpType::XrcTarget => rep.local_eecn,
        };
        let by_qpn = (qpn, rep.local_ca_guid, peer);
        let stale = self.by_remote_qpn.get(&by_qpn).copied();
        if stale.is_some() || self.by_remote.contains_key(&by_id) || rep.local_comm_id == 0 {
            // The peer connects twice with one queue pair, or with one number (IBA 12.9.8.3.1).
            let reason = RejReason::STALE_CONNECTION;
            let comm_id = self.conn(id).comm_id;
            let answer = Mad::new(mad.tid, rej(comm_id, rep.local_comm_id, Subject::REP, reason).into());
            self.send_of(id, answer);
            self.raise(id, EventKind::ConnectError);
            self.finish(id);
            self.end_stale(now, stale);
            return Err(DropReason::Rejected(reason));
        }
        self.by_remote.insert(by_id, id);
        self.by_remote_qpn.insert(by_qpn, id);
        self.stop(id);
        self.set_state(id, State::RepRcvd);
        let conn = self.conn_mut(id);
        conn.remote =
            Some(Remote { comm_id: rep.local_comm_id, ca_guid: rep.local_ca_guid, qpn, psn: rep.starting_psn });
        // What the peer issues at once is what we take at once, and the other way round.
        conn.param.responder_resources = rep.initiator_depth;
        conn.param.initiator_depth = rep.responder_resources;
        conn.param.rnr_retry_count = rep.rnr_retry_count;
        let param = ConnectionParam {
            qpn,
            qp_type: conn.param.qp_type,
            srq: rep.srq,
            responder_resources: rep.initiator_depth,
            initiator_depth: rep.responder_resources,
            flow_control: rep.end_to_end_flow_control,
            retry_count: conn.param.retry_count,
            rnr_retry_count: rep.rnr_retry_count,
        };
        let private_data = Box::new(rep.private_data);
        self.raise(id, EventKind::ConnectResponse { param, private_data, ece: mad.ece() });
        Ok(())
    }

    /// A connection that its peer forgot: it ends.
    fn end_stale(&mut self, now: Nanos, id: Option<CmId>) {
        if let Some(id) = id
            && self.conn(id).state == State::Established
        {
            self.send_dreq(now, id);
        }
    }

    /// A peer wants a connection.
    fn handle_req(&mut self, now: Nanos, arrival: &Arrival, mad: &Mad, req: &Req) -> Result<(), DropReason> {
        let peer = Peer::new(arrival.src, arrival.ifindex);
        let key = (req.local_comm_id, req.local_ca_guid, peer);
        if let Some(id) = self.by_remote.get(&key).copied() {
            return self.apply(now, id, mad);
        }
        let request = match check_req(arrival, req) {
            Ok(request) => request,
            Err((reason, error)) => {
                self.reject_unknown(arrival, mad.tid, req, reason);
                return Err(error);
            }
        };
        let by_qpn = (req.local_qpn, req.local_ca_guid, peer);
        if let Some(old) = self.by_remote_qpn.get(&by_qpn).copied() {
            let reason = RejReason::STALE_CONNECTION;
            self.reject_unknown(arrival, mad.tid, req, reason);
            self.end_stale(now, Some(old));
            return Err(DropReason::Rejected(reason));
        }
        let Some(listener) = self.listener(Service::Connected, req.service_id, arrival.dst) else {
            if self.is_closing(now, req.service_id) {
                return Err(DropReason::Closing);
            }
            let reason = RejReason::INVALID_SERVICE_ID;
            self.reject_unknown(arrival, mad.tid, req, reason);
            return Err(DropReason::Rejected(reason));
        };
        let (param, header) = (request.param, request.header);
        let path = request.path;
        let (_, port) = req.service_id.port().expect("it has a listener");
        let mut conn = Conn::new(
            Service::Connected,
            State::ReqRcvd,
            path,
            socket_addr(arrival.dst, port, arrival.ifindex),
            socket_addr(arrival.src, header.src_port, arrival.ifindex),
        );
        let timing = self.config.timing;
        // Now, since the program may bring its queue pair to RTS before it accepts.
        conn.psn = self.new_psn();
        conn.tid = mad.tid;
        conn.remote = Some(Remote {
            comm_id: req.local_comm_id,
            ca_guid: req.local_ca_guid,
            qpn: req.local_qpn,
            psn: req.starting_psn,
        });
        conn.param = ConnectionParam { qpn: 0, srq: false, ..param };
        // No shorter than a program may need at the least, no longer than the largest code.
        conn.response_timeout = timing.time(req.local_cm_response_timeout.max(14));
        conn.max_retries = req.max_cm_retries;
        conn.comm_id = self.new_comm_id();
        let comm_id = conn.comm_id;
        let (local, peer_addr) = (conn.local, conn.peer);
        let id = self.admit(listener, peer, conn)?;
        self.by_comm_id.insert(comm_id, id);
        self.by_remote.insert(key, id);
        self.by_remote_qpn.insert(by_qpn, id);
        self.raise(
            id,
            EventKind::ConnectRequest(Box::new(ConnectRequest {
                listener,
                service: Service::Connected,
                local,
                peer: peer_addr,
                path,
                param,
                ca_guid: req.local_ca_guid,
                private_data: program_data(&req.private_data),
                ece: mad.ece(),
            })),
        );
        Ok(())
    }

    fn reject_unknown(&mut self, arrival: &Arrival, tid: u64, req: &Req, reason: RejReason) {
        self.answer(arrival, tid, rej(0, req.local_comm_id, Subject::REQ, reason).into());
    }

    /// Who listens for a service id at an address of ours.
    pub(crate) fn listener(&self, service: Service, service_id: ServiceId, local: IpAddr) -> Option<CmId> {
        let (space, port) = service_id.port()?;
        let id = self.ports.listener(space, port, local)?;
        (self.ids[&id].service == service).then_some(id)
    }

    /// Gives a request a place in its listener's backlog and an id, as far as limits allow.
    pub(crate) fn admit(&mut self, listener: CmId, peer: Peer, conn: Conn) -> Result<CmId, DropReason> {
        let limits = self.config.limits;
        let Some(Id { owner: Some(owner), space, service, role: Role::Listener(entry), .. }) =
            self.ids.get_mut(&listener)
        else {
            panic!("{listener:?} is a listener with an owner");
        };
        let (owner, space, service) = (*owner, *space, *service);
        if entry.waiting_ids.len() >= entry.backlog {
            return Err(DropReason::BacklogFull);
        }
        if entry.waiting.get(&peer).copied().unwrap_or(0) >= limits.pending_per_peer {
            return Err(DropReason::PeerLimit);
        }
        self.room_for_id(owner).map_err(|full| full.drop_reason())?;
        let id = self.insert_id(owner, space, service, Role::Conn(Box::new(conn)));
        let Some(Role::Listener(entry)) = self.ids.get_mut(&listener).map(|entry| &mut entry.role) else {
            panic!("{listener:?} is a listener");
        };
        entry.waiting_ids.insert(id);
        *entry.waiting.entry(peer).or_default() += 1;
        self.ids.get_mut(&id).expect("it was just made").waits_at = Some((listener, peer));
        Ok(id)
    }
}

/// What a REQ says, from our end.
struct Request {
    path: Path,
    header: IpHeader,
    param: ConnectionParam,
}

/// Whether a REQ asks for something that can be, and names its sender and us by the addresses that it came with.
fn check_req(arrival: &Arrival, req: &Req) -> Result<Request, (RejReason, DropReason)> {
    let refuse = |reason| Err((reason, DropReason::Rejected(reason)));
    let qp_type = match (req.transport_service_type, req.extended_transport_type) {
        (0, _) => QpType::Rc,
        (1, _) => QpType::Uc,
        (3, 1) => QpType::XrcTarget,
        _ => return refuse(RejReason::INVALID_TRANSPORT_TYPE),
    };
    let primary = &req.primary;
    if address_of(primary.remote_gid) != arrival.dst || address_of(primary.local_gid) != arrival.src {
        return refuse(RejReason::INVALID_GID);
    }
    if !(1..=5).contains(&req.path_mtu) {
        return refuse(RejReason::INVALID_MTU);
    }
    if req.local_comm_id == 0 {
        return refuse(RejReason::INVALID_COMM_ID);
    }
    if req.local_qpn <= 1 {
        return refuse(RejReason::UNSUPPORTED);
    }
    let header = IpHeader::parse(&req.private_data)
        .map_err(|error| (RejReason::CONSUMER_DEFINED, DropReason::IpHeader(error)))?;
    if (header.src.to_canonical(), header.dst.to_canonical()) != (arrival.src, arrival.dst) {
        return refuse(RejReason::INVALID_GID);
    }
    let path = Path {
        mtu: req.path_mtu,
        ack_timeout: primary.local_ack_timeout,
        packet_rate: primary.packet_rate,
        traffic_class: primary.traffic_class,
        flow_label: primary.flow_label,
        hop_limit: primary.hop_limit,
        sl: primary.sl,
        pkey: req.partition_key,
        ..back(arrival)
    };
    // What the peer issues at once is what we take at once, and the other way round.
    let param = ConnectionParam {
        qpn: req.local_qpn,
        qp_type,
        srq: req.srq,
        responder_resources: req.initiator_depth,
        initiator_depth: req.responder_resources,
        flow_control: req.end_to_end_flow_control,
        retry_count: req.retry_count,
        rnr_retry_count: req.rnr_retry_count,
    };
    Ok(Request { path, header, param })
}

fn check_dreq(conn: &Conn, dreq: &Dreq) -> Result<(), DropReason> {
    if dreq.remote_qpn == conn.param.qpn {
        Ok(())
    } else {
        Err(DropReason::Field { message: "DREQ", field: "queue pair" })
    }
}

/// The way back.
pub(crate) fn back(arrival: &Arrival) -> Path {
    Path { ifindex: arrival.ifindex, ..Path::new(arrival.dst, arrival.src) }
}

/// Private data behind the IP header.
pub(crate) fn program_data(private_data: &[u8]) -> Box<[u8]> {
    private_data[ferroce_wire::mad::IP_HEADER_LEN..].into()
}

fn apr(local_comm_id: u32, remote_comm_id: u32, status: ApStatus) -> Apr {
    Apr { local_comm_id, remote_comm_id, info_length: 0, status, info: [0; _], private_data: [0; _] }
}
