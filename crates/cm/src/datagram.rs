//! Service id resolution (IBA 12.11): a peer asks which datagram queue pair stands behind a port.

use ferroce_wire::mad::{IP_HEADER_LEN, IpHeader, IpHeaderError, Mad, ServiceId, SidrRep, SidrReq, SidrStatus};
use rand::RngCore;

use crate::cm::{Cm, Role};
use crate::conn::{Conn, Peer};
use crate::connect::check_path;
use crate::event::{ConnectRequest, EventKind};
use crate::param::{AcceptDatagramParam, Arrival, ConnectionParam, ResolveParam, in_range, padded, socket_addr};
use crate::receive::{back, program_data};
use crate::{CmError, CmId, DropReason, Nanos, RESOLVE_PRIVATE_DATA, Service, State};

impl Cm {
    /// Asks a peer for the datagram queue pair behind a port (`rdma_connect` of a UD id). What comes of it is
    /// [`EventKind::Resolved`], [`EventKind::NotResolved`] or UNREACHABLE.
    pub fn resolve(&mut self, now: Nanos, id: CmId, resolve: &ResolveParam<'_>) -> Result<(), CmError> {
        self.require("resolve", id, Service::Datagram, &[State::Idle])?;
        check_path(&resolve.path)?;
        let program_data = padded::<RESOLVE_PRIVATE_DATA>("resolve", resolve.private_data)?;
        let (space, src_port) = self.bind_for(id, &resolve.path)?;

        let path = resolve.path;
        let local = socket_addr(path.local, src_port, path.ifindex);
        let peer = socket_addr(path.remote, resolve.port, path.ifindex);
        let mut conn = Conn::new(Service::Datagram, State::SidrReqSent, path, local, peer);
        let timing = self.config.timing;
        conn.active = true;
        conn.comm_id = self.new_comm_id();
        conn.tid = self.rng.next_u64();
        conn.response_timeout = timing.time(timing.response_timeout);
        conn.max_retries = timing.max_retries;
        let mut private_data = [0; _];
        let (ip, rest): (&mut [u8], &mut [u8]) = <[u8]>::split_at_mut(&mut private_data, IP_HEADER_LEN);
        ip.copy_from_slice(&IpHeader { src_port, src: path.local, dst: path.remote }.emit());
        rest.copy_from_slice(&program_data);
        let req = SidrReq {
            request_id: conn.comm_id,
            partition_key: path.pkey,
            service_id: ServiceId::new(space, resolve.port),
            private_data,
        };
        let mad = Mad::new(conn.tid, req.into());
        self.by_comm_id.insert(conn.comm_id, id);
        self.set_role(id, Role::Conn(Box::new(conn)));
        self.send_with_retries(now, id, mad);
        Ok(())
    }

    /// Answers the resolution of a service id with a queue pair (`rdma_accept` of a UD id). No event comes of it.
    pub fn accept_datagram(&mut self, now: Nanos, id: CmId, accept: &AcceptDatagramParam<'_>) -> Result<(), CmError> {
        self.require("accept", id, Service::Datagram, &[State::SidrReqRcvd])?;
        in_range("qp_num", accept.qpn.into(), 24)?;
        in_range("ece.vendor_id", accept.ece.vendor_id.into(), 24)?;
        let private_data = padded("accept", accept.private_data)?;
        self.take_request(id);
        let mut rep = self.sidr_rep(id, SidrStatus::SUCCESS, private_data);
        rep.qpn = accept.qpn;
        rep.qkey = accept.qkey;
        let mad = Mad::new(self.conn(id).tid, rep.into()).with_ece(accept.ece);
        self.answer_request(now, id, mad);
        Ok(())
    }

    pub(crate) fn reject_datagram(&mut self, now: Nanos, id: CmId, private_data: &[u8]) -> Result<(), CmError> {
        self.require("reject", id, Service::Datagram, &[State::SidrReqRcvd])?;
        let private_data = padded("reject", private_data)?;
        self.take_request(id);
        self.refuse_datagram(now, id, private_data);
        Ok(())
    }

    pub(crate) fn refuse_datagram(&mut self, now: Nanos, id: CmId, private_data: [u8; 136]) {
        let rep = self.sidr_rep(id, SidrStatus::REJECTED, private_data);
        let mad = Mad::new(self.conn(id).tid, rep.into());
        self.answer_request(now, id, mad);
    }

    fn sidr_rep(&self, id: CmId, status: SidrStatus, private_data: [u8; 136]) -> SidrRep {
        let conn = self.conn(id);
        let space = self.ids[&id].space;
        sidr_rep(conn.comm_id, ServiceId::new(space, conn.local.port()), status, private_data)
    }

    /// Sends the answer, and keeps it for as long as the peer may ask again: there is no message that confirms it.
    fn answer_request(&mut self, now: Nanos, id: CmId, mad: Mad) {
        let timing = self.config.timing;
        self.set_state(id, State::SidrRepSent);
        let conn = self.conn_mut(id);
        conn.last = Some(Box::new(mad));
        self.set_timer(id, Some(now + 2 * timing.time(timing.response_timeout)));
        self.send_of(id, mad);
    }

    /// A peer asks.
    pub(crate) fn handle_sidr_req(
        &mut self,
        now: Nanos,
        arrival: &Arrival,
        mad: &Mad,
        req: &SidrReq,
    ) -> Result<(), DropReason> {
        let peer = Peer::new(arrival.src, arrival.ifindex);
        let key = (req.request_id, peer);
        if let Some(id) = self.by_request.get(&key).copied() {
            return self.apply(now, id, mad);
        }
        let refuse = |cm: &mut Cm, status| {
            let rep = sidr_rep(req.request_id, req.service_id, status, [0; _]);
            cm.answer(arrival, mad.tid, rep.into());
        };
        let header = match IpHeader::parse(&req.private_data) {
            Ok(header) => header,
            Err(error) => {
                let unknown_version = matches!(error, IpHeaderError::Version { .. });
                let status = if unknown_version { SidrStatus::UNSUPPORTED_VERSION } else { SidrStatus::REJECTED };
                refuse(self, status);
                return Err(error.into());
            }
        };
        if (header.src.to_canonical(), header.dst.to_canonical()) != (arrival.src, arrival.dst) {
            refuse(self, SidrStatus::REJECTED);
            return Err(DropReason::Field { message: "SIDR_REQ", field: "address in its IP header" });
        }
        let Some(listener) = self.listener(Service::Datagram, req.service_id, arrival.dst) else {
            if self.is_closing(now, req.service_id) {
                return Err(DropReason::Closing);
            }
            refuse(self, SidrStatus::UNSUPPORTED);
            return Err(DropReason::NotResolved);
        };
        let (_, port) = req.service_id.port().expect("it has a listener");
        let path = back(arrival);
        let local = socket_addr(arrival.dst, port, arrival.ifindex);
        let peer_addr = socket_addr(arrival.src, header.src_port, arrival.ifindex);
        let mut conn = Conn::new(Service::Datagram, State::SidrReqRcvd, path, local, peer_addr);
        conn.tid = mad.tid;
        conn.comm_id = req.request_id;
        let id = self.admit(listener, peer, conn)?;
        self.by_request.insert(key, id);
        self.raise(
            id,
            EventKind::ConnectRequest(Box::new(ConnectRequest {
                listener,
                service: Service::Datagram,
                local,
                peer: peer_addr,
                path,
                param: ConnectionParam::default(),
                ca_guid: 0,
                private_data: program_data(&req.private_data),
                ece: mad.ece(),
            })),
        );
        Ok(())
    }

    /// A peer answers.
    pub(crate) fn handle_sidr_rep(
        &mut self,
        now: Nanos,
        arrival: &Arrival,
        mad: &Mad,
        rep: &SidrRep,
    ) -> Result<(), DropReason> {
        const MESSAGE: &str = "SIDR_REP";
        let Some(id) = self.by_comm_id.get(&rep.request_id).copied() else {
            return Err(DropReason::UnknownId { message: MESSAGE });
        };
        let conn = self.conn(id);
        if Peer::of(&conn.path) != Peer::new(arrival.src, arrival.ifindex) || conn.path.local != arrival.dst {
            return Err(DropReason::WrongPeer { message: MESSAGE });
        }
        self.apply(now, id, mad)
    }

    /// The answer is there.
    pub(crate) fn resolved(&mut self, id: CmId, mad: &Mad, rep: &SidrRep) {
        let private_data = Box::new(rep.private_data);
        let kind = match rep.status {
            SidrStatus::SUCCESS => EventKind::Resolved { qpn: rep.qpn, qkey: rep.qkey, private_data, ece: mad.ece() },
            status => EventKind::NotResolved { status, private_data },
        };
        self.raise(id, kind);
        self.finish(id);
    }
}

fn sidr_rep(request_id: u32, service_id: ServiceId, status: SidrStatus, private_data: [u8; 136]) -> SidrRep {
    SidrRep {
        request_id,
        status,
        info_length: 0,
        vendor_id_h: 0,
        qpn: 0,
        vendor_id_l: 0,
        service_id,
        qkey: 0,
        info: [0; _],
        private_data,
    }
}
