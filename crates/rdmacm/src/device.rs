//! Devices: each is opened once in a process, with one protection domain that all ids share.

use std::ffi::{CStr, c_char, c_int};
use std::mem::offset_of;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferroce_abi::consts::xrcd_init;
use ferroce_abi::{ibv_context, ibv_device, ibv_pd, ibv_xrcd, ibv_xrcd_init_attr, verbs_context};

use crate::entry::{Call, Refusal, calloc, free, put, rdma};
use crate::{fork, verbs};

type OpenXrcd = unsafe extern "C" fn(*mut ibv_context, *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd;

/// An open device.
#[derive(Clone, Copy)]
pub(crate) struct Opened {
    device: *mut ibv_device,
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    /// The XRC domain that ids share; NULL until one needs it.
    xrcd: *mut ibv_xrcd,
}

// SAFETY: verbs may be called from any thread; the pointers are to objects that live as long as the process.
unsafe impl Send for Opened {}

/// Devices opened by a process. A forked child starts anew: its parent's are of no use to it.
struct Devices {
    pid: u32,
    opened: Vec<Opened>,
}

static DEVICES: Mutex<Devices> = Mutex::new(Devices { pid: 0, opened: Vec::new() });

fn devices() -> MutexGuard<'static, Devices> {
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let pid = std::process::id();
    if devices.pid != pid {
        *devices = Devices { pid, opened: Vec::new() };
    }
    devices
}

/// Locks the devices, while a thread forks.
pub(crate) fn hold() -> Box<dyn fork::Guard> {
    Box::new(DEVICES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The device of a name (with its NUL), opened.
pub(crate) fn named(name: &[c_char; 64]) -> Call<Opened> {
    if name[0] == 0 {
        return Err(Refusal::new(libc::ENODEV, "the address belongs to no RDMA device any more"));
    }
    // SAFETY: the name ends with a NUL.
    let device = unsafe { verbs::ferroce_cm_device(name.as_ptr()) };
    if device.is_null() { Err(Refusal::last()) } else { open(device) }
}

fn open(device: *mut ibv_device) -> Call<Opened> {
    let mut devices = devices();
    if let Some(known) = devices.opened.iter().find(|known| known.device == device) {
        return Ok(*known);
    }
    // SAFETY: a device of libibverbs.
    let context = unsafe { verbs::ibv_open_device(device) };
    if context.is_null() {
        return Err(Refusal::last());
    }
    // SAFETY: just opened.
    let pd = unsafe { verbs::ibv_alloc_pd(context) };
    if pd.is_null() {
        return Err(Refusal::last());
    }
    let opened = Opened { device, context, pd, xrcd: ptr::null_mut() };
    devices.opened.push(opened);
    Ok(opened)
}

/// The protection domain that ids on a context share.
pub(crate) fn pd_of(context: *mut ibv_context) -> *mut ibv_pd {
    devices().opened.iter().find(|known| known.context == context).map_or(ptr::null_mut(), |known| known.pd)
}

/// The XRC domain that ids on a context share, opened for the first.
pub(crate) fn xrcd_of(context: *mut ibv_context) -> Call<*mut ibv_xrcd> {
    let mut devices = devices();
    let known = devices
        .opened
        .iter_mut()
        .find(|known| known.context == context)
        .ok_or_else(|| Refusal::new(libc::ENODEV, "the device was not opened by librdmacm"))?;
    if known.xrcd.is_null() {
        let mut attr = ibv_xrcd_init_attr { comp_mask: xrcd_init::ALL, fd: -1, oflags: libc::O_CREAT };
        let open = verbs::slot::<OpenXrcd>(context, offset_of!(verbs_context, open_xrcd))
            .ok_or_else(|| Refusal::new(libc::EOPNOTSUPP, "the device has no XRC domains"))?;
        // SAFETY: a function of that type; an open context, and attributes of ours.
        known.xrcd = unsafe { open(context, &raw mut attr) };
    }
    if known.xrcd.is_null() { Err(Refusal::last()) } else { Ok(known.xrcd) }
}

rdma! {
    /// `rdma_get_devices(3)`: a NULL-terminated array of open contexts.
    fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context {
        let mut count = 0;
        // SAFETY: the place is ours.
        let list = unsafe { verbs::ibv_get_device_list(&raw mut count) };
        if list.is_null() {
            return Err(Refusal::last());
        }
        let found = (0..count as usize)
            // SAFETY: the list has `count` devices.
            .map(|at| open(unsafe { *list.add(at) }).map(|opened| opened.context))
            .collect::<Call<Vec<_>>>();
        // SAFETY: the list that was just made; devices outlive it.
        unsafe { verbs::ibv_free_device_list(list) };
        let found = found?;
        if found.is_empty() {
            return Err(Refusal::new(libc::ENODEV, "there is no RDMA device; `ferroce devices` says why"));
        }
        let contexts = calloc::<*mut ibv_context>(found.len() + 1)?;
        for (at, context) in found.iter().enumerate() {
            // SAFETY: the array has one element more than there are devices.
            unsafe { contexts.add(at).write(*context) };
        }
        if !num_devices.is_null() {
            // SAFETY: by the contract of the function.
            unsafe { put(num_devices, found.len() as c_int) }?;
        }
        Ok(contexts)
    }

    /// `rdma_free_devices(3)`: the contexts stay open.
    fn rdma_free_devices(list: *mut *mut ibv_context) -> () {
        free(list);
        Ok(())
    }
}

/// Name of an event, for `rdma_event_str(3)`.
const EVENTS: [&CStr; 16] = [
    c"RDMA_CM_EVENT_ADDR_RESOLVED",
    c"RDMA_CM_EVENT_ADDR_ERROR",
    c"RDMA_CM_EVENT_ROUTE_RESOLVED",
    c"RDMA_CM_EVENT_ROUTE_ERROR",
    c"RDMA_CM_EVENT_CONNECT_REQUEST",
    c"RDMA_CM_EVENT_CONNECT_RESPONSE",
    c"RDMA_CM_EVENT_CONNECT_ERROR",
    c"RDMA_CM_EVENT_UNREACHABLE",
    c"RDMA_CM_EVENT_REJECTED",
    c"RDMA_CM_EVENT_ESTABLISHED",
    c"RDMA_CM_EVENT_DISCONNECTED",
    c"RDMA_CM_EVENT_DEVICE_REMOVAL",
    c"RDMA_CM_EVENT_MULTICAST_JOIN",
    c"RDMA_CM_EVENT_MULTICAST_ERROR",
    c"RDMA_CM_EVENT_ADDR_CHANGE",
    c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
];

rdma! {
    /// `rdma_event_str(3)`.
    fn rdma_event_str(event: u32) -> *const c_char {
        Ok(EVENTS.get(event as usize).copied().unwrap_or(c"UNKNOWN EVENT").as_ptr())
    }
}
