//! RAW_PACKET: requests are whole Ethernet frames, which go out and come in as they are. Which frames a queue pair gets is decided by
//! flow steering, outside.

use std::collections::VecDeque;

use crate::host::{Drop, Host, MemoryError, Payload};
use crate::qp::{Conn, Outcome, Upset};
use crate::receive::{self, Extras, Receive};
use crate::timer::Nanos;
use crate::verbs::{QpEvent, QpState, RecvWr, SendOp, SendWr, WcStatus};
use crate::wqe::{Failure, Wqe, vendor};

/// Shortest frame: the Ethernet header. (What is shorter than a medium wants, the interface pads.)
pub const MIN_FRAME: u32 = 14;
/// Longest frame: header, VLAN tag and the largest MTU that Linux has, loopback's.
pub const MAX_FRAME: u32 = MIN_FRAME + 4 + 65_536;

/// What the interface did with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameFate {
    /// It took it. (What it loses afterwards is lost as in any network.)
    Taken,
    /// It has no room now.
    NoRoom {
        /// When to try again.
        again: Nanos,
    },
    /// The frame is longer than the interface's MTU.
    TooLong,
}

/// Both queues of one RAW_PACKET queue pair.
#[derive(Debug, Default)]
pub(crate) struct RawFrames {
    queue: VecDeque<Wqe>,
    /// A receive request that was too small for a frame; it waits for the next one.
    spare: Option<RecvWr>,
    /// The interface had no room: nothing is sent before.
    not_before: Option<Nanos>,
}

impl RawFrames {
    pub(crate) fn post(&mut self, wr: SendWr) {
        self.queue.push_back(Wqe::new(wr));
    }

    /// Nothing that was started is incomplete.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.front().is_none_or(|wqe| !wqe.started)
    }

    /// Puts the bytes of the front request into `frame`; false: there is none to send now.
    pub(crate) fn poll(&mut self, conn: Conn<'_>, frame: &mut Vec<u8>, host: &mut impl Host) -> Result<bool, Upset> {
        if self.not_before.is_some() {
            return Ok(false);
        }
        let Some(wqe) = self.queue.front_mut() else { return Ok(false) };
        if !wqe.started && conn.state != QpState::Rts {
            return Ok(false);
        }
        let loaded = start(wqe).and_then(|()| load(wqe, conn.init.pd, frame, host).map_err(Failure::local));
        match loaded {
            Ok(()) => Ok(true),
            Err(failure) => Err(self.fail_front(failure, conn, host)),
        }
    }

    /// What became of the frame that [`RawFrames::poll`] gave.
    pub(crate) fn handle_fate(&mut self, fate: FrameFate, conn: Conn<'_>, host: &mut impl Host) -> Outcome {
        match fate {
            FrameFate::Taken => self.complete_front(None, conn, host),
            FrameFate::NoRoom { again } => self.not_before = Some(again),
            FrameFate::TooLong => {
                return Err(self.fail_front(Failure::new(WcStatus::LocLenErr, vendor::TOO_LONG), conn, host));
            }
        }
        Ok(())
    }

    pub(crate) fn next_timeout(&self) -> Option<Nanos> {
        self.not_before
    }

    pub(crate) fn handle_timeout(&mut self, now: Nanos) {
        self.not_before = self.not_before.filter(|at| *at > now);
    }

    /// A frame that was steered here, with the tag of its rule.
    pub(crate) fn handle_frame(&mut self, conn: Conn<'_>, frame: &[u8], tag: u32, host: &mut impl Host) -> Outcome {
        let Some(wr) = self.spare.take().or_else(|| host.pop_recv()) else {
            host.drop_packet(Drop::NoReceive);
            return Ok(());
        };
        let mut receive = Receive::new(wr);
        if !receive.has_room(frame.len()) {
            self.spare = Some(receive.into_wr());
            host.drop_packet(Drop::BadLength);
            return Ok(());
        }
        if let Err(error) = receive.put(conn.init.pd, frame, true, host) {
            receive.fail(conn.init, 0, Failure::local(error), host);
            host.event(QpEvent::WqFatal);
            return Err(Upset::Err);
        }
        receive.complete(conn.init, Extras { flow_tag: tag, ..Extras::default() }, host);
        Ok(())
    }

    fn complete_front(&mut self, failure: Option<Failure>, conn: Conn<'_>, host: &mut impl Host) {
        // The queue pair may have been reset or flushed since.
        if let Some(wqe) = self.queue.pop_front() {
            wqe.finish(conn.init.qpn, 0, failure, host);
        }
    }

    fn fail_front(&mut self, failure: Failure, conn: Conn<'_>, host: &mut impl Host) -> Upset {
        self.complete_front(Some(failure), conn, host);
        Upset::Sqe
    }

    /// Completes the send requests as flushed.
    pub(crate) fn flush_sends(&mut self, conn: Conn<'_>, host: &mut impl Host) {
        for wqe in std::mem::take(&mut self.queue) {
            wqe.flush(conn.init.qpn, 0, host);
        }
        self.not_before = None;
    }

    /// Completes everything as flushed.
    pub(crate) fn flush(&mut self, conn: Conn<'_>, host: &mut impl Host) {
        self.flush_sends(conn, host);
        if let Some(wr) = self.spare.take() {
            receive::flush(&wr, conn.init, 0, host);
        }
    }

    /// Forgets everything without a completion; gives the slots back.
    pub(crate) fn reset(&mut self, host: &mut impl Host) {
        if !self.queue.is_empty() {
            host.release_send(self.queue.len() as u32);
        }
        *self = RawFrames::default();
    }
}

/// The request's turn came: checks what can be checked before anything goes out.
fn start(wqe: &mut Wqe) -> Result<(), Failure> {
    if !matches!(wqe.op, SendOp::Send) || wqe.ud.is_some() {
        return Err(Failure::new(WcStatus::LocQpOpErr, vendor::NOT_ALLOWED));
    }
    if !(MIN_FRAME..=MAX_FRAME).contains(&wqe.checked_len()?) {
        return Err(Failure::new(WcStatus::LocLenErr, vendor::TOO_LONG));
    }
    wqe.started = true;
    Ok(())
}

/// Copies the frame: its memory is the program's again when the interface has it.
fn load(wqe: &Wqe, pd: u32, frame: &mut Vec<u8>, host: &mut impl Host) -> Result<(), MemoryError> {
    frame.clear();
    let spans = match wqe.source(pd, 0, wqe.len(), host)? {
        Payload::Inline(bytes, _) => {
            frame.extend_from_slice(&bytes);
            return Ok(());
        }
        Payload::Gather(spans) => spans,
        Payload::Copy(span) | Payload::Lent(span) => [span].into_iter().collect(),
    };
    for span in spans {
        let from = frame.len();
        frame.resize(from + span.len as usize, 0);
        host.load(span, &mut frame[from..])?;
    }
    Ok(())
}
