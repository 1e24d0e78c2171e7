//! Tag matching: the list of a shared receive queue.

use ferroce::{RecvWr, TagChange, TagOp, TaggedRecv};

use crate::abi::consts::tm;
use crate::abi::{ibv_ops_wr, ibv_srq};
use crate::entry::{Refusal, Status, Verb, slot};
use crate::post::{elements, posting, sge, tell_bad};
use crate::srq::SrqObject;

/// An operation as Ferroce has it.
///
/// # Safety
///
/// `wr` and what it points to are live.
unsafe fn operation(wr: &ibv_ops_wr) -> Verb<TagOp> {
    if wr.flags & !(tm::SIGNALED | tm::TELLS_COUNT) != 0 {
        return Err(Refusal::invalid(format!("flags {:#x} has unknown bits", wr.flags)));
    }
    let change = match wr.opcode {
        tm::ADD => {
            // SAFETY: by the contract above.
            let elements = unsafe { elements(wr.tm.sg_list, wr.tm.num_sge) }?;
            let recv = RecvWr { wr_id: wr.tm.recv_wr_id, sges: elements.iter().map(sge).collect() };
            TagChange::Add(TaggedRecv { recv, tag: wr.tm.tag, mask: wr.tm.mask })
        }
        tm::DEL => TagChange::Delete(wr.tm.handle),
        tm::SYNC => TagChange::Sync,
        other => return Err(Refusal::invalid(format!("opcode {other}: IBV_WR_TAG_ADD, _DEL and _SYNC are known"))),
    };
    let tells = wr.flags & tm::TELLS_COUNT != 0 || change == TagChange::Sync;
    Ok(TagOp {
        wr_id: wr.wr_id,
        signaled: wr.flags & tm::SIGNALED != 0,
        handled: tells.then_some(wr.tm.unexpected_cnt),
        change,
    })
}

slot! {
    /// `ibv_post_srq_ops(3)`: a list of operations, up to the first that is refused.
    fn post_srq_ops as "ibv_post_srq_ops" (
        srq: *mut ibv_srq,
        op: *mut ibv_ops_wr,
        bad_op: *mut *mut ibv_ops_wr,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { SrqObject::of(srq) }?;
        let mut next = op;
        while !next.is_null() {
            // SAFETY: by the contract of the verb.
            let posted = unsafe { operation(&*next) }.and_then(|op| object.srq.post_tag_op(op).map_err(posting));
            match posted {
                // SAFETY: by the contract of the verb; the handle is the operation's result.
                Ok(handle) => handle.into_iter().for_each(|handle| unsafe { (*next).tm.handle = handle }),
                Err(refusal) => {
                    // SAFETY: by the contract of the verb.
                    unsafe { tell_bad(bad_op, next) };
                    return Err(refusal);
                }
            }
            // SAFETY: by the contract of the verb.
            next = unsafe { (*next).next };
        }
        Ok(())
    }
}
