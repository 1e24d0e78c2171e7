//! Every recorded dialogue of connection management, played with our machine in the place of either end: what it sends is what the
//! kernel sent, byte for byte, apart from the numbers that an end chooses.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, SocketAddr};

use common::ids;
use ferroce_cm::{
    AcceptDatagramParam, AcceptParam, Arrival, BindOptions, Cm, CmId, Config, ConnectParam, ConnectionParam,
    DropReason, Event, EventKind, Nanos, Owner, Path, QpType, ResolveParam, Service, State,
};
use ferroce_testkit::{Datagram, Recording, read_pcap};
use ferroce_wire::mad::{IpHeader, Mad, Message, RejReason, Req, check_gsi};
use ferroce_wire::{Headers, ICRC_LEN};

const OWNER: Owner = Owner(1);

/// A recorded datagram.
#[derive(Clone, Debug)]
struct Step {
    src: IpAddr,
    dst: IpAddr,
    mad: Mad,
}

fn mad_of(datagram: &Datagram) -> Option<Step> {
    let (packet, _) = datagram.payload.split_last_chunk::<ICRC_LEN>().unwrap();
    let (headers, payload) = Headers::parse(packet).ok()?;
    check_gsi(&headers).ok()?;
    let mad = Mad::parse(&packet[payload]).expect("recorded MADs are good");
    Some(Step { src: datagram.src, dst: datagram.dst, mad })
}

fn ids_mut(message: &mut Message) -> [Option<&mut u32>; 2] {
    match message {
        Message::Req(m) => [Some(&mut m.local_comm_id), None],
        Message::Mra(m) => [Some(&mut m.local_comm_id), Some(&mut m.remote_comm_id)],
        Message::Rej(m) => [Some(&mut m.local_comm_id), Some(&mut m.remote_comm_id)],
        Message::Rep(m) => [Some(&mut m.local_comm_id), Some(&mut m.remote_comm_id)],
        Message::Rtu(m) => [Some(&mut m.local_comm_id), Some(&mut m.remote_comm_id)],
        Message::Dreq(m) => [Some(&mut m.local_comm_id), Some(&mut m.remote_comm_id)],
        Message::Drep(m) => [Some(&mut m.local_comm_id), Some(&mut m.remote_comm_id)],
        Message::Lap(m) => [Some(&mut m.local_comm_id), Some(&mut m.remote_comm_id)],
        Message::Apr(m) => [Some(&mut m.local_comm_id), Some(&mut m.remote_comm_id)],
        Message::SidrReq(m) => [Some(&mut m.request_id), None],
        Message::SidrRep(m) => [None, Some(&mut m.request_id)],
    }
}

/// All recorded dialogues, each with its name.
fn dialogues() -> Vec<(String, Vec<Step>)> {
    let mut steps: Vec<(String, Vec<Step>)> = Vec::new();
    let golden = "cm/cm-golden-rxe-6.12";
    let file = fs::read(Recording::folder().join(format!("{golden}.pcap"))).unwrap();
    let datagrams = read_pcap(&file).unwrap().into_iter().filter_map(|r| Datagram::from_ethernet(&r.frame).unwrap());
    steps.push((golden.to_owned(), datagrams.filter_map(|datagram| mad_of(&datagram)).collect()));
    for recording in Recording::all().unwrap() {
        let mads = recording.frames.iter().filter_map(|frame| mad_of(&frame.datagram)).collect();
        steps.push((recording.name, mads));
    }
    let mut dialogues: Vec<(String, Vec<Step>, BTreeSet<u32>)> = Vec::new();
    for (name, steps) in steps {
        let first = dialogues.len();
        for step in steps {
            let (local, remote) = ids(&step.mad.message);
            if matches!(step.mad.message, Message::Req(_) | Message::SidrReq(_)) {
                let name = format!("{name}, dialogue {}", dialogues.len() - first + 1);
                dialogues.push((name, vec![step], BTreeSet::from([local])));
                continue;
            }
            let dialogue = dialogues[first..].iter_mut().find(|(.., known)| known.contains(&remote));
            let (_, steps, known) = dialogue.expect("every message belongs to a dialogue");
            known.insert(local);
            steps.push(step);
        }
    }
    dialogues.into_iter().map(|(name, steps, _)| (name, steps)).collect()
}

/// Our machine in the place of one end.
struct Replay {
    name: String,
    cm: Cm,
    now: Nanos,
    us: IpAddr,
    /// Our id for the dialogue.
    id: Option<CmId>,
    listener: Option<CmId>,
    /// Recorded number of our end (ids, TIDs): ours.
    ours: BTreeMap<u64, u64>,
    events: Vec<&'static str>,
}

impl Replay {
    fn new(name: &str, us: IpAddr) -> Replay {
        let mut config = Config::new([7; 32]);
        // The kernel's own times, so that nothing is sent twice in between.
        config.timing.first_retry = 4_294_967_296;
        let (name, cm) = (format!("{name} as {us}"), Cm::new(config));
        Replay { name, cm, now: 1, us, id: None, listener: None, ours: BTreeMap::new(), events: Vec::new() }
    }

    fn listen(&mut self, first: &Step) {
        let (service_id, service) = match &first.mad.message {
            Message::Req(req) => (req.service_id, Service::Connected),
            Message::SidrReq(req) => (req.service_id, Service::Datagram),
            other => panic!("{}: begins with {}", self.name, other.name()),
        };
        let (space, port) = service_id.port().expect("RDMA-CM made it");
        let id = self.cm.create_id(OWNER, space, service).unwrap();
        self.cm.bind(id, SocketAddr::new(first.dst, port), BindOptions::default()).unwrap();
        self.cm.listen(id, 0).unwrap();
        self.listener = Some(id);
    }

    fn play(mut self, steps: &[Step]) -> Vec<&'static str> {
        let refused = steps
            .iter()
            .any(|step| matches!(&step.mad.message, Message::Rej(rej) if rej.reason == RejReason::INVALID_SERVICE_ID));
        if steps[0].dst == self.us && !refused {
            self.listen(&steps[0]);
        }
        for (index, step) in steps.iter().enumerate() {
            self.now += 1_000_000;
            if step.src == self.us {
                self.command(steps, step);
                self.compare(index, step);
            } else {
                self.receive(step);
            }
            self.cm.check();
        }
        self.end();
        self.events
    }

    /// Does what the recorded program must have done for this message to leave.
    fn command(&mut self, steps: &[Step], step: &Step) {
        let now = self.now;
        match &step.mad.message {
            Message::Req(req) => {
                let (space, port) = req.service_id.port().unwrap();
                let id = self.cm.create_id(OWNER, space, Service::Connected).unwrap();
                let header = IpHeader::parse(&req.private_data).unwrap();
                let addr = SocketAddr::new(header.src, header.src_port);
                self.cm.bind(id, addr, BindOptions::default()).unwrap();
                let connect = ConnectParam {
                    path: path_of(req, step),
                    port,
                    ca_guid: req.local_ca_guid,
                    param: ConnectionParam {
                        qpn: req.local_qpn,
                        qp_type: QpType::Rc,
                        srq: req.srq,
                        responder_resources: req.responder_resources,
                        initiator_depth: req.initiator_depth,
                        flow_control: req.end_to_end_flow_control,
                        retry_count: req.retry_count,
                        rnr_retry_count: req.rnr_retry_count,
                    },
                    private_data: &req.private_data[36..],
                    ece: step.mad.ece(),
                };
                self.cm.connect(now, id, &connect).unwrap();
                self.id = Some(id);
            }
            Message::SidrReq(req) => {
                let (space, port) = req.service_id.port().unwrap();
                let id = self.cm.create_id(OWNER, space, Service::Datagram).unwrap();
                let header = IpHeader::parse(&req.private_data).unwrap();
                let addr = SocketAddr::new(header.src, header.src_port);
                self.cm.bind(id, addr, BindOptions::default()).unwrap();
                let path = Path::new(step.src, step.dst);
                let resolve = ResolveParam { path, port, private_data: &req.private_data[36..] };
                self.cm.resolve(now, id, &resolve).unwrap();
                self.id = Some(id);
            }
            Message::Rep(rep) => {
                let accept = AcceptParam {
                    ca_guid: rep.local_ca_guid,
                    param: ConnectionParam {
                        qpn: rep.local_qpn,
                        qp_type: QpType::Rc,
                        srq: rep.srq,
                        responder_resources: rep.responder_resources,
                        initiator_depth: rep.initiator_depth,
                        flow_control: rep.end_to_end_flow_control,
                        retry_count: 0,
                        rnr_retry_count: rep.rnr_retry_count,
                    },
                    private_data: &rep.private_data,
                    ece: step.mad.ece(),
                };
                self.cm.accept(now, self.id.unwrap(), &accept).unwrap();
                self.check_parameters(steps);
            }
            Message::SidrRep(rep) => {
                let (qpn, qkey, ece) = (rep.qpn, rep.qkey, step.mad.ece());
                let accept = AcceptDatagramParam { qpn, qkey, private_data: &rep.private_data, ece };
                self.cm.accept_datagram(now, self.id.unwrap(), &accept).unwrap();
            }
            Message::Rej(rej) if rej.reason == RejReason::INVALID_SERVICE_ID => {}
            Message::Rej(rej) => {
                self.cm.reject(now, self.id.unwrap(), rej.reason, &rej.private_data).unwrap();
            }
            Message::Rtu(_) => {
                self.check_parameters(steps);
                self.cm.establish(self.id.unwrap()).unwrap();
            }
            Message::Dreq(_) | Message::Drep(_) => self.cm.disconnect(now, self.id.unwrap()).unwrap(),
            other => panic!("{}: a recorded {}", self.name, other.name()),
        }
    }

    /// The attributes for the queue pair are those of the messages.
    fn check_parameters(&self, steps: &[Step]) {
        let req = steps.iter().find_map(|s| if let Message::Req(m) = &s.mad.message { Some(m) } else { None }).unwrap();
        let rep = steps.iter().find_map(|s| if let Message::Rep(m) = &s.mad.message { Some(m) } else { None }).unwrap();
        let parameters = self.cm.qp_parameters(self.id.unwrap()).unwrap();
        let active = self.cm.state(self.id.unwrap()) == Ok(State::RepRcvd);
        let (qpn, dest_qpn) = if active { (req.local_qpn, rep.local_qpn) } else { (rep.local_qpn, req.local_qpn) };
        assert_eq!((parameters.qpn, parameters.dest_qpn), (qpn, dest_qpn), "{}", self.name);
        // Each end begins to send where the other one's message says: in the recordings the first SEND of the active end has the PSN of
        // the REP. (The PSN to receive is of our own choice.)
        let psn = if active { rep.starting_psn } else { req.starting_psn };
        assert_eq!(parameters.sq_psn, psn, "{}", self.name);
        assert_eq!((parameters.path.mtu, parameters.path.ack_timeout), (3, 17), "{}", self.name);
        let reads = (parameters.max_dest_rd_atomic, parameters.max_rd_atomic);
        assert_eq!(reads, (req.responder_resources, req.initiator_depth), "{}: symmetric in all recordings", self.name);
        assert_eq!(parameters.retry_cnt, req.retry_count, "{}", self.name);
        let rnr = if active { rep.rnr_retry_count } else { req.rnr_retry_count };
        assert_eq!(parameters.rnr_retry, rnr, "{}", self.name);
    }

    /// What leaves is what was recorded.
    fn compare(&mut self, index: usize, step: &Step) {
        let transmit = self.cm.poll_transmit().unwrap_or_else(|| panic!("{}: nothing sent at {index}", self.name));
        assert_eq!(self.cm.poll_transmit(), None, "{}: more than one message at {index}", self.name);
        assert_eq!((transmit.path.local, transmit.path.remote), (step.src, step.dst), "{}", self.name);
        let mut mad = Mad::parse(&transmit.mad.emit()).unwrap();
        assert_eq!(mad, transmit.mad);
        self.note(step.mad.tid, mad.tid);
        let recorded = ids(&step.mad.message);
        let sent = ids(&mad.message);
        self.note(recorded.0.into(), sent.0.into());
        // Numbers that an end chooses are those of the recording, then everything is.
        mad.tid = step.mad.tid;
        if let [Some(local), _] = ids_mut(&mut mad.message) {
            *local = recorded.0;
        }
        match (&mut mad.message, &step.mad.message) {
            (Message::Req(ours), Message::Req(theirs)) => ours.starting_psn = theirs.starting_psn,
            (Message::Rep(ours), Message::Rep(theirs)) => ours.starting_psn = theirs.starting_psn,
            _ => {}
        }
        assert_eq!(mad.emit(), step.mad.emit(), "{}, message {index}:\n{:?}\n{:?}", self.name, mad, step.mad);
    }

    /// A number of the recording's end is always the same number of ours.
    fn note(&mut self, recorded: u64, sent: u64) {
        let ours = *self.ours.entry(recorded).or_insert(sent);
        assert_eq!(ours, sent, "{}: {recorded:#x}", self.name);
    }

    fn receive(&mut self, step: &Step) {
        let mut mad = step.mad;
        mad.tid = self.ours.get(&mad.tid).copied().unwrap_or(mad.tid);
        if let [_, Some(remote)] = ids_mut(&mut mad.message) {
            *remote = self.ours.get(&(*remote).into()).copied().unwrap_or((*remote).into()) as u32;
        }
        if !matches!(mad.message, Message::Req(_) | Message::SidrReq(_)) {
            self.ours.insert(step.mad.tid, mad.tid);
        } else {
            self.note(mad.tid, mad.tid);
        }
        let arrival = Arrival { src: step.src, dst: step.dst, ifindex: 2 };
        let result = self.cm.handle_packet(self.now, &arrival, &mad.emit());
        let Some(Event { id, owner, kind }) = self.cm.poll_event() else {
            assert_eq!(result, Err(DropReason::Rejected(RejReason::INVALID_SERVICE_ID)), "{}", self.name);
            self.events.push("(rejected)");
            return;
        };
        assert_eq!((result, owner), (Ok(()), OWNER), "{}", self.name);
        self.events.push(kind.name());
        let expected = match (&kind, &step.mad.message) {
            (EventKind::ConnectRequest(request), Message::Req(req)) => {
                assert_eq!(Some(request.listener), self.listener);
                assert_eq!(request.private_data[..], req.private_data[36..], "{}", self.name);
                assert_eq!((request.peer.ip(), request.local.ip()), (step.src, step.dst));
                self.cm.take_request(id);
                self.id = Some(id);
                true
            }
            (EventKind::ConnectRequest(request), Message::SidrReq(req)) => {
                assert_eq!(request.private_data[..], req.private_data[36..], "{}", self.name);
                self.id = Some(id);
                true
            }
            (EventKind::ConnectResponse { private_data, .. }, Message::Rep(rep)) => {
                assert_eq!(private_data[..], rep.private_data, "{}", self.name);
                true
            }
            (EventKind::Rejected { reason, private_data }, Message::Rej(rej)) => {
                assert_eq!((*reason, &private_data[..]), (rej.reason, &rej.private_data[..]), "{}", self.name);
                true
            }
            (EventKind::Resolved { qpn, qkey, .. }, Message::SidrRep(rep)) => (*qpn, *qkey) == (rep.qpn, rep.qkey),
            (EventKind::Established, Message::Rtu(_)) => true,
            (EventKind::Disconnected { timed_out: false }, Message::Dreq(_) | Message::Drep(_)) => true,
            _ => false,
        };
        assert!(expected, "{}: {kind:?} after {}", self.name, step.mad);
        assert_eq!(self.id, Some(id), "{}", self.name);
        assert_eq!(self.cm.poll_event(), None, "{}: one message, one event", self.name);
    }

    /// Time passes; nothing is sent any more, and nothing is left.
    fn end(&mut self) {
        for _ in 0..3 {
            let Some(at) = self.cm.next_timeout() else { break };
            self.now = at;
            self.cm.handle_timeout(at);
            assert_eq!(self.cm.poll_transmit(), None, "{}", self.name);
            while let Some(event) = self.cm.poll_event() {
                self.events.push(event.kind.name());
            }
        }
        assert_eq!(self.cm.next_timeout(), None, "{}", self.name);
        self.cm.release_owner(self.now, OWNER);
        assert_eq!(self.cm.ids().count(), 0, "{}", self.name);
        self.cm.check();
    }
}

fn path_of(req: &Req, step: &Step) -> Path {
    let primary = &req.primary;
    Path {
        mtu: req.path_mtu,
        ack_timeout: primary.local_ack_timeout,
        packet_rate: primary.packet_rate,
        traffic_class: primary.traffic_class,
        flow_label: primary.flow_label,
        hop_limit: primary.hop_limit,
        sl: primary.sl,
        pkey: req.partition_key,
        ifindex: 2,
        ..Path::new(step.src, step.dst)
    }
}

#[test]
fn every_dialogue_from_both_ends() {
    let dialogues = dialogues();
    let connection = (
        vec!["CONNECT_RESPONSE", "DISCONNECTED", "TIMEWAIT_EXIT"],
        vec!["CONNECT_REQUEST", "ESTABLISHED", "DISCONNECTED", "TIMEWAIT_EXIT"],
    );
    let mut seen = BTreeMap::<Vec<&str>, usize>::new();
    for (name, steps) in &dialogues {
        let messages: Vec<_> = steps.iter().map(|step| step.mad.message.name()).collect();
        let client = Replay::new(name, steps[0].src).play(steps);
        let server = Replay::new(name, steps[0].dst).play(steps);
        let expected = match &messages[..] {
            ["REQ", "REP", "RTU", "DREQ", "DREP"] => connection.clone(),
            ["REQ", "REJ"] if server == ["(rejected)"] => (vec!["REJECTED"], vec!["(rejected)"]),
            ["REQ", "REJ"] => (vec!["REJECTED"], vec!["CONNECT_REQUEST"]),
            ["SIDR_REQ", "SIDR_REP"] => (vec!["ESTABLISHED"], vec!["CONNECT_REQUEST"]),
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!((client, server), expected, "{name}");
        *seen.entry(messages).or_default() += 1;
    }
    let connected = vec!["REQ", "REP", "RTU", "DREQ", "DREP"];
    let expected = [(connected, 8), (vec!["REQ", "REJ"], 2), (vec!["SIDR_REQ", "SIDR_REP"], 2)];
    assert_eq!(seen, BTreeMap::from(expected));
}
