//! Ids: making, finding, moving and destroying them.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use ferroce_abi::cm::{ferroce_cm_kept, ferroce_cm_path};
use ferroce_abi::{ibv_ece, ibv_pd, ibv_qp_init_attr};

use crate::abi::{
    PS_IB, PS_IPOIB, PS_TCP, PS_UDP, QPT_RC, QPT_UC, QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND, rdma_cm_event, rdma_cm_id,
    rdma_event_channel,
};
use crate::channel::{ChannelObject, Queued};
use crate::entry::{Call, Refusal, check, free, given, put, rdma};
use crate::multicast::Join;
use crate::why::Side;
use crate::{addr, event as events, fork, recover, verbs, why};

/// `struct rdma_cm_id` and what is behind it.
#[repr(C)]
pub(crate) struct IdObject {
    c: UnsafeCell<rdma_cm_id>,
    /// The process that made it.
    pid: u32,
    inner: Mutex<Inner>,
    acked: Condvar,
}

/// What the program does not see of an id.
pub(crate) struct Inner {
    /// The service's number for it.
    pub(crate) number: u64,
    pub(crate) channel: Arc<ChannelObject>,
    /// Calls wait for their event (`rdma_create_id` without a channel).
    pub(crate) is_sync: bool,
    pub(crate) side: Side,
    /// Events that the program has and did not acknowledge.
    outstanding: usize,
    pub(crate) bound: bool,
    /// `rdma_listen`'s backlog.
    pub(crate) listening: Option<u32>,
    /// The kernel is asking whether anybody is at the address: the wait's cookie.
    pub(crate) asking: Option<u64>,
    /// Set by `rdma_resolve_addr`, or by the request.
    pub(crate) path: Option<ferroce_cm_path>,
    /// The path is that of `rdma_resolve_route` too.
    pub(crate) routed: bool,
    /// Of the peer's request or reply, seen from this end.
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) remote_ece: ibv_ece,
    pub(crate) local_ece: ibv_ece,
    pub(crate) tos: u8,
    pub(crate) ack_timeout: Option<u8>,
    pub(crate) reuse: bool,
    pub(crate) v6_only: bool,
    /// What `rdma_create_ep` says of the queue pairs of requests.
    pub(crate) template: Option<(usize, ibv_qp_init_attr)>,
    /// How to go on after a crash of the service, once connected.
    pub(crate) kept: Option<Box<ferroce_cm_kept>>,
    /// Multicast groups, in the order of joining, and the number of the next one.
    pub(crate) joins: Vec<Join>,
    pub(crate) next_join: u64,
    /// A request or a reply came: the service knows what the queue pair needs.
    pub(crate) has_peer: bool,
    /// The program connects, or is connected: after a crash of the service there is no way back to idle.
    pub(crate) busy: bool,
    /// The program has ended the connection, and was not told yet that it is over.
    pub(crate) leaving: bool,
    /// The program was told that the connection is over.
    pub(crate) over: bool,
}

impl Inner {
    /// The path to the peer, once it is known whether anybody is there.
    pub(crate) fn resolved_path(&self) -> Call<ferroce_cm_path> {
        match self.path {
            Some(path) if self.asking.is_none() => Ok(path),
            Some(_) => Err(Refusal::invalid("the address is being resolved; wait for RDMA_CM_EVENT_ADDR_RESOLVED")),
            None => Err(Refusal::invalid("the address is not resolved; call rdma_resolve_addr")),
        }
    }
}

// SAFETY: the pointers inside are to objects of the program and of verbs, which any thread may use.
unsafe impl Send for Inner {}
// SAFETY: `c` is the program's as much as ours: who may touch which field when is the contract of rdma_cma.h. The rest is in the mutex.
unsafe impl Sync for IdObject {}

/// A pointer to a live id in [`TABLE`].
#[derive(Clone, Copy)]
struct Live(*const IdObject);
// SAFETY: ids may be used from any thread.
unsafe impl Send for Live {}

/// Live ids by the service's number, and those that wait to hear whether anybody is there by the wait's cookie.
#[derive(Default)]
struct Ids {
    by_number: HashMap<u64, Live>,
    by_cookie: HashMap<u64, Live>,
}

/// While it is locked, none of them is freed.
static TABLE: Mutex<Option<Ids>> = Mutex::new(None);

fn table() -> MutexGuard<'static, Option<Ids>> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The table of live ids, locked: while a thread forks.
pub(crate) struct Table(MutexGuard<'static, Option<Ids>>);

impl Table {
    pub(crate) fn hold() -> Table {
        Table(table())
    }

    /// Forgets all ids.
    pub(crate) fn clear(&mut self) {
        *self.0 = None;
    }
}

/// An id that an event is being made for: it is not freed before that is acknowledged.
pub(crate) struct Counted(*const IdObject);

impl Counted {
    pub(crate) fn id(&self) -> &IdObject {
        // SAFETY: `rdma_destroy_id` waits until it is uncounted.
        unsafe { &*self.0 }
    }

    /// The count goes on in an event.
    pub(crate) fn into_raw(self) -> *const IdObject {
        self.0
    }

    /// Takes the count back from an event.
    ///
    /// # Safety
    ///
    /// From [`Counted::into_raw`], once.
    pub(crate) unsafe fn uncount(id: *const IdObject) {
        // SAFETY: the count keeps it alive until the lock is let go; who waits needs the lock first.
        let id = unsafe { &*id };
        let mut inner = id.inner();
        inner.outstanding -= 1;
        // Under the lock: the id may be freed as soon as it is released.
        id.acked.notify_all();
        drop(inner);
    }

    /// Gives up: there will be no event.
    pub(crate) fn release(self) {
        // SAFETY: `self` is the count.
        unsafe { Counted::uncount(self.0) };
    }
}

/// The live id of a number, counted.
pub(crate) fn find(number: u64) -> Option<Counted> {
    let table = table();
    let live = table.as_ref()?.by_number.get(&number).copied()?;
    // SAFETY: it is in the table, which is locked.
    unsafe { &*live.0 }.inner().outstanding += 1;
    Some(Counted(live.0))
}

/// Is there an id of this number?
pub(crate) fn is_live(number: u64) -> bool {
    table().as_ref().is_some_and(|ids| ids.by_number.contains_key(&number))
}

/// The live id that waits under a cookie, counted; it waits no more.
pub(crate) fn done_asking(cookie: u64) -> Option<Counted> {
    let mut table = table();
    let live = table.as_mut()?.by_cookie.remove(&cookie)?;
    // SAFETY: it was in the table, which is locked.
    let mut inner = unsafe { &*live.0 }.inner();
    inner.asking.take_if(|asking| *asking == cookie)?;
    inner.outstanding += 1;
    Some(Counted(live.0))
}

/// All live ids on a channel, counted.
pub(crate) fn on_channel(channel: &Arc<ChannelObject>) -> Vec<Counted> {
    let table = table();
    let mut found = Vec::new();
    for live in table.iter().flat_map(|ids| ids.by_number.values()) {
        // SAFETY: it is in the table, which is locked.
        let mut inner = unsafe { &*live.0 }.inner();
        if Arc::ptr_eq(&inner.channel, channel) {
            inner.outstanding += 1;
            found.push(Counted(live.0));
        }
    }
    found
}

/// What a new id is made of.
pub(crate) struct Fresh {
    pub(crate) number: u64,
    pub(crate) channel: Arc<ChannelObject>,
    pub(crate) is_sync: bool,
    pub(crate) context: *mut c_void,
    pub(crate) ps: c_int,
    pub(crate) qp_type: c_int,
}

impl IdObject {
    /// Makes an id known, and gives its pointer.
    pub(crate) fn publish(fresh: Fresh) -> *mut IdObject {
        // SAFETY: pointers, integers and socket addresses, for all of which zero is a value.
        let mut c: rdma_cm_id = unsafe { std::mem::zeroed() };
        c.channel = fresh.channel.as_ptr();
        c.context = fresh.context;
        c.ps = fresh.ps;
        c.qp_type = fresh.qp_type;
        let inner = Inner {
            number: fresh.number,
            channel: fresh.channel,
            is_sync: fresh.is_sync,
            side: Side::Active,
            outstanding: 0,
            bound: false,
            listening: None,
            asking: None,
            path: None,
            routed: false,
            responder_resources: 0,
            initiator_depth: 0,
            remote_ece: ibv_ece::default(),
            local_ece: ibv_ece::default(),
            tos: 0,
            ack_timeout: None,
            reuse: false,
            v6_only: false,
            template: None,
            kept: None,
            joins: Vec::new(),
            next_join: 0,
            has_peer: false,
            busy: false,
            leaving: false,
            over: false,
        };
        let id = Box::into_raw(Box::new(IdObject {
            c: UnsafeCell::new(c),
            pid: std::process::id(),
            inner: Mutex::new(inner),
            acked: Condvar::new(),
        }));
        table().get_or_insert_default().by_number.insert(fresh.number, Live(id));
        id
    }

    /// The service has a new number for it.
    pub(crate) fn renumber(&self, number: u64) {
        let mut table = table();
        let (old, channel) = {
            let mut inner = self.inner();
            (std::mem::replace(&mut inner.number, number), Arc::clone(&inner.channel))
        };
        if let Some(ids) = table.as_mut()
            && let Some(live) = ids.by_number.remove(&old)
        {
            ids.by_number.insert(number, live);
        }
        // With the table locked: else its events had a number for a while that is of no live id, and were dropped. (Who has the
        // channel's lock never waits for the table's.)
        channel.renumber(old, number);
    }

    /// It waits under this cookie ([`done_asking`]).
    pub(crate) fn begin_asking(&self, cookie: u64) {
        let mut table = table();
        let by_cookie = &mut table.get_or_insert_default().by_cookie;
        if let Some(before) = self.inner().asking.replace(cookie) {
            by_cookie.remove(&before);
        }
        by_cookie.insert(cookie, Live(self));
    }

    /// It waits no more. Gives the cookie that it waited under.
    pub(crate) fn stop_asking(&self) -> Option<u64> {
        let mut table = table();
        let cookie = self.inner().asking.take()?;
        if let Some(ids) = table.as_mut() {
            ids.by_cookie.remove(&cookie);
        }
        Some(cookie)
    }

    /// Has the service do something about the id, which it knows by the number that `call` gets. If the service has crashed, the next
    /// one gets to know the id before.
    pub(crate) fn ask(&self, mut call: impl FnMut(u64) -> Call<()>) -> Call<()> {
        let channel = Arc::clone(&self.inner().channel);
        recover::if_ended(&channel)?;
        let number = self.number();
        let Err(refusal) = call(number) else { return Ok(()) };
        // It may have crashed just now, or another thread is bringing the id over.
        recover::channel(&channel)?;
        if self.number() == number { Err(refusal) } else { call(self.number()) }
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The structure, as C sees it.
    pub(crate) fn as_ptr(&self) -> *mut rdma_cm_id {
        self.c.get()
    }

    /// The id behind a C pointer; `EINVAL` for NULL, `EIO` in a forked child.
    ///
    /// # Safety
    ///
    /// NULL, or an id of this library that is not destroyed while the reference lives.
    pub(crate) unsafe fn of<'a>(pointer: *const rdma_cm_id) -> Call<&'a IdObject> {
        // SAFETY: NULL or live, by the contract.
        let pointer: *const IdObject = ptr::from_ref(unsafe { given(pointer, "the id") }?).cast();
        // SAFETY: by the contract it lies at the start of an object that lives.
        let object = unsafe { &*pointer };
        object.check_process()?;
        Ok(object)
    }

    /// Refuses the id of a parent process.
    fn check_process(&self) -> Call<()> {
        fork::check_process(self.pid, "id")
    }

    pub(crate) fn number(&self) -> u64 {
        self.inner().number
    }

    /// Is it for UD queue pairs?
    pub(crate) fn is_datagram(&self) -> bool {
        // SAFETY: the field is written when the id is made only.
        unsafe { (*self.as_ptr()).qp_type == QPT_UD }
    }

    /// An event that the library makes itself.
    pub(crate) fn raise(&self, event: u32, status: c_int) {
        self.push(|id| Queued::Local { id, event, status });
    }

    /// The event of a join, which takes effect when the program takes it.
    pub(crate) fn raise_joined(&self, join: u64) {
        self.push(|id| Queued::Joined { id, join });
    }

    fn push(&self, event: impl FnOnce(u64) -> Queued) {
        let (number, channel) = {
            let inner = self.inner();
            (inner.number, Arc::clone(&inner.channel))
        };
        channel.push(event(number));
    }

    /// Gives back the event that a synchronous call waited for.
    pub(crate) fn forget_event(&self) {
        let c = self.as_ptr();
        // SAFETY: of a synchronous id the field is the library's.
        let event = unsafe { std::mem::replace(&mut (*c).event, ptr::null_mut()) };
        if !event.is_null() {
            // SAFETY: it was put there by this library.
            unsafe { events::release(event) };
        }
    }

    /// At the end of a call: of a synchronous id waits for its event, and gives what came of it.
    pub(crate) fn complete(&self) -> Call<c_int> {
        let channel = {
            let inner = self.inner();
            if !inner.is_sync {
                return Ok(0);
            }
            Arc::clone(&inner.channel)
        };
        self.forget_event();
        let came = events::wait(&channel)?;
        let c = self.as_ptr();
        // SAFETY: the event is live until it is released; the id's field is the library's.
        let (code, status) = unsafe {
            (*c).event = came;
            ((*came).event, (*came).status)
        };
        if status == 0 {
            return Ok(0);
        }
        let why = why_failed(self, code, status);
        let (errno, sentence) = why.unwrap_or_else(|| (status.abs(), format!("event {code} says {status}")));
        Err(Refusal::new(errno, sentence))
    }
}

/// What an event tells of a connection that did not come about.
pub(crate) fn why_failed(id: &IdObject, code: u32, status: c_int) -> Option<(c_int, String)> {
    // SAFETY: a field that is written before the id connects.
    let peer = unsafe { (*id.as_ptr()).route.addr.dst };
    why::failed(code, status, id.inner().side, addr::readable(&peer))
}

/// Makes an id (`rdma_create_id`); without a channel a synchronous one.
pub(crate) fn create(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: c_int,
    qp_type: c_int,
) -> Call<*mut IdObject> {
    let is_sync = channel.is_null();
    // SAFETY: by the contract of `rdma_create_id` the channel is a live one of this library.
    let channel = if is_sync { ChannelObject::open()? } else { unsafe { ChannelObject::of(channel) }? };
    let mut number = 0;
    let datagram = c_int::from(qp_type == QPT_UD);
    // SAFETY: an open channel; the place is ours.
    channel.ask(|service| unsafe { verbs::ferroce_cm_create_id(service, ps as u16, datagram, &raw mut number) })?;
    Ok(IdObject::publish(Fresh { number, channel, is_sync, context, ps, qp_type }))
}

/// Checks that a port space and a queue pair type go together.
pub(crate) fn check_space(ps: c_int, qp_type: c_int) -> Call<()> {
    if !matches!(ps, PS_TCP | PS_UDP | PS_IB | PS_IPOIB) {
        return Err(Refusal::new(libc::EPROTONOSUPPORT, format!("unknown port space {ps:#x}")));
    }
    match qp_type {
        QPT_RC | QPT_UC | QPT_UD => Ok(()),
        QPT_XRC_SEND | QPT_XRC_RECV if ps == PS_IB => Ok(()),
        QPT_XRC_SEND | QPT_XRC_RECV => {
            Err(Refusal::invalid("XRC queue pairs connect in the port space RDMA_PS_IB only (ai_port_space)"))
        }
        other => {
            let what =
                format!("queue pair type {other} cannot be connected; use IBV_QPT_RC, UC, UD, XRC_SEND or XRC_RECV");
            Err(Refusal::new(libc::EOPNOTSUPP, what))
        }
    }
}

rdma! {
    /// `rdma_create_id(3)`.
    fn rdma_create_id(
        channel: *mut rdma_event_channel,
        id: *mut *mut rdma_cm_id,
        context: *mut c_void,
        ps: c_int,
    ) -> c_int {
        let qp_type = if matches!(ps, PS_UDP | PS_IPOIB) { QPT_UD } else { QPT_RC };
        check_space(ps, qp_type)?;
        let made = create(channel, context, ps, qp_type)?.cast();
        // SAFETY: by the contract of the function.
        unsafe { put(id, made) }?;
        Ok(0)
    }

    /// `rdma_destroy_id(3)`: waits until the program has acknowledged all events of the id.
    fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        let number = object.number();
        // SAFETY: a plain call. What fails here (the service has just crashed) is gone as well.
        unsafe { verbs::ferroce_cm_destroy(number) };
        if let Some(ids) = table().as_mut() {
            // Not the number from above: another thread may be bringing the channel's ids over to another service.
            ids.by_number.remove(&object.number());
        }
        if let Some(cookie) = object.stop_asking() {
            // SAFETY: a plain call. If it is too late, the table does not know the id any more, or the wait below is for the event.
            unsafe { verbs::ferroce_cm_neighbour_cancel(cookie) };
        }
        object.forget_event();
        let channel = Arc::clone(&object.inner().channel);
        channel.forget_stale();
        let mut inner = object.inner();
        while inner.outstanding > 0 {
            inner = object.acked.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        let last = inner.number;
        drop(inner);
        if last != number {
            // SAFETY: as above.
            unsafe { verbs::ferroce_cm_destroy(last) };
        }
        // SAFETY: the program gives it up, no event is left, and the table does not know it: nobody uses it any more.
        let object = unsafe { Box::from_raw(id.cast::<IdObject>()) };
        // SAFETY: the record was made by this library.
        free(unsafe { (*object.as_ptr()).route.path_rec });
        Ok(0)
    }

    /// `rdma_migrate_id(3)`: to another channel; without one the id becomes synchronous.
    fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
        // SAFETY: by the contract of the function.
        let object = unsafe { IdObject::of(id) }?;
        let is_sync = channel.is_null();
        // SAFETY: by the contract of the function.
        let to = if is_sync { ChannelObject::open()? } else { unsafe { ChannelObject::of(channel) }? };
        migrate(object, to, is_sync)?;
        Ok(0)
    }
}

/// Moves an id with the events that wait for it.
pub(crate) fn migrate(object: &IdObject, to: Arc<ChannelObject>, is_sync: bool) -> Call<()> {
    recover::if_ended(&to)?;
    object.ask(|number| {
        // SAFETY: an open channel.
        check(to.with_service(|service| unsafe { verbs::ferroce_cm_migrate(number, service) }))
    })?;
    let number = object.number();
    let from = {
        let mut inner = object.inner();
        inner.is_sync = is_sync;
        std::mem::replace(&mut inner.channel, Arc::clone(&to))
    };
    // SAFETY: the program does not use the id meanwhile, by the contract of `rdma_migrate_id`.
    unsafe { (*object.as_ptr()).channel = to.as_ptr() };
    // Those that were sent before the service knew come before all others.
    to.adopt_events(from.take_events_of(number));
    // Events of destroyed ids may have waited behind them.
    from.drop_stale();
    Ok(())
}

rdma! {
    /// `rdma_get_remote_ece(3)`: what the peer's driver proposes.
    fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
        // SAFETY: by the contract of the function.
        let remote = unsafe { IdObject::of(id) }?.inner().remote_ece;
        // SAFETY: as above.
        unsafe { put(ece, remote) }?;
        Ok(0)
    }

    /// `rdma_set_local_ece(3)`: what the next message to the peer proposes.
    fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
        // SAFETY: by the contract of the function.
        let ece = *unsafe { given(ece, "ece") }?;
        if ece.comp_mask != 0 {
            return Err(Refusal::invalid("ece.comp_mask is not 0"));
        }
        // SAFETY: by the contract of the function.
        unsafe { IdObject::of(id) }?.inner().local_ece = ece;
        Ok(0)
    }

    /// `rdma_ack_cm_event(3)`.
    fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
        // SAFETY: by the contract of the function.
        unsafe { given(event, "the event") }?;
        // SAFETY: by the contract of the function a live event of this library.
        unsafe { events::owner(event) }.check_process()?;
        // SAFETY: by the contract of the function an event of this library, acknowledged once.
        unsafe { events::release(event) };
        Ok(0)
    }
}

/// The protection domain of [`Inner::template`].
pub(crate) fn template_pd(pd: usize) -> *mut ibv_pd {
    pd as *mut ibv_pd
}
