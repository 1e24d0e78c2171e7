//! What the kernel says over netlink about links, addresses, routes, neighbours and UDP sockets: requests, and a parser that
//! takes any bytes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::ServiceError;

const NLM_F_REQUEST: u16 = 0x01;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;

/// Groups of [`changes`]: RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR.
const CHANGE_GROUPS: u32 = 0x1 | 0x10 | 0x100;
/// Group of [`neighbour_changes`]: RTMGRP_NEIGH.
const NEIGHBOUR_GROUP: u32 = 0x4;

/// Messages read before a dump is given up: far more than any machine has.
const DUMP_READS_MAX: usize = 10_000;
const DUMP_ATTEMPTS: usize = 4;

/// `ifi_flags`
pub(crate) const IFF_UP: u32 = 0x1;
pub(crate) const IFF_LOOPBACK: u32 = 0x8;
pub(crate) const IFF_POINTOPOINT: u32 = 0x10;
pub(crate) const IFF_RUNNING: u32 = 0x40;
pub(crate) const IFF_NOARP: u32 = 0x80;
/// The carrier is there; told at once, where IFF_RUNNING may follow a second later.
pub(crate) const IFF_LOWER_UP: u32 = 0x1_0000;

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) flags: u32,
    pub(crate) mtu: u32,
    /// Only where the hardware address has 6 bytes and is not zero.
    pub(crate) mac: Option<[u8; 6]>,
    /// `veth`, `bridge`, ...; empty for hardware.
    pub(crate) kind: String,
    /// The bridge or bond it is a port of; 0: none.
    pub(crate) master: u32,
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) ifindex: u32,
    pub(crate) addr: IpAddr,
    /// `IFA_F_*`
    pub(crate) flags: u32,
}

/// A route to everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DefaultRoute {
    pub(crate) ifindex: u32,
    pub(crate) metric: u32,
}

/// Where packets to an address go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextHop {
    pub(crate) ifindex: u32,
    /// The gateway, or the address itself on its own subnet.
    pub(crate) addr: IpAddr,
    /// Not to this host, and not to several: a host on the link takes them.
    pub(crate) is_unicast: bool,
}

/// What the kernel knows of a host on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Neighbour {
    pub(crate) ifindex: u32,
    pub(crate) addr: IpAddr,
    /// `NUD_*`
    pub(crate) state: u16,
}

/// A bound UDP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UdpSocket {
    pub(crate) port: u16,
    pub(crate) uid: u32,
    /// 0: a socket of the kernel itself.
    pub(crate) inode: u64,
}

/// All interfaces of the network namespace.
pub(crate) fn links() -> Result<Vec<Link>, ServiceError> {
    let mut links = Vec::new();
    dump_route(RTM_GETLINK, 0, &mut |kind, body| {
        links.extend((kind == RTM_NEWLINK).then(|| parse_link(body)).flatten());
    })
    .map_err(|errno| ServiceError::system("cannot list the network interfaces", errno))?;
    Ok(links)
}

/// All addresses of the network namespace.
pub(crate) fn addresses() -> Result<Vec<Address>, ServiceError> {
    let mut addresses = Vec::new();
    dump_route(RTM_GETADDR, 0, &mut |kind, body| {
        addresses.extend((kind == RTM_NEWADDR).then(|| parse_address(body)).flatten());
    })
    .map_err(|errno| ServiceError::system("cannot list the network addresses", errno))?;
    Ok(addresses)
}

/// The interface of the default route: IPv4's, else IPv6's; none is not an error.
pub(crate) fn default_route() -> Option<u32> {
    [AddressFamily::INET, AddressFamily::INET6].into_iter().find_map(|family| {
        let mut routes = Vec::new();
        let family = family.as_raw() as u8;
        let result = dump_route(RTM_GETROUTE, family, &mut |kind, body| {
            routes.extend((kind == RTM_NEWROUTE).then(|| parse_default_route(body)).flatten());
        });
        if let Err(errno) = result {
            log::debug!("no routes of family {family}: {errno}");
        }
        routes.iter().min_by_key(|route| route.metric).map(|route| route.ifindex)
    })
}

/// Where the kernel sends packets from `src` to `dst`; by the interface `scope`, unless that is 0.
pub(crate) fn next_hop(src: IpAddr, dst: IpAddr, scope: u32) -> Result<NextHop, Errno> {
    const RTA_DST: u16 = 1;
    const RTA_SRC: u16 = 2;
    const RTA_OIF: u16 = 4;
    let bits = if dst.is_ipv4() { 32 } else { 128 };
    // struct rtmsg
    let mut request = vec![family(dst), bits, bits, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    append_ip(&mut request, RTA_DST, dst);
    append_ip(&mut request, RTA_SRC, src);
    if scope != 0 {
        append(&mut request, RTA_OIF, &scope.to_ne_bytes());
    }
    let (kind, answer) = ask(RTM_GETROUTE, &request)?;
    (kind == RTM_NEWROUTE).then(|| parse_next_hop(&answer, dst)).flatten().ok_or(Errno::BADMSG)
}

/// What the kernel knows of a host on the link of an interface; ENOENT: nothing.
pub(crate) fn neighbour(ifindex: u32, addr: IpAddr) -> Result<Neighbour, Errno> {
    const NDA_DST: u16 = 1;
    // struct ndmsg
    let mut request = vec![family(addr), 0, 0, 0];
    request.extend_from_slice(&ifindex.to_ne_bytes());
    request.extend_from_slice(&[0; 4]);
    append_ip(&mut request, NDA_DST, addr);
    let (kind, answer) = ask(RTM_GETNEIGH, &request)?;
    (kind == RTM_NEWNEIGH).then(|| parse_neighbour(&answer)).flatten().ok_or(Errno::BADMSG)
}

/// A socket that tells of changes of neighbours, for [`changed_neighbours`].
pub(crate) fn neighbour_changes() -> Result<OwnedFd, Errno> {
    let socket = open(NETLINK_ROUTE, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, NEIGHBOUR_GROUP))?;
    Ok(socket)
}

/// What the next message of [`neighbour_changes`] tells of. EAGAIN: there is none; ENOBUFS: some were lost.
pub(crate) fn changed_neighbours(socket: &OwnedFd) -> Result<Vec<Neighbour>, Errno> {
    let mut buffer = vec![0; 16 * 1024];
    let (len, _) = rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty()))?;
    let told = Messages(&buffer[..len]).filter(|(header, _)| header.kind == RTM_NEWNEIGH);
    Ok(told.filter_map(|(_, body)| parse_neighbour(body)).collect())
}

/// UDP sockets that are bound to a port, of both address families. ENOENT: this kernel does not tell.
pub(crate) fn udp_sockets(port: u16) -> Result<Vec<UdpSocket>, Errno> {
    let mut sockets = Vec::new();
    for family in [AddressFamily::INET, AddressFamily::INET6] {
        // struct inet_diag_req_v2
        let mut request = vec![0; 56];
        request[0] = family.as_raw() as u8;
        request[1] = libc::IPPROTO_UDP as u8;
        request[4..8].copy_from_slice(&u32::MAX.to_ne_bytes()); // every state
        request[8..10].copy_from_slice(&port.to_be_bytes());
        dump(Some(netlink::SOCK_DIAG), SOCK_DIAG_BY_FAMILY, &request, &mut |kind, body| {
            let socket = (kind == SOCK_DIAG_BY_FAMILY).then(|| parse_socket(body)).flatten();
            sockets.extend(socket.filter(|socket| socket.port == port));
        })?;
    }
    Ok(sockets)
}

/// A socket that becomes readable when a link or an address changes.
pub(crate) fn changes() -> Result<OwnedFd, Errno> {
    let socket = open(NETLINK_ROUTE, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, CHANGE_GROUPS))?;
    Ok(socket)
}

/// Protocol 0, the default.
const NETLINK_ROUTE: Option<Protocol> = None;

fn open(protocol: Option<Protocol>, flags: SocketFlags) -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)
}

fn dump_route(request: u16, family: u8, each: &mut dyn FnMut(u16, &[u8])) -> Result<(), Errno> {
    // struct ifinfomsg; those of the other requests are shorter and begin with the family too.
    let mut body = [0; 16];
    body[0] = family;
    dump(NETLINK_ROUTE, request, &body, each)
}

/// Asks for everything of a kind; a table that changed meanwhile is asked for again.
fn dump(protocol: Option<Protocol>, request: u16, body: &[u8], each: &mut dyn FnMut(u16, &[u8])) -> Result<(), Errno> {
    for _ in 0..DUMP_ATTEMPTS {
        let mut messages = Vec::new();
        if dump_once(protocol, request, body, &mut messages)? {
            messages.iter().for_each(|(kind, body)| each(*kind, body));
            return Ok(());
        }
    }
    Err(Errno::AGAIN)
}

/// False: interrupted by a change.
fn dump_once(
    protocol: Option<Protocol>,
    request: u16,
    body: &[u8],
    messages: &mut Vec<(u16, Vec<u8>)>,
) -> Result<bool, Errno> {
    let socket = open(protocol, SocketFlags::CLOEXEC)?;
    send(&socket, request, NLM_F_REQUEST | NLM_F_DUMP, body)?;
    let mut whole = true;
    let mut buffer = vec![0; 64 * 1024];
    for _ in 0..DUMP_READS_MAX {
        let (len, _) = rustix::io::retry_on_intr(|| rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty()))?;
        for (header, body) in Messages(&buffer[..len]) {
            if header.sequence != SEQUENCE {
                continue;
            }
            whole &= header.flags & NLM_F_DUMP_INTR == 0;
            match header.kind {
                NLMSG_DONE => return Ok(whole),
                NLMSG_ERROR => return Err(refusal(body)),
                kind => messages.push((kind, body.to_vec())),
            }
        }
    }
    Err(Errno::OVERFLOW)
}

/// Asks for one thing; gives the kind and the body of the answer.
fn ask(request: u16, body: &[u8]) -> Result<(u16, Vec<u8>), Errno> {
    let socket = open(NETLINK_ROUTE, SocketFlags::CLOEXEC)?;
    send(&socket, request, NLM_F_REQUEST, body)?;
    let mut buffer = vec![0; 16 * 1024];
    let (len, _) = rustix::io::retry_on_intr(|| rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty()))?;
    match Messages(&buffer[..len]).find(|(header, _)| header.sequence == SEQUENCE) {
        Some((header, body)) if header.kind == NLMSG_ERROR => Err(refusal(body)),
        Some((header, body)) => Ok((header.kind, body.to_vec())),
        None => Err(Errno::BADMSG),
    }
}

/// Of each socket's only request.
const SEQUENCE: u32 = 1;

fn send(socket: &OwnedFd, request: u16, flags: u16, body: &[u8]) -> Result<(), Errno> {
    const HEADER: usize = 16;
    let mut message = Vec::with_capacity(HEADER + body.len());
    message.extend_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
    message.extend_from_slice(&request.to_ne_bytes());
    message.extend_from_slice(&flags.to_ne_bytes());
    message.extend_from_slice(&SEQUENCE.to_ne_bytes());
    message.extend_from_slice(&[0; 4]);
    message.extend_from_slice(body);
    rustix::io::retry_on_intr(|| {
        rustix::net::sendto(socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))
    })?;
    Ok(())
}

/// struct nlmsgerr
fn refusal(body: &[u8]) -> Errno {
    let code = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
    Errno::from_raw_os_error(code.checked_neg().filter(|c| *c > 0).unwrap_or(libc::EIO))
}

fn family(addr: IpAddr) -> u8 {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    family.as_raw() as u8
}

fn append_ip(message: &mut Vec<u8>, kind: u16, addr: IpAddr) {
    match addr {
        IpAddr::V4(v4) => append(message, kind, &v4.octets()),
        IpAddr::V6(v6) => append(message, kind, &v6.octets()),
    }
}

/// Appends an attribute, whose value has a multiple of four bytes.
fn append(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    assert_eq!(value.len() % 4, 0, "attributes are aligned");
    message.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(value);
}

struct Header {
    kind: u16,
    flags: u16,
    sequence: u32,
}

/// The messages in a datagram; ends at the first one that is cut off.
struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = (Header, &'a [u8]);

    fn next(&mut self) -> Option<(Header, &'a [u8])> {
        let header = self.0.first_chunk::<16>()?;
        let len = u32_at(header, 0)? as usize;
        let body = self.0.get(16..len)?;
        let header = Header { kind: u16_at(header, 4)?, flags: u16_at(header, 6)?, sequence: u32_at(header, 8)? };
        self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some((header, body))
    }
}

/// The attributes after a fixed header; ends at the first one that is cut off.
struct Attributes<'a>(&'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<(u16, &'a [u8])> {
        const NESTED_AND_ORDER_BITS: u16 = 0xc000;
        let len = usize::from(u16_at(self.0, 0)?);
        let kind = u16_at(self.0, 2)? & !NESTED_AND_ORDER_BITS;
        let value = self.0.get(4..len)?;
        self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    }
}

fn attributes(body: &[u8], header: usize) -> Attributes<'_> {
    Attributes(body.get(header..).unwrap_or(&[]))
}

/// struct ifinfomsg and IFLA_*.
fn parse_link(body: &[u8]) -> Option<Link> {
    let mut link = Link { index: u32_at(body, 4)?, flags: u32_at(body, 8)?, ..Link::default() };
    for (kind, value) in attributes(body, 16) {
        match kind {
            1 => link.mac = value.try_into().ok().filter(|mac| *mac != [0; 6]),
            3 => link.name = text(value),
            4 => link.mtu = u32_at(value, 0)?,
            10 => link.master = u32_at(value, 0)?,
            18 => link.kind = Attributes(value).find(|(kind, _)| *kind == 1).map_or(String::new(), |(_, v)| text(v)),
            _ => {}
        }
    }
    (link.index != 0 && !link.name.is_empty()).then_some(link)
}

/// struct ifaddrmsg and IFA_*.
fn parse_address(body: &[u8]) -> Option<Address> {
    let mut flags = u32::from(*body.get(2)?);
    let ifindex = u32_at(body, 4)?;
    let (mut local, mut address) = (None, None);
    for (kind, value) in attributes(body, 8) {
        match kind {
            1 => address = ip(value),
            2 => local = ip(value),
            8 => flags = u32_at(value, 0)?,
            _ => {}
        }
    }
    // On a point-to-point link IFA_ADDRESS is the other end.
    Some(Address { ifindex, addr: local.or(address)?, flags })
}

/// struct rtmsg and RTA_*.
fn parse_default_route(body: &[u8]) -> Option<DefaultRoute> {
    const RTN_UNICAST: u8 = 1;
    let (&destination_bits, &kind) = (body.get(1)?, body.get(7)?);
    if destination_bits != 0 || kind != RTN_UNICAST {
        return None;
    }
    let (mut ifindex, mut metric) = (None, 0);
    for (kind, value) in attributes(body, 12) {
        match kind {
            4 => ifindex = u32_at(value, 0),
            6 => metric = u32_at(value, 0)?,
            // RTA_MULTIPATH, struct rtnexthop: the first next hop
            9 => ifindex = ifindex.or(u32_at(value, 4)),
            _ => {}
        }
    }
    Some(DefaultRoute { ifindex: ifindex?, metric })
}

/// struct rtmsg and RTA_* of the answer for one address.
fn parse_next_hop(body: &[u8], dst: IpAddr) -> Option<NextHop> {
    const RTN_UNICAST: u8 = 1;
    let is_unicast = *body.get(7)? == RTN_UNICAST;
    let (mut ifindex, mut gateway) = (None, None);
    for (kind, value) in attributes(body, 12) {
        match kind {
            4 => ifindex = u32_at(value, 0),
            5 => gateway = ip(value),
            // RTA_VIA, struct rtvia: a gateway of the other family
            18 => gateway = value.get(2..).and_then(ip),
            _ => {}
        }
    }
    Some(NextHop { ifindex: ifindex?, addr: gateway.unwrap_or(dst), is_unicast })
}

/// struct ndmsg and NDA_*.
fn parse_neighbour(body: &[u8]) -> Option<Neighbour> {
    let (ifindex, state) = (u32_at(body, 4)?, u16_at(body, 8)?);
    let addr = attributes(body, 12).find(|(kind, _)| *kind == 1).and_then(|(_, value)| ip(value))?;
    Some(Neighbour { ifindex, addr, state })
}

/// struct inet_diag_msg
fn parse_socket(body: &[u8]) -> Option<UdpSocket> {
    let port = u16::from_be_bytes(*body.get(4..)?.first_chunk()?);
    Some(UdpSocket { port, uid: u32_at(body, 64)?, inode: u32_at(body, 68)?.into() })
}

fn ip(value: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(value) {
        return Some(Ipv4Addr::from(v4).into());
    }
    <[u8; 16]>::try_from(value).ok().map(|v6| Ipv6Addr::from(v6).into())
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value.split(|byte| *byte == 0).next().unwrap_or(&[])).into_owned()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn loopback_is_listed_with_its_flags() {
        let links = links().unwrap();
        let lo = links.iter().find(|link| link.name == "lo").unwrap();
        assert_ne!(lo.flags & IFF_LOOPBACK, 0);
        assert_eq!(lo.mac, None);
        assert!(lo.mtu >= 1280);
    }

    #[test]
    fn the_way_to_the_own_address_ends_here() {
        let here = IpAddr::from(Ipv4Addr::LOCALHOST);
        let lo = links().unwrap().into_iter().find(|link| link.name == "lo").unwrap();
        let hop = next_hop(here, here, 0).unwrap();
        assert_eq!(hop, NextHop { ifindex: lo.index, addr: here, is_unicast: false });
    }

    #[test]
    fn a_gateway_of_the_other_family() {
        let mut body = vec![2, 32, 0, 0, 254, 0, 0, 1, 0, 0, 0, 0];
        append(&mut body, 4, &7u32.to_ne_bytes());
        let gateway: Ipv6Addr = "fe80::1".parse().unwrap();
        // 18 bytes and two of padding.
        body.extend_from_slice(&22u16.to_ne_bytes());
        body.extend_from_slice(&18u16.to_ne_bytes());
        body.extend_from_slice(&10u16.to_ne_bytes());
        body.extend_from_slice(&gateway.octets());
        body.extend_from_slice(&[0; 2]);
        let dst = IpAddr::from([192, 0, 2, 7]);
        let hop = NextHop { ifindex: 7, addr: gateway.into(), is_unicast: true };
        assert_eq!(parse_next_hop(&body, dst), Some(hop));
    }

    #[test]
    fn nothing_is_known_of_a_host_that_nobody_asked_for() {
        let lo = links().unwrap().into_iter().find(|link| link.name == "lo").unwrap();
        let nobody = IpAddr::from([198, 51, 100, 77]);
        assert_eq!(neighbour(lo.index, nobody), Err(Errno::NOENT));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), len in 0u8..80) {
            let mut bytes = bytes;
            if bytes.len() > 4 {
                bytes[0..4].copy_from_slice(&u32::from(len).to_ne_bytes());
            }
            for (_, body) in Messages(&bytes).take(1000) {
                parse_link(body);
            }
            parse_link(&bytes);
            parse_address(&bytes);
            parse_default_route(&bytes);
            parse_socket(&bytes);
            parse_next_hop(&bytes, Ipv4Addr::LOCALHOST.into());
            parse_neighbour(&bytes);
        }
    }
}
