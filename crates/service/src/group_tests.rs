use std::net::UdpSocket;

use ferroce_testkit::free_port;
use ferroce_wire::LANE_SHIFT;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

fn packet(lane: u16, tag: u32) -> [u8; 16] {
    let mut bytes = [0xa5; 16];
    let qpn = u32::from(lane) << LANE_SHIFT | (tag & 0x3fff);
    bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
    bytes[12..].copy_from_slice(&tag.to_be_bytes());
    bytes
}

/// Takes every datagram of a socket, and waits until as many came as shall: (lane, tag).
fn arrived(socket: impl AsFd, expected: usize) -> Vec<(u16, u32)> {
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let mut buffer = [0; 64];
    let mut left = expected;
    std::iter::from_fn(|| {
        loop {
            if left > 0 {
                assert_eq!(
                    poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&limit)),
                    Ok(1),
                    "{left} did not come"
                );
            }
            match rustix::net::recv(&socket, &mut buffer[..], rustix::net::RecvFlags::DONTWAIT).ok()? {
                (16, _) => break,
                (len, _) => assert_eq!(len, probe::MARK_BYTES, "a stranger may get probes"),
            }
        }
        left = left.saturating_sub(1);
        let qpn = u32::from_be_bytes([0, buffer[5], buffer[6], buffer[7]]);
        Some(((qpn >> LANE_SHIFT) as u16, u32::from_be_bytes(buffer[12..16].try_into().unwrap())))
    })
    .collect()
}

struct Sender {
    port: u16,
    sources: Vec<(UdpSocket, &'static str)>,
    tag: u32,
}

impl Sender {
    fn new(port: u16) -> Sender {
        let v4 = || (UdpSocket::bind("127.0.0.1:0").unwrap(), "127.0.0.1");
        let v6 = || (UdpSocket::bind("[::1]:0").unwrap(), "::1");
        Sender { port, sources: vec![v4(), v4(), v4(), v6(), v6()], tag: 0 }
    }

    /// Sends one packet to the lane from each source; gives their tags.
    fn send(&mut self, lane: u16) -> Vec<(u16, u32)> {
        self.sources
            .iter()
            .map(|(socket, to)| {
                self.tag += 1;
                socket.send_to(&packet(lane, self.tag), (*to, self.port)).unwrap();
                (lane, self.tag)
            })
            .collect()
    }
}

struct Leased {
    lane: u16,
    id: SocketId,
    socket: OwnedFd,
}

fn lease(group: &mut Group, lane: u16) -> Leased {
    let (id, socket) = group.lease(lane).unwrap();
    Leased { lane, id, socket }
}

fn give_back(group: &mut Group, leased: Leased) {
    group.unmap(leased.id);
    drop(leased.socket);
    group.let_go(leased.id);
}

/// Every lane's packets arrive there, from every source, and nowhere else; strays arrive at the service's socket.
fn check(group: &Group, sender: &mut Sender, leases: &[Leased], unleased: &[u16]) {
    let expected: Vec<_> = leases.iter().map(|leased| sender.send(leased.lane)).collect();
    let strays: Vec<_> = unleased.iter().flat_map(|lane| sender.send(*lane)).collect();
    for (leased, expected) in leases.iter().zip(expected) {
        assert_eq!(arrived(&leased.socket, expected.len()), expected, "lane {}", leased.lane);
    }
    assert_eq!(arrived(group.own_socket(), strays.len()), strays);
}

#[test]
fn steering_stays_right_while_lanes_come_and_go() {
    let port = free_port();
    let mut group = Group::open(port, Arc::default()).unwrap();
    let mut sender = Sender::new(port);
    check(&group, &mut sender, &[], &[0, 1, 1023]);

    let mut leases: Vec<Leased> = [5, 1023, 1, 700, 64, 65, 2].map(|lane| lease(&mut group, lane)).into();
    check(&group, &mut sender, &leases, &[0, 3, 66]);

    for at in [1, 0, 3, 1] {
        let gone = leases.remove(at);
        let lane = gone.lane;
        give_back(&mut group, gone);
        check(&group, &mut sender, &leases, &[lane]);
    }
    for lane in [900, 5, 901] {
        leases.push(lease(&mut group, lane));
        check(&group, &mut sender, &leases, &[0]);
    }
    for leased in leases.drain(..) {
        give_back(&mut group, leased);
    }
    assert!(group.len() <= 1 + SPARES_KEPT, "{group:?}");
    check(&group, &mut sender, &[], &[0, 5, 900]);
}

#[test]
fn a_socket_that_a_process_keeps_moves_nothing_when_it_goes_at_last() {
    let port = free_port();
    let mut group = Group::open(port, Arc::default()).unwrap();
    let mut sender = Sender::new(port);
    let mut leases: Vec<Leased> = (1..=6).map(|lane| lease(&mut group, lane)).collect();

    // Two holders say that they let go, and do not.
    let kept: Vec<Leased> = [1, 2].map(|at| leases.remove(at)).into();
    for leased in &kept {
        group.unmap(leased.id);
        group.let_go(leased.id);
    }
    assert_eq!(group.lingering(), 2);
    assert!(group.unsettled());
    check(&group, &mut sender, &leases, &[2, 4]);
    leases.push(lease(&mut group, 7));
    check(&group, &mut sender, &leases, &[2, 4]);

    // They go, both before the group looks again: no lane is touched before or after it looks.
    drop(kept);
    check(&group, &mut sender, &leases, &[2, 4]);
    group.sweep();
    assert_eq!(group.lingering(), 0);
    check(&group, &mut sender, &leases, &[2, 4]);
    for lane in 8..=12 {
        leases.push(lease(&mut group, lane));
        check(&group, &mut sender, &leases, &[2, 4]);
    }
    let first = leases.remove(0);
    give_back(&mut group, first);
    check(&group, &mut sender, &leases, &[1]);
}

#[test]
fn a_ghost_that_goes_alone_costs_nothing() {
    let port = free_port();
    let mut group = Group::open(port, Arc::default()).unwrap();
    let mut sender = Sender::new(port);
    let mut leases: Vec<Leased> = (1..=4).map(|lane| lease(&mut group, lane)).collect();
    for round in 0..5 {
        let kept = leases.remove(0);
        group.unmap(kept.id);
        group.let_go(kept.id);
        drop(kept);
        leases.push(lease(&mut group, 100 + round));
        check(&group, &mut sender, &leases, &[0, 50]);
    }
    assert!(group.slots.iter().all(|slot| slot.role != Role::Burnt), "{group:?}");
    assert!(group.len() <= 5 + SPARES_KEPT, "{group:?}");
}

#[test]
fn sockets_are_never_lent_twice() {
    let mut group = Group::open(free_port(), Arc::default()).unwrap();
    let mut seen = std::collections::HashSet::new();
    for round in 0..50u16 {
        let leased = lease(&mut group, 1 + round % 7);
        assert!(seen.insert(leased.id));
        give_back(&mut group, leased);
    }
}

#[test]
fn a_port_in_use_is_refused_with_its_holder() {
    let port = free_port();
    let _holder = UdpSocket::bind(("0.0.0.0", port)).unwrap();
    let error = Group::open(port, Arc::default()).unwrap_err();
    assert_eq!(error.errno(), libc::EADDRINUSE);
    let text = error.to_string();
    assert!(text.contains(&format!("(pid {})", std::process::id())), "{text}");
    assert!(text.contains("end that program"), "{text}");
}

#[test]
fn every_lane_can_be_leased() {
    crate::server::raise_descriptor_limit();
    let port = free_port();
    let mut group = Group::open(port, Arc::default()).unwrap();
    let mut sender = Sender::new(port);
    // Lanes beyond a few are checked by number, not by descriptors: a test process may have few of those.
    let leases: Vec<Leased> = (1..=300).map(|lane| lease(&mut group, lane * 3)).collect();
    check(&group, &mut sender, &leases[280..], &[1]);
    check(&group, &mut sender, &leases[..20], &[2]);
}

/// The kernel asks any socket of the group whether to merge: what was a spare and the service's own say the same as others.
#[test]
fn every_socket_of_the_group_takes_merged_datagrams() {
    let port = free_port();
    let mut group = Group::open(port, Arc::default()).unwrap();
    let leases = [3, 4, 5, 6].map(|lane| lease(&mut group, lane));
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    let size = packet(0, 0).len();
    sys::set_int_option(sender.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, size as i32).unwrap();

    let stray = (9, group.own_socket());
    for (lane, socket) in leases.iter().map(|leased| (leased.lane, leased.socket.as_fd())).chain([stray]) {
        let merged = [packet(lane, 1), packet(lane, 2), packet(lane, 3)].concat();
        sender.send_to(&merged, ("127.0.0.1", port)).unwrap();
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&limit)), Ok(1), "lane {lane}");
        let mut buffer = [0; 64];
        let datagram = sys::recv_datagram(socket, &mut buffer).unwrap();
        assert_eq!((datagram.len, datagram.segment), (3 * size, size), "lane {lane}");
        assert_eq!(buffer[..datagram.len], merged);
    }
}

/// rdma_rxe and cards send so: what they said to the connection manager was lost, since only lanes took it.
#[test]
fn every_socket_of_the_group_takes_ipv6_packets_without_a_udp_checksum() {
    let port = free_port();
    let mut group = Group::open(port, Arc::default()).unwrap();
    let leases = [3, 4].map(|lane| lease(&mut group, lane));
    let socket = UdpSocket::bind("[::1]:0").unwrap();
    sys::set_int_option(socket.as_fd(), libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1).unwrap();
    let mut sender = Sender { port, sources: vec![(socket, "::1")], tag: 0 };
    check(&group, &mut sender, &leases, &[0, 9]);
}

/// What programs have after the death of a group's owner: some lanes' sockets, in an order that closing has mixed up.
fn orphans(port: u16, lanes: std::ops::RangeInclusive<u16>) -> Vec<Leased> {
    let mut group = Group::open(port, Arc::default()).unwrap();
    lanes.map(|lane| lease(&mut group, lane)).collect()
}

fn adopt(group: &mut Group, orphan: Leased) -> Leased {
    let id = group.adopt(orphan.lane, orphan.socket.try_clone().unwrap()).unwrap();
    Leased { id, ..orphan }
}

#[test]
fn sockets_that_outlived_their_group_are_found_again() {
    let port = free_port();
    let mut orphans = orphans(port, 1..=9);
    orphans.remove(2);
    let mut group = Group::open(port, Arc::default()).unwrap();
    assert!(group.has_strangers());
    let mut sender = Sender::new(port);
    check(&group, &mut sender, &[], &[1, 9]);

    // A new lane among them, and one after the other of the old ones.
    let mut leases = vec![lease(&mut group, 77)];
    check(&group, &mut sender, &leases, &[1, 9]);
    while let Some(orphan) = orphans.pop() {
        leases.push(adopt(&mut group, orphan));
        group.settle();
        check(&group, &mut sender, &leases, &[500]);
    }
    assert!(!group.has_strangers(), "{group:?}");
    // From now on it is a group like any other.
    for at in [3, 0, 5] {
        let gone = leases.remove(at);
        give_back(&mut group, gone);
        check(&group, &mut sender, &leases, &[]);
    }
    assert!(group.len() <= leases.len() + 1 + SPARES_KEPT, "{group:?}");
}

#[test]
fn a_stranger_that_goes_is_noticed() {
    let port = free_port();
    let mut orphans = orphans(port, 1..=6);
    let mut group = Group::open(port, Arc::default()).unwrap();
    let mut sender = Sender::new(port);
    let mut leases: Vec<Leased> = [5, 3, 1].map(|at| adopt(&mut group, orphans.remove(at))).into();
    group.settle();
    check(&group, &mut sender, &leases, &[1]);
    while let Some(stranger) = orphans.pop() {
        drop(stranger);
        assert!(group.wants_sweep());
        group.sweep();
        check(&group, &mut sender, &leases, &[1]);
        leases.push(lease(&mut group, 100 + orphans.len() as u16));
        check(&group, &mut sender, &leases, &[1]);
    }
    assert!(!group.has_strangers(), "{group:?}");
}

/// Whoever has a socket of the group can put another program in the place of the group's.
#[test]
fn a_map_that_is_not_in_force_any_more_is_noticed() {
    let port = free_port();
    let mut group = Group::open(port, Arc::default()).unwrap();
    let mut sender = Sender::new(port);
    let leases: Vec<Leased> = (1..=4).map(|lane| lease(&mut group, lane)).collect();
    for index in 0..group.len() as u32 + 3 {
        sys::attach_reuseport_program(leases[0].socket.as_fd(), &steer::constant(index)).unwrap();
        assert!(!group.is_right(), "everything goes to {index}");
        let before = group.probings();
        group.doubt = Doubt::default();
        group.raise_doubt();
        assert!(group.wants_sweep());
        group.sweep();
        // At least: it is found out again if a probe was counted too late.
        assert!(group.probings() > before);
        check(&group, &mut sender, &leases, &[0, 9]);
    }
    assert!(!group.has_strangers(), "{group:?}");
}

/// Nothing is probed, and no lane disturbed, because something is doubted. (On a machine that is short of cores a probe may be counted
/// too late twice, but not each time.)
#[test]
fn a_map_that_is_right_stays() {
    let port = free_port();
    let mut group = Group::open(port, Arc::default()).unwrap();
    let mut sender = Sender::new(port);
    let leases: Vec<Leased> = (1..=70).map(|lane| lease(&mut group, lane)).collect();
    const DOUBTS: usize = 5;
    let disturbs = |_: &usize| {
        let before = group.probings();
        group.doubt = Doubt::default();
        group.raise_doubt();
        group.sweep();
        assert!(group.probings() > before || !group.wants_sweep());
        group.probings() > before
    };
    assert!((0..DOUBTS).filter(disturbs).count() < DOUBTS);
    check(&group, &mut sender, &leases, &[0, 71]);
}

/// A program of the same user opens the port, when the group is there already, and closes it.
#[test]
fn a_stranger_that_comes_late_moves_nothing() {
    let port = free_port();
    let mut group = Group::open(port, Arc::default()).unwrap();
    let mut sender = Sender::new(port);
    let mut leases: Vec<Leased> = (1..=3).map(|lane| lease(&mut group, lane)).collect();
    let stranger = bind_socket(group.v6, port).unwrap();
    leases.extend((4..=9).map(|lane| lease(&mut group, lane)));
    assert!(group.has_strangers());
    check(&group, &mut sender, &leases, &[0, 500]);
    drop(stranger);
    group.sweep();
    assert!(!group.has_strangers(), "{group:?}");
    check(&group, &mut sender, &leases, &[0, 500]);
}

/// A program that wants to be left alone by filters is left alone; others are found.
#[test]
fn a_socket_that_takes_no_filter_harms_only_itself() {
    let port = free_port();
    let orphans = orphans(port, 1..=3);
    sys::attach_filter(orphans[1].socket.as_fd(), &[steer::constant(u32::MAX)[0]]).unwrap();
    sys::set_int_option(orphans[1].socket.as_fd(), libc::SOL_SOCKET, libc::SO_LOCK_FILTER, 1).unwrap();
    let mut group = Group::open(port, Arc::default()).unwrap();
    let leases: Vec<Leased> = orphans.into_iter().map(|orphan| adopt(&mut group, orphan)).collect();
    group.settle();
    let mut sender = Sender::new(port);
    let (found, lost): (Vec<Leased>, Vec<Leased>) = leases.into_iter().partition(|leased| leased.lane != 2);
    // What is for the lane that was not found comes to the service's own socket, which relays it.
    check(&group, &mut sender, &found, &[0, 2]);
    drop(lost);
}

/// Programs read their sockets all the time, so also while the order is found out.
#[test]
fn the_order_is_found_while_programs_read_their_sockets() {
    let port = free_port();
    let orphans = orphans(port, 1..=4);
    std::thread::scope(|scope| {
        let (stop, stopped) = std::io::pipe().unwrap();
        let readers: Vec<_> = orphans
            .iter()
            .map(|orphan| {
                let stop = stop.try_clone().unwrap();
                scope.spawn(move || {
                    let mut seen = Vec::new();
                    loop {
                        let mut fds = [PollFd::new(&orphan.socket, PollFlags::IN), PollFd::new(&stop, PollFlags::IN)];
                        poll(&mut fds, None).unwrap();
                        seen.extend(arrived(&orphan.socket, 0));
                        if !fds[1].revents().is_empty() {
                            return seen;
                        }
                    }
                })
            })
            .collect();
        let mut group = Group::open(port, Arc::default()).unwrap();
        for orphan in &orphans {
            group.adopt(orphan.lane, orphan.socket.try_clone().unwrap()).unwrap();
        }
        group.settle();
        let mut sender = Sender::new(port);
        let sent: Vec<_> = orphans.iter().map(|orphan| sender.send(orphan.lane)).collect();
        drop(stopped);
        for (reader, sent) in readers.into_iter().zip(sent) {
            assert_eq!(reader.join().unwrap(), sent);
        }
    });
}

#[test]
fn only_sockets_of_the_group_are_adopted() {
    let port = free_port();
    let orphans = orphans(port, 1..=2);
    let mut group = Group::open(port, Arc::default()).unwrap();
    let mut refused = |socket: OwnedFd| assert_eq!(group.adopt(9, socket).unwrap_err().errno(), libc::EINVAL);
    refused(UdpSocket::bind("0.0.0.0:0").unwrap().into());
    refused(std::fs::File::open("/dev/null").unwrap().into());
    refused(group_socket_at_one_address(port));
    refused(std::os::unix::net::UnixStream::pair().unwrap().0.into());
    let lane = orphans[0].lane;
    group.adopt(lane, orphans[0].socket.try_clone().unwrap()).unwrap();
    let twice = group.adopt(lane + 1, orphans[0].socket.try_clone().unwrap()).unwrap_err();
    assert_eq!(twice.errno(), libc::EINVAL);
}

#[test]
fn roles_change_as_the_table_says_and_not_otherwise() {
    use Role::{Burnt, Done, Ghost, Leased, Lingering, Service, Spare, Stranger};
    let changes = [
        (Spare, Leased(1)),
        (Leased(1), Spare),
        (Leased(1), Lingering),
        (Lingering, Done),
        (Done, Ghost),
        (Lingering, Leased(1)),
        (Done, Leased(1)),
        (Ghost, Leased(1)),
        (Spare, Burnt),
        (Burnt, Burnt),
    ];
    let roles = [Service, Spare, Leased(1), Lingering, Done, Ghost, Burnt, Stranger];
    for (from, to) in roles.into_iter().flat_map(|from| roles.map(|to| (from, to))) {
        assert_eq!(from.may_become(to), changes.contains(&(from, to)), "{from:?} to {to:?}");
    }
    assert!(!Leased(1).may_become(Leased(2)));
}

/// The service that had adopted it crashed before it had said so; the next one took that for given back, and the program, which offered
/// it again, was refused for ever.
#[test]
fn a_socket_that_was_given_up_is_adopted_again() {
    let port = free_port();
    let mut orphans = orphans(port, 1..=4);
    let mut group = Group::open(port, Arc::default()).unwrap();
    let adopted: Vec<Leased> = orphans.drain(..).map(|orphan| adopt(&mut group, orphan)).collect();
    group.settle();
    let (lingering, done, ghost) = (adopted[0].id, adopted[1].id, adopted[2].id);
    group.unmap(lingering);
    group.unmap(ghost);
    group.let_go(ghost);
    assert_eq!(group.slot_mut(ghost).role, Role::Ghost, "its holder keeps it");
    group.unmap(done);
    // As if it could not be closed for the moment.
    group.slot_mut(done).set_role(Role::Done);
    assert_eq!(group.slot_mut(lingering).role, Role::Lingering);

    let adopted: Vec<Leased> = adopted
        .into_iter()
        .map(
            |leased| {
                if leased.lane == 4 { leased } else { adopt(&mut group, Leased { lane: leased.lane + 10, ..leased }) }
            },
        )
        .collect();
    assert_eq!([adopted[0].id, adopted[1].id, adopted[2].id], [lingering, done, ghost]);
    group.settle();
    let mut sender = Sender::new(port);
    check(&group, &mut sender, &adopted, &[1, 2, 3, 500]);
    let twice = group.adopt(99, adopted[0].socket.try_clone().unwrap()).unwrap_err();
    assert_eq!(twice.errno(), libc::EINVAL);
    // From now on it is a group like any other.
    for leased in adopted {
        give_back(&mut group, leased);
    }
    assert!(group.slots.iter().all(|slot| matches!(slot.role, Role::Service | Role::Spare)), "{group:?}");
}

/// At the port, but first in line for one address whatever the program says.
fn group_socket_at_one_address(port: u16) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
    sockopt::set_socket_reuseport(&socket, true).unwrap();
    rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)).unwrap();
    socket
}
