//! One connection, or one resolution of a service id.

use std::net::{IpAddr, SocketAddr};

use ferroce_wire::mad::{Drep, Dreq, Mad, Mra, Rej, RejReason, Rtu, Subject};

use crate::param::{ConnectionParam, Path, QpParameters};
use crate::retry::Retry;
use crate::{Nanos, Service, State, Timing};

/// A peer, as far as its packets tell without being asked: its address, and the link if the address means nothing elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Peer {
    addr: IpAddr,
    ifindex: u32,
}

impl Peer {
    pub(crate) fn new(addr: IpAddr, ifindex: u32) -> Peer {
        let link_local = matches!(addr, IpAddr::V6(v6) if v6.is_unicast_link_local());
        Peer { addr, ifindex: if link_local { ifindex } else { 0 } }
    }

    pub(crate) fn of(path: &Path) -> Peer {
        Peer::new(path.remote, path.ifindex)
    }
}

/// What a peer says about its end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    pub comm_id: u32,
    pub ca_guid: u64,
    pub qpn: u32,
    /// Where it wants us to begin to send.
    pub psn: u32,
}

#[derive(Debug)]
pub(crate) struct Conn {
    pub service: Service,
    pub state: State,
    /// We sent the REQ.
    pub active: bool,
    pub path: Path,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    /// Our communication id or request id; of a resolution that we answer, the peer's request id.
    pub comm_id: u32,
    /// Transaction id of the REQ, which answers repeat.
    pub tid: u64,
    /// Transaction id of the peer's DREQ.
    pub dreq_tid: u64,
    /// Our end; its resources and depth as they were agreed. Its `qpn` is 0 before accept.
    pub param: ConnectionParam,
    /// Where we want the peer to begin to send.
    pub psn: u32,
    pub remote: Option<Remote>,
    /// How long the peer may take to answer.
    pub response_timeout: Nanos,
    pub max_retries: u8,
    /// What is sent again.
    pub last: Option<Box<Mad>>,
    /// The REJ that whoever does not know yet gets.
    pub reject: Option<Box<Mad>>,
    pub retry: Option<Retry>,
    pub timer: Option<Nanos>,
    /// The end of timewait is an event.
    pub announce_exit: bool,
    /// Timewait does not last longer, whatever comes.
    pub timewait_ends: Nanos,
}

impl Conn {
    pub(crate) fn new(service: Service, state: State, path: Path, local: SocketAddr, peer: SocketAddr) -> Conn {
        Conn {
            service,
            state,
            active: false,
            path,
            local,
            peer,
            comm_id: 0,
            tid: 0,
            dreq_tid: 0,
            param: ConnectionParam::default(),
            psn: 0,
            remote: None,
            response_timeout: 0,
            max_retries: 0,
            last: None,
            reject: None,
            retry: None,
            timer: None,
            announce_exit: false,
            timewait_ends: 0,
        }
    }

    pub(crate) fn remote_comm_id(&self) -> u32 {
        self.remote.map_or(0, |remote| remote.comm_id)
    }

    pub(crate) fn parameters(&self) -> Option<QpParameters> {
        let remote = self.remote.filter(|_| self.service == Service::Connected)?;
        Some(QpParameters {
            qpn: self.param.qpn,
            dest_qpn: remote.qpn,
            // The starting PSN of a REQ or REP is where its receiver begins to send (IBA 12.7, "Starting PSN"), as kernels have it.
            rq_psn: self.psn,
            sq_psn: remote.psn,
            path: self.path,
            max_dest_rd_atomic: self.param.responder_resources,
            max_rd_atomic: self.param.initiator_depth,
            retry_cnt: self.param.retry_count,
            rnr_retry: self.param.rnr_retry_count,
            qp_type: self.param.qp_type,
            remote_ca_guid: remote.ca_guid,
        })
    }

    pub(crate) fn mra(&self, subject: Subject, service_timeout: u8) -> Mad {
        let mra = Mra {
            local_comm_id: self.comm_id,
            remote_comm_id: self.remote_comm_id(),
            subject,
            service_timeout,
            private_data: [0; _],
        };
        Mad::new(self.tid, mra.into())
    }

    /// A REJ by the state that the connection is in.
    pub(crate) fn rej(&self, reason: RejReason) -> Mad {
        let subject = match self.state {
            State::ReqRcvd | State::ReqSent | State::MraReqRcvd => Subject::REQ,
            State::RepRcvd => Subject::REP,
            _ => Subject::OTHER,
        };
        Mad::new(self.tid, rej(self.comm_id, self.remote_comm_id(), subject, reason).into())
    }

    pub(crate) fn rtu(&self) -> Mad {
        let rtu = Rtu { local_comm_id: self.comm_id, remote_comm_id: self.remote_comm_id(), private_data: [0; _] };
        Mad::new(self.tid, rtu.into())
    }

    pub(crate) fn dreq(&self, tid: u64) -> Mad {
        let dreq = Dreq {
            local_comm_id: self.comm_id,
            remote_comm_id: self.remote_comm_id(),
            remote_qpn: self.remote.map_or(0, |remote| remote.qpn),
            private_data: [0; _],
        };
        Mad::new(tid, dreq.into())
    }

    pub(crate) fn drep(&self, tid: u64) -> Mad {
        Mad::new(tid, drep(self.comm_id, self.remote_comm_id()).into())
    }

    /// How long a DREQ waits for its DREP before it is late: there and back again, no program in between.
    pub(crate) fn release_timeout(&self, timing: &Timing) -> Nanos {
        (2 * timing.time(self.path.ack_timeout)).clamp(timing.first_retry, timing.time(timing.response_timeout))
    }

    /// How long packets may be on their way: the local ACK timeout covers there and back. Between 67 ms and 4.3 s, whatever a peer says.
    pub(crate) fn timewait(&self, timing: &Timing) -> Nanos {
        timing.time(self.path.ack_timeout.clamp(14, 20))
    }
}

pub(crate) fn rej(local_comm_id: u32, remote_comm_id: u32, subject: Subject, reason: RejReason) -> Rej {
    Rej { local_comm_id, remote_comm_id, subject, info_length: 0, reason, info: [0; _], private_data: [0; _] }
}

pub(crate) fn drep(local_comm_id: u32, remote_comm_id: u32) -> Drep {
    Drep { local_comm_id, remote_comm_id, private_data: [0; _] }
}
