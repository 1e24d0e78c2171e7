//! Looking into a lane: what its queue pairs are at, and what they counted.
//!
//! Counting costs the data path a few plain additions; looking holds the lane's lock for some queue pairs at a time, so that a lane
//! with thousands of them is not held up.

use std::sync::{Arc, Weak};

use ferroce_core::Cq;
use ferroce_transport::{QpAttr, QpType, SendStanding};

use crate::counters::{Counters, Strays};
use crate::lane::Lane;
use crate::queue_pair::{QueueCaps, RecvSource};
use crate::run::Entry;

/// Queue pairs of one page.
const PAGE: usize = 64;

/// What carries the packets of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// The link: UDP.
    Link,
    /// A ring in memory that another process of this host maps, too.
    Ring,
    /// Nothing: the peer is in the same lane.
    Lane,
}

/// A queue pair as it is now.
#[derive(Clone, Debug)]
pub struct QpView {
    /// Its number.
    pub qpn: u32,
    /// Service type.
    pub qp_type: QpType,
    /// Protection domain.
    pub pd: u32,
    /// Device, as the queue pair was made with.
    pub device: u32,
    /// Attributes; the PSNs are those that come next.
    pub attr: QpAttr,
    /// Where its requester stands (RC).
    pub standing: Option<SendStanding>,
    /// What carries packets to the connected peer; None: there is none.
    pub carrier: Option<Carrier>,
    /// Sizes.
    pub caps: QueueCaps,
    /// Send requests that are not complete.
    pub sends: u32,
    /// Receive requests posted; None: they come from an SRQ, or it receives nothing.
    pub receives: Option<u32>,
    /// The completion queues for sends and for receives. Weak: looking must not keep alive what the program destroys.
    pub cqs: [Weak<Cq>; 2],
    /// What it counted.
    pub counters: Counters,
}

/// Some queue pairs of a lane.
#[derive(Clone, Debug, Default)]
pub struct QpPage {
    /// At most 64.
    pub views: Vec<QpView>,
    /// Where to go on; None: this was the last page.
    pub next: Option<u16>,
}

impl Lane {
    /// The queue pairs in slots from `first` on, in the order of their slots. One page at a time: between two pages queue pairs come
    /// and go.
    pub fn queue_pairs(&self, first: u16) -> QpPage {
        self.look(|state| {
            let mut entries = state.entries(first);
            let views: Vec<QpView> = entries.by_ref().take(PAGE).map(|entry| view(entry, self.number())).collect();
            QpPage { views, next: entries.next().map(|entry| entry.qp.slot) }
        })
    }

    /// What the queue pairs of each device counted, those that are gone included; by the device's number. In one go, so that the
    /// sums never shrink: about a tenth of a microsecond for each queue pair.
    pub fn device_counters(&self) -> Vec<(u32, Counters)> {
        self.look(|state| state.device_counters())
    }

    /// Packets that reached no queue pair.
    pub fn strays(&self) -> Strays {
        self.look(|state| state.strays())
    }
}

fn view(entry: &Entry, lane: u16) -> QpView {
    let (qp, machine) = (&*entry.qp, &entry.machine);
    let attr = machine.query();
    let init = &qp.init;
    QpView {
        qpn: qp.qpn,
        qp_type: init.transport.qp_type,
        pd: init.transport.pd,
        device: init.device,
        standing: machine.send_standing(),
        carrier: attr.path.as_deref().map(|path| match entry.ring {
            _ if crate::run::is_local(path, attr.dest_qpn, lane) => Carrier::Lane,
            Some(_) => Carrier::Ring,
            None => Carrier::Link,
        }),
        caps: init.caps,
        sends: qp.sends_outstanding(),
        receives: match &init.recv {
            RecvSource::Own(queue) => Some(queue.len()),
            RecvSource::Shared(_) | RecvSource::Domain(_) | RecvSource::Spread(_) | RecvSource::None => None,
        },
        cqs: [&init.send_cq, &init.recv_cq].map(|cq| cq.as_ref().map_or_else(Weak::new, Arc::downgrade)),
        counters: entry.counters.clone(),
        attr,
    }
}
