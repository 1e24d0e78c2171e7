//! The RC requester: turns send requests into request packets, keeps them until they are acknowledged, sends again what was lost.
//!
//! Everything is counted from `una`, the oldest PSN without an answer:
//!
//! ```text
//!      una            una + sent           una + in_flight
//!       |  sent in this    |  sent before a      |  never sent
//!       |  pass            |  go-back            |
//! ```
//!
//! Going back always goes to `una` (go-back-N, IBA 9.7.7.2): a NAK or a gap says that all before it arrived. `flights` lists the
//! trains of the present pass, whose bytes are charged to the windows. A peer that keeps what comes behind a gap is sent only what it
//! lacks (`repair`), which moves none of these.

mod probe;
mod receive;
mod repair;
mod send;

use std::collections::VecDeque;

use ferroce_wire::Psn;

use crate::host::{Count, Host, MemoryError, Train, Window, WindowSignal};
use crate::qp::{Conn, Outcome, Upset};
use crate::recovery::{Due, Recovery};
use crate::responder::Rendezvous;
use crate::timer::{Nanos, Timer, TimerTable};
use crate::verbs::{QpState, SendStanding, SendWr};
use crate::wqe::{Failure, Owner, Wqe};

use probe::{Answers, Copies, Probe};
use repair::Repair;
pub(crate) use send::{charge, fit};

/// Most PSNs without an answer: half of what PSN comparison can tell apart.
const IN_FLIGHT_MAX: u32 = 1 << 22;

/// A train of the present pass.
#[derive(Clone, Copy, Debug)]
struct Flight {
    /// PSNs without an answer.
    packets: u32,
    /// Bytes charged, and to which window.
    charge: u32,
    window: Window,
    /// A READ or atomic request: counts towards `max_rd_atomic`.
    read: bool,
    /// It asked for an answer.
    asks: bool,
    /// When it was sent, if for the first time and asking for an answer: gives a round trip.
    first_sent: Option<Nanos>,
}

/// Where sending stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cursor {
    /// Request, by its place in the queue.
    index: usize,
    /// Packet of it.
    packet: u32,
}

/// Requester state of one RC queue pair.
#[derive(Debug)]
pub(crate) struct Requester {
    queue: VecDeque<Wqe>,
    cursor: Cursor,
    una: Psn,
    /// PSNs answered so far.
    answered: u64,
    /// PSNs sent at least once and not answered.
    in_flight: u32,
    /// PSNs of these sent in the present pass.
    sent: u32,
    flights: VecDeque<Flight>,
    /// READ and atomic requests among `flights`.
    reads: u32,
    /// The last so many trains did not ask for an ACK.
    unasked: u32,
    /// A missing response was asked for again, and nothing came since: further gaps are the same gap.
    gap_repeated: bool,
    probe: Probe,
    answers: Answers,
    copies: Copies,
    repair: Repair,
    recovery: Recovery,
    timers: TimerTable,
}

impl Requester {
    pub(crate) fn new() -> Requester {
        Requester {
            queue: VecDeque::new(),
            cursor: Cursor::default(),
            una: Psn::new(0),
            answered: 0,
            in_flight: 0,
            sent: 0,
            flights: VecDeque::new(),
            reads: 0,
            unasked: 0,
            gap_repeated: false,
            probe: Probe::None,
            answers: Answers::default(),
            copies: Copies::default(),
            repair: Repair::default(),
            recovery: Recovery::default(),
            timers: TimerTable::default(),
        }
    }

    /// Sets the first PSN: the queue pair goes to RTS.
    pub(crate) fn start(&mut self, psn: Psn) {
        self.una = psn;
    }

    /// The PSN of the next new packet.
    pub(crate) fn new_psn(&self) -> Psn {
        self.una.add(self.in_flight)
    }

    /// Where sending stands.
    pub(crate) fn standing(&self) -> SendStanding {
        let (attempts, rnr_naks) = self.recovery.failed();
        SendStanding { una: self.una, in_flight: self.in_flight, attempts, rnr_naks }
    }

    pub(crate) fn post(&mut self, wr: SendWr) {
        self.queue.push_back(Wqe::new(wr));
    }

    /// Reads the data of a rendezvous request, and tells its sender.
    pub(crate) fn fetch(&mut self, rendezvous: &Rendezvous) {
        self.queue.push_back(Wqe::owned(rendezvous.read(), Owner::Rendezvous));
        self.queue.push_back(Wqe::owned(rendezvous.fin(), Owner::Fin));
    }

    pub(crate) fn next_timeout(&self) -> Option<Nanos> {
        self.timers.next()
    }

    /// Nothing that was started is incomplete. A request whose start failed still has to end in error.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.front().is_none_or(|wqe| !wqe.started && wqe.failed.is_none())
    }

    pub(crate) fn handle_timeout(&mut self, now: Nanos, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        self.timers.take_expired(Timer::RnrWait, now);
        let Some(due) = self.timers.take_expired(Timer::Silence, now) else { return Ok(()) };
        let can_probe = self.can_probe() || self.repair.is_trial();
        match self.recovery.silent(now, due, conn.attr, can_probe) {
            Due::Probe => {
                // Without an answer to a trial the rest goes too.
                if !self.repair.end_trial() && can_probe {
                    self.probe = Probe::Due;
                }
                self.timers.arm(Timer::Silence, self.recovery.next(now, conn.attr, can_probe));
                Ok(())
            }
            Due::Repeat => {
                host.count(Count::Timeout, 1);
                self.repeat(now, WindowSignal::TimedOut, conn, host)
            }
        }
    }

    /// The memory of a train was gone when the link read it: nothing of it went out.
    pub(crate) fn handle_transmit_fault(&mut self, train: &Train, error: MemoryError, host: &mut impl Host) {
        let at = train.head.bth.psn.diff(self.una);
        if at < 0 || at as u32 >= self.in_flight {
            return;
        }
        if let Some((index, _, before)) = self.find(at as u32) {
            self.fail_from(index, before, Failure::local(error), host);
        }
    }

    /// Takes back the trains behind the first `packets` PSNs.
    fn drop_flights_from(&mut self, packets: u32, host: &mut impl Host) {
        let mut total: u32 = self.flights.iter().map(|flight| flight.packets).sum();
        while total > packets {
            let flight = self.flights.pop_back().expect("the trains have that many packets");
            total -= flight.packets;
            self.reads -= u32::from(flight.read);
            host.window_return(flight.window, flight.charge, WindowSignal::Released);
        }
    }

    fn can_probe(&self) -> bool {
        self.copies.to_send(self.answered).is_some()
    }

    /// Goes back to the oldest PSN without an answer, unless it is time to give up.
    fn repeat(&mut self, now: Nanos, signal: WindowSignal, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        self.may_repeat(now, conn, host)?;
        self.go_back(signal, host);
        Ok(())
    }

    /// The same because of a loss.
    fn repeat_lost(&mut self, now: Nanos, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        self.repeat(now, WindowSignal::Lost, conn, host)
    }

    /// Something is to be sent again, unless it is time to give up.
    fn may_repeat(&mut self, now: Nanos, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        if self.recovery.may_repeat(now, conn.attr) {
            return Ok(());
        }
        host.count(Count::RetryExceeded, 1);
        Err(self.fail_front(Failure::no_answer(), conn, host))
    }

    fn go_back(&mut self, signal: WindowSignal, host: &mut impl Host) {
        self.cursor = Cursor { index: 0, packet: self.queue.front().map_or(0, |wqe| wqe.acked) };
        self.sent = 0;
        self.reads = 0;
        self.unasked = 0;
        self.probe = Probe::None;
        self.repair.give_up();
        self.answers.start_anew(self.answered);
        self.timers.cancel(Timer::Silence);
        let mut returned = [0u32; 2];
        for flight in self.flights.drain(..) {
            returned[flight.window as usize] += flight.charge;
        }
        give_back(returned, signal, host);
    }

    /// Completes the front request in error; the queue pair goes to ERR.
    fn fail_front(&mut self, failure: Failure, conn: Conn<'_>, host: &mut impl Host) -> Upset {
        if let Some(wqe) = self.queue.pop_front() {
            wqe.finish(conn.init.qpn, conn.attr.dest_qpn, Some(failure), host);
        }
        Upset::Err
    }

    /// Completes everything as flushed and comes to rest.
    pub(crate) fn flush(&mut self, conn: Conn<'_>, host: &mut impl Host) {
        for wqe in std::mem::take(&mut self.queue) {
            wqe.flush(conn.init.qpn, conn.attr.dest_qpn, host);
        }
        let psn = self.new_psn();
        self.reset(host);
        self.start(psn);
    }

    /// Forgets everything without a completion; gives slots and window back.
    pub(crate) fn reset(&mut self, host: &mut impl Host) {
        self.go_back(WindowSignal::Released, host);
        let slots = self.queue.iter().filter(|wqe| wqe.owner == Owner::Program).count();
        if slots > 0 {
            host.release_send(slots as u32);
        }
        *self = Requester::new();
    }

    /// Completes the front request with success, and with it what is done already.
    fn complete_front(&mut self, conn: Conn<'_>, host: &mut impl Host) {
        loop {
            let wqe = self.queue.pop_front().expect("there is a front request");
            match self.cursor.index.checked_sub(1) {
                Some(index) => self.cursor.index = index,
                // It was answered before a go-back came to its end.
                None => self.cursor.packet = 0,
            }
            wqe.finish(conn.init.qpn, conn.attr.dest_qpn, None, host);
            if !self.queue.front().is_some_and(|wqe| wqe.is_of_this_host() && wqe.started) {
                return;
            }
        }
    }

    /// What holds between inputs, whatever comes.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn assert_invariants(&self) {
        let flying: u32 = self.flights.iter().map(|flight| flight.packets).sum();
        assert_eq!(flying, self.sent, "the trains of this pass are what was sent in it");
        assert!(self.sent <= self.in_flight, "{} of {}", self.sent, self.in_flight);
        let before = self.queue.iter().take(self.cursor.index);
        let open: u32 = before.map(|wqe| wqe.packets - wqe.acked).sum();
        let here = self.queue.get(self.cursor.index).map_or(0, |wqe| wqe.acked);
        assert_eq!(open + self.cursor.packet.saturating_sub(here), self.sent, "the cursor is where sending stands");
        let reads = self.flights.iter().filter(|flight| flight.read).count();
        assert_eq!(reads, self.reads as usize);
        assert!(self.queue.iter().all(|wqe| wqe.acked < wqe.packets || wqe.packets == 0), "what is complete is gone");
        // Something in flight is never waited for without a timer.
        assert!(
            self.sent == 0 || self.timers.is_armed(Timer::Silence) || self.timers.is_armed(Timer::RnrWait),
            "nobody watches {} packets",
            self.sent
        );
    }

    /// New requests may be started.
    fn may_start(conn: Conn<'_>) -> bool {
        conn.state == QpState::Rts
    }
}

fn give_back(returned: [u32; 2], signal: WindowSignal, host: &mut impl Host) {
    for window in [Window::Requests, Window::Responses] {
        let bytes = returned[window as usize];
        if bytes > 0 {
            host.window_return(window, bytes, signal);
        }
    }
}
