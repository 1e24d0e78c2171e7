//! Descriptors whose closing waits, and the way to a service for them.

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType, sockopt,
};

/// A connection whose closing waits for the other end, which reads nothing.
pub(crate) struct Lingering {
    pub(crate) socket: OwnedFd,
    /// Its end ends the waiting.
    pub(crate) other_end: TcpStream,
}

impl Lingering {
    pub(crate) fn new() -> Lingering {
        // Longer than any answer of a service is waited for, and not so long that a test which fails takes for ever.
        const LONG: Duration = Duration::from_secs(120);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other_end, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        while Write::write(&mut &socket, &[0; 65_536]).is_ok() {}
        sockopt::set_socket_linger(&socket, Some(LONG)).unwrap();
        Lingering { socket: socket.into(), other_end }
    }
}

/// Connects to the service of that name, and says nothing yet.
pub(crate) fn connect(name: &str) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    rustix::net::connect(&socket, &address).unwrap();
    socket
}

pub(crate) fn send(to: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(descriptors.is_empty() || control.push(SendAncillaryMessage::ScmRights(descriptors)));
    rustix::net::sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).map(drop)
}
