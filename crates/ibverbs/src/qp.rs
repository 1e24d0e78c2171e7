//! Queue pairs: making, changing, asking, destroying.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use ferroce::flow::RssFields;
use ferroce::limits::RATE_LIMIT_BURST;
use ferroce::{Access, InitiatorCreate, Psn, QpAttr, QpAttrMask, QpCreate, QpModify, QpState, QpType, SpreadCreate};

use crate::abi::consts::{RX_HASH_TOEPLITZ, qp_init, send_ops, wr};
use crate::abi::{
    ibv_context, ibv_ece, ibv_gid, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_ex, ibv_qp_init_attr, ibv_qp_init_attr_ex,
    ibv_qp_rate_limit_attr, ibv_xrcd,
};
use crate::context::{ContextObject, ContextRef};
use crate::convert;
use crate::cq::CqObject;
use crate::entry::{Plain, Pointer, Refusal, Status, Verb, slot, verb};
use crate::events::acknowledged;
use crate::handle::{Shared, handle, handle_number};
use crate::pd::PdObject;
use crate::qp_ex::{self, Builder};
use crate::srq::SrqObject;
use crate::wq::TableObject;
use crate::xrc::XrcdObject;

/// `struct ibv_qp_ex`, which starts with `struct ibv_qp`, and what is behind it. Plain queue pairs are made the same.
#[repr(C)]
pub struct QpObject {
    c: Shared<ibv_qp_ex>,
    pub(crate) qp: Arc<ferroce::Qp>,
    context: ContextRef,
    /// Made with `IBV_QP_INIT_ATTR_SEND_OPS_FLAGS`: `ibv_qp_to_qp_ex` gives the extended structure.
    is_extended: bool,
    /// Requests between `ibv_wr_start` and `ibv_wr_complete`.
    pub(crate) builder: Builder,
}

handle!(QpObject, ibv_qp, "qp");

impl QpObject {
    /// The context that it was made in.
    pub(crate) fn context(&self) -> &ContextRef {
        &self.context
    }

    /// Shows the state to programs that read the field.
    fn show_state(&self, state: QpState) {
        // SAFETY: the field is written here only; programs read it after calls that changed it.
        unsafe { (*self.c.as_ptr()).qp_base.state = state as u32 };
    }
}

/// `enum ibv_qp_type`, as far as it is implemented.
pub(crate) fn qp_type(number: u32) -> Verb<QpType> {
    match number {
        2 => Ok(QpType::Rc),
        3 => Ok(QpType::Uc),
        4 => Ok(QpType::Ud),
        8 => Ok(QpType::RawPacket),
        9 => Ok(QpType::XrcSend),
        10 => Ok(QpType::XrcRecv),
        0xff => Err(Refusal::unsupported("qp_type IBV_QPT_DRIVER: vendor queue pairs need the vendor's card")),
        other => Err(Refusal::invalid(format!("qp_type {other} is unknown"))),
    }
}

/// `enum ibv_qp_state`.
fn qp_state(number: u32) -> Option<QpState> {
    [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Err]
        .into_iter()
        .find(|state| *state as u32 == number)
}

/// Makes a queue pair and tells the sizes that were granted. `ops` are the extended operations asked for, if any.
///
/// # Safety
///
/// The pointers are NULL or live.
unsafe fn create(pd: *mut ibv_pd, init: &mut ibv_qp_init_attr, ops: Option<u64>) -> Verb<*mut ibv_qp> {
    // SAFETY: by the contract above.
    let domain = unsafe { PdObject::of(pd) }?;
    let qp_type = qp_type(init.qp_type)?;
    if let Some(ops) = ops {
        check_ops(qp_type, ops)?;
    }
    if qp_type == QpType::XrcRecv {
        return Err(Refusal::invalid(
            "an XRC_RECV queue pair has no protection domain: ibv_create_qp_ex with IBV_QP_INIT_ATTR_XRCD",
        ));
    }
    if init.send_cq.is_null() || init.recv_cq.is_null() && qp_type != QpType::XrcSend {
        return Err(Refusal::invalid("send_cq or recv_cq is NULL; both are needed (they may be the same)"));
    }
    // SAFETY: by the contract above; so below.
    let send_cq = unsafe { CqObject::of(init.send_cq) }?.cq.clone();
    let (caps, sq_sig_all) = (convert::caps(&init.cap), init.sq_sig_all != 0);
    QpObject::publish(|address| {
        let cookie = address as u64;
        let qp = if qp_type == QpType::XrcSend {
            // What it is given for receives is not used, nor looked at.
            (init.recv_cq, init.srq) = (ptr::null_mut(), ptr::null_mut());
            domain.pd().create_initiator(&InitiatorCreate { send_cq, caps, sq_sig_all, cookie })?
        } else {
            // SAFETY: by the contract above.
            let (recv_cq, srq) = unsafe { receiving(init) }?;
            domain.pd().create_qp(&QpCreate { send_cq, recv_cq, srq, caps, qp_type, sq_sig_all, cookie })?
        };
        init.cap = convert::caps_c(&qp.caps());
        Ok(object(&domain.context, qp, pd, init, ops.is_some()))
    })
}

/// What names a queue pair that spreads its frames over receive work queues.
const SPREAD: u32 = qp_init::IND_TABLE | qp_init::RX_HASH;

/// Makes a queue pair that spreads its frames over receive work queues.
///
/// # Safety
///
/// `init` is a live structure up to the last field that its `comp_mask` names; the pointers that it names are NULL or live.
unsafe fn create_spread(init: *mut ibv_qp_init_attr_ex) -> Verb<*mut ibv_qp> {
    // SAFETY: by the contract above; this field is there in any form.
    let mask = unsafe { (*init).comp_mask };
    if mask & SPREAD != SPREAD || mask & qp_init::SEND_OPS_FLAGS != 0 {
        return Err(Refusal::invalid(
            "comp_mask must name both rwq_ind_tbl and rx_hash_conf, and no send_ops_flags: such a queue pair sends nothing",
        ));
    }
    // SAFETY: the last of these fields is named by the mask, so that all are there. Copies, as what is behind them may not be.
    let (qp_type, pd, qp_context, table, hash) =
        unsafe { ((*init).qp_type, (*init).pd, (*init).qp_context, (*init).rwq_ind_tbl, (*init).rx_hash_conf) };
    if qp_type != QpType::RawPacket as u32 {
        return Err(Refusal::unsupported("rwq_ind_tbl: only IBV_QPT_RAW_PACKET spreads what it receives"));
    }
    if hash.rx_hash_function != RX_HASH_TOEPLITZ {
        return Err(Refusal::unsupported(format!("rx_hash_function {}: there is Toeplitz (1)", hash.rx_hash_function)));
    }
    let fields = RssFields::from_bits(hash.rx_hash_fields_mask).ok_or_else(|| {
        Refusal::unsupported(format!(
            "rx_hash_fields_mask {:#x}: there are addresses of IP and ports of TCP and UDP, none inside of tunnels",
            hash.rx_hash_fields_mask
        ))
    })?;
    if hash.rx_hash_key.is_null() {
        return Err(Refusal::invalid("rx_hash_key is NULL"));
    }
    // SAFETY: by the contract above; not NULL, and so many bytes long.
    let key = unsafe { std::slice::from_raw_parts(hash.rx_hash_key, hash.rx_hash_key_len.into()) };
    // SAFETY: by the contract above; so below.
    let domain = unsafe { PdObject::of(pd) }?;
    // SAFETY: as above.
    let table = unsafe { TableObject::of(table) }?.table.clone();
    QpObject::publish(|address| {
        let qp = domain.pd().create_spread_qp(&SpreadCreate { table, key, fields, cookie: address as u64 })?;
        let cap = convert::caps_c(&qp.caps());
        // SAFETY: this field is there in any form; the caller's, to be written.
        unsafe { (*init).cap = cap };
        let c = ibv_qp_init_attr {
            qp_context,
            send_cq: ptr::null_mut(),
            recv_cq: ptr::null_mut(),
            srq: ptr::null_mut(),
            cap,
            qp_type,
            sq_sig_all: 0,
        };
        Ok(object(&domain.context, qp, pd, &c, false))
    })
}

/// Where receives come from and complete.
///
/// # Safety
///
/// The pointers are NULL or live.
unsafe fn receiving(init: &ibv_qp_init_attr) -> Verb<(Arc<ferroce::Cq>, Option<Arc<ferroce::Srq>>)> {
    // SAFETY: by the contract above; so below.
    let recv_cq = unsafe { CqObject::of(init.recv_cq) }?.cq.clone();
    if init.srq.is_null() {
        return Ok((recv_cq, None));
    }
    // SAFETY: by the contract above.
    Ok((recv_cq, Some(unsafe { SrqObject::of(init.srq) }?.srq.clone())))
}

/// Makes an XRC target and tells the sizes that were granted, which are none.
///
/// # Safety
///
/// `xrcd` is NULL or live.
unsafe fn create_target(xrcd: *mut ibv_xrcd, init: &mut ibv_qp_init_attr) -> Verb<*mut ibv_qp> {
    // SAFETY: by the contract above.
    let domain = unsafe { XrcdObject::of(xrcd) }?;
    QpObject::publish(|address| {
        let qp = domain.xrcd.create_target(address as u64)?;
        init.cap = convert::caps_c(&qp.caps());
        Ok(target_object(&domain.context, qp, init.qp_context))
    })
}

/// The C object of a target.
pub(crate) fn target_object(context: &ContextRef, qp: Arc<ferroce::Qp>, qp_context: *mut c_void) -> QpObject {
    let init = ibv_qp_init_attr {
        qp_context,
        send_cq: ptr::null_mut(),
        recv_cq: ptr::null_mut(),
        srq: ptr::null_mut(),
        cap: convert::caps_c(&qp.caps()),
        qp_type: QpType::XrcRecv as u32,
        sq_sig_all: 0,
    };
    object(context, qp, ptr::null_mut(), &init, false)
}

/// The C object of a queue pair.
fn object(
    context: &ContextRef,
    qp: Arc<ferroce::Qp>,
    pd: *mut ibv_pd,
    init: &ibv_qp_init_attr,
    is_extended: bool,
) -> QpObject {
    let c = ibv_qp {
        context: context.as_ptr(),
        qp_context: init.qp_context,
        pd,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        handle: handle_number(),
        qp_num: qp.qpn(),
        state: qp.state() as u32,
        qp_type: init.qp_type,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        events_completed: 0,
    };
    QpObject { c: Shared::new(qp_ex::structure(c)), qp, context: context.clone(), is_extended, builder: Builder::new() }
}

/// Refuses extended operations that the service type or the card does not have: a program may count on what it was granted.
fn check_ops(qp_type: QpType, ops: u64) -> Verb<()> {
    const DATAGRAM: u64 = send_ops::SEND | send_ops::SEND_WITH_IMM;
    const UNRELIABLE: u64 =
        DATAGRAM | send_ops::RDMA_WRITE | send_ops::RDMA_WRITE_WITH_IMM | send_ops::BIND_MW | send_ops::LOCAL_INV;
    const RELIABLE: u64 = UNRELIABLE
        | send_ops::RDMA_READ
        | send_ops::ATOMIC_CMP_AND_SWP
        | send_ops::ATOMIC_FETCH_AND_ADD
        | send_ops::SEND_WITH_INV
        | send_ops::FLUSH
        | send_ops::ATOMIC_WRITE;
    let offered = match qp_type {
        QpType::Ud => DATAGRAM,
        QpType::Uc => UNRELIABLE,
        QpType::Rc | QpType::XrcSend => RELIABLE,
        QpType::XrcRecv => 0,
        QpType::RawPacket => send_ops::SEND,
    };
    let missing = ops & !offered;
    if missing != 0 {
        return Err(Refusal::unsupported(format!(
            "send_ops_flags: the operations {missing:#x} are not available on {qp_type:?} queue pairs"
        )));
    }
    Ok(())
}

/// Attributes as Ferroce has them; only the fields that the mask names are looked at.
fn modification(attr: &ibv_qp_attr, mask: QpAttrMask) -> Verb<QpModify> {
    let state = |number: u32, field: &str| {
        qp_state(number).ok_or_else(|| Refusal::invalid(format!("{field} {number} is no queue pair state")))
    };
    let mut to = QpAttr::default();
    if mask.contains(QpAttrMask::STATE) {
        to.state = state(attr.qp_state, "qp_state")?;
    }
    if mask.contains(QpAttrMask::CUR_STATE) {
        to.cur_state = state(attr.cur_qp_state, "cur_qp_state")?;
    }
    if mask.contains(QpAttrMask::PATH_MTU) {
        to.path_mtu = convert::mtu_bytes(attr.path_mtu)
            .ok_or_else(|| Refusal::invalid(format!("path_mtu {} is no enum ibv_mtu (1 to 5)", attr.path_mtu)))?;
    }
    if mask.contains(QpAttrMask::ACCESS_FLAGS) {
        to.access = Access::from_bits(attr.qp_access_flags)
            .ok_or_else(|| Refusal::invalid(format!("qp_access_flags {:#x} has unknown bits", attr.qp_access_flags)))?;
    }
    to.qkey = attr.qkey;
    to.rq_psn = Psn::new(attr.rq_psn);
    to.sq_psn = Psn::new(attr.sq_psn);
    to.dest_qpn = attr.dest_qp_num & 0xff_ffff;
    to.pkey_index = attr.pkey_index;
    to.port_num = attr.port_num;
    to.max_rd_atomic = attr.max_rd_atomic;
    to.max_dest_rd_atomic = attr.max_dest_rd_atomic;
    to.min_rnr_timer = attr.min_rnr_timer;
    to.timeout = attr.timeout;
    to.retry_cnt = attr.retry_cnt;
    to.rnr_retry = attr.rnr_retry;
    to.en_sqd_async_notify = attr.en_sqd_async_notify != 0;
    to.rate_limit = attr.rate_limit;
    Ok(QpModify { attr: to, ah: convert::ah_attr(&attr.ah_attr) })
}

/// Checks the mask for attributes that this card does not have at all.
fn check_mask(attr: &ibv_qp_attr, attr_mask: c_int) -> Verb<QpAttrMask> {
    /// `IBV_MIG_MIGRATED`.
    const MIGRATED: u32 = 0;
    let mut mask = QpAttrMask::from_bits(attr_mask as u32)
        .ok_or_else(|| Refusal::invalid(format!("attr_mask {attr_mask:#x} has unknown bits")))?;
    if mask.intersects(QpAttrMask::ALT_PATH | QpAttrMask::CAP) {
        return Err(Refusal::unsupported(format!(
            "attr_mask {attr_mask:#x}: alternate paths and resizing are not available"
        )));
    }
    if mask.contains(QpAttrMask::PATH_MIG_STATE) {
        if attr.path_mig_state != MIGRATED {
            return Err(Refusal::unsupported("path_mig_state: there is no automatic path migration"));
        }
        mask.remove(QpAttrMask::PATH_MIG_STATE);
    }
    Ok(mask)
}

/// What a query answers.
fn query_attr(qp: &QpModify, caps: &ferroce::QueueCaps) -> ibv_qp_attr {
    let QpModify { attr, ah } = qp;
    ibv_qp_attr {
        qp_state: attr.state as u32,
        cur_qp_state: attr.state as u32,
        path_mtu: convert::mtu_enum(attr.path_mtu),
        path_mig_state: 0,
        qkey: attr.qkey,
        rq_psn: attr.rq_psn.get(),
        sq_psn: attr.sq_psn.get(),
        dest_qp_num: attr.dest_qpn,
        qp_access_flags: attr.access.bits(),
        cap: convert::caps_c(caps),
        ah_attr: convert::ah_attr_c(ah),
        alt_ah_attr: Default::default(),
        pkey_index: attr.pkey_index,
        alt_pkey_index: 0,
        en_sqd_async_notify: attr.en_sqd_async_notify.into(),
        sq_draining: attr.sq_draining.into(),
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port_num: attr.port_num,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        alt_port_num: 0,
        alt_timeout: 0,
        rate_limit: attr.rate_limit,
    }
}

slot! {
    /// `ibv_modify_qp_rate_limit(3)`: packet pacing; a rate of 0 ends it. The typical size of packets is a hint.
    fn modify_qp_rate_limit as "ibv_modify_qp_rate_limit" (
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_rate_limit_attr,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { QpObject::of(qp) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let attr = unsafe { attr.read() };
        if attr.comp_mask != 0 {
            return Err(Refusal::unsupported("ibv_qp_rate_limit_attr.comp_mask has unknown bits"));
        }
        if attr.max_burst_sz != 0 && attr.max_burst_sz < RATE_LIMIT_BURST {
            let why = format!("max_burst_sz is {}: {RATE_LIMIT_BURST} bytes may leave in one go", attr.max_burst_sz);
            return Err(Refusal::invalid(why));
        }
        Ok(object.qp.set_rate_limit(attr.rate_limit)?)
    }

    /// `ibv_create_qp_ex(3)`: a protection domain, and the operations for `ibv_wr_*` if wanted.
    fn create_qp_ex as "ibv_create_qp_ex" (
        context: *mut ibv_context,
        init: *mut ibv_qp_init_attr_ex,
    ) -> Pointer<ibv_qp> {
        // SAFETY: by the contract of the verb.
        unsafe { ContextObject::of(context) }?;
        if init.is_null() {
            return Err(Refusal::invalid("qp_init_attr_ex is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller, which may be shorter than ours: fields behind the mask are
        // read only if the mask names them.
        let mask = unsafe { (*init).comp_mask };
        let known = qp_init::PD | qp_init::XRCD | qp_init::SEND_OPS_FLAGS | qp_init::CREATE_FLAGS | SPREAD;
        if mask & !known != 0 {
            return Err(Refusal::unsupported(format!("comp_mask {:#x}: TSO is not available", mask & !known)));
        }
        // SAFETY: as above; this field is there in any form.
        let is_target = unsafe { (*init).qp_type } == QpType::XrcRecv as u32;
        if mask & (qp_init::PD | qp_init::XRCD) != if is_target { qp_init::XRCD } else { qp_init::PD } {
            return Err(Refusal::invalid("comp_mask must name xrcd for IBV_QPT_XRC_RECV, and pd for all others"));
        }
        // SAFETY: the mask says that the fields are there; the first seven fields are those of `ibv_qp_init_attr`.
        unsafe {
            if mask & qp_init::CREATE_FLAGS != 0 && (*init).create_flags != 0 {
                return Err(Refusal::unsupported(format!("create_flags {:#x} are not available", (*init).create_flags)));
            }
            if mask & SPREAD != 0 {
                return create_spread(init);
            }
            let ops = (mask & qp_init::SEND_OPS_FLAGS != 0).then(|| (*init).send_ops_flags);
            if is_target {
                check_ops(QpType::XrcRecv, ops.unwrap_or(0))?;
                return create_target((*init).xrcd, &mut *init.cast::<ibv_qp_init_attr>());
            }
            create((*init).pd, &mut *init.cast::<ibv_qp_init_attr>(), ops)
        }
    }
}

verb! {
    /// `ibv_create_qp(3)`: `cap` tells the sizes that were granted.
    fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> Pointer<ibv_qp> {
        if init.is_null() {
            return Err(Refusal::invalid("qp_init_attr is NULL"));
        }
        // SAFETY: by the contract of the verb; not NULL, so it points to a structure of the caller.
        unsafe { create(pd, &mut *init, None) }
    }

    /// `ibv_qp_to_qp_ex(3)`: NULL for a queue pair made without extended operations.
    fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> Pointer<ibv_qp_ex> {
        // SAFETY: by the contract of the verb.
        if unsafe { QpObject::of(qp) }?.is_extended {
            return Ok(qp.cast());
        }
        Err(Refusal::unsupported("the queue pair was made without IBV_QP_INIT_ATTR_SEND_OPS_FLAGS").into_routine())
    }

    /// `ibv_modify_qp(3)`.
    fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { QpObject::of(qp) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller. Its last field is younger than the others but lies in what
        // was padding.
        let attr = unsafe { attr.read() };
        let mask = check_mask(&attr, attr_mask)?;
        object.qp.modify(&modification(&attr, mask)?, mask)?;
        object.show_state(object.qp.state());
        Ok(())
    }

    /// `ibv_query_qp(3)`: everything is filled in, whatever the mask asks for.
    fn ibv_query_qp(
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        _attr_mask: c_int,
        init: *mut ibv_qp_init_attr,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { QpObject::of(qp) }?;
        if attr.is_null() || init.is_null() {
            return Err(Refusal::invalid("attr or init_attr is NULL"));
        }
        let present = object.qp.query()?;
        let caps = object.qp.caps();
        object.show_state(present.attr.state);
        // SAFETY: not NULL, so they point to structures of the caller; the other fields of the QP never change.
        unsafe {
            attr.write(query_attr(&present, &caps));
            init.write(ibv_qp_init_attr {
                qp_context: (*qp).qp_context,
                send_cq: (*qp).send_cq,
                recv_cq: (*qp).recv_cq,
                srq: (*qp).srq,
                cap: convert::caps_c(&caps),
                qp_type: (*qp).qp_type,
                sq_sig_all: object.qp.sq_sig_all().into(),
            });
        }
        Ok(())
    }

    /// `ibv_destroy_qp(3)`: blocks until every event told was acknowledged.
    fn ibv_destroy_qp(qp: *mut ibv_qp) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { QpObject::of(qp) }?;
        let delivered = object.qp.destroy()?;
        // In a forked child the counts belong to the parent, and so do the locks.
        if !object.context.is_stale() {
            // SAFETY: the counter lies in the live QP.
            unsafe { acknowledged!(qp, events_completed).wait(delivered) };
        }
        // SAFETY: the QP is gone and no event of it is out; the program has no use for the pointer any more.
        drop(unsafe { QpObject::reclaim(qp) });
        Ok(())
    }

    /// `ibv_query_qp_data_in_order(3)`: bytes of a message arrive in ascending order, its last word after all others, but whole
    /// messages are all that is promised to programs; so: no.
    fn ibv_query_qp_data_in_order(qp: *mut ibv_qp, op: u32, _flags: u32) -> Plain<c_int> {
        // SAFETY: by the contract of the verb.
        unsafe { QpObject::of(qp) }?;
        if op > wr::ATOMIC_WRITE {
            return Err(Refusal::invalid(format!("opcode {op} is unknown")));
        }
        Ok(0)
    }

    /// `ibv_query_ece(3)`: no vendor's options.
    fn ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> Status {
        // SAFETY: by the contract of the verb.
        unsafe { QpObject::of(qp) }?;
        if ece.is_null() {
            return Err(Refusal::invalid("ece is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        unsafe { ece.write(ibv_ece::default()) };
        Ok(())
    }

    /// `ibv_set_ece(3)`: no vendor's options can be set; none at all can.
    fn ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> Status {
        // SAFETY: by the contract of the verb.
        unsafe { QpObject::of(qp) }?;
        if ece.is_null() {
            return Err(Refusal::invalid("ece is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let ece = unsafe { ece.read() };
        if ece.comp_mask != 0 {
            return Err(Refusal::invalid("ece.comp_mask has unknown bits"));
        }
        if ece.vendor_id != 0 {
            return Err(Refusal::unsupported(format!("ece.vendor_id {:#x} is another vendor's", ece.vendor_id)));
        }
        Ok(())
    }

    /// `ibv_attach_mcast(3)`. RoCE has no multicast LIDs: that one is not looked at.
    fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { QpObject::of(qp) }?;
        // SAFETY: as above.
        Ok(object.qp.attach_mcast(unsafe { group(gid) }?)?)
    }

    /// `ibv_detach_mcast(3)`.
    fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> Status {
        // SAFETY: by the contract of the verb.
        let object = unsafe { QpObject::of(qp) }?;
        // SAFETY: as above.
        Ok(object.qp.detach_mcast(unsafe { group(gid) }?)?)
    }
}

/// The address of a multicast GID.
///
/// # Safety
///
/// NULL, or a GID of the caller's.
unsafe fn group(gid: *const ibv_gid) -> Verb<std::net::IpAddr> {
    if gid.is_null() {
        return Err(Refusal::invalid("gid is NULL"));
    }
    // SAFETY: not NULL.
    Ok(ferroce::address_of(unsafe { &(*gid).raw }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr() -> ibv_qp_attr {
        query_attr(&QpModify::default(), &convert::caps(&Default::default()))
    }

    #[test]
    fn unnamed_rubbish_is_not_looked_at() {
        let mut attr = attr();
        attr.path_mtu = 99;
        attr.qp_state = 99;
        attr.qp_access_flags = 1 << 31;
        assert!(modification(&attr, QpAttrMask::QKEY).is_ok());
        assert!(modification(&attr, QpAttrMask::PATH_MTU).is_err());
        assert!(modification(&attr, QpAttrMask::STATE).is_err());
        assert!(modification(&attr, QpAttrMask::ACCESS_FLAGS).is_err());
    }

    #[test]
    fn masks() {
        let mut attr = attr();
        assert_eq!(check_mask(&attr, 1 << 18 | 1).unwrap(), QpAttrMask::STATE);
        attr.path_mig_state = 1;
        assert_eq!(check_mask(&attr, 1 << 18).unwrap_err().errno(), libc::EOPNOTSUPP);
        assert_eq!(check_mask(&attr, 1 << 14).unwrap_err().errno(), libc::EOPNOTSUPP);
        assert_eq!(check_mask(&attr, 1 << 30).unwrap_err().errno(), libc::EINVAL);
    }

    #[test]
    fn extended_operations_follow_the_service_type() {
        assert!(check_ops(QpType::Ud, send_ops::SEND).is_ok());
        assert!(check_ops(QpType::Ud, send_ops::RDMA_WRITE).is_err());
        assert!(check_ops(QpType::Uc, send_ops::RDMA_WRITE).is_ok());
        assert!(check_ops(QpType::Uc, send_ops::RDMA_READ).is_err());
        assert!(check_ops(QpType::Rc, send_ops::ATOMIC_FETCH_AND_ADD).is_ok());
        assert!(check_ops(QpType::Rc, send_ops::TSO).is_err());
        assert!(check_ops(QpType::RawPacket, send_ops::SEND).is_ok());
        assert!(check_ops(QpType::RawPacket, send_ops::SEND_WITH_IMM).is_err());
    }

    #[test]
    fn types_and_states() {
        assert_eq!(qp_type(2).unwrap(), QpType::Rc);
        assert_eq!(qp_type(8).unwrap(), QpType::RawPacket);
        assert_eq!(qp_type(0xff).unwrap_err().errno(), libc::EOPNOTSUPP);
        assert_eq!(qp_type(77).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(qp_state(6), Some(QpState::Err));
        assert_eq!(qp_state(7), None);
    }
}
