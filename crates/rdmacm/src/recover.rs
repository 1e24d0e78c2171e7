//! What an event channel does when the service has crashed: the next one is told of its ids. Established connections go on, idle ids
//! and listeners are made anew, and what was about to connect fails with UNREACHABLE and a
//! status of its own.

use std::ffi::c_int;
use std::sync::Arc;

use crate::abi::event;
use crate::channel::ChannelObject;
use crate::entry::{Call, check};
use crate::id::{self, IdObject};
use crate::why::SERVICE_ENDED;
use crate::{addr, verbs};

/// The same where it is not known whether the service has crashed.
pub(crate) fn if_ended(ended: &Arc<ChannelObject>) -> Call<()> {
    if ended.has_ended() { channel(ended) } else { Ok(()) }
}

/// Opens the channel anew and brings its ids over, if the service has crashed; returns when that is done, by whomever.
pub(crate) fn channel(channel: &Arc<ChannelObject>) -> Call<()> {
    let _turn = channel.recovering();
    if !channel.reopen()? {
        return Ok(());
    }
    for counted in id::on_channel(channel) {
        let object = counted.id();
        if restore(object, channel).is_err() {
            object.inner().kept = None;
            object.raise(event::DISCONNECTED, -libc::ECONNRESET);
        }
        counted.release();
    }
    Ok(())
}

fn restore(object: &IdObject, channel: &Arc<ChannelObject>) -> Call<()> {
    let (kept, leaving, over, busy, bound, listening) = {
        let inner = object.inner();
        (inner.kept.clone(), inner.leaving, inner.over, inner.busy, inner.bound, inner.listening)
    };
    let mut number = 0;
    if let Some(kept) = kept {
        let adopted = channel.with_service(|service| {
            // SAFETY: an open channel, what `ferroce_cm_keep` wrote, and a place of ours.
            unsafe { verbs::ferroce_cm_adopt(service, &raw const *kept, &raw mut number) }
        });
        check(adopted)?;
        object.renumber(number);
        if leaving {
            // The service that was asked to end it is gone, and may not have told the peer, nor us of its answer.
            // SAFETY: a plain call.
            check(unsafe { verbs::ferroce_cm_disconnect(number) })?;
        }
        return Ok(());
    }
    // SAFETY: fields that are written when the id is made or bound.
    let (ps, src) = unsafe { ((*object.as_ptr()).ps, (*object.as_ptr()).route.addr.src) };
    let datagram = c_int::from(object.is_datagram());
    // SAFETY: as above.
    check(channel.with_service(|service| unsafe {
        verbs::ferroce_cm_create_id(service, ps as u16, datagram, &raw mut number)
    }))?;
    object.renumber(number);
    if busy {
        object.inner().busy = false;
        if !over {
            object.raise(event::UNREACHABLE, SERVICE_ENDED);
        }
        return Ok(());
    }
    if bound {
        addr::bind_as(object, number, &src)?;
    }
    if let Some(backlog) = listening {
        // SAFETY: a plain call.
        check(unsafe { verbs::ferroce_cm_listen(number, backlog) })?;
    }
    Ok(())
}
