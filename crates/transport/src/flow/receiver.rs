//! The side that is asked.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;

use ferroce_wire::{Flow, FlowKind, NetHeader, Psn};

use super::{Key, is_management, packet};
use crate::host::{Count, Drop, Host, Train};
use crate::qp::Conn;
use crate::verbs::{PathAddr, QpType};

/// Most answers that wait at once: one for each sender that asked since the host last let something out. Who is forgotten asks again.
const ANSWERS_MAX: usize = 64;
/// The hop limit of answers to datagrams.
const HOP_LIMIT: u8 = 64;

/// An answer that waits to go out.
#[derive(Debug)]
struct Answer {
    to: Key,
    /// The way back (UD).
    path: Option<Arc<PathAddr>>,
    psn: Psn,
    missing: bool,
}

/// Answers of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    due: VecDeque<Answer>,
}

impl Answers {
    /// The sender `src_qp` asks about `psn`; `missing`: packets were missing before that.
    pub(crate) fn asked(
        &mut self,
        conn: Conn<'_>,
        net: &NetHeader,
        src_qp: u32,
        psn: Psn,
        missing: bool,
        host: &mut impl Host,
    ) {
        let datagram = conn.init.qp_type == QpType::Ud;
        let to = Key::new(net.src, src_qp);
        if is_management(conn.init.qpn) || !to.has_flow() || datagram && is_link_local(net.src) {
            return;
        }
        if let Some(answer) = self.due.iter_mut().find(|answer| answer.to == to) {
            // The newer covers the older.
            if psn.diff(answer.psn) > 0 {
                answer.psn = psn;
            }
            answer.missing |= missing;
            return;
        }
        if self.due.len() >= ANSWERS_MAX {
            host.drop_packet(Drop::Overload);
            return;
        }
        let path = datagram.then(|| Arc::new(way_back(net)));
        self.due.push_back(Answer { to, path, psn, missing });
    }

    /// Puts the next answer into `out`.
    pub(crate) fn poll_transmit(&mut self, conn: Conn<'_>, host: &mut impl Host, out: &mut Option<Train>) {
        let Some(Answer { to, path, psn, missing }) = self.due.pop_front() else { return };
        host.count(Count::FlowAnswerSent, 1);
        let flow = Flow { kind: FlowKind::Answer { missing }, qkey: 0, src_qp: conn.init.qpn };
        *out = Some(packet(to.qpn, psn, &flow, path.as_ref()));
    }

    pub(crate) fn clear(&mut self) {
        self.due.clear();
    }
}

/// The way a datagram came, backwards.
fn way_back(net: &NetHeader) -> PathAddr {
    PathAddr { src: net.dst, dst: net.src, ifindex: 0, tclass: net.tclass, hop_limit: HOP_LIMIT, flow_label: 0 }
}

/// Such an address means nothing without the interface, which the packet does not tell.
fn is_link_local(addr: IpAddr) -> bool {
    matches!(addr, IpAddr::V6(addr) if addr.is_unicast_link_local())
}
