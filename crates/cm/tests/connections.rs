//! Connections between two hosts, one situation a test.

mod common;

use common::*;
use ferroce_cm::{CmError, Config, ConnectParam, ConnectionParam, DropReason, EventKind, Owner, QpType, State, errno};
use ferroce_wire::mad::{Message, RejReason};

/// One message is lost, or several: everything happens all the same, once, and soon.
#[test]
fn what_is_lost_is_sent_again() {
    for (message, count) in [("REQ", 1), ("REQ", 3), ("REP", 1), ("REP", 3), ("RTU", 1), ("DREQ", 2), ("DREP", 2)] {
        let mut net = Net::new(2);
        net.lose(message, count);
        net.listen(1, 0);
        let client = net.connect(0, 1, 0x11);
        let start = net.now;
        let mut server = None;
        let mut seen = [Vec::new(), Vec::new()];
        while net.now < start + 2 * SECOND {
            net.run(MS);
            for (host, seen) in seen.iter_mut().enumerate() {
                while let Some(event) = net.events[host].pop_front() {
                    seen.push(event.kind.name());
                    match event.kind {
                        EventKind::ConnectRequest(_) => {
                            server = Some(event.id);
                            net.at(1, |cm, now| cm.accept(now, event.id, &accept_param(1, 0x22))).unwrap();
                        }
                        EventKind::ConnectResponse { .. } => net.at(0, |cm, _| cm.establish(client)).unwrap(),
                        EventKind::Established => net.at(1, |cm, now| cm.disconnect(now, event.id)).unwrap(),
                        EventKind::Disconnected { timed_out } => {
                            assert!(!timed_out, "{message}");
                            net.at(host, |cm, now| cm.disconnect(now, event.id)).unwrap();
                        }
                        _ => {}
                    }
                }
            }
        }
        assert_eq!(seen[0], ["CONNECT_RESPONSE", "DISCONNECTED", "TIMEWAIT_EXIT"], "{message}");
        assert_eq!(seen[1], ["CONNECT_REQUEST", "ESTABLISHED", "DISCONNECTED", "TIMEWAIT_EXIT"], "{message}");
        assert_eq!((net.state(0, client), net.state(1, server.unwrap())), (State::Done, State::Done));
        net.end();
    }
}

#[test]
fn nobody_answers() {
    let mut net = Net::new(2);
    net.rule = Box::new(|_| Fate::Lost);
    let start = net.now;
    let id = net.connect(0, 1, 0x11);
    net.settle();
    let event = net.event(0);
    assert_eq!((event.id, event.kind.clone()), (id, EventKind::Unreachable));
    assert_eq!(event.kind.status(), -errno::ETIMEDOUT);
    // 16 response timeouts of 4.3 s, as the specification counts.
    assert_eq!((net.now - start) / SECOND, 68);
    let sent = count(&net.messages());
    assert!((15..=25).contains(&sent["REQ"]), "{sent:?}");
    assert_eq!(sent["REJ"], 1);
    let Message::Rej(rej) = net.last("REJ").message else { unreachable!() };
    assert_eq!((rej.reason, rej.info_length), (RejReason::TIMEOUT, 8));
    assert_eq!(rej.info[..8], guid(0).to_be_bytes());
    assert_eq!(net.state(0, id), State::Done);
    assert!(!net.hosts[0].holds_qpn(0x11));
    net.end();
}

/// The peer's CM is there but its program takes its time: the peer asks for it, and the requester is patient.
#[test]
fn a_slow_program_gets_time() {
    let mut net = Net::new(2);
    let (client, server) = net.requested();
    net.run(60 * SECOND);
    assert_eq!(net.state(0, client), State::MraReqRcvd);
    let sent = count(&net.messages());
    assert_eq!((sent["REQ"], sent["MRA"]), (2, 1), "one is sent again, and then not for a minute");
    net.run(240 * SECOND);
    net.at(1, |cm, now| cm.accept(now, server, &accept_param(1, 0x22))).unwrap();
    // And the requester's program is slow as well.
    net.run(300 * SECOND);
    assert_eq!(net.names(0), ["CONNECT_RESPONSE"]);
    assert_eq!(net.state(1, server), State::MraRepRcvd);
    net.at(0, |cm, _| cm.establish(client)).unwrap();
    net.run(SECOND);
    assert_eq!(net.names(1), ["ESTABLISHED"]);
    net.end();
}

/// A peer that asks for time again and again does not keep the requester for ever.
#[test]
fn patience_ends() {
    let mut net = Net::new(2);
    let (client, _) = net.requested();
    let start = net.now;
    net.settle();
    assert_eq!(net.names(0), ["UNREACHABLE"]);
    assert_eq!(net.names(1), ["REJECTED"]);
    assert_eq!(net.state(0, client), State::Done);
    let minutes = (net.now - start) / SECOND / 60;
    assert!((16..=25).contains(&minutes), "{minutes} minutes");
    net.end();
}

#[test]
fn a_program_asks_for_time_itself() {
    let mut net = Net::new(2);
    let (client, server) = net.requested();
    net.at(1, |cm, _| cm.mra(server, 22)).unwrap();
    net.run(10 * MS);
    assert_eq!(net.state(0, client), State::MraReqRcvd);
    let Message::Mra(mra) = net.last("MRA").message else { unreachable!() };
    assert_eq!(mra.service_timeout, 22);
    net.run(20 * SECOND);
    assert_eq!(count(&net.messages())["REQ"], 1, "17.2 s are granted, and 4.3 s to answer");
    assert!(matches!(net.at(1, |cm, _| cm.mra(server, 32)), Err(CmError::Value { .. })));
    net.end();
}

/// No RTU arrives: the passive end does not wait for ever, and the active one learns that it is connected alone.
#[test]
fn no_rtu() {
    let mut net = Net::new(2);
    let (client, server) = net.replied();
    net.lose("RTU", 1_000);
    net.at(0, |cm, _| cm.establish(client)).unwrap();
    net.run(68 * SECOND);
    assert!(count(&net.messages())["RTU"] > 15, "each REP is answered");
    net.run(2 * SECOND);
    assert_eq!(net.names(1), ["UNREACHABLE"]);
    let event = net.events[0].pop_front().unwrap();
    assert!(matches!(event.kind, EventKind::Rejected { reason: RejReason::TIMEOUT, .. }), "{event:?}");
    net.settle();
    assert_eq!(net.names(0), ["TIMEWAIT_EXIT"]);
    assert_eq!((net.state(0, client), net.state(1, server)), (State::Done, State::Done));
    net.end();
}

/// The requester gave up and says so without knowing our number: the request goes.
#[test]
fn the_requester_gives_up() {
    let mut net = Net::new(2);
    net.listen(1, 0);
    net.rule = Box::new(|packet| if packet.from == 1 { Fate::Lost } else { Fate::Arrives });
    net.connect(0, 1, 0x11);
    net.settle();
    assert_eq!(net.names(0), ["UNREACHABLE"]);
    let request = net.events[1].pop_front().unwrap();
    let event = net.event(1);
    assert_eq!(event.id, request.id);
    assert!(matches!(event.kind, EventKind::Rejected { reason: RejReason::TIMEOUT, .. }), "{event:?}");
    let refused = net.at(1, |cm, now| cm.accept(now, event.id, &accept_param(1, 0x22)));
    assert_eq!(refused, Err(CmError::State { command: "accept", state: State::Done }));
    net.end();
}

/// The passive end's queue pair received data before the RTU.
#[test]
fn communication_established_without_rtu() {
    let mut net = Net::new(2);
    let (client, server) = net.replied();
    net.lose("RTU", 1);
    net.at(0, |cm, _| cm.establish(client)).unwrap();
    net.at(1, |cm, _| cm.notify(server)).unwrap();
    assert_eq!(net.names(1), ["ESTABLISHED"]);
    net.at(1, |cm, _| cm.notify(server)).unwrap();
    net.settle();
    assert_eq!(net.names(1), [""; 0], "once");
    assert_eq!((net.state(0, client), net.state(1, server)), (State::Established, State::Established));
    net.end();
}

#[test]
fn both_disconnect_at_once() {
    let mut net = Net::new(2);
    let (client, server) = net.established();
    net.at(0, |cm, now| cm.disconnect(now, client)).unwrap();
    net.at(1, |cm, now| cm.disconnect(now, server)).unwrap();
    net.settle();
    assert_eq!(net.names(0), ["DISCONNECTED", "TIMEWAIT_EXIT"]);
    assert_eq!(net.names(1), ["DISCONNECTED", "TIMEWAIT_EXIT"]);
    net.end();
}

/// A peer that is gone: the end of the connection is reported after the DREQ's timeouts, and then timewait.
#[test]
fn disconnect_from_a_dead_peer() {
    let mut net = Net::new(2);
    let (client, _) = net.established();
    net.rule = Box::new(|_| Fate::Lost);
    let start = net.now;
    net.at(0, |cm, now| cm.disconnect(now, client)).unwrap();
    net.settle();
    let events: Vec<_> = net.events[0].drain(..).map(|event| event.kind).collect();
    assert_eq!(events, [EventKind::Disconnected { timed_out: true }, EventKind::TimewaitExit]);
    assert!(net.now - start < 20 * SECOND);
    net.end();
}

/// In each state, either end gives its id up (its process is killed): the other end hears of it, and nothing is left.
#[test]
fn either_end_is_gone_in_any_state() {
    type Setup = fn(&mut Net);
    let setups: [(&str, Setup, &[&str], &[&str]); 5] = [
        ("requested", |net| _ = net.requested(), &["REJECTED"], &["REJECTED"]),
        ("replied", |net| _ = net.replied(), &["REJECTED", "TIMEWAIT_EXIT"], &["REJECTED"]),
        ("established", |net| _ = net.established(), &["DISCONNECTED"], &["DISCONNECTED"]),
        (
            "disconnecting",
            |net| {
                let (client, _) = net.established();
                net.lose("DREQ", 1);
                net.at(0, |cm, now| cm.disconnect(now, client)).unwrap();
            },
            &["DISCONNECTED", "TIMEWAIT_EXIT"],
            &["DISCONNECTED"],
        ),
        (
            "disconnected",
            |net| {
                let (client, _) = net.established();
                net.at(0, |cm, now| cm.disconnect(now, client)).unwrap();
                net.run(10 * MS);
                assert_eq!(net.names(1), ["DISCONNECTED"]);
            },
            &["DISCONNECTED", "TIMEWAIT_EXIT"],
            &[],
        ),
    ];
    for (name, setup, client_hears, server_hears) in setups {
        for (gone, left, hears) in [(1, 0, client_hears), (0, 1, server_hears)] {
            let mut net = Net::new(2);
            setup(&mut net);
            net.at(gone, |cm, now| cm.release_owner(now, OWNER));
            net.settle();
            assert_eq!(net.names(left), hears, "{name}: host {gone} is gone");
            assert_eq!(net.names(gone), [""; 0], "{name}: who is gone hears nothing");
            assert_eq!(net.hosts[gone].ids().count(), 0, "{name}");
            net.end();
        }
    }
}

/// The REJ of an end that gave up after it accepted is lost, many times: the other end still does not stay connected alone.
#[test]
fn gone_after_accept_and_the_rejections_are_lost() {
    let mut net = Net::new(2);
    let (client, server) = net.replied();
    net.lose("REJ", 1_000);
    net.at(0, |cm, _| cm.establish(client)).unwrap();
    net.at(1, |cm, now| cm.destroy(now, server)).unwrap();
    net.run(SECOND);
    assert_eq!(net.names(0), ["DISCONNECTED"]);
    net.end();
}

/// A rejection that is lost is repeated, and the program sees one request.
#[test]
fn rejection_with_private_data() {
    let mut net = Net::new(2);
    let (client, server) = net.requested();
    net.lose("REJ", 2);
    net.at(1, |cm, now| cm.reject(now, server, RejReason::CONSUMER_DEFINED, b"go away")).unwrap();
    net.run(SECOND);
    let event = net.event(0);
    let EventKind::Rejected { reason, private_data } = &event.kind else { panic!("{event:?}") };
    assert_eq!((*reason, private_data.len()), (RejReason::CONSUMER_DEFINED, 148));
    assert!(private_data.starts_with(b"go away\0"));
    assert_eq!(event.kind.status(), 28);
    assert_eq!(net.state(0, client), State::Done);
    net.settle();
    assert_eq!(net.names(1), [""; 0], "neither a second request nor the end of a timewait");
    // The queue pair is free at once, at both ends.
    net.connect(0, 1, 0x11);
    net.run(10 * MS);
    assert_eq!(net.names(1), ["CONNECT_REQUEST"]);
    net.end();
}

#[test]
fn the_client_rejects_the_reply() {
    let mut net = Net::new(2);
    let (client, server) = net.replied();
    net.lose("REJ", 1);
    net.at(0, |cm, now| cm.reject(now, client, RejReason::CONSUMER_DEFINED, b"no")).unwrap();
    net.settle();
    let event = net.event(1);
    assert_eq!(event.id, server);
    assert!(matches!(event.kind, EventKind::Rejected { reason: RejReason::CONSUMER_DEFINED, .. }), "{event:?}");
    net.end();
}

/// A host forgot everything (its service was killed with all its keepers) and comes back with the same queue pair numbers.
#[test]
fn stale_connection() {
    let mut net = Net::new(2);
    let (_, server) = net.established();
    net.hosts[0] = ferroce_cm::Cm::new(Config::new([99; 32]));
    let again = net.connect(0, 1, 0x11);
    net.run(10 * MS);
    let event = net.event(0);
    assert!(matches!(event.kind, EventKind::Rejected { reason: RejReason::STALE_CONNECTION, .. }), "{event:?}");
    // The old connection ends, since nobody knows it any more.
    net.run(SECOND);
    assert_eq!(net.names(1), ["DISCONNECTED", "TIMEWAIT_EXIT"]);
    assert_eq!(net.state(1, server), State::Done);
    // Now the number is nobody's.
    net.at(0, |cm, now| cm.destroy(now, again)).unwrap();
    net.settle();
    net.connect(0, 1, 0x11);
    net.run(10 * MS);
    assert_eq!(net.names(1), ["CONNECT_REQUEST"]);
    net.end();
}

/// The same queue pair number at another address is another queue pair.
#[test]
fn nobody_is_stale_by_the_word_of_another() {
    let mut net = Net::new(3);
    let (_, server) = net.established();
    let mut req = net.last("REQ");
    if let Message::Req(req) = &mut req.message {
        req.local_comm_id ^= 1;
        req.primary.local_gid = ferroce_wire::mad::gid_of(addr(2));
        req.private_data[16..20].copy_from_slice(&[10, 0, 0, 3]);
    }
    assert_eq!(net.inject(1, addr(2), &req), Ok(()));
    net.run(SECOND);
    assert_eq!(net.names(1), ["CONNECT_REQUEST"]);
    assert_eq!(net.state(1, server), State::Established);
    net.end();
}

/// Queue pair numbers rest after a connection: to the same peer for the time of timewait.
#[test]
fn queue_pair_numbers_rest() {
    let mut net = Net::new(3);
    let (client, _) = net.established();
    net.listen(2, 0);
    let other = net.id(0);
    let busy = Err(CmError::QpBusy { qpn: 0x11 });
    assert_eq!(net.at(0, |cm, now| cm.connect(now, other, &connect_param(0, 1, 0x11))), busy);
    assert_eq!(net.at(0, |cm, now| cm.connect(now, other, &connect_param(0, 2, 0x11))), busy);
    assert!(net.hosts[0].holds_qpn(0x11));
    net.at(0, |cm, now| cm.disconnect(now, client)).unwrap();
    net.run(10 * MS);
    net.at(1, |cm, now| cm.release_owner(now, OWNER));
    net.run(10 * MS);
    assert_eq!(net.state(0, client), State::Timewait);
    assert_eq!(net.at(0, |cm, now| cm.connect(now, other, &connect_param(0, 1, 0x11))), busy);
    assert_eq!(net.at(0, |cm, now| cm.connect(now, other, &connect_param(0, 2, 0x11))), Ok(()));
    net.at(0, |cm, now| cm.destroy(now, other)).unwrap();
    net.settle();
    let again = net.id(0);
    assert!(!net.hosts[0].holds_qpn(0x11));
    assert_eq!(net.at(0, |cm, now| cm.connect(now, again, &connect_param(0, 1, 0x11))), Ok(()));
    net.end();
}

/// One machine, two processes.
#[test]
fn a_host_with_itself() {
    let mut net = Net::new(1);
    net.listen_as(0, Owner(2), 0);
    let client = net.connect(0, 0, 0x11);
    net.run(10 * MS);
    let server = net.event(0);
    assert_eq!(server.owner, Owner(2));
    net.at(0, |cm, now| cm.accept(now, server.id, &accept_param(0, 0x22))).unwrap();
    net.run(10 * MS);
    assert_eq!(net.event(0).id, client);
    net.at(0, |cm, _| cm.establish(client)).unwrap();
    net.run(10 * MS);
    assert_eq!(net.event(0).id, server.id);
    net.at(0, |cm, now| cm.release_owner(now, OWNER));
    net.run(10 * MS);
    let end = net.event(0);
    assert_eq!((end.id, end.kind), (server.id, EventKind::Disconnected { timed_out: false }));
    net.end();
}

/// The peer accepts and gives up at once; its REP comes late, after its DREQ, and its REJ is lost. The requester must not take the
/// late REP for a connection.
#[test]
fn a_disconnect_overtakes_the_reply() {
    let mut net = Net::new(2);
    let (client, server) = net.requested();
    net.rule = Box::new(|packet| match packet.mad.message.name() {
        "REP" | "REJ" => Fate::Lost,
        _ => Fate::Arrives,
    });
    net.at(1, |cm, now| cm.accept(now, server, &accept_param(1, 0x22))).unwrap();
    net.at(1, |cm, now| cm.destroy(now, server)).unwrap();
    net.run(10 * MS);
    let event = net.event(0);
    assert!(matches!(event.kind, EventKind::Rejected { reason: RejReason::CONSUMER_DEFINED, .. }), "{event:?}");
    assert_eq!(net.state(0, client), State::Done);
    net.rule = Box::new(|_| Fate::Arrives);
    let late = net.last("REP");
    assert!(net.inject(0, addr(1), &late).is_err());
    assert_eq!(net.names(0), [""; 0]);
    net.end();
}

/// The passive end is gone without a trace (its host's service was killed): an RTU tells that, and the active end hears of it.
#[test]
fn ready_for_nobody() {
    let mut net = Net::new(2);
    let (client, _) = net.replied();
    net.hosts[1] = ferroce_cm::Cm::new(Config::new([99; 32]));
    net.at(0, |cm, _| cm.establish(client)).unwrap();
    net.run(10 * MS);
    let event = net.event(0);
    assert!(matches!(event.kind, EventKind::Rejected { reason: RejReason::INVALID_COMM_ID, .. }), "{event:?}");
    net.end();
}

/// The confirmation of a DREQ is lost again and again: the timewait of who confirmed does not end before the other's begins, so
/// that its queue pair is not taken for the old one.
#[test]
fn timewait_lasts_until_the_peer_has_heard() {
    let mut net = Net::new(2);
    let (client, server) = net.established();
    net.lose("DREP", 4);
    net.at(0, |cm, now| cm.disconnect(now, client)).unwrap();
    net.run(10 * MS);
    net.at(1, |cm, now| cm.disconnect(now, server)).unwrap();
    net.run(700 * MS);
    assert_eq!(net.state(0, client), State::DreqSent);
    assert_eq!(net.state(1, server), State::Timewait, "it would have lasted 537 ms");
    net.settle();
    assert_eq!(net.names(0), ["DISCONNECTED", "TIMEWAIT_EXIT"]);
    assert_eq!(net.names(1), ["DISCONNECTED", "TIMEWAIT_EXIT"]);
    net.end();
}

/// Above the limit for ids without an owner, those go first whose peers need nothing more.
#[test]
fn who_owes_an_answer_goes_last() {
    let mut config = Config::new([0; 32]);
    config.limits.lingering = 1;
    let mut net = Net::with(2, config);
    let (client, server) = net.established();
    net.at(1, |cm, now| cm.disconnect(now, server)).unwrap();
    net.run(10 * MS);
    net.at(0, |cm, now| cm.destroy(now, client)).unwrap();
    net.run(10 * MS);
    assert_eq!(net.names(1), ["DISCONNECTED"]);
    // One lingers at host 0 in timewait; now another must disconnect, and its DREQ is lost at first.
    net.at(1, |cm, now| cm.release_owner(now, OWNER));
    let (client, _) = {
        net.listen(1, 0);
        let client = net.connect(0, 1, 0x12);
        net.run(10 * MS);
        let request = net.event(1).id;
        net.at(1, |cm, now| cm.accept(now, request, &accept_param(1, 0x23))).unwrap();
        net.run(10 * MS);
        net.at(0, |cm, _| cm.establish(client)).unwrap();
        net.run(10 * MS);
        (client, request)
    };
    assert_eq!(net.names(1), ["ESTABLISHED"]);
    net.lose("DREQ", 2);
    net.at(0, |cm, now| cm.destroy(now, client)).unwrap();
    assert_eq!(net.hosts[0].stats().lingering_evicted, 1);
    net.run(SECOND);
    assert_eq!(net.names(1), ["DISCONNECTED"]);
    net.end();
}

/// A service is started anew and its programs bring their connections: these go on and end as if nothing had been, at either end.
#[test]
fn connections_outlive_their_manager() {
    for restarted in [0, 1] {
        for ends in [0, 1] {
            let mut net = Net::new(2);
            let (client, server) = net.established();
            let old = [client, server][restarted];
            let kept = net.hosts[restarted].established(old).unwrap();
            let parameters = net.hosts[restarted].qp_parameters(old).unwrap();
            net.hosts[restarted] = ferroce_cm::Cm::new(Config::new([99; 32]));
            let new = net.at(restarted, |cm, _| cm.adopt(OWNER, &kept)).unwrap();
            assert_eq!(net.hosts[restarted].qp_parameters(new), Ok(parameters));
            assert_eq!(net.hosts[restarted].established(new), Ok(kept));
            // What is in use is not adopted again, by nobody.
            assert!(net.at(restarted, |cm, _| cm.adopt(Owner(2), &kept)).is_err());
            let twin = ferroce_cm::Established { comm_id: kept.comm_id ^ 1, ..kept };
            assert!(net.at(restarted, |cm, _| cm.adopt(OWNER, &twin)).is_err());

            let mut ids = [client, server];
            ids[restarted] = new;
            net.at(ends, |cm, now| cm.disconnect(now, ids[ends])).unwrap();
            net.run(10 * MS);
            let other = 1 - ends;
            assert_eq!(net.event(other).id, ids[other]);
            net.at(other, |cm, now| cm.disconnect(now, ids[other])).unwrap();
            net.settle();
            assert_eq!(net.names(ends), ["DISCONNECTED", "TIMEWAIT_EXIT"]);
            assert_eq!(net.names(other), ["TIMEWAIT_EXIT"]);
            net.end();
        }
    }
}

/// Owners bring along what they have one after the other: peers that are faster are not told that it is not there.
#[test]
fn nothing_is_refused_while_owners_bring_along_what_they_have() {
    const GATHERING: u64 = 300 * MS;
    let mut net = Net::new(2);
    let (client, server) = net.established();
    let kept = net.hosts[1].established(server).unwrap();
    net.hosts[1] = ferroce_cm::Cm::new(Config { ids_after: 1 << 40, ..Config::new([99; 32]) });
    let now = net.now;
    net.hosts[1].gather(now + GATHERING);

    net.at(0, |cm, now| cm.disconnect(now, client)).unwrap();
    net.connect(0, 1, 0x12);
    net.run(10 * MS);
    assert_eq!(net.drops, [DropReason::UnknownId { message: "DREQ" }, DropReason::Closing]);
    let adopted = net.at(1, |cm, _| cm.adopt(OWNER, &kept)).unwrap();
    assert!(adopted.number() > 1 << 40, "no number of before");
    net.listen(1, 0);
    net.run(10 * SECOND);
    let mut names = net.names(1);
    names.sort_unstable();
    assert_eq!(names, ["CONNECT_REQUEST", "DISCONNECTED"]);
    assert!(!net.messages().contains(&"REJ"), "{:?}", net.messages());

    // Later, what is not there is refused at once.
    net.hosts[1] = ferroce_cm::Cm::new(Config::new([100; 32]));
    net.events[0].clear();
    net.connect(0, 1, 0x13);
    net.run(10 * MS);
    assert_eq!(net.names(0), ["REJECTED"]);
    net.end();
}

/// Only what is established can be kept.
#[test]
fn what_is_not_established_is_not_kept() {
    let mut net = Net::new(2);
    let (client, server) = net.replied();
    for (host, id) in [(0, client), (1, server)] {
        assert!(matches!(net.hosts[host].established(id), Err(CmError::State { command: "established", .. })));
    }
    net.end();
}

/// An XRC connection goes one way: the REQ promises nothing for the way back, and the REP names the target where an end-to-end context
/// has its number.
#[test]
fn an_xrc_connection() {
    let mut net = Net::new(2);
    net.listen(1, 0);
    let initiator = ConnectionParam { qp_type: QpType::XrcInitiator, ..param(0x11) };
    let client = net.id(0);
    let connect = ConnectParam { param: initiator, ..connect_param(0, 1, 0x11) };
    net.at(0, |cm, now| cm.connect(now, client, &connect)).unwrap();
    net.run(10 * MS);
    let request = net.event(1);
    let EventKind::ConnectRequest(said) = &request.kind else { panic!("{request:?}") };
    let asked = said.param;
    assert_eq!((asked.qp_type, asked.qpn, asked.initiator_depth), (QpType::XrcTarget, 0x11, 0));
    let Message::Req(req) = net.last("REQ").message else { unreachable!() };
    assert_eq!((req.transport_service_type, req.extended_transport_type), (3, 1));
    assert_eq!((req.responder_resources, req.retry_count, req.rnr_retry_count, req.srq), (0, 0, 0, false));

    net.at(1, |cm, now| cm.accept(now, request.id, &accept_param(1, 0x22))).unwrap();
    net.run(10 * MS);
    let Message::Rep(rep) = net.last("REP").message else { unreachable!() };
    assert_eq!((rep.local_qpn, rep.local_eecn, rep.initiator_depth, rep.srq), (0, 0x22, 0, true));
    let parameters = net.hosts[0].qp_parameters(client).unwrap();
    assert_eq!((parameters.dest_qpn, parameters.qp_type), (0x22, QpType::XrcInitiator));

    net.at(0, |cm, _| cm.establish(client)).unwrap();
    net.at(0, |cm, now| cm.disconnect(now, client)).unwrap();
    net.names(0);
    net.run(10 * MS);
    assert_eq!(net.names(1), ["ESTABLISHED", "DISCONNECTED"]);
    net.end();
}
