//! A receive request that a message is being put into. All service types share this.

use ferroce_wire::Tmh;

use crate::host::{Host, Memory, MemoryError};
use crate::verbs::{Completion, QpInit, RecvWr, WcFlags, WcOpcode, WcStatus};
use crate::wqe::{Failure, scatter, vendor};

/// A receive request with the bytes received so far.
#[derive(Debug)]
pub(crate) struct Receive {
    wr: RecvWr,
    received: u32,
    tags: Tags,
}

/// What the message is to a receive queue that matches tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tags {
    /// It does not.
    Unmatched,
    /// Not for matching.
    NoTag,
    /// No tag matched.
    Unexpected,
    /// A tag matched; here is what has to be told of it yet.
    Matched(Option<Tmh>),
}

impl Tags {
    fn opcode(self) -> WcOpcode {
        match self {
            Tags::Unmatched => WcOpcode::Recv,
            Tags::NoTag => WcOpcode::TmNoTag,
            Tags::Unexpected | Tags::Matched(_) => WcOpcode::TmRecv,
        }
    }
}

/// What a finished message brings besides its bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Extras {
    pub(crate) imm: Option<u32>,
    pub(crate) invalidated: Option<u32>,
    pub(crate) solicited: bool,
    pub(crate) src_qp: u32,
    /// The buffer starts with the GRH area (UD).
    pub(crate) grh: bool,
    /// [`Completion::sl`].
    pub(crate) sl: u8,
    /// Tag of the rule that steered it here (RAW_PACKET).
    pub(crate) flow_tag: u32,
}

impl Receive {
    pub(crate) fn new(wr: RecvWr) -> Receive {
        Receive { wr, received: 0, tags: Tags::Unmatched }
    }

    /// Of a message that is not for matching, in a queue that matches tags.
    pub(crate) fn no_tag(wr: RecvWr) -> Receive {
        Receive { wr, received: 0, tags: Tags::NoTag }
    }

    /// Of a message whose tag matched none.
    pub(crate) fn unexpected(wr: RecvWr) -> Receive {
        Receive { wr, received: 0, tags: Tags::Unexpected }
    }

    /// A tagged buffer, with the header that matched.
    pub(crate) fn matched(wr: RecvWr, tmh: Tmh) -> Receive {
        Receive { wr, received: 0, tags: Tags::Matched(Some(tmh)) }
    }

    /// The request: the message was broken off, and it is used again, or completes otherwise.
    pub(crate) fn into_wr(self) -> RecvWr {
        self.wr
    }

    /// Is there room for `len` more bytes?
    pub(crate) fn has_room(&self, len: usize) -> bool {
        let room: u64 = self.wr.sges.iter().map(|sge| u64::from(sge.length)).sum();
        u64::from(self.received) + len as u64 <= room
    }

    /// Puts the next bytes; [`Receive::has_room`] was asked.
    pub(crate) fn put(&mut self, pd: u32, bytes: &[u8], last: bool, host: &mut impl Memory) -> Result<(), MemoryError> {
        scatter(&self.wr.sges, pd, self.received, bytes, last, host)?;
        self.received += bytes.len() as u32;
        Ok(())
    }

    /// Tells of a match before the bytes are there.
    pub(crate) fn tell_match(&mut self, init: &QpInit, src_qp: u32, host: &mut impl Host) {
        if let Tags::Matched(tmh) = &mut self.tags
            && let Some(tmh) = tmh.take()
        {
            let told = with_match(
                completion(&self.wr, WcOpcode::TmRecv, 0, init, Extras { src_qp, ..Extras::default() }),
                tmh,
            );
            host.complete_recv(told);
        }
    }

    /// The receive of a rendezvous request that matched: tells of the match, and that the buffer, too small for the data, has the
    /// request.
    pub(crate) fn complete_incomplete(self, init: &QpInit, extras: Extras, host: &mut impl Host) {
        let told = completion(&self.wr, WcOpcode::TmRecv, self.received, init, extras);
        let told = Completion { status: WcStatus::TmRndvIncomplete, ..told };
        host.complete_recv(match self.tags {
            Tags::Matched(Some(tmh)) => with_match(told, tmh),
            _ => told,
        });
    }

    /// Completes a SEND.
    pub(crate) fn complete(self, init: &QpInit, extras: Extras, host: &mut impl Host) {
        let mut told = completion(&self.wr, self.tags.opcode(), self.received, init, extras);
        if let Tags::Matched(tmh) = self.tags {
            told.flags |= WcFlags::TM_DATA_VALID;
            told = tmh.map_or(told, |tmh| with_match(told, tmh));
        }
        host.complete_recv(told);
    }

    /// Completes in error.
    pub(crate) fn fail(self, init: &QpInit, src_qp: u32, failure: Failure, host: &mut impl Host) {
        if self.tags == Tags::Unexpected {
            host.forget_unexpected();
        }
        fail_as(self.tags.opcode(), &self.wr, init, src_qp, failure, host);
    }

    /// Completes as flushed.
    pub(crate) fn flush(self, init: &QpInit, src_qp: u32, host: &mut impl Host) {
        self.fail(init, src_qp, FLUSHED, host);
    }
}

const FLUSHED: Failure = Failure { status: WcStatus::WrFlushErr, vendor: vendor::FLUSHED };

fn with_match(completion: Completion, tmh: Tmh) -> Completion {
    let flags = completion.flags | WcFlags::TM_MATCH;
    Completion { flags, tm_tag: tmh.tag, tm_app_ctx: tmh.app_ctx, ..completion }
}

/// Completes a receive request that a WRITE with immediate of `len` bytes used up.
pub(crate) fn complete_write_imm(wr: &RecvWr, len: u32, init: &QpInit, extras: Extras, host: &mut impl Host) {
    host.complete_recv(completion(wr, WcOpcode::RecvRdmaWithImm, len, init, extras));
}

/// The completion of a receive request with success.
pub(crate) fn completion(wr: &RecvWr, opcode: WcOpcode, byte_len: u32, init: &QpInit, extras: Extras) -> Completion {
    let mut flags = WcFlags::empty();
    flags.set(WcFlags::WITH_IMM, extras.imm.is_some());
    flags.set(WcFlags::WITH_INV, extras.invalidated.is_some());
    flags.set(WcFlags::GRH, extras.grh);
    Completion {
        wr_id: wr.wr_id,
        opcode,
        byte_len,
        imm: extras.imm.or(extras.invalidated).unwrap_or(extras.flow_tag),
        qp_num: init.qpn,
        src_qp: extras.src_qp,
        flags,
        vendor_err: vendor::NONE,
        solicited: extras.solicited,
        sl: extras.sl,
        ..Completion::UNUSED
    }
}

/// Completes a receive request in error.
pub(crate) fn fail(wr: &RecvWr, init: &QpInit, src_qp: u32, failure: Failure, host: &mut impl Host) {
    fail_as(WcOpcode::Recv, wr, init, src_qp, failure, host);
}

pub(crate) fn fail_as(
    opcode: WcOpcode,
    wr: &RecvWr,
    init: &QpInit,
    src_qp: u32,
    failure: Failure,
    host: &mut impl Host,
) {
    host.complete_recv(Completion {
        wr_id: wr.wr_id,
        status: failure.status,
        opcode,
        qp_num: init.qpn,
        src_qp,
        vendor_err: failure.vendor,
        // Who waits for solicited completions must see errors too (IBA 11.4.2.2).
        solicited: true,
        ..Completion::UNUSED
    });
}

/// Completes a receive request as flushed.
pub(crate) fn flush(wr: &RecvWr, init: &QpInit, src_qp: u32, host: &mut impl Host) {
    fail(wr, init, src_qp, FLUSHED, host);
}
