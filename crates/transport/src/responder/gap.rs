//! RC responder: packets are missing.
//!
//! One NAK tells of each gap (IBA 9.7.5.2.4). A gap that closes may show another behind it, and a part of one may be missing still when
//! its first packet came: a requester that sent only what was missing, and asks, learns of that at once, for it waits. One that goes back
//! (kernel rxe, cards) is about to send what is missing there too: a gap is told of no more than once again while it becomes narrower,
//! and the next one only if it does not.

use ferroce_wire::{Psn, Syndrome};

use super::early::{Early, EarlyPackets, Kept};
use super::{Reply, Responder};
use crate::decode::request;
use crate::host::{Count, Drop, Host, Packet};
use crate::qp::{Conn, Outcome};
use crate::timer::Nanos;

/// What is known of the present gap, and of who has to fill it.
#[derive(Debug, Default)]
pub(super) struct Gap {
    /// The NAK was one of a receiver that is not ready: what is behind comes again, and is not kept.
    pub(super) not_ready: bool,
    /// Since the NAK was queued some packet was not kept.
    dropped: bool,
    /// A packet was kept behind the one that closed the last gap, and nothing came since that tells who fills gaps how ...
    closed: bool,
    /// ... this one. A requester that sends it again goes back.
    behind: Psn,
    /// The requester goes back.
    goes_back: bool,
    /// The present gap was told of once more when a part of it had come.
    narrowed: bool,
    /// A packet came in its turn since the queue pair is ready to receive. Before that nothing is kept: what is ahead may be of the
    /// connection before, which had the same PSNs.
    pub(super) begun: bool,
    /// The NAK that waits stands for an ACK, too.
    acknowledges: bool,
    /// For tests: nothing is kept.
    pub(super) keeps_none: bool,
}

impl Responder {
    /// A packet ahead of the expected one.
    pub(super) fn came_early(&mut self, now: Nanos, conn: Conn<'_>, packet: &Packet<'_>, host: &mut impl Host) {
        if std::mem::take(&mut self.gap.closed) {
            self.gap.goes_back = false;
        }
        self.gap.dropped &= self.nak_queued;
        self.gap.narrowed &= self.early.is_some();
        match self.keep(now, conn, packet, host) {
            Kept::Now => host.count(Count::RequestHeld, 1),
            Kept::Already => host.count(Count::DuplicateRequest, 1),
            Kept::No => {
                self.gap.dropped = true;
                host.drop_packet(Drop::Psn);
            }
        }
        self.report_gap(host);
    }

    /// The expected packet came while others wait: those whose turn comes by that are executed.
    pub(super) fn close_gap(&mut self, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        self.gap.closed = false;
        while let Some(early) = self.take_early() {
            let packet = early.packet();
            let request = request(packet.headers.bth.opcode).expect("only requests are kept");
            if !std::mem::replace(&mut self.gap.closed, true) {
                self.gap.behind = packet.headers.bth.psn;
            }
            self.in_turn(request, conn, &packet, host)?;
        }
        self.gap.narrowed &= !self.gap.closed;
        let asks = matches!(self.replies.back(), Some(Reply::Ack { .. }));
        if asks {
            // Its answer stands for what was behind it, too.
            self.queue_ack(self.acked);
        }
        if self.early.is_some() {
            if asks && !self.gap.goes_back && (self.gap.closed || !std::mem::replace(&mut self.gap.narrowed, true)) {
                self.report_next_gap(host);
            }
        } else if self.nak_queued && !self.gap.dropped {
            self.withdraw_nak();
        }
        Ok(())
    }

    fn keep(&mut self, now: Nanos, conn: Conn<'_>, packet: &Packet<'_>, host: &impl Host) -> Kept {
        if self.gap.not_ready || self.gap.keeps_none || !self.gap.begun {
            return Kept::No;
        }
        let early = self.early.get_or_insert_with(|| Box::new(EarlyPackets::new(self.expected, host.early_budget())));
        let kept = early.keep(now, self.expected, conn.attr.path_mtu, packet);
        self.early.take_if(|early| early.is_empty());
        kept
    }

    /// Takes the early packet whose turn it is.
    fn take_early(&mut self) -> Option<Early> {
        let taken = self.early.as_mut()?.take(self.expected);
        self.early.take_if(|early| early.is_empty());
        taken
    }

    /// A packet came that was executed before.
    pub(super) fn came_again(&mut self, psn: Psn) {
        if self.gap.closed && self.gap.behind == psn {
            (self.gap.closed, self.gap.goes_back) = (false, true);
            if self.nak_queued && !self.gap.dropped {
                self.withdraw_nak();
            }
        }
    }

    /// A packet was refused for want of a receive: it and all behind it come again.
    pub(super) fn refused_behind(&mut self) {
        if self.nak_queued {
            self.withdraw_nak();
        }
        self.gap.not_ready = true;
        self.early = None;
    }

    /// One NAK for each gap.
    fn report_gap(&mut self, host: &mut impl Host) {
        if !self.nak_sent {
            self.queue_gap_nak(false, host);
        }
    }

    /// The NAK for what is missing still, in place of the ACK that was asked for: it says that, too.
    fn report_next_gap(&mut self, host: &mut impl Host) {
        if !self.nak_sent {
            self.replies.pop_back();
            self.queue_gap_nak(true, host);
        }
    }

    /// When [`Responder::handle_timeout`] wants to be called.
    pub(crate) fn next_timeout(&self) -> Option<Nanos> {
        self.early.as_ref().map(|early| early.until())
    }

    /// Forgets what came early if what is missing did not come in time.
    pub(crate) fn handle_timeout(&mut self, now: Nanos) {
        self.early.take_if(|early| early.until() <= now);
    }

    fn queue_gap_nak(&mut self, acknowledges: bool, host: &mut impl Host) {
        self.gap.acknowledges = acknowledges;
        self.nak_sent = true;
        self.nak_queued = self.queue_nak(self.expected, Syndrome::NAK_SEQUENCE, host);
    }

    /// There is nothing to tell any more.
    fn withdraw_nak(&mut self) {
        self.replies.retain(|reply| !reply.is_sequence_nak());
        (self.nak_queued, self.nak_sent) = (false, false);
        if std::mem::take(&mut self.gap.acknowledges) {
            self.queue_ack(self.acked);
        }
    }
}
