//! Datagrams with descriptors over SOCK_SEQPACKET Unix sockets.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Descriptors in one message, at most.
pub(crate) const DESCRIPTORS_MAX: usize = 4;

/// A received datagram.
#[derive(Debug)]
pub(crate) struct Received {
    /// Bytes in the buffer; 0: the other end has closed.
    pub(crate) len: usize,
    /// It did not fit the buffer.
    pub(crate) truncated: bool,
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// A socket that is not connected.
pub(crate) fn socket(flags: SocketFlags) -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags | SocketFlags::CLOEXEC, None)
}

/// Two sockets that are connected to each other and do not block.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// The abstract address of a service.
pub(crate) fn address(name: &str) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(name.as_bytes())
}

/// Sends one datagram; never raises SIGPIPE.
pub(crate) fn send(
    socket: impl AsFd,
    parts: &[&[u8]],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    assert!(descriptors.len() <= DESCRIPTORS_MAX, "{} descriptors", descriptors.len());
    let parts: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    rustix::io::retry_on_intr(|| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "the buffer has room for them");
        }
        rustix::net::sendmsg(&socket, &parts, &mut control, flags | SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Receives one datagram. Descriptors beyond [`DESCRIPTORS_MAX`] are closed.
pub(crate) fn recv(socket: impl AsFd, buffer: &mut [u8], flags: RecvFlags) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message =
        rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags | RecvFlags::CMSG_CLOEXEC)?;
    let descriptors = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    Ok(Received { len: message.bytes, truncated: message.flags.contains(ReturnFlags::TRUNC), descriptors })
}
