//! The locked state of a lane and one turn of it.

mod machines;

use std::fmt;
use std::sync::Arc;

use ferroce_core::flow::{FlowId, FlowRule};
use ferroce_core::{AsyncQueue, CoreError};
use ferroce_link::ring::{Arrival, Lost};
use ferroce_link::{Link, LinkStats, SendError};
use ferroce_transport::{FrameFate, Nanos, Packet, PathAddr, QpAttr, QpAttrMask, QpState, QpType, Train};
use ferroce_wire::Headers;
use smallvec::SmallVec;

pub(crate) use self::machines::Entry;
use self::machines::{Machines, stays_here};
use crate::clock;
use crate::counters::{CounterSnapshot, Counters, Strays};
use crate::groups::Group;
use crate::lane::{LANE_SHIFT, LaneShared};
use crate::packets;
use crate::queue_pair::{QueuePair, QueuePairInit};
use crate::raw::{RawPorts, RawSleep};
use crate::relay::{Relay, Relayed};
use crate::rings::{Asked, Rings};

/// Datagrams taken from the link in one turn.
const RECEIVE_BUDGET: usize = 16;
/// How often the link is read before timers that are due: more than a receive buffer holds, and yet a bound.
const RECEIVES_BEFORE_TIMERS: usize = 64;
/// Trains handed to the link between two looks at the receive side.
const TRAINS_PER_FLUSH: usize = 16;
/// Frames that a RAW_PACKET queue pair sends before others come.
const FRAMES_AT_ONCE: usize = 16;
/// Flushes in one turn; what is left then waits for the next turn.
const FLUSHES_PER_TURN: usize = 8;

/// What a turn does, by who runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Take packets from the link.
    link: bool,
    /// Look at the relay: it is rare and costs a system call.
    relay: bool,
    /// The program gets control next and will probably answer what it received: its ACKs may wait for that.
    lazy: bool,
}

impl Turn {
    /// A poster only wants its requests out.
    pub(crate) const POST: Turn = Turn { link: false, relay: false, lazy: false };
    /// A polling program.
    pub(crate) const PROGRAM: Turn = Turn { link: true, relay: false, lazy: true };
    /// A polling program now and then, and one that waits for an event.
    pub(crate) const PROGRAM_ALL: Turn = Turn { link: true, relay: true, lazy: true };
    /// The progress thread.
    pub(crate) const PROGRESS: Turn = Turn { link: true, relay: true, lazy: false };
    /// The progress thread while it waits awake: it will look at the relay before it sleeps for long.
    pub(crate) const PROGRESS_AWAKE: Turn = Turn { link: true, relay: false, lazy: false };

    /// Does a thread of the program run it that waits for something?
    pub(crate) fn is_of_program(self) -> bool {
        self.lazy
    }
}

/// Queue pairs whose ACK may wait for the program's answer; more than a few are no dialogue but a stream.
const LAZY_MAX: usize = 2;
/// How long such an ACK waits at most before the lane wants a turn.
const LAZY_NS: u64 = 100_000;

/// Does the packet come back to the lane that sends it? Source and destination GID are the same address of this host, and within one
/// network namespace a lane number belongs to one process.
pub(crate) fn is_local(path: &PathAddr, dest_qp: u32, lane: u16) -> bool {
    path.src == path.dst && dest_qp >> LANE_SHIFT == u32::from(lane)
}

/// How long the link, and frames, may go unread while the rings are polled: a system call costs more than a look at them.
const UNREAD_NS: Nanos = 5_000;
/// How long after it had something it is read in every turn all the same.
const BUSY_NS: Nanos = 1_000_000;

/// When the link has to be read, or the frames of devices, in a lane that has rings as well.
#[derive(Debug, Default)]
struct ReadWatch {
    read_at: Nanos,
    busy_until: Nanos,
}

impl ReadWatch {
    fn is_due(&self, now: Nanos) -> bool {
        now < self.busy_until || now >= self.read_at + UNREAD_NS
    }

    fn was_read(&mut self, now: Nanos, received: usize) {
        self.read_at = now;
        if received > 0 {
            self.busy_until = now + BUSY_NS;
        }
    }
}

/// See the module's text.
pub(crate) struct LaneState {
    link: Box<dyn Link>,
    /// The link only sends: what the network has for the lane comes by the relay, as another user's service has it.
    relayed: bool,
    link_watch: ReadWatch,
    frame_watch: ReadWatch,
    /// None: packets to other processes on this host go over the link.
    rings: Option<Rings>,
    machines: Machines,
    /// Devices whose frames are sent and received.
    raw: RawPorts,
    /// A frame that is sent.
    frame: Vec<u8>,
    /// Trains given to the link since the last flush; their index is the link's cookie.
    sent: Vec<(u16, Train)>,
    /// Payload of a train to this very lane.
    scratch: Vec<u8>,
}

impl LaneState {
    pub(crate) fn new(
        link: Box<dyn Link>,
        relay: Option<Box<dyn Relay>>,
        rings: Option<Rings>,
        raw: Arc<RawSleep>,
        seed: u64,
    ) -> LaneState {
        LaneState {
            relayed: relay.is_some() && link.rx_fds().is_empty(),
            link,
            link_watch: ReadWatch::default(),
            frame_watch: ReadWatch::default(),
            rings,
            machines: Machines::new(relay, seed),
            raw: RawPorts::new(raw),
            frame: Vec::new(),
            sent: Vec::new(),
            scratch: vec![0; ferroce_transport::MAX_TRAIN_BYTES as usize],
        }
    }

    /// The event queues of the contexts that have queue pairs here, each once.
    pub(crate) fn event_queues(&self) -> Vec<Arc<AsyncQueue>> {
        let mut queues: Vec<Arc<AsyncQueue>> = Vec::new();
        for entry in self.machines.table.iter().flatten() {
            let events = &entry.qp.init.events;
            if !queues.iter().any(|known| Arc::ptr_eq(known, events)) {
                queues.push(Arc::clone(events));
            }
        }
        queues
    }

    /// A number for a queue pair, and its entry to the device if it sends and receives frames.
    pub(crate) fn take_slot(&mut self, init: &QueuePairInit) -> Result<u16, CoreError> {
        let is_raw = init.transport.qp_type == QpType::RawPacket;
        if self.machines.slots.is_empty() {
            return Err(CoreError::new(libc::ENOMEM, "all queue pair numbers of this process's lane are taken"));
        }
        if is_raw {
            self.raw.enter(init.device)?;
        }
        Ok(self.machines.slots.take().expect("there is one"))
    }

    /// What the queue pairs of each device counted, those that are gone included; by the device's number.
    pub(crate) fn device_counters(&self) -> Vec<(u32, Counters)> {
        let mut devices = self.machines.gone.clone();
        for entry in self.entries(0) {
            add_to(&mut devices, entry.qp.init.device, &entry.counters);
        }
        devices
    }

    pub(crate) fn strays(&self) -> Strays {
        self.machines.strays
    }

    pub(crate) fn counters(&self) -> CounterSnapshot {
        let mut sum = Counters::default();
        self.device_counters().iter().for_each(|(_, counters)| sum.add(counters));
        sum.snapshot().into_iter().chain(self.machines.strays.snapshot()).collect()
    }

    /// The queue pairs in slots from `first` on.
    pub(crate) fn entries(&self, first: u16) -> impl Iterator<Item = &Entry> {
        self.machines.table[usize::from(first)..].iter().flatten().map(|entry| &**entry)
    }

    pub(crate) fn link_stats(&self) -> LinkStats {
        let mut stats = self.link.stats();
        stats.merge(self.raw.stats());
        if let Some(rings) = &self.rings {
            stats.merge(rings.stats());
        }
        stats
    }

    /// See [`Rings::borrow`].
    pub(crate) fn borrow(&mut self) {
        if let Some(rings) = &mut self.rings {
            rings.borrow();
        }
    }

    /// Peers on this host may read nothing any more of what they were lent.
    pub(crate) fn recall(&self) {
        if let Some(rings) = &self.rings {
            rings.recall();
        }
    }

    /// Sees to it that there is a ring to a lane.
    pub(crate) fn ask_for_ring(&mut self, lane: u16, lease: u64) -> Asked {
        match (&mut self.rings, &mut self.machines.relay) {
            (Some(rings), Some(relay)) => rings.ask(lane, lease, clock::now(), &mut **relay),
            _ => Asked::No,
        }
    }

    pub(crate) fn insert(&mut self, qp: Arc<QueuePair>) {
        let slot = usize::from(qp.slot);
        let entry = Entry::new(qp);
        assert!(self.machines.table[slot].is_none(), "a free slot holds no queue pair");
        self.machines.table[slot] = Some(Box::new(entry));
    }

    pub(crate) fn remove(&mut self, shared: &LaneShared, qp: &QueuePair) {
        // Through RESET, so that windows get back what was in flight.
        let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        let moved = self.modify(shared, qp, &reset, QpAttrMask::STATE);
        assert!(moved.is_ok(), "every state may go to RESET");
        if let Some(entry) = self.machines.table[usize::from(qp.slot)].take() {
            add_to(&mut self.machines.gone, qp.init.device, &entry.counters);
        }
        self.machines.groups.forget(qp.slot);
        if qp.init.transport.qp_type == QpType::RawPacket {
            self.raw.leave(qp.init.device, qp.slot);
        }
        self.machines.slots.give_back(qp.slot);
    }

    /// The entry of a queue pair, unless it was destroyed: then its slot is empty, or another's.
    fn entry(&self, qp: &QueuePair) -> Result<&Entry, CoreError> {
        self.machines.table[usize::from(qp.slot)]
            .as_deref()
            .filter(|entry| std::ptr::eq(&*entry.qp, qp))
            .ok_or_else(|| CoreError::new(libc::EINVAL, "the queue pair is destroyed"))
    }

    pub(crate) fn query(&self, qp: &QueuePair) -> Result<QpAttr, CoreError> {
        Ok(self.entry(qp)?.machine.query())
    }

    /// Gives the queue pair a copy of every datagram to the group.
    pub(crate) fn attach(&mut self, qp: &QueuePair, group: Group) -> Result<(), CoreError> {
        self.entry(qp)?;
        self.machines.groups.attach(group, qp.slot)
    }

    pub(crate) fn detach(&mut self, qp: &QueuePair, group: Group) -> Result<(), CoreError> {
        self.entry(qp)?;
        self.machines.groups.detach(group, qp.slot);
        Ok(())
    }

    /// Steers frames to a queue pair.
    pub(crate) fn add_flow(&mut self, qp: &QueuePair, rule: FlowRule) -> Result<FlowId, CoreError> {
        self.entry(qp)?;
        if qp.init.transport.qp_type != QpType::RawPacket {
            return Err(CoreError::new(libc::EINVAL, "qp: flows are for RAW_PACKET queue pairs"));
        }
        self.raw.add_flow(qp.init.device, qp.slot, rule)
    }

    pub(crate) fn remove_flow(&mut self, qp: &QueuePair, id: FlowId) -> Result<(), CoreError> {
        if self.raw.remove_flow(qp.init.device, id) {
            return Ok(());
        }
        Err(CoreError::new(libc::EINVAL, "the flow is destroyed already"))
    }

    pub(crate) fn modify(
        &mut self,
        shared: &LaneShared,
        qp: &QueuePair,
        attr: &QpAttr,
        mask: QpAttrMask,
    ) -> Result<(), CoreError> {
        self.entry(qp)?;
        let result = self
            .machines
            .with(shared, qp.slot, |machine, host| machine.modify(attr, mask, host))
            .expect("the entry is there");
        result.map_err(|error| CoreError::new(libc::EINVAL, error.to_string()))?;
        self.machines.after_modify(qp, self.rings.as_ref());
        Ok(())
    }

    /// When the lane needs a turn although nothing arrives; 0 for at once.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        if !self.machines.active.is_empty() {
            return Some(0);
        }
        let timers = self.machines.timers.next();
        let link = self.link.next_due().map(|in_ns| clock::now() + in_ns);
        let moderation = self.machines.moderated.iter().filter_map(|cq| cq.next_timeout()).min();
        let owing = (!self.machines.lazy.is_empty()).then_some(self.machines.lazy_since + LAZY_NS);
        let rings = self.rings.as_ref().and_then(Rings::next_due);
        [timers, link, moderation, owing, rings].into_iter().flatten().min()
    }

    /// One turn. Tells whether the link had packets.
    pub(crate) fn run(&mut self, shared: &LaneShared, now: Nanos, turn: Turn, bells: &[u16]) -> bool {
        self.machines.windows.tidy();
        let owing: SmallVec<[u16; LAZY_MAX]> = self.machines.lazy.drain(..).collect();
        let relayed = if turn.relay && !self.relayed { self.receive_relayed(shared, now) } else { 0 };
        let received = relayed + if turn.link { self.receive_due(shared, now, turn) } else { 0 };
        // A poster, who reads nothing, leaves the timers to others.
        if turn.link && self.machines.timers.is_due(now) {
            self.drain(shared, now, turn.lazy);
            self.machines.run_timers(shared, now);
        }
        for slot in bells {
            self.machines.answer_bell(shared, *slot);
        }
        self.machines.run_moderation(now);
        for slot in owing {
            self.machines.activate(slot);
        }
        for _ in 0..FLUSHES_PER_TURN {
            if self.machines.active.is_empty() {
                break;
            }
            self.transmit(shared, now);
            self.transmit_frames(shared, now);
            self.flush(shared);
        }
        if let Some(rings) = &mut self.rings {
            rings.give_back(now);
        }
        received > 0
    }

    /// Takes what the rings have, and what the link and the devices have if it is their turn; gives the number of datagrams.
    fn receive_due(&mut self, shared: &LaneShared, now: Nanos, turn: Turn) -> usize {
        let mut received = self.receive_rings(shared, now, turn.lazy);
        // Who sleeps on the sockets must have read them.
        let all = self.rings.as_ref().is_none_or(Rings::is_empty) || turn.relay && received == 0;
        if all || self.frame_watch.is_due(now) {
            received += self.receive_frames(shared, now);
        }
        if all || self.link_watch.is_due(now) {
            received += self.receive(shared, now, turn.lazy);
        }
        received
    }

    /// Before a timer runs out, whatever came before is read: the answer may be waiting behind others. (`now` is older than what is read.)
    fn drain(&mut self, shared: &LaneShared, now: Nanos, lazy: bool) {
        for _ in 0..RECEIVES_BEFORE_TIMERS {
            if self.receive_rings(shared, now, lazy) + self.receive(shared, now, lazy) == 0 {
                break;
            }
        }
    }

    /// Takes packets from the link, or from the relay where that is how all of them come; gives the number of datagrams.
    fn receive(&mut self, shared: &LaneShared, now: Nanos, lazy: bool) -> usize {
        if self.relayed {
            let packets = self.receive_relayed(shared, now);
            self.link_watch.was_read(now, packets);
            return packets;
        }
        let machines = &mut self.machines;
        let datagrams = self.link.recv(RECEIVE_BUDGET, &mut |net, headers, payload| {
            machines.receive(shared, now, &Packet { headers, payload, net }, lazy);
        });
        self.link_watch.was_read(now, datagrams);
        datagrams
    }

    /// Takes frames of devices; gives their number.
    fn receive_frames(&mut self, shared: &LaneShared, now: Nanos) -> usize {
        let machines = &mut self.machines;
        let frames = self.raw.receive(&mut |slot, tag, frame| machines.give_frame(shared, slot, tag, frame));
        self.frame_watch.was_read(now, frames);
        frames
    }

    /// Takes packets from the rings; gives their number.
    fn receive_rings(&mut self, shared: &LaneShared, now: Nanos, lazy: bool) -> usize {
        let Some(rings) = &mut self.rings else { return 0 };
        let (machines, scratch) = (&mut self.machines, &mut self.scratch);
        let (mut strangers, mut unfetched) = (0, 0);
        let packets = rings.receive(&mut |lane, arrival| match arrival {
            Arrival::Packet(headers, payload) => {
                let known = machines.receive_from_ring(shared, now, lane, headers, payload, lazy);
                strangers += u64::from(!known);
            }
            Arrival::Loan(loan) => match machines.receive_loan(shared, now, lane, loan, scratch, lazy) {
                Some(Ok(())) => {}
                Some(Err(Lost)) => unfetched += u64::from(loan.packets()),
                None => strangers += u64::from(loan.packets()),
            },
        });
        rings.count_strangers(strangers);
        rings.count_unfetched(unfetched);
        packets
    }

    /// Takes what the relay brought for this lane; gives the number of packets.
    fn receive_relayed(&mut self, shared: &LaneShared, now: Nanos) -> usize {
        let Some(mut relay) = self.machines.relay.take() else { return 0 };
        let (machines, mut calls, mut packets) = (&mut self.machines, Vec::new(), 0);
        relay.receive(&mut |relayed| match relayed {
            Relayed::Packet(net, bytes) => match Headers::parse(bytes) {
                Ok((headers, payload)) => {
                    packets += 1;
                    machines.deliver(shared, now, &Packet { headers: &headers, payload: &bytes[payload], net });
                }
                Err(_) => machines.strays.bad_relayed += 1,
            },
            Relayed::Ring(call) => calls.push(call),
        });
        if let Some(rings) = &mut self.rings {
            calls.into_iter().for_each(|call| rings.hear(call, now, &mut *relay));
        }
        self.machines.relay = Some(relay);
        packets
    }

    fn transmit(&mut self, shared: &LaneShared, now: Nanos) {
        for _ in 0..TRAINS_PER_FLUSH {
            let Some((slot, train)) = self.machines.next_train(shared, now) else { return };
            self.send(shared, now, slot, train);
        }
    }

    /// Sends frames of the RAW_PACKET queue pairs whose turn came.
    fn transmit_frames(&mut self, shared: &LaneShared, now: Nanos) {
        for slot in std::mem::take(&mut self.machines.frames) {
            for _ in 0..FRAMES_AT_ONCE {
                if !self.transmit_frame(shared, now, slot) {
                    break;
                }
            }
        }
    }

    /// Sends the next frame of a queue pair; false: it has none to send now.
    fn transmit_frame(&mut self, shared: &LaneShared, now: Nanos, slot: u16) -> bool {
        let (machines, frame) = (&mut self.machines, &mut self.frame);
        let polled =
            machines.with(shared, slot, |machine, host| machine.poll_frame(frame, host).then_some(host.qp.init.device));
        let Some(device) = polled.flatten() else { return false };
        let (fate, receivers) = self.raw.send(device, frame, now);
        machines.with(shared, slot, |machine, host| {
            if fate == FrameFate::Taken {
                host.counters.sent(1, frame.len() as u32);
            }
            machine.handle_frame_fate(fate, host);
        });
        for (slot, tag) in receivers {
            machines.give_frame(shared, slot, tag, frame);
        }
        // It goes on when the others had their turn.
        machines.activate(slot);
        true
    }

    fn send(&mut self, shared: &LaneShared, now: Nanos, slot: u16, train: Train) {
        let entry = self.machines.table[usize::from(slot)].as_deref_mut().expect("a train has its queue pair");
        entry.counters.sent(train.packets, train.len);
        let qpn = entry.qp.qpn;
        let path: Arc<PathAddr> = match (&train.path, &entry.machine.attr().path) {
            (Some(path), _) | (None, Some(path)) => Arc::clone(path),
            (None, None) => unreachable!("a queue pair without a path transmits nothing"),
        };
        if is_local(&path, train.head.bth.dest_qp, shared.number) {
            self.deliver_local(shared, now, slot, &path, &train);
            return;
        }
        if let (Some(rings), Some(ring)) = (&mut self.rings, entry.ring)
            && stays_here(&entry.machine)
        {
            let lane = (train.head.bth.dest_qp >> LANE_SHIFT) as u16;
            if let Err(error) = rings.send(ring, lane, &train) {
                self.machines.send_failed(shared, slot, &train, &error);
            }
            return;
        }
        match self.link.send(self.sent.len() as u64, qpn, &path, &train) {
            Ok(()) => self.sent.push((slot, train)),
            Err(error) => self.machines.send_failed(shared, slot, &train, &error),
        }
    }

    fn flush(&mut self, shared: &LaneShared) {
        let machines = &mut self.machines;
        let sent = &self.sent;
        self.link.flush(&mut |cookie, error| {
            let (slot, train) = &sent[cookie as usize];
            machines.send_failed(shared, *slot, train, &error);
        });
        self.sent.clear();
        if let Some(rings) = &mut self.rings {
            rings.flush();
        }
    }

    /// The self link: delivers to this lane itself, without socket and ICRC; one copy into the lane's scratch, one out.
    fn deliver_local(&mut self, shared: &LaneShared, now: Nanos, slot: u16, path: &PathAddr, train: &Train) {
        let len = train.len as usize;
        if packets::load(train, &mut self.scratch[..len]).is_err() {
            self.machines.send_failed(shared, slot, train, &SendError::Fault);
            return;
        }
        for index in 0..train.packets {
            let (headers, range) = packets::packet(train, index);
            let payload = &self.scratch[range];
            let net = packets::net_header(path, &headers, payload.len());
            self.machines.deliver(shared, now, &Packet { headers: &headers, payload, net: &net });
        }
    }
}

/// Adds counters to those of a device.
fn add_to(devices: &mut Vec<(u32, Counters)>, device: u32, counters: &Counters) {
    match devices.iter_mut().find(|(known, _)| *known == device) {
        Some((_, sum)) => sum.add(counters),
        None => devices.push((device, counters.clone())),
    }
}

impl fmt::Debug for LaneState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaneState").field("active", &self.machines.active.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
pub(crate) mod tests;
