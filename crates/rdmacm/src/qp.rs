//! Queue pairs of ids: making, and bringing to the states that a connection needs.

use std::ffi::{c_int, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::ptr;

use ferroce_abi::cm::{ferroce_cm_path, ferroce_cm_qp};
use ferroce_abi::{
    ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_global_route, ibv_pd, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_qp_init_attr_ex, ibv_srq, ibv_srq_init_attr, ibv_srq_init_attr_ex, verbs_context,
};

use crate::abi::{QPT_UD, UDP_QKEY, rdma_cm_id};
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
            let rc = mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER;
            Ok((attr, if p.uc != 0 { all } else { all | rc }))
        }
        RTS => {
            let p = parameters(id)?;
            attr.sq_psn = p.sq_psn;
            attr.timeout = p.path.ack_timeout;
            attr.retry_cnt = p.retry_cnt;
            attr.rnr_retry = p.rnr_retry;
            attr.max_rd_atomic = p.max_rd_atomic;
            let all = mask::STATE | mask::SQ_PSN;
            let rc = mask::TIMEOUT | mask::RETRY_CNT | mask::RNR_RETRY | mask::MAX_QP_RD_ATOMIC;
            Ok((attr, if p.uc != 0 { all } else { all | rc }))
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

/// Removes the completion queues that [`own_cq`] made.
fn destroy_cqs(id: &IdObject) {
    let c = id.as_ptr();
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
    create: impl FnOnce(*mut ibv_pd, &mut ibv_qp_init_attr) -> *mut ibv_qp,
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
    let made = fill_cqs(id, init, context).and_then(|()| {
        let qp = create(pd, init);
        if qp.is_null() { Err(Refusal::last()) } else { Ok(qp) }
    });
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

fn fill_cqs(id: &IdObject, init: &mut ibv_qp_init_attr, context: *mut ibv_context) -> Call<()> {
    let c = id.as_ptr();
    if init.send_cq.is_null() {
        let (channel, cq) = own_cq(id, context, init.cap.max_send_wr)?;
        // SAFETY: the fields are the library's during calls about the id.
        unsafe { ((*c).send_cq_channel, (*c).send_cq) = (channel, cq) };
        init.send_cq = cq;
    }
    if init.recv_cq.is_null() {
        let (channel, cq) = own_cq(id, context, init.cap.max_recv_wr)?;
        // SAFETY: as above.
        unsafe { ((*c).recv_cq_channel, (*c).recv_cq) = (channel, cq) };
        init.recv_cq = cq;
    }
    Ok(())
}

/// `rdma_create_qp`.
pub(crate) fn create(id: &IdObject, pd: *mut ibv_pd, init: &mut ibv_qp_init_attr) -> Call<()> {
    // SAFETY: a PD that was checked, and attributes with live objects.
    make(id, init, pd, |pd, init| unsafe { verbs::ibv_create_qp(pd, init) })
}

/// A function of the table below a context, if the library that made the context has it.
fn slot<T: Copy>(context: *mut ibv_context, offset: usize) -> Option<T> {
    let whole = context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast::<verbs_context>();
    // SAFETY: contexts of our libibverbs lie in a `verbs_context`; the offset is of a nullable function pointer in it.
    unsafe { whole.wrapping_byte_add(offset).cast::<Option<T>>().read() }
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
        const MASK_PD: u32 = 1;
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        // SAFETY: as above.
        let mut extended = *unsafe { given(attr, "qp_init_attr") }?;
        let pd = if extended.comp_mask & MASK_PD != 0 { extended.pd } else { ptr::null_mut() };
        // SAFETY: the extended attributes start with the plain ones.
        let mut init = unsafe { *ptr::from_ref(&extended).cast::<ibv_qp_init_attr>() };
        make(object, &mut init, pd, |pd, init| {
            // SAFETY: a live PD.
            let context = unsafe { (*pd).context };
            (extended.send_cq, extended.recv_cq, extended.srq) = (init.send_cq, init.recv_cq, init.srq);
            (extended.pd, extended.comp_mask) = (pd, extended.comp_mask | MASK_PD);
            match slot::<CreateQpEx>(context, offset_of!(verbs_context, create_qp_ex)) {
                // SAFETY: a function of that type; attributes with live objects.
                Some(create) => unsafe { create(context, &raw mut extended) },
                None => ptr::null_mut(),
            }
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
        unsafe { given(attr, "the SRQ's attributes") }?;
        let pd = srq_pd(object, pd)?;
        // SAFETY: a live PD, and attributes of the program.
        set_srq(object, pd, unsafe { verbs::ibv_create_srq(pd, attr) })
    }

    /// `rdma_create_srq_ex(3)`.
    fn rdma_create_srq_ex(id: *mut rdma_cm_id, attr: *mut ibv_srq_init_attr_ex) -> c_int {
        const MASK_PD: u32 = 2;
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        // SAFETY: as above.
        let mut extended = *unsafe { given(attr, "the SRQ's attributes") }?;
        let given_pd = if extended.comp_mask & MASK_PD != 0 { extended.pd } else { ptr::null_mut() };
        let pd = srq_pd(object, given_pd)?;
        (extended.pd, extended.comp_mask) = (pd, extended.comp_mask | MASK_PD);
        // SAFETY: a live PD.
        let context = unsafe { (*pd).context };
        let create = slot::<CreateSrqEx>(context, offset_of!(verbs_context, create_srq_ex))
            .ok_or_else(|| Refusal::new(libc::EOPNOTSUPP, "extended SRQs are not available"))?;
        // SAFETY: a function of that type; attributes with live objects.
        let srq = unsafe { create(context, &raw mut extended) };
        set_srq(object, pd, srq)
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
