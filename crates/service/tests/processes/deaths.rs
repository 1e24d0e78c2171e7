//! Programs that are killed in each state of a connection: the other end is told, and nothing of the dead is left.

use super::ends::{
    CONNECT_REQUEST, CONNECT_RESPONSE, DISCONNECTED, ESTABLISHED, End, Program, REJECTED, TIMEWAIT_EXIT, UNREACHABLE,
};
use super::{Scene, eventually};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Active,
    Passive,
}

use Side::{Active, Passive};

/// What a side does, and the event that it gets if it waits for one.
#[derive(Clone, Copy, Debug)]
enum Step {
    Do(Side, &'static str),
    Event(Side, u32),
}

use Step::{Do, Event};

const BEGIN: [Step; 4] =
    [Do(Passive, "listen 127.0.0.1:0"), Do(Active, "create"), Do(Active, "bind 127.0.0.1:0"), Do(Active, "route PEER")];
const ASKED: [Step; 2] = [Do(Active, "connect"), Event(Passive, CONNECT_REQUEST)];
const ACCEPTED: [Step; 2] = [Do(Passive, "accept"), Event(Active, CONNECT_RESPONSE)];
const CONNECTED: [Step; 2] = [Do(Active, "establish"), Event(Passive, ESTABLISHED)];
const LEFT: [Step; 2] = [Do(Active, "disconnect"), Event(Passive, DISCONNECTED)];
const SENT_AWAY: [Step; 2] = [Do(Passive, "disconnect"), Event(Active, DISCONNECTED)];
const UDP_BEGIN: [Step; 3] =
    [Do(Passive, "listen-udp 127.0.0.1:0"), Do(Active, "create-udp"), Do(Active, "route PEER")];
const UDP_ASKED: [Step; 2] = [Do(Active, "resolve"), Event(Passive, CONNECT_REQUEST)];
const UDP_ANSWERED: [Step; 2] = [Do(Passive, "accept-udp"), Event(Active, ESTABLISHED)];

/// Who dies after which steps, in which of these states, and what the other one then does and hears.
struct Case {
    dies: Side,
    after: &'static [&'static [Step]],
    states: &'static [&'static str],
    then: &'static [Step],
}

const fn case(
    dies: Side,
    after: &'static [&'static [Step]],
    states: &'static [&'static str],
    then: &'static [Step],
) -> Case {
    Case { dies, after, states, then }
}

/// On a busy machine the peer asks for time, and TIMEWAIT is over.
const CASES: &[Case] = &[
    case(Active, &[&[Do(Passive, "listen 127.0.0.1:0"), Do(Active, "create")]], &["IDLE"], &[]),
    case(Active, &[&BEGIN], &["IDLE"], &[]),
    case(Active, &[&BEGIN, &ASKED], &["REQ_SENT", "MRA_REQ_RCVD"], &[Event(Passive, REJECTED)]),
    case(Active, &[&BEGIN, &ASKED, &ACCEPTED], &["REP_RCVD"], &[Event(Passive, REJECTED)]),
    case(
        Active,
        &[&BEGIN, &ASKED, &ACCEPTED, &CONNECTED],
        &["ESTABLISHED"],
        &[Event(Passive, DISCONNECTED), Do(Passive, "disconnect"), Event(Passive, TIMEWAIT_EXIT)],
    ),
    case(
        Active,
        &[&BEGIN, &ASKED, &ACCEPTED, &CONNECTED, &LEFT],
        &["DREQ_SENT"],
        &[Do(Passive, "disconnect"), Event(Passive, TIMEWAIT_EXIT)],
    ),
    case(
        Active,
        &[&BEGIN, &ASKED, &ACCEPTED, &CONNECTED, &SENT_AWAY],
        &["DREQ_RCVD"],
        &[Event(Passive, DISCONNECTED), Event(Passive, TIMEWAIT_EXIT)],
    ),
    case(
        Active,
        &[&BEGIN, &ASKED, &ACCEPTED, &CONNECTED, &LEFT, &SENT_AWAY],
        &["TIMEWAIT", "DONE"],
        &[Event(Passive, TIMEWAIT_EXIT)],
    ),
    case(
        Passive,
        &[&[Do(Passive, "listen 127.0.0.1:0")]],
        &["LISTEN"],
        &[Do(Active, "create"), Do(Active, "route PEER"), Do(Active, "connect"), Event(Active, REJECTED)],
    ),
    case(Passive, &[&BEGIN, &ASKED], &["REQ_RCVD"], &[Event(Active, REJECTED)]),
    case(
        Passive,
        &[&BEGIN, &ASKED, &ACCEPTED],
        &["REP_SENT", "MRA_REP_RCVD"],
        &[Event(Active, REJECTED), Event(Active, TIMEWAIT_EXIT)],
    ),
    case(
        Passive,
        &[&BEGIN, &ASKED, &ACCEPTED, &CONNECTED],
        &["ESTABLISHED"],
        &[Event(Active, DISCONNECTED), Do(Active, "disconnect"), Event(Active, TIMEWAIT_EXIT)],
    ),
    case(
        Passive,
        &[&BEGIN, &ASKED, &ACCEPTED, &CONNECTED, &SENT_AWAY],
        &["DREQ_SENT"],
        &[Do(Active, "disconnect"), Event(Active, TIMEWAIT_EXIT)],
    ),
    case(
        Passive,
        &[&BEGIN, &ASKED, &ACCEPTED, &CONNECTED, &LEFT],
        &["DREQ_RCVD"],
        &[Event(Active, DISCONNECTED), Event(Active, TIMEWAIT_EXIT)],
    ),
    case(
        Passive,
        &[&BEGIN, &ASKED, &ACCEPTED, &CONNECTED, &SENT_AWAY, &LEFT],
        &["TIMEWAIT", "DONE"],
        &[Event(Active, TIMEWAIT_EXIT)],
    ),
    case(Active, &[&UDP_BEGIN, &UDP_ASKED], &["SIDR_REQ_SENT"], &[Do(Passive, "accept-udp")]),
    case(Passive, &[&UDP_BEGIN, &UDP_ASKED], &["SIDR_REQ_RCVD"], &[Event(Active, UNREACHABLE)]),
    case(Passive, &[&UDP_BEGIN, &UDP_ASKED, &UDP_ANSWERED], &["SIDR_REP_SENT"], &[]),
];

/// Both ends, and where the passive one listens.
struct Ends {
    active: End,
    passive: End,
    listens: String,
}

impl Ends {
    fn step(&mut self, step: Step) {
        let (side, line) = match step {
            Do(side, line) => (side, line.replace("PEER", &self.listens)),
            Event(side, _) => (side, "event".into()),
        };
        let end = if side == Active { &mut self.active } else { &mut self.passive };
        let answer = end.obey(&line);
        match step {
            Event(_, code) => assert_eq!(answer, code.to_string(), "{step:?}"),
            Do(_, line) if line.starts_with("listen") => self.listens = answer,
            Do(..) => assert_eq!(answer, "done", "{step:?}"),
        }
    }
}

pub(super) fn whoever_is_killed_in_any_state_is_gone_and_its_peer_told(scene: &Scene) {
    let observer = scene.connect_or_start();
    for (number, case) in CASES.iter().enumerate() {
        let victim = End::There(scene.helper("end"));
        let survivor = End::Here(Box::new(Program::new(&scene.options)));
        let (active, passive) = if case.dies == Active { (victim, survivor) } else { (survivor, victim) };
        let mut ends = Ends { active, passive, listens: String::new() };
        case.after.iter().copied().flatten().for_each(|step| ends.step(*step));

        let victim = if case.dies == Active { &mut ends.active } else { &mut ends.passive };
        let End::There(victim) = victim else { panic!("the victim is another process") };
        let pid = victim.child.id();
        let states: Vec<String> =
            observer.cm_ids().unwrap().into_iter().filter(|id| id.pid == pid).map(|id| id.state).collect();
        let seen = states.iter().any(|state| case.states.contains(&state.as_str()));
        assert!(seen, "case {number}: {:?} in {states:?}, not {:?}", case.dies, case.states);
        victim.kill();

        eventually("nothing of the dead", || {
            let holds_client = observer.status().unwrap().clients.iter().any(|client| client.pid == pid);
            !holds_client && observer.cm_ids().unwrap().iter().all(|id| id.pid != pid)
        });
        case.then.iter().for_each(|step| ends.step(*step));
        drop(ends);
        // What the protocol keeps for a moment belongs to nobody.
        eventually("no ids at all", || observer.cm_ids().unwrap().is_empty());
    }
}
