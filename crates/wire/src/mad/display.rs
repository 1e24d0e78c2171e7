//! One line per MAD, for logs and captures. Private data is left out.

use core::fmt::{Display, Formatter, Result};

use super::{Mad, Message};

impl Display for Mad {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "{}", self.message)?;
        if self.attr_mod != 0 {
            write!(f, " options {:#x}", self.attr_mod)?;
        }
        if self.status != 0 {
            write!(f, " status {:#x}", self.status)?;
        }
        Ok(())
    }
}

impl Display for Message {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(self.name())?;
        match self {
            Message::Req(m) => write!(
                f,
                " local {:#x} to {} qp {:#x} psn {:#x} guid {:#x}",
                m.local_comm_id, m.service_id, m.local_qpn, m.starting_psn, m.local_ca_guid
            ),
            Message::Mra(m) => {
                ids(f, m.local_comm_id, m.remote_comm_id)?;
                write!(f, " of {} service timeout {}", m.subject, m.service_timeout)
            }
            Message::Rej(m) => {
                ids(f, m.local_comm_id, m.remote_comm_id)?;
                write!(f, " of {} reason {}", m.subject, m.reason)
            }
            Message::Rep(m) => {
                ids(f, m.local_comm_id, m.remote_comm_id)?;
                write!(f, " qp {:#x} psn {:#x} guid {:#x}", m.local_qpn, m.starting_psn, m.local_ca_guid)
            }
            Message::Rtu(m) => ids(f, m.local_comm_id, m.remote_comm_id),
            Message::Dreq(m) => {
                ids(f, m.local_comm_id, m.remote_comm_id)?;
                write!(f, " qp {:#x}", m.remote_qpn)
            }
            Message::Drep(m) => ids(f, m.local_comm_id, m.remote_comm_id),
            Message::Lap(m) => ids(f, m.local_comm_id, m.remote_comm_id),
            Message::Apr(m) => {
                ids(f, m.local_comm_id, m.remote_comm_id)?;
                write!(f, " status {}", m.status)
            }
            Message::SidrReq(m) => write!(f, " request {:#x} to {}", m.request_id, m.service_id),
            Message::SidrRep(m) => {
                write!(f, " request {:#x} status {} qp {:#x} qkey {:#x}", m.request_id, m.status, m.qpn, m.qkey)
            }
        }
    }
}

fn ids(f: &mut Formatter<'_>, local: u32, remote: u32) -> Result {
    write!(f, " local {local:#x} remote {remote:#x}")
}
