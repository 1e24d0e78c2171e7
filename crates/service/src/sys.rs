//! The system calls that no safe crate offers: the only `unsafe` code of this crate.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulong, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::LazyLock;
use std::{io, mem, ptr};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::DupFlags;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};

/// One instruction of a classic BPF program.
pub(crate) type BpfInstruction = libc::sock_filter;

/// Whether this program has more rights than its caller: a set-user-ID program, one with file capabilities, and the like.
pub(crate) fn is_secure_execution() -> bool {
    // SAFETY: reads a word that the kernel gave the process at its start.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Sets a socket option whose value is an `int`.
pub(crate) fn set_int_option(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    set_option(socket, level, name, &value)
}

/// Sets a socket option whose value is some structure of C.
fn set_option<T: Copy>(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &T) -> io::Result<()> {
    // SAFETY: the pointer and the length describe `value`, which the kernel only reads during the call.
    let status = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const *value).cast(), mem::size_of::<T>() as u32)
    };
    check(status)
}

/// Joins (or leaves) a multicast group on an interface. A socket of both families does so for either.
pub(crate) fn set_membership(socket: BorrowedFd<'_>, group: IpAddr, ifindex: u32, member: bool) -> io::Result<()> {
    let index = c_int::try_from(ifindex).map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
    match group {
        IpAddr::V4(group) => {
            let request = libc::ip_mreqn {
                imr_multiaddr: libc::in_addr { s_addr: u32::from_ne_bytes(group.octets()) },
                imr_address: libc::in_addr { s_addr: 0 },
                imr_ifindex: index,
            };
            let name = if member { libc::IP_ADD_MEMBERSHIP } else { libc::IP_DROP_MEMBERSHIP };
            set_option(socket, libc::IPPROTO_IP, name, &request)
        }
        IpAddr::V6(group) => {
            let request = libc::ipv6_mreq {
                ipv6mr_multiaddr: libc::in6_addr { s6_addr: group.octets() },
                ipv6mr_interface: ifindex,
            };
            let name = if member { libc::IPV6_ADD_MEMBERSHIP } else { libc::IPV6_DROP_MEMBERSHIP };
            set_option(socket, libc::IPPROTO_IPV6, name, &request)
        }
    }
}

/// Makes `program` choose the socket of the `SO_REUSEPORT` group for each packet.
pub(crate) fn attach_reuseport_program(socket: BorrowedFd<'_>, program: &[BpfInstruction]) -> io::Result<()> {
    attach_program(socket, libc::SO_ATTACH_REUSEPORT_CBPF, program)
}

/// Makes `program` tell how many bytes of a packet a socket takes; 0: it is dropped, and counted as such.
pub(crate) fn attach_filter(socket: BorrowedFd<'_>, program: &[BpfInstruction]) -> io::Result<()> {
    attach_program(socket, libc::SO_ATTACH_FILTER, program)
}

fn attach_program(socket: BorrowedFd<'_>, option: c_int, program: &[BpfInstruction]) -> io::Result<()> {
    let fprog = libc::sock_fprog {
        len: u16::try_from(program.len()).expect("a program fits its 16-bit length"),
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: `fprog` points to `len` instructions, which the kernel copies during the call and never writes.
    let status = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const fprog).cast(),
            mem::size_of::<libc::sock_fprog>() as u32,
        )
    };
    check(status)
}

/// How many packets a socket has dropped since it was made (`SO_MEMINFO`); whoever has it may ask.
pub(crate) fn drops(socket: BorrowedFd<'_>) -> io::Result<u32> {
    /// `SK_MEMINFO_DROPS` of linux/sock_diag.h.
    const DROPS: usize = 8;
    let mut counters = [0u32; DROPS + 1];
    let mut len = mem::size_of_val(&counters) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `counters`, which are plain numbers.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            counters.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    check(status)?;
    if (len as usize) < mem::size_of_val(&counters) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(counters[DROPS])
}

/// Who is at the other end of a Unix socket, as this process's namespaces show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// 0: the process lives in a foreign pid namespace.
    pub(crate) pid: u32,
    /// The overflow uid (65534): the user is unknown in this user namespace.
    pub(crate) uid: u32,
}

/// `SO_PEERCRED`. (rustix's version cannot express the pid 0 of a foreign pid namespace.)
pub(crate) fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `credentials`, which is a plain C struct.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    check(status)?;
    Ok(Peer { pid: u32::try_from(credentials.pid).unwrap_or(0), uid: credentials.uid })
}

/// A pidfd of the process that is at the other end of a Unix socket (`SO_PEERPIDFD`, since Linux 6.5).
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    /// asm-generic/socket.h; all architectures that Rust's standard library knows for Linux but MIPS, PA-RISC and SPARC have it.
    const SO_PEERPIDFD: c_int = 77;
    let mut pidfd: c_int = -1;
    let mut len = mem::size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `pidfd`, an int.
    let status = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, (&raw mut pidfd).cast(), &raw mut len)
    };
    check(status)?;
    // SAFETY: the kernel has just opened it for this process (closed on exec), and nobody else knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// Whether a descriptor is a pidfd. The kernel knows its own files: no other file is asked anything.
pub(crate) fn is_pidfd(descriptor: BorrowedFd<'_>) -> bool {
    let no_signal: c_int = 0;
    // SAFETY: signal 0 is none; the call looks whether it might be sent, and reads no memory where no `siginfo_t` is given.
    let status = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            descriptor.as_raw_fd(),
            no_signal,
            ptr::null::<libc::siginfo_t>(),
            0 as libc::c_uint,
        )
    };
    if status == 0 {
        return true;
    }
    match io::Error::last_os_error().raw_os_error() {
        // The process has ended.
        Some(libc::ESRCH) => true,
        // It is another user's; or a filter of system calls (seccomp) refuses this one, whatever the descriptor is. (EINVAL: it is of a
        // foreign pid namespace.)
        Some(libc::EPERM | libc::EINVAL) => is_told_of_as_pidfd(descriptor),
        _ => false,
    }
}

/// Whether the kernel tells of a process behind a descriptor. A file's own lines come from whoever made the file, who is the kernel
/// itself for all kinds that have such a line.
fn is_told_of_as_pidfd(descriptor: BorrowedFd<'_>) -> bool {
    fdinfo(descriptor).is_some_and(|told| told.lines().any(|line| line.starts_with("Pid:")))
}

/// What the kernel tells of a descriptor.
fn fdinfo(descriptor: BorrowedFd<'_>) -> Option<String> {
    std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", descriptor.as_raw_fd())).ok()
}

/// Has a Unix socket, and those that it accepts as a listener, take descriptors or refuse them (`SO_PASSRIGHTS`, since Linux 6.16).
pub(crate) fn pass_rights(socket: BorrowedFd<'_>, pass: bool) -> io::Result<()> {
    /// asm-generic/socket.h; see [`peer_pidfd`].
    const SO_PASSRIGHTS: c_int = 83;
    set_int_option(socket, libc::SOL_SOCKET, SO_PASSRIGHTS, c_int::from(pass))
}

/// How many descriptors the unread messages of a Unix socket have (since Linux 5.7); None: the system does not tell.
pub(crate) fn unread_descriptors(socket: BorrowedFd<'_>) -> Option<u64> {
    fdinfo(socket)?.lines().find_map(|line| line.strip_prefix("scm_fds:"))?.trim().parse().ok()
}

/// Whether the other end of a Unix socket has read everything that was sent on this one (unix(7), `SIOCOUTQ`).
pub(crate) fn is_all_read(socket: BorrowedFd<'_>) -> bool {
    let mut unread: c_int = -1;
    // SAFETY: the kernel writes an int to `unread`.
    let status = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
    status == 0 && unread == 0
}

/// What `ETOOMANYREFS` of sending a descriptor means, and what to do about it.
pub(crate) const MANY_IN_FLIGHT: &str = "this user has too many descriptors on their way between processes, which nobody has read yet (more than \
     RLIMIT_NOFILE allows): end programs that send some and do not read them, raise the service's hard limit (`ulimit -Hn`), or let it \
     have CAP_SYS_RESOURCE";

/// How many more descriptors this process can have; 0 also if there is no way to tell.
pub(crate) fn free_numbers() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let limit = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    // Since Linux 6.2 the folder's size is the number of its entries; before, it is 0.
    let counted = match rustix::fs::stat("/proc/self/fd").map(|stat| stat.st_size) {
        Ok(size) if size > 0 => usize::try_from(size).ok(),
        _ => std::fs::read_dir("/proc/self/fd").ok().map(Iterator::count),
    };
    counted.map_or(0, |used| limit.saturating_sub(used))
}

/// A datagram that arrived at a UDP socket.
pub(crate) struct Datagram {
    /// Bytes of it in the buffer.
    pub(crate) len: usize,
    pub(crate) src: SocketAddr,
    /// Unknown if the socket does not ask for packet information.
    pub(crate) dst: Option<IpAddr>,
    /// Bytes of each packet but the last, if the kernel has merged several (GRO); 0: it is one packet.
    pub(crate) segment: usize,
}

/// Receives one datagram with its destination address, or several that the kernel has merged; never blocks. Datagrams longer than
/// `buffer` are truncated. IPv4-mapped addresses are given as IPv4.
pub(crate) fn recv_datagram(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Datagram> {
    /// Room for both kinds of packet information and the size of segments, aligned as control messages are.
    #[repr(C, align(8))]
    struct Control([u8; 128]);

    let mut control = Control([0; 128]);
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: both are plain C structs for which all zeroes is a valid value.
    let (mut name, mut message): (libc::sockaddr_storage, libc::msghdr) = unsafe { (mem::zeroed(), mem::zeroed()) };
    message.msg_name = (&raw mut name).cast();
    message.msg_namelen = mem::size_of::<libc::sockaddr_storage>() as u32;
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    // SAFETY: every pointer in `message` is to a live local or to `buffer`, with its true length; no reference to any
    // of them is used during the call.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    let len = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    let src = socket_address(&name).ok_or(io::ErrorKind::InvalidData)?;
    let mut datagram = Datagram { len, src, dst: None, segment: 0 };
    read_control(&message, &mut datagram);
    Ok(datagram)
}

/// Notes what the control messages of a received datagram tell.
fn read_control(message: &libc::msghdr, datagram: &mut Datagram) {
    // SAFETY: `message` was filled by a successful recvmsg and its control buffer lives; the CMSG functions stay inside
    // of it; structs and numbers are read unaligned, only where the header says that the whole of them is there.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            let room = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
            match ((*header).cmsg_level, (*header).cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_PKTINFO) if room >= mem::size_of::<libc::in_pktinfo>() => {
                    let info: libc::in_pktinfo = ptr::read_unaligned(libc::CMSG_DATA(header).cast());
                    datagram.dst = Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr))));
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) if room >= mem::size_of::<libc::in6_pktinfo>() => {
                    let info: libc::in6_pktinfo = ptr::read_unaligned(libc::CMSG_DATA(header).cast());
                    datagram.dst = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).to_canonical());
                }
                (libc::SOL_UDP, libc::UDP_GRO) if room >= mem::size_of::<c_int>() => {
                    let segment: c_int = ptr::read_unaligned(libc::CMSG_DATA(header).cast());
                    datagram.segment = usize::try_from(segment).unwrap_or(0);
                }
                _ => {}
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

fn socket_address(name: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match c_int::from(name.ss_family) {
        libc::AF_INET => {
            // SAFETY: a sockaddr_storage is larger than and as aligned as a sockaddr_in, and the family says it is one.
            let v4 = unsafe { &*(&raw const *name).cast::<libc::sockaddr_in>() };
            Some(SocketAddrV4::new(u32::from_be(v4.sin_addr.s_addr).into(), u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above, for sockaddr_in6.
            let v6 = unsafe { &*(&raw const *name).cast::<libc::sockaddr_in6>() };
            let port = u16::from_be(v6.sin6_port);
            Some(match Ipv6Addr::from(v6.sin6_addr.s6_addr).to_canonical() {
                IpAddr::V4(v4) => SocketAddrV4::new(v4, port).into(),
                IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, v6.sin6_scope_id).into(),
            })
        }
        _ => None,
    }
}

/// Masks all signals of the calling thread: handlers of the program must not run in threads of ours.
pub(crate) fn mask_signals() {
    // SAFETY: `set` is a local that sigfillset initialises before it is read.
    unsafe {
        let mut set: libc::sigset_t = mem::zeroed();
        libc::sigfillset(&raw mut set);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
    }
}

/// What a detached process is started with.
pub(crate) struct Command<'a> {
    pub(crate) path: &'a CStr,
    pub(crate) arguments: &'a [CString],
    pub(crate) environment: &'a [CString],
    /// Becomes standard input and standard error; its number must be above 2.
    pub(crate) null: BorrowedFd<'a>,
    /// Becomes standard output; its number must be above 2.
    pub(crate) stdout: BorrowedFd<'a>,
}

/// Starts a program that has nothing to do with this process: a session of its own, default signal actions, directory
/// `/`, no descriptors but the three given. This process gets no SIGCHLD from it and has no child to wait for, unless it
/// has taken upon itself to be the parent of every orphan below it (process 1 of a PID namespace, or a subreaper): there
/// is no way around it then, and the service's end is one more for it to reap. The error is the one of `clone` or
/// `execve`.
///
/// Like posix_spawn, the children share this process's memory until they exec or exit (a copy of a large program's page
/// tables is not free), and so do nothing but system calls on what is prepared here.
pub(crate) fn spawn_detached(command: &Command<'_>) -> io::Result<()> {
    assert!(command.null.as_raw_fd() > 2 && command.stdout.as_raw_fd() > 2, "descriptors 0..=2 are overwritten");
    let pointers = |strings: &[CString]| -> Vec<*const c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
    };
    let (argv, envp) = (pointers(command.arguments), pointers(command.environment));
    let (mut outer_stack, mut inner_stack) = (ChildStack::new(), ChildStack::new());
    let mut plan = ChildPlan {
        path: command.path.as_ptr(),
        argv: argv.as_ptr(),
        envp: envp.as_ptr(),
        null: command.null.as_raw_fd(),
        stdout: command.stdout.as_raw_fd(),
        descriptors: descriptor_limit(),
        inner_stack: inner_stack.top(),
        errno: 0,
    };
    // SAFETY: all signals are masked around the calls, so no handler of the program runs in a child that shares its
    // memory. CLONE_VFORK suspends this thread until the child is gone (it starts its own child in the same way), so
    // that `plan`, the stacks and the strings outlive every use, and nobody else knows of them. The exit signal is 0;
    // the waitpid removes the first child; the second one is then nobody's child.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = (mem::zeroed(), mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let pid = libc::clone(outer_child, outer_stack.top(), CLONE_LIKE_VFORK, (&raw mut plan).cast());
        let failure = (pid < 0).then(io::Error::last_os_error);
        if failure.is_none() {
            while libc::waitpid(pid, ptr::null_mut(), libc::__WCLONE) < 0 && *libc::__errno_location() == libc::EINTR {}
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        if let Some(error) = failure {
            return Err(error);
        }
    }
    // SAFETY: the children wrote it through their pointer, if at all, before the clone call returned.
    match unsafe { ptr::read_volatile(&raw const plan.errno) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Memory shared, parent suspended, no signal at the end.
const CLONE_LIKE_VFORK: c_int = libc::CLONE_VM | libc::CLONE_VFORK;

/// Everything that the two children of [`spawn_detached`] use.
struct ChildPlan {
    path: *const c_char,
    argv: *const *const c_char,
    envp: *const *const c_char,
    null: c_int,
    stdout: c_int,
    descriptors: c_int,
    inner_stack: *mut c_void,
    /// Why it failed; 0: it did not.
    errno: c_int,
}

struct ChildStack(Vec<u128>);

impl ChildStack {
    fn new() -> ChildStack {
        ChildStack(vec![0; 64 * 1024 / mem::size_of::<u128>()])
    }

    /// The end of the stack, 16-byte aligned: stacks grow down.
    fn top(&mut self) -> *mut c_void {
        self.0.as_mut_ptr_range().end.cast()
    }
}

/// The first child: makes the session and the second child, and goes.
extern "C" fn outer_child(argument: *mut c_void) -> c_int {
    let plan: *mut ChildPlan = argument.cast();
    // SAFETY: `argument` is the plan of spawn_detached, whose frame waits for this process; system calls only.
    unsafe {
        libc::setsid();
        if libc::clone(inner_child, (*plan).inner_stack, CLONE_LIKE_VFORK, argument) < 0 {
            ptr::write_volatile(&raw mut (*plan).errno, *libc::__errno_location());
        }
        libc::_exit(0)
    }
}

/// Signals are numbered from 1 to this.
const SIGNALS: c_int = 64;

/// The second child: puts everything in order and becomes the program.
extern "C" fn inner_child(argument: *mut c_void) -> c_int {
    let plan: *mut ChildPlan = argument.cast();
    // SAFETY: as for outer_child, which is suspended meanwhile; only async-signal-safe calls. The descriptor table and
    // the signal actions are this process's own copies (neither CLONE_FILES nor CLONE_SIGHAND).
    unsafe {
        // The kernel's struct sigaction, all zero: SIG_DFL. (The C library's call refuses its own signals, which the
        // program may have been started with ignored.)
        let default = [0u64; 4];
        for signal in 1..=SIGNALS {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), ptr::null_mut::<c_void>(), 8usize);
        }
        libc::dup2((*plan).null, 0);
        libc::dup2((*plan).stdout, 1);
        libc::dup2((*plan).null, 2);
        if libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32) != 0 {
            for descriptor in 3..(*plan).descriptors {
                libc::close(descriptor);
            }
        }
        libc::chdir(c"/".as_ptr());
        let mut none: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        libc::execve((*plan).path, (*plan).argv, (*plan).envp);
        ptr::write_volatile(&raw mut (*plan).errno, *libc::__errno_location());
        libc::_exit(127)
    }
}

/// A process that has copies of some of this one's descriptors, nothing else of it, and one thing to do: to end when this is dropped. Whatever
/// it has the last copy of is closed by its end, which no option of a socket (`SO_LINGER`) delays.
#[derive(Debug)]
pub(crate) struct Heir {
    heirlooms: usize,
    /// It waits for the end of this.
    _life: OwnedFd,
}

/// So long a child of this process has to begin.
const BEGIN_WITHIN_S: i64 = 1;

impl Heir {
    /// When this returns it has the first ones of these descriptors, as many as [`Heir::heirlooms`] says, and no others: at no time has it a copy
    /// of anything else that somebody has sent, which it would have to close. Takes as long as a process takes to begin, at most a second.
    /// The process is added to `children`, also one that has not begun in time; it is to be waited for ([`has_ended`]).
    ///
    /// Errors: there is no process to be had, or the kernel cannot close whole ranges of descriptors (before Linux 5.9).
    pub(crate) fn of(descriptors: &[OwnedFd], children: &mut Vec<Pid>) -> io::Result<Heir> {
        use rustix::pipe::{PipeFlags, pipe_with};
        let mut shelf = SHELF.lock();
        let shelf = shelf.as_mut().ok_or(io::ErrorKind::Unsupported)?;
        let (begun, begins) = pipe_with(PipeFlags::CLOEXEC)?;
        let (lives, life) = pipe_with(PipeFlags::CLOEXEC)?;
        let laid = shelf.lay([&begins, &lives].into_iter().chain(descriptors))?;
        drop((begins, lives));
        let child = laid.share().inspect(|child| children.push(*child))?;
        if has_begun(child, &begun) {
            return Ok(Heir { heirlooms: laid.count - Laid::PIPES, _life: life });
        }
        // It has ended without a word, or somebody has stopped it.
        let _killed = rustix::process::kill_process(child, Signal::KILL);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// How many descriptors it has.
    pub(crate) fn heirlooms(&self) -> usize {
        self.heirlooms
    }
}

/// Whether a child says within a second that it has begun.
fn has_begun(child: Pid, begun: &OwnedFd) -> bool {
    // (No end of the pipe tells of its end: as long as it has not begun, it has this process's.)
    let Ok(ended) = rustix::process::pidfd_open(child, PidfdFlags::empty()) else { return false };
    let timeout = Timespec { tv_sec: BEGIN_WITHIN_S, tv_nsec: 0 };
    let mut looked = [PollFd::new(begun, PollFlags::IN), PollFd::new(&ended, PollFlags::IN)];
    let _either = rustix::event::poll(&mut looked, Some(&timeout));
    looked[0].revents().contains(PollFlags::IN) && rustix::io::read(begun, &mut [0u8; 1]) == Ok(1)
}

/// The lowest numbers of descriptors, at which nothing lies that somebody has sent. A child that has the table of descriptors together with this
/// process can leave it with copies of what lies below some number, and without touching the rest: what it had a copy of it would have to close,
/// and closing a copy of a file asks its file system, each time.
struct Shelf {
    /// What takes the places.
    null: OwnedFd,
    /// Ascending.
    places: Vec<OwnedFd>,
    /// All numbers below are taken, for good. A multiple of [`NUMBERS_COPIED`].
    end: c_int,
}

/// So many numbers are on the shelf, if the system does not allow very few.
const PLACES: usize = 96;

/// Kernels copy tables in words of so many numbers (since October 2024 to the number).
const NUMBERS_COPIED: usize = 64;

/// So many numbers the shelf takes where a process begins with it.
pub(crate) const LOW_NUMBERS: usize = PLACES.next_multiple_of(NUMBERS_COPIED);

/// The process's. None: there are no numbers for one.
static SHELF: LazyLock<Mutex<Option<Shelf>>> = LazyLock::new(|| {
    let shelf = Shelf::new();
    Mutex::new(shelf.inspect_err(|error| log::warn!("no numbers are kept to close what others send: {error}")).ok())
});

/// Takes the lowest numbers of descriptors for what [`Heir`]s are to have, once in a process: before anything is received from others. What has a
/// low number by then must not be closed as long as others send something ([`with_higher_number`]).
pub(crate) fn keep_low_numbers() {
    LazyLock::force(&SHELF);
}

/// The same with a number that [`keep_low_numbers`] does not want, if there are so many.
pub(crate) fn with_higher_number(descriptor: OwnedFd) -> OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(&descriptor, LOW_NUMBERS as c_int).unwrap_or(descriptor)
}

impl Shelf {
    fn new() -> io::Result<Shelf> {
        use rustix::fs::{Mode, OFlags, open};
        let null = open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let wanted = PLACES.min(free_numbers() / 8);
        let mut places = Vec::new();
        loop {
            let place = rustix::io::fcntl_dupfd_cloexec(&null, 0)?;
            let next = place.as_raw_fd() + 1;
            places.push(place);
            if places.len() >= wanted && (next as usize).is_multiple_of(NUMBERS_COPIED) {
                return Ok(Shelf { null, places, end: next });
            }
        }
    }

    /// Lays copies of the first ones of these on the shelf.
    fn lay<'a>(&mut self, descriptors: impl Iterator<Item = &'a OwnedFd>) -> io::Result<Laid<'_>> {
        let mut laid = Laid { shelf: self, count: 0 };
        for descriptor in descriptors.take(laid.shelf.places.len()) {
            laid.lay(descriptor)?;
        }
        Ok(laid)
    }
}

/// The pipes of an heir and its descriptors, as long as they lie on the shelf.
struct Laid<'a> {
    shelf: &'a mut Shelf,
    count: usize,
}

impl Laid<'_> {
    /// By one it says that it has begun, by one it learns that it is to end.
    const PIPES: usize = 2;

    fn lay(&mut self, descriptor: &OwnedFd) -> io::Result<()> {
        rustix::io::dup3(descriptor, &mut self.shelf.places[self.count], DupFlags::CLOEXEC)?;
        self.count += 1;
        Ok(())
    }

    /// Makes a child that takes copies of what lies here.
    fn share(&self) -> io::Result<Pid> {
        let kept: Vec<c_int> = self.shelf.places[..self.count].iter().map(AsRawFd::as_raw_fd).collect();
        let [begins, lives] = *kept.first_chunk::<{ Laid::PIPES }>().ok_or(io::ErrorKind::Unsupported)?;
        const FLAGS: c_int = libc::CLONE_FILES | libc::SIGCHLD;
        // SAFETY: as fork, but for the table of descriptors, which the child leaves at once; the child, in which there is this thread only,
        // makes system calls on what is prepared here until it ends. Without CLONE_VM and a stack of its own it has a copy of all memory, and
        // the other arguments are not looked at.
        let pid = unsafe {
            match libc::syscall(libc::SYS_clone, c_ulong::from(FLAGS.cast_unsigned()), 0 as c_ulong, 0, 0, 0) {
                0 => live_as_heir(&kept, self.shelf.end, begins, lives),
                pid => pid as c_int,
            }
        };
        Pid::from_raw(pid).filter(|_| pid > 0).ok_or_else(io::Error::last_os_error)
    }
}

impl Drop for Laid<'_> {
    fn drop(&mut self) {
        for place in &mut self.shelf.places[..self.count] {
            // It has no reason to fail; what stays is a copy of something that ends later by that.
            let _put_back = rustix::io::dup3(&self.shelf.null, place, DupFlags::CLOEXEC);
        }
    }
}

/// What the child of [`Heir::of`] does: leaves all from `end` on, closes what is not `kept` (ascending), says so, and waits for the end of the
/// other pipe.
///
/// # Safety
/// For a process that has just been made, with a copy of all memory. System calls only; the memory is the child's own.
unsafe fn live_as_heir(kept: &[c_int], end: c_int, begins: c_int, lives: c_int) -> ! {
    let mut next = 0;
    // SAFETY: only async-signal-safe calls, on locals that live through them and, once the first one has succeeded, on this process's own copies
    // of descriptors.
    unsafe {
        let close_range = |first: c_int, last: c_uint, flags: c_uint| {
            if libc::syscall(libc::SYS_close_range, first, last, flags) != 0 {
                libc::_exit(1);
            }
        };
        close_range(end, c_uint::MAX, libc::CLOSE_RANGE_UNSHARE);
        for descriptor in kept {
            if next < *descriptor {
                close_range(next, (*descriptor - 1) as c_uint, 0);
            }
            next = *descriptor + 1;
        }
        close_range(next, c_uint::MAX, 0);
        let mut byte = 0u8;
        libc::write(begins, (&raw const byte).cast(), 1);
        while libc::read(lives, (&raw mut byte).cast(), 1) < 0 && *libc::__errno_location() == libc::EINTR {}
        libc::_exit(0)
    }
}

/// Whether a child of this process has ended; it is forgotten then.
pub(crate) fn has_ended(child: Pid) -> bool {
    !matches!(rustix::process::waitpid(Some(child), WaitOptions::NOHANG), Ok(None) | Err(rustix::io::Errno::INTR))
}

/// How many descriptors to close one by one on kernels without close_range (before 5.9).
fn descriptor_limit() -> c_int {
    const AT_MOST: u64 = 65_536;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(AT_MOST);
    limit.min(AT_MOST) as c_int
}

fn check(status: c_int) -> io::Result<()> {
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The number of an error of this module.
pub(crate) fn errno(error: &io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(error).unwrap_or(rustix::io::Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    use super::*;

    #[test]
    fn pidfds_are_told_from_other_descriptors() {
        let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        assert!(is_pidfd(own.as_fd()) && is_told_of_as_pidfd(own.as_fd()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        let ended = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        child.wait().unwrap();
        assert!(is_pidfd(ended.as_fd()), "the process has ended");
        let (socket, _other) = crate::seqpacket::pair().unwrap();
        let file = std::fs::File::open("/proc/self/status").unwrap();
        for other in [socket.as_fd(), file.as_fd()] {
            assert!(!is_pidfd(other) && !is_told_of_as_pidfd(other));
        }
    }

    /// Behind a filter of system calls each descriptor was a pidfd: the thread that asks has the call refused.
    #[test]
    fn a_filter_of_system_calls_makes_no_pidfds() {
        std::thread::spawn(|| {
            refuse_pidfd_send_signal();
            let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
            let (socket, _other) = crate::seqpacket::pair().unwrap();
            assert!(is_pidfd(own.as_fd()));
            assert!(!is_pidfd(socket.as_fd()));
        })
        .join()
        .unwrap();
    }

    /// EPERM for this thread's calls of `pidfd_send_signal`, as sandboxes have it.
    fn refuse_pidfd_send_signal() {
        let instruction = |code: u32, k, jf| BpfInstruction { code: code as u16, jt: 0, jf, k };
        // The number of the call is the first word of `seccomp_data`.
        let program = [
            instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
            instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_pidfd_send_signal as u32, 1),
            instruction(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0),
            instruction(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
        ];
        let fprog = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
        // SAFETY: `fprog` points to `len` instructions, which the kernel copies during the call; the filter is of this thread only.
        let status = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const fprog)
        };
        assert_eq!(status, 0, "{}", io::Error::last_os_error());
    }
}
