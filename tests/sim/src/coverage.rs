//! How often each operation and each fault really happened.

use std::fmt;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Something that a run of many seeds must have met.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Met { $($(#[$doc])* #[allow(missing_docs)] $name,)* }

        impl Met {
            /// All of them.
            pub const ALL: &[Met] = &[$(Met::$name,)*];

            /// What reports call it.
            pub fn name(self) -> &'static str {
                match self { $(Met::$name => $text,)* }
            }
        }
    };
}

kinds! {
    RcSend = "RC SEND",
    RcSendImm = "RC SEND with immediate",
    RcSendInv = "RC SEND with invalidate",
    RcWrite = "RC WRITE",
    RcWriteImm = "RC WRITE with immediate",
    RcRead = "RC READ",
    CompareSwap = "RC compare and swap",
    FetchAdd = "RC fetch and add",
    LocalInv = "local invalidate",
    Xrc = "XRC request",
    BadSrqNumber = "XRC request for an SRQ that is not there",
    UcSend = "UC SEND",
    UcSendImm = "UC SEND with immediate",
    UcWrite = "UC WRITE",
    UcWriteImm = "UC WRITE with immediate",
    UdSend = "UD SEND",
    UdSendImm = "UD SEND with immediate",
    Inline = "inline request",
    ZeroLength = "request of no bytes",
    SeveralSges = "request of several elements",
    Fence = "fenced request",
    Solicited = "solicited request",
    Unsignalled = "unsignalled request",
    Huge = "request of 1 MiB and more",
    Lent = "train whose payload is lent",
    SrqReceive = "receive from an SRQ",
    Loss = "frame lost",
    TrainLoss = "train lost",
    Duplicate = "frame duplicated",
    Delay = "frame delayed (overtaken)",
    Corrupt = "frame damaged, ICRC wrong",
    CorruptMasked = "frame damaged where the ICRC does not look",
    Truncated = "frame cut short",
    Forged = "frame forged with a good ICRC, for a QP that believes it",
    Stranger = "frame forged with a good ICRC, that must be refused",
    BlackHole = "direction dead: frames lost",
    Stall = "direction dead: frames kept back",
    NodePause = "node paused",
    ReceiveOverflow = "receive buffer overflown",
    RnrNak = "receiver not ready",
    BadRkey = "request with an unknown rkey",
    WrongPd = "request with a key of another PD",
    Bounds = "request that leaves its region",
    NoRight = "request without the right",
    NoQpRight = "request that the QP's access flags refuse",
    BadLkey = "request with an unknown lkey",
    Misaligned = "misaligned atomic",
    BadLength = "atomic of a wrong length",
    BadInvalidate = "invalidate of a key that is no window",
    Fragile = "request on memory that goes away",
    MemoryGone = "memory gone under a good key",
    Deregistered = "region deregistered in mid-traffic",
    ShortReceive = "receive too small",
    BadReceive = "receive with a bad lkey",
    ToErr = "QP to ERR in mid-traffic",
    ToReset = "QP to RESET in mid-traffic",
    ToSqd = "QP to SQD in mid-traffic",
    Drained = "SQ drained",
    ToSqe = "QP in SQE",
    Reconnect = "QPs connected again",
    Retransmitted = "packets sent again",
    Timeout = "retransmission timeout",
    Probe = "silent peer asked what it has",
    SequenceNak = "sequence NAK",
    DuplicateRequest = "request received again",
    RequestHeld = "request packet kept until its turn",
    FlowAnswer = "UC or UD sender told what was taken",
    FlowQuestion = "UC or UD sender asks again",
    FlowMuted = "UC or UD peer of another make: no word of it",
    RetryExceeded = "given up for lack of answers",
    RnrExceeded = "given up for lack of receives",
    RemoteError = "refused by the peer",
    Flushed = "request flushed",
    ReceiveFlushed = "receive flushed",
}

/// Counts of all kinds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    counts: Vec<u64>,
}

impl Default for Coverage {
    fn default() -> Self {
        Coverage { counts: vec![0; Met::ALL.len()] }
    }
}

impl Coverage {
    /// Counts one.
    pub fn add(&mut self, met: Met) {
        self.add_n(met, 1);
    }

    /// Counts several.
    pub fn add_n(&mut self, met: Met, n: u64) {
        self.counts[met as usize] += n;
    }

    /// How often it was met.
    pub fn count(&self, met: Met) -> u64 {
        self.counts[met as usize]
    }

    /// Takes over the counts of another run.
    pub fn merge(&mut self, other: &Coverage) {
        for (own, more) in self.counts.iter_mut().zip(&other.counts) {
            *own += more;
        }
    }

    /// What was never met.
    pub fn missing(&self) -> Vec<Met> {
        Met::ALL.iter().copied().filter(|&met| self.count(met) == 0).collect()
    }
}

/// Two columns.
impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for pair in Met::ALL.chunks(2) {
            for met in pair {
                let entry = format!("{:>9}  {}", self.count(*met), met.name());
                write!(f, "{entry:<70}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
