//! Contexts: what `ibv_open_device` gives.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use crate::abi::{ibv_context, ibv_context_ops, verbs_context};
use crate::device::DeviceObject;
use crate::entry::{Pointer, Refusal, Status, Verb, verb};
use crate::handle::{Shared, handle_number};
use crate::registry::Registry;
use crate::{counters, cq, cq_ex, dm, domain, flow, mr, mw, post, qp, query, slots, srq, tags, wq, xrc};

/// An open device as C sees it. Objects made on it keep it, so that their `context` field stays valid even when a program closes the
/// device first.
#[repr(C)]
pub struct ContextObject {
    c: Shared<verbs_context>,
    context: Arc<ferroce::Context>,
    device: &'static DeviceObject,
    /// What `cmd_fd` shows. It is a file without content; its inode tells contexts apart when a program hands a duplicate to
    /// `ibv_import_device`.
    _command: OwnedFd,
    inode: (u64, u64),
}

/// Open contexts, for import.
pub(crate) static CONTEXTS: Registry<ContextObject> = Registry::new();

/// A counted reference to a context.
pub type ContextRef = Arc<ContextObject>;

/// "This `ibv_context` lies inside a `verbs_context`."
const ABI_IS_EXTENDED: *mut c_void = usize::MAX as *mut c_void;

impl ContextObject {
    /// Opens a device.
    pub(crate) fn open(device: &'static DeviceObject) -> Verb<ContextRef> {
        ContextObject::make(device, device.device().open()?)
    }

    fn make(device: &'static DeviceObject, context: Arc<ferroce::Context>) -> Verb<ContextRef> {
        let command = command_file()?;
        let inode = inode(command.as_fd())?;
        let vectors = std::thread::available_parallelism().map_or(1, |count| count.get());
        let c = Shared::new(dispatch(ibv_context {
            device: device.as_ptr(),
            ops: ops(),
            cmd_fd: command.as_raw_fd(),
            async_fd: context.async_fd(),
            num_comp_vectors: vectors as c_int,
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            abi_compat: ABI_IS_EXTENDED,
        }));
        let object = Arc::new(ContextObject { c, context, device, _command: command, inode });
        CONTEXTS.add(handle_number(), &object);
        Ok(object)
    }

    /// Hands one reference to C.
    pub(crate) fn publish(self: Arc<Self>) -> *mut ibv_context {
        Arc::into_raw(self).cast_mut().wrapping_byte_add(offset_of!(verbs_context, context)).cast()
    }

    /// The pointer for C.
    pub(crate) fn as_ptr(&self) -> *mut ibv_context {
        // SAFETY: the offset lies inside the structure.
        unsafe { &raw mut (*self.c.as_ptr()).context }
    }

    /// The context behind a C pointer, with a reference of its own; `EINVAL` for NULL.
    ///
    /// # Safety
    ///
    /// NULL, or from [`Self::publish`] and not closed.
    pub(crate) unsafe fn of(pointer: *const ibv_context) -> Verb<ContextRef> {
        let object = container(pointer)?;
        // SAFETY: by the contract the object is alive, and it was made by `Arc::into_raw`.
        unsafe {
            Arc::increment_strong_count(object);
            Ok(Arc::from_raw(object))
        }
    }

    /// The Ferroce context.
    pub(crate) fn context(&self) -> &Arc<ferroce::Context> {
        &self.context
    }

    /// The Ferroce device.
    pub(crate) fn device(&self) -> &Arc<ferroce::Device> {
        self.device.device()
    }

    /// Was the context inherited by a fork?
    pub(crate) fn is_stale(&self) -> bool {
        self.context.is_stale()
    }

    /// Number of completion vectors.
    pub(crate) fn vectors(&self) -> u32 {
        // SAFETY: the field is written at creation only.
        unsafe { (*self.as_ptr()).num_comp_vectors as u32 }
    }

    /// Runs `change` with the context's mutex held, which guards the `refcnt` of channels.
    pub(crate) fn locked<T>(&self, change: impl FnOnce() -> T) -> T {
        // SAFETY: the mutex was initialised at creation and lives as long as `self`.
        let mutex = unsafe { &raw mut (*self.as_ptr()).mutex };
        // SAFETY: as above; `change` cannot unwind past the unlock, it only touches integers.
        unsafe {
            libc::pthread_mutex_lock(mutex);
            let result = change();
            libc::pthread_mutex_unlock(mutex);
            result
        }
    }
}

/// A file of memory without content, with an inode of its own.
fn command_file() -> Verb<OwnedFd> {
    // SAFETY: a constant name and flag.
    let fd = unsafe { libc::memfd_create(c"ferroce-context".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(system("cannot make the context's descriptor"));
    }
    // SAFETY: a descriptor that was just made and is nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Device and inode number of an open file.
fn inode(fd: BorrowedFd<'_>) -> Verb<(u64, u64)> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: room for the structure; it is initialised if the call succeeds.
    unsafe {
        if libc::fstat(fd.as_raw_fd(), stat.as_mut_ptr()) != 0 {
            return Err(system("cannot look at the descriptor"));
        }
        let stat = stat.assume_init();
        Ok((stat.st_dev, stat.st_ino))
    }
}

/// A failed system call.
fn system(what: &str) -> Refusal {
    let error = std::io::Error::last_os_error();
    Refusal::new(error.raw_os_error().unwrap_or(libc::EIO), format!("{what}: {error}"))
}

/// The object around an `ibv_context`.
fn container(pointer: *const ibv_context) -> Verb<*const ContextObject> {
    if pointer.is_null() {
        return Err(Refusal::invalid("context is NULL"));
    }
    Ok(pointer.wrapping_byte_sub(offset_of!(verbs_context, context)).cast())
}

/// The table that inline functions find below the context.
fn dispatch(context: ibv_context) -> verbs_context {
    verbs_context {
        free_buf: None,
        alloc_buf: None,
        dm_export_dmabuf_fd: Some(dm::ibv_dm_export_dmabuf_fd),
        reg_mr_ex: None,
        dealloc_dmah: slots::status(slots::dealloc_dmah),
        alloc_dmah: slots::pointer(slots::alloc_dmah),
        query_port: Some(query::query_port),
        advise_mr: Some(mr::advise_mr),
        alloc_null_mr: Some(mr::alloc_null_mr),
        read_counters: Some(counters::read_counters),
        attach_counters_point_flow: Some(counters::attach_counters),
        create_counters: Some(counters::create_counters),
        destroy_counters: Some(counters::destroy_counters),
        reg_dm_mr: Some(dm::reg_dm_mr),
        alloc_dm: Some(dm::alloc_dm),
        free_dm: Some(dm::free_dm),
        modify_flow_action_esp: slots::status(slots::modify_flow_action_esp),
        destroy_flow_action: slots::status(slots::destroy_flow_action),
        create_flow_action_esp: slots::pointer(slots::create_flow_action_esp),
        modify_qp_rate_limit: Some(qp::modify_qp_rate_limit),
        alloc_parent_domain: Some(domain::alloc_parent_domain),
        dealloc_td: Some(domain::dealloc_td),
        alloc_td: Some(domain::alloc_td),
        modify_cq: Some(cq::modify_cq),
        post_srq_ops: Some(tags::post_srq_ops),
        destroy_rwq_ind_table: Some(wq::destroy_rwq_ind_table),
        create_rwq_ind_table: Some(wq::create_rwq_ind_table),
        destroy_wq: Some(wq::destroy_wq),
        modify_wq: Some(wq::modify_wq),
        create_wq: Some(wq::create_wq),
        query_rt_values: Some(query::query_rt_values),
        create_cq_ex: Some(cq_ex::create_cq_ex),
        priv_: ptr::null_mut(),
        query_device_ex: Some(query::query_device_ex),
        ibv_destroy_flow: Some(flow::destroy_flow),
        ABI_placeholder2: Some(flow::destroy_flow),
        ibv_create_flow: Some(flow::create_flow),
        ABI_placeholder1: Some(flow::create_flow),
        open_qp: Some(xrc::open_qp),
        create_qp_ex: Some(qp::create_qp_ex),
        get_srq_num: Some(xrc::get_srq_num),
        create_srq_ex: Some(srq::create_srq_ex),
        open_xrcd: Some(xrc::open_xrcd),
        close_xrcd: Some(xrc::close_xrcd),
        _ABI_placeholder3: 0,
        sz: size_of::<verbs_context>(),
        context,
    }
}

/// The table inside the context.
fn ops() -> ibv_context_ops {
    ibv_context_ops {
        _compat_query_device: Some(query::ibv_query_device),
        _compat_query_port: Some(query::ibv_query_port),
        _compat_alloc_pd: None,
        _compat_dealloc_pd: None,
        _compat_reg_mr: None,
        _compat_rereg_mr: None,
        _compat_dereg_mr: None,
        alloc_mw: Some(mw::alloc_mw),
        bind_mw: Some(mw::bind_mw),
        dealloc_mw: Some(mw::dealloc_mw),
        _compat_create_cq: None,
        poll_cq: Some(cq::poll_cq),
        req_notify_cq: Some(cq::req_notify_cq),
        _compat_cq_event: None,
        _compat_resize_cq: None,
        _compat_destroy_cq: None,
        _compat_create_srq: None,
        _compat_modify_srq: None,
        _compat_query_srq: None,
        _compat_destroy_srq: None,
        post_srq_recv: Some(post::post_srq_recv),
        _compat_create_qp: None,
        _compat_query_qp: None,
        _compat_modify_qp: None,
        _compat_destroy_qp: None,
        post_send: Some(post::post_send),
        post_recv: Some(post::post_recv),
        _compat_create_ah: None,
        _compat_destroy_ah: None,
        _compat_attach_mcast: None,
        _compat_detach_mcast: None,
        _compat_async_event: None,
    }
}

verb! {
    /// `ibv_import_device(3)`: another context on what a context of this process has open. `cmd_fd` is a duplicate of that
    /// context's; the imported context takes it over. Both read the same asynchronous events.
    fn ibv_import_device(cmd_fd: c_int) -> Pointer<ibv_context> {
        if cmd_fd < 0 {
            return Err(Refusal::new(libc::EBADF, "cmd_fd is negative"));
        }
        // SAFETY: the caller says that this is an open descriptor; if it is not, the system says so.
        let wanted = inode(unsafe { BorrowedFd::borrow_raw(cmd_fd) })?;
        let found = CONTEXTS.find(|context| context.inode == wanted).ok_or_else(|| {
            Refusal::unsupported("cmd_fd is of no context of this process; contexts of others cannot be imported, open the device here")
        })?;
        let context = ContextObject::make(found.device, found.context.clone())?;
        // SAFETY: from here on the descriptor is the library's; the context has one of its own.
        drop(unsafe { OwnedFd::from_raw_fd(cmd_fd) });
        Ok(context.publish())
    }

    /// `ibv_close_device(3)`. Objects that the program did not destroy keep working until it does.
    fn ibv_close_device(context: *mut ibv_context) -> Status {
        let object = container(context)?;
        // SAFETY: by contract this is the program's own reference, and it is given back once.
        drop(unsafe { Arc::from_raw(object) });
        Ok(())
    }
}
