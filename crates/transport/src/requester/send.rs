//! RC requester: what goes out next.

use ferroce_wire::{AtomicEth, Bth, Feth, Headers, Opcode, Psn, Reth};
use smallvec::SmallVec;

use super::probe::{Copy, Probe};
use super::{Cursor, Flight, IN_FLIGHT_MAX, Requester};
use crate::cc::TRAIN_CHARGE_MAX;
use crate::host::{Count, Host, Payload, Side, Span, Train, Window};
use crate::qp::{Conn, Outcome};
use crate::timer::{Nanos, Timer};
use crate::verbs::{FlushRange, Placement, QpState, QpType, SendFlags, SendOp, WcStatus};
use crate::wqe::{Failure, Route, Wqe, message_train, train_packets_max, vendor};
use crate::{MAX_LENT_BYTES, MAX_LENT_PACKETS};

/// Bytes that a packet has on the wire besides its payload: IPv6, UDP, BTH, the largest extended header, ICRC.
const PACKET_OVERHEAD: u32 = 40 + 8 + 12 + 28 + 4;
/// What the kernel spends on a datagram besides its bytes.
const DATAGRAM_OVERHEAD: u32 = 1024;

/// What a train of `packets` packets with `len` bytes of payload takes from a window.
pub(crate) const fn charge(len: u32, packets: u32) -> u32 {
    len + packets * PACKET_OVERHEAD + DATAGRAM_OVERHEAD
}

/// Less than that is sent: to fetch it costs a call of the system.
const LEND_MIN: u32 = 32 << 10;
/// The part of what is lent that a window is charged for, besides its last packet, which is sent: it lies in no buffer.
const LENT_SHARE: u32 = 16;

/// How many of `wanted` packets of a message that has `rest` bytes to go may leave: all, or what a half-open window lets through, but
/// no crumbs while an answer is due (`waiting`) that opens it further.
pub(crate) fn fit(wanted: u32, rest: u32, mtu: u32, available: u32, waiting: bool) -> u32 {
    let whole = charge(rest.min(wanted * mtu), wanted);
    if whole <= available {
        return wanted;
    }
    let fitting = available.saturating_sub(charge(0, 0)) / (mtu + charge(0, 1) - charge(0, 0));
    if waiting && fitting < train_packets_max(mtu) / 2 { 0 } else { fitting.min(wanted) }
}

/// What came of looking at the request under the cursor.
enum Step {
    /// Look again: the cursor moved.
    Again,
    /// Nothing to send now.
    Wait,
    /// A train goes out.
    Send,
}

/// A train that is about to go out.
struct Departure {
    packets: u32,
    charge: u32,
    window: Window,
    read: bool,
    /// It asks for an answer.
    asks: bool,
}

/// Trains in a row that may leave without asking for an ACK.
const UNASKED_MAX: u32 = 16;

impl Requester {
    /// Puts the next train into `out`, if there is one and a window lets it go. (A train is large: it is built where it is handed
    /// over, not passed up from function to function.)
    pub(crate) fn poll_transmit(
        &mut self,
        now: Nanos,
        conn: Conn<'_>,
        host: &mut impl Host,
        out: &mut Option<Train>,
    ) -> Outcome {
        if self.timers.is_armed(Timer::RnrWait) {
            return Ok(());
        }
        if self.probe == Probe::Due {
            self.ask(conn, host, out);
        }
        if out.is_none() {
            self.poll_repair(now, conn, host, out);
        }
        if out.is_none() {
            self.poll_request(now, conn, host, out)?;
        }
        if out.is_none() && self.probe == Probe::None && self.is_waited_for(conn) {
            self.ask(conn, host, out);
        }
        Ok(())
    }

    /// Puts a probe into `out`, if there is a packet to repeat.
    fn ask(&mut self, conn: Conn<'_>, host: &mut impl Host, out: &mut Option<Train>) {
        self.probe = Probe::None;
        if let Some(copy) = self.copies.to_send(self.answered) {
            self.probe = Probe::Sent;
            self.repair.probed();
            self.answers.probe_sent(self.answered + u64::from(self.sent));
            host.count(Count::ProbeSent, 1);
            *out = Some(copy.train(conn.attr.path_mtu));
        }
    }

    /// Nothing in flight asked for the ACK that this end waits for: to be drained, or to end a request that sends nothing itself.
    fn is_waited_for(&self, conn: Conn<'_>) -> bool {
        self.flights.back().is_some_and(|last| !last.asks)
            && (conn.state == QpState::Sqd
                || self.is_behind_local()
                || self.queue.get(self.cursor.index).is_some_and(|wqe| wqe.failed.is_some()))
    }

    /// The requests directly before the cursor are carried out by this host, and a completion of them waits for those before.
    fn is_behind_local(&self) -> bool {
        let mut before = self.queue.iter().take(self.cursor.index).rev().take_while(|wqe| wqe.is_of_this_host());
        before.any(|wqe| wqe.flags.contains(SendFlags::SIGNALED))
    }

    /// The next train of a request.
    fn poll_request(&mut self, now: Nanos, conn: Conn<'_>, host: &mut impl Host, out: &mut Option<Train>) -> Outcome {
        loop {
            let Some(wqe) = self.queue.get(self.cursor.index) else { return Ok(()) };
            if let Some(failure) = wqe.failed {
                // Its predecessors complete first.
                return if self.cursor.index == 0 { Err(self.fail_front(failure, conn, host)) } else { Ok(()) };
            }
            match self.step(now, conn, host, out) {
                Ok(Step::Again) => {}
                Ok(Step::Wait | Step::Send) => return Ok(()),
                Err(failure) => self.queue[self.cursor.index].failed = Some(failure),
            }
        }
    }

    fn step(
        &mut self,
        now: Nanos,
        conn: Conn<'_>,
        host: &mut impl Host,
        out: &mut Option<Train>,
    ) -> Result<Step, Failure> {
        let wqe = &mut self.queue[self.cursor.index];
        if !wqe.started {
            let fenced = wqe.flags.contains(SendFlags::FENCE) && self.reads > 0;
            if fenced || !Self::may_start(conn) {
                return Ok(Step::Wait);
            }
            start(wqe, conn, host)?;
        }
        if wqe.is_of_this_host() {
            self.cursor = Cursor { index: self.cursor.index + 1, packet: 0 };
            if self.cursor.index == 1 {
                self.complete_front(conn, host);
            }
            return Ok(Step::Again);
        }
        if self.sent >= IN_FLIGHT_MAX || self.repair.holds_back(self.sent) {
            return Ok(Step::Wait);
        }
        let wqe = &self.queue[self.cursor.index];
        let departure = match wqe.op {
            SendOp::Read { raddr, rkey } => self.read_request(wqe, raddr, rkey, conn, host, out),
            SendOp::CompareSwap { raddr, rkey, compare, swap } => {
                let eth = AtomicEth { va: raddr, rkey, swap_add: swap, compare };
                self.atomic_request(wqe, Opcode::RC_COMPARE_SWAP, eth, conn, host, out)
            }
            SendOp::FetchAdd { raddr, rkey, add } => {
                let eth = AtomicEth { va: raddr, rkey, swap_add: add, compare: 0 };
                self.atomic_request(wqe, Opcode::RC_FETCH_ADD, eth, conn, host, out)
            }
            SendOp::AtomicWrite { raddr, rkey } => self.atomic_write(wqe, raddr, rkey, conn, host, out)?,
            SendOp::Flush { rkey, range, placement } => {
                self.flush_request(wqe, rkey, range, placement, conn, host, out)
            }
            _ => self.message(wqe, conn, host, out)?,
        };
        let Some(departure) = departure else { return Ok(Step::Wait) };
        let ends = self.cursor.packet + departure.packets == self.queue[self.cursor.index].packets;
        if (ends || self.copies.are_none())
            && !departure.read
            && let Some(train) = out
        {
            self.keep(train, host);
        }
        self.depart(now, departure, conn, host);
        Ok(Step::Send)
    }

    fn next_psn(&self) -> Psn {
        self.una.add(self.sent)
    }

    /// The next train of a SEND or WRITE.
    fn message(
        &self,
        wqe: &Wqe,
        conn: Conn<'_>,
        host: &mut impl Host,
        out: &mut Option<Train>,
    ) -> Result<Option<Departure>, Failure> {
        let mtu = conn.attr.path_mtu;
        let index = self.cursor.packet;
        if let Some((packets, span)) = self.lendable(wqe, conn, host)? {
            return Ok(self.lent_message(wqe, packets, span, conn, host, out));
        }
        let most = if self.repair.is_trial() { 1 } else { train_packets_max(mtu) };
        let wanted = (wqe.packets - index).min(most);
        let packets = fit(wanted, wqe.len() - index * mtu, mtu, host.window(Window::Requests), self.sent > 0);
        if packets == 0 {
            return Ok(None);
        }
        let len = wqe.len_of(index, packets, mtu);
        let payload = wqe.source(conn.init.pd, index * mtu, len, host).map_err(Failure::local)?;
        let charge = charge(len, packets);
        let asks = self.must_ask(wqe, packets, charge, conn, host);
        out.insert(message_train(wqe, Route::of(conn), index, packets, self.next_psn(), payload)).set_ack_req(asks);
        Ok(Some(Departure { packets, charge, window: Window::Requests, read: false, asks }))
    }

    /// How many of the next packets may stay where they are until the peer fetches them, and where that is: those of a large WRITE, in one piece,
    /// that go for the first time. What comes again is sent: where the memory is gone it is this end that must find that.
    fn lendable(&self, wqe: &Wqe, conn: Conn<'_>, host: &mut impl Host) -> Result<Option<(u32, Span)>, Failure> {
        let mtu = conn.attr.path_mtu;
        let index = self.cursor.packet;
        let packets = (wqe.packets - index).min(MAX_LENT_PACKETS).min(MAX_LENT_BYTES / mtu);
        let len = wqe.len_of(index, packets, mtu);
        let may = len >= LEND_MIN
            && matches!(wqe.op, SendOp::Write { .. } | SendOp::WriteImm { .. })
            && conn.init.qp_type == QpType::Rc
            && self.sent == self.in_flight
            && host.lends();
        if !may {
            return Ok(None);
        }
        Ok(match wqe.source(conn.init.pd, index * mtu, len, host).map_err(Failure::local)? {
            Payload::Gather(spans) if spans.len() == 1 => Some((packets, spans[0])),
            _ => None,
        })
    }

    fn lent_message(
        &self,
        wqe: &Wqe,
        packets: u32,
        span: Span,
        conn: Conn<'_>,
        host: &mut impl Host,
        out: &mut Option<Train>,
    ) -> Option<Departure> {
        let charge = charge(conn.attr.path_mtu, 1) + span.len / LENT_SHARE;
        if charge > host.window(Window::Requests) {
            return None;
        }
        let train =
            message_train(wqe, Route::of(conn), self.cursor.packet, packets, self.next_psn(), Payload::Lent(span));
        out.insert(train).set_ack_req(true);
        Some(Departure { packets, charge, window: Window::Requests, read: false, asks: true })
    }

    /// The train that is about to go out has to ask for an ACK. A requester may do so when it likes (IBA 9.7.3.1). An ACK for every
    /// message doubles the packets of a dialogue of small ones; where the program waits for no completion, one for many will do, but
    /// no fewer than the send queue needs to have room. What is left without is asked for by a probe.
    fn must_ask(&self, wqe: &Wqe, packets: u32, charge: u32, conn: Conn<'_>, host: &mut impl Host) -> bool {
        wqe.flags.contains(SendFlags::SIGNALED)
            || packets > 1
            || packets < wqe.packets
            || self.sent < self.in_flight
            || self.unasked >= UNASKED_MAX.min(conn.init.max_send_wr / 2)
            || self.is_behind_local()
            || !self.can_probe()
            || host.window(Window::Requests).saturating_sub(charge) < TRAIN_CHARGE_MAX
    }

    /// A READ request: at most one train of responses, so that the window governs the flow; up to a fixed boundary of the message,
    /// so that a repeated request ends where the first one did.
    fn read_request(
        &self,
        wqe: &Wqe,
        raddr: u64,
        rkey: u32,
        conn: Conn<'_>,
        host: &mut impl Host,
        out: &mut Option<Train>,
    ) -> Option<Departure> {
        if self.reads >= u32::from(conn.attr.max_rd_atomic) {
            return None;
        }
        let mtu = conn.attr.path_mtu;
        let offset = self.cursor.packet * mtu;
        let len = read_chunk_end(offset, wqe.len(), mtu) - offset;
        let packets = Wqe::packets_for(len, mtu);
        let charge = charge(len, packets);
        if charge > host.window(Window::Responses) {
            return None;
        }
        let mut headers = single(wqe, Opcode::RC_READ_REQUEST, self.next_psn(), conn);
        headers.reth = Some(Reth { va: raddr.wrapping_add(u64::from(offset)), rkey, len });
        *out = Some(header_train(headers, conn));
        Some(Departure { packets, charge, window: Window::Responses, read: true, asks: true })
    }

    fn atomic_request(
        &self,
        wqe: &Wqe,
        opcode: Opcode,
        eth: AtomicEth,
        conn: Conn<'_>,
        host: &mut impl Host,
        out: &mut Option<Train>,
    ) -> Option<Departure> {
        let charge = charge(0, 1);
        if self.reads >= u32::from(conn.attr.max_rd_atomic) || charge > host.window(Window::Requests) {
            return None;
        }
        let mut headers = single(wqe, opcode, self.next_psn(), conn);
        headers.atomic = Some(eth);
        *out = Some(header_train(headers, conn));
        Some(Departure { packets: 1, charge, window: Window::Requests, read: true, asks: true })
    }

    fn atomic_write(
        &self,
        wqe: &Wqe,
        raddr: u64,
        rkey: u32,
        conn: Conn<'_>,
        host: &mut impl Host,
        out: &mut Option<Train>,
    ) -> Result<Option<Departure>, Failure> {
        let Some(departure) = self.placement(wqe.len(), conn, host) else { return Ok(None) };
        let mut headers = single(wqe, Opcode::RC_ATOMIC_WRITE, self.next_psn(), conn);
        headers.reth = Some(Reth { va: raddr, rkey, len: wqe.len() });
        let payload = wqe.source(conn.init.pd, 0, wqe.len(), host).map_err(Failure::local)?;
        *out = Some(Train { len: wqe.len(), payload, ..header_train(headers, conn) });
        Ok(Some(departure))
    }

    #[expect(clippy::too_many_arguments, reason = "the operands of one request")]
    fn flush_request(
        &self,
        wqe: &Wqe,
        rkey: u32,
        range: FlushRange,
        placement: Placement,
        conn: Conn<'_>,
        host: &mut impl Host,
        out: &mut Option<Train>,
    ) -> Option<Departure> {
        let departure = self.placement(0, conn, host)?;
        let (raddr, len, level) = match range {
            FlushRange::Bytes { raddr, len } => (raddr, len, 0),
            FlushRange::Region => (0, 0, 1),
        };
        let mut headers = single(wqe, Opcode::RC_FLUSH, self.next_psn(), conn);
        headers.feth = Some(Feth(level << 4 | u32::from(placement.bits())));
        headers.reth = Some(Reth { va: raddr, rkey, len });
        *out = Some(header_train(headers, conn));
        Some(departure)
    }

    /// May an ATOMIC WRITE or FLUSH go? They count among READs and atomics.
    fn placement(&self, len: u32, conn: Conn<'_>, host: &mut impl Host) -> Option<Departure> {
        let charge = charge(len, 1);
        let may = self.reads < u32::from(conn.attr.max_rd_atomic) && charge <= host.window(Window::Requests);
        may.then_some(Departure { packets: 1, charge, window: Window::Requests, read: true, asks: true })
    }

    /// Copies the last packet of a message for probes, if it is time for a new copy.
    fn keep(&mut self, train: &Train, host: &mut impl Host) {
        let at = self.answered + u64::from(self.sent + train.packets - 1);
        // Memory that is gone is the link's to find.
        if self.copies.want(at)
            && let Ok(copy) = Copy::of_last(train, at, host)
        {
            self.copies.put(copy);
        }
    }

    /// Books a train as sent.
    fn depart(&mut self, now: Nanos, departure: Departure, conn: Conn<'_>, host: &mut impl Host) {
        let Departure { packets, charge, window, read, asks } = departure;
        host.window_take(window, charge);
        let again = packets.min(self.in_flight - self.sent);
        if again > 0 {
            host.count(Count::PacketsRetransmitted, again);
        }
        // The answer to what asked for none says nothing of a round trip.
        let first_sent = (again == 0 && asks).then_some(now);
        self.flights.push_back(Flight { packets, charge, window, read, asks, first_sent });
        self.unasked = if asks { 0 } else { self.unasked + 1 };
        self.reads += u32::from(read);
        self.sent += packets;
        self.in_flight = self.in_flight.max(self.sent);
        self.cursor.packet += packets;
        if self.cursor.packet == self.queue[self.cursor.index].packets {
            self.cursor = Cursor { index: self.cursor.index + 1, packet: 0 };
        }
        if !self.timers.is_armed(Timer::Silence) {
            let may_ask = self.can_probe() || self.repair.is_trial();
            self.timers.arm(Timer::Silence, self.recovery.watch(now, conn.attr, may_ask));
        }
    }
}

/// The request's turn came for the first time: checks what can be checked before anything goes out.
fn start(wqe: &mut Wqe, conn: Conn<'_>, host: &mut impl Host) -> Result<(), Failure> {
    let len = wqe.checked_len()?;
    match wqe.op {
        _ if wqe.is_of_this_host() => {
            wqe.change_key(conn.init.pd, conn.init.qpn, host)?;
            wqe.packets = 0;
            wqe.started = true;
            return Ok(());
        }
        _ if wqe.needs_response() && conn.attr.max_rd_atomic == 0 => {
            return Err(Failure::new(WcStatus::LocQpOpErr, vendor::NOT_ALLOWED));
        }
        _ if wqe.is_atomic() || wqe.is_placement() => {
            let wanted = if matches!(wqe.op, SendOp::Flush { .. }) { 0 } else { 8 };
            if len != wanted {
                return Err(Failure::new(WcStatus::LocLenErr, vendor::TOO_LONG));
            }
            wqe.packets = 1;
        }
        _ => wqe.packets = Wqe::packets_for(len, conn.attr.path_mtu),
    }
    wqe.check_local(conn.init.pd, host).map_err(Failure::local)?;
    wqe.started = true;
    Ok(())
}

/// Where the READ request that covers `offset` ends.
pub(super) fn read_chunk_end(offset: u32, len: u32, mtu: u32) -> u32 {
    let chunk = train_packets_max(mtu) * mtu;
    (offset / chunk + 1).saturating_mul(chunk).min(len)
}

/// The headers of a request that is one packet.
fn single(wqe: &Wqe, opcode: Opcode, psn: Psn, conn: Conn<'_>) -> Headers {
    let mut headers = Headers::new(Bth::new(conn.opcode(opcode), conn.attr.dest_qpn, psn));
    headers.xrc_srqn = conn.init.qp_type.is_xrc().then_some(wqe.xrc_srqn);
    headers.bth.ack_req = true;
    headers
}

fn header_train(headers: Headers, conn: Conn<'_>) -> Train {
    Train {
        head: headers,
        body: headers.bth.opcode,
        tail: None,
        packets: 1,
        mtu: conn.attr.path_mtu,
        len: 0,
        payload: Payload::Gather(SmallVec::new()),
        path: None,
        from: Side::Requester,
    }
}
