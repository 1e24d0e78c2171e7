//! RC requester: what the peer's answers mean (IBA 9.7.5).

use ferroce_wire::{Aeth, Headers, Opcode, Psn, Syndrome};

use super::send::read_chunk_end;
use super::{Probe, Requester, give_back};
use crate::decode::{Part, as_rc};
use crate::host::{Count, Drop, Host, Packet, WindowSignal};
use crate::qp::{Conn, Outcome};
use crate::timer::{Nanos, Timer, rnr_delay};
use crate::verbs::WcStatus;
use crate::wqe::{Failure, vendor};

impl Failure {
    pub(super) fn no_answer() -> Failure {
        Failure::new(WcStatus::RetryExcErr, vendor::NO_ANSWER)
    }

    fn bad_response() -> Failure {
        Failure::new(WcStatus::BadRespErr, vendor::BAD_RESPONSE)
    }

    fn nak(syndrome: Syndrome) -> Failure {
        let status = match syndrome {
            Syndrome::NAK_INVALID_REQUEST => WcStatus::RemInvReqErr,
            Syndrome::NAK_REMOTE_ACCESS => WcStatus::RemAccessErr,
            Syndrome::NAK_REMOTE_OPERATIONAL => WcStatus::RemOpErr,
            _ => WcStatus::BadRespErr,
        };
        Failure::new(status, vendor::REMOTE_NAK + u32::from(syndrome.0))
    }
}

impl Requester {
    /// Handles a response packet.
    pub(crate) fn handle_packet(
        &mut self,
        now: Nanos,
        conn: Conn<'_>,
        packet: &Packet<'_>,
        host: &mut impl Host,
    ) -> Outcome {
        let headers = packet.headers;
        let Some(at) = self.place(headers.bth.psn) else {
            if self.is_old_news(headers) {
                return self.repair_again(now, conn, host);
            }
            host.drop_packet(Drop::GhostResponse);
            return Ok(());
        };
        match as_rc(headers.bth.opcode) {
            Opcode::RC_ACKNOWLEDGE => match headers.aeth {
                Some(aeth) => self.acknowledge(now, at, aeth, conn, host),
                None => {
                    host.drop_packet(Drop::BadLength);
                    Ok(())
                }
            },
            Opcode::RC_ATOMIC_ACKNOWLEDGE => self.atomic_response(now, at, conn, packet, host),
            Opcode::RC_READ_RESPONSE_FIRST => self.read_response(now, at, Part::First, conn, packet, host),
            Opcode::RC_READ_RESPONSE_MIDDLE => self.read_response(now, at, Part::Middle, conn, packet, host),
            Opcode::RC_READ_RESPONSE_LAST => self.read_response(now, at, Part::Last, conn, packet, host),
            Opcode::RC_READ_RESPONSE_ONLY => self.read_response(now, at, Part::Only, conn, packet, host),
            _ => {
                host.drop_packet(Drop::BadOpcode);
                Ok(())
            }
        }
    }

    /// The distance of a PSN that is in flight from the oldest one; `None` for a ghost (IBA 9.7.5.1.4: ignored).
    fn place(&self, psn: Psn) -> Option<u32> {
        u32::try_from(psn.diff(self.una)).ok().filter(|&at| at < self.in_flight)
    }

    /// Is it the answer to a probe, and tells of nothing that is not known?
    fn is_old_news(&mut self, headers: &Headers) -> bool {
        as_rc(headers.bth.opcode) == Opcode::RC_ACKNOWLEDGE
            && headers.aeth.is_some_and(|aeth| aeth.syndrome.is_ack())
            && headers.bth.psn.diff(self.una) < 0
            && self.answers.take()
            && self.probe == Probe::Sent
    }

    /// Would the ACK of the first `count` PSNs have come without a probe?
    fn was_asked_for(&self, count: u32) -> bool {
        let mut packets = 0;
        for flight in &self.flights {
            packets += flight.packets;
            if packets >= count {
                return packets == count && flight.asks;
            }
        }
        // Of a pass before this one.
        true
    }

    fn acknowledge(&mut self, now: Nanos, at: u32, aeth: Aeth, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        let syndrome = aeth.syndrome;
        if syndrome.is_ack() {
            host.count(Count::AckReceived, 1);
            if self.answers.are_due() && !self.was_asked_for(at + 1) {
                self.answers.take();
            }
            let (repairing, probed) = (self.repair.is_open(self.answered), self.probe == Probe::Sent);
            let reached = self.advance(now, at + 1, conn, host);
            if self.queue.front().is_some_and(|wqe| wqe.needs_response()) {
                // No ACK tells of what is behind that.
                self.repair.end_trial();
            } else {
                self.repair.told(self.answered, false);
            }
            return match reached {
                Reached::All if repairing || probed => self.look_behind((repairing, probed), now, conn, host),
                Reached::All => Ok(()),
                Reached::Unanswered => self.response_gap(now, conn, host),
            };
        }
        // A NAK of any kind acknowledges what comes before it (IBA 9.7.5.2.1).
        if let Some(code) = syndrome.rnr_code() {
            host.count(Count::RnrNakReceived, 1);
            return match self.advance(now, at, conn, host) {
                Reached::All => self.receiver_not_ready(now, code, conn, host),
                Reached::Unanswered => self.response_gap(now, conn, host),
            };
        }
        if syndrome == Syndrome::NAK_SEQUENCE {
            host.count(Count::NakSequenceReceived, 1);
            self.advance(now, at, conn, host);
            self.repair.told(self.answered, true);
            // If the receiver asked for time, the repetition waits for its end.
            return self.fill_gap(now, conn, host);
        }
        if syndrome.is_nak() {
            host.count(Count::fatal_nak_received(syndrome), 1);
            return match self.advance(now, at, conn, host) {
                Reached::All => Err(self.fail_front(Failure::nak(syndrome), conn, host)),
                Reached::Unanswered => self.response_gap(now, conn, host),
            };
        }
        host.drop_packet(Drop::BadOpcode);
        Ok(())
    }

    fn receiver_not_ready(&mut self, now: Nanos, code: u8, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        if self.timers.is_armed(Timer::RnrWait) {
            return Ok(());
        }
        if !self.recovery.may_wait_for_receiver(conn.attr) {
            host.count(Count::RnrRetryExceeded, 1);
            return Err(self.fail_front(Failure::new(WcStatus::RnrRetryExcErr, vendor::RNR), conn, host));
        }
        self.go_back(WindowSignal::Released, host);
        let delay = rnr_delay(code);
        // At most 655,360.
        host.count(Count::RnrWaitUs, (delay / 1_000) as u32);
        self.timers.arm(Timer::RnrWait, now + delay);
        Ok(())
    }

    /// A response is missing: asks for it again, once, until something comes (IBA 9.7.5.1.3: implied NAK).
    fn response_gap(&mut self, now: Nanos, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        if self.gap_repeated {
            return Ok(());
        }
        self.repeat_lost(now, conn, host)?;
        self.gap_repeated = true;
        Ok(())
    }

    fn read_response(
        &mut self,
        now: Nanos,
        at: u32,
        part: Part,
        conn: Conn<'_>,
        packet: &Packet<'_>,
        host: &mut impl Host,
    ) -> Outcome {
        if self.advance(now, at, conn, host) == Reached::Unanswered {
            host.drop_packet(Drop::Psn);
            return self.response_gap(now, conn, host);
        }
        let front = self.queue.front().expect("a PSN in flight belongs to a request");
        if front.is_placement() && part == Part::Only && packet.payload.is_empty() {
            self.answered(now, conn, host);
            return Ok(());
        }
        if !front.is_read() {
            return Err(self.fail_front(Failure::bad_response(), conn, host));
        }
        let mtu = conn.attr.path_mtu;
        let offset = front.acked * mtu;
        let expected = (front.len() - offset).min(mtu);
        let ends = offset + expected == read_chunk_end(offset, front.len(), mtu);
        // A repeated request may be answered as a new one (FIRST, ONLY) or as the rest of the old one (MIDDLE, LAST).
        if packet.payload.len() != expected as usize || part.ends() != ends {
            return Err(self.fail_front(Failure::bad_response(), conn, host));
        }
        let last = offset + expected == front.len();
        if let Err(error) = front.store(conn.init.pd, offset, packet.payload, last, host) {
            return Err(self.fail_front(Failure::local(error), conn, host));
        }
        self.answered(now, conn, host);
        Ok(())
    }

    fn atomic_response(
        &mut self,
        now: Nanos,
        at: u32,
        conn: Conn<'_>,
        packet: &Packet<'_>,
        host: &mut impl Host,
    ) -> Outcome {
        if self.advance(now, at, conn, host) == Reached::Unanswered {
            host.drop_packet(Drop::Psn);
            return self.response_gap(now, conn, host);
        }
        let front = self.queue.front().expect("a PSN in flight belongs to a request");
        let (true, Some(value)) = (front.is_atomic(), packet.headers.atomic_ack) else {
            return Err(self.fail_front(Failure::bad_response(), conn, host));
        };
        if let Err(error) = front.store(conn.init.pd, 0, &value.to_ne_bytes(), true, host) {
            return Err(self.fail_front(Failure::local(error), conn, host));
        }
        self.answered(now, conn, host);
        Ok(())
    }

    /// One PSN of the front request was answered.
    fn answered(&mut self, now: Nanos, conn: Conn<'_>, host: &mut impl Host) {
        let front = self.queue.front_mut().expect("there is a front request");
        front.acked += 1;
        if front.acked == front.packets {
            self.complete_front(conn, host);
        }
        self.settle(now, 1, conn, host);
    }

    /// Acknowledges the next `count` PSNs, but goes no further than a READ or atomic that still lacks its response.
    fn advance(&mut self, now: Nanos, count: u32, conn: Conn<'_>, host: &mut impl Host) -> Reached {
        let mut left = count;
        let mut reached = Reached::All;
        while left > 0 {
            let front = self.queue.front_mut().expect("a PSN in flight belongs to a request");
            if front.needs_response() {
                reached = Reached::Unanswered;
                break;
            }
            let step = left.min(front.packets - front.acked);
            front.acked += step;
            left -= step;
            if front.acked == front.packets {
                self.complete_front(conn, host);
            }
        }
        if left < count {
            self.settle(now, count - left, conn, host);
        }
        reached
    }

    /// `count` PSNs got their answers: moves on, gives window back, restarts the timer.
    fn settle(&mut self, now: Nanos, count: u32, conn: Conn<'_>, host: &mut impl Host) {
        self.una = self.una.add(count);
        self.answered += u64::from(count);
        self.copies.answered(self.answered);
        self.repair.answered(self.answered);
        self.in_flight -= count;
        self.sent = self.sent.saturating_sub(count);
        if self.cursor.index == 0 {
            // Answers to what was sent before going back: need not be sent again.
            let acked = self.queue.front().map_or(0, |wqe| wqe.acked);
            self.cursor.packet = self.cursor.packet.max(acked);
        }
        self.land(now, count, host);
        self.gap_repeated = false;
        self.probe = Probe::None;
        self.answers.start_anew(self.answered);
        self.recovery.progress();
        if self.sent > 0 {
            self.timers.arm(Timer::Silence, self.recovery.watch(now, conn.attr, self.can_probe()));
        } else {
            self.timers.cancel(Timer::Silence);
        }
    }

    /// Takes the trains off that `count` PSNs complete.
    fn land(&mut self, now: Nanos, count: u32, host: &mut impl Host) {
        let mut left = count;
        let mut returned = [0u32; 2];
        let mut first_sent = None;
        while left > 0 {
            let Some(flight) = self.flights.front_mut() else { break };
            let step = left.min(flight.packets);
            flight.packets -= step;
            left -= step;
            if flight.packets == 0 {
                returned[flight.window as usize] += flight.charge;
                self.reads -= u32::from(flight.read);
                first_sent = flight.first_sent;
                self.flights.pop_front();
            }
        }
        let rtt = if self.repair.is_open(self.answered - u64::from(count)) {
            // What is behind a gap waited for its repair.
            self.repair.round_trip(self.answered, now)
        } else {
            first_sent.map(|sent_at| now.saturating_sub(sent_at))
        };
        if let Some(rtt) = rtt {
            self.recovery.sample(rtt);
        }
        give_back(returned, WindowSignal::Acked { rtt }, host);
    }
}

/// How far acknowledging went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reached {
    /// All that was asked for.
    All,
    /// Up to a READ or atomic without its response.
    Unanswered,
}
