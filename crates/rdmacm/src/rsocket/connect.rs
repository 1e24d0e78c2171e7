//! From an address to a connection, and back.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferroce_rsocket::{CONN_DATA_LEN, ConnData, Half, Phase};
use libc::{sockaddr, sockaddr_storage, socklen_t};

use super::endpoint::Endpoint;
use super::wait::Patience;
use super::{Entry, Inner, OwnedId, Socket, State, find, find_any, publish};
use crate::abi::{event as code, rdma_cm_event, rdma_cm_id, rdma_conn_param};
use crate::channel::ChannelObject;
use crate::connect::{REJECT_CONSUMER, rdma_accept, rdma_connect, rdma_disconnect, rdma_listen};
use crate::entry::{Call, Refusal, given, rdma};
use crate::id::{self, IdObject, rdma_destroy_id};
use crate::{addr, event, verbs};

/// Most requests that are answered before the program accepts them.
const BACKLOG_MAX: usize = 128;
/// Events that are taken in one go, so that the lock is not held for long.
const EVENTS_AT_ONCE: usize = 64;

/// Of a call into the library itself, which has told the reason.
fn done(result: c_int) -> Call<()> {
    if result == 0 { Ok(()) } else { Err(Refusal::last()) }
}

/// A socket address of the program.
pub(super) fn address(pointer: *const sockaddr, len: socklen_t) -> Call<sockaddr_storage> {
    if (len as usize) < size_of::<libc::sa_family_t>() {
        return Err(Refusal::invalid(format!("an address of {len} bytes")));
    }
    let needed = addr::length(pointer)?;
    if (len as usize) < needed {
        return Err(Refusal::invalid(format!("an address of {len} bytes, where its family has {needed}")));
    }
    addr::copy(pointer)
}

rdma! {
    /// `rbind`, see rsocket(7).
    fn rbind(socket: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
        let socket = match find_any(socket)? {
            Entry::Stream(socket) => socket,
            Entry::Datagram(socket) => return socket.bind(addr, len).map(|()| 0),
        };
        let wanted = address(addr, len)?;
        let inner = socket.inner();
        if !matches!(inner.state, State::Idle) || inner.id.get().inner().bound {
            return Err(Refusal::invalid("the rsocket has an address already"));
        }
        // SAFETY: a live id, and an address of ours.
        done(unsafe { addr::rdma_bind_addr(inner.id.get().as_ptr(), addr::plain(&wanted).cast_mut()) })?;
        Ok(0)
    }

    /// `rlisten`, see rsocket(7).
    fn rlisten(socket: c_int, backlog: c_int) -> c_int {
        let socket = find(socket)?;
        let mut inner = socket.inner();
        let wanted = usize::try_from(backlog).unwrap_or(0).clamp(1, BACKLOG_MAX);
        match &mut inner.state {
            State::Listening { backlog, .. } => {
                *backlog = wanted;
                return Ok(0);
            }
            State::Idle => {}
            _ => return Err(Refusal::invalid("the rsocket is connected")),
        }
        if !inner.id.get().inner().bound {
            // SAFETY: integers, for which zero is a value.
            let mut any: sockaddr_storage = unsafe { std::mem::zeroed() };
            any.ss_family = socket.domain as libc::sa_family_t;
            addr::bind(inner.id.get(), &any)?;
        }
        // SAFETY: a live id.
        done(unsafe { rdma_listen(inner.id.get().as_ptr(), wanted as c_int) })?;
        inner.state = State::Listening { backlog: wanted, accepted: VecDeque::new() };
        Ok(0)
    }

    /// `raccept`, see rsocket(7).
    fn raccept(socket: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
        let socket = find(socket)?;
        let patience = receive_patience(&socket, 0);
        let accepted = socket.until(patience, |inner| match &mut inner.state {
            State::Listening { accepted, .. } => Ok(accepted.pop_front()),
            _ => Err(Refusal::invalid("the rsocket does not listen")),
        })?;
        if !addr.is_null() {
            // SAFETY: a live id, whose address is set.
            let peer = unsafe { (*accepted.inner().id.get().as_ptr()).route.addr.dst };
            show(&peer, addr, len)?;
        }
        publish(accepted)
    }

    /// `rconnect`, see rsocket(7): EINPROGRESS until a socket that does not block is connected.
    fn rconnect(socket: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
        let socket = match find_any(socket)? {
            Entry::Stream(socket) => socket,
            Entry::Datagram(socket) => return socket.connect(addr, len).map(|()| 0),
        };
        let is_nonblocking = {
            let mut inner = socket.inner();
            if matches!(inner.state, State::Idle) {
                let to = address(addr, len)?;
                start(&mut inner, &to)?;
            }
            inner.options.is_nonblocking
        };
        let patience = if is_nonblocking { Patience::None } else { Patience::Endless };
        match socket.until(patience, connected) {
            Ok(()) => Ok(0),
            Err(refusal) if refusal.errno() == libc::EAGAIN => Err(Refusal::told(libc::EINPROGRESS)),
            Err(refusal) => {
                socket.inner().error = 0;
                Err(refusal)
            }
        }
    }

    /// `rshutdown`, see rsocket(7): the peer is told; what was sent goes on its way.
    fn rshutdown(socket: c_int, how: c_int) -> c_int {
        let half = match how {
            libc::SHUT_RD => Half::Read,
            libc::SHUT_WR => Half::Write,
            libc::SHUT_RDWR => Half::Both,
            other => return Err(Refusal::invalid(format!("{other} is none of SHUT_RD, SHUT_WR and SHUT_RDWR"))),
        };
        let socket = find(socket)?;
        let mut inner = socket.inner();
        let endpoint = inner.connection().ok_or_else(|| Refusal::told(libc::ENOTCONN))?;
        endpoint.progress();
        if let Some(stream) = endpoint.stream() {
            stream.shutdown(half);
        }
        endpoint.post_controls();
        inner.wake_others();
        Ok(0)
    }

    /// `rgetpeername`, see rsocket(7).
    fn rgetpeername(socket: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
        let socket = match find_any(socket)? {
            Entry::Stream(socket) => socket,
            Entry::Datagram(socket) => return socket.peer_name(addr, len).map(|()| 0),
        };
        let inner = socket.inner();
        if !matches!(inner.state, State::Connected(_) | State::Accepting(_)) {
            return Err(Refusal::told(libc::ENOTCONN));
        }
        // SAFETY: a live id.
        show(&unsafe { (*inner.id.get().as_ptr()).route.addr.dst }, addr, len)?;
        Ok(0)
    }

    /// `rgetsockname`, see rsocket(7).
    fn rgetsockname(socket: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
        let socket = match find_any(socket)? {
            Entry::Stream(socket) => socket,
            Entry::Datagram(socket) => return socket.own_name(addr, len).map(|()| 0),
        };
        let inner = socket.inner();
        // SAFETY: a live id.
        let mut own = unsafe { (*inner.id.get().as_ptr()).route.addr.src };
        if own.ss_family == 0 {
            own.ss_family = socket.domain as libc::sa_family_t;
        }
        show(&own, addr, len)?;
        Ok(0)
    }
}

/// How long receiving and accepting wait.
pub(super) fn receive_patience(socket: &Socket, flags: c_int) -> Patience {
    let inner = socket.inner();
    patience(inner.options.is_nonblocking || flags & libc::MSG_DONTWAIT != 0, inner.options.receive_timeout)
}

/// How long sending waits.
pub(super) fn send_patience(socket: &Socket, flags: c_int) -> Patience {
    let inner = socket.inner();
    patience(inner.options.is_nonblocking || flags & libc::MSG_DONTWAIT != 0, inner.options.send_timeout)
}

pub(super) fn patience(is_nonblocking: bool, timeout: Option<Duration>) -> Patience {
    match timeout {
        _ if is_nonblocking => Patience::None,
        // A time that no clock can count is for ever.
        Some(timeout) => Instant::now().checked_add(timeout).map_or(Patience::Endless, Patience::Until),
        None => Patience::Endless,
    }
}

/// Writes an address as far as there is room, and its whole length.
pub(super) fn show(from: &sockaddr_storage, to: *mut sockaddr, len: *mut socklen_t) -> Call<()> {
    let whole = addr::length(addr::plain(from)).unwrap_or(size_of::<sockaddr>());
    // SAFETY: the program's, by the contract of the functions of C.
    let room = *unsafe { given(len, "the address's length") }? as usize;
    let part = room.min(whole);
    if part > 0 {
        if to.is_null() {
            return Err(Refusal::new(libc::EFAULT, "no place for the address"));
        }
        // SAFETY: room for as many bytes by the contract of the functions of C; a storage has more.
        unsafe { ptr::copy_nonoverlapping(ptr::from_ref(from).cast::<u8>(), to.cast::<u8>(), part) };
    }
    // SAFETY: not NULL, as just seen.
    unsafe { *len = whole as socklen_t };
    Ok(())
}

/// A test for `until`: is the connection made?
pub(super) fn connected(inner: &mut Inner) -> Call<Option<()>> {
    match inner.state {
        State::Connected(_) => Ok(Some(())),
        State::Connecting(_) | State::Accepting(_) => Ok(None),
        State::Failed(errno) => Err(Refusal::told(errno)),
        State::Listening { .. } => Err(Refusal::invalid("the rsocket listens")),
        State::Idle | State::Closed => Err(Refusal::told(libc::ENOTCONN)),
    }
}

/// Sends the request.
fn start(inner: &mut Inner, to: &sockaddr_storage) -> Call<()> {
    let id = inner.id.get();
    addr::resolve(id, ptr::null(), addr::plain(to))?;
    id.inner().tos = inner.options.tos;
    addr::show_route(id)?;
    id.inner().routed = true;
    let endpoint = Endpoint::new(id, &inner.options.sizes)?;
    let said = endpoint.conn_data().to_bytes();
    let mut param = param(&said);
    // SAFETY: a live id with a route; parameters and private data of ours.
    done(unsafe { rdma_connect(id.as_ptr(), &raw mut param) })?;
    inner.state = State::Connecting(endpoint);
    Ok(())
}

fn param(said: &[u8; CONN_DATA_LEN]) -> rdma_conn_param {
    rdma_conn_param {
        private_data: said.as_ptr().cast::<c_void>(),
        private_data_len: CONN_DATA_LEN as u8,
        // Nothing but WRITEs.
        responder_resources: 0,
        initiator_depth: 0,
        flow_control: 1,
        retry_count: 7,
        // For ever: a peer that has no receive posted is just not looking.
        rnr_retry_count: 7,
        srq: 0,
        qp_num: 0,
    }
}

/// An event of the connection manager, copied.
struct Came {
    code: u32,
    status: c_int,
    id: *mut rdma_cm_id,
    data: Vec<u8>,
}

fn next_event(channel: &Arc<ChannelObject>) -> Call<Option<Came>> {
    let Some(event) = event::next(channel)? else { return Ok(None) };
    // SAFETY: a live event of an RC id; private data as long as it says.
    let came = unsafe {
        let rdma_cm_event { event: code, status, id, param, .. } = *event;
        let (start, len) = (param.conn.private_data, usize::from(param.conn.private_data_len));
        let data = if start.is_null() { &[] } else { std::slice::from_raw_parts(start.cast::<u8>(), len) };
        Came { code, status, id, data: data.to_vec() }
    };
    // SAFETY: taken just now, and for the last time.
    unsafe { event::release(event) };
    Ok(Some(came))
}

/// Takes what the connection manager says. True: something came.
pub(super) fn take_events(inner: &mut Inner, socket: &Socket) -> bool {
    let mut moved = false;
    for _ in 0..EVENTS_AT_ONCE {
        // Who waits to be accepted is taken later.
        if let State::Listening { backlog, accepted } = &inner.state
            && accepted.len() >= *backlog
        {
            break;
        }
        match next_event(&socket.channel) {
            Ok(Some(came)) => {
                react(inner, socket, &came);
                moved = true;
            }
            Ok(None) => break,
            Err(refusal) => {
                fail(inner, refusal.errno());
                return true;
            }
        }
    }
    moved
}

fn react(inner: &mut Inner, socket: &Socket, came: &Came) {
    match (std::mem::replace(&mut inner.state, State::Closed), came.code) {
        (State::Listening { backlog, mut accepted }, code::CONNECT_REQUEST) => {
            accepted.extend(answer(inner, socket, came));
            inner.state = State::Listening { backlog, accepted };
        }
        (State::Connecting(mut endpoint), code::ESTABLISHED) => match ConnData::parse(&came.data) {
            Ok(peer) => {
                endpoint.start(&peer);
                endpoint.post_controls();
                inner.state = State::Connected(endpoint);
            }
            Err(error) => {
                crate::entry::note("rconnect\0", libc::EPROTO, format!("the peer is no rsocket: {error}"));
                // SAFETY: a live id.
                unsafe { rdma_disconnect(inner.id.get().as_ptr()) };
                drop(endpoint);
                fail(inner, libc::EPROTO);
            }
        },
        (State::Accepting(endpoint), code::ESTABLISHED) => inner.state = State::Connected(endpoint),
        (State::Connecting(endpoint) | State::Accepting(endpoint), code) => {
            drop(endpoint);
            fail(inner, failure(code, came.status));
        }
        (State::Connected(mut endpoint), code::DISCONNECTED) => {
            // What came before is read.
            endpoint.progress();
            if let Some(stream) = endpoint.stream() {
                stream.disconnected();
            }
            inner.state = State::Connected(endpoint);
        }
        (state, _) => inner.state = state,
    }
}

/// What the program is told of a connection that was not made.
fn failure(code: u32, status: c_int) -> c_int {
    match code {
        code::REJECTED => libc::ECONNREFUSED,
        code::DISCONNECTED => libc::ECONNRESET,
        _ if status != 0 => status.abs(),
        _ => libc::ETIMEDOUT,
    }
}

fn fail(inner: &mut Inner, errno: c_int) {
    inner.error = errno;
    match &mut inner.state {
        State::Connected(endpoint) => {
            if let Some(stream) = endpoint.stream() {
                stream.broken();
            }
        }
        state => *state = State::Failed(errno),
    }
}

/// Accepts a request, or rejects what cannot be a connection.
fn answer(listener: &Inner, socket: &Socket, came: &Came) -> Option<Arc<Socket>> {
    // SAFETY: the new id, which nobody else has.
    let id = unsafe { IdObject::of(came.id) }.ok()?;
    match accept(listener, socket, id, &came.data) {
        Ok(accepted) => Some(accepted),
        Err(refusal) => {
            crate::entry::note(
                "raccept\0",
                refusal.errno(),
                format!("a request is rejected (error {})", refusal.errno()),
            );
            // SAFETY: plain calls about a live id, which is given up.
            unsafe {
                verbs::ferroce_cm_reject(id.number(), REJECT_CONSUMER, ptr::null(), 0);
                rdma_destroy_id(came.id);
            }
            None
        }
    }
}

fn accept(listener: &Inner, socket: &Socket, id: &IdObject, data: &[u8]) -> Call<Arc<Socket>> {
    let peer = ConnData::parse(data).map_err(|error| Refusal::new(libc::EPROTO, error.to_string()))?;
    let channel = ChannelObject::open()?;
    id::migrate(id, Arc::clone(&channel), false)?;
    id.inner().tos = listener.options.tos;
    let mut endpoint = Endpoint::new(id, &listener.options.sizes)?;
    endpoint.start(&peer);
    let said = endpoint.conn_data().to_bytes();
    let mut param = param(&said);
    // SAFETY: a live id; parameters and private data of ours.
    done(unsafe { rdma_accept(id.as_ptr(), &raw mut param) })?;
    let options = listener.options.inherited();
    let accepted = Socket::new(socket.domain, channel, OwnedId(ptr::from_ref(id).cast_mut()), options);
    accepted.inner().state = State::Accepting(endpoint);
    Ok(accepted)
}

/// Ends a socket that no call can find any more.
pub(super) fn close(socket: &Arc<Socket>) {
    let linger = socket.inner().options.linger;
    if linger != Some(Duration::ZERO) {
        flush(socket, linger);
    }
    let mut inner = socket.inner();
    let state = std::mem::replace(&mut inner.state, State::Closed);
    inner.wake_others();
    inner.mappings.clear();
    if let State::Connected(endpoint) = &state
        && endpoint.phase().is_some()
    {
        // SAFETY: a live id. It says that nothing more comes, and makes the queue pair stop.
        unsafe { rdma_disconnect(inner.id.get().as_ptr()) };
    }
    let waiting = match state {
        State::Listening { accepted, .. } => accepted,
        _ => VecDeque::new(),
    };
    drop(inner);
    for accepted in waiting {
        close(&accepted);
    }
}

/// Says good-bye, and waits until the peer has got everything.
fn flush(socket: &Socket, linger: Option<Duration>) {
    // A thread that sends is let finish its message, unless it sleeps.
    let _turn = socket.sending.try_lock();
    if let Some(endpoint) = socket.inner().connection() {
        endpoint.progress();
        if let Some(stream) = endpoint.stream() {
            stream.shutdown(Half::Both);
        }
        endpoint.post_controls();
    }
    let end = linger.and_then(|linger| Instant::now().checked_add(linger));
    let patience = end.map_or(Patience::Endless, Patience::Until);
    loop {
        let settled = socket.until(patience, |inner| {
            let Some(endpoint) = inner.connection() else { return Ok(Some(())) };
            let is_settled = endpoint.stream().is_none_or(|stream| stream.is_settled());
            Ok((is_settled || endpoint.phase() == Some(Phase::Broken)).then_some(()))
        });
        match settled {
            // A signal is no reason to lose what was sent.
            Err(refusal) if refusal.errno() == libc::EINTR => {}
            _ => return,
        }
    }
}
