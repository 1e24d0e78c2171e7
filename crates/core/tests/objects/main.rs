//! The objects of verbs by their public interface.

mod cq;
mod events;
mod keys;
mod recv;
mod tags;

use ferroce_transport::{Completion, WcFlags, WcOpcode, WcStatus};

/// A successful completion of queue pair `qp_num`.
fn completion(wr_id: u64, qp_num: u32) -> Completion {
    Completion {
        wr_id,
        status: WcStatus::Success,
        opcode: WcOpcode::Recv,
        byte_len: 8,
        imm: 0,
        qp_num,
        src_qp: 2,
        flags: WcFlags::empty(),
        vendor_err: 0,
        solicited: false,
        ..Completion::UNUSED
    }
}
