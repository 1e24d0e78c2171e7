//! Commands that set up and take down connections, and what time does to them.

use ferroce_wire::mad::{
    IP_HEADER_LEN, IpHeader, Mad, Message, Rej, RejReason, Rep, Req, ReqPath, ServiceId, Subject, gid_of,
};
use rand::RngCore;

use crate::cm::{Cm, Role};
use crate::conn::{Conn, Peer};
use crate::event::EventKind;
use crate::param::{AcceptParam, ConnectParam, ConnectionParam, Path, QpType, in_range, padded, socket_addr};
use crate::retry::Retry;
use crate::{BindOptions, CONNECT_PRIVATE_DATA, CmError, CmId, Nanos, Service, State};

/// How long requests for a port whose listener has gone are dropped: programs that take turns (perftest) listen anew at once, and a
/// rejection would end their peers. A peer that asks again after that is rejected.
const CLOSING: Nanos = 300_000_000;

impl Cm {
    /// Asks a peer for a connection (`rdma_connect`). An id without an address gets the path's, with any free port. What comes of
    /// it is CONNECT_RESPONSE, REJECTED, UNREACHABLE or CONNECT_ERROR.
    pub fn connect(&mut self, now: Nanos, id: CmId, connect: &ConnectParam<'_>) -> Result<(), CmError> {
        self.require("connect", id, Service::Connected, &[State::Idle])?;
        check_param(&connect.param)?;
        check_path(&connect.path)?;
        in_range("ece.vendor_id", connect.ece.vendor_id.into(), 24)?;
        let program_data = padded::<CONNECT_PRIVATE_DATA>("connect", connect.private_data)?;
        self.check_qpn(connect.param.qpn, Peer::of(&connect.path))?;
        let (space, src_port) = self.bind_for(id, &connect.path)?;

        let path = connect.path;
        let local = socket_addr(path.local, src_port, path.ifindex);
        let peer = socket_addr(path.remote, connect.port, path.ifindex);
        let mut conn = Conn::new(Service::Connected, State::ReqSent, path, local, peer);
        conn.active = true;
        conn.comm_id = self.new_comm_id();
        conn.tid = self.rng.next_u64();
        conn.psn = self.new_psn();
        conn.param = connect.param;

        let timing = self.config.timing;
        let transport = transport_type(connect.param.qp_type);
        let back = way_back(&connect.param);
        let header = IpHeader { src_port, src: path.local, dst: path.remote };
        let mut private_data = [0; _];
        let (ip, rest): (&mut [u8], &mut [u8]) = <[u8]>::split_at_mut(&mut private_data, IP_HEADER_LEN);
        ip.copy_from_slice(&header.emit());
        rest.copy_from_slice(&program_data);
        let req = Req {
            local_comm_id: conn.comm_id,
            vendor_id: 0,
            service_id: ServiceId::new(space, connect.port),
            local_ca_guid: connect.ca_guid,
            local_qkey: 0,
            local_qpn: connect.param.qpn,
            responder_resources: back.responder_resources,
            local_eecn: 0,
            initiator_depth: connect.param.initiator_depth,
            remote_eecn: 0,
            remote_cm_response_timeout: timing.response_timeout,
            transport_service_type: transport.0,
            end_to_end_flow_control: connect.param.flow_control,
            starting_psn: conn.psn,
            local_cm_response_timeout: timing.response_timeout,
            retry_count: back.retry_count,
            partition_key: path.pkey,
            path_mtu: path.mtu,
            rdc_exists: false,
            rnr_retry_count: back.rnr_retry_count,
            max_cm_retries: timing.max_retries,
            srq: back.srq,
            extended_transport_type: transport.1,
            primary: req_path(&path),
            alternate: NO_PATH,
            private_data,
        };
        let mad = Mad::new(conn.tid, req.into()).with_ece(connect.ece);
        self.by_comm_id.insert(conn.comm_id, id);
        self.by_qpn.insert(conn.param.qpn, id);
        conn.response_timeout = timing.time(timing.response_timeout);
        conn.max_retries = timing.max_retries;
        self.set_role(id, Role::Conn(Box::new(conn)));
        self.send_with_retries(now, id, mad);
        Ok(())
    }

    /// The port space and port of an id that is about to connect.
    pub(crate) fn bind_for(&mut self, id: CmId, path: &Path) -> Result<(ferroce_wire::mad::PortSpace, u16), CmError> {
        let entry = self.owned(id)?;
        let space = entry.space;
        let bound = match entry.bound {
            Some(bound) => bound,
            None => self.bind(id, socket_addr(path.local, 0, path.ifindex), BindOptions::default())?,
        };
        Ok((space, bound.port()))
    }

    /// Takes a connection request (`rdma_accept`). What comes of it is ESTABLISHED, REJECTED, UNREACHABLE or DISCONNECTED.
    pub fn accept(&mut self, now: Nanos, id: CmId, accept: &AcceptParam<'_>) -> Result<(), CmError> {
        self.require("accept", id, Service::Connected, &[State::ReqRcvd])?;
        check_param(&accept.param)?;
        in_range("ece.vendor_id", accept.ece.vendor_id.into(), 24)?;
        let private_data = padded("accept", accept.private_data)?;
        self.check_qpn(accept.param.qpn, Peer::of(&self.conn(id).path))?;

        self.take_request(id);
        let target_ack_delay = self.config.timing.target_ack_delay;
        self.set_state(id, State::RepSent);
        let conn = self.conn_mut(id);
        conn.param.qpn = accept.param.qpn;
        conn.param.srq = accept.param.srq;
        conn.param.responder_resources = accept.param.responder_resources;
        conn.param.initiator_depth = accept.param.initiator_depth;
        conn.param.flow_control = accept.param.flow_control;
        let end = Accepted::of(conn.param.qp_type, &accept.param);
        let rep = Rep {
            local_comm_id: conn.comm_id,
            remote_comm_id: conn.remote_comm_id(),
            local_qkey: 0,
            local_qpn: end.qpn,
            vendor_id_h: 0,
            local_eecn: end.eecn,
            vendor_id_m: 0,
            starting_psn: conn.psn,
            vendor_id_l: 0,
            responder_resources: accept.param.responder_resources,
            initiator_depth: end.initiator_depth,
            target_ack_delay,
            failover_accepted: 0,
            end_to_end_flow_control: end.flow_control,
            rnr_retry_count: accept.param.rnr_retry_count,
            srq: end.srq,
            local_ca_guid: accept.ca_guid,
            private_data,
        };
        let mad = Mad::new(conn.tid, rep.into()).with_ece(accept.ece);
        self.by_qpn.insert(accept.param.qpn, id);
        self.send_with_retries(now, id, mad);
        Ok(())
    }

    /// Rejects a request for a connection, the peer's acceptance of one, or the resolution of a service id (`rdma_reject`,
    /// `rdma_reject_ece`). Of a resolution the peer sees only that it was rejected, and at most
    /// [`ANSWER_PRIVATE_DATA`](crate::ANSWER_PRIVATE_DATA) bytes.
    pub fn reject(&mut self, now: Nanos, id: CmId, reason: RejReason, private_data: &[u8]) -> Result<(), CmError> {
        if self.owned(id)?.service == Service::Datagram {
            return self.reject_datagram(now, id, private_data);
        }
        let state = self.require("reject", id, Service::Connected, &[State::ReqRcvd, State::RepRcvd])?;
        let private_data = padded("reject", private_data)?;
        self.take_request(id);
        if state == State::ReqRcvd {
            self.reject_request(now, id, reason, private_data);
        } else {
            self.reject_reply(now, id, reason, private_data);
        }
        Ok(())
    }

    /// Rejects a REQ. The connection lingers for as long as its peer may ask again.
    pub(crate) fn reject_request(&mut self, now: Nanos, id: CmId, reason: RejReason, private_data: [u8; 148]) {
        let mad = with_data(self.conn(id).rej(reason), private_data);
        self.send_of(id, mad);
        self.free_queue_pairs(id);
        let until = now + 2 * self.conn(id).response_timeout.min(self.config.timing.time(21));
        self.set_state(id, State::Timewait);
        let conn = self.conn_mut(id);
        conn.reject = Some(Box::new(mad));
        conn.timewait_ends = until;
        self.set_timer(id, Some(until));
    }

    /// Rejects a REP. Whoever sends it again gets the same answer.
    pub(crate) fn reject_reply(&mut self, now: Nanos, id: CmId, reason: RejReason, private_data: [u8; 148]) {
        let mad = with_data(self.conn(id).rej(reason), private_data);
        self.send_of(id, mad);
        self.conn_mut(id).reject = Some(Box::new(mad));
        self.enter_timewait(now, id);
    }

    /// Asks the peer for time: it waits at least 4.096 us * 2^`service_timeout` more for an answer to its REQ or REP.
    pub fn mra(&mut self, id: CmId, service_timeout: u8) -> Result<(), CmError> {
        let state = self.require("mra", id, Service::Connected, &[State::ReqRcvd, State::RepRcvd])?;
        in_range("service_timeout", service_timeout.into(), 5)?;
        let subject = if state == State::ReqRcvd { Subject::REQ } else { Subject::REP };
        let mad = self.conn(id).mra(subject, service_timeout);
        self.send_of(id, mad);
        Ok(())
    }

    /// The active end is ready: its queue pair is in RTS (`rdma_establish`; librdmacm calls it after CONNECT_RESPONSE).
    pub fn establish(&mut self, id: CmId) -> Result<(), CmError> {
        self.require("establish", id, Service::Connected, &[State::RepRcvd])?;
        let mad = self.conn(id).rtu();
        self.set_state(id, State::Established);
        let conn = self.conn_mut(id);
        conn.announce_exit = true;
        conn.last = Some(Box::new(mad));
        self.send_of(id, mad);
        Ok(())
    }

    /// The passive end's queue pair received something before the RTU came (`rdma_notify` with `IBV_EVENT_COMM_EST`).
    pub fn notify(&mut self, id: CmId) -> Result<(), CmError> {
        let states = [State::RepSent, State::MraRepRcvd, State::Established];
        if self.require("notify", id, Service::Connected, &states)? != State::Established {
            self.ready(id);
        }
        Ok(())
    }

    /// The passive end is connected.
    pub(crate) fn ready(&mut self, id: CmId) {
        self.stop(id);
        self.set_state(id, State::Established);
        let conn = self.conn_mut(id);
        conn.announce_exit = true;
        self.raise(id, EventKind::Established);
    }

    /// Ends a connection, or agrees to its end (`rdma_disconnect`). Nothing happens if it is ending or over.
    pub fn disconnect(&mut self, now: Nanos, id: CmId) -> Result<(), CmError> {
        let states = [State::Established, State::DreqRcvd, State::DreqSent, State::Timewait, State::Done];
        match self.require("disconnect", id, Service::Connected, &states)? {
            State::Established => self.send_dreq(now, id),
            State::DreqRcvd => self.confirm_release(now, id),
            _ => {}
        }
        Ok(())
    }

    pub(crate) fn send_dreq(&mut self, now: Nanos, id: CmId) {
        let tid = self.rng.next_u64();
        let timing = self.config.timing;
        self.set_state(id, State::DreqSent);
        let conn = self.conn_mut(id);
        let tid = if conn.active { conn.tid } else { tid };
        conn.response_timeout = conn.release_timeout(&timing);
        conn.max_retries = timing.max_retries;
        let mad = conn.dreq(tid);
        self.send_with_retries(now, id, mad);
    }

    /// Answers the peer's DREQ.
    pub(crate) fn confirm_release(&mut self, now: Nanos, id: CmId) {
        let conn = self.conn(id);
        let mad = conn.drep(conn.dreq_tid);
        self.send_of(id, mad);
        self.enter_timewait(now, id);
    }

    /// The listener of a service's port has just gone, or may be about to come.
    pub(crate) fn is_closing(&self, now: Nanos, service: ServiceId) -> bool {
        now < self.gathering
            || service.port().and_then(|(_, port)| self.closing.get(&port)).is_some_and(|until| *until > now)
    }

    /// Gives an id up (`rdma_destroy_id`). A peer that is owed an answer gets one. No event comes any more. With a listener go the
    /// requests that were not taken ([`Cm::take_request`]).
    pub fn destroy(&mut self, now: Nanos, id: CmId) -> Result<(), CmError> {
        let state = self.owned(id)?.state();
        if state == State::Listen {
            self.destroy_waiting(now, id);
            let entry = self.owned(id)?;
            let port = entry.bound.map_or(0, |bound| bound.port());
            self.closing.retain(|_, until| *until > now);
            self.closing.insert(port, now + CLOSING);
        }
        self.disown(id);
        match state {
            State::Idle | State::Listen | State::Done | State::SidrReqSent => self.finish(id),
            State::ReqSent | State::MraReqRcvd => {
                self.send_timeout_reject(id);
                self.finish(id);
            }
            State::ReqRcvd => self.reject_request(now, id, RejReason::CONSUMER_DEFINED, [0; _]),
            State::RepRcvd => self.reject_reply(now, id, RejReason::CONSUMER_DEFINED, [0; _]),
            State::RepSent | State::MraRepRcvd => {
                let mad = self.conn(id).rej(RejReason::CONSUMER_DEFINED);
                self.send_of(id, mad);
                self.conn_mut(id).reject = Some(Box::new(mad));
                self.send_dreq(now, id);
            }
            State::Established => self.send_dreq(now, id),
            State::DreqRcvd => self.confirm_release(now, id),
            State::SidrReqRcvd => self.refuse_datagram(now, id, [0; _]),
            State::DreqSent | State::Timewait | State::SidrRepSent => {}
        }
        self.linger(id);
        self.evict();
        Ok(())
    }

    /// Requests that the program has not taken go with their listener.
    fn destroy_waiting(&mut self, now: Nanos, listener: CmId) {
        for id in self.waiting_at(listener) {
            self.destroy(now, id).expect("it was just looked up");
        }
    }

    /// Sends a message that wants an answer, and will send it again.
    pub(crate) fn send_with_retries(&mut self, now: Nanos, id: CmId, mad: Mad) {
        let timing = self.config.timing;
        let spread = self.rng.next_u32();
        let conn = self.conn_mut(id);
        let retry = Retry::start(now, &timing, conn.response_timeout, conn.max_retries);
        conn.last = Some(Box::new(mad));
        conn.retry = Some(retry);
        self.set_timer(id, Some(retry.at(now, spread)));
        self.send_of(id, mad);
    }

    /// The answer is there: nothing is sent again.
    pub(crate) fn stop(&mut self, id: CmId) {
        self.set_timer(id, None);
        let conn = self.conn_mut(id);
        conn.retry = None;
        conn.last = None;
    }

    pub(crate) fn enter_timewait(&mut self, now: Nanos, id: CmId) {
        self.stop(id);
        let timing = self.config.timing;
        self.set_state(id, State::Timewait);
        let conn = self.conn_mut(id);
        let span = conn.timewait(&timing);
        // As long as a peer may ask to have its DREQ confirmed.
        conn.timewait_ends = now + span.max(16 * conn.release_timeout(&timing));
        self.set_timer(id, Some(now + span));
        self.linger(id);
    }

    /// The peer did not hear that its DREQ was confirmed: its timewait begins later than ours did, so ours begins anew. Otherwise
    /// our queue pair could be used again while the peer still takes it for the old one.
    pub(crate) fn prolong_timewait(&mut self, now: Nanos, id: CmId) {
        let timing = self.config.timing;
        let conn = self.conn(id);
        let until = (now + conn.timewait(&timing)).min(conn.timewait_ends);
        if conn.timer.is_some_and(|at| at < until) {
            self.set_timer(id, Some(until));
        }
    }

    /// Tells a peer that it took too long. It may not know our REQ's connection by its own number yet, so the REJ has our GUID.
    pub(crate) fn send_timeout_reject(&mut self, id: CmId) {
        let conn = self.conn(id);
        let mut mad = conn.rej(RejReason::TIMEOUT);
        let guid = match conn.last.as_deref().map(|last| &last.message) {
            Some(Message::Req(req)) => req.local_ca_guid,
            Some(Message::Rep(rep)) => rep.local_ca_guid,
            _ => 0,
        };
        if let Message::Rej(rej) = &mut mad.message {
            rej.info_length = 8;
            rej.info[..8].copy_from_slice(&guid.to_be_bytes());
        }
        self.send_of(id, mad);
        if self.conn(id).remote.is_some() {
            self.conn_mut(id).reject = Some(Box::new(mad));
        }
    }

    /// The timer of a connection ran out.
    pub(crate) fn timer_ran_out(&mut self, now: Nanos, id: CmId) {
        let conn = self.conn(id);
        match conn.state {
            State::Timewait | State::SidrRepSent => {
                if conn.announce_exit {
                    self.raise(id, EventKind::TimewaitExit);
                }
                self.finish(id);
            }
            _ if conn.retry.as_ref().is_some_and(|retry| retry.is_over(now)) => self.give_up(now, id),
            _ => self.send_again(now, id),
        }
    }

    fn send_again(&mut self, now: Nanos, id: CmId) {
        let spread = self.rng.next_u32();
        let state = match self.conn(id).state {
            State::MraReqRcvd => State::ReqSent,
            State::MraRepRcvd => State::RepSent,
            state => state,
        };
        self.set_state(id, state);
        let conn = self.conn_mut(id);
        let mad = **conn.last.as_ref().expect("who waits for an answer can ask again");
        let retry = conn.retry.as_mut().expect("only who waits for an answer has a timer");
        retry.back_off();
        let at = retry.at(now, spread);
        self.set_timer(id, Some(at));
        self.stats.tx_retries += 1;
        self.send_of(id, mad);
    }

    fn give_up(&mut self, now: Nanos, id: CmId) {
        self.stats.timeouts += 1;
        match self.conn(id).state {
            State::ReqSent | State::MraReqRcvd => {
                self.send_timeout_reject(id);
                self.raise(id, EventKind::Unreachable);
                self.finish(id);
            }
            State::RepSent | State::MraRepRcvd => {
                self.send_timeout_reject(id);
                self.raise(id, EventKind::Unreachable);
                self.enter_timewait(now, id);
            }
            State::DreqSent => {
                self.raise(id, EventKind::Disconnected { timed_out: true });
                self.enter_timewait(now, id);
            }
            State::SidrReqSent => {
                self.raise(id, EventKind::Unreachable);
                self.finish(id);
            }
            state => unreachable!("{state} waits for no answer"),
        }
    }
}

pub(crate) fn check_param(param: &ConnectionParam) -> Result<(), CmError> {
    in_range("qp_num", param.qpn.into(), 24)?;
    if param.qpn <= 1 {
        return Err(CmError::Value { name: "qp_num", value: param.qpn.into() });
    }
    in_range("retry_count", param.retry_count.into(), 3)?;
    in_range("rnr_retry_count", param.rnr_retry_count.into(), 3)
}

pub(crate) fn check_path(path: &Path) -> Result<(), CmError> {
    // A link-local address says nothing without its link.
    if path.ifindex == 0 && matches!(path.remote, std::net::IpAddr::V6(v6) if v6.is_unicast_link_local()) {
        return Err(CmError::Value { name: "ifindex", value: 0 });
    }
    if !(1..=5).contains(&path.mtu) {
        return Err(CmError::Value { name: "path_mtu", value: path.mtu.into() });
    }
    in_range("flow_label", path.flow_label.into(), 20)?;
    in_range("packet_rate", path.packet_rate.into(), 6)?;
    in_range("sl", path.sl.into(), 4)?;
    in_range("local_ack_timeout", path.ack_timeout.into(), 5)
}

fn with_data(mut mad: Mad, private_data: [u8; 148]) -> Mad {
    if let Message::Rej(Rej { private_data: room, .. }) = &mut mad.message {
        *room = private_data;
    }
    mad
}

/// Transport service type and extended transport type of a REQ. Those that start an XRC connection are initiators.
fn transport_type(qp_type: QpType) -> (u8, u8) {
    match qp_type {
        QpType::Rc => (0, 0),
        QpType::Uc => (1, 0),
        QpType::XrcInitiator | QpType::XrcTarget => (3, 1),
    }
}

/// What a REQ says of requests on their way back, from the peer to its sender: nothing with XRC, where there are none.
fn way_back(param: &ConnectionParam) -> ConnectionParam {
    match param.qp_type {
        QpType::Rc | QpType::Uc => *param,
        QpType::XrcInitiator | QpType::XrcTarget => ConnectionParam::default(),
    }
}

/// The fields of a REP that differ by the type of the queue pair.
struct Accepted {
    qpn: u32,
    eecn: u32,
    initiator_depth: u8,
    flow_control: bool,
    srq: bool,
}

impl Accepted {
    /// An XRC target says its number as that of an end-to-end context, issues nothing, and always has a shared receive queue.
    fn of(qp_type: QpType, param: &ConnectionParam) -> Accepted {
        match qp_type {
            QpType::Rc | QpType::Uc => Accepted {
                qpn: param.qpn,
                eecn: 0,
                initiator_depth: param.initiator_depth,
                flow_control: param.flow_control,
                srq: param.srq,
            },
            QpType::XrcInitiator | QpType::XrcTarget => {
                Accepted { qpn: 0, eecn: param.qpn, initiator_depth: 0, flow_control: false, srq: true }
            }
        }
    }
}

/// A path as a REQ names it. There are no LIDs over Ethernet: 0xffff stands for none.
fn req_path(path: &Path) -> ReqPath {
    ReqPath {
        local_lid: 0xffff,
        remote_lid: 0xffff,
        local_gid: gid_of(path.local),
        remote_gid: gid_of(path.remote),
        flow_label: path.flow_label,
        packet_rate: path.packet_rate,
        traffic_class: path.traffic_class,
        hop_limit: path.hop_limit,
        sl: path.sl,
        subnet_local: false,
        local_ack_timeout: path.ack_timeout,
    }
}

const NO_PATH: ReqPath = ReqPath {
    local_lid: 0,
    remote_lid: 0,
    local_gid: [0; 16],
    remote_gid: [0; 16],
    flow_label: 0,
    packet_rate: 0,
    traffic_class: 0,
    hop_limit: 0,
    sl: 0,
    subnet_local: false,
    local_ack_timeout: 0,
};
