//! Why a line failed, and what is to blame.

use std::fmt;

use program_tests::failure::Failure;

/// What is to blame for a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The virtual machine: it did not boot, panicked, or no longer answers.
    Guest,
    /// The way between the two: the guest cannot be reached by ICMP, or an interface is not there.
    Network,
    /// A program could not be started, or ended before any packet was exchanged.
    Program,
    /// Packets were exchanged and the two ends do not agree.
    Protocol,
}

impl Blame {
    /// The word that reports use.
    pub fn word(self) -> &'static str {
        match self {
            Blame::Guest => "guest",
            Blame::Network => "network",
            Blame::Program => "program",
            Blame::Protocol => "protocol",
        }
    }
}

/// A failure with its cause.
#[derive(Clone, Debug)]
pub struct Trouble {
    /// What is to blame.
    pub blame: Blame,
    /// What happened.
    pub failure: Failure,
}

impl Trouble {
    /// The virtual machine failed.
    pub fn guest(failure: Failure) -> Trouble {
        Trouble { blame: Blame::Guest, failure }
    }

    /// The network failed.
    pub fn network(failure: Failure) -> Trouble {
        Trouble { blame: Blame::Network, failure }
    }

    /// A program failed.
    pub fn program(failure: Failure) -> Trouble {
        Trouble { blame: Blame::Program, failure }
    }

    /// The protocol failed.
    pub fn protocol(failure: Failure) -> Trouble {
        Trouble { blame: Blame::Protocol, failure }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.blame.word(), self.failure)
    }
}
