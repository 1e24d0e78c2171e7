//! Peers that are not what they seem, and programs that want too much: limits hold, others go on.

mod common;

use std::collections::BTreeSet;
use std::net::SocketAddr;

use common::*;
use ferroce_cm::{
    AcceptDatagramParam, BindOptions, Cm, CmError, CmId, Config, DropReason, EventKind, Owner, Path, ResolveParam,
    Service, State, UDP_QKEY, User, errno,
};
use ferroce_wire::mad::{
    ApStatus, Ece, IpHeaderError, Mad, MadError, Message, PortSpace, RejReason, ServiceId, gid_of,
};

/// The REQ of a stranger at host 0 to host 1, number `n`.
fn req(net: &mut Net, n: u32) -> Mad {
    let mut scratch = Cm::new(Config::new([n as u8; 32]));
    let id = scratch.create_id(OWNER, PortSpace::Tcp, Service::Connected).unwrap();
    scratch.connect(net.now, id, &connect_param(0, 1, 0x1000 + n)).unwrap();
    let mut mad = scratch.poll_transmit().unwrap().mad;
    if let Message::Req(req) = &mut mad.message {
        req.local_comm_id = 0x4000_0000 + n;
    }
    mad
}

#[test]
fn a_full_backlog_drops_until_the_program_takes() {
    let mut net = Net::new(2);
    let listener = net.listen(1, 3);
    let clients: Vec<_> = (0..5).map(|n| net.connect(0, 1, 0x20 + n)).collect();
    net.run(10 * MS);
    assert_eq!(net.drops, [DropReason::BacklogFull; 2]);
    let waiting = |net: &Net| net.hosts[1].ids().find(|info| info.id == listener).unwrap().waiting;
    assert_eq!((net.events[1].len(), waiting(&net)), (3, 3));
    for event in std::mem::take(&mut net.events[1]) {
        net.at(1, |cm, _| cm.take_request(event.id));
        net.at(1, |cm, _| cm.take_request(event.id));
    }
    assert_eq!(waiting(&net), 0);
    net.run(SECOND);
    assert_eq!(net.names(1), ["CONNECT_REQUEST"; 2]);
    assert!(clients.iter().all(|id| net.state(0, *id) != State::Done), "nobody was rejected");
    assert_eq!(net.hosts[1].stats().rx_limited, 2);
    net.end();
}

#[test]
fn one_peer_cannot_fill_a_backlog() {
    let mut config = Config::new([0; 32]);
    config.limits.pending_per_peer = 2;
    let mut net = Net::with(3, config);
    net.listen(1, 3);
    for n in 0..4 {
        net.connect(0, 1, 0x20 + n);
    }
    net.run(10 * MS);
    assert_eq!(net.drops, [DropReason::PeerLimit; 2]);
    net.connect(2, 1, 0x30);
    net.run(10 * MS);
    assert_eq!(net.names(1), ["CONNECT_REQUEST"; 3]);
    net.end();
}

/// A flood of connection requests, whose sender does not care for answers.
#[test]
fn connection_flood() {
    let mut config = Config::new([0; 32]);
    config.limits.ids_per_owner = 50;
    config.limits.lingering = 20;
    let mut net = Net::with(2, config);
    net.listen(1, 0);
    // Another program listens as well.
    net.at(1, |cm, _| {
        let id = cm.create_id(Owner(2), PortSpace::Tcp, Service::Connected).unwrap();
        cm.bind(id, SocketAddr::new(addr(1), PORT + 1), BindOptions::default()).unwrap();
        cm.listen(id, 0).unwrap();
    });
    let mut taken = 0;
    for n in 0..500 {
        let mad = req(&mut net, n);
        let _dropped = net.inject(1, addr(0), &mad);
        while let Some(event) = net.events[1].pop_front() {
            net.at(1, |cm, _| cm.take_request(event.id));
            taken += 1;
            // The program accepts some, rejects some, and leaves others lying.
            match n % 3 {
                0 => net.at(1, |cm, now| cm.accept(now, event.id, &accept_param(1, 0x5000 + n))).unwrap(),
                1 => net.at(1, |cm, now| cm.destroy(now, event.id)).unwrap(),
                _ => {}
            }
        }
        assert!(net.hosts[1].ids().count() <= 50 + 20 + 1);
        // Nobody's answers are for the flooder's eyes; the network drops them.
        net.forget();
    }
    assert!(taken > 49, "{taken}");
    assert!(net.hosts[1].stats().rx_limited > 300);
    assert!(net.hosts[1].stats().lingering_evicted > 0);
    // The other program's listener takes requests all the while.
    let client = net.id(0);
    let mut connect = connect_param(0, 1, 0x11);
    connect.port = PORT + 1;
    net.at(0, |cm, now| cm.connect(now, client, &connect)).unwrap();
    net.run(10 * MS);
    assert_eq!(net.event(1).owner, Owner(2));
    net.end();
}

#[test]
fn programs_have_limits() {
    let mut config = Config::new([0; 32]);
    config.limits.ids_per_owner = 4;
    config.limits.listeners_per_owner = 2;
    config.limits.ids = 6;
    let mut cm = Cm::new(config);
    let id = |cm: &mut Cm, owner| cm.create_id(Owner(owner), PortSpace::Tcp, Service::Connected);
    for port in [1, 2, 3] {
        let id = id(&mut cm, 1).unwrap();
        cm.bind(id, SocketAddr::new(addr(0), port), BindOptions::default()).unwrap();
        let expected = match port {
            3 => Err(CmError::Limit { what: "listeners for a process", limit: 2 }),
            _ => Ok(()),
        };
        assert_eq!(cm.listen(id, 1), expected);
    }
    id(&mut cm, 1).unwrap();
    let error = id(&mut cm, 1).unwrap_err();
    assert_eq!((error.errno(), error.to_string().as_str()), (errno::ENOMEM, "no more than 4 ids for a process"));
    id(&mut cm, 2).unwrap();
    id(&mut cm, 3).unwrap();
    assert_eq!(id(&mut cm, 3), Err(CmError::Limit { what: "ids on this host", limit: 6 }));
    cm.release_owner(0, Owner(1));
    assert!(id(&mut cm, 3).is_ok());
    cm.check();
}

/// What one guest takes by itself, or lets others send to it, others have not.
#[test]
fn users_have_limits() {
    let mut config = Config::new([0; 32]);
    config.limits.ids_of_guests = 8;
    let mut net = Net::with(2, config);
    let guest = |number| User { number, guest: true };
    let id = |cm: &mut Cm, owner| cm.create_id(Owner(owner), PortSpace::Tcp, Service::Connected);
    net.at(1, |cm, _| {
        for (owner, user) in [(11, guest(1)), (12, guest(1)), (21, guest(2)), (31, User { number: 3, guest: false })] {
            cm.enroll(Owner(owner), user);
        }
        let listener = id(cm, 11).unwrap();
        cm.bind(listener, SocketAddr::new(addr(1), PORT), BindOptions::default()).unwrap();
        cm.listen(listener, 0).unwrap();
        id(cm, 12).unwrap();
    });
    for n in 0..3 {
        let mad = req(&mut net, n);
        let dropped = net.inject(1, addr(0), &mad);
        assert_eq!(dropped.err(), (n == 2).then_some(DropReason::UserLimit), "request {n}");
    }
    net.at(1, |cm, _| {
        assert_eq!(id(cm, 12), Err(CmError::Limit { what: "ids for a user", limit: 4 }));
        for more in [true, true, false] {
            assert_eq!(id(cm, 21).is_ok(), more, "half of what is left");
        }
        assert_eq!((cm.ids_of_user(guest(1)), cm.ids_of_user(guest(2)), cm.ids_of_guests()), (4, 2, 6));
        for _ in 0..20 {
            id(cm, 31).unwrap();
        }
    });
    net.at(1, |cm, now| {
        cm.release_owner(now, Owner(11));
        assert_eq!(cm.ids_of_user(guest(1)), 1);
        id(cm, 12).unwrap();
        cm.check();
    });
    net.forget();
}

/// What is told about a user goes before what guests leave each other.
#[test]
fn users_have_the_limit_that_is_told() {
    let mut config = Config::new([0; 32]);
    config.limits.ids_of_guests = 8;
    config.limits.ids_per_user = Some(7);
    let mut cm = Cm::new(config);
    let id = |cm: &mut Cm, owner| cm.create_id(Owner(owner), PortSpace::Tcp, Service::Connected);
    for (owner, guest) in [(1, true), (2, true), (3, false)] {
        cm.enroll(Owner(owner), User { number: owner, guest });
    }
    for _ in 0..7 {
        id(&mut cm, 1).unwrap();
    }
    assert_eq!(id(&mut cm, 1), Err(CmError::Limit { what: "ids for a user", limit: 7 }));
    id(&mut cm, 2).unwrap();
    assert_eq!(id(&mut cm, 2), Err(CmError::Limit { what: "ids for other users", limit: 8 }));
    for _ in 0..7 {
        id(&mut cm, 3).unwrap();
    }
    assert_eq!(id(&mut cm, 3), Err(CmError::Limit { what: "ids for a user", limit: 7 }));
}

/// Each question how many there are walked all ids of the host.
#[test]
fn ids_are_counted_by_kind() {
    let mut net = Net::new(2);
    let (one, another) = (User { number: 1, guest: true }, User { number: 2, guest: true });
    net.at(1, |cm, _| {
        for (owner, user) in [(OWNER, one), (Owner(2), one), (Owner(3), another)] {
            cm.enroll(owner, user);
        }
        let id = cm.create_id(Owner(2), PortSpace::Tcp, Service::Connected).unwrap();
        cm.bind(id, SocketAddr::new(addr(1), PORT + 1), BindOptions::default()).unwrap();
        cm.listen(id, 0).unwrap();
    });
    let counted = |net: &Net| {
        let cm = &net.hosts[1];
        [cm.kinds_of_owner(OWNER), cm.kinds_of_user(one), cm.kinds_of_user(another)]
            .map(|kinds| (kinds.listeners, kinds.pending))
    };
    assert_eq!(counted(&net), [(0, 0), (1, 0), (0, 0)]);
    let (client, server) = net.requested();
    assert_eq!(counted(&net), [(1, 1), (2, 1), (0, 0)]);
    net.at(1, |cm, now| cm.accept(now, server, &accept_param(1, 0x22))).unwrap();
    net.run(10 * MS);
    assert_eq!(counted(&net), [(1, 1), (2, 1), (0, 0)], "accepted, and not established");
    net.at(0, |cm, _| cm.establish(client)).unwrap();
    net.run(10 * MS);
    assert_eq!(counted(&net), [(1, 0), (2, 0), (0, 0)], "it is made");
    net.connect(0, 1, 0x12);
    net.run(10 * MS);
    assert_eq!(counted(&net)[0], (1, 1));
    let ids: Vec<_> = net.hosts[1].ids_of_user_from(one, CmId::from_number(0)).map(|info| info.id).collect();
    assert_eq!((ids.len(), net.hosts[1].ids_with_owners()), (4, 4));
    assert!(net.hosts[1].ids_of_user_from(one, ids[2]).map(|info| info.id).eq(ids[2..].iter().copied()));
    assert_eq!(net.hosts[1].ids_of_user_from(another, CmId::from_number(0)).count(), 0);
    net.at(1, |cm, now| cm.release_owner(now, OWNER));
    assert_eq!(counted(&net), [(0, 0), (1, 0), (0, 0)], "the request went with its listener");
    assert_eq!(net.hosts[1].ids_with_owners(), 1);
    net.end();
}

/// Whether one more was allowed was told by a number that they did not change.
#[test]
fn datagram_ids_that_ask_are_counted_as_pending() {
    let mut net = Net::new(2);
    let datagram = |cm: &mut Cm| cm.create_id(OWNER, PortSpace::Udp, Service::Datagram).unwrap();
    net.at(1, |cm, _| {
        let listener = datagram(cm);
        cm.bind(listener, SocketAddr::new(addr(1), PORT), BindOptions::default()).unwrap();
        cm.listen(listener, 4).unwrap();
    });
    net.at(0, |cm, now| {
        let id = datagram(cm);
        let path = Path::new(addr(0), addr(1));
        cm.resolve(now, id, &ResolveParam { path, port: PORT, private_data: b"" }).unwrap();
    });
    let pending = |net: &Net| [0, 1].map(|host: usize| net.hosts[host].kinds_of_owner(OWNER).pending);
    assert_eq!(pending(&net), [1, 0]);
    net.run(10 * MS);
    assert_eq!(pending(&net), [1, 1]);
    let request = net.event(1).id;
    let answer =
        AcceptDatagramParam { qpn: 0x33, qkey: UDP_QKEY, private_data: b"", ece: Ece { vendor_id: 0, attr_mod: 0 } };
    net.at(1, |cm, now| cm.accept_datagram(now, request, &answer)).unwrap();
    net.run(10 * MS);
    assert_eq!(pending(&net), [0, 0], "it is resolved");
}

/// Requests that cannot be: each gets its reason, and costs nothing.
#[test]
fn bad_requests() {
    type Harm = fn(&mut ferroce_wire::mad::Req);
    let rejected = DropReason::Rejected;
    let cases: [(Harm, DropReason, RejReason); 11] = [
        (|r| r.transport_service_type = 2, rejected(RejReason(9)), RejReason::INVALID_TRANSPORT_TYPE),
        (|r| r.transport_service_type = 3, rejected(RejReason(9)), RejReason::INVALID_TRANSPORT_TYPE),
        (|r| r.primary.remote_gid = gid_of(addr(5)), rejected(RejReason(12)), RejReason::INVALID_GID),
        (|r| r.primary.local_gid = gid_of(addr(5)), rejected(RejReason(12)), RejReason::INVALID_GID),
        (|r| r.path_mtu = 0, rejected(RejReason(26)), RejReason::INVALID_MTU),
        (|r| r.path_mtu = 6, rejected(RejReason(26)), RejReason::INVALID_MTU),
        (|r| r.local_qpn = 1, rejected(RejReason(5)), RejReason::UNSUPPORTED),
        (|r| r.service_id = ServiceId(u64::MAX), rejected(RejReason(8)), RejReason::INVALID_SERVICE_ID),
        (|r| r.service_id.0 += 1, rejected(RejReason(8)), RejReason::INVALID_SERVICE_ID),
        (|r| r.private_data[19] ^= 1, rejected(RejReason(12)), RejReason::INVALID_GID),
        (
            |r| r.private_data[0] = 1,
            DropReason::IpHeader(IpHeaderError::Version { version: 1 }),
            RejReason::CONSUMER_DEFINED,
        ),
    ];
    let mut net = Net::new(2);
    net.listen(1, 0);
    let ids = net.hosts[1].ids().count();
    for (n, (harm, drop, reason)) in cases.into_iter().enumerate() {
        let mut mad = req(&mut net, n as u32);
        let Message::Req(request) = &mut mad.message else { unreachable!() };
        harm(request);
        let comm_id = request.local_comm_id;
        assert_eq!(net.inject(1, addr(0), &mad), Err(drop), "case {n}");
        let Message::Rej(rej) = net.last("REJ").message else { unreachable!() };
        assert_eq!((rej.local_comm_id, rej.remote_comm_id, rej.reason), (0, comm_id, reason), "case {n}");
    }
    assert_eq!(net.hosts[1].ids().count(), ids);
    assert_eq!(net.names(1), [""; 0]);
    assert_eq!(net.hosts[1].stats().rx_rejected, 11);
    net.end();
}

/// Messages for ids that nobody has: who waits for an answer gets one.
#[test]
fn unknown_ids() {
    let mut net = Net::new(2);
    let (client, server) = net.established();
    net.at(0, |cm, now| cm.disconnect(now, client)).unwrap();
    net.at(1, |cm, now| cm.destroy(now, server)).unwrap();
    net.settle();
    let sent = net.sent.len();
    for (name, answer) in [("REP", Some("REJ")), ("DREQ", Some("DREP")), ("RTU", Some("REJ")), ("DREP", None)] {
        let mad = net.last(name);
        assert_eq!(net.inject(0, addr(1), &mad), Err(DropReason::UnknownId { message: name }));
        let answers: Vec<_> = net.sent[sent..].iter().map(|(_, packet)| packet.mad).collect();
        assert_eq!(answers.iter().map(|mad| mad.message.name()).next(), answer, "{name}");
        if let Some(answer) = answers.first() {
            let (local, remote) = ids(&mad.message);
            assert_eq!((ids(&answer.message), answer.tid), ((remote, local), mad.tid), "{name}");
        }
        net.sent.truncate(sent);
    }
    net.end();
}

/// There is one path: whoever wants to load another is told so, whatever the connection is doing.
#[test]
fn alternate_paths_are_refused() {
    let mut net = Net::new(2);
    let (client, _) = net.established();
    let Message::Rtu(rtu) = net.last("RTU").message else { unreachable!() };
    let lap = ferroce_wire::mad::Lap {
        local_comm_id: rtu.remote_comm_id,
        remote_comm_id: rtu.local_comm_id,
        remote_qpn: 0x11,
        remote_cm_response_timeout: 20,
        alternate: [0xff; 44],
        private_data: [0; 168],
    };
    assert_eq!(net.inject(0, addr(1), &Mad::new(9, lap.into())), Ok(()));
    let Message::Apr(apr) = net.last("APR").message else { unreachable!() };
    assert_eq!(apr.status, ApStatus::UNSUPPORTED);
    assert_eq!(net.state(0, client), State::Established);
    let unknown = ferroce_wire::mad::Lap { remote_comm_id: 5, ..lap };
    assert_eq!(net.inject(0, addr(1), &Mad::new(9, unknown.into())), Err(DropReason::UnknownId { message: "LAP" }));
    let Message::Apr(apr) = net.last("APR").message else { unreachable!() };
    assert_eq!(apr.status, ApStatus::INVALID_COMM_ID);
    net.end();
}

/// Someone who knows all numbers of a connection, but sits at another address, changes nothing.
#[test]
fn another_address_changes_nothing() {
    let mut net = Net::new(3);
    let (client, server) = net.established();
    net.run(SECOND);
    let Message::Rtu(rtu) = net.last("RTU").message else { unreachable!() };
    let (a, b) = (rtu.local_comm_id, rtu.remote_comm_id);
    let mut disconnecting = Net::new(2);
    let (id, _) = disconnecting.established();
    disconnecting.at(0, |cm, now| cm.disconnect(now, id)).unwrap();
    disconnecting.run(10 * MS);
    disconnecting.end();
    let mut mads = [net.last("REP"), net.last("RTU"), disconnecting.last("DREQ"), disconnecting.last("DREP")];
    let rej = ferroce_wire::mad::Rej {
        local_comm_id: 0,
        remote_comm_id: 0,
        subject: ferroce_wire::mad::Subject::OTHER,
        info_length: 0,
        reason: RejReason::CONSUMER_DEFINED,
        info: [0; 72],
        private_data: [0; 148],
    };
    let mut all: Vec<Mad> = mads.to_vec();
    all.push(Mad::new(1, rej.into()));
    for mad in &mut all {
        for (host, local, remote) in [(0, b, a), (1, a, b)] {
            match &mut mad.message {
                Message::Rep(m) => (m.local_comm_id, m.remote_comm_id) = (local, remote),
                Message::Rtu(m) => (m.local_comm_id, m.remote_comm_id) = (local, remote),
                Message::Dreq(m) => {
                    (m.local_comm_id, m.remote_comm_id) = (local, remote);
                    m.remote_qpn = if host == 0 { 0x11 } else { 0x22 };
                }
                Message::Drep(m) => (m.local_comm_id, m.remote_comm_id) = (local, remote),
                Message::Rej(m) => (m.local_comm_id, m.remote_comm_id) = (local, remote),
                _ => unreachable!(),
            }
            let message = mad.message.name();
            let sent = net.sent.len();
            assert_eq!(net.inject(host, addr(2), mad), Err(DropReason::WrongPeer { message }));
            assert_eq!(net.sent.len(), sent, "no answer either");
        }
    }
    assert_eq!((net.state(0, client), net.state(1, server)), (State::Established, State::Established));
    assert!(net.names(0).is_empty() && net.names(1).is_empty());
    // And from the right address it counts: the test knows what it does.
    mads[2] = all[2];
    assert_eq!(net.inject(1, addr(0), &mads[2]), Ok(()));
    assert_eq!(net.names(1), ["DISCONNECTED"]);
    net.end();
}

/// A DREQ that does not know the queue pair is no DREQ of the peer.
#[test]
fn disconnecting_takes_the_queue_pair_number() {
    let mut net = Net::new(2);
    let (client, server) = net.established();
    net.lose("DREQ", 100);
    net.at(0, |cm, now| cm.disconnect(now, client)).unwrap();
    let mut dreq = net.last("DREQ");
    if let Message::Dreq(dreq) = &mut dreq.message {
        dreq.remote_qpn ^= 1;
    }
    let wrong = DropReason::Field { message: "DREQ", field: "queue pair" };
    assert_eq!(net.inject(1, addr(0), &dreq), Err(wrong));
    assert_eq!(net.state(1, server), State::Established);
    assert_eq!(net.hosts[1].stats().rx_forged, 1);
    net.end();
}

#[test]
fn communication_ids_are_random() {
    let ids = |seed: u8| -> Vec<u32> {
        let mut cm = Cm::new(Config::new([seed; 32]));
        let mut ids = Vec::new();
        for n in 0..200 {
            let id = cm.create_id(OWNER, PortSpace::Tcp, Service::Connected).unwrap();
            cm.connect(0, id, &connect_param(0, 1, 0x100 + n)).unwrap();
            let Message::Req(req) = cm.poll_transmit().unwrap().mad.message else { unreachable!() };
            ids.push(req.local_comm_id);
        }
        ids
    };
    let (one, two) = (ids(1), ids(2));
    assert_eq!(one, ids(1), "the same seed gives the same numbers");
    let all: BTreeSet<_> = one.iter().chain(&two).collect();
    assert_eq!(all.len(), 400, "and another seed others");
    let near = one.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) < 1 << 20).count();
    assert!(near <= 2, "{near} of 199 numbers are near the one before");
}

#[test]
fn nonsense_is_counted() {
    let mut cm = Cm::new(Config::new([0; 32]));
    let arrival = ferroce_cm::Arrival { src: addr(0), dst: addr(1), ifindex: 1 };
    let length = DropReason::Malformed(MadError::Length { len: 3 });
    assert_eq!(cm.handle_packet(0, &arrival, &[1, 2, 3]), Err(length));
    assert_eq!(cm.handle_packet(0, &arrival, &[0; 256]), Err(MadError::BaseVersion { version: 0 }.into()));
    assert_eq!((cm.stats().rx_msgs, cm.stats().rx_malformed), (2, 2));
    assert_eq!(cm.poll_transmit(), None);
}

/// Commands at the wrong time, of the wrong kind, with wrong values: refused, and nothing is changed.
#[test]
fn refused_commands() {
    let mut net = Net::new(2);
    let (client, server) = net.requested();
    let refused =
        |net: &mut Net, host: usize, command: fn(&mut Cm, u64, ferroce_cm::CmId) -> Result<(), CmError>, id| {
            let before = net.hosts[host].ids().collect::<Vec<_>>();
            let error = net.at(host, |cm, now| command(cm, now, id)).expect_err("it is not possible");
            assert_eq!(net.hosts[host].ids().collect::<Vec<_>>(), before, "{error}");
            assert!(!error.to_string().is_empty());
            error.errno()
        };
    for (host, id) in [(0, client), (1, server)] {
        assert_eq!(refused(&mut net, host, |cm, _, id| cm.listen(id, 1), id), errno::EINVAL);
        assert_eq!(refused(&mut net, host, |cm, _, id| cm.establish(id), id), errno::EINVAL);
        assert_eq!(refused(&mut net, host, |cm, _, id| cm.notify(id), id), errno::EINVAL);
        assert_eq!(refused(&mut net, host, |cm, now, id| cm.disconnect(now, id), id), errno::EINVAL);
        let connect = |cm: &mut Cm, now, id| cm.connect(now, id, &connect_param(0, 1, 0x77));
        assert_eq!(refused(&mut net, host, connect, id), errno::EINVAL);
    }
    let accept = |cm: &mut Cm, now, id| cm.accept(now, id, &accept_param(1, 0x22));
    assert_eq!(refused(&mut net, 0, accept, client), errno::EINVAL);
    let long = |cm: &mut Cm, now, id| cm.reject(now, id, RejReason::CONSUMER_DEFINED, &[0; 149]);
    assert_eq!(refused(&mut net, 1, long, server), errno::EINVAL);
    let number = |cm: &mut Cm, now, id| cm.accept(now, id, &accept_param(1, 1 << 24));
    assert_eq!(refused(&mut net, 1, number, server), errno::EINVAL);
    net.at(1, |cm, now| cm.destroy(now, server)).unwrap();
    assert_eq!(net.at(1, |cm, now| cm.destroy(now, server)), Err(CmError::NoSuchId(server)));
    assert_eq!(net.at(1, accept_gone(server)), Err(CmError::NoSuchId(server)));

    let idle = net.id(0);
    for harm in [0, 1, 2, 3, 4, 5] {
        let mut connect = connect_param(0, 1, 0x33);
        let long = [0; 57];
        match harm {
            0 => connect.param.qpn = 1,
            1 => connect.param.retry_count = 8,
            2 => connect.path.mtu = 6,
            3 => connect.path.flow_label = 1 << 20,
            4 => connect.private_data = &long,
            _ => connect.ece.vendor_id = 1 << 24,
        }
        let error = net.at(0, |cm, now| cm.connect(now, idle, &connect)).unwrap_err();
        assert_eq!(error.errno(), errno::EINVAL, "{error}");
        assert_eq!(net.state(0, idle), State::Idle);
    }
    assert_eq!(net.at(0, |cm, _| cm.listen(idle, 1)), Err(CmError::NotBound));
    assert!(net.at(0, |cm, now| cm.connect(now, idle, &connect_param(0, 1, 0x33))).is_ok());
    net.end();
}

fn accept_gone(id: ferroce_cm::CmId) -> impl FnOnce(&mut Cm, u64) -> Result<(), CmError> {
    move |cm, now| cm.accept(now, id, &accept_param(1, 0x22))
}

/// A listener's process is killed while requests wait: their peers hear of it, and the port is free.
#[test]
fn a_listener_is_gone() {
    let mut net = Net::new(2);
    net.listen(1, 0);
    let clients = [0x11, 0x12, 0x13].map(|qpn| net.connect(0, 1, qpn));
    net.run(10 * MS);
    let requests = std::mem::take(&mut net.events[1]);
    assert_eq!(requests.len(), 3);
    let listener = match &requests[0].kind {
        EventKind::ConnectRequest(request) => request.listener,
        other => panic!("{other:?}"),
    };
    net.at(1, |cm, _| cm.take_request(requests[0].id));
    net.at(1, |cm, now| cm.destroy(now, listener)).unwrap();
    net.run(10 * MS);
    assert_eq!(net.names(0), ["REJECTED"; 2], "those that the program never saw");
    assert_eq!(net.state(0, clients[0]), State::ReqSent);
    net.at(1, |cm, now| cm.accept(now, requests[0].id, &accept_param(1, 0x22))).unwrap();
    net.run(10 * MS);
    assert_eq!(net.names(0), ["CONNECT_RESPONSE"]);
    let refused = net.connect(0, 1, 0x14);
    net.run(10 * MS);
    assert_eq!(net.names(0), [""; 0], "there may be another listener in a moment");
    net.run(1_000 * MS);
    let event = net.event(0);
    assert_eq!(event.id, refused);
    assert!(matches!(event.kind, EventKind::Rejected { reason: RejReason::INVALID_SERVICE_ID, .. }), "{event:?}");
    net.listen(1, 0);
    net.end();
}
