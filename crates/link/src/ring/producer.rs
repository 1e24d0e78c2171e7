//! The writing end of one direction.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use ferroce_transport::Train;
use ferroce_wire::{Headers, Psn};

use super::loan::{LOAN, Lender, Lending, Record};
use super::shared::{AREA, Memory, PAGE, Way};
use super::{Broken, GIVEN_UP, HEADERS_MAX, WORD, WRAP, record_len};
use crate::payload::{Piece, Source};
use crate::{LinkStats, SendError};

/// An idle ring goes back to its start when it is past this offset: what is said little by little stays in one page.
const QUIET: usize = 2 << 10;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Producer {
    memory: Arc<Memory>,
    way: Way,
    /// Where the next record goes.
    head: u64,
    /// Up to where the consumer may read.
    shown: u64,
    /// What the consumer was last seen to have read.
    tail: u64,
    /// The position that is at the start of the area.
    base: u64,
    /// Bytes from the start of the area that were written to since it gave pages back.
    touched: usize,
    /// The system takes nothing back.
    keeps: bool,
    lender: Lender,
}

/// Why a packet was not written.
enum Trouble {
    /// The ring is full.
    Full,
    /// The program's memory is gone.
    Fault,
    /// The other process wrote what it must not, or the ring's memory cannot be had: the system has none.
    Broken,
}

impl From<Broken> for Trouble {
    fn from(Broken: Broken) -> Trouble {
        Trouble::Broken
    }
}

impl Producer {
    pub(super) fn new(memory: Arc<Memory>, way: Way) -> Producer {
        let lender = Lender::new(&memory, way);
        Producer { memory, way, head: 0, shown: 0, tail: 0, base: 0, touched: 0, keeps: false, lender }
    }

    /// Writes the packets of a train. What the ring has no room for is dropped and counted.
    ///
    /// # Errors
    /// The program's memory is gone (then the consumer will see nothing of the train), or the ring is broken.
    pub(super) fn send(&mut self, train: &Train, stats: &mut LinkStats) -> Result<Result<(), SendError>, Broken> {
        self.rest()?;
        let start = self.head;
        let mut source = Source::new(train);
        let mut header = PacketHeader::new(&train.head);
        let lent = self.lend(train, &mut source, stats)?;
        let (mut sent, mut bytes) = (u64::from(lent), u64::from(lent) * u64::from(train.mtu));
        for index in lent..train.packets {
            let last = index + 1 == train.packets;
            match &train.tail {
                Some(tail) if last => header = PacketHeader::new(tail),
                _ if index == 1 => header = PacketHeader::new(&train.middle()),
                _ => {}
            }
            header.set_psn(train.head.bth.psn.add(index));
            let payload = if last { train.len - index * train.mtu } else { train.mtu };
            match self.put_packet(&header, payload as usize, &mut source) {
                Ok(len) => {
                    sent += 1;
                    bytes += len as u64;
                }
                Err(Trouble::Full) => {
                    // Later packets would only be out of sequence.
                    stats.ring_tx_drop_full += u64::from(train.packets - index);
                    break;
                }
                Err(Trouble::Fault) => {
                    self.head = start;
                    stats.tx_fault += 1;
                    return Ok(Err(SendError::Fault));
                }
                Err(Trouble::Broken) => return Err(Broken),
            }
        }
        stats.ring_tx_packets += sent;
        stats.ring_tx_bytes += bytes;
        Ok(Ok(()))
    }

    /// Bytes that were written and not shown.
    pub(super) fn hidden(&self) -> usize {
        (self.head - self.shown) as usize
    }

    /// Lets the consumer see all that was written. Does it sleep? Then it has to be woken, once.
    ///
    /// # Errors
    /// The ring's memory cannot be had.
    pub(super) fn show(&mut self) -> Result<bool, Broken> {
        self.shown = self.head;
        // The records first, then the word of them.
        self.memory.head(self.way).store(self.head)?;
        // Either we see its flag, or it sees our head when it looks once more (`Watch`).
        fence(Ordering::SeqCst);
        let sleeping = self.memory.sleeping(self.way);
        let flag = sleeping.load()?;
        Ok(flag != 0 && sleeping.compare_swap(flag, 0)? == flag)
    }

    pub(super) fn withdraw(&self) -> bool {
        self.memory.withdraw()
    }

    /// Nothing is written any more, and the consumer shall know.
    pub(super) fn give_up(&self) {
        // Where the memory cannot be had the consumer finds that itself.
        let _ = self.memory.head(self.way).store(GIVEN_UP);
    }

    #[cfg(test)]
    pub(super) fn memory_and_way(&self) -> (&Memory, Way) {
        (&self.memory, self.way)
    }

    /// Goes back to the start of the area if the consumer has read all that was ever written. It looks where that is when it sees the next head.
    fn rest(&mut self) -> Result<(), Broken> {
        if self.offset() > QUIET {
            self.look_at_tail()?;
            if self.tail == self.head {
                self.start_anew()?;
            }
        }
        Ok(())
    }

    /// The next record, whose turn comes when all others were read, is at the start of the area.
    fn start_anew(&mut self) -> Result<(), Broken> {
        self.base = self.head;
        self.memory.base(self.way).store(self.base)
    }

    /// Bytes of pages behind the first one that were written to and could be given back.
    pub(super) fn spare(&self) -> usize {
        if self.keeps { 0 } else { self.touched.next_multiple_of(PAGE).saturating_sub(PAGE) }
    }

    /// Gives these pages back, if the consumer has read all that was written. False: it has not, or the system does not want them.
    ///
    /// # Errors
    /// The consumer wrote what it must not, or the ring's memory cannot be had.
    pub(super) fn give_back(&mut self) -> Result<bool, Broken> {
        self.look_at_tail()?;
        if self.tail != self.head || self.spare() == 0 {
            return Ok(false);
        }
        self.start_anew()?;
        match self.memory.give_back(self.way, self.touched) {
            Ok(()) => self.touched = PAGE,
            Err(error) => {
                log::debug!("rings keep their memory: {error}");
                self.keeps = true;
            }
        }
        Ok(!self.keeps)
    }

    fn offset(&self) -> usize {
        (self.head - self.base) as usize % AREA
    }

    /// Tells the consumer to go on at the start of the area, where the next record will be. The caller made sure of the room.
    fn wrap(&mut self) -> Result<(), Broken> {
        let offset = self.offset();
        self.memory.record(self.way, offset).store(WRAP)?;
        self.touched = AREA;
        self.head += (AREA - offset) as u64;
        Ok(())
    }

    pub(super) fn recall(&self) {
        self.lender.recall();
    }

    pub(super) fn lending(&self) -> Lending {
        self.lender.lending()
    }

    /// Lends what may be lent of a train, and tells how many packets that are.
    fn lend(&mut self, train: &Train, source: &mut Source<'_>, stats: &mut LinkStats) -> Result<u32, Broken> {
        let Some(record) = self.lender.record(train) else { return Ok(0) };
        match self.put_loan(&record) {
            Ok(()) => {}
            // Nor is there room for the packets, but it is known there how to say so.
            Err(Trouble::Full) => return Ok(0),
            Err(Trouble::Fault | Trouble::Broken) => return Err(Broken),
        }
        self.lender.lent(self.head);
        source.skip(record.packets * train.mtu);
        stats.ring_tx_lent += u64::from(record.packets);
        Ok(record.packets)
    }

    fn put_loan(&mut self, record: &Record) -> Result<(), Trouble> {
        let bytes = record.bytes();
        let offset = self.place(bytes.len())?;
        self.memory.record(self.way, offset).store(LOAN | bytes.len() as u64)?;
        self.memory.put(self.way, offset + WORD, bytes)?;
        self.head += record_len(bytes.len()) as u64;
        Ok(())
    }

    /// Makes room for a record with `len` bytes, in one piece, and tells where it is.
    fn place(&mut self, len: usize) -> Result<usize, Trouble> {
        let need = record_len(len);
        let to_end = AREA - self.offset();
        if need <= to_end {
            self.reserve(need)?;
        } else {
            self.reserve(to_end + need)?;
            self.wrap()?;
        }
        let offset = self.offset();
        self.touched = self.touched.max(offset + need);
        Ok(offset)
    }

    /// Writes one packet behind the others and gives its length.
    fn put_packet(&mut self, header: &PacketHeader, payload: usize, source: &mut Source<'_>) -> Result<usize, Trouble> {
        let len = header.len + payload + header.pad;
        let offset = self.place(len)?;
        self.memory.record(self.way, offset).store(len as u64)?;
        let mut at = offset + WORD;
        self.memory.put(self.way, at, header.bytes())?;
        at += header.len;
        let end = at + payload;
        while at < end {
            at += match source.next(end - at) {
                Piece::Memory { addr, len } => {
                    self.memory.put_memory(self.way, at, addr, len)?.map_err(|_| Trouble::Fault)?;
                    len
                }
                Piece::Bytes(bytes) => {
                    self.memory.put(self.way, at, bytes)?;
                    bytes.len()
                }
            };
        }
        self.memory.put(self.way, at, &[0; 3][..header.pad])?;
        self.head += record_len(len) as u64;
        Ok(len)
    }

    /// Makes sure of `need` free bytes.
    fn reserve(&mut self, need: usize) -> Result<(), Trouble> {
        let room = |producer: &Producer| AREA - (producer.head - producer.tail) as usize;
        if room(self) < need {
            self.look_at_tail()?;
            if room(self) < need {
                return Err(Trouble::Full);
            }
        }
        Ok(())
    }

    /// The tail is what the other process says: it can only have moved on, and not past what was written.
    fn look_at_tail(&mut self) -> Result<(), Broken> {
        let tail = self.memory.tail(self.way).load()?;
        if tail < self.tail || tail > self.head || !tail.is_multiple_of(8) {
            return Err(Broken);
        }
        self.tail = tail;
        Ok(())
    }
}

/// A packet's headers as bytes: the packets of a train differ in their PSN alone.
struct PacketHeader {
    bytes: [u8; HEADERS_MAX],
    len: usize,
    pad: usize,
}

impl PacketHeader {
    fn new(headers: &Headers) -> PacketHeader {
        let mut bytes = [0; HEADERS_MAX];
        headers.emit(&mut bytes);
        PacketHeader { bytes, len: headers.len(), pad: headers.bth.pad.into() }
    }

    fn set_psn(&mut self, psn: Psn) {
        self.bytes[9..12].copy_from_slice(&psn.get().to_be_bytes()[1..]);
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}
