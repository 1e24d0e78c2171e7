//! What the lanes count. Writing is one relaxed add; reading disturbs nobody.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ferroce_transport::{Count, Drop};

macro_rules! counters {
    ($enum:ident, $names:ident, [$($variant:ident => $name:literal,)*]) => {
        const $names: &[&str] = &[$($name,)*];
        fn index_of(value: $enum) -> usize {
            enum Place { $($variant,)* }
            match value { $($enum::$variant => Place::$variant as usize,)* }
        }
    };
}

mod drops {
    use super::Drop;
    counters!(Drop, NAMES, [
        QpState => "drop_qp_state",
        WrongTransport => "drop_wrong_transport",
        WrongSource => "drop_wrong_source",
        PKey => "drop_pkey",
        QKey => "drop_qkey",
        Psn => "drop_psn",
        DuplicateUnknown => "drop_duplicate_unknown",
        GhostResponse => "drop_ghost_response",
        BadOpcode => "drop_bad_opcode",
        BadLength => "drop_bad_length",
        NoReceive => "drop_no_receive",
        MessageBroken => "drop_message_broken",
        Version => "drop_version",
        Access => "drop_access",
        Overload => "drop_overload",
    ]);
    pub(super) const COUNT: usize = NAMES.len();
    pub(super) fn names() -> &'static [&'static str] {
        NAMES
    }
    pub(super) fn index(value: Drop) -> usize {
        index_of(value)
    }
}

mod counts {
    use super::Count;
    counters!(Count, NAMES, [
        AckSent => "ack_sent",
        AckReceived => "ack_received",
        NakSequenceSent => "nak_sequence_sent",
        NakSequenceReceived => "nak_sequence_received",
        NakFatalSent => "nak_fatal_sent",
        NakFatalReceived => "nak_fatal_received",
        RnrNakSent => "rnr_nak_sent",
        RnrNakReceived => "rnr_nak_received",
        DuplicateRequest => "duplicate_request",
        ProbeSent => "probe_sent",
        Timeout => "timeout",
        PacketsRetransmitted => "packets_retransmitted",
        FlowQuestionSent => "flow_question_sent",
        FlowAnswerSent => "flow_answer_sent",
        FlowAnswerReceived => "flow_answer_received",
    ]);
    pub(super) const COUNT: usize = NAMES.len();
    pub(super) fn names() -> &'static [&'static str] {
        NAMES
    }
    pub(super) fn index(value: Count) -> usize {
        index_of(value)
    }
}

/// Counters of one lane.
#[derive(Debug, Default)]
pub struct Counters {
    drops: [AtomicU64; drops::COUNT],
    counts: [AtomicU64; counts::COUNT],
    no_queue_pair: AtomicU64,
    foreign_lane: AtomicU64,
    bad_relayed: AtomicU64,
}

/// Names and values, in a fixed order.
pub type CounterSnapshot = Vec<(&'static str, u64)>;

impl Counters {
    pub(crate) fn drop_packet(&self, reason: Drop) {
        self.drops[drops::index(reason)].fetch_add(1, Relaxed);
    }

    pub(crate) fn count(&self, what: Count, n: u32) {
        self.counts[counts::index(what)].fetch_add(u64::from(n), Relaxed);
    }

    pub(crate) fn no_queue_pair(&self) {
        self.no_queue_pair.fetch_add(1, Relaxed);
    }

    pub(crate) fn foreign_lane(&self) {
        self.foreign_lane.fetch_add(1, Relaxed);
    }

    pub(crate) fn bad_relayed(&self) {
        self.bad_relayed.fetch_add(1, Relaxed);
    }

    /// All values now.
    pub fn snapshot(&self) -> CounterSnapshot {
        let named = |names: &'static [&'static str], values: &[AtomicU64]| -> CounterSnapshot {
            names.iter().zip(values).map(|(name, value)| (*name, value.load(Relaxed))).collect()
        };
        let mut all = named(counts::names(), &self.counts);
        all.extend(named(drops::names(), &self.drops));
        all.push(("drop_no_queue_pair", self.no_queue_pair.load(Relaxed)));
        all.push(("foreign_lane", self.foreign_lane.load(Relaxed)));
        all.push(("drop_bad_relayed", self.bad_relayed.load(Relaxed)));
        all
    }
}
