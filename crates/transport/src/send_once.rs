//! The sender of UC and UD: every packet goes out once, and a request is complete when its last packet was handed to the link.

use ferroce_wire::{Bth, Deth, Headers, Opcode, Psn};

use std::collections::VecDeque;
use std::sync::Arc;

use crate::flow::{Flows, Key, Size, To};
use crate::host::{Drop, Host, MemoryError, Payload, Side, Train};
use crate::qp::{Conn, Outcome, Upset};
use crate::timer::Nanos;
use crate::verbs::{QpState, QpType, SendFlags, SendOp, SendWr, UdDest, WcStatus};
use crate::wqe::{Failure, Route, Wqe, message_train, pad, train_packets_max, vendor};

/// Top bit of a request's Q_Key: the queue pair's own goes out instead (IBA 10.2.5, `ibv_post_send(3)`).
const QKEY_OF_QP: u32 = 1 << 31;

/// Sender state of one UC or UD queue pair.
#[derive(Debug)]
pub(crate) struct SendOnce {
    queue: VecDeque<Wqe>,
    /// Next packet of the front request.
    packet: u32,
    psn: Psn,
    /// The last packet of the front request was handed out: it is complete when the host comes again, having sent it.
    handed_out: bool,
    flows: Flows,
}

impl SendOnce {
    pub(crate) fn new() -> SendOnce {
        SendOnce { queue: VecDeque::new(), packet: 0, psn: Psn::new(0), handed_out: false, flows: Flows::default() }
    }

    /// Sets the first PSN: the queue pair goes to RTS.
    pub(crate) fn start(&mut self, psn: Psn) {
        self.psn = psn;
    }

    /// The PSN of the next packet.
    pub(crate) fn new_psn(&self) -> Psn {
        self.psn
    }

    pub(crate) fn post(&mut self, wr: SendWr) {
        self.queue.push_back(Wqe::new(wr));
    }

    /// Nothing that was started is incomplete.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.front().is_none_or(|wqe| !wqe.started)
    }

    /// Puts the next train into `out`.
    pub(crate) fn poll_transmit(
        &mut self,
        now: Nanos,
        conn: Conn<'_>,
        host: &mut impl Host,
        out: &mut Option<Train>,
    ) -> Outcome {
        if std::mem::take(&mut self.handed_out) {
            self.complete_front(None, conn, host);
        }
        self.flows.poll_transmit(conn.init.qpn, host, out);
        if out.is_some() {
            return Ok(());
        }
        loop {
            let Some(wqe) = self.queue.front_mut() else { return Ok(()) };
            if !wqe.started {
                if conn.state != QpState::Rts {
                    return Ok(());
                }
                if let Err(failure) = start(wqe, conn, host) {
                    return Err(self.fail_front(failure, conn, host));
                }
            }
            if wqe.is_of_this_host() {
                self.complete_front(None, conn, host);
                continue;
            }
            return match self.train(now, conn, host, out) {
                Ok(packets) => {
                    self.psn = self.psn.add(packets);
                    self.packet += packets;
                    self.handed_out = self.packet == self.queue[0].packets;
                    Ok(())
                }
                Err(error) => Err(self.fail_front(Failure::local(error), conn, host)),
            };
        }
    }

    /// Builds the next train, if the window lets one go, and tells its packets.
    fn train(
        &mut self,
        now: Nanos,
        conn: Conn<'_>,
        host: &mut impl Host,
        out: &mut Option<Train>,
    ) -> Result<u32, MemoryError> {
        let wqe = &self.queue[0];
        let mtu = conn.attr.path_mtu;
        let wanted = (wqe.packets - self.packet).min(train_packets_max(mtu));
        let rest = wqe.len() - self.packet * mtu;
        let (packets, ask) = match destination(wqe.ud.as_ref(), conn) {
            Some(to) => self.flows.depart(now, to, self.psn, Size { packets: wanted, rest, mtu }, host),
            None => (wanted, false),
        };
        if packets == 0 {
            return Ok(0);
        }
        let payload = wqe.source(conn.init.pd, self.packet * mtu, rest.min(packets * mtu), host)?;
        let mut train = match &wqe.ud {
            Some(dest) => datagram(wqe, dest, self.psn, payload, conn),
            None => message_train(wqe, Route::of(conn), self.packet, packets, self.psn, payload),
        };
        train.set_ack_req(ask);
        *out = Some(train);
        Ok(packets)
    }

    /// The other end says that it took everything up to `psn` from its receive buffer.
    pub(crate) fn answered(
        &mut self,
        now: Nanos,
        from: Key,
        psn: Psn,
        missing: bool,
        host: &mut impl Host,
    ) -> Result<(), Drop> {
        self.flows.answered(now, from, psn, missing, host)
    }

    pub(crate) fn next_timeout(&self) -> Option<Nanos> {
        self.flows.next_timeout()
    }

    pub(crate) fn handle_timeout(&mut self, now: Nanos, host: &mut impl Host) {
        self.flows.handle_timeout(now, host);
    }

    /// The memory of a train was gone when the link read it. What was completed meanwhile stays so: the program may change the
    /// memory of a complete request, so the fault is its own.
    pub(crate) fn handle_transmit_fault(
        &mut self,
        train: &Train,
        error: MemoryError,
        conn: Conn<'_>,
        host: &mut impl Host,
    ) -> Outcome {
        let last = train.head.bth.psn.add(train.packets - 1);
        if let Some(path) = train.path.as_ref().or(conn.attr.path.as_ref()) {
            self.flows.unsent(To { path, qpn: train.head.bth.dest_qp, qkey: 0 }, last, host);
        }
        let first = self.psn.sub(self.packet);
        let index = train.head.bth.psn.diff(first);
        if index < 0 || index as u32 >= self.packet {
            return Ok(());
        }
        Err(self.fail_front(Failure::local(error), conn, host))
    }

    fn complete_front(&mut self, failure: Option<Failure>, conn: Conn<'_>, host: &mut impl Host) {
        self.packet = 0;
        self.handed_out = false;
        let wqe = self.queue.pop_front().expect("there is a front request");
        wqe.finish(conn.init.qpn, conn.attr.dest_qpn, failure, host);
    }

    fn fail_front(&mut self, failure: Failure, conn: Conn<'_>, host: &mut impl Host) -> Upset {
        self.complete_front(Some(failure), conn, host);
        Upset::Sqe
    }

    /// Completes everything as flushed.
    pub(crate) fn flush(&mut self, conn: Conn<'_>, host: &mut impl Host) {
        if std::mem::take(&mut self.handed_out) {
            self.complete_front(None, conn, host);
        }
        for wqe in std::mem::take(&mut self.queue) {
            wqe.flush(conn.init.qpn, conn.attr.dest_qpn, host);
        }
        self.packet = 0;
        self.flows.release(host);
    }

    /// Forgets everything without a completion; gives the slots back.
    pub(crate) fn reset(&mut self, host: &mut impl Host) {
        if !self.queue.is_empty() {
            host.release_send(self.queue.len() as u32);
        }
        self.flows.release(host);
        *self = SendOnce::new();
    }

    /// What holds between inputs, whatever comes.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn assert_invariants(&self) {
        self.flows.assert_invariants();
    }
}

/// Where a request goes, if the queue pair has a path.
fn destination<'a>(ud: Option<&'a UdDest>, conn: Conn<'a>) -> Option<To<'a>> {
    match ud {
        Some(dest) => Some(To { path: &dest.path, qpn: dest.qpn, qkey: wire_qkey(dest, conn) }),
        None => conn.attr.path.as_ref().map(|path| To { path, qpn: conn.attr.dest_qpn, qkey: 0 }),
    }
}

fn wire_qkey(dest: &UdDest, conn: Conn<'_>) -> u32 {
    if dest.qkey & QKEY_OF_QP != 0 { conn.attr.qkey } else { dest.qkey }
}

/// The request's turn came: checks what can be checked before anything goes out.
fn start(wqe: &mut Wqe, conn: Conn<'_>, host: &mut impl Host) -> Result<(), Failure> {
    let len = wqe.checked_len()?;
    let mtu = conn.attr.path_mtu;
    let datagram = conn.init.qp_type == QpType::Ud;
    let allowed = match wqe.op {
        SendOp::Send | SendOp::SendImm { .. } => datagram == wqe.ud.is_some(),
        SendOp::Write { .. } | SendOp::WriteImm { .. } => !datagram && wqe.ud.is_none(),
        SendOp::LocalInv { .. } => true,
        SendOp::BindMw(_) => !datagram,
        _ => false,
    };
    if !allowed {
        return Err(Failure::new(WcStatus::LocQpOpErr, vendor::NOT_ALLOWED));
    }
    if datagram && len > mtu {
        return Err(Failure::new(WcStatus::LocLenErr, vendor::TOO_LONG));
    }
    if wqe.is_of_this_host() {
        wqe.change_key(conn.init.pd, conn.init.qpn, host)?;
    } else {
        wqe.check_local(conn.init.pd, host).map_err(Failure::local)?;
        wqe.packets = Wqe::packets_for(len, mtu);
    }
    wqe.started = true;
    Ok(())
}

/// The one packet of a UD request.
fn datagram(wqe: &Wqe, dest: &UdDest, psn: Psn, payload: Payload, conn: Conn<'_>) -> Train {
    let (opcode, imm) = match wqe.op {
        SendOp::SendImm { imm } => (Opcode::UD_SEND_ONLY_IMM, Some(imm)),
        _ => (Opcode::UD_SEND_ONLY, None),
    };
    let mut head = Headers::new(Bth::new(opcode, dest.qpn, psn));
    head.bth.pad = pad(wqe.len());
    head.bth.solicited = wqe.flags.contains(SendFlags::SOLICITED);
    head.deth = Some(Deth { qkey: wire_qkey(dest, conn), src_qp: conn.init.qpn });
    head.imm = imm;
    Train {
        head,
        body: opcode,
        tail: None,
        packets: 1,
        mtu: conn.attr.path_mtu,
        len: wqe.len(),
        payload,
        path: Some(Arc::clone(&dest.path)),
        from: Side::Requester,
    }
}
