//! Events: from what the service says to what a program gets.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use ferroce_abi::cm::{DETAIL_DATAGRAM, DETAIL_REQUEST, PRIVATE_DATA_MAX, ferroce_cm_event, ferroce_cm_kept};
use ferroce_abi::{ibv_ah_attr, ibv_ece};

use crate::abi::{QPT_UD, event, rdma_cm_event, rdma_conn_param, rdma_event_channel, rdma_event_param, rdma_ud_param};
use crate::channel::{ChannelObject, Queued};
use crate::entry::{self, Call, Refusal, enter, put};
use crate::id::{self, Counted, Fresh, IdObject};
use crate::why::Side;
use crate::{addr, connect, device, multicast, qp, verbs};

/// `struct rdma_cm_event` and what is behind it.
#[repr(C)]
struct EventObject {
    c: rdma_cm_event,
    private_data: [u8; PRIVATE_DATA_MAX],
    /// The id that is not destroyed before this is acknowledged.
    counted: *const IdObject,
}

/// Gives an event back.
///
/// # Safety
///
/// An event of this library, for the last time.
pub(crate) unsafe fn release(event: *mut rdma_cm_event) {
    // SAFETY: by the contract; the structure lies at the start of the object.
    unsafe {
        let object = Box::from_raw(event.cast::<EventObject>());
        Counted::uncount(object.counted);
    }
}

/// The id that an event keeps alive.
///
/// # Safety
///
/// A live event of this library.
pub(crate) unsafe fn owner<'a>(event: *const rdma_cm_event) -> &'a IdObject {
    // SAFETY: by the contract; the structure lies at the start of the object, whose count keeps the id alive.
    unsafe { &*(*event.cast::<EventObject>()).counted }
}

/// An event for the program. `counted` is whose it is, `about` which id it names.
fn make(counted: Counted, about: &IdObject, code: u32, status: c_int) -> *mut EventObject {
    // SAFETY: pointers and integers, for which zero is a value.
    let param: rdma_event_param = unsafe { std::mem::zeroed() };
    let c = rdma_cm_event { id: about.as_ptr(), listen_id: ptr::null_mut(), event: code, status, param };
    Box::into_raw(Box::new(EventObject { c, private_data: [0; PRIVATE_DATA_MAX], counted: counted.into_raw() }))
}

/// Waits for the next event of a channel, inside the boundary.
pub(crate) fn wait(channel: &Arc<ChannelObject>) -> Call<*mut rdma_cm_event> {
    loop {
        if let Some(event) = next(channel)? {
            return Ok(event);
        }
        let mut polled = libc::pollfd { fd: channel.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one descriptor, in a place of ours.
        let ready = unsafe { libc::poll(&raw mut polled, 1, -1) };
        if ready < 0 {
            let refusal = Refusal::last();
            if refusal.errno() != libc::EINTR || !handlers_restart() {
                return Err(refusal);
            }
        }
    }
}

/// The next event that is there.
pub(crate) fn next(channel: &Arc<ChannelObject>) -> Call<Option<*mut rdma_cm_event>> {
    while let Some(queued) = channel.pull()? {
        let event = match queued {
            Queued::Local { id, event, status } => local(id, event, status),
            Queued::Joined { id, join } => joined(id, join),
            Queued::Service(event) => from_service(&event),
        };
        if event.is_some() {
            return Ok(event);
        }
        // Of an id that was destroyed meanwhile, or a request that nobody can serve.
    }
    Ok(None)
}

fn local(number: u64, code: u32, status: c_int) -> Option<*mut rdma_cm_event> {
    let counted = id::find(number)?;
    let about: *const IdObject = counted.id();
    // SAFETY: the count keeps it alive.
    let about = unsafe { &*about };
    tell_failure(about, code, status);
    Some(make(counted, about, code, status).cast())
}

/// Tells why a connection did not come about. The call of a synchronous id that waits for it does so itself.
fn tell_failure(about: &IdObject, code: u32, status: c_int) {
    let (is_sync, side) = {
        let inner = about.inner();
        (inner.is_sync, inner.side)
    };
    if !is_sync && let Some((errno, sentence)) = id::why_failed(about, code, status) {
        let function = match side {
            Side::Active => "rdma_connect\0",
            Side::Passive => "rdma_accept\0",
        };
        entry::note(function, errno, sentence);
    }
}

fn joined(number: u64, join: u64) -> Option<*mut rdma_cm_event> {
    let counted = id::find(number)?;
    let about: *const IdObject = counted.id();
    // SAFETY: the count keeps it alive.
    let about = unsafe { &*about };
    let Some((code, status, param)) = multicast::joined(about, join) else {
        counted.release();
        return None;
    };
    let object = make(counted, about, code, status);
    // SAFETY: just made, and nobody else has it.
    unsafe { (*object).c.param = param };
    Some(object.cast())
}

fn from_service(said: &ferroce_cm_event) -> Option<*mut rdma_cm_event> {
    let (whose, listener) = match said.detail {
        DETAIL_REQUEST => (id::find(said.listener)?, true),
        _ => (id::find(said.id)?, false),
    };
    let owner: *const IdObject = whose.id();
    // SAFETY: the count keeps it alive.
    let owner = unsafe { &*owner };
    let about = if listener {
        match request(owner, said) {
            Ok(about) => about,
            Err(_) => {
                // SAFETY: plain calls. The peer is told that nobody is there.
                unsafe {
                    verbs::ferroce_cm_reject(said.id, connect::REJECT_CONSUMER, ptr::null(), 0);
                    verbs::ferroce_cm_destroy(said.id);
                }
                whose.release();
                return None;
            }
        }
    } else {
        owner
    };
    let (code, status) = if listener { (said.event, said.status) } else { react(about, said) };
    tell_failure(about, code, status);
    let object = make(whose, about, code, status);
    // SAFETY: just made, and nobody else has it.
    let object = unsafe { &mut *object };
    if listener {
        object.c.listen_id = owner.as_ptr();
    }
    object.private_data = said.private_data;
    object.c.param = param(about, said, &object.private_data);
    Some(ptr::from_mut(object).cast())
}

/// A new id for a request.
fn request<'a>(listener: &IdObject, said: &ferroce_cm_event) -> Call<&'a IdObject> {
    let opened = device::named(&said.path.device)?;
    let (channel, is_sync) = {
        let inner = listener.inner();
        (Arc::clone(&inner.channel), inner.is_sync)
    };
    // SAFETY: fields that the program sets before it listens.
    let (context, ps) = unsafe { ((*listener.as_ptr()).context, (*listener.as_ptr()).ps) };
    let qp_type = if said.datagram == 0 { said.param.qp_type.into() } else { QPT_UD };
    // SAFETY: a field that the program does not change.
    let wanted = unsafe { (*listener.as_ptr()).qp_type };
    if qp_type != wanted {
        return Err(Refusal::invalid(format!("a request for queue pair type {qp_type}; the listener's is {wanted}")));
    }
    let fresh = Fresh { number: said.id, channel, is_sync: false, context, ps, qp_type };
    // SAFETY: just made; it lives until the program destroys it.
    let object = unsafe { &*IdObject::publish(fresh) };
    // SAFETY: nobody else knows the id yet.
    unsafe {
        let c = object.as_ptr();
        (*c).route.addr.src = said.local;
        (*c).route.addr.dst = said.peer;
    }
    {
        let mut inner = object.inner();
        inner.bound = true;
        inner.busy = true;
        inner.has_peer = true;
        inner.side = Side::Passive;
        inner.responder_resources = said.param.responder_resources;
        inner.initiator_depth = said.param.initiator_depth;
        inner.remote_ece = ece(said);
        inner.path = Some(said.path);
        inner.routed = true;
    }
    addr::show_device(object, &said.path, opened);
    addr::show_route(object)?;
    if is_sync {
        id::migrate(object, ChannelObject::open()?, true)?;
    }
    Ok(object)
}

fn ece(said: &ferroce_cm_event) -> ibv_ece {
    ibv_ece { vendor_id: said.param.ece_vendor, options: said.param.ece_options, comp_mask: 0 }
}

/// What the library does by itself about an event; gives the code and status that the program sees.
fn react(about: &IdObject, said: &ferroce_cm_event) -> (u32, c_int) {
    // SAFETY: the field is set by `rdma_create_qp`, which is over before the program connects.
    let has_qp = unsafe { !(*about.as_ptr()).qp.is_null() };
    match said.event {
        event::CONNECT_RESPONSE => {
            {
                let mut inner = about.inner();
                inner.has_peer = true;
                inner.responder_resources = said.param.responder_resources;
                inner.initiator_depth = said.param.initiator_depth;
                inner.remote_ece = ece(said);
            }
            if !has_qp {
                return (said.event, said.status);
            }
            match connect::finish(about) {
                Ok(()) => {
                    keep(about);
                    (event::ESTABLISHED, 0)
                }
                Err(refusal) => {
                    entry::tell("rdma_connect\0", &refusal);
                    // SAFETY: a plain call; the peer would wait for ever else.
                    unsafe { verbs::ferroce_cm_reject(said.id, connect::REJECT_CONSUMER, ptr::null(), 0) };
                    qp::to_error(about);
                    (event::CONNECT_ERROR, -refusal.errno())
                }
            }
        }
        event::ESTABLISHED if said.detail == DETAIL_DATAGRAM => {
            about.inner().remote_ece = ece(said);
            (said.event, said.status)
        }
        event::ESTABLISHED => {
            keep(about);
            (said.event, said.status)
        }
        event::REJECTED | event::CONNECT_ERROR | event::UNREACHABLE if has_qp && !about.is_datagram() => {
            qp::to_error(about);
            (said.event, said.status)
        }
        event::DISCONNECTED => {
            let mut inner = about.inner();
            (inner.kept, inner.leaving, inner.over) = (None, false, true);
            (said.event, said.status)
        }
        _ => (said.event, said.status),
    }
}

/// Remembers what the next service needs to go on with the connection, should this one crash.
pub(crate) fn keep(about: &IdObject) {
    let mut kept = std::mem::MaybeUninit::<ferroce_cm_kept>::uninit();
    // SAFETY: room for it; it is written when the call succeeds. A connection that is over already cannot be kept.
    if unsafe { verbs::ferroce_cm_keep(about.number(), kept.as_mut_ptr()) } == 0 {
        // SAFETY: as above.
        about.inner().kept = Some(Box::new(unsafe { kept.assume_init() }));
    }
}

fn param(about: &IdObject, said: &ferroce_cm_event, data: &[u8; PRIVATE_DATA_MAX]) -> rdma_event_param {
    let len = said.private_data_len.min(255) as u8;
    let private_data: *const c_void = if len == 0 { ptr::null() } else { data.as_ptr().cast() };
    if about.is_datagram() {
        let ah_attr = about.inner().path.map_or_else(ibv_ah_attr::default, |path| qp::address(&path));
        let ud = rdma_ud_param {
            private_data,
            private_data_len: len,
            ah_attr,
            qp_num: said.param.qpn,
            qkey: said.param.qkey,
        };
        return rdma_event_param { ud };
    }
    // SAFETY: integers and a pointer, for which zero is a value; all of the union is written.
    let mut whole: rdma_event_param = unsafe { std::mem::zeroed() };
    whole.conn = rdma_conn_param {
        private_data,
        private_data_len: len,
        responder_resources: said.param.responder_resources,
        initiator_depth: said.param.initiator_depth,
        flow_control: said.param.flow_control,
        retry_count: said.param.retry_count,
        rnr_retry_count: said.param.rnr_retry_count,
        srq: said.param.srq,
        qp_num: said.param.qpn,
    };
    whole
}

unsafe extern "C-unwind" {
    // The C library's own declarations do not say that these may unwind.
    fn pthread_testcancel();
    fn ppoll(
        fds: *mut libc::pollfd,
        count: libc::nfds_t,
        longest: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int;
}

/// What `rdma_get_cm_event` does next: -1 refused, 0 done, else sleep on the descriptor.
fn step(channel: *mut rdma_event_channel, place: *mut *mut rdma_cm_event, polled: &mut libc::pollfd) -> c_int {
    enter("rdma_get_cm_event\0", || {
        if place.is_null() {
            return Err(Refusal::invalid("no place for the event"));
        }
        // SAFETY: by the contract of `rdma_get_cm_event`.
        let channel = unsafe { ChannelObject::of(channel) }?;
        if let Some(event) = next(&channel)? {
            channel.drop_stale();
            // SAFETY: as above.
            unsafe { put(place, event) }?;
            return Ok(0);
        }
        if channel.is_nonblocking() {
            return Err(Refusal::told(libc::EAGAIN));
        }
        *polled = libc::pollfd { fd: channel.fd(), events: libc::POLLIN, revents: 0 };
        Ok(1)
    })
}

/// `rdma_get_cm_event(3)`: blocks unless the program made the descriptor non-blocking. A cancellation point.
///
/// # Safety
///
/// The contract of the C function: pointers are NULL or point to live objects of their type.
// SAFETY: the name is the C library's own, and is defined once: symbols.in lists it, the link would report a second.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    // SAFETY: nothing on this stack needs to be dropped, up to the program.
    unsafe { pthread_testcancel() };
    loop {
        let mut polled = libc::pollfd { fd: -1, events: 0, revents: 0 };
        let result = step(channel, event, &mut polled);
        if result <= 0 {
            return result;
        }
        // SAFETY: one descriptor in a place of ours. The thread may be ended in it: as above.
        let ready = unsafe { ppoll(&raw mut polled, 1, ptr::null(), ptr::null()) };
        if ready < 0 {
            let go_on = enter("rdma_get_cm_event\0", || {
                let refusal = Refusal::last();
                if refusal.errno() == libc::EINTR && handlers_restart() { Ok(0) } else { Err(refusal) }
            });
            if go_on != 0 {
                return go_on;
            }
        }
    }
}

/// Do all of the program's signal handlers restart system calls? Which of them ran is not told, so one that does not decides.
pub(crate) fn handlers_restart() -> bool {
    /// The kernel's signals, 1 to 64.
    const SIGNALS: std::ops::RangeInclusive<c_int> = 1..=64;
    // The card's own handlers of memory faults are no reason to end a wait.
    const FAULTS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
    SIGNALS.filter(|signal| !FAULTS.contains(signal)).all(|signal| {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: only asks; the place is ours. A signal that cannot be asked for leaves the zeros: no handler.
        let action = unsafe {
            libc::sigaction(signal, ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        let has_handler = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
        !has_handler || action.sa_flags & libc::SA_RESTART != 0
    })
}
