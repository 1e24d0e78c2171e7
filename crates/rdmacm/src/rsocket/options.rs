//! Socket options: `rsetsockopt`, `rgetsockopt`, `rfcntl`.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use ferroce_abi::ibv_sa_path_rec;
use ferroce_rsocket::{LOW_WATER, QUEUE_MAX, from_scaled, to_scaled};
use libc::socklen_t;

use super::{Entry, Inner, Socket, State, config, find_any};
use crate::entry::{Call, Refusal, given, rdma};

/// Options of RDMA (rsocket.h).
const SOL_RDMA: c_int = 0x10000;
const RDMA_SQSIZE: c_int = 0;
const RDMA_RQSIZE: c_int = 1;
const RDMA_INLINE: c_int = 2;
const RDMA_IOMAPSIZE: c_int = 3;
const RDMA_ROUTE: c_int = 4;

/// Largest buffer of a socket, in bytes.
pub(super) const BUFFER_MAX: u32 = 1 << 30;
/// What `TCP_CONGESTION` is called here.
const CONGESTION: &[u8] = b"rdma";
/// `struct tcp_info` of glibc.
const TCP_INFO_LEN: usize = 104;
const TCP_ESTABLISHED: u8 = 1;
const TCP_CLOSE: u8 = 7;
const TCP_LISTEN: u8 = 10;

/// Sizes of an endpoint that is to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Work requests.
    pub(super) send_queue: u16,
    pub(super) receive_queue: u16,
    /// Bytes.
    pub(super) send_buffer: u32,
    /// Bytes, even.
    pub(super) receive_buffer: u32,
    /// Longest payload that goes inline, in bytes.
    pub(super) inline: u16,
    /// Mappings that the peer may tell.
    pub(super) iomaps: u16,
}

/// What a program has set.
#[derive(Clone)]
pub(super) struct Options {
    pub(super) sizes: Sizes,
    pub(super) is_nonblocking: bool,
    pub(super) is_cloexec: bool,
    pub(super) receive_timeout: Option<Duration>,
    pub(super) send_timeout: Option<Duration>,
    /// How long `rclose` waits; None: until all is sent.
    pub(super) linger: Option<Duration>,
    pub(super) tos: u8,
    reuse: bool,
    keepalive: bool,
    keepalive_s: c_int,
    oob_inline: bool,
    no_delay: bool,
    v6_only: bool,
}

impl Options {
    pub(super) fn new() -> Options {
        Options {
            sizes: config::get().sizes,
            is_nonblocking: false,
            is_cloexec: false,
            receive_timeout: None,
            send_timeout: None,
            linger: None,
            tos: 0,
            reuse: false,
            keepalive: false,
            keepalive_s: 7200,
            oob_inline: false,
            no_delay: false,
            v6_only: false,
        }
    }

    /// What a socket has that a listener with these accepts: as on Linux, all but the flags of the descriptor.
    pub(super) fn inherited(&self) -> Options {
        Options { is_nonblocking: false, is_cloexec: false, ..self.clone() }
    }
}

/// An option's value, as the program gives it.
pub(super) struct Value {
    start: *const c_void,
    len: usize,
}

impl Value {
    /// As C has it.
    pub(super) fn raw(&self) -> (*const c_void, socklen_t) {
        (self.start, self.len as socklen_t)
    }

    /// The value as a `T`, whatever its alignment.
    fn read<T: Copy>(&self) -> Call<T> {
        // SAFETY: the program's, by the contract of the function.
        unsafe { given(self.start.cast::<u8>(), "the option's value") }?;
        if self.len < size_of::<T>() {
            return Err(Refusal::invalid(format!("the option's value has {} bytes, not {}", self.len, size_of::<T>())));
        }
        // SAFETY: not NULL, and long enough; integers, for which all bits mean something.
        Ok(unsafe { self.start.cast::<T>().read_unaligned() })
    }

    fn flag(&self) -> Call<bool> {
        Ok(self.read::<c_int>()? != 0)
    }

    /// A number of at least 0.
    fn number(&self) -> Call<u32> {
        let value = self.read::<c_int>()?;
        u32::try_from(value).map_err(|_| Refusal::invalid(format!("the option's value is {value}")))
    }

    fn timeout(&self) -> Call<Option<Duration>> {
        let value = self.read::<libc::timeval>()?;
        let (Ok(seconds), Ok(micros)) = (u64::try_from(value.tv_sec), u32::try_from(value.tv_usec)) else {
            return Err(Refusal::new(libc::EDOM, "the timeout is negative"));
        };
        let timeout = Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros.into()));
        Ok((timeout > Duration::ZERO).then_some(timeout))
    }
}

fn unknown(level: c_int, option: c_int) -> Refusal {
    Refusal::new(libc::ENOPROTOOPT, format!("option {option} of level {level} is not available"))
}

/// Twice what is asked for, as Linux does it.
fn buffer(value: &Value, least: u32) -> Call<u32> {
    Ok(value.number()?.saturating_mul(2).clamp(least, BUFFER_MAX) & !1)
}

fn set(socket: &Socket, level: c_int, option: c_int, value: &Value) -> Call<()> {
    let mut guard = socket.inner();
    let inner: &mut Inner = &mut guard;
    let is_open = matches!(inner.state, State::Idle | State::Listening { .. });
    match (level, option) {
        (SOL_RDMA, _) => set_rdma(&mut inner.options.sizes, option, value, is_open),
        (libc::IPPROTO_TCP, _) => set_tcp(&mut inner.options, option, value),
        (libc::SOL_SOCKET, _) => set_socket(inner, option, value, is_open),
        (libc::IPPROTO_IP, libc::IP_TOS) => {
            inner.options.tos = value.number()? as u8;
            Ok(())
        }
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => {
            inner.options.v6_only = value.flag()?;
            inner.id.get().inner().v6_only = inner.options.v6_only;
            Ok(())
        }
        _ => Err(unknown(level, option)),
    }
}

/// Sets what sockets of both kinds have of their own; None: it is another option.
pub(super) fn set_sizes(
    options: &mut Options,
    level: c_int,
    option: c_int,
    value: &Value,
    is_open: bool,
) -> Option<Call<()>> {
    let (sizes, is_receive) = (&mut options.sizes, option == libc::SO_RCVBUF);
    Some(match (level, option) {
        (SOL_RDMA, _) => set_rdma(sizes, option, value, is_open),
        (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_SNDBUF) => buffer(value, 2 * LOW_WATER).map(|wanted| {
            let place = if is_receive { &mut sizes.receive_buffer } else { &mut sizes.send_buffer };
            if is_open {
                *place = wanted;
            }
        }),
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => value.timeout().map(|timeout| options.receive_timeout = timeout),
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => value.timeout().map(|timeout| options.send_timeout = timeout),
        _ => return None,
    })
}

fn set_socket(inner: &mut Inner, option: c_int, value: &Value, is_open: bool) -> Call<()> {
    let options = &mut inner.options;
    if let Some(done) = set_sizes(options, libc::SOL_SOCKET, option, value, is_open) {
        return done;
    }
    match option {
        libc::SO_REUSEADDR => {
            options.reuse = value.flag()?;
            inner.id.get().inner().reuse = options.reuse;
        }
        libc::SO_LINGER => {
            let linger = value.read::<libc::linger>()?;
            let seconds = u64::try_from(linger.l_linger).unwrap_or(0);
            options.linger = (linger.l_onoff != 0).then(|| Duration::from_secs(seconds));
        }
        libc::SO_KEEPALIVE => options.keepalive = value.flag()?,
        libc::SO_OOBINLINE => options.oob_inline = value.flag()?,
        other => return Err(unknown(libc::SOL_SOCKET, other)),
    }
    Ok(())
}

fn set_tcp(options: &mut Options, option: c_int, value: &Value) -> Call<()> {
    match option {
        libc::TCP_NODELAY => options.no_delay = value.flag()?,
        libc::TCP_KEEPIDLE => {
            options.keepalive_s = match value.read::<c_int>()? {
                seconds @ 1.. => seconds,
                other => return Err(Refusal::invalid(format!("{other} s between keepalives"))),
            };
        }
        // Of a reliable connection they mean nothing.
        libc::TCP_KEEPCNT | libc::TCP_KEEPINTVL | libc::TCP_MAXSEG | libc::TCP_CONGESTION => {}
        other => return Err(unknown(libc::IPPROTO_TCP, other)),
    }
    Ok(())
}

fn set_rdma(sizes: &mut Sizes, option: c_int, value: &Value, is_open: bool) -> Call<()> {
    if !is_open {
        return Err(Refusal::invalid("the rsocket is connected: its sizes are fixed"));
    }
    let queue = |value: &Value| Ok(u16::try_from(value.number()?).unwrap_or(u16::MAX).min(QUEUE_MAX));
    match option {
        RDMA_SQSIZE => sizes.send_queue = queue(value)?,
        RDMA_RQSIZE => sizes.receive_queue = queue(value)?,
        RDMA_INLINE => sizes.inline = queue(value)?,
        RDMA_IOMAPSIZE => sizes.iomaps = from_scaled(to_scaled(value.number()?)),
        RDMA_ROUTE => return Err(Refusal::new(libc::EOPNOTSUPP, "RoCE has no path records to set")),
        other => return Err(unknown(SOL_RDMA, other)),
    }
    Ok(())
}

/// An option's value as bytes of the host.
fn get(socket: &Socket, level: c_int, option: c_int) -> Call<Vec<u8>> {
    let mut guard = socket.inner();
    let inner: &mut Inner = &mut guard;
    let options = &inner.options;
    if let Some(bytes) = sizes_of(options, level, option) {
        return Ok(bytes);
    }
    let flag = |flag: bool| Ok(c_int::from(flag).to_ne_bytes().to_vec());
    let number = |number: u32| Ok(number.to_ne_bytes().to_vec());
    match (level, option) {
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            let error = std::mem::take(&mut inner.error);
            Ok(error.to_ne_bytes().to_vec())
        }
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) => flag(options.reuse),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => flag(options.keepalive),
        (libc::SOL_SOCKET, libc::SO_OOBINLINE) => flag(options.oob_inline),
        (libc::SOL_SOCKET, libc::SO_BROADCAST) => flag(false),
        (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => flag(matches!(inner.state, State::Listening { .. })),
        (libc::SOL_SOCKET, libc::SO_TYPE) => Ok(libc::SOCK_STREAM.to_ne_bytes().to_vec()),
        (libc::SOL_SOCKET, libc::SO_PROTOCOL) => Ok(libc::IPPROTO_TCP.to_ne_bytes().to_vec()),
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => Ok(socket.domain.to_ne_bytes().to_vec()),
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            let seconds = options.linger.map_or(0, |linger| c_int::try_from(linger.as_secs()).unwrap_or(c_int::MAX));
            Ok([c_int::from(options.linger.is_some()), seconds].map(c_int::to_ne_bytes).concat())
        }
        (libc::IPPROTO_IP, libc::IP_TOS) => number(options.tos.into()),
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => flag(options.v6_only),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => flag(options.no_delay),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => Ok(options.keepalive_s.to_ne_bytes().to_vec()),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT | libc::TCP_KEEPINTVL) => number(1),
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => Ok([CONGESTION, &[0; 16 - CONGESTION.len()]].concat()),
        (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => number(path(inner).map_or(2048, |path| 128 << path.mtu.min(5))),
        (libc::IPPROTO_TCP, libc::TCP_INFO) => {
            let mut info = vec![0; TCP_INFO_LEN];
            info[0] = match inner.state {
                State::Connected(_) => TCP_ESTABLISHED,
                State::Listening { .. } => TCP_LISTEN,
                _ => TCP_CLOSE,
            };
            Ok(info)
        }
        (SOL_RDMA, RDMA_ROUTE) => Ok(path(inner).map_or_else(Vec::new, |path| path_data(&path))),
        _ => Err(unknown(level, option)),
    }
}

/// What [`set_sizes`] sets.
pub(super) fn sizes_of(options: &Options, level: c_int, option: c_int) -> Option<Vec<u8>> {
    let number = |number: u32| number.to_ne_bytes().to_vec();
    Some(match (level, option) {
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => number(options.sizes.receive_buffer),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => number(options.sizes.send_buffer),
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => timeval(options.receive_timeout),
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => timeval(options.send_timeout),
        (SOL_RDMA, RDMA_SQSIZE) => number(options.sizes.send_queue.into()),
        (SOL_RDMA, RDMA_RQSIZE) => number(options.sizes.receive_queue.into()),
        (SOL_RDMA, RDMA_INLINE) => number(options.sizes.inline.into()),
        (SOL_RDMA, RDMA_IOMAPSIZE) => number(options.sizes.iomaps.into()),
        _ => return None,
    })
}

/// Writes an option's value as far as there is room, and how much that is.
pub(super) fn give(bytes: &[u8], value: *mut c_void, len: *mut socklen_t) -> Call<()> {
    // SAFETY: the program's, by the contract of the function.
    let room = *unsafe { given(len, "the option's length") }? as usize;
    // SAFETY: as above.
    unsafe { given(value.cast_const().cast::<u8>(), "the place for the option's value") }?;
    let part = bytes.len().min(room);
    // SAFETY: room for as many bytes, by the contract of the function.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast::<u8>(), part);
        *len = part as socklen_t;
    }
    Ok(())
}

/// `fcntl`: the flags of the descriptor.
pub(super) fn control(options: &mut Options, command: c_int, argument: c_int) -> Call<c_int> {
    match command {
        libc::F_GETFL => Ok(libc::O_RDWR | if options.is_nonblocking { libc::O_NONBLOCK } else { 0 }),
        libc::F_SETFL => {
            options.is_nonblocking = argument & libc::O_NONBLOCK != 0;
            Ok(0)
        }
        libc::F_GETFD => Ok(if options.is_cloexec { libc::FD_CLOEXEC } else { 0 }),
        libc::F_SETFD => {
            options.is_cloexec = argument & libc::FD_CLOEXEC != 0;
            Ok(0)
        }
        other => {
            let what = format!("command {other}: use F_GETFL, F_SETFL, F_GETFD or F_SETFD");
            Err(Refusal::new(libc::EOPNOTSUPP, what))
        }
    }
}

fn timeval(timeout: Option<Duration>) -> Vec<u8> {
    let timeout = timeout.unwrap_or_default();
    let seconds = libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX);
    let micros = libc::suseconds_t::from(timeout.subsec_micros());
    [seconds.to_ne_bytes(), micros.to_ne_bytes()].concat()
}

/// The way to the peer, once it is known.
fn path(inner: &Inner) -> Option<ibv_sa_path_rec> {
    // SAFETY: a live id; the record is NULL or the id's.
    unsafe { (*inner.id.get().as_ptr()).route.path_rec.as_ref().copied() }
}

/// `struct ibv_path_data` (sa.h): flags, 4 reserved bytes, and a path record as it is on the wire (IBA 15.2.5.16).
fn path_data(path: &ibv_sa_path_rec) -> Vec<u8> {
    const EXACTLY: u8 = 2 << 6;
    let flow_and_hops = u32::from_be(path.flow_label) << 8 | u32::from(path.hop_limit);
    let mut bytes = vec![0; 16];
    bytes[..4].copy_from_slice(&u32::from(path.preference).to_ne_bytes());
    bytes.extend(path.dgid.raw);
    bytes.extend(path.sgid.raw);
    bytes.extend(path.dlid.to_ne_bytes());
    bytes.extend(path.slid.to_ne_bytes());
    bytes.extend(flow_and_hops.to_be_bytes());
    bytes.push(path.traffic_class);
    bytes.push(u8::from(path.reversible != 0) << 7 | 1);
    bytes.extend(path.pkey.to_ne_bytes());
    bytes.extend(u16::from(path.sl).to_be_bytes());
    bytes.extend([path.mtu | EXACTLY, path.rate | EXACTLY, path.packet_life_time | EXACTLY, 0]);
    bytes.extend([0; 6]);
    bytes
}

rdma! {
    /// `rsetsockopt`, see rsocket(7). SO_KEEPALIVE is accepted and does nothing: that a peer's process is gone is told without it.
    fn rsetsockopt(socket: c_int, level: c_int, option: c_int, value: *const c_void, len: socklen_t) -> c_int {
        let value = Value { start: value, len: len as usize };
        match find_any(socket)? {
            Entry::Stream(socket) => set(&socket, level, option, &value)?,
            Entry::Datagram(socket) => socket.set_option(level, option, &value)?,
        }
        Ok(0)
    }

    /// `rgetsockopt`, see rsocket(7).
    fn rgetsockopt(socket: c_int, level: c_int, option: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int {
        match find_any(socket)? {
            Entry::Stream(socket) => {
                // SAFETY: by the contract of the function.
                unsafe { given(len, "the option's length") }?;
                // SAFETY: as above.
                unsafe { given(value.cast_const().cast::<u8>(), "the place for the option's value") }?;
                give(&get(&socket, level, option)?, value, len)?;
            }
            Entry::Datagram(socket) => socket.option(level, option, value, len)?,
        }
        Ok(0)
    }

    /// `rfcntl`, see rsocket(7). (Variadic in C: the third argument arrives like a fixed one.)
    fn rfcntl(socket: c_int, command: c_int, argument: usize) -> c_int {
        // An int of the program; above it may be anything.
        let argument = argument as c_int;
        match find_any(socket)? {
            Entry::Stream(socket) => control(&mut socket.inner().options, command, argument),
            Entry::Datagram(socket) => socket.control(command, argument),
        }
    }
}
