//! What an end has its requests in: a queue pair of each service type, and a memory window.

use std::sync::Arc;

use anyhow::{Result, bail};
use ferroce::{
    Access, Mw, MwBind, Qp, QpType, RecvWr, SendData, SendFlags, SendOp, SendWr, Srq, WcOpcode, WcStatus, WindowKind,
};

use super::case::Transport;
use crate::rig::{Endpoint, status_error};

/// Which end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Client,
    Server,
}

/// A queue pair of each service type.
pub(super) struct Queues {
    qps: Vec<Arc<Qp>>,
    /// (server) What comes by XRC is received from here.
    srq: Option<Arc<Srq>>,
}

impl Queues {
    /// All in RESET. By XRC only the client sends.
    pub(super) fn open(endpoint: &Endpoint, role: Role) -> Result<Queues> {
        let types = [QpType::Rc, QpType::Uc, QpType::Ud];
        let mut qps = types.into_iter().map(|qp_type| endpoint.create_qp(qp_type)).collect::<Result<Vec<_>>>()?;
        let srq = match role {
            Role::Client => {
                qps.push(endpoint.create_initiator()?);
                None
            }
            Role::Server => {
                let (target, srq) = endpoint.create_target()?;
                qps.push(target);
                Some(srq)
            }
        };
        Ok(Queues { qps, srq })
    }

    /// In the order of [`Transport::ALL`].
    pub(super) fn all(&self) -> &[Arc<Qp>] {
        &self.qps
    }

    pub(super) fn of(&self, transport: Transport) -> &Arc<Qp> {
        &self.qps[transport as usize]
    }

    /// (server) Number of the shared receive queue that XRC requests name.
    pub(super) fn srqn(&self) -> Option<u32> {
        self.srq.as_ref().and_then(|srq| srq.number())
    }

    pub(super) fn post_recv(&self, transport: Transport, wr: RecvWr) -> Result<()> {
        match &self.srq {
            Some(srq) if transport == Transport::Xrc => srq.post(wr)?,
            _ => self.of(transport).post_recv(wr)?,
        }
        Ok(())
    }
}

/// A memory window of type 2, of the queue pair that binds it.
pub(super) struct Window {
    mw: Arc<Mw>,
    qp: Arc<Qp>,
    /// Its latest key.
    rkey: u32,
    bound: bool,
}

impl Window {
    pub(super) fn new(endpoint: &Endpoint, qp: &Arc<Qp>) -> Result<Window> {
        let mw = endpoint.pd.alloc_mw(WindowKind::Two)?;
        Ok(Window { rkey: mw.first_rkey(), mw, qp: Arc::clone(qp), bound: false })
    }

    /// Its latest key.
    pub(super) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Binds it to these bytes of the region of `lkey`, for WRITEs; gives its new key.
    pub(super) fn bind(&mut self, endpoint: &Endpoint, lkey: u32, addr: u64, len: u64) -> Result<u32> {
        // The upper bits say which window it is.
        self.rkey = self.mw.first_rkey() & !0xff | self.rkey.wrapping_add(1) & 0xff;
        let bind = MwBind { rkey: self.rkey, lkey, addr, len, access: Access::REMOTE_WRITE };
        self.carry_out(endpoint, SendOp::BindMw(Box::new(bind)), WcOpcode::BindMw)?;
        self.bound = true;
        Ok(self.rkey)
    }

    /// The peer invalidated it. (If not, it cannot be bound again.)
    pub(super) fn was_closed(&mut self) {
        self.bound = false;
    }

    /// Invalidates it, if it is bound.
    pub(super) fn close(&mut self, endpoint: &Endpoint) -> Result<()> {
        if std::mem::take(&mut self.bound) {
            self.carry_out(endpoint, SendOp::LocalInv { rkey: self.rkey }, WcOpcode::LocalInv)?;
        }
        Ok(())
    }

    fn carry_out(&self, endpoint: &Endpoint, op: SendOp, opcode: WcOpcode) -> Result<()> {
        let (flags, data) = (SendFlags::SIGNALED, SendData::Sges(std::iter::empty().collect()));
        self.qp.post_send(SendWr { wr_id: 0, op, flags, data, ud: None, xrc_srqn: None })?;
        self.qp.ring();
        let completion = endpoint.wait()?;
        if completion.status != WcStatus::Success {
            bail!(status_error(&completion));
        }
        if completion.opcode != opcode {
            bail!("{opcode:?} completed as {:?}", completion.opcode);
        }
        Ok(())
    }
}
