//! The system calls of the UDP link: sockets, options, `sendmmsg` and `recvmmsg`. With `ring/shared.rs`, `raw/sys.rs` and
//! `sched.rs` the only `unsafe` of this crate.
//!
//! Those two are called past the C library: its functions are cancellation points, and a thread of the program's that is cancelled in
//! them would end while it holds the lane. (They also cost less.)
#![allow(unsafe_code)]

use std::io;
use std::mem::{MaybeUninit, offset_of, size_of, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;

use libc::{c_int, c_void, socklen_t};

/// Messages handed to the system in one call, at most.
pub(super) const MAX_MESSAGES: usize = 64;
/// Most pieces of memory that one message may have (`UIO_MAXIOV`).
pub(super) const MAX_PIECES: usize = 1024;
/// Bytes of a receive buffer: no UDP datagram, merged or not, is longer.
pub(super) const RX_BUFFER: usize = 65_536;

/// A UDP socket that is not bound yet, close-on-exec and non-blocking.
pub(super) fn udp_socket(v6: bool) -> io::Result<OwnedFd> {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    // Past the C library, whose function a preloaded library may have replaced (librdmacm's: by one that makes rsockets of datagrams).
    // SAFETY: socket() takes numbers only.
    let fd = unsafe {
        libc::syscall(libc::SYS_socket, family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was opened just now and nobody else knows it; descriptors are C ints.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}

/// Binds to an address; port 0 lets the system choose.
pub(super) fn bind(fd: BorrowedFd<'_>, addr: &SocketAddr) -> io::Result<()> {
    let name = Name::from(addr);
    // SAFETY: `name` points to `len` initialised bytes of a socket address that live across the call.
    check(unsafe { libc::bind(fd.as_raw_fd(), name.as_ptr(), name.len()) })
}

/// The address that a socket is bound to.
pub(super) fn local_addr(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    let mut name = NameBuf::zeroed();
    let mut len = size_of::<NameBuf>() as socklen_t;
    // SAFETY: the system writes at most `len` bytes to `name`, which has that many.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), (&raw mut name).cast(), &mut len) })?;
    name.addr().ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))
}

/// Sets an option that is an `int`.
pub(crate) fn set_option(fd: BorrowedFd<'_>, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: the system reads `size_of::<c_int>()` bytes of `value`, which lives across the call.
    check(unsafe {
        libc::setsockopt(fd.as_raw_fd(), level, option, (&raw const value).cast(), size_of::<c_int>() as socklen_t)
    })
}

/// Reads an option that is an `int`.
pub(super) fn option(fd: BorrowedFd<'_>, level: c_int, option: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as socklen_t;
    // SAFETY: the system writes at most `len` bytes to `value`, which has that many.
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, option, (&raw mut value).cast(), &mut len) })?;
    Ok(value)
}

/// Option of `SOL_UDP` (linux/udp.h): receive IPv6 packets whose UDP checksum is 0.
pub(super) const UDP_NO_CHECK6_RX: c_int = 102;

/// Option of `IPPROTO_IPV6` (linux/in6.h): send the flow label of the destination address.
pub(super) const IPV6_FLOWINFO_SEND: c_int = 33;

/// One of a socket's two buffers.
#[derive(Clone, Copy)]
pub(crate) enum Buffer {
    Send,
    Receive,
}

/// Asks for a buffer of `bytes`, past the system's limit if the process may; tells what the socket has now, bookkeeping
/// included (the system doubles what is asked for). Never makes it smaller.
pub(crate) fn grow_buffer(fd: BorrowedFd<'_>, buffer: Buffer, bytes: usize) -> usize {
    let force = match buffer {
        Buffer::Send => libc::SO_SNDBUFFORCE,
        Buffer::Receive => libc::SO_RCVBUFFORCE,
    };
    let asked = |bytes| c_int::try_from(bytes).unwrap_or(c_int::MAX);
    if buffer_size(fd, buffer) < bytes.saturating_mul(2)
        && set_option(fd, libc::SOL_SOCKET, force, asked(bytes)).is_err()
    {
        let bytes = bytes.min(buffer.limit());
        // Somebody with more rights may have given the socket more than the limit already.
        if buffer_size(fd, buffer) < bytes * 2 {
            // A refusal leaves the default, which works too.
            let _ = set_option(fd, libc::SOL_SOCKET, buffer.option(), asked(bytes));
        }
    }
    buffer_size(fd, buffer)
}

/// Bytes of a buffer, bookkeeping included.
pub(super) fn buffer_size(fd: BorrowedFd<'_>, buffer: Buffer) -> usize {
    option(fd, libc::SOL_SOCKET, buffer.option()).unwrap_or(0).max(0) as usize
}

impl Buffer {
    fn option(self) -> c_int {
        match self {
            Buffer::Send => libc::SO_SNDBUF,
            Buffer::Receive => libc::SO_RCVBUF,
        }
    }

    /// What a process without rights may ask for: the sysctl as it was at first, or the kernel's default for it.
    fn limit(self) -> usize {
        static LIMITS: [OnceLock<usize>; 2] = [const { OnceLock::new() }; 2];
        let (place, path) = match self {
            Buffer::Send => (0, "/proc/sys/net/core/wmem_max"),
            Buffer::Receive => (1, "/proc/sys/net/core/rmem_max"),
        };
        let read = || std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(212_992);
        *LIMITS[place].get_or_init(read)
    }
}

/// Makes a descriptor non-blocking.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: F_GETFL and F_SETFL take and give numbers only.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) })
}

/// Waits until a socket can be read, or for so many milliseconds.
pub(super) fn wait_readable(fd: BorrowedFd<'_>, milliseconds: c_int) -> bool {
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry is passed and one exists.
    unsafe { libc::poll(&mut entry, 1, milliseconds) > 0 }
}

/// A socket address as the system has it.
#[derive(Clone, Copy)]
pub(super) enum Name {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl Name {
    fn as_ptr(&self) -> *const libc::sockaddr {
        match self {
            Name::V4(name) => (&raw const *name).cast(),
            Name::V6(name) => (&raw const *name).cast(),
        }
    }

    fn len(&self) -> socklen_t {
        match self {
            Name::V4(_) => size_of::<libc::sockaddr_in>() as socklen_t,
            Name::V6(_) => size_of::<libc::sockaddr_in6>() as socklen_t,
        }
    }
}

impl From<&SocketAddr> for Name {
    fn from(addr: &SocketAddr) -> Name {
        match addr {
            SocketAddr::V4(addr) => Name::V4(libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: addr.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(addr.ip().octets()) },
                sin_zero: [0; 8],
            }),
            SocketAddr::V6(addr) => Name::V6(libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: addr.port().to_be(),
                sin6_flowinfo: addr.flowinfo().to_be(),
                sin6_addr: libc::in6_addr { s6_addr: addr.ip().octets() },
                sin6_scope_id: addr.scope_id(),
            }),
        }
    }
}

/// Room for either kind of address: `sockaddr_in6` is the larger one.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct NameBuf([u8; size_of::<libc::sockaddr_in6>()]);

impl NameBuf {
    const fn zeroed() -> NameBuf {
        NameBuf([0; size_of::<libc::sockaddr_in6>()])
    }

    /// The address, if it is one of IP.
    fn addr(&self) -> Option<SocketAddr> {
        let bytes = &self.0;
        let family = u16::from_ne_bytes([bytes[0], bytes[1]]);
        let port = u16::from_be_bytes([bytes[2], bytes[3]]);
        match c_int::from(family) {
            libc::AF_INET => {
                let at = offset_of!(libc::sockaddr_in, sin_addr);
                Some(SocketAddrV4::new(Ipv4Addr::from(array::<4>(bytes, at)), port).into())
            }
            libc::AF_INET6 => {
                let at = offset_of!(libc::sockaddr_in6, sin6_addr);
                let scope = offset_of!(libc::sockaddr_in6, sin6_scope_id);
                let scope = u32::from_ne_bytes(array(bytes, scope));
                Some(SocketAddrV6::new(Ipv6Addr::from(array::<16>(bytes, at)), port, 0, scope).into())
            }
            _ => None,
        }
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// A piece of memory that the system shall send: the layout of `struct iovec`, by number so that it may cross threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Piece {
    pub(super) addr: usize,
    pub(super) len: usize,
}

const _: () = assert!(
    size_of::<Piece>() == size_of::<libc::iovec>()
        && align_of::<Piece>() == align_of::<libc::iovec>()
        && offset_of!(Piece, addr) == offset_of!(libc::iovec, iov_base)
        && offset_of!(Piece, len) == offset_of!(libc::iovec, iov_len)
);

/// One message to send: its pieces, and the size to cut it into (0: it is one datagram).
#[derive(Clone, Copy)]
pub(super) struct Message<'a> {
    pub(super) pieces: &'a [Piece],
    pub(super) segment: u16,
}

/// Bytes of the one control message that sending uses, `UDP_SEGMENT`.
// SAFETY: CMSG_SPACE is arithmetic on its argument.
const SEGMENT_CONTROL: usize = unsafe { libc::CMSG_SPACE(size_of::<u16>() as u32) } as usize;

#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct SegmentControl([u8; SEGMENT_CONTROL]);

impl SegmentControl {
    fn new(segment: u16) -> SegmentControl {
        let mut control = SegmentControl([0; SEGMENT_CONTROL]);
        // SAFETY: the buffer is aligned for a cmsghdr and CMSG_SPACE(2) bytes long: the header and, at CMSG_DATA, two
        // bytes of data lie inside it.
        unsafe {
            let header: *mut libc::cmsghdr = control.0.as_mut_ptr().cast();
            (*header).cmsg_level = libc::SOL_UDP;
            (*header).cmsg_type = libc::UDP_SEGMENT;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as _;
            libc::CMSG_DATA(header).cast::<u16>().write_unaligned(segment);
        }
        control
    }
}

/// Sends up to [`MAX_MESSAGES`] messages to one peer; returns how many of them, from the first, the system took. An error
/// concerns the first one.
///
/// The addresses of pieces may be any: the system reads them as the process itself, and answers EFAULT where it cannot.
pub(super) fn send_messages<'a>(
    fd: BorrowedFd<'_>,
    peer: &Name,
    messages: impl Iterator<Item = Message<'a>>,
) -> io::Result<usize> {
    // Only what is used is written: these arrays are larger than most calls need.
    let mut headers = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; MAX_MESSAGES];
    let mut controls = [const { MaybeUninit::<SegmentControl>::uninit() }; MAX_MESSAGES];
    let mut count = 0;
    for (message, (header, control)) in messages.zip(headers.iter_mut().zip(&mut controls)) {
        // SAFETY: all-zero bytes are a valid mmsghdr: null pointers with zero lengths.
        let mmsghdr = header.write(unsafe { zeroed() });
        let header = &mut mmsghdr.msg_hdr;
        header.msg_name = peer.as_ptr().cast_mut().cast();
        header.msg_namelen = peer.len();
        header.msg_iov = message.pieces.as_ptr().cast_mut().cast();
        header.msg_iovlen = message.pieces.len() as _;
        if message.segment != 0 {
            header.msg_control = (&raw mut *control.write(SegmentControl::new(message.segment))).cast();
            header.msg_controllen = SEGMENT_CONTROL as _;
        }
        count += 1;
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the first `count` headers are set up: name, iovec array (Piece has its layout) and control outlive the call and
    // have the lengths told. sendmmsg only reads through them, and writes msg_len in `headers`, which is ours. The memory behind
    // the pieces is read by the kernel with its own fault handling.
    let sent = unsafe { libc::syscall(libc::SYS_sendmmsg, fd.as_raw_fd(), headers.as_mut_ptr(), count, flags) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
}

/// What the system told about one received datagram.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    /// Whence. `None` if it is not IP.
    pub(super) src: Option<SocketAddr>,
    /// Destination address.
    pub(super) dst: Option<IpAddr>,
    /// The interface it came in by; 0: not told.
    pub(super) ifindex: u32,
    /// Bytes in the buffer.
    pub(super) len: usize,
    /// Size of all its packets but the last; 0 if it is a single one.
    pub(super) segment: usize,
    pub(super) tclass: u8,
    pub(super) hop_limit: u8,
    /// How many datagrams the socket has dropped so far, if any.
    pub(super) dropped: Option<u32>,
    /// The datagram or the facts about it did not fit.
    pub(super) truncated: bool,
}

const RX_CONTROL: usize = 256;

#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct RxControl([u8; RX_CONTROL]);

/// Buffers for one `recvmmsg`, and what the last call said about them.
pub(super) struct RxBuffers {
    buffers: Vec<Box<[u8]>>,
    names: Vec<NameBuf>,
    controls: Vec<RxControl>,
    received: Vec<Received>,
}

impl RxBuffers {
    /// `count` buffers, at most [`MAX_MESSAGES`].
    pub(super) fn new(count: usize) -> RxBuffers {
        assert!((1..=MAX_MESSAGES).contains(&count), "{count} receive buffers");
        let buffers = (0..count).map(|_| vec![0; RX_BUFFER].into_boxed_slice()).collect();
        RxBuffers {
            buffers,
            names: vec![NameBuf::zeroed(); count],
            controls: vec![RxControl([0; RX_CONTROL]); count],
            received: Vec::with_capacity(count),
        }
    }

    /// What the last [`RxBuffers::fill`] received.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&Received, &mut [u8])> {
        self.received.iter().zip(&mut self.buffers).map(|(received, buffer)| (received, &mut buffer[..received.len]))
    }

    /// Receives up to `limit` datagrams without waiting; returns their number. "Nothing there" is the error `WouldBlock`.
    pub(super) fn fill(&mut self, fd: BorrowedFd<'_>, limit: usize) -> io::Result<usize> {
        self.received.clear();
        let limit = limit.min(self.buffers.len());
        // Only what is used is written: these arrays are larger than most calls need.
        let mut headers = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; MAX_MESSAGES];
        let mut pieces = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_MESSAGES];
        for i in 0..limit {
            let buffer = &mut self.buffers[i];
            let piece = pieces[i].write(libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() });
            // SAFETY: all-zero bytes are a valid mmsghdr: null pointers with zero lengths.
            let header = &mut headers[i].write(unsafe { zeroed() }).msg_hdr;
            header.msg_name = (&raw mut self.names[i]).cast();
            header.msg_namelen = size_of::<NameBuf>() as socklen_t;
            header.msg_iov = &raw mut *piece;
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut self.controls[i]).cast();
            header.msg_controllen = RX_CONTROL as _;
        }
        // SAFETY: the first `limit` headers point to a name, one piece (a whole buffer of ours, exclusively borrowed) and a control
        // buffer each, of the lengths told; all outlive the call.
        let count = unsafe {
            libc::syscall(
                libc::SYS_recvmmsg,
                fd.as_raw_fd(),
                headers.as_mut_ptr(),
                limit,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut::<libc::timespec>(),
            )
        };
        if count < 0 {
            return Err(io::Error::last_os_error());
        }
        for (header, name) in headers.iter().zip(&self.names).take(count as usize) {
            // SAFETY: at most the first `limit` headers were filled by the system, and those were initialised above.
            self.received.push(received(unsafe { header.assume_init_ref() }, name));
        }
        Ok(count as usize)
    }
}

/// Reads what recvmmsg left in a header.
fn received(header: &libc::mmsghdr, name: &NameBuf) -> Received {
    let mut received = Received {
        src: name.addr(),
        dst: None,
        ifindex: 0,
        len: (header.msg_len as usize).min(RX_BUFFER),
        segment: 0,
        tclass: 0,
        hop_limit: 64,
        dropped: None,
        truncated: header.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0,
    };
    // SAFETY: msg_control points to a live buffer of which the system filled msg_controllen bytes with control messages.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(&header.msg_hdr) };
    while !control.is_null() {
        // SAFETY: FIRSTHDR and NXTHDR give only headers that lie wholly in the buffer.
        let (level, kind, data) =
            unsafe { ((*control).cmsg_level, (*control).cmsg_type, libc::CMSG_DATA(control).cast_const()) };
        match (level, kind) {
            (libc::SOL_UDP, libc::UDP_GRO) => received.segment = control_value::<c_int>(control, data).max(0) as usize,
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                let info: libc::in_pktinfo = control_value(control, data);
                received.dst = Some(Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes()).into());
                received.ifindex = info.ipi_ifindex.max(0) as u32;
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                let info: libc::in6_pktinfo = control_value(control, data);
                received.dst = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).to_canonical());
                received.ifindex = info.ipi6_ifindex;
            }
            (libc::IPPROTO_IP, libc::IP_TOS) => received.tclass = control_value::<u8>(control, data),
            (libc::IPPROTO_IP, libc::IP_TTL) => received.hop_limit = control_value::<c_int>(control, data) as u8,
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => received.tclass = control_value::<c_int>(control, data) as u8,
            (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                received.hop_limit = control_value::<c_int>(control, data) as u8;
            }
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => received.dropped = Some(control_value::<u32>(control, data)),
            _ => {}
        }
        // SAFETY: as for FIRSTHDR; `control` is a header of this buffer.
        control = unsafe { libc::CMSG_NXTHDR(&header.msg_hdr, control) };
    }
    received
}

/// What the system puts into a control message: plain numbers, for which every pattern of bytes is a value.
trait ControlData: Copy {}
impl ControlData for u8 {}
impl ControlData for u32 {}
impl ControlData for c_int {}
impl ControlData for libc::in_pktinfo {}
impl ControlData for libc::in6_pktinfo {}

/// Copies the data out of a control message.
#[allow(clippy::unnecessary_cast)] // the type of cmsg_len differs between C libraries
fn control_value<T: ControlData>(header: *const libc::cmsghdr, data: *const u8) -> T {
    // SAFETY: `header` is one of FIRSTHDR or NXTHDR. CMSG_LEN is arithmetic.
    let (have, need) = unsafe { ((*header).cmsg_len as usize, libc::CMSG_LEN(size_of::<T>() as u32) as usize) };
    assert!(have >= need, "the system sent a control message of {have} bytes where {need} are due");
    // SAFETY: `data` is the header's CMSG_DATA with at least size_of::<T>() bytes behind it (just checked), and T is plain numbers.
    unsafe { data.cast::<c_void>().cast::<T>().read_unaligned() }
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
