//! A receive request that a message is being put into. All service types share this.

use crate::host::{Host, Memory, MemoryError};
use crate::verbs::{Completion, QpInit, RecvWr, WcFlags, WcOpcode, WcStatus};
use crate::wqe::{Failure, scatter, vendor};

/// A receive request with the bytes received so far.
#[derive(Debug)]
pub(crate) struct Receive {
    wr: RecvWr,
    received: u32,
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
        Receive { wr, received: 0 }
    }

    /// Starts over with the same request: the message was broken off.
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

    /// Completes a SEND.
    pub(crate) fn complete(self, init: &QpInit, extras: Extras, host: &mut impl Host) {
        let len = self.received;
        complete(self.wr.wr_id, WcOpcode::Recv, len, init, extras, host);
    }

    /// Completes in error.
    pub(crate) fn fail(self, init: &QpInit, src_qp: u32, failure: Failure, host: &mut impl Host) {
        fail(&self.wr, init, src_qp, failure, host);
    }
}

/// Completes a receive request that a WRITE with immediate of `len` bytes used up.
pub(crate) fn complete_write_imm(wr: &RecvWr, len: u32, init: &QpInit, extras: Extras, host: &mut impl Host) {
    complete(wr.wr_id, WcOpcode::RecvRdmaWithImm, len, init, extras, host);
}

fn complete(wr_id: u64, opcode: WcOpcode, byte_len: u32, init: &QpInit, extras: Extras, host: &mut impl Host) {
    let mut flags = WcFlags::empty();
    flags.set(WcFlags::WITH_IMM, extras.imm.is_some());
    flags.set(WcFlags::WITH_INV, extras.invalidated.is_some());
    flags.set(WcFlags::GRH, extras.grh);
    host.complete_recv(Completion {
        wr_id,
        status: WcStatus::Success,
        opcode,
        byte_len,
        imm: extras.imm.or(extras.invalidated).unwrap_or(extras.flow_tag),
        qp_num: init.qpn,
        src_qp: extras.src_qp,
        flags,
        vendor_err: vendor::NONE,
        solicited: extras.solicited,
        sl: extras.sl,
        timestamp: 0,
    });
}

/// Completes a receive request in error.
pub(crate) fn fail(wr: &RecvWr, init: &QpInit, src_qp: u32, failure: Failure, host: &mut impl Host) {
    host.complete_recv(Completion {
        wr_id: wr.wr_id,
        status: failure.status,
        opcode: WcOpcode::Recv,
        byte_len: 0,
        imm: 0,
        qp_num: init.qpn,
        src_qp,
        flags: WcFlags::empty(),
        vendor_err: failure.vendor,
        // Who waits for solicited completions must see errors too (IBA 11.4.2.2).
        solicited: true,
        sl: 0,
        timestamp: 0,
    });
}

/// Completes a receive request as flushed.
pub(crate) fn flush(wr: &RecvWr, init: &QpInit, src_qp: u32, host: &mut impl Host) {
    fail(wr, init, src_qp, Failure::new(WcStatus::WrFlushErr, vendor::FLUSHED), host);
}
