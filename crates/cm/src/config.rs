//! What a host may choose.

use crate::{Nanos, part_of_guests};

/// Everything that [`Cm`](crate::Cm) is made with.
#[derive(Clone, Debug)]
pub struct Config {
    /// From the system's random numbers: communication ids, transaction ids, PSNs and ports come from it. Two machines with the
    /// same seed and the same inputs do the same.
    pub seed: [u8; 32],
    /// Numbers of ids begin after this. Owners that outlive a machine and go over to another one must not take the ids of one for those
    /// of the other.
    pub ids_after: u64,
    /// How much may be there at once.
    pub limits: Limits,
    /// How long things take.
    pub timing: Timing,
}

impl Config {
    /// The usual limits and times.
    pub fn new(seed: [u8; 32]) -> Config {
        Config { seed, ids_after: 0, limits: Limits::default(), timing: Timing::default() }
    }
}

/// How much may be there at once. What is above is refused to programs with an error, and dropped from the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Ids that have owners, in all. Those that linger have room of their own.
    pub ids: usize,
    /// Ids of one owner, requests that it has not taken yet included.
    pub ids_per_owner: usize,
    /// Ids of all owners of one user ([`Cm::enroll`](crate::Cm::enroll)). None: a guest has at most as many as it leaves to further
    /// guests ([`leaves_room`](crate::leaves_room)), others as many as there are.
    pub ids_per_user: Option<usize>,
    /// Ids of all guests together: what is above is there for others.
    pub ids_of_guests: usize,
    /// Listeners of one owner.
    pub listeners_per_owner: usize,
    /// Most requests that a listener may have waiting, whatever backlog it asks for.
    pub backlog: usize,
    /// Requests that one peer address may have waiting at a listener.
    pub pending_per_peer: usize,
    /// Ids without an owner that wait for a DREP or for their time to be over; above it the oldest go early, those that wait for a
    /// DREP last.
    pub lingering: usize,
}

impl Limits {
    /// The usual ones.
    pub const USUAL: Limits = Limits {
        ids: 49_152,
        ids_per_owner: 16_384,
        ids_per_user: None,
        ids_of_guests: part_of_guests(49_152),
        listeners_per_owner: 4_096,
        backlog: 1_024,
        pending_per_peer: 512,
        lingering: 16_384,
    };
}

impl Default for Limits {
    fn default() -> Limits {
        Limits::USUAL
    }
}

/// How long things take. Codes are times of 4.096 us * 2^code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Until a message is sent for the second time; doubled each time, up to the response timeout.
    pub first_retry: Nanos,
    /// Code: how long either end may take to answer, as our REQs say.
    pub response_timeout: u8,
    /// How often a message is sent again in the specification's sense: gives up after `1 + max_retries` response timeouts. 0 to 15.
    pub max_retries: u8,
    /// Code: the time that our MRAs ask for.
    pub service_timeout: u8,
    /// How many MRAs prolong the wait for an answer.
    pub max_mras: u8,
    /// Code: largest time that a peer can make us wait (response timeout, service timeout, local ACK timeout).
    pub longest: u8,
    /// Code: target ACK delay, as our REPs say.
    pub target_ack_delay: u8,
}

impl Default for Timing {
    fn default() -> Timing {
        Timing {
            first_retry: 50_000_000,
            response_timeout: 20,
            max_retries: 15,
            service_timeout: 24,
            max_mras: 16,
            longest: 24,
            target_ack_delay: 15,
        }
    }
}

impl Timing {
    /// The time of a code, at most [`Timing::longest`].
    pub(crate) fn time(&self, code: u8) -> Nanos {
        4_096 << code.min(self.longest).min(31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_times_and_capped() {
        let timing = Timing::default();
        assert_eq!(timing.time(0), 4_096);
        assert_eq!(timing.time(20), 4_294_967_296);
        assert_eq!(timing.time(31), timing.time(24));
    }
}
