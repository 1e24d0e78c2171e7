//! Questions about a device and its port.

use std::ffi::{c_int, c_uint};
use std::ptr;

use crate::abi::{
    COMPAT_PORT_ATTR_SIZE, consts, consts::values, ibv_context, ibv_device_attr, ibv_device_attr_ex, ibv_gid,
    ibv_gid_entry, ibv_port_attr, ibv_query_device_ex_input, ibv_values_ex,
};
use crate::context::{ContextObject, ContextRef};
use crate::convert;
use crate::entry::{MinusOne, NegativeErrno, Refusal, Status, Verb, slot, verb};

/// Beyond the GID table, of which the first `used` entries are not free.
fn beyond(context: &ContextRef, index: i64, used: usize) -> Refusal {
    let name = context.device().name();
    let last = used.saturating_sub(1);
    Refusal::invalid(format!("GID index {index} does not exist: {name} has indices 0 to {last}, see `ferroce devices`"))
}

/// There is one port, number 1.
fn check_port(port: u32) -> Verb<()> {
    if port == 1 { Ok(()) } else { Err(Refusal::invalid(format!("port_num is {port}: the device has port 1 only"))) }
}

/// Copies what fits of `value` to a structure of `size` bytes, which may be an older or newer form, and clears the rest.
///
/// # Safety
///
/// `to` has room for `size` bytes, and `T` has no content beyond plain numbers.
unsafe fn fill<T: Copy>(to: *mut T, size: usize, value: &T) {
    let known = size.min(size_of::<T>());
    // SAFETY: by the contract above; source and destination are different objects.
    unsafe {
        ptr::write_bytes(to.cast::<u8>(), 0, size);
        ptr::copy_nonoverlapping(ptr::from_ref(value).cast::<u8>(), to.cast::<u8>(), known);
    }
}

/// One entry of the GID table.
fn gid_entry(context: &ContextRef, index: u32, ferroce: &ferroce::GidEntry) -> ibv_gid_entry {
    ibv_gid_entry {
        gid: ibv_gid { raw: ferroce.gid },
        gid_index: index,
        port_num: 1,
        gid_type: consts::GID_TYPE_ROCE_V2,
        ndev_ifindex: context.device().ifindex(),
    }
}

/// Smallest `struct ibv_gid_entry` there ever was.
const GID_ENTRY_SIZE: usize = size_of::<ibv_gid_entry>();

slot! {
    /// What the macro `ibv_query_port` calls: fills `size` bytes.
    fn query_port as "ibv_query_port" (
        context: *mut ibv_context,
        port_num: u8,
        attr: *mut ibv_port_attr,
        size: usize,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        check_port(port_num.into())?;
        if attr.is_null() || size < COMPAT_PORT_ATTR_SIZE {
            return Err(Refusal::invalid("port_attr is NULL or too small"));
        }
        // SAFETY: the caller has a structure of `size` bytes there.
        unsafe { fill(attr, size, &convert::port_attr(&context.device().port())) };
        Ok(())
    }

    /// `ibv_query_rt_values_ex(3)`: `comp_mask` says what is wanted, and then what is there. As with mlx4 and mlx5, `tv_nsec` holds
    /// the whole clock and `tv_sec` nothing: programs compare it with completion timestamps.
    fn query_rt_values as "ibv_query_rt_values_ex" (context: *mut ibv_context, values: *mut ibv_values_ex) -> Status {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        if values.is_null() {
            return Err(Refusal::invalid("values is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let wanted = unsafe { (*values).comp_mask };
        if wanted & values::RAW_CLOCK == 0 {
            return Err(Refusal::invalid(format!(
                "comp_mask {wanted:#x}: of the values there is only IBV_VALUES_MASK_RAW_CLOCK"
            )));
        }
        let raw_clock = libc::timespec { tv_sec: 0, tv_nsec: context.context().clock() as i64 };
        // SAFETY: as above.
        unsafe { ptr::write(values, ibv_values_ex { comp_mask: values::RAW_CLOCK, raw_clock }) };
        Ok(())
    }

    /// `ibv_query_device_ex(3)`: fills `size` bytes.
    fn query_device_ex as "ibv_query_device_ex" (
        context: *mut ibv_context,
        input: *const ibv_query_device_ex_input,
        attr: *mut ibv_device_attr_ex,
        size: usize,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        // SAFETY: a pointer that is not NULL points to a structure of the caller.
        if !input.is_null() && unsafe { (*input).comp_mask } != 0 {
            return Err(Refusal::invalid("ibv_query_device_ex_input.comp_mask has unknown bits"));
        }
        if attr.is_null() || size < size_of::<ibv_device_attr>() {
            return Err(Refusal::invalid("attr is NULL or too small"));
        }
        // SAFETY: the caller has a structure of `size` bytes there.
        unsafe { fill(attr, size, &convert::device_attr_ex(context.device())) };
        Ok(())
    }
}

verb! {
    /// `ibv_query_device(3)`.
    fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> Status {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        if attr.is_null() {
            return Err(Refusal::invalid("device_attr is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        unsafe { attr.write(convert::device_attr(context.device())) };
        Ok(())
    }

    /// The function behind the macro `ibv_query_port`, for programs of the time before the macro: writes 48 bytes and not one more.
    fn ibv_query_port(context: *mut ibv_context, port_num: u8, attr: *mut ibv_port_attr) -> Status {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        check_port(port_num.into())?;
        if attr.is_null() {
            return Err(Refusal::invalid("port_attr is NULL"));
        }
        // SAFETY: the caller has at least the compatible form there.
        unsafe { fill(attr, COMPAT_PORT_ATTR_SIZE, &convert::port_attr(&context.device().port())) };
        Ok(())
    }

    /// `ibv_query_gid(3)`. A free slot of the table is all zero, as the kernel has it.
    fn ibv_query_gid(context: *mut ibv_context, port_num: u8, index: c_int, gid: *mut ibv_gid) -> MinusOne {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        check_port(port_num.into())?;
        if gid.is_null() {
            return Err(Refusal::invalid("gid is NULL"));
        }
        let gids = context.device().gids();
        let known = usize::try_from(index).ok().filter(|index| *index < convert::gid_table_len(gids.len() as u32) as usize);
        let known = known.ok_or_else(|| beyond(&context, index.into(), gids.len()))?;
        let raw = gids.get(known).map_or([0; 16], |entry| entry.gid);
        // SAFETY: not NULL, so it points to a GID of the caller.
        unsafe { gid.write(ibv_gid { raw }) };
        Ok(0)
    }

    /// What `ibv_query_gid_ex` calls: fills `size` bytes. `ENODATA` for a free entry.
    fn _ibv_query_gid_ex(
        context: *mut ibv_context,
        port_num: u32,
        index: u32,
        entry: *mut ibv_gid_entry,
        flags: u32,
        size: usize,
    ) -> Status {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        check_port(port_num)?;
        if flags != 0 {
            return Err(Refusal::invalid(format!("flags {flags:#x} are unknown")));
        }
        if entry.is_null() || size < GID_ENTRY_SIZE {
            return Err(Refusal::invalid("entry is NULL or too small"));
        }
        let gids = context.device().gids();
        if index >= convert::gid_table_len(gids.len() as u32) {
            return Err(beyond(&context, index.into(), gids.len()));
        }
        // Programs find the free entries by this error.
        let found = gids.get(index as usize).ok_or_else(|| Refusal::routine(libc::ENODATA, "the entry is free"))?;
        // SAFETY: the caller has an entry of `size` bytes there.
        unsafe { fill(entry, size, &gid_entry(&context, index, found)) };
        Ok(())
    }

    /// What `ibv_query_gid_table` calls: an array whose elements are `size` bytes apart. Gives the number of entries, or the negated
    /// error number.
    fn _ibv_query_gid_table(
        context: *mut ibv_context,
        entries: *mut ibv_gid_entry,
        max_entries: usize,
        flags: u32,
        size: usize,
    ) -> NegativeErrno {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        if flags != 0 {
            return Err(Refusal::invalid(format!("flags {flags:#x} are unknown")));
        }
        if entries.is_null() || size < GID_ENTRY_SIZE {
            return Err(Refusal::invalid("entries is NULL or its elements are too small"));
        }
        let gids = context.device().gids();
        if max_entries < gids.len() {
            return Err(Refusal::invalid(format!("max_entries is {max_entries}: the table has {} entries", gids.len())));
        }
        for (index, gid) in gids.iter().enumerate() {
            // SAFETY: the caller has `max_entries` elements of `size` bytes there, and the index is below that.
            unsafe { fill(entries.byte_add(index * size), size, &gid_entry(&context, index as u32, gid)) };
        }
        Ok(gids.len())
    }

    /// Private: the GID type as sysfs has it (0: IB or RoCE v1, 1: RoCE v2). `ibv_devinfo` prints it.
    fn ibv_query_gid_type(context: *mut ibv_context, port_num: u8, index: c_uint, kind: *mut u32) -> MinusOne {
        // SAFETY: by the contract of the verb.
        let context = unsafe { ContextObject::of(context) }?;
        check_port(port_num.into())?;
        if kind.is_null() {
            return Err(Refusal::invalid("type is NULL"));
        }
        context.device().gid(index).map_err(|error| Refusal::new(libc::EINVAL, error.to_string()))?;
        // SAFETY: not NULL, so it points to an enumeration of the caller.
        unsafe { *kind = consts::GID_TYPE_SYSFS_ROCE_V2 };
        Ok(0)
    }

    /// `ibv_query_pkey(3)`: big-endian. The table has one entry, the default partition.
    fn ibv_query_pkey(context: *mut ibv_context, port_num: u8, index: c_int, pkey: *mut u16) -> MinusOne {
        // SAFETY: by the contract of the verb.
        unsafe { ContextObject::of(context) }?;
        check_port(port_num.into())?;
        if index != 0 || pkey.is_null() {
            return Err(Refusal::invalid(format!("P_Key index {index}: the table has one entry, or pkey is NULL")));
        }
        // SAFETY: not NULL, so it points to a number of the caller.
        unsafe { *pkey = consts::PKEY_DEFAULT.to_be() };
        Ok(0)
    }

    /// `ibv_get_pkey_index(3)`. The top bit, which tells full members from limited ones, does not matter for the partition.
    fn ibv_get_pkey_index(context: *mut ibv_context, port_num: u8, pkey: u16) -> MinusOne {
        // SAFETY: by the contract of the verb.
        unsafe { ContextObject::of(context) }?;
        check_port(port_num.into())?;
        if u16::from_be(pkey) != consts::PKEY_DEFAULT {
            return Err(Refusal::new(libc::EINVAL, format!("P_Key {:#06x} is not in the table; only 0xffff is", u16::from_be(pkey))));
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_structures_get_a_prefix_and_newer_ones_zeroes() {
        let mut room = [0xa5u8; 16];
        // SAFETY: 2 bytes of 16.
        unsafe { fill(room.as_mut_ptr().cast::<[u8; 4]>(), 2, &[1, 2, 3, 4]) };
        assert_eq!(room[..4], [1, 2, 0xa5, 0xa5]);
        // SAFETY: 8 bytes of 16.
        unsafe { fill(room.as_mut_ptr().cast::<[u8; 4]>(), 8, &[1, 2, 3, 4]) };
        assert_eq!(room[..9], [1, 2, 3, 4, 0, 0, 0, 0, 0xa5]);
    }
}
