//! Packets of one socket on their way to the system: cut into packets, summed, put into GSO batches.

use ferroce_core::mem;
use ferroce_transport::{Payload, Span, Train};
use ferroce_wire::icrc::{self, Pseudo};
use ferroce_wire::{Bth, Headers, ICRC_LEN};

use super::arena::Arena;
use super::sys::{MAX_PIECES, Message, Piece};
use crate::SendError;

/// Smaller pieces of payload are copied beside their header: a piece of its own costs the system more than a copy costs us.
const GATHER_MIN: usize = 512;
/// Most bytes that a packet adds to its payload: BTH, the longest run of extended headers, pad, ICRC.
const OVERHEAD: usize = 64;

/// One datagram for the system: packets of one size, of which the last may be shorter.
#[derive(Clone, Copy, Debug)]
struct Batch {
    /// Its pieces, by number: these and up to the next batch's.
    first_piece: usize,
    /// Its owners, likewise.
    first_owner: usize,
    /// Size of every packet but the last.
    segment: usize,
    /// Packets.
    packets: u16,
    /// Bytes in all.
    bytes: usize,
    /// Another packet of at most `segment` bytes may follow.
    open: bool,
}

/// Consecutive packets of a batch that belong to one train.
#[derive(Clone, Copy, Debug)]
struct Owner {
    cookie: u64,
    packets: u16,
}

/// What a batch may hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Packets; 1 without GSO.
    pub(super) packets: u16,
    /// Bytes of UDP payload.
    pub(super) bytes: usize,
}

/// What one socket has queued.
pub(super) struct Queue {
    /// The ICRC up to the BTH for this socket's addresses.
    pseudo: Pseudo,
    limits: Limits,
    pieces: Vec<Piece>,
    batches: Vec<Batch>,
    owners: Vec<Owner>,
}

/// Where a queue was, to go back to when a train turns out to be unreadable.
struct Mark {
    arena: usize,
    pieces: usize,
    last_piece: Option<Piece>,
    batches: usize,
    last_batch: Option<Batch>,
    owners: usize,
    last_owner: Option<Owner>,
}

/// What to do with each packet besides queueing it, for middlewares.
pub(super) trait Inspect {
    /// Whether packets shall be whole in the arena, so that `packet` sees all of them.
    fn whole(&self) -> bool;
    /// Looks at a packet (from its header on, as far as it is in the arena) and may damage it. `identification` as it will go out.
    fn packet(&mut self, identification: u16, bytes: &mut [u8]);
}

impl Queue {
    pub(super) fn new(pseudo: Pseudo, limits: Limits) -> Queue {
        Queue { pseudo, limits, pieces: Vec::new(), batches: Vec::new(), owners: Vec::new() }
    }

    /// Bytes of arena that a train may take.
    pub(super) fn arena_need(train: &Train) -> usize {
        train.len as usize + train.packets as usize * OVERHEAD
    }

    /// Number of datagrams queued.
    pub(super) fn batches(&self) -> usize {
        self.batches.len()
    }

    /// From now on every packet is a datagram of its own.
    pub(super) fn stop_batching(&mut self) {
        self.limits.packets = 1;
    }

    /// Forgets what is queued. The caller rewinds the arena.
    pub(super) fn clear(&mut self) {
        self.pieces.clear();
        self.batches.clear();
        self.owners.clear();
    }

    /// Cuts a train into packets and queues them, all or none.
    pub(super) fn push(
        &mut self,
        cookie: u64,
        train: &Train,
        arena: &mut Arena,
        inspect: &mut dyn Inspect,
    ) -> Result<(), SendError> {
        let (len, mtu, packets) = (train.len as usize, train.mtu as usize, train.packets as usize);
        assert!(
            packets == 1 || packets > 1 && train.tail.is_some() && (packets - 1) * mtu < len && len <= packets * mtu,
            "a train of {packets} packets of {mtu} bytes does not make {len} bytes"
        );
        let mut source = Source::new(&train.payload, len);
        let mark = self.mark(arena);
        for i in 0..packets {
            let last = i + 1 == packets;
            let headers = match &train.tail {
                _ if i == 0 => train.head,
                Some(tail) if last => *tail,
                _ => {
                    Headers::new(Bth { opcode: train.body, ack_req: false, solicited: false, pad: 0, ..train.head.bth })
                }
            };
            let headers = Headers { bth: Bth { psn: train.head.bth.psn.add(i as u32), ..headers.bth }, ..headers };
            let payload = if last { len - i * mtu } else { mtu };
            if self.push_packet(cookie, &headers, payload, &mut source, arena, inspect).is_err() {
                self.rewind(mark, arena);
                return Err(SendError::Fault);
            }
        }
        Ok(())
    }

    fn push_packet(
        &mut self,
        cookie: u64,
        headers: &Headers,
        payload: usize,
        source: &mut Source<'_>,
        arena: &mut Arena,
        inspect: &mut dyn Inspect,
    ) -> Result<(), mem::Fault> {
        let header = headers.len();
        let pad = usize::from(headers.bth.pad);
        let wire = header + payload + pad + ICRC_LEN;
        let identification = self.place(cookie, wire);
        let gather_min = if inspect.whole() { usize::MAX } else { GATHER_MIN };

        // What stands in the arena without a gap goes to the system as one piece; `start` is where the next one begins.
        let first = arena.used();
        let mut start = first;
        headers.emit(arena.take(header));
        let mut sum = icrc::body(self.pseudo.state(wire as u16, identification), arena.since(first));
        let mut left = payload;
        while left > 0 {
            let chunk = source.next(left);
            left -= chunk.len();
            sum = match chunk {
                Chunk::Memory { addr, len, stable: true } if len >= gather_min => {
                    sum = mem::crc(addr, len, sum)?;
                    self.push_piece(Piece { addr: arena.addr(start), len: arena.used() - start });
                    self.push_piece(Piece { addr: addr as usize, len });
                    start = arena.used();
                    sum
                }
                Chunk::Memory { addr, len, .. } => mem::load_crc(addr, arena.take(len), sum)?,
                Chunk::Bytes(bytes) => {
                    arena.take(bytes.len()).copy_from_slice(bytes);
                    icrc::update(sum, bytes)
                }
            };
        }
        arena.take(pad).fill(0);
        sum = icrc::update(sum, &[0; 3][..pad]);
        arena.take(ICRC_LEN).copy_from_slice(&icrc::finish(sum));
        self.push_piece(Piece { addr: arena.addr(start), len: arena.used() - start });
        inspect.packet(identification, arena.since(first));
        Ok(())
    }

    /// Finds the batch for a packet of `wire` bytes, which must be queued next. Returns its Identification: an unconnected
    /// socket with Don't Fragment sends 0, and a batch is cut into packets with 0, 1, 2 ...
    fn place(&mut self, cookie: u64, wire: usize) -> u16 {
        assert!(wire <= self.limits.bytes, "a packet of {wire} bytes fits into no datagram");
        match self.batches.last_mut() {
            Some(batch)
                if batch.open
                    && wire <= batch.segment
                    && batch.bytes + wire <= self.limits.bytes
                    // A packet has fewer than twice as many pieces as it has room for gathered ones, and a header.
                    && self.pieces.len() - batch.first_piece + 2 * (wire / GATHER_MIN) + 2 <= MAX_PIECES =>
            {
                let index = batch.packets;
                batch.packets += 1;
                batch.bytes += wire;
                batch.open = wire == batch.segment && batch.packets < self.limits.packets;
                match self.owners.last_mut() {
                    Some(owner) if owner.cookie == cookie => owner.packets += 1,
                    _ => self.owners.push(Owner { cookie, packets: 1 }),
                }
                index
            }
            _ => {
                self.batches.push(Batch {
                    first_piece: self.pieces.len(),
                    first_owner: self.owners.len(),
                    segment: wire,
                    packets: 1,
                    bytes: wire,
                    open: self.limits.packets > 1,
                });
                self.owners.push(Owner { cookie, packets: 1 });
                0
            }
        }
    }

    /// Adds a piece to the last batch, together with the one before if they are neighbours.
    fn push_piece(&mut self, piece: Piece) {
        let first = self.batches.last().expect("a packet is placed before its pieces").first_piece;
        match self.pieces[first..].last_mut() {
            Some(last) if last.addr + last.len == piece.addr => last.len += piece.len,
            _ => self.pieces.push(piece),
        }
    }

    fn mark(&self, arena: &Arena) -> Mark {
        Mark {
            arena: arena.used(),
            pieces: self.pieces.len(),
            last_piece: self.pieces.last().copied(),
            batches: self.batches.len(),
            last_batch: self.batches.last().copied(),
            owners: self.owners.len(),
            last_owner: self.owners.last().copied(),
        }
    }

    fn rewind(&mut self, mark: Mark, arena: &mut Arena) {
        arena.rewind(mark.arena);
        restore(&mut self.pieces, mark.pieces, mark.last_piece);
        restore(&mut self.batches, mark.batches, mark.last_batch);
        restore(&mut self.owners, mark.owners, mark.last_owner);
    }

    /// The queued datagrams from the `from`th on, for the system.
    pub(super) fn messages(&self, from: usize) -> impl Iterator<Item = Message<'_>> {
        (from..self.batches.len()).map(|at| {
            let batch = &self.batches[at];
            let segment = if batch.packets > 1 { batch.segment as u16 } else { 0 };
            Message { pieces: self.batch_pieces(at), segment }
        })
    }

    fn batch_pieces(&self, at: usize) -> &[Piece] {
        let end = self.batches.get(at + 1).map_or(self.pieces.len(), |next| next.first_piece);
        &self.pieces[self.batches[at].first_piece..end]
    }

    /// Packets and bytes of a datagram.
    pub(super) fn size(&self, at: usize) -> (u16, usize) {
        (self.batches[at].packets, self.batches[at].bytes)
    }

    /// The cookies of the trains in a datagram, with the number of packets of each.
    pub(super) fn owners(&self, at: usize) -> impl Iterator<Item = (u64, u16)> {
        let end = self.batches.get(at + 1).map_or(self.owners.len(), |next| next.first_owner);
        self.owners[self.batches[at].first_owner..end].iter().map(|owner| (owner.cookie, owner.packets))
    }

    /// The pieces of the `index`th packet of a datagram, made ready to go as a datagram of its own: its Identification will be 0,
    /// and its ICRC is put right for that.
    pub(super) fn single(&self, at: usize, index: u16, arena: &mut Arena) -> Vec<Piece> {
        let batch = &self.batches[at];
        let mut skip = batch.segment * usize::from(index);
        let wire = batch.segment.min(batch.bytes - skip);
        let mut left = wire;
        let mut pieces = Vec::new();
        for piece in self.batch_pieces(at) {
            let skipped = skip.min(piece.len);
            skip -= skipped;
            let len = (piece.len - skipped).min(left);
            left -= len;
            if len > 0 {
                pieces.push(Piece { addr: piece.addr + skipped, len });
            }
        }
        if let Some(last) = pieces.last() {
            // CRC is linear: the two sums over any bytes behind the Identification differ by the same.
            let behind = vec![0; wire - ICRC_LEN];
            let sum = |identification| icrc::update(self.pseudo.state(wire as u16, identification), &behind);
            let icrc = arena.ending_at::<ICRC_LEN>(last.addr + last.len);
            *icrc = (u32::from_le_bytes(*icrc) ^ sum(index) ^ sum(0)).to_le_bytes();
        }
        pieces
    }
}

fn restore<T>(list: &mut Vec<T>, len: usize, last: Option<T>) {
    list.truncate(len);
    if let (Some(slot), Some(last)) = (list.last_mut(), last) {
        *slot = last;
    }
}

/// A run of payload bytes.
enum Chunk<'a> {
    /// User memory; `stable` if the program may not change it before completion.
    Memory {
        addr: u64,
        len: usize,
        stable: bool,
    },
    Bytes(&'a [u8]),
}

impl Chunk<'_> {
    fn len(&self) -> usize {
        match self {
            Chunk::Memory { len, .. } => *len,
            Chunk::Bytes(bytes) => bytes.len(),
        }
    }
}

/// What is left of a train's payload.
enum Source<'a> {
    Spans { first: Span, rest: &'a [Span], stable: bool },
    Bytes(&'a [u8]),
}

impl<'a> Source<'a> {
    fn new(payload: &'a Payload, len: usize) -> Source<'a> {
        const EMPTY: Span = Span { addr: 0, len: 0 };
        match payload {
            Payload::Gather(spans) => {
                let have: usize = spans.iter().map(|span| span.len as usize).sum();
                assert!(have >= len, "a train of {len} bytes has {have} bytes of payload");
                Source::Spans { first: EMPTY, rest: spans, stable: true }
            }
            Payload::Copy(span) => {
                assert!(span.len as usize >= len, "a train of {len} bytes has {} bytes of payload", span.len);
                Source::Spans { first: *span, rest: &[], stable: false }
            }
            Payload::Inline(bytes, start) => Source::Bytes(&bytes[*start as usize..][..len]),
        }
    }

    /// The next `limit` bytes, or fewer. Never none: the length of the payload was checked at the start.
    fn next(&mut self, limit: usize) -> Chunk<'a> {
        match self {
            Source::Spans { first, rest, stable } => {
                while first.len == 0 {
                    let (next, others) = rest.split_first().expect("payload was counted");
                    (*first, *rest) = (*next, others);
                }
                let len = limit.min(first.len as usize);
                let addr = first.addr;
                *first = Span { addr: addr + len as u64, len: first.len - len as u32 };
                Chunk::Memory { addr, len, stable: *stable }
            }
            Source::Bytes(bytes) => {
                let (head, rest) = bytes.split_at(limit.min(bytes.len()));
                *bytes = rest;
                Chunk::Bytes(head)
            }
        }
    }
}
