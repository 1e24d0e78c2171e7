//! Payload that stays in the producer's process until the consumer fetches it: one copy instead of two.
//!
//! The packets of a large WRITE that are full, but for the last one of a train, may be one record that says where their payload is: a [`Loan`].
//! The consumer has the kernel copy it (`process_vm_readv(2)`) to where it belongs. The last packet comes as ever, so that its bytes become
//! visible after all others.
//!
//! # Whose memory it is
//! A producer only lends after the consumer, which has to be told to borrow ([`Ring::borrow`](super::Ring::borrow)), said so, in its verdict.
//! For that the consumer sets a challenge, a random word; the producer puts that
//! into a word of its own memory, the mark, and tells its process number and where the mark is; and the consumer fetches it. Where the system does not
//! allow that (ptrace rules, another process namespace, a sandbox) the producer does not lend. With each fetch the mark is read once more, after
//! the bytes: if the process has ended, or has become another program, it is not found, and what was fetched counts as lost.
//!
//! All this guards against mistakes, not against a hostile producer: the number of the process is its word, and the challenge lies in memory that others
//! map, this process too. It could have bytes of this process, or of any that this one may read, put into memory that it may write. So only who
//! trusts the programs of its user as itself borrows from them.
//!
//! # When it may change
//! The program may not change the memory of a request until that is complete. Before a request completes in error, or is forgotten, the lane
//! takes back what was lent ([`Lending::recall`]): the consumer counts recalls after it fetched, and what was fetched of a loan that is older is lost, too.
//! What is lost comes again, and is then never lent: so that it is the sender who finds out what is wrong with the memory.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use ferroce_core::mem::peer::{self, Unfetched};
use ferroce_transport::{MAX_LENT_BYTES, MAX_LENT_PACKETS, Payload, Train};
use ferroce_wire::{Headers, Opcode, Psn};

use super::shared::{Memory, Way};
use super::{Broken, HEADERS_MAX};

/// Set in the word before a record that is a loan.
pub(super) const LOAN: u64 = 1 << 40;
/// Bytes of a loan's record before its headers: recalls, address, packets, MTU, bytes of the first and of the other headers.
const FIXED: usize = 32;
/// Bytes of the longest record.
pub(super) const RECORD_MAX: usize = FIXED + 2 * HEADERS_MAX;

/// The producer's mark was found.
const YES: u64 = 1;
/// It was not.
const NO: u64 = 2;

/// What the lending side keeps.
#[derive(Debug)]
pub(super) struct Lender(Lending);

impl Lender {
    pub(super) fn new(memory: &Arc<Memory>, way: Way) -> Lender {
        Lender(Lending { memory: Arc::clone(memory), way, state: Arc::default() })
    }

    pub(super) fn lending(&self) -> Lending {
        self.0.clone()
    }

    pub(super) fn recall(&self) {
        self.0.recall();
    }

    /// The record that lends the payload of a train but for its last packet; `None`: it is to be copied.
    pub(super) fn record(&self, train: &Train) -> Option<Record> {
        match train.payload {
            Payload::Lent(span) if self.0.is_allowed() => {
                Some(Record::new(train, span.addr, self.0.state.recalls.load(Ordering::Relaxed)))
            }
            _ => None,
        }
    }

    /// A loan was written that ends at that position.
    pub(super) fn lent(&self, end: u64) {
        self.0.state.end.store(end, Ordering::Relaxed);
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.recall();
        self.0.state.mark.store(0, Ordering::Relaxed);
    }
}

/// The right to lend memory through a ring, and to take back what was lent.
#[derive(Clone, Debug)]
pub struct Lending {
    memory: Arc<Memory>,
    way: Way,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What the consumer looks for.
    mark: AtomicU64,
    /// The consumer knows where that is.
    told: AtomicBool,
    /// How often something was taken back.
    recalls: AtomicU64,
    /// Where the newest loan ends in the ring; 0: none since the last recall.
    end: AtomicU64,
}

impl Lending {
    /// May memory be lent? Answers the consumer's challenge when it is asked for the first time, so that the answer is no for a while.
    pub fn is_allowed(&self) -> bool {
        if self.state.told.load(Ordering::Relaxed) {
            return self.memory.verdict(self.way).load() == Ok(YES);
        }
        // Where the ring's memory cannot be had, whoever writes to it finds that.
        let _ = self.answer();
        false
    }

    fn answer(&self) -> Result<(), Broken> {
        let challenge = self.memory.challenge(self.way).load()?;
        if challenge != 0 {
            self.state.mark.store(challenge, Ordering::Relaxed);
            self.memory.process(self.way).store(std::process::id().into())?;
            // With release order: who sees it finds the mark as it shall be.
            self.memory.mark(self.way).store((&raw const self.state.mark) as u64)?;
            self.state.told.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Nothing that was lent until now counts if it was not fetched before.
    pub fn recall(&self) {
        let end = self.state.end.swap(0, Ordering::Relaxed);
        // A consumer that claims to have read what it did not gets what it deserves.
        let is_read = |tail| tail >= end;
        if end == 0 || self.memory.tail(self.way).load().is_ok_and(is_read) {
            return;
        }
        let recalls = self.state.recalls.fetch_add(1, Ordering::Relaxed) + 1;
        // Where the memory cannot be had the consumer cannot have it either.
        let _ = self.memory.recalls(self.way).store(recalls);
        // Before the program changes what was lent.
        fence(Ordering::SeqCst);
    }
}

/// A loan as it is written.
pub(super) struct Record {
    bytes: [u8; RECORD_MAX],
    len: usize,
    /// Packets whose payload is lent.
    pub(super) packets: u32,
}

impl Record {
    fn new(train: &Train, addr: u64, recalls: u64) -> Record {
        let mut record = Record { bytes: [0; RECORD_MAX], len: FIXED, packets: train.packets - 1 };
        let lens = [&train.head, &train.middle()].map(|headers| {
            let len = headers.len();
            headers.emit(&mut record.bytes[record.len..record.len + len]);
            record.len += len;
            len as u32
        });
        record.bytes[0..8].copy_from_slice(&recalls.to_ne_bytes());
        record.bytes[8..16].copy_from_slice(&addr.to_ne_bytes());
        for (at, word) in [record.packets, train.mtu, lens[0], lens[1]].into_iter().enumerate() {
            record.bytes[16 + 4 * at..][..4].copy_from_slice(&word.to_ne_bytes());
        }
        record
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// What the borrowing side keeps.
#[derive(Debug)]
pub(super) struct Borrower {
    challenge: u64,
    /// The producer's process and where its mark is, once it was found there.
    lender: Option<(i32, u64)>,
    decided: bool,
}

impl Borrower {
    /// Who borrows nothing.
    pub(super) fn new() -> Borrower {
        Borrower { challenge: 0, lender: None, decided: false }
    }

    /// Asks the producer to lend.
    pub(super) fn invite(&mut self, memory: &Memory, way: Way) {
        self.challenge = rand::random::<u64>() | 1;
        // Without it nothing is lent.
        let _ = memory.challenge(way).store(self.challenge);
    }

    /// Looks for the producer's mark, when it told where that is.
    ///
    /// # Errors
    /// The ring's memory cannot be had.
    pub(super) fn decide(&mut self, memory: &Memory, way: Way) -> Result<(), Broken> {
        if self.decided || self.challenge == 0 {
            return Ok(());
        }
        let mark = memory.mark(way).load()?;
        if mark == 0 {
            return Ok(());
        }
        self.decided = true;
        let process = i32::try_from(memory.process(way).load()?).unwrap_or(0);
        let found = peer::fetch_into(process, mark, &mut [], mark);
        self.lender = (found == Ok(self.challenge)).then_some((process, mark));
        if self.lender.is_none() {
            log::debug!("no memory is lent by process {process} of this host: {found:?}");
        }
        memory.verdict(way).store(if self.lender.is_some() { YES } else { NO })
    }

    /// Nothing more is borrowed.
    pub(super) fn refuse(&mut self, memory: &Memory, way: Way) -> Result<(), Broken> {
        self.lender = None;
        memory.verdict(way).store(NO)
    }

    /// The loan in a record.
    ///
    /// # Errors
    /// No producer writes that.
    pub(super) fn read<'a>(&'a self, record: &[u8], memory: &'a Memory, way: Way) -> Result<Loan<'a>, Broken> {
        let (fixed, headers) = record.split_at_checked(FIXED).ok_or(Broken)?;
        let word = |at: usize| u64::from_ne_bytes(fixed[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_ne_bytes(fixed[at..at + 4].try_into().expect("four bytes"));
        let (packets, mtu) = (half(16), half(20));
        let bytes = packets.checked_mul(mtu).ok_or(Broken)?;
        let fits = (1..=MAX_LENT_PACKETS).contains(&packets) && (256..=4096).contains(&mtu) && bytes <= MAX_LENT_BYTES;
        let (head, body) = headers.split_at_checked(half(24) as usize).ok_or(Broken)?;
        if !fits || body.len() != half(28) as usize {
            return Err(Broken);
        }
        let parse =
            |bytes: &[u8]| Headers::parse(bytes).ok().filter(|(_, rest)| rest.is_empty()).map(|(headers, _)| headers);
        let (head, middle) = (parse(head).ok_or(Broken)?, parse(body).ok_or(Broken)?);
        let are_of_a_write = matches!(head.bth.opcode, Opcode::RC_WRITE_FIRST | Opcode::RC_WRITE_MIDDLE)
            && middle.bth.opcode == Opcode::RC_WRITE_MIDDLE
            && middle.bth.dest_qp == head.bth.dest_qp;
        if !are_of_a_write {
            return Err(Broken);
        }
        let (recalls, addr) = (word(0), word(8));
        Ok(Loan { head, middle, packets, mtu, addr, recalls, borrower: self, memory, way, refused: Cell::new(false) })
    }
}

/// The payload was not had; it counts as lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost;

/// Full packets of a message whose payload is still with who sends it.
#[derive(Debug)]
pub struct Loan<'a> {
    head: Headers,
    middle: Headers,
    packets: u32,
    mtu: u32,
    addr: u64,
    recalls: u64,
    borrower: &'a Borrower,
    memory: &'a Memory,
    way: Way,
    /// The process is not what it was, or its memory may not be had any more.
    refused: Cell<bool>,
}

impl Loan<'_> {
    /// Number of packets.
    pub fn packets(&self) -> u32 {
        self.packets
    }

    /// Bytes of payload of each.
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// Bytes of payload in all.
    pub fn bytes(&self) -> u32 {
        self.packets * self.mtu
    }

    /// Headers of a packet.
    pub fn headers(&self, index: u32) -> Headers {
        let mut headers = if index == 0 { self.head } else { self.middle };
        headers.bth.psn = Psn::add(self.head.bth.psn, index);
        headers
    }

    /// Copies the payload to `to`, memory that a key was resolved for.
    ///
    /// # Errors
    /// It is not to be had (any more), or there is no memory at `to`.
    pub fn fetch(&self, to: u64) -> Result<(), Lost> {
        let (process, mark) = self.borrower.lender.ok_or(Lost)?;
        self.check(peer::fetch(process, self.addr, to, self.bytes() as usize, mark))
    }

    /// Copies the payload to a buffer, as many packets at once as that has room for, and gives each with its index to `sink`.
    ///
    /// # Errors
    /// It is not to be had (any more); packets before that were given.
    ///
    /// # Panics
    /// If the buffer has no room for a packet.
    pub fn read(&self, buffer: &mut [u8], sink: &mut dyn FnMut(u32, &[u8])) -> Result<(), Lost> {
        let (process, mark) = self.borrower.lender.ok_or(Lost)?;
        let mtu = self.mtu as usize;
        let most = buffer.len() / mtu;
        assert!(most > 0, "{} bytes hold no packet", buffer.len());
        for first in (0..self.packets).step_by(most) {
            let count = (self.packets - first).min(most as u32);
            let piece = &mut buffer[..count as usize * mtu];
            let from = self.addr.wrapping_add(u64::from(first * self.mtu));
            self.check(peer::fetch_into(process, from, piece, mark))?;
            (first..).zip(piece.chunks(mtu)).for_each(|(index, payload)| sink(index, payload));
        }
        Ok(())
    }

    fn check(&self, fetched: Result<u64, Unfetched>) -> Result<(), Lost> {
        match fetched {
            Ok(mark) if mark == self.borrower.challenge => {}
            // Whose memory is gone will show when it comes again.
            Err(Unfetched::Fault) => return Err(Lost),
            Ok(_) | Err(Unfetched::Refused(_)) => {
                self.refused.set(true);
                return Err(Lost);
            }
        }
        // The bytes first, then the look at what was taken back.
        fence(Ordering::SeqCst);
        if self.memory.recalls(self.way).load() == Ok(self.recalls) { Ok(()) } else { Err(Lost) }
    }

    pub(super) fn was_refused(&self) -> bool {
        self.refused.get()
    }
}

/// What comes out of a ring.
#[derive(Debug)]
pub enum Arrival<'a> {
    /// A packet: headers, payload without pad.
    Packet(&'a Headers, &'a [u8]),
    /// Several, whose payload is still to be fetched.
    Loan(&'a Loan<'a>),
}
