//! The connection manager for `librdmacm.so.1`: private functions, since the process's connection to the service lives here.
//!
//! All but [`ferroce_cm_channel_close`] and the two that give a pointer return 0 or an error number. Refusals are told under the name of
//! the function that the program called.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use ferroce::cm::client::EventChannel;
use ferroce::cm::protocol::{CmEvent, CmRequest, Detail, Ece, Param, Path, QpType};
use ferroce::cm::route;
use ferroce::{Client, ServiceError, Verdict};

use crate::abi::cm::{
    DETAIL_DATAGRAM, DETAIL_NONE, DETAIL_REQUEST, DETAIL_RESPONSE, KEPT_MAX, PRIVATE_DATA_MAX, ferroce_cm_event,
    ferroce_cm_kept, ferroce_cm_param, ferroce_cm_path, ferroce_cm_qp, ferroce_cm_told,
};
use crate::abi::{ibv_device, ibv_gid};
use crate::device::{DeviceObject, c_chars};
use crate::entry::{Pointer, Refusal, Status, Verb, Void};
use crate::qp::qp_type;
use crate::{refusal, start};

/// As `verb!`; the string is the function of librdmacm that programs know it by.
macro_rules! cm {
    ($($(#[$meta:meta])* fn $name:ident as $verb:literal ($($arg:ident: $type:ty),* $(,)?) -> $convention:ty $body:block)*) => {
        $(
            $(#[$meta])*
            ///
            /// # Safety
            ///
            /// Pointers are NULL or point to live objects of their type; arrays have the length that comes with them.
            // SAFETY: the name is ours alone, and is defined once: symbols.in lists it, the link would report a second.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> <$convention as $crate::entry::Convention>::Return {
                $crate::entry::enter::<$convention>($verb, || $body)
            }
        )*
    };
}

impl From<ServiceError> for Refusal {
    fn from(error: ServiceError) -> Refusal {
        ferroce::Error::from(error).into()
    }
}

fn service() -> Verb<Client> {
    start::start();
    Ok(ferroce::service()?)
}

/// Sends a request that is only done or refused.
fn ask(request: CmRequest) -> Verb<()> {
    Ok(service()?.cm(request)?)
}

/// What a pointer of the caller points to.
fn given<'a, T>(pointer: *const T, what: &'static str) -> Verb<&'a T> {
    // SAFETY: NULL, or a live object by the contract of all functions here.
    unsafe { pointer.as_ref() }.ok_or_else(|| Refusal::invalid(format!("{what} is NULL")))
}

/// Writes a result.
fn put<T>(place: *mut T, value: T) -> Verb<()> {
    if place.is_null() {
        return Err(Refusal::invalid("no place for the result"));
    }
    // SAFETY: not NULL, so it is room for a `T` of the caller.
    unsafe { place.write(value) };
    Ok(())
}

/// The bytes of a private data argument.
fn bytes(data: *const c_void, len: u8) -> Vec<u8> {
    if data.is_null() {
        return Vec::new();
    }
    // SAFETY: not NULL, so it points to `len` bytes by the contract.
    unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len.into()) }.to_vec()
}

fn gid(addr: IpAddr) -> ibv_gid {
    let v6 = match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    ibv_gid { raw: v6.octets() }
}

fn ip(gid: ibv_gid) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(gid.raw)).to_canonical()
}

/// Reads a `struct sockaddr`.
fn address(pointer: *const libc::sockaddr) -> Verb<SocketAddr> {
    let family = c_int::from(given(pointer, "the address")?.sa_family);
    match family {
        libc::AF_INET => {
            // SAFETY: an address of this family is a sockaddr_in; alignment is not relied on.
            let sin = unsafe { pointer.cast::<libc::sockaddr_in>().read_unaligned() };
            Ok((Ipv4Addr::from(u32::from_be(sin.sin_addr.s_addr)), u16::from_be(sin.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is a sockaddr_in6; alignment is not relied on.
            let sin6 = unsafe { pointer.cast::<libc::sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(sin6.sin6_addr.s6_addr);
            Ok(SocketAddrV6::new(ip, u16::from_be(sin6.sin6_port), 0, sin6.sin6_scope_id).into())
        }
        other => Err(Refusal::new(
            libc::EAFNOSUPPORT,
            format!("address family {other}: only AF_INET and AF_INET6 are available (RoCE has no AF_IB addresses)"),
        )),
    }
}

/// Writes a `struct sockaddr_storage`.
fn storage(addr: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: a structure of integers, for which zero is a value.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    match addr {
        SocketAddr::V4(v4) => {
            let sin = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: a storage has room for, and the alignment of, any socket address.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(sin) };
        }
        SocketAddr::V6(v6) => {
            let sin6 = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(sin6) };
        }
    }
    storage
}

fn empty_path() -> ferroce_cm_path {
    ferroce_cm_path {
        local: ibv_gid::default(),
        remote: ibv_gid::default(),
        ifindex: 0,
        flow_label: 0,
        mtu: 0,
        ack_timeout: 0,
        traffic_class: 0,
        hop_limit: 0,
        sgid_index: 0,
        device: [0; 64],
    }
}

fn path_for_c(path: &Path, device: &str, sgid_index: u32) -> ferroce_cm_path {
    ferroce_cm_path {
        local: gid(path.local),
        remote: gid(path.remote),
        ifindex: path.ifindex,
        flow_label: path.flow_label,
        mtu: path.mtu,
        ack_timeout: path.ack_timeout,
        traffic_class: path.traffic_class,
        hop_limit: path.hop_limit,
        sgid_index,
        device: c_chars(device),
    }
}

/// With the device that has the path's local address.
fn located(path: &Path) -> Verb<ferroce_cm_path> {
    let (device, sgid_index) = ferroce::device_of(path.local)?;
    Ok(path_for_c(path, device.name(), sgid_index))
}

fn path_of(path: &ferroce_cm_path) -> Path {
    Path {
        local: ip(path.local),
        remote: ip(path.remote),
        ifindex: path.ifindex,
        mtu: path.mtu,
        ack_timeout: path.ack_timeout,
        traffic_class: path.traffic_class,
        flow_label: path.flow_label,
        hop_limit: path.hop_limit,
    }
}

/// The connection manager's name of an `IBV_QPT_*`.
fn qp_type_of(number: u8) -> Verb<QpType> {
    match qp_type(number.into())? {
        ferroce::QpType::Rc => Ok(QpType::Rc),
        ferroce::QpType::Uc => Ok(QpType::Uc),
        ferroce::QpType::XrcSend => Ok(QpType::XrcInitiator),
        ferroce::QpType::XrcRecv => Ok(QpType::XrcTarget),
        other => Err(Refusal::invalid(format!("queue pairs of type {other:?} do not connect"))),
    }
}

/// The `IBV_QPT_*` of a connection's queue pair.
fn qp_type_for_c(qp_type: QpType) -> u8 {
    let name = match qp_type {
        QpType::Rc => ferroce::QpType::Rc,
        QpType::Uc => ferroce::QpType::Uc,
        QpType::XrcInitiator => ferroce::QpType::XrcSend,
        QpType::XrcTarget => ferroce::QpType::XrcRecv,
    };
    name as u8
}

fn param_of(param: &ferroce_cm_param) -> Verb<Param> {
    Ok(Param {
        qpn: param.qpn,
        qp_type: qp_type_of(param.qp_type)?,
        srq: param.srq != 0,
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        flow_control: param.flow_control != 0,
        retry_count: param.retry_count,
        rnr_retry_count: param.rnr_retry_count,
    })
}

fn ece_of(param: &ferroce_cm_param) -> Ece {
    Ece { vendor_id: param.ece_vendor, attr_mod: param.ece_options }
}

fn param_for_c(param: &Param, ece: Ece) -> ferroce_cm_param {
    ferroce_cm_param {
        qpn: param.qpn,
        qkey: 0,
        ece_vendor: ece.vendor_id,
        ece_options: ece.attr_mod,
        qp_type: qp_type_for_c(param.qp_type),
        srq: param.srq.into(),
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        flow_control: param.flow_control.into(),
        retry_count: param.retry_count,
        rnr_retry_count: param.rnr_retry_count,
        _padding: 0,
    }
}

fn event_for_c(event: &CmEvent) -> ferroce_cm_event {
    let nobody = storage(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
    let mut c = ferroce_cm_event {
        id: event.id,
        listener: 0,
        event: event.code,
        status: event.status,
        detail: DETAIL_NONE,
        datagram: 0,
        local: nobody,
        peer: nobody,
        path: empty_path(),
        param: ferroce_cm_param::default(),
        private_data_len: event.private_data.len().min(PRIVATE_DATA_MAX) as u32,
        private_data: [0; PRIVATE_DATA_MAX],
    };
    for (to, from) in c.private_data.iter_mut().zip(&event.private_data) {
        *to = *from;
    }
    match &event.detail {
        Detail::None => {}
        Detail::Request { listener, datagram, local, peer, path, param, ece } => {
            c.detail = DETAIL_REQUEST;
            c.listener = *listener;
            c.datagram = (*datagram).into();
            (c.local, c.peer) = (storage(*local), storage(*peer));
            // Without a device (it is just gone) the name stays empty, and the request cannot be accepted.
            c.path = located(path).unwrap_or_else(|_| path_for_c(path, "", 0));
            c.param = param_for_c(param, *ece);
        }
        Detail::Response { param, ece } => {
            c.detail = DETAIL_RESPONSE;
            c.param = param_for_c(param, *ece);
        }
        Detail::Datagram { qpn, qkey, ece } => {
            c.detail = DETAIL_DATAGRAM;
            c.param = param_for_c(&Param { qpn: *qpn, ..Param::default() }, *ece);
            c.param.qkey = *qkey;
        }
    }
    c
}

/// The error number of a wait that is over; tells why nobody was found.
fn conclude(remote: IpAddr, timeout_ms: u32, verdict: Verdict) -> c_int {
    let silent = match verdict {
        Verdict::Known => return 0,
        Verdict::Silent(silent) if silent == remote => format!("no host answers at {remote}"),
        Verdict::Silent(gateway) => format!("{gateway}, the gateway to {remote}, does not answer"),
    };
    let what = format!(
        "{silent} within {timeout_ms} ms (ARP or neighbour discovery): is it up, and is this the right network?"
    );
    refusal::tell("rdma_resolve_addr", &Refusal::new(libc::ETIMEDOUT, what));
    libc::ETIMEDOUT
}

/// An open event channel, behind the pointers that librdmacm holds.
fn channel<'a>(pointer: *const c_void) -> Verb<&'a EventChannel> {
    given(pointer.cast::<EventChannel>(), "the event channel")
}

cm! {
    /// Opens an event channel; `next` of it never waits.
    fn ferroce_cm_channel_open as "rdma_create_event_channel" (place: *mut *mut c_void) -> Status {
        let channel = EventChannel::open(&service()?)?;
        // SAFETY: changes a flag of an open descriptor.
        let failed = unsafe { libc::fcntl(channel.fd().as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } < 0;
        if failed {
            return Err(Refusal::new(libc::EIO, "the event channel cannot be made non-blocking"));
        }
        put(place, Box::into_raw(Box::new(channel)).cast())
    }

    /// Closes a channel, and with it its ids.
    fn ferroce_cm_channel_close as "rdma_destroy_event_channel" (channel: *mut c_void) -> Void {
        if !channel.is_null() {
            // SAFETY: made by `ferroce_cm_channel_open`, and nobody uses it any more.
            drop(unsafe { Box::from_raw(channel.cast::<EventChannel>()) });
        }
        Ok(())
    }

    /// The descriptor that is readable while an event waits. It stays the channel's.
    fn ferroce_cm_channel_fd as "rdma_create_event_channel" (of: *const c_void, place: *mut c_int) -> Status {
        put(place, channel(of)?.fd().as_fd().as_raw_fd())
    }

    /// Takes an event. EAGAIN: there is none. ECONNRESET: the service has ended; the channel's ids are gone.
    fn ferroce_cm_channel_next as "rdma_get_cm_event" (of: *const c_void, place: *mut ferroce_cm_event) -> Status {
        match channel(of)?.next_event() {
            Ok(event) => put(place, event_for_c(&event)),
            Err(error) => Err(Refusal::routine(error.raw_os_error().unwrap_or(libc::EPROTO), "no event")),
        }
    }

    /// A new id on a channel.
    fn ferroce_cm_create_id as "rdma_create_id" (on: *const c_void, space: u16, datagram: c_int, id: *mut u64) -> Status {
        put(id, service()?.cm_create_id(channel(on)?, space, datagram != 0)?)
    }

    /// Events that were not sent yet go to another channel.
    fn ferroce_cm_migrate as "rdma_migrate_id" (id: u64, to: *const c_void) -> Status {
        ask(CmRequest::Migrate { id, channel: channel(to)?.number() })
    }

    /// Gives an id an address; `bound` gets it with its port.
    fn ferroce_cm_bind as "rdma_bind_addr" (
        id: u64,
        addr: *const libc::sockaddr,
        reuse: c_int,
        v6_only: c_int,
        bound: *mut libc::sockaddr_storage,
    ) -> Status {
        let addr = service()?.cm_bind(id, address(addr)?, reuse != 0, v6_only != 0)?;
        put(bound, storage(addr))
    }

    /// The way to `dst`; from `src`, unless that is NULL or unspecified.
    fn ferroce_cm_route as "rdma_resolve_addr" (
        dst: *const libc::sockaddr,
        src: *const libc::sockaddr,
        place: *mut ferroce_cm_path,
    ) -> Status {
        start::start();
        let src = if src.is_null() { None } else { Some(address(src)?) };
        let route = route::resolve(address(dst)?, src)?;
        put(place, path_for_c(&route.path, &route.device.name, route.gid_index as u32))
    }

    /// Whether the kernel knows who takes the packets of a path. EINPROGRESS: not yet, and it asks: within `timeout_ms` `told` is called
    /// with `cookie`, once, from a thread of this library; ETIMEDOUT: nobody answered.
    fn ferroce_cm_neighbour as "rdma_resolve_addr" (
        path: *const ferroce_cm_path,
        timeout_ms: u32,
        told: ferroce_cm_told,
        cookie: u64,
    ) -> Status {
        let path = path_of(given(path, "the path")?);
        let remote = path.remote;
        let tell = move |verdict| told(cookie, conclude(remote, timeout_ms, verdict));
        if ferroce::wait_for_neighbour(&path, Duration::from_millis(timeout_ms.into()), cookie, tell) {
            return Err(Refusal::routine(libc::EINPROGRESS, "the kernel is asking"));
        }
        Ok(())
    }

    /// Ends such a wait. If `told` is being called, it is called to the end.
    fn ferroce_cm_neighbour_cancel as "rdma_destroy_id" (cookie: u64) -> Void {
        ferroce::cancel_wait(cookie);
        Ok(())
    }

    /// The device that has an address: only `local`, `sgid_index` and `device` are set.
    fn ferroce_cm_locate as "rdma_bind_addr" (addr: *const libc::sockaddr, place: *mut ferroce_cm_path) -> Status {
        start::start();
        let local = address(addr)?.ip().to_canonical();
        let (device, sgid_index) = ferroce::device_of(local)?;
        put(place, ferroce_cm_path { local: gid(local), sgid_index, device: c_chars(device.name()), ..empty_path() })
    }

    /// The device of a name, also one that `ibv_get_device_list` does not list (loopback).
    fn ferroce_cm_device as "rdma_resolve_addr" (name: *const c_char) -> Pointer<ibv_device> {
        start::start();
        given(name, "the name")?;
        // SAFETY: not NULL, so it is a string of the caller.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        Ok(DeviceObject::intern(ferroce::device_named(&name)?).as_ptr())
    }

    /// Takes requests from now on.
    fn ferroce_cm_listen as "rdma_listen" (id: u64, backlog: u32) -> Status {
        ask(CmRequest::Listen { id, backlog })
    }

    /// Asks a peer for a connection.
    fn ferroce_cm_connect as "rdma_connect" (
        id: u64,
        path: *const ferroce_cm_path,
        port: u16,
        param: *const ferroce_cm_param,
        data: *const c_void,
        len: u8,
    ) -> Status {
        let (path, param) = (given(path, "the path")?, given(param, "the parameters")?);
        ask(CmRequest::Connect {
            id,
            path: path_of(path),
            port,
            param: param_of(param)?,
            private_data: bytes(data, len),
            ece: ece_of(param),
        })
    }

    /// Asks a peer for its datagram queue pair.
    fn ferroce_cm_resolve as "rdma_connect" (
        id: u64,
        path: *const ferroce_cm_path,
        port: u16,
        data: *const c_void,
        len: u8,
    ) -> Status {
        let path = path_of(given(path, "the path")?);
        ask(CmRequest::Resolve { id, path, port, private_data: bytes(data, len) })
    }

    /// Takes a request for a connection.
    fn ferroce_cm_accept as "rdma_accept" (
        id: u64,
        param: *const ferroce_cm_param,
        data: *const c_void,
        len: u8,
    ) -> Status {
        let param = given(param, "the parameters")?;
        let (param, ece) = (param_of(param)?, ece_of(param));
        ask(CmRequest::Accept { id, param, private_data: bytes(data, len), ece })
    }

    /// Answers a request for a datagram queue pair: `param.qpn` and `param.qkey`.
    fn ferroce_cm_accept_datagram as "rdma_accept" (
        id: u64,
        param: *const ferroce_cm_param,
        data: *const c_void,
        len: u8,
    ) -> Status {
        let param = given(param, "the parameters")?;
        let (qpn, qkey, ece) = (param.qpn, param.qkey, ece_of(param));
        ask(CmRequest::AcceptDatagram { id, qpn, qkey, private_data: bytes(data, len), ece })
    }

    /// Rejects a request or a reply.
    fn ferroce_cm_reject as "rdma_reject" (id: u64, reason: u16, data: *const c_void, len: u8) -> Status {
        ask(CmRequest::Reject { id, reason, private_data: bytes(data, len) })
    }

    /// The active end is ready.
    fn ferroce_cm_establish as "rdma_establish" (id: u64) -> Status {
        ask(CmRequest::Establish { id })
    }

    /// The passive end has received something.
    fn ferroce_cm_notify as "rdma_notify" (id: u64) -> Status {
        ask(CmRequest::Notify { id })
    }

    /// Ends a connection, or agrees to its end.
    fn ferroce_cm_disconnect as "rdma_disconnect" (id: u64) -> Status {
        ask(CmRequest::Disconnect { id })
    }

    /// Gives an id up.
    fn ferroce_cm_destroy as "rdma_destroy_id" (id: u64) -> Status {
        ask(CmRequest::Destroy { id })
    }

    /// What the queue pair of an id needs.
    fn ferroce_cm_qp_parameters as "rdma_init_qp_attr" (id: u64, place: *mut ferroce_cm_qp) -> Status {
        let parameters = service()?.cm_qp_parameters(id)?;
        put(place, ferroce_cm_qp {
            path: located(&parameters.path)?,
            dest_qpn: parameters.dest_qpn,
            rq_psn: parameters.rq_psn,
            sq_psn: parameters.sq_psn,
            max_dest_rd_atomic: parameters.max_dest_rd_atomic,
            max_rd_atomic: parameters.max_rd_atomic,
            retry_cnt: parameters.retry_cnt,
            rnr_retry: parameters.rnr_retry,
            qp_type: qp_type_for_c(parameters.qp_type),
        })
    }

    /// What is needed to go on with an established connection after a crash of the service.
    fn ferroce_cm_keep as "rdma_get_cm_event" (id: u64, place: *mut ferroce_cm_kept) -> Status {
        let text = serde_json::to_vec(&service()?.cm_keep(id)?)
            .ok()
            .filter(|text| text.len() <= KEPT_MAX)
            .ok_or_else(|| Refusal::new(libc::EIO, "the connection cannot be written down"))?;
        let mut kept = ferroce_cm_kept { len: text.len() as u32, text: [0; KEPT_MAX] };
        kept.text[..text.len()].copy_from_slice(&text);
        put(place, kept)
    }

    /// Goes on with a connection after a crash of the service, under a new id.
    fn ferroce_cm_adopt as "rdma_get_cm_event" (on: *const c_void, kept: *const ferroce_cm_kept, id: *mut u64) -> Status {
        let kept = given(kept, "the connection")?;
        let text = kept.text.get(..kept.len as usize).unwrap_or_default();
        let connection = serde_json::from_slice(text)
            .map_err(|error| Refusal::invalid(format!("the connection cannot be read: {error}")))?;
        put(id, service()?.cm_adopt(channel(on)?, &connection)?)
    }

    /// Tells what librdmacm itself refused, as other refusals are told.
    fn ferroce_cm_tell as "ferroce_cm_tell" (verb: *const c_char, errno: c_int, sentence: *const c_char) -> Void {
        if verb.is_null() || sentence.is_null() {
            return Ok(());
        }
        // SAFETY: strings of the caller; the name of a function lives as long as its library, which is never unloaded.
        let (verb, sentence) = unsafe { (CStr::from_ptr(verb), CStr::from_ptr(sentence)) };
        let refused = Refusal::new(errno, sentence.to_string_lossy().into_owned());
        refusal::tell(verb.to_str().unwrap_or("rdma_?"), &refused);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn addresses_survive_the_way_through_c() {
        for text in ["192.0.2.7:7174", "[2001:db8::7]:1", "[fe80::1%3]:20049"] {
            let addr: SocketAddr = text.parse().unwrap();
            let c = storage(addr);
            assert_eq!(address((&raw const c).cast()).unwrap(), addr);
        }
        assert_eq!(address(ptr::null()).unwrap_err().errno(), libc::EINVAL);
        let mut c = storage("192.0.2.7:1".parse().unwrap());
        c.ss_family = 27;
        assert_eq!(address((&raw const c).cast()).unwrap_err().errno(), libc::EAFNOSUPPORT);
    }

    #[test]
    fn gids_are_addresses() {
        for text in ["192.0.2.7", "2001:db8::7"] {
            let addr: IpAddr = text.parse().unwrap();
            assert_eq!(ip(gid(addr)), addr);
        }
    }

    #[test]
    fn private_data_longer_than_any_message_is_cut() {
        let event = CmEvent { id: 1, code: 9, status: 0, private_data: vec![7; 300], detail: Detail::None };
        let c = event_for_c(&event);
        assert_eq!((c.private_data_len, c.private_data[255]), (256, 7));
    }
}
