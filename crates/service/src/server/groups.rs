//! Multicast groups: the service has copies of the lanes' sockets and joins with them, so that it knows and bounds who is a member,
//! and ends it with the lane. The kernel gives each socket that joined a copy of what is sent to the group, and others none
//! (`IP_MULTICAST_ALL` is off), whatever the steering program says.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use super::{Client, Service, SocketId, has_socket};
use crate::protocol::Reply;
use crate::{ServiceError, sys};

/// Groups that a socket joined, and on which interfaces.
pub(super) type Memberships = BTreeSet<(IpAddr, u32)>;

/// Memberships of one lane, at most. The kernel allows fewer by default (`net.ipv4.igmp_max_memberships`), for IPv4 only.
pub(super) const GROUPS_PER_LANE_MAX: usize = 64;

impl Service {
    pub(super) fn join_group(
        &mut self,
        client: u64,
        lane: u16,
        group: IpAddr,
        ifindex: u32,
    ) -> Result<Reply, ServiceError> {
        let socket = self.lane_of_client(client, lane)?;
        let group = group.to_canonical();
        if !group.is_multicast() {
            return Err(ServiceError::new(libc::EINVAL, format!("{group} is not a multicast address")));
        }
        if ifindex == 0 {
            return Err(ServiceError::new(libc::ENODEV, format!("{group} is joined on an interface; 0 is none")));
        }
        let lend = self.lends.get(&socket).expect("a lane's socket is lent");
        if lend.groups.contains(&(group, ifindex)) {
            return Ok(Reply::Joined);
        }
        let too_many = |what: String| Err(ServiceError::new(libc::ENOMEM, what));
        if lend.groups.len() >= GROUPS_PER_LANE_MAX {
            return too_many(format!("the program is in {GROUPS_PER_LANE_MAX} multicast groups already"));
        }
        if !has_socket(socket) {
            // They have the service's together, and the kernel bounds what one socket joins.
            self.may_join(client, (group, ifindex))?;
        }
        let descriptor = self.receiver_of(socket).expect("a lane is leased, so the port is open");
        match sys::set_membership(descriptor, group, ifindex, true) {
            Ok(()) => {}
            // It was joined just before the service crashed, or for another lane without a socket.
            Err(error) if error.raw_os_error() == Some(libc::EADDRINUSE) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                let joined = self.joined_by(socket);
                return too_many(format!(
                    "the kernel lets no socket join more than the {joined} groups that it is in: raise sysctl net.ipv4.igmp_max_memberships"
                ));
            }
            Err(error) => {
                let what = format!("cannot join multicast group {group} on interface {ifindex}");
                return Err(ServiceError::system(what, sys::errno(&error)));
            }
        }
        self.lends.get_mut(&socket).expect("a lane's socket is lent").groups.insert((group, ifindex));
        self.dirty = true;
        Ok(Reply::Joined)
    }

    pub(super) fn leave_group(
        &mut self,
        client: u64,
        lane: u16,
        group: IpAddr,
        ifindex: u32,
    ) -> Result<Reply, ServiceError> {
        let socket = self.lane_of_client(client, lane)?;
        let membership = (group.to_canonical(), ifindex);
        self.dirty |= self.lends.get_mut(&socket).expect("a lane's socket is lent").groups.remove(&membership);
        // Also one that is not known here: the program may have brought its socket along from an earlier service.
        self.leave_all(socket, Memberships::from([membership]));
        Ok(Reply::Left)
    }

    pub(super) fn leave_all(&self, socket: SocketId, groups: Memberships) {
        let Some(descriptor) = self.receiver_of(socket) else {
            return;
        };
        for (group, ifindex) in groups {
            if !has_socket(socket) && self.is_joined_for_others(socket, (group, ifindex)) {
                continue;
            }
            // The membership of an interface that is gone is gone.
            if let Err(error) = sys::set_membership(descriptor, group, ifindex, false) {
                log::debug!("socket {socket} does not leave {group} on interface {ifindex}: {error}");
            }
        }
    }

    /// The socket that gets what is sent to a lane.
    fn receiver_of(&self, socket: SocketId) -> Option<BorrowedFd<'_>> {
        let group = self.group.as_ref()?;
        if has_socket(socket) { group.socket(socket) } else { Some(group.own_socket()) }
    }

    /// Whether the service's own socket is a member for the sake of other lanes than this one.
    fn is_joined_for_others(&self, socket: SocketId, membership: (IpAddr, u32)) -> bool {
        let others = self.lends.iter().filter(|(id, _)| !has_socket(**id) && **id != socket);
        others.into_iter().any(|(_, lend)| lend.groups.contains(&membership))
    }

    /// How many groups the socket that gets what is sent to a lane is in.
    fn joined_by(&self, socket: SocketId) -> usize {
        if has_socket(socket) {
            return self.lends[&socket].groups.len();
        }
        let socketless = self.lends.iter().filter(|(id, _)| !has_socket(**id));
        socketless.flat_map(|(_, lend)| &lend.groups).collect::<BTreeSet<_>>().len()
    }

    /// Memberships of a client's lanes.
    pub(super) fn groups_of(&self, client: &Client) -> u32 {
        client.lanes.values().map(|socket| self.lends[socket].groups.len() as u32).sum()
    }

    fn lane_of_client(&self, client: u64, lane: u16) -> Result<SocketId, ServiceError> {
        let lanes = &self.clients[&client].lanes;
        lanes
            .get(&lane)
            .copied()
            .ok_or_else(|| ServiceError::new(libc::EINVAL, format!("lane {lane} is not leased to this program")))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};
    use std::os::fd::OwnedFd;
    use std::time::{Duration, Instant};

    use ferroce_testkit::{free_name, free_port};

    use super::*;
    use crate::client::{Client, StartOptions};
    use crate::config::Serve;
    use crate::seqpacket;
    use crate::server::limits::groups_max;
    use crate::server::{Hosted, ServerOptions};
    use crate::sys::Peer;

    const LOOPBACK: u32 = 1;
    const GROUP: Ipv4Addr = Ipv4Addr::new(239, 255, 71, 9);

    fn service() -> (Hosted, StartOptions) {
        let options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
        let client = StartOptions { name: options.name.clone(), port: options.port, ..StartOptions::default() };
        (Service::spawn_in_process(options).unwrap(), client)
    }

    fn lane(options: &StartOptions) -> (Client, crate::client::LaneLease, UdpSocket) {
        let client = Client::connect(options).unwrap();
        let mut lease = client.lease_lane().unwrap();
        let socket: OwnedFd = lease.take_rx().remove(0);
        (client, lease, UdpSocket::from(socket))
    }

    /// Sends to the group, and a mark to each lane by its number; gives what each lane got before the mark.
    fn send_and_count<const N: usize>(options: &StartOptions, lanes: [(u16, &UdpSocket); N]) -> [usize; N] {
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        sender.send_to(&[0xff; 24], (GROUP, options.port)).unwrap();
        lanes.map(|(number, socket)| {
            let mut mark = [0; 16];
            mark[4..8].copy_from_slice(&(u32::from(number) << ferroce_wire::LANE_SHIFT).to_be_bytes());
            sender.send_to(&mark, ("127.0.0.1", options.port)).unwrap();
            let (mut count, give_up) = (0, Instant::now() + Duration::from_secs(60));
            loop {
                match socket.recv(&mut [0; 64]) {
                    Ok(16) => return count,
                    Ok(_) => count += 1,
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
                assert!(Instant::now() < give_up, "the mark does not come");
            }
        })
    }

    #[test]
    fn each_lane_that_joined_gets_a_copy_and_others_none() {
        let (_service, options) = service();
        let (first, first_lease, first_socket) = lane(&options);
        let (second, second_lease, second_socket) = lane(&options);
        let (_third, third_lease, third_socket) = lane(&options);
        let sockets = || {
            [
                (first_lease.lane(), &first_socket),
                (second_lease.lane(), &second_socket),
                (third_lease.lane(), &third_socket),
            ]
        };
        assert_eq!(send_and_count(&options, sockets()), [0, 0, 0]);
        for _ in 0..2 {
            first.join_group(first_lease.lane(), GROUP.into(), LOOPBACK).expect("join");
        }
        second.join_group(second_lease.lane(), GROUP.to_ipv6_mapped().into(), LOOPBACK).expect("join");
        assert_eq!(send_and_count(&options, sockets()), [1, 1, 0]);
        let groups: Vec<u32> = first.status().unwrap().clients.iter().map(|client| client.groups).collect();
        assert_eq!(groups, [1, 1, 0]);
        for _ in 0..2 {
            first.leave_group(first_lease.lane(), GROUP.into(), LOOPBACK).expect("leave");
        }
        assert_eq!(send_and_count(&options, sockets()), [0, 1, 0]);
    }

    /// A forked child, say, still has it.
    #[test]
    fn the_socket_of_a_lane_that_was_given_back_is_in_no_group_whoever_keeps_it() {
        let (_service, options) = service();
        let (client, lease, socket) = lane(&options);
        client.join_group(lease.lane(), GROUP.into(), LOOPBACK).expect("join");
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        lease.release().expect("released");
        sender.send_to(&[0xff; 24], (GROUP, options.port)).unwrap();
        // What came would be there: loopback delivers within the call.
        assert!(socket.recv(&mut [0; 64]).is_err());
    }

    /// A program of a user, and its lane.
    struct Program {
        id: u64,
        lane: u16,
        _open: [OwnedFd; 2],
    }

    impl Program {
        /// Of another user than the service's.
        fn of(service: &mut Service, uid: u32) -> Program {
            let (ours, theirs) = seqpacket::pair().unwrap();
            let id = service.next_client;
            service.enlist_client(theirs, Peer { pid: 1, uid });
            let (lane, socket, relay) = service.new_lane(id).unwrap();
            assert!(socket.is_none());
            Program { id, lane, _open: [ours, relay] }
        }

        fn join(&self, service: &mut Service, group: usize) -> Result<(), ServiceError> {
            let group = Ipv4Addr::new(239, 255, 72, group as u8);
            service.join_group(self.id, self.lane, group.into(), LOOPBACK).map(drop)
        }

        /// As many as it can.
        fn join_all(&self, service: &mut Service, from: usize) -> (usize, ServiceError) {
            let mut joined = 0;
            loop {
                match self.join(service, from + joined) {
                    Ok(()) => joined += 1,
                    Err(error) => return (joined, error),
                }
            }
        }
    }

    /// Lanes of other users have the service's socket together, which the kernel lets join so many groups: one user had them all.
    #[test]
    fn users_without_sockets_leave_groups_to_each_other() {
        let options = ServerOptions { name: free_name(), port: free_port(), idle: None, ..ServerOptions::default() };
        let mut service = Service::bind(ServerOptions { serve: Some(Serve::Namespace), ..options }).unwrap();
        service.uid = 7;
        service.open_group().unwrap();
        let greedy = Program::of(&mut service, 8);
        let most = groups_max(GROUP.into());
        assert!(most >= 8, "the kernel's limit is {most}");
        let (joined, refused) = greedy.join_all(&mut service, 0);
        assert_eq!((joined, refused.errno()), (most / 2, libc::ENOMEM));
        assert!(refused.to_string().contains("limits.user.groups"), "{refused}");
        let again = Program::of(&mut service, 8);
        again.join(&mut service, joined).expect_err("its user has its share");
        again.join(&mut service, 0).expect("one of those that its user has");

        let other = Program::of(&mut service, 9);
        other.join(&mut service, 0).expect("what another one joined costs nothing");
        let (further, _) = other.join_all(&mut service, 100);
        assert!((1..=most - joined).contains(&further), "{further}");
        service.release(greedy.id, greedy.lane).unwrap();
        service.release(again.id, again.lane).unwrap();
        let (more, _) = other.join_all(&mut service, 100 + further);
        assert!(more > 0, "what was given back is there for others");
    }

    #[test]
    fn what_cannot_be_joined_is_refused() {
        let (_service, options) = service();
        let (client, lease, _socket) = lane(&options);
        let (_other, foreign, _) = lane(&options);
        let errno = |lane, group: &str, ifindex| {
            client.join_group(lane, group.parse().unwrap(), ifindex).map_err(|error| error.errno())
        };
        let own = lease.lane();
        assert_eq!(errno(own, "10.0.0.1", LOOPBACK), Err(libc::EINVAL));
        assert_eq!(errno(own, "fe80::1", LOOPBACK), Err(libc::EINVAL));
        assert_eq!(errno(own, "239.1.1.1", 0), Err(libc::ENODEV));
        assert_eq!(errno(own, "239.1.1.1", 0x7fff_fff0), Err(libc::ENODEV));
        assert_eq!(errno(own, "ff0e::1", u32::MAX), Err(libc::ENODEV));
        assert_eq!(errno(foreign.lane(), "239.1.1.1", LOOPBACK), Err(libc::EINVAL));
        let refused = (0..=GROUPS_PER_LANE_MAX).find_map(|n| errno(own, &format!("239.2.1.{n}"), LOOPBACK).err());
        assert_eq!(refused, Some(libc::ENOMEM));
        client.leave_group(own, "239.2.1.0".parse().unwrap(), LOOPBACK).expect("leave");
        assert_eq!(errno(own, "239.2.1.200", LOOPBACK), Ok(()));
    }
}
