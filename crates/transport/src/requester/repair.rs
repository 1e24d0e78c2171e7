//! Sending again only what was lost.
//!
//! A sequence NAK names one missing packet; whether the responder keeps what came behind it, it does not say. So the first time the
//! requester sends just that packet again and waits for the answer to it, a round trip that nothing else costs: a responder that goes
//! back N (kernel rxe, cards) acknowledges that packet, one that keeps packets acknowledges more, or reports the next gap. From then on
//! the requester goes back, or repairs gap by gap while new packets go on. Nothing of this differs on the wire from what the
//! specification has (IBA 9.7.5.2.4: a requester sends again from the PSN of the NAK on; 9.7.4.1.1: duplicates do nothing).

use super::send::charge;
use super::{Cursor, Requester};
use crate::host::{Count, Host, Train, Window};
use crate::qp::{Conn, Outcome};
use crate::timer::{Nanos, Timer};
use crate::wqe::{Failure, Route, message_train};

/// Packets of the first repair of a gap: losses are mostly single.
const RUN_FIRST: u8 = 1;
/// Packets of the second, when the gap turns out to be longer. If even that is not enough, a whole burst was lost, and everything goes
/// again.
const RUN_SECOND: u8 = 8;

/// A responder that drops packets behind a gap is tried anew after so many losses: it may have had no room for them just then.
const LOSSES_PER_TRIAL: u8 = 16;

/// What the responder does with packets behind a gap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Peer {
    #[default]
    Unknown,
    /// It keeps them.
    Keeps,
    /// It drops them; so many losses ago that showed.
    GoesBack(u8),
}

/// How losses are repaired. Places are those among all PSNs of the requester.
#[derive(Debug, Default)]
pub(super) struct Repair {
    /// What is to be sent again: from here (or from the oldest without an answer, if that is behind) ...
    next: u64,
    /// ... to here. What was sent again and has no answer ends here too.
    end: u64,
    /// When that was; `None` if what comes may not be the answer to it.
    sent: Option<Nanos>,
    /// So many packets behind `end` had been sent before it.
    behind: u32,
    /// Packets of the last repair.
    run: u8,
    peer: Peer,
    /// The packet at `next` was sent again, and nothing else is until its answer comes: that tells what the peer does.
    trial: bool,
}

impl Repair {
    /// Nothing but the answer to a trial may be waited for.
    #[inline]
    pub(super) fn holds_back(&self, sent: u32) -> bool {
        self.trial && sent > 0
    }

    /// A trial is going on.
    pub(super) fn is_trial(&self) -> bool {
        self.trial
    }

    /// Everything goes again: there is nothing left to repair.
    pub(super) fn give_up(&mut self) {
        (self.trial, self.next, self.end, self.sent) = (false, 0, 0, None);
    }

    /// The trial drew no answer in time.
    pub(super) fn end_trial(&mut self) -> bool {
        std::mem::take(&mut self.trial)
    }

    /// The first `answered` PSNs have their answers.
    pub(super) fn answered(&mut self, answered: u64) {
        if self.trial && answered > self.next + 1 {
            (self.peer, self.trial) = (Peer::Keeps, false);
        }
    }

    /// An ACK came (or a NAK of a sequence error, `gap`) by which `answered` PSNs have their answers.
    pub(super) fn told(&mut self, answered: u64, gap: bool) {
        if self.trial && answered == self.next + 1 {
            (self.peer, self.trial) = (if gap { Peer::Keeps } else { Peer::GoesBack(0) }, false);
        }
    }

    /// Some repaired packet had no answer when `answered` PSNs had theirs.
    pub(super) fn is_open(&self, answered: u64) -> bool {
        answered < self.end
    }

    /// The round trip of a repair whose last packet has its answer now.
    pub(super) fn round_trip(&mut self, answered: u64, now: Nanos) -> Option<Nanos> {
        if answered < self.end {
            return None;
        }
        self.sent.take().map(|at| now.saturating_sub(at))
    }

    /// A probe goes out: the next answer may be to that.
    pub(super) fn probed(&mut self) {
        self.sent = None;
    }

    /// An ACK, not a NAK, came, up to the end of the repair and no further: the peer has nothing of what was sent behind it before. Network
    /// and peer keep the order mostly; where they do not, this costs some duplicates.
    fn shows_loss_behind(&self, answered: u64) -> bool {
        answered == self.end && self.behind > 0
    }

    /// The packets that the next repair of a gap at place `at` sends; `None`: it is a burst.
    fn next_run(&self, at: u64) -> Option<u8> {
        match self.run {
            _ if at != self.end => Some(RUN_FIRST),
            RUN_FIRST => Some(RUN_SECOND),
            _ => None,
        }
    }
}

impl Requester {
    /// The peer lacks the oldest packet without an answer.
    pub(super) fn fill_gap(&mut self, now: Nanos, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        let plain = self.can_repair();
        match self.repair.peer {
            Peer::Keeps if plain => match self.repair.next_run(self.answered) {
                Some(run) => self.repair_from_here(run, now, conn, host),
                None => {
                    self.repair.peer = Peer::Unknown;
                    self.repeat_lost(now, conn, host)
                }
            },
            // A responder keeps nothing before the first packet of all.
            Peer::Unknown if plain && self.in_flight > 1 && self.answered > 0 => {
                self.repeat_lost(now, conn, host)?;
                (self.repair.trial, self.repair.next) = (true, self.answered);
                Ok(())
            }
            Peer::GoesBack(losses) => {
                let next = losses + 1;
                self.repair.peer = if next < LOSSES_PER_TRIAL { Peer::GoesBack(next) } else { Peer::Unknown };
                self.repeat_lost(now, conn, host)
            }
            Peer::Keeps | Peer::Unknown => self.repeat_lost(now, conn, host),
        }
    }

    /// An ACK came; before it `repairing` told of an open repair and `probed` of a probe without an answer.
    pub(super) fn look_behind(
        &mut self,
        (repairing, probed): (bool, bool),
        now: Nanos,
        conn: Conn<'_>,
        host: &mut impl Host,
    ) -> Outcome {
        if self.repair.peer != Peer::Keeps || !self.can_repair() {
            return Ok(());
        }
        if repairing && self.repair.shows_loss_behind(self.answered) {
            return self.repeat_lost(now, conn, host);
        }
        // What had been sent before the probe is there, or kept, or lost; the oldest of it that has no answer is lost.
        if probed && !self.repair.is_open(self.answered) && self.answers.was_sent_before(self.answered) {
            return self.repair_from_here(RUN_FIRST, now, conn, host);
        }
        Ok(())
    }

    /// READs and atomics are asked for again in their order, and a receiver that asked for time gets it.
    fn can_repair(&self) -> bool {
        self.queue.front().is_some_and(|wqe| !wqe.needs_response())
            && self.sent > 0
            && !self.timers.is_armed(Timer::RnrWait)
    }

    /// Sends the oldest `run` packets without an answer again, ahead of all others.
    fn repair_from_here(&mut self, run: u8, now: Nanos, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        self.may_repeat(now, conn, host)?;
        let packets = u32::from(run).min(self.sent);
        let repair = &mut self.repair;
        (repair.run, repair.behind, repair.sent) = (run, self.sent - packets, None);
        (repair.next, repair.end) = (self.answered, self.answered + u64::from(packets));
        Ok(())
    }

    /// The peer looked, and still lacks the oldest packet without an answer. (It, its repair or the NAK was lost.)
    pub(super) fn repair_again(&mut self, now: Nanos, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        if self.repair.peer != Peer::Keeps || !self.can_repair() {
            self.recovery.unheard();
            return self.repeat_lost(now, conn, host);
        }
        let run = if self.repair.is_open(self.answered) { self.repair.run } else { RUN_FIRST };
        // Other probes until now do not ask for what goes again.
        self.answers.start_anew(self.answered);
        self.repair_from_here(run, now, conn, host)
    }

    /// Puts the next packets that are to be sent again into `out`, if there are any.
    pub(super) fn poll_repair(&mut self, now: Nanos, conn: Conn<'_>, host: &mut impl Host, out: &mut Option<Train>) {
        let from = self.repair.next.max(self.answered);
        if from >= self.repair.end {
            return;
        }
        let ahead = (from - self.answered) as u32;
        let wanted = ((self.repair.end - from) as u32).min(self.sent.saturating_sub(ahead));
        let found = self.find(ahead).filter(|&(index, ..)| wanted > 0 && !self.queue[index].needs_response());
        let Some((index, packet, before)) = found else {
            // Beyond is what goes again in its order.
            self.repair.end = from;
            return;
        };
        let wqe = &self.queue[index];
        let (mtu, packets) = (conn.attr.path_mtu, wanted.min(wqe.packets - packet));
        let len = wqe.len_of(packet, packets, mtu);
        let payload = match wqe.source(conn.init.pd, packet * mtu, len, host) {
            Ok(payload) => payload,
            Err(error) => return self.fail_from(index, before, Failure::local(error), host),
        };
        let psn = self.una.add(ahead);
        out.insert(message_train(wqe, Route::of(conn), packet, packets, psn, payload)).set_ack_req(true);
        self.repair.next = from + u64::from(packets);
        self.repair.sent = Some(now);
        // What was lent had taken less.
        host.window_lost(Window::Requests, charge(len, packets).min(self.charged(ahead, packets)));
        host.count(Count::PacketsRetransmitted, packets);
        self.timers.arm(Timer::Silence, self.recovery.watch_repair(now, conn.attr, self.can_probe()));
    }

    /// What the trains took from their window that have some of the `packets` from the one `ahead` of the oldest without an answer on.
    fn charged(&self, ahead: u32, packets: u32) -> u32 {
        let mut behind = 0;
        let theirs = self.flights.iter().filter(|flight| {
            let first = behind;
            behind += flight.packets;
            first < ahead + packets && ahead < behind
        });
        theirs.map(|flight| flight.charge).sum()
    }

    /// The request that the packet `ahead` of the oldest one without an answer belongs to, which of its packets that is, and how many
    /// packets without an answer the requests before it have.
    pub(super) fn find(&self, ahead: u32) -> Option<(usize, u32, u32)> {
        let mut before = 0;
        for (index, wqe) in self.queue.iter().enumerate() {
            let open = wqe.packets - wqe.acked;
            if ahead < before + open {
                return Some((index, wqe.acked + ahead - before, before));
            }
            before += open;
        }
        None
    }

    /// A request cannot go on: those before it, with `before` packets without an answer, complete first.
    pub(super) fn fail_from(&mut self, index: usize, before: u32, failure: Failure, host: &mut impl Host) {
        let wqe = &mut self.queue[index];
        wqe.failed.get_or_insert(failure);
        if self.cursor.index >= index {
            self.cursor = Cursor { index, packet: wqe.acked };
            self.sent = before;
            self.drop_flights_from(before, host);
        }
    }
}
