//! Queue pairs of ids: making, and bringing to the states that a connection needs.

use std::ffi::{c_int, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::ptr;

use ferroce_abi::cm::{ferroce_cm_path, ferroce_cm_qp};
use ferroce_abi::consts::{qp_init, srq_init};
use ferroce_abi::{
    ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_global_route, ibv_pd, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_qp_init_attr_ex, ibv_srq, ibv_srq_init_attr, ibv_srq_init_attr_ex, verbs_context,
};

use crate::abi::{QPT_RC, QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND, UDP_QKEY, rdma_cm_id};
use crate::device;
use crate::entry::{Call, Refusal, check, given, put, rdma};
use crate::id::IdObject;
use crate::verbs;

const INIT: u32 = 1;
const RTR: u32 = 2;
const RTS: u32 = 3;
const ERR: u32 = 6;

/// `enum ibv_qp_attr_mask`.
mod mask {
    use std::ffi::c_int;
    pub(super) const STATE: c_int = 1 << 0;
    pub(super) const ACCESS_FLAGS: c_int = 1 << 3;
    pub(super) const PKEY_INDEX: c_int = 1 << 4;
    pub(super) const PORT: c_int = 1 << 5;
    pub(super) const QKEY: c_int = 1 << 6;
    pub(super) const AV: c_int = 1 << 7;
    pub(super) const PATH_MTU: c_int = 1 << 8;
    pub(super) const TIMEOUT: c_int = 1 << 9;
    pub(super) const RETRY_CNT: c_int = 1 << 10;
    pub(super) const RNR_RETRY: c_int = 1 << 11;
    pub(super) const RQ_PSN: c_int = 1 << 12;
    pub(super) const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub(super) const MIN_RNR_TIMER: c_int = 1 << 15;
    pub(super) const SQ_PSN: c_int = 1 << 16;
    pub(super) const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(super) const DEST_QPN: c_int = 1 << 20;
}

const REMOTE_WRITE: u32 = 1 << 1;
const REMOTE_READ: u32 = 1 << 2;
const REMOTE_ATOMIC: u32 = 1 << 3;

/// Code of 655.36 ms: how long a peer waits when no receive is posted. It is that of Linux's connection manager, by which programs choose
/// their few retries: after a shorter one, these are used up before a busy machine lets the receiver post.
const MIN_RNR_TIMER: u8 = 0;

/// The address of a path's far end.
pub(crate) fn address(path: &ferroce_cm_path) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: path.remote,
            flow_label: path.flow_label,
            sgid_index: path.sgid_index as u8,
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
        },
        is_global: 1,
        port_num: 1,
        ..ibv_ah_attr::default()
    }
}

fn attr(state: u32) -> ibv_qp_attr {
    // SAFETY: integers, for which zero is a value.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = state;
    attr
}

fn parameters(id: &IdObject) -> Call<ferroce_cm_qp> {
    let mut parameters = MaybeUninit::<ferroce_cm_qp>::uninit();
    id.ask(|number| {
        // SAFETY: room for them.
        check(unsafe { verbs::ferroce_cm_qp_parameters(number, parameters.as_mut_ptr()) })
    })?;
    // SAFETY: they are written when the call succeeds.
    Ok(unsafe { parameters.assume_init() })
}

/// Attributes for a state, and which of them mean something. `connected` tells whether the peer is known already.
fn attributes(id: &IdObject, state: u32) -> Call<(ibv_qp_attr, c_int)> {
    let mut attr = attr(state);
    attr.port_num = 1;
    let init = mask::STATE | mask::PKEY_INDEX | mask::PORT;
    if id.is_datagram() {
        return match state {
            INIT => {
                attr.qkey = UDP_QKEY;
                Ok((attr, init | mask::QKEY))
            }
            RTR => Ok((attr, mask::STATE)),
            RTS => Ok((attr, mask::STATE | mask::SQ_PSN)),
            other => Err(unknown(other)),
        };
    }
    match state {
        INIT => {
            // Before there is a peer nobody may reach the program's memory.
            if id.inner().has_peer
                && let Ok(parameters) = parameters(id)
            {
                attr.qp_access_flags = REMOTE_WRITE;
                if parameters.max_dest_rd_atomic > 0 {
                    attr.qp_access_flags |= REMOTE_READ | REMOTE_ATOMIC;
                }
            }
            Ok((attr, init | mask::ACCESS_FLAGS))
        }
        RTR => {
            let p = parameters(id)?;
            attr.ah_attr = address(&p.path);
            attr.path_mtu = p.path.mtu.into();
            attr.dest_qp_num = p.dest_qpn;
            attr.rq_psn = p.rq_psn;
            attr.max_dest_rd_atomic = p.max_dest_rd_atomic;
            attr.min_rnr_timer = MIN_RNR_TIMER;
            let all = mask::STATE | mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
            let responder = match p.qp_type.into() {
                QPT_RC | QPT_XRC_RECV => mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER,
                _ => 0,
            };
            Ok((attr, all | responder))
        }
        RTS => {
            let p = parameters(id)?;
            attr.sq_psn = p.sq_psn;
            attr.timeout = p.path.ack_timeout;
            attr.retry_cnt = p.retry_cnt;
            attr.rnr_retry = p.rnr_retry;
            attr.max_rd_atomic = p.max_rd_atomic;
            let all = mask::STATE | mask::SQ_PSN;
            let requester = match p.qp_type.into() {
                QPT_RC | QPT_XRC_SEND => mask::TIMEOUT | mask::RETRY_CNT | mask::RNR_RETRY | mask::MAX_QP_RD_ATOMIC,
                QPT_XRC_RECV => mask::TIMEOUT,
                _ => 0,
            };
            Ok((attr, all | requester))
        }
        other => Err(unknown(other)),
    }
}

fn unknown(state: u32) -> Refusal {
    Refusal::invalid(format!("qp_state {state}: attributes exist for INIT, RTR and RTS"))
}

fn modify(qp: *mut ibv_qp, (mut attr, mask): (ibv_qp_attr, c_int)) -> Call<()> {
    // SAFETY: a live queue pair, and attributes of ours.
    check(unsafe { verbs::ibv_modify_qp(qp, &raw mut attr, mask) })
}

pub(crate) fn qp_of(id: &IdObject) -> *mut ibv_qp {
    // SAFETY: the field is set and cleared by `rdma_create_qp` and `rdma_destroy_qp` only.
    unsafe { (*id.as_ptr()).qp }
}

/// Connects a queue pair. `limit` changes what the program wants its resources to be.
pub(crate) fn connect(id: &IdObject, limit: impl Fn(&mut ibv_qp_attr)) -> Call<()> {
    let qp = qp_of(id);
    // Once more, with the rights that the peer gets.
    for state in [INIT, RTR, RTS] {
        let (mut attr, mask) = attributes(id, state)?;
        limit(&mut attr);
        modify(qp, (attr, mask))?;
    }
    Ok(())
}

/// To the error state, if there is a queue pair: its work requests are flushed.
pub(crate) fn to_error(id: &IdObject) {
    let qp = qp_of(id);
    if !qp.is_null() {
        // What fails here is in that state already.
        let _ = modify(qp, (attr(ERR), mask::STATE));
    }
}

/// A completion queue of its own, with a channel, for a program that gave none.
fn own_cq(id: &IdObject, context: *mut ibv_context, size: u32) -> Call<(*mut ibv_comp_channel, *mut ibv_cq)> {
    // SAFETY: an open context.
    let channel = unsafe { verbs::ibv_create_comp_channel(context) };
    if channel.is_null() {
        return Err(Refusal::last());
    }
    let cookie: *mut c_void = id.as_ptr().cast();
    // SAFETY: as above, and the channel was just made.
    let cq = unsafe { verbs::ibv_create_cq(context, size.max(1) as c_int, cookie, channel, 0) };
    if cq.is_null() {
        let refusal = Refusal::last();
        // SAFETY: nobody uses the channel.
        unsafe { verbs::ibv_destroy_comp_channel(channel) };
        return Err(refusal);
    }
    Ok((channel, cq))
}

/// Whether the id is the target of an XRC connection.
fn is_target(id: &IdObject) -> bool {
    // SAFETY: a field that the program does not change.
    unsafe { (*id.as_ptr()).qp_type == QPT_XRC_RECV }
}

/// Removes the completion queues that [`own_cq`] made. An XRC target's belongs to its shared receive queue, and goes with it.
fn destroy_cqs(id: &IdObject) {
    let c = id.as_ptr();
    // SAFETY: a field of the library's.
    if is_target(id) && unsafe { !(*c).srq.is_null() } {
        return;
    }
    // SAFETY: the fields are the library's; the queue pair that used the queues is gone.
    unsafe {
        for (channel, cq) in [
            (&raw mut (*c).recv_cq_channel, &raw mut (*c).recv_cq),
            (&raw mut (*c).send_cq_channel, &raw mut (*c).send_cq),
        ] {
            if !(*cq).is_null() && !(*channel).is_null() {
                verbs::ibv_destroy_cq(*cq);
                verbs::ibv_destroy_comp_channel(*channel);
            }
            *cq = ptr::null_mut();
            *channel = ptr::null_mut();
        }
    }
}

/// Makes a queue pair as `create` does it, after filling in what the program left to the library.
fn make(
    id: &IdObject,
    init: &mut ibv_qp_init_attr,
    pd: *mut ibv_pd,
    create: impl FnOnce(*mut ibv_pd, &mut ibv_qp_init_attr) -> Call<*mut ibv_qp>,
) -> Call<()> {
    let c = id.as_ptr();
    // SAFETY: fields that are the library's during calls about the id.
    let (context, own_pd, qp_type) = unsafe { ((*c).verbs, (*c).pd, (*c).qp_type) };
    if context.is_null() {
        return Err(Refusal::invalid("the id has no device yet; call rdma_resolve_addr or rdma_bind_addr before"));
    }
    if !qp_of(id).is_null() {
        return Err(Refusal::invalid("the id has a queue pair already"));
    }
    if init.qp_type as c_int != qp_type {
        return Err(Refusal::invalid(format!("qp_type is {}, but the id's is {qp_type}", init.qp_type)));
    }
    let pd = if pd.is_null() { own_pd } else { pd };
    // SAFETY: a live PD.
    if unsafe { (*pd).context } != context {
        return Err(Refusal::invalid("the protection domain is of another context than the id (id->verbs)"));
    }
    // SAFETY: the field is the library's.
    let srq = unsafe { (*c).srq };
    if init.srq.is_null() {
        init.srq = srq;
    }
    let made = fill_cqs(id, init, context).and_then(|()| create(pd, init));
    let qp = made.inspect_err(|_| destroy_cqs(id))?;
    let states: &[u32] = if qp_type == QPT_UD { &[INIT, RTR, RTS] } else { &[INIT] };
    let ready = states.iter().try_for_each(|state| modify(qp, attributes(id, *state)?));
    if let Err(refusal) = ready {
        // SAFETY: nobody else knows the queue pair.
        unsafe { verbs::ibv_destroy_qp(qp) };
        destroy_cqs(id);
        return Err(refusal);
    }
    // SAFETY: fields that are the library's during calls about the id.
    unsafe {
        (*c).pd = pd;
        (*c).qp = qp;
    }
    Ok(())
}

/// Completion queues for what the program left to the library. An XRC target completes nothing itself: its queue is for the SRQ, if
/// the program wants receives at all; an initiator receives nothing.
fn fill_cqs(id: &IdObject, init: &mut ibv_qp_init_attr, context: *mut ibv_context) -> Call<()> {
    let c = id.as_ptr();
    if is_target(id) {
        return if init.cap.max_recv_wr == 0 { Ok(()) } else { target_cq(id, context, init.cap.max_recv_wr).map(drop) };
    }
    if init.send_cq.is_null() {
        let (channel, cq) = own_cq(id, context, init.cap.max_send_wr)?;
        // SAFETY: the fields are the library's during calls about the id.
        unsafe { ((*c).send_cq_channel, (*c).send_cq) = (channel, cq) };
        init.send_cq = cq;
    }
    if init.recv_cq.is_null() && init.qp_type as c_int != QPT_XRC_SEND {
        let (channel, cq) = own_cq(id, context, init.cap.max_recv_wr)?;
        // SAFETY: as above.
        unsafe { ((*c).recv_cq_channel, (*c).recv_cq) = (channel, cq) };
        init.recv_cq = cq;
    }
    Ok(())
}

/// The completion queue of the SRQ of an XRC target.
fn target_cq(id: &IdObject, context: *mut ibv_context, size: u32) -> Call<*mut ibv_cq> {
    let c = id.as_ptr();
    // SAFETY: the fields are the library's during calls about the id.
    unsafe {
        if (*c).recv_cq.is_null() {
            ((*c).recv_cq_channel, (*c).recv_cq) = own_cq(id, context, size)?;
        }
        Ok((*c).recv_cq)
    }
}

/// `rdma_create_qp`.
pub(crate) fn create(id: &IdObject, pd: *mut ibv_pd, init: &mut ibv_qp_init_attr) -> Call<()> {
    if is_target(id) {
        // SAFETY: pointers and integers, for which zero is a value.
        let mut extended: ibv_qp_init_attr_ex = unsafe { std::mem::zeroed() };
        (extended.qp_context, extended.qp_type) = (init.qp_context, init.qp_type);
        return make(id, init, pd, |pd, _| create_ex(pd, &mut extended));
    }
    // SAFETY: a PD that was checked, and attributes with live objects.
    make(id, init, pd, |pd, init| not_null(unsafe { verbs::ibv_create_qp(pd, init) }))
}

/// `ibv_create_qp_ex`: an XRC target is in a domain instead of a PD, by default in that of the library.
fn create_ex(pd: *mut ibv_pd, extended: &mut ibv_qp_init_attr_ex) -> Call<*mut ibv_qp> {
    // SAFETY: a live PD.
    let context = unsafe { (*pd).context };
    if extended.qp_type as c_int == QPT_XRC_RECV {
        if extended.comp_mask & qp_init::XRCD == 0 || extended.xrcd.is_null() {
            extended.xrcd = device::xrcd_of(context)?;
        }
        extended.comp_mask = extended.comp_mask & !qp_init::PD | qp_init::XRCD;
    } else {
        (extended.pd, extended.comp_mask) = (pd, extended.comp_mask | qp_init::PD);
    }
    let create = verbs::slot::<CreateQpEx>(context, offset_of!(verbs_context, create_qp_ex))
        .ok_or_else(|| Refusal::new(libc::EOPNOTSUPP, "extended queue pairs are not available"))?;
    // SAFETY: a function of that type; attributes with live objects.
    not_null(unsafe { create(context, extended) })
}

fn not_null(qp: *mut ibv_qp) -> Call<*mut ibv_qp> {
    if qp.is_null() { Err(Refusal::last()) } else { Ok(qp) }
}

/// `rdma_create_srq_ex`.
fn create_srq(id: &IdObject, extended: &mut ibv_srq_init_attr_ex) -> Call<c_int> {
    let given_pd = if extended.comp_mask & srq_init::PD != 0 { extended.pd } else { ptr::null_mut() };
    let pd = srq_pd(id, given_pd)?;
    (extended.pd, extended.comp_mask) = (pd, extended.comp_mask | srq_init::PD);
    // SAFETY: a live PD.
    let context = unsafe { (*pd).context };
    if extended.comp_mask & srq_init::TYPE != 0 && extended.srq_type == srq_init::TYPE_XRC {
        if extended.comp_mask & srq_init::XRCD == 0 || extended.xrcd.is_null() {
            extended.xrcd = device::xrcd_of(context)?;
        }
        if extended.comp_mask & srq_init::CQ == 0 || extended.cq.is_null() {
            extended.cq = target_cq(id, context, extended.attr.max_wr)?;
        }
        extended.comp_mask |= srq_init::XRCD | srq_init::CQ;
    }
    let create = verbs::slot::<CreateSrqEx>(context, offset_of!(verbs_context, create_srq_ex))
        .ok_or_else(|| Refusal::new(libc::EOPNOTSUPP, "extended SRQs are not available"))?;
    // SAFETY: a function of that type; attributes with live objects.
    let srq = unsafe { create(context, extended) };
    set_srq(id, pd, srq)
}

type CreateQpEx = unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
type CreateSrqEx = unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq;

rdma! {
    /// `rdma_create_qp(3)`: RC and UC come to INIT, UD to RTS.
    fn rdma_create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        // SAFETY: as above.
        let mut init = *unsafe { given(attr, "qp_init_attr") }?;
        create(object, pd, &mut init)?;
        // SAFETY: as above.
        unsafe { put(attr, init) }?;
        Ok(0)
    }

    /// `rdma_create_qp_ex(3)`.
    fn rdma_create_qp_ex(id: *mut rdma_cm_id, attr: *mut ibv_qp_init_attr_ex) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        // SAFETY: as above.
        let mut extended = *unsafe { given(attr, "qp_init_attr") }?;
        let pd = if extended.comp_mask & qp_init::PD != 0 { extended.pd } else { ptr::null_mut() };
        // SAFETY: the extended attributes start with the plain ones.
        let mut init = unsafe { *ptr::from_ref(&extended).cast::<ibv_qp_init_attr>() };
        make(object, &mut init, pd, |pd, init| {
            (extended.send_cq, extended.recv_cq, extended.srq) = (init.send_cq, init.recv_cq, init.srq);
            create_ex(pd, &mut extended)
        })?;
        // SAFETY: by the contract of the function.
        unsafe { put(attr, extended) }?;
        Ok(0)
    }

    /// `rdma_destroy_qp(3)`: with the completion queues that the library made for it.
    fn rdma_destroy_qp(id: *mut rdma_cm_id) -> () {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        destroy(object);
        Ok(())
    }

    /// `rdma_create_srq(3)`.
    fn rdma_create_srq(id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        // SAFETY: as above.
        let init = *unsafe { given(attr, "the SRQ's attributes") }?;
        if is_target(object) {
            // SAFETY: pointers and integers, for which zero is a value.
            let mut extended: ibv_srq_init_attr_ex = unsafe { std::mem::zeroed() };
            (extended.srq_context, extended.attr, extended.pd) = (init.srq_context, init.attr, pd);
            (extended.comp_mask, extended.srq_type) = (srq_init::TYPE | srq_init::PD, srq_init::TYPE_XRC);
            create_srq(object, &mut extended)?;
            // SAFETY: as above.
            unsafe { put(attr, ibv_srq_init_attr { attr: extended.attr, ..init }) }?;
            return Ok(0);
        }
        let pd = srq_pd(object, pd)?;
        // SAFETY: a live PD, and attributes of the program.
        set_srq(object, pd, unsafe { verbs::ibv_create_srq(pd, attr) })
    }

    /// `rdma_create_srq_ex(3)`.
    fn rdma_create_srq_ex(id: *mut rdma_cm_id, attr: *mut ibv_srq_init_attr_ex) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        // SAFETY: as above.
        let mut extended = *unsafe { given(attr, "the SRQ's attributes") }?;
        create_srq(object, &mut extended)
    }

    /// `rdma_destroy_srq(3)`.
    fn rdma_destroy_srq(id: *mut rdma_cm_id) -> () {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        destroy_srq(object);
        Ok(())
    }

    /// `rdma_init_qp_attr(3)`: for programs that bring the queue pair to its states by themselves.
    fn rdma_init_qp_attr(id: *mut rdma_cm_id, qp_attr: *mut ibv_qp_attr, qp_attr_mask: *mut c_int) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        // SAFETY: as above.
        let state = unsafe { given(qp_attr, "qp_attr") }?.qp_state;
        let (attr, mask) = attributes(object, state)?;
        // SAFETY: as above.
        unsafe { put(qp_attr, attr) }?;
        // SAFETY: as above.
        unsafe { put(qp_attr_mask, mask) }?;
        Ok(0)
    }
}

/// `rdma_destroy_qp`.
pub(crate) fn destroy(id: &IdObject) {
    let c = id.as_ptr();
    let qp = qp_of(id);
    if !qp.is_null() {
        // SAFETY: a live queue pair that the program gives up.
        unsafe {
            verbs::ibv_destroy_qp(qp);
            (*c).qp = ptr::null_mut();
        }
    }
    destroy_cqs(id);
}

/// `rdma_destroy_srq`.
pub(crate) fn destroy_srq(id: &IdObject) {
    let c = id.as_ptr();
    // SAFETY: the field is the library's; the program gives the queue up.
    unsafe {
        if !(*c).srq.is_null() {
            verbs::ibv_destroy_srq((*c).srq);
            (*c).srq = ptr::null_mut();
        }
    }
    if is_target(id) && qp_of(id).is_null() {
        destroy_cqs(id);
    }
}

fn srq_pd(id: &IdObject, pd: *mut ibv_pd) -> Call<*mut ibv_pd> {
    let c = id.as_ptr();
    // SAFETY: fields that are the library's during calls about the id.
    let (context, own) = unsafe { ((*c).verbs, (*c).pd) };
    if context.is_null() {
        return Err(Refusal::invalid("the id has no device yet; call rdma_resolve_addr or rdma_bind_addr before"));
    }
    Ok(if !pd.is_null() {
        pd
    } else if !own.is_null() {
        own
    } else {
        device::pd_of(context)
    })
}

fn set_srq(id: &IdObject, pd: *mut ibv_pd, srq: *mut ibv_srq) -> Call<c_int> {
    if srq.is_null() {
        return Err(Refusal::last());
    }
    // SAFETY: fields that are the library's during calls about the id.
    unsafe {
        (*id.as_ptr()).srq = srq;
        (*id.as_ptr()).pd = pd;
    }
    Ok(0)
}
