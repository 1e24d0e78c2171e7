//! Scripts for what the texts do not tell: the stock tools' posts, taken from the frames that they made.

use std::fmt::Write;

use ferroce_testkit::{Act, Args, End, Line, Pair, Recording};
use ferroce_wire::{Headers, Operation};

use super::capture::{Heard, in_range, is_request};

/// Offset in the buffer to which derived READs are put.
const READ_OFFSET: u32 = 65_536;
/// Queue pair of the connection manager.
const QP1: u32 = 1;

/// The recording with a script that is complete.
pub(crate) fn complete(mut recording: Recording) -> Recording {
    if recording.name == "rc-ack-coalesce" {
        insert_list(&mut recording);
    } else if recording.script.pairs().next().is_none() {
        recording.script.lines = derived(&recording);
    }
    recording
}

/// The text of this recording leaves out a list of 40 SENDs.
fn insert_list(recording: &mut Recording) {
    let lines = &mut recording.script.lines;
    let note = Line::Note("40 sends, last signalled".to_owned());
    let at = lines.iter().position(|line| *line == note).expect("the note that stands for the list") + 1;
    let posts = (30..70).map(|wid| {
        let (flags, more) = if wid == 69 { ("s", 0) } else { ("-", 1) };
        act(End::A, "post", format!("op=send len=4 wid={wid} fl={flags} more={more}"), vec![])
    });
    lines.splice(at..at, posts);
}

fn act(end: End, verb: &str, args: String, replies: Vec<String>) -> Line {
    Line::Act(Act { end, verb: verb.to_owned(), args: Args::parse(&args), replies })
}

/// A message of a tool.
struct Message<'a> {
    end: End,
    /// Index of its first frame.
    frame: usize,
    first: &'a Headers,
    last: &'a Headers,
    payload: Vec<u8>,
}

/// What a tool must have done to make these frames, with every request successful as its output says.
fn derived(recording: &Recording) -> Vec<Line> {
    let heard = Heard::all(recording);
    let Some(pair) = pair(&heard) else { return Vec::new() };
    let messages = messages(&heard, &pair);
    let mut lines = vec![Line::Pair(pair.clone())];
    for end in [End::A, End::B] {
        lines.extend(regions(&messages, end));
        let receives = messages.iter().filter(|message| message.end != end && message.takes_receive()).count();
        lines.push(act(end, "recv", format!("n={receives}"), vec![]));
    }
    let mut numbers = [0; 2];
    for message in &messages {
        if message.operation() == Operation::ReadRequest {
            lines.push(filled(message, &heard, &pair));
        }
        lines.push(message.post(numbers[message.end as usize]));
        numbers[message.end as usize] += 1;
    }
    for end in [End::A, End::B] {
        let sent = messages.iter().filter(|message| message.end == end).enumerate();
        let sent: Vec<String> = sent.map(|(number, message)| message.sent(number, &pair)).collect();
        lines.push(act(end, "poll", format!("n={}", sent.len()), sent));
        let received = messages.iter().filter(|message| message.end != end && message.takes_receive()).enumerate();
        let received: Vec<String> = received.map(|(number, message)| message.received(number, &pair)).collect();
        lines.push(act(end, "poll", format!("w=r n={}", received.len()), received));
    }
    lines
}

/// The queue pairs that are not the connection manager's.
fn pair(heard: &[Heard<'_>]) -> Option<Pair> {
    let sent = |end: End| {
        let headers = heard.iter().filter_map(move |heard| heard.sent_by(end));
        headers.filter(|headers| headers.bth.dest_qp != QP1)
    };
    let qpn = |end: End| sent(end.peer()).map(|headers| headers.bth.dest_qp).next();
    let start_psn = |end: End| sent(end).find(|headers| is_request(headers)).map_or(0, |headers| headers.bth.psn.get());
    let deth = sent(End::B).find_map(|headers| headers.deth);
    let options = Args::parse(&deth.map_or(String::new(), |deth| format!("qkey={}", deth.qkey)));
    Some(Pair {
        id: 0,
        transport: if deth.is_some() { "ud" } else { "rc" }.to_owned(),
        qpn: [qpn(End::A)?, qpn(End::B)?],
        start_psn: [start_psn(End::A), start_psn(End::B)],
        path_mtu: 1024,
        options: [options.clone(), options],
    })
}

/// The messages in order; nothing was lost or sent again in these recordings.
fn messages<'a>(heard: &'a [Heard<'a>], pair: &Pair) -> Vec<Message<'a>> {
    let mut messages: Vec<Message<'_>> = Vec::new();
    for (frame, heard) in heard.iter().enumerate() {
        for end in [End::A, End::B] {
            let Some(headers) = heard.sent_by(end).filter(|headers| is_request(headers)) else { continue };
            if !heard.belongs_to(pair, end) {
                continue;
            }
            let (_, payload) = heard.packet.as_ref().expect("a frame that was sent");
            let layout = headers.bth.opcode.layout().expect("tools send known opcodes");
            if layout.position.starts() {
                messages.push(Message { end, frame, first: headers, last: headers, payload: payload.to_vec() });
                continue;
            }
            let message = messages.iter_mut().rev().find(|message| message.end == end).expect("a FIRST before");
            message.last = headers;
            message.payload.extend_from_slice(payload);
        }
    }
    messages
}

/// What the peer addressed at `end`, one region for each key.
fn regions(messages: &[Message<'_>], end: End) -> Vec<Line> {
    let mut regions: Vec<(u32, u64, u64)> = Vec::new();
    for reth in messages.iter().filter(|message| message.end != end).filter_map(|message| message.first.reth) {
        let (low, high) = (reth.va, reth.va + u64::from(reth.len));
        match regions.iter_mut().find(|(key, ..)| *key == reth.rkey) {
            Some((_, start, end)) => (*start, *end) = (low.min(*start), high.max(*end)),
            None => regions.push((reth.rkey, low, high)),
        }
    }
    let line = |(key, low, high): &(u32, u64, u64)| {
        let replies = vec![format!("addr={low} rkey={key} len={}", high - low)];
        act(end, "mr", "acc=15".to_owned(), replies)
    };
    regions.iter().map(line).collect()
}

/// What the program had in the memory that a READ asked for.
fn filled(read: &Message<'_>, heard: &[Heard<'_>], pair: &Pair) -> Line {
    let reth = read.first.reth.expect("a READ has a RETH");
    let responses = heard.iter().filter(|heard| heard.belongs_to(pair, read.end.peer())).filter_map(|heard| {
        let headers = heard.sent_by(read.end.peer())?;
        let layout = headers.bth.opcode.layout()?;
        let ours = layout.operation == Operation::ReadResponse
            && in_range(headers.bth.psn, read.first.bth.psn, reth.len.div_ceil(pair.path_mtu).max(1));
        ours.then(|| heard.packet.as_ref().expect("a frame that was sent").1)
    });
    let bytes = responses.collect::<Vec<_>>().concat();
    let args = format!("before={} addr={} hex={}", read.frame + 1, reth.va, hex(&bytes));
    act(read.end.peer(), "fill", args, vec![])
}

impl Message<'_> {
    fn operation(&self) -> Operation {
        self.last.bth.opcode.layout().expect("tools send known opcodes").operation
    }

    fn takes_receive(&self) -> bool {
        self.operation() == Operation::Send || self.last.imm.is_some()
    }

    fn len(&self) -> u32 {
        self.first.reth.map_or(self.payload.len() as u32, |reth| reth.len)
    }

    fn post(&self, number: usize) -> Line {
        let op = match (self.operation(), self.last.imm) {
            (Operation::Send, None) => "send",
            (Operation::Send, Some(_)) => "sendimm",
            (Operation::Write, None) => "write",
            (Operation::Write, Some(_)) => "writeimm",
            (Operation::ReadRequest, _) => "read",
            (other, _) => panic!("no tool sent {other:?}"),
        };
        let mut args = format!("op={op} wid={number} len={}", self.len());
        if op == "read" {
            write!(args, " off={READ_OFFSET}").expect("a String takes everything");
        } else {
            write!(args, " hex={}", hex(&self.payload)).expect("a String takes everything");
        }
        for (name, value) in [
            ("imm", self.last.imm.map(u64::from)),
            ("raddr", self.first.reth.map(|reth| reth.va)),
            ("rkey", self.first.reth.map(|reth| reth.rkey.into())),
        ] {
            if let Some(value) = value {
                write!(args, " {name}={value}").expect("a String takes everything");
            }
        }
        act(self.end, "post", args, vec![])
    }

    /// The line of its completion at the sender.
    fn sent(&self, number: usize, pair: &Pair) -> String {
        let opcode = match self.operation() {
            Operation::Send => 0,
            Operation::Write => 1,
            _ => 2,
        };
        let (len, qpn) = (self.len(), pair.qpn[self.end as usize]);
        format!("wc wr_id={number} status=0(success) opcode={opcode} byte_len={len} flags=0 qpn={qpn}")
    }

    /// The line of its completion at the receiver.
    fn received(&self, number: usize, pair: &Pair) -> String {
        let opcode = if self.operation() == Operation::Send { 128 } else { 129 };
        let grh = if self.first.deth.is_some() { 40 } else { 0 };
        let imm = self.last.imm.map_or("flags=1".to_owned(), |imm| format!("flags=3 imm={imm}"));
        let (own, peer) = (pair.qpn[self.end as usize], pair.qpn[self.end.peer() as usize]);
        let (wr_id, len) = (100 + number, self.len() + grh);
        format!("wc wr_id={wr_id} status=0(success) opcode={opcode} byte_len={len} {imm} src_qp={own} qpn={peer}")
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of a `hex=` argument.
pub(crate) fn bytes(args: &Args) -> Option<Vec<u8>> {
    let digits = args.text("hex")?;
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("two digits");
    Some((0..digits.len()).step_by(2).map(byte).collect())
}
