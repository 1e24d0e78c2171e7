//! RC responder: SENDs to a shared receive queue that matches tags (rdma-core's Documentation/tag_matching.md).
//!
//! A SEND begins with a tag matching header. If a tagged buffer matches, its data goes there; a rendezvous request has the data read
//! from the sender, who is told when that is done. All else goes to the queue's ordinary requests, header and all.

use ferroce_wire::{RVH_LEN, Rvh, Syndrome, TMH_LEN, TmOp, Tmh};
use smallvec::SmallVec;

use super::request::extras;
use super::{Fault, Responder};
use crate::decode::Part;
use crate::host::{Host, Packet, TagMatch};
use crate::qp::Conn;
use crate::receive::Receive;
use crate::verbs::{QpState, RecvWr, SendData, SendFlags, SendOp, SendWr};
use crate::wqe::{Failure, pieces};

/// Bytes of the longest rendezvous request that is matched, both headers included (`max_rndv_hdr_size`).
pub const MAX_RNDV_HDR: usize = 64;

/// How a SEND begins.
pub(super) enum Begun<'a> {
    /// These of the first packet's bytes, and all that follow, go there.
    Receive(Receive, &'a [u8]),
    /// There is no receive request.
    NotReady,
    /// All of it was dealt with.
    Done,
}

/// A rendezvous request that matched, whose data is to be read.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    tmh: Tmh,
    rvh: Rvh,
    /// Room for just the data.
    buffer: RecvWr,
}

impl Rendezvous {
    /// The READ of the data.
    pub(crate) fn read(&self) -> SendWr {
        SendWr {
            wr_id: self.buffer.wr_id,
            op: SendOp::Read { raddr: self.rvh.va, rkey: self.rvh.rkey },
            flags: SendFlags::SIGNALED,
            data: SendData::Sges(self.buffer.sges.clone()),
            ud: None,
            xrc_srqn: None,
        }
    }

    /// The message, after that, which tells the sender that its memory is its own again: the request's headers.
    pub(crate) fn fin(&self) -> SendWr {
        let mut message = [0; TMH_LEN + RVH_LEN];
        message[..TMH_LEN].copy_from_slice(&Tmh { op: TmOp::FIN, ..self.tmh }.bytes());
        message[TMH_LEN..].copy_from_slice(&self.rvh.bytes());
        SendWr {
            wr_id: self.buffer.wr_id,
            op: SendOp::Send,
            flags: SendFlags::FENCE,
            data: SendData::Inline(Box::new(message)),
            ud: None,
            xrc_srqn: None,
        }
    }
}

impl Responder {
    /// The rendezvous requests that were matched since the last question, in order.
    pub(crate) fn take_rendezvous(&mut self) -> Vec<Rendezvous> {
        std::mem::take(&mut self.rendezvous)
    }

    /// Chooses the receive of a SEND by its first packet.
    pub(super) fn begin_send<'a>(
        &mut self,
        part: Part,
        conn: Conn<'_>,
        packet: &Packet<'a>,
        host: &mut impl Host,
    ) -> Result<Begun<'a>, Box<Fault>> {
        if !host.matches_tags() {
            return Ok(begun(host.pop_recv().map(Receive::new), packet.payload));
        }
        match Tmh::parse(packet.payload) {
            Some(tmh) if tmh.op == TmOp::EAGER => Ok(match host.take_tagged(Some(tmh.tag)) {
                Some(TagMatch::Tagged(wr)) => Begun::Receive(Receive::matched(wr, tmh), &packet.payload[TMH_LEN..]),
                other => untagged(other, packet.payload),
            }),
            Some(tmh) if tmh.op == TmOp::RNDV => self.begin_rendezvous(tmh, part, conn, packet, host),
            _ => Ok(begun(host.pop_recv().map(Receive::no_tag), packet.payload)),
        }
    }

    fn begin_rendezvous<'a>(
        &mut self,
        tmh: Tmh,
        part: Part,
        conn: Conn<'_>,
        packet: &Packet<'a>,
        host: &mut impl Host,
    ) -> Result<Begun<'a>, Box<Fault>> {
        // What cannot be dealt with here is the program's: it is unexpected.
        let can_read = conn.state == QpState::Rts && conn.attr.max_rd_atomic > 0;
        let is_plain = packet.headers.imm.is_none() && packet.headers.ieth.is_none();
        let is_whole = part == Part::Only && packet.payload.len() <= MAX_RNDV_HDR;
        let rvh = Rvh::parse(&packet.payload[TMH_LEN..]).filter(|_| can_read && is_plain && is_whole);
        let Some(rvh) = rvh else { return Ok(untagged(host.take_tagged(None), packet.payload)) };
        let wr = match host.take_tagged(Some(tmh.tag)) {
            Some(TagMatch::Tagged(wr)) => wr,
            other => return Ok(untagged(other, packet.payload)),
        };
        let room: u64 = wr.sges.iter().map(|sge| u64::from(sge.length)).sum();
        if room < u64::from(rvh.len) {
            return self.leave_to_program(Receive::matched(wr, tmh), room, conn, packet, host);
        }
        let sges: SmallVec<_> = pieces(&wr.sges, 0, rvh.len).collect();
        let buffer = RecvWr { wr_id: wr.wr_id, sges };
        Receive::matched(wr, tmh).tell_match(conn.init, conn.attr.dest_qpn, host);
        self.rendezvous.push(Rendezvous { tmh, rvh, buffer });
        Ok(Begun::Done)
    }

    /// The buffer is too small for the data: it gets the headers of the request, and the program does the rest.
    fn leave_to_program<'a>(
        &mut self,
        mut receive: Receive,
        room: u64,
        conn: Conn<'_>,
        packet: &Packet<'a>,
        host: &mut impl Host,
    ) -> Result<Begun<'a>, Box<Fault>> {
        let len = (TMH_LEN + RVH_LEN).min(room as usize);
        if let Err(error) = receive.put(conn.init.pd, &packet.payload[..len], true, host) {
            let (psn, syndrome) = (packet.headers.bth.psn, Syndrome::NAK_REMOTE_OPERATIONAL);
            return Err(Box::new(Fault::of_receive(psn, syndrome, receive, Failure::local(error))));
        }
        receive.complete_incomplete(conn.init, extras(conn, packet), host);
        Ok(Begun::Done)
    }
}

fn begun(receive: Option<Receive>, payload: &[u8]) -> Begun<'_> {
    receive.map_or(Begun::NotReady, |receive| Begun::Receive(receive, payload))
}

/// No tag matched: all of the message goes to an ordinary request.
fn untagged(found: Option<TagMatch>, payload: &[u8]) -> Begun<'_> {
    let receive = found.map(|found| match found {
        TagMatch::Unexpected(wr) | TagMatch::Tagged(wr) => Receive::unexpected(wr),
    });
    begun(receive, payload)
}
