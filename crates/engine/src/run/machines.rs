//! The queue pairs of a lane: their machines, timers, windows and turns; all of a lane but its link.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferroce_core::{Cq, mem};
use ferroce_link::SendError;
use ferroce_link::ring::{Lending, Loan, Lost};
use ferroce_transport::{EarlyBudget, MemoryError, Nanos, Packet, Qp, QpState, QpType, Span, Train, Window};
use ferroce_wire::{Headers, MULTICAST_QPN, NetHeader, Opcode};
use smallvec::SmallVec;

use super::{LAZY_MAX, is_local};
use crate::counters::{Counters, Strays};
use crate::groups::Groups;
use crate::host::QpHost;
use crate::lane::{LANE_SHIFT, LaneShared, SLOTS_PER_LANE, is_connected};
use crate::packets;
use crate::queue_pair::{QueuePair, RecvSource};
use crate::relay::{Relay, packet_bytes};
use crate::rings::{RingId, Rings};
use crate::slots::Slots;
use crate::timers::Timers;
use crate::windows::{Pair, WindowId, Windows};

/// A queue pair inside its lane.
pub(crate) struct Entry {
    pub(crate) qp: Arc<QueuePair>,
    pub(crate) machine: Qp,
    pub(crate) counters: Counters,
    /// Congestion windows (RC, XRC), chosen when it is connected.
    own: Option<Pair>,
    /// Is in `active`.
    active: bool,
    /// What it waits for, by [`Window`].
    pub(super) waiting: [Waiting; 2],
    timer_queued: Option<Nanos>,
    /// The ring that its packets go through. Chosen when it is connected, and kept: packets shall not overtake each other.
    pub(crate) ring: Option<RingId>,
    /// The peer may fetch memory through that ring.
    lending: Option<Lending>,
    /// It left INIT since its last RESET.
    connected: bool,
}

impl Entry {
    /// In RESET.
    pub(super) fn new(qp: Arc<QueuePair>) -> Entry {
        Entry {
            machine: Qp::new(qp.init.transport),
            qp,
            counters: Counters::default(),
            own: None,
            active: false,
            waiting: [Waiting::No; 2],
            timer_queued: None,
            ring: None,
            lending: None,
            connected: false,
        }
    }
}

/// Its packets stay on this host, so that they go through the ring if it has one.
pub(super) fn stays_here(machine: &Qp) -> bool {
    machine.attr().path.as_deref().is_some_and(|path| path.src == path.dst)
}

/// How a queue pair stands to the room in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Waiting {
    /// It does not wait for any.
    #[default]
    No,
    /// It is in that window's line.
    InLine(WindowId),
    /// It was called, and was not polled since. Whoever is next in the line relies on it.
    Called(WindowId),
}

/// Everything of a lane but its link: apart, so that packets can be delivered while the link is borrowed.
pub(super) struct Machines {
    pub(super) table: Vec<Option<Box<Entry>>>,
    pub(super) slots: Slots,
    pub(super) timers: Timers,
    pub(super) windows: Windows,
    /// What they keep together of packets that come before their turn.
    early: Arc<EarlyBudget>,
    /// Where the payload of the packet at hand is already.
    placed: Option<Span>,
    /// Queue pairs that may have something to transmit, in round-robin order.
    pub(super) active: VecDeque<u16>,
    /// Of these, those of RAW_PACKET whose turn came.
    pub(super) frames: Vec<u16>,
    pub(super) relay: Option<Box<dyn Relay>>,
    relay_buffer: Vec<u8>,
    pub(super) groups: Groups,
    /// Completion queues that hold an event back until their moderation period ends.
    pub(super) moderated: Vec<Arc<Cq>>,
    /// Queue pairs that owe an ACK to a peer whose message the program was just given.
    pub(super) lazy: Vec<u16>,
    /// When they became so.
    pub(super) lazy_since: Nanos,
    /// What queue pairs that are gone counted, by the number of their device.
    pub(super) gone: Vec<(u32, Counters)>,
    pub(super) strays: Strays,
}

impl Machines {
    /// Without queue pairs.
    pub(super) fn new(relay: Option<Box<dyn Relay>>, seed: u64) -> Machines {
        let mut table = Vec::new();
        table.resize_with(SLOTS_PER_LANE as usize, || None);
        Machines {
            table,
            // Slots 0 and 1 would be QP 0 and 1 of lane 0, the last one of the last lane that of multicast: never given to programs.
            slots: Slots::new(2, SLOTS_PER_LANE as u16 - 1, seed),
            timers: Timers::default(),
            windows: Windows::new(),
            early: Arc::default(),
            placed: None,
            active: VecDeque::new(),
            frames: Vec::new(),
            relay,
            relay_buffer: Vec::new(),
            groups: Groups::default(),
            moderated: Vec::new(),
            lazy: Vec::new(),
            lazy_since: 0,
            gone: Vec::new(),
            strays: Strays::default(),
        }
    }

    /// Runs `f` on a queue pair's machine and settles what it changed: state, timers, windows.
    pub(super) fn with<R>(
        &mut self,
        shared: &LaneShared,
        slot: u16,
        f: impl FnOnce(&mut Qp, &mut QpHost<'_>) -> R,
    ) -> Option<R> {
        let entry = self.table.get_mut(usize::from(slot))?.as_deref_mut()?;
        let mut host = QpHost {
            qp: &entry.qp,
            keys: &shared.keys,
            counters: &mut entry.counters,
            windows: &mut self.windows,
            early: &self.early,
            moderated: &mut self.moderated,
            own: entry.own,
            lending: entry.lending.as_ref(),
            lends: entry.lending.is_some() && stays_here(&entry.machine),
            placed: self.placed,
            asked: [None; 2],
            returned: SmallVec::new(),
            srq: None,
            received: false,
        };
        let result = f(&mut entry.machine, &mut host);
        let returned = host.returned;
        entry.qp.set_state(entry.machine.state());
        if let Some(deadline) = entry.machine.next_timeout() {
            self.timers.arm(slot, deadline, &mut entry.timer_queued);
        }
        for id in returned {
            self.call_next(id);
        }
        Some(result)
    }

    /// Polls the queue pair that waits longest for room in a window, if there is any. One at a time: many may wait for little.
    fn call_next(&mut self, id: WindowId) {
        let Some(slot) = self.windows.call_next(id) else { return };
        let entry = self.table[usize::from(slot)].as_deref_mut().expect("who goes steps out of the line");
        let waiting = entry.waiting.iter_mut().find(|waiting| **waiting == Waiting::InLine(id));
        *waiting.expect("it knows that it waits") = Waiting::Called(id);
        self.activate(slot);
    }

    /// The windows that a queue pair was called by, now that it is polled.
    fn take_calls(&mut self, slot: u16) -> SmallVec<[WindowId; 2]> {
        let mut calls = SmallVec::new();
        let entry = self.table[usize::from(slot)].as_deref_mut();
        for waiting in entry.map(|entry| &mut entry.waiting).into_iter().flatten() {
            if let Waiting::Called(id) = *waiting {
                *waiting = Waiting::No;
                calls.push(id);
            }
        }
        calls
    }

    pub(super) fn activate(&mut self, slot: u16) {
        if let Some(entry) = self.table[usize::from(slot)].as_deref_mut()
            && !entry.active
        {
            entry.active = true;
            self.active.push_back(slot);
        }
    }

    pub(super) fn deliver(&mut self, shared: &LaneShared, now: Nanos, packet: &Packet<'_>) {
        self.receive(shared, now, packet, false);
    }

    /// Gives a packet from the ring of a lane to its queue pair, if that is connected to that lane; false: it is not.
    pub(super) fn receive_from_ring(
        &mut self,
        shared: &LaneShared,
        now: Nanos,
        lane: u16,
        headers: &Headers,
        payload: &[u8],
        lazy: bool,
    ) -> bool {
        let Some(net) = self.net_from_ring(shared, lane, headers, payload.len()) else { return false };
        self.receive(shared, now, &Packet { headers, payload, net: &net }, lazy);
        true
    }

    /// IP and UDP facts of a packet from the ring of a lane, if the queue pair that it is for is connected to that lane.
    fn net_from_ring(&self, shared: &LaneShared, lane: u16, headers: &Headers, len: usize) -> Option<NetHeader> {
        let dest = headers.bth.dest_qp;
        if dest >> LANE_SHIFT != u32::from(shared.number) {
            return None;
        }
        let attr = self.table[(dest & (SLOTS_PER_LANE - 1)) as usize].as_deref()?.machine.attr();
        let path = attr.path.as_deref().filter(|path| is_local(path, attr.dest_qpn, lane))?;
        Some(packets::net_header(path, headers, len))
    }

    /// Fetches the payload of packets that the ring of a lane lends, and gives them to their queue pair; `None`: as above. Where the queue pair
    /// tells where the bytes belong they are put there at once.
    pub(super) fn receive_loan(
        &mut self,
        shared: &LaneShared,
        now: Nanos,
        lane: u16,
        loan: &Loan<'_>,
        scratch: &mut [u8],
        lazy: bool,
    ) -> Option<Result<(), Lost>> {
        let head = loan.headers(0);
        let mtu = loan.mtu() as usize;
        self.net_from_ring(shared, lane, &head, mtu)?;
        let slot = (head.bth.dest_qp & (SLOTS_PER_LANE - 1)) as u16;
        let place = self.with(shared, slot, |machine, host| machine.place(&head, loan.bytes(), host)).flatten();
        let place = place.filter(|place| !mem::is_zeros(place.addr));
        let give = |machines: &mut Machines, index: u32, payload: &[u8]| {
            let headers = loan.headers(index);
            // One that was refused ends what was placed: those behind it are no longer expected, and have no bytes of their own.
            if place.is_none() || machines.expects(slot, &headers) {
                machines.receive_from_ring(shared, now, lane, &headers, payload, lazy);
            }
        };
        Some(match place {
            Some(span) => loan.fetch(span.addr).map(|()| {
                self.placed = place;
                (0..loan.packets()).for_each(|index| give(self, index, &scratch[..mtu]));
                self.placed = None;
            }),
            None => loan.read(scratch, &mut |index, payload| give(self, index, payload)),
        })
    }

    fn expects(&self, slot: u16, headers: &Headers) -> bool {
        self.table[usize::from(slot)].as_deref().is_some_and(|entry| entry.machine.expects(headers))
    }

    /// Gives a packet to its queue pair. With `lazy` a queue pair whose message completed a receive is not polled for its ACK at once.
    pub(super) fn receive(&mut self, shared: &LaneShared, now: Nanos, packet: &Packet<'_>, lazy: bool) {
        if packet.net.dst.is_multicast() {
            return self.receive_multicast(shared, now, packet, lazy);
        }
        let dest = packet.headers.bth.dest_qp;
        if dest >> LANE_SHIFT != u32::from(shared.number) {
            self.strays.foreign_lane += 1;
            if let Some(relay) = &mut self.relay {
                packet_bytes(packet.headers, packet.payload, &mut self.relay_buffer);
                relay.forward(packet.net, &self.relay_buffer);
            }
            return;
        }
        self.give(shared, now, (dest & (SLOTS_PER_LANE - 1)) as u16, packet, lazy);
    }

    /// Gives a packet to the queue pairs that are attached to its group, of which the sender may be one (IBA 10.5.2.3). Every lane of
    /// the host that joined gets it from the system: none of it goes to the relay.
    fn receive_multicast(&mut self, shared: &LaneShared, now: Nanos, packet: &Packet<'_>, lazy: bool) {
        let bth = &packet.headers.bth;
        if bth.dest_qp != MULTICAST_QPN || !matches!(bth.opcode, Opcode::UD_SEND_ONLY | Opcode::UD_SEND_ONLY_IMM) {
            self.strays.bad_multicast += 1;
            return;
        }
        let members = self.groups.members(packet.net.dst, packet.net.ifindex);
        self.strays.no_member += u64::from(members.is_empty());
        for slot in members {
            self.give(shared, now, slot, packet, lazy);
        }
    }

    /// Gives a packet to the queue pair of a slot.
    fn give(&mut self, shared: &LaneShared, now: Nanos, slot: u16, packet: &Packet<'_>, lazy: bool) {
        let received = self.with(shared, slot, |machine, host| {
            host.counters.received(packet.payload.len(), packet.net.tclass);
            machine.handle_packet(now, packet, host);
            host.received
        });
        match received {
            None => self.strays.no_queue_pair += 1,
            Some(_) if !self.lazy.is_empty() && self.lazy.contains(&slot) => {}
            Some(true) if lazy && self.lazy.len() < LAZY_MAX => {
                if self.lazy.is_empty() {
                    self.lazy_since = now;
                }
                self.lazy.push(slot);
            }
            Some(_) => self.activate(slot),
        }
    }

    /// Gives a frame to the queue pair of a slot, or to the receive work queue that its hash chooses.
    pub(super) fn give_frame(&mut self, shared: &LaneShared, slot: u16, tag: u32, frame: &[u8]) {
        let Some(entry) = self.table[usize::from(slot)].as_deref() else { return };
        let slot = match &entry.qp.init.recv {
            RecvSource::Spread(rss) => {
                let chosen = rss.choose(frame);
                let there = self.table[usize::from(chosen.slot)].as_deref();
                if !there.is_some_and(|entry| Arc::ptr_eq(&entry.qp, chosen)) {
                    return;
                }
                chosen.slot
            }
            _ => slot,
        };
        self.with(shared, slot, |machine, host| {
            host.counters.received(frame.len(), 0);
            machine.handle_frame(frame, tag, host);
        });
    }

    pub(super) fn run_moderation(&mut self, now: Nanos) {
        self.moderated.retain(|cq| {
            cq.on_timer(now);
            cq.next_timeout().is_some()
        });
    }

    pub(super) fn run_timers(&mut self, shared: &LaneShared, now: Nanos) {
        while let Some((deadline, slot)) = self.timers.pop_due(now) {
            let Some(entry) = self.table[usize::from(slot)].as_deref_mut() else { continue };
            if entry.timer_queued == Some(deadline) {
                entry.timer_queued = None;
            }
            match entry.machine.next_timeout() {
                Some(due) if due <= now => {
                    self.with(shared, slot, |machine, host| machine.handle_timeout(now, host));
                    self.activate(slot);
                }
                Some(later) => self.timers.arm(slot, later, &mut entry.timer_queued),
                None => {}
            }
        }
    }

    pub(super) fn answer_bell(&mut self, shared: &LaneShared, slot: u16) {
        self.with(shared, slot, |machine, host| {
            // First lower the bell, then look: a request posted after the look rings again.
            host.qp.bell.store(false, Ordering::SeqCst);
            while let Some(wr) = host.qp.take_posted() {
                machine.post_send(wr, host);
            }
            if machine.state() == QpState::Err {
                machine.flush_recv(host);
            }
        });
        self.activate(slot);
    }

    /// The next train in round-robin order over the queue pairs.
    pub(super) fn next_train(&mut self, shared: &LaneShared, now: Nanos) -> Option<(u16, Train)> {
        while let Some(slot) = self.active.pop_front() {
            let Some(entry) = self.table[usize::from(slot)].as_deref_mut() else { continue };
            entry.active = false;
            if entry.qp.init.transport.qp_type == QpType::RawPacket {
                self.frames.push(slot);
                continue;
            }
            let calls = self.take_calls(slot);
            let polled = self.with(shared, slot, |machine, host| {
                let train = machine.poll_transmit(now, host);
                (train, host.asked)
            });
            let train = match polled {
                Some((Some(train), _)) => {
                    self.activate(slot);
                    Some((slot, train))
                }
                Some((None, asked)) => {
                    self.line_up(slot, asked);
                    None
                }
                None => None,
            };
            for id in calls {
                self.pass_on(slot, id);
            }
            if train.is_some() {
                return train;
            }
        }
        None
    }

    /// The queue pair asked these windows for room, and has nothing to send now.
    fn line_up(&mut self, slot: u16, asked: [Option<WindowId>; 2]) {
        let Some(entry) = self.table[usize::from(slot)].as_deref_mut() else { return };
        for window in [Window::Requests, Window::Responses] {
            let (Some(id), waiting) = (asked[window as usize], &mut entry.waiting[window as usize]) else { continue };
            if let Waiting::InLine(other) = *waiting
                && other != id
            {
                self.windows.step_out(other, slot);
                *waiting = Waiting::No;
            }
            if *waiting == Waiting::No && self.windows.line_up(id, slot) {
                *waiting = Waiting::InLine(id);
            }
        }
    }

    /// A queue pair that a window called was polled. If it is in the line again, there is too little room for it, and what comes back
    /// calls the next one; else the others' turn goes on.
    fn pass_on(&mut self, slot: u16, id: WindowId) {
        let entry = self.table[usize::from(slot)].as_deref();
        if entry.is_none_or(|entry| !entry.waiting.contains(&Waiting::InLine(id))) {
            self.call_next(id);
        }
    }

    pub(super) fn send_failed(&mut self, shared: &LaneShared, slot: u16, train: &Train, error: &SendError) {
        // Anything else is as if the network had lost it: the retry timer decides. The link counted it.
        if matches!(error, SendError::Fault) {
            self.with(shared, slot, |machine, host| {
                machine.handle_transmit_fault(train, MemoryError::Fault, host);
            });
            self.activate(slot);
        }
    }

    pub(super) fn after_modify(&mut self, qp: &QueuePair, rings: Option<&Rings>) {
        let entry = self.table[usize::from(qp.slot)].as_deref_mut().expect("a live handle has its entry");
        let state = entry.machine.state();
        if state == QpState::Reset {
            qp.forget_posted();
            // What an XRC target completed belongs to the shared receive queues.
            for cq in [&qp.init.send_cq, &qp.init.recv_cq].into_iter().flatten() {
                cq.purge(qp.qpn);
            }
            if let Some(lending) = entry.lending.take() {
                lending.recall();
            }
            (entry.ring, entry.connected) = (None, false);
            let (own, waiting) = (entry.own.take(), std::mem::take(&mut entry.waiting));
            own.into_iter().for_each(|pair| self.windows.leave(pair));
            for waiting in waiting {
                match waiting {
                    Waiting::No => {}
                    Waiting::InLine(id) => self.windows.step_out(id, qp.slot),
                    Waiting::Called(id) => self.call_next(id),
                }
            }
        }
        let entry = self.table[usize::from(qp.slot)].as_deref_mut().expect("a live handle has its entry");
        if is_connected(state) && !entry.connected {
            entry.connected = true;
            let attr = entry.machine.attr();
            let lane = (attr.dest_qpn >> LANE_SHIFT) as u16;
            entry.ring = qp.take_peer_lease().and_then(|lease| rings?.to(lane, lease));
            entry.lending = entry.ring.and_then(|ring| rings?.lending(ring));
            if qp.init.transport.qp_type.is_reliable() {
                entry.own = match (&entry.ring, &attr.path) {
                    (Some(_), _) => Some(self.windows.over_ring(lane)),
                    (None, Some(path)) => Some(self.windows.over_link(path.dst, lane.into())),
                    (None, None) => None,
                };
            }
        }
        self.activate(qp.slot);
    }
}
