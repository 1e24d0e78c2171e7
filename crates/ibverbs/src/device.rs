//! Devices: the list, names, GUIDs, opening.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use ferroce::sync::Mutex;

use crate::abi::{consts, ibv_context, ibv_device, verbs_device, verbs_device_ops};
use crate::context::ContextObject;
use crate::entry::{MinusOne, Plain, Pointer, Refusal, Verb, Void, verb};
use crate::refusal;
use crate::start::{self, Held};

/// A device as C sees it. Made once for each Ferroce device of the process and never freed: programs compare device pointers, and
/// keep them after they freed the list.
#[repr(C)]
pub struct DeviceObject {
    c: verbs_device,
    device: Arc<ferroce::Device>,
}

// SAFETY: the C part is written once, before the object is shared, and only read afterwards.
unsafe impl Sync for DeviceObject {}
// SAFETY: as above; nothing in it belongs to a thread.
unsafe impl Send for DeviceObject {}

/// Named like the table of a provider so that vendor libraries, which compare the pointer with their own, read valid memory.
struct Provider(verbs_device_ops);
// SAFETY: immutable.
unsafe impl Sync for Provider {}
static PROVIDER: Provider = Provider(verbs_device_ops { name: c"ferroce".as_ptr(), rest: [0; 31] });

static DEVICES: Mutex<Vec<&'static DeviceObject>> = Mutex::new(Vec::new());

impl DeviceObject {
    /// The C object of a Ferroce device, the same each time.
    pub(crate) fn intern(device: Arc<ferroce::Device>) -> &'static DeviceObject {
        let mut devices = DEVICES.lock();
        if let Some(known) = devices.iter().find(|known| Arc::ptr_eq(&known.device, &device)) {
            return known;
        }
        let object: &'static DeviceObject = Box::leak(Box::new(DeviceObject::new(device)));
        devices.push(object);
        object
    }

    fn new(device: Arc<ferroce::Device>) -> DeviceObject {
        let name = device.name().to_owned();
        let uverbs = format!("uverbs{}", device.index());
        DeviceObject {
            c: verbs_device {
                device: ibv_device {
                    _ops: [ptr::null(); 2],
                    node_type: consts::NODE_CA,
                    transport_type: consts::TRANSPORT_IB,
                    name: c_chars(&name),
                    dev_name: c_chars(&uverbs),
                    dev_path: c_chars(&format!("/sys/class/infiniband_verbs/{uverbs}")),
                    ibdev_path: c_chars(&format!("/sys/class/infiniband/{name}")),
                },
                ops: &PROVIDER.0,
                refcount: 1,
                entry: [ptr::null_mut(); 2],
                sysfs: ptr::null_mut(),
                core_support: 0,
            },
            device,
        }
    }

    /// The device behind a C pointer; `EINVAL` for one that this library never gave out.
    pub(crate) fn of(pointer: *const ibv_device) -> Verb<&'static DeviceObject> {
        DEVICES
            .lock()
            .iter()
            .find(|known| ptr::eq(known.as_ptr(), pointer))
            .copied()
            .ok_or_else(|| Refusal::invalid("device is not from ibv_get_device_list"))
    }

    /// The pointer for C.
    pub(crate) fn as_ptr(&self) -> *mut ibv_device {
        (&raw const self.c.device).cast_mut()
    }

    /// The Ferroce device.
    pub(crate) fn device(&self) -> &Arc<ferroce::Device> {
        &self.device
    }
}

/// Keeps the list of devices consistent across a fork.
pub(crate) fn hold() -> Held {
    Box::new(DEVICES.lock())
}

/// Text as a C array: cut to leave room for the terminator.
pub(crate) fn c_chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut chars = [0; N];
    for (to, from) in chars[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
    chars
}

verb! {
    /// `ibv_get_device_list(3)`: a NULL-terminated array. The devices stay valid after the array is freed.
    fn ibv_get_device_list(num_devices: *mut c_int) -> Pointer<*mut ibv_device> {
        start::start();
        let devices = match ferroce::devices() {
            Ok(devices) => devices.into_iter().map(DeviceObject::intern).collect(),
            // An empty list is how verbs says so; the reason goes to the log.
            Err(error) if error.errno() == libc::ENODEV => {
                refusal::tell("ibv_get_device_list", &error.into());
                Vec::new()
            }
            Err(error) => return Err(error.into()),
        };
        // SAFETY: a plain allocation of pointers, released by ibv_free_device_list with `free`.
        let list = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_device>()) }.cast::<*mut ibv_device>();
        if list.is_null() {
            return Err(Refusal::new(libc::ENOMEM, "no memory for the device list"));
        }
        for (at, device) in devices.iter().enumerate() {
            // SAFETY: the array has one element more than there are devices.
            unsafe { list.add(at).write(device.as_ptr()) };
        }
        if !num_devices.is_null() {
            // SAFETY: not NULL, so it points to an int of the caller.
            unsafe { *num_devices = devices.len() as c_int };
        }
        Ok(list)
    }

    /// `ibv_free_device_list(3)`.
    fn ibv_free_device_list(list: *mut *mut ibv_device) -> Void {
        // SAFETY: NULL or an array of ibv_get_device_list, which is plain `calloc` memory.
        unsafe { libc::free(list.cast::<c_void>()) };
        Ok(())
    }

    /// `ibv_open_device(3)`.
    fn ibv_open_device(device: *mut ibv_device) -> Pointer<ibv_context> {
        let device = DeviceObject::of(device)?;
        Ok(ContextObject::open(device)?.publish())
    }

    /// `ibv_get_device_guid(3)`: big-endian; 0 for no device of ours.
    fn ibv_get_device_guid(device: *mut ibv_device) -> Plain<u64> {
        Ok(DeviceObject::of(device)?.device().guid().to_be())
    }

    /// `ibv_get_device_name(3)`: the public field, whoever filled the structure in. Test suites show devices of their own making.
    fn ibv_get_device_name(device: *mut ibv_device) -> Pointer<c_char> {
        if device.is_null() {
            return Err(Refusal::invalid("device is NULL"));
        }
        // SAFETY: not NULL, so it points to an ibv_device that lives as long as the caller says. Only the field's address is taken.
        Ok(unsafe { &raw mut (*device).name }.cast())
    }

    /// `ibv_get_device_index(3)`.
    fn ibv_get_device_index(device: *mut ibv_device) -> MinusOne {
        Ok(DeviceObject::of(device)?.device().index() as c_int)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_and_terminated() {
        assert_eq!(c_chars::<4>("abcdef"), [97, 98, 99, 0]);
        assert_eq!(c_chars::<4>("a"), [97, 0, 0, 0]);
    }

    #[test]
    fn strangers_are_no_devices() {
        assert_eq!(DeviceObject::of(ptr::null()).err().unwrap().errno(), libc::EINVAL);
        assert_eq!(DeviceObject::of(16 as *const ibv_device).err().unwrap().errno(), libc::EINVAL);
    }
}
