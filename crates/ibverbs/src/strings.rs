//! Names of numbers, as programs print them. The texts are part of the interface: scripts read them.

use std::ffi::{CStr, c_char, c_int};

/// The text for `number`, or `unknown`.
fn name(texts: &[&'static CStr], number: c_int, unknown: &'static CStr) -> *const c_char {
    usize::try_from(number).ok().and_then(|at| texts.get(at)).copied().unwrap_or(unknown).as_ptr()
}

/// `enum ibv_node_type`; there is no 0.
const NODE_TYPES: [&CStr; 8] = [
    c"unknown",
    c"InfiniBand channel adapter",
    c"InfiniBand switch",
    c"InfiniBand router",
    c"iWARP NIC",
    c"usNIC",
    c"usNIC UDP",
    c"unspecified",
];

/// `enum ibv_port_state`.
const PORT_STATES: [&CStr; 6] = [c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"];

/// `enum ibv_event_type`.
const EVENT_TYPES: [&CStr; 20] = [
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
];

/// `enum ibv_wc_status`.
const WC_STATUSES: [&CStr; 24] = [
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
];

/// `enum ibv_wr_opcode`.
const WR_OPCODES: [&CStr; 16] = [
    c"RDMA_WRITE",
    c"RDMA_WRITE_WITH_IMM",
    c"SEND",
    c"SEND_WITH_IMM",
    c"RDMA_READ",
    c"ATOMIC_CMP_AND_SWP",
    c"ATOMIC_FETCH_AND_ADD",
    c"LOCAL_INV",
    c"BIND_MW",
    c"SEND_WITH_INV",
    c"TSO",
    c"DRIVER1",
    c"unknown",
    c"unknown",
    c"FLUSH",
    c"ATOMIC_WRITE",
];

/// `ibv_node_type_str(3)`.
// SAFETY: the name is the C library's own, and is defined once.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_node_type_str(node_type: c_int) -> *const c_char {
    name(&NODE_TYPES, node_type, c"unknown")
}

/// `ibv_port_state_str(3)`.
// SAFETY: the name is the C library's own, and is defined once.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_port_state_str(state: c_int) -> *const c_char {
    name(&PORT_STATES, state, c"invalid state")
}

/// `ibv_event_type_str(3)`.
// SAFETY: the name is the C library's own, and is defined once.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_event_type_str(event: c_int) -> *const c_char {
    name(&EVENT_TYPES, event, c"unknown")
}

/// The text of a completion status.
// SAFETY: the name is the C library's own, and is defined once.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_wc_status_str(status: c_int) -> *const c_char {
    name(&WC_STATUSES, status, c"unknown")
}

/// Private: the name of an opcode.
// SAFETY: the name is the C library's own, and is defined once.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_wr_opcode_str(opcode: c_int) -> *const c_char {
    name(&WR_OPCODES, opcode, c"unknown")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(pointer: *const c_char) -> &'static str {
        // SAFETY: every function here returns a constant.
        unsafe { CStr::from_ptr(pointer) }.to_str().unwrap()
    }

    #[test]
    fn the_ends_of_each_table() {
        assert_eq!(text(ibv_wc_status_str(0)), "success");
        assert_eq!(text(ibv_wc_status_str(12)), "transport retry counter exceeded");
        assert_eq!(text(ibv_wc_status_str(23)), "TM software rendezvous");
        assert_eq!(text(ibv_wc_status_str(24)), "unknown");
        assert_eq!(text(ibv_wc_status_str(-1)), "unknown");
        assert_eq!(text(ibv_port_state_str(4)), "active");
        assert_eq!(text(ibv_port_state_str(6)), "invalid state");
        assert_eq!(text(ibv_event_type_str(18)), "GID table change");
        assert_eq!(text(ibv_event_type_str(c_int::MIN)), "unknown");
        assert_eq!(text(ibv_node_type_str(1)), "InfiniBand channel adapter");
        assert_eq!(text(ibv_node_type_str(-1)), "unknown");
        assert_eq!(text(ibv_wr_opcode_str(15)), "ATOMIC_WRITE");
    }
}
