//! Packets of one socket on their way to the system: cut into packets, summed, put into GSO batches.

use ferroce_core::mem;
use ferroce_transport::Train;
use ferroce_wire::icrc;
use ferroce_wire::{BTH_LEN, Headers, ICRC_LEN, Psn};

use super::arena::Arena;
use super::sum::PathSum;
use super::sys::{self, MAX_PIECES, Message};
use crate::SendError;
use crate::payload::{Piece, Source};

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

/// Looks at a packet that was queued; first its Identification.
pub(super) type Inspect<'a> = dyn FnMut(u16, &mut [u8]) + 'a;

/// What one socket has queued.
pub(super) struct Queue {
    /// The ICRC up to the BTH for this socket's addresses.
    sum: PathSum,
    limits: Limits,
    pieces: Vec<sys::Piece>,
    batches: Vec<Batch>,
    owners: Vec<Owner>,
}

/// Where a queue was, to go back to when a train turns out to be unreadable.
struct Mark {
    arena: usize,
    pieces: usize,
    last_piece: Option<sys::Piece>,
    batches: usize,
    last_batch: Option<Batch>,
    owners: usize,
    last_owner: Option<Owner>,
}

impl Queue {
    pub(super) fn new(sum: PathSum, limits: Limits) -> Queue {
        Queue { sum, limits, pieces: Vec::new(), batches: Vec::new(), owners: Vec::new() }
    }

    /// Bytes of arena that a train may take.
    pub(super) fn arena_need(train: &Train) -> usize {
        train.len as usize + train.packets as usize * OVERHEAD
    }

    /// Number of datagrams queued.
    pub(super) fn batches(&self) -> usize {
        self.batches.len()
    }

    /// From now on what is queued is for other addresses.
    ///
    /// # Panics
    /// If something is queued.
    pub(super) fn aim(&mut self, sum: PathSum) {
        assert!(self.batches.is_empty(), "what is queued is summed for the addresses of before");
        self.sum = sum;
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

    /// Cuts a train into packets and queues them, all or none. Shows each packet, with the Identification that it will have, to
    /// `inspect`, which may damage it.
    pub(super) fn push(
        &mut self,
        cookie: u64,
        train: &Train,
        arena: &mut Arena,
        mut inspect: Option<&mut Inspect<'_>>,
    ) -> Result<(), SendError> {
        let (len, mtu, packets) = (train.len as usize, train.mtu as usize, train.packets as usize);
        let mut source = Source::new(train);
        let mark = self.mark(arena);
        let mut header = Header::new(&train.head);
        for i in 0..packets {
            let last = i + 1 == packets;
            match &train.tail {
                Some(tail) if last => header = Header::new(tail),
                _ if i == 1 => header = Header::new(&train.middle()),
                _ => {}
            }
            header.set_psn(train.head.bth.psn.add(i as u32));
            let payload = if last { len - i * mtu } else { mtu };
            let start = arena.used();
            let Ok(identification) = self.push_packet(cookie, &header, payload, &mut source, arena) else {
                self.rewind(mark, arena);
                return Err(SendError::Fault);
            };
            if let Some(inspect) = &mut inspect {
                inspect(identification, arena.since(start));
            }
        }
        Ok(())
    }

    /// Queues one packet. Returns its Identification.
    fn push_packet(
        &mut self,
        cookie: u64,
        header: &Header,
        payload: usize,
        source: &mut Source<'_>,
        arena: &mut Arena,
    ) -> Result<u16, mem::Fault> {
        let wire = header.len + payload + header.pad + ICRC_LEN;
        let identification = self.place(cookie, wire);
        let addr = arena.addr(arena.used());
        let packet = arena.take(wire);
        let (headers, rest) = packet.split_at_mut(header.len);
        let (payload, rest) = rest.split_at_mut(payload);
        let (pad, icrc) = rest.split_at_mut(header.pad);

        let mut sum = self.sum.state(wire as u16, identification);
        sum = icrc::update(sum, header.masked());
        header.put(headers);
        sum = copy_to(source, payload, sum)?;
        if !pad.is_empty() {
            pad.fill(0);
            sum = icrc::update(sum, pad);
        }
        icrc.copy_from_slice(&icrc::finish(sum));
        self.push_piece(sys::Piece { addr, len: wire });
        Ok(identification)
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
                    && self.pieces.len() - batch.first_piece < MAX_PIECES =>
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
    fn push_piece(&mut self, piece: sys::Piece) {
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

    fn batch_pieces(&self, at: usize) -> &[sys::Piece] {
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
    pub(super) fn single(&mut self, at: usize, index: u16, arena: &mut Arena) -> Vec<sys::Piece> {
        let batch = self.batches[at];
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
                pieces.push(sys::Piece { addr: piece.addr + skipped, len });
            }
        }
        if let Some(last) = pieces.last() {
            // CRC is linear: the two sums over any bytes behind the Identification differ by the same.
            let behind = vec![0; wire - ICRC_LEN];
            let mut sum = |identification| icrc::update(self.sum.state(wire as u16, identification), &behind);
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

/// The headers of a packet as bytes. Most packets of a train differ in their PSN alone, and emitting is dearer than patching.
struct Header {
    /// With byte 4 of the BTH as the ICRC takes it.
    masked: [u8; OVERHEAD],
    len: usize,
    /// Byte 4 as it is sent.
    congestion: u8,
    /// Bytes of pad.
    pad: usize,
}

impl Header {
    fn new(headers: &Headers) -> Header {
        let mut masked = [0; OVERHEAD];
        headers.emit(&mut masked);
        let congestion = std::mem::replace(&mut masked[4], 0xff);
        Header { masked, len: headers.len(), congestion, pad: headers.bth.pad.into() }
    }

    fn set_psn(&mut self, psn: Psn) {
        // AckReq and its reserved bits share the word. One store of the word: the sum loads it as one.
        let word = u32::from(self.masked[8]) << 24 | psn.get();
        self.masked[8..12].copy_from_slice(&word.to_be_bytes());
    }

    fn masked(&self) -> &[u8] {
        &self.masked[..self.len]
    }

    /// Writes the headers as they are sent.
    fn put(&self, out: &mut [u8]) {
        match out.first_chunk_mut::<BTH_LEN>() {
            Some(out) if self.len == BTH_LEN => out.copy_from_slice(&self.masked[..BTH_LEN]),
            _ => out.copy_from_slice(self.masked()),
        }
        out[4] = self.congestion;
    }
}

/// Copies the next bytes of a payload to `out` and continues the sum over them.
fn copy_to(source: &mut Source<'_>, mut out: &mut [u8], mut sum: u32) -> Result<u32, mem::Fault> {
    while !out.is_empty() {
        let len = match source.next(out.len()) {
            Piece::Memory { addr, len } => {
                sum = mem::load_crc(addr, &mut out[..len], sum)?;
                len
            }
            Piece::Bytes(bytes) => {
                out[..bytes.len()].copy_from_slice(bytes);
                sum = icrc::update(sum, bytes);
                bytes.len()
            }
        };
        out = &mut out[len..];
    }
    Ok(sum)
}
