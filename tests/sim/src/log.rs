//! The log of a run: every event goes into a hash, by which two runs are compared; on request it is also written down.

use std::fmt;
use std::io::Write;

use ferroce_transport::Nanos;

/// Where a readable log goes.
pub type Sink = Box<dyn Write + Send>;

pub(crate) struct Log {
    hash: u64,
    sink: Option<Sink>,
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").field("hash", &self.hash).finish_non_exhaustive()
    }
}

impl Log {
    pub(crate) fn new(sink: Option<Sink>) -> Log {
        Log { hash: 0xcbf2_9ce4_8422_2325, sink }
    }

    /// Takes note of an event: what makes it up as numbers, and how a person reads it.
    pub(crate) fn note(&mut self, at: Nanos, kind: u64, words: &[u64], text: impl FnOnce() -> String) {
        self.mix(at);
        self.mix(kind);
        for &word in words {
            self.mix(word);
        }
        if let Some(sink) = &mut self.sink {
            // A log that cannot be written is no reason to end the run otherwise.
            let _ = writeln!(sink, "{:>14}  {}", Millis(at), text());
        }
    }

    /// A remark for readers only: the hash does not know it.
    pub(crate) fn remark(&mut self, at: Nanos, text: impl FnOnce() -> String) {
        if let Some(sink) = &mut self.sink {
            let _ = writeln!(sink, "{:>14}  {}", Millis(at), text());
        }
    }

    fn mix(&mut self, word: u64) {
        self.hash = (self.hash ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }
}

/// Nanoseconds as milliseconds with all digits.
pub(crate) struct Millis(pub(crate) Nanos);

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}.{:06} ms", self.0 / 1_000_000, self.0 % 1_000_000))
    }
}
