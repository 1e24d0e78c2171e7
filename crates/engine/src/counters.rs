//! What the lanes count: plain numbers behind the lane's lock, which whoever counts holds anyway.
//!
//! Names are those of the counters of Linux's mlx5 and rxe drivers where the meaning is the same.

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
        Cnp => "rp_cnp_ignored",
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
        NakSequenceReceived => "packet_seq_err",
        NakInvalidRequestSent => "resp_remote_invalid_request",
        NakInvalidRequestReceived => "req_remote_invalid_request",
        NakRemoteAccessSent => "resp_remote_access_errors",
        NakRemoteAccessReceived => "req_remote_access_errors",
        NakRemoteOperationSent => "resp_remote_operation_errors",
        NakRemoteOperationReceived => "req_remote_operation_errors",
        RnrNakSent => "send_rnr_err",
        RnrNakReceived => "rnr_nak_retry_err",
        RnrWaitUs => "rnr_wait_us",
        DuplicateRequest => "duplicate_request",
        RequestHeld => "request_held",
        ProbeSent => "probe_sent",
        Timeout => "local_ack_timeout_err",
        RetryExceeded => "retry_exceeded_err",
        RnrRetryExceeded => "retry_rnr_exceeded_err",
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

/// What a queue pair did, or all queue pairs of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets given to the link.
    sent_pkts: u64,
    /// Their payload.
    sent_bytes: u64,
    /// Packets that the link brought, dropped ones included.
    rcvd_pkts: u64,
    /// Their payload.
    rcvd_bytes: u64,
    /// Of these: marked by a network that is congested (ECN: CE).
    ecn_marked: u64,
    drops: [u64; drops::COUNT],
    counts: [u64; counts::COUNT],
}

/// Names and values, in a fixed order.
pub type CounterSnapshot = Vec<(&'static str, u64)>;

impl Counters {
    pub(crate) fn add(&mut self, other: &Counters) {
        self.sent_pkts += other.sent_pkts;
        self.sent_bytes += other.sent_bytes;
        self.rcvd_pkts += other.rcvd_pkts;
        self.rcvd_bytes += other.rcvd_bytes;
        self.ecn_marked += other.ecn_marked;
        self.drops.iter_mut().zip(&other.drops).for_each(|(sum, value)| *sum += value);
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, value)| *sum += value);
    }

    #[inline]
    pub(crate) fn sent(&mut self, packets: u32, bytes: u32) {
        self.sent_pkts += u64::from(packets);
        self.sent_bytes += u64::from(bytes);
    }

    /// A packet arrived with so many bytes of payload and this traffic class (or type of service).
    #[inline]
    pub(crate) fn received(&mut self, bytes: usize, tclass: u8) {
        /// Congestion experienced (RFC 3168).
        const CE: u8 = 0b11;
        self.rcvd_pkts += 1;
        self.rcvd_bytes += bytes as u64;
        self.ecn_marked += u64::from(tclass & CE == CE);
    }

    #[inline]
    pub(crate) fn drop_packet(&mut self, reason: Drop) {
        self.drops[drops::index(reason)] += 1;
    }

    #[inline]
    pub(crate) fn count(&mut self, what: Count, n: u32) {
        self.counts[counts::index(what)] += u64::from(n);
    }

    /// All values.
    pub fn snapshot(&self) -> CounterSnapshot {
        let traffic = [
            ("sent_pkts", self.sent_pkts),
            ("sent_bytes", self.sent_bytes),
            ("rcvd_pkts", self.rcvd_pkts),
            ("rcvd_bytes", self.rcvd_bytes),
            ("np_ecn_marked_roce_packets", self.ecn_marked),
        ];
        let counts = counts::names().iter().copied().zip(self.counts);
        let drops = drops::names().iter().copied().zip(self.drops);
        traffic.into_iter().chain(counts).chain(drops).collect()
    }
}

/// Packets that reached no queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Strays {
    /// For numbers without a queue pair.
    pub(crate) no_queue_pair: u64,
    /// For other lanes: handed to the relay.
    pub(crate) foreign_lane: u64,
    /// From the relay, and no packets.
    pub(crate) bad_relayed: u64,
    /// To a multicast group, but no datagrams for the multicast queue pair number.
    pub(crate) bad_multicast: u64,
    /// To a multicast group that no queue pair is attached to on that interface.
    pub(crate) no_member: u64,
}

impl Strays {
    /// All values.
    pub fn snapshot(&self) -> CounterSnapshot {
        vec![
            ("drop_no_queue_pair", self.no_queue_pair),
            ("foreign_lane", self.foreign_lane),
            ("drop_bad_relayed", self.bad_relayed),
            ("drop_bad_multicast", self.bad_multicast),
            ("drop_no_multicast_member", self.no_member),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(counters: &Counters, name: &str) -> u64 {
        counters.snapshot().into_iter().find(|(known, _)| *known == name).expect("a counter's name").1
    }

    #[test]
    fn counters_add_up() {
        let (mut first, mut second) = (Counters::default(), Counters::default());
        for (counters, bytes) in [(&mut first, 10), (&mut second, 20)] {
            counters.sent(3, 3 * bytes);
            counters.received(bytes as usize, 0b10);
            counters.received(0, 0b11);
            counters.drop_packet(Drop::Psn);
            counters.count(Count::RnrWaitUs, bytes);
        }
        let mut sum = first.clone();
        sum.add(&second);
        for (name, values) in [
            ("sent_pkts", [3, 3, 6]),
            ("sent_bytes", [30, 60, 90]),
            ("rcvd_pkts", [2, 2, 4]),
            ("rcvd_bytes", [10, 20, 30]),
            ("np_ecn_marked_roce_packets", [1, 1, 2]),
            ("drop_psn", [1, 1, 2]),
            ("rnr_wait_us", [10, 20, 30]),
            ("drop_qkey", [0, 0, 0]),
        ] {
            assert_eq!([value(&first, name), value(&second, name), value(&sum, name)], values, "{name}");
        }
    }

    #[test]
    fn every_name_is_there_once() {
        let names = Counters::default().snapshot().into_iter().chain(Strays::default().snapshot());
        let mut names: Vec<&str> = names.map(|(name, _)| name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
