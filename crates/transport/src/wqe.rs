//! A send request as the queue pair keeps it, and the packets that a SEND or WRITE is cut into. RC and UC share this.

use std::sync::Arc;

use ferroce_wire::{Bth, Headers, Opcode, Psn, Reth};
use smallvec::SmallVec;

use crate::decode::{CLASS_XRC, Part, class, part_at};
use crate::host::{Host, Memory, MemoryError, Payload, Side, Span, Train};
use crate::qp::Conn;
use crate::verbs::{Completion, SendData, SendFlags, SendOp, SendWr, Sge, UdDest, WcFlags, WcOpcode, WcStatus};
use crate::{MAX_TRAIN_BYTES, MAX_TRAIN_PACKETS};

/// Longest message (IBA 9.7.4.1.x: 2^31 bytes).
pub(crate) const MAX_MESSAGE: u64 = 1 << 31;

/// Ferroce's own reasons in `Completion::vendor_err`.
pub(crate) mod vendor {
    pub(crate) const NONE: u32 = 0;
    /// Flushed because the queue pair went to ERR or SQE.
    pub(crate) const FLUSHED: u32 = 1;
    /// The message is longer than the transport or the path allows.
    pub(crate) const TOO_LONG: u32 = 2;
    /// An operation that the queue pair's attributes do not allow.
    pub(crate) const NOT_ALLOWED: u32 = 3;
    /// A response whose opcode or length does not fit the request.
    pub(crate) const BAD_RESPONSE: u32 = 4;
    /// No answer until the deadline.
    pub(crate) const NO_ANSWER: u32 = 5;
    /// RNR NAKs beyond the count.
    pub(crate) const RNR: u32 = 6;
    /// A window could not be bound or invalidated.
    pub(crate) const INVALIDATE: u32 = 7;
    /// Local memory refused: this plus the number of the reason.
    pub(crate) const LOCAL_MEMORY: u32 = 0x10;
    /// The peer refused: this plus the AETH syndrome.
    pub(crate) const REMOTE_NAK: u32 = 0x100;

    /// The code of a local memory error.
    pub(crate) fn memory(error: crate::MemoryError) -> u32 {
        LOCAL_MEMORY + error as u32
    }
}

/// Local memory or bytes.
#[derive(Debug)]
pub(crate) enum Data {
    Sges(SmallVec<[Sge; 2]>),
    Inline(Arc<[u8]>),
}

/// How a request ends in error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) status: WcStatus,
    pub(crate) vendor: u32,
}

impl Failure {
    pub(crate) fn new(status: WcStatus, vendor: u32) -> Failure {
        Failure { status, vendor }
    }

    /// Local memory refused.
    pub(crate) fn local(error: MemoryError) -> Failure {
        Failure::new(WcStatus::LocProtErr, vendor::memory(error))
    }
}

/// Whose request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The program's: it has a slot in the send queue.
    Program,
    /// Reads the data of a rendezvous request into a tagged buffer, whose completion tells how it ended.
    Rendezvous,
    /// Tells the sender of a rendezvous request that it was read; nobody waits for it.
    Fin,
}

/// A send request in the queue.
#[derive(Debug)]
pub(crate) struct Wqe {
    pub(crate) owner: Owner,
    pub(crate) wr_id: u64,
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    pub(crate) data: Data,
    pub(crate) ud: Option<UdDest>,
    /// The peer's shared receive queue; 0 if the queue pair is not XRC.
    pub(crate) xrc_srqn: u32,
    /// Bytes of the message; `None` if they pass 2^31.
    len: Option<u32>,
    /// PSNs it takes; 0 until it is started.
    pub(crate) packets: u32,
    /// Of these, acknowledged or answered.
    pub(crate) acked: u32,
    /// Its turn came: the local side was checked.
    pub(crate) started: bool,
    /// It cannot be carried out; it completes so when its predecessors are complete.
    pub(crate) failed: Option<Failure>,
}

impl Wqe {
    pub(crate) fn new(wr: SendWr) -> Wqe {
        let (data, len) = match wr.data {
            SendData::Sges(sges) => {
                let len: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
                (Data::Sges(sges), len)
            }
            SendData::Inline(bytes) => {
                let len = bytes.len() as u64;
                (if len == 0 { Data::Sges(SmallVec::new()) } else { Data::Inline(Arc::from(bytes)) }, len)
            }
        };
        Wqe {
            owner: Owner::Program,
            wr_id: wr.wr_id,
            op: wr.op,
            flags: wr.flags,
            data,
            ud: wr.ud,
            xrc_srqn: wr.xrc_srqn.unwrap_or(0),
            len: (len <= MAX_MESSAGE).then_some(len as u32),
            packets: 0,
            acked: 0,
            started: false,
            failed: None,
        }
    }

    /// One that the card itself posts.
    pub(crate) fn owned(wr: SendWr, owner: Owner) -> Wqe {
        Wqe { owner, ..Wqe::new(wr) }
    }

    /// Bytes, or the failure if they are too many.
    pub(crate) fn checked_len(&self) -> Result<u32, Failure> {
        self.len.ok_or(Failure::new(WcStatus::LocLenErr, vendor::TOO_LONG))
    }

    /// Bytes of a request that was started.
    pub(crate) fn len(&self) -> u32 {
        self.len.expect("a started request has a valid length")
    }

    pub(crate) fn is_read(&self) -> bool {
        matches!(self.op, SendOp::Read { .. })
    }

    pub(crate) fn is_atomic(&self) -> bool {
        matches!(self.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
    }

    /// It is answered by a READ response without bytes (IBA annex A19).
    pub(crate) fn is_placement(&self) -> bool {
        matches!(self.op, SendOp::AtomicWrite { .. } | SendOp::Flush { .. })
    }

    /// It changes a key of this host and sends nothing.
    pub(crate) fn is_of_this_host(&self) -> bool {
        matches!(self.op, SendOp::LocalInv { .. } | SendOp::BindMw(_))
    }

    /// Does what [`Wqe::is_of_this_host`] says.
    pub(crate) fn change_key(&self, pd: u32, qpn: u32, host: &mut impl Memory) -> Result<(), Failure> {
        let done = match &self.op {
            SendOp::LocalInv { rkey } => host.invalidate(pd, *rkey, qpn),
            SendOp::BindMw(bind) => host.bind(pd, bind, qpn),
            _ => Ok(()),
        };
        done.map_err(|_| Failure::new(WcStatus::MwBindErr, vendor::INVALIDATE))
    }

    /// READs, atomics, FLUSH and ATOMIC WRITE are complete only with their response; an ACK does not do.
    pub(crate) fn needs_response(&self) -> bool {
        self.brings_bytes() || self.is_placement()
    }

    /// The response is put into the local elements.
    fn brings_bytes(&self) -> bool {
        self.is_read() || self.is_atomic()
    }

    /// The PSNs that `len` bytes take.
    pub(crate) fn packets_for(len: u32, mtu: u32) -> u32 {
        len.div_ceil(mtu).max(1)
    }

    /// Bytes of `packets` of its packets, from packet `index` on.
    pub(crate) fn len_of(&self, index: u32, packets: u32, mtu: u32) -> u32 {
        (self.len() - index * mtu).min(packets * mtu)
    }

    /// Checks every local element: with a bad key nothing may go out. Where a response goes must be writable, before the peer executes
    /// what cannot be undone (an atomic).
    pub(crate) fn check_local(&self, pd: u32, host: &mut impl Memory) -> Result<(), MemoryError> {
        let write = self.brings_bytes();
        match &self.data {
            Data::Sges(sges) => sges
                .iter()
                .filter(|sge| sge.length > 0)
                .try_for_each(|sge| host.resolve_local(pd, sge, write).map(drop)),
            // An inline buffer is a copy: there is nowhere to put a response.
            Data::Inline(_) if write => Err(MemoryError::Access),
            Data::Inline(_) => Ok(()),
        }
    }

    /// The source bytes `[offset, offset + len)`.
    pub(crate) fn source(
        &self,
        pd: u32,
        offset: u32,
        len: u32,
        host: &mut impl Memory,
    ) -> Result<Payload, MemoryError> {
        match &self.data {
            Data::Inline(bytes) => Ok(Payload::Inline(Arc::clone(bytes), offset)),
            Data::Sges(sges) => {
                let mut spans: SmallVec<[Span; 2]> = SmallVec::new();
                for piece in pieces(sges, offset, len) {
                    spans.push(host.resolve_local(pd, &piece, false)?);
                }
                Ok(Payload::Gather(spans))
            }
        }
    }

    /// Stores response bytes at `offset` of the local elements.
    pub(crate) fn store(
        &self,
        pd: u32,
        offset: u32,
        bytes: &[u8],
        last: bool,
        host: &mut impl Memory,
    ) -> Result<(), MemoryError> {
        match &self.data {
            Data::Sges(sges) => scatter(sges, pd, offset, bytes, last, host),
            // An inline buffer is a copy: there is nowhere to put a response.
            Data::Inline(_) => Err(MemoryError::Access),
        }
    }

    /// The completion that tells how it ended.
    pub(crate) fn completion(&self, qpn: u32, dest_qpn: u32, failure: Option<Failure>) -> Completion {
        let opcode = match self.op {
            SendOp::Send | SendOp::SendImm { .. } | SendOp::SendInv { .. } => WcOpcode::Send,
            SendOp::Write { .. } | SendOp::WriteImm { .. } => WcOpcode::RdmaWrite,
            SendOp::Read { .. } => WcOpcode::RdmaRead,
            SendOp::CompareSwap { .. } => WcOpcode::CompSwap,
            SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
            SendOp::LocalInv { .. } => WcOpcode::LocalInv,
            SendOp::BindMw(_) => WcOpcode::BindMw,
            SendOp::AtomicWrite { .. } => WcOpcode::AtomicWrite,
            SendOp::Flush { .. } => WcOpcode::Flush,
        };
        Completion {
            wr_id: self.wr_id,
            status: failure.map_or(WcStatus::Success, |failure| failure.status),
            opcode,
            byte_len: match opcode {
                WcOpcode::RdmaRead => self.len.unwrap_or(0),
                WcOpcode::CompSwap | WcOpcode::FetchAdd => 8,
                _ => 0,
            },
            imm: 0,
            qp_num: qpn,
            src_qp: dest_qpn,
            flags: WcFlags::empty(),
            vendor_err: failure.map_or(vendor::NONE, |failure| failure.vendor),
            // Who waits for solicited completions must see errors too (IBA 11.4.2.2).
            solicited: failure.is_some(),
            ..Completion::UNUSED
        }
    }

    /// Ends it: frees its slot, and completes it if the program wants to know.
    pub(crate) fn finish(self, qpn: u32, dest_qpn: u32, failure: Option<Failure>, host: &mut impl Host) {
        if self.owner != Owner::Program {
            return self.finish_own(qpn, dest_qpn, failure, host);
        }
        // The slot first: who sees the completion may post at once.
        host.release_send(1);
        if failure.is_some() || self.flags.contains(SendFlags::SIGNALED) {
            host.complete_send(self.completion(qpn, dest_qpn, failure));
        }
    }

    /// Ends one that the card posted.
    fn finish_own(&self, qpn: u32, dest_qpn: u32, failure: Option<Failure>, host: &mut impl Host) {
        if self.owner != Owner::Rendezvous {
            return;
        }
        let mut told = Completion { opcode: WcOpcode::TmRecv, ..self.completion(qpn, dest_qpn, failure) };
        if failure.is_none() {
            told.flags |= WcFlags::TM_DATA_VALID;
        } else {
            told.byte_len = 0;
        }
        host.complete_recv(told);
    }

    /// Ends it as flushed.
    pub(crate) fn flush(self, qpn: u32, dest_qpn: u32, host: &mut impl Host) {
        self.finish(qpn, dest_qpn, Some(Failure::new(WcStatus::WrFlushErr, vendor::FLUSHED)), host);
    }
}

/// The pieces of `sges` that cover `[offset, offset + len)`; empty ones are left out.
pub(crate) fn pieces(sges: &[Sge], offset: u32, len: u32) -> impl Iterator<Item = Sge> + '_ {
    let (from, to) = (u64::from(offset), u64::from(offset) + u64::from(len));
    let mut start = 0u64;
    sges.iter().filter_map(move |sge| {
        let (this, end) = (start, start + u64::from(sge.length));
        start = end;
        let (low, high) = (from.max(this), to.min(end));
        (low < high).then(|| Sge {
            addr: sge.addr.wrapping_add(low - this),
            length: (high - low) as u32,
            lkey: sge.lkey,
        })
    })
}

/// Stores `bytes` at `offset` of `sges`, which have room for them.
pub(crate) fn scatter(
    sges: &[Sge],
    pd: u32,
    offset: u32,
    bytes: &[u8],
    last: bool,
    host: &mut impl Memory,
) -> Result<(), MemoryError> {
    let mut rest = bytes;
    for piece in pieces(sges, offset, bytes.len() as u32) {
        let (now, later) = rest.split_at(piece.length as usize);
        rest = later;
        let span = host.resolve_local(pd, &piece, true)?;
        host.store(span, now, last && rest.is_empty())?;
    }
    assert!(rest.is_empty(), "the caller checked that the elements have room");
    Ok(())
}

/// Where on the wire a message goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    /// Transport class bits of the opcodes: 0x00 RC, 0x20 UC, 0xa0 XRC.
    pub(crate) class: u8,
    pub(crate) dest_qpn: u32,
    pub(crate) mtu: u32,
}

impl Route {
    /// Where messages of a connected queue pair go.
    pub(crate) fn of(conn: Conn<'_>) -> Route {
        Route { class: class(conn.init.qp_type), dest_qpn: conn.attr.dest_qpn, mtu: conn.attr.path_mtu }
    }
}

/// The largest number of packets that a train of full packets may have.
pub(crate) fn train_packets_max(mtu: u32) -> u32 {
    MAX_TRAIN_PACKETS.min(MAX_TRAIN_BYTES / mtu)
}

/// The train of `packets` packets of a SEND or WRITE that starts with packet `index` and has PSN `psn`.
pub(crate) fn message_train(wqe: &Wqe, route: Route, index: u32, packets: u32, psn: Psn, payload: Payload) -> Train {
    let offset = index * route.mtu;
    let ends = index + packets == wqe.packets;
    let len = if ends { wqe.len() - offset } else { packets * route.mtu };
    let last_len = len - (packets - 1) * route.mtu;
    let one = |at: u32, len: u32| {
        let mut headers = packet_headers(wqe, route, part_at(at, wqe.packets), psn.add(at - index));
        headers.bth.pad = pad(len);
        headers
    };
    let head = one(index, if packets == 1 { last_len } else { route.mtu });
    let tail = (packets > 1).then(|| one(index + packets - 1, last_len));
    Train {
        head,
        body: message_opcode(&wqe.op, route.class, Part::Middle),
        tail,
        packets,
        mtu: route.mtu,
        len,
        payload,
        path: None,
        from: Side::Requester,
    }
}

fn packet_headers(wqe: &Wqe, route: Route, part: Part, psn: Psn) -> Headers {
    let mut headers = Headers::new(Bth::new(message_opcode(&wqe.op, route.class, part), route.dest_qpn, psn));
    headers.xrc_srqn = (route.class == CLASS_XRC).then_some(wqe.xrc_srqn);
    if part.starts()
        && let SendOp::Write { raddr, rkey } | SendOp::WriteImm { raddr, rkey, .. } = wqe.op
    {
        headers.reth = Some(Reth { va: raddr, rkey, len: wqe.len() });
    }
    if part.ends() {
        let mut may_solicit = true;
        match wqe.op {
            SendOp::SendImm { imm } | SendOp::WriteImm { imm, .. } => headers.imm = Some(imm),
            SendOp::SendInv { rkey } => headers.ieth = Some(rkey),
            SendOp::Write { .. } => may_solicit = false,
            _ => {}
        }
        headers.bth.solicited = may_solicit && wqe.flags.contains(SendFlags::SOLICITED);
    }
    headers
}

fn message_opcode(op: &SendOp, class: u8, part: Part) -> Opcode {
    let rc = match (op, part) {
        (SendOp::Send | SendOp::SendImm { .. } | SendOp::SendInv { .. }, Part::First) => Opcode::RC_SEND_FIRST,
        (SendOp::Send | SendOp::SendImm { .. } | SendOp::SendInv { .. }, Part::Middle) => Opcode::RC_SEND_MIDDLE,
        (SendOp::Send, Part::Last) => Opcode::RC_SEND_LAST,
        (SendOp::Send, Part::Only) => Opcode::RC_SEND_ONLY,
        (SendOp::SendImm { .. }, Part::Last) => Opcode::RC_SEND_LAST_IMM,
        (SendOp::SendImm { .. }, Part::Only) => Opcode::RC_SEND_ONLY_IMM,
        (SendOp::SendInv { .. }, Part::Last) => Opcode::RC_SEND_LAST_INV,
        (SendOp::SendInv { .. }, Part::Only) => Opcode::RC_SEND_ONLY_INV,
        (SendOp::Write { .. } | SendOp::WriteImm { .. }, Part::First) => Opcode::RC_WRITE_FIRST,
        (SendOp::Write { .. } | SendOp::WriteImm { .. }, Part::Middle) => Opcode::RC_WRITE_MIDDLE,
        (SendOp::Write { .. }, Part::Last) => Opcode::RC_WRITE_LAST,
        (SendOp::Write { .. }, Part::Only) => Opcode::RC_WRITE_ONLY,
        (SendOp::WriteImm { .. }, Part::Last) => Opcode::RC_WRITE_LAST_IMM,
        (SendOp::WriteImm { .. }, Part::Only) => Opcode::RC_WRITE_ONLY_IMM,
        _ => unreachable!("only SEND and WRITE are cut into packets"),
    };
    Opcode(class | rc.0)
}

/// Pad bytes after `len` bytes of payload.
pub(crate) fn pad(len: u32) -> u8 {
    (len.wrapping_neg() & 3) as u8
}
