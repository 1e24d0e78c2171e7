//! Packets between two lanes of one host through memory that both map: no system call while the peer is awake, no ICRC.
//!
//! A [`Ring`] is two byte rings, one for each direction, in a sealed memory file. One lane makes it and offers it to the other; how the
//! descriptor gets there is not this module's affair. Positions count bytes and never wrap around; a packet is one record: a word with
//! its length, then headers, payload and pad as on the wire, padded to 8 bytes, in one piece. A record with the length "all ones" says
//! that the next one is at the start of the area. When all was read, the producer may begin at the start again (it tells the position
//! that is there, the base): two lanes that say little touch few pages. Those that were touched for more can be given back to the system then
//! ([`Ring::give_back`]).
//!
//! The payload of large WRITEs may stay where it is, and be fetched by a consumer that trusts the producer, with one copy: see [`Loan`].
//! Who borrows waits in the kernel where its peer's memory is served by a program (userfaultfd, FUSE): what is said below of bounded work is not so then.
//!
//! # Trust
//! The peer is a process of the same user, and may be broken or hostile. Whatever it writes into the memory, this side reads and writes
//! only inside of it, does bounded work, and looks at a packet only after it has copied it. It may take pages away, too, and the system may
//! have none in their place (as for those touched for the first time). A position or length that no honest peer writes, and memory that
//! cannot be had, breaks the ring for good: it carries nothing any more, and the queue pairs that use it end by their timeouts. Who finds that
//! tells the peer, by such a position of its own: both ends know that new queue pairs have to go another way. What an
//! intact ring brings is treated as what the network brings.
//!
//! # Sleeping
//! Each direction has a flag that says that its consumer sleeps. The consumer sets it and looks at the ring once more before it sleeps
//! ([`Watch`]); the producer looks at it after it has shown packets, and wakes the consumer if it is set ([`Waker`]).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ferroce_transport::Train;
use ferroce_wire::MAX_HEADER_LEN;

use crate::{LinkStats, SendError};

mod consumer;
mod loan;
mod producer;
mod shared;
mod wake;

pub use consumer::Watch;
pub use loan::{Arrival, Lending, Loan, Lost};
pub use wake::{WakeName, WakeSocket, Waker};

use consumer::Consumer;
use producer::Producer;
use shared::{Memory, Way};

/// Bytes of the word before a packet.
const WORD: usize = 8;
/// The word of a record that has no packet: the next one is at the start of the area.
const WRAP: u64 = u32::MAX as u64;
/// The head of a direction whose producer has given the ring up: no position, so that it breaks the ring at the other end, too.
const GIVEN_UP: u64 = u64::MAX;
/// Bytes of the longest headers.
const HEADERS_MAX: usize = MAX_HEADER_LEN;
/// Bytes of packets and their bookkeeping that each direction holds.
pub const CAPACITY: usize = shared::AREA;
/// Bytes of the longest packet: headers, payload of the largest MTU, pad.
pub const PACKET_MAX: usize = HEADERS_MAX + 4096 + 3;

/// Bytes that a packet of `len` bytes takes.
fn record_len(len: usize) -> usize {
    WORD + len.next_multiple_of(8)
}

/// Why offered memory is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is no memory file, or could be cut short later.
    #[error("it is not sealed against changes of its size")]
    NotSealed,
    /// It has another size than rings have.
    #[error("it has not the size of a ring")]
    Size,
    /// It does not begin as a ring of this version.
    #[error("it is no ring of this version")]
    Version,
    /// Who offered it did not wait any longer.
    #[error("it was withdrawn")]
    Withdrawn,
    /// It cannot be mapped, for the reason that the errno tells.
    #[error("it cannot be mapped: {}", std::io::Error::from_raw_os_error(*.0))]
    System(i32),
}

/// The peer wrote what no honest peer writes, or memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Broken;

/// One lane's ends of a ring. One thread at a time uses it; it never blocks.
#[derive(Debug)]
pub struct Ring {
    producer: Producer,
    consumer: Consumer,
    broken: bool,
}

impl Ring {
    /// Makes a ring. The descriptor is for the peer, who gives it to [`Ring::accept`].
    ///
    /// # Errors
    /// No descriptor, no memory, a sandbox.
    pub fn offer() -> std::io::Result<(Ring, OwnedFd)> {
        let (memory, fd) = Memory::create()?;
        Ok((Ring::new(memory, Way::There, Way::Back), fd))
    }

    /// Takes the ring that a peer offers.
    ///
    /// # Errors
    /// It is none.
    pub fn accept(fd: &OwnedFd) -> Result<Ring, Refusal> {
        Ok(Ring::new(Memory::open(fd)?, Way::Back, Way::There))
    }

    fn new(memory: Memory, to: Way, from: Way) -> Ring {
        let memory = Arc::new(memory);
        let producer = Producer::new(Arc::clone(&memory), to);
        Ring { producer, consumer: Consumer::new(memory, from), broken: false }
    }

    /// Writes a train for the peer, who sees it after [`Ring::show`]. What the ring has no room for is dropped and counted, as is
    /// everything when the ring is broken.
    ///
    /// # Errors
    /// [`SendError::Fault`]: memory of the train is gone; the peer will see nothing of it.
    pub fn send(&mut self, train: &Train, stats: &mut LinkStats) -> Result<(), SendError> {
        if !self.broken {
            match self.producer.send(train, stats) {
                Ok(outcome) => return outcome,
                Err(Broken) => self.break_off(stats),
            }
        }
        stats.ring_tx_drop_broken += u64::from(train.packets);
        Ok(())
    }

    /// For who offered it: takes the offer back, so that nobody can take it any more. False: the peer has taken it.
    pub fn withdraw(&self) -> bool {
        self.producer.withdraw()
    }

    /// Bytes of memory that what we wrote has taken and that could be given back: all but a page.
    pub fn spare(&self) -> usize {
        if self.broken { 0 } else { self.producer.spare() }
    }

    /// Gives that memory back if the peer has read all of it. What is written later takes it anew, which costs time.
    pub fn give_back(&mut self, stats: &mut LinkStats) {
        if self.broken {
            return;
        }
        match self.producer.give_back() {
            Ok(done) => stats.ring_given_back += u64::from(done),
            Err(Broken) => self.break_off(stats),
        }
    }

    /// Bytes that were written and not shown to the peer.
    pub fn hidden(&self) -> usize {
        self.producer.hidden()
    }

    /// Lets the peer see all that was written. Does it sleep? Then whoever asks wakes it: the answer is given once.
    #[must_use]
    pub fn show(&mut self, stats: &mut LinkStats) -> bool {
        if self.broken {
            return false;
        }
        self.producer.show().unwrap_or_else(|Broken| {
            self.break_off(stats);
            false
        })
    }

    /// Asks the other end to lend memory: for a process that trusts it (see [`Loan`]).
    pub fn borrow(&mut self) {
        self.consumer.borrow();
    }

    /// Takes back what was lent through this ring.
    pub fn recall(&self) {
        self.producer.recall();
    }

    /// Tells whether memory may be lent through this ring, and takes back what was.
    pub fn lending(&self) -> Lending {
        self.producer.lending()
    }

    /// Reads packets of about `budget` bytes and gives them to `sink`. Tells how many records there were; 0: nothing is waiting.
    pub fn recv(
        &mut self,
        budget: usize,
        scratch: &mut [u8; PACKET_MAX],
        stats: &mut LinkStats,
        sink: &mut dyn FnMut(Arrival<'_>),
    ) -> usize {
        if self.broken {
            return 0;
        }
        match self.consumer.recv(budget, scratch, stats, sink) {
            Ok(packets) => packets,
            Err(Broken) => {
                self.break_off(stats);
                0
            }
        }
    }

    /// Nothing is waiting, or nothing of it will be read.
    pub fn is_empty(&self) -> bool {
        self.broken || self.consumer.is_empty()
    }

    /// The peer wrote what it must not; the ring is of no more use.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Neither end has given it up, as far as can be seen: also before what the peer says of that was read.
    pub fn is_usable(&self) -> bool {
        !self.broken && !self.consumer.is_given_up()
    }

    /// For the thread that sleeps.
    pub fn watch(&self) -> Watch {
        self.consumer.watch()
    }

    fn break_off(&mut self, stats: &mut LinkStats) {
        self.broken = true;
        self.consumer.stop();
        self.producer.give_up();
        stats.ring_broken += 1;
        log::warn!("the ring to a process of this host is broken, or was given up there: it is used no more");
    }
}

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod tests;
