//! The locked state of a lane and one turn of it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferroce_core::flow::{FlowId, FlowRule};
use ferroce_core::{AsyncQueue, CoreError, Cq};
use ferroce_link::{Link, LinkStats, SendError};
use ferroce_transport::{
    FrameFate, MemoryError, Nanos, Packet, PathAddr, Qp, QpAttr, QpAttrMask, QpState, QpType, Train, Window,
};
use ferroce_wire::{Headers, MULTICAST_QPN, Opcode};
use smallvec::SmallVec;

use crate::clock;
use crate::counters::{CounterSnapshot, Counters, Strays};
use crate::groups::{Group, Groups};
use crate::host::QpHost;
use crate::lane::{LANE_SHIFT, LaneShared, SLOTS_PER_LANE, is_connected};
use crate::packets;
use crate::queue_pair::{QueuePair, QueuePairInit, RecvSource};
use crate::raw::{RawPorts, RawSleep};
use crate::relay::{Relay, Relayed, packet_bytes};
use crate::rings::{Asked, RingId, Rings};
use crate::slots::Slots;
use crate::timers::Timers;
use crate::windows::{Pair, WindowId, Windows};

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
}

/// Queue pairs whose ACK may wait for the program's answer; more than a few are no dialogue but a stream.
const LAZY_MAX: usize = 2;
/// How long such an ACK waits at most before the lane wants a turn.
const LAZY_NS: u64 = 100_000;

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
    waiting: [Waiting; 2],
    timer_queued: Option<Nanos>,
    /// The ring that its packets go through. Chosen when it is connected, and kept: packets shall not overtake each other.
    pub(crate) ring: Option<RingId>,
    /// It left INIT since its last RESET.
    connected: bool,
}

/// How a queue pair stands to the room in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Waiting {
    /// It does not wait for any.
    #[default]
    No,
    /// It is in that window's line.
    InLine(WindowId),
    /// It was called, and was not polled since. Whoever is next in the line relies on it.
    Called(WindowId),
}

/// Everything of a lane but its link: apart, so that packets can be delivered while the link is borrowed.
struct Machines {
    table: Vec<Option<Box<Entry>>>,
    slots: Slots,
    timers: Timers,
    windows: Windows,
    /// Queue pairs that may have something to transmit, in round-robin order.
    active: VecDeque<u16>,
    /// Of these, those of RAW_PACKET whose turn came.
    frames: Vec<u16>,
    relay: Option<Box<dyn Relay>>,
    relay_buffer: Vec<u8>,
    groups: Groups,
    /// Completion queues that hold an event back until their moderation period ends.
    moderated: Vec<Arc<Cq>>,
    /// Queue pairs that owe an ACK to a peer whose message the program was just given.
    lazy: Vec<u16>,
    /// When they became so.
    lazy_since: Nanos,
    /// What queue pairs that are gone counted, by the number of their device.
    gone: Vec<(u32, Counters)>,
    strays: Strays,
}

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
        let mut table = Vec::new();
        table.resize_with(SLOTS_PER_LANE as usize, || None);
        LaneState {
            relayed: relay.is_some() && link.rx_fds().is_empty(),
            link,
            link_watch: ReadWatch::default(),
            frame_watch: ReadWatch::default(),
            rings,
            machines: Machines {
                table,
                // Slots 0 and 1 would be QP 0 and 1 of lane 0, the last one of the last lane that of multicast: never given to programs.
                slots: Slots::new(2, SLOTS_PER_LANE as u16 - 1, seed),
                timers: Timers::default(),
                windows: Windows::new(),
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
            },
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

    /// Sees to it that there is a ring to a lane.
    pub(crate) fn ask_for_ring(&mut self, lane: u16, lease: u64) -> Asked {
        match (&mut self.rings, &mut self.machines.relay) {
            (Some(rings), Some(relay)) => rings.ask(lane, lease, clock::now(), &mut **relay),
            _ => Asked::No,
        }
    }

    pub(crate) fn insert(&mut self, qp: Arc<QueuePair>) {
        let slot = usize::from(qp.slot);
        let machine = Qp::new(qp.init.transport);
        let entry = Entry {
            qp,
            machine,
            counters: Counters::default(),
            own: None,
            active: false,
            waiting: [Waiting::No; 2],
            timer_queued: None,
            ring: None,
            connected: false,
        };
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
        [timers, link, moderation, owing].into_iter().flatten().min()
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
        let machines = &mut self.machines;
        let mut strangers = 0;
        let packets = rings.receive(&mut |lane, headers, payload| {
            if !machines.receive_from_ring(shared, now, lane, headers, payload, lazy) {
                strangers += 1;
            }
        });
        rings.count_strangers(strangers);
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
            && path.src == path.dst
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

impl Machines {
    /// Runs `f` on a queue pair's machine and settles what it changed: state, timers, windows.
    fn with<R>(&mut self, shared: &LaneShared, slot: u16, f: impl FnOnce(&mut Qp, &mut QpHost<'_>) -> R) -> Option<R> {
        let entry = self.table.get_mut(usize::from(slot))?.as_deref_mut()?;
        let qp = Arc::clone(&entry.qp);
        let mut host = QpHost {
            qp: &qp,
            keys: &shared.keys,
            counters: &mut entry.counters,
            windows: &mut self.windows,
            moderated: &mut self.moderated,
            own: entry.own,
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

    fn activate(&mut self, slot: u16) {
        if let Some(entry) = self.table[usize::from(slot)].as_deref_mut()
            && !entry.active
        {
            entry.active = true;
            self.active.push_back(slot);
        }
    }

    fn deliver(&mut self, shared: &LaneShared, now: Nanos, packet: &Packet<'_>) {
        self.receive(shared, now, packet, false);
    }

    /// Gives a packet from the ring of a lane to its queue pair, if that is connected to that lane; false: it is not.
    fn receive_from_ring(
        &mut self,
        shared: &LaneShared,
        now: Nanos,
        lane: u16,
        headers: &Headers,
        payload: &[u8],
        lazy: bool,
    ) -> bool {
        let dest = headers.bth.dest_qp;
        if dest >> LANE_SHIFT != u32::from(shared.number) {
            return false;
        }
        let Some(entry) = self.table[(dest & (SLOTS_PER_LANE - 1)) as usize].as_deref() else { return false };
        let attr = entry.machine.attr();
        let Some(path) = attr.path.as_deref().filter(|path| is_local(path, attr.dest_qpn, lane)) else { return false };
        let net = packets::net_header(path, headers, payload.len());
        self.receive(shared, now, &Packet { headers, payload, net: &net }, lazy);
        true
    }

    /// Gives a packet to its queue pair. With `lazy` a queue pair whose message completed a receive is not polled for its ACK at once.
    fn receive(&mut self, shared: &LaneShared, now: Nanos, packet: &Packet<'_>, lazy: bool) {
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
            Some(_) if self.lazy.contains(&slot) => {}
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
    fn give_frame(&mut self, shared: &LaneShared, slot: u16, tag: u32, frame: &[u8]) {
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

    fn run_moderation(&mut self, now: Nanos) {
        self.moderated.retain(|cq| {
            cq.on_timer(now);
            cq.next_timeout().is_some()
        });
    }

    fn run_timers(&mut self, shared: &LaneShared, now: Nanos) {
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

    fn answer_bell(&mut self, shared: &LaneShared, slot: u16) {
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
    fn next_train(&mut self, shared: &LaneShared, now: Nanos) -> Option<(u16, Train)> {
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

    fn send_failed(&mut self, shared: &LaneShared, slot: u16, train: &Train, error: &SendError) {
        // Anything else is as if the network had lost it: the retry timer decides. The link counted it.
        if matches!(error, SendError::Fault) {
            self.with(shared, slot, |machine, host| {
                machine.handle_transmit_fault(train, MemoryError::Fault, host);
            });
            self.activate(slot);
        }
    }

    fn after_modify(&mut self, qp: &QueuePair, rings: Option<&Rings>) {
        let entry = self.table[usize::from(qp.slot)].as_deref_mut().expect("a live handle has its entry");
        let state = entry.machine.state();
        if state == QpState::Reset {
            qp.forget_posted();
            // What an XRC target completed belongs to the shared receive queues.
            for cq in [&qp.init.send_cq, &qp.init.recv_cq].into_iter().flatten() {
                cq.purge(qp.qpn);
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

impl fmt::Debug for LaneState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaneState").field("active", &self.machines.active.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
pub(crate) mod tests;
