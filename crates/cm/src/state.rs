//! The states of an id, and what each message does in each (IBA 12.9.7, with its names; 12.11 for SIDR).

use ferroce_wire::mad::Message;

/// The state of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Made, perhaps bound.
    Idle,
    /// Takes requests.
    Listen,
    /// REQ sent.
    ReqSent,
    /// REQ sent, and the peer asked for time.
    MraReqRcvd,
    /// REQ received: the program decides.
    ReqRcvd,
    /// REP sent.
    RepSent,
    /// REP sent, and the peer asked for time.
    MraRepRcvd,
    /// REP received: the program decides.
    RepRcvd,
    /// Connected.
    Established,
    /// DREQ sent.
    DreqSent,
    /// DREQ received: the program decides when.
    DreqRcvd,
    /// Over, but packets may still be on their way.
    Timewait,
    /// SIDR_REQ sent.
    SidrReqSent,
    /// SIDR_REQ received: the program decides.
    SidrReqRcvd,
    /// SIDR_REP sent, which may have to be sent again.
    SidrRepSent,
    /// Nothing happens to it any more.
    Done,
}

impl State {
    /// All of them.
    pub const ALL: [State; 16] = [
        State::Idle,
        State::Listen,
        State::ReqSent,
        State::MraReqRcvd,
        State::ReqRcvd,
        State::RepSent,
        State::MraRepRcvd,
        State::RepRcvd,
        State::Established,
        State::DreqSent,
        State::DreqRcvd,
        State::Timewait,
        State::SidrReqSent,
        State::SidrReqRcvd,
        State::SidrRepSent,
        State::Done,
    ];
}

impl State {
    /// A connection is being made, or a queue pair for datagrams is being asked for.
    pub fn is_pending(self) -> bool {
        matches!(self, ReqSent | MraReqRcvd | ReqRcvd | RepSent | MraRepRcvd | RepRcvd | SidrReqSent | SidrReqRcvd)
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            State::Idle => "IDLE",
            State::Listen => "LISTEN",
            State::ReqSent => "REQ_SENT",
            State::MraReqRcvd => "MRA_REQ_RCVD",
            State::ReqRcvd => "REQ_RCVD",
            State::RepSent => "REP_SENT",
            State::MraRepRcvd => "MRA_REP_RCVD",
            State::RepRcvd => "REP_RCVD",
            State::Established => "ESTABLISHED",
            State::DreqSent => "DREQ_SENT",
            State::DreqRcvd => "DREQ_RCVD",
            State::Timewait => "TIMEWAIT",
            State::SidrReqSent => "SIDR_REQ_SENT",
            State::SidrReqRcvd => "SIDR_REQ_RCVD",
            State::SidrRepSent => "SIDR_REP_SENT",
            State::Done => "DONE",
        })
    }
}

/// Messages, without their content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Req,
    Mra,
    Rej,
    Rep,
    Rtu,
    Dreq,
    Drep,
    Lap,
    Apr,
    SidrReq,
    SidrRep,
}

impl Kind {
    pub(crate) fn of(message: &Message) -> Kind {
        match message {
            Message::Req(_) => Kind::Req,
            Message::Mra(_) => Kind::Mra,
            Message::Rej(_) => Kind::Rej,
            Message::Rep(_) => Kind::Rep,
            Message::Rtu(_) => Kind::Rtu,
            Message::Dreq(_) => Kind::Dreq,
            Message::Drep(_) => Kind::Drep,
            Message::Lap(_) => Kind::Lap,
            Message::Apr(_) => Kind::Apr,
            Message::SidrReq(_) => Kind::SidrReq,
            Message::SidrRep(_) => Kind::SidrRep,
        }
    }
}

/// What a message does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Nothing; it has no meaning here.
    Stray,
    /// Nothing; it came before.
    Repeated,
    /// It came before and the program has not decided: ask for time.
    AskTime,
    /// It came before: what was sent last is sent again.
    AnswerAgain,
    /// It came before or crossed our REJ: if there was one, it is sent again.
    RejectAgain,
    /// A DREP is due, whatever else.
    ConfirmRelease,
    /// There is no other path.
    RefusePath,
    /// The peer needs time: go to the state.
    Wait(State),
    /// The peer rejects: go to the state.
    Rejected(State),
    /// The peer accepts.
    Replied,
    /// The peer is ready.
    Ready,
    /// The peer accepted and gave up, before we heard that it accepted.
    Withdrawn,
    /// The peer disconnects.
    Released,
    /// Both disconnect.
    ReleasesCrossed,
    /// The peer confirms that we disconnect.
    ReleaseConfirmed,
    /// A service id is resolved, or not.
    Resolved,
}

/// One line of the table.
struct Line(&'static [State], &'static [(Kind, Action)]);

use Action::{
    AnswerAgain, AskTime, ConfirmRelease, Ready, RefusePath, RejectAgain, Rejected, ReleaseConfirmed, Released,
    ReleasesCrossed, Repeated, Replied, Resolved, Stray, Wait, Withdrawn,
};
use State::{
    Done, DreqRcvd, DreqSent, Established, MraRepRcvd, MraReqRcvd, RepRcvd, RepSent, ReqRcvd, ReqSent, SidrRepSent,
    SidrReqRcvd, SidrReqSent, Timewait,
};

/// What is not listed is [`Action::Stray`].
const TABLE: &[Line] = &[
    Line(
        &[ReqSent, MraReqRcvd],
        &[
            (Kind::Mra, Wait(MraReqRcvd)),
            (Kind::Rej, Rejected(Done)),
            (Kind::Rep, Replied),
            // The REP was lost or is late, and so is the REJ: the peer gave up.
            (Kind::Dreq, Withdrawn),
        ],
    ),
    Line(&[ReqRcvd], &[(Kind::Req, AskTime), (Kind::Rej, Rejected(Done)), (Kind::Dreq, ConfirmRelease)]),
    Line(
        &[RepSent, MraRepRcvd],
        &[
            (Kind::Req, AnswerAgain),
            (Kind::Mra, Wait(MraRepRcvd)),
            (Kind::Rej, Rejected(Done)),
            (Kind::Rtu, Ready),
            // The RTU was lost.
            (Kind::Dreq, Released),
            (Kind::Lap, RefusePath),
        ],
    ),
    Line(
        &[RepRcvd],
        &[(Kind::Rej, Rejected(Timewait)), (Kind::Rep, AskTime), (Kind::Dreq, Released), (Kind::Lap, RefusePath)],
    ),
    Line(
        &[Established],
        &[
            (Kind::Req, Repeated),
            (Kind::Rej, Rejected(Timewait)),
            // The last thing that the active end sent is its RTU; the passive end gets no REP.
            (Kind::Rep, AnswerAgain),
            (Kind::Rtu, Repeated),
            (Kind::Dreq, Released),
            (Kind::Lap, RefusePath),
        ],
    ),
    Line(
        &[DreqSent],
        &[
            (Kind::Req, RejectAgain),
            (Kind::Rej, ReleaseConfirmed),
            (Kind::Rep, Repeated),
            (Kind::Rtu, RejectAgain),
            (Kind::Dreq, ReleasesCrossed),
            (Kind::Drep, ReleaseConfirmed),
            (Kind::Lap, RefusePath),
        ],
    ),
    Line(
        &[DreqRcvd],
        &[
            (Kind::Req, Repeated),
            (Kind::Rep, Repeated),
            (Kind::Rtu, Repeated),
            (Kind::Dreq, Repeated),
            (Kind::Lap, RefusePath),
        ],
    ),
    Line(
        &[Timewait],
        &[
            (Kind::Req, RejectAgain),
            (Kind::Rej, Repeated),
            (Kind::Rep, RejectAgain),
            (Kind::Rtu, RejectAgain),
            (Kind::Dreq, ConfirmRelease),
            (Kind::Drep, Repeated),
            (Kind::Lap, RefusePath),
        ],
    ),
    Line(&[SidrReqSent], &[(Kind::SidrRep, Resolved)]),
    Line(&[SidrReqRcvd], &[(Kind::SidrReq, Repeated)]),
    Line(&[SidrRepSent], &[(Kind::SidrReq, AnswerAgain)]),
];

/// What a message does in a state.
pub(crate) fn action(state: State, kind: Kind) -> Action {
    let line = TABLE.iter().find(|Line(states, _)| states.contains(&state));
    line.and_then(|Line(_, actions)| actions.iter().find(|(k, _)| *k == kind)).map_or(Stray, |(_, action)| *action)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Kind; 11] = [
        Kind::Req,
        Kind::Mra,
        Kind::Rej,
        Kind::Rep,
        Kind::Rtu,
        Kind::Dreq,
        Kind::Drep,
        Kind::Lap,
        Kind::Apr,
        Kind::SidrReq,
        Kind::SidrRep,
    ];

    /// Each state stands in one line, and in a line each message once: the first match is the only one.
    #[test]
    fn the_table_is_unambiguous() {
        for state in State::ALL {
            let lines = TABLE.iter().filter(|Line(states, _)| states.contains(&state)).count();
            let has_line = !matches!(state, State::Idle | State::Listen | State::Done);
            assert_eq!(lines, usize::from(has_line), "{state}");
        }
        for Line(states, actions) in TABLE {
            for kind in KINDS {
                assert!(actions.iter().filter(|(k, _)| *k == kind).count() <= 1, "{states:?} {kind:?}");
            }
        }
    }

    /// All pairs of state and message, as written down.
    #[test]
    fn every_state_and_message() {
        let mut text = String::new();
        for state in State::ALL {
            for kind in KINDS {
                let action = action(state, kind);
                if action != Stray {
                    text += &format!("{state} {kind:?}: {action:?}\n");
                }
            }
        }
        assert_eq!(text, include_str!("state_table.txt"));
    }

    /// A peer that disconnects or asks for another path is never left without an answer while the connection is known.
    #[test]
    fn requests_are_answered_in_all_states_of_a_connection() {
        for state in [ReqSent, MraReqRcvd, ReqRcvd, RepSent, MraRepRcvd, RepRcvd, Established, DreqSent, Timewait] {
            assert!(
                matches!(action(state, Kind::Dreq), ConfirmRelease | Withdrawn | Released | ReleasesCrossed),
                "{state}: {:?}",
                action(state, Kind::Dreq)
            );
        }
    }
}
