//! RC responder: what a request packet does.

use ferroce_wire::{Headers, Psn, Reth, Syndrome};

use super::tags::Begun;
use super::{Fault, Message, ReadReply, Reply, Responder, Saved, Write};
use crate::decode::{Part, Request, length_fits, request};
use crate::host::{AtomicOp, Count, Drop, Host, MemoryError, Packet, Span};
use crate::qp::{Conn, Outcome};
use crate::receive::{self, Extras, Receive};
use crate::timer::Nanos;
use crate::verbs::{Access, Placement, QpInit, QpType, WcStatus};
use crate::wqe::{Failure, MAX_MESSAGE, Wqe, vendor};

const INVALID: Syndrome = Syndrome::NAK_INVALID_REQUEST;

impl Responder {
    /// Handles a request packet.
    pub(crate) fn handle_packet(
        &mut self,
        now: Nanos,
        conn: Conn<'_>,
        packet: &Packet<'_>,
        host: &mut impl Host,
    ) -> Outcome {
        let bth = &packet.headers.bth;
        let ahead = bth.psn.diff(self.expected);
        let Some(request) = request(bth.opcode) else {
            host.drop_packet(Drop::BadOpcode);
            if ahead != 0 {
                return Ok(());
            }
            // A request in its turn that is reserved, or not supported (IBA 9.7.4.1.4).
            let fault = self.refuse(bth.psn, INVALID);
            return Err(self.fatal(*fault, conn, host));
        };
        if ahead > 0 {
            self.came_early(now, conn, packet, host);
            return Ok(());
        }
        if ahead < 0 {
            self.duplicate(request, conn, packet, host);
            return Ok(());
        }
        self.in_turn(request, conn, packet, host)?;
        if self.nak_queued || self.early.is_some() {
            self.close_gap(conn, host)?;
        }
        Ok(())
    }

    /// Where the next `len` bytes of a WRITE go, if all of them are of its message, which has more of them. The packet with these headers is
    /// expected.
    pub(crate) fn place(&self, conn: Conn<'_>, headers: &Headers, len: u32, host: &mut impl Host) -> Option<Span> {
        // Packets that are kept are executed behind this one, and have bytes of their own.
        if self.early.is_some() || self.nak_queued || conn.init.qp_type != QpType::Rc {
            return None;
        }
        let Some(Request::Write(part)) = request(headers.bth.opcode) else { return None };
        let (va, rkey) = match (&self.message, headers.reth) {
            (Message::None, Some(reth)) if part == Part::First && len < reth.len => {
                let may = conn.attr.access.contains(Access::REMOTE_WRITE)
                    && check_range(reth, Access::REMOTE_WRITE, conn, host).is_ok();
                may.then_some((reth.va, reth.rkey))?
            }
            (Message::Write(write), _) if part == Part::Middle && len < write.len - write.done => {
                (write.va.wrapping_add(u64::from(write.done)), write.rkey)
            }
            _ => return None,
        };
        host.resolve_remote(conn.init.pd, rkey, va, len, Access::REMOTE_WRITE).ok()
    }

    /// The packet that is expected.
    pub(super) fn in_turn(
        &mut self,
        request: Request,
        conn: Conn<'_>,
        packet: &Packet<'_>,
        host: &mut impl Host,
    ) -> Outcome {
        if request.has_response() && !self.has_room(conn, host) {
            return Ok(());
        }
        // A NAK that still waits goes, from here on, unless the gap closes before.
        self.nak_sent = self.nak_queued;
        (self.gap.not_ready, self.gap.begun) = (false, true);
        self.execute(request, conn, packet, host).map_err(|fault| self.fatal(*fault, conn, host))
    }

    fn execute(
        &mut self,
        request: Request,
        conn: Conn<'_>,
        packet: &Packet<'_>,
        host: &mut impl Host,
    ) -> Result<(), Box<Fault>> {
        let in_srq;
        let conn = if conn.init.qp_type.is_xrc() {
            in_srq = QpInit { pd: self.enter_srq(packet, host)?, ..*conn.init };
            Conn { init: &in_srq, ..conn }
        } else {
            conn
        };
        match request {
            Request::Send(part) => self.send(part, conn, packet, host),
            Request::Write(part) => self.write(part, conn, packet, host),
            Request::Read => self.read(conn, packet, host),
            Request::CompareSwap | Request::FetchAdd => self.atomic(request, conn, packet, host),
            Request::AtomicWrite => self.atomic_write(conn, packet, host),
            Request::Flush => self.flush_placement(conn, packet, host),
        }
    }

    /// XRC: a request is for the shared receive queue that it names, and reaches what belongs to the protection domain of that queue,
    /// which it gives. A queue that the target's domain does not have, or another one in the middle of a message, makes the request
    /// invalid (IBA annex A14).
    fn enter_srq(&mut self, packet: &Packet<'_>, host: &mut impl Host) -> Result<u32, Box<Fault>> {
        let psn = packet.headers.bth.psn;
        let named = packet.headers.xrc_srqn;
        if !matches!(self.message, Message::None) {
            // If that queue is gone, so is the message's receive request; the refusal needs no other.
            let pd = host.choose_srq(self.srqn);
            return pd.filter(|_| named == Some(self.srqn)).ok_or_else(|| self.refuse(psn, INVALID));
        }
        let entered = named.and_then(|srqn| Some((srqn, host.choose_srq(srqn)?)));
        let (srqn, pd) = entered.ok_or_else(|| self.refuse(psn, INVALID))?;
        self.srqn = srqn;
        Ok(pd)
    }

    /// Room for one more READ or atomic? Without it the packet counts as lost.
    fn has_room(&mut self, conn: Conn<'_>, host: &mut impl Host) -> bool {
        let room = self.replies_owed < Self::depth(conn.attr);
        if !room {
            host.drop_packet(Drop::Overload);
        }
        room
    }

    /// A packet that was executed before (IBA 9.7.4.1.1).
    fn duplicate(&mut self, request: Request, conn: Conn<'_>, packet: &Packet<'_>, host: &mut impl Host) {
        host.count(Count::DuplicateRequest, 1);
        let psn = packet.headers.bth.psn;
        self.came_again(psn);
        let again = match request {
            Request::Send(_) | Request::Write(_) => {
                let acked = self.acked;
                self.queue_ack(acked);
                return;
            }
            Request::Read => packet.headers.reth.and_then(|reth| self.read_again(psn, reth, conn)),
            Request::CompareSwap | Request::FetchAdd => self.saved.iter().find_map(|saved| match *saved {
                Saved::Atomic { psn: at, value } if at == psn => Some(Reply::Atomic { psn, msn: self.msn, value }),
                _ => None,
            }),
            Request::AtomicWrite | Request::Flush => self.saved.iter().find_map(|saved| match *saved {
                Saved::Placed { psn: at } if at == psn => Some(Reply::Placed { psn, msn: self.msn }),
                _ => None,
            }),
        };
        match again {
            Some(_) if self.is_owed(psn) => {}
            Some(reply) => {
                if self.has_room(conn, host) {
                    self.owe(reply);
                }
            }
            None => host.drop_packet(Drop::DuplicateUnknown),
        }
    }

    /// A repeated READ must ask for the rest, or a part, of what was asked for (IBA 9.7.4.1.1).
    fn read_again(&self, at: Psn, reth: Reth, conn: Conn<'_>) -> Option<Reply> {
        let pd = self.saved.iter().find_map(|saved| {
            let Saved::Read { psn, packets, pd, va, rkey, len } = *saved else { return None };
            let index = at.diff(psn);
            if index < 0 || index as u32 >= packets || reth.rkey != rkey {
                return None;
            }
            let offset = index as u32 * conn.attr.path_mtu;
            (reth.va == va.wrapping_add(u64::from(offset)) && reth.len <= len - offset).then_some(pd)
        })?;
        let Reth { va, rkey, len } = reth;
        Some(Reply::Read(ReadReply { psn: at, msn: self.msn, pd, va, rkey, len, fresh: true, again: true }))
    }

    /// Does an answer that begins with `psn` wait already?
    fn is_owed(&self, at: Psn) -> bool {
        self.replies.iter().any(|reply| match reply {
            Reply::Read(read) => read.psn == at && read.fresh,
            Reply::Atomic { psn, .. } | Reply::Placed { psn, .. } => *psn == at,
            _ => false,
        })
    }

    fn send(
        &mut self,
        part: Part,
        conn: Conn<'_>,
        packet: &Packet<'_>,
        host: &mut impl Host,
    ) -> Result<(), Box<Fault>> {
        let psn = packet.headers.bth.psn;
        if part.starts() {
            if !matches!(self.message, Message::None) {
                return Err(self.broken_sequence(psn));
            }
        } else if !matches!(self.message, Message::Send(_)) {
            return Err(self.broken_sequence(psn));
        }
        if !length_fits(part, packet.payload.len(), conn.attr.path_mtu) {
            return Err(self.refuse(psn, INVALID));
        }
        let (mut receive, payload) = match std::mem::replace(&mut self.message, Message::None) {
            Message::Send(receive) => (receive, packet.payload),
            _ => match self.begin_send(part, conn, packet, host)? {
                Begun::Receive(receive, payload) => (receive, payload),
                Begun::NotReady => {
                    self.not_ready(psn, conn, host);
                    return Ok(());
                }
                Begun::Done => {
                    self.accept(packet, true);
                    return Ok(());
                }
            },
        };
        if !receive.has_room(payload.len()) {
            let failure = Failure::new(WcStatus::LocLenErr, vendor::TOO_LONG);
            return Err(Box::new(Fault::of_receive(psn, INVALID, receive, failure)));
        }
        if let Err(error) = receive.put(conn.init.pd, payload, part.ends(), host) {
            let failure = Failure::local(error);
            return Err(Box::new(Fault::of_receive(psn, Syndrome::NAK_REMOTE_OPERATIONAL, receive, failure)));
        }
        if !part.ends() {
            receive.tell_match(conn.init, conn.attr.dest_qpn, host);
            self.message = Message::Send(receive);
            self.accept(packet, false);
            return Ok(());
        }
        if let Some(rkey) = packet.headers.ieth
            && host.invalidate(conn.init.pd, rkey, conn.init.qpn).is_err()
        {
            let failure = Failure::new(WcStatus::MwBindErr, vendor::INVALIDATE);
            return Err(Box::new(Fault::of_receive(psn, Syndrome::NAK_REMOTE_ACCESS, receive, failure)));
        }
        receive.complete(conn.init, extras(conn, packet), host);
        self.accept(packet, true);
        Ok(())
    }

    fn write(
        &mut self,
        part: Part,
        conn: Conn<'_>,
        packet: &Packet<'_>,
        host: &mut impl Host,
    ) -> Result<(), Box<Fault>> {
        let psn = packet.headers.bth.psn;
        let len = packet.payload.len() as u32;
        let write = match self.message {
            Message::None if part.starts() => self.begin_write(part, conn, packet, host)?,
            Message::Write(write) if !part.starts() => write,
            _ => return Err(self.broken_sequence(psn)),
        };
        let left = write.len - write.done;
        let fits = if part.ends() { len == left } else { len < left };
        if !fits || !length_fits(part, packet.payload.len(), conn.attr.path_mtu) {
            return Err(self.refuse_write(part, packet, INVALID, host));
        }
        // The receive request of an immediate is needed only now; without one the last packet is refused as a whole.
        let immediate = match (part.ends(), packet.headers.imm) {
            (true, Some(_)) => match host.pop_recv() {
                Some(wr) => Some(wr),
                None => {
                    self.not_ready(psn, conn, host);
                    return Ok(());
                }
            },
            _ => None,
        };
        if len > 0 {
            let va = write.va.wrapping_add(u64::from(write.done));
            let stored = host
                .resolve_remote(conn.init.pd, write.rkey, va, len, Access::REMOTE_WRITE)
                .and_then(|span| host.store(span, packet.payload, part.ends()));
            if let Err(error) = stored {
                let syndrome = remote_syndrome(error);
                return Err(match immediate {
                    Some(wr) => Box::new(Fault::of_receive(psn, syndrome, Receive::new(wr), refused_write(syndrome))),
                    None => self.refuse(psn, syndrome),
                });
            }
        }
        if let Some(wr) = immediate {
            receive::complete_write_imm(&wr, write.len, conn.init, extras(conn, packet), host);
        }
        self.message =
            if part.ends() { Message::None } else { Message::Write(Write { done: write.done + len, ..write }) };
        self.accept(packet, part.ends());
        Ok(())
    }

    /// Checks the whole range of a WRITE at its first packet.
    fn begin_write(
        &mut self,
        part: Part,
        conn: Conn<'_>,
        packet: &Packet<'_>,
        host: &mut impl Host,
    ) -> Result<Write, Box<Fault>> {
        let psn = packet.headers.bth.psn;
        let reth = packet.headers.reth.ok_or_else(|| self.refuse(psn, INVALID))?;
        if !conn.attr.access.contains(Access::REMOTE_WRITE) || u64::from(reth.len) > MAX_MESSAGE {
            return Err(self.refuse(psn, INVALID));
        }
        // Lengths that contradict the opcode come before the range: the request is malformed whatever the key.
        let len = packet.payload.len();
        let agrees = match part {
            Part::Only => len == reth.len as usize,
            _ => len < reth.len as usize,
        };
        if !agrees || !length_fits(part, len, conn.attr.path_mtu) {
            return Err(self.refuse_write(part, packet, INVALID, host));
        }
        check_range(reth, Access::REMOTE_WRITE, conn, host)
            .map_err(|syndrome| self.refuse_write(part, packet, syndrome, host))?;
        Ok(Write { va: reth.va, rkey: reth.rkey, len: reth.len, done: 0 })
    }

    fn read(&mut self, conn: Conn<'_>, packet: &Packet<'_>, host: &mut impl Host) -> Result<(), Box<Fault>> {
        let psn = packet.headers.bth.psn;
        if !matches!(self.message, Message::None) {
            return Err(self.broken_sequence(psn));
        }
        let reth = packet.headers.reth.ok_or_else(|| self.refuse(psn, INVALID))?;
        let allowed = conn.attr.access.contains(Access::REMOTE_READ)
            && u64::from(reth.len) <= MAX_MESSAGE
            && packet.payload.is_empty();
        if !allowed {
            return Err(self.refuse(psn, INVALID));
        }
        check_range(reth, Access::REMOTE_READ, conn, host).map_err(|syndrome| self.refuse(psn, syndrome))?;
        let Reth { va, rkey, len } = reth;
        let (packets, pd) = (Wqe::packets_for(len, conn.attr.path_mtu), conn.init.pd);
        self.count_message();
        self.save(Saved::Read { psn, packets, pd, va, rkey, len }, conn.attr);
        self.owe(Reply::Read(ReadReply { psn, msn: self.msn, pd, va, rkey, len, fresh: true, again: false }));
        self.expected = psn.add(packets);
        Ok(())
    }

    fn atomic(
        &mut self,
        request: Request,
        conn: Conn<'_>,
        packet: &Packet<'_>,
        host: &mut impl Host,
    ) -> Result<(), Box<Fault>> {
        let psn = packet.headers.bth.psn;
        if !matches!(self.message, Message::None) {
            return Err(self.broken_sequence(psn));
        }
        let eth = packet.headers.atomic.ok_or_else(|| self.refuse(psn, INVALID))?;
        let allowed =
            conn.attr.access.contains(Access::REMOTE_ATOMIC) && eth.va.is_multiple_of(8) && packet.payload.is_empty();
        if !allowed {
            return Err(self.refuse(psn, INVALID));
        }
        let op = match request {
            Request::CompareSwap => AtomicOp::CompareSwap { compare: eth.compare, swap: eth.swap_add },
            _ => AtomicOp::FetchAdd { add: eth.swap_add },
        };
        let value = host
            .resolve_remote(conn.init.pd, eth.rkey, eth.va, 8, Access::REMOTE_ATOMIC)
            .and_then(|span| host.atomic(span, op))
            .map_err(|error| self.refuse(psn, remote_syndrome(error)))?;
        self.count_message();
        self.save(Saved::Atomic { psn, value }, conn.attr);
        self.owe(Reply::Atomic { psn, msn: self.msn, value });
        self.expected = psn.add(1);
        Ok(())
    }

    /// ATOMIC WRITE: eight bytes, stored as one word. It needs the right of a WRITE.
    fn atomic_write(&mut self, conn: Conn<'_>, packet: &Packet<'_>, host: &mut impl Host) -> Result<(), Box<Fault>> {
        let psn = packet.headers.bth.psn;
        let reth = packet.headers.reth.filter(|reth| {
            matches!(self.message, Message::None)
                && conn.attr.access.contains(Access::REMOTE_WRITE)
                && reth.va.is_multiple_of(8)
                && (reth.len, packet.payload.len()) == (8, 8)
        });
        let Reth { va, rkey, len } = reth.ok_or_else(|| self.refuse(psn, INVALID))?;
        host.resolve_remote(conn.init.pd, rkey, va, len, Access::REMOTE_WRITE)
            // Where the region's addresses begin otherwise than its memory, this one may be no multiple of 8.
            .and_then(|span| if span.addr.is_multiple_of(8) { Ok(span) } else { Err(MemoryError::Misaligned) })
            .and_then(|span| host.store(span, packet.payload, true))
            .map_err(|error| self.refuse(psn, remote_syndrome(error)))?;
        self.placed(psn, conn);
        Ok(())
    }

    /// FLUSH: what was written before is where every processor sees it once it is stored, so there is nothing to do but to check. Memory
    /// is granted for persistence by the host, if it can keep that promise.
    fn flush_placement(&mut self, conn: Conn<'_>, packet: &Packet<'_>, host: &mut impl Host) -> Result<(), Box<Fault>> {
        let psn = packet.headers.bth.psn;
        let asked = packet.headers.feth.zip(packet.headers.reth).and_then(|(feth, reth)| {
            let placement = Placement::from_bits(feth.placement() as u8).filter(|placement| !placement.is_empty())?;
            let mut access = Access::empty();
            access.set(Access::FLUSH_GLOBAL, placement.contains(Placement::GLOBAL));
            access.set(Access::FLUSH_PERSISTENT, placement.contains(Placement::PERSISTENT));
            let allowed = matches!(self.message, Message::None)
                && conn.attr.access.contains(access)
                && packet.payload.is_empty()
                && feth.selectivity() <= 1;
            allowed.then_some((access, reth, feth.selectivity() == 1))
        });
        let (access, Reth { va, rkey, len }, whole) = asked.ok_or_else(|| self.refuse(psn, INVALID))?;
        let checked = if whole {
            host.check_key(conn.init.pd, rkey, access)
        } else {
            host.resolve_remote(conn.init.pd, rkey, va, len, access).map(drop)
        };
        checked.map_err(|error| self.refuse(psn, remote_syndrome(error)))?;
        self.placed(psn, conn);
        Ok(())
    }

    /// An ATOMIC WRITE or FLUSH was executed.
    fn placed(&mut self, psn: Psn, conn: Conn<'_>) {
        self.count_message();
        self.save(Saved::Placed { psn }, conn.attr);
        self.owe(Reply::Placed { psn, msn: self.msn });
        self.expected = psn.add(1);
    }

    /// A SEND or WRITE packet was executed.
    fn accept(&mut self, packet: &Packet<'_>, ends: bool) {
        let bth = &packet.headers.bth;
        self.expected = bth.psn.add(1);
        self.acked = bth.psn;
        if ends {
            self.count_message();
        }
        if bth.ack_req {
            self.queue_ack(bth.psn);
        }
    }

    fn count_message(&mut self) {
        self.msn = (self.msn + 1) & 0x00ff_ffff;
    }

    /// No receive posted: the requester shall come again (IBA 9.7.5.2.8). What is behind in flight stays without an answer.
    fn not_ready(&mut self, psn: Psn, conn: Conn<'_>, host: &mut impl Host) {
        self.refused_behind();
        self.nak_sent = true;
        self.queue_nak(psn, Syndrome::rnr(conn.attr.min_rnr_timer), host);
    }

    /// The packet does not continue the message that is arriving.
    fn broken_sequence(&mut self, psn: Psn) -> Box<Fault> {
        self.refuse(psn, INVALID)
    }

    /// A refusal of a WRITE's packet. If it has the immediate, the error is one of the receive request that it would have used
    /// up, whose completion tells (class C, IBA 9.9.3.1.3); if there is none, an event does.
    fn refuse_write(
        &mut self,
        part: Part,
        packet: &Packet<'_>,
        syndrome: Syndrome,
        host: &mut impl Host,
    ) -> Box<Fault> {
        let psn = packet.headers.bth.psn;
        let uses_receive = part.ends() && packet.headers.imm.is_some();
        match uses_receive.then(|| host.pop_recv()).flatten() {
            Some(wr) => Box::new(Fault::of_receive(psn, syndrome, Receive::new(wr), refused_write(syndrome))),
            None => self.refuse(psn, syndrome),
        }
    }

    /// A refusal: it takes the receive request of a SEND that is arriving along.
    fn refuse(&mut self, psn: Psn, syndrome: Syndrome) -> Box<Fault> {
        Box::new(match std::mem::replace(&mut self.message, Message::None) {
            Message::Send(receive) => {
                let failure = Failure::new(WcStatus::RemInvReqErr, vendor::NOT_ALLOWED);
                Fault::of_receive(psn, syndrome, receive, failure)
            }
            _ => Fault::of_request(psn, syndrome),
        })
    }
}

/// An error, as the requester is told it, unless the key grants the right to all bytes that the request names.
fn check_range(reth: Reth, access: Access, conn: Conn<'_>, host: &mut impl Host) -> Result<(), Syndrome> {
    if reth.len == 0 {
        return Ok(());
    }
    host.resolve_remote(conn.init.pd, reth.rkey, reth.va, reth.len, access).map(drop).map_err(remote_syndrome)
}

/// How the receive request of a refused WRITE with immediate ends: as the requester's own request does, so that both ends
/// tell of the same error (as with kernel rxe); if it is our memory that is gone, by a local error (IBA 11.6.2).
fn refused_write(syndrome: Syndrome) -> Failure {
    match syndrome {
        Syndrome::NAK_REMOTE_ACCESS => Failure::new(WcStatus::RemAccessErr, vendor::NOT_ALLOWED),
        Syndrome::NAK_INVALID_REQUEST => Failure::new(WcStatus::RemInvReqErr, vendor::NOT_ALLOWED),
        _ => Failure::new(WcStatus::LocAccessErr, vendor::memory(MemoryError::Fault)),
    }
}

/// What the requester is told when memory refuses.
pub(super) fn remote_syndrome(error: MemoryError) -> Syndrome {
    match error {
        MemoryError::BadKey | MemoryError::WrongPd | MemoryError::Bounds | MemoryError::Access => {
            Syndrome::NAK_REMOTE_ACCESS
        }
        MemoryError::Misaligned => INVALID,
        // The key was good; that the memory is gone is our failure, not the requester's.
        MemoryError::Fault => Syndrome::NAK_REMOTE_OPERATIONAL,
    }
}

pub(super) fn extras(conn: Conn<'_>, packet: &Packet<'_>) -> Extras {
    let headers = packet.headers;
    Extras {
        imm: headers.imm,
        // Only SENDs with invalidate have the header.
        invalidated: headers.ieth,
        solicited: headers.bth.solicited,
        src_qp: conn.attr.dest_qpn,
        grh: false,
        sl: 0,
        flow_tag: 0,
    }
}
