//! The side that asks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use ferroce_wire::{Flow as FlowPacket, FlowKind, Psn};

use super::{ASK_EVERY, Key, PROBE, PROBE_AGAIN, QUESTION_FIRST, QUESTIONS_MAX, packet};
use crate::host::{Count, Drop, Host, Train, WindowSignal};
use crate::requester::{charge, fit};
use crate::timer::Nanos;
use crate::verbs::PathAddr;

/// Destinations that a UD queue pair keeps in mind. One more, and those are forgotten to which nothing is under way.
const FLOWS_MAX: usize = 1024;

/// Where a train goes.
#[derive(Clone, Copy)]
pub(crate) struct To<'a> {
    pub(crate) path: &'a Arc<PathAddr>,
    pub(crate) qpn: u32,
    /// UD, else 0.
    pub(crate) qkey: u32,
}

/// What wants to go.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    /// Packets: no more than a train has.
    pub(crate) packets: u32,
    /// Bytes from here to the end of the message.
    pub(crate) rest: u32,
    pub(crate) mtu: u32,
}

/// What is known of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peer {
    /// Never answered, and its time is not up.
    Unknown,
    /// Answered.
    Ferroce,
    /// Does not answer, or not any more. `probe` is the last question, `again` when the next may be put.
    Stranger { probe: Psn, again: Nanos },
}

/// What was sent from one question to the next.
#[derive(Clone, Copy, Debug)]
struct Flight {
    /// PSN of the packet that asks.
    psn: Psn,
    /// Charged to the window.
    charge: u32,
}

#[derive(Debug)]
struct Flow {
    path: Arc<PathAddr>,
    qkey: u32,
    peer: Peer,
    /// Charge of what was sent since the last question; not yet taken from the window.
    unasked: u32,
    flights: VecDeque<Flight>,
    /// When its patience ends. Runs while there are flights.
    due: Option<Nanos>,
    /// Packets of our own without an answer.
    questions: u32,
}

/// What one UC or UD queue pair has under way, by destination. (UC has one.)
#[derive(Debug, Default)]
pub(crate) struct Flows {
    flows: BTreeMap<Key, Flow>,
    /// Whom to ask by a packet of our own.
    to_ask: VecDeque<Key>,
    /// When whose patience ends.
    due: BTreeSet<(Nanos, Key)>,
}

impl Flows {
    /// Books a train whose first packet has PSN `psn`. Tells how many of its packets may go (0: wait for the window) and whether the
    /// last of these asks.
    pub(crate) fn depart(&mut self, now: Nanos, to: To<'_>, psn: Psn, size: Size, host: &mut impl Host) -> (u32, bool) {
        let key = Key::new(to.path.dst, to.qpn);
        if !key.has_flow() || !self.make_room(key) {
            return (size.packets, false);
        }
        let flow = self.flows.entry(key).or_insert_with(|| Flow::new(to));
        let due = flow.due;
        let departed = flow.depart(now, to, psn, size, host);
        reschedule(&mut self.due, key, due, flow.due);
        departed
    }

    /// Is there room for one more destination? If all have something under way, it goes without flow control.
    fn make_room(&mut self, key: Key) -> bool {
        if self.flows.len() < FLOWS_MAX || self.flows.contains_key(&key) {
            return true;
        }
        self.flows.retain(|_, flow| !flow.flights.is_empty());
        self.flows.len() < FLOWS_MAX
    }

    /// An answer arrived.
    pub(crate) fn answered(
        &mut self,
        now: Nanos,
        from: Key,
        psn: Psn,
        missing: bool,
        host: &mut impl Host,
    ) -> Result<(), Drop> {
        let flow = self.flows.get_mut(&from).ok_or(Drop::GhostResponse)?;
        let (flights, unknown) = match flow.peer {
            Peer::Stranger { probe, .. } if probe == psn => (0, true),
            Peer::Stranger { .. } => return Err(Drop::GhostResponse),
            Peer::Unknown | Peer::Ferroce => {
                let place = flow.flights.iter().position(|flight| flight.psn == psn).ok_or(Drop::GhostResponse)?;
                (place + 1, false)
            }
        };
        host.count(Count::FlowAnswerReceived, 1);
        if unknown {
            flow.unasked = 0;
        }
        flow.peer = Peer::Ferroce;
        flow.questions = 0;
        flow.give_back(
            flights,
            from.qpn,
            if missing { WindowSignal::Lost } else { WindowSignal::Acked { rtt: None } },
            host,
        );
        let due = std::mem::replace(&mut flow.due, (!flow.flights.is_empty()).then_some(now + QUESTION_FIRST));
        reschedule(&mut self.due, from, due, flow.due);
        Ok(())
    }

    /// Puts the next packet of our own into `out`.
    pub(crate) fn poll_transmit(&mut self, qpn: u32, host: &mut impl Host, out: &mut Option<Train>) {
        while let Some(key) = self.to_ask.pop_front() {
            let Some(flow) = self.flows.get(&key) else { continue };
            // Answered meanwhile?
            let Some(last) = flow.flights.back() else { continue };
            host.count(Count::FlowQuestionSent, 1);
            let question = FlowPacket { kind: FlowKind::Question, qkey: flow.qkey, src_qp: qpn };
            *out = Some(packet(key.qpn, last.psn, &question, Some(&flow.path)));
            return;
        }
    }

    /// When something is to be done if no answer comes.
    pub(crate) fn next_timeout(&self) -> Option<Nanos> {
        self.due.first().map(|(due, _)| *due)
    }

    pub(crate) fn handle_timeout(&mut self, now: Nanos, host: &mut impl Host) {
        while let Some(&(due, key)) = self.due.first().filter(|(due, _)| *due <= now) {
            let flow = self.flows.get_mut(&key).expect("patience ends with its flow");
            if flow.peer == Peer::Ferroce && flow.questions < QUESTIONS_MAX {
                flow.questions += 1;
                flow.due = Some(now + (QUESTION_FIRST << flow.questions));
                if !self.to_ask.contains(&key) {
                    self.to_ask.push_back(key);
                }
            } else {
                flow.estrange(now, key.qpn, host);
            }
            reschedule(&mut self.due, key, Some(due), flow.due);
        }
    }

    /// The train that asks about `psn` did not go out after all.
    pub(crate) fn unsent(&mut self, to: To<'_>, psn: Psn, host: &mut impl Host) {
        let key = Key::new(to.path.dst, to.qpn);
        if let Some(flow) = self.flows.get_mut(&key)
            && let Some(place) = flow.flights.iter().position(|flight| flight.psn == psn)
        {
            let flight = flow.flights.remove(place).expect("the place was just found");
            flow.give_back_bytes(flight.charge, to.qpn, WindowSignal::Released, host);
            if flow.flights.is_empty() {
                reschedule(&mut self.due, key, flow.due.take(), None);
            }
        }
    }

    /// Gives the windows back what is under way. What is known of the destinations stays.
    pub(crate) fn release(&mut self, host: &mut impl Host) {
        for (key, flow) in &mut self.flows {
            flow.give_back(flow.flights.len(), key.qpn, WindowSignal::Released, host);
            flow.unasked = 0;
            flow.questions = 0;
            flow.due = None;
        }
        self.to_ask.clear();
        self.due.clear();
    }

    /// What holds between inputs, whatever comes.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn assert_invariants(&self) {
        assert!(self.flows.len() <= FLOWS_MAX && self.due.len() <= self.flows.len());
        for (key, flow) in &self.flows {
            // What is under way is never waited for without a timer.
            assert_eq!(flow.due.is_some(), !flow.flights.is_empty(), "{key:?}: {flow:?}");
            assert!(flow.due.is_none_or(|due| self.due.contains(&(due, *key))), "{key:?}: {flow:?}");
            assert!(flow.flights.is_empty() || !matches!(flow.peer, Peer::Stranger { .. }), "{key:?}: {flow:?}");
        }
    }
}

impl Flow {
    fn new(to: To<'_>) -> Flow {
        Flow {
            path: Arc::clone(to.path),
            qkey: to.qkey,
            peer: Peer::Unknown,
            unasked: 0,
            flights: VecDeque::new(),
            due: None,
            questions: 0,
        }
    }

    /// See [`Flows::depart`].
    fn depart(&mut self, now: Nanos, to: To<'_>, psn: Psn, size: Size, host: &mut impl Host) -> (u32, bool) {
        let of = |packets: u32| charge(size.rest.min(packets * size.mtu), packets);
        let unasked = self.unasked.saturating_add(of(size.packets));
        if unasked < ASK_EVERY {
            self.unasked = unasked;
            return (size.packets, false);
        }
        if let Peer::Stranger { probe, again } = &mut self.peer {
            let ask = *again <= now;
            if ask {
                (*probe, *again) = (psn.add(size.packets - 1), now + PROBE_AGAIN);
                (self.path, self.qkey) = (Arc::clone(to.path), to.qkey);
            }
            self.unasked = if ask { 0 } else { unasked };
            return (size.packets, ask);
        }
        let available = host.window_towards(to.path, to.qpn);
        let packets = fit(size.packets, size.rest, size.mtu, available, !self.flights.is_empty());
        if packets == 0 {
            return (0, false);
        }
        // Crumbs are not asked for.
        let unasked = self.unasked + of(packets);
        if unasked < ASK_EVERY {
            self.unasked = unasked;
            return (packets, false);
        }
        self.unasked = 0;
        (self.path, self.qkey) = (Arc::clone(to.path), to.qkey);
        let charge = unasked.min(available);
        host.window_take_towards(to.path, to.qpn, charge);
        self.flights.push_back(Flight { psn: psn.add(packets - 1), charge });
        let patience = if self.peer == Peer::Unknown { PROBE } else { QUESTION_FIRST };
        self.due.get_or_insert(now + patience);
        (packets, true)
    }

    /// It does not answer: nothing holds back what goes to it.
    fn estrange(&mut self, now: Nanos, qpn: u32, host: &mut impl Host) {
        let last = self.flights.back().expect("patience runs for what is under way");
        // It may still answer that.
        self.peer = Peer::Stranger { probe: last.psn, again: now + PROBE_AGAIN };
        self.questions = 0;
        self.due = None;
        self.give_back(self.flights.len(), qpn, WindowSignal::Released, host);
    }

    /// Gives back the first `flights` flights.
    fn give_back(&mut self, flights: usize, qpn: u32, signal: WindowSignal, host: &mut impl Host) {
        let bytes = self.flights.drain(..flights).map(|flight| flight.charge).sum();
        self.give_back_bytes(bytes, qpn, signal, host);
    }

    fn give_back_bytes(&mut self, bytes: u32, qpn: u32, signal: WindowSignal, host: &mut impl Host) {
        if bytes > 0 {
            host.window_return_towards(&self.path, qpn, bytes, signal);
        }
    }
}

fn reschedule(due: &mut BTreeSet<(Nanos, Key)>, key: Key, from: Option<Nanos>, to: Option<Nanos>) {
    if from != to {
        from.map(|at| due.remove(&(at, key)));
        to.map(|at| due.insert((at, key)));
    }
}
