//! When each act of a script happened: before which frame.
//!
//! The texts list acts and frames apart. A list of posts is put before the first frame of its messages (their PSNs are known). A
//! receive that came too late for its message is put behind the last RNR NAK. All else happens as late as possible before the next
//! act that has a place, since polls waited for what the frames brought.

use std::collections::HashMap;
use std::ops::Range;

use ferroce_testkit::{Act, End, Line, Pair, Recording, Script};
use ferroce_wire::Psn;

use super::capture::{Heard, in_range, is_request};

/// A line of a script, and the frame before which it happens (the number of frames: after all).
pub(crate) struct Step<'a> {
    /// Index of the frame.
    pub(crate) at: usize,
    /// What happens.
    pub(crate) line: &'a Line,
}

/// Puts the lines of a script between the frames.
pub(crate) fn schedule<'a>(recording: &'a Recording, heard: &[Heard<'_>]) -> Vec<Step<'a>> {
    let script = &recording.script;
    let mut places = anchors(script, heard);
    place_receives(script, heard, &mut places);
    let mut next = heard.len();
    for place in places.iter_mut().rev() {
        next = place.unwrap_or(next);
        *place = Some(next);
    }
    script.lines.iter().zip(places).map(|(line, at)| Step { at: at.expect("filled above"), line }).collect()
}

/// The place of every post that made frames, and of what says it itself (`before=`).
fn anchors(script: &Script, heard: &[Heard<'_>]) -> Vec<Option<usize>> {
    let mut places = vec![None; script.lines.len()];
    let mut psns: HashMap<(End, u64), Psn> = HashMap::new();
    let mut list = Vec::new();
    let mut first_frame: Option<usize> = None;
    let mut floor = 0;
    for (index, line) in script.lines.iter().enumerate() {
        let Line::Act(act) = line else { continue };
        if let Some(frame) = act.args.number("before") {
            floor = floor.max(frame as usize - 1);
            places[index] = Some(floor);
        }
        if act.verb != "post" || was_refused(act) {
            continue;
        }
        let pair = pair_of(script, act);
        let next = psns.entry((act.end, pair.id)).or_insert(Psn::new(pair.start_psn[act.end as usize]));
        let (psn, count) = (*next, psns_of(act, pair));
        *next = psn.add(count);
        let frame = heard.iter().position(|heard| {
            heard.belongs_to(pair, act.end)
                && heard.sent_by(act.end).is_some_and(|headers| {
                    is_request(headers) && in_range(headers.bth.psn, psn, count) && !heard.is_delayed()
                })
        });
        first_frame = [first_frame, frame].into_iter().flatten().min();
        list.push(index);
        if act.args.number("more") == Some(1) {
            continue;
        }
        if let Some(frame) = first_frame.take() {
            floor = floor.max(frame);
            for index in &list {
                places[*index] = Some(floor);
            }
        }
        list.clear();
    }
    places
}

/// Puts receives behind the last RNR NAK that their queue pair sent between the acts around them.
fn place_receives(script: &Script, heard: &[Heard<'_>], places: &mut [Option<usize>]) {
    let mut from = 0;
    for (index, line) in script.lines.iter().enumerate() {
        if let Line::Act(act) = line
            && act.verb == "recv"
        {
            let to = places[index..].iter().flatten().next().copied().unwrap_or(heard.len());
            places[index] = last_not_ready(script, act, from..to, heard).map(|frame| frame + 1);
        }
        from = places[index].unwrap_or(from);
    }
}

fn last_not_ready(script: &Script, act: &Act, frames: Range<usize>, heard: &[Heard<'_>]) -> Option<usize> {
    let pair = pair_of(script, act);
    frames.rev().find(|&frame| {
        let sent = heard[frame].sent_by(act.end).filter(|_| heard[frame].belongs_to(pair, act.end));
        sent.is_some_and(|headers| headers.aeth.is_some_and(|aeth| aeth.syndrome.rnr_code().is_some()))
    })
}

fn pair_of<'a>(script: &'a Script, act: &Act) -> &'a Pair {
    script.pairs().find(|pair| pair.id == act.pair()).expect("an act is about a pair")
}

/// The card never saw a post that the library refused.
pub(crate) fn was_refused(post: &Act) -> bool {
    post.results().number("rc").is_some_and(|rc| rc != 0)
}

/// PSNs that a post takes.
pub(crate) fn psns_of(post: &Act, pair: &Pair) -> u32 {
    let number = |name| post.args.number(name).unwrap_or(0);
    match post.args.text("op") {
        Some("bind" | "linv") => 0,
        Some("cas" | "faa" | "awrite" | "flush") => 1,
        _ => ((number("len") + number("len2")) as u32).div_ceil(pair.path_mtu).max(1),
    }
}
