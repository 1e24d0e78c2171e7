//! Resolution of service ids between two hosts.

mod common;

use std::net::SocketAddr;

use common::*;
use ferroce_cm::{
    AcceptDatagramParam, BindOptions, CmError, CmId, DropReason, EventKind, Path, ResolveParam, Service, State,
    UDP_QKEY, errno,
};
use ferroce_wire::mad::{Ece, Message, PortSpace, RejReason, SidrStatus};

fn listen(net: &mut Net) -> CmId {
    net.at(1, |cm, _| {
        let id = cm.create_id(OWNER, PortSpace::Udp, Service::Datagram).unwrap();
        cm.bind(id, SocketAddr::new(addr(1), PORT), BindOptions::default()).unwrap();
        cm.listen(id, 4).unwrap();
        id
    })
}

fn resolve(net: &mut Net) -> CmId {
    net.at(0, |cm, now| {
        let id = cm.create_id(OWNER, PortSpace::Udp, Service::Datagram).unwrap();
        let path = Path::new(addr(0), addr(1));
        cm.resolve(now, id, &ResolveParam { path, port: PORT, private_data: b"who" }).unwrap();
        id
    })
}

const ANSWER: AcceptDatagramParam<'static> =
    AcceptDatagramParam { qpn: 0x33, qkey: UDP_QKEY, private_data: b"me", ece: Ece { vendor_id: 0, attr_mod: 0 } };

/// A program that takes turns on one port: first connections, then datagrams. The peer asks before it listens again.
#[test]
fn a_listener_of_another_port_space_was_just_there() {
    let mut net = Net::new(2);
    let connections = net.listen(1, 0);
    net.at(1, |cm, now| cm.destroy(now, connections)).unwrap();
    let id = resolve(&mut net);
    net.run(10 * MS);
    assert!(net.names(0).is_empty(), "there may be a listener in a moment");
    listen(&mut net);
    net.run(8 * SECOND);
    let request = net.event(1);
    net.at(1, |cm, now| cm.accept_datagram(now, request.id, &ANSWER)).unwrap();
    net.run(SECOND);
    let event = net.event(0);
    assert_eq!((event.id, event.kind.status()), (id, 0));
    assert!(matches!(event.kind, EventKind::Resolved { .. }), "{event:?}");
}

/// Lost requests and answers: one request for the program, one answer for the peer.
#[test]
fn resolved_once() {
    for (lost, count) in [("", 0), ("SIDR_REQ", 2), ("SIDR_REP", 3)] {
        let mut net = Net::new(2);
        net.lose(lost, count);
        let listener = listen(&mut net);
        let id = resolve(&mut net);
        net.run(SECOND);
        let request = net.event(1);
        let EventKind::ConnectRequest(asked) = &request.kind else { panic!("{request:?}") };
        assert_eq!((asked.listener, asked.service), (listener, Service::Datagram));
        assert_eq!((asked.peer.ip(), asked.local), (addr(0), SocketAddr::new(addr(1), PORT)));
        assert_eq!(asked.private_data.len(), 180);
        assert!(asked.private_data.starts_with(b"who\0"));
        net.at(1, |cm, now| cm.accept_datagram(now, request.id, &ANSWER)).unwrap();
        net.run(8 * SECOND);
        let event = net.event(0);
        assert_eq!((event.id, event.kind.code(), event.kind.status()), (id, 9, 0));
        let EventKind::Resolved { qpn, qkey, private_data, .. } = event.kind else { panic!("{lost}") };
        assert_eq!((qpn, qkey, private_data.len()), (0x33, UDP_QKEY, 136));
        assert!(private_data.starts_with(b"me\0"));
        assert_eq!((net.state(0, id), net.state(1, request.id)), (State::Done, State::SidrRepSent));
        net.settle();
        assert_eq!(net.state(1, request.id), State::Done);
        assert!(net.names(0).is_empty() && net.names(1).is_empty());
        net.end();
    }
}

#[test]
fn not_resolved() {
    let mut net = Net::new(2);
    resolve(&mut net);
    net.run(10 * MS);
    let event = net.event(0);
    assert!(matches!(event.kind, EventKind::NotResolved { status: SidrStatus::UNSUPPORTED, .. }), "{event:?}");
    assert_eq!((event.kind.code(), event.kind.status()), (7, 1));
    assert_eq!(net.drops, [DropReason::NotResolved]);
    net.end();
}

#[test]
fn rejected_or_given_up() {
    for destroy in [false, true] {
        let mut net = Net::new(2);
        listen(&mut net);
        resolve(&mut net);
        net.run(10 * MS);
        let request = net.event(1);
        if destroy {
            net.at(1, |cm, now| cm.destroy(now, request.id)).unwrap();
        } else {
            net.at(1, |cm, now| cm.reject(now, request.id, RejReason::CONSUMER_DEFINED, b"no")).unwrap();
        }
        net.run(10 * MS);
        let event = net.event(0);
        assert!(matches!(event.kind, EventKind::NotResolved { status: SidrStatus::REJECTED, .. }), "{event:?}");
        net.end();
    }
}

#[test]
fn nobody_answers() {
    let mut net = Net::new(2);
    net.rule = Box::new(|_| Fate::Lost);
    let id = resolve(&mut net);
    net.settle();
    let event = net.event(0);
    assert_eq!((event.id, event.kind.status()), (id, -errno::ETIMEDOUT));
    net.end();
}

/// A flood of resolutions: the backlog bounds it, and others get through once the program takes.
#[test]
fn flood() {
    let mut net = Net::new(2);
    listen(&mut net);
    resolve(&mut net);
    net.run(10 * MS);
    let mut mad = net.last("SIDR_REQ");
    for n in 0..1_000 {
        let Message::SidrReq(req) = &mut mad.message else { unreachable!() };
        req.request_id = 0x7000_0000 + n;
        let expected = if n < 3 { Ok(()) } else { Err(DropReason::BacklogFull) };
        assert_eq!(net.inject(1, addr(0), &mad), expected, "{n}");
    }
    assert_eq!(net.hosts[1].ids().count(), 5);
    let requests = std::mem::take(&mut net.events[1]);
    for request in &requests {
        net.at(1, |cm, now| cm.accept_datagram(now, request.id, &ANSWER)).unwrap();
        net.at(1, |cm, now| cm.destroy(now, request.id)).unwrap();
    }
    assert_eq!(net.inject(1, addr(0), &mad), Ok(()));
    net.end();
}

/// Connections and datagrams do not mix.
#[test]
fn the_other_service() {
    let mut net = Net::new(2);
    let datagram = net.at(0, |cm, _| cm.create_id(OWNER, PortSpace::Udp, Service::Datagram).unwrap());
    let refused = net.at(0, |cm, now| cm.connect(now, datagram, &connect_param(0, 1, 0x11)));
    assert_eq!(refused, Err(CmError::Service { command: "connect" }));
    // A datagram listener in the space that has both does not take connections.
    net.at(1, |cm, _| {
        let id = cm.create_id(OWNER, PortSpace::Ib, Service::Datagram).unwrap();
        cm.bind(id, SocketAddr::new(addr(1), PORT), BindOptions::default()).unwrap();
        cm.listen(id, 0).unwrap();
    });
    let id = net.at(0, |cm, now| {
        let id = cm.create_id(OWNER, PortSpace::Ib, Service::Connected).unwrap();
        cm.connect(now, id, &connect_param(0, 1, 0x11)).unwrap();
        id
    });
    net.run(10 * MS);
    let event = net.event(0);
    assert_eq!(event.id, id);
    assert!(matches!(event.kind, EventKind::Rejected { reason: RejReason::INVALID_SERVICE_ID, .. }), "{event:?}");
    net.end();
}
