//! One machine of a recording, played by our queue pairs.
//!
//! The recording is the clockwork. Its frames pass in order; those that reached the machine are fed to the queue pairs, and where
//! the machine sent one, the next packet of ours must be the same. Request packets are let out only when the recording shows one
//! (the windows are the brake), so that losses and NAKs meet our requester in the same position; answers are taken at once. Time
//! stands almost still, and jumps to the next timeout when the recording shows a request that we would not send yet: when to send
//! again is our own choice, what is sent is not.
//!
//! The other way, [`Pace::RealTime`], has an open window and a running clock, as a real host has; then requests go out when they
//! want, and only what comes of them is compared.

use std::collections::VecDeque;

use ferroce_testkit::{End, Line, Pair, Recording};
use ferroce_transport::{Access, Nanos, Packet, Qp, QpState, QpType, Sge, Side, WcOpcode, WcStatus};
use ferroce_wire::{GRH_LEN, Headers, Operation, Psn, Syndrome};

use super::capture::{Heard, is_request};
use super::data::Data;
use super::difference::{At, Difference, compare, describe, same};
use super::host::{QpHost, Queues, Sent, packets};
use super::memory::NodeMemory;
use super::schedule::schedule;

/// Where A's buffer is if no text says it.
const BUFFER_A: u64 = 0x7a00_0000_0000;
/// The clock at the first frame.
const START: Nanos = 1_000_000_000;
/// More packets or timeouts than this at one place are a runaway.
pub(super) const STEPS_MAX: usize = 256;

/// Who decides when requests go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// The recording, packet by packet.
    Recorded,
    /// Our requester and its timers, by the times of the recording.
    RealTime,
}

/// What came of a replay.
pub(crate) struct Outcome {
    /// Dialogues (queue pairs) that were played to their end.
    pub(crate) dialogues: usize,
    /// Recorded frames that we sent too.
    pub(crate) sent: usize,
    /// Recorded frames that were fed to a queue pair.
    pub(crate) received: usize,
    /// How they differ from the recording.
    pub(crate) differences: Vec<Difference>,
}

/// How far a queue pair is played.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Playing,
    /// Its program ended in the recording too.
    Gone,
    /// We cannot go on.
    Stopped,
}

/// A READ or atomic.
pub(super) struct Fetch {
    pub(super) wr_id: u64,
    /// First of its PSNs, and how many.
    pub(super) psn: Psn,
    pub(super) count: u32,
    /// Where it puts what comes back.
    pub(super) sge: Sge,
    /// It was sent.
    pub(super) sent: bool,
}

/// One queue pair.
pub(super) struct Played<'a> {
    pub(super) pair: &'a Pair,
    pub(super) qp: Qp,
    pub(super) queues: Queues,
    pub(super) stage: Stage,
    /// Request packets that the link has but the recording has not shown yet.
    requests: VecDeque<Sent>,
    /// The same of answers.
    responses: VecDeque<Sent>,
    /// What the peer sent.
    data: Data,
    /// Requests posted and not complete that bring something back.
    pub(super) fetches: Vec<Fetch>,
    /// PSNs of fenced requests.
    pub(super) fenced: Vec<Psn>,
    /// Requests posted, and the PSN of the next.
    pub(super) posted: u32,
    pub(super) next_psn: Psn,
    /// Completions that polls have taken: of sends, of receives.
    pub(super) polled: [usize; 2],
    /// Completions of sends whose data was compared.
    compared: usize,
    /// Completions of receives when the program armed for solicited ones.
    pub(super) armed: Option<usize>,
    /// Newest request PSN sent, and newest one that was answered positively.
    newest: Option<Psn>,
    answered: Psn,
    /// The requester must be silent until then: RNR NAK.
    quiet_until: Nanos,
    /// A NAK or a missing response asked for packets: they must go without a timeout.
    hurry: bool,
}

impl<'a> Played<'a> {
    pub(super) fn new(pair: &'a Pair, end: End, qp: Qp) -> Played<'a> {
        let next_psn = Psn::new(pair.start_psn[end as usize]);
        Played {
            pair,
            qp,
            queues: Queues::default(),
            stage: Stage::Playing,
            requests: VecDeque::new(),
            responses: VecDeque::new(),
            data: Data::default(),
            fetches: Vec::new(),
            fenced: Vec::new(),
            posted: 0,
            next_psn,
            polled: [0; 2],
            compared: 0,
            armed: None,
            newest: None,
            answered: next_psn.sub(1),
            quiet_until: 0,
            hurry: false,
        }
    }
}

pub(super) struct Node<'a> {
    pub(super) end: End,
    pub(super) recording: &'a Recording,
    pub(super) heard: &'a [Heard<'a>],
    /// Frames of ours that were matched before their place (the wire delayed them).
    matched: Vec<bool>,
    /// Address of the buffer.
    pub(super) buffer: u64,
    pub(super) memory: NodeMemory,
    pub(super) played: Vec<Played<'a>>,
    pub(super) now: Nanos,
    pace: Pace,
    received: usize,
    differences: Vec<Difference>,
}

/// Plays `end` of a recording.
pub(crate) fn play(recording: &Recording, end: End, pace: Pace) -> Outcome {
    let heard = Heard::all(recording);
    let mut node = Node::new(recording, &heard, end, pace);
    let mut steps = schedule(recording, &heard).into_iter().peekable();
    for index in 0..=heard.len() {
        if let Some(heard) = heard.get(index) {
            node.tick(heard);
        }
        while let Some(step) = steps.next_if(|step| step.at == index) {
            node.line(step.line);
        }
        if let Some(heard) = heard.get(index) {
            node.frame(index, heard);
        }
    }
    node.finish()
}

impl<'a> Node<'a> {
    fn new(recording: &'a Recording, heard: &'a [Heard<'a>], end: End, pace: Pace) -> Node<'a> {
        let script = &recording.script;
        let buffer = match end {
            End::B => script.buffer,
            // B's posts tell where A's buffer is.
            End::A => script
                .acts()
                .filter(|act| act.end == End::B && act.args.number("rkey") == Some(script.rkey[0].into()))
                .find_map(|act| act.args.number("raddr"))
                .map_or(BUFFER_A, |raddr| raddr & !0xfff),
        };
        let mut memory = NodeMemory::default();
        // This one recording has a region that peers may not use.
        let access = if recording.name == "rc-nak-mr-rights" { Access::LOCAL_WRITE } else { Access::all() };
        let (first, rest) = if end == End::A { (0x10, 0xa1) } else { (0x20, 0xa2) };
        memory.register_pattern(buffer, script.rkey[end as usize], access, first, rest);
        Node {
            end,
            recording,
            heard,
            matched: vec![false; heard.len()],
            buffer,
            memory,
            played: Vec::new(),
            now: START,
            pace,
            received: 0,
            differences: Vec::new(),
        }
    }

    /// Notes a difference of the queue pair at `index`.
    pub(super) fn differ(&mut self, index: usize, at: At, what: impl Into<String>) {
        self.differences.push(Difference { pair: Some(self.played[index].pair.id), at, what: what.into() });
    }

    /// The queue pair and the host that it is lent.
    pub(super) fn lend(&mut self, index: usize, open: bool) -> (&mut Qp, QpHost<'_>) {
        let Played { qp, queues, .. } = &mut self.played[index];
        (qp, QpHost { memory: &mut self.memory, queues, open })
    }

    fn line(&mut self, line: &'a Line) {
        match line {
            Line::Pair(pair) => self.connect(pair),
            Line::Note(note) if self.end == End::B && note.starts_with("B leaves") => {
                for played in &mut self.played {
                    played.stage = Stage::Gone;
                }
            }
            Line::Note(_) => {}
            Line::Act(act) if act.end == self.end => self.act(act),
            Line::Act(_) => {}
        }
    }

    // What the recording shows.

    fn frame(&mut self, index: usize, heard: &'a Heard<'a>) {
        if let Some(headers) = heard.sent_by(self.end)
            && !self.matched[index]
        {
            match self.played.iter().position(|played| heard.belongs_to(played.pair, self.end)) {
                Some(played) if self.played[played].stage != Stage::Playing => {}
                Some(_) if self.pace == Pace::RealTime && is_request(headers) => {}
                Some(played) => self.expect(index, played, headers),
                None => {
                    let what = format!("not sent: {}", describe(headers));
                    self.differences.push(Difference { pair: None, at: At::Frame(index + 1), what });
                }
            }
        }
        if let Some((headers, payload)) = heard.received_by(self.end)
            && let Some(played) = self.played.iter().position(|played| played.qp.init().qpn == headers.bth.dest_qp)
            && self.played[played].stage == Stage::Playing
        {
            self.feed(index, played, headers, payload);
        }
    }

    /// Time passes until a frame.
    fn tick(&mut self, heard: &Heard<'_>) {
        if self.pace == Pace::Recorded {
            self.now += 1_000;
            return;
        }
        let until = self.now.max(START + heard.frame.time.as_nanos() as Nanos);
        for index in 0..self.played.len() {
            while self.played[index].stage == Stage::Playing
                && self.played[index].qp.next_timeout().is_some_and(|at| at <= until)
            {
                self.jump(index);
            }
        }
        self.now = until;
    }

    /// The recording shows a packet of ours: it must be our next one.
    fn expect(&mut self, index: usize, played: usize, recorded: &Headers) {
        let request = is_request(recorded);
        for _ in 0..STEPS_MAX {
            match self.queue(played, request).iter().position(|sent| same(&sent.headers, recorded)) {
                Some(0) => return self.matches(index, played, request),
                Some(_) => self.skip(index, played, request),
                None if !request => break,
                None => {
                    let hurry = self.played[played].hurry;
                    if self.pull(played) {
                        if self.now < self.played[played].quiet_until {
                            self.differ(played, At::Frame(index + 1), "sent before the RNR time was over");
                        }
                    } else if self.played[played].requests.is_empty() && self.jump(played) {
                        if hurry {
                            self.differ(played, At::Frame(index + 1), "sent only after a timeout");
                        }
                    } else {
                        break;
                    }
                }
            }
        }
        self.differ(played, At::Frame(index + 1), format!("not sent: {}", describe(recorded)));
    }

    /// The front of the queue is the packet that frame `index` shows.
    fn matches(&mut self, index: usize, played: usize, request: bool) {
        let sent = self.queue(played, request).pop_front().expect("a packet at the front");
        assert!(sent.headers.bth.mig_req, "MigReq is set on everything we send");
        let heard = &self.heard[index];
        let (recorded, payload) = heard.packet.as_ref().expect("a frame that was sent");
        let payload = (!heard.payload_altered()).then_some(*payload);
        for what in compare(&sent, recorded, payload) {
            self.differ(played, At::Frame(index + 1), what);
        }
        self.matched[index] = true;
    }

    /// The front of the queue comes before the packet that frame `index` shows: the wire delayed it, or it is too much.
    fn skip(&mut self, index: usize, played: usize, request: bool) {
        let front = self.queue(played, request)[0].headers;
        let delayed = (index + 1..self.heard.len()).find(|&later| {
            let heard = &self.heard[later];
            heard.is_delayed()
                && !self.matched[later]
                && heard.belongs_to(self.played[played].pair, self.end)
                && heard.sent_by(self.end).is_some_and(|recorded| same(&front, recorded))
        });
        if let Some(later) = delayed {
            return self.matches(later, played, request);
        }
        self.queue(played, request).pop_front();
        self.differ(played, At::Frame(index + 1), format!("also sent: {}", describe(&front)));
    }

    fn queue(&mut self, played: usize, request: bool) -> &mut VecDeque<Sent> {
        let played = &mut self.played[played];
        if request { &mut played.requests } else { &mut played.responses }
    }

    fn feed(&mut self, index: usize, played: usize, headers: &Headers, payload: &[u8]) {
        self.received += 1;
        self.watch(played, headers);
        self.played[played].data.keep(headers, payload);
        let received = self.played[played].queues.received.len();
        let (now, net) = (self.now, self.heard[index].net);
        let (qp, mut host) = self.lend(played, false);
        qp.handle_packet(now, &Packet { headers, payload, net: &net }, &mut host);
        self.compare_fetched(index, played);
        self.drain(played);
        self.compare_received(index, played, received, headers);
    }

    // What must be in memory.

    /// A message that was just completed, or a WRITE that was just acknowledged, is in memory as it came.
    fn compare_received(&mut self, index: usize, played: usize, before: usize, headers: &Headers) {
        let this = &self.played[played];
        let layout = headers.bth.opcode.layout();
        let complete = this.queues.received[before..].iter().find(|completion| completion.status == WcStatus::Success);
        let acknowledged = this.responses.back().is_some_and(|sent| {
            sent.headers.bth.psn == headers.bth.psn && sent.headers.aeth.is_some_and(|aeth| aeth.syndrome.is_ack())
        });
        let written = layout.is_some_and(|layout| layout.operation == Operation::Write && layout.position.ends());
        if complete.is_none() && !(written && acknowledged) {
            return;
        }
        let Some((reth, bytes)) = this.data.message(headers.bth.psn) else {
            return self.differ(played, At::Frame(index + 1), "completes a message that has holes");
        };
        let grh = if this.qp.init().qp_type == QpType::Ud { GRH_LEN } else { 0 };
        let addr = reth.map_or(self.buffer + grh as u64, |reth| reth.va);
        let len = complete.map_or(bytes.len(), |completion| completion.byte_len as usize - grh);
        if len != bytes.len() || self.memory.read(addr, len) != bytes {
            self.differ(played, At::Frame(index + 1), "other bytes in memory than were received");
        } else if grh > 0 && self.memory.read(self.buffer, grh) != self.heard[index].net.grh() {
            self.differ(played, At::Frame(index + 1), "other GRH in memory than was received");
        }
    }

    /// READs and atomics that were completed since have put into memory what came.
    fn compare_fetched(&mut self, index: usize, played: usize) {
        while let Some(completion) = self.played[played].queues.sends.get(self.played[played].compared).copied() {
            let this = &mut self.played[played];
            this.compared += 1;
            let fetches = matches!(completion.opcode, WcOpcode::RdmaRead | WcOpcode::CompSwap | WcOpcode::FetchAdd);
            if !fetches || completion.status != WcStatus::Success {
                continue;
            }
            let posted = this.fetches.iter().position(|fetch| fetch.wr_id == completion.wr_id);
            let Fetch { psn, count, sge, .. } = this.fetches.remove(posted.expect("a completion belongs to a post"));
            let bytes = this.data.answer(psn, count);
            if bytes.is_none_or(|bytes| self.memory.read(sge.addr, sge.length as usize) != bytes) {
                self.differ(played, At::Frame(index + 1), "other bytes in memory than were fetched");
            }
        }
    }

    // The outputs of a queue pair.

    /// Takes what the queue pair sends by itself: answers, and in real time requests too.
    pub(super) fn drain(&mut self, index: usize) {
        for _ in 0..STEPS_MAX {
            if !self.poll_transmit(index, self.pace == Pace::RealTime) {
                return;
            }
        }
        panic!("{}: a runaway", self.recording.name);
    }

    /// Lets the next train of requests out, if there is one.
    fn pull(&mut self, index: usize) -> bool {
        let before = self.played[index].requests.len();
        while self.played[index].requests.len() == before {
            if !self.poll_transmit(index, true) {
                return false;
            }
        }
        true
    }

    pub(super) fn pull_all(&mut self, index: usize) {
        for _ in 0..STEPS_MAX {
            if !self.pull(index) {
                return;
            }
        }
        panic!("{}: a runaway", self.recording.name);
    }

    fn poll_transmit(&mut self, index: usize, open: bool) -> bool {
        let now = self.now;
        let (qp, mut host) = self.lend(index, open);
        let qp_type = qp.init().qp_type;
        let probes = host.queues.probes;
        let Some(train) = qp.poll_transmit(now, &mut host) else { return false };
        let is_probe = host.queues.probes > probes;
        let sent = packets(&train, &self.memory);
        assert_eq!(train.path.is_some(), qp_type == QpType::Ud, "only datagrams bring their own path");
        let played = &mut self.played[index];
        if train.from != Side::Requester {
            played.responses.extend(sent);
            return true;
        }
        // Our own way to ask a silent peer: nothing of the kind was recorded, and it does nothing.
        if is_probe {
            return true;
        }
        let (first, last) = (train.head.bth.psn, sent.last().expect("a train has a packet").headers.bth.psn);
        if let Some(fetch) = played.fetches.iter_mut().find(|fetch| fetch.psn == first) {
            fetch.sent = true;
        }
        let outstanding = played.fetches.iter().filter(|fetch| fetch.sent).count();
        let fence_broken = outstanding > 0 && played.fenced.contains(&first);
        let too_many = outstanding > usize::from(played.qp.attr().max_rd_atomic);
        if played.newest.is_none_or(|newest| last.diff(newest) > 0) {
            played.newest = Some(last);
        }
        played.hurry = false;
        if self.pace == Pace::Recorded {
            played.requests.extend(sent);
        }
        if fence_broken {
            self.differ(index, At::Script("fence".into()), "sent before READs and atomics were complete");
        }
        if too_many {
            self.differ(
                index,
                At::Script("max_rd_atomic".into()),
                format!("{outstanding} READs and atomics outstanding"),
            );
        }
        true
    }

    /// Lets the next timeout come.
    pub(super) fn jump(&mut self, index: usize) -> bool {
        let Some(at) = self.played[index].qp.next_timeout() else { return false };
        self.now = self.now.max(at);
        let now = self.now;
        let (qp, mut host) = self.lend(index, false);
        qp.handle_timeout(now, &mut host);
        self.drain(index);
        true
    }

    /// Two rules of time hold whatever the timers are: an RNR NAK asks for silence; a sequence NAK for packets at once, and so does
    /// an answer to what follows a READ or atomic that lacks its own.
    fn watch(&mut self, index: usize, headers: &Headers) {
        let now = self.now;
        let played = &mut self.played[index];
        let (psn, Some(newest)) = (headers.bth.psn, played.newest) else { return };
        if is_request(headers) || psn.diff(played.answered) <= 0 || psn.diff(newest) > 0 {
            return;
        }
        match headers.aeth.map(|aeth| aeth.syndrome) {
            Some(Syndrome::NAK_SEQUENCE) => played.hurry = now >= played.quiet_until,
            Some(syndrome) if syndrome.is_nak() => {}
            Some(syndrome) if !syndrome.is_ack() => {
                if let Some(code) = syndrome.rnr_code().filter(|_| now >= played.quiet_until) {
                    played.quiet_until = now + rnr_time(code);
                    played.hurry = false;
                }
            }
            _ => {
                played.answered = psn;
                if let Some(oldest) = played.fetches.first()
                    && psn.diff(oldest.psn.add(oldest.count - 1)) > 0
                    && played.data.answer(oldest.psn, oldest.count).is_none()
                {
                    played.hurry = true;
                }
            }
        }
    }

    fn finish(mut self) -> Outcome {
        for index in 0..self.played.len() {
            if self.played[index].stage != Stage::Playing {
                continue;
            }
            self.pull_all(index);
            for request in [true, false] {
                for sent in std::mem::take(self.queue(index, request)) {
                    self.differ(index, At::End, format!("also sent: {}", describe(&sent.headers)));
                }
            }
            self.compare_rest(index);
            let played = &self.played[index];
            if played.qp.next_timeout().is_none() && played.qp.state() != QpState::Sqd {
                assert_eq!(played.queues.released, played.posted, "{}: every request is complete", self.recording.name);
            }
        }
        let dialogues = self.played.iter().filter(|played| played.stage != Stage::Stopped).count();
        let sent = self.matched.iter().filter(|matched| **matched).count();
        Outcome { dialogues, sent, received: self.received, differences: self.differences }
    }
}

/// What an RNR NAK's code asks for, for the codes of the recordings (IBA table 45).
fn rnr_time(code: u8) -> Nanos {
    match code {
        0 => 655_360_000,
        1 => 10_000,
        5 => 60_000,
        12 => 640_000,
        14 => 1_280_000,
        18 => 5_120_000,
        other => panic!("RNR code {other}"),
    }
}
