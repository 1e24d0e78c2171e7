//! Datagrams with descriptors over SOCK_SEQPACKET Unix sockets.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Descriptors in one message of ours, at most.
pub(crate) const DESCRIPTORS_MAX: usize = 4;

/// Descriptors in any message, at most (`SCM_MAX_FD` of the kernel).
pub(crate) const DESCRIPTORS_OF_ANY_MAX: usize = 253;

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

/// Receives one datagram. Descriptors beyond [`DESCRIPTORS_MAX`] are closed: for messages of the service and of the keeper.
pub(crate) fn recv(socket: impl AsFd, buffer: &mut [u8], flags: RecvFlags) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    recv_with(socket, buffer, flags, &mut space)
}

/// Receives one datagram with all its descriptors, so that none is closed by the call itself.
pub(crate) fn recv_all(socket: impl AsFd, buffer: &mut [u8], flags: RecvFlags) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_OF_ANY_MAX))];
    recv_with(socket, buffer, flags, &mut space)
}

fn recv_with(
    socket: impl AsFd,
    buffer: &mut [u8],
    flags: RecvFlags,
    space: &mut [MaybeUninit<u8>],
) -> Result<Received, Errno> {
    let mut control = RecvAncillaryBuffer::new(space);
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

/// Whether the next datagram has descriptors, or cannot be looked at. None is received, and the datagram stays where it is.
pub(crate) fn carries_descriptors(socket: impl AsFd) -> bool {
    let mut none = RecvAncillaryBuffer::default();
    let looked = rustix::net::recvmsg(&socket, &mut [], &mut none, RecvFlags::PEEK | RecvFlags::DONTWAIT);
    looked.map_or_else(|errno| errno != Errno::AGAIN, |message| message.flags.contains(ReturnFlags::CTRUNC))
}
