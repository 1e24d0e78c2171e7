//! The system calls of packet sockets, past the C library as in `udp/sys.rs`: its functions are cancellation points.
#![allow(unsafe_code)]

use std::io;
use std::mem::{MaybeUninit, size_of, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::{c_int, c_void, sockaddr_ll, socklen_t};

use crate::udp::sys::set_option;

/// TPID of a tag of which the system does not tell it (802.1Q).
const TPID_DEFAULT: u16 = 0x8100;

/// A packet socket that receives nothing yet, close-on-exec and non-blocking.
pub(super) fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket() takes numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_socket, libc::AF_PACKET, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was opened just now and nobody else knows it; descriptors are C ints.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}

/// Which frames a socket receives.
#[derive(Clone, Copy, Debug)]
pub(super) enum Take {
    Nothing,
    All,
}

/// Binds to an interface.
pub(super) fn bind(fd: BorrowedFd<'_>, ifindex: u32, take: Take) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid sockaddr_ll: it is plain numbers.
    let mut name: sockaddr_ll = unsafe { zeroed() };
    name.sll_family = libc::AF_PACKET as u16;
    name.sll_ifindex = c_int::try_from(ifindex).map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
    name.sll_protocol = match take {
        Take::Nothing => 0,
        Take::All => (libc::ETH_P_ALL as u16).to_be(),
    };
    // SAFETY: `name` is an initialised address of the length told, and lives across the call.
    let result = unsafe { libc::bind(fd.as_raw_fd(), (&raw const name).cast(), size_of::<sockaddr_ll>() as socklen_t) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Is the interface that a socket is bound to loopback?
pub(super) fn is_loopback(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: as in `bind`.
    let mut name: sockaddr_ll = unsafe { zeroed() };
    let mut len = size_of::<sockaddr_ll>() as socklen_t;
    // SAFETY: the system writes at most `len` bytes to `name`, which has that many.
    if unsafe { libc::getsockname(fd.as_raw_fd(), (&raw mut name).cast(), &mut len) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(name.sll_hatype == libc::ARPHRD_LOOPBACK)
}

/// Asks for VLAN tags and the number of dropped frames beside the frames, and for no copies of what the host sends.
pub(super) fn ask_for_facts(fd: BorrowedFd<'_>) -> io::Result<()> {
    set_option(fd, libc::SOL_PACKET, libc::PACKET_AUXDATA, 1)?;
    set_option(fd, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1)?;
    // Kernels before 4.20 do not have it: then `Frame::outgoing` tells.
    let _ = set_option(fd, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1);
    Ok(())
}

/// Gives a frame to the interface that the socket is bound to.
pub(super) fn send(fd: BorrowedFd<'_>, frame: &[u8]) -> io::Result<()> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the system reads `frame.len()` bytes of `frame`, which lives across the call; there is no address.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_sendto,
            fd.as_raw_fd(),
            frame.as_ptr(),
            frame.len(),
            flags,
            std::ptr::null::<c_void>(),
            0,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// What was received.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    /// Bytes that it has; more than the buffer if it was cut off.
    pub(super) len: usize,
    /// TPID and content of the VLAN tag that the system took out of it.
    pub(super) tag: Option<(u16, u16)>,
    /// This host sent it.
    pub(super) outgoing: bool,
    /// How many frames the socket has dropped so far, if any.
    pub(super) dropped: Option<u32>,
}

/// Bytes for the two control messages that were asked for.
// SAFETY: CMSG_SPACE is arithmetic on its argument.
const CONTROL: usize =
    unsafe { libc::CMSG_SPACE(size_of::<libc::tpacket_auxdata>() as u32) + libc::CMSG_SPACE(size_of::<u32>() as u32) }
        as usize;

#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// Receives a frame without waiting. "Nothing there" is the error `WouldBlock`.
pub(super) fn recv(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Frame> {
    // SAFETY: as in `bind`.
    let mut name: sockaddr_ll = unsafe { zeroed() };
    let mut control = Control([0; CONTROL]);
    let mut piece = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all-zero bytes are a valid msghdr: null pointers with zero lengths.
    let mut header: libc::msghdr = unsafe { zeroed() };
    header.msg_name = (&raw mut name).cast();
    header.msg_namelen = size_of::<sockaddr_ll>() as socklen_t;
    header.msg_iov = &raw mut piece;
    header.msg_iovlen = 1;
    header.msg_control = (&raw mut control).cast();
    header.msg_controllen = CONTROL as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: the header points to a name, one piece (a buffer that is exclusively borrowed) and a control buffer, of the lengths told;
    // all outlive the call.
    let len = unsafe { libc::syscall(libc::SYS_recvmsg, fd.as_raw_fd(), &raw mut header, flags) };
    if len < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut frame =
        Frame { len: len as usize, tag: None, outgoing: name.sll_pkttype == libc::PACKET_OUTGOING, dropped: None };
    // SAFETY: msg_control points to a live buffer of which the system filled msg_controllen bytes with control messages.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(&header) };
    while !control.is_null() {
        // SAFETY: FIRSTHDR and NXTHDR give only headers that lie wholly in the buffer.
        let (level, kind) = unsafe { ((*control).cmsg_level, (*control).cmsg_type) };
        match (level, kind) {
            (libc::SOL_PACKET, libc::PACKET_AUXDATA) => frame.tag = control_value(control).and_then(|aux| tag(&aux)),
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => frame.dropped = control_value(control),
            _ => {}
        }
        // SAFETY: as for FIRSTHDR; `control` is a header of this buffer.
        control = unsafe { libc::CMSG_NXTHDR(&header, control) };
    }
    Ok(frame)
}

/// What the system puts into a control message: plain numbers, for which every pattern of bytes is a value.
trait ControlData: Copy {}
impl ControlData for u32 {}
impl ControlData for libc::tpacket_auxdata {}

/// Copies the data out of a control message, if it has as much. `control` is one of FIRSTHDR or NXTHDR.
#[allow(clippy::unnecessary_cast)] // the type of cmsg_len differs between C libraries
fn control_value<T: ControlData>(control: *const libc::cmsghdr) -> Option<T> {
    // SAFETY: as said above. CMSG_LEN is arithmetic.
    let (have, need) = unsafe { ((*control).cmsg_len as usize, libc::CMSG_LEN(size_of::<T>() as u32) as usize) };
    if have < need {
        return None;
    }
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: behind the header lie at least the bytes of a `T` (just checked), and `value` has room for them; it is plain numbers.
    unsafe {
        libc::CMSG_DATA(control).copy_to_nonoverlapping(value.as_mut_ptr().cast(), size_of::<T>());
        Some(value.assume_init())
    }
}

fn tag(aux: &libc::tpacket_auxdata) -> Option<(u16, u16)> {
    let has = |bit| aux.tp_status & bit != 0;
    let tpid = if has(libc::TP_STATUS_VLAN_TPID_VALID) { aux.tp_vlan_tpid } else { TPID_DEFAULT };
    has(libc::TP_STATUS_VLAN_VALID).then_some((tpid, aux.tp_vlan_tci))
}
