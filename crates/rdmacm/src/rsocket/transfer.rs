//! Sending and receiving.

use std::ffi::{c_int, c_void};

use ferroce_rsocket::{Phase, TRANSFER_MAX, TRANSFER_MIN};
use libc::{iovec, msghdr, sockaddr, socklen_t};

use super::connect::{connected, receive_patience, rgetpeername, send_patience};
use super::gather::Gather;
use super::iomap;
use super::{Entry, Inner, find_any};
use crate::entry::{Call, Refusal, given, put, rdma};

/// As the kernel has it (`IOV_MAX`).
const PIECES_MAX: usize = 1024;
/// What means something else than on a stream of TCP, or needs more than a stream has.
const FLAGS_REFUSED: c_int = libc::MSG_OOB | libc::MSG_ERRQUEUE | libc::MSG_TRUNC;

/// Checks the pieces of a program, and gives their length in all.
///
/// # Safety
///
/// NULL, or `count` pieces that live, and are not changed, as long as the reference.
unsafe fn pieces<'a>(vector: *const iovec, count: usize) -> Call<(&'a [iovec], usize)> {
    if count == 0 {
        return Ok((&[], 0));
    }
    if count > PIECES_MAX {
        return Err(Refusal::new(libc::EMSGSIZE, format!("{count} pieces, more than {PIECES_MAX}")));
    }
    // SAFETY: by the contract.
    unsafe { given(vector, "the vector") }?;
    // SAFETY: not NULL, so it has `count` elements by the contract.
    let pieces = unsafe { std::slice::from_raw_parts(vector, count) };
    let mut total = 0usize;
    for piece in pieces {
        if piece.iov_base.is_null() && piece.iov_len > 0 {
            return Err(Refusal::new(libc::EFAULT, format!("{} bytes at NULL", piece.iov_len)));
        }
        total = total
            .checked_add(piece.iov_len)
            .filter(|total| isize::try_from(*total).is_ok())
            .ok_or_else(|| Refusal::invalid("more bytes than there can be"))?;
    }
    Ok((pieces, total))
}

fn check_flags(flags: c_int) -> Call<()> {
    if flags & FLAGS_REFUSED != 0 {
        let what = format!("flags {flags:#x}: MSG_OOB, MSG_ERRQUEUE and MSG_TRUNC are not available");
        return Err(Refusal::new(libc::EOPNOTSUPP, what));
    }
    Ok(())
}

/// Why a program cannot send any more; None: it can.
pub(super) fn send_error(inner: &mut Inner) -> Option<Refusal> {
    let broken = inner.error;
    let stream = inner.connection()?.stream()?;
    match stream.phase() {
        _ if stream.is_writable() => None,
        Phase::Connected => Some(Refusal::told(libc::EPIPE)),
        Phase::Broken if broken != 0 => Some(Refusal::told(broken)),
        Phase::Broken | Phase::Disconnected => Some(Refusal::told(libc::ECONNRESET)),
    }
}

/// Sends all pieces, or as much as there is patience for; to an address, or NULL.
///
/// # Safety
///
/// Pieces as for [`pieces`], of bytes that may be read; an address as long as it says.
unsafe fn send(
    socket: c_int,
    vector: *const iovec,
    count: usize,
    flags: c_int,
    to: (*const sockaddr, socklen_t),
) -> Call<isize> {
    let entry = find_any(socket)?;
    check_flags(flags)?;
    // SAFETY: by the contract.
    let (pieces, total) = unsafe { pieces(vector, count) }?;
    let socket = match entry {
        Entry::Stream(socket) => socket,
        Entry::Datagram(socket) => return socket.transmit(pieces, total, flags, to),
    };
    if !to.0.is_null() || to.1 != 0 {
        return Err(Refusal::new(libc::EISCONN, "a stream has its peer already; pass no address"));
    }
    let patience = send_patience(&socket, flags);
    let _turn = socket.sending.lock();
    socket.until(patience, connected)?;
    iomap::announce(&socket, patience)?;
    // SAFETY: the program's bytes stay during the call.
    let mut data = unsafe { Gather::new(pieces, total) };
    let mut longest = TRANSFER_MIN;
    while data.left() > 0 {
        let write = |inner: &mut Inner| {
            if let Some(refusal) = send_error(inner) {
                return Err(refusal);
            }
            Ok(inner.connection().and_then(|endpoint| endpoint.write(&mut data, longest)))
        };
        match socket.at_once_or_until(patience, write) {
            Ok(_) => longest = (longest * 2).min(TRANSFER_MAX),
            Err(_) if data.left() < total => break,
            Err(refusal) => return Err(refusal),
        }
    }
    Ok((total - data.left()) as isize)
}

/// Receives what there is; with MSG_WAITALL until all pieces are full. 0: the peer sends no more.
///
/// # Safety
///
/// Pieces as for [`pieces`], of room that may be written.
unsafe fn receive(socket: c_int, vector: *const iovec, count: usize, flags: c_int) -> Call<isize> {
    let entry = find_any(socket)?;
    check_flags(flags)?;
    // SAFETY: by the contract.
    let (pieces, total) = unsafe { pieces(vector, count) }?;
    let socket = match entry {
        Entry::Stream(socket) => socket,
        Entry::Datagram(socket) => return socket.receive(pieces, flags).map(|received| received.len as isize),
    };
    let patience = receive_patience(&socket, flags);
    let _turn = socket.receiving.lock();
    if !matches!(socket.inner().state, super::State::Connected(_)) {
        socket.until(patience, connected)?;
    }
    let is_peek = flags & libc::MSG_PEEK != 0;
    let mut done = 0;
    while done < total {
        match socket.at_once_or_until(patience, |inner| take(inner, pieces, done, is_peek)) {
            Ok(0) => break,
            Ok(len) => done += len,
            Err(_) if done > 0 => break,
            Err(refusal) => return Err(refusal),
        }
        if is_peek || flags & libc::MSG_WAITALL == 0 {
            break;
        }
    }
    Ok(done as isize)
}

/// Copies unread bytes behind the first `done` of the pieces: how many. Some(0): no more will come. None: none yet.
fn take(inner: &mut Inner, pieces: &[iovec], done: usize, is_peek: bool) -> Call<Option<usize>> {
    let broken = if inner.error != 0 { inner.error } else { libc::ECONNRESET };
    let Some(endpoint) = inner.connection() else { return Err(Refusal::told(libc::ENOTCONN)) };
    let mut skip = done;
    let mut taken = 0;
    for piece in pieces {
        let before = skip.min(piece.iov_len);
        skip -= before;
        let room = piece.iov_len - before;
        if room == 0 {
            continue;
        }
        // SAFETY: room for so many bytes behind those that are there already, by the contract of the functions of C.
        let copied = unsafe { endpoint.copy_unread(taken as u32, piece.iov_base.cast::<u8>().add(before), room) };
        taken += copied;
        if copied < room {
            break;
        }
    }
    let Some(stream) = endpoint.stream() else { return Err(Refusal::told(libc::ENOTCONN)) };
    if taken > 0 {
        if !is_peek {
            stream.read(taken as u32);
            endpoint.post_controls();
        }
        return Ok(Some(taken));
    }
    match stream.phase() {
        _ if stream.is_readable() => Ok(None),
        Phase::Broken => Err(Refusal::told(broken)),
        _ => Ok(Some(0)),
    }
}

/// What receiving from a datagram socket gives; None: it is a stream.
///
/// # Safety
///
/// As for [`receive`].
unsafe fn receive_datagram(
    socket: c_int,
    vector: *const iovec,
    count: usize,
    flags: c_int,
) -> Call<Option<super::datagram::calls::Received>> {
    let Entry::Datagram(socket) = find_any(socket)? else { return Ok(None) };
    check_flags(flags)?;
    // SAFETY: by the contract.
    let (pieces, _) = unsafe { pieces(vector, count) }?;
    socket.receive(pieces, flags).map(Some)
}

/// No address: to who is connected.
const NOBODY: (*const sockaddr, socklen_t) = (std::ptr::null(), 0);

fn piece(buffer: *const c_void, len: usize) -> iovec {
    iovec { iov_base: buffer.cast_mut(), iov_len: len }
}

/// The count of a vector.
fn counted(count: c_int) -> Call<usize> {
    usize::try_from(count).map_err(|_| Refusal::invalid(format!("{count} pieces")))
}

rdma! {
    /// `rsend`, see rsocket(7).
    fn rsend(socket: c_int, buffer: *const c_void, len: usize, flags: c_int) -> isize {
        // SAFETY: by the contract of the function.
        unsafe { send(socket, &piece(buffer, len), 1, flags, NOBODY) }
    }

    /// `rsendto`, see rsocket(7): a stream has its peer already.
    fn rsendto(
        socket: c_int,
        buffer: *const c_void,
        len: usize,
        flags: c_int,
        addr: *const sockaddr,
        addr_len: socklen_t,
    ) -> isize {
        // SAFETY: by the contract of the function.
        unsafe { send(socket, &piece(buffer, len), 1, flags, (addr, addr_len)) }
    }

    /// `rsendmsg`, see rsocket(7): without control data.
    fn rsendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> isize {
        // SAFETY: by the contract of the function.
        let message = unsafe { given(message, "the message") }?;
        if !message.msg_control.is_null() && message.msg_controllen != 0 {
            return Err(Refusal::new(libc::EOPNOTSUPP, "control data cannot be sent"));
        }
        let to = (message.msg_name.cast_const().cast::<sockaddr>(), message.msg_namelen);
        let to = if to.0.is_null() { NOBODY } else { to };
        // SAFETY: as above.
        unsafe { send(socket, message.msg_iov, message.msg_iovlen as usize, flags, to) }
    }

    /// `rwrite`, see rsocket(7).
    fn rwrite(socket: c_int, buffer: *const c_void, count: usize) -> isize {
        // SAFETY: by the contract of the function.
        unsafe { send(socket, &piece(buffer, count), 1, 0, NOBODY) }
    }

    /// `rwritev`, see rsocket(7).
    fn rwritev(socket: c_int, vector: *const iovec, count: c_int) -> isize {
        // SAFETY: by the contract of the function.
        unsafe { send(socket, vector, counted(count)?, 0, NOBODY) }
    }

    /// `rrecv`, see rsocket(7).
    fn rrecv(socket: c_int, buffer: *mut c_void, len: usize, flags: c_int) -> isize {
        // SAFETY: by the contract of the function.
        unsafe { receive(socket, &piece(buffer, len), 1, flags) }
    }

    /// `rrecvfrom`, see rsocket(7).
    fn rrecvfrom(
        socket: c_int,
        buffer: *mut c_void,
        len: usize,
        flags: c_int,
        addr: *mut sockaddr,
        addr_len: *mut socklen_t,
    ) -> isize {
        // SAFETY: by the contract of the function.
        if let Some(received) = unsafe { receive_datagram(socket, &piece(buffer, len), 1, flags) }? {
            received.show_src(addr, addr_len)?;
            return Ok(received.len as isize);
        }
        // SAFETY: as above.
        let received = unsafe { receive(socket, &piece(buffer, len), 1, flags) }?;
        if received > 0 && !addr.is_null() && !addr_len.is_null() {
            // SAFETY: a place for an address, by the contract of the function. A peer that is gone has left its name.
            unsafe { rgetpeername(socket, addr, addr_len) };
        }
        Ok(received)
    }

    /// `rrecvmsg`, see rsocket(7): there is no control data.
    fn rrecvmsg(socket: c_int, message: *mut msghdr, flags: c_int) -> isize {
        // SAFETY: by the contract of the function.
        let mut told = *unsafe { given(message, "the message") }?;
        // SAFETY: as above.
        if let Some(received) = unsafe { receive_datagram(socket, told.msg_iov, told.msg_iovlen as usize, flags) }? {
            received.show_message(&mut told)?;
            // SAFETY: as above.
            unsafe { put(message, told) }?;
            return Ok(received.len as isize);
        }
        // SAFETY: as above.
        let received = unsafe { receive(socket, told.msg_iov, told.msg_iovlen as usize, flags) }?;
        told.msg_namelen = 0;
        told.msg_controllen = 0;
        told.msg_flags = 0;
        // SAFETY: as above.
        unsafe { put(message, told) }?;
        Ok(received)
    }

    /// `rread`, see rsocket(7).
    fn rread(socket: c_int, buffer: *mut c_void, count: usize) -> isize {
        // SAFETY: by the contract of the function.
        unsafe { receive(socket, &piece(buffer, count), 1, 0) }
    }

    /// `rreadv`, see rsocket(7).
    fn rreadv(socket: c_int, vector: *const iovec, count: c_int) -> isize {
        // SAFETY: by the contract of the function.
        unsafe { receive(socket, vector, counted(count)?, 0) }
    }
}
