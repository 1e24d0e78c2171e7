//! The recorded dialogues of kernel rxe with itself, played again with our queue pairs in the place of one end.
//!
//! What a queue pair sends must be what the recording shows: opcode, PSN, destination, AckReq, SE, extended headers, lengths, pad,
//! payload. Completions, states, events and memory must be what the text says, and what arrived must be in memory. `replay/table.rs`
//! names every difference and its reason.

mod replay {
    mod acts;
    mod capture;
    mod data;
    pub(crate) mod derive;
    pub(crate) mod difference;
    mod host;
    mod memory;
    pub(crate) mod node;
    mod schedule;
    pub(crate) mod table;
}

use ferroce_testkit::{End, Fate, Line, Recording};
use replay::derive::complete;
use replay::difference::{At, Difference, lines};
use replay::node::{Pace, play};
use replay::table::{KNOWN, UNRECORDED};

/// Queue pairs in the recordings.
const DIALOGUES: usize = 204;
/// Recorded frames that A and B sent in our place, and those that they were fed.
const SENT: [usize; 2] = [1088, 758];
const RECEIVED: [usize; 2] = [780, 1153];

fn recordings() -> Vec<Recording> {
    Recording::all().unwrap().into_iter().map(complete).collect()
}

fn pace(recording: &Recording, end: End) -> Pace {
    let unrecorded = UNRECORDED.iter().any(|(name, which, _)| (*name, *which) == (&recording.name, end));
    if unrecorded { Pace::RealTime } else { Pace::Recorded }
}

#[test]
fn every_dialogue_from_both_sides() {
    let (mut dialogues, mut sent, mut received) = ([0; 2], [0; 2], [0; 2]);
    let mut wrong = Vec::new();
    let mut used = vec![0; KNOWN.len()];
    let recordings = recordings();
    for recording in &recordings {
        for end in [End::A, End::B] {
            let outcome = play(recording, end, pace(recording, end));
            dialogues[end as usize] += outcome.dialogues;
            sent[end as usize] += outcome.sent;
            received[end as usize] += outcome.received;
            for line in lines(&outcome.differences) {
                let known = KNOWN.iter().position(|known| {
                    known.recording == recording.name && known.end == end && known.lines.contains(&line.as_str())
                });
                match known {
                    Some(index) => used[index] += 1,
                    None => wrong.push(format!("{} played as {end:?} differs: {line}", recording.name)),
                }
            }
        }
    }
    for (known, used) in KNOWN.iter().zip(used) {
        if used != known.lines.len() {
            let (name, end, lines) = (known.recording, known.end, known.lines.len());
            wrong.push(format!("{name} played as {end:?}: {used} of {lines} lines are true of: {}", known.why));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    let pairs: usize = recordings.iter().map(|recording| recording.script.pairs().count()).sum();
    assert_eq!(pairs, DIALOGUES);
    assert_eq!(dialogues, [DIALOGUES; 2]);
    assert_eq!((sent, received), (SENT, RECEIVED));
}

/// What comes of a dialogue does not depend on when requests go out: with an open window and our own timers, it is the same.
#[test]
fn the_same_in_real_time() {
    let script = |differences: &[Difference]| {
        let kept = |difference: &&Difference| matches!(difference.at, At::Script(_));
        lines(&differences.iter().filter(kept).cloned().collect::<Vec<_>>())
    };
    for recording in recordings() {
        for end in [End::A, End::B] {
            let paced = play(&recording, end, Pace::Recorded);
            let free = play(&recording, end, Pace::RealTime);
            if pace(&recording, end) == Pace::RealTime {
                assert!(!paced.differences.is_empty(), "{}: its requests are all recorded", recording.name);
                continue;
            }
            assert_eq!(script(&free.differences), script(&paced.differences), "{} {end:?}", recording.name);
        }
    }
}

/// A replay that cannot fail would prove nothing: small changes to a recording are found, each in its place.
#[test]
fn changes_are_found() {
    let differences = |end: End, change: &dyn Fn(&mut Recording)| {
        let mut recording = Recording::read("rc-mixed").unwrap();
        assert_eq!(lines(&play(&recording, end, Pace::Recorded).differences), [""; 0]);
        change(&mut recording);
        lines(&play(&recording, end, Pace::Recorded).differences)
    };
    // Changes to a byte that the played end sends: frame, offset behind UDP, bits.
    let bits = |end, frame: usize, at: usize, bits: u8| {
        differences(end, &move |recording| recording.frames[frame - 1].datagram.payload[at] ^= bits)
    };
    assert_eq!(
        bits(End::A, 5, 11, 0x40),
        ["pair 0, frame 5: not sent: RC_SEND_ONLY", "pair 0, frame 6: also sent: RC_SEND_ONLY"]
    );
    assert_eq!(bits(End::A, 4, 8, 0x80), ["pair 0, frame 4: AckReq true instead of false"]);
    assert_eq!(bits(End::A, 9, 1, 0x80), ["pair 0, frame 9: SE false instead of true"]);
    assert_eq!(bits(End::A, 8, 100, 1), ["pair 0, frame 8: other payload"]);
    assert_eq!(bits(End::B, 12, 100, 1), ["pair 0, frame 12: other payload"]);
    assert_eq!(bits(End::B, 14, 15, 1), ["pair 0, frame 14: MSN 5 instead of 4"]);
    assert_eq!(bits(End::B, 14, 12, 1), ["pair 0, frame 14: AETH syndrome 0x1f instead of 0x1e"]);
    assert_eq!(
        bits(End::B, 13, 23, 1),
        ["pair 0, frame 13: AtomicAckETH 1663540288323457296 instead of 1663540288323457297"]
    );

    // What the played end is told.
    let dropped = differences(End::B, &|recording| recording.frames[8].fates.push(Fate::Dropped));
    assert_eq!(dropped, ["pair 0, frame 16: not sent: RC_ACKNOWLEDGE"]);
    let altered = differences(End::A, &|recording| recording.frames[15].datagram.payload[15] ^= 1);
    assert_eq!(altered[0], "pair 0, send completion of 7: status 12 instead of 0");

    // What the text says.
    let text = |end, from: &'static str, to: &'static str| {
        differences(end, &move |recording| {
            let replies = recording.script.lines.iter_mut().flat_map(|line| match line {
                Line::Act(act) if act.end == end => act.replies.iter_mut(),
                _ => [].iter_mut(),
            });
            let reply = replies.into_iter().find(|reply| reply.contains(from)).expect("a reply to change");
            *reply = reply.replace(from, to);
        })
    };
    let completion = text(End::A, "byte_len=2048", "byte_len=2047");
    assert_eq!(completion, ["pair 0, send completion of 3: byte_len 2048 instead of 2047"]);
    let completion = text(End::B, "flags=0x1", "flags=0x3 imm=0x7");
    assert_eq!(completion, ["pair 0, receive completion of 100: with immediate 0 instead of 1"]);
}
