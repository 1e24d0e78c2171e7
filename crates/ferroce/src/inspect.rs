//! What this process tells who asks (`ferroce res`, `ferroce stat`): its thread that follows the interfaces answers.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ferroce_core::{Cq, EntryKind};
use ferroce_engine::{Card, Carrier, QpView};
use ferroce_service::inspect::{
    CqRow, DeviceRow, Inspector, Listed, MrRow, PdRow, QpRow, Snapshot, SrqRow, VERSION, from_pairs,
};
use ferroce_transport::{Access, QpState, QpType};

use crate::objects::{self, Objects};

/// Answers questions about the process.
#[derive(Debug)]
pub(crate) struct Inspection {
    inspector: Inspector,
    card: Weak<Card>,
    objects: Arc<Objects>,
}

impl Inspection {
    pub(crate) fn new(inspector: Inspector, card: &Arc<Card>, objects: &Arc<Objects>) -> Inspection {
        Inspection { inspector, card: Arc::downgrade(card), objects: Arc::clone(objects) }
    }

    /// Readable while somebody asks.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.inspector.fd()
    }

    /// Answers one who asks, if there is one.
    pub(crate) fn answer(&self) {
        /// Whoever could not be accepted (no descriptor is left) still waits: without a pause this would spin.
        const PAUSE: Duration = Duration::from_millis(100);
        let Some(card) = self.card.upgrade() else { return };
        if let Err(error) = self.inspector.answer(|| snapshot(&card, &self.objects)) {
            log::debug!("a question about the process could not be answered: {error}");
            std::thread::sleep(PAUSE);
        }
    }
}

fn snapshot(card: &Card, objects: &Objects) -> Snapshot {
    let names = Names::of(objects);
    let mut snapshot = Snapshot {
        version: VERSION,
        pid: std::process::id(),
        devices: devices(card, objects, &names),
        link: link(card),
        ..Snapshot::default()
    };
    objects.look(|listed| {
        for (pdn, ifindex) in &listed.pds {
            snapshot.pds.push(PdRow { pdn: *pdn, device: names.of_device(*ifindex) });
        }
        for (number, entry) in &listed.cqs {
            // What is being destroyed at this moment is not there any more.
            if let Some(queue) = entry.queue.upgrade() {
                snapshot.cqs.push(cq_row(*number, entry, &queue, &names));
            }
        }
        for (number, entry) in &listed.srqs {
            if let Some(queue) = entry.queue.upgrade() {
                snapshot.srqs.push(srq_row(*number, entry, &queue, &names));
            }
        }
    });
    queue_pairs(card, &names, &mut snapshot.qps);
    for (key, entry) in card.keys().entries() {
        let kind = match entry.kind {
            EntryKind::Region => "MR",
            EntryKind::Window => "MW",
            EntryKind::Null => "null",
        };
        snapshot.mrs.push_with(|| MrRow {
            kind: kind.into(),
            key,
            pdn: entry.pd,
            len: entry.len,
            iova: entry.iova,
            access: access_names(entry.access),
        });
    }
    snapshot
}

/// What numbers stand for.
struct Names {
    /// Devices by interface index.
    devices: BTreeMap<u32, String>,
    /// Numbers of completion queues by their address.
    cqs: HashMap<*const Cq, u32>,
}

impl Names {
    fn of(objects: &Objects) -> Names {
        objects.look(|listed| Names {
            devices: listed.devices.iter().map(|(ifindex, device)| (*ifindex, device.name().to_owned())).collect(),
            cqs: listed.cqs.iter().map(|(number, entry)| (entry.queue.as_ptr(), *number)).collect(),
        })
    }

    fn of_device(&self, ifindex: u32) -> String {
        self.devices.get(&ifindex).cloned().unwrap_or_default()
    }

    fn of_cq(&self, queue: &Weak<Cq>) -> Option<u32> {
        self.cqs.get(&queue.as_ptr()).copied()
    }
}

fn devices(card: &Card, objects: &Objects, names: &Names) -> Vec<DeviceRow> {
    let mut rows: BTreeMap<u32, DeviceRow> = objects.look(|listed| {
        let row = |(ifindex, device): (&u32, &Arc<crate::Device>)| {
            let contexts = listed.contexts.values().filter(|of| *of == ifindex).count() as u32;
            (
                *ifindex,
                DeviceRow {
                    device: names.of_device(*ifindex),
                    interface: device.ifname(),
                    contexts,
                    ..DeviceRow::default()
                },
            )
        };
        listed.devices.iter().map(row).collect()
    });
    for (ifindex, counters) in card.lanes().iter().flat_map(|lane| lane.device_counters()) {
        let row = rows.entry(ifindex).or_default();
        for (name, value) in counters.snapshot() {
            *row.counters.entry(name.to_owned()).or_default() += value;
        }
    }
    rows.into_values().collect()
}

fn link(card: &Card) -> BTreeMap<String, u64> {
    let mut sum = BTreeMap::new();
    for lane in card.lanes() {
        for (name, value) in from_pairs(lane.strays().snapshot().into_iter().chain(lane.link_stats().iter())) {
            *sum.entry(name).or_default() += value;
        }
    }
    sum
}

fn queue_pairs(card: &Card, names: &Names, rows: &mut Listed<QpRow>) {
    for lane in card.lanes() {
        let mut first = Some(0);
        while let Some(at) = first {
            let page = lane.queue_pairs(at);
            page.views.iter().for_each(|view| rows.push_with(|| qp_row(view, names)));
            first = page.next;
        }
    }
}

fn qp_row(view: &QpView, names: &Names) -> QpRow {
    let (attr, path) = (&view.attr, view.attr.path.as_deref());
    let connected = view.qp_type != QpType::Ud && path.is_some();
    let counters = view.counters.snapshot().into_iter().filter(|(_, value)| *value != 0);
    QpRow {
        qpn: view.qpn,
        qp_type: type_name(view.qp_type).into(),
        state: state_name(attr.state).into(),
        device: names.of_device(view.device),
        pdn: view.pd,
        send_cqn: names.of_cq(&view.cqs[0]),
        recv_cqn: names.of_cq(&view.cqs[1]),
        local: path.map(|path| path.src.to_canonical()),
        remote: path.map(|path| path.dst.to_canonical()),
        remote_qpn: connected.then_some(attr.dest_qpn),
        carrier: view.carrier.map(|carrier| carrier_name(carrier).into()),
        path_mtu: attr.path_mtu,
        sq_psn: attr.sq_psn.get(),
        rq_psn: attr.rq_psn.get(),
        una_psn: view.standing.map(|standing| standing.una.get()),
        in_flight: view.standing.map(|standing| standing.in_flight),
        retries: view.standing.map(|standing| standing.attempts),
        rnr_retries: view.standing.map(|standing| standing.rnr_naks),
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        timeout: attr.timeout,
        sends: view.sends,
        max_send_wr: view.caps.max_send_wr,
        receives: view.receives,
        max_recv_wr: view.caps.max_recv_wr,
        counters: from_pairs(counters),
    }
}

fn cq_row(cqn: u32, entry: &objects::Queue<Cq>, queue: &Cq, names: &Names) -> CqRow {
    let device = names.of_device(entry.ifindex);
    CqRow { cqn, device, cqe: queue.capacity(), waiting: queue.len(), channel: queue.channel().is_some() }
}

fn srq_row(srqn: u32, entry: &objects::Queue<ferroce_core::Srq>, srq: &ferroce_core::Srq, names: &Names) -> SrqRow {
    let (device, queue) = (names.of_device(entry.ifindex), srq.queue());
    SrqRow { srqn, device, pdn: entry.pd, receives: queue.len(), max_wr: queue.max_wr(), limit: srq.limit() }
}

fn type_name(qp_type: QpType) -> &'static str {
    match qp_type {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
        QpType::XrcSend => "XRC_SEND",
        QpType::XrcRecv => "XRC_RECV",
        QpType::RawPacket => "RAW_PACKET",
    }
}

fn state_name(state: QpState) -> &'static str {
    match state {
        QpState::Reset => "RESET",
        QpState::Init => "INIT",
        QpState::Rtr => "RTR",
        QpState::Rts => "RTS",
        QpState::Sqd => "SQD",
        QpState::Sqe => "SQE",
        QpState::Err => "ERR",
    }
}

fn carrier_name(carrier: Carrier) -> &'static str {
    match carrier {
        Carrier::Link => "udp",
        Carrier::Ring => "ring",
        Carrier::Lane => "self",
    }
}

fn access_names(access: Access) -> String {
    const NAMES: &[(Access, &str)] = &[
        (Access::LOCAL_WRITE, "local_write"),
        (Access::REMOTE_WRITE, "remote_write"),
        (Access::REMOTE_READ, "remote_read"),
        (Access::REMOTE_ATOMIC, "remote_atomic"),
        (Access::ZERO_BASED, "zero_based"),
        (Access::ON_DEMAND, "on_demand"),
        (Access::FLUSH_GLOBAL, "flush_global"),
    ];
    let names: Vec<&str> = NAMES.iter().filter(|(right, _)| access.contains(*right)).map(|(_, name)| *name).collect();
    names.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_have_their_names() {
        assert_eq!(access_names(Access::empty()), "");
        assert_eq!(access_names(Access::LOCAL_WRITE | Access::REMOTE_READ), "local_write,remote_read");
    }
}
