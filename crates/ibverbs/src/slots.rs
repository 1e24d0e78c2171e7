//! Slots of the dispatch tables whose verbs Ferroce does not have: each refuses with `EOPNOTSUPP` and says so.
//!
//! An empty slot would give the program the same error, but nobody would learn which verb it was that the program wanted.

use std::ffi::{c_int, c_void};

use crate::abi::Slot;
use crate::entry::{Pointer, Refusal, Status, slot};

/// A slot of a function that returns `int`, called with whatever arguments its verb has.
pub(crate) const fn status(function: unsafe extern "C" fn() -> c_int) -> Slot {
    // SAFETY: both are plain C function pointers. The caller passes arguments that the callee does not look at and, in the C calling
    // conventions of x86-64 and AArch64, need not know of; it reads an `int` back, which the callee returns.
    Some(unsafe { std::mem::transmute::<unsafe extern "C" fn() -> c_int, unsafe extern "C" fn()>(function) })
}

/// A slot of a function that returns a pointer.
pub(crate) const fn pointer(function: unsafe extern "C" fn() -> *mut c_void) -> Slot {
    // SAFETY: as in `status`.
    Some(unsafe { std::mem::transmute::<unsafe extern "C" fn() -> *mut c_void, unsafe extern "C" fn()>(function) })
}

/// Refusing slots: the verb, and what it would need.
macro_rules! refusing {
    ($($name:ident as $verb:literal -> $convention:ty: $why:literal;)*) => {
        $(
            slot! {
                fn $name as $verb () -> $convention {
                    Err(Refusal::unsupported($why))
                }
            }
        )*
    };
}

refusing! {
    dealloc_dmah as "ibv_dealloc_dmah" -> Status: "DMA handles need PCIe hardware";
    alloc_dmah as "ibv_alloc_dmah" -> Pointer<c_void>: "DMA handles need PCIe hardware";
    modify_flow_action_esp as "ibv_modify_flow_action_esp" -> Status: "IPsec offload needs hardware";
    destroy_flow_action as "ibv_destroy_flow_action" -> Status: "flow actions need hardware";
    create_flow_action_esp as "ibv_create_flow_action_esp" -> Pointer<c_void>: "IPsec offload needs hardware";
}
