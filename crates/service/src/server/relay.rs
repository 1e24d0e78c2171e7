//! Packets that arrived at the wrong lane (from lane 0, or handed in by the lane that got them), and what lanes tell each other
//! about rings.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ferroce_wire::{BTH_LEN, ICRC_LEN, LANE_SHIFT, NetHeader, icrc};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::{Holder, Lend, Service, SocketId, has_socket};
use crate::cm::Inbound;
use crate::protocol::{RelayHeader, RingCall, RingStep};
use crate::{seqpacket, sys};

/// The longest UDP payload with its relay header.
pub(super) const BUFFER_BYTES: usize = 65_536 + RelayHeader::LEN;

/// Datagrams of one source that are dealt with before others get their turn. (What the kernel merged counts as one.)
const DATAGRAMS_PER_TURN: usize = 32;

impl Service {
    pub(super) fn forward_strays(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        for _ in 0..DATAGRAMS_PER_TURN {
            let Some(group) = &self.group else {
                break;
            };
            let datagram = match sys::recv_datagram(group.own_socket(), &mut buffer) {
                Ok(datagram) => datagram,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                // Nothing more; other errors are those of ICMP messages, which the kernel reports once each.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => continue,
            };
            let mut rest = &buffer[..datagram.len];
            loop {
                let packet = match datagram.segment {
                    0 => std::mem::take(&mut rest),
                    segment => rest.split_off(..segment.min(rest.len())).expect("inside of it"),
                };
                self.stray(datagram.src, datagram.dst, packet);
                if rest.is_empty() {
                    break;
                }
            }
        }
        self.buffer = buffer;
    }

    /// Deals with one packet that came to lane 0.
    fn stray(&mut self, src: SocketAddr, dst: Option<IpAddr>, packet: &[u8]) {
        self.counters.strays += 1;
        match dst {
            Some(_) if packet.len() < BTH_LEN + ICRC_LEN => self.counters.drop_short += 1,
            Some(dst) => match checked(packet, src, dst) {
                Some(packet) if dst.to_canonical().is_multicast() => {
                    self.hand_to_members(&RelayHeader { src, dst }, packet);
                }
                Some(packet) if Inbound::is_for_us(packet) => self.management_packet(src, dst, packet),
                Some(packet) => self.forward(None, &RelayHeader { src, dst }, packet),
                None => self.counters.drop_icrc += 1,
            },
            None => self.counters.drop_short += 1,
        }
    }

    pub(super) fn serve_relay(&mut self, socket: SocketId, flags: epoll::EventFlags) {
        let mut buffer = std::mem::take(&mut self.buffer);
        for _ in 0..DATAGRAMS_PER_TURN {
            // A lane that was given back hands in nothing any more.
            let Some((lend, lane)) = self.lends.get(&socket).and_then(|lend| Some((lend, lend.lane?))) else {
                break;
            };
            let sender = Sender { lane, lease: lend.lease, holder: lend.holder };
            if lend.closer.must_not_receive(&lend.relay) {
                self.cut(lane, "too much that its user has sent cannot be closed");
                break;
            }
            let received = match lend.closer.recv(&lend.relay, &mut buffer) {
                Ok(received) => received,
                Err(_) => break,
            };
            if received.len == 0 {
                break; // Closed, and then hung up; or an empty message, which counts as nothing.
            }
            self.counters.relay_in += 1;
            let message = &buffer[..received.len];
            let call = RingCall::decode(message);
            let memory = match call {
                Some(RingCall { step: RingStep::Offer, .. }) => received.descriptors.ring_memory(),
                _ => received.descriptors.none().map(|()| None),
            };
            let memory = match memory {
                Ok(memory) => memory,
                Err(_) => {
                    self.counters.drop_short += 1;
                    self.cut(lane, "it sends descriptors that nobody wants");
                    break;
                }
            };
            match RelayHeader::decode(message).filter(|_| !received.truncated) {
                // It has them from us, or says what is not so.
                Some(_) if !has_socket(socket) => self.counters.drop_loop += 1,
                Some((header, packet)) => self.forward(Some(socket), &header, packet),
                None => match call {
                    Some(call) => self.pass_on(sender, &call, memory.as_ref()),
                    None => self.counters.drop_short += 1,
                },
            }
        }
        self.buffer = buffer;
        if flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
            self.let_go(socket);
        }
    }

    /// Has nothing more to do with the program that has a lane.
    fn cut(&mut self, lane: u16, why: &str) {
        let holder = self.clients.iter().find(|(_, client)| client.lanes.contains_key(&lane)).map(|(id, _)| *id);
        if let Some(holder) = holder {
            self.remove_client(holder, why);
        }
    }

    /// Sends a packet to the lane that its QP number names.
    fn forward(&mut self, from: Option<SocketId>, header: &RelayHeader, packet: &[u8]) {
        let Some(lane) = lane_of(packet) else {
            self.counters.drop_short += 1;
            return;
        };
        let Some(socket) = self.lanes.get(&lane).copied() else {
            self.counters.drop_no_lane += 1;
            return;
        };
        if from == Some(socket) {
            self.counters.drop_loop += 1;
            return;
        }
        // A lane without a socket has all its packets from the service's.
        if has_socket(socket) || from.is_some() {
            self.counters.astray += 1;
            if let Some(group) = self.group.as_mut() {
                group.raise_doubt();
            }
        }
        self.hand_over(socket, &[&header.encode(), packet], &[]);
    }

    /// A packet to a group that the service's own socket is in, for lanes without one; or of which the kernel knew one member only:
    /// Linux (6.18; seen over IPv4, not from the loopback interface) then takes that socket early, and has the steering program choose
    /// another one in its place. In the first case the members with sockets have their own copies.
    fn hand_to_members(&mut self, header: &RelayHeader, packet: &[u8]) {
        let group = header.dst.to_canonical();
        let is_member = |groups: &super::groups::Memberships| groups.iter().any(|(joined, _)| *joined == group);
        let members: Vec<SocketId> =
            self.lends.iter().filter(|(_, lend)| is_member(&lend.groups)).map(|(socket, _)| *socket).collect();
        let is_ours = members.iter().any(|socket| !has_socket(*socket));
        let members: Vec<SocketId> = members.into_iter().filter(|socket| !is_ours || !has_socket(*socket)).collect();
        if members.is_empty() {
            self.counters.drop_no_lane += 1;
        }
        for socket in members {
            self.hand_over(socket, &[&header.encode(), packet], &[]);
        }
    }

    /// Tells a lane what another one, `sender`, has to say about a ring. Its memory is only passed on: it stays in the relay until the lane's
    /// program reads it, and counts as its sender's meanwhile.
    fn pass_on(&mut self, sender: Sender, call: &RingCall, memory: Option<&OwnedFd>) {
        if memory.is_none() && call.step == RingStep::Offer {
            self.counters.drop_short += 1;
            return;
        }
        if call.lane == sender.lane {
            self.counters.drop_loop += 1;
            return;
        }
        // A lease that has ended is not the one that was meant, though its lane may be another's by now; and there are no rings between
        // users.
        let is_meant = |lend: &Lend| lend.lease == call.lease && self.is_same_user(lend.holder.uid, sender.holder.uid);
        let target = self.lanes.get(&call.lane).copied().filter(|socket| is_meant(&self.lends[socket]));
        let Some(socket) = target else {
            self.counters.drop_no_lane += 1;
            return;
        };
        if memory.is_some() && !self.may_offer_ring(sender.holder) {
            self.counters.drop_limit += 1;
            return;
        }
        let call = RingCall { lane: sender.lane, lease: sender.lease, ..*call };
        let descriptors: Vec<BorrowedFd<'_>> = memory.into_iter().map(AsFd::as_fd).collect();
        if self.hand_over(socket, &[&call.encode()], &descriptors) && memory.is_some() {
            self.lends.get_mut(&socket).expect("it is leased").offers.push(sender.holder);
        }
    }

    /// Offers in relays that have been read are on their way no more.
    pub(super) fn forget_read_offers(&mut self, uid: u32) {
        let with_offers = self.lends.values_mut().filter(|lend| lend.offers.iter().any(|sender| sender.uid == uid));
        for lend in with_offers {
            if sys::is_all_read(lend.relay.as_fd()) {
                lend.offers.clear();
            }
        }
    }

    /// False: it is dropped, and counted.
    fn hand_over(&mut self, socket: SocketId, parts: &[&[u8]], descriptors: &[BorrowedFd<'_>]) -> bool {
        match seqpacket::send(&self.lends[&socket].relay, parts, descriptors, SendFlags::DONTWAIT) {
            Ok(()) => self.counters.relay_out += 1,
            Err(errno) => {
                match errno {
                    Errno::AGAIN => {}
                    Errno::TOOMANYREFS => self.say_many_in_flight("an offer of a ring is dropped"),
                    errno => log::debug!("no relay to socket {socket}: {errno}"),
                }
                self.counters.drop_full += 1;
                return false;
            }
        }
        true
    }
}

/// The lane that says something about a ring.
#[derive(Clone, Copy)]
struct Sender {
    lane: u16,
    lease: u64,
    holder: Holder,
}

/// A packet from the network without its ICRC, if that is right: lanes take what is relayed as checked.
fn checked(datagram: &[u8], src: SocketAddr, dst: IpAddr) -> Option<&[u8]> {
    let (packet, icrc) = datagram.split_last_chunk::<ICRC_LEN>()?;
    let net = NetHeader {
        src: src.ip().to_canonical(),
        dst: dst.to_canonical(),
        src_port: src.port(),
        tclass: 0,
        hop_limit: 0,
        udp_len: u16::try_from(datagram.len()).ok()?,
        ifindex: 0,
    };
    icrc::verify(&net, packet, u32::from_le_bytes(*icrc)).map(|_| packet)
}

/// The upper bits of the destination QP number in a base transport header.
fn lane_of(packet: &[u8]) -> Option<u16> {
    let bth = packet.first_chunk::<BTH_LEN>()?;
    let qpn = u32::from_be_bytes([0, bth[5], bth[6], bth[7]]);
    Some((qpn >> LANE_SHIFT) as u16)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::{Duration, Instant};

    use ferroce_testkit::{free_name, free_port};

    use super::*;
    use crate::client::{Client, StartOptions};
    use crate::config::Serve;
    use crate::server::ServerOptions;
    use crate::sys::Peer;

    /// One datagram of the network or several that the kernel merged: each packet is counted.
    #[test]
    fn merged_strays_are_dealt_with_one_by_one() {
        let options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
        let client = StartOptions { name: options.name.clone(), port: options.port, ..StartOptions::default() };
        let to = ("127.0.0.1", options.port);
        let _service = Service::spawn_in_process(options).unwrap();
        let client = Client::connect(&client).unwrap();
        let _open_port = client.lease_lane().unwrap();

        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        sys::set_int_option(sender.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, 20).unwrap();
        // Two whole packets with a wrong ICRC, and one that is too short.
        sender.send_to(&[0; 2 * 20 + 7], to).unwrap();
        sender.send_to(&[], to).unwrap();

        let give_up = Instant::now() + Duration::from_secs(60);
        let counters = loop {
            let counters = client.status().unwrap().counters;
            if counters.strays >= 4 {
                break counters;
            }
            assert!(Instant::now() < give_up, "{counters:?}");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!((counters.strays, counters.drop_icrc, counters.drop_short), (4, 2, 2));
    }

    /// What was offered and not read stayed in the kernel, as much as lanes could be had to send it to.
    #[test]
    fn offers_of_rings_that_nobody_reads_are_bounded() {
        let options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
        let mut service = Service::bind(ServerOptions { serve: Some(Serve::Namespace), ..options }).unwrap();
        (service.uid, service.all_users_are_mapped) = (7, false);
        service.options.limits.process.ring_offers = 3;
        service.options.limits.user.ring_offers = Some(4);
        let mut open = Vec::new();
        let mut lane = |service: &mut Service, uid| {
            let (ours, theirs) = seqpacket::pair().unwrap();
            let id = service.next_client;
            service.enlist_client(theirs, Peer { pid: 1, uid });
            let (lane, _, relay) = service.new_lane(id).unwrap();
            open.push(ours);
            let lease = service.lease_of(lane);
            (Sender { lane, lease, holder: Holder { client: id, uid } }, relay)
        };
        let (first, _) = lane(&mut service, 8);
        let (second, _) = lane(&mut service, 8);
        let (other, _) = lane(&mut service, 9);
        let [(target, relay), (of_other, _other_relay)] = [8, 9].map(|uid| lane(&mut service, uid));
        let memory = rustix::fs::memfd_create("ring", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let offer_to = |service: &mut Service, target: &Sender, sender: Sender| {
            let before = service.counters;
            let call = RingCall { step: RingStep::Offer, lane: target.lane, lease: target.lease, id: 7, wake: [9; 16] };
            service.pass_on(sender, &call, Some(&memory));
            let after = service.counters;
            (after.relay_out - before.relay_out, after.drop_limit - before.drop_limit)
        };
        let offer = |service: &mut Service, sender| offer_to(service, &target, sender);
        let offers: Vec<_> = (0..5).map(|_| offer(&mut service, first)).collect();
        assert_eq!(offers, [(1, 0), (1, 0), (1, 0), (0, 1), (0, 1)], "of a program");
        let offers: Vec<_> = (0..3).map(|_| offer(&mut service, second)).collect();
        assert_eq!(offers, [(1, 0), (0, 1), (0, 1)], "of its user");
        assert_eq!(offer_to(&mut service, &of_other, other), (1, 0));
        assert_eq!(offer(&mut service, other), (0, 0), "a ring is for programs of one user");
        let [(unknown, _), (of_unknown, _unknown_relay)] = [65_534; 2].map(|uid| lane(&mut service, uid));
        assert_eq!(offer_to(&mut service, &of_unknown, unknown), (0, 0), "users without a number here may be two");
        for _ in 0..4 {
            let received = seqpacket::recv(&relay, &mut [0; 64], rustix::net::RecvFlags::DONTWAIT).unwrap();
            assert_eq!(received.descriptors.len(), 1);
        }
        assert_eq!(offer(&mut service, first), (1, 0), "they were read");
        assert_eq!(service.lends.values().map(|lend| lend.offers.len()).sum::<usize>(), 2, "and the other user's");
    }

    /// A program that has a socket of the group puts another program in the place of the service's.
    #[test]
    fn packets_at_wrong_lanes_tell_that_steering_is_wrong() {
        let options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
        let client = StartOptions { name: options.name.clone(), port: options.port, ..StartOptions::default() };
        let to = ("127.0.0.1", options.port);
        let _service = Service::spawn_in_process(options).unwrap();
        let client = Client::connect(&client).unwrap();
        let mut leases = [client.lease_lane().unwrap(), client.lease_lane().unwrap()];
        let sockets = leases.each_mut().map(|lease| UdpSocket::from(lease.take_rx().remove(0)));
        sys::attach_reuseport_program(sockets[0].as_fd(), &crate::steer::constant(0)).unwrap();

        let mut packet = [0; BTH_LEN];
        packet[4..8].copy_from_slice(&(u32::from(leases[1].lane()) << LANE_SHIFT).to_be_bytes());
        let src = "127.0.0.1:50000".parse().unwrap();
        assert!(leases[0].relay_send(src, src.ip(), &packet).unwrap());
        let give_up = Instant::now() + Duration::from_secs(60);
        let counters = loop {
            let counters = client.status().unwrap().counters;
            if counters.probings > 0 {
                break counters;
            }
            assert!(Instant::now() < give_up, "{counters:?}");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!((counters.astray, counters.relay_out), (1, 1), "it is relayed as well");
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        sender.send_to(&packet, to).unwrap();
        sockets[1].set_nonblocking(false).unwrap();
        sockets[1].set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(sockets[1].recv(&mut [0; 64]).unwrap(), packet.len());
    }
}
