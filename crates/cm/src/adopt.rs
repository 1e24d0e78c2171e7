//! Connections that outlive their manager: a service that was started anew takes them over from the programs that have them.

use std::net::SocketAddr;

use ferroce_wire::mad::PortSpace;

use crate::cm::{Cm, Role};
use crate::conn::{Conn, Peer, Remote};
use crate::param::{ConnectionParam, Path};
use crate::{CmError, CmId, Owner, Service, State};

/// All that a connection manager must know of a connection to go on with it. Whoever has it can end the connection, so it is given
/// to the owner only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Established {
    /// The port space.
    pub space: PortSpace,
    /// We sent the REQ.
    pub active: bool,
    /// Our address.
    pub local: SocketAddr,
    /// The peer's address.
    pub peer: SocketAddr,
    /// The path.
    pub path: Path,
    /// Our communication id.
    pub comm_id: u32,
    /// The peer's.
    pub remote_comm_id: u32,
    /// The peer's CA GUID.
    pub remote_ca_guid: u64,
    /// Our end, with what was agreed.
    pub param: ConnectionParam,
    /// The peer's queue pair.
    pub remote_qpn: u32,
    /// First PSN that the peer sent, as we wanted it.
    pub psn: u32,
    /// First PSN that we sent, as the peer wanted it.
    pub remote_psn: u32,
    /// Transaction id of the REQ.
    pub tid: u64,
}

impl Cm {
    /// What another machine needs to go on with an established connection.
    pub fn established(&self, id: CmId) -> Result<Established, CmError> {
        let entry = self.owned(id)?;
        let state = entry.state();
        let conn = entry.conn().filter(|conn| conn.state == State::Established);
        let (conn, remote) =
            conn.and_then(|conn| Some((conn, conn.remote?))).ok_or(CmError::State { command: "established", state })?;
        Ok(Established {
            space: entry.space,
            active: conn.active,
            local: conn.local,
            peer: conn.peer,
            path: conn.path,
            comm_id: conn.comm_id,
            remote_comm_id: remote.comm_id,
            remote_ca_guid: remote.ca_guid,
            param: conn.param,
            remote_qpn: remote.qpn,
            psn: conn.psn,
            remote_psn: remote.psn,
            tid: conn.tid,
        })
    }

    /// Goes on with a connection of another machine. [`CmError::QpBusy`] or [`CmError::Value`]: its queue pair or its numbers are in
    /// use here. No event comes of it; what the peer sent meanwhile, it sends again.
    pub fn adopt(&mut self, owner: Owner, connection: &Established) -> Result<CmId, CmError> {
        let in_use = |name, value: u32| CmError::Value { name, value: value.into() };
        let peer = Peer::of(&connection.path);
        let by_id = (connection.remote_comm_id, connection.remote_ca_guid, peer);
        let by_qpn = (connection.remote_qpn, connection.remote_ca_guid, peer);
        if connection.comm_id == 0 || self.by_comm_id.contains_key(&connection.comm_id) {
            return Err(in_use("local_comm_id", connection.comm_id));
        }
        if self.by_remote.contains_key(&by_id) {
            return Err(in_use("remote_comm_id", connection.remote_comm_id));
        }
        if self.by_remote_qpn.contains_key(&by_qpn) {
            return Err(in_use("dest_qp_num", connection.remote_qpn));
        }
        crate::connect::check_param(&connection.param)?;
        crate::connect::check_path(&connection.path)?;
        self.check_qpn(connection.param.qpn, peer)?;
        let id = self.create_id(owner, connection.space, Service::Connected)?;

        let (local, to) = (connection.local, connection.peer);
        let mut conn = Conn::new(Service::Connected, State::Established, connection.path, local, to);
        conn.active = connection.active;
        conn.comm_id = connection.comm_id;
        conn.tid = connection.tid;
        conn.param = connection.param;
        conn.psn = connection.psn;
        conn.announce_exit = true;
        conn.remote = Some(Remote {
            comm_id: connection.remote_comm_id,
            ca_guid: connection.remote_ca_guid,
            qpn: connection.remote_qpn,
            psn: connection.remote_psn,
        });
        if conn.active {
            // The RTU may have been lost.
            conn.last = Some(Box::new(conn.rtu()));
        }
        self.by_comm_id.insert(connection.comm_id, id);
        self.by_remote.insert(by_id, id);
        self.by_remote_qpn.insert(by_qpn, id);
        self.by_qpn.insert(connection.param.qpn, id);
        self.set_role(id, Role::Conn(Box::new(conn)));
        Ok(id)
    }
}
