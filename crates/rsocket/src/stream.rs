//! Both directions of a connection.

use crate::conn::{ConnData, SGE_LEN, Sge};
use crate::imm::{Control, Message};
use crate::iomap::{IOMAP_LEN, Iomap};
use crate::receive::{Receive, Span};
use crate::ring::Ring;

/// Work requests of the send queue that are kept for credits and control messages.
pub const CONTROL_MAX: u16 = 4;
/// Smallest queue.
pub const QUEUE_MIN: u16 = 16;
/// Largest queue.
pub const QUEUE_MAX: u16 = 0xfffe;
/// A stream is writable with so many bytes of send buffer.
pub const LOW_WATER: u32 = 2048;
/// A long transfer starts with a message of this size, so that the first bytes are soon on their way; each further one is twice as long.
pub const TRANSFER_MIN: u32 = 2048;
/// Longest message.
pub const TRANSFER_MAX: u32 = 65_536;

/// Sizes of one end.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Work requests of the send queue, [`QUEUE_MIN`] to [`QUEUE_MAX`].
    pub send_queue: u16,
    /// Receives that are posted, and messages that may be unread; [`QUEUE_MIN`] to [`QUEUE_MAX`].
    pub receive_queue: u16,
    /// Bytes, at least [`LOW_WATER`].
    pub send_buffer: u32,
    /// Bytes, even, 2 to 2^30.
    pub receive_buffer: u32,
    /// Longest payload that goes inline, in bytes.
    pub inline: u32,
}

/// Which directions are ended (`shutdown`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Reading.
    Read,
    /// Writing.
    Write,
    /// Both.
    Both,
}

/// Where a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Messages go both ways, even if one end sends no data any more.
    Connected,
    /// Over, by one end's wish.
    Disconnected,
    /// Broken: a message could not be sent, or the peer is no honest one.
    Broken,
}

/// What no honest peer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Data where there is no room.
    #[error("{len} bytes announced, where {granted} were granted")]
    MoreThanGranted {
        /// Announced.
        len: u32,
        /// Granted.
        granted: u32,
    },
    /// More messages than granted.
    #[error("a message without a credit")]
    NoCredit,
    /// An operation that version 1 does not have.
    #[error("operation {0} is not one of version 1")]
    Operation(u8),
}

/// What a work request carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nothing.
    Nothing,
    /// The first bytes of these, inline.
    Bytes([u8; IOMAP_LEN], usize),
    /// The next so many bytes of the program, inline.
    Inline(u32),
    /// The next bytes of the program, copied to these places of the send buffer. The second may be empty.
    Ring([Span; 2]),
}

/// An RDMA WRITE to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Post {
    /// For [`Stream::sent`].
    pub id: u64,
    /// The immediate, in the order of the host; None: without.
    pub imm: Option<u32>,
    /// Where the payload goes.
    pub remote: u64,
    /// Key of the memory there.
    pub key: u32,
    /// The payload.
    pub source: Source,
}

/// Kinds of work requests, in the upper half of an id; below are the bytes of the send buffer that it holds.
mod kind {
    pub(super) const DATA: u64 = 1 << 32;
    pub(super) const CONTROL: u64 = 2 << 32;
    pub(super) const DISCONNECT: u64 = 3 << 32;
}

/// A connection as one end sees it.
///
/// Whoever drives it
/// - gives each immediate that comes to [`received`](Stream::received) and posts a new receive for it,
/// - gives each completion of a work request to [`sent`](Stream::sent),
/// - looks at the entry [`target_entry`](Stream::target_entry) of its table of targets, if there is one: what the peer wrote there goes
///   to [`take_target`](Stream::take_target), and the entry is cleared,
/// - posts what [`next_control`](Stream::next_control) gives, after each of these and after reading,
/// - posts what [`write`](Stream::write) gives when the program sends,
/// - copies what [`next_data`](Stream::next_data) names when the program reads, and then says [`read`](Stream::read).
///
/// What is posted completes in order; a stream relies on it.
#[derive(Debug)]
pub struct Stream {
    limits: Limits,
    own: Own,
    peer: Peer,
    ring: Ring,
    receive: Receive,
    /// Messages sent, and how far they may go, modulo 2^16.
    seq: u16,
    limit: u16,
    /// What is left of the current target, and which entry of our table has the next one.
    target: Sge,
    target_at: usize,
    /// Data and mappings that are not completed.
    in_flight: u16,
    control_in_flight: u16,
    /// A message that ends a direction, and waits for room in the send queue.
    ending: Option<Control>,
    /// DISCONNECT is posted: nothing is sent any more.
    ended: bool,
    is_readable: bool,
    is_writable: bool,
    phase: Phase,
    /// The peer reads no more.
    is_deserted: bool,
}

/// The receive buffer as the peer reaches it.
#[derive(Clone, Copy, Debug)]
struct Own {
    addr: u64,
    key: u32,
}

#[derive(Clone, Copy, Debug)]
struct Peer {
    big_endian: bool,
    table: Sge,
    table_at: u32,
    iomaps: u16,
}

impl Stream {
    /// A connection that is just made. `buffer` is our receive buffer (its length is that of `limits`), `peer` what the peer said.
    pub fn new(limits: Limits, buffer: Sge, peer: &ConnData) -> Stream {
        assert!((QUEUE_MIN..=QUEUE_MAX).contains(&limits.send_queue), "{limits:?}");
        assert!((QUEUE_MIN..=QUEUE_MAX).contains(&limits.receive_queue), "{limits:?}");
        assert!(limits.send_buffer >= LOW_WATER && limits.receive_buffer >= 2, "{limits:?}");
        assert!(limits.receive_buffer <= 1 << 30 && limits.receive_buffer.is_multiple_of(2), "{limits:?}");
        Stream {
            limits,
            own: Own { addr: buffer.addr, key: buffer.key },
            peer: Peer { big_endian: peer.big_endian, table: peer.table, table_at: 1, iomaps: peer.iomaps },
            ring: Ring::new(limits.send_buffer),
            receive: Receive::new(limits.receive_buffer, limits.receive_queue),
            seq: 0,
            limit: peer.credits,
            target: peer.target,
            // The first came with the connection and stands for entry 0.
            target_at: 1,
            in_flight: 0,
            control_in_flight: 0,
            ending: None,
            ended: false,
            is_readable: true,
            is_writable: true,
            phase: Phase::Connected,
            is_deserted: false,
        }
    }

    /// Where the connection is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// May the program still send?
    pub fn is_writable(&self) -> bool {
        self.is_writable && self.phase == Phase::Connected
    }

    /// May more data come?
    pub fn is_readable(&self) -> bool {
        self.is_readable && self.phase == Phase::Connected
    }

    /// Bytes that the program may read.
    pub fn unread(&self) -> u32 {
        self.receive.unread()
    }

    /// Entries of the peer's table of mappings.
    pub fn peer_iomaps(&self) -> u16 {
        self.peer.iomaps
    }

    /// The peer has left the connection.
    pub fn disconnected(&mut self) {
        self.is_deserted = true;
        self.over();
    }

    fn over(&mut self) {
        if self.phase == Phase::Connected {
            self.phase = Phase::Disconnected;
        }
    }

    /// The connection is of no use any more.
    pub fn broken(&mut self) {
        if self.phase == Phase::Connected {
            self.phase = Phase::Broken;
        }
    }
}

/// Receiving.
impl Stream {
    /// An immediate came, in the order of the host.
    ///
    /// # Errors
    /// The peer does not keep to the protocol; the connection is broken.
    pub fn received(&mut self, imm: u32) -> Result<(), Violation> {
        if self.phase == Phase::Broken {
            // What comes after a violation is not believed.
            return Ok(());
        }
        let result = match Message::decode(imm) {
            Message::Data(len) => self.receive.data(len),
            Message::Credits(limit) => {
                self.limit = limit;
                Ok(())
            }
            // rdma-core does not count these although its peer pays a credit for each. Counting gives it back.
            Message::Mapping(_) => {
                self.receive.count();
                Ok(())
            }
            Message::Control(control) => {
                self.controlled(control);
                Ok(())
            }
            Message::Unknown(op, _) => Err(Violation::Operation(op)),
        };
        if result.is_err() {
            self.broken();
        }
        result
    }

    fn controlled(&mut self, control: Control) {
        match control {
            Control::Disconnect => self.disconnected(),
            Control::Shutdown if self.is_writable => self.is_readable = false,
            Control::Shutdown => self.over(),
            Control::Keepalive | Control::Other(_) => {}
        }
    }

    /// Where the next bytes for the program are in the receive buffer, after `skip` of them; None if there are no more.
    pub fn next_data(&self, skip: u32) -> Option<Span> {
        self.receive.next(skip)
    }

    /// The program has the next `len` bytes, no more than are unread; the peer may write over them.
    pub fn read(&mut self, len: u32) {
        self.receive.read(len);
    }
}

/// Sending.
impl Stream {
    /// Which entry of the table of targets has the next one, if it is needed.
    pub fn target_entry(&self) -> Option<usize> {
        (self.target.length == 0).then_some(self.target_at)
    }

    /// What stands in the entry: nothing is taken if its length is 0. True: taken, and the entry is to be cleared.
    pub fn take_target(&mut self, found: Sge) -> bool {
        if self.target.length != 0 || found.length == 0 {
            return false;
        }
        self.target = found;
        self.target_at = (self.target_at + 1) % crate::conn::TARGETS;
        true
    }

    /// Would [`write`](Stream::write) send something?
    pub fn has_room(&self) -> bool {
        self.has_slot() && self.ring.free() >= LOW_WATER && self.target.length != 0
    }

    /// Has the send queue room, and the peer given a credit?
    fn has_slot(&self) -> bool {
        self.is_writable() && self.in_flight < self.limits.send_queue - CONTROL_MAX && self.seq != self.limit
    }

    /// A message with the program's next bytes, of which there are `want`; at most `longest`. None: there is no room.
    pub fn write(&mut self, want: usize, longest: u32) -> Option<Post> {
        if want == 0 || !self.has_room() {
            return None;
        }
        let want = u32::try_from(want).unwrap_or(u32::MAX).min(longest).min(TRANSFER_MAX);
        let (len, source, held) = self.place(want.min(self.target.length));
        let post = Post {
            id: kind::DATA | u64::from(held),
            imm: Some(Message::Data(len).encode()),
            remote: self.target.addr,
            key: self.target.key,
            source,
        };
        self.seq = self.seq.wrapping_add(1);
        self.in_flight += 1;
        self.target.addr = self.target.addr.wrapping_add(len.into());
        self.target.length -= len;
        Some(post)
    }

    /// Takes room for up to `len` bytes: how many, where from, and how many bytes of the send buffer that holds.
    fn place(&mut self, len: u32) -> (u32, Source, u32) {
        if len <= self.limits.inline {
            return (len, Source::Inline(len), 0);
        }
        let len = len.min(self.ring.free());
        (len, Source::Ring(self.ring.take(len)), len)
    }

    /// Sends a mapping as entry `index` of the peer's table. None: there is no room.
    pub fn map(&mut self, index: u16, iomap: Iomap) -> Option<Post> {
        if index >= self.peer.iomaps || !self.has_slot() {
            return None;
        }
        self.seq = self.seq.wrapping_add(1);
        self.in_flight += 1;
        let table = u64::from(self.peer.table.length) * SGE_LEN as u64;
        Some(Post {
            id: kind::DATA,
            imm: Some(Message::Mapping(index).encode()),
            remote: self.peer.table.addr.wrapping_add(table).wrapping_add(u64::from(index) * IOMAP_LEN as u64),
            key: self.peer.table.key,
            source: Source::Bytes(iomap.to_bytes(self.peer.big_endian), IOMAP_LEN),
        })
    }

    /// Writes the program's next bytes, of which there are `want`, to `offset` of what the peer has mapped. None: there is no room, or
    /// the mapping ends before `offset`.
    pub fn write_mapped(&mut self, want: usize, longest: u32, iomap: &Iomap, offset: u64) -> Option<Post> {
        let (remote, left) = iomap.locate(offset)?;
        if want == 0 || !self.has_slot() || self.ring.free() < LOW_WATER {
            return None;
        }
        let want = u32::try_from(want).unwrap_or(u32::MAX).min(longest).min(TRANSFER_MAX);
        let (_, source, held) = self.place(want.min(left));
        self.in_flight += 1;
        Some(Post { id: kind::DATA | u64::from(held), imm: None, remote, key: iomap.sge.key, source })
    }

    /// What the stream has to say by itself: credits, or the end of a direction.
    pub fn next_control(&mut self) -> Option<Post> {
        if self.phase == Phase::Broken || self.ended || self.control_in_flight >= CONTROL_MAX {
            return None;
        }
        // Also when the peer has ended its direction meanwhile: it waits for the end of this one.
        if let Some(control) = self.ending.take() {
            self.control_in_flight += 1;
            self.ended = control == Control::Disconnect;
            let id = if self.ended { kind::DISCONNECT } else { kind::CONTROL };
            let imm = Some(Message::Control(control).encode());
            return Some(Post { id, imm, remote: 0, key: 0, source: Source::Nothing });
        }
        if self.phase != Phase::Connected || !self.receive.owes_grant() {
            return None;
        }
        self.control_in_flight += 1;
        let grant = self.receive.grant();
        let imm = Some(Message::Credits(grant.limit).encode());
        let Some(half) = grant.half else {
            return Some(Post { id: kind::CONTROL, imm, remote: 0, key: 0, source: Source::Nothing });
        };
        let sge = Sge { addr: self.own.addr + u64::from(half.offset), key: self.own.key, length: half.len };
        let mut bytes = [0; IOMAP_LEN];
        bytes[..SGE_LEN].copy_from_slice(&if self.peer.big_endian { sge.to_be_bytes() } else { sge.to_le_bytes() });
        let entry = self.peer.table_at;
        self.peer.table_at = if entry + 1 >= self.peer.table.length { 0 } else { entry + 1 };
        Some(Post {
            id: kind::CONTROL,
            imm,
            remote: self.peer.table.addr.wrapping_add(u64::from(entry) * SGE_LEN as u64),
            key: self.peer.table.key,
            source: Source::Bytes(bytes, SGE_LEN),
        })
    }

    /// A work request is completed, with success or not.
    pub fn sent(&mut self, id: u64, success: bool) {
        match id & !u64::from(u32::MAX) {
            kind::DATA => {
                self.in_flight = one_less(self.in_flight);
                self.ring.give_back(id as u32);
            }
            kind::CONTROL => self.control_in_flight = one_less(self.control_in_flight),
            kind::DISCONNECT => {
                self.control_in_flight = one_less(self.control_in_flight);
                self.over();
            }
            other => panic!("{other:#x} is no work request of a stream"),
        }
        if !success {
            self.broken();
        }
    }

    /// Has the peer got everything, or does it not matter any more? Before that, the queue pair must not go away.
    pub fn is_settled(&self) -> bool {
        let is_flushed = self.in_flight == 0 && self.control_in_flight == 0 && self.ending.is_none();
        is_flushed || self.is_deserted || self.phase == Phase::Broken
    }

    /// The program ends directions (`shutdown`). The peer is told by [`next_control`](Stream::next_control).
    pub fn shutdown(&mut self, half: Half) {
        if self.phase != Phase::Connected || self.ended {
            return;
        }
        let was_writable = self.is_writable;
        self.is_readable &= half == Half::Write;
        self.is_writable &= half == Half::Read;
        if !self.is_readable && !self.is_writable {
            self.ending = Some(Control::Disconnect);
        } else if was_writable && !self.is_writable {
            self.ending = Some(Control::Shutdown);
        }
    }
}

/// Of work requests in flight, when one is completed.
fn one_less(in_flight: u16) -> u16 {
    in_flight.checked_sub(1).expect("a completion belongs to a work request that was posted")
}
