//! Asynchronous events of a context.

use std::ffi::{c_int, c_void};
use std::os::fd::RawFd;

use ferroce::AsyncEvent;

use crate::abi::{ibv_async_element, ibv_async_event, ibv_context, ibv_cq, ibv_qp, ibv_srq, ibv_wq};
use crate::cancel::{self, Step, Steps};
use crate::channel::slept;
use crate::context::ContextObject;
use crate::entry::{MinusOne, Refusal, Verb, Void, enter, verb};
use crate::events::acknowledged;

/// Whose acknowledgement counter an event type counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Cq,
    Qp,
    Srq,
    Wq,
    Port,
}

impl Kind {
    /// By the value of `enum ibv_event_type`.
    fn of(event_type: u32) -> Kind {
        match event_type {
            // CQ_ERR
            0 => Kind::Cq,
            // QP_FATAL, QP_REQ_ERR, QP_ACCESS_ERR, COMM_EST, SQ_DRAINED, PATH_MIG, PATH_MIG_ERR; QP_LAST_WQE_REACHED
            1..=7 | 16 => Kind::Qp,
            // SRQ_ERR, SRQ_LIMIT_REACHED
            14 | 15 => Kind::Srq,
            // WQ_FATAL
            19 => Kind::Wq,
            _ => Kind::Port,
        }
    }
}

/// Takes the next event, or gives the descriptor to sleep on.
///
/// # Safety
///
/// The contract of `ibv_get_async_event`.
unsafe fn next(context: *mut ibv_context, event: *mut ibv_async_event) -> Verb<Step<RawFd>> {
    // SAFETY: by the contract above.
    let context = unsafe { ContextObject::of(context) }?;
    if event.is_null() {
        return Err(Refusal::invalid("event is NULL"));
    }
    let Some(next) = context.context().try_async_event()? else {
        return Ok(Step::Sleep(context.context().async_fd()));
    };
    let element = match next {
        // The cookie of an object is its address; the object cannot be freed before this event is acknowledged.
        AsyncEvent::Qp { cookie, .. } | AsyncEvent::Cq { cookie } | AsyncEvent::Srq { cookie, .. } => {
            ibv_async_element { object: cookie as *mut c_void }
        }
        AsyncEvent::Port { port, .. } => port_element(port),
        AsyncEvent::DeviceFatal => port_element(0),
    };
    // SAFETY: not NULL, so it points to a structure of the caller.
    unsafe { event.write(ibv_async_event { element, event_type: next.event_type() }) };
    Ok(Step::Done)
}

/// `ibv_get_async_event(3)`: blocks unless the program made the descriptor non-blocking. A cancellation point, as read(2) is.
///
/// # Safety
///
/// The contract of the C function: pointers are NULL or point to live objects of their type.
// SAFETY: the name is the C library's own, and is defined once: symbols.in lists it, the link would report a second.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    const NAME: &str = "ibv_get_async_event";
    // SAFETY: the caller is the program.
    unsafe { cancel::point() };
    loop {
        // SAFETY: by the contract above.
        match enter::<Steps<_>>(NAME, || unsafe { next(context, event) }) {
            None => return -1,
            Some(Step::Done) => return 0,
            Some(Step::Sleep(fd)) => {
                let mut polled = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
                // SAFETY: as above; this frame holds nothing.
                let errno = unsafe { cancel::sleep(&mut polled, None) };
                let go_on = enter::<MinusOne>(NAME, || slept(errno));
                if go_on != 0 {
                    return go_on;
                }
            }
        }
    }
}

verb! {
    /// `ibv_ack_async_event(3)`.
    fn ibv_ack_async_event(event: *mut ibv_async_event) -> Void {
        if event.is_null() {
            return Err(Refusal::invalid("event is NULL"));
        }
        // SAFETY: not NULL, so it points to a structure of the caller.
        let ibv_async_event { element, event_type } = unsafe { event.read() };
        // SAFETY: the union's members share their memory; for events of ports the pointer is not used.
        let object = unsafe { element.object };
        if object.is_null() {
            return Ok(());
        }
        // SAFETY: the event type tells what the pointer points to, and the object is alive until this very acknowledgement.
        unsafe {
            match Kind::of(event_type) {
                Kind::Cq => acknowledged!(object.cast::<ibv_cq>(), async_events_completed).add(1),
                Kind::Qp => acknowledged!(object.cast::<ibv_qp>(), events_completed).add(1),
                Kind::Srq => acknowledged!(object.cast::<ibv_srq>(), events_completed).add(1),
                Kind::Wq => acknowledged!(object.cast::<ibv_wq>(), events_completed).add(1),
                Kind::Port => {}
            }
        }
        Ok(())
    }
}

/// The union with a port number in it, the rest zero.
fn port_element(port: u8) -> ibv_async_element {
    let mut element = ibv_async_element { object: std::ptr::null_mut() };
    element.port_num = port.into();
    element
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_counts_in_the_right_object() {
        assert_eq!(Kind::of(0), Kind::Cq);
        for event in (1..=7).chain([16]) {
            assert_eq!(Kind::of(event), Kind::Qp, "{event}");
        }
        assert_eq!(Kind::of(14), Kind::Srq);
        assert_eq!(Kind::of(15), Kind::Srq);
        assert_eq!(Kind::of(19), Kind::Wq);
        for event in [8, 9, 10, 11, 12, 13, 17, 18, 20, 1000] {
            assert_eq!(Kind::of(event), Kind::Port, "{event}");
        }
    }

    #[test]
    fn the_port_number_leaves_no_rubbish_behind_it() {
        // SAFETY: every bit pattern is a pointer.
        assert_eq!(unsafe { port_element(1).object } as usize, 1);
    }
}
