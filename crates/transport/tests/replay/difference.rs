//! Where a replay differs from the recording, in lines that a table can hold.

use std::fmt::{self, Write};

use ferroce_wire::{Headers, Operation, Syndrome};

use super::host::Sent;

/// Where a difference shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// A recorded frame, by number. For what was also sent: the frame before which it would have been.
    Frame(usize),
    /// After the last frame.
    End,
    /// An act or completion.
    Script(String),
}

/// One difference.
#[derive(Clone, Debug)]
pub(crate) struct Difference {
    /// The queue pair, as the script counts; none for frames of queue pairs that the script does not have.
    pub(crate) pair: Option<u64>,
    /// Where.
    pub(crate) at: At,
    /// What.
    pub(crate) what: String,
}

/// One line for each kind of difference: `pair 3, frames 4-6, 9: not sent: RC_ACKNOWLEDGE`. Pairs with the same places share one.
pub(crate) fn lines(differences: &[Difference]) -> Vec<String> {
    // By pair and kind: the places.
    let mut kinds: Vec<(Option<u64>, &str, Vec<&At>)> = Vec::new();
    for Difference { pair, at, what } in differences {
        match kinds.iter_mut().find(|(p, w, _)| p == pair && w == what) {
            Some((.., places)) => places.push(at),
            None => kinds.push((*pair, what, vec![at])),
        }
    }
    // By places and kind: the pairs.
    let mut found: Vec<(Vec<usize>, String)> = Vec::new();
    for (pair, what, places) in kinds {
        let text = format!("{}: {what}", join(&places));
        match found.iter_mut().find(|(_, other)| *other == text) {
            Some((pairs, _)) => pairs.extend(pair.map(|pair| pair as usize)),
            None => found.push((pair.map(|pair| pair as usize).into_iter().collect(), text)),
        }
    }
    let line = |(pairs, text): &(Vec<usize>, String)| match &pairs[..] {
        [] => format!("no pair, {text}"),
        pairs => format!("{}, {text}", numbers("pair", pairs)),
    };
    found.iter().map(line).collect()
}

/// Frames in ranges, then the other places.
fn join(places: &[&At]) -> String {
    let mut parts = Vec::new();
    let frames: Vec<usize> =
        places.iter().filter_map(|at| if let At::Frame(number) = at { Some(*number) } else { None }).collect();
    if !frames.is_empty() {
        parts.push(numbers("frame", &frames));
    }
    let ends = places.iter().filter(|at| ***at == At::End).count();
    if ends > 0 {
        parts.push(if ends == 1 { "end".to_owned() } else { format!("end {ends} times") });
    }
    parts.extend(places.iter().filter_map(|at| if let At::Script(place) = at { Some(place.clone()) } else { None }));
    parts.join(", ")
}

/// `frame 3`, `frames 3-5, 9`.
fn numbers(name: &str, numbers: &[usize]) -> String {
    let mut text = format!("{name}{}", if numbers.len() == 1 { "" } else { "s" });
    let mut rest = numbers;
    while let Some((from, mut after)) = rest.split_first() {
        let mut to = *from;
        while let Some((next, later)) = after.split_first()
            && *next == to + 1
        {
            (to, after) = (*next, later);
        }
        let comma = if rest.len() == numbers.len() { "" } else { "," };
        let range = if to > *from { format!("{from}-{to}") } else { from.to_string() };
        write!(text, "{comma} {range}").expect("a String takes everything");
        rest = after;
    }
    text
}

/// Are these the same packet, if perhaps not in every field?
pub(crate) fn same(ours: &Headers, recorded: &Headers) -> bool {
    ours.bth.psn == recorded.bth.psn && kind(ours) == kind(recorded)
}

/// Operation, and for an acknowledge which of the three kinds.
fn kind(headers: &Headers) -> (Option<Operation>, Option<u8>) {
    let operation = headers.bth.opcode.layout().map(|layout| layout.operation);
    let acknowledge = headers.aeth.filter(|_| operation == Some(Operation::Acknowledge));
    (operation, acknowledge.map(|aeth| aeth.syndrome.0 >> 5))
}

/// A packet without its numbers.
pub(crate) fn describe(headers: &Headers) -> String {
    let name = headers.bth.opcode.name().unwrap_or("an unknown opcode");
    match headers.aeth {
        Some(aeth) if !aeth.syndrome.is_ack() => format!("{name} {:?}", Kind(aeth.syndrome)),
        _ => name.to_owned(),
    }
}

/// A syndrome in words.
#[derive(PartialEq)]
struct Kind(Syndrome);

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.rnr_code() {
            Some(code) => write!(f, "RNR NAK {code}"),
            None if self.0.is_nak() => write!(f, "NAK {:#x}", self.0.0),
            None => write!(f, "{:#x}", self.0.0),
        }
    }
}

/// What differs between two packets that are the same. MigReq is left out: we set it, rxe does not. `payload` is the recorded one,
/// if it is what was sent.
pub(crate) fn compare(ours: &Sent, recorded: &Headers, payload: Option<&[u8]>) -> Vec<String> {
    let (a, b) = (&ours.headers, recorded);
    let name = |headers: &Headers| headers.bth.opcode.name().unwrap_or("unknown").to_owned();
    let mut found = Found { same_opcode: a.bth.opcode == b.bth.opcode, differences: Vec::new() };
    if a.bth.opcode != b.bth.opcode {
        found.differences.push(format!("{} instead of {}", name(a), name(b)));
    }
    found.field("AckReq", a.bth.ack_req, b.bth.ack_req);
    found.field("SE", a.bth.solicited, b.bth.solicited);
    found.field("DestQP", a.bth.dest_qp, b.bth.dest_qp);
    found.field("P_Key", a.bth.pkey, b.bth.pkey);
    let rest = |headers: &Headers| {
        let bth = &headers.bth;
        (bth.tver, bth.fecn, bth.becn, bth.resv6, bth.resv7, headers.resv8)
    };
    found.field("TVer, FECN, BECN, reserved", rest(a), rest(b));
    found.header("AETH syndrome", a.aeth.map(|aeth| Kind(aeth.syndrome)), b.aeth.map(|aeth| Kind(aeth.syndrome)));
    found.header("MSN", a.aeth.map(|aeth| aeth.msn), b.aeth.map(|aeth| aeth.msn));
    found.header("RETH", a.reth, b.reth);
    found.header("AtomicETH", a.atomic, b.atomic);
    found.header("AtomicAckETH", a.atomic_ack, b.atomic_ack);
    found.header("ImmDt", a.imm, b.imm);
    found.header("IETH", a.ieth, b.ieth);
    found.header("DETH", a.deth, b.deth);
    if let Some(payload) = payload {
        found.field("PadCnt", a.bth.pad, b.bth.pad);
        found.field("payload bytes", ours.payload.len(), payload.len());
        if ours.payload.len() == payload.len() && ours.payload != payload {
            found.differences.push("other payload".to_owned());
        }
    }
    found.differences
}

struct Found {
    /// If the opcodes differ, those extended headers are compared that both have.
    same_opcode: bool,
    differences: Vec<String>,
}

impl Found {
    fn field<T: PartialEq + fmt::Debug>(&mut self, name: &str, ours: T, recorded: T) {
        if ours != recorded {
            self.differences.push(format!("{name} {ours:?} instead of {recorded:?}"));
        }
    }

    fn header<T: PartialEq + fmt::Debug>(&mut self, name: &str, ours: Option<T>, recorded: Option<T>) {
        match (ours, recorded) {
            (Some(ours), Some(recorded)) => self.field(name, ours, recorded),
            (ours, recorded) if self.same_opcode => self.field(name, ours, recorded),
            _ => {}
        }
    }
}
