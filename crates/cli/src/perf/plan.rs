//! What is measured: tests, sizes, extents, and the steps that the client tells the server.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::rig::{Peer, Settings};

/// Largest message, as perftest's `-a` ends: 8 MiB.
pub(super) const MAX_SIZE: u32 = 8 << 20;

/// The operation under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verb {
    Send,
    Write,
    Read,
    Atomic,
}

/// What is measured of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Measure {
    /// Bytes and messages a second with a full send queue.
    Bandwidth,
    /// Time of one message after the other.
    Latency,
}

/// A test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Test {
    pub(super) verb: Verb,
    pub(super) measure: Measure,
}

impl Test {
    /// All, in the order they run.
    pub(super) const ALL: [Test; 8] = {
        use Measure::{Bandwidth, Latency};
        [
            Test { verb: Verb::Send, measure: Bandwidth },
            Test { verb: Verb::Write, measure: Bandwidth },
            Test { verb: Verb::Read, measure: Bandwidth },
            Test { verb: Verb::Atomic, measure: Bandwidth },
            Test { verb: Verb::Send, measure: Latency },
            Test { verb: Verb::Write, measure: Latency },
            Test { verb: Verb::Read, measure: Latency },
            Test { verb: Verb::Atomic, measure: Latency },
        ]
    };

    /// Sizes if the user names none: perftest's.
    pub(super) fn default_size(self) -> u32 {
        match (self.verb, self.measure) {
            (Verb::Atomic, _) => 8,
            (_, Measure::Bandwidth) => 65_536,
            (_, Measure::Latency) => 2,
        }
    }

    /// Bytes that TCP sends and gets back to do the same.
    pub(super) fn tcp_exchange(self, size: u32) -> (u32, u32) {
        match self.verb {
            Verb::Send | Verb::Write => (size, size),
            // A READ request carries an address, a key and a length; an atomic two operands more.
            Verb::Read => (16, size),
            Verb::Atomic => (28, 8),
        }
    }

    /// True if one way is half of what is measured.
    pub(super) fn is_ping_pong(self) -> bool {
        matches!(self.verb, Verb::Send | Verb::Write)
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.verb {
            Verb::Send => "send",
            Verb::Write => "write",
            Verb::Read => "read",
            Verb::Atomic => "atomic",
        };
        let measure = match self.measure {
            Measure::Bandwidth => "bw",
            Measure::Latency => "lat",
        };
        write!(f, "{verb}-{measure}")
    }
}

/// What the user asked for by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Server,
    Tests(Vec<Test>),
}

impl FromStr for Asked {
    type Err = String;

    fn from_str(name: &str) -> Result<Asked, String> {
        if name == "server" {
            return Ok(Asked::Server);
        }
        if name == "all" {
            return Ok(Asked::Tests(Test::ALL.to_vec()));
        }
        let test = Test::ALL.into_iter().find(|test| test.to_string() == name);
        test.map(|test| Asked::Tests(vec![test])).ok_or_else(|| {
            let names: Vec<String> = Test::ALL.iter().map(Test::to_string).collect();
            format!("expected server, all, or one of {}", names.join(", "))
        })
    }
}

/// A size in bytes, with an optional K or M.
pub(super) fn parse_size(text: &str) -> Result<u32, String> {
    let (digits, shift) = match text.strip_suffix(['K', 'k']) {
        Some(digits) => (digits, 10),
        None => match text.strip_suffix(['M', 'm']) {
            Some(digits) => (digits, 20),
            None => (text, 0),
        },
    };
    let size = digits.parse::<u32>().ok().and_then(|n| n.checked_mul(1 << shift));
    size.filter(|size| (1..=MAX_SIZE).contains(size))
        .ok_or_else(|| format!("expected 1 to {MAX_SIZE} bytes, such as 64K or 1M"))
}

/// How long a measurement lasts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Extent {
    Messages(u64),
    Seconds(f64),
}

/// Tells when an extent is reached.
pub(super) struct Progress {
    extent: Extent,
    start: Instant,
}

impl Progress {
    pub(super) fn start(extent: Extent) -> Progress {
        Progress { extent, start: Instant::now() }
    }

    /// How many of `wanted` more messages are within the extent after `done`.
    pub(super) fn more(&self, done: u64, wanted: u64) -> u64 {
        match self.extent {
            Extent::Messages(all) => wanted.min(all.saturating_sub(done)),
            Extent::Seconds(seconds) if self.start.elapsed().as_secs_f64() < seconds => wanted,
            Extent::Seconds(_) => 0,
        }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }
}

/// First message: the client says what it wants.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Greeting {
    /// So that a stranger or another version is told apart.
    pub(super) hello: String,
    pub(super) settings: Settings,
    pub(super) qps: u32,
    /// Bytes of each of the two halves of the memory.
    pub(super) half: u32,
}

/// Value of [`Greeting::hello`].
pub(super) const HELLO: &str = "ferroce perf 1";

/// The server's answer, and the client's next message.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Introduction {
    pub(super) peer: Peer,
    /// Device, interface, address; for people.
    pub(super) describe: String,
    /// Where the server takes the connections of the TCP measurements; 0 from a client.
    pub(super) tcp_port: u16,
    /// What the client chose for both; 0 from a server.
    pub(super) path_mtu: u32,
}

/// What the client wants next.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Step {
    /// The server prepares and answers [`Ready`]; it stops when a SEND with immediate arrives on every queue pair, or,
    /// if it is passive, at once.
    Rdma {
        test: Test,
        size: u32,
    },
    /// The server answers [`Ready`], takes one connection, and answers `request` by `response` bytes until it is closed;
    /// with `response` 0 it swallows everything and answers one byte at the end.
    Tcp {
        request: u32,
        response: u32,
        polling: bool,
    },
    End,
}

/// The server is ready for the step.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Ready;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tests() {
        assert_eq!("server".parse(), Ok(Asked::Server));
        for test in Test::ALL {
            assert_eq!(test.to_string().parse(), Ok(Asked::Tests(vec![test])));
        }
        let error = "writebw".parse::<Asked>().expect_err("is no test");
        assert!(error.contains("write-bw"), "{error}");
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_size("2"), Ok(2));
        assert_eq!(parse_size("64K"), Ok(65_536));
        assert_eq!(parse_size("8M"), Ok(MAX_SIZE));
        for wrong in ["0", "9M", "", "K", "-1", "4096M", "1G"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_extent_in_messages_is_exact() {
        let progress = Progress::start(Extent::Messages(10));
        assert_eq!(progress.more(0, 4), 4);
        assert_eq!(progress.more(8, 4), 2);
        assert_eq!(progress.more(10, 4), 0);
    }
}
