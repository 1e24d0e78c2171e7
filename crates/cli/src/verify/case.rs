//! The cases: every opcode with sizes around every boundary, at odd addresses, in pieces.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::arena::mix;

/// Largest message of a case, in bytes.
pub(super) const MAX_SIZE: u32 = (1 << 20) + 3;
/// The memory has two halves of this many bytes: sources in the first, sinks in the second.
pub(super) const HALF: usize = (1 << 20) + 8192;
/// Room before every area that is used; with the room behind it, all guard.
const GUARD: usize = 64;
/// Bytes between two pieces of a scattered message: guard, too.
const GAP: usize = 24;
/// Most pieces of a message.
pub(super) const MAX_PIECES: usize = 4;
/// Largest message that is sent inline.
pub(super) const MAX_INLINE: u32 = 512;

/// Service types, in the order in which both ends make their queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Transport {
    Rc,
    Uc,
    Ud,
    Xrc,
}

impl Transport {
    pub(super) const ALL: [Transport; 4] = [Transport::Rc, Transport::Uc, Transport::Ud, Transport::Xrc];

    /// The receiver says that a message arrived; otherwise it may be lost.
    pub(super) fn is_reliable(self) -> bool {
        matches!(self, Transport::Rc | Transport::Xrc)
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Rc => "RC",
            Transport::Uc => "UC",
            Transport::Ud => "UD",
            Transport::Xrc => "XRC",
        })
    }
}

/// What the client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub(super) enum Op {
    Send,
    SendImm,
    /// Closes a window to where it goes.
    SendInv,
    Write,
    WriteImm,
    /// Through a window that has just the room.
    WriteWindow,
    /// And a FLUSH of what was written.
    WriteFlush,
    Read,
    /// The comparison succeeds.
    CompareSwap,
    /// It does not.
    CompareSwapMiss,
    FetchAdd,
    AtomicWrite,
}

impl Op {
    const ALL: [Op; 12] = [
        Op::Send,
        Op::SendImm,
        Op::SendInv,
        Op::Write,
        Op::WriteImm,
        Op::WriteWindow,
        Op::WriteFlush,
        Op::Read,
        Op::CompareSwap,
        Op::CompareSwapMiss,
        Op::FetchAdd,
        Op::AtomicWrite,
    ];

    /// It acts on an aligned word.
    pub(super) fn is_of_word(self) -> bool {
        self.is_atomic() || self == Op::AtomicWrite
    }

    pub(super) fn is_atomic(self) -> bool {
        matches!(self, Op::CompareSwap | Op::CompareSwapMiss | Op::FetchAdd)
    }

    /// The server lends a window for it.
    pub(super) fn takes_window(self) -> bool {
        matches!(self, Op::SendInv | Op::WriteWindow)
    }

    /// The message goes where a receive request says.
    pub(super) fn is_send(self) -> bool {
        matches!(self, Op::Send | Op::SendImm | Op::SendInv)
    }

    /// It consumes a receive request.
    pub(super) fn takes_receive(self) -> bool {
        self.is_send() || self == Op::WriteImm
    }

    /// There is none of no bytes.
    fn needs_bytes(self) -> bool {
        matches!(self, Op::WriteWindow | Op::WriteFlush | Op::SendInv)
    }

    pub(super) fn has_immediate(self) -> bool {
        matches!(self, Op::SendImm | Op::WriteImm)
    }

    fn allowed(self, transport: Transport) -> bool {
        match transport {
            Transport::Rc => true,
            // Windows are bound by a queue pair that sends, and reached through that one only.
            Transport::Xrc => !self.takes_window(),
            Transport::Uc => matches!(self, Op::Send | Op::SendImm | Op::Write | Op::WriteImm),
            Transport::Ud => matches!(self, Op::Send | Op::SendImm),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Send => "SEND",
            Op::SendImm => "SEND with immediate",
            Op::SendInv => "SEND with invalidate",
            Op::Write => "WRITE",
            Op::WriteImm => "WRITE with immediate",
            Op::WriteWindow => "WRITE through a window",
            Op::WriteFlush => "WRITE and FLUSH",
            Op::Read => "READ",
            Op::CompareSwap => "compare-and-swap",
            Op::CompareSwapMiss => "compare-and-swap, unequal",
            Op::FetchAdd => "fetch-and-add",
            Op::AtomicWrite => "ATOMIC WRITE",
        })
    }
}

/// One case; both ends derive everything from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Case {
    pub(super) transport: Transport,
    pub(super) op: Op,
    pub(super) size: u32,
    pub(super) inline: bool,
    pub(super) seed: u64,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inline = if self.inline { " inline" } else { "" };
        write!(f, "{} {} of {} bytes{inline} (case seed {:#x})", self.transport, self.op, self.size, self.seed)
    }
}

impl Case {
    /// Refuses what no client of ours asks for.
    pub(super) fn check(&self) -> Result<(), String> {
        let size_fits = if self.op.is_of_word() { self.size == 8 } else { self.size <= MAX_SIZE };
        let not_empty = self.size > 0 || !self.op.needs_bytes();
        if size_fits && not_empty && self.op.allowed(self.transport) {
            Ok(())
        } else {
            Err(format!("no such case: {self}"))
        }
    }

    /// A number of this case below `below`, different for each `salt`.
    fn draw(&self, salt: u64, below: usize) -> usize {
        (mix(self.seed ^ mix(salt)) % below as u64) as usize
    }

    /// Where the message lies whole, in the first half (`source`) or the second.
    pub(super) fn whole(&self, source: bool) -> usize {
        let base = if source { GUARD } else { HALF + GUARD };
        // Some need words; everything else is put at odd places.
        base + if self.op.is_of_word() { 8 * self.draw(1, 8) } else { self.draw(1 + u64::from(source), 64) }
    }

    /// Where the message lies in pieces: offset and length of each, with gaps between them.
    pub(super) fn pieces(&self, source: bool) -> Vec<(usize, usize)> {
        let start = self.whole(source);
        let size = self.size as usize;
        if self.op.is_of_word() || size == 0 {
            return if size == 0 { Vec::new() } else { vec![(start, size)] };
        }
        let count = (1 + self.draw(3 + u64::from(source), MAX_PIECES)).min(size);
        let mut pieces = Vec::new();
        let (mut offset, mut left) = (start, size);
        for index in 0..count {
            let rest = count - index - 1;
            let length = if rest == 0 { left } else { 1 + self.draw(10 + index as u64, left - rest) };
            pieces.push((offset, length));
            offset += length + GAP;
            left -= length;
        }
        pieces
    }

    /// Immediate data.
    pub(super) fn immediate(&self) -> u32 {
        mix(self.seed ^ 5) as u32
    }

    /// Operand of an atomic: what is added or swapped in.
    pub(super) fn operand(&self) -> u64 {
        mix(self.seed ^ 6)
    }
}

/// All cases of one round.
pub(super) fn cases(seed: u64, mtu: u32) -> Vec<Case> {
    let mut sizes = vec![0, 1, 2, 3, 4, 7, 8, 9, 63, 64, 65, MAX_INLINE, 4095, 4096, 4097, 65_535, 65_536, 65_537];
    sizes.extend([mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu - 1, 1 << 20, MAX_SIZE]);
    sizes.sort_unstable();
    sizes.dedup();
    let mut cases = Vec::new();
    for transport in Transport::ALL {
        for op in Op::ALL.into_iter().filter(|op| op.allowed(transport)) {
            let sizes = if op.is_of_word() { vec![8; 8] } else { sizes.clone() };
            for size in sizes {
                if transport == Transport::Ud && size > mtu || size == 0 && op.needs_bytes() {
                    continue;
                }
                let can_inline = size <= MAX_INLINE && op != Op::Read && !op.is_atomic();
                for inline in [false, true].into_iter().filter(|inline| !inline || can_inline) {
                    let seed = mix(mix(seed).wrapping_add(cases.len() as u64));
                    cases.push(Case { transport, op, size, inline, seed });
                }
            }
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_add_up_and_stay_apart_in_their_half() {
        for mtu in [256, 1024, 4096] {
            for case in cases(7, mtu) {
                for source in [true, false] {
                    let pieces = case.pieces(source);
                    assert_eq!(pieces.iter().map(|p| p.1).sum::<usize>(), case.size as usize, "{case}");
                    assert!(pieces.iter().all(|p| p.1 > 0) && pieces.len() <= MAX_PIECES, "{case}");
                    assert!(pieces.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0), "{case}");
                    let half = if source { 0..HALF } else { HALF..2 * HALF };
                    // A datagram's receive buffer starts 40 bytes earlier than its data.
                    assert!(pieces.iter().all(|p| p.0 >= half.start + 40 && p.0 + p.1 < half.end), "{case}");
                }
            }
        }
    }

    #[test]
    fn every_opcode_that_a_service_type_has_is_there() {
        let cases = cases(1, 1024);
        for (transport, count) in [(Transport::Rc, 12), (Transport::Uc, 4), (Transport::Ud, 2), (Transport::Xrc, 10)] {
            let mut ops: Vec<Op> =
                cases.iter().filter(|case| case.transport == transport).map(|case| case.op).collect();
            ops.sort();
            ops.dedup();
            assert_eq!(ops.len(), count);
        }
        assert!(cases.iter().any(|case| case.inline) && cases.iter().any(|case| case.size == 0));
    }

    #[test]
    fn seeds_differ() {
        let mut seeds: Vec<u64> = cases(1, 1024).iter().chain(&cases(2, 1024)).map(|case| case.seed).collect();
        let all = seeds.len();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), all);
    }
}
