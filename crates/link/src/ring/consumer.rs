//! The reading end of one direction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use ferroce_wire::{BTH_LEN, Headers};

use super::loan::{Arrival, Borrower, LOAN, RECORD_MAX};
use super::shared::{AREA, Memory, Way};
use super::{Broken, GIVEN_UP, PACKET_MAX, WORD, WRAP, record_len};
use crate::LinkStats;

/// Records looked at in one go, whatever they hold.
const RECORDS_MAX: usize = 64;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Consumer {
    memory: Arc<Memory>,
    way: Way,
    /// Where the next record is.
    tail: u64,
    borrower: Borrower,
    state: Arc<State>,
}

/// What those need to know of a consumer who do not hold it.
#[derive(Debug, Default)]
struct State {
    tail: AtomicU64,
    broken: AtomicBool,
}

impl Consumer {
    pub(super) fn new(memory: Arc<Memory>, way: Way) -> Consumer {
        Consumer { memory, way, tail: 0, borrower: Borrower::new(), state: Arc::default() }
    }

    /// Asks the producer to lend.
    pub(super) fn borrow(&mut self) {
        self.borrower.invite(&self.memory, self.way);
    }

    /// For the thread that sleeps.
    pub(super) fn watch(&self) -> Watch {
        Watch { memory: Arc::clone(&self.memory), way: self.way, state: Arc::clone(&self.state) }
    }

    /// Nothing is read any more.
    pub(super) fn stop(&mut self) {
        self.state.broken.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.memory.head(self.way).load() == Ok(self.tail)
    }

    /// The producer will write nothing any more, or nothing that could be read.
    pub(super) fn is_given_up(&self) -> bool {
        self.memory.head(self.way).load().unwrap_or(GIVEN_UP) == GIVEN_UP
    }

    /// Reads packets of about `budget` bytes and gives them to `sink`. Tells how many there were, good and bad ones.
    ///
    /// # Errors
    /// The ring holds what no producer writes, or its memory cannot be had.
    pub(super) fn recv(
        &mut self,
        budget: usize,
        scratch: &mut [u8; PACKET_MAX],
        stats: &mut LinkStats,
        sink: &mut dyn FnMut(Arrival<'_>),
    ) -> Result<usize, Broken> {
        let head = self.memory.head(self.way).load()?;
        if head == self.tail {
            return Ok(0);
        }
        let filled = head.checked_sub(self.tail).ok_or(Broken)?;
        // It only changes while the ring is empty, and is older than the head.
        let base = self.memory.base(self.way).load()?;
        if filled > AREA as u64 || !head.is_multiple_of(8) || !base.is_multiple_of(8) {
            return Err(Broken);
        }
        let (mut packets, mut bytes) = (0, 0);
        for _ in 0..RECORDS_MAX {
            if self.tail == head || bytes >= budget {
                break;
            }
            let left = (head - self.tail) as usize;
            let offset = self.tail.wrapping_sub(base) as usize % AREA;
            // Copied, as everything: it may be another one at a second look.
            let word = self.memory.record(self.way, offset).load()?;
            if word == WRAP {
                let skip = AREA - offset;
                if skip > left {
                    return Err(Broken);
                }
                self.tail += skip as u64;
                continue;
            }
            let is_loan = word & LOAN != 0;
            let len = (word & !LOAN) as usize;
            if !(BTH_LEN..=if is_loan { RECORD_MAX } else { PACKET_MAX }).contains(&len) {
                return Err(Broken);
            }
            let need = record_len(len);
            if need > left || need > AREA - offset {
                return Err(Broken);
            }
            let packet = &mut scratch[..len];
            self.memory.take(self.way, offset + WORD, packet)?;
            self.tail += need as u64;
            if is_loan {
                let (count, len) = self.borrowed(packet, stats, sink)?;
                packets += count;
                bytes += len;
                continue;
            }
            packets += 1;
            bytes += len;
            match &Headers::parse(packet) {
                // As from the network: a packet is filled up to words (IBA 7.7.5).
                Ok(_) if !packet.len().is_multiple_of(4) => stats.ring_rx_bad += 1,
                Ok((headers, payload)) => sink(Arrival::Packet(headers, &packet[payload.clone()])),
                Err(_) => stats.ring_rx_bad += 1,
            }
        }
        stats.ring_rx_packets += packets as u64;
        stats.ring_rx_bytes += bytes as u64;
        self.state.tail.store(self.tail, Ordering::Relaxed);
        self.memory.tail(self.way).store(self.tail)?;
        self.borrower.decide(&self.memory, self.way)?;
        Ok(packets)
    }

    /// Gives the packets of a loan to `sink`; tells how many and how many bytes.
    fn borrowed(
        &mut self,
        record: &[u8],
        stats: &mut LinkStats,
        sink: &mut dyn FnMut(Arrival<'_>),
    ) -> Result<(usize, usize), Broken> {
        let loan = self.borrower.read(record, &self.memory, self.way)?;
        sink(Arrival::Loan(&loan));
        let (count, len, refused) = (loan.packets(), loan.bytes(), loan.was_refused());
        stats.ring_rx_borrowed += u64::from(count);
        if refused {
            self.borrower.refuse(&self.memory, self.way)?;
        }
        Ok((count as usize, len as usize))
    }
}

/// A look at a ring's consumer by a thread that is about to sleep, or just woke.
#[derive(Debug)]
pub struct Watch {
    memory: Arc<Memory>,
    way: Way,
    state: Arc<State>,
}

impl Watch {
    /// From now on the producer wakes us, once. Whoever sleeps afterwards asks [`Watch::has_something`] before.
    pub fn announce_sleep(&self) {
        if !self.state.broken.load(Ordering::Relaxed) {
            // Where the memory cannot be had, `has_something` keeps us awake to find that.
            let _ = self.memory.sleeping(self.way).store(1);
            fence(Ordering::SeqCst);
        }
    }

    /// The producer need not wake us.
    pub fn announce_awake(&self) {
        let sleeping = self.memory.sleeping(self.way);
        if sleeping.load().is_ok_and(|flag| flag != 0) {
            let _ = sleeping.store(0);
        }
    }

    /// Is there something to read?
    pub fn has_something(&self) -> bool {
        // Either the producer sees our flag, or we see its head.
        fence(Ordering::SeqCst);
        !self.state.broken.load(Ordering::Relaxed)
            && self.memory.head(self.way).load() != Ok(self.state.tail.load(Ordering::Relaxed))
    }
}
