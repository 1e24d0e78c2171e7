//! Connections: listening, connecting, accepting, rejecting, ending.

use std::ffi::{c_int, c_void};
use std::ptr;

use ferroce_abi::cm::ferroce_cm_param;
use ferroce_abi::ibv_device_attr;

use crate::abi::{UDP_QKEY, rdma_cm_event, rdma_cm_id, rdma_conn_param};
use crate::entry::{Call, Refusal, check, given, put, rdma};
use crate::id::IdObject;
use crate::{addr, event, id, qp, verbs};

/// `IB_CM_REJ_CONSUMER_DEFINED`.
pub(crate) const REJECT_CONSUMER: u16 = 28;
/// `IB_CM_REJ_VENDOR_OPTION_NOT_SUPPORTED`.
const REJECT_ECE: u16 = 35;

/// "As much as the device can" (`RDMA_MAX_RESP_RES`, `RDMA_MAX_INIT_DEPTH`).
const MOST: u8 = 0xff;
/// Three bits on the wire.
const RETRIES_MAX: u8 = 7;

/// What the program says when it says nothing.
fn default_param() -> rdma_conn_param {
    rdma_conn_param {
        private_data: ptr::null(),
        private_data_len: 0,
        responder_resources: MOST,
        initiator_depth: MOST,
        flow_control: 0,
        retry_count: RETRIES_MAX,
        rnr_retry_count: RETRIES_MAX,
        srq: 0,
        qp_num: 0,
    }
}

/// How many READs and atomics the id's device takes, and how many it sends, at once.
fn depths(id: &IdObject) -> Call<(u8, u8)> {
    // SAFETY: integers, for which zero is a value.
    let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the field is the library's; the context is open, or NULL, which is refused.
    check(unsafe { verbs::ibv_query_device((*id.as_ptr()).verbs, &raw mut attr) })?;
    let byte = |number: c_int| u8::try_from(number).unwrap_or(MOST);
    Ok((byte(attr.max_qp_rd_atom), byte(attr.max_qp_init_rd_atom)))
}

fn within(wanted: u8, most: u8, name: &str) -> Call<u8> {
    match wanted {
        MOST => Ok(most),
        wanted if wanted <= most => Ok(wanted),
        wanted => Err(Refusal::invalid(format!("{name} is {wanted}, more than the device's {most}"))),
    }
}

/// The parameters for the service.
fn param(id: &IdObject, wanted: &rdma_conn_param) -> Call<ferroce_cm_param> {
    let c = id.as_ptr();
    // SAFETY: fields that are the library's during calls about the id.
    let (queue_pair, qp_type) = unsafe { ((*c).qp, (*c).qp_type) };
    let (qpn, srq) = if queue_pair.is_null() {
        (wanted.qp_num, wanted.srq)
    } else {
        // SAFETY: a live queue pair of the id.
        unsafe { ((*queue_pair).qp_num, u8::from(!(*queue_pair).srq.is_null())) }
    };
    let ece = id.inner().local_ece;
    let mut param = ferroce_cm_param {
        qpn,
        qkey: UDP_QKEY,
        ece_vendor: ece.vendor_id,
        ece_options: ece.options,
        qp_type: qp_type as u8,
        srq: u8::from(srq != 0),
        flow_control: u8::from(wanted.flow_control != 0),
        retry_count: wanted.retry_count.min(RETRIES_MAX),
        rnr_retry_count: wanted.rnr_retry_count.min(RETRIES_MAX),
        ..ferroce_cm_param::default()
    };
    if !id.is_datagram() {
        let (responder, initiator) = depths(id)?;
        param.responder_resources = within(wanted.responder_resources, responder, "responder_resources")?;
        param.initiator_depth = within(wanted.initiator_depth, initiator, "initiator_depth")?;
    }
    Ok(param)
}

/// The peer accepted: connects the queue pair and tells it.
pub(crate) fn finish(id: &IdObject) -> Call<()> {
    qp::connect(id, |_| {})?;
    // SAFETY: a plain call.
    id.ask(|number| check(unsafe { verbs::ferroce_cm_establish(number) }))
}

/// `rdma_listen`; an id without an address listens on all.
fn listen(object: &IdObject, backlog: c_int) -> Call<()> {
    if !object.inner().bound {
        // SAFETY: integers, for which zero is a value.
        let mut any: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        any.ss_family = libc::AF_INET as libc::sa_family_t;
        addr::bind(object, &any)?;
    }
    let backlog = u32::try_from(backlog).unwrap_or(0);
    // SAFETY: a plain call.
    object.ask(|number| check(unsafe { verbs::ferroce_cm_listen(number, backlog) }))?;
    object.inner().listening = Some(backlog);
    Ok(())
}

rdma! {
    /// `rdma_listen(3)`: 0 and less stand for the largest backlog.
    fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
        // SAFETY: by the contract of the function.
        listen(unsafe { IdObject::of(id) }?, backlog)?;
        Ok(0)
    }

    /// `rdma_connect(3)`.
    fn rdma_connect(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        // SAFETY: as above.
        let wanted = if conn_param.is_null() { default_param() } else { *unsafe { given(conn_param, "conn_param") }? };
        let path = {
            let inner = object.inner();
            inner.path.filter(|_| inner.routed)
        };
        let path = path.ok_or_else(|| Refusal::invalid("the route is not resolved; call rdma_resolve_route before"))?;
        // SAFETY: the field is the library's during calls about the id.
        let port = u16::from_be(addr::port(unsafe { &(*object.as_ptr()).route.addr.dst }));
        let (data, len) = (wanted.private_data, wanted.private_data_len);
        if object.is_datagram() {
            object.ask(|number| {
                // SAFETY: a path of ours; private data of the program.
                check(unsafe { verbs::ferroce_cm_resolve(number, &raw const path, port, data, len) })
            })?;
        } else {
            let param = param(object, &wanted)?;
            object.ask(|number| {
                // SAFETY: as above, and parameters of ours.
                check(unsafe { verbs::ferroce_cm_connect(number, &raw const path, port, &raw const param, data, len) })
            })?;
        }
        object.inner().busy = true;
        object.complete()
    }

    /// `rdma_establish(3)`: for programs that bring the queue pair to RTS by themselves, after CONNECT_RESPONSE.
    fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        // SAFETY: the field is the library's during calls about the id.
        if unsafe { !(*object.as_ptr()).qp.is_null() } {
            return Err(Refusal::invalid("the id has a queue pair: the library has established the connection already"));
        }
        // SAFETY: a plain call.
        object.ask(|number| check(unsafe { verbs::ferroce_cm_establish(number) }))?;
        event::keep(object);
        Ok(0)
    }

    /// `rdma_accept(3)`.
    fn rdma_accept(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        let (responder_resources, initiator_depth) = {
            let inner = object.inner();
            (inner.responder_resources, inner.initiator_depth)
        };
        let mut wanted = if conn_param.is_null() {
            rdma_conn_param { responder_resources, initiator_depth, ..default_param() }
        } else {
            // SAFETY: as above.
            *unsafe { given(conn_param, "conn_param") }?
        };
        // No more than the peer can.
        if wanted.responder_resources == MOST {
            wanted.responder_resources = responder_resources;
        }
        if wanted.initiator_depth == MOST {
            wanted.initiator_depth = initiator_depth;
        }
        let (data, len) = (wanted.private_data, wanted.private_data_len);
        if object.is_datagram() {
            let param = param(object, &wanted)?;
            object.ask(|number| {
                // SAFETY: parameters of ours; private data of the program.
                check(unsafe { verbs::ferroce_cm_accept_datagram(number, &raw const param, data, len) })
            })?;
            return Ok(0);
        }
        let (responder, initiator) = depths(object)?;
        wanted.responder_resources = wanted.responder_resources.min(responder);
        wanted.initiator_depth = wanted.initiator_depth.min(initiator).min(initiator_depth);
        let param = param(object, &wanted)?;
        // SAFETY: the field is the library's during calls about the id.
        if unsafe { !(*object.as_ptr()).qp.is_null() } {
            qp::connect(object, |attr| {
                attr.max_dest_rd_atomic = param.responder_resources;
                attr.max_rd_atomic = param.initiator_depth;
                attr.rnr_retry = param.rnr_retry_count;
            })?;
        }
        let accepted = object.ask(|number| {
            // SAFETY: parameters of ours; private data of the program.
            check(unsafe { verbs::ferroce_cm_accept(number, &raw const param, data, len) })
        });
        if let Err(refusal) = accepted {
            qp::to_error(object);
            return Err(refusal);
        }
        object.complete()
    }

    /// `rdma_reject(3)`.
    fn rdma_reject(id: *mut rdma_cm_id, private_data: *const c_void, private_data_len: u8) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        object.ask(|number| {
            // SAFETY: private data of the program.
            check(unsafe { verbs::ferroce_cm_reject(number, REJECT_CONSUMER, private_data, private_data_len) })
        })?;
        Ok(0)
    }

    /// `rdma_reject_ece(3)`: because of what the peer's driver proposes.
    fn rdma_reject_ece(id: *mut rdma_cm_id, private_data: *const c_void, private_data_len: u8) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        object.ask(|number| {
            // SAFETY: private data of the program.
            check(unsafe { verbs::ferroce_cm_reject(number, REJECT_ECE, private_data, private_data_len) })
        })?;
        Ok(0)
    }

    /// `rdma_notify(3)`: of the asynchronous events only IBV_EVENT_COMM_EST means something to a connection.
    fn rdma_notify(id: *mut rdma_cm_id, event: c_int) -> c_int {
        const COMM_EST: c_int = 4;
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        if event == COMM_EST {
            // SAFETY: a plain call.
            object.ask(|number| check(unsafe { verbs::ferroce_cm_notify(number) }))?;
        }
        Ok(0)
    }

    /// `rdma_disconnect(3)`: the queue pair goes to the error state, which flushes its work requests.
    fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        qp::to_error(object);
        // SAFETY: a plain call.
        let asked = object.ask(|number| check(unsafe { verbs::ferroce_cm_disconnect(number) }));
        let mut inner = object.inner();
        match asked {
            // The service that knew the connection is gone, and so is the connection.
            Err(refusal) if inner.over && refusal.errno() == libc::EINVAL => {}
            Err(refusal) => return Err(refusal),
            Ok(()) => inner.leaving = !inner.over,
        }
        drop(inner);
        object.complete()
    }

    /// `rdma_get_request(3)`: the next request of a synchronous listener; its event stays with the new id.
    fn rdma_get_request(listen: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int {
        // SAFETY: by the contract of the function.
        let listener = unsafe { IdObject::of(listen) }?;
        let (channel, template) = {
            let inner = listener.inner();
            if !inner.is_sync {
                return Err(Refusal::invalid("the listener has an event channel; its requests come as events"));
            }
            (std::sync::Arc::clone(&inner.channel), inner.template)
        };
        let came = event::wait(&channel)?;
        let refused = |refusal: Refusal| {
            // SAFETY: the event just taken, which nobody else has.
            unsafe { event::release(came) };
            Err(refusal)
        };
        // SAFETY: a live event.
        let rdma_cm_event { id: fresh, event: code, status, .. } = unsafe { *came };
        if status != 0 || code != crate::abi::event::CONNECT_REQUEST {
            return refused(Refusal::new(if status == 0 { libc::EINVAL } else { status.abs() }, format!("event {code} came")));
        }
        // SAFETY: the new id, which nobody else has.
        let object = unsafe { IdObject::of(fresh) }?;
        if let Some((pd, mut init)) = template
            && let Err(refusal) = qp::create(object, id::template_pd(pd), &mut init)
        {
            // SAFETY: an event and an id that the program never sees.
            unsafe {
                verbs::ferroce_cm_reject(object.number(), REJECT_CONSUMER, ptr::null(), 0);
                event::release(came);
                id::rdma_destroy_id(fresh);
            }
            return Err(refusal);
        }
        // SAFETY: the field is the library's.
        unsafe { (*object.as_ptr()).event = came };
        // SAFETY: by the contract of the function.
        unsafe { put(id, fresh) }?;
        Ok(0)
    }
}
