//! Posting: `ibv_post_send`, `ibv_post_recv`, `ibv_post_srq_recv`.

use std::ffi::c_int;
use std::ptr;

use ferroce::{RecvWr, SendData, SendFlags, SendOp, SendWr, Sge, UdDest, WindowKind};

use crate::abi::consts::wr as op;
use crate::abi::{ibv_ah, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_srq};
use crate::ah::AhObject;
use crate::entry::{Refusal, Status, Verb, slot};
use crate::mw;
use crate::qp::QpObject;
use crate::srq::SrqObject;

/// The scatter/gather list of a request.
///
/// # Safety
///
/// `list` has `count` elements, or `count` is not positive.
pub(crate) unsafe fn elements<'a>(list: *const ibv_sge, count: c_int) -> Verb<&'a [ibv_sge]> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        Ok(_) if list.is_null() => Err(Refusal::invalid("sg_list is NULL although num_sge is not 0")),
        // SAFETY: by the contract above.
        Ok(count) => Ok(unsafe { std::slice::from_raw_parts(list, count) }),
        Err(_) => Err(Refusal::invalid(format!("num_sge is {count}"))),
    }
}

/// An element as Ferroce has it.
pub(crate) fn sge(c: &ibv_sge) -> Sge {
    Sge { addr: c.addr, length: c.length, lkey: c.lkey }
}

/// Copies inline data, of at most `max` bytes.
///
/// # Safety
///
/// The pieces may be read.
pub(crate) unsafe fn copy_inline(
    pieces: impl Iterator<Item = (*const u8, usize)> + Clone,
    max: u32,
) -> Verb<Box<[u8]>> {
    let mut length = 0usize;
    for (_, piece) in pieces.clone() {
        length = length.saturating_add(piece);
    }
    if length > max as usize {
        return Err(Refusal::invalid(format!(
            "{length} bytes of inline data: the queue pair was made with max_inline_data {max}"
        )));
    }
    let mut bytes = Vec::with_capacity(length);
    for (address, piece) in pieces.filter(|(_, piece)| *piece > 0) {
        // SAFETY: by the contract above.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(address, piece) });
    }
    Ok(bytes.into_boxed_slice())
}

/// The destination of a datagram.
///
/// # Safety
///
/// `ah` is NULL or live.
pub(crate) unsafe fn destination(ah: *const ibv_ah, qpn: u32, qkey: u32) -> Verb<UdDest> {
    // SAFETY: by the contract above.
    let ah = unsafe { AhObject::of(ah) }?;
    Ok(UdDest { path: ah.ah.path().clone(), qpn: qpn & 0xff_ffff, qkey })
}

/// The operation of a request with its operands.
fn operation(wr: &ibv_send_wr) -> Verb<SendOp> {
    // SAFETY: the members of the union share plain numbers, of which every bit pattern is one; the opcode tells which hold.
    let (rdma, atomic) = unsafe { (wr.wr.rdma, wr.wr.atomic) };
    let imm = u32::from_be(wr.imm_data);
    Ok(match wr.opcode {
        op::SEND => SendOp::Send,
        op::SEND_WITH_IMM => SendOp::SendImm { imm },
        op::SEND_WITH_INV => SendOp::SendInv { rkey: wr.imm_data },
        op::RDMA_WRITE => SendOp::Write { raddr: rdma.remote_addr, rkey: rdma.rkey },
        op::RDMA_WRITE_WITH_IMM => SendOp::WriteImm { raddr: rdma.remote_addr, rkey: rdma.rkey, imm },
        op::RDMA_READ => SendOp::Read { raddr: rdma.remote_addr, rkey: rdma.rkey },
        op::ATOMIC_CMP_AND_SWP => SendOp::CompareSwap {
            raddr: atomic.remote_addr,
            rkey: atomic.rkey,
            compare: atomic.compare_add,
            swap: atomic.swap,
        },
        op::ATOMIC_FETCH_AND_ADD => {
            SendOp::FetchAdd { raddr: atomic.remote_addr, rkey: atomic.rkey, add: atomic.compare_add }
        }
        op::LOCAL_INV => SendOp::LocalInv { rkey: wr.imm_data },
        op::ATOMIC_WRITE => SendOp::AtomicWrite { raddr: rdma.remote_addr, rkey: rdma.rkey },
        // The structure has no operands for a FLUSH: it is for `ibv_wr_flush`.
        op::TSO | op::DRIVER1 | op::FLUSH => {
            return Err(Refusal::unsupported(format!("opcode {} is not implemented", wr.opcode)));
        }
        other => return Err(Refusal::invalid(format!("opcode {other} is unknown"))),
    })
}

/// A send request as Ferroce has it; inline data is copied here.
///
/// # Safety
///
/// `wr` and what it points to are live.
unsafe fn send_wr(object: &QpObject, wr: &ibv_send_wr) -> Verb<SendWr> {
    if wr.opcode == op::BIND_MW {
        let bind = &wr.bind_mw;
        // SAFETY: by the contract above.
        let op = unsafe { mw::binding(object, bind.mw, WindowKind::Two, bind.rkey, &bind.bind_info) }?;
        let flags = SendFlags::from_bits_truncate(wr.send_flags) - SendFlags::INLINE;
        return Ok(SendWr {
            wr_id: wr.wr_id,
            op,
            flags,
            data: SendData::Sges(Default::default()),
            ud: None,
            xrc_srqn: None,
        });
    }
    let op = operation(wr)?;
    // SAFETY: by the contract above.
    let elements = unsafe { elements(wr.sg_list, wr.num_sge) }?;
    let caps = object.qp.caps();
    if elements.len() > caps.max_send_sge as usize {
        return Err(Refusal::invalid(format!(
            "num_sge is {}: the queue pair was made with max_send_sge {}",
            elements.len(),
            caps.max_send_sge
        )));
    }
    let flags = SendFlags::from_bits_truncate(wr.send_flags);
    let data = if flags.contains(SendFlags::INLINE) {
        if matches!(op, SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }) {
            return Err(Refusal::invalid("IBV_SEND_INLINE with an operation that writes to its elements"));
        }
        let pieces = elements.iter().map(|sge| (sge.addr as *const u8, sge.length as usize));
        // SAFETY: inline elements are addresses in the program, which asks to have them read.
        SendData::Inline(unsafe { copy_inline(pieces, caps.max_inline_data) }?)
    } else {
        SendData::Sges(elements.iter().map(sge).collect())
    };
    let ud = if object.qp.qp_type() == ferroce::QpType::Ud {
        // SAFETY: plain numbers and a pointer; for UD this member of the union holds.
        let ud = unsafe { wr.wr.ud };
        // SAFETY: by the contract above.
        Some(unsafe { destination(ud.ah, ud.remote_qpn, ud.remote_qkey) }?)
    } else {
        None
    };
    let xrc_srqn = (object.qp.qp_type() == ferroce::QpType::XrcSend).then_some(wr.remote_srqn & 0xff_ffff);
    Ok(SendWr { wr_id: wr.wr_id, op, flags, data, ud, xrc_srqn })
}

/// A receive request as Ferroce has it.
///
/// # Safety
///
/// `wr` and what it points to are live.
unsafe fn recv_wr(wr: &ibv_recv_wr) -> Verb<RecvWr> {
    // SAFETY: by the contract above.
    let elements = unsafe { elements(wr.sg_list, wr.num_sge) }?;
    Ok(RecvWr { wr_id: wr.wr_id, sges: elements.iter().map(sge).collect() })
}

/// What posting refuses with. A full queue is how programs find out that they have to poll first.
pub(crate) fn posting(error: ferroce::Error) -> Refusal {
    let refusal = Refusal::from(error);
    if refusal.errno() == libc::ENOMEM { refusal.into_routine() } else { refusal }
}

/// Tells which request of a list was the first that was not posted.
///
/// # Safety
///
/// `bad` is NULL or the caller's.
pub(crate) unsafe fn tell_bad<T>(bad: *mut *mut T, wr: *mut T) {
    if !bad.is_null() {
        // SAFETY: by the contract above.
        unsafe { *bad = wr };
    }
}

/// Posts a list of receive requests through `post`.
///
/// # Safety
///
/// The list is NULL-terminated and live; `bad` is NULL or the caller's.
pub(crate) unsafe fn post_list(
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    mut post: impl FnMut(RecvWr) -> Result<(), ferroce::Error>,
) -> Verb<()> {
    while !wr.is_null() {
        // SAFETY: by the contract above.
        let posted = unsafe { recv_wr(&*wr) }.and_then(|request| post(request).map_err(posting));
        if let Err(refusal) = posted {
            // SAFETY: by the contract above.
            unsafe { tell_bad(bad, wr) };
            return Err(refusal);
        }
        // SAFETY: by the contract above.
        wr = unsafe { (*wr).next };
    }
    Ok(())
}

slot! {
    /// `ibv_post_send(3)`: posts a list up to the first request that is refused.
    fn post_send as "ibv_post_send" (
        qp: *mut ibv_qp,
        wr: *mut ibv_send_wr,
        bad_wr: *mut *mut ibv_send_wr,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { QpObject::of(qp) }?;
        let mut next = wr;
        let mut result = Ok(());
        while !next.is_null() {
            // SAFETY: by the contract of the verb.
            let posted = unsafe { send_wr(object, &*next) }
                .and_then(|request| object.qp.post_send(request).map_err(posting));
            if posted.is_err() {
                // SAFETY: by the contract of the verb.
                unsafe { tell_bad(bad_wr, next) };
                result = posted;
                break;
            }
            // SAFETY: by the contract of the verb.
            next = unsafe { (*next).next };
        }
        if !ptr::eq(next, wr) {
            object.qp.ring();
        }
        result
    }

    /// `ibv_post_recv(3)`.
    fn post_recv as "ibv_post_recv" (
        qp: *mut ibv_qp,
        wr: *mut ibv_recv_wr,
        bad_wr: *mut *mut ibv_recv_wr,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { QpObject::of(qp) }?;
        // SAFETY: by the contract of the verb.
        unsafe { post_list(wr, bad_wr, |request| object.qp.post_recv(request)) }
    }

    /// `ibv_post_srq_recv(3)`.
    fn post_srq_recv as "ibv_post_srq_recv" (
        srq: *mut ibv_srq,
        wr: *mut ibv_recv_wr,
        bad_wr: *mut *mut ibv_recv_wr,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { SrqObject::of(srq) }?;
        // SAFETY: by the contract of the verb.
        unsafe { post_list(wr, bad_wr, |request| object.srq.post(request)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{ibv_send_wr_bind, ibv_send_wr_operands, ibv_wr_atomic};

    fn request(opcode: u32) -> ibv_send_wr {
        let atomic = ibv_wr_atomic { remote_addr: 0x1000, compare_add: 5, swap: 6, rkey: 7 };
        ibv_send_wr {
            wr_id: 1,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
            opcode,
            send_flags: 0,
            imm_data: 0x0102_0304u32.to_be(),
            wr: ibv_send_wr_operands { atomic },
            remote_srqn: 0,
            // SAFETY: pointers and numbers, of which zero is one.
            bind_mw: unsafe { std::mem::zeroed::<ibv_send_wr_bind>() },
        }
    }

    #[test]
    fn operands_follow_the_opcode() {
        assert_eq!(operation(&request(op::SEND_WITH_IMM)).unwrap(), SendOp::SendImm { imm: 0x0102_0304 });
        assert_eq!(
            operation(&request(op::ATOMIC_CMP_AND_SWP)).unwrap(),
            SendOp::CompareSwap { raddr: 0x1000, rkey: 7, compare: 5, swap: 6 }
        );
        assert_eq!(
            operation(&request(op::ATOMIC_FETCH_AND_ADD)).unwrap(),
            SendOp::FetchAdd { raddr: 0x1000, rkey: 7, add: 5 }
        );
        assert_eq!(operation(&request(op::TSO)).unwrap_err().errno(), libc::EOPNOTSUPP);
        assert_eq!(operation(&request(77)).unwrap_err().errno(), libc::EINVAL);
    }

    #[test]
    fn invalidation_takes_the_key_as_it_is() {
        let rkey = 0x0102_0304u32.to_be();
        assert_eq!(operation(&request(op::SEND_WITH_INV)).unwrap(), SendOp::SendInv { rkey });
        assert_eq!(operation(&request(op::LOCAL_INV)).unwrap(), SendOp::LocalInv { rkey });
    }

    #[test]
    fn inline_data_is_gathered_and_bounded() {
        let (one, two) = (*b"ab", *b"cde");
        let pieces = [(one.as_ptr(), 2), (ptr::null(), 0), (two.as_ptr(), 3)];
        // SAFETY: the pieces are arrays above, or empty.
        unsafe {
            assert_eq!(&*copy_inline(pieces.into_iter(), 5).unwrap(), b"abcde");
            assert_eq!(copy_inline(pieces.into_iter(), 4).unwrap_err().errno(), libc::EINVAL);
        }
    }

    #[test]
    fn bad_lists_are_refused() {
        // SAFETY: no element is read.
        unsafe {
            assert!(elements(ptr::null(), 0).unwrap().is_empty());
            assert_eq!(elements(ptr::null(), 1).unwrap_err().errno(), libc::EINVAL);
            assert_eq!(elements(ptr::null(), -1).unwrap_err().errno(), libc::EINVAL);
        }
    }
}
